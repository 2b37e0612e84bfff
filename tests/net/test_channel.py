"""Channels: fairness between tasks, and how slow the other end may be."""

import socket

import pytest
import trio
from trio.testing import MockClock

from diesel_fs.net.channel import Channel, ConnectionClosed, FrameReader


class Endless(Channel):
    """A channel that always has bytes."""

    def receive_now(self, room: memoryview) -> int:
        return len(room)


def test_a_receiver_that_always_has_bytes_lets_other_tasks_run() -> None:
    async def main() -> None:
        here, there = socket.socketpair()
        with here, there:
            turns = 0

            async def other() -> None:
                nonlocal turns
                while True:
                    await trio.lowlevel.checkpoint()
                    turns += 1

            inbox = FrameReader(Endless(here), 16 << 10)
            there.send(b"x")  # for the first look
            async with trio.open_nursery() as nursery:
                nursery.start_soon(other)
                await inbox.skip(16 << 20)
                nursery.cancel_scope.cancel()
            assert turns > 50

    trio.run(main)


def test_F7_a_frame_that_has_begun_must_go_on() -> None:
    """Between frames it may take as long as it likes."""

    async def main() -> None:
        here, there = socket.socketpair()
        with here, there:
            inbox = FrameReader(Channel(here), 4096)
            begun_s = trio.current_time()
            with trio.move_on_after(1000):
                await inbox.fill_buffer(16)
            assert trio.current_time() - begun_s == 1000
            there.send(b"x")
            begun_s = trio.current_time()
            with pytest.raises(ConnectionClosed, match="slow"):
                await inbox.fill_buffer(16)
            assert 10 <= trio.current_time() - begun_s < 11

    trio.run(main, clock=MockClock(autojump_threshold=0.02))


def test_unsent_parts_leave_later_in_their_order() -> None:
    async def main() -> None:
        here, there = socket.socketpair()
        there.setblocking(False)
        with here, there:
            channel = Channel(here)
            said = [bytes([number % 251]) * (number * 37 % 3000) for number in range(2000)]
            expected = b"".join(said)
            got = bytearray()

            async def read() -> None:
                while len(got) < len(expected):
                    await trio.lowlevel.wait_readable(there)
                    got.extend(there.recv(100_000))

            left = channel.send_now(said[:1500], sum(map(len, said[:1500])))
            assert not left
            assert not channel.send_now(said[1500:], sum(map(len, said[1500:])))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                nursery.start_soon(channel.drain)
                nursery.start_soon(channel.drain)
            assert got == expected
            assert channel.send_now([b"more"], 4)  # at once: nothing is left that it would follow

    trio.run(main)
