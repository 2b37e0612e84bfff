"""Reads many entries of a dataset in few requests, checked, in the order of their chunks or as they
arrive.

It serves a mount's prefetch worker, which *pushes* contents into the kernel's page cache and keeps
none of them. The worker requests one list of entries at a time, a *unit*: the entries of one push.
It may announce the next units. A *span* is a range of a chunk that is read in one piece
(`fetching/coalesce.py`).

From a fast store (a folder in the page cache) spans are read one after the other into one buffer.
From a slow store several spans are read at once, and announced units are read ahead. From a store
that takes many reads in one request (`batches_reads`: a server, the cache of a task) whole batches
are requested, also ahead.

Every byte is checked against the checksum of its entry, unless the store has checked it; after a
mismatch the entry is read once more, past all caches. One thread at a time uses a reader; the
reader starts threads of its own.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from ...errors import CorruptError, ObjectMissing
from ...format.chunk import decode
from ...format.snapshot.layout import MANY_EXTENTS
from ...format.snapshot.reader import Extent, Snapshot
from ...storage.objects.store import IN_MEMORY, ObjectStore
from ..fetching.coalesce import ReadLimits
from ..fetching.read_plan import ReadPlan, Rows, SomeEntries, Span, plan_reads
from ..fetching.span_fetcher import Arrived, Contents, SpanFetcher

log = logging.getLogger("diesel.mount")


class ExtentBatch(NamedTuple):
    """Contents of extents: runs of bytes of a file, each in one chunk; most files are one extent.
    The contents may be used until the iterator gives the next batch."""

    entries: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    """The byte of its file at which each extent begins."""
    contents: Sequence[memoryview]


class BatchSource(Protocol):
    """Checked contents for a mount's prefetch worker."""

    def batches(self, entries: npt.NDArray[np.uint32], /) -> Iterator[ExtentBatch]:
        """The contents, batch by batch. Damaged extents are left out. Raises DieselError."""
        ...

    def prefetch(self, units: Sequence[npt.NDArray[np.uint32]], /) -> None:
        """Announce the lists that `batches` will probably be called with next, the soonest first,
        to be read ahead."""
        ...

    def read_costs(
        self, units: Sequence[npt.NDArray[np.uint32]], /
    ) -> Sequence[tuple[float, float]]:
        """Latency and transfer time of each of these lists of files, in seconds (for a mount's
        `prefetch/decisions.py`). Returns at once, and takes no account of reads under way."""
        ...

    @property
    def is_slow(self) -> bool:
        """Whether a read takes so long that reading ahead helps. True before the first read."""
        ...

    def stats(self) -> dict[str, int]: ...

    def close(self) -> None:
        """Stop reading ahead. Repeatable."""
        ...


@dataclass(slots=True)
class _AnnouncedUnit:
    """`is_begun`: whether all its spans are being read."""

    entries: frozenset[int]
    plan: ReadPlan
    is_begun: bool = False


