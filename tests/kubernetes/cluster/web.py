"""A web server of a test, on loopback."""

import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.trees import write


class _QuietHandler(SimpleHTTPRequestHandler):
    """Gives the files of a folder, and prints nothing."""

    def log_message(self, *_: object) -> None:
        pass


class _QuietServer(ThreadingHTTPServer):
    """A web server that does not print when a client goes away."""

    def handle_error(self, request: object, client_address: object) -> None:
        pass


@contextmanager
def served_archive(folder: Path, name: str, files: dict[str, bytes]) -> Iterator[str]:
    """A server that gives an archive of these files, compressed if it is named so; its address."""
    served = folder / "served"
    served.mkdir()
    with tarfile.open(served / name, "w:gz" if name.endswith(".gz") else "w") as tar:
        for path in write(folder / "archived", files).iterdir():
            tar.add(path, path.name)
    handler = partial(_QuietHandler, directory=str(served))
    with _QuietServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/{name}"
        finally:
            server.shutdown()
            thread.join()
