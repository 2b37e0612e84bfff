"""The server's channel: bytes arrive whole in pieces of any size, and connections take turns."""

import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from diesel_fs import metrics
from diesel_fs.net import channel as transport
from diesel_fs.net import frames as wire
from diesel_fs.net.messages import Message
from diesel_server import limits
from diesel_server.channel import Channel, ConnectionClosed
from diesel_server.connection import Connection, ConnectionContext
from diesel_server.requests import Dispatcher, Reply, Request

from .fake_server import STORE
from .test_connection import Client, Signed, request

MANY = 150


def run(what: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(30):
            await what()

    trio.run(main)


def pair(buffer_bytes: int = 1 << 14) -> tuple[Channel, trio.socket.SocketType]:
    ours, theirs = trio.socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    return Channel(transport.Channel(socket.socket(fileno=ours.detach()))), theirs


def test_bytes_arrive_in_both_directions_in_pieces_of_any_size() -> None:
    draw = random.Random(1)
    sizes = [draw.choice([0, 1, 7, 100, 8 << 10, 70_000, 1 << 20]) for _ in range(30)]
    parts = [draw.randbytes(size) for size in sizes]

    async def main() -> None:
        channel, other = pair()

        async def echo() -> None:
            stream = trio.SocketStream(other)
            async for some in stream:
                await stream.send_all(some)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(echo)
            nursery.start_soon(channel.send, [*parts, *parts])
            for part in [*parts, *parts]:
                assert await channel.receive_exactly(len(part)) == part
            assert channel.sent_bytes == channel.received_bytes == 2 * sum(sizes)
            channel.close()
        other.close()

    run(main)


def test_more_parts_than_one_system_call_takes_are_all_sent() -> None:
    async def main() -> None:
        channel, other = pair()
        left = channel.send_now([b"%3d" % number for number in range(200)])
        await channel.send_left(left)
        received = b""
        while len(received) < 600:
            received += await other.recv(4096)
        assert received == b"".join(b"%3d" % number for number in range(200))
        channel.close()
        other.close()

    run(main)


def test_bytes_that_cannot_be_sent_at_once_are_returned() -> None:
    async def main() -> None:
        channel, other = pair()
        left = channel.send_now([bytes(1000), bytes(10 << 20)])
        assert 0 < sum(map(len, left)) < 10 << 20
        assert channel.send_now([b"x"]) == [b"x"], "it does not wait"
        with trio.move_on_after(0.05) as scope:
            await channel.send_left(left)
        assert scope.cancelled_caught
        channel.close()
        other.close()

    run(main)


def test_receiving_after_the_end_raises_connection_closed() -> None:
    async def main() -> None:
        channel, other = pair()
        other.close()
        with pytest.raises(ConnectionClosed):
            await channel.receive_exactly(1)
        with pytest.raises(ConnectionClosed):
            channel.send_now([b"x"])
        channel.close()
        channel.close()

    run(main)


def test_closing_wakes_a_task_that_waits() -> None:
    async def main() -> None:
        channel, other = pair()

        async def wait() -> None:
            with pytest.raises(ConnectionClosed):
                await channel.wait()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            channel.close()
        other.close()

    run(main)


# Connections over it


@asynccontextmanager
async def connected(handlers: object) -> AsyncIterator[Client]:
    """A client that is logged in."""
    cells = metrics.private_cells()
    runner = Dispatcher(handlers)  # type: ignore[arg-type]  # handlers of several kinds
    service = ConnectionContext(STORE, Signed(), runner, cells)
    channel, other = pair(1 << 20)

    async def opener() -> tuple[Channel, bytes]:
        return channel, wire.NO_BINDING

    stream = trio.SocketStream(other)
    client = Client(stream, service)  # type: ignore[arg-type]  # a stream is a stream
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Connection(service, opener, "10.0.0.1", 5).run)
        await client.log_in()
        yield client
        await stream.aclose()


@pytest.mark.parametrize("refused", [True, False])
def test_a_burst_of_requests_does_not_block_the_loop(refused: bool) -> None:
    """Neither those that are declined nor those that are answered at once: others have turns."""

    async def prompt(request: Request) -> Reply:
        return Reply()

    fields: Message = {"new!": 1} if refused else {}

    async def main() -> None:
        async with connected({"prompt": prompt}) as client:
            cells, steps = client.service.cells, list[float]()

            def over() -> float:
                return sum(
                    cells.get("diesel_requests_total", "other", outcome)
                    for outcome in metrics.OUTCOMES
                )

            heads: list[Message] = [{"id": n, "do": "prompt", **fields} for n in range(MANY)]
            await client.send(b"".join(wire.frame(head, wire.REQUEST_LIMITS) for head in heads))
            while over() < MANY:
                before = over()
                await trio.lowlevel.checkpoint()
                steps.append(over() - before)
            for _ in range(MANY):
                assert ("error" in await client.answer()) is refused
            assert max(steps) <= (2 if refused else limits.REQUESTS_PER_CONNECTION_MAX)

    run(main)


def test_G6_a_client_that_does_not_take_its_answer_loses_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "FRAME_S", 0.1)
    monkeypatch.setattr(limits, "BYTES_PER_S_MIN", 1 << 30)

    async def large(request: Request) -> Reply:
        return Reply({}, [bytes(10 << 20)])

    async def main() -> None:
        async with connected({"large": large}) as client:
            await client.send(request(1, "large"))
            await trio.sleep(0.5)
            assert client.service.cells.get("diesel_requests_total", "other", "gone") == 1
            with pytest.raises(EOFError):
                await client.exactly(11 << 20)

    run(main)
