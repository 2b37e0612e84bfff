"""`EntryReader` returns checked bytes, loads each chunk once at a time, and keeps its budget."""

import gc
import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from diesel_fs.cache.readers.chunk_cache import FETCH_THREADS, ChunkCache, LoadedChunk
from diesel_fs.cache.readers.entry_reader import CHECKED_AT_ONCE_BYTES, EntryReader
from diesel_fs.errors import FormatError
from diesel_fs.format.chunk import CHUNK_BYTES_MIN
from diesel_fs.format.object_names import chunk_object
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.objects.store import FastReads

from ..waiting import wait_until
from .conftest import FILES, Counting, object_of, put_files
from .reader_stores import Batching

BUDGETS = pytest.mark.parametrize("budget", [1, 200_000, 1 << 30])


@BUDGETS
def test_every_read_is_right(store: Counting, view: Snapshot, budget: int) -> None:
    reader = EntryReader(view, store, budget)
    for name, content in FILES.items():
        index, last = view.lookup(name.encode()), max(len(content) - 1, 0)
        assert bytes(reader.read(index)) == content
        for offset, size in ((0, 1), (5, 10), (65530, 20), (last, 5), (10**9, 5)):
            expected = content[offset : offset + size]
            assert bytes(reader.read(index, offset, size)) == expected
            found = reader.read_nowait(index, offset, size)
            assert found is None or bytes(found) == expected
    assert reader.stats()["memory_bytes"] <= max(budget, 2 * CHUNK_BYTES_MIN + 300_000)


@BUDGETS
def test_read_many_in_random_order(store: Counting, view: Snapshot, budget: int) -> None:
    names = list(FILES) * 2
    np.random.default_rng(7).shuffle(names)
    reader = EntryReader(view, store, budget)
    plain = [name for name in names if re.fullmatch(r"n\d+", name)]
    for wanted in (names, names, plain):  # the second time what memory has room for is there
        indices = view.lookup_many([name.encode() for name in wanted])
        views = list(reader.read_many(indices))
        assert [bytes(content) for content in views] == [FILES[name] for name in wanted]


def test_an_epoch_that_fits_reads_each_chunk_once(store: Counting, view: Snapshot) -> None:
    reader = EntryReader(view, store, 1 << 30)
    for _ in range(2):
        list(reader.read_many(view.files()))
    assert [*store.reads_by_object().values()] == [1] * len(view.chunk_ids)


def test_few_files_of_a_large_dataset_read_no_chunks(store: Counting, view: Snapshot) -> None:
    reader = EntryReader(view, store, 1)
    wanted = [view.lookup(f"n{i:03}".encode()) for i in (5, 120, 270)]
    assert [len(content) for content in reader.read_many(wanted)] == [1005, 1120, 1270]
    assert store.bytes_read() == 1005 + 1120 + 1270


def test_read_many_keeps_the_budget_of_chunks(repository: LocalRepository, tmp_path: Path) -> None:
    """It holds the chunks of a window until the window's end, so it looks ahead less far."""
    files = {f"{number:04}": os.urandom(4096) for number in range(1000)}
    many = put_files(repository, "many", tmp_path / "many", files, "auto")
    budget = 16 * CHUNK_BYTES_MIN
    assert int(many.chunk_sizes.sum()) > 3 * budget, "else this test shows nothing"
    reader = EntryReader(many, repository.objects, budget)
    order = np.random.default_rng(3).permutation(many.files())
    gc.collect()  # the chunks of other tests
    most = 0
    for place, content in enumerate(reader.read_many(order)):
        if place % 50 == 0:
            alive = sum(len(each.view) for each in gc.get_objects() if type(each) is LoadedChunk)
            most = max(most, alive)
        assert bytes(content) == files[many.name(int(order[place])).decode()]
    reader.close()
    assert 0 < most <= 1.5 * budget  # those that come in now are not yet in the cache


def test_read_many_loads_chunks_ahead_in_turn(repository: LocalRepository, tmp_path: Path) -> None:
    files = {f"{number:02}": os.urandom(CHUNK_BYTES_MIN) for number in range(24)}
    view = put_files(repository, "ahead", tmp_path / "ahead", files, "none")
    store = Counting(repository)
    reader = EntryReader(view, store, 1 << 30)
    contents = reader.read_many(view.files())
    next(contents)
    wait_until(lambda: len(store.reads) >= 17)
    in_order = [*dict.fromkeys(view.chunk_of(view.files()).tolist())]
    assert {*store.reads_by_object()} == {
        chunk_object(view.identity, view.chunk_ids[number]) for number in in_order[:17]
    }
    reader.close()


