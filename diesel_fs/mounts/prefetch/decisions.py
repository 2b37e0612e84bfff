"""The planner's decisions (push, drop, sample, idle) and statistics, as plain values.

`daemon/prefetch_worker.py` carries the decisions out. An *entry* is a file, by its index in the
snapshot. A *marker* is a file of an order, one in 256, which the worker watches with inotify to see
how far a reader is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypedDict

from ...orders.plan import Entries, Epoch

FillPolicy: TypeAlias = Literal["on-demand", "oneshot"]
"""What is pushed without a plan: the chunks of missed files, or all chunks from the start."""

UnitCosts: TypeAlias = Callable[[Sequence[Entries]], Sequence[tuple[float, float]]]
"""Predicts the cost of reading each list of entries, in seconds: the latency (until the first bytes
arrive) and the transfer (while the read occupies the bandwidth that all reads share). Latencies of
concurrent reads overlap, and transfers add up."""


@dataclass(frozen=True, slots=True, eq=False)
class Push:
    """Watch `markers`, then push the contents of `entries`, in this order; either may be empty.
    `chunk` is -1 if the entries are of several. An urgent push goes before its turn (`turns.py`),
    and `PrefetchPlanner.upcoming` does not foresee it."""

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
    """Check whether these entries are still resident. None is watched for opens, because the worker
    opens each."""

    entries: Entries


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to do until something is reported, or until `until_s` (None: only a report helps)."""

    until_s: float | None


Decision: TypeAlias = Push | Drop | Sample | Idle


class PrefetchCounters(TypedDict):
    """Counters since the start of the mount, over all versions of the dataset.

    `absent_entries`: pushed files that the kernel did not know. `lost_entries`: pushed files that
    the kernel has freed. `kept_entries`: files of orders that were resident already when it was
    first their turn to be pushed.
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
    """Positions (`streams/stream_tracker.py`) in the epoch that `high` is in; `position` equals
    `high`. `frontier` exceeds the epoch's `length` if it is in a later one."""

    name: str
    epoch: int  # -1 if all announced epochs have been read
    length: int
    position: int
    low: int
    high: int
    frontier: int
    entries_per_s: float
    tentative: bool


@dataclass(frozen=True, slots=True, eq=False)
class StreamReading:
    """`current` is the epoch of the stream's next push, `following` the one after it, if any. All
    files of `current` before `read_up_to` have been read."""

    name: str
    current: Epoch | None
    following: Epoch | None
    read_up_to: int


class PrefetchStats(PrefetchCounters):
    """`resident_bytes` of `dataset_bytes` are in the page cache, in whole pages, as far as is
    known. `known_bytes`: kernel memory for the names of files. `oneshot_chunks`: chunks that the
    policy `oneshot` pushes from the start; `oneshot_done_chunks` of them had their turn.
    `has_room`: a miss may lead to a push. `waits_for_room`: a stream's next unit does not fit
    beside files that are claimed, or read sooner."""

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
