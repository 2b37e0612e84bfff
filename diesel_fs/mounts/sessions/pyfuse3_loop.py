"""What pyfuse3 sees in the place of trio: the same tasks, but not a turn of trio's for a request.

pyfuse3 takes what it needs of trio from its attribute `trio`, so that its own asyncio mode can put
another module there; `installed` puts a `TrioStandIn` there. Of what pyfuse3 does for each request,
its lock and its wait for the kernel cost more than most answers. So here a task that comes back for
the lock gets it without waiting for its turn, and the wait is that of `request_wait.py`.

Concurrency: all in trio's thread.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

import pyfuse3
import trio

from .request_wait import RequestWait


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


class TrioStandIn:
    """Trio for pyfuse3. `idle` says whether nothing but the next request is waited for."""

    Lock = _Lock
    ClosedResourceError = trio.ClosedResourceError
    open_nursery = staticmethod(trio.open_nursery)
    current_task = staticmethod(trio.lowlevel.current_task)
    current_trio_token = staticmethod(trio.lowlevel.current_trio_token)
    notify_closing = staticmethod(trio.lowlevel.notify_closing)

    def __init__(self, idle: Callable[[], bool]) -> None:
        self.lowlevel = self
        self.wait_readable = RequestWait(idle).readable


@contextmanager
def installed(loop: TrioStandIn) -> Iterator[None]:
    """While pyfuse3's main loop runs. Its lock lives on in it, so there is one run per process."""
    pyfuse3.trio = loop  # type: ignore[attr-defined]  # its stub leaves that out
    try:
        yield
    finally:
        pyfuse3.trio = trio  # type: ignore[attr-defined]  # as above