def test_read_nowait_returns_contents_in_memory_that_are_quickly_checked(
    store: Counting, view: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged entry is left to `read`, a large one to a thread."""
    reader = EntryReader(view, store, 1 << 30)
    index = view.lookup(b"n008")
    assert reader.read_nowait(index, 0, 100) is None
    assert store.reads == []
    list(map(reader._cache.get, range(len(view.chunk_ids))))
    store.reads.clear()
    for name in ("small", "text", "n007"):  # of both codecs
        found = reader.read_nowait(view.lookup(name.encode()), 0, 1 << 20)
        assert bytes(found or b"") == FILES[name]
    (extent,) = view.extents(index)
    reader._cache.get(extent.chunk).buffer[extent.offset] ^= 1
    assert reader.read_nowait(index, 0, 2000) is None
    assert store.reads == []
    assert bytes(reader.read(index)) == FILES["n008"]
    assert bytes(reader.read_nowait(index, 2, 2000) or b"") == FILES["n008"][2:]
    assert CHECKED_AT_ONCE_BYTES > 1000
    monkeypatch.setattr("diesel_fs.cache.readers.entry_reader.CHECKED_AT_ONCE_BYTES", 1000)
    assert reader.read_nowait(view.lookup(b"n000"), 0, 1000) is not None
    assert reader.read_nowait(view.lookup(b"n001"), 0, 1000) is None


def test_misses_load_the_next_chunks_if_all_fit(
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
    """It is loaded ahead from its second extent on, or from its begin. A reader in random order
    loads nothing ahead."""
    reader = EntryReader(view, store, 8 * CHUNK_BYTES_MIN)
    asked: list[int] = []
    monkeypatch.setattr(reader._cache, "prefetch", asked.append)
    index = view.lookup(b"large")
    extents = view.extents(index)
    assert len(extents) > 5
    for number, ahead in ((0, [1, 2]), (1, [2, 3]), (4, []), (2, []), (3, [4, 5])):
        reader.read(index, extents[number].start, 10)
        assert asked == [extents[each].chunk for each in ahead]
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


def test_B7_a_foreign_chunk_under_our_name_is_refused(
    repository: LocalRepository, store: Counting, view: Snapshot
) -> None:
    other = bytes(repository.objects.get(chunk_object(view.identity, view.chunk_ids[0])))

    def change(name: str, buffer: memoryview) -> None:
        buffer[:] = other[: len(buffer)].ljust(len(buffer), b"\0")

    store.change = change
    index = view.lookup(b"n299")
    assert view.extents(index)[0].chunk != 0
    with pytest.raises(FormatError):
        EntryReader(view, store, 1 << 30).read(index)


# The cache of chunks


def ten_bytes(number: int = 0) -> LoadedChunk:
    return LoadedChunk(memoryview(bytearray(10)))


def test_F10_a_needed_chunk_is_not_queued_behind_prefetches() -> None:
    """A reader loads a chunk itself if its load is queued and has not begun."""
    gate, loads = threading.Event(), []

    def load(number: int) -> LoadedChunk:
        loads.append(number)
        assert number == FETCH_THREADS or gate.wait(10)
        return ten_bytes()

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


def test_the_least_recently_used_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ChunkCache(30, ten_bytes)
    for number in (1, 2, 3, 1, 4):
        cache.get(number)
    assert [number for number in range(5) if cache.peek(number)] == [1, 3, 4]
    assert (cache.held_bytes, cache.evictions) == (30, 1)
    cache = ChunkCache(30, ten_bytes)
    cache.get(0)
    asked: list[int] = []
    monkeypatch.setattr(cache, "prefetch", asked.append)
    cache.prefetch_what_fits({1: 10, 2: 10, 3: 10})
    assert asked == [1, 2]


# Stores that are near, or that take many parts in one request


class AtHand(Counting):
    at_hand = 0

    @property
    def fast_reads(self) -> FastReads:
        return _ReadsAtHand(self)


class _ReadsAtHand(FastReads):
    _store: AtHand

    def read_nowait(self, name: str, start: int, buffer: memoryview) -> bool:
        self._store.at_hand += 1
        self._store.read_into(name, start, buffer)
        return True


def test_small_entries_are_read_without_waiting(
    repository: LocalRepository, view: Snapshot
) -> None:
    """Readers with `prefer_entries` do so, unless the dataset fits. A damaged entry is left to a
    read that may wait."""
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
    store.damage(view, "n008", times=1)
    index = view.lookup(b"n008")
    assert reader.read_nowait(index, 0, 10_000) is None
    assert reader.read(index) == FILES["n008"]
    store.at_hand = 0
    fitting, index = EntryReader(view, store, 1 << 30, prefer_entries=True), view.lookup(b"n009")
    assert fitting.read_nowait(index, 0, 10_000) is None
    assert bytes(fitting.read(index)) == FILES["n009"]
    assert fitting.read_nowait(index, 0, 10_000) is not None
    assert store.at_hand == 0


def test_many_files_are_one_request_to_a_batching_store(store: Counting, view: Snapshot) -> None:
    batching = Batching(store)
    reader = EntryReader(view, batching, 400_000)
    store.damage(view, "small", times=1)
    names = ["n003", "small", "empty", "text", "n003", "large", *(f"n{i:03}" for i in (9, 8, 7))]
    wanted = view.lookup_many([name.encode() for name in names])
    contents = [bytes(content) for content in reader.read_many(wanted)]
    assert contents == [FILES[name] for name in names]
    assert [*map(len, batching.requests)] == [7], "all files with one extent"
    assert reader.stats()["healed"] == 1


def test_G3_one_file_that_cannot_be_read_fails_alone(store: Counting, view: Snapshot) -> None:
    batching = Batching(store)
    lost = object_of(view, "n299")
    assert lost != object_of(view, "n001")
    store.lose(lost, times=1)
    wanted = view.lookup_many([b"n001", b"n299"])
    contents = EntryReader(view, batching, 100_000).read_many(wanted)
    assert bytes(next(contents)) == FILES["n001"]
    assert bytes(next(contents)) == FILES["n299"]  # by itself it can be read here
    assert [*map(len, batching.requests)] == [2]
