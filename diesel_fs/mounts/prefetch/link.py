"""Connects the server of a mount with its prefetch worker: messages over a pair of sockets.

`WorkerLink` is the server's end (trio), `MountServerLink` the worker's (blocking calls). A message
is a map in msgpack; file descriptors may come with it. A message with an `id` is a request: its
answer has the same `id`. First the worker sends its process number. Then the server sends
descriptors with one byte, and the message that begins the work; no descriptor means that the
session does not push.

Rules of concurrency:

- The server never waits for the worker, which may itself wait for a READ that the server must
  answer. Its calls put messages into lists, which the task `WorkerLink.run` sends. The lists have
  bounds; what exceeds these is lost.
- Messages arrive in the order of the calls, except for misses and forgotten entries: these are
  collected, and sent together behind the messages that wait. A switch is sent after all that were
  reported before it, because entry numbers mean other files from then on.
- Several tasks may wait for answers at once. A request has a deadline; a switch has none, and its
  caller waits until the worker answers or ends.
- The worker sends from its one thread, and waits if the server is slow. The server's task
  `_receive` always reads, so that this wait ends.
- If one end closes its socket or dies, the other end's next call raises EOFError or returns None.
"""

import itertools
import logging
import math
import os
import select
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

import msgpack
import trio

from ...net.messages import Message

log = logging.getLogger("diesel.mount")

MESSAGE_BYTES_MAX = 1 << 30
"""Enough for a plan of a hundred million entries. Both ends are one program, so the limit only
guards against bugs."""

ENTRIES_PENDING_MAX = 65_536
"""For missed and for forgotten entries. Further ones are dropped: misses only affect which files
are pushed first, and the worker notices later by itself that entries are missing."""

MESSAGES_PENDING_MAX = 256
"""For messages to a worker that does not read. A lost request gets no answer."""

DESCRIPTORS_MAX = 8


class MessageDecoder:
    def __init__(self) -> None:
        self._unpacker = msgpack.Unpacker(max_buffer_size=MESSAGE_BYTES_MAX)

    def add(self, received: bytes) -> list[Message]:
        """The messages that these bytes complete. Raises ValueError for bytes that are no
        message."""
        self._unpacker.feed(received)
        return list(self._unpacker)


