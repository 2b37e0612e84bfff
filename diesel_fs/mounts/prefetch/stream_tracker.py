"""Tracks where the reader of one stream is, and which files are claimed for it.

A *stream* is a reader with a known order of files, in epochs (`orders/plan.py`). A *position*
counts files over its epochs, one after the other. Five positions describe a stream:

    floor    <=    low    <=    high    ...    frontier    ...    end
      |             |            |               |               |
      |             |            |               |               behind the last epoch
      |             |            |               the next to claim
      |             |            behind the farthest position that was read
      |             all before it have been read
      no claims before it

A reader may have several workers (processes of a DataLoader), which read at different positions
between `low` and `high`; the frontier may lie there, too. Positions are claimed unit by unit
(`units.py`): a *claim* begins when the unit is chosen for a push and ends when the floor passes it.
A claimed file is not dropped. The floor stays `slack` positions behind `low`, in case `low` is
wrong.

The reader says nothing, so where it is must be inferred from *signs*. Every 256th position is a
*marker*, whose file the worker watches with inotify: an open is a sign. Every READ of one of the
stream's files is a sign, too. Both may come from another program that reads the same files, so a
sign far from the reader is believed only together with others.

`planner.py` chooses between streams and gives each a share of the memory. Used by one thread.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ...orders.plan import NO_ENTRIES, Entries, Epoch, Stream
from .decisions import StreamReading, StreamStats
from .units import MIXED_ENTRIES, URGENT_BYTES_MIN, Columns, Positions, Units, cut

MARKER_STRIDE = 256
"""Positions between markers. One event in 256 opens slows no reader down (measured)."""

LAG_ENTRIES = 4_096
"""How many positions apart a stream's workers are assumed to read, unless the stream says: 16
workers with 4 batches of 64."""

URGENT_DIVISOR = 4
"""Urgent units take at most this part (a quarter) of a stream's memory ahead of the reader."""

SLACK_DIVISOR = 3
"""Claimed entries before `low` take at most this part (a third) of a stream's memory."""

LAG_ENTRIES_MAX = 65_536
"""A reader whose workers seem further apart than this does not follow the order."""

BATCHES_IN_FLIGHT = 32
"""Batches that the workers of a DataLoader read at once: 16 workers, 2 prefetched by each."""

SIGNS_MIN = 3
"""How many signs near each other make a jump of the reader believable. One sign may be another
program's open of the file. Three mean that the reader is there (it resumed, or events were lost),
if they are also most of the signs that were not believed so far: many workers leave stray signs all
over an epoch."""

CHANCE_MAX = 0.001
"""Signs that may be of files that the kernel reads ahead of others, by their places in chunks, make
a jump believable only where they would be so near each other by chance this rarely."""

SPREADS = 4
"""A marker this many times `spread` behind `high` is no longer waited for: it was read before its
watch was made, or it is never read. Waiting would keep claims."""

SPREAD_SIGNS = 16
"""Over about so many signs, `spread` follows a shrinking distance between the workers."""

UNCONFIRMED_MAX = 64
"""Signs that are remembered before they are believed."""

RESTART_S = 5.0
"""A reader that has not advanced for so long may have begun again, if signs far behind it say so: a
program that was stopped and started again."""

SILENT_S = 600.0
"""A reader without a sign for so long may have been killed, and no version switch waits for it."""

LAST_READS_S = 10.0
"""The same for a reader that has opened its last file; files around that one may follow."""

COSTS_FRESH_S = 0.25
"""A predicted cost of a unit is asked for again after so long: measured rates have changed, and
contents lie elsewhere."""

LATE_WEIGHT = 0.3
"""How much a push that took longer than predicted counts in the stream's lateness: three such
pushes make most of it."""
LATE_DECAY = 0.95
"""A push whose contents were there in time lessens the lateness by this factor: nobody knows how
early they were."""

RATE_PERIOD_S = 0.1
"""The rate is measured over at least this long, since events come in bursts."""


