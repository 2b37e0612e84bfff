"""A stream of bytes to and from one client, over a plain socket or over TLS.

`connection.py` reads and writes frames (`diesel_fs.net.frames`) over it, and sets the deadlines.
The channel buffers what it receives, so that many small requests cost few system calls. At most one
task receives and one sends at a time.
"""

import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress

import trio

from diesel_fs.format.entries import Bytes

_BUFFER_BYTES = 8 << 10  # holds some dozens of small requests; there are thousands of connections
_PIECE_BYTES = 256 << 10
_BUFFERS_PER_CALL = 64  # of one `sendmsg`
_LINGER_S = 1.0  # the client's last request arrives within a round trip
_LINGER_BYTES = 16 << 20

_KEEP_ALIVE = (  # a client whose machine is gone is noticed within two minutes
    (socket.TCP_KEEPIDLE, 60),
    (socket.TCP_KEEPINTVL, 15),
    (socket.TCP_KEEPCNT, 4),
)


class ConnectionClosed(Exception):
    """The client has closed the connection, or it broke."""


class Channel(ABC):
    """A stream of bytes in both directions. All methods raise ConnectionClosed where the client has
    closed it or the network broke it."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0
        self.received_bytes = 0
        self.sent_bytes = 0

    async def wait(self) -> None:
        """Wait until there are bytes to receive. A cancelled wait loses no bytes."""
        if self._start == self._end:
            self._start = self._end = 0
            self._end = await self._some(self._buffer)

    async def receive_into(self, room: memoryview) -> None:
        """Receive bytes until `room` is full."""
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
        """Whether the buffer has so many bytes already: receiving them does not wait then."""
        return self._end - self._start >= size

    async def receive_exactly(self, size: int) -> bytearray:
        """Receive `size` bytes into memory of their own."""
        taken = bytearray(size)
        await self.receive_into(memoryview(taken))
        return taken

    async def skip(self, size: int) -> None:
        """Receive `size` bytes and drop them."""
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
        """Send parts, one after the other. If it is cancelled, the connection is of no more use."""
        await self.send_left(self.send_now(parts))

    def send_now(self, parts: Sequence[Bytes]) -> list[memoryview]:
        """Send as much of the parts as can be sent without waiting. Returns the rest, which the
        caller passes to `send_left`."""
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        self.sent_bytes += sum(view.nbytes for view in views)
        try:
            return self._send_now(views)
        except OSError as error:
            raise ConnectionClosed from error

    async def send_left(self, views: list[memoryview]) -> None:
        """Send the rest. If it is cancelled, the connection is of no more use."""
        try:
            await self._send(views)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosed from error

    async def half_close(self) -> None:
        """End the sending direction, and receive for a moment what the client still sends. If the
        socket were closed with unread bytes, the kernel would reset the connection and the client
        might lose the last answer."""
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
        """Send without waiting; returns the rest. By default nothing is sent."""
        return views

    @abstractmethod
    async def _send(self, views: list[memoryview]) -> None:
        """Send all bytes."""

    @abstractmethod
    async def _end_sending(self) -> None:
        """End the sending direction: the client then receives the end of the stream."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection at once. Repeatable."""


class SocketChannel(Channel):
    """A socket without TLS. The channel takes it over from trio: a call of trio's own sockets goes
    through the event loop twice, which costs more than the rest of a small request."""

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
            sent = self._socket.sendmsg(views[:_BUFFERS_PER_CALL])
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
    """A stream of trio: TLS, or memory in tests. `transport` is the socket below TLS."""

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
    """Make an accepted socket send answers without delay, and notice a client that is gone."""
    with suppress(OSError):
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE:
            accepted.setsockopt(socket.IPPROTO_TCP, option, value)
