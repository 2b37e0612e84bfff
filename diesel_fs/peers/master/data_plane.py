"""The data plane of a master: answers READs that need not wait, for other nodes over TCP and for
clients of its own node over Unix sockets (`PEERS.md`, section 3).

Each connection has the chunk table of its version (`node/chunk_table.py`). The control plane (the
master's trio loop: `acceptor.py`, `local.py`) hands connections over after their handshake, and
answers the other requests.

Concurrency. One thread serves all connections, in a bare `epoll` loop: a turn of trio's loop costs
more than answering a request, which takes one `recv` and one `sendmsg` straight from the memory of
the chunks. The thread waits only for `epoll`: sockets do not block, and lent files are read only
from the page cache.

All state of connections belongs to this thread. Public methods may be called in any thread: they
append a command and wake the loop through an eventfd. Commands run between two rounds of events, in
order, so an answer cannot overtake the `adopt` of its connection. After `close`, the calling thread
runs its command itself.

While the control plane answers a forwarded request (it is then *in flight*), further requests on
the connection are answered, in any order.
"""

import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from select import EPOLLIN
from time import monotonic

from ...errors import CorruptError
from ...format.entries import Bytes
from ...net.channel import GRACE_S, RATE_BYTES_PER_S, Channel, ConnectionClosed, join_small
from ...system.vectored_io import byte_views, drop_written
from .. import wire
from ..node.chunk_table import ChunkTable
from ..wire import (
    ALL_GIVEN,
    GIVEN,
    HEAD_BYTES,
    LOAD,
    PART_BYTES,
    PARTS_MAX,
    PING,
    PLAN,
    READ,
    THROUGH,
    Parts,
)

log = logging.getLogger("diesel.task")

IDLE_S = 300.0

_BUFFER_BYTES = 64 << 10
"""Longer than any request."""

_TURN_REQUESTS = 64  # of one connection in a turn of the loop, so that others need not wait
_CHECK_S = 2.0  # interval of checks for slow and idle connections
unpack_single, pack_single_answer = wire.SINGLE.unpack_from, wire.SINGLE_ANSWER.pack
SINGLE_BYTES = wire.SINGLE.size
_no_error_if_full = suppress(BlockingIOError)
_COPIED_BYTES = 16 << 10  # smaller answers are copied behind their heads, which costs less


class ServedConnection:
    """An authenticated connection. Its fields belong to the data plane."""

    __slots__ = (
        "begun_s", "buffers_internally", "channel", "file", "held", "in_flight", "in_flight_bytes",
        "is_client", "is_local", "is_open", "moved", "rank", "receive", "send", "send_many",
        "table", "unsent", "used_s", "watched",
    )  # fmt: skip

    def __init__(
        self, channel: Channel, table: ChunkTable, rank: int, *, is_client: bool, is_local: bool
    ) -> None:
        """`table` is of the other end's version, `rank` the other end's node."""
        self.channel = channel
        self.table = table
        self.rank = rank
        self.is_client = is_client
        self.is_local = is_local
        self.file = channel.fileno()
        self.buffers_internally = channel.buffers_internally
        self.receive, self.send = channel.receive_some, channel.send_one
        self.send_many = channel.send_some
        self.is_open = True
        self.watched = 0  # the events that epoll waits for
        self.held = b""  # received and not handled yet
        self.unsent: list[memoryview] = []
        self.begun_s = self.used_s = monotonic()  # `unsent` began; the last request came
        self.moved = 0  # bytes sent since `begun_s`
        self.in_flight = 0  # requests that are forwarded and not answered
        self.in_flight_bytes = 0

    @property
    def is_blocked(self) -> bool:
        return bool(
            self.unsent
            or self.in_flight >= wire.REQUESTS_MAX
            or self.in_flight_bytes > wire.IN_FLIGHT_BYTES_MAX
        )


Forward = Callable[[ServedConnection, int, int, Parts, int], None]
"""Called by the data plane's thread with a READ that has to wait: connection, ID, flags, parts, and
their bytes. The control plane then calls `DataPlane.answer`."""


ForwardPlan = Callable[[ServedConnection, int, bytes], None]
"""The same for a message about plans: connection, ID, message."""


