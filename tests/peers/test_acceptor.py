"""The accepting end of connections between masters: which connectors are let in, the order of
answers, and when a connection ends."""

import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio

from diesel_fs.errors import ObjectStoreError
from diesel_fs.peers import wire
from diesel_fs.peers.acceptor import Acceptor
from diesel_fs.peers.chunk_table import ChunkTable
from diesel_fs.peers.handshake import LocalIdentity
from diesel_fs.peers.wire import FAILED, GIVEN, NOT_MINE

from ..waiting import soon
from .connected_masters import (
    SECRET,
    SIZES,
    FakeAnswers,
    Node,
    RawPeer,
    answering,
    asking,
    authenticated_raw,
    content,
    lines,
    me,
    open_raw,
    pair,
    parts,
    read,
    run,
    wait_for,
)

SMALL = (0, 4096, 4096)


def asked(number: int, *records: tuple[int, int, int]) -> bytes:
    return wire.request(number, wire.READ, 0, parts(*records))


async def answer(raw_peer: RawPeer) -> tuple[wire.AnswerHead, bytes, bytes]:
    head = wire.parse_answer(await raw_peer.exactly(wire.HEAD_BYTES))
    return head, await raw_peer.exactly(head.counted), await raw_peer.exactly(head.payload_bytes)


def test_requests_of_all_kinds() -> None:
    async def main() -> None:
        async with answering() as node:
            raw_peer = await authenticated_raw(node.port)
            await raw_peer.send(asked(5, SMALL, (1, 0, 10)), wire.request(6, wire.PING))
            head, statuses, payload = await answer(raw_peer)
            assert (head.id, statuses) == (5, bytes(2))
            assert payload == content(*SMALL) + content(1, 0, 10)
            assert (await answer(raw_peer))[0] == (6, wire.PING, 0, 0)

    run(main)


def test_answers_from_memory_overtake_answers_that_must_wait() -> None:
    async def main() -> None:
        fake_answers = FakeAnswers()
        fake_answers.hot = False
        fake_answers.ready = wait_for(0.3)
        async with answering(fake_answers=fake_answers) as node:
            raw_peer = await authenticated_raw(node.port)
            await raw_peer.send(asked(1, SMALL))
            await soon(lambda: bool(fake_answers.asked), 5)
            fake_answers.hot = True
            await raw_peer.send(asked(2, SMALL))
            assert [(await answer(raw_peer))[0].id for _ in range(2)] == [2, 1]

    run(main)


