"""The master's end of the local protocol (`PEERS.md`, section 4), for the readers on its own node.

It also decides when an unused master ends. When a client process ends, at any point, the master
drops all that it kept for it. Everything runs in the master's trio loop; each connection has one
task, and carries one request at a time.
"""

import array
import json
import logging
import math
import mmap
import os
import socket
import struct
from collections import Counter
from contextlib import suppress
from pathlib import Path

import trio

from ...errors import CorruptError, DieselError, UsageError
from ...format.snapshot.reader import Snapshot
from ...system.unix_sockets import bind_unix, received_descriptors
from .. import local_wire, wire
from .master import Master

log = logging.getLogger("diesel.task")

CONNECTIONS_MAX = 4096
"""A node has some hundred workers with a few threads each."""

BACKLOG = 1024
ACCEPT_PAUSE_S = 0.1  # without free descriptors; the next client waits in the kernel

SWITCH_S = 2.0
"""For this time after a switch of the version, a client that wants another version does not end the
master: its own clients have yet to connect anew."""

_RECEIVE_BYTES = 64 << 10
_ANY_CHUNK = 1 << 32  # no limit: unpinning a chunk that was never pinned does nothing
_TURN_REQUESTS = 64  # of one client, before other tasks run
_CREDENTIALS = struct.Struct("3i")  # pid, user, group
_FILES_MAX = 4  # in one message: one is expected, others are closed
_CONTROL_BYTES = socket.CMSG_SPACE(_FILES_MAX * array.array("i").itemsize)


class LocalServer:
    def __init__(self, master: Master) -> None:
        self._master = master
        self._connections: Counter[int] = Counter()  # of each process
        self._readers = 0  # connections with an accepted hello
        self._other_version_wanted = False
        self._switched_s = -math.inf
        self._clients_changed = trio.Event()

    async def serve(self, listener: socket.socket) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                await trio.lowlevel.wait_readable(listener)
                try:
                    accepted, _ = listener.accept()
                except BlockingIOError:
                    continue
                except OSError as error:  # such as no descriptors; connected clients go on
                    log.warning("cannot accept clients now: %s", error.strerror)
                    await trio.sleep(ACCEPT_PAUSE_S)
                    continue
                accepted.setblocking(False)
                pid, user, _ = _CREDENTIALS.unpack(
                    accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                )
                if user != os.geteuid() or self._connections.total() >= CONNECTIONS_MAX:
                    log.warning("process %d of user %d was refused", pid, user)
                    accepted.close()
                    continue
                nursery.start_soon(self._serve, accepted, pid)

    async def wait_until_idle(self, idle_timeout_s: float) -> None:
        """Return if no client has read this version for `idle_timeout_s`, and at once if none reads
        it and one asks for another version: that client then starts a master of its own."""
        while True:
            self._clients_changed = trio.Event()
            timeout_s = math.inf if self._readers else idle_timeout_s
            with trio.move_on_after(timeout_s) as idle_scope:
                await self._clients_changed.wait()
            if self._other_version_wanted and not self._readers:
                log.info(
                    "a client wants another version and no client reads this one: the master ends"
                )
                return
            self._other_version_wanted = False  # a reader connected meanwhile
            if idle_scope.cancelled_caught:
                log.info("no client for %g s: the master ends", idle_timeout_s)
                return

    async def _serve(self, accepted: socket.socket, pid: int) -> None:
        """After a process's last connection, unpin its chunks and forget its plans."""
        self._connections[pid] += 1
        client = _Client(self, self._master, accepted, pid)
        try:
            if await client.serve():
                self._master.adopt_local(client.detach())
        except (CorruptError, UsageError) as error:
            log.warning("disconnected process %d: %s", pid, error.message)
        except OSError:
            pass
        finally:
            client.close()
            self._connections[pid] -= 1
            if not self._connections[pid]:
                del self._connections[pid]
                self._master.cache.unpin(pid, None)
                self._master.plan.forget_client(pid)
            if client.is_accepted:
                self._readers -= 1
                self._clients_changed.set()

    @property
    def readers(self) -> int:
        return self._readers

    def reader_joined(self) -> None:
        self._readers += 1
        self._clients_changed.set()

    def switched(self) -> None:
        self._switched_s = trio.current_time()

    def other_version_requested(self) -> None:
        """End the master soon, unless readers are connected, or it has just switched the
        version."""
        if not self._readers and trio.current_time() > self._switched_s + SWITCH_S:
            self._other_version_wanted = True
            self._clients_changed.set()


