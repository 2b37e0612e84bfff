"""What pyfuse3 sees in the place of trio: the same tasks, but not a turn of trio's for a request.

pyfuse3 takes what it needs of trio from its attribute `trio`, so that its own asyncio mode can put
another module there; `installed` puts a `Loop` there. Of what pyfuse3 does for each request, its
lock and its wait for the kernel cost more than most answers. So here a task that comes back for
the lock gets it without waiting for its turn, and while requests keep coming, they are waited for
with a short poll(2) in trio's own thread, for `SLICE_S` between two turns of trio.

Concurrency: all in trio's thread. Other tasks (READs whose bytes have come, signals, deadlines) run
at the latest `SLICE_S` + `POLL_S` after they can; while any waits, the poll does not.
"""

import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

import pyfuse3
import trio

SLICE_S = 0.002
"""How long requests are answered without a turn of trio's, which costs as much as an answer."""

POLL_S = 0.001
"""How long poll(2) waits for the next request before trio does: the next open of a program that
reads file after file comes within 0.1 ms, and a millisecond is the least that poll knows."""


class _Lock:
    """A lock for one event loop: whoever releases it may take it again before those that wait."""

    def __init__(self) -> None:
        self._held = False
        self._waiting = trio.lowlevel.ParkingLot()

    async def __aenter__(self) -> None:
        while self._held:
            await self._waiting.park()
        self._held = True

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._held = False
        self._waiting.unpark()


class Loop:
    """Trio for pyfuse3. `idle` says whether nothing but the next request is waited for."""

    Lock = _Lock
    ClosedResourceError = trio.ClosedResourceError
    open_nursery = staticmethod(trio.open_nursery)
    current_task = staticmethod(trio.lowlevel.current_task)
    current_trio_token = staticmethod(trio.lowlevel.current_trio_token)
    notify_closing = staticmethod(trio.lowlevel.notify_closing)

    def __init__(self, idle: Callable[[], bool]) -> None:
        self.lowlevel = self
        self._idle = idle
        self._slice_end_s = 0.0
        self._poll = select.poll()
        self._descriptor = -1

    async def wait_readable(self, descriptor: int) -> None:
        """Returns when there is a request, or the connection has ended."""
        if time.monotonic() < self._slice_end_s:
            poll=self._poll.poll
            if poll(0): return
            if self._idle():
                import os
                for _ in range(10):
                    os.sched_yield()
                    if poll(0): return
                if poll(1): return
        elif self._descriptor != descriptor:
            self._poll.register(descriptor, select.POLLIN)
            self._descriptor = descriptor
        await trio.lowlevel.wait_readable(descriptor)
        self._slice_end_s = time.monotonic() + SLICE_S


@contextmanager
def installed(loop: Loop) -> Iterator[None]:
    """While pyfuse3's main loop runs. Its lock lives on in it, so there is one run per process."""
    pyfuse3.trio = loop  # type: ignore[attr-defined]
    try:
        yield
    finally:
        pyfuse3.trio = trio  # type: ignore[attr-defined]
