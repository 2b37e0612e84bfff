"""Following one stream: where its reader is, what has been claimed for it, what comes next.

Owned here: `StreamTracker` (water marks, markers, claims and the frontier of one stream). Not
owned: the budget, what is resident, and the choice between streams (`planner.py`); the stream's
orders (`orders/plan.py`); watches (`watches.py`).

Positions are counted over the concatenation of the stream's epochs. Used by one thread. In order:

    floor  <=  low  <=  high  ...  frontier
    dropped   read by  the last   the first position
    below     all      opened     not yet claimed

A position is **claimed** from the moment its unit is decided until the floor passes it; what is
claimed is not dropped. The floor stays `slack` behind the low, since workers read out of order.
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...orders.plan import NO_ENTRIES, Entries, Epoch, Stream
from .decisions import StreamStats
from .units import Columns, Positions, Units, cut

MARKER_STRIDE = 256
"""Entries between markers: 256 opens are one event, and no reader is slower for it (measured)."""

LAG_ENTRIES = 4_096
"""How far apart a stream's workers may read until known better: 16 workers, 4 batches of 64."""

SLACK_DIVISOR = 3
"""What lies behind the readers takes no more than one part in this many of a stream's memory."""

LAG_ENTRIES_MAX = 65_536
"""A stream that seems to read further apart than this is not following its order."""

BATCHES_IN_FLIGHT = 32
"""Of a DataLoader whose batches are known: 16 workers, 2 batches prefetched by each."""

SIGNS = 3
"""Marks within one lag that make a jump beyond it believable. One may be another reader's open of
the same file; three mean that the reader is there (it resumed, or events were lost), where they are
also most of the marks that were not believed: many workers leave stray ones all over an epoch."""

SPREADS = 4
"""A marker so many times the spread of the readers behind the high is given up: it was read by
request while nobody watched, or is never read. What waits for it holds memory."""

SPREAD_SIGNS = 16
"""Over so many signs about, the spread of a stream's readers follows them when it shrinks."""

PENDING_MAX = 64

STILL_BACK_S = 5.0
"""A reader that has gone no further for so long may have begun again, where marks far behind it say
so: a program that was stopped and started once more."""

SILENT_S = 600.0
"""A reader of whom there is no sign for so long is not waited for: it may have been killed."""

LAST_READS_S = 10.0
"""The same once the last of its files has been opened; those around may not have been."""

RATE_PERIOD_S = 0.1
"""The rate is measured over at least this long: single events come in bursts."""


def marker_count(length: int) -> int:
    """The markers of an epoch: each 256th position from 0 on, and the last."""
    return 0 if not length else (length - 1 + MARKER_STRIDE - 1) // MARKER_STRIDE + 1


@dataclass(slots=True)
class EpochState:
    """One epoch of a followed stream; positions here are the epoch's own."""

    epoch: Epoch
    base: int  # the stream's position of its first entry
    claimed: npt.NDArray[np.bool_]
    opened: npt.NDArray[np.bool_]  # per marker
    markers_done: int = 0  # so many markers from the first on are opened or given up
    units: Units | None = None
    share_bytes: int = 0  # that the units were cut for
    next_unit: int = 0
    index: tuple[Entries, npt.NDArray[np.int64]] | None = None
    total_bytes: int = -1  # -1 until asked for

    @property
    def end(self) -> int:
        return self.base + len(self.epoch)

    def marker(self, number: int) -> int:
        return min(number * MARKER_STRIDE, len(self.epoch) - 1)

    def number(self, position: int) -> int:
        """The marker at a position that has one."""
        return position // MARKER_STRIDE if position % MARKER_STRIDE == 0 else len(self.opened) - 1

    def has_marker(self, position: int) -> bool:
        """Whether there is a marker at a position."""
        return position % MARKER_STRIDE == 0 or position == len(self.epoch) - 1

    def is_marker(self, positions: Positions) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = positions % MARKER_STRIDE == 0
        found |= positions == len(self.epoch) - 1
        return found

    def places(self, entry: int) -> npt.NDArray[np.int64]:
        """The positions of an entry, ascending."""
        entries, at = self.sorted()
        wanted = np.uint32(entry)  # of the row's own type: else numpy converts all of it
        start, end = entries.searchsorted(wanted), entries.searchsorted(wanted, "right")
        return at[start:end]

    def sorted(self) -> tuple[Entries, npt.NDArray[np.int64]]:
        """The entries sorted, and their positions (ascending among equals); made when needed."""
        if self.index is None:
            at = np.argsort(self.epoch.entries, kind="stable")
            self.index = self.epoch.entries[at], at
        return self.index


