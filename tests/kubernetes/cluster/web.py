"""A web server of a test, on loopback."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class _QuietHandler(SimpleHTTPRequestHandler):
    """Gives the files of a folder, and prints nothing."""

    def log_message(self, *_: object) -> None:
        pass


class _QuietServer(ThreadingHTTPServer):
    """A web server that does not print when a client goes away."""

    def handle_error(self, request: object, client_address: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """A server that gives the files of a folder; its address."""
    handler = partial(_QuietHandler, directory=str(folder))
    with _QuietServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
