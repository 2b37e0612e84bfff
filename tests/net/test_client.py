"""The client of servers: requests and answers, repeated requests, several servers, forks."""

import os
import re
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from uuid import UUID

import numpy as np
import pytest

from diesel_fs.credentials import Credentials
from diesel_fs.errors import (
    BusyError,
    ConfigError,
    CorruptError,
    DeadlineError,
    DieselError,
    MetadataError,
    NoSuchDataset,
    PermissionDenied,
    UsageError,
)
from diesel_fs.format.entries import Bytes
from diesel_fs.net import client as rpc
from diesel_fs.net import frames as wire
from diesel_fs.net.client import ServerLink
from diesel_fs.net.messages import Message
from diesel_fs.urls import parse_url
from diesel_server.limits import ConnectionLimits
from diesel_server.requests.dispatcher import Reply, Request
from tests.forks import in_child, within
from tests.rows import each_row
from tests.waiting import until

from ..server.fake_server import ME, STORE, ThreadedServer, links


@pytest.fixture(scope="module")
def server() -> Iterator[ThreadedServer]:
    with ThreadedServer() as server:
        yield server


@pytest.fixture
def link(server: ThreadedServer) -> Iterator[ServerLink]:
    with closing(server.link()) as link:
        yield link


def fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def echoed(link: ServerLink, *parts: Bytes) -> bytes:
    return link.call({"do": "echo"}, parts).payload.tobytes()


def test_a_payload_is_sent_and_received_in_parts(link: ServerLink) -> None:
    parts: list[Bytes] = [
        *(b"a" * 3, bytearray(b"b" * 70_000), memoryview(b"c" * 5_000_000), b"", b"d"),
        *(bytes([i % 256]) * (i % 7) for i in range(1000)),
        np.arange(1000, dtype=np.uint32).data,
    ]
    whole = b"".join(parts)
    answer = link.call({"do": "echo", "text": "hello"}, parts)
    assert answer.message["text"] == "hello"
    assert answer.payload.tobytes() == whole
    room = memoryview(bytearray(len(whole)))
    assert link.call({"do": "echo"}, parts, room=room).payload.obj is room.obj
    assert room == whole


@each_row("size", [0, 1, 1999, 2001])
def test_a_payload_that_does_not_fit_its_room_is_refused(link: ServerLink, size: int) -> None:
    room = memoryview(bytearray(size))
    with pytest.raises(CorruptError, match="bytes instead of"):
        link.call({"do": "echo"}, [bytes(2000)], room=room)
    assert echoed(link, b"x") == b"x"


def test_an_error_has_its_class_and_ends_only_its_request(link: ServerLink) -> None:
    """FAULTS G3."""
    peer = link.call({"do": "echo"}).message["peer"]
    with pytest.raises(NoSuchDataset, match="gone"):
        link.call({"do": "fail", "kind": "NoSuchDataset", "message": "gone"}, [bytes(100_000)])
    with pytest.raises(DieselError, match="internal error") as caught:
        link.call({"do": "bug"})
    assert "secret" not in str(caught.value)
    with pytest.raises(NoSuchDataset):  # with room for a payload that does not come
        link.call(
            {"do": "fail", "kind": "NoSuchDataset", "message": "x"}, room=memoryview(bytearray(10))
        )
    assert link.call({"do": "echo"}).message["peer"] == peer


def test_unknown_requests_are_refused_and_unknown_fields_ignored(link: ServerLink) -> None:
    """G4: only a field whose name ends in `!` must be understood."""
    with pytest.raises(UsageError, match="does not know the request"):
        link.call({"do": "later"})
    assert link.call({"do": "echo", "later": 1}, [b"x"]).payload.tobytes() == b"x"
    with pytest.raises(UsageError, match="later!"):
        link.call({"do": "echo", "later!": 1}, [bytes(1_000_000)])
    assert echoed(link, b"x") == b"x"


