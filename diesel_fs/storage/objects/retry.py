"""Retries failed calls of an object store.

No attempt begins that might end after its call's deadline. A pause that the store demands
(`Retry-After`) is waited for in full or not at all; only a call with `LongPauses` may wait longer
than its deadline. The wrapped store bounds the time of each attempt and repeats nothing itself,
except that a bucket's store resumes a read if the answer breaks off. Threads may use a
`RetryingStore` as they may use the wrapped store.
"""

import email.utils
import logging
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...errors import ObjectExists, ObjectMissing, ObjectStoreError, ObjectStoreRefused
from ...format.entries import Bytes
from ...format.object_names import MUTABLE_NAME
from ...system.vectored_io import byte_views
from .store import FastReads, Housekeeping, Leftover, ObjectInfo, ObjectStore, ReadWrapper

Item = TypeVar("Item")

DEMANDED_S_MAX = 3600.0
"""The most that one call waits in `LongPauses`, all its pauses together. They do not count against
its deadline."""

log = logging.getLogger("diesel.store")

_COMPARED_BYTES = 1 << 20  # of an object are compared at a time with the bytes of a put


class AttemptFailed(ObjectStoreError):
    """A request failed, and may succeed if it is repeated.

    `may_have_succeeded`: the store may have carried it out. `pause_s_min`: the store demands at
    least this pause before a retry, or its answer implies it.
    """

    def __init__(
        self, message: str, *, may_have_succeeded: bool = True, pause_s_min: float = 0.0
    ) -> None:
        super().__init__(message)
        self.may_have_succeeded = may_have_succeeded
        self.pause_s_min = pause_s_min


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Capped exponential backoff with full jitter, which spreads the retries of clients that failed
    at the same moment (Brooker, "Exponential Backoff and Jitter", 2015), under one deadline for
    each call."""

    pause_s: float = 0.1  # the longest first pause; the limit then doubles up to `pause_s_max`
    pause_s_max: float = 10.0
    deadline_s: float = 30.0
    put_deadline_s: float = 120.0  # longer: no reader of a mounted file waits for a put
    bytes_per_s_min: float = 128 * 1024
    """The deadline grows by the call's bytes divided by this rate. One attempt to a bucket may take
    half of that (`AttemptLimits`)."""

    def deadline_for(self, size: int, *, put: bool = False) -> float:
        """Seconds that a call of `size` bytes may take, all attempts together."""
        return (self.put_deadline_s if put else self.deadline_s) + size / self.bytes_per_s_min

    def pause_before(
        self,
        attempt: int,
        *,
        left_s: float,
        attempt_s: float,
        draw: float,
        pause_s_min: float = 0.0,
    ) -> float | None:
        """Seconds to wait after `attempt` (from 1) failed; None to give up.

        `left_s` is the time until the deadline, `attempt_s` the most that another attempt may take,
        and `draw` a random number from [0, 1).
        """
        ceiling = min(self.pause_s_max, self.pause_s * 2.0 ** min(attempt - 1, 60))
        pause = max(pause_s_min, ceiling * draw)
        return pause if pause + attempt_s <= left_s else None


@dataclass(frozen=True, slots=True)
class RetryClock:
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    draw: Callable[[], float] = random.SystemRandom().random  # differs after a fork


def retry_after_s(text: str) -> float:
    """The seconds in a `Retry-After` header, which holds a number or a date; 0 for other texts."""
    if re.fullmatch("[0-9]{1,9}", text):
        return float(text)
    try:
        return max(email.utils.parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
    except (ValueError, TypeError, OverflowError):
        return 0.0


class LongPauses:
    """Waits for demanded pauses that are longer than `RetryPolicy` allows. All calls of one piece
    of work share an instance, and `stop` ends their waits. Any thread. Calls that wait at the same
    time log one line."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._until_s = 0.0  # by the monotonic clock: the end of the last pause in the log
        self._lock = threading.Lock()

    def wait(self, seconds: float, reason: str) -> None:
        """`reason` is for the messages. Raises ObjectStoreRefused after `stop`."""
        until_s = time.monotonic() + seconds
        with self._lock:
            is_news, self._until_s = until_s > self._until_s + 1, max(until_s, self._until_s)
        if is_news:
            log.warning("%s; it demands a pause: the next request is in %.0f s", reason, seconds)
        if self._stopped.wait(seconds):
            raise ObjectStoreRefused(f"{reason}; the work was cancelled during the pause")

    def stop(self) -> None:
        self._stopped.set()


