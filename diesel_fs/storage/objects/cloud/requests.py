"""Requests to object stores in the cloud, through `obstore`: one each, bounded in time, by key.

Owns: everything that is obstore's (its clients, options and errors), how many requests a process
has under way (an upload in parts counts as one), how long one may take, and what an error means.
Does not own: names, conditions on what may be overwritten, and trying again: no request is repeated
here or in the library.

Redirects: the library follows those of a GET by itself, without our signature where the host
changes, and never from https to http; a PUT is not sent elsewhere.

No time-out of the library's ends a listing whose pages are empty and promise more for ever, and no
signal interrupts a request: ^C is heard when it ends.

Concurrency: any thread. One client of each sort serves them all; a semaphore of the process bounds
requests under way, whatever the number of stores (2,000 readers at the start of a task must not
need 2,000 sockets).

Fork: the library's runtime (tokio, with threads of its own, started by the first request of a
process) does not live in a forked child, and any request there would hang for ever (0.12.1;
measured with the parent's client, with a new one, with all of the parent's deleted, and with the
module imported anew). A child whose parent has imported this module, even made clients, but sent no
request, is as good as any process, and its own children are not. So a request in a child of a
process that has sent one raises at once.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final, TypeVar, cast

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, InvalidPathError
from obstore.store import AzureStore, GCSStore, S3Store

from ....errors import (
    DieselError,
    NoSpaceError,
    ObjectExists,
    ObjectMissing,
    ObjectStoreError,
    ObjectStoreRefused,
)
from ....format.entries import Bytes
from ....names import shown
from ..retry import AttemptFailed
from .location import BucketLocation, resolve_access

if TYPE_CHECKING:  # the library has these names for type checkers alone
    from obstore import GetOptions, GetResult, ListStream, ObjectMeta
    from obstore.store import AzureConfig, ClientConfig, RetryConfig, S3Config

Item = TypeVar("Item")
_Client = S3Store | GCSStore | AzureStore

REQUESTS_MAX = 64
"""Under way in one process at once: enough for 10 Gbit/s of 4 MiB reads that take 0.2 s."""

PART_BYTES = 32 << 20
"""Of a large object: stores take 10,000 parts, and all but the last of 5 MiB at least."""

_PARTS_AT_ONCE = 4  # which is held in memory twice
_PAGE_KEYS = 1000  # what S3 gives at most
_SMALL_PUT_BYTES = 4 << 20
_WHOLE_READ_S: Final = 3600.0  # the body of a chunk is bounded by its stalls
_THROTTLED_PAUSE_S = 1.0  # the library does not show Retry-After, and most stores mean seconds

_STATUS = re.compile(r"non-2xx status code: (\d{3})\b")
_BAD_KEY = re.compile(
    r'Path "(.*)"(?:: Encountered illegal character| contained empty path segment)', re.DOTALL
)
_CODE = re.compile(r"<Code>([A-Za-z0-9_.]{1,64})</Code>")
_NO_BUCKET = frozenset({"NoSuchBucket", "InvalidBucketName", "ContainerNotFound"})
_NO_SPACE = frozenset({"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage"})
_CLOCK = frozenset({"RequestTimeTooSkewed", "RequestInTheFuture"})
_EXPIRED = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "RequestExpired"})
_UNCONDITIONAL = frozenset({"NotImplemented", "InvalidArgument", "UnsupportedHeader"})
_EXISTS = frozenset({"BlobAlreadyExists", "PreconditionFailed"})
_TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_THROTTLED = frozenset({429, 503})


class BrokenBody(AttemptFailed):
    """The body ended, or stood still, before its end; `received` bytes of it are good."""

    def __init__(self, message: str, received: int) -> None:
        super().__init__(message)
        self.received = received


class ChangedObject(AttemptFailed):
    """The object is no longer the one that was begun to be read."""


class ConditionsUnsupported(ObjectStoreError):
    """The store does not know conditional requests."""

    retry = False


class PermanentStoreError(ObjectStoreError):
    """It will not answer otherwise until somebody does something."""

    retry = False


class UnlistableKey(PermanentStoreError):
    """A key in the store is no path, and the library lists nothing of the page that it is on."""


class RangeNotSatisfiable(ObjectStoreError):
    """Nothing of the range is there."""

    retry = False


class ExpiredCredentials(ObjectStoreRefused):
    """The store knows the credentials, and that they are too old."""


@dataclass(frozen=True, slots=True)
class AttemptLimits:
    """How long an attempt may take."""

    connect_s: float = 5.0
    stall_s: float = 10.0
    """Without a byte while reading; and for a request that moves none."""
    put_stall_s: float = 20.0
    """What a put may take beyond its bytes: some stores answer when copies are made."""
    bytes_per_s_min: float = 256 * 1024

    def attempt_s(self, size: int, put: bool) -> float:
        """How long an attempt that moves `size` bytes may take."""
        if put:
            return self.put_stall_s + _put_class(size) / self.bytes_per_s_min
        return self.stall_s + size / self.bytes_per_s_min


@dataclass(frozen=True, slots=True)
class CloudObject:
    """An object as the store describes it."""

    key: str
    bytes: int
    modified_ns: int
    etag: str | None


class _Process:
    """What is true of this process."""

    def __init__(self) -> None:
        self.sent = False
        self.inherited = False

    def forked(self) -> None:
        self.inherited = self.inherited or self.sent


_process = _Process()
_slots = threading.BoundedSemaphore(REQUESTS_MAX)
os.register_at_fork(after_in_child=_process.forked)


def check_process() -> None:
    """Raise where a request would hang; from now on this process sends requests."""
    if _process.inherited:
        raise PermanentStoreError(
            "an object store in the cloud was used before this process was forked",
            advice="use it first in the child, or start the child as a program of its own",
        )
    _process.sent = True


class ResponseBody:
    """The body of an answer, and what is known of the object before a byte of it is read."""

    def __init__(self, result: "GetResult", where: str, limits: AttemptLimits) -> None:
        meta = result.meta
        self.bytes_total = meta["size"]
        self.etag = meta["e_tag"]
        self.range = result.range
        self._result = result
        self._where = where
        self._limits = limits

    def fill(self, view: memoryview, until: float) -> None:
        """Read exactly `view`, before the monotonic clock says `until`. Raises BrokenBody.

        Piece by piece as they come from the socket: what is held besides is one piece (at most
        some 400 KB), and a body that only trickles is noticed.
        """
        done = since = 0
        mark = time.monotonic()
        least = self._limits.stall_s * self._limits.bytes_per_s_min / 64
        try:
            for piece in self._result.stream(min_chunk_size=1):
                if done + len(piece) > len(view):
                    raise BrokenBody(f"{self._where}: the answer is longer than it said", 0)
                view[done : done + len(piece)] = piece
                done += len(piece)
                if time.monotonic() > until and done < len(view):
                    raise BrokenBody(f"{self._where}: the answer takes too long", done)
                if time.monotonic() - mark > self._limits.stall_s:
                    if done - since < least and done < len(view):
                        raise BrokenBody(f"{self._where}: the answer only trickles", done)
                    mark, since = time.monotonic(), done
        except BaseError:
            raise BrokenBody(f"{self._where}: the answer broke off", done) from None
        if done < len(view):
            raise BrokenBody(f"{self._where}: the answer is shorter than it said", done)


class CloudRequests:
    """Requests to one place. Nothing is sent, nor any credential read, before the first one."""

    def __init__(
        self,
        location: BucketLocation,
        environ: Mapping[str, str] | None = None,
        limits: AttemptLimits | None = None,
    ) -> None:
        self.location = location
        self.limits = limits or AttemptLimits()
        self._environ = environ
        self._clients: dict[float, _Client] = {}
        self._host = ""

    # The requests

    def put(self, key: str, parts: Sequence[Bytes], *, create: bool) -> None:
        """Write an object, in one request: there is no moment at which a part of it is there, and
        nothing is left behind where it fails.

        The buffers are sent as they lie. With `create` only where there is none (ObjectExists;
        ConditionsUnsupported where the store cannot say). S3 gets a SHA-256 along (in a header, and
        in the signature) and refuses what does not fit it; elsewhere TLS has to do.
        """
        views = [memoryview(part).cast("B") for part in parts if len(part)]
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
        """Write a large object, or replace one, in parts, a few of which are under way at once. It
        is there, whole, with the last request.

        Where a part fails, all of them are given up. What is left of a process that was killed is
        no object; only a rule of the bucket's removes it.
        """
        views = [memoryview(part).cast("B") for part in parts if len(part)]

        def send(client: _Client) -> None:
            obstore.put(
                client,
                key,
                iter(views),
                use_multipart=True,
                chunk_size=PART_BYTES,
                max_concurrency=_PARTS_AT_ONCE,
            )

        self._send("write", key, send, self.limits.attempt_s(PART_BYTES, put=True))

    @contextmanager
    def open(
        self, key: str, start: int, end: int | None, etag: str | None
    ) -> Iterator[ResponseBody]:
        """Begin to read from `start` to `end` (None: to the object's end), which must be in order.

        The answer is of what is there of the range; ObjectMissing; ChangedObject where `etag` is
        given and no longer the object's; RangeNotSatisfiable where nothing of the range is there.
        """
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
            if body.range[0] != start or (end is not None and body.range[1] > end):
                raise AttemptFailed(f"{self._at(key)}: the answer is of another range")
            yield body

    def head(self, key: str) -> CloudObject:
        """What is known of an object. Raises ObjectMissing (also where the bucket is missing)."""
        return self._send("stat", key, lambda client: _found(obstore.head(client, key)))

    def delete(self, key: str) -> None:
        """Make sure that an object is absent."""
        try:
            self._send("delete", key, lambda client: obstore.delete(client, key))
        except ObjectMissing:
            return

    def pages(self, folder: str, after: str) -> Iterator[list[CloudObject]]:
        """What the store lists below the key `folder` ("": everywhere) behind the key `after`, as
        it comes: nothing is promised about order, repetition, or that it is below `folder`."""
        keys, renewed = self._begin_list(folder, after), False
        while True:
            try:
                page = self._next_page(folder, keys)
            except ExpiredCredentials:
                if renewed:
                    raise
                self._clients, renewed = {}, True
                keys = self._begin_list(folder, after)
                continue
            if page is None:
                return
            yield [_found(meta) for meta in page]
            after = page[-1]["path"]

    def _next_page(
        self, folder: str, keys: "ListStream[Sequence[ObjectMeta]]"
    ) -> "Sequence[ObjectMeta] | None":
        with self._slot():
            return self._translated("list", folder, lambda: next(keys, None))

    def _begin_list(self, folder: str, after: str) -> "ListStream[Sequence[ObjectMeta]]":
        """Sends nothing yet."""
        client = self._client(self.limits.stall_s)
        return obstore.list(client, folder or None, offset=after or None, chunk_size=_PAGE_KEYS)

    # How one is sent

    def _send(
        self, doing: str, key: str, act: Callable[[_Client], Item], request_s: float = 0.0
    ) -> Item:
        with self._slot():
            return self._attempt(doing, key, act, request_s or self.limits.stall_s)

    @contextmanager
    def _slot(self) -> Iterator[None]:
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
        """One request; a second one with new credentials where the store says that they are old."""
        try:
            return self._translated(doing, key, lambda: act(self._client(request_s)))
        except ExpiredCredentials:
            self._clients = {}  # the next is made from what files and environment say now
            return self._translated(doing, key, lambda: act(self._client(request_s)))

    def _translated(self, doing: str, key: str, act: Callable[[], Item]) -> Item:
        try:
            return act()
        except (BaseError, OSError, ValueError) as error:
            # Without its cause: an address in it may hold a signature.
            raise self._translate_error(doing, key, error) from None

    def _client(self, request_s: float) -> _Client:
        """The client whose requests take no longer: the library has no time-out for one alone.

        Only those that read bodies have a read time-out: it runs while a request is being sent,
        too.
        """
        client = self._clients.get(request_s)
        if client is None:
            access = resolve_access(
                self.location, os.environ if self._environ is None else self._environ
            )
            self._host = access.host
            options: ClientConfig = {
                "allow_http": access.plain_http,
                "connect_timeout": timedelta(seconds=self.limits.connect_s),
                "timeout": timedelta(seconds=request_s),
            }
            if request_s == _WHOLE_READ_S:
                options["read_timeout"] = timedelta(seconds=self.limits.stall_s)
            client = _make_client(self.location, access.options, options)
            self._clients[request_s] = client
        return client

    def _at(self, key: str) -> str:
        return f"{self.location.scheme}://{self.location.bucket}/{key} at {self._host}"

    def _translate_error(self, doing: str, key: str, error: Exception) -> DieselError:
        """What an error of the library's says, in our words and without its addresses."""
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
            return AttemptFailed(f"{what}: its token is refused", may_have_succeeded=False)
        return _meaning_of_status(
            f"{what}: {code or 'HTTP'} ({status})",
            status,
            code,
            isinstance(error, AlreadyExistsError),
        )


def _fault_of_key(text: str) -> str:
    """Which key the library calls no path, and why, as far as its text says."""
    match = _BAD_KEY.search(text.partition("\n\nDebug source")[0])
    key = match[1] if match else ""
    named = f"the key {shown(key.encode())}" if key else "a key there"
    if any(ord(letter) < 0x20 or ord(letter) == 0x7F for letter in key):
        return f"{named} has control characters"
    return f"{named} has empty or dotted parts"


def _meaning_of_status(what: str, status: int, code: str, exists: bool) -> DieselError:
    if code in _NO_BUCKET:
        return PermanentStoreError(
            f"{what}: no such bucket", advice="check its name, and create it first"
        )
    if code in _CLOCK:
        return ObjectStoreRefused(what, advice="this machine's clock is wrong by minutes: set it")
    if code in _EXPIRED:
        return ExpiredCredentials(what, advice="the credentials have expired: renew them")
    if code in _NO_SPACE or status == 507:
        return NoSpaceError(what, advice="free some space, or raise the quota")
    if exists and (status in (304, 412) or code in _EXISTS):
        return ObjectExists(f"{what}: exists already")
    if code == "NoSuchUpload":  # somebody ended it: perhaps we, by a request whose answer was lost
        return AttemptFailed(what, may_have_succeeded=True)
    match status:
        case 401 | 403:
            # To whoever may not list a bucket, S3 says this of keys that are not there.
            return ObjectStoreRefused(what, advice="check the credentials, and what they may do")
        case 404:
            return ObjectMissing(f"{what}: no such object")
        case 412:
            return ChangedObject(f"{what}: it has changed meanwhile", may_have_succeeded=False)
        case 416:
            return RangeNotSatisfiable(what)
        case 301 | 302 | 307 | 308:
            return PermanentStoreError(
                f"{what}: it is elsewhere", advice="set AWS_REGION, or the endpoint"
            )
        case _ if status == 501 or code in _UNCONDITIONAL:
            return ConditionsUnsupported(what)
        case _ if status in _TRANSIENT or status > 507:
            pause_s = _THROTTLED_PAUSE_S if status in _THROTTLED else 0.0
            return AttemptFailed(what, may_have_succeeded=status >= 500, pause_s_min=pause_s)
    return PermanentStoreError(what)


def _no_answer(what: str, text: str) -> DieselError:
    """Of an error that is no status: what the library's text says went wrong."""
    if "169.254.169.254" in text or "metadata.google.internal" in text:
        return ObjectStoreRefused(
            f"{what}: there are no credentials",
            advice="set AWS_ACCESS_KEY_ID and its secret, or a profile",
        )
    if "redirect without LOCATION" in text:
        return PermanentStoreError(
            f"{what}: the bucket is in another region", advice="set AWS_REGION"
        )
    if "non-partial response" in text:  # the whole object, or an error page as a 200
        return AttemptFailed(f"{what}: the answer is not of the range that was asked for")
    if "invalid list response" in text:
        return AttemptFailed(f"{what}: the answer is no listing")
    if re.search("certificate|UnknownIssuer|InvalidCertificate", text):
        return PermanentStoreError(f"{what}: its certificate is not trusted")
    if "BadScheme" in text:
        return PermanentStoreError(f"{what}: it leads from https to http, which is refused")
    if "kind: Redirect" in text:
        return PermanentStoreError(
            f"{what}: it leads nowhere", advice="set AWS_REGION, or the endpoint"
        )
    for found, reason, unclear in (
        ("dns error", "no such host", False),
        ("Connection refused", "connection refused", False),
        ("kind: Connect,", "cannot connect", False),  # ConnectionReset is another matter
        ("TimedOut", "no answer in time", True),
        ("kind: Timeout", "no answer in time", True),
    ):
        if found in text:
            return AttemptFailed(f"{what}: {reason}", may_have_succeeded=unclear)
    return AttemptFailed(f"{what}: the connection broke")


def _make_client(
    place: BucketLocation, options: Mapping[str, str], client: "ClientConfig"
) -> _Client:
    retry: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(0)}
    try:
        match place.scheme:
            case "s3":
                config = {
                    **options,
                    "checksum_algorithm": "sha256",
                    "conditional_put": "etag",
                    "disable_bulk_delete": True,
                }
                return S3Store(
                    place.bucket,
                    config=cast("S3Config", config),
                    client_options=client,
                    retry_config=retry,
                )
            case "gs":
                return GCSStore(place.bucket, client_options=client, retry_config=retry)
            case "az":
                return AzureStore(
                    place.bucket,
                    config=cast("AzureConfig", options),
                    client_options=client,
                    retry_config=retry,
                )
    except (BaseError, ValueError):  # its text may show what it could not read
        raise PermanentStoreError(
            f"{place}: the settings in the environment do not make a client",
            advice="check the vendor's variables (AWS_..., GOOGLE_..., AZURE_...)",
        ) from None


def _put_class(size: int) -> int:
    """Sizes that share a client: the next power of two."""
    return 1 << (max(size, _SMALL_PUT_BYTES) - 1).bit_length()


def _found(meta: "ObjectMeta") -> CloudObject:
    modified = meta["last_modified"]
    # Whole seconds: listings have fractions that single objects' headers have not.
    return CloudObject(meta["path"], meta["size"], int(modified.timestamp()) * 10**9, meta["e_tag"])
