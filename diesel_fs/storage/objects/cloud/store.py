"""The object store in a bucket: S3 and what speaks its protocol, Google's and Azure's.

Owns: the contract of `ObjectStore` over single requests: what is never overwritten, reads that go
on where a body broke, listings that are in order whatever the store answers, and what makes a
prefix a store. Does not own: requests and what their errors mean (`cloud_requests`), trying again
(`retries`; `open_cloud` puts it around), names (`layout`).

An object is written by one request, or in parts where it is large, and is there whole or not at
all: `leftovers` is empty.

Importing this module imports `obstore`, so only our own programs do (see `cloud_requests`).

Concurrency: any thread; what is shared is what has been found out about the store, each a single
assignment. After a fork: see `cloud_requests`.
"""

import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from ....errors import (
    ConflictError,
    ObjectExists,
    ObjectMissing,
    ObjectStoreError,
)
from ....format.entries import Bytes
from ....format.object_names import FOLDER_NAME, OBJECT_NAME, STORE_MARKER
from ..retry import AttemptFailed, RetryClock, RetryingStore, RetryLoop, RetryPolicy
from ..store import (
    MARKER_BYTES_MAX,
    ObjectInfo,
    ObjectStore,
    check_deletable,
    check_end,
    check_mutable,
    check_name,
    check_prefix,
    check_range,
    encode_marker,
    parse_marker,
)
from .location import parse_bucket_url
from .requests import (
    AttemptLimits,
    BrokenBody,
    ChangedObject,
    CloudObject,
    CloudRequests,
    ConditionsUnsupported,
    PermanentStoreError,
    RangeNotSatisfiable,
    ResponseBody,
)

ONE_REQUEST_BYTES_MAX = 128 << 20
"""Larger objects go in parts: stores take 5 GiB at most in one request, and one stream is slow."""

_RESUMES_MAX = 8  # and one more for each MiB: a link that breaks more often does not carry it
_RELISTS_MAX = 4
_STRAY_KEYS_MAX = 5000  # repeated in one listing before it is said to go in circles
_ENCODED = re.compile(r"%2[Ff]")
_PLAIN = re.compile(r"(?:[A-Za-z0-9_-]+/)*[A-Za-z0-9_-]*")


def open_cloud(
    url: str,
    *,
    create: bool = False,
    environ: Mapping[str, str] | None = None,
    limits: AttemptLimits | None = None,
    policy: RetryPolicy | None = None,
    clock: RetryClock | None = None,
) -> RetryingStore:
    """The store at `s3://bucket/prefix` (also gs://, az://), tried again where that may help; with
    `create` it is made where the prefix is empty. Raises as `CloudStore.open` and `create`."""
    limits, policy, clock = (
        limits or AttemptLimits(),
        policy or RetryPolicy(),
        clock or RetryClock(),
    )
    requests = CloudRequests(parse_bucket_url(url), environ, limits)
    begin = CloudStore.create if create else CloudStore.open
    attempt_s = limits.attempt_s(0, put=False)
    retrying = RetryLoop(policy, clock, deadline_s=policy.deadline_s, attempt_s=attempt_s)
    store = retrying.call(lambda: begin(requests))
    return RetryingStore(store, policy, attempt_s=limits.attempt_s, clock=clock)


