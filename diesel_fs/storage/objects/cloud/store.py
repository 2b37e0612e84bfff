"""The object store in a bucket: S3 and stores that speak its protocol, Google's, and Azure's.

`CloudStore` keeps the contract of `ObjectStore` by single requests (`requests.py`). Importing this
module imports `obstore`, so only programs of DIESEL-FS do.

Any thread. Threads share two facts about the store: whether it supports "put only if absent", and
whether it lists out of order. Each is set by one assignment; a race costs only a repeated request.
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
from .. import store as contract
from ..retry import AttemptFailed, RetryClock, RetryingStore, RetryLoop, RetryPolicy
from ..store import FastReads, Housekeeping, ObjectInfo, ObjectStore
from .answers import (
    AttemptLimits,
    BrokenBody,
    ChangedObject,
    CloudObject,
    ConditionsUnsupported,
    PermanentStoreError,
    RangeNotSatisfiable,
)
from .location import parse_bucket_url
from .requests import CloudRequests, ResponseBody

_RESUMES_MAX = 8  # per read, and one more for each MiB: a worse link is useless
_RELISTS_MAX = 4  # listings of an unordered bucket, until two agree
_STRAY_KEYS_MAX = 5000  # repeated keys before a listing counts as endless
_ENCODED = re.compile(r"%2[Ff]")  # a slash that the store lists in URL encoding
_PLAIN = re.compile(r"(?:[A-Za-z0-9_-]+/)*[A-Za-z0-9_-]*")  # every store takes these as an offset


def open_cloud(
    url: str,
    *,
    create: bool = False,
    environ: Mapping[str, str] | None = None,
    limits: AttemptLimits | None = None,
    policy: RetryPolicy | None = None,
    clock: RetryClock | None = None,
) -> RetryingStore:
    """The store at a bucket's URL, with retries. `create` makes it if the prefix is empty. Raises
    as `CloudStore.open` and `create`."""
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
    """All objects have keys below one prefix of a bucket."""

    fork_safe = False

    def __init__(
        self,
        requests: CloudRequests,
        store_id: uuid.UUID,
        *,
        supports_conditional_put: bool | None = None,
    ) -> None:
        """Callers use `open` or `create`. `supports_conditional_put`: whether the bucket supports
        "put only if absent"; None: the first put finds out."""
        self.store_id = store_id
        self.supports_conditional_put = supports_conditional_put
        self._requests = requests
        self._location = requests.location
        self._unordered = False

    @classmethod
    def open(cls, requests: CloudRequests) -> "CloudStore":
        """Raises ObjectMissing."""
        try:
            return cls(requests, _read_marker(requests))
        except ObjectMissing:
            raise ObjectMissing(
                f"{requests.location}: no DIESEL-FS store is here (no {STORE_MARKER})",
                advice="check the bucket and the prefix",
            ) from None

    @classmethod
    def create(cls, requests: CloudRequests) -> "CloudStore":
        """Make a store if the prefix is empty, or open the one that is there. Raises ConflictError
        if anything else is there."""
        with suppress(ObjectMissing):
            return cls.open(requests)
        location = requests.location
        if any(page for page in requests.pages(location.prefix, "")):
            with suppress(ObjectMissing):  # another process may have made one
                return cls.open(requests)
            raise ConflictError(
                f"{location}: neither empty nor a DIESEL-FS store; no store is made in it",
                advice="name a prefix below which nothing is",
            )
        content = contract.encode_marker(uuid.uuid4())
        try:
            with suppress(ObjectExists):
                requests.put(location.key(STORE_MARKER), [content], create=True)
        except ConditionsUnsupported:
            requests.put(location.key(STORE_MARKER), [content], create=False)
        return cls.open(requests)

    @property
    def fast_reads(self) -> FastReads:
        return _CloudReads(self)

    @property
    def housekeeping(self) -> Housekeeping:
        return _CloudHousekeeping(self)

    # Writing

    def put(self, name: str, parts: Sequence[Bytes]) -> None:
        """If the bucket does not support conditional requests, or the object is put in parts, this
        first asks whether the object exists, and two callers at the same moment can both succeed.
        That is harmless: names of chunks are random, and two snapshots of one version are equal."""
        contract.check_name(name)
        key = self._location.key(name)
        if self.supports_conditional_put is None:
            self.supports_conditional_put = self._find_out_conditional()
        size = sum(memoryview(part).nbytes for part in parts)
        in_parts = size > self._requests.limits.put_bytes_max
        if (in_parts or not self.supports_conditional_put) and self._is_there(key):
            raise ObjectExists(f"{name}: exists already")
        if in_parts:
            self._requests.put_in_parts(key, parts)
        else:
            self._requests.put(key, parts, create=self.supports_conditional_put)

    def _find_out_conditional(self) -> bool:
        """Puts the marker again, unchanged: a bucket that obeys "put only if absent" refuses
        that."""
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
        contract.check_mutable(name)
        self._requests.put(self._location.key(name), parts, create=False)

    def delete(self, name: str) -> None:
        contract.check_deletable(name)
        self._requests.delete(self._location.key(name))

    # Reading

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytearray:
        contract.check_range(name, start, length)
        return self._get(self._location.key(name), name, start, length)

    def _get(self, key: str, name: str, start: int, length: int | None) -> bytearray:
        if length == 0:
            self._check_end(key, name, start)
            return bytearray()
        try:
            end = None if length is None else start + length
            with self._requests.open(key, start, end, None) as body:
                contract.check_end(name, start + (length or 0), body.bytes_total)
                content = bytearray(body.bytes_total - start if length is None else length)
                until = self._until(len(content))
                etag, broken = body.etag, _fill(body, memoryview(content), until)
        except RangeNotSatisfiable:
            size = self._check_end(key, name, start + (length or 0))
            if length is None and start == size:
                return bytearray()
            raise _denied(name) from None
        except ObjectMissing as error:
            raise self._missing(name) from error
        if broken is not None:
            self._resume(key, name, start, memoryview(content), etag, broken, until)
        return content

    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        contract.check_range(name, start, None)
        self._read(name, start, memoryview(buffer).cast("B"), None)

    def _read(self, name: str, start: int, view: memoryview, etag: str | None) -> str | None:
        """Fill `view` from the version with this ETag (None: any); returns its ETag."""
        key, end, until = self._location.key(name), start + len(view), self._until(len(view))
        if not view:
            self._check_end(key, name, end)
            return etag
        try:
            with self._requests.open(key, start, end, etag) as body:
                contract.check_end(name, end, body.bytes_total)
                etag, broken = body.etag, _fill(body, view, until)
        except RangeNotSatisfiable:
            self._check_end(key, name, end)
            raise _denied(name) from None
        except ObjectMissing as error:
            raise self._missing(name) from error
        if broken is not None:
            self._resume(key, name, start, view, etag, broken, until)
        return etag

    def _until(self, size: int) -> float:
        return time.monotonic() + self._requests.limits.attempt_s(size, put=False)

    def _resume(
        self,
        key: str,
        name: str,
        start: int,
        view: memoryview,
        etag: str | None,
        cause: BrokenBody,
        until: float,
    ) -> None:
        """Resume a read of the same version after its body broke off, while each request brings
        some bytes."""
        done, resumes_left = cause.received, _RESUMES_MAX + (len(view) >> 20)
        while done < len(view):
            late = time.monotonic() > until
            if late or not cause.received or etag is None or not resumes_left:
                raise cause
            resumes_left -= 1
            with self._requests.open(key, start + done, start + len(view), etag) as body:
                if body.etag != etag:
                    raise ChangedObject(f"{name}: it has changed meanwhile")
                contract.check_end(name, start + len(view), body.bytes_total)
                broken = _fill(body, view[done:], until)
            if broken is None:
                return
            cause = broken
            done += cause.received

    def _check_end(self, key: str, name: str, end: int) -> int:
        try:
            size = self._requests.head(key).bytes
        except ObjectMissing as error:
            raise self._missing(name) from error
        contract.check_end(name, end, size)
        return size

    def stat(self, name: str) -> ObjectInfo:
        contract.check_name(name)
        try:
            return _info(name, self._requests.head(self._location.key(name)))
        except ObjectMissing as error:
            raise self._missing(name) from error

    def _missing(self, name: str) -> ObjectStoreError:
        """Returns ObjectMissing if the store itself is still there."""
        try:
            store_id = _read_marker(self._requests)
        except ObjectMissing:
            return PermanentStoreError(f"{self._location}: the store has gone (no {STORE_MARKER})")
        if store_id != self.store_id:
            return PermanentStoreError(f"{self._location}: another store is in this place now")
        return ObjectMissing(f"{name}: no such object in {self._location}")

    # Listing

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """Trusts neither the order nor the end of the bucket's own listing: it has ended when a new
        one behind the last name is empty. A listing of the whole store must contain the marker."""
        contract.check_prefix(prefix)
        marker_due = STORE_MARKER.startswith(prefix) and after < STORE_MARKER
        for found in self._ordered(prefix, after):
            name = self._name(found.key)
            if marker_due and name != STORE_MARKER:  # no other name is less
                break
            marker_due = False
            yield _info(name, found)
        if marker_due:
            raise AttemptFailed(f"{self._location}: the listing is incomplete (no {STORE_MARKER})")

    def _ordered(self, prefix: str, after: str) -> Iterator[CloudObject]:
        """Objects in order of their names. Lazy until a page is out of order; then all objects are
        read and sorted."""
        if self._unordered:
            yield from self._sorted(prefix, after)
            return
        last, yielded = after, _Digest()
        while True:
            before = last
            for found in self._ours(prefix, after, last):
                name = self._name(found.key)
                if name == last:
                    continue
                if name < last:
                    self._unordered = True
                    yield from self._rest(prefix, after, last, yielded)
                    return
                last = name
                yielded.add(name)
                yield found
            # Azure lists from the start each time: listing again would bring nothing new
            if last == before or self._location.scheme == "az":
                return

    def _rest(
        self, prefix: str, after: str, last: str, yielded: "_Digest"
    ) -> Iterator[CloudObject]:
        """The objects behind `last`, sorted. Raises PermanentStoreError if the names up to `last`
        are not those that the caller has listed (`yielded`)."""
        again, rest = _Digest(), []
        for found in self._sorted(prefix, after):
            name = self._name(found.key)
            if name <= last:
                again.add(name)
            else:
                rest.append(found)
        if again != yielded:
            raise PermanentStoreError(
                f"{self._location}: the listing is not in order",
                advice="list again: it will be sorted",
            )
        yield from rest

    def _sorted(self, prefix: str, after: str) -> Iterator[CloudObject]:
        """Lists the bucket until a listing shows nothing new."""
        known: dict[str, CloudObject] = {}
        for _ in range(_RELISTS_MAX):
            before = len(known)
            for seen, found in enumerate(self._ours(prefix, after, after)):
                known.setdefault(found.key, found)
                if seen > 2 * len(known) + _STRAY_KEYS_MAX:
                    raise PermanentStoreError(f"{self._location}: the listing repeats without end")
            if len(known) == before:
                return iter([known[key] for key in sorted(known)])
        raise AttemptFailed(f"{self._location}: no two listings agree")

    def _ours(self, prefix: str, after: str, last: str) -> Iterator[CloudObject]:
        """Objects in the bucket's order. Some names before `last` may come again."""
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
        """The pages may have other names, too."""
        folder = prefix.rpartition("/")[0]
        match = _PLAIN.match(max(after, _just_before(prefix)))
        plain = match.group().rstrip("/") if match else ""
        offset = self._location.key(plain) if plain else ""
        key = self._location.key(folder) if folder else self._location.prefix
        return self._requests.pages(key, offset)

    def _name(self, key: str) -> str:
        """A key outside the store gets a name that no object has."""
        if not self._location.prefix:
            return key
        start = f"{self._location.prefix}/"
        return key[len(start) :] if key.startswith(start) else f"/{key}"


