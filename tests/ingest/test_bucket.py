"""Putting objects of a bucket: which become files, how far fetching runs ahead, and faults."""

import threading
import time
from collections.abc import Iterator

import pytest

from diesel_fs import ingest
from diesel_fs.errors import ConflictError, NotFoundError, ObjectStoreError
from diesel_fs.ingest import BucketObject, BucketSource, PutOptions, PutReport
from diesel_fs.ingest.sources.bucket import AHEAD_BYTES_MAX, PIECE_BYTES
from diesel_fs.repository.local import LocalRepository

from ..datasets import file_contents


class FakeBucket:
    def __init__(self, contents: dict[bytes, bytes], modified_ns: int = 7) -> None:
        self.contents = contents
        self.modified_ns = modified_ns
        self.changed: set[bytes] = set()
        self.listing_error: Exception | None = None
        self.read_error: Exception | None = None
        self.delay_s = 0.0
        self.reads: list[tuple[bytes, int, int]] = []
        self.at_once = self.at_once_max = self.held_bytes_max = 0
        self._lock = threading.Lock()

    def stop(self) -> None:
        pass

    def objects(self) -> Iterator[BucketObject]:
        if self.listing_error is not None:
            raise self.listing_error
        for key in sorted(self.contents):
            yield BucketObject(key, len(self.contents[key]), self.modified_ns, "tag")

    def read(self, found: BucketObject, start: int, size: int) -> bytes:
        with self._lock:
            self.reads.append((found.key, start, size))
            self.at_once += 1
            self.at_once_max = max(self.at_once_max, self.at_once)
        try:
            time.sleep(self.delay_s)
            if self.read_error is not None:
                raise self.read_error
            if found.key in self.changed:
                raise ConflictError(f"{found.key!r} has changed")
            if found.key not in self.contents:
                raise NotFoundError(f"{found.key!r} is gone")
            return self.contents[found.key][start : start + size]
        finally:
            with self._lock:
                self.at_once -= 1


def put(
    repository: LocalRepository, bucket: FakeBucket, prefix: bytes = b"", **options: object
) -> PutReport:
    return ingest.put(repository, "pets", BucketSource(bucket), prefix, PutOptions(**options))  # type: ignore[arg-type]  # what came is passed on


def files(repository: LocalRepository) -> dict[bytes, bytes]:
    return file_contents(repository.view("pets"), repository)


