"""Decides which chunks to hold in memory while a reader follows a known order of groups of chunks.

In a chunk-wise shuffled order (`orders/shuffle.py`) the files of a group of chunks are shuffled
among themselves, so a reader needs all chunks of its group in memory. A chunk of the group that is
being read is held until its last file of that group has been read. Chunks of the next group are
loaded ahead as far as there is room; so at most two groups are in memory. Files that a reader has
left unread are given up once it is well within the next group.

A *visit* is the use of a chunk by one group; a chunk that several groups want has several visits.
If a group wants too little of a chunk to read it whole, the chunk has no visit there, and its files
are read one by one. So are all extents of a file except the first: they may lie in chunks of other
groups.

Pure. `ChunkCache` loads and drops the chunks, and calls `advance` and `mark_read` under its lock.
"""

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from ...format.snapshot import layout
from ...format.snapshot.reader import Snapshot

SINGLE_READ_BYTES = 40 << 10
"""One read costs as much as this many more bytes in one piece: 100 reads as much as about 4 MiB."""

WHOLE_CHUNK_FRACTION = 8
"""A chunk is read whole if at least this part of it (an eighth) is wanted at once (measured on a
local disk)."""

_LAG_FRACTION = 4
"""Unread files of a group are given up after this part (a quarter) of the next group: until then
another thread may only be slow."""

_READS_BEHIND = 32
"""If this number of files in a row is read from groups that were given up, the reader is no slow
thread: it has gone back in the order."""

_Column = npt.NDArray[np.int64]


