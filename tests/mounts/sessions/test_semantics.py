"""What programs see in a mount: the paragraphs of SEMANTICS.md, over every session."""

import ctypes
import errno
import fcntl
import os
import stat
import struct
import subprocess
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import ParamSpec

import pytest

from tests.mounts.conftest import ODD_NAMES, LiveMount, mounting
from tests.mounts.observed import figures, fresh_stats
from tests.rows import each_row

pytestmark = pytest.mark.fuse

libc = ctypes.CDLL(None, use_errno=True)

P = ParamSpec("P")


def everything_below(root: Path) -> Iterator[str]:
    yield "."
    for folder, inner, files in os.walk(root):
        for name in inner + files:
            yield os.path.relpath(os.path.join(folder, name), root)


def test_a_mount_shows_the_source(tree: LiveMount, session: str) -> None:
    """Each path has the bytes, size, mode, mtime and link target that were put. The root folder of
    a native mount without --allow-other has the mode that keeps other users out."""
    paths = sorted(everything_below(tree.at))
    assert paths == sorted(everything_below(tree.source))
    assert len(paths) > len(ODD_NAMES) + 10
    for path in paths:
        shown, original = (os.lstat(root / path) for root in (tree.at, tree.source))
        is_closed = session == "native" and path == "."
        mode = original.st_mode & 0o177700 if is_closed else original.st_mode
        assert (shown.st_mode, shown.st_mtime_ns) == (mode, original.st_mtime_ns), path
        if stat.S_ISLNK(shown.st_mode):
            assert os.readlink(tree.at / path) == os.readlink(tree.source / path)
        elif stat.S_ISREG(shown.st_mode):
            assert shown.st_size == original.st_size
            assert (tree.at / path).read_bytes() == (tree.source / path).read_bytes()


def test_cp_and_tar_copy_a_whole_mount(tree: LiveMount, tmp_path: Path) -> None:
    """They find no hidden folder."""
    subprocess.run(["cp", "-a", f"{tree.at}/.", tmp_path / "copy"], check=True)
    subprocess.run(["diff", "-r", "--no-dereference", tree.source, tmp_path / "copy"], check=True)
    assert not (tmp_path / "copy" / ".diesel").exists()
    subprocess.run(["tar", "cf", tmp_path / "t.tar", "-C", tree.at, "."], check=True)
    with tarfile.open(tmp_path / "t.tar") as tar:
        assert len(tar.getmembers()) == len(list(everything_below(tree.source)))


@each_row("name", ODD_NAMES)
def test_H10_names_are_bytes(tree: LiveMount, name: bytes) -> None:
    """A name is 1 to 255 bytes other than NUL and `/`; nothing folds or decodes it."""
    folder = os.path.join(os.fsencode(tree.at), b"odd")
    with open(os.path.join(folder, name), "rb") as file:
        assert file.read() == b"content %d" % ODD_NAMES.index(name)
    assert name in os.listdir(folder)
    with pytest.raises(FileNotFoundError):
        os.stat(os.path.join(folder, name[:-1] + b"!"))


def test_H10_a_name_of_256_bytes_is_too_long(tree: LiveMount) -> None:
    with pytest.raises(OSError, match="too long") as raised:
        os.stat(tree.at / ("x" * 256))
    assert raised.value.errno == errno.ENAMETOOLONG


def test_a_path_below_a_file_is_no_folder(tree: LiveMount) -> None:
    """Also below the files of `.diesel`."""
    name = os.path.join(os.fsencode(tree.at), b"odd", ODD_NAMES[0])
    for file in (name, os.fsencode(tree.at / ".diesel/stats")):
        for path in (file + b"/x", file + b"/", file + b"/x/y"):
            with pytest.raises(NotADirectoryError):
                os.stat(path)


def test_a_missing_name_is_looked_up_once(tree: LiveMount, session: str) -> None:
    """The kernel keeps the reply that a name does not exist. In a native mount it sends no request.
    The statistics themselves may be looked up at any time, so the least of three turns counts."""
    own = requests_of_statistics(tree)
    lookups = []
    for turn in range(3):
        before = requests(tree)
        for _ in range(50):
            assert not os.path.lexists(tree.at / "deep" / f"no such name {turn}")
        lookups.append((requests(tree) - before - own)["lookup"])
    assert min(lookups) <= (0 if session == "native" else 3)


