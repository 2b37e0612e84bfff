"""Objects of a bucket as the source of a put (`ingest/README.md` has the rules).

The listing begins before a dataset is created, so a failure leaves no empty dataset. mtimes are
the times of writing. One thread lists and packs; `FETCHES` others fetch pieces, which are packed in
order.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import NamedTuple, Protocol

from ...errors import ConflictError, NotFoundError, ObjectStoreError, UsageError
from ...format.entries import Kind, Stat, split
from ...format.snapshot.reader import same_content
from ...repository.interface import Repository
from ...repository.writing import WriteSession
from ..options import PutOptions
from ..packer import FileSkipped, start_packer
from ..paths import check_file_target, refusal_reason, target_path
from ..put import Source

FETCHES = 32
"""An object store answers after tens of milliseconds, so many pieces are fetched at once."""

PIECE_BYTES = 8 << 20
"""Larger objects are fetched in pieces."""

AHEAD_BYTES_MAX = 64 << 20
"""Bytes that are fetched, or being fetched, but not packed; one piece more is possible."""

REFUSED_IN_A_ROW_MAX = 100
"""If the store refuses more objects in a row, it probably refuses all: the put ends."""

_MODE = 0o644
_PROGRESS_OBJECTS = 64  # listed from one report of progress to the next


class BucketObject(NamedTuple):
    """`key` is relative to the requested prefix, and empty if the prefix is the object's own
    key."""

    key: bytes
    size: int
    modified_ns: int
    tag: str  # the store's name for exactly these bytes (an ETag)


class Bucket(Protocol):
    """Any thread may call `read`."""

    def objects(self) -> Iterator[BucketObject]:
        """Objects in order of keys; or the one that the prefix names. Raises NotFoundError if there
        is neither, ObjectStoreError, PermissionDenied."""
        ...

    def read(self, found: BucketObject, start: int, size: int) -> bytes:
        """Bytes of an object in its state of the listing. Raises NotFoundError if it is gone,
        ConflictError if it has changed or is archived, ObjectStoreError."""
        ...

    def stop(self) -> None:
        """End waits that the store has requested. Repeatable."""
        ...


class BucketSource(Source):
    """A single object goes to the target itself, as a file. If there is no object, `open` raises
    NotFoundError, unless `allow_empty` is set."""

    shadowed_reason = "it is a folder of the bucket, too"

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._objects: Iterator[BucketObject] = iter(())

    def open(self, repository: Repository, target: bytes, options: PutOptions) -> None:
        """Raises UsageError for a single object if the target has no name for it, or with
        --delete."""
        listed = self._bucket.objects()
        try:
            first = next(listed, None)
        except NotFoundError:
            if not options.allow_empty:
                raise
            first = None
        if first is None:
            return
        if not first.key:
            check_file_target(target)
            if options.delete:
                raise UsageError(
                    "one object does not show which others are gone: --delete cannot go with it"
                )
        self._objects = chain([first], listed)

    def count(self) -> bool:
        for _ in self._changed():
            pass
        return True

    def pack(self, session: WriteSession) -> bool:
        options, report = self._work.options, self._work.report
        packer = start_packer(session, options.chunk_bytes, options.compress, report.add_chunk)
        fetched = _ObjectFetcher(self._bucket, self._changed())
        refused = 0  # in a row
        try:
            for each in fetched:
                try:
                    packer.add_stream(
                        fetched, each.size, split(target_path(self._work.target, each.key)),
                        _MODE, each.modified_ns,
                    )  # fmt: skip
                    refused = 0
                except (FileSkipped, NotFoundError, ConflictError) as error:
                    report.fail(each.key, str(error))
                except ObjectStoreError as error:
                    refused += 1
                    if error.retry or refused > REFUSED_IN_A_ROW_MAX:
                        raise
                    report.fail(each.key, error.message)
            packer.finish()
        finally:
            fetched.close()
            packer.close()
        return True

    def _changed(self) -> Iterator[BucketObject]:
        report, comparer = self._work.report, self._comparer
        for number, each in enumerate(self._objects):
            if number % _PROGRESS_OBJECTS == 0:
                self._work.progress(report)
            if each.key.endswith(b"/"):
                if each.size:
                    report.fail(each.key, "skipped: its key is that of a folder")
                continue
            target = target_path(self._work.target, each.key)
            if reason := refusal_reason(target):
                report.fail(each.key, reason)
                continue
            if self._work.path_filter.excludes(each.key, is_folder=False):
                continue
            index = comparer.find(target)
            if reason := comparer.conflict_reason(target, index, Kind.FILE):
                report.fail(each.key, reason)
                continue
            entry = Stat(Kind.FILE, _MODE, each.size, each.modified_ns)
            if comparer.unchanged(index, entry) and self._has_same_content(index, each):
                report.unchanged += 1
                continue
            report.entries_found += 1
            comparer.mark_replaced(index)
            yield each
        report.walked = True

    def _has_same_content(self, index: int, each: BucketObject) -> bool:
        """Always true without `--checksum`."""
        if not self._work.options.checksum:
            return True
        try:
            return same_content(
                self._work.view.extents(index),
                lambda size, start: self._bucket.read(each, start, size),
            )
        except (NotFoundError, ConflictError):
            return False  # fetching it will report the reason


class _Piece(NamedTuple):
    """A part of the object with the number `owner`, fetched or being fetched."""

    owner: int
    size: int
    content: "Future[bytes]"


class _ObjectFetcher:
    """Iterates over objects and fetches them ahead. `read` reads the current one."""

    def __init__(self, bucket: Bucket, wanted: Iterator[BucketObject]) -> None:
        self._bucket = bucket
        self._threads = ThreadPoolExecutor(FETCHES, "fetch")
        self._objects: deque[tuple[int, BucketObject]] = deque()  # being fetched
        self._ahead: deque[_Piece] = deque()
        self._ahead_bytes = 0
        self._current = -1  # the number of the object that the iterator returned last
        self._piece = memoryview(b"")  # the unread rest of the current piece
        self._steps = self._fetch_steps(wanted)

    def __iter__(self) -> Iterator[BucketObject]:
        while self._objects or self._fill():
            self._current, found = self._objects.popleft()
            yield found
            self._piece = memoryview(b"")  # left if reading the object has failed
            while self._ahead and self._ahead[0].owner == self._current:
                self._drop()

    def read(self, size: int, /) -> memoryview:
        if not self._piece:
            self._fill()
            if not self._ahead or self._ahead[0].owner != self._current:
                return self._piece
            try:
                self._piece = memoryview(self._ahead[0].content.result())
            finally:
                self._drop()
        part, self._piece = self._piece[:size], self._piece[size:]
        return part

    def close(self) -> None:
        self._bucket.stop()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _drop(self) -> None:
        piece = self._ahead.popleft()
        piece.content.cancel()
        self._ahead_bytes -= piece.size

    def _fill(self) -> bool:
        """Fetch pieces as far as there is room. Returns whether there is an object to pack."""
        while (
            max(len(self._ahead), len(self._objects)) < 2 * FETCHES
            and self._ahead_bytes < AHEAD_BYTES_MAX
            and next(self._steps, False)
        ):
            pass
        return bool(self._objects)

    def _fetch_steps(self, wanted: Iterator[BucketObject]) -> Iterator[bool]:
        """Each step begins to fetch one piece; an empty object is a step, too."""
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
