"""Keeps whole chunks nearer than the object store: the interface, and the tier in memory.

A *tier* is a bounded place for whole chunks, near a server or a node of a task: in memory
(`MemoryTier`) or in a folder of a local disk (`DiskTier`, `disk/chunks.py`). Everything in it has
been checked whole. A failure of a tier is never an error for a reader: `find` then returns None, as
if the chunk were absent.

Everything may be called from many threads at once.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import takewhile
from typing import NamedTuple
from uuid import UUID

from ..errors import CorruptError, NoSpaceError
from ..format.chunk import PREAMBLE_BYTES, damaged_places, parse_header, parse_preamble
from ..format.chunk_id import chunk_id_text
from ..format.entries import ChunkId
from .policies.replacement import Shortage


class ChunkKey(NamedTuple):
    """Names one chunk of one dataset. Chunks never change."""

    identity: UUID
    id: ChunkId


class CacheHandle(AbstractContextManager["CacheHandle"], ABC):
    """A chunk of a tier. It stays readable until `close`, even if the tier drops it."""

    bytes: int

    @abstractmethod
    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from `start` on. Raises OSError; EOFError if the chunk is too short."""

    def read_nowait(self, start: int, buffer: memoryview) -> bool:
        """Fill `buffer` if that needs no waiting. Returns whether it did. Never raises, even if the
        chunk is too short."""
        return False

    def view(self, start: int, size: int) -> memoryview | None:
        """Bytes in the tier's own memory, not to be changed; None if the tier is not in memory."""
        return None

    def close(self) -> None:
        """Repeatable."""
        return

    def __exit__(self, *error: object) -> None:
        self.close()


class Reservation(ABC):
    """Room in a tier for a chunk that is being fetched. Call `commit` or `cancel`, once."""

    @abstractmethod
    def commit(self, content: memoryview) -> None:
        """Put the chunk, which the caller has checked and will not change, into the tier. A failure
        is not reported: the tier then lacks the chunk."""

    @abstractmethod
    def cancel(self) -> None:
        """Give the room back."""


class CacheTier(ABC):
    kind: str
    """`memory` or `disk`: the name in statistics."""

    prefetches_datasets: bool
    """Whether a miss should fetch the whole dataset, chunk by chunk."""

    @abstractmethod
    def find(self, key: ChunkKey) -> CacheHandle | None:
        """The chunk, whole and checked."""

    @abstractmethod
    def holds(self, key: ChunkKey) -> bool:
        """Whether the tier seems to have the chunk or to be getting it; cheap."""

    @abstractmethod
    def reserve(self, key: ChunkKey, size: int) -> Reservation | None:
        """Reserve room for a chunk that the caller will fetch, and evict idle chunks for it. None
        if the tier has the chunk or is getting it. Raises NoSpaceError if all chunks are in use."""

    @abstractmethod
    def drop(self, key: ChunkKey) -> None:
        """Remove a chunk, if it is there."""

    def report_damage(self, key: ChunkKey) -> None:
        """Check or drop a chunk in which a reader found damaged bytes."""
        self.drop(key)

    def note_use(self, identity: UUID) -> None:
        """Note a use of a dataset: a tier on a disk evicts the others first."""
        return

    def note_reading(self, *, begins: bool) -> None:
        """Note that a reader of this process begins, or ends, to wait for the object store. Other
        processes that share the tier pause their fetches meanwhile (`others_read`)."""
        return

    def others_read(self) -> bool:
        """Whether a reader of another process that shares this tier waits for the store."""
        return False

    def close(self) -> None:
        """Release all chunks. Repeatable."""
        return


def verify_chunk(key: ChunkKey, content: memoryview) -> None:
    """Check every byte of a chunk object. Raises FormatError."""
    preamble = parse_preamble(content, identity=key.identity, id=key.id, object_bytes=len(content))
    header = parse_header(preamble, content[PREAMBLE_BYTES : preamble.body_start])
    bad = damaged_places(header, content[preamble.body_start :])
    if bad:
        raise CorruptError(f"chunk {chunk_id_text(key.id)}: {len(bad)} entries are damaged")


class MemoryTier(CacheTier):
    """Chunks in this process's memory.

    A chunk is evicted only when nobody has read it for `idle_s`. So if readers cycle through more
    chunks than fit, the tier does not thrash: its chunks stay, and serve their part of the reads.
    """

    kind = "memory"
    prefetches_datasets = False

    def __init__(
        self,
        limit_bytes: int,
        *,
        idle_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_bytes = limit_bytes
        self._idle_s = idle_s
        self._clock = clock
        self._lock = threading.Lock()
        self._chunks: OrderedDict[ChunkKey, _InMemory] = OrderedDict()  # the longest unread first
        self._reserved: set[ChunkKey] = set()
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """The bytes of chunks and reservations."""
        return self._used_bytes

    def find(self, key: ChunkKey) -> CacheHandle | None:
        with self._lock:
            held = self._chunks.get(key)
            if held is not None:
                held.used_s = self._clock()
                self._chunks.move_to_end(key)
        return held

    def holds(self, key: ChunkKey) -> bool:
        return key in self._chunks or key in self._reserved

    def reserve(self, key: ChunkKey, size: int) -> Reservation | None:
        with self._lock:
            if self.holds(key):
                return None
            since_s = self._clock() - self._idle_s
            idle = takewhile(lambda each: self._chunks[each].used_s <= since_s, self._chunks)
            shortage = Shortage[ChunkKey](self._used_bytes + size - self._limit_bytes)
            if not shortage.choose(idle, lambda each: self._chunks[each].bytes):
                raise NoSpaceError(f"all {self._limit_bytes:,} bytes are in use")
            for each in shortage.victims:
                self._used_bytes -= self._chunks.pop(each).bytes
            self._used_bytes += size
            self._reserved.add(key)
        return _MemoryReservation(self, key, size)

    def drop(self, key: ChunkKey) -> None:
        with self._lock:
            held = self._chunks.pop(key, None)
            if held is not None:
                self._used_bytes -= held.bytes

    def close(self) -> None:
        with self._lock:
            for held in self._chunks.values():
                self._used_bytes -= held.bytes
            self._chunks.clear()

    def _end_reservation(self, key: ChunkKey, size: int, content: memoryview | None) -> None:
        with self._lock:
            self._reserved.discard(key)
            if content is None:
                self._used_bytes -= size
            else:
                self._chunks[key] = _InMemory(content.toreadonly(), self._clock())


class _InMemory(CacheHandle):
    def __init__(self, content: memoryview, used_s: float) -> None:
        self.bytes = len(content)
        self.used_s = used_s
        self._content = content

    def view(self, start: int, size: int) -> memoryview | None:
        if start + size > self.bytes:
            raise EOFError
        return self._content[start : start + size]

    def read_into(self, start: int, buffer: memoryview) -> None:
        if start + len(buffer) > self.bytes:
            raise EOFError
        buffer[:] = self._content[start : start + len(buffer)]


class _MemoryReservation(Reservation):
    def __init__(self, tier: MemoryTier, key: ChunkKey, size: int) -> None:
        self._tier, self._key, self._size = tier, key, size

    def commit(self, content: memoryview) -> None:
        assert len(content) == self._size
        self._tier._end_reservation(self._key, self._size, content)

    def cancel(self) -> None:
        self._tier._end_reservation(self._key, self._size, None)
