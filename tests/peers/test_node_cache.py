"""`NodeCache`: each chunk is fetched once, is checked before it is kept, and fits the budget. Also
pinned chunks, and a change of the dataset's version."""

import mmap
import os
import resource
import subprocess
import sys

import numpy as np
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from diesel_fs.cache.policies.costs import ReadCosts
from diesel_fs.cache.policies.eviction import POLICIES, EvictionPolicy, LeastRecentlyUsed
from diesel_fs.errors import ObjectStoreError
from diesel_fs.peers.node import fetches, ledger, sealed_memory
from diesel_fs.peers.node.node_cache import NodeCache
from diesel_fs.peers.node.sealed_memory import (
    WritableMemory,
    raise_descriptor_limit,
    sealed_memories_max,
)
from tests.rows import each_row

from .node_caches import (
    ChunkSource,
    in_memory,
    kept_numbers,
    make_cache,
    misses_until_loaded,
    raw,
    read_in_plane,
    running,
    total,
    total_bytes,
)
from .node_caches import memory_is_released as memory_is_released

EVERY = pytest.mark.parametrize("policy", [*POLICIES])


# Chunks that come


@EVERY
async def test_a_chunk_is_fetched_once_and_found_from_then_on(policy: str) -> None:
    source = ChunkSource(range(4))
    async with running(make_cache(source, total_bytes(source), policy=policy)) as cache:
        assert cache.find(1) is None
        assert await cache.get(1, 100, load=False) is None
        view = await cache.get(1, 100, load=True)
        assert raw(view) == raw(cache.find(1)) == source.contents[1]
        assert view is not None
        assert view.readonly
        pieces = await cache.read(1, [(3, 5), (0, 1)], load=False)
        assert pieces is not None
        assert [*map(raw, pieces)] == [source.contents[1][3:8], source.contents[1][:1]]
        pieces = read_in_plane(cache, (1, 10, 20), (1, 0, 1))
        assert pieces is not None
        assert [*map(raw, pieces)] == [source.contents[1][10:30], source.contents[1][:1]]
        assert read_in_plane(cache, (1, 10, 20), (2, 0, 1)) is None
        assert kept_numbers(cache) == {1}
        stats = cache.stats()
        assert (stats["fetches"], stats["memory_chunks"], stats["misses"]) == (1, 1, 1)
        assert stats["memory_bytes"] == stats["fetched_bytes"] == total(source, 1)
        assert stats["memory_reads"] == 3, "no policy here counts those of the data plane"
    assert source.fetches == {1: 1}


async def test_F10_one_fetch_for_all_callers_and_eight_at_once(simulated_time: MockClock) -> None:
    source = ChunkSource(range(30))
    source.seconds = 1.0

    begun_s = trio.current_time()
    async with running(make_cache(source)) as cache:

        async def ask(number: int) -> None:
            assert raw(await cache.get(number, 10, load=True)) == source.contents[number]

        async with trio.open_nursery() as nursery:
            for number in [*range(30)] * 3:
                nursery.start_soon(ask, number)
        assert trio.current_time() - begun_s < 4.5
    assert set(source.fetches.values()) == {1}
    assert source.most == fetches.FETCHES


async def test_a_cancelled_caller_does_not_cancel_the_fetch(simulated_time: MockClock) -> None:
    source = ChunkSource(range(2))
    source.seconds = 1.0
    async with running(make_cache(source)) as cache:
        with trio.move_on_after(0.5) as first:
            await cache.get(0, 10, load=True)
        assert first.cancelled_caught
        assert raw(await cache.get(0, 10, load=True)) == source.contents[0]
    assert source.fetches == {0: 1}


async def test_a_failed_fetch_fails_all_waiters_and_is_tried_again(
    simulated_time: MockClock,
) -> None:
    source = ChunkSource(range(1))
    source.seconds, source.fails = 0.1, True
    async with running(make_cache(source)) as cache:
        seen = []

        async def ask() -> None:
            with pytest.raises(ObjectStoreError) as failure:
                await cache.get(0, 10, load=True)
            seen.append(failure.value)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ask)
        assert len(seen) == 3
        assert source.fetches == {0: 1}
        source.fails = False
        assert raw(await cache.get(0, 10, load=True)) == source.contents[0]
        assert cache.stats()["fetch_failures"] == 1


async def test_a_bug_in_a_fetch_fails_no_read(caplog: pytest.LogCaptureFixture) -> None:
    source = ChunkSource(range(1))
    source.error = ZeroDivisionError()
    async with running(make_cache(source)) as cache:
        assert await cache.get(0, 10, load=True) is None
        assert cache.stats()["memory_used_bytes"] == 0
    assert "unexpected error while fetching a chunk" in caplog.text


