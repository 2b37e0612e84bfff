"""A reader that follows a known order loads each chunk once and has at most two groups in
memory."""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from diesel_fs.cache.readers.chunk_cache import FETCH_THREADS, ChunkCache, LoadedChunk
from diesel_fs.cache.readers.entry_reader import EntryReader
from diesel_fs.errors import UsageError
from diesel_fs.format.chunk import CHUNK_BYTES_MIN
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.orders.shuffle import GroupedOrder, chunk_order
from diesel_fs.repository.local import LocalRepository
from tests.rows import each_row

from .conftest import Counting, put_files

FILES = {
    f"d{number % 9}/{number:04}": os.urandom(3000 + number % 977)
    for number in range(1000)
} | {f"empty/{number}": b"" for number in range(30)}  # fmt: skip
GROUP = 5
STAYS_S = 5.0  # far longer than a thread needs to let go of a chunk, on a busy machine too


def half_random(number: int) -> bytes:
    return np.random.default_rng(number).bytes(2000) + bytes(2000)


Read = Callable[[EntryReader, npt.NDArray[np.int64]], Iterator[bytes]]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRepository]:
    folder: Path = tmp_path_factory.mktemp("followed")
    texts = {f"{n:04}": half_random(n) for n in range(500)}
    large = {f"{n:02}": os.urandom(CHUNK_BYTES_MIN * (n % 4) + 3000) for n in range(40)}
    with LocalRepository.open((folder / "store").as_uri(), create=True) as opened:
        put_files(opened, "ds", folder / "source", FILES, "none")
        put_files(opened, "texts", folder / "texts", texts, "lz4")
        put_files(opened, "large", folder / "large", large, "lz4")
        yield opened


def one_by_one(reader: EntryReader, order: npt.NDArray[np.int64]) -> Iterator[bytes]:
    return (bytes(reader.read(index)) for index in order.tolist())


def many(reader: EntryReader, order: npt.NDArray[np.int64]) -> Iterator[bytes]:
    return map(bytes, reader.read_many(order))


def few_at_once(reader: EntryReader, order: npt.NDArray[np.int64]) -> Iterator[bytes]:
    """Read batches, as a data loader does."""
    for start in range(0, len(order), 7):
        yield from many(reader, order[start : start + 7])


def both(reader: EntryReader, order: npt.NDArray[np.int64]) -> Iterator[bytes]:
    half = len(order) // 2
    yield from many(reader, order[:half])
    yield from one_by_one(reader, order[half:])


WAYS = [one_by_one, many, few_at_once, both]


def following(
    store: Counting, view: Snapshot, order: GroupedOrder, memory_bytes: int = 0
) -> EntryReader:
    """A reader that follows an order, with memory for two groups unless it has more."""
    reader = EntryReader(view, store, memory_bytes or needed(view, order))
    reader.prefetch_order(order.indices, order.ends)
    return reader


def half_of(view: Snapshot) -> int:
    return int(view.chunk_sizes.sum()) // 2


def needed(view: Snapshot, order: GroupedOrder) -> int:
    groups = [set(view.chunk_of(part).tolist()) for part in np.split(order.indices, order.ends)]
    sums = [sum(int(view.chunk_sizes[each]) for each in group) for group in groups]
    return max(map(sum, pairwise(sums)))


def settle(cache: ChunkCache) -> None:
    assert cache._threads is not None
    cache._threads.shutdown(wait=True)
    cache._threads = None


def alive() -> int:
    return sum(type(each) is LoadedChunk for each in gc.get_objects())  # others may lie about it


def alive_since(before: int) -> int:
    """Return how many chunks more than before are in memory. A thread that has loaded one refers to
    it a moment longer than the cache: of more than two groups those count that stay."""
    end_s = time.monotonic() + STAYS_S
    while (now := alive() - before) > 2 * GROUP and time.monotonic() < end_s:
        time.sleep(0.001)
    return now


