"""Parses the URL of a Redis, and finds the user and password for it.

    redis://host:port/db           rediss:// the same with TLS
    unix:///path/of/socket?db=0
    redis+sentinel://host:port,host:port/service/db          (rediss+sentinel://)
    redis+cluster://host:port,host:port                      (rediss+cluster://)

`?ca=FILE` has the certificates to trust, `?cert=FILE&key=FILE` are the client's own. The user is in
`DIESEL_REDIS_USER`, the password in `DIESEL_REDIS_PASSWORD` or the file
`DIESEL_REDIS_PASSWORD_FILE`, which others must not be able to read;
`DIESEL_REDIS_SENTINEL_PASSWORD` is for the sentinels. A user and password in the URL take
precedence, but everybody on the machine can read a command line. Neither is ever printed.

redis-py's own URLs know no sentinels and no clusters, and its errors repeat the password.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from ....errors import ConfigError
from ....settings import KEY_FILE_BYTES_MAX, private_bytes
from ....urls import HostPort

PORT = 6379
SENTINEL_PORT = 26379
_OPTIONS = {"ca", "cert", "key", "db"}


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """The address of a Redis, of its sentinels, or of some nodes of a cluster."""

    kind: str  # "redis", "sentinel" or "cluster"
    hosts: Sequence[HostPort]
    socket: str = ""
    database: int = 0
    service: str = ""  # the sentinels' name for it
    tls: bool = False
    ca: str = ""
    certificate: str = ""
    key: str = ""
    user: str = ""
    password: str = field(default="", repr=False)
    sentinel_password: str = field(default="", repr=False)

    def __str__(self) -> str:
        """Without user and password."""
        hosts = ",".join(map(str, self.hosts))
        return self.socket or (f"{self.service} by {hosts}" if self.service else hosts)

    @property
    def local(self) -> bool:
        return all(_is_loopback(host) for host, _ in self.hosts)


def parse_redis_url(url: str, environment: Mapping[str, str] | None = None) -> RedisAddress:
    """The address in a URL, with the user and password from the URL or `environment`. Raises
    ConfigError, without the URL in its message, and PermissionDenied for a password file that
    others may read."""
    env = os.environ if environment is None else environment
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError("the URL of the metadata store is malformed") from None
    scheme, _, kind = parts.scheme.partition("+")
    if scheme not in ("redis", "rediss", "unix") or kind not in ("", "sentinel", "cluster"):
        raise ConfigError(
            f"no metadata store has a URL that starts with {parts.scheme!r}",
            advice="use redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://",
        )
    options = dict(parse_qsl(parts.query))
    if options.keys() - _OPTIONS:  # not repeated: may be half of a password
        raise ConfigError(
            f"a Redis URL with an unknown option: there are {', '.join(sorted(_OPTIONS))}",
            advice="in a password, write ? as %3F, # as %23, / as %2F and @ as %40",
        )
    userinfo, _, place = parts.netloc.rpartition("@")
    user, _, password = userinfo.partition(":")
    user, password = unquote(user), unquote(password)
    service, database = _path(parts, kind, options)
    if scheme == "unix" and not parts.path:
        raise ConfigError("a unix:// URL needs the path of a socket")
    return RedisAddress(
        kind=kind or "redis",
        hosts=[] if scheme == "unix" else _hosts(place, kind),
        socket=unquote(parts.path) if scheme == "unix" else "",
        database=database,
        service=service,
        tls=scheme == "rediss",
        ca=options.get("ca", ""),
        certificate=options.get("cert", ""),
        key=options.get("key", ""),
        user=user or env.get("DIESEL_REDIS_USER", ""),
        password=password or _password(env),
        sentinel_password=env.get("DIESEL_REDIS_SENTINEL_PASSWORD", ""),
    )


def _path(parts: SplitResult, kind: str, options: Mapping[str, str]) -> tuple[str, int]:
    words = [] if parts.scheme == "unix" else [word for word in parts.path.split("/") if word]
    service = ""
    if kind == "sentinel":
        if not words:
            raise ConfigError("a sentinel's URL needs the service: redis+sentinel://host/service")
        service = unquote(words.pop(0))
    text = words.pop(0) if words else options.get("db", "0")
    if words or not text.isdecimal() or (kind == "cluster" and text != "0"):
        raise ConfigError("a Redis URL ends with the number of a database; a cluster has only 0")
    return service, int(text)


def _hosts(place: str, kind: str) -> list[HostPort]:
    found = []
    for each in place.split(","):
        try:
            parts = urlsplit(f"//{each}")
            port = parts.port
        except ValueError:
            raise ConfigError("a Redis URL with a malformed host or port") from None
        if not parts.hostname:
            raise ConfigError("a Redis URL without a host")
        default = SENTINEL_PORT if kind == "sentinel" else PORT
        found.append(HostPort(parts.hostname, port or default))
    if len(found) > 1 and not kind:
        raise ConfigError(
            "a Redis URL with several hosts", advice="use redis+sentinel:// or redis+cluster://"
        )
    return found


def _password(env: Mapping[str, str]) -> str:
    if env.get("DIESEL_REDIS_PASSWORD"):
        return env["DIESEL_REDIS_PASSWORD"]
    name = env.get("DIESEL_REDIS_PASSWORD_FILE")
    if not name:
        return ""
    content = private_bytes(Path(name), "the password", KEY_FILE_BYTES_MAX)
    try:
        return content.decode().rstrip("\r\n")
    except ValueError:
        raise ConfigError(f"cannot read the password in {name}: it is not text") from None


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