class CoalescingReader:
    def __init__(
        self, snapshot: Snapshot, objects: ObjectStore, *, limits: ReadLimits | None = None
    ) -> None:
        self._snapshot = snapshot
        self._limits = ReadLimits() if limits is None else limits
        self._counts = Counter(
            dict.fromkeys(("fetches", "fetched_bytes", "healed", "damaged", "lost"), 0)
        )
        self._fetcher = SpanFetcher(snapshot, objects, self._limits, self._counts)
        self._units: dict[bytes, _AnnouncedUnit] = {}  # by the bytes of their entries

    def batches(self, entries: SomeEntries) -> Iterator[ExtentBatch]:
        """As `BatchSource.batches`; within a batch sorted by chunk and offset. If a `ChunkReader`
        reads from several nodes, each batch has contents from one of them.

        Entries that are damaged or have lost their chunk are logged, counted and left out. Raises
        ObjectStoreError if the store fails.
        """
        unit = self._units.get(entries.tobytes())
        plan = self._plan(entries) if unit is None else unit.plan
        try:
            yield from self._read(plan)
        except BaseException:
            self._give_up_unannounced(plan)
            raise

    def _give_up_unannounced(self, plan: ReadPlan) -> None:
        """Give up the spans in flight of a read that failed. Spans of announced units stay, so that
        a second try reads only the spans that have failed."""
        announced: set[Span] = set()
        for unit in self._units.values():
            unit.is_begun = False  # spans that have failed are begun again
            announced.update(unit.plan.spans)
        for span in plan.spans:
            if span not in announced:
                self._fetcher.give_up(span)

    def _read(self, plan: ReadPlan) -> Iterator[ExtentBatch]:
        if self._fetcher.batches_reads:
            yield from self._read_batched(plan)
            return
        for chunk, group in groupby(range(len(plan.spans)), lambda at: plan.spans[at][0]):
            numbers = list(group)
            if self._fetcher.reads_at_once and len(plan.spans) > numbers[0] + 1:
                # Perhaps only now: the first reads show that a store is slow.
                yield from self._read_at_once(plan, numbers[0])
                return
            spans = plan.spans[numbers[0] : numbers[-1] + 1]
            try:
                for number, read in zip(
                    numbers, self._fetcher.read_spans(chunk, spans), strict=True
                ):
                    yield self._checked(plan, number, read)
            except ObjectMissing as error:
                self._note_lost(error)

    def prefetch(self, units: Sequence[SomeEntries]) -> None:
        """As `BatchSource.prefetch`. Reads ahead if the store is slow or takes many reads in one
        request, up to `ReadLimits.ahead_bytes`. Gives up units of earlier calls that are not among
        these. Beyond the limit it begins no unit, but keeps those that are under way: the order of
        several streams' units changes from call to call."""
        if not (self.is_slow or self._fetcher.is_busy or self._fetcher.batches_reads):
            return
        before, self._units = self._units, {}
        ahead_bytes = 0
        still_wanted: set[Span] = set()  # by units that were not announced before
        for entries in units:
            key = entries.tobytes()
            unit = before.pop(key, None) or self._units.get(key)
            if unit is None:
                unit = self._narrowed(entries, before.values())
                still_wanted.update(() if unit is None else unit.plan.spans)
            is_far = ahead_bytes > self._limits.ahead_bytes
            if is_far and (unit is None or not self._is_under_way(unit)):
                continue
            if unit is None:
                unit = _AnnouncedUnit(frozenset(entries.tolist()), self._plan(entries))
                still_wanted.update(unit.plan.spans)
            ahead_bytes += unit.plan.bytes
            self._units[key] = unit
        for unit in before.values():
            # A unit may come again without some of its entries: its spans stay in flight
            for span in unit.plan.spans:
                if span not in still_wanted:
                    self._fetcher.give_up(span)
        self._begin_units([unit for unit in self._units.values() if not unit.is_begun])

    def read_costs(self, units: Sequence[SomeEntries]) -> list[tuple[float, float]]:
        """As `BatchSource.read_costs`. A chunk of unknown place counts as in the store."""
        if not units:
            return []
        columns = self._snapshot.columns
        entries = np.concatenate(units).astype(np.int64)
        unit = np.repeat(np.arange(len(units)), [len(each) for each in units])
        has_many = (columns.flags[entries] & MANY_EXTENTS) != 0
        sizes = np.where(has_many, columns.size[entries], columns.stored[entries])
        limits, batches = self._limits, self._fetcher.batches_reads
        span_bytes = limits.batch_bytes if batches else limits.slow_span_bytes
        chunks = self._snapshot.chunk_of(entries)
        places = np.where(chunks < 0, IN_MEMORY, self._fetcher.places(np.maximum(chunks, 0)))
        found = [(0.0, 0.0)] * len(units)
        for place in np.unique(places[places != IN_MEMORY]).tolist():
            costs, here = self._fetcher.costs_of(place), places == place
            sums = np.bincount(unit[here], sizes[here], len(units))
            for at in np.flatnonzero(sums).tolist():
                latency_s, transfer_s = costs.cost(int(sums[at]), span_bytes)
                found[at] = max(found[at][0], latency_s), found[at][1] + transfer_s
        return found

    def _narrowed(
        self, entries: SomeEntries, before: Iterable[_AnnouncedUnit]
    ) -> _AnnouncedUnit | None:
        """If `entries` are the rest of a unit of `before` that is under way (other readers have
        read the others), that unit with these only. Its spans in flight are used, although they
        bring too much."""
        wanted = frozenset(entries.tolist())
        for other in before:
            if wanted <= other.entries and self._is_under_way(other):
                return _AnnouncedUnit(wanted, other.plan.narrowed(entries))
        return None

    def _is_under_way(self, unit: _AnnouncedUnit) -> bool:
        return self._fetcher.has_any_in_flight(unit.plan.spans)

    @property
    def is_slow(self) -> bool:
        return self._fetcher.is_slow

    def _begin_units(self, units: Sequence[_AnnouncedUnit]) -> None:
        spans = [span for unit in units for span in unit.plan.spans]
        begun = self._fetcher.begin(spans)
        for unit in units:
            begun -= len(unit.plan.spans)
            unit.is_begun = begun >= 0

    def _read_at_once(self, plan: ReadPlan, first: int) -> Iterator[ExtentBatch]:
        """Read from a slow store, from the span number `first` on. Small spans are passed on in one
        batch, since each batch costs the caller a fixed time."""
        within = self._fetcher.within_flights(plan.spans[first:])
        self._fetcher.begin(
            [span for span in plan.spans[first:] if span not in within], are_due=True
        )
        arrived: Contents = {}
        numbers: list[int] = []  # of the spans in `arrived`
        size = 0
        for number, span in enumerate(plan.spans[first:], first):
            try:
                if span in within:
                    arrived[span] = self._fetcher.read_within(span, within[span])
                elif span not in arrived:  # else it occurs twice
                    arrived[span] = self._fetcher.read_kept(span)
            except ObjectMissing as error:
                self._note_lost(error)
                continue
            numbers.append(number)
            size += span[2]
            if size >= self._limits.span_bytes:
                yield from self._kept_batches(plan, numbers, arrived)
                arrived, numbers, size = {}, [], 0
        if numbers:
            yield from self._kept_batches(plan, numbers, arrived)

    def _kept_batches(
        self, plan: ReadPlan, numbers: Sequence[int], arrived: Contents
    ) -> Iterator[ExtentBatch]:
        """The batches of spans that `read_kept` has returned."""
        for span in arrived:
            self._fetcher.give_up(span)
        yield from self._batches_of(plan, numbers, Arrived(arrived, is_checked=False))

    def _read_batched(self, plan: ReadPlan) -> Iterator[ExtentBatch]:
        """Read from a store that takes many reads in one request; a batch may have extents of
        several chunks."""
        numbers: dict[Span, list[int]] = {}
        for number, span in enumerate(plan.spans):
            numbers.setdefault(span, []).append(number)
        within = self._fetcher.within_flights(numbers)
        requests = list(self._fetcher.requests([span for span in numbers if span not in within]))
        if len(requests) > 1:
            self._fetcher.begin([span for some in requests for span in some], are_due=True)
        for spans in requests:
            left = dict.fromkeys(spans)  # those that have not arrived
            try:
                for some in self._fetcher.arriving(spans):
                    here = [span for span in some.contents if span in left]
                    for span in here:
                        del left[span]
                    yield from self._batches_of(plan, _joined(numbers, here), some)
            except ObjectMissing:  # read span by span, to find those whose chunks are lost
                for number in _joined(numbers, left):
                    try:
                        yield self._checked(plan, number, self._fetcher.read(plan.spans[number]))
                    except ObjectMissing as error:
                        self._note_lost(error)
        for span, larger in within.items():
            try:
                content = self._fetcher.read_within(span, larger)
            except ObjectMissing as error:
                self._note_lost(error)
                continue
            arrived = Arrived({span: content}, is_checked=False)
            yield from self._batches_of(plan, numbers[span], arrived)

    def _batches_of(
        self, plan: ReadPlan, numbers: Sequence[int], arrived: Arrived
    ) -> Iterator[ExtentBatch]:
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

    def _plan(self, entries: SomeEntries) -> ReadPlan:
        limits, fetcher = self._limits, self._fetcher
        return plan_reads(
            self._snapshot,
            entries,
            gap_bytes=limits.batched_gap_bytes if fetcher.batches_reads else limits.gap_bytes,
            span_bytes=limits.slow_span_bytes if fetcher.reads_at_once else limits.span_bytes,
            sparse_gap_bytes=limits.sparse_gap_bytes if fetcher.reads_at_once else None,
        )

    def close(self) -> None:
        self._fetcher.close()

    def stats(self) -> dict[str, int]:
        return dict(self._counts)

    def _checked(self, plan: ReadPlan, number: int, read: memoryview) -> ExtentBatch:
        return self._checked_contents(plan.rows_of(number), [*plan.contents(number, read)])

    def _checked_contents(
        self, rows: Rows, contents: list[memoryview], *, is_checked: bool = False
    ) -> ExtentBatch:
        """Check and decode stored bytes; may change `contents`. `is_checked`: their checksums were
        found right before."""
        is_right = is_checked or (
            list(map(xxh3_64_intdigest, contents)) == rows["checksum"].tolist()
        )
        if is_right and not rows["codec"].any():
            return ExtentBatch(rows["entry"], rows["start"], contents)
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
                    _, contents[at] = self._fetcher.source.repair(int(row["entry"]), extent)
            except CorruptError as error:
                good[at] = False
                log.error("%s", error.message)
        kept = [content for content, is_good in zip(contents, good, strict=True) if is_good]
        return ExtentBatch(rows["entry"][good], rows["start"][good], kept)


def _joined(numbers: Mapping[Span, Sequence[int]], spans: Iterable[Span]) -> list[int]:
    """The numbers of these spans, ascending."""
    return sorted(number for span in spans for number in numbers[span])
