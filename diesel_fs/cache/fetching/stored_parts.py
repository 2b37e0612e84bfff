"""Reads parts of chunks from an object store by the chunks' numbers.

`StoredParts` is the `ChunkReader` for stores without one of their own (a task's cache has one), so
that readers use every store in the same way.
"""

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count

import numpy as np
import numpy.typing as npt

from ...format.entries import Bytes
from ...format.snapshot.reader import Snapshot
from ...storage.objects.store import (
    IN_STORE,
    ChunkParts,
    ObjectStore,
    Part,
    ReadGroup,
    batched_parts,
)
from ..policies.costs import ReadCosts
from .chunk_source import ChunkNames
from .coalesce import BATCH_BYTES_MAX, BATCH_PARTS_MAX

FETCH_THREADS = 64
"""Reads of a slow store that are under way at once. If each takes 30 ms, 64 reads of 110 KiB bring
230 MB/s."""


class StoredParts:
    """The chunks of one snapshot in one object store.

    If the store takes many parts in one request, threads make such requests. From a slow store,
    threads read several parts at once. From any other store, parts are read one after the other, as
    the iterator of `begin` goes on. Thread-safe; a forked child may go on with it.
    """

    def __init__(self, snapshot: Snapshot, objects: ObjectStore) -> None:
        self._reads = objects.fast_reads
        self._names = ChunkNames(snapshot)
        self.costs = ReadCosts()
        self._begun, self._ends = count(), count()  # of reads; `next` is atomic
        self._ended = 0  # reads
        self._threads: tuple[int, ThreadPoolExecutor] | None = None  # and their process's number

    def begin(self, parts: ChunkParts) -> Iterator[ReadGroup]:
        wanted: list[Part] = [
            (self._names[chunk], start, size) for chunk, start, size in parts.tolist()
        ]
        if self._reads.batches_reads:
            requests = batched_parts(wanted, BATCH_PARTS_MAX, BATCH_BYTES_MAX)
            return _Arriving([self._pool().submit(self._together, some) for some in requests])
        if self.is_slow:
            return self._at_once(wanted)
        return self._one_by_one(wanted)

    def _at_once(self, wanted: Sequence[Part], first: int = 0) -> Iterator[ReadGroup]:
        """Each part is read by a request of its own. `first` is the number of the first among the
        parts of `begin`."""
        return _Arriving([self._pool().submit(self._together, [each]) for each in wanted], first)

    def _one_by_one(self, wanted: Sequence[Part]) -> Iterator[ReadGroup]:
        for place, each in enumerate(wanted):
            if place and self.costs.is_slow:  # as the reads before have shown
                yield from self._at_once(wanted[place:], place)
                return
            yield ReadGroup((place,), self._together([each]), False)

    @property
    def is_slow(self) -> bool:
        return self.costs.is_slow

    def places(self, chunks: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        return np.full(len(chunks), IN_STORE, np.int32)

    def read_part(self, chunk: int, start: int, size: int) -> tuple[Bytes, bool]:
        return self._together([(self._names[chunk], start, size)])[0], False

    def close(self) -> None:
        """End the threads. The next read may start others."""
        threads, self._threads = self._threads, None
        if threads is not None and threads[0] == os.getpid():
            threads[1].shutdown(wait=False, cancel_futures=True)

    def _together(self, parts: Sequence[Part]) -> list[memoryview]:
        begun_s = time.monotonic()
        at_once = next(self._begun) - self._ended + 1
        try:
            contents = list(self._reads.read_parts(parts))
        finally:
            self._ended = next(self._ends) + 1
            size = sum(size for _, _, size in parts)
            self.costs.observe(size, time.monotonic() - begun_s, at_once)
        return contents

    def _pool(self) -> ThreadPoolExecutor:
        threads, process = self._threads, os.getpid()
        if threads is None or threads[0] != process:  # a forked child has none of those threads
            threads = self._threads = process, ThreadPoolExecutor(FETCH_THREADS, "stored")
        return threads[1]


class _Arriving(Iterator[ReadGroup]):
    def __init__(self, begun: Sequence["Future[list[memoryview]]"], first: int = 0) -> None:
        self._begun = begun
        self._left = iter(begun)
        self._first = first

    def __next__(self) -> ReadGroup:
        contents = next(self._left).result()
        first, self._first = self._first, self._first + len(contents)
        return ReadGroup(range(first, self._first), contents, False)

    def close(self) -> None:
        for each in self._begun:
            each.cancel()