def read_all(
    reader: EntryReader, view: Snapshot, order: GroupedOrder, way: Read, *, watch: bool = True
) -> int:
    """Read and compare all files in the order. Returns the most chunks that were seen in memory."""
    gc.collect()  # chunks of other tests
    before, most = alive(), 0
    for place, content in enumerate(way(reader, order.indices)):
        path = view.path(int(order.indices[place])).decode()
        assert content == FILES[path]
        if watch:
            most = max(most, len(reader._cache._chunks) + len(reader._cache._flights))
            if place % 37 == 0:
                most = max(most, alive_since(before))
    return most


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("budget", ["two groups", "half of the dataset"])
def test_an_epoch_loads_chunks_once(
    store: Counting, view: Snapshot, way: Read, budget: str
) -> None:
    order = chunk_order(view, 1, 2, group_size=GROUP)
    memory = needed(view, order) if budget == "two groups" else half_of(view)
    assert view.chunk_count >= 50, "else this test shows little"
    assert memory <= half_of(view)
    reader = EntryReader(view, store, memory)
    for epoch in (2, 3):
        order = chunk_order(view, 1, epoch, group_size=GROUP)
        reader.prefetch_order(order.indices, order.ends)
        assert 1 < read_all(reader, view, order, way) <= 2 * GROUP
        stats = reader.stats()
        assert (stats["chunk_fetches"], stats["range_fetches"]) == (view.chunk_count, 0)
        assert set(store.reads_by_object().values()) == {1}
        assert stats["evictions"] == stats["memory_bytes"] == 0  # all were given up in time
        store.reads.clear()
        reader._counts.clear()
    reader.close()


@pytest.mark.parametrize("way", WAYS)
def test_memory_for_one_group_is_enough(store: Counting, view: Snapshot, way: Read) -> None:
    order = chunk_order(view, 1, 2, group_size=GROUP)
    reader = following(store, view, order, (GROUP + 1) * int(view.chunk_sizes.max()))
    read_all(reader, view, order, way, watch=False)
    assert set(store.reads_by_object().values()) == {1}
    assert reader.stats()["range_fetches"] == 0


def test_less_than_one_group_is_refused_or_grows(store: Counting, view: Snapshot) -> None:
    order = chunk_order(view, 1, 2, group_size=GROUP)
    memory = GROUP * int(view.chunk_sizes.max()) // 2
    reader = EntryReader(view, store, memory)
    with pytest.raises(UsageError, match=r"smaller group_size, or open .* memory_bytes of [\d,]+"):
        reader.prefetch_order(order.indices, order.ends)
    assert read_all(reader, view, order, many) > 1  # it goes on as it did
    store.reads.clear()
    reader.prefetch_order(order.indices, order.ends, grow=True)
    assert reader.stats()["memory_budget_bytes"] == needed(view, order)
    read_all(reader, view, order, many)
    assert set(store.reads_by_object().values()) == {1}


def test_a_dataset_that_fits_the_memory_stays_in_it(store: Counting, view: Snapshot) -> None:
    reader = EntryReader(view, store, 1 << 30)
    for epoch in range(3):
        order = chunk_order(view, 1, epoch, group_size=GROUP)
        reader.prefetch_order(order.indices, order.ends)
        read_all(reader, view, order, many, watch=False)
    assert set(store.reads_by_object().values()) == {1}


@pytest.mark.parametrize("way", [one_by_one, many])
def test_reading_an_order_again_begins_anew(store: Counting, view: Snapshot, way: Read) -> None:
    """A pass that was given up, after the first file or later, changes nothing."""
    order = chunk_order(view, 1, 2, group_size=GROUP)
    reader = following(store, view, order)
    read_all(reader, view, order, way, watch=False)
    first = order.indices[:1]
    next(many(reader, first))
    read_all(reader, view, order, way, watch=False)
    assert max(store.reads_by_object().values()) == 2
    list(way(reader, order.indices[:300]))
    settle(reader._cache)  # loads that were begun ahead
    store.reads.clear()
    assert read_all(reader, view, order, way) <= 2 * GROUP + 1
    assert max(store.reads_by_object().values()) == 1
    assert reader.stats()["range_fetches"] == 0


def test_the_next_group_is_loaded_ahead(store: Counting, view: Snapshot) -> None:
    order = chunk_order(view, 1, 2, group_size=GROUP)
    reader = following(store, view, order)
    assert not store.reads, "announcing an order reads nothing"
    reader.read(int(order.indices[0]))
    two = view.chunk_of(order.indices[: order.ends[1]])
    settle(reader._cache)
    assert set(reader._cache._chunks) <= set(two.tolist())
    assert len(store.reads) == 2 * GROUP - 1


def test_chunks_that_a_reader_leaves_out_are_dropped(store: Counting, view: Snapshot) -> None:
    """A worker that reads every fourth batch, or jumps in the order."""
    order = chunk_order(view, 1, 2, group_size=GROUP)
    reader = following(store, view, order, half_of(view))
    batches = np.arange(len(order.indices)) // 16 % 4 == 1
    part = GroupedOrder(order.indices[batches], np.array([int(batches.sum())]))
    assert read_all(reader, view, part, one_by_one) <= 2 * GROUP
    assert max(store.reads_by_object().values()) == 1
    places = [*range(3), *range(700, 703), *range(400, 700), *range(20)]
    part = GroupedOrder(order.indices[places], np.array([len(places)]))
    for way in WAYS:
        reader.prefetch_order(order.indices, order.ends)
        before = reader.stats()
        assert read_all(reader, view, part, way) <= 2 * GROUP + FETCH_THREADS  # on their way
        after = reader.stats()
        # Each time it goes back, the first few reads may be those of a slow thread.
        assert after["range_fetches"] - before["range_fetches"] <= 2 * 32
        assert after["chunk_fetches"] - before["chunk_fetches"] <= 4 * 2 * GROUP + 4 * GROUP


