"""The places of entries in an order log, and the headers of its segments (`ORDER_LOG.md`).

An order is cut into segments (`LogCut`), and a layout (`LogLayout`) gives each entry its place in
the file. Offsets and sizes are counted in *units* of some bytes (`LogCut.unit`), so that 32 bits
are enough: an entry takes 12 bytes of memory (LCache, section III-C, needs some 700). Pure.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from ...errors import FormatError
from ...format.entries import Bytes
from ...orders.plan import NO_ENTRIES, Entries

SEGMENT_BYTES = 8 << 20
"""The size of segments: enough for a disk to read at its full rate. Since entries are not cut, a
segment has a little more or less."""

SEGMENTS_MAX = 1 << 16
"""The most segments of one log; a larger log has larger segments. numpy sorts numbers below this by
radix, which is fast."""

BLOCK_BYTES = 4096
"""Segments begin at multiples of this: a file system can release only whole blocks."""

_MAGIC, _FORMAT = b"DSLORDER", 1
_HEAD = struct.Struct("<8sIIIIQ16sQQ")
HEAD_BYTES = _HEAD.size
"""The part of a header with a fixed size."""

_CHECKSUM_BYTES = 8
_UNIT_MIN, _UNITS_MAX = 8, 1 << 32
_NO_SEGMENT, _NO_PLACE = SEGMENTS_MAX - 1, (1 << 32) - 1

Places = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Sizes = npt.NDArray[np.uint64] | npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class LogIdentity:
    """The identity and version of a log's dataset, and the digest of its order."""

    identity: UUID
    version: int
    order: int

    @classmethod
    def of(cls, identity: UUID, version: int, order: Entries) -> "LogIdentity":
        packed = np.ascontiguousarray(order, "<u4")
        return cls(identity, version, xxh3_64_intdigest(packed.data))

    @property
    def file_name(self) -> str:
        return file_name(self.order)


def file_name(order: int) -> str:
    return f"order-{order:016x}"


