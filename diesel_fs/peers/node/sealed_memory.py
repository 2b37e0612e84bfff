"""Memory that processes share: a chunk in a memfd, which is written once and then sealed.

No process can change a sealed memfd any more, through a descriptor or a mapping, and it cannot
shrink. Map it privately: before Linux 6.7 the seal against writing also forbids shared mappings
that only read. A private mapping copies only pages that are written, so none. Each object here
belongs to one thread at a time.
"""

import contextlib
import fcntl
import mmap
import os
import resource
import sys
from pathlib import Path

MAPS_MAX_FILE = Path("/proc/sys/vm/max_map_count")

RESERVED_DESCRIPTORS, RESERVED_MAPS = 24 << 10, 4 << 10
"""Descriptors and mappings that are kept free for connections, libraries and threads; at most half
of the process's limit."""

# Per chunk; Python before 3.13 keeps a descriptor for a mapping, too
_DESCRIPTORS_EACH = 1 if sys.version_info >= (3, 13) else 2
_MAPS_MAX_DEFAULT = 65_530
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class WritableMemory:
    """Memory of one chunk that is filled through `room`, a view, and then sealed or discarded."""

    def __init__(self, size: int) -> None:
        """Allocates all pages at once: so a lack of memory is an OSError here, and no signal when a
        page is written."""
        self._file = os.memfd_create("diesel-chunk", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self._file, 0, size)
            self._map = _map(self._file, size, mmap.MAP_SHARED, mmap.PROT_WRITE)
        except BaseException:
            os.close(self._file)
            self._file = -1
            raise
        self.bytes = size
        self.room = memoryview(self._map)

    def seal(self) -> "SealedMemory":
        """Make the content unchangeable, and return it. Raises BufferError while a part of `room`
        is in use, and OSError; then the caller calls `discard`."""
        self.room.release()
        self._map.close()  # the kernel refuses the seal of a writable mapping
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
        sealed = SealedMemory(self._file, self.bytes)
        self._file = -1
        return sealed

    def discard(self) -> None:
        """Free the memory, as soon as no part of `room` is in use any more. Does nothing after
        `seal`."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        with contextlib.suppress(BufferError):
            self.room.release()
            self._map.close()

    def __del__(self) -> None:
        if getattr(self, "_file", -1) >= 0:  # a thread made it for a caller that was cancelled
            os.close(self._file)


class SealedMemory:
    """A chunk that cannot change: `view` is for this process, `descriptor` (-1 when closed) for
    other processes, which map it."""

    def __init__(self, file: int, size: int) -> None:
        access = mmap.PROT_READ
        self.view = memoryview(_map(file, size, mmap.MAP_PRIVATE, access)).toreadonly()
        self.descriptor = file
        self.bytes = size

    def close(self) -> None:
        """Give the memory back when the last view and the last mapping of another process are gone;
        these stay valid."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1
        self.view = memoryview(b"")

    def __del__(self) -> None:
        if getattr(self, "descriptor", -1) >= 0:
            os.close(self.descriptor)


def _map(file: int, size: int, flags: int, access: int) -> mmap.mmap:
    flags |= mmap.MAP_POPULATE  # 1,024 page faults of a chunk would cost more
    if sys.version_info >= (3, 13):
        return mmap.mmap(file, size, flags=flags, prot=access, trackfd=False)
    return mmap.mmap(file, size, flags=flags, prot=access)


def raise_descriptor_limit() -> int:
    """Raise this process's limit of descriptors as far as it may. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else sys.maxsize


def sealed_memories_max() -> int:
    """The maximum of chunks in memory that the limits of descriptors and mappings allow."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = soft if soft != resource.RLIM_INFINITY else sys.maxsize
    try:
        maps = int(MAPS_MAX_FILE.read_text(encoding="ascii"))
    except (OSError, ValueError):
        maps = _MAPS_MAX_DEFAULT
    return min(
        (descriptors - min(RESERVED_DESCRIPTORS, descriptors // 2)) // _DESCRIPTORS_EACH,
        maps - min(RESERVED_MAPS, maps // 2),
    )
