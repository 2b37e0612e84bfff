"""Chooses the stream that gets the next push, and whether an urgent unit goes first.

The unit that a reader needs soonest is pushed first, unless its contents have not arrived yet
(`balance.py`). If the store is slow, and the reader comes within a second to large files that are
not pushed yet, these go first, as an *urgent* unit.
"""

from collections.abc import Collection
from dataclasses import dataclass
from operator import itemgetter

from .balance import Balance
from .memory import Memory
from .room import Room
from .streams.markers import MARKER_STRIDE
from .streams.stream_tracker import StreamTracker
from .streams.units_ahead import NextUnit
from .streams.watches import MARKERS_MAX

URGENT_S = 1.0
"""If the store is slow, files that a reader comes to within this time are pushed first."""
URGENT_WEIGHT, URGENT_START_S = 2.0, 0.5
"""Urgent pushes take at most `URGENT_START_S` plus `URGENT_WEIGHT` times as long as others. So a
store that gives single files far more slowly than chunks, such as a disk that has to seek, still
gives chunks for a third of the time."""


@dataclass(slots=True)
class UrgentTurns:
    """Shares the time of a slow store between urgent pushes and others."""

    store_is_slow: bool = False
    _urgent_s: float = 0.0  # how long urgent pushes took, since no unit was urgent
    _others_s: float = 0.0  # how long the others took, since then

    def note_pushed(self, took_s: float, *, was_urgent: bool) -> None:
        if was_urgent:
            self._urgent_s += took_s
        else:
            self._others_s += took_s

    def unit(self, tracker: StreamTracker) -> NextUnit | None:
        """The urgent unit of a stream; None if it has none, or if other pushes must have a turn."""
        if not self.store_is_slow:
            return None
        unit = tracker.units.urgent(URGENT_S)
        if unit is None:
            self._urgent_s = self._others_s = 0.0
        elif self._urgent_s > URGENT_START_S + URGENT_WEIGHT * self._others_s:
            return None
        return unit


def soonest_stream(
    memory: Memory,
    room: Room,
    balance: Balance,
    without_room: Collection[str],
    *,
    may_wait: bool,
) -> tuple[StreamTracker, float] | None:
    """The stream that gets the next push, and in how many seconds its reader needs the unit. None
    if all others than `without_room` are claimed to their ends, or as far as the number of watches
    allows. `may_wait`: a stream may be passed over until its contents have arrived."""
    share_bytes = memory.share_bytes()
    ahead_max = max(MARKERS_MAX // max(memory.active_count(), 1), 16) * MARKER_STRIDE
    found: list[tuple[float, StreamTracker, int]] = []
    for name, tracker in memory.trackers.items():
        if name in without_room:
            continue
        frontier = tracker.units.frontier(share_bytes)
        if frontier is not None and frontier - tracker.reader.low < ahead_max:
            found.append((room.ahead_s(tracker, frontier), tracker, frontier))
    if not found:
        return None
    ahead_s, soonest, frontier = min(found, key=itemgetter(0))
    if may_wait and len(found) > 1 and balance.wait_s(soonest, frontier):
        # A stream that has its share of the memory gets no more while others wait for theirs
        found = [each for each in found if each[1] is soonest or each[1].units.has_share_left()]
        ahead_s, soonest, _ = min(found, key=lambda each: balance.push_s(each[1], each[2]))
    return soonest, ahead_s
