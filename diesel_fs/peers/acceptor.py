"""The answering end: who may connect, and answers for them.

Owned here: listening, limits on connections and on what is under way, order and fairness. Not
owned: the handshake (`handshake.py`), where the bytes of an answer are (`AnswerSource`).

Concurrency: trio's. A task for each connection answers at once what is in memory; what has to be
looked for gets a task of its own, of which a connection has few. Answers leave in any order, each
in one piece. The parts of an answer are sent from where they lie: whoever gave them keeps them as
they are until nobody has a view of them any more.
"""

import errno
import logging
import socket
from collections.abc import Sequence
from typing import NoReturn, Protocol

import numpy as np
import trio

from ..errors import CorruptError, DieselError
from ..format.entries import Bytes
from ..net.channel import Channel, ConnectionClosed, FrameReader, TlsChannel
from . import hello, wire
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
PENDING_HANDSHAKES_MAX = 256
"""Connections that have not said hello, in all. Where there are more, the oldest has to go: a
master's hello takes milliseconds."""

PENDING_HANDSHAKES_PER_ADDRESS = 16
CONNECTIONS_MAX = 4096
"""That have: one for each rank."""

_BUFFER_BYTES = 8 << 10  # some hundred small requests; a larger one makes it larger
_TURN_REQUESTS, _TURN_BYTES = 32, 4 << 20  # answers of one connection before others have their turn
_LINES, _LINES_S = 20, 60.0  # of refusals in the log
_IDLE_CHECK_S = 10.0
_PAUSE_S = 0.1  # where there are no descriptors; a connection waits
_NO_FILES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_TOO_MANY = "too many connections"


class AnswerSource(Protocol):
    """Where answers come from."""

    def answer_from_memory(self, parts: Parts) -> list[memoryview] | None:
        """The bytes of all parts, in their order, where all are in memory; never waits. `parts` is
        good for the time of the call."""

    async def answer(
        self, rank: int, parts: Parts, *, load: bool
    ) -> tuple[bytes, list[memoryview]]:
        """A status for each part, and the bytes of those that are given."""


class _PendingHandshake:
    """A connection that has not said hello."""

    __slots__ = ("address", "scope")

    def __init__(self, address: str, scope: trio.CancelScope) -> None:
        self.address = address
        self.scope = scope


class _Connection:
    """A connection of another master."""

    def __init__(
        self, channel: Channel, rank: int, me: LocalIdentity, scope: trio.CancelScope
    ) -> None:
        self.channel = channel
        self.rank = rank
        self.me = me
        self.scope = scope
        self.served = 0
        self.served_before = 0
        self.idle_since_s = trio.current_time()
        self.in_flight = 0  # what has to be looked for
        self._bytes = 0
        self._freed = trio.lowlevel.ParkingLot()

    async def acquire(self, size: int) -> None:
        """Come back when something of this size may be looked for."""
        while self.in_flight >= wire.REQUESTS_MAX or (
            self.in_flight and self._bytes + size > wire.IN_FLIGHT_BYTES_MAX
        ):
            await self._freed.park()
        self.in_flight += 1
        self._bytes += size

    def release(self, size: int) -> None:
        """It has been answered."""
        self.in_flight -= 1
        self._bytes -= size
        self._freed.unpark_all()

    async def send(self, number: int, kind: int, statuses: bytes, views: Sequence[Bytes]) -> None:
        """An answer. Comes back when it has left. Raises Gone."""
        size = sum(map(len, views))
        head = wire.answer_head(number, kind, statuses, size)
        if not self.channel.send_now([head, *views], len(head) + size):
            await self.channel.drain()


