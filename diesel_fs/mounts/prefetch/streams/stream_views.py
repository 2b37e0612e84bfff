"""Answers questions about all streams of a planner, and changes none of them.

The policies (`../balance.py`, `../room.py`), the prefetch worker and the commands for plans use it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ....orders.plan import Entries, Epoch, Stream
from ..decisions import StreamReading, StreamStats
from .farthest_uses import FarthestUses
from .stream_tracker import StreamTracker

STILL_S = 60.0
"""If a reader has given no sign for this time while others go on, its stream is *still*: it gives
up its memory. In many runs the stream of a validation set is still between two validations; one
miss ends that."""
TENTATIVE_S = 600.0
"""A tentative stream (a program has read its list of files, but none of the files) is withdrawn
after this time."""
SAMPLE_S = 2.0
"""Time between two samples of a stream: the kernel has been seen to free idle pages after some
5 s."""


def is_still(tracker: StreamTracker, last_sign_s: float, now_s: float) -> bool:
    """`last_sign_s` is the time of the last sign of any reader."""
    own_s = tracker.reader.last_sign_s
    return now_s - own_s >= STILL_S and last_sign_s > own_s


def rate(tracker: StreamTracker, trackers: Iterable[StreamTracker]) -> float:
    """A reader's files per second. Until that is measured, the mean of the other readers; 0 if none
    is measured."""
    if tracker.reader.rate:
        return tracker.reader.rate
    rates = [each.reader.rate for each in trackers if each.reader.rate]
    return sum(rates) / len(rates) if rates else 0.0


@dataclass(slots=True)
class StreamViews:
    trackers: dict[str, StreamTracker]  # by name
    farthest: FarthestUses = field(init=False)  # for drops
    _moving: dict[str, StreamTracker] = field(default_factory=dict)
    """Not still, as of the last `find_still`."""

    def __post_init__(self) -> None:
        self.farthest = FarthestUses(self._moving)

    @property
    def plan(self) -> dict[str, Stream]:
        """Without the epochs that were read."""
        return {name: tracker.order.stream for name, tracker in self.trackers.items()}

    @property
    def has_streams(self) -> bool:
        return bool(self.trackers)

    def reading(self) -> list[StreamReading]:
        return [tracker.reading() for tracker in self.trackers.values()]

    def pushed_early(self, name: str) -> Entries:
        """The entries that a stream has claimed already of the epoch of its next push."""
        return self.trackers[name].claims.at_frontier()

    def running(self, now_s: float) -> list[str]:
        return [name for name, tracker in self.trackers.items() if tracker.reader.is_running(now_s)]

    def planned(self, count: int) -> list[Entries]:
        return [unit for each in self.trackers.values() for unit in each.units.entries(count)]

    def stats(self) -> list[StreamStats]:
        return [tracker.stats() for tracker in self.trackers.values()]

    def stream_stats(self, name: str) -> StreamStats | None:
        tracker = self.trackers.get(name)
        return None if tracker is None else tracker.stats()

    def progress_of_streams(self) -> dict[str, tuple[tuple[Epoch, ...], int, int]]:
        """For streams that are not tentative: the epochs left, and up to where nothing need be
        fetched any more (`StreamOrder.fetched_up_to`)."""
        return {
            name: (
                tracker.order.stream.epochs,
                *tracker.order.fetched_up_to(tracker.reader.high),
            )
            for name, tracker in self.trackers.items()
            if not tracker.reader.tentative
        }

    def rate(self, tracker: StreamTracker) -> float:
        return tracker.reader.rate or rate(tracker, self.trackers.values())

    def lead_s(self) -> float:
        """In how many seconds the first reader may come to the end of its claims. 0 if there is no
        stream, a reader is beyond its claims, or a rate is not known."""
        leads_s = [
            max(each.order.claimed_end() - each.reader.high, 0) / each.reader.rate
            if each.reader.rate
            else 0.0
            for each in self.trackers.values()
        ]
        return min(leads_s, default=0.0)

    def find_still(self, now_s: float) -> bool:
        """Find the streams that are still now: `next_use`, `unneeded` and `farthest` ignore these.
        Returns whether they have changed."""
        last_sign_s = max(
            (each.reader.last_sign_s for each in self.trackers.values()), default=-math.inf
        )
        moving = {
            name: each
            for name, each in self.trackers.items()
            if not is_still(each, last_sign_s, now_s)
        }
        if [*map(id, moving.values())] == [*map(id, self._moving.values())]:
            return False
        self._moving.clear()
        self._moving.update(moving)
        return True

    def next_use(self, entries: Entries) -> npt.NDArray[np.float64]:
        """See `Uses` in `../eviction.py`."""
        trackers = self._moving.values()
        uses = [each.order.next_use(entries, each.reader.high) for each in trackers]
        return np.minimum.reduce(uses) if uses else np.full(len(entries), np.inf)

    def unneeded(self, is_candidate: npt.NDArray[np.bool_]) -> Entries:
        left = is_candidate.copy()
        for tracker in self._moving.values():
            for state in tracker.order.next_epochs():
                left[state.epoch.entries[max(tracker.reader.high - state.base, 0) :]] = False
        return np.flatnonzero(left).astype(np.uint32)

    def next_change_s(self, now_s: float) -> list[float]:
        """When streams will become still, be withdrawn or be sampled without a report. Some times
        may have passed."""
        times = []
        for tracker in self.trackers.values():
            last_sign_s = tracker.reader.last_sign_s
            if tracker.reader.tentative:
                times.append(last_sign_s + TENTATIVE_S)
            if now_s - last_sign_s < STILL_S:
                times += [last_sign_s + STILL_S, tracker.sampled_s + SAMPLE_S]
        return times
