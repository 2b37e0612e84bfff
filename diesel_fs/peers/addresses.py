"""Where a master listens to other masters, and where it says that it does.

Owned here: what `--listen` and `--advertise` mean, and what is taken where they say nothing: never
all interfaces, and never an address that other nodes do not reach. Not owned: binding
(`daemon.py`), what an address looks like when it is registered (`membership.py`). Blocks where a
name has to be looked up.

Where there are several nodes, a name that is this machine alone is refused: Debian gives a
machine's own name such an address. Who writes the address itself may mean it, for nodes that are
all on one machine, and is warned, but where `--peers` says so of all of them.
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
    """The address (not a name) and port to bind; port 0 for any. Raises UsageError, also where
    other nodes would not find this one, which may be a warning (see the module).

    Where nothing is said: the address that `peers` have for this rank; of a node that is alone
    loopback; else the address by which this machine reaches what all nodes have in common, a server
    or Redis.
    """
    found = _choose_listen_address(listen, advertise, rank, world, peers, url)
    if world > 1:
        _look_from_outside(advertise, found[0], peers)
    return found


def _choose_listen_address(
    listen: str, advertise: str, rank: int, world: int, peers: Sequence[str], url: RepositoryUrl
) -> HostPort:
    if listen:
        return _given(listen, advertise, world)
    if peers:
        if rank >= len(peers):
            raise UsageError(f"--peers names {len(peers)} nodes, and this is node {rank}")
        return _given(peers[rank], advertise, world)
    if world == 1:
        return _own_loopback(), 0
    for place in _common(url):
        found = _our_address(place)
        if found and not ipaddress.ip_address(found.partition("%")[0]).is_loopback:
            return found, 0
    raise UsageError(
        f"at which address do the {world} nodes reach this one?", advice="say --listen ADDRESS:0"
    )


def advertised_address(advertise: str, host: str, port: int) -> str:
    """What is registered of a master that is bound to `host` and `port`. Raises UsageError."""
    if advertise:
        match = _HOST_PORT.fullmatch(advertise)
        if match is not None and int(match["port"]):
            return advertise
        host = _host_in(advertise)
    elif _is_any(host):
        raise UsageError(
            f"at which address do other nodes reach one that listens on {host}?",
            advice="say --advertise HOST",
        )
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _given(listen: str, advertise: str, world: int) -> HostPort:
    match = _HOST_PORT.fullmatch(listen)
    if match is None or int(match["port"]) >= 1 << 16:
        raise UsageError(f"bad address {listen!r} to listen on", advice="write it as HOST:PORT")
    host, port = match["host"].strip("[]"), int(match["port"])
    if _is_address(host):
        if _is_any(host) and world > 1 and not advertise:
            advertised_address("", host, port)  # says what is missing
        return host, port
    found = _looked_up(host, f"--listen {listen}")
    reached = [each for each in found if not _is_loopback(each)]
    if not reached and world > 1:
        raise _loopback_error(host, found[0], "--listen ADDRESS:PORT")
    return (reached or found)[0], port


def _look_from_outside(advertise: str, host: str, peers: Sequence[str]) -> None:
    """Raises UsageError where no other node finds this one; warns where none of another machine
    does."""
    announced = _host_in(advertise) if advertise else host
    if not _is_address(announced):
        try:
            found = _looked_up(announced, f"--advertise {advertise}")
        except UsageError as error:  # others may know more names than this machine
            log.warning("%s: other nodes have to know it", error.message)
            return
        if all(map(_is_loopback, found)):
            raise _loopback_error(announced, found[0], "--advertise ADDRESS")
    elif _is_loopback(announced) and not (
        peers and all(_is_loopback(_host_in(each)) for each in peers)
    ):
        log.warning(
            "%s is this machine alone: nodes on others do not reach this one; where there are any,"
            " say --listen ADDRESS:PORT, or --advertise ADDRESS", announced,
        )  # fmt: skip


def _loopback_error(name: str, address: str, option: str) -> UsageError:
    return UsageError(
        f"{name} is {address} on this machine, which no other node reaches", advice=f"say {option}"
    )


def _looked_up(host: str, option: str) -> list[str]:
    """The addresses of a name, one at least. Raises UsageError."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # the latter: no name is like this
        raise UsageError(f"{option}: {host} has no address ({error})") from None
    return [str(each[4][0]) for each in found]


def _own_loopback() -> str:
    """Loopback, as an address that another machine does not give itself: nodes that are alone, each
    of them rank 0 of one task, are told apart by it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return "127.0.0.1"
    second, third, fourth, *_ = hashlib.sha256(boot).digest()
    return f"127.{second}.{third}.{1 + fourth % 254}"


def _host_in(place: str) -> str:
    """Without a port, and without brackets."""
    match = _HOST_PORT.fullmatch(place)
    return (place if match is None else match["host"]).strip("[]")


def _common(url: RepositoryUrl) -> list[HostPort]:
    """What all nodes of a task reach."""
    if url.scheme in SERVER_SCHEMES:
        return [(each.host, each.port) for each in servers_of(url)]
    return list(parse_redis_url(url.meta).hosts) if url.meta else []


def _our_address(place: HostPort) -> str:
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


def _is_loopback(host: str) -> bool:
    """Of an address, not a name."""
    return _is_address(host) and ipaddress.ip_address(host.partition("%")[0]).is_loopback
