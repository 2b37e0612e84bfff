"""Balances pushes and reads between streams by the cost of fetching their contents (Lobster).

The ranks of a training job wait for each other in each iteration, so the slowest one sets the pace.
After Lobster (sections 4.2 and 4.3), the cost of a unit (entries that are pushed at once) is
predicted from the place of its contents (`UnitCosts`) and the lateness of its stream
(`streams/lateness.py`). The cost is used twice:

- `Balance.upcoming` names the units to be read ahead, those with the least *slack* first. The slack
  is the time until the reader needs the unit, less the latency of its read, less the transfers of
  the stream's units up to and including it; but at most the slack of any later unit. So a stream
  with slow contents has more reads under way than the others. (Lobster gives each GPU a number of
  threads instead, by algorithm 1.) Serving jobs in the order of their deadlines makes the largest
  lateness least (Jackson's rule); time that a job takes after its service, such as the latency, is
  subtracted from its deadline.
- Pushes are made one after the other, and each waits for its contents. A push is due when its
  reader needs the unit and the contents have arrived; the stream whose push is due first is next
  (`turns.py`). So another stream goes first only while its push is due before the late contents
  arrive, and only within its share of the memory.

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
"""A unit that `upcoming` has named stays chosen for this time, or until it is pushed, so that small
changes of rates and costs do not cancel reads under way."""
COSTS_FRESH_S = 0.25
"""A cost is predicted again after this time: measured rates may have changed, and contents
moved."""
RATE_GUESSED = 200.0
"""The assumed files per second of a reader, until any has given signs of progress. A low guess is
soon corrected by a fast reader's signs. With a high one, files far ahead of a reader could go
before files that another reader waits for now, if those seem to arrive later."""
WAITED_S_MIN = 0.005
"""A longer push has probably waited for its contents: once they are there, to push 4 MiB takes half
of this time."""


def slacks(
    need_s: npt.NDArray[np.float64], cost_s: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """The slack of each unit in seconds, in the order of the stream's reader. `need_s`: in how many
    seconds the reader needs each unit; `cost_s`: its latency and the transfers up to it."""
    return np.minimum.accumulate((need_s - cost_s)[::-1])[::-1]


def least_slack_first(
    slack_s: npt.NDArray[np.float64],
    is_next: npt.NDArray[np.bool_],
    is_begun: npt.NDArray[np.bool_],
    count: int,
) -> list[int]:
    """The indices of `count` units, those with the least slack first. Among them are the next units
    of streams (`is_next`), up to half of `count`, and all units with reads under way (`is_begun`).
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
    """The push under way, for `note_pushed`."""

    tracker: StreamTracker
    read_s: float  # latency and transfer, as predicted
    bytes: int
    begun_s: float  # when its contents were first requested


@dataclass(slots=True)
class Balance:
    """Nothing is balanced if `costs` is None (unknown)."""

    costs: UnitCosts | None
    columns: Columns
    resident_set: ResidentSet
    views: StreamViews
    clock: Clock
    planned_push: PlannedPush | None = None
    _read_ahead: dict[tuple[str, int], ReadAhead] = field(default_factory=dict)
    """The units that `upcoming` named last, by stream and first position."""

    @property
    def is_active(self) -> bool:
        return self.costs is not None and len(self.views.trackers) > 1

    def upcoming(self, count: int) -> list[Entries]:
        """The entries of the next `count` units of all streams, in the order of their slack."""
        names: list[tuple[str, int]] = []  # the stream, and the first position
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
        """In how many seconds the contents of a stream's next unit, at the position `frontier`,
        arrive."""
        ahead = self._read_ahead.get((tracker.name, frontier))
        if ahead is not None:
            return max(ahead.due_s - self.clock.now_s, 0.0)
        cost = self._costs(tracker, 1)[0]
        return float(cost[0] + cost[1])

    def push_s(self, tracker: StreamTracker, frontier: int) -> float:
        """In how many seconds a stream's next unit should be pushed: when its reader needs it and
        its contents have arrived."""
        need_s = (frontier - tracker.reader.high) / (self.views.rate(tracker) or RATE_GUESSED)
        return max(need_s, self.wait_s(tracker, frontier))

    def note_planned(self, tracker: StreamTracker, frontier: int) -> None:
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
        """Learn how late the contents of the planned push came. It was decided at `decided_s`."""
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
        """A row for each of a stream's next `count` units, as far as the order is cut into
        units: latency, transfer (both in seconds) and bytes to read."""
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
        """The costs of the units' entries that are not resident, in rows as those of `_costs`."""
        assert self.costs is not None
        missing = [self.resident_set.missing(unit) for unit in units]
        rows = np.zeros((len(units), 3))
        rows[:, :2] = self.costs(missing)
        rows[:, 2] = [self.columns.bytes_of(unit) for unit in missing]
        return rows
