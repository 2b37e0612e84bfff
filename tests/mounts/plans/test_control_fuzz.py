"""Any bytes that a client sends to the control socket, at any time, get answers or end its
connection."""

import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import msgpack
import pytest
import trio
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from diesel_fs.mounts.daemon.prefetch_worker import planner_for
from diesel_fs.mounts.plans.commands import PlanCommands
from diesel_fs.mounts.plans.control_socket import CONNECTIONS_MAX, ControlSocket
from diesel_fs.mounts.plans.control_wire import FRAME_BYTES_MAX, HELLO_BYTES_MAX, PROTOCOL, REQUESTS
from diesel_fs.mounts.prefetch.link import MessageDecoder, WorkerLink
from diesel_fs.net.messages import LENGTH, Message, unpack
from tests.examples import examples
from tests.mounts.plans.test_commands import NAMES, SNAPSHOT, VALUES, announce
from tests.rows import each_row
from tests.waiting import soon

DEADLINE_S = 20.0


def framed(value: object) -> bytes:
    body: bytes = msgpack.packb(value)
    return LENGTH.pack(len(body)) + body


HELLO, STATS = framed({"diesel_control": PROTOCOL}), framed({"do": "stats"})

MESSAGES = st.dictionaries(
    NAMES, VALUES | st.sampled_from([*sorted(REQUESTS), "s"]), max_size=8
) | st.fixed_dictionaries(
    {"do": st.sampled_from(sorted(REQUESTS)), "stream": st.sampled_from(["s", "t", ""])},
    optional={"position": st.integers(-1, 400), "version": st.just(SNAPSHOT.version), "id": VALUES},
)
FRAMES = (
    MESSAGES.map(framed)
    | st.binary(max_size=60).map(lambda body: LENGTH.pack(len(body)) + body)
    | st.binary(max_size=20)
    | st.just(framed(announce()))
)


class Client:
    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream

    async def send(self, *frames: bytes, eof: bool = False) -> None:
        with suppress(trio.BrokenResourceError):  # the server has closed the connection
            for each in frames:
                await self.stream.send_all(each)
            if eof:
                await self.stream.send_eof()

    async def answer(self) -> Message | None:
        try:
            length = await self._received(LENGTH.size)
            return unpack(await self._received(*LENGTH.unpack(length))) if length else None
        except trio.BrokenResourceError:
            return None

    async def _received(self, size: int) -> bytes:
        received = b""
        with trio.fail_after(DEADLINE_S):
            while len(received) < size:
                more = await self.stream.receive_some(size - len(received))
                assert more or not received, "an answer ended too early"
                if not more:
                    break
                received += more
        return received

    async def answers(self) -> list[Message]:
        found = []
        while (answer := await self.answer()) is not None:
            found.append(answer)
        return found

    async def is_served(self) -> None:
        progress = framed({"do": "progress", "stream": "nobody", "position": 1})
        await self.send(HELLO, progress, STATS)
        hello, refused, answer = [await self.answer() for _ in range(3)]
        assert hello is not None
        assert hello["dataset"] == "ds"
        assert refused is not None
        assert "no stream" in str(refused["message"])
        assert answer is not None
        assert "stats" in answer


class ServedSocket:
    def __init__(self, folder: Path, frame_deadline_s: float = DEADLINE_S) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._link = WorkerLink(self._ours)
        self._plans = PlanCommands(SNAPSHOT, planner_for(SNAPSHOT, 1 << 30, "on-demand"))
        self.socket = ControlSocket(
            folder, {"dataset": "ds"}, dict, self._link, frame_deadline_s=frame_deadline_s
        )
        self.socket.has_worker = True

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        self.socket.listen()
        try:
            async with trio.open_nursery() as nursery:
                for task in (self._link.run, self._work, self.socket.run):
                    nursery.start_soon(task)
                yield
                async with self.connected() as client:
                    await client.is_served()
                nursery.cancel_scope.cancel()
        finally:
            self.socket.close()
            self._ours.close()
            self._theirs.close()

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Client]:
        stream = await trio.open_unix_socket(os.fsdecode(self.socket.path))
        async with stream:
            yield Client(stream)

    async def _work(self) -> None:
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(self._theirs))
        decoder = MessageDecoder()
        async for received in stream:
            for message in decoder.add(bytes(received)):
                answer = self._plans.answer(message, 1.0)
                await stream.send_all(msgpack.packb({**answer, "id": message["id"]}))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    tmp_path.chmod(0o700)
    yield tmp_path
    assert os.listdir(tmp_path) == []


