"""Accepts connections, refuses those beyond the limits, and ends them when the server stops.

The workers of a server accept on the same sockets. Each listening socket and each connection has a
task of its own.
"""

import errno
import logging
import resource
import socket
import ssl
from collections.abc import Sequence
from typing import NoReturn

import trio

from diesel_fs.net import channel as transport
from diesel_fs.net import frames as wire
from diesel_fs.net.tls import Certificate

from .. import limits
from ..limits import LimitReached
from .channel import SOCKET_OPTIONS, ClientChannel, ClientGone
from .connection import SHUTTING_DOWN, ClientConnection, ConnectionContext, Opener

log = logging.getLogger("diesel.server")

_PAUSE_S = 0.1  # while no file descriptor is free; the client's connection waits in the kernel
_NO_FILES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


class Listener:
    """Without a `certificate`, there is no TLS."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        context: ConnectionContext,
        certificate: Certificate | None = None,
    ) -> None:
        self._sockets = sockets
        self._context = context
        self.certificate = certificate  # for new connections; it may be replaced at any time
        self._connections: set[ClientConnection] = set()
        self._refusing = 0
        self._stopping = trio.Event()
        self._drained = trio.Event()

    def stop(self) -> None:
        """Accepts no more clients. `run` ends when requests under way have ended, or after
        `DRAIN_S`."""
        self._context.is_draining = True
        self._stopping.set()
        for connection in list(self._connections):
            connection.stop()
        self._check_drained()

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for each in self._sockets:
                each.setblocking(False)
                nursery.start_soon(self._accept, trio.socket.from_stdlib_socket(each), nursery)
            await self._stopping.wait()
            with trio.move_on_after(limits.DRAIN_S):
                await self._drained.wait()
            nursery.cancel_scope.cancel()

    async def _accept(self, listening: trio.socket.SocketType, nursery: trio.Nursery) -> NoReturn:
        while True:
            try:
                accepted, peer = await listening.accept()
            except OSError as error:
                if error.errno in _NO_FILES:
                    log.error("cannot accept connections: %s", error.strerror)
                    await trio.sleep(_PAUSE_S)
                continue
            nursery.start_soon(self._serve, accepted, str(peer[0]), int(peer[1]))

    async def _serve(self, accepted: trio.socket.SocketType, address: str, port: int) -> None:
        context = self._context
        context.cells.add("diesel_connections_total")  # metrics
        with accepted:
            shown = f"[{address}]" if ":" in address else address
            connection = ClientConnection(context, self._opener(accepted), shown, port)
            if context.is_draining:
                await self._refuse(connection, "going", SHUTTING_DOWN)
                return
            try:
                with context.count.connection():
                    self._connections.add(connection)
                    context.cells.set("diesel_connections", value=context.count.all)
                    try:
                        await connection.run()
                    finally:
                        self._connections.discard(connection)
            except LimitReached as error:
                await self._refuse(connection, error.reason, error.sentence)
            finally:
                context.cells.set("diesel_connections", value=context.count.all)
                self._check_drained()

    async def _refuse(self, connection: ClientConnection, reason: str, sentence: str) -> None:
        """Sends no sentence if many clients are being refused."""
        if self._refusing < limits.REFUSING_MAX:
            self._refusing += 1
            try:
                await connection.refuse(reason, sentence)
            finally:
                self._refusing -= 1
        else:
            connection.note_refusal(reason, sentence)

    def _check_drained(self) -> None:
        if self._context.is_draining and not self._connections:
            self._drained.set()

    def _opener(self, accepted: trio.socket.SocketType) -> Opener:
        certificate = self.certificate

        async def open_channel() -> tuple[ClientChannel, bytes]:
            connected = socket.socket(fileno=accepted.detach())
            if certificate is None:
                return ClientChannel(transport.Channel(connected, SOCKET_OPTIONS)), wire.NO_BINDING
            try:
                secured = transport.TlsChannel(
                    connected, certificate.context, accepted=True, options=SOCKET_OPTIONS
                )
                try:
                    await secured.do_handshake()
                except BaseException:
                    secured.close()
                    raise
            except transport.ConnectionClosed as error:
                raise ClientGone(_why(error)) from error
            return ClientChannel(secured), certificate.digest

        return open_channel


def _why(error: BaseException) -> str:
    """Why a TLS handshake failed; "" if the client just went away."""
    cause = error.__cause__ or error
    if isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return ""
    reason = getattr(cause, "reason", None)
    return f"no TLS: {reason}" if reason else ""


def most_connections() -> int:
    """Raises the limit of open files as far as needed and allowed. Returns how many of them may be
    connections: all but `FILES_RESERVED`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    want = limits.CONNECTIONS_MAX + limits.FILES_RESERVED
    files = want if hard == resource.RLIM_INFINITY else min(hard, want)
    if soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, files), hard))
    most = files - limits.FILES_RESERVED
    if most < limits.CONNECTIONS_MAX:
        log.warning(
            "this worker takes at most %d connections, as it may open %d files (ulimit -n)",
            most, files,
        )  # fmt: skip
    return max(16, most)  # at a tiny limit, `_accept` waits for files
