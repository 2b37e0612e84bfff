"""Web servers of a test, on loopback."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast


class QuietHandler(BaseHTTPRequestHandler):
    """A handler of requests that does not print them."""

    def log_message(self, *_: object) -> None:
        pass


class _FileHandler(QuietHandler, SimpleHTTPRequestHandler):
    """Gives the files of a folder."""


class _QuietServer(ThreadingHTTPServer):
    """A web server that does not print when a client goes away."""

    def handle_error(self, request: object, client_address: object) -> None:
        pass


@contextmanager
def running(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """A server whose requests a handler answers; its address."""
    with _QuietServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """A server that gives the files of a folder; its address."""
    handler = partial(_FileHandler, directory=str(folder))
    with running(cast("type[BaseHTTPRequestHandler]", handler)) as address:
        yield address