class _Client:
    def __init__(
        self, server: LocalServer, master: Master, accepted: socket.socket, pid: int
    ) -> None:
        self._server = server
        self._master = master
        self._socket = accepted
        self._pid = pid
        self._received = bytearray()
        self._files: list[int] = []
        self._version = -1  # the client's; -1: before the hello

    @property
    def is_accepted(self) -> bool:
        return self._version >= 0

    @property
    def _is_current(self) -> bool:
        return self._version == self._master.snapshot.version

    def close(self) -> None:
        self._drop_files()
        self._socket.close()

    def detach(self) -> socket.socket:
        return socket.socket(fileno=self._socket.detach())

    async def serve(self) -> bool:
        """Answer until the client closes; returns True if the connection is for READs from now on.
        Raises CorruptError, UsageError, OSError."""
        while True:
            for _ in range(_TURN_REQUESTS):
                if not await self._receive(wire.HEAD_BYTES):
                    return False
                head = local_wire.parse_request(self._received[: wire.HEAD_BYTES])
                if not await self._receive(wire.HEAD_BYTES + head.body_bytes):
                    return False
                body = bytes(self._received[wire.HEAD_BYTES : wire.HEAD_BYTES + head.body_bytes])
                del self._received[: wire.HEAD_BYTES + head.body_bytes]
                await self._answer(head, body)
                self._drop_files()
                if head.kind == local_wire.DATA and self._is_current:
                    if self._received:
                        raise CorruptError("the client does not wait for answers")
                    return True
            await trio.lowlevel.checkpoint()

    async def _answer(self, head: local_wire.LocalRequestHead, body: bytes) -> None:
        if head.kind == local_wire.HELLO:
            await self._hello(body)
            return
        if head.kind == local_wire.SWITCH_VERSION and self._version >= 0:
            await self._switch_version(body)
            return
        if head.kind == local_wire.STATS:
            text = json.dumps({**self._master.stats(), "readers": self._server.readers}).encode()
            await self._send(local_wire.answer(head.kind, body=text))
            return
        if head.kind == local_wire.UNPIN and self._version >= 0:
            self._master.cache.unpin(self._pid, local_wire.parse_chunks(body, _ANY_CHUNK))
            revoked = self._master.cache.revoked(self._pid)
            await self._send(local_wire.answer(head.kind, revoked=revoked))
            return
        if not self._is_current:
            await self._refuse(head.kind, "the task reads another version of the dataset")
            return
        sizes = self._master.snapshot.chunk_sizes
        answer, file = b"", None
        if head.kind == local_wire.MEMBERS:
            members = local_wire.members_body(self._master.task_view)
            await self._send(local_wire.answer(head.kind, body=members))
            return
        if head.kind == local_wire.PIN:
            (chunk,) = local_wire.parse_chunks(body, len(sizes))
            if head.flags & local_wire.FILE:
                lent = await self._master.cache.lend_file(chunk)
                if lent is not None:
                    with lent:
                        answer = local_wire.pinned_body(local_wire.LENT)
                        await self._send(local_wire.answer(head.kind, 1, answer), lent.file)
                    return
            load = bool(head.flags & wire.LOAD)
            file = await self._master.pin(self._pid, chunk, load=load)
            given = local_wire.ABSENT if file is None else local_wire.PINNED
            answer = local_wire.pinned_body(given)
        elif head.kind == local_wire.PLAN:
            status = self._master.plan.take(self._master.rank, body, client=self._pid)
            answer = local_wire.plan_status_body(status)
        elif head.kind == local_wire.DAMAGED:
            await self._master.report_damage(local_wire.parse_damaged(body, sizes))
        count = head.counted if head.kind == local_wire.PIN else 0
        revoked = self._master.cache.revoked(self._pid)
        await self._send(local_wire.answer(head.kind, count, answer, revoked), file)

    async def _hello(self, body: bytes) -> None:
        try:
            identity, version = local_wire.parse_hello(body)
        except UsageError as error:
            await self._refuse(local_wire.HELLO, error.message)
            raise
        current = self._master.snapshot
        if (identity, version) != (current.identity, current.version):
            await self._refuse(
                local_wire.HELLO,
                f"the task reads version {current.version} of {current.identity}, not {version} of"
                f" {identity}",
            )
            self._server.other_version_requested()
            return
        if not self.is_accepted:
            self._server.reader_joined()
        self._version = version
        welcome = local_wire.welcome(self._master.rank, current.chunk_count)
        table = self._master.owner_table.descriptor
        await self._send(local_wire.answer(local_wire.HELLO, body=welcome), table)

    async def _switch_version(self, body: bytes) -> None:
        version = local_wire.parse_switch_version(body)
        if len(self._files) != 1:
            raise CorruptError("SWITCH_VERSION without a snapshot")
        try:
            mapped = mmap.mmap(self._files[0], 0, prot=mmap.PROT_READ)
            snapshot = Snapshot(memoryview(mapped))
        except (OSError, ValueError, DieselError) as error:
            raise CorruptError(f"a damaged snapshot: {error}") from None
        current = self._master.snapshot
        if (snapshot.identity, snapshot.version) != (current.identity, version):
            raise CorruptError("the snapshot is of another dataset or version")
        if version > current.version:
            await self._master.switch_version(snapshot)
        self._version = version
        self._server.switched()
        await self._send(local_wire.answer(local_wire.SWITCH_VERSION))

    async def _refuse(self, kind: int, sentence: str) -> None:
        await self._send(local_wire.refusal(kind, sentence))

    # The socket

    async def _receive(self, size: int) -> bool:
        """Returns False if the client has closed."""
        while len(self._received) < size:
            try:
                content, control, _, _ = self._socket.recvmsg(
                    _RECEIVE_BYTES, _CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._socket)
                continue
            self._files += received_descriptors(control)
            if not content:
                return False
            if len(self._received) + len(content) > wire.HEAD_BYTES + local_wire.BODY_BYTES_MAX:
                raise CorruptError("the client does not wait for answers")
            self._received += content
        return True

    async def _send(self, content: bytes, file: int | None = None) -> None:
        rights = []
        if file is not None:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))]
        view = memoryview(content)
        while view:
            try:
                sent = self._socket.sendmsg([view], rights, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._socket)
                continue
            rights, view = [], view[sent:]

    def _drop_files(self) -> None:
        while self._files:
            with suppress(OSError):
                os.close(self._files.pop())


class LocalSocket:
    """Until `listen`, the kernel refuses clients at once, so that they do not wait for a starting
    master, which may itself wait for Redis."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path.unlink(missing_ok=True)
            bind_unix(self.socket, path)
            self._inode = path.stat().st_ino
            self.socket.setblocking(False)
        except BaseException:
            self.socket.close()
            raise

    def listen(self) -> None:
        self.socket.listen(BACKLOG)

    def close(self) -> None:
        """Leaves the socket's file if another master has put its own there. May be called again,
        even if the other file has the same inode number."""
        if self.socket.fileno() < 0:
            return
        with suppress(OSError):
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()
        self.socket.close()
