"""F7, S1, S2, S12: connectors at a master's port that are no masters, or violate the protocol. Bad
requests are in `test_data_plane.py`."""

import random
import struct
import time
from contextlib import suppress
from functools import partial

import pytest
import trio
from trio.testing import MockClock

from diesel_fs.net.frames import NO_BINDING, frame
from diesel_fs.peers import handshake, wire
from diesel_fs.peers.wire import GIVEN, Hello, Proofs
from tests.rows import each_row

from ..waiting import soon
from .connected_masters import (
    SECRET,
    SMALL,
    Node,
    RawPeer,
    answering,
    asked,
    asking,
    authenticated_raw,
    lines,
    me,
    open_raw,
    read,
)

TLS_HELLO = bytes.fromhex("16030102000100") + bytes(200)


async def check_served(node: Node) -> None:
    """Check that a proper master is served."""
    async with asking(node.port) as peer:
        assert await read(peer, SMALL) == [GIVEN]


async def greeted(node: Node) -> tuple[RawPeer, bytes]:
    """A connection after the greetings, and the acceptor's nonce."""
    raw_peer = await open_raw(node.port)
    await raw_peer.send(wire.greeting())
    return raw_peer, (await raw_peer.exactly(48))[16:]


@each_row(
    ("said", "named"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP"),
        (TLS_HELLO, "TLS"),
        (bytes(16), "no greeting"),
        (random.Random(1).randbytes(100_000), "no greeting"),
    ],
)
async def test_F7_another_protocol_gets_no_answer_and_one_log_line(
    said: bytes, named: str, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    raw_peer = await open_raw(node.port)
    with suppress(trio.BrokenResourceError):
        await raw_peer.send(said)
    assert await raw_peer.receive_all() == b""
    await check_served(node)
    [line] = lines(caplog.messages)
    assert named in line


@each_row(
    "said", [struct.pack("<II", 4097, 0), struct.pack("<II", 10, 1), struct.pack("<II", 0, 0),
             struct.pack("<II", 1 << 31, 1 << 31), struct.pack("<II", 4, 0) + b"\xc1\xc1\xc1\xc1",
             frame({"proof": b"p" * 32}, wire.HELLO_LIMITS), asked(1, SMALL)]
)  # fmt: skip
async def test_S1_F7_nothing_beyond_a_small_hello_is_read_or_answered_before_the_proof(
    said: bytes, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    raw_peer, _ = await greeted(node)
    await raw_peer.send(said)
    assert (await raw_peer.frame())["message"] == "no hello"
    assert await raw_peer.receive_all() == b""
    assert node.acceptor.stats()["requests"] == 0
    assert len(lines(caplog.messages)) == 1


async def test_S2_replayed_and_reflected_proofs_are_rejected(node: Node) -> None:
    """A hello is sent again; a connector sends the acceptor's own proof back."""

    def hello(nonce: bytes, own: bytes, *, is_reflected: bool = False) -> bytes:
        said = Hello(0, False, bytes(16), 1, me(0).identity, 3, own)
        proofs = Proofs(SECRET, nonce, NO_BINDING, me(0).task.digest, said)
        return wire.hello_frame(said, proofs.acceptor if is_reflected else proofs.connector)

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
    """It sends the connector's own proof back."""
    got = []

    async def echo(stream: trio.SocketStream) -> None:
        await stream.receive_some(16)
        await stream.send_all(wire.welcome(b"n" * 32))
        _, proof = wire.parse_hello(bytes(await stream.receive_some(4096))[8:])
        await stream.send_all(wire.proof_frame(proof))
        got.append(await stream.receive_some(4096))

    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio.serve_tcp, echo, 0, host="127.0.0.1"))
        async with asking(listener.socket.getsockname()[1]) as peer:
            await read(peer, SMALL)
            assert peer.stats()["state"] == "open"
        await soon(lambda: got)
        nursery.cancel_scope.cancel()
    assert got == [b""]


@each_row("said", [b"", wire.greeting()[:7], wire.greeting() + b"\1"])
async def test_F7_a_connector_without_a_hello_has_five_seconds(
    said: bytes, node: Node, jumping_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    raw_peer = await open_raw(node.port)
    await raw_peer.send(said)
    begun_s = trio.current_time()
    await raw_peer.receive_all()
    took_s = trio.current_time() - begun_s
    assert handshake.HELLO_S - 0.1 < took_s < handshake.HELLO_S + 1.5
    await check_served(node)
    assert len(lines(caplog.messages)) == 1


async def test_F7_slow_loris_one_byte_a_second_does_not_help(
    node: Node, jumping_clock: MockClock
) -> None:
    """Of a request, `test_data_plane.py` says the same."""
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
    """The oldest are closed: a real master's hello takes milliseconds. The log does not grow with
    them."""
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


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


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
                said = struct.pack("<IBBHII", 1, 1, 0, 0, 4096, 0)
                await raw_peer.send(said, bytes(20_000))
            await raw_peer.stream.aclose()

    for number in range(200):
        await annoy(number)
    before = resident_bytes()
    for number in range(2000):
        await annoy(number)
    assert resident_bytes() - before < 8 << 20
    assert node.acceptor.stats()["connections"] <= 1
    await check_served(node)
