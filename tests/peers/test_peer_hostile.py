"""F7, S1, S2, S12: connectors at a master's port that are no masters, or violate the protocol."""

import random
import struct
import time
from contextlib import suppress

import pytest
import trio

from diesel_fs.net.frames import NO_BINDING, frame
from diesel_fs.peers import handshake, wire
from diesel_fs.peers.wire import GIVEN, Hello, Proofs
from tests.rows import each_row

from ..waiting import soon
from .connected_masters import (
    SECRET,
    Node,
    answering,
    asking,
    authenticated_raw,
    jumping,
    lines,
    me,
    open_raw,
    parts,
    read,
    run,
)

SMALL = (0, 4096, 4096)
TLS_HELLO = bytes.fromhex("16030102000100") + bytes(200)


async def check_served(node: Node) -> None:
    """Check that a proper master is served."""
    async with asking(node.port) as peer:
        assert (await read(peer, SMALL))[0] == [GIVEN]


@each_row(
    ("said", "named"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP"),
        (TLS_HELLO, "TLS"),
        (bytes(16), "no greeting"),
        (random.Random(1).randbytes(100_000), "no greeting"),
    ],
)
def test_F7_another_protocol_gets_no_answer_and_one_log_line(
    said: bytes, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with answering() as node:
            raw_peer = await open_raw(node.port)
            with suppress(trio.BrokenResourceError):
                await raw_peer.send(said)
            assert await raw_peer.receive_all() == b""
            await check_served(node)

    run(main)
    assert len(lines(caplog.messages)) == 1
    assert named in lines(caplog.messages)[0]


@each_row(
    "head", [struct.pack("<II", 4097, 0), struct.pack("<II", 10, 1), struct.pack("<II", 0, 0),
             struct.pack("<II", 1 << 31, 1 << 31), struct.pack("<II", 4, 0) + b"\xc1\xc1\xc1\xc1",
             frame({"proof": b"p" * 32}, wire.HELLO_LIMITS)]
)  # fmt: skip
def test_S1_F7_nothing_beyond_a_small_hello_is_read(
    head: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with answering() as node:
            raw_peer = await open_raw(node.port)
            await raw_peer.send(wire.greeting())
            await raw_peer.exactly(48)
            await raw_peer.send(head)
            assert (await raw_peer.frame())["message"] == "no hello"
            assert await raw_peer.receive_all() == b""
            await check_served(node)

    run(main)
    assert len(lines(caplog.messages)) == 1


def test_S1_nothing_is_answered_before_the_proof() -> None:
    async def main() -> None:
        async with answering() as node:
            raw_peer = await open_raw(node.port)
            await raw_peer.send(wire.greeting())
            await raw_peer.exactly(48)
            await raw_peer.send(wire.request(1, wire.READ, 0, parts(SMALL)))
            assert (await raw_peer.frame())["message"] == "no hello"
            assert node.acceptor.stats()["requests"] == 0

    run(main)


def test_S2_a_replayed_hello_is_rejected() -> None:
    async def main() -> None:
        async with answering() as node:
            said = Hello(0, False, bytes(16), 1, me(0).identity, 3, b"n" * 32)
            for attempt in range(2):
                raw_peer = await open_raw(node.port)
                await raw_peer.send(wire.greeting())
                nonce = (await raw_peer.exactly(48))[16:]
                if not attempt:
                    proofs = Proofs(SECRET, nonce, NO_BINDING, me(0).task.digest, said)
                    recorded = wire.hello_frame(said, proofs.connector)
                await raw_peer.send(recorded)
                told = await raw_peer.frame()
                assert ("proof" in told) is not attempt
            assert told["message"] == "the wrong secret"

    run(main)


def test_S2_a_reflected_proof_is_rejected() -> None:
    """A connector sends the acceptor's own proof back; an acceptor sends the connector's."""

    async def main() -> None:
        async with answering() as node:
            raw_peer = await open_raw(node.port)
            await raw_peer.send(wire.greeting())
            nonce = (await raw_peer.exactly(48))[16:]
            said = Hello(0, False, bytes(16), 1, me(0).identity, 3, nonce)
            proofs = Proofs(SECRET, nonce, NO_BINDING, me(0).task.digest, said)
            await raw_peer.send(wire.hello_frame(said, proofs.acceptor))
            assert (await raw_peer.frame())["message"] == "the wrong secret"

    run(main)


def test_S1_an_acceptor_without_the_secret_gets_no_requests() -> None:
    async def main() -> None:
        got = []

        async def echo(stream: trio.SocketStream) -> None:
            await stream.receive_some(16)
            await stream.send_all(wire.welcome(b"n" * 32))
            _, proof = wire.parse_hello(bytes(await stream.receive_some(4096))[8:])
            await stream.send_all(wire.proof_frame(proof))
            got.append(await stream.receive_some(4096))

        async with trio.open_nursery() as nursery:
            listeners = await nursery.start(trio.serve_tcp, echo, 0)
            async with asking(listeners[0].socket.getsockname()[1]) as peer:
                await read(peer, SMALL)
                assert peer.stats()["state"] == "open"
            await trio.sleep(0.05)
            nursery.cancel_scope.cancel()
        assert got == [b""]

    run(main)


@each_row("said", [b"", wire.greeting()[:7], wire.greeting() + b"\1"])
def test_F7_a_connector_without_a_hello_has_five_seconds(
    said: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with answering() as node:
            raw_peer = await open_raw(node.port)
            await raw_peer.send(said)
            begun_s = trio.current_time()
            await raw_peer.receive_all()
            took_s = trio.current_time() - begun_s
            assert handshake.HELLO_S - 0.1 < took_s < handshake.HELLO_S + 1.5
            await check_served(node)

    run(main, jumping())
    assert len(lines(caplog.messages)) == 1


def test_F7_slow_loris_one_byte_a_second_does_not_help() -> None:
    """Of a request, `test_data_plane.py` says the same."""

    async def main() -> None:
        async with answering() as node:
            raw_peer = await open_raw(node.port)
            begun_s = trio.current_time()
            with suppress(trio.BrokenResourceError):
                for byte in wire.greeting() * 4:
                    await raw_peer.send(bytes([byte]))
                    await trio.sleep(1)
            assert trio.current_time() - begun_s < 9

    run(main, jumping())


BAD_REQUESTS = {
    "garbage": random.Random(2).randbytes(4000),
    "4 GB of records": struct.pack("<IBBHII", 1, 1, 0, 0, 0xFFFFFFFF, 0),
    "no chunk": wire.request(1, wire.READ, 0, parts((99, 0, 1))),
    "behind its chunk": wire.request(1, wire.READ, 0, parts((1, 299_999, 2))),
    "around": wire.request(1, wire.READ, 0, parts((1, 0xFFFFFFFF, 2))),
    "too many bytes": wire.request(1, wire.READ, 0, parts((3, 0, 30 << 20), (3, 0, 3 << 20))),
    "nothing": struct.pack("<IBBHII", 1, 1, 0, 0, 0, 0),
    "no kind": struct.pack("<IBBHII", 1, 9, 0, 0, 0, 0),
    "a hello": wire.greeting(),
}


@each_row("bad", BAD_REQUESTS)
def test_F7_a_bad_request_ends_its_connection_with_one_line(
    bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with answering() as node:
            raw_peer = await authenticated_raw(node.port, 4)
            await raw_peer.send(BAD_REQUESTS[bad])
            assert await raw_peer.receive_all() == b""
            await check_served(node)

    run(main)
    assert len(lines(caplog.messages)) == 1
    assert "node 4" in lines(caplog.messages)[0]


def test_S12_connections_without_a_hello_are_limited_and_do_not_block_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The oldest are closed: a real master's hello takes milliseconds. The log does not grow with
    them."""

    async def main() -> None:
        async with answering(pending_handshakes_max=40, pending_handshakes_per_address=10) as node:
            held = [await open_raw(node.port) for _ in range(300)]
            before = time.perf_counter()
            await check_served(node)
            assert time.perf_counter() - before < 2
            assert node.acceptor.stats()["pending_handshakes"] <= 10
            assert node.acceptor.stats()["rejected"] >= 290
            for raw_peer in held:
                await raw_peer.stream.aclose()

    run(main)
    assert len(lines(caplog.messages)) < 30


def test_S12_connections_are_limited() -> None:
    async def main() -> None:
        async with answering(connections_max=3) as node:
            held = [await authenticated_raw(node.port, rank) for rank in range(2, 5)]
            await soon(lambda: node.acceptor.stats()["connections"] == len(held))
            raw_peer = await open_raw(node.port)
            await raw_peer.send(wire.greeting())
            goes_on, _, length = wire.parse_welcome(await raw_peer.exactly(16))
            assert not goes_on
            assert await raw_peer.exactly(length) == b"too many connections"

    run(main)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_F7_S12_memory_stays_flat_under_garbage() -> None:
    async def main() -> None:
        chance = random.Random(3)
        async with answering() as node:

            async def annoy(number: int) -> None:
                with suppress(trio.BrokenResourceError, EOFError):
                    if number % 2:
                        raw_peer = await open_raw(node.port)
                        await raw_peer.send(chance.choice([b"", wire.greeting()]))
                        await raw_peer.send(chance.randbytes(chance.choice([10, 5000, 100_000])))
                    else:
                        raw_peer = await authenticated_raw(node.port, 2)
                        await raw_peer.send(
                            struct.pack("<IBBHII", 1, 1, 0, 0, 4096, 0), bytes(20_000)
                        )
                    await raw_peer.stream.aclose()

            async def all_of_it(times: int) -> None:
                for number in range(times):
                    await annoy(number)

            await all_of_it(200)
            before = resident_bytes()
            await all_of_it(2000)
            assert resident_bytes() - before < 8 << 20
            assert node.acceptor.stats()["connections"] <= 1
            await check_served(node)

    run(main)
