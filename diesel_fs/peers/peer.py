"""The asking end: one other master, and the connection to it.

Owned here: when it is connected to, requests that are under way, answers and where their bytes go,
deadlines. Not owned: whether it is worth asking (`breaker.py`), the handshake (`handshake.py`), who
is asked for what (`master.py`).

Concurrency: trio's. Any number of tasks read; each sends its request itself, and one task receives
the answers of all, straight into the memory of those who wait. A reader that has gone away takes
its memory with it between two system calls; what comes for it later is dropped.
"""

import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import trio

from ..errors import CorruptError, DieselError
from ..net.breaker import PeerBreaker
from ..net.channel import Channel, ConnectionClosed, FrameReader
from . import wire
from .handshake import LocalIdentity, connect
from .membership import Member
from .wire import ALL_GIVEN, BUSY, FAILED, GIVEN, HEAD_BYTES, LOAD, Parts

__all__ = ["LocalIdentity", "Peer"]

log = logging.getLogger("diesel.task")

Statuses = npt.NDArray[np.uint8]

WORKING_S = 2.5
"""How much longer who is fetching for us is waited for, once it has said so: the store is slow, and
everybody's reads of that chunk wait for this one fetch."""

_BUFFER_BYTES = 16 << 10  # small answers come by one call; of large ones this much is copied

_BULK_BYTES = 1 << 20  # answers that are larger wait for each other,
_BULK_UNDER_WAY = 8 << 20  # beyond this: small ones wait behind them on the wire
_NUMBERS = 1 << 32


class _PendingRequest:
    """A request that is under way."""

    __slots__ = (
        "count",
        "due_s",
        "is_late",
        "is_sent",
        "is_working",
        "kind",
        "parts",
        "room",
        "sent_s",
        "size",
        "statuses",
        "waiter",
    )

    def __init__(self, kind: int, parts: Parts | None, room: memoryview, size: int) -> None:
        self.kind = kind
        self.parts = parts
        self.count = 0 if parts is None else len(parts)
        self.room: memoryview | None = room  # None: nobody wants the bytes any more
        self.size = size
        self.is_sent = self.is_late = self.is_working = False
        self.sent_s = self.due_s = 0.0
        self.waiter: trio.lowlevel.Task | None = None
        self.statuses: Statuses | None = None

    def abandon(self, _: object = None) -> trio.lowlevel.Abort:
        """Whoever asked waits no longer, and wants no bytes any more."""
        self.waiter = self.room = None
        return trio.lowlevel.Abort.SUCCEEDED


