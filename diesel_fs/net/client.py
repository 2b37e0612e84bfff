"""The client of DIESEL-FS servers: sends requests over pooled connections, and again if a server
fails (`WIRE.md`).

The servers of one address (`diesel://a:9300,b:9300`) share one store, and any can answer any
request. A `ServerLink` serves many threads; each call has a connection for itself. A forked child
closes its copies of the parent's connections, and makes its own.
"""

import os
import secrets
import ssl
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Protocol
from uuid import UUID

from ..credentials import Credentials
from ..errors import DeadlineError, DieselError, MetadataError, PermissionDenied
from ..format.entries import Bytes
from ..urls import HostPort, RepositoryUrl
from .client_connection import (
    Answer,
    Connection,
    ConnectionBroken,
    Deadline,
    parse_addresses,
)
from .messages import Message, parse_error
from .tls import verifying_context

__all__ = ["Answer", "RpcClient", "ServerLink"]

DEADLINE_S = 60.0
"""The default for a request and its answer, with all attempts."""

FIRST_CONNECT_S = 5.0
"""The limit for finding a server if none has ever answered: the address may be wrong."""

CONNECT_S = 10.0
"""The limit for connecting to one server, with the login."""

SILENCE_S = 5.0
"""With several servers, the least time for which one may be silent before another is tried."""

IDLE_CONNECTIONS_MAX = 16
IDLE_S = 60.0
"""How long idle connections are kept; a server closes them later."""

_PAUSE_S = 0.05
_PAUSE_S_MAX = 2.0


class RpcClient(Protocol):
    """Sends requests to a server. Usable from many threads at once, and in forked children."""

    @property
    def store_id(self) -> UUID:
        """Connects if no server has answered yet."""
        ...

    def call(
        self,
        message: Message,
        payload: Sequence[Bytes] = (),
        *,
        room: memoryview | None = None,
        may_repeat: bool = True,
        deadline_s: float | None = None,
    ) -> Answer:
        """The answer to a request (`message` without `id`).

        The payload of the answer must fill `room`, if given. With `may_repeat` the request is sent
        again if a connection breaks. Raises the error in the answer; MetadataError if no server can
        be reached; DeadlineError; CorruptError for an answer that breaks the protocol.
        """
        ...

    def stream(self, message: Message, *, deadline_s: float | None = None) -> Iterator[Answer]:
        """All answers to a request; the deadline is for each. Raises as `call`.

        The request may be repeated until the first answer. Closing the iterator early closes the
        connection.
        """
        ...

    def close_idle(self) -> None:
        """Close the connections that no call uses. The client stays usable."""
        ...

    def close(self) -> None:
        """Close idle connections now, others when their calls end. Later calls fail. May be called
        again."""
        ...


