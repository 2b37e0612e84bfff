"""Holds the epochs of a stream, one behind the other, and the frontier of its claims.

A *position* of a stream counts the files over all its epochs. Epochs that were read are removed,
and positions go on, so they may exceed 2**31. The *frontier* is the next position to claim. Urgent
units (`units_ahead.py`) may be claimed beyond it.

The parts of a `StreamTracker` share one `StreamOrder`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ....orders.plan import Entries, Epoch, Stream
from .markers import MARKER_STRIDE, Markers
from .units import Columns, UnitQueue


@dataclass(slots=True, eq=False)
class StreamEpoch:
    """Positions are counted in the epoch, except `base` and `end`."""

    epoch: Epoch
    base: int  # the stream's position of the first file
    claimed: npt.NDArray[np.bool_] = field(init=False)  # by position (`claims.py`)
    was_claimed: npt.NDArray[np.bool_] = field(init=False)  # now or before, by position
    markers: Markers = field(init=False)  # and which of them were opened
    queue: UnitQueue | None = None
    """The units of the positions that were unclaimed when they were cut; None: still to be cut."""
    _index: tuple[Entries, npt.NDArray[np.int64]] | None = None  # made by `sorted`
    _total_bytes: int = -1  # made by `total_bytes`

    def __post_init__(self) -> None:
        self.claimed = np.zeros(len(self.epoch), np.bool_)
        self.was_claimed = np.zeros(len(self.epoch), np.bool_)
        self.markers = Markers(len(self.epoch))

    @property
    def end(self) -> int:
        return self.base + len(self.epoch)

    def sorted(self) -> tuple[Entries, npt.NDArray[np.int64]]:
        """The entries sorted, and their positions, ascending among equal entries."""
        if self._index is None:
            positions = np.argsort(self.epoch.entries, kind="stable")
            self._index = self.epoch.entries[positions], positions
        return self._index

    def positions_of(self, entry: int) -> npt.NDArray[np.int64]:
        entries, positions = self.sorted()
        wanted = np.uint32(entry)  # of the type of `entries`; numpy would convert all of them
        start, end = entries.searchsorted(wanted), entries.searchsorted(wanted, "right")
        return positions[start:end]

    def total_bytes(self, columns: Columns) -> int:
        if self._total_bytes < 0:
            self._total_bytes = columns.bytes_of(self.epoch.entries)
        return self._total_bytes


@dataclass(slots=True)
class StreamOrder:
    """Positions are counted in the stream."""

    columns: Columns
    stream: Stream  # without the epochs that were read
    epochs: list[StreamEpoch] = field(default_factory=list)  # of `stream.epochs`
    end: int = 0  # behind the last epoch
    frontier_index: int = 0  # of the epoch with the frontier
    capacity: int = 0  # entries that the stream's share of the memory holds

    def __post_init__(self) -> None:
        self._append(self.stream.epochs)

    def _append(self, epochs: Sequence[Epoch]) -> None:
        for epoch in epochs:
            self.epochs.append(StreamEpoch(epoch, self.end))
            self.end = self.epochs[-1].end

    def give_share(self, share_bytes: int) -> None:
        """If the stream's share of the memory has changed much, units are cut anew."""
        for state in self.epochs[self.frontier_index :]:
            if state.queue is not None and not state.queue.fits(share_bytes):
                state.queue = None
        if self.epochs:
            state = self.epochs[min(self.frontier_index, len(self.epochs) - 1)]
            total_bytes = state.total_bytes(self.columns)
            self.capacity = max(1, share_bytes * len(state.epoch) // max(total_bytes, 1))

    # Positions

    def epoch_at(self, position: int) -> StreamEpoch | None:
        """The first epoch that ends after a position."""
        return next((state for state in self.epochs if position < state.end), None)

    def numbered(self, number: int) -> StreamEpoch | None:
        """None if it is not announced, or has been read."""
        return next((each for each in self.epochs if each.epoch.number == number), None)

    def marker_at(self, position: int) -> tuple[Markers, int] | None:
        """The markers of the epoch, and the number of the marker at a position; None if there is
        none."""
        state = self.epoch_at(position)
        if state is None or position < state.base or not state.markers.has(position - state.base):
            return None
        return state.markers, state.markers.number(position - state.base)

    def nearest_position(self, entry: int, high: int) -> tuple[int, int]:
        """The position of an entry that is nearest to a reader at `high`, and its distance; -1 if
        the epochs up to the frontier do not have the entry. A position that the reader has passed
        counts as farther than one ahead, because most of those have been read."""
        nearest = -1, 1 << 62
        for state in self.epochs[: self.frontier_index + 1]:
            positions = state.positions_of(entry) + state.base
            first_ahead = int(np.searchsorted(positions, high))
            for position in positions[max(first_ahead - 1, 0) : first_ahead + 1].tolist():
                ahead = position - high
                distance = ahead if ahead >= 0 else MARKER_STRIDE - 2 * ahead
                if distance < nearest[1]:
                    nearest = position, distance
        return nearest

    def next_use(self, entries: Entries, high: int) -> npt.NDArray[np.float64]:
        """Positions ahead of a reader at `high`, in `next_epochs`; infinite for other entries."""
        use = np.full(len(entries), np.inf)
        for state in self.next_epochs():
            known, positions = state.sorted()
            if not len(known) or not len(entries):
                continue
            found_at = np.minimum(np.searchsorted(known, entries), len(known) - 1)
            distance = positions[found_at] + state.base - high
            later = (known[found_at] == entries) & (distance >= 0)
            use[later] = np.minimum(use[later], distance[later])
        return use

    def next_epochs(self) -> list[StreamEpoch]:
        """The epoch of the frontier and the next one: later uses of entries are not looked at."""
        return self.epochs[self.frontier_index :][:2]

    # The frontier

    def frontier_epoch(self) -> StreamEpoch | None:
        """None if all are claimed."""
        more = self.frontier_index < len(self.epochs)
        return self.epochs[self.frontier_index] if more else None

    def claimed_end(self) -> int:
        """The frontier, as `UnitsAhead.frontier` has computed it last."""
        state = self.frontier_epoch()
        if state is None:
            return self.end
        if state.queue is None:
            claimed = np.flatnonzero(state.claimed)
            return state.base + (int(claimed[-1]) + 1 if len(claimed) else 0)
        first = state.queue.first()
        return state.end if first is None else state.base + first

    def fetched_up_to(self, high: int) -> tuple[int, int]:
        """Up to where files are claimed (without urgent units), or have been read by a reader at
        `high`: the number of an epoch, and the position in it."""
        position = max(high, self.claimed_end())
        if (state := self.epoch_at(position)) is not None:
            return state.epoch.number, max(position - state.base, 0)
        if not self.epochs:
            return 0, 0
        last = self.epochs[-1].epoch
        return last.number, len(last)

    def cut_again(self, number: int) -> None:
        """Have the units of `epochs[number]` cut anew, and move the frontier back to that epoch."""
        self.epochs[number].queue = None
        self.frontier_index = min(self.frontier_index, number)

    # Changes of the plan

    def extend(self, stream: Stream) -> None:
        self.stream = stream
        new_epochs = stream.epochs[len(self.epochs) :]
        if self.epochs:
            last = self.epochs[-1]
            epoch = stream.epoch(last.epoch.number)
            if epoch is not last.epoch:
                self._put(last, epoch, len(last.epoch))
        self._append(new_epochs)

    def foresaw(self, stream: Stream) -> bool:
        """Whether a stream's only epoch is this order's last one, and all else is equal."""
        own = self.stream
        if len(stream.epochs) != 1 or not self.epochs or own.tentative or stream.tentative:
            return False
        last, first = self.epochs[-1].epoch, stream.epochs[0]
        return (
            own.lag_entries == stream.lag_entries
            and last.number == first.number
            and np.array_equal(last.entries, first.entries)
        )

    def confirm(self, epoch: Epoch) -> None:
        """Replace the last epoch by one with the same entries."""
        self.epochs[-1].epoch = epoch
        self.stream = replace(self.stream, epochs=(*self.stream.epochs[:-1], epoch))

    def replace(self, state: StreamEpoch, stream: Stream, unchanged: int) -> None:
        """Take over a stream with other entries in one epoch, behind the first `unchanged`."""
        self.stream = stream
        self._put(state, stream.epoch(state.epoch.number), unchanged)

    def _put(self, state: StreamEpoch, epoch: Epoch, unchanged: int) -> None:
        new = StreamEpoch(epoch, state.base)
        new.claimed[:unchanged] = state.claimed[:unchanged]
        new.was_claimed[:unchanged] = state.was_claimed[:unchanged]
        new.markers.keep(state.markers, unchanged)
        index = self.epochs.index(state)
        self.epochs[index] = new
        self.frontier_index = min(self.frontier_index, index)
        self.end = state.base
        for each in self.epochs[index:]:
            each.base, self.end = self.end, self.end + len(each.epoch)

    def remove_first(self) -> None:
        """Positions stay as they are."""
        del self.epochs[0]
        self.stream = replace(self.stream, epochs=self.stream.epochs[1:])
        self.frontier_index = max(self.frontier_index - 1, 0)
