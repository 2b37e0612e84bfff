"""The laws that every source of a put keeps: a folder, a tar, a bucket and a single file.

A `Kind` of source makes a source that holds given files, with given contents and one mtime, so each
law stands here once and runs for each source. Tests of one source alone are in `test_put.py`
(folders), `test_tar.py` and `test_bucket.py`.
"""

import io
import os
import tarfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import pytest

from diesel_fs import ingest
from diesel_fs.errors import ConflictError, NotFoundError, UsageError
from diesel_fs.format.chunk import CHUNK_BYTES_MIN
from diesel_fs.format.entries import Kind, Stat
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.ingest import (
    BucketSource,
    FileSource,
    FolderSource,
    PutOptions,
    PutReport,
    Source,
    TarSource,
)
from diesel_fs.repository.local import LocalRepository
from tests.rows import each_row
from tests.tiers import fast_first

from ..datasets import file_contents
from ..trees import write
from .test_bucket import FakeBucket

MTIME_NS = 7_000_000_000
Files = Mapping[str, bytes]
MakeSource = Callable[[Files, int], Source]
"""With this mtime (ns) and the mode 0644."""


class PutMany(Protocol):
    """Options are those of `PutOptions`."""

    def __call__(
        self, files: Files, target: bytes = b"", *, mtime_ns: int = MTIME_NS, **options: object
    ) -> PutReport: ...


class PutOne(Protocol):
    """Options are those of `PutOptions`."""

    def __call__(
        self, path: str, content: bytes, *, mtime_ns: int = MTIME_NS, **options: object
    ) -> PutReport: ...


@pytest.fixture
def folder_source(tmp_path: Path) -> MakeSource:
    folders = iter(range(99))

    def make(files: Files, mtime_ns: int) -> Source:
        top = write(tmp_path / f"source{next(folders)}", dict(files))
        for path in (top, *top.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
            os.utime(path, ns=(0, mtime_ns))
        return FolderSource(top)

    return make


def tar_source(files: Files, mtime_ns: int) -> Source:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), mtime_ns // 1_000_000_000
            tar.addfile(info, io.BytesIO(content))
    return TarSource(io.BytesIO(out.getvalue()))


def bucket_source(files: Files, mtime_ns: int) -> Source:
    return BucketSource(FakeBucket({name.encode(): files[name] for name in files}, mtime_ns))


@pytest.fixture(params=fast_first(["folder", "tar", "bucket"], 2))
def many(request: pytest.FixtureRequest, folder_source: MakeSource) -> MakeSource:
    return {"folder": folder_source, "tar": tar_source, "bucket": bucket_source}[request.param]


@pytest.fixture
def put_many(repository: LocalRepository, many: MakeSource) -> PutMany:
    def put(
        files: Files, target: bytes = b"", *, mtime_ns: int = MTIME_NS, **options: object
    ) -> PutReport:
        wanted = PutOptions(CHUNK_BYTES_MIN, jobs=2, **options)  # type: ignore[arg-type]  # what came is passed on
        return ingest.put(repository, "ds", many(files, mtime_ns), target, wanted)

    return put


@pytest.fixture(params=fast_first(["folder", "tar", "file", "bucket", "object"], 3))
def put_one(
    request: pytest.FixtureRequest,
    repository: LocalRepository,
    tmp_path: Path,
    folder_source: MakeSource,
) -> PutOne:
    """In a source of many, or as a single file or object."""

    def source_of(folder: bytes, name: str, content: bytes, mtime_ns: int) -> tuple[Source, bytes]:
        make = {"folder": folder_source, "tar": tar_source, "bucket": bucket_source}
        if request.param in make:
            return make[request.param]({name: content}, mtime_ns), folder
        alone = folder + b"/" * bool(folder) + name.encode()
        if request.param == "object":
            return bucket_source({"": content}, mtime_ns), alone
        top = write(tmp_path / "one file", {"it": content})
        (top / "it").chmod(0o644)
        os.utime(top / "it", ns=(0, mtime_ns))
        return FileSource(top / "it"), alone

    def put(path: str, content: bytes, *, mtime_ns: int = MTIME_NS, **options: object) -> PutReport:
        folder, _, name = path.rpartition("/")
        source, target = source_of(folder.encode(), name, content, mtime_ns)
        wanted = PutOptions(CHUNK_BYTES_MIN, jobs=1, **options)  # type: ignore[arg-type]  # what came is passed on
        return ingest.put(repository, "ds", source, target, wanted)

    return put


