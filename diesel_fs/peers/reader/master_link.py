"""A reader's control connections to its node's master (`PEERS.md`, section 4).

A `MasterLink` keeps connections, limits the time of an answer, and has a circuit breaker
(`../../net/breaker.py`): after the first failure it does not ask the master for a while. Except in
`open_data` it raises no error: the caller gets None and reads from the store.

Concurrency: many threads; each exchange (a request and its answer) has a connection of its own. A
forked child opens its own. One connection stays open as long as the link, since a master without
connections ends.
"""

import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple
from uuid import UUID

from ...errors import CorruptError, DieselError, MetadataError
from ...net.breaker import BreakerState, CircuitBreaker
from ...system.unix_sockets import connect_unix, received_descriptors
from .. import local_wire, wire
from ..members.owner_table import OwnerTableView
from .mapped_chunks import MappedChunks
from .request_socket import RequestSocket, start_anew_in_forks

log = logging.getLogger("diesel.task")

DEADLINE_S = 5.0
"""The time limit of an answer. A master's own time limits add up to less, so a slower one hangs."""

PAUSE_S, PAUSE_S_MAX = 1.0, 16.0
"""How long a failed master is not asked; doubles up to the maximum."""

IDLE_CONNECTIONS_MAX = 8

_BUFFER_BYTES = 8 << 10  # an answer to PIN with some revoked chunks; longer ones get more
_CONTROL_BYTES = socket.CMSG_SPACE(4)


class ExchangeFailed(Exception):
    """The connection cannot be used any more, unless the master has rejected the request."""


class RequestRejected(ExchangeFailed):
    """The connection can be used further."""


class MasterConnection(RequestSocket):
    """For one thread at a time. The last answer asks this process to unpin the chunks in
    `revoked`."""

    def __init__(self, path: str, identity: UUID, version: int, deadline_s: float) -> None:
        """Connect, and say hello. Raises ExchangeFailed."""
        self.revoked: list[int] = []
        self._buffer = bytearray(_BUFFER_BYTES)
        unconnected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        super().__init__(unconnected, receive_limit_s=deadline_s, send_limit_s=deadline_s)
        table = -1
        try:
            connect_unix(self.socket, path)
            hello = local_wire.hello(identity, version)
            self.send_request(local_wire.request(local_wire.HELLO, body=hello))
            body, table = self.receive_answer(local_wire.HELLO, 0, expects_descriptor=True)
            self.rank, chunks = local_wire.parse_welcome(body)
            if table < 0:
                raise ExchangeFailed("the master gave no table of owners")
            self.owners = OwnerTableView(table, chunks)
        except (OSError, DieselError) as error:
            self.close()
            raise ExchangeFailed(str(error)) from error
        except BaseException:
            self.close()
            raise
        finally:
            if table >= 0:
                os.close(table)

    def send_request(self, request: bytes, *, descriptor: int = -1) -> None:
        """`descriptor` -1: none. Raises ExchangeFailed."""
        try:
            if descriptor >= 0:
                sent = socket.send_fds(self.socket, [request], [descriptor])
                request = request[sent:]
            if request:
                self.socket.sendall(request)
        except BlockingIOError as error:
            raise ExchangeFailed("the master does not answer") from error
        except OSError as error:
            raise ExchangeFailed(str(error)) from error

    def receive_answer(
        self, kind: int, count: int, *, expects_descriptor: bool = False
    ) -> tuple[memoryview, int]:
        """The answer's body, which is valid until the next request is sent, and the descriptor that
        came with it (the caller closes it), or -1. Raises ExchangeFailed, RequestRejected."""
        descriptor = -1
        try:
            room = memoryview(self._buffer)
            if expects_descriptor:
                got, descriptor = self._receive_with_descriptor(room)
            else:
                got = self.socket.recv_into(room)
            while got < wire.HEAD_BYTES:
                got += self._receive_more(room[got:])
            head = local_wire.parse_answer(room[: wire.HEAD_BYTES], kind, count)
            end = wire.HEAD_BYTES + head.body_bytes
            if end > len(room):
                room = memoryview(bytearray(end))
                room[:got] = self._buffer[:got]
            while got < end:
                got += self._receive_more(room[got:end])
            if got > end:
                raise ExchangeFailed("the master sent more bytes than its answer has")
            proper, self.revoked = local_wire.split_revoked(head, room[wire.HEAD_BYTES : end])
            if head.status != local_wire.OK:
                raise RequestRejected(local_wire.parse_refusal(proper))
        except BaseException as error:
            if descriptor >= 0:
                os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise ExchangeFailed("the master does not answer") from error
            if isinstance(error, OSError | DieselError):
                raise ExchangeFailed(str(error)) from error
            raise
        return proper, descriptor

    def _receive_more(self, room: memoryview) -> int:
        got = self.socket.recv_into(room)
        if not got:
            raise ExchangeFailed("the master has ended")
        return got

    def _receive_with_descriptor(self, room: memoryview) -> tuple[int, int]:
        got, control, flags, _ = self.socket.recvmsg_into(
            [room], _CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC
        )
        descriptors = received_descriptors(control)
        for unexpected in descriptors[1:]:
            os.close(unexpected)
        descriptor = descriptors[0] if descriptors else -1
        if flags & socket.MSG_CTRUNC:
            if descriptor >= 0:
                os.close(descriptor)
            raise ExchangeFailed("a descriptor was lost: this process can open no more files")
        return got, descriptor

    def detach(self) -> socket.socket:
        return socket.socket(fileno=self.socket.detach())