def requests(mounted: LiveMount) -> Counter[str]:
    """The number of requests of each kind, without FORGET, which comes at any time."""
    counted = figures(fresh_stats(mounted), "requests")
    return Counter({name: n for name, n in counted.items() if "forget" not in name})


def requests_of_statistics(mounted: LiveMount) -> Counter[str]:
    before = requests(mounted)
    return requests(mounted) - before


MODIFYING: dict[str, Callable[[Path], object]] = {
    "creat": lambda at: os.open(at / "new", os.O_CREAT | os.O_WRONLY, 0o644),
    "open for writing": lambda at: os.open(at / "page", os.O_WRONLY),
    "open for both": lambda at: os.open(at / "page", os.O_RDWR),
    "open truncating": lambda at: os.open(at / "page", os.O_WRONLY | os.O_TRUNC),
    "open appending": lambda at: os.open(at / "page", os.O_WRONLY | os.O_APPEND),
    "mkdir": lambda at: os.mkdir(at / "new"),
    "rmdir": lambda at: os.rmdir(at / "empty folder"),
    "unlink": lambda at: os.unlink(at / "page"),
    "rename": lambda at: os.rename(at / "page", at / "new"),
    "rename, not replacing": lambda at: renameat2(at / "page", at / "new", 1),
    "rename, exchanging": lambda at: renameat2(at / "page", at / "large", 2),
    "link": lambda at: os.link(at / "page", at / "new"),
    "symlink": lambda at: os.symlink("page", at / "new"),
    "mknod": lambda at: os.mknod(at / "new"),
    "mkfifo": lambda at: os.mkfifo(at / "new"),
    "chmod": lambda at: os.chmod(at / "page", 0o600),
    "chown": lambda at: os.chown(at / "page", 1, 1),
    "utimensat": lambda at: os.utime(at / "page"),
    "truncate": lambda at: os.truncate(at / "page", 0),
    "setxattr": lambda at: os.setxattr(at / "page", "user.x", b"y"),
    "removexattr": lambda at: os.removexattr(at / "page", "user.x"),
    "creat in .diesel": lambda at: os.open(at / ".diesel" / "new", os.O_CREAT | os.O_WRONLY, 0o644),
    "unlink in .diesel": lambda at: os.unlink(at / ".diesel" / "stats"),
}


def renameat2(old: Path, new: Path, flags: int) -> None:
    """rename(2) with flags, which Python does not have."""
    if libc.renameat2(-100, bytes(old), -100, bytes(new), flags) < 0:
        raise OSError(ctypes.get_errno(), "renameat2")


@each_row("call", sorted(MODIFYING))
def test_H7_every_change_is_refused(tree: LiveMount, call: str) -> None:
    with pytest.raises(OSError, match=r".") as raised:
        MODIFYING[call](tree.at)
    assert raised.value.errno == errno.EROFS
    assert (tree.at / "page").read_bytes() == (tree.source / "page").read_bytes()
    assert not (tree.at / "new").exists()


def test_H7_an_open_file_cannot_be_changed(tree: LiveMount) -> None:
    descriptor = os.open(tree.at / "page", os.O_RDONLY)
    try:
        for change in (
            lambda: os.posix_fallocate(descriptor, 0, 8192),
            lambda: os.ftruncate(descriptor, 0),
            lambda: os.write(descriptor, b"x"),
        ):
            with pytest.raises(OSError, match=r".") as raised:
                change()
            assert raised.value.errno in (errno.EBADF, errno.EINVAL, errno.EROFS)
    finally:
        os.close(descriptor)


def test_H12_an_empty_file_is_read_without_a_request(tree: LiveMount) -> None:
    before = requests(tree)
    assert (tree.at / "empty").read_bytes() == b""
    assert (tree.at / "empty").stat().st_size == 0
    assert requests(tree)["read"] - before["read"] == 1  # those for the statistics


