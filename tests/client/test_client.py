"""Tests of `connect` and `Dataset` as a training script uses them, also in forked children."""

import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath

import numpy as np
import pytest

import diesel_fs
from diesel_fs.client.dataset import Dataset, connect
from diesel_fs.errors import (
    ConflictError,
    CorruptError,
    ForeignError,
    NoSpaceError,
    NoSuchDataset,
    NoSuchPath,
    ObjectStoreError,
    UsageError,
)
from diesel_fs.format.chunk import CHUNK_BYTES_MIN
from diesel_fs.format.entries import Kind
from diesel_fs.ingest import FolderSource, PutOptions, put
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.objects.folder import FolderStore
from diesel_fs.urls import parse_url

from ..forks import in_child
from ..trees import write


@pytest.fixture
def url(tmp_path: Path) -> str:
    return (tmp_path / "store").as_uri()


@pytest.fixture
def filled(url: str) -> str:
    with connect("ds", url, create=True) as dataset:
        for i in range(200):
            dataset.put(b"content %d" % i * (i + 1), f"d{i % 7}/f{i:03}")
    return url


@pytest.fixture
def dataset(filled: str) -> Iterator[Dataset]:
    with connect("ds", filled) as opened:
        yield opened


@pytest.fixture
def new(url: str) -> Iterator[Dataset]:
    with connect("ds", url, create=True) as opened:
        yield opened


def test_put_get_delete(new: Dataset, tmp_path: Path) -> None:
    source = write(tmp_path / "source", {"cat.jpg": b"a cat"})
    os.utime(source / "cat.jpg", ns=(0, 12345))
    new.put(source / "cat.jpg", "train/cat/1.jpg")
    new.put(b"bytes", "train/cat/2.jpg", mode=0o600, mtime_ns=-5)
    new.put(io.BytesIO(b"a stream"), "train/dog/1.jpg")
    with pytest.raises(NoSuchPath):
        new.get("train/cat/1.jpg")  # not before flush
    new.flush()
    assert new.get("train/cat/1.jpg") == b"a cat"
    assert new.get("train/dog/1.jpg") == b"a stream"
    assert new.stat("train/cat/1.jpg").mtime_ns == 12345
    assert new.stat("train/cat/2.jpg") == (Kind.FILE, 0o600, 5, -5)
    assert new.ls("train") == ["cat", "dog"]
    assert new.ls(b"train/cat") == ["1.jpg", "2.jpg"]
    assert new.stat("train").kind == Kind.FOLDER
    assert new.stat("train").mtime_ns > 0
    new.delete("train/cat/1.jpg")
    assert new.ls("train/cat") == ["2.jpg"]
    with pytest.raises(ConflictError):
        new.delete("train")
    new.delete("train", recursive=True)
    assert new.ls() == []


def test_views_outlive_the_dataset(filled: str) -> None:
    with connect("ds", filled, memory_bytes=1) as dataset:
        views = list(dataset.read_many(["d0/f000", "d1/f001"]))
    assert [bytes(view) for view in views] == [b"content 0", b"content 1content 1"]
    with pytest.raises(TypeError):
        views[0][0] = 0


def test_an_exception_flushes_nothing(url: str, new: Dataset) -> None:
    def put_and_fail() -> None:
        with connect("ds", url) as dataset:
            dataset.put(b"half", "a")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        put_and_fail()
    new.refresh()
    assert new.ls() == []


def test_a_reader_keeps_its_version_until_a_path_is_missing(filled: str, dataset: Dataset) -> None:
    before = dataset.version
    with connect("ds", filled) as writer:
        writer.put(b"changed", "d0/f000")
        writer.put(b"new", "new")
        writer.flush()
        assert dataset.get("d0/f000") == b"content 0"
        assert dataset.version == before
        # missing here, so the reader looks for the newest version
        assert dataset.get("new") == b"new"
        assert dataset.get("d0/f000") == b"changed"
        writer.put(b"newer!", "newer")
        writer.flush()
        assert [*map(bytes, dataset.read_many(["d0/f000", "newer"]))] == [b"changed", b"newer!"]
        writer.put(b"", "newest")
        writer.flush()
        assert dataset.stat_many(["newest"]).size.tolist() == [0]


