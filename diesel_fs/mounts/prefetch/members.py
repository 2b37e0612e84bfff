"""The entries of each chunk, and how often a chunk may be pushed out of turn.

Owned here: `ChunkEntries`. Used by one thread.
"""

import math

import numpy as np
import numpy.typing as npt

from ...orders.plan import Entries
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
