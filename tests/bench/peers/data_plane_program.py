"""The prototype of a task's data plane: a server that is a bare `epoll` loop, and a client with a
blocking socket to each server. It shows the limit of plain Python, and is no product code.

    python data_plane_program.py serve HOST:PORT SUMS PATHS RANK SERVERS
    python data_plane_program.py read HOST:PORT,... SUMS,... SIZE

A server holds each file of the list PATHS (NUL-terminated; all of one size) whose number modulo
SERVERS is RANK. It writes their sums (XXH3, 64 bits, little endian) to SUMS before it listens. The
client answers the orders of `answering.py`, and checks the sum of every file. A request is a u32
count and as many records of u32 file and u32 size; the answer is the bytes in this order. The
client sends its requests to all servers before it reads any answer.
"""

import os
import select
import socket
import struct
import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from tests.bench.answering import DRAWN, answer_orders, drawn_singles, steady

BUFFER_BYTES = 1 << 20
IOV_MAX = 1024  # slices in one sendmsg
BACKLOG = 128
_HEAD = struct.Struct("<I")
_SINGLE = struct.Struct("<III")

Sums = npt.NDArray[np.uint64]


def serve(listener: socket.socket, memory: memoryview, size: int) -> None:
    """Answer requests for ever. A request that does not fit a segment ends the server; no request
    here is that long."""
    listener.setblocking(False)
    epoll = select.epoll()
    epoll.register(listener, select.EPOLLIN)
    clients: dict[int, socket.socket] = {}
    unsent: dict[int, list[memoryview]] = {}
    buffer = bytearray(BUFFER_BYTES)
    view = memoryview(buffer)
    while True:
        for number, event in epoll.poll():
            if number == listener.fileno():
                client = listener.accept()[0]
                client.setblocking(False)
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                clients[client.fileno()] = client
                epoll.register(client, select.EPOLLIN)
                continue
            client = clients[number]
            if event & select.EPOLLOUT:
                parts = unsent.pop(number)
            else:
                length = client.recv_into(buffer)
                if not length:
                    epoll.unregister(number)
                    clients.pop(number).close()
                    continue
                count = _HEAD.unpack_from(buffer)[0]
                if length != 4 + 8 * count:
                    raise SystemExit("a request came in pieces")
                if count == 1:  # one small answer nearly always fits the socket's buffer
                    at = _HEAD.unpack_from(buffer, 4)[0] * size
                    if client.send(memory[at : at + size]) == size:
                        continue
                    raise SystemExit("an answer of one file was not sent in one piece")
                files = np.frombuffer(view[4:length], "<u4")[::2].astype(np.int64)
                parts = [memory[at : at + size] for at in (files * size).tolist()]
            _send(client, parts, size)
            if parts:
                unsent[number] = parts
            if parts or event & select.EPOLLOUT:
                epoll.modify(number, select.EPOLLOUT if parts else select.EPOLLIN)


def _send(client: socket.socket, parts: list[memoryview], size: int) -> None:
    """Send as much as the socket takes; what remains is left in `parts`. Only the first one may be
    shorter than `size`."""
    while parts:
        try:
            sent = client.sendmsg(parts[:IOV_MAX])
        except BlockingIOError:
            return
        first = len(parts[0])
        if sent < first:
            parts[0] = parts[0][sent:]
            continue
        whole, rest = divmod(sent - first, size)
        del parts[: whole + 1]
        if rest:
            parts[0] = parts[0][rest:]


class Client:
    """Blocking connections to all servers, and the sums of their files, which have `size` bytes."""

    def __init__(self, addresses: Sequence[str], sums: Sequence[Sums], size: int) -> None:
        self._sums, self._size, self._files = sums, size, sum(map(len, sums))
        self._sockets = [socket.create_connection(_place(address)) for address in addresses]
        for opened in self._sockets:
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def steady_batches(
        self, seed: int, seconds: float, size: int, start_s: float
    ) -> dict[str, float]:
        draw = np.random.default_rng(seed)
        wanted = [draw.choice(self._files, size, replace=False) for _ in range(DRAWN)]
        buffers = [memoryview(bytearray(self._size * size)) for _ in self._sockets]
        return steady(lambda files: self._read(files, buffers), wanted, seconds, start_s, size)

    def _read(self, files: npt.NDArray[np.int64], buffers: Sequence[memoryview]) -> None:
        size, servers = self._size, len(self._sockets)
        pending = []
        for server, peer in enumerate(self._sockets):
            mine = files[files % servers == server] // servers
            if len(mine):
                records = np.empty((len(mine), 2), "<u4")
                records[:, 0], records[:, 1] = mine, size
                peer.sendall(_HEAD.pack(len(mine)) + records.tobytes())
                pending.append((server, mine))
        for server, mine in pending:
            buffer = buffers[server]
            _receive(self._sockets[server], buffer[: size * len(mine)])
            for place, expected in enumerate(self._sums[server][mine].tolist()):
                if xxh3_64_intdigest(buffer[place * size : (place + 1) * size]) != expected:
                    raise SystemExit("wrong bytes")

    def steady_singles(self, seed: int, seconds: float, start_s: float) -> dict[str, float]:
        sockets, size, servers = self._sockets, self._size, len(self._sockets)
        known: list[list[int]] = [each.tolist() for each in self._sums]
        buffer = memoryview(bytearray(size))

        def read(file: int) -> None:
            place, server = divmod(file, servers)
            sockets[server].sendall(_SINGLE.pack(1, place, size))
            _receive(sockets[server], buffer)
            if xxh3_64_intdigest(buffer) != known[server][place]:
                raise SystemExit("wrong bytes")

        return steady(read, drawn_singles(range(self._files), seed), seconds, start_s)


def _receive(peer: socket.socket, buffer: memoryview) -> None:
    got = 0
    while got < len(buffer):
        count = peer.recv_into(buffer[got:])
        if not count:
            raise SystemExit("a server has closed the connection")
        got += count


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def load_and_serve(address: str, sums: str, paths: str, rank: str, servers: str) -> None:
    """Read the server's files, write their sums, and serve."""
    with open(paths, "rb") as opened:
        mine = opened.read().split(b"\0")[:-1][int(rank) :: int(servers)]
    memory, size = bytearray(), os.path.getsize(mine[0])
    for path in mine:
        with open(path, "rb") as file:
            memory += file.read()
    if len(memory) != size * len(mine):
        raise SystemExit("the files have not all the same size")
    view = memoryview(memory).toreadonly()
    digests = [xxh3_64_intdigest(view[at : at + size]) for at in range(0, len(view), size)]
    with open(sums, "wb") as file:
        file.write(np.array(digests, "<u8").tobytes())
    serve(socket.create_server(_place(address), backlog=BACKLOG), view, size)


def obey(addresses: str, sums: str, size: str) -> None:
    columns = [np.fromfile(file, "<u8") for file in sums.split(",")]
    answer_orders(Client(addresses.split(","), columns, int(size)))


if __name__ == "__main__":
    do, *words = sys.argv[1:]
    if do == "serve":
        load_and_serve(*words)
    else:
        obey(*words)
