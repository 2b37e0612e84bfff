"""`ReadThroughCache` fetches the chunks that readers miss: which, in which order, and when."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

import pytest

from diesel_fs.cache import read_through
from diesel_fs.cache.disk import DiskTier, prepare_cache_folder
from diesel_fs.cache.range_reader import RangeReader
from diesel_fs.cache.read_through import ReadCostModel, ReadThroughCache
from diesel_fs.cache.tiers import ChunkKey, MemoryTier
from diesel_fs.errors import NoSpaceError, ObjectStoreError
from diesel_fs.format.chunk import CHUNK_BYTES_DEFAULT
from diesel_fs.format.object_names import chunk_object

from ..waiting import wait_until
from .chunk_ranges import records
from .conftest import Counting, Gate
from .disk_tier import Chunks, content_of, file_of, idle


class CachedReads:
    """A cache with a tier on a disk, and the reader that uses it."""

    def __init__(self, store: Counting, place: Path, chunks: Chunks, limit: int = 1 << 30) -> None:
        self.store, self.place, self.chunks = store, place, chunks
        self.tier = DiskTier(place, UUID(int=7), limit)
        self.cache = ReadThroughCache(store, self.tier)
        self.reads = RangeReader(self.cache)

    def read(self, key: ChunkKey, start: int = 200, size: int = 50) -> None:
        """Read a part and compare it."""
        answer = self.reads.read(key.identity, records([(key.id, start, size)]))
        assert b"".join(answer) == self.chunks[key][start : start + size]

    def quiet(self) -> bool:
        """Whether nothing waits to be fetched; one fetch may still be in progress."""
        return not self.cache._missed and not self.cache._datasets

    def has_all(self) -> bool:
        return all(map(self.tier.holds, self.chunks))

    def fetched(self) -> list[str]:
        """The chunks that were read whole, in order."""
        sizes = {chunk_object(*key): len(content) for key, content in self.chunks.items()}
        return [name for name, _, size in self.store.reads if size == sizes.get(name)]

    def close(self) -> None:
        self.reads.close()
        self.cache.close()


@pytest.fixture
def server(store: Counting, tmp_path: Path, chunks: Chunks) -> Iterator[CachedReads]:
    found = CachedReads(store, prepare_cache_folder(tmp_path / "cache"), chunks)
    yield found
    found.close()


def test_a_miss_is_served_at_once_and_fetches_its_dataset(
    server: CachedReads, chunks: Chunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First its own chunk is fetched, then the others in order, each once; then nothing more."""
    monkeypatch.setattr(read_through, "FETCHERS", 1)
    keys = list(chunks)
    server.read(keys[5])
    assert server.store.reads[0] == (chunk_object(*keys[5]), 200, 50)
    wait_until(server.has_all)
    wait_until(server.quiet)
    others = [chunk_object(*key) for key in keys if key != keys[5]]
    assert server.fetched() == [chunk_object(*keys[5]), *others]
    count = len(server.store.reads)
    for key in keys:
        server.read(key)
    assert len(server.store.reads) == count
    stats = server.cache.stats()
    assert stats["disk_reads"] == len(keys)
    assert (stats["store_reads"], stats["store_bytes"]) == (1, 50)
    assert stats["kept_chunks"] == stats["fetched_chunks"] == len(keys)


def test_two_fetchers_fetch_each_chunk_once(server: CachedReads, chunks: Chunks) -> None:
    server.read(next(iter(chunks)))
    wait_until(server.has_all)
    wait_until(server.quiet)
    assert sorted(server.fetched()) == sorted(chunk_object(*key) for key in chunks)


def test_a_chunk_that_was_read_whole_is_not_fetched_again(
    server: CachedReads, chunks: Chunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_through, "FETCHERS", 1)  # else the other may come first
    key = list(chunks)[3]
    server.read(key, 0, len(chunks[key]))
    wait_until(server.has_all)
    assert server.fetched().count(chunk_object(*key)) == 1
    assert content_of(server.tier, key) == chunks[key]


def test_a_dataset_larger_than_the_tier_does_not_thrash(
    store: Counting, tmp_path: Path, chunks: Chunks
) -> None:
    """It fills the tier once; no chunk is fetched that does not stay."""
    limit = 4 * max(map(len, chunks.values()))
    server = CachedReads(store, prepare_cache_folder(tmp_path / "cache"), chunks, limit)
    for _ in range(20):
        for key in chunks:
            server.read(key)
        wait_until(server.quiet)
    server.close()
    kept = [key for key in chunks if server.tier.holds(key)]
    assert 3 <= len(kept) < len(chunks)
    assert len(server.fetched()) <= len(kept) + 1, "thrashing"
    assert server.tier.evictions == 0