class Peer:
    """One other master of the task."""

    def __init__(self, me: LocalIdentity, member: Member) -> None:
        self._me = me
        self.member = member
        self._breaker = PeerBreaker()
        self._channel: Channel | None = None
        self._is_over = self._is_paused = False
        self._connect_wanted = trio.Event()
        self._connect_ticket = 0  # a ticket
        self._connect_attempted = trio.Event()  # set when an attempt to connect is over
        self._unsent = trio.Event()
        self._timer = trio.CancelScope()  # is cancelled when the next request is due
        self._pending: dict[int, _PendingRequest] = {}
        self._number = 0
        self._bytes = self._bulk_bytes = 0
        self._freed = trio.lowlevel.ParkingLot()
        self._counts = dict.fromkeys(
            "connections requests parts bytes late failed unasked damaged".split(), 0
        )

    # What the master asks

    async def read(self, parts: Parts, room: memoryview, *, load: bool) -> Statuses:
        """Parts of chunks. Those that are given lie in `room`, where the sizes of all parts add up
        to; nothing writes there any more when this is over. Whatever the peer does is a status."""
        flags = LOAD if load else 0
        count = len(parts)
        size = int(parts[0, 2]) if count == 1 else int(parts[:, 2].sum(dtype=np.uint64))
        if count == 1 or (count <= wire.PARTS_MAX and size <= wire.PARTS_BYTES_MAX):
            return await self._ask(wire.READ, flags, parts, room, size)
        found = np.full(count, BUSY, np.uint8)
        for first, last, start, end in _pieces(parts):
            some = parts[first:last]
            got = await self._ask(wire.READ, flags, some, room[start:end], end - start)
            found[first:last] = got
            if (got >= BUSY).all():
                break
        return found

    async def ping(self) -> bool:
        """Whether the peer answers at all."""
        return not len(await self._ask(wire.PING, 0, None, memoryview(b""), 0))

    def record_damage(self) -> None:
        """A part that it gave did not match its checksum."""
        self._counts["damaged"] += 1
        if self._breaker.record_damage(trio.current_time()):
            log.error("%s gives wrong bytes: it is not asked for a minute", self)

    def stats(self) -> dict[str, object]:
        """For people."""
        now_s = trio.current_time()
        return {
            **self._counts,
            "rank": self.member.rank,
            "address": self.member.address,
            "state": self._breaker.state(now_s).value,
            "connected": self._channel is not None,
            "under_way": len(self._pending),
            "patience_ms": round(1000 * self._breaker.timeout_s(0)),
        }

    def __str__(self) -> str:
        return f"master {self.member.rank} at {self.member.address}"

    # Connecting

    async def run(self) -> None:
        """Connect when somebody wants to, and receive; until cancelled."""
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
            channel = await connect(self._me, self.member)
        except Exception as error:  # whatever a peer brings about ends neither this nor the master
            if not isinstance(error, DieselError):
                log.exception("%s met a bug", self)
            if self._breaker.record_refusal(self._connect_ticket, trio.current_time()):
                self._say_paused(str(error))
            return None
        self._counts["connections"] += 1
        return channel

    async def _serve(self, channel: Channel) -> None:
        """Until the connection ends."""
        async with trio.open_nursery() as nursery:

            async def until_it_ends(work: Callable[[Channel], Awaitable[None]]) -> None:
                try:
                    await work(channel)
                except ConnectionClosed as gone:
                    log.debug("%s: %s", self, gone)
                except CorruptError as error:
                    self._breaker.open(trio.current_time())
                    log.error("%s sends what no master sends: %s", self, error)
                except Exception:
                    self._breaker.open(trio.current_time())
                    log.exception("%s met a bug", self)
                nursery.cancel_scope.cancel()

            nursery.start_soon(until_it_ends, self._send_rest)
            nursery.start_soon(until_it_ends, self._expire_late)
            nursery.start_soon(until_it_ends, self._receive)
        self._drop_channel(channel)

    def _drop_channel(self, channel: Channel) -> None:
        """Of a connection: whoever waits for an answer on it hears of it."""
        if self._channel is not channel:
            return
        self._channel = None
        channel.close()
        asked, self._pending = self._pending, {}
        self._bytes = self._bulk_bytes = 0
        self._freed.unpark_all()
        for each in asked.values():
            _wake(each)

    def _say_paused(self, why: str) -> None:
        if not self._is_paused:
            log.warning("%s is not asked for now: %s", self, why)
        self._is_paused = True

    async def _send_rest(self, channel: Channel) -> None:
        """Requests that did not leave at once."""
        while True:
            await self._unsent.wait()
            self._unsent = trio.Event()
            await channel.drain()

    async def _expire_late(self, channel: Channel) -> None:
        """Wakes who has waited long enough. A scope for each request would cost more than all the
        rest of it."""
        while True:
            due_s = (asked.due_s for asked in self._pending.values() if asked.waiter is not None)
            with trio.CancelScope(deadline=min(due_s, default=math.inf)) as self._timer:
                await trio.sleep_forever()
            now_s = trio.current_time()
            for asked in self._pending.values():
                if asked.waiter is not None and asked.due_s <= now_s:
                    asked.is_late = True
                    _wake(asked)

    # One request

    async def _ask(
        self, kind: int, flags: int, parts: Parts | None, room: memoryview, size: int
    ) -> Statuses:
        """The statuses; of a request without parts none, or one that is not `GIVEN`."""
        now_s = trio.current_time()
        ticket = 0 if self._is_over else self._breaker.admit(now_s)
        if not ticket:
            self._counts["unasked"] += 1
            return _all(BUSY, parts)
        asked = _PendingRequest(kind, parts, room[:size], size)
        asked.sent_s = now_s
        try:
            await self._send_and_wait(asked, flags, ticket)
        except BaseException:
            self._breaker.cancel(ticket)
            raise
        if asked.statuses is not None:
            self._heard(ticket)
            return asked.statuses
        if not asked.is_sent:
            self._counts["unasked"] += 1
            self._breaker.cancel(ticket)
            return _all(BUSY, parts)
        self._counts["late" if asked.is_late else "failed"] += 1
        if asked.is_late and asked.is_working:  # its store is slow; or it has stopped meanwhile,
            self._breaker.cancel(ticket)  # and does not even say so to the next request
        elif self._breaker.record_failure(ticket, trio.current_time()):
            self._say_paused("it does not answer")
        return _all(FAILED, parts)

    def _heard(self, ticket: int) -> None:
        if self._breaker.record_success(ticket):
            self._is_paused = False
            log.info("%s is asked again", self)

    async def _send_and_wait(self, asked: _PendingRequest, flags: int, ticket: int) -> None:
        """Until it is answered, late, or cannot be answered any more."""
        asked.due_s = asked.sent_s + self._breaker.timeout_s(asked.size + self._bytes)
        channel = self._channel
        if channel is None or not self._fits(asked.size):
            with trio.CancelScope(deadline=asked.due_s):
                channel = await self._connection(ticket) if channel is None else channel
                while channel is self._channel and not self._fits(asked.size):
                    await self._freed.park()
            if channel is None or channel is not self._channel or not self._fits(asked.size):
                return
            asked.sent_s = trio.current_time()
        number = self._number = (self._number + 1) % _NUMBERS
        if number in self._pending:  # for as long as it takes to send 4 billion others
            return
        self._take(number, asked)
        request = wire.request(number, asked.kind, flags, asked.parts)
        try:
            if not channel.send_now((request,), len(request)):
                self._unsent.set()
        except ConnectionClosed:
            self._drop_channel(channel)
            return
        asked.waiter = trio.lowlevel.current_task()
        if asked.due_s < self._timer.deadline:
            self._timer.deadline = asked.due_s
        try:
            await trio.lowlevel.wait_task_rescheduled(asked.abandon)
        finally:
            asked.abandon()

    async def _connection(self, ticket: int) -> Channel | None:
        if not self._is_over:
            self._connect_ticket = ticket
            self._connect_wanted.set()
            await self._connect_attempted.wait()
        return self._channel

    def _fits(self, size: int) -> bool:
        """Whether a request may be sent now."""
        if len(self._pending) >= wire.REQUESTS_MAX:
            return False
        if size <= _BULK_BYTES:
            return self._bytes + size <= wire.IN_FLIGHT_BYTES_MAX
        return not self._bulk_bytes or self._bulk_bytes + size <= _BULK_UNDER_WAY

    def _take(self, number: int, asked: _PendingRequest) -> None:
        asked.is_sent = True
        self._pending[number] = asked
        self._bytes += asked.size
        if asked.size > _BULK_BYTES:
            self._bulk_bytes += asked.size

    def _finish(self, number: int, asked: _PendingRequest) -> None:
        """Answered, whether anybody still wants to know or not."""
        del self._pending[number]
        self._bytes -= asked.size
        if asked.size > _BULK_BYTES:
            self._bulk_bytes -= asked.size
        if self._freed:
            self._freed.unpark_all()
        if not asked.is_working:  # else it says how long the store takes
            self._breaker.record_latency(trio.current_time() - asked.sent_s, asked.size)
        _wake(asked)

    # Answers

    async def _receive(self, channel: Channel) -> None:
        """Answers, one after the other. Raises Gone, CorruptError."""
        inbox = FrameReader(channel, _BUFFER_BYTES)
        counts = self._counts
        while True:
            inbox.begin_frame()
            await inbox.fill_buffer(HEAD_BYTES)
            head = wire.parse_answer(inbox.buffer, inbox.start)
            asked = self._pending.get(head.id)
            if asked is None:
                raise CorruptError("an answer to what was not asked")
            wire.check_answer(head, asked.kind, asked.count, asked.size)
            if head.kind == wire.WORKING:
                inbox.start += HEAD_BYTES
                if not asked.is_working:
                    asked.is_working = True
                    asked.due_s += WORKING_S
                continue
            await inbox.fill_buffer(HEAD_BYTES + head.counted)
            start = inbox.start + HEAD_BYTES
            inbox.start = start + head.counted
            status_bytes = bytearray(inbox.buffer[start : inbox.start])
            statuses = np.frombuffer(status_bytes, np.uint8)
            if asked.parts is not None and status_bytes != ALL_GIVEN[: head.counted]:
                await self._fill_some(inbox, asked, statuses, head.payload_bytes)
            elif head.payload_bytes != asked.size:
                raise CorruptError("an answer of another length")
            elif asked.size:
                await _fill(inbox, asked, ((0, asked.size),))
            counts["requests"] += 1
            counts["parts"] += head.counted
            counts["bytes"] += head.payload_bytes
            asked.statuses = statuses
            self._finish(head.id, asked)

    async def _fill_some(
        self, inbox: FrameReader, asked: _PendingRequest, statuses: Statuses, payload_bytes: int
    ) -> None:
        assert asked.parts is not None
        if wire.given_bytes(asked.parts, statuses) != payload_bytes:
            raise CorruptError("an answer of another length")
        await _fill(inbox, asked, _given_ranges(asked.parts, statuses))


