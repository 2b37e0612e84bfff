"""`EntryReader.read_many` over a store that reads parts of chunks by their numbers: whatever groups
the parts arrive in, each file gets its own bytes, and only what is unchecked is checked."""

from collections.abc import Iterator
from types import ModuleType
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diesel_fs.cache import coalescing_reader as coalescing_module
from diesel_fs.cache import reader as reader_module
from diesel_fs.cache.coalesce import ReadLimits
from diesel_fs.cache.coalescing_reader import CoalescingReader
from diesel_fs.cache.reader import EntryReader
from diesel_fs.errors import CorruptError, ObjectMissing, ObjectStoreError
from diesel_fs.format.entries import Bytes, Kind
from diesel_fs.format.object_names import chunk_object
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.storage.objects.store import ChunkParts, ChunkReader, ReadGroup, ReadWrapper

from .conftest import FILES, Counting

Positions = npt.NDArray[np.int64]

MEMORY_BYTES = 200_000  # less than the dataset has


class Columns(ReadWrapper):
    """A store whose parts arrive in groups that are drawn at random, and may be damaged."""

    batches_reads = True

    def __init__(self, inner: Counting, view: Snapshot, seed: int = 0, groups: int = 3) -> None:
        super().__init__(inner)
        self._view = view
        self._draw = np.random.default_rng(seed)
        self._groups = groups
        self.damaged: set[tuple[int, int]] = set()  # chunk and start
        self.checks = False  # whether every second group has been checked already
        self.fails = False
        self.loses = False  # a chunk, at the third group
        self.parts: list[int] = []  # the chunks that were asked for

    def chunk_reader(self, identity: UUID, version: int) -> ChunkReader | None:
        is_ours = (identity, version) == (self._view.identity, self._view.version)
        return self if is_ours else None

    def begin(self, parts: ChunkParts) -> Iterator[ReadGroup]:
        self.parts += parts[:, 0].tolist()
        order = self._draw.permutation(len(parts))
        return self._arriving(parts, np.array_split(order, self._groups), fails=self.fails)

    def _arriving(
        self, parts: ChunkParts, groups: list[Positions], *, fails: bool
    ) -> Iterator[ReadGroup]:
        for number, some in enumerate(groups):
            if fails and number:
                raise ObjectStoreError("no store")
            if self.loses and number == 2:
                raise ObjectMissing("a chunk is lost")
            contents = [self._part(*each) for each in parts[some].tolist()]
            yield ReadGroup(some.tolist(), contents, self.checks and number % 2 == 1)

    def places(self, chunks: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        return np.zeros(len(chunks), np.int32)

    def read_part(self, chunk: int, start: int, size: int) -> tuple[Bytes, bool]:
        return self._part(chunk, start, size), False

    def _part(self, chunk: int, start: int, size: int) -> memoryview:
        room = bytearray(size)
        name = chunk_object(self._view.identity, self._view.chunk_ids[chunk])
        self.inner.read_into(name, start, room)
        if (chunk, start) in self.damaged:
            room[size // 2] ^= 1
        return memoryview(room).toreadonly()


def expected(view: Snapshot, rows: list[int]) -> list[bytes]:
    return [FILES.get(view.path(row).decode(), b"") for row in rows]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 30), groups=st.integers(1, 40), checks=st.booleans())
def test_each_file_gets_its_bytes_from_whatever_group(
    store: Counting, view: Snapshot, seed: int, groups: int, checks: bool
) -> None:
    """Folders, empty, compressed and large files among them, some of them repeatedly."""
    columns = Columns(store, view, seed, groups)
    columns.checks = checks
    rows = np.random.default_rng(seed).integers(0, view.entry_count, 150)
    reader = EntryReader(view, columns, MEMORY_BYTES, prefer_entries=True)
    assert list(map(bytes, reader.read_many(rows))) == expected(view, rows.tolist())
    assert columns.parts, "parts were asked for"