def test_an_answer_with_a_field_that_must_be_understood_is_refused() -> None:
    async def later(request: Request) -> Reply:
        return Reply({"later!": 1})

    with ThreadedServer({"later": later}) as server, pytest.raises(UsageError, match="later!"):
        server.link().call({"do": "later"})


def test_a_stream_gives_all_its_answers(link: ServerLink) -> None:
    answers = list(link.stream({"do": "count", "n": 5}))
    assert [answer.message["i"] for answer in answers] == list(range(5))
    assert [answer.payload.nbytes for answer in answers] == list(range(5))
    assert [answer.message.get("more", False) for answer in answers] == [True] * 4 + [False]
    assert [answer.message.get("i") for answer in link.stream({"do": "progress", "n": 3})] == [
        0, 1, 2, None,
    ]  # fmt: skip
    for answer in link.stream({"do": "count", "n": 100_000}):
        assert answer.message["i"] == 0
        break
    assert echoed(link, b"x") == b"x"
    with pytest.raises(DieselError, match="internal error"):  # it promised an answer
        list(link.stream({"do": "count", "n": 0}))


def test_a_generator_whose_client_has_gone_is_closed() -> None:
    closed, held = threading.Event(), []  # otherwise garbage collection would close it

    def begun(request: Request) -> AsyncGenerator[Reply, None]:
        held.append(endless(request))
        return held[0]

    async def endless(request: Request) -> AsyncGenerator[Reply, None]:
        try:
            while True:
                yield Reply({"more": True}, [bytes(1 << 20)])
        finally:
            closed.set()

    with ThreadedServer({"endless": begun}) as server:
        stream = server.link().stream({"do": "endless"})
        next(stream)
        stream.close()  # type: ignore[attr-defined]  # an Iterator that is a generator
        assert closed.wait(10)


def test_many_threads_share_a_link(server: ThreadedServer, link: ServerLink) -> None:
    def ask(i: int) -> bool:
        body = bytes([i % 256]) * (i * 37 % 50_000)
        return link.call({"do": "echo", "text": str(i)}, [body]).payload.tobytes() == body

    with ThreadPoolExecutor(24) as threads:
        assert all(threads.map(ask, range(400)))
    assert len(link._idle) <= rpc.IDLE_CONNECTIONS_MAX
    link.close()
    with pytest.raises(MetadataError, match="closed"):
        link.call({"do": "echo"})


