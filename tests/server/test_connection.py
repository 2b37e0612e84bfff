"""Connections in a simulated clock: deadlines, memory, and clients that send any bytes."""

import gc
import struct
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

import numpy as np
import numpy.typing as npt
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from diesel_fs import metrics
from diesel_fs.errors import DieselError
from diesel_fs.net import frames as wire
from diesel_fs.net.messages import Fields, Message
from diesel_fs.storage.accounts.account import Account
from diesel_fs.storage.metadata.redis.address import parse_redis_url
from diesel_fs.urls import parse_url
from diesel_server import limits
from diesel_server.connections.channel import ClientChannel
from diesel_server.connections.connection import ClientConnection, ConnectionContext
from diesel_server.limits import ConnectionLimits, FairByteBudget
from diesel_server.process.wiring import redactions
from diesel_server.requests.dispatcher import Dispatcher, Handler, Reply, Request
from tests.examples import examples
from tests.rows import each_row

from .fake_server import HANDLERS, STORE
from .test_channel import socket_channel


class Signed:
    """Accounts whose signature is their name, perhaps doubled: without keys, a login is no work for
    a thread."""

    def authenticate(
        self, user: str, signature: bytes, nonce: bytes, binding: bytes, address: str = ""
    ) -> Account:
        if signature != nonce + user.encode():
            raise PermissionError
        return Account(user, b"")

    def current(self, account: Account) -> Account:
        return account


class WireClient:
    def __init__(
        self, stream: trio.SocketStream, connection: ClientConnection, service: ConnectionContext
    ) -> None:
        self.stream = stream
        self.connection = connection
        self.service = service
        self.payload = b""
        """The payload of the last answer."""
        self.over = trio.Event()
        self._begun_s = trio.current_time()

    @property
    def age_s(self) -> float:
        return trio.current_time() - self._begun_s

    def count(self, metric: str, *labels: str) -> float:
        return self.service.cells.get(metric, *labels)

    def stop(self) -> None:
        self.service.is_draining = True
        self.connection.stop()

    async def serve(self) -> None:
        await self.connection.run()
        self.over_s = self.age_s
        self.over.set()

    async def send(self, content: bytes) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self.stream.send_all(content)

    async def send_request(
        self, number: int, do: str = "echo", payload: bytes = b"", **more: float
    ) -> None:
        await self.send(request(number, do, payload, **more))

    async def some(self, size: int) -> bytes:
        try:
            return bytes(await self.stream.receive_some(size))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return b""

    async def exactly(self, size: int) -> bytes:
        received = b""
        while len(received) < size:
            some = await self.some(size - len(received))
            if not some:
                raise EOFError
            received += some
        return received

    async def answer(self) -> Message:
        lengths = wire.parse_lengths(await self.exactly(8), wire.ANSWER_LIMITS)
        message = wire.parse_head(await self.exactly(lengths.head), wire.ANSWER_LIMITS)
        self.payload = await self.exactly(lengths.payload)
        return message

    async def log_in(self) -> None:
        await self.send(wire.greeting())
        await self.send(login((await self.exactly(48))[16:]))
        assert (await self.answer())["user"] == "me"

    async def end(self) -> float:
        while await self.some(65536):
            pass
        age_s = self.age_s
        await self.over.wait()
        return age_s


def login(nonce: bytes, user: str = "me") -> bytes:
    message: Message = {
        "do": "login", "user": user, "signature": nonce + user.encode(), "program": "",
    }  # fmt: skip
    return wire.frame(message, wire.BEFORE_LOGIN_LIMITS)


def request(number: int, do: str = "echo", payload: bytes = b"", **more: float) -> bytes:
    message: Message = {"id": number, "do": do, **more}
    return wire.frame(message, wire.REQUEST_LIMITS, len(payload)) + payload


@asynccontextmanager
async def conversation(
    handlers: Mapping[str, Handler] = HANDLERS,
    *,
    budget: FairByteBudget | None = None,
    logs_in: bool = True,
) -> AsyncIterator[WireClient]:
    """A client and its connection. Nothing is left when both have ended."""
    channel, other = socket_channel(1 << 20)

    async def opener() -> tuple[ClientChannel, bytes]:
        return channel, wire.NO_BINDING

    service = ConnectionContext(
        store_id=STORE,
        login=Signed(),
        dispatcher=Dispatcher(handlers),
        cells=metrics.private_cells(),
        count=ConnectionLimits(10),
        budget=budget or FairByteBudget(),
    )
    connection = ClientConnection(service, opener, "10.0.0.1", 5)
    client = WireClient(trio.SocketStream(other), connection, service)
    with trio.fail_after(10_000):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.serve)
            if logs_in:
                await client.log_in()
            yield client
            await client.stream.aclose()
    assert client.over.is_set()
    assert service.budget.held == 0
    assert service.under_way == 0
    assert not service.by_user
    assert not service.count._greeting
    assert not service.count._by_user


