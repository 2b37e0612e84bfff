"""The announced reads of all readers as columns, and the position of each reader.

A cache that knows its future keeps the *units* (entries or whole chunks) that are read again
soonest (Belady's MIN; Lobster, ICPP 2022, section 4.4).

A *use* is one read of a unit by one reader (a *rank* of a training job). Its *time* is its position
in the reader's order, since the ranks of a job advance together. A reader that begins later, such
as that of a validation set, gets a later `start`.

The uses are one sorted array of 64-bit numbers: unit, time and rank in upper, middle and lower
bits. A use takes 9 bytes and a unit 12: 0.5 GB for two epochs of 14 million entries, which are
sorted in 1.5 s. When a reader advances, only the uses that it passes are touched.

Pure. Not safe for concurrent use.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import UsageError

Units: TypeAlias = "npt.NDArray[np.int64] | npt.NDArray[np.int32] | npt.NDArray[np.uint32]"

Times = npt.NDArray[np.int64]

NEVER = np.iinfo(np.int64).max
"""The time of a unit's next use if no use of it is announced."""

_WORD = 63  # bits of a use, so that numbers stay positive when numpy makes them signed


@dataclass(frozen=True, slots=True, eq=False)
class UnitOrder:
    """The rank reads `units[k]` at the time `start + k`."""

    units: Units
    start: int = 0


