"""Residency: which file contents to push into the kernel's page cache, and which to drop.

Owned here: what is believed resident, the budget, and the next decision. Not owned: carrying it out
(walks, NOTIFY_STORE, posix_fadvise, inotify, cachestat), the bytes, where one stream's reader is
(`stream_tracker.py`), what a unit is (`units.py`). Pure: no I/O, and no clock but the `now_s`
handed in. Used by one thread. Facts may come at any time; at most one decision is outstanding, and
it is reported back (`pushed`, `dropped`, `sampled`) before the next one is asked for.

Without a plan, a miss pushes the rest of its chunk while that fits into what is left of the budget;
`oneshot` does that for all chunks from the start. Nothing is ever dropped for it: of a dataset that
fits, everything ends up resident; of a larger one, what came first stays and the rest is served
file by file, so random misses never thrash.

With plans, units are pushed in their streams' orders, nearest next use first over all streams. Room
is made by dropping what readers have passed, then what no stream has claimed (least value first,
then farthest next use), then by taking back the farthest part of a stream that is more than twice
as far ahead, or that has stood still while others went on. What is claimed twice stays until the
last claim ends.

What a READ alone brought into the cache is not counted: it is the kernel's, which frees it first.
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
"""A stream without a sign for so long, while others go on, gives its memory up: validation waits
longer than that in many runs, and comes back with one miss."""
TENTATIVE_S = 600.0
"""So long after its list was read, a stream that nobody has begun to follow is withdrawn."""
STILL_DIVISOR = 4
"""A still stream gets room only where more than this part of the budget (1/4) stays free."""

LATE_READ_S = 1.0
"""A READ that set out before its entry was pushed may be reported so long after."""
KNOWN_DIVISOR = 8
"""Kernel memory for entries takes at most one part in this many of the budget. Names must be known
before contents can be pushed: of small files they take a quarter of what the contents do, whatever
the budget is, and the kernel frees both alike."""

PAUSE_S, PAUSE_S_MAX = 0.5, 8.0
"""A store that fails is not asked for all that is planned, one unit after the other."""

SAMPLE_S = 2.0
"""Between samples: idle pages have been seen to go after some 5 s."""
SAMPLE_ENTRIES = 32
SAMPLE_AHEAD_ENTRIES = 8_192

MARKERS_MAX = 2_048
"""Watches of all streams together: a quarter of the least limit of a user that kernels set."""
UNWATCH_MIN = 256
"""Watches that are no longer needed are taken away so many at once, or when idle."""

PASSES_MAX = 64
"""Units with nothing to push that one decision passes over: it stays below some milliseconds."""


@dataclass(slots=True)
class Watches:
    """Which entries have a watch, for which streams and positions; and which need it no longer."""

    users: dict[int, list[tuple[str, int]]] = field(default_factory=dict)
    unneeded: dict[int, None] = field(default_factory=dict)

    def add(self, entry: int, name: str, position: int) -> bool:
        """Whether the watch has to be made."""
        users = self.users.setdefault(entry, [])
        users.append((name, position))
        if entry in self.unneeded:
            del self.unneeded[entry]  # it still stands
            return False
        return len(users) == 1

    def remove(self, name: str, markers: list[tuple[int, int]]) -> None:
        """One use less of each (position, entry) of a stream."""
        for position, entry in markers:
            users = self.users.get(entry, [])
            if (name, position) in users:
                users.remove((name, position))
                if not users:
                    del self.users[entry]
                    self.unneeded[entry] = None

    def is_watched(self, entry: int) -> bool:
        """Whether an open of the entry is told."""
        return entry in self.users or entry in self.unneeded

    def take_unneeded(self) -> Entries:
        """The entries whose watch may go; it counts as gone."""
        entries = np.fromiter(self.unneeded, np.uint32)
        self.unneeded.clear()
        return entries


class PrefetchPlanner:
    """The decisions of one mount (see the module)."""

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
        """Per entry: its (first) chunk, -1 for none; its size in bytes; its offset in the chunk,
        by which mixed units are sorted; whether it is a file (else: what has a chunk).
        """
        cost = -(-size // PAGE_BYTES) * PAGE_BYTES
        cost[chunk < 0] = 0
        self._columns = Columns(chunk.astype(np.int32), cost.astype(np.int64), chunk_count)
        self._cost = self._columns.cost
        self._chunk = self._columns.chunk
        self._plan = Plan(chunk >= 0 if is_file is None else is_file)
        self._budget_bytes = budget_bytes
        self._known = 0
        self._chunk_entries = ChunkEntries(self._columns, offset)
        self._resident_set = ResidentSet(self._cost)
        self._lost: deque[Entries] = deque()
        self._miss_fill = MissFill(
            self._chunk_entries, self._resident_set, chunk_count, everything=policy == "oneshot"
        )
        self._trackers: dict[str, StreamTracker] = {}
        self._watches = Watches()
        self._share_bytes = 0
        self._outstanding: Push | Drop | Sample | None = None
        self._start_s = math.nan
        self._pause_s = 0.0  # after the last push failed
        self._paused_until_s = -math.inf
        self._now_s = 0.0
        self._done = PrefetchCounters()

    @property
    def resident_bytes(self) -> int:
        """What is believed resident, in whole pages."""
        return self._resident_set.bytes

    @property
    def wants_misses(self) -> bool:
        """Whether each miss counts. Where nothing is planned and nothing more has room, a few of
        them show if pages are lost.
        """
        return bool(self._trackers) or self._miss_fill.has_room(self._room())

    def inherit(self, old: "PrefetchPlanner", was: npt.NDArray[np.int32]) -> None:
        """Go on where another version ended, whose entries these `was` (-1: none). Plans end."""
        self._resident_set.inherit(old._resident_set, was)
        self._done, self._start_s, self._now_s = old._done, old._start_s, old._now_s

    def running(self, now_s: float) -> list[str]:
        """The streams whose readers are in the midst of what is announced."""
        return [name for name, follow in self._trackers.items() if follow.is_running(now_s)]

    # Facts: the plan

    def announce(self, stream: Stream, now_s: float) -> None:
        """A stream, new or again. Raises UsageError, as the next three do: nothing has changed."""
        self._tick(now_s)
        if (over := self._plan.ended_to_withdraw(stream.name)) is not None:
            self.withdraw(over)
        self._plan.announce(stream)
        self._end(stream.name)
        self._trackers[stream.name] = StreamTracker(self._columns, stream, now_s)
        self._share_bytes = 0  # to be shared out anew

    def extend(self, name: str, epochs: Sequence[Epoch]) -> None:
        """More epochs of a stream, or more of its last one."""
        self._tracker(name).extended(self._plan.extend(name, epochs))
        self._share_bytes = 0

    def replace(self, name: str, epoch: Epoch, position: int = 0) -> None:
        """An epoch is another, whole or from a position on."""
        follow = self._tracker(name)
        stream = self._plan.replace(name, epoch, position)
        self._release(follow, follow.replaced(stream, epoch.number, position), behind=False)
        self._share_bytes = 0

    def withdraw(self, name: str) -> None:
        """The stream will not be read on."""
        self._end(self._plan.withdraw(name).name)

    def progress(self, name: str, position: int, now_s: float, epoch: int | None = None) -> None:
        """The stream's reader says that it reads this position next; of the current epoch, unless
        another is named. This counts, whatever its markers say. Raises UsageError.
        """
        self._tick(now_s)
        follow = self._tracker(name)
        if epoch is None:
            part = next((each for each in follow.epoch_states if follow.high < each.end), None)
        else:
            part = next((each for each in follow.epoch_states if each.epoch.number == epoch), None)
        if part is None or not 0 <= position <= len(part.epoch):
            raise UsageError(f"stream {name} has no position {position} there")
        if follow.has_gaps(part.base + position):
            self._take_back(follow, 0)  # what lies there was let go: all from there again
        follow.progress(part.base + position, now_s)

    def value(self, entries: "int | EntryOrder", importance: float) -> None:
        """What an unclaimed entry is worth against others; 0 until said. Raises UsageError."""
        if not math.isfinite(importance):
            raise UsageError(f"bad importance {importance}")
        checked = self._checked([entries] if isinstance(entries, int) else entries)
        self._resident_set.set_value(checked, importance)

    # Facts: the kernel

    def set_known_entries(self, count: int) -> None:
        """The kernel knows so many entries now: those of the folders that were walked."""
        self._known = count
        self._share_bytes = 0

    def set_budget(self, budget_bytes: int) -> None:
        """Another budget; where it is smaller, the next decisions drop."""
        self._budget_bytes = budget_bytes
        self._share_bytes = 0

    def opened(self, entry: int, now_s: float) -> None:
        """A watched entry was opened."""
        self._tick(now_s)
        users = tuple(self._watches.users.get(entry, ()))
        if not users:
            return
        # Others may read the same file elsewhere in their orders: it was who is nearest to it.
        nearest = min(follow.nearest_position(entry)[1] for follow in self._trackers.values())
        for name in {name for name, _ in users}:
            follow = self._trackers[name]
            high, places = follow.high, [at for user, at in users if user == name]
            position = min(places, key=lambda at: abs(at - high))
            if abs(position - high) <= nearest + MARKER_STRIDE:
                follow.note_open(position, now_s)

    def missed(self, entry: int, now_s: float) -> None:
        """A READ of an entry's content reached the server."""
        self._tick(now_s)
        if not 0 <= entry < len(self._cost) or not self._cost[entry]:
            return
        follow, position = self._attributed(entry, now_s)
        if self._resident_set.resident[entry]:
            if now_s - self._start_s - float(self._resident_set.pushed_s[entry]) >= LATE_READ_S:
                self._pages_lost(entry, follow, position)
            return
        self._resident_set.note_read(entry, now_s - self._start_s)
        need = int(self._cost[entry])
        if follow is None and need <= self._contents_budget():
            self._miss_fill.missed(int(self._chunk[entry]), need, self._room(), self._now_s)

    def forgotten(self, entries: EntryOrder) -> None:
        """The kernel has forgotten these; their pages went along."""
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
        """What came of a push. `absent`: the kernel does not know them. These and what is left out
        are not tried again before they are missed; where the store has `failed`, what is left out
        is, after a pause that doubles.
        """
        self._tick(now_s)
        assert push is self._outstanding, "another decision is outstanding"
        self._outstanding = None
        resident, unknown = self._checked(done), self._checked(absent)
        self._resident_set.pushed_s[resident] = now_s - self._start_s
        self._resident_set.add(resident if done is push.entries else np.unique(resident))
        self._done.count_push(len(resident), int(self._cost[resident].sum()), len(unknown))
        self._pause_s = min(2 * self._pause_s or PAUSE_S, PAUSE_S_MAX) if failed else 0.0
        self._paused_until_s = now_s + self._pause_s
        if failed:
            gone = np.concatenate([resident, unknown])
            self._lost.append(push.entries[~np.isin(push.entries, gone)])

    def dropped(self, drop: Drop) -> None:
        """A drop was carried out."""
        assert drop is self._outstanding, "another decision is outstanding"
        self._outstanding = None
        self._resident_set.victims_dropped(drop.entries)
        self._done.count_drop(len(drop.entries))

    def sampled(self, entries: EntryOrder, resident_mask: Mask) -> None:
        """What a sample showed, or what anybody has seen of these entries."""
        if isinstance(self._outstanding, Sample):
            self._outstanding = None
        gone = self._checked(entries)[~np.asarray(resident_mask, np.bool_)]
        for entry in gone[self._resident_set.resident[gone]].tolist():
            if self._resident_set.resident[entry]:  # an earlier one may have taken it along
                self._pages_lost(entry, *self._place_of(entry))

    # Decisions

    def next(self, now_s: float) -> Decision:
        """What to do now. Every decision but Idle is reported back before the next is asked for."""
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
        return decision or Idle(self._until(now_s))

    def _next_push(self, now_s: float) -> Push | Drop | None:
        return self._push_lost() or self._push_planned(now_s) or self._push_unplanned()

    def upcoming(self, count: int) -> list[Entries]:
        """What the next pushes will probably be, the soonest first: to be fetched ahead."""
        found = []
        for follow in sorted(self._trackers.values(), key=self._ahead_s):
            found += follow.units_ahead(count)
        return [*found, *self._miss_fill.upcoming(count)][:count]

    def planned(self, count: int) -> list[Entries]:
        """What each stream's next pushes will be, so many of each."""
        return [unit for each in self._trackers.values() for unit in each.units_ahead(count)]

    def resident(self, entries: EntryOrder) -> Mask:
        """Which of these a read would find without us, as far as is known. Raises UsageError."""
        checked = self._checked(entries)
        found: Mask = self._resident_set.resident[checked] | (self._cost[checked] == 0)
        return found

    def stats(self) -> PrefetchStats:
        """What has been done, and where every stream is."""
        follows = self._trackers.values()
        return PrefetchStats(
            pushes=self._done.pushes,
            pushed_entries=self._done.pushed_entries,
            pushed_bytes=self._done.pushed_bytes,
            absent_entries=self._done.absent,
            drops=self._done.drops,
            dropped_entries=self._done.dropped_entries,
            lost_entries=self._done.lost_entries,
            resident_entries=int(np.count_nonzero(self._resident_set.resident)),
            resident_bytes=self._resident_set.bytes,
            known_bytes=self._known * KNOWN_ENTRY_BYTES,
            budget_bytes=self._budget_bytes,
            has_room=self._miss_fill.has_room(self._room()),
            oneshot_chunks=self._miss_fill.in_turn_count,
            oneshot_done_chunks=self._miss_fill.done_count,
            streams=[follow.stats() for follow in follows],
        )

    def stream_stats(self, name: str) -> StreamStats | None:
        """Where one stream is; None where there is no stream of that name."""
        tracker = self._trackers.get(name)
        return None if tracker is None else tracker.stats()

    # The decisions one by one; None where there is nothing of the kind to do

    def _shrink(self) -> Drop | None:
        """Back into a budget that has become too small."""
        over = -self._room()
        while over > 0:
            if (drop := self._drop(over)) is not None:
                return drop
            farthest = sorted(self._trackers.values(), key=self._ahead_s, reverse=True)
            if not any(self._retreat(follow) for follow in farthest):
                return None
        return None

    def _unwatch_many(self, least: int) -> Drop | None:
        enough = len(self._watches.unneeded) >= least
        return Drop(NO_ENTRIES, self._watches.take_unneeded()) if enough else None

    def _push_lost(self) -> Push | None:
        while self._lost:
            entries = self._lost.popleft()
            wanted = self._resident_set.missing(entries)
            if self._trackers:
                wanted = wanted[self._resident_set.claims[wanted] > 0]
            wanted = self._chunk_entries.fetch_order(np.unique(wanted))
            wanted = wanted[np.cumsum(self._cost[wanted]) <= self._room()]
            if len(wanted):
                return self._push(wanted, [])
        return None

    def _push_planned(self, now_s: float) -> Push | Drop | None:
        if not self._trackers:
            return None
        share = self._shared()
        ahead_max = max(MARKERS_MAX // max(self._active(), 1), 16) * MARKER_STRIDE
        refused: set[str] = set()
        markers: list[int] = []
        signs = [each.last_sign_s for each in self._trackers.values()]
        for _ in range(PASSES_MAX):
            near, near_s = None, math.inf
            for name, follow in self._trackers.items():
                if name in refused:
                    continue
                frontier = follow.frontier(share)
                if frontier is None or frontier - follow.low >= ahead_max:
                    continue
                ahead_s = self._ahead_s(follow, frontier)
                if near is None or ahead_s < near_s:
                    near, near_s = follow, ahead_s
            if near is None:
                break
            ahead = near.peek_unit()
            entries = self._resident_set.missing(ahead.entries)
            if not ahead.once:
                _, first = np.unique(entries, return_index=True)
                entries = entries[np.sort(first)]
            entries = entries[
                self._cost[entries] <= self._contents_budget()
            ]  # else its reads are served
            need = int(self._cost[entries].sum())
            room = self._room()
            if need > self._contents_budget():
                entries, need = NO_ENTRIES, 0  # it will never fit
            still = self._is_still(near, signs, now_s)
            if need > room - still * self._budget_bytes // STILL_DIVISOR:
                if near.tentative or still:
                    refused.add(near.stream.name)
                    continue
                if markers:
                    break
                return self._make_room(near, near_s, need - room, signs, now_s)
            near.claim(ahead)
            self._resident_set.claim(ahead.entries)
            for position, entry in ahead.markers:
                if self._watches.add(entry, near.stream.name, position):
                    markers.append(entry)
            if len(entries):
                return self._push(entries, markers)
        else:
            return self._push(NO_ENTRIES, markers)  # there may be more
        return self._push(NO_ENTRIES, markers) if markers else None

    def _push_unplanned(self) -> Push | None:
        """What was missed, then what a oneshot still lacks; only into room that is free."""
        entries = self._miss_fill.next(self._room())
        return None if entries is None else self._push(entries, [])

    def _sample(self, now_s: float) -> Sample | None:
        """A few of what will be read next, of the stream whose turn it is."""
        for follow in self._trackers.values():
            if now_s < follow.sampled_s + SAMPLE_S or now_s - follow.last_sign_s >= STILL_S:
                continue
            follow.sampled_s = now_s
            near = follow.neighbours(follow.high, SAMPLE_AHEAD_ENTRIES)
            near = near[:: max(1, len(near) // SAMPLE_ENTRIES)][:SAMPLE_ENTRIES]
            near = np.unique(near[self._resident_set.resident[near]])
            free = [not self._watches.is_watched(entry) for entry in near.tolist()]
            if any(free):
                return Sample(near[free])
        return None

    def _until(self, now_s: float) -> float | None:
        """When time alone will have changed something."""
        times = [self._paused_until_s]
        for follow in self._trackers.values():
            if follow.tentative:
                times.append(follow.last_sign_s + TENTATIVE_S)
            if now_s - follow.last_sign_s < STILL_S:
                times += [follow.last_sign_s + STILL_S, follow.sampled_s + SAMPLE_S]
        return min((each for each in times if each > now_s), default=None)

    # Room

    def _room(self) -> int:
        """What is left of the budget in bytes; below 0 where it has become too small."""
        return self._contents_budget() - self._resident_set.bytes

    def _contents_budget(self) -> int:
        """The budget less the kernel's memory for entries, or most of it: contents need room."""
        known_bytes = self._known * KNOWN_ENTRY_BYTES
        return self._budget_bytes - min(known_bytes, self._budget_bytes // KNOWN_DIVISOR)

    def _is_still(self, follow: StreamTracker, signs: list[float], now_s: float) -> bool:
        return now_s - follow.last_sign_s >= STILL_S and max(signs) > follow.last_sign_s

    def _ahead_s(self, follow: StreamTracker, frontier: int | None = None) -> float:
        """How long the reader needs to the frontier; at equal rates until they are measured."""
        distance = (self._frontier(follow) if frontier is None else frontier) - follow.high
        rate = follow.rate
        if not rate:
            rates = [each.rate for each in self._trackers.values() if each.rate]
            rate = sum(rates) / len(rates) if rates else 1.0
        return distance / rate

    def _active(self) -> int:
        """The streams that have something left to be read."""
        return sum(1 for follow in self._trackers.values() if follow.epoch_states)

    def _shared(self) -> int:
        """Each stream's share of the budget in bytes."""
        if not self._share_bytes:
            self._share_bytes = max(self._contents_budget() // max(self._active(), 1), 1)
            for follow in self._trackers.values():
                follow.give_share(self._share_bytes)
        return self._share_bytes

    def _make_room(
        self, near: StreamTracker, near_s: float, need: int, signs: list[float], now_s: float
    ) -> Drop | None:
        """For a unit of a stream: drop what nobody has claimed, or take from who is far ahead."""
        if (drop := self._drop(need)) is not None:
            return drop
        others = [each for each in self._trackers.values() if each is not near]
        still = [each for each in others if self._is_still(each, signs, now_s)]
        for follow in still:
            if self._take_back(follow, follow.floor) and (drop := self._drop(need)) is not None:
                return drop
        far = max(others, key=self._ahead_s, default=None)
        # Within two markers nobody knows who is nearer.
        if far is None or self._ahead_s(far) <= 2 * max(near_s, 0) + 2 * MARKER_STRIDE / (
            far.rate or 1
        ):
            return None
        return self._drop(need) if self._retreat(far) else None

    def _frontier(self, follow: StreamTracker) -> int:
        frontier = follow.frontier(self._shared())
        return follow.end if frontier is None else frontier

    def _retreat(self, follow: StreamTracker) -> bool:
        """Take back the farther half of what a stream has claimed ahead of its reader."""
        middle = follow.high + max(self._frontier(follow) - follow.high, 0) // 2
        return self._take_back(follow, middle) or self._take_back(follow, follow.floor)

    def _take_back(self, follow: StreamTracker, position: int) -> bool:
        """All that a stream has claimed from a position on, the farthest to go first."""
        released = follow.retreat(position)
        self._release(follow, released[::-1], behind=True)
        return len(released) > 0

    def _release(self, follow: StreamTracker, entries: Entries, *, behind: bool) -> None:
        """A stream has given up claims, and perhaps watches."""
        self._resident_set.unclaim(entries, passed=behind)
        self._watches.remove(follow.stream.name, follow.take_unwatched())

    def _drop(self, need: int) -> Drop | None:
        """Give up what nobody has claimed, at least so many bytes where there are as many."""
        victims = self._resident_set.victims(need, self._next_use)
        return Drop(victims, self._watches.take_unneeded()) if len(victims) else None

    def _next_use(self, entries: Entries) -> npt.NDArray[np.float64]:
        uses = [follow.next_use(entries) for follow in self._trackers.values()]
        return np.minimum.reduce(uses) if uses else np.full(len(entries), np.inf)

    def _tick(self, now_s: float) -> None:
        if math.isnan(self._start_s):
            self._start_s = now_s
        self._now_s = now_s

    def _release_passed(self, now_s: float) -> None:
        """End the claims on what readers have passed; end streams that nobody follows."""
        for name, follow in tuple(self._trackers.items()):
            if follow.tentative and now_s - follow.last_sign_s >= TENTATIVE_S:
                self.withdraw(name)
                continue
            self._release(follow, follow.pass_floor(), behind=True)
            if follow.finished:
                self._plan.finish(name, follow.finished)
                follow.finished, self._share_bytes = 0, 0

    def _tracker(self, name: str) -> StreamTracker:
        self._plan.stream(name)
        return self._trackers[name]

    def _end(self, name: str) -> None:
        follow = self._trackers.get(name)
        if follow is not None:
            self._release(follow, follow.retreat(0), behind=False)
            del self._trackers[name]
            self._share_bytes = 0

    def _place_of(self, entry: int) -> tuple[StreamTracker | None, int]:
        """The stream whose reader is nearest to an entry, and its position there."""
        best: tuple[StreamTracker | None, int] = None, -1
        least = math.inf
        for follow in self._trackers.values():
            position, distance = follow.nearest_position(entry)
            if position >= 0 and distance < least:
                best, least = (follow, position), distance
        return best

    def _attributed(self, entry: int, now_s: float) -> tuple[StreamTracker | None, int]:
        """Of which stream a READ probably is; it tells where that stream's reader is."""
        follow, position = self._place_of(entry)
        if follow is None:
            return None, -1
        if position < follow.floor:  # let go too early, rather than never there
            self._release(follow, follow.note_late_read(position, now_s), behind=True)
        if position < follow.low and follow.is_far(position):
            return None, -1
        if not follow.note_read(position, now_s):
            return None, -1
        return follow, position

    def _pages_lost(self, entry: int, follow: StreamTracker | None, position: int) -> None:
        """Pages that were there have gone: those around will have, too."""
        mates = np.array([entry], np.uint32)
        chunk = int(self._chunk[entry])
        if self._chunk_entries.may_push(chunk, self._now_s):
            mates = self._chunk_entries.of(chunk)
            if follow is not None:
                mates = np.concatenate([mates, follow.neighbours(position, MARKER_STRIDE)])
            old = self._now_s - self._start_s - self._resident_set.pushed_s[mates] >= LATE_READ_S
            mates = np.unique(mates[self._resident_set.resident[mates] & (old | (mates == entry))])
            self._lost.append(mates)
        self._done.lost_entries += len(mates)
        self._resident_set.remove(mates)

    def _push(self, entries: Entries, markers: list[int]) -> Push:
        entries, brought = self._resident_set.split_recent_reads(
            entries, self._now_s - self._start_s
        )
        self._resident_set.pushed_s[brought] = self._now_s - self._start_s
        chunk = -1
        if len(entries):
            chunks = self._chunk[entries]
            if (chunks == chunks[0]).all():
                chunk = int(chunks[0])
            else:
                entries = self._chunk_entries.fetch_order(entries)
        return Push(chunk, entries, np.array(markers, np.uint32))

    def _checked(self, entries: EntryOrder) -> Entries:
        found = np.asarray(entries)
        if len(found) and (found.min() < 0 or found.max() >= len(self._cost)):
            raise UsageError(f"no entry {found.max()} among {len(self._cost)}")
        return found.astype(np.uint32, copy=False)
