"""Lists and reads objects that others have put into an S3 bucket, under any key.

obstore (`requests.py`) treats keys as paths: it removes a final slash, and lists nothing of a page
that has a key like `a//b`. So this module uses botocore, which also knows everything in `~/.aws`:
profiles, SSO, roles, programs that print credentials. `retry.py` repeats requests. Any thread; a
fork is allowed.
"""

import os
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Protocol, TypeVar, cast

import botocore.session
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004  # botocore's own
    HTTPClientError,
    SSLError,
)

from ....errors import DieselError, ObjectStoreRefused
from ....names import shown
from ..retry import AttemptFailed, retry_after_s
from .answers import (
    AttemptLimits,
    BrokenBody,
    CloudObject,
    PermanentStoreError,
    RangeNotSatisfiable,
    meaning_of_status,
)
from .location import BucketLocation

Item = TypeVar("Item")

REQUESTS_MAX = 64
_READ_BYTES = 256 << 10
_NO_ANSWER = (ConnectionError, HTTPClientError)
_YES = ("1", "true", "yes", "on")


class _Client(Protocol):
    def list_objects_v2(self, **fields: object) -> Mapping[str, object]: ...
    def head_object(self, **fields: object) -> Mapping[str, object]: ...
    def get_object(self, **fields: object) -> Mapping[str, object]: ...


class _Stream(Protocol):
    def read(self, size: int) -> bytes: ...
    def close(self) -> None: ...


class S3Source:
    """Nothing is sent and no credential is read before the first request."""

    def __init__(self, location: BucketLocation, limits: AttemptLimits | None = None) -> None:
        self.location = location
        self.limits = limits or AttemptLimits()
        self._host = "S3"

    def pages(self, prefix: str, after: str) -> Iterator[list[CloudObject]]:
        token: dict[str, object] = {"StartAfter": after} if after else {}
        while True:
            found = self._send("list", prefix, lambda client, token=token: client.list_objects_v2(  # type: ignore[misc]  # mypy infers no lambda with defaults
                Bucket=self.location.bucket, Prefix=prefix, MaxKeys=self.limits.page_keys, **token
            ))  # fmt: skip
            objects = cast("list[Mapping[str, object]]", found.get("Contents", []))
            if objects:
                yield [_object(cast("str", each["Key"]), "Size", each) for each in objects]
            if not found.get("IsTruncated") or not found.get("NextContinuationToken"):
                return
            token = {"ContinuationToken": found["NextContinuationToken"]}

    def head(self, key: str) -> CloudObject:
        """Raises ObjectMissing (also for a missing bucket)."""
        found = self._send(
            "stat", key,
            lambda client: client.head_object(Bucket=self.location.bucket, Key=key),
        )  # fmt: skip
        return _object(key, "ContentLength", found)

    @contextmanager
    def open(self, key: str, start: int, end: int, etag: str | None) -> Iterator["_Body"]:
        """Raises as `CloudRequests.open`, and ObjectArchived."""
        fields = {"Range": f"bytes={start}-{end - 1}", **({"IfMatch": etag} if etag else {})}
        found = self._send("read", key, lambda client: client.get_object(
            Bucket=self.location.bucket, Key=key, **fields
        ))  # fmt: skip
        body = cast("_Stream", found["Body"])
        try:
            answered = str(found.get("ContentRange", "")).removeprefix("bytes ").partition("/")[0]
            if answered and answered != f"{start}-{end - 1}":
                raise RangeNotSatisfiable(f"{self._at(key)}: it ends before byte {end}")
            if not answered and start:
                raise AttemptFailed(f"{self._at(key)}: the answer is of another range")
            yield _Body(body, self._at(key), self.limits)
        finally:
            body.close()

    # How a request is sent

    @cached_property
    def _client(self) -> _Client:
        """Has the settings of the environment and of `~/.aws`; repeats nothing."""
        environ, limits = os.environ, self.limits
        session = botocore.session.get_session()
        style = "virtual" if _is_set("AWS_VIRTUAL_HOSTED_STYLE_REQUEST") else "auto"
        config = Config(
            retries={"total_max_attempts": 1},
            connect_timeout=limits.connect_s,
            read_timeout=limits.stall_s,
            max_pool_connections=REQUESTS_MAX,
            s3={"addressing_style": style},
            **({"signature_version": UNSIGNED} if _is_set("AWS_SKIP_SIGNATURE") else {}),
        )
        client = session.create_client(
            "s3",
            region_name=environ.get("AWS_REGION")
            or session.get_config_variable("region")
            or "us-east-1",
            endpoint_url=environ.get("AWS_ENDPOINT_URL_S3")
            or environ.get("AWS_ENDPOINT_URL")
            or environ.get("AWS_ENDPOINT"),
            verify=_trusted(),
            config=config,
        )
        self._host = client.meta.endpoint_url.partition("://")[2]
        return cast("_Client", client)

    def _send(self, doing: str, key: str, act: Callable[[_Client], Item]) -> Item:
        try:
            return act(self._client)
        except (BotoCoreError, ClientError, ValueError) as error:
            # Without its cause: an address in it may hold a signature.
            raise self._translate_error(doing, key, error) from None

    def _translate_error(self, doing: str, key: str, error: Exception) -> DieselError:
        what = f"{self._at(key)}: cannot {doing}"
        if isinstance(error, ClientError):
            answer = error.response
            code = str(answer.get("Error", {}).get("Code", ""))
            about = answer.get("ResponseMetadata", {})
            status = int(about.get("HTTPStatusCode", 0))
            pause_s = retry_after_s(str(about.get("HTTPHeaders", {}).get("retry-after", "")))
            code = "" if code.isdigit() else code
            what = f"{what}: {code or 'HTTP'} ({status})"
            return meaning_of_status(what, status, code, False, pause_s)
        if isinstance(error, SSLError):
            return PermanentStoreError(f"{what}: its certificate is not trusted")
        if isinstance(error, _NO_ANSWER):
            return AttemptFailed(f"{what}: {_reason(error)}")
        # Other errors arise before a request is sent: from credentials, profiles, settings
        return ObjectStoreRefused(
            f"{what}: {_first_line(error)}",
            advice="check the environment (AWS_...) and ~/.aws/config, with `aws s3 ls`",
        )

    def _at(self, key: str) -> str:
        name = shown(key.encode("utf-8", "surrogateescape"))
        return f"s3://{self.location.bucket}/{name} at {self._host}"


