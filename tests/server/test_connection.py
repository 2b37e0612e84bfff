"""Connections in a simulated clock: deadlines, memory, and clients that send any bytes.

What waits, waits in the clock's time: these tests take no longer for it.
"""

import gc
import struct
import weakref
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, memory_stream_pair

from diesel_fs import metrics
from diesel_fs.errors import CorruptError
from diesel_fs.format.entries import Bytes
from diesel_fs.net import frames as wire
from diesel_fs.net.messages import Message
from diesel_fs.storage.accounts.account import Account
from diesel_fs.system.vectored_io import byte_views
from diesel_server import limits
from diesel_server.channel import Channel, ConnectionClosed
from diesel_server.connection import Connection, ConnectionContext
from diesel_server.limits import ConnectionLimits, FairByteBudget
from diesel_server.requests import Dispatcher, Reply, Request
from tests.examples import examples
from tests.rows import each_row

from .fake_server import HANDLERS, STORE

Stream = trio.StapledStream[trio.testing.MemorySendStream, trio.testing.MemoryReceiveStream]


class Signed:
    """Accounts whose signature is their name, doubled or so: no keys, so that there is no thread's
    worth of work."""

    def authenticate(
        self, user: str, signature: bytes, nonce: bytes, binding: bytes, address: str = ""
    ) -> Account:
        if signature != nonce + user.encode():
            raise PermissionError
        return Account(user, b"")

    def current(self, account: Account) -> Account:
        return account