def counted_hashes(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[int]:
    """The sizes of what a module hashes from now on."""
    hashed: list[int] = []

    def counted(content: Bytes) -> int:
        hashed.append(len(content))
        return xxhash.xxh3_64_intdigest(content)

    monkeypatch.setattr(module, "xxh3_64_intdigest", counted)
    return hashed


def test_only_unchecked_groups_are_checked(
    store: Counting, view: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = counted_hashes(monkeypatch, reader_module)
    columns = Columns(store, view, groups=4)
    columns.checks = True
    rows = np.array([view.lookup(f"n{number:03}".encode()) for number in range(40)])
    reader = EntryReader(view, columns, MEMORY_BYTES, prefer_entries=True)
    assert list(map(bytes, reader.read_many(rows))) == expected(view, rows.tolist())
    assert len(hashed) == len(rows) // 2


def test_B4_damaged_parts_are_read_again_past_all_copies(store: Counting, view: Snapshot) -> None:
    columns = Columns(store, view)
    rows = view.files()
    plain = [view.plain_extent(row) for row in rows.tolist()]
    columns.damaged = {(each[0], each[1]) for each in plain[::7] if each is not None}
    reader = EntryReader(view, columns, MEMORY_BYTES, prefer_entries=True)
    assert list(map(bytes, reader.read_many(rows))) == expected(view, rows.tolist())
    assert reader.stats()["healed"] == len(columns.damaged)


def test_B3_a_file_that_is_damaged_in_the_store_raises_the_error_for_itself(
    store: Counting, view: Snapshot
) -> None:
    bad = view.lookup(b"n007")
    [extent] = view.extents(bad)
    name = chunk_object(view.identity, view.chunk_ids[extent.chunk])

    def flip(read: str, buffer: memoryview) -> None:
        _, start, size = store.reads[-1]
        if read == name and start <= extent.offset < start + size:
            buffer[extent.offset - start] ^= 1

    store.change = flip
    reader = EntryReader(view, Columns(store, view), MEMORY_BYTES, prefer_entries=True)
    with pytest.raises(CorruptError, match="n007"):
        list(reader.read_many(np.array([bad, view.lookup(b"n008")])))


def test_where_the_parts_fail_files_are_read_one_by_one(store: Counting, view: Snapshot) -> None:
    columns = Columns(store, view)
    columns.fails = True
    rows = view.files()[:50]
    reader = EntryReader(view, columns, MEMORY_BYTES, prefer_entries=True)
    assert list(map(bytes, reader.read_many(rows))) == expected(view, rows.tolist())


def test_a_small_file_alone_is_one_part(store: Counting, view: Snapshot) -> None:
    columns = Columns(store, view)
    reader = EntryReader(view, columns, MEMORY_BYTES, prefer_entries=True)
    row = view.lookup(b"n100")
    plain = view.plain_extent(row)
    assert plain is not None
    assert bytes(reader.read_plain(row, plain)) == FILES["n100"]
    columns.damaged = {(plain[0], plain[1])}
    assert bytes(reader.read_plain(row, plain)) == FILES["n100"], "read again from the store"
    assert view.stat(row).kind == Kind.FILE


def test_units_that_share_a_request_all_hear_that_the_store_failed(
    store: Counting, view: Snapshot
) -> None:
    """Some of its parts have arrived before; and afterwards they are read again."""
    columns = Columns(store, view)
    reader = CoalescingReader(view, columns, limits=ReadLimits(batched_gap_bytes=0))
    apart = np.array([view.lookup(f"n{number:03}".encode()) for number in range(20, 100, 2)])
    units = apart[:20], apart[20:]
    columns.fails = True
    reader.prefetch(units)
    columns.fails = False
    for unit in units:
        with pytest.raises(ObjectStoreError):
            list(reader.batches(unit))
    for unit in units:
        assert sorted(pushed(reader, view, unit)) == unit.tolist()


def pushed(reader: CoalescingReader, view: Snapshot, unit: Positions) -> list[int]:
    """The files of a unit as they come, each with the right bytes."""
    entries = []
    for batch in reader.batches(unit):
        entries += batch.entries.tolist()
        assert list(map(bytes, batch.contents)) == expected(view, batch.entries.tolist())
    return entries


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
    """Units share requests; some are asked for before they are wanted, or lose files meanwhile."""
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
        assert sorted(pushed(reader, view, unit)) == sorted(unit.tolist())


def test_what_a_node_has_sent_is_given_before_the_next_one_sends(
    store: Counting, view: Snapshot
) -> None:
    columns = Columns(store, view, groups=4)
    columns.fails = True  # after the first group
    reader = CoalescingReader(view, columns, limits=ReadLimits(batched_gap_bytes=0))
    batches = reader.batches(np.array([view.lookup(f"n{n:03}".encode()) for n in range(0, 80, 2)]))
    first = next(batches)
    assert list(map(bytes, first.contents)) == expected(view, first.entries.tolist())
    assert 0 < len(first.entries) < 40
    with pytest.raises(ObjectStoreError):
        next(batches)


def test_B3_parts_that_came_before_a_lost_chunk_are_not_asked_for_again(
    store: Counting, view: Snapshot
) -> None:
    columns = Columns(store, view, groups=4)
    columns.loses = True
    reader = CoalescingReader(view, columns, limits=ReadLimits(batched_gap_bytes=0))
    unit = np.array([view.lookup(f"n{n:03}".encode()) for n in range(0, 80, 2)])
    before = len(store.reads)
    assert sorted(pushed(reader, view, unit)) == sorted(unit.tolist())
    assert len(store.reads) - before == len(unit)


def test_a_unit_whose_parts_are_checked_is_not_hashed_again(
    store: Counting, view: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = counted_hashes(monkeypatch, coalescing_module)
    columns = Columns(store, view, groups=4)
    columns.checks = True
    reader = CoalescingReader(view, columns, limits=ReadLimits(batched_gap_bytes=0))
    unit = np.array([view.lookup(f"n{n:03}".encode()) for n in range(0, 80, 2)])
    assert sorted(pushed(reader, view, unit)) == sorted(unit.tolist())
    assert len(hashed) == len(unit) // 2
