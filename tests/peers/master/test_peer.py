"""Requests to another master: answers, pauses, and attacks that this master survives."""

import random
import socket
import time
from contextlib import suppress
from functools import partial

import pytest
import trio
from trio.testing import MockClock

from diesel_fs.peers import wire
from diesel_fs.peers.master.acceptor import Acceptor
from diesel_fs.peers.master.peer import Peer
from diesel_fs.peers.wire import ABSENT, BUSY, FAILED, GIVEN
from tests.rows import each_row

from ...waiting import soon
from ..connected_masters import (
    SECRET,
    SMALL,
    FakeAnswers,
    Node,
    RawPeer,
    connected_peer,
    content,
    gather,
    listening,
    me,
    member,
    parts,
    read,
    scripted_master,
    wait_for,
)


async def gives(peer: Peer, *, load: bool = False) -> bool:
    return await read(peer, SMALL, load=load) == [GIVEN]


async def test_parts_in_memory_come_at_once(peer: Peer, node: Node) -> None:
    many = [(2, i * 5000, 4096 + i) for i in range(128)]
    nothing, large, larger = (0, 5, 0), (1, 0, 300_000), (2, 0, 6 << 20)
    for records in ([SMALL], many, [nothing], [large], [larger], [nothing, SMALL, nothing]):
        assert await read(peer, *records) == [GIVEN] * len(records)
    assert node.acceptor.stats()["inline"] == 6
    assert peer.stats()["connections"] == 1
    assert await peer.ping()


@each_row("pattern", [[1], [0, 1], [1, 0], [1, 0, 0, 1, 1], [0] * 5, [1, 0] * 700])
async def test_parts_are_at_their_offsets(
    pattern: list[int], answers: FakeAnswers, peer: Peer
) -> None:
    answers.hold(absent={1})
    records = [(0 if each else 1, i * 7, 100 + i % 11) for i, each in enumerate(pattern)]
    wanted = [GIVEN if each else ABSENT for each in pattern]
    assert await read(peer, *records, load=True) == wanted
    if 0 in pattern:
        assert answers.requested[-1] == (0, len(pattern), True, False)


async def test_reads_beyond_the_limits_are_split(peer: Peer, node: Node) -> None:
    for records, requests in (
        ([(2, 0, 5 << 20)] * 9, 2),
        ([(0, i, 3) for i in range(9000)], 3),
        ([SMALL, (3, 0, 40 << 20), SMALL], 3),
    ):
        before = node.acceptor.stats()["requests"]
        assert await read(peer, *records) == [GIVEN] * len(records)
        assert node.acceptor.stats()["requests"] - before == requests


async def test_many_reads_get_their_own_parts(answers: FakeAnswers, node: Node, peer: Peer) -> None:
    chance = random.Random(1)

    async def some_time() -> None:
        answers.hold(hot=chance.random() < 0.5)
        await trio.sleep(chance.random() * 0.01)

    async def work() -> None:
        for _ in range(30):
            answers.hold(hot=chance.random() < 0.5)
            big = chance.random() < 0.1
            records = [
                (2, chance.randrange(1 << 20), chance.randrange(1 << (22 if big else 14)))
                for _ in range(1 if big else chance.randrange(1, 20))
            ]
            assert await read(peer, *records) == [GIVEN] * len(records)

    answers.ready = some_time
    await gather(*[work] * 20)
    assert node.acceptor.stats()["requests"] == 600
    assert peer.stats()["in_flight"] == 0


async def check_given(peer: Peer) -> None:
    assert await gives(peer)


async def test_at_most_64_requests_are_in_flight(answers: FakeAnswers, peer: Peer) -> None:
    answers.hold(hot=False)
    await read(peer, SMALL)
    answers.ready = wait_for(0.1)
    await gather(*[partial(check_given, peer)] * 150)
    assert answers.slow_most == wire.REQUESTS_MAX


