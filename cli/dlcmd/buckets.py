"""A bucket in the cloud as the source of a put.

Imported when one is put: it brings the library that speaks to such stores.
"""

import time
from collections.abc import Iterator

from diesel_fs.errors import ConflictError, NotFoundError, ObjectMissing, ObjectStoreError
from diesel_fs.storage.cloud_place import parse_place
from diesel_fs.storage.cloud_requests import ChangedObject, CloudRequests, EmptyRange, Found
from diesel_fs.storage.retries import Clock, Retrying, RetryPolicy
from diesel_fs.urls import RepositoryUrl
from diesel_fs.writer import BucketObject

_READ_S = 60.0


class CloudBucket:
    """The objects below a prefix of a bucket, as a source of `put_bucket`."""

    def __init__(self, url: RepositoryUrl) -> None:
        """Sends nothing yet. Raises ConfigError."""
        self._requests = CloudRequests(parse_place(url.place))
        self._prefix = f"{url.prefix}/" if url.prefix else ""

    def objects(self) -> Iterator[BucketObject]:
        """All of them, as the store lists them.

        What consoles make to show a folder is an empty object named like it: where something lies
        below, its key gets its slash back, which the library takes off.
        """
        last: BucketObject | None = None
        for found in self._listed():
            key = found.key.removeprefix(self._prefix).encode()
            if last is not None and last.key == key:
                continue  # told twice
            if last is not None:
                is_folder = not last.size and key.startswith(last.key + b"/")
                yield last._replace(key=last.key + b"/") if is_folder else last
            last = BucketObject(key, found.bytes, found.modified_ns, found.etag or "")
        if last is not None:
            yield last

    def _listed(self) -> Iterator[Found]:
        """The listing, begun again behind its last key where it breaks."""
        after, retrying = "", _retrying()
        while True:
            try:
                for page in self._requests.pages(self._prefix.rstrip("/"), after):
                    for found in page:
                        if not found.key.startswith(self._prefix):
                            continue
                        after = found.key
                        yield found
                    retrying = _retrying()
                return
            except ObjectStoreError as error:
                retrying.failed(error)

    def read(self, found: BucketObject, start: int, size: int) -> bytes:
        """Just so many bytes of an object as it was listed.

        Raises NotFoundError where it is gone, ConflictError where it has changed.
        """
        key, content = self._prefix + found.key.decode(), bytearray(size)
        until_s = time.monotonic() + _READ_S
        _retrying().call(lambda: self._read(key, found.tag, start, memoryview(content), until_s))
        return bytes(content)

    def _read(self, key: str, tag: str, start: int, room: memoryview, until_s: float) -> None:
        try:
            with self._requests.open(key, start, start + len(room), tag or None) as body:
                body.fill(room, until_s)
        except ObjectMissing as error:
            raise NotFoundError(error.message) from None
        except (ChangedObject, EmptyRange) as error:
            raise ConflictError(f"it changed while it was being read: {error.message}") from None


def _retrying() -> Retrying:
    return Retrying(RetryPolicy(), Clock(), deadline_s=_READ_S, attempt_s=0.0)