class _Body:
    def __init__(self, stream: _Stream, where: str, limits: AttemptLimits) -> None:
        self._stream = stream
        self._where = where
        self._limits = limits

    def fill(self, view: memoryview, until_s: float) -> None:
        """Fill `view` before the monotonic clock reaches `until_s`. Raises BrokenBody."""
        done = 0
        try:
            while done < len(view):
                piece = self._stream.read(min(len(view) - done, _READ_BYTES))
                if not piece:
                    raise BrokenBody(f"{self._where}: the answer is shorter than it said", done)
                view[done : done + len(piece)] = piece
                done += len(piece)
                if time.monotonic() > until_s and done < len(view):
                    raise BrokenBody(f"{self._where}: the answer takes too long", done)
        except (BotoCoreError, OSError):
            raise BrokenBody(f"{self._where}: the answer broke off", done) from None


def _object(key: str, size: str, found: Mapping[str, object]) -> CloudObject:
    modified = found["LastModified"]
    assert hasattr(modified, "timestamp")
    # Whole seconds: listings have fractions, headers of objects do not
    modified_ns = int(modified.timestamp()) * 10**9
    tag = found.get("ETag")
    return CloudObject(key, cast("int", found[size]), modified_ns, cast("str | None", tag))


def _is_set(name: str) -> bool:
    return os.environ.get(name, "").lower() in _YES


def _trusted() -> str | None:
    """The file of the machine's certificates; None if a variable that botocore reads names
    another."""
    if os.environ.get("AWS_CA_BUNDLE") or os.environ.get("REQUESTS_CA_BUNDLE"):
        return None
    return ssl.get_default_verify_paths().cafile


def _reason(error: BotoCoreError) -> str:
    text = f"{error} {error.kwargs.get('error')}"
    for symptom, reason in (
        ("Connection refused", "connection refused"),
        ("Name or service not known", "no such host"),
        ("Temporary failure in name resolution", "no such host"),
        ("Connect timeout", "cannot connect"),
        ("Read timeout", "no answer in time"),
    ):
        if symptom in text:
            return reason
    return "the connection broke"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(" .:")
