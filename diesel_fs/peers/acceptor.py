"""The accepting end of connections between the masters of a task: it lets other masters in and
answers their requests (`PEERS.md`, section 3).

It limits connections, handshakes and requests in flight, and keeps the peers' turns fair. The bytes
of answers come from an `AnswerSource`, which is the `Master` of this node.

Concurrency: trio's. The task of a connection answers at once what is in memory. A request that has
to wait for a disk or a store gets a task of its own, so answers leave in any order, each in one
piece. An answer is sent from the memory where its parts lie: the source keeps that memory unchanged
as long as a view of it exists.
"""

import errno
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, NoReturn, Protocol

import numpy as np
import trio

from ..errors import CorruptError, DieselError
from ..format.entries import Bytes
from ..net.channel import Channel, ConnectionClosed, FrameReader, TlsChannel
from ..urls import HostPort
from . import wire
from .handshake import HELLO_S, HandshakeRejected, LocalIdentity, accept_tls, authenticate
from .wire import (
    ALL_GIVEN,
    FAILED,
    GIVEN,
    HEAD_BYTES,
    LOAD,
    PART_BYTES,
    WORKING,
    Parts,
    RequestHead,
)

log = logging.getLogger("diesel.task")

IDLE_S = 300.0
"""A connection without requests for so long is closed."""

PENDING_HANDSHAKES_MAX, PENDING_HANDSHAKES_PER_ADDRESS = 256, 16
"""Connections whose handshake has not ended, in all and from one address. Beyond that the oldest is
closed: a real master's handshake takes milliseconds."""

CONNECTIONS_MAX = 4096
"""Connections after their handshake: one for each rank."""

_BUFFER_BYTES = 8 << 10  # some hundred small requests; it grows for a larger one
_TURN_REQUESTS, _TURN_BYTES = 32, 4 << 20  # of one connection, before other tasks run
_LOG_LINES_MAX, _LOG_PERIOD_S = 20, 60.0  # so many lines about rejections in each period
_IDLE_CHECK_S = 10.0
_ACCEPT_PAUSE_S = 0.1  # after one of these errors; the next connection waits in the kernel
_NO_RESOURCES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_TOO_MANY = "too many connections"


class AnswerSource(Protocol):
    """Where the bytes of answers come from."""

    def answer_from_memory(self, parts: Parts) -> list[memoryview] | None:
        """The bytes of all parts, in their order, where all are in memory; else None. Never waits.
        `parts` is valid during the call only."""

    async def answer(
        self, rank: int, parts: Parts, *, load: bool
    ) -> tuple[bytes, list[memoryview]]:
        """A status for each part, and the bytes of the parts with status `GIVEN`."""


class _PendingHandshake(NamedTuple):
    """A connection whose handshake has not ended."""

    host: str
    scope: trio.CancelScope


class _Connection:
    """A connection from another master, after its handshake. Cancelling `scope` ends it."""

    def __init__(
        self, channel: Channel, rank: int, me: LocalIdentity, scope: trio.CancelScope
    ) -> None:
        self.channel = channel
        self.rank = rank
        self.me = me
        self.scope = scope
        self.served = 0  # requests so far
        self.served_at_check = 0  # at the last check whether the connection is idle
        self.idle_since_s = trio.current_time()
        self.in_flight = 0  # requests that have a task of their own
        self._in_flight_bytes = 0
        self._released = trio.lowlevel.ParkingLot()

    async def acquire(self, size: int) -> None:
        """Wait until another request, whose answer has `size` bytes, may be in flight."""
        while self.in_flight >= wire.REQUESTS_MAX or (
            self.in_flight and self._in_flight_bytes + size > wire.IN_FLIGHT_BYTES_MAX
        ):
            await self._released.park()
        self.in_flight += 1
        self._in_flight_bytes += size

    def release(self, size: int) -> None:
        """A request that `acquire` let in has been answered."""
        self.in_flight -= 1
        self._in_flight_bytes -= size
        self._released.unpark_all()

    async def send(self, number: int, kind: int, statuses: bytes, views: Sequence[Bytes]) -> None:
        """Send the answer to request `number`; returns when it has left. Raises
        ConnectionClosed."""
        size = sum(map(len, views))
        head = wire.answer_head(number, kind, statuses, size)
        if not self.channel.send_now([head, *views], len(head) + size):
            await self.channel.drain()


