"""Single requests to a bucket (S3, Google, Azure) through the library `obstore`, by key.

Only this module knows obstore. It bounds the time of each request, and the number that a process
has under way over all stores (an upload in parts counts as one): 2,000 readers at the start of a
task must not need 2,000 sockets. `retry.py` repeats requests; obstore does not. It follows a
redirect of a GET, without our signature if the host changes, and never from https to http; it does
not follow one of a PUT.

Two things have no bound: a listing of empty pages that promise more, and ^C, which takes effect
when the request ends.

Any thread; all threads share one client for each time limit. obstore's runtime (tokio; the first
request starts its threads) does not survive in a forked child: every request there would hang for
ever, even with a new client (obstore 0.12.1, measured). So a request raises at once
(`check_process`) if a process that this one was forked from has sent one.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar, cast

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, InvalidPathError
from obstore.store import AzureStore, GCSStore, S3Store

from ....errors import (
    DieselError,
    ObjectMissing,
    ObjectStoreRefused,
)
from ....format.entries import Bytes
from ....names import shown
from ....system.vectored_io import byte_views
from ..retry import AttemptFailed
from .answers import (
    AttemptLimits,
    BrokenBody,
    CloudObject,
    ExpiredCredentials,
    PermanentStoreError,
    meaning_of_status,
)
from .location import BucketAccess, BucketLocation, resolve_access

if TYPE_CHECKING:  # the library has these names for type checkers alone
    from obstore import GetOptions, GetResult, ListStream, ObjectMeta
    from obstore.store import AzureConfig, ClientConfig, RetryConfig, S3Config

Item = TypeVar("Item")
_Client = S3Store | GCSStore | AzureStore

REQUESTS_MAX = 64
"""In one process: enough for 10 Gbit/s of 4 MiB reads that take 0.2 s each."""

_PARTS_AT_ONCE = 4  # of one upload; memory holds each of them twice
_WHOLE_READ_S: Final = 3600.0  # `ResponseBody.fill` bounds a read by its speed

_STATUS = re.compile(r"non-2xx status code: (\d{3})\b")
_BAD_KEY = re.compile(
    r'Path "(.*)"(?:: Encountered illegal character| contained empty path segment)', re.DOTALL
)
_CODE = re.compile(r"<Code>([A-Za-z0-9_.]{1,64})</Code>")


class UnlistableKey(PermanentStoreError):
    """A key in the bucket cannot be a path; obstore then lists nothing of that key's page."""


class _Process:
    """Whether this process has sent a request, and whether one that it was forked from had."""

    def __init__(self) -> None:
        self.sent = False
        self.inherited = False

    def forked(self) -> None:
        self.inherited = self.inherited or self.sent


_process = _Process()
_slots = threading.BoundedSemaphore(REQUESTS_MAX)
os.register_at_fork(after_in_child=_process.forked)


def check_process() -> None:
    """Raise PermanentStoreError if a request would hang; otherwise note that this process sends
    one."""
    if _process.inherited:
        raise PermanentStoreError(
            "an object store in the cloud was used before this process was forked",
            advice="use it first in the child, or start the child as a program of its own",
        )
    _process.sent = True


