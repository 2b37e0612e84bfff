"""What is believed to lie in the page cache, who claims it, and what may go first.

Owned here: `ResidentSet`: the bitmap, the bytes, the number of claims on each entry, and the order
of victims. Not owned: why something is claimed (`stream_tracker.py`), when something must go
(`planner.py`). Used by one thread.
"""

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ...orders.plan import NO_ENTRIES, Entries

Mask = npt.NDArray[np.bool_]
NextUse = Callable[[Entries], npt.NDArray[np.float64]]
"""How far from their readers entries will be read next; infinite where nobody will."""

READ_BYTES_MAX = 1 << 20
LATELY_S = 1.0
"""What so small a file's READ brought so recently is still there, whole."""

PIECE_ENTRIES = 256
"""Victims are looked at so many at once: about a unit."""


class ResidentSet:
    """What is held (see the module). `cost` is in bytes per entry, 0 for what cannot be held."""

    def __init__(self, cost: npt.NDArray[np.int64]) -> None:
        self.cost = cost
        self.resident: Mask = np.zeros(len(cost), np.bool_)
        self.claims = np.zeros(len(cost), np.int32)
        self.bytes = 0
        self.unclaimed_bytes = 0  # of what is resident
        self.pushed_s = np.zeros(len(cost))  # pushed then
        self._read_s = np.full(len(cost), -np.inf)
        self._leaving: Mask = np.zeros(len(cost), np.bool_)  # given out by `victims`
        self._value: npt.NDArray[np.float32] | None = None
        self._behind: deque[Entries] = deque()  # passed by readers, oldest first
        self._behind_entries = 0
        self._ranked = NO_ENTRIES

    def inherit(self, old: "ResidentSet", was: npt.NDArray[np.int32]) -> None:
        """What `old` has of other entries, one of which each of these `was` (-1: none)."""
        now = np.flatnonzero(was >= 0)
        before = was[now]
        self.resident[now] = old.resident[before]
        self.bytes = self.unclaimed_bytes = int(self.cost[self.resident].sum())
        self.pushed_s[now] = old.pushed_s[before]
        self._read_s[now] = old._read_s[before]
        if old._value is not None:
            self._value = np.zeros(len(self.cost), np.float32)
            self._value[now] = old._value[before]

    def bytes_of(self, entries: Entries) -> int:
        """What these (each once) take."""
        return int(self.cost[entries].sum())

    def missing(self, entries: Entries) -> Entries:
        """Those of these that have content and are not resident."""
        return entries[~self.resident[entries] & (self.cost[entries] > 0)]

    def add(self, entries: Entries) -> None:
        """These (each once) are resident now."""
        fresh = self.missing(entries)
        self.resident[fresh] = True
        self.bytes += self.bytes_of(fresh)
        self.unclaimed_bytes += self.bytes_of(fresh[self.claims[fresh] == 0])

    def note_read(self, entry: int, at_s: float) -> None:
        """The kernel has asked for an entry's content, and keeps it."""
        if self.cost[entry] <= READ_BYTES_MAX:
            self._read_s[entry] = at_s

    def split_recent_reads(self, entries: Entries, now_s: float) -> tuple[Entries, Entries]:
        """These without what READs have brought lately; and that, which is resident now."""
        lately = now_s - self._read_s[entries] < LATELY_S
        if not lately.any():
            return entries, NO_ENTRIES
        self.add(entries[lately])
        return entries[~lately], entries[lately]

    def remove(self, entries: Entries) -> None:
        """These (each once) are resident no longer."""
        self._read_s[entries] = -np.inf
        gone = entries[self.resident[entries]]
        self.resident[gone] = False
        self.bytes -= self.bytes_of(gone)
        self.unclaimed_bytes -= self.bytes_of(gone[self.claims[gone] == 0])

    def claim(self, entries: Entries) -> None:
        """One claim more for each time that an entry is named."""
        fresh = np.unique(entries[(self.claims[entries] == 0) & self.resident[entries]])
        self.unclaimed_bytes -= self.bytes_of(fresh)
        np.add.at(self.claims, entries, 1)

    def unclaim(self, entries: Entries, *, passed: bool) -> None:
        """One claim less for each; `passed`: what is free now goes before all else, in order."""
        if not len(entries):
            return
        np.subtract.at(self.claims, entries, 1)
        free = entries[(self.claims[entries] == 0) & self.resident[entries]]
        self.unclaimed_bytes += self.bytes_of(np.unique(free))
        if not passed or not len(free):
            return
        if self._behind_entries > 2 * len(self.cost):  # no drop for long; ranking finds them too
            self._behind.clear()
            self._behind_entries = 0
        for start in range(0, len(free), PIECE_ENTRIES):
            self._behind.append(free[start : start + PIECE_ENTRIES])
        self._behind_entries += len(free)

    def set_value(self, entries: Entries, importance: float) -> None:
        """What entries are worth against others; 0 until said."""
        if self._value is None:
            self._value = np.zeros(len(self.cost), np.float32)
        self._value[entries] = importance
        self._ranked = NO_ENTRIES

    def victims(self, need_bytes: int, next_use: NextUse) -> Entries:
        """What may go, of so many bytes at least where there are as many; then `victims_dropped` is
        due.

        First what readers have passed, oldest first, unless it has a value; then least value first,
        and of equal value what will be read last.
        """
        found: list[Entries] = []
        while need_bytes > 0 and self.unclaimed_bytes > 0:
            piece = self._next_victims(next_use)
            if piece is None:
                break
            self._leaving[piece] = True
            found.append(piece)
            need_bytes -= self.bytes_of(piece)
        return np.concatenate(found) if found else NO_ENTRIES

    def victims_dropped(self, victims: Entries) -> None:
        """The victims have been dropped."""
        self._leaving[victims] = False
        self.remove(victims)

    def _next_victims(self, next_use: NextUse) -> Entries | None:
        while self._behind:
            piece = self._behind.popleft()
            self._behind_entries -= len(piece)
            piece = piece[self._evictable(piece)]
            if self._value is not None:
                piece = piece[self._value[piece] <= 0]
            if len(piece):
                return np.unique(piece)
        for _ in range(2):
            while len(self._ranked):
                piece, self._ranked = np.split(self._ranked, [PIECE_ENTRIES])
                piece = piece[self._evictable(piece)]
                if len(piece):
                    return piece
            self._ranked = self._rank(next_use)
        return None

    def _evictable(self, entries: Entries) -> Mask:
        free: Mask = self.resident[entries] & (self.claims[entries] == 0) & ~self._leaving[entries]
        return free

    def _rank(self, next_use: NextUse) -> Entries:
        free = np.flatnonzero(self.resident & (self.claims == 0) & ~self._leaving)
        found = free.astype(np.uint32)
        value = np.zeros(len(found)) if self._value is None else self._value[found]
        return found[np.lexsort((-next_use(found), value))]
