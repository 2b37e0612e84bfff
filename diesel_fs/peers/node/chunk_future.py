"""The reads of each chunk that are still to come, and when it pays to fetch a whole chunk. Does no
I/O.

`plan/task_plan.py` makes a `ChunkFuture`, in a thread, when the orders of the task's readers are
known; the eviction policy `plan` chooses victims by it. `replacement.py` asks it how many reads
make up for the fetch of a chunk, into memory or to the disk. A *time* is a position in the readers'
orders (`orders/future.py`), no clock.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import numpy.typing as npt

from ...orders.future import NEVER, FutureUses, Units

READ_FRACTION_MIN = 0.75
"""A chunk that would replace another is fetched whole only if this part of its live bytes will be
read before the other is needed again (`PEERS.md`, section 2). In a full shuffle fetching would read
much more from the store than readers want, and time alone would not show that if the store is slow
to answer."""

Cost = Callable[[int], float]
"""A function that gives the seconds for one read of `n` bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkFuture:
    """Future reads of each chunk of a version."""

    uses: FutureUses
    """Reads on all nodes: the owner of a chunk serves all of its reads."""
    live_bytes: npt.NDArray[np.float64]
    """Bytes of each chunk that files of this version have."""
    read_bytes: npt.NDArray[np.float64]
    """Bytes that one read of a chunk takes: for each chunk the mean over its files."""

    def uses_min(
        self, chunk: int, replaced_bytes: Sequence[int], size: int, cost: Cost, *, is_stored: bool
    ) -> int:
        """The number of reads of a chunk that cost as much as fetching it now, and fetching later
        the chunks that it replaces (of the sizes `replaced_bytes`) again. `size`: of the chunk.
        `is_stored`: it would come from the store; then at least `whole_uses` are needed, so that
        the store does not send bytes that nobody reads."""
        each_s = cost(int(self.read_bytes[chunk]))
        fetch_s = cost(size) + sum(map(cost, replaced_bytes))
        enough = ceil(fetch_s / each_s) if each_s > 0 else 1
        return max(enough, self.whole_uses(chunk) if is_stored else 1)

    def is_worth_room(self, chunk: int) -> bool:
        """Whether most of the chunk will be read, so that it may be fetched ahead into free
        room."""
        return int(self.uses.uses_left(np.array([chunk]))[0]) >= self.whole_uses(chunk)

    def needed(self, chunks: Units) -> npt.NDArray[np.bool_]:
        """For each of these chunks, whether any read of it is still to come."""
        needed: npt.NDArray[np.bool_] = self.uses.uses_left(chunks) > 0
        return needed

    def soonest(self, chunks: Units, before: int) -> npt.NDArray[np.int64]:
        """Those of these chunks whose next read is before the time `before`, the soonest first."""
        times = self.uses.next_time(chunks)
        places = np.flatnonzero(times < min(before, NEVER))
        return np.asarray(chunks, np.int64)[places[np.argsort(times[places], kind="stable")]]

    def whole_uses(self, chunk: int) -> int:
        """The number of reads that take `READ_FRACTION_MIN` of a chunk's live bytes; at least 1."""
        each = float(self.read_bytes[chunk])
        return max(ceil(READ_FRACTION_MIN * float(self.live_bytes[chunk]) / each), 1) if each else 1
