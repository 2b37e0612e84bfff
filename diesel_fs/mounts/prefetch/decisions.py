"""The planner's decisions (push, drop, sample, idle) and statistics, as plain values.

`planner.py` makes the decisions; `daemon/prefetch_worker.py` carries them out. An *entry* is a
file, by its index in the snapshot. A *marker* is a file of an order, one in 256, which the worker
watches with inotify to see how far a reader is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypedDict

from ...orders.plan import Entries, Epoch

FillPolicy: TypeAlias = Literal["on-demand", "oneshot"]
"""Which contents are pushed without a plan: the chunks of files that were missed, or all chunks,
from the start."""

UnitCosts: TypeAlias = Callable[[Sequence[Entries]], Sequence[tuple[float, float]]]
"""Predicts the cost of reading each list of entries, from the places of their contents: the latency
(until the first bytes arrive) and the transfer (how long the read keeps the bandwidth that all
reads share), both in seconds. Latencies of concurrent reads overlap, and transfers add up."""


@dataclass(frozen=True, slots=True, eq=False)
class Push:
    """Watch `markers`, then push the contents of `entries` into the page cache, in this order.

    Either may be empty. `chunk` is the chunk of all entries, -1 if they are of several. An urgent
    push goes before its turn (`turns.py`); `PrefetchPlanner.upcoming` does not foresee it.
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
    """Look whether these entries are still resident. No entry of them is watched for opens, because
    the worker opens it to look."""

    entries: Entries


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to do until something is reported to the planner, or until the time `until_s` (None:
    only a report can change that)."""

    until_s: float | None


Decision: TypeAlias = Push | Drop | Sample | Idle


class PrefetchCounters(TypedDict):
    """Counters since the start of the mount, over all versions of the dataset.

    `absent_entries`: pushed files that the kernel did not know. `lost_entries`: pushed files that
    the kernel has freed. `kept_entries`: files of orders that were resident already when it was
    their turn to be pushed.
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
    """The positions of one stream, which `streams/stream_tracker.py` explains.

    Positions are counted in the current epoch; `high` and `frontier` exceed its `length` if they
    are in the next epoch.
    """

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
    """How far a stream has been read and pushed.

    `current` is the epoch of its next push, `following` the epoch after that; None if there is no
    such epoch. All files of `current` before the position `read_up_to` have been read.
    """

    name: str
    current: Epoch | None
    following: Epoch | None
    read_up_to: int


class PrefetchStats(PrefetchCounters):
    """Counters since the start, and the state now.

    `resident_bytes` of `dataset_bytes` are in the page cache, in whole pages, as far as is known.
    `known_bytes`: kernel memory for the names of files. `oneshot_chunks`: how many chunks the
    policy `oneshot` makes resident from the start; `oneshot_done_chunks`: how many of them had
    their turn. `has_room`: a miss may lead to a push. `waits_for_room`: a stream's next unit does
    not fit beside files that are claimed, or read sooner.
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
