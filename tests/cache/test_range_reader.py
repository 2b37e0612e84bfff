"""`RangeReader` answers with the requested bytes, in few reads, within limits of memory and
time."""

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from diesel_fs.cache.disk.chunks import DiskTier
from diesel_fs.cache.read_through import ReadThroughCache
from diesel_fs.cache.readers.range_reader import RangeReader
from diesel_fs.cache.tiers import CacheTier, MemoryTier
from diesel_fs.errors import BusyError, DeadlineError, ObjectStoreError, TruncatedError
from tests.examples import examples

from ..waiting import wait_until
from .chunk_ranges import Part, Ranges
from .conftest import Counting, Gate
from .disk_tier import Chunks, file_of, put


@pytest.fixture
def ranges(store: Counting, chunks: Chunks) -> Iterator[Ranges]:
    found = Ranges(store, chunks, MemoryTier(0))
    yield found
    found.close()


@pytest.fixture(params=["none", "memory", "disk"])
def tiered(
    request: pytest.FixtureRequest, place: Path, store: Counting, chunks: Chunks
) -> Iterator[Ranges]:
    """The tier has every second chunk, unless it has no room."""
    tier: CacheTier = MemoryTier(0 if request.param == "none" else 1 << 30)
    if request.param == "disk":
        tier = DiskTier(place, next(iter(chunks)).identity, 1 << 30)
    for key in [] if request.param == "none" else list(chunks)[::2]:
        put(tier, key, chunks[key])
    found = Ranges(store, chunks, tier)
    yield found
    found.close()
    tier.close()


@examples(60, suppress=(HealthCheck.function_scoped_fixture,))
@given(data=st.data())
def test_answers_are_the_requested_bytes(tiered: Ranges, data: st.DataObject) -> None:
    chunk = st.sampled_from(sorted(tiered.contents))
    lengths = st.sampled_from([0, 1, 7, 4096, 70_000])
    drawn = data.draw(st.lists(st.tuples(chunk, st.floats(0, 1), lengths), max_size=30))
    parts = []
    for name, at, size in drawn:
        length = len(tiered.contents[name])
        start = int(at * length)
        parts.append((name, start, min(size, length - start)))
    assert all(piece.readonly for piece in tiered.check(*parts))


def test_parts_of_a_chunk_are_one_read(ranges: Ranges) -> None:
    """A request is assumed to cost milliseconds until it is measured, so gaps are read along."""
    name, content = next(iter(ranges.contents.items()))
    store, end = ranges.store, len(content)
    assert len(ranges.check((name, 0, end))) == 1
    assert [(start, size) for _, start, size in store.reads] == [(0, end)]
    for parts in ([(name, at, 100) for at in range(end - 100, 0, -500)], [(name, 96, 5000)] * 5):
        store.reads.clear()
        Ranges(store, ranges.chunks, MemoryTier(0)).check(*parts)
        assert len(store.reads) == 1


def test_gaps_are_not_read_from_a_near_store(ranges: Ranges) -> None:
    """A request to a folder costs next to nothing."""
    name, content = next(iter(ranges.contents.items()))
    costs = ranges.cache.costs
    for _ in range(100):
        costs.observe(100, 20e-6)
        costs.observe(4 << 20, 1e-3)
    assert 4 << 10 <= costs.gap_bytes <= 200 << 10
    costs.latency_s = 1e-6
    ranges.check((name, 0, 10), (name, len(content) - 10, 10))
    assert len(ranges.store.reads) == 2


def test_a_request_that_shared_a_failed_read_reads_itself(ranges: Ranges) -> None:
    gate, failed = Gate(ranges.store), list[str]()

    def fail_once(name: str, buffer: memoryview) -> None:
        gate.wait(name, buffer)
        if not failed:
            failed.append(name)
            raise ObjectStoreError("503")

    ranges.store.change = fail_once
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ranges.check_part, 0)
        gate.await_reads(1)
        second = pool.submit(ranges.check_part, 0)
        (flight,) = ranges.reader._flights.values()
        wait_until(lambda: flight._ended is not None)  # the second waits
        gate.open.set()
        with pytest.raises(ObjectStoreError, match="503"):
            first.result(20)
        second.result(20)
    assert len(ranges.store.reads) == 2


def test_O20_all_requests_of_a_process_keep_a_limit_of_reads(ranges: Ranges) -> None:
    ranges.reader = RangeReader(ranges.cache, store_reads_max=4)
    gate = Gate(ranges.store)
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(ranges.check, (ranges.keys[0].id, 100 * i, 50)) for i in range(12)]
        gate.expect_at_most(4)
        gate.open.set()
        for answer in answers:
            answer.result(20)
    assert gate.most == 4