class ResponseBody:
    """The body of an answer, still to be read. `bytes_total` is the size of the whole object,
    `range` the part in the body: (first byte, byte behind the last)."""

    def __init__(self, result: "GetResult", where: str, limits: AttemptLimits) -> None:
        meta = result.meta
        self.bytes_total = meta["size"]
        self.etag = meta["e_tag"]
        self.range = result.range
        self._result = result
        self._where = where
        self._limits = limits

    def fill(self, view: memoryview, until: float) -> None:
        """Fill `view` before the monotonic clock reaches `until`. Takes the body in pieces, so
        memory holds only one more (some 400 KB). Raises BrokenBody, also if the body comes too
        slowly."""
        done = done_at_check = 0
        checked_s = time.monotonic()
        # As if all `REQUESTS_MAX` requests shared a link that is just fast enough
        check_bytes_min = self._limits.stall_s * self._limits.bytes_per_s_min / 64
        try:
            for piece in self._result.stream(min_chunk_size=1):
                if done + len(piece) > len(view):
                    raise BrokenBody(f"{self._where}: the answer is longer than it said", 0)
                view[done : done + len(piece)] = piece
                done += len(piece)
                if time.monotonic() > until and done < len(view):
                    raise BrokenBody(f"{self._where}: the answer takes too long", done)
                if time.monotonic() - checked_s > self._limits.stall_s:
                    if done - done_at_check < check_bytes_min and done < len(view):
                        raise BrokenBody(f"{self._where}: the answer comes too slowly", done)
                    checked_s, done_at_check = time.monotonic(), done
        except BaseError:
            raise BrokenBody(f"{self._where}: the answer broke off", done) from None
        if done < len(view):
            raise BrokenBody(f"{self._where}: the answer is shorter than it said", done)


