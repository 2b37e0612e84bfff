"""Tracks one stream: the position of its reader, and the files that are claimed for it.

A *stream* is a reader with a known order of files, in epochs (`orders/plan.py`). Five positions
describe it, counted over its epochs, one after the other:

    floor    <=    low    <=    high    ...    frontier    ...    end
      |             |            |               |               |
      |             |            |               |               behind the last epoch
      |             |            |               the next to claim
      |             |            behind the farthest position that was read
      |             all before it have been read
      no claims before it

A *claimed* file is pushed or about to be pushed, and is not dropped. Workers of one reader read at
different positions between `low` and `high`. The frontier may lie between these two as well. Each
part of a `StreamTracker` has a module:

- `stream_order.py`: the epochs, and the frontier of the claims (`frontier`, `end`);
- `reader_position.py`: the reader, as opens and READs show it (`low`, `high`);
- `claims.py`: the claimed positions (`floor`), and `markers.py`: the positions whose files the
  worker watches for opens;
- `units_ahead.py`: the units (the files of one push each) to claim next;
- `lateness.py`: how much longer than predicted the stream's pushes take.

`StreamTracker` makes only the changes that concern several parts.
"""

from dataclasses import dataclass, field

from ....orders.plan import NO_ENTRIES, Entries, Stream
from ..decisions import StreamReading, StreamStats
from .claims import Claims
from .lateness import Lateness
from .markers import MARKER_STRIDE
from .reader_position import LAG_ENTRIES_MAX, ReaderPosition
from .stream_order import StreamOrder
from .units import Columns
from .units_ahead import NextUnit, UnitsAhead

RESTART_S = 5.0
"""If a reader has not advanced for this time, several READs before its claims mean that it was
started again there."""

HORIZON_S, HORIZON_ENTRIES_MIN = 0.1, 2 * MARKER_STRIDE
"""The *horizon*: files that the reader comes to within this time, or this number of positions, are
pushed even if other files that will be read again must be dropped for them. The time is enough for
a push, which takes some milliseconds; contents are fetched long before
(`PrefetchPlanner.upcoming`)."""

HORIZON_DIVISOR, HORIZON_DIVISOR_UNREPORTED = 32, 4
"""The horizon takes at most this part of the stream's memory: memory that holds files ahead does
not hold files that the next epoch reads again. A reader whose program does not report its position
is known by its markers only, so its horizon is twice as far, and may take more."""


@dataclass(slots=True)
class StreamTracker:
    """Positions are counted in the stream."""

    order: StreamOrder
    reader: ReaderPosition
    claims: Claims
    units: UnitsAhead
    lateness: Lateness = field(default_factory=Lateness)
    sampled_s: float = 0.0  # when samples of this stream were last chosen

    @classmethod
    def of(cls, columns: Columns, stream: Stream, now_s: float) -> "StreamTracker":
        order = StreamOrder(columns, stream)
        reader, claims = ReaderPosition(order, now_s), Claims(order)
        return cls(order, reader, claims, UnitsAhead(order, reader, claims), sampled_s=now_s)

    @property
    def name(self) -> str:
        return self.order.stream.name

    def give_share(self, share_bytes: int) -> None:
        self.order.give_share(share_bytes)
        if self.order.epochs:
            self.claims.fit_slack(self.reader.lag)

    # The reader

    def has_workers_ahead(self, position: int) -> bool:
        return self.reader.has_workers_ahead(position, self.claims.floor)

    def progress(self, position: int, now_s: float) -> None:
        """Note the position that the reader has reported as its next; its workers may be ahead."""
        if self.has_workers_ahead(position):
            self.reader.note_loop(position, now_s)
            return
        self.reader.move_to(position, now_s)
        if position < self.claims.floor:
            self.claims.lower_floor(position)

    def note_late_read(self, position: int, now_s: float) -> Entries:
        """Note a READ for a position below the floor. Returns the entries of the claims that end,
        once for each claim.

        A single such READ is taken for another program's. Several near each other mean that the
        reader's workers are further apart than assumed; or, if it has not advanced for `RESTART_S`,
        that it has begun again there. Positions that its program reports are believed instead."""
        reader = self.reader
        if reader.is_reported:
            return NO_ENTRIES
        nearby = reader.late_reads_near(position)
        if not nearby:
            return NO_ENTRIES
        if now_s - reader.moved_s >= RESTART_S:
            released = self.claims.retreat(0)
            reader.late_reads.clear()
            self.progress(max(nearby) + 1, now_s)
            reader.moved_s = now_s
            return released
        if not reader.is_far(position):
            self.claims.widen_slack(reader.low - position + MARKER_STRIDE)
            behind_high = min(reader.high - position + MARKER_STRIDE, LAG_ENTRIES_MAX)
            reader.lag = max(reader.lag, behind_high)
        return NO_ENTRIES

    def pass_floor(self) -> Entries:
        return self.claims.pass_floor(self.reader.low)

    def take_unwatched(self) -> list[tuple[int, int]]:
        return self.claims.watched.take_unneeded(self.reader.low)

    # Changes of the plan

    def replace(self, stream: Stream, number: int, position: int) -> Entries:
        """Take over another order of the epoch `number` from `position` on. Returns the entries of
        ended claims."""
        state = self.order.numbered(number)
        assert state is not None
        start = state.base + position
        released = self.claims.retreat(start)
        self.order.replace(state, stream, position)
        self.reader.note_replaced(start, self.claims.floor)
        self.claims.floor = min(self.claims.floor, start)
        return released

    # Questions

    def comes_soon(self, unit: NextUnit) -> bool:
        """Whether a unit is within the horizon (the fixed horizon of TIP: Patterson et al., SOSP
        1995, section 4). A whole chunk counts from the position of its last file: the readers of a
        chunk-wise order need all chunks of a group at nearly the same time, so they are pushed
        during the group before."""
        if unit.is_urgent or not len(unit.positions):
            return True
        first, last = int(unit.positions[0]), int(unit.positions[-1])
        ahead = first + unit.state.base - self.reader.high
        horizon = max(int(self.reader.rate * HORIZON_S), HORIZON_ENTRIES_MIN)
        if self.reader.is_reported:
            horizon = min(horizon, self.order.capacity // HORIZON_DIVISOR)
        else:
            horizon = min(2 * horizon, self.order.capacity // HORIZON_DIVISOR_UNREPORTED)
        return ahead <= horizon + last - first

    def reading(self) -> StreamReading:
        order = self.order
        first, second = (*order.epochs[order.frontier_index :][:2], None, None)[:2]
        return StreamReading(
            self.name,
            first.epoch if first else None,
            second.epoch if second else None,
            max(self.reader.low - first.base, 0) if first else 0,
        )

    def stats(self) -> StreamStats:
        reader = self.reader
        state = self.order.epoch_at(reader.high)
        base = state.base if state else self.order.end
        return StreamStats(
            name=self.name,
            epoch=state.epoch.number if state else -1,
            length=len(state.epoch) if state else 0,
            position=reader.high - base,
            low=max(reader.low - base, 0),
            high=reader.high - base,
            frontier=max(self.order.claimed_end() - base, 0),
            entries_per_s=reader.rate,
            tentative=reader.tentative,
        )