def test_save_and_load_meta(filled: str, dataset: Dataset, tmp_path: Path) -> None:
    saved = tmp_path / "saved.snapshot"
    dataset.save_meta(saved)
    dataset.put(b"later", "later")
    dataset.flush()
    assert dataset.load_meta(saved) is False
    with pytest.raises(NoSuchPath):
        dataset.get("later")  # which the saved version does not have
    assert dataset.get("d0/f000") == b"content 0"
    dataset.save_meta(saved)
    with connect("other", filled, create=True) as other, pytest.raises(ForeignError):
        other.load_meta(saved)


def test_load_meta_recognises_old_snapshots_without_metadata(filled: str, tmp_path: Path) -> None:
    saved = tmp_path / "saved.snapshot"
    with connect("ds", filled) as dataset:
        dataset.save_meta(saved)
        dataset.put(b"later", "later")
        dataset.flush()
    for each in parse_url(filled).path.glob("meta.sqlite*"):
        each.unlink()
    with connect("ds", filled) as dataset:
        assert dataset.get("later") == b"later"
        assert dataset.load_meta(saved) is False


def test_E1_Z10_a_damaged_or_truncated_saved_snapshot(dataset: Dataset, tmp_path: Path) -> None:
    saved = tmp_path / "saved.snapshot"
    dataset.save_meta(saved)
    good = saved.read_bytes()
    for bad in (b"", good[:100], good[:-1], b"\x7fELF" + good[4:]):
        saved.write_bytes(bad)
        with pytest.raises((CorruptError, diesel_fs.FormatError), match="save-meta"):
            dataset.load_meta(saved)
    assert dataset.get("d0/f000") == b"content 0"
    saved.write_bytes(good)
    dataset.load_meta(saved)
    os.truncate(saved, 0)
    assert len(dataset.ls("d0")) == 29


def test_Z10_a_chunk_truncated_while_in_use(dataset: Dataset, tmp_path: Path) -> None:
    for chunk in (tmp_path / "store").glob("datasets/*/chunks/*/*"):
        os.truncate(chunk, 1000)
    with pytest.raises(diesel_fs.DieselError):
        dataset.get("d0/f196")


def test_bad_names_and_conflicting_paths_are_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ObjectStoreError):
        connect("ds", url)
    with connect("ds", url, create=True) as dataset:
        dataset.put(b"1", "a/b")
        for bad in ("", "../x", "/abs", "a//b", "a/", ".diesel", ".diesel/x", "n" * 256):
            with pytest.raises(UsageError):
                dataset.put(b"", bad)
        with pytest.raises(ConflictError):
            dataset.put(b"", "a")
        with pytest.raises(ConflictError):
            dataset.put(tmp_path, "folder")
        dataset.flush()
        with pytest.raises(UsageError):
            dataset.get("a")
    with pytest.raises(NoSuchDataset):
        connect("other", url)
    with pytest.raises(UsageError):
        connect("../ds", url)


def test_delete_dataset(filled: str, dataset: Dataset, tmp_path: Path) -> None:
    dataset.delete_dataset()
    with pytest.raises(NoSuchDataset):
        connect("ds", filled)
    assert not [path for path in (tmp_path / "store/datasets").rglob("*") if path.is_file()]
    with connect("ds", filled, create=True) as again:  # another dataset of the same name
        assert again.ls() == []


def test_Z9_parent_and_child_both_read(dataset: Dataset) -> None:
    everything = [os.fsdecode(p) for p in dataset.snapshot.paths(dataset.snapshot.files())]
    started = dataset.read_many(everything)
    next(started)  # fetching threads run

    def read() -> None:
        assert len(list(dataset.read_many(everything))) == 200
        assert dataset.get("d1/f001") == b"content 1content 1"
        assert dataset.stat("d1/f001").size == 18

    assert [in_child(read) for _ in range(3)] == [0, 0, 0]
    assert len(list(started)) == 199
    read()


