"""The work queue: it decides which object has its turn, and when.

A *turn* is one call of `handle` for a key. Events of the cluster add keys. A key that is added
several times before its turn has one turn. After a failed turn, a key has another turn after a
pause, which doubles up to a limit. Nothing is stored: a new process begins with the list of all
objects.

All tasks run in one asyncio loop. `add`, `add_later` and `forget` never wait. `run` owns `workers`
tasks, each of which takes a ready key and awaits `handle(key)`, and one task that adds the keys
that are due.

A key is in one of three states: waiting (in `_waiting`, and once in `_ready`), in the hands of one
worker (in `_busy`), or idle, maybe with the time of its next turn in `_due`. If a key is added
while a worker has it, it is only marked (`_again`), and the worker adds it at the end of the turn.
So no change is lost, and no two workers have the same key.

Code between two waits (`await`) is atomic: a worker takes a key and marks it busy without a wait in
between, and ends the turn without a wait. A time in `_due` that was replaced or removed stays in
the heap `_timers`; the task for due keys skips it.

An exception of `handle` ends only that turn. A cancelled `run` ends all workers in the middle of
their turns, which are safe to do twice (`controller.py`).
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
    """`plural` is the object's kind, as in the API's paths (`datasets`)."""

    plural: str
    namespace: str
    name: str


class WorkQueue:
    """`handle` returns the seconds until the key's next turn; None: no turn before the next
    event."""

    def __init__(self, handle: Callable[[Key], Awaitable[float | None]], workers: int) -> None:
        self._handle = handle
        self._workers = workers
        self._ready: asyncio.Queue[Key] = asyncio.Queue()
        self._waiting: set[Key] = set()
        self._busy: set[Key] = set()
        self._again: set[Key] = set()
        self._due: dict[Key, float] = {}
        self._timers: list[tuple[float, int, Key]] = []
        self._counter = itertools.count()
        self._failures: dict[Key, int] = {}
        self._timer_changed = asyncio.Event()
        self.handled = 0

    def add(self, key: Key) -> None:
        self._due.pop(key, None)
        if key in self._busy:
            self._again.add(key)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._ready.put_nowait(key)

    def add_later(self, key: Key, after_s: float) -> None:
        """Gives a key a turn after `after_s`, unless it is added, or due, earlier."""
        due = asyncio.get_running_loop().time() + after_s
        if key in self._due and self._due[key] <= due:
            return
        self._due[key] = due
        heapq.heappush(self._timers, (due, next(self._counter), key))
        self._timer_changed.set()

    def forget(self, key: Key) -> None:
        """Drops the planned turn and the failures of a key whose object is gone."""
        self._due.pop(key, None)
        self._failures.pop(key, None)

    async def run(self) -> None:
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
            except Exception as error:  # the other keys have their turns
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
