"""One connection of a client to its node's master (`PEERS.md`, section 4), and its window.

Owned here: requests and answers on a socket that blocks, and descriptors that travel with them. Not
owned: which connections there are, and whether a master is to be asked (`link.py`); what is asked
for. One thread at a time has a connection.
"""

import array
import mmap
import os
import socket
import struct
from fcntl import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SHRINK, fcntl
from uuid import UUID

from ..errors import DieselError
from ..format.entries import Bytes
from . import wire
from .mapped_chunks import MemoryMap

WINDOW_BYTES = 8 << 20
"""Of each connection; only what is used of it takes memory. Larger requests cost no less."""

_RECEIVED_BYTES = wire.HEAD_BYTES + wire.PARTS_MAX * 6 + 1024
_CONTROL_BYTES = socket.CMSG_SPACE(4)
_TIMEVAL = struct.Struct("ll")


class ExchangeFailed(Exception):
    """An exchange went wrong: the connection is of no use any more."""


class RequestRejected(ExchangeFailed):
    """The master has said no."""


class Connection:
    """One connection and its window. One thread at a time."""

    def __init__(self, path: str, identity: UUID, version: int, deadline_s: float) -> None:
        """Connects and says hello. Raises Failed."""
        self.revoked: list[int] = []
        self.unread_parts = 0  # parts of a READ whose answer nobody has waited for
        self._received = bytearray(_RECEIVED_BYTES)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        window = -1
        try:
            limit = _TIMEVAL.pack(int(deadline_s), int(deadline_s % 1 * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            connect_unix(self._socket, path)
            flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            window = os.memfd_create("diesel-window", flags)
            os.ftruncate(window, WINDOW_BYTES)
            fcntl(window, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
            self.window = MemoryMap(window, WINDOW_BYTES, mmap.MAP_SHARED).view()
            body, _ = self.exchange(
                wire.LOCAL_HELLO, body=wire.local_hello(identity, version), send=window
            )
            self.rank, self.chunks = wire.parse_local_welcome(body)
        except (OSError, DieselError) as error:
            self.close()
            raise ExchangeFailed(str(error)) from error
        except BaseException:
            self.close()
            raise
        finally:
            if window >= 0:
                os.close(window)

    def exchange(
        self,
        kind: int,
        count: int = 0,
        body: Bytes = b"",
        *,
        flags: int = 0,
        send: int = -1,
        takes: bool = False,
    ) -> tuple[memoryview, int]:
        """`send` and `receive`."""
        self.send(wire.local_request(kind, count, body, flags), send=send)
        return self.receive(kind, count, expects_descriptor=takes)

    def send(self, request: bytes, *, send: int = -1) -> None:
        """Send a request, and a descriptor with it. Raises Failed."""
        try:
            if send >= 0:
                with_it = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [send]))
                sent = self._socket.sendmsg([request], [with_it])
                request = request[sent:]
            if request:
                self._socket.sendall(request)
        except BlockingIOError as error:
            raise ExchangeFailed("the master does not answer") from error
        except OSError as error:
            raise ExchangeFailed(str(error)) from error

    def receive(
        self, kind: int, count: int, *, expects_descriptor: bool = False
    ) -> tuple[memoryview, int]:
        """The body of the answer to such a request, good until the next is sent, and a descriptor
        that came with it, or -1. `expects_descriptor`: whether one may come. Raises Failed; Refused
        where the master says no.
        """
        descriptor = -1
        try:
            room = memoryview(self._received)
            if expects_descriptor:
                got, descriptor = self._receive_with_descriptor(room)
            else:
                got = self._socket.recv_into(room)
            while got < wire.HEAD_BYTES:
                got += self._more(room[got:])
            head = wire.parse_local_answer(room[: wire.HEAD_BYTES], kind, count)
            end = wire.HEAD_BYTES + head.body_bytes
            if end > len(room):
                room = memoryview(bytearray(end))
                room[:got] = self._received[:got]
            while got < end:
                got += self._more(room[got:end])
            if got > end:
                raise ExchangeFailed("the master sent more than was asked for")
            proper, self.revoked = wire.split_revoked(head, room[wire.HEAD_BYTES : end])
            if head.status != wire.LOCAL_OK:
                raise RequestRejected(wire.parse_refusal(proper))
        except BaseException as error:
            if descriptor >= 0:
                os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise ExchangeFailed("the master does not answer") from error
            if isinstance(error, OSError | DieselError):
                raise ExchangeFailed(str(error)) from error
            raise
        return proper, descriptor

    def _more(self, room: memoryview) -> int:
        got = self._socket.recv_into(room)
        if not got:
            raise ExchangeFailed("the master has ended")
        return got

    def _receive_with_descriptor(self, room: memoryview) -> tuple[int, int]:
        got, control, flags, _ = self._socket.recvmsg_into(
            [room], _CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC
        )
        found = array.array("i")
        for level, kind, content in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                found.frombytes(content[: len(content) - len(content) % found.itemsize])
        for extra in found[1:]:
            os.close(extra)
        descriptor = found[0] if found else -1
        if flags & socket.MSG_CTRUNC:
            if descriptor >= 0:
                os.close(descriptor)
            raise ExchangeFailed("descriptors were lost: this process may open no more files")
        return got, descriptor

    def close(self) -> None:
        """Repeatable. The window goes with the last view of it."""
        self._socket.close()

    @property
    def is_closed(self) -> bool:
        """In a forked child those of its parent are."""
        return self._socket.fileno() < 0


def connect_unix(made: socket.socket, path: str) -> None:
    """Connect to a socket at a path of any length. Raises OSError."""
    folder, name = os.path.split(path)
    opened = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        made.connect(f"/proc/self/fd/{opened}/{name}")
    finally:
        os.close(opened)
