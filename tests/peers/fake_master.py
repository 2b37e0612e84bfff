"""A fake master: it implements section 4 of PEERS.md with threads, over chunks that a test gives
it.

It shares no code with the real master. `Behaviour` lists its faults. It records what clients
send, reads over their data connections (`fake_owner.py`) included.
"""

import array
import mmap
import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fcntl import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SHRINK, F_SEAL_WRITE, fcntl
from pathlib import Path
from typing import Self

import msgpack

from .fake_owner import FakeOwner, FakeServer, OwnerBehaviour, answer_reads

HEAD = struct.Struct("<BBHIII")
HELLO, MEMBERS, PIN, UNPIN, DAMAGED, STATS, SWITCH_VERSION, DATA = range(1, 9)
READ = 100  # a request on a data connection
RANK = 3
TASK, SECRET = bytes(range(32)), bytes(range(1, 33))


@dataclass
class Behaviour(OwnerBehaviour):
    """How the fake master behaves; a test may change it at any time."""

    pins: bool = True
    lends: Callable[[int], bytes] | None = None
    """The content of the file that a client gets if it takes files; None: no files."""
    change_pinned: Callable[[int, bytearray], None] = lambda chunk, content: None
    revoked: list[int] = field(default_factory=list)
    raw: bytes = b""  # instead of any answer but that to a hello, on control connections
    versions: set[int] = field(default_factory=set)  # empty: any version


class FakeMaster(FakeServer):
    def __init__(
        self, path: Path, chunks: Mapping[int, bytes], behaviour: Behaviour | None = None
    ) -> None:
        super().__init__(socket.socket(socket.AF_UNIX))
        self.path, self.chunks = path, chunks
        self.behaviour = behaviour or Behaviour()
        self.requests: list[tuple[int, bytes]] = []
        self.pinned: list[int] = []
        self.flags: list[int] = []  # of the reads
        self.members: list[FakeOwner] = []
        self._lock = threading.Lock()
        self._table = os.memfd_create("owners", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._table, 16 + 4 * len(chunks))
        fcntl(self._table, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
        self._owners = mmap.mmap(self._table, 0)
        self._generation = 0
        self.set_owners(dict.fromkeys(chunks, RANK))

    def __enter__(self) -> Self:
        self._listener.bind(os.fspath(self.path))
        self._listener.listen(64)
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        self.path.unlink()
        os.close(self._table)
        super().__exit__()

    def set_owners(self, owners: Mapping[int, int], *members: FakeOwner) -> None:
        self.members = list(members)
        for chunk, rank in owners.items():
            struct.pack_into("<i", self._owners, 16 + 4 * chunk, rank)
        self._generation += 1
        struct.pack_into("<QII", self._owners, 0, self._generation, len(self.chunks), 0)

    def kinds(self) -> list[int]:
        return [kind for kind, _ in self.requests]

    def bodies(self, kind: int) -> list[bytes]:
        return [body for each, body in self.requests if each == kind]

    def unpinned(self) -> list[int]:
        return [chunk for body in self.bodies(UNPIN) for (chunk,) in struct.iter_unpack("<I", body)]

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError, ConnectionError), connection:
            while True:
                head, files = _received(connection, HEAD.size)
                kind, flags, _, _, size, _ = HEAD.unpack(head)
                body, _ = _received(connection, size) if size else (b"", [])
                self._note(kind, body)
                if self.behaviour.hangs:
                    time.sleep(self.behaviour.hangs)
                if self.behaviour.refuses:
                    connection.sendall(_answer(kind, 0, self.behaviour.refuses.encode(), status=1))
                    continue
                if kind == HELLO:
                    protocol, zero, _, version = struct.unpack("<HH16sQ", body)
                    assert (protocol, zero) == (4, 0)
                    if self.behaviour.versions and version not in self.behaviour.versions:
                        connection.sendall(_answer(kind, 0, b"another version", status=1))
                        continue
                    welcome = _answer(kind, 0, struct.pack("<II", RANK, len(self.chunks)))
                    socket.send_fds(connection, [welcome], [self._table])
                    continue
                if self.behaviour.raw or self.behaviour.breaks_off:
                    connection.sendall(self.behaviour.raw)
                    return
                self._answer(connection, kind, flags, body, files)
                if kind == DATA:
                    answer_reads(connection, self.chunks, self.behaviour, self._note_read)
                    return

    def _note(self, kind: int, body: bytes) -> None:
        with self._lock:
            self.requests.append((kind, body))

    def _note_read(self, flags: int, records: bytes) -> None:
        self.flags.append(flags)
        self._note(READ, records)

    def _answer(
        self, connection: socket.socket, kind: int, flags: int, body: bytes, files: list[int]
    ) -> None:
        wanted = self.behaviour.revoked
        if kind == MEMBERS:
            members = [
                {
                    "rank": each.rank, "instance": each.member.instance,
                    "address": each.member.address, "holds": each.version, "certificate": b"",
                }
                for each in self.members
            ]  # fmt: skip
            view = {"rank": RANK, "task": TASK, "secret": SECRET, "tls": False, "members": members}
            connection.sendall(_answer(kind, 0, msgpack.packb(view), wanted))
        elif kind == PIN:
            (chunk,) = struct.unpack("<I", body)
            if self.behaviour.lends is not None and flags & 2:
                with tempfile.TemporaryFile(dir=self.path.parent) as lent:
                    lent.write(self.behaviour.lends(chunk))
                    lent.flush()
                    rights = [
                        (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [lent.fileno()]))
                    ]
                    connection.sendmsg([_answer(kind, 1, struct.pack("<H", 2), wanted)], rights)
                return
            if not self.behaviour.pins or not (self.behaviour.has(chunk) or flags & 1):
                connection.sendall(_answer(kind, 1, struct.pack("<H", 0), wanted))
                return
            file = self._sealed(chunk)
            self.pinned.append(chunk)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))]
            try:
                connection.sendmsg([_answer(kind, 1, struct.pack("<H", 1), wanted)], rights)
            finally:
                os.close(file)
        elif kind == STATS:
            connection.sendall(_answer(kind, 0, b'{"rank": 3}', wanted))
        else:
            for file in files:
                os.close(file)
            connection.sendall(_answer(kind, 0, b"", wanted))

    def _sealed(self, chunk: int) -> int:
        content = bytearray(self.chunks[chunk])
        self.behaviour.change_pinned(chunk, content)
        file = os.memfd_create("pinned", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.write(file, content)
        fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE)
        return file


def _answer(
    kind: int, count: int, body: bytes, wanted: list[int] | None = None, *, status: int = 0
) -> bytes:
    back = wanted or []
    body += struct.pack(f"<{len(back)}I", *back)
    return HEAD.pack(kind, 0, status, count, len(body), len(back)) + body


def _received(connection: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """Return exactly `size` bytes, and the descriptors that came with them."""
    content, files = b"", array.array("i")
    while len(content) < size:
        piece, control, _, _ = connection.recvmsg(size - len(content), 64)
        for _, _, data in control:
            files.frombytes(data)
        if not piece:
            raise ConnectionError
        content += piece
    return content, files.tolist()