@examples(150, suppress=(HealthCheck.function_scoped_fixture,))
@given(frames=st.lists(FRAMES, max_size=6), greeted=st.booleans())
def test_any_frames_get_answers_or_an_end(folder: Path, frames: list[bytes], greeted: bool) -> None:
    async def talk() -> None:
        socket = ServedSocket(folder)
        async with socket.serving(), socket.connected() as client:
            await client.send(HELLO if greeted else b"", *frames, eof=True)
            await client.answers()

    trio.run(talk)


WITHOUT_HELLO = [
    [b"GET / HTTP/1.1\r\n\r\n"],
    [LENGTH.pack(HELLO_BYTES_MAX + 1)],
    [LENGTH.pack(0xFFFFFFFF)],
    [framed({"diesel_control": True})],
    [framed({"diesel_control": 1, "more": 1})],
    [framed({"do": "stats"})],
    [framed([1])],
    [LENGTH.pack(1) + b"\xc1"],
    [HELLO[:-1]],
    [b"\0"],
]
GARBAGE = [
    LENGTH.pack(FRAME_BYTES_MAX + 1),
    LENGTH.pack(5) + b"\xdf\xff\xff\xff\xff",
    LENGTH.pack(1000) + b"\x91" * 1000,
    LENGTH.pack(100) + b"short",
]


@each_row(
    ("frames", "answers"),
    [*((frames, 0) for frames in WITHOUT_HELLO), *(([HELLO, STATS, each], 2) for each in GARBAGE)],
)
async def test_garbage_ends_its_connection(folder: Path, frames: list[bytes], answers: int) -> None:
    """The messages before it are answered first."""
    served = ServedSocket(folder)
    async with served.serving(), served.connected() as client, served.connected() as other:
        is_too_long = frames[-1] in (GARBAGE[0], *WITHOUT_HELLO[1], *WITHOUT_HELLO[2])
        await client.send(*frames, eof=not is_too_long)
        assert len(await client.answers()) == answers
        await other.is_served()


async def test_another_protocol_version_is_refused_with_ours(folder: Path) -> None:
    served = ServedSocket(folder)
    async with served.serving(), served.connected() as client:
        await client.send(framed({"diesel_control": PROTOCOL + 1}))
        [answer] = await client.answers()
        assert answer["error"] == "UsageError"
        assert f"version {PROTOCOL}" in str(answer["message"])


@each_row(
    "message",
    [
        {"do": "end"}, {"do": "begin"}, {"do": "missed", "entries": b""}, {"do": 1}, {},
        {"do": "list read", "stream": "s", "list": "seed=1,epoch=1"}, {"do": "forget", "node": 2},
        {"do": "stats", "id": 1}, {"do": "withdraw"}, {"do": "withdraw", "stream": None},
    ],
)  # fmt: skip
async def test_internal_requests_are_only_refused(folder: Path, message: dict[str, object]) -> None:
    served = ServedSocket(folder)
    async with served.serving(), served.connected() as client:
        await client.send(HELLO, framed(message), STATS, eof=True)
        hello, refused, answer = await client.answers()
        assert hello["diesel_control"] == PROTOCOL
        assert refused["error"] == "UsageError"
        assert "stats" in answer


async def test_connections_keep_their_limit(folder: Path) -> None:
    served = ServedSocket(folder)
    async with served.serving(), AsyncExitStack() as stack:
        talking = [
            await stack.enter_async_context(served.connected()) for _ in range(CONNECTIONS_MAX)
        ]
        for each in talking:
            await each.send(HELLO)
            assert await each.answer() is not None
        async with served.connected() as more:
            await more.send(HELLO)
            assert await more.answer() is None
        await talking[0].send(STATS)
        assert await talking[0].answer() is not None
        await stack.aclose()

        async def is_accepted() -> bool:
            async with served.connected() as later:
                await later.send(HELLO)
                return await later.answer() is not None

        await soon(is_accepted)


async def test_an_unfinished_frame_ends_the_connection(folder: Path) -> None:
    served = ServedSocket(folder, frame_deadline_s=0.3)
    async with served.serving():
        for first, rest in ((HELLO[:3], HELLO[3:]), (b"", HELLO)):
            async with served.connected() as late:
                await late.send(first)
                await trio.sleep(0.6)
                await late.send(rest)
                assert await late.answer() is None
        async with served.connected() as idle:
            await idle.send(HELLO)
            assert await idle.answer() is not None
            await trio.sleep(0.6)
            await idle.send(STATS)
            assert await idle.answer() is not None
            await idle.send(LENGTH.pack(100) + b"x")
            assert await idle.answer() is None
        async with served.connected() as dawdler:
            await dawdler.send(HELLO + b"\0")
            assert len(await dawdler.answers()) == 1