def files(repository: LocalRepository) -> dict[bytes, bytes]:
    return file_contents(repository.view("ds"), repository)


def names(view: Snapshot) -> list[bytes]:
    return sorted(view.path(index) for index in view.files().tolist())


# Every source


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES_MIN, 3 * CHUNK_BYTES_MIN + 1])
def test_content_mode_and_mtime(repository: LocalRepository, put_one: PutOne, size: int) -> None:
    content = os.urandom(size)
    report = put_one("in/here/a", content)
    assert (report.files, report.content_bytes, report.failed) == (1, size, [])
    assert report.version == repository.view("ds").version
    assert report.walked
    assert files(repository) == {b"in/here/a": content}
    view = repository.view("ds")
    assert view.stat(view.lookup(b"in/here/a")) == Stat(Kind.FILE, 0o644, size, MTIME_NS)
    assert repository.verify("ds").sound


def test_put_again_puts_nothing(repository: LocalRepository, put_one: PutOne) -> None:
    first = put_one("in/a", b"1")
    for options in ({}, {"checksum": True}, {"dry_run": True}):
        again = put_one("in/a", b"1", **options)
        assert (again.entries_found, again.files, again.chunks, again.failed) == (0, 0, 0, [])
        assert again.unchanged >= 1
        assert repository.view("ds").version == first.version


def test_another_size_or_mtime_is_put_again(repository: LocalRepository, put_one: PutOne) -> None:
    put_one("in/a", b"1")
    assert put_one("in/a", b"22").files == 1
    assert files(repository) == {b"in/a": b"22"}
    assert put_one("in/a", b"33", mtime_ns=2 * MTIME_NS).files == 1
    assert files(repository) == {b"in/a": b"33"}


def test_checksum_compares_contents(repository: LocalRepository, put_one: PutOne) -> None:
    put_one("in/a", b"old")
    assert put_one("in/a", b"new").files == 0
    assert files(repository) == {b"in/a": b"old"}
    assert put_one("in/a", b"new", checksum=True).files == 1
    assert files(repository) == {b"in/a": b"new"}


def test_a_dry_run_counts_and_changes_nothing(repository: LocalRepository, put_one: PutOne) -> None:
    assert put_one("in/a", b"1", dry_run=True).entries_found >= 1
    assert repository.datasets() == []
    version = put_one("in/a", b"1").version
    assert put_one("in/a", b"22", dry_run=True).entries_found >= 1
    assert repository.view("ds").version == version
    assert files(repository) == {b"in/a": b"1"}


@pytest.mark.parametrize("target", [".diesel/a", ".diesel/x/a"])
def test_nothing_is_put_into_the_mounts_own_folder(
    repository: LocalRepository, put_one: PutOne, target: str
) -> None:
    with pytest.raises(UsageError, match="mount's own folder"):
        put_one(target, b"1")
    assert repository.datasets() == []


@each_row("checksum", [False, True])
@each_row("path", ["folder", "file/below", "file/far/below"])
def test_without_delete_files_and_folders_do_not_replace_each_other(
    repository: LocalRepository, put_one: PutOne, path: str, checksum: bool
) -> None:
    content = {"folder/x": b"1", "file": b"2"}
    ingest.put(repository, "ds", tar_source(content, MTIME_NS))
    with suppress(ConflictError):  # of a single file, or a folder as a whole
        assert put_one(path, b"new", checksum=checksum).failed
    assert files(repository) == {path.encode(): content[path] for path in content}


