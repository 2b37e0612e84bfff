"""Which objects are to be looked at, and when: each by one worker at a time.

Events of the cluster put keys in; keys that are put in several times before their turn come out
once. A key whose turn failed comes again after a pause, which doubles up to a limit. Nothing is
kept: a new process starts with the list of all objects. For one event loop.
"""

import asyncio
import heapq
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

log = logging.getLogger("diesel.operator")

PAUSE_S, PAUSE_MAX_S = 0.5, 60.0


class Key(NamedTuple):
    """An object: the plural of its kind, its namespace and name."""

    plural: str
    namespace: str
    name: str


class WorkQueue:
    """Calls `handle(key)` for keys that were added; what it returns is after how many seconds to
    call it again (None: not before the next event)."""

    def __init__(self, handle: Callable[[Key], Awaitable[float | None]], workers: int) -> None:
        self._handle = handle
        self._workers = workers
        self._ready: asyncio.Queue[Key] = asyncio.Queue()
        self._waiting: set[Key] = set()
        """Keys that are in the queue."""
        self._busy: set[Key] = set()
        self._again: set[Key] = set()
        """Keys that were added while a worker had them."""
        self._due: dict[Key, float] = {}
        self._timers: list[tuple[float, int, Key]] = []
        self._counter = itertools.count()
        self._failures: dict[Key, int] = {}
        self._timer_changed = asyncio.Event()
        self.handled = 0
        """How many turns there were."""

    def add(self, key: Key) -> None:
        """Have an object looked at soon."""
        self._due.pop(key, None)
        if key in self._busy:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._ready.put_nowait(key)

    def add_later(self, key: Key, after_s: float) -> None:
        """Have an object looked at after a while, or earlier if something happens."""
        due = asyncio.get_running_loop().time() + after_s
        if key in self._due and self._due[key] <= due:
            return
        self._due[key] = due
        heapq.heappush(self._timers, (due, next(self._counter), key))
        self._timer_changed.set()

    def forget(self, key: Key) -> None:
        """Forget an object that is gone."""
        self._due.pop(key, None)
        self._failures.pop(key, None)

    async def run(self) -> None:
        """Work until the task is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_clock())
            for _ in range(self._workers):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            key = await self._ready.get()
            self._waiting.discard(key)
            self._busy.add(key)
            try:
                after_s = await self._handle(key)
                self._failures.pop(key, None)
            except Exception as error:  # whatever it is, the others go on
                count = self._failures[key] = self._failures.get(key, 0) + 1
                after_s = min(PAUSE_S * 2 ** min(count - 1, 16), PAUSE_MAX_S)
                log.warning(
                    "%s: %s: %s; again in %.1f s", key, type(error).__name__, error, after_s
                )
            self.handled += 1
            self._busy.discard(key)
            if key in self._again:
                self._again.discard(key)
                self.add(key)
            elif after_s is not None and after_s <= 0:
                self.add(key)
            elif after_s is not None:
                self.add_later(key, after_s)

    async def _watch_clock(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._timer_changed.clear()
            while self._timers and self._timers[0][0] <= loop.time():
                due, _, key = heapq.heappop(self._timers)
                if self._due.get(key) == due:
                    self.add(key)
            wait_s = self._timers[0][0] - loop.time() if self._timers else None
            try:
                async with asyncio.timeout(wait_s):
                    await self._timer_changed.wait()
            except TimeoutError:
                continue
