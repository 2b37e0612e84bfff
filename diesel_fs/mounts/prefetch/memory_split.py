"""Takes over the importance of entries, and divides the memory by it, as iCache does (HPCA 2023).

Programs may report how important each entry is: how likely it is that the next epoch reads it
again. The least important unclaimed entries are dropped first (`eviction.py`), and only for files
that a reader comes to soon: the memory keeps the most important entries (iCache's H-cache).

A sampler may accept resident entries of low importance in place of others that would have to be
loaded. With `keeps_important` (`--evict importance`) the memory then has two parts. Their sizes are
proportional to how often readers access entries of high and of low importance (section III-A). The
second part (the L-cache) keeps the entries of low importance that were read last. iCache's packages
of such entries are chunks here (`orders/importance.py`).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...orders.plan import Entries, EntryOrder
from .memory import Memory
from .streams.units import Columns

HIGH_FIRST, ACCESSES_MIN, ACCESSES_MAX = 9.0, 1 << 10, 1 << 17
"""Before any access is counted, nine in ten are assumed to be to important entries, as in iCache
(section V-A): the counts begin with 9 * ACCESSES_MIN and ACCESSES_MIN. They are halved when their
sum exceeds ACCESSES_MAX, so that older accesses count less."""


@dataclass(slots=True)
class AccessCounts:
    """Counts accesses of readers to entries of high and of low importance."""

    high: float = HIGH_FIRST * ACCESSES_MIN
    low: float = float(ACCESSES_MIN)

    def add(self, high: int, low: int) -> None:
        self.high += high
        self.low += low
        if self.high + self.low > ACCESSES_MAX:
            self.high /= 2
            self.low /= 2

    def low_part(self) -> float:
        """The part of the memory (0 to 1) for entries of low importance."""
        return self.low / (self.high + self.low)


class Importances:
    """The importance of entries, and the division of the memory that follows from it."""

    def __init__(self, columns: Columns, memory: Memory, *, divides: bool) -> None:
        """`divides`: whether the memory has two parts (`keeps_important`, see the module)."""
        self._columns = columns
        self._memory = memory
        self._divides = divides
        self._counts = AccessCounts()
        self._has_substitutes = False
        self._valued = 0  # `heap.changes` at the last `take_chunk_values`

    def set(
        self,
        entries: EntryOrder,
        values: npt.NDArray[np.float32],
        *,
        more: bool = False,
        job: str = "",
        benefit: float = 1.0,
        substitutes: bool = False,
    ) -> int:
        """Set the importance of entries, one number for each: unclaimed entries of less importance
        are dropped first. Returns the number of jobs that have set any.

        `more`: further calls set the rest. Several jobs are distinguished by `job`, and merged by
        their `benefit` (`cache/policies/importance.py`). `substitutes`: the job accepts resident
        entries of low importance in place of others. Raises UsageError for numbers outside the
        dataset, and for NaN, infinite and negative values.
        """
        jobs = self._memory.resident_set.eviction.set_importances(
            self._columns.checked(entries), values, more=more, job=job, benefit=benefit
        )
        self._has_substitutes = substitutes
        self._divide()
        return jobs

    def take_chunk_values(self) -> npt.NDArray[np.float32] | None:
        """By chunk: the sum of the importances of its entries, that is how many of them an epoch is
        likely to read, without the important ones that this mount keeps. The task's master gets
        these values. None if no importance has changed since the last call."""
        heap = self._memory.resident_set.eviction.heap
        if heap is None or heap.changes == self._valued:
            return None
        self._valued = heap.changes
        chunk = self._columns.chunk
        everything = np.arange(len(chunk), dtype=np.uint32)
        values = heap.importance(everything)
        if self._divides:
            values[heap.is_high(everything)] = 0
        is_here = chunk >= 0
        count = self._columns.chunk_count
        return np.bincount(chunk[is_here], values[is_here], count).astype(np.float32)

    def note_accesses(self, passed: Entries) -> None:
        """Note that readers have read these entries, and divide the memory anew."""
        heap = self._memory.resident_set.eviction.heap
        if not self._divides or heap is None or not len(passed):
            return
        high = int(np.count_nonzero(heap.is_high(passed)))
        self._counts.add(high, len(passed) - high)
        self._divide()

    def _divide(self) -> None:
        part = self._counts.low_part() if self._divides and self._has_substitutes else 0.0
        low_bytes_max = int(self._memory.contents_bytes() * part)
        self._memory.resident_set.eviction.low_bytes_max = low_bytes_max
