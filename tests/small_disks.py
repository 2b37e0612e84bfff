"""Small file systems in memory for tests of full disks, if this process may mount any."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(point: Path, options: str) -> Iterator[Path]:
    """Mount a small file system with these options on a new folder; skips the test if that is not
    possible."""
    point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "diesel-test", str(point)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)


def remount(point: Path, options: str) -> None:
    """Mount the same file system with other options: `ro`, or another `size=`."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(point)], check=True)


def fill(file: Path) -> None:
    with suppress(OSError), file.open("wb", buffering=0) as rest:
        while rest.write(bytes(4096)):
            pass
