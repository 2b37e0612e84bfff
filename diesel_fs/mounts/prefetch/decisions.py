"""What the prefetch planner decides (push, drop, sample, idle), and its statistics: plain values.

`planner.py` makes the decisions; `mounts/daemon/prefetch_worker.py` carries them out. An *entry* is
a file, by its index in the snapshot. A *marker* is a file of an order, one in 256, which the worker
watches with inotify: when a reader opens it, the planner learns where the reader is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypedDict

from ...orders.plan import Entries, Epoch

FillPolicy: TypeAlias = Literal["on-demand", "oneshot"]

UnitCosts: TypeAlias = Callable[[Sequence[Entries]], Sequence[tuple[float, float]]]
"""Predicts what it costs to read each of these lists of entries, by where their contents lie: the
latency (until the first bytes arrive) and the transfer (for how long the read keeps the bandwidth
that all reads share), both in seconds. Latencies of reads that are under way at once overlap, and
transfers add up."""


@dataclass(frozen=True, slots=True, eq=False)
class Push:
    """Watch `markers`, then push the contents of `entries` into the page cache, in this order.

    Either may be empty. `chunk` is the chunk that has all entries, -1 where they are of several.
    An urgent one is none of those that `PrefetchPlanner.upcoming` has foreseen.
    """

    chunk: int
    entries: Entries
    markers: Entries
    is_urgent: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Drop:
    """Stop watching `markers`, then drop the pages of `entries`. Either may be empty."""

    entries: Entries
    markers: Entries


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Look whether these entries are still resident. None of them is watched, since the worker
    opens them, and that would look like an open by a reader."""

    entries: Entries


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to do until something is reported to the planner, or until this time."""

    until_s: float | None


Decision: TypeAlias = Push | Drop | Sample | Idle


class PrefetchCounters(TypedDict):
    """What was done since the start of the mount, over all versions of the dataset.

    `absent_entries`: pushes that the kernel refused, since it did not know the files.
    `lost_entries`: files whose pages the kernel has freed. `kept_entries`: files of orders that
    were resident already when their turn came.
    """

    pushes: int
    pushed_entries: int
    pushed_bytes: int
    absent_entries: int
    drops: int
    dropped_entries: int
    lost_entries: int
    kept_entries: int


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


@dataclass(frozen=True, slots=True, eq=False)
class StreamReading:
    """What a stream is about to read, as far as it is announced: the epoch of the next push, the
    epoch after it, and a position in the first before which all has been read."""

    name: str
    current: Epoch | None
    following: Epoch | None
    read_up_to: int


class PrefetchStats(PrefetchCounters):
    """Counters since the start, and the state now.

    `resident_bytes` of `dataset_bytes` are in the page cache, in whole pages, as far as is known.
    `known_bytes`: kernel memory for the names of files. `oneshot_chunks`: how many chunks the
    policy `oneshot` makes resident from the start; `oneshot_done_chunks`: how many it has.
    `has_room`: whether a miss may lead to a push. `waits_for_room`: whether a stream's next unit
    does not fit beside what others have claimed, or what its own reader has not read yet.
    """

    resident_entries: int
    resident_bytes: int
    dataset_bytes: int
    known_bytes: int
    budget_bytes: int
    has_room: bool
    waits_for_room: bool
    oneshot_chunks: int
    oneshot_done_chunks: int
    streams: list[StreamStats]
