"""F7, S12, G2, G6: clients that lie, stall, connect too often, or speak another protocol. N10, S8:
a server that lies does its clients no harm.
"""

import json
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest
import trio
import trio.testing

from diesel_fs import metrics
from diesel_fs.errors import CorruptError, DieselError, MetadataError, PermissionDenied
from diesel_fs.net import frames as wire
from diesel_fs.net.client import ServerLink
from diesel_fs.net.client_connection import PAYLOAD_BYTES_MAX
from diesel_fs.net.keys import sign
from diesel_fs.net.messages import Message, Value, parse_error
from diesel_fs.net.metrics_endpoint import MetricsEndpoint
from diesel_fs.storage.accounts.account import Account, Role
from diesel_fs.urls import parse_url
from diesel_server import limits
from diesel_server.connections.refusal_log import RefusalLog
from diesel_server.limits import ConnectionLimits, FairByteBudget
from diesel_server.requests.dispatcher import HandlerThreads, Reply, Request
from diesel_server.requests.table import takes_payload
from tests.processes import resident_bytes
from tests.rows import each_row
from tests.waiting import until

from ..net.test_client import Scripted
from .fake_server import HANDLERS, ME, SEED, ThreadedServer, blocking_sleep


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


def greeted(server: ThreadedServer) -> tuple[socket.socket, bytes]:
    client = connect(server)
    client.sendall(wire.greeting())
    return client, exactly(client, wire.parse_welcome(exactly(client, 16))[2])


def login(nonce: bytes, binding: bytes = wire.NO_BINDING) -> bytes:
    signature = sign(SEED, wire.login_challenge(nonce, binding, ME.user))
    message: Message = {
        "do": "login", "user": ME.user, "signature": signature, "program": "test",
    }  # fmt: skip
    return wire.frame(message, wire.BEFORE_LOGIN_LIMITS)


def logged_in(server: ThreadedServer) -> socket.socket:
    client, nonce = greeted(server)
    client.sendall(login(nonce))
    assert answer(client)[0]["user"] == ME.user
    return client


def ended(client: socket.socket) -> bytes:
    received = b""
    with suppress(ConnectionResetError):
        while some := client.recv(65536):
            received += some
    return received


def ask(
    client: socket.socket, number: int, do: str = "echo", payload: bytes = b"", **more: float
) -> None:
    message: Message = {"id": number, "do": do, **more}
    client.sendall(wire.frame(message, wire.REQUEST_LIMITS, len(payload)) + payload)


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "refused" in line]


def assert_serving(server: ThreadedServer) -> None:
    link = server.link()
    assert link.call({"do": "echo"}, [b"x"], deadline_s=10).payload.tobytes() == b"x"
    link.close()


def user(role: Role = Role.NONE) -> Account:
    return Account("somebody", b"", grants={"ds": role})


ADMIN = Account("admin", b"", admin=True)
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
    (line,) = refusals(caplog)
    assert named in line
    assert_serving(server)


@each_row(
    ("said", "error"),
    [
        (struct.pack("<II", 4097, 0), "CorruptError"),
        (struct.pack("<II", 10, 1), "CorruptError"),
        (struct.pack("<II", 0, 0), "CorruptError"),
        (struct.pack("<II", 1 << 31, 1 << 31), "CorruptError"),
        (wire.frame({"id": 1, "do": "echo"}, wire.BEFORE_LOGIN_LIMITS), "PermissionDenied"),
    ],
)
def test_S1_only_a_small_login_is_read(server: ThreadedServer, said: bytes, error: str) -> None:
    client, _ = greeted(server)
    with client:
        client.sendall(said)
        message, _ = answer(client)
        assert message["error"] == error
        assert "id" not in message
        assert ended(client) == b""
    assert_serving(server)


def test_S2_a_recorded_login_is_refused_on_another_connection() -> None:
    with ThreadedServer() as server:
        client, nonce = greeted(server)
        recorded, nonces = login(nonce), {nonce}
        with client:
            client.sendall(recorded)
            assert answer(client)[0]["user"] == ME.user
        for _ in range(3):
            client, nonce = greeted(server)
            with client:
                client.sendall(recorded)
                assert answer(client)[0]["error"] == "PermissionDenied"
                assert ended(client) == b""
            nonces.add(nonce)
        assert len(nonces) == 4
        assert_serving(server)


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
    assert len(refusals(caplog)) == 1
    assert_serving(server)