class WorkerLink:
    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._missed: list[int] = []
        self._forgotten: list[int] = []
        self._unsent: list[tuple[bytes, Sequence[int]]] = []  # packed, with their descriptors
        self._wake = trio.Event()
        self._ids = itertools.count(1)
        self._answers: dict[int, Message] = {}  # by `id`, until the request takes them
        self._answered: dict[int, trio.Event] = {}  # by `id`, of the requests that wait
        self.worker_stats: Message = {}
        """The worker's last statistics; empty before the first, and after its end."""
        self.alive = True
        """False once the connection is closed."""

    async def receive_hello(self, deadline_s: float) -> None:
        """Receive the worker's process number, before `start_worker`. If the worker is dead or
        later than `deadline_s` seconds, `worker_stats` stays empty until it sends some."""
        end = trio.socket.from_stdlib_socket(self._socket)
        with trio.move_on_after(deadline_s), suppress(OSError):
            for message in MessageDecoder().add(await end.recv(1 << 16)):
                self.worker_stats = message

    def start_worker(self, message: Message, descriptors: Sequence[int]) -> None:
        """Send the first message and its descriptors, before `run`."""
        socket.send_fds(self._socket, [b"+"], descriptors)
        self.send(message)

    def report_miss(self, entry: int) -> None:
        if len(self._missed) < ENTRIES_PENDING_MAX:
            self._missed.append(entry)
            self._wake.set()

    def report_forgotten(self, entries: Sequence[int]) -> None:
        if len(self._forgotten) < ENTRIES_PENDING_MAX:
            self._forgotten += entries
            self._wake.set()

    def send(self, message: Message) -> None:
        """Send a message without an answer. It is lost if the worker has ended or does not read."""
        if self.alive and len(self._unsent) < MESSAGES_PENDING_MAX:
            self._unsent.append((msgpack.packb(message), ()))
            self._wake.set()

    async def send_switch(self, message: Message, descriptors: Sequence[int]) -> Message | None:
        """Send the switch to another version. Returns None if the worker has ended."""
        if not self.alive:
            return None
        self._take_reports()
        number = next(self._ids)
        self._unsent.append((msgpack.packb({**message, "id": number}), descriptors))
        self._wake.set()
        return await self._answer(number, math.inf)

    async def request(self, message: Message, deadline_s: float) -> Message | None:
        """Returns None if no answer comes within `deadline_s` seconds, or the worker has ended."""
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
        end = trio.socket.from_stdlib_socket(self._socket)
        stream = trio.SocketStream(end)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._receive, stream, nursery.cancel_scope)
                while True:
                    await self._wake.wait()
                    self._wake = trio.Event()
                    self._take_reports()
                    unsent, self._unsent = self._unsent, []
                    for message, descriptors in unsent:
                        sent = 0
                        if descriptors:
                            sent = await end.sendmsg([message], [_rights(descriptors)])
                        await stream.send_all(message[sent:])
        except* (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            pass  # the worker has ended
        except* Exception as faults:  # the mount goes on without the worker
            log.exception("the prefetch worker sent an unexpected message", exc_info=faults)
        finally:
            self.close()

    def _take_reports(self) -> None:
        for do, entries in (("missed", self._missed), ("forgotten", self._forgotten)):
            if entries:
                packed = struct.pack(f"<{len(entries)}q", *entries)
                self._unsent.append((msgpack.packb({"do": do, "entries": packed}), ()))
                entries.clear()

    def close(self) -> None:
        """The worker ends then."""
        self.alive = False
        self.worker_stats = {}
        self._unsent.clear()
        self._socket.close()
        for event in self._answered.values():
            event.set()

    async def _receive(self, stream: trio.SocketStream, scope: trio.CancelScope) -> None:
        decoder = MessageDecoder()
        while received := await stream.receive_some(1 << 16):
            for message in decoder.add(received):
                number = message.pop("id", None)
                if number is None:
                    self.worker_stats = message
                elif isinstance(number, int) and number in self._answered:
                    self._answers[number] = message
                    self._answered[number].set()
        scope.cancel()


class MountServerLink:
    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._decoder = MessageDecoder()
        self._poll, self._messages_poll = select.poll(), select.poll()
        self._poll.register(end, select.POLLIN)
        self._messages_poll.register(end, select.POLLIN)
        self.ready: frozenset[int] = frozenset()
        """The descriptors that had events when `messages` last returned."""
        self._received: list[int] = []  # descriptors that came with messages

    def receive_descriptors(self) -> list[int]:
        """Return the descriptors that came with the first byte; none if the server has ended."""
        try:
            return self._set_cloexec(socket.recv_fds(self._socket, 1, DESCRIPTORS_MAX)[1])
        except ConnectionError:  # the server ended without reading all that was sent
            return []

    def take_descriptors(self, count: int) -> list[int]:
        """Return the descriptors that have come with messages since the last call; the caller
        closes them. Raises ValueError unless there are `count`."""
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
        """Make `messages` return at these events of a descriptor, too; `ready` names it then."""
        self._poll.register(descriptor, events)

    def watch_no_more(self, descriptor: int) -> None:
        """Call it before the descriptor is closed."""
        self._poll.unregister(descriptor)

    def messages(self, timeout_s: float, quiet_s: float = 0.0) -> list[Message]:
        """Wait up to `quiet_s` for messages alone, then up to `timeout_s` for messages or another
        watched event. Raises EOFError if the server has ended."""
        if quiet_s:
            self._messages_poll.poll(math.ceil(quiet_s * 1000))
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
        return self._decoder.add(received)

    def send(self, message: Message) -> None:
        """Waits if the server is slow. Raises EOFError if it has ended."""
        try:
            self._socket.sendall(msgpack.packb(message))
        except OSError:
            raise EOFError from None


def _rights(descriptors: Sequence[int]) -> tuple[int, int, bytes]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors)
