"""The client's end of the wire (`WIRE.md`): connections to the servers at an address.

Owned here: which server is asked, which connections are kept, what is sent again and when. Not
owned: one connection (`client_connection.py`), what is asked (`remote/repository.py`).

Concurrency: a `ServerLink` serves many threads, each call on a connection of its own. After a fork,
the child lets go of its parent's connections before it does anything else, and makes its own.
"""

import os
import secrets
import ssl
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Protocol, Self
from uuid import UUID

from ..credentials import Credentials
from ..errors import DeadlineError, DieselError, MetadataError, PermissionDenied
from ..format.entries import Bytes
from ..urls import RepositoryUrl
from .client_connection import (
    Address,
    Answer,
    Connection,
    ConnectionBroken,
    Deadline,
    parse_addresses,
    tls_context,
)
from .messages import Message, parse_error

__all__ = ["Answer", "RpcClient", "ServerLink"]

DEADLINE_S = 60.0
"""For a request, its answer, and all attempts at them."""

FIRST_CONNECT_S = 5.0
"""How long to look for a server where none has answered before: the address may be wrong."""

CONNECT_S = 10.0
"""For one address, login included: a machine that is gone answers nothing at all."""

SILENCE_S = 5.0
"""Where there are other servers, so long at least one may be silent before another is asked."""

IDLE_CONNECTIONS_MAX = 16
IDLE_S = 60.0
"""Less than the time after which a server closes a connection that says nothing."""

_PAUSE_S = 0.05
_PAUSE_S_MAX = 2.0


