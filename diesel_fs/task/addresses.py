"""Where a master listens to other masters, and where it says that it does.

Owned here: what `--listen` and `--advertise` mean, and what is taken where they say nothing: never
all interfaces, and never an address that other nodes do not reach. Not owned: binding
(`__main__.py`), what an address looks like when it is registered (`membership.py`). Blocks where a
name has to be looked up.
"""

import ipaddress
import re
import socket
from collections.abc import Sequence

from ..errors import UsageError
from ..rpc_connection import addresses as servers_of
from ..storage.redis_address import parse_redis_url
from ..urls import SERVER_SCHEMES, RepositoryUrl

_PLACE = re.compile(r"(?P<host>\[[^\]]+\]|[^:\[\]]+):(?P<port>[0-9]{1,5})", re.ASCII)
_LOOPBACK = "127.0.0.1"

Place = tuple[str, int]


def listening(
    listen: str, advertise: str, *, rank: int, world: int, peers: Sequence[str], url: RepositoryUrl
) -> Place:
    """The address (not a name) and port to bind; port 0 for any. Raises UsageError.

    Where nothing is said: the address that `peers` have for this rank; of a node that is alone
    loopback; else the address by which this machine reaches what all nodes have in common, a server
    or Redis.
    """
    if listen:
        return _given(listen, advertise, world)
    if peers:
        if rank >= len(peers):
            raise UsageError(f"--peers names {len(peers)} nodes, and this is node {rank}")
        return _given(peers[rank], advertise, world)
    if world == 1:
        return _LOOPBACK, 0
    for place in _common(url):
        found = _our_address(place)
        if found and not ipaddress.ip_address(found.partition("%")[0]).is_loopback:
            return found, 0
    raise UsageError(
        f"at which address do the {world} nodes reach this one?", advice="say --listen ADDRESS:0"
    )


def advertised(advertise: str, host: str, port: int) -> str:
    """What is registered of a master that is bound to `host` and `port`. Raises UsageError."""
    if advertise:
        match = _PLACE.fullmatch(advertise)
        if match is not None and int(match["port"]):
            return advertise
        host = match["host"].strip("[]") if match is not None else advertise.strip("[]")
    elif _is_any(host):
        raise UsageError(
            f"at which address do other nodes reach one that listens on {host}?",
            advice="say --advertise HOST",
        )
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _given(listen: str, advertise: str, world: int) -> Place:
    match = _PLACE.fullmatch(listen)
    if match is None or int(match["port"]) >= 1 << 16:
        raise UsageError(f"bad address {listen!r} to listen on", advice="write it as HOST:PORT")
    host, port = match["host"].strip("[]"), int(match["port"])
    if _is_address(host):
        if _is_any(host) and world > 1 and not advertise:
            advertised("", host, port)  # says what is missing
        return host, port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"--listen {listen}: {host} has no address ({error})") from None
    addresses = [str(each[4][0]) for each in found]
    reached = [each for each in addresses if not _is_loopback(each)]
    if not reached and world > 1:
        raise UsageError(
            f"{host} is {addresses[0]} on this machine, which no other node reaches",
            advice="say --listen ADDRESS:PORT",
        )
    return (reached or addresses)[0], port


def _common(url: RepositoryUrl) -> list[Place]:
    """What all nodes of a task reach."""
    if url.scheme in SERVER_SCHEMES:
        return [(each.host, each.port) for each in servers_of(url)]
    return list(parse_redis_url(url.meta).hosts) if url.meta else []


def _our_address(place: Place) -> str:
    """Our end of the way to a place; nothing is sent."""
    try:
        found = socket.getaddrinfo(*place, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _is_any(host: str) -> bool:
    return _is_address(host) and ipaddress.ip_address(host.partition("%")[0]).is_unspecified


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
