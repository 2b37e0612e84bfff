"""`CoalescingReader` gives every content once, checked, in few reads, from stores of each kind."""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pytest

from diesel_fs.cache.coalesce import ReadLimits
from diesel_fs.cache.coalescing_reader import CoalescingReader, ReadRates
from diesel_fs.errors import ObjectMissing, ObjectStoreError
from diesel_fs.format.chunk import CHUNK_BYTES_MIN
from diesel_fs.format.object_names import chunk_object
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.storage.objects.store import (
    IN_MEMORY,
    ChunkParts,
    ObjectStore,
    ReadGroup,
    ReadWrapper,
)
from tests.storage.objects.faulty_store import Fault, FaultyStore

from .conftest import FILES, Counting


def wait_for_flights(reader: CoalescingReader) -> None:
    """Wait until all that was asked ahead is here."""
    flights = [each.contents for each in reader._in_flight.values()]
    wait([each for each in flights if isinstance(each, Future)], timeout=10)


def contents(
    reader: CoalescingReader, entries: "np.ndarray[tuple[int], np.dtype[np.int64]]"
) -> dict[int, bytes]:
    """The contents by entry, put together from their extents; none may come twice or be missing."""
    found: dict[int, dict[int, bytes]] = defaultdict(dict)
    for batch in reader.batches(entries):
        places = zip(batch.entries.tolist(), batch.starts.tolist(), batch.contents, strict=True)
        for entry, start, part in places:
            assert start not in found[entry]
            found[entry][start] = bytes(part)
    whole = {}
    for entry, pieces in found.items():
        at = min(pieces)
        for start in sorted(pieces):
            assert start == at, "pieces leave no gap"
            at += len(pieces[start])
        whole[entry] = b"".join(pieces[start] for start in sorted(pieces))
    return whole


def expected(view: Snapshot) -> dict[int, bytes]:
    """The content of each file that has any, by index."""
    return {view.lookup(name.encode()): content for name, content in FILES.items() if content}


@pytest.mark.parametrize("span_bytes", [1, 10_000, 8 << 20])
@pytest.mark.parametrize("gap_bytes", [0, 64 << 10])
def test_each_content_comes_once(
    store: Counting,
    view: Snapshot,
    span_bytes: int,
    gap_bytes: int,
) -> None:
    limits = ReadLimits(span_bytes=span_bytes, gap_bytes=gap_bytes)
    reader = CoalescingReader(view, store, limits=limits)
    every = np.arange(view.entry_count)
    assert contents(reader, np.random.default_rng(1).permutation(every)) == expected(view)
    assert all(size <= max(span_bytes, 2 * CHUNK_BYTES_MIN) for _, _, size in store.reads)


def test_all_files_of_a_chunk_are_one_read(store: Counting, view: Snapshot) -> None:
    files = view.files()
    chunk = int(np.bincount(view.chunk_of(files)).argmax())
    inside = files[(view.chunk_of(files) == chunk) & (view.columns.size[files] < 2000)]
    assert len(inside) > 20
    reader = CoalescingReader(view, store)
    assert len(contents(reader, inside)) == len(inside)
    assert len(store.reads) == 1
    assert reader.stats()["fetches"] == 1


def test_extents_that_are_far_apart_are_read_alone(store: Counting, view: Snapshot) -> None:
    reader = CoalescingReader(view, store, limits=ReadLimits(gap_bytes=500))
    files = view.files()
    chunk = int(np.bincount(view.chunk_of(files)).argmax())
    inside = files[(view.chunk_of(files) == chunk) & (view.columns.size[files] < 2000)]
    places = inside[np.argsort(view.columns.offset[inside])][::4]  # three files lie between
    assert len(contents(reader, places)) == len(places) == len(store.reads)


def test_folders_links_and_empty_files_have_no_contents(store: Counting, view: Snapshot) -> None:
    reader = CoalescingReader(view, store)
    assert contents(reader, np.array([0, view.lookup(b"empty")])) == {}
    assert contents(reader, np.zeros(0, np.int64)) == {}
    assert store.reads == []


