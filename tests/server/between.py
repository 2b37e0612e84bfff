"""A proxy between clients and a server: it passes all bytes on, and keeps a copy."""

import select
import socket
import socketserver
import ssl
import threading
from contextlib import suppress
from pathlib import Path

from .certificates import Pair


class Between(socketserver.ThreadingTCPServer):
    """With `trusted`, a certificate and the authority that clients trust, it is the end of their
    TLS, and speaks TLS with the server. The first `cuts` connections are closed before TLS is
    established."""

    daemon_threads = True
    cuts = 0

    def __init__(self, upstream: int, trusted: tuple[Pair, Path] | None = None) -> None:
        self.copy = bytearray()
        self._upstream = upstream
        self._trusted = trusted
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        self.port = int(self.server_address[1])
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def finish_request(self, client: object, _: object) -> None:
        assert isinstance(client, socket.socket)
        if self.cuts:
            self.cuts -= 1
            client.recv(65536)
            return
        with suppress(OSError, ValueError):
            server = socket.create_connection(("127.0.0.1", self._upstream))
            if self._trusted is not None:
                pair, authority = self._trusted
                inward = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                inward.load_cert_chain(pair.certificate, pair.key)
                outward = ssl.create_default_context(cafile=str(authority))
                client = inward.wrap_socket(client, server_side=True)
                server = outward.wrap_socket(server, server_hostname="localhost")
            with client, server:
                self._relay({client: server, server: client})

    def _relay(self, other: dict[socket.socket, socket.socket]) -> None:
        """Pass bytes on until one end closes; in one thread, as TLS sockets are not thread-safe."""
        while True:
            for source in select.select([*other], [], [])[0]:
                source.settimeout(0)
                with suppress(ssl.SSLWantReadError, BlockingIOError):
                    while some := source.recv(65536):
                        self.copy += some
                        other[source].settimeout(10)
                        other[source].sendall(some)
                    return

    def server_close(self) -> None:
        self.shutdown()
        super().server_close()