def test_a_read_that_waits_for_a_busy_store_ends_in_time(ranges: Ranges) -> None:
    gate = Gate(ranges.store)
    ranges.reader = RangeReader(ranges.cache, store_reads_max=1, deadline_s=0.1)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ranges.check_part, 0)
        gate.await_reads(1)
        with pytest.raises(DeadlineError):  # no room at the store
            ranges.check_part(1)
        with pytest.raises(DeadlineError):  # another's read, which takes too long
            ranges.check_part(0)
        gate.open.set()
        first.result(20)


def test_B1_a_part_beyond_the_end_is_an_error_of_its_request_alone(tiered: Ranges) -> None:
    for name, content in list(tiered.contents.items())[:2]:
        end = len(content)
        for size in (70_000, end):
            with pytest.raises(TruncatedError):
                tiered.read((name, 0, size), (name, end - 5, 6))
        for part in ((name, end - 5, 5), (name, 0, end)):
            tiered.check(part)
    assert not tiered.reader._flights


def test_a_request_fails_after_all_its_reads_have_ended(ranges: Ranges) -> None:
    parts: list[Part] = [(name, 0, 100) for name in ranges.contents]
    parts[len(parts) // 2] = (bytes(16), 0, 100)
    for some in (parts, [(bytes(16), 0, 100)]):
        gc.disable()
        try:
            assert "no such object" in failure(ranges, some)
            assert not ranges.reader._flights
            # unless a cycle keeps the memory
            wait_until(lambda: not ranges.reader._answers.used_bytes)
        finally:
            gc.enable()


def failure(ranges: Ranges, parts: list[Part]) -> str:
    """The message of the error. (pytest.raises would keep the error, and with it the memory.)"""
    try:
        ranges.read(*parts)
    except ObjectStoreError as error:
        return error.message
    return ""


def test_G6_answers_that_nobody_takes_keep_to_a_budget(ranges: Ranges) -> None:
    name, content = next(iter(ranges.contents.items()))
    whole = name, 0, len(content)
    limit = 3 * len(content) + 100
    ranges.reader = RangeReader(ranges.cache, answer_bytes_max=limit, wait_s=0.05)
    answers = [ranges.read(whole) for _ in range(3)]
    with pytest.raises(BusyError):
        ranges.read(whole)
    answers.pop()
    gc.collect()
    answers.append(ranges.read(whole))
    del answers
    gc.collect()
    assert ranges.reader._answers.used_bytes == 0
    ranges.reader = RangeReader(ranges.cache, answer_bytes_max=10, wait_s=0.05)
    held = ranges.check(whole)
    with pytest.raises(BusyError):
        ranges.read((name, 0, 1))
    del held


def test_B3_a_fresh_read_gets_the_bytes_of_the_store(tiered: Ranges, place: Path) -> None:
    part = tiered.keys[0].id, 500, 900
    if isinstance(tiered.tier, DiskTier):
        file_of(place, tiered.keys[0]).write_bytes(bytes(len(tiered.chunks[tiered.keys[0]])))
        assert b"".join(tiered.read(part)) == bytes(900), "else this test shows nothing"
    assert b"".join(tiered.read(part, fresh=True)) == tiered.expected(part)
    assert tiered.store.reads[0][1:] == (500, 900)
    tiered.check(part)


def test_reads_are_counted_by_the_place_that_served_them(
    place: Path, store: Counting, chunks: Chunks
) -> None:
    counted: list[tuple[str, int, int]] = []
    (one, content), (two, _), *_ = chunks.items()
    tier = DiskTier(place, one.identity, 1 << 30)
    put(tier, one, content)
    ranges = Ranges(store, chunks, tier)
    ranges.cache = ReadThroughCache(store, tier, counted=lambda *each: counted.append(each))
    ranges.reader = RangeReader(ranges.cache)
    ranges.check((one.id, 0, 10), (two.id, 0, 20), (one.id, 0, 5))
    assert sorted(counted) == [("disk", 2, 15), ("store", 1, 20)]
    stats = ranges.cache.stats()
    assert (stats["disk_reads"], stats["disk_bytes"]) == (2, 15)
    assert (stats["store_reads"], stats["store_bytes"], stats["store_requests"]) == (1, 20, 1)
    ranges.close()
