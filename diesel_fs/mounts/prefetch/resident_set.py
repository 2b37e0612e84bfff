"""Keeps account of which entries are resident (in the page cache), claimed, and dropped first.

The kernel does not tell what its page cache holds, so this is what the planner believes. An entry
is *claimed* by a stream (a reader with a known order) from the moment its push is decided until the
reader has passed it; a claimed entry is not dropped. `planner.py` decides when something must be
dropped, `stream_tracker.py` what is claimed. Used by one thread.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...cache.policies.importance import ImportanceHeap, JobImportances, check_importances
from ...orders.plan import NO_ENTRIES, Entries
from .units import PAGE_BYTES, Columns

Mask = npt.NDArray[np.bool_]
NextUse = Callable[[Entries], npt.NDArray[np.float64]]
"""Says how far ahead of its reader each entry will be read next; infinite where no stream reads
it."""

READ_BYTES_MAX = 1 << 20
LATELY_S = 1.0
"""A file of at most `READ_BYTES_MAX` that a READ brought into the page cache at most `LATELY_S` ago
need not be pushed."""

PIECE_ENTRIES = 256
"""How many candidates for dropping are looked at together: about as many as one unit has."""

LEAST_LOOKED_AT, LEAST_LOOKED_AT_MAX = 8, 512
"""Of so many pieces of the least important entries, those that a reader comes to go last. When an
epoch has gone on for a while, it comes to all of these; then four times as many are looked at, up
to a limit that takes some 30 ms."""

LEAST_KEPT_FROM = 200_000
"""Of so many entries, those that were looked at go one piece after the other: to find them takes a
millisecond."""

_ONE = np.int32(1)
"""One claim, of their column's type: without conversions `ufunc.at` is twenty times as fast."""


@dataclass(slots=True)
class Clock:
    """The time of the last report. Times in a `ResidentSet` count from the first one, so that four
    bytes are enough for each."""

    start_s: float = math.nan
    now_s: float = 0.0

    def tick(self, now_s: float) -> None:
        """A report or a question has come."""
        if math.isnan(self.start_s):
            self.start_s = now_s
        self.now_s = now_s

    def since_start_s(self, now_s: float) -> float:
        """A time as `ResidentSet` counts it."""
        return now_s - self.start_s

    def inherit(self, old: "Clock") -> None:
        """Continue with the times of another version's planner."""
        self.start_s, self.now_s = old.start_s, old.now_s


