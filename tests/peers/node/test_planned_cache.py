"""Eviction by plan in four simulated nodes that hold half of a dataset, against oracles that see
all accesses (`planned_reads.py`)."""

import random
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from diesel_fs.orders.future import FutureUses, UnitOrder
from diesel_fs.peers.node.chunk_future import ChunkFuture
from diesel_fs.peers.node.node_cache import NodeCache

from ..node_caches import (
    ChunkSource,
    in_memory,
    make_cache,
    memory_is_released,  # noqa: F401  # a fixture
    running,
)
from ..planned_reads import CHUNKS, FILES, PlannedTask, costs, full

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize("lag_s", [0.05, 1.0])
@pytest.mark.parametrize("prefetches", [False, True])
async def test_in_chunk_wise_order_the_store_gives_as_much_as_beladys_min(
    lag_s: float, prefetches: bool, autojump_clock: MockClock
) -> None:
    task = PlannedTask(lag_s=lag_s, prefetches=prefetches)
    egress = await task.run(3)
    assert sum(each.total for each in egress) <= 1.02 * sum(each.belady for each in egress)
    assert egress[1].total < 0.53 * CHUNKS
    if prefetches:
        assert task.late < 0.03 * CHUNKS * FILES * 3, "reads found their chunks there"


async def test_in_a_full_shuffle_chunks_in_memory_stay(autojump_clock: MockClock) -> None:
    """In a random epoch no cache gives more than it holds; replacing would only cost."""
    egress = await PlannedTask(full).run(4)
    assert egress[0].total <= 1.02 * CHUNKS
    assert all(each.total <= 1.02 * CHUNKS / 2 for each in egress[1:])


async def test_a_full_shuffle_from_a_slow_store_reads_parts(autojump_clock: MockClock) -> None:
    """If time alone counted, a fetch would pay after two reads."""
    task = PlannedTask(full)
    for cache in task.caches:
        cache.replacement._costs.latency_s = 1.0
    assert (await task.run(2))[1].total <= 1.02 * CHUNKS / 2


async def test_old_positions_cost_reads_and_no_wrong_bytes(autojump_clock: MockClock) -> None:
    """Positions are up to a third of an epoch late."""
    egress = await PlannedTask(lag_s=10.0).run(3)
    assert all(each.total < CHUNKS for each in egress[1:]), "less than without a cache"


# Without a plan


async def decisions(policy: str, *, has_future: bool) -> tuple[list[object], dict[str, int]]:
    """The decisions of a cache in a random history. Its future, if it has one, cannot be used."""
    source = ChunkSource(range(12), 2000)
    cache = make_cache(source, 5 * len(source.contents[6]), policy=policy, costs=costs())
    chance, seen = random.Random(4), list[object]()
    async with running(cache):
        for _ in range(4000):
            chunk = min(int(chance.expovariate(0.3)), 11)
            if chance.random() < 0.01:
                cache.set_owned(np.array([chance.random() < 0.8 for _ in range(12)]))
                if has_future:
                    cache.set_positions([3])
                    cache.set_future(None)
                    cache.set_held_elsewhere(np.zeros(12, np.bool_))
            found = await cache.read(chunk, [(0, 300)], load=True)
            seen.append((found is None, sorted(in_memory(cache))))
    return seen, {**cache.stats()}


async def test_without_a_plan_every_decision_is_that_of_lru(simulated_time: MockClock) -> None:
    for has_future in (False, True):
        assert await decisions("plan", has_future=has_future) == await decisions(
            "lru", has_future=has_future
        )


# A plan


@pytest.fixture
async def cache() -> AsyncIterator[NodeCache]:
    source, cost = ChunkSource(range(6), 2000), costs()
    cost.latency_s = 0.05  # four reads cost as much as to fetch two chunks
    made = make_cache(source, 2 * len(source.contents[5]), policy="plan", costs=cost)
    async with running(made):
        yield made


def future_of(cache: NodeCache, *orders: list[int]) -> ChunkFuture:
    uses = FutureUses(
        [UnitOrder(np.array(each, np.uint32)) for each in orders], len(cache.ledger.sizes)
    )
    size = np.array(cache.ledger.sizes, np.float64)
    return ChunkFuture(uses, size, size / 4)


async def load(cache: NodeCache, *chunks: int) -> None:
    for chunk in chunks:
        await cache.read(chunk, [(0, 500)], load=True)


async def test_unneeded_chunks_are_replaced_first(
    cache: NodeCache, simulated_time: MockClock
) -> None:
    await load(cache, 0, 1)
    cache.set_future(future_of(cache, [1] * 4 + [2] * 4 + [0] * 4))
    await load(cache, 2)
    assert in_memory(cache) == {1, 2}, "0 is needed last"
    cache.set_positions([4])  # 1 was read
    await load(cache, 0)
    assert in_memory(cache) == {0, 2}
    assert cache.stats()["plan_replacements"] == 2


async def test_chunks_that_are_needed_sooner_stay_and_reads_go_past_the_cache(
    cache: NodeCache, simulated_time: MockClock
) -> None:
    await load(cache, 0, 1)
    cache.set_future(future_of(cache, [0] * 4 + [1] * 4 + [2] * 4))
    for _ in range(50):  # admission would take it in by now
        assert await cache.read(2, [(0, 500)], load=True) is None
    assert in_memory(cache) == {0, 1}
    cache.set_positions([8])
    cache.set_positions([0])  # the reader has begun again
    assert await cache.read(2, [(0, 500)], load=True) is None
    cache.set_future(None)
    await load(cache, *[2] * 50)
    assert 2 in in_memory(cache), "admission decides again"


async def test_the_last_copy_of_anothers_chunk_stays_while_it_is_needed(
    cache: NodeCache, simulated_time: MockClock
) -> None:
    await load(cache, 0, 1)
    cache.set_owned(np.arange(6) > 0)  # 0 is another node's from now on
    cache.set_future(future_of(cache, [0] * 4 + [2] * 4 + [1] * 4))
    await load(cache, 2)
    assert in_memory(cache) == {0, 2}, "only this node has 0"
    cache.set_held_elsewhere(np.arange(6) == 0)
    await load(cache, 1)
    assert in_memory(cache) == {1, 2}, "its owner has it now"


async def test_the_nearest_next_use_is_fetched_ahead_and_displaces_nothing_earlier(
    cache: NodeCache, simulated_time: MockClock
) -> None:
    room = cache.ledger.room  # an eighth of it may be fetched ahead
    cache.ledger.room = replace(room, memory_bytes=15 * room.memory_bytes)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cache.fetches.prefetch_planned)
        cache.set_future(future_of(cache, [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4))
        await trio.sleep(1)
        assert not in_memory(cache), "no reader has been seen"
        for position in range(4):
            await trio.sleep(1)
            cache.set_positions([position])
        await trio.sleep(1)
        assert in_memory(cache) == {1}, "0 has been read, and the others are far away"
        nursery.cancel_scope.cancel()
