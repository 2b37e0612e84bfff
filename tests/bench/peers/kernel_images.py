"""Mounts packed images by the kernel's own file systems: SquashFS by a loop device, EROFS by its
file.

No daemon takes part, so they are the limit of all packed images. Only root can mount them.
"""

import ctypes
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..samples import PeerMissing
from . import output_of, squashfuse, system_program

SQUASHFS, EROFS = "the kernel's SquashFS", "the kernel's EROFS"
_RDONLY_NOSUID_NODEV = 1 | 2 | 4


def pack(name: str, source: Path, image: Path) -> Path:
    """Make an image of the files below `source` for one of the two, without compression."""
    if name == SQUASHFS:
        # Else small files share blocks of 128 KiB, each of which is read whole for each of them.
        return squashfuse.pack(source, image, "-no-fragments")
    output_of([system_program("mkfs.erofs"), "--quiet", "-x-1", str(image), str(source)])
    return image


@contextmanager
def mounted(name: str, image: Path, mountpoint: Path) -> Iterator[float]:
    """Mount an image at a mount point, which is made. Yields when files could be read
    (`time.monotonic()`).
    """
    mountpoint.mkdir(exist_ok=True)
    if name == SQUASHFS:
        output_of(["mount", "-t", "squashfs", "-o", "loop,ro", str(image), str(mountpoint)])
    else:
        _mount_erofs(image, mountpoint)
    try:
        yield time.monotonic()
    finally:
        subprocess.run(["umount", str(mountpoint)], check=True)


def _mount_erofs(image: Path, mountpoint: Path) -> None:
    """The system call itself: mount(8) would go by a loop device."""
    libc = ctypes.CDLL(None, use_errno=True)
    places = os.fsencode(image), os.fsencode(mountpoint)
    if libc.mount(*places, b"erofs", _RDONLY_NOSUID_NODEV, None):
        raise PeerMissing(f"mount of EROFS: {os.strerror(ctypes.get_errno())}")