class _CloudReads(FastReads):
    _store: CloudStore

    def read_ranges(
        self, name: str, ranges: Sequence[tuple[int, int]], room: memoryview
    ) -> Iterator[memoryview]:
        """All ranges are of one version: later requests demand the first one's ETag."""
        etag: str | None = None
        for start, size in ranges:
            contract.check_range(name, start, size)
            etag = self._store._read(name, start, room[:size], etag)
            yield room[:size].toreadonly()


class _CloudHousekeeping(Housekeeping):
    _store: CloudStore

    def foreign(self, prefix: str = "") -> Iterator[str]:
        contract.check_prefix(prefix)
        known: set[str] = set()
        for page in self._store._pages(prefix, ""):
            for found in page:
                name = self._store._name(found.key)
                if not name.startswith(prefix) or OBJECT_NAME.fullmatch(name):
                    continue
                shown = _topmost_foreign(name)
                if shown and shown not in known:
                    known.add(shown)
                    yield shown


class _Digest:
    """A set of names that can only be compared; its size is constant."""

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
    with requests.open(requests.location.key(STORE_MARKER), 0, None, None) as body:
        content = bytearray(min(body.bytes_total, contract.MARKER_BYTES_MAX))
        if len(content) == body.bytes_total:
            limit_s = requests.limits.attempt_s(len(content), put=False)
            body.fill(memoryview(content), time.monotonic() + limit_s)
    return contract.parse_marker(content)


def _fill(body: ResponseBody, view: memoryview, until: float) -> BrokenBody | None:
    try:
        body.fill(view, until)
    except BrokenBody as error:
        return error
    return None


def _denied(name: str) -> ObjectStoreError:
    """The error for a refused range (HTTP 416) of an object that is long enough."""
    return AttemptFailed(
        f"{name}: the bucket refuses a range that the object has", may_have_succeeded=False
    )


def _info(name: str, found: CloudObject) -> ObjectInfo:
    return ObjectInfo(name, found.bytes, found.modified_ns)


def _just_before(prefix: str) -> str:
    """A string that sorts before all names with `prefix`, and behind most smaller names."""
    if not prefix or prefix[-1] <= "-":
        return prefix[:-1]
    return prefix[:-1] + chr(ord(prefix[-1]) - 1) + "zz"


def _topmost_foreign(name: str) -> str:
    """The shortest beginning of a foreign name that is no folder of the store. Empty for a key
    outside the store, and for one that stands for a folder."""
    parts = name.split("/")
    for count in range(1, len(parts)):
        folder = "/".join(parts[:count])
        if not FOLDER_NAME.fullmatch(folder):
            return f"{folder}/" if folder else ""
    return "" if FOLDER_NAME.fullmatch(name) else name