async def test_small_reads_go_on_beside_large_ones(peer: Peer) -> None:
    took: list[float] = []
    done = False

    async def large() -> None:
        room = memoryview(bytearray(40 << 20))
        while not done:
            assert (await peer.read(parts((3, 0, 40 << 20)), room, load=False))[0] == GIVEN

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(large)
        for _ in range(30):
            before = time.perf_counter()
            assert await gives(peer)
            took.append(time.perf_counter() - before)
        done = True
    assert sorted(took)[len(took) // 2] < 0.5
    assert peer.stats()["timed_out"] == 0


async def test_nothing_is_written_into_the_buffer_of_an_abandoned_read() -> None:
    """The remainder of an answer was just arriving."""
    go_on = trio.Event()
    whole = content(2, 0, 4 << 20)

    async def behave(raw_peer: RawPeer) -> None:
        head = await raw_peer.request()
        await raw_peer.send(wire.answer_head(head.id, wire.READ, b"\0", 4 << 20), whole[: 1 << 20])
        await go_on.wait()
        await raw_peer.send(whole[1 << 20 :])
        await raw_peer.give(await raw_peer.request())
        await raw_peer.receive_all()

    async with scripted_master(behave) as port, connected_peer(port) as peer:
        room = memoryview(bytearray(4 << 20))
        with trio.move_on_after(0.5):
            await peer.read(parts((2, 0, 4 << 20)), room, load=False)
        assert room[: 64 << 10] == whole[: 64 << 10], "it had begun to come"
        room[:] = bytes(4 << 20)
        go_on.set()
        assert await gives(peer)
        assert not any(room)
        assert peer.stats()["connections"] == 1


async def test_a_late_answer_is_dropped_and_the_next_ones_are_right() -> None:
    async def behave(raw_peer: RawPeer) -> None:
        first = await raw_peer.request()
        await trio.sleep(1.2)
        await raw_peer.give(await raw_peer.request(), (0, 0, 100))
        await raw_peer.give(first)
        await raw_peer.give(await raw_peer.request())
        await raw_peer.receive_all()

    async with scripted_master(behave) as port, connected_peer(port) as peer:
        begun_s = trio.current_time()
        assert await read(peer, SMALL) == [FAILED]
        assert 0.95 < trio.current_time() - begun_s < 1.15
        assert await read(peer, (0, 0, 100)) == [GIVEN]
        assert await gives(peer)
        assert peer.stats()["timed_out"] == 1


async def test_WORKING_extends_the_deadline_once() -> None:
    async def behave(raw_peer: RawPeer) -> None:
        for pause_s in (2.0, 10.0):
            head = await raw_peer.request()
            await raw_peer.send(wire.answer_head(head.id, wire.WORKING, b"", 0))
            await trio.sleep(pause_s)
            await raw_peer.give(head)
        await raw_peer.receive_all()

    async with scripted_master(behave) as port, connected_peer(port) as peer:
        usual_ms = peer.stats()["timeout_ms"]
        assert await gives(peer, load=True)
        assert peer.stats()["timeout_ms"] == usual_ms, "a store's time is not the peer's"
        begun_s = trio.current_time()
        assert await read(peer, SMALL, load=True) == [FAILED]
        assert 2.4 < trio.current_time() - begun_s < 4


async def test_F2_a_peer_that_stops_after_WORKING_is_soon_paused(jumping_clock: MockClock) -> None:
    async def behave(raw_peer: RawPeer) -> None:
        for _ in range(8):
            head = await raw_peer.request()
            await raw_peer.send(wire.answer_head(head.id, wire.WORKING, b"", 0))
        await raw_peer.receive_all()

    async with scripted_master(behave) as port, connected_peer(port) as peer:

        async def one() -> None:
            assert await read(peer, SMALL, load=True) == [FAILED]

        await gather(*[one] * 8)
        assert peer.stats()["state"] == "closed"
        begun_s = trio.current_time()
        for _ in range(3):
            await one()
        assert peer.stats()["state"] == "open"
        assert trio.current_time() - begun_s < 3.5


LIES = {
    "another request": lambda head: wire.answer_head(head.id + 1, 1, b"\0", 4096) + bytes(4096),
    "another kind": lambda head: wire.answer_head(head.id, 2, b"", 1) + b"\0",
    "another count": lambda head: wire.answer_head(head.id, 1, b"\0\0", 4096) + bytes(4096),
    "short": lambda head: wire.answer_head(head.id, 1, b"\0", 4095) + bytes(4095),
    "long": lambda head: wire.answer_head(head.id, 1, b"\0", 4097) + bytes(4097),
    "4 GB": lambda head: wire.answer_head(head.id, 1, b"\0", 0xFFFFFFFF) + bytes(100_000),
    "given without bytes": lambda head: wire.answer_head(head.id, 1, b"\0", 0),
    "bytes without given": lambda head: wire.answer_head(head.id, 1, b"\1", 4096) + bytes(4096),
    "no status": lambda head: wire.answer_head(head.id, 1, b"\5", 0),
    "garbage": lambda head: random.Random(1).randbytes(5000),
    "twice": lambda head: 2 * (wire.answer_head(head.id, 1, b"\1", 0)),
}


@each_row("lie", LIES)
async def test_F5_F7_a_garbled_answer_ends_the_connection_and_pauses_the_peer(
    lie: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def behave(raw_peer: RawPeer) -> None:
        await raw_peer.send(LIES[lie](await raw_peer.request()))
        await raw_peer.receive_all()

    async with scripted_master(behave) as port, connected_peer(port) as peer:
        with trio.fail_after(5):
            assert await read(peer, SMALL) == [ABSENT if lie == "twice" else FAILED]
        await soon(lambda: not peer.stats()["connected"], 5)
        assert await read(peer, SMALL) == [BUSY]
        assert peer.stats()["state"] == "open"
    assert len([line for line in caplog.messages if "violates the protocol" in line]) == 1


async def test_F5_a_peer_is_quarantined_after_three_damaged_parts(peer: Peer) -> None:
    """The reader finds the damage by its own checksums."""
    for expected in (GIVEN, GIVEN, GIVEN, BUSY):
        assert await read(peer, SMALL) == [expected]
        peer.record_damage()
    assert peer.stats()["state"] == "quarantined"


async def test_an_unreachable_peer_costs_one_attempt_and_recovers() -> None:
    with listening() as closed:
        port = closed.getsockname()[1]
    async with connected_peer(port) as peer:
        assert not await peer.ping()
        assert await read(peer, SMALL) == [BUSY]
        assert peer.stats()["state"] == "open"
        begun_s = trio.current_time()
        for _ in range(1000):
            assert await read(peer, SMALL) == [BUSY]
        assert trio.current_time() - begun_s < 0.5
        with socket.create_server(("127.0.0.1", port)) as listener:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(Acceptor(me(1), FakeAnswers()).serve, [listener])
                await soon(partial(gives, peer), 10)
                nursery.cancel_scope.cancel()


async def test_a_closed_connection_is_replaced(peer: Peer, node: Node) -> None:
    assert await gives(peer)
    node.acceptor.set_identity(me(1))
    await soon(lambda: not peer.stats()["connected"], 5)
    assert await gives(peer)
    assert (peer.stats()["connections"], peer.stats()["failed"]) == (2, 0)


async def test_a_peer_with_a_slow_store_has_not_failed(
    jumping_clock: MockClock, answers: FakeAnswers, peer: Peer
) -> None:
    answers.hold(absent={1})  # never ready
    await read(peer, SMALL)
    answers.ready = wait_for(30)
    for _ in range(6):
        assert await read(peer, (1, 0, 10), load=True) == [FAILED]
    assert await gives(peer, load=True)
    assert peer.stats()["timed_out"] == 6
    assert peer.stats()["state"] == "closed"


async def test_a_closed_peer_sends_no_requests(node: Node) -> None:
    async with connected_peer(node.port) as peer:
        await read(peer, SMALL)
    assert await read(peer, SMALL) == [BUSY]
    found: list[list[int]] = []

    async def ask() -> None:
        found.append(await read(peer, SMALL))

    async with scripted_master(RawPeer.receive_all) as port:
        async with trio.open_nursery() as nursery, connected_peer(port) as peer:
            nursery.start_soon(ask)
            await trio.sleep(0.1)
        assert found == [[FAILED]]


async def test_F3_a_read_over_a_slow_link_waits_no_longer_than_its_bytes_need(node: Node) -> None:
    """1 Mbit/s, and 200 ms there and back: after three reads the peer is paused."""

    async def slow(source: trio.SocketStream, target: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while some := await source.receive_some(1250):
                await trio.sleep(0.1 if len(some) < 100 else 0.01)
                await target.send_all(some)

    async def one(stream: trio.SocketStream) -> None:
        onwards = await trio.open_tcp_stream("127.0.0.1", node.port)
        async with onwards, stream, trio.open_nursery() as nursery:
            nursery.start_soon(slow, stream, onwards)
            nursery.start_soon(slow, onwards, stream)

    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio.serve_tcp, one, 0, host="127.0.0.1"))
        async with connected_peer(listener.socket.getsockname()[1]) as peer:
            took = []
            for _ in range(20):
                before = time.perf_counter()
                await read(peer, (2, 0, 1 << 20))
                took.append(time.perf_counter() - before)
            assert max(took) < 1 + 1 / 8 + 0.3
            assert sum(took) < 5
            assert peer.stats()["state"] == "open"
        nursery.cancel_scope.cancel()


async def test_reads_of_a_lost_peer_leave_nothing(
    answers: FakeAnswers, node: Node, peer: Peer
) -> None:
    answers.hold(hot=False)
    answers.ready = wait_for(5)
    await read(peer, SMALL)

    async def cancelled() -> None:
        with trio.move_on_after(0.001):
            await read(peer, SMALL)

    for _ in range(20):
        await gather(*[cancelled] * 30)
    assert peer.stats()["in_flight"] == wire.REQUESTS_MAX
    assert await read(peer, SMALL) == [BUSY], "no room is left while it may wait"
    node.acceptor.set_identity(me(1))
    await soon(lambda: peer.stats()["in_flight"] == 0, 5)
    answers.hold()
    assert await gives(peer)


async def test_S8_a_peer_shows_no_secret() -> None:
    peer = Peer(me(0), member(9))
    shown = f"{me(0)!r} {peer!r} {peer} {peer.stats()}"
    assert repr(SECRET)[2:10] not in shown
    assert SECRET.hex()[:8] not in shown