@pytest.mark.parametrize("kind", ["file", "bucket"])
def test_a_single_file_needs_a_name(repository: LocalRepository, tmp_path: Path, kind: str) -> None:
    """Filters do not apply to it."""
    (tmp_path / "a").write_bytes(b"content")
    objects = FakeBucket({b"": b"content"})
    source = FileSource(tmp_path / "a") if kind == "file" else BucketSource(objects)
    with pytest.raises(UsageError, match="needs a name"):
        ingest.put(repository, "ds", source)
    with pytest.raises(UsageError, match="--delete"):
        ingest.put(repository, "ds", source, b"in/here", PutOptions(delete=True))
    assert repository.datasets() == []
    options = PutOptions(include=("else",))
    assert ingest.put(repository, "ds", source, b"in/here", options).files == 1
    assert files(repository) == {b"in/here": b"content"}


# Sources of many files


def test_empty_sources_make_empty_datasets(repository: LocalRepository, put_many: PutMany) -> None:
    assert put_many({}).failed == []
    assert repository.view("ds").entry_count == 1


def test_delete_removes_missing_entries(repository: LocalRepository, put_many: PutMany) -> None:
    put_many({"a": b"1", "d/b": b"2", "d/e/c": b"3", "keep/x": b"4"})
    assert put_many({"keep/x": b"4"}).deleted == 0
    assert len(files(repository)) == 4
    planned = put_many({"keep/x": b"4"}, delete=True, dry_run=True)
    assert sorted(planned.to_delete) == [b"a", b"d", b"d/b", b"d/e", b"d/e/c"]
    assert planned.to_delete.index(b"d/e/c") < planned.to_delete.index(b"d/e")
    assert len(files(repository)) == 4
    assert put_many({"keep/x": b"4"}, delete=True).deleted == planned.deleted == 5
    assert files(repository) == {b"keep/x": b"4"}
    assert put_many({"keep/x": b"4"}, delete=True).deleted == 0


def test_delete_stays_below_the_target(repository: LocalRepository, put_many: PutMany) -> None:
    put_many({"a": b"1"}, b"outside")
    put_many({"a": b"1", "b": b"2"}, b"in/here")
    assert put_many({"a": b"1"}, b"in/here", delete=True).deleted == 1
    assert names(repository.view("ds")) == [b"in/here/a", b"outside/a"]


def test_an_empty_source_never_deletes(repository: LocalRepository, put_many: PutMany) -> None:
    """It may be a disk that is not mounted."""
    put_many({"a": b"1", "b": b"2"})
    assert put_many({}, delete=True).deleted == 0
    assert names(repository.view("ds")) == [b"a", b"b"]
    assert put_many({}, delete=True, allow_empty=True).deleted == 2
    assert repository.view("ds").entry_count == 1


def test_filters_choose_files(repository: LocalRepository, put_many: PutMany) -> None:
    put_many(
        {"a.jpg": b"", "a.txt": b"", "skip/a.jpg": b"", "d/b.jpg": b"", "d/no.jpg": b""},
        include=("*.jpg",),
        exclude=("skip", "d/no*"),
    )
    assert names(repository.view("ds")) == [b"a.jpg", b"d/b.jpg"]


def test_a_glob_that_ends_in_a_slash_is_for_folders(
    repository: LocalRepository, put_many: PutMany
) -> None:
    source = {"cache/x": b"1", "d/cache": b"a file", "d/in/cache/y": b"2"}
    put_many(source, exclude=("cache/",))
    assert names(repository.view("ds")) == [b"d/cache"]
    for bad in ("", "/"):
        with pytest.raises(UsageError):
            put_many(source, exclude=(bad,))
    with pytest.raises(UsageError, match="include"):
        put_many(source, include=("cache/",))


def test_delete_spares_filtered_entries(repository: LocalRepository, put_many: PutMany) -> None:
    put_many({"a.jpg": b"1", "b.txt": b"2", "x/c.jpg": b"3"})
    report = put_many({"c.jpg": b"3"}, delete=True, include=("*.jpg",), exclude=("x",))
    assert report.deleted == 1
    assert names(repository.view("ds")) == [b"b.txt", b"c.jpg", b"x/c.jpg"]


