"""The peers that show files as a tree: SquashFS and EROFS images by FUSE or by the kernel, a tar by
ratarmount, and the same files in tmpfs.

The kernel's own file systems have no daemon, so they are the limit of all packed images; only root
can mount them. tmpfs has the files in the kernel's memory: nothing on this machine can be faster.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..inputs import Shape, make, pipe, tar_stream
from ..memory import available_bytes
from ..mounts import is_mounted, kind_of
from ..samples import PeerMissing, progress
from . import installed, output_of, system_program, tar

TMPFS, SQUASHFUSE, RATARMOUNT = "tmpfs", "squashfuse_ll", "ratarmount"
SQUASHFS, EROFS = "the kernel's SquashFS", "the kernel's EROFS"

READY_S, END_S = 60.0, 20.0
_SHARED = Path("/dev/shm")
_ENTRY_BYTES = 2048  # an inode and a name in the kernel; measured some 1.2 KB
_RDONLY_NOSUID_NODEV = 1 | 2 | 4


def pack(name: str, source: Path, image: Path) -> Path:
    """Make the image or archive that a peer mounts, of the files below `source`, without
    compression."""
    if name == RATARMOUNT:
        tar.pack_seconds(source, image)
    elif name == EROFS:
        output_of([system_program("mkfs.erofs"), "--quiet", "-x-1", str(image), str(source)])
    else:
        plain = ["-noI", "-noId", "-noD", "-noF", "-noX"]
        # -no-duplicates: otherwise files of one size are compared with each other, which takes
        # minutes.
        quiet = ["-quiet", "-no-progress", "-noappend", "-no-duplicates"]
        # Otherwise small files share blocks of 128 KiB, and each block is read whole for each of
        # its files.
        alone = ["-no-fragments"] if name == SQUASHFS else []
        make_image = system_program("mksquashfs")
        output_of([make_image, str(source), str(image), *plain, *quiet, *alone])
    return image


@contextmanager
def mounted(name: str, image: Path, mountpoint: Path) -> Iterator[tuple[float, float]]:
    """Mount an image at a mount point, which is made. Yields the seconds that this took, and the
    moment from which files could be read (`time.monotonic()`)."""
    mountpoint.mkdir(exist_ok=True)
    daemon = None
    try:
        start_s = time.monotonic()
        daemon = _mount(name, image, mountpoint)
        ready_s = time.monotonic()
        if not is_mounted(mountpoint):
            raise PeerMissing("it did not mount")
        yield ready_s - start_s, ready_s
    finally:
        _unmount(mountpoint, is_fuse=name in (SQUASHFUSE, RATARMOUNT))
        if daemon is not None:
            try:
                daemon.wait(END_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _mount(name: str, image: Path, mountpoint: Path) -> "subprocess.Popen[bytes] | None":
    """Returns the daemon if it is a child of ours."""
    if name == RATARMOUNT:
        return _start_ratarmount(image, mountpoint)
    if name == SQUASHFUSE:
        program = system_program(name)
        done = subprocess.run(
            [program, str(image), str(mountpoint)], check=False, timeout=END_S,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip  # no pipes that its daemon would keep open
        if done.returncode:
            raise PeerMissing(f"{name} ended with {done.returncode}")
    elif name == EROFS:  # by the system call: mount(8) would go by a loop device
        places = os.fsencode(image), os.fsencode(mountpoint)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(*places, b"erofs", _RDONLY_NOSUID_NODEV, None):
            raise PeerMissing(f"mount of EROFS: {os.strerror(ctypes.get_errno())}")
    else:
        output_of(["mount", "-t", "squashfs", "-o", "loop,ro", str(image), str(mountpoint)])
    return None


def _start_ratarmount(archive: Path, mountpoint: Path) -> "subprocess.Popen[bytes]":
    """Start it, and wait until it is mounted; the index lies beside the archive."""
    index = archive.with_suffix(".index")
    command = [installed(RATARMOUNT), "-f", "--index-file", str(index), str(archive)]
    with archive.with_suffix(".log").open("w+") as log:
        process = subprocess.Popen([*command, str(mountpoint)], stdout=log, stderr=log)
        give_up_s = time.monotonic() + READY_S
        while not is_mounted(mountpoint):
            if process.poll() is not None or time.monotonic() > give_up_s:
                process.kill()
                process.wait()
                log.seek(0)
                raise PeerMissing(f"it did not mount: {log.read().strip()[-300:]}")
            time.sleep(0.05)
    return process


def _unmount(mountpoint: Path, *, is_fuse: bool) -> None:
    end_s = time.monotonic() + END_S
    command, lazily = (["fusermount3", "-u"], "-z") if is_fuse else (["umount"], "-l")
    while is_mounted(mountpoint):
        lazy = [lazily] if time.monotonic() > end_s else []
        words = [*command, *lazy, str(mountpoint)]
        subprocess.run(words, check=False, stderr=subprocess.DEVNULL)
        if lazy:
            return
        time.sleep(0.05)


@contextmanager
def in_memory(shape: Shape) -> Iterator[Path]:
    """Make the shape's folders and files in tmpfs, and remove them at the end."""
    if kind_of(_SHARED) != "tmpfs":
        raise PeerMissing(f"{_SHARED} is no tmpfs")
    if os.statvfs(_SHARED).f_favail < shape.files + shape.folders:
        raise PeerMissing(f"{_SHARED} has too few inodes left for {shape.files:,} files")
    if available_bytes() < 2 * (shape.bytes + shape.files * _ENTRY_BYTES):
        raise PeerMissing(f"too little memory for {shape.files:,} files in tmpfs and the mount's")
    folder = Path(tempfile.mkdtemp(prefix="diesel-bench-", dir=_SHARED))
    try:
        if shape.file_bytes:
            yield make(shape, folder)
        else:
            progress(f"making {shape.name} in {_SHARED}")
            if pipe(tar_stream(shape), ["tar", "xf", "-", "-C", str(folder)]):
                raise PeerMissing(f"tar could not make {shape.files:,} files in {_SHARED}")
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
