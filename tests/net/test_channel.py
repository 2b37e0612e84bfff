"""Channels: fairness between tasks, and how slow the other end may be."""

import random
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import trio
from trio.testing import MockClock

from diesel_fs.net.channel import Channel, ConnectionClosed, FrameReader, TlsChannel
from diesel_fs.net.tls import TlsSocket, client_context, make_certificate
from diesel_fs.system.vectored_io import drop_written
from tests.rows import each_row


class Endless(Channel):
    def receive_now(self, room: memoryview) -> int:
        return len(room)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        yield here, there


Ends = tuple[socket.socket, socket.socket]


async def test_a_receiver_that_always_has_bytes_lets_other_tasks_run(ends: Ends) -> None:
    here, there = ends
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


async def test_F7_a_frame_that_has_begun_must_go_on(ends: Ends, autojump_clock: MockClock) -> None:
    autojump_clock.autojump_threshold = 0.02
    here, there = ends
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


async def test_unsent_parts_leave_later_in_their_order(ends: Ends) -> None:
    here, there = ends
    there.setblocking(False)
    channel = Channel(here)
    written = [bytes([number % 251]) * (number * 37 % 3000) for number in range(2000)]
    expected = b"".join(written)
    got = bytearray()

    async def read() -> None:
        while len(got) < len(expected):
            await trio.lowlevel.wait_readable(there)
            got.extend(there.recv(100_000))

    for some in (written[:1500], written[1500:]):
        assert not channel.send_now(some, sum(map(len, some)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        nursery.start_soon(channel.drain)
        nursery.start_soon(channel.drain)
    assert got == expected
    assert channel.send_now([b"more"], 4)  # at once: nothing is left that it would follow


SIZES = [0, 1, 17, 4096, 16_384, 16_385, 100_000, 300_000, 1_000_001]


@each_row("seed", range(4))
async def test_a_slow_reader_over_TLS_gets_each_byte_once_and_in_order(seed: int) -> None:
    """Each call sends as much as leaves, so some bytes are encrypted long before they count as
    sent."""
    here, there = socket.socketpair()
    for end in (here, there):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 20_000)
    draw = random.Random(seed)
    parts = [draw.randbytes(draw.choice(SIZES)) for _ in range(40)]
    expected, got = b"".join(parts), bytearray()

    def read() -> None:
        with there:
            connected = TlsSocket(there, client_context())
            room = memoryview(bytearray(200_000))
            while len(got) < len(expected):
                count = connected.recv_into(room[: draw.choice([1, 50, 5000, len(room)])])
                assert count
                got.extend(room[:count])
            connected.sendall(expected[:100_000])

    thread = threading.Thread(target=read)
    thread.start()
    with here:
        channel = TlsChannel(here, make_certificate().context, accepted=True)
        await channel.do_handshake()
        left = [memoryview(part) for part in parts if part]
        while left:
            try:
                drop_written(left, channel.send_some(left[: draw.choice([1, 3, 1000])]))
            except BlockingIOError:
                await channel.wait_writable()
        answer = await channel.receive_exactly(100_000)
        thread.join(20)
        assert not channel.has_received
        with pytest.raises(ConnectionClosed, match="closed"):
            await channel.receive(memoryview(bytearray(10)))
    assert got == expected
    assert answer == expected[:100_000]


async def test_a_TLS_handshake_with_another_protocol_fails_with_the_reason(ends: Ends) -> None:
    here, there = ends
    there.sendall(b"GET / HTTP/1.1\r\n\r\n")
    context = make_certificate().context
    with pytest.raises(ConnectionClosed, match="handshake failed"):
        await TlsChannel(here, context, accepted=True).do_handshake()
    here, there = socket.socketpair()
    there.close()
    with here, pytest.raises(ConnectionClosed):
        await TlsChannel(here, context, accepted=True).do_handshake()
    here, there = socket.socketpair()
    with here, there:
        there.sendall(bytes(100))
        with pytest.raises(ssl.SSLError):
            TlsSocket(here, client_context())


def test_bytes_that_are_not_TLS_end_a_connection(ends: Ends) -> None:
    here, there = ends
    context = make_certificate().context
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(context.wrap_socket, there, server_side=True)
        connected = TlsSocket(here, client_context())
    with accepted.result() as end:
        end.sendall(b"good")
        room = memoryview(bytearray(100))
        assert connected.recv_into(room) == 4
        socket.socket.sendall(end, bytes(50))
        with pytest.raises(ssl.SSLError):
            connected.recv_into(room)
        assert connected.recv_into(room) == 0
