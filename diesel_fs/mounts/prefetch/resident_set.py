"""Keeps account of which entries are resident (in the page cache), and which are claimed.

The kernel does not report which pages it holds, so a `ResidentSet` may be wrong. A *claim* keeps an
entry for a stream (a reader with a known order): it is not dropped. `streams/stream_tracker.py`
decides on claims, `room.py` when something must be dropped, and `eviction.py` which entries.
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ...orders.plan import NO_ENTRIES, Entries
from .eviction import Eviction, Mask, Uses
from .streams.units import PAGE_BYTES, Columns

READ_BYTES_MAX = 1 << 20
LATELY_S = 1.0
"""A file of at most this size need not be pushed if a READ brought it at most this long ago."""

_ONE = np.int32(1)
"""Of the type of `claims`: `ufunc.at` is twenty times as fast if it need not convert."""

Ended: TypeAlias = Literal["passed", "given up", "changed"]
"""Why claims end: the reader has passed the entries; the stream has given them up, so they are
dropped first; or its order has changed."""


@dataclass(slots=True)
class Clock:
    """The times of the first and the last report to the planner."""

    start_s: float = math.nan
    now_s: float = 0.0

    def tick(self, now_s: float) -> None:
        if math.isnan(self.start_s):
            self.start_s = now_s
        self.now_s = now_s

    def since_start_s(self, now_s: float) -> float:
        return now_s - self.start_s

    def inherit(self, old: "Clock") -> None:
        self.start_s, self.now_s = old.start_s, old.now_s


class ResidentSet:
    """The columns begin with zeros, so a column that is never written takes no memory. Times are
    seconds since the clock's start, so that four bytes are enough for each."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        count = len(columns.pages)
        self.resident: Mask = np.zeros(count, np.bool_)
        self.claims = np.zeros(count, np.int32)  # by entry, how many
        self.bytes = 0  # of resident entries, in whole pages
        self.unclaimed_bytes = 0  # of resident entries that no stream claims
        self.pushed_s = np.zeros(count, np.float32)  # by entry, the last time
        # Until when an entry's last READ counts as recent; 0: no READ brought it
        self._read_s = np.zeros(count, np.float32)
        self.eviction = Eviction(columns, self.resident, self.claims)

    def inherit(self, old: "ResidentSet", was: npt.NDArray[np.int32]) -> None:
        """Take over all but the claims of another version's set; `was` gives each entry's index
        there, or -1."""
        entries = np.flatnonzero(was >= 0)
        before = was[entries]
        self.resident[entries] = old.resident[before]
        self.bytes = self.unclaimed_bytes = self.bytes_of(
            np.flatnonzero(self.resident).astype(np.uint32)
        )
        self.pushed_s[entries] = old.pushed_s[before]
        self._read_s[entries] = old._read_s[before]
        self.eviction.inherit(old.eviction, entries.astype(np.uint32), before.astype(np.uint32))

    def bytes_of(self, entries: Entries) -> int:
        """No entry may come twice."""
        return self._columns.bytes_of(entries)

    def missing(self, entries: Entries) -> Entries:
        """The entries that have content and are not resident."""
        return entries[~self.resident[entries] & (self._columns.pages[entries] > 0)]

    # Residency

    def add(self, entries: Entries) -> None:
        """No entry may come twice."""
        new = self.missing(entries)
        self.resident[new] = True
        self.bytes += self.bytes_of(new)
        self._free(new[self.claims[new] == 0])

    def note_read(self, entry: int, at_s: float) -> None:
        if int(self._columns.pages[entry]) * PAGE_BYTES <= READ_BYTES_MAX:
            self._read_s[entry] = at_s + LATELY_S

    def split_recent_reads(self, entries: Entries, now_s: float) -> tuple[Entries, Entries]:
        """Split into entries to push and entries that READs have brought lately. The latter are
        noted as resident."""
        lately = now_s < self._read_s[entries]
        if not lately.any():
            return entries, NO_ENTRIES
        self.add(entries[lately])
        return entries[~lately], entries[lately]

    def remove(self, entries: Entries) -> None:
        """No entry may come twice."""
        self._read_s[entries] = 0
        removed = entries[self.resident[entries]]
        self.resident[removed] = False
        self.bytes -= self.bytes_of(removed)
        self._take(removed[self.claims[removed] == 0])

    # Claims

    def claim(self, entries: Entries) -> None:
        """Add a claim for each time that an entry is named."""
        first_claimed = np.unique(entries[(self.claims[entries] == 0) & self.resident[entries]])
        self._take(first_claimed)
        np.add.at(self.claims, entries.astype(np.intp), _ONE)

    def unclaim(self, entries: Entries, why: Ended) -> None:
        """Remove a claim for each time that an entry is named."""
        if not len(entries):
            return
        np.subtract.at(self.claims, entries.astype(np.intp), _ONE)
        free = entries[(self.claims[entries] == 0) & self.resident[entries]]
        self._free(np.unique(free))
        if why != "changed" and len(free):
            self.eviction.note_released(free, passed=why == "passed")

    def _free(self, entries: Entries) -> None:
        self.unclaimed_bytes += self.bytes_of(entries)
        self.eviction.add(entries)

    def _take(self, entries: Entries) -> None:
        """Note that these entries without claims get claims, or are not resident any more."""
        self.unclaimed_bytes -= self.bytes_of(entries)
        self.eviction.remove(entries)

    # Drops

    def victims(self, need_bytes: int, uses: Uses, *, only_unneeded: bool = False) -> Entries:
        """Choose unclaimed entries to drop: at least `need_bytes`, or all if they take less. The
        caller drops them and calls `victims_dropped`. `only_unneeded`: none that a reader still
        comes to."""
        victims = [NO_ENTRIES]
        while need_bytes > 0 and self.unclaimed_bytes > 0:
            piece = self.eviction.take_next(need_bytes, uses, only_unneeded=only_unneeded)
            if piece is None:
                break
            victims.append(piece)
            need_bytes -= self.bytes_of(piece)
        return np.concatenate(victims)

    def victims_dropped(self, victims: Entries) -> None:
        self.eviction.note_dropped(victims)
        self.remove(victims)
