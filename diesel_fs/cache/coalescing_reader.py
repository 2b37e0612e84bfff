"""Reads many entries of a dataset in few requests, checked, in the order of their chunks or as they
arrive.

The prefetch worker of a mount uses this: it hands contents to the kernel and keeps none of them
(`EntryReader` in `reader.py` keeps chunks in memory instead). The caller asks for one list of
entries at a time, and may announce the lists that will come next. What it announces is called a
*unit* here: the entries of one push.

Stores differ in what a read costs, so there are three ways to read. From a fast store (a folder in
the page cache) spans are read one after the other into one buffer. From a slow store several spans
are read at once, and announced units are read ahead. A store that takes many reads in one request
(`batches_reads`: a server, the cache of a task) is asked for whole batches, also ahead. In both
cases a `ChunkReader` has the requests under way: that of the task's cache, else `StoredParts`.
`coalesce.py` decides which extents are merged to one span.

Every byte is checked against the checksum of its entry, unless the store has done so; after a
mismatch the entry is read once more, past all caches. One thread at a time uses a reader; it starts
threads of its own.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from ..errors import CorruptError, DieselError, ObjectMissing
from ..format.chunk import decode
from ..format.entries import Kind
from ..format.snapshot.layout import CODEC_SHIFT, MANY_EXTENTS, kinds
from ..format.snapshot.reader import Extent, Snapshot
from ..storage.objects.store import (
    IN_MEMORY,
    IN_STORE,
    ChunkReader,
    ObjectStore,
    batched_parts,
)
from .coalesce import ChunkSource, ReadLimits, merge_spans
from .costs import ReadCosts
from .stored_parts import StoredParts

log = logging.getLogger("diesel.mount")

ARRIVED_S_MIN = 0.0002
"""Contents that were asked for ahead and come in less than this have been here for an unknown time;
their read is not measured."""

_Span: TypeAlias = tuple[int, int, int]
"""A range of a chunk that is read in one piece: the chunk's number, where it starts, its bytes."""

_SomeEntries = npt.NDArray[np.int64] | npt.NDArray[np.uint32]


class Batch(NamedTuple):
    """Contents of n extents. They may be used until the next batch is asked for."""

    entries: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    """Where in its file each extent begins, in bytes."""
    contents: Sequence[memoryview]


class BatchSource(Protocol):
    """Checked contents for the prefetch worker of a mount."""

    def batches(self, entries: npt.NDArray[np.uint32], /) -> Iterator[Batch]:
        """All parts of these files, without those that are damaged. Raises DieselError."""
        ...

    def prefetch(self, units: Sequence[npt.NDArray[np.uint32]], /) -> None:
        """Reads ahead: these files will probably be asked for next, the soonest first."""
        ...

    def read_costs(
        self, units: Sequence[npt.NDArray[np.uint32]], /
    ) -> Sequence[tuple[float, float]]:
        """What it costs to read each of these lists of files: the latency and the transfer, in
        seconds (`prefetch/decisions.py`). Returns at once, and does not look at what is being read
        ahead."""
        ...

    @property
    def is_slow(self) -> bool:
        """Whether reads of the store take long, as far as is known."""
        ...

    def stats(self) -> dict[str, int]:
        """Figures of what was read."""
        ...

    def close(self) -> None:
        """Stops reading ahead. May be called again."""
        ...


_Contents: TypeAlias = dict[_Span, memoryview]


class _Arrived(NamedTuple):
    """Stored bytes that have arrived together."""

    contents: _Contents
    is_checked: bool
    """Whether those of each extent have been checked against its checksum."""


