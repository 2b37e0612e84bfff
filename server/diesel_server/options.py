"""The server's options. No error or help text shows a value that may hold a password."""

import os
import stat
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ParamSpec

import click

from diesel_fs.errors import ConfigError, DieselError
from diesel_fs.net.endpoints import is_local, parse_endpoint
from diesel_fs.settings import parse_size
from diesel_fs.storage.metadata.redis.address import parse_redis_url
from diesel_fs.urls import SERVER_SCHEMES, HostPort, RepositoryUrl, parse_url

CONFIG_FILE = Path("/etc/diesel/server.toml")
PREFIX = "DIESEL_SERVER"

LISTEN = "127.0.0.1:9300"
LOOPBACK = "127.0.0.1"
WORKERS_MAX = 64

_P = ParamSpec("_P")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    listen: HostPort
    url: RepositoryUrl
    workers: int
    certificate: Path | None = None
    key: Path | None = None
    cache: Path | None = None
    cache_bytes: int = 0
    metrics: HostPort | None = None


def default_workers() -> int:
    return min(4, len(os.sched_getaffinity(0)))


_OPTIONS = (
    click.option("--listen", metavar="HOST:PORT", default=LISTEN, show_default=True,
                 help="Address at which clients connect. Clients of other machines need TLS, or"
                 " --insecure."),
    click.option("--store", metavar="URL", help="Object store of the chunks: file:///..., s3://..."),
    click.option("--meta", metavar="URL",
                 help="Metadata store: redis://...  [default: beside a file:// store]"),
    click.option("--tls-cert", metavar="FILE",
                 help="Certificate of the server with its chain, PEM; needs --tls-key."),
    click.option("--tls-key", metavar="FILE",
                 help="Key of the certificate, PEM; needs --tls-cert."),
    click.option("--workers", type=click.IntRange(1, WORKERS_MAX), metavar="N",
                 default=default_workers, show_default="processors, at most 4",
                 help="Number of processes that serve."),
    click.option("--cache-dir", metavar="DIR",
                 help="Folder on a fast local disk in which chunks are cached; needs --cache-size."
                 "  [default: no disk cache]"),
    click.option("--cache-size", metavar="SIZE",
                 help="How large the folder of --cache-dir may get, as 100G."),
    click.option("--metrics", metavar="[HOST:]PORT",
                 help="Address at which Prometheus gets the metrics; without HOST, only from this"
                 " machine.  [default: no metrics]"),
    click.option("--insecure", is_flag=True,
                 help="Accept clients of other machines without TLS, in a network that you trust."),
)  # fmt: skip


def options(command: Callable[_P, None]) -> Callable[_P, None]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return click.option(
        "--config",
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=_read_file,
        help=f"TOML file with options.  [default: {CONFIG_FILE}, if it exists]",
    )(command)


def _read_file(context: click.Context, _: click.Parameter, value: str | None) -> None:
    """The values in the TOML file become the options' defaults. Raises ConfigError."""
    path = Path(value) if value else CONFIG_FILE
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
    except FileNotFoundError:
        if value is None:
            return
        raise ConfigError(f"there is no file {path}") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not TOML"
        raise ConfigError(f"cannot read {path}: {reason}") from None
    names = {each.name.replace("_", "-"): each for each in context.command.params if each.name}
    known = sorted(names.keys() - {"config", "version", "help"})
    for name, given in values.items():
        if name.replace("_", "-") not in known:
            raise ConfigError(f"{path}: unknown key {name!r}", advice=f"known keys: {known}")
        wanted = {"workers": int, "insecure": bool}.get(name, str)
        if type(given) is not wanted:
            raise ConfigError(f"{path}: the value of {name} must be of type {wanted.__name__}")
    context.default_map = {name.replace("-", "_"): given for name, given in values.items()}


def checked(
    *,
    listen: str,
    store: str | None,
    meta: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    workers: int,
    cache_dir: str | None,
    cache_size: str | None,
    metrics: str | None,
    insecure: bool,
) -> tuple[ServerOptions, list[str]]:
    """Returns also warnings for the operator. Raises ConfigError."""
    endpoint = parse_endpoint(listen)
    url = _repository(store, meta)
    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("--tls-cert and --tls-key belong together")
    if (cache_dir is None) != (cache_size is None):
        raise ConfigError("--cache-dir and --cache-size belong together")
    cache_bytes = 0 if cache_size is None else parse_size(cache_size)
    if cache_dir is not None and not cache_bytes:
        raise ConfigError("--cache-size 0 leaves no cache", advice="leave --cache-dir away")
    key = None if tls_key is None else Path(tls_key)
    warnings = [*_redis_warnings(url), *_key_warnings(key)]
    if tls_cert is None and not is_local(endpoint):
        if not insecure:
            raise ConfigError(
                f"other machines can reach {endpoint}, and there is no TLS",
                advice="use --tls-cert and --tls-key, or --insecure in a network that you trust",
            )
        warnings.append(
            f"connections to {endpoint} are not encrypted: others in the network can read and"
            " change the data"
        )
    return (
        ServerOptions(
            listen=endpoint,
            url=url,
            workers=workers,
            certificate=None if tls_cert is None else Path(tls_cert),
            key=key,
            cache=None if cache_dir is None else Path(cache_dir).absolute(),
            cache_bytes=cache_bytes,
            metrics=None if metrics is None else parse_endpoint(metrics, default_host=LOOPBACK),
        ),
        warnings,
    )


def _repository(store: str | None, meta: str | None) -> RepositoryUrl:
    if not store:
        raise ConfigError("no store is given", advice="--store file:///folder or s3://bucket")
    url = parse_url(store)
    if url.scheme in SERVER_SCHEMES:
        raise ConfigError("--store names another server", advice="--store file:///folder, s3://...")
    if not meta:
        return url
    if url.meta:
        raise ConfigError("--meta and ?meta= in --store both name a metadata store")
    if "://" not in meta:
        raise ConfigError("--meta is not a URL", advice="write it as redis://host:6379")
    return replace(url, meta=meta)


def _redis_warnings(url: RepositoryUrl) -> list[str]:
    if not url.meta:
        return []
    try:
        address = parse_redis_url(url.meta)
    except DieselError as error:
        raise ConfigError(error.message, advice=error.advice) from None
    if address.local or address.password:
        return []
    return [f"the Redis at {address} has no password: anybody who reaches it can change all data"]


def _key_warnings(key: Path | None) -> list[str]:
    """A missing file is reported later, when the key is loaded."""
    with suppress(OSError):
        if key is not None and key.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
            return [
                f"every user of this machine can read or replace the key {key}: run chmod o= on it"
            ]
    return []
