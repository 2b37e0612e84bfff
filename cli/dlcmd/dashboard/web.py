"""As much HTTP as the dashboard needs: GET and HEAD, one request on each connection.

Unlike the standard library's servers, it limits connections, and the size and time of a request.
Each connection has a thread of its own.
"""

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import parse_qsl, urlsplit

log = logging.getLogger("diesel.dashboard")

HEAD_BYTES_MAX = 8 << 10
HEAD_S = 5.0

SEND_S = 10.0

CONNECTIONS_MAX = 64
_LINGER_S = 0.5
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """`path` has no query; `headers` have lower-case names."""

    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    body: bytes = b""
    kind: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)


class WebServer:
    def __init__(
        self,
        sockets: Sequence[socket.socket],
        answer: Callable[[HttpRequest], HttpAnswer],
        headers: Mapping[str, str],
    ) -> None:
        """`answer` is called in the connection's thread. Every answer has `headers`."""
        self._sockets = sockets
        self._answer = answer
        self._headers = headers
        self._free = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._lock = threading.Lock()
        self._silent: dict[socket.socket, None] = {}
        """Connections without a request so far, oldest first. `_lock` guards them."""

    def serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            for each in self._sockets:
                each.setblocking(False)
                selector.register(each, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    assert isinstance(key.fileobj, socket.socket)
                    self._accept(key.fileobj)

    def _accept(self, listening: socket.socket) -> None:
        try:
            link, _ = listening.accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.error("cannot accept connections: %s", error.strerror)
            time.sleep(_PAUSE_S)
            return
        # Close the longest silent connection when the limit is reached
        if not self._free.acquire(blocking=False) and not (
            self._end_silent() and self._free.acquire(timeout=_PAUSE_S)
        ):
            self._refuse(link)
            return
        with self._lock:
            self._silent[link] = None
        try:
            threading.Thread(target=self._serve_one, args=(link,), daemon=True).start()
        except RuntimeError:
            self._forget_silent(link)
            self._free.release()
            self._refuse(link)

    def _refuse(self, link: socket.socket) -> None:
        with link, suppress(OSError):
            link.setblocking(False)
            link.send(self._encoded(_failure(HTTPStatus.SERVICE_UNAVAILABLE), is_head=False))

    def _end_silent(self) -> bool:
        """Returns False if no connection is silent."""
        with self._lock:
            oldest = next(iter(self._silent), None)
            if oldest is None:
                return False
            del self._silent[oldest]
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        return True

    def _forget_silent(self, link: socket.socket) -> None:
        with self._lock:
            self._silent.pop(link, None)

    def _serve_one(self, link: socket.socket) -> None:
        try:
            with link, suppress(OSError):
                try:
                    head = _receive_head(link)
                finally:
                    self._forget_silent(link)
                if head is None:
                    return
                is_head = head.startswith(b"HEAD ")
                answer = self._answer_to(head)
                link.settimeout(SEND_S)
                link.sendall(self._encoded(answer, is_head=is_head))
                # With unread bytes, closing would reset the connection, and the answer with it
                link.shutdown(socket.SHUT_WR)
                link.settimeout(_LINGER_S)
                link.recv(HEAD_BYTES_MAX)
        finally:
            self._free.release()

    def _answer_to(self, head: bytes) -> HttpAnswer:
        if len(head) > HEAD_BYTES_MAX:
            return _failure(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        method, request = _parse(head)
        if request is None:
            return _failure(HTTPStatus.BAD_REQUEST)
        if method not in ("GET", "HEAD"):
            return _failure(HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": "GET, HEAD"})
        try:
            return self._answer(request)
        except Exception:
            log.exception("a bug in answering %s", request.path)
            return _failure(HTTPStatus.INTERNAL_SERVER_ERROR)

    def _encoded(self, answer: HttpAnswer, *, is_head: bool) -> bytes:
        headers = {
            "Content-Type": answer.kind,
            "Content-Length": str(len(answer.body)),
            "Connection": "close",
            **self._headers,
            **answer.headers,
        }
        lines = [f"HTTP/1.1 {answer.status.value} {answer.status.phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        front = "\r\n".join([*lines, "", ""]).encode("latin-1")
        return front if is_head else front + answer.body


def _failure(status: HTTPStatus, headers: Mapping[str, str] | None = None) -> HttpAnswer:
    return HttpAnswer(f"{status.phrase}\n".encode(), status=status, headers=headers or {})


def _receive_head(link: socket.socket) -> bytes | None:
    """Returns more than `HEAD_BYTES_MAX` bytes for a head that is too long; None if it does not
    come in time, or if the client ends the connection."""
    until_s = time.monotonic() + HEAD_S
    head = b""
    while b"\r\n\r\n" not in head and b"\n\n" not in head and len(head) <= HEAD_BYTES_MAX:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return None
        link.settimeout(left_s)
        received = link.recv(HEAD_BYTES_MAX)
        if not received:
            return None
        head += received
    return head


def _parse(head: bytes) -> tuple[str, HttpRequest | None]:
    lines = head.decode("latin-1").replace("\r\n", "\n").partition("\n\n")[0].split("\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):
        return "", None
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or name != name.strip() or name.lower() in headers:
            return "", None  # a repeated header could mean two things
        headers[name.lower()] = value.strip()
    try:
        parts = urlsplit(words[1])
        query = dict(parse_qsl(parts.query, max_num_fields=8))
    except ValueError:
        return "", None
    return words[0], HttpRequest(parts.path, query, headers)
