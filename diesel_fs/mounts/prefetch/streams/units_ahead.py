"""Chooses the next files to claim for one stream, unit by unit.

The order of an epoch is cut into units (`units.py`) when the stream first needs one, and again if
its share of the memory changes much or claims have been given up. Units that the reader has passed
are skipped: READs have brought their files. From a slow store an *urgent* unit may go first.

`UnitsAhead.frontier` changes the state: call it before `peek`, `urgent` and `has_share_left`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ....orders.plan import Entries
from .claims import Claims
from .reader_position import ReaderPosition
from .stream_order import StreamEpoch, StreamOrder
from .units import MIXED_ENTRIES, URGENT_BYTES_MIN, Positions, UnitQueue, cut

URGENT_DIVISOR = 4
"""Urgent units take at most a quarter of a stream's memory ahead of the reader."""


@dataclass(slots=True)
class NextUnit:
    """The unit that a stream wants next, and the markers in it."""

    state: StreamEpoch
    positions: Positions  # in the epoch
    entries: Entries  # at these positions
    once: bool  # no entry occurs twice
    markers: list[tuple[int, int]]  # position in the stream, entry
    is_urgent: bool = False  # not a unit of the epoch, but parts of later ones


def never_logged(_: Entries) -> bool:
    """The `is_logged` of a mount without order logs."""
    return False


@dataclass(slots=True)
class UnitsAhead:
    """The units of one stream that are not claimed. Positions are counted in the stream.
    `is_logged` returns whether an order log has an epoch's entries."""

    order: StreamOrder
    reader: ReaderPosition
    claims: Claims
    is_logged: Callable[[Entries], bool] = never_logged
    free_bytes: int = 0  # the stream's part of the free memory, for whole chunks

    def frontier(self, share_bytes: int) -> int | None:
        """The next position to claim; None if all announced epochs are claimed or read. Cuts orders
        into units, and skips units that the reader has passed."""
        order, read_up_to = self.order, self._read_up_to()
        while (state := order.frontier_epoch()) is not None:
            if (queue := state.queue) is None:
                queue = state.queue = self._cut(state, share_bytes)
            while (first := queue.first()) is not None:
                if state.base + first >= read_up_to:
                    return state.base + first
                positions = queue.units.positions(queue.next)
                if state.base + int(positions[-1]) >= read_up_to:
                    return state.base + first
                self._mark_read(state, positions)
                queue.next += 1
            order.frontier_index += 1
        return None

    def _read_up_to(self) -> int:
        """Before this position, most files have been read, and the others are left to READs."""
        return max(self.claims.floor, self.reader.high - self.reader.spread)

    def _cut(self, state: StreamEpoch, share_bytes: int) -> UnitQueue:
        entries = state.epoch.entries
        start = max(self.claims.floor - state.base, 0)
        rest = (np.flatnonzero(~state.claimed[start:]) + start).astype(np.int32)
        by_chunk = not self.is_logged(entries)
        units = cut(
            entries, rest, self.order.columns, share_bytes, by_chunk=by_chunk,
            free_bytes=self.free_bytes,
        )  # fmt: skip
        return UnitQueue(units, share_bytes)

    def _mark_read(self, state: StreamEpoch, positions: Positions) -> None:
        """Leave these positions to READs: no opens of their markers are expected, as they get no
        watch."""
        self.claims.note_skipped(state.epoch.entries[positions])
        state.markers.open_at(positions)

    def peek(self) -> NextUnit:
        """The unit at the frontier, without positions that are claimed or were read."""
        state, queue = self._at_frontier()
        positions = queue.units.positions(queue.next)
        positions = positions[~state.claimed[positions]]  # urgent units had the others
        read_up_to = self._read_up_to() - state.base
        if len(positions) and int(positions[0]) < read_up_to:
            late = positions < read_up_to  # read before it could be pushed
            self._mark_read(state, positions[late])
            positions = positions[~late]
        return _unit(state, positions, once=queue.units.once)

    def urgent(self, ahead_s: float) -> NextUnit | None:
        """The next unclaimed files in the reader's order, at most 256, among those to which it
        comes within `ahead_s` seconds (or the next 512, if these are more); None if there are none,
        if they are small, or if the unit at the frontier has them anyway."""
        state, queue = self._at_frontier()
        ahead = max(int(self.reader.rate * ahead_s), 2 * MIXED_ENTRIES)
        ahead = min(ahead, self.order.capacity // URGENT_DIVISOR)
        start = max(self._read_up_to() - state.base, 0)
        end = max(self.reader.high + ahead - state.base, start)
        positions = np.flatnonzero(~state.claimed[start:end])[:MIXED_ENTRIES].astype(np.int32)
        positions += start
        planned = queue.units.positions(queue.next)
        planned = planned[~state.claimed[planned]]
        both = min(len(planned), len(positions))
        if np.array_equal(planned[:both], positions[:both]):
            return None
        entries = state.epoch.entries[positions]
        least_bytes = max(URGENT_BYTES_MIN * len(entries), 1)
        if self.order.columns.bytes_of(entries) < least_bytes:
            return None
        return _unit(state, positions, is_urgent=True)

    def claim(self, unit: NextUnit) -> None:
        self.claims.claim(unit.state, unit.positions, unit.markers)
        if not unit.is_urgent:
            assert unit.state.queue is not None
            unit.state.queue.next += 1

    def has_share_left(self) -> bool:
        """Whether the unit at the frontier fits the stream's share of the memory beside its
        claims."""
        _, queue = self._at_frontier()
        start, end = queue.units.starts[queue.next : queue.next + 2].tolist()
        claimed = self.order.claimed_end() - self.claims.floor
        return bool(claimed + end - start <= self.order.capacity)

    def entries(self, count: int) -> list[Entries]:
        """The next `count` units at the frontier, as far as they are cut."""
        state = self.order.frontier_epoch()
        if state is None or state.queue is None:
            return []
        return [state.epoch.entries[positions] for positions in state.queue.following(count)]

    def starts(self, count: int) -> npt.NDArray[np.int64]:
        """The first positions of the units of `entries`, which identify them until the order
        changes."""
        state = self.order.frontier_epoch()
        if state is None or (queue := state.queue) is None:
            return np.empty(0, np.int64)
        return queue.units.first[queue.next : queue.next + count].astype(np.int64) + state.base

    def _at_frontier(self) -> tuple[StreamEpoch, UnitQueue]:
        state = self.order.epochs[self.order.frontier_index]
        assert state.queue is not None
        return state, state.queue


def _unit(
    state: StreamEpoch, positions: Positions, *, once: bool = False, is_urgent: bool = False
) -> NextUnit:
    entries = state.epoch.entries[positions]
    at_markers = np.flatnonzero(state.markers.are_at(positions))
    in_stream = (positions[at_markers].astype(np.int64) + state.base).tolist()
    markers = list(zip(in_stream, entries[at_markers].tolist(), strict=True))
    return NextUnit(state, positions, entries, once, markers, is_urgent)
