"""`CoalescingReader` gives every content once, checked, in few reads, from stores of each kind."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from diesel_fs.cache.fetching.coalesce import ReadLimits
from diesel_fs.cache.fetching.read_plan import plan_reads
from diesel_fs.cache.policies import costs
from diesel_fs.cache.readers.coalescing_reader import CoalescingReader
from diesel_fs.format.chunk import CHUNK_BYTES_MIN
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.storage.objects.store import ObjectStore
from tests.examples import examples
from tests.rows import each_row

from .conftest import FILES, Counting
from .reader_stores import Batching, Counted, Positions, Slow


def wait_for_flights(reader: CoalescingReader) -> None:
    for asked in reader._fetcher._flights.values():
        asked.result()


def contents(reader: CoalescingReader, entries: Positions) -> dict[int, bytes]:
    found: dict[int, dict[int, bytes]] = defaultdict(dict)
    for batch in reader.batches(entries):
        places = zip(batch.entries.tolist(), batch.starts.tolist(), batch.contents, strict=True)
        for entry, start, part in places:
            assert start not in found[entry]
            found[entry][start] = bytes(part)
    whole = {}
    for entry, pieces in found.items():
        whole[entry], first = b"", min(pieces)
        for start in sorted(pieces):
            assert start == first + len(whole[entry]), "pieces leave no gap"
            whole[entry] += pieces[start]
    return whole


class Dataset:
    def __init__(self, store: Counting, view: Snapshot) -> None:
        self.store, self.view, self.files = store, view, view.files()
        whole = {view.lookup(name.encode()): content for name, content in FILES.items()}
        self.contents = {entry: content for entry, content in whole.items() if content}

    def reader(self, store: ObjectStore, limits: ReadLimits | None = None) -> CoalescingReader:
        return CoalescingReader(self.view, store, limits=limits)

    def rows(self, *names: bytes) -> Positions:
        return self.view.lookup_many(names)

    def check(self, reader: CoalescingReader, entries: Positions) -> None:
        expected = {row: self.contents[row] for row in entries.tolist() if row in self.contents}
        assert contents(reader, entries) == expected


@pytest.fixture
def data(store: Counting, view: Snapshot) -> Dataset:
    return Dataset(store, view)


@each_row("span_bytes", [1, 10_000, 8 << 20])
@each_row("gap_bytes", [0, 64 << 10])
def test_each_content_comes_once(data: Dataset, span_bytes: int, gap_bytes: int) -> None:
    """Folders, links and empty files have no content."""
    data.store.reads.clear()
    limits = ReadLimits(span_bytes=span_bytes, gap_bytes=gap_bytes)
    reader = data.reader(data.store, limits)
    data.check(reader, data.rows(b"", b"empty"))
    data.check(reader, np.zeros(0, np.int64))
    assert data.store.reads == []
    data.check(reader, np.random.default_rng(1).permutation(data.view.entry_count))
    assert all(size <= max(span_bytes, 2 * CHUNK_BYTES_MIN) for _, _, size in data.store.reads)


def test_files_of_a_chunk_are_one_read_unless_they_are_far_apart(data: Dataset) -> None:
    files = data.files
    chunk = int(np.bincount(data.view.chunk_of(files)).argmax())
    inside = files[(data.view.chunk_of(files) == chunk) & (data.view.columns.size[files] < 2000)]
    assert len(inside) > 20
    reader = data.reader(data.store)
    data.check(reader, inside)
    assert len(data.store.reads) == reader.stats()["fetches"] == 1
    data.store.reads.clear()
    apart = inside[np.argsort(data.view.columns.offset[inside])][::4]  # three files lie between
    data.check(data.reader(data.store, ReadLimits(gap_bytes=500)), apart)
    assert len(data.store.reads) == len(apart)


# Gaps in chunks of which little is wanted

Extent = tuple[int, int, int]
"""A chunk, and the start and the end of an extent in it."""


def wanted_extents(data: Dataset, entries: Positions) -> list[Extent]:
    return sorted(
        (each.chunk, each.offset, each.offset + each.stored)
        for entry in entries.tolist()
        for each in data.view.extents(entry)
    )


@examples(100, suppress=(HealthCheck.function_scoped_fixture,))
@given(
    numbers=st.sets(st.integers(0, 299), min_size=1, max_size=60),
    gap=st.integers(0, 20_000),
    sparse_gap=st.integers(0, 20_000),
)
def test_a_plan_covers_all_extents_and_only_the_allowed_gaps(
    data: Dataset, numbers: set[int], gap: int, sparse_gap: int
) -> None:
    """In a sparse chunk, gaps above the limit for sparse chunks are left out, too: one of which
    less than half of the bytes between the first and the last extent is wanted, with gaps of more
    than half of the other limit on average."""
    entries = data.rows(*(b"n%03d" % number for number in numbers))
    plan = plan_reads(
        data.view, entries, gap_bytes=gap, span_bytes=8 << 20, sparse_gap_bytes=sparse_gap
    )
    extents = wanted_extents(data, entries)
    allowed = 0
    for chunk in {chunk for chunk, _, _ in extents}:
        own = [(start, end) for other, start, end in extents if other == chunk]
        wanted = sum(end - start for start, end in own)
        between = [start - end for (_, end), (start, _) in pairwise(own)]
        is_sparse = sum(between) > max(wanted, len(between) * gap / 2)
        most = min(gap, sparse_gap) if is_sparse else gap
        allowed += wanted + sum(each for each in between if each <= most)
    assert plan.bytes == sum(size for _, _, size in plan.spans) == allowed
    for chunk, start, end in extents:
        assert any(
            (chunk, True) == (other, at <= start and end <= at + size)
            for other, at, size in plan.spans
        )


def sparse_and_dense(data: Dataset) -> tuple[Positions, Positions]:
    """Return three files that are far apart in the chunk with the most small files, and all but
    some of its files, which follow each other."""
    files = data.files
    chunk = int(np.bincount(data.view.chunk_of(files)).argmax())
    inside = files[(data.view.chunk_of(files) == chunk) & (data.view.columns.size[files] < 2000)]
    inside = inside[np.argsort(data.view.columns.offset[inside])]
    half = len(inside) // 2
    return inside[[0, half, -1]], np.concatenate([inside[: half - 3], inside[half + 3 :]])


@each_row(
    ("store", "spans"), [("new", 3), ("slow", 3), ("fast", 1)],
    ids=["before the first read", "a slow store", "a fast store"],
)  # fmt: skip
def test_wide_gaps_of_sparse_chunks_are_not_read_from_a_slow_store(
    data: Dataset, store: str, spans: int
) -> None:
    sparse, dense = sparse_and_dense(data)
    widest = max(after[1] - before[2] for before, after in pairwise(wanted_extents(data, sparse)))
    reader = data.reader(data.store, ReadLimits(gap_bytes=widest))
    if store != "new":
        reader._fetcher._stored.costs.observe(100_000, 1.0 if store == "slow" else 0.0001)
    assert len(reader._plan(sparse).spans) == spans
    assert len(reader._plan(dense).spans) == 1
    data.store.reads.clear()
    data.check(reader, sparse)
    assert len(data.store.reads) == spans


def test_a_store_that_takes_many_reads_in_a_request_has_its_own_limit(data: Dataset) -> None:
    sparse, _ = sparse_and_dense(data)
    reader = data.reader(Batching(data.store), ReadLimits(batched_gap_bytes=1 << 20))
    assert len(reader._plan(sparse).spans) == 1


# Several spans are requested from a slow store at once, and ahead


def test_a_slow_store_gets_several_requests_at_once(data: Dataset) -> None:
    """The first unit does, too: a store counts as slow until a read shows that it is not."""
    slow = Slow(data.store)
    reader = data.reader(slow)
    spans = len(reader._plan(data.files).spans)
    data.check(reader, data.files)
    assert slow.most >= 4  # of 14 spans; a busy machine starts threads late
    assert slow.reads == spans
    assert reader.is_slow


def test_a_fast_store_gets_one_request_at_a_time(
    data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "SLOW_READ_S", 60.0)  # fast, also on a busy machine
    fast = Counted(data.store)
    reader = data.reader(fast)
    data.check(reader, data.rows(b"small"))
    assert not reader.is_slow
    fast.most = 0
    data.check(reader, data.files)
    assert fast.most == 1


def slow_reader(slow: Slow, data: Dataset, limits: ReadLimits | None = None) -> CoalescingReader:
    reader = data.reader(slow, limits)
    reader._fetcher._stored.costs.observe(100_000, 1.0)
    return reader


def test_announced_units_are_read_ahead_and_given_up_when_the_plan_changes(data: Dataset) -> None:
    slow = Slow(data.store)
    reader = slow_reader(slow, data)
    large, text, small = data.rows(b"large"), data.rows(b"text"), data.rows(b"small")
    reader.prefetch([large, text])
    reader.prefetch([text, small])  # the plan has changed
    assert set(reader._fetcher._flights) == {
        span for each in (text, small) for span in reader._plan(each).spans
    }
    wait_for_flights(reader)
    before = slow.reads
    data.check(reader, text)
    data.check(reader, small)
    assert slow.reads == before
    assert not reader._fetcher._flights


def test_units_under_way_beyond_the_limit_are_kept_if_the_order_of_units_changes(
    data: Dataset,
) -> None:
    reader = slow_reader(Slow(data.store), data)
    text, large, small = data.rows(b"text"), data.rows(b"large"), data.rows(b"small")
    reader.prefetch([text, large])
    before = set(reader._fetcher._flights)
    assert before
    reader._limits = reader._fetcher._limits = ReadLimits(ahead_bytes=0)
    reader.prefetch([small, large, text])
    assert set(reader._fetcher._flights) == before, "not given up, and nothing else begun"
    reader.prefetch([small])
    assert not reader._fetcher._flights, "nobody will want them"


def all_read_ahead(slow: Slow, data: Dataset) -> CoalescingReader:
    reader = slow_reader(slow, data)
    reader.prefetch([data.files])
    wait_for_flights(reader)
    slow.reads = 0
    return reader


def test_a_unit_that_loses_entries_is_not_read_again(data: Dataset) -> None:
    """Somebody has read some of its files meanwhile. The spans in flight have the others."""
    slow, whole = Slow(data.store), data.files
    reader = all_read_ahead(slow, data)
    for left in (whole[whole != whole[1]], whole[2:-1], whole[2:3]):
        reader.prefetch([left])
    data.check(reader, whole[2:3])
    assert slow.reads == 0
    assert not reader._fetcher._flights


def test_a_file_is_taken_out_of_a_larger_read_that_is_under_way(data: Dataset) -> None:
    """It is wanted before the unit that has it."""
    slow = Slow(data.store)
    reader = all_read_ahead(slow, data)
    some = data.rows(b"n007", b"n011", b"small")
    data.check(reader, some)
    rest = np.setdiff1d(data.files, some)
    reader.prefetch([rest])
    data.check(reader, rest)
    assert slow.reads == 0
    assert not reader._fetcher._flights


def test_a_wanted_unit_is_read_at_once_though_other_units_fill_the_memory(data: Dataset) -> None:
    slow = Slow(data.store)
    reader = slow_reader(slow, data, ReadLimits(gap_bytes=0, ahead_bytes=30_000))
    files = data.files
    sizes = data.view.columns.size[files]
    some, ahead = files[(sizes > 0) & (sizes < 2000)][::8], files[sizes >= 2000]
    reader.prefetch([ahead])
    wait_for_flights(reader)
    slow.most = 0
    data.check(reader, some)
    assert slow.most >= len(some) // 2


def test_nothing_is_read_ahead_from_a_fast_store(
    data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "SLOW_READ_S", 60.0)  # fast, also on a busy machine
    reader = data.reader(data.store)
    data.check(reader, data.rows(b"small"))
    reader.prefetch([data.files])
    assert not reader._fetcher._flights.bytes


# A store that takes many parts in one request


def test_a_batching_store_gets_one_request_for_each_unit(data: Dataset) -> None:
    batching = Batching(data.store)
    reader = data.reader(batching)
    order = np.random.default_rng(1).permutation(data.files)
    for number, unit in enumerate([*np.array_split(order, 4), data.files], 1):
        data.check(reader, unit)
        assert len(batching.requests) == number


def test_requests_keep_their_limits_and_several_are_in_flight(data: Dataset) -> None:
    batching = Batching(data.store)
    batching.delay_s = 0.03
    limits = ReadLimits(batch_bytes=100_000, batch_parts=20, span_bytes=30_000)
    reader = data.reader(batching, limits)
    data.check(reader, data.files)
    assert batching.most > 2
    for parts in batching.requests:
        assert len(parts) <= 20
        assert len(parts) == 1 or sum(size for _, _, size in parts) <= 100_000
    assert not reader._fetcher._flights


def test_announced_units_share_requests_to_a_batching_store(data: Dataset) -> None:
    batching = Batching(data.store)
    reader = data.reader(batching)
    small = np.random.default_rng(2).permutation(data.files)
    one, other, third, rest = np.split(small, [40, 80, 90])
    reader.prefetch([one, other])
    wait_for_flights(reader)
    data.check(reader, one)
    assert len(batching.requests) == 1
    reader.prefetch([other, third])
    wait_for_flights(reader)
    data.check(reader, other)
    data.check(reader, third)
    assert len(batching.requests) == 2
    reader.prefetch([rest])
    reader.prefetch([one])
    assert set(reader._fetcher._flights) == set(reader._plan(one).spans)
    data.check(reader, one)
    assert not reader._fetcher._flights


def test_a_unit_that_lost_entries_since_it_was_announced_is_not_read_again(data: Dataset) -> None:
    """Somebody else has read some of its files meanwhile, as happens to nearly every unit if the
    dataset is larger than the memory."""
    batching = Batching(data.store)
    reader = data.reader(batching, ReadLimits(batched_gap_bytes=0))
    apart = np.flatnonzero(data.view.columns.size < 2000)[20:220:2]  # each is a span by itself
    now, later = apart[:50], apart[50:]
    reader.prefetch([now, later])
    data.check(reader, now)
    rest = np.delete(later, [3, 17])
    reader.prefetch([rest])
    data.check(reader, rest)
    wait_for_flights(reader)
    asked = [part for parts in batching.requests for part in parts]
    assert len(asked) == len(set(asked)) == len(apart)
    assert not reader._fetcher._flights


def test_an_announced_unit_is_planned_once(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = data.reader(Batching(data.store))
    looked: list[int] = []
    plan = reader._plan

    def counted(entries: npt.NDArray[np.int64]) -> object:
        looked.append(len(entries))
        return plan(entries)

    monkeypatch.setattr(reader, "_plan", counted)
    units = np.array_split(np.random.default_rng(3).permutation(data.files), 12)
    for first in range(len(units)):
        reader.prefetch(units[first : first + 5])
        assert contents(reader, units[first])
    assert looked == [len(unit) for unit in units]


def test_reading_ahead_keeps_its_memory_limit(data: Dataset) -> None:
    reader = data.reader(Batching(data.store), ReadLimits(ahead_bytes=200_000))
    draw, most = np.random.default_rng(4), 0
    units = [draw.choice(data.files, 12, replace=False) for _ in range(30)]
    for _ in range(60):
        some = [units[at] for at in draw.choice(len(units), 6)]
        reader.prefetch(some)
        in_flight_bytes = sum(size for _, _, size in reader._fetcher._flights)
        most = max(most, in_flight_bytes)
        assert in_flight_bytes == reader._fetcher._flights.bytes <= 200_000
        data.check(reader, some[int(draw.integers(3))])  # not always the first
    assert most > 100_000
    reader.prefetch([])
    assert (reader._fetcher._flights, reader._fetcher._flights.bytes) == ({}, 0)


def test_damage_in_a_request_is_read_again_past_caches(data: Dataset) -> None:
    again: list[str] = []

    class Damaging(Batching):
        def read_parts(self, parts: Sequence[tuple[str, int, int]]) -> Iterator[memoryview]:
            for content in super().read_parts(parts):
                damaged = bytearray(content)
                damaged[-1] ^= 1
                yield memoryview(damaged)

        def read_uncached(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
            again.append(name)
            self.inner.read_into(name, start, buffer)

    reader = data.reader(Damaging(data.store))
    data.check(reader, data.files)
    assert reader.stats()["healed"] == len(again) > 3


# What reads cost


def test_costs_follow_a_store_that_becomes_slow(data: Dataset) -> None:
    reader = data.reader(Slow(data.store), ReadLimits(slow_span_bytes=20_000))
    contents(reader, data.files)
    assert reader.is_slow
    assert sum(reader.read_costs([data.files])[0]) > 0.003
    assert reader.read_costs([data.files[:0]]) == [(0.0, 0.0)]
