"""A bucket in the cloud as the source of a put.

Imported when one is put: it brings the library that speaks to such stores.
"""

import time
from collections.abc import Iterator
from functools import cached_property

from diesel_fs.errors import ConflictError, NotFoundError, ObjectMissing, ObjectStoreError
from diesel_fs.ingest import BucketObject
from diesel_fs.storage.objects.cloud.location import parse_bucket_url
from diesel_fs.storage.objects.cloud.requests import (
    ChangedObject,
    CloudObject,
    CloudRequests,
    RangeNotSatisfiable,
    UnlistableKey,
)
from diesel_fs.storage.objects.retry import RetryClock, RetryLoop, RetryPolicy
from diesel_fs.urls import RepositoryUrl

_POLICY = RetryPolicy()


class CloudBucket:
    """The objects below a prefix of a bucket, or the one at just that key, as a source of
    `put_bucket`."""

    def __init__(self, url: RepositoryUrl) -> None:
        """Sends nothing yet. Raises ConfigError."""
        self._url = url
        self._requests = CloudRequests(parse_bucket_url(url.objects_url))
        self._prefix = f"{url.prefix}/" if url.prefix else ""

    @cached_property
    def single_object(self) -> CloudObject | None:
        """The object at the very key that the URL names, where nothing lies below that as a
        prefix. Asks the store."""
        key = self._url.prefix
        if not key or next(self._listed(), None) is not None:
            return None
        try:
            return self._retrying(0).call(lambda: self._requests.head(key))
        except ObjectMissing:
            return None

    def objects(self) -> Iterator[BucketObject]:
        """All of them, as the store lists them. Raises NotFoundError where nothing is there.

        What consoles make to show a folder is an empty object named like it: where something lies
        below, its key gets its slash back, which the library takes off.
        """
        if (one := self.single_object) is not None:
            yield BucketObject(b"", one.bytes, one.modified_ns, one.etag or "")
            return
        last: BucketObject | None = None
        is_there = not self._prefix  # of a bucket that is not there the store says so itself
        for found in self._listed():
            is_there = True
            if not found.key.startswith(self._prefix):
                continue  # what consoles make of the prefix itself, which lost its slash
            key = found.key.removeprefix(self._prefix).encode()
            if last is not None and last.key == key:
                continue  # told twice
            if last is not None:
                is_folder = not last.size and key.startswith(last.key + b"/")
                yield last._replace(key=last.key + b"/") if is_folder else last
            last = BucketObject(key, found.bytes, found.modified_ns, found.etag or "")
        if last is not None:
            yield last
        if not is_there:
            raise NotFoundError(f"there is no object below {self._url}, nor at that key")

    def _listed(self) -> Iterator[CloudObject]:
        """The listing, begun again behind its last key where it breaks."""
        after, retrying = "", self._retrying(0)
        while True:
            try:
                for page in self._requests.pages(self._prefix.rstrip("/"), after):
                    for found in page:
                        after = found.key
                        yield found
                    retrying = self._retrying(0)
                return
            except UnlistableKey as error:
                error.advice = "rename or remove that object, or put the prefixes beside it"
                raise
            except ObjectStoreError as error:
                retrying.wait_or_raise(error)

    def read(self, found: BucketObject, start: int, size: int) -> bytes:
        """Just so many bytes of an object as it was listed.

        Raises NotFoundError where it is gone, ConflictError where it has changed.
        """
        key = self._prefix + found.key.decode() if found.key else self._url.prefix
        content, until_s = bytearray(size), time.monotonic() + _POLICY.deadline_for(size)
        self._retrying(size).call(
            lambda: self._read(key, found.tag, start, memoryview(content), until_s)
        )
        return bytes(content)

    def _read(self, key: str, tag: str, start: int, room: memoryview, until_s: float) -> None:
        try:
            with self._requests.open(key, start, start + len(room), tag or None) as body:
                body.fill(room, until_s)
        except ObjectMissing as error:
            raise NotFoundError(error.message) from None
        except (ChangedObject, RangeNotSatisfiable) as error:
            raise ConflictError(f"it changed while it was being read: {error.message}") from None

    def _retrying(self, size: int) -> RetryLoop:
        return RetryLoop(
            _POLICY,
            RetryClock(),
            deadline_s=_POLICY.deadline_for(size),
            attempt_s=self._requests.limits.attempt_s(size, put=False),
        )
