"""`EntryReader` returns checked bytes, loads each chunk once at a time, and keeps its budget."""

import gc
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from diesel_fs.cache.chunk_cache import FETCH_THREADS, ChunkCache, LoadedChunk
from diesel_fs.cache.reader import CHECKED_AT_ONCE_BYTES, EntryReader
from diesel_fs.errors import CorruptError, FormatError, ObjectMissing
from diesel_fs.format.chunk import CHUNK_BYTES_MIN
from diesel_fs.format.chunk_id import chunk_id_text
from diesel_fs.format.object_names import chunk_object
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.ingest import FolderSource, PutOptions, put
from diesel_fs.repository.local import LocalRepository

from ..trees import write
from ..waiting import wait_until
from .conftest import FILES, Counting


@pytest.mark.parametrize("budget", [1, 200_000, 1 << 30])
def test_every_read_is_right(store: Counting, view: Snapshot, budget: int) -> None:
    reader = EntryReader(view, store, budget)
    for name, content in FILES.items():
        index = view.lookup(name.encode())
        assert bytes(reader.read(index)) == content
        for offset, size in ((0, 1), (5, 10), (65530, 20), (len(content) - 1, 5), (10**9, 5)):
            expected = content[max(offset, 0) : max(offset, 0) + size] if offset >= 0 else None
            if expected is not None:
                assert bytes(reader.read(index, offset, size)) == expected
                found = reader.read_nowait(index, offset, size)
                assert found is None or bytes(found) == expected
    assert reader.stats()["memory_bytes"] <= max(budget, 2 * CHUNK_BYTES_MIN + 300_000)


@pytest.mark.parametrize("budget", [1, 200_000, 1 << 30])
def test_read_many_in_random_order(store: Counting, view: Snapshot, budget: int) -> None:
    names = list(FILES) * 2
    np.random.default_rng(7).shuffle(names)
    reader = EntryReader(view, store, budget)
    indices = view.lookup_many([name.encode() for name in names])
    for _ in range(2):  # then what memory has room for is there, and checked
        views = list(reader.read_many(indices))
        assert [bytes(content) for content in views] == [FILES[name] for name in names]
    plain = [name for name in names if re.fullmatch(r"n\d+", name)]
    indices = view.lookup_many([name.encode() for name in plain])
    assert [bytes(each) for each in reader.read_many(indices)] == [FILES[name] for name in plain]


def test_an_epoch_that_fits_reads_each_chunk_once(store: Counting, view: Snapshot) -> None:
    reader = EntryReader(view, store, 1 << 30)
    for _ in range(2):
        list(reader.read_many(view.files()))
    names = [name for name, _, _ in store.reads]
    assert len(names) == len(set(names)) == len(view.chunk_ids)


def test_few_files_of_a_dataset_that_does_not_fit_read_no_chunks(
    store: Counting, view: Snapshot
) -> None:
    reader = EntryReader(view, store, 1)
    wanted = [view.lookup(f"n{i:03}".encode()) for i in (5, 120, 270)]
    assert [len(content) for content in reader.read_many(wanted)] == [1005, 1120, 1270]
    assert sum(size for _, _, size in store.reads) == 1005 + 1120 + 1270


def test_read_nowait_never_reads_the_store(store: Counting, view: Snapshot) -> None:
    reader = EntryReader(view, store, 1 << 30)
    index = view.lookup(b"small")
    assert reader.read_nowait(index, 0, 100) is None
    assert store.reads == []
    reader.read(index)
    assert bytes(reader.read_nowait(index, 2, 5) or b"") == b"small"


