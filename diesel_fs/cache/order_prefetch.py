"""An order that a reader follows: which chunks it will want, and which it has done with.

Owned here: the decisions. A chunk of the group that is being read is kept until its last file of
that group has been read; chunks of the next group are loaded ahead as far as there is room: for two
groups at most. What a reader has left unread of a group goes once it is well within the next one.
Not owned: the chunks and the loading of them (`chunk_cache.py`, under whose lock all methods that
change something are called); which order it is (`shuffle.py`). No I/O, no clock.

A **use** is a chunk in one group; a chunk that is wanted by several groups has several. A chunk of
which a group wants too little to be worth reading whole has none: its files are read one by one. So
are the extents behind the first one of a file: they need not lie in the file's group.
"""

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from ..format.snapshot import layout as layout
from ..format.snapshot.reader import Snapshot

SINGLE_READ_BYTES = 40 << 10
"""What a read of one entry costs, in bytes read in one piece: 100 of them are about 4 MiB."""

WHOLE_CHUNK_FRACTION = 8
"""A chunk is read whole where at least one part in this many of it is wanted at once: reading
4 MiB in one piece costs about as much as 100 single reads (measured on a local disk)."""

_LAG_FRACTION = 4
"""What is unread of a group is given up when one part in this many of the next is behind: until
then it may be that another thread has been slow."""

_READS_BEHIND = 32
"""Who reads so many files in a row of groups that have been given up has gone back, and is no slow
thread."""

_Column = npt.NDArray[np.int64]


