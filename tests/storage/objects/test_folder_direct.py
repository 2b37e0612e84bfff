"""A folder store writes large objects with O_DIRECT if it can, and the same bytes if it cannot."""

import errno
import fcntl
import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from diesel_fs.errors import NoSpaceError
from diesel_fs.format.entries import Bytes
from diesel_fs.storage.objects.folder import FolderStore
from diesel_fs.system.mountinfo import FileSystem, file_system_of
from tests.forks import exit_code, fork
from tests.rows import each_row

NAME = "datasets/" + "ab" * 16 + "/chunks/aaaa/aaaa" + "0" * 18
MIB = 1 << 20
BLOCK = 4096
SIZES = [MIB - 1, MIB, MIB + 1, 2 * MIB - BLOCK, 2 * MIB, 3 * MIB + BLOCK + 7, 4 * MIB + 12_345]


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore.create(tmp_path / "store")


class Writes:
    """A replacement of os.write that records direct writes, and may refuse or shorten them."""

    def __init__(self) -> None:
        self.direct: list[int] = []  # bytes of each direct write
        self.refused_from = 1 << 30  # the first write that fails
        self.code = errno.EINVAL
        self.bytes_max = 1 << 30
        self._write = os.write

    def __call__(self, fd: int, data: Bytes) -> int:
        if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            return self._write(fd, data)
        if len(self.direct) >= self.refused_from:
            raise OSError(self.code, os.strerror(self.code))
        self.direct.append(self._write(fd, memoryview(data)[: self.bytes_max]))
        return self.direct[-1]


def pretend_file_system(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = FileSystem(kind, frozenset())
    monkeypatch.setattr("diesel_fs.storage.objects.direct_writes.file_system_of", lambda _: found)


@pytest.fixture
def writes(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> Writes:
    pretend_file_system("ext4", monkeypatch)
    probe = os.open(store.root, os.O_RDWR | os.O_TMPFILE)
    try:
        fcntl.fcntl(probe, fcntl.F_SETFL, os.O_DIRECT)
    except OSError:
        pytest.skip("this file system has no O_DIRECT")
    finally:
        os.close(probe)
    made = Writes()
    monkeypatch.setattr(os, "write", made)
    return made


def parts_of(size: int) -> list[Bytes]:
    """`size` bytes in parts of odd lengths, as a chunk's are."""
    content = random.Random(size).randbytes(size)
    return [content[:96], b"", memoryview(content)[96:777], bytearray(content[777:])]


def put_and_check(store: FolderStore, size: int = SIZES[-1]) -> None:
    store.delete(NAME)
    store.put(NAME, parts_of(size))
    assert store.get(NAME) == b"".join(parts_of(size))


@each_row("size", SIZES)
def test_large_objects_bypass_the_page_cache(store: FolderStore, writes: Writes, size: int) -> None:
    writes.direct.clear()
    put_and_check(store, size)
    assert sum(writes.direct) == (size - size % BLOCK if size >= MIB else 0)


@each_row(
    ("kind", "code", "refused_from"),
    [
        # They may have O_DIRECT, too, but its cost there is unknown
        *((kind, 0, 0) for kind in ("nfs4", "fuse.sshfs", "lustre", "tmpfs", "overlay", "9p", "")),
        *(
            ("ext4", code, refused_from)
            for code in (errno.EINVAL, errno.EOPNOTSUPP, errno.EIO)
            for refused_from in (0, 1, 3)
        ),
    ],
)
def test_without_direct_writes_the_page_cache_is_used(
    tmp_path: Path,
    writes: Writes,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    code: int,
    refused_from: int,
) -> None:
    """On most file systems from the first byte on, elsewhere if the disk refuses one."""
    pretend_file_system(kind, monkeypatch)
    writes.direct.clear()
    writes.refused_from, writes.code = refused_from, code
    put_and_check(FolderStore.create(tmp_path / "store"))
    assert len(writes.direct) == refused_from


def test_a_folder_linked_to_another_disk_follows_that_disks_file_system(
    store: FolderStore, writes: Writes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = Path(store.root, NAME).parent
    folder.parent.mkdir(parents=True)
    folder.symlink_to(elsewhere)
    table = b"1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 0:9 / %b rw - nfs4 h:/x rw\n"
    mounts = table % bytes(elsewhere)
    monkeypatch.setattr(
        "diesel_fs.storage.objects.direct_writes.file_system_of",
        lambda path: file_system_of(path, mounts),
    )
    store.put(NAME, parts_of(SIZES[-1]))
    assert writes.direct == []
    store.put(NAME.replace("/chunks/aaaa/aaaa", "/chunks/bbbb/bbbb"), parts_of(SIZES[-1]))
    assert writes.direct


@each_row("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM])
def test_a_file_system_without_direct_writes_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store = FolderStore.create(tmp_path / "store")
    pretend_file_system("xfs", monkeypatch)
    real = fcntl.fcntl

    def refuse(fd: int, command: int, value: int = 0) -> int:
        if command == fcntl.F_SETFL and value & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return real(fd, command, value)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    for size in SIZES:
        put_and_check(store, size)


@each_row("bytes_max", [BLOCK, MIB - BLOCK])
def test_short_direct_writes_are_continued(tmp_path: Path, writes: Writes, bytes_max: int) -> None:
    writes.direct.clear()
    writes.bytes_max = bytes_max
    put_and_check(FolderStore.create(tmp_path / "store"))
    assert writes.direct == [bytes_max]


def test_a_disk_that_fills_up_in_a_direct_write_is_an_error(
    store: FolderStore, writes: Writes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes are then written through the page cache, which fails, too."""
    writes.refused_from, writes.code = 2, errno.ENOSPC

    def full(fd: int, views: Sequence[Bytes]) -> int:
        assert os.fstat(fd).st_size == sum(writes.direct)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(NoSpaceError):
        store.put(NAME, parts_of(SIZES[-1]))
    assert not list(store.housekeeping.names("datasets/"))
    assert not list(store.housekeeping.leftovers())


def test_direct_writes_are_synced_before_the_object_is_visible(
    store: FolderStore, writes: Writes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O_DIRECT does not replace fsync: the last bytes and the file's length are not on the disk."""
    synced: list[int] = []
    real_sync, real_link = os.fsync, os.link

    def fsync(fd: int) -> None:
        real_sync(fd)
        synced.append(os.fstat(fd).st_ino)

    def link(temporary: str, final: str) -> None:
        assert os.stat(temporary).st_ino in synced
        real_link(temporary, final)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    store.put(NAME, parts_of(SIZES[-1]))
    assert writes.direct
    assert os.stat(Path(store.root, NAME)).st_ino in synced


def test_threads_and_forks_own_buffers(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_file_system("ext4", monkeypatch)
    names = [NAME[:-1] + f"{number}" for number in range(8)]

    def put(name: str) -> None:
        for _ in range(4):
            store.delete(name)
            store.put(name, parts_of(4 * MIB + int(name[-1])))

    put(names[0])  # makes this thread's buffer before the forks
    children = [fork(partial(put, name)) for name in names[1:4]]
    with ThreadPoolExecutor(4) as pool:
        done = pool.map(put, names[4:])
        put(names[0])
        assert [*done] == [None] * 4
    assert [*map(exit_code, children)] == [0] * 3
    for name in names:
        assert store.get(name) == b"".join(parts_of(4 * MIB + int(name[-1]))), name
