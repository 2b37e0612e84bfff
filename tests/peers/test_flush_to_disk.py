"""At the end of a node, the chunks in its memory are written to its disk, for the next master of
the node."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import trio

from diesel_fs.cache import disk as disk_tier
from diesel_fs.peers.node_cache import NodeCache

from ..cache.disk_tier import files, idle, tier_at
from ..waiting import soon
from .node_caches import (
    ChunkSource,
    in_memory,
    kept_numbers,
    make_cache,
    misses_until_loaded,
    run_and_close_cache,
    run_cache,
    total,
    total_bytes,
)
from .node_caches import memory_is_released as memory_is_released
from .test_write_back import CHUNKS, all_read, settled, some
from .test_write_back import place as place
from .test_write_back import source as source


async def ended(cache: NodeCache, share: set[int], chunks: int = CHUNKS) -> None:
    """What a master does at its end, after `running`."""
    await cache.flush_to_disk(np.isin(np.arange(chunks), [*share]))


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


def test_at_the_end_chunks_in_memory_are_written_to_the_disk(
    place: Path, source: ChunkSource, caplog: pytest.LogCaptureFixture
) -> None:
    async def first() -> None:
        cache = make_cache(source, total_bytes(source) * 3, disk=tier_at(place))
        async with run_cache(cache):
            await settled(cache)
            assert await all_read(cache, source) == CHUNKS
            assert files(place) == []
        mine = np.ones(CHUNKS, np.bool_)
        mine[:2] = False
        cache.set_owned(mine)
        with caplog.at_level("INFO", "diesel.task"):
            await ended(cache, {1, 2, 3})
        assert in_memory(cache) == set(), "the memory is free as soon as may be"
        cache.close()

    async def second() -> None:
        async with run_and_close_cache(
            make_cache(source, total_bytes(source) * 3, disk=tier_at(place))
        ) as cache:
            await settled(cache)
            assert kept_numbers(cache) == set(range(1, CHUNKS)), "but for what it owned never"
            assert await all_read(cache, source) == CHUNKS

    trio.run(first)
    size = total(source, *range(1, CHUNKS))
    assert f"7 chunks ({size:,} bytes) from memory to the disk cache: these were all" in caplog.text
    trio.run(second)
    assert source.fetches == {0: 2} | dict.fromkeys(range(1, CHUNKS), 1)


async def test_at_the_end_the_share_is_written_first_and_only_chunks_of_others_are_evicted(
    place: Path, source: ChunkSource, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_and_close_cache(
        make_cache(source, some(source, 0), disk=tier_at(place))
    ) as before:
        await settled(before)
        for number in (0, 1, 5):
            assert await misses_until_loaded(before, number, 1)
            await settled(before)
    tier = tier_at(place, total(source, *[7] * 4))
    cache = make_cache(source, total_bytes(source) * 3, disk=tier)
    async with run_cache(cache):
        await settled(cache)
        assert await all_read(cache, source) == CHUNKS
    cache.set_owned(np.arange(CHUNKS) != 1)
    with caplog.at_level("INFO", "diesel.task"):
        await ended(cache, {0, 6, 7})
    cache.close()
    assert chunks_on_disk(place, source) == {0, 5, 6, 7}, "without 1, as 6 and 7 came before 2"
    assert "2 chunks (" in caplog.text
    assert "the disk takes no more" in caplog.text


async def test_at_the_end_the_queue_is_written(place: Path, source: ChunkSource) -> None:
    cache = make_cache(source, total_bytes(source) * 3, disk=tier_at(place))
    async with run_cache(cache):
        await settled(cache)
        assert await all_read(cache, source) == CHUNKS
        for number in (0, 1):
            cache._write_back.enqueue(number, cache.memory.views[number])
            cache.memory.drop(number)
    cache.set_owned(np.arange(CHUNKS) != 1)
    await ended(cache, set())
    cache.close()
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

    with caplog.at_level("INFO", "diesel.task"):
        cache = make_cache(source, total_bytes(source) * 3, disk=tier_at(place))
        async with run_cache(cache):
            await settled(cache)
            assert await all_read(cache, source) == CHUNKS
        with trio.move_on_after(1.0) as patience:
            await ended(cache, set())
        assert patience.cancelled_caught
        assert chunks_on_disk(place, source) == {0, 1, 2}
        assert len(files(place)) == 4
        go_on.set()
        await soon(lambda: len(chunks_on_disk(place, source)) == 4)
        cache.close()
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
    async with run_cache(cache):
        await settled(cache)
        for number in (0, 1, 2):
            await cache.get(number, 10, load=True)
    await ended(cache, set())
    idle(place)
    now_s[0] += 60
    async with run_cache(cache):
        await settled(cache)
        for number in (3, 4, 5):
            await cache.get(number, 10, load=True)
    idle(place)
    now_s[0] += 60
    await ended(cache, set())
    cache.close()
    assert chunks_on_disk(place, source) == {0, 1, 2, 3}