class DataPlane:
    """Its thread runs from the constructor to `close`."""

    def __init__(self, forward: Forward, forward_plan: ForwardPlan) -> None:
        self._forward = forward
        self._forward_plan = forward_plan
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, EPOLLIN)
        self._commands: deque[Callable[[], None]] = deque()
        self._connections: dict[int, ServedConnection] = {}
        self._masters: dict[int, ServedConnection] = {}  # the newest of each rank
        self._ready: deque[ServedConnection] = deque()  # left for the next turn
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._now_s = self._checked_s = monotonic()
        self._is_closed = False
        self._ending = threading.Lock()
        self._requests = self._parts = self._bytes = 0
        self._forwarded = 0
        self._thread = threading.Thread(target=self._run, name="diesel-data", daemon=True)
        self._thread.start()

    def adopt(self, connection: ServedConnection) -> None:
        """Take over a connection. A master's newest connection replaces its older one."""
        self._command(partial(self._adopt, connection))

    def send(self, connection: ServedConnection, parts: Sequence[Bytes], size: int) -> None:
        """Send `parts`, `size` bytes in all, with no other bytes between. They must not change any
        more."""
        self._command(partial(self._send_if_open, connection, parts, size))

    def answer(
        self, connection: ServedConnection, request_bytes: int, parts: Sequence[Bytes], size: int
    ) -> None:
        """As `send`, after a forwarded request for `request_bytes` bytes."""
        self._command(partial(self._answer, connection, request_bytes, parts, size))

    def drop(self, connection: ServedConnection) -> None:
        """Unsent bytes are lost."""
        self._command(partial(self._close, connection))

    def drop_all(self) -> None:
        """Close all connections that were adopted before this call."""
        self._command(self._close_all)

    @property
    def open_connections(self) -> int:
        return len(self._connections)

    def stats(self) -> dict[str, int]:
        """`inline` counts READs that were not forwarded."""
        connections = list(self._connections.values())
        return {
            "requests": self._requests,
            "parts": self._parts,
            "bytes": self._bytes,
            "inline": self._requests - self._forwarded,
            "connections": len(connections),
            "local_connections": sum(each.is_local for each in connections),
            "in_flight": sum(each.in_flight for each in connections),
        }

    def close(self) -> None:
        """May be called again."""
        self._command(self._end_thread)
        self._thread.join()

    def _command(self, command: Callable[[], None]) -> None:
        with self._ending:
            if not self._is_closed:
                self._commands.append(command)
                os.eventfd_write(self._wake, 1)
                return
        command()

    # The thread

    def _run(self) -> None:
        poll, connections, commands, ready = (
            self._epoll.poll, self._connections, self._commands, self._ready,
        )  # fmt: skip
        while not self._is_closed:
            for file, event in poll(0 if ready else _CHECK_S):
                connection = connections.get(file)
                if connection is not None:
                    try:
                        if event == EPOLLIN and not (connection.held or connection.unsent):
                            self._receive(connection)
                        else:
                            self._handle(connection, event)
                    except Exception as error:
                        self._end(connection, error)
                elif file == self._wake:
                    os.eventfd_read(self._wake)
            while commands:
                try:
                    commands.popleft()()
                except Exception:  # this thread serves all connections
                    log.exception("unexpected error in the data plane")
            for _ in range(len(ready)):
                connection = ready.popleft()
                self._guard(connection, partial(self._go_on, connection))
            self._now_s = now_s = monotonic()
            if now_s - self._checked_s >= _CHECK_S:
                self._checked_s = now_s
                self._close_slow(now_s)
        self._epoll.close()
        os.close(self._wake)

    def _guard(self, connection: ServedConnection, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._end(connection, error)

    def _end(self, connection: ServedConnection, error: Exception) -> None:
        if isinstance(error, CorruptError):
            log.warning("refused from='node %d' why=%r", connection.rank, error.message)
        elif isinstance(error, ConnectionClosed | OSError):
            log.debug("node %d: %s", connection.rank, error)
        else:
            log.error("unexpected error with node %d", connection.rank, exc_info=error)
        self._close(connection)

    def _adopt(self, connection: ServedConnection) -> None:
        if self._is_closed:
            connection.is_open = False
            connection.channel.close_socket()
            return
        if not connection.is_client:
            if (previous := self._masters.get(connection.rank)) is not None:
                self._close(previous)
            self._masters[connection.rank] = connection
        self._connections[connection.file] = connection
        self._epoll.register(connection.file, 0)
        self._guard(connection, partial(self._go_on, connection))

    def _close(self, connection: ServedConnection) -> None:
        if not connection.is_open:
            return
        connection.is_open = False
        del self._connections[connection.file]
        if self._masters.get(connection.rank) is connection:
            del self._masters[connection.rank]
        connection.unsent.clear()
        connection.held = b""
        connection.channel.close_socket()  # epoll forgets it

    def _end_thread(self) -> None:
        self._close_all()
        with self._ending:
            self._is_closed = True

    def _close_all(self) -> None:
        for each in list(self._connections.values()):
            self._close(each)

    def _close_slow(self, now_s: float) -> None:
        for each in list(self._connections.values()):
            is_late = now_s > each.begun_s + GRACE_S + each.moved / RATE_BYTES_PER_S
            if each.unsent and is_late:
                log.info("node %d takes its answers too slowly: disconnected", each.rank)
            elif each.held and not each.is_blocked and now_s > each.used_s + GRACE_S:
                log.info("node %d sends its requests too slowly: disconnected", each.rank)
            elif each.is_local or each.in_flight or now_s < each.used_s + IDLE_S:
                continue
            self._close(each)

    # Requests

    def _handle(self, connection: ServedConnection, event: int) -> None:
        if event == EPOLLIN and not connection.is_blocked:
            self._receive(connection)
        elif connection.unsent:
            if event & (select.EPOLLOUT | select.EPOLLERR):
                self._send_rest(connection)
                if not connection.unsent:
                    self._go_on(connection)
            elif event & select.EPOLLHUP:
                raise ConnectionClosed("the other end closed the connection")
        elif not connection.is_blocked:
            self._receive(connection)
        elif event & (select.EPOLLHUP | select.EPOLLERR):
            raise ConnectionClosed("the other end closed the connection")

    def _go_on(self, connection: ServedConnection) -> None:
        """Handle bytes that came before; then wait for more."""
        if not connection.is_open or connection.is_blocked or connection in self._ready:
            self._watch(connection)
            return
        held, connection.held = connection.held, b""
        if held:
            self._serve(connection, memoryview(held), len(held))
        must_wait = connection.is_blocked or connection in self._ready
        if connection.channel.buffers_internally and not must_wait:
            self._receive(connection)
        self._watch(connection)

    def _receive(self, connection: ServedConnection) -> None:
        """Receive once, and answer; from a channel with its own buffer (TLS), until that is
        empty."""
        buffer, is_buffered = self._buffer, connection.buffers_internally
        while True:
            try:
                count = connection.receive(buffer)
            except BlockingIOError:
                return
            if count >= SINGLE_BYTES and not (connection.held or connection.in_flight):
                if not self._answer_at_once(connection, count):
                    self._serve(connection, buffer, count)
                elif not (is_buffered and connection.channel.has_received):
                    return
            elif not count:
                raise ConnectionClosed("the other end closed the connection")
            elif connection.held:
                held, begun_s = connection.held + buffer[:count], connection.used_s
                connection.held = b""
                self._serve(connection, memoryview(held), len(held))
                if len(connection.held) == len(held):  # the request is still incomplete
                    connection.used_s = begun_s
            else:
                self._serve(connection, buffer, count)
            if not (is_buffered and connection.channel.has_received):
                return
            if connection.is_blocked or connection in self._ready:
                return

    def _answer_at_once(self, connection: ServedConnection, length: int) -> bool:
        """Answer the only request in the buffer, of `length` bytes, if all its parts are in memory;
        returns whether it did. Raises OSError. Nearly all requests are answered here, so it has few
        operations."""
        buffer, table = self._buffer, connection.table
        number, kind, flags, zero, count, none, chunk, start, size = unpack_single(buffer)
        if (
            length != HEAD_BYTES + count * PART_BYTES
            or kind != READ
            or flags > LOAD
            or zero
            or none
            or count > PARTS_MAX
        ):
            return False
        answer: list[Bytes]
        if count == 1 and size <= _COPIED_BYTES:
            view = table.views.get(chunk)
            if view is None or start + size > len(view):
                return False
            content = pack_single_answer(number, READ, 0, 0, 1, size, GIVEN)
            content += view[start : start + size]
            answer, left = [content], len(content)
            if table.records_reads:
                table.record_read((chunk,), size)
        else:
            found, size = table.find(buffer[HEAD_BYTES:length])
            if found is None:
                return False
            answer = [wire.answer_head(number, READ, ALL_GIVEN[:count], size), *found]
            left = HEAD_BYTES + count + size
        connection.used_s = self._now_s
        self._requests += 1
        self._parts += count
        self._bytes += size
        with _no_error_if_full:
            left -= connection.send_many(answer) if len(answer) > 1 else connection.send(answer[0])
        if left:
            self._keep_unsent(connection, answer, left)
            self._watch(connection)
        return True

    def _serve(self, connection: ServedConnection, content: memoryview, end: int) -> None:
        """Answer the requests in the first `end` bytes, and hold an incomplete one."""
        connection.used_s = self._now_s
        at = turn = 0
        while end - at >= HEAD_BYTES and not connection.is_blocked:
            if turn == _TURN_REQUESTS:
                self._ready.append(connection)
                break
            turn += 1
            length = self._answer_any(connection, content, at, end)
            if not length:
                break
            at += length
        if at < end:
            connection.held = bytes(content[at:end])
        is_usual = not (connection.unsent or connection.in_flight or connection.held)
        if not is_usual or connection.watched != EPOLLIN:
            self._watch(connection)

    def _answer_any(
        self, connection: ServedConnection, content: memoryview, at: int, end: int
    ) -> int:
        """Answer or forward the request at `at`; returns its length, or 0 if it is incomplete."""
        table = connection.table
        request = wire.parse_request(content, at)
        length = HEAD_BYTES + request.body_bytes
        if end - at < length:
            return 0
        if request.flags & THROUGH and not connection.is_local:
            raise CorruptError("a request of another node that goes through this master")
        self._requests += 1
        self._parts += request.counted
        if request.kind == PING:
            self._forwarded += 1
            head = wire.answer_head(request.id, PING, b"", 0)
            self._send(connection, (head,), len(head))
            return length
        begin = at + HEAD_BYTES
        if request.kind == PLAN:
            if connection.is_client:
                raise CorruptError("a message about plans that is not a master's")
            self._forwarded += 1
            connection.in_flight += 1
            connection.in_flight_bytes += request.body_bytes
            self._forward_plan(connection, request.id, bytes(content[begin : at + length]))
            return length
        found, size = table.find(content[begin : at + length])
        if found is None:
            parts, size = wire.parse_parts(content, request.counted, table.sizes, start=begin)
            self._bytes += size
            self._forwarded += 1
            connection.in_flight += 1
            connection.in_flight_bytes += size
            self._forward(connection, request.id, request.flags, parts.copy(), size)
        else:
            self._bytes += size
            head = wire.answer_head(request.id, READ, ALL_GIVEN[: request.counted], size)
            self._send(connection, (head, *found), len(head) + size)
        return length

    def _send_if_open(
        self, connection: ServedConnection, parts: Sequence[Bytes], size: int
    ) -> None:
        if connection.is_open:
            self._guard(connection, partial(self._send_and_watch, connection, parts, size))

    def _answer(
        self, connection: ServedConnection, request_bytes: int, parts: Sequence[Bytes], size: int
    ) -> None:
        connection.in_flight -= 1
        connection.in_flight_bytes -= request_bytes
        if connection.is_open:
            self._guard(connection, partial(self._send_and_go_on, connection, parts, size))

    def _send_and_go_on(
        self, connection: ServedConnection, parts: Sequence[Bytes], size: int
    ) -> None:
        self._send(connection, parts, size)
        self._go_on(connection)

    def _send_and_watch(
        self, connection: ServedConnection, parts: Sequence[Bytes], size: int
    ) -> None:
        self._send(connection, parts, size)
        self._watch(connection)

    def _send(self, connection: ServedConnection, parts: Sequence[Bytes], size: int) -> None:
        sent = 0
        if not connection.unsent:
            channel = connection.channel
            if channel.buffers_internally:  # TLS: a record for each part would cost more
                parts = join_small(parts)
            with suppress(BlockingIOError):
                sent = channel.send_some(parts)
        if sent != size:
            self._keep_unsent(connection, parts, size - sent)

    def _keep_unsent(self, connection: ServedConnection, parts: Sequence[Bytes], left: int) -> None:
        """The socket did not take the last `left` bytes."""
        views = byte_views(parts)
        drop_written(views, sum(map(len, views)) - left)
        if not connection.unsent:
            connection.begun_s, connection.moved = monotonic(), 0
        connection.unsent += views

    def _send_rest(self, connection: ServedConnection) -> None:
        try:
            while connection.unsent:
                sent = connection.channel.send_some(connection.unsent)
                connection.moved += sent
                drop_written(connection.unsent, sent)
        except BlockingIOError:
            pass
        self._watch(connection)

    def _watch(self, connection: ServedConnection) -> None:
        if not connection.is_open:
            return
        if connection.unsent:
            wanted = select.EPOLLOUT
        else:
            wanted = 0 if connection.is_blocked or connection in self._ready else EPOLLIN
        if wanted != connection.watched:
            connection.watched = wanted
            self._epoll.modify(connection.file, wanted)
