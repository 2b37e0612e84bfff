"""Masters that talk over real sockets, with made-up chunks and no dataset."""

import functools
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from uuid import UUID

import numpy as np
import trio
from trio.testing import MockClock

from diesel_fs.net.channel import Channel
from diesel_fs.net.frames import GREETING_BYTES, NO_BINDING, NONCE_BYTES, parse_head
from diesel_fs.net.tls import Certificate
from diesel_fs.peers import wire
from diesel_fs.peers.acceptor import Acceptor
from diesel_fs.peers.chunk_table import ChunkTable
from diesel_fs.peers.handshake import LocalIdentity
from diesel_fs.peers.membership import Member, TaskName
from diesel_fs.peers.peer import Peer
from diesel_fs.peers.wire import ABSENT, GIVEN, Hello, Parts, Proofs

SECRET = bytes(range(32))
SIZES = np.array([1 << 20, 300_000, 6 << 20, 40 << 20], np.uint64)
TASK = TaskName(UUID(int=7), "me", "task")


def run(main: Callable[[], Awaitable[None]], clock: MockClock | None = None) -> None:
    """Run a test with a time limit: a minute, or half an hour of a simulated clock."""

    async def within() -> None:
        with trio.fail_after(60 if clock is None else 2000):
            await main()

    trio.run(within, clock=clock)


def jumping() -> MockClock:
    """A simulated clock that jumps when no task has run for a while; the sockets and the data
    plane's thread are real, and need far less than this while."""
    return MockClock(autojump_threshold=0.1)


def me(rank: int, certificate: Certificate | None = None) -> LocalIdentity:
    return LocalIdentity(rank, bytes([rank]) * 16, TASK, 3, SECRET, SIZES, certificate)


def content(chunk: int, start: int, size: int) -> bytes:
    """Bytes of a chunk."""
    at = np.arange(start // 8, (start + size) // 8 + 1, dtype=np.uint64) * 0x9E3779B97F4A7C15
    return (at + np.uint64(chunk)).tobytes()[start % 8 :][:size]


def parts(*records: tuple[int, int, int]) -> Parts:
    """Parts from (chunk, start, bytes)."""
    return np.array(records, "<u4").reshape(-1, 3)


@functools.cache
def whole(chunk: int) -> memoryview:
    """All bytes of a chunk."""
    return memoryview(content(chunk, 0, int(SIZES[chunk])))


class FakeAnswers:
    """The answers of an acceptor: from memory where `hot`, else when `ready` returns; `absent`
    chunks are never given."""

    def __init__(self) -> None:
        self.table = ChunkTable(SIZES)
        self.ready: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
        self.asked: list[tuple[int, int, bool, bool]] = []
        self.plans: list[tuple[int, bytes]] = []
        self.plan_status = GIVEN
        self.slow = self.slow_most = 0
        self._hot = True
        self._absent: set[int] = set()
        self._fill_table()

    @property
    def hot(self) -> bool:
        """Whether chunks are in memory."""
        return self._hot

    @hot.setter
    def hot(self, hot: bool) -> None:
        self._hot = hot
        self._fill_table()

    @property
    def absent(self) -> set[int]:
        """The chunks that are never given; to be set, not changed."""
        return self._absent

    @absent.setter
    def absent(self, absent: set[int]) -> None:
        self._absent = absent
        self._fill_table()

    def _fill_table(self) -> None:
        for chunk in range(len(SIZES)):
            if self._hot and chunk not in self._absent:
                self.table.views[chunk] = whole(chunk)
            else:
                self.table.views.pop(chunk, None)

    def take_plan(self, rank: int, body: bytes) -> int:
        self.plans.append((rank, body))
        return self.plan_status

    async def answer(
        self, rank: int, parts: Parts, *, load: bool, through: bool
    ) -> tuple[bytes, list[memoryview]]:
        self.asked.append((rank, len(parts), load, through))
        self.slow += 1
        self.slow_most = max(self.slow, self.slow_most)
        try:
            await self.ready()
        finally:
            self.slow -= 1
        given = [int(chunk) not in self.absent for chunk in parts[:, 0]]
        statuses = bytes(GIVEN if each else ABSENT for each in given)
        views = [
            whole(chunk)[start : start + size]
            for (chunk, start, size), each in zip(parts.tolist(), given, strict=True)
            if each
        ]
        return statuses, views


def listening() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def member(port: int, certificate: bytes = b"") -> Member:
    return Member(1, bytes([1]) * 16, f"127.0.0.1:{port}", 3, certificate)


class Node:
    """A running acceptor of rank 1."""

    def __init__(self, acceptor: Acceptor, fake_answers: FakeAnswers, port: int) -> None:
        self.acceptor = acceptor
        self.answers = fake_answers
        self.port = port


@asynccontextmanager
async def answering(
    mine: LocalIdentity | None = None,
    fake_answers: FakeAnswers | None = None,
    *,
    make_channel: Callable[[socket.socket, LocalIdentity], Channel] | None = None,
    **limits: int,
) -> AsyncIterator[Node]:
    mine = mine or me(1)
    fake_answers = fake_answers or FakeAnswers()
    acceptor = Acceptor(mine, fake_answers, make_channel=make_channel, **limits)
    with listening() as listener:
        async with trio.open_nursery() as nursery:
            await nursery.start(acceptor.serve, [listener])
            try:
                yield Node(acceptor, fake_answers, listener.getsockname()[1])
            finally:
                while _OPEN:
                    await trio.aclose_forcefully(_OPEN.pop().stream)
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def asking(
    port: int, mine: LocalIdentity | None = None, certificate: bytes = b""
) -> AsyncIterator[Peer]:
    peer = Peer(mine or me(0), member(port, certificate))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer.run)
        yield peer
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def pair(fake_answers: FakeAnswers | None = None) -> AsyncIterator[tuple[Peer, Node]]:
    async with answering(fake_answers=fake_answers) as node, asking(node.port) as peer:
        yield peer, node