class _Asked:
    """Spans that a `ChunkReader` was asked for in one request, and their contents, which are taken
    in the thread that wants them."""

    def __init__(
        self, spans: Sequence[_Span], reader: ChunkReader, note: Callable[[int, int, float], None]
    ) -> None:
        """`note` is told of contents that were waited for: from which place, how many bytes, and
        when they were asked for."""
        self._spans = spans
        self._note = note
        self._asked_s = time.monotonic()
        parts = np.array(spans, np.uint32)
        self._places = reader.places(parts[:, 0].astype(np.int64))
        self.bytes = int(parts[:, 2].sum(dtype=np.int64))
        self._reading = reader.begin(parts)
        self._arrived: list[_Arrived] = []
        self._error: DieselError | None = None

    def arriving(self) -> Iterator[_Arrived]:
        """The contents, group by group; those that have arrived before come first. Raises what
        reading raises, at each call: several units may share this request."""
        yield from self._arrived
        while self._error is None:
            wait_from_s = time.monotonic()
            try:
                group = next(self._reading)
            except StopIteration:
                return
            except DieselError as error:
                self._error = error
                break
            if time.monotonic() - wait_from_s >= ARRIVED_S_MIN and group.places:
                place = int(self._places[group.places[0]])
                self._note(place, sum(map(len, group.contents)), self._asked_s)
            spans = map(self._spans.__getitem__, group.places)
            contents = dict(zip(spans, group.contents, strict=True))
            self._arrived.append(_Arrived(contents, group.is_checked))
            yield self._arrived[-1]
        raise self._error.with_traceback(None)

    def result(self) -> _Contents:
        """Wait for all of the contents. Raises what reading raises."""
        return {span: each for some in self.arriving() for span, each in some.contents.items()}

    def give_up(self) -> None:
        """Nobody wants the contents any more. What has not been asked for is not."""
        close = getattr(self._reading, "close", None)
        if close is not None:
            close()


@dataclass(slots=True)
class _InFlight:
    """Spans that are being read in one request, and how many of them are still wanted."""

    contents: _Asked
    wanted: int


_ROW = np.dtype([(name, "<u8" if name == "checksum" else "<i8")
                 for name in ("entry", *Extent._fields)])  # fmt: skip
_Rows = npt.NDArray[np.void]


class _ReadPlan(NamedTuple):
    """Extents sorted by chunk and offset, and the spans that they are read in."""

    rows: _Rows
    cuts: list[int]
    """Where in `rows` the extents of each span begin, and at last the number of rows."""
    spans: list[_Span]
    bytes: int
    """Of all spans."""

    def rows_of(self, number: int) -> _Rows:
        """The extents of one span."""
        return self.rows[self.cuts[number] : self.cuts[number + 1]]

    def rows_of_some(self, numbers: Sequence[int]) -> _Rows:
        """The extents of these spans, in this order."""
        if numbers[-1] - numbers[0] == len(numbers) - 1:  # they are ascending
            return self.rows[self.cuts[numbers[0]] : self.cuts[numbers[-1] + 1]]
        cuts, some = np.array(self.cuts), np.array(numbers)
        counts = cuts[some + 1] - cuts[some]
        before = np.cumsum(counts) - counts
        rows: _Rows = self.rows[np.repeat(cuts[some] - before, counts) + np.arange(counts.sum())]
        return rows

    def contents(self, number: int, read: memoryview) -> Sequence[memoryview]:
        """The stored bytes of each extent of a span, of which `read` is all."""
        rows = self.rows_of(number)
        if len(rows) == 1 and rows["stored"][0] == len(read):
            return (read,)
        first = rows["offset"] - self.spans[number][1]
        places = zip(first.tolist(), (first + rows["stored"]).tolist(), strict=True)
        return [read[begin:end] for begin, end in places]

    def narrowed(self, entries: _SomeEntries) -> "_ReadPlan":
        """The same spans for some of the entries; without spans that have none of them."""
        is_wanted = np.isin(self.rows["entry"], entries)
        counts = np.add.reduceat(is_wanted.astype(np.int64), self.cuts[:-1])
        spans = [span for span, count in zip(self.spans, counts.tolist(), strict=True) if count]
        cuts = [0, *np.cumsum(counts[counts > 0]).tolist()]
        return _ReadPlan(self.rows[is_wanted], cuts, spans, sum(size for *_, size in spans))


@dataclass(slots=True)
class _AnnouncedUnit:
    """Entries that `batches` will be asked for, and whether all their spans are being read."""

    entries: frozenset[int]
    plan: _ReadPlan
    is_begun: bool = False