def test_connections_that_have_been_idle_for_long_are_not_used(
    server: ThreadedServer, link: ServerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = link.call({"do": "echo"}).message["peer"]
    assert link.call({"do": "echo"}).message["peer"] == first
    monkeypatch.setattr(rpc, "IDLE_S", 0.0)
    assert link.call({"do": "echo"}).message["peer"] != first


def test_closed_links_leave_no_descriptor_open(server: ThreadedServer) -> None:
    def use() -> None:
        with closing(server.link()) as link:
            link.call({"do": "echo"})

    use()
    before = fds()
    for _ in range(20):
        use()
    until(lambda: fds() <= before, "closed sockets")


@each_row("place", ["127.0.0.1:1", "no-such-host.invalid:1"])
def test_connecting_is_lazy_and_fails_in_time(place: str) -> None:
    nobody = ServerLink(parse_url(f"diesel://{place}"), ME, open_s=0.3)
    with within(30), pytest.raises(MetadataError, match=f"cannot reach.*{re.escape(place)}"):
        assert nobody.store_id


@each_row("url", ["diesel://h:x", "diesel://h:99999", "diesel://:1", "diesel://a,,b"])
def test_malformed_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        ServerLink(parse_url(url), ME)


def test_a_server_is_reached_over_ipv6() -> None:
    try:
        server = ThreadedServer(host="::1")
    except OSError:
        pytest.skip("no IPv6 here")
    with server:
        assert "[::1]" in server.url
        assert server.link().store_id == STORE
        assert str(server.link().call({"do": "echo"}).message["peer"]).startswith("[::1]:")


@pytest.mark.parametrize(
    "credentials", [Credentials("me", bytes(32)), Credentials("you", bytes(range(32)))]
)
def test_wrong_credentials_are_refused_at_once(
    server: ThreadedServer, credentials: Credentials, caplog: pytest.LogCaptureFixture
) -> None:
    before = server.cells.get("diesel_connections_total")
    with within(3), pytest.raises(PermissionDenied):
        server.link(credentials).call({"do": "echo"})
    assert server.cells.get("diesel_connections_total") == before + 1
    lines = [line for line in caplog.messages if "refused user=" in line]
    assert len(lines) == 1
    assert f"user={credentials.user} from=127.0.0.1:" in lines[0]
    assert "do=login" in lines[0]


def test_a_revoked_user_is_refused_on_an_open_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diesel_server.connections.connection.ACCOUNT_REFRESH_S", 0.0)
    with ThreadedServer() as server:
        link = server.link()
        link.call({"do": "echo"})
        server.login.revoked = True
        with pytest.raises(PermissionDenied, match="not valid"):
            link.call({"do": "echo"}, [bytes(100_000)])


def test_a_deadline_covers_the_whole_answer(server: ThreadedServer, link: ServerLink) -> None:
    with within(2), pytest.raises(DeadlineError):
        link.call({"do": "sleep", "seconds": 5}, deadline_s=0.3)

    def drip(client: socket.socket) -> None:
        client.sendall(wire.frame({"id": 1}, wire.ANSWER_LIMITS, 1000))
        for _ in range(100):
            client.send(b"x")
            time.sleep(0.05)

    with Scripted(drip) as scripted, within(3), pytest.raises(DeadlineError):
        scripted.link().call({"do": "echo"}, deadline_s=1.0)


def test_the_next_and_the_previous_version_are_refused_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, server: ThreadedServer
) -> None:
    """G4: both the server and the client itself explain it."""
    for version in (wire.VERSION - 1, wire.VERSION + 1):
        other = wire.greeting()[:8] + version.to_bytes(2, "little") + bytes(6)
        with monkeypatch.context() as patch:
            patch.setattr(wire, "greeting", lambda other=other: other)
            with within(8), pytest.raises(MetadataError) as caught:
                server.link(open_s=0.2).call({"do": "echo"})
        assert wire.version_mismatch(version) in str(caught.value)
        assert caught.value.exit_code == 14


class Scripted:
    """A server that logs any client in, reads one request of each connection, and runs an
    action."""

    def __init__(self, *acts: Callable[[socket.socket], object]) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.requests: list[Message] = []
        self._acts = list(acts)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            client.recv(16, socket.MSG_WAITALL)
            client.sendall(wire.welcome(bytes(32)))
            self._read(client)
            client.sendall(wire.frame({"user": "me", "store": str(STORE)}, wire.ANSWER_LIMITS))
            message = self._read(client)
            self.requests.append(message)
            if self._acts:
                self._acts.pop(0)(client)
            else:
                client.sendall(wire.frame({"id": message["id"]}, wire.ANSWER_LIMITS))
                time.sleep(5)

    def _read(self, client: socket.socket) -> Message:
        lengths = wire.parse_lengths(client.recv(8, socket.MSG_WAITALL), wire.REQUEST_LIMITS)
        head = client.recv(lengths.head, socket.MSG_WAITALL)
        if lengths.payload:
            client.recv(lengths.payload, socket.MSG_WAITALL)
        return wire.parse_head(head, wire.REQUEST_LIMITS)

    def link(self) -> ServerLink:
        return ServerLink(parse_url(f"diesel://127.0.0.1:{self.port}"), ME)

    def __enter__(self) -> "Scripted":
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


def close(client: socket.socket) -> None:
    client.shutdown(socket.SHUT_RDWR)