class OrderPrefetch:
    """`order` has entries, none of them twice; `ends` has the position behind each group."""

    def __init__(self, snapshot: Snapshot, order: _Column, ends: _Column) -> None:
        columns = snapshot.columns
        chunks = snapshot.chunk_of(order)
        stored = np.where(columns.size[order] > 0, columns.stored[order], 0).astype(np.int64)
        many = np.flatnonzero(columns.flags[order] & layout.MANY_EXTENTS)
        stored[many] = columns.extents["stored"][columns.chunk[order[many]]]
        group = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
        # The visits, sorted by group and chunk; then by first use, which keeps the order of groups
        keys, first, inverse = np.unique(
            group * max(snapshot.chunk_count, 1) + chunks, return_index=True, return_inverse=True
        )
        by_first_use = np.argsort(first)
        place = np.empty(len(keys), np.int64)
        place[by_first_use] = np.arange(len(keys))
        visit = place[inverse]
        sizes = snapshot.chunk_sizes[chunks[first[by_first_use]]].astype(np.int64)
        wanted_bytes = np.bincount(visit, weights=stored, minlength=len(keys))
        reads = np.bincount(visit, weights=stored > 0, minlength=len(keys))
        whole = (wanted_bytes * WHOLE_CHUNK_FRACTION >= sizes) | (
            wanted_bytes + reads * SINGLE_READ_BYTES >= sizes
        )
        whole &= reads > 0
        number = np.where(whole, np.cumsum(whole) - 1, -1)[visit]
        number[stored == 0] = -1
        kept = first[by_first_use][whole]

        self._visit_of = np.full(len(snapshot), -1, np.int32)  # of each entry
        self._visit_of[order] = number
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
        with_visit = np.flatnonzero(number >= 0)
        self.first = int(order[with_visit[0]]) if len(with_visit) else -1  # the first with a visit

        per_group = np.bincount(group[kept], weights=sizes[whole], minlength=len(ends))
        pairs = per_group.copy()
        pairs[:-1] += per_group[1:]
        self.group_bytes_max = int(per_group.max(initial=0))
        self.two_groups_bytes_max = int(pairs.max(initial=0))
        # One chunk less than two groups: a reader still holds the chunk that it has just finished
        self._chunks_max = max(2 * int(np.bincount(group[kept]).max(initial=0)) - 1, 1)
        self._now = 0  # the group that is being read
        self._oldest = 0  # chunks of this group and later ones may be held
        self._reads_behind = 0  # in a row
        self._next = 0  # the first visit that has not been looked at for loading ahead
        self._held: dict[int, int] = {}  # visits by chunk: loaded or in flight
        self._held_bytes = 0

    def holds(self, index: int) -> bool:
        """Whether an entry is in the order."""
        return bool(self._group_of_entry[index] >= 0)

    def visit_of(self, index: int) -> int:
        """The visit that an entry belongs to; -1 if it is to be read alone, as are entries that
        were read before, or are in a group that was given up."""
        group = int(self._group_of_entry[index])
        self._reads_behind += 0 <= group < self._oldest
        if not self._begins_anew(index, group) and (group < self._oldest or self._read[index]):
            return -1
        return int(self._visit_of[index])

    def chunk(self, visit: int) -> int:
        return self._chunk[visit]

    def groups_of(self, indices: _Column) -> _Column:
        """-1 for entries that are not in the order."""
        return self._group_of_entry[indices].astype(np.int64)

    def visits_of(self, indices: _Column) -> _Column:
        """`visit_of` for entries of one group, which will be read one after another."""
        visits = self._visit_of[indices].astype(np.int64)
        group = int(self._group_of_entry[indices[0]])
        self._reads_behind += len(indices) if group < self._oldest else 0
        if self._begins_anew(int(indices[0]), group) or self.first in indices:
            return visits
        if group < self._oldest:
            return np.full(len(visits), -1)
        return np.where(self._read[indices], -1, visits)

    def advance(self, visit: int, index: int, budget_bytes: int) -> tuple[list[int], list[int]]:
        """The reader is at an entry. Returns the chunks to drop now, and the chunks to load ahead
        within `budget_bytes`. If the reader is at the first entry again, or has gone back, the
        epoch begins anew."""
        group, dropped = self._group[visit], []
        if self._begins_anew(index, group):
            self._read[:] = False
            self._left = self._wanted.copy()
            self._now = self._oldest = group
            self._next = bisect_left(self._group, group)
            near = range(group, group + 2)
            dropped = [chunk for chunk, at in self._held.items() if self._group[at] not in near]
            for chunk in dropped:
                self._release(chunk)
        if group >= self._oldest:
            self._reads_behind = 0
        is_early = int(self._position[index]) < self._lag_ends[group]
        oldest = group - 1 if is_early else group
        if oldest > self._oldest or group > self._now:
            self._now, self._oldest = max(group, self._now), max(oldest, self._oldest)
            late = [chunk for chunk, at in self._held.items() if self._group[at] < self._oldest]
            for chunk in late:
                self._release(chunk)
            dropped += late
        if self._chunk[visit] not in self._held:
            self._hold(visit)
        return dropped, self._ahead(budget_bytes)

    def mark_read(
        self, visit: int, entries: _Column, budget_bytes: int
    ) -> tuple[list[int], list[int]]:
        """The reader has read entries of a visit. Returns the same as `advance`. An entry that is
        read twice counts once."""
        fresh = np.unique(entries[~self._read[entries]])
        self._read[fresh] = True
        self._left[visit] -= len(fresh)
        chunk = self._chunk[visit]
        if self._left[visit] or self._held.get(chunk) != visit:
            return [], []
        self._release(chunk)
        return [chunk], self._ahead(budget_bytes)

    def _ahead(self, budget_bytes: int) -> list[int]:
        """Chunks to load, in order of first use, as far as there is room. They count as held from
        now on."""
        begun = []
        while self._next < len(self._chunk) and self._group[self._next] <= self._now + 1:
            visit = self._next
            is_due = self._left[visit] and self._group[visit] >= self._now
            if is_due and self._chunk[visit] not in self._held:
                if (
                    len(self._held) >= self._chunks_max
                    or self._held_bytes + self._bytes[visit] > budget_bytes
                ):
                    break
                self._hold(visit)
                begun.append(self._chunk[visit])
            self._next += 1
        return begun

    def _begins_anew(self, index: int, group: int) -> bool:
        is_first = index == self.first and bool(self._read[index])
        return is_first or (group < self._oldest and self._reads_behind >= _READS_BEHIND)

    def _hold(self, visit: int) -> None:
        self._held[self._chunk[visit]] = visit
        self._held_bytes += self._bytes[visit]

    def _release(self, chunk: int) -> None:
        self._held_bytes -= self._bytes[self._held.pop(chunk)]