def test_H13_the_usual_calls_do_the_usual_things(tree: LiveMount, session: str) -> None:
    """Programs run, locks work, extended attributes are not supported. (`test_differences.py` has
    the differences of a native mount.)"""
    assert subprocess.run([tree.at / "program"], check=True, capture_output=True).stdout == b"ran\n"
    with open(tree.at / "page", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.lockf(file, fcntl.LOCK_SH)
        with open(tree.at / "page", "rb") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if session != "native":
            os.fsync(file.fileno())
        assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == 4096
    if session != "native":
        for call in (os.listxattr, lambda path: os.getxattr(path, "user.x")):
            with pytest.raises(OSError, match=r".") as raised:
                call(tree.at / "page")
            assert raised.value.errno == errno.ENOTSUP
    assert os.access(tree.at / "page", os.R_OK)
    assert not os.access(tree.at / "page", os.W_OK)
    with pytest.raises(OSError, match="Invalid") as raised:
        os.readlink(tree.at / "page")
    descriptor = os.open(tree.at / "page", os.O_RDONLY | os.O_NOATIME)
    assert os.pread(descriptor, 10, 5000) == b""
    os.close(descriptor)
    os.close(os.open(tree.at / "link", os.O_PATH | os.O_NOFOLLOW))


_FS_IOC_GETVERSION, _FS_IOC_FIEMAP, _FIBMAP = 0x80087601, 0xC020660B, 1
_FIEMAP = struct.Struct("=QQLLLL")  # start, length, flags, extents found, room for extents


def answer(call: Callable[P, object], *args: P.args, **named: P.kwargs) -> object:
    try:
        return call(*args, **named)
    except OSError as error:
        return errno.errorcode[error.errno or 0]


@each_row("name", ["sparse", "page"])
def test_H13_rare_calls_are_refused_or_right(tree: LiveMount, session: str, name: str) -> None:
    """RWF_NOWAIT is refused, whether the kernel has the pages or not; holes are data (zeros) and
    count as blocks; no call reveals where bytes lie, except within a native mount."""
    with (tree.at / name).open("rb", buffering=0) as file:
        opened, room = file.fileno(), [bytearray(4096)]
        assert answer(os.preadv, opened, room, 0, os.RWF_NOWAIT) == "ENOTSUP"
        assert file.read() == (tree.source / name).read_bytes()
        assert answer(os.preadv, opened, room, 0, os.RWF_NOWAIT) == "ENOTSUP"
        size = os.fstat(opened).st_size
        assert size == os.fstat(opened).st_blocks * 512  # dense, even if the source has holes
        for offset in (0, 1, size - 1):
            assert os.lseek(opened, offset, os.SEEK_DATA) == offset
            assert os.lseek(opened, offset, os.SEEK_HOLE) == size
        for whence in (os.SEEK_DATA, os.SEEK_HOLE):
            assert answer(os.lseek, opened, size, whence) == "ENXIO"
        assert answer(fcntl.ioctl, opened, _FS_IOC_GETVERSION, bytes(8)) == "ENOTTY"
        mapped = answer(fcntl.ioctl, opened, _FS_IOC_FIEMAP, _FIEMAP.pack(0, 2**64 - 1, 0, 0, 0, 0))
        if session == "native":
            assert isinstance(mapped, bytes)
            assert _FIEMAP.unpack(mapped)[3] == 1  # one extent
        else:
            assert mapped == "ENOTSUP"
        if os.geteuid() == 0:
            block = answer(fcntl.ioctl, opened, _FIBMAP, bytes(4))
            assert block == ("EINVAL" if session == "native" else bytes(4))


def test_H13_statfs_is_plausible(tree: LiveMount, session: str) -> None:
    """statfs gives the dataset's size, nothing free, and never 0, because tools divide by it. EROFS
    does not count its inodes."""
    found = os.statvfs(tree.at)
    size = sum(path.stat().st_size for path in tree.source.rglob("*") if path.is_file())
    assert found.f_blocks * found.f_frsize >= size - 5000
    assert found.f_blocks > 0
    assert (found.f_bfree, found.f_bavail, found.f_namemax) == (0, 0, 255)
    if session != "native":
        assert (found.f_files, found.f_ffree) == (len(list(everything_below(tree.source))), 0)
    subprocess.run(["df", tree.at], check=True, capture_output=True)


def test_H15_inode_numbers_are_unique_and_stable(tree: LiveMount) -> None:
    found = {path: os.lstat(tree.at / path) for path in everything_below(tree.at)}
    numbers = [each.st_ino for each in found.values()]
    assert 0 not in numbers
    assert len(set(numbers)) == len(numbers)
    assert all(each.st_nlink == 1 for each in found.values())
    assert found == {path: os.lstat(tree.at / path) for path in found}
    still = tree.at / "deep" / "er" / "still"
    assert os.stat(still / "..").st_ino == os.stat(still.parent).st_ino
    listed = {entry.name: entry.inode() for entry in os.scandir(tree.at)}
    assert listed == {name: found[name].st_ino for name in listed}
    wanted = str(found["page"].st_ino)
    command = ["find", str(tree.at), "-inum", wanted]
    assert subprocess.run(command, check=True, capture_output=True).stdout.strip().endswith(b"page")


REQUESTS_A_FILE = {
    "native": (Counter(read=3), Counter()),
    "pyfuse3": (Counter(open=1, read=1, release=1), Counter(open=1, release=1)),
    "kernel": (Counter(read=1), Counter()),
}


@pytest.mark.deep
def test_the_requests_for_reading_a_file(source: Path, tmp_path: Path, session: str) -> None:
    """pyfuse3 gets OPEN, READ and RELEASE; while the pages are kept, OPEN and RELEASE. The kernel
    session gets one READ, and a native mount one to three, since the kernel reads ahead over the
    file's end; while the pages are kept, they get none."""
    counts = []
    with mounting(source, tmp_path / "mount", session) as mounted:
        os.listdir(mounted.at)
        for reads in (0, 0, 1, 1, 1, 1):
            for _ in range(reads):
                with open(mounted.at / "a", "rb", buffering=0) as file:  # calls no isatty
                    file.read()
            counts.append(requests(mounted))
    own = counts[1] - counts[0]  # the requests for the statistics
    first, *later = [after - before - own for before, after in pairwise(counts[1:])]
    first_cost, later_cost = REQUESTS_A_FILE[session]
    if session == "native":
        assert Counter() < first <= first_cost
    else:
        assert first == first_cost
    assert later_cost in later  # at least once: the kernel may drop pages at any time


def test_a_read_at_any_offset_gives_the_bytes_there(tree: LiveMount) -> None:
    """After the end there are none."""
    content = (tree.source / "large").read_bytes()
    with open(tree.at / "large", "rb", buffering=0) as file:
        for offset in (0, 1, 4095, 4096, 131_071, 4_999_999, 5_000_000, 5_000_001, 9_000_000):
            assert os.pread(file.fileno(), 70_000, offset) == content[offset : offset + 70_000]


KINDS = {"native": ("erofs", set()), "kernel": ("fuse.diesel", {"default_permissions"})}


def test_a_mount_has_the_fixed_options(tree: LiveMount, session: str) -> None:
    """The mount is `ro,nosuid,nodev,noatime`, of type `fuse.diesel` and with `default_permissions`,
    or, in a native mount, of type `erofs`, with one of type `fuse.diesel` on `.diesel`."""
    lines = [line.split(" ") for line in Path("/proc/self/mounts").read_text().splitlines()]
    found = {at: (source, kind, options) for source, at, kind, options, *_ in lines}
    at = str(tree.at)
    mounts = {at: session, f"{at}/.diesel": "kernel"} if session == "native" else {at: session}
    assert {each for each in found if each.startswith(at)} == set(mounts)
    for each, like in mounts.items():
        wanted_kind, wanted_options = KINDS.get(like, KINDS["kernel"])
        source, kind, options = found[each]
        assert (source, kind) == ("folder@7", wanted_kind)
        assert {"ro", "nosuid", "nodev", "noatime", *wanted_options} <= set(options.split(","))
        assert "allow_other" not in options
