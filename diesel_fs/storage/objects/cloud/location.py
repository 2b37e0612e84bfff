"""Parses the URL of a bucket, and finds the endpoint and the credentials for it. Any thread.

Endpoint, region and credentials are those that the vendors' own tools would use: the environment
first, then the profile in `~/.aws`. botocore reads the profile; it is imported only then, which
takes 0.2 s. Plain http is used only if the endpoint's own URL says so. The client library, obstore,
itself fetches credentials of instance and container roles. Nothing is cached.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, cast
from urllib.parse import urlsplit

from ....errors import ConfigError, ObjectStoreRefused
from ....urls import CLOUD_SCHEMES, RepositoryUrl, parse_url
from ..retry import AttemptFailed

Scheme = Literal["s3", "gs", "az"]

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,220}[A-Za-z0-9]")
# Characters that every store and obstore take without encoding them.
_COMPONENT = re.compile(r"[A-Za-z0-9!_.*'()=+@,: -]{1,128}")
_PREFIX_CHARS_MAX = 512  # a key has at most 1,024 bytes, and names of objects have some 100
_RENEWED_S = 60  # credentials are read again this long before they end

_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
# With any of these obstore finds credentials by itself.
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
        return f"{self.prefix}/{name}" if self.prefix else name


@dataclass(frozen=True, slots=True)
class BucketAccess:
    """`options` holds secrets, so it is in no repr and no message. `is_over` returns whether the
    credentials end soon: `resolve_access` then finds new ones."""

    host: str
    plain_http: bool
    options: Mapping[str, str] = field(repr=False)
    is_over: Callable[[], bool] = field(default=lambda: False, repr=False, compare=False)


def parse_bucket_url(url: str) -> BucketLocation:
    """Parse `s3://bucket/prefix`, `gs://...` or `az://container/...`. Raises ConfigError; its
    message repeats only parts of the URL that cannot be secret."""
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
    """The place of objects that other programs have put into a bucket: any keys are allowed. Raises
    ConfigError."""
    if url.scheme not in CLOUD_SCHEMES or url.meta:
        raise ConfigError(f"{url}: not the URL of a bucket", advice="s3://, gs:// or az://")
    if not _BUCKET.fullmatch(url.host):
        raise ConfigError(f"{url.scheme}://: {url.host!r} is not the name of a bucket")
    return BucketLocation(cast("Scheme", url.scheme), url.host, url.prefix)


def resolve_access(location: BucketLocation, environ: Mapping[str, str]) -> BucketAccess:
    """The endpoint and the credentials that now apply. Raises ConfigError; ObjectStoreRefused if
    the profile gives no credentials; AttemptFailed if the server that gives out credentials cannot
    be reached."""
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
    endpoint = (
        environ.get("AWS_ENDPOINT_URL_S3")
        or environ.get("AWS_ENDPOINT_URL")
        or environ.get("AWS_ENDPOINT", "")
    )
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION", "")
    keys: Mapping[str, str] = {n.lower()[4:]: environ[n] for n in _KEYS if environ.get(n)}
    has_credentials = bool(keys) or any(map(environ.get, _OTHER_CREDENTIALS))
    is_over: Callable[[], bool] = lambda: False  # noqa: E731
    if not (endpoint and region and has_credentials) and any(map(os.path.isfile, _files(environ))):
        profile = _profile(environ, credentials=not has_credentials)
        endpoint = endpoint or profile.endpoint
        region = region or profile.region
        if not has_credentials:
            keys, is_over = profile.keys, profile.is_over
    options = {"region": region or "us-east-1", **keys}
    if not endpoint:
        return BucketAccess(f"s3.{options['region']}.amazonaws.com", False, options, is_over)
    host, plain_http = _parse_endpoint(endpoint)
    options["endpoint"] = endpoint.rstrip("/")
    return BucketAccess(host, plain_http, options, is_over)


def _parse_endpoint(endpoint: str) -> tuple[str, bool]:
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


def _files(environ: Mapping[str, str]) -> tuple[str, str]:
    folder = os.path.join(environ.get("HOME", ""), ".aws")
    config = environ.get("AWS_CONFIG_FILE") or os.path.join(folder, "config")
    credentials = environ.get("AWS_SHARED_CREDENTIALS_FILE") or os.path.join(folder, "credentials")
    return os.path.expanduser(config), os.path.expanduser(credentials)


@dataclass(frozen=True, slots=True)
class _Profile:
    """A profile in `~/.aws`; absent settings are empty."""

    endpoint: str = ""
    region: str = ""
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    is_over: Callable[[], bool] = lambda: False


def _profile(environ: Mapping[str, str], *, credentials: bool) -> _Profile:
    """Raises as `resolve_access`; no message repeats a line of a file, which may be secret."""
    import botocore.session  # noqa: PLC0415  # the module's docstring says why
    from botocore.exceptions import (  # noqa: PLC0415
        BotoCoreError,
        ClientError,
        ConfigParseError,
        HTTPClientError,
    )
    from botocore.exceptions import ConnectionError as NoConnection  # noqa: PLC0415

    name = environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE")
    config, secrets = _files(environ)
    session = botocore.session.Session(profile=name)
    session.set_config_variable("config_file", config)
    session.set_config_variable("credentials_file", secrets)
    try:
        for role in ("container-role", "iam-role"):
            session.get_component("credential_provider").remove(role)
        settings = session.get_scoped_config()
        services = session.full_config.get("services", {}).get(settings.get("services", ""), {})
        endpoint = services.get("s3", {}).get("endpoint_url") or settings.get("endpoint_url", "")
        region = settings.get("region", "")
        found = session.get_credentials() if credentials else None
        if found is None:
            return _Profile(endpoint, region)
        frozen = found.get_frozen_credentials()
    except ConfigParseError:
        raise ConfigError(
            f"cannot read {config} or {secrets}", advice="see the AWS command line's manual"
        ) from None
    except (NoConnection, HTTPClientError) as error:
        raise AttemptFailed(
            f"no credentials for S3: {type(error).__name__} at {error.kwargs.get('endpoint_url')}"
        ) from None
    except (BotoCoreError, ClientError, OSError, ValueError, KeyError) as error:
        what = f" of the profile {name}" if name else ""
        reason = type(error).__name__ if isinstance(error, ValueError | KeyError) else f"{error}"
        raise ObjectStoreRefused(
            f"no credentials for S3{what}: {reason.splitlines()[0].rstrip(' .:')}",
            advice=f"check {config}, with `aws s3 ls`",
        ) from None
    keys = {
        "access_key_id": frozen.access_key,
        "secret_access_key": frozen.secret_key,
        **({"session_token": frozen.token} if frozen.token else {}),
    }
    refresh_needed = getattr(found, "refresh_needed", None)
    if refresh_needed is None:
        return _Profile(endpoint, region, keys)
    return _Profile(endpoint, region, keys, lambda: bool(refresh_needed(_RENEWED_S)))