class LogCut:
    """An order cut into segments; the first step to a layout.

    `entries` are the entries that a log of the order has, in the order and each once. `segment` has
    the segment of each. A *unit* is `unit` bytes.
    """

    def __init__(
        self, order: Entries, sizes: Sizes, is_logged: Mask, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        """`sizes` has the bytes of each entry of the dataset, `is_logged` which of them a log may
        have."""
        self._sizes = sizes
        known = is_logged[order]
        self.entries = _first_uses(order if known.all() else order[known], len(sizes))
        self._order = order
        total_bytes = int(sizes.sum(dtype=np.int64, where=is_logged))
        self.unit = _UNIT_MIN
        # Contents may take half of the 2^32 offsets; headers and the gaps at segment ends need the
        # rest
        while total_bytes + len(sizes) * self.unit > self.unit * _UNITS_MAX // 2:
            self.unit *= 2
        while total_bytes + len(sizes) * self.unit > segment_bytes * (SEGMENTS_MAX - 1):
            segment_bytes *= 2
        self.segment_bytes = segment_bytes
        ends = self.stored_units(self.entries)
        np.cumsum(ends, out=ends)
        self.segment = np.zeros(len(ends), np.uint16)
        self.segment[1:] = ends[:-1] // np.uint32(segment_bytes // self.unit)

    @classmethod
    def of_segments(
        cls, segments: Sequence[Entries], sizes: Sizes, unit: int, segment_bytes: int
    ) -> "LogCut":
        """The cut of a log with these segments, whose order is not known."""
        cut = cls(NO_ENTRIES, sizes, np.zeros(len(sizes), np.bool_))
        cut.entries = cut._order = np.concatenate([NO_ENTRIES, *segments])
        cut.segment = np.repeat(np.arange(len(segments)), [*map(len, segments)]).astype(np.uint16)
        cut.unit, cut.segment_bytes = unit, segment_bytes
        return cut

    @property
    def entry_count(self) -> int:
        """The number of entries of the dataset."""
        return len(self._sizes)

    def stored_units(self, entries: Entries) -> npt.NDArray[np.uint32]:
        """How many units each of these entries takes."""
        units = self._sizes[entries].astype(np.uint64, copy=False)
        units += np.uint64(self.unit - 1)
        units //= np.uint64(self.unit)
        return units.astype(np.uint32)

    def positions_behind(self, first: Places) -> Places:
        """The position in the order behind the last entry of each segment (`first`: that of
        `LogLayout`)."""
        if self.entries is self._order:
            return first[1:]
        position_of = np.zeros(self.entry_count, np.int64)
        position_of[self._order[::-1]] = np.arange(len(self._order))[::-1]
        behind: Places = position_of[self.entries[first[1:] - 1]] + 1
        # Only a guard: `entries` are in the order of their first uses, so these already ascend
        return np.maximum.accumulate(behind)

    def by_arrival(self, arrivals: Entries) -> Entries:
        """`entries` sorted by segment, and within a segment by their positions in `arrivals`, the
        order in which their contents will come. Entries that do not arrive come last."""
        segment_of = np.full(self.entry_count, _NO_SEGMENT, np.uint16)
        segment_of[self.entries] = self.segment
        segments = segment_of[arrivals]
        known = segments != _NO_SEGMENT
        arriving = _first_uses(arrivals if known.all() else arrivals[known], self.entry_count)
        if len(arriving) < len(self.entries):
            arrives = np.zeros(self.entry_count, np.bool_)
            arrives[arriving] = True
            arriving = np.concatenate([arriving, self.entries[~arrives[self.entries]]])
        if arriving is not arrivals:
            segments = segment_of[arriving]
        # Sorted as numbers of both: twice as fast as a stable argsort
        packed = segments.astype(np.uint64)
        packed <<= np.uint64(32)
        packed |= np.arange(len(arriving), dtype=np.uint64)
        packed.sort()
        return arriving[packed.astype(np.uint32)]

    def from_headers(self, found: Mapping[int, Entries]) -> tuple[Entries, list[int]]:
        """`found` has the entries that each segment's header lists. Returns the entries by segment,
        and the segments whose header lists exactly the entries of the cut. In these the entries are
        sorted as listed, in the others by the order."""
        entries = self.entries.copy()
        first = np.searchsorted(self.segment, np.arange(SEGMENTS_MAX + 1))
        right = []
        for segment, listed in found.items():
            if not 0 <= segment < SEGMENTS_MAX:
                continue
            mine = entries[first[segment] : first[segment + 1]]
            if len(mine) and np.array_equal(np.sort(mine), np.sort(listed)):
                mine[:] = listed
                right.append(segment)
        return entries, right


class LogLayout:
    """The places of a log's entries, segment by segment.

    `entries[p]` is the entry at place p. Segment s has the places from `first[s]` to `first[s + 1]
    - 1`, and lies in the file from `start[s]` to `end[s] - 1`, its header included. A reader at
    `position_behind[s]` of the order has read all of segment s.
    """

    def __init__(
        self, cut: LogCut, entries: Entries, limit_bytes: int, starts: Sequence[int] | None = None
    ) -> None:
        """`entries` are the entries of the cut, sorted by segment. The log gets as many segments,
        from the first on, as fit in `limit_bytes`. `starts`: the offset of each segment; None: each
        begins at the end of the one before it."""
        segments = int(cut.segment[-1]) + 1 if len(entries) else 0
        first = np.searchsorted(cut.segment, np.arange(segments + 1))
        behind = np.concatenate([np.zeros(1, np.uint32), cut.stored_units(entries)])
        np.cumsum(behind, out=behind)
        unit, self.segment_bytes = cut.unit, cut.segment_bytes
        counts, content = np.diff(first), np.diff(behind[first]).astype(np.int64) * unit
        header = _aligned(_HEAD.size + 4 * counts + _CHECKSUM_BYTES)
        sizes = np.where(counts > 0, header + _aligned(content), 0)
        end = np.cumsum(sizes) if starts is None else np.array(starts, np.int64) + sizes
        kept = int(np.searchsorted(end, limit_bytes, "right"))
        self.first, self.end = first[: kept + 1], end[:kept]
        self.start = self.end - sizes[:kept]
        count, self.unit = int(self.first[-1]), unit
        self.entries: Entries = entries[:count]
        self.position_behind = cut.positions_behind(self.first)
        # A place begins behind the header of its segment and the places before it. `base` may be
        # negative; uint32 arithmetic wraps, and adding `behind` wraps it back.
        base = (self.start + header[:kept]) // unit - behind[self.first[:-1]].astype(np.int64)
        self._offset = behind[:count]
        self._offset += np.repeat(base.astype(np.uint32), counts[:kept])
        # A column over all entries if the log has most of them, else sorted pairs
        self._place_of = self._sorted = None
        if 2 * count >= cut.entry_count:
            self._place_of = np.full(cut.entry_count, _NO_PLACE, np.uint32)
            self._place_of[self.entries] = np.arange(count, dtype=np.uint32)
        else:
            places = np.argsort(self.entries).astype(np.uint32)
            self._sorted = self.entries[places], places

    @property
    def segments(self) -> int:
        return len(self.end)

    @property
    def total_bytes(self) -> int:
        return int(self.end[-1]) if self.segments else 0

    @property
    def largest_bytes(self) -> int:
        return int((self.end - self.start).max(initial=0))

    def find(self, entries: Entries) -> Places:
        """The place of each entry; -1 if it is not in the log."""
        if self._place_of is not None:
            places = self._place_of[entries].astype(np.int64)
            places[places == _NO_PLACE] = -1
            return places
        assert self._sorted is not None
        known, places_of_known = self._sorted
        if not len(known):
            return np.full(len(entries), -1, np.int64)
        wanted = entries.astype(np.uint32, copy=False)
        at = np.minimum(known.searchsorted(wanted), len(known) - 1)
        places = places_of_known[at].astype(np.int64)
        places[known[at] != wanted] = -1
        return places

    def offset(self, places: Places) -> npt.NDArray[np.int64]:
        """The offset in the file of the content at each place."""
        return self._offset[places].astype(np.int64) * self.unit

    def segment_of(self, places: Places) -> npt.NDArray[np.int64]:
        segments: npt.NDArray[np.int64] = self.first.searchsorted(places, "right") - 1
        return segments

    def header(self, segment: int, log: LogIdentity) -> bytes:
        """The header of a segment, which begins at `start[segment]` of the file."""
        entries = self.entries[self.first[segment] : self.first[segment + 1]]
        head = _HEAD.pack(
            _MAGIC, _FORMAT, segment, len(entries), self.unit, self.segment_bytes,
            log.identity.bytes, log.version, log.order,
        )  # fmt: skip
        content = head + entries.astype("<u4", copy=False).tobytes()
        # xxhash gives big-endian; the file is little-endian
        return content + xxh3_64_digest(content)[::-1]


class SegmentHeader(NamedTuple):
    """The header of a segment, as it lies in a file."""

    number: int
    unit: int
    segment_bytes: int
    log: LogIdentity
    entries: Entries

    def stored_bytes(self, sizes: Sizes) -> int:
        """The bytes of the segment in the file; `sizes` has those of all entries."""
        units = -(-sizes[self.entries].astype(np.int64) // self.unit)
        content = _aligned(np.array([units.sum() * self.unit]))
        return header_bytes(len(self.entries)) + int(content[0])


def parse_header(content: Bytes, segment: int, cut: LogCut, log: LogIdentity) -> Entries:
    """The entries of a segment, as they lie in the file. `content` begins with its header, and may
    be longer. Raises FormatError unless that is sound, and of this segment and log."""
    found = parse_any_header(content)
    expected = (segment, cut.unit, cut.segment_bytes, log)
    if (found.number, found.unit, found.segment_bytes, found.log) != expected:
        raise FormatError("a segment of another log")
    return found.entries


def parse_any_header(content: Bytes) -> SegmentHeader:
    """As `parse_header`, for a segment of any log."""
    count = parse_entry_count(content)
    _, _, number, _, unit, segment_bytes, identity, version, order = _HEAD.unpack_from(content)
    end = _HEAD.size + 4 * count
    if end + _CHECKSUM_BYTES > len(content):
        raise FormatError("the header of a segment is cut off")
    if xxh3_64_digest(content[:end])[::-1] != content[end : end + _CHECKSUM_BYTES]:
        raise FormatError("the header of a segment is damaged")
    entries = np.frombuffer(content, "<u4", count, _HEAD.size).astype(np.uint32)
    log = LogIdentity(UUID(bytes=identity), version, order)
    return SegmentHeader(number, unit, segment_bytes, log, entries)


def parse_entry_count(content: Bytes) -> int:
    """The number of entries in the segment whose header `content` begins with. Raises
    FormatError."""
    if len(content) < _HEAD.size:
        raise FormatError("the header of a segment is cut off")
    magic, version, _, count, *_ = _HEAD.unpack_from(content)
    if (magic, version) != (_MAGIC, _FORMAT):
        raise FormatError("no header of a segment")
    return int(count)


def header_bytes(count: int) -> int:
    """The bytes before the contents of a segment of `count` entries: its header and a gap."""
    return int(_aligned(np.array([_HEAD.size + 4 * count + _CHECKSUM_BYTES]))[0])


def _aligned(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return (sizes + (BLOCK_BYTES - 1)) // BLOCK_BYTES * BLOCK_BYTES


def _first_uses(order: Entries, entry_count: int) -> Entries:
    """An order without repetitions."""
    seen = np.zeros(entry_count, np.bool_)
    seen[order] = True
    if int(np.count_nonzero(seen)) == len(order):
        return order
    _, first = np.unique(order, return_index=True)
    return order[np.sort(first)]
