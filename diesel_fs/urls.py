"""Addresses of repositories: what each form means, and how one is shown.

    file:///folder                       a folder; its metadata beside the chunks (SQLite)
    file:///folder?meta=redis://host     a folder; its metadata in Redis
    s3://bucket/prefix?meta=...          an object store (gs://, az:// likewise)
    diesel://host:port                   a server (diesel+tls:// encrypted)

Such a URL may hold a password. Nothing here shows one: `str` and `repr` leave it out; `full_url`,
for processes of our own, has it.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from .errors import ConfigError

CLOUD_SCHEMES = ("s3", "gs", "az")
SERVER_SCHEMES = ("diesel", "diesel+tls")

_SECRET = re.compile(r"(?<=://)([^/?#@]*:)?[^/?#@]*@")
"""User and password at the front of what follows a scheme, up to the @."""


def shown_url(text: str) -> str:
    """A URL of any kind without its user and password."""
    return _SECRET.sub("***@", text)


@dataclass(frozen=True, slots=True, repr=False)
class RepositoryUrl:
    """A parsed repository address.

    `path` is set for `file`; `host` otherwise: the bucket, or the server's address. `prefix` is
    where in the bucket the repository is, without slashes around it.
    """

    scheme: str
    path: Path = Path()
    host: str = ""
    prefix: str = ""
    meta: str = ""  # the URL of the metadata store; empty: the embedded one

    @property
    def objects_url(self) -> str:
        """The address of the objects alone."""
        if self.scheme == "file":
            return self.path.as_uri()
        return f"{self.scheme}://{self.host}" + (f"/{quote(self.prefix)}" if self.prefix else "")

    @property
    def full_url(self) -> str:
        """The address with all that it holds."""
        return (
            f"{self.objects_url}?meta={quote(self.meta, safe=':/@,')}"
            if self.meta
            else self.objects_url
        )

    def __str__(self) -> str:
        place = shown_url(self.objects_url)
        return f"{place}?meta={shown_url(self.meta)}" if self.meta else place

    def __repr__(self) -> str:
        return f"RepositoryUrl({self!s})"


def parse_url(text: str) -> RepositoryUrl:
    """The repository that a URL names. Raises ConfigError for anything but a known form."""
    shown = repr(shown_url(text))
    if "://" not in text:
        raise ConfigError(f"bad repository URL {shown}", advice="write it as file:///folder")
    if "#" in text:  # else what stands behind it would be left out, and another folder opened
        raise ConfigError(f"bad repository URL {shown}", advice="write # as %23")
    try:
        parts = urlsplit(text)
        path = unquote(parts.path, errors="strict")  # SQLite opens no path that is no text
    except ValueError as error:
        raise ConfigError(f"bad repository URL {shown}: {error}") from None
    if "\0" in path:
        raise ConfigError(f"bad repository URL {shown}: no path holds a NUL byte")
    literal = parts.query.replace("+", "%2B")  # redis+cluster, not a form's space
    query = dict(parse_qsl(literal, keep_blank_values=True))
    if unknown := sorted(set(query) - {"meta"}):
        raise ConfigError(
            f"bad repository URL: unknown parameter {unknown[0]!r}",
            advice="in the URL behind ?meta= write & as %26",
        )
    meta = query.get("meta", "")
    if meta and "://" not in meta:
        raise ConfigError(
            f"bad repository URL {shown}: ?meta= is no URL", advice="write ?meta=redis://host:6379"
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
    raise ConfigError(f"bad repository URL: unknown scheme {parts.scheme!r}")
