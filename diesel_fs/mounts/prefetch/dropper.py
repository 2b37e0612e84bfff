"""A process beside the helper that drops contents, so that pushing goes on meanwhile.

Dropping a small file costs two thirds of what pushing one does (open, fadvise, close), and a reader
behind whom files are dropped waits for pushing alone. The process is forked when something is to be
dropped for the first time, and ends with its pipe, or with the helper. Used by one thread.
"""

import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from ...system import syscalls

log = logging.getLogger("diesel.mount")

PIECE_ENTRIES = 256
"""Files in a message; they fit a pipe's buffer many times over."""

PIECES_MAX = 8
"""Messages that are not answered: what is counted as dropped and still there is some MiB."""

END_S = 0.2

_Entries = npt.NDArray[np.uint32]
DropPages = Callable[[list[int]], None]


class Dropper:
    """The helper's end."""

    def __init__(self, make: Callable[[], DropPages]) -> None:
        """`make` is called in the new process, where no file of ours is open."""
        self._make = make
        self._child = 0
        self._pieces = self._answers = -1
        self._waiting = 0

    def drop(self, entries: _Entries, on_progress: Callable[[], None]) -> None:
        """Has these dropped soon; `on_progress` is called as it goes."""
        if not self._child and len(entries):
            self._start()
        for start in range(0, len(entries), PIECE_ENTRIES):
            piece = entries[start : start + PIECE_ENTRIES].astype("<u4")
            try:
                while self._waiting >= PIECES_MAX:
                    if not (answered := len(os.read(self._answers, PIECES_MAX))):
                        raise BrokenPipeError
                    self._waiting -= answered
                    on_progress()
                os.write(self._pieces, len(piece).to_bytes(4, "little") + piece.tobytes())
                self._waiting += 1
            except BrokenPipeError:
                self._died()
                return

    def _died(self) -> None:
        """The process was killed, or failed: the next drop starts another. What it was told and did
        not do, the kernel frees when it needs room.
        """
        os.close(self._pieces)
        os.close(self._answers)
        _, status = os.waitpid(self._child, 0)
        log.error("the process that drops contents has ended (%d): starting another", status)
        self._child = self._waiting = 0

    def close(self) -> None:
        """Ends the process."""
        if not self._child:
            return
        os.close(self._pieces)
        os.close(self._answers)
        end_s = time.monotonic() + END_S
        while not os.waitpid(self._child, os.WNOHANG)[0]:
            if time.monotonic() > end_s:
                os.kill(self._child, signal.SIGKILL)
                break  # where it waits for the mount, it goes when that does
            time.sleep(0.002)
        self._child = 0

    def _start(self) -> None:
        theirs, self._pieces = os.pipe2(os.O_CLOEXEC)
        self._answers, answers = os.pipe2(os.O_CLOEXEC)
        parent = os.getpid()
        self._child = os.fork()
        if self._child:
            os.close(theirs)
            os.close(answers)
            return
        try:
            syscalls.die_with_parent(signal.SIGKILL)
            if os.getppid() == parent:
                _close_all_but(theirs, answers)
                _serve(self._make(), theirs, answers)
        except BaseException:
            log.exception("contents cannot be dropped")
            os._exit(1)
        os._exit(0)


def _serve(drop: DropPages, pieces: int, answers: int) -> None:
    with open(pieces, "rb") as stream:
        while count := int.from_bytes(stream.read(4), "little"):
            drop(np.frombuffer(stream.read(4 * count), "<u4").tolist())
            with suppress(BrokenPipeError):  # the helper ends, and this was its last wish
                os.write(answers, b".")


def _close_all_but(*kept: int) -> None:
    """Nothing of the helper's may live on in here: least of all the connection to the kernel."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with suppress(OSError):
                os.close(int(name))
