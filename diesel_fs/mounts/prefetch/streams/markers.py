"""Numbers the markers of an order: every 256th position of an epoch, and its last one.

The prefetch worker watches the files at markers with inotify: an open is a sign of the reader.
`Markers` notes which of an epoch's markers have been opened. `WatchedMarkers` holds those of a
stream that the worker watches; `watches.py` merges the streams.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .units import Positions

MARKER_STRIDE = 256
"""Positions between markers. One event in 256 opens slows no reader down (measured)."""


@dataclass(slots=True)
class Markers:
    """The markers of an epoch, with numbers from 0 on. Positions are counted in the epoch."""

    length: int  # of the epoch
    opened: npt.NDArray[np.bool_] = field(init=False)
    """By number: whether the marker was opened, or no open of it is expected."""
    done: int = 0  # all markers before this number are opened, or no longer waited for

    def __post_init__(self) -> None:
        count = -(-(self.length - 1) // MARKER_STRIDE) + 1 if self.length else 0
        self.opened = np.zeros(count, np.bool_)

    def position(self, number: int) -> int:
        return min(number * MARKER_STRIDE, self.length - 1)

    def number(self, position: int) -> int:
        """The number of the marker at a position; there must be a marker."""
        return position // MARKER_STRIDE if position % MARKER_STRIDE == 0 else len(self.opened) - 1

    def has(self, position: int) -> bool:
        return position % MARKER_STRIDE == 0 or position == self.length - 1

    def are_at(self, positions: Positions) -> npt.NDArray[np.bool_]:
        """Which of these positions have markers."""
        mask: npt.NDArray[np.bool_] = positions % MARKER_STRIDE == 0
        mask |= positions == self.length - 1
        return mask

    def open_at(self, positions: Positions) -> None:
        """Count the markers at these positions as opened."""
        for position in positions[self.are_at(positions)].tolist():
            self.opened[self.number(position)] = True

    def open_before(self, position: int) -> None:
        """Count the markers before a position as opened. Each counts as lying at its number times
        `MARKER_STRIDE`; the epoch's last one may lie before that, and then be left out."""
        self.opened[: max(-(-position // MARKER_STRIDE), 0)] = True

    def move_to(self, position: int) -> None:
        """Count exactly the markers before a position as opened."""
        positions = np.arange(len(self.opened)) * MARKER_STRIDE
        if len(positions):
            positions[-1] = self.length - 1
        self.opened[:] = positions < position
        self.done = int(np.count_nonzero(self.opened))

    def advance(self, high: int, waited_for: int) -> int | None:
        """Pass markers in their order, as long as they are opened or lie at least the distance
        `waited_for` before the reader's position `high`. Returns the position behind the last
        marker passed; None if no marker has been passed yet."""
        while self.done < len(self.opened):
            behind = high - self.position(self.done)
            if not self.opened[self.done] and behind < waited_for:
                break
            self.done += 1
        return self.position(self.done - 1) + 1 if self.done else None

    def keep(self, old: "Markers", unchanged: int) -> None:
        """Take over the markers of another order of the epoch; the first `unchanged` positions of
        the two orders are equal."""
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
        """Note that the claims from a position on have ended."""
        if self._given_up_from is None or position < self._given_up_from:
            self._given_up_from = position

    def take_unneeded(self, low: int) -> list[tuple[int, int]]:
        """Take the markers that need no watch any more, because they lie before `low` or their
        claims have ended."""
        unneeded = []
        if (start := self._given_up_from) is not None:
            unneeded = [marker for marker in self._heap if marker[0] >= start]
            self._heap = [marker for marker in self._heap if marker[0] < start]
            heapq.heapify(self._heap)
            self._given_up_from = None
        while self._heap and self._heap[0][0] < low:
            unneeded.append(heapq.heappop(self._heap))
        return unneeded
