"""One other master of the task, and the connection on which this master sends it requests.

A `Peer` connects when a request needs it, writes the answers' bytes into the callers' memory, and
enforces deadlines. Its circuit breaker (`../../net/breaker.py`) decides whether it asks the peer.

Concurrency: one trio loop. Any number of tasks call `read`. Each sends its request itself; one task
receives all answers. A caller that is cancelled withdraws its memory between two system calls;
later bytes for it are dropped.
"""

import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import trio

from ...errors import CorruptError, DieselError
from ...net.breaker import PeerBreaker
from ...net.channel import Channel, ConnectionClosed, FrameReader
from .. import wire
from ..handshake import LocalIdentity, connect
from ..members.membership import Member
from ..wire import ALL_GIVEN, BUSY, FAILED, GIVEN, HEAD_BYTES, LOAD, Parts

log = logging.getLogger("diesel.task")

Statuses = npt.NDArray[np.uint8]

_BUFFER_BYTES = 16 << 10  # small answers take one system call; this part of large ones is copied

_BULK_BYTES, _BULK_IN_FLIGHT_BYTES = 1 << 20, 8 << 20
"""A request for more than `_BULK_BYTES` is large. Small answers wait behind those of large ones, of
which at most `_BULK_IN_FLIGHT_BYTES` are in flight (`PEERS.md`, section 3)."""

_IDS = 1 << 32


class _PendingRequest:
    """Its answer's payload goes to `room`, and is late after `due_s`."""

    __slots__ = (
        "body", "count", "due_s", "is_late", "is_sent", "is_working", "kind", "parts", "room",
        "sent_s", "size", "statuses", "waiter",
    )  # fmt: skip

    def __init__(self, kind: int, parts: Parts | None, room: memoryview, size: int) -> None:
        self.kind = kind
        self.parts = parts
        self.count = 0 if parts is None else len(parts)
        self.room: memoryview | None = room  # None: the caller does not wait any more
        self.size = size
        self.body = b""
        self.is_sent = self.is_late = self.is_working = False
        self.sent_s = self.due_s = 0.0
        self.waiter: trio.lowlevel.Task | None = None
        self.statuses: Statuses | None = None

    def abandon(self, _: object = None) -> trio.lowlevel.Abort:
        self.waiter = self.room = None
        return trio.lowlevel.Abort.SUCCEEDED