class RpcClient(Protocol):
    """Requests to a server and their answers; from many threads at once, in forked children."""

    @property
    def store_id(self) -> UUID:
        """The object store behind the server. Connects where that has not been done."""
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

        `room` takes the payload, which must fit it exactly. `may_repeat`: where a connection
        breaks, it may be sent once more, to another address where there is one. Raises the error
        that the answer is; MetadataError where no server can be reached, DeadlineError,
        CorruptError for an answer that contradicts the wire.
        """
        ...

    def stream(self, message: Message, *, deadline_s: float | None = None) -> Iterator[Answer]:
        """All answers to a request, the last too; the deadline is for each. Raises as `call`.

        Until the first has come, the request may be sent again. A stream that is closed before its
        end takes its connection along.
        """
        ...

    def close_idle(self) -> None:
        """End the connections that nobody uses now; the next request makes one. Repeatable."""
        ...

    def close(self) -> None:
        """End all connections. Repeatable."""
        ...


class ServerLink(RpcClient):
    """The servers at one address, as one user."""

    def __init__(
        self,
        url: RepositoryUrl,
        credentials: Credentials,
        *,
        program: str = "diesel-fs",
        open_s: float = FIRST_CONNECT_S,
    ) -> None:
        self._url = url
        self._addresses: Sequence[Address] = parse_addresses(url)
        self._credentials = credentials
        self._program = program
        self._open_s = open_s
        self._tls: ssl.SSLContext | None = None
        self._first = secrets.randbelow(len(self._addresses))  # spreads clients over the servers
        self._store: UUID | None = None
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._all: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._closed = False
        _links.add(self)

    @classmethod
    def open(
        cls,
        url: RepositoryUrl,
        credentials: Credentials,
        *,
        program: str = "diesel-fs",
        open_s: float = FIRST_CONNECT_S,
    ) -> Self:
        """A link to the servers of a URL; nothing is sent before something is asked.

        `open_s`: how long to look for a server as long as none has answered yet. Raises ConfigError
        for a malformed address.
        """
        return cls(url, credentials, program=program, open_s=open_s)

    @property
    def store_id(self) -> UUID:
        """The object store behind the server. Connects where that has not been done."""
        if self._store is None:
            self._give_back(self._taken(Deadline(DEADLINE_S)))
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
        self._give_back(connection)
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
                self._give_back(connection)
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
        """End all connections. Repeatable."""
        with self._lock:
            self._closed = True
        self.close_idle()

    def __del__(self) -> None:
        for connection in getattr(self, "_idle", ()):  # an address may have been malformed
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
        """The first answer that is no error, and the connection that it came by."""
        pause_s = _PAUSE_S
        while True:
            connection = self._taken(deadline)
            try:
                limit = self._server_deadline(may_repeat, deadline)
                answer = connection.exchange(message, payload, room, limit)
            except ConnectionBroken as broken:
                self._leave(connection)
                if broken.was_sent and not may_repeat:
                    raise _unknown(broken.error) from broken
                error = broken.error
            except BaseException:
                connection.close()
                raise
            else:
                found = parse_error(answer.message)
                if found is None:
                    return connection, answer
                hint = answer.message.get("retry_after_s")
                if not isinstance(hint, int | float) or isinstance(hint, bool):
                    self._give_back(connection)
                    raise found
                error = found  # it has not even begun with it
                pause_s = max(pause_s, min(float(hint), _PAUSE_S_MAX))
                if len(self._addresses) > 1:
                    self._leave(connection)
                else:
                    self._give_back(connection)
            if not _paused(pause_s, deadline):
                raise error
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    def _server_deadline(self, may_repeat: bool, deadline: Deadline) -> Deadline:
        """How long one server may take, where another could be asked."""
        if not may_repeat or len(self._addresses) == 1:
            return deadline
        return deadline.capped(max(SILENCE_S, deadline.left_s / 2))

    # Connections

    def _taken(self, deadline: Deadline) -> Connection:
        """A connection of the caller's own. Raises MetadataError, PermissionDenied."""
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
        return self._connected(deadline)

    def _give_back(self, connection: Connection) -> None:
        connection.idle_since_s = time.monotonic()
        with self._lock:
            self._idle.append(connection)
            kept = 0 if self._closed else IDLE_CONNECTIONS_MAX
            cut = max(0, len(self._idle) - kept)
            too_many, self._idle = self._idle[:cut], self._idle[cut:]  # the longest idle go first
        for each in too_many:
            each.close()

    def _leave(self, connection: Connection) -> None:
        """Close a connection, and ask another server next."""
        connection.close()
        if self._addresses[self._first] == connection.address:
            self._first = (self._first + 1) % len(self._addresses)

    def _connected(self, deadline: Deadline) -> Connection:
        """A new connection to the first server that takes us; all are tried, more than once, and
        each has its share of the time: a machine that is gone is silent to the end of it."""
        patience = deadline if self._store is not None else deadline.capped(self._open_s)
        pause_s = _PAUSE_S
        failed: list[ConnectionBroken] = []
        while True:
            before, failed = failed, []
            first, count = self._first, len(self._addresses)
            for k in range(count):
                at = (first + k) % count
                share = patience.capped(patience.left_s / (count - k))
                try:
                    connection = self._open_connection(self._addresses[at], share)
                except ConnectionBroken as broken:
                    failed.append(broken)
                    continue
                self._first = at
                return connection
            self._first = (first + 1) % count  # where the time ends now, the next call goes on
            if before and all(isinstance(broken.error, DeadlineError) for broken in failed):
                failed = before  # the last attempt, which had little time, says less
            if all(broken.is_permanent for broken in failed) or not _paused(pause_s, patience):
                raise _none_of(failed) from failed[0]
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)

    def _open_connection(self, address: Address, patience: Deadline) -> Connection:
        if self._url.scheme == "diesel+tls" and self._tls is None:
            self._tls = tls_context()
        try:
            connection = Connection(
                address,
                self._tls,
                self._credentials,
                self._program,
                patience.capped(CONNECT_S),
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
                    f"{address} serves another store ({connection.store_id}) than was there before"
                    f" ({self._store})",
                    advice="the servers of one address share one store",
                ),
                lasting=True,
            )
        return connection

    def _forget(self) -> None:
        """Called in a forked child: what there is belongs to the parent."""
        self._lock = threading.Lock()
        self._idle.clear()
        for connection in list(self._all):
            connection.close()
        self._all = weakref.WeakSet()


def _paused(pause_s: float, deadline: Deadline) -> bool:
    """Wait a little, so that not all who failed together come back together; False where there is
    no time for that."""
    pause_s *= 0.5 + secrets.randbelow(1000) / 1000
    if deadline.left_s <= pause_s:
        return False
    time.sleep(pause_s)
    return True


def _unknown(error: DieselError) -> DieselError:
    """The error of a request that must not be sent twice, and may have been carried out."""
    kind = DeadlineError if isinstance(error, DeadlineError) else MetadataError
    return kind(f"{error.message}: whether the request was carried out is not known")


def _none_of(failed: Sequence[ConnectionBroken]) -> DieselError:
    """The error where no server takes us; those that may pass come first."""
    ordered = sorted(failed, key=lambda broken: broken.is_permanent)
    first = ordered[0].error
    if len(ordered) > 1:
        first.message = "; ".join(broken.error.message for broken in ordered)
    return first


_links: "weakref.WeakSet[ServerLink]" = weakref.WeakSet()


def _forget_all() -> None:
    for link in list(_links):
        link._forget()


os.register_at_fork(after_in_child=_forget_all)