def test_the_log_line_of_a_refusal_has_all_four_facts(caplog: pytest.LogCaptureFixture) -> None:
    ask: Message = {"do": "fail", "kind": "PermissionDenied", "message": "only readers may"}
    with ThreadedServer() as server:
        for dataset in ("pets", "two words"):
            with pytest.raises(PermissionDenied):
                server.link().call({**ask, "dataset": dataset})
        assert server.cells.get("diesel_refusals_total", "permission") == 2
    lines = refusals(caplog)
    assert "user=me from=127.0.0.1:" in lines[0]
    assert lines[0].endswith("do=fail dataset=pets why='only readers may'")
    assert "dataset='two words'" in lines[1]


def test_S12_connections_without_a_login_are_limited_by_network() -> None:
    count = ConnectionLimits(1000, greeting=100, per_network=10)
    with ThreadedServer(count=count) as server:
        silent = [connect(server) for _ in range(30)]
        until(
            lambda: server.cells.get("diesel_refusals_total", "address") == 20,
            "the clients that go",
        )
        assert_serving(server)
        assert server.cells.get("diesel_refusals_total", "address") >= 21
        for client in silent:
            client.close()


def test_S12_the_network_with_most_connections_without_a_login_loses_one() -> None:
    count = ConnectionLimits(1000, greeting=6, per_network=5)
    gone: list[str] = []
    with ExitStack() as there:

        def knock(address: str) -> None:
            network = limits.network_of(address)
            there.enter_context(count.greeting(network, lambda: gone.append(address)))

        for i in range(5):
            knock(f"2001:db8::{i}")
        for i in range(3):
            knock(f"10.0.0.{i}")
        assert [each[:10] for each in gone] == ["2001:db8::"] * 2
        for _ in range(3):
            knock("2001:db8::9")
    assert not count._greeting


def test_S12_a_connection_beyond_the_limit_is_refused_with_a_message() -> None:
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


def test_S12_F7_the_log_of_refusals_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """An IPv6 network has as many lines as an address."""
    with ThreadedServer() as server:
        for _ in range(200):
            with connect(server) as client:
                client.sendall(bytes(16))
                ended(client)
        assert server.cells.get("diesel_refusals_total", "greeting") == 200
    assert 1 <= len(refusals(caplog)) <= 25
    caplog.clear()
    log = RefusalLog(metrics.private_cells())

    async def add() -> None:
        for i in range(200):
            log.add("login", "x", address=f"[2001:db8::{i:x}]:5")

    trio.run(add)
    assert 1 <= len(caplog.messages) <= 21


def test_a_refusal_cannot_forge_a_line(caplog: pytest.LogCaptureFixture) -> None:
    evil = "x\nrefused user=root from=1.2.3.4 why='"
    with ThreadedServer() as server, pytest.raises(DieselError):
        ServerLink(parse_url(server.url), type(ME)(evil, SEED)).call({"do": "echo"})
    lines = refusals(caplog)
    assert lines
    assert all("\n" not in line for line in lines)
    assert json.dumps(lines).count("user=root") == json.dumps(lines).count("nrefused user=root")


# Memory


