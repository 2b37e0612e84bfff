"""Turns the orders of a job's epochs into the requests of its mounts, in their sequence. Pure.

A mount cuts each rank's order into *pushes*: groups of files that it loads, and puts into the page
cache, together (`mounts/prefetch/streams/units.py` calls them units). A push is a whole chunk if
the files of the chunk are near each other in the order, otherwise up to 256 files of many chunks.
All files of one chunk in one push are one *access* to the cache. So a chunk is accessed once an
epoch in chunk-wise order, and nearly once for each of its files in a full shuffle.

A *row* is one file that one rank reads. The rows of an epoch are sorted by push, chunk and place in
the chunk, as the mount reads them. Empty files have no rows. A million files take about a second.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..cache.fetching.coalesce import ReadLimits, is_sparse, merge_spans
from ..errors import UsageError
from ..format.snapshot.layout import MANY_EXTENTS
from ..format.snapshot.reader import Indices, Snapshot
from ..mounts.prefetch.streams.units import PAGE_BYTES, Columns, cut
from ..orders.parts import part_positions
from ..orders.shuffle import ChunkedFiles
from .nodes import ForecastJob

Mask = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]
Small = npt.NDArray[np.int32]
Parts = npt.NDArray[np.float32]

_LIMITS = ReadLimits()


@dataclass(frozen=True, slots=True, eq=False)
class ForecastFiles:
    """The files of a dataset, and the chunks that hold them. Can be pickled.

    By file (a number that `chunked.shuffled` returns is an index here): its first chunk (`chunk`),
    the offset and number of its bytes there (`offset`, `stored`), and its `pages` in memory. A file
    of several extents counts as if it lay in its first chunk, from the chunk's start on.
    """

    chunked: ChunkedFiles
    offset: Numbers
    stored: Numbers
    pages: npt.NDArray[np.uint32]
    chunk_bytes: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, snapshot: Snapshot) -> "ForecastFiles":
        """All files of a snapshot. Raises UsageError if it has none, CorruptError if it is
        damaged."""
        entries = snapshot.files()
        if not len(entries):
            raise UsageError(f"{snapshot.dataset} has no files, so there is nothing to plan")
        columns = snapshot.columns
        size = columns.size[entries].astype(np.int64)
        many = (columns.flags[entries] & MANY_EXTENTS) != 0
        return cls(
            ChunkedFiles.of(snapshot, entries),
            np.where(many, 0, columns.offset[entries]).astype(np.int64),
            np.where(many, size, columns.stored[entries]).astype(np.int64),
            (-(-size // PAGE_BYTES)).astype(np.uint32),
            snapshot.chunk_sizes.astype(np.uint64),
        )

    def __len__(self) -> int:
        return len(self.offset)

    @property
    def chunk(self) -> Indices:
        return self.chunked.chunks

    @property
    def chunk_ids(self) -> list[bytes]:
        return [row.tobytes() for row in self.chunked.chunk_ids.reshape(-1, 16)]

    @property
    def bytes(self) -> int:
        return int(self.stored.sum())


def epoch_order(
    job: ForecastJob, files: ForecastFiles, epoch: int, given: Indices | None = None
) -> Indices:
    """The order of each rank in an epoch: indices of `files`, of the shape (ranks, places).

    All ranks' order is `given` by the user, or drawn from the job's seed.
    """
    sequence = given
    if sequence is None:
        chunks = max(len(files.chunk_bytes), 1)
        group = job.group_size if job.shuffle == "chunk" else chunks
        sequence, _ = files.chunked.shuffled(job.seed, epoch, group)
    parts = [
        sequence[part_positions(len(sequence), rank, job.world, drop_last=False)]
        for rank in range(job.world)
    ]
    return np.stack(parts)


@dataclass(frozen=True, slots=True, eq=False)
class EpochReads:
    """The pushes, accesses and rows of one epoch, each numbered in the order of requests.

    By rank and place in its order: `push_of` is the push that brings the file, `arrived_of` the
    fraction of that push's bytes that have arrived once the file has. By push: the `rank`, and the
    `first` place in its order that needs the push. By access: `push`, `chunk`, `wanted` (bytes). By
    row: `file`, `access`, `place` (the index into the flattened `push_of`).
    """

    push_of: Small
    arrived_of: Parts
    rank: Small
    first: Small
    push: Small
    chunk: Small
    wanted: Numbers
    file: Small
    access: Small
    place: Small

    def requests(
        self, files: ForecastFiles, is_wanted: Mask, limits: "MergeLimits"
    ) -> tuple[Numbers, Numbers]:
        """By push: how many requests read its rows that are in `is_wanted`, and their bytes."""
        count = len(self.rank)
        rows = np.flatnonzero(is_wanted)
        starts = files.offset[self.file[rows]]
        ends = starts + files.stored[self.file[rows]]
        access = self.access[rows].astype(np.int64)
        if not len(rows):
            return np.zeros(count, np.int64), np.zeros(count, np.int64)
        sparse = is_sparse(access, starts, ends, limits.gap_bytes)
        gaps = np.where(sparse, limits.sparse_gap_bytes, limits.gap_bytes)
        cuts = merge_spans(access, starts, ends, gap_bytes=gaps, span_bytes=limits.span_bytes)
        begin = np.array(cuts[:-1], np.int64)
        sizes = np.maximum.reduceat(ends, begin) - starts[begin]
        push = self.push[access[begin]]
        total = np.bincount(push, sizes, count).astype(np.int64)
        return np.bincount(push, minlength=count).astype(np.int64), total


@dataclass(frozen=True, slots=True)
class MergeLimits:
    """One request reads neighbours with at most `gap_bytes` between them, up to `span_bytes`; or
    with `sparse_gap_bytes`, if little is wanted of the chunk (`coalesce.is_sparse`)."""

    gap_bytes: int
    sparse_gap_bytes: int
    span_bytes: int


IN_TASK = MergeLimits(_LIMITS.batched_gap_bytes, _LIMITS.batched_gap_bytes, _LIMITS.span_bytes)
"""The limits of reads from the store that a task's cache does not keep."""

