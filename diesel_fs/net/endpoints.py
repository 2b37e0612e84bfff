"""Addresses at which a program listens: parsing, and the sockets."""

import errno
import socket
from contextlib import ExitStack
from ipaddress import ip_address

from ..errors import ConfigError, ConflictError
from ..urls import HostPort

BACKLOG = 1024
"""All processes of a training task connect at once."""

_ABSENT = frozenset((errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT))


def parse_endpoint(text: str, *, default_host: str = "") -> HostPort:
    """Parse HOST:PORT; port 0 is any free port. With a default host, a port alone is enough. Raises
    ConfigError."""
    port = text.removeprefix(":")
    try:
        return HostPort.parse(f"{default_host}:{port}" if port.isdecimal() else text)
    except ValueError:
        is_port = port.isdecimal() and int(port) > 65535
        why = "a port is at most 65535" if is_port else "it is no HOST:PORT"
        raise ConfigError(
            f"cannot listen at {text!r}: {why}", advice="write it as 127.0.0.1:9300"
        ) from None


def addresses_of(place: HostPort) -> list[tuple[socket.AddressFamily, str]]:
    """Raises ConfigError."""
    try:
        found = socket.getaddrinfo(
            place.host, place.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "that is no name of a host"
        raise ConfigError(f"cannot listen at {place}: {why}") from None
    return list(dict.fromkeys((each[0], str(each[4][0])) for each in found))


def is_local(place: HostPort) -> bool:
    """Whether only processes of this machine can reach an endpoint. Raises ConfigError."""
    addresses = (address.partition("%")[0] for _, address in addresses_of(place))
    return all(ip_address(address).is_loopback for address in addresses)


def listen(place: HostPort) -> list[socket.socket]:
    """Listen at all addresses of a host, on one port.

    Addresses that this machine lacks, such as IPv6, are left out, unless all are. Raises
    ConflictError if another program listens there, ConfigError.
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
    """Raises OSError."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:  # `::` stands for all addresses of both kinds
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address != "::"))
    made.bind((address, port))
    made.listen(BACKLOG)


def _refused(place: HostPort, error: OSError) -> ConfigError | ConflictError:
    text = f"cannot listen at {place}: {error.strerror}"
    if error.errno == errno.EADDRINUSE:
        return ConflictError(
            text, advice="another program listens there, or a server that is still running"
        )
    return ConfigError(text)