async def test_a_fetcher_cannot_change_its_chunk_later(caplog: pytest.LogCaptureFixture) -> None:
    source, kept = ChunkSource(range(1)), []

    async def fetch(number: int, room: memoryview) -> None:
        await source.fetch(number, room)
        kept.append(room[:10])

    cache = make_cache(source)
    cache.fetches._fetch = fetch
    async with running(cache):
        assert await cache.get(0, 10, load=True) is None
        assert cache.find(0) is None
    kept.clear()
    assert "its buffer is still in use" in caplog.text


async def test_callers_that_wait_at_the_end_get_nothing() -> None:
    source = ChunkSource(range(1))
    source.seconds = 1e9
    cache = make_cache(source)
    async with trio.open_nursery() as nursery:
        await nursery.start(cache.run)
        got: list[object] = []

        async def ask() -> None:
            with trio.CancelScope(shield=True):
                got.append(await cache.get(0, 10, load=True))

        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert got == [None]
    assert await cache.get(0, 10, load=True) is None


# Room


def one_second_a_request() -> ReadCosts:
    return ReadCosts(1.0, 0.001)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
async def test_a_chunk_that_replaces_others_has_been_paid_for(policy: str) -> None:
    """4,360 bytes cost 5.4 s, and 1,000 of them 2 s: the third miss pays."""
    source = ChunkSource(range(4))
    cache = make_cache(source, total(source, 3, 3, 3), policy=policy, costs=one_second_a_request())
    async with running(cache):
        for number in (0, 1, 2):
            assert await cache.get(number, 1000, load=True) is not None
        for _ in range(10):
            read_in_plane(cache, (0, 0, 1000), (2, 0, 1000))
        assert await misses_until_loaded(cache, 3, 10, 1000) == 3
        assert in_memory(cache) == {0, 2, 3}
        assert await misses_until_loaded(cache, 1, 2, 1000) == 0, "it pays anew"
        assert cache.stats()["evictions"] == 1


@EVERY
async def test_chunks_of_other_nodes_are_replaced_first_and_at_once(policy: str) -> None:
    source = ChunkSource(range(4))
    async with running(make_cache(source, total(source, 0, 2, 3), policy=policy)) as cache:
        for number in (0, 1, 2):
            assert await cache.get(number, 1000, load=True) is not None
        cache.set_owned(np.array([True, False, True, True]))
        assert await misses_until_loaded(cache, 3, 1) == 1
        assert in_memory(cache) == {0, 2, 3}
        # A chunk of another node never replaces one of this node
        assert await misses_until_loaded(cache, 1, 100) == 0


async def test_chunks_of_other_nodes_take_no_room_that_the_share_needs() -> None:
    """Such a chunk may be pinned at once, so that it could not be replaced."""
    source = ChunkSource(range(6))
    async with running(make_cache(source, total(source, 0, 1, 2, 5))) as cache:
        cache.set_owned(np.array([True, True, True, False, False, False]))
        assert await misses_until_loaded(cache, 0, 1) == 1
        assert await misses_until_loaded(cache, 5, 1) == 1
        assert cache.pin(1, 5) is not None
        assert await misses_until_loaded(cache, 3, 3) == 0
        assert await misses_until_loaded(cache, 1, 1) == 1
        assert await misses_until_loaded(cache, 2, 1) == 1


class Picky(LeastRecentlyUsed):
    def admits(self, unit: int, size: int, free_bytes: int) -> bool:
        return unit == 1 and free_bytes >= size


@each_row(
    ("policy", "memory", "numbers", "misses"),
    [
        ("none", (0, 1, 2), (2, 1, 0, 3), [1, 1, 1, 0]),
        ("lru", (0,), (1, 0), [0, 1]),
        (Picky, (0, 1, 2, 3), (0, 1, 2), [0, 1, 0]),
    ],
    ids=["the first ones stay", "larger than the budget", "rejected by the policy"],
)
async def test_a_chunk_that_has_no_room_or_is_not_admitted_is_not_fetched(
    policy: str | type[EvictionPolicy],
    memory: tuple[int, ...],
    numbers: tuple[int, ...],
    misses: list[int],
) -> None:
    source = ChunkSource(range(4))
    async with running(make_cache(source, total(source, *memory), policy=policy)) as cache:
        assert [await misses_until_loaded(cache, each, 100) for each in numbers] == misses
        here = {each for each, count in zip(numbers, misses, strict=True) if count}
        assert in_memory(cache) == set(source.fetches) == here


