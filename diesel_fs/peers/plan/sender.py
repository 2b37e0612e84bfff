"""Tells a node's master which files a process's readers will read, where they are, and what chunks
are worth to them.

A `PlanSender` has a thread of its own, so that the caller never waits: for a master that does not
answer, or while an order of millions of files is sent. The thread sends the newest state, at most
every `SEND_S`. A master that has ended is told everything again when there is one; meanwhile the
readers read without a plan. `publisher.py` decides what to send.

Thread-safe. A forked child makes one of its own.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ...format.snapshot.reader import Snapshot
from ...orders.plan import Entries, Epoch
from .messages import (
    TAKEN,
    UNKNOWN,
    PlannedEpoch,
    PlannedStream,
    Values,
    order_digest,
    plan_body,
    value_pieces,
)
from .publisher import PlanTeller

SEND_S = 0.5
"""How often positions are sent at most: masters tell each other every second."""

RETRY_S = 1.0
"""How long a master that does not answer is left alone."""


class StreamProgress(NamedTuple):
    """A stream: its epochs, and the next position that its reader reads, in the epoch of a
    number."""

    epochs: tuple[Epoch, ...]
    at_epoch: int
    position: int


class PlanSender:
    """Tells one master of the streams of this process (see the module)."""

    def __init__(
        self, snapshot: Snapshot, tell: Callable[[bytes], int | None], *, send_s: float = SEND_S
    ) -> None:
        """`tell` sends a message, and returns the status of its answer or None; it may block."""
        self._identity, self._version = snapshot.identity, snapshot.version
        self._tell = tell
        self._send_s = send_s
        self._entry_count = len(snapshot)
        self._teller = PlanTeller(len(snapshot))
        self._changed = threading.Condition()
        self._wanted: Mapping[str, StreamProgress] = {}
        self._values: Values | None = None
        self._values_told: Values | None = None
        self._is_new = self._is_closed = False
        self._digests: dict[int, tuple[Epoch, bytes]] = {}  # by the identity of the epoch
        self._orders: dict[bytes, Entries] = {}
        self._last: dict[str, tuple[PlannedEpoch, ...]] = {}
        self._thread: threading.Thread | None = None

    def set_streams(
        self, streams: Mapping[str, StreamProgress], values: Values | None = None
    ) -> None:
        """Set all streams of this process, by name, and what chunks are worth; None: as before.
        Returns at once."""
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
        """Send no more. The master forgets the streams with this process's connections."""
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
                    self._is_new = True  # again, unless there is something newer
                time.sleep(RETRY_S)
            time.sleep(self._send_s)

    def _send(self, wanted: Mapping[str, StreamProgress]) -> bool:
        """Send what is new of these streams; returns whether the master knows all of it."""
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
        news = self._teller.news(streams, lambda epoch: self._orders.get(epoch.digest))
        status: int | None = 0
        try:
            body = next(news)
            while not self._is_closed:
                status = self._tell(body)
                body = news.send(status)
        except StopIteration:
            pass
        values = self._values
        if status is None or status == UNKNOWN:
            self._values_told = None
        elif values is not None and values is not self._values_told and not self._is_closed:
            bodies = (plan_body(each, self._entry_count) for each in value_pieces(values))
            statuses = {self._tell(each) for each in bodies}
            status = None if None in statuses else status
            self._values_told = values if statuses <= {TAKEN} else None
        if status is None:
            self._teller.forget()
        return status not in (None, UNKNOWN)

    def _planned(self, name: str, progress: StreamProgress) -> PlannedStream | None:
        """A stream as the master is told of it. One that was read to its end stays as it was, as
        its next epoch may be foreseen; None where nothing is known of it."""
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
