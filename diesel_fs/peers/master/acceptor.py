"""Accepts TCP connections from other masters and from clients of other nodes (`PEERS.md`, section
3), authenticates them, and hands them to the data plane.

The data plane hands back each request that has to wait for a disk, a store or another node. Each
gets a trio task here, so answers leave in any order. One trio loop.
"""

import errno
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, NoReturn, Protocol

import numpy as np
import trio

from ...errors import DieselError
from ...net.channel import Channel, ConnectionClosed, TlsChannel
from ...urls import HostPort
from .. import wire
from ..handshake import HELLO_S, HandshakeRejected, LocalIdentity, accept_tls, authenticate
from ..node.chunk_table import ChunkTable
from ..wire import FAILED, GIVEN, LOAD, NOT_MINE, PLAN, READ, THROUGH, WORKING, Hello, Parts
from .data_plane import DataPlane, ServedConnection

log = logging.getLogger("diesel.task")

PENDING_HANDSHAKES_MAX, PENDING_HANDSHAKES_PER_ADDRESS = 512, 128
"""Unfinished handshakes, in all and from one address. For one more, the oldest is closed: a real
master's handshake takes milliseconds."""

CONNECTIONS_MAX = 16_384
"""Further connections are refused; a refused client asks through its own node's master."""

_LOG_LINES_MAX, _LOG_PERIOD_S = 20, 60.0  # rejections logged in each period
_ACCEPT_PAUSE_S = 0.1  # the next connection waits in the kernel
_NO_RESOURCES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_TOO_MANY = "too many connections"


class AnswerSource(Protocol):
    """Gives the answers that the data plane cannot give: the `Master`."""

    @property
    def table(self) -> ChunkTable:
        """For the current version."""

    async def answer(
        self, rank: int, parts: Parts, *, load: bool, through: bool
    ) -> tuple[bytes, list[memoryview]]:
        """A status for each part, and the bytes of the parts with `GIVEN`, which never change.
        `rank` is the asking node's. `load`: fetch missing chunks that this node owns. `through`:
        ask the other owners for parts of theirs."""

    def take_plan(self, rank: int, body: bytes) -> int:
        """Take over a message about plans of node `rank`; returns a status (`wire.py`)."""


class _PendingHandshake(NamedTuple):
    host: str
    scope: trio.CancelScope


