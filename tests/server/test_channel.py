"""The server's channel: bytes arrive whole in pieces of any size, and calls do not block."""

import random
import socket
from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing

from diesel_fs.net import channel as transport
from diesel_server.connections.channel import ClientChannel, ClientGone

Ends = tuple[ClientChannel, trio.socket.SocketType]


def socket_channel(buffer_bytes: int) -> Ends:
    ours, theirs = trio.socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    return ClientChannel(transport.Channel(socket.socket(fileno=ours.detach()))), theirs


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    channel, other = socket_channel(1 << 14)
    yield channel, other
    channel.close()
    channel.close()  # does nothing
    other.close()


async def test_bytes_arrive_in_both_directions_in_pieces_of_any_size(ends: Ends) -> None:
    channel, other = ends
    draw = random.Random(1)
    sizes = [draw.choice([0, 1, 7, 100, 8 << 10, 70_000, 1 << 20]) for _ in range(30)]
    parts = [draw.randbytes(size) for size in sizes]

    async def echo() -> None:
        stream = trio.SocketStream(other)
        async for some in stream:
            await stream.send_all(some)

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(echo)
            nursery.start_soon(channel.send, [*parts, *parts])
            for part in [*parts, *parts]:
                assert await channel.receive_exactly(len(part)) == part
            assert channel.sent_bytes == channel.received_bytes == 2 * sum(sizes)
            channel.close()


async def test_more_parts_than_one_system_call_takes_are_all_sent(ends: Ends) -> None:
    channel, other = ends
    parts = [b"%3d" % number for number in range(200)]
    left = channel.send_now(parts)
    await channel.send_left(left)
    received = b""
    with trio.fail_after(30):
        while len(received) < 600:
            received += await other.recv(4096)
    assert received == b"".join(parts)


async def test_bytes_that_cannot_be_sent_at_once_are_returned(ends: Ends) -> None:
    channel, _ = ends
    left = channel.send_now([bytes(1000), bytes(10 << 20)])
    assert 0 < sum(map(len, left)) < 10 << 20
    assert channel.send_now([b"x"]) == [b"x"], "it does not wait"
    with trio.move_on_after(0.05) as scope:
        await channel.send_left(left)
    assert scope.cancelled_caught


async def test_receiving_and_sending_after_the_end_raise_connection_closed(ends: Ends) -> None:
    channel, other = ends
    other.close()
    with pytest.raises(ClientGone):
        await channel.receive_exactly(1)
    with pytest.raises(ClientGone):
        channel.send_now([b"x"])


async def test_closing_wakes_a_task_that_waits(ends: Ends) -> None:
    channel, _ = ends

    async def wait() -> None:
        with pytest.raises(ClientGone):
            await channel.wait()

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            channel.close()