class RetryLoop:
    """Counts the attempts of one call, and waits between them, up to the call's deadline. `pauses`
    waits for long pauses that the store demands, DEMANDED_S_MAX in all."""

    def __init__(
        self,
        policy: RetryPolicy,
        clock: RetryClock,
        *,
        deadline_s: float,
        attempt_s: float,
        pauses: LongPauses | None = None,
    ) -> None:
        self.may_have_succeeded = False  # whether a failed attempt may have been carried out
        self._policy = policy
        self._clock = clock
        self._attempt_s = attempt_s
        self._deadline_s = deadline_s
        self._begun = clock.now()
        self._attempt = 0
        self._pauses = pauses
        self._demanded_s = 0.0

    def call(self, act: Callable[[], Item]) -> Item:
        while True:
            try:
                return act()
            except ObjectStoreError as error:
                self.wait_or_raise(error)

    def wait_or_raise(self, error: ObjectStoreError) -> None:
        """Wait after a failed attempt. Raises `error` itself if a retry cannot mend it; at the
        deadline, an ObjectStoreError with the number of attempts."""
        if not error.retry:
            raise error
        self._attempt += 1
        failed = error if isinstance(error, AttemptFailed) else AttemptFailed(error.message)
        self.may_have_succeeded = self.may_have_succeeded or failed.may_have_succeeded
        demanded_s = failed.pause_s_min
        is_long = demanded_s > self._policy.pause_s_max
        if is_long and self._pauses and self._demanded_s + demanded_s <= DEMANDED_S_MAX:
            self._demanded_s += demanded_s
            self._pauses.wait(demanded_s, error.message)
            self._begun += demanded_s
            return
        spent = self._clock.now() - self._begun
        pause = self._policy.pause_before(
            self._attempt,
            left_s=self._deadline_s - spent,
            attempt_s=self._attempt_s,
            draw=self._clock.draw(),
            pause_s_min=failed.pause_s_min,
        )
        if pause is None:
            tries = f"{self._attempt} attempt" + "s" * (self._attempt > 1)
            raise ObjectStoreError(
                f"{error.message} ({tries} in {spent + self._demanded_s:.1f} s)",
                advice=f"the server demands a pause of {demanded_s:.0f} s: try again then"
                if is_long
                else "",
            ) from error
        self._clock.sleep(pause)


