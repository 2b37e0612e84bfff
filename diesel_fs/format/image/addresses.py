"""Gives each content of a snapshot its address in the content file (FORMAT.md, section 9). Any
thread.

An **address** is the number of a block of 4 KiB. Images of one dataset that are built one after
another form a **chain**, in which no two contents ever get one address. So the pages of the content
file that the kernel keeps stay right while a mount goes from one version to the next. A content's
**origin** is its chunk, its offset there (of the first extent, if there are several), and its size.

The functions work on ranges of chunks, so that they need little memory beside their result.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ...errors import NoSpaceError
from ..entries import Kind
from ..snapshot import layout
from ..snapshot.reader import Snapshot

Ints: TypeAlias = npt.NDArray[np.int64]

BLOCK_BYTES = 4096
BLOCKS_MAX = (1 << 32) - 1
"""Addresses have 32 bits; the last would mean a hole."""

_ALIGNED_BLOCKS = 16
"""A file of several extents begins at a multiple of this, like each extent within it."""

_BATCH = 1 << 20
_NO_CHUNK = 0xFFFFFFFF  # an entry without content, or a chunk that a snapshot lacks
CHUNK_ID = np.dtype("S16")


class ImageTooLarge(NoSpaceError):
    """The dataset needs more addresses than an image has."""

    retry = False

    def __init__(self) -> None:
        super().__init__(
            "the dataset needs more than the 16 TiB of addresses that a tree in the kernel has",
            advice="the mount answers look-ups itself instead (FUSE)",
        )


class ContentColumns(NamedTuple):
    first_block: layout.U4
    order: layout.U4
    start_block: layout.U4
    chunk: layout.U4
    offset: layout.U4
    size: layout.U8
    chunk_id: npt.NDArray[np.bytes_]


DTYPES = tuple(np.dtype(spec) for spec in ("<u4", "<u4", "<u4", "<u4", "<u4", "<u8", CHUNK_ID))


@dataclass(frozen=True, slots=True)
class Addresses:
    first_block: layout.U4
    """The address of each entry's content; 0 if it has none."""
    order: layout.U4
    """The entries with content, by address."""
    end: int
    """Blocks that the chain has given, this snapshot's included."""
    used: int
    """The content file's first blocks, as many as this snapshot needs."""


