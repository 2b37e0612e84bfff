"""At the end of a node, the chunks in its memory are written to its disk, for the next master of
the node."""

import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import trio

from diesel_fs.cache import disk as disk_tier
from diesel_fs.cache.disk import DiskTier
from diesel_fs.peers.node_cache import NodeCache

from ..cache.disk_tier import files, idle, tier_at
from ..waiting import soon
from .node_caches import (
    ChunkSource,
    in_memory,
    kept_numbers,
    make_cache,
    misses_until_loaded,
    run_cache,
    total,
    total_bytes,
)
from .node_caches import memory_is_released as memory_is_released
from .test_write_back import CHUNKS, all_read, settled, settled_cache, some
from .test_write_back import place as place
from .test_write_back import source as source


async def ended(cache: NodeCache, share: set[int]) -> None:
    """What a master does at its end, after `running`."""
    await cache.flush_to_disk(np.isin(np.arange(CHUNKS), [*share]))


@asynccontextmanager
async def full_cache(source: ChunkSource, tier: DiskTier) -> AsyncIterator[NodeCache]:
    """A cache that has read all chunks, and runs no more: what it has is in memory."""
    cache = make_cache(source, total_bytes(source) * 3, disk=tier)
    try:
        async with run_cache(cache):
            await settled(cache)
            assert await all_read(cache, source) == CHUNKS
        yield cache
    finally:
        cache.close()


def chunks_on_disk(place: Path, source: ChunkSource) -> set[int]:
    """Which whole chunks are on a disk, as another process sees them."""
    tier = tier_at(place)
    found = set()
    for number in range(CHUNKS):
        if (chunk := tier.find(make_cache(source, 0)._key(number))) is not None:
            chunk.close()
            found.add(number)
    tier.close()
    return found


async def test_at_the_end_chunks_in_memory_are_written_to_the_disk(
    place: Path, source: ChunkSource, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "diesel.task")
    async with full_cache(source, tier_at(place)) as cache:
        assert files(place) == []
        cache.set_owned(np.arange(CHUNKS) > 1)
        await ended(cache, {1, 2, 3})
        assert in_memory(cache) == set(), "the memory is free as soon as may be"
    size = total(source, *range(1, CHUNKS))
    assert f"7 chunks ({size:,} bytes) from memory to the disk cache: these were all" in caplog.text
    async with settled_cache(source, total_bytes(source) * 3, tier_at(place)) as cache:
        assert kept_numbers(cache) == set(range(1, CHUNKS)), "but for what it owned never"
        assert await all_read(cache, source) == CHUNKS
    assert source.fetches == {0: 2} | dict.fromkeys(range(1, CHUNKS), 1)


async def test_at_the_end_the_share_is_written_first_and_only_chunks_of_others_are_evicted(
    place: Path, source: ChunkSource, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "diesel.task")
    async with settled_cache(source, some(source, 0), tier_at(place)) as before:
        for number in (0, 1, 5):
            assert await misses_until_loaded(before, number, 1)
            await settled(before)
    async with full_cache(source, tier_at(place, total(source, *[7] * 4))) as cache:
        cache.set_owned(np.arange(CHUNKS) != 1)
        await ended(cache, {0, 6, 7})
    assert chunks_on_disk(place, source) == {0, 5, 6, 7}, "without 1, as 6 and 7 came before 2"
    assert "2 chunks (" in caplog.text
    assert "the disk takes no more" in caplog.text


async def test_at_the_end_the_queue_is_written(place: Path, source: ChunkSource) -> None:
    async with full_cache(source, tier_at(place)) as cache:
        for number in (0, 1):
            cache._write_back.enqueue(number, cache.memory.views[number])
            cache.memory.drop(number)
        cache.set_owned(np.arange(CHUNKS) != 1)
        await ended(cache, set())
    assert chunks_on_disk(place, source) == {0, 2, 3, 4, 5, 6, 7}


async def test_a_cancelled_flush_leaves_whole_chunks(
    place: Path,
    source: ChunkSource,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    go_on, fill = threading.Event(), disk_tier._FileReservation.commit

    def slow(self: disk_tier._FileReservation, content: memoryview) -> None:
        if len(files(place)) > 3:  # with itself
            os.pwrite(self._file, content[:100], 0)
            go_on.wait(20)
        fill(self, content)

    monkeypatch.setattr(disk_tier._FileReservation, "commit", slow)
    caplog.set_level("INFO", "diesel.task")
    async with full_cache(source, tier_at(place)) as cache:
        with trio.move_on_after(1.0) as patience:
            await ended(cache, set())
        assert patience.cancelled_caught
        assert chunks_on_disk(place, source) == {0, 1, 2}
        assert len(files(place)) == 4
        go_on.set()
        await soon(lambda: len(chunks_on_disk(place, source)) == 4)
    assert "3 chunks (" in caplog.text
    assert "there was no more time" in caplog.text


async def test_reads_from_memory_count_as_use_of_the_disk_cache(
    place: Path, source: ChunkSource
) -> None:
    """Otherwise the dataset's files on the disk would be removed as idle, to make room for its own
    chunks."""
    now_s = [0.0]
    tier = tier_at(place, total(source, *[7] * 4), clock=lambda: now_s[0])
    cache = make_cache(source, total_bytes(source) * 3, disk=tier)
    for numbers in ((0, 1, 2), (3, 4, 5)):
        async with run_cache(cache):
            await settled(cache)
            for number in numbers:
                await cache.get(number, 10, load=True)
        if numbers[0]:
            idle(place)
            now_s[0] += 60
        await ended(cache, set())
        idle(place)
        now_s[0] += 60
    cache.close()
    assert chunks_on_disk(place, source) == {0, 1, 2, 3}
