"""Bytes to and from another master: over a socket, or over TLS.

Owned here: sending and receiving without going through the loop where that is not needed, what
waits to be sent, how slow an end may be. Not owned: what the bytes mean.

Concurrency: one task receives; any task sends, whole frames, which leave in the order of
`send_now`. What has been put is sent by whoever waits in `drain`. Sockets of trio's own would cost
two turns of its loop for each call, which is more than a small request takes otherwise.
"""

import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import trio

from ..format.entries import Bytes

GRACE_S = 10.0
RATE_BYTES_PER_S = 256 << 10
"""How fast a frame must come or go, when the first 10 s are over."""

_AT_ONCE = 1024  # parts of one system call (IOV_MAX)
_TLS_PIECE_BYTES = 256 << 10
_TLS_RECORD_BYTES = 16 << 10
_DIRECT_BYTES = 4 << 10  # a piece that is larger is received where it belongs
_TURNS = 16  # calls in a row that found something
_LINGER_S = 1.0
_LINGER_BYTES = 64 << 10

_USER_TIMEOUT_MS = 10_000  # a machine that does not take what has been sent is not there any more
_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS),
)


class ConnectionClosed(Exception):
    """The other end has closed the connection, or it broke, or is too slow."""


class Channel:
    """A connection without TLS; the socket is taken over."""

    buffers_internally = False
    """Whether bytes may be here of which the socket knows nothing any more."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._file = connected.fileno()
        connected.setblocking(False)
        with suppress(OSError):  # not all of them exist for every kind of socket
            for level, option, value in _OPTIONS:
                connected.setsockopt(level, option, value)
        self._unsent: deque[Bytes] = deque()
        self._draining = trio.Lock()

    def receive_now(self, room: memoryview) -> int:
        """Some bytes that are here already. Raises BlockingIOError, Gone."""
        try:
            count = self._socket.recv_into(room)
        except BlockingIOError:
            raise
        except OSError as error:
            raise ConnectionClosed(error.strerror) from error
        if not count:
            raise ConnectionClosed("it closed the connection")
        return count

    async def wait_readable(self) -> None:
        """Wait until there may be something. Raises Gone."""
        try:
            await trio.lowlevel.wait_readable(self._file)
        except (trio.ClosedResourceError, OSError) as error:
            raise ConnectionClosed("the connection was closed") from error

    async def receive(self, room: memoryview) -> int:
        """Some bytes. Raises Gone."""
        while True:
            try:
                return self.receive_now(room)
            except BlockingIOError:
                await self.wait_readable()

    async def receive_exactly(self, size: int) -> bytearray:
        """Just as many bytes. Raises Gone."""
        taken = bytearray(size)
        view = memoryview(taken)
        while len(view):
            view = view[await self.receive(view) :]
        return taken

    def send_now(self, parts: Sequence[Bytes], size: int) -> bool:
        """Send parts of `size` bytes in all. Whether they have left; if not, somebody must `drain`,
        and the parts stay as they are until then. Raises Gone."""
        sent = 0
        if not self._unsent:
            try:
                sent = self._send(parts)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise ConnectionClosed(error.strerror) from error
            if sent == size:
                return True
        self._unsent.extend(parts)
        self._forget(sent)
        return False

    async def drain(self) -> None:
        """Come back when all has left. Raises Gone, also where the other end takes it too
        slowly."""
        async with self._draining:
            begun_s = trio.current_time()
            moved = 0
            while self._unsent:
                await wait_at_min_rate(begun_s, moved, self._writable)
                try:
                    sent = self._send([self._unsent[i] for i in range(self._next())])
                except BlockingIOError:
                    continue
                except OSError as error:
                    raise ConnectionClosed(error.strerror) from error
                self._forget(sent)
                moved += sent

    async def half_close(self) -> None:
        """Say that nothing else comes, and hear the other end out for a moment: closing at once
        would make the kernel take back what has been sent."""
        dropped, sink = 0, memoryview(bytearray(4096))
        with suppress(ConnectionClosed, OSError), trio.move_on_after(_LINGER_S):
            self._socket.shutdown(socket.SHUT_WR)
            while dropped < _LINGER_BYTES:
                dropped += await self.receive(sink)

    def close(self) -> None:
        """Let go of it, at once. Repeatable."""
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._file)
            self._socket.close()

    def _send(self, parts: Sequence[Bytes]) -> int:
        """How many bytes of these have left."""
        return self._socket.sendmsg(parts if len(parts) <= _AT_ONCE else parts[:_AT_ONCE])

    def _next(self) -> int:
        """How many parts are tried at once."""
        return min(len(self._unsent), _AT_ONCE)

    async def _writable(self) -> None:
        try:
            await trio.lowlevel.wait_writable(self._file)
        except (trio.ClosedResourceError, OSError) as error:
            raise ConnectionClosed("the connection was closed") from error

    def _forget(self, sent: int) -> None:
        """What has left needs no memory."""
        unsent = self._unsent
        while unsent:
            size = len(unsent[0])
            if sent < size:
                if sent:
                    unsent[0] = memoryview(unsent[0])[sent:]
                return
            sent -= size
            unsent.popleft()


class TlsChannel(Channel):
    """A connection over TLS."""

    holds_back = True

    def __init__(
        self, connected: socket.socket, context: ssl.SSLContext, *, accepted: bool
    ) -> None:
        """Raises Gone. `do_handshake` comes next."""
        connected.setblocking(False)
        try:
            self._tls = context.wrap_socket(
                connected, server_side=accepted, do_handshake_on_connect=False
            )
        except (OSError, ValueError) as error:
            connected.close()
            raise ConnectionClosed(str(error)) from error
        super().__init__(self._tls)

    async def do_handshake(self) -> None:
        """The handshake. Raises Gone."""
        try:
            while True:
                try:
                    self._tls.do_handshake()
                    return
                except ssl.SSLWantReadError:
                    await self.wait_readable()
                except ssl.SSLWantWriteError:
                    await self._writable()
        except ssl.SSLError as error:
            raise ConnectionClosed(f"no TLS: {error.reason or error}") from error
        except OSError as error:
            raise ConnectionClosed(error.strerror or "it closed the connection") from error

    @property
    def peer_certificate(self) -> bytes:
        """The other end's, as DER. Raises Gone where it has none."""
        found = self._tls.getpeercert(binary_form=True)
        if not found:
            raise ConnectionClosed("it has no certificate")
        return found

    def receive_now(self, room: memoryview) -> int:
        """Some bytes that are here already. Raises BlockingIOError, Gone."""
        try:
            count = self._tls.recv_into(room)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except OSError as error:
            raise ConnectionClosed(str(error)) from error
        if not count:
            raise ConnectionClosed("it closed the connection")
        return count

    def send_now(self, parts: Sequence[Bytes], size: int) -> bool:
        """Send; small parts become one record. Raises Gone."""
        return super().send_now(list(_joined(parts)), size)

    def _next(self) -> int:
        return 1

    def _send(self, parts: Sequence[Bytes]) -> int:
        sent = 0
        for part in parts:
            view = memoryview(part)
            at = 0
            while at < len(view):
                try:
                    at += self._tls.send(view[at : at + _TLS_PIECE_BYTES])
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    if not sent + at:
                        raise BlockingIOError from None
                    return sent + at
            sent += at
        return sent


