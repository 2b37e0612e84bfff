"""The port at which Prometheus gets the metrics of a mount.

The supervisor of the mount has it, in a thread of its own: the process that answers readers does
not speak HTTP. It only gives its statistics as text when the supervisor asks for them, over a pair
of sockets, and that is at most once in `MAX_AGE_S`, however often others ask.
"""

import logging
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

import trio

from ...net.endpoints import listen
from ...net.metrics_endpoint import MetricsEndpoint
from ...urls import HostPort

log = logging.getLogger("diesel.mount")

MAX_AGE_S = 1.0
"""How old the metrics may be that Prometheus gets."""

ANSWER_DEADLINE_S = 4.0
"""How long the server of the mount may take; a client is answered within 5 s."""

_LENGTH = struct.Struct("<I")
_ASK = b"?"


class MetricsSource:
    """The server's end of the pair: it gives the metrics."""

    def __init__(self, url: str, end: socket.socket) -> None:
        self.url = url
        """Where the metrics are served."""
        self._end = end

    async def serve(self, text: Callable[[], str]) -> None:
        """Answer the supervisor, until it has ended."""
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(self._end))
        try:
            while await stream.receive_some(1):
                content = b""
                try:
                    content = text().encode()
                except Exception:  # the mount goes on
                    log.exception("a bug in making the metrics")
                await stream.send_all(_LENGTH.pack(len(content)) + content)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return


class MetricsPort:
    """The port, and the supervisor's end of the pair. Made before the processes are forked."""

    def __init__(self, place: HostPort) -> None:
        """Raises ConflictError where another program listens there, ConfigError."""
        self._sockets = listen(place)
        port = self._sockets[0].getsockname()[1]
        self._end, server_end = socket.socketpair()
        self._server_end = server_end
        self.source = MetricsSource(f"http://{HostPort(place.host, port)}/metrics", server_end)
        self._text: str | None = None
        self._made_s = -math.inf
        self._is_asked = False
        self._answer = b""  # what has come of it

    @property
    def own_descriptors(self) -> Sequence[int]:
        """What the forked processes must close."""
        return [self._end.fileno(), *(each.fileno() for each in self._sockets)]

    @property
    def server_descriptor(self) -> int:
        """What only the server keeps."""
        return self._server_end.fileno()

    def start(self) -> None:
        """Serve from now on, in another thread. Called after the fork."""
        self._server_end.close()
        self._end.settimeout(ANSWER_DEADLINE_S)
        threading.Thread(target=self._serve, name="metrics", daemon=True).start()

    def _serve(self) -> None:
        endpoint = MetricsEndpoint(self._newest_text, lambda: self._newest_text() is not None)
        try:
            trio.run(endpoint.serve, self._sockets)
        except Exception:  # the mount goes on without
            log.exception("the metrics are not served any more (a bug)")

    def _newest_text(self) -> str | None:
        """The metrics; None where the server does not give them. It may wait: this thread does
        nothing else."""
        if time.monotonic() >= self._made_s + MAX_AGE_S:
            try:
                self._text = self._ask() or None
            except OSError:  # it has ended, or is late
                self._text = None
            self._made_s = time.monotonic()
        return self._text

    def _ask(self) -> str:
        """The metrics; after a late answer, that one comes first. Raises OSError."""
        if not self._is_asked:
            self._end.sendall(_ASK)
            self._is_asked = True
        while (length := self._length()) is None or len(self._answer) < length:
            received = self._end.recv(1 << 16)
            if not received:
                raise ConnectionError
            self._answer += received
        text = self._answer[_LENGTH.size : length].decode()
        self._is_asked, self._answer = False, b""
        return text

    def _length(self) -> int | None:
        """The length of the answer that has begun to come, with that of its head."""
        if len(self._answer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._answer)
        return _LENGTH.size + int(length)