class GivenChunk(NamedTuple):
    descriptor: int  # the receiver closes it
    is_file: bool
    """A file of the disk cache, with unchecked bytes, which anybody may truncate. Otherwise sealed
    memory, which the master has checked."""


class MasterLink:
    """A link to one master, for one version of one dataset."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        identity: UUID,
        version: int,
        mapped: MappedChunks,
        *,
        deadline_s: float = DEADLINE_S,
        pause_s: float = PAUSE_S,
        restart: Callable[[bool], bool] | None = None,
    ) -> None:
        """`mapped` has the chunks that the master has pinned for this process; the link releases
        them if the master revokes them or has ended. `restart` starts a master in place of a killed
        one, and returns whether it did. It is called in a thread whenever connecting fails, with
        whether a master has ever answered this link."""
        self._path = os.fspath(path)
        self._identity = identity
        self._version = version
        self._mapped = mapped
        self._deadline_s = deadline_s
        self._breaker = CircuitBreaker(1, pause_s, PAUSE_S_MAX)
        self._last_warning = self._last_restart_error = ""
        self._closed = self._is_ending = False
        self._restart = restart
        self.rank = -1  # the master's, from its first answer on
        self.owners: OwnerTableView | None = None
        """Belongs to the last master that answered; None before."""

        self.exchanged_s = 0.0  # time.monotonic() after the last exchange
        self.counts = {"requests": 0, "failures": 0, "skipped": 0}
        self._make_locks()
        start_anew_in_forks(self)

    def start_anew(self) -> None:
        for connection in list(self._open):
            connection.close_copy()
        self._make_locks()

    def _make_locks(self) -> None:
        self._lock = threading.Lock()
        self._breaker.cancel(self._breaker.ticket)  # only the parent's thread goes on connecting
        self._restarting = threading.Lock()
        self._idle: list[MasterConnection] = []
        self._open: weakref.WeakSet[MasterConnection] = weakref.WeakSet()

    def connect(self) -> bool:
        """Returns whether there is a connection. Other calls connect by themselves."""
        connection = self._acquire()
        if connection is None:
            return False
        self._release(connection)
        return True

    @property
    def is_connected(self) -> bool:
        """When the last connection closes, the master unpins all chunks of this process."""
        return bool(self._open)

    def stop_connecting(self) -> None:
        """Make no new connection, and start no master; open connections are used until `close`."""
        with self._lock:
            self._is_ending = True

    def retry(self) -> None:
        """End a pause of the circuit breaker."""
        with self._lock:
            self._breaker.record_success()
        self._last_warning = ""

    def pin(self, chunk: int, *, fetch: bool, takes_file: bool = False) -> "GivenChunk | None":
        """Returns None if the master does not give the chunk, or does not answer. `fetch`: fetch an
        absent chunk. `takes_file`: a file is welcome, too."""
        flags = (wire.LOAD if fetch else 0) | (local_wire.FILE if takes_file else 0)
        answer = self._request(
            local_wire.PIN, 1, local_wire.chunks_body([chunk]), is_read=True,
            flags=flags, expects_descriptor=True,
        )  # fmt: skip
        if answer is None:
            return None
        body, descriptor = answer
        try:
            given = local_wire.parse_pinned(body)
            if given == local_wire.LENT and not takes_file:
                raise CorruptError("a file that nobody wants")
            if given != local_wire.ABSENT and descriptor >= 0:
                return GivenChunk(descriptor, is_file=given == local_wire.LENT)
        except DieselError as error:
            log.error("the task's master violates the protocol: %s", error)
        if descriptor >= 0:
            os.close(descriptor)
        return None

    def task_view(self) -> local_wire.TaskView | None:
        answer = self._request(local_wire.MEMBERS, 0, b"", is_read=True)
        try:
            return None if answer is None else local_wire.parse_members(answer[0])
        except DieselError as error:
            log.error("the task's master violates the protocol: %s", error)
            return None

    def open_data(self) -> socket.socket:
        """A blocking connection for READs. Raises MetadataError."""
        ticket = self._admit() if self.connect() else 0
        connection = self._open_connection(ticket) if ticket else None
        if connection is None:
            raise MetadataError("this node's master does not answer")
        is_ready = False
        try:
            connection.send_request(local_wire.request(local_wire.DATA))
            connection.receive_answer(local_wire.DATA, 0)
            is_ready = True
        except ExchangeFailed as error:
            self._note_failure(ticket, str(error))
            raise MetadataError(str(error)) from error
        finally:
            with self._lock:
                self._open.discard(connection)
            if not is_ready:
                connection.close()
        self._note_answer()
        return connection.detach()

    def send_plan(self, body: bytes) -> int | None:
        """Send a message about plans. Returns the answer's status; None if none came."""
        answer = self._request(local_wire.PLAN, len(body), body)
        try:
            return None if answer is None else local_wire.parse_plan_status(answer[0])
        except DieselError as error:
            log.error("the task's master violates the protocol: %s", error)
            return None

    def notify(self, kind: int, count: int, body: bytes) -> bool:
        """Send a request whose answer has no content; returns whether it came."""
        return self._request(kind, count, body) is not None

    def switch_version(self, body: bytes, snapshot: int) -> bool:
        """Announce another version: `body` is the request's, `snapshot` a descriptor of its
        snapshot. Returns whether the master accepted it. The connection then belongs to the new
        version and is closed, since this link belongs to the old one."""
        kind = local_wire.SWITCH_VERSION
        return self._request(kind, 0, body, descriptor=snapshot, closes=True) is not None

    def stats(self) -> bytes:
        """Returns JSON; empty if the master does not answer."""
        answer = self._request(local_wire.STATS, 0, b"")
        return b"" if answer is None else answer[0]

    def return_unmapped(self) -> None:
        """Unpin the chunks that this process has unmapped, and learn which ones are revoked."""
        while True:
            chunks = self._mapped.take_unmapped()
            sent = chunks[: local_wire.UNPINNED_MAX]
            if not self.notify(local_wire.UNPIN, len(sent), local_wire.chunks_body(sent)):
                return  # the master unpins them after the last connection
            if not self._mapped.has_unmapped:
                return

    def close(self) -> None:
        """Connections in use close when they are released. May be called again."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def __del__(self) -> None:
        for connection in getattr(self, "_idle", ()):
            connection.close()

    def _request(
        self,
        kind: int,
        count: int,
        body: bytes,
        *,
        is_read: bool = False,
        flags: int = 0,
        descriptor: int = -1,
        expects_descriptor: bool = False,
        closes: bool = False,
    ) -> tuple[bytes, int] | None:
        """Returns None if the master does not answer or rejects the request. `is_read`: see
        `_acquire`; `closes`: do not keep the connection."""
        connection = self._acquire(is_read=is_read)
        if connection is None:
            return None
        ticket = self._breaker.ticket
        request = local_wire.request(kind, count, body, flags)
        if not self._send(connection, ticket, request, descriptor=descriptor):
            return None
        answer = self._answer(
            connection, ticket, kind, count, expects_descriptor=expects_descriptor
        )
        if answer is None:
            return None
        received = bytes(answer[0]), answer[1]
        if closes:
            with self._lock:
                self._open.discard(connection)
            connection.close()
        else:
            self._release(connection)
        return received

    def _send(
        self, connection: MasterConnection, ticket: int, request: bytes, *, descriptor: int = -1
    ) -> bool:
        self.counts["requests"] += 1
        try:
            connection.send_request(request, descriptor=descriptor)
        except ExchangeFailed as error:
            self._discard(connection, ticket, str(error))
            return False
        except BaseException:  # from a signal handler: the exchange's state is unknown
            connection.close()
            raise
        return True

    def _answer(
        self,
        connection: MasterConnection,
        ticket: int,
        kind: int,
        count: int,
        *,
        expects_descriptor: bool = False,
    ) -> tuple[memoryview, int] | None:
        try:
            answer = connection.receive_answer(kind, count, expects_descriptor=expects_descriptor)
        except RequestRejected as error:  # the connection stays usable
            self._release(connection)
            self._note_failure(ticket, str(error))
            return None
        except ExchangeFailed as error:
            self._discard(connection, ticket, str(error))
            return None
        except BaseException:  # as above
            connection.close()
            raise
        if connection.revoked:
            self._mapped.release(connection.revoked)
        if kind in (local_wire.PIN, local_wire.MEMBERS):
            self._note_answer()
        return answer

    def _note_answer(self) -> None:
        if self._breaker.state(0) is not BreakerState.CLOSED:
            log.info("the task's master answers again")
            self.retry()

    def _acquire(self, *, is_read: bool = True) -> MasterConnection | None:
        """A connection for the caller alone, or None. During a pause, reads get none, and other
        requests (`is_read` is False) get an idle one, if any."""
        with self._lock:
            if self._closed and not self._idle:
                return None
            is_paused = is_read and self._breaker.is_open(time.monotonic())
            if self._idle and not is_paused:
                return self._idle.pop()
        ticket = self._admit()
        return self._open_connection(ticket) if ticket else None

    def _admit(self) -> int:
        with self._lock:
            is_over = self._closed or self._is_ending
            ticket = 0 if is_over else self._breaker.admit(time.monotonic())
        self.counts["skipped"] += not ticket
        return ticket

    def _open_connection(self, ticket: int) -> MasterConnection | None:
        """Returns None if the master does not answer; then a killed master is restarted, in a
        thread."""
        try:
            connection = MasterConnection(
                self._path, self._identity, self._version, self._deadline_s
            )
        except ExchangeFailed as error:
            self._note_failure(ticket, str(error))
            if self._restart is not None:
                threading.Thread(
                    target=self._run_restart, name="diesel-restart", daemon=True
                ).start()
            return None
        finally:
            with self._lock:  # only an answer closes the breaker
                self._breaker.cancel(ticket)
        stale: list[MasterConnection] = []
        with self._lock:
            before = self.owners
            if not self._open or before is None or before.inode != connection.owners.inode:
                # The first connection, or that of a new master
                stale, self._idle = self._idle, []
                for each in stale:
                    self._open.discard(each)
                self._mapped.forget_all()
                self.owners = connection.owners
            self._open.add(connection)
        for each in stale:
            each.close()
        self.rank = connection.rank
        return connection

    def _run_restart(self) -> None:
        assert self._restart is not None
        if self._restarting.acquire(blocking=False):
            try:
                if self._restart(self.rank >= 0):
                    self.retry()
                self._last_restart_error = ""
            except DieselError as error:
                if str(error) != self._last_restart_error:
                    log.warning("this node's master of the task could not be started: %s", error)
                self._last_restart_error = str(error)
            finally:
                self._restarting.release()

    def _release(self, connection: MasterConnection) -> None:
        self.exchanged_s = time.monotonic()
        with self._lock:
            if not self._closed and len(self._idle) < IDLE_CONNECTIONS_MAX:
                self._idle.append(connection)
                return
            self._open.discard(connection)
        connection.close()

    def _discard(self, connection: MasterConnection, ticket: int, why: str) -> None:
        """The idle connections, which lead to the same master, are closed, too."""
        connection.close()
        with self._lock:
            self._open.discard(connection)
            idle, self._idle = self._idle, []
            for each in idle:
                self._open.discard(each)
        for each in idle:
            each.close()
        self._note_failure(ticket, why)

    def _note_failure(self, ticket: int, why: str) -> None:
        self.counts["failures"] += 1
        with self._lock:
            if not self._breaker.record_failure(ticket, time.monotonic()):
                return
        if why and why != self._last_warning:
            log.warning("the task's master cannot be asked (%s): reading from the store", why)
            self._last_warning = why
