"""Finds pushed files that the kernel has freed, and has them pushed again.

The kernel does not report that. Either a READ of a pushed file reaches the mount, or a *sample* of
a few files that a reader will come to next shows that one is not resident any more. Files near a
freed one are assumed to be gone as well, because the kernel frees pages in about the order of their
use.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from ...orders.plan import Entries
from .decisions import PrefetchCounters, Sample
from .miss_fill import ChunkEntries
from .resident_set import Clock, ResidentSet
from .streams.markers import MARKER_STRIDE
from .streams.stream_tracker import StreamTracker
from .streams.stream_views import SAMPLE_S, STILL_S, StreamViews
from .streams.units import Columns
from .streams.watches import Watches

LATE_READ_S = 1.0
"""A miss this long after the push of its file means that the kernel has freed the pages. An earlier
one may come from a READ that began before the push."""
SAMPLE_ENTRIES = 32
"""One sample looks at this many, evenly chosen from a reader's next `SAMPLE_AHEAD_ENTRIES`."""
SAMPLE_AHEAD_ENTRIES = 8_192


@dataclass(slots=True)
class FreedPages:
    columns: Columns
    resident_set: ResidentSet
    chunk_entries: ChunkEntries
    views: StreamViews
    watches: Watches
    clock: Clock
    _push_again: deque[Entries] = field(default_factory=deque)

    def push_again(self, entries: Entries) -> None:
        """`next` returns these, unless they are resident by then, or there are streams and none
        claims them."""
        self._push_again.append(entries)

    def next(self, room_bytes: int) -> Entries | None:
        """The next batch, in the order of contents; entries without room are left to READs."""
        while self._push_again:
            wanted = self.resident_set.missing(self._push_again.popleft())
            if self.views.trackers:
                wanted = wanted[self.resident_set.claims[wanted] > 0]
            wanted = self.chunk_entries.fetch_order(np.unique(wanted))
            wanted = wanted[np.cumsum(self.columns.cost(wanted)) <= room_bytes]
            if len(wanted):
                return wanted
        return None

    def was_read_late(self, entry: int, now_s: float) -> bool:
        pushed_s = float(self.resident_set.pushed_s[entry])
        return self.clock.since_start_s(now_s) - pushed_s >= LATE_READ_S

    def note_freed(
        self,
        entry: int,
        tracker: StreamTracker | None,
        position: int,
        counters: PrefetchCounters,
    ) -> None:
        """Note that the kernel has freed an entry's pages, and probably those of entries around it:
        all are pushed again. If the chunk was pushed again a short time ago, only this entry is
        noted, and nothing is pushed. `tracker` and `position`: the stream whose reader is nearest,
        and the entry's position there; None and -1 if no stream has the entry."""
        neighbours = np.array([entry], np.uint32)
        chunk = int(self.columns.chunk[entry])
        if self.chunk_entries.may_push(chunk, self.clock.now_s):
            neighbours = self.chunk_entries.of(chunk)
            if tracker is not None:
                following = tracker.claims.entries(position, MARKER_STRIDE)
                neighbours = np.concatenate([neighbours, following])
            since_start_s = self.clock.since_start_s(self.clock.now_s)
            pushed_ago_s = since_start_s - self.resident_set.pushed_s[neighbours]
            freed = (pushed_ago_s >= LATE_READ_S) | (neighbours == entry)
            neighbours = np.unique(neighbours[self.resident_set.resident[neighbours] & freed])
            self._push_again.append(neighbours)
        counters["lost_entries"] += len(neighbours)
        self.resident_set.remove(neighbours)

    def sample(self, now_s: float) -> Sample | None:
        """A few entries that a reader will read next; the streams take turns. None if no stream is
        due."""
        for tracker in self.views.trackers.values():
            is_still = now_s - tracker.reader.last_sign_s >= STILL_S
            if is_still or now_s < tracker.sampled_s + SAMPLE_S:
                continue
            tracker.sampled_s = now_s
            ahead = tracker.claims.entries(tracker.reader.high, SAMPLE_AHEAD_ENTRIES)
            ahead = ahead[:: max(1, len(ahead) // SAMPLE_ENTRIES)][:SAMPLE_ENTRIES]
            ahead = np.unique(ahead[self.resident_set.resident[ahead]])
            unwatched = [not self.watches.is_watched(entry) for entry in ahead.tolist()]
            if any(unwatched):
                return Sample(ahead[unwatched])
        return None
