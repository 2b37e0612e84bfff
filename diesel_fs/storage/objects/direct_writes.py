"""Writes large objects of a folder store past the kernel's page cache (O_DIRECT).

Any thread; each thread that writes has its own buffer.
"""

import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from ...format.entries import Bytes
from ...system.direct_io import BLOCK_BYTES, set_direct
from ...system.mountinfo import file_system_of
from ...system.vectored_io import byte_views, drop_written

DIRECT_BYTES_MIN = 1 << 20
_BUFFER_BYTES = 1 << 20
_FILE_SYSTEMS = frozenset("btrfs ext2 ext3 ext4 f2fs xfs".split())
"""Local file systems that are known to obey O_DIRECT. Over a network or through FUSE each write
would wait for the other side; tmpfs has only the page cache; an overlay can be on top of any file
system."""


def takes_direct(folder: str) -> bool:
    try:
        return file_system_of(Path(folder)).kind in _FILE_SYSTEMS
    except OSError:  # no /proc
        return False


def write_direct(fd: int, parts: Sequence[Bytes]) -> list[memoryview]:
    """Write `parts` to the empty file `fd` with O_DIRECT, as far as the file system allows. Returns
    the unwritten bytes (all bytes of a small file), which the caller appends with a normal
    write."""
    views = byte_views(parts)
    if sum(map(len, views)) < DIRECT_BYTES_MIN or not set_direct(fd, wanted=True):
        return views
    buffer = _aligned_buffer()
    start = 0
    while True:
        filled = _fill(buffer, views)
        whole = filled - filled % BLOCK_BYTES
        try:
            start = os.write(fd, buffer[:whole]) if whole else 0
        except OSError:
            # Nothing was written: larger blocks, or no direct writes. After a disk failure the
            # caller's own write raises the error
            start = 0
        if start < len(buffer):
            break
    set_direct(fd, wanted=False)
    return [memoryview(bytes(buffer[start:filled])), *views]


def _fill(buffer: memoryview, views: list[memoryview]) -> int:
    filled = 0
    for view in views:
        piece = view[: len(buffer) - filled]
        buffer[filled : filled + len(piece)] = piece
        filled += len(piece)
        if filled == len(buffer):
            break
    drop_written(views, filled)
    return filled


class _Buffers(threading.local):
    """Making a buffer costs as much as writing from it."""

    aligned: memoryview | None = None


_buffers = _Buffers()


def _aligned_buffer() -> memoryview:
    if _buffers.aligned is None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        _buffers.aligned = memoryview(mmap.mmap(-1, _BUFFER_BYTES, flags))
    return _buffers.aligned
