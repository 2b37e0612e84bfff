"""The client of DIESEL-FS servers: sends requests over pooled connections, and sends them again
where a server fails (`WIRE.md`).

The servers of one address (`diesel://a:9300,b:9300`) share one store, and any of them can answer
any request. `ServerLink` decides which server is asked, which connections are kept, and what is
sent again and when; `client_connection.py` is a single connection.

Concurrency: a `ServerLink` serves many threads; each call has a connection for itself. In a forked
child the connections of the parent are closed before anything else runs, and the child makes its
own.
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
"""The time for a request and its answer, all attempts included."""

FIRST_CONNECT_S = 5.0
"""The time to find a server while none has ever answered: the address may be wrong."""

CONNECT_S = 10.0
"""The time to connect to one server, login included: a machine that is gone does not answer."""

SILENCE_S = 5.0
"""Where the address has several servers, one may be silent for at least so long before another is
asked."""

IDLE_CONNECTIONS_MAX = 16
IDLE_S = 60.0
"""Idle connections are kept for so long: less than the time after which a server closes them."""

_PAUSE_S = 0.05
_PAUSE_S_MAX = 2.0


class RpcClient(Protocol):
    """Sends requests to a server and receives the answers. Usable from many threads at once, and in
    forked children."""

    @property
    def store_id(self) -> UUID:
        """The UUID of the object store behind the server. Connects if nothing has yet."""
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

        The payload of the answer is received into `room`, if given, which it must fill exactly.
        With `may_repeat` the request is sent again where a connection breaks, to another server if
        there is one. Raises the error in the answer; MetadataError where no server can be reached,
        DeadlineError, CorruptError for an answer that breaks the protocol.
        """
        ...

    def stream(self, message: Message, *, deadline_s: float | None = None) -> Iterator[Answer]:
        """All answers to a request; the deadline is for each. Raises as `call`.

        The request may be sent again until the first answer has come. Closing the iterator before
        its end closes the connection.
        """
        ...

    def close_idle(self) -> None:
        """Close the idle connections; the next request makes a new one. Repeatable."""
        ...

    def close(self) -> None:
        """Close the idle connections, and each other one when its call ends. No call can be made
        afterwards. Repeatable."""
        ...


class ServerLink(RpcClient):
    """A client of the servers at one address, as one user."""

    def __init__(
        self,
        url: RepositoryUrl,
        credentials: Credentials,
        *,
        program: str = "diesel-fs",
        open_s: float = FIRST_CONNECT_S,
        first: int | None = None,
    ) -> None:
        """Nothing is sent before the first request. `program` names this program to the server;
        `open_s` is how long to look for a server as long as none has answered; `first` is the index
        of the server that is asked first (None: a random one, which spreads clients over the
        servers). Raises ConfigError for a malformed address.
        """
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
        """See `RpcClient`."""
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
        """See `RpcClient`."""
        deadline = Deadline(DEADLINE_S if deadline_s is None else deadline_s)
        connection, answer = self._call(message, payload, room, may_repeat, deadline)
        if answer.message.get("more") is True:
            connection.close()
            return answer
        self._release(connection)
        return answer

    def stream(self, message: Message, *, deadline_s: float | None = None) -> Iterator[Answer]:
        """See `RpcClient`."""
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
        """See `RpcClient`."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def close(self) -> None:
        """See `RpcClient`."""
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
        """Send a request until a server answers it. Returns the first answer, which is no error,
        and its connection."""
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
        """The deadline for one server: it leaves time to ask another, if there is one."""
        if not may_repeat or len(self._addresses) == 1:
            return deadline
        return deadline.capped(max(SILENCE_S, deadline.left_s / 2))

    # Connections

    def _acquire(self, deadline: Deadline) -> Connection:
        """An idle or new connection, for the caller alone. Raises MetadataError,
        PermissionDenied."""
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
        """Keep a connection for the next call."""
        connection.idle_since_s = time.monotonic()
        with self._lock:
            self._idle.append(connection)
            idle_max = 0 if self._closed else IDLE_CONNECTIONS_MAX
            cut = max(0, len(self._idle) - idle_max)
            excess, self._idle = self._idle[:cut], self._idle[cut:]  # the longest idle are closed
        for each in excess:
            each.close()

    def _abandon(self, connection: Connection) -> None:
        """Close a connection, and ask another server next."""
        connection.close()
        if self._addresses[self._first] == connection.address:
            self._first = (self._first + 1) % len(self._addresses)

    def _connect(self, deadline: Deadline) -> Connection:
        """A new connection to the first server that accepts. All servers are tried, again and
        again; each gets a share of the time, since a machine that is gone uses up all of it."""
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
                failed = previous  # the last round had little time: its errors say less
            if all(broken.is_permanent for broken in failed) or not _pause(pause_s, deadline):
                raise _connect_error(failed) from failed[0]
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    def _open_connection(self, address: HostPort, deadline: Deadline) -> Connection:
        """A new connection to one server. Raises ConnectionBroken, PermissionDenied."""
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
        """Drop the connections, which belong to the parent process."""
        self._lock = threading.Lock()
        self._idle.clear()
        for connection in list(self._all):
            connection.close()
        self._all = weakref.WeakSet()


def _pause(pause_s: float, deadline: Deadline) -> bool:
    """Sleep for about `pause_s`, with a random factor, so that clients that failed together do not
    come back together. Returns False at once where there is no time for that."""
    pause_s *= 0.5 + secrets.randbelow(1000) / 1000
    if deadline.left_s <= pause_s:
        return False
    time.sleep(pause_s)
    return True


def _unknown(error: DieselError) -> DieselError:
    """The error for a request that must not be sent twice, and may have been carried out."""
    kind = DeadlineError if isinstance(error, DeadlineError) else MetadataError
    return kind(f"{error.message}: whether the request was carried out is not known")


def _connect_error(failed: Sequence[ConnectionBroken]) -> DieselError:
    """The error where no server accepts us. Temporary failures come first: then the error says that
    trying again may help."""
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
