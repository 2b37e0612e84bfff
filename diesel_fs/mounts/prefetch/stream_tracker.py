"""Tracks where the reader of one stream is, and what has been claimed for it.

A *stream* is a reader with a known order of files, in epochs (`orders/plan.py`). Positions are
counted over its epochs, one after the other. Five of them describe a stream:

    floor  <=  low  <=  high  ...  frontier  ...  end
    given up   read by  behind the    not yet     behind the
    below      all      last sign     claimed     last epoch

A position is *claimed* from the moment its unit is chosen for a push until the floor has passed it;
the page of a claimed entry is not dropped. A reader may have several workers, which read out of
order: `low` is where the last of them is, and the floor stays `slack` behind that.

The reader itself says nothing, so its place is inferred. Every 256th position is a *marker*: an
inotify watch tells when its file is opened. The other *signs* are READs that reach the mount. Both
may come from another program that reads the same files, so a sign far from the reader counts only
together with others.

`planner.py` chooses between streams and shares out the memory. Used by one thread.
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
"""Positions between markers. One event in 256 opens slows no reader down (measured)."""

LAG_ENTRIES = 4_096
"""How far apart a stream's workers are assumed to read, unless the stream says: 16 workers with 4
batches of 64."""

SLACK_DIVISOR = 3
"""Entries behind the reader take at most this part (a third) of a stream's memory."""

LAG_ENTRIES_MAX = 65_536
"""A reader whose workers seem further apart than this does not follow the order."""

BATCHES_IN_FLIGHT = 32
"""Batches that the workers of a DataLoader read at once: 16 workers, 2 prefetched by each."""

SIGNS = 3
"""How many signs near each other make a jump of the reader believable. One sign may be another
program's open of the file. Three mean that the reader is there (it resumed, or events were lost),
if they are also most of the signs that were not believed so far: many workers leave stray signs all
over an epoch."""

SPREADS = 4
"""A marker this many times `spread` behind the high is no longer waited for: it was read before its
watch was made, or it is never read. Waiting would hold memory."""

SPREAD_SIGNS = 16
"""Over about so many signs, `spread` follows a shrinking distance between the workers."""

PENDING_MAX = 64
"""Signs that are remembered before they are believed."""

STILL_BACK_S = 5.0
"""A reader that has not advanced for so long may have begun again, if signs far behind it say so: a
program that was stopped and started again."""

SILENT_S = 600.0
"""A reader without a sign for so long may have been killed, and is not waited for."""

LAST_READS_S = 10.0
"""The same for a reader that has opened its last file; files around that one may follow."""

RATE_PERIOD_S = 0.1
"""The rate is measured over at least this long, since events come in bursts."""


def marker_count(length: int) -> int:
    """How many markers an epoch has: every 256th position from 0 on, and the last."""
    return 0 if not length else (length - 1 + MARKER_STRIDE - 1) // MARKER_STRIDE + 1


@dataclass(slots=True)
class EpochState:
    """One epoch of a stream; positions are counted in the epoch."""

    epoch: Epoch
    base: int  # the position of its first entry in the stream
    claimed: npt.NDArray[np.bool_]
    opened: npt.NDArray[np.bool_]  # per marker
    markers_done: int = 0  # the markers before this number are opened, or no longer waited for
    units: Units | None = None
    share_bytes: int = 0  # the memory that the units were cut for
    next_unit: int = 0
    index: tuple[Entries, npt.NDArray[np.int64]] | None = None
    total_bytes: int = -1  # -1 until asked for

    @property
    def end(self) -> int:
        return self.base + len(self.epoch)

    def marker(self, number: int) -> int:
        """The position of a marker."""
        return min(number * MARKER_STRIDE, len(self.epoch) - 1)

    def number(self, position: int) -> int:
        """The number of the marker at a position that has one."""
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
        wanted = np.uint32(entry)  # of the type of `entries`: else numpy converts all of them
        start, end = entries.searchsorted(wanted), entries.searchsorted(wanted, "right")
        return at[start:end]

    def sorted(self) -> tuple[Entries, npt.NDArray[np.int64]]:
        """The entries sorted, and their positions, ascending among equal entries. Made once."""
        if self.index is None:
            at = np.argsort(self.epoch.entries, kind="stable")
            self.index = self.epoch.entries[at], at
        return self.index


def new_epoch_state(epoch: Epoch, base: int) -> EpochState:
    """The state of an epoch of which nothing has been claimed or read."""
    length = len(epoch)
    return EpochState(
        epoch, base, np.zeros(length, np.bool_), np.zeros(marker_count(length), np.bool_)
    )


