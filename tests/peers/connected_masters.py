"""Masters connected by real sockets, with made-up chunks and no dataset."""

import functools
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from uuid import UUID

import numpy as np
import trio

from diesel_fs.net.frames import GREETING_BYTES, NO_BINDING, NONCE_BYTES, parse_head
from diesel_fs.net.tls import Certificate
from diesel_fs.peers import wire
from diesel_fs.peers.handshake import LocalIdentity
from diesel_fs.peers.master.acceptor import Acceptor
from diesel_fs.peers.master.peer import Peer
from diesel_fs.peers.members.membership import Member, TaskName
from diesel_fs.peers.node.chunk_table import ChunkTable
from diesel_fs.peers.wire import ABSENT, GIVEN, Hello, Parts, Proofs

SECRET = bytes(range(32))
SIZES = np.array([1 << 20, 300_000, 6 << 20, 40 << 20], np.uint64)
TASK = TaskName(UUID(int=7), "me", "task")
SMALL = (0, 4096, 4096)


def me(rank: int, certificate: Certificate | None = None) -> LocalIdentity:
    return LocalIdentity(rank, bytes([rank]) * 16, TASK, 3, SECRET, SIZES, certificate)


Part = tuple[int, int, int]
"""A chunk, the start, and the number of bytes."""


def content(chunk: int, start: int, size: int) -> bytes:
    at = np.arange(start // 8, (start + size) // 8 + 1, dtype=np.uint64) * 0x9E3779B97F4A7C15
    return (at + np.uint64(chunk)).tobytes()[start % 8 :][:size]


def parts(*records: Part) -> Parts:
    return np.array(records, "<u4").reshape(-1, 3)


def read_request(number: int, *records: Part, flags: int = 0) -> bytes:
    return wire.request(number, wire.READ, flags, parts(*records))


@functools.cache
def whole(chunk: int) -> memoryview:
    return memoryview(content(chunk, 0, int(SIZES[chunk])))


class FakeAnswers:
    """The answers of an acceptor: from memory where chunks are `hot`, else when `ready` returns."""

    def __init__(self) -> None:
        self.table = ChunkTable(SIZES)
        self.ready: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
        self.requested: list[tuple[int, int, bool, bool]] = []
        self.plans: list[tuple[int, bytes]] = []
        self.plan_status = GIVEN
        self.slow = self.slow_most = 0
        self.hold()

    def hold(self, *, hot: bool = True, absent: Collection[int] = ()) -> None:
        """Absent chunks are never given."""
        self.absent = absent
        for chunk in range(len(SIZES)):
            if hot and chunk not in absent:
                self.table.views[chunk] = whole(chunk)
            else:
                self.table.views.pop(chunk, None)

    def take_plan(self, rank: int, body: bytes) -> int:
        self.plans.append((rank, body))
        return self.plan_status

    async def answer(
        self, rank: int, parts: Parts, *, load: bool, through: bool
    ) -> tuple[bytes, list[memoryview]]:
        self.requested.append((rank, len(parts), load, through))
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


@dataclass
class Node:
    acceptor: Acceptor
    answers: FakeAnswers
    port: int


@asynccontextmanager
async def answering(
    mine: LocalIdentity | None = None, fake_answers: FakeAnswers | None = None, **limits: int
) -> AsyncIterator[Node]:
    mine = mine or me(1)
    fake_answers = fake_answers or FakeAnswers()
    acceptor = Acceptor(mine, fake_answers, make_channel=None, **limits)
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
async def connected_peer(
    port: int, mine: LocalIdentity | None = None, certificate: bytes = b""
) -> AsyncIterator[Peer]:
    peer = Peer(mine or me(0), member(port, certificate))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer.run)
        yield peer
        nursery.cancel_scope.cancel()


async def read(peer: Peer, *records: Part, load: bool = False) -> list[int]:
    room = memoryview(bytearray(sum(size for _, _, size in records)))
    statuses = await peer.read(parts(*records), room, load=load)
    at = 0
    for record, status in zip(records, statuses, strict=True):
        size = record[2]
        assert status != GIVEN or room[at : at + size] == content(*record), record
        at += size
    found: list[int] = statuses.tolist()
    return found