class CloudStore(ObjectStore):
    """Objects as objects, their names below the place's prefix."""

    fork_safe = False  # `cloud_requests` says why

    def __init__(
        self,
        requests: CloudRequests,
        store_id: uuid.UUID,
        *,
        supports_conditional_put: bool | None = None,
    ) -> None:
        """For `open` and `create`; also for a process that has been told what they found out.

        `supports_conditional_put`: whether the store knows conditional requests (None: to be found
        out).
        """
        self.store_id = store_id
        self.supports_conditional_put = supports_conditional_put
        self._requests = requests
        self._location = requests.location
        self._unordered = False

    @classmethod
    def open(cls, requests: CloudRequests) -> "CloudStore":
        """The store at a place. Raises ObjectMissing where there is none."""
        try:
            return cls(requests, _read_marker(requests))
        except ObjectMissing:
            raise ObjectMissing(
                f"{requests.location}: no DIESEL-FS store is here (no {STORE_MARKER})",
                advice="check the bucket and the prefix",
            ) from None

    @classmethod
    def create(cls, requests: CloudRequests) -> "CloudStore":
        """Make a store where the bucket is there and the prefix empty; open the one that is there.

        Raises ConflictError where anything else lies below the prefix.
        """
        with suppress(ObjectMissing):
            return cls.open(requests)
        place = requests.location
        if any(page for page in requests.pages(place.prefix, "")):
            with suppress(ObjectMissing):  # another may have made it since, and written into it
                return cls.open(requests)
            raise ConflictError(
                f"{place}: neither empty nor a DIESEL-FS store; no store is made in it",
                advice="name a prefix below which nothing is",
            )
        content = encode_marker(uuid.uuid4())
        try:
            with suppress(ObjectExists):  # another was first: its store is as good
                requests.put(place.key(STORE_MARKER), [content], create=True)
        except ConditionsUnsupported:
            requests.put(place.key(STORE_MARKER), [content], create=False)
        return cls.open(requests)

    # Writing

    def put(self, name: str, parts: Sequence[Bytes]) -> None:
        """Where the store knows no conditional requests (`supports_conditional_put` is False), and
        for what is so large that it goes in parts, it is asked first whether the object is there:
        then two that put one name in the same moment can both succeed, which names that are drawn
        at random rule out in practice, and two snapshots of one version are the same."""
        check_name(name)
        key = self._location.key(name)
        if self.supports_conditional_put is None:
            self.supports_conditional_put = self._find_out_conditional()
        in_parts = sum(memoryview(part).nbytes for part in parts) > ONE_REQUEST_BYTES_MAX
        if (in_parts or not self.supports_conditional_put) and self._is_there(key):
            raise ObjectExists(f"{name}: exists already")
        if in_parts:
            self._requests.put_in_parts(key, parts)
        else:
            self._requests.put(key, parts, create=self.supports_conditional_put)

    def _find_out_conditional(self) -> bool:
        """Whether "only where there is none" is obeyed: by putting the marker, as it is, again."""
        key = self._location.key(STORE_MARKER)
        content = self._get(key, STORE_MARKER, 0, None)
        try:
            self._requests.put(key, [content], create=True)
        except ObjectExists:
            return True
        except ConditionsUnsupported:
            return False
        return False

    def _is_there(self, key: str) -> bool:
        try:
            self._requests.head(key)
        except ObjectMissing:
            return False
        return True

    def replace(self, name: str, parts: Sequence[Bytes]) -> None:
        check_mutable(name)
        self._requests.put(self._location.key(name), parts, create=False)

    def delete(self, name: str) -> None:
        check_deletable(name)
        self._requests.delete(self._location.key(name))

    # Reading

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytearray:
        check_range(name, start, length)
        return self._get(self._location.key(name), name, start, length)

    def _get(self, key: str, name: str, start: int, length: int | None) -> bytearray:
        if length == 0:
            self._check_end(key, name, start)
            return bytearray()
        try:
            end = None if length is None else start + length
            with self._requests.open(key, start, end, None) as body:
                check_end(name, start + (length or 0), body.bytes_total)
                content = bytearray(body.bytes_total - start if length is None else length)
                until = self._until(len(content))
                etag, broken = body.etag, _fill(body, memoryview(content), until)
        except RangeNotSatisfiable:
            if self._check_end(key, name, start + (length or 0)) != start or length is not None:
                raise _denied(name) from None
            return bytearray()
        except ObjectMissing as error:
            raise self._missing(name) from error
        if broken is not None:
            self._go_on(key, name, start, memoryview(content), etag, broken, until)
        return content

    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        check_range(name, start, None)
        self._read(name, start, memoryview(buffer).cast("B"), None)

    def read_ranges(
        self, name: str, ranges: Sequence[tuple[int, int]], room: memoryview
    ) -> Iterator[memoryview]:
        """All ranges are of one version: the store is held to the first one's ETag."""
        etag: str | None = None
        for start, size in ranges:
            check_range(name, start, size)
            etag = self._read(name, start, room[:size], etag)
            yield room[:size].toreadonly()

    def _read(self, name: str, start: int, view: memoryview, etag: str | None) -> str | None:
        """Fill `view` from the version `etag` (None: any), and say which it was."""
        key, end, until = self._location.key(name), start + len(view), self._until(len(view))
        if not view:
            self._check_end(key, name, end)
            return etag
        try:
            with self._requests.open(key, start, end, etag) as body:
                check_end(name, end, body.bytes_total)
                etag, broken = body.etag, _fill(body, view, until)
        except RangeNotSatisfiable:
            self._check_end(key, name, end)
            raise _denied(name) from None
        except ObjectMissing as error:
            raise self._missing(name) from error
        if broken is not None:
            self._go_on(key, name, start, view, etag, broken, until)
        return etag

    def _until(self, size: int) -> float:
        """When an attempt to read so many bytes has to be over."""
        return time.monotonic() + self._requests.limits.attempt_s(size, put=False)

    def _go_on(
        self,
        key: str,
        name: str,
        start: int,
        view: memoryview,
        etag: str | None,
        cause: BrokenBody,
        until: float,
    ) -> None:
        """Read on behind the last good byte, of the same version, as long as bytes come."""
        done, resumes_left = cause.received, _RESUMES_MAX + (len(view) >> 20)
        while done < len(view):
            late = time.monotonic() > until
            if late or not cause.received or etag is None or not resumes_left:
                raise cause
            resumes_left -= 1
            with self._requests.open(key, start + done, start + len(view), etag) as body:
                if body.etag != etag:
                    raise ChangedObject(f"{name}: it has changed meanwhile")
                check_end(name, start + len(view), body.bytes_total)
                broken = _fill(body, view[done:], until)
            if broken is None:
                return
            cause = broken
            done += cause.received

    def _check_end(self, key: str, name: str, end: int) -> int:
        """The size of an object. Raises where it ends before `end`."""
        try:
            size = self._requests.head(key).bytes
        except ObjectMissing as error:
            raise self._missing(name) from error
        check_end(name, end, size)
        return size

    def stat(self, name: str) -> ObjectInfo:
        check_name(name)
        try:
            return _info(name, self._requests.head(self._location.key(name)))
        except ObjectMissing as error:
            raise self._missing(name) from error

    def _missing(self, name: str) -> ObjectStoreError:
        """ObjectMissing only where the store is there to say so."""
        try:
            store_id = _read_marker(self._requests)
        except ObjectMissing:
            return PermanentStoreError(f"{self._location}: the store has gone (no {STORE_MARKER})")
        if store_id != self.store_id:
            return PermanentStoreError(f"{self._location}: another store is in this place now")
        return ObjectMissing(f"{name}: no such object in {self._location}")

    # Listing

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """In order and once each, or an error. A listing has ended when the store has nothing more
        behind the last name; that it says so by itself is not believed, nor its order.

        The marker has to be in a listing of everything.
        """
        check_prefix(prefix)
        marker_due = STORE_MARKER.startswith(prefix) and after < STORE_MARKER
        for found in self._ordered(prefix, after):
            name = self._name(found.key)
            if marker_due and name != STORE_MARKER:  # no other name is less
                break
            marker_due = False
            yield _info(name, found)
        if marker_due:
            raise AttemptFailed(f"{self._location}: the listing is incomplete (no {STORE_MARKER})")

    def foreign(self, prefix: str = "") -> Iterator[str]:
        check_prefix(prefix)
        known: set[str] = set()
        for page in self._pages(prefix, ""):
            for found in page:
                name = self._name(found.key)
                if not name.startswith(prefix) or OBJECT_NAME.fullmatch(name):
                    continue
                shown = _topmost_foreign(name)
                if shown and shown not in known:
                    known.add(shown)
                    yield shown

    def _ordered(self, prefix: str, after: str) -> Iterator[CloudObject]:
        """Lazily as long as pages come in order; from the first that does not, all are read first,
        and sorted."""
        if self._unordered:
            yield from self._sorted(prefix, after)
            return
        last, given = after, _Digest()
        while True:
            before = last
            for found in self._ours(prefix, after, last):
                name = self._name(found.key)
                if name == last:
                    continue
                if name < last:
                    self._unordered = True
                    yield from self._rest(prefix, after, last, given)
                    return
                last = name
                given.add(name)
                yield found
            if (
                last == before or self._location.scheme == "az"
            ):  # Azure lists from the start each time
                return

    def _rest(self, prefix: str, after: str, last: str, given: "_Digest") -> Iterator[CloudObject]:
        """What is to follow when all before `last` has been given, if that was all there is."""
        again, rest = _Digest(), []
        for found in self._sorted(prefix, after):
            name = self._name(found.key)
            if name <= last:
                again.add(name)
            else:
                rest.append(found)
        if again != given:  # not to be gone on with: what was passed over lies before `last`
            raise PermanentStoreError(
                f"{self._location}: the listing is not in order",
                advice="list again: it will be sorted",
            )
        yield from rest

    def _sorted(self, prefix: str, after: str) -> Iterator[CloudObject]:
        """All there is, from as many listings as it takes until one shows nothing new."""
        known: dict[str, CloudObject] = {}
        for _ in range(_RELISTS_MAX):
            before = len(known)
            for seen, found in enumerate(self._ours(prefix, after, after)):
                known.setdefault(found.key, found)
                if seen > 2 * len(known) + _STRAY_KEYS_MAX:
                    raise PermanentStoreError(f"{self._location}: the listing goes in circles")
            if len(known) == before:
                return iter([known[key] for key in sorted(known)])
        raise AttemptFailed(f"{self._location}: no two listings agree")

    def _ours(self, prefix: str, after: str, last: str) -> Iterator[CloudObject]:
        """Objects of ours as the store lists them behind `last`."""
        for page in self._pages(prefix, last):
            for found in page:
                name = self._name(found.key)
                if OBJECT_NAME.fullmatch(name):
                    if name > after and name.startswith(prefix):
                        yield found
                elif _ENCODED.search(name) and OBJECT_NAME.fullmatch(_ENCODED.sub("/", name)):
                    raise PermanentStoreError(
                        f"{self._location}: the store lists names in an encoding"
                    )

    def _pages(self, prefix: str, after: str) -> Iterator[Sequence[CloudObject]]:
        """Pages of the folder that a prefix lies in, from where it can begin."""
        folder = prefix.rpartition("/")[0]
        match = _PLAIN.match(max(after, _just_before(prefix)))
        plain = match.group().rstrip("/") if match else ""
        offset = self._location.key(plain) if plain else ""
        key = self._location.key(folder) if folder else self._location.prefix
        return self._requests.pages(key, offset)

    def _name(self, key: str) -> str:
        """The name of a key; what lies outside of the store has one that no object has."""
        if not self._location.prefix:
            return key
        start = f"{self._location.prefix}/"
        return key[len(start) :] if key.startswith(start) else f"/{key}"