# Fetching ahead


async def test_prefetch_owned_fetches_until_memory_is_full(simulated_time: MockClock) -> None:
    source = ChunkSource(range(10))
    source.seconds = 1.0
    async with (
        running(make_cache(source, total(source, 7, 8, 9), mine=False)) as cache,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(cache.fetches.prefetch_owned, np.arange(10)[::-1])
        await trio.sleep(10)
        assert cache.stats()["fetches"] == 0
        mine = np.ones(10, np.bool_)
        mine[8] = False
        cache.set_owned(mine)
        await trio.sleep(1.5)
        assert in_memory(cache) == {9, 7}
        assert source.most == fetches.FILL_FETCHES
        await trio.sleep(100)
        assert in_memory(cache) == {9, 7, 6}
        assert cache.stats()["share_held_chunks"] == 3
        assert cache.stats()["share_chunks"] == 9
        held_bytes = int(source.sizes[[9, 7, 6]].sum())
        assert cache.stats()["held_bytes"] == held_bytes
        assert cache.stats()["dataset_bytes"] == total_bytes(source)
        mine[7] = False
        cache.set_owned(mine)
        await trio.sleep(100)
        assert in_memory(cache) == {9, 6, 5}
        assert cache.stats()["filled"] == 4
        cache.switch_version(source.ids, source.sizes)  # ends `fill`


async def test_prefetch_owned_waits_for_fetches_of_callers(simulated_time: MockClock) -> None:
    source = ChunkSource(range(40))
    source.seconds = 1.0

    async def ask(cache: NodeCache, number: int) -> None:
        assert await cache.get(number, 10, load=True) is not None

    async def none_begins() -> None:
        await trio.sleep(0.9)
        assert source.fetches.total() == fetches.FILL_FETCHES + fetches.FETCHES

    async with running(make_cache(source)) as cache, trio.open_nursery() as nursery:
        nursery.start_soon(cache.fetches.prefetch_owned, np.arange(40))
        await trio.sleep(0.5)
        began_s = trio.current_time()
        async with trio.open_nursery() as callers:
            for number in range(20, 20 + fetches.FETCHES):
                callers.start_soon(ask, cache, number)
            callers.start_soon(none_begins)
        assert trio.current_time() - began_s < 1.3, "no caller has waited for the others"
        await trio.sleep(100)
        assert cache.stats()["share_held_chunks"] == 40
        nursery.cancel_scope.cancel()


async def test_prefetch_owned_retries_with_growing_pauses(simulated_time: MockClock) -> None:
    source = ChunkSource(range(3))
    source.fails = True
    async with running(make_cache(source)) as cache, trio.open_nursery() as nursery:
        nursery.start_soon(cache.fetches.prefetch_owned, np.arange(3))
        await trio.sleep(600)
        assert 3 * 10 < cache.stats()["fill_failures"] < 3 * 20
        source.fails = False
        await trio.sleep(70)
        assert cache.stats()["share_held_chunks"] == 3
        nursery.cancel_scope.cancel()


# A machine without memory or descriptors


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), MemoryError()])
async def test_J8_J9_a_machine_without_memory_shrinks_the_budget(
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    simulated_time: MockClock,
) -> None:
    source = ChunkSource(range(6))

    def refuse(size: int) -> WritableMemory:
        raise error

    async with running(make_cache(source)) as cache:
        for number in (0, 1, 5):
            assert await cache.get(number, 10, load=True) is not None
        with monkeypatch.context() as patch:
            patch.setattr(fetches, "WritableMemory", refuse)
            assert await cache.get(2, 10, load=True) is None
            assert cache.stats()["memory_budget_bytes"] == total(source, 0, 1, 5)
            for _ in range(30):
                assert await cache.get(2, 3000, load=True) is None
                assert await cache.get(3, 3000, load=True) is None
        assert cache.stats()["allocation_failures"] == 2, "allocation is not tried again and again"
        assert 5 in in_memory(cache), "and not all chunks leave in vain"
        await trio.sleep(ledger.BUDGET_RETRY_S)
        for number in (0, 1, 2, 3, 4, 5):
            assert await cache.get(number, 10, load=True) is not None
    assert len([each for each in caplog.records if "this node keeps" in each.message]) == 1


