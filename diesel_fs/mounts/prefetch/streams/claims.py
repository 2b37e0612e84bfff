"""Holds the claims of one stream: the files that are kept in memory for its reader.

A *claim* of a position begins when its unit (the files of one push) is chosen, and ends when the
*floor* passes the position, or when the stream gives it up (`retreat`): then the position is cut
into a unit again. A claimed file is not dropped. The floor stays `slack` positions behind the
reader's `low` (all positions before `low` have probably been read), in case `low` is wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ....orders.plan import NO_ENTRIES, Entries
from .markers import WatchedMarkers
from .reader_position import LAG_ENTRIES_MAX
from .stream_order import StreamEpoch, StreamOrder
from .units import Positions

SLACK_DIVISOR = 3
"""Claimed entries before `low` take at most a third of a stream's memory."""


@dataclass(slots=True)
class Claims:
    """Positions are counted in the stream."""

    order: StreamOrder
    watched: WatchedMarkers = field(default_factory=WatchedMarkers)  # of claimed positions
    floor: int = 0  # no claims before it
    slack: int = -1  # positions from the floor to `low`; -1: not known yet
    skipped: list[Entries] | None = None
    """The entries that the reader has passed unclaimed since the last `take_skipped`; some may
    occur twice. None: they are not recorded."""

    def fit_slack(self, lag: int) -> None:
        """Fit the slack to the stream's share of the memory. Workers may be `lag` positions
        apart."""
        capacity = self.order.capacity
        if self.slack < 0:
            # At most an eighth of the share, which is a quarter of a group of chunks if that takes
            # half of the share: the next group still fits the rest
            self.slack = min(self.order.stream.lag_entries or lag, capacity // 8)
        self.slack = min(self.slack, capacity // SLACK_DIVISOR)

    def widen_slack(self, behind: int) -> None:
        """Keep claims longer: a worker reads `behind` positions behind `low`."""
        # Most of the stream's memory stays for files ahead: a few late READs cost less
        most = min(LAG_ENTRIES_MAX, self.order.capacity // SLACK_DIVISOR)
        self.slack = min(max(2 * self.slack, behind), max(most, self.slack))

    def claim(
        self, state: StreamEpoch, positions: Positions, markers: Sequence[tuple[int, int]]
    ) -> None:
        """`markers` are those among the positions of the epoch, as position in the stream and
        entry; they need watches."""
        state.claimed[positions] = state.was_claimed[positions] = True
        self.watched.add(markers)

    def entries(self, position: int, count: int) -> Entries:
        claimed = [NO_ENTRIES]
        for state in self.order.epochs:
            start, end = max(position - state.base, 0), position + count - state.base
            if start < len(state.epoch) and end > 0:
                claimed.append(state.epoch.entries[start:end][state.claimed[start:end]])
        return np.concatenate(claimed)

    def at_frontier(self) -> Entries:
        state = self.order.frontier_epoch()
        return NO_ENTRIES if state is None else state.epoch.entries[state.claimed]

    def has_gaps(self, position: int, high: int) -> bool:
        spans = [(max(position - state.base, 0), high - state.base) for state in self.order.epochs]
        return position < self.floor or any(
            end > start and not state.claimed[start:end].all()
            for state, (start, end) in zip(self.order.epochs, spans, strict=True)
        )

    # Ending claims

    def pass_floor(self, low: int) -> Entries:
        """Move the floor up towards `low`, and remove epochs before it. Returns the entries of
        ended claims, once for each claim."""
        order = self.order
        is_finished = low >= order.end
        target = low if is_finished else max(self.floor, low - max(self.slack, 0))
        released = [NO_ENTRIES]
        while order.epochs and target > self.floor:
            state = order.epochs[0]
            start, end = self.floor - state.base, min(target, state.end) - state.base
            entries = state.epoch.entries[start:end]
            released.append(entries[state.claimed[start:end]])
            if self.skipped is not None:
                self.skipped.append(entries[~state.claimed[start:end]])
            state.claimed[start:end] = False
            self.floor = state.base + end
            if self.floor < state.end:
                break
            order.remove_first()
        while order.epochs and order.epochs[0].end <= self.floor:  # empty epochs
            order.remove_first()
        return np.concatenate(released)

    def retreat(self, position: int) -> Entries:
        """Give up all claims from a position on. Returns their entries, once for each claim."""
        released = [NO_ENTRIES]
        self.watched.give_up(position)
        for number, state in enumerate(self.order.epochs):
            if state.end <= position:
                continue
            start = max(position - state.base, 0)
            if not state.claimed[start:].any():
                continue
            released.append(state.epoch.entries[start:][state.claimed[start:]])
            state.claimed[start:] = False
            self.order.cut_again(number)
        return np.concatenate(released)

    def lower_floor(self, position: int) -> None:
        """Note that the reader has gone back. Units are cut again from `position` on; claims ahead
        stay."""
        epochs = self.order.epochs
        self.floor = max(position, epochs[0].base if epochs else position)
        for number, state in enumerate(epochs):
            if state.end > self.floor:
                self.order.cut_again(number)

    # Entries without claims

    def note_skipped(self, entries: Entries) -> None:
        if self.skipped is not None:
            self.skipped.append(entries)

    def take_skipped(self) -> list[Entries]:
        if not self.skipped:
            return []
        skipped, self.skipped = self.skipped, []
        return skipped
