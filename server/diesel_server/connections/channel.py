"""A stream of bytes to and from one client, over a plain socket or over TLS.

A channel buffers received bytes, so that small requests cost few system calls;
`diesel_fs.net.channel` makes these. At most one task receives and one sends at a time.
"""

import socket
from collections.abc import Sequence
from contextlib import suppress

import trio

from diesel_fs.format.entries import Bytes
from diesel_fs.net import channel as transport
from diesel_fs.system.vectored_io import byte_views, drop_written

_BUFFER_BYTES = 8 << 10  # holds some dozens of small requests; there are thousands of connections
_TLS_PIECE_BYTES = 256 << 10  # the most that one turn of the loop encrypts and sends
_LINGER_S = 1.0  # time for bytes that the client sent before it learns of the end
_LINGER_BYTES = 16 << 20

SOCKET_OPTIONS = (  # with these, the kernel notices within two minutes that a client is gone
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)


class ClientGone(Exception):
    """The client has closed the connection, or it broke."""


class ClientChannel:
    """All methods raise ClientGone."""

    def __init__(self, connected: transport.Channel) -> None:
        self._transport = connected
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0
        self.received_bytes = 0
        self.sent_bytes = 0

    async def wait(self) -> None:
        """Waits for bytes. A cancelled wait loses none."""
        if self._start == self._end:
            self._start = self._end = 0
            self._end = await self._some(self._buffer)

    async def receive_into(self, room: memoryview) -> None:
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
        return self._end - self._start >= size

    async def receive_exactly(self, size: int) -> bytearray:
        taken = bytearray(size)
        await self.receive_into(memoryview(taken))
        return taken

    async def skip(self, size: int) -> None:
        while size:
            await self.wait()
            count = min(size, self._end - self._start)
            self._start += count
            size -= count

    async def _some(self, room: memoryview) -> int:
        try:
            count = await self._receive(room)
        except transport.ConnectionClosed as error:
            raise ClientGone from error
        self.received_bytes += count
        return count

    async def _receive(self, room: memoryview) -> int:
        if self._transport.buffers_internally:
            await trio.lowlevel.checkpoint()
        else:
            await self._transport.wait_readable()
        return await self._transport.receive(room)

    async def send(self, parts: Sequence[Bytes]) -> None:
        """After a cancelled call, the connection must be closed."""
        await self.send_left(self.send_now(parts))

    def send_now(self, parts: Sequence[Bytes]) -> list[memoryview]:
        """Sends without a wait. Returns the rest, for `send_left`."""
        views = byte_views(parts)
        self.sent_bytes += sum(map(len, views))
        if self._transport.buffers_internally:
            views = byte_views(transport.join_small(views))
        self._send_some(views)
        return views

    async def send_left(self, views: list[memoryview]) -> None:
        """After a cancelled call, the connection must be closed."""
        try:
            while views:
                await self._transport.wait_writable()
                self._send_some(views)
        except transport.ConnectionClosed as error:
            raise ClientGone from error

    def _send_some(self, views: list[memoryview]) -> None:
        if self._transport.buffers_internally:
            some = [view[:_TLS_PIECE_BYTES] for view in views[:1]]
        else:
            some = views
        try:
            drop_written(views, self._transport.send_some(some))
        except BlockingIOError:
            return
        except OSError as error:
            raise ClientGone from error

    async def half_close(self) -> None:
        """Ends the sending direction, and receives for a moment: closing a socket with unread bytes
        would reset the connection, and the client might lose the last answer."""
        with suppress(ClientGone, OSError), trio.move_on_after(_LINGER_S):
            self._transport.end_sending()
            await self.skip(_LINGER_BYTES)

    def close(self) -> None:
        self._transport.close()
