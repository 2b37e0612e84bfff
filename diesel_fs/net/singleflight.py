"""Work that many requests share: single flights, and group commits.

`SingleFlight` runs a function once for all callers that want the same result. `GroupCommit`
collects items while a run is under way, and hands all of them to the next run. Everything happens
in one event loop (trio); what `run`, `start` and `add` do before their first wait is atomic.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, TypeVar

import trio

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")


class _InFlight(Generic[V]):
    """A run that has not begun yet, is under way, or is over."""

    def __init__(self) -> None:
        self.over = trio.Event()
        self.result: list[V] = []
        self.error: Exception | None = None

    async def outcome(self) -> V:
        await self.over.wait()
        if self.error is not None:
            raise self.error
        return self.result[0]


class SingleFlight(Generic[K, V]):
    """Runs an `async` function, once at a time for each key. A caller gets the outcome of a run
    that begins after the call, and shares it with all who called before that run began.

    A run goes on when its callers are cancelled.
    """

    def __init__(self, run: Callable[[K], Awaitable[V]]) -> None:
        self._run = run
        self._next: dict[K, _InFlight[V]] = {}
        self._at_work: set[K] = set()

    async def run(self, key: K) -> V:
        """The outcome of a run that begins now or later. Raises what the function raises."""
        flight = self._next.get(key)
        if flight is None:
            flight = self._next[key] = _InFlight()
            self._begin(key)
        return await flight.outcome()

    def start(self, key: K) -> None:
        """Begin a run without waiting for it, unless one is waiting to begin."""
        if key not in self._next:
            self._next[key] = _InFlight()
            self._begin(key)

    def _begin(self, key: K) -> None:
        if key not in self._at_work:
            self._at_work.add(key)
            trio.lowlevel.spawn_system_task(self._work, key)

    async def _work(self, key: K) -> None:
        try:
            while (flight := self._next.pop(key, None)) is not None:
                try:
                    flight.result.append(await self._run(key))
                except Exception as error:
                    flight.error = error
                finally:
                    flight.over.set()
        finally:
            self._at_work.discard(key)


class ThreadSingleFlight(SingleFlight[K, V]):
    """A `SingleFlight` of a function that blocks: it runs in one of the `threads`."""

    def __init__(self, run: Callable[[K], V], threads: trio.CapacityLimiter) -> None:
        async def in_thread(key: K) -> V:
            return await trio.to_thread.run_sync(run, key, limiter=threads)

        super().__init__(in_thread)


class _Waiting(Generic[T, V]):
    def __init__(self, item: T, size: int) -> None:
        self.item = item
        self.size = size
        self.flight = _InFlight[V]()


class GroupCommit(Generic[K, T, V]):
    """Runs a function on items, once at a time for each key. Items that are added while a run is
    under way go together into the next run, up to `size_max` in size.

    `run` gets a key and its items. Where it fails for several items and `retry_singly` says that
    one of them may be to blame for the error, each is tried by itself.
    """

    def __init__(
        self,
        run: Callable[[K, Sequence[T]], V],
        threads: trio.CapacityLimiter,
        size_max: int,
        retry_singly: Callable[[Exception], bool],
    ) -> None:
        self._run = run
        self._threads = threads
        self._size_max = size_max
        self._retry_singly = retry_singly
        self._waiting: dict[K, deque[_Waiting[T, V]]] = {}

    async def add(self, key: K, item: T, size: int) -> V:
        """The outcome of the run with this item. Raises what the run raises."""
        own = _Waiting[T, V](item, size)
        queue = self._waiting.get(key)
        if queue is None:
            queue = self._waiting[key] = deque()
            trio.lowlevel.spawn_system_task(self._work, key)
        queue.append(own)
        return await own.flight.outcome()

    async def _work(self, key: K) -> None:
        queue = self._waiting[key]
        try:
            while queue:
                group = [queue.popleft()]
                size = group[0].size
                while queue and size + queue[0].size <= self._size_max:
                    group.append(queue.popleft())
                    size += group[-1].size
                await self._try(key, group)
        finally:
            del self._waiting[key]

    async def _try(self, key: K, group: Sequence[_Waiting[T, V]]) -> None:
        items = [each.item for each in group]
        try:
            found = await trio.to_thread.run_sync(self._run, key, items, limiter=self._threads)
        except Exception as error:
            if len(group) > 1 and self._retry_singly(error):
                for each in group:
                    await self._try(key, [each])
                return
            for each in group:
                each.flight.error = error
                each.flight.over.set()
        else:
            for each in group:
                each.flight.result.append(found)
                each.flight.over.set()
