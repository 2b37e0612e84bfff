"""A reader's connections to the masters that own the chunks it reads (`PEERS.md`, section 3): one
for each node, made when it is first needed.

An `OwnerLink` sends READs to one master; several may be in flight. It limits the time of an answer,
and has a circuit breaker (`../../net/breaker.py`). It raises no error: without an answer, the
caller gets None and reads from the store.

Concurrency: many threads. One of those that wait on a connection (the *leader*) receives the
answers for all. It receives each answer straight into the memory of the oldest unanswered request:
nearly always the answer is to that request; if not, it is moved. A forked child opens its own
connections.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from ...errors import CorruptError, DieselError, MetadataError
from ...format.entries import Bytes
from ...net.breaker import PeerBreaker
from ...net.tls import TlsSocket
from .. import wire
from ..wire import HEAD_BYTES, PART_BYTES, READ, Parts
from .request_socket import RequestSocket, start_anew_in_forks

log = logging.getLogger("diesel.task")

CONNECT_WAIT_S = 2.5
"""How long a reader waits for a connection. The attempt goes on after that."""

UNANSWERED_BYTES_MAX = 64 << 10
"""The most bytes of unanswered requests. They fit in the sockets' buffers, so sending never waits
for a master that waits for this reader."""

_TICK_S = 0.05  # how often a waiting thread checks its deadline
_SEND_LIMIT_S = 1.0
_SCRATCH_BYTES = 64 << 10  # longer answers have their own memory
_SINGLE_HEAD = wire.SINGLE_ANSWER.size
_SAMPLED = 8  # one in this number of single reads is timed
_SEND_WAIT_S = 1.0  # for the thread that sends; a signal handler may have interrupted it
_IDS = 1 << 32


class _ConnectionLost(Exception):
    """The master or another thread has closed the connection."""


_SomeParts = Parts | tuple[int, int, int]


class PendingRead:
    """A READ that was sent, and its answer once `is_done`."""

    __slots__ = (
        "connection", "count", "is_done", "is_working", "number", "parts", "request_bytes", "room",
        "size", "ticket", "waiter",
    )  # fmt: skip

    def __init__(
        self,
        connection: "_OwnerConnection",
        number: int,
        parts: "_SomeParts",
        size: int,
        ticket: int,
    ) -> None:
        self.connection = connection
        self.number = number
        self.parts = parts
        self.count = count = 1 if isinstance(parts, tuple) else len(parts)
        self.request_bytes = HEAD_BYTES + count * PART_BYTES
        self.size = size
        self.ticket = ticket
        # The whole answer: head, statuses, payload. numpy does not fill it with zeros
        self.room = np.empty(HEAD_BYTES + count + size, np.uint8).data
        self.is_done = self.is_working = False
        self.waiter: threading.Lock | None = None  # held while its thread waits for the leader


Answer = tuple[memoryview, bytes]
"""The bytes of the given parts, joined; and a status for each part (`wire.py`), or none if all were
given."""


class _OwnerConnection(RequestSocket):
    """`pending`, `has_leader` and the counts of bytes are used under the link's lock, the other
    fields only by the leader."""

    def __init__(self, connected: socket.socket | TlsSocket) -> None:
        super().__init__(connected, receive_limit_s=_TICK_S, send_limit_s=_SEND_LIMIT_S)
        self.pending: dict[int, PendingRead] = {}
        self.has_leader = self.is_lost = False
        self.unanswered_bytes = self.payload_bytes = 0
        self.room: memoryview | None = None  # for the answer that is being received
        self.got = 0  # bytes in `room`
        self.carried = b""  # received bytes behind that answer

    def take_carried(self, room: memoryview) -> int:
        """Move bytes from behind another answer into `room`; returns their number."""
        carried = self.carried
        if not carried:
            return 0
        count = min(len(carried), len(room))
        room[:count] = carried[:count]
        self.carried = carried[count:]
        return count

    def close(self) -> None:
        """Threads that wait find out by `is_lost`."""
        self.is_lost = True
        super().close()


class OwnerLink:
    """A link to one master, for parts of chunks of one version."""

    def __init__(
        self,
        rank: int,
        connect: Callable[[], socket.socket | TlsSocket],
        *,
        flags: int = wire.LOAD,
        breaker: PeerBreaker | None = None,
    ) -> None:
        """`connect` makes an authenticated, blocking connection, or raises DieselError. `flags` are
        sent with each READ (`wire.py`)."""
        self.rank = rank
        self.is_refused = False
        """The master has refused this reader at the last attempt to connect."""

        self.counts = dict.fromkeys(
            ("connections", "requests", "bytes", "timed_out", "failed", "skipped", "damaged"), 0
        )
        self._connect = connect
        self._flags = flags
        self._breaker = breaker or PeerBreaker()
        self._singles = 0
        self._is_closed = False
        self._is_paused = False
        self._make_locks()
        start_anew_in_forks(self)

    def start_anew(self) -> None:
        connection = self._connection
        self._make_locks()
        if connection is not None:
            connection.is_lost = True
            connection.close_copy()

    def _make_locks(self) -> None:
        self._lock = threading.RLock()  # reentrant: a signal handler may read
        self._sending = threading.Lock()  # taken before `_lock` if both are needed
        self._connection: _OwnerConnection | None = None
        self._attempt: threading.Event | None = None  # set when the attempt has ended
        self._wait_until_s = 0.0
        self._last_number = 0
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))  # under `_sending`

    def begin(self, parts: _SomeParts, size: int) -> PendingRead | None:
        """Send a READ of parts, or of one part (chunk, start, bytes): `size` bytes in all, no part
        empty, within the limits of one request. Returns the request, for `finish`; None if the
        master cannot be asked now."""
        ticket = self._breaker.ticket
        connection = self._connection
        if connection is None or connection.is_lost or not self._breaker.is_clean:
            with self._lock:
                ticket = self._breaker.admit(time.monotonic())
            if not ticket:
                self.counts["skipped"] += 1
                return None
            connection = self._connected(ticket)
            if connection is None:
                return None
        if connection.pending and not self._make_room(connection, parts):
            self._note_failure(ticket, "earlier requests are not answered")
            return None
        if not self._sending.acquire(timeout=_SEND_WAIT_S):
            return None
        try:
            self._last_number = number = (self._last_number + 1) % _IDS
            if isinstance(parts, tuple):
                request = wire.SINGLE.pack(number, READ, self._flags, 0, 1, 0, *parts)
            else:
                request = wire.request(number, READ, self._flags, parts)
            pending = self._register(PendingRead(connection, number, parts, size, ticket))
            connection.send(request)
        except OSError as error:
            self._lose(connection, str(error))
        except BaseException:  # from a signal handler: some of the request may have been sent
            self._lose(connection, "interrupted")
            raise
        finally:
            self._sending.release()
        self.counts["requests"] += 1
        return pending

    def read_one(self, chunk: int, start: int, size: int) -> Bytes | None:
        """The bytes of one part, which must not be empty; None if the master does not give them. A
        small part, while no request is pending on the connection, takes a short way: one send and
        one receive, without a `PendingRead`. If the answer is then incomplete, the request goes on
        like any other."""
        connection = self._connection
        if (
            connection is None
            or size > _SCRATCH_BYTES - _SINGLE_HEAD
            or not self._breaker.is_clean
            or not self._sending.acquire(blocking=False)
        ):
            return self._read_one_slowly((chunk, start, size))
        length, got, pending = _SINGLE_HEAD + size, 0, None
        try:
            if not connection.pending:
                self._last_number = number = (self._last_number + 1) % _IDS
                scratch = self._scratch
                begun_s = 0.0 if number % _SAMPLED else time.monotonic()
                connection.send(
                    wire.SINGLE.pack(number, READ, self._flags, 0, 1, 0, chunk, start, size)
                )
                try:
                    got = connection.receive(scratch[:length])
                except OSError:
                    got = 0
                if got == length and wire.SINGLE_ANSWER.unpack_from(scratch)[::5] == (number, size):
                    if begun_s:
                        self._breaker.record_latency(time.monotonic() - begun_s, size)
                    self._singles += 1
                    return bytes(scratch[_SINGLE_HEAD:length])
                part, ticket = (chunk, start, size), self._breaker.ticket
                pending = self._register(PendingRead(connection, number, part, size, ticket))
                pending.room[:got] = scratch[:got]
                connection.room, connection.got = pending.room, got
        except OSError as error:  # of `send`
            self._lose(connection, str(error))
        except BaseException:  # from a signal handler: some of the answer may be lost
            self._lose(connection, "interrupted")
            raise
        finally:
            self._sending.release()
        if pending is None:
            return self._read_one_slowly((chunk, start, size))
        answer = self.finish(pending)
        return None if answer is None or answer[1] else answer[0]

    def _register(self, pending: PendingRead) -> PendingRead:
        connection = pending.connection
        with self._lock:
            connection.pending[pending.number] = pending
            connection.unanswered_bytes += pending.request_bytes
            connection.payload_bytes += pending.size
        return pending

    def _read_one_slowly(self, part: tuple[int, int, int]) -> Bytes | None:
        pending = self.begin(part, part[2])
        answer = None if pending is None else self.finish(pending)
        return None if answer is None or answer[1] else answer[0]

    def _make_room(self, connection: _OwnerConnection, parts: _SomeParts) -> bool:
        """Wait for answers until a READ of `parts` may be sent. Returns False if they are late."""
        count = 1 if isinstance(parts, tuple) else len(parts)
        most = max(UNANSWERED_BYTES_MAX - HEAD_BYTES - count * PART_BYTES, 0)
        while connection.pending and (
            connection.unanswered_bytes > most or len(connection.pending) >= wire.REQUESTS_MAX
        ):
            with self._lock:
                first = next(iter(connection.pending.values()), None)
            if first is not None and not self._wait(first, time.monotonic()):
                return False
        return True

    def finish(self, pending: PendingRead) -> Answer | None:
        """Returns None if no answer comes in time. If the connection was closed meanwhile, the
        request is sent once more."""
        begun_s = time.monotonic()
        is_here = pending.is_done or self._receive_alone(pending, begun_s)
        if is_here or self._wait(pending, begun_s):
            return self._answer(pending)
        if not pending.connection.is_lost:
            return None
        again = self.begin(pending.parts, pending.size)
        if again is None:
            return None
        if again.is_done or self._wait(again, time.monotonic()):
            return self._answer(again)
        if again.connection.is_lost:
            self._note_failure(again.ticket, "it closes the connection")
        return None

    def record_damage(self) -> None:
        """Bytes from this master did not match their checksum."""
        self.counts["damaged"] += 1
        with self._lock:
            is_over = self._breaker.record_damage(time.monotonic())
        if is_over:
            log.error("node %d sent damaged data three times: it is not asked for 60 s", self.rank)

    def close(self) -> None:
        """Make no other connection. May be called again."""
        self._is_closed = True
        connection = self._connection
        if connection is not None:
            self._lose(connection, "")

    def stats(self) -> dict[str, object]:
        connection = self._connection
        return {
            **self.counts,
            "requests": self.counts["requests"] + self._singles,
            "state": self._breaker.state(time.monotonic()).value,
            "connected": connection is not None and not connection.is_lost,
        }

    # Connecting

    def _connected(self, ticket: int) -> _OwnerConnection | None:
        """Returns None if there is no connection within `CONNECT_WAIT_S`. One thread connects, for
        all readers."""
        with self._lock:
            if self._connection is not None and not self._connection.is_lost:
                return self._connection
            attempt, now_s = self._attempt, time.monotonic()
            if attempt is None and not self._is_closed:
                attempt = self._attempt = threading.Event()
                self._wait_until_s = now_s + CONNECT_WAIT_S
                threading.Thread(
                    target=self._run_connect, args=(ticket, attempt), name="diesel-connect",
                    daemon=True,
                ).start()  # fmt: skip
            left_s = self._wait_until_s - now_s
        if attempt is None or not attempt.wait(max(left_s, 0.0)):
            return None
        return self._connection

    def _run_connect(self, ticket: int, attempt: threading.Event) -> None:
        connection, why = None, ""
        try:
            connection = _OwnerConnection(self._connect())
            self.is_refused = False
            self.counts["connections"] += 1
        except (DieselError, OSError) as error:
            why = str(error)
            self.is_refused = isinstance(error, DieselError) and not isinstance(
                error, MetadataError
            )
        except Exception as error:  # no failure of a master may be an error of a reader
            log.exception("unexpected error with node %d", self.rank)
            why = str(error)
        with self._lock:
            self._connection, self._attempt = connection, None
            is_closed = self._is_closed
            is_new = connection is None and self._breaker.record_refusal(ticket, time.monotonic())
        if is_closed and connection is not None:
            connection.close()
        attempt.set()
        if is_new:
            self._log_pause(why)

    def _lose(self, connection: _OwnerConnection, why: str) -> None:
        if why:
            log.debug("node %d: %s", self.rank, why)
        connection.close()
        with self._lock:
            if self._connection is connection:
                self._connection = None
            unanswered = list(connection.pending.values())
            connection.pending.clear()
            connection.unanswered_bytes = connection.payload_bytes = 0
        for each in unanswered:
            _wake(each)

    def _note_failure(self, ticket: int, why: str) -> None:
        self.counts["failed"] += 1
        with self._lock:
            is_open = self._breaker.record_failure(ticket, time.monotonic())
        if is_open:
            self._log_pause(why)

    def _log_pause(self, why: str) -> None:
        if not self._is_paused:
            log.warning("node %d is not asked for now: %s", self.rank, why)
        self._is_paused = True

    # Answers

    def _answer(self, pending: PendingRead) -> Answer | None:
        """`pending` is done. If its payload is shorter than the parts, some were not given."""
        room, count = pending.room, pending.count
        payload = room[HEAD_BYTES + count :]
        if len(payload) == pending.size:
            return payload.toreadonly(), b""
        statuses = bytes(room[HEAD_BYTES : HEAD_BYTES + count])
        return payload.toreadonly(), statuses

    def _receive_alone(self, pending: PendingRead, begun_s: float) -> bool:
        """Receive the answer to a connection's only request, if it comes in time and gives all
        parts; returns whether it did. If not, `_wait` goes on from the received bytes. Nearly all
        reads of several parts are answered here, so it has few operations."""
        connection, room = pending.connection, pending.room
        with self._lock:
            if (
                connection.has_leader
                or len(connection.pending) != 1
                or connection.room is not None
                or connection.carried
                or connection.is_lost
            ):
                return False
            connection.has_leader = True
        connection.room, connection.got = room, 0
        got, total, receive, is_usual = 0, len(room), connection.receive, False
        try:
            got = count = receive(room)
            is_usual = got >= HEAD_BYTES and wire.gives_all(
                room, pending.number, pending.count, pending.size
            )
            while is_usual and got < total and count:
                if self._is_late(connection, pending, begun_s):
                    break  # the master sends, but too slowly
                count = connection.receive_rest(room[got:])
                got += count
        except OSError:
            pass
        except BaseException:  # from a signal handler: bytes may be lost
            self._lose(connection, "interrupted")
            raise
        finally:
            connection.got = got
            with self._lock:
                if is_usual and got == total and not connection.is_lost:
                    connection.room = None
                    self._settle(pending)
                connection.has_leader = False
                if connection.pending:
                    self._end_lead(connection)
        if pending.is_done:
            self._note_success(pending, time.monotonic() - begun_s)
        return pending.is_done

    def _wait(self, pending: PendingRead, begun_s: float) -> bool:
        """Wait until the request is answered, also as the leader. Returns False if the answer is
        late (the time counts from `begun_s`), or the connection is lost."""
        connection = pending.connection
        is_over = False
        while not pending.is_done and not connection.is_lost and not is_over:
            waiter = None
            with self._lock:
                leads = not connection.has_leader
                if leads:
                    connection.has_leader = True
                elif not pending.is_done and not connection.is_lost:
                    waiter = pending.waiter = threading.Lock()
                    waiter.acquire()
            if leads:
                is_over = not self._lead(connection, pending, begun_s)
            elif waiter is not None:
                if not waiter.acquire(timeout=_TICK_S):
                    is_over = self._is_late(connection, pending, begun_s)
                pending.waiter = None
        if pending.is_done:
            self._note_success(pending, time.monotonic() - begun_s)
            return True
        if is_over and not connection.is_lost:
            self.counts["timed_out"] += 1
            if not pending.is_working:  # else the store is slow, and the master answers
                self._note_failure(pending.ticket, "it does not answer")
        return False

    def _note_success(self, pending: PendingRead, waited_s: float) -> None:
        self.counts["bytes"] += len(pending.room) - HEAD_BYTES - pending.count
        breaker = self._breaker
        if not pending.is_working:  # else the latency would be the store's
            breaker.record_latency(waited_s, pending.size)
        if not breaker.is_clean:
            with self._lock:
                breaker.record_success(pending.ticket)
        if self._is_paused:
            self._is_paused = False
            log.info("node %d answers again", self.rank)

    def _is_late(self, connection: _OwnerConnection, pending: PendingRead, begun_s: float) -> bool:
        limit_s = self._breaker.timeout_s(connection.payload_bytes)
        if pending.is_working:
            limit_s += wire.working_s(pending.count)
        return time.monotonic() - begun_s > limit_s

    def _lead(self, connection: _OwnerConnection, pending: PendingRead, begun_s: float) -> bool:
        """Be the leader until `pending` is answered; then a waiting thread takes over. Returns
        False if the answer is late. Any error ends the connection."""
        try:
            return self._receive_until(connection, pending, begun_s)
        except (OSError, _ConnectionLost) as error:
            self._lose(connection, str(error))
        except CorruptError as error:
            if not connection.is_lost:  # by another thread meanwhile
                self._lose(connection, error.message)
                with self._lock:
                    self._breaker.open(time.monotonic())
                log.error("node %d violates the protocol: %s", self.rank, error)
        except BaseException:  # from a signal handler: bytes may be lost
            self._lose(connection, "interrupted")
            raise
        finally:
            with self._lock:
                self._end_lead(connection)
        return True

    def _end_lead(self, connection: _OwnerConnection) -> None:
        """Give the leadership up, and wake a waiting thread to take it. The caller holds the
        lock."""
        connection.has_leader = False
        for each in connection.pending.values():
            if each.waiter is not None:
                _wake(each)
                return

    def _receive_until(
        self, connection: _OwnerConnection, pending: PendingRead, begun_s: float
    ) -> bool:
        """Returns False if the answer to `pending` is late. Raises OSError, _ConnectionLost,
        CorruptError."""
        receive = connection.receive
        while not pending.is_done:
            room, got = self._next_room(connection)
            answered, total = None, len(room)
            while True:
                if answered is None and got >= HEAD_BYTES:
                    answered, total = self._answered(connection, room)
                    if room is not answered.room:  # another request was answered first
                        _move(connection, answered.room, min(got, total))
                        room, got = answered.room, connection.got
                if answered is not None and got >= total:
                    self._complete(connection, answered, total)
                    break
                try:
                    count = 0
                    if connection.carried:
                        count = connection.take_carried(room[got:total])
                    count = count or receive(room[got:total])
                except BlockingIOError:
                    if self._is_late(connection, pending, begun_s):
                        return False
                    continue
                if not count:
                    raise _ConnectionLost("the master closed the connection")
                got += count
                connection.got = got
                if got < total and self._is_late(connection, pending, begun_s):
                    return False
        return True

    def _next_room(self, connection: _OwnerConnection) -> tuple[memoryview, int]:
        if connection.room is None:
            with self._lock:
                first = next(iter(connection.pending.values()), None)
            if first is None:
                raise CorruptError("an answer without a request")
            connection.room, connection.got = first.room, 0
        return connection.room, connection.got

    def _answered(self, connection: _OwnerConnection, room: memoryview) -> tuple[PendingRead, int]:
        head = wire.parse_answer(room)
        answered = connection.pending.get(head.id)
        if answered is None:
            raise CorruptError("an answer without a request")
        wire.check_answer(head, READ, answered.count, answered.size)
        return answered, HEAD_BYTES + head.counted + head.payload_bytes

    def _complete(self, connection: _OwnerConnection, answered: PendingRead, total: int) -> None:
        """Keeps the bytes that were received behind the answer."""
        room, got = answered.room, connection.got
        if got > total:
            connection.carried = bytes(room[total:got]) + connection.carried
        connection.room, connection.got = None, 0
        if total == HEAD_BYTES:  # WORKING: any other answer has statuses
            answered.is_working = True
            return
        if total != len(room):  # some parts were not given
            wire.check_statuses(room, np.array(answered.parts, np.uint32).reshape(-1, 3), total)
        answered.room = room[:total]
        with self._lock:
            if answered.number not in connection.pending:
                raise _ConnectionLost("the connection was closed")
            self._settle(answered)
        _wake(answered)

    def _settle(self, answered: PendingRead) -> None:
        """The caller holds the lock."""
        connection = answered.connection
        del connection.pending[answered.number]
        connection.unanswered_bytes -= answered.request_bytes
        connection.payload_bytes -= answered.size
        answered.is_done = True


def _move(connection: _OwnerConnection, room: memoryview, size: int) -> None:
    """The first `size` received bytes belong to the answer in `room`: move them there, and the
    others to `carried`."""
    before, got = connection.room, connection.got
    assert before is not None
    room[:size] = before[:size]
    connection.carried = bytes(before[size:got]) + connection.carried
    connection.room, connection.got = room, size


def _wake(pending: PendingRead) -> None:
    waiter = pending.waiter
    if waiter is not None:
        with suppress(RuntimeError):  # it was woken already
            waiter.release()
