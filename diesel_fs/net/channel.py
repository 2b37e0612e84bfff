"""Bytes to and from another process over a TCP connection, plain or with TLS.

A channel first tries to send or receive at once, and enters trio's loop only if it must wait:
trio's own sockets cost two turns of the loop for each call, more than the rest of a small request.

Concurrency: one task receives. Any task may send whole frames by `send_now`, in the order of the
calls. The next task that calls `drain` sends the bytes that the socket did not take.
"""

import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import trio

from ..format.entries import Bytes
from ..system.vectored_io import BUFFERS_MAX, byte_views, drop_written
from .tls import TLS_RECEIVED_BYTES, TlsEngine

GRACE_S = 10.0
RATE_BYTES_PER_S = 256 << 10
"""The lowest rate of a frame after its first `GRACE_S` seconds; a slower end is disconnected."""

_TLS_PIECE_BYTES = 256 << 10  # encrypted before any of it is sent
_of_thread = threading.local()
_TLS_RECORD_BYTES = 16 << 10
_DIRECT_BYTES = 4 << 10  # larger pieces are received without a copy
_TURNS = 16  # calls in a row that returned bytes, then other tasks run
_LINGER_S, _LINGER_BYTES = 1.0, 64 << 10  # limits of reading after the last send

_USER_TIMEOUT_MS = 10_000  # a machine that acknowledges nothing for this long is gone
SocketOptions = Sequence[tuple[int, int, int]]

OPTIONS: SocketOptions = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS),
)


class ConnectionClosed(Exception):
    """The other end closed the connection or is too slow, or the connection broke."""


