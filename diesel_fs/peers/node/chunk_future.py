"""The reads of each chunk that are still to come, and when it pays to fetch a whole chunk. No I/O.

`plan/task_plan.py` makes a `ChunkFuture`, in a thread. A *time* is a position in the readers'
orders (`orders/future.py`), no clock.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import numpy.typing as npt

from ...orders.future import NEVER, FutureUses, Units

READ_FRACTION_MIN = 0.75
"""A chunk replaces another only if this part of its live bytes will be read before the other is
needed again. Otherwise a full shuffle would read much more from the store than readers want: if the
store is slow to answer, a comparison of times alone allows that."""

Cost = Callable[[int], float]
"""Seconds for one read of `n` bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkFuture:
    uses: FutureUses
    """Reads on all nodes: a chunk's owner serves all of its reads."""
    live_bytes: npt.NDArray[np.float64]
    """Bytes of each chunk that belong to files of this version."""
    read_bytes: npt.NDArray[np.float64]
    """Mean bytes of one read of each chunk."""

    def uses_min(
        self, chunk: int, replaced_bytes: Sequence[int], size: int, cost: Cost, *, is_stored: bool
    ) -> int:
        """How many reads of a chunk cost as much as fetching it (`size` bytes) now, and fetching
        the chunks that it replaces (`replaced_bytes`) again later. If it comes from the store
        (`is_stored`), at least `whole_uses`, so that the store sends no bytes that nobody reads."""
        each_s = cost(int(self.read_bytes[chunk]))
        fetch_s = cost(size) + sum(map(cost, replaced_bytes))
        enough = ceil(fetch_s / each_s) if each_s > 0 else 1
        return max(enough, self.whole_uses(chunk) if is_stored else 1)

    def is_worth_room(self, chunk: int) -> bool:
        return int(self.uses.uses_left(np.array([chunk]))[0]) >= self.whole_uses(chunk)

    def needed(self, chunks: Units) -> npt.NDArray[np.bool_]:
        needed: npt.NDArray[np.bool_] = self.uses.uses_left(chunks) > 0
        return needed

    def soonest(self, chunks: Units, before: int) -> npt.NDArray[np.int64]:
        """The chunks whose next read is before the time `before`, the soonest first."""
        times = self.uses.next_time(chunks)
        places = np.flatnonzero(times < min(before, NEVER))
        return np.asarray(chunks, np.int64)[places[np.argsort(times[places], kind="stable")]]

    def whole_uses(self, chunk: int) -> int:
        """How many reads take `READ_FRACTION_MIN` of a chunk's live bytes; at least 1."""
        each = float(self.read_bytes[chunk])
        return max(ceil(READ_FRACTION_MIN * float(self.live_bytes[chunk]) / each), 1) if each else 1
