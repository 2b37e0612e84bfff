"""Chooses what to push without a plan: chunks of files that were missed, or all chunks in turn.

A miss pushes the rest of its chunk if that fits the free part of the budget; the policy `oneshot`
then offers all chunks of the dataset, in the order of their numbers. So a dataset that fits becomes
resident as a whole; otherwise the files that came first stay, and READs bring the rest.
"""

import math
from itertools import islice

import numpy as np
import numpy.typing as npt

from ...orders.plan import Entries
from .resident_set import ResidentSet
from .streams.units import Columns

RETRY_S, RETRY_S_MAX = 1.0, 64.0
"""A chunk whose pages the kernel frees is pushed again after 1 s at the soonest, then after 2 s, 4
s and so on, up to 64 s: a machine without memory for it would otherwise push in a loop."""


class ChunkEntries:
    """The entries with content of each chunk, by their offsets (by their indices if these are not
    known)."""

    def __init__(self, columns: Columns, offset: npt.NDArray[np.uint32] | None) -> None:
        self._chunk, self._offset = columns.chunk, offset
        filled = np.flatnonzero(columns.pages).astype(np.uint32)
        self._entries: Entries = filled[np.argsort(self._place(filled))]
        chunks = np.arange(columns.chunk_count + 1)
        self._start: list[int] = np.searchsorted(columns.chunk[self._entries], chunks).tolist()
        self._again_s = np.full(columns.chunk_count, -math.inf)  # by chunk: when it may be pushed
        self._delay_s = np.full(columns.chunk_count, RETRY_S)  # by chunk: from a push to the next

    def _place(self, entries: Entries) -> npt.NDArray[np.int64]:
        """The entries' sort key: chunk, then offset."""
        offset = entries if self._offset is None else self._offset[entries]
        place = self._chunk[entries].astype(np.int64)
        place <<= 32
        place += offset
        return place

    def of(self, chunk: int) -> Entries:
        return self._entries[self._start[chunk] : self._start[chunk + 1]]

    def fetch_order(self, entries: Entries) -> Entries:
        """Sort by chunk and offset, so that few reads fetch the entries."""
        return entries[np.argsort(self._place(entries))]

    def may_push(self, chunk: int, now_s: float) -> bool:
        """Whether a chunk may be pushed because a file of it was missed, or freed by the kernel.
        After True, which counts as a push, the answer is False for the chunk's delay."""
        again_s, delay_s = float(self._again_s[chunk]), float(self._delay_s[chunk])
        if now_s < again_s:
            return False
        is_long_ago = now_s >= again_s + 4 * delay_s
        delay_s = RETRY_S if is_long_ago else min(2 * delay_s, RETRY_S_MAX)
        self._again_s[chunk], self._delay_s[chunk] = now_s + delay_s, delay_s
        return True


class MissFill:
    def __init__(
        self,
        chunk_entries: ChunkEntries,
        resident: ResidentSet,
        chunk_count: int,
        *,
        everything: bool,
    ) -> None:
        self._chunk_entries = chunk_entries
        self._resident_set = resident
        self._count = chunk_count
        self._missed: dict[int, None] = {}  # an ordered set of chunks
        self._next_in_turn = 0 if everything else chunk_count
        self.in_turn_count = chunk_count if everything else 0
        """How many chunks `oneshot` pushes in turn; 0 for another policy."""
        # The need of the last file or chunk, if there was no room for it
        self._too_large_bytes: int | None = None

    def missed(self, chunk: int, need_bytes: int, room_bytes: int, now_s: float) -> None:
        if need_bytes > room_bytes:
            self._too_large_bytes = need_bytes
        elif self._chunk_entries.may_push(chunk, now_s):
            self._missed[chunk] = None

    def next(self, room_bytes: int) -> Entries | None:
        """The entries of the next chunk; None if none is left, or it does not fit."""
        while self._missed:
            chunk = next(iter(self._missed))
            del self._missed[chunk]
            entries = self._resident_set.missing(self._chunk_entries.of(chunk))
            if len(entries) and self._fits(entries, room_bytes):
                return entries
        while self._next_in_turn < self._count:
            entries = self._resident_set.missing(self._chunk_entries.of(self._next_in_turn))
            if not self._fits(entries, room_bytes):
                return None  # full: the same chunk is offered when there is room again
            self._next_in_turn += 1
            if len(entries):
                return entries
        return None

    @property
    def done_count(self) -> int:
        """How many of `in_turn_count` have had their turn."""
        return self._next_in_turn - (self._count - self.in_turn_count)

    def has_room(self, room_bytes: int) -> bool:
        """Whether the next miss may lead to a push: the last one had room, or would have it now."""
        return self._too_large_bytes is None or room_bytes >= self._too_large_bytes

    def upcoming(self, count: int) -> list[Entries]:
        found = list(map(self._chunk_entries.of, islice(self._missed, count)))
        turn = range(self._next_in_turn, min(self._next_in_turn + count - len(found), self._count))
        return [*found, *map(self._chunk_entries.of, turn)]

    def _fits(self, entries: Entries, room_bytes: int) -> bool:
        need = self._resident_set.bytes_of(entries)
        fits = need <= room_bytes
        self._too_large_bytes = None if fits else need
        return fits