def test_B4_damage_on_the_way_is_repaired_by_one_more_read(store: Counting, view: Snapshot) -> None:
    def flip_once(name: str, buffer: memoryview) -> None:
        buffer[len(buffer) // 2] ^= 1
        store.change = lambda name, buffer: None

    store.change = flip_once
    reader = CoalescingReader(view, store)
    assert contents(reader, view.files()) == expected(view)
    assert reader.stats()["healed"] == 1


def test_B3_a_damaged_file_is_left_out_and_logged(
    store: Counting, view: Snapshot, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = view.lookup(b"n007")
    [extent] = view.extents(damaged)

    def flip(name: str, buffer: memoryview) -> None:
        _, start, size = store.reads[-1]
        at = extent.offset - start
        if name.endswith(last) and 0 <= at < size:
            buffer[at] ^= 1

    last = object_of(view, extent.chunk)
    store.change = flip
    reader = CoalescingReader(view, store)
    with caplog.at_level(logging.ERROR):
        found = contents(reader, view.files())
    assert found == {entry: each for entry, each in expected(view).items() if entry != damaged}
    assert reader.stats()["damaged"] == 1
    assert "ds/n007" in caplog.text


def object_of(view: Snapshot, chunk: int) -> str:
    """The name of the object that holds a chunk."""
    return chunk_object(view.identity, view.chunk_ids[chunk])


def lose(store: Counting, lost: str) -> None:
    def missing(name: str, buffer: memoryview) -> None:
        if name == lost:
            raise ObjectMissing(f"no object {name}")

    store.change = missing


def test_only_files_of_a_lost_chunk_are_left_out(
    store: Counting, view: Snapshot, caplog: pytest.LogCaptureFixture
) -> None:
    reader = CoalescingReader(view, store)
    [extent] = view.extents(view.lookup(b"n007"))
    lost = object_of(view, extent.chunk)
    lose(store, lost)
    with caplog.at_level(logging.ERROR):
        found = contents(reader, view.files())
    inside = {
        entry
        for entry in expected(view)
        if any(part.chunk == extent.chunk for part in view.extents(entry))
    }
    assert 0 < len(inside) < len(expected(view))
    assert found.keys() >= expected(view).keys() - inside
    assert all(found[entry] == expected(view)[entry] for entry in found.keys() - inside)
    assert reader.stats()["lost"] == 1
    assert lost in caplog.text


def test_a_failing_store_raises_its_error(store: Counting, view: Snapshot) -> None:
    fault = Fault("read_into", error=ObjectStoreError("gone"))
    with FaultyStore(store, fault) as faulty, pytest.raises(ObjectStoreError):
        contents(CoalescingReader(view, faulty), view.files())


class Slow(ReadWrapper):
    """A store that takes 30 ms for a read, and counts the reads that wait at once."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.waiting = self.most = self.reads = 0
        self._lock = threading.Lock()

    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        with self._lock:
            self.waiting += 1
            self.reads += 1
            self.most = max(self.most, self.waiting)
        time.sleep(0.03)
        with self._lock:
            self.waiting -= 1
        self.inner.read_into(name, start, buffer)


def test_a_slow_store_is_asked_for_several_spans_at_once(store: Counting, view: Snapshot) -> None:
    """It is asked so once its reads were seen to be slow. The order of contents stays the same."""
    slow = Slow(store)
    reader = CoalescingReader(view, slow)
    files = view.files()
    few = files[files == view.lookup(b"small")]
    while not reader.is_slow:
        assert contents(reader, few) == {int(few[0]): FILES["small"]}
    before = slow.reads
    assert slow.most == 1
    assert contents(reader, files) == expected(view)
    assert slow.most >= 4  # of 14 spans; a busy machine starts threads late
    assert slow.reads - before == len(reader._plan(files).spans)


def test_announced_units_are_read_ahead_and_given_up_when_the_plan_changes(
    store: Counting, view: Snapshot
) -> None:
    slow = Slow(store)
    reader = CoalescingReader(view, slow)
    reader._speed.note(1.0)  # a slow store
    large, text, small = (np.array([view.lookup(name)]) for name in (b"large", b"text", b"small"))
    reader.prefetch([large, text])
    reader.prefetch([text, small])  # the plan has changed
    assert set(reader._in_flight) == {
        span for each in (text, small) for span in reader._plan(each).spans
    }
    wait_for_flights(reader)
    before = slow.reads
    for entry, name in ((text, "text"), (small, "small")):
        assert contents(reader, entry) == {int(entry[0]): FILES[name]}
    assert slow.reads == before
    assert not reader._in_flight


def all_read_ahead(slow: Slow, view: Snapshot) -> CoalescingReader:
    """A reader of a slow store that has read a unit of all files ahead."""
    reader = CoalescingReader(view, slow)
    reader._speed.note(1.0)  # a slow store
    reader.prefetch([view.files()])
    wait_for_flights(reader)
    return reader


def test_a_unit_that_loses_entries_is_not_read_again(store: Counting, view: Snapshot) -> None:
    """Somebody has read some of its files meanwhile. What is in flight has the others."""
    slow, whole = Slow(store), view.files()
    reader = all_read_ahead(slow, view)
    before = slow.reads
    for left in (whole[whole != whole[1]], whole[2:-1], whole[2:3]):
        reader.prefetch([left])
    found = contents(reader, whole[2:3])
    assert found == {int(whole[2]): expected(view)[int(whole[2])]}
    assert slow.reads == before
    assert not reader._in_flight


def test_a_file_is_taken_out_of_a_larger_read_that_is_under_way(
    store: Counting, view: Snapshot
) -> None:
    """It is wanted before the unit that has it. The unit's own turn comes later."""
    slow, whole = Slow(store), view.files()
    reader = all_read_ahead(slow, view)
    before = slow.reads
    some = np.array([view.lookup(name) for name in (b"n007", b"n011", b"small")])
    assert contents(reader, some) == {each: expected(view)[each] for each in some.tolist()}
    rest = np.setdiff1d(whole, some)
    reader.prefetch([rest])
    assert contents(reader, rest).keys() == expected(view).keys() - set(some.tolist())
    assert slow.reads == before
    assert not reader._in_flight


def test_what_is_asked_for_is_read_at_once_though_other_units_fill_the_memory(
    store: Counting, view: Snapshot
) -> None:
    slow = Slow(store)
    reader = CoalescingReader(view, slow, limits=ReadLimits(gap_bytes=0, ahead_bytes=30_000))
    reader._speed.note(1.0)  # a slow store
    files = view.files()
    sizes = view.columns.size[files]
    some, ahead = files[(sizes > 0) & (sizes < 2000)][::8], files[sizes >= 2000]
    reader.prefetch([ahead])
    wait_for_flights(reader)
    slow.most = 0
    assert len(contents(reader, some)) == len(some)
    assert slow.most >= len(some) // 2


def test_nothing_is_read_ahead_from_a_fast_store(store: Counting, view: Snapshot) -> None:
    reader = CoalescingReader(view, store)
    reader.prefetch([view.files()])
    assert contents(reader, view.files()) == expected(view)
    reader.prefetch([view.files()])
    assert reader._threads is None


class BatchingStore(ReadWrapper):
    """A store that takes many parts in one request, and records the requests."""

    batches_reads = True

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.requests: list[list[tuple[str, int, int]]] = []
        self.delay_s = 0.0
        self.waiting = self.most = 0
        self._lock = threading.Lock()

    def read_parts(self, parts: Sequence[tuple[str, int, int]]) -> Iterator[memoryview]:
        with self._lock:
            self.requests.append(list(parts))
            self.waiting += 1
            self.most = max(self.most, self.waiting)
        time.sleep(self.delay_s)
        with self._lock:
            self.waiting -= 1
        return super().read_parts(parts)


def test_a_batching_store_gets_one_request_for_each_unit(store: Counting, view: Snapshot) -> None:
    batching = BatchingStore(store)
    reader = CoalescingReader(view, batching)
    order = np.random.default_rng(1).permutation(view.files())
    for unit in np.array_split(order, 4):
        whole = contents(reader, unit)
        assert whole == {each: expected(view)[each] for each in whole}
    assert len(batching.requests) == 4
    assert contents(reader, view.files()) == expected(view)
    assert len(batching.requests) == 5
    assert reader._threads is None


def test_requests_keep_their_limits_and_several_are_in_flight(
    store: Counting, view: Snapshot
) -> None:
    batching = BatchingStore(store)
    batching.delay_s = 0.03
    limits = ReadLimits(batch_bytes=100_000, batch_parts=20, span_bytes=30_000)
    reader = CoalescingReader(view, batching, limits=limits)
    assert contents(reader, view.files()) == expected(view)
    assert batching.most > 2
    for parts in batching.requests:
        assert len(parts) <= 20
        assert len(parts) == 1 or sum(size for _, _, size in parts) <= 100_000
    assert not reader._in_flight


def test_announced_units_share_requests_to_a_batching_store(
    store: Counting, view: Snapshot
) -> None:
    """Each span is read once, also when the plan changes; spans that left the plan are given up."""
    batching = BatchingStore(store)
    reader = CoalescingReader(view, batching)
    small = np.random.default_rng(2).permutation(view.files())
    one, other, third, rest = small[:40], small[40:80], small[80:90], small[90:]
    reader.prefetch([one, other])
    wait_for_flights(reader)
    assert len(batching.requests) == 1
    assert len(contents(reader, one)) == len(one)
    reader.prefetch([other, third])
    wait_for_flights(reader)
    assert len(batching.requests) == 2
    assert len(contents(reader, other)) + len(contents(reader, third)) == 50
    assert len(batching.requests) == 2
    reader.prefetch([rest])
    reader.prefetch([one])
    assert set(reader._in_flight) == set(reader._plan(one).spans)
    assert len(contents(reader, one)) == len(one)
    assert not reader._in_flight


def test_a_unit_that_lost_entries_since_it_was_announced_is_not_read_again(
    store: Counting, view: Snapshot
) -> None:
    """Somebody else has read some of its files meanwhile, as it happens to nearly every unit where
    the dataset is larger than the memory."""
    batching = BatchingStore(store)
    reader = CoalescingReader(view, batching, limits=ReadLimits(batched_gap_bytes=0))
    apart = np.flatnonzero(view.columns.size < 2000)[20:220:2]  # each is a span by itself
    now, later = apart[:50], apart[50:]
    reader.prefetch([now, later])
    assert len(contents(reader, now)) == len(now)
    rest = np.delete(later, [3, 17])
    reader.prefetch([rest])
    assert len(contents(reader, rest)) == len(rest)
    wait_for_flights(reader)
    asked = [part for parts in batching.requests for part in parts]
    assert len(asked) == len(set(asked)) == len(apart)
    assert not reader._in_flight


def test_a_unit_that_stays_announced_is_planned_once(
    store: Counting, view: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = CoalescingReader(view, BatchingStore(store))
    looked: list[int] = []
    plan = reader._plan

    def counted(entries: npt.NDArray[np.int64]) -> object:
        looked.append(len(entries))
        return plan(entries)

    monkeypatch.setattr(reader, "_plan", counted)
    units = np.array_split(np.random.default_rng(3).permutation(view.files()), 12)
    for first in range(len(units)):
        reader.prefetch(units[first : first + 5])
        assert contents(reader, units[first])
    assert looked == [len(unit) for unit in units]


def test_reading_ahead_keeps_its_memory_limit(store: Counting, view: Snapshot) -> None:
    reader = CoalescingReader(view, BatchingStore(store), limits=ReadLimits(ahead_bytes=200_000))
    whole, draw = expected(view), np.random.default_rng(4)
    units = [draw.choice(view.files(), 12, replace=False) for _ in range(30)]
    most = 0
    for _ in range(60):
        some = [units[at] for at in draw.choice(len(units), 6)]
        reader.prefetch(some)
        in_flight_bytes = sum(size for _, _, size in reader._in_flight)
        most = max(most, in_flight_bytes)
        assert in_flight_bytes == reader._in_flight_bytes <= 200_000
        wanted = some[int(draw.integers(3))]  # not always the first
        there = {each: whole[each] for each in wanted.tolist() if each in whole}
        assert contents(reader, wanted) == there
    assert most > 100_000
    reader.prefetch([])
    assert (reader._in_flight, reader._in_flight_bytes) == ({}, 0)


def test_only_files_of_a_lost_chunk_are_left_out_of_a_request(
    store: Counting, view: Snapshot, caplog: pytest.LogCaptureFixture
) -> None:
    reader = CoalescingReader(view, BatchingStore(store))
    [extent] = view.extents(view.lookup(b"n007"))
    lost = object_of(view, extent.chunk)
    lose(store, lost)
    with caplog.at_level(logging.ERROR):
        found = contents(reader, view.files())
    outside = {
        entry
        for entry in expected(view)
        if all(part.chunk != extent.chunk for part in view.extents(entry))
    }
    assert outside <= set(found)
    assert len(outside) < len(expected(view))
    assert all(found[entry] == expected(view)[entry] for entry in outside)
    assert reader.stats()["lost"] >= 1
    assert lost in caplog.text


def test_damage_in_a_request_is_read_again_past_caches(store: Counting, view: Snapshot) -> None:
    again: list[str] = []

    class Damaging(BatchingStore):
        def read_parts(self, parts: Sequence[tuple[str, int, int]]) -> Iterator[memoryview]:
            for content in super().read_parts(parts):
                damaged = bytearray(content)
                damaged[-1] ^= 1
                yield memoryview(damaged)

        def read_uncached(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
            again.append(name)
            self.inner.read_into(name, start, buffer)

    reader = CoalescingReader(view, Damaging(store))
    assert contents(reader, view.files()) == expected(view)
    assert reader.stats()["healed"] == len(again) > 3


def test_costs_of_a_place_are_fitted_to_its_reads() -> None:
    """Latency 20 ms and 50 MB/s for each of four reads that are under way at once."""
    rates = ReadRates()
    for size in (100_000, 4_000_000, 800_000, 2_000_000) * 16:
        rates.observe(size, 0.02 + size / 50e6, 4)
    latency_s, transfer_s = rates.cost(8_000_000, 4_000_000)
    assert transfer_s == pytest.approx(8_000_000 / 200e6, rel=0.01)
    assert latency_s + transfer_s == pytest.approx(0.02 + 4_000_000 / 50e6, rel=0.01)
    assert rates.cost(0, 4_000_000) == (0.0, 0.0)


def test_reads_that_are_all_alike_cost_what_they_took() -> None:
    rates = ReadRates()
    for _ in range(50):
        rates.observe(100_000, 0.03)
    assert sum(rates.cost(100_000, 1 << 20)) == pytest.approx(0.03)


def test_costs_follow_a_store_that_becomes_slow(store: Counting, view: Snapshot) -> None:
    slow = Slow(store)
    reader = CoalescingReader(view, slow, limits=ReadLimits(slow_span_bytes=20_000))
    contents(reader, view.files())
    assert reader.is_slow
    latency_s, transfer_s = reader.read_costs([view.files()])[0]
    assert latency_s + transfer_s > 0.003
    assert reader.read_costs([view.files()[:0]]) == [(0.0, 0.0)]


class Placed(BatchingStore):
    """A store whose chunks are read by number, the even ones out of this process's memory, and the
    others from a node, which is slow."""

    def __init__(self, inner: ObjectStore, view: Snapshot) -> None:
        super().__init__(inner)
        self._view = view

    def chunk_reader(self, identity: UUID, version: int) -> "Placed":
        return self

    def places(self, chunks: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        return np.where(chunks % 2 == 0, IN_MEMORY, 7).astype(np.int32)

    def begin(self, parts: ChunkParts) -> Iterator[ReadGroup]:
        for memory in (1, 0):
            places = np.flatnonzero(parts[:, 0] % 2 != memory).tolist()
            if places:
                time.sleep(0.0 if memory else 0.03)
                yield ReadGroup(places, [self._part(*parts[at].tolist()) for at in places], False)

    def read_part(self, chunk: int, start: int, size: int) -> tuple[memoryview, bool]:
        return self._part(chunk, start, size), False

    def _part(self, chunk: int, start: int, size: int) -> memoryview:
        room = bytearray(size)
        name = chunk_object(self._view.identity, self._view.chunk_ids[chunk])
        self.inner.read_into(name, start, room)
        return memoryview(room).toreadonly()


def test_costs_are_predicted_by_where_chunks_are(store: Counting, view: Snapshot) -> None:
    reader = CoalescingReader(view, Placed(store, view))
    files = view.files()
    files = files[view.columns.size[files] > 0]
    is_here = view.chunk_of(files) % 2 == 0
    assert is_here.any()
    assert not is_here.all()
    for _ in range(6):
        assert contents(reader, files) == expected(view)
    here, elsewhere = reader.read_costs([files[is_here], files[~is_here]])
    assert here == (0.0, 0.0)
    assert sum(elsewhere) == pytest.approx(0.03, rel=0.4)
