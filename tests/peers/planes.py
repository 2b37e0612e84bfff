"""A data plane on real sockets with a test as its control plane, and the other ends of its
connections."""

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import trio

from diesel_fs.format.entries import Bytes
from diesel_fs.net.channel import Channel, TlsChannel
from diesel_fs.net.tls import Certificate, client_context, make_certificate
from diesel_fs.peers import wire
from diesel_fs.peers.master.data_plane import DataPlane, ServedConnection
from diesel_fs.peers.node.chunk_table import ChunkTable
from diesel_fs.peers.wire import Parts

from .connected_masters import SIZES, whole

HOPE_S = 30.0
KINDS = ("TCP", "Unix", "TLS")


class Forwarded(NamedTuple):
    connection: ServedConnection
    id: int
    flags: int
    parts: Parts
    size: int


class Answer(NamedTuple):
    id: int
    kind: int
    statuses: bytes
    payload: bytes


class Plane:
    """A running data plane. All chunks are in memory at the start."""

    def __init__(self) -> None:
        self.table = ChunkTable(SIZES)
        self.table.views.update((chunk, whole(chunk)) for chunk in range(len(SIZES)))
        self.forwarded: queue.SimpleQueue[Forwarded] = queue.SimpleQueue()
        self.data = DataPlane(self._forward, self._forward_plan)
        self.plans: queue.SimpleQueue[tuple[ServedConnection, int, bytes]] = queue.SimpleQueue()
        self._ends: list[socket.socket] = []

    def _forward(
        self, connection: ServedConnection, number: int, flags: int, parts: Parts, size: int
    ) -> None:
        self.forwarded.put(Forwarded(connection, number, flags, parts, size))

    def _forward_plan(self, connection: ServedConnection, number: int, body: bytes) -> None:
        self.plans.put((connection, number, body))

    def next_forwarded(self) -> Forwarded:
        return self.forwarded.get(timeout=HOPE_S)

    def answer(self, forwarded: Forwarded, statuses: bytes, payload: bytes) -> None:
        head = wire.answer_head(forwarded.id, wire.READ, statuses, len(payload))
        found: list[Bytes] = [head, memoryview(payload)]
        self.data.answer(forwarded.connection, forwarded.size, found, len(head) + len(payload))

    def connect(
        self,
        rank: int = 0,
        *,
        is_client: bool = True,
        is_local: bool = False,
        certificate: Certificate | None = None,
        send_buffer: int = 0,
    ) -> socket.socket:
        """Return the other end of a new connection: over TCP, or with `is_local` over a Unix
        socket."""
        if is_local:
            end, accepted = socket.socketpair()
        else:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                end = socket.create_connection(listener.getsockname())
                accepted, _ = listener.accept()
        end.settimeout(HOPE_S)
        if send_buffer:
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        if certificate is None:
            channel = Channel(accepted, options=())
        else:
            channel = tls = TlsChannel(accepted, certificate.context, accepted=True)
            handshake = threading.Thread(target=trio.run, args=[tls.do_handshake])
            handshake.start()
            end = client_context().wrap_socket(end)
            handshake.join()
        self._ends.append(end)
        self.data.adopt(
            ServedConnection(channel, self.table, rank, is_client=is_client, is_local=is_local)
        )
        return end

    def connect_as(self, kind: str) -> socket.socket:
        certificate = make_certificate() if kind == "TLS" else None
        return self.connect(is_local=kind == "Unix", certificate=certificate)

    def close(self) -> None:
        self.data.close()
        for end in self._ends:
            end.close()


@contextmanager
def running_plane() -> Iterator[Plane]:
    plane = Plane()
    try:
        yield plane
    finally:
        plane.close()


def exactly(end: socket.socket, size: int) -> bytes:
    found = bytearray(size)
    left = memoryview(found)
    while len(left):
        count = end.recv_into(left)
        if not count:
            raise EOFError
        left = left[count:]
    return bytes(found)


def answer(end: socket.socket) -> Answer:
    head = wire.parse_answer(exactly(end, wire.HEAD_BYTES))
    return Answer(head.id, head.kind, exactly(end, head.counted), exactly(end, head.payload_bytes))


def is_closed(end: socket.socket) -> bool:
    try:
        return end.recv(1) == b""
    except ConnectionResetError:
        return True