def test_read_many_holds_no_more_chunks_than_its_budget(
    repository: LocalRepository, tmp_path: Path
) -> None:
    """It holds the chunks of a window until the window's end, so it looks ahead less far."""
    files = {f"{number:04}": os.urandom(4096) for number in range(1000)}
    options = PutOptions(chunk_bytes=CHUNK_BYTES_MIN, jobs=1)
    put(repository, "many", FolderSource(write(tmp_path / "many", files)), options=options)
    many = repository.view("many")
    budget = 16 * CHUNK_BYTES_MIN
    assert int(many.chunk_sizes.sum()) > 3 * budget, "else this test shows nothing"
    reader = EntryReader(many, repository.objects, budget)
    order = np.random.default_rng(3).permutation(many.files())
    gc.collect()  # the chunks of other tests
    most = 0
    for place, content in enumerate(reader.read_many(order)):
        if place % 50 == 0:
            most = max(most, _chunk_bytes_alive())
        assert bytes(content) == files[many.name(int(order[place])).decode()]
    reader.close()
    assert 0 < most <= 1.5 * budget  # those that come in now are not yet in the cache


def test_read_many_loads_ahead_every_chunk_in_its_turn(
    repository: LocalRepository, tmp_path: Path
) -> None:
    """When the first file is returned, the next chunks are on their way, and none is left out."""
    files = {f"{number:02}": os.urandom(CHUNK_BYTES_MIN) for number in range(24)}
    options = PutOptions(chunk_bytes=CHUNK_BYTES_MIN, compress="none", jobs=1)
    put(repository, "ahead", FolderSource(write(tmp_path / "ahead", files)), options=options)
    view, store = repository.view("ahead"), Counting(repository)
    reader = EntryReader(view, store, 1 << 30)
    contents = reader.read_many(view.files())
    next(contents)
    wait_until(lambda: len(store.reads) >= 17)
    in_order = [chunk_object(view.identity, view.chunk_ids[n]) for n in dict.fromkeys(
        view.chunk_of(view.files()).tolist())]  # fmt: skip
    assert {name for name, _, _ in store.reads} == set(in_order[:17])
    reader.close()


def _chunk_bytes_alive() -> int:
    return sum(len(each.view) for each in gc.get_objects() if type(each) is LoadedChunk)


def test_read_nowait_checks_small_entries(store: Counting, view: Snapshot) -> None:
    """An entry of a chunk that is in memory is checked at once; a damaged one is left to `read`."""
    reader = EntryReader(view, store, 1 << 30)
    list(map(reader._cache.get, range(len(view.chunk_ids))))
    store.reads.clear()
    for name in ("small", "text", "n007"):  # of both codecs
        index = view.lookup(name.encode())
        assert bytes(reader.read_nowait(index, 0, 1 << 20) or b"") == FILES[name][: 1 << 20]
    (extent,) = view.extents(index := view.lookup(b"n008"))
    chunk = reader._cache.get(extent.chunk)
    chunk.buffer[extent.offset] ^= 1
    assert reader.read_nowait(index, 0, 2000) is None
    assert store.reads == []
    assert bytes(reader.read(index)) == FILES["n008"]
    assert bytes(reader.read_nowait(index, 0, 2000) or b"") == FILES["n008"]


