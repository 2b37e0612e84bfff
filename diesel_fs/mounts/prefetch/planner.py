"""Decides which file contents to push into the kernel's page cache next, and which to drop.

A *push* stores the contents of files in the page cache, so that a reader finds them there: the
files are then *resident*. A *sample* checks whether some files still are. A *miss* is a READ that
reached the mount because its file was not resident. The *budget* is the memory for resident files.

The prefetch worker reports events (misses, opens of marker files, changes of the plan, files that
the kernel has forgotten). It calls `next` for a decision, carries it out, and reports the result
(`pushed`, `dropped`, `sampled`) before the next call. Events may come in between.

Without a plan, missed files lead to pushes of whole chunks into free memory (`miss_fill.py`).
Nothing is dropped for these, so random misses never make the planner push and drop in turn.

With plans, each *stream* (a reader with a known order) gets an equal share of the budget. Its order
is cut into *units*, the files of one push each (`streams/units.py`). A stream *claims* the entries
of a unit from the decision to push it until its reader has passed them, and claimed entries are not
dropped.
"""

import math

import numpy as np
import numpy.typing as npt

from ...orders.plan import NO_ENTRIES, Entries, EntryOrder
from .balance import Balance
from .decisions import (
    Decision,
    Drop,
    FillPolicy,
    Idle,
    PrefetchCounters,
    PrefetchStats,
    Push,
    Sample,
    UnitCosts,
)
from .eviction import Mask
from .freed_pages import FreedPages
from .memory import KNOWN_ENTRY_BYTES, Memory
from .memory_split import Importances
from .miss_fill import ChunkEntries, MissFill
from .resident_set import Clock, ResidentSet
from .room import Room
from .streams import signs
from .streams.changes import Streams
from .streams.stream_tracker import StreamTracker
from .streams.stream_views import StreamViews, is_still
from .streams.units import PAGE_BYTES, Columns
from .streams.units_ahead import NextUnit
from .streams.watches import Watches
from .turns import UrgentTurns, soonest_stream

STILL_DIVISOR = 4
"""A still stream (its reader gives no sign, see `streams/stream_views.py`) gets room only while a
quarter of the budget stays free."""

PAUSE_S, PAUSE_S_MAX = 0.5, 8.0
"""The first and the longest pause after a failed push."""

UNWATCH_MIN = 256
"""Unneeded watches are removed together once there are this many, or when the worker is idle."""

PAGES_MAX = (1 << 32) - 1
"""The greatest count in the columns: 16 TiB. A file with as many pages never fits."""

UNITS_SKIPPED_MAX = 64
"""One decision skips at most this many units with nothing to push: it takes a few milliseconds."""


