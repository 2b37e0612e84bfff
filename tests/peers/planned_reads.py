"""Four simulated nodes that share a cache and know what is read, and oracles for what the store
must give at least.

The oracles share no code with the cache. `belady_fetches` is Belady's MIN at the unit of a chunk:
each miss fetches the whole chunk and replaces the one whose next use is farthest. It is the optimum
of a cache that must take in what it reads.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import trio

from diesel_fs.cache.read_through import ReadCostModel
from diesel_fs.orders.future import FutureUses, UnitOrder
from diesel_fs.peers.chunk_future import ChunkFuture

from .node_caches import ChunkSource, make_cache

Files = npt.NDArray[np.int64]

NODES = 4
CHUNK_BYTES, REQUEST_S, CHUNK_S = 2000, 0.005, 0.042  # of a store at 100 MB/s, 4 MiB


def costs() -> ReadCostModel:
    found = ReadCostModel()
    found.request_s, found.bytes_per_s = REQUEST_S, CHUNK_BYTES / CHUNK_S
    return found


# Orders of files; file i is in chunk i // files_per_chunk


def chunk_wise(epoch: int, chunks: int, files: int, group: int) -> Files:
    chance = np.random.default_rng([1, epoch])
    shuffled = chance.permutation(chunks)
    groups = [shuffled[first : first + group] for first in range(0, chunks, group)]
    return np.concatenate(
        [chance.permutation((each[:, None] * files + np.arange(files)).ravel()) for each in groups]
    )


def full(epoch: int, chunks: int, files: int, group: int) -> Files:
    return np.random.default_rng([2, epoch]).permutation(chunks * files)


# Oracles


def belady_fetches(accesses: Sequence[int], room: int, first: int = 0) -> int:
    """How many chunks MIN fetches for these accesses, in a cache with room for so many chunks,
    from the access `first` on."""
    following, last = [math.inf] * len(accesses), dict[int, int]()
    for at in range(len(accesses) - 1, -1, -1):
        following[at] = last.get(accesses[at], math.inf)
        last[accesses[at]] = at
    here: dict[int, float] = {}
    heap: list[tuple[float, int]] = []
    fetches = 0
    for at, chunk in enumerate(accesses):
        if chunk not in here:
            fetches += at >= first
            while len(here) >= room:
                until, victim = heapq.heappop(heap)
                if here.get(victim) == -until:
                    del here[victim]
        here[chunk] = following[at]
        heapq.heappush(heap, (-following[at], chunk))
    return fetches


# The simulated task


@dataclass(slots=True)
class EpochEgress:
    """What one epoch read from the store, in chunks, by whole fetches and by single reads; and what
    MIN reads."""

    fetched: float
    read_past: float
    belady: float

    @property
    def total(self) -> float:
        return self.fetched + self.read_past


class PlannedTask:
    """Four nodes; the readers of all read in step, each its part of the order."""

    def __init__(
        self, policy: str, chunks: int, files: int, room: int, *, group: int = 10,
        order: str = "chunk-wise", read_s: float = 0.01, lag_s: float = 1.0, known: bool = True,
        prefetches: bool = True, ahead: float = 0.5,
    ) -> None:  # fmt: skip
        """`room`: chunks that fit all nodes together. `lag_s`: how old positions become. The next
        epoch is known when the part `ahead` of one has been read."""
        self.chunks, self.files, self.room, self.group = chunks, files, room, group
        self.make_order = chunk_wise if order == "chunk-wise" else full
        self.read_s, self.lag_s, self.known, self.ahead = read_s, lag_s, known, ahead
        self.prefetches = prefetches
        self.owner = np.random.default_rng(3).permutation(np.arange(chunks) % NODES)
        self.source = ChunkSource(range(chunks), CHUNK_BYTES)
        self.source.contents = [self.source.contents[0]] * chunks
        self.size = len(self.source.contents[0])
        self.source.seconds = costs().read_s(self.size)
        self.caches = [
            make_cache(self.source, room // NODES * self.size, policy=policy, costs=costs())
            for _ in range(NODES)
        ]
        for rank, cache in enumerate(self.caches):
            cache.set_owned(self.owner == rank)
        self.accesses: list[list[int]] = [[] for _ in range(NODES)]  # by owner
        self.bounds: list[list[int]] = [[0] * NODES]
        self.past = [0]
        self.fetched = [0]
        self.late = 0  # reads that had to wait or went past the cache
        self.position = 0  # in the epochs together
        self._base = 0
        self._known_epochs = 0

    async def run(self, epochs: int) -> list[EpochEgress]:
        async with trio.open_nursery() as nursery:
            for cache in self.caches:
                await nursery.start(cache.run)
                if self.prefetches:
                    nursery.start_soon(cache.prefetch_planned)
            if self.known:
                nursery.start_soon(self._tell_positions)
            for epoch in range(epochs):
                await self._read(epoch, epochs)
            nursery.cancel_scope.cancel()
        for cache in self.caches:
            cache.close()
        return [self._egress(epoch) for epoch in range(epochs)]

    def parts(self, epoch: int) -> Files:
        order = self.make_order(epoch, self.chunks, self.files, self.group)
        return order[: len(order) // NODES * NODES].reshape(NODES, -1)

    async def _read(self, epoch: int, epochs: int) -> None:
        parts = self.parts(epoch)
        if self._known_epochs <= epoch:
            self._tell_future(epoch, epoch + 1)
        for at in range(parts.shape[1]):
            if at == int(parts.shape[1] * self.ahead) and epoch + 1 < epochs:
                self._tell_future(epoch, epoch + 2)
            async with trio.open_nursery() as nursery:
                for rank in range(NODES):
                    nursery.start_soon(self._read_file, int(parts[rank, at]))
                nursery.start_soon(trio.sleep, self.read_s)
            self.position += 1
        self.bounds.append([len(each) for each in self.accesses])
        self.past.append(self.past[-1])
        self.fetched.append(self.source.fetches.total())

    async def _read_file(self, file: int) -> None:
        chunk = file // self.files
        owner = int(self.owner[chunk])
        self.accesses[owner].append(chunk)
        began_s = trio.current_time()
        size = self.size // self.files
        found = await self.caches[owner].read(chunk, [(0, size)], load=True)
        if found is None:
            self.past[-1] += 1
        self.late += found is None or trio.current_time() > began_s

    def _tell_future(self, epoch: int, until: int) -> None:
        self._known_epochs = until
        if not self.known:
            return
        length = self.parts(epoch).shape[1]
        orders = np.concatenate([self.parts(each) for each in range(epoch, until)], axis=1)
        self._base = epoch * length
        units = [(each // self.files).astype(np.uint32) for each in orders]
        for cache in self.caches:
            uses = FutureUses([UnitOrder(each) for each in units], self.chunks)
            for rank in range(NODES):
                uses.seek(rank, self.position - self._base)
            size = np.full(self.chunks, float(self.size))
            cache.set_future(ChunkFuture(uses, size, size / self.files))

    async def _tell_positions(self) -> None:
        while True:
            position = self.position
            await trio.sleep(self.lag_s)
            for cache in self.caches:
                cache.set_positions([position - self._base] * NODES)

    def _egress(self, epoch: int) -> EpochEgress:
        room = self.room // NODES
        belady = 0.0
        for rank, accesses in enumerate(self.accesses):
            first, last = self.bounds[epoch][rank], self.bounds[epoch + 1][rank]
            belady += belady_fetches(accesses, room, first) - belady_fetches(accesses, room, last)
        past = self.past[epoch] - (self.past[epoch - 1] if epoch else 0)
        fetched = self.fetched[epoch + 1] - self.fetched[epoch]
        return EpochEgress(fetched, past / self.files, belady)
