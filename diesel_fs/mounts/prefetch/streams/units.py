"""Cuts an order into *units*: the entries that are pushed at once. Pure.

A unit is a whole chunk if the order has the chunk's entries near each other, as chunk-wise shuffles
do; otherwise a *mixed unit*, up to 256 entries of several chunks.

In a full shuffle nearly every chunk has one of the first files. If these are fetched by whole
chunks, nearly the whole dataset is read before the reader's next batches are complete. If the store
is slow, the planner therefore also makes *urgent* units: large files in the reader's order, taken
out of later units.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ....errors import UsageError
from ....orders.plan import Entries, EntryOrder

Positions = npt.NDArray[np.int32]
"""4 bytes each: an epoch has fewer than 2**31 entries."""

PAGE_BYTES = 4_096

MIXED_ENTRIES = 256
"""Entries of a mixed unit: enough to share the cost of a decision, few enough to arrive soon."""

LOGGED_ENTRIES = 2_048
"""The same if an order log (`cache/order_logs/`: an epoch's files on a disk, in its order) has the
epoch. A log gives 8 MiB at once: 2,048 files of 4 KiB."""

URGENT_BYTES_MIN = 64 << 10
"""Files of this mean size are worth a request each to a slow store: 16 requests at once that take 5
ms each bring 200 MB/s."""

UNIT_ENTRIES_MIN, UNIT_BYTES_MIN = 8, 1 << 18
"""A chunk of which an epoch reads fewer entries and fewer bytes gets no unit of its own: that would
cost as much as a large unit, a decision and a fetch."""

FREE_DIVISOR = 4
"""If the free memory holds less than a quarter of an epoch, no whole chunks of a random order are
pushed there: they would save few requests, and take memory from the files that are read next."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns by entry: the number of its chunk, or -1, and the pages of its content. Both have 4
    bytes: 112 MB for 14 million entries."""

    chunk: npt.NDArray[np.int32]
    pages: npt.NDArray[np.uint32]
    chunk_count: int

    def cost(self, entries: Entries) -> npt.NDArray[np.int64]:
        return self.pages[entries].astype(np.int64) * PAGE_BYTES

    def bytes_of(self, entries: Entries) -> int:
        return int(self.pages[entries].sum(dtype=np.int64)) * PAGE_BYTES

    def checked(self, entries: EntryOrder) -> Entries:
        """Raises UsageError for numbers outside the dataset."""
        array = np.asarray(entries)
        if len(array) and (array.min() < 0 or array.max() >= len(self.pages)):
            wrong = array.min() if array.min() < 0 else array.max()
            raise UsageError(f"no entry {wrong} among {len(self.pages)}")
        return array.astype(np.uint32, copy=False)


@dataclass(frozen=True, slots=True)
class Units:
    """Positions of an epoch grouped into units, by their first positions. Unit u has the positions
    `order[starts[u]:starts[u + 1]]`, ascending; `first[u]` is the first."""

    order: Positions
    starts: npt.NDArray[np.int64]
    first: Positions
    once: bool  # no entry stands at two of the positions

    def __len__(self) -> int:
        return len(self.first)

    def positions(self, unit: int) -> Positions:
        return self.order[self.starts[unit] : self.starts[unit + 1]]


@dataclass(slots=True)
class UnitQueue:
    """The units of one epoch, which its stream claims one after the other."""

    units: Units
    share_bytes: int  # the memory that they were cut for
    next: int = 0  # the first that is not claimed
    costs: npt.NDArray[np.float64] | None = None  # by unit (`../balance.py`); NaN: unknown
    costs_s: float = -math.inf  # when the first of `costs` was predicted

    def fits(self, share_bytes: int) -> bool:
        """Whether the units may stay as they are for this share of the memory."""
        return 2 * self.share_bytes <= 3 * share_bytes <= 4.5 * self.share_bytes

    def first(self) -> int | None:
        return int(self.units.first[self.next]) if self.next < len(self.units) else None

    def following(self, count: int) -> list[Positions]:
        units = range(self.next, min(self.next + count, len(self.units)))
        return [self.units.positions(unit) for unit in units]


def cut(
    entries: Entries,
    positions: Positions,
    columns: Columns,
    share_bytes: int,
    *,
    by_chunk: bool = True,
    free_bytes: int = 0,
) -> Units:
    """The units of these positions (ascending) of an epoch, for a stream with `share_bytes` of
    memory, of which `free_bytes` hold nothing.

    A chunk is one unit if the bytes from its first to its last position are at most three quarters
    of the share. So in a chunk-wise order each chunk is fetched once if two groups of the shuffle
    fit the share. Further chunks, the soonest read first, are units if together they fit three
    quarters of the free memory, and that could hold more than a `FREE_DIVISOR`th of the epoch: they
    stay until they are read, and each is one request to the store. All other positions go into
    mixed units, which take at most about an eighth of the share. Without `by_chunk` (an order log
    has the epoch) all units are mixed, and larger."""
    count = len(positions)
    if not count:
        empty = np.empty(0, np.int32)
        return Units(empty, np.zeros(1, np.int64), empty, once=True)
    wanted = entries[positions]
    cost = columns.cost(wanted)
    chunk = columns.chunk[wanted]
    chunk[chunk < 0] = columns.chunk_count
    # A "row" is an index in `positions`. All arrays but those of chunks have a value for each row
    rows = np.arange(count, dtype=np.int32)
    # The first and last row of each chunk. For repeated indices numpy keeps the last assignment, so
    # backwards the first row stays
    first = np.zeros(columns.chunk_count + 1, np.int32)
    last = np.zeros(columns.chunk_count + 1, np.int32)
    last[chunk] = rows
    first[chunk[::-1]] = rows[::-1]
    bytes_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(cost)])
    chunk_bytes = np.bincount(chunk, weights=cost, minlength=columns.chunk_count + 1)
    chunk_entries = np.bincount(chunk, minlength=columns.chunk_count + 1)
    is_unit = bytes_before[last + 1] - bytes_before[first] <= share_bytes * 3 // 4
    is_unit &= (chunk_entries >= UNIT_ENTRIES_MIN) | (chunk_bytes >= UNIT_BYTES_MIN)
    if free_bytes * FREE_DIVISOR > int(bytes_before[-1]):
        others = np.flatnonzero(~is_unit & (chunk_entries >= UNIT_ENTRIES_MIN))
        others = others[np.argsort(first[others], kind="stable")]
        is_unit[others[np.cumsum(chunk_bytes[others]) <= free_bytes * 3 // 4]] = True
    is_unit[-1] = False  # entries without a chunk
    is_unit &= by_chunk
    unit_start = first[chunk]  # by row
    mixed = np.flatnonzero(~is_unit[chunk])
    if len(mixed):
        most = MIXED_ENTRIES if by_chunk else LOGGED_ENTRIES
        size = mixed_entries(int(bytes_before[-1]), count, share_bytes, most)
        starts_of_mixed = mixed[::size].astype(np.int32)
        unit_start[mixed] = np.repeat(starts_of_mixed, size)[: len(mixed)]
    is_start = np.zeros(count, np.bool_)
    is_start[unit_start] = True
    start_rows = np.flatnonzero(is_start)
    unit = (np.cumsum(is_start) - 1)[unit_start]
    if len(start_rows) <= 1 << 16:
        unit = unit.astype(np.uint16)  # numpy sorts these by radix: 5 times as fast
    order = np.argsort(unit, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(unit))]).astype(np.int64)
    occurs = np.zeros(len(columns.pages), np.bool_)
    occurs[wanted] = True
    once = int(np.count_nonzero(occurs)) == count
    return Units(positions[order], starts, positions[start_rows], once)


def mixed_entries(total_bytes: int, count: int, share_bytes: int, most: int = MIXED_ENTRIES) -> int:
    """The size of a mixed unit, at most `most`, if `count` entries take `total_bytes`."""
    if not total_bytes:
        return most
    return max(1, min(most, share_bytes // 8 * count // total_bytes))