def half(client: socket.socket) -> None:
    client.sendall(wire.frame({"id": 1}, wire.ANSWER_LIMITS, 100) + b"x" * 50)


def test_G1_only_a_repeatable_request_is_sent_again_when_the_connection_breaks() -> None:
    with Scripted(close, half, close) as scripted:
        assert scripted.link().call({"do": "echo", "n": 1}).message["id"] == 1
        assert [request["n"] for request in scripted.requests] == [1] * 4
    for act in (close, half):
        with Scripted(act) as scripted:
            with pytest.raises(MetadataError, match="not known"):
                scripted.link().call({"do": "echo"}, may_repeat=False)
            assert len(scripted.requests) == 1


def test_a_request_that_has_not_arrived_whole_is_always_sent_again() -> None:
    """The server closes before it has the whole request, so it cannot have carried it out."""
    server = ThreadedServer()
    try:
        link = server.link()
        link.call({"do": "echo"})
        port = server.port
        server.stop()
        server = ThreadedServer(port=port)
        assert link.call({"do": "echo"}, [b"x"], may_repeat=False).payload.tobytes() == b"x"
    finally:
        server.stop()


def test_an_overloaded_server_is_tried_again_within_the_deadline() -> None:
    """G2, the client's side: `retry_after_s`, also for requests that may not be repeated."""

    def busy(client: socket.socket, **more: float) -> None:
        reply: Message = {"id": 1, "error": "BusyError", "message": "busy", "advice": "", **more}
        client.sendall(wire.frame(reply, wire.ANSWER_LIMITS))

    overloaded = partial(busy, retry_after_s=0.05)
    with Scripted(overloaded, overloaded) as scripted:
        scripted.link().call({"do": "echo"}, may_repeat=False)
        assert len(scripted.requests) == 3
    with Scripted(*[overloaded] * 100) as scripted, pytest.raises(BusyError, match="busy"):
        scripted.link().call({"do": "echo"}, deadline_s=0.5)
    with Scripted(busy) as scripted:
        with pytest.raises(BusyError, match="busy"):
            scripted.link().call({"do": "echo"})
        assert len(scripted.requests) == 1


@each_row(
    "reply",
    [
        wire.frame({"id": 2}, wire.ANSWER_LIMITS),
        wire.frame({}, wire.ANSWER_LIMITS),
        b"\xff" * 8,
        b"\1\0\0\0\0\0\0\0\xc1",
        b"\0" * 8,
    ],
)
def test_N10_an_answer_that_breaks_the_protocol_is_corrupt(reply: bytes) -> None:
    with Scripted(lambda client: client.sendall(reply)) as scripted, pytest.raises(CorruptError):
        scripted.link().call({"do": "echo"})


def test_G1_another_server_is_used_when_one_dies() -> None:
    with ThreadedServer() as first, ThreadedServer() as second:
        link = links([first, second])
        for _ in range(3):
            link.call({"do": "echo"})
        used = [server for server in (first, second) if server.cells.get("diesel_logins_total")]
        assert len(used) == 1, "it sticks to one that works"
        used[0].stop()
        assert echoed(link, b"x") == b"x"


def test_clients_are_distributed_over_the_servers() -> None:
    with ThreadedServer() as first, ThreadedServer() as second:
        for _ in range(40):
            links([first, second]).call({"do": "echo"})
        assert first.cells.get("diesel_logins_total") > 5
        assert second.cells.get("diesel_logins_total") > 5


def test_another_server_is_used_when_one_hangs() -> None:
    with ThreadedServer() as well, Scripted(lambda client: time.sleep(60)) as hangs:
        for _ in range(4):
            url = f"diesel://127.0.0.1:{hangs.port},127.0.0.1:{well.port}"
            link = ServerLink(parse_url(url), ME, first=0)
            with within(11):
                assert link.call({"do": "echo"}, [b"x"], deadline_s=12).payload.tobytes() == b"x"
            if hangs.requests:
                return
    raise AssertionError("no request came: the test proves nothing")


