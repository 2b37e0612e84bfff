"""The HTTP port of the metrics: `GET /metrics` for Prometheus, and `GET /healthz`.

Unlike the servers of HTTP libraries, it limits the number of connections and the time of each.
"""

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import trio

log = logging.getLogger("diesel.net")

_HEAD_BYTES_MAX = 8 << 10
_DEADLINE_S = 5.0
_CONNECTIONS_MAX = 16
_PAUSE_S = 0.1
_OK, _UNAVAILABLE = "200 OK", "503 Service Unavailable"


@dataclass(frozen=True, slots=True)
class MetricsEndpoint:
    """`text` gives the metrics in Prometheus's text format (None: there are none now), `is_healthy`
    whether the program can work now."""

    text: Callable[[], str | None]
    is_healthy: Callable[[], bool]

    async def serve(self, sockets: Sequence[socket.socket]) -> None:
        """Answer on these listening sockets until cancelled."""
        limit = trio.CapacityLimiter(_CONNECTIONS_MAX)
        async with trio.open_nursery() as nursery:

            async def accept(listening: trio.socket.SocketType) -> NoReturn:
                while True:
                    try:
                        accepted, _ = await listening.accept()
                    except OSError as error:
                        log.error("the metrics port cannot accept connections: %s", error.strerror)
                        await trio.sleep(_PAUSE_S)
                        continue
                    stream = trio.SocketStream(accepted)
                    await limit.acquire_on_behalf_of(stream)
                    nursery.start_soon(serve_one, stream)

            async def serve_one(stream: trio.SocketStream) -> None:
                try:
                    with trio.move_on_after(_DEADLINE_S):
                        async with stream:
                            await self.answer(stream)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    return
                except Exception:
                    log.exception("a bug in answering a request for metrics")
                finally:
                    limit.release_on_behalf_of(stream)

            for each in sockets:
                each.setblocking(False)
                nursery.start_soon(accept, trio.socket.from_stdlib_socket(each))

    async def answer(self, stream: trio.abc.Stream) -> None:
        """A request without an end gets no answer."""
        head = b""
        while b"\r\n\r\n" not in head and b"\n\n" not in head:
            some = await stream.receive_some(_HEAD_BYTES_MAX)
            head += some
            if not some or len(head) > _HEAD_BYTES_MAX:
                return
        words = head.partition(b"\n")[0].split()
        method, path = words[:2] if len(words) == 3 else (b"", b"")
        path = path.partition(b"?")[0]
        kind, body = "text/plain; charset=utf-8", ""
        if method not in (b"GET", b"HEAD"):
            status = "405 Method Not Allowed"
        elif path == b"/metrics":
            text = self.text()
            status, body = (_UNAVAILABLE, "no\n") if text is None else (_OK, text)
            if text is not None:
                kind = "text/plain; version=0.0.4; charset=utf-8"
        elif path == b"/healthz":
            status, body = (_OK, "ok\n") if self.is_healthy() else (_UNAVAILABLE, "no\n")
        else:
            status = "404 Not Found"
        content = body.encode()
        answer = (
            f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n"
            "Connection: close\r\n\r\n"
        ).encode()
        await stream.send_all(answer if method == b"HEAD" else answer + content)
