"""`ImportanceHeap` finds the entries that should leave a full cache first: those that training
finds least important (iCache, HPCA 2023, section III-B). Pure; for one thread.

A heap is columns instead of objects. An entry's **level** is the upper half of its importance as a
float of 4 bytes; such bits have the order of the numbers, and importances that differ by more than
a 128th have different levels. All entries are sorted by level once (a radix sort, in blocks). A
count of cached entries for each level leads to the least important ones, so an insertion only
increases a count. New importances go into a second table of levels, iCache's **shadow**, which is
sorted block by block (`build_some`) while the first one serves, and then replaces it. The columns
take 7 bytes for each entry of the dataset, 13 while there are two tables.

**Several jobs** that train on one dataset give the same sample different importances, and lower
ones the longer a job has trained. So they are merged by percentile (section III-D): a sample's
merged importance is the sum, over all jobs, of the job's benefit times the share of all samples
that are less important to it. A job's *benefit* is the factor by which the cache speeds up its
batches. A job's list takes 2 bytes for each entry.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...errors import UsageError
from ...orders.importance import HIGH_DIVISOR

Entries = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.bool_]
_Levels = npt.NDArray[np.uint16]

LEVELS = 1 << 15
"""Numbers that are not negative have 15 bits in their upper half."""

BLOCK_ENTRIES = 1 << 20
"""Entries that are sorted at once: some 10 ms."""

BENEFIT_MIN = 1.5
"""A job that gains less from the cache does not influence which samples stay, as in iCache."""
JOBS_MAX, SILENT_TELLS = 8, 16
"""A job beyond `JOBS_MAX` replaces the oldest list. A job that sends nothing while the others send
`SILENT_TELLS` lists counts as ended, and its list is removed."""

_ONE = np.int64(1)  # of the counts' type: else `ufunc.at` is twenty times as slow


@dataclass(slots=True)
class _Table:
    """`orders` and `starts` have a block for each `BLOCK_ENTRIES`, as far as the table is
    sorted."""

    levels: _Levels
    orders: list[Entries] = field(default_factory=list)
    starts: list[npt.NDArray[np.int32]] = field(default_factory=list)

    @property
    def is_sorted(self) -> bool:
        return len(self.orders) * BLOCK_ENTRIES >= len(self.levels)

    def sort_block(self) -> None:
        first = len(self.orders) * BLOCK_ENTRIES
        levels = self.levels[first : first + BLOCK_ENTRIES]
        order = np.argsort(levels, kind="stable").astype(np.uint32)
        ends = np.cumsum(np.bincount(levels, minlength=LEVELS))
        self.orders.append(order + np.uint32(first))
        self.starts.append(np.concatenate(([0], ends)).astype(np.int32))

    def entries_of(self, levels: npt.NDArray[np.int64]) -> Entries:
        """The lowest level comes first in each block."""
        found = []
        for order, starts in zip(self.orders, self.starts, strict=True):
            counts = starts[levels + 1] - starts[levels]
            ends = np.cumsum(counts)
            shift = np.repeat(starts[levels] - (ends - counts), counts)
            found.append(order[np.arange(len(shift)) + shift])
        return np.concatenate(found)


def check_importances(values: npt.NDArray[np.float32]) -> None:
    """Raises UsageError if any is NaN, infinite or negative."""
    bad = np.flatnonzero(~np.isfinite(values) | (values < 0))
    if len(bad):
        raise UsageError(
            f"bad importance {values[bad[0]]}: it is a finite number, and not negative"
        )


class ImportanceHeap:
    """The entries that a cache has and may give up: those *in* the heap."""

    def __init__(self, count: int, sizes: npt.NDArray[np.uint32] | None = None) -> None:
        """Entries are numbered from 0. `sizes` has the size of each in the cache, in any unit
        (default: 1). At first all have the importance 0, and none is in the heap."""
        self._sizes = sizes
        self._in: Mask = np.zeros(count, np.bool_)
        self._table = _Table(np.zeros(count, np.uint16))
        while not self._table.is_sorted:
            self._table.sort_block()
        self._shadow: _Table | None = None
        self.changes = 0
        """How often new importances have taken effect."""
        self._is_complete = True  # the shadow has its whole list
        self._counts = np.zeros(LEVELS, np.int64)  # of entries that are in, by level
        self._sums = np.zeros(LEVELS, np.int64)  # of their sizes
        self._high_level = 0  # entries above it are of high importance

    def set_importances(
        self, entries: Entries, values: npt.NDArray[np.float32], *, more: bool = False
    ) -> None:
        """Set the importance of entries; the others keep theirs. The change takes effect when
        `build_some` returns False. `more`: further calls follow for the same list, and nothing is
        built before the last one. Raises UsageError for NaN, infinite and negative numbers, and
        then changes nothing."""
        check_importances(values)
        levels = (self._shadow or self._table).levels
        if self._shadow is None or self._shadow.orders:
            self._shadow = _Table(levels.copy())
        self._shadow.levels[entries] = _levels_of(values)
        self._is_complete = not more

    def build_some(self) -> bool:
        """Do some 10 ms of the work that new importances cause. Returns whether work was left."""
        shadow = self._shadow
        if shadow is None or not self._is_complete:
            return False
        if not shadow.is_sorted:
            shadow.sort_block()
            return True
        self._table, self._shadow = shadow, None
        self.changes += 1
        members = np.flatnonzero(self._in).astype(np.uint32)
        levels = shadow.levels[members]
        self._counts = np.bincount(levels, minlength=LEVELS)
        self._sums = np.bincount(levels, self._size(members), LEVELS).astype(np.int64)
        self._high_level = self._limit_of_low()
        return False

    def build_first(self) -> None:
        """Build the first importances at once: to decide without any would be worse than to
        wait."""
        while not self.changes and self.build_some():
            pass

    @property
    def bytes_max(self) -> int:
        """The memory while there are two tables."""
        count = len(self._in)
        one = count * (np.dtype(np.uint16).itemsize + np.dtype(np.uint32).itemsize)
        return self._in.nbytes + 2 * one

    def importance(self, entries: Entries) -> npt.NDArray[np.float32]:
        """The importance, rounded down by at most a 128th."""
        return (self._table.levels[entries].astype(np.uint32) << 16).view(np.float32)

    def is_high(self, entries: Entries) -> Mask:
        """Whether each entry is among the most important fifth of all."""
        found: Mask = self._table.levels[entries] > self._high_level
        return found

    def __len__(self) -> int:
        return int(self._counts.sum())

    def insert(self, entries: Entries) -> None:
        """Add entries, none twice, which the cache may give up from now on. Ignores entries that
        are in."""
        new = entries[~self._in[entries]]
        self._in[new] = True
        levels = self._table.levels[new]
        np.add.at(self._counts, levels, _ONE)
        np.add.at(self._sums, levels, self._size(new))

    def remove(self, entries: Entries) -> None:
        """Remove entries, none twice, which the cache has given up or must keep from now on.
        Ignores entries that are not in."""
        old = entries[self._in[entries]]
        self._in[old] = False
        levels = self._table.levels[old]
        np.subtract.at(self._counts, levels, _ONE)
        np.subtract.at(self._sums, levels, self._size(old))

    @property
    def zero_count(self) -> int:
        return int(self._counts[0])

    @property
    def low_size(self) -> int:
        """The size of all entries that are in and not of high importance."""
        return int(self._sums[: self._high_level + 1].sum())

    def least(self, count: int, *, high: bool = False) -> Entries:
        """At most `count` of the entries that are in, the least important first; within a level,
        the lowest number first. They stay in the heap. `high`: only those of high importance."""
        levels = np.flatnonzero(self._counts)
        if high:
            levels = levels[levels > self._high_level]
        enough = int(np.searchsorted(np.cumsum(self._counts[levels]), count)) + 1
        entries = self._table.entries_of(levels[:enough])
        entries = entries[self._in[entries]]
        order = np.argsort(self._table.levels[entries], kind="stable")
        return entries[order[:count]]

    def _size(self, entries: Entries) -> npt.NDArray[np.int64]:
        if self._sizes is None:
            return np.ones(len(entries), np.int64)
        return self._sizes[entries].astype(np.int64)

    def _limit_of_low(self) -> int:
        """The lowest level that has at most a fifth of all entries above it."""
        counts = np.bincount(self._table.levels, minlength=LEVELS)
        above = counts[::-1].cumsum()
        return LEVELS - 1 - int(np.searchsorted(above, len(self._in) // HIGH_DIVISOR, "right"))


@dataclass(slots=True)
class _JobList:
    levels: _Levels
    benefit: float
    last_tell: int  # the number of its last list among those of all jobs

    def percentiles(self) -> npt.NDArray[np.float32]:
        """The share of all entries that are less important to the job. Equally important entries
        count half."""
        counts = np.bincount(self.levels, minlength=LEVELS)
        below = np.cumsum(counts) - counts / 2
        shares: npt.NDArray[np.float32] = (below / len(self.levels)).astype(np.float32)
        return shares[self.levels]


class JobImportances:
    def __init__(self, count: int) -> None:
        self._count = count  # entries of the dataset
        self._jobs: dict[str, _JobList] = {}  # the job that sent its list last is last
        self._tells = 0  # whole lists that jobs have sent

    def __len__(self) -> int:
        return len(self._jobs)

    def tell(
        self,
        job: str,
        entries: Entries,
        values: npt.NDArray[np.float32],
        benefit: float,
        *,
        more: bool = False,
    ) -> None:
        """As `ImportanceHeap.set_importances`, for the list of one job, under any name for it."""
        check_importances(values)
        self._tells += not more
        found = self._jobs.pop(job, None)
        if found is None:
            found = _JobList(np.zeros(self._count, np.uint16), benefit, self._tells)
        found.levels[entries] = _levels_of(values)
        found.benefit, found.last_tell = benefit, self._tells
        self._jobs[job] = found
        for name, each in tuple(self._jobs.items()):
            if len(self._jobs) > JOBS_MAX or self._tells - each.last_tell > SILENT_TELLS:
                del self._jobs[name]

    def merged(self) -> npt.NDArray[np.float32]:
        """If no job's benefit reaches `BENEFIT_MIN`, all jobs count the same."""
        jobs = [each for each in self._jobs.values() if each.benefit >= BENEFIT_MIN]
        weights = [each.benefit for each in jobs] or [1.0] * len(self._jobs)
        found = np.zeros(self._count, np.float32)
        for each, weight in zip(jobs or self._jobs.values(), weights, strict=True):
            found += np.float32(weight) * each.percentiles()
        return found


def _levels_of(values: npt.NDArray[np.float32]) -> _Levels:
    # The sum turns -0 into 0
    return ((values + np.float32(0)).view(np.uint32) >> 16).astype(np.uint16)