def test_G2_after_an_overload_all_requests_succeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests are ten times as many as fit."""
    monkeypatch.setattr(limits, "BUDGET_WAIT_S", 0.2)
    monkeypatch.setattr(limits, "RETRY_AFTER_S", 0.1)
    budget = FairByteBudget(16 << 20, 8 << 20)
    body = random.Random(2).randbytes(2 << 20)
    with ThreadedServer(budget=budget, count=ConnectionLimits(1000)) as server:
        before = resident_bytes(os.getpid())

        def put(_: int) -> None:
            link = server.link()
            assert link.call({"do": "echo"}, [body], deadline_s=60).payload.tobytes() == body
            link.close()

        with ThreadPoolExecutor(32) as threads:
            list(threads.map(put, range(160)))
        assert budget.held == 0
        begun = time.monotonic()
        assert_serving(server)
        assert time.monotonic() - begun < 1
        assert resident_bytes(os.getpid()) - before < 32 * (6 << 20) + (64 << 20)


def test_G2_a_request_without_a_thread_gets_a_retry_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diesel_server.requests.dispatcher.THREAD_WAIT_S", 0.2)
    handlers = {"blocking_sleep": blocking_sleep(HandlerThreads(1))}
    with ThreadedServer(handlers) as server, logged_in(server) as client:
        ask(client, 1, "blocking_sleep", seconds=1.5)
        ask(client, 2, "blocking_sleep", seconds=1.5)
        message, _ = answer(client)
        assert (message["id"], message["error"]) == (2, "BusyError")
        assert message["retry_after_s"] == limits.RETRY_AFTER_S
        assert answer(client)[0]["slept"]
        ask(client, 3, "blocking_sleep", seconds=0.0)
        assert "error" not in answer(client)[0]


def test_a_read_takes_memory_for_its_answer() -> None:
    part = struct.pack("<16sII", b"c" * 16, 0, 600 << 20)
    most = wire.REQUEST_LIMITS.payload_bytes
    rows: list[tuple[Value, int]] = [(part, 600 << 20), (part * 2, most)]
    for parts, size in [*rows, (part[:-1], 0), ("x", 0), (None, 0), (5, 0)]:
        assert limits.answer_bytes({"do": "read", "parts": parts}) == size
    assert limits.answer_bytes({"do": "stat"}) == 0


def test_S12_answers_about_entries_are_counted_before_they_are_made() -> None:
    paths: Message = {"do": "stat", "paths": b"\0" * 9_999}
    assert limits.answer_bytes(paths) >= 10_000 * 2 * 19
    assert limits.answer_bytes({"do": "list", "folder": b"", "after": b""}) >= 8 << 20
    assert limits.answer_bytes({"do": "stat", "paths": "x"}) == 0
    many = wire.frame({"id": 1, "do": "datasets", "x": [0] * 1024}, wire.ANSWER_LIMITS)[8:]
    with pytest.raises(CorruptError, match="too many items"):
        wire.parse_head(many, wire.REQUEST_LIMITS)


@each_row(
    ("account", "do", "size", "takes"),
    [
        (ADMIN, "put", 1 << 30, True),
        (user(Role.WRITE), "put", 1 << 30, True),
        (ADMIN, "import_users", 1 << 20, True),
        (user(), "put", 1, False),
        (user(Role.READ), "put", 1, False),
        (user(Role.ADMIN), "import_users", 1, False),
        (ADMIN, "import_users", 65 << 20, False),
        (ADMIN, "stat", 1, False),
    ],
)
def test_S12_only_writers_send_payloads(account: Account, do: str, size: int, takes: bool) -> None:
    assert takes_payload(account, do, size) is takes


async def test_the_budget_is_fair(autojump_clock: trio.testing.MockClock) -> None:
    """First come, first served; a user with a whole share waits without delaying others."""
    budget = FairByteBudget(100, 60)
    assert await budget.acquire("a", 60, 1)
    assert not await budget.acquire("a", 1, 1)
    assert not await budget.acquire("b", 61, 1)
    got: list[str] = []

    async def take(owner: str, size: int) -> None:
        if await budget.acquire(owner, size, 10):
            got.append(owner)

    async with trio.open_nursery() as nursery:
        for owner, size in (("a", 10), ("b", 40), ("c", 40)):  # "a" is over its share
            nursery.start_soon(take, owner, size)
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


def test_G7_requests_that_outlast_the_drain_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DRAIN_S", 0.5)
    server = ThreadedServer()
    with logged_in(server) as client:
        ask(client, 1, "sleep", seconds=100)
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
        with pytest.raises(DieselError, match="internal error"):
            server.link().call({"do": "hungry"})
        assert_serving(server)


@each_row("head", [b"\r\n\r\n", b"\n\n", b"x\r\n\r\n", b"GET\r\n\r\n", b"\xff" * 9000])
async def test_S12_any_bytes_sent_to_the_metrics_port_are_harmless(head: bytes) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ours.send_all, head)
        await MetricsEndpoint(str, lambda: True).answer(theirs)
        nursery.cancel_scope.cancel()


# A server that lies


@each_row(
    ("message", "size"),
    [({"id": 1}, PAYLOAD_BYTES_MAX + 1), ({"id": 1, "error": "DieselError"}, 1)],
)
def test_N10_an_answer_with_an_unexpected_payload_is_an_error(message: Message, size: int) -> None:
    def said(client: socket.socket) -> None:
        client.sendall(wire.frame(message, wire.ANSWER_LIMITS, size))
        time.sleep(1)

    begun = time.monotonic()
    with Scripted(said) as scripted, pytest.raises(CorruptError):
        scripted.link().call({"do": "echo"}, deadline_s=10)
    assert time.monotonic() - begun < 5


def test_S8_text_from_a_server_cannot_control_a_terminal() -> None:
    evil = "\x1b]0;x\x07\x1b[2J\nready\r" + "x" * 100_000
    error = parse_error({"error": "DieselError", "message": evil, "advice": evil})
    refused = wire.refusal_error(wire.VERSION, b"\x1b[2J\xff\n")
    assert error is not None
    for text in (str(error), error.advice, str(refused)):
        assert text.isprintable()
        assert len(text) < 20_000
