"""The accepting end of connections between masters: which connectors are let in, what the control
plane answers, and when a connection ends. Its data plane has tests of its own
(`test_data_plane.py`)."""

import socket
from dataclasses import replace

import pytest
import trio

from diesel_fs.errors import ObjectStoreError
from diesel_fs.peers import wire
from diesel_fs.peers.acceptor import Acceptor
from diesel_fs.peers.chunk_table import ChunkTable
from diesel_fs.peers.handshake import LocalIdentity
from diesel_fs.peers.peer import Peer
from diesel_fs.peers.wire import FAILED, GIVEN, LOAD, NOT_MINE, THROUGH

from .connected_masters import (
    SECRET,
    SIZES,
    SMALL,
    FakeAnswers,
    Node,
    RawPeer,
    asked,
    asking,
    authenticated_raw,
    content,
    lines,
    me,
    open_raw,
    read,
)


async def test_requests_of_all_kinds_on_many_connections_of_a_client(node: Node) -> None:
    clients = [await authenticated_raw(node.port, is_client=True) for _ in range(5)]
    for raw_peer in clients:
        await raw_peer.send(asked(5, SMALL, (1, 0, 10)), wire.request(6, wire.PING))
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


async def test_F6_a_refused_connector_is_told_the_reason(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """The reasons are another task's secret, another dataset, another version and another rank.
    They are logged, without the secrets."""
    caplog.set_level("DEBUG")
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
    assert await state_of(node.port, replace(me(0), version=9)) == "open"
    assert len(lines(caplog.messages)) == 5
    assert "from=127.0.0.1:" in lines(caplog.messages)[0]
    for secret in (SECRET, b"x" * 32):
        assert secret.hex() not in caplog.text
        assert repr(secret)[2:-1] not in caplog.text


async def state_of(port: int, mine: LocalIdentity) -> object:
    async with asking(port, mine) as peer:
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
    """They alone may have other nodes asked."""
    ours, theirs = socket.socketpair()
    node.acceptor.adopt_local(theirs)
    ours.setblocking(False)
    async with trio.SocketStream(trio.socket.from_stdlib_socket(ours)) as stream:
        raw_peer = RawPeer(stream)
        await raw_peer.send(asked(1, SMALL))
        assert (await raw_peer.answer())[2] == content(*SMALL)
        node.answers.hold(hot=False)
        await raw_peer.send(asked(2, SMALL, flags=LOAD | THROUGH))
        assert (await raw_peer.answer())[0] == (2, wire.WORKING, 0, 0)
        assert (await raw_peer.answer())[2] == content(*SMALL)
        assert node.answers.asked == [(1, 1, True, True)]
        assert node.acceptor.stats()["local_connections"] == 1
        node.acceptor.set_identity(me(1))
        assert await raw_peer.receive_all() == b""


def test_a_socket_that_is_handed_over_too_late_is_closed() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        Acceptor(me(1), FakeAnswers()).adopt_local(theirs)
        assert ours.recv(1) == b""


async def test_a_request_for_a_version_that_is_no_more_is_answered_NOT_MINE(node: Node) -> None:
    """Its chunks have other numbers now. The source is not asked."""
    raw_peer = await authenticated_raw(node.port)
    node.answers.hold(hot=False)
    node.answers.table = ChunkTable(SIZES)
    await raw_peer.send(asked(1, SMALL, SMALL))
    head, statuses, _ = await raw_peer.answer()
    assert (head.id, statuses) == (1, bytes([NOT_MINE] * 2))
    assert not node.answers.asked