def test_a_forked_child_never_flushes_the_puts_of_its_parent(new: Dataset) -> None:
    new.put(b"parent's", "p")

    def child() -> None:
        new.flush()
        assert new.ls() == []
        new.put(b"child's", "c")
        new.close()

    assert in_child(child) == 0
    assert new.refresh() > 0
    assert new.ls() == ["c"]
    new.flush()
    assert new.ls() == ["c", "p"]
    assert new.get("p") == b"parent's"


@pytest.fixture
def large(url: str, tmp_path: Path) -> str:
    """A dataset of some 60 chunks of 64 KiB: files of 4 kB and some empty ones."""
    files = {f"{'val' if n % 10 else 'train'}/{n:04}": os.urandom(4000) for n in range(1020)}
    source = write(tmp_path / "large", files | {f"train/empty{n}": b"" for n in range(9)})
    with LocalRepository.open(url, create=True) as repository:
        options = PutOptions(chunk_bytes=CHUNK_BYTES_MIN, compress="none", jobs=1)
        put(repository, "large", FolderSource(source), options=options)
    return url


@pytest.mark.parametrize("way", ["read_many", "get", "get by path"])
def test_an_epoch_in_chunk_wise_order_loads_each_chunk_once(large: str, way: str) -> None:
    with connect("large", large, memory_bytes=12 * CHUNK_BYTES_MIN) as dataset:
        sizes, reader = dataset.snapshot.chunk_sizes, dataset._reader
        assert len(sizes) >= 60
        for epoch in range(2):
            order = dataset.shuffle(seed=1, epoch=epoch, group_size=5)
            assert sorted(order.tolist()) == dataset.snapshot.files().tolist()
            paths = dataset.snapshot.paths(order)
            if way == "read_many":
                contents = map(bytes, dataset.read_many(order))
            else:
                contents = map(dataset.get, order if way == "get" else paths)
            expected = dataset.stat_many(order).size.tolist()
            most = 0
            for size, content in zip(expected, contents, strict=True):
                assert len(content) == size
                most = max(most, len(reader._cache._chunks) + len(reader._cache._flights))
            assert 5 <= most <= 10
            counts = reader.stats()
            assert counts["chunk_fetches"] == len(sizes) * (epoch + 1)
            assert counts["range_fetches"] == counts["memory_bytes"] == counts["evictions"] == 0


