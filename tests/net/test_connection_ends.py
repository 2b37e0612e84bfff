"""Each end of a TLS connection is noticed at once, after all bytes that came before it."""

import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest
import trio

from diesel_fs.errors import MetadataError
from diesel_fs.net import frames as wire
from diesel_fs.net.channel import ConnectionClosed, TlsChannel
from diesel_fs.net.client import ServerLink
from diesel_fs.net.client_connection import Connection, ConnectionBroken, Deadline
from diesel_fs.net.tls import (
    TlsSocket,
    client_context,
    load_certificate,
    make_certificate,
    verifying_context,
)
from diesel_fs.urls import HostPort, parse_url

from ..server.certificates import Authority
from ..server.fake_server import ME, STORE, ThreadedServer
from .connection_ends import (
    ENDS,
    HANDSHAKE_ENDS,
    PATIENCE_S,
    End,
    HandshakeEnd,
    RawTls,
    accepting,
    promptly,
    tcp_pair,
)
from .connection_ends import unexpected_eof as unexpected_eof

CONTENT = bytes(range(256)) * 300  # several records

Serve = Callable[[socket.socket], object]


def received_by_channel(plain: socket.socket, context: ssl.SSLContext, *, accepted: bool) -> bytes:
    """Return all bytes; assert that the end does not change."""
    got = bytearray()

    async def main() -> None:
        channel = TlsChannel(plain, context, accepted=accepted)
        await channel.do_handshake()
        room = memoryview(bytearray(5000))
        for _ in range(3):
            with suppress(ConnectionClosed):
                while True:
                    got.extend(room[: await channel.receive(room)])

    trio.run(main)
    return bytes(got)


def received_by_socket(plain: socket.socket, context: ssl.SSLContext) -> bytes:
    """Return all bytes; assert that the end does not change."""
    connected = TlsSocket(plain, context)
    got, room = bytearray(), memoryview(bytearray(5000))
    for _ in range(3):
        with suppress(ConnectionResetError):
            while count := connected.recv_into(room):
                got.extend(room[:count])
    return bytes(got)


Receiver = Callable[[socket.socket, ssl.SSLContext], bytes]
RECEIVERS: dict[str, Receiver] = {
    "accepting channel": lambda *end: received_by_channel(*end, accepted=True),
    "connecting channel": lambda *end: received_by_channel(*end, accepted=False),
    "socket": received_by_socket,
}


@pytest.mark.parametrize("receiver", RECEIVERS)
def test_an_end_is_noticed_after_all_bytes_before_it(receiver: str, unexpected_eof: str) -> None:
    """Also if the bytes and close_notify come in one segment, and TCP stays open."""
    failed = []
    for end in ENDS:
        for content in (b"", CONTENT[:10], CONTENT):
            name = f"{end.name}, after {len(content)} bytes"
            got = promptly(name, partial(_received, receiver, end, content))
            if got != content and not (end.is_reset and content.startswith(got)):
                failed.append(name)
    assert not failed


@pytest.mark.parametrize("receiver", RECEIVERS)
def test_an_end_within_the_handshake_is_noticed(receiver: str, unexpected_eof: str) -> None:
    failed = []
    for way in HANDSHAKE_ENDS:
        try:
            promptly(way.name, partial(_received, receiver, way))
        except (ConnectionClosed, OSError):
            continue
        failed.append(way.name)
    assert not failed


def _received(receiver: str, way: End | HandshakeEnd, content: bytes = b"") -> bytes:
    """The other end sends `content` and ends in this way."""

    def behave(raw: RawTls) -> None:
        if isinstance(way, HandshakeEnd):
            raw.end_handshake(way)
        else:
            raw.shake_hands().end(way, content)

    ours, theirs = tcp_pair()
    context = make_certificate().context
    is_accepting = receiver == "accepting channel"
    with ours, RawTls(theirs, None if is_accepting else context) as raw:
        thread = threading.Thread(target=behave, args=(raw,), daemon=True)
        thread.start()
        try:
            return RECEIVERS[receiver](ours, context if is_accepting else client_context())
        finally:
            thread.join()


