"""Putting objects that lie in a bucket already: each becomes a file named after its key.

Owned here: what of a listing becomes which entry, and how far fetching runs ahead of packing. Not
owned: listing and fetching themselves (a `Bucket` is handed in). Keys that end in a slash are what
consoles show as folders: they are left out, and so are keys that can be no path, which are named.
Modes are 0644, times are when the object was written. Nothing is made of the dataset before the
listing has begun: of a source that is not there, or cannot be listed, no empty dataset is left.

Concurrency: one thread lists and packs; `FETCHES` others fetch pieces, which are packed in order.
"""

import io
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import NamedTuple, Protocol

from ...errors import ConflictError, NotFoundError, UsageError
from ...format.entries import Kind, Stat, join, path_fault, split
from ...format.snapshot.reader import Snapshot, same_content
from ...repository.interface import Repository
from ...repository.writing import WriteSession
from ..compare import RESERVED_NAME
from ..concurrent_writers import finish_put
from ..conflicts import EntryComparer, ReadabilityCheck, begin_put, delete_shadowed_files
from ..options import Filter, PutOptions, PutProgress, PutReport, no_progress
from ..packer import FileSkipped
from .file import check_target, new_packer

FETCHES = 32
"""Requests at once: an object store answers each after tens of milliseconds."""

PIECE_BYTES = 8 << 20
"""Larger objects are fetched in such pieces."""

AHEAD_BYTES_MAX = 64 << 20
"""What may be fetched and not packed yet; one piece more at most."""

_MODE = 0o644
_PROGRESS_OBJECTS = 64


class BucketObject(NamedTuple):
    """One object of a listing; `key` is below the prefix that was asked for, and empty where that
    is the key of the object itself."""

    key: bytes
    size: int
    modified_ns: int
    tag: str  # the store's name for just these bytes (an ETag)


class Bucket(Protocol):
    """Objects below a prefix of a bucket. `read` may be called from many threads."""

    def objects(self) -> Iterator[BucketObject]:
        """All of them, in order of their keys; or the one object that the prefix names.

        Raises NotFoundError where there is neither, ObjectStoreError, PermissionDenied.
        """
        ...

    def read(self, found: BucketObject, start: int, size: int) -> bytes:
        """Just so many bytes of it, as it was listed.

        Raises NotFoundError where it is gone, ConflictError where it has changed,
        ObjectStoreError.
        """
        ...


def put_bucket(
    repository: Repository,
    dataset: str,
    bucket: Bucket,
    prefix: bytes = b"",
    options: PutOptions | None = None,
    progress: PutProgress = no_progress,
) -> PutReport:
    """Put the objects of a bucket below `prefix` of a dataset; as `put_tree` otherwise.

    A source of one object becomes the file `prefix`. One that is not there counts as empty where
    that is allowed. Raises NotFoundError.
    """
    options = options or PutOptions()
    if prefix.split(b"/", 1)[0] == RESERVED_NAME:
        raise UsageError("`.diesel` at the root of a dataset is the mount's own folder")
    objects = _begun(bucket, prefix, options)
    session, view, readable = begin_put(repository, dataset, options)
    put = BucketSource(view, readable, bucket, objects, prefix, options, progress)
    if session is None:
        put.report.entries_found = sum(1 for _ in put.wanted())
        put.report.set_to_delete(put.comparer.removed_paths())
        return put.report
    put.run(session)
    if gone := put.comparer.removed_paths():
        put.report.deleted = session.delete(gone)
    finish_put(repository, session, put.report, prefix)
    delete_shadowed_files(
        repository, session, view, put.report, "it is a folder of the bucket, too"
    )
    progress(put.report)
    return put.report


def _begun(bucket: Bucket, prefix: bytes, options: PutOptions) -> Iterator[BucketObject]:
    """The objects of a bucket, of which the first has been heard of. Raises NotFoundError, and
    UsageError for one object that has no name, or goes with --delete."""
    listed = bucket.objects()
    try:
        first = next(listed, None)
    except NotFoundError:
        if not options.allow_empty:
            raise
        first = None
    if first is None:
        return iter(())
    if not first.key:
        check_target(prefix)
        if options.delete:
            raise UsageError("one object says nothing about others: --delete cannot go with it")
    return chain([first], listed)