@dataclass(slots=True)
class NextUnit:
    """The unit that a stream wants next, and the markers in it. An entry may occur twice."""

    state: EpochState
    positions: Positions  # in the epoch
    entries: Entries
    once: bool  # no entry occurs twice
    markers: list[tuple[int, int]]  # position in the stream, entry


@dataclass(slots=True)
class StreamTracker:
    """The state of one stream (see the module). Positions are counted in the stream."""

    columns: Columns
    stream: Stream
    last_sign_s: float
    tentative: bool = False
    epoch_states: list[EpochState] = field(default_factory=list)
    frontier_index: int = 0  # the epoch (by place in `epoch_states`) that has the frontier
    end: int = 0
    floor: int = 0
    low: int = 0
    high: int = 0
    lag: int = LAG_ENTRIES  # how far apart the stream's workers may read
    lag_is_known: bool = False  # the stream has told its lag
    slack: int = 0  # how far the floor stays behind the low
    spread: int = 0  # how far behind the high signs came lately
    capacity: int = 0  # how many entries the stream's share of the budget holds
    rate: float = 0.0  # positions per second; 0 until measured
    rate_at: tuple[float, int] = (0.0, 0)  # when the rate was measured last, and the high then
    unconfirmed: dict[int, None] = field(default_factory=dict)  # signs not believed yet
    late_reads: deque[int] = field(default_factory=lambda: deque(maxlen=PENDING_MAX))
    watched: list[tuple[int, int]] = field(default_factory=list)  # heap of markers: position, entry
    retreated_to: int | None = None  # claims from here on ended since `take_unwatched`
    sampled_s: float = 0.0
    moved_s: float = -math.inf  # when the high last rose
    finished: int = 0  # epochs that were passed and that the planner has not taken note of

    def __post_init__(self) -> None:
        self.tentative = self.stream.tentative
        self.rate_at = self.last_sign_s, 0
        self.sampled_s = self.last_sign_s
        batch = max((epoch.batch_entries_max for epoch in self.stream.epochs), default=0)
        lag = self.stream.lag_entries or batch * BATCHES_IN_FLIGHT or LAG_ENTRIES
        self.lag = min(max(lag, 2 * MARKER_STRIDE), LAG_ENTRIES_MAX)
        self.lag_is_known = lag != LAG_ENTRIES
        self.slack = -1  # `give_share` sets it
        self._append(self.stream.epochs)

    def _append(self, epochs: tuple[Epoch, ...]) -> None:
        for epoch in epochs:
            self.epoch_states.append(new_epoch_state(epoch, self.end))
            self.end = self.epoch_states[-1].end

    # What comes next

    def give_share(self, share_bytes: int) -> None:
        """Set this stream's share of the memory. Units are cut anew where it changes much."""
        for state in self.epoch_states[self.frontier_index :]:
            if state.units is None:
                continue
            if not 2 * state.share_bytes <= 3 * share_bytes <= 4.5 * state.share_bytes:
                state.units = None
        if self.epoch_states:
            state = self.epoch_states[min(self.frontier_index, len(self.epoch_states) - 1)]
            if state.total_bytes < 0:
                state.total_bytes = int(self.columns.cost[state.epoch.entries].sum())
            self.capacity = max(1, share_bytes * len(state.epoch) // max(state.total_bytes, 1))
            if self.slack < 0:
                # A quarter of a group that takes half of the share: the next group fits the rest.
                self.slack = min(self.lag, self.capacity // 8)
            self.slack = min(self.slack, self.capacity // SLACK_DIVISOR)

    def frontier(self, share_bytes: int) -> int | None:
        """The first position to claim next, None at the end. Units that the reader has passed are
        skipped."""
        while self.frontier_index < len(self.epoch_states):
            state = self.epoch_states[self.frontier_index]
            if state.units is None:
                start = max(self.floor - state.base, 0)
                rest = (np.flatnonzero(~state.claimed[start:]) + start).astype(np.int32)
                state.units = cut(state.epoch.entries, rest, self.columns, share_bytes)
                state.share_bytes, state.next_unit = share_bytes, 0
            units = state.units
            while state.next_unit < len(units):
                first = state.base + int(units.first[state.next_unit])
                if first >= self.read_up_to:
                    return first
                positions = units.positions(state.next_unit)
                if state.base + int(positions[-1]) >= self.read_up_to:
                    return first
                self._mark_read(state, positions)
                state.next_unit += 1
            self.frontier_index += 1
        return None

    def claimed_end(self) -> int:
        """The frontier when it was last computed."""
        if self.frontier_index >= len(self.epoch_states):
            return self.end
        state = self.epoch_states[self.frontier_index]
        units = state.units
        if units is None:
            claimed = np.flatnonzero(state.claimed)
            return state.base + (int(claimed[-1]) + 1 if len(claimed) else 0)
        return (
            state.base + int(units.first[state.next_unit])
            if state.next_unit < len(units)
            else state.end
        )

    def _mark_read(self, state: EpochState, positions: Positions) -> None:
        for position in positions[state.is_marker(positions)].tolist():
            state.opened[state.number(position)] = True  # it gets no watch that could tell

    def peek_unit(self) -> NextUnit:
        """The unit at the frontier, after `frontier` has returned a position."""
        state = self.epoch_states[self.frontier_index]
        assert state.units is not None
        positions = state.units.positions(state.next_unit)
        if state.base + int(positions[0]) < self.read_up_to:
            late = positions < self.read_up_to - state.base  # read before it could be pushed
            self._mark_read(state, positions[late])
            positions = positions[~late]
        entries = state.epoch.entries[positions]
        marks = np.flatnonzero(state.is_marker(positions))
        places = (positions[marks].astype(np.int64) + state.base).tolist()
        markers = list(zip(places, entries[marks].tolist(), strict=True))
        return NextUnit(state, positions, entries, state.units.once, markers)

    def units_ahead(self, count: int) -> list[Entries]:
        """The entries of the next `count` units at the frontier, as far as they are cut."""
        state = (
            self.epoch_states[self.frontier_index]
            if self.frontier_index < len(self.epoch_states)
            else None
        )
        if state is None or state.units is None:
            return []
        following = range(state.next_unit, min(state.next_unit + count, len(state.units)))
        return [state.epoch.entries[state.units.positions(unit)] for unit in following]

    def claim(self, unit: NextUnit) -> None:
        """Claim the unit at the frontier."""
        unit.state.claimed[unit.positions] = True
        unit.state.next_unit += 1
        for marker in unit.markers:
            heapq.heappush(self.watched, marker)

    def neighbours(self, position: int, count: int) -> Entries:
        """The claimed entries at the next `count` positions."""
        found = []
        for state in self.epoch_states:
            start, end = max(position - state.base, 0), position + count - state.base
            if start < len(state.epoch) and end > 0:
                found.append(state.epoch.entries[start:end][state.claimed[start:end]])
        return np.concatenate(found) if found else NO_ENTRIES

    def next_use(self, entries: Entries) -> npt.NDArray[np.float64]:
        """How far ahead of the reader these entries come next, in the epochs at the frontier;
        infinite for others."""
        use = np.full(len(entries), np.inf)
        for state in self.epoch_states[self.frontier_index :][:2]:
            known, at = state.sorted()
            if not len(known) or not len(entries):
                continue
            place = np.minimum(np.searchsorted(known, entries), len(known) - 1)
            distance = at[place] + state.base - self.high
            later = (known[place] == entries) & (distance >= 0)
            use[later] = np.minimum(use[later], distance[later])
        return use

    # Signs of the reader

    def nearest_position(self, entry: int) -> tuple[int, int]:
        """The position of an entry that is nearest to the reader, and its distance.

        Looks in epochs up to the frontier; the position is -1 where they do not have the entry. A
        place behind the reader counts as farther than one ahead: most of those have been read.
        """
        best = -1, 1 << 62
        for state in self.epoch_states[: self.frontier_index + 1]:
            places = state.places(entry) + state.base
            at = int(np.searchsorted(places, self.high))
            for place in places[max(at - 1, 0) : at + 1].tolist():
                ahead = place - self.high
                distance = ahead if ahead >= 0 else MARKER_STRIDE - 2 * ahead
                if distance < best[1]:
                    best = place, distance
        return best

    def note_open(self, position: int, now_s: float) -> None:
        """A reader opened the file of the marker at a position."""
        if not self._is_opened(position) and self.note_sign(position, now_s):
            self._mark(position)

    def note_read(self, position: int, now_s: float) -> bool:
        """A READ came for a position. Returns whether the reader is believed to be there."""
        believed = self.note_sign(position, now_s)
        if believed:
            self._mark(position)  # its watch was not made yet, or its event is late
        return believed

    def _part_at(self, position: int) -> EpochState | None:
        return next(
            (state for state in self.epoch_states if state.base <= position < state.end), None
        )

    def _is_opened(self, position: int) -> bool:
        state = self._part_at(position)
        if state is None or not state.has_marker(position - state.base):
            return False
        return bool(state.opened[state.number(position - state.base)])

    def _mark(self, position: int) -> None:
        """Note that the reader was at a position; a marker there counts as opened."""
        state = self._part_at(position)
        if state is not None and state.has_marker(position - state.base):
            state.opened[state.number(position - state.base)] = True
            self._advance()

    def note_sign(self, position: int, now_s: float) -> bool:
        """The reader may have been at a position. Returns whether that is believed.

        A sign near the reader, or in what is claimed, is believed at once: a reader that is served
        does not get far beyond. Others are believed when there are enough near each other.
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
            for state in self.epoch_states:
                if state.end <= position:  # an epoch begins when the one before has been read
                    state.opened[:] = True
        self._advance()
        return True

    def _signs_needed(self) -> int:
        """How many signs make a jump believable; an epoch may have fewer markers than `SIGNS`."""
        state = next((state for state in self.epoch_states if self.high < state.end), None)
        return SIGNS if state is None else min(SIGNS, len(state.opened))

    @property
    def read_up_to(self) -> int:
        """Most positions before this one have been read; those not claimed are left to READs."""
        return max(self.floor, self.high - self.spread)

    def reach(self) -> int:
        """How far from the reader a sign is believed at once, and how long a marker is waited
        for."""
        return max(min(self.lag, self.capacity), 2 * MARKER_STRIDE)

    def _measure(self, now_s: float) -> None:
        since, start = self.rate_at
        if not start and not self.rate:
            self.rate_at = now_s, self.high  # the time before the first sign does not count
        elif now_s - since >= RATE_PERIOD_S:
            rate = (self.high - start) / (now_s - since)
            self.rate = 0.7 * self.rate + 0.3 * rate if self.rate else rate
            self.rate_at = now_s, self.high

    def _advance(self) -> None:
        """Move the low up behind the markers that are opened or no longer waited for."""
        patience = self.reach()
        if not self.lag_is_known:
            patience = min(patience, SPREADS * self.spread + 2 * MARKER_STRIDE)
        for state in self.epoch_states:
            while state.markers_done < len(state.opened):
                position = state.base + state.marker(state.markers_done)
                if not state.opened[state.markers_done] and self.high - position < patience:
                    break
                state.markers_done += 1
            if state.markers_done:
                low = state.base + state.marker(state.markers_done - 1) + 1
                self.low = max(self.low, min(low, self.high))
            if state.markers_done < len(state.opened):
                break

    def is_far(self, position: int) -> bool:
        """Whether a position is too far behind to be that of one of this reader's workers."""
        return self.high - position > max(2 * self.reach(), LAG_ENTRIES)

    def note_late_read(self, position: int, now_s: float) -> Entries:
        """A READ came for a position below the floor. Returns entries that are no longer claimed.

        A single one is another program's. Several near each other mean that the workers of this
        reader are further apart than assumed; or, if it has not advanced for a while, that it has
        begun again there. An entry is returned once for each claim.
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
            # Most of its memory stays for what lies ahead: a few late READs cost less.
            most = min(LAG_ENTRIES_MAX, self.capacity // SLACK_DIVISOR)
            self.slack = min(max(2 * self.slack, behind), max(most, self.slack))
            self.lag = max(self.lag, min(self.high - position + MARKER_STRIDE, LAG_ENTRIES_MAX))
        return NO_ENTRIES

    def progress(self, position: int, now_s: float) -> None:
        """The reader has announced that its next position is this one."""
        self.unconfirmed.clear()
        self.last_sign_s, self.tentative = now_s, False
        for state in self.epoch_states:
            before = position - state.base
            numbers = np.arange(len(state.opened)) * MARKER_STRIDE
            if len(numbers):
                numbers[-1] = len(state.epoch) - 1
            state.opened[:] = numbers < before
            state.markers_done = int(np.count_nonzero(state.opened))
        forwards = position >= self.high
        self.low = self.high = position
        if forwards:
            self._measure(now_s)
            return
        self.rate_at = now_s, position
        if position >= self.floor:
            return
        # It went back below the floor: units are cut again from there; claims ahead stay.
        self.floor = max(position, self.epoch_states[0].base if self.epoch_states else position)
        for number, state in enumerate(self.epoch_states):
            if state.end > self.floor:
                state.units = None
                self.frontier_index = min(self.frontier_index, number)

    def has_gaps(self, position: int) -> bool:
        """Whether some entry between a position and the high is not claimed."""
        spans = [
            (max(position - state.base, 0), self.high - state.base) for state in self.epoch_states
        ]
        return position < self.floor or any(
            end > start and not state.claimed[start:end].all()
            for state, (start, end) in zip(self.epoch_states, spans, strict=True)
        )

    # Letting go

    def pass_floor(self) -> Entries:
        """Move the floor up behind the low. Returns the entries whose claims end, once for each."""
        over = self.low >= self.end
        target = self.low if over else max(self.floor, self.low - max(self.slack, 0))
        released = []
        while self.epoch_states and target > self.floor:
            state = self.epoch_states[0]
            start, end = self.floor - state.base, min(target, state.end) - state.base
            entries = state.epoch.entries[start:end]
            released.append(entries[state.claimed[start:end]])
            state.claimed[start:end] = False
            self.floor = state.base + end
            if self.floor < state.end:
                break
            self._forget_first()
        while self.epoch_states and self.epoch_states[0].end <= self.floor:  # empty epochs
            self._forget_first()
        return np.concatenate(released) if released else NO_ENTRIES

    def _forget_first(self) -> None:
        del self.epoch_states[0]
        self.frontier_index = max(self.frontier_index - 1, 0)
        self.finished += 1

    def retreat(self, position: int) -> Entries:
        """Give up all claims from a position on. Returns their entries, once for each claim."""
        released = []
        self.retreated_to = (
            position if self.retreated_to is None else min(self.retreated_to, position)
        )
        for number, state in enumerate(self.epoch_states):
            if state.end <= position:
                continue
            start = max(position - state.base, 0)
            if not state.claimed[start:].any():
                continue
            released.append(state.epoch.entries[start:][state.claimed[start:]])
            state.claimed[start:] = False
            state.units = None
            self.frontier_index = min(self.frontier_index, number)
        return np.concatenate(released) if released else NO_ENTRIES

    def take_unwatched(self) -> list[tuple[int, int]]:
        """The markers that need no watch any more, being read or no longer claimed; each once."""
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
        """Whether the reader is probably reading on. No reader says that it has ended."""
        silent_s = now_s - self.last_sign_s
        patience_s = SILENT_S if self.high < self.end else LAST_READS_S
        return not self.tentative and self.low < self.end and silent_s < patience_s

    def stats(self) -> StreamStats:
        """Where the reader is."""
        state = next((each for each in self.epoch_states if self.high < each.end), None)
        base = state.base if state else self.end
        return StreamStats(
            name=self.stream.name,
            epoch=state.epoch.number if state else -1,
            length=len(state.epoch) if state else 0,
            position=self.high - base,
            low=max(self.low - base, 0),
            high=self.high - base,
            frontier=max(self.claimed_end() - base, 0),
            entries_per_s=self.rate,
            tentative=self.tentative,
        )

    # Changes of the plan

    def extended(self, stream: Stream) -> None:
        """Take over a stream that has more epochs, or a longer last epoch."""
        known = {state.epoch.number: state for state in self.epoch_states}
        last = self.epoch_states[-1] if self.epoch_states else None
        self.stream = stream
        fresh = tuple(epoch for epoch in stream.epochs if epoch.number not in known)
        if last is not None:
            epoch = stream.epoch(last.epoch.number)
            if epoch is not last.epoch:
                self._swap(last, epoch, len(last.epoch))
        self._append(fresh)

    def replaced(self, stream: Stream, number: int, position: int) -> Entries:
        """Take over a stream with another epoch of a number, which differs from `position` on.
        Returns the entries that are no longer claimed."""
        state = next(state for state in self.epoch_states if state.epoch.number == number)
        start = state.base + position
        released = self.retreat(start)
        self.stream = stream
        self._swap(state, stream.epoch(number), position)
        if self.high > start:
            self.high = max(start, self.floor)
        self.low = min(self.low, self.high)
        self.rate_at = self.last_sign_s, self.high
        if self.floor > start:  # the new order wants entries below the floor: begin again here
            self.floor = self.low = self.high = start
        self.unconfirmed.clear()
        return released

    def _swap(self, state: EpochState, epoch: Epoch, kept: int) -> None:
        """Put an epoch in the place of another; their first `kept` positions are equal."""
        fresh = new_epoch_state(epoch, state.base)
        fresh.claimed[:kept] = state.claimed[:kept]
        same = (kept - 1) // MARKER_STRIDE + 1 if kept else 0  # markers among the kept positions
        fresh.opened[:same] = state.opened[: len(fresh.opened)][:same]
        fresh.markers_done = min(state.markers_done, same)
        at = self.epoch_states.index(state)
        self.epoch_states[at] = fresh
        self.frontier_index = min(self.frontier_index, at)
        self.end = state.base
        for each in self.epoch_states[at:]:
            each.base, self.end = self.end, self.end + len(each.epoch)
