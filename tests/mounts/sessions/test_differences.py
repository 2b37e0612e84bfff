"""The differences of a native mount: each line of the table in SEMANTICS.md, beside a FUSE mount.

Contents, kinds, names, sizes, times and modes do not differ (`test_agreement.py`).
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.mounts.conftest import LiveMount, mounting
from tests.mounts.observed import figures, fresh_stats
from tests.mounts.sessions.test_folders import Folder

pytestmark = pytest.mark.fuse

libc = ctypes.CDLL(None, use_errno=True)

FILES = 50


@pytest.fixture(scope="module")
def fuse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveMount]:
    source = tmp_path_factory.mktemp("both") / "source"
    (source / "folder").mkdir(parents=True)
    for number in range(FILES):
        (source / "folder" / f"{number:03}").write_bytes(b"%d" % number * 3000)
    (source / "folder" / "link").symlink_to("000")
    (source / "folder" / "inner").mkdir()
    with mounting(source, source.parent / "fuse", "kernel", allow_other=True) as mounted:
        yield mounted


@pytest.fixture(scope="module")
def native(fuse: LiveMount) -> Iterator[LiveMount]:
    with mounting(fuse.source, fuse.at.parent / "native", "native", allow_other=True) as mounted:
        yield mounted


def errno_of(call: Callable[[], object]) -> str:
    try:
        call()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return ""


def on_file(path: Path, call: Callable[[int], object], flags: int = os.O_RDONLY) -> object:
    descriptor = os.open(path, flags)
    try:
        return call(descriptor)
    finally:
        os.close(descriptor)


def all_below(at: Path) -> list[Path]:
    return sorted([at, *at.rglob("*")])


def test_inode_numbers(fuse: LiveMount, native: LiveMount) -> None:
    """By FUSE, an entry's is its index + 1. By EROFS it is another unique number, the same in
    listings and attributes and after each mount."""
    numbers = [path.lstat().st_ino for path in all_below(native.at)]
    assert len(set(numbers)) == len(numbers)
    assert min(numbers) > 0
    by_fuse = sorted(path.lstat().st_ino for path in all_below(fuse.at))
    assert by_fuse == list(range(1, len(numbers) + 1))
    listed = {entry.name: entry.inode() for entry in os.scandir(native.at / "folder")}
    assert listed == {name: (native.at / "folder" / name).lstat().st_ino for name in listed}
    again = native.at.parent / "again"
    with mounting(native.source, again, "native") as other:
        assert [path.lstat().st_ino for path in all_below(other.at)] == numbers


def test_sizes_and_blocks(fuse: LiveMount, native: LiveMount) -> None:
    """EROFS counts whole blocks of 4 KiB, and a folder has the size of its listing."""
    for path in all_below(native.at):
        shown = path.lstat()
        by_fuse = (fuse.at / path.relative_to(native.at)).lstat()
        if path.is_dir():
            assert by_fuse.st_size == 0 < shown.st_size
        else:
            assert by_fuse.st_size == shown.st_size
            assert by_fuse.st_blocks == -(-shown.st_size // 512)
            assert shown.st_blocks == -(-shown.st_size // 4096) * 8


def test_statfs(fuse: LiveMount, native: LiveMount) -> None:
    """EROFS counts the blocks of contents, each file's rounded up, and of the tree, and no inodes.
    The type differs, too."""
    shown, by_fuse = os.statvfs(native.at), os.statvfs(fuse.at)
    whole = sum(-(-path.lstat().st_size // 4096) for path in all_below(fuse.at) if path.is_file())
    assert by_fuse.f_blocks <= whole <= shown.f_blocks <= whole + 100
    assert shown.f_files == 2**64 - 1 or shown.f_files == -1
    assert (shown.f_bfree, shown.f_bavail, shown.f_namemax) == (0, 0, 255)


def test_extended_attributes(fuse: LiveMount, native: LiveMount) -> None:
    """There are none. EROFS answers as ext4 does; FUSE answers that they are not supported."""
    assert os.listxattr(native.at / "folder/000") == []
    assert errno_of(lambda: os.getxattr(native.at / "folder/000", "user.x")) == "ENODATA"
    acl = "system.posix_acl_access"
    assert errno_of(lambda: os.getxattr(native.at / "folder/000", acl)) == "ENOTSUP"
    assert errno_of(lambda: os.getxattr(fuse.at / "folder/000", acl)) == "ENODATA"
    assert errno_of(lambda: os.listxattr(fuse.at / "folder/000")) == "ENOTSUP"
    assert errno_of(lambda: os.getxattr(fuse.at / "folder/000", "user.x")) == "ENOTSUP"


def test_direct_reads(fuse: LiveMount, native: LiveMount) -> None:
    """A file of a native mount cannot be opened with O_DIRECT."""
    flags = os.O_RDONLY | os.O_DIRECT

    def read(descriptor: int) -> bytes:
        room = mmap.mmap(-1, 4096)
        return room[: os.preadv(descriptor, [room], 0)]

    assert on_file(fuse.at / "folder/000", read, flags) == b"0" * 3000
    assert errno_of(lambda: on_file(native.at / "folder/000", read, flags)) == "EINVAL"


def test_fsync_of_a_read_only_file(fuse: LiveMount, native: LiveMount) -> None:
    """In a native mount, fsync of a file or folder is EINVAL, as of a pipe."""
    for name in ("folder/000", "folder"):
        on_file(fuse.at / name, os.fsync)
        on_file(fuse.at / name, os.fdatasync)
        for call in (os.fsync, os.fdatasync):
            assert errno_of(partial(on_file, native.at / name, call)) == "EINVAL"
    on_file(native.at / "folder/000", libc.syncfs)


def test_the_order_of_a_listing(tmp_path: Path) -> None:
    """By FUSE, `.` and `..` come first; EROFS sorts them with the other names."""
    (tmp_path / "source").mkdir()
    for name in ("!", "+", "-", "a", "é"):
        (tmp_path / "source" / name).touch()
    orders = []
    for session in ("kernel", "native"):
        with mounting(tmp_path / "source", tmp_path / session, session) as mounted:
            orders.append(names_in_order(mounted.at))
    names = [b"!", b"+", b"-", b"a", "é".encode()]
    assert orders == [[b".", b"..", *names], [b"!", b"+", b"-", b".", b"..", b"a", names[-1]]]


def names_in_order(at: Path) -> list[bytes]:
    folder = Folder(at)
    try:
        return folder.rest()
    finally:
        folder.close()


def test_seeking_in_a_folder(fuse: LiveMount, native: LiveMount) -> None:
    """A position in a folder of EROFS is a place in its blocks; the end is the folder's size."""

    def at_end(descriptor: int) -> int:
        return os.lseek(descriptor, 0, os.SEEK_END)

    assert on_file(fuse.at / "folder", at_end) == 0
    assert on_file(native.at / "folder", at_end) == (native.at / "folder").stat().st_size


def test_requests_that_the_statistics_count(fuse: LiveMount, native: LiveMount) -> None:
    """Look-ups, attributes, listings and opens reach no process of a native mount."""

    def requests(mounted: LiveMount) -> int:
        before, own = (figures(fresh_stats(mounted), "requests") for _ in range(2))
        for path in all_below(mounted.at):
            assert not path.with_name(f"no {path.name}").exists()
            os.access(path, os.R_OK)
        after = figures(fresh_stats(mounted), "requests")
        kinds = ("lookup", "getattr", "readdirplus")
        return sum(after.get(k, 0) - 2 * own.get(k, 0) + before.get(k, 0) for k in kinds)

    # The reads of the statistics cost one more or less, as the kernel's attributes of them expire.
    assert abs(requests(native)) <= 2
    assert requests(fuse) >= FILES
