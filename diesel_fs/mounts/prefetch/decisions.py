"""What the prefetch planner decides (push, drop, sample, idle), and its statistics: plain values.

`planner.py` makes the decisions; `mounts/prefetch_worker.py` carries them out. An *entry* is a
file, by its index in the snapshot. A *marker* is an entry of an order, one in 256, which the worker
watches with inotify: when a reader opens it, the planner learns where the reader is.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias, TypedDict

from ...orders.plan import Entries

FillPolicy: TypeAlias = Literal["on-demand", "oneshot"]


@dataclass(frozen=True, slots=True, eq=False)
class Push:
    """Watch `markers`, then push the contents of `entries` into the page cache, in this order.

    Either may be empty. `chunk` is the chunk that has all entries, -1 where they are of several.
    """

    chunk: int
    entries: Entries
    markers: Entries


@dataclass(frozen=True, slots=True, eq=False)
class Drop:
    """Stop watching `markers`, then drop the pages of `entries`. Either may be empty."""

    entries: Entries
    markers: Entries


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Look whether these entries are still resident. None is watched, so opening them tells nothing
    wrong about readers."""

    entries: Entries


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to do until something is reported to the planner, or until this time."""

    until_s: float | None


Decision: TypeAlias = Push | Drop | Sample | Idle


@dataclass(slots=True)
class PrefetchCounters:
    """What was done since the start of the mount, over all versions of the dataset."""

    pushes: int = 0
    pushed_entries: int = 0
    pushed_bytes: int = 0
    absent_entries: int = 0
    drops: int = 0
    dropped_entries: int = 0
    lost_entries: int = 0

    def count_push(self, entries: int, size_bytes: int, absent: int) -> None:
        """Count a push that has ended."""
        self.pushes += 1
        self.pushed_entries += entries
        self.pushed_bytes += size_bytes
        self.absent_entries += absent

    def count_drop(self, entries: int) -> None:
        """Count a drop that has ended."""
        self.drops += 1
        self.dropped_entries += entries


class StreamStats(TypedDict):
    """Where the reader of one stream is (`stream_tracker.py` explains the positions).

    Positions are counted in the current epoch; `high` and `frontier` exceed its `length` where they
    are in the next epoch.
    """

    name: str
    epoch: int  # -1 where all announced epochs have been read
    length: int
    position: int
    low: int
    high: int
    frontier: int
    entries_per_s: float
    tentative: bool


class PrefetchStats(TypedDict):
    """Counters since the start, and the state now.

    `absent_entries`: pushes that the kernel refused, since it did not know the files.
    `lost_entries`: pages that the kernel has freed. `known_bytes`: kernel memory for the names of
    files. `oneshot_chunks`: how many chunks the policy `oneshot` makes resident from the start;
    `oneshot_done_chunks`: how many it has. `has_room`: whether a miss may lead to a push.
    """

    pushes: int
    pushed_entries: int
    pushed_bytes: int
    absent_entries: int
    drops: int
    dropped_entries: int
    lost_entries: int
    resident_entries: int
    resident_bytes: int
    known_bytes: int
    budget_bytes: int
    has_room: bool
    oneshot_chunks: int
    oneshot_done_chunks: int
    streams: list[StreamStats]
