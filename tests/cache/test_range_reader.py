"""`RangeReader` answers with the bytes asked for, in few reads, within limits of memory and
time."""

import gc
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from diesel_fs.cache.disk import DiskTier, prepare_cache_folder
from diesel_fs.cache.range_reader import RangeReader
from diesel_fs.cache.read_through import ReadThroughCache
from diesel_fs.cache.tiers import CacheTier, ChunkKey, MemoryTier
from diesel_fs.errors import BusyError, DeadlineError, ObjectStoreError, TruncatedError
from diesel_fs.format.entries import ChunkId
from diesel_fs.format.object_names import chunk_object
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.repository.local import LocalRepository
from tests.examples import examples

from ..waiting import wait_until
from .chunk_ranges import Part, records
from .conftest import Counting, Gate
from .disk_tier import put


def keys(view: Snapshot) -> list[ChunkKey]:
    return [ChunkKey(view.identity, chunk) for chunk in view.chunk_ids]


@pytest.fixture(scope="module")
def contents(repository: LocalRepository) -> dict[bytes, bytes]:
    view = repository.view("ds")
    get = repository.objects.get
    return {key.id: bytes(get(chunk_object(*key))) for key in keys(view)}


def tier_of(kind: str, folder: Path, view: Snapshot, contents: dict[bytes, bytes]) -> CacheTier:
    """A tier with every second chunk; of kind `none` it has no room."""
    if kind == "none":
        return MemoryTier(0)
    tier: CacheTier = MemoryTier(1 << 30)
    if kind == "disk":
        tier = DiskTier(prepare_cache_folder(folder / "cache"), view.identity, 1 << 30)
    for key in keys(view)[::2]:
        put(tier, key, contents[key.id])
    return tier


def uncached(store: Counting) -> ReadThroughCache:
    """A cache whose tier has no room."""
    return ReadThroughCache(store, MemoryTier(0))


@pytest.fixture(params=["none", "memory", "disk"])
def reads(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    store: Counting,
    view: Snapshot,
    contents: dict[bytes, bytes],
) -> Iterator[RangeReader]:
    tier = tier_of(request.param, tmp_path, view, contents)
    cache = ReadThroughCache(store, tier)
    merged = RangeReader(cache)
    yield merged
    merged.close()
    cache.close()


@examples(60, suppress=(HealthCheck.function_scoped_fixture,))
@given(data=st.data())
def test_answers_are_the_bytes_that_were_asked_for(
    reads: RangeReader, view: Snapshot, contents: dict[bytes, bytes], data: st.DataObject
) -> None:
    chunk = st.sampled_from(sorted(contents))
    lengths = st.sampled_from([0, 1, 7, 4096, 70_000])
    drawn = data.draw(st.lists(st.tuples(chunk, st.floats(0, 1), lengths), max_size=30))
    parts = []
    for name, at, size in drawn:
        content = contents[name]
        start = int(at * len(content))
        parts.append((name, start, min(size, len(content) - start)))
    answer = reads.read(view.identity, records(parts))
    assert b"".join(answer) == b"".join(
        contents[name][start : start + size] for name, start, size in parts
    )
    assert all(piece.readonly for piece in answer)


def test_a_whole_chunk_is_one_read_and_one_piece(
    store: Counting, view: Snapshot, contents: dict[bytes, bytes]
) -> None:
    (name, content), *_ = contents.items()
    answer = RangeReader(uncached(store)).read(view.identity, records([(name, 0, len(content))]))
    assert [bytes(piece) for piece in answer] == [content]
    assert [(start, size) for _, start, size in store.reads] == [(0, len(content))]


def test_many_small_parts_of_one_chunk_are_one_read(
    store: Counting, view: Snapshot, contents: dict[bytes, bytes]
) -> None:
    """A request is assumed to cost milliseconds until it is measured, so gaps are read along."""
    (name, content), *_ = contents.items()
    parts = [(name, at, 100) for at in range(len(content) - 100, 0, -500)]
    answer = RangeReader(uncached(store)).read(view.identity, records(parts))
    assert b"".join(answer) == b"".join(content[at : at + 100] for _, at, _ in parts)
    assert len(store.reads) == 1


def test_gaps_are_not_read_from_a_near_store(
    store: Counting, view: Snapshot, contents: dict[bytes, bytes]
) -> None:
    """A request to a folder costs next to nothing, so gaps are not read along."""
    (name, content), *_ = contents.items()
    cache = uncached(store)
    for _ in range(100):
        cache.costs.observe(100, 20e-6)
        cache.costs.observe(4 << 20, 1e-3)
    assert 4 << 10 <= cache.costs.gap_bytes <= 200 << 10
    cache.costs.request_s = 1e-6
    parts = [(name, 0, 10), (name, len(content) - 10, 10)]
    RangeReader(cache).read(view.identity, records(parts))
    assert len(store.reads) == 2


