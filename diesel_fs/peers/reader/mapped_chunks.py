"""The chunks in the master's memory that this process has mapped. Thread-safe.

A mapping lives as long as any view of it, and as long as this table keeps it: within the table's
limits, and until the master *revokes* the chunk (asks this process to unpin it). A forked child
goes on using its parent's mappings; the parent unpins them.
"""

import ctypes
import mmap
import os
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .request_socket import start_anew_in_forks

MAPPED_BYTES_MAX = 8 << 30
"""This is address space; the memory is the master's. Page tables take a 512th of the touched pages
in each process."""

MAPPED_CHUNKS_MAX = 16_384
"""A process may have 65,530 mappings, and its libraries need some."""

MAPPED, NOBODY = -2, -1
"""Stand for an owner's rank: this process has mapped the chunk, or it has no owner."""

Sources = npt.NDArray[np.int32]
"""Where each chunk is read from: `MAPPED`, the rank of its owner, or `NOBODY`."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


class MemoryMap:
    """The start of a file, mapped until its last view is gone. Python's `mmap` keeps a descriptor
    for each mapping: a thousand chunks would use up the descriptors of a process."""

    __slots__ = ("__array_interface__", "__weakref__", "_address", "_bytes", "_ended")

    def __init__(self, descriptor: int, size: int, ended: Callable[[], None]) -> None:
        """`ended` is called after the unmapping, in whichever thread drops the last view, so it
        must do next to nothing. Raises OSError."""
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_PRIVATE, descriptor, 0)
        if address == _MAP_FAILED:
            number = ctypes.get_errno()
            self._address = 0
            raise OSError(number, os.strerror(number))
        self._address, self._bytes, self._ended = address, size, ended
        self.__array_interface__ = {
            "data": (address, True),  # read-only
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }

    def view(self) -> memoryview:
        return np.asarray(self, np.uint8).data

    def __del__(self, unmap: Callable[[int, int], object] = _libc.munmap) -> None:
        if self._address:
            unmap(self._address, self._bytes)
            self._ended()


_Memory: TypeAlias = tuple[int, int]
"""A chunk, and its memory's inode: the master may have the chunk again in other memory."""


