"""What the metadata store says of a dataset now, for many requests at once.

Owned here: that an answer is of a moment after the request came, that requests share a look, and
that they do not queue up behind a metadata store that is away: who asks then is told so at once,
while one look goes on trying. Not owned: what is done with it. In the loop of one worker.

A look is a glance (`redis_glances.py`) where that proves something, which needs no thread; else the
metadata store is asked the long way.
"""

import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar
from uuid import UUID

import trio

from diesel_fs.errors import DeadlineError, DieselError, MetadataBehind, MetadataError, revived
from diesel_fs.repository import Repository
from diesel_fs.storage.metadata import Marker

from .redis_glances import RedisGlances
from .rounds import LoopRounds

ANSWER_S = 8.0
"""How long a look may take: some round trips of a second each, which is a slow Redis."""

DOWN_S = 1.0
"""How long nobody is asked who has just failed."""

_LISTED_S = 0.5
"""A metadata store that has lost something is noticed by the snapshots that others have published
from it; listing them takes a bucket some 10 ms."""

_THREADS = 8

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Look:
    """A dataset's marker, and whether a newer version of the dataset has once been there."""

    marker: Marker
    behind: bool


class Markers:
    """Looks at the markers of a repository's datasets."""

    def __init__(
        self,
        repository: Repository,
        clock: Callable[[], float] = time.monotonic,
        glances: RedisGlances | None = None,
    ) -> None:
        self._repository = repository
        self._clock = clock
        self._glances = glances
        self._rounds = LoopRounds(self._look)
        self._looking = trio.CapacityLimiter(_THREADS)
        self._threads = trio.CapacityLimiter(_THREADS)
        self._opening = threading.Lock()
        self._listed: dict[UUID, tuple[int, float]] = {}
        self._down: DieselError | None = None
        self._down_until_s = 0.0
        self._probing = False

    async def now(self, name: str) -> Look:
        """A look that began after the call.

        Raises NoSuchDataset where the metadata store does not know it, which proves nothing;
        MetadataError where it is away.
        """
        return await self._soon(lambda: self._rounds.ask(name))

    async def ask(self, work: Callable[[], T]) -> T:
        """The result of other work with the metadata store, in a thread. Raises as `now`."""

        async def in_thread() -> T:
            return await trio.to_thread.run_sync(
                work, limiter=self._threads, abandon_on_cancel=True
            )

        return await self._soon(in_thread)

    async def _soon(self, work: Callable[[], Awaitable[T]]) -> T:
        is_probe = False
        if self._down is not None:
            if self._probing or self._clock() < self._down_until_s:
                raise _again(self._down)
            is_probe = self._probing = True
        try:
            with trio.fail_after(ANSWER_S):
                found = await work()
        except (trio.TooSlowError, DeadlineError):
            error = MetadataError("the metadata store does not answer", advice="try again")
            self._note(error)
            raise error from None
        except MetadataError as error:
            if not isinstance(error, MetadataBehind):
                self._note(error)
            raise
        finally:
            if is_probe:
                self._probing = False
        self._down = None
        return found

    def _note(self, error: DieselError) -> None:
        self._down, self._down_until_s = error, self._clock() + DOWN_S

    async def _look(self, name: str) -> Look:
        marker: Marker | None = None
        if self._glances is not None and self._repository.meta_problem is None:
            marker = await self._glances.marker(name)
        if marker is None:
            return await trio.to_thread.run_sync(self._long_look, name, limiter=self._looking)
        newest, listed_s = self._listed.get(marker.identity, (0, 0.0))
        if newest <= marker.version and self._clock() < listed_s + _LISTED_S:
            return Look(marker, False)
        return await trio.to_thread.run_sync(self._compared, marker, limiter=self._looking)

    def _long_look(self, name: str) -> Look:
        self.reopen()
        return self._compared(self._repository.meta.marker(name))

    def _compared(self, marker: Marker) -> Look:
        """A marker beside what the object store has of its dataset. May block."""
        newest, listed_s = self._listed.get(marker.identity, (0, 0.0))
        now_s = self._clock()
        if newest > marker.version or now_s >= listed_s + _LISTED_S:
            newest, listed_s = self._repository.snapshots.newest(marker.identity), now_s
        behind = newest > marker.version
        if len(self._listed) >= _LISTED_MAX:
            self._listed.clear()
        self._listed[marker.identity] = max(newest, marker.version), listed_s
        return Look(marker, behind)

    def close(self) -> None:
        """Let go of the loop's own connections. Repeatable."""
        if self._glances is not None:
            self._glances.close()

    def reopen(self) -> None:
        """Open a metadata store that could not be had when the server started. May block."""
        problem = self._repository.meta_problem
        if problem is None:
            return
        with self._opening:  # who has waited here shares what came of it: each try takes seconds
            if self._repository.meta_problem is problem:
                self._repository.open_metadata(create=False)


_LISTED_MAX = 65_536


def _again(error: DieselError) -> DieselError:
    """An error as new, since each has a traceback of its own."""
    return revived(type(error).__name__, error.message, error.advice)