def test_a_part_that_is_asked_for_twice_is_read_once(
    store: Counting, view: Snapshot, contents: dict[bytes, bytes]
) -> None:
    (name, content), *_ = contents.items()
    part = (name, 96, 5000)
    answer = RangeReader(uncached(store)).read(view.identity, records([part] * 5))
    assert b"".join(answer) == content[96:5096] * 5
    assert len(store.reads) == 1


def test_F10_requests_at_the_same_moment_share_a_read(
    store: Counting, view: Snapshot, contents: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    (name, content), *_ = contents.items()
    reads, gate = RangeReader(uncached(store)), Gate(store)
    joined = threading.Semaphore(0)
    waited = Future.result

    def result(self: "Future[object]", timeout: float | None = None) -> object:
        joined.release()
        return waited(self, timeout)

    monkeypatch.setattr(Future, "result", result)
    with ThreadPoolExecutor(16) as pool:
        first = pool.submit(reads.read, view.identity, records([(name, 0, len(content))]))
        assert gate.arrived.acquire(timeout=20)
        others = [
            pool.submit(reads.read, view.identity, records([(name, 1000 * i, 900)]))
            for i in range(15)
        ]
        for _ in others:
            assert joined.acquire(timeout=20)
        gate.open.set()
        monkeypatch.undo()
        assert b"".join(first.result(20)) == content
        for i, other in enumerate(others):
            assert b"".join(other.result(20)) == content[1000 * i : 1000 * i + 900]
    assert len(store.reads) == 1
    assert not reads._in_flight


def test_a_request_that_shared_a_failed_read_reads_itself(
    store: Counting, view: Snapshot, contents: dict[bytes, bytes]
) -> None:
    (name, content), *_ = contents.items()
    reads, gate = RangeReader(uncached(store)), Gate(store)
    held = gate._wait
    failed: list[str] = []

    def fail_once(name: str, buffer: memoryview) -> None:
        held(name, buffer)
        if not failed:
            failed.append(name)
            raise ObjectStoreError("503")

    store.change = fail_once
    parts = records([(name, 0, 500)])
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(reads.read, view.identity, parts)
        assert gate.arrived.acquire(timeout=20)
        second = pool.submit(reads.read, view.identity, parts)
        flight = reads._in_flight[ChunkKey(view.identity, ChunkId(name))][0]
        wait_until(lambda: bool(flight.content._condition._waiters))  # type: ignore[attr-defined]  # the test looks inside
        gate.open.set()
        with pytest.raises(ObjectStoreError, match="503"):
            first.result(20)
        assert b"".join(second.result(20)) == content[:500]
    assert len(store.reads) == 2


def test_a_request_keeps_its_limit_of_reads(
    store: Counting, view: Snapshot, contents: dict[bytes, bytes]
) -> None:
    reads, gate = RangeReader(uncached(store), request_reads_max=3), Gate(store)
    parts = [(name, 0, 100) for name in contents]
    assert len(parts) > 6
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(reads.read, view.identity, records(parts))
        for _ in range(3):
            assert gate.arrived.acquire(timeout=20)
        assert not gate.arrived.acquire(timeout=0.2)
        gate.open.set()
        assert b"".join(answer.result(20)) == b"".join(contents[name][:100] for name, _, _ in parts)
    assert gate.most == 3


def test_O20_a_process_keeps_its_limit_of_reads(
    store: Counting, view: Snapshot, contents: dict[bytes, bytes]
) -> None:
    reads, gate = RangeReader(uncached(store), store_reads_max=4), Gate(store)
    (name, content), *_ = contents.items()
    with ThreadPoolExecutor(12) as pool:
        answers = [
            pool.submit(reads.read, view.identity, records([(name, 100 * i, 50)]))
            for i in range(12)
        ]
        for _ in range(4):
            assert gate.arrived.acquire(timeout=20)
        assert not gate.arrived.acquire(timeout=0.2)
        gate.open.set()
        for i, answer in enumerate(answers):
            assert b"".join(answer.result(20)) == content[100 * i : 100 * i + 50]
    assert gate.most == 4


def test_a_read_that_waits_for_a_busy_store_ends_in_time(
    store: Counting, view: Snapshot, contents: dict[bytes, bytes]
) -> None:
    gate = Gate(store)
    reads = RangeReader(uncached(store), store_reads_max=1, deadline_s=0.1)
    one, two = list(contents)[:2]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(reads.read, view.identity, records([(one, 0, 10)]))
        assert gate.arrived.acquire(timeout=20)
        with pytest.raises(DeadlineError):  # no room at the store
            reads.read(view.identity, records([(two, 0, 10)]))
        with pytest.raises(DeadlineError):  # another's read, which takes too long
            reads.read(view.identity, records([(one, 0, 10)]))
        gate.open.set()
        assert b"".join(first.result(20)) == contents[one][:10]


@pytest.mark.parametrize("kind", ["none", "memory", "disk"])
def test_B1_a_part_beyond_the_end_is_an_error_of_its_request_alone(
    kind: str, tmp_path: Path, store: Counting, view: Snapshot, contents: dict[bytes, bytes]
) -> None:
    reads = RangeReader(ReadThroughCache(store, tier_of(kind, tmp_path, view, contents)))
    for name, content in list(contents.items())[:2]:
        end = len(content)
        with pytest.raises(TruncatedError):
            reads.read(view.identity, records([(name, 0, 70_000), (name, end - 5, 6)]))
        with pytest.raises(TruncatedError):
            reads.read(view.identity, records([(name, 0, end), (name, end - 5, 6)]))
        answer = reads.read(view.identity, records([(name, end - 5, 5)]))
        assert b"".join(answer) == content[-5:]
    assert not reads._in_flight


def test_a_request_fails_after_all_its_reads_have_ended(
    store: Counting, view: Snapshot, contents: dict[bytes, bytes]
) -> None:
    parts = [(name, 0, 100) for name in contents]
    parts[len(parts) // 2] = (bytes(16), 0, 100)
    reads = RangeReader(uncached(store))
    for some in (parts, [(bytes(16), 0, 100)]):
        gc.disable()
        try:
            assert "no such object" in failure(reads, view, some)
            assert not reads._in_flight
            wait_until(lambda: not reads._answers.used_bytes)  # unless a cycle keeps the memory
        finally:
            gc.enable()


def failure(reads: RangeReader, view: Snapshot, parts: Sequence[Part]) -> str:
    """The message of the error. (pytest.raises would keep the error, and with it the memory.)"""
    try:
        reads.read(view.identity, records(parts))
    except ObjectStoreError as error:
        return error.message
    return ""


def test_G6_answers_that_nobody_takes_keep_to_a_budget(
    store: Counting, view: Snapshot, contents: dict[bytes, bytes]
) -> None:
    (name, content), *_ = contents.items()
    part = records([(name, 0, len(content))])
    reads = RangeReader(uncached(store), answer_bytes_max=3 * len(content) + 100, wait_s=0.05)
    answers = [reads.read(view.identity, part) for _ in range(3)]
    with pytest.raises(BusyError):
        reads.read(view.identity, part)
    answers.pop()
    gc.collect()
    answers.append(reads.read(view.identity, part))
    del answers
    gc.collect()
    assert reads._answers.used_bytes == 0


def test_an_answer_larger_than_the_budget_is_served_alone(
    store: Counting, view: Snapshot, contents: dict[bytes, bytes]
) -> None:
    (name, content), *_ = contents.items()
    reads = RangeReader(uncached(store), answer_bytes_max=10, wait_s=0.05)
    answer = reads.read(view.identity, records([(name, 0, len(content))]))
    assert b"".join(answer) == content
    with pytest.raises(BusyError):
        reads.read(view.identity, records([(name, 0, 1)]))


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_B3_a_fresh_read_gets_the_bytes_of_the_store(
    kind: str, tmp_path: Path, store: Counting, view: Snapshot, contents: dict[bytes, bytes]
) -> None:
    (name, content), *_ = contents.items()
    tier = tier_of(kind, tmp_path, view, contents)
    reads = RangeReader(ReadThroughCache(store, tier))
    if kind == "disk":
        (file,) = (tmp_path / "cache").glob(f"*/*/{name.hex()}")
        file.write_bytes(bytes(len(content)))
    part = records([(name, 500, 900)])
    first = reads.read(view.identity, part)
    assert (b"".join(first) == bytes(900)) == (kind == "disk"), "else this test shows nothing"
    assert b"".join(reads.read(view.identity, part, fresh=True)) == content[500:1400]
    assert store.reads[0][1:] == (500, 900)
    assert b"".join(reads.read(view.identity, part)) == content[500:1400]
    tier.close()


def test_reads_are_counted_by_the_place_that_served_them(
    tmp_path: Path, store: Counting, view: Snapshot, contents: dict[bytes, bytes]
) -> None:
    told: list[tuple[str, int, int]] = []
    tier = tier_of("disk", tmp_path, view, contents)
    cache = ReadThroughCache(store, tier, counted=lambda *each: told.append(each))
    one, two = list(contents)[:2]
    RangeReader(cache).read(view.identity, records([(one, 0, 10), (two, 0, 20), (one, 0, 5)]))
    assert sorted(told) == [("disk", 2, 15), ("store", 1, 20)]
    stats = cache.stats()
    assert (stats["disk_reads"], stats["disk_bytes"]) == (2, 15)
    assert (stats["store_reads"], stats["store_bytes"], stats["store_requests"]) == (1, 20, 1)
    cache.close()