def simulated_clock() -> MockClock:
    # Logins run in a thread. If a busy machine ran it later than this, their time would be over.
    return MockClock(autojump_threshold=0.1)


@pytest.fixture
def clock() -> MockClock:
    """It passes only while all tasks wait."""
    return simulated_clock()


# Deadlines


@each_row("said", [b"", b"\x93DIES", wire.greeting()[:15]])
async def test_F7_a_connection_without_greeting_in_time_ends(clock: MockClock, said: bytes) -> None:
    async with conversation(logs_in=False) as client:
        await client.send(said)
        assert await client.end() == pytest.approx(limits.GREETING_S, abs=0.1)
        assert client.count("diesel_refusals_total", "greeting") == 1


@each_row("sent", [0, 4, 8, 20])
async def test_F7_a_connection_without_a_login_in_time_ends(clock: MockClock, sent: int) -> None:
    async with conversation(logs_in=False) as client:
        await client.send(wire.greeting())
        nonce = (await client.exactly(48))[16:]
        await client.send(login(nonce)[:sent])
        assert await client.end() == pytest.approx(limits.LOGIN_S, abs=0.1)
        assert client.count("diesel_refusals_total", "login") == 1


async def test_F7_a_greeting_byte_by_byte_gains_no_time(clock: MockClock) -> None:
    async with conversation(logs_in=False) as client:
        for byte in wire.greeting()[:8]:
            await client.send(bytes([byte]))
            await trio.sleep(1)
        assert await client.end() <= 9
        assert client.over_s == pytest.approx(limits.GREETING_S, abs=0.1)


async def test_an_idle_connection_ends_but_not_one_that_has_a_request(clock: MockClock) -> None:
    async with conversation() as client:
        await client.send_request(1, "sleep", seconds=3 * limits.IDLE_S)
        assert (await client.answer())["slept"]
        answered_s = client.age_s
        assert answered_s >= 3 * limits.IDLE_S
        assert await client.end() <= answered_s + limits.IDLE_S + 1


@each_row("sent", [1, 7, 8, 9, 40])
async def test_F7_half_a_request_is_waited_for_a_limited_time(clock: MockClock, sent: int) -> None:
    async with conversation() as client:
        await client.send(request(1, payload=bytes(1000))[:sent])
        assert await client.end() <= limits.FRAME_S + 1
        assert client.count("diesel_refusals_total", "frame") == 1


async def test_F7_a_payload_that_trickles_gives_its_memory_back(clock: MockClock) -> None:
    async with conversation() as client:
        size = 10 << 20
        await client.send(wire.frame({"id": 1, "do": "echo"}, wire.REQUEST_LIMITS, size))
        while not client.over.is_set() and client.age_s < 1000:
            await client.send(bytes(1000))
            await trio.sleep(1)
        allowed = limits.FRAME_S + size / limits.BYTES_PER_S_MIN
        assert client.over_s == pytest.approx(allowed, rel=0.1)


Payloads = list["weakref.ref[npt.NDArray[np.uint8]]"]


@pytest.fixture
def payloads(monkeypatch: pytest.MonkeyPatch) -> Payloads:
    found: Payloads = []
    real = np.empty

    def empty(size: int, kind: type[np.uint8]) -> npt.NDArray[np.uint8]:
        payload = real(size, kind)
        found.append(weakref.ref(payload))
        return payload

    monkeypatch.setattr("diesel_server.connections.connection.np.empty", empty)
    return found


async def test_F7_a_lost_clients_memory_is_freed_at_once(
    clock: MockClock, payloads: Payloads
) -> None:
    """It does not wait for the collector of cycles, which does not count the megabytes."""
    gc.disable()
    try:
        async with conversation() as client:
            await client.send(request(1, payload=bytes(1 << 20))[: 1 << 19])
            await trio.sleep(1)
            await client.stream.aclose()
            await client.over.wait()
        assert [payload() is None for payload in payloads] == [True]
    finally:
        gc.enable()


