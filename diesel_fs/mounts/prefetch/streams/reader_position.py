"""Infers the position of a stream's reader from opens and READs of the stream's files.

A reader may have several workers (processes of a DataLoader), which read at different positions.
All positions before `low` have been read, and `high` is behind the farthest one that was read.

Unless the reader's program reports positions (`move_to`, `note_loop`), each open of a marker file
(`markers.py`) and each READ of one of the stream's files is a *sign* of the reader. But another
program may have made it, so a sign far from the reader is believed only together with others.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from .markers import MARKER_STRIDE
from .stream_order import StreamOrder

LAG_ENTRIES = 4_096
"""How many positions apart a stream's workers are assumed to read, unless its announcement gives
that or the size of a batch: 16 workers with 4 batches of 64."""

LAG_ENTRIES_MAX = 65_536
"""If its workers seem further apart, a reader does not follow the order."""

BATCHES_IN_FLIGHT = 32
"""Batches that a DataLoader is assumed to read at once: 16 workers prefetch 2 each."""

SIGNS_MIN = 3
"""A single sign may come from another program. Three near each other mean that the reader is there
(it resumed, or events were lost), if they are also half of the signs that are not believed yet:
many workers leave stray signs all over an epoch."""

CHANCE_MAX = 0.001
"""The kernel also reads ahead of files, by their places in chunks. Signs that may come from that
make a jump believable only if they would be so near each other by chance with at most this
probability."""

SPREADS = 4
"""If a marker is more than about this many times `spread` behind `high`, its open is not waited
for: its file was read before the watch was made, or is never read. Waiting would keep claims."""

SPREAD_SIGNS = 16
"""`spread` follows a shrinking distance between the workers over about this many signs."""

UNCONFIRMED_MAX = 64

SILENT_S = 600.0
"""A reader without a sign for this time may have been killed; no version switch waits for it."""

LAST_READS_S = 10.0
"""The same for a reader that has opened the last file of its order; it may yet open others."""

STALE_S = 0.5
"""The greatest age of a report of the reader's program: it sends one each 0.1 s, and a worker that
waits for a store takes them each 0.2 s. Opens reach the planner at once."""

RATE_PERIOD_S = 0.1
"""The rate is measured over at least this time, because events come in bursts."""


@dataclass(slots=True)
class ReaderPosition:
    """Positions are counted in the stream."""

    order: StreamOrder
    last_sign_s: float  # or when the stream was announced
    tentative: bool = field(init=False)  # no sign has been believed yet (see `Stream`)
    low: int = 0
    high: int = 0
    lag: int = field(init=False)  # positions by which the workers may be apart
    spread: int = field(init=False)  # positions by which signs have lately been behind `high`
    rate: float = 0.0  # positions per second; 0 until measured
    is_reported: bool = False  # the reader's program reports positions
    moved_s: float = -math.inf  # when a sign last raised `high`
    late_reads: deque[int] = field(default_factory=lambda: deque(maxlen=UNCONFIRMED_MAX))
    """The positions of the last READs before all claims."""
    _lag_is_known: bool = field(init=False)  # from the stream's announcement
    _rate_at: tuple[float, int] = field(init=False)
    """When the rate was measured last, and `high` then."""
    _unconfirmed: dict[int, bool] = field(default_factory=dict)
    """Signs that are not believed yet, in order, and whether each is surely a reader's."""

    def __post_init__(self) -> None:
        stream = self.order.stream
        self.tentative = stream.tentative
        self._rate_at = self.last_sign_s, 0
        batch = max((epoch.batch_entries_max for epoch in stream.epochs), default=0)
        lag = stream.lag_entries or batch * BATCHES_IN_FLIGHT or LAG_ENTRIES
        self.lag = min(max(lag, 2 * MARKER_STRIDE), LAG_ENTRIES_MAX)
        self._lag_is_known = lag != LAG_ENTRIES
        self.spread = stream.lag_entries  # until signs show the true distance

    # Signs

    def note_open(self, position: int, now_s: float) -> None:
        """Note an open of the file at a position; a second open of a marker is no sign."""
        marker = self.order.marker_at(position)
        if marker is None or not marker[0].opened[marker[1]]:
            self.note_read(position, now_s)

    def note_read(self, position: int, now_s: float, *, is_sure: bool = True) -> bool:
        """Note a READ. `is_sure`: a reader surely wanted it; otherwise the kernel may have read
        ahead. Returns whether the reader is believed to be there. Then a marker there counts as
        opened: its watch was not made yet, or its event is late."""
        if not self._note_sign(position, now_s, is_sure=is_sure):
            return False
        if (marker := self.order.marker_at(position)) is not None:
            marker[0].opened[marker[1]] = True
            self._advance()
        return True

    def _note_sign(self, position: int, now_s: float, *, is_sure: bool) -> bool:
        """Returns whether a sign is believed: at once if it is behind `high`, or at most `reach`
        ahead of it and not beyond the claims, which a reader does not outrun by much. Others are
        believed if there are enough near each other."""
        near = max(min(self.reach(), self.order.claimed_end() - self.high), 2 * MARKER_STRIDE)
        if self.tentative or position + 1 - self.high > near:
            nearby = self._confirmed_by(position, is_sure=is_sure)
            if not nearby:
                return False
            position = max(nearby)
            self._unconfirmed.clear()
        self.last_sign_s, self.tentative = now_s, False
        behind = max(self.high - position, 0)
        self.spread = max(behind, self.spread - (self.spread - behind) // SPREAD_SIGNS)
        if position >= self.high:
            self.high, self.moved_s = position + 1, now_s
            self._measure_rate(now_s)
            for state in self.order.epochs:
                if state.end <= position:  # an epoch begins when the one before has been read
                    state.markers.opened[:] = True
        self._advance()
        return True

    def _confirmed_by(self, position: int, *, is_sure: bool) -> list[int]:
        """Remember a sign. Returns the positions of it and of the signs near it if together they
        are believable; otherwise none."""
        if len(self._unconfirmed) >= UNCONFIRMED_MAX:
            del self._unconfirmed[next(iter(self._unconfirmed))]
        self._unconfirmed[position] = is_sure
        reach = self.reach()
        nearby = [other for other in self._unconfirmed if abs(other - position) <= reach]
        epoch = self.order.epoch_at(self.high)  # a short one has fewer markers than SIGNS_MIN
        needed = min(SIGNS_MIN, len(epoch.markers.opened)) if epoch else SIGNS_MIN
        if len(nearby) < needed or 2 * len(nearby) < len(self._unconfirmed):
            return []
        if not any(map(self._unconfirmed.__getitem__, nearby)) and self._may_be_chance(nearby):
            return []
        return nearby

    def _may_be_chance(self, nearby: Sequence[int]) -> bool:
        """Whether signs from anywhere in the epoch could be this near each other."""
        epoch = self.order.epoch_at(self.high)
        chance = min(2 * self.reach() / len(epoch.epoch), 1.0) if epoch else 1.0
        part = len(nearby) / len(self._unconfirmed)
        return part < (1 + chance) / 2 or chance ** len(nearby) > CHANCE_MAX

    def late_reads_near(self, position: int) -> list[int]:
        """Note a READ for a position before all claims. Returns the positions of the late READs
        near it, with its own, if they show that the reader or a worker of it is there; otherwise
        none."""
        self.late_reads.append(position)
        nearby = [other for other in self.late_reads if abs(other - position) <= MARKER_STRIDE]
        is_enough = len(nearby) >= SIGNS_MIN and 2 * len(nearby) >= len(self.late_reads)
        return nearby if is_enough else []

    # Position

    def reach(self) -> int:
        """How far from `high` a sign ahead may be believed at once, and a marker behind is waited
        for."""
        return max(min(self.lag, self.order.capacity), 2 * MARKER_STRIDE)

    def is_far(self, position: int) -> bool:
        """Whether a position is too far behind to be that of one of this reader's workers."""
        return self.high - position > max(2 * self.reach(), LAG_ENTRIES)

    def is_running(self, now_s: float) -> bool:
        """Whether the reader is probably reading on. No reader reports that it has ended."""
        silent_s_max = SILENT_S if self.high < self.order.end else LAST_READS_S
        is_silent = now_s - self.last_sign_s >= silent_s_max
        return not self.tentative and self.low < self.order.end and not is_silent

    def has_workers_ahead(self, position: int, floor: int) -> bool:
        """Whether a reader that reports a position may have workers that have read up to `high`.
        There are no claims before `floor`. A report may be `STALE_S` old, so it may be that much
        farther behind `high`."""
        lag = self.order.stream.lag_entries
        if not lag:
            return max(floor, self.high) <= position <= self.high
        stale = max(int(self.rate * STALE_S), lag, 2 * MARKER_STRIDE)
        return self.high - lag - stale <= position <= self.high

    def note_loop(self, position: int, now_s: float) -> None:
        """Note that the program's loop has come to a position; its workers are ahead, up to
        `high`."""
        self._note_report(now_s)
        for state in self.order.epochs:
            state.markers.open_before(position - state.base)
        self._advance()
        self.low = max(self.low, position)

    def move_to(self, position: int, now_s: float) -> None:
        """Move to a position that the reader's program has reported, forwards or backwards."""
        self._note_report(now_s)
        for state in self.order.epochs:
            state.markers.move_to(position - state.base)
        is_forwards = position >= self.high
        self.low = self.high = position
        if is_forwards:
            self._measure_rate(now_s)
        else:
            self._rate_at = now_s, position

    def _note_report(self, now_s: float) -> None:
        self._unconfirmed.clear()
        self.last_sign_s, self.tentative, self.is_reported = now_s, False, True

    def note_replaced(self, start: int, floor: int) -> None:
        """Note that the order from `start` on is another one, and unread. There were no claims
        before `floor`."""
        if self.high > start:
            self.high = max(start, floor)
        self.low = min(self.low, self.high)
        self._rate_at = self.last_sign_s, self.high
        if floor > start:  # the new order has unread entries before the floor
            self.low = self.high = start
        self._unconfirmed.clear()

    def _measure_rate(self, now_s: float) -> None:
        since, start = self._rate_at
        if not start and not self.rate:
            self._rate_at = now_s, self.high  # the time before the first sign does not count
        elif now_s - since >= RATE_PERIOD_S:
            rate = (self.high - start) / (now_s - since)
            self.rate = 0.7 * self.rate + 0.3 * rate if self.rate else rate
            self._rate_at = now_s, self.high

    def _advance(self) -> None:
        """Move `low` up behind the markers that are opened or no longer waited for."""
        waited_for = self.reach()  # behind `high`
        if not self._lag_is_known:
            waited_for = min(waited_for, SPREADS * self.spread + 2 * MARKER_STRIDE)
        for state in self.order.epochs:
            low = state.markers.advance(self.high - state.base, waited_for)
            if low is not None:
                self.low = max(self.low, min(state.base + low, self.high))
            if state.markers.done < len(state.markers.opened):
                break
