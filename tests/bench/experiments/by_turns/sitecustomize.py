"""Lets a mount of ours serve its streams by turns, as before it balanced them.

Python imports this module at its start if the folder is in PYTHONPATH: the benchmark `rank-balance`
starts one of its sides so. The product has no such switch.
"""

import os
from pathlib import Path

from diesel_fs.mounts.prefetch.balance import Balance
from diesel_fs.mounts.prefetch.planner import PrefetchPlanner
from diesel_fs.orders.plan import Entries


def _upcoming(self: PrefetchPlanner, count: int) -> list[Entries]:
    """The next units of the stream with the reader nearest to its frontier, then of the others."""
    trackers = sorted(self.views.trackers.values(), key=self._room.ahead_s)
    units = [unit for tracker in trackers for unit in tracker.units.entries(count)]
    soonest = [*units, *self._miss_fill.upcoming(count)][:count]
    return [self.resident_set.missing(unit) for unit in soonest]


setattr(Balance, "is_active", False)  # noqa: B010  # mypy forbids =
setattr(PrefetchPlanner, "upcoming", _upcoming)  # noqa: B010
with Path(os.environ["BY_TURNS_STARTS"]).open("a", encoding="ascii") as _starts:
    _starts.write(f"{os.getpid()}\n")
