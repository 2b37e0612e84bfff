"""A fake owner of chunks: it answers requests as in section 3 of PEERS.md with threads, over chunks
that a test gives it.

It shares no code with the real data plane, except that its handshake is made of the messages in
`wire.py`; `OwnerBehaviour` lists its faults. A `FakeOwner` listens on TCP, as a node's master
does for the readers of other nodes.
"""

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Self
from uuid import UUID

from diesel_fs.net.frames import LENGTHS_BYTES, NO_BINDING, parse_head, parse_lengths
from diesel_fs.peers import wire
from diesel_fs.peers.members.membership import Member

HEAD = struct.Struct("<IBBHII")
RECORD = struct.Struct("<III")
READ, PING, WORKING = 1, 3, 4
GIVEN, ABSENT = 0, 1


@dataclass
class OwnerBehaviour:
    """How the fake owner behaves; a test may change it at any time."""

    has: Callable[[int], bool] = lambda chunk: True
    change: Callable[[int, int, bytearray], None] = lambda chunk, start, content: None
    hangs: float = 0.0
    raw_data: bytes = b""  # instead of an answer
    breaks_off: bool = False
    refuses: str = ""


def answer_reads(
    connection: socket.socket,
    chunks: Mapping[int, bytes],
    behaviour: OwnerBehaviour,
    note: Callable[[int, bytes], None],
) -> None:
    """`note` gets their flags and records."""
    while True:
        number, kind, flags, _, count, _ = HEAD.unpack(received(connection, HEAD.size))
        records = received(connection, count * RECORD.size)
        assert kind in (READ, PING)
        note(flags, records)
        if behaviour.hangs:
            time.sleep(behaviour.hangs)
        if behaviour.raw_data or behaviour.breaks_off or behaviour.refuses:
            connection.sendall(behaviour.raw_data)
            return
        statuses, payload = b"", b""
        for chunk, start, size in RECORD.iter_unpack(records):
            if not behaviour.has(chunk):
                statuses += bytes([ABSENT])
                continue
            content = bytearray(chunks[chunk][start : start + size])
            assert len(content) == size
            behaviour.change(chunk, start, content)
            statuses += bytes([GIVEN])
            payload += content
        connection.sendall(HEAD.pack(number, kind, 0, 0, count, len(payload)) + statuses + payload)


def received(connection: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes. Raises ConnectionError at the end of the connection."""
    content = b""
    while len(content) < size:
        piece = connection.recv(size - len(content))
        if not piece:
            raise ConnectionError
        content += piece
    return content


class FakeServer:
    def __init__(self, listener: socket.socket) -> None:
        self.connections: list[socket.socket] = []
        self._listener = listener

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.disconnect()

    def disconnect(self) -> None:
        for each in self.connections:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        raise NotImplementedError


class FakeOwner(FakeServer):
    def __init__(
        self, rank: int, chunks: Mapping[int, bytes], *, identity: UUID, version: int,
        task: bytes, secret: bytes,
    ) -> None:  # fmt: skip
        super().__init__(socket.create_server(("127.0.0.1", 0)))
        self.rank, self.chunks = rank, chunks
        self.behaviour = OwnerBehaviour()
        self.reads: list[tuple[int, bytes]] = []  # flags and records
        self.hellos: list[wire.Hello] = []
        self.identity, self.version, self.task, self.secret = identity, version, task, secret

    @property
    def member(self) -> Member:
        port: int = self._listener.getsockname()[1]
        return Member(self.rank, bytes([self.rank]) * 16, f"127.0.0.1:{port}", self.version, b"")

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            wire.parse_greeting(received(connection, 16))
            if self.behaviour.refuses:
                connection.sendall(wire.refusal(self.behaviour.refuses))
                return
            nonce = os.urandom(32)
            connection.sendall(wire.welcome(nonce))
            lengths = parse_lengths(received(connection, LENGTHS_BYTES), wire.HELLO_LIMITS)
            head = received(connection, lengths.head)
            hello, proof = wire.parse_hello(head)
            proofs = wire.Proofs(self.secret, nonce, NO_BINDING, self.task, hello)
            assert proof == proofs.connector
            assert (hello.identity, hello.version) == (self.identity, self.version)
            assert hello.to == self.rank
            assert parse_head(head, wire.HELLO_LIMITS)["client"] is True
            self.hellos.append(hello)
            connection.sendall(wire.proof_frame(proofs.acceptor))
            answer_reads(
                connection, self.chunks, self.behaviour, lambda *read: self.reads.append(read)
            )