def give_addresses(snapshot: Snapshot, earlier: ContentColumns | None, end: int = 1) -> Addresses:
    """Give contents their addresses in the earlier image, or fresh blocks. `end` is the number of
    blocks that the chain has given; block 0 belongs to no content. Raises ImageTooLarge."""
    columns = snapshot.columns
    kept = None if earlier is None else _Kept(earlier, columns.chunk_id.view(CHUNK_ID))
    first_block = np.zeros(len(snapshot), np.uint32)
    used = 1
    of_many = [np.zeros(0, np.int64)]
    for entries in _by_origin(columns):
        blocks = _blocks_of(columns.size[entries])
        first = np.zeros(len(entries), np.int64)
        if kept is not None:
            first = kept.addresses(*origins_of(columns, entries), columns.size[entries])
        many = (columns.flags[entries] & np.uint32(layout.MANY_EXTENTS)) != 0
        of_many.append(entries[many & (first == 0)])
        fresh = ~many & (first == 0)
        ends = end + np.cumsum(blocks[fresh])
        first[fresh] = ends - blocks[fresh]
        end = int(ends[-1]) if len(ends) else end
        used = max(used, _checked((first + blocks)[first > 0]))
        first_block[entries] = first
    entries = np.concatenate(of_many)
    blocks = _blocks_of(columns.size[entries])
    given = -(-blocks // _ALIGNED_BLOCKS) * _ALIGNED_BLOCKS
    if len(entries):
        end = -(-end // _ALIGNED_BLOCKS) * _ALIGNED_BLOCKS
    first = end + np.cumsum(given) - given
    used = max(used, _checked(first + blocks))
    first_block[entries] = first
    order = np.flatnonzero(first_block).astype(np.uint32)
    order = order[np.argsort(first_block[order], kind="stable")]
    return Addresses(first_block, order, end + int(given.sum()), used)


def _checked(ends: Ints) -> int:
    """The greatest of `ends`. Raises ImageTooLarge."""
    end = int(ends.max(initial=0))
    if end > BLOCKS_MAX:
        raise ImageTooLarge
    return end


def _blocks_of(size: layout.U8) -> Ints:
    """Raises ImageTooLarge for a content so large that sums of blocks could overflow."""
    blocks = size >> np.uint64(12)
    blocks += (size & np.uint64(BLOCK_BYTES - 1)) != 0
    if int(blocks.max(initial=0)) > BLOCKS_MAX:
        raise ImageTooLarge
    return blocks.astype(np.int64)


def origins_of(
    columns: layout.SnapshotColumns, entries: Ints | layout.U4
) -> tuple[layout.U4, layout.U4]:
    chunk, offset = columns.chunk[entries], columns.offset[entries]
    many = np.flatnonzero(columns.flags[entries] & np.uint32(layout.MANY_EXTENTS))
    first = columns.extents[chunk[many]]
    chunk[many], offset[many] = first["chunk"], first["offset"]
    return chunk, offset


def _by_origin(columns: layout.SnapshotColumns) -> Iterator[Ints]:
    """Entries with content, by origin, in batches of whole chunks."""
    chunk, chunks = columns.chunk.copy(), len(columns.chunk_bytes)
    chunk[(layout.kinds(columns.flags) != Kind.FILE) | (columns.size == 0)] = _NO_CHUNK
    many = np.flatnonzero(columns.flags & np.uint32(layout.MANY_EXTENTS))
    chunk[many] = columns.extents["chunk"][columns.chunk[many]]
    counts = np.zeros(chunks, np.int64)
    for start in range(0, len(chunk), _BATCH):
        some = chunk[start : start + _BATCH]
        counts += np.bincount(some[some != _NO_CHUNK], minlength=chunks)
    batch = (np.cumsum(counts) - 1) // _BATCH
    first = np.flatnonzero(np.diff(batch, prepend=-1))
    for low, high in pairwise([*first.tolist(), chunks]):
        entries = np.flatnonzero((chunk >= low) & (chunk < high))
        origin = _key(*origins_of(columns, entries))
        yield entries[np.argsort(origin, kind="stable")]


def _key(chunk: layout.U4, offset: layout.U4) -> layout.U8:
    return chunk.astype(np.uint64) << np.uint64(32) | offset


class _Kept:
    """The contents of the earlier image."""

    def __init__(self, earlier: ContentColumns, chunk_id: npt.NDArray[np.bytes_]) -> None:
        """The numbers of chunks here are indices in `chunk_id`, the snapshot's table of chunks."""
        self._earlier = earlier
        number = np.searchsorted(chunk_id, earlier.chunk_id).astype(np.uint32)
        known = np.zeros(len(number), np.bool_)
        inside = np.flatnonzero(number < len(chunk_id))
        known[inside] = chunk_id[number[inside]] == earlier.chunk_id[inside]
        number[~known] = _NO_CHUNK
        self._chunk = number[earlier.chunk]

    def addresses(self, chunk: layout.U4, offset: layout.U4, size: layout.U8) -> Ints:
        """The earlier image's addresses of contents; 0 for a content that it lacks. The origins
        ascend. The i-th content of one origin gets the i-th address."""
        first = np.zeros(len(chunk), np.int64)
        if not len(chunk):
            return first
        earlier = self._earlier
        among = np.flatnonzero((self._chunk >= chunk[0]) & (self._chunk <= chunk[-1]))
        origin = _key(self._chunk[among], earlier.offset[among])
        order = np.argsort(origin, kind="stable")
        origin, among = origin[order], among[order]
        wanted = _key(chunk, offset)
        at = np.searchsorted(origin, wanted)
        at += np.arange(len(wanted)) - np.searchsorted(wanted, wanted)
        inside = np.flatnonzero(at < len(origin))
        at = at[inside]
        same = (origin[at] == wanted[inside]) & (earlier.size[among[at]] == size[inside])
        first[inside[same]] = earlier.start_block[among[at[same]]]
        return first
