"""How a session waits for the kernel's next request: rarely by a turn of trio's, seldom asleep.

While requests keep coming they are waited for with a short poll(2) in trio's own thread, for
`SLICE_S` between two turns of trio. Concurrency: all in trio's thread. Other tasks (READs whose
bytes have come, signals, deadlines) run at the latest `SLICE_S` + `SPIN_S` + `POLL_S` after they
can; while any waits, the poll does not.
"""

import os
import select
import time
from collections.abc import Callable

import trio

SLICE_S = 0.002
"""How long requests are answered without a turn of trio's, which costs as much as an answer."""

SPIN_S = 0.000_05
"""How long after an answer we look for the next request without sleeping. To be woken on another
processor takes about as long: small files were read 1.7 times as fast on two virtual ones, at no
more processor time, as sleeping and waking cost it too. A file's requests come at once, so a
program that works between files costs this once or twice a file."""

POLL_S = 0.001
"""How long poll(2) waits for the next request before trio does; it knows nothing shorter."""


class RequestWait:
    """Waits until a device is readable. `idle` says whether nothing else is waited for."""

    def __init__(self, idle: Callable[[], bool]) -> None:
        self._idle = idle
        self._slice_end_s = 0.0
        self._poll = select.poll()
        self._descriptor = -1

    async def readable(self, descriptor: int) -> None:
        """Returns when there is a request, or the connection has ended."""
        if descriptor != self._descriptor:
            self._poll.register(descriptor, select.POLLIN)
            self._descriptor = descriptor
        if time.monotonic() < self._slice_end_s and self._soon_readable():
            return
        await trio.lowlevel.wait_readable(descriptor)
        self._slice_end_s = time.monotonic() + SLICE_S

    def _soon_readable(self) -> bool:
        """Whether there is a request, after a short wait where that holds up nothing else.

        The yield lets a program that our last answer woke on this processor ask its next question
        before we go to sleep.
        """
        if self._poll.poll(0):
            return True
        if not self._idle():
            return False
        spin_end_s = time.monotonic() + SPIN_S
        while time.monotonic() < spin_end_s:
            os.sched_yield()
            if self._poll.poll(0):
                return True
        return bool(self._poll.poll(POLL_S * 1000))