@pytest.mark.parametrize("error", [ObjectStoreError("away"), RuntimeError("a bug")])
def test_an_answer_that_fails_is_a_status_and_the_connection_goes_on(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        fake_answers = FakeAnswers()
        fake_answers.hot = False

        async def fail() -> None:
            raise error

        fake_answers.ready = fail
        async with pair(fake_answers) as (peer, _):
            assert (await read(peer, SMALL, SMALL, load=True))[0] == [FAILED, FAILED]
            fake_answers.hot = True
            assert (await read(peer, SMALL))[0] == [GIVEN]
            assert peer.stats()["connections"] == 1

    run(main)
    assert [isinstance(error, RuntimeError)] == [
        "unexpected error in a request of node" in caplog.text
    ]


@asynccontextmanager
async def unanswered(
    count: int, record: tuple[int, int, int], in_flight: int
) -> AsyncIterator[tuple[Node, RawPeer]]:
    """A connection that has sent `count` requests, which are never answered; so many of them are in
    flight."""
    fake_answers = FakeAnswers()
    fake_answers.hot = False
    fake_answers.ready = trio.sleep_forever
    async with answering(fake_answers=fake_answers) as node:
        raw_peer = await authenticated_raw(node.port, rank=5)
        await raw_peer.send(*[asked(i, record) for i in range(count)])
        await soon(lambda: fake_answers.slow == in_flight, 5)
        yield node, raw_peer


@pytest.mark.parametrize(
    ("count", "record", "in_flight"),
    [(200, SMALL, wire.REQUESTS_MAX), (5, (3, 0, 30 << 20), 3)],
    ids=["64 requests", "64 MiB"],
)
def test_a_connection_has_at_most_so_much_in_flight(
    count: int, record: tuple[int, int, int], in_flight: int
) -> None:
    """Further requests are not even read; other connections are answered."""

    async def main() -> None:
        async with unanswered(count, record, in_flight) as (node, _):
            await trio.sleep(0.1)
            assert node.answers.slow == in_flight
            node.answers.hot = True
            async with asking(node.port) as peer:
                assert (await read(peer, SMALL))[0] == [GIVEN]

    run(main)


def test_F15_requests_of_a_closed_connection_leave_nothing_behind() -> None:
    async def main() -> None:
        async with unanswered(10, SMALL, 10) as (node, raw_peer):
            answered = trio.Event()
            node.answers.ready = answered.wait
            late = await authenticated_raw(node.port, 6)
            await late.send(asked(1, SMALL))
            await soon(lambda: node.answers.slow == 11, 5)
            for each in (raw_peer, late):
                await each.stream.aclose()
            await soon(lambda: node.acceptor.stats()["connections"] == 0, 5)
            answered.set()
            await soon(lambda: node.answers.slow == 10, 5)
            assert node.acceptor.stats()["in_flight"] == 0
            node.answers.hot = True
            async with asking(node.port) as peer:
                assert (await read(peer, SMALL))[0] == [GIVEN]

    run(main)


def test_S12_a_connection_with_endless_requests_does_not_block_others() -> None:
    async def main() -> None:
        async with answering() as node, trio.open_nursery() as nursery:
            took = []

            async def greedy(rank: int) -> None:
                raw_peer = await authenticated_raw(node.port, rank)

                async def ask() -> None:
                    some = b"".join(asked(i, *[SMALL] * 4) for i in range(1000))
                    while True:
                        await raw_peer.send(some)

                async def drop() -> None:
                    while True:
                        await raw_peer.stream.receive_some(1 << 20)

                nursery.start_soon(ask)
                nursery.start_soon(drop)

            for rank in (2, 3):
                await greedy(rank)
            async with asking(node.port) as peer:
                for _ in range(50):
                    before = time.perf_counter()
                    assert (await read(peer, SMALL))[0] == [GIVEN]
                    took.append(time.perf_counter() - before)
            assert sorted(took)[45] < 0.3
            nursery.cancel_scope.cancel()

    run(main)


def test_F8_the_newest_connection_of_a_rank_stays() -> None:
    async def main() -> None:
        async with answering() as node:
            first = await authenticated_raw(node.port)
            second = await authenticated_raw(node.port)
            assert await first.receive_all() == b""
            await second.send(wire.request(1, wire.PING))
            await answer(second)
            assert node.acceptor.stats()["connections"] == 1

    run(main)


def test_F6_a_refused_connector_is_told_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    """The reasons are another task's secret, another dataset, another version and another rank.
    They are logged."""

    async def main() -> None:
        async with answering() as node:
            strangers = [
                ({"secret": b"x" * 32}, me(0), "the wrong secret"),
                ({}, replace(me(0), task=replace(me(0).task, name="other")), "the wrong secret"),
                ({}, replace(me(0), version=4), "version 3 of the dataset is here, not 4"),
                ({"to": 2}, me(0), "rank 1 is here, not 2"),
            ]
            for how, mine, why in strangers:
                raw_peer = await open_raw(node.port)
                told = await raw_peer.handshake(mine, **how)  # type: ignore[arg-type]  # one of two
                assert told["message"] == why
                assert await raw_peer.receive_all() == b""
            assert (await asked_by(node.port, replace(me(0), version=9))) == "open"

    run(main)
    assert len(lines(caplog.messages)) == 5
    assert "from=127.0.0.1:" in lines(caplog.messages)[0]


async def asked_by(port: int, mine: LocalIdentity) -> object:
    async with asking(port, mine) as peer:
        await read(peer, SMALL)
        return peer.stats()["state"]


def test_F6_another_version_of_the_wire_is_named() -> None:
    async def main() -> None:
        async with answering() as node:
            raw_peer = await open_raw(node.port)
            await raw_peer.send(wire.greeting()[:8] + b"\1\0" + bytes(6))
            goes_on, _, length = wire.parse_welcome(await raw_peer.exactly(16))
            assert not goes_on
            assert b"version 3" in await raw_peer.exactly(length)

    run(main)


def test_switching_the_version_ends_all_connections() -> None:
    async def main() -> None:
        async with answering() as node:
            raw_peer = await authenticated_raw(node.port)
            node.acceptor.set_identity(replace(me(1), version=4))
            assert await raw_peer.receive_all() == b""
            other = await open_raw(node.port)
            assert "proof" in await other.handshake(replace(me(0), version=4))

    run(main)


def test_answers_to_many_at_once_come_over_a_full_socket() -> None:
    """All answers are complete, though the asker reads slowly and sends more requests meanwhile."""

    async def main() -> None:
        async with answering() as node:
            raw_peer = await authenticated_raw(node.port)
            records = [(2, i * 70_000, 60_000) for i in range(80)]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(raw_peer.send, *[asked(i, *records[:40]) for i in range(12)])
                for number in range(12):
                    head, _, payload = await answer(raw_peer)
                    assert head.id == number
                    assert payload == b"".join(content(*part) for part in records[:40])

    run(main)


def test_clients_of_this_node_are_served_on_a_socket_that_is_handed_over() -> None:
    """They alone may have other nodes asked."""

    async def main() -> None:
        async with answering() as node:
            ours, theirs = socket.socketpair()
            node.acceptor.adopt_local(theirs)
            ours.setblocking(False)
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
            raw_peer = RawPeer(stream)
            await raw_peer.send(asked(1, SMALL))
            assert (await answer(raw_peer))[2] == content(*SMALL)
            node.answers.hot = False
            flags = wire.LOAD | wire.THROUGH
            await raw_peer.send(wire.request(2, wire.READ, flags, parts(SMALL)))
            assert (await answer(raw_peer))[0] == (2, wire.WORKING, 0, 0)
            assert (await answer(raw_peer))[2] == content(*SMALL)
            assert node.answers.asked == [(1, 1, True, True)]
            assert node.acceptor.stats()["local_connections"] == 1
        assert await raw_peer.receive_all() == b""
        await stream.aclose()

    run(main)


def test_a_socket_that_is_handed_over_too_late_is_closed() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        Acceptor(me(1), FakeAnswers()).adopt_local(theirs)
        assert ours.recv(1) == b""


def test_a_request_for_a_version_that_is_no_more_is_answered_NOT_MINE() -> None:
    """Its chunks have other numbers now. The source is not asked."""

    async def main() -> None:
        async with answering() as node:
            raw_peer = await authenticated_raw(node.port)
            node.answers.hot = False
            node.answers.table = ChunkTable(SIZES)
            await raw_peer.send(asked(1, SMALL, SMALL))
            head, statuses, _ = await answer(raw_peer)
            assert (head.id, statuses) == (1, bytes([NOT_MINE] * 2))
            assert not node.answers.asked

    run(main)


def test_a_client_of_another_node_has_many_connections() -> None:
    async def main() -> None:
        async with answering() as node:
            clients = [await authenticated_raw(node.port, is_client=True) for _ in range(5)]
            for each in clients:
                await each.send(asked(1, SMALL))
                assert (await answer(each))[2] == content(*SMALL)
            assert node.acceptor.stats()["connections"] == 5
            assert node.acceptor.stats()["accepted"] == 5

    run(main)


def test_the_secret_is_in_no_log_and_no_repr(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with answering() as node:
            await (await open_raw(node.port)).handshake(me(0), secret=b"x" * 32)

    caplog.set_level("DEBUG")
    run(main)
    for secret in (SECRET, b"x" * 32):
        assert secret.hex() not in caplog.text
        assert repr(secret)[2:-1] not in caplog.text
    assert len(SIZES) == 4
