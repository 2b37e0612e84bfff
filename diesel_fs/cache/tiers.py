"""Where a server keeps whole chunks nearer than the object store: the interface, and in memory.

Owned here: what a shelf promises, that a chunk is checked whole before it stands in one, and the
shelf in this process's memory. Not owned: when a chunk is to be fetched (`read_through.py`), the
shelf on a disk (`disk.py`). Everything may be called from many threads at once.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from types import TracebackType
from typing import NamedTuple, Self
from uuid import UUID

from ..errors import CorruptError, NoSpaceError
from ..format.chunk import PREAMBLE_BYTES, damaged_places, parse_header, parse_preamble
from ..format.chunk_id import chunk_id_text
from ..format.entries import ChunkId


class ChunkKey(NamedTuple):
    """One chunk of one dataset. What it holds never changes."""

    identity: UUID
    id: ChunkId


class CacheHandle(ABC):
    """A chunk that stands in a shelf, open until the `with` ends. Its bytes are those that were
    checked, even where it has been dropped since."""

    bytes: int

    @abstractmethod
    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from `start` on. Raises OSError, EOFError where the chunk ends before."""

    def view(self, start: int, size: int) -> memoryview | None:
        """Bytes that are in memory anyway, never to be changed; None where they are not."""
        return None

    def close(self) -> None:
        """Let go of it."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Reservation(ABC):
    """Room in a shelf for a chunk that is on its way. Exactly one of the two is called, once."""

    @abstractmethod
    def commit(self, content: memoryview) -> None:
        """Put the chunk there; it has been checked, and will not change. Where that fails, it does
        not stand there, and nobody needs to know."""

    @abstractmethod
    def cancel(self) -> None:
        """The chunk does not come."""


class CacheTier(ABC):
    """A bounded place for whole chunks. Nothing that goes wrong in it is an error of a reader: it
    says that it does not have the chunk."""

    kind: str
    """`memory` or `disk`, in statistics."""

    prefetches_datasets: bool
    """Whether a miss is to bring the whole dataset."""

    @abstractmethod
    def find(self, key: ChunkKey) -> CacheHandle | None:
        """The chunk where it stands here, whole and checked."""

    @abstractmethod
    def holds(self, key: ChunkKey) -> bool:
        """Whether it seems to stand here, or to be on its way; costs little."""

    @abstractmethod
    def reserve(self, key: ChunkKey, size: int) -> Reservation | None:
        """Room for a chunk; what nobody uses any more goes for it. None where it stands here or
        is on its way. Raises NoSpaceError where all that is here is in use."""

    @abstractmethod
    def drop(self, key: ChunkKey) -> None:
        """Let go of a chunk, whether it is here or not."""

    def report_damage(self, key: ChunkKey) -> None:
        """A reader says that bytes of a chunk are damaged: look, or let go of it."""
        self.drop(key)

    def note_use(self, identity: UUID) -> None:
        """Somebody reads this dataset."""
        return

    def note_reading(self, *, begins: bool) -> None:
        """This process begins to read from the store for somebody who waits; or has ended to."""
        return

    def others_read(self) -> bool:
        """Whether another process that shares this shelf does so now."""
        return False

    def close(self) -> None:
        """The end. Repeatable."""
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

    A chunk goes only when nobody has read it for `idle_s`: where more is read again and again than
    there is room for, what is here stays and serves its share, and nothing is thrashed.
    """

    kind = "memory"
    prefetches_datasets = False

    def __init__(self, limit_bytes: int, *, idle_s: float = 60.0) -> None:
        self._limit_bytes = limit_bytes
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._chunks: OrderedDict[ChunkKey, _InMemory] = OrderedDict()  # the longest unused first
        self._awaited: set[ChunkKey] = set()
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """What is here, and what is expected."""
        return self._used_bytes

    def find(self, key: ChunkKey) -> CacheHandle | None:
        with self._lock:
            held = self._chunks.get(key)
            if held is not None:
                held.used_s = time.monotonic()
                self._chunks.move_to_end(key)
        return held

    def holds(self, key: ChunkKey) -> bool:
        return key in self._chunks or key in self._awaited

    def reserve(self, key: ChunkKey, size: int) -> Reservation | None:
        with self._lock:
            if self.holds(key):
                return None
            since_s = time.monotonic() - self._idle_s
            while self._used_bytes + size > self._limit_bytes:
                oldest = next(iter(self._chunks), None)
                if oldest is None or self._chunks[oldest].used_s > since_s:
                    raise NoSpaceError(f"all {self._limit_bytes:,} bytes are in use")
                self._used_bytes -= self._chunks.pop(oldest).bytes
            self._used_bytes += size
            self._awaited.add(key)
        return _MemoryPlace(self, key, size)

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

    def _arrived(self, key: ChunkKey, size: int, content: memoryview | None) -> None:
        with self._lock:
            self._awaited.discard(key)
            if content is None:
                self._used_bytes -= size
            else:
                self._chunks[key] = _InMemory(content.toreadonly())


class _InMemory(CacheHandle):
    def __init__(self, content: memoryview) -> None:
        self.bytes = len(content)
        self.used_s = time.monotonic()
        self._content = content

    def view(self, start: int, size: int) -> memoryview | None:
        if start + size > self.bytes:
            raise EOFError
        return self._content[start : start + size]

    def read_into(self, start: int, buffer: memoryview) -> None:
        if start + len(buffer) > self.bytes:
            raise EOFError
        buffer[:] = self._content[start : start + len(buffer)]


class _MemoryPlace(Reservation):
    def __init__(self, tier: MemoryTier, key: ChunkKey, size: int) -> None:
        self._shelf, self._key, self._size = tier, key, size

    def commit(self, content: memoryview) -> None:
        assert len(content) == self._size
        self._shelf._arrived(self._key, self._size, content)

    def cancel(self) -> None:
        self._shelf._arrived(self._key, self._size, None)