def new_epoch_state(epoch: Epoch, base: int) -> EpochState:
    """An epoch of which nothing has been claimed or read."""
    length = len(epoch)
    return EpochState(
        epoch, base, np.zeros(length, np.bool_), np.zeros(marker_count(length), np.bool_)
    )


@dataclass(slots=True)
class NextUnit:
    """What a stream wants next: entries with repeats, and the markers among them."""

    part: EpochState
    positions: Positions  # the part's own
    entries: Entries
    once: bool  # no entry stands there twice
    markers: list[tuple[int, int]]  # position in the stream, entry


@dataclass(slots=True)
class StreamTracker:
    """One stream as it is followed (see the module). Positions are the stream's."""

    columns: Columns
    stream: Stream
    last_sign_s: float
    tentative: bool = False
    epoch_states: list[EpochState] = field(default_factory=list)
    frontier_part: int = 0  # the part of the frontier
    end: int = 0
    floor: int = 0
    low: int = 0
    high: int = 0
    lag: int = LAG_ENTRIES
    lag_is_known: bool = False  # as the stream says, not as was guessed
    slack: int = 0
    spread: int = 0  # how far behind the high signs have come lately
    capacity: int = 0  # entries that the stream's share of the budget holds
    rate: float = 0.0  # positions a second; 0 until measured
    rate_at: tuple[float, int] = (0.0, 0)
    unconfirmed: dict[int, None] = field(default_factory=dict)
    late_reads: deque[int] = field(default_factory=lambda: deque(maxlen=PENDING_MAX))
    watched: list[tuple[int, int]] = field(default_factory=list)  # a heap of position, entry
    retreated_to: int | None = None  # where claims were given up since the watches were looked at
    sampled_s: float = 0.0
    moved_s: float = -math.inf  # when the high last rose
    finished: int = 0  # epochs that were passed since somebody asked

    def __post_init__(self) -> None:
        self.tentative = self.stream.tentative
        self.rate_at = self.last_sign_s, 0
        self.sampled_s = self.last_sign_s
        batch = max((epoch.batch_entries_max for epoch in self.stream.epochs), default=0)
        lag = self.stream.lag_entries or batch * BATCHES_IN_FLIGHT or LAG_ENTRIES
        self.lag = min(max(lag, 2 * MARKER_STRIDE), LAG_ENTRIES_MAX)
        self.lag_is_known = lag != LAG_ENTRIES
        self.slack = -1  # set with the first share
        self._append(self.stream.epochs)

    def _append(self, epochs: tuple[Epoch, ...]) -> None:
        for epoch in epochs:
            self.epoch_states.append(new_epoch_state(epoch, self.end))
            self.end = self.epoch_states[-1].end

    # What comes next

    def give_share(self, share_bytes: int) -> None:
        """How much memory is this stream's. Units are cut anew where that changes much."""
        for part in self.epoch_states[self.frontier_part :]:
            if part.units is None:
                continue
            if not 2 * part.share_bytes <= 3 * share_bytes <= 4.5 * part.share_bytes:
                part.units = None
        if self.epoch_states:
            part = self.epoch_states[min(self.frontier_part, len(self.epoch_states) - 1)]
            if part.total_bytes < 0:
                part.total_bytes = int(self.columns.cost[part.epoch.entries].sum())
            self.capacity = max(1, share_bytes * len(part.epoch) // max(part.total_bytes, 1))
            if self.slack < 0:
                # A quarter of a group of half the share: the next group is fetched in the rest.
                self.slack = min(self.lag, self.capacity // 8)
            self.slack = min(self.slack, self.capacity // SLACK_DIVISOR)

    def frontier(self, share_bytes: int) -> int | None:
        """The first position not yet claimed, None at the end; what the reader is past is left."""
        while self.frontier_part < len(self.epoch_states):
            part = self.epoch_states[self.frontier_part]
            if part.units is None:
                start = max(self.floor - part.base, 0)
                rest = (np.flatnonzero(~part.claimed[start:]) + start).astype(np.int32)
                part.units = cut(part.epoch.entries, rest, self.columns, share_bytes)
                part.share_bytes, part.next_unit = share_bytes, 0
            units = part.units
            while part.next_unit < len(units):
                first = part.base + int(units.first[part.next_unit])
                if first >= self.read_up_to:
                    return first
                positions = units.positions(part.next_unit)
                if part.base + int(positions[-1]) >= self.read_up_to:
                    return first
                self._mark_read(part, positions)
                part.next_unit += 1
            self.frontier_part += 1
        return None

    def claimed_end(self) -> int:
        """Where the frontier was when it was last looked for."""
        if self.frontier_part >= len(self.epoch_states):
            return self.end
        part = self.epoch_states[self.frontier_part]
        units = part.units
        if units is None:
            claimed = np.flatnonzero(part.claimed)
            return part.base + (int(claimed[-1]) + 1 if len(claimed) else 0)
        return (
            part.base + int(units.first[part.next_unit])
            if part.next_unit < len(units)
            else part.end
        )

    def _mark_read(self, part: EpochState, positions: Positions) -> None:
        for position in positions[part.is_marker(positions)].tolist():
            part.opened[part.number(position)] = True  # no watch will ever tell

    def peek_unit(self) -> NextUnit:
        """The unit at the frontier, which there must be."""
        part = self.epoch_states[self.frontier_part]
        assert part.units is not None
        positions = part.units.positions(part.next_unit)
        if part.base + int(positions[0]) < self.read_up_to:
            late = positions < self.read_up_to - part.base  # read, or it will have been by then
            self._mark_read(part, positions[late])
            positions = positions[~late]
        entries = part.epoch.entries[positions]
        marks = np.flatnonzero(part.is_marker(positions))
        places = (positions[marks].astype(np.int64) + part.base).tolist()
        markers = list(zip(places, entries[marks].tolist(), strict=True))
        return NextUnit(part, positions, entries, part.units.once, markers)

    def units_ahead(self, count: int) -> list[Entries]:
        """The entries of the units at the frontier, as far as they are cut."""
        part = (
            self.epoch_states[self.frontier_part]
            if self.frontier_part < len(self.epoch_states)
            else None
        )
        if part is None or part.units is None:
            return []
        following = range(part.next_unit, min(part.next_unit + count, len(part.units)))
        return [part.epoch.entries[part.units.positions(unit)] for unit in following]

    def claim(self, ahead: NextUnit) -> None:
        """Claim the unit at the frontier."""
        ahead.part.claimed[ahead.positions] = True
        ahead.part.next_unit += 1
        for marker in ahead.markers:
            heapq.heappush(self.watched, marker)

    def neighbours(self, position: int, count: int) -> Entries:
        """The claimed entries at the next `count` positions."""
        found = []
        for part in self.epoch_states:
            start, end = max(position - part.base, 0), position + count - part.base
            if start < len(part.epoch) and end > 0:
                found.append(part.epoch.entries[start:end][part.claimed[start:end]])
        return np.concatenate(found) if found else NO_ENTRIES

    def next_use(self, entries: Entries) -> npt.NDArray[np.float64]:
        """How far from the reader these will be read, in what is next; infinite for others."""
        use = np.full(len(entries), np.inf)
        for part in self.epoch_states[self.frontier_part :][:2]:
            known, at = part.sorted()
            if not len(known) or not len(entries):
                continue
            place = np.minimum(np.searchsorted(known, entries), len(known) - 1)
            distance = at[place] + part.base - self.high
            later = (known[place] == entries) & (distance >= 0)
            use[later] = np.minimum(use[later], distance[later])
        return use

    # Signs of the reader

    def nearest_position(self, entry: int) -> tuple[int, int]:
        """Where the reader probably is when it reads an entry, in what is or will soon be claimed,
        and how far off that is; position -1 where there is no such. A place behind it counts as
        farther than one ahead: most of what lies there has been read.
        """
        best = -1, 1 << 62
        for part in self.epoch_states[: self.frontier_part + 1]:
            places = part.places(entry) + part.base
            at = int(np.searchsorted(places, self.high))
            for place in places[max(at - 1, 0) : at + 1].tolist():
                ahead = place - self.high
                distance = ahead if ahead >= 0 else MARKER_STRIDE - 2 * ahead
                if distance < best[1]:
                    best = place, distance
        return best

    def note_open(self, position: int, now_s: float) -> None:
        """The marker at a position was opened."""
        if not self._is_opened(position) and self.note_sign(position, now_s):
            self._mark(position)

    def note_read(self, position: int, now_s: float) -> bool:
        """A READ came for a position. Whether the reader is believed to be there."""
        believed = self.note_sign(position, now_s)
        if believed:
            self._mark(position)  # before its watch stood, or late
        return believed

    def _part_at(self, position: int) -> EpochState | None:
        return next((part for part in self.epoch_states if part.base <= position < part.end), None)

    def _is_opened(self, position: int) -> bool:
        part = self._part_at(position)
        if part is None or not part.has_marker(position - part.base):
            return False
        return bool(part.opened[part.number(position - part.base)])

    def _mark(self, position: int) -> None:
        """The reader was at a position, where there may be a marker."""
        part = self._part_at(position)
        if part is not None and part.has_marker(position - part.base):
            part.opened[part.number(position - part.base)] = True
            self._advance()

    def note_sign(self, position: int, now_s: float) -> bool:
        """The reader may have been at a position. Whether that is believed: it may be another's.

        At once only inside what is claimed: a reader that is served does not get far beyond.
        """
        reach = self.reach()
        near = max(min(reach, self.claimed_end() - self.high), 2 * MARKER_STRIDE)
        if self.tentative or position + 1 - self.high > near:
            if len(self.unconfirmed) >= PENDING_MAX:
                del self.unconfirmed[next(iter(self.unconfirmed))]
            self.unconfirmed[position] = None
            same = [other for other in self.unconfirmed if abs(other - position) <= reach]
            if len(same) < self._signs_needed() or 2 * len(same) < len(self.unconfirmed):
                return False
            position = max(same)
            self.unconfirmed.clear()
        self.last_sign_s, self.tentative = now_s, False
        behind = max(self.high - position, 0)
        self.spread = max(behind, self.spread - (self.spread - behind) // SPREAD_SIGNS)
        if position >= self.high:
            self.high, self.moved_s = position + 1, now_s
            self._measure(now_s)
            for part in self.epoch_states:
                if part.end <= position:  # an epoch begins when the one before has been read
                    part.opened[:] = True
        self._advance()
        return True

    def _signs_needed(self) -> int:
        """An epoch of fewer markers than SIGNS may never show so many."""
        part = next((part for part in self.epoch_states if self.high < part.end), None)
        return SIGNS if part is None else min(SIGNS, len(part.opened))

    @property
    def read_up_to(self) -> int:
        """Before this most has been read: what is not yet claimed there is left to READs."""
        return max(self.floor, self.high - self.spread)

    def reach(self) -> int:
        """How far from the reader a sign is believed at once, and a marker is waited for."""
        return max(min(self.lag, self.capacity), 2 * MARKER_STRIDE)

    def _measure(self, now_s: float) -> None:
        since, start = self.rate_at
        if not start and not self.rate:
            self.rate_at = now_s, self.high  # it may have waited long before it began
        elif now_s - since >= RATE_PERIOD_S:
            rate = (self.high - start) / (now_s - since)
            self.rate = 0.7 * self.rate + 0.3 * rate if self.rate else rate
            self.rate_at = now_s, self.high

    def _advance(self) -> None:
        patience = self.reach()
        if not self.lag_is_known:
            patience = min(patience, SPREADS * self.spread + 2 * MARKER_STRIDE)
        for part in self.epoch_states:
            while part.markers_done < len(part.opened):
                position = part.base + part.marker(part.markers_done)
                if not part.opened[part.markers_done] and self.high - position < patience:
                    break
                part.markers_done += 1
            if part.markers_done:
                low = part.base + part.marker(part.markers_done - 1) + 1
                self.low = max(self.low, min(low, self.high))
            if part.markers_done < len(part.opened):
                break

    def is_far(self, position: int) -> bool:
        """Whether a place is too far behind to be one of this reader's workers."""
        return self.high - position > max(2 * self.reach(), LAG_ENTRIES)

    def note_late_read(self, position: int, now_s: float) -> Entries:
        """A READ came from below the floor. Single ones are another reader's. Where several say so,
        this one's workers lie further apart than was thought; or, where it has stood still, it has
        begun again there. What is no longer claimed, with repeats.
        """
        self.late_reads.append(position)
        same = [other for other in self.late_reads if abs(other - position) <= MARKER_STRIDE]
        if len(same) < SIGNS or 2 * len(same) < len(self.late_reads):
            return NO_ENTRIES
        if now_s - self.moved_s >= STILL_BACK_S:
            released = self.retreat(0)
            self.late_reads.clear()
            self.progress(max(same) + 1, now_s)
            self.moved_s = now_s
            return released
        if not self.is_far(position):
            behind = self.low - position + MARKER_STRIDE
            # Most of what its memory holds stays for what lies ahead: a few late READs cost less.
            most = min(LAG_ENTRIES_MAX, self.capacity // SLACK_DIVISOR)
            self.slack = min(max(2 * self.slack, behind), max(most, self.slack))
            self.lag = max(self.lag, min(self.high - position + MARKER_STRIDE, LAG_ENTRIES_MAX))
        return NO_ENTRIES

    def progress(self, position: int, now_s: float) -> None:
        """The reader says that its next position is this one."""
        self.unconfirmed.clear()
        self.last_sign_s, self.tentative = now_s, False
        for part in self.epoch_states:
            before = position - part.base
            numbers = np.arange(len(part.opened)) * MARKER_STRIDE
            if len(numbers):
                numbers[-1] = len(part.epoch) - 1
            part.opened[:] = numbers < before
            part.markers_done = int(np.count_nonzero(part.opened))
        forwards = position >= self.high
        self.low = self.high = position
        if forwards:
            self._measure(now_s)
            return
        self.rate_at = now_s, position
        if position >= self.floor:
            return
        # Back to what was let go. Cut again from there; what is claimed further ahead stays.
        self.floor = max(position, self.epoch_states[0].base if self.epoch_states else position)
        for number, part in enumerate(self.epoch_states):
            if part.end > self.floor:
                part.units = None
                self.frontier_part = min(self.frontier_part, number)

    def has_gaps(self, position: int) -> bool:
        """Whether something from a position to the high is claimed no more, or never was."""
        spans = [
            (max(position - part.base, 0), self.high - part.base) for part in self.epoch_states
        ]
        return position < self.floor or any(
            end > start and not part.claimed[start:end].all()
            for part, (start, end) in zip(self.epoch_states, spans, strict=True)
        )

    # Letting go

    def pass_floor(self) -> Entries:
        """Move the floor up behind the low; the entries whose claims end, with repeats."""
        over = self.low >= self.end
        target = self.low if over else max(self.floor, self.low - max(self.slack, 0))
        released = []
        while self.epoch_states and target > self.floor:
            part = self.epoch_states[0]
            start, end = self.floor - part.base, min(target, part.end) - part.base
            entries = part.epoch.entries[start:end]
            released.append(entries[part.claimed[start:end]])
            part.claimed[start:end] = False
            self.floor = part.base + end
            if self.floor < part.end:
                break
            self._forget_first()
        while self.epoch_states and self.epoch_states[0].end <= self.floor:  # empty epochs
            self._forget_first()
        return np.concatenate(released) if released else NO_ENTRIES

    def _forget_first(self) -> None:
        del self.epoch_states[0]
        self.frontier_part = max(self.frontier_part - 1, 0)
        self.finished += 1

    def retreat(self, position: int) -> Entries:
        """Give up all claims from a position on; their entries, with repeats."""
        released = []
        self.retreated_to = (
            position if self.retreated_to is None else min(self.retreated_to, position)
        )
        for number, part in enumerate(self.epoch_states):
            if part.end <= position:
                continue
            start = max(position - part.base, 0)
            if not part.claimed[start:].any():
                continue
            released.append(part.epoch.entries[start:][part.claimed[start:]])
            part.claimed[start:] = False
            part.units = None
            self.frontier_part = min(self.frontier_part, number)
        return np.concatenate(released) if released else NO_ENTRIES

    def take_unwatched(self) -> list[tuple[int, int]]:
        """The markers that need a watch no longer: read, or claimed no more."""
        gone = []
        if (start := self.retreated_to) is not None:
            gone = [marker for marker in self.watched if marker[0] >= start]
            self.watched = [marker for marker in self.watched if marker[0] < start]
            heapq.heapify(self.watched)
            self.retreated_to = None
        while self.watched and self.watched[0][0] < self.low:
            gone.append(heapq.heappop(self.watched))
        return gone

    def is_running(self, now_s: float) -> bool:
        """Whether the reader is on its way, as far as one can tell: nobody tells of its end."""
        silent_s = now_s - self.last_sign_s
        patience_s = SILENT_S if self.high < self.end else LAST_READS_S
        return not self.tentative and self.low < self.end and silent_s < patience_s

    def stats(self) -> StreamStats:
        """Where the reader is."""
        part = next((each for each in self.epoch_states if self.high < each.end), None)
        base = part.base if part else self.end
        return StreamStats(
            name=self.stream.name,
            epoch=part.epoch.number if part else -1,
            length=len(part.epoch) if part else 0,
            position=self.high - base,
            low=max(self.low - base, 0),
            high=self.high - base,
            frontier=max(self.claimed_end() - base, 0),
            entries_per_s=self.rate,
            tentative=self.tentative,
        )

    # Changes of the plan

    def extended(self, stream: Stream) -> None:
        """The stream has more epochs, or its last epoch is longer."""
        known = {part.epoch.number: part for part in self.epoch_states}
        last = self.epoch_states[-1] if self.epoch_states else None
        self.stream = stream
        fresh = tuple(epoch for epoch in stream.epochs if epoch.number not in known)
        if last is not None:
            epoch = stream.epoch(last.epoch.number)
            if epoch is not last.epoch:
                self._swap(last, epoch, len(last.epoch))
        self._append(fresh)

    def replaced(self, stream: Stream, number: int, position: int) -> Entries:
        """An epoch is another from a position on; what is no longer claimed."""
        part = next(part for part in self.epoch_states if part.epoch.number == number)
        start = part.base + position
        released = self.retreat(start)
        self.stream = stream
        self._swap(part, stream.epoch(number), position)
        if self.high > start:
            self.high = max(start, self.floor)
        self.low = min(self.low, self.high)
        self.rate_at = self.last_sign_s, self.high
        if self.floor > start:  # it has let go of what the new order wants: from here again
            self.floor = self.low = self.high = start
        self.unconfirmed.clear()
        return released

    def _swap(self, part: EpochState, epoch: Epoch, kept: int) -> None:
        """Another epoch in a part's place whose first `kept` positions are the same."""
        fresh = new_epoch_state(epoch, part.base)
        fresh.claimed[:kept] = part.claimed[:kept]
        same = (kept - 1) // MARKER_STRIDE + 1 if kept else 0  # regular markers among those kept
        fresh.opened[:same] = part.opened[: len(fresh.opened)][:same]
        fresh.markers_done = min(part.markers_done, same)
        at = self.epoch_states.index(part)
        self.epoch_states[at] = fresh
        self.frontier_part = min(self.frontier_part, at)
        self.end = part.base
        for each in self.epoch_states[at:]:
            each.base, self.end = self.end, self.end + len(each.epoch)
