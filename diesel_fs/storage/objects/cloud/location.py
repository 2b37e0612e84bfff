"""Parses the URL of a bucket, and finds the endpoint and the credentials for it.

Endpoint, region and credentials are those that the vendors' own tools would use: the environment
first, then the profile in `~/.aws`. Plain http is used only if the endpoint's own URL says so.
Credentials from the network (instance and container roles) are not read here: the client library
asks for those itself.

Everything is computed again whenever credentials are to be read again; nothing is kept. Any thread.
"""

import re
from collections.abc import Mapping
from configparser import ConfigParser
from configparser import Error as ParseError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast
from urllib.parse import urlsplit

from ....errors import ConfigError
from ....urls import CLOUD_SCHEMES, RepositoryUrl, parse_url

Scheme = Literal["s3", "gs", "az"]

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,220}[A-Za-z0-9]")
# Characters that every vendor's store and the client library take without encoding them.
_COMPONENT = re.compile(r"[A-Za-z0-9!_.*'()=+@,: -]{1,128}")
_PREFIX_CHARS_MAX = 512  # a key has at most 1,024 bytes, and names of objects have some 100
_FILE_BYTES_MAX = 1 << 20

_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
# With any of these variables the client library finds credentials by itself.
_OTHER_CREDENTIALS = (
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_SKIP_SIGNATURE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
)


@dataclass(frozen=True, slots=True)
class BucketLocation:
    """A bucket (Azure: a container), and the prefix of a store's keys in it ("": none)."""

    scheme: Scheme
    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")

    def key(self, name: str) -> str:
        """The key in the bucket of one of the store's objects or folders."""
        return f"{self.prefix}/{name}" if self.prefix else name


@dataclass(frozen=True, slots=True)
class BucketAccess:
    """How to reach a bucket. `options` holds secrets, so it is in no repr and no message."""

    host: str
    plain_http: bool
    options: Mapping[str, str] = field(repr=False)


def parse_bucket_url(url: str) -> BucketLocation:
    """The location that `s3://bucket/prefix`, `gs://...` or `az://container/...` names.

    Raises ConfigError, whose message repeats only parts of the URL that cannot be secret.
    """
    location = source_location(parse_url(url))
    scheme, bucket, prefix = location.scheme, location.bucket, location.prefix
    components = prefix.split("/") if prefix else []
    if len(prefix) > _PREFIX_CHARS_MAX or not all(map(_COMPONENT.fullmatch, components)):
        raise ConfigError(
            f"{scheme}://{bucket}: {prefix[:80]!r} cannot be a prefix",
            advice="letters, digits, spaces and !_.*'()=+@,:- between single slashes",
        )
    return location


def source_location(url: RepositoryUrl) -> BucketLocation:
    """The bucket and the prefix that a URL names, if others have put the objects there: they may
    have any keys. Raises ConfigError."""
    if url.scheme not in CLOUD_SCHEMES or url.meta:
        raise ConfigError(f"{url}: not the URL of a bucket", advice="s3://, gs:// or az://")
    if not _BUCKET.fullmatch(url.host):
        raise ConfigError(f"{url.scheme}://: {url.host!r} is not the name of a bucket")
    return BucketLocation(cast("Scheme", url.scheme), url.host, url.prefix)


def resolve_access(location: BucketLocation, environ: Mapping[str, str]) -> BucketAccess:
    """The endpoint and the credentials that now apply. Raises ConfigError."""
    match location.scheme:
        case "s3":
            return _access_to_s3(environ)
        case "gs":
            return BucketAccess("storage.googleapis.com", False, {})
        case "az":
            account = environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
            endpoint = environ.get("AZURE_STORAGE_ENDPOINT") or environ.get("AZURE_ENDPOINT")
            if endpoint:
                host, plain_http = _parse_endpoint(endpoint)
                return BucketAccess(host, plain_http, {"endpoint": endpoint})
            return BucketAccess(f"{account}.blob.core.windows.net", False, {})


def _access_to_s3(environ: Mapping[str, str]) -> BucketAccess:
    """Endpoint, region and credentials for S3."""
    profile = _profile(environ)
    endpoint = (
        environ.get("AWS_ENDPOINT_URL_S3")
        or environ.get("AWS_ENDPOINT_URL")
        or environ.get("AWS_ENDPOINT")
        or profile.get("endpoint_url", "")
    )
    options = {
        "region": environ.get("AWS_REGION")
        or environ.get("AWS_DEFAULT_REGION")
        or profile.get("region", "us-east-1")
    }
    found: Mapping[str, str] = {n.lower(): environ[n] for n in _KEYS if environ.get(n)}
    if not found and not any(map(environ.get, _OTHER_CREDENTIALS)):
        found = profile
    options |= {name[4:]: found[name] for name in map(str.lower, _KEYS) if name in found}
    if not endpoint:
        return BucketAccess(f"s3.{options['region']}.amazonaws.com", False, options)
    host, plain_http = _parse_endpoint(endpoint)
    return BucketAccess(host, plain_http, {**options, "endpoint": endpoint.rstrip("/")})


def _parse_endpoint(endpoint: str) -> tuple[str, bool]:
    """The host and port of an endpoint's URL, and whether it is plain http."""
    try:
        parts = urlsplit(endpoint)
        host = f"{parts.hostname}:{parts.port}" if parts.port else parts.hostname
    except ValueError:
        raise ConfigError("the object store's endpoint URL is malformed") from None
    if parts.scheme not in ("http", "https") or not host or "@" in parts.netloc:
        raise ConfigError(
            "the object store's endpoint is no http:// or https:// URL",
            advice="AWS_ENDPOINT_URL=https://host:port",
        )
    return host, parts.scheme == "http"


def _profile(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The user's AWS profile, empty if there is none. The file `credentials` wins over `config`."""
    name = environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE") or "default"
    home = environ.get("HOME", "")
    config = environ.get("AWS_CONFIG_FILE") or f"{home}/.aws/config"
    credentials = environ.get("AWS_SHARED_CREDENTIALS_FILE") or f"{home}/.aws/credentials"
    section = name if name == "default" else f"profile {name}"
    return {**_section(Path(config), section), **_section(Path(credentials), name)}


def _section(path: Path, name: str) -> Mapping[str, str]:
    """A section of an AWS configuration file; empty if it does not exist. Raises ConfigError."""
    parser = ConfigParser(interpolation=None, default_section="")
    try:
        with path.open(encoding="utf-8") as file:
            parser.read_string(file.read(_FILE_BYTES_MAX))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return {}
    except (OSError, UnicodeDecodeError, ParseError):  # its text may show a line with a secret
        raise ConfigError(
            f"cannot read {path}", advice="see the AWS command line's manual"
        ) from None
    return dict(parser[name]) if parser.has_section(name) else {}
