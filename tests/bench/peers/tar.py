"""GNU tar: how fast a small C program writes the files to the disk, one after the other."""

import time
from pathlib import Path

from . import output_of

NAME = "GNU tar"


def pack_seconds(source: Path, archive: Path) -> float:
    """`tar cf ARCHIVE SOURCE && sync ARCHIVE`, start-up included."""
    script = 'tar cf "$1" -C "$2" . && sync "$1"'
    start_s = time.perf_counter()
    output_of(["sh", "-c", script, "sh", str(archive), str(source)])
    return time.perf_counter() - start_s