ALONE = MergeLimits(_LIMITS.gap_bytes, _LIMITS.sparse_gap_bytes, _LIMITS.slow_span_bytes)
"""The limits of a mount without a cache, at a slow store."""


def cut_epoch(
    job: ForecastJob, files: ForecastFiles, order: Indices, *, push_files: int = 0
) -> EpochReads:
    """Cut the orders of all ranks in one epoch (`epoch_order`) into pushes, accesses and rows.

    Pushes follow the mount's rule, or, if `push_files` is not 0, each has the next `push_files`
    files of the rank's order, as in other systems.
    """
    world, length = order.shape
    if push_files:
        per_rank = -(-length // push_files)
        blocks = np.arange(length, dtype=np.int32) // push_files
        push_of = blocks[None, :] * world + np.arange(world, dtype=np.int32)[:, None]
        rank = np.tile(np.arange(world, dtype=np.int32), per_rank)
        first = np.repeat(np.arange(per_rank, dtype=np.int32) * push_files, world)
    else:
        push_of, rank, first = _mount_pushes(job, files, order)
    flat_file, flat_push = order.reshape(-1), push_of.reshape(-1)
    by_place = np.lexsort((files.offset[flat_file], files.chunk[flat_file], flat_push))
    # The fraction of a push's bytes that have arrived once each of its files has
    so_far = np.cumsum(files.stored[flat_file[by_place]])
    push_bytes = np.bincount(flat_push, files.stored[flat_file], len(rank))
    before = np.cumsum(push_bytes) - push_bytes
    sorted_push = flat_push[by_place]
    arrived = (so_far - before[sorted_push]) / np.maximum(push_bytes[sorted_push], 1)
    arrived_of = np.empty(len(flat_file), np.float32)
    arrived_of[by_place] = arrived
    rows = by_place[files.stored[flat_file[by_place]] > 0]
    file, push = flat_file[rows], flat_push[rows]
    chunk = files.chunk[file]
    starts = np.ones(len(rows), np.bool_)
    starts[1:] = (np.diff(push) != 0) | (np.diff(chunk) != 0)
    begin = np.flatnonzero(starts)
    wanted = np.add.reduceat(files.stored[file], begin) if len(begin) else np.zeros(0, np.int64)
    return EpochReads(
        push_of=push_of,
        arrived_of=arrived_of.reshape(world, length),
        rank=rank,
        first=first,
        push=push[begin].astype(np.int32),
        chunk=chunk[begin].astype(np.int32),
        wanted=wanted.astype(np.int64),
        file=file.astype(np.int32),
        access=(np.cumsum(starts) - 1).astype(np.int32),
        place=rows.astype(np.int32),
    )


def _mount_pushes(
    job: ForecastJob, files: ForecastFiles, order: Indices
) -> tuple[Small, Small, Small]:
    """The push of each rank and place, and the rank and first place of each push."""
    world, length = order.shape
    columns = Columns(files.chunk.astype(np.int32), files.pages, len(files.chunk_bytes))
    share_bytes = max(job.node.window_bytes // job.ranks, 1)
    places = np.arange(length, dtype=np.int32)
    cuts = [
        cut(order[rank].astype(np.uint32), places, columns, share_bytes) for rank in range(world)
    ]
    rank = np.repeat(np.arange(world, dtype=np.int32), [len(units) for units in cuts])
    first = np.concatenate([units.first for units in cuts])
    # The mount first loads the push that a reader reaches first; ranks advance together
    sequence = np.lexsort((rank, first))
    number = np.empty(len(first), np.int32)
    number[sequence] = np.arange(len(first), dtype=np.int32)
    push_of = np.empty((world, length), np.int32)
    begin = 0
    for each, units in enumerate(cuts):
        numbers = number[begin : begin + len(units)]
        push_of[each, units.order] = np.repeat(numbers, np.diff(units.starts))
        begin += len(units)
    return push_of, rank[sequence], first[sequence]
