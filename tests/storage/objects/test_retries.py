"""The calls that are retried, and the time for which they are, with a clock of the test's own and
no network.
"""

import email.utils
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from threading import Thread
from time import time as now_s

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.errors import (
    DieselError,
    NoSpaceError,
    ObjectExists,
    ObjectMissing,
    ObjectStoreError,
    PermissionDenied,
    TruncatedError,
)
from diesel_fs.storage.objects.folder import FolderStore
from diesel_fs.storage.objects.retry import (
    DEMANDED_S_MAX,
    AttemptFailed,
    LongPauses,
    RetryClock,
    RetryingStore,
    RetryLoop,
    RetryPolicy,
    retry_after_s,
)
from diesel_fs.storage.objects.store import FastReads, Housekeeping, ObjectInfo, ObjectStore
from tests.rows import each_row
from tests.storage.objects.faulty_store import Fault, FaultyStore
from tests.storage.objects.scripted_store import CHUNKS, LEASE, chunk
from tests.waiting import wait_until

POLICY = RetryPolicy(pause_s=1, pause_s_max=8, deadline_s=60, put_deadline_s=60)
FAILED = AttemptFailed("lost")
NAME = chunk("a")


@dataclass(slots=True)
class Time:
    """A clock that advances only by sleeps, and by attempts that take `attempt_s`."""

    at: float = 0.0
    attempt_s: float = 0.0
    slept: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.at += seconds

    def clock(self, draw: float = 1.0) -> RetryClock:
        return RetryClock(now=lambda: self.at, sleep=self.sleep, draw=lambda: draw)

    def pass_by(self, name: str) -> None:
        self.at += self.attempt_s


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def folder(tmp_path: Path) -> FolderStore:
    made = FolderStore.create(tmp_path / "store")
    made.put(NAME, [b"0123456789"])
    return made


@pytest.fixture
def faulty(folder: FolderStore) -> Iterator[FaultyStore]:
    with FaultyStore(folder) as faulty:
        yield faulty


@pytest.fixture
def store(faulty: FaultyStore, time: Time) -> RetryingStore:
    return RetryingStore(faulty, POLICY, clock=time.clock())


def test_pauses_double_up_to_a_limit(time: Time, faulty: FaultyStore, store: RetryingStore) -> None:
    faulty.plan(Fault("get", error=FAILED, times=6))
    assert store.get(NAME) == b"0123456789"
    assert time.slept == [1, 2, 4, 8, 8, 8]


@given(
    attempt=st.integers(1, 10_000),
    left_s=st.floats(-10, 1000),
    attempt_s=st.floats(0, 100),
    draw=st.floats(0, 1, exclude_max=True),
    pause_s_min=st.floats(0, 30),
)
def test_no_attempt_begins_that_might_end_after_the_deadline(
    attempt: int, left_s: float, attempt_s: float, draw: float, pause_s_min: float
) -> None:
    policy = RetryPolicy()
    pause = policy.pause_before(
        attempt, left_s=left_s, attempt_s=attempt_s, draw=draw, pause_s_min=pause_s_min
    )
    if pause is None:
        assert left_s < attempt_s + max(policy.pause_s_max, pause_s_min)
    else:
        assert pause_s_min <= pause <= max(policy.pause_s_max, pause_s_min)
        assert pause + attempt_s <= left_s


def test_the_deadline_holds_whatever_attempts_take(time: Time, faulty: FaultyStore) -> None:
    time.attempt_s = 7
    fault = Fault("get", error=FAILED, act=time.pass_by, times=None)
    faulty.plan(fault)
    store = RetryingStore(
        faulty, POLICY, attempt_s=lambda size, put: time.attempt_s, clock=time.clock(0.3)
    )
    with pytest.raises(ObjectStoreError, match=r"lost \(\d+ attempts in") as caught:
        store.get(NAME)
    assert caught.value.__cause__ is FAILED
    assert 40 < time.at <= POLICY.deadline_s
    assert fault.hits > 4