@pytest.mark.parametrize("hello", [True, False])
def test_G1_servers_that_are_silent_leave_time_for_the_one_that_answers(hello: bool) -> None:
    """Silent servers are stopped (`hello`: the kernel still accepts), or their machine is gone."""
    silent = [socket.create_server(("127.0.0.1", 0), backlog=16 if hello else 0) for _ in range(2)]
    with ExitStack() as stack, ThreadedServer() as well:
        for each in silent:
            stack.enter_context(each)
            for _ in range(0 if hello else 2):  # its backlog is full: connecting hangs
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(each.getsockname())
        places = [f"127.0.0.1:{each.getsockname()[1]}" for each in silent]
        url = f"diesel://{','.join([*places, well.place])}"
        while True:
            link = ServerLink(parse_url(url), ME, open_s=6.0, first=2)
            try:  # on a busy machine all answers may have arrived when this thread runs again
                link.call({"do": "echo"}, deadline_s=0.0)
                link.close()
            except DieselError:
                break
        begun = time.monotonic()
        assert link.call({"do": "echo"}, [b"x"], deadline_s=20.0)
        asked_silent_s = time.monotonic() - begun
        assert asked_silent_s > 2, "a server that could not be reached is not asked first again"
        link.close_idle()
        with within(asked_silent_s):  # the server that answers is tried first
            assert link.call({"do": "echo"}, [b"x"], deadline_s=20.0)


def test_G8_servers_of_one_address_serve_one_store() -> None:
    other = UUID(int=8)
    with ThreadedServer() as first, ThreadedServer(store=other) as second:
        link = links([first, second])
        store = link.store_id
        link.close_idle()
        (first if store == STORE else second).stop()
        with pytest.raises(MetadataError, match="another store"):
            link.call({"do": "echo"}, deadline_s=3)


def test_clients_of_a_server_that_shuts_down_go_to_another() -> None:
    with ThreadedServer() as first, ThreadedServer() as second:
        link = links([first, second], first=0)
        link.call({"do": "echo"})
        thread = threading.Thread(
            target=lambda: link.call({"do": "sleep", "seconds": 1.5}), daemon=True
        )
        thread.start()
        time.sleep(0.2)
        first.begin_stop()
        assert link.call({"do": "echo"}, may_repeat=False)
        until(lambda: second.cells.get("diesel_requests_total", "other", "ok"), "its count")
        thread.join(10)


def test_excess_connections_are_refused_with_a_reason() -> None:
    with ThreadedServer(count=ConnectionLimits(3)) as server:
        held = [server.link() for _ in range(2)]
        for link in held:
            link.call({"do": "echo"})
        with pytest.raises(BusyError, match="which is the limit"):
            server.link(open_s=0.3).call({"do": "echo"})
        held[0].close()
        assert server.link().call({"do": "echo"})


def test_Z9_a_forked_child_opens_its_own_connections(link: ServerLink) -> None:
    parent_peer = link.call({"do": "echo"}).message["peer"]
    stream = link.stream({"do": "count", "n": 50})
    next(stream)
    before = fds()

    def use() -> None:
        assert fds() < before, "it holds the parent's connections"
        answer = link.call({"do": "echo"}, [b"child"])
        assert answer.payload.tobytes() == b"child"
        assert answer.message["peer"] != parent_peer

    assert in_child(use) == 0
    assert len(list(stream)) == 49
    assert echoed(link, b"parent") == b"parent"


def test_Z9_a_fork_while_other_threads_send_requests(link: ServerLink) -> None:
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            assert len(echoed(link, b"x" * 1000)) == 1000

    def use() -> None:
        assert echoed(link, b"y") == b"y"

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        try:
            assert [in_child(use) for _ in range(10)] == [0] * 10
        finally:
            stop.set()
        for each in asking:
            each.result()
