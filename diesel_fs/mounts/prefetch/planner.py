"""Decides which file contents to push into the kernel's page cache next, and which to drop.

The prefetch worker reports *facts* (misses, opened markers, plans, forgotten files, the budget) and
asks for the next decision (`next`): a push, a drop, a sample, or nothing to do. It carries the
decision out and reports the result (`pushed`, `dropped`, `sampled`) before it asks again; facts may
come at any time. A *push* stores contents in the page cache, so that a reader finds them there; a
*sample* looks whether pages that were pushed are still there.

Without a plan, a miss pushes the rest of its chunk while that fits the free part of the budget; the
policy `oneshot` does that for all chunks from the start. Nothing is dropped for such pushes. So all
of a dataset that fits becomes resident; of a larger one, what came first stays and READs bring the
rest file by file, so random misses never thrash.

With plans, each *stream* (a reader with a known order) gets an equal share of the budget. Its order
is cut into units (`units.py`), and the unit that a reader needs soonest over all streams is pushed
first. Room is made in this order: drop what readers have passed; drop what no stream claims, the
least valuable and the farthest next use first; take back the farthest claims of a stream that is
more than twice as far ahead as the one that needs room, or that has stood still while others went
on. An entry that two streams claim stays until the last claim ends.

Contents that only READs by_reads are not counted: they are the kernel's, which frees them first.

Pure: no I/O, and the time is an argument (`now_s`). Used by one thread.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...errors import UsageError
from ...orders.plan import NO_ENTRIES, Entries, EntryOrder, Epoch, Plan, Stream
from .decisions import (
    Decision,
    Drop,
    FillPolicy,
    Idle,
    PrefetchCounters,
    PrefetchStats,
    Push,
    Sample,
    StreamStats,
)
from .miss_fill import ChunkEntries, MissFill
from .resident_set import Mask, ResidentSet
from .stream_tracker import MARKER_STRIDE, StreamTracker
from .units import KNOWN_ENTRY_BYTES, PAGE_BYTES, Columns

STILL_S = 60.0
"""A stream without a sign of its reader for so long, while others go on, gives its memory up. A
validation set waits longer than that in many runs, and comes back with one miss."""
TENTATIVE_S = 600.0
"""A tentative stream (its list was read) is withdrawn if no reader follows it for so long."""
STILL_DIVISOR = 4
"""A still stream gets room only while this part of the budget (a quarter) stays free."""

LATE_READ_S = 1.0
"""A READ that began before its entry was pushed may be reported so long after the push."""
KNOWN_DIVISOR = 8
"""The kernel's memory for names counts for at most this part (an eighth) of the budget. The kernel
must know a name before content can be pushed. Names of small files take a quarter of what their
contents take, whatever the budget is, and the kernel frees both alike."""

PAUSE_S, PAUSE_S_MAX = 0.5, 8.0
"""After a failed push, the first and the longest pause before the next one."""

SAMPLE_S = 2.0
"""Time between samples: the kernel has been seen to free idle pages after some 5 s."""
SAMPLE_ENTRIES = 32
SAMPLE_AHEAD_ENTRIES = 8_192

MARKERS_MAX = 2_048
"""Watches of all streams together: a quarter of the lowest limit that kernels set for a user."""
UNWATCH_MIN = 256
"""Watches that are not needed any more are removed so many at once, or when idle."""

PASSES_MAX = 64
"""How many units with nothing to push one decision skips, so that it takes a few milliseconds."""


@dataclass(slots=True)
class Watches:
    """Which entries have an inotify watch, for which streams and positions, and which need none."""

    users: dict[int, list[tuple[str, int]]] = field(default_factory=dict)  # stream and position
    unneeded: dict[int, None] = field(default_factory=dict)

    def add(self, entry: int, name: str, position: int) -> bool:
        """A stream needs a watch of an entry. Returns whether the watch has to be made."""
        users = self.users.setdefault(entry, [])
        users.append((name, position))
        if entry in self.unneeded:
            del self.unneeded[entry]  # it was not removed yet
            return False
        return len(users) == 1

    def remove(self, name: str, markers: list[tuple[int, int]]) -> None:
        """A stream does not need the watches of these markers (position, entry) any more."""
        for position, entry in markers:
            users = self.users.get(entry, [])
            if (name, position) in users:
                users.remove((name, position))
                if not users:
                    del self.users[entry]
                    self.unneeded[entry] = None

    def is_watched(self, entry: int) -> bool:
        """Whether the entry has a watch."""
        return entry in self.users or entry in self.unneeded

    def take_unneeded(self) -> Entries:
        """The entries whose watch can be removed. The caller removes it."""
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
        offset: npt.NDArray[np.int64] | None = None,
        is_file: Mask | None = None,
    ) -> None:
        """`chunk`, `size`, `offset` and `is_file` have a value for each entry: its (first) chunk or
        -1, its size in bytes, its offset in the chunk (used to sort mixed units), and whether it is
        a file (if not given: whether it has a chunk).
        """
        cost = -(-size // PAGE_BYTES) * PAGE_BYTES
        cost[chunk < 0] = 0
        self._columns = Columns(chunk.astype(np.int32), cost.astype(np.int64), chunk_count)
        self._cost = self._columns.cost
        self._chunk = self._columns.chunk
        self._plan = Plan(chunk >= 0 if is_file is None else is_file)
        self._budget_bytes = budget_bytes
        self._known_entries = 0
        self._chunk_entries = ChunkEntries(self._columns, offset)
        self._resident_set = ResidentSet(self._cost)
        self._push_again: deque[Entries] = deque()
        self._miss_fill = MissFill(
            self._chunk_entries, self._resident_set, chunk_count, everything=policy == "oneshot"
        )
        self._trackers: dict[str, StreamTracker] = {}
        self._watches = Watches()
        self._share_bytes = 0
        self._outstanding: Push | Drop | Sample | None = None
        self._start_s = math.nan
        self._pause_s = 0.0  # the pause after the last push, if it failed
        self._paused_until_s = -math.inf
        self._now_s = 0.0
        self._counters = PrefetchCounters(
            pushes=0,
            pushed_entries=0,
            pushed_bytes=0,
            absent_entries=0,
            drops=0,
            dropped_entries=0,
            lost_entries=0,
        )

    @property
    def resident_bytes(self) -> int:
        """The bytes of contents that are believed to be resident, in whole pages."""
        return self._resident_set.bytes

    @property
    def wants_misses(self) -> bool:
        """Whether the worker should report every miss. Without a plan and without free room, a few
        misses are enough: they only show that the kernel has freed pages.
        """
        return bool(self._trackers) or self._miss_fill.has_room(self._room())

    def inherit(self, old: "PrefetchPlanner", was: npt.NDArray[np.int32]) -> None:
        """Continue where the planner of another version ended. `was` gives the old number of each
        entry (-1: none). Plans are not taken over."""
        self._resident_set.inherit(old._resident_set, was)
        self._counters, self._start_s, self._now_s = old._counters, old._start_s, old._now_s

    def running(self, now_s: float) -> list[str]:
        """The names of streams that are probably being read."""
        return [name for name, tracker in self._trackers.items() if tracker.is_running(now_s)]

    # Facts: the plan

    def announce(self, stream: Stream, now_s: float) -> None:
        """Announce a stream; one of the same name is replaced. Raises UsageError, as the next three
        methods do, and then nothing has changed."""
        self._tick(now_s)
        if (over := self._plan.ended_to_withdraw(stream.name)) is not None:
            self.withdraw(over)
        self._plan.announce(stream)
        self._end(stream.name)
        self._trackers[stream.name] = StreamTracker(self._columns, stream, now_s)
        self._share_bytes = 0  # computed again when it is needed

    def extend(self, name: str, epochs: Sequence[Epoch]) -> None:
        """Add epochs to a stream, or entries to its last one."""
        self._tracker(name).extended(self._plan.extend(name, epochs))
        self._share_bytes = 0

    def replace(self, name: str, epoch: Epoch, position: int = 0) -> None:
        """Replace an epoch of a stream, whole or from a position on."""
        tracker = self._tracker(name)
        stream = self._plan.replace(name, epoch, position)
        self._release(tracker, tracker.replaced(stream, epoch.number, position), behind=False)
        self._share_bytes = 0

    def withdraw(self, name: str) -> None:
        """Remove a stream: it will not be read any more."""
        self._end(self._plan.withdraw(name).name)

    def progress(self, name: str, position: int, now_s: float, epoch: int | None = None) -> None:
        """The reader of a stream says which position it reads next, in the current epoch unless
        another is named. This overrides what its markers say. Raises UsageError.
        """
        self._tick(now_s)
        tracker = self._tracker(name)
        if epoch is None:
            state = next((each for each in tracker.epoch_states if tracker.high < each.end), None)
        else:
            state = next(
                (each for each in tracker.epoch_states if each.epoch.number == epoch), None
            )
        if state is None or not 0 <= position <= len(state.epoch):
            raise UsageError(f"stream {name} has no position {position} there")
        if tracker.has_gaps(state.base + position):
            self._take_back(tracker, 0)  # something there was given up: claim all again
        tracker.progress(state.base + position, now_s)

    def value(self, entries: "int | EntryOrder", importance: float) -> None:
        """Set the value of entries: unclaimed entries of less value are dropped first. Raises
        UsageError."""
        if not math.isfinite(importance):
            raise UsageError(f"bad importance {importance}")
        checked = self._checked([entries] if isinstance(entries, int) else entries)
        self._resident_set.set_value(checked, importance)

    # Facts: the kernel

    def set_known_entries(self, count: int) -> None:
        """Report how many names the kernel knows: those of the folders that were listed."""
        self._known_entries = count
        self._share_bytes = 0

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget; where it is smaller, the next decisions drop."""
        self._budget_bytes = budget_bytes
        self._share_bytes = 0

    def opened(self, entry: int, now_s: float) -> None:
        """Report that a watched entry was opened."""
        self._tick(now_s)
        users = tuple(self._watches.users.get(entry, ()))
        if not users:
            return
        # The file may be in several orders: the reader that is nearest to it has opened it.
        nearest = min(tracker.nearest_position(entry)[1] for tracker in self._trackers.values())
        for name in {name for name, _ in users}:
            tracker = self._trackers[name]
            high, places = tracker.high, [at for user, at in users if user == name]
            position = min(places, key=lambda at: abs(at - high))
            if abs(position - high) <= nearest + MARKER_STRIDE:
                tracker.note_open(position, now_s)

    def missed(self, entry: int, now_s: float) -> None:
        """Report a miss: a READ of an entry's content reached the server."""
        self._tick(now_s)
        if not 0 <= entry < len(self._cost) or not self._cost[entry]:
            return
        tracker, position = self._stream_of_read(entry, now_s)
        if self._resident_set.resident[entry]:
            if now_s - self._start_s - float(self._resident_set.pushed_s[entry]) >= LATE_READ_S:
                self._note_freed(entry, tracker, position)
            return
        self._resident_set.note_read(entry, now_s - self._start_s)
        need = int(self._cost[entry])
        if tracker is None and need <= self._contents_budget():
            self._miss_fill.missed(int(self._chunk[entry]), need, self._room(), self._now_s)

    def forgotten(self, entries: EntryOrder) -> None:
        """Report that the kernel has forgotten these entries, and freed their pages."""
        self._resident_set.remove(np.unique(self._checked(entries)))

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
        resident, unknown = self._checked(done), self._checked(absent)
        self._resident_set.pushed_s[resident] = now_s - self._start_s
        self._resident_set.add(resident if done is push.entries else np.unique(resident))
        self._counters["pushes"] += 1
        self._counters["pushed_entries"] += len(resident)
        self._counters["pushed_bytes"] += int(self._cost[resident].sum())
        self._counters["absent_entries"] += len(unknown)
        self._pause_s = min(2 * self._pause_s or PAUSE_S, PAUSE_S_MAX) if failed else 0.0
        self._paused_until_s = now_s + self._pause_s
        if failed:
            gone = np.concatenate([resident, unknown])
            self._push_again.append(push.entries[~np.isin(push.entries, gone)])

    def dropped(self, drop: Drop) -> None:
        """Report that a drop was carried out."""
        assert drop is self._outstanding, "another decision is outstanding"
        self._outstanding = None
        self._resident_set.victims_dropped(drop.entries)
        self._counters["drops"] += 1
        self._counters["dropped_entries"] += len(drop.entries)

    def sampled(self, entries: EntryOrder, resident_mask: Mask) -> None:
        """Report which of these entries are resident, after a sample or at any time."""
        if isinstance(self._outstanding, Sample):
            self._outstanding = None
        gone = self._checked(entries)[~np.asarray(resident_mask, np.bool_)]
        for entry in gone[self._resident_set.resident[gone]].tolist():
            if self._resident_set.resident[entry]:  # not removed with an earlier one
                self._note_freed(entry, *self._nearest_stream(entry))

    # Decisions

    def next(self, now_s: float) -> Decision:
        """What to do now. The result of every decision but Idle is reported before the next
        call."""
        assert self._outstanding is None, "the last decision has not been reported"
        self._tick(now_s)
        self._release_passed(now_s)
        decision = (
            self._shrink()
            or self._unwatch_many(UNWATCH_MIN)
            or (None if now_s < self._paused_until_s else self._next_push(now_s))
            or self._sample(now_s)
            or self._unwatch_many(1)
        )
        self._outstanding = decision
        return decision or Idle(self._next_change(now_s))

    def _next_push(self, now_s: float) -> Push | Drop | None:
        return self._push_freed() or self._push_planned(now_s) or self._push_unplanned()

    def upcoming(self, count: int) -> list[Entries]:
        """The entries of the next `count` pushes, as far as they can be foreseen, the soonest
        first. The worker fetches their contents ahead."""
        found = []
        for tracker in sorted(self._trackers.values(), key=self._ahead_s):
            found += tracker.units_ahead(count)
        return [*found, *self._miss_fill.upcoming(count)][:count]

    def planned(self, count: int) -> list[Entries]:
        """The entries of the next `count` pushes of each stream."""
        return [unit for each in self._trackers.values() for unit in each.units_ahead(count)]

    def resident(self, entries: EntryOrder) -> Mask:
        """Which of these entries a read would find in the page cache, as far as is known. Raises
        UsageError."""
        checked = self._checked(entries)
        found: Mask = self._resident_set.resident[checked] | (self._cost[checked] == 0)
        return found

    def stats(self) -> PrefetchStats:
        """Counters, the state now, and where every stream is."""
        trackers = self._trackers.values()
        return PrefetchStats(
            **self._counters,
            resident_entries=int(np.count_nonzero(self._resident_set.resident)),
            resident_bytes=self._resident_set.bytes,
            known_bytes=self._known_entries * KNOWN_ENTRY_BYTES,
            budget_bytes=self._budget_bytes,
            has_room=self._miss_fill.has_room(self._room()),
            oneshot_chunks=self._miss_fill.in_turn_count,
            oneshot_done_chunks=self._miss_fill.done_count,
            streams=[tracker.stats() for tracker in trackers],
        )

    def stream_stats(self, name: str) -> StreamStats | None:
        """Where one stream is; None where there is no stream of that name."""
        tracker = self._trackers.get(name)
        return None if tracker is None else tracker.stats()

    # The kinds of decisions; each returns None where it has nothing to do

    def _shrink(self) -> Drop | None:
        """Drop what exceeds a budget that has become smaller."""
        over = -self._room()
        while over > 0:
            if (drop := self._drop(over)) is not None:
                return drop
            farthest = sorted(self._trackers.values(), key=self._ahead_s, reverse=True)
            if not any(self._retreat(tracker) for tracker in farthest):
                return None
        return None

    def _unwatch_many(self, least: int) -> Drop | None:
        enough = len(self._watches.unneeded) >= least
        return Drop(NO_ENTRIES, self._watches.take_unneeded()) if enough else None

    def _push_freed(self) -> Push | None:
        """Entries whose pages the kernel has freed, or whose push has failed."""
        while self._push_again:
            entries = self._push_again.popleft()
            wanted = self._resident_set.missing(entries)
            if self._trackers:
                wanted = wanted[self._resident_set.claims[wanted] > 0]
            wanted = self._chunk_entries.fetch_order(np.unique(wanted))
            wanted = wanted[np.cumsum(self._cost[wanted]) <= self._room()]
            if len(wanted):
                return self._push(wanted, [])
        return None

    def _push_planned(self, now_s: float) -> Push | Drop | None:
        """The unit that a reader needs soonest, over all streams; or a drop that makes room for
        it."""
        if not self._trackers:
            return None
        share = self._share()
        ahead_max = max(MARKERS_MAX // max(self._active_count(), 1), 16) * MARKER_STRIDE
        refused: set[str] = set()
        markers: list[int] = []
        sign_times_s = [each.last_sign_s for each in self._trackers.values()]
        for _ in range(PASSES_MAX):
            near, near_s = None, math.inf  # the stream whose reader needs its next unit soonest
            for name, tracker in self._trackers.items():
                if name in refused:
                    continue
                frontier = tracker.frontier(share)
                if frontier is None or frontier - tracker.low >= ahead_max:
                    continue
                ahead_s = self._ahead_s(tracker, frontier)
                if near is None or ahead_s < near_s:
                    near, near_s = tracker, ahead_s
            if near is None:
                break
            unit = near.peek_unit()
            entries = self._resident_set.missing(unit.entries)
            if not unit.once:
                _, first = np.unique(entries, return_index=True)
                entries = entries[np.sort(first)]
            # Larger entries are left to READs.
            entries = entries[self._cost[entries] <= self._contents_budget()]
            need = int(self._cost[entries].sum())
            room = self._room()
            if need > self._contents_budget():
                entries, need = NO_ENTRIES, 0  # the unit will never fit
            still = self._is_still(near, sign_times_s, now_s)
            if need > room - still * self._budget_bytes // STILL_DIVISOR:
                if near.tentative or still:
                    refused.add(near.stream.name)
                    continue
                if markers:
                    break
                return self._make_room(near, near_s, need - room, sign_times_s, now_s)
            near.claim(unit)
            self._resident_set.claim(unit.entries)
            for position, entry in unit.markers:
                if self._watches.add(entry, near.stream.name, position):
                    markers.append(entry)
            if len(entries):
                return self._push(entries, markers)
        else:
            return self._push(NO_ENTRIES, markers)  # further units wait for the next decision
        return self._push(NO_ENTRIES, markers) if markers else None

    def _push_unplanned(self) -> Push | None:
        """A chunk that was missed, or the next of `oneshot`; only into free room."""
        entries = self._miss_fill.next(self._room())
        return None if entries is None else self._push(entries, [])

    def _sample(self, now_s: float) -> Sample | None:
        """A few entries that the reader of a stream will read next; the streams take turns."""
        for tracker in self._trackers.values():
            if now_s < tracker.sampled_s + SAMPLE_S or now_s - tracker.last_sign_s >= STILL_S:
                continue
            tracker.sampled_s = now_s
            near = tracker.neighbours(tracker.high, SAMPLE_AHEAD_ENTRIES)
            near = near[:: max(1, len(near) // SAMPLE_ENTRIES)][:SAMPLE_ENTRIES]
            near = np.unique(near[self._resident_set.resident[near]])
            free = [not self._watches.is_watched(entry) for entry in near.tolist()]
            if any(free):
                return Sample(near[free])
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

    def _room(self) -> int:
        """The free bytes of the budget; below 0 where the budget has become too small."""
        return self._contents_budget() - self._resident_set.bytes

    def _contents_budget(self) -> int:
        """The part of the budget for contents: without the kernel's memory for names."""
        known_bytes = self._known_entries * KNOWN_ENTRY_BYTES
        return self._budget_bytes - min(known_bytes, self._budget_bytes // KNOWN_DIVISOR)

    def _is_still(self, tracker: StreamTracker, sign_times_s: list[float], now_s: float) -> bool:
        """Whether a stream has stood still while others went on."""
        return now_s - tracker.last_sign_s >= STILL_S and max(sign_times_s) > tracker.last_sign_s

    def _ahead_s(self, tracker: StreamTracker, frontier: int | None = None) -> float:
        """In how many seconds the reader will reach the frontier, by its rate; a stream without a
        measured rate is assumed to be as fast as the others."""
        distance = (self._frontier(tracker) if frontier is None else frontier) - tracker.high
        rate = tracker.rate
        if not rate:
            rates = [each.rate for each in self._trackers.values() if each.rate]
            rate = sum(rates) / len(rates) if rates else 1.0
        return distance / rate

    def _active_count(self) -> int:
        """How many streams have epochs left to read."""
        return sum(1 for tracker in self._trackers.values() if tracker.epoch_states)

    def _share(self) -> int:
        """Each stream's share of the budget in bytes."""
        if not self._share_bytes:
            self._share_bytes = max(self._contents_budget() // max(self._active_count(), 1), 1)
            for tracker in self._trackers.values():
                tracker.give_share(self._share_bytes)
        return self._share_bytes

    def _make_room(
        self, near: StreamTracker, near_s: float, need: int, sign_times_s: list[float], now_s: float
    ) -> Drop | None:
        """Make room for a unit of a stream: drop unclaimed entries, or take claims from other
        streams."""
        if (drop := self._drop(need)) is not None:
            return drop
        others = [each for each in self._trackers.values() if each is not near]
        still = [each for each in others if self._is_still(each, sign_times_s, now_s)]
        for tracker in still:
            if self._take_back(tracker, tracker.floor) and (drop := self._drop(need)) is not None:
                return drop
        far = max(others, key=self._ahead_s, default=None)
        # Places of readers are known to about a marker: within two, the order is not known.
        if far is None or self._ahead_s(far) <= 2 * max(near_s, 0) + 2 * MARKER_STRIDE / (
            far.rate or 1
        ):
            return None
        return self._drop(need) if self._retreat(far) else None

    def _frontier(self, tracker: StreamTracker) -> int:
        frontier = tracker.frontier(self._share())
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
        """Take note of claims that a stream has given up, and of watches that it needs no more."""
        self._resident_set.unclaim(entries, passed=behind)
        self._watches.remove(tracker.stream.name, tracker.take_unwatched())

    def _drop(self, need: int) -> Drop | None:
        """Drop unclaimed entries of at least `need` bytes, if there are as many."""
        victims = self._resident_set.victims(need, self._next_use)
        return Drop(victims, self._watches.take_unneeded()) if len(victims) else None

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
            self._release(tracker, tracker.pass_floor(), behind=True)
            if tracker.finished:
                self._plan.finish(name, tracker.finished)
                tracker.finished, self._share_bytes = 0, 0

    def _tracker(self, name: str) -> StreamTracker:
        self._plan.stream(name)
        return self._trackers[name]

    def _end(self, name: str) -> None:
        tracker = self._trackers.get(name)
        if tracker is not None:
            self._release(tracker, tracker.retreat(0), behind=False)
            del self._trackers[name]
            self._share_bytes = 0

    def _nearest_stream(self, entry: int) -> tuple[StreamTracker | None, int]:
        """The stream whose reader is nearest to an entry, and the position; None and -1 without
        one."""
        best: tuple[StreamTracker | None, int] = None, -1
        least = math.inf
        for tracker in self._trackers.values():
            position, distance = tracker.nearest_position(entry)
            if position >= 0 and distance < least:
                best, least = (tracker, position), distance
        return best

    def _stream_of_read(self, entry: int, now_s: float) -> tuple[StreamTracker | None, int]:
        """The stream that a READ probably belongs to, which learns where its reader is; None
        without one."""
        tracker, position = self._nearest_stream(entry)
        if tracker is None:
            return None, -1
        if position < tracker.floor:  # given up too early, or another program's READ
            self._release(tracker, tracker.note_late_read(position, now_s), behind=True)
        if position < tracker.low and tracker.is_far(position):
            return None, -1
        if not tracker.note_read(position, now_s):
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
                neighbours = np.concatenate(
                    [neighbours, tracker.neighbours(position, MARKER_STRIDE)]
                )
            old = (
                self._now_s - self._start_s - self._resident_set.pushed_s[neighbours] >= LATE_READ_S
            )
            neighbours = np.unique(
                neighbours[self._resident_set.resident[neighbours] & (old | (neighbours == entry))]
            )
            self._push_again.append(neighbours)
        self._counters["lost_entries"] += len(neighbours)
        self._resident_set.remove(neighbours)

    def _push(self, entries: Entries, markers: list[int]) -> Push:
        """A push of these entries, without those that READs have just brought."""
        entries, by_reads = self._resident_set.split_recent_reads(
            entries, self._now_s - self._start_s
        )
        self._resident_set.pushed_s[by_reads] = self._now_s - self._start_s
        chunk = -1
        if len(entries):
            chunks = self._chunk[entries]
            if (chunks == chunks[0]).all():
                chunk = int(chunks[0])
            else:
                entries = self._chunk_entries.fetch_order(entries)
        return Push(chunk, entries, np.array(markers, np.uint32))

    def _checked(self, entries: EntryOrder) -> Entries:
        """The entries as an array. Raises UsageError for numbers that are no entries."""
        found = np.asarray(entries)
        if len(found) and (found.min() < 0 or found.max() >= len(self._cost)):
            raise UsageError(f"no entry {found.max()} among {len(self._cost)}")
        return found.astype(np.uint32, copy=False)
