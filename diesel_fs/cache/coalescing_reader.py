"""The stored bytes of many entries, checked, in the order in which they lie in their chunks.

For whoever passes contents on and keeps none: the helper of a mount, which makes them resident.
Owned here: which parts of a chunk are read in one piece, how many at once, and that every byte is
checked against its checksum (a mismatch is read again once). Not owned: a memory of chunks
(`store.py` has one). One thread at a time.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from ..errors import CorruptError, ObjectMissing
from ..format.chunk import decode
from ..format.chunk_id import chunk_id_text
from ..format.entries import Kind
from ..format.object_names import chunk_object
from ..format.snapshot.layout import CODEC_SHIFT, MANY_EXTENTS, kinds
from ..format.snapshot.reader import Snapshot
from ..names import shown
from ..storage.objects.store import ObjectStore

log = logging.getLogger("diesel.mount")

GAP_BYTES_MAX = 64 << 10
"""What lies between two wanted entries is read along where it is less: a read of its own costs as
much as 64 KiB on a local disk, and far more on an object store."""

SPAN_BYTES = 512 << 10
"""What is read in one piece, so that it is still in the processor's own cache when it is checked
and passed on: 110 KiB cost 8 us then, and 25 us in pieces of 4 MiB. A larger extent is a piece."""

SLOW_SPAN_BYTES = 8 << 20
"""The same where each piece is a request to a store that takes its time."""

SLOW_READ_S = 0.003
"""A store that takes longer to answer is asked for several pieces at once. One that does not is
not: reading 4 MiB from the page cache takes 1 ms, and threads that take turns with ours more."""

READS_AVERAGED = 8
FETCH_THREADS = 8
AHEAD_BYTES_MAX = 32 << 20

JOINED_GAP_BYTES = 4 << 10
"""As `GAP_BYTES_MAX`, where many pieces are asked for in one request: one more costs 3 us there."""

BATCH_BYTES_MAX = 8 << 20
BATCH_PARTS_MAX = 512
"""What is asked for in one request, where the store takes many: that costs what some hundred
kilobytes do, and the first piece is not to wait for more than a few milliseconds."""

_Span: TypeAlias = tuple[int, int, int]

_SomeEntries = npt.NDArray[np.int64] | npt.NDArray[np.uint32]


class Batch(NamedTuple):
    """Parts of files, each held by one chunk: n of each. Good until the next batch is asked for."""

    entries: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    """Where in its file each part begins, in bytes."""
    contents: Sequence[memoryview]


@dataclass(slots=True)
class _InFlight:
    """Pieces that are being read in one request, and how many of them are still wanted."""

    contents: Future[dict[_Span, memoryview]]
    wanted: int


_FIELDS = ("chunk", "offset", "stored", "codec", "checksum", "start", "size")
_ROW = np.dtype([("entry", "<i8"), *((name, "<i8") for name in _FIELDS if name != "checksum"),
                 ("checksum", "<u8")])  # fmt: skip
_Rows = npt.NDArray[np.void]


class _Parts(NamedTuple):
    """Extents by chunk and place in it, and the parts of them that are read in one piece each."""

    rows: _Rows
    cuts: list[int]
    """Where in `rows` each part begins, and the end of the last."""
    spans: list[_Span]

    def of(self, part: int) -> _Rows:
        """The extents of one part."""
        return self.rows[self.cuts[part] : self.cuts[part + 1]]


@dataclass(slots=True)
class _ReadAhead:
    """Entries that `batches` will be asked for."""

    parts: _Parts
    bytes: int
    is_begun: bool = False


class CoalescingReader:
    """Reads entries of one snapshot from one object store."""

    def __init__(self, snapshot: Snapshot, objects: ObjectStore) -> None:
        self._snapshot = snapshot
        self._objects = objects
        self._counts = Counter(
            dict.fromkeys(("fetches", "fetched_bytes", "healed", "damaged", "lost"), 0)
        )
        self._buffer = np.empty(SPAN_BYTES, np.uint8).data  # kept: new memory costs as much
        self._read_s = 0.0  # a moving average
        self._names: dict[int, str] = {}  # of chunks' objects: making one takes 10 us
        self._in_flight: dict[_Span, _InFlight] = {}
        self._flying_bytes = 0
        self._units: dict[bytes, _ReadAhead] = {}  # what is ahead, by its entries
        self._threads: ThreadPoolExecutor | None = None

    def batches(self, entries: _SomeEntries) -> Iterator[Batch]:
        """Everything that these files hold, sorted by chunk and place in it.

        What is damaged or has no chunk any more is logged, counted and left out. Raises
        ObjectStoreError: the store fails.
        """
        unit = self._units.get(entries.tobytes())
        parts = self._parts(entries) if unit is None else unit.parts
        if self._objects.batches_reads:
            yield from self._joined(parts)
            return
        if self._is_slow and len(parts.spans) > 1:
            self._begin(parts.spans)
        for chunk, group in groupby(range(len(parts.spans)), lambda part: parts.spans[part][0]):
            same = list(group)
            spans = parts.spans[same[0] : same[-1] + 1]
            try:
                for part, held in zip(same, self._read_spans(chunk, spans), strict=True):
                    yield self._checked(parts.of(part), held)
            except ObjectMissing as error:
                self._counts["lost"] += 1
                log.error("%s: lost chunk: %s", self._snapshot.dataset, error.message)

    def prefetch(self, units: Sequence[_SomeEntries]) -> None:
        """Begin to read what `batches` will be asked for, unit by unit, where the store is slow,
        or takes many pieces at once.

        What was begun before and is not among it is given up.
        """
        if not (self._is_slow or self._in_flight or self._objects.batches_reads):
            return
        before, self._units = self._units, {}
        ahead_bytes = 0
        for entries in units:
            if ahead_bytes > AHEAD_BYTES_MAX:
                break
            key = entries.tobytes()
            unit = before.pop(key, None) or self._units.get(key) or self._unit(entries)
            ahead_bytes += unit.bytes
            self._units[key] = unit
        for unit in before.values():
            for span in unit.parts.spans:
                flight = self._taken(span)
                if flight is not None and not flight.wanted:
                    flight.contents.cancel()
        self._begin_units([unit for unit in self._units.values() if not unit.is_begun])

    def _unit(self, entries: _SomeEntries) -> _ReadAhead:
        parts = self._parts(entries)
        return _ReadAhead(parts, sum(size for _, _, size in parts.spans))

    @property
    def _is_slow(self) -> bool:
        return self._read_s > SLOW_READ_S

    def _begin_units(self, units: Sequence[_ReadAhead]) -> None:
        """Begin to read these, as far as there is room."""
        spans = [span for unit in units for span in unit.parts.spans]
        begun = self._begin(spans)
        for unit in units:
            begun -= len(unit.parts.spans)
            unit.is_begun = begun >= 0

    def _begin(self, spans: Sequence[_Span]) -> int:
        """Begin to read the first of these that there is room for; how many those are."""
        wanted: dict[_Span, None] = {}
        begun = 0
        for span in spans:
            if span not in self._in_flight and span not in wanted:
                if self._flying_bytes + span[2] > AHEAD_BYTES_MAX:
                    break
                wanted[span] = None
                self._flying_bytes += span[2]
            begun += 1
        if self._threads is None and wanted:
            self._threads = ThreadPoolExecutor(FETCH_THREADS, "fetch")
        for group in self._groups([*wanted]):
            assert self._threads is not None
            flight = _InFlight(self._threads.submit(self._fetch_all, group), len(group))
            self._in_flight.update(dict.fromkeys(group, flight))
        return begun

    def _groups(self, spans: Sequence[_Span]) -> Iterator[Sequence[_Span]]:
        """The requests for these, in order."""
        if not self._objects.batches_reads:
            yield from ([span] for span in spans)
            return
        first, size = 0, 0
        for at, span in enumerate(spans):
            size += span[2]
            if at > first and (size > BATCH_BYTES_MAX or at - first == BATCH_PARTS_MAX):
                yield spans[first:at]
                first, size = at, span[2]
        if first < len(spans):
            yield spans[first:]

    def _joined(self, parts: _Parts) -> Iterator[Batch]:
        """As `batches`, where the store takes many pieces in one request: parts of several chunks
        in a batch."""
        groups = list(self._groups(parts.spans))
        if len(groups) > 1:
            self._begin(parts.spans)
        start = 0  # of a group, among the parts
        for group in groups:
            try:
                held = self._held_together(group)
            except ObjectMissing:
                yield from self._one_by_one(parts, range(start, start + len(group)))
                start += len(group)
                continue
            first, size = 0, 0
            for at, span in enumerate(group):
                size += span[2]
                if size >= SPAN_BYTES or at + 1 == len(group):
                    contents = [
                        each
                        for part in range(first, at + 1)
                        for each in self._contents(parts, start + part, held[part])
                    ]
                    end = parts.cuts[start + at + 1]
                    yield self._checked_contents(
                        parts.rows[parts.cuts[start + first] : end], contents
                    )
                    first, size = at + 1, 0
            start += len(group)

    @staticmethod
    def _contents(parts: _Parts, part: int, held: memoryview) -> Sequence[memoryview]:
        """The stored bytes of each extent of a part."""
        one = parts.cuts[part + 1] - parts.cuts[part] == 1
        return (held,) if one else _cut(parts.of(part), held)

    def _one_by_one(self, parts: _Parts, some: range) -> Iterator[Batch]:
        """Batches of what is there, where a chunk of these is lost."""
        for part in some:
            try:
                yield self._checked(parts.of(part), self._fetch(*parts.spans[part]))
            except ObjectMissing as error:
                self._counts["lost"] += 1
                log.error("%s: lost chunk: %s", self._snapshot.dataset, error.message)

    def _held_together(self, spans: Sequence[_Span]) -> list[memoryview]:
        """The stored bytes of these, of which some may be on their way."""
        found: dict[_Span, memoryview] = {}
        for span in spans:
            flight = self._taken(span)
            if flight is not None:
                found[span] = flight.contents.result()[span]
        for group in self._groups([span for span in dict.fromkeys(spans) if span not in found]):
            found |= self._fetch_all(group)
        return [found[span] for span in spans]

    def _taken(self, span: _Span) -> _InFlight | None:
        """What a piece comes with, which nobody else takes it from."""
        flight = self._in_flight.pop(span, None)
        if flight is not None:
            flight.wanted -= 1
            self._flying_bytes -= span[2]
        return flight

    def _parts(self, entries: _SomeEntries) -> _Parts:
        """The extents of these files, each part to be read in one piece."""
        rows = self._rows(np.asarray(entries, np.int64))
        rows = rows[np.lexsort((rows["offset"], rows["chunk"]))]
        starts, ends = rows["offset"].copy(), rows["offset"] + rows["stored"]
        new = np.diff(rows["chunk"]) != 0
        joins = self._objects.batches_reads
        new |= starts[1:] - ends[:-1] > (JOINED_GAP_BYTES if joins else GAP_BYTES_MAX)
        span_bytes = SLOW_SPAN_BYTES if self._is_slow and not joins else SPAN_BYTES
        cuts = [0, *(np.flatnonzero(new) + 1).tolist(), len(rows)] if len(rows) else [0]
        if len(rows) and (ends[np.array(cuts[1:]) - 1] - starts[cuts[:-1]] > span_bytes).any():
            cuts = _cut_smaller(cuts, starts, ends, span_bytes)
        firsts = np.array(cuts[:-1], np.int64)
        sizes = np.maximum.reduceat(ends, firsts) - starts[firsts] if len(rows) else firsts
        spans = zip(
            rows["chunk"][firsts].tolist(), starts[firsts].tolist(), sizes.tolist(), strict=True
        )
        return _Parts(rows, cuts, list(spans))

    def _read_spans(self, chunk: int, spans: Sequence[_Span]) -> Iterator[memoryview]:
        """The stored bytes of parts of one chunk, each good until the next is asked for."""
        if self._in_flight.keys().isdisjoint(spans):
            largest = max(size for _, _, size in spans)
            if largest > len(self._buffer):
                self._buffer = np.empty(largest, np.uint8).data
            ranges = [(begin, size) for _, begin, size in spans]
            found = self._objects.read_ranges(self._name(chunk), ranges, self._buffer)
            for span in spans:
                start_s = time.monotonic()
                held = next(found)
                self._note(span, start_s)
                yield held
            return
        for span in spans:
            flight = self._taken(span)
            if flight is None or flight.contents.cancel():
                yield self._fetch(*span)
            else:
                yield flight.contents.result()[span]

    def close(self) -> None:
        """Stop reading ahead. Repeatable."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def stats(self) -> dict[str, int]:
        """Counts since the reader was made."""
        return dict(self._counts)

    def _rows(self, entries: npt.NDArray[np.int64]) -> _Rows:
        """The extents of files, as rows; none for what has no content."""
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
        for name in _FIELDS:
            more[name] = [getattr(extent, name) for _, extent in parts]
        return np.concatenate((rows, more))

    def _checked(self, rows: _Rows, held: memoryview) -> Batch:
        """The contents of one part."""
        return self._checked_contents(rows, _cut(rows, held))

    def _checked_contents(self, rows: _Rows, contents: list[memoryview]) -> Batch:
        """The contents that these stored bytes are."""
        right = list(map(xxh3_64_intdigest, contents)) == rows["checksum"].tolist()
        if right and not rows["codec"].any():
            return Batch(rows["entry"], rows["start"], contents)
        good = np.ones(len(rows), np.bool_)
        for at in range(len(rows)):
            try:
                contents[at] = self._decoded(rows[at], contents[at])
            except CorruptError as error:
                good[at] = False
                self._counts["damaged"] += 1
                log.error(
                    "%s/%s is damaged in chunk %s: %s",
                    self._snapshot.dataset,
                    shown(self._snapshot.path(int(rows["entry"][at]))),
                    chunk_id_text(self._snapshot.chunk_ids[int(rows["chunk"][at])]),
                    error.message,
                )
        kept = [content for content, is_good in zip(contents, good, strict=True) if is_good]
        return Batch(rows["entry"][good], rows["start"][good], kept)

    def _decoded(self, row: np.void, raw: memoryview) -> memoryview:
        """The content; read again once where it is not right. Raises CorruptError."""
        form = int(row["codec"]), int(row["size"]), int(row["checksum"])
        try:
            return decode(raw, *form)
        except CorruptError:
            again = self._fetch(int(row["chunk"]), int(row["offset"]), len(raw), again=True)
            content = decode(again, *form)
            self._counts["healed"] += 1
            return content

    def _fetch(self, chunk: int, offset: int, size: int, *, again: bool = False) -> memoryview:
        """Stored bytes in memory of their own. May be called from any thread."""
        room = np.empty(size, np.uint8).data
        start_s = time.monotonic()
        read = self._objects.read_uncached if again else self._objects.read_into
        read(self._name(chunk), offset, room)
        self._note((chunk, offset, size), start_s)
        return room.toreadonly()

    def _fetch_all(self, spans: Sequence[_Span]) -> dict[_Span, memoryview]:
        """The stored bytes of these, in one request where the store takes many. Any thread."""
        if not self._objects.batches_reads:
            return {span: self._fetch(*span) for span in spans}
        wanted = [(self._name(chunk), begin, size) for chunk, begin, size in spans]
        found = dict(zip(spans, self._objects.read_parts(wanted), strict=True))
        self._counts["fetches"] += 1
        self._counts["fetched_bytes"] += sum(size for _, _, size in spans)
        return found

    def _note(self, span: _Span, start_s: float) -> None:
        """A read has ended."""
        self._read_s += (time.monotonic() - start_s - self._read_s) / READS_AVERAGED
        self._counts["fetches"] += 1
        self._counts["fetched_bytes"] += span[2]

    def _name(self, chunk: int) -> str:
        name = self._names.get(chunk)
        if name is None:
            name = chunk_object(self._snapshot.identity, self._snapshot.chunk_ids[chunk])
            self._names[chunk] = name
        return name


def _cut(rows: _Rows, held: memoryview) -> list[memoryview]:
    """The stored bytes of each of these extents, which lie together."""
    first = rows["offset"] - rows["offset"][0]
    places = zip(first.tolist(), (first + rows["stored"]).tolist(), strict=True)
    return [held[begin:end] for begin, end in places]


def _cut_smaller(
    cuts: list[int],
    starts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    span_bytes: int,
) -> list[int]:
    """More cuts, so that no part has more bytes than a span, where its first extent has not."""
    found = [0]
    for cut in cuts[1:]:
        while found[-1] < cut:
            first = found[-1]
            limit = int(starts[first]) + span_bytes
            found.append(first + max(int(np.searchsorted(ends[first:cut], limit, "right")), 1))
    return found
