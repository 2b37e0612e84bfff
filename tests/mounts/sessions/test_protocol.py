"""Requests that no kernel would send: each gets its error, and the session goes on.

The tests play the kernel: the session's device is a socket.
"""

import errno
import itertools
import logging
import os
import random
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts.sessions import protocol
from diesel_fs.mounts.sessions.kernel import KernelSession
from diesel_fs.mounts.sessions.protocol import IN_HEADER, OUT_HEADER, Malformed, Op
from diesel_fs.mounts.sessions.push_status import HOLD_STEP_S, PushStatusMap, push_status_file
from diesel_fs.mounts.sessions.session import mount_options
from diesel_fs.mounts.tree.attributes import HIDDEN_ROOT, Owner
from diesel_fs.mounts.tree.vfs import Vfs
from tests.examples import examples
from tests.mounts.folder_dataset import RELEASE_SUFFIX, FolderReader, snapshot_of
from tests.mounts.observed import figures

READ = struct.Struct("<QQII16x")
"""The body of a READ or READDIRPLUS: a handle, the offset, the size and flags."""

UNANSWERED = {Op.FORGET, Op.BATCH_FORGET, Op.INTERRUPT}
# Entries of the dataset (1 is its root), `.diesel` (HIDDEN_ROOT), and numbers of no node.
NODES = [0, 1, 2, 3, 4, 5, 99, HIDDEN_ROOT, HIDDEN_ROOT + 1, HIDDEN_ROOT + 9, (1 << 64) - 1]
PARSERS: list[Callable[[memoryview], object]] = [
    protocol.parse_header,
    protocol.parse_if_read,
    protocol.parse_name,
    protocol.parse_read,
    protocol.parse_interrupt,
    protocol.parse_init,
]


def message(op: int, unique: int, node: int, body: bytes = b"", thread: int = 0) -> bytes:
    return IN_HEADER.pack(IN_HEADER.size + len(body), op, unique, node, 0, 0, thread, 0, 0) + body


@examples(1000)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_malformed(content: bytes) -> None:
    for parse in PARSERS:
        with suppress(Malformed):
            parse(memoryview(content))
    for op in (Op.FORGET, Op.BATCH_FORGET):
        request = protocol.RequestHeader(op, 1, 1, 0)
        try:
            found = protocol.parse_forgets(request, memoryview(content))
        except Malformed:
            continue
        assert len(found) <= 1 + len(content) // 16


class Device:
    def __init__(self, source: Path) -> None:
        snapshot = Snapshot(snapshot_of(source))
        vfs = Vfs(snapshot, FolderReader(snapshot, source), Owner(0, 0), read_deadline_s=5.0)
        self.vfs = vfs
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        theirs.setblocking(False)
        options = mount_options("folder", 1)
        self.session = KernelSession(vfs, "/nowhere", options, device=theirs.detach())
        self._unique = itertools.count(1)
        self._socket = trio.socket.from_stdlib_socket(self._ours)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Device"]:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.session.serve, lambda: None)
                yield self
                nursery.cancel_scope.cancel()
        self._ours.close()
        self.session.close()

    async def send(self, content: bytes) -> None:
        await self._socket.send(content)

    async def reply(self) -> tuple[int, int, bytes]:
        found = await self._socket.recv(1 << 22)
        length, error, unique = OUT_HEADER.unpack_from(found)
        assert length == len(found)
        assert -1000 < error <= 0
        assert error == 0 or length == OUT_HEADER.size
        return unique, -error, found[OUT_HEADER.size :]

    async def ask(self, op: int, node: int, body: bytes = b"") -> tuple[int, bytes]:
        """Return the errno and content of the reply."""
        unique = next(self._unique)
        await self.send(message(op, unique, node, body))
        number, error, content = await self.reply()
        assert number == unique
        return error, content

    async def node_of(self, name: bytes) -> int:
        _, entry = await self.ask(Op.LOOKUP, 1, name + b"\0")
        return int(protocol.ENTRY_OUT.unpack(entry)[0])

    async def is_alive(self) -> bool:
        error, content = await self.ask(Op.GETATTR, 1, bytes(16))
        return error == 0 and len(content) == protocol.ATTR_OUT.size


@pytest.fixture
async def device(source: Path) -> AsyncIterator[Device]:
    (source / "link").symlink_to("a")
    (source / "folder").mkdir()
    logging.disable(logging.CRITICAL)
    async with Device(source).serving() as device:
        yield device
    logging.disable(logging.NOTSET)


async def test_every_request_gets_one_reply(device: Device) -> None:
    """It may have any opcode, known or not, any node, and a random body."""
    noise = random.Random(1)
    for op in [*range(61), 4096, (1 << 32) - 1] * 3:
        for node in NODES:
            body = noise.randbytes(noise.choice([0, 1, 7, 8, 16, 40, 40, 40, 64, 300]))
            if op in UNANSWERED:
                await device.send(message(op, 1 << 60, node, body))
            else:
                await device.ask(op, node, body)
        assert await device.is_alive()


async def test_a_lookup_of_a_random_name_gives_an_entry_or_an_error(device: Device) -> None:
    noise = random.Random(2)
    for _ in range(500):
        name = noise.randbytes(noise.choice([0, 1, 3, 255, 256, 4000]))
        name += b"\0" * (noise.random() < 0.9)
        error, content = await device.ask(Op.LOOKUP, noise.choice(NODES), name)
        assert error or len(content) == protocol.ENTRY_OUT.size
    assert await device.is_alive()


