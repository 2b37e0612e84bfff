"""`ReadThroughCache` fetches the chunks that readers miss: which, in which order, and when."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from diesel_fs.cache import read_through
from diesel_fs.cache.tiers import MemoryTier
from diesel_fs.errors import NoSpaceError, ObjectStoreError
from diesel_fs.format.chunk import CHUNK_BYTES_DEFAULT
from diesel_fs.format.object_names import chunk_object

from ..waiting import wait_until
from .chunk_ranges import Ranges
from .conftest import Counting, Gate
from .disk_tier import Chunks, content_of, file_of, put, tier_at


def is_fetch(buffer: memoryview) -> bool:
    """The readers of these tests read 50 bytes."""
    return len(buffer) > 50


@pytest.fixture
def ranges(store: Counting, place: Path, chunks: Chunks) -> Iterator[Ranges]:
    found = Ranges(store, chunks, tier_at(place))
    yield found
    found.close()


@pytest.fixture
def one_fetcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_through, "FETCHERS", 1)


@pytest.mark.usefixtures("one_fetcher")
def test_a_miss_is_served_at_once_and_fetches_its_dataset(ranges: Ranges) -> None:
    """Reads by the store's interface bypass the tier, so that verify and recover see the store."""
    ranges.check_part(5)
    reads = ranges.store.reads
    assert reads[0] == (chunk_object(*ranges.keys[5]), 200, 50)
    wait_until(ranges.has_all)
    count = len(ranges.keys)
    assert ranges.fetched() == [5, *(each for each in range(count) if each != 5)]
    before = len(reads)
    for number in range(count):
        ranges.check_part(number)
    assert len(reads) == before
    stats = ranges.cache.stats()
    assert stats["disk_reads"] == count
    assert (stats["store_reads"], stats["store_bytes"]) == (1, 50)
    assert stats["kept_chunks"] == stats["fetched_chunks"] == count
    for key in ranges.keys:
        ranges.cache.read_into(chunk_object(*key), 0, bytearray(100))
    assert len(reads) == before + count


def test_two_fetchers_fetch_each_chunk_once(ranges: Ranges) -> None:
    ranges.check_part(0)
    wait_until(ranges.has_all)
    assert sorted(ranges.fetched()) == [*range(len(ranges.keys))]


@pytest.mark.usefixtures("one_fetcher")  # else the other may come first
def test_a_chunk_that_was_read_whole_is_not_fetched_again(ranges: Ranges) -> None:
    key = ranges.keys[3]
    ranges.check((key.id, 0, len(ranges.chunks[key])))
    wait_until(ranges.has_all)
    assert ranges.fetched().count(3) == 1
    assert content_of(ranges.tier, key) == ranges.chunks[key]


def test_a_too_large_dataset_does_not_thrash(store: Counting, place: Path, chunks: Chunks) -> None:
    tier = tier_at(place, 4 * max(map(len, chunks.values())))
    ranges = Ranges(store, chunks, tier)
    for _ in range(20):
        for number in range(len(chunks)):
            ranges.check_part(number)
        wait_until(ranges.is_quiet)
    ranges.close()
    kept = [key for key in chunks if tier.holds(key)]
    assert 3 <= len(kept) < len(chunks)
    assert len(ranges.fetched()) <= len(kept) + 1, "thrashing"
    assert tier.folder.evictions == 0