class BucketSource:
    """One put of a bucket."""

    def __init__(
        self,
        view: Snapshot,
        readable: ReadabilityCheck,
        bucket: Bucket,
        objects: Iterator[BucketObject],
        prefix: bytes,
        options: PutOptions,
        progress: PutProgress,
    ) -> None:
        self.report = PutReport()
        self._bucket = bucket
        self._objects = objects
        self._prefix = prefix
        self._options = options
        self._chosen = Filter(options)
        self.comparer = EntryComparer(view, prefix, options, readable)
        self._progress = progress

    def run(self, session: WriteSession) -> None:
        """Pack all that is wanted. Raises DieselError; what was committed by then stays."""
        packer = new_packer(session, self._options, self.report)
        fetched = _ObjectFetcher(self._bucket, self.wanted())
        try:
            for each in fetched:
                try:
                    target = _target(self._prefix, each.key)
                    packer.add_stream(
                        io.BufferedReader(fetched.content()), each.size, split(target),
                        _MODE, each.modified_ns,
                    )  # fmt: skip
                except (FileSkipped, NotFoundError, ConflictError) as error:
                    self.report.fail(each.key, str(error))
            packer.finish()
        finally:
            fetched.close()
            packer.close()

    def wanted(self) -> Iterator[BucketObject]:
        """The objects to put, looked at as they are listed."""
        for number, each in enumerate(self._objects):
            if number % _PROGRESS_OBJECTS == 0:
                self._progress(self.report)
            if each.key.endswith(b"/"):
                continue
            target = _target(self._prefix, each.key)
            if reason := _refusal(target):
                self.report.fail(each.key, reason)
                continue
            if self._chosen.excludes(each.key, is_folder=False):
                continue
            index = self.comparer.find(target)
            if reason := self.comparer.conflict_reason(target, index, Kind.FILE):
                self.report.fail(each.key, reason)
                continue
            entry = Stat(Kind.FILE, _MODE, each.size, each.modified_ns)
            if self.comparer.unchanged(index, entry) and self._holds(index, each):
                self.report.unchanged += 1
                continue
            self.report.entries_found += 1
            self.comparer.mark_replaced(index)
            yield each
        self.report.walked = True

    def _holds(self, index: int, each: BucketObject) -> bool:
        """Whether the dataset has these very bytes, where that is asked for."""
        if not self._options.checksum:
            return True
        try:
            return same_content(
                self.comparer.view.extents(index),
                lambda size, start: self._bucket.read(each, start, size),
            )
        except (NotFoundError, ConflictError):
            return False  # which fetching it will tell


class _Piece(NamedTuple):
    owner: int  # which of the wanted objects
    size: int
    content: "Future[bytes]"


class _ObjectFetcher:
    """The wanted objects one by one, and each one's content, fetched ahead."""

    def __init__(self, bucket: Bucket, wanted: Iterator[BucketObject]) -> None:
        self._bucket = bucket
        self._threads = ThreadPoolExecutor(FETCHES, "fetch")
        self._objects: deque[tuple[int, BucketObject]] = deque()  # begun to be fetched
        self._ahead: deque[_Piece] = deque()
        self._ahead_bytes = 0
        self._current = -1
        self._begin = self._begun(wanted)

    def __iter__(self) -> Iterator[BucketObject]:
        while self._objects or self._fill():
            self._current, found = self._objects.popleft()
            yield found
            while self._ahead and self._ahead[0].owner == self._current:  # it has failed
                self._drop()

    def content(self) -> "_Content":
        """The content of the object that is the iterator's turn, to be read once."""
        return _Content(self)

    def piece(self) -> bytes:
        """The next piece of this object; empty at its end."""
        self._fill()
        if not self._ahead or self._ahead[0].owner != self._current:
            return b""
        try:
            return self._ahead[0].content.result()
        finally:
            self._drop()

    def close(self) -> None:
        """Fetches no more."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _drop(self) -> None:
        piece = self._ahead.popleft()
        piece.content.cancel()
        self._ahead_bytes -= piece.size

    def _fill(self) -> bool:
        """Fetches ahead as far as that may go; whether an object is there to be taken."""
        while (
            max(len(self._ahead), len(self._objects)) < 2 * FETCHES
            and self._ahead_bytes < AHEAD_BYTES_MAX
            and next(self._begin, False)
        ):
            pass
        return bool(self._objects)

    def _begun(self, wanted: Iterator[BucketObject]) -> Iterator[bool]:
        """Begins to fetch a piece, or an empty object, each time it is asked."""
        for number, found in enumerate(wanted):
            self._objects.append((number, found))
            if not found.size:
                yield True
            for start in range(0, found.size, PIECE_BYTES):
                size = min(PIECE_BYTES, found.size - start)
                content = self._threads.submit(self._bucket.read, found, start, size)
                self._ahead.append(_Piece(number, size, content))
                self._ahead_bytes += size
                yield True


class _Content(io.RawIOBase):
    """One object as a file that is read from its beginning to its end."""

    def __init__(self, fetched: _ObjectFetcher) -> None:
        self._fetched = fetched
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview[int]") -> int:  # type: ignore[override]  # it is one
        if not self._left:
            self._left = memoryview(self._fetched.piece())
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


def _target(prefix: bytes, key: bytes) -> bytes:
    return join(prefix, key) if key else prefix


def _refusal(target: bytes) -> str:
    """Why no file can be put at a path, or the empty string."""
    if fault := path_fault(target):
        return f"refused: its name has {fault}"
    if target.split(b"/", 1)[0] == RESERVED_NAME:
        return "refused: it is the name of a mount's own folder"
    return ""