class Acceptor:
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
        """The default `make_channel` uses TLS if this master has a certificate."""
        self._me = me
        self._source = answers
        self._connections_max = connections_max
        self._pending_max = pending_handshakes_max
        self._pending_per_address = pending_handshakes_per_address
        self._pending: dict[_PendingHandshake, None] = {}  # the oldest first
        self._make_channel = make_channel or _make_channel
        self._plane: DataPlane | None = None  # while `serve` runs
        self._nursery: trio.Nursery | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._log_lines = 0
        self._log_period_began_s = float("-inf")
        self._counts = {"accepted": 0, "rejected": 0}

    async def serve(
        self,
        listeners: Sequence[socket.socket],
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """The caller closes the listeners."""
        self._token = trio.lowlevel.current_trio_token()
        self._plane = plane = DataPlane(self._forward, self._forward_plan)
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for each in listeners:
                    each.setblocking(False)
                    nursery.start_soon(self._accept, each, nursery)
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = self._plane = None
            plane.close()

    def adopt_local(self, accepted: socket.socket) -> None:
        """Serve a client of this node, if the data plane runs; else close its socket."""
        if self._plane is None:
            accepted.close()
            return
        channel = Channel(accepted, options=())
        self._plane.adopt(
            ServedConnection(
                channel, self._source.table, self._me.rank, is_client=True, is_local=True
            )
        )

    def set_identity(self, me: LocalIdentity) -> None:
        """Take over another version or secret. All connections end."""
        self._me = me
        if self._plane is not None:
            self._plane.drop_all()

    def stats(self) -> dict[str, int]:
        return {
            **self._counts,
            **(self._plane.stats() if self._plane is not None else {}),
            "pending_handshakes": len(self._pending),
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
            nursery.start_soon(self._let_in, plain, HostPort(str(peer[0]), int(peer[1])))

    async def _let_in(self, accepted: socket.socket, remote: HostPort) -> None:
        me = self._me
        channel = None
        try:
            channel = self._make_channel(accepted, me)
            if self._plane is None or self._plane.open_connections >= self._connections_max:
                reply = b"" if me.certificate is not None else wire.refusal(_TOO_MANY)
                raise HandshakeRejected(_TOO_MANY, reply)
            with trio.CancelScope() as scope:
                theirs = await self._handshake(channel, me, remote.host, scope)
                if me is not self._me:
                    raise HandshakeRejected("this master has switched to another version")
                self._counts["accepted"] += 1
                table, is_client = self._source.table, theirs.is_client
                self._plane.adopt(
                    ServedConnection(
                        channel, table, theirs.rank, is_client=is_client, is_local=False
                    )
                )
                channel = None
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

    async def _handshake(
        self, channel: Channel, me: LocalIdentity, host: str, scope: trio.CancelScope
    ) -> Hello:
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
        self._counts["rejected"] += 1
        now_s = trio.current_time()
        if now_s - self._log_period_began_s > _LOG_PERIOD_S:
            self._log_lines, self._log_period_began_s = 0, now_s
        self._log_lines += 1
        if self._log_lines <= _LOG_LINES_MAX:
            log.warning("refused from=%s why=%r", remote, why)
        elif self._log_lines == _LOG_LINES_MAX + 1:
            log.warning("many more connections were refused; stats() counts them")

    # Requests for chunks that are not in memory

    def _forward(
        self, connection: ServedConnection, number: int, flags: int, parts: Parts, size: int
    ) -> None:
        assert self._token is not None
        start = partial(self._start_answer, connection, number, flags, parts, size)
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(start)

    def _start_answer(
        self, connection: ServedConnection, number: int, flags: int, parts: Parts, size: int
    ) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(self._answer, connection, number, flags, parts, size)

    def _forward_plan(self, connection: ServedConnection, number: int, body: bytes) -> None:
        assert self._token is not None
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._take_plan, connection, number, body)

    def _take_plan(self, connection: ServedConnection, number: int, body: bytes) -> None:
        plane = self._plane
        if plane is None or not connection.is_open:
            return
        status = NOT_MINE
        if connection.table is self._source.table:
            try:
                status = self._source.take_plan(connection.rank, body)
            except Exception:
                status = FAILED
                log.exception("unexpected error in a message of node %d", connection.rank)
        answer = wire.answer_head(number, PLAN, bytes([status]), 0)
        plane.answer(connection, len(body), [answer], len(answer))

    async def _answer(
        self, connection: ServedConnection, number: int, flags: int, parts: Parts, size: int
    ) -> None:
        plane = self._plane
        if plane is None or not connection.is_open:
            return
        load = bool(flags & LOAD)
        if load:  # the store may be slower than the asker would wait
            working = wire.answer_head(number, WORKING, b"", 0)
            plane.send(connection, [working], len(working))
        through = bool(flags & THROUGH)
        statuses, views = await self._find_answer(connection, parts, load=load, through=through)
        given = sum(map(len, views))
        head = wire.answer_head(number, READ, statuses, given)
        plane.answer(connection, size, [head, *views], len(head) + given)

    async def _find_answer(
        self, connection: ServedConnection, parts: Parts, *, load: bool, through: bool
    ) -> tuple[bytes, list[memoryview]]:
        refused = NOT_MINE
        if connection.table is self._source.table:
            refused, rank = FAILED, connection.rank
            try:
                statuses, views = await self._source.answer(rank, parts, load=load, through=through)
                given_sizes = parts[np.frombuffer(statuses, np.uint8) == GIVEN, 2]
                assert given_sizes.tolist() == [len(view) for view in views]
            except DieselError as error:
                log.debug("cannot answer node %d: %s", rank, error)
            except Exception:
                log.exception("unexpected error in a request of node %d", rank)
            else:
                return statuses, views
        return bytes([refused]) * len(parts), []


def _make_channel(accepted: socket.socket, me: LocalIdentity) -> Channel:
    if me.certificate is None:
        return Channel(accepted)
    return TlsChannel(accepted, me.certificate.context, accepted=True)
