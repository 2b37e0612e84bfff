"""What server and helper of one mount tell each other: frames of msgpack over a socket pair.

Each frame is its length (4 bytes) and a map. A frame with an `id` asks for one with the same `id`
back. The server never waits for the helper, which may wait for a page lock: what it tells is sent
by a task, and misses that pile up are dropped, since they only say where to push first. Both ends
are ours; the limit on a frame is against a bug.
"""

import itertools
import logging
import math
import os
import select
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress

import msgpack
import trio

from ...net.messages import LENGTH, Message, frame

log = logging.getLogger("diesel.mount")

FRAME_BYTES_MAX = 1 << 30
"""A plan of a hundred million entries."""

ENTRIES_PENDING_MAX = 65_536
"""Missed or forgotten entries that wait to be told; of further ones the helper learns by itself."""

FRAMES_PENDING_MAX = 256
"""Messages that wait for a helper that is stopped, or waits for a page lock; further ones are lost,
and whoever waits for an answer is told that none came."""

DESCRIPTORS_MAX = 8
"""That may come along with one message."""


class Frames:
    """Bytes of a stream as they come, and the messages that are whole."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, received: bytes) -> list[Message]:
        """The messages that these bytes complete. Raises ValueError for what is none."""
        self._bytes += received
        messages = []
        at = 0
        while len(self._bytes) - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._bytes, at)
            if length > FRAME_BYTES_MAX:
                raise ValueError(f"a frame of {length} bytes")
            end = at + LENGTH.size + length
            if len(self._bytes) < end:
                break
            messages.append(msgpack.unpackb(self._bytes[at + LENGTH.size : end]))
            at = end
        del self._bytes[:at]
        return messages


LEAVING: Message = {"do": "leave"}
"""The helper's last word where nothing is wrong."""


class WorkerLink:
    """The server's end. All but `run` and `request` return at once."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._missed: list[int] = []
        self._forgotten: list[int] = []
        self._frames: list[tuple[bytes, Sequence[int]]] = []  # with descriptors that go along
        self._wake = trio.Event()
        self._ids = itertools.count(1)
        self._answers: dict[int, Message] = {}
        self._answered: dict[int, trio.Event] = {}
        self.worker_stats: Message = {}
        """What the helper last said of itself."""
        self.alive = True

    async def receive_hello(self, deadline_s: float) -> None:
        """Hears who the helper is, which it says before it begins; before `start_worker`. It may be
        dead, or not come in time: then nothing is known of it until it says more.
        """
        end = trio.socket.from_stdlib_socket(self._socket)
        with trio.move_on_after(deadline_s), suppress(OSError):
            for message in Frames().add(await end.recv(1 << 16)):
                self.worker_stats = message

    def start_worker(self, message: Message, descriptors: Sequence[int]) -> None:
        """The first message, with the descriptors that go along; before `run`."""
        socket.send_fds(self._socket, [b"+"], descriptors)
        self.send(message)

    def report_miss(self, entry: int) -> None:
        """A READ for an entry has come."""
        if len(self._missed) < ENTRIES_PENDING_MAX:
            self._missed.append(entry)
            self._wake.set()

    def report_forgotten(self, entries: Sequence[int]) -> None:
        """The kernel has forgotten entries, and their pages went along."""
        if len(self._forgotten) < ENTRIES_PENDING_MAX:
            self._forgotten += entries
            self._wake.set()

    def send(self, message: Message) -> None:
        """Something without an answer; lost where the helper does not listen any more."""
        if self.alive and len(self._frames) < FRAMES_PENDING_MAX:
            self._frames.append((frame(message, FRAME_BYTES_MAX), ()))
            self._wake.set()

    async def send_switch(self, message: Message, descriptors: Sequence[int]) -> Message | None:
        """A message from which on entries are others, with descriptors: behind all that was told,
        missed and forgotten when it was called. The answer, however long it takes; None where the
        helper has gone.
        """
        if not self.alive:
            return None
        self._frames += [(each, ()) for each in self._entry_frames()]
        number = next(self._ids)
        self._frames.append((frame({**message, "id": number}, FRAME_BYTES_MAX), descriptors))
        self._wake.set()
        return await self._answer(number, math.inf)

    async def request(self, message: Message, deadline_s: float) -> Message | None:
        """The helper's answer, or None where none comes in time."""
        if not self.alive:
            return None
        number = next(self._ids)
        self.send({**message, "id": number})
        return await self._answer(number, deadline_s)

    async def _answer(self, number: int, deadline_s: float) -> Message | None:
        event = self._answered[number] = trio.Event()
        try:
            with trio.move_on_after(deadline_s):
                await event.wait()
            return self._answers.pop(number, None)
        finally:
            del self._answered[number]

    async def run(self) -> None:
        """Sends what is told and hears the answers, until the helper has gone."""
        end = trio.socket.from_stdlib_socket(self._socket)
        stream = trio.SocketStream(end)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._receive, stream, nursery.cancel_scope)
                while True:
                    await self._wake.wait()
                    self._wake = trio.Event()
                    frames, self._frames = self._frames, []
                    frames += [(each, ()) for each in self._entry_frames()]
                    for each, descriptors in frames:
                        if descriptors:
                            sent = await end.sendmsg([each], [_rights(descriptors)])
                            await stream.send_all(each[sent:])
                        else:
                            await stream.send_all(each)
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        except* Exception as faults:  # what cannot be understood ends the helping, not the mount
            log.exception("the helper cannot be understood", exc_info=faults)
        finally:
            self.close()

    def _entry_frames(self) -> Iterator[bytes]:
        """What was missed and forgotten, as frames; then nothing is any more."""
        for do, numbers in (("missed", self._missed), ("forgotten", self._forgotten)):
            if numbers:
                yield frame({"do": do, "entries": _packed(numbers)}, FRAME_BYTES_MAX)
                numbers.clear()

    def close(self) -> None:
        """Lets the helper go: it ends then."""
        self.alive = False
        self.worker_stats = {}
        self._frames.clear()
        self._socket.close()
        for event in self._answered.values():
            event.set()

    async def _receive(self, stream: trio.SocketStream, scope: trio.CancelScope) -> None:
        if not await self._receive_until_leave(stream):
            log.error("the helper has gone: nothing is pushed into the kernel's cache any more")
        scope.cancel()

    async def _receive_until_leave(self, stream: trio.SocketStream) -> bool:
        """Whether the helper has said that it leaves: it was told to, or the mount has left."""
        frames = Frames()
        while received := await stream.receive_some(1 << 16):
            for message in frames.add(received):
                number = message.pop("id", None)
                if message == LEAVING:
                    return True
                if number is None:
                    self.worker_stats = message
                elif isinstance(number, int) and number in self._answered:
                    self._answers[number] = message
                    self._answered[number].set()
        return False


