"""Chooses which resident entries without claims (`resident_set.py`) are dropped first.

Entries of the importance 0 (all, until programs report others) come first, in this order:

1. entries that streams have given up, and entries that readers have passed and, by the known
   orders, do not come to again; in the order in which their claims ended;
2. other entries that no reader comes to;
3. the entry with the farthest next use (Belady's MIN; Lobster, ICPP 2022, section 4.4).

Entries of low importance follow as long as they take more than `low_bytes_max`, and then the least
important of high importance (`memory_split.py`). Among both, entries that this epoch still reads
are dropped last.
"""

from collections import deque
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ...cache.policies.importance import ImportanceHeap, JobImportances, check_importances
from ...orders.plan import NO_ENTRIES, Entries
from .streams.farthest_uses import FarthestUses
from .streams.units import PAGE_BYTES, Columns

Mask: TypeAlias = npt.NDArray[np.bool_]


class Uses(Protocol):
    """The known orders of all readers (`streams/stream_views.py`)."""

    def next_use(self, entries: Entries, /) -> npt.NDArray[np.float64]:
        """How many positions ahead of its reader each entry will be read next; infinite if no
        stream reads it."""
        ...

    def unneeded(self, is_candidate: Mask, /) -> Entries:
        """The entries among the candidates (by entry) that no stream reads."""
        ...

    @property
    def farthest(self) -> FarthestUses: ...


PIECE_ENTRIES = 256
"""Candidates are examined in pieces of this size, about that of a unit."""

BEHIND_DIVISOR = 256
"""The search for the farthest use goes from the ends of the orders towards the readers. Entries
that readers pass meanwhile may have farther uses than it still finds. Once they are a 256th of all,
the search begins again, which takes some milliseconds for a million entries."""

LEAST_LOOKED_AT, LEAST_LOOKED_AT_MAX = 8, 512
"""A search for the least important entries that no reader comes to any more begins with 8 pieces.
If readers still come to all of these, it examines four times as many, up to 512, which takes some
30 ms."""

LEAST_KEPT_FROM = 200_000
"""If there are more entries, a search takes a millisecond. So the next one begins only when all
that the last one found are dropped."""


