"""Decides which ranges of chunks are read together, and how far ahead. Pure.

A request for two near ranges costs less than two requests, so every reader merges its ranges first.
`merge_spans` works on numpy columns, for the thousands of extents that a mount wants at once;
`merge_ranges` works on lists, for requests to a server, most of which have a few parts. An *extent*
is a run of bytes of one file in one chunk; a *span* is a range of a chunk that is read in one
piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from ...format.entries import ChunkId, ChunkRanges

BATCH_BYTES_MAX = 8 << 20
BATCH_PARTS_MAX = 512
"""Limits of one request to a store that takes many reads in one request. The request itself then
costs little (as much as some hundred kilobytes do), and its first part still arrives within a few
milliseconds."""

MERGED_BYTES_MAX = 32 << 20
"""The largest range that `merge_ranges` merges. A larger part is read alone, into the memory of the
answer."""

AHEAD_DIVISOR, AHEAD_BYTES_MIN, AHEAD_BYTES_MAX = 4, 256 << 10, 32 << 20
"""A mount's prefetch worker *pushes* contents into the page cache before they are read. Contents
are read ahead of the pushes for a quarter of the memory that pushes may take, within these
limits."""


SPARSE_DIVISOR = 2
"""A chunk of small files is read as a whole if each gap takes, on average, at most this part (a
half) of the time of a request. With half of the files of 10 KB drawn and a third of those in
memory, chunk-wise epochs took 1.8 s (500 requests, 265 MB), without this rule 3.0 s (7,000
requests, 117 MB). If less is wanted, fewer bytes are worth more than the time: other readers share
the store."""


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How `CoalescingReader` merges and reads ahead; tests shrink these."""

    gap_bytes: int = 64 << 10
    """The most unwanted bytes between two extents of one span: a second read would cost as much as
    64 KiB on a local disk, and far more on an object store."""

    sparse_gap_bytes: int = 4 << 10
    """The same if the store is slow and little of the chunk around the extents is wanted
    (`is_sparse`), as for orders that are shuffled over all files: larger gaps would make up most of
    the bytes."""

    batched_gap_bytes: int = 4 << 10
    """The same if the store takes many reads in one request: one more costs 3 us there."""

    span_bytes: int = 512 << 10
    """The largest span, unless one extent is larger. Its bytes are then still in the processor's
    cache when they are checked and passed on: 110 KiB cost 8 us, but 25 us in spans of 4 MiB."""

    slow_span_bytes: int = 8 << 20
    """The same if each span is a request of its own to a slow store."""

    batch_bytes: int = BATCH_BYTES_MAX
    batch_parts: int = BATCH_PARTS_MAX

    ahead_bytes: int = AHEAD_BYTES_MAX
    """Memory of spans that were requested ahead and have not been taken yet."""

    @classmethod
    def within(cls, pushed_bytes: int) -> Self:
        """The limits for pushes into `pushed_bytes` of memory. Contents that are read ahead from
        the cache of a task also take room there until they are pushed."""
        ahead_bytes = max(pushed_bytes // AHEAD_DIVISOR, AHEAD_BYTES_MIN)
        return cls(ahead_bytes=min(ahead_bytes, AHEAD_BYTES_MAX))


# Merging, on columns ------------------------------------------------------------------------------


def merge_spans(
    chunks: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    *,
    gap_bytes: int | npt.NDArray[np.int64],
    span_bytes: int,
) -> list[int]:
    """Merge extents, sorted by chunk and start, into spans. Returns the index of each span's first
    extent, and at last the number of extents.

    The extents of a span are of one chunk, with gaps of at most `gap_bytes` (if an array: the limit
    for the gap before each extent), and at most `span_bytes` bytes unless a single extent has more.
    """
    if not len(starts):
        return [0]
    most = gap_bytes if isinstance(gap_bytes, int) else gap_bytes[1:]
    is_apart = (np.diff(chunks) != 0) | (starts[1:] - ends[:-1] > most)  # from the one before
    cuts = [0, *(np.flatnonzero(is_apart) + 1).tolist(), len(starts)]
    if (ends[np.array(cuts[1:]) - 1] - starts[cuts[:-1]] <= span_bytes).all():
        return cuts
    smaller = [0]
    for cut in cuts[1:]:
        while smaller[-1] < cut:
            first = smaller[-1]
            limit = int(starts[first]) + span_bytes
            smaller.append(first + max(int(np.searchsorted(ends[first:cut], limit, "right")), 1))
    return smaller


def is_sparse(
    chunks: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    gap_bytes: int,
) -> npt.NDArray[np.bool_]:
    """For each extent, whether its chunk is better not read as a whole. The extents are sorted by
    chunk and start; there is at least one.

    Less than half of the bytes from the first to the last extent is wanted then, and the gaps have
    more than `gap_bytes` / `SPARSE_DIVISOR` on average.
    """
    firsts = np.flatnonzero(np.concatenate([[True], np.diff(chunks) != 0]))
    counts = np.diff(np.append(firsts, len(chunks)))
    wanted = np.add.reduceat(ends - starts, firsts)
    whole = np.maximum.reduceat(ends, firsts) - starts[firsts]
    sparse = (2 * wanted < whole) & (SPARSE_DIVISOR * (whole - wanted) > (counts - 1) * gap_bytes)
    found: npt.NDArray[np.bool_] = np.repeat(sparse, counts)
    return found


# Merging, on lists --------------------------------------------------------------------------------

ChunkPart = tuple[int, int, int]
"""The start of a part in its chunk, its size, and its number in the request."""


@dataclass(frozen=True, slots=True)
class MergedRange:
    start: int
    end: int
    parts: Sequence[ChunkPart]


def by_chunk(parts: ChunkRanges) -> dict[ChunkId, list[ChunkPart]]:
    """Sorted by start; of equal starts the longest first. Leaves out parts of no bytes."""
    chunks, starts, sizes = (parts[name].tolist() for name in ("chunk", "start", "size"))
    found: dict[ChunkId, list[ChunkPart]] = {}
    for chunk, start, size, place in zip(chunks, starts, sizes, range(len(parts)), strict=True):
        if size:
            found.setdefault(chunk, []).append((start, size, place))
    for wanted in found.values():
        wanted.sort(key=lambda part: (part[0], -part[1]))
    return found


def merge_ranges(wanted: Sequence[ChunkPart], gap_bytes: int) -> list[MergedRange]:
    """Merge parts, sorted as by `by_chunk`. Neighbours share a read if at most `gap_bytes` lie
    between them and the read has at most `MERGED_BYTES_MAX`. A part within another part is read
    with that part."""
    runs: list[MergedRange] = []
    first, start, end = 0, 0, -1
    for number, (part_start, size, _) in enumerate(wanted):
        part_end = part_start + size
        if end >= 0:
            if part_end <= end:
                continue
            if part_start <= end + gap_bytes and part_end - start <= MERGED_BYTES_MAX:
                end = part_end
                continue
            runs.append(MergedRange(start, end, wanted[first:number]))
        first, start, end = number, part_start, part_end
    if end >= 0:
        runs.append(MergedRange(start, end, wanted[first:]))
    return runs
