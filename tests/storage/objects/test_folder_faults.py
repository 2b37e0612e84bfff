"""A folder store when system calls fail: FAULTS O15, and which error each errno becomes."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diesel_fs.errors import (
    DieselError,
    NoSpaceError,
    ObjectExists,
    ObjectStoreError,
    PermissionDenied,
    TruncatedError,
)
from diesel_fs.format.entries import Bytes
from diesel_fs.storage.objects.folder import FolderStore
from tests.rows import each_row
from tests.small_disks import remount, small_disk

DATASET = "datasets/" + "ab" * 16
CHUNKS = f"{DATASET}/chunks/aaaa"
NAME = f"{CHUNKS}/aaaa" + "0" * 18
OTHER = f"{CHUNKS}/aaaa" + "1" * 18
LEASE = f"{DATASET}/leases/me"
PARTS: list[Bytes] = [b"some", b"thing"]


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    """A store whose chunk folder exists already and is known to be durable."""
    made = FolderStore.create(tmp_path / "store")
    made.put(OTHER, [b"other"])
    return made


class Syncs:
    """A replacement of os.fsync that records the synced paths, and fails as a test asks."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.paths: list[str] = []
        self.hits = 0
        self.fails: Callable[[str, int], bool] = lambda path, before: False
        self.code = errno.EIO
        self._fsync = os.fsync

    def __call__(self, fd: int) -> None:
        path = os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), self.root)
        before = sum(1 for earlier in self.paths if self._sort(earlier) == self._sort(path))
        self.paths.append(path)
        if self.fails(self._sort(path), before):
            self.hits += 1
            raise OSError(self.code, os.strerror(self.code))
        self._fsync(fd)

    @staticmethod
    def _sort(path: str) -> str:
        return "temporary" if "/.tmp-" in path else path


@pytest.fixture
def syncs(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> Syncs:
    """Replaces os.fsync."""
    made = Syncs(store.root)
    monkeypatch.setattr(os, "fsync", made)
    return made


def assert_untouched(store: FolderStore) -> None:
    """Assert that the store holds only the object of before, and no temporary file."""
    assert [*store.names(DATASET)] == [OTHER]
    assert [*store.leftovers()] == []
    assert sorted(os.listdir(f"{store.root}/{CHUNKS}")) == [OTHER.rpartition("/")[2]]


def test_the_file_is_synced_before_its_folder(store: FolderStore, syncs: Syncs) -> None:
    store.put(NAME, PARTS)
    assert len(syncs.paths) == 2
    assert syncs.paths[0].startswith(f"{CHUNKS}/.tmp-")
    assert syncs.paths[1] == CHUNKS


def test_new_folders_are_synced_in_their_parents(store: FolderStore, syncs: Syncs) -> None:
    fresh = FolderStore.open(store.root)
    fresh.put(NAME, PARTS)
    above = [".", "datasets", DATASET, f"{DATASET}/chunks"]
    assert [path for path in syncs.paths if "/.tmp-" not in path] == [*above, CHUNKS]
    fresh.put(NAME[:-1] + "z", PARTS)
    assert len(syncs.paths) == 8, "folders known to be durable are not synced again"


def test_O15_fsync_error_writes_again_under_a_new_name(store: FolderStore, syncs: Syncs) -> None:
    syncs.fails = lambda path, before: path == "temporary" and before == 0
    store.put(NAME, PARTS)
    assert syncs.hits == 1
    temporaries = [path for path in syncs.paths if "/.tmp-" in path]
    assert len(temporaries) == len(set(temporaries)) == 2, (
        "after a failed fsync a new file is written"
    )
    assert store.get(NAME) == b"something"
    assert [*store.leftovers()] == []


def test_O15_fsync_error_twice_is_an_error(store: FolderStore, syncs: Syncs) -> None:
    syncs.fails = lambda path, before: path == "temporary"
    with pytest.raises(ObjectStoreError, match="EIO") as caught:
        store.put(NAME, PARTS)
    assert caught.value.exit_code == 13
    assert NAME in str(caught.value)
    assert syncs.hits == 2
    assert_untouched(store)


def test_O15_fsync_error_of_the_folder_links_again(store: FolderStore, syncs: Syncs) -> None:
    syncs.fails = lambda path, before: path == CHUNKS and before == 0
    store.put(NAME, PARTS)
    assert syncs.hits == 1
    assert sum("/.tmp-" in path for path in syncs.paths) == 2
    assert store.get(NAME) == b"something"


def test_O15_fsync_error_of_the_folder_twice_is_an_error(store: FolderStore, syncs: Syncs) -> None:
    syncs.fails = lambda path, before: path == CHUNKS
    with pytest.raises(ObjectStoreError, match="EIO"):
        store.put(NAME, PARTS)
    assert syncs.hits == 2
    assert_untouched(store)


def test_O15_fsync_error_of_a_new_folders_parent(store: FolderStore, syncs: Syncs) -> None:
    syncs.fails = lambda path, before: path == "." and before == 0
    deleted = "deleted/" + "0" * 32
    store.put(deleted, PARTS)
    assert syncs.hits == 1
    assert store.get(deleted) == b"something"
    syncs.fails = lambda path, before: path == DATASET
    with pytest.raises(ObjectStoreError, match="EIO"):
        store.replace(LEASE, PARTS)
    assert not os.path.exists(f"{store.root}/{DATASET}/leases")


def test_O15_close_error_writes_again(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    really, closed = os.close, []

    def close(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        really(fd)
        if "/.tmp-" in path:
            closed.append(path)
            if len(closed) == 1:
                raise OSError(errno.EIO, "close")

    monkeypatch.setattr(os, "close", close)
    store.put(NAME, PARTS)
    assert len(set(closed)) == 2
    assert store.get(NAME) == b"something"
    assert [*store.leftovers()] == []


def test_O15_failed_replace_leaves_one_version(store: FolderStore, syncs: Syncs) -> None:
    store.replace(LEASE, [b"old"])
    syncs.fails = lambda path, before: path == "temporary"
    with pytest.raises(ObjectStoreError):
        store.replace(LEASE, [b"new"])
    assert store.get(LEASE) == b"old"
    assert [*store.leftovers()] == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_no_space_at_fsync_is_not_tried_again(store: FolderStore, syncs: Syncs, code: int) -> None:
    syncs.code, syncs.fails = code, lambda path, before: path == "temporary"
    with pytest.raises(NoSpaceError):
        store.put(NAME, PARTS)
    assert syncs.hits == 1
    assert_untouched(store)


def test_a_file_system_that_cannot_sync_folders_works(store: FolderStore, syncs: Syncs) -> None:
    syncs.code, syncs.fails = errno.EINVAL, lambda path, before: path != "temporary"
    FolderStore.open(store.root).put(NAME, PARTS)
    assert syncs.hits == 5
    assert store.get(NAME) == b"something"


@each_row(
    ("code", "expected"),
    [
        (errno.EACCES, PermissionDenied),
        (errno.EPERM, PermissionDenied),
        (errno.EROFS, PermissionDenied),
        (errno.ENOSPC, NoSpaceError),
        (errno.EDQUOT, NoSpaceError),
        (errno.EMFILE, ObjectStoreError),
        (errno.ESTALE, ObjectStoreError),
        (errno.EIO, ObjectStoreError),
    ],
)
def test_every_errno_becomes_an_error_of_the_tree(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch, code: int, expected: type[DieselError]
) -> None:
    hits = []

    def refuse(path: str, *rest: object, **options: object) -> int:
        hits.append(path)
        raise OSError(code, os.strerror(code))

    calls: list[Callable[[], object]] = [
        lambda: store.put(NAME, PARTS),
        lambda: store.get(OTHER),
        lambda: store.read_into(OTHER, 0, bytearray(1)),
        lambda: store.stat(OTHER),
        lambda: store.delete(OTHER),
        lambda: [*store.names(DATASET)],
        lambda: FolderStore.open(store.root),
    ]
    for number, call in enumerate(calls):
        with monkeypatch.context() as patch:
            for function in ("open", "lstat", "scandir"):
                patch.setattr(os, function, refuse)
            hits.clear()
            with pytest.raises(DieselError) as caught:
                call()
        assert hits, number
        assert type(caught.value) is expected, number
        assert errno.errorcode[code] in str(caught.value)
    assert_untouched(store)


def test_short_writes_and_reads_are_continued(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    writev, preadv = os.writev, os.preadv
    monkeypatch.setattr(os, "writev", lambda fd, views: writev(fd, [views[0][:3]]))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:2]], at))
    store.put(NAME, PARTS)
    assert store.get(NAME) == b"something"
    assert store.get(NAME, 3, 5) == b"ethin"