async def _fill(
    inbox: FrameReader, asked: _PendingRequest, places: Sequence[tuple[int, int]]
) -> None:
    """Receive into places of the room, each from here to there; drop what nobody wants any
    more."""
    for at, end in places:
        while at < end:
            room = asked.room
            if room is None:
                await inbox.skip(end - at)
                break
            at += await inbox.receive_into(room[at:end])


def _wake(asked: _PendingRequest) -> None:
    asker, asked.waiter = asked.waiter, None
    if asker is not None:
        trio.lowlevel.reschedule(asker)


def _given_ranges(parts: Parts, statuses: Statuses) -> list[tuple[int, int]]:
    """Where what is given belongs: a place for each run of parts."""
    ends = np.cumsum(parts[:, 2], dtype=np.int64)
    given = np.concatenate(([False], statuses == GIVEN, [False]))
    edges = np.flatnonzero(given[1:] != given[:-1])  # first of a run, first behind it, and so on
    starts = np.concatenate(([0], ends))[edges]
    return list(zip(starts[::2].tolist(), starts[1::2].tolist(), strict=True))


def _pieces(parts: Parts) -> Iterator[tuple[int, int, int, int]]:
    """Parts cut into requests that keep within the limits: their first and the one behind the last,
    and where their bytes start and end."""
    first = start = at = 0
    for i, size in enumerate(parts[:, 2].tolist()):
        if i > first and (i - first >= wire.PARTS_MAX or at + size - start > wire.PARTS_BYTES_MAX):
            yield first, i, start, at
            first, start = i, at
        at += size
    yield first, len(parts), start, at


def _all(status: int, parts: Parts | None) -> Statuses:
    return np.full(1 if parts is None else len(parts), status, np.uint8)