class RetryingStore(ReadWrapper):
    """`attempt_s(size, is_put)` is the most seconds that one attempt of `inner` may take."""

    def __init__(
        self,
        inner: ObjectStore,
        policy: RetryPolicy | None = None,
        *,
        attempt_s: Callable[[int, bool], float] = lambda _size, _put: 0.0,
        clock: RetryClock | None = None,
    ) -> None:
        super().__init__(inner)
        self._policy = policy or RetryPolicy()
        self._attempt_s = attempt_s
        self._clock = clock or RetryClock()

    @property
    def fast_reads(self) -> FastReads:
        return _RetriedReads(self)

    @property
    def housekeeping(self) -> Housekeeping:
        return _RetriedHousekeeping(self)

    def _retrying(self, size: int = 0, *, put: bool = False) -> RetryLoop:
        return RetryLoop(
            self._policy,
            self._clock,
            deadline_s=self._policy.deadline_for(size, put=put),
            attempt_s=self._attempt_s(size, put),
        )

    def put(self, name: str, parts: Sequence[Bytes]) -> None:
        """If the answer to an attempt was lost, an existing object with equal content counts as
        written by this call. If no answer was lost, it is another writer's, even with equal
        content: raises ObjectExists."""
        views = byte_views(parts)
        retrying = self._retrying(sum(map(len, views)), put=True)

        def attempt() -> None:
            try:
                self.inner.put(name, views)
            except ObjectExists:
                if not (retrying.may_have_succeeded and self._holds(name, views)):
                    raise

        retrying.call(attempt)

    def _holds(self, name: str, views: Sequence[memoryview]) -> bool:
        try:
            if self.inner.stat(name).bytes != sum(map(len, views)):
                return False
            room, start = memoryview(bytearray(_COMPARED_BYTES)), 0
            for view in views:
                for at in range(0, len(view), _COMPARED_BYTES):
                    piece = view[at : at + _COMPARED_BYTES]
                    self.inner.read_into(name, start, room[: len(piece)])
                    if room[: len(piece)] != piece:
                        return False
                    start += len(piece)
        except ObjectMissing:
            return False
        return True

    def replace(self, name: str, parts: Sequence[Bytes]) -> None:
        size = sum(memoryview(part).nbytes for part in parts)
        self._retrying(size, put=True).call(lambda: self.inner.replace(name, parts))

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytearray:
        return self._retrying(length or 0).call(lambda: self.inner.get(name, start, length))

    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        self._retrying(len(buffer)).call(lambda: self.inner.read_into(name, start, buffer))

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        return self._listing(
            lambda after: self.inner.list(prefix, after), after, lambda info: info.name
        )

    def _listing(
        self, begin: Callable[[str], Iterator[Item]], after: str, name_of: Callable[[Item], str]
    ) -> Iterator[Item]:
        """The items of the listing that `begin(after)` returns. After a failure, a new listing
        begins behind the last name. Each step to the next name has a deadline of its own."""
        retrying, last = self._retrying(), after
        while True:
            try:
                for item in begin(last):
                    yield item
                    last = name_of(item)
                return
            except ObjectStoreError as error:
                if last > after:
                    after, retrying = last, self._retrying()
                retrying.wait_or_raise(error)

    def stat(self, name: str) -> ObjectInfo:
        return self._retrying().call(lambda: self.inner.stat(name))

    def delete(self, name: str) -> None:
        self._retrying().call(lambda: self.inner.delete(name))


class _RetriedReads(FastReads):
    _store: RetryingStore

    def read_ranges(
        self, name: str, ranges: Sequence[tuple[int, int]], room: memoryview
    ) -> Iterator[memoryview]:
        """After a failure this continues behind the last yielded range, except for an object that
        may change: the ranges could then be of two versions."""
        size = max((size for _, size in ranges), default=0)
        done, before, retrying = 0, 0, self._store._retrying(size)
        while True:
            try:
                for view in self._store.inner.fast_reads.read_ranges(name, ranges[done:], room):
                    yield view
                    done += 1
                return
            except ObjectStoreError as error:
                if done and MUTABLE_NAME.fullmatch(name):
                    raise
                if done > before:
                    before, retrying = done, self._store._retrying(size)
                retrying.wait_or_raise(error)

    def read_uncached(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        self._store._retrying(len(buffer)).call(
            lambda: self._store.inner.fast_reads.read_uncached(name, start, buffer)
        )


class _RetriedHousekeeping(Housekeeping):
    _store: RetryingStore

    def __init__(self, store: RetryingStore) -> None:
        super().__init__(store)
        self._inner = store.inner.housekeeping

    def names(self, prefix: str, after: str = "") -> Iterator[str]:
        return self._store._listing(lambda after: self._inner.names(prefix, after), after, str)

    def leftovers(self, prefix: str = "") -> Iterator[Leftover]:
        return iter(self._store._retrying().call(lambda: [*self._inner.leftovers(prefix)]))

    def discard(self, leftover: Leftover) -> None:
        self._store._retrying().call(lambda: self._inner.discard(leftover))

    def foreign(self, prefix: str = "") -> Iterator[str]:
        return iter(self._store._retrying().call(lambda: [*self._inner.foreign(prefix)]))

    def close_idle(self) -> None:
        self._inner.close_idle()
