"""The connection of a training process to the launcher.

A message is two lengths (4 bytes for a JSON object, 8 for a payload behind it; little-endian), the
object and the payload. The launcher answers only where it is asked (`ask`): with a length of 8
bytes and a payload. A launcher that is gone is no error: the process goes on without it.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from typing import TypedDict

_LENGTHS = struct.Struct("<IQ")
_LENGTH = struct.Struct("<Q")
_SEND_S = 20.0  # a launcher that takes nothing for so long is given up


class Settings(TypedDict):
    """What the launcher wants of a training process."""

    socket: str
    """The path of the launcher's socket."""
    ahead: int
    """How many further epochs are announced, where they can be foreseen."""
    fuse_trees: list[str]
    """The mount points whose `open` is slow."""
    group_size: int
    """Random orders are replaced by chunk-wise ones with so many chunks in a group; 0: not."""
    own_seed: bool
    """Whether samplers that draw from the global generator get one of their own."""


class Link:
    """Sends messages to the launcher. Any thread, and any process that was forked from this one."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._owner = 0  # the process that made the connection
        self._is_lost = False
        os.register_at_fork(after_in_child=self._after_fork)

    def send(self, message: dict[str, object], payload: bytes | memoryview = b"") -> None:
        """Send a message. Never raises: without a launcher it does nothing."""
        self._exchange(message, payload, has_answer=False)

    def ask(self, message: dict[str, object]) -> bytes | None:
        """Send a message, and wait for the payload that answers it; None without a launcher."""
        return self._exchange(message, b"", has_answer=True)

    def _exchange(
        self, message: dict[str, object], payload: bytes | memoryview, *, has_answer: bool
    ) -> bytes | None:
        if self._is_lost:
            return None
        body = json.dumps(message).encode()
        size = payload.nbytes if isinstance(payload, memoryview) else len(payload)
        try:
            with self._lock:
                connected = self._connected()
                connected.sendall(_LENGTHS.pack(len(body), size) + body)
                if size:
                    connected.sendall(payload)
                if has_answer:
                    return self._answer(connected)
        except OSError:
            self._is_lost = True
            if self._socket is not None:
                self._socket.close()
        return None

    def note(self, text: str) -> None:
        """Have the launcher tell the user something at the end. The same text is told once."""
        self.send({"do": "note", "text": text})

    @staticmethod
    def _answer(connected: socket.socket) -> bytes:
        """The payload of an answer: its length, and so many bytes."""
        with connected.makefile("rb") as stream:
            head = stream.read(_LENGTH.size)
            content = stream.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else b""
        if len(head) < _LENGTH.size or len(content) < _LENGTH.unpack(head)[0]:
            raise OSError("the launcher has gone")
        return content

    def _connected(self) -> socket.socket:
        if self._socket is None or self._owner != os.getpid():
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket, self._owner = made, os.getpid()
            made.settimeout(_SEND_S)
            made.connect(self.path)
            body = json.dumps({"do": "process", "pid": os.getpid()}).encode()
            made.sendall(_LENGTHS.pack(len(body), 0) + body)
        return self._socket

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        self._socket = None  # the parent's: closing it here does not end it there
