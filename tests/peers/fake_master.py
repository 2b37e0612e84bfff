"""A fake master: it implements section 4 of PEERS.md with threads, over chunks that a test gives
it.

It shares no code with the real master. `Behaviour` says what it does wrong. It records what clients
send.
"""

import array
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fcntl import F_ADD_SEALS, F_GET_SEALS, F_SEAL_GROW, F_SEAL_SHRINK, F_SEAL_WRITE, fcntl
from pathlib import Path
from types import TracebackType
from typing import Self

HEAD = struct.Struct("<BBHIII")
HELLO, READ, PIN, UNPIN, DAMAGED, STATS, SWITCH_VERSION = range(1, 8)
HERE, NONE = 0xFFFE, 0xFFFF


@dataclass
class Behaviour:
    """What the fake master does; a test may change it at any time."""

    source: int = HERE
    pins: bool = True
    has: Callable[[int], bool] = lambda chunk: True
    change: Callable[[int, int, bytearray], None] = lambda chunk, start, content: None
    change_pinned: Callable[[int, bytearray], None] = lambda chunk, content: None
    revoked: list[int] = field(default_factory=list)
    refuses: str = ""
    hangs: float = 0.0
    raw: bytes = b""  # instead of any answer but a hello's
    breaks_off: bool = False
    versions: set[int] = field(default_factory=set)  # none: any


class FakeMaster:
    """One master at a socket, with the chunks of a dataset."""

    def __init__(self, path: Path, chunks: Mapping[int, bytes], behaviour: Behaviour) -> None:
        self.path = path
        self.chunks = chunks
        self.behaviour = behaviour
        self.requests: list[tuple[int, bytes]] = []
        self.pinned: list[int] = []
        self.connections: list[socket.socket] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(os.fspath(self.path))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.path.unlink()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self.connections:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def kinds(self) -> list[int]:
        """What was asked for, in order."""
        return [kind for kind, _ in self.requests]

    def bodies(self, kind: int) -> list[bytes]:
        """What came with requests of a kind."""
        return [body for each, body in self.requests if each == kind]

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        window: mmap.mmap | None = None
        with suppress(OSError, ConnectionError), connection:
            while True:
                head, files = _received(connection, HEAD.size)
                kind, flags, _, count, size, _ = HEAD.unpack(head)
                body, _ = _received(connection, size) if size else (b"", [])
                with self._lock:
                    self.requests.append((kind, body))
                if self.behaviour.hangs:
                    time.sleep(self.behaviour.hangs)
                if self.behaviour.refuses:
                    connection.sendall(_answer(kind, 0, self.behaviour.refuses.encode(), status=1))
                    continue
                if kind == HELLO:
                    protocol, zero, _, version = struct.unpack("<HH16sQ", body)
                    assert (protocol, zero) == (1, 0)
                    if self.behaviour.versions and version not in self.behaviour.versions:
                        connection.sendall(_answer(kind, 0, b"another version", status=1))
                        continue
                    assert fcntl(files[0], F_GET_SEALS) & F_SEAL_SHRINK
                    window = mmap.mmap(files[0], 0)
                    os.close(files[0])
                    welcome = struct.pack("<II", 3, len(self.chunks))
                    connection.sendall(_answer(kind, 0, welcome))
                    continue
                if self.behaviour.raw or self.behaviour.breaks_off:
                    connection.sendall(self.behaviour.raw)
                    return
                assert window is not None
                self._answer(connection, kind, flags, count, body, files, window)

    def _answer(
        self,
        connection: socket.socket,
        kind: int,
        flags: int,
        count: int,
        body: bytes,
        files: list[int],
        window: mmap.mmap,
    ) -> None:
        wanted = self.behaviour.revoked
        if kind == READ:
            offsets, sources, at = [], [], 0
            for chunk, start, size in reversed(list(struct.iter_unpack("<III", body))):
                content = bytearray(self.chunks[chunk][start : start + size])
                self.behaviour.change(chunk, start, content)
                window[at : at + size] = bytes(content)
                offsets.append(at)
                sources.append(self.behaviour.source if self.behaviour.has(chunk) else NONE)
                at += size
            found = struct.pack(f"<{count}I{count}H", *offsets[::-1], *sources[::-1])
            connection.sendall(_answer(kind, count, found, wanted))
        elif kind == PIN:
            (chunk,) = struct.unpack("<I", body)
            if not self.behaviour.pins or not (self.behaviour.has(chunk) or flags & 1):
                connection.sendall(_answer(kind, 1, struct.pack("<H", NONE), wanted))
                return
            file = self._sealed(chunk)
            self.pinned.append(chunk)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))]
            try:
                connection.sendmsg([_answer(kind, 1, struct.pack("<H", HERE), wanted)], rights)
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
    """Exactly so many bytes, and descriptors that came with them."""
    content, files = b"", array.array("i")
    while len(content) < size:
        piece, control, _, _ = connection.recvmsg(size - len(content), 64)
        for _, _, data in control:
            files.frombytes(data)
        if not piece:
            raise ConnectionError
        content += piece
    return content, files.tolist()