class ResidentSet:
    """The resident entries (see the module).

    The columns that have a value for each entry begin with zeros, so the memory of those that are
    not used is never taken.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._count = count = len(columns.pages)
        self.resident: Mask = np.zeros(count, np.bool_)
        self.claims = np.zeros(count, np.int32)  # how many there are of each entry
        self.bytes = 0  # of resident entries, in whole pages
        self.unclaimed_bytes = 0  # of resident entries that no stream claims
        self.pushed_s = np.zeros(count, np.float32)  # when each was pushed last
        # When a READ last brought each, and `LATELY_S` on top: 0 is long ago.
        self._read_s = np.zeros(count, np.float32)
        self._leaving: Mask = np.zeros(count, np.bool_)  # by `victims`, not dropped yet
        # Of unclaimed resident entries that are not leaving; None: nothing is known of importance.
        self.heap: ImportanceHeap | None = None
        self._jobs = JobImportances(self._count)
        self._passed: deque[Entries] = deque()  # by readers, and unclaimed then; oldest first
        self._passed_count = 0  # of entries in it
        self.low_bytes_max = 0
        """For entries of low importance, before those of high importance must make room."""
        # Of low importance, the first that were passed. Those that fall out are found by the heap.
        self._low_passed: deque[Entries] = deque(maxlen=2 * count // PIECE_ENTRIES + 2)
        # The next victims of any importance, and of high importance, as far as they are known.
        self._least = {False: NO_ENTRIES, True: NO_ENTRIES}
        self._ranked = NO_ENTRIES  # the next victims, when there are none in `_passed`

    def inherit(self, old: "ResidentSet", was: npt.NDArray[np.int32]) -> None:
        """Take over what the set of another version believes; `was` gives the index that each entry
        had there (-1: none)."""
        entries = np.flatnonzero(was >= 0)
        before = was[entries]
        self.resident[entries] = old.resident[before]
        self.bytes = self.unclaimed_bytes = self.bytes_of(
            np.flatnonzero(self.resident).astype(np.uint32)
        )
        self.pushed_s[entries] = old.pushed_s[before]
        self._read_s[entries] = old._read_s[before]
        if old.heap is not None:  # until jobs tell what matters in this version
            known = old.heap.importance(before.astype(np.uint32))
            heap = self._make_heap()
            heap.set_importances(entries.astype(np.uint32), known)
            heap.build_first()

    def bytes_of(self, entries: Entries) -> int:
        """The bytes that these entries take. None may be named twice."""
        return self._columns.bytes_of(entries)

    def missing(self, entries: Entries) -> Entries:
        """The entries among these that have content and are not resident."""
        return entries[~self.resident[entries] & (self._columns.pages[entries] > 0)]

    def add(self, entries: Entries) -> None:
        """Note that these entries are resident now. None may be named twice."""
        new = self.missing(entries)
        self.resident[new] = True
        self.bytes += self.bytes_of(new)
        self._free(new[self.claims[new] == 0])

    def note_read(self, entry: int, at_s: float) -> None:
        """Note that a READ has brought an entry's content into the page cache."""
        if int(self._columns.pages[entry]) * PAGE_BYTES <= READ_BYTES_MAX:
            self._read_s[entry] = at_s + LATELY_S

    def split_recent_reads(self, entries: Entries, now_s: float) -> tuple[Entries, Entries]:
        """Split these entries: those to push, and those that READs have brought lately, which are
        noted as resident."""
        lately = now_s < self._read_s[entries]
        if not lately.any():
            return entries, NO_ENTRIES
        self.add(entries[lately])
        return entries[~lately], entries[lately]

    def remove(self, entries: Entries) -> None:
        """Note that these entries are not resident any more. None may be named twice."""
        self._read_s[entries] = 0
        removed = entries[self.resident[entries]]
        self.resident[removed] = False
        self.bytes -= self.bytes_of(removed)
        self._take(removed[self.claims[removed] == 0])

    def claim(self, entries: Entries) -> None:
        """Add a claim for each time that an entry is named."""
        first_claimed = np.unique(entries[(self.claims[entries] == 0) & self.resident[entries]])
        self._take(first_claimed)
        np.add.at(self.claims, entries.astype(np.intp), _ONE)

    def unclaim(self, entries: Entries, *, passed: bool) -> None:
        """Remove a claim for each time that an entry is named. `passed`: those without another
        claim are dropped first, in this order (readers have passed them)."""
        if not len(entries):
            return
        np.subtract.at(self.claims, entries.astype(np.intp), _ONE)
        free = entries[(self.claims[entries] == 0) & self.resident[entries]]
        self._free(np.unique(free))
        if not passed or not len(free):
            return
        if self._passed_count > 2 * self._count:
            # Nothing was dropped for long. `_rank` finds these entries, too.
            self._passed.clear()
            self._passed_count = 0
        for start in range(0, len(free), PIECE_ENTRIES):
            self._passed.append(free[start : start + PIECE_ENTRIES])
        self._passed_count += len(free)

    def set_importances(
        self,
        entries: Entries,
        values: npt.NDArray[np.float32],
        *,
        more: bool = False,
        job: str = "",
        benefit: float = 1.0,
    ) -> int:
        """Set the importance of entries, by which unclaimed ones are kept longer; 0 if never set.
        Returns how many jobs have set any.

        `more`: others follow. `benefit`: how many times as fast the job's batches come with the
        cache. Raises UsageError for NaN, infinite and negative numbers.
        """
        check_importances(values)
        heap, jobs = self._make_heap(), len(self._jobs)
        self._least = {False: NO_ENTRIES, True: NO_ENTRIES}
        self._jobs.tell(job, entries, values, benefit, more=more)
        if max(jobs, len(self._jobs)) == 1:
            heap.set_importances(entries, values, more=more)
            heap.build_first()
        elif not more:
            everything = np.arange(self._count, dtype=np.uint32)
            heap.set_importances(everything, self._jobs.merged())
        return len(self._jobs)

    def _make_heap(self) -> ImportanceHeap:
        """The heap, which is made when something is known of importance."""
        if self.heap is None:
            self.heap = ImportanceHeap(self._count, self._columns.pages)
            free = self.resident & (self.claims == 0) & ~self._leaving
            self.heap.insert(np.flatnonzero(free).astype(np.uint32))
        return self.heap

    def _free(self, entries: Entries) -> None:
        """These resident entries have no claims (any more)."""
        self.unclaimed_bytes += self.bytes_of(entries)
        if self.heap is not None:
            self.heap.insert(entries[~self._leaving[entries]])

    def _take(self, entries: Entries) -> None:
        """These entries without claims get some, or are not resident any more."""
        self.unclaimed_bytes -= self.bytes_of(entries)
        if self.heap is not None:
            self.heap.remove(entries)

    def victims(self, need_bytes: int, next_use: NextUse) -> Entries:
        """Unclaimed entries to drop, of at least `need_bytes` if there are as many. The caller then
        reports `victims_dropped`.

        Entries of the importance 0 come first: those that readers have passed, oldest first, then
        those that will be read last. Then come those of low importance as long as they take more
        than `low_bytes_max`, and the least of high importance.
        """
        victims = [NO_ENTRIES]
        while need_bytes > 0 and self.unclaimed_bytes > 0:
            piece = self._next_victims(next_use)
            if piece is None:
                break
            self._leaving[piece] = True
            if self.heap is not None:
                self.heap.remove(piece)
            victims.append(piece)
            need_bytes -= self.bytes_of(piece)
        return np.concatenate(victims)

    def victims_dropped(self, victims: Entries) -> None:
        """Note that the victims have been dropped."""
        self._leaving[victims] = False
        self.remove(victims)

    def _next_victims(self, next_use: NextUse) -> Entries | None:
        heap = self.heap
        while self._passed:
            piece = self._passed.popleft()
            self._passed_count -= len(piece)
            piece = piece[self._evictable(piece)]
            if heap is not None:
                is_zero = heap.importance(piece) == 0
                if not is_zero.all():
                    self._low_passed.append(piece[~is_zero])
                piece = piece[is_zero]
            if len(piece):
                return np.unique(piece)
        for _ in range(2 if heap is None or heap.zero_count else 0):
            while len(self._ranked):
                piece, self._ranked = np.split(self._ranked, [PIECE_ENTRIES])
                piece = piece[self._evictable(piece)]
                if heap is not None:
                    piece = piece[heap.importance(piece) == 0]
                if len(piece):
                    return piece
            self._ranked = self._rank(next_use)
        return None if heap is None else self._least_important(heap, next_use)

    def _least_important(self, heap: ImportanceHeap, next_use: NextUse) -> Entries | None:
        """The least important entries; where some of low importance are to be kept
        (`low_bytes_max`) and there are more, those of them that were passed first. What this epoch
        still reads goes last: it is surely read."""
        kinds = [False] if not self.low_bytes_max else [False, True]
        if self.low_bytes_max:
            if heap.low_size * PAGE_BYTES <= self.low_bytes_max:
                kinds.reverse()
            else:
                while self._low_passed:
                    piece = np.unique(self._low_passed.popleft())
                    piece = piece[self._evictable(piece) & ~heap.is_high(piece)]
                    piece = piece[np.isinf(next_use(piece))]
                    if len(piece):
                        return piece
        else:
            self._low_passed.clear()
        needed = NO_ENTRIES
        for high in kinds:
            found = self._least[high]
            found = found[self._evictable(found)]
            pieces = LEAST_LOOKED_AT
            while not len(found):
                least = heap.least(pieces * PIECE_ENTRIES, high=high)
                found = least[np.isinf(next_use(least))]
                needed = needed if len(needed) else least
                if len(least) < pieces * PIECE_ENTRIES or pieces >= LEAST_LOOKED_AT_MAX:
                    break
                pieces *= 4
            if len(found):
                is_costly = pieces > LEAST_LOOKED_AT or len(heap) > LEAST_KEPT_FROM
                return self._first_piece(found, high=high, keeps_rest=is_costly)
        if not len(needed):
            return None
        return self._first_piece(needed, high=kinds[0], keeps_rest=len(heap) > LEAST_KEPT_FROM)

    def _first_piece(self, entries: Entries, *, high: bool, keeps_rest: bool) -> Entries:
        """The first of these entries. With `keeps_rest` the next calls get the others; what comes
        meanwhile may be much less important, so a small cache is looked at anew."""
        piece, left = np.split(entries, [PIECE_ENTRIES])
        self._least[high] = left if keeps_rest else NO_ENTRIES
        return piece

    def _evictable(self, entries: Entries) -> Mask:
        free: Mask = self.resident[entries] & (self.claims[entries] == 0) & ~self._leaving[entries]
        return free

    def _rank(self, next_use: NextUse) -> Entries:
        """All entries of the importance 0 that may be dropped, the first to be dropped first."""
        evictable = np.flatnonzero(self.resident & (self.claims == 0) & ~self._leaving)
        entries = evictable.astype(np.uint32)
        if self.heap is not None:
            entries = entries[self.heap.importance(entries) == 0]
        return entries[np.argsort(-next_use(entries), kind="stable")]