class OrderPrefetch:
    """An order by groups, and how far a reader has come in it (see the module).

    `ends` has the position behind each group; no file stands twice in `order`.
    """

    def __init__(self, snapshot: Snapshot, order: _Column, ends: _Column) -> None:
        columns = snapshot.columns
        chunks = snapshot.chunk_of(order)
        stored = np.where(columns.size[order] > 0, columns.stored[order], 0).astype(np.int64)
        many = np.flatnonzero(columns.flags[order] & layout.MANY_EXTENTS)
        stored[many] = columns.extents["stored"][columns.chunk[order[many]]]
        group = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
        # By group and chunk; then in order of first use, which is the order of groups, too.
        keys, first, inverse = np.unique(
            group * max(snapshot.chunk_count, 1) + chunks, return_index=True, return_inverse=True
        )
        by_first_use = np.argsort(first)
        place = np.empty(len(keys), np.int64)
        place[by_first_use] = np.arange(len(keys))
        use = place[inverse]
        sizes = snapshot.chunk_sizes[chunks[first[by_first_use]]].astype(np.int64)
        wanted_bytes = np.bincount(use, weights=stored, minlength=len(keys))
        reads = np.bincount(use, weights=stored > 0, minlength=len(keys))
        whole = (wanted_bytes * WHOLE_CHUNK_FRACTION >= sizes) | (
            wanted_bytes + reads * SINGLE_READ_BYTES >= sizes
        )
        whole &= reads > 0
        number = np.where(whole, np.cumsum(whole) - 1, -1)[use]
        number[stored == 0] = -1
        kept = first[by_first_use][whole]

        self._use = np.full(len(snapshot), -1, np.int32)  # of each entry
        self._use[order] = number
        self._group_of_entry = np.full(len(snapshot), -1, np.int32)
        self._group_of_entry[order] = group
        self._position = np.zeros(len(snapshot), np.uint32)
        self._position[order] = np.arange(len(order))
        self._read = np.zeros(len(snapshot), np.bool_)
        group_sizes = np.diff(ends, prepend=0)
        self._lag_ends: list[int] = (ends - group_sizes + group_sizes // _LAG_FRACTION).tolist()
        self._chunk: list[int] = chunks[kept].tolist()
        self._group: list[int] = group[kept].tolist()
        self._bytes: list[int] = sizes[whole].tolist()
        self._wanted: list[int] = reads[whole].astype(np.int64).tolist()
        self._left = self._wanted.copy()
        with_use = np.flatnonzero(number >= 0)
        self.first = int(order[with_use[0]]) if len(with_use) else -1

        per_group = np.bincount(group[kept], weights=sizes[whole], minlength=len(ends))
        pairs = per_group.copy()
        pairs[:-1] += per_group[1:]
        self.group_bytes_max = int(per_group.max(initial=0))
        self.two_groups_bytes_max = int(pairs.max(initial=0))
        # One less than two groups: a reader still looks at what it has just done with.
        self._chunks_max = max(2 * int(np.bincount(group[kept]).max(initial=0)) - 1, 1)
        self._now = 0  # the group that is being read
        self._oldest = 0  # the first group of which something may be held
        self._reads_behind = 0  # in a row
        self._next = 0  # the first use that has not been looked at for loading ahead
        self._held: dict[int, int] = {}  # uses by chunk: loaded, or on the way
        self._held_bytes = 0

    def holds(self, index: int) -> bool:
        """Whether an entry is in the order."""
        return bool(self._group_of_entry[index] >= 0)

    def visit_of(self, index: int) -> int:
        """The use that an entry is part of; -1 where it is to be read by itself.

        So are those that were read before, or whose group has just been given up.
        """
        group = int(self._group_of_entry[index])
        self._reads_behind += 0 <= group < self._oldest
        if not self._begins_anew(index, group) and (group < self._oldest or self._read[index]):
            return -1
        return int(self._use[index])

    def chunk(self, use: int) -> int:
        """The number of the chunk of a use."""
        return self._chunk[use]

    def groups_of(self, indices: _Column) -> _Column:
        """The group of each entry; -1 for those that are not in the order."""
        return self._group_of_entry[indices].astype(np.int64)

    def visits_of(self, indices: _Column) -> _Column:
        """`visit_of` each entry, of several in one group, which will be read one behind the
        other."""
        uses = self._use[indices].astype(np.int64)
        group = int(self._group_of_entry[indices[0]])
        self._reads_behind += len(indices) if group < self._oldest else 0
        if self._begins_anew(int(indices[0]), group) or self.first in indices:
            return uses
        if group < self._oldest:
            return np.full(len(uses), -1)
        return np.where(self._read[indices], -1, uses)

    def advance(self, use: int, index: int, budget_bytes: int) -> tuple[list[int], list[int]]:
        """The reader is at an entry: the chunks to give up now, and then those to load ahead.

        A reader that is at the first entry again, or far behind where it has been, begins anew.
        """
        group, given_up = self._group[use], []
        if self._begins_anew(index, group):
            self._read[:] = False
            self._left = self._wanted.copy()
            self._now = self._oldest = group
            self._next = bisect_left(self._group, group)
            near = range(group, group + 2)
            given_up = [one for one, held in self._held.items() if self._group[held] not in near]
            for chunk in given_up:
                self._release(chunk)
        if group >= self._oldest:
            self._reads_behind = 0
        is_early = int(self._position[index]) < self._lag_ends[group]
        oldest = group - 1 if is_early else group
        if oldest > self._oldest or group > self._now:
            self._now, self._oldest = max(group, self._now), max(oldest, self._oldest)
            late = [one for one, held in self._held.items() if self._group[held] < self._oldest]
            for chunk in late:
                self._release(chunk)
            given_up += late
        if self._chunk[use] not in self._held:
            self._hold(use)
        return given_up, self._ahead(budget_bytes)

    def mark_read(
        self, use: int, entries: _Column, budget_bytes: int
    ) -> tuple[list[int], list[int]]:
        """Entries of a use have been read: as `advance`. What is told twice counts once."""
        fresh = np.unique(entries[~self._read[entries]])
        self._read[fresh] = True
        self._left[use] -= len(fresh)
        chunk = self._chunk[use]
        if self._left[use] or self._held.get(chunk) != use:
            return [], []
        self._release(chunk)
        return [chunk], self._ahead(budget_bytes)

    def _ahead(self, budget_bytes: int) -> list[int]:
        """What else there is room for, of this group and the next one, in order of first use."""
        begun = []
        while self._next < len(self._chunk) and self._group[self._next] <= self._now + 1:
            use = self._next
            is_due = self._left[use] and self._group[use] >= self._now
            if is_due and self._chunk[use] not in self._held:
                if (
                    len(self._held) >= self._chunks_max
                    or self._held_bytes + self._bytes[use] > budget_bytes
                ):
                    break
                self._hold(use)
                begun.append(self._chunk[use])
            self._next += 1
        return begun

    def _begins_anew(self, index: int, group: int) -> bool:
        is_first = index == self.first and bool(self._read[index])
        return is_first or (group < self._oldest and self._reads_behind >= _READS_BEHIND)

    def _hold(self, use: int) -> None:
        self._held[self._chunk[use]] = use
        self._held_bytes += self._bytes[use]

    def _release(self, chunk: int) -> None:
        self._held_bytes -= self._bytes[self._held.pop(chunk)]