def test_a_file_that_shrinks_while_it_is_read(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv

    def shrink(fd: int, views: list[memoryview], at: int) -> int:
        os.truncate(f"{store.root}/{OTHER}", 2)
        return preadv(fd, views, at)

    monkeypatch.setattr(os, "preadv", shrink)
    with pytest.raises(TruncatedError) as caught:
        store.get(OTHER)
    assert caught.value.offset == 2


def test_a_file_system_without_hard_links(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(old: str, new: str) -> None:
        raise OSError(errno.EPERM, "no hard links")

    monkeypatch.setattr(os, "link", refuse)
    store.put(NAME, PARTS)
    assert store.get(NAME) == b"something"
    with pytest.raises(ObjectExists):
        store.put(NAME, [b"else"])
    assert store.get(NAME) == b"something"
    assert [*store.leftovers()] == []


def test_a_link_whose_answer_was_lost_has_succeeded(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def twice(old: str, new: str) -> None:
        link(old, new)
        link(old, new)

    monkeypatch.setattr(os, "link", twice)
    store.put(NAME, PARTS)
    assert store.get(NAME) == b"something"
    assert [*store.leftovers()] == []


def test_a_removed_folder_is_made_again(store: FolderStore) -> None:
    shutil.rmtree(f"{store.root}/datasets")
    store.put(NAME, PARTS)
    assert [*store.names("datasets/")] == [NAME]


def test_an_interrupted_put_leaves_nothing(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(fd: int, views: list[memoryview]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "writev", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.put(NAME, PARTS)
    assert_untouched(store)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with small_disk(tmp_path / "disk", "size=1m") as point:
        yield point


def test_a_full_disk_is_an_error_and_leaves_nothing(disk: Path) -> None:
    store = FolderStore.create(disk / "store")
    with pytest.raises(NoSpaceError) as caught:
        store.put(NAME, [bytes(100_000)] * 30)
    assert caught.value.exit_code == 16
    assert [*store.names(DATASET)] == []
    assert [*store.leftovers()] == []
    store.put(NAME, [bytes(100_000)] * 3)
    assert store.stat(NAME).bytes == 300_000


def test_O16_a_store_on_a_read_only_file_system_can_be_read(disk: Path) -> None:
    FolderStore.create(disk / "store").put(NAME, PARTS)
    remount(disk, "ro")
    store = FolderStore.open(disk / "store")
    assert store.get(NAME) == b"something"
    assert [*store.names(DATASET)] == [NAME]
    with pytest.raises(PermissionDenied, match="read-only"):
        store.put(OTHER, PARTS)
    with pytest.raises(PermissionDenied, match="read-only"):
        store.delete(NAME)