class Channel:
    """Methods raise ConnectionClosed, unless they name other errors."""

    buffers_internally = False
    """Whether received bytes may wait in the channel while the socket is not readable (TLS)."""

    _drained_at_once = BUFFERS_MAX  # unsent parts that `drain` passes to `send_some` at once

    def __init__(self, connected: socket.socket, options: SocketOptions = OPTIONS) -> None:
        self._socket = connected
        self._file = connected.fileno()
        connected.setblocking(False)
        with suppress(OSError):  # some options do not exist for every kind of socket
            for level, option, value in options:
                connected.setsockopt(level, option, value)
        self._unsent: list[memoryview] = []
        self._draining = trio.Lock()

    def receive_now(self, room: memoryview) -> int:
        """Receive bytes that have arrived; returns their number. Raises BlockingIOError if none
        have, ConnectionClosed."""
        try:
            count = self._socket.recv_into(room)
        except BlockingIOError:
            raise
        except OSError as error:
            raise ConnectionClosed(error.strerror) from error
        if not count:
            raise ConnectionClosed("the other end closed the connection")
        return count

    async def wait_readable(self) -> None:
        try:
            await trio.lowlevel.wait_readable(self._file)
        except (trio.ClosedResourceError, OSError) as error:
            raise ConnectionClosed("the connection was closed") from error

    async def receive(self, room: memoryview) -> int:
        """Receive at least one byte; returns the number."""
        while True:
            try:
                return self.receive_now(room)
            except BlockingIOError:
                await self.wait_readable()

    async def receive_exactly(self, size: int) -> bytearray:
        content = bytearray(size)
        left = memoryview(content)
        while len(left):
            left = left[await self.receive(left) :]
        return content

    def send_now(self, parts: Sequence[Bytes], size: int) -> bool:
        """Returns whether the socket has taken all `size` bytes. If not, a task must call `drain`,
        and the parts must not change until it returns."""
        sent = 0
        if not self._unsent:
            try:
                sent = self.send_some(parts)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise ConnectionClosed(error.strerror) from error
            if sent == size:
                return True
        self._unsent += byte_views(parts)
        drop_written(self._unsent, sent)
        return False

    async def drain(self) -> None:
        """Wait until the socket has taken everything from `send_now`."""
        async with self._draining:
            begun_s = trio.current_time()
            moved = 0
            while self._unsent:
                await wait_at_min_rate(begun_s, moved, self.wait_writable)
                try:
                    sent = self.send_some(self._unsent[: self._drained_at_once])
                except BlockingIOError:
                    continue
                except OSError as error:
                    raise ConnectionClosed(error.strerror) from error
                drop_written(self._unsent, sent)
                moved += sent

    async def half_close(self) -> None:
        """Announce the end, then read for a moment: after an immediate close, the kernel could
        discard sent bytes."""
        dropped, sink = 0, memoryview(bytearray(4096))
        with suppress(ConnectionClosed, OSError), trio.move_on_after(_LINGER_S):
            self.end_sending()
            while dropped < _LINGER_BYTES:
                dropped += await self.receive(sink)

    def end_sending(self) -> None:
        """Raises OSError."""
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Waiting tasks get ConnectionClosed. May be called again."""
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._file)
            self._socket.close()

    # For a thread without trio, beside `receive_now` and `send_some`

    @property
    def has_received(self) -> bool:
        return False

    @property
    def receive_some(self) -> Callable[[memoryview], int]:
        """A function as `receive_now`, but without TLS it returns 0 at the end, and raises
        OSError."""
        return self._socket.recv_into

    @property
    def send_one(self) -> Callable[[Bytes], int]:
        """A function as `send_some`, for one buffer."""
        return self._socket.send

    def fileno(self) -> int:
        """Returns -1 after the close."""
        return self._socket.fileno()

    def close_socket(self) -> None:
        """As `close`, for a thread without trio: no task may wait for the connection."""
        self._socket.close()

    def send_some(self, parts: Sequence[Bytes]) -> int:
        """Send as many bytes as the socket takes now; returns their number. Raises BlockingIOError
        if it takes none, OSError."""
        return self._socket.sendmsg(parts if len(parts) <= BUFFERS_MAX else parts[:BUFFERS_MAX])

    async def wait_writable(self) -> None:
        try:
            await trio.lowlevel.wait_writable(self._file)
        except (trio.ClosedResourceError, OSError) as error:
            raise ConnectionClosed("the connection was closed") from error


class TlsChannel(Channel):
    buffers_internally = True
    _drained_at_once = 1

    def __init__(
        self,
        connected: socket.socket,
        context: ssl.SSLContext,
        *,
        accepted: bool,
        options: SocketOptions = OPTIONS,
    ) -> None:
        """The caller must call `do_handshake` before it sends or receives."""
        super().__init__(connected, options)
        self._engine = TlsEngine(context, accepted=accepted)
        self._encrypted = memoryview(b"")  # not sent yet
        self._encrypted_from = 0  # the number of plain bytes in it, which do not count as sent yet

    async def do_handshake(self) -> None:
        try:
            is_done = False
            while not is_done:
                try:
                    is_done = self._engine.do_handshake()
                finally:  # after an error, the other end gets an alert
                    self._encrypted = memoryview(self._engine.take_encrypted())
                    await self._flush()
                if not is_done:
                    await self.wait_readable()
                    with suppress(BlockingIOError):
                        self._feed()
        except ssl.SSLError as error:
            raise ConnectionClosed(f"the TLS handshake failed: {error.reason or error}") from error
        except OSError as error:
            raise ConnectionClosed(
                error.strerror or "the other end closed the connection"
            ) from error

    async def _flush(self) -> None:
        while True:
            try:
                self._send_encrypted()
            except BlockingIOError:
                await self.wait_writable()
            else:
                return

    @property
    def peer_certificate(self) -> bytes:
        """In DER. Raises ConnectionClosed if there is none."""
        found = self._engine.peer_certificate
        if not found:
            raise ConnectionClosed("the other end has no certificate")
        return found

    def receive_now(self, room: memoryview) -> int:
        while True:
            try:
                if self._engine.has_received:
                    count = self._engine.decrypt_into(room)
                    if count:
                        return count
                self._feed()
            except BlockingIOError:
                raise
            except EOFError:
                raise ConnectionClosed("the other end closed the connection") from None
            except OSError as error:  # ssl.SSLError is one
                raise ConnectionClosed(str(error)) from error

    def _feed(self) -> None:
        """Raises BlockingIOError if no bytes have arrived."""
        room = _received_room()
        count = self._socket.recv_into(room)
        self._engine.feed(room[:count])

    def send_now(self, parts: Sequence[Bytes], size: int) -> bool:
        return super().send_now(join_small(parts), size)

    @property
    def receive_some(self) -> Callable[[memoryview], int]:
        return self.receive_now

    @property
    def has_received(self) -> bool:
        return self._engine.has_received

    @property
    def send_one(self) -> Callable[[Bytes], int]:
        """As for `send_some`, after an incomplete call the next one must begin with the same
        bytes."""
        return self._send_one

    def _send_one(self, content: Bytes) -> int:
        if len(self._encrypted):
            return self.send_some((content,))
        self._engine.encrypt(content)
        encrypted = self._engine.take_encrypted()
        self._encrypted, self._encrypted_from = memoryview(encrypted), len(content)
        return self._send_encrypted()

    def send_some(self, parts: Sequence[Bytes]) -> int:
        """After BlockingIOError or a partial send, the next call must begin with the same bytes,
        since some are encrypted already."""
        sent = skipped = self._send_encrypted()
        for part in parts:
            view = memoryview(part)[skipped:]
            skipped -= len(part) - len(view)
            for at in range(0, len(view), _TLS_PIECE_BYTES):
                piece = view[at : at + _TLS_PIECE_BYTES]
                self._engine.encrypt(piece)
                self._encrypted_from += len(piece)
                if self._encrypted_from >= _TLS_PIECE_BYTES:
                    self._encrypted = memoryview(self._engine.take_encrypted())
                    try:
                        sent += self._send_encrypted()
                    except BlockingIOError:
                        if not sent:
                            raise
                        return sent
        self._encrypted = memoryview(self._engine.take_encrypted())
        try:
            return sent + self._send_encrypted()
        except BlockingIOError:
            if not sent:
                raise
            return sent

    def _send_encrypted(self) -> int:
        """Returns the number of plain bytes sent. Raises BlockingIOError if some encrypted bytes
        are left, OSError."""
        while len(self._encrypted):
            self._encrypted = self._encrypted[self._socket.send(self._encrypted) :]
        sent, self._encrypted_from = self._encrypted_from, 0
        return sent


def _received_room() -> memoryview:
    """Reused by the next call in the same thread."""
    room: memoryview | None = getattr(_of_thread, "room", None)
    if room is None:
        room = _of_thread.room = memoryview(bytearray(TLS_RECEIVED_BYTES))
    return room


def join_small(parts: Sequence[Bytes]) -> list[Bytes]:
    """Join small parts, since each part costs at least one TLS record."""
    joined: list[Bytes] = []
    small: list[Bytes] = []
    size = 0  # of all in `small`
    for part in parts:
        if size + len(part) > _TLS_RECORD_BYTES:
            joined.append(b"".join(small))
            small, size = [], 0
        if len(part) >= _TLS_RECORD_BYTES:
            joined.append(part)
        else:
            small.append(part)
            size += len(part)
    joined.append(b"".join(small))
    return [part for part in joined if len(part)]


async def wait_at_min_rate(begun_s: float, moved: int, wait: Callable[[], Awaitable[None]]) -> None:
    """Call `wait`. Raises ConnectionClosed if a frame that began at `begun_s` and has moved `moved`
    bytes becomes slower than the minimum rate."""
    with trio.CancelScope(deadline=begun_s + GRACE_S + moved / RATE_BYTES_PER_S) as scope:
        await wait()
    if scope.cancelled_caught:
        raise ConnectionClosed("the other end is too slow")


class FrameReader:
    """Reads the frames that arrive on a channel, for the one task that receives.

    The wait between frames has no limit; a frame that has begun must arrive at the minimum rate.
    Small pieces go through a buffer, larger ones directly into the caller's memory. Methods raise
    ConnectionClosed.
    """

    def __init__(self, channel: Channel, size: int) -> None:
        """`size` is the first length of the buffer, which grows."""
        self.buffer = memoryview(bytearray(size))
        self.start = self.end = 0  # the unread part of the buffer
        self._channel = channel
        # Whether to wait before receiving, since the last call took all bytes
        self._is_empty = not channel.buffers_internally
        self._turns = 0  # calls that returned bytes since other tasks ran
        self._begun_s: float | None = None  # the time of the first wait for this frame
        self._moved = 0  # bytes received since then

    def begin_frame(self) -> None:
        self._begun_s = None

    async def fill_buffer(self, size: int) -> None:
        """Wait until the buffer has `size` bytes from `start` on."""
        while self.end - self.start < size:
            if self.start == self.end:
                self.start = self.end = 0
            elif len(self.buffer) - self.start < size:
                self._make_room(size)
            self.end += await self._some(self.buffer[self.end :], is_idle=self.start == self.end)

    async def receive_into(self, room: memoryview) -> int:
        """Receive some bytes of a frame; returns their number. 0 means that other tasks ran and
        nothing was written, so the room may no longer be wanted."""
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
        while size:
            if self.start == self.end:
                self.start = self.end = 0
                self.end = await self._some(self.buffer, is_idle=False)
            dropped = min(size, self.end - self.start)
            self.start += dropped
            size -= dropped

    def _make_room(self, size: int) -> None:
        unread = bytes(self.buffer[self.start : self.end])
        if size > len(self.buffer):
            self.buffer = memoryview(bytearray(size))
        self.start, self.end = 0, len(unread)
        self.buffer[: self.end] = unread

    async def _some(
        self, room: memoryview, *, is_idle: bool, may_return_empty: bool = False
    ) -> int:
        """With `may_return_empty`, returns 0 after a wait. While `is_idle`, the wait has no
        limit."""
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
            if self._turns >= _TURNS:  # bytes keep arriving, so let other tasks run
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
