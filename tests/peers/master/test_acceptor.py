"""The accepting end of connections between masters: which connectors are let in, how the control
plane answers, and when a connection ends.

Its data plane (`test_data_plane.py`) and bad requests have tests of their own.
"""

import os
import random
import socket
import ssl
import struct
import tempfile
import time
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from diesel_fs.errors import ObjectStoreError
from diesel_fs.net.frames import NO_BINDING, frame
from diesel_fs.net.tls import client_context, make_certificate
from diesel_fs.peers import handshake, wire
from diesel_fs.peers.handshake import LocalIdentity
from diesel_fs.peers.master.acceptor import Acceptor
from diesel_fs.peers.master.peer import Peer
from diesel_fs.peers.node.chunk_table import ChunkTable
from diesel_fs.peers.wire import FAILED, GIVEN, LOAD, NOT_MINE, THROUGH, Hello, Proofs
from tests.processes import resident_bytes
from tests.rows import each_row

from ...waiting import soon
from ..connected_masters import (
    SECRET,
    SIZES,
    SMALL,
    FakeAnswers,
    Node,
    RawPeer,
    answering,
    authenticated_raw,
    connected_peer,
    content,
    gather,
    lines,
    me,
    open_raw,
    read,
    read_request,
    wait_for,
)


async def test_requests_of_all_kinds_on_many_connections_of_a_client(node: Node) -> None:
    clients = [await authenticated_raw(node.port, is_client=True) for _ in range(5)]
    for raw_peer in clients:
        await raw_peer.send(read_request(5, SMALL, (1, 0, 10)), wire.request(6, wire.PING))
        head, statuses, payload = await raw_peer.answer()
        assert (head.id, statuses) == (5, bytes(2))
        assert payload == content(*SMALL) + content(1, 0, 10)
        assert (await raw_peer.answer())[0] == (6, wire.PING, 0, 0)
    stats = node.acceptor.stats()
    assert stats["connections"] == stats["accepted"] == 5