# by hand ------------------------------------------------------------------------------------------


def hello(
    mine: LocalIdentity,
    nonce: bytes,
    binding: bytes = NO_BINDING,
    *,
    to: int = 1,
    is_client: bool = False,
) -> bytes:
    """The message of a connector that knows the acceptor's nonce."""
    own = os.urandom(NONCE_BYTES)
    sent = Hello(mine.rank, is_client, mine.instance, to, mine.identity, mine.version, own)
    proofs = Proofs(mine.secret, nonce, binding, mine.task.digest, sent)
    return wire.hello_frame(sent, proofs.connector)


def proof(mine: LocalIdentity, nonce: bytes, received: bytes, binding: bytes = NO_BINDING) -> bytes:
    parsed, _ = wire.parse_hello(received)
    proofs = Proofs(mine.secret, nonce, binding, mine.task.digest, parsed)
    return wire.proof_frame(proofs.acceptor)


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
        binding: bytes = NO_BINDING,
        *,
        to: int = 1,
        is_client: bool = False,
    ) -> dict[str, object]:
        """Send a hello as a connector. Returns the answer."""
        await self.send(wire.greeting())
        await self.exactly(GREETING_BYTES)
        nonce = await self.exactly(NONCE_BYTES)
        await self.send(hello(mine, nonce, binding, to=to, is_client=is_client))
        return await self.frame()

    async def welcome(self, mine: LocalIdentity) -> None:
        await self.exactly(GREETING_BYTES)
        nonce = os.urandom(NONCE_BYTES)
        await self.send(wire.welcome(nonce))
        length = int.from_bytes((await self.exactly(8))[:4], "little")
        await self.send(proof(mine, nonce, await self.exactly(length)))

    async def request(self) -> wire.RequestHead:
        head = wire.parse_request(await self.exactly(wire.HEAD_BYTES))
        await self.exactly(head.counted * wire.PART_BYTES)
        return head

    async def give(self, head: wire.RequestHead, part: Part = SMALL) -> None:
        answered = wire.answer_head(head.id, wire.READ, b"\0", part[2])
        await self.send(answered, content(*part))

    async def answer(self) -> tuple[wire.AnswerHead, bytes, bytes]:
        head = wire.parse_answer(await self.exactly(wire.HEAD_BYTES))
        return head, await self.exactly(head.counted), await self.exactly(head.payload_bytes)


_OPEN: list[RawPeer] = []  # opened by a test; each ends with its master


async def open_raw(port: int, tls: ssl.SSLContext | None = None) -> RawPeer:
    stream: trio.abc.Stream = await trio.open_tcp_stream("127.0.0.1", port)
    if tls is not None:
        stream = trio.SSLStream(stream, tls)
    _OPEN.append(RawPeer(stream))
    return _OPEN[-1]


async def authenticated_raw(port: int, rank: int = 0, *, is_client: bool = False) -> RawPeer:
    raw_peer = await open_raw(port)
    assert "proof" in await raw_peer.handshake(replace(me(0), rank=rank), is_client=is_client)
    return raw_peer


@asynccontextmanager
async def scripted_master(behave: Callable[[RawPeer], Awaitable[object]]) -> AsyncIterator[int]:
    """A master whose connections a test answers by hand after the handshake; yields its port."""

    async def one(stream: trio.SocketStream) -> None:
        raw_peer = RawPeer(stream)
        with suppress(EOFError, trio.BrokenResourceError):
            await raw_peer.welcome(me(1))
            await behave(raw_peer)

    async with trio.open_nursery() as nursery:
        serve = functools.partial(trio.serve_tcp, one, 0, host="127.0.0.1")
        [listener] = await nursery.start(serve)
        yield listener.socket.getsockname()[1]
        nursery.cancel_scope.cancel()


def wait_for(seconds: float) -> Callable[[], Awaitable[None]]:
    return functools.partial(trio.sleep, seconds)


async def gather(*works: Callable[[], Awaitable[None]]) -> None:
    async with trio.open_nursery() as nursery:
        for work in works:
            nursery.start_soon(work)


def lines(messages: Sequence[str]) -> list[str]:
    return [line for line in messages if line.startswith("refused")]
