"""The connection of a training process to the launcher.

A message has two lengths (of a JSON object, 4 bytes; of a payload, 8 bytes; little-endian), then
the object and the payload. The launcher answers only the messages of `Link.request`, by a length of
8 bytes and a payload.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections import deque
from typing import TypedDict

_LENGTHS = struct.Struct("<IQ")
_LENGTH = struct.Struct("<Q")
_TIME = struct.Struct("@ll")  # seconds, microseconds
_SEND_S = 20.0  # if the launcher takes nothing for this long, nothing more is sent


class HookSettings(TypedDict):
    socket: str
    """The path of the launcher's Unix socket."""
    ahead: int
    """The epochs to announce besides the current one."""
    group_size: int
    """The chunks in a group of the chunk-wise orders that replace random orders; 0: random orders
    are kept."""
    own_seed: bool
    """Whether samplers that draw from torch's global generator get one of their own."""


class Link:
    """A connection that any thread may use, and a forked child, which connects anew."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._place = (0, 0)  # the socket's device and inode: its descriptor may be used anew
        self._owner = 0  # the process that made the connection
        self._is_lost = False
        self._later: deque[dict[str, object]] = deque()
        os.register_at_fork(after_in_child=self._after_fork)

    def send(self, message: dict[str, object], payload: bytes | memoryview = b"") -> None:
        """Send a message. Does nothing if the launcher is gone; never raises for that."""
        self._exchange(message, payload, has_answer=False)

    def request(self, message: dict[str, object]) -> bytes | None:
        """Send a message and wait for its answer. None if the launcher is gone."""
        return self._exchange(message, b"", has_answer=True)

    def send_soon(self, message: dict[str, object]) -> None:
        """Send a message, or queue it if another one is being sent. A finalizer may call it, which
        the garbage collector may run even within `send`."""
        self._later.append(message)
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._later and not self._is_lost and self._lock.acquire(blocking=False):
            try:
                self._send(self._later.popleft(), b"")
            except IndexError:  # another thread has sent it
                continue
            except OSError:
                self._lose()
            finally:
                self._lock.release()

    def _exchange(
        self, message: dict[str, object], payload: bytes | memoryview, *, has_answer: bool
    ) -> bytes | None:
        if self._is_lost:
            return None
        answer = None
        try:
            with self._lock:
                connected = self._send(message, payload)
                if has_answer:
                    answer = self._answer(connected)
        except OSError:
            self._lose()
        self._send_waiting()
        return answer

    def _send(self, message: dict[str, object], payload: bytes | memoryview) -> socket.socket:
        body = json.dumps(message).encode()
        size = payload.nbytes if isinstance(payload, memoryview) else len(payload)
        connected = self._connected()
        connected.sendall(_LENGTHS.pack(len(body), size) + body)
        if size:
            connected.sendall(payload)
        return connected

    def note(self, text: str) -> None:
        """Send a note for the user; the launcher shows equal notes once."""
        self.send({"do": "note", "text": text})

    @staticmethod
    def _answer(connected: socket.socket) -> bytes:
        with connected.makefile("rb") as stream:
            head = stream.read(_LENGTH.size)
            content = stream.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else b""
        if len(head) < _LENGTH.size or len(content) < _LENGTH.unpack(head)[0]:
            raise OSError("the launcher has gone")
        return content

    def _connected(self) -> socket.socket:
        if self._socket is not None and (self._owner != os.getpid() or not self._is_ours()):
            self._forget()
        if self._socket is None:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket, self._owner = made, os.getpid()
            self._place = _place_of(made.fileno())
            # Connect in blocking mode: otherwise this fails at once if many connect together
            made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(int(_SEND_S), 0))
            made.connect(self.path)
            made.settimeout(_SEND_S)
            body = json.dumps({"do": "process", "pid": os.getpid()}).encode()
            made.sendall(_LENGTHS.pack(len(body), 0) + body)
        return self._socket

    def _is_ours(self) -> bool:
        """Whether the descriptor is still the socket's. The program may have closed all
        descriptors, and opened others with the same numbers."""
        assert self._socket is not None
        try:
            return _place_of(self._socket.fileno()) == self._place
        except OSError:
            return False

    def _forget(self) -> None:
        """Close the socket, unless its descriptor now belongs to the program."""
        if self._socket is not None:
            if self._is_ours():
                self._socket.close()
            else:
                self._socket.detach()
            self._socket = None

    def _lose(self) -> None:
        self._is_lost = True
        self._forget()

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        self._later.clear()
        self._forget()  # closing it here does not close the parent's


def _place_of(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino
