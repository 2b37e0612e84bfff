"""Units: what is pushed at once, cut out of an order.

Owned here: `Units`, and the rule that decides between whole chunks and mixed batches. Not owned:
when a unit is pushed (`planner.py`), how far a stream has come (`stream_tracker.py`). Pure values.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...orders.plan import Entries

Positions = npt.NDArray[np.int32]
"""Positions in one epoch; 4 bytes each, since an epoch has fewer than 2**31."""

PAGE_BYTES = 4_096
KNOWN_ENTRY_BYTES = 1_150
"""Kernel memory of one known entry (dentry, inode): 1.5 GB for 1.28 M, measured."""

MIXED_ENTRIES = 256
"""Entries of a mixed unit: a decision's cost is spread over hundreds of files, and a reader waits
for no more than that much fetching."""

UNIT_ENTRIES_MIN, UNIT_BYTES_MIN = 8, 1 << 18
"""A chunk of which an epoch reads less than both is not worth a unit of its own."""


@dataclass(frozen=True, slots=True)
class Columns:
    """What residency needs to know of the entries: n of each.

    `chunk` is the number of the entry's chunk, -1 where it has none; `cost` what its content takes
    in the page cache in bytes, 0 for what holds no content.
    """

    chunk: npt.NDArray[np.int32]
    cost: npt.NDArray[np.int64]
    chunk_count: int


@dataclass(frozen=True, slots=True)
class Units:
    """Positions of an epoch grouped into units, in the order of their first positions.

    Unit u has the positions `order[starts[u]:starts[u + 1]]`, ascending; `first[u]` is the first.
    """

    order: Positions
    starts: npt.NDArray[np.int64]
    first: Positions
    once: bool  # no entry stands at two of the positions

    def __len__(self) -> int:
        return len(self.first)

    def positions(self, unit: int) -> Positions:
        """The positions of a unit, ascending."""
        return self.order[self.starts[unit] : self.starts[unit + 1]]


def cut(entries: Entries, positions: Positions, columns: Columns, share_bytes: int) -> Units:
    """The units of these positions (ascending) of an epoch, for a stream with so much memory.

    Where all positions of a chunk's entries lie near together (the bytes from its first to its last
    are at most three quarters of the share), the unit is that chunk with all of its entries: so in
    chunk-wise order, where two groups fit into the share, each chunk is fetched once. All other
    positions go into mixed units of up to 256, fewer where files are large: a unit takes about
    an eighth of the share at most.
    """
    count = len(positions)
    if not count:
        empty = np.empty(0, np.int32)
        return Units(empty, np.zeros(1, np.int64), empty, once=True)
    wanted = entries[positions]
    cost = columns.cost[wanted]
    chunk = columns.chunk[wanted]
    chunk[chunk < 0] = columns.chunk_count
    places = np.arange(count, dtype=np.int32)
    # Of repeated indices numpy keeps the last assignment, so backwards the first place stays.
    first = np.zeros(columns.chunk_count + 1, np.int32)
    last = np.zeros(columns.chunk_count + 1, np.int32)
    last[chunk] = places
    first[chunk[::-1]] = places[::-1]
    total = np.concatenate([np.zeros(1, np.int64), np.cumsum(cost)])
    own_bytes = np.bincount(chunk, weights=cost, minlength=columns.chunk_count + 1)
    own_count = np.bincount(chunk, minlength=columns.chunk_count + 1)
    whole = total[last + 1] - total[first] <= share_bytes * 3 // 4
    whole &= (own_count >= UNIT_ENTRIES_MIN) | (own_bytes >= UNIT_BYTES_MIN)
    whole[-1] = False
    is_whole = whole[chunk]
    start = first[chunk]  # where the unit of each place begins
    mixed = np.flatnonzero(~is_whole)
    if len(mixed):
        batch = mixed_entries(int(total[-1]), count, share_bytes)
        heads = mixed[::batch].astype(np.int32)
        start[mixed] = np.repeat(heads, batch)[: len(mixed)]
    is_start = np.zeros(count, np.bool_)
    is_start[start] = True
    begins = np.flatnonzero(is_start)
    unit = (np.cumsum(is_start) - 1)[start]
    if len(begins) <= 1 << 16:
        unit = unit.astype(np.uint16)  # numpy sorts these by radix: 5 times as fast
    order = np.argsort(unit, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(unit))]).astype(np.int64)
    seen = np.zeros(len(columns.cost), np.bool_)
    seen[wanted] = True
    once = int(np.count_nonzero(seen)) == count
    return Units(positions[order], starts, positions[begins], once)


def mixed_entries(total_bytes: int, count: int, share_bytes: int) -> int:
    """How many entries a mixed unit has, where `count` of them take `total_bytes`."""
    if not total_bytes:
        return MIXED_ENTRIES
    return max(1, min(MIXED_ENTRIES, share_bytes // 8 * count // total_bytes))