# The client of a server ---------------------------------------------------------------------------

WELCOME = wire.welcome(bytes(wire.NONCE_BYTES))
LOGGED_IN = wire.frame({"user": ME.user, "store": str(STORE)}, wire.ANSWER_LIMITS)
ANSWER_HEAD = wire.frame({"id": 1}, wire.ANSWER_LIMITS, len(CONTENT))
ANSWER = ANSWER_HEAD + CONTENT
LOGIN_BYTES = len(WELCOME) + len(LOGGED_IN)

SENT = {  # bytes of welcome, the login's answer and the answer, before the end
    "before the welcome": 0,
    "within the welcome": 20,
    "after the welcome": len(WELCOME),
    "between lengths and head of the login's answer": len(WELCOME) + wire.LENGTHS_BYTES,
    "after the login": LOGIN_BYTES,
    "between lengths and head of an answer": LOGIN_BYTES + wire.LENGTHS_BYTES,
    "within the head of an answer": LOGIN_BYTES + len(ANSWER_HEAD) - 3,
    "between head and payload of an answer": LOGIN_BYTES + len(ANSWER_HEAD),
    "within the payload of an answer": LOGIN_BYTES + len(ANSWER) - 1000,
}


def serve_until(way: End | HandshakeEnd, sent: int, context: ssl.SSLContext) -> Serve:
    """A server that sends `sent` bytes on each connection and ends it in this way."""

    def serve(plain: socket.socket) -> None:
        raw, left = RawTls(plain, context), sent
        if isinstance(way, HandshakeEnd):
            raw.end_handshake(way)
            return
        raw.shake_hands().exactly(wire.GREETING_BYTES)
        for content in (WELCOME, LOGGED_IN, ANSWER):
            if left < len(content):
                raw.end(way, content[:left])
                return
            raw.send(content)
            left -= len(content)
            head, _ = wire.parse_lengths(raw.exactly(wire.LENGTHS_BYTES), wire.REQUEST_LIMITS)
            raw.exactly(head)

    return serve


def test_a_client_reports_each_end_of_a_server_and_uses_another(
    unexpected_eof: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
    pair = authority.issue()
    certificate = load_certificate(pair.certificate, pair.key)
    rows: list[tuple[str, int, End | HandshakeEnd]] = [
        *(("within the handshake", -1, way) for way in HANDSHAKE_ENDS),
        *((stage, sent, end) for stage, sent in SENT.items() for end in ENDS),
    ]
    failed = []
    with ThreadedServer(certificate=certificate) as good:
        for stage, sent, way in rows:
            with accepting(serve_until(way, sent, certificate.context)) as port:
                name = f"{stage}: {way.name}"
                try:
                    promptly(name, partial(_check_client, port, good.port, sent, way))
                except AssertionError as error:
                    failed.append(f"{name}: {error}")
    assert not failed


def _check_client(port: int, good_port: int, sent: int, way: End | HandshakeEnd) -> None:
    """The first of the servers at the two ports ends in this way."""
    with pytest.raises(ConnectionBroken) as caught:
        _connect_and_ask(port)
    broken, is_logged_in = caught.value, sent >= LOGIN_BYTES
    assert type(broken.error) is MetadataError
    assert not broken.is_permanent
    assert broken.may_have_arrived or not is_logged_in
    if isinstance(way, HandshakeEnd) and not way.end.is_reset:
        assert "closed the connection during the TLS handshake" in broken.error.message
    url = parse_url(f"diesel+tls://localhost:{port},localhost:{good_port}")
    link = ServerLink(url, ME, first=0, open_s=PATIENCE_S)
    if is_logged_in:
        with pytest.raises(MetadataError, match="not known"):
            link.call({"do": "echo"}, may_repeat=False)
    assert link.call({"do": "echo"}, [b"x"]).payload.tobytes() == b"x"
    link.close()


def _connect_and_ask(port: int) -> None:
    address = HostPort("localhost", port)
    connection = Connection(address, verifying_context(), ME, "test", Deadline(3600))
    with closing(connection):
        connection.exchange({"do": "echo"}, (), None, Deadline(3600))
