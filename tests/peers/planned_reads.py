"""Four simulated nodes that share a cache and know all reads, and oracles for the least that the
store must give.

The oracles share no code with the cache. `belady_fetches` is Belady's MIN at the unit of a chunk:
each miss fetches the whole chunk and replaces the one with the farthest next use. It is the optimum
of a cache that must take in all that it reads.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import trio

from diesel_fs.cache.policies.costs import ReadCosts
from diesel_fs.orders.future import FutureUses, UnitOrder
from diesel_fs.peers.node.chunk_future import ChunkFuture

from .node_caches import ChunkSource, make_cache

Files = npt.NDArray[np.int64]

NODES = 4
CHUNKS, FILES = 160, 16
"""Chunks, and files of each of them; an epoch takes 640 reads of each node: 32 s."""

ROOM = CHUNKS // 2 // NODES  # chunks that fit a node
GROUP = 5  # chunks that are shuffled together
READ_S = 0.05
CHUNK_BYTES, REQUEST_S, CHUNK_S = 2000, 0.005, 0.042  # of a store at 100 MB/s, 4 MiB


def costs() -> ReadCosts:
    return ReadCosts(REQUEST_S, CHUNK_S / CHUNK_BYTES)


# Orders of files; file i is in chunk i // FILES


def chunk_wise(epoch: int) -> Files:
    chance = np.random.default_rng([1, epoch])
    shuffled = chance.permutation(CHUNKS)
    groups = [shuffled[first : first + GROUP] for first in range(0, CHUNKS, GROUP)]
    return np.concatenate(
        [chance.permutation((each[:, None] * FILES + np.arange(FILES)).ravel()) for each in groups]
    )


def full(epoch: int) -> Files:
    return np.random.default_rng([2, epoch]).permutation(CHUNKS * FILES)


# Oracles


def belady_fetches(accesses: Sequence[int], room: int, first: int = 0) -> int:
    """Return how many chunks MIN fetches from the access `first` on, with room for `room`
    chunks."""
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


def lru_fetches(accesses: Sequence[int], room: int, first: int = 0) -> int:
    here: dict[int, None] = {}
    fetches = 0
    for at, chunk in enumerate(accesses):
        if chunk in here:
            del here[chunk]
        else:
            fetches += at >= first
            while len(here) >= room:
                del here[next(iter(here))]
        here[chunk] = None
    return fetches


# The simulated task


@dataclass(slots=True)
class EpochEgress:
    """The reads of one epoch from the store, in chunks, by whole fetches and by single reads; and
    those of MIN."""

    fetched: float
    read_past: float
    belady: float

    @property
    def total(self) -> float:
        return self.fetched + self.read_past


class PlannedTask:
    """Four nodes that hold half of the dataset together. All their readers read in step, each its
    part of the order. The next epoch is known when one begins."""

    def __init__(
        self,
        order: Callable[[int], Files] = chunk_wise,
        *,
        lag_s: float = 1.0,
        prefetches: bool = True,
    ) -> None:
        """`lag_s` is the greatest age of positions."""
        self.order, self.lag_s, self.prefetches = order, lag_s, prefetches
        self.owner = np.random.default_rng(3).permutation(np.arange(CHUNKS) % NODES)
        self.source = ChunkSource(range(CHUNKS), CHUNK_BYTES)
        self.source.contents = [self.source.contents[0]] * CHUNKS
        self.size = len(self.source.contents[0])
        self.source.seconds = costs().read_s(self.size)
        self.caches = [
            make_cache(self.source, ROOM * self.size, policy="plan", costs=costs())
            for _ in range(NODES)
        ]
        for rank, cache in enumerate(self.caches):
            cache.set_owned(self.owner == rank)
        self.accesses: list[list[int]] = [[] for _ in range(NODES)]  # by owner
        self.bounds: list[list[int]] = [[0] * NODES]
        self.past, self.fetched = [0], [0]
        self.late = 0  # reads that had to wait or went past the cache
        self.position = 0  # in the epochs together
        self._base = 0

    async def run(self, epochs: int) -> list[EpochEgress]:
        async with trio.open_nursery() as nursery:
            for cache in self.caches:
                await nursery.start(cache.run)
                if self.prefetches:
                    nursery.start_soon(cache.fetches.prefetch_planned)
            nursery.start_soon(self._tell_positions)
            for epoch in range(epochs):
                await self._read(epoch, min(epoch + 2, epochs))
            nursery.cancel_scope.cancel()
        for cache in self.caches:
            cache.close()
        return [self._egress(epoch) for epoch in range(epochs)]

    def parts(self, epoch: int) -> Files:
        return self.order(epoch).reshape(NODES, -1)

    async def _read(self, epoch: int, known: int) -> None:
        self._tell_future(epoch, known)
        for files in self.parts(epoch).T.tolist():
            async with trio.open_nursery() as nursery:
                for file in files:
                    nursery.start_soon(self._read_file, file)
                nursery.start_soon(trio.sleep, READ_S)
            self.position += 1
        self.bounds.append([len(each) for each in self.accesses])
        self.past.append(self.past[-1])
        self.fetched.append(self.source.fetches.total())

    async def _read_file(self, file: int) -> None:
        chunk = file // FILES
        owner = int(self.owner[chunk])
        self.accesses[owner].append(chunk)
        began_s = trio.current_time()
        found = await self.caches[owner].read(chunk, [(0, self.size // FILES)], load=True)
        if found is None:
            self.past[-1] += 1
        self.late += found is None or trio.current_time() > began_s

    def _tell_future(self, epoch: int, until: int) -> None:
        orders = np.concatenate([self.parts(each) for each in range(epoch, until)], axis=1)
        self._base = epoch * CHUNKS * FILES // NODES
        units = [(each // FILES).astype(np.uint32) for each in orders]
        for cache in self.caches:
            uses = FutureUses([UnitOrder(each) for each in units], CHUNKS)
            for rank in range(NODES):
                uses.seek(rank, self.position - self._base)
            size = np.full(CHUNKS, float(self.size))
            cache.set_future(ChunkFuture(uses, size, size / FILES))

    async def _tell_positions(self) -> None:
        while True:
            position = self.position
            await trio.sleep(self.lag_s)
            for cache in self.caches:
                cache.set_positions([position - self._base] * NODES)

    def _egress(self, epoch: int) -> EpochEgress:
        belady = 0.0
        for rank, accesses in enumerate(self.accesses):
            first, last = self.bounds[epoch][rank], self.bounds[epoch + 1][rank]
            belady += belady_fetches(accesses, ROOM, first) - belady_fetches(accesses, ROOM, last)
        past = self.past[epoch] - (self.past[epoch - 1] if epoch else 0)
        fetched = self.fetched[epoch + 1] - self.fetched[epoch]
        return EpochEgress(fetched, past / FILES, belady)
