"""An HTTP server for tests of archives: with or without ranges, and with faults on demand."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors: a client closes its connection when it has enough."""


@dataclass
class ArchiveServer:
    """Serves `files` by path. The other fields choose its behaviour and record the requests."""

    files: dict[str, bytes] = field(default_factory=dict)
    etags: dict[str, str] = field(default_factory=dict)
    """Replaces the tag made of the content; empty for no tag."""
    modified: str = "Fri, 13 Feb 2009 23:31:30 GMT"
    sends_parts: bool = True
    says_length: bool = True
    redirects: dict[str, str] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    """The status of every answer for a path."""
    shift: int = 0
    """The number of bytes by which the sent range lies behind the requested one."""
    failures: list[int] = field(default_factory=list)
    """The next answers: each an error status, or -1 for a body that breaks off in the middle."""
    retry_after: str = "0"
    """The field of that name in these answers."""
    served: Counter[str] = field(default_factory=Counter)
    """Bytes of bodies sent, by path."""
    requests: Counter[str] = field(default_factory=Counter)
    port: int = 0

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"


@contextmanager
def archive_server(**options: object) -> Iterator[ArchiveServer]:
    state = ArchiveServer(**options)  # type: ignore[arg-type]  # what came is passed on

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            state.requests[path] += 1
            if path in state.redirects:
                return self._empty(302, Location=state.redirects[path])
            failure = state.failures.pop(0) if state.failures else 0
            if failure > 0:
                return self._empty(failure, **{"Retry-After": state.retry_after})
            if path in state.statuses:
                return self._empty(state.statuses[path])
            if path not in state.files:
                return self._empty(404)
            content = state.files[path]
            etag = state.etags.get(path, f'"{hash(content):x}"')
            if self.headers.get("If-Match", etag) != etag:
                return self._empty(412)
            header = self.headers.get("Range")
            start, end = 0, len(content)
            if header and state.sends_parts:
                first, _, last = header.removeprefix("bytes=").partition("-")
                start, end = int(first) + state.shift, min(int(last) + 1 + state.shift, end)
                if start >= end:
                    return self._empty(416, **{"Content-Range": f"bytes */{len(content)}"})
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
            else:
                self.send_response(200)
            if etag:
                self.send_header("ETag", etag)
            if state.modified:
                self.send_header("Last-Modified", state.modified)
            if state.says_length:
                self.send_header("Content-Length", str(end - start))
            else:
                self.send_header("Connection", "close")
            self.end_headers()
            body = content[start:end]
            if failure < 0:
                self.wfile.write(body[: len(body) // 2])
                self.close_connection = True
                return None
            try:
                self.wfile.write(body)
            except ConnectionError:  # the client wanted only the headers
                return None
            state.served[path] += len(body)
            self.close_connection |= not state.says_length
            return None

        def _empty(self, status: int, **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = _Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
