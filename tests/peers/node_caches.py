"""Chunks for tests of `NodeCache`, their source, and helpers to run a cache."""

import functools
import gc
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pytest
import trio

from diesel_fs.cache.disk.chunks import DiskTier
from diesel_fs.cache.policies.costs import ReadCosts
from diesel_fs.cache.policies.eviction import POLICIES, EvictionPolicy
from diesel_fs.errors import ObjectStoreError
from diesel_fs.format.chunk_builder import ChunkBuilder
from diesel_fs.format.entries import ChunkId
from diesel_fs.peers.node.fetches import Fetches
from diesel_fs.peers.node.node_cache import CacheOptions, NodeCache

Given = ParamSpec("Given")
Made = TypeVar("Made")

IDENTITY = UUID(int=5)
EXTRA_BYTES = 40  # each chunk has this many more than the one before


@functools.cache
def chunk(number: int, body_bytes: int = 4000) -> bytes:
    """The content of a chunk by its number; sizes and bytes differ between chunks."""
    builder = ChunkBuilder(IDENTITY, 2 * body_bytes, "none")
    body_bytes += EXTRA_BYTES * number
    builder.room(body_bytes)[:] = random.Random(number).randbytes(body_bytes)
    builder.add_file((b"", b"f%d" % number), 0o644, 1, body_bytes)
    buffers, _ = builder.seal(id_of(number))
    return b"".join(buffers)


def id_of(number: int) -> ChunkId:
    return ChunkId(number.to_bytes(8, "big") * 2)


class ChunkSource:
    """The fetch function of a cache; `numbers` has the number of each chunk."""

    def __init__(self, numbers: Sequence[int], body_bytes: int = 4000) -> None:
        self.body_bytes = body_bytes
        self.switch_version(numbers)
        self.fetches: Counter[int] = Counter()
        self.under_way: Counter[int] = Counter()
        self.most = 0
        self.seconds = 0.0
        self.fails = self.damages = False
        self.error: BaseException | None = None

    def switch_version(self, numbers: Sequence[int]) -> None:
        self.numbers = list(numbers)
        self.contents = [chunk(number, self.body_bytes) for number in numbers]

    @property
    def ids(self) -> list[ChunkId]:
        return [id_of(number) for number in self.numbers]

    @property
    def sizes(self) -> npt.NDArray[np.uint64]:
        return np.array([len(content) for content in self.contents], np.uint64)

    async def fetch(self, number: int, room: memoryview) -> None:
        content, name = self.contents[number], self.numbers[number]
        self.fetches[name] += 1
        self.under_way[name] += 1
        assert self.under_way[name] == 1, "twice at once"
        self.most = max(self.most, self.under_way.total())
        try:
            await trio.sleep(self.seconds)
        finally:
            self.under_way[name] -= 1
        if self.error is not None:
            raise self.error
        if self.fails:
            raise ObjectStoreError("the store is away")
        room[:] = content
        if self.damages:
            room[len(room) // 2] ^= 1


def make_cache(
    source: ChunkSource,
    memory_bytes: int | None = None,
    *,
    policy: str | type[EvictionPolicy] = "lru",
    disk: DiskTier | None = None,
    costs: ReadCosts | None = None,
    mine: bool = True,
) -> NodeCache:
    make_policy = POLICIES[policy] if isinstance(policy, str) else policy
    cache = NodeCache(
        IDENTITY,
        source.ids,
        source.sizes,
        CacheOptions(
            total_bytes(source) if memory_bytes is None else memory_bytes,
            make_policy,
            disk,
            costs or ReadCosts(),
        ),
        source.fetch,
    )
    cache.set_owned(np.full(len(source.numbers), mine))
    return cache


@asynccontextmanager
async def run_cache(cache: NodeCache) -> AsyncIterator[NodeCache]:
    async with trio.open_nursery() as nursery:
        await nursery.start(cache.run)
        yield cache
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def running(cache: NodeCache) -> AsyncIterator[NodeCache]:
    try:
        async with run_cache(cache):
            yield cache
    finally:
        cache.close()


async def run_inline(
    self: Fetches, work: Callable[Given, Made], *given: Given.args, **named: Given.kwargs
) -> Made:
    """Run work in threads inline when time is simulated, since the clock does not know that threads
    work."""
    return work(*given, **named)


def raw(content: memoryview | None) -> bytes | None:
    return None if content is None else bytes(content)


def descriptors() -> Mapping[str, int]:
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        found[target] += "diesel-chunk" in target
    return +found


@pytest.fixture(autouse=True)
def memory_is_released() -> Iterator[None]:
    """A test fails if it leaves the memory of a chunk behind, in a module that imports this."""
    before = descriptors()
    yield
    for _ in range(100):
        gc.collect()  # frames of errors; a thread that was left alone may need a moment
        if descriptors() == before:
            return
        time.sleep(0.02)
    assert descriptors() == before


def total(source: ChunkSource, *numbers: int) -> int:
    return sum(len(source.contents[number]) for number in numbers)


def total_bytes(source: ChunkSource) -> int:
    return total(source, *range(len(source.contents)))


def read_in_plane(cache: NodeCache, *records: tuple[int, int, int]) -> list[memoryview] | None:
    packed = np.array(records, "<u4").tobytes()
    return cache.table.find(memoryview(packed))[0]


def in_memory(cache: NodeCache) -> set[int]:
    return set(cache.ledger.views)


def kept_numbers(cache: NodeCache) -> set[int]:
    return {number for number in range(len(cache.ledger.sizes)) if cache.holds(number)}


async def misses_until_loaded(cache: NodeCache, number: int, times: int, size: int = 3000) -> int:
    """Return the number of misses before a chunk comes; 0 if it does not come."""
    for misses in range(1, times + 1):
        if await cache.get(number, size, load=True) is not None:
            return misses
    return 0