class Acceptor:
    """The connections that other masters have made to this one."""

    def __init__(
        self,
        me: LocalIdentity,
        answers: AnswerSource,
        *,
        connections_max: int = CONNECTIONS_MAX,
        pending_handshakes_max: int = PENDING_HANDSHAKES_MAX,
        pending_handshakes_per_address: int = PENDING_HANDSHAKES_PER_ADDRESS,
    ) -> None:
        self._me = me
        self._serving = answers
        self._connections_max = connections_max
        self._knocking_max = pending_handshakes_max
        self._knocking_per_address = pending_handshakes_per_address
        self._knocking: dict[_PendingHandshake, None] = {}  # the oldest first
        self._connections: dict[int, _Connection] = {}
        self._lines = 0
        self._lines_since_s = float("-inf")
        self._counts = dict.fromkeys("accepted refused requests parts bytes at_once".split(), 0)

    async def serve(self, listeners: Sequence[socket.socket]) -> None:
        """Accept and answer, until cancelled; the listeners are the caller's."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look_for_idle)
            for each in listeners:
                each.setblocking(False)
                nursery.start_soon(self._accept, each, nursery)

    def set_identity(self, me: LocalIdentity) -> None:
        """From now on this master is another: of another version, say. Who is connected to what it
        was has to connect anew."""
        self._me = me
        for connection in list(self._connections.values()):
            connection.scope.cancel()

    def stats(self) -> dict[str, int]:
        """For people."""
        return {
            **self._counts,
            "connections": len(self._connections),
            "knocking": len(self._knocking),
            "under_way": sum(each.in_flight for each in self._connections.values()),
        }

    # Connections

    async def _accept(self, listener: socket.socket, nursery: trio.Nursery) -> NoReturn:
        listening = trio.socket.from_stdlib_socket(listener)
        while True:
            try:
                accepted, peer = await listening.accept()
            except OSError as error:
                if error.errno in _NO_FILES:
                    log.error("cannot accept connections: %s", error.strerror)
                    await trio.sleep(_PAUSE_S)
                continue
            plain = socket.socket(fileno=accepted.detach())
            nursery.start_soon(self._welcome, plain, str(peer[0]), int(peer[1]))

    async def _welcome(self, accepted: socket.socket, address: str, port: int) -> None:
        """A connection from beginning to end; whatever happens on it stays on it."""
        where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        me = self._me
        channel = None
        try:
            channel = _channel(accepted, me)
            if len(self._connections) >= self._connections_max:
                reply = b"" if me.certificate is not None else hello.refusal(_TOO_MANY)
                raise HandshakeRejected(_TOO_MANY, channel, reply)
            with trio.CancelScope() as scope:
                rank = await self._handshake(channel, me, address, scope)
                if me is not self._me:
                    raise HandshakeRejected("this master has gone over to another version", channel)
                await self._attend(_Connection(channel, rank, me, scope), where)
        except HandshakeRejected as refused:
            await self._turn_away(refused, where)
        except ConnectionClosed as gone:
            log.debug("%s: %s", where, gone)
        except Exception:
            log.exception("a connection from %s ended by a bug", where)
        finally:
            if channel is not None:
                channel.close()
            accepted.close()

    async def _handshake(
        self, channel: Channel, me: LocalIdentity, address: str, scope: trio.CancelScope
    ) -> int:
        """The hello, within its time. Raises Refused."""
        knocking = _PendingHandshake(address, scope)
        beside = [each for each in self._knocking if each.address == address]
        if len(beside) >= self._knocking_per_address:
            self._drop(beside[0])
        elif len(self._knocking) >= self._knocking_max:
            self._drop(next(iter(self._knocking)))
        self._knocking[knocking] = None
        try:
            with trio.fail_after(HELLO_S):
                await accept_tls(channel)
                return await authenticate(channel, me)
        except trio.TooSlowError:
            raise HandshakeRejected(f"no hello within {HELLO_S:g} s", channel) from None
        finally:
            self._knocking.pop(knocking, None)

    def _drop(self, knocking: _PendingHandshake) -> None:
        del self._knocking[knocking]
        knocking.scope.cancel()
        self._note(knocking.address, _TOO_MANY)

    async def _turn_away(self, refused: HandshakeRejected, where: str) -> None:
        self._note(where, refused.why)
        if refused.reply:
            try:
                refused.channel.send_now([refused.reply], len(refused.reply))
            except ConnectionClosed:
                return
            await refused.channel.half_close()

    def _note(self, where: str, why: str) -> None:
        """A line about a refusal, unless there are very many."""
        self._counts["refused"] += 1
        now_s = trio.current_time()
        if now_s - self._lines_since_s > _LINES_S:
            self._lines, self._lines_since_s = 0, now_s
        self._lines += 1
        if self._lines <= _LINES:
            log.warning("refused from=%s why=%r", where, why)
        elif self._lines == _LINES + 1:
            log.warning("refused many more; they are counted")

    async def _look_for_idle(self) -> NoReturn:
        while True:
            await trio.sleep(_IDLE_CHECK_S)
            now_s = trio.current_time()
            for each in list(self._connections.values()):
                if each.served != each.served_before or each.in_flight:
                    each.served_before, each.idle_since_s = each.served, now_s
                elif now_s - each.idle_since_s >= IDLE_S:
                    each.scope.cancel()

    # Requests

    async def _attend(self, connection: _Connection, where: str) -> None:
        """All requests of a connection."""
        before = self._connections.get(connection.rank)
        if before is not None:  # it has connected anew: it does not hear what the old one says
            before.scope.cancel()
        self._connections[connection.rank] = connection
        self._counts["accepted"] += 1
        try:
            async with trio.open_nursery() as nursery:
                try:
                    await self._answer(connection, nursery)
                except ConnectionClosed as gone:
                    log.debug("master %d at %s: %s", connection.rank, where, gone)
                except CorruptError as error:
                    self._note(where, f"master {connection.rank}: {error.message}")
                nursery.cancel_scope.cancel()
        finally:
            if self._connections.get(connection.rank) is connection:
                del self._connections[connection.rank]

    async def _answer(self, connection: _Connection, nursery: trio.Nursery) -> NoReturn:
        """Raises Gone, CorruptError."""
        channel, sizes, serving = connection.channel, connection.me.sizes, self._serving
        inbox = FrameReader(channel, _BUFFER_BYTES)
        counts = self._counts
        turn_requests = turn_bytes = 0
        while True:
            inbox.begin_frame()
            await inbox.fill_buffer(HEAD_BYTES)
            head = wire.parse_request(inbox.buffer, inbox.start)
            await inbox.fill_buffer(HEAD_BYTES + head.counted * PART_BYTES)
            start = inbox.start + HEAD_BYTES
            inbox.start = start + head.counted * PART_BYTES
            connection.served += 1
            size = 0
            if head.kind == wire.READ:
                parts, size = wire.parse_parts(inbox.buffer, head.counted, sizes, start=start)
                views = serving.answer_from_memory(parts)
                if views is None:
                    parts = parts.copy()
                    await connection.acquire(size)
                    nursery.start_soon(self._look_for, connection, head, parts, size)
                else:
                    counts["at_once"] += 1
                    said = wire.answer_head(head.id, wire.READ, ALL_GIVEN[: head.counted], size)
                    if not channel.send_now([said, *views], len(said) + size):
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

    async def _look_for(
        self, connection: _Connection, head: RequestHead, parts: Parts, size: int
    ) -> None:
        """An answer to what is not, or not all, in memory."""
        try:
            load = bool(head.flags & LOAD)
            if load:  # a store may take longer than this master ever does
                await connection.send(head.id, WORKING, b"", ())
            statuses, views = await self._found(connection.rank, parts, load=load)
            await connection.send(head.id, head.kind, statuses, views)
        except ConnectionClosed:
            connection.scope.cancel()
        finally:
            connection.release(size)

    async def _found(
        self, rank: int, parts: Parts, *, load: bool
    ) -> tuple[bytes, list[memoryview]]:
        try:
            statuses, views = await self._serving.answer(rank, parts, load=load)
            wanted = parts[np.frombuffer(statuses, np.uint8) == GIVEN, 2]
            assert wanted.tolist() == [len(view) for view in views]
        except DieselError as error:
            log.debug("master %d gets nothing: %s", rank, error)
        except Exception:
            log.exception("a request of master %d met a bug", rank)
        else:
            return statuses, views
        return bytes([FAILED]) * len(parts), []


def _channel(accepted: socket.socket, me: LocalIdentity) -> Channel:
    if me.certificate is None:
        return Channel(accepted)
    return TlsChannel(accepted, me.certificate.context, accepted=True)