class MappedChunks:
    def __init__(
        self, chunks: int, *, bytes_max: int = MAPPED_BYTES_MAX, chunks_max: int = MAPPED_CHUNKS_MAX
    ) -> None:
        self.sources: Sources = np.full(chunks, NOBODY, np.int32)
        """For each chunk `MAPPED` while the table keeps it, else its owner's rank. Another thread
        may change it at any time: then `find_many` gives None for `MAPPED`."""

        self.source_of = self.sources.data
        """Serves single look-ups in `sources`."""

        self._owners: Sources = self.sources.copy()
        self._bytes_max = bytes_max
        self._chunks_max = chunks_max
        self._views: dict[int, memoryview] = {}
        self._last_used = np.zeros(chunks, np.int64)
        self._on_revoke: dict[int, Callable[[], None]] = {}
        self._clock = 0
        self.kept_bytes = 0
        self.start_anew()
        start_anew_in_forks(self)

    def start_anew(self) -> None:
        self._lock = threading.Lock()
        self._begin_count()

    def _begin_count(self) -> None:
        # Whichever thread drops the last view appends, so there is no lock
        self._unmapped: deque[_Memory] = deque()
        self._map_counts: Counter[_Memory] = Counter()
        self._maps: weakref.WeakValueDictionary[_Memory, MemoryMap] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._views)

    @property
    def has_mapped(self) -> bool:
        """Whether the master may count chunks as pinned by this process."""
        return bool(self._map_counts)

    @property
    def has_unmapped(self) -> bool:
        return bool(self._unmapped)

    def set_owners(self, owners: Sources) -> None:
        with self._lock:
            self._owners[:] = owners
            self.sources[:] = owners
            self.sources[list(self._views)] = MAPPED

    def find(self, chunk: int) -> memoryview | None:
        """A read-only view; None if the table does not keep the chunk. Never waits."""
        view = self._views.get(chunk)
        if view is not None:
            self._clock += 1
            self._last_used[chunk] = self._clock
        return view

    def find_many(self, chunks: npt.NDArray[np.uint32]) -> list[memoryview | None]:
        """As `find`, for several chunks, which may repeat."""
        self._clock += 1
        self._last_used[chunks] = self._clock
        return list(map(self._views.get, chunks.tolist()))

    def keep(self, chunk: int, descriptor: int, size: int) -> memoryview:
        """The caller closes the descriptor. Raises OSError."""
        with self._lock:
            memory = chunk, os.fstat(descriptor).st_ino
            mapping = self._maps.get(memory)
            if mapping is None:
                ended = partial(self._unmapped.append, memory)
                mapping = MemoryMap(descriptor, size, ended)
                self._maps[memory] = mapping
                self._map_counts[memory] += 1
            before = self._views.pop(chunk, None)
            self.kept_bytes += size - (0 if before is None else len(before))
            view = self._views[chunk] = mapping.view()
            self.sources[chunk] = MAPPED
            self._clock += 1
            self._last_used[chunk] = self._clock
            excess = self._excess()
        self.release(excess)
        return view

    def on_revoke(self, chunk: int, callback: Callable[[], None]) -> None:
        """`callback` runs, in any thread, if the table gives the chunk up or the master revokes it.
        It should drop its views. It replaces the chunk's earlier callback."""
        with self._lock:
            self._on_revoke[chunk] = callback

    def release(self, chunks: Iterable[int]) -> None:
        """Stop keeping these chunks. Each is unmapped with its last view."""
        callbacks: list[Callable[[], None]] = []
        views = []
        with self._lock:
            for chunk in chunks:
                if chunk in self._views:
                    self.sources[chunk] = self._owners[chunk]
                    view = self._views.pop(chunk)
                    self.kept_bytes -= len(view)
                    views.append(view)
                if (callback := self._on_revoke.get(chunk)) is not None:
                    callbacks.append(callback)
        for callback in callbacks:
            callback()

    def release_all(self) -> None:
        self.release(list(self._views))

    def drop_damaged(self, chunk: int) -> bool:
        """A damaged chunk is mapped anew when it is pinned again. Returns whether the table kept
        it."""
        with self._lock:
            for memory in [each for each in self._maps if each[0] == chunk]:
                del self._maps[memory]
        kept = chunk in self._views
        self.release([chunk])
        return kept

    def forget_all(self) -> None:
        """The master that pinned the chunks is gone: release all, and count none as pinned."""
        with self._lock:
            self._begin_count()
        self.release_all()

    def take_unmapped(self) -> list[int]:
        """The chunks unmapped since the last call, for UNPIN. A chunk is listed once for each
        memory in which the master has pinned it."""
        found = []
        with self._lock:
            while self._unmapped:
                memory = self._unmapped.popleft()
                if self._map_counts[memory] > 1:
                    self._map_counts[memory] -= 1
                elif self._map_counts.pop(memory, 0):
                    found.append(memory[0])
                    if memory[0] not in self._views:
                        self._on_revoke.pop(memory[0], None)
        return found

    def _excess(self) -> list[int]:
        """Chunks to release if the table is over its limits, the least recently used first; an
        eighth more than needed, as each call sorts all chunks."""
        if self.kept_bytes <= self._bytes_max and len(self._views) <= self._chunks_max:
            return []
        bytes_max, chunks_max = self._bytes_max * 7 // 8, self._chunks_max * 7 // 8
        kept_bytes, count, excess = self.kept_bytes, len(self._views), []
        for chunk in sorted(self._views, key=self._last_used.__getitem__)[:-1]:
            if kept_bytes <= bytes_max and count <= chunks_max:
                break
            kept_bytes -= len(self._views[chunk])
            count -= 1
            excess.append(chunk)
        return excess
