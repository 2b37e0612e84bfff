"""The same tree in tmpfs, in the kernel's memory: no file system on this machine can be faster."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..inputs import Shape, make, tar_stream
from ..memory import available_bytes
from ..mounts import kind_of
from ..samples import PeerMissing, say

NAME = "tmpfs"
PLACE = Path("/dev/shm")
_ENTRY_BYTES = 2048  # an inode and a name in the kernel; measured some 1.2 KB


@contextmanager
def tree(shape: Shape) -> Iterator[Path]:
    """Make the shape's folders and files in tmpfs, and remove them at the end."""
    _check_room(shape)
    folder = Path(tempfile.mkdtemp(prefix="diesel-bench-", dir=PLACE))
    try:
        if shape.file_bytes:
            yield make(shape, folder)
        else:
            _fill(folder, shape)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fill(folder: Path, shape: Shape) -> None:
    say(f"making {shape.name} in {PLACE}")
    with subprocess.Popen(["tar", "xf", "-", "-C", folder], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # its exit code tells the error
            for piece in tar_stream(shape):
                process.stdin.write(piece)
            process.stdin.close()
    if process.returncode:
        raise PeerMissing(f"tar could not make {shape.files:,} files in {PLACE}")


def _check_room(shape: Shape) -> None:
    if kind_of(PLACE) != "tmpfs":
        raise PeerMissing(f"{PLACE} is no tmpfs")
    if os.statvfs(PLACE).f_favail < shape.files + shape.folders:
        raise PeerMissing(f"{PLACE} has too few inodes left for {shape.files:,} files")
    if available_bytes() < 2 * (shape.bytes + shape.files * _ENTRY_BYTES):
        raise PeerMissing(f"too little memory for {shape.files:,} files in {PLACE} and the mount's")