class CloudRequests:
    """Nothing is sent and no credential is read before the first request."""

    def __init__(
        self,
        location: BucketLocation,
        environ: Mapping[str, str] | None = None,
        limits: AttemptLimits | None = None,
    ) -> None:
        """`environ` (None: this process's) has the credentials and the endpoint."""
        self.location = location
        self.limits = limits or AttemptLimits()
        self._environ = environ
        self._access: BucketAccess | None = None
        self._clients: dict[float, _Client] = {}  # by the time limit of a request, in s
        self._opening = threading.Lock()  # while credentials are read and clients made
        self._host = ""

    # The requests

    def put(self, key: str, parts: Sequence[Bytes], *, create: bool) -> None:
        """Write an object in one request, so that readers never see a part of it. The buffers are
        not copied. With `create`, raises ObjectExists, and ConditionsUnsupported if the store does
        not support "put only if absent". S3 gets a SHA-256 (in a header, and in the signature) and
        refuses content that differs; with other vendors only TLS protects the content."""
        views = byte_views(parts)
        size = sum(map(len, views))

        def send(client: _Client) -> None:
            obstore.put(
                client,
                key,
                iter(views) if len(views) != 1 else views[0],
                mode="create" if create else "overwrite",
                use_multipart=False,
            )

        self._send("write", key, send, self.limits.attempt_s(size, put=True))

    def put_in_parts(self, key: str, parts: Sequence[Bytes]) -> None:
        """Write or replace a large object in parts, a few at once; the last request makes it
        appear. If a part fails, all are given up. A killed process's parts are never listed; only a
        rule of the bucket for incomplete uploads removes them."""
        views = byte_views(parts)

        def send(client: _Client) -> None:
            obstore.put(
                client,
                key,
                iter(views),
                use_multipart=True,
                chunk_size=self.limits.part_bytes,
                max_concurrency=_PARTS_AT_ONCE,
            )

        self._send("write", key, send, self.limits.attempt_s(self.limits.part_bytes, put=True))

    @contextmanager
    def open(
        self, key: str, start: int, end: int | None, etag: str | None
    ) -> Iterator[ResponseBody]:
        """Read from `start` to `end` (None: to the object's end), as many bytes as there are.
        Raises ObjectMissing; ChangedObject if the object's ETag is not `etag` (None: any);
        RangeNotSatisfiable if the object ends before `start`."""
        options: GetOptions = {}
        if end is not None:
            options["range"] = (start, end)
        elif start:
            options["range"] = {"offset": start}
        if etag is not None:
            options["if_match"] = etag

        def begin(client: _Client) -> ResponseBody:
            return ResponseBody(
                obstore.get(client, key, options=options), self._at(key), self.limits
            )

        with self._slot():
            body = self._attempt("read", key, begin, _WHOLE_READ_S)
            first, behind = body.range
            if first != start or (end is not None and behind > end):
                raise AttemptFailed(f"{self._at(key)}: the answer is of another range")
            yield body

    def head(self, key: str) -> CloudObject:
        """Raises ObjectMissing (also for a missing bucket)."""
        return self._send("stat", key, lambda client: _found(obstore.head(client, key)))

    def delete(self, key: str) -> None:
        try:
            self._send("delete", key, lambda client: obstore.delete(client, key))
        except ObjectMissing:
            return

    def pages(self, folder: str, after: str) -> Iterator[list[CloudObject]]:
        """Pages of the store's listing below the key `folder` ("": all) and behind the key `after`,
        unchecked: they may be unordered, repeated, or outside `folder`."""
        keys, renewed = self._begin_list(folder, after), False
        while True:
            try:
                with self._slot():
                    page = self._translated("list", folder, partial(next, keys, None))
            except ExpiredCredentials:
                if renewed:
                    raise
                self._access, renewed = None, True
                keys = self._begin_list(folder, after)
                continue
            if page is None:
                return
            yield [_found(meta) for meta in page]
            after = page[-1]["path"]

    def _begin_list(self, folder: str, after: str) -> "ListStream[Sequence[ObjectMeta]]":
        client = self._client(self.limits.stall_s)
        return obstore.list(
            client, folder or None, offset=after or None, chunk_size=self.limits.page_keys
        )

    # How a request is sent

    def _send(
        self, doing: str, key: str, act: Callable[[_Client], Item], request_s: float = 0.0
    ) -> Item:
        with self._slot():
            return self._attempt(doing, key, act, request_s or self.limits.stall_s)

    @contextmanager
    def _slot(self) -> Iterator[None]:
        """Take one of the `REQUESTS_MAX` slots. Raises AttemptFailed if none gets free in time."""
        check_process()
        if not _slots.acquire(timeout=self.limits.stall_s):
            raise AttemptFailed(
                f"{self.location}: {REQUESTS_MAX} requests are under way, and none ended in"
                f" {self.limits.stall_s:g} s",
                may_have_succeeded=False,
            )
        try:
            yield
        finally:
            _slots.release()

    def _attempt(
        self, doing: str, key: str, act: Callable[[_Client], Item], request_s: float
    ) -> Item:
        """Repeats the request with new credentials if the old ones have expired."""

        def send() -> Item:
            return self._translated(doing, key, lambda: act(self._client(request_s)))

        try:
            return send()
        except ExpiredCredentials:
            self._access = None  # the next client reads files and environment again
            return send()

    def _translated(self, doing: str, key: str, act: Callable[[], Item]) -> Item:
        try:
            return act()
        except (BaseError, OSError, ValueError) as error:
            # Without its cause: an address in it may hold a signature.
            raise self._translate_error(doing, key, error) from None

    def _client(self, request_s: float) -> _Client:
        """In obstore a client, not a request, has a time limit. Only the client that reads bodies
        has a read time-out as well: that would also run while a body is being sent."""
        access, clients = self._access, self._clients
        if access is None or access.is_over() or request_s not in clients:
            with self._opening:
                clients = self._open_client(request_s)
        return clients[request_s]

    def _open_client(self, request_s: float) -> dict[float, _Client]:
        access = self._access
        if access is None or access.is_over():
            access = resolve_access(
                self.location, os.environ if self._environ is None else self._environ
            )
            self._host, self._clients, self._access = access.host, {}, access
        if request_s not in self._clients:
            options: ClientConfig = {
                "allow_http": access.plain_http,
                "connect_timeout": timedelta(seconds=self.limits.connect_s),
                "timeout": timedelta(seconds=request_s),
            }
            if request_s == _WHOLE_READ_S:
                options["read_timeout"] = timedelta(seconds=self.limits.stall_s)
            self._clients[request_s] = _make_client(self.location, access.options, options)
        return self._clients

    def _at(self, key: str) -> str:
        return f"{self.location.scheme}://{self.location.bucket}/{key} at {self._host}"

    def _translate_error(self, doing: str, key: str, error: Exception) -> DieselError:
        """The message has no address, which may hold a signature."""
        text = str(error)
        status = int(match[1]) if (match := _STATUS.search(text)) else 0
        code = match[1] if (match := _CODE.search(text)) else ""
        if isinstance(error, InvalidPathError):
            return UnlistableKey(
                f"{self._at(key)}: {_fault_of_key(text)}: it cannot be listed",
                advice="remove it, or give the store a prefix of its own",
            )
        if status == 0 and isinstance(error, FileNotFoundError):
            status = 404
        what = f"{self._at(key)}: cannot {doing}"
        if status == 0:
            return _no_answer(what, text)
        if doing == "list" and status == 400 and code == "InvalidArgument":
            return AttemptFailed(
                f"{what}: the store refuses to continue the listing", may_have_succeeded=False
            )
        return meaning_of_status(
            f"{what}: {code or 'HTTP'} ({status})",
            status,
            code,
            isinstance(error, AlreadyExistsError),
        )