class ServerLink:
    """The helper's end: plain and blocking."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._frames = Frames()
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self.ready: frozenset[int] = frozenset()
        """What of the watched descriptors ended the last wait."""
        self._received: list[int] = []

    def receive_descriptors(self, count: int) -> list[int]:
        """What came along with the first byte; fewer where the server has gone."""
        try:
            return self._set_cloexec(socket.recv_fds(self._socket, 1, count)[1])
        except ConnectionError:  # it has not read all that was sent
            return []

    def take_descriptors(self, count: int) -> list[int]:
        """What came along with the last message. Raises ValueError where that is another number."""
        found, self._received = self._received, []
        if len(found) != count:
            raise ValueError(f"{len(found)} descriptors came with a message instead of {count}")
        return found

    @staticmethod
    def _set_cloexec(descriptors: Sequence[int]) -> list[int]:
        for each in descriptors:
            os.set_inheritable(each, False)
        return list(descriptors)

    def watch(self, descriptor: int, events: int = select.POLLIN) -> None:
        """`messages` returns early for these events, too."""
        self._poll.register(descriptor, events)

    def watch_no_more(self, descriptor: int) -> None:
        """Before it is closed."""
        self._poll.unregister(descriptor)

    def messages(self, timeout_s: float) -> list[Message]:
        """What has come, after at most this time. Raises EOFError where the server has gone."""
        ready = self._poll.poll(max(0, math.ceil(timeout_s * 1000)))
        self.ready = frozenset(descriptor for descriptor, _ in ready)
        if self._socket.fileno() not in self.ready:
            return []
        try:
            received, descriptors, _, _ = socket.recv_fds(
                self._socket, 1 << 20, DESCRIPTORS_MAX, socket.MSG_DONTWAIT
            )
        except BlockingIOError:
            return []
        except ConnectionError:
            raise EOFError from None
        if not received:
            raise EOFError
        self._received += self._set_cloexec(descriptors)
        return self._frames.add(received)

    def send(self, message: Message) -> None:
        """Waits where the server is slow. Raises EOFError where it has gone."""
        try:
            self._socket.sendall(frame(message, FRAME_BYTES_MAX))
        except OSError:
            raise EOFError from None


def _rights(descriptors: Sequence[int]) -> tuple[int, int, bytes]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors)


def _packed(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)
