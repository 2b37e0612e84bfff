"""Holds the announced streams, and carries out changes of the plan.

Programs announce, extend, replace and withdraw streams (readers with known orders), and may report
their progress. `stream_tracker.py` explains claims and positions.
"""

from collections.abc import Callable, Sequence

from ....errors import UsageError
from ....orders.plan import STREAMS_MAX, Entries, Epoch, Stream, check_plan
from ..eviction import Mask
from ..memory import Memory
from ..memory_split import Importances
from ..resident_set import Clock, Ended
from .stream_tracker import StreamTracker
from .stream_views import TENTATIVE_S
from .units import Columns
from .units_ahead import never_logged
from .watches import Watches


class Streams:
    def __init__(
        self,
        columns: Columns,
        is_file: Mask,
        memory: Memory,
        importances: Importances,
        watches: Watches,
        clock: Clock,
    ) -> None:
        """Only this class changes `memory.trackers`, the registry of streams."""
        self.trackers = memory.trackers  # by name
        self._columns = columns
        self._is_file = is_file
        self._memory = memory
        self._importances = importances
        self._watches = watches
        self._clock = clock
        self._finished: dict[str, None] = {}  # read to their end; an ordered set
        self._is_logged: Callable[[Entries], bool] = never_logged
        self._keeps_skipped = False  # for `take_skipped`

    # Changes of the plan

    def announce(self, stream: Stream, now_s: float) -> None:
        """Announce a stream. It replaces a stream of the same name, or goes on with it if the only
        announced epoch is the last one of that stream: then its claims and reads ahead stay. If
        there are as many streams as allowed, the one that was read to its end first is removed, so
        programs that use a new name for each epoch need not withdraw any. Raises UsageError, as the
        next three methods do, and then no stream has changed."""
        self._clock.tick(now_s)
        known = self.trackers.get(stream.name)
        if known is not None and known.order.foresaw(stream):
            known.order.confirm(stream.epochs[0])
            self.progress(stream.name, 0, now_s, stream.epochs[0].number)
            return
        is_full = stream.name not in self.trackers and len(self.trackers) >= STREAMS_MAX
        oldest = next(iter(self._finished)) if is_full and self._finished else None
        self._check(stream, stream.epochs, instead_of=oldest)
        if oldest is not None:
            self.withdraw(oldest)
        self._remove(stream.name)
        self.trackers[stream.name] = tracker = StreamTracker.of(self._columns, stream, now_s)
        tracker.units.is_logged = self._is_logged
        tracker.claims.skipped = [] if self._keeps_skipped else None
        self._memory.orders_changed()

    def extend(self, name: str, epochs: Sequence[Epoch]) -> None:
        """Add epochs to a stream, or entries to its last one (see `Stream.extended`)."""
        tracker = self._tracker(name)
        tracker.order.extend(self._check(tracker.order.stream.extended(epochs), epochs))
        self._memory.orders_changed()

    def replace(self, name: str, epoch: Epoch, position: int = 0) -> None:
        tracker = self._tracker(name)
        stream = self._check(tracker.order.stream.replaced(epoch, position), [epoch])
        self.release(tracker, tracker.replace(stream, epoch.number, position), "changed")
        self._memory.orders_changed()

    def withdraw(self, name: str) -> None:
        self._tracker(name)
        self._remove(name)
        self._finished.pop(name, None)

    def progress(self, name: str, position: int, now_s: float, epoch: int | None = None) -> None:
        """Take over a reported position: the next one that the reader reads, in `epoch` (None: the
        current one). It overrides what opens and READs have shown. Raises UsageError."""
        self._clock.tick(now_s)
        tracker = self._tracker(name)
        order = tracker.order
        state = order.epoch_at(tracker.reader.high) if epoch is None else order.numbered(epoch)
        if state is None or not 0 <= position <= len(state.epoch):
            raise UsageError(f"stream {name} has no position {position} there")
        position += state.base
        has_workers_ahead = tracker.has_workers_ahead(position)
        if not has_workers_ahead and tracker.claims.has_gaps(position, tracker.reader.high):
            # Some claims there were given up: claim all again
            self.release(tracker, tracker.claims.retreat(0), "changed")
        tracker.progress(position, now_s)

    # Order logs

    def set_logged(self, is_logged: Callable[[Entries], bool]) -> None:
        """Report that order logs (`cache/order_logs/`) are in use: an order that `is_logged` finds
        in a log is not cut by chunks."""
        self._is_logged, self._keeps_skipped = is_logged, True
        for tracker in self.trackers.values():
            tracker.units.is_logged, tracker.claims.skipped = is_logged, []

    def take_skipped(self) -> list[Entries]:
        """Take the entries that readers have passed unclaimed since the last call; some may occur
        twice. READs, perhaps of other files, have brought their contents. Empty before
        `set_logged`."""
        skipped: list[Entries] = []
        for tracker in self.trackers.values():
            skipped += tracker.claims.take_skipped()
        return skipped

    # Ending claims

    def release_passed(self, now_s: float) -> None:
        """End passed claims, and withdraw tentative streams that no reader has followed for
        `TENTATIVE_S`."""
        for name, tracker in tuple(self.trackers.items()):
            if tracker.reader.tentative and now_s - tracker.reader.last_sign_s >= TENTATIVE_S:
                self.withdraw(name)
                continue
            epochs_before = tracker.order.stream.epochs
            passed = tracker.pass_floor()
            self._importances.note_accesses(passed)
            self.release(tracker, passed, "passed")
            if tracker.order.stream.epochs != epochs_before:
                self._memory.orders_changed()
                if not tracker.order.epochs:
                    self._finished[name] = None

    def take_back(self, tracker: StreamTracker, position: int) -> bool:
        """End a stream's claims from a position on; the farthest entries are dropped first. Returns
        whether any ended."""
        released = tracker.claims.retreat(position)
        self.release(tracker, released[::-1], "given up")
        return len(released) > 0

    def release(self, tracker: StreamTracker, entries: Entries, why: Ended) -> None:
        self._memory.resident_set.unclaim(entries, why)
        self._watches.remove(tracker.name, tracker.take_unwatched())

    def _tracker(self, name: str) -> StreamTracker:
        if name not in self.trackers:
            raise UsageError(f"no stream {name[:64]!r}")
        return self.trackers[name]

    def _check(
        self, stream: Stream, new_epochs: Sequence[Epoch], *, instead_of: str | None = None
    ) -> Stream:
        """Check the limits of the plan with a new or changed stream, and without `instead_of`.
        Raises UsageError."""
        plan = {name: tracker.order.stream for name, tracker in self.trackers.items()}
        if instead_of is not None:
            del plan[instead_of]
        check_plan({**plan, stream.name: stream}.values(), new_epochs, self._is_file)
        if stream.epochs:
            self._finished.pop(stream.name, None)
        return stream

    def _remove(self, name: str) -> None:
        tracker = self.trackers.get(name)
        if tracker is not None:
            self.release(tracker, tracker.claims.retreat(0), "changed")
            del self.trackers[name]
            self._memory.orders_changed()
