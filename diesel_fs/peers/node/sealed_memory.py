"""Memory that processes share: a chunk in a memfd, which is written once and then sealed.

Nobody can change or shrink a sealed memfd. Map it privately: before Linux 6.7 the seal against
writing also forbids shared mappings that only read, and a private mapping copies only pages that
are written, so none. Each object belongs to one thread at a time.
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
"""For connections, libraries and threads; at most half of the process's limit."""

# Per chunk; Python before 3.13 keeps a descriptor for a mapping, too
_DESCRIPTORS_EACH = 1 if sys.version_info >= (3, 13) else 2
_MAPS_MAX_DEFAULT = 65_530
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class WritableMemory:
    """Memory to fill through the view `room`, and then to seal or discard."""

    def __init__(self, size: int) -> None:
        """Allocates all pages at once, so that a lack of memory is an OSError here, and no signal
        when a page is written."""
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
        """Raises BufferError while a part of `room` is in use, and OSError; then call
        `discard`."""
        self.room.release()
        self._map.close()  # the kernel refuses the seal of a writable mapping
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
        sealed = SealedMemory(self._file, self.bytes)
        self._file = -1
        return sealed

    def discard(self) -> None:
        """Does nothing after `seal`. May be called while a part of `room` is in use."""
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
    those that map it."""

    def __init__(self, file: int, size: int) -> None:
        access = mmap.PROT_READ
        self.view = memoryview(_map(file, size, mmap.MAP_PRIVATE, access)).toreadonly()
        self.descriptor = file
        self.bytes = size

    def close(self) -> None:
        """Views and mappings of other processes stay valid."""
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
    """Raise the soft limit to the hard one, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else sys.maxsize


def sealed_memories_max() -> int:
    """How many chunks in memory the limits of descriptors and mappings allow."""
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