def test_no_fetch_begins_while_a_reader_waits(
    ranges: Ranges, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in this process and not in others that share the tier."""
    monkeypatch.setattr(read_through, "PATIENCE_S", 30.0)
    other = tier_at(place)
    other.note_reading(begins=True)
    ranges.check_part(0)
    time.sleep(0.1)
    assert ranges.fetched() == []
    gate = Gate(ranges.store)
    reader = threading.Thread(target=ranges.check_part, args=(7,))
    reader.start()
    gate.await_reads(1)
    other.note_reading(begins=False)
    time.sleep(0.1)
    assert ranges.fetched() == []
    gate.open.set()
    reader.join(20)
    wait_until(lambda: len(ranges.fetched()) >= len(ranges.keys))
    other.close()


def test_fetching_goes_on_while_readers_wait(
    ranges: Ranges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_through, "PATIENCE_S", 0.02)
    monkeypatch.setattr(read_through, "REST_FACTOR", 100.0)
    rests: list[float] = []
    monkeypatch.setattr(ranges.cache, "_rest", rests.append)
    ranges.cache._waiting += 1  # a reader that never ends
    ranges.check_part(0)
    wait_until(lambda: len(ranges.fetched()) >= len(ranges.keys))
    ranges.cache._waiting -= 1
    assert len(rests) >= len(ranges.keys) - 1
    assert min(rests) > 0


def test_fetches_keep_their_limit(ranges: Ranges) -> None:
    gate = Gate(ranges.store)
    for key, content in ranges.chunks.items():
        ranges.cache.record_miss(key, 0, memoryview(content[:10]))
    gate.expect_at_most(read_through.FETCHERS)
    gate.open.set()
    wait_until(ranges.is_quiet)
    assert gate.most == read_through.FETCHERS


def test_a_damaged_chunk_is_not_kept(ranges: Ranges, caplog: pytest.LogCaptureFixture) -> None:
    def change(name: str, buffer: memoryview) -> None:
        if name == chunk_object(*ranges.keys[2]) and is_fetch(buffer):
            buffer[-1] ^= 1

    ranges.store.change = change
    for _ in range(5):
        ranges.check_part(2)
        wait_until(ranges.is_quiet)
    wait_until(lambda: len(ranges.fetched()) >= len(ranges.keys))
    assert ranges.fetched().count(2) == 1, "not fetched again"
    assert not ranges.tier.holds(ranges.keys[2])
    wait_until(lambda: "not kept in the cache" in caplog.text)


def test_a_failing_store_does_not_get_a_request_for_every_chunk(ranges: Ranges) -> None:
    def change(name: str, buffer: memoryview) -> None:
        if is_fetch(buffer):
            raise ObjectStoreError("503 Slow Down")

    ranges.store.change = change
    ranges.check_part(0)
    wait_until(ranges.is_quiet)
    wait_until(lambda: not ranges.cache._fetching)
    assert len(ranges.fetched()) <= 3
    assert ranges.cache._budget.used_bytes == 0


def test_deletion_reaches_the_tier(
    ranges: Ranges, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, deleted = ranges.keys[0], list[str]()
    put(ranges.tier, key, ranges.chunks[key])
    path = file_of(place, key)
    monkeypatch.setattr(ranges.store, "delete", deleted.append)
    ranges.cache.delete(chunk_object(*key))
    assert deleted == [chunk_object(*key)]
    assert not path.exists()


def test_close_does_not_wait_for_the_rest_of_a_dataset(ranges: Ranges) -> None:
    gate = Gate(ranges.store)
    ranges.cache.record_miss(ranges.keys[0], 0, memoryview(b"x"))
    gate.await_reads(1)
    gate.open.set()
    began_s = time.monotonic()
    ranges.close()
    ranges.close()
    assert time.monotonic() - began_s < 4
    assert not any(thread.is_alive() for thread in ranges.cache._threads)


# Which chunks are worth fetching


def fix_costs(monkeypatch: pytest.MonkeyPatch, ranges: Ranges, request_s: float) -> None:
    ranges.cache.costs.latency_s = request_s
    monkeypatch.setattr(ranges.cache.costs, "observe", lambda size, seconds: None)


@pytest.fixture
def in_memory(store: Counting, chunks: Chunks) -> Iterator[Ranges]:
    found = Ranges(store, chunks, MemoryTier(1 << 30))
    yield found
    found.close()


def test_a_chunk_is_fetched_into_memory_once_its_misses_have_cost_as_much(
    in_memory: Ranges, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, reads = in_memory.cache, in_memory.store.reads
    fix_costs(monkeypatch, in_memory, request_s=0.010)
    cache.costs.s_per_byte = 0.035 / CHUNK_BYTES_DEFAULT  # so that a chunk costs 4.5 requests
    in_memory.check_part(1)
    in_memory.check_part(0, times=4)
    assert len(reads) == 5
    in_memory.check_part(0)
    wait_until(lambda: cache.stats().get("kept_chunks") == 1)
    assert len(reads) == 7, "one more miss, the chunk, and no other chunk"
    in_memory.check_part(0, times=10)
    assert len(reads) == 7
    assert cache.stats()["memory_reads"] == 10


def test_an_admitted_chunk_is_fetched_soon(ranges: Ranges, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that nobody has missed wait."""
    monkeypatch.setattr(read_through, "PATIENCE_S", 30.0)
    fix_costs(monkeypatch, ranges, request_s=1.0)  # one miss pays
    ranges.cache._waiting += 1  # a reader that never ends
    ranges.check_part(4, times=2)
    wait_until(lambda: ranges.fetched() == [4])
    time.sleep(0.1)
    assert ranges.fetched() == [4]
    ranges.cache._waiting -= 1


def test_a_near_store_admits_nothing(in_memory: Ranges, monkeypatch: pytest.MonkeyPatch) -> None:
    fix_costs(monkeypatch, in_memory, request_s=0.00005)
    in_memory.check_part(0, times=200)
    assert "fetched_chunks" not in in_memory.cache.stats()


def test_memory_in_use_is_not_evicted(chunks: Chunks) -> None:
    keys, size = list(chunks), 100
    now_s = [0.0]
    tier = MemoryTier(3 * size, idle_s=1000.0, clock=lambda: now_s[0])
    for key in keys[:3]:
        place = tier.reserve(key, size)
        assert place is not None
        assert tier.reserve(key, size) is None, "it is reserved already"
        place.commit(memoryview(bytes(size)))
    with pytest.raises(NoSpaceError):
        tier.reserve(keys[3], size)
    now_s[0] += 2000
    found = tier.find(keys[0])
    assert found is not None
    assert tier.find(keys[2]) is not None
    view = found.view(10, 20)
    place = tier.reserve(keys[3], size)
    assert place is not None
    place.cancel()
    assert (tier.find(keys[1]), tier.used_bytes) == (None, 2 * size)
    tier.drop(keys[0])
    assert view is not None
    assert bytes(view) == bytes(20), "a view stays valid"
    tier.close()
    assert tier.used_bytes == 0
