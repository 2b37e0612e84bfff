"""Publishes the plan of a process's readers to its node's master, from a thread, so that the caller
never waits for a master, or while an order of millions of files is sent.

The thread sends the newest state, at most every `SEND_S`. If a master has ended, the next one gets
everything again. Thread-safe. A forked child needs a `PlanSender` of its own.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ...format.snapshot.reader import Snapshot
from ...orders.plan import Entries, Epoch
from .messages import UNKNOWN, PlannedEpoch, PlannedStream, Values, order_digest
from .publisher import Announcement, PlanPublisher

SEND_S = 0.5
"""Masters exchange positions every second, so sending more often would not help."""

RETRY_S = 1.0


class StreamProgress(NamedTuple):
    """A reader's known epochs, and its next position, in the epoch `at_epoch`."""

    epochs: tuple[Epoch, ...]
    at_epoch: int
    position: int


class PlanSender:
    """The thread starts with the first stream."""

    def __init__(
        self, snapshot: Snapshot, send: Callable[[bytes], int | None], *, send_s: float = SEND_S
    ) -> None:
        """`send` sends a message and returns the answer's status (`messages.py`), or None if none
        came; it may block."""
        self._identity, self._version = snapshot.identity, snapshot.version
        self._send_body = send
        self._send_s = send_s
        self._entry_count = len(snapshot)
        self._publisher = PlanPublisher(len(snapshot))
        self._changed = threading.Condition()
        self._wanted: Mapping[str, StreamProgress] = {}
        self._values: Values | None = None
        self._is_new = self._is_closed = False
        self._digests: dict[int, tuple[Epoch, bytes]] = {}
        self._orders: dict[bytes, Entries] = {}
        self._last: dict[str, tuple[PlannedEpoch, ...]] = {}
        self._thread: threading.Thread | None = None

    def set_streams(
        self, streams: Mapping[str, StreamProgress], values: Values | None = None
    ) -> None:
        """Set all streams of this process, by name, and the value of each chunk (`ChunkValues`;
        None: as before). Returns at once."""
        with self._changed:
            self._values = self._values if values is None else values
            if self._is_closed or (not streams and not self._wanted):
                return
            self._wanted, self._is_new = dict(streams), True
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="diesel-plans", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """The master forgets the streams when this process's connections end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._is_new or self._is_closed):
                    self._changed.wait()
                if self._is_closed:
                    return
                wanted, self._is_new = self._wanted, False
            if not self._send(wanted):
                with self._changed:
                    self._is_new = True  # unless there is something newer
                time.sleep(RETRY_S)
            time.sleep(self._send_s)

    def _send(self, wanted: Mapping[str, StreamProgress]) -> bool:
        """Returns whether the master answered and knows this process."""
        streams = {
            name: planned
            for name, each in wanted.items()
            if (planned := self._planned(name, each)) is not None
        }
        self._last = {name: each.epochs for name, each in streams.items()}
        used = {id(epoch) for each in wanted.values() for epoch in each.epochs}
        self._digests = {key: each for key, each in self._digests.items() if key in used}
        digests = {each.digest for epochs in self._last.values() for each in epochs}
        self._orders = {key: each for key, each in self._orders.items() if key in digests}
        publisher = self._publisher
        news = publisher.news(
            Announcement(streams, lambda epoch: self._orders.get(epoch.digest), self._values)
        )
        try:
            body = next(news)
            while not self._is_closed:
                body = news.send(self._send_body(body))
        except StopIteration:
            pass
        if publisher.last_status is None:
            publisher.forget()
        return publisher.last_status not in (None, UNKNOWN)

    def _planned(self, name: str, progress: StreamProgress) -> PlannedStream | None:
        """A stream that was read to its end stays with its last epochs, as the master may compute
        its next epoch. Returns None if nothing is known of it."""
        if progress.epochs:
            epochs = tuple(map(self._planned_epoch, progress.epochs))
            at_epoch, position = progress.at_epoch, progress.position
        else:
            epochs = self._last.get(name, ())
            if not epochs:
                return None
            at_epoch, position = epochs[-1].number, epochs[-1].length
        return PlannedStream(name, self._identity, self._version, epochs, at_epoch, position)

    def _planned_epoch(self, epoch: Epoch) -> PlannedEpoch:
        if epoch.computed is not None:
            return PlannedEpoch(epoch.number, len(epoch), computed=epoch.computed)
        known = self._digests.get(id(epoch))
        if known is None:
            known = self._digests[id(epoch)] = epoch, order_digest(epoch.entries)
        self._orders[known[1]] = epoch.entries
        return PlannedEpoch(epoch.number, len(epoch), known[1])
