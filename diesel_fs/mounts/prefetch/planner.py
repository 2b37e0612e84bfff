"""Decides which file contents to push into the kernel's page cache next, and which to drop.

A *push* stores the contents of files in the page cache, so that a reader finds them there: the
files are then *resident*. A *sample* looks whether they still are. A *miss* is a READ that reached
the mount since its file was not resident. The *budget* is the memory for resident files.

The prefetch worker (`mounts/prefetch_worker.py`) tells the planner what has happened: misses, opens
of marker files (`decisions.py`), changes of the plan, files that the kernel has forgotten. It asks
for the next decision (`next`), carries it out, and reports the result (`pushed`, `dropped`,
`sampled`) before it asks again.

Without a plan, a miss pushes the rest of its chunk while that fits the free part of the budget; the
policy `oneshot` does that for all chunks from the start. Nothing is dropped for such pushes. So all
of a dataset that fits becomes resident. Of a larger one, what came first stays, and READs bring the
rest file by file; random misses never make the planner push and drop in turns.

With plans, each *stream* (a reader with a known order) gets an equal share of the budget. Its order
is cut into units (`units.py`), and the unit that a reader needs soonest over all streams is pushed
first, unless its contents have not arrived yet ("Balance" below). Where the store is slow, that is
an *urgent* unit as long as the reader comes to large files within a second that are not pushed yet.
A stream *claims* the entries of a unit from then until its reader has passed them
(`stream_tracker.py`), and claimed entries are not dropped. Room is made in this order:

1. entries that readers have passed;
2. other entries that no stream claims, first those of least importance, then those read last;
3. the farthest claims of a stream whose reader has stood still while others went on, or that is
   more than twice as far ahead of its reader as the stream that needs room.

Files that were only read, and not pushed, do not count: the kernel frees their pages first.

**Balance.** The ranks of a training job wait for each other in each iteration, so the slowest one
sets the pace. After Lobster (sections 4.2 and 4.3), the cost of a unit is predicted by where its
contents lie (`UnitCosts`, and what the stream's last pushes took beyond that), and used twice:

- `upcoming` names the units to be read ahead, those with the least *slack* first: the time until
  the reader needs a unit, less the latency of its read, less the transfers of its stream's units up
  to it (or the slack of a later unit of the stream, where that is less). So a stream whose contents
  are slow to come has more reads under way than the others. Lobster gives each GPU a number of
  threads, which it finds by a binary search (algorithm 1, whose line 18 is inverted in print); here
  the reads under way follow from the order. Of jobs with deadlines that one resource serves (here
  the bandwidth), the order of the deadlines makes the largest lateness least (Jackson's rule), and
  a time that a job takes after its service, as the latency, is taken off its deadline.
- Pushes are made one after the other, and one whose contents have not arrived holds all others up.
  So the next push is that of the stream for which the later of two times is the earliest: when its
  reader needs the unit, and when the contents arrive. A stream whose contents are late lets others
  go first only until they are as far ahead as it still has to wait, and only within their shares of
  the memory.

With one stream there is nothing to balance, and no cost is asked for.

**Importance** (iCache, HPCA 2023, section III). Programs may say how important entries are, as
likely as they are read again in the next epoch. Of unclaimed entries the least important is dropped
first, by an `ImportanceHeap`. With `keeps_important` (`--evict importance`) streams do not claim
the whole memory ahead of their readers, which would push the important entries of the next epoch
out. The memory has two parts, as large as readers' accesses to entries of high and of low
importance are frequent (section III-A's sizes of H-cache and L-cache). The first keeps the most
important entries that were read. A sixteenth of the second is what streams share ahead of their
readers; the rest keeps the entries of low importance that were read last, as long as a sampler
takes such entries for others that would have to be loaded, and else belongs to the first part.
The packages of iCache, of entries of low importance, are chunks here (`orders/importance.py`).

Pure: no I/O, and the time is an argument (`now_s`). Used by one thread.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from ...errors import UsageError
from ...orders.plan import NO_ENTRIES, STREAMS_MAX, Entries, EntryOrder, Epoch, Stream, check_plan
from .decisions import (
    Decision,
    Drop,
    FillPolicy,
    Idle,
    PrefetchCounters,
    PrefetchStats,
    Push,
    Sample,
    StreamReading,
    StreamStats,
    UnitCosts,
)
from .miss_fill import ChunkEntries, MissFill
from .resident_set import Mask, ResidentSet
from .stream_tracker import MARKER_STRIDE, NextUnit, StreamTracker, never_logged
from .units import KNOWN_ENTRY_BYTES, PAGE_BYTES, Columns

STILL_S = 60.0
"""A stream without a sign of its reader for so long, while others go on, is *still*: it gives its
memory up. A validation set waits longer than that in many runs, and comes back with one miss."""
STILL_DIVISOR = 4
"""A still stream gets room only while this part of the budget (a quarter) stays free."""
TENTATIVE_S = 600.0
"""A tentative stream (a program has read its list of files, but none of the files) is withdrawn
after so long."""

LATE_READ_S = 1.0
"""A miss that is reported later than this after its file was pushed means that the kernel has freed
the pages. An earlier one may be of a READ that began before the push."""
KNOWN_DIVISOR = 8
"""The kernel must know a file's name before its content can be pushed. The kernel's memory for
names counts for at most this part (an eighth) of the budget: names of small files take a quarter of
what their contents take, whatever the budget is, and the kernel frees both alike."""

URGENT_S = 1.0
"""From a slow store, what a reader comes to within so many seconds is pushed first (`units.py`)."""
URGENT_WEIGHT, URGENT_START_S = 2.0, 0.5
"""Urgent pushes take at most so many times as long as others do together, and at first so long.
So a store that gives single files far more slowly than chunks, as a disk that has to seek, still
gives chunks for a third of the time."""

HIGH_FIRST, ACCESSES_MIN, ACCESSES_MAX = 9.0, 1 << 10, 1 << 17
"""Before accesses are counted, nine in ten are taken for those of important entries, as iCache does
(section V-A), which counts as so many thousand. The older half of so many accesses is forgotten."""
AHEAD_PART_MIN, AHEAD_PART_STEP = 1 / 16, 1 / 64
"""The least part of the memory that is not for entries of high importance. It changes by no less
than a step, as units are cut anew then."""
AHEAD_DIVISOR, AHEAD_BYTES_MIN = 16, 32 << 20
"""One in so many bytes of that part is for what streams claim ahead of their readers; of a small
part so much, but no more than half."""

READ_AHEAD_S = 5.0
"""A unit that the worker was told to read ahead stays among those for so long, else until it is
pushed: where rates and costs change a little, reads that are under way would be given up."""
RATE_GUESSED = 1_000.0
"""How many files a second readers are assumed to read before any of them has given signs: this is
compared with the costs of units."""
WAITED_S_MIN = 0.005
"""A push that takes longer has probably waited for its contents: 4 MiB that are there take half of
it."""

PAUSE_S, PAUSE_S_MAX = 0.5, 8.0
"""After a failed push, the first and the longest pause before the next one."""

SAMPLE_S = 2.0
"""Time between samples: the kernel has been seen to free idle pages after some 5 s."""
SAMPLE_ENTRIES = 32
"""How many entries one sample looks at, evenly chosen from the next `SAMPLE_AHEAD_ENTRIES`."""
SAMPLE_AHEAD_ENTRIES = 8_192

MARKERS_MAX = 2_048
"""Watches of all streams together: a quarter of the lowest limit that kernels set for a user."""
UNWATCH_MIN = 256
"""Watches that are not needed any more are removed so many at once, or when idle."""

PAGES_MAX = (1 << 32) - 1
"""A file of 16 TiB counts as this many pages: it never fits."""

UNITS_SKIPPED_MAX = 64
"""How many units with nothing to push one decision skips, so that it takes a few milliseconds."""


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """When the worker was told to read a unit ahead, and when the contents are expected."""

    begun_s: float
    due_s: float


@dataclass(frozen=True, slots=True)
class PlannedPush:
    """Of the decision that is not yet reported: its stream, and what it was predicted to cost."""

    tracker: StreamTracker
    read_s: float  # latency and transfer, as the source has predicted them
    bytes: int
    begun_s: float  # when its contents were first asked for


@dataclass(slots=True)
class Watches:
    """Which entries the worker watches for opens (inotify). Streams may share a watch."""

    users: dict[int, list[tuple[str, int]]] = field(default_factory=dict)
    """By entry: the streams that need its watch, each with its position of the entry."""
    unneeded: dict[int, None] = field(default_factory=dict)
    """Entries that are still watched although no stream needs it; an ordered set."""

    def add(self, entry: int, name: str, position: int) -> bool:
        """Note that a stream needs a watch. Returns whether the worker has to make it."""
        users = self.users.setdefault(entry, [])
        users.append((name, position))
        if entry in self.unneeded:
            del self.unneeded[entry]
            return False
        return len(users) == 1

    def remove(self, name: str, markers: list[tuple[int, int]]) -> None:
        """Note that a stream does not need the watches of these markers (position, entry)."""
        for position, entry in markers:
            users = self.users.get(entry, [])
            if (name, position) in users:
                users.remove((name, position))
                if not users:
                    del self.users[entry]
                    self.unneeded[entry] = None

    def is_watched(self, entry: int) -> bool:
        """Whether the worker watches an entry."""
        return entry in self.users or entry in self.unneeded

    def take_unneeded(self) -> Entries:
        """The entries that need not be watched; the caller has the worker stop watching them."""
        entries = np.fromiter(self.unneeded, np.uint32)
        self.unneeded.clear()
        return entries


class PrefetchPlanner:
    """The decisions for one version of the dataset of a mount (see the module)."""

    def __init__(
        self,
        chunk: npt.NDArray[np.int64],
        size: npt.NDArray[np.int64],
        chunk_count: int,
        *,
        budget_bytes: int,
        policy: FillPolicy = "on-demand",
        offset: npt.NDArray[np.uint32] | None = None,
        is_file: Mask | None = None,
        costs: UnitCosts | None = None,
        keeps_important: bool = False,
    ) -> None:
        """`chunk`, `size`, `offset` and `is_file` have a value for each entry: its (first) chunk or
        -1, its size in bytes, its offset in the chunk (if not given, entries lie in it by index),
        and whether it is a file (if not given: whether it has a chunk). Without `costs`, all units
        count as equally near. `keeps_important`: see "Importance" in the module.
        """
        pages = np.minimum(-(-size // PAGE_BYTES), PAGES_MAX).astype(np.uint32)
        pages[chunk < 0] = 0
        self._columns = Columns(chunk.astype(np.int32), pages, chunk_count)
        self._dataset_bytes = int(pages.sum(dtype=np.int64)) * PAGE_BYTES
        self._chunk = self._columns.chunk
        self._entry_count = len(pages)
        self._is_file: Mask = chunk >= 0 if is_file is None else is_file
        self._budget_bytes = budget_bytes
        self._known_entries = 0  # names that the kernel knows
        self._chunk_entries = ChunkEntries(self._columns, offset)
        self.resident_set = ResidentSet(self._columns)
        self._push_again: deque[Entries] = deque()  # freed by the kernel, or of a failed push
        self._miss_fill = MissFill(
            self._chunk_entries, self.resident_set, chunk_count, everything=policy == "oneshot"
        )
        self._trackers: dict[str, StreamTracker] = {}  # of each stream, by its name
        self._finished: dict[str, None] = {}  # streams read to their end; an ordered set
        self.watches = Watches()
        self._share_bytes = 0  # of each stream; 0: to be computed
        self._keeps_important = keeps_important
        self._high_passed, self._low_passed = HIGH_FIRST * ACCESSES_MIN, float(ACCESSES_MIN)
        self._ahead_part = 1.0  # of the memory that streams share
        self._has_substitutes = False  # see `set_importances`
        self._valued = 0  # changes of importance that chunks have values for
        self._store_is_slow = False
        self._is_logged: Callable[[Entries], bool] = never_logged
        self._keeps_skipped = False
        self._decided_s = 0.0  # when the last decision was made
        self._is_urgent = False  # the decision not yet reported
        self._urgent_s = self._others_s = 0.0  # how long pushes took since no reader was behind
        self._outstanding: Push | Drop | Sample | None = None  # the decision not yet reported
        self._costs = costs
        # By stream and first position, of the units that `upcoming` named last
        self._read_ahead: dict[tuple[str, int], ReadAhead] = {}
        self._planned_push: PlannedPush | None = None
        self._start_s = math.nan  # times in `resident_set` count from here
        self._pause_s = 0.0  # the pause after the last push, if it failed
        self._paused_until_s = -math.inf
        self._waits_for_room = False  # see `PrefetchStats`
        self._now_s = 0.0
        self._counters = PrefetchCounters(
            pushes=0,
            pushed_entries=0,
            pushed_bytes=0,
            absent_entries=0,
            drops=0,
            dropped_entries=0,
            lost_entries=0,
            kept_entries=0,
        )

    @property
    def streams(self) -> dict[str, Stream]:
        """The plan: the streams that are announced, by name, without the epochs that were read."""
        return {name: tracker.stream for name, tracker in self._trackers.items()}

    @property
    def has_streams(self) -> bool:
        """Whether a plan is announced."""
        return bool(self._trackers)

    @property
    def wants_misses(self) -> bool:
        """Whether the worker should report every miss. Without a plan and without free room, a few
        misses are enough: they only show that the kernel has freed pages.
        """
        return bool(self._trackers) or self._miss_fill.has_room(self._room_bytes())

    def inherit(self, old: "PrefetchPlanner", was: npt.NDArray[np.int32]) -> None:
        """Continue where the planner of another version ended. `was` gives the index that each
        entry had there (-1: none). Plans are not taken over."""
        self.resident_set.inherit(old.resident_set, was)
        self._counters, self._start_s, self._now_s = old._counters, old._start_s, old._now_s

    def take_over(self, entries: Entries, now_s: float) -> bool:
        """Note that these entries are resident, which another version's planner knew. False where
        there is no room for them, and they are not. None may be named twice."""
        self._tick(now_s)
        entries = self.resident_set.missing(entries)
        if self._columns.bytes_of(entries) > self._room_bytes():
            return False
        self.resident_set.add(entries)
        self.resident_set.pushed_s[entries] = now_s - self._start_s
        return True

    def reading(self) -> list[StreamReading]:
        """Of each stream: the epoch of its next push, the one after it, and how far the first has
        been read."""
        return [tracker.reading() for tracker in self._trackers.values()]

    def pushed_early(self, name: str) -> Entries:
        """The entries of the epoch of a stream's next push that were chosen for pushes before."""
        return self._trackers[name].pushed_early()

    def running(self, now_s: float) -> list[str]:
        """The names of streams that are probably being read."""
        return [name for name, tracker in self._trackers.items() if tracker.is_running(now_s)]

    # What has happened: changes of the plan

    def announce(self, stream: Stream, now_s: float) -> None:
        """Announce a stream; one of the same name is replaced. Raises UsageError, as the next three
        methods do, and then nothing has changed.

        Where there are as many streams as allowed, the first that was read to its end makes room,
        so programs that use a new name for each epoch need not withdraw any.
        """
        self._tick(now_s)
        is_full = stream.name not in self._trackers and len(self._trackers) >= STREAMS_MAX
        if is_full and self._finished:
            self.withdraw(next(iter(self._finished)))
        self._check_stream(stream, stream.epochs)
        self._remove_tracker(stream.name)
        self._trackers[stream.name] = tracker = StreamTracker(self._columns, stream, now_s)
        tracker.is_logged = self._is_logged
        tracker.skipped = [] if self._keeps_skipped else None
        self._share_bytes = 0

    def extend(self, name: str, epochs: Sequence[Epoch]) -> None:
        """Add epochs to a stream, or entries to its last one (see `Stream.extended`)."""
        tracker = self._tracker(name)
        tracker.extended(self._check_stream(tracker.stream.extended(epochs), epochs))
        self._share_bytes = 0

    def replace(self, name: str, epoch: Epoch, position: int = 0) -> None:
        """Replace an epoch of a stream, whole or from a position on."""
        tracker = self._tracker(name)
        stream = self._check_stream(tracker.stream.replaced(epoch, position), [epoch])
        self._release(tracker, tracker.replaced(stream, epoch.number, position), behind=False)
        self._share_bytes = 0

    def withdraw(self, name: str) -> None:
        """Remove a stream: it will not be read any more."""
        self._tracker(name)
        self._remove_tracker(name)
        self._finished.pop(name, None)

    def progress(self, name: str, position: int, now_s: float, epoch: int | None = None) -> None:
        """The reader of a stream says which position it reads next, in the current epoch unless
        another is named. This overrides what opens of marker files say. Raises UsageError.
        """
        self._tick(now_s)
        tracker = self._tracker(name)
        state = tracker.current_epoch() if epoch is None else tracker.epoch_numbered(epoch)
        if state is None or not 0 <= position <= len(state.epoch):
            raise UsageError(f"stream {name} has no position {position} there")
        position += state.base
        if not tracker.has_workers_ahead(position) and tracker.has_gaps(position):
            self._take_back(tracker, 0)  # something there was given up: claim all again
        tracker.progress(position, now_s)

    def set_importances(
        self,
        entries: EntryOrder,
        values: npt.NDArray[np.float32],
        *,
        more: bool = False,
        job: str = "",
        benefit: float = 1.0,
        substitutes: bool = False,
    ) -> int:
        """Set the importance of entries, one number for each: unclaimed entries of less importance
        are dropped first. Returns how many jobs have set any.

        `more`: others follow. Several jobs are told apart by `job`, and merged by their `benefit`
        (`cache/importance.py`). `substitutes`: the job takes entries of low importance that are
        resident for others. Raises UsageError for entries that there are not, and for NaN,
        infinite and negative numbers.
        """
        jobs = self.resident_set.set_importances(
            self._checked(entries), values, more=more, job=job, benefit=benefit
        )
        self._has_substitutes, self._share_bytes = substitutes, 0
        if self._keeps_important and self._ahead_part == 1:
            self._divide_memory()
        return jobs

    def take_chunk_values(self) -> npt.NDArray[np.float32] | None:
        """What new importances say of each chunk: how many of its entries an epoch is likely to
        read, without those that this mount keeps. None where nothing is new."""
        heap = self.resident_set.heap
        if heap is None or heap.changes == self._valued:
            return None
        self._valued = heap.changes
        everything = np.arange(self._entry_count, dtype=np.uint32)
        values = heap.importance(everything)
        if self._keeps_important:
            values[heap.is_high(everything)] = 0
        is_here = self._chunk >= 0
        count = self._columns.chunk_count
        return np.bincount(self._chunk[is_here], values[is_here], count).astype(np.float32)

    # What has happened: opens, READs, pages and memory

    def set_known_entries(self, count: int) -> None:
        """Report how many names the worker has made known to the kernel."""
        self._known_entries = count
        self._share_bytes = 0

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget; where it is smaller, the next decisions drop."""
        self._budget_bytes = budget_bytes
        self._share_bytes = 0

    def set_logged(self, is_logged: Callable[[Entries], bool]) -> None:
        """Order logs are in use: `is_logged` says whether one has an order, which then is not cut
        by chunks."""
        self._is_logged, self._keeps_skipped = is_logged, True
        for tracker in self._trackers.values():
            tracker.is_logged, tracker.skipped = is_logged, []

    def take_skipped(self) -> list[Entries]:
        """The entries that readers have passed before their pushes, since the last call, some of
        them twice: so READs have brought them, perhaps those of other files. Only after
        `set_logged`."""
        skipped: list[Entries] = []
        for tracker in self._trackers.values():
            if tracker.skipped:
                skipped += tracker.skipped
                tracker.skipped = []
        return skipped

    def set_store_is_slow(self, *, is_slow: bool) -> None:
        """Report whether reads of the store take long."""
        self._store_is_slow = is_slow

    def opened(self, entry: int, now_s: float) -> None:
        """Report that a watched entry was opened."""
        self._tick(now_s)
        users = tuple(self.watches.users.get(entry, ()))
        if not users:
            return
        # The file may be in several orders: the reader that is nearest to it has opened it.
        least = min(tracker.nearest_position(entry)[1] for tracker in self._trackers.values())
        for name in {name for name, _ in users}:
            tracker = self._trackers[name]
            high, positions = tracker.high, [position for user, position in users if user == name]
            nearest = min(positions, key=lambda position: abs(position - high))
            if abs(nearest - high) <= least + MARKER_STRIDE:
                # The order may have the file before the marker, too, as the end of an epoch has one
                # of the first files of the next: the reader comes there first.
                first, _ = tracker.nearest_position(entry)
                tracker.note_open(first if high <= first < nearest else nearest, now_s)

    def missed(self, entry: int, now_s: float, *, is_sure: bool = True) -> None:
        """Report a miss: a READ of an entry's content reached the server; surely since a reader
        wanted it, or perhaps since the kernel reads ahead of another file."""
        self._tick(now_s)
        if not 0 <= entry < self._entry_count or not self._columns.pages[entry]:
            return
        tracker, position = self._stream_of_read(entry, now_s, is_sure=is_sure)
        if self.resident_set.resident[entry]:
            if now_s - self._start_s - float(self.resident_set.pushed_s[entry]) >= LATE_READ_S:
                self._note_freed(entry, tracker, position)
            return
        self.resident_set.note_read(entry, now_s - self._start_s)
        need = int(self._columns.pages[entry]) * PAGE_BYTES
        if tracker is None and need <= self._contents_bytes():
            self._miss_fill.missed(int(self._chunk[entry]), need, self._room_bytes(), self._now_s)

    def forgotten(self, entries: EntryOrder) -> None:
        """Report that the kernel has forgotten these entries, and freed their pages."""
        self.resident_set.remove(np.unique(self._checked(entries)))

    def pushed(
        self,
        push: Push,
        done: EntryOrder,
        absent: EntryOrder,
        now_s: float,
        *,
        failed: bool = False,
    ) -> None:
        """Report the result of a push: `done` are resident now, `absent` are unknown to the kernel.

        Entries that are `absent` or in neither list are not pushed again before they are missed. If
        the store has `failed`, those in neither list are pushed again, after a pause that doubles
        with each failure.
        """
        self._tick(now_s)
        assert push is self._outstanding, "another decision is outstanding"
        self._outstanding = None
        if self._is_urgent:
            self._urgent_s += now_s - self._decided_s
        else:
            self._others_s += now_s - self._decided_s
        planned, self._planned_push = self._planned_push, None
        if planned is not None and not failed:
            waited_s, since_s = now_s - self._decided_s, now_s - planned.begun_s
            planned.tracker.note_read_s(
                planned.read_s,
                waited_s if waited_s >= WAITED_S_MIN else 0.0,
                since_s,
                planned.bytes,
            )
        resident, unknown = self._checked(done), self._checked(absent)
        self.resident_set.pushed_s[resident] = now_s - self._start_s
        self.resident_set.add(resident if done is push.entries else np.unique(resident))
        self._counters["pushes"] += 1
        self._counters["pushed_entries"] += len(resident)
        self._counters["pushed_bytes"] += self._columns.bytes_of(resident)
        self._counters["absent_entries"] += len(unknown)
        self._pause_s = min(2 * self._pause_s or PAUSE_S, PAUSE_S_MAX) if failed else 0.0
        self._paused_until_s = now_s + self._pause_s
        if failed:
            reported = np.concatenate([resident, unknown])
            self._push_again.append(push.entries[~np.isin(push.entries, reported)])

    def dropped(self, drop: Drop) -> None:
        """Report that a drop was carried out."""
        assert drop is self._outstanding, "another decision is outstanding"
        self._outstanding = None
        self.resident_set.victims_dropped(drop.entries)
        self._counters["drops"] += 1
        self._counters["dropped_entries"] += len(drop.entries)

    def sampled(self, entries: EntryOrder, resident_mask: Mask) -> None:
        """Report which of these entries are resident, after a sample or at any time."""
        if isinstance(self._outstanding, Sample):
            self._outstanding = None
        freed = self._checked(entries)[~np.asarray(resident_mask, np.bool_)]
        for entry in freed[self.resident_set.resident[freed]].tolist():
            if self.resident_set.resident[entry]:  # not removed with an earlier one
                self._note_freed(entry, *self._nearest_stream(entry))

    # Decisions

    def next(self, now_s: float) -> Decision:
        """What to do now. The result of every decision but Idle is reported before the next
        call."""
        assert self._outstanding is None, "the last decision has not been reported"
        self._tick(now_s)
        heap = self.resident_set.heap
        is_building = heap is not None and heap.build_some()
        self._release_passed(now_s)
        decision = (
            self._shrink()
            or self._unwatch_many(UNWATCH_MIN)
            or self._next_push(now_s)
            or self._sample(now_s)
            or self._unwatch_many(1)
        )
        self._outstanding, self._decided_s = decision, now_s
        return decision or Idle(now_s if is_building else self._next_change(now_s))

    def _next_push(self, now_s: float) -> Push | Drop | None:
        self._waits_for_room = self._is_urgent = False
        self._planned_push = None
        if now_s < self._paused_until_s:
            return None
        return self._push_freed() or self._push_planned(now_s) or self._push_unplanned()

    def upcoming(self, count: int) -> list[Entries]:
        """The entries of the next `count` pushes, as far as they can be foreseen, in the order in
        which the worker shall fetch their contents ahead. Each stream has its next unit among them,
        where there are at most half as many streams."""
        trackers = list(self._trackers.values())
        if len(trackers) == 1:
            planned = trackers[0].units_ahead(count)
        else:
            planned = self._upcoming_of(trackers, count)
        soonest = [*planned, *self._miss_fill.upcoming(count)][:count]
        return [self.resident_set.missing(unit) for unit in soonest]

    def _upcoming_of(self, trackers: Sequence[StreamTracker], count: int) -> list[Entries]:
        """The next units of these streams, those with the least slack first (see the module)."""
        names: list[tuple[str, int]] = []  # of all units: the stream, and the first position
        units: list[Entries] = []
        slacks, cost_s = [np.empty(0)], [np.empty(0)]
        is_next: list[bool] = []
        is_begun: list[bool] = []
        for tracker in trackers:
            starts = tracker.starts_ahead(count)
            need_s = (starts - tracker.high) / (self._rate(tracker) or RATE_GUESSED)
            cost = np.zeros(len(starts))
            if self._costs is not None:
                costs = tracker.costs_ahead(count, self._predict, self._now_s)
                cost = costs[:, 0] + np.cumsum(costs[:, 1])
            keys = [(tracker.stream.name, start) for start in starts.tolist()]
            # A unit is as urgent as any behind it, for which it must make way.
            slacks.append(np.minimum.accumulate((need_s - cost)[::-1])[::-1])
            cost_s.append(cost)
            names += keys
            units += tracker.units_ahead(count)
            is_next += [at == 0 for at in range(len(starts))]
            is_begun += map(self._is_read_ahead, keys)
        order = np.argsort(np.concatenate(slacks), kind="stable")
        certain = np.array(is_next, np.bool_)[order]
        certain &= np.cumsum(certain) <= count // 2
        certain |= np.array(is_begun, np.bool_)[order]
        others_max = count - int(np.count_nonzero(certain))
        chosen = order[certain | (np.cumsum(~certain) <= others_max)].tolist()
        due_s = (self._now_s + np.concatenate(cost_s)).tolist()
        before = self._read_ahead
        self._read_ahead = {
            names[at]: before.get(names[at]) or ReadAhead(self._now_s, due_s[at]) for at in chosen
        }
        return [units[at] for at in chosen]

    def _is_read_ahead(self, name: tuple[str, int]) -> bool:
        """Whether the worker was told lately to read a unit ahead."""
        ahead = self._read_ahead.get(name)
        return ahead is not None and self._now_s - ahead.begun_s < READ_AHEAD_S

    def _predict(self, units: Sequence[Entries]) -> npt.NDArray[np.float64]:
        """A row for each unit, with what it costs to read what is not resident of it."""
        assert self._costs is not None
        missing = [self.resident_set.missing(unit) for unit in units]
        rows = np.zeros((len(units), 3))
        rows[:, :2] = self._costs(missing)
        rows[:, 2] = [self._columns.bytes_of(unit) for unit in missing]
        return rows

    def _wait_s(self, tracker: StreamTracker, frontier: int) -> float:
        """In how many seconds the contents of the unit at a stream's frontier will be here."""
        ahead = self._read_ahead.get((tracker.stream.name, frontier))
        if ahead is not None:
            return max(ahead.due_s - self._now_s, 0.0)
        cost = tracker.costs_ahead(1, self._predict, self._now_s)[0]
        return float(cost[0] + cost[1])

    def _push_s(self, tracker: StreamTracker, frontier: int) -> float:
        """In how many seconds the unit at a stream's frontier should be pushed: when its reader
        needs it or its contents are here, whatever is later."""
        need_s = (frontier - tracker.high) / (self._rate(tracker) or RATE_GUESSED)
        return max(need_s, self._wait_s(tracker, frontier))

    def _note_planned(self, tracker: StreamTracker, frontier: int) -> None:
        """The unit at this frontier is about to be pushed."""
        latency_s, transfer_s, size = tracker.costs_ahead(1, self._predict, self._now_s)[0].tolist()
        ahead = self._read_ahead.get((tracker.stream.name, frontier))
        if size:
            late_s = tracker.late_s_per_byte * size
            begun_s = self._now_s if ahead is None else ahead.begun_s
            self._planned_push = PlannedPush(
                tracker, latency_s + transfer_s - late_s, int(size), begun_s
            )

    def planned(self, count: int) -> list[Entries]:
        """The entries of the next `count` pushes of each stream, whose READs the server holds."""
        return [unit for each in self._trackers.values() for unit in each.units_ahead(count)]

    def resident(self, entries: EntryOrder) -> Mask:
        """Which of these entries a read would find in the page cache, as far as is known. Raises
        UsageError."""
        checked = self._checked(entries)
        found: Mask = self.resident_set.resident[checked] | (self._columns.pages[checked] == 0)
        return found

    def unconfirmed(self, entries: EntryOrder) -> Entries:
        """Those of these entries that have been pushed, and that the worker may open to see whether
        the kernel still has their pages: a watched one would look like opened by a reader. Raises
        UsageError."""
        checked = np.unique(self._checked(entries))
        checked = checked[self.resident_set.resident[checked]]
        is_free = [not self.watches.is_watched(entry) for entry in checked.tolist()]
        return checked[is_free]

    def stats(self) -> PrefetchStats:
        """Counters, the state now, and where every stream is."""
        return PrefetchStats(
            **self._counters,
            resident_entries=int(np.count_nonzero(self.resident_set.resident)),
            resident_bytes=self.resident_set.bytes,
            dataset_bytes=self._dataset_bytes,
            known_bytes=self._known_entries * KNOWN_ENTRY_BYTES,
            budget_bytes=self._budget_bytes,
            has_room=self._miss_fill.has_room(self._room_bytes()),
            waits_for_room=self._waits_for_room,
            oneshot_chunks=self._miss_fill.in_turn_count,
            oneshot_done_chunks=self._miss_fill.done_count,
            streams=[tracker.stats() for tracker in self._trackers.values()],
        )

    def stream_stats(self, name: str) -> StreamStats | None:
        """Where one stream is; None where there is no stream of that name."""
        tracker = self._trackers.get(name)
        return None if tracker is None else tracker.stats()

    def progress_of_streams(self) -> dict[str, tuple[tuple[Epoch, ...], int, int]]:
        """Of each stream that is being read: its epochs, without those that were read; and up to
        where it is claimed or read, as the number of an epoch and a position in it. What is before
        that need not be fetched for the stream any more."""
        return {
            name: (tracker.stream.epochs, *tracker.fetched_up_to())
            for name, tracker in self._trackers.items()
            if not tracker.tentative
        }

    # The kinds of decisions; each returns None where it has nothing to do

    def _shrink(self) -> Drop | None:
        """Drop what exceeds a budget that has become smaller."""
        over = -self._room_bytes()
        while over > 0:
            if (drop := self._drop(over)) is not None:
                return drop
            farthest = sorted(self._trackers.values(), key=self._ahead_s, reverse=True)
            if not any(self._retreat(tracker) for tracker in farthest):
                break
        return None

    def _unwatch_many(self, least: int) -> Drop | None:
        enough = len(self.watches.unneeded) >= least
        return Drop(NO_ENTRIES, self.watches.take_unneeded()) if enough else None

    def _push_freed(self) -> Push | None:
        """Entries whose pages the kernel has freed, or whose push has failed."""
        while self._push_again:
            entries = self._push_again.popleft()
            wanted = self.resident_set.missing(entries)
            if self._trackers:
                wanted = wanted[self.resident_set.claims[wanted] > 0]
            wanted = self._chunk_entries.fetch_order(np.unique(wanted))
            wanted = wanted[np.cumsum(self._columns.cost(wanted)) <= self._room_bytes()]
            if len(wanted):
                return self._push(wanted, [])
        return None

    def _push_planned(self, now_s: float) -> Push | Drop | None:
        """The unit that a reader needs soonest, over all streams; or a drop that makes room for
        it."""
        if not self._trackers:
            return None
        without_room: set[str] = set()  # streams that get nothing in this decision
        markers: list[int] = []  # of units with nothing to push
        last_sign_s = max(each.last_sign_s for each in self._trackers.values())
        may_wait = self._is_balanced  # streams whose contents have not arrived let others go first
        for _ in range(UNITS_SKIPPED_MAX):
            soonest = self._soonest_stream(without_room, may_wait=may_wait)
            if soonest is None:
                break
            tracker, ahead_s = soonest
            unit = self._urgent_unit(tracker) or tracker.peek_unit()
            self._is_urgent = unit.is_urgent
            entries = self.resident_set.missing(unit.entries)
            if not unit.once:
                _, first = np.unique(entries, return_index=True)
                entries = entries[np.sort(first)]
            # Larger entries are left to READs.
            entries = entries[self._columns.cost(entries) <= self._contents_bytes()]
            need_bytes = self._columns.bytes_of(entries)
            room_bytes = self._room_bytes()
            if need_bytes > self._contents_bytes():
                entries, need_bytes = NO_ENTRIES, 0  # the unit will never fit
            still = self._is_still(tracker, last_sign_s, now_s)
            if need_bytes > room_bytes - still * self._budget_bytes // STILL_DIVISOR:
                has_enough = self._ahead_part < 1 and not unit.is_urgent
                has_enough = has_enough and not tracker.has_share_left()
                if tracker.tentative or still or has_enough:
                    without_room.add(tracker.stream.name)
                    continue
                if markers:
                    break
                if may_wait:  # room is made only for who needs it soonest
                    may_wait = False
                    continue
                drop = self._make_room(
                    tracker, ahead_s, need_bytes - room_bytes, last_sign_s, now_s
                )
                self._waits_for_room = drop is None
                return drop
            if self._is_balanced and len(entries) and not unit.is_urgent:
                self._note_planned(tracker, tracker.claimed_end())
            tracker.claim(unit)
            kept = self.resident_set.resident[unit.entries]
            self._counters["kept_entries"] += int(np.count_nonzero(kept))
            self.resident_set.claim(unit.entries)
            for position, entry in unit.markers:
                if self.watches.add(entry, tracker.stream.name, position):
                    markers.append(entry)
            if len(entries):
                return self._push(entries, markers)
        else:
            return self._push(NO_ENTRIES, markers)  # further units wait for the next decision
        return self._push(NO_ENTRIES, markers) if markers else None

    def _urgent_unit(self, tracker: StreamTracker) -> NextUnit | None:
        """What the reader of a stream needs very soon from a slow store."""
        if not self._store_is_slow:
            return None
        unit = tracker.urgent_unit(URGENT_S)
        if unit is None:
            self._urgent_s = self._others_s = 0.0
        elif self._urgent_s > URGENT_START_S + URGENT_WEIGHT * self._others_s:
            return None
        return unit

    def _soonest_stream(
        self, without_room: set[str], *, may_wait: bool
    ) -> tuple[StreamTracker, float] | None:
        """The stream whose reader needs its next unit soonest, and in how many seconds; None where
        each is claimed to its end, or as far as watches allow. `may_wait`: streams whose contents
        have not arrived let others go first."""
        share_bytes = self._compute_share()
        ahead_max = max(MARKERS_MAX // max(self._active_count(), 1), 16) * MARKER_STRIDE
        found: list[tuple[float, StreamTracker, int]] = []
        for name, tracker in self._trackers.items():
            if name in without_room:
                continue
            frontier = tracker.frontier(share_bytes)
            if frontier is not None and frontier - tracker.low < ahead_max:
                found.append((self._ahead_s(tracker, frontier), tracker, frontier))
        if not found:
            return None
        ahead_s, soonest, frontier = min(found, key=itemgetter(0))
        if may_wait and len(found) > 1 and self._wait_s(soonest, frontier):
            # Who has a share of the memory gets no more while others wait for theirs.
            found = [each for each in found if each[1] is soonest or each[1].has_share_left()]
            ahead_s, soonest, _ = min(found, key=lambda each: self._push_s(each[1], each[2]))
        return soonest, ahead_s

    def _push_unplanned(self) -> Push | None:
        """A chunk that was missed, or the next of `oneshot`; only into free room."""
        entries = self._miss_fill.next(self._room_bytes())
        return None if entries is None else self._push(entries, [])

    def _sample(self, now_s: float) -> Sample | None:
        """A few entries that the reader of a stream will read next; the streams take turns."""
        for tracker in self._trackers.values():
            if now_s < tracker.sampled_s + SAMPLE_S or now_s - tracker.last_sign_s >= STILL_S:
                continue
            tracker.sampled_s = now_s
            ahead = tracker.claimed_entries(tracker.high, SAMPLE_AHEAD_ENTRIES)
            ahead = ahead[:: max(1, len(ahead) // SAMPLE_ENTRIES)][:SAMPLE_ENTRIES]
            ahead = np.unique(ahead[self.resident_set.resident[ahead]])
            unwatched = [not self.watches.is_watched(entry) for entry in ahead.tolist()]
            if any(unwatched):
                return Sample(ahead[unwatched])
        return None

    def _next_change(self, now_s: float) -> float | None:
        """When the next decision may differ although nothing is reported."""
        times = [self._paused_until_s]
        for tracker in self._trackers.values():
            if tracker.tentative:
                times.append(tracker.last_sign_s + TENTATIVE_S)
            if now_s - tracker.last_sign_s < STILL_S:
                times += [tracker.last_sign_s + STILL_S, tracker.sampled_s + SAMPLE_S]
        return min((each for each in times if each > now_s), default=None)

    # Room

    def _room_bytes(self) -> int:
        """The free part of the budget; below 0 where the budget has become too small."""
        return self._contents_bytes() - self.resident_set.bytes

    def _contents_bytes(self) -> int:
        """The part of the budget for contents: without the kernel's memory for names."""
        known_bytes = self._known_entries * KNOWN_ENTRY_BYTES
        return self._budget_bytes - min(known_bytes, self._budget_bytes // KNOWN_DIVISOR)

    def _is_still(self, tracker: StreamTracker, last_sign_s: float, now_s: float) -> bool:
        """Whether a reader has stood still while others went on; `last_sign_s` is the time of the
        last sign of any reader."""
        return now_s - tracker.last_sign_s >= STILL_S and last_sign_s > tracker.last_sign_s

    def _ahead_s(self, tracker: StreamTracker, frontier: int | None = None) -> float:
        """In how many seconds the reader will reach the frontier, by its rate."""
        distance = (self._frontier(tracker) if frontier is None else frontier) - tracker.high
        return distance / (self._rate(tracker) or 1.0)

    def _rate(self, tracker: StreamTracker) -> float:
        """How many files a second the reader of a stream reads; where that is not measured yet, the
        mean of the other streams, and 0 where none is measured."""
        if tracker.rate:
            return tracker.rate
        rates = [each.rate for each in self._trackers.values() if each.rate]
        return sum(rates) / len(rates) if rates else 0.0

    @property
    def _is_balanced(self) -> bool:
        """Whether there are several streams whose costs are known."""
        return self._costs is not None and len(self._trackers) > 1

    def _active_count(self) -> int:
        """How many streams have epochs left to read."""
        return sum(1 for tracker in self._trackers.values() if tracker.epoch_states)

    def _compute_share(self) -> int:
        """Each stream's share of the budget in bytes."""
        if not self._share_bytes:
            shared_bytes = int(self._contents_bytes() * self._ahead_part)
            if self._ahead_part < 1:
                ahead_bytes = max(
                    shared_bytes // AHEAD_DIVISOR, min(shared_bytes // 2, AHEAD_BYTES_MIN)
                )
                low_bytes = shared_bytes - ahead_bytes
                self.resident_set.low_bytes_max = low_bytes if self._has_substitutes else 0
                shared_bytes = ahead_bytes
            self._share_bytes = max(shared_bytes // max(self._active_count(), 1), 1)
            for tracker in self._trackers.values():
                tracker.give_share(self._share_bytes)
        return self._share_bytes

    def _make_room(
        self,
        needy: StreamTracker,
        needy_ahead_s: float,
        need_bytes: int,
        last_sign_s: float,
        now_s: float,
    ) -> Drop | None:
        """Make room for a unit of the stream `needy`: drop unclaimed entries, or take claims from
        other streams."""
        if (drop := self._drop(need_bytes)) is not None:
            return drop
        others = [each for each in self._trackers.values() if each is not needy]
        for each in others:
            is_still = self._is_still(each, last_sign_s, now_s)
            if is_still and self._take_back(each, each.floor) and (drop := self._drop(need_bytes)):
                return drop
        farthest = max(others, key=self._ahead_s, default=None)
        if farthest is None:
            return None
        # Positions of readers are known to about a marker, so two more are allowed for.
        allowed_s = 2 * max(needy_ahead_s, 0) + 2 * MARKER_STRIDE / (farthest.rate or 1)
        if self._ahead_s(farthest) > allowed_s and self._retreat(farthest):
            return self._drop(need_bytes)
        return None

    def _frontier(self, tracker: StreamTracker) -> int:
        frontier = tracker.frontier(self._compute_share())
        return tracker.end if frontier is None else frontier

    def _retreat(self, tracker: StreamTracker) -> bool:
        """End the claims on the farther half of what a stream has claimed ahead of its reader."""
        middle = tracker.high + max(self._frontier(tracker) - tracker.high, 0) // 2
        return self._take_back(tracker, middle) or self._take_back(tracker, tracker.floor)

    def _take_back(self, tracker: StreamTracker, position: int) -> bool:
        """End a stream's claims from a position on; the farthest entries are dropped first."""
        released = tracker.retreat(position)
        self._release(tracker, released[::-1], behind=True)
        return len(released) > 0

    def _release(self, tracker: StreamTracker, entries: Entries, *, behind: bool) -> None:
        """Take note of claims that a stream has given up, and of watches that it needs no more.
        `behind`: these entries are the first to be dropped."""
        self.resident_set.unclaim(entries, passed=behind)
        self.watches.remove(tracker.stream.name, tracker.take_unwatched())

    def _drop(self, need_bytes: int) -> Drop | None:
        """Drop unclaimed entries of at least `need_bytes`, or all where there are fewer."""
        victims = self.resident_set.victims(need_bytes, self._next_use)
        return Drop(victims, self.watches.take_unneeded()) if len(victims) else None

    def _next_use(self, entries: Entries) -> npt.NDArray[np.float64]:
        uses = [tracker.next_use(entries) for tracker in self._trackers.values()]
        return np.minimum.reduce(uses) if uses else np.full(len(entries), np.inf)

    def _tick(self, now_s: float) -> None:
        if math.isnan(self._start_s):
            self._start_s = now_s
        self._now_s = now_s

    def _release_passed(self, now_s: float) -> None:
        """End the claims on what readers have passed, and tentative streams that nobody follows."""
        for name, tracker in tuple(self._trackers.items()):
            if tracker.tentative and now_s - tracker.last_sign_s >= TENTATIVE_S:
                self.withdraw(name)
                continue
            epochs_before = tracker.stream.epochs
            passed = tracker.pass_floor()
            self._note_accesses(passed)
            self._release(tracker, passed, behind=True)
            if tracker.stream.epochs != epochs_before:
                self._share_bytes = 0
                if not tracker.stream.epochs:
                    self._finished[name] = None

    def _note_accesses(self, passed: Entries) -> None:
        """Readers have read these entries: divide the memory anew (see "Importance" above)."""
        heap = self.resident_set.heap
        if not self._keeps_important or heap is None or not len(passed):
            return
        high = int(np.count_nonzero(heap.is_high(passed)))
        self._high_passed += high
        self._low_passed += len(passed) - high
        if self._high_passed + self._low_passed > ACCESSES_MAX:
            self._high_passed /= 2
            self._low_passed /= 2
        self._divide_memory()

    def _divide_memory(self) -> None:
        """Give streams the part that accesses to entries of low importance have."""
        part = max(self._low_passed / (self._high_passed + self._low_passed), AHEAD_PART_MIN)
        if abs(part - self._ahead_part) > AHEAD_PART_STEP:
            self._ahead_part, self._share_bytes = part, 0

    def _tracker(self, name: str) -> StreamTracker:
        if name not in self._trackers:
            raise UsageError(f"no stream {name[:64]!r}")
        return self._trackers[name]

    def _check_stream(self, stream: Stream, new_epochs: Sequence[Epoch]) -> Stream:
        """A new or changed stream, if the plan with it keeps the limits. Raises UsageError."""
        check_plan({**self.streams, stream.name: stream}.values(), new_epochs, self._is_file)
        if stream.epochs:
            self._finished.pop(stream.name, None)
        return stream

    def _remove_tracker(self, name: str) -> None:
        tracker = self._trackers.get(name)
        if tracker is not None:
            self._release(tracker, tracker.retreat(0), behind=False)
            del self._trackers[name]
            self._share_bytes = 0

    def _nearest_stream(self, entry: int) -> tuple[StreamTracker | None, int]:
        """The stream whose reader is nearest to an entry, and the position; None and -1 without
        one."""
        nearest: tuple[StreamTracker | None, int] = None, -1
        least = math.inf
        for tracker in self._trackers.values():
            position, distance = tracker.nearest_position(entry)
            if position >= 0 and distance < least:
                nearest, least = (tracker, position), distance
        return nearest

    def _stream_of_read(
        self, entry: int, now_s: float, *, is_sure: bool
    ) -> tuple[StreamTracker | None, int]:
        """The stream that a READ probably belongs to, which learns where its reader is; None
        without one."""
        tracker, position = self._nearest_stream(entry)
        if tracker is None:
            return None, -1
        if position < tracker.floor:  # given up too early, or another program's READ
            self._release(tracker, tracker.note_late_read(position, now_s), behind=True)
        if position < tracker.low and tracker.is_far(position):
            return None, -1
        if not tracker.note_read(position, now_s, is_sure=is_sure):
            return None, -1
        return tracker, position

    def _note_freed(self, entry: int, tracker: StreamTracker | None, position: int) -> None:
        """Pages that were pushed are gone: assume that those around are gone as well, and push them
        again."""
        neighbours = np.array([entry], np.uint32)
        chunk = int(self._chunk[entry])
        if self._chunk_entries.may_push(chunk, self._now_s):
            neighbours = self._chunk_entries.of(chunk)
            if tracker is not None:
                following = tracker.claimed_entries(position, MARKER_STRIDE)
                neighbours = np.concatenate([neighbours, following])
            pushed_ago_s = self._now_s - self._start_s - self.resident_set.pushed_s[neighbours]
            freed = (pushed_ago_s >= LATE_READ_S) | (neighbours == entry)
            neighbours = np.unique(neighbours[self.resident_set.resident[neighbours] & freed])
            self._push_again.append(neighbours)
        self._counters["lost_entries"] += len(neighbours)
        self.resident_set.remove(neighbours)

    def _push(self, entries: Entries, markers: list[int]) -> Push:
        """A push of these entries, without those that READs have just brought."""
        since_start_s = self._now_s - self._start_s
        entries, by_reads = self.resident_set.split_recent_reads(entries, since_start_s)
        self.resident_set.pushed_s[by_reads] = since_start_s
        chunk = -1
        if len(entries):
            chunks = self._chunk[entries]
            if (chunks == chunks[0]).all():
                chunk = int(chunks[0])
            else:
                entries = self._chunk_entries.fetch_order(entries)
        return Push(chunk, entries, np.array(markers, np.uint32), self._is_urgent)

    def _checked(self, entries: EntryOrder) -> Entries:
        """The entries as an array. Raises UsageError for numbers that are no entries."""
        array = np.asarray(entries)
        if len(array) and (array.min() < 0 or array.max() >= self._entry_count):
            raise UsageError(f"no entry {array.max()} among {self._entry_count}")
        return array.astype(np.uint32, copy=False)