async def test_G6_a_client_that_takes_no_answers_loses_the_connection(clock: MockClock) -> None:
    made, size = [], 1 << 20

    async def pieces(request: Request) -> AsyncGenerator[Reply, None]:
        for i in range(1000):
            made.append(i)
            yield Reply({"more": True}, [bytes(size)])
        yield Reply()

    async with conversation({"pieces": pieces}) as client:
        await client.send_request(1, "pieces")
        await client.over.wait()
        assert len(made) < 30
        assert client.over_s <= limits.FRAME_S + len(made) * size / limits.BYTES_PER_S_MIN + 2
        assert client.count("diesel_refusals_total", "frame") == 1
        assert client.count("diesel_requests_total", "other", "gone") == 1
        with pytest.raises(EOFError):
            await client.exactly(30 * size)


async def test_F7_a_request_that_finds_no_memory_takes_none_and_gets_a_retry_time(
    clock: MockClock, payloads: Payloads
) -> None:
    async with conversation(budget=FairByteBudget(1_000_000, 1_000_000)) as client:
        assert await client.service.budget.acquire("else", 900_000, 1)
        await client.send_request(1, payload=bytes(500_000))
        answer = await client.answer()
        assert (answer["id"], answer["error"]) == (1, "BusyError")
        assert answer["retry_after_s"] == limits.RETRY_AFTER_S
        assert client.age_s == pytest.approx(limits.BUDGET_WAIT_S, abs=0.5)
        assert not payloads, "an announced length takes no memory before there is room"
        client.service.budget.release("else", 900_000)
        await client.send_request(2, payload=bytes(500_000))
        assert "error" not in await client.answer()
        assert len(payloads) == 1
        assert client.count("diesel_requests_total", "other", "busy") == 1
        assert client.count("diesel_refusals_total", "memory") == 1


async def test_S12_a_forbidden_payload_takes_no_memory(clock: MockClock) -> None:
    async with conversation() as client:
        client.service.takes_payload = lambda account, do, size: do == "put"
        await client.send(wire.frame({"id": 1, "do": "echo"}, wire.REQUEST_LIMITS, 100 << 20))
        await trio.sleep(0.3)
        assert client.service.budget.held == 0
        for _ in range(100):
            await client.send(bytes(1 << 20))
        assert (await client.answer())["error"] == "PermissionDenied"
        await client.send_request(2)
        assert (await client.answer())["id"] == 2


async def test_the_requests_under_way_of_one_connection_are_limited(clock: MockClock) -> None:
    most = limits.REQUESTS_PER_CONNECTION_MAX
    async with conversation() as client:
        for number in range(2 * most):
            await client.send_request(number, "sleep", seconds=0.5)
        await trio.sleep(0.3)
        assert client.count("diesel_requests_under_way") == most
        for _ in range(2 * most):
            assert (await client.answer())["slept"]