class PrefetchPlanner:
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
        """Columns by entry: its (first) chunk or -1, its size in bytes, its offset in the chunk (if
        not given, entries lie in it by index), and whether it is a file (if not given: whether it
        has a chunk). Without `costs`, fetching is taken to need no time. `keeps_important`: see
        `memory_split.py`."""
        pages = np.minimum(-(-size // PAGE_BYTES), PAGES_MAX).astype(np.uint32)
        pages[chunk < 0] = 0
        columns = Columns(chunk.astype(np.int32), pages, chunk_count)
        self._columns = columns
        self._dataset_bytes = int(pages.sum(dtype=np.int64)) * PAGE_BYTES
        self._clock = Clock()
        trackers: dict[str, StreamTracker] = {}
        self.watches = Watches()
        self.resident_set = ResidentSet(columns)
        self.memory = Memory(budget_bytes, self.resident_set, trackers)
        self.views = StreamViews(trackers)
        self.importances = Importances(columns, self.memory, divides=keeps_important)
        self.streams = Streams(
            columns,
            chunk >= 0 if is_file is None else is_file,
            self.memory,
            self.importances,
            self.watches,
            self._clock,
        )
        chunk_entries = ChunkEntries(columns, offset)
        self._miss_fill = MissFill(
            chunk_entries, self.resident_set, chunk_count, everything=policy == "oneshot"
        )
        self._freed = FreedPages(
            columns, self.resident_set, chunk_entries, self.views, self.watches, self._clock
        )
        self._room = Room(self.streams, self.views, self.memory, self.watches)
        self._balance = Balance(costs, columns, self.resident_set, self.views, self._clock)
        self._urgent = UrgentTurns()
        self._outstanding: Push | Drop | Sample | None = None  # not yet reported
        self._decided_s = 0.0
        self._is_urgent = False  # whether `_outstanding` is an urgent push
        self._has_checked = False  # whether the last decision was a check for freed pages
        self._pause_s = 0.0  # after the last push, if it failed
        self._paused_until_s = -math.inf
        self._waits_for_room = False  # see `PrefetchStats`
        self.waits_for_reader = False
        """Whether a stream's next unit is not pushed yet because its reader is far from it."""
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
    def wants_misses(self) -> bool:
        """Whether the server should report every miss. If there is neither a plan nor free room, a
        few are enough: they only show that the kernel has freed pages."""
        return self.views.has_streams or self._miss_fill.has_room(self.memory.room_bytes())

    def inherit(self, old: "PrefetchPlanner", was: npt.NDArray[np.int32]) -> None:
        """Take over from the planner of another version, without its plans. `was` has each entry's
        index there, or -1."""
        self.resident_set.inherit(old.resident_set, was)
        self._counters = old._counters
        self._clock.inherit(old._clock)

    def take_over(self, entries: Entries, now_s: float) -> bool:
        """Note that entries are resident, with contents from another version's page cache. Returns
        False, and notes nothing, if there is no room. No entry may occur twice."""
        self._clock.tick(now_s)
        entries = self.resident_set.missing(entries)
        if self._columns.bytes_of(entries) > self.memory.room_bytes():
            return False
        self.resident_set.add(entries)
        self.resident_set.pushed_s[entries] = self._clock.since_start_s(now_s)
        return True

    # Reports

    def set_store_is_slow(self, *, is_slow: bool) -> None:
        """Urgent units are pushed only if the store is slow."""
        self._urgent.store_is_slow = is_slow

    def opened(self, entry: int, now_s: float) -> None:
        self._clock.tick(now_s)
        signs.note_open(self.streams, self.watches, entry, now_s)

    def missed(self, entry: int, now_s: float, *, is_sure: bool = True) -> None:
        """`is_sure`: a reader surely wanted the entry; otherwise the kernel may have read ahead of
        another file."""
        self._clock.tick(now_s)
        pages = self._columns.pages
        if not 0 <= entry < len(pages) or not pages[entry]:
            return
        tracker, position = signs.stream_of_read(self.streams, entry, now_s, is_sure=is_sure)
        if self.resident_set.resident[entry]:
            if self._freed.was_read_late(entry, now_s):
                self._freed.note_freed(entry, tracker, position, self._counters, was_read=True)
            return
        self.resident_set.note_read(entry, self._clock.since_start_s(now_s))
        need = int(pages[entry]) * PAGE_BYTES
        if tracker is None and need <= self.memory.contents_bytes():
            chunk = int(self._columns.chunk[entry])
            self._miss_fill.missed(chunk, need, self.memory.room_bytes(), now_s)

    def forgotten(self, entries: EntryOrder) -> None:
        self.resident_set.remove(np.unique(self._columns.checked(entries)))

    def pushed(
        self,
        push: Push,
        done: EntryOrder,
        absent: EntryOrder,
        now_s: float,
        *,
        failed: bool = False,
    ) -> None:
        """`done` are resident now, `absent` are unknown to the kernel. Entries that are `absent` or
        in neither list are not pushed again before they are missed. But if the store has `failed`,
        those in neither list are pushed again, after a pause that doubles with each failure."""
        self._clock.tick(now_s)
        assert push is self._outstanding, "another decision is outstanding"
        self._outstanding = None
        self._urgent.note_pushed(now_s - self._decided_s, was_urgent=self._is_urgent)
        self._balance.note_pushed(self._decided_s, now_s, failed=failed)
        resident, unknown = self._columns.checked(done), self._columns.checked(absent)
        self.resident_set.pushed_s[resident] = self._clock.since_start_s(now_s)
        self.resident_set.add(resident if done is push.entries else np.unique(resident))
        self._counters["pushes"] += 1
        self._counters["pushed_entries"] += len(resident)
        self._counters["pushed_bytes"] += self._columns.bytes_of(resident)
        self._counters["absent_entries"] += len(unknown)
        self._pause_s = min(2 * self._pause_s or PAUSE_S, PAUSE_S_MAX) if failed else 0.0
        self._paused_until_s = now_s + self._pause_s
        if failed:
            reported = np.concatenate([resident, unknown])
            self._freed.push_again(push.entries[~np.isin(push.entries, reported)])

    def dropped(self, drop: Drop) -> None:
        assert drop is self._outstanding, "another decision is outstanding"
        self._outstanding = None
        self.resident_set.victims_dropped(drop.entries)
        self._counters["drops"] += 1
        self._counters["dropped_entries"] += len(drop.entries)

    def sampled(self, entries: EntryOrder, resident_mask: Mask) -> None:
        """Report which of these entries are resident, after a sample or at any time."""
        checked, resident = self._columns.checked(entries), np.asarray(resident_mask, np.bool_)
        if isinstance(self._outstanding, Sample):
            self._outstanding = None
            if self._freed.checked(checked, resident, self._counters):
                return
        freed = checked[~resident]
        for entry in freed[self.resident_set.resident[freed]].tolist():
            if self.resident_set.resident[entry]:  # not removed with an earlier one
                tracker, position = signs.nearest_stream(self.streams, entry)
                self._freed.note_freed(entry, tracker, position, self._counters, was_read=False)

    # Questions

    def resident(self, entries: EntryOrder) -> Mask:
        """Which of these entries are in the page cache, as far as is known. Raises UsageError for
        an index that no entry has."""
        checked = self._columns.checked(entries)
        found: Mask = self.resident_set.resident[checked] | (self._columns.pages[checked] == 0)
        return found

    def unconfirmed(self, entries: EntryOrder) -> Entries:
        """Which of these entries were pushed and may be opened, to see whether the kernel still has
        their pages. Watched entries are left out: the open would look like a reader's. Raises
        UsageError for an index that no entry has."""
        checked = np.unique(self._columns.checked(entries))
        checked = checked[self.resident_set.resident[checked]]
        is_free = [not self.watches.is_watched(entry) for entry in checked.tolist()]
        return checked[is_free]

    def stats(self) -> PrefetchStats:
        return PrefetchStats(
            **self._counters,
            resident_entries=int(np.count_nonzero(self.resident_set.resident)),
            resident_bytes=self.resident_set.bytes,
            dataset_bytes=self._dataset_bytes,
            known_bytes=self.memory.known_entries * KNOWN_ENTRY_BYTES,
            budget_bytes=self.memory.budget_bytes,
            has_room=self._miss_fill.has_room(self.memory.room_bytes()),
            waits_for_room=self._waits_for_room,
            oneshot_chunks=self._miss_fill.in_turn_count,
            oneshot_done_chunks=self._miss_fill.done_count,
            streams=self.views.stats(),
        )

    # Decisions

    def next(self, now_s: float) -> Decision:
        assert self._outstanding is None, "the last decision has not been reported"
        self._clock.tick(now_s)
        heap = self.resident_set.eviction.heap
        is_building = heap is not None and heap.build_some()
        self.streams.release_passed(now_s)
        if self.views.find_still(now_s):
            self.resident_set.eviction.note_new_orders()
        decision = (
            self._room.shrink()
            or self._room.unwatch(UNWATCH_MIN)
            or (None if self._has_checked else self._freed.check())  # pushes are not held up
            or self._next_push(now_s)
            or self._freed.check()
            or self._freed.sample(now_s)
            or self._room.unwatch(1)
        )
        self._has_checked = self._freed.is_checking
        self._outstanding, self._decided_s = decision, now_s
        if decision is not None:
            return decision
        # When the next decision may differ although nothing is reported
        times = [self._paused_until_s, *self.views.next_change_s(now_s)]
        change_s = min((each for each in times if each > now_s), default=None)
        return Idle(now_s if is_building else change_s)

    def upcoming(self, count: int) -> list[Entries]:
        """The entries of the next pushes, as far as they can be foreseen, in the order in which to
        fetch them, with each stream's next unit if there are at most `count / 2` streams. A push
        has its entries in the same order, by which the `BatchSource` finds the reads under way."""
        trackers = self.views.trackers
        if len(trackers) == 1:
            planned = next(iter(trackers.values())).units.entries(count)
        else:
            planned = self._balance.upcoming(count)
        soonest = [*planned, *self._miss_fill.upcoming(count)][:count]
        return [self.resident_set.missing(unit) for unit in soonest]

    def _next_push(self, now_s: float) -> Push | Drop | None:
        self._waits_for_room = self._is_urgent = self.waits_for_reader = False
        self._balance.planned_push = None
        if now_s < self._paused_until_s:
            return None
        if (freed := self._freed.next(self.memory.room_bytes())) is not None:
            return self._push(freed, [])
        if (decision := self._push_planned(now_s)) is not None:
            return decision
        missed = self._miss_fill.next(self.memory.room_bytes())
        return None if missed is None else self._push(missed, [])

    def _push_planned(self, now_s: float) -> Push | Drop | None:
        """Push the unit that a reader needs soonest, or drop to make room for it."""
        if not self.views.has_streams:
            return None
        without_room: set[str] = set()  # these streams get nothing in this decision
        markers: list[int] = []  # of units that were skipped, as they had nothing to push
        last_sign_s = max(each.reader.last_sign_s for each in self.views.trackers.values())
        free_bytes = max(self.memory.room_bytes(), 0) // max(self.memory.active_count(), 1)
        for each in self.views.trackers.values():
            each.units.free_bytes = free_bytes
        is_balanced = self._balance.is_active
        may_wait = is_balanced  # pass over a stream whose contents are still being fetched
        for _ in range(UNITS_SKIPPED_MAX):
            soonest = soonest_stream(
                self.memory, self._room, self._balance, without_room, may_wait=may_wait
            )
            if soonest is None:
                break
            tracker, ahead_s = soonest
            unit = self._urgent.unit(tracker) or tracker.units.peek()
            self._is_urgent = unit.is_urgent
            entries, need_bytes = _to_push(unit, self.memory, self._columns)
            room_bytes = self.memory.room_bytes()
            still = is_still(tracker, last_sign_s, now_s)
            if need_bytes > room_bytes - still * self.memory.budget_bytes // STILL_DIVISOR:
                # A tentative or still stream is passed over, and not given room by drops.
                if tracker.reader.tentative or still:
                    without_room.add(tracker.name)
                    continue
                if markers:  # report these first; the next decision makes room
                    break
                if may_wait:  # room is made only for the stream that needs it soonest
                    may_wait = False
                    continue
                is_soon = tracker.comes_soon(unit)
                drop = self._room.make(
                    tracker, ahead_s, need_bytes - room_bytes, last_sign_s, now_s,
                    spares_needed=not is_soon,
                )  # fmt: skip
                if drop is None and not is_soon:
                    self.waits_for_reader = True
                    without_room.add(tracker.name)
                    continue
                self._waits_for_room = drop is None
                return drop
            if is_balanced and len(entries) and not unit.is_urgent:
                self._balance.note_planned(tracker, tracker.order.claimed_end())
            markers += self._claim(tracker, unit)
            if len(entries):
                return self._push(entries, markers)
        else:
            return self._push(NO_ENTRIES, markers)  # further units wait for the next decision
        self._waits_for_room = self.waits_for_reader
        return self._push(NO_ENTRIES, markers) if markers else None

    def _claim(self, tracker: StreamTracker, unit: NextUnit) -> list[int]:
        """Claim a unit. Returns the markers that the worker has to watch."""
        # Claims that were given up do not count again: their files may have been pushed before.
        kept = self.resident_set.resident[unit.entries]
        kept &= ~unit.state.was_claimed[unit.positions]
        tracker.units.claim(unit)
        self._counters["kept_entries"] += int(np.count_nonzero(kept))
        self.resident_set.claim(unit.entries)
        name = tracker.name
        return [entry for at, entry in unit.markers if self.watches.add(entry, name, at)]

    def _push(self, entries: Entries, markers: list[int]) -> Push:
        """Leaves out entries that READs have just brought."""
        since_start_s = self._clock.since_start_s(self._clock.now_s)
        entries, by_reads = self.resident_set.split_recent_reads(entries, since_start_s)
        self.resident_set.pushed_s[by_reads] = since_start_s
        chunk = -1
        if len(entries):
            chunks = self._columns.chunk[entries]
            if (chunks == chunks[0]).all():
                chunk = int(chunks[0])
        return Push(chunk, entries, np.array(markers, np.uint32), self._is_urgent)


def _to_push(unit: NextUnit, memory: Memory, columns: Columns) -> tuple[Entries, int]:
    """The entries of a unit to push, and their bytes; none if the unit will never fit."""
    contents_bytes = memory.contents_bytes()
    entries = memory.resident_set.missing(unit.entries)
    if not unit.once:
        _, first = np.unique(entries, return_index=True)
        entries = entries[np.sort(first)]
    # Larger entries are left to READs
    entries = entries[columns.cost(entries) <= contents_bytes]
    need_bytes = columns.bytes_of(entries)
    return (NO_ENTRIES, 0) if need_bytes > contents_bytes else (entries, need_bytes)