class MemoryChannel(Channel):
    """The server's end of a pair of streams in memory, in place of a socket."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(None)  # type: ignore[arg-type]  # what uses it is replaced
        self._memory = stream

    async def _receive(self, room: memoryview) -> int:
        try:
            received = await self._memory.receive_some(room.nbytes)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise ConnectionClosed from None
        if not received:
            raise ConnectionClosed
        room[: len(received)] = received
        return len(received)

    def send_now(self, parts: Sequence[Bytes]) -> list[memoryview]:
        views = byte_views(parts)
        self.sent_bytes += sum(map(len, views))
        return views

    async def send_left(self, views: list[memoryview]) -> None:
        try:
            for view in views:
                await self._memory.send_all(view)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise ConnectionClosed from None

    async def half_close(self) -> None:
        with suppress(ConnectionClosed, trio.BrokenResourceError), trio.move_on_after(1):
            await self._memory.send_eof()
            await self.skip(1 << 30)

    def close(self) -> None:
        self._memory.send_stream.close()
        self._memory.receive_stream.close()


class Client:
    """The other end."""

    def __init__(self, stream: Stream, service: ConnectionContext) -> None:
        self.stream = stream
        self.service = service
        self.over_s = -1.0  # when the server had ended the connection
        self.over = trio.Event()

    async def send(self, content: bytes) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self.stream.send_all(content)

    async def exactly(self, size: int) -> bytes:
        received = b""
        while len(received) < size:
            some = await self.stream.receive_some(size - len(received))
            if not some:
                raise EOFError
            received += some
        return received

    async def answer(self) -> Message:
        lengths = wire.parse_lengths(await self.exactly(8), wire.ANSWER_LIMITS)
        message = wire.parse_head(await self.exactly(lengths.head), wire.ANSWER_LIMITS)
        await self.exactly(lengths.payload)
        return message

    async def log_in(self, user: str = "me") -> None:
        await self.send(wire.greeting())
        _, _, length = wire.parse_welcome(await self.exactly(16))
        nonce = await self.exactly(length)
        await self.send(login(nonce, user))
        assert (await self.answer())["user"] == user

    async def end(self) -> float:
        """Receive until the server ends the connection; when that was."""
        with suppress(trio.ClosedResourceError):
            while await self.stream.receive_some(65536):
                pass
        return trio.current_time()


def login(nonce: bytes, user: str = "me") -> bytes:
    message: Message = {
        "do": "login", "user": user, "signature": nonce + user.encode(), "program": "",
    }  # fmt: skip
    return wire.frame(message, wire.BEFORE_LOGIN_LIMITS)


def request(number: int, do: str = "echo", payload: bytes = b"", **fields: float) -> bytes:
    message: Message = {"id": number, "do": do, **fields}
    return wire.frame(message, wire.REQUEST_LIMITS, len(payload)) + payload


def converse(
    what: Callable[[Client], Awaitable[None]],
    *,
    budget: FairByteBudget | None = None,
    handlers: object = HANDLERS,
) -> ConnectionContext:
    """Run one conversation with a connection; nothing is left when both have ended."""
    made: list[ConnectionContext] = []

    async def main() -> None:
        cells = metrics.private_cells()
        service = ConnectionContext(
            store_id=STORE,
            login=Signed(),
            dispatcher=Dispatcher(handlers),  # type: ignore[arg-type]  # handlers of several kinds
            cells=cells,
            count=ConnectionLimits(10),
            budget=budget or FairByteBudget(),
        )
        made.append(service)
        ours, theirs = memory_stream_pair()
        channel = MemoryChannel(theirs)

        async def opener() -> tuple[Channel, bytes]:
            return channel, wire.NO_BINDING

        client = Client(ours, service)
        with trio.fail_after(10_000):
            async with trio.open_nursery() as nursery:

                async def serve() -> None:
                    connection = Connection(service, opener, "10.0.0.1", 5)
                    client.connection = connection  # type: ignore[attr-defined]  # the test looks inside
                    await connection.run()
                    client.over_s = trio.current_time()
                    client.over.set()

                nursery.start_soon(serve)
                await what(client)
                with suppress(trio.ClosedResourceError):
                    await ours.aclose()
        assert client.over_s >= 0
        assert service.budget.held == 0
        assert service.under_way == 0
        assert not service.by_user
        assert not service.count._greeting
        assert not service.count._by_user

    # Logins run in a thread. If a busy machine ran it later than this, their time would be over.
    trio.run(main, clock=MockClock(autojump_threshold=0.1))
    return made[0]


# Deadlines


@each_row("said", [b"", b"\x93DIES", wire.greeting()[:15]])
def test_F7_a_connection_without_a_greeting_in_time_ends(said: bytes) -> None:
    async def main(client: Client) -> None:
        await client.send(said)
        assert await client.end() == pytest.approx(limits.GREETING_S, abs=0.1)

    service = converse(main)
    assert service.cells.get("diesel_refusals_total", "greeting") == 1


@each_row("sent", [0, 4, 8, 20])
def test_F7_a_connection_without_a_login_in_time_ends(sent: int) -> None:
    async def main(client: Client) -> None:
        await client.send(wire.greeting())
        nonce = (await client.exactly(48))[16:]
        await client.send(login(nonce)[:sent])
        assert await client.end() == pytest.approx(limits.LOGIN_S, abs=0.1)

    assert converse(main).cells.get("diesel_refusals_total", "login") == 1


def test_F7_a_greeting_byte_by_byte_gains_no_time() -> None:
    async def main(client: Client) -> None:
        for byte in wire.greeting()[:8]:
            await client.send(bytes([byte]))
            await trio.sleep(1)
        assert await client.end() <= 9
        assert client.over_s == pytest.approx(limits.GREETING_S, abs=0.1)

    converse(main)


def test_an_idle_connection_ends_but_not_one_that_waits_for_an_answer() -> None:
    async def main(client: Client) -> None:
        await client.log_in()
        await client.send(request(1, "sleep", seconds=3 * limits.IDLE_S))
        assert (await client.answer())["slept"]
        answered = trio.current_time()
        assert answered >= 3 * limits.IDLE_S
        assert await client.end() <= answered + limits.IDLE_S + 1

    converse(main)


@each_row("sent", [1, 7, 8, 9, 40])
def test_F7_half_a_request_is_waited_for_a_limited_time(sent: int) -> None:
    async def main(client: Client) -> None:
        await client.log_in()
        await client.send(request(1, payload=bytes(1000))[:sent])
        assert await client.end() <= limits.FRAME_S + 1

    assert converse(main).cells.get("diesel_refusals_total", "frame") == 1


def test_F7_a_payload_that_trickles_gives_its_memory_back() -> None:
    async def main(client: Client) -> None:
        await client.log_in()
        size = 10 << 20
        await client.send(wire.frame({"id": 1, "do": "echo"}, wire.REQUEST_LIMITS, size))
        while client.over_s < 0 and trio.current_time() < 1000:
            await client.send(bytes(1000))
            await trio.sleep(1)
        allowed = limits.FRAME_S + size / limits.BYTES_PER_S_MIN
        assert client.over_s == pytest.approx(allowed, rel=0.1)

    converse(main)


def test_F7_the_memory_of_a_client_that_goes_is_freed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not when the collector of cycles comes: it knows nothing of megabytes."""
    payloads = list["weakref.ref[npt.NDArray[np.uint8]]"]()
    real = np.empty

    def empty(size: int, kind: type[np.uint8]) -> npt.NDArray[np.uint8]:
        payload = real(size, kind)
        payloads.append(weakref.ref(payload))
        return payload

    async def main(client: Client) -> None:
        await client.log_in()
        await client.send(request(1, payload=bytes(1 << 20))[: 1 << 19])
        await trio.sleep(1)
        await client.stream.aclose()
        await client.over.wait()

    monkeypatch.setattr("diesel_server.connection.np.empty", empty)
    gc.disable()
    try:
        converse(main)
        assert [payload() is None for payload in payloads] == [True]
    finally:
        gc.enable()