@pytest.mark.parametrize("pattern", ["cache", "cache/", "/cache", "sub/cach?"])
def test_delete_spares_all_below_a_folder_that_is_left_out(
    repository: LocalRepository, put_many: PutMany, pattern: str
) -> None:
    top = "sub/cache" if "sub" in pattern else "cache"
    put_many({f"{top}/x": b"1", f"{top}/in/y": b"1", "a": b"2"})
    assert put_many({"b": b"3"}, delete=True, exclude=(pattern,)).deleted == 1
    assert names(repository.view("ds")) == sorted(
        [b"b", f"{top}/in/y".encode(), f"{top}/x".encode()]
    )


def test_delete_spares_filtered_folders(repository: LocalRepository, put_many: PutMany) -> None:
    """No file takes its place: the filtered entries would be lost under it."""
    put_many({"d/x.tmp": b"1", "d/y": b"2", "e/z": b"3"})
    before = repository.stat("ds", b"d")
    assert put_many({"e": b"a file"}, delete=True, exclude=("*.tmp",)).deleted == 2
    assert names(repository.view("ds")) == [b"d/x.tmp", b"e"]
    assert repository.stat("ds", b"d") == before
    report = put_many({"d": b"a file", "e": b"a file"}, delete=True, exclude=("*.tmp",))
    assert [path for path, _ in report.failed] == [b"d"]
    assert "d is a folder of the dataset" in report.failed[0][1]
    assert names(repository.view("ds")) == [b"d/x.tmp", b"e"]


def test_delete_replaces_no_filtered_file(repository: LocalRepository, put_many: PutMany) -> None:
    put_many({"a": b"1", "b.jpg": b"2"})
    report = put_many({"a/x.jpg": b"3", "b.jpg/x.jpg": b"4"}, delete=True, include=("*.jpg",))
    assert report.failed[0][0] in (b"a", b"a/x.jpg")  # a folder's walk stops at `a`
    assert len(report.failed) == 1
    assert names(repository.view("ds")) == [b"a", b"b.jpg/x.jpg"]


def test_delete_lets_files_and_folders_swap(repository: LocalRepository, put_many: PutMany) -> None:
    put_many({"f": b"1", "d/in": b"2", "gone": b""})
    assert put_many({"f/in": b"was a file", "d": b"was a folder"}, delete=True).failed == []
    assert files(repository) == {b"d": b"was a folder", b"f/in": b"was a file"}
    assert repository.verify("ds").notes == []


def test_the_mounts_own_folder_is_left_out(repository: LocalRepository, put_many: PutMany) -> None:
    source = {".diesel/x": b"1", "good": b"2", "d/.diesel": b"3"}
    for dry_run in (True, False):
        ((path, reason),) = put_many(source, dry_run=dry_run).failed
        assert path.split(b"/")[0] == b".diesel"
        assert reason == "refused: it is the name of a mount's own folder"
    assert names(repository.view("ds")) == [b"d/.diesel", b"good"]
    assert put_many(source, b"in").failed == []


@each_row("kind", ["folder", "file", "tar", "bucket"])
@each_row("dry_run", [False, True])
def test_a_source_that_is_missing_leaves_no_dataset(
    repository: LocalRepository, tmp_path: Path, kind: str, dry_run: bool
) -> None:
    missing = FakeBucket({})
    missing.listing_error = NotFoundError("nothing is there")
    source = {
        "folder": FolderSource(tmp_path / "nowhere"),
        "file": FileSource(tmp_path / "nowhere"),
        "tar": TarSource(io.BytesIO(b"no tar")),
        "bucket": BucketSource(missing),
    }[kind]
    with pytest.raises((NotFoundError, UsageError)):
        ingest.put(repository, "ds", source, b"in/a", PutOptions(dry_run=dry_run))
    assert repository.datasets() == []