class Peer:
    def __init__(self, me: LocalIdentity, member: Member) -> None:
        self._me = me
        self.member = member
        self._breaker = PeerBreaker()
        self._channel: Channel | None = None
        self._is_over = self._is_paused = False
        self._connect_wanted = trio.Event()
        self._connect_ticket = 0  # the breaker's, of the request that wants a connection
        self._connect_attempted = trio.Event()
        self._unsent = trio.Event()
        self._timer = trio.CancelScope()
        self._pending: dict[int, _PendingRequest] = {}
        self._last_id = 0
        self._in_flight_bytes = self._bulk_bytes = 0
        self._released = trio.lowlevel.ParkingLot()
        self._counts = dict.fromkeys(
            "connections requests parts bytes timed_out failed skipped damaged".split(), 0
        )

    # Calls of the master

    async def read(self, parts: Parts, room: memoryview, *, load: bool) -> Statuses:
        """Returns a status for each part; the bytes of parts with `GIVEN` lie in `room`, each at
        the sum of the sizes of all parts before it. Nothing writes to `room` after the return. A
        failure of the peer is a status, not an error."""
        flags = LOAD if load else 0
        count = len(parts)
        size = int(parts[0, 2]) if count == 1 else int(parts[:, 2].sum(dtype=np.uint64))
        if count == 1 or (count <= wire.PARTS_MAX and size <= wire.PARTS_BYTES_MAX):
            return await self._request(wire.READ, flags, parts, room, size)
        statuses = np.full(count, BUSY, np.uint8)
        for first, last, start, end in _split(parts):
            answered = await self._request(
                wire.READ, flags, parts[first:last], room[start:end], end - start
            )
            statuses[first:last] = answered
            if (answered >= BUSY).all():
                break
        return statuses

    async def send_plan(self, body: bytes) -> int | None:
        """Send a message about plans. Returns the answer's status; None if no request may be sent
        now, or the answer is late. Being late is no failure of the peer: it may have other work,
        and reads do not wait for this message."""
        pending = _PendingRequest(wire.PLAN, None, memoryview(b""), 0)
        pending.body, pending.count, pending.is_working = body, 1, True
        await self._request_pending(pending, 0)
        return None if pending.statuses is None else int(pending.statuses[0])

    async def ping(self) -> bool:
        return not len(await self._request(wire.PING, 0, None, memoryview(b""), 0))

    def record_damage(self) -> None:
        """Bytes from this peer did not match their checksum."""
        self._counts["damaged"] += 1
        if self._breaker.record_damage(trio.current_time()):
            log.error("%s sent damaged data three times: it is not asked for 60 s", self)

    def stats(self) -> dict[str, object]:
        now_s = trio.current_time()
        return {
            **self._counts,
            "rank": self.member.rank,
            "address": self.member.address,
            "state": self._breaker.state(now_s).value,
            "connected": self._channel is not None,
            "in_flight": len(self._pending),
            "timeout_ms": round(1000 * self._breaker.timeout_s(0)),
        }

    def __str__(self) -> str:
        return f"master {self.member.rank} at {self.member.address}"

    # Connecting

    async def run(self) -> None:
        try:
            while True:
                await self._connect_wanted.wait()
                self._channel = await self._attempt()
                self._connect_wanted = trio.Event()
                self._connect_attempted.set()
                self._connect_attempted = trio.Event()
                if self._channel is not None:
                    await self._serve(self._channel)
        finally:
            self._is_over = True
            self._connect_attempted.set()
            if self._channel is not None:
                self._drop_channel(self._channel)

    async def _attempt(self) -> Channel | None:
        try:
            channel = await connect(self._me.connector, self.member)
        except Exception as error:  # no failure of a peer may end the master
            if not isinstance(error, DieselError):
                log.exception("unexpected error with %s", self)
            if self._breaker.record_refusal(self._connect_ticket, trio.current_time()):
                self._log_pause(str(error))
            return None
        self._counts["connections"] += 1
        return channel

    async def _serve(self, channel: Channel) -> None:
        async with trio.open_nursery() as nursery:

            async def until_it_ends(work: Callable[[Channel], Awaitable[None]]) -> None:
                try:
                    await work(channel)
                except ConnectionClosed as closed:
                    log.debug("%s: %s", self, closed)
                except CorruptError as error:
                    self._breaker.open(trio.current_time())
                    log.error("%s violates the protocol: %s", self, error)
                except Exception:
                    self._breaker.open(trio.current_time())
                    log.exception("unexpected error with %s", self)
                nursery.cancel_scope.cancel()

            nursery.start_soon(until_it_ends, self._send_rest)
            nursery.start_soon(until_it_ends, self._expire_late)
            nursery.start_soon(until_it_ends, self._receive)
        self._drop_channel(channel)

    def _drop_channel(self, channel: Channel) -> None:
        if self._channel is not channel:
            return
        self._channel = None
        channel.close()
        unanswered, self._pending = self._pending, {}
        self._in_flight_bytes = self._bulk_bytes = 0
        self._released.unpark_all()
        for each in unanswered.values():
            _wake(each)

    def _log_pause(self, why: str) -> None:
        if not self._is_paused:
            log.warning("%s is not asked for now: %s", self, why)
        self._is_paused = True

    async def _send_rest(self, channel: Channel) -> None:
        while True:
            await self._unsent.wait()
            self._unsent = trio.Event()
            await channel.drain()

    async def _expire_late(self, channel: Channel) -> None:
        """Wake the callers of late requests. One task does so for all, as a cancel scope for each
        request would cost more than the rest of the request."""
        while True:
            due_s = (
                pending.due_s for pending in self._pending.values() if pending.waiter is not None
            )
            with trio.CancelScope(deadline=min(due_s, default=math.inf)) as self._timer:
                await trio.sleep_forever()
            now_s = trio.current_time()
            for pending in self._pending.values():
                if pending.waiter is not None and pending.due_s <= now_s:
                    pending.is_late = True
                    _wake(pending)

    # One request

    async def _request(
        self, kind: int, flags: int, parts: Parts | None, room: memoryview, size: int
    ) -> Statuses:
        """Returns no statuses for a PING that was answered, one (not `GIVEN`) for a failed one."""
        return await self._request_pending(_PendingRequest(kind, parts, room[:size], size), flags)

    async def _request_pending(self, pending: _PendingRequest, flags: int) -> Statuses:
        parts, now_s = pending.parts, trio.current_time()
        ticket = 0 if self._is_over else self._breaker.admit(now_s)
        if not ticket:
            self._counts["skipped"] += 1
            return _statuses(BUSY, parts)
        pending.sent_s = now_s
        try:
            await self._send_and_wait(pending, flags, ticket)
        except BaseException:
            self._breaker.cancel(ticket)
            raise
        if pending.statuses is not None:
            if self._breaker.record_success(ticket):
                self._is_paused = False
                log.info("%s is asked again", self)
            return pending.statuses
        if not pending.is_sent:
            self._counts["skipped"] += 1
            self._breaker.cancel(ticket)
            return _statuses(BUSY, parts)
        self._counts["timed_out" if pending.is_late else "failed"] += 1
        if pending.is_late and pending.is_working:
            # Its store is slow; a peer that has stopped sends no WORKING to the next requests
            self._breaker.cancel(ticket)
        elif self._breaker.record_failure(ticket, trio.current_time()):
            self._log_pause("it does not answer")
        return _statuses(FAILED, parts)

    async def _send_and_wait(self, pending: _PendingRequest, flags: int, ticket: int) -> None:
        """Return when the request is answered (`pending.statuses` is set), late, or cannot be
        answered any more."""
        pending.due_s = pending.sent_s + self._breaker.timeout_s(
            pending.size + self._in_flight_bytes
        )
        if pending.is_working:
            pending.due_s += wire.working_s(pending.count)
        channel = self._channel
        if channel is None or not self._fits(pending.size):
            with trio.CancelScope(deadline=pending.due_s):
                channel = await self._connection(ticket) if channel is None else channel
                while channel is self._channel and not self._fits(pending.size):
                    await self._released.park()
            if channel is None or channel is not self._channel or not self._fits(pending.size):
                return
            pending.sent_s = trio.current_time()
        request_id = self._last_id = (self._last_id + 1) % _IDS
        if request_id in self._pending:  # the old one still waits, after 4 billion others
            return
        pending.is_sent = True
        self._pending[request_id] = pending
        self._in_flight_bytes += pending.size
        if pending.size > _BULK_BYTES:
            self._bulk_bytes += pending.size
        if pending.body:
            request = wire.plan_request(request_id, pending.body)
        else:
            request = wire.request(request_id, pending.kind, flags, pending.parts)
        try:
            if not channel.send_now((request,), len(request)):
                self._unsent.set()
        except ConnectionClosed:
            self._drop_channel(channel)
            return
        pending.waiter = trio.lowlevel.current_task()
        if pending.due_s < self._timer.deadline:
            self._timer.deadline = pending.due_s
        try:
            await trio.lowlevel.wait_task_rescheduled(pending.abandon)
        finally:
            pending.abandon()

    async def _connection(self, ticket: int) -> Channel | None:
        if not self._is_over:
            self._connect_ticket = ticket
            self._connect_wanted.set()
            await self._connect_attempted.wait()
        return self._channel

    def _fits(self, size: int) -> bool:
        if len(self._pending) >= wire.REQUESTS_MAX:
            return False
        if size <= _BULK_BYTES:
            return self._in_flight_bytes + size <= wire.IN_FLIGHT_BYTES_MAX
        return not self._bulk_bytes or self._bulk_bytes + size <= _BULK_IN_FLIGHT_BYTES

    def _finish(self, request_id: int, pending: _PendingRequest) -> None:
        del self._pending[request_id]
        self._in_flight_bytes -= pending.size
        if pending.size > _BULK_BYTES:
            self._bulk_bytes -= pending.size
        if self._released:
            self._released.unpark_all()
        if not pending.is_working:  # else the latency would be the store's
            self._breaker.record_latency(trio.current_time() - pending.sent_s, pending.size)
        _wake(pending)

    # Answers

    async def _receive(self, channel: Channel) -> None:
        reader = FrameReader(channel, _BUFFER_BYTES)
        counts = self._counts
        while True:
            reader.begin_frame()
            await reader.fill_buffer(HEAD_BYTES)
            head = wire.parse_answer(reader.buffer, reader.start)
            pending = self._pending.get(head.id)
            if pending is None:
                raise CorruptError("an answer without a request")
            wire.check_answer(head, pending.kind, pending.count, pending.size)
            if head.kind == wire.WORKING:
                reader.start += HEAD_BYTES
                if not pending.is_working:
                    pending.is_working = True
                    pending.due_s += wire.working_s(pending.count)
                continue
            await reader.fill_buffer(HEAD_BYTES + head.counted)
            start = reader.start + HEAD_BYTES
            reader.start = start + head.counted
            status_bytes = bytearray(reader.buffer[start : reader.start])
            statuses = np.frombuffer(status_bytes, np.uint8)
            if pending.parts is not None and status_bytes != ALL_GIVEN[: head.counted]:
                await self._fill_some(reader, pending, statuses, head.payload_bytes)
            elif head.payload_bytes != pending.size:
                raise CorruptError("an answer of another length")
            elif pending.size:
                await _fill(reader, pending, ((0, pending.size),))
            counts["requests"] += 1
            counts["parts"] += head.counted
            counts["bytes"] += head.payload_bytes
            pending.statuses = statuses
            self._finish(head.id, pending)

    async def _fill_some(
        self, reader: FrameReader, pending: _PendingRequest, statuses: Statuses, payload_bytes: int
    ) -> None:
        assert pending.parts is not None
        if wire.given_bytes(pending.parts, statuses) != payload_bytes:
            raise CorruptError("an answer of another length")
        await _fill(reader, pending, _given_ranges(pending.parts, statuses))