def test_read_nowait_leaves_large_entries_to_a_thread(
    store: Counting, view: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diesel_fs.cache.reader.CHECKED_AT_ONCE_BYTES", 1000)
    reader = EntryReader(view, store, 1 << 30)
    list(map(reader._cache.get, range(len(view.chunk_ids))))
    assert CHECKED_AT_ONCE_BYTES > 1000
    assert reader.read_nowait(view.lookup(b"n000"), 0, 1000) is not None
    assert reader.read_nowait(view.lookup(b"n001"), 0, 1000) is None


def test_misses_load_the_next_chunks_where_all_fit(
    store: Counting, view: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each miss loads twice as many as the one before, so an epoch soon finds all chunks loaded."""
    reader = EntryReader(view, store, 1 << 30)
    asked: list[int] = []
    monkeypatch.setattr(reader._cache, "prefetch", asked.append)
    total = len(view.chunk_ids)
    assert total > 5
    for name, count in (("n299", 2), ("n000", 4)):
        index = view.lookup(name.encode())
        reader.read(index)
        number = view.extents(index)[0].chunk
        assert asked == [(number + step) % total for step in range(1, count + 1)]
        asked.clear()


def test_a_large_file_that_is_read_on_is_loaded_ahead(
    store: Counting, view: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a quarter of the memory, from its second extent on or from its begin; a reader in random
    order loads nothing ahead."""
    reader = EntryReader(view, store, 8 * CHUNK_BYTES_MIN)
    asked: list[int] = []
    monkeypatch.setattr(reader._cache, "prefetch", asked.append)
    index = view.lookup(b"large")
    extents = view.extents(index)
    assert len(extents) > 5
    chunks = [extent.chunk for extent in extents]
    for number, ahead in ((0, [1, 2]), (1, [2, 3]), (4, []), (2, []), (3, [4, 5])):
        reader.read(index, extents[number].start, 10)
        assert asked == [chunks[each] for each in ahead]
        asked.clear()


def test_the_extents_of_a_part_of_a_file_are_those_with_bytes_in_it(view: Snapshot) -> None:
    for name, content in FILES.items():
        index = view.lookup(name.encode())
        edges = {0, 1, len(content) - 1, len(content), len(content) + 9}
        for each in view.extents(index):
            edges |= {each.start - 1, each.start, each.start + 1}
        for start in filter(lambda edge: edge >= 0, edges):
            for end in (*(edge for edge in edges if edge > start), None):
                assert view.extents(index, start, end) == tuple(
                    each
                    for each in view.extents(index)
                    if each.start + each.size > start and (end is None or each.start < end)
                )


def corrupt(times: int) -> Callable[[str, memoryview], None]:
    """Flip bits in the second half of the first `times` reads."""
    left = [times]

    def change(name: str, buffer: memoryview) -> None:
        if left[0]:
            left[0] -= 1
            for at in range(len(buffer) // 2, len(buffer)):
                buffer[at] ^= 1

    return change


@pytest.mark.parametrize("budget", [1, 1 << 30])
def test_B4_damage_on_the_way_is_repaired_by_reading_again(
    store: Counting, view: Snapshot, budget: int
) -> None:
    reader = EntryReader(view, store, budget)
    store.change = corrupt(1)
    for name in ("n299", "n298", "n297"):
        assert bytes(reader.read(view.lookup(name.encode()))) == FILES[name]
        assert bytes(reader.read(view.lookup(name.encode()))) == FILES[name]
    assert reader.stats()["healed"] >= 1
    assert reader.stats()["damaged"] == 0


@pytest.mark.parametrize("many", [True, False])
def test_B3_only_the_damaged_file_fails_and_is_named(
    store: Counting, view: Snapshot, many: bool
) -> None:
    index = view.lookup(b"n150")
    (extent,) = view.extents(index)
    reader = EntryReader(view, store, 1 << 30)

    def change(name: str, buffer: memoryview) -> None:
        start = store.reads[-1][1]
        if store.reads[-1][0].endswith(text) and start <= extent.offset < start + len(buffer):
            buffer[extent.offset - start] ^= 4

    text = chunk_id_text(view.chunk_ids[extent.chunk])
    store.change = change
    with pytest.raises(CorruptError, match=f"ds/n150 .*{text}"):
        list(reader.read_many([index])) if many else reader.read(index)
    for name in ("n149", "n151"):
        assert bytes(reader.read(view.lookup(name.encode()))) == FILES[name]


def test_B7_a_foreign_chunk_under_our_name_is_refused(
    repository: LocalRepository, store: Counting, view: Snapshot
) -> None:
    other = bytes(repository.objects.get(_object(repository, view, 0)))
    reader = EntryReader(view, store, 1 << 30)

    def change(name: str, buffer: memoryview) -> None:
        buffer[:] = other[: len(buffer)].ljust(len(buffer), b"\0")

    store.change = change
    index = view.lookup(b"n299")
    assert view.extents(index)[0].chunk != 0
    with pytest.raises(FormatError):
        reader.read(index)


def _object(repository: LocalRepository, view: Snapshot, number: int) -> str:
    return chunk_object(view.identity, view.chunk_ids[number])


def test_O2_a_lost_chunk_fails_its_files_alone(store: Counting, view: Snapshot) -> None:
    lost = view.extents(view.lookup(b"n000"))[0].chunk

    def change(name: str, buffer: memoryview) -> None:
        if name == _lost_name(store, view, lost):
            raise ObjectMissing(name)

    store.change = change
    reader = EntryReader(view, store, 1 << 30)
    with pytest.raises(ObjectMissing):
        reader.read(view.lookup(b"n000"))
    assert bytes(reader.read(view.lookup(b"n299"))) == FILES["n299"]


def _lost_name(store: Counting, view: Snapshot, number: int) -> str:
    return chunk_object(view.identity, view.chunk_ids[number])


def test_F10_many_readers_share_one_load() -> None:
    loads: list[int] = []
    gate = threading.Event()

    def load(number: int) -> LoadedChunk:
        loads.append(number)
        gate.wait(10)
        return LoadedChunk(memoryview(bytearray(10)))

    cache = ChunkCache(100, load)
    found: list[LoadedChunk] = []
    threads = [threading.Thread(target=lambda: found.append(cache.get(7))) for _ in range(16)]
    for thread in threads:
        thread.start()
    cache.prefetch(7)
    gate.set()
    for thread in threads:
        thread.join()
    assert loads == [7]
    assert len({id(chunk) for chunk in found}) == 1
    cache.close()


def test_F10_a_needed_chunk_is_not_queued_behind_prefetches() -> None:
    """A reader loads a chunk itself if its load is queued and has not begun."""
    gate, loads = threading.Event(), []

    def load(number: int) -> LoadedChunk:
        loads.append(number)
        assert number == FETCH_THREADS or gate.wait(10)
        return LoadedChunk(memoryview(bytearray(10)))

    cache = ChunkCache(1000, load)
    for number in range(FETCH_THREADS + 1):
        cache.prefetch(number)
    found: list[LoadedChunk] = []
    needs = threading.Thread(target=lambda: found.append(cache.get(FETCH_THREADS)), daemon=True)
    needs.start()
    needs.join(5)
    assert found, "it waited for the queued loads"
    gate.set()
    for number in range(FETCH_THREADS):
        cache.get(number)
    cache.close()
    assert sorted(loads) == list(range(FETCH_THREADS + 1))


def test_prefetching_evicts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ChunkCache(30, lambda number: LoadedChunk(memoryview(bytearray(10))))
    cache.get(0)
    asked: list[int] = []
    monkeypatch.setattr(cache, "prefetch", asked.append)
    cache.prefetch_what_fits({1: 10, 2: 10, 3: 10})
    assert asked == [1, 2]


def test_a_failed_load_is_reported_and_tried_again() -> None:
    attempts = [0]

    def load(number: int) -> LoadedChunk:
        attempts[0] += 1
        if attempts[0] == 1:
            raise ObjectMissing("gone")
        return LoadedChunk(memoryview(bytearray(10)))

    cache = ChunkCache(100, load)
    with pytest.raises(ObjectMissing):
        cache.get(1)
    assert len(cache.get(1).view) == 10


def test_the_least_recently_used_go_first() -> None:
    cache = ChunkCache(30, lambda number: LoadedChunk(memoryview(bytearray(10))))
    for number in (1, 2, 3, 1, 4):
        cache.get(number)
    assert [number for number in range(5) if cache.peek(number)] == [1, 3, 4]
    assert (cache.held_bytes, cache.evictions) == (30, 1)


def test_Z11_returned_bytes_do_not_change(store: Counting, view: Snapshot) -> None:
    reader = EntryReader(view, store, 70_000)
    held = reader.read(view.lookup(b"n007"))
    list(reader.read_many(view.files()))
    reader.close()
    assert bytes(held) == FILES["n007"]


class AtHand(Counting):
    """A store that answers `read_nowait`, and counts those reads."""

    at_hand = 0

    def read_nowait(self, name: str, start: int, buffer: memoryview) -> bool:
        self.at_hand += 1
        super().read_into(name, start, buffer)
        return True


def test_small_entries_are_read_alone_and_without_waiting(
    repository: LocalRepository, view: Snapshot
) -> None:
    """With `prefer_entries`, no chunk is loaded and nothing is kept."""
    store = AtHand(repository)
    reader = EntryReader(view, store, 1, prefer_entries=True)
    for name in ("small", "text", "n007"):
        content, index = FILES[name], view.lookup(name.encode())
        for offset, size in ((0, len(content)), (3, 5), (len(content) - 1, 9)):
            found = reader.read_nowait(index, offset, size)
            assert found is not None
            assert bytes(found) == content[offset : offset + size]
        assert reader.read(index) == content
    stats = reader.stats()
    assert (stats["reads_on_the_spot"], stats["memory_bytes"]) == (9, 0)
    assert stats["chunk_fetches"] == 0
    assert reader.read_nowait(view.lookup(b"large"), 0, 100) is None


def test_damage_is_left_to_a_read_that_may_wait(
    repository: LocalRepository, view: Snapshot
) -> None:
    store = AtHand(repository)

    def flip_once(name: str, buffer: memoryview) -> None:
        buffer[0] ^= 1
        store.change = lambda name, buffer: None

    store.change = flip_once
    reader = EntryReader(view, store, 1, prefer_entries=True)
    index = view.lookup(b"n008")
    assert reader.read_nowait(index, 0, 10_000) is None
    assert reader.read(index) == FILES["n008"]


def test_a_dataset_that_fits_is_read_by_chunks_also_with_prefer_entries(
    repository: LocalRepository, view: Snapshot
) -> None:
    store = AtHand(repository)
    reader = EntryReader(view, store, 1 << 30, prefer_entries=True)
    index = view.lookup(b"n009")
    assert reader.read_nowait(index, 0, 10_000) is None
    assert bytes(reader.read(index)) == FILES["n009"]
    assert reader.read_nowait(index, 0, 10_000) is not None
    assert store.at_hand == 0


class BatchingStore(Counting):
    """A store that takes many parts in one request, and damages some."""

    batches_reads = True

    def __init__(self, repository: LocalRepository) -> None:
        super().__init__(repository)
        self.requests: list[int] = []
        self.missing = ""

    def read_parts(self, parts: Sequence[tuple[str, int, int]]) -> Iterator[memoryview]:
        self.requests.append(len(parts))
        for name, start, size in parts:
            if self.missing and name == self.missing:
                raise ObjectMissing(name)
            room = memoryview(bytearray(size))
            self.inner.read_into(name, start, room)
            self.change(name, room)
            yield room


def test_many_files_are_one_request_to_a_batching_store(
    repository: LocalRepository, view: Snapshot
) -> None:
    store = BatchingStore(repository)
    reader = EntryReader(view, store, 400_000)
    names = ["n003", "small", "empty", "text", "n003", "large", *(f"n{i:03}" for i in (9, 8, 7))]
    wanted = view.lookup_many([name.encode() for name in names])
    contents = [bytes(content) for content in reader.read_many(wanted)]
    assert contents == [FILES[name] for name in names]
    assert store.requests == [7], "all files with one extent"


def test_damage_in_a_request_of_many_is_read_again(
    repository: LocalRepository, view: Snapshot
) -> None:
    store = BatchingStore(repository)
    reader = EntryReader(view, store, 100_000)
    store.change = corrupt(1)
    wanted = view.lookup_many([b"n003", b"n004"])
    assert [bytes(c) for c in reader.read_many(wanted)] == [FILES["n003"], FILES["n004"]]
    assert reader.stats()["healed"] == 1


def test_G3_one_file_that_cannot_be_read_fails_alone(
    repository: LocalRepository, view: Snapshot
) -> None:
    store = BatchingStore(repository)
    first, last = view.lookup(b"n001"), view.lookup(b"n299")
    lost = _object(repository, view, view.extents(last)[0].chunk)
    assert lost != _object(repository, view, view.extents(first)[0].chunk)
    store.missing = lost
    contents = EntryReader(view, store, 100_000).read_many([first, last])
    assert bytes(next(contents)) == FILES["n001"]
    assert bytes(next(contents)) == FILES["n299"]  # by itself it can be read here
    assert store.requests == [2]
