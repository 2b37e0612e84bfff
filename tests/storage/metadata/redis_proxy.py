"""A proxy between a client and Redis that loses requests or replies, as a network may."""

import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

Fault = Callable[[int, bytes], str]
"""Gets the number of a request (from 1) and the request, and returns an action:

    ""         forward it, and the reply
    "lose"     close both ends; Redis never sees it
    "swallow"  forward it, let Redis answer, and close both ends without the reply
"""

_READ_BYTES = 1 << 20


class RedisProxy:
    """Requests are counted over all connections."""

    def __init__(self, upstream: Path, fault: Fault, delay_s: float = 0.0) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="proxy-"))
        self.socket = self.folder / "s"
        self.requests = 0
        self._upstream = upstream
        self._fault = fault
        self._delay_s = delay_s
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.socket))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as server, contextlib.suppress(OSError):
            server.connect(str(self._upstream))
            back = threading.Thread(target=self._answer, args=(server, client), daemon=True)
            back.start()
            while request := client.recv(_READ_BYTES):
                time.sleep(self._delay_s)
                with self._lock:
                    self.requests += 1
                    number = self.requests
                what = self._fault(number, request)
                if what == "lose":
                    return
                if what == "swallow":
                    with contextlib.suppress(OSError):
                        client.shutdown(socket.SHUT_RD)
                    client.close()  # so that the answer goes nowhere
                server.sendall(request)
                if what == "swallow":
                    server.shutdown(socket.SHUT_WR)
                    time.sleep(0.02)  # Redis runs a request that it has read, client or not
                    return

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while reply := server.recv(_READ_BYTES):
                client.sendall(reply)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.socket.unlink(missing_ok=True)
        self.folder.rmdir()
