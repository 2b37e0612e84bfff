"""Stores for tests of readers: slow ones, ones that take many parts in a request, and ones that
read parts of chunks by number."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from uuid import UUID

import numpy as np
import numpy.typing as npt

from diesel_fs.errors import ObjectMissing, ObjectStoreError
from diesel_fs.format.entries import Bytes
from diesel_fs.format.object_names import chunk_object
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.storage.objects.store import (
    ChunkParts,
    ChunkReader,
    FastReads,
    ObjectStore,
    ReadGroup,
    ReadWrapper,
)

Positions = npt.NDArray[np.int64]


class Slow(ReadWrapper):
    """A store that takes a while for a read, and counts the reads that wait at once."""

    delay_s = 0.03

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.waiting = self.most = self.reads = 0
        self._lock = threading.Lock()

    @contextmanager
    def _delayed(self) -> Iterator[None]:
        with self._lock:
            self.waiting += 1
            self.reads += 1
            self.most = max(self.most, self.waiting)
        time.sleep(self.delay_s)
        with self._lock:
            self.waiting -= 1
        yield

    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        with self._delayed():
            self.inner.read_into(name, start, buffer)


class Counted(Slow):
    delay_s = 0.0


class Batching(Slow):
    delay_s = 0.0

    @property
    def fast_reads(self) -> FastReads:
        return _BatchedReads(self)

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.requests: list[list[tuple[str, int, int]]] = []

    def read_parts(self, parts: Sequence[tuple[str, int, int]]) -> Iterator[memoryview]:
        self.requests.append(list(parts))
        with self._delayed():
            return self.inner.fast_reads.read_parts(parts)

    def read_uncached(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        self.inner.read_into(name, start, buffer)

    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        self.inner.read_into(name, start, buffer)


class _BatchedReads(FastReads):
    _store: Batching

    batches_reads = True

    def read_parts(self, parts: Sequence[tuple[str, int, int]]) -> Iterator[memoryview]:
        return self._store.read_parts(parts)

    def read_uncached(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        self._store.read_uncached(name, start, buffer)


class Columns(ReadWrapper):
    """A store that sends parts in groups that are drawn at random; parts may be damaged."""

    @property
    def fast_reads(self) -> FastReads:
        return _ColumnReads(self)

    def __init__(self, inner: ObjectStore, view: Snapshot, seed: int = 0, groups: int = 3) -> None:
        super().__init__(inner)
        self._view = view
        self._draw = np.random.default_rng(seed)
        self._groups = groups
        self.damaged: set[tuple[int, int]] = set()  # chunk and start
        self.checks = False  # whether every second group has been checked already
        self.fails = False
        self.loses = False  # a chunk, at the third group
        self.parts: list[int] = []  # the chunks of all requests

    def chunk_reader(self, identity: UUID, version: int) -> ChunkReader | None:
        is_ours = (identity, version) == (self._view.identity, self._view.version)
        return self if is_ours else None

    def begin(self, parts: ChunkParts) -> Iterator[ReadGroup]:
        self.parts += parts[:, 0].tolist()
        order = self._draw.permutation(len(parts))
        return self._arriving(parts, np.array_split(order, self._groups), fails=self.fails)

    def _arriving(
        self, parts: ChunkParts, groups: list[Positions], *, fails: bool
    ) -> Iterator[ReadGroup]:
        for number, some in enumerate(groups):
            if fails and number:
                raise ObjectStoreError("no store")
            if self.loses and number == 2:
                raise ObjectMissing("a chunk is lost")
            contents = [self._part(*each) for each in parts[some].tolist()]
            yield ReadGroup(some.tolist(), contents, self.checks and number % 2 == 1)

    is_slow = False

    def places(self, chunks: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        return np.zeros(len(chunks), np.int32)

    def read_part(self, chunk: int, start: int, size: int) -> tuple[Bytes, bool]:
        return self._part(chunk, start, size), False

    def _part(self, chunk: int, start: int, size: int) -> memoryview:
        room = bytearray(size)
        name = chunk_object(self._view.identity, self._view.chunk_ids[chunk])
        self.inner.read_into(name, start, room)
        if (chunk, start) in self.damaged:
            room[size // 2] ^= 1
        return memoryview(room).toreadonly()


class _ColumnReads(FastReads):
    _store: Columns

    batches_reads = True

    def chunk_reader(self, identity: UUID, version: int) -> ChunkReader | None:
        return self._store.chunk_reader(identity, version)
