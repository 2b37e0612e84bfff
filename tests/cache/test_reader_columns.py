"""Readers of a store that reads parts of chunks by their numbers: whatever groups the parts arrive
in, each file gets its own bytes, and only unchecked parts are checked."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diesel_fs.cache.fetching import span_fetcher
from diesel_fs.cache.fetching.coalesce import ReadLimits
from diesel_fs.cache.readers import coalescing_reader as coalescing_module
from diesel_fs.cache.readers import column_reader as column_module
from diesel_fs.cache.readers.coalescing_reader import CoalescingReader
from diesel_fs.cache.readers.entry_reader import EntryReader
from diesel_fs.errors import ObjectStoreError
from diesel_fs.format.entries import Bytes
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.storage.objects.store import IN_MEMORY, ChunkParts, ReadGroup
from tests.waiting import until

from .conftest import FILES, Counting
from .reader_stores import Columns, Positions

APART = ReadLimits(batched_gap_bytes=0)
"""Every extent is a part by itself."""


def expected(view: Snapshot, rows: Positions) -> list[bytes]:
    return [FILES.get(view.path(row).decode(), b"") for row in rows.tolist()]


def check_many(columns: Columns, view: Snapshot, rows: Positions) -> EntryReader:
    reader = EntryReader(view, columns, 200_000, prefer_entries=True)
    assert list(map(bytes, reader.read_many(rows))) == expected(view, rows)
    return reader


def rows_of(view: Snapshot, numbers: range) -> Positions:
    return np.array([view.lookup(f"n{number:03}".encode()) for number in numbers])


def pushed(reader: CoalescingReader, view: Snapshot, unit: Positions) -> None:
    entries: list[int] = []
    for batch in reader.batches(unit):
        entries += batch.entries.tolist()
        assert list(map(bytes, batch.contents)) == expected(view, batch.entries)
    assert sorted(entries) == sorted(unit.tolist())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 30), groups=st.integers(1, 40), checks=st.booleans())
def test_each_file_gets_its_bytes_from_whatever_group(
    store: Counting, view: Snapshot, seed: int, groups: int, checks: bool
) -> None:
    columns = Columns(store, view, seed, groups)
    columns.checks = checks
    check_many(columns, view, np.random.default_rng(seed).integers(0, view.entry_count, 150))
    assert columns.parts, "parts were requested"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1 << 30),
    groups=st.integers(1, 40),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    gap_bytes=st.sampled_from([0, 5000]),
    batch_parts=st.sampled_from([3, 512]),
    asks_ahead=st.booleans(),
    checks=st.booleans(),
)
def test_a_unit_comes_once_from_whatever_groups_and_requests(
    store: Counting,
    view: Snapshot,
    seed: int,
    groups: int,
    cuts: list[int],
    gap_bytes: int,
    batch_parts: int,
    asks_ahead: bool,
    checks: bool,
) -> None:
    """Units share requests; some are read ahead, or lose files meanwhile."""
    columns = Columns(store, view, seed, groups)
    columns.checks = checks
    limits = ReadLimits(batched_gap_bytes=gap_bytes, batch_parts=batch_parts, span_bytes=20_000)
    reader = CoalescingReader(view, columns, limits=limits)
    plain = np.array([row for row in view.files() if view.plain_extent(row) is not None])
    order = np.random.default_rng(seed).permutation(plain)[:60]
    units = [each for each in np.split(order, sorted(cuts)) if len(each)]
    if asks_ahead:
        reader.prefetch(units)
        reader.prefetch([units[0][1:], *units[1:]])
    for unit in units:
        pushed(reader, view, unit)


def read_many(columns: Columns, view: Snapshot, rows: Positions) -> None:
    check_many(columns, view, rows)


def push(columns: Columns, view: Snapshot, rows: Positions) -> None:
    pushed(CoalescingReader(view, columns, limits=APART), view, rows)


@pytest.mark.parametrize(
    ("module", "read"), [(column_module, read_many), (coalescing_module, push)]
)
def test_only_unchecked_groups_are_checked(
    store: Counting,
    view: Snapshot,
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    read: Callable[[Columns, Snapshot, Positions], None],
) -> None:
    hashed: list[int] = []

    def counted(content: Bytes) -> int:
        hashed.append(len(content))
        return xxhash.xxh3_64_intdigest(content)

    monkeypatch.setattr(module, "xxh3_64_intdigest", counted)
    columns = Columns(store, view, groups=4)
    columns.checks = True
    read(columns, view, rows_of(view, range(0, 80, 2)))
    assert len(hashed) == 20


def test_B4_damaged_parts_are_read_again_past_all_copies(store: Counting, view: Snapshot) -> None:
    columns = Columns(store, view)
    plain = [view.plain_extent(row) for row in view.files().tolist()]
    columns.damaged = {(each[0], each[1]) for each in plain[::7] if each is not None}
    reader = check_many(columns, view, view.files())
    assert reader.stats()["healed"] == len(columns.damaged)


def test_if_the_parts_fail_files_are_read_one_by_one(store: Counting, view: Snapshot) -> None:
    columns = Columns(store, view)
    columns.fails = True
    check_many(columns, view, view.files()[:50])


def test_a_small_file_alone_is_one_part(store: Counting, view: Snapshot) -> None:
    columns = Columns(store, view)
    reader = EntryReader(view, columns, 200_000, prefer_entries=True)
    row = view.lookup(b"n100")
    plain = view.plain_extent(row)
    assert plain is not None
    assert bytes(reader.read_plain(row, plain)) == FILES["n100"]
    columns.damaged = {(plain[0], plain[1])}
    assert bytes(reader.read_plain(row, plain)) == FILES["n100"], "read again from the store"


def test_the_first_unit_of_a_request_gets_its_error(store: Counting, view: Snapshot) -> None:
    columns = Columns(store, view)
    reader = CoalescingReader(view, columns, limits=APART)
    units = np.split(rows_of(view, range(20, 100, 2)), [20])
    columns.fails = True
    reader.prefetch(units)
    columns.fails = False
    with pytest.raises(ObjectStoreError):
        list(reader.batches(units[0]))
    for unit in reversed(units):
        pushed(reader, view, unit)


def test_contents_that_have_come_are_given_before_more_come(
    store: Counting, view: Snapshot
) -> None:
    columns = Columns(store, view, groups=4)
    columns.fails = True  # after the first group
    batches = CoalescingReader(view, columns, limits=APART).batches(rows_of(view, range(0, 80, 2)))
    first = next(batches)
    assert list(map(bytes, first.contents)) == expected(view, first.entries)
    assert 0 < len(first.entries) < 40
    with pytest.raises(ObjectStoreError):
        next(batches)


def test_B3_parts_are_kept_though_a_chunk_is_lost(store: Counting, view: Snapshot) -> None:
    columns = Columns(store, view, groups=4)
    columns.loses = True
    unit = rows_of(view, range(0, 80, 2))
    push(columns, view, unit)
    assert len(store.reads) == len(unit)


class Placed(Columns):
    """The even chunks are in this process's memory, and the others on a node, which is slow."""

    def places(self, chunks: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        return np.where(chunks % 2 == 0, IN_MEMORY, 7).astype(np.int32)

    def begin(self, parts: ChunkParts) -> Iterator[ReadGroup]:
        is_here = parts[:, 0] % 2 == 0
        for some, delay_s in ((np.flatnonzero(is_here), 0.0), (np.flatnonzero(~is_here), 0.03)):
            if len(some):
                time.sleep(delay_s)
                yield from self._arriving(parts, [some], fails=False)


def test_costs_are_predicted_by_the_places_of_chunks(store: Counting, view: Snapshot) -> None:
    reader = CoalescingReader(view, Placed(store, view))
    files = view.files()
    files = files[view.columns.size[files] > 0]
    is_here = view.chunk_of(files) % 2 == 0
    assert is_here.any()
    assert not is_here.all()
    for _ in range(6):
        assert [*reader.batches(files)]
    here, elsewhere = reader.read_costs([files[is_here], files[~is_here]])
    assert here == (0.0, 0.0)
    assert sum(elsewhere) > 0.02  # more on a busy machine


@pytest.mark.parametrize("is_slow", [True, False])
def test_contents_that_were_requested_ahead_are_taken_at_once_from_a_slow_place(
    store: Counting, view: Snapshot, *, is_slow: bool
) -> None:
    """A task's cache asks the store only for what its nodes lack, so after their answers."""
    columns = Columns(store, view, groups=4)
    columns.is_slow = is_slow
    reader = CoalescingReader(view, columns, limits=APART)
    unit = rows_of(view, range(0, 80, 2))
    reader.prefetch([unit])
    if is_slow:
        until(lambda: len(store.reads) == len(unit), "all contents")
    else:
        assert not store.reads, "the caller takes them"
    pushed(reader, view, unit)
    assert len(store.reads) == len(unit)
    reader.close()


def test_an_error_of_a_request_ahead_comes_to_each_unit_that_shares_it(
    store: Counting, view: Snapshot
) -> None:
    columns = Columns(store, view, groups=4)
    columns.is_slow = columns.fails = True
    reader = CoalescingReader(view, columns, limits=APART)
    unit = rows_of(view, range(0, 80, 2))
    reader.prefetch([unit])
    with pytest.raises(ObjectStoreError):
        list(reader.batches(unit[:20]))
    with pytest.raises(ObjectStoreError):
        list(reader.batches(unit))
    columns.fails = False
    pushed(reader, view, unit)


class Waiting(Columns):
    """Its groups wait for `may_go`. It counts the reads that have ended."""

    def __init__(self, inner: Counting, view: Snapshot) -> None:
        super().__init__(inner, view, groups=4)
        self.is_slow = True
        self.may_go = threading.Event()
        self.ended = 0

    def begin(self, parts: ChunkParts) -> Iterator[ReadGroup]:
        try:
            for group in super().begin(parts):
                self.may_go.wait(10.0)
                yield group
        finally:
            self.ended += 1


@pytest.mark.parametrize("closes", [False, True])
def test_a_request_ahead_that_is_given_up_ends(
    store: Counting, view: Snapshot, *, closes: bool
) -> None:
    """What it has begun to read from a store is ended with it. So is a closed reader's."""
    columns = Waiting(store, view)
    reader = CoalescingReader(view, columns, limits=APART)
    reader.prefetch([rows_of(view, range(0, 80, 2))])
    until(lambda: bool(store.reads), "a group")
    if closes:
        reader.close()
    else:
        reader.prefetch([])
    columns.may_go.set()
    until(lambda: columns.ended == 1, "its end")


def test_contents_of_requests_ahead_are_freed_without_a_collection_of_garbage(
    store: Counting, view: Snapshot
) -> None:
    columns = Columns(store, view, groups=4)
    columns.is_slow = True
    reader = CoalescingReader(view, columns, limits=APART)
    unit = rows_of(view, range(0, 80, 2))
    gc.collect()
    gc.disable()
    try:
        reader.prefetch([unit])
        pushed(reader, view, unit)
        assert not [each for each in gc.get_objects() if type(each) is span_fetcher._Asked]
    finally:
        gc.enable()


def test_a_part_of_a_request_under_way_is_not_requested_again(
    store: Counting, view: Snapshot
) -> None:
    """An urgent unit takes files out of a later one."""
    columns = Columns(store, view, groups=4)
    columns.is_slow = True
    reader = CoalescingReader(view, columns, limits=ReadLimits(batched_gap_bytes=1 << 20))
    unit = rows_of(view, range(80))
    reader.prefetch([unit])
    asked = len(columns.parts)
    pushed(reader, view, unit[3:9:2])
    rest = np.setdiff1d(unit, unit[3:9:2])
    reader.prefetch([rest])
    pushed(reader, view, rest)
    assert len(columns.parts) == asked
