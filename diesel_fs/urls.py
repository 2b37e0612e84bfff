"""URLs of repositories: parses each form, and shows a URL without its password. Also HOST:PORT.

    file:///folder                       a folder; its metadata beside the chunks (SQLite)
    file:///folder?meta=redis://host     a folder; its metadata in Redis
    s3://bucket/prefix?meta=...          an object store (gs://, az:// likewise)
    diesel://host:port                   a server (diesel+tls:// encrypted)

`str` and `repr` of a URL omit its password; `full_url`, which is passed to other processes of
DIESEL-FS, contains it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from .errors import ConfigError

CLOUD_SCHEMES = ("s3", "gs", "az")
SERVER_SCHEMES = ("diesel", "diesel+tls")

_SECRET = re.compile(
    r"(?<=://)(?:[^/?#@]*@(?:[^/?#@\s]*@)*"
    r"|(?::|[^\[/?#@\s:][^/?#@\s]{0,128}:(?!\d{1,5}[/?#,]))[^\s@\"']{0,2048}@(?:[^/?#@\s\"']*@)*)"
)
"""User and password: the text between `://` and `@`. A password may hold an `@`, or by mistake an
unescaped `/`, `?` or `#`; digits after the first colon then show whether they are a port."""


def shown_url(text: str) -> str:
    """Replace the user and password of each URL by `***`."""
    return _SECRET.sub("***@", text)


def passwords_in(text: str) -> Iterator[str]:
    """The passwords in the URLs of a text, as written and unescaped."""
    for match in _SECRET.finditer(text):
        password = match.group()[:-1].partition(":")[2]
        yield from filter(None, dict.fromkeys((password, unquote(password))))


class HostPort(NamedTuple):
    """`host` has no brackets; `str` puts them around an IPv6 address."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, default_port: int | None = None) -> Self:
        """HOST alone needs a default port. Raises ValueError."""
        parts = urlsplit(f"//{text}")
        port = default_port if parts.port is None else parts.port
        if not parts.hostname or port is None or parts.netloc != text or "@" in text:
            raise ValueError(f"{text!r} is not HOST:PORT")
        return cls(parts.hostname, port)


@dataclass(frozen=True, slots=True, repr=False)
class RepositoryUrl:
    """`path` is set for the scheme `file`; for others `host` is the bucket, or the server's
    address. `prefix` is that of the repository's keys in the bucket, without slashes around it."""

    scheme: str
    path: Path = Path()
    host: str = ""
    prefix: str = ""
    meta: str = ""  # the URL of the metadata store; empty: SQLite beside the chunks

    @property
    def objects_url(self) -> str:
        """Omits the metadata store."""
        if self.scheme == "file":
            return self.path.as_uri()
        return f"{self.scheme}://{self.host}" + (f"/{quote(self.prefix)}" if self.prefix else "")

    @property
    def full_url(self) -> str:
        """Contains the password."""
        return (
            f"{self.objects_url}?meta={quote(self.meta, safe=':/@,')}"
            if self.meta
            else self.objects_url
        )

    def __str__(self) -> str:
        objects = shown_url(self.objects_url)
        return f"{objects}?meta={shown_url(self.meta)}" if self.meta else objects

    def __repr__(self) -> str:
        return f"RepositoryUrl({self!s})"


def parse_url(text: str) -> RepositoryUrl:
    """Raises ConfigError."""
    shown = repr(shown_url(text))
    if "://" not in text:
        shown = repr(shown_url(f"://{text}")[3:])
        raise ConfigError(f"bad repository URL {shown}", advice="write it as file:///folder")
    if "#" in text:  # `urlsplit` would cut the path off there, and another folder would be opened
        raise ConfigError(f"bad repository URL {shown}", advice="write # as %23")
    try:
        parts = urlsplit(text)
        path = unquote(parts.path, errors="strict")  # SQLite opens only paths that are text
    except ValueError as error:
        reason = "its host is malformed" if "@" in str(error) else error
        raise ConfigError(f"bad repository URL {shown}: {reason}") from None
    if "\0" in path:
        raise ConfigError(f"bad repository URL {shown}: no path holds a NUL byte")
    with_plus = parts.query.replace("+", "%2B")  # `parse_qsl` reads the + in redis+cluster as space
    query = dict(parse_qsl(with_plus, keep_blank_values=True))
    if unknown := sorted(set(query) - {"meta"}):
        name = "" if "@" in parts.query else f" {unknown[0]!r}"  # perhaps half of a password
        raise ConfigError(
            f"bad repository URL: unknown parameter{name}",
            advice="in the URL behind ?meta= write & as %26",
        )
    meta = query.get("meta", "")
    if meta and "://" not in meta:
        raise ConfigError(
            "bad repository URL: ?meta= is no URL", advice="write ?meta=redis://host:6379"
        )
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise ConfigError(
                f"bad repository URL {shown}", advice="a file:// URL has three slashes: file:///x"
            )
        return RepositoryUrl("file", path=Path(path), meta=meta)
    if parts.scheme in CLOUD_SCHEMES:
        if not parts.netloc or "@" in parts.netloc:
            raise ConfigError(
                f"bad repository URL {shown}: no bucket",
                advice=f"write {parts.scheme}://bucket/prefix; keys belong into the environment",
            )
        prefix = path.strip("/")
        if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
            raise ConfigError(f"bad repository URL {shown}: a prefix has no empty or dotted parts")
        return RepositoryUrl(parts.scheme, host=parts.netloc, prefix=prefix, meta=meta)
    if parts.scheme in SERVER_SCHEMES:
        if not parts.netloc or "@" in parts.netloc or path.strip("/") or meta:
            raise ConfigError(
                f"bad repository URL {shown}", advice=f"write {parts.scheme}://host:port"
            )
        return RepositoryUrl(parts.scheme, host=parts.netloc)
    known = ", ".join(["file", *CLOUD_SCHEMES, *SERVER_SCHEMES])
    raise ConfigError(
        f"bad repository URL: unknown scheme {parts.scheme!r}", advice=f"known are {known}"
    )
