"""A bucket as the source of a put: lists and reads its objects and archives, with retries."""

import fnmatch
import os
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from typing import Protocol

from diesel_fs.errors import (
    ConflictError,
    NotFoundError,
    ObjectMissing,
    ObjectStoreError,
    UsageError,
)
from diesel_fs.ingest import ArchiveState, BucketObject
from diesel_fs.ingest.sources.archive_file import ArchiveFile, FetchedArchiveFile
from diesel_fs.ingest.sources.archive_places import split_sha256
from diesel_fs.storage.objects.cloud.answers import (
    AttemptLimits,
    ChangedObject,
    CloudObject,
    ObjectArchived,
    RangeNotSatisfiable,
)
from diesel_fs.storage.objects.cloud.location import BucketLocation, source_location
from diesel_fs.storage.objects.cloud.requests import CloudRequests, UnlistableKey
from diesel_fs.storage.objects.retry import LongPauses, RetryClock, RetryLoop, RetryPolicy
from diesel_fs.urls import RepositoryUrl, parse_url

_POLICY = RetryPolicy()
_AHEAD = 8  # pieces of an archive that are fetched ahead of its reader
_WILDCARD = re.compile(r"[*?[]")


class _Body(Protocol):
    def fill(self, view: memoryview, until_s: float, /) -> None: ...


class _Requests(Protocol):
    limits: AttemptLimits

    def pages(self, prefix: str, after: str, /) -> Iterator[list[CloudObject]]: ...
    def head(self, key: str, /) -> CloudObject: ...
    def open(
        self, key: str, start: int, end: int, etag: str | None, /
    ) -> AbstractContextManager[_Body]: ...


class CloudBucket:
    """The objects below a URL's prefix, or the single object that has the prefix as its key."""

    def __init__(self, url: RepositoryUrl) -> None:
        """Sends no request yet. Raises ConfigError."""
        self._url = url
        self._requests = _requests_to(source_location(url))
        self._prefix = f"{url.prefix}/" if url.prefix else ""
        self._pauses = LongPauses()

    @cached_property
    def single_object(self) -> CloudObject | None:
        """None if there are objects below the prefix, or if no object has it as its key. Sends
        requests."""
        key = self._url.prefix
        if not key or next(self._list(), None) is not None:
            return None
        try:
            return self._retrying(0).call(lambda: self._requests.head(key))
        except ObjectMissing:
            return None

    def objects(self) -> Iterator[BucketObject]:
        """The objects in the store's order. A key with a slash at its end stands for a folder, as
        vendors' consoles make it. Raises NotFoundError if there is no object."""
        if (single := self.single_object) is not None:
            yield BucketObject(b"", single.bytes, single.modified_ns, single.etag or "")
            return
        # Without a prefix, an empty bucket is no error; the store itself reports a missing one
        has_objects = not self._prefix
        for found in self._list():
            has_objects = True
            if len(found.key) > len(self._prefix) and found.key.startswith(self._prefix):
                key = found.key.removeprefix(self._prefix).encode()
                yield BucketObject(key, found.bytes, found.modified_ns, found.etag or "")
        if not has_objects:
            raise NotFoundError(f"there is no object below {self._url}, nor at that key")

    def _list(self) -> Iterator[CloudObject]:
        """After a passing error, the listing resumes behind the last key."""
        after, retrying = "", self._retrying(0)
        while True:
            try:
                for page in self._requests.pages(self._prefix, after):
                    for found in page:
                        after = found.key
                        yield found
                    retrying = self._retrying(0)
                return
            except UnlistableKey as error:
                error.advice = "rename or remove that object, or put the other prefixes one by one"
                raise
            except ObjectStoreError as error:
                retrying.wait_or_raise(error)

    def read(self, found: BucketObject, start: int, size: int) -> bytes:
        """Reads exactly `size` bytes. Raises NotFoundError if the object is gone, ConflictError if
        it has changed since the listing or is archived, ObjectStoreError."""
        key = self._prefix + found.key.decode() if found.key else self._url.prefix
        content = bytearray(size)
        self._retrying(size).call(lambda: self._read(key, found.tag, start, memoryview(content)))
        return bytes(content)

    def stop(self) -> None:
        """Reads that wait for a long pause of the store fail. Any thread may call this."""
        self._pauses.stop()

    def _read(self, key: str, tag: str, start: int, room: memoryview) -> None:
        until_s = time.monotonic() + _POLICY.deadline_for(len(room))
        try:
            with self._requests.open(key, start, start + len(room), tag or None) as body:
                body.fill(room, until_s)
        except ObjectMissing as error:
            raise NotFoundError(error.message) from None
        except (ChangedObject, RangeNotSatisfiable) as error:
            raise ConflictError(f"it changed while it was being read: {error.message}") from None
        except ObjectArchived as error:
            raise ConflictError(f"{error.message}; {error.advice}") from None

    def _retrying(self, size: int) -> RetryLoop:
        return RetryLoop(
            _POLICY,
            RetryClock(),
            deadline_s=_POLICY.deadline_for(size),
            attempt_s=self._requests.limits.attempt_s(size, put=False),
            pauses=self._pauses,
        )


