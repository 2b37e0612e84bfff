"""Chunks in the master's memory that this process has mapped.

Owned here: the mappings, how long they last, and which chunks may be told to be mapped no more. A
mapping lives as long as anybody has a view of it, and besides as long as this table keeps it: not
over the table's limits, and not when the master wants it back. Not owned: asking the master
(`link.py`), what is in a chunk.

Thread-safe. A forked child goes on with its parent's mappings, which are the parent's to return.
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

MAPPED_BYTES_MAX = 8 << 30
"""Address space, not memory: that is the master's. The tables of the pages that are touched take a
512th of it in each process."""

MAPPED_CHUNKS_MAX = 16_384
"""A process may have 65,530 mappings, and others want some."""

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


class Mapping:
    """A file's beginning in memory, until the last view of it is gone.

    Python's own `mmap` keeps a descriptor for each, and a thousand chunks would use up all that a
    process may have.
    """

    __slots__ = ("__array_interface__", "__weakref__", "_address", "_bytes", "_ended")

    def __init__(
        self, descriptor: int, size: int, flags: int, ended: Callable[[], None] | None = None
    ) -> None:
        """`ended` is called when it is unmapped, wherever that happens: it must do next to nothing.
        Raises OSError.
        """
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(None, size, protection, flags, descriptor, 0)
        if address == _MAP_FAILED:
            number = ctypes.get_errno()
            self._address = 0
            raise OSError(number, os.strerror(number))
        self._address, self._bytes, self._ended = address, size, ended
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }

    def view(self) -> memoryview:
        """All of it."""
        return np.asarray(self, np.uint8).data

    def __del__(self, unmap: Callable[[int, int], object] = _libc.munmap) -> None:
        if self._address:
            unmap(self._address, self._bytes)
            if self._ended is not None:
                self._ended()


_Memory: TypeAlias = tuple[int, int]  # chunk, inode: a chunk may be lent again in other memory


class MappedChunks:
    """What one store has mapped."""

    def __init__(
        self, *, bytes_max: int = MAPPED_BYTES_MAX, chunks_max: int = MAPPED_CHUNKS_MAX
    ) -> None:
        self._bytes_max = bytes_max
        self._chunks_max = chunks_max
        self._kept: dict[int, memoryview] = {}
        self._used: dict[int, int] = {}
        self._letting_go: dict[int, Callable[[], None]] = {}
        self._now = 0
        self.kept_bytes = 0
        self._begin_again()
        _TABLES.add(self)

    def _begin_again(self) -> None:
        self._lock = threading.Lock()
        self._begin_count()

    def _begin_count(self) -> None:
        """What is mapped now is nobody's to return."""
        self._ended: deque[_Memory] = deque()  # by whatever thread has had the last view: no lock
        self._mapped: Counter[_Memory] = Counter()
        self._alive: weakref.WeakValueDictionary[_Memory, Mapping] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        """How many chunks are kept."""
        return len(self._kept)

    @property
    def has_mapped(self) -> bool:
        """Whether the master may count anything as lent to this process."""
        return bool(self._mapped)

    @property
    def has_unmapped(self) -> bool:
        """Whether there is anything to return."""
        return bool(self._ended)

    def find(self, chunk: int) -> memoryview | None:
        """A chunk that is mapped: all of it, its own copy where it is written to. Never waits."""
        view = self._kept.get(chunk)
        if view is not None:
            self._now += 1
            self._used[chunk] = self._now
        return view

    def keep(self, chunk: int, descriptor: int, size: int) -> memoryview:
        """Maps a chunk that was lent. The descriptor stays the caller's. Raises OSError."""
        with self._lock:
            which = chunk, os.fstat(descriptor).st_ino
            mapping = self._alive.get(which)
            if mapping is None:
                ended = partial(self._ended.append, which)
                mapping = Mapping(descriptor, size, mmap.MAP_PRIVATE, ended)
                self._alive[which] = mapping
                self._mapped[which] += 1
            before = self._kept.pop(chunk, None)
            self.kept_bytes += size - (0 if before is None else len(before))
            view = self._kept[chunk] = mapping.view()
            self._now += 1
            self._used[chunk] = self._now
            over = self._over()
        self.give_up(over)
        return view

    def tell(self, chunk: int, let_go: Callable[[], None]) -> None:
        """`let_go` is called, in any thread, when a chunk is given up, and each time that it is
        wanted back after that: who has views of it is to let go of them. The last to say so is
        told.
        """
        with self._lock:
            self._letting_go[chunk] = let_go

    def give_up(self, chunks: Iterable[int]) -> None:
        """Keep these no longer: they are unmapped with the last view of them."""
        told: list[Callable[[], None]] = []
        views = []
        with self._lock:
            for chunk in chunks:
                view = self._kept.pop(chunk, None)
                if view is not None:
                    self.kept_bytes -= len(view)
                    views.append(view)
                self._used.pop(chunk, None)
                if (let_go := self._letting_go.get(chunk)) is not None:
                    told.append(let_go)
        for let_go in told:
            let_go()

    def give_up_all(self) -> None:
        """Keep nothing any longer."""
        self.give_up(list(self._kept))

    def doubt(self, chunk: int) -> bool:
        """A chunk is damaged: when it is lent again, it is mapped anew. Whether it was kept."""
        with self._lock:
            for which in [each for each in self._alive if each[0] == chunk]:
                del self._alive[which]
        kept = chunk in self._kept
        self.give_up([chunk])
        return kept

    def forget(self) -> None:
        """The master that had lent all this is gone: another will not be told of it."""
        with self._lock:
            self._begin_count()
        self.give_up_all()

    def unmapped(self) -> list[int]:
        """The chunks that have been unmapped since this was last asked: as often as the master has
        lent other memory for one."""
        found = []
        with self._lock:
            while self._ended:
                which = self._ended.popleft()
                if self._mapped[which] > 1:
                    self._mapped[which] -= 1
                elif self._mapped.pop(which, 0):
                    found.append(which[0])
                    if which[0] not in self._kept:
                        self._letting_go.pop(which[0], None)
        return found

    def _over(self) -> list[int]:
        """What has to go, the least recently used first: an eighth more than must be, as it costs
        a look at all of them."""
        if self.kept_bytes <= self._bytes_max and len(self._kept) <= self._chunks_max:
            return []
        bytes_max, chunks_max = self._bytes_max * 7 // 8, self._chunks_max * 7 // 8
        held_bytes, count, found = self.kept_bytes, len(self._kept), []
        for chunk in sorted(self._kept, key=lambda each: self._used.get(each, 0))[:-1]:
            if held_bytes <= bytes_max and count <= chunks_max:
                break
            held_bytes -= len(self._kept[chunk])
            count -= 1
            found.append(chunk)
        return found


_TABLES: "weakref.WeakSet[MappedChunks]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for each in list(_TABLES):
        each._begin_again()


os.register_at_fork(after_in_child=_after_fork_in_child)
