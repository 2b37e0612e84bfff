"""The blocking sockets of a reader, and how the objects that hold them survive a fork.

The sockets block: a wake-up by an event loop would cost more than a request. The kernel limits the
time of each call, which costs nothing while answers come.

After a fork, parent and child hold the same sockets, and locks may be held by threads that the
child does not have. So each object that threads share registers with `start_anew_in_forks`. In the
child, before any other code, it makes new locks and closes its copies of the sockets.
"""

import os
import socket
import struct
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

from ...net.tls import TlsSocket

_TIMEVAL = struct.Struct("ll")


class RequestSocket:
    """One thread at a time sends, and one receives."""

    def __init__(
        self, connected: socket.socket | TlsSocket, *, receive_limit_s: float, send_limit_s: float
    ) -> None:
        """`receive` and `send` raise BlockingIOError if no byte moves within their limits."""
        self.socket = connected.plain if isinstance(connected, TlsSocket) else connected
        for option, limit_s in (
            (socket.SO_RCVTIMEO, receive_limit_s),
            (socket.SO_SNDTIMEO, send_limit_s),
        ):
            limit = _TIMEVAL.pack(int(limit_s), int(limit_s % 1 * 1e6))
            self.socket.setsockopt(socket.SOL_SOCKET, option, limit)
        self.send: Callable[[bytes], object] = connected.sendall
        self.receive: Callable[[memoryview], int] = connected.recv_into
        self.receive_rest = self.receive
        """Receives bytes that are known to come: without TLS it returns when the whole buffer is
        full, or after the limit."""
        if not isinstance(connected, TlsSocket):
            self.receive_rest = partial(connected.recv_into, nbytes=0, flags=socket.MSG_WAITALL)

    def close(self) -> None:
        """May run while a thread receives, and may be called again."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def close_copy(self) -> None:
        """The connection of the parent process stays open."""
        with suppress(OSError):
            os.close(self.socket.detach())


class Inherited(Protocol):
    """An object that a forked child gets from its parent."""

    def start_anew(self) -> None:
        """In the child: make new locks, and close copies of the parent's sockets."""


_INHERITED: "weakref.WeakSet[Inherited]" = weakref.WeakSet()


def start_anew_in_forks(each: Inherited) -> None:
    _INHERITED.add(each)


def _after_fork_in_child() -> None:
    for each in list(_INHERITED):
        each.start_anew()


os.register_at_fork(after_in_child=_after_fork_in_child)
