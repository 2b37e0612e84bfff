"""Trying again: what is decided (pure), and a store that does so around another.

Owns: which errors are worth another attempt, how long to wait before it, when to give up, and that
a put whose answer was lost ends with a certain one. Does not own: how long one attempt may take
(the inner store bounds each) and going on in the middle of a body (`cloud`).

Every call ends within its deadline: no attempt is begun that might end after it. The inner store
makes no attempts of its own, so what is counted here is all there is.

Concurrency: as the inner store; nothing is shared between calls.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ...errors import ObjectExists, ObjectMissing, ObjectStoreError
from ...format.entries import Bytes
from ...format.object_names import MUTABLE_NAME
from .store import Leftover, ObjectInfo, ObjectStore, ReadWrapper

Item = TypeVar("Item")

_COMPARED_BYTES = 1 << 20


class AttemptFailed(ObjectStoreError):
    """A request failed in a way that the next one need not.

    `may_have_succeeded`: the store may have done what it was asked. `pause_s_min`: it asked to be
    left alone for so long, or its answer means as much.
    """

    def __init__(
        self, message: str, *, may_have_succeeded: bool = True, pause_s_min: float = 0.0
    ) -> None:
        super().__init__(message)
        self.may_have_succeeded = may_have_succeeded
        self.pause_s_min = pause_s_min


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Capped exponential backoff with full jitter, under one deadline for each call.

    Full jitter, because what many clients wait for at once must not all come back at once
    (Brooker, "Exponential Backoff and Jitter", 2015).
    """

    pause_s: float = 0.1
    pause_s_max: float = 10.0
    deadline_s: float = 30.0
    put_deadline_s: float = 120.0  # nobody waits in a read(2) for it, and a chunk is much to redo
    bytes_per_s_min: float = 128 * 1024
    """A transfer has so much more time: twice what one attempt is given."""

    def deadline_for(self, size: int, *, put: bool = False) -> float:
        """Seconds that a call may take which moves `size` bytes."""
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
        """Seconds to wait after `attempt` (1 for the first) failed; None: give up.

        `left_s` is what is left of the deadline, `attempt_s` what another attempt may take, and
        `draw` a number from [0, 1).
        """
        ceiling = min(self.pause_s_max, self.pause_s * 2.0 ** min(attempt - 1, 60))
        pause = max(pause_s_min, ceiling * draw)
        return pause if pause + attempt_s <= left_s else None


@dataclass(frozen=True, slots=True)
class RetryClock:
    """What retries ask of the world; tests give their own."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    draw: Callable[[], float] = random.SystemRandom().random  # never the same in two processes


class RetryLoop:
    """The attempts of one call, up to its deadline."""

    def __init__(
        self, policy: RetryPolicy, clock: RetryClock, *, deadline_s: float, attempt_s: float
    ) -> None:
        self.may_have_succeeded = False  # whether a failed attempt may have been carried out
        self._policy = policy
        self._clock = clock
        self._attempt_s = attempt_s
        self._deadline_s = deadline_s
        self._begun = clock.now()
        self._attempt = 0

    def call(self, act: Callable[[], Item]) -> Item:
        """What `act` returns, in as many attempts as it takes."""
        while True:
            try:
                return act()
            except ObjectStoreError as error:
                self.wait_or_raise(error)

    def wait_or_raise(self, error: ObjectStoreError) -> None:
        """An attempt failed: return when it is time for another, or raise."""
        if not error.retry:
            raise error
        self._attempt += 1
        known = error if isinstance(error, AttemptFailed) else AttemptFailed(error.message)
        self.may_have_succeeded = self.may_have_succeeded or known.may_have_succeeded
        spent = self._clock.now() - self._begun
        pause = self._policy.pause_before(
            self._attempt,
            left_s=self._deadline_s - spent,
            attempt_s=self._attempt_s,
            draw=self._clock.draw(),
            pause_s_min=known.pause_s_min,
        )
        if pause is None:
            tries = f"{self._attempt} attempt" + "s" * (self._attempt > 1)
            raise ObjectStoreError(f"{error.message} ({tries} in {spent:.1f} s)") from error
        self._clock.sleep(pause)


class RetryingStore(ReadWrapper):
    """Another store, tried again where that may help.

    `attempt_s` says how long one attempt of the inner store may take that moves so many bytes, and
    whether it is a put.
    """

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

    def _retrying(self, size: int = 0, *, put: bool = False) -> RetryLoop:
        return RetryLoop(
            self._policy,
            self._clock,
            deadline_s=self._policy.deadline_for(size, put=put),
            attempt_s=self._attempt_s(size, put),
        )

    def put(self, name: str, parts: Sequence[Bytes]) -> None:
        """After an attempt of which nobody knows, an object of that name may be our own: equal
        content is success. Without such an attempt it is another's, whatever it holds."""
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        retrying = self._retrying(sum(map(len, views)), put=True)

        def attempt() -> None:
            try:
                self.inner.put(name, views)
            except ObjectExists:
                if not (retrying.may_have_succeeded and self._holds(name, views)):
                    raise

        retrying.call(attempt)

    def _holds(self, name: str, views: Sequence[memoryview]) -> bool:
        """Whether an object has exactly this content; compared piece by piece."""
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
        except ObjectMissing:  # deleted since: then it was not there for us to keep
            return False
        return True

    def replace(self, name: str, parts: Sequence[Bytes]) -> None:
        size = sum(memoryview(part).nbytes for part in parts)
        self._retrying(size, put=True).call(lambda: self.inner.replace(name, parts))

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytearray:
        return self._retrying(length or 0).call(lambda: self.inner.get(name, start, length))

    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        self._retrying(len(buffer)).call(lambda: self.inner.read_into(name, start, buffer))

    def read_ranges(
        self, name: str, ranges: Sequence[tuple[int, int]], room: memoryview
    ) -> Iterator[memoryview]:
        """Goes on behind the last range that was given. Not with an object that may change: its
        ranges would be of two versions."""
        size = max((size for _, size in ranges), default=0)
        done, before, retrying = 0, 0, self._retrying(size)
        while True:
            try:
                for view in self.inner.read_ranges(name, ranges[done:], room):
                    yield view
                    done += 1
                return
            except ObjectStoreError as error:
                if done and MUTABLE_NAME.fullmatch(name):
                    raise
                if done > before:
                    before, retrying = done, self._retrying(size)
                retrying.wait_or_raise(error)

    def read_uncached(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        self._retrying(len(buffer)).call(lambda: self.inner.read_uncached(name, start, buffer))

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        return self._listing(lambda after: self.inner.list(prefix, after), after, _name_of)

    def names(self, prefix: str, after: str = "") -> Iterator[str]:
        return self._listing(lambda after: self.inner.names(prefix, after), after, str)

    def _listing(
        self, begin: Callable[[str], Iterator[Item]], after: str, name_of: Callable[[Item], str]
    ) -> Iterator[Item]:
        """A listing that goes on behind its last name; the deadline is that of one step."""
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

    def leftovers(self, prefix: str = "") -> Iterator[Leftover]:
        return iter(self._retrying().call(lambda: [*self.inner.leftovers(prefix)]))

    def discard(self, leftover: Leftover) -> None:
        self._retrying().call(lambda: self.inner.discard(leftover))

    def foreign(self, prefix: str = "") -> Iterator[str]:
        return iter(self._retrying().call(lambda: [*self.inner.foreign(prefix)]))


def _name_of(info: ObjectInfo) -> str:
    return info.name
