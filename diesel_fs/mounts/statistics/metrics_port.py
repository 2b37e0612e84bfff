"""Serves the metrics of a mount to Prometheus.

The mount's supervisor listens on the port, in a thread of its own, so that the process that answers
readers does not speak HTTP. It requests the statistics from that process over a pair of sockets, at
most once in `MAX_AGE_S`.
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
"""The greatest age of metrics."""

ANSWER_DEADLINE_S = 4.0
"""How long the mount's server may take, so that a client of the port gets its answer within 5 s."""

_LENGTH = struct.Struct("<I")
_ASK = b"?"


class MetricsSource:
    """The server's end of the pair of sockets."""

    def __init__(self, url: str, end: socket.socket) -> None:
        self.url = url
        self._end = end

    async def serve(self, text: Callable[[], str]) -> None:
        """Answers each request with the result of `text`, until the supervisor ends."""
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
    """The port, and the supervisor's end of the pair of sockets. Made before the forks."""

    def __init__(self, place: HostPort) -> None:
        """Raises ConflictError if another program listens at `place`, ConfigError if the address
        cannot be used."""
        self._sockets = listen(place)
        port = self._sockets[0].getsockname()[1]
        self._end, server_end = socket.socketpair()
        self._server_end = server_end
        self.source = MetricsSource(f"http://{HostPort(place.host, port)}/metrics", server_end)
        self._text: str | None = None
        self._made_s = -math.inf
        self._has_requested = False
        self._answer = b""  # the part that has arrived

    @property
    def own_descriptors(self) -> Sequence[int]:
        """The descriptors that forked processes must close."""
        return [self._end.fileno(), *(each.fileno() for each in self._sockets)]

    @property
    def server_descriptor(self) -> int:
        """All processes but the server must close it."""
        return self._server_end.fileno()

    def start(self) -> None:
        """Serves the port in a thread. Call it after both forks."""
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
        """None if the server does not deliver the metrics. May wait, as the thread does nothing
        else."""
        if time.monotonic() >= self._made_s + MAX_AGE_S:
            try:
                self._text = self._request_text() or None
            except OSError:  # the server has ended, or is late
                self._text = None
            self._made_s = time.monotonic()
        return self._text

    def _request_text(self) -> str:
        """If the server's last answer was late, this waits for that one. Raises OSError."""
        if not self._has_requested:
            self._end.sendall(_ASK)
            self._has_requested = True
        while (length := self._length()) is None or len(self._answer) < length:
            received = self._end.recv(1 << 16)
            if not received:
                raise ConnectionError
            self._answer += received
        text = self._answer[_LENGTH.size : length].decode()
        self._has_requested, self._answer = False, b""
        return text

    def _length(self) -> int | None:
        """The length of the arriving answer with its head, once that has arrived."""
        if len(self._answer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._answer)
        return _LENGTH.size + int(length)
