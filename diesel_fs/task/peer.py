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
from . import wire
from .breaker import Breaker
from .channel import Channel, Gone, Inbox
from .handshake import Me, connected
from .membership import Member
from .wire import ALL_GIVEN, BUSY, FAILED, GIVEN, HEAD_BYTES, LOAD, Parts

__all__ = ["Me", "Peer"]

log = logging.getLogger("diesel.task")

Statuses = npt.NDArray[np.uint8]

WORKING_S = 2.5
"""How much longer who is fetching for us is waited for, once it has said so: the store is slow, and
everybody's reads of that chunk wait for this one fetch."""

_BUFFER_BYTES = 16 << 10  # small answers come by one call; of large ones this much is copied

_BULK_BYTES = 1 << 20  # answers that are larger wait for each other,
_BULK_UNDER_WAY = 8 << 20  # beyond this: small ones wait behind them on the wire
_NUMBERS = 1 << 32


class _Asked:
    """A request that is under way."""

    __slots__ = (
        "asker",
        "count",
        "due_s",
        "is_late",
        "is_sent",
        "is_worked_on",
        "kind",
        "parts",
        "room",
        "sent_s",
        "size",
        "statuses",
    )

    def __init__(self, kind: int, parts: Parts | None, room: memoryview, size: int) -> None:
        self.kind = kind
        self.parts = parts
        self.count = 0 if parts is None else len(parts)
        self.room: memoryview | None = room  # None: nobody wants the bytes any more
        self.size = size
        self.is_sent = self.is_late = self.is_worked_on = False
        self.sent_s = self.due_s = 0.0
        self.asker: trio.lowlevel.Task | None = None
        self.statuses: Statuses | None = None

    def give_up(self, _: object = None) -> trio.lowlevel.Abort:
        """Whoever asked waits no longer, and wants no bytes any more."""
        self.asker = self.room = None
        return trio.lowlevel.Abort.SUCCEEDED


