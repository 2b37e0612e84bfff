"""The address at which a master listens for other masters (`--listen`), and the address that it
gives them (`--advertise`). Calls block if a name has to be looked up.

By default the master listens at the one address by which other nodes reach this machine, never on
all interfaces. In a task of several nodes, a name with only loopback addresses is refused: Debian
gives a machine's own name such an address. An explicit loopback address is accepted, since all
nodes may be on one machine, with a warning unless all `--peers` have such addresses.
"""

import hashlib
import logging
import socket
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from ...errors import UsageError
from ...net.client_connection import parse_addresses as servers_of
from ...storage.metadata.redis.address import parse_redis_url
from ...urls import SERVER_SCHEMES, HostPort, RepositoryUrl, parse_url
from .options import TaskRequest

log = logging.getLogger("diesel.task")


def listen_address(request: TaskRequest, rank: int, world: int) -> HostPort:
    """The address (not a name) to which the master of node `rank` binds its socket; port 0: any.

    It is `listen`, else this rank's address in `peers`, else a loopback address if the task has one
    node, else the address from which this machine reaches the server or Redis. Raises UsageError
    for a bad address, and if other nodes could not reach it (in some cases it only warns)."""
    chosen = _choose_listen_address(request, rank, world)
    if world > 1:
        _check_reachable(request.advertise, chosen.host, request.peers)
    return chosen


def _choose_listen_address(request: TaskRequest, rank: int, world: int) -> HostPort:
    peers = request.peers
    if request.listen:
        return _parse_listen(request.listen, request.advertise, world)
    if peers:
        if rank >= len(peers):
            raise UsageError(f"--peers names {len(peers)} nodes, and this is node {rank}")
        return _parse_listen(peers[rank], request.advertise, world)
    if world == 1:
        return HostPort(_own_loopback(), 0)
    for endpoint in _shared_endpoints(parse_url(request.url)):
        host = _source_address(endpoint)
        if host and not _is_loopback(host):
            return HostPort(host, 0)
    raise UsageError(
        f"no address is known at which the {world} nodes reach this one",
        advice="say --listen ADDRESS:0",
    )


def advertised_address(advertise: str, bound: HostPort) -> str:
    """The host:port for other nodes; the master listens at `bound`. Raises UsageError."""
    if not advertise:
        if _is_any(bound.host):
            raise UsageError(
                f"{bound.host} means all interfaces of this machine: other nodes need one address",
                advice="say --advertise HOST",
            )
        return str(bound)
    given = _parse_advertise(advertise)
    return str(given if given.port else HostPort(given.host, bound.port))


def _parse_advertise(text: str) -> HostPort:
    try:
        return HostPort.parse(text, 0)
    except ValueError:  # an IPv6 address without brackets, or one that `Member` refuses
        return HostPort(text, 0)


def _parse_listen(listen: str, advertise: str, world: int) -> HostPort:
    try:
        given = HostPort.parse(listen)
    except ValueError:
        raise UsageError(
            f"bad address {listen!r} to listen on", advice="write it as HOST:PORT"
        ) from None
    if _address(given.host):
        if _is_any(given.host) and world > 1 and not advertise:
            advertised_address("", given)  # its error names the missing part
        return given
    addresses = _looked_up(given.host, f"--listen {listen}")
    reachable = [each for each in addresses if not _is_loopback(each)]
    if not reachable and world > 1:
        raise _loopback_error(given.host, addresses[0], "--listen ADDRESS:PORT")
    return HostPort((reachable or addresses)[0], given.port)


def _check_reachable(advertise: str, host: str, peers: Sequence[str]) -> None:
    """Raise UsageError if no other node can reach this one; warn if only this machine's can."""
    announced = _parse_advertise(advertise).host if advertise else host
    if not _address(announced):
        try:
            addresses = _looked_up(announced, f"--advertise {advertise}")
        except UsageError as error:  # other nodes may know other names
            log.warning("%s: the other nodes must be able to resolve it", error.message)
            return
        if all(map(_is_loopback, addresses)):
            raise _loopback_error(announced, addresses[0], "--advertise ADDRESS")
    elif _is_loopback(announced) and not (
        peers and all(_is_loopback(_parse_advertise(each).host) for each in peers)
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
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid name
        raise UsageError(f"{option}: {host} has no address ({error})") from None
    return [str(each[4][0]) for each in found]


def _own_loopback() -> str:
    """A loopback address that differs between machines: nodes that run alone on several machines,
    all with rank 0 in a task of one name, can be told apart."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return "127.0.0.1"
    second, third, fourth, *_ = hashlib.sha256(boot).digest()
    return f"127.{second}.{third}.{1 + fourth % 254}"


def _shared_endpoints(url: RepositoryUrl) -> Sequence[HostPort]:
    if url.scheme in SERVER_SCHEMES:
        return servers_of(url)
    return parse_redis_url(url.meta).hosts if url.meta else ()


def _source_address(endpoint: HostPort) -> str:
    """This machine's address on the way to an endpoint; empty if unknown."""
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


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def _is_any(host: str) -> bool:
    address = _address(host)
    return address is not None and address.is_unspecified


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return address is not None and address.is_loopback
