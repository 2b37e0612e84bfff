"""The address at which a master listens for other masters, and the address that it gives them.

This module interprets `--listen` and `--advertise`. Without them it chooses an address that other
nodes reach: never all interfaces. It does not bind (`daemon.py`). Calls block where a name has to
be looked up.

With several nodes, a name that leads back to this machine alone is refused: Debian gives a
machine's own name such an address. An explicit loopback address is accepted, as all nodes may be on
one machine, with a warning unless all `--peers` have such addresses.
"""

import hashlib
import ipaddress
import logging
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from ..errors import UsageError
from ..net.client_connection import parse_addresses as servers_of
from ..storage.metadata.redis.address import parse_redis_url
from ..urls import SERVER_SCHEMES, RepositoryUrl

log = logging.getLogger("diesel.task")

_HOST_PORT = re.compile(r"(?P<host>\[[^\]]+\]|[^:\[\]]+):(?P<port>[0-9]{1,5})", re.ASCII)

HostPort = tuple[str, int]


def listen_address(
    listen: str, advertise: str, *, rank: int, world: int, peers: Sequence[str], url: RepositoryUrl
) -> HostPort:
    """The address (not a name) and port to bind; port 0 means any.

    Without `listen` it is the address that `peers` has for this rank. Without `peers` it is
    loopback where this is the only node, else the address by which this machine reaches the server
    or Redis. Raises UsageError for a bad address, and where other nodes could not reach this one;
    some of these cases are warnings only (see the module).
    """
    found = _choose_listen_address(listen, advertise, rank, world, peers, url)
    if world > 1:
        _check_reachable(advertise, found[0], peers)
    return found


def _choose_listen_address(
    listen: str, advertise: str, rank: int, world: int, peers: Sequence[str], url: RepositoryUrl
) -> HostPort:
    """As `listen_address`, without the check that other nodes reach it."""
    if listen:
        return _parse_listen(listen, advertise, world)
    if peers:
        if rank >= len(peers):
            raise UsageError(f"--peers names {len(peers)} nodes, and this is node {rank}")
        return _parse_listen(peers[rank], advertise, world)
    if world == 1:
        return _own_loopback(), 0
    for endpoint in _shared_endpoints(url):
        found = _source_address(endpoint)
        if found and not ipaddress.ip_address(found.partition("%")[0]).is_loopback:
            return found, 0
    raise UsageError(
        f"no address is known at which the {world} nodes reach this one",
        advice="say --listen ADDRESS:0",
    )


def advertised_address(advertise: str, host: str, port: int) -> str:
    """The address to register for a master that is bound to `host` and `port`. Raises
    UsageError."""
    if advertise:
        match = _HOST_PORT.fullmatch(advertise)
        if match is not None and int(match["port"]):
            return advertise
        host = _host_in(advertise)
    elif _is_any(host):
        raise UsageError(
            f"{host} means all interfaces of this machine: other nodes need one address",
            advice="say --advertise HOST",
        )
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _parse_listen(listen: str, advertise: str, world: int) -> HostPort:
    """The address and port in `listen`, whose host may be a name. Raises UsageError."""
    match = _HOST_PORT.fullmatch(listen)
    if match is None or int(match["port"]) >= 1 << 16:
        raise UsageError(f"bad address {listen!r} to listen on", advice="write it as HOST:PORT")
    host, port = match["host"].strip("[]"), int(match["port"])
    if _is_address(host):
        if _is_any(host) and world > 1 and not advertise:
            advertised_address("", host, port)  # its error says what is missing
        return host, port
    found = _looked_up(host, f"--listen {listen}")
    reached = [each for each in found if not _is_loopback(each)]
    if not reached and world > 1:
        raise _loopback_error(host, found[0], "--listen ADDRESS:PORT")
    return (reached or found)[0], port


def _check_reachable(advertise: str, host: str, peers: Sequence[str]) -> None:
    """Raises UsageError where no other node can reach this one; warns where only nodes on this
    machine can."""
    announced = _host_in(advertise) if advertise else host
    if not _is_address(announced):
        try:
            found = _looked_up(announced, f"--advertise {advertise}")
        except UsageError as error:  # other nodes may know names that this machine does not
            log.warning("%s: the other nodes must be able to resolve it", error.message)
            return
        if all(map(_is_loopback, found)):
            raise _loopback_error(announced, found[0], "--advertise ADDRESS")
    elif _is_loopback(announced) and not (
        peers and all(_is_loopback(_host_in(each)) for each in peers)
    ):
        log.warning(
            "%s is this machine alone: nodes on other machines cannot reach this one; if there are"
            " any, say --listen ADDRESS:PORT, or --advertise ADDRESS", announced,
        )  # fmt: skip


def _loopback_error(name: str, address: str, option: str) -> UsageError:
    return UsageError(
        f"{name} is {address} on this machine, which no other node reaches", advice=f"say {option}"
    )


def _looked_up(host: str, option: str) -> list[str]:
    """The addresses of a name, at least one. Raises UsageError."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: not a valid name
        raise UsageError(f"{option}: {host} has no address ({error})") from None
    return [str(each[4][0]) for each in found]


def _own_loopback() -> str:
    """A loopback address that differs between machines. Nodes that run alone are all rank 0 of one
    task; by this address they are told apart."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return "127.0.0.1"
    second, third, fourth, *_ = hashlib.sha256(boot).digest()
    return f"127.{second}.{third}.{1 + fourth % 254}"


def _host_in(endpoint: str) -> str:
    """The host of an address, without port and brackets."""
    match = _HOST_PORT.fullmatch(endpoint)
    return (endpoint if match is None else match["host"]).strip("[]")


def _shared_endpoints(url: RepositoryUrl) -> list[HostPort]:
    """The addresses that all nodes of a task reach: of the servers, or of Redis."""
    if url.scheme in SERVER_SCHEMES:
        return [(each.host, each.port) for each in servers_of(url)]
    return list(parse_redis_url(url.meta).hosts) if url.meta else []


def _source_address(endpoint: HostPort) -> str:
    """The address of this machine's end of a connection to an endpoint. Nothing is sent."""
    try:
        found = socket.getaddrinfo(*endpoint, type=socket.SOCK_DGRAM)
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


def _is_loopback(host: str) -> bool:
    """Whether an address, not a name, is loopback."""
    return _is_address(host) and ipaddress.ip_address(host.partition("%")[0]).is_loopback
