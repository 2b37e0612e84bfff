"""Work that many requests share: single flights and group commits.

Everything happens in one trio event loop; `run`, `start` and `add` are atomic up to their first
wait.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import trio

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")


class _Outcome(Generic[V]):
    def __init__(self) -> None:
        self._over = trio.Event()
        self._result: list[V] = []  # at most one
        self._error: Exception | None = None

    async def wait(self) -> V:
        """The result, after the end of the run. Raises the run's error."""
        await self._over.wait()
        if self._error is not None:
            raise self._error
        return self._result[0]

    def succeed(self, result: V) -> None:
        self._result.append(result)
        self._over.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._over.set()


class SingleFlight(Generic[K, V]):
    """Runs an `async` function, for each key at most once at a time. A caller gets the outcome of a
    run that begins at or after its call; all callers that come before it begins share it. A run
    continues when its callers are cancelled."""

    def __init__(self, run: Callable[[K], Awaitable[V]]) -> None:
        self._run = run
        self._waiting: dict[K, _Outcome[V]] = {}  # of runs that have not begun
        self._running: set[K] = set()

    async def run(self, key: K) -> V:
        return await self.start(key).wait()

    def start(self, key: K) -> _Outcome[V]:
        """Begin a run without waiting for it; if a run of this key is under way, begin the new one
        after it. Returns the outcome, to be awaited."""
        outcome = self._waiting.get(key)
        if outcome is None:
            outcome = self._waiting[key] = _Outcome()
            if key not in self._running:
                self._running.add(key)
                trio.lowlevel.spawn_system_task(self._run_waiting, key)
        return outcome

    async def _run_waiting(self, key: K) -> None:
        try:
            while (outcome := self._waiting.pop(key, None)) is not None:
                try:
                    outcome.succeed(await self._run(key))
                except Exception as error:
                    outcome.fail(error)
        finally:
            self._running.discard(key)


class ThreadSingleFlight(SingleFlight[K, V]):
    """For a blocking function, which runs in a thread; `threads` limits how many run."""

    def __init__(self, run: Callable[[K], V], threads: trio.CapacityLimiter) -> None:
        async def in_thread(key: K) -> V:
            return await trio.to_thread.run_sync(run, key, limiter=threads)

        super().__init__(in_thread)


@dataclass(eq=False)
class _Waiting(Generic[T, V]):
    item: T
    size: int
    outcome: _Outcome[V] = field(default_factory=_Outcome)


class GroupCommit(Generic[K, T, V]):
    """Runs a blocking function on groups of items, for each key at most once at a time. Items that
    are added during a run go together into the next run, up to a total size of `size_max`.

    If `run` fails for several items with an error for which `retry_singly` is true, each item is
    tried by itself.
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
        """The result of the run that contains `item`. Raises the errors of `run`."""
        waiting = _Waiting[T, V](item, size)
        queue = self._waiting.get(key)
        if queue is None:
            queue = self._waiting[key] = deque()
            trio.lowlevel.spawn_system_task(self._run_waiting, key)
        queue.append(waiting)
        return await waiting.outcome.wait()

    async def _run_waiting(self, key: K) -> None:
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
            result = await trio.to_thread.run_sync(self._run, key, items, limiter=self._threads)
        except Exception as error:
            if len(group) > 1 and self._retry_singly(error):
                for each in group:
                    await self._try(key, [each])
                return
            for each in group:
                each.outcome.fail(error)
        else:
            for each in group:
                each.outcome.succeed(result)
