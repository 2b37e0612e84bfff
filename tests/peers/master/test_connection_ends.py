"""When a node ends its TLS connection to another node's master, in any way and at any byte, the
other end notices at once."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import pytest
import trio

from diesel_fs.net import breaker
from diesel_fs.net.frames import GREETING_BYTES, LENGTHS_BYTES, NONCE_BYTES, parse_lengths
from diesel_fs.net.tls import Certificate, certificate_digest, make_certificate
from diesel_fs.peers import handshake, wire
from diesel_fs.peers.handshake import connect_blocking
from diesel_fs.peers.master import acceptor, data_plane
from diesel_fs.peers.reader import owner_link
from diesel_fs.peers.reader.owner_link import OwnerLink
from diesel_fs.peers.wire import GIVEN

from ...net.connection_ends import (
    ENDS,
    HANDSHAKE_ENDS,
    PATIENCE_S,
    End,
    HandshakeEnd,
    NoEndError,
    RawTls,
    accepting,
    end_one,
    promptly,
    rows,
    secured,
)
from ...net.connection_ends import unexpected_eof as unexpected_eof
from ...waiting import soon
from ..connected_masters import (
    FakeAnswers,
    answering,
    connected_peer,
    content,
    hello,
    me,
    member,
    proof,
    read,
    read_request,
)
from ..fake_owner import HEAD, READ, RECORD

EACH = 2  # connections of each kind
SOME = (2, 4096, 20_000)
FEW = (0, 5, 100)
NOT_IN_MEMORY = (1, 0, 1000)


@pytest.fixture(autouse=True)
def no_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """No deadline ends a connection or a read here, so an end must be noticed by itself."""
    for module, name in (
        (acceptor, "HELLO_S"),
        (handshake, "HELLO_S"),
        (data_plane, "GRACE_S"),
        (data_plane, "IDLE_S"),
        (owner_link, "CONNECT_WAIT_S"),
        (breaker, "TIMEOUT_MIN_S"),
        (breaker, "TIMEOUT_MAX_S"),
    ):
        monkeypatch.setattr(module, name, 3600.0)


# Masters of clients that end ----------------------------------------------------------------------


def greeted(port: int) -> RawTls:
    raw = secured(port)
    raw.send(wire.greeting())
    raw.exactly(GREETING_BYTES)
    return raw


def authenticated(port: int) -> RawTls:
    raw = greeted(port)
    nonce, binding = raw.exactly(NONCE_BYTES), certificate_digest(raw.peer_certificate)
    raw.send(hello(me(0), nonce, binding, is_client=True))
    raw.exactly(parse_lengths(raw.exactly(LENGTHS_BYTES), wire.HELLO_LIMITS).head)
    return raw


ROWS = rows(
    {
        "after the TLS handshake": (secured, b""),
        "within the greeting": (secured, wire.greeting()[:7]),
        "after the greeting": (greeted, b""),
        "after the hello": (authenticated, b""),
        "within the head of a request": (authenticated, read_request(1, SOME, FEW)[:9]),
        "between head and parts of a request": (
            authenticated,
            read_request(1, SOME, FEW)[: HEAD.size],
        ),
        "within the parts of a request": (authenticated, read_request(1, SOME, FEW)[:-3]),
        "after a request": (authenticated, read_request(1, SOME, FEW)),
        "after a request and a half": (authenticated, (2 * read_request(1, SOME, FEW))[:-3]),
        "while a request waits": (authenticated, read_request(1, NOT_IN_MEMORY)),
    }
)


def test_a_master_forgets_each_client_that_ends_and_answers_the_others(unexpected_eof: str) -> None:
    failed: list[str] = []
    reached: list[str] = []

    async def main() -> None:
        certificate = make_certificate()
        answers = FakeAnswers()
        answers.hold(absent={NOT_IN_MEMORY[0]})
        answers.ready = trio.sleep_forever
        async with (
            answering(me(1, certificate), answers) as node,
            connected_peer(node.port, me(0, certificate), certificate.digest) as peer,
        ):
            assert await read(peer, FEW) == [GIVEN]
            with ExitStack() as opened:
                for name, begin, last, way in ROWS:
                    reached.append(name)
                    for _ in range(EACH):
                        one = partial(end_one, node.port, begin, last, way)
                        opened.enter_context(await trio.to_thread.run_sync(one))
                    try:
                        for _ in range(2):  # the master serves a connection soon after the hello
                            await soon(lambda: _is_alone(node.acceptor), PATIENCE_S)
                            assert await read(peer, SOME) == [GIVEN]
                    except (AssertionError, trio.TooSlowError) as error:
                        failed.append(f"{name}: {error!r}")

    try:
        promptly("", lambda: trio.run(main), 3 * PATIENCE_S)
    except NoEndError:
        failed.append(f"{reached[-1]}: the master waits, or runs, without end")
    assert not failed


def _is_alone(master: acceptor.Acceptor) -> bool:
    stats = master.stats()
    return (stats["connections"], stats["pending_handshakes"]) == (1, 0)


# Readers of a master that ends --------------------------------------------------------------------

ANSWER_BYTES = HEAD.size + 1 + SOME[2]
SENT = {  # bytes of the answer before the end
    "before the answer": 0,
    "within the head of the answer": HEAD.size - 3,
    "between head and statuses of the answer": HEAD.size,
    "between statuses and bytes of the answer": HEAD.size + 1,
    "within the bytes of the answer": ANSWER_BYTES - 3000,
}


@contextmanager
def a_master(certificate: Certificate, *ways: tuple[End | HandshakeEnd, int]) -> Iterator[int]:
    """A master with TLS, at a port. It ends the first connections in these ways, each after a
    number of bytes of the first answer, and no others."""
    left = list(ways)

    def serve(plain: socket.socket) -> None:
        raw = RawTls(plain, certificate.context)
        way, sent = left.pop(0) if left else (None, 0)
        if isinstance(way, HandshakeEnd):
            raw.end_handshake(way)
            return
        _welcome(raw.shake_hands(), certificate)
        while True:
            number, _, _, _, count, _ = HEAD.unpack(raw.exactly(HEAD.size))
            found = b"".join(
                content(*record) for record in RECORD.iter_unpack(raw.exactly(count * RECORD.size))
            )
            answer = HEAD.pack(number, READ, 0, 0, count, len(found)) + bytes(count) + found
            if way is not None:
                raw.end(way, answer[:sent])
                return
            raw.send(answer)

    with accepting(serve) as port:
        yield port


def _welcome(raw: RawTls, certificate: Certificate) -> None:
    raw.exactly(GREETING_BYTES)
    nonce = os.urandom(NONCE_BYTES)
    raw.send(wire.welcome(nonce))
    sent = raw.exactly(parse_lengths(raw.exactly(LENGTHS_BYTES), wire.HELLO_LIMITS).head)
    raw.send(proof(me(1), nonce, sent, certificate.digest))


def check_peer(certificate: Certificate, way: End | HandshakeEnd, sent: int) -> None:
    async def main() -> None:
        mine = me(0, certificate)
        with a_master(certificate, (way, sent)) as port:
            async with connected_peer(port, mine, certificate.digest) as peer:
                assert await read(peer, SOME) != [GIVEN]
                stats = peer.stats()
                if isinstance(way, HandshakeEnd):
                    assert (stats["connections"], stats["state"]) == (0, "open")
                else:
                    assert (stats["failed"], stats["timed_out"]) == (1, 0)
                    assert await read(peer, SOME) == [GIVEN]

    trio.run(main)


def check_owner_link(certificate: Certificate, way: End | HandshakeEnd, sent: int) -> None:
    with a_master(certificate, (way, sent), (way, sent)) as port:
        to = member(port, certificate.digest)
        link = OwnerLink(1, lambda: connect_blocking(me(0, certificate).connector, to))
        try:
            assert _read(link) is None
            if isinstance(way, HandshakeEnd):
                assert (link.counts["connections"], link.is_refused) == (0, False)
            else:  # the link itself repeats the request once
                assert (link.counts["connections"], link.counts["failed"]) == (2, 1)
                assert _read(link) == content(*SOME)
                assert link.read_one(*FEW) == content(*FEW)
            assert link.counts["timed_out"] == 0
        finally:
            link.close()


def _read(link: OwnerLink) -> bytes | None:
    pending = link.begin(np.array([SOME], "<u4"), SOME[2])
    answer = None if pending is None else link.finish(pending)
    return None if answer is None or answer[1] else bytes(answer[0])


@pytest.mark.parametrize("check", [check_peer, check_owner_link])
def test_a_reader_notices_each_end_of_a_master_and_connects_again(
    check: Callable[[Certificate, End | HandshakeEnd, int], None], unexpected_eof: str
) -> None:
    certificate, failed = make_certificate(), []
    rows: list[tuple[str, int, End | HandshakeEnd]] = [
        *(("within the TLS handshake", 0, way) for way in HANDSHAKE_ENDS),
        *((stage, sent, end) for stage, sent in SENT.items() for end in ENDS),
    ]
    for stage, sent, way in rows:
        name = f"{stage}: {way.name}"
        try:
            promptly(name, partial(check, certificate, way, sent))
        except AssertionError as error:
            failed.append(f"{name}: {error}")
    assert not failed