def test_a_store_that_requests_a_pause_gets_it(time: Time, faulty: FaultyStore) -> None:
    busy = AttemptFailed("503", may_have_succeeded=False, pause_s_min=5)
    faulty.plan(Fault("get", error=busy, times=2))
    RetryingStore(faulty, POLICY, clock=time.clock(0)).get(NAME)
    assert time.slept == [5, 5]


@each_row(
    "error",
    [PermissionDenied("no"), NoSpaceError("full"), ObjectMissing("gone"), TruncatedError("short")],
)
def test_permanent_errors_are_not_retried(
    time: Time, faulty: FaultyStore, store: RetryingStore, error: Exception
) -> None:
    faulty.plan(Fault("get", error=error))
    with pytest.raises(type(error)):
        store.get(NAME)
    assert time.slept == []


@each_row("error", [FAILED, ObjectStoreError("who knows")])
@each_row("done", [False, True])
def test_after_a_lost_answer_a_put_finds_out_whether_it_succeeded(
    folder: FolderStore,
    faulty: FaultyStore,
    store: RetryingStore,
    error: ObjectStoreError,
    done: bool,
) -> None:
    folder.delete(NAME)
    faulty.plan(Fault("put", error=error, done=done))
    store.put(NAME, [b"con", b"", b"tent"])
    assert folder.get(NAME) == b"content"


@each_row(
    ("error", "theirs"),
    [
        *((FAILED, theirs) for theirs in (b"", b"conten", b"contenT", b"content.")),
        # Without a lost answer equal content is another writer's, too
        (AttemptFailed("409", may_have_succeeded=False), b"content"),
    ],
)
def test_an_object_of_another_writer_is_never_taken_for_ours(
    folder: FolderStore,
    faulty: FaultyStore,
    store: RetryingStore,
    error: ObjectStoreError,
    theirs: bytes,
) -> None:
    folder.delete(NAME)
    faulty.plan(Fault("put", error=error, act=lambda name: folder.put(name, [theirs])))
    with pytest.raises(ObjectExists):
        store.put(NAME, [b"content"])
    assert folder.get(NAME) == theirs


def test_comparisons_are_retried_too(time: Time, faulty: FaultyStore, store: RetryingStore) -> None:
    faulty.plan(
        Fault("put", error=FAILED, done=True),
        Fault("stat", error=FAILED),
        Fault("read_into", error=FAILED),
    )
    store.put(chunk("b"), [b"content"])
    assert len(time.slept) == 3


def test_after_a_failure_a_listing_continues_behind_its_last_name(
    time: Time, folder: FolderStore, faulty: FaultyStore, store: RetryingStore
) -> None:
    names = sorted([NAME, *(chunk(f"{number:02}") for number in range(10))])
    for name in names[:10]:
        folder.put(name, [b"x"])
    faulty.plan(Fault("list", error=FAILED, done=True, keep=3))
    assert [*store.housekeeping.names(CHUNKS)] == names
    store = RetryingStore(_Flaky(folder, 3), POLICY, clock=time.clock())
    assert [info.name for info in store.list(CHUNKS)] == names
    store = RetryingStore(_Flaky(folder, 50), POLICY, clock=time.clock())
    with pytest.raises(ObjectStoreError, match="attempts"):
        [*store.list(CHUNKS)]


class _Flaky(FaultyStore):
    """A store with listings that break off: the first `dead` before any name, later ones after
    two."""

    def __init__(self, inner: FolderStore, dead: int) -> None:
        super().__init__(inner)
        self.dead = dead

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        for number, info in enumerate(super().list(prefix, after)):
            if number == 2 or self.dead:
                self.dead = max(0, self.dead - 1)
                raise FAILED
            yield info


def test_ranges_of_a_mutable_object_are_not_continued_after_a_failure(
    time: Time, folder: FolderStore, faulty: FaultyStore, store: RetryingStore
) -> None:
    folder.replace(LEASE, [b"0123456789"])

    def second_range(name: str, times: int | None = 1) -> bytes:
        faulty.plan(Fault("read_into", error=FAILED, skip=1, times=times))
        ranges = store.fast_reads.read_ranges(name, [(0, 2), (4, 3)], memoryview(bytearray(3)))
        assert bytes(next(ranges)) == b"01"
        return bytes(next(ranges))

    with pytest.raises(AttemptFailed):
        second_range(LEASE)
    assert second_range(NAME) == b"456"
    time.at = 0
    with pytest.raises(ObjectStoreError, match="attempts"):
        second_range(NAME, times=None)
    assert time.at <= POLICY.deadline_s