class ServerLink(RpcClient):
    """A client of the servers at one address."""

    def __init__(
        self,
        url: RepositoryUrl,
        credentials: Credentials,
        *,
        program: str = "diesel-fs",
        open_s: float = FIRST_CONNECT_S,
        first: int | None = None,
    ) -> None:
        """Sends nothing yet. `program` names this program to the server. `open_s` limits the search
        for a server until one has answered. `first` is the index of the first server to try (None:
        random, to spread clients). Raises ConfigError for a bad URL."""
        self._url = url
        self._addresses: Sequence[HostPort] = parse_addresses(url)
        self._credentials = credentials
        self._program = program
        self._open_s = open_s
        self._tls: ssl.SSLContext | None = None  # made for the first connection with TLS
        self._first = secrets.randbelow(len(self._addresses)) if first is None else first
        self._store: UUID | None = None
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._all: weakref.WeakSet[Connection] = weakref.WeakSet()  # closed in a forked child
        self._closed = False
        _links.add(self)

    @property
    def store_id(self) -> UUID:
        if self._store is None:
            self._release(self._acquire(Deadline(DEADLINE_S)))
        assert self._store is not None
        return self._store

    def call(
        self,
        message: Message,
        payload: Sequence[Bytes] = (),
        *,
        room: memoryview | None = None,
        may_repeat: bool = True,
        deadline_s: float | None = None,
    ) -> Answer:
        deadline = Deadline(DEADLINE_S if deadline_s is None else deadline_s)
        connection, answer = self._call(message, payload, room, may_repeat, deadline)
        if answer.message.get("more") is True:
            connection.close()
            return answer
        self._release(connection)
        return answer

    def stream(self, message: Message, *, deadline_s: float | None = None) -> Iterator[Answer]:
        each_s = DEADLINE_S if deadline_s is None else deadline_s
        connection, answer = self._call(message, (), None, True, Deadline(each_s))
        at_end = False
        try:
            while answer.message.get("more") is True:
                yield answer
                try:
                    answer = connection.receive(None, Deadline(each_s))
                except ConnectionBroken as broken:
                    raise broken.error from broken
            at_end = True
        finally:
            if at_end:
                self._release(connection)
            else:
                connection.close()
        error = parse_error(answer.message)
        if error is not None:
            raise error
        yield answer

    def close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self.close_idle()

    def __del__(self) -> None:
        for connection in getattr(self, "_idle", ()):  # `__init__` may have raised
            connection.close()

    # One request

    def _call(
        self,
        message: Message,
        payload: Sequence[Bytes],
        room: memoryview | None,
        may_repeat: bool,
        deadline: Deadline,
    ) -> tuple[Connection, Answer]:
        """Returns the connection and the first answer, which is no error."""
        pause_s = _PAUSE_S
        while True:
            connection = self._acquire(deadline)
            try:
                limit = self._server_deadline(may_repeat, deadline)
                answer = connection.exchange(message, payload, room, limit)
            except ConnectionBroken as broken:
                self._abandon(connection)
                if broken.may_have_arrived and not may_repeat:
                    raise _unknown(broken.error) from broken
                error = broken.error
            except BaseException:
                connection.close()
                raise
            else:
                refusal = parse_error(answer.message)
                if refusal is None:
                    return connection, answer
                retry_after_s = answer.message.get("retry_after_s")
                if not isinstance(retry_after_s, int | float) or isinstance(retry_after_s, bool):
                    self._release(connection)
                    raise refusal
                error = refusal  # the server has not begun with the request
                pause_s = max(pause_s, min(float(retry_after_s), _PAUSE_S_MAX))
                if len(self._addresses) > 1:
                    self._abandon(connection)
                else:
                    self._release(connection)
            if not _pause(pause_s, deadline):
                raise error
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    def _server_deadline(self, may_repeat: bool, deadline: Deadline) -> Deadline:
        """The deadline for one server. It leaves time for another."""
        if not may_repeat or len(self._addresses) == 1:
            return deadline
        return deadline.capped(max(SILENCE_S, deadline.left_s / 2))

    # Connections

    def _acquire(self, deadline: Deadline) -> Connection:
        while True:
            with self._lock:
                if self._closed:
                    raise MetadataError(f"the link to {self._url} is closed")
                if not self._idle:
                    break
                connection = self._idle.pop()
            if time.monotonic() - connection.idle_since_s < IDLE_S and connection.is_usable:
                return connection
            connection.close()
        return self._connect(deadline)

    def _release(self, connection: Connection) -> None:
        connection.idle_since_s = time.monotonic()
        with self._lock:
            self._idle.append(connection)
            idle_max = 0 if self._closed else IDLE_CONNECTIONS_MAX
            cut = max(0, len(self._idle) - idle_max)
            excess, self._idle = self._idle[:cut], self._idle[cut:]
        for each in excess:
            each.close()

    def _abandon(self, connection: Connection) -> None:
        """Close a failed connection, and try another server first from now on."""
        connection.close()
        if self._addresses[self._first] == connection.address:
            self._first = (self._first + 1) % len(self._addresses)

    def _connect(self, deadline: Deadline) -> Connection:
        """Each attempt gets a share of the time, since a machine that is gone uses up all of it."""
        deadline = deadline if self._store is not None else deadline.capped(self._open_s)
        pause_s = _PAUSE_S
        failed: list[ConnectionBroken] = []
        while True:
            previous, failed = failed, []
            first, count = self._first, len(self._addresses)
            for k in range(count):
                at = (first + k) % count
                share = deadline.capped(deadline.left_s / (count - k))
                try:
                    connection = self._open_connection(self._addresses[at], share)
                except ConnectionBroken as broken:
                    failed.append(broken)
                    continue
                self._first = at
                return connection
            self._first = (first + 1) % count  # if time is up, the next call starts with another
            if previous and all(isinstance(broken.error, DeadlineError) for broken in failed):
                failed = previous  # the last round had little time, so its errors say less
            if all(broken.is_permanent for broken in failed) or not _pause(pause_s, deadline):
                raise _connect_error(failed) from failed[0]
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    def _open_connection(self, address: HostPort, deadline: Deadline) -> Connection:
        """Raises ConnectionBroken, PermissionDenied."""
        if self._url.scheme == "diesel+tls" and self._tls is None:
            self._tls = verifying_context()
        try:
            connection = Connection(
                address,
                self._tls,
                self._credentials,
                self._program,
                deadline.capped(CONNECT_S),
            )
        except PermissionDenied as error:
            error.message = f"{address}: {error.message}"
            raise
        self._all.add(connection)
        with self._lock:
            if self._store is None:
                self._store = connection.store_id
        if connection.store_id != self._store:
            connection.close()
            raise ConnectionBroken(
                MetadataError(
                    f"{address} serves another store ({connection.store_id}) than before"
                    f" ({self._store})",
                    advice="all servers of one address must serve the same store",
                ),
                is_permanent=True,
            )
        return connection

    def _reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        self._idle.clear()
        for connection in list(self._all):
            connection.close()
        self._all = weakref.WeakSet()


def _pause(pause_s: float, deadline: Deadline) -> bool:
    """The time has a random factor, which separates clients that failed together. Returns False at
    once if it is too long."""
    pause_s *= 0.5 + secrets.randbelow(1000) / 1000
    if deadline.left_s <= pause_s:
        return False
    time.sleep(pause_s)
    return True


def _unknown(error: DieselError) -> DieselError:
    """The error for a request that must not be repeated, but may have been carried out."""
    kind = DeadlineError if isinstance(error, DeadlineError) else MetadataError
    return kind(f"{error.message}: whether the request was carried out is not known")


def _connect_error(failed: Sequence[ConnectionBroken]) -> DieselError:
    """One error with all reasons. It has the class of a temporary failure if there is one, since
    the class shows whether trying again may help."""
    ordered = sorted(failed, key=lambda broken: broken.is_permanent)
    first = ordered[0].error
    if len(ordered) > 1:
        first.message = "; ".join(broken.error.message for broken in ordered)
    return first


_links: "weakref.WeakSet[ServerLink]" = weakref.WeakSet()


def _reset_all_after_fork() -> None:
    for link in list(_links):
        link._reset_after_fork()


os.register_at_fork(after_in_child=_reset_all_after_fork)
