"""Balances pushes and reads between streams by the cost of fetching their contents (Lobster).

A *stream* is a reader with a known order of files; a *unit* is the group of its files that one push
brings (`streams/units.py`). The ranks of a training job wait for each other in each iteration, so
the slowest one sets the pace. After Lobster (sections 4.2 and 4.3), the cost of a unit is predicted
from the place of its contents (`UnitCosts`) and the lateness of its stream (`streams/lateness.py`).
The cost is used twice:

- `Balance.upcoming` names the units to be read ahead, those with the least *slack* first. The slack
  is the time until the reader needs the unit, less the latency of its read, less the transfers of
  all units of the stream up to and with it. If a later unit of the stream has less slack, the unit
  has that slack, too. So a stream with slow contents has more reads under way than the others.
  Lobster gives each GPU a number of threads, which it finds by a binary search (algorithm 1; line
  18 is inverted in print); here the reads under way follow from the order. If one resource (the
  bandwidth) serves jobs with deadlines, the order of the deadlines makes the largest lateness least
  (Jackson's rule). A time that a job takes after its service, such as the latency, is taken off its
  deadline.
- Pushes are made one after the other, and each waits for its contents. So two times count for each
  stream: when its reader needs the next unit, and when the contents of that unit arrive. The stream
  whose later time is the earliest gets the next push (`turns.py`). A stream with late contents thus
  lets another go first only while the other's push is due before these contents arrive, and only
  within the other's share of the memory.

With one stream there is nothing to balance, and no cost is predicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...orders.plan import Entries
from .decisions import UnitCosts
from .resident_set import Clock, ResidentSet
from .streams.stream_tracker import StreamTracker
from .streams.stream_views import StreamViews
from .streams.units import Columns

READ_AHEAD_S = 5.0
"""A unit that `upcoming` has named stays among the units to be read ahead for this time, or until
it is pushed. Otherwise small changes of rates and costs would cancel reads under way."""
COSTS_FRESH_S = 0.25
"""The cost of a unit is predicted again after this time: by then measured rates may have changed,
and contents may lie elsewhere."""
RATE_GUESSED = 1_000.0
"""The files per second that readers are assumed to read before any of them has given signs."""
WAITED_S_MIN = 0.005
"""A push that takes longer than this has probably waited for its contents: a push of 4 MiB that has
its contents takes half of this time."""


def slacks(
    need_s: npt.NDArray[np.float64], cost_s: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """The slack of each unit of one stream, in seconds, in the order of its reader.

    `need_s`: in how many seconds the reader needs each unit; `cost_s`: its latency and the
    transfers up to it. A unit has at most the slack of any later unit, which must wait for it.
    """
    return np.minimum.accumulate((need_s - cost_s)[::-1])[::-1]


def least_slack_first(
    slack_s: npt.NDArray[np.float64],
    is_next: npt.NDArray[np.bool_],
    is_begun: npt.NDArray[np.bool_],
    count: int,
) -> list[int]:
    """The indices of `count` units to read ahead, those with the least slack first.

    Among them are the next units of streams (`is_next`), up to half of `count`, and all units with
    reads under way (`is_begun`).
    """
    order = np.argsort(slack_s, kind="stable")
    certain = is_next[order]
    certain &= np.cumsum(certain) <= count // 2
    certain |= is_begun[order]
    others_max = count - int(np.count_nonzero(certain))
    chosen: list[int] = order[certain | (np.cumsum(~certain) <= others_max)].tolist()
    return chosen


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """When `upcoming` first named a unit, and when its contents should arrive."""

    begun_s: float
    due_s: float


@dataclass(frozen=True, slots=True)
class PlannedPush:
    """The push under way: its stream, and its predicted cost. `note_pushed` compares the cost with
    the time that the push took."""

    tracker: StreamTracker
    read_s: float  # latency and transfer, as `UnitCosts` has predicted them
    bytes: int
    begun_s: float  # when its contents were first requested


@dataclass(slots=True)
class Balance:
    """The policy (see the module). `costs` is None if they are unknown: nothing is balanced
    then."""

    costs: UnitCosts | None
    columns: Columns
    resident_set: ResidentSet
    views: StreamViews
    clock: Clock
    planned_push: PlannedPush | None = None
    _read_ahead: dict[tuple[str, int], ReadAhead] = field(default_factory=dict)
    """The units that `upcoming` named last, by the stream's name and the unit's first position."""

    @property
    def is_active(self) -> bool:
        """Whether there are several streams with known costs."""
        return self.costs is not None and len(self.views.trackers) > 1

    def upcoming(self, count: int) -> list[Entries]:
        """The next `count` units of all streams, as their entries, in the order of their slack (see
        the module)."""
        names: list[tuple[str, int]] = []  # of all units: the stream, and the first position
        units: list[Entries] = []
        slack_s, cost_s = [np.empty(0)], [np.empty(0)]
        is_next: list[bool] = []
        is_begun: list[bool] = []
        now_s = self.clock.now_s
        for tracker in self.views.trackers.values():
            starts = tracker.units.starts(count)
            need_s = (starts - tracker.reader.high) / (self.views.rate(tracker) or RATE_GUESSED)
            cost = np.zeros(len(starts))
            if self.costs is not None:
                costs = self._costs(tracker, count)
                cost = costs[:, 0] + np.cumsum(costs[:, 1])
            keys = [(tracker.name, start) for start in starts.tolist()]
            slack_s.append(slacks(need_s, cost))
            cost_s.append(cost)
            names += keys
            units += tracker.units.entries(count)
            is_next += [at == 0 for at in range(len(starts))]
            is_begun += map(self._is_read_ahead, keys)
        chosen = least_slack_first(
            np.concatenate(slack_s),
            np.array(is_next, np.bool_),
            np.array(is_begun, np.bool_),
            count,
        )
        due_s = (now_s + np.concatenate(cost_s)).tolist()
        before = self._read_ahead
        self._read_ahead = {
            names[at]: before.get(names[at]) or ReadAhead(now_s, due_s[at]) for at in chosen
        }
        return [units[at] for at in chosen]

    def wait_s(self, tracker: StreamTracker, frontier: int) -> float:
        """In how many seconds the contents of the unit at a stream's frontier arrive."""
        ahead = self._read_ahead.get((tracker.name, frontier))
        if ahead is not None:
            return max(ahead.due_s - self.clock.now_s, 0.0)
        cost = self._costs(tracker, 1)[0]
        return float(cost[0] + cost[1])

    def push_s(self, tracker: StreamTracker, frontier: int) -> float:
        """In how many seconds the unit at a stream's frontier should be pushed: when its reader
        needs it or its contents arrive, whichever is later."""
        need_s = (frontier - tracker.reader.high) / (self.views.rate(tracker) or RATE_GUESSED)
        return max(need_s, self.wait_s(tracker, frontier))

    def note_planned(self, tracker: StreamTracker, frontier: int) -> None:
        """Note that the unit at a stream's frontier is about to be pushed."""
        costs = self._costs(tracker, 1)[0]
        latency_s, transfer_s, size = costs.tolist()
        ahead = self._read_ahead.get((tracker.name, frontier))
        if size:
            late_s = tracker.lateness.s_per_byte * size
            begun_s = self.clock.now_s if ahead is None else ahead.begun_s
            self.planned_push = PlannedPush(
                tracker, latency_s + transfer_s - late_s, int(size), begun_s
            )

    def note_pushed(self, decided_s: float, now_s: float, *, failed: bool) -> None:
        """Learn from the planned push how late its contents came. The push was decided at
        `decided_s`, and ended at `now_s`."""
        planned, self.planned_push = self.planned_push, None
        if planned is not None and not failed:
            waited_s, since_s = now_s - decided_s, now_s - planned.begun_s
            planned.tracker.lateness.note(
                planned.read_s,
                waited_s if waited_s >= WAITED_S_MIN else 0.0,
                since_s,
                planned.bytes,
            )

    def _is_read_ahead(self, name: tuple[str, int]) -> bool:
        ahead = self._read_ahead.get(name)
        return ahead is not None and self.clock.now_s - ahead.begun_s < READ_AHEAD_S

    def _costs(self, tracker: StreamTracker, count: int) -> npt.NDArray[np.float64]:
        """The costs of a stream's next `count` units, as far as the epoch's order has been cut into
        units. There is a row for each unit: latency, transfer (both in seconds, see `UnitCosts`)
        and bytes to read."""
        state = tracker.order.frontier_epoch()
        if state is None or (queue := state.queue) is None:
            return np.empty((0, 3))
        now_s = self.clock.now_s
        if queue.costs is None or now_s - queue.costs_s >= COSTS_FRESH_S:
            queue.costs, queue.costs_s = np.full((len(queue.units), 3), np.nan), now_s
        costs = queue.costs[queue.next : queue.next + count]
        if len(unknown := np.flatnonzero(np.isnan(costs[:, 0]))):
            units = tracker.units.entries(count)
            costs[unknown] = self._predict([units[at] for at in unknown.tolist()])
        return tracker.lateness.added_to(costs)

    def _predict(self, units: Sequence[Entries]) -> npt.NDArray[np.float64]:
        """The cost of reading those entries of each unit that are not resident: a row for each
        unit, as `_costs` returns them."""
        assert self.costs is not None
        missing = [self.resident_set.missing(unit) for unit in units]
        rows = np.zeros((len(units), 3))
        rows[:, :2] = self.costs(missing)
        rows[:, 2] = [self.columns.bytes_of(unit) for unit in missing]
        return rows