class BucketArchive:
    is_local = False

    def __init__(self, bucket: CloudBucket, found: BucketObject, name: str, sha256: bytes) -> None:
        self.name = self.address = name
        self.file_name = os.path.basename(name)
        self.sha256 = sha256
        self._bucket = bucket
        self._found = found

    def stop(self) -> None:
        self._bucket.stop()

    def look(self) -> ArchiveState:
        return ArchiveState(self._found.tag, self._found.size, self._found.modified_ns)

    def open(self, state: ArchiveState) -> ArchiveFile:
        return FetchedArchiveFile(state.size, partial(self._bucket.read, self._found), _AHEAD)


class _PathRequests(CloudRequests):
    """Requests to Google and Azure, whose library removes the slash at the end of a key."""

    def pages(self, folder: str, after: str) -> Iterator[list[CloudObject]]:
        """An empty object gets its slash back if the next object is below it, since consoles mark
        folders so. (With no object below, it looks like an empty file.)"""
        last: CloudObject | None = None
        for page in super().pages(folder.rstrip("/"), after):
            shown: list[CloudObject] = []
            for found in page:
                if last is not None and last.key != found.key:  # otherwise the listing had it twice
                    is_folder = not last.bytes and found.key.startswith(f"{last.key}/")
                    shown.append(replace(last, key=f"{last.key}/") if is_folder else last)
                last = found
            yield shown
        if last is not None:
            yield [last]


def _requests_to(location: BucketLocation) -> _Requests:
    if location.scheme == "s3":
        from diesel_fs.storage.objects.cloud.s3_source import S3Source  # noqa: PLC0415

        return S3Source(location)
    return _PathRequests(location)


def bucket_archives(address: str) -> list[BucketArchive]:
    """The address is that of one object (s3://bucket/shards/1.tar), a glob
    (s3://bucket/shards/*.tar; wildcards match no slash), or a prefix of objects. Sends requests.
    Raises NotFoundError, ConfigError, UsageError, ObjectStoreError."""
    plain, sha256 = split_sha256(address)
    wildcard = _WILDCARD.search(plain)
    folder = plain[: plain.rindex("/", 0, wildcard.start())] if wildcard else plain.rstrip("/")
    pattern = plain[len(folder) + 1 :] if wildcard else None
    bucket, found = CloudBucket(parse_url(folder)), []
    for each in bucket.objects():
        key = each.key.decode()
        if not key.endswith("/") and (pattern is None or _matches(key, pattern)):
            found.append(BucketArchive(bucket, each, f"{folder}/{key}".rstrip("/"), sha256))
    if not found:
        raise NotFoundError(f"no object matches {plain}")
    if sha256 and len(found) > 1:
        raise UsageError(f"{plain}: one SHA-256 cannot be that of {len(found)} archives")
    return found


def _matches(key: str, pattern: str) -> bool:
    names, globs = key.split("/"), pattern.split("/")
    return len(names) == len(globs) and all(map(fnmatch.fnmatchcase, names, globs))