class Peer:
    """One other master of the task."""

    def __init__(self, me: Me, member: Member) -> None:
        self._me = me
        self.member = member
        self._breaker = Breaker()
        self._channel: Channel | None = None
        self._is_over = self._is_paused = False
        self._wanted = trio.Event()
        self._wanted_by = 0  # a ticket
        self._looked = trio.Event()  # set when an attempt to connect is over
        self._unsent = trio.Event()
        self._timer = trio.CancelScope()  # is cancelled when the next request is due
        self._asked: dict[int, _Asked] = {}
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

    async def is_there(self) -> bool:
        """Whether the peer answers at all."""
        return not len(await self._ask(wire.PING, 0, None, memoryview(b""), 0))

    def damaged(self) -> None:
        """A part that it gave did not match its checksum."""
        self._counts["damaged"] += 1
        if self._breaker.damaged(trio.current_time()):
            log.error("%s gives wrong bytes: it is not asked for a minute", self)

    def stats(self) -> dict[str, object]:
        """For people."""
        now_s = trio.current_time()
        return {
            **self._counts,
            "rank": self.member.rank,
            "address": self.member.address,
            "state": self._breaker.mood(now_s).value,
            "connected": self._channel is not None,
            "under_way": len(self._asked),
            "patience_ms": round(1000 * self._breaker.patience_s(0)),
        }

    def __str__(self) -> str:
        return f"master {self.member.rank} at {self.member.address}"

    # Connecting

    async def run(self) -> None:
        """Connect when somebody wants to, and receive; until cancelled."""
        try:
            while True:
                await self._wanted.wait()
                self._channel = await self._attempt()
                self._wanted = trio.Event()
                self._looked.set()
                self._looked = trio.Event()
                if self._channel is not None:
                    await self._serve(self._channel)
        finally:
            self._is_over = True
            self._looked.set()
            if self._channel is not None:
                self._let_go(self._channel)

    async def _attempt(self) -> Channel | None:
        try:
            channel = await connected(self._me, self.member)
        except Exception as error:  # whatever a peer brings about ends neither this nor the master
            if not isinstance(error, DieselError):
                log.exception("%s met a bug", self)
            if self._breaker.refused(self._wanted_by, trio.current_time()):
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
                except Gone as gone:
                    log.debug("%s: %s", self, gone)
                except CorruptError as error:
                    self._breaker.distrusted(trio.current_time())
                    log.error("%s sends what no master sends: %s", self, error)
                except Exception:
                    self._breaker.distrusted(trio.current_time())
                    log.exception("%s met a bug", self)
                nursery.cancel_scope.cancel()

            nursery.start_soon(until_it_ends, self._send_rest)
            nursery.start_soon(until_it_ends, self._look_at_the_clock)
            nursery.start_soon(until_it_ends, self._receive)
        self._let_go(channel)

    def _let_go(self, channel: Channel) -> None:
        """Of a connection: whoever waits for an answer on it hears of it."""
        if self._channel is not channel:
            return
        self._channel = None
        channel.close()
        asked, self._asked = self._asked, {}
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

    async def _look_at_the_clock(self, channel: Channel) -> None:
        """Wakes who has waited long enough. A scope for each request would cost more than all the
        rest of it."""
        while True:
            due_s = (asked.due_s for asked in self._asked.values() if asked.asker is not None)
            with trio.CancelScope(deadline=min(due_s, default=math.inf)) as self._timer:
                await trio.sleep_forever()
            now_s = trio.current_time()
            for asked in self._asked.values():
                if asked.asker is not None and asked.due_s <= now_s:
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
        asked = _Asked(kind, parts, room[:size], size)
        asked.sent_s = now_s
        try:
            await self._asking(asked, flags, ticket)
        except BaseException:
            self._breaker.withdrawn(ticket)
            raise
        if asked.statuses is not None:
            self._heard(ticket)
            return asked.statuses
        if not asked.is_sent:
            self._counts["unasked"] += 1
            self._breaker.withdrawn(ticket)
            return _all(BUSY, parts)
        self._counts["late" if asked.is_late else "failed"] += 1
        if asked.is_late and asked.is_worked_on:  # its store is slow; or it has stopped meanwhile,
            self._breaker.withdrawn(ticket)  # and does not even say so to the next request
        elif self._breaker.failed(ticket, trio.current_time()):
            self._say_paused("it does not answer")
        return _all(FAILED, parts)

    def _heard(self, ticket: int) -> None:
        if self._breaker.succeeded(ticket):
            self._is_paused = False
            log.info("%s is asked again", self)

    async def _asking(self, asked: _Asked, flags: int, ticket: int) -> None:
        """Until it is answered, late, or cannot be answered any more."""
        asked.due_s = asked.sent_s + self._breaker.patience_s(asked.size + self._bytes)
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
        if number in self._asked:  # for as long as it takes to send 4 billion others
            return
        self._take(number, asked)
        request = wire.request(number, asked.kind, flags, asked.parts)
        try:
            if not channel.put((request,), len(request)):
                self._unsent.set()
        except Gone:
            self._let_go(channel)
            return
        asked.asker = trio.lowlevel.current_task()
        if asked.due_s < self._timer.deadline:
            self._timer.deadline = asked.due_s
        try:
            await trio.lowlevel.wait_task_rescheduled(asked.give_up)
        finally:
            asked.give_up()

    async def _connection(self, ticket: int) -> Channel | None:
        if not self._is_over:
            self._wanted_by = ticket
            self._wanted.set()
            await self._looked.wait()
        return self._channel

    def _fits(self, size: int) -> bool:
        """Whether a request may be sent now."""
        if len(self._asked) >= wire.REQUESTS_MAX:
            return False
        if size <= _BULK_BYTES:
            return self._bytes + size <= wire.UNDER_WAY_BYTES_MAX
        return not self._bulk_bytes or self._bulk_bytes + size <= _BULK_UNDER_WAY

    def _take(self, number: int, asked: _Asked) -> None:
        asked.is_sent = True
        self._asked[number] = asked
        self._bytes += asked.size
        if asked.size > _BULK_BYTES:
            self._bulk_bytes += asked.size

    def _finish(self, number: int, asked: _Asked) -> None:
        """Answered, whether anybody still wants to know or not."""
        del self._asked[number]
        self._bytes -= asked.size
        if asked.size > _BULK_BYTES:
            self._bulk_bytes -= asked.size
        if self._freed:
            self._freed.unpark_all()
        if not asked.is_worked_on:  # else it says how long the store takes
            self._breaker.took(trio.current_time() - asked.sent_s, asked.size)
        _wake(asked)

    # Answers

    async def _receive(self, channel: Channel) -> None:
        """Answers, one after the other. Raises Gone, CorruptError."""
        inbox = Inbox(channel, _BUFFER_BYTES)
        counts = self._counts
        while True:
            inbox.begin()
            await inbox.hold(HEAD_BYTES)
            head = wire.parse_answer(inbox.buffer, inbox.start)
            asked = self._asked.get(head.id)
            if asked is None:
                raise CorruptError("an answer to what was not asked")
            wire.check_answer(head, asked.kind, asked.count, asked.size)
            if head.kind == wire.WORKING:
                inbox.start += HEAD_BYTES
                if not asked.is_worked_on:
                    asked.is_worked_on = True
                    asked.due_s += WORKING_S
                continue
            await inbox.hold(HEAD_BYTES + head.counted)
            start = inbox.start + HEAD_BYTES
            inbox.start = start + head.counted
            told = bytearray(inbox.buffer[start : inbox.start])
            statuses = np.frombuffer(told, np.uint8)
            if asked.parts is not None and told != ALL_GIVEN[: head.counted]:
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
        self, inbox: Inbox, asked: _Asked, statuses: Statuses, payload_bytes: int
    ) -> None:
        assert asked.parts is not None
        if wire.given_bytes(asked.parts, statuses) != payload_bytes:
            raise CorruptError("an answer of another length")
        await _fill(inbox, asked, _places(asked.parts, statuses))


async def _fill(inbox: Inbox, asked: _Asked, places: Sequence[tuple[int, int]]) -> None:
    """Receive into places of the room, each from here to there; drop what nobody wants any
    more."""
    for at, end in places:
        while at < end:
            room = asked.room
            if room is None:
                await inbox.skip(end - at)
                break
            at += await inbox.into(room[at:end])


def _wake(asked: _Asked) -> None:
    asker, asked.asker = asked.asker, None
    if asker is not None:
        trio.lowlevel.reschedule(asker)


def _places(parts: Parts, statuses: Statuses) -> list[tuple[int, int]]:
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
