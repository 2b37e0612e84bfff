"""Bytes to and from one client: over a socket, or over TLS.

Owned here: what is below frames, and the memory between. Not owned: frames, deadlines (those of
whoever calls). One task receives, one sends.
"""

import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress

import trio

from diesel_fs.format.entries import Bytes

_BUFFER_BYTES = 8 << 10  # holds some dozens of small requests; there are thousands of connections
_PIECE_BYTES = 256 << 10
_PARTS_AT_ONCE = 64
_LINGER_S = 1.0
_LINGER_BYTES = 16 << 20

_KEEP_ALIVE = (  # half-open connections end within two minutes
    (socket.TCP_KEEPIDLE, 60),
    (socket.TCP_KEEPINTVL, 15),
    (socket.TCP_KEEPCNT, 4),
)


class ConnectionClosed(Exception):
    """The client has closed the connection, or it broke."""


class Channel(ABC):
    """A stream of bytes in both directions. All raise Gone."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0
        self.received_bytes = 0
        self.sent_bytes = 0

    async def wait(self) -> None:
        """Wait until there is something to receive. Cancelled, it has lost nothing."""
        if self._start == self._end:
            self._start = self._end = 0
            self._end = await self._some(self._buffer)

    async def receive_into(self, room: memoryview) -> None:
        """Receive just as many bytes."""
        while room.nbytes:
            if self._start < self._end:
                count = min(room.nbytes, self._end - self._start)
                room[:count] = self._buffer[self._start : self._start + count]
                self._start += count
            elif room.nbytes >= _BUFFER_BYTES:
                count = await self._some(room)
            else:
                await self.wait()
                continue
            room = room[count:]

    def has_buffered(self, size: int) -> bool:
        """Whether so many bytes are here already: then receiving them waits for nothing."""
        return self._end - self._start >= size

    async def receive_exactly(self, size: int) -> bytearray:
        """Receive just as many bytes into memory of their own."""
        taken = bytearray(size)
        await self.receive_into(memoryview(taken))
        return taken

    async def skip(self, size: int) -> None:
        """Receive bytes and forget them."""
        while size:
            await self.wait()
            count = min(size, self._end - self._start)
            self._start += count
            size -= count

    async def _some(self, room: memoryview) -> int:
        try:
            count = await self._receive(room)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosed from error
        if not count:
            raise ConnectionClosed
        self.received_bytes += count
        return count

    async def send(self, parts: Sequence[Bytes]) -> None:
        """Send parts, one after the other. Cancelled, the connection is of no more use."""
        await self.send_left(self.send_now(parts))

    def send_now(self, parts: Sequence[Bytes]) -> list[memoryview]:
        """Send of parts what can be sent without waiting; what is left of them, for `send_left`."""
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        self.sent_bytes += sum(view.nbytes for view in views)
        try:
            return self._send_now(views)
        except OSError as error:
            raise ConnectionClosed from error

    async def send_left(self, views: list[memoryview]) -> None:
        """Send what is left. Cancelled, the connection is of no more use."""
        try:
            await self._send(views)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosed from error

    async def half_close(self) -> None:
        """Say that nothing else comes, and hear the client out for a moment: closing at once would
        make the kernel take back what has been sent."""
        with (
            suppress(ConnectionClosed, OSError, trio.BrokenResourceError),
            trio.move_on_after(_LINGER_S),
        ):
            await self._end_sending()
            await self.skip(_LINGER_BYTES)

    @abstractmethod
    async def _receive(self, room: memoryview) -> int:
        """Some bytes; 0 at the end."""

    def _send_now(self, views: list[memoryview]) -> list[memoryview]:
        """What of them cannot be sent at once: all, unless a channel knows better."""
        return views

    @abstractmethod
    async def _send(self, views: list[memoryview]) -> None:
        """All bytes."""

    @abstractmethod
    async def _end_sending(self) -> None:
        """The client sees the end."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it, at once."""


class SocketChannel(Channel):
    """A socket without TLS, which is taken over. It is not trio's any more: those go through the
    loop twice for each call, which costs more than a small request's other bytes."""

    def __init__(self, accepted: trio.socket.SocketType) -> None:
        super().__init__()
        self._socket = socket.socket(fileno=accepted.detach())
        self._socket.setblocking(False)

    async def _receive(self, room: memoryview) -> int:
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            try:
                return self._socket.recv_into(room)
            except BlockingIOError:
                continue

    def _send_now(self, views: list[memoryview]) -> list[memoryview]:
        at = 0
        try:
            sent = self._socket.sendmsg(views[:_PARTS_AT_ONCE])
        except BlockingIOError:
            return views
        while at < len(views) and sent >= views[at].nbytes:
            sent -= views[at].nbytes
            at += 1
        left = views[at:]
        if sent:
            left[0] = left[0][sent:]
        return left

    async def _send(self, views: list[memoryview]) -> None:
        while views:
            await trio.lowlevel.wait_writable(self._socket)
            views = self._send_now(views)

    async def _end_sending(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()


class StreamChannel(Channel):
    """A stream of trio's: TLS, or one of memory in tests. `transport` is what it is made of."""

    def __init__(self, stream: trio.abc.Stream, transport: trio.SocketStream | None = None) -> None:
        super().__init__()
        self._stream = stream
        self._transport = transport

    async def _receive(self, room: memoryview) -> int:
        received = await self._stream.receive_some(min(room.nbytes, _PIECE_BYTES))
        room[: len(received)] = received
        return len(received)

    async def _send(self, views: list[memoryview]) -> None:
        for view in views:
            for start in range(0, view.nbytes, _PIECE_BYTES):
                await self._stream.send_all(view[start : start + _PIECE_BYTES])

    async def _end_sending(self) -> None:
        if self._transport is not None:
            self._transport.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.socket.close()


def set_socket_options(accepted: trio.socket.SocketType) -> None:
    """A socket that has been accepted: answers leave at once, and a dead client is noticed."""
    with suppress(OSError):
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE:
            accepted.setsockopt(socket.IPPROTO_TCP, option, value)