class _Digest:
    """Which names have been seen, whatever their order, in the space of two numbers."""

    def __init__(self) -> None:
        self._count = 0
        self._sum = 0

    def add(self, name: str) -> None:
        self._count += 1
        self._sum ^= hash(name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Digest) and (self._count, self._sum) == (other._count, other._sum)

    __hash__ = None  # type: ignore[assignment] # it changes


def _read_marker(requests: CloudRequests) -> uuid.UUID:
    """The store that is there. Raises ObjectMissing."""
    with requests.open(requests.location.key(STORE_MARKER), 0, None, None) as body:
        content = bytearray(min(body.bytes_total, MARKER_BYTES_MAX))
        if len(content) == body.bytes_total:
            limit_s = requests.limits.attempt_s(len(content), put=False)
            body.fill(memoryview(content), time.monotonic() + limit_s)
    return parse_marker(content)


def _fill(body: ResponseBody, view: memoryview, until: float) -> BrokenBody | None:
    """Read a body; where it breaks, how far it got."""
    try:
        body.fill(view, until)
    except BrokenBody as error:
        return error
    return None


def _denied(name: str) -> ObjectStoreError:
    return AttemptFailed(
        f"{name}: the store denies that a range of it is there", may_have_succeeded=False
    )


def _info(name: str, found: CloudObject) -> ObjectInfo:
    return ObjectInfo(name, found.bytes, found.modified_ns)


def _just_before(prefix: str) -> str:
    """A name before all that begin with `prefix`, and behind most that are less."""
    if not prefix or prefix[-1] <= "-":
        return prefix[:-1]
    return prefix[:-1] + chr(ord(prefix[-1]) - 1) + "zz"


def _topmost_foreign(name: str) -> str:
    """The topmost part of a foreign name that is not ours; empty where there is none: a key that
    only stands for a folder, and what lies outside of the store."""
    parts = name.split("/")
    for count in range(1, len(parts)):
        folder = "/".join(parts[:count])
        if not FOLDER_NAME.fullmatch(folder):
            return f"{folder}/" if folder else ""
    return "" if FOLDER_NAME.fullmatch(name) else name