def test_G6_a_client_that_does_not_take_its_answer_loses_the_connection() -> None:
    """The stream in memory takes everything, so the answer is stopped where it is sent."""

    async def stuck(request: Request) -> Reply:
        return Reply({}, [bytes(1000)])

    async def main(client: Client) -> None:
        await client.log_in()

        async def never() -> None:
            await trio.sleep_forever()

        client.stream.receive_stream.close_hook = None
        server_end = client.connection._channel._memory.send_stream  # type: ignore[attr-defined]  # the test looks inside
        server_end.send_all_hook = never
        await client.send(request(1, "stuck"))
        await client.over.wait()
        assert client.over_s <= limits.FRAME_S + 2

    service = converse(main, handlers={"stuck": stuck})
    assert service.cells.get("diesel_requests_total", "other", "gone") == 1


def test_a_request_that_finds_no_memory_is_told_when_to_come_again() -> None:
    async def main(client: Client) -> None:
        await client.log_in()
        assert await client.service.budget.acquire("else", 900_000, 1)
        await client.send(request(1, payload=bytes(500_000)))
        answer = await client.answer()
        assert (answer["id"], answer["error"]) == (1, "BusyError")
        assert answer["retry_after_s"] == limits.RETRY_AFTER_S
        assert trio.current_time() == pytest.approx(limits.BUDGET_WAIT_S, abs=0.5)
        client.service.budget.release("else", 900_000)
        await client.send(request(2, payload=bytes(500_000)))
        assert "error" not in await client.answer()

    service = converse(main, budget=FairByteBudget(1_000_000, 1_000_000))
    assert service.cells.get("diesel_requests_total", "other", "busy") == 1
    assert service.cells.get("diesel_refusals_total", "memory") == 1


def test_a_connection_that_is_told_to_stop_finishes_what_is_under_way() -> None:
    async def main(client: Client) -> None:
        await client.log_in()
        await client.send(request(1, "sleep", seconds=20))
        await trio.sleep(1)
        client.service.is_draining = True
        client.connection.stop()  # type: ignore[attr-defined]  # the test looks inside
        await client.send(request(2))
        answer = await client.answer()
        assert (answer["id"], answer["error"], answer["retry_after_s"]) == (2, "BusyError", 0.0)
        assert (await client.answer())["slept"]
        assert await client.end() == pytest.approx(20, abs=1)

    converse(main)


def test_an_idle_connection_that_is_told_to_stop_ends_at_once() -> None:
    async def main(client: Client) -> None:
        await client.log_in()
        await trio.sleep(1)
        client.service.is_draining = True
        client.connection.stop()  # type: ignore[attr-defined]  # the test looks inside
        assert await client.end() <= 2

    converse(main)


