"""Makes room for pushes: chooses what to drop, and which streams give claims up.

Room is made by giving up these, in this order:

1. entries that no stream claims (`eviction.py`);
2. all claims of a stream that has stood still while others went on;
3. the farther half of the claims of the stream that is farthest ahead of its reader, if that is
   more than twice as far as the stream that needs room.

Files that only READs have brought do not count: the kernel frees their pages first.
"""

from dataclasses import dataclass

from ...orders.plan import NO_ENTRIES
from .decisions import Drop
from .memory import Memory
from .streams.changes import Streams
from .streams.markers import MARKER_STRIDE
from .streams.stream_tracker import StreamTracker
from .streams.stream_views import StreamViews, is_still
from .streams.watches import Watches


@dataclass(slots=True)
class Room:
    streams: Streams
    views: StreamViews
    memory: Memory
    watches: Watches

    def shrink(self) -> Drop | None:
        over = -self.memory.room_bytes()
        while over > 0:
            if (drop := self._drop(over)) is not None:
                return drop
            farthest = sorted(self.views.trackers.values(), key=self.ahead_s, reverse=True)
            if not any(self._retreat(tracker) for tracker in farthest):
                break
        return None

    def unwatch(self, least: int) -> Drop | None:
        """Stop watching the entries that no stream needs watched, if there are `least`."""
        enough = len(self.watches.unneeded) >= least
        return Drop(NO_ENTRIES, self.watches.take_unneeded()) if enough else None

    def make(
        self,
        needy: StreamTracker,
        needy_ahead_s: float,
        need_bytes: int,
        last_sign_s: float,
        now_s: float,
        *,
        spares_needed: bool = False,
    ) -> Drop | None:
        """Make room for a unit of the stream `needy`; None if that is impossible. `spares_needed`:
        drop no unclaimed entry that a reader comes to again. `needy_ahead_s`: in how many seconds
        `needy` comes to the unit; `last_sign_s`: of any reader."""
        if (drop := self._drop(need_bytes, only_unneeded=spares_needed)) is not None:
            return drop
        others = [each for each in self.views.trackers.values() if each is not needy]
        for each in others:
            still = is_still(each, last_sign_s, now_s)
            if (
                still
                and self.streams.take_back(each, each.claims.floor)
                and (drop := self._drop(need_bytes, only_unneeded=spares_needed))
            ):
                return drop
        farthest = max(others, key=self.ahead_s, default=None)
        if farthest is None:
            return None
        # A position is known only to about a marker, so two markers are allowed for
        allowed_s = 2 * max(needy_ahead_s, 0) + 2 * MARKER_STRIDE / (farthest.reader.rate or 1)
        if self.ahead_s(farthest) > allowed_s and self._retreat(farthest):
            return self._drop(need_bytes, only_unneeded=spares_needed)
        return None

    def ahead_s(self, tracker: StreamTracker, frontier: int | None = None) -> float:
        """In how many seconds the reader will reach the frontier."""
        distance = (self._frontier(tracker) if frontier is None else frontier) - tracker.reader.high
        return distance / (self.views.rate(tracker) or 1.0)

    def _frontier(self, tracker: StreamTracker) -> int:
        frontier = tracker.units.frontier(self.memory.share_bytes())
        return tracker.order.end if frontier is None else frontier

    def _retreat(self, tracker: StreamTracker) -> bool:
        """End the farther half of the claims ahead of a reader, or else all its claims. Returns
        whether any ended."""
        high = tracker.reader.high
        middle = high + max(self._frontier(tracker) - high, 0) // 2
        take_back = self.streams.take_back
        return take_back(tracker, middle) or take_back(tracker, tracker.claims.floor)

    def _drop(self, need_bytes: int, *, only_unneeded: bool = False) -> Drop | None:
        victims = self.memory.resident_set.victims(
            need_bytes, self.views, only_unneeded=only_unneeded
        )
        return Drop(victims, self.watches.take_unneeded()) if len(victims) else None
