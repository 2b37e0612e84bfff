"""GNU tar: how fast a small C program writes the files to the disk, one after the other."""

import time
from pathlib import Path

from . import output_of

NAME, PIGZ, TAR_GZIP = "GNU tar", "pigz -dc | tar x", "tar xzf"


def compress(archive: Path) -> Path:
    """A gzip file beside a tar, which stays."""
    output_of(["sh", "-c", 'pigz -1 -k "$1"', "sh", str(archive)])
    return archive.with_name(f"{archive.name}.gz")


def unpack_seconds(archive: Path, folder: Path, command: str) -> float:
    """`tar xzf` or `pigz -dc | tar x` (`command`) of a compressed tar into a new folder, and a
    sync of its file system."""
    script = 'tar xzf "$1" -C "$2"' if command == TAR_GZIP else 'pigz -dc "$1" | tar x -C "$2"'
    folder.mkdir()
    start_s = time.perf_counter()
    output_of(["sh", "-c", f'{script} && sync -f "$2"', "sh", str(archive), str(folder)])
    return time.perf_counter() - start_s


def pack_seconds(source: Path, archive: Path) -> float:
    """`tar cf ARCHIVE SOURCE && sync ARCHIVE`, start-up included."""
    script = 'tar cf "$1" -C "$2" . && sync "$1"'
    start_s = time.perf_counter()
    output_of(["sh", "-c", script, "sh", str(archive), str(source)])
    return time.perf_counter() - start_s