async def _fill(
    reader: FrameReader, pending: _PendingRequest, ranges: Sequence[tuple[int, int]]
) -> None:
    for at, end in ranges:
        while at < end:
            room = pending.room
            if room is None:
                await reader.skip(end - at)
                break
            at += await reader.receive_into(room[at:end])


def _wake(pending: _PendingRequest) -> None:
    waiter, pending.waiter = pending.waiter, None
    if waiter is not None:
        trio.lowlevel.reschedule(waiter)


def _given_ranges(parts: Parts, statuses: Statuses) -> list[tuple[int, int]]:
    """The ranges of the room (start, end) for parts with `GIVEN`; neighbours are joined."""
    ends = np.cumsum(parts[:, 2], dtype=np.int64)
    given = np.concatenate(([False], statuses == GIVEN, [False]))
    edges = np.flatnonzero(given[1:] != given[:-1])  # the start of a run, its end, and so on
    starts = np.concatenate(([0], ends))[edges]
    return list(zip(starts[::2].tolist(), starts[1::2].tolist(), strict=True))


def _split(parts: Parts) -> Iterator[tuple[int, int, int, int]]:
    """Divide parts into requests within the limits. Yields each one's first row, the row behind its
    last, and where their bytes start and end in the room."""
    first = start = at = 0
    for i, size in enumerate(parts[:, 2].tolist()):
        if i > first and (i - first >= wire.PARTS_MAX or at + size - start > wire.PARTS_BYTES_MAX):
            yield first, i, start, at
            first, start = i, at
        at += size
    yield first, len(parts), start, at


def _statuses(status: int, parts: Parts | None) -> Statuses:
    return np.full(1 if parts is None else len(parts), status, np.uint8)