def _fault_of_key(text: str) -> str:
    match = _BAD_KEY.search(text.partition("\n\nDebug source")[0])
    key = match[1] if match else ""
    named = f"the key {shown(key.encode())}" if key else "a key there"
    if any(ord(letter) < 0x20 or ord(letter) == 0x7F for letter in key):
        return f"{named} has control characters"
    return f"{named} has empty or dotted parts"


def _no_answer(what: str, text: str) -> DieselError:
    if "169.254.169.254" in text or "metadata.google.internal" in text:
        return ObjectStoreRefused(
            f"{what}: there are no credentials",
            advice="set AWS_ACCESS_KEY_ID and its secret, or a profile",
        )
    if "redirect without LOCATION" in text:
        return PermanentStoreError(
            f"{what}: the bucket is in another region", advice="set AWS_REGION"
        )
    if "non-partial response" in text:  # the whole object, or an error page with status 200
        return AttemptFailed(f"{what}: the answer is not of the range that was asked for")
    if "invalid list response" in text:
        return AttemptFailed(f"{what}: the answer is no listing")
    if re.search("certificate|UnknownIssuer|InvalidCertificate", text):
        return PermanentStoreError(f"{what}: its certificate is not trusted")
    if "BadScheme" in text:
        return PermanentStoreError(
            f"{what}: the store's redirect leads from https to http, which is refused"
        )
    if "kind: Redirect" in text:
        return PermanentStoreError(
            f"{what}: the store's redirect has no usable address",
            advice="set AWS_REGION, or the endpoint",
        )
    for symptom, reason, may_have_succeeded in (
        ("dns error", "no such host", False),
        ("Connection refused", "connection refused", False),
        ("kind: Connect,", "cannot connect", False),  # the comma excludes ConnectionReset
        ("TimedOut", "no answer in time", True),
        ("kind: Timeout", "no answer in time", True),
    ):
        if symptom in text:
            return AttemptFailed(f"{what}: {reason}", may_have_succeeded=may_have_succeeded)
    return AttemptFailed(f"{what}: the connection broke")


def _make_client(
    location: BucketLocation, options: Mapping[str, str], client: "ClientConfig"
) -> _Client:
    retry: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(0)}
    try:
        match location.scheme:
            case "s3":
                config = {
                    **options,
                    "checksum_algorithm": "sha256",
                    "conditional_put": "etag",
                    "disable_bulk_delete": True,
                }
                return S3Store(
                    location.bucket,
                    config=cast("S3Config", config),
                    client_options=client,
                    retry_config=retry,
                )
            case "gs":
                return GCSStore(location.bucket, client_options=client, retry_config=retry)
            case "az":
                return AzureStore(
                    location.bucket,
                    config=cast("AzureConfig", options),
                    client_options=client,
                    retry_config=retry,
                )
    except (BaseError, ValueError):  # its text may show a secret
        raise PermanentStoreError(
            f"{location}: the settings in the environment do not make a client",
            advice="check the vendor's variables (AWS_..., GOOGLE_..., AZURE_...)",
        ) from None


def _found(meta: "ObjectMeta") -> CloudObject:
    modified = meta["last_modified"]
    # Whole seconds: listings have fractions, headers of objects do not
    return CloudObject(meta["path"], meta["size"], int(modified.timestamp()) * 10**9, meta["e_tag"])
