"""Whatever a client sends to the control socket: it gets answers, or its connection ends.

The socket is the real one, in this process; behind it is a real `PlanCommands` as the worker.
"""

import os
import random
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgpack
import pytest
import trio
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from diesel_fs.mounts.plans.commands import PlanCommands
from diesel_fs.mounts.plans.control_socket import ControlSocket
from diesel_fs.mounts.plans.control_wire import FRAME_BYTES_MAX, PROTOCOL, REQUESTS
from diesel_fs.mounts.prefetch.link import MessageDecoder, WorkerLink
from diesel_fs.mounts.prefetch_worker import planner_for
from diesel_fs.net.messages import LENGTH, Message, frame, unpack
from tests.examples import examples
from tests.mounts.plans.test_commands import NAMES, OF_VERSION, SNAPSHOT, VALUES, announce
from tests.rows import each_row

DEADLINE_S = 20.0

HELLO = frame({"diesel_control": PROTOCOL}, FRAME_BYTES_MAX)

MESSAGES = st.dictionaries(
    NAMES, VALUES | st.sampled_from([*sorted(REQUESTS), "s"]), max_size=8
) | st.fixed_dictionaries(
    {"do": st.sampled_from(sorted(REQUESTS)), "stream": st.sampled_from(["s", "t", ""])},
    optional={"position": st.integers(-1, 400), "version": st.just(SNAPSHOT.version), "id": VALUES},
)
FRAMES = (
    MESSAGES.map(lambda message: frame(message, FRAME_BYTES_MAX))
    | st.binary(max_size=60).map(lambda body: LENGTH.pack(len(body)) + body)
    | st.binary(max_size=20)
    | st.just(frame(announce(), FRAME_BYTES_MAX))
)

Talk = Callable[[trio.SocketStream], Awaitable[None]]


class Fuzzed:
    """A control socket, and a worker that carries its requests out."""

    def __init__(self, folder: Path) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._link = WorkerLink(self._ours)
        self._plans = PlanCommands(SNAPSHOT, planner_for(SNAPSHOT, 1 << 30, "on-demand"))
        self.socket = ControlSocket(folder, {"dataset": "ds"}, dict, self._link)
        self.socket.has_worker = True

    def talk(self, talk: Talk) -> None:
        """Run one conversation, and then a good one, to see that the socket still works."""
        self.socket.listen()

        async def run() -> None:
            with trio.fail_after(DEADLINE_S):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._link.run)
                    nursery.start_soon(self._help)
                    nursery.start_soon(self.socket.run)
                    await self._speak(talk)
                    await self._speak(well)
                    nursery.cancel_scope.cancel()

        try:
            trio.run(run)
        finally:
            self.socket.close()
            self._ours.close()
            self._theirs.close()

    async def _speak(self, talk: Talk) -> None:
        stream = await trio.open_unix_socket(os.fsdecode(self.socket.path))
        async with stream:
            await talk(stream)

    async def _help(self) -> None:
        """Answer messages as the worker does."""
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(self._theirs))
        decoder = MessageDecoder()
        async for received in stream:
            for message in decoder.add(bytes(received)):
                answer = self._plans.answer(message, 1.0)
                await stream.send_all(msgpack.packb({**answer, "id": message["id"]}))


async def answer_of(stream: trio.SocketStream) -> Message | None:
    """The next message; None where the connection has ended."""
    received = bytearray()
    while (
        len(received) < LENGTH.size or len(received) < LENGTH.size + LENGTH.unpack_from(received)[0]
    ):
        try:
            more = await stream.receive_some(65_536)
        except trio.BrokenResourceError:
            return None
        if not more:
            return None
        received += more
    return unpack(received[LENGTH.size :])


async def well(stream: trio.SocketStream) -> None:
    """A conversation as it should be."""
    await stream.send_all(HELLO)
    hello = await answer_of(stream)
    assert hello is not None
    assert hello["dataset"] == "ds"
    await stream.send_all(
        frame({"do": "progress", "stream": "nobody", "position": 1}, FRAME_BYTES_MAX)
    )
    answer = await answer_of(stream)
    assert answer is not None
    assert answer["error"] == "UsageError"
    assert "no stream" in str(answer["message"])


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    tmp_path.chmod(0o700)
    yield tmp_path
    assert os.listdir(tmp_path) == []


@examples(150, suppress=(HealthCheck.function_scoped_fixture,))
@given(frames=st.lists(FRAMES, max_size=6), greeted=st.booleans())
def test_any_frames_are_answered_or_end_their_connection(
    folder: Path, frames: list[bytes], greeted: bool
) -> None:
    async def talk(stream: trio.SocketStream) -> None:
        try:
            await stream.send_all((HELLO if greeted else b"") + b"".join(frames))
            await stream.send_eof()
            while True:
                with trio.fail_after(DEADLINE_S / 2):
                    if await stream.receive_some(65_536) == b"":
                        return
        except trio.BrokenResourceError:
            pass

    Fuzzed(folder).talk(talk)


@examples(100, suppress=(HealthCheck.function_scoped_fixture,))
@given(message=MESSAGES)
def test_any_message_has_one_answer(folder: Path, message: Message) -> None:
    async def talk(stream: trio.SocketStream) -> None:
        await stream.send_all(HELLO)
        assert await answer_of(stream) is not None
        for _ in range(2):
            await stream.send_all(frame({**message, **OF_VERSION}, FRAME_BYTES_MAX))
            answer = await answer_of(stream)
            assert answer is not None, "a valid message ended the connection"

    Fuzzed(folder).talk(talk)


@each_row("seed", range(60))
def test_changed_bytes_of_a_plan_are_answered_or_end_the_connection(
    folder: Path, seed: int
) -> None:
    """Bytes are flipped, cut and repeated; the plan that results is always a valid one."""
    chance = random.Random(seed)
    good = bytearray(msgpack.packb(announce()))
    for _ in range(chance.randint(1, 4)):
        match chance.randrange(3):
            case 0:
                good[chance.randrange(len(good))] = chance.randrange(256)
            case 1:
                del good[chance.randrange(len(good)) :]
            case _:
                at = chance.randrange(len(good) + 1)
                good[at:at] = good[: chance.randrange(40)]
        good = good or bytearray(b"\0")

    async def talk(stream: trio.SocketStream) -> None:
        await stream.send_all(HELLO + LENGTH.pack(len(good)) + good)
        assert await answer_of(stream) is not None
        with trio.fail_after(DEADLINE_S / 2):
            answer = await answer_of(stream)
        assert answer is None or "error" in answer or set(answer) == {"entries"}

    Fuzzed(folder).talk(talk)
