"""A folder store when system calls fail: FAULTS O15, and which error each errno becomes."""

import errno
import os
import shutil
from collections.abc import Callable
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
from tests.small_disks import remount

DATASET = "datasets/" + "ab" * 16
CHUNKS = f"{DATASET}/chunks/aaaa"
NAME = f"{CHUNKS}/aaaa" + "0" * 18
OTHER = f"{CHUNKS}/aaaa" + "1" * 18
LEASE = f"{DATASET}/leases/me"
PARTS: list[Bytes] = [b"some", b"thing"]


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    """A store with a chunk folder that exists already and is known to be durable."""
    made = FolderStore.create(tmp_path / "store")
    made.put(OTHER, [b"other"])
    return made


TEMPORARY = "temporary"


class Syncs:
    """A replacement of os.fsync that records the synced paths, and fails as a test asks."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.paths: list[str] = []
        self._fsync = os.fsync
        self.fail()

    def fail(self, *failing: str, code: int = errno.EIO, times: int = 99) -> None:
        self.failing, self.code, self.times, self.hits = failing, code, times, 0
        self.paths.clear()

    def __call__(self, fd: int) -> None:
        path = os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), self.root)
        self.paths.append(path)
        if (TEMPORARY if "/.tmp-" in path else path) in self.failing and self.hits < self.times:
            self.hits += 1
            raise OSError(self.code, os.strerror(self.code))
        self._fsync(fd)

    def temporaries(self) -> list[str]:
        return [path for path in self.paths if "/.tmp-" in path]


@pytest.fixture
def syncs(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> Syncs:
    made = Syncs(store.root)
    monkeypatch.setattr(os, "fsync", made)
    return made


def assert_untouched(store: FolderStore) -> None:
    assert [*store.housekeeping.names(DATASET)] == [OTHER]
    assert [*store.housekeeping.leftovers()] == []
    assert sorted(os.listdir(f"{store.root}/{CHUNKS}")) == [OTHER.rpartition("/")[2]]


def test_files_are_synced_before_folders_and_parents_too(store: FolderStore, syncs: Syncs) -> None:
    store.put(NAME, PARTS)
    assert syncs.paths == [*syncs.temporaries(), CHUNKS]
    assert syncs.paths[0].startswith(f"{CHUNKS}/.tmp-")
    syncs.paths.clear()
    fresh = FolderStore.open(store.root)
    fresh.put(NAME[:-1] + "y", PARTS)
    above = [".", "datasets", DATASET, f"{DATASET}/chunks"]
    assert [path for path in syncs.paths if "/.tmp-" not in path] == [*above, CHUNKS]
    fresh.put(NAME[:-1] + "z", PARTS)
    assert len(syncs.paths) == 8, "folders known to be durable are not synced again"


@each_row(
    ("name", "failing", "temporaries"),
    [
        (NAME, TEMPORARY, 2),  # it is written to a new file
        (NAME[:-1] + "x", CHUNKS, 2),
        ("deleted/" + "0" * 32, ".", 1),
    ],
)
def test_O15_after_one_fsync_error_the_object_is_written_again(
    store: FolderStore, syncs: Syncs, name: str, failing: str, temporaries: int
) -> None:
    syncs.fail(failing, times=1)
    store.put(name, PARTS)
    assert syncs.hits == 1
    assert len(set(syncs.temporaries())) == len(syncs.temporaries()) == temporaries
    assert store.get(name) == b"something"
    assert [*store.housekeeping.leftovers()] == []


@each_row(
    ("failing", "code", "error", "hits"),
    [
        (TEMPORARY, errno.EIO, ObjectStoreError, 2),
        (CHUNKS, errno.EIO, ObjectStoreError, 2),
        (TEMPORARY, errno.ENOSPC, NoSpaceError, 1),  # it is not tried again
        (TEMPORARY, errno.EDQUOT, NoSpaceError, 1),
    ],
)
def test_O15_a_second_fsync_error_is_raised(
    store: FolderStore, syncs: Syncs, failing: str, code: int, error: type[DieselError], hits: int
) -> None:
    syncs.fail(failing, code=code)
    with pytest.raises(error, match=errno.errorcode[code]) as caught:
        store.put(NAME, PARTS)
    assert type(caught.value) is error
    assert NAME in str(caught.value)
    assert syncs.hits == hits
    assert_untouched(store)


def test_O15_a_failed_replace_leaves_the_old_version(store: FolderStore, syncs: Syncs) -> None:
    syncs.fail(DATASET)
    with pytest.raises(ObjectStoreError, match="EIO"):
        store.replace(LEASE, PARTS)
    assert not os.path.exists(f"{store.root}/{DATASET}/leases")
    syncs.fail()
    store.replace(LEASE, [b"old"])
    syncs.fail(TEMPORARY)
    with pytest.raises(ObjectStoreError):
        store.replace(LEASE, [b"new"])
    assert store.get(LEASE) == b"old"
    assert [*store.housekeeping.leftovers()] == []


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
    assert [*store.housekeeping.leftovers()] == []


def test_a_file_system_that_cannot_sync_folders_works(store: FolderStore, syncs: Syncs) -> None:
    folders = [".", "datasets", DATASET, f"{DATASET}/chunks", CHUNKS]
    syncs.fail(*folders, code=errno.EINVAL)
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
        lambda: [*store.housekeeping.names(DATASET)],
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


def test_short_reads_and_writes_resume(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    writev, preadv = os.writev, os.preadv
    monkeypatch.setattr(os, "writev", lambda fd, views: writev(fd, [views[0][:3]]))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:2]], at))
    store.put(NAME, PARTS)
    assert store.get(NAME) == b"something"
    assert store.get(NAME, 3, 5) == b"ethin"


def test_a_file_that_shrinks_meanwhile(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv

    def shrink(fd: int, views: list[memoryview], at: int) -> int:
        os.truncate(f"{store.root}/{OTHER}", 2)
        return preadv(fd, views, at)

    monkeypatch.setattr(os, "preadv", shrink)
    with pytest.raises(TruncatedError) as caught:
        store.get(OTHER)
    assert caught.value.offset == 2


def no_links(old: str, new: str) -> None:
    raise OSError(errno.EPERM, "no hard links")


def linked_twice(old: str, new: str, link: Callable[[str, str], None] = os.link) -> None:
    link(old, new)
    link(old, new)


@each_row("link", [no_links, linked_twice])
def test_without_hard_links_or_an_answer_to_one_a_put_succeeds(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch, link: Callable[[str, str], None]
) -> None:
    monkeypatch.setattr(os, "link", link)
    store.put(NAME, PARTS)
    if link is no_links:
        with pytest.raises(ObjectExists):
            store.put(NAME, [b"else"])
    assert store.get(NAME) == b"something"
    assert [*store.housekeeping.leftovers()] == []
    store.delete(NAME)


def test_a_removed_folder_is_made_again(store: FolderStore) -> None:
    shutil.rmtree(f"{store.root}/datasets")
    store.put(NAME, PARTS)
    assert [*store.housekeeping.names("datasets/")] == [NAME]


def test_a_put_interrupted_is_undone(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(fd: int, views: list[memoryview]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "writev", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.put(NAME, PARTS)
    assert_untouched(store)


def test_a_full_disk_is_an_error_and_leaves_nothing(disk: Path) -> None:
    store = FolderStore.create(disk / "store")
    with pytest.raises(NoSpaceError) as caught:
        store.put(NAME, [bytes(100_000)] * 30)
    assert caught.value.exit_code == 16
    assert [*store.housekeeping.names(DATASET)] == []
    assert [*store.housekeeping.leftovers()] == []
    store.put(NAME, [bytes(100_000)] * 3)
    assert store.stat(NAME).bytes == 300_000


def test_O16_a_store_on_a_read_only_file_system_can_be_read(disk: Path) -> None:
    FolderStore.create(disk / "store").put(NAME, PARTS)
    remount(disk, "ro")
    store = FolderStore.open(disk / "store")
    assert store.get(NAME) == b"something"
    assert [*store.housekeeping.names(DATASET)] == [NAME]
    with pytest.raises(PermissionDenied, match="read-only"):
        store.put(OTHER, PARTS)
    with pytest.raises(PermissionDenied, match="read-only"):
        store.delete(NAME)