class Eviction:
    def __init__(self, columns: Columns, resident: Mask, claims: npt.NDArray[np.int32]) -> None:
        """`resident` and `claims` are columns of the `ResidentSet`, which alone changes them."""
        self._columns = columns
        self._resident, self._claims = resident, claims
        self._count = count = len(resident)
        self._leaving: Mask = np.zeros(count, np.bool_)  # chosen, not dropped yet
        self.heap: ImportanceHeap | None = None
        """Unclaimed resident entries that are not leaving; None: no importance is known."""
        self._jobs = JobImportances(count)
        # Entries whose claims have ended, oldest first; and whether readers have passed them, so
        # that those with a further use stay
        self._released: deque[tuple[Entries, bool]] = deque()
        self._released_count = 0  # entries
        self.low_bytes_max = 0
        """If entries of low importance take no more, entries of high importance are dropped before
        them."""
        # Entries with an importance that readers have passed, oldest first. A full queue loses its
        # oldest piece; the heap still has those entries
        self._low_passed: deque[Entries] = deque(maxlen=2 * count // PIECE_ENTRIES + 2)
        # What a search has found to drop next among all (False), and of high importance (True)
        self._least = {False: NO_ENTRIES, True: NO_ENTRIES}
        self._found = NO_ENTRIES  # by the search for the farthest use
        # Entries that readers have passed since the search began, with a farther next use than it
        # still finds
        self._behind_edge = 0
        self._unneeded: Entries | None = None  # to drop next; None: still to be found

    def inherit(self, old: "Eviction", entries: Entries, before: Entries) -> None:
        """Take over importances of another version; `entries[i]` was `before[i]` there."""
        if old.heap is not None:  # until jobs report importances for this version
            heap = self._make_heap()
            heap.set_importances(entries, old.heap.importance(before))
            heap.build_first()

    def set_importances(
        self,
        entries: Entries,
        values: npt.NDArray[np.float32],
        *,
        more: bool = False,
        job: str = "",
        benefit: float = 1.0,
    ) -> int:
        """The more important an unclaimed entry is, the longer it is kept. Entries without a value
        have 0. `more`: the job sets further entries by the next calls. `benefit`: how many times as
        fast the job's batches arrive with the cache. Returns how many jobs have set any. Raises
        UsageError for NaN, infinite and negative numbers."""
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
        if self.heap is None:
            self.heap = ImportanceHeap(self._count, self._columns.pages)
            free = self._resident & (self._claims == 0) & ~self._leaving
            self.heap.insert(np.flatnonzero(free).astype(np.uint32))
        return self.heap

    # Changes

    def add(self, entries: Entries) -> None:
        """Note resident entries that have no claims (any more)."""
        if self.heap is not None:
            self.heap.insert(entries[~self._leaving[entries]])

    def remove(self, entries: Entries) -> None:
        """Note entries that get claims, or are not resident any more."""
        if self.heap is not None:
            self.heap.remove(entries)

    def note_released(self, entries: Entries, *, passed: bool) -> None:
        """Note that the claims of these entries have ended. `passed`: readers have read them, so
        their next use decides; otherwise they are dropped first, in this order."""
        if self._released_count > 2 * self._count:
            # Nothing was dropped for long. `_find_unneeded` finds these entries, too
            self._released.clear()
            self._released_count = 0
            self._unneeded = None
        for start in range(0, len(entries), PIECE_ENTRIES):
            self._released.append((entries[start : start + PIECE_ENTRIES], passed))
        self._released_count += len(entries)

    def note_new_orders(self) -> None:
        self._unneeded, self._found = None, NO_ENTRIES

    def note_dropped(self, entries: Entries) -> None:
        """Note that entries that `take_next` has chosen are being removed."""
        self._leaving[entries] = False

    # The order

    def take_next(
        self, need_bytes: int, uses: Uses, *, only_unneeded: bool = False
    ) -> Entries | None:
        """Choose the next entries to drop: no more than `need_bytes` require, often fewer. None if
        there are none. `only_unneeded`: none that a reader still comes to."""
        piece = self._find_released(need_bytes, uses)
        if piece is None:
            piece = self._find_unneeded(need_bytes, uses)
        if piece is None and not only_unneeded:
            piece = self._find_needed(need_bytes, uses)
        if piece is not None:
            self._leaving[piece] = True
            self.remove(piece)
        return piece

    def _find_released(self, need_bytes: int, uses: Uses) -> Entries | None:
        """The first entries of `_released` to drop. Those with a further use are left to
        `_find_needed`."""
        while self._released:
            piece, by_use = self._released.popleft()
            self._released_count -= len(piece)
            piece = piece[self._evictable(piece)]
            if self.heap is not None:
                is_zero = self.heap.importance(piece) == 0
                if not is_zero.all():
                    self._low_passed.append(piece[~is_zero])
                piece = piece[is_zero]
            if by_use and len(piece):
                next_use = uses.next_use(piece)
                is_needed = np.isfinite(next_use)
                is_behind = is_needed & (next_use >= uses.farthest.edge())
                self._behind_edge += int(np.count_nonzero(is_behind))
                piece = piece[~is_needed]
            if len(piece):
                piece, rest = self._enough(_distinct(piece), need_bytes)
                if len(rest):
                    self._released.appendleft((rest, by_use))
                    self._released_count += len(rest)
                return piece
        return None

    def _find_unneeded(self, need_bytes: int, uses: Uses) -> Entries | None:
        """Entries that no reader comes to any more. All entries are searched for them only if the
        orders have changed, or nothing else is left to drop."""
        if self._unneeded is None:
            self._unneeded = uses.unneeded(self._resident & (self._claims == 0) & ~self._leaving)
        while len(self._unneeded):
            piece, self._unneeded = np.split(self._unneeded, [PIECE_ENTRIES])
            piece = self._of_no_importance(piece[self._evictable(piece)])
            if len(piece):
                piece, rest = self._enough(piece, need_bytes)
                self._unneeded = np.concatenate([rest, self._unneeded])
                return piece
        return None

    def _find_needed(self, need_bytes: int, uses: Uses) -> Entries | None:
        """The entries with the farthest next use; if all entries without importance are claimed,
        the least important ones."""
        heap = self.heap
        if self._behind_edge >= max(self._count // BEHIND_DIVISOR, PIECE_ENTRIES):
            self._search_again(uses)
        for _ in range(2 if heap is None or heap.zero_count else 0):
            while (piece := self._next_found(uses)) is not None:
                piece = self._of_no_importance(piece[self._evictable(piece)])
                if len(piece):
                    piece, self._found = self._enough(piece, need_bytes)
                    return piece
            # Some may have lost their claims behind the search
            self._search_again(uses)
            if (piece := self._find_unneeded(need_bytes, uses)) is not None:
                return piece
        if heap is None:
            return None
        if not self.low_bytes_max:
            self._low_passed.clear()
            return self._least_important(heap, need_bytes, uses, [False])
        if heap.low_size * PAGE_BYTES <= self.low_bytes_max:
            return self._least_important(heap, need_bytes, uses, [True, False])
        low = self._first_low_passed(heap, need_bytes, uses)
        if low is None:
            return self._least_important(heap, need_bytes, uses, [False, True])
        return low

    def _search_again(self, uses: Uses) -> None:
        self._unneeded, self._found, self._behind_edge = None, NO_ENTRIES, 0
        uses.farthest.restart()

    def _next_found(self, uses: Uses) -> Entries | None:
        """What the search for the farthest use finds next, the farthest first; None at its end."""
        if len(self._found):
            found, self._found = self._found, NO_ENTRIES
            return found
        edge, offered = uses.farthest.edge(), uses.farthest.next()
        if offered is None:
            return None
        found = offered[self._evictable(offered)]
        # The others have a nearer use, too
        return _distinct(found[uses.next_use(found) >= edge - len(offered)])

    def _enough(self, entries: Entries, need_bytes: int) -> tuple[Entries, Entries]:
        """Split off the first entries that take `need_bytes`."""
        sizes = np.cumsum(self._columns.cost(entries))
        first, rest = np.split(entries, [int(np.searchsorted(sizes, need_bytes)) + 1])
        return first, rest

    def _of_no_importance(self, entries: Entries) -> Entries:
        return entries if self.heap is None else entries[self.heap.importance(entries) == 0]

    def _first_low_passed(
        self, heap: ImportanceHeap, need_bytes: int, uses: Uses
    ) -> Entries | None:
        """Some entries of low importance that no reader comes to any more, in the order in which
        readers passed them; None if there are none."""
        while self._low_passed:
            piece = np.unique(self._low_passed.popleft())
            piece = piece[self._evictable(piece) & ~heap.is_high(piece)]
            piece = piece[np.isinf(uses.next_use(piece))]
            if len(piece):
                piece, rest = self._enough(piece, need_bytes)
                if len(rest):
                    self._low_passed.appendleft(rest)
                return piece
        return None

    def _least_important(
        self, heap: ImportanceHeap, need_bytes: int, uses: Uses, kinds: list[bool]
    ) -> Entries | None:
        """Some of the least important entries; None if there are none. `kinds`: in which order
        to search among those of high importance (True) and among all (False)."""
        needed = NO_ENTRIES
        for high in kinds:
            found = self._least[high]
            found = found[self._evictable(found)]
            pieces = LEAST_LOOKED_AT
            while not len(found):
                least = heap.least(pieces * PIECE_ENTRIES, high=high)
                found = least[np.isinf(uses.next_use(least))]
                needed = needed if len(needed) else least
                if len(least) < pieces * PIECE_ENTRIES or pieces >= LEAST_LOOKED_AT_MAX:
                    break
                pieces *= 4
            if len(found):
                is_costly = pieces > LEAST_LOOKED_AT or len(heap) > LEAST_KEPT_FROM
                return self._first_piece(found, need_bytes, high=high, keeps_rest=is_costly)
        if not len(needed):
            return None
        keeps_rest = len(heap) > LEAST_KEPT_FROM
        return self._first_piece(needed, need_bytes, high=kinds[0], keeps_rest=keeps_rest)

    def _first_piece(
        self, entries: Entries, need_bytes: int, *, high: bool, keeps_rest: bool
    ) -> Entries:
        """The first of these entries that take `need_bytes`. With `keeps_rest`, later calls of
        `_least_important` get the others. Entries that come meanwhile may be much less important,
        so a small cache is searched anew instead."""
        piece, left = self._enough(entries, need_bytes)
        self._least[high] = left if keeps_rest else NO_ENTRIES
        return piece

    def _evictable(self, entries: Entries) -> Mask:
        is_free = self._resident[entries] & (self._claims[entries] == 0)
        free: Mask = is_free & ~self._leaving[entries]
        return free


def _distinct(entries: Entries) -> Entries:
    """Each entry once, in the same order: an order may have an entry twice."""
    _, first = np.unique(entries, return_index=True)
    return entries[np.sort(first)]