async def test_S12_users_share_requests(clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REQUESTS_PER_USER_MAX", 5)
    async with conversation() as client:
        for number in range(8):
            await client.send_request(number, "sleep", seconds=0.5)
        said = [await client.answer() for _ in range(8)]
        assert sorted("retry_after_s" in each for each in said) == [False] * 5 + [True] * 3
        await client.send_request(9)
        assert "error" not in await client.answer()


async def test_a_stopping_connection_finishes_requests_under_way(clock: MockClock) -> None:
    async with conversation() as client:
        await client.send_request(1, "sleep", seconds=20)
        await trio.sleep(1)
        client.stop()
        await client.send_request(2)
        answer = await client.answer()
        assert (answer["id"], answer["error"], answer["retry_after_s"]) == (2, "BusyError", 0.0)
        assert (await client.answer())["slept"]
        assert await client.end() == pytest.approx(20, abs=1)
    async with conversation() as idle:
        await trio.sleep(1)
        idle.stop()
        assert await idle.end() <= 2


async def test_the_requests_of_a_client_that_goes_are_cancelled(clock: MockClock) -> None:
    cancelled = []

    async def forever(request: Request) -> Reply:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            cancelled.append(1)
            raise
        return Reply()

    async with conversation({"forever": forever}) as client:
        for number in range(5):
            await client.send_request(number, "forever")
        await trio.sleep(1)
        await client.stream.aclose()
    assert len(cancelled) == 5
    assert client.count("diesel_requests_total", "other", "gone") == 5


@pytest.mark.parametrize("refused", [True, False])
async def test_a_burst_of_requests_does_not_block_the_loop(refused: bool) -> None:
    """Requests may be declined, or answered at once."""

    async def prompt(request: Request) -> Reply:
        return Reply()

    async with conversation({"prompt": prompt}) as client:
        many, steps = 150, list[float]()

        def over() -> float:
            return sum(
                client.count("diesel_requests_total", "other", outcome)
                for outcome in metrics.OUTCOMES
            )

        more = {"new!": 1.0} if refused else {}
        await client.send(b"".join(request(n, "prompt", b"", **more) for n in range(many)))
        while over() < many:
            before = over()
            await trio.lowlevel.checkpoint()
            steps.append(over() - before)
        for _ in range(many):
            assert ("error" in await client.answer()) is refused
        assert max(steps) <= (2 if refused else limits.REQUESTS_PER_CONNECTION_MAX)


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
    numbers: list[int] = []

    async def listen(client: WireClient) -> None:
        with suppress(EOFError):
            while True:
                message = await client.answer()
                if "id" in message and message.get("more") is not True:
                    numbers.append(int(str(message["id"])))

    async def main() -> None:
        async with conversation(logs_in=False) as client, trio.open_nursery() as nursery:
            if start == "greets":
                await client.send(wire.greeting())
                with suppress(EOFError):
                    nonce = (await client.exactly(48))[16:]
                    user = "me" if then == "logs in" else "me\xff"
                    frames = {"logs in": login(nonce), "another's": login(nonce[::-1], user)}
                    await client.send(frames.get(then, login(nonce)[:9] if then == "half" else b""))
            else:
                await client.send(wire.greeting()[:5] if start == "half" else b"x" * 16)
            nursery.start_soon(listen, client)
            whole = b"".join(pieces)
            for at in range(0, len(whole), cut * 50):
                await client.send(whole[at : at + cut * 50])
            await trio.sleep(1)
            with suppress(trio.ClosedResourceError, trio.BrokenResourceError):
                await client.stream.send_eof()

    trio.run(main, clock=simulated_clock())
    assert len(numbers) <= len(pieces)


async def test_requests_of_one_connection_are_answered_in_any_order(clock: MockClock) -> None:
    """The fuzzed test's check of itself, too."""
    async with conversation() as client:
        await client.send_request(0, "sleep", seconds=0.5)
        for number in range(1, 200):
            await client.send_request(number, payload=bytes([number]) * number)
        numbers: list[int] = []
        for _ in range(200):
            numbers.append(int(str((await client.answer())["id"])))
            assert client.payload == bytes([numbers[-1]]) * numbers[-1]
        assert sorted(numbers) == list(range(200))
        assert numbers[-1] == 0
        assert client.count("diesel_requests_total", "other", "ok") == 200


PLACES = {
    "folder": ("file:///srv/data?meta=redis://:secret@db.internal:6380", "/srv/data"),
    "socket": ("file:///srv/data?meta=unix:///run/redis/s", "/run/redis/s"),
    "bucket": ("s3://acme/models/x?meta=redis+cluster://n1:7000,n2:7001", "s3://acme/models/x/o"),
    "endpoint": ("s3://acme/x?meta=redis://db.internal", "o at s3.us-east-1.amazonaws.com"),
    "sentinels": (
        "s3://acme?meta=redis+sentinel://n1:7000,n2:7001/main",
        "main by n1:7000,n2:7001",
    ),
}


def error_classes() -> list[type[DieselError]]:
    found = [DieselError]
    for kind in found:  # the list grows while it is read
        found += kind.__subclasses__()
    return [kind for kind in found if kind.__module__ == DieselError.__module__]


async def test_S11_no_bytes_from_a_server_reveal_where_its_stores_are(clock: MockClock) -> None:
    kinds = error_classes()
    for name, (address, shown) in PLACES.items():
        url = parse_url(address)
        meta = parse_redis_url(url.meta)
        nodes = [meta.socket] if meta.socket else [*map(str, meta.hosts)]
        text = (
            f"cannot reach the metadata store {meta}: {nodes[0]}: refused; {shown}: /var/c/x: full"
        )

        async def fail(request: Request, text: str = text) -> Reply:
            raise kinds[Fields(request.message, "a request").integer("kind")](text, advice=text)

        async def tell(_: Request, text: str = text) -> Reply:
            return Reply({"away": text, "result": {"problems": [text, "none"]}})

        async with conversation({"fail": fail, "tell": tell}) as client:
            client.service.redactions = redactions(url, "/var/c")
            await client.send_request(0, "tell")
            answers = [await client.answer()]
            for number in range(len(kinds)):
                await client.send_request(number, "fail", kind=number)
                answers.append(await client.answer())
        for answer in answers:
            said = repr(answer)
            assert (
                "cannot reach the server's metadata store: the server's metadata store: r" in said
            )
            for hidden in (*nodes, "db.internal", "/srv", "/run", "acme", "amazonaws", "/var/c"):
                assert hidden not in said, (name, said)
