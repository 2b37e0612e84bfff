"""What residency decides, and what it tells of itself: plain values.

Not owned: how a decision comes about (`planner.py`), and carrying it out.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias, TypedDict

from ...orders.plan import Entries

FillPolicy: TypeAlias = Literal["on-demand", "oneshot"]


@dataclass(frozen=True, slots=True, eq=False)
class Push:
    """Put a watch on `markers`, then push `entries` in this order; `chunk` is -1 for a mixed unit.

    Either may be empty.
    """

    chunk: int
    entries: Entries
    markers: Entries


@dataclass(frozen=True, slots=True, eq=False)
class Drop:
    """Take the watches off `markers`, then drop the pages of `entries`. Either may be empty."""

    entries: Entries
    markers: Entries


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Look whether these are still resident; none of them has a watch, so opening them is free."""

    entries: Entries


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to do until a fact comes, or until this time."""

    until_s: float | None


Decision: TypeAlias = Push | Drop | Sample | Idle


@dataclass(slots=True)
class PrefetchCounters:
    """What has been done since the mount's start, over all versions."""

    pushes: int = 0
    pushed_entries: int = 0
    pushed_bytes: int = 0
    absent: int = 0
    drops: int = 0
    dropped_entries: int = 0
    lost_entries: int = 0

    def count_push(self, entries: int, size_bytes: int, absent: int) -> None:
        """A push has ended."""
        self.pushes += 1
        self.pushed_entries += entries
        self.pushed_bytes += size_bytes
        self.absent += absent

    def count_drop(self, entries: int) -> None:
        """A drop has ended."""
        self.drops += 1
        self.dropped_entries += entries


class StreamStats(TypedDict):
    """Where one stream is; positions are those of its current epoch, high and frontier may pass
    its length by as much as they have entered the next one."""

    name: str
    epoch: int  # -1 where all known ones have been read
    length: int
    position: int
    low: int
    high: int
    frontier: int
    entries_per_s: float
    tentative: bool


class PrefetchStats(TypedDict):
    """Counters since the start, and the state now. `oneshot_chunks` is how many chunks are to be
    made resident from the start, and `oneshot_done_chunks` how many have been; without room
    (`has_room`) no further ones are.
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
