"""Drops contents from the page cache in a process of its own, so that pushing goes on meanwhile.

Dropping a small file costs two thirds of what pushing one does (open, fadvise, close), and a reader
behind whom files are dropped waits for pushes alone. The prefetch worker forks this process when it
first has something to drop. The process ends when its pipe is closed, or with the worker. One
thread uses a `Dropper`.
"""

import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from ...orders.plan import Entries
from ...system import syscalls

log = logging.getLogger("diesel.mount")

PIECE_ENTRIES = 256
"""Files in one message; a pipe's buffer holds many such messages."""

PIECES_MAX = 8
"""Messages without an answer yet. Their files, some MiB, count as dropped already."""

END_S = 0.2
"""How long `close` waits for the process to end."""

DropPages = Callable[[list[int]], None]
"""Drops the pages of these entries."""


class Dropper:
    """The worker's end: it sends *pieces* (some entries) over a pipe, and gets a byte for each."""

    def __init__(self, make: Callable[[], DropPages]) -> None:
        """`make` is called in the new process, in which no file of the worker is open."""
        self._make = make
        self.pid = 0
        """The process; 0 while there is none."""
        self._pieces = self._answers = -1  # pipes
        self._unanswered = 0  # pieces

    def drop(self, entries: Entries, on_progress: Callable[[], None]) -> None:
        """Have these entries dropped soon. Calls `on_progress` as answers come."""
        if not self.pid and len(entries):
            self._start()
        for start in range(0, len(entries), PIECE_ENTRIES):
            piece = entries[start : start + PIECE_ENTRIES].astype("<u4")
            try:
                while self._unanswered >= PIECES_MAX:
                    if not (answered := len(os.read(self._answers, PIECES_MAX))):
                        raise BrokenPipeError
                    self._unanswered -= answered
                    on_progress()
                os.write(self._pieces, len(piece).to_bytes(4, "little") + piece.tobytes())
                self._unanswered += 1
            except BrokenPipeError:
                self._reap()
                return

    def _reap(self) -> None:
        """Tidy up after the process was killed or failed: the next drop starts another one.

        Pages that it should have dropped are freed by the kernel when that needs room.
        """
        os.close(self._pieces)
        os.close(self._answers)
        _, status = os.waitpid(self.pid, 0)
        log.error("the process that drops contents has ended (status %d): starting another", status)
        self.pid = self._unanswered = 0

    def close(self) -> None:
        """End the process."""
        if not self.pid:
            return
        os.close(self._pieces)
        os.close(self._answers)
        end_s = time.monotonic() + END_S
        while not os.waitpid(self.pid, os.WNOHANG)[0]:
            if time.monotonic() > end_s:
                os.kill(self.pid, signal.SIGKILL)
                break  # a process that waits for the mount ends when the mount does
            time.sleep(0.002)
        self.pid = 0

    def _start(self) -> None:
        pieces, self._pieces = os.pipe2(os.O_CLOEXEC)
        self._answers, answers = os.pipe2(os.O_CLOEXEC)
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid:
            os.close(pieces)
            os.close(answers)
            return
        try:
            syscalls.die_with_parent(signal.SIGKILL)
            if os.getppid() == parent:
                _close_all_but(pieces, answers)
                _serve(self._make(), pieces, answers)
        except BaseException:
            log.exception("the process that drops contents fails")
            os._exit(1)
        os._exit(0)


def _serve(drop: DropPages, pieces: int, answers: int) -> None:
    with open(pieces, "rb") as stream:
        while count := int.from_bytes(stream.read(4), "little"):
            drop(np.frombuffer(stream.read(4 * count), "<u4").tolist())
            with suppress(BrokenPipeError):  # the worker has ended
                os.write(answers, b".")


def _close_all_but(*open_files: int) -> None:
    """Close all files of the worker: the connection to the kernel must end with the worker."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in open_files:
            with suppress(OSError):
                os.close(int(name))
