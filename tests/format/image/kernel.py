"""Mounts images as the kernel mounts them for users, and checks its log for complaints."""

import ctypes
import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from diesel_fs.format.image import Image

_LIBC = ctypes.CDLL(None, use_errno=True)
_RDONLY_NOSUID_NODEV = 7
_DETACH = 2
_KMSG_RECORD_BYTES = 8192
_GREETING = re.compile(rb"mounted with root inode @ nid")


def _why_not() -> str:
    """Return the reason why images cannot be mounted here; the empty string if they can."""
    if os.geteuid():
        return "only root mounts EROFS"
    if "\terofs\n" not in Path("/proc/filesystems").read_text(encoding="ascii"):
        return "the kernel has no EROFS"
    release = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
    return "the kernel mounts EROFS from devices only" if release < (6, 12) else ""


needs_erofs = pytest.mark.skipif(bool(_why_not()), reason=_why_not())


def _checked(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextmanager
def mounted_files(tree: Path | str, content: Path, root: Path, at: Path) -> Iterator[bytes]:
    at.mkdir(exist_ok=True)
    options = b"device=%b,device=%b" % (os.fsencode(content), os.fsencode(root))
    paths = os.fsencode(tree), os.fsencode(at)
    try:
        _checked(_LIBC.mount(*paths, b"erofs", _RDONLY_NOSUID_NODEV, options))
    except OSError as error:
        if error.errno != errno.ENOTBLK:
            raise
        pytest.skip("the kernel mounts no files of this file system (a tmpfs, say)")
    try:
        yield paths[1]
    finally:
        _checked(_LIBC.umount2(paths[1], _DETACH))


@contextmanager
def mounted(image: Image, folder: Path, content: Path, *, hidden: bool) -> Iterator[bytes]:
    """`content` is the content file; other files are made in `folder`."""
    tree, root = folder / "image", folder / "root"
    tree.write_bytes(image.buffer)
    root.write_bytes(image.root_folder(hidden=hidden))
    with mounted_files(tree, content, root, folder / "mount") as at:
        yield at


@contextmanager
def silence() -> Iterator[None]:
    """Assert that the kernel logs nothing about EROFS except mounts. Its lines do not name the
    mount, so such a test must run alone."""
    log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.lseek(log, 0, os.SEEK_END)
        yield
        records = []
        with suppress(BlockingIOError):
            while True:
                records.append(os.read(log, _KMSG_RECORD_BYTES))
    finally:
        os.close(log)
    # Headers of other parts of the kernel are left out; its warnings and faults are not.
    complaints = [line for line in records if re.search(rb"erofs|WARNING|BUG:|Oops", line)]
    assert [line for line in complaints if not _GREETING.search(line)] == []
