"""The heads of datasets as the metadata store has them now, shared by many requests at once.

A *head* is a dataset's current version with its counts (`DatasetHead`). Most requests about entries
need a head that was read after they came. `HeadCache` reads it once for all requests that wait
(singleflight): in the event loop (`pipelined_heads.py`) if the replies prove the head, otherwise in
a thread.

While the metadata store is away, a circuit breaker lets one request a second try to reach it, and
others fail at once. Methods run in the event loop of one worker, unless they name threads.
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
from diesel_fs.net.breaker import CircuitBreaker
from diesel_fs.net.singleflight import SingleFlight
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.metadata.store import DatasetHead

from .pipelined_heads import PipelinedHeadReads

ANSWER_S = 8.0
"""A slow Redis needs a few round trips of a second each."""

OPEN_S = 1.0

_LISTED_S = 0.5
"""A listing of a dataset's snapshots counts for this time: it takes a bucket some 10 ms."""

_LISTED_MAX = 65_536
_THREADS = 8

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HeadState:
    """`behind` means that the object store has a snapshot of a newer version, so the metadata store
    has lost commits."""

    head: DatasetHead
    behind: bool


class HeadCache:
    """Guards all work with the metadata store by the circuit breaker."""

    def __init__(
        self,
        repository: LocalRepository,
        clock: Callable[[], float] = time.monotonic,
        pipelined: PipelinedHeadReads | None = None,
    ) -> None:
        self._repository = repository
        self._clock = clock
        self._pipelined = pipelined
        self._reads = SingleFlight(self._read_head)
        self._read_threads = trio.CapacityLimiter(_THREADS)
        self._work_threads = trio.CapacityLimiter(_THREADS)
        self._opening = threading.Lock()
        self._listed: dict[UUID, tuple[int, float]] = {}  # the newest snapshot; when it was listed
        self._breaker = CircuitBreaker(1, OPEN_S)
        self._failure: DieselError | None = None

    async def now(self, name: str) -> HeadState:
        """Reads the head after the call began. Raises NoSuchDataset if the metadata store does not
        know the dataset, which does not prove that there is none; MetadataError if the metadata
        store is away."""
        return await self._guarded(lambda: self._reads.run(name))

    async def run(self, work: Callable[[], T]) -> T:
        """Does other work with the metadata store, in a thread. Raises as `now` and `work` do."""

        async def in_thread() -> T:
            return await trio.to_thread.run_sync(
                work, limiter=self._work_threads, abandon_on_cancel=True
            )

        return await self._guarded(in_thread)

    async def _guarded(self, work: Callable[[], Awaitable[T]]) -> T:
        ticket = self._breaker.admit(self._clock())
        if not ticket:
            assert self._failure is not None
            raise _copy(self._failure)
        try:
            with trio.fail_after(ANSWER_S):
                found = await work()
        except (trio.TooSlowError, DeadlineError):
            error = MetadataError("the metadata store does not answer", advice="try again")
            self._record_failure(ticket, error)
            raise error from None
        except MetadataError as error:
            if not isinstance(error, MetadataBehind):
                self._record_failure(ticket, error)
            raise
        finally:
            self._breaker.cancel(ticket)  # of no effect once an outcome has been recorded
        self._breaker.record_success(ticket)
        return found

    def _record_failure(self, ticket: int, error: DieselError) -> None:
        if self._breaker.record_failure(ticket, self._clock()):
            self._failure = error

    async def _read_head(self, name: str) -> HeadState:
        head: DatasetHead | None = None
        if self._pipelined is not None and self._repository.meta_problem is None:
            head = await self._pipelined.head(name)
        if head is None:
            return await trio.to_thread.run_sync(
                self._read_head_in_thread, name, limiter=self._read_threads
            )
        newest, listed_s = self._listed.get(head.identity, (0, 0.0))
        if newest <= head.version and self._clock() < listed_s + _LISTED_S:
            return HeadState(head, False)
        return await trio.to_thread.run_sync(self._compare, head, limiter=self._read_threads)

    def _read_head_in_thread(self, name: str) -> HeadState:
        self.reopen()
        return self._compare(self._repository.meta.head(name))

    def _compare(self, head: DatasetHead) -> HeadState:
        """Compares a head with the newest snapshot in the object store. Runs in a thread."""
        newest, listed_s = self._listed.get(head.identity, (0, 0.0))
        now_s = self._clock()
        if newest > head.version or now_s >= listed_s + _LISTED_S:
            newest, listed_s = self._repository.snapshots.newest(head.identity), now_s
        behind = newest > head.version
        if len(self._listed) >= _LISTED_MAX:
            self._listed.clear()
        self._listed[head.identity] = max(newest, head.version), listed_s
        return HeadState(head, behind)

    def close(self) -> None:
        if self._pipelined is not None:
            self._pipelined.close()

    def reopen(self) -> None:
        """Opens the metadata store if it was away at the server's start. May block; any thread may
        call this."""
        problem = self._repository.meta_problem
        if problem is None:
            return
        with self._opening:  # each try takes seconds: waiting threads share its outcome
            if self._repository.meta_problem is problem:
                self._repository.open_metadata(create=False)


def _copy(error: DieselError) -> DieselError:
    """Each raised error needs a traceback of its own."""
    return error_by_class_name(type(error).__name__, error.message, error.advice)
