"""Keeps one receiver up to date with the plan that a process knows (`PEERS.md`, section 5). No I/O.

A mount's prefetch worker publishes to its node's master, and each master to all others, the plans
of its own node's readers. A `PlanPublisher` remembers what its receiver has taken over, and yields
messages for the rest: each order once, each stream when it changes, then positions. The caller
sends them, from a thread (`sender.py`) or from trio (`master/`).
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ...orders.plan import Entries
from .messages import (
    DAMAGED,
    NO_ROOM,
    REFUSED,
    TAKEN,
    UNKNOWN,
    Mask,
    PlanMessage,
    PlannedEpoch,
    PlannedStream,
    StreamEnd,
    Values,
    held_pieces,
    order_pieces,
    plan_body,
    position_messages,
    value_pieces,
)

News = Generator[bytes, int | None, None]
"""Yields messages; each answer's status is sent into it, or None if no answer came."""

_Step = Generator[bytes, int | None, int | None]
"""Returns the last status."""

_RETRY_NEWS = 60
"""Calls of `news` after which a rejected stream is sent again."""

_REPEAT_NEWS = 30
"""Calls of `news` (one a second between masters) after which unchanged positions and held chunks
are repeated: the receiver may have forgotten this process."""


@dataclass(frozen=True, slots=True, eq=False)
class Announcement:
    streams: Mapping[str, PlannedStream]
    order_of: Callable[[PlannedEpoch], Entries | None]
    """The entries of an epoch whose order cannot be computed; None if it is no longer known."""
    values: Values | None = None
    """The likely reads of each chunk (`messages.ChunkValues`); None if unknown."""
    held: Mask | None = None
    """The node's chunks; None if the receiver does not need them."""


class PlanPublisher:
    def __init__(self, entry_count: int) -> None:
        """`entry_count` is that of the dataset's version."""
        self._entry_count = entry_count
        self._orders: set[bytes] = set()  # the receiver has these orders and streams
        self._streams: dict[str, tuple[PlannedEpoch, ...]] = {}
        self._positions: dict[str, tuple[int, int]] = {}
        self._rejected: dict[str, tuple[tuple[PlannedEpoch, ...], int]] = {}  # and in which round
        self._held: Mask | None = None
        self._values: Values | None = None
        self._rounds = self._held_round = 0
        self.last_status: int | None = TAKEN
        """None if no answer came."""

    @property
    def has_published(self) -> bool:
        return bool(self._streams)

    def forget(self) -> None:
        """Start anew: the receiver may know nothing."""
        self._orders.clear()
        self._streams.clear()
        self._positions.clear()
        self._rejected.clear()
        self._held = self._values = None

    def news(self, announced: Announcement) -> News:
        """The messages after which the receiver knows this plan and no other. Ends early if no
        answer comes, or if the receiver has forgotten this process; then call `news` again
        later."""
        self._rounds += 1
        status = yield from self._send_streams(announced)
        if status in (None, UNKNOWN):
            self._values = None
            return
        held, values = announced.held, announced.values
        is_repeated = self._rounds >= self._held_round + _REPEAT_NEWS
        if held is not None and (is_repeated or not _are_equal(held, self._held)):
            status = yield from self._send_all(held_pieces(held))
            self._held = held if status == TAKEN else None
            self._held_round = self._rounds
            self._values = None  # the receiver may be new
        if values is not None and not _are_equal(values, self._values):
            status = yield from self._send_all(value_pieces(values))
            self._values = values if status == TAKEN else None

    def _send(self, message: PlanMessage) -> _Step:
        self.last_status = yield plan_body(message, self._entry_count)
        return self.last_status

    def _send_all(self, messages: Iterable[PlanMessage]) -> _Step:
        status: int | None = TAKEN
        for each in messages:
            status = yield from self._send(each)
            if status != TAKEN:
                break
        return status

    def _send_streams(self, announced: Announcement) -> _Step:
        streams = announced.streams
        status: int | None = TAKEN
        self.last_status = status
        for key in [key for key in self._streams if key not in streams]:
            status = yield from self._send(StreamEnd(key))
            if status is None:
                return None
            del self._streams[key]
            self._positions.pop(key, None)
        for stream in streams.values():
            known = self._streams.get(stream.key)
            is_known = known is not None and known[-len(stream.epochs) :] == stream.epochs
            if is_known or self._is_rejected(stream):
                continue
            status = yield from self._send_stream(stream, announced)
            if status is None:
                return None
        self._orders &= {epoch.digest for each in streams.values() for epoch in each.epochs}
        changed = {
            key: (stream.at_epoch, stream.position)
            for key, stream in streams.items()
            if key in self._streams
            and (
                self._positions.get(key) != (stream.at_epoch, stream.position)
                or self._rounds % _REPEAT_NEWS == 0
            )
        }
        for message in position_messages(changed):
            status = yield from self._send(message)
            if status == UNKNOWN:
                self.forget()
            if status != TAKEN:
                return status
            self._positions.update(message.by_key)
        return status

    def _send_stream(self, stream: PlannedStream, announced: Announcement) -> _Step:
        for epoch in stream.epochs:
            if epoch.computed is not None or epoch.digest in self._orders:
                continue
            entries = announced.order_of(epoch)
            if entries is None:
                return TAKEN  # the stream has changed: the next round sends it
            pieces = order_pieces(entries, epoch.digest, self._entry_count)
            status = yield from self._send_all(pieces)
            if status != TAKEN:
                self._note_rejection(stream, status)
                return status
            self._orders.add(epoch.digest)
        status = yield from self._send(stream)
        if status == TAKEN:
            self._streams[stream.key] = stream.epochs
            self._positions[stream.key] = stream.at_epoch, stream.position
            self._rejected.pop(stream.key, None)
        else:
            self._note_rejection(stream, status)
        return status

    def _note_rejection(self, stream: PlannedStream, status: int | None) -> None:
        if status in (REFUSED, NO_ROOM, DAMAGED):
            self._rejected[stream.key] = stream.epochs, self._rounds
        elif status is not None:
            self._orders.clear()  # UNKNOWN: it lacks an order

    def _is_rejected(self, stream: PlannedStream) -> bool:
        epochs, since = self._rejected.get(stream.key, (None, 0))
        return epochs == stream.epochs and self._rounds - since < _RETRY_NEWS


def _are_equal(new: Mask | Values, known: Mask | Values | None) -> bool:
    return new is known or (known is not None and np.array_equal(new, known))