CONTENTS = {
    b"a": b"1",
    b"b/c": b"",
    b"b/d": bytes(range(256)) * 1000,
    b"large": bytes(i % 251 for i in range(100)) * (PIECE_BYTES // 40),  # two pieces and a half
    b"\xff \n": b"odd",
}


def test_objects_become_files(repository: LocalRepository) -> None:
    bucket = FakeBucket(CONTENTS)
    report = put(repository, bucket, b"in/here")
    assert files(repository) == {b"in/here/" + key: content for key, content in CONTENTS.items()}
    assert (report.files, report.failed, report.entries_found) == (len(CONTENTS), [], len(CONTENTS))
    view = repository.view("pets")
    found = view.stat(view.lookup(b"in/here/a"))
    assert (found.mode, found.mtime_ns) == (0o644, 7)
    assert repository.verify("pets").sound


def test_unchanged_objects_are_not_fetched(repository: LocalRepository) -> None:
    put(repository, FakeBucket(CONTENTS))
    again = FakeBucket(CONTENTS)
    report = put(repository, again)
    assert (report.unchanged, report.files, again.reads) == (len(CONTENTS), 0, [])
    newer = FakeBucket(CONTENTS | {b"a": b"2"}, modified_ns=8)
    assert put(repository, newer, include=("a",)).files == 1
    assert files(repository)[b"a"] == b"2"


def test_objects_that_cannot_be_files_are_skipped(repository: LocalRepository) -> None:
    bucket = FakeBucket(
        {b"folder/": b""}
        | dict.fromkeys([b"/x", b"a//b", b"a/../b", b".diesel/x", b"n" * 256, b"both"], b"1")
        | {b"both/x": b"2", b"fine": b"3"}
    )
    report = put(repository, bucket)
    assert files(repository) == {b"both/x": b"2", b"fine": b"3"}
    failed = {path for path, _ in report.failed}
    assert failed == {b"/x", b"a//b", b"a/../b", b".diesel/x", b"n" * 256, b"both"}


def test_objects_that_change_meanwhile_are_left_out_and_named(repository: LocalRepository) -> None:
    bucket = FakeBucket(CONTENTS)
    bucket.changed = {b"large", b"b/d"}
    report = put(repository, bucket)
    assert {path for path, _ in report.failed} == {b"large", b"b/d"}
    assert files(repository).keys() == CONTENTS.keys() - {b"large", b"b/d"}
    assert repository.verify("pets").sound


def test_an_object_that_is_shorter_than_listed(repository: LocalRepository) -> None:
    bucket = FakeBucket(dict(CONTENTS))
    listed = list(bucket.objects())
    bucket.objects = lambda: iter(listed)  # type: ignore[method-assign]  # a fault is put in
    bucket.contents[b"large"] = b"short"
    del bucket.contents[b"a"]
    report = put(repository, bucket)
    assert {path for path, _ in report.failed} == {b"large", b"a"}
    assert files(repository).keys() == CONTENTS.keys() - {b"large", b"a"}


def test_a_store_that_fails_ends_the_put(repository: LocalRepository) -> None:
    bucket = FakeBucket(CONTENTS)
    bucket.read_error = ObjectStoreError("the bucket cannot be reached")
    with pytest.raises(ObjectStoreError, match="cannot be reached"):
        put(repository, bucket)


def test_a_dry_run_fetches_nothing(repository: LocalRepository) -> None:
    put(repository, FakeBucket({b"a": b"1", b"b": b"1"}))
    bucket = FakeBucket({b"b": b"22", b"c": b"3"})
    report = put(repository, bucket, dry_run=True, delete=True)
    assert (report.entries_found, report.deleted, bucket.reads) == (2, 1, [])


def test_fetching_runs_ahead_within_limits(repository: LocalRepository) -> None:
    """Memory for some pieces only; a million empty objects do not fill a queue."""
    bucket = FakeBucket({b"%05d" % i: b"x" * 100 for i in range(300)})
    bucket.delay_s = 0.02
    start_s = time.monotonic()
    put(repository, bucket)
    assert time.monotonic() - start_s < 300 * 0.02 / 4
    assert bucket.at_once_max > 8
    huge = FakeBucket({b"huge": bytes(3 * AHEAD_BYTES_MAX)})
    put(repository, huge, b"huge", compress="lz4")
    assert huge.at_once_max * PIECE_BYTES <= AHEAD_BYTES_MAX + PIECE_BYTES
    assert len(huge.reads) == 3 * AHEAD_BYTES_MAX // PIECE_BYTES


def test_a_prefix_without_objects_is_not_found(
    repository: LocalRepository,
) -> None:
    bucket = FakeBucket({})
    bucket.listing_error = NotFoundError("nothing is there")
    put(repository, FakeBucket(CONTENTS))
    with pytest.raises(NotFoundError, match="nothing is there"):
        put(repository, bucket, delete=True)
    assert put(repository, bucket, delete=True, allow_empty=True).deleted > 0
    assert files(repository) == {}


def test_the_prefix_may_be_the_key_of_one_object(repository: LocalRepository) -> None:
    bucket = FakeBucket({b"": b"content"})
    assert put(repository, bucket, b"in/here").files == 1
    assert put(repository, bucket, b"in/here", checksum=True).unchanged == 1
    assert files(repository) == {b"in/here": b"content"}
    assert put(repository, bucket, b"in").failed == [
        (b"", "refused: in is a folder of the dataset; remove it first")
    ]
