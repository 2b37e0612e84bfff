"""Writing large files past the page cache (O_DIRECT), where that is surely as good.

The copy into the page cache costs more than all else that a put does per byte, and throws out pages
that somebody reads. Owned here: for which file systems and sizes it is done, and that every byte
which could not be written so comes back to the caller. Not owned: syncing (the caller does that for
all of the file), what errors mean (`folder.py`).

Concurrency: any thread; each that writes keeps a buffer of its own.
"""

import fcntl
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from ...format.entries import Bytes
from ...system.mountinfo import file_system_of

DIRECT_BYTES_MIN = 1 << 20
_BUFFER_BYTES = 1 << 20
_BLOCK_BYTES = 4096  # the largest block of disks in use, and a page
_FILE_SYSTEMS = frozenset("btrfs ext2 ext3 ext4 f2fs xfs".split())
"""On a local disk, and known to mean it. Over a network or through FUSE each write would wait for
the other side, tmpfs has nothing but the page cache, and an overlay can stand for any of these."""


def takes_direct(folder: str) -> bool:
    """Whether large files in a folder are to be written so."""
    try:
        return file_system_of(Path(folder)).kind in _FILE_SYSTEMS
    except OSError:  # no /proc
        return False


def write_direct(fd: int, parts: Sequence[Bytes]) -> list[memoryview]:
    """Write whole blocks, as far as the file system lets us; what is left comes back, and is to be
    written behind. From one aligned buffer, which is filled piece by piece."""
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    if sum(map(len, views)) < DIRECT_BYTES_MIN or not _set_direct(fd, wanted=True):
        return views
    buffer = _aligned_buffer()
    start = 0  # of what is in the buffer and not yet written
    while True:
        filled, views = _fill(buffer, views)
        whole = filled - filled % _BLOCK_BYTES
        try:
            start = os.write(fd, buffer[:whole]) if whole else 0
        except OSError:  # larger blocks than we know, or none past the cache: nothing was written;
            start = 0  # and if it is the disk, writing the same again says so
        if start < len(buffer):
            break
    _set_direct(fd, wanted=False)
    return [memoryview(bytes(buffer[start:filled])), *views]


def _fill(buffer: memoryview, views: list[memoryview]) -> tuple[int, list[memoryview]]:
    """Copy from the start of `views`: how much the buffer holds now, and what is left of them."""
    filled, first = 0, 0
    while first < len(views) and filled < len(buffer):
        piece = views[first][: len(buffer) - filled]
        buffer[filled : filled + len(piece)] = piece
        filled += len(piece)
        if len(piece) < len(views[first]):
            return filled, [views[first][len(piece) :], *views[first + 1 :]]
        first += 1
    return filled, views[first:]


def _set_direct(fd: int, *, wanted: bool) -> bool:
    """Turn O_DIRECT on or off; False where it cannot be had."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags)
    except OSError:
        if not wanted:
            raise
        return False
    return True


class _Buffers(threading.local):
    """One buffer per thread that writes: making one costs as much as writing from it."""

    aligned: memoryview | None = None


_buffers = _Buffers()


def _aligned_buffer() -> memoryview:
    """This thread's page-aligned buffer; private, so that a fork does not share it."""
    if _buffers.aligned is None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        _buffers.aligned = memoryview(mmap.mmap(-1, _BUFFER_BYTES, flags))
    return _buffers.aligned
