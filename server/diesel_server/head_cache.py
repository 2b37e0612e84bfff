"""What the metadata store says of a dataset now, for many requests at once.

Owned here: that an answer is of a moment after the request came, that requests share a look, and
that they do not queue up behind a metadata store that is away: who asks then is told so at once,
while one look goes on trying. Not owned: what is done with it. In the loop of one worker.

A look is a glance (`pipelined_heads.py`) where that proves something, which needs no thread; else
the metadata store is asked the long way.
"""

import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar
from uuid import UUID

import trio

from diesel_fs.errors import (
    DeadlineError,
    DieselError,
    MetadataBehind,
    MetadataError,
    error_by_class_name,
)
from diesel_fs.net.singleflight import SingleFlight
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.metadata.store import DatasetHead

from .pipelined_heads import PipelinedHeadReads

ANSWER_S = 8.0
"""How long a look may take: some round trips of a second each, which is a slow Redis."""

OPEN_S = 1.0
"""How long nobody is asked who has just failed."""

_LISTED_S = 0.5
"""A metadata store that has lost something is noticed by the snapshots that others have published
from it; listing them takes a bucket some 10 ms."""

_THREADS = 8

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HeadState:
    """A dataset's marker, and whether a newer version of the dataset has once been there."""

    marker: DatasetHead
    behind: bool


class HeadCache:
    """Looks at the markers of a repository's datasets."""

    def __init__(
        self,
        repository: LocalRepository,
        clock: Callable[[], float] = time.monotonic,
        glances: PipelinedHeadReads | None = None,
    ) -> None:
        self._repository = repository
        self._clock = clock
        self._pipelined = glances
        self._rounds = SingleFlight(self._read_head)
        self._looking = trio.CapacityLimiter(_THREADS)
        self._threads = trio.CapacityLimiter(_THREADS)
        self._opening = threading.Lock()
        self._listed: dict[UUID, tuple[int, float]] = {}
        self._down: DieselError | None = None
        self._down_until_s = 0.0
        self._probing = False

    async def now(self, name: str) -> HeadState:
        """A look that began after the call.

        Raises NoSuchDataset where the metadata store does not know it, which proves nothing;
        MetadataError where it is away.
        """
        return await self._guarded(lambda: self._rounds.run(name))

    async def run(self, work: Callable[[], T]) -> T:
        """The result of other work with the metadata store, in a thread. Raises as `now`."""

        async def in_thread() -> T:
            return await trio.to_thread.run_sync(
                work, limiter=self._threads, abandon_on_cancel=True
            )

        return await self._guarded(in_thread)

    async def _guarded(self, work: Callable[[], Awaitable[T]]) -> T:
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
            self._open_breaker(error)
            raise error from None
        except MetadataError as error:
            if not isinstance(error, MetadataBehind):
                self._open_breaker(error)
            raise
        finally:
            if is_probe:
                self._probing = False
        self._down = None
        return found

    def _open_breaker(self, error: DieselError) -> None:
        self._down, self._down_until_s = error, self._clock() + OPEN_S

    async def _read_head(self, name: str) -> HeadState:
        marker: DatasetHead | None = None
        if self._pipelined is not None and self._repository.meta_problem is None:
            marker = await self._pipelined.head(name)
        if marker is None:
            return await trio.to_thread.run_sync(
                self._read_head_in_thread, name, limiter=self._looking
            )
        newest, listed_s = self._listed.get(marker.identity, (0, 0.0))
        if newest <= marker.version and self._clock() < listed_s + _LISTED_S:
            return HeadState(marker, False)
        return await trio.to_thread.run_sync(self._compare, marker, limiter=self._looking)

    def _read_head_in_thread(self, name: str) -> HeadState:
        self.reopen()
        return self._compare(self._repository.meta.head(name))

    def _compare(self, marker: DatasetHead) -> HeadState:
        """A marker beside what the object store has of its dataset. May block."""
        newest, listed_s = self._listed.get(marker.identity, (0, 0.0))
        now_s = self._clock()
        if newest > marker.version or now_s >= listed_s + _LISTED_S:
            newest, listed_s = self._repository.snapshots.newest(marker.identity), now_s
        behind = newest > marker.version
        if len(self._listed) >= _LISTED_MAX:
            self._listed.clear()
        self._listed[marker.identity] = max(newest, marker.version), listed_s
        return HeadState(marker, behind)

    def close(self) -> None:
        """Let go of the loop's own connections. Repeatable."""
        if self._pipelined is not None:
            self._pipelined.close()

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
    return error_by_class_name(type(error).__name__, error.message, error.advice)
