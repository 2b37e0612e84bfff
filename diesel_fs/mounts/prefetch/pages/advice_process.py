"""Gives the kernel advice about pages (to drop or to read them) from a process of its own.

Meanwhile the prefetch worker goes on pushing: to drop a small file from the page cache (open,
fadvise, close) takes two thirds of the time of a push. The worker forks this process at the first
advice, or earlier (`start`). The process ends when its pipe is closed, or with the worker. One
thread uses an `AdviceProcess`.
"""

import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from ....system import syscalls

log = logging.getLogger("diesel.mount")

PIECE_PARTS = 256
"""A pipe's buffer holds several messages of this size."""

PIECES_MAX = 8
"""The most messages without an answer. Their files may still be in memory, although the planner
counts them as dropped."""

END_S = 0.2

PART = np.dtype([("entry", "<u4"), ("start", "<u8"), ("size", "<u8")])
"""A part of a file: its entry, the first byte, and how many bytes (0: up to the file's end)."""

Parts = npt.NDArray[np.void]
Advise = Callable[[int, Parts], None]
"""Gives one advice of posix_fadvise(2) on these parts."""


def whole_files(entries: npt.NDArray[np.uint32] | list[int]) -> Parts:
    parts = np.zeros(len(entries), PART)
    parts["entry"] = entries
    return parts


class AdviceProcess:
    """The worker's end: it sends *pieces* (some parts) over a pipe, and gets a byte for each."""

    def __init__(self, make: Callable[[], Advise], kept_file: int = -1) -> None:
        """`make` is called in the new process, and returns the function that gives the advice. Of
        the worker's other files, only the descriptor `kept_file` stays open there."""
        self._make = make
        self._kept_file = kept_file
        self.pid = 0
        """0 while there is no process."""
        self._pieces = self._answers = -1  # the pipes
        self.sent = 0
        self.done = 0
        """The number of pieces that are done, or were lost with a process that was killed."""

    def advise(self, advice: int, parts: Parts, on_progress: Callable[[], None]) -> None:
        """Send advice, which the process gives in the order of calls. While too many messages are
        unanswered, this waits, and calls `on_progress` at each answer."""
        for start in range(0, len(parts), PIECE_PARTS):
            piece = parts[start : start + PIECE_PARTS]
            while self.sent - self.done >= PIECES_MAX:
                self._take_answers()
                on_progress()
            self.start()
            head = bytes([advice]) + len(piece).to_bytes(4, "little")
            try:
                os.write(self._pieces, head + piece.tobytes())
            except BrokenPipeError:
                self._reap()
                return
            self.sent += 1

    def wait_for(self, count: int) -> None:
        while self.done < count:
            self._take_answers()

    def _take_answers(self) -> None:
        answered = len(os.read(self._answers, PIECES_MAX))
        self.done += answered
        if not answered:
            self._reap()

    def _reap(self) -> None:
        """The next advice starts another process. Advice that the dead one had not given is lost;
        the kernel frees those pages when it needs room."""
        os.close(self._pieces)
        os.close(self._answers)
        _, status = os.waitpid(self.pid, 0)
        log.error("the process that drops contents has ended (status %d): starting another", status)
        self.pid = 0
        self.done = self.sent

    def close(self) -> None:
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

    def start(self) -> None:
        """The process keeps a copy of all memory that the worker changes later, so an earlier start
        costs less."""
        if self.pid:
            return
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
                _close_all_but(pieces, answers, self._kept_file)
                _serve(self._make(), pieces, answers)
        except BaseException:
            log.exception("the process that drops contents fails")
            os._exit(1)
        os._exit(0)


def _serve(advise: Advise, pieces: int, answers: int) -> None:
    with open(pieces, "rb") as stream:
        while head := stream.read(5):
            count = int.from_bytes(head[1:], "little")
            advise(head[0], np.frombuffer(stream.read(PART.itemsize * count), PART))
            with suppress(BrokenPipeError):  # the worker has ended
                os.write(answers, b".")


def _close_all_but(*open_files: int) -> None:
    """This process may outlive the worker, and must not keep the connection to the kernel open."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in open_files:
            with suppress(OSError):
                os.close(int(name))
