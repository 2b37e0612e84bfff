"""Finds pushed files that the kernel has freed, and has them pushed again.

The kernel does not report that. Either a READ of a pushed file reaches the mount, or a *sample* of
a few files that a reader will come to next shows that one is not resident any more. Then a *check*
samples the files near the freed one, since the kernel frees pages in about the order of their use.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from ...orders.plan import Entries
from .decisions import PrefetchCounters, Sample
from .eviction import Mask
from .miss_fill import ChunkEntries
from .resident_set import READ_BYTES_MAX, Clock, ResidentSet
from .streams.markers import MARKER_STRIDE
from .streams.stream_tracker import StreamTracker
from .streams.stream_views import SAMPLE_S, STILL_S, StreamViews
from .streams.units import Columns
from .streams.watches import Watches

LATE_READ_S = 1.0
"""A miss this long after the push of its file means that the kernel has freed the pages. An earlier
one may come from a READ that began before the push."""
SAMPLE_ENTRIES = 32
"""A sample has this many entries, evenly chosen from a reader's next `SAMPLE_AHEAD_ENTRIES`."""
SAMPLE_AHEAD_ENTRIES = 8_192
BATCH_BYTES = 16 << 20
"""Bytes that are pushed again at once."""
CHECKS_MAX = 64
"""The most checks that wait. Beyond that the oldest is left out: READs will show what is gone."""
FREED_DIVISOR = 4
"""If a check finds a quarter of its sample freed, the files outside it count as freed, too."""


@dataclass(slots=True)
class FreedPages:
    columns: Columns
    resident_set: ResidentSet
    chunk_entries: ChunkEntries
    views: StreamViews
    watches: Watches
    clock: Clock
    _push_again: deque[Entries] = field(default_factory=deque)
    _suspected: deque[Entries] = field(default_factory=lambda: deque(maxlen=CHECKS_MAX))
    """Entries near freed ones, for a check each."""
    _checking: Entries | None = None  # those of the last `check`, until `checked`

    def push_again(self, entries: Entries) -> None:
        """`next` returns these, unless they are resident by then, or there are streams and none
        claims them."""
        self._push_again.append(entries)

    def next(self, room_bytes: int) -> Entries | None:
        """The next batch, by chunk and offset; entries without room are left to READs."""
        if not self._push_again:
            return None
        wanted = self.resident_set.missing(np.unique(np.concatenate(self._push_again)))
        self._push_again.clear()
        if self.views.trackers:
            wanted = wanted[self.resident_set.claims[wanted] > 0]
        wanted = self.chunk_entries.fetch_order(wanted)
        bytes_to = np.cumsum(self.columns.cost(wanted))
        wanted = wanted[bytes_to <= room_bytes]
        batch = max(int(np.searchsorted(bytes_to, BATCH_BYTES, "right")), 1)
        if len(wanted) > batch:
            self._push_again.append(wanted[batch:])
        return wanted[:batch] if len(wanted) else None

    def was_read_late(self, entry: int, now_s: float) -> bool:
        pushed_s = float(self.resident_set.pushed_s[entry])
        return self.clock.since_start_s(now_s) - pushed_s >= LATE_READ_S

    def note_freed(
        self,
        entry: int,
        tracker: StreamTracker | None,
        position: int,
        counters: PrefetchCounters,
        *,
        was_read: bool,
    ) -> None:
        """Note that the kernel has freed an entry's pages; unless a READ has brought them all back
        (`was_read`), they are pushed again. Entries near it, in the chunk and in the order, get a
        `check`, unless the chunk had one a short time ago. `tracker` and `position`: the stream
        whose reader is nearest, and the entry's position there; None and -1 if no stream has the
        entry."""
        alone = np.array([entry], np.uint32)
        counters["lost_entries"] += 1
        self.resident_set.remove(alone)
        since_start_s = self.clock.since_start_s(self.clock.now_s)
        if was_read:
            self.resident_set.note_read(entry, since_start_s)
        if not was_read or self.columns.bytes_of(alone) > READ_BYTES_MAX:
            self._push_again.append(alone)
        chunk = int(self.columns.chunk[entry])
        if not self.chunk_entries.may_push(chunk, self.clock.now_s):
            return
        places = [self.chunk_entries.of(chunk)]
        if tracker is not None:
            places.append(tracker.claims.entries(position, MARKER_STRIDE))
        for near in places:
            pushed_ago_s = since_start_s - self.resident_set.pushed_s[near]
            self._suspected.append(np.unique(near[pushed_ago_s >= LATE_READ_S]))

    @property
    def is_checking(self) -> bool:
        """Whether the last decision was a sample that `check` has chosen."""
        return self._checking is not None

    def check(self) -> Sample | None:
        """A few entries near freed ones, for `checked`."""
        while self._suspected:
            near = self._suspected.popleft()
            near = near[self.resident_set.resident[near]]
            if len(some := self._unwatched(near)):
                self._checking = near
                return Sample(some)
        return None

    def checked(self, entries: Entries, resident: Mask, counters: PrefetchCounters) -> bool:
        """Note which of the entries of a sample are resident, if `check` has chosen it; returns
        whether it has. Freed entries are pushed again."""
        near, self._checking = self._checking, None
        if near is None:
            return False
        freed = entries[~resident]
        if FREED_DIVISOR * len(freed) >= len(entries):
            freed = np.union1d(freed, np.setdiff1d(near, entries))
        freed = freed[self.resident_set.resident[freed]]
        counters["lost_entries"] += len(freed)
        self.resident_set.remove(freed)
        self._push_again.append(freed)
        return True

    def _unwatched(self, entries: Entries) -> Entries:
        """At most `SAMPLE_ENTRIES` of these, evenly chosen, without watched ones."""
        some = entries[:: max(1, -(-len(entries) // SAMPLE_ENTRIES))]
        some = np.unique(some[self.resident_set.resident[some]])
        return some[[not self.watches.is_watched(entry) for entry in some.tolist()]]

    def sample(self, now_s: float) -> Sample | None:
        """A few entries that a reader will read next; the streams take turns. None if no stream is
        due."""
        for tracker in self.views.trackers.values():
            is_still = now_s - tracker.reader.last_sign_s >= STILL_S
            if is_still or now_s < tracker.sampled_s + SAMPLE_S:
                continue
            tracker.sampled_s = now_s
            ahead = tracker.claims.entries(tracker.reader.high, SAMPLE_AHEAD_ENTRIES)
            if len(some := self._unwatched(ahead)):
                return Sample(some)
        return None