def _public(members: type) -> set[str]:
    return {name for name in vars(members) if not name.startswith("_")}


def test_every_method_that_can_fail_is_retried(store: RetryingStore) -> None:
    """`fork_safe` sends a store nothing; `FastReads` reads by the store's own `read_into` unless it
    is overridden."""
    assert _public(ObjectStore) - _public(RetryingStore) == {"fork_safe"}
    assert _public(Housekeeping) - _public(type(store.housekeeping)) == set()
    assert _public(type(store.fast_reads)) == {"read_ranges", "read_uncached"}
    assert isinstance(store.fast_reads, FastReads)


def test_reads_of_parts_are_retried(time: Time, faulty: FaultyStore, store: RetryingStore) -> None:
    faulty.plan(Fault("read_into", error=FAILED, times=2))
    assert [bytes(part) for part in store.fast_reads.read_parts([(NAME, 2, 3)])] == [b"234"]
    store.fast_reads.read_uncached(NAME, 0, buffer := bytearray(2))
    assert buffer == b"01"
    assert len(time.slept) == 2


class NotedPauses(LongPauses):
    def __init__(self) -> None:
        super().__init__()
        self.noted: list[float] = []

    def wait(self, seconds: float, reason: str) -> None:
        self.noted.append(seconds)


@each_row("may_wait", [True, False])
def test_O3_callers_that_may_wait_grant_long_pauses(
    may_wait: bool,
) -> None:
    time, pauses, answers = Time(), NotedPauses(), [90.0, 70.0, 0.0]
    loop = RetryLoop(
        POLICY, time.clock(0), deadline_s=60, attempt_s=1, pauses=pauses if may_wait else None
    )

    def act() -> str:
        if demanded_s := answers.pop(0):
            raise AttemptFailed("zenodo: 429", pause_s_min=demanded_s)
        return "content"

    if may_wait:
        assert loop.call(act) == "content"
        assert pauses.noted == [90, 70]
    else:
        with pytest.raises(ObjectStoreError, match=r"zenodo: 429 \(1 attempt .* pause of 90 s"):
            loop.call(act)


def test_O3_endless_requests_for_pauses_get_an_hour() -> None:
    pauses = NotedPauses()
    loop = RetryLoop(POLICY, Time().clock(0), deadline_s=60, attempt_s=1, pauses=pauses)

    def act() -> None:
        raise AttemptFailed("zenodo: 503", pause_s_min=1000)

    with pytest.raises(ObjectStoreError, match="demands a pause of 1000 s: try again then"):
        loop.call(act)
    assert sum(pauses.noted) == 3000 < DEMANDED_S_MAX


def test_O3_a_long_pause_logs_once_and_can_be_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pauses, ended = LongPauses(), Queue[DieselError]()

    def wait() -> None:
        try:
            pauses.wait(3000, "zenodo: 429")
        except DieselError as error:
            ended.put(error)

    for _ in range(3):
        Thread(target=wait, daemon=True).start()
    wait_until(lambda: len(caplog.records) == 1)
    pauses.stop()
    assert {str(ended.get(timeout=20)) for _ in range(3)} == {
        "zenodo: 429; the work was cancelled during the pause"
    }
    assert caplog.messages == ["zenodo: 429; it demands a pause: the next request is in 3000 s"]


def test_O3_retry_after_is_a_number_or_a_date() -> None:
    assert retry_after_s("120") == 120
    assert 0 < retry_after_s(email.utils.formatdate(now_s() + 1000, usegmt=True)) <= 1000
    past = "Fri, 13 Feb 2009 23:31:30 GMT"
    for other in (past, "", "-1", "1.5", "9" * 400, "soon", "Fri, 99 Feb 2009"):
        assert retry_after_s(other) == 0, other