def test_an_idle_dataset_is_evicted_for_another(
    store: Counting, tmp_path: Path, chunks: Chunks
) -> None:
    place = prepare_cache_folder(tmp_path / "cache")
    limit = 4 * max(map(len, chunks.values()))
    first = CachedReads(store, place, chunks, limit)
    old = ChunkKey(UUID(int=1), next(iter(chunks)).id)
    reserved = first.tier.reserve(old, limit - 1000)
    assert reserved is not None
    reserved.commit(memoryview(bytes(limit - 1000)))
    first.read(next(iter(chunks)))
    wait_until(first.quiet)
    assert first.fetched() == []
    first.close()
    idle(place)
    second = CachedReads(store, place, chunks, limit)
    second.read(next(iter(chunks)))
    wait_until(second.quiet)
    wait_until(lambda: len(second.fetched()) >= 3)
    assert not second.tier.holds(old)
    second.close()


def test_no_fetch_begins_while_a_reader_waits(
    server: CachedReads, chunks: Chunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in this process and not in others that share the tier."""
    monkeypatch.setattr(read_through, "PATIENCE_S", 30.0)
    other = DiskTier(server.place, UUID(int=7), 1 << 30)
    other.note_reading(begins=True)
    server.read(next(iter(chunks)))
    time.sleep(0.1)
    assert server.fetched() == []
    gate = Gate(server.store)
    reader = threading.Thread(target=server.read, args=(list(chunks)[7],))
    reader.start()
    assert gate.arrived.acquire(timeout=20)
    other.note_reading(begins=False)
    time.sleep(0.1)
    assert server.fetched() == []
    gate.open.set()
    reader.join(20)
    wait_until(lambda: len(server.fetched()) >= len(chunks))
    other.close()


def test_fetching_goes_on_slowly_while_readers_always_wait(
    server: CachedReads, chunks: Chunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_through, "PATIENCE_S", 0.02)
    monkeypatch.setattr(read_through, "REST_FACTOR", 100.0)
    rests: list[float] = []
    monkeypatch.setattr(server.cache, "_rest", rests.append)
    server.cache._waiting += 1  # a reader that never ends
    server.read(next(iter(chunks)))
    wait_until(lambda: len(server.fetched()) >= len(chunks))
    server.cache._waiting -= 1
    assert len(rests) >= len(chunks) - 1
    assert min(rests) > 0


def test_fetches_keep_their_limit(server: CachedReads, chunks: Chunks) -> None:
    gate = Gate(server.store)
    for key in chunks:
        server.cache.record_miss(key, 0, memoryview(chunks[key][:10]))
    for _ in range(read_through.FETCHERS):
        assert gate.arrived.acquire(timeout=20)
    assert not gate.arrived.acquire(timeout=0.2)
    gate.open.set()
    wait_until(server.quiet)
    assert gate.most == read_through.FETCHERS


def test_a_chunk_that_is_damaged_in_the_store_is_not_kept(
    server: CachedReads, chunks: Chunks, caplog: pytest.LogCaptureFixture
) -> None:
    key = list(chunks)[2]

    def change(name: str, buffer: memoryview) -> None:
        if name == chunk_object(*key) and len(buffer) > 50:
            buffer[-1] ^= 1

    server.store.change = change
    for _ in range(5):
        server.read(key)
        wait_until(server.quiet)
    wait_until(lambda: len(server.fetched()) >= len(chunks))
    assert server.fetched().count(chunk_object(*key)) == 1, "not fetched again"
    assert not server.tier.holds(key)
    assert "not kept in the cache" in caplog.text


def test_a_failing_store_is_not_asked_for_every_chunk(server: CachedReads, chunks: Chunks) -> None:
    def change(name: str, buffer: memoryview) -> None:
        if len(buffer) > 50:
            raise ObjectStoreError("503 Slow Down")

    server.store.change = change
    server.read(next(iter(chunks)))
    wait_until(server.quiet)
    wait_until(lambda: not server.cache._fetching)
    assert len(server.fetched()) <= 3
    assert server.cache._budget.used_bytes == 0


def test_deleted_chunks_leave_the_tier(server: CachedReads, chunks: Chunks, tmp_path: Path) -> None:
    key = next(iter(chunks))
    reserved = server.tier.reserve(key, len(chunks[key]))
    assert reserved is not None
    reserved.commit(memoryview(chunks[key]))
    path = file_of(server.place, key)
    deleted: list[str] = []
    server.store.inner = _Deleting(server.store.inner, deleted)
    server.cache.delete(chunk_object(*key))
    assert deleted == [chunk_object(*key)]
    assert not path.exists()


class _Deleting(Counting):
    def __init__(self, inner: object, deleted: list[str]) -> None:
        self._deleted = deleted

    def delete(self, name: str) -> None:
        self._deleted.append(name)


def test_reads_by_the_store_interface_bypass_the_tier(server: CachedReads, chunks: Chunks) -> None:
    """So verify and recover see what is in the store, not copies of it."""
    server.read(next(iter(chunks)))
    wait_until(server.has_all)
    wait_until(server.quiet)
    count = len(server.store.reads)
    room = bytearray(100)
    for key in chunks:
        server.cache.read_into(chunk_object(*key), 0, room)
    assert len(server.store.reads) == count + len(chunks)


def test_J1_a_full_disk_is_not_an_error(
    server: CachedReads, chunks: Chunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, data: object, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.pwrite", full)
    for key in list(chunks) * 3:
        server.read(key)
    wait_until(server.quiet)
    assert not any(map(server.tier.holds, chunks))


def test_close_does_not_wait_for_the_rest_of_a_dataset(server: CachedReads, chunks: Chunks) -> None:
    gate = Gate(server.store)
    server.cache.record_miss(next(iter(chunks)), 0, memoryview(b"x"))
    assert gate.arrived.acquire(timeout=20)
    gate.open.set()
    began_s = time.monotonic()
    server.close()
    server.close()
    assert time.monotonic() - began_s < 4
    assert not any(thread.is_alive() for thread in server.cache._threads)


# In memory


def fix_costs(monkeypatch: pytest.MonkeyPatch, cache: ReadThroughCache, request_s: float) -> None:
    """Make the cache believe that a request to its store takes so long."""
    cache.costs.request_s = request_s
    monkeypatch.setattr(cache.costs, "observe", lambda size, seconds: None)


def in_memory(
    store: Counting, chunks: Chunks, limit: int = 1 << 30
) -> tuple[MemoryTier, ReadThroughCache, Callable[[ChunkKey], None]]:
    tier = MemoryTier(limit)
    cache = ReadThroughCache(store, tier)
    reads = RangeReader(cache)

    def read(key: ChunkKey) -> None:
        answer = reads.read(key.identity, records([(key.id, 100, 30)]))
        assert b"".join(answer) == chunks[key][100:130]

    return tier, cache, read


def test_a_chunk_is_fetched_into_memory_once_its_misses_have_cost_as_much(
    store: Counting, chunks: Chunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, cache, read = in_memory(store, chunks)
    fix_costs(monkeypatch, cache, request_s=0.010)
    cache.costs.bytes_per_s = CHUNK_BYTES_DEFAULT / 0.035  # so that a chunk costs 4.5 requests
    key, other = list(chunks)[:2]
    read(other)
    for _ in range(4):
        read(key)
    assert len(store.reads) == 5
    read(key)
    wait_until(lambda: cache.stats().get("kept_chunks") == 1)
    assert len(store.reads) == 7, "one more miss, the chunk, and no other chunk"
    for _ in range(10):
        read(key)
    assert len(store.reads) == 7
    assert cache.stats()["memory_reads"] == 10
    cache.close()


def test_an_admitted_chunk_is_fetched_while_readers_wait(
    server: CachedReads, chunks: Chunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An admitted chunk relieves the readers; chunks that nobody has missed wait."""
    monkeypatch.setattr(read_through, "PATIENCE_S", 30.0)
    fix_costs(monkeypatch, server.cache, request_s=1.0)  # one miss pays
    server.cache._waiting += 1  # a reader that never ends
    key = list(chunks)[4]
    server.read(key)
    server.read(key)
    wait_until(lambda: server.fetched() == [chunk_object(*key)])
    time.sleep(0.1)
    assert server.fetched() == [chunk_object(*key)]
    server.cache._waiting -= 1


def test_nothing_is_admitted_from_a_near_store(
    store: Counting, chunks: Chunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, cache, read = in_memory(store, chunks)
    fix_costs(monkeypatch, cache, request_s=0.00005)
    for _ in range(200):
        read(next(iter(chunks)))
    assert "fetched_chunks" not in cache.stats()
    cache.close()


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


def test_the_gap_follows_the_costs_of_reads() -> None:
    costs = ReadCostModel()
    for _ in range(200):
        costs.observe(4096, 0.020)
        costs.observe(4 << 20, 0.020 + (4 << 20) / 50e6)
    assert 0.8e6 < costs.gap_bytes < 1.2e6
    for _ in range(200):
        costs.observe(4096, 60.0)
    assert costs.gap_bytes == 4 << 20
    assert costs.read_s(0) <= 1.0
    for _ in range(200):
        costs.observe(1 << 30, 0.0)
        costs.observe(1, 0.0)
    assert costs.gap_bytes >= 4 << 10