class Acceptor:
    """All connections from other masters to this one."""

    def __init__(
        self,
        me: LocalIdentity,
        answers: AnswerSource,
        *,
        connections_max: int = CONNECTIONS_MAX,
        pending_handshakes_max: int = PENDING_HANDSHAKES_MAX,
        pending_handshakes_per_address: int = PENDING_HANDSHAKES_PER_ADDRESS,
        make_channel: Callable[[socket.socket, LocalIdentity], Channel] | None = None,
    ) -> None:
        """`make_channel` makes the channel of an accepted connection: with TLS where this master
        has a certificate."""
        self._me = me
        self._source = answers
        self._connections_max = connections_max
        self._pending_max = pending_handshakes_max
        self._pending_per_address = pending_handshakes_per_address
        self._pending: dict[_PendingHandshake, None] = {}  # the oldest first
        self._connections: dict[int, _Connection] = {}
        self._make_channel = make_channel or _make_channel
        self._log_lines = 0  # about rejections, since the time below
        self._log_period_began_s = float("-inf")
        self._counts = dict.fromkeys(
            "accepted rejected requests parts bytes from_memory".split(), 0
        )

    async def serve(self, listeners: Sequence[socket.socket]) -> None:
        """Accept and answer until cancelled. The caller closes the listeners."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._close_idle)
            for each in listeners:
                each.setblocking(False)
                nursery.start_soon(self._accept, each, nursery)

    def set_identity(self, me: LocalIdentity) -> None:
        """This master has another version of the dataset, or another secret. All connections end;
        their masters connect again."""
        self._me = me
        for connection in list(self._connections.values()):
            connection.scope.cancel()

    def stats(self) -> dict[str, int]:
        """Counters, and what is open now."""
        return {
            **self._counts,
            "connections": len(self._connections),
            "pending_handshakes": len(self._pending),
            "in_flight": sum(each.in_flight for each in self._connections.values()),
        }

    # Connections

    async def _accept(self, listener: socket.socket, nursery: trio.Nursery) -> NoReturn:
        listening = trio.socket.from_stdlib_socket(listener)
        while True:
            try:
                accepted, peer = await listening.accept()
            except OSError as error:
                if error.errno in _NO_RESOURCES:
                    log.error("cannot accept connections: %s", error.strerror)
                    await trio.sleep(_ACCEPT_PAUSE_S)
                continue
            plain = socket.socket(fileno=accepted.detach())
            nursery.start_soon(self._serve, plain, HostPort(str(peer[0]), int(peer[1])))

    async def _serve(self, accepted: socket.socket, remote: HostPort) -> None:
        """Serve one connection from its handshake to its end. An error on it affects no other
        connection."""
        me = self._me
        channel = None
        try:
            channel = self._make_channel(accepted, me)
            if len(self._connections) >= self._connections_max:
                reply = b"" if me.certificate is not None else wire.refusal(_TOO_MANY)
                raise HandshakeRejected(_TOO_MANY, reply)
            with trio.CancelScope() as scope:
                rank = await self._handshake(channel, me, remote.host, scope)
                if me is not self._me:
                    raise HandshakeRejected("this master has switched to another version")
                await self._serve_requests(_Connection(channel, rank, me, scope), remote)
        except HandshakeRejected as rejected:
            self._log_rejection(str(remote), rejected.why)
            if rejected.reply and channel is not None:
                with suppress(ConnectionClosed):
                    channel.send_now([rejected.reply], len(rejected.reply))
                    await channel.half_close()
        except ConnectionClosed as closed:
            log.debug("%s: %s", remote, closed)
        except Exception:
            log.exception("unexpected error on a connection from %s", remote)
        finally:
            if channel is not None:
                channel.close()
            accepted.close()

    async def _handshake(
        self, channel: Channel, me: LocalIdentity, host: str, scope: trio.CancelScope
    ) -> int:
        """The rank of the connector, authenticated within `HELLO_S`. Raises HandshakeRejected."""
        pending = _PendingHandshake(host, scope)
        of_same_host = [each for each in self._pending if each.host == host]
        if len(of_same_host) >= self._pending_per_address:
            self._drop(of_same_host[0])
        elif len(self._pending) >= self._pending_max:
            self._drop(next(iter(self._pending)))
        self._pending[pending] = None
        try:
            with trio.fail_after(HELLO_S):
                await accept_tls(channel)
                return await authenticate(channel, me)
        except trio.TooSlowError:
            raise HandshakeRejected(f"no hello within {HELLO_S:g} s") from None
        finally:
            self._pending.pop(pending, None)

    def _drop(self, pending: _PendingHandshake) -> None:
        del self._pending[pending]
        pending.scope.cancel()
        self._log_rejection(pending.host, _TOO_MANY)

    def _log_rejection(self, remote: str, why: str) -> None:
        """Count a rejection, and log it unless there are very many."""
        self._counts["rejected"] += 1
        now_s = trio.current_time()
        if now_s - self._log_period_began_s > _LOG_PERIOD_S:
            self._log_lines, self._log_period_began_s = 0, now_s
        self._log_lines += 1
        if self._log_lines <= _LOG_LINES_MAX:
            log.warning("refused from=%s why=%r", remote, why)
        elif self._log_lines == _LOG_LINES_MAX + 1:
            log.warning("many more connections were refused; stats() counts them")

    async def _close_idle(self) -> NoReturn:
        while True:
            await trio.sleep(_IDLE_CHECK_S)
            now_s = trio.current_time()
            for each in list(self._connections.values()):
                if each.served != each.served_at_check or each.in_flight:
                    each.served_at_check, each.idle_since_s = each.served, now_s
                elif now_s - each.idle_since_s >= IDLE_S:
                    each.scope.cancel()

    # Requests

    async def _serve_requests(self, connection: _Connection, remote: HostPort) -> None:
        previous = self._connections.get(connection.rank)
        if previous is not None:  # that master has connected again, and reads there no more
            previous.scope.cancel()
        self._connections[connection.rank] = connection
        self._counts["accepted"] += 1
        try:
            async with trio.open_nursery() as nursery:
                try:
                    await self._answer(connection, nursery)
                except ConnectionClosed as closed:
                    log.debug("master %d at %s: %s", connection.rank, remote, closed)
                except CorruptError as error:
                    self._log_rejection(str(remote), f"master {connection.rank}: {error.message}")
                nursery.cancel_scope.cancel()
        finally:
            if self._connections.get(connection.rank) is connection:
                del self._connections[connection.rank]

    async def _answer(self, connection: _Connection, nursery: trio.Nursery) -> NoReturn:
        """Answer requests, one after the other. Raises ConnectionClosed, CorruptError."""
        channel, sizes, source = connection.channel, connection.me.sizes, self._source
        reader = FrameReader(channel, _BUFFER_BYTES)
        counts = self._counts
        turn_requests = turn_bytes = 0
        while True:
            reader.begin_frame()
            await reader.fill_buffer(HEAD_BYTES)
            head = wire.parse_request(reader.buffer, reader.start)
            await reader.fill_buffer(HEAD_BYTES + head.counted * PART_BYTES)
            start = reader.start + HEAD_BYTES
            reader.start = start + head.counted * PART_BYTES
            connection.served += 1
            size = 0
            if head.kind == wire.READ:
                parts, size = wire.parse_parts(reader.buffer, head.counted, sizes, start=start)
                views = source.answer_from_memory(parts)
                if views is None:
                    parts = parts.copy()
                    await connection.acquire(size)
                    nursery.start_soon(self._answer_later, connection, head, parts, size)
                else:
                    counts["from_memory"] += 1
                    answer = wire.answer_head(head.id, wire.READ, ALL_GIVEN[: head.counted], size)
                    if not channel.send_now([answer, *views], len(answer) + size):
                        await channel.drain()
            else:
                await connection.send(head.id, head.kind, b"", ())
            counts["requests"] += 1
            counts["parts"] += head.counted
            counts["bytes"] += size
            turn_requests += 1
            turn_bytes += size
            if turn_requests >= _TURN_REQUESTS or turn_bytes >= _TURN_BYTES:
                turn_requests = turn_bytes = 0
                await trio.lowlevel.checkpoint()

    async def _answer_later(
        self, connection: _Connection, head: RequestHead, parts: Parts, size: int
    ) -> None:
        """Answer a request whose parts are not all in memory."""
        try:
            load = bool(head.flags & LOAD)
            if load:  # the store may be slower than the peer would wait for a master
                await connection.send(head.id, WORKING, b"", ())
            statuses, views = await self._find_answer(connection.rank, parts, load=load)
            await connection.send(head.id, head.kind, statuses, views)
        except ConnectionClosed:
            connection.scope.cancel()
        finally:
            connection.release(size)

    async def _find_answer(
        self, rank: int, parts: Parts, *, load: bool
    ) -> tuple[bytes, list[memoryview]]:
        """The answer of the source; status `FAILED` for all parts where it has an error."""
        try:
            statuses, views = await self._source.answer(rank, parts, load=load)
            given_sizes = parts[np.frombuffer(statuses, np.uint8) == GIVEN, 2]
            assert given_sizes.tolist() == [len(view) for view in views]
        except DieselError as error:
            log.debug("cannot answer master %d: %s", rank, error)
        except Exception:
            log.exception("unexpected error in a request of master %d", rank)
        else:
            return statuses, views
        return bytes([FAILED]) * len(parts), []


def _make_channel(accepted: socket.socket, me: LocalIdentity) -> Channel:
    if me.certificate is None:
        return Channel(accepted)
    return TlsChannel(accepted, me.certificate.context, accepted=True)