def test_the_requests_of_a_client_that_goes_are_cancelled() -> None:
    cancelled = []

    async def forever(request: Request) -> Reply:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            cancelled.append(1)
            raise
        return Reply()

    async def main(client: Client) -> None:
        await client.log_in()
        for number in range(5):
            await client.send(request(number, "forever"))
        await trio.sleep(1)
        await client.stream.aclose()

    service = converse(main, handlers={"forever": forever})
    assert len(cancelled) == 5
    assert service.cells.get("diesel_requests_total", "other", "gone") == 5


# Any bytes in any order

GARBAGE = st.binary(min_size=1, max_size=60)
HEADS = st.tuples(st.integers(0, 1 << 32), st.integers(0, 1 << 32)).map(
    lambda pair: struct.pack("<II", min(pair[0], 0xFFFFFFFF), min(pair[1], 0xFFFFFFFF))
)
REQUESTS = st.builds(
    request,
    st.integers(0, 5),
    st.sampled_from(["echo", "bug", "nothing", "count", "progress"]),
    st.binary(max_size=200) | st.just(bytes(70_000)),
)
ODD = st.sampled_from(
    [
        wire.frame({"id": 1, "do": "login"}, wire.REQUEST_LIMITS),
        wire.frame({"id": 1, "do": "echo", "x!": 1}, wire.REQUEST_LIMITS, 3) + b"abc",
        wire.frame({"id": 1, "do": "read", "parts": bytes(24)}, wire.REQUEST_LIMITS),
        wire.frame({"id": 1, "do": "read", "parts": b"\xff" * 24}, wire.REQUEST_LIMITS),
        wire.frame(
            {"id": 1, "do": "fail", "kind": "BusyError", "message": "x"}, wire.REQUEST_LIMITS
        ),
    ]
)
PIECES = st.lists(
    st.one_of(REQUESTS, REQUESTS, ODD, GARBAGE, HEADS, REQUESTS.map(lambda sent: sent[:-1])),
    max_size=6,
)


@examples(120)
@given(
    st.sampled_from(["greets", "half", "garbage"]),
    st.sampled_from(["logs in", "another's", "skips", "half"]),
    PIECES,
    st.integers(1, 400),
)
def test_N10_any_bytes_in_any_order_end_the_connection_properly(
    start: str, then: str, pieces: Sequence[bytes], cut: int
) -> None:
    """Each answer is a frame, a request is answered once at most, nothing is held afterwards, and
    the connection ends within its deadlines."""
    numbers: list[int] = []

    async def main(client: Client) -> None:
        async with trio.open_nursery() as nursery:
            if start == "greets":
                await client.send(wire.greeting())
                with suppress(EOFError):
                    nonce = (await client.exactly(48))[16:]
                    user = "me" if then == "logs in" else "me\xff"
                    frames = {"logs in": login(nonce), "another's": login(nonce[::-1], user)}
                    await client.send(frames.get(then, login(nonce)[:9] if then == "half" else b""))
            else:
                await client.send(wire.greeting()[:5] if start == "half" else b"x" * 16)

            async def listen() -> None:
                with suppress(EOFError, trio.ClosedResourceError):
                    while True:
                        message = await client.answer()
                        if "id" in message and message.get("more") is not True:
                            numbers.append(int(str(message["id"])))

            nursery.start_soon(listen)
            whole = b"".join(pieces)
            for at in range(0, len(whole), cut * 50):
                await client.send(whole[at : at + cut * 50])
            await trio.sleep(1)
            with suppress(trio.ClosedResourceError, trio.BrokenResourceError):
                await client.stream.send_eof()

    with suppress(CorruptError):
        converse(main)
    assert len(numbers) <= len(pieces)


def test_a_valid_conversation_is_answered_whole() -> None:
    """The fuzzed test's check of itself."""

    async def main(client: Client) -> None:
        await client.log_in()
        for number in range(200):
            await client.send(request(number, payload=bytes(number)))
        found = {int(str((await client.answer())["id"])) for _ in range(200)}
        assert found == set(range(200))

    service = converse(main)
    assert service.cells.get("diesel_requests_total", "other", "ok") == 200