def _joined(parts: Sequence[Bytes]) -> Sequence[Bytes]:
    """The same bytes with few small parts: each call makes a record, or several."""
    found: list[Bytes] = []
    small: list[Bytes] = []
    size = 0
    for part in parts:
        if len(part) >= _TLS_RECORD_BYTES or size + len(part) > _TLS_RECORD_BYTES:
            found.extend([b"".join(small)] if small else [])
            small, size = [], 0
        if len(part) >= _TLS_RECORD_BYTES:
            found.append(part)
        else:
            small.append(part)
            size += len(part)
    found.extend([b"".join(small)] if small else [])
    return [part for part in found if len(part)]


async def wait_at_min_rate(begun_s: float, moved: int, wait: Callable[[], Awaitable[None]]) -> None:
    """Wait, as long as who has moved so many bytes of a frame since may take. Raises Gone."""
    with trio.CancelScope(deadline=begun_s + GRACE_S + moved / RATE_BYTES_PER_S) as scope:
        await wait()
    if scope.cancelled_caught:
        raise ConnectionClosed("it is too slow")


class FrameReader:
    """What comes over a channel, frame by frame, for the one task that receives.

    Between frames it waits as long as it takes; a frame that has begun must go on. Some bytes are
    received into a buffer; larger pieces go straight to where they belong.
    """

    def __init__(self, channel: Channel, size: int) -> None:
        self.buffer = memoryview(bytearray(size))
        self.start = self.end = 0  # what of the buffer has not been taken yet
        self._channel = channel
        self._is_empty = (
            not channel.buffers_internally
        )  # the last call found less than there was room for
        self._turns = 0
        self._begun_s: float | None = None
        self._moved = 0

    def begin_frame(self) -> None:
        """What comes now is a new frame."""
        self._begun_s = None

    async def fill_buffer(self, size: int) -> None:
        """Come back when so many bytes stand in the buffer, at `start`. Raises Gone."""
        while self.end - self.start < size:
            if self.start == self.end:
                self.start = self.end = 0
            elif len(self.buffer) - self.start < size:
                self._make_room(size)
            self.end += await self._some(self.buffer[self.end :], is_idle=self.start == self.end)

    async def receive_into(self, room: memoryview) -> int:
        """Some bytes of a frame; 0 where others had their turn before any were written, as the room
        may not be wanted any more. Raises Gone."""
        if self.start == self.end:
            if len(room) >= _DIRECT_BYTES:
                return await self._some(room, is_idle=False, may_return_empty=True)
            self.start = self.end = 0
            self.end = await self._some(self.buffer, is_idle=False, may_return_empty=True)
            return 0
        size = min(len(room), self.end - self.start)
        room[:size] = self.buffer[self.start : self.start + size]
        self.start += size
        return size

    async def skip(self, size: int) -> None:
        """Drop so many bytes. Raises Gone."""
        while size:
            if self.start == self.end:
                self.start = self.end = 0
                self.end = await self._some(self.buffer, is_idle=False)
            dropped = min(size, self.end - self.start)
            self.start += dropped
            size -= dropped

    def _make_room(self, size: int) -> None:
        """For a frame's bytes from `start` on."""
        have = self.end - self.start
        buffer = self.buffer
        if size > len(buffer):
            self.buffer = memoryview(bytearray(size))
        self.buffer[:have] = bytes(buffer[self.start : self.end])
        self.start, self.end = 0, have

    async def _some(
        self, room: memoryview, *, is_idle: bool, may_return_empty: bool = False
    ) -> int:
        while True:
            if self._is_empty:
                self._is_empty = False
                await self._wait(is_idle=is_idle)
                if may_return_empty:
                    return 0
            try:
                count = self._channel.receive_now(room)
            except BlockingIOError:
                self._is_empty = True
                continue
            self._is_empty = count < len(room) and not self._channel.buffers_internally
            self._moved += count
            self._turns += 1
            if self._turns >= _TURNS:  # there is always something: others are to have their turn
                self._turns = 0
                await trio.lowlevel.checkpoint()
            return count

    async def _wait(self, *, is_idle: bool) -> None:
        self._turns = 0
        if is_idle:
            await self._channel.wait_readable()
            return
        if self._begun_s is None:
            self._begun_s, self._moved = trio.current_time(), 0
        await wait_at_min_rate(self._begun_s, self._moved, self._channel.wait_readable)
