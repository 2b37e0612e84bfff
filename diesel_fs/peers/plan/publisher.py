"""Tells one receiver of the streams that a process knows: each order once, each stream when it
changes, and positions.

A mount's prefetch worker tells its node's master, and each master tells all others of its node's
streams (`PEERS.md`, section 5). `PlanTeller` knows what one receiver has taken over, and yields the
messages for the rest; the caller sends them, in threads or by trio. Pure.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import replace

from ...orders.plan import Entries
from .messages import (
    DAMAGED,
    NO_ROOM,
    REFUSED,
    TAKEN,
    UNKNOWN,
    PlannedEpoch,
    PlannedStream,
    StreamEnd,
    order_pieces,
    plan_body,
    position_messages,
)

News = Generator[bytes, int | None, None]
"""Yields messages; is sent the status of each answer, or None where none came."""

OrderOf = Callable[[PlannedEpoch], Entries | None]
"""The entries of an epoch whose order is not computed; None where they are not known any more."""

_RETRY_NEWS = 60
"""A stream that the receiver rejected is told again after so many rounds of news."""


_ALL_POSITIONS_NEWS = 30
"""In one of so many rounds, positions that have not changed are told, too: the receiver may have
forgotten their streams."""


class PlanTeller:
    """What one receiver has been told."""

    def __init__(self, entry_count: int) -> None:
        """`entry_count`: of the dataset's version that the streams are for."""
        self._entry_count = entry_count
        self._orders: set[bytes] = set()  # that the receiver has, by their digests
        self._streams: dict[str, tuple[PlannedEpoch, ...]] = {}
        self._positions: dict[str, tuple[int, int]] = {}
        self._rejected: dict[str, tuple[tuple[PlannedEpoch, ...], int]] = {}  # and when
        self._rounds = 0

    @property
    def has_told(self) -> bool:
        """Whether the receiver knows a stream."""
        return bool(self._streams)

    def forget(self) -> None:
        """The receiver may know nothing any more: it is told everything again."""
        self._orders.clear()
        self._streams.clear()
        self._positions.clear()
        self._rejected.clear()

    def news(self, streams: Mapping[str, PlannedStream], order_of: OrderOf) -> News:
        """The messages after which the receiver knows these streams and no others. It ends early
        where no answer comes; call it again later."""
        self._rounds += 1
        for key in [key for key in self._streams if key not in streams]:
            if (yield plan_body(StreamEnd(key), self._entry_count)) is None:
                return
            del self._streams[key]
            self._positions.pop(key, None)
        for stream in streams.values():
            told = self._streams.get(stream.key)
            is_known = told is not None and told[-len(stream.epochs) :] == stream.epochs
            if is_known or self._is_rejected(stream):
                continue
            status = yield from self._tell_stream(stream, order_of)
            if status is None:
                return
        used = {epoch.digest for stream in streams.values() for epoch in stream.epochs}
        self._orders &= used
        changed = {
            key: (stream.at_epoch, stream.position)
            for key, stream in streams.items()
            if key in self._streams
            and (
                self._positions.get(key) != (stream.at_epoch, stream.position)
                or self._rounds % _ALL_POSITIONS_NEWS == 0
            )
        }
        for message in position_messages(changed):
            status = yield plan_body(message, self._entry_count)
            if status == UNKNOWN:
                self.forget()
            if status != TAKEN:
                return
            self._positions.update(message.by_key)

    def _tell_stream(
        self, stream: PlannedStream, order_of: OrderOf
    ) -> Generator[bytes, int | None, int | None]:
        """Tell a stream, after the orders that the receiver does not have. The status, or None
        where no answer came."""
        for epoch in stream.epochs:
            if epoch.computed is not None or epoch.digest in self._orders:
                continue
            entries = order_of(epoch)
            if entries is None:
                return TAKEN  # the stream has changed meanwhile: it will be told as it is then
            for piece in order_pieces(entries, epoch.digest, self._entry_count):
                status = yield plan_body(piece, self._entry_count)
                if status != TAKEN:
                    if status is not None:
                        self._reject(stream, status)
                    return status
            self._orders.add(epoch.digest)
        status = yield plan_body(stream, self._entry_count)
        if status == TAKEN:
            self._streams[stream.key] = stream.epochs
            self._positions[stream.key] = stream.at_epoch, stream.position
            self._rejected.pop(stream.key, None)
        elif status is not None:
            self._reject(stream, status)
        return status

    def _reject(self, stream: PlannedStream, status: int) -> None:
        if status in (REFUSED, NO_ROOM, DAMAGED):
            self._rejected[stream.key] = stream.epochs, self._rounds
        else:
            self._orders.clear()

    def _is_rejected(self, stream: PlannedStream) -> bool:
        epochs, since = self._rejected.get(stream.key, (None, 0))
        return epochs == stream.epochs and self._rounds - since < _RETRY_NEWS


def keyed(stream: PlannedStream, key: str) -> PlannedStream:
    """The same stream with another key."""
    return replace(stream, key=key)
