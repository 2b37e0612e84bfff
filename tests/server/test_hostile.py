"""F7, S12, G2, G6: clients that lie, stall, connect too often, or speak another protocol."""

import json
import os
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest
import trio
import trio.testing

from diesel_fs.errors import DieselError, MetadataError, PermissionDenied
from diesel_fs.net import frames as wire
from diesel_fs.net.client import ServerLink
from diesel_fs.net.keys import sign
from diesel_fs.urls import parse_url
from diesel_server import limits
from diesel_server.limits import ConnectionLimits, FairByteBudget
from diesel_server.requests import HandlerThreads, Reply, Request
from tests.rows import each_row

from .fake_server import HANDLERS, ME, SEED, ThreadedServer, blocking_sleep
from .program import resident_bytes, until


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedServer]:
    with ThreadedServer(count=ConnectionLimits(1000)) as server:
        yield server


def connect(server: ThreadedServer) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port), 10)
    client.settimeout(20)
    return client


def exactly(client: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        some = client.recv(size - len(received))
        if not some:
            raise EOFError
        received += some
    return received


def answer(client: socket.socket) -> tuple[dict[str, object], bytes]:
    lengths = wire.parse_lengths(exactly(client, 8), wire.ANSWER_LIMITS)
    message = wire.parse_head(exactly(client, lengths.head), wire.ANSWER_LIMITS)
    return dict(message), exactly(client, lengths.payload)


def logged_in(server: ThreadedServer) -> socket.socket:
    client = connect(server)
    client.sendall(wire.greeting())
    said = exactly(client, 16)
    nonce = exactly(client, wire.parse_welcome(said)[2])
    signature = sign(SEED, wire.login_challenge(nonce, wire.NO_BINDING, ME.user))
    login = {"do": "login", "user": ME.user, "signature": signature, "program": "test"}
    client.sendall(wire.frame(login, wire.BEFORE_LOGIN_LIMITS))  # type: ignore[arg-type]  # a plain dict is a message
    assert answer(client)[0]["user"] == ME.user
    return client


def ended(client: socket.socket) -> bytes:
    """What is received until the server closes the connection."""
    received = b""
    with suppress(ConnectionResetError):
        while some := client.recv(65536):
            received += some
    return received


def ask(client: socket.socket, number: int, do: str = "echo", payload: bytes = b"") -> None:
    client.sendall(
        wire.frame({"id": number, "do": do}, wire.REQUEST_LIMITS, len(payload)) + payload
    )


def assert_serving(server: ThreadedServer) -> None:
    """Others are served."""
    link = server.link()
    assert link.call({"do": "echo"}, [b"x"], deadline_s=10).payload.tobytes() == b"x"
    link.close()


TLS_HELLO = bytes.fromhex("16030102000100") + bytes(200)


@each_row(
    ("said", "named"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP"),
        (TLS_HELLO, "TLS"),
        (bytes(16), "not a DIESEL-FS client"),
        (random.Random(1).randbytes(100_000), "not a DIESEL-FS client"),
    ],
)
def test_F7_another_protocol_gets_no_answer_and_one_log_line(
    server: ThreadedServer, said: bytes, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(server) as client:
        with suppress(OSError):
            client.sendall(said)
        assert ended(client) == b""
    lines = [line for line in caplog.messages if "refused" in line]
    assert len(lines) == 1
    assert named in lines[0]
    assert_serving(server)


def test_a_probe_of_the_port_is_not_logged(
    server: ThreadedServer, caplog: pytest.LogCaptureFixture
) -> None:
    before = server.cells.get("diesel_connections_total")
    connect(server).close()
    until(lambda: server.cells.get("diesel_connections_total") > before, "the connection")
    assert_serving(server)
    assert not [line for line in caplog.messages if "refused" in line]


@each_row(
    "head", [struct.pack("<II", 4097, 0), struct.pack("<II", 10, 1), struct.pack("<II", 0, 0),
             struct.pack("<II", 1 << 31, 1 << 31)]
)  # fmt: skip
def test_S1_nothing_beyond_a_small_login_is_read(server: ThreadedServer, head: bytes) -> None:
    with connect(server) as client:
        client.sendall(wire.greeting())
        exactly(client, 48)
        client.sendall(head)
        message, _ = answer(client)
        assert message["error"] == "CorruptError"
        assert "id" not in message
        assert ended(client) == b""
    assert_serving(server)


def test_S1_nothing_but_a_login_is_answered(server: ThreadedServer) -> None:
    with connect(server) as client:
        client.sendall(wire.greeting())
        exactly(client, 48)
        client.sendall(wire.frame({"id": 1, "do": "echo"}, wire.BEFORE_LOGIN_LIMITS))
        assert answer(client)[0]["error"] == "PermissionDenied"
        assert ended(client) == b""


@each_row(
    "frame",
    [
        struct.pack("<II", (8 << 20) + 1, 0),
        struct.pack("<II", 0xFFFFFFFF, 0xFFFFFFFF),
        struct.pack("<II", 10, (1 << 32) - 1),
        struct.pack("<II", 0, 0),
        struct.pack("<II", 4, 0) + b"\xc1\xc1\xc1\xc1",
        wire.frame({"do": "echo"}, wire.REQUEST_LIMITS),
        wire.frame({"id": -1, "do": "echo"}, wire.REQUEST_LIMITS),
        wire.frame({"id": "1", "do": "echo"}, wire.REQUEST_LIMITS),
        wire.frame({"id": 1}, wire.REQUEST_LIMITS),
        wire.frame({"id": 1, "do": 5}, wire.REQUEST_LIMITS),
        wire.frame({"id": 1, "do": "sleep", "seconds": 5}, wire.REQUEST_LIMITS) * 2,
    ],
)
def test_F7_N10_a_bad_frame_ends_its_connection_with_one_error_and_one_line(
    server: ThreadedServer, frame: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with logged_in(server) as client:
        client.sendall(frame)
        message, _ = answer(client)
        assert message["error"] == "CorruptError"
        assert "id" not in message
        assert ended(client) == b""
    lines = [line for line in caplog.messages if "refused" in line]
    assert len(lines) == 1
    assert_serving(server)


def test_the_log_line_of_a_refusal_has_user_address_request_and_dataset(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ThreadedServer() as server:
        link = server.link()
        for dataset in ("pets", "two words"):
            with pytest.raises(PermissionDenied):
                link.call(
                    {"do": "fail", "kind": "PermissionDenied", "message": "only readers may",
                     "dataset": dataset}
                )  # fmt: skip
        assert server.cells.get("diesel_refusals_total", "permission") == 2
    lines = [line for line in caplog.messages if "refused" in line]
    assert "user=me from=127.0.0.1:" in lines[0]
    assert lines[0].endswith("do=fail dataset=pets why='only readers may'")
    assert "dataset='two words'" in lines[1]


def test_requests_of_one_connection_are_answered_in_any_order(server: ThreadedServer) -> None:
    with logged_in(server) as client:
        client.sendall(wire.frame({"id": 1, "do": "sleep", "seconds": 0.5}, wire.REQUEST_LIMITS))
        for number in range(2, 40):
            ask(client, number, payload=bytes([number]) * number)
        numbers: list[int] = []
        for _ in range(39):
            message, payload = answer(client)
            numbers.append(int(str(message["id"])))
            assert payload == bytes([numbers[-1]]) * len(payload)
        assert sorted(numbers) == list(range(1, 40))
        assert numbers[-1] == 1


def test_the_requests_under_way_of_one_connection_are_limited(server: ThreadedServer) -> None:
    with logged_in(server) as client:
        most = limits.REQUESTS_PER_CONNECTION_MAX
        for number in range(2 * most):
            client.sendall(
                wire.frame({"id": number, "do": "sleep", "seconds": 0.5}, wire.REQUEST_LIMITS)
            )
        time.sleep(0.3)
        assert server.cells.get("diesel_requests_under_way") == most
        for _ in range(2 * most):
            assert answer(client)[0]["slept"]


def test_S12_connections_without_a_login_are_limited_by_network_and_keep_no_user_out() -> None:
    count = ConnectionLimits(1000, greeting=100, per_network=10)
    with ThreadedServer(count=count) as server:
        silent = [connect(server) for _ in range(30)]
        until(lambda: server.cells.get("diesel_refusals_total", "address") == 20, "those who go")
        assert_serving(server)
        assert server.cells.get("diesel_refusals_total", "address") >= 21
        for client in silent:
            client.close()


def test_S12_the_network_with_most_connections_without_a_login_loses_one() -> None:
    count = ConnectionLimits(1000, greeting=6, per_network=5)
    gone: list[str] = []

    @contextmanager
    def knocks(address: str) -> Iterator[None]:
        with count.greeting(limits.network_of(address), lambda: gone.append(address)):
            yield

    with ExitStack() as there:
        for i in range(5):
            there.enter_context(knocks(f"2001:db8::{i}"))
        there.enter_context(knocks("10.0.0.1"))
        there.enter_context(knocks("10.0.0.2"))
        there.enter_context(knocks("10.0.0.3"))
        assert [each[:10] for each in gone] == ["2001:db8::"] * 2
        for _ in range(3):
            there.enter_context(knocks("2001:db8::9"))
    assert not count._greeting


def test_S12_a_connection_too_many_is_refused_with_a_sentence() -> None:
    with ThreadedServer(count=ConnectionLimits(20)) as server:
        link = server.link()
        link.call({"do": "echo"})
        crowd = [connect(server) for _ in range(60)]
        time.sleep(0.3)
        assert link.call({"do": "echo"}, [b"x"]).payload.tobytes() == b"x"
        assert server.cells.get("diesel_refusals_total", "connections") >= 41
        assert server.cells.get("diesel_connections") == 20
        with pytest.raises(MetadataError, match="has 20 connections"):
            server.link(open_s=0.2).call({"do": "echo"})
        for client in crowd:
            client.close()
        until(lambda: server.cells.get("diesel_connections") <= 1, "the crowd's end")
        assert_serving(server)


def test_S12_the_log_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    with ThreadedServer() as server:
        for _ in range(200):
            with connect(server) as client:
                client.sendall(bytes(16))
                ended(client)
        assert server.cells.get("diesel_refusals_total", "greeting") == 200
    lines = [line for line in caplog.messages if "refused" in line]
    assert 1 <= len(lines) <= 25


def test_a_refusal_cannot_forge_a_line(caplog: pytest.LogCaptureFixture) -> None:
    evil = "x\nrefused user=root from=1.2.3.4 why='"
    with ThreadedServer() as server, pytest.raises(DieselError):
        ServerLink(parse_url(server.url), type(ME)(evil, SEED)).call({"do": "echo"})
    lines = [line for line in caplog.messages if "refused" in line]
    assert lines
    assert all("\n" not in line for line in lines)
    assert json.dumps(lines).count("user=root") == json.dumps(lines).count("nrefused user=root")


# Memory


def test_G6_a_client_that_does_not_read_loses_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its answers are not made ahead, and after a time its connection ends."""
    monkeypatch.setattr(limits, "FRAME_S", 0.5)
    monkeypatch.setattr(limits, "BYTES_PER_S_MIN", 1 << 30)
    made = []

    async def piece(request: Request) -> AsyncGenerator[Reply, None]:
        for i in range(1000):
            made.append(i)
            yield Reply({"more": True}, [bytes(1 << 20)])
        yield Reply()

    with ThreadedServer({"pieces": piece, "echo": HANDLERS["echo"]}) as server:
        with logged_in(server) as client:
            ask(client, 1, "pieces")
            until(lambda: server.cells.get("diesel_requests_under_way") == 1, "the request")
            until(lambda: server.cells.get("diesel_requests_under_way") == 0, "its end")
            assert len(made) < 30
            assert_serving(server)
        assert server.cells.get("diesel_refusals_total", "frame") == 1
        assert server.cells.get("diesel_requests_total", "other", "gone") == 1


def test_F7_an_announced_length_takes_no_memory_before_there_is_room() -> None:
    """Payloads wait for the budget before a byte of them is received."""
    most = 64 << 20
    with ThreadedServer(
        budget=FairByteBudget(most, most // 2), count=ConnectionLimits(1000)
    ) as server:
        clients = [logged_in(server) for _ in range(20)]
        for client in clients:
            head = wire.frame({"id": 1, "do": "echo"}, wire.REQUEST_LIMITS, 30 << 20)
            client.sendall(head + bytes(100))
        time.sleep(0.5)
        assert server.service is not None
        assert 0 < server.service.budget.held <= most
        assert_serving(server)
        for client in clients:
            client.close()
        until(lambda: server.service is not None and not server.service.budget.held, "memory")
        assert_serving(server)


def test_G2_all_requests_succeed_in_the_end_after_an_overload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten times as much as fits: all is done in the end, nothing is lost, and it is quick again
    once the load has dropped."""
    monkeypatch.setattr(limits, "BUDGET_WAIT_S", 0.2)
    monkeypatch.setattr(limits, "RETRY_AFTER_S", 0.1)
    budget = FairByteBudget(16 << 20, 8 << 20)
    with ThreadedServer(budget=budget, count=ConnectionLimits(1000)) as server:
        before = resident_bytes(os.getpid())

        def put(i: int) -> bool:
            link = server.link()
            body = bytes([i % 256]) * (2 << 20)
            good = link.call({"do": "echo"}, [body], deadline_s=60).payload.tobytes() == body
            link.close()
            return good

        with ThreadPoolExecutor(32) as threads:
            assert all(threads.map(put, range(160)))
        assert budget.held == 0
        begun = time.monotonic()
        assert_serving(server)
        assert time.monotonic() - begun < 1
        assert resident_bytes(os.getpid()) - before < 32 * (6 << 20) + (64 << 20)


def test_G2_a_request_that_finds_no_thread_is_told_to_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("diesel_server.requests.THREAD_WAIT_S", 0.2)
    handlers = {"blocking_sleep": blocking_sleep(HandlerThreads(1))}
    with ThreadedServer(handlers) as server, logged_in(server) as client:
        slow = {"id": 1, "do": "blocking_sleep", "seconds": 1.5}
        client.sendall(wire.frame(slow, wire.REQUEST_LIMITS))  # type: ignore[arg-type]  # a plain dict is a message
        client.sendall(wire.frame({**slow, "id": 2}, wire.REQUEST_LIMITS))  # type: ignore[dict-item]  # as above
        message, _ = answer(client)
        assert (message["id"], message["error"]) == (2, "BusyError")
        assert message["retry_after_s"] == limits.RETRY_AFTER_S
        assert answer(client)[0]["slept"]
        slow |= {"id": 3, "seconds": 0.0}
        client.sendall(wire.frame(slow, wire.REQUEST_LIMITS))  # type: ignore[arg-type]  # as above
        assert "error" not in answer(client)[0]


def test_a_request_without_room_is_drained_and_the_connection_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "BUDGET_WAIT_S", 0.2)
    with (
        ThreadedServer(budget=FairByteBudget(1 << 20, 1 << 20)) as server,
        logged_in(server) as client,
    ):
        ask(client, 1, payload=bytes(2 << 20))
        message, _ = answer(client)
        assert (message["id"], message["error"]) == (1, "BusyError")
        ask(client, 2, payload=bytes(1 << 19))
        message, payload = answer(client)
        assert message["id"] == 2
        assert len(payload) == 1 << 19


def test_a_read_takes_memory_for_its_answer() -> None:
    part = struct.pack("<16sII", b"c" * 16, 0, 600 << 20)
    assert limits.answer_bytes({"do": "read", "parts": part}) == 600 << 20
    assert (
        limits.answer_bytes({"do": "read", "parts": part * 2}) == wire.REQUEST_LIMITS.payload_bytes
    )
    for parts in (part[:-1], "x", None, 5):
        assert limits.answer_bytes({"do": "read", "parts": parts}) == 0
    assert limits.answer_bytes({"do": "stat"}) == 0


def test_the_budget_is_fair() -> None:
    """First come, first served; who has had a share waits without keeping others waiting."""

    async def main() -> None:
        budget = FairByteBudget(100, 60)
        assert await budget.acquire("a", 60, 1)
        assert not await budget.acquire("a", 1, 1)
        assert not await budget.acquire("b", 61, 1)
        got: list[str] = []

        async def take(owner: str, size: int) -> None:
            if await budget.acquire(owner, size, 10):
                got.append(owner)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(take, "a", 10)  # over its share
            await trio.sleep(0.1)
            nursery.start_soon(take, "b", 40)
            await trio.sleep(0.1)
            nursery.start_soon(take, "c", 40)
            await trio.sleep(0.1)
            assert got == ["b"]
            budget.release("a", 60)
            await trio.sleep(0.1)
            assert sorted(got) == ["a", "b", "c"]
            assert budget.held == 90
        with trio.move_on_after(1):
            await budget.acquire("d", 50, 100)
        assert budget.held == 90
        for owner, size in (("a", 10), ("b", 40), ("c", 40)):
            budget.release(owner, size)
        assert budget.held == 0

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_G7_requests_that_outlast_the_drain_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DRAIN_S", 0.5)
    server = ThreadedServer()
    with logged_in(server) as client:
        client.sendall(wire.frame({"id": 1, "do": "sleep", "seconds": 100}, wire.REQUEST_LIMITS))
        until(lambda: server.cells.get("diesel_requests_under_way") == 1, "the request")
        begun = time.monotonic()
        server.stop()
        assert time.monotonic() - begun < 5
        assert ended(client) == b""


def test_work_in_a_thread_is_finished_when_its_client_has_gone() -> None:
    finished = threading.Event()

    def work() -> Reply:
        time.sleep(0.5)
        finished.set()
        return Reply()

    async def handle(request: Request) -> Reply:
        return await HandlerThreads(1).run(work)

    with ThreadedServer({"work": handle}) as server:
        with logged_in(server) as client:
            ask(client, 1, "work")
            until(lambda: server.cells.get("diesel_requests_under_way") == 1, "the request")
        assert finished.wait(5)
        until(lambda: server.cells.get("diesel_requests_under_way") == 0, "its end")
        until(lambda: server.cells.get("diesel_connections") == 0, "the connection's end")


def test_J8_a_memory_error_in_a_handler_ends_only_its_request() -> None:
    async def hungry(request: Request) -> Reply:
        raise MemoryError

    with ThreadedServer({"hungry": hungry, "echo": HANDLERS["echo"]}) as server:
        link = server.link()
        with pytest.raises(DieselError, match="internal error"):
            link.call({"do": "hungry"})
        assert link.call({"do": "echo"}, [b"x"]).payload.tobytes() == b"x"


def test_S12_many_small_requests_do_not_starve_others(server: ThreadedServer) -> None:
    stop = threading.Event()

    def flood() -> None:
        with logged_in(server) as client, suppress(OSError):
            while not stop.is_set():
                for number in range(50):
                    ask(client, number)
                for _ in range(50):
                    answer(client)

    threads = [threading.Thread(target=flood) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        link = server.link()
        for _ in range(20):
            begun = time.monotonic()
            link.call({"do": "echo"})
            assert time.monotonic() - begun < 2
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_TLS_to_a_plain_port_and_plain_to_TLS_are_explained(server: ThreadedServer) -> None:
    with pytest.raises(MetadataError, match="closed the connection during the TLS handshake"):
        ServerLink(parse_url(f"diesel+tls://localhost:{server.port}"), ME).call({"do": "echo"})
    context = ssl.create_default_context()
    with connect(server) as client, pytest.raises((ssl.SSLError, OSError)):
        context.wrap_socket(client, server_hostname="localhost")
