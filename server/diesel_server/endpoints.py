"""Places to listen at: what HOST:PORT means, and sockets there.

Owned here: addresses of ours, whether only this machine reaches them. Not owned: who connects.
"""

import errno
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from diesel_fs.errors import ConfigError, ConflictError

BACKLOG = 1024
"""The clients of a task's start knock together."""

_ABSENT = frozenset((errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host's name or address, and a port; 0: any that is free."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(text: str, *, default_host: str = "") -> Endpoint:
    """The place that HOST:PORT means; where there is a default host, a port alone will do.

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
            f"{text!r} is no place to listen at", advice="write HOST:PORT, as 127.0.0.1:9300"
        )
    return Endpoint(host, port)


def addresses_of(place: Endpoint) -> list[tuple[socket.AddressFamily, str]]:
    """The addresses that a host has. Raises ConfigError."""
    try:
        found = socket.getaddrinfo(
            place.host, place.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no name of a host"
        raise ConfigError(f"cannot listen at {place}: {why}") from None
    return list(dict.fromkeys((each[0], str(each[4][0])) for each in found))


def is_local(place: Endpoint) -> bool:
    """Whether only processes of this machine can connect. Raises ConfigError."""
    addresses = (address.partition("%")[0] for _, address in addresses_of(place))
    return all(ip_address(address).is_loopback for address in addresses)


def listen(place: Endpoint) -> list[socket.socket]:
    """Sockets that listen at all addresses of a host, on one port.

    Of several addresses, those whose kind this machine does not have are left out. Raises
    ConflictError where somebody else listens there, ConfigError.
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
        return ConflictError(text, advice="another program does, or a server that is still there")
    return ConfigError(text)
