"""Mounts a SquashFS image with squashfuse_ll, a C program of Debian, through FUSE."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..mounts import is_mounted
from ..samples import PeerMissing
from . import output_of, system_program

NAME = "squashfuse_ll"
END_S = 20.0


def pack(source: Path, image: Path, *options: str) -> Path:
    """Make an image of the files below `source`, without compression; `options` are more of
    mksquashfs."""
    plain = ["-noI", "-noId", "-noD", "-noF", "-noX"]
    # -no-duplicates: else files of one size are compared with each other, which takes minutes.
    quiet = ["-quiet", "-no-progress", "-noappend", "-no-duplicates"]
    output_of([system_program("mksquashfs"), str(source), str(image), *plain, *quiet, *options])
    return image


@contextmanager
def mounted(image: Path, mountpoint: Path) -> Iterator[tuple[float, float]]:
    """Mount the image at a mount point, which is made. Yields the seconds that the command took,
    and when it returned (`time.monotonic()`): it returns when files can be read, as ours does.
    """
    mountpoint.mkdir(exist_ok=True)
    try:
        start_s = time.monotonic()
        _start(image, mountpoint)
        ready_s = time.monotonic()
        if not is_mounted(mountpoint):
            raise PeerMissing("it did not mount")
        yield ready_s - start_s, ready_s
    finally:
        _unmount(mountpoint)


def _start(image: Path, mountpoint: Path) -> None:
    """Run the command, without pipes that its daemon would keep open."""
    done = subprocess.run(
        [system_program("squashfuse_ll"), str(image), str(mountpoint)],
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=END_S,
    )
    if done.returncode:
        raise PeerMissing(f"squashfuse_ll ended with {done.returncode}")


def _unmount(mountpoint: Path) -> None:
    end_s = time.monotonic() + END_S
    while is_mounted(mountpoint):
        lazy = ["-z"] if time.monotonic() > end_s else []
        subprocess.run(
            ["fusermount3", "-u", *lazy, str(mountpoint)], check=False, stderr=subprocess.DEVNULL
        )
        if lazy:
            return
        time.sleep(0.05)