def test_shuffle_of_a_part_and_a_folder(large: str) -> None:
    with connect("large", large) as dataset:
        whole = dataset.shuffle(seed=1, epoch=2, group_size=3)
        parts = [
            dataset.shuffle(seed=1, epoch=2, group_size=3, rank=rank, world=4, drop_last=True)
            for rank in range(4)
        ]
        assert np.concatenate(parts).tolist() == whole[: 1029 // 4 * 4].tolist()
        order = dataset.shuffle(seed=1, epoch=2, below="train")
        names = {path.decode() for path in dataset.snapshot.paths(order)}
        assert names == {f"train/{name}" for name in dataset.ls("train")}
        assert [len(view) for view in dataset.read_many(order)].count(0) == 9
        with pytest.raises(UsageError):
            dataset.shuffle(seed=1, epoch=2, below="train/0000")
        with pytest.raises(UsageError):
            dataset.shuffle(seed=-1, epoch=2)


def test_memory_bytes_is_a_limit(large: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with connect("large", large, memory_bytes=3 * CHUNK_BYTES_MIN) as dataset:
        with pytest.raises(UsageError, match="smaller group_size, or open"):
            dataset.shuffle(seed=1, epoch=2, group_size=20)
        dataset.shuffle(seed=1, epoch=2, group_size=2)
    monkeypatch.setattr("diesel_fs.client.dataset.MEMORY_BYTES_DEFAULT", 3 * CHUNK_BYTES_MIN)
    with connect("large", large) as dataset:
        order = dataset.shuffle(seed=1, epoch=2, group_size=20)
        assert sum(len(view) for view in dataset.read_many(order)) == 1020 * 4000
        counts = dataset._reader.stats()
        assert counts["chunk_fetches"] == len(dataset.snapshot.chunk_sizes)
        assert counts["range_fetches"] == 0
        assert 30 * CHUNK_BYTES_MIN < counts["memory_budget_bytes"] < 50 * CHUNK_BYTES_MIN


def test_Z9_a_forked_child_follows_the_order_too(large: str) -> None:
    with connect("large", large, memory_bytes=12 * CHUNK_BYTES_MIN) as dataset:
        order = dataset.shuffle(seed=1, epoch=2, group_size=5)
        started = dataset.read_many(order)
        next(started)

        def read() -> None:
            for batch in range(1, len(order) // 16, 4):
                indices = order[16 * batch : 16 * batch + 16]
                assert len(list(dataset.read_many(indices))) == len(indices)

        assert [in_child(read) for _ in range(2)] == [0, 0]
        assert len(list(started)) == 1028


@pytest.mark.fuse
def test_mount_from_python(filled: str, dataset: Dataset, tmp_path: Path) -> None:
    point = tmp_path / "a mount, with spaces"
    point.mkdir()
    with diesel_fs.mount(dataset, point) as mounted:
        assert (Path(mounted) / "d1/f001").read_bytes() == b"content 1content 1"
    assert list(point.iterdir()) == []
    with diesel_fs.mount("ds", point, url=filled):
        assert len(list((point / "d0").iterdir())) == 29
    assert list(point.iterdir()) == []


def test_put_refuses_a_path_below_a_file(new: Dataset, tmp_path: Path) -> None:
    new.save_meta(tmp_path / "empty")
    new.load_meta(tmp_path / "empty")
    new.put(b"data", "a")
    for go_on in (new.flush, new.refresh, new.flush):  # the fixed version does not show the file
        for path in ("a/b", "a/b/c"):
            with pytest.raises(ConflictError):
                new.put(b"x", path)
        go_on()
    assert new.get("a") == b"data"
    new.delete("a")
    new.put(b"x", "a/b")
    new.flush()
    assert new.ls("a") == ["b"]


def test_put_knows_its_own_entries_in_an_older_version(new: Dataset, tmp_path: Path) -> None:
    """`load_meta` shows a version that may lack entries that the same object has put and
    flushed."""
    new.save_meta(tmp_path / "before")
    new.put(b"data", "file")
    new.put(b"data", "folder/in")
    new.put(b"data", "gone/in")
    new.flush()
    new.delete("gone", recursive=True)
    new.load_meta(tmp_path / "before")
    for path in ("file/b", "folder"):
        with pytest.raises(ConflictError):
            new.put(b"x", path)
    new.put(b"x", "gone")
    new.put(b"x", "folder/also")
    new.flush()
    new.refresh()
    assert new.get("file") == new.get("folder/in") == b"data"
    assert new.get("gone") == new.get("folder/also") == b"x"


def test_put_refuses_a_conflict_with_another_writers_entry(url: str, new: Dataset) -> None:
    with connect("ds", url) as other:
        other.put(b"1", "file")
        other.put(b"2", "folder/in")
    for path in ("file/x", "file/x/y", "folder"):
        with pytest.raises(ConflictError):
            new.put(b"x", path)
    new.put(b"3", "folder/else")
    new.flush()
    assert (new.get("file"), new.ls("folder")) == (b"1", ["else", "in"])


def test_O15_a_lost_chunk_fails_every_flush(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a later flush succeeded, the caller would take all puts for stored."""
    real, full = FolderStore.put, [True]

    def put(self: FolderStore, name: str, parts: Sequence[bytes | memoryview]) -> None:
        if "/chunks/" in name and full:
            full.pop()
            raise NoSpaceError("the disk is full")
        real(self, name, parts)

    monkeypatch.setattr(FolderStore, "put", put)
    dataset = connect("ds", url, create=True)
    errors = 0
    for number in range(12):
        for _ in range(3):
            try:
                dataset.put(os.urandom(3 << 20), f"f{number}")
                break
            except NoSpaceError:
                errors += 1
    assert errors > 3
    assert not full
    for _ in range(2):
        with pytest.raises(NoSpaceError):
            dataset.flush()
    with pytest.raises(NoSpaceError):
        dataset.put(b"", "more")
    with pytest.raises(NoSpaceError):
        dataset.close()
    with connect("ds", url) as dataset:
        dataset.put(b"again", "f0")
        dataset.flush()
        assert dataset.get("f0") == b"again"


@pytest.mark.parametrize("file_first", [True, False])
def test_a_file_and_a_folder_of_two_writers_are_both_kept(url: str, file_first: bool) -> None:
    with connect("ds", url, create=True) as one, connect("ds", url) as two:
        one.put(b"1", "before")
        two.put(b"2", "before too")
        one.put(b"a file", "p") if file_first else one.put(b"inside", "p/in")
        two.put(b"inside", "p/in") if file_first else two.put(b"a file", "p")
        one.flush()
        if file_first:  # otherwise the folder gives way, as the older of the two
            with pytest.raises(ConflictError, match="'p': it is a file and a folder now"):
                two.flush()
        two.put(b"3", "after")
        two.flush()
        assert two.ls() == ["after", "before", "before too", "p"]
        assert two.get("p/in") == b"inside"
        two.delete("p/in")
        assert two.get("p") == b"a file"


def test_a_stream_seeks_and_stays_at_its_version(new: Dataset) -> None:
    content = bytes(range(256)) * 40_000  # several extents
    new.put(content, "folder/large")
    new.flush()
    with new.open("folder/large") as file:
        assert file.size == len(content)
        assert file.read(3) == content[:3]
        assert file.seek(-10, os.SEEK_END) == len(content) - 10
        assert (file.read(), file.read(), file.tell()) == (content[-10:], b"", len(content))
        assert file.seek(5_000_000) == 5_000_000
        new.put(b"other", "folder/large")
        new.put(b"", "a")  # all indices move
        new.flush()
        assert file.read(1000) == content[5_000_000:5_001_000]
        assert file.read_at(7, 9) == content[7:16]
        with pytest.raises(ValueError, match="seek"):
            file.seek(-1)
    assert new.open("folder/large").read() == b"other"
    with pytest.raises(UsageError, match="not a file"):
        new.open("folder")
    with pytest.raises(NoSuchPath):
        new.open("none")


def test_a_read_is_of_one_version_if_another_thread_moves_on(url: str, new: Dataset) -> None:
    """The path object refreshes the dataset while it is looked up, as another thread might."""

    class Refreshing(PurePosixPath):
        def __fspath__(self) -> str:
            new.refresh()
            return str(self)

    new.put(b"mine", "m")
    new.flush()
    calls: list[Callable[[], object]] = [
        lambda: new.get(Refreshing("m")),
        lambda: new.stat(Refreshing("m")).size,
        lambda: new.open(Refreshing("m")).read(),
    ]
    for number, (call, expected) in enumerate(zip(calls, (b"mine", 4, b"mine"), strict=True)):
        with connect("ds", url) as writer:
            writer.put(b"another file", f"a{number}")  # it gets the index of "m"
        assert call() == expected


def test_the_datasets_of_a_repository(url: str) -> None:
    for name in ("two", "one"):
        connect(name, url, create=True).close()
    assert diesel_fs.list_datasets(url) == ["one", "two"]
    with pytest.raises(UsageError, match="without a user"):
        diesel_fs.list_datasets(url, key="x")
