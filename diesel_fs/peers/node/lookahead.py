"""Which chunks a node should fetch ahead, and how many at a time. Does no I/O and never waits.

The masters know each reader's position in its order, up to a second late. This module measures how
fast readers advance, and chooses this node's chunks that are read within `PREFETCH_S`, the soonest
first. A *time* of a read is its position in the order, no clock.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .chunk_future import ChunkFuture
from .ledger import Ledger

PREFETCH_S = 4.0
"""How far ahead of readers chunks are fetched: positions are up to a second old, and a fetch may
take seconds."""

PREFETCH_DIVISOR = 8
"""Chunks that were fetched ahead and not read yet take at most the memory divided by this."""

RATE_PERIOD_S = 2.0
"""The rate is measured over this time or more: positions come once a second."""

_CHUNKS_MAX = 32  # considered at each exchange; a decision takes 50 us
_RATE_WEIGHT = 0.5


class Lookahead:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._measured_s = 0.0
        self._measured_left = 0
        self._reads_per_s = 0.0  # of one reader, smoothed; 0 until measured
        self._ahead: dict[int, int] = {}  # fetched ahead and unread chunks: time of the first read

    def begin(self, future: ChunkFuture | None, now_s: float) -> None:
        """`future` None: unknown."""
        self._ahead.clear()
        self._measured_s = now_s
        self._measured_left = 0 if future is None else future.uses.left

    def switch_version(self) -> None:
        self._ahead.clear()
        self._reads_per_s = 0.0

    def move_readers(
        self, future: ChunkFuture, positions: Sequence[int], now_s: float
    ) -> npt.NDArray[np.int64] | None:
        """Positions may go back. Returns the chunks that readers have passed; None if no reader has
        moved."""
        uses = future.uses
        passed = [
            uses.seek(reader, position).astype(np.int64)
            for reader, position in enumerate(positions)
            if position != uses.position(reader)
        ]
        if not passed:
            return None
        seconds = now_s - self._measured_s
        if seconds >= RATE_PERIOD_S and uses.ranks:
            rate = max(self._measured_left - uses.left, 0) / uses.ranks / seconds
            self._reads_per_s += _RATE_WEIGHT * (rate - self._reads_per_s)
            self._measured_s, self._measured_left = now_s, uses.left
        return np.concatenate(passed)

    def next_chunks(self, future: ChunkFuture) -> list[int]:
        """The soonest chunks within the limits. They count as fetched ahead from now on."""
        now, uses, ledger = future.uses.now, future.uses, self._ledger
        ahead = np.array([*self._ahead], np.int64)
        times = dict(zip(ahead.tolist(), uses.next_time(ahead).tolist(), strict=True))
        self._ahead = {
            chunk: time
            for chunk, time in self._ahead.items()
            if time == times[chunk] and time > now and ledger.present[chunk]
        }
        room_bytes = ledger.room.memory_bytes // PREFETCH_DIVISOR
        room_bytes -= sum(ledger.sizes[chunk] for chunk in self._ahead)
        mine = np.flatnonzero(ledger.owned & ~ledger.held)
        before = now + int(PREFETCH_S * self._reads_per_s)
        soonest = future.soonest(mine, before)[:_CHUNKS_MAX]
        some = []
        for chunk, time in zip(soonest.tolist(), uses.next_time(soonest).tolist(), strict=True):
            room_bytes -= ledger.sizes[chunk]
            if room_bytes < 0:
                break
            some.append(chunk)
            self._ahead[chunk] = time
        return some