async def read(
    peer: Peer, *records: tuple[int, int, int], load: bool = False
) -> tuple[list[int], list[bytes]]:
    """Read parts; returns the statuses, and checks and returns the bytes that are given."""
    room = memoryview(bytearray(sum(size for _, _, size in records)))
    statuses = await peer.read(parts(*records), room, load=load)
    found, at = [], 0
    for (chunk, start, size), status in zip(records, statuses, strict=True):
        if status == GIVEN:
            got = bytes(room[at : at + size])
            assert got == content(chunk, start, size), (chunk, start, size)
            found.append(got)
        at += size
    return statuses.tolist(), found


# by hand ------------------------------------------------------------------------------------------


class RawPeer:
    """A connection on which a test sends bytes by hand, as connector or acceptor."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream

    async def send(self, *parts: bytes) -> None:
        await self.stream.send_all(b"".join(parts))

    async def exactly(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            some = await self.stream.receive_some(size - len(found))
            if not some:
                raise EOFError
            found += some
        return bytes(found)

    async def receive_all(self) -> bytes:
        """Until the other end closes, however it does that."""
        found = b""
        try:
            while some := await self.stream.receive_some(65536):
                found += bytes(some)
        except trio.BrokenResourceError:
            pass
        return found

    async def frame(self) -> dict[str, object]:
        head = int.from_bytes((await self.exactly(8))[:4], "little")
        return dict(parse_head(await self.exactly(head), wire.HELLO_LIMITS))

    async def handshake(
        self,
        mine: LocalIdentity,
        *,
        to: int = 1,
        secret: bytes = SECRET,
        binding: bytes = NO_BINDING,
        is_client: bool = False,
    ) -> dict[str, object]:
        """As a connector. What is answered to the hello."""
        await self.send(wire.greeting())
        await self.exactly(GREETING_BYTES)
        nonce = await self.exactly(NONCE_BYTES)
        said = Hello(
            mine.rank, is_client, mine.instance, to, mine.identity, mine.version, os.urandom(32)
        )
        proofs = Proofs(secret, nonce, binding, mine.task.digest, said)
        await self.send(wire.hello_frame(said, proofs.connector))
        return await self.frame()

    async def welcome(self, mine: LocalIdentity) -> None:
        """As an acceptor."""
        await self.exactly(GREETING_BYTES)
        nonce = os.urandom(32)
        await self.send(wire.welcome(nonce))
        length = int.from_bytes((await self.exactly(8))[:4], "little")
        said, _ = wire.parse_hello(await self.exactly(length))
        proofs = Proofs(mine.secret, nonce, NO_BINDING, mine.task.digest, said)
        await self.send(wire.proof_frame(proofs.acceptor))

    async def request(self) -> tuple[wire.RequestHead, bytes]:
        head = wire.parse_request(await self.exactly(wire.HEAD_BYTES))
        return head, await self.exactly(head.counted * wire.PART_BYTES)


_OPEN: list[RawPeer] = []  # what a test has opened; it ends with the master that it is for


async def open_raw(port: int, tls: ssl.SSLContext | None = None) -> RawPeer:
    stream: trio.abc.Stream = await trio.open_tcp_stream("127.0.0.1", port)
    if tls is not None:
        stream = trio.SSLStream(stream, tls)
    _OPEN.append(RawPeer(stream))
    return _OPEN[-1]


async def authenticated_raw(port: int, rank: int = 0, *, is_client: bool = False) -> RawPeer:
    """A connection after its handshake."""
    raw_peer = await open_raw(port)
    assert "proof" in await raw_peer.handshake(replace(me(0), rank=rank), is_client=is_client)
    return raw_peer


@asynccontextmanager
async def scripted_master(behave: Callable[[RawPeer], Awaitable[object]]) -> AsyncIterator[int]:
    """A master whose connections a test answers by hand after the handshake; yields its port."""
    with listening() as listener:
        listener.setblocking(False)
        accepting = trio.SocketListener(trio.socket.from_stdlib_socket(listener))

        async def one(stream: trio.SocketStream) -> None:
            async with stream:
                raw_peer = RawPeer(stream)
                try:
                    await raw_peer.welcome(me(1))
                    await behave(raw_peer)
                except (EOFError, trio.BrokenResourceError):
                    pass

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, one, [accepting])
            yield listener.getsockname()[1]
            nursery.cancel_scope.cancel()


def wait_for(seconds: float) -> Callable[[], Awaitable[None]]:
    """An operation that takes so many seconds."""

    async def wait() -> None:
        await trio.sleep(seconds)

    return wait


async def gather(*works: Callable[[], Awaitable[None]]) -> None:
    async with trio.open_nursery() as nursery:
        for work in works:
            nursery.start_soon(work)


def lines(messages: Sequence[str]) -> list[str]:
    """The log lines about refused connections."""
    return [line for line in messages if line.startswith("refused")]
