"""The addresses at which the server listens: what HOST:PORT means, whether other machines can reach
it, and the listening sockets.
"""

import errno
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from diesel_fs.errors import ConfigError, ConflictError

BACKLOG = 1024
"""Connections that wait to be accepted: all processes of a training task connect at once."""

_ABSENT = frozenset((errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The name or address of a host, and a port (0: any free port)."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(text: str, *, default_host: str = "") -> Endpoint:
    """The endpoint that HOST:PORT means. With a default host, a port alone will do.

    Raises ConfigError.
    """
    if default_host and text.isdecimal():
        text = f"{default_host}:{text}"
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname or default_host, parts.port
    except ValueError:
        parts, host, port = urlsplit(""), "", None
    if not host or port is None or parts.netloc != text or "@" in text:
        raise ConfigError(
            f"cannot listen at {text!r}: it is no HOST:PORT", advice="write it as 127.0.0.1:9300"
        )
    return Endpoint(host, port)


def addresses_of(place: Endpoint) -> list[tuple[socket.AddressFamily, str]]:
    """The addresses that a host has. Raises ConfigError."""
    try:
        found = socket.getaddrinfo(
            place.host, place.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "that is no name of a host"
        raise ConfigError(f"cannot listen at {place}: {why}") from None
    return list(dict.fromkeys((each[0], str(each[4][0])) for each in found))


def is_local(place: Endpoint) -> bool:
    """Whether only processes of this machine can reach an endpoint. Raises ConfigError."""
    addresses = (address.partition("%")[0] for _, address in addresses_of(place))
    return all(ip_address(address).is_loopback for address in addresses)


def listen(place: Endpoint) -> list[socket.socket]:
    """Sockets that listen at all addresses of a host, on one port.

    Addresses that this machine does not have (IPv6, say) are left out, unless all are. Raises
    ConflictError where another program listens there, ConfigError.
    """
    port = place.port
    with ExitStack() as opened:
        sockets: list[socket.socket] = []
        absent: OSError | None = None
        for family, address in addresses_of(place):
            made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            opened.callback(made.close)
            try:
                _bind(made, family, address, port)
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise _refused(place, error) from error
                absent = error
                made.close()
                continue
            port = int(made.getsockname()[1])
            sockets.append(made)
        if not sockets:
            assert absent is not None
            raise _refused(place, absent)
        opened.pop_all()
        return sockets


def _bind(made: socket.socket, family: socket.AddressFamily, address: str, port: int) -> None:
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:  # `::` stands for all addresses of both kinds
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address != "::"))
    made.bind((address, port))
    made.listen(BACKLOG)


def _refused(place: Endpoint, error: OSError) -> ConfigError | ConflictError:
    text = f"cannot listen at {place}: {error.strerror}"
    if error.errno == errno.EADDRINUSE:
        return ConflictError(
            text, advice="another program listens there, or a server that is still running"
        )
    return ConfigError(text)