def runs_alone(request: pytest.FixtureRequest) -> bool:
    """Whether this process runs only this test; otherwise another process has run it. For tests
    that count descriptors: a process that has run thousands of tests has some open."""
    if os.environ.get(_ALONE):
        return True
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", request.node.nodeid],
        cwd=request.config.rootpath,
        env={**os.environ, _ALONE: "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        timeout=240,  # importing a test module takes long on a busy machine
    )
    assert done.returncode == 0, done.stdout.decode()
    assert b"1 passed" in done.stdout
    return False


_ALONE = "TEST_RUNS_ALONE"


async def test_F14_J9_the_cache_leaves_descriptors_and_their_lack_fails_no_read(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> None:
    if not runs_alone(request):
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    source = ChunkSource(range(100), 1000)
    try:
        async with running(make_cache(source)) as cache:
            assert await cache.get(0, 10, load=True) is not None
            top = os.dup(0)
            os.close(top)
            resource.setrlimit(resource.RLIMIT_NOFILE, (top, hard))
            assert await cache.get(1, 10, load=True) is None
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert raw(cache.find(0)) == source.contents[0]
        caplog.clear()
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
        assert sealed_memories_max() == 32
        async with running(make_cache(source)) as cache:
            for number in range(100):
                await cache.get(number, 10, load=True)
            assert len(in_memory(cache)) == sealed_memories_max()
            assert cache.find(0) is not None, "no chunk leaves for one that has not paid"
            os.close(os.open("/dev/null", os.O_RDONLY))
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        no_file = sealed_memory.MAPS_MAX_FILE.parent / "no-such-file"
        monkeypatch.setattr(sealed_memory, "MAPS_MAX_FILE", no_file)
        most = sealed_memory._MAPS_MAX_DEFAULT - sealed_memory.RESERVED_MAPS
        assert 0 < sealed_memories_max() <= most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "vm.max_map_count" in caplog.text
    assert len(caplog.records) == 1


async def test_a_reported_chunk_is_checked_again() -> None:
    source = ChunkSource(range(2))
    async with running(make_cache(source)) as cache:
        await cache.get(0, 10, load=True)
        await cache.recheck(0)
        await cache.recheck(1)
        assert cache.find(0) is not None
        found = cache.ledger.memories[0]
        found.view = memoryview(bytes(len(source.contents[0])))
        await cache.recheck(0)
        assert cache.find(0) is None


# Pins


async def test_pinned_memory_is_sealed_and_outlives_its_chunk() -> None:
    source = ChunkSource(range(3))
    async with running(make_cache(source)) as cache:
        assert cache.pin(7, 0) is None
        await cache.get(0, 10, load=True)
        file = cache.pin(7, 0)
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
        view = cache.find(0)
        cache.switch_version([], np.zeros(0, np.uint64))
        assert cache.stats()["memory_used_bytes"] == total(source, 0)
        assert view == memoryview(mapped) == source.contents[0]
        cache.unpin(7, [0, 0, 5])
        assert cache.stats()["memory_used_bytes"] == 0
        mapped.close()
        os.close(taken)
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(file)


async def test_a_pinned_chunk_takes_its_room_until_it_is_unpinned() -> None:
    source = ChunkSource(range(4))
    async with running(make_cache(source, total(source, 3, 3, 3))) as cache:
        for number in (0, 1, 2):
            await cache.get(number, 10, load=True)
            assert cache.pin(1, number) is cache.pin(1, number) is not None
            assert cache.pin(2, number) is not None
        read_in_plane(cache, *[(2, 0, 4000)] * 50)
        assert cache.revoked(1) == []
        assert await misses_until_loaded(cache, 3, 20) == 0
        wanted = cache.revoked(1)
        assert wanted == cache.revoked(2) == [0, 1, 2]
        assert cache.find(0) is not None, "it serves until then"
        assert cache.pin(1, 0) is None
        cache.unpin(1, wanted)
        assert await misses_until_loaded(cache, 3, 1) == 0
        cache.unpin(2, [1])
        assert cache.stats()["pinned_bytes"] == total(source, 0, 2)
        assert await misses_until_loaded(cache, 3, 1) == 1
        assert in_memory(cache) == {0, 2, 3}
        cache.unpin(2, None)
        cache.unpin(2, None)
        assert cache.stats()["pinned_bytes"] == 0
        assert cache.pin(2, 0) is not None


# Another version


async def test_a_fetch_in_flight_arrives_under_its_new_number(simulated_time: MockClock) -> None:
    source = ChunkSource(range(3))
    source.seconds = 1.0
    async with running(make_cache(source)) as cache:
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
        assert raw(cache.find(0)) == old[2]
        assert cache.stats()["memory_used_bytes"] == len(old[2])
    assert source.fetches == {0: 1, 2: 1}