class CoalescingReader:
    """Reads entries of one snapshot from one object store (see the module)."""

    def __init__(
        self, snapshot: Snapshot, objects: ObjectStore, *, limits: ReadLimits | None = None
    ) -> None:
        self._snapshot = snapshot
        self._reads = objects.fast_reads
        self._limits = ReadLimits() if limits is None else limits
        self._counts = Counter(
            dict.fromkeys(("fetches", "fetched_bytes", "healed", "damaged", "lost"), 0)
        )
        self._source = ChunkSource(snapshot, objects, self._counts)
        self._stored = StoredParts(snapshot, objects)
        self._chunks: ChunkReader = (
            self._reads.chunk_reader(snapshot.identity, snapshot.version) or self._stored
        )
        self._costs = {IN_STORE: self._stored.costs}  # by place
        self._arrived_s = 0.0  # when contents that were waited for arrived last
        # One buffer is kept: new memory costs as much as reading into it.
        self._buffer = np.empty(self._limits.span_bytes, np.uint8).data
        self._in_flight: dict[_Span, _InFlight] = {}
        self._in_flight_bytes = 0
        self._units: dict[bytes, _AnnouncedUnit] = {}  # by the bytes of their entries

    def batches(self, entries: _SomeEntries) -> Iterator[Batch]:
        """The contents of these files; within a batch they are sorted by chunk and place in it.
        Where a `ChunkReader` asks several nodes, a batch has what one of them has sent.

        Entries that are damaged or whose chunk is lost are logged, counted and left out. Raises
        ObjectStoreError where the store fails.
        """
        unit = self._units.get(entries.tobytes())
        plan = self._plan(entries) if unit is None else unit.plan
        if self._reads.batches_reads:
            yield from self._read_batched(plan)
            return
        for chunk, group in groupby(range(len(plan.spans)), lambda at: plan.spans[at][0]):
            numbers = list(group)
            if self.is_slow and len(plan.spans) > numbers[0] + 1:
                # Perhaps only now: the first reads show that a store is slow.
                yield from self._read_at_once(plan, numbers[0])
                return
            spans = plan.spans[numbers[0] : numbers[-1] + 1]
            try:
                for number, read in zip(numbers, self._read_spans(chunk, spans), strict=True):
                    yield self._checked(plan, number, read)
            except ObjectMissing as error:
                self._note_lost(error)

    def prefetch(self, units: Sequence[_SomeEntries]) -> None:
        """Announce the units that `batches` will be asked for next, the soonest first.

        Begins to read them where the store is slow or takes many reads in one request, as far as
        memory for that goes. Units of earlier calls that are not among these are given up.
        """
        if not (self.is_slow or self._in_flight or self._reads.batches_reads):
            return
        before, self._units = self._units, {}
        ahead_bytes = 0
        still_wanted: set[_Span] = set()  # by units that were not announced before
        for entries in units:
            if ahead_bytes > self._limits.ahead_bytes:
                break
            key = entries.tobytes()
            unit = before.pop(key, None) or self._units.get(key)
            if unit is None:
                unit = self._announced(entries, before.values())
                still_wanted.update(unit.plan.spans)
            ahead_bytes += unit.plan.bytes
            self._units[key] = unit
        for unit in before.values():
            # What is in flight for a unit that has lost some entries since stays.
            for span in unit.plan.spans:
                flight = None if span in still_wanted else self._take(span)
                if flight is not None and not flight.wanted:
                    flight.contents.give_up()
        self._begin_units([unit for unit in self._units.values() if not unit.is_begun])

    def read_costs(self, units: Sequence[_SomeEntries]) -> list[tuple[float, float]]:
        """What it costs to read each of these lists of files, by where their chunks are: the
        latency and the transfer, in seconds. A chunk whose place is unknown counts as in the
        store."""
        return [self._read_cost(unit) for unit in units]

    def _read_cost(self, entries: _SomeEntries) -> tuple[float, float]:
        columns = self._snapshot.columns
        has_many = (columns.flags[entries] & MANY_EXTENTS) != 0
        sizes = np.where(has_many, columns.size[entries], columns.stored[entries])
        limits, batches = self._limits, self._reads.batches_reads
        span_bytes = limits.batch_bytes if batches else limits.slow_span_bytes
        chunks = self._snapshot.chunk_of(np.asarray(entries, np.int64))
        places = np.where(chunks < 0, IN_MEMORY, self._chunks.places(np.maximum(chunks, 0)))
        latency_s = transfer_s = 0.0
        for place in np.unique(places).tolist():
            if place != IN_MEMORY:
                size = int(sizes[places == place].sum(dtype=np.int64))
                latency, transfer = self._costs_of(place).cost(size, span_bytes)
                latency_s, transfer_s = max(latency_s, latency), transfer_s + transfer
        return latency_s, transfer_s

    def _costs_of(self, place: int) -> ReadCosts:
        return self._costs.setdefault(place, ReadCosts())

    def _note_asked(self, place: int, size: int, asked_s: float) -> None:
        """Contents that were asked for at a time have just arrived from a node. Those of several
        requests come one after the other."""
        now_s = time.monotonic()
        if self._chunks is not self._stored:  # which observes by itself
            self._costs_of(place).observe(size, now_s - max(asked_s, self._arrived_s))
        self._arrived_s = now_s

    def _announced(self, entries: _SomeEntries, before: Iterable[_AnnouncedUnit]) -> _AnnouncedUnit:
        """A unit that is new. One that was announced before may have lost some entries, as somebody
        has read them: what is in flight of it is used, though it brings too much."""
        wanted = frozenset(entries.tolist())
        for other in before:
            if wanted <= other.entries and not self._in_flight.keys().isdisjoint(other.plan.spans):
                return _AnnouncedUnit(wanted, other.plan.narrowed(entries))
        return _AnnouncedUnit(wanted, self._plan(entries))

    @property
    def is_slow(self) -> bool:
        """Whether reads of the store take long, as far as is known."""
        return not self._reads.batches_reads and self._stored.costs.is_slow

    def _begin_units(self, units: Sequence[_AnnouncedUnit]) -> None:
        """Begin to read these units, the first before the others, as far as there is room."""
        spans = [span for unit in units for span in unit.plan.spans]
        begun = self._begin(spans)
        for unit in units:
            begun -= len(unit.plan.spans)
            unit.is_begun = begun >= 0

    def _begin(self, spans: Sequence[_Span], *, are_due: bool = False) -> int:
        """Begin to read the first of these spans that there is room for, and say how many. Those
        that are due, as they have been asked for, get room beside what was announced."""
        room_bytes = self._limits.ahead_bytes * (1 + are_due)
        wanted: dict[_Span, None] = {}
        begun = 0
        for span in spans:
            if span not in self._in_flight and span not in wanted:
                if self._in_flight_bytes + span[2] > room_bytes:
                    break
                wanted[span] = None
                self._in_flight_bytes += span[2]
            begun += 1
        for group in self._requests([*wanted]):
            self._in_flight.update(dict.fromkeys(group, _InFlight(self._start(group), len(group))))
        return begun

    def _start(self, spans: Sequence[_Span]) -> _Asked:
        """Begin to read the spans of one request."""
        asked = _Asked(spans, self._chunks, self._note_asked)
        self._counts["fetches"] += 1
        self._counts["fetched_bytes"] += asked.bytes
        return asked

    def _requests(self, spans: Sequence[_Span]) -> Iterator[Sequence[_Span]]:
        """The spans in their order, as many together as one request to the store may have."""
        if self._reads.batches_reads:
            return batched_parts(spans, self._limits.batch_parts, self._limits.batch_bytes)
        return ([span] for span in spans)

    def _read_at_once(self, plan: _ReadPlan, first: int) -> Iterator[Batch]:
        """As `batches`, of the spans from a number on, from a slow store: several are read at once,
        and small ones are passed on together, since each batch costs the caller a fixed time."""
        within = self._within_flights(plan.spans[first:])
        self._begin([span for span in plan.spans[first:] if span not in within], are_due=True)
        arrived: _Contents = {}
        numbers: list[int] = []  # of those that have arrived
        size = 0
        for number, span in enumerate(plan.spans[first:], first):
            try:
                if span in within:
                    arrived[span] = self._read_within(span, within[span])
                elif span not in arrived:  # else it occurs twice
                    arrived[span] = self._read_one(span)
            except ObjectMissing as error:
                self._note_lost(error)
                continue
            numbers.append(number)
            size += span[2]
            if size >= self._limits.span_bytes:
                yield from self._batches_of(plan, numbers, _Arrived(arrived, is_checked=False))
                arrived, numbers, size = {}, [], 0
        if numbers:
            yield from self._batches_of(plan, numbers, _Arrived(arrived, is_checked=False))

    def _within_flights(self, spans: Sequence[_Span]) -> dict[_Span, _Span]:
        """Those of the spans that are parts of larger ones in flight, and these."""
        by_chunk: dict[int, list[_Span]] = {}
        for each in self._in_flight:
            by_chunk.setdefault(each[0], []).append(each)
        found: dict[_Span, _Span] = {}
        for span in spans:
            chunk, start, size = span
            for larger in by_chunk.get(chunk, ()):
                is_part = larger[1] <= start and start + size <= larger[1] + larger[2]
                if is_part and larger != span:
                    found[span] = larger
        return found

    def _read_within(self, span: _Span, larger: _Span) -> memoryview:
        """The stored bytes of a span out of a larger one in flight, which goes on for its unit."""
        start = span[1] - larger[1]
        return self._result(self._in_flight[larger], larger)[start : start + span[2]]

    def _read_one(self, span: _Span) -> memoryview:
        """The stored bytes of a span, which may be in flight, in memory of their own."""
        flight = self._take(span)
        return self._read(span) if flight is None else self._result(flight, span)

    def _result(self, flight: _InFlight, span: _Span) -> memoryview:
        """The stored bytes of a span in flight. Raises as `ChunkSource.read`."""
        try:
            return flight.contents.result()[span]
        except ObjectMissing as error:
            raise self._source.lost_chunk_error(span[0], error) from error

    def _read_batched(self, plan: _ReadPlan) -> Iterator[Batch]:
        """As `batches`, from a store that takes many reads in one request; a batch may have extents
        of several chunks."""
        requests = list(self._requests(plan.spans))
        if len(requests) > 1:
            self._begin(plan.spans)
        start = 0  # the number of the request's first span
        for spans in requests:
            left: dict[_Span, list[int]] = {}  # the numbers of those that have not arrived
            for number, span in enumerate(spans, start):
                left.setdefault(span, []).append(number)
            try:
                for some in self._arriving([*left]):
                    here = (number for span in some.contents for number in left.pop(span, ()))
                    yield from self._batches_of(plan, sorted(here), some)
            except ObjectMissing:  # a span each
                for number in sorted(chain.from_iterable(left.values())):
                    try:
                        yield self._checked(plan, number, self._read(plan.spans[number]))
                    except ObjectMissing as error:
                        self._note_lost(error)
            start += len(spans)

    def _batches_of(
        self, plan: _ReadPlan, numbers: Sequence[int], arrived: _Arrived
    ) -> Iterator[Batch]:
        """The batches of spans that have arrived, given by their numbers, ascending."""
        found = arrived.contents
        first, size = 0, 0
        for at, number in enumerate(numbers):
            size += plan.spans[number][2]
            if size >= self._limits.span_bytes or at + 1 == len(numbers):
                some = numbers[first : at + 1]
                contents = [
                    content
                    for each in some
                    for content in plan.contents(each, found[plan.spans[each]])
                ]
                rows = plan.rows_of_some(some)
                yield self._checked_contents(rows, contents, is_checked=arrived.is_checked)
                first, size = at + 1, 0

    def _note_lost(self, error: ObjectMissing) -> None:
        self._counts["lost"] += 1
        log.error("%s", error.message)

    def _arriving(self, spans: Sequence[_Span]) -> Iterator[_Arrived]:
        """The stored bytes of these spans as they arrive, perhaps with others. Some of them may be
        in flight."""
        flights = {span: self._take(span) for span in spans}  # all, also where the first fails
        begun = {id(each.contents): each.contents for each in flights.values() if each is not None}
        missing = [span for span, flight in flights.items() if flight is None]
        begun |= {id(asked): asked for asked in map(self._start, self._requests(missing))}
        for asked in begun.values():
            yield from asked.arriving()

    def _take(self, span: _Span) -> _InFlight | None:
        """The read that brings a span, where one is in flight; the span is no longer counted."""
        flight = self._in_flight.pop(span, None)
        if flight is not None:
            flight.wanted -= 1
            self._in_flight_bytes -= span[2]
        return flight

    def _plan(self, entries: _SomeEntries) -> _ReadPlan:
        """The extents of these files, and the spans to read them in."""
        rows = self._rows(np.asarray(entries, np.int64))
        rows = rows[np.lexsort((rows["offset"], rows["chunk"]))]
        starts, ends = rows["offset"].copy(), rows["offset"] + rows["stored"]
        limits, batches = self._limits, self._reads.batches_reads
        cuts = merge_spans(
            rows["chunk"],
            starts,
            ends,
            gap_bytes=limits.batched_gap_bytes if batches else limits.gap_bytes,
            span_bytes=limits.slow_span_bytes
            if self.is_slow and not batches
            else limits.span_bytes,
        )
        firsts = np.array(cuts[:-1], np.int64)
        sizes = np.maximum.reduceat(ends, firsts) - starts[firsts] if len(rows) else firsts
        spans = zip(
            rows["chunk"][firsts].tolist(), starts[firsts].tolist(), sizes.tolist(), strict=True
        )
        return _ReadPlan(rows, cuts, list(spans), int(sizes.sum()))

    def _read_spans(self, chunk: int, spans: Sequence[_Span]) -> Iterator[memoryview]:
        """The stored bytes of spans of one chunk; each may be used until the next is asked for."""
        if self._in_flight.keys().isdisjoint(spans):
            largest = max(size for _, _, size in spans)
            if largest > len(self._buffer):
                self._buffer = np.empty(largest, np.uint8).data
            ranges = [(begin, size) for _, begin, size in spans]
            found = self._reads.read_ranges(self._source.name(chunk), ranges, self._buffer)
            for _, _, size in spans:
                start_s = time.monotonic()
                try:
                    read = next(found)
                except ObjectMissing as error:
                    raise self._source.lost_chunk_error(chunk, error) from error
                self._stored.costs.observe(size, time.monotonic() - start_s)
                self._counts["fetches"] += 1
                self._counts["fetched_bytes"] += size
                yield read
            return
        yield from map(self._read_one, spans)

    def _read(self, span: _Span) -> memoryview:
        """The stored bytes of a span, in memory of their own."""
        start_s = time.monotonic()
        try:
            return self._source.read(*span)
        finally:
            self._stored.costs.observe(span[2], time.monotonic() - start_s)

    def close(self) -> None:
        """Stop reading ahead. Repeatable."""
        self._stored.close()

    def stats(self) -> dict[str, int]:
        """Counts since the reader was made."""
        return dict(self._counts)

    def _rows(self, entries: npt.NDArray[np.int64]) -> _Rows:
        """The extents of these entries, as rows; entries without content have none."""
        columns = self._snapshot.columns
        flags = columns.flags[entries]
        many = (flags & MANY_EXTENTS) != 0
        plain = entries[~many & (columns.stored[entries] > 0) & (kinds(flags) == Kind.FILE)]
        rows = np.zeros(len(plain), _ROW)
        rows["entry"] = plain
        for name in ("chunk", "offset", "stored", "checksum", "size"):
            rows[name] = getattr(columns, name)[plain]
        rows["codec"] = columns.flags[plain] >> CODEC_SHIFT & 0xFF
        if not many.any():
            return rows
        parts = [(i, each) for i in entries[many].tolist() for each in self._snapshot.extents(i)]
        more = np.zeros(len(parts), _ROW)
        more["entry"] = [entry for entry, _ in parts]
        for name in Extent._fields:
            more[name] = [getattr(extent, name) for _, extent in parts]
        return np.concatenate((rows, more))

    def _checked(self, plan: _ReadPlan, number: int, read: memoryview) -> Batch:
        """The contents of the extents of one span, whose stored bytes were `read`."""
        return self._checked_contents(plan.rows_of(number), [*plan.contents(number, read)])

    def _checked_contents(
        self, rows: _Rows, contents: list[memoryview], *, is_checked: bool = False
    ) -> Batch:
        """The contents of these extents, out of their stored bytes."""
        is_right = is_checked or (
            list(map(xxh3_64_intdigest, contents)) == rows["checksum"].tolist()
        )
        if is_right and not rows["codec"].any():
            return Batch(rows["entry"], rows["start"], contents)
        good = np.ones(len(rows), np.bool_)
        for at in range(len(rows)):
            row = rows[at]
            try:
                try:
                    contents[at] = decode(
                        contents[at], int(row["codec"]), int(row["size"]), int(row["checksum"])
                    )
                except CorruptError:
                    extent = Extent(*(int(row[name]) for name in Extent._fields))
                    _, contents[at] = self._source.repair(int(row["entry"]), extent)
            except CorruptError as error:
                good[at] = False
                log.error("%s", error.message)
        kept = [content for content, is_good in zip(contents, good, strict=True) if is_good]
        return Batch(rows["entry"][good], rows["start"][good], kept)