@pytest.mark.parametrize("error", [ObjectStoreError("away"), RuntimeError("a bug")])
async def test_an_answer_that_fails_is_a_status_and_the_connection_goes_on(
    error: Exception, answers: FakeAnswers, peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise error

    answers.hold(hot=False)
    answers.ready = fail
    assert await read(peer, SMALL, SMALL, load=True) == [FAILED, FAILED]
    answers.hold()
    assert await read(peer, SMALL) == [GIVEN]
    assert peer.stats()["connections"] == 1
    is_logged = "unexpected error in a request of node" in caplog.text
    assert is_logged == isinstance(error, RuntimeError)


async def test_F6_refusals_have_the_reason(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    other = replace(me(0).task, name="other")
    for mine, to, why in (
        (replace(me(0), secret=b"x" * 32), 1, "the wrong secret"),
        (replace(me(0), task=other), 1, "the wrong secret"),
        (replace(me(0), version=4), 1, "version 3 of the dataset is here, not 4"),
        (me(0), 2, "rank 1 is here, not 2"),
    ):
        raw_peer = await open_raw(node.port)
        reply = await raw_peer.handshake(mine, to=to)
        assert reply["message"] == why
        assert await raw_peer.receive_all() == b""
    assert await state_of(node.port, replace(me(0), version=9)) == "open"
    assert len(lines(caplog.messages)) == 5
    assert "from=127.0.0.1:" in lines(caplog.messages)[0]
    for secret in (SECRET, b"x" * 32):
        assert secret.hex() not in caplog.text
        assert repr(secret)[2:-1] not in caplog.text


async def state_of(port: int, mine: LocalIdentity) -> object:
    async with connected_peer(port, mine) as peer:
        await read(peer, SMALL)
        return peer.stats()["state"]


async def test_F6_another_version_of_the_wire_is_named(node: Node) -> None:
    raw_peer = await open_raw(node.port)
    await raw_peer.send(wire.greeting()[:8] + b"\1\0" + bytes(6))
    goes_on, _, length = wire.parse_welcome(await raw_peer.exactly(16))
    assert not goes_on
    assert b"version 3" in await raw_peer.exactly(length)


async def test_switching_the_version_ends_all_connections(node: Node) -> None:
    raw_peer = await authenticated_raw(node.port)
    node.acceptor.set_identity(replace(me(1), version=4))
    assert await raw_peer.receive_all() == b""
    other = await open_raw(node.port)
    assert "proof" in await other.handshake(replace(me(0), version=4))


async def test_clients_of_this_node_are_served_on_a_socket_that_is_handed_over(node: Node) -> None:
    """Only they may have the master ask other nodes."""
    ours, theirs = socket.socketpair()
    node.acceptor.adopt_local(theirs)
    ours.setblocking(False)
    async with trio.SocketStream(trio.socket.from_stdlib_socket(ours)) as stream:
        raw_peer = RawPeer(stream)
        await raw_peer.send(read_request(1, SMALL))
        assert (await raw_peer.answer())[2] == content(*SMALL)
        node.answers.hold(hot=False)
        await raw_peer.send(read_request(2, SMALL, flags=LOAD | THROUGH))
        assert (await raw_peer.answer())[0] == (2, wire.WORKING, 0, 0)
        assert (await raw_peer.answer())[2] == content(*SMALL)
        assert node.answers.requested == [(1, 1, True, True)]
        assert node.acceptor.stats()["local_connections"] == 1
        node.acceptor.set_identity(me(1))
        assert await raw_peer.receive_all() == b""


def test_a_socket_that_is_handed_over_too_late_is_closed() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        Acceptor(me(1), FakeAnswers()).adopt_local(theirs)
        assert ours.recv(1) == b""


async def test_a_request_for_a_retired_version_is_answered_NOT_MINE(node: Node) -> None:
    """Its chunks have other numbers now. The request does not reach the source."""
    raw_peer = await authenticated_raw(node.port)
    node.answers.hold(hot=False)
    node.answers.table = ChunkTable(SIZES)
    await raw_peer.send(read_request(1, SMALL, SMALL))
    head, statuses, _ = await raw_peer.answer()
    assert (head.id, statuses) == (1, bytes([NOT_MINE] * 2))
    assert not node.answers.requested


# Connectors that are no masters, or violate the protocol


TLS_HELLO = bytes.fromhex("16030102000100") + bytes(200)


async def check_served(node: Node) -> None:
    async with connected_peer(node.port) as peer:
        assert await read(peer, SMALL) == [GIVEN]


async def greeted(node: Node) -> tuple[RawPeer, bytes]:
    raw_peer = await open_raw(node.port)
    await raw_peer.send(wire.greeting())
    return raw_peer, (await raw_peer.exactly(48))[16:]


@each_row(
    ("sent", "named"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP"),
        (TLS_HELLO, "TLS"),
        (bytes(16), "no greeting"),
        (random.Random(1).randbytes(100_000), "no greeting"),
    ],
)
async def test_F7_another_protocol_gets_no_answer_and_one_log_line(
    sent: bytes, named: str, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    raw_peer = await open_raw(node.port)
    with suppress(trio.BrokenResourceError):
        await raw_peer.send(sent)
    assert await raw_peer.receive_all() == b""
    await check_served(node)
    [line] = lines(caplog.messages)
    assert named in line


@each_row(
    "sent", [struct.pack("<II", 4097, 0), struct.pack("<II", 10, 1), struct.pack("<II", 0, 0),
             struct.pack("<II", 1 << 31, 1 << 31), struct.pack("<II", 4, 0) + b"\xc1\xc1\xc1\xc1",
             frame({"proof": b"p" * 32}, wire.HELLO_LIMITS), read_request(1, SMALL)]
)  # fmt: skip
async def test_S1_F7_only_a_small_hello_is_read_before_the_proof(
    sent: bytes, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    raw_peer, _ = await greeted(node)
    await raw_peer.send(sent)
    assert (await raw_peer.frame())["message"] == "no hello"
    assert await raw_peer.receive_all() == b""
    assert node.acceptor.stats()["requests"] == 0
    assert len(lines(caplog.messages)) == 1


async def test_S2_replayed_and_reflected_proofs_are_rejected(node: Node) -> None:
    def hello(nonce: bytes, own: bytes, *, is_reflected: bool = False) -> bytes:
        sent = Hello(0, False, bytes(16), 1, me(0).identity, 3, own)
        proofs = Proofs(SECRET, nonce, NO_BINDING, me(0).task.digest, sent)
        return wire.hello_frame(sent, proofs.acceptor if is_reflected else proofs.connector)

    first, nonce = await greeted(node)
    recorded = hello(nonce, b"n" * 32)
    await first.send(recorded)
    assert "proof" in await first.frame()
    again, _ = await greeted(node)
    await again.send(recorded)
    assert (await again.frame())["message"] == "the wrong secret"
    reflecting, nonce = await greeted(node)
    await reflecting.send(hello(nonce, nonce, is_reflected=True))
    assert (await reflecting.frame())["message"] == "the wrong secret"


async def test_S1_S2_an_acceptor_without_the_secret_gets_no_requests() -> None:
    got = []

    async def echo(stream: trio.SocketStream) -> None:
        await stream.receive_some(16)
        await stream.send_all(wire.welcome(b"n" * 32))
        _, proof = wire.parse_hello(bytes(await stream.receive_some(4096))[8:])
        await stream.send_all(wire.proof_frame(proof))
        got.append(await stream.receive_some(4096))

    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio.serve_tcp, echo, 0, host="127.0.0.1"))
        async with connected_peer(listener.socket.getsockname()[1]) as peer:
            await read(peer, SMALL)
            assert peer.stats()["state"] == "open"
        await soon(lambda: got)
        nursery.cancel_scope.cancel()
    assert got == [b""]


@each_row("sent", [b"", wire.greeting()[:7], wire.greeting() + b"\1"])
async def test_F7_a_connector_without_a_hello_has_five_seconds(
    sent: bytes, node: Node, jumping_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    raw_peer = await open_raw(node.port)
    await raw_peer.send(sent)
    begun_s = trio.current_time()
    await raw_peer.receive_all()
    took_s = trio.current_time() - begun_s
    assert handshake.HELLO_S - 0.1 < took_s < handshake.HELLO_S + 1.5
    await check_served(node)
    assert len(lines(caplog.messages)) == 1


async def test_F7_slow_loris_a_byte_a_second_is_late(node: Node, jumping_clock: MockClock) -> None:
    raw_peer = await open_raw(node.port)
    begun_s = trio.current_time()
    with suppress(trio.BrokenResourceError):
        for byte in wire.greeting() * 4:
            await raw_peer.send(bytes([byte]))
            await trio.sleep(1)
    assert trio.current_time() - begun_s < 9


async def test_S12_connections_without_a_hello_are_limited_and_do_not_block_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A real master's hello takes milliseconds, so the oldest connections are closed."""
    async with answering(pending_handshakes_max=40, pending_handshakes_per_address=10) as node:
        held = [await open_raw(node.port) for _ in range(300)]
        before = time.perf_counter()
        await check_served(node)
        assert time.perf_counter() - before < 2
        assert node.acceptor.stats()["pending_handshakes"] <= 10
        assert node.acceptor.stats()["rejected"] >= 290
        for raw_peer in held:
            await raw_peer.stream.aclose()
    assert len(lines(caplog.messages)) < 30


async def test_S12_connections_are_limited() -> None:
    async with answering(connections_max=3) as node:
        for rank in range(2, 5):
            await authenticated_raw(node.port, rank)
        await soon(lambda: node.acceptor.stats()["connections"] == 3)
        raw_peer = await open_raw(node.port)
        await raw_peer.send(wire.greeting())
        goes_on, _, length = wire.parse_welcome(await raw_peer.exactly(16))
        assert not goes_on
        assert await raw_peer.exactly(length) == b"too many connections"


async def test_F7_S12_memory_stays_flat_under_garbage(node: Node) -> None:
    chance = random.Random(3)

    async def annoy(number: int) -> None:
        with suppress(trio.BrokenResourceError, EOFError):
            if number % 2:
                raw_peer = await open_raw(node.port)
                await raw_peer.send(chance.choice([b"", wire.greeting()]))
                await raw_peer.send(chance.randbytes(chance.choice([10, 5000, 100_000])))
            else:
                raw_peer = await authenticated_raw(node.port, 2)
                sent = struct.pack("<IBBHII", 1, 1, 0, 0, 4096, 0)
                await raw_peer.send(sent, bytes(20_000))
            await raw_peer.stream.aclose()

    for number in range(200):
        await annoy(number)
    before = resident_bytes(os.getpid(), "VmRSS")
    for number in range(2000):
        await annoy(number)
    assert resident_bytes(os.getpid(), "VmRSS") - before < 8 << 20
    assert node.acceptor.stats()["connections"] <= 1
    await check_served(node)


# TLS


MINE, THEIRS, BETWEEN = make_certificate(), make_certificate(), make_certificate()


@pytest.fixture
async def secure(answers: FakeAnswers) -> AsyncIterator[Node]:
    async with answering(me(1, THEIRS), answers) as node:
        yield node


@each_row("digest", [THEIRS.digest, b""])
async def test_masters_talk_over_TLS(digest: bytes, secure: Node) -> None:
    """Without a registered digest (`--peers`), only the proofs are bound to the certificate."""
    secure.answers.hold()
    secure.answers.ready = wait_for(0.002)
    async with connected_peer(secure.port, me(0, MINE), digest) as peer:
        for records in ([SMALL], [(2, i * 9000, 8000) for i in range(200)],
                        [(2, 0, 6 << 20)], [(3, 0, 40 << 20)]):  # fmt: skip
            assert await read(peer, *records) == [GIVEN] * len(records)
        assert await peer.ping()

        async def work(number: int) -> None:
            for i in range(20):
                secure.answers.hold(hot=(number + i) % 3 > 0)
                size = 3 << 20 if (number + i) % 17 == 0 else 5000 * (1 + i)
                assert await read(peer, (2, number * 1000, size)) == [GIVEN]

        await gather(*(partial(work, number) for number in range(12)))
        assert peer.stats()["failed"] == 0


@asynccontextmanager
async def between(port: int, *, to_tls: bool) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A process in the middle: it speaks TLS with a certificate of its own and forwards all
    bytes."""
    received: list[bytes] = []

    async def pass_on(source: trio.abc.Stream, target: trio.abc.Stream) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while some := await source.receive_some(65536):
                received.append(bytes(some))
                await target.send_all(some)

    async def one(stream: trio.SocketStream) -> None:
        hither = trio.SSLStream(stream, BETWEEN.context, server_side=True)
        thither = await open_raw(port, client_context() if to_tls else None)
        async with stream, trio.open_nursery() as nursery:
            nursery.start_soon(pass_on, hither, thither.stream)
            await pass_on(thither.stream, hither)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio.serve_tcp, one, 0, host="127.0.0.1"))
        yield listener.socket.getsockname()[1], received
        nursery.cancel_scope.cancel()


@each_row("known", [True, False])
@each_row("to_tls", [True, False])
async def test_S3_S4_another_certificate_is_refused(
    known: bool, to_tls: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A registered digest shows it before the first byte; otherwise the proofs do."""
    theirs = me(1, THEIRS if to_tls else None)
    async with answering(theirs) as node, between(node.port, to_tls=to_tls) as (port, received):
        async with connected_peer(port, me(0, MINE), THEIRS.digest if known else b"") as peer:
            assert await read(peer, SMALL) != [GIVEN]
            with trio.move_on_after(2):
                while peer.stats()["state"] == "closed":
                    await read(peer, SMALL)
                    await trio.sleep(0.01)
            assert peer.stats()["state"] == "open"
        assert node.acceptor.stats()["accepted"] == 0
        assert node.acceptor.stats()["requests"] == 0
        assert not (known and received)
    why = "certificate is not the registered one" if known else "the wrong secret"
    assert any(why in line for line in caplog.messages)


async def test_S3_TLS_cannot_be_downgraded_to_plaintext(node: Node, secure: Node) -> None:
    for there, mine, digest in (
        (node, me(0, MINE), THEIRS.digest),
        (node, me(0, MINE), b""),
        (node, me(0), THEIRS.digest),
        (secure, me(0), b""),
    ):
        async with connected_peer(there.port, mine, digest) as peer:
            await read(peer, SMALL)
            assert peer.stats()["connected"] is False
    assert node.acceptor.stats()["accepted"] == 0


async def test_S3_F7_plaintext_and_old_TLS_are_refused(
    secure: Node, caplog: pytest.LogCaptureFixture
) -> None:
    raw_peer = await open_raw(secure.port)
    await raw_peer.send(wire.greeting())
    with trio.fail_after(5):
        assert b"DIESPER" not in await raw_peer.receive_all()
    assert len(lines(caplog.messages)) == 1
    context = client_context()
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the test needs the old version
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(trio.BrokenResourceError):
        await (await open_raw(secure.port, context)).send(b"x")


async def test_S3_a_proof_is_bound_to_the_certificate(secure: Node) -> None:
    for binding in (THEIRS.digest, BETWEEN.digest, NO_BINDING):
        raw_peer = await open_raw(secure.port, client_context())
        reply = await raw_peer.handshake(me(0), binding=binding)
        assert ("proof" in reply) is (binding == THEIRS.digest)


def test_keys_are_always_new_and_in_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert len({make_certificate().digest for _ in range(3)}) == 3
    assert list(tmp_path.rglob("*")) == []
    assert "context" not in repr(MINE)
