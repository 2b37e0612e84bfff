"""Chunks that clients have pinned, and what stays when the version of the dataset changes."""

import mmap
import os

import numpy as np
import pytest
import trio

from .node_caches import (
    ChunkSource,
    in_memory,
    kept_numbers,
    make_cache,
    misses_until_loaded,
    raw,
    run_and_close_cache,
    run_simulated,
    total,
    total_bytes,
)
from .node_caches import memory_is_released as memory_is_released

# Pins


def test_pinned_memory_is_sealed_and_outlives_its_chunk() -> None:
    source = ChunkSource(range(3))

    async def main() -> None:
        async with run_and_close_cache(make_cache(source, total_bytes(source))) as cache:
            assert cache.memory.pin(7, 0) is None
            await cache.get(0, 10, load=True)
            file = cache.memory.pin(7, 0)
            assert file is not None
            taken = os.dup(file)
            for attempt in (
                lambda: os.pwrite(taken, b"x", 0),
                lambda: os.ftruncate(taken, 1),
                lambda: os.ftruncate(taken, 1 << 20),
                lambda: mmap.mmap(taken, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_WRITE),
            ):
                with pytest.raises(PermissionError):
                    attempt()
            mapped = mmap.mmap(taken, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
            view = cache.memory.find(0)
            cache.switch_version([], np.zeros(0, np.uint64))
            assert cache.stats()["memory_used_bytes"] == total(source, 0)
            assert view == memoryview(mapped) == source.contents[0]
            cache.memory.unpin(7, [0, 0, 5])
            assert cache.stats()["memory_used_bytes"] == 0
            mapped.close()
            os.close(taken)
            with pytest.raises(OSError, match="Bad file"):
                os.fstat(file)

    trio.run(main)


def test_a_pinned_chunk_takes_its_room_until_it_is_unpinned() -> None:
    source = ChunkSource(range(4))

    async def main() -> None:
        async with run_and_close_cache(make_cache(source, total(source, 3, 3, 3))) as cache:
            for number in (0, 1, 2):
                await cache.get(number, 10, load=True)
                assert cache.memory.pin(1, number) is cache.memory.pin(1, number) is not None
                assert cache.memory.pin(2, number) is not None
            cache.memory.find_parts(np.array([[2, 0, 4000]] * 50, np.uint32))
            assert cache.memory.revoked(1) == []
            assert await misses_until_loaded(cache, 3, 20) == 0
            wanted = cache.memory.revoked(1)
            assert wanted == cache.memory.revoked(2) == [0, 1, 2]
            assert cache.memory.find(0) is not None, "it serves until then"
            assert cache.memory.pin(1, 0) is None
            cache.memory.unpin(1, wanted)
            assert await misses_until_loaded(cache, 3, 1) == 0
            cache.memory.unpin(2, [1])
            assert cache.stats()["pinned_bytes"] == total(source, 0, 2)
            assert await misses_until_loaded(cache, 3, 1) == 1
            assert in_memory(cache) == {0, 2, 3}
            cache.memory.unpin_all(2)
            cache.memory.unpin_all(2)
            assert cache.stats()["pinned_bytes"] == 0
            assert cache.memory.pin(2, 0) is not None

    trio.run(main)


def test_the_first_of_two_memories_of_a_chunk_is_unpinned_first() -> None:
    source = ChunkSource(range(1))

    async def main() -> None:
        async with run_and_close_cache(make_cache(source, 2 * total_bytes(source))) as cache:
            await cache.get(0, 10, load=True)
            assert cache.memory.pin(1, 0) is not None
            source.switch_version([])
            cache.switch_version(source.ids, source.sizes)
            source.switch_version([0])
            cache.switch_version(source.ids, source.sizes)
            cache.set_owned(np.ones(1, np.bool_))
            await cache.get(0, 10, load=True)
            assert cache.memory.pin(1, 0) is not None
            assert cache.memory.revoked(1) == [0]
            assert cache.stats()["memory_used_bytes"] == 2 * total(source, 0)
            cache.memory.unpin(1, [0])
            assert cache.stats()["memory_used_bytes"] == total(source, 0)
            assert cache.memory.revoked(1) == []

    trio.run(main)


# Another version


def test_chunks_of_both_versions_stay() -> None:
    source = ChunkSource(range(6))

    async def main() -> None:
        async with run_and_close_cache(make_cache(source, total_bytes(source))) as cache:
            for number in (4, 0, 1):
                await cache.get(number, 10, load=True)
            source.switch_version([9, 4, 3, 1])
            cache.switch_version(source.ids, source.sizes)
            assert in_memory(cache) == {1, 3}
            assert raw(cache.memory.find(1)) == source.contents[1]
            assert raw(cache.memory.find(3)) == source.contents[3]
            assert kept_numbers(cache) == {1, 3}
            assert cache.stats()["memory_bytes"] == total(source, 1, 3)
            assert raw(await cache.get(0, 10, load=True)) == source.contents[0]

    trio.run(main)
    assert source.fetches == {0: 1, 1: 1, 4: 1, 9: 1}


def test_a_fetch_in_flight_arrives_under_its_new_number() -> None:
    source = ChunkSource(range(3))
    source.seconds = 1.0

    async def main() -> None:
        async with run_and_close_cache(make_cache(source, total_bytes(source))) as cache:
            got = []

            async def ask(number: int) -> None:
                got.append(await cache.get(number, 10, load=True))

            old = source.contents
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, 0)
                nursery.start_soon(ask, 2)
                await trio.sleep(0.5)
                source.switch_version([2, 7])
                cache.switch_version(source.ids, source.sizes)
                nursery.start_soon(ask, 0)
            assert sorted(map(len, filter(None, got))) == sorted(map(len, [old[0], old[2], old[2]]))
            assert in_memory(cache) == {0}
            assert raw(cache.memory.find(0)) == old[2]
            assert cache.stats()["memory_used_bytes"] == len(old[2])

    run_simulated(main)
    assert source.fetches == {0: 1, 2: 1}
