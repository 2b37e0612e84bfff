"""Memory that processes share: a chunk in a memfd, written once, then sealed for good.

Owned here: how such memory is made, filled, sealed and let go of, and how many a process may have.
Not owned: what is in it, who has borrowed it (`pin_table.py`). Each object belongs to one thread at
a time.

A sealed memfd can be handed to any process of the same user: nobody can write to it any more,
neither through a descriptor nor through a mapping, and it cannot shrink under who has mapped it.
Map it privately: before Linux 6.7 the seal against writing refuses shared mappings, for reading
too, and of pages that are only read there is one copy either way.
"""

import contextlib
import fcntl
import mmap
import os
import resource
import sys
from pathlib import Path

MAPS_MAX = Path("/proc/sys/vm/max_map_count")

DESCRIPTORS_KEPT = 4096
MAPS_KEPT = 4096
"""For connections, libraries and threads; at most half of what there is."""

_DESCRIPTORS_EACH = 1 if sys.version_info >= (3, 13) else 2  # before, a mapping keeps one too
_MAPS_MAX_DEFAULT = 65_530
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class WritableMemory:
    """Memory that is being filled, through `room`. Then it is sealed, or discarded."""

    def __init__(self, size: int) -> None:
        """All of its pages are the machine's before anybody writes to one: what is missing is an
        error here, and no signal later. Raises OSError."""
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
        """What it holds stays as it is. Raises BufferError where somebody still has a part of the
        room, OSError; then discard it."""
        self.room.release()
        self._map.close()  # the seal is refused while anything could write
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
        sealed = SealedMemory(self._file, self.bytes)
        self._file = -1
        return sealed

    def discard(self) -> None:
        """Let go of it; the memory is free when nobody has a part of the room any more."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        with contextlib.suppress(BufferError):
            self.room.release()
            self._map.close()

    def __del__(self) -> None:
        if getattr(self, "_file", -1) >= 0:  # made by a thread that nobody waits for any more
            os.close(self._file)


class SealedMemory:
    """Memory that never changes: `view` here, `descriptor` for others."""

    def __init__(self, file: int, size: int) -> None:
        access = mmap.PROT_READ
        self.view = memoryview(_map(file, size, mmap.MAP_PRIVATE, access)).toreadonly()
        self.descriptor = file
        self.bytes = size

    def close(self) -> None:
        """Close the descriptor. Views, and what other processes have, stay valid; the memory is
        free with the last of them."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1
        self.view = memoryview(b"")

    def __del__(self) -> None:
        if getattr(self, "file", -1) >= 0:
            os.close(self.descriptor)


def _map(file: int, size: int, flags: int, access: int) -> mmap.mmap:
    flags |= mmap.MAP_POPULATE  # 1,024 page faults of a chunk cost more than all the rest
    if sys.version_info >= (3, 13):
        return mmap.mmap(file, size, flags=flags, prot=access, trackfd=False)
    return mmap.mmap(file, size, flags=flags, prot=access)


def raise_descriptor_limit() -> int:
    """Let this process have as many descriptors as it may; how many those are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else sys.maxsize


def sealed_memories_max() -> int:
    """How many chunks a process can have in memory: its descriptors and its mappings end."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = soft if soft != resource.RLIM_INFINITY else sys.maxsize
    try:
        maps = int(MAPS_MAX.read_text(encoding="ascii"))
    except (OSError, ValueError):
        maps = _MAPS_MAX_DEFAULT
    return min(
        (descriptors - min(DESCRIPTORS_KEPT, descriptors // 2)) // _DESCRIPTORS_EACH,
        maps - min(MAPS_KEPT, maps // 2),
    )