def test_several_threads_share_an_order(store: Counting, view: Snapshot) -> None:
    order = chunk_order(view, 1, 2, group_size=GROUP)
    reader = following(store, view, order, half_of(view))
    left, wrong, lock = iter(order.indices.tolist()), [], threading.Lock()

    def work() -> None:
        while True:
            with lock:
                index = next(left, None)
            if index is None:
                return
            if bytes(reader.read(index)) != FILES[view.path(index).decode()]:
                wrong.append(index)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert not wrong
    # A thread that was held up for more than a quarter of a group reads its file by itself.
    assert view.chunk_count <= reader.stats()["chunk_fetches"] <= view.chunk_count + 4
    assert reader.stats()["range_fetches"] <= len(order.indices) // 10


@pytest.mark.parametrize("way", WAYS)
def test_ranks_read_each_chunk_about_once(store: Counting, view: Snapshot, way: Read) -> None:
    """If the cut between two ranks goes through a group, both read its chunks or parts of them."""
    whole, single = 0, 0
    for rank in range(3):
        order = chunk_order(view, 1, 2, group_size=GROUP, rank=rank, world=3)
        reader = following(store, view, order)
        assert read_all(reader, view, order, way) <= 2 * GROUP
        whole += reader.stats()["chunk_fetches"]
        single += reader.stats()["range_fetches"]
    assert view.chunk_count <= whole <= view.chunk_count + 3 * GROUP
    assert single <= 3 * GROUP


@pytest.mark.parametrize("way", [one_by_one, many])
def test_compressed_files_are_decoded_and_not_kept(repository: LocalRepository, way: Read) -> None:
    """Decoded contents are read once, and would take memory from the two groups."""
    view, store = repository.view("texts"), Counting(repository)
    order = chunk_order(view, 1, 2, group_size=2)
    memory = needed(view, order)
    assert memory < int(view.chunk_sizes.sum()), "else this test shows nothing"
    reader = following(store, view, order)
    for index, content in zip(order.indices.tolist(), way(reader, order.indices), strict=True):
        assert content == half_random(int(view.name(index)))
        assert reader.stats()["memory_bytes"] <= memory
    assert set(store.reads_by_object().values()) == {1}
    assert reader.stats()["evictions"] == 0


@each_row("way", WAYS)
def test_files_of_many_chunks_are_read_about_once(repository: LocalRepository, way: Read) -> None:
    """Only parts in the chunks of other files are read again, each alone."""
    view, store = repository.view("large"), Counting(repository)
    order = chunk_order(view, 1, 2, group_size=4)
    reader = following(store, view, order, int(view.chunk_sizes.sum()) * 3 // 4)
    names = map(view.name, order.indices.tolist())
    got = {name: len(each) for name, each in zip(names, way(reader, order.indices), strict=True)}
    assert got == {b"%02d" % n: CHUNK_BYTES_MIN * (n % 4) + 3000 for n in range(40)}
    stats = reader.stats()
    assert stats["chunk_fetches"] <= view.chunk_count
    assert stats["fetched_bytes"] < 1.3 * int(view.chunk_sizes.sum())


@pytest.mark.parametrize("way", [one_by_one, many])
def test_other_files_are_read_beside_the_order(store: Counting, view: Snapshot, way: Read) -> None:
    below = view.lookup(b"d3")
    order = chunk_order(view, 1, 2, group_size=GROUP, below=below)
    reader = following(store, view, order, half_of(view))
    mixed = np.random.default_rng(5).permutation(view.files())
    read_all(reader, view, GroupedOrder(mixed, np.array([len(mixed)])), way, watch=False)
    assert reader.stats()["memory_bytes"] <= half_of(view)


def test_a_new_order_replaces_the_old_one(store: Counting, view: Snapshot) -> None:
    old = chunk_order(view, 1, 1, group_size=GROUP)
    reader = following(store, view, old)
    started = many(reader, old.indices)
    got = [next(started) for _ in range(100)]
    new = chunk_order(view, 1, 2, group_size=GROUP)
    reader.prefetch_order(new.indices, new.ends)
    got += started
    assert got == [FILES[view.path(i).decode()] for i in old.indices.tolist()]
    assert read_all(reader, view, new, many) <= 2 * GROUP + 1