@dataclass(slots=True)
class EpochState:
    """One epoch of a stream. Positions are counted in the epoch, except `base` and `end`."""

    epoch: Epoch
    base: int  # the stream's position of the epoch's first file
    claimed: npt.NDArray[np.bool_] = field(init=False)  # by position
    opened: npt.NDArray[np.bool_] = field(init=False)
    """By number of the marker; True also where no open is expected. Every 256th position has a
    marker, and the last one."""
    markers_done: int = 0  # the markers before this number are opened, or no longer waited for
    units: Units | None = None  # of the positions not claimed when it was made; None: to be made
    share_bytes: int = 0  # the memory that the units were cut for
    next_unit: int = 0  # the first unit that is not claimed
    costs: npt.NDArray[np.float64] | None = None  # of each unit, see `costs_ahead`; NaN: unknown
    costs_s: float = -math.inf  # when the first of `costs` was predicted
    index: tuple[Entries, npt.NDArray[np.int64]] | None = None  # made by `sorted`
    total_bytes: int = -1  # of all files; -1 until computed

    def __post_init__(self) -> None:
        length = len(self.epoch)
        self.claimed = np.zeros(length, np.bool_)
        markers = -(-(length - 1) // MARKER_STRIDE) + 1 if length else 0
        self.opened = np.zeros(markers, np.bool_)

    @property
    def end(self) -> int:
        return self.base + len(self.epoch)

    def marker_position(self, number: int) -> int:
        """The position of the marker of a number."""
        return min(number * MARKER_STRIDE, len(self.epoch) - 1)

    def marker_number(self, position: int) -> int:
        """The number of the marker at a position that has one."""
        return position // MARKER_STRIDE if position % MARKER_STRIDE == 0 else len(self.opened) - 1

    def has_marker(self, position: int) -> bool:
        """Whether there is a marker at a position."""
        return position % MARKER_STRIDE == 0 or position == len(self.epoch) - 1

    def is_marker(self, positions: Positions) -> npt.NDArray[np.bool_]:
        """The same for many positions."""
        mask: npt.NDArray[np.bool_] = positions % MARKER_STRIDE == 0
        mask |= positions == len(self.epoch) - 1
        return mask

    def positions_of(self, entry: int) -> npt.NDArray[np.int64]:
        """The positions of an entry, ascending."""
        entries, positions = self.sorted()
        wanted = np.uint32(entry)  # of the type of `entries`: else numpy converts all of them
        start, end = entries.searchsorted(wanted), entries.searchsorted(wanted, "right")
        return positions[start:end]

    def sorted(self) -> tuple[Entries, npt.NDArray[np.int64]]:
        """The entries sorted, and their positions, ascending among equal entries. Made once."""
        if self.index is None:
            positions = np.argsort(self.epoch.entries, kind="stable")
            self.index = self.epoch.entries[positions], positions
        return self.index


@dataclass(slots=True)
class NextUnit:
    """The unit that a stream wants next, and the markers in it."""

    state: EpochState
    positions: Positions  # in the epoch
    entries: Entries  # at these positions
    once: bool  # no entry occurs twice
    markers: list[tuple[int, int]]  # position in the stream, entry
    is_urgent: bool = False  # it is no unit of the epoch, and has parts of later ones


def never_logged(_: Entries) -> bool:
    """Whether an order log has an order, where there are no logs."""
    return False


@dataclass(slots=True)
class StreamTracker:
    """The state of one stream (see the module). Positions are counted in the stream."""

    columns: Columns
    stream: Stream  # without the epochs that were read
    last_sign_s: float  # when the reader last gave a sign, or the stream was announced
    tentative: bool = False  # no sign of a reader has been believed yet (see `Stream`)
    epoch_states: list[EpochState] = field(default_factory=list)  # of `stream.epochs`
    frontier_index: int = 0  # the index in `epoch_states` of the epoch that has the frontier
    end: int = 0
    floor: int = 0
    low: int = 0
    high: int = 0
    lag: int = LAG_ENTRIES  # how many positions apart the stream's workers may read
    lag_is_known: bool = False  # the stream has told its lag
    slack: int = -1  # how many positions the floor stays behind `low`; -1: no share is given yet
    spread: int = 0  # how many positions behind `high` signs came lately
    capacity: int = 0  # how many entries the stream's share of the budget holds
    rate: float = 0.0  # positions per second; 0 until measured
    rate_at: tuple[float, int] = (0.0, 0)  # when the rate was measured last, and `high` then
    unconfirmed: dict[int, bool] = field(default_factory=dict)
    """Signs that are not believed yet, in order, and whether each is surely a reader's."""
    late_reads: deque[int] = field(default_factory=lambda: deque(maxlen=UNCONFIRMED_MAX))
    watched: list[tuple[int, int]] = field(default_factory=list)  # heap of markers: position, entry
    retreated_to: int | None = None  # claims from here on ended since `take_unwatched`
    sampled_s: float = 0.0  # when the planner last chose entries of this stream for a sample
    moved_s: float = -math.inf  # when `high` last rose
    is_logged: Callable[[Entries], bool] = never_logged
    skipped: list[Entries] | None = None
    """Entries that the reader has passed before they were chosen for a push, since they were last
    taken; some may be named twice. None: nobody takes them."""
    late_s_per_byte: float = 0.0  # how much longer than predicted its pushes take

    def __post_init__(self) -> None:
        self.tentative = self.stream.tentative
        self.rate_at = self.last_sign_s, 0
        self.sampled_s = self.last_sign_s
        batch = max((epoch.batch_entries_max for epoch in self.stream.epochs), default=0)
        lag = self.stream.lag_entries or batch * BATCHES_IN_FLIGHT or LAG_ENTRIES
        self.lag = min(max(lag, 2 * MARKER_STRIDE), LAG_ENTRIES_MAX)
        self.lag_is_known = lag != LAG_ENTRIES
        self.spread = self.stream.lag_entries  # signs show how much of it is true
        self._append(self.stream.epochs)

    def _append(self, epochs: tuple[Epoch, ...]) -> None:
        for epoch in epochs:
            self.epoch_states.append(EpochState(epoch, self.end))
            self.end = self.epoch_states[-1].end

    def current_epoch(self) -> EpochState | None:
        """The epoch that the reader is in; None where it has read all."""
        return next((state for state in self.epoch_states if self.high < state.end), None)

    def epoch_numbered(self, number: int) -> EpochState | None:
        """The epoch of a number."""
        return next((each for each in self.epoch_states if each.epoch.number == number), None)

    def _frontier_epoch(self) -> EpochState | None:
        """The epoch of the next position to claim; None where all are claimed."""
        more = self.frontier_index < len(self.epoch_states)
        return self.epoch_states[self.frontier_index] if more else None

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
                state.total_bytes = self.columns.bytes_of(state.epoch.entries)
            self.capacity = max(1, share_bytes * len(state.epoch) // max(state.total_bytes, 1))
            if self.slack < 0:
                # A quarter of a group that takes half of the share: the next group fits the rest.
                self.slack = min(self.lag, self.capacity // 8)
            self.slack = min(self.slack, self.capacity // SLACK_DIVISOR)

    def frontier(self, share_bytes: int) -> int | None:
        """The first position to claim next, None at the end. Units that the reader has passed are
        skipped."""
        while (state := self._frontier_epoch()) is not None:
            if state.units is None:
                start = max(self.floor - state.base, 0)
                rest = (np.flatnonzero(~state.claimed[start:]) + start).astype(np.int32)
                is_logged = self.is_logged(state.epoch.entries)
                state.units = cut(
                    state.epoch.entries, rest, self.columns, share_bytes, by_chunk=not is_logged
                )
                state.share_bytes, state.next_unit, state.costs = share_bytes, 0, None
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
        state = self._frontier_epoch()
        if state is None:
            return self.end
        if state.units is None:
            claimed = np.flatnonzero(state.claimed)
            return state.base + (int(claimed[-1]) + 1 if len(claimed) else 0)
        if state.next_unit < len(state.units):
            return state.base + int(state.units.first[state.next_unit])
        return state.end

    def fetched_up_to(self) -> tuple[int, int]:
        """Up to where files have been claimed or read: the number of the epoch, and the position in
        it. Urgent units beyond that do not count."""
        position = max(self.high, self.claimed_end())
        for state in self.epoch_states:
            if position < state.end:
                return state.epoch.number, max(position - state.base, 0)
        if not self.epoch_states:
            return 0, 0
        last = self.epoch_states[-1].epoch
        return last.number, len(last)

    def _mark_read(self, state: EpochState, positions: Positions) -> None:
        """Expect no opens of the markers at these positions: they get no watch that could tell."""
        if self.skipped is not None:
            self.skipped.append(state.epoch.entries[positions])
        for position in positions[state.is_marker(positions)].tolist():
            state.opened[state.marker_number(position)] = True

    def peek_unit(self) -> NextUnit:
        """The unit at the frontier, after `frontier` has returned a position."""
        state = self.epoch_states[self.frontier_index]
        assert state.units is not None
        positions = state.units.positions(state.next_unit)
        positions = positions[~state.claimed[positions]]  # others were urgent
        if len(positions) and state.base + int(positions[0]) < self.read_up_to:
            late = positions < self.read_up_to - state.base  # read before it could be pushed
            self._mark_read(state, positions[late])
            positions = positions[~late]
        return self._unit(state, positions, once=state.units.once)

    def urgent_unit(self, ahead_s: float) -> NextUnit | None:
        """The next files that are not claimed, at most 256, in the reader's order, where it comes
        to them within so many seconds; None where there are none, or where they are small.

        A reader without a measured rate, or with a low one, comes to 512 files in that time. Call
        this after `frontier` has returned a position.
        """
        state = self.epoch_states[self.frontier_index]
        ahead = max(int(self.rate * ahead_s), 2 * MIXED_ENTRIES)
        start = max(self.read_up_to - state.base, 0)
        end = max(self.high + min(ahead, self.capacity // URGENT_DIVISOR) - state.base, start)
        positions = np.flatnonzero(~state.claimed[start:end])[:MIXED_ENTRIES].astype(np.int32)
        positions += start
        entries = state.epoch.entries[positions]
        if self.columns.bytes_of(entries) < max(URGENT_BYTES_MIN * len(entries), 1):
            return None
        return self._unit(state, positions, is_urgent=True)

    @staticmethod
    def _unit(
        state: EpochState, positions: Positions, *, once: bool = False, is_urgent: bool = False
    ) -> NextUnit:
        entries = state.epoch.entries[positions]
        at_markers = np.flatnonzero(state.is_marker(positions))
        in_stream = (positions[at_markers].astype(np.int64) + state.base).tolist()
        markers = list(zip(in_stream, entries[at_markers].tolist(), strict=True))
        return NextUnit(state, positions, entries, once, markers, is_urgent)

    def units_ahead(self, count: int) -> list[Entries]:
        """The entries of the next `count` units at the frontier, as far as they are cut."""
        state = self._frontier_epoch()
        if state is None or state.units is None:
            return []
        following = range(state.next_unit, min(state.next_unit + count, len(state.units)))
        return [state.epoch.entries[state.units.positions(unit)] for unit in following]

    def has_share_left(self) -> bool:
        """Whether the unit at the frontier fits this stream's share of the memory. Call this after
        `frontier` has returned a position."""
        state = self.epoch_states[self.frontier_index]
        assert state.units is not None
        start, end = state.units.starts[state.next_unit : state.next_unit + 2].tolist()
        return bool(self.claimed_end() - self.floor + end - start <= self.capacity)

    def starts_ahead(self, count: int) -> npt.NDArray[np.int64]:
        """The first positions of the units that `units_ahead` gives. They tell the units of a
        stream apart as long as its order does not change."""
        state = self._frontier_epoch()
        if state is None or state.units is None:
            return np.empty(0, np.int64)
        first = state.units.first[state.next_unit : state.next_unit + count]
        return first.astype(np.int64) + state.base

    def costs_ahead(
        self,
        count: int,
        predict: Callable[[Sequence[Entries]], npt.NDArray[np.float64]],
        now_s: float,
    ) -> npt.NDArray[np.float64]:
        """What the units that `units_ahead` gives cost: an array with a row for each, of latency,
        transfer (both in seconds, see `UnitCosts`) and bytes to read.

        `predict` gives such rows. It is asked once for each unit, and again after `COSTS_FRESH_S`.
        What this stream's last pushes took beyond that is added.
        """
        state = self._frontier_epoch()
        if state is None or state.units is None:
            return np.empty((0, 3))
        if state.costs is None or now_s - state.costs_s >= COSTS_FRESH_S:
            state.costs, state.costs_s = np.full((len(state.units), 3), np.nan), now_s
        costs = state.costs[state.next_unit : state.next_unit + count]
        if len(unknown := np.flatnonzero(np.isnan(costs[:, 0]))):
            units = self.units_ahead(count)
            costs[unknown] = predict([units[at] for at in unknown.tolist()])
        if self.late_s_per_byte:
            costs = costs.copy()
            costs[:, 1] = np.maximum(costs[:, 1] + self.late_s_per_byte * costs[:, 2], 0.0)
        return costs

    def note_read_s(self, predicted_s: float, least_s: float, most_s: float, size: int) -> None:
        """A unit was pushed. Its `size` bytes were predicted to take `predicted_s`; they have taken
        between `least_s` and `most_s`, counted from when they were asked for."""
        believed_s = predicted_s + self.late_s_per_byte * size
        taken_s = min(max(believed_s, least_s), most_s)
        if taken_s == believed_s:
            self.late_s_per_byte *= LATE_DECAY
        else:
            late_s_per_byte = (taken_s - predicted_s) / size
            self.late_s_per_byte += LATE_WEIGHT * (late_s_per_byte - self.late_s_per_byte)

    def claim(self, unit: NextUnit) -> None:
        """Claim an urgent unit, or the unit at the frontier."""
        unit.state.claimed[unit.positions] = True
        unit.state.next_unit += not unit.is_urgent
        for marker in unit.markers:
            heapq.heappush(self.watched, marker)

    def claimed_entries(self, position: int, count: int) -> Entries:
        """The claimed ones of the entries at `count` positions from this one on."""
        claimed = [NO_ENTRIES]
        for state in self.epoch_states:
            start, end = max(position - state.base, 0), position + count - state.base
            if start < len(state.epoch) and end > 0:
                claimed.append(state.epoch.entries[start:end][state.claimed[start:end]])
        return np.concatenate(claimed)

    def next_use(self, entries: Entries) -> npt.NDArray[np.float64]:
        """How far ahead of the reader these entries come next, in the epochs at the frontier;
        infinite for others."""
        use = np.full(len(entries), np.inf)
        for state in self.epoch_states[self.frontier_index :][:2]:
            known, positions = state.sorted()
            if not len(known) or not len(entries):
                continue
            found_at = np.minimum(np.searchsorted(known, entries), len(known) - 1)
            distance = positions[found_at] + state.base - self.high
            later = (known[found_at] == entries) & (distance >= 0)
            use[later] = np.minimum(use[later], distance[later])
        return use

    # Signs of the reader

    def nearest_position(self, entry: int) -> tuple[int, int]:
        """The position of an entry that is nearest to the reader, and its distance.

        Looks in epochs up to the frontier; the position is -1 where they do not have the entry. A
        position behind the reader counts as farther than one ahead: most of those have been read.
        """
        nearest = -1, 1 << 62
        for state in self.epoch_states[: self.frontier_index + 1]:
            positions = state.positions_of(entry) + state.base
            first_ahead = int(np.searchsorted(positions, self.high))
            for position in positions[max(first_ahead - 1, 0) : first_ahead + 1].tolist():
                ahead = position - self.high
                distance = ahead if ahead >= 0 else MARKER_STRIDE - 2 * ahead
                if distance < nearest[1]:
                    nearest = position, distance
        return nearest

    def note_open(self, position: int, now_s: float) -> None:
        """A reader opened the file of the marker at a position."""
        marker = self._marker_at(position)
        if marker is None or not marker[0].opened[marker[1]]:
            self.note_read(position, now_s)

    def note_read(self, position: int, now_s: float, *, is_sure: bool = True) -> bool:
        """A READ came for a position, surely by a reader of the file, or perhaps by the kernel that
        reads ahead. Returns whether the stream's reader is believed to be there.

        A marker there then counts as opened: its watch was not made yet, or its event is late.
        """
        if not self.note_sign(position, now_s, is_sure=is_sure):
            return False
        if (marker := self._marker_at(position)) is not None:
            marker[0].opened[marker[1]] = True
            self._advance()
        return True

    def _marker_at(self, position: int) -> tuple[EpochState, int] | None:
        """The epoch and the number of the marker at a position; None where there is no marker."""
        for state in self.epoch_states:
            if state.base <= position < state.end and state.has_marker(position - state.base):
                return state, state.marker_number(position - state.base)
        return None

    def note_sign(self, position: int, now_s: float, *, is_sure: bool = True) -> bool:
        """The reader may have been at a position. Returns whether that is believed.

        A sign near the reader, or in what is claimed, is believed at once: a reader that is served
        does not get far beyond. Others are believed when there are enough near each other.
        """
        reach = self.reach()
        near = max(min(reach, self.claimed_end() - self.high), 2 * MARKER_STRIDE)
        if self.tentative or position + 1 - self.high > near:
            if len(self.unconfirmed) >= UNCONFIRMED_MAX:
                del self.unconfirmed[next(iter(self.unconfirmed))]
            self.unconfirmed[position] = is_sure
            nearby = [other for other in self.unconfirmed if abs(other - position) <= reach]
            epoch = self.current_epoch()  # a short one may have fewer markers than SIGNS_MIN
            needed = min(SIGNS_MIN, len(epoch.opened)) if epoch else SIGNS_MIN
            if len(nearby) < needed or 2 * len(nearby) < len(self.unconfirmed):
                return False
            if not any(map(self.unconfirmed.__getitem__, nearby)) and self._may_be_chance(nearby):
                return False
            position = max(nearby)
            self.unconfirmed.clear()
        self.last_sign_s, self.tentative = now_s, False
        behind = max(self.high - position, 0)
        self.spread = max(behind, self.spread - (self.spread - behind) // SPREAD_SIGNS)
        if position >= self.high:
            self.high, self.moved_s = position + 1, now_s
            self._measure_rate(now_s)
            for state in self.epoch_states:
                if state.end <= position:  # an epoch begins when the one before has been read
                    state.opened[:] = True
        self._advance()
        return True

    def _may_be_chance(self, nearby: Sequence[int]) -> bool:
        """Whether these signs may be near each other since all of them are anywhere."""
        epoch = self.current_epoch()
        chance = min(2 * self.reach() / len(epoch.epoch), 1.0) if epoch else 1.0
        part = len(nearby) / len(self.unconfirmed)
        return part < (1 + chance) / 2 or chance ** len(nearby) > CHANCE_MAX

    @property
    def read_up_to(self) -> int:
        """Most positions before this one have been read; the others are left to READs."""
        return max(self.floor, self.high - self.spread)

    def reach(self) -> int:
        """How many positions from `high` a sign is believed at once, and how many behind it a
        marker is waited for."""
        return max(min(self.lag, self.capacity), 2 * MARKER_STRIDE)

    def _measure_rate(self, now_s: float) -> None:
        since, start = self.rate_at
        if not start and not self.rate:
            self.rate_at = now_s, self.high  # the time before the first sign does not count
        elif now_s - since >= RATE_PERIOD_S:
            rate = (self.high - start) / (now_s - since)
            self.rate = 0.7 * self.rate + 0.3 * rate if self.rate else rate
            self.rate_at = now_s, self.high

    def _advance(self) -> None:
        """Move `low` up behind the markers that are opened or no longer waited for."""
        waited_for = self.reach()  # how many positions behind `high`
        if not self.lag_is_known:
            waited_for = min(waited_for, SPREADS * self.spread + 2 * MARKER_STRIDE)
        for state in self.epoch_states:
            while state.markers_done < len(state.opened):
                position = state.base + state.marker_position(state.markers_done)
                if not state.opened[state.markers_done] and self.high - position < waited_for:
                    break
                state.markers_done += 1
            if state.markers_done:
                low = state.base + state.marker_position(state.markers_done - 1) + 1
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
        nearby = [other for other in self.late_reads if abs(other - position) <= MARKER_STRIDE]
        if len(nearby) < SIGNS_MIN or 2 * len(nearby) < len(self.late_reads):
            return NO_ENTRIES
        if now_s - self.moved_s >= RESTART_S:
            released = self.retreat(0)
            self.late_reads.clear()
            self.progress(max(nearby) + 1, now_s)
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
        """The reader has said that it reads this position next, while its workers may be ahead."""
        self.unconfirmed.clear()
        self.last_sign_s, self.tentative = now_s, False
        if self.has_workers_ahead(position):
            for state in self.epoch_states:
                done = -(-(position - state.base) // MARKER_STRIDE)  # of its markers
                state.opened[: max(done, 0)] = True
            self._advance()
            self.low = max(self.low, position)
            return
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
            self._measure_rate(now_s)
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

    def has_workers_ahead(self, position: int) -> bool:
        """Whether a reader at a position may have workers that have read up to `high`."""
        return max(self.floor, self.high - self.stream.lag_entries) <= position <= self.high

    def has_gaps(self, position: int) -> bool:
        """Whether some entry between a position and `high` is not claimed."""
        spans = [
            (max(position - state.base, 0), self.high - state.base) for state in self.epoch_states
        ]
        return position < self.floor or any(
            end > start and not state.claimed[start:end].all()
            for state, (start, end) in zip(self.epoch_states, spans, strict=True)
        )

    # Ending claims

    def pass_floor(self) -> Entries:
        """Move the floor up towards `low`. Returns the entries whose claims end, once for each.
        Epochs that are passed are removed."""
        is_finished = self.low >= self.end
        target = self.low if is_finished else max(self.floor, self.low - max(self.slack, 0))
        released = [NO_ENTRIES]
        while self.epoch_states and target > self.floor:
            state = self.epoch_states[0]
            start, end = self.floor - state.base, min(target, state.end) - state.base
            entries = state.epoch.entries[start:end]
            released.append(entries[state.claimed[start:end]])
            if self.skipped is not None:
                self.skipped.append(entries[~state.claimed[start:end]])
            state.claimed[start:end] = False
            self.floor = state.base + end
            if self.floor < state.end:
                break
            self._remove_first_epoch()
        while self.epoch_states and self.epoch_states[0].end <= self.floor:  # empty epochs
            self._remove_first_epoch()
        return np.concatenate(released)

    def _remove_first_epoch(self) -> None:
        del self.epoch_states[0]
        self.stream = replace(self.stream, epochs=self.stream.epochs[1:])
        self.frontier_index = max(self.frontier_index - 1, 0)

    def retreat(self, position: int) -> Entries:
        """Give up all claims from a position on. Returns their entries, once for each claim."""
        released = [NO_ENTRIES]
        if self.retreated_to is None or position < self.retreated_to:
            self.retreated_to = position
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
        return np.concatenate(released)

    def take_unwatched(self) -> list[tuple[int, int]]:
        """The markers that need no watch any more, being read or no longer claimed; each once."""
        unneeded = []
        if (start := self.retreated_to) is not None:
            unneeded = [marker for marker in self.watched if marker[0] >= start]
            self.watched = [marker for marker in self.watched if marker[0] < start]
            heapq.heapify(self.watched)
            self.retreated_to = None
        while self.watched and self.watched[0][0] < self.low:
            unneeded.append(heapq.heappop(self.watched))
        return unneeded

    def is_running(self, now_s: float) -> bool:
        """Whether the reader is probably reading on. No reader says that it has ended."""
        silent_s_max = SILENT_S if self.high < self.end else LAST_READS_S
        is_silent = now_s - self.last_sign_s >= silent_s_max
        return not self.tentative and self.low < self.end and not is_silent

    def reading(self) -> StreamReading:
        """What the stream is about to read."""
        first, second = (*self.epoch_states[self.frontier_index :][:2], None, None)[:2]
        return StreamReading(
            self.stream.name,
            first.epoch if first else None,
            second.epoch if second else None,
            max(self.low - first.base, 0) if first else 0,
        )

    def pushed_early(self) -> Entries:
        """The claimed entries of the epoch at the frontier."""
        state = self._frontier_epoch()
        return NO_ENTRIES if state is None else state.epoch.entries[state.claimed]

    def stats(self) -> StreamStats:
        """Where the reader is."""
        state = self.current_epoch()
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
        self.stream = stream
        new_epochs = stream.epochs[len(self.epoch_states) :]
        if self.epoch_states:
            last = self.epoch_states[-1]
            epoch = stream.epoch(last.epoch.number)
            if epoch is not last.epoch:
                self._swap(last, epoch, len(last.epoch))
        self._append(new_epochs)

    def replaced(self, stream: Stream, number: int, position: int) -> Entries:
        """Take over a stream whose epoch of this number differs from `position` on. Returns the
        entries that are no longer claimed."""
        state = self.epoch_numbered(number)
        assert state is not None
        start = state.base + position
        released = self.retreat(start)
        self.stream = stream
        self._swap(state, stream.epoch(number), position)
        if self.high > start:
            self.high = max(start, self.floor)
        self.low = min(self.low, self.high)
        self.rate_at = self.last_sign_s, self.high
        if self.floor > start:  # the new order has unread entries before the floor
            self.floor = self.low = self.high = start
        self.unconfirmed.clear()
        return released

    def _swap(self, state: EpochState, epoch: Epoch, unchanged: int) -> None:
        """Put an epoch in the place of another; the first `unchanged` positions are equal."""
        new = EpochState(epoch, state.base)
        new.claimed[:unchanged] = state.claimed[:unchanged]
        markers = (unchanged - 1) // MARKER_STRIDE + 1 if unchanged else 0  # that are unchanged
        new.opened[:markers] = state.opened[: len(new.opened)][:markers]
        new.markers_done = min(state.markers_done, markers)
        index = self.epoch_states.index(state)
        self.epoch_states[index] = new
        self.frontier_index = min(self.frontier_index, index)
        self.end = state.base
        for each in self.epoch_states[index:]:
            each.base, self.end = self.end, self.end + len(each.epoch)