async def test_a_read_gives_the_requested_bytes_up_to_the_end(device: Device, source: Path) -> None:
    """The kernel would reject a longer reply."""
    noise = random.Random(3)
    edges = [0, 1, 4095, 4096, 4999, 5000, 5001, 1 << 20, (1 << 63) - 1, (1 << 64) - 1]
    content = (source / "a").read_bytes()
    file = await device.node_of(b"a")
    for op in (Op.READ, Op.READDIRPLUS):
        for node, offset in itertools.product([*NODES, file], edges):
            size = noise.choice([1, 4096, 65_536, (1 << 32) - 1 if op == Op.READ else 4096])
            error, found = await device.ask(op, node, READ.pack(0, offset, size, 0))
            assert len(found) <= max(size, 4096)
            if op == Op.READ and node == file:
                assert (error, found) == (0, content[offset : offset + size])
    assert await device.is_alive()


async def test_a_read_that_is_held_waits_for_the_prefetch_worker(device: Device) -> None:
    """The mount counts this wait as the worker's."""
    status = PushStatusMap(push_status_file(device.vfs.snapshot.entry_count))
    device.session.worker.attach(lambda _: None, lambda _: None, status)
    file = await device.node_of(b"a")
    status.mark_soon(np.array([file - 1], np.uint32))
    error, content = await device.ask(Op.READ, file, READ.pack(0, 0, 4096, 0))
    assert (error, len(content)) == (0, 4096)
    causes = figures(device.vfs.waits.figures(), "causes_s")
    assert causes["prefetch"] > HOLD_STEP_S
    assert causes["metadata"] > 0
    assert causes["store"] == 0.0


async def counted(device: Device, name: str) -> None:
    for _ in range(10_000):
        if device.vfs.reads[name]:
            return
        await trio.sleep(HOLD_STEP_S)
    raise AssertionError(f"no READ counts as {name}")


async def test_the_worker_leaves_a_file_out_until_its_READ_is_answered(source: Path) -> None:
    """It would wait for the page that the READ has locked, also after the hold."""
    (source / "wait").write_bytes(b"w" * 5000)
    async with Device(source).serving() as device:
        status = PushStatusMap(push_status_file(device.vfs.snapshot.entry_count))
        device.session.worker.attach(lambda _: None, lambda _: None, status)
        node = await device.node_of(b"wait")
        entries = np.array([node - 1])
        status.mark_soon(entries.astype(np.uint32))
        await device.send(message(Op.READ, 1001, node, READ.pack(0, 0, 4096, 0)))
        await counted(device, "misses")  # the hold has ended
        assert status.mark_now(entries).all()
        source.with_name(source.name + RELEASE_SUFFIX).touch()
        assert await device.reply() == (1001, 0, b"w" * 4096)
        assert not status.mark_now(entries).any()


async def test_a_READ_is_answered_by_bytes_that_the_worker_hands_over(device: Device) -> None:
    status = PushStatusMap(push_status_file(device.vfs.snapshot.entry_count))
    device.session.worker.attach(lambda _: None, lambda _: None, status)
    file = await device.node_of(b"a")
    status.mark_soon(np.array([file - 1], np.uint32))
    status.set_store_is_slow(is_slow=True)
    await device.send(message(Op.READ, 1001, file, READ.pack(0, 0, 4096, 0)))
    await counted(device, "held")
    assert status.mark_now(np.array([file - 1])).all()
    assert status.hand_over(file - 1, 0, memoryview(b"h" * 4096))
    assert await device.reply() == (1001, 0, b"h" * 4096)
    assert device.vfs.reads["hits"] == device.vfs.reads["held"] == 1
    assert device.vfs.reads["misses"] == 0


async def test_garbage_is_dropped(device: Device) -> None:
    noise = random.Random(4)
    for _ in range(500):
        await device.send(noise.randbytes(noise.choice([1, 4, 39, 40, 41, 80, 1000])))
    assert await device.is_alive()


async def test_an_interrupted_read_ends_only_when_its_thread_is_killed(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets EINTR, once, even after an earlier signal that it handles. Other readers of the same
    bytes go on waiting."""
    (source / "wait").write_bytes(b"w" * 5000)
    killed = {101}
    monkeypatch.setattr("diesel_fs.mounts.sessions.kernel.was_killed", killed.__contains__)
    async with Device(source).serving() as device:
        node = await device.node_of(b"wait")
        body = READ.pack(0, 0, 4096, 0)
        for unique, thread in (1001, 101), (1003, 102), (1005, 103), (1007, 0):
            await device.send(message(Op.READ, unique, node, body, thread))
        for number, unique in enumerate((77, 1003, 1007, 1001)):
            await device.send(
                message(Op.INTERRUPT, 2001 + 2 * number, 0, struct.pack("<Q", unique))
            )
        assert await device.reply() == (1001, errno.EINTR, b"")
        assert await device.is_alive()
        killed.add(102)
        assert await device.reply() == (1003, errno.EINTR, b"")
        assert await device.is_alive()
        source.with_name(source.name + RELEASE_SUFFIX).touch()  # the held reads end
        replies = sorted([await device.reply(), await device.reply()])
        assert replies == [(1005, 0, b"w" * 4096), (1007, 0, b"w" * 4096)]


async def test_a_rejected_reply_becomes_EIO(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a reply is a bug."""
    real = os.writev
    failed: list[int] = []

    def writev(descriptor: int, pieces: "list[bytes]") -> int:
        if len(pieces) > 1 and not failed:
            failed.append(1)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, pieces)

    monkeypatch.setattr("diesel_fs.mounts.sessions.kernel.os.writev", writev)
    assert await device.ask(Op.STATFS, 1) == (errno.EIO, b"")
    assert await device.is_alive()
    assert failed