class FutureUses:
    """The future uses of units, which are numbered from 0."""

    def __init__(self, orders: Sequence[UnitOrder], unit_count: int) -> None:
        """`orders[r]` is the order of rank r. Raises UsageError for a unit number out of range, and
        if unit, time and rank need more than 63 bits together."""
        self._starts = [order.start for order in orders]
        self._lengths = [len(order.units) for order in orders]
        self._orders: list[Units] = [order.units for order in orders]
        self._position = [0] * len(orders)  # of each rank
        self._end = max((order.start + len(order.units) for order in orders), default=0)
        if any(start < 0 for start in self._starts):
            raise UsageError("an order begins before the time 0")
        self._rank_bits = max(len(orders) - 1, 0).bit_length()
        self._low_bits = self._end.bit_length() + self._rank_bits
        if unit_count.bit_length() + self._low_bits > _WORD:
            raise UsageError(
                f"{unit_count} units and times up to {self._end} of {len(orders)} ranks"
                f" need more than {_WORD} bits"
            )
        self._uses = np.empty(sum(self._lengths), np.uint64)
        left = np.zeros(unit_count, np.uint32)
        filled = 0
        for rank, units in enumerate(self._orders):
            if not len(units):
                continue
            if int(units.min()) < 0 or int(units.max()) >= unit_count:
                raise UsageError(f"the order of rank {rank} names a unit that is not one")
            left += np.bincount(units, minlength=unit_count).astype(np.uint32)
            self._uses[filled : filled + len(units)] = self._packed(rank, 0, len(units))
            filled += len(units)
        self._uses.sort()
        self._left = left
        self._is_left = np.ones(len(self._uses), np.bool_)
        # For each unit: its first use left (or the end of its uses), and the start of its uses
        self._begin = np.zeros(unit_count + 1, np.int64 if filled >= 1 << 31 else np.int32)
        np.cumsum(left, out=self._begin[1:])
        self._next = self._begin[:-1].copy()

    def __len__(self) -> int:
        """The number of units."""
        return len(self._left)

    @property
    def ranks(self) -> int:
        return len(self._orders)

    @property
    def left(self) -> int:
        """The number of uses left, of all units and ranks."""
        return sum(self._lengths) - sum(self._position)

    def position(self, rank: int) -> int:
        return self._position[rank]

    @property
    def now(self) -> int:
        """The earliest time of all uses left; NEVER if there are none."""
        times = [
            self._starts[rank] + self._position[rank]
            for rank in range(self.ranks)
            if self._position[rank] < self._lengths[rank]
        ]
        return min(times, default=NEVER)

    def seek(self, rank: int, position: int) -> Units:
        """Set the position of a rank's next read, forwards or back; beyond the order means its end.
        Returns the units between the old and the new position, in order and possibly repeated.
        Takes time in proportion to their number."""
        before = self._position[rank]
        position = min(max(position, 0), self._lengths[rank])
        self._position[rank] = position
        first, behind = sorted((before, position))
        units = self._orders[rank][first:behind]
        if not len(units):
            return units
        places = self._uses.searchsorted(self._packed(rank, first, behind))
        if position > before:
            self._is_left[places] = False
            np.subtract.at(self._left, units, np.uint32(1))
            self._skip_read(units)
        else:
            self._is_left[places] = True
            np.add.at(self._left, units, np.uint32(1))
            np.minimum.at(self._next, units, places.astype(self._next.dtype))
        return units

    def next_time(self, units: Units) -> Times:
        """The time of each unit's next use; NEVER if none is left."""
        found = np.full(len(units), NEVER, np.int64)
        has_use = self._left[units] > 0
        places = self._next[units[has_use]]
        found[has_use] = self._times(self._uses[places])
        return found

    def next_time_of(self, unit: int) -> int:
        """As `next_time`, but for one unit, in a tenth of the time."""
        if not self._left[unit]:
            return NEVER
        use = int(self._uses[self._next[unit]])
        return (use & ((1 << self._low_bits) - 1)) >> self._rank_bits

    def uses_left(self, units: Units) -> npt.NDArray[np.uint32]:
        """For each unit; Lobster's reuse count, over all ranks."""
        return self._left[units]

    def uses_before(self, unit: int, time: int) -> int:
        """The number of a unit's uses left before `time`."""
        low, high = int(self._next[unit]), int(self._begin[unit + 1])
        if time < self._end:
            bound = unit << self._low_bits | max(time, 0) << self._rank_bits
            high = low + int(self._uses[low:high].searchsorted(np.uint64(bound)))
        return int(np.count_nonzero(self._is_left[low:high]))

    def time_of_use(self, unit: int, number: int) -> int:
        """The time of the `number`th use that a unit has left (1: its next use); NEVER if fewer are
        left. While readers only advance, the result never falls."""
        low, high = int(self._next[unit]), int(self._begin[unit + 1])
        places = np.flatnonzero(self._is_left[low:high])
        if len(places) < number:
            return NEVER
        return int(self._times(self._uses[low + places[number - 1 : number]])[0])

    def uses(self, unit: int) -> list[tuple[int, int]]:
        """The uses that a unit has left, by rising time, each as (rank, position)."""
        low, high = int(self._next[unit]), int(self._begin[unit + 1])
        left = self._uses[low:high][self._is_left[low:high]].tolist()
        mask = (1 << self._rank_bits) - 1
        ranks = [use & mask for use in left]
        times = self._times(np.array(left, np.uint64)).tolist()
        return [(rank, time - self._starts[rank]) for rank, time in zip(ranks, times, strict=True)]

    def _packed(self, rank: int, first: int, behind: int) -> npt.NDArray[np.uint64]:
        """The rank's uses at these positions, as 64-bit numbers."""
        packed = self._orders[rank][first:behind].astype(np.uint64)
        packed <<= np.uint64(self._low_bits)
        start = self._starts[rank]
        times = np.arange(start + first, start + behind, dtype=np.uint64)
        times <<= np.uint64(self._rank_bits)
        packed |= times
        packed |= np.uint64(rank)
        return packed

    def _times(self, uses: npt.NDArray[np.uint64]) -> Times:
        low = uses & np.uint64((1 << self._low_bits) - 1)
        times: Times = (low >> np.uint64(self._rank_bits)).astype(np.int64)
        return times

    def _skip_read(self, units: Units) -> None:
        """Set each unit's next use to its first use left."""
        behind = units
        while len(behind):
            places = self._next[behind]
            # The place after a unit's uses may belong to another unit, or not exist
            is_read: npt.NDArray[np.bool_] = np.less(places, self._begin[behind + 1])
            is_read[is_read] = ~self._is_left[places[is_read]]
            behind = behind[is_read]
            # Repeated units move by one place in each round
            self._next[behind] = places[is_read] + 1
