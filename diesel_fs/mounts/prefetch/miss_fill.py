"""What is pushed where no plan says what comes: chunks that were missed, or all of them in turn.

Owned here: `MissFill`: which chunks wait, and whether telling of further misses would change
anything. Not owned: room (`planner.py`), and how soon a chunk may come again (`members.py`). Used
by one thread.
"""

import math
from itertools import islice

import numpy as np
import numpy.typing as npt

from ...orders.plan import Entries
from .resident_set import ResidentSet
from .units import Columns

RETRY_S, RETRY_S_MAX = 1.0, 64.0
"""A chunk whose pages went is pushed again after 1 s at the soonest, then 2, 4 and so on: a machine
that has no memory for them would only push in a loop."""


class ChunkEntries:
    """Which entries with content each chunk holds, by their offset (where given; else by index)."""

    def __init__(self, columns: Columns, offset: npt.NDArray[np.int64] | None) -> None:
        filled = np.flatnonzero(columns.cost)
        place = columns.chunk[filled].astype(np.int64) << 32
        place += filled if offset is None else offset[filled]
        self._entries: Entries = filled[np.argsort(place)].astype(np.uint32)
        chunks = np.arange(columns.chunk_count + 1)
        self._start: list[int] = np.searchsorted(columns.chunk[self._entries], chunks).tolist()
        self._place = np.zeros(len(columns.cost), np.int32)
        self._place[self._entries] = np.arange(len(filled), dtype=np.int32)
        self._again_s = np.full(columns.chunk_count, -math.inf)
        self._delay_s = np.full(columns.chunk_count, RETRY_S)

    def of(self, chunk: int) -> Entries:
        """The entries of a chunk."""
        return self._entries[self._start[chunk] : self._start[chunk + 1]]

    def fetch_order(self, entries: Entries) -> Entries:
        """These as they lie: by chunk and offset."""
        return entries[np.argsort(self._place[entries])]

    def may_push(self, chunk: int, now_s: float) -> bool:
        """Whether a chunk may be pushed out of turn now; where it may, that counts as done."""
        again_s, delay_s = float(self._again_s[chunk]), float(self._delay_s[chunk])
        if now_s < again_s:
            return False
        calm = now_s >= again_s + 4 * delay_s
        delay_s = RETRY_S if calm else min(2 * delay_s, RETRY_S_MAX)
        self._again_s[chunk], self._delay_s[chunk] = now_s + delay_s, delay_s
        return True


class MissFill:
    """The chunks to push into room that is free: those missed first, then, if all, in turn."""

    def __init__(
        self, members: ChunkEntries, held: ResidentSet, chunk_count: int, *, everything: bool
    ) -> None:
        self._members = members
        self._held = held
        self._count = chunk_count
        self._missed: dict[int, None] = {}
        self._next_in_turn = 0 if everything else chunk_count  # the next chunk in turn
        self.in_turn_count = chunk_count if everything else 0
        """How many chunks are to be pushed in turn."""
        self._too_large_bytes: int | None = None  # of what last had no room

    def missed(self, chunk: int, need_bytes: int, room_bytes: int, now_s: float) -> None:
        """A file of a chunk was read by request; it alone needs so much room."""
        if need_bytes > room_bytes:
            self._too_large_bytes = need_bytes
        elif self._members.may_push(chunk, now_s):
            self._missed[chunk] = None

    def next(self, room_bytes: int) -> Entries | None:
        """The entries to push next, of one chunk; None where none is left or has room."""
        while self._missed:
            chunk = next(iter(self._missed))
            del self._missed[chunk]
            entries = self._held.missing(self._members.of(chunk))
            if len(entries) and self._fits(entries, room_bytes):
                return entries
        while self._next_in_turn < self._count:
            entries = self._held.missing(self._members.of(self._next_in_turn))
            if not self._fits(entries, room_bytes):
                return None  # full; it goes on where there is room again
            self._next_in_turn += 1
            if len(entries):
                return entries
        return None

    @property
    def done_count(self) -> int:
        """How many of those have had their turn."""
        return self._next_in_turn - (self._count - self.in_turn_count)

    def has_room(self, room_bytes: int) -> bool:
        """Whether the next miss may lead to a push; where the last had no room, none will."""
        return self._too_large_bytes is None or room_bytes >= self._too_large_bytes

    def upcoming(self, count: int) -> list[Entries]:
        """What will probably come next, at most so many chunks."""
        found = list(map(self._members.of, islice(self._missed, count)))
        turn = range(self._next_in_turn, min(self._next_in_turn + count - len(found), self._count))
        return [*found, *map(self._members.of, turn)]

    def _fits(self, entries: Entries, room_bytes: int) -> bool:
        need = self._held.bytes_of(entries)
        fits = need <= room_bytes
        self._too_large_bytes = None if fits else need
        return fits
