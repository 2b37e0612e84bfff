"""Numbers the markers of an order: every 256th position of an epoch, and its last one.

The prefetch worker watches the files at markers with inotify: an open is a sign of the reader.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .units import Positions

MARKER_STRIDE = 256
"""One event in 256 opens slows no reader down (measured)."""


@dataclass(slots=True)
class Markers:
    """The markers of an epoch, numbered from 0. Positions are counted in the epoch."""

    length: int  # of the epoch
    opened: npt.NDArray[np.bool_] = field(init=False)
    """Whether each marker, by its number, was opened, or no open of it is expected."""
    done: int = 0  # all before it are opened, or no longer waited for

    def __post_init__(self) -> None:
        count = -(-(self.length - 1) // MARKER_STRIDE) + 1 if self.length else 0
        self.opened = np.zeros(count, np.bool_)

    def position(self, number: int) -> int:
        return min(number * MARKER_STRIDE, self.length - 1)

    def number(self, position: int) -> int:
        """There must be a marker."""
        return position // MARKER_STRIDE if position % MARKER_STRIDE == 0 else len(self.opened) - 1

    def has(self, position: int) -> bool:
        return position % MARKER_STRIDE == 0 or position == self.length - 1

    def are_at(self, positions: Positions) -> npt.NDArray[np.bool_]:
        mask: npt.NDArray[np.bool_] = positions % MARKER_STRIDE == 0
        mask |= positions == self.length - 1
        return mask

    def open_at(self, positions: Positions) -> None:
        for position in positions[self.are_at(positions)].tolist():
            self.opened[self.number(position)] = True

    def open_before(self, position: int) -> None:
        """Count the markers before a position as opened. The epoch's last marker may be left out:
        each counts as lying at its number times `MARKER_STRIDE`."""
        self.opened[: max(-(-position // MARKER_STRIDE), 0)] = True

    def move_to(self, position: int) -> None:
        """Count exactly the markers before a position as opened."""
        positions = np.arange(len(self.opened)) * MARKER_STRIDE
        if len(positions):
            positions[-1] = self.length - 1
        self.opened[:] = positions < position
        self.done = int(np.count_nonzero(self.opened))

    def advance(self, high: int, waited_for: int) -> int | None:
        """Pass markers in their order, as long as they are opened or lie at least `waited_for`
        before the reader's position `high`. Returns the position behind the last one passed so far,
        if any."""
        while self.done < len(self.opened):
            behind = high - self.position(self.done)
            if not self.opened[self.done] and behind < waited_for:
                break
            self.done += 1
        return self.position(self.done - 1) + 1 if self.done else None

    def keep(self, old: "Markers", unchanged: int) -> None:
        """Take over the markers of another order of the epoch, whose first `unchanged` positions
        are equal."""
        count = (unchanged - 1) // MARKER_STRIDE + 1 if unchanged else 0
        self.opened[:count] = old.opened[: len(self.opened)][:count]
        self.done = min(old.done, count)


@dataclass(slots=True)
class WatchedMarkers:
    """The markers of one stream that need a watch, as pairs of position (in the stream) and
    entry."""

    _heap: list[tuple[int, int]] = field(default_factory=list)
    _given_up_from: int | None = None  # claims from there on ended since `take_unneeded`

    def add(self, markers: Sequence[tuple[int, int]]) -> None:
        for marker in markers:
            heapq.heappush(self._heap, marker)

    def give_up(self, position: int) -> None:
        if self._given_up_from is None or position < self._given_up_from:
            self._given_up_from = position

    def take_unneeded(self, low: int) -> list[tuple[int, int]]:
        """Take the markers before `low`, and those whose claims have ended: they need no watch any
        more."""
        unneeded = []
        if (start := self._given_up_from) is not None:
            unneeded = [marker for marker in self._heap if marker[0] >= start]
            self._heap = [marker for marker in self._heap if marker[0] < start]
            heapq.heapify(self._heap)
            self._given_up_from = None
        while self._heap and self._heap[0][0] < low:
            unneeded.append(heapq.heappop(self._heap))
        return unneeded
