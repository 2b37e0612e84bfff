"""The chunks on a node's disk: more than its memory has room for, and never a reader's error."""

import errno
import itertools
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import ParamSpec, TypeVar
from uuid import UUID

import numpy as np
import pytest
import trio

from diesel_fs.cache.disk import chunks as disk_tier
from diesel_fs.cache.disk import folder as disk_shelf
from diesel_fs.cache.disk.chunks import DiskTier
from diesel_fs.cache.disk.marker import prepare_cache_folder
from diesel_fs.cache.policies.eviction import POLICIES
from diesel_fs.cache.tiers import ChunkKey, Reservation
from diesel_fs.errors import NoSpaceError
from diesel_fs.format.entries import ChunkId
from diesel_fs.peers.node import chunk_table, disk
from diesel_fs.peers.node.chunk_table import LOAN_REQUESTS
from diesel_fs.peers.node.node_cache import NodeCache

from ...cache.disk_tier import file_of, files, idle, put, tier_at
from ...small_disks import remount, small_disk
from ...waiting import soon
from ..node_caches import (
    IDENTITY,
    ChunkSource,
    in_memory,
    kept_numbers,
    make_cache,
    misses_until_loaded,
    raw,
    read_in_plane,
    run_cache,
    running,
    total,
    total_bytes,
)
from ..node_caches import memory_is_released as memory_is_released

EVERY = pytest.mark.parametrize("policy", [*POLICIES])
CHUNKS = 8
Words = ParamSpec("Words")
Result = TypeVar("Result")


class Shelf:
    """A node's cache folder, and the chunks that its caches can have."""

    def __init__(self, folder: Path) -> None:
        self.place = prepare_cache_folder(folder)
        self.source = ChunkSource(range(CHUNKS))

    def room(self, chunks: int) -> int:
        return total(self.source, *[CHUNKS - 1] * chunks)

    def memory(self, chunks: int | None) -> int:
        """Memory for `chunks` chunks, and one more in the queue; for None, no memory at all."""
        return 0 if chunks is None else self.room(chunks + 1)

    def tier(self, chunks: int = 1000) -> DiskTier:
        return tier_at(self.place, self.room(chunks))

    @asynccontextmanager
    async def cache(
        self, chunks: int | None, disk: DiskTier | None = None, policy: str = "lru"
    ) -> AsyncIterator[NodeCache]:
        disk = disk or self.tier()
        cache = make_cache(self.source, self.memory(chunks), policy=policy, disk=disk)
        async with running(cache):
            await settled(cache)
            yield cache

    @asynccontextmanager
    async def full_cache(self, disk: DiskTier) -> AsyncIterator[NodeCache]:
        cache = make_cache(self.source, self.room(3 * CHUNKS), disk=disk)
        try:
            async with run_cache(cache):
                await settled(cache)
                assert await self.read_all(cache) == CHUNKS
            yield cache
        finally:
            cache.close()

    async def read_all(self, cache: NodeCache) -> int:
        """Read every chunk; each is right or left to the store. Returns how many came."""
        came = 0
        for number, content in enumerate(self.source.contents):
            got = await cache.read(number, [(5, 100), (1, 2)], load=True)
            came += got is not None
            assert got in (None, [content[5:105], content[1:3]])
            await settled(cache)
        return came

    def switch_version(self, cache: NodeCache, numbers: Sequence[int]) -> None:
        self.source.switch_version(numbers)
        cache.switch_version(self.source.ids, self.source.sizes)
        cache.set_owned(np.ones(len(numbers), np.bool_))

    def files(self) -> list[Path]:
        return files(self.place)

    def on_disk(self) -> set[int]:
        tier = self.tier()
        found = set()
        for number in range(CHUNKS):
            if (chunk := tier.find(make_cache(self.source, 0).ledger.key(number))) is not None:
                chunk.close()
                found.add(number)
        tier.close()
        return found


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "cache")


async def settled(cache: NodeCache) -> None:
    await soon(lambda: not cache.stats()["disk_queued_bytes"] and cache.stats()["disk_looks"] > 0)


@EVERY
async def test_chunks_beyond_the_memory_go_to_the_disk(policy: str, shelf: Shelf) -> None:
    async with shelf.cache(3, policy=policy) as h:
        assert await shelf.read_all(h) == await shelf.read_all(h) == CHUNKS
        assert len(in_memory(h)) == 3
        assert h.stats()["disk_chunks"] == len(shelf.files()) == CHUNKS - 3
        assert h.stats()["disk_reads"] == CHUNKS - 3
        assert h.stats()["disk_bytes"] == 102 * (CHUNKS - 3)
        assert kept_numbers(h) == set(range(CHUNKS))
    assert set(shelf.source.fetches.values()) == {1}


@pytest.mark.parametrize("policy", ["lru", "lfu"])
async def test_often_read_chunks_come_to_memory_and_evicted_ones_to_the_disk(
    policy: str, shelf: Shelf
) -> None:
    async with shelf.cache(3, policy=policy) as h:
        await shelf.read_all(h)
        read_in_plane(h, (1, 0, 4000), (2, 0, 4000))
        for _ in range(8):
            piece = await h.read(7, [(0, 4000)], load=True)
            assert piece is not None
            assert piece[0] == shelf.source.contents[7][:4000]
        assert in_memory(h) == {1, 2, 7}
        await settled(h)
        assert h.holds(0)
        assert raw(await h.get(0, 10, load=False)) == shelf.source.contents[0]
        assert h.stats()["disk_loads"] == 1
    assert set(shelf.source.fetches.values()) == {1}


async def test_S13_J6_chunks_on_the_disk_at_the_start_are_adopted_and_checked(shelf: Shelf) -> None:
    """A crash has left them, or another user has written there."""
    async with shelf.cache(0) as cache:
        assert await shelf.read_all(cache) == CHUNKS
    assert len(shelf.files()) == CHUNKS
    for number, damage in enumerate((b"\0" * 4000, b"")):
        path = file_of(shelf.place, cache.ledger.key(number))
        path.write_bytes((path.read_bytes()[:50] + damage)[: path.stat().st_size])
    async with shelf.cache(2) as cache:
        assert kept_numbers(cache) == set(range(CHUNKS))
        assert await shelf.read_all(cache) == CHUNKS
    assert shelf.source.fetches == {0: 2, 1: 2} | dict.fromkeys(range(2, CHUNKS), 1)


async def test_a_full_disk_evicts_others_chunks_then_copies_then_by_policy(shelf: Shelf) -> None:
    tier = shelf.tier(4)
    async with shelf.cache(2, tier) as cache:
        assert await shelf.read_all(cache) == 6
        assert kept_numbers(cache) == {0, 1, 2, 3, 4, 5}
        mine = np.ones(CHUNKS, np.bool_)
        mine[3] = False
        cache.set_owned(mine)
        assert await misses_until_loaded(cache, 6, 20)
        await settled(cache)
        assert in_memory(cache) == {1, 6}
        assert np.flatnonzero(cache.ledger.readable).tolist() == [0, 2, 4, 5]
        for _ in range(100):
            await cache.read(2, [(0, 1)], load=False)
        await settled(cache)
        assert await misses_until_loaded(cache, 7, 20)
        await settled(cache)
        assert in_memory(cache) == {2, 6}
        on_disk = np.flatnonzero(cache.ledger.readable).tolist()
        assert on_disk == [0, 1, 5, 7]  # without 3, 2 and the oldest
        assert len(shelf.files()) == 4


async def test_a_file_is_lent_for_the_first_whole_read_and_the_second_loads_the_chunk(
    shelf: Shelf,
) -> None:
    """A file that was lent stays readable, but not writable, after the chunk has left the disk."""
    async with shelf.full_cache(shelf.tier()) as filled:
        await filled.flush_to_disk(np.ones(CHUNKS, np.bool_))
    async with shelf.cache(CHUNKS) as cache:
        lent = await cache.lend_file(3)
        assert lent is not None
        assert cache.stats()["disk_loads"] == 0
        file_of(shelf.place, cache.ledger.key(3)).unlink()
        with lent:
            room = bytearray(lent.bytes)
            lent.read_into(0, memoryview(room))
            assert room == shelf.source.contents[3]
            with pytest.raises(OSError, match="Bad file"):
                os.pwrite(lent.file, b"x", 0)
        again = await cache.lend_file(4)
        assert again is not None
        again.close()
        assert await cache.lend_file(4) is None
        assert raw(await cache.get(4, lent.bytes, load=True)) == shelf.source.contents[4]
        assert in_memory(cache) == {4}
        assert await cache.lend_file(4) is None, "it is in memory"
        assert cache.stats()["disk_loads"] == 1
        assert await cache.lend_file(3) is None, "it is gone"
    assert shelf.source.fetches.total() == CHUNKS


async def test_without_memory_chunks_go_to_the_disk(shelf: Shelf) -> None:
    async with shelf.cache(None) as cache:
        assert await shelf.read_all(cache) == await shelf.read_all(cache) == CHUNKS
        assert in_memory(cache) == set()
        assert cache.pin(1, 0) is None
    assert set(shelf.source.fetches.values()) == {1}


class Late(DiskTier):
    def list_chunks(self, identity: UUID) -> list[ChunkId]:
        time.sleep(0.2)
        return super().list_chunks(identity)


@pytest.mark.parametrize(("tier", "room", "held"), [(DiskTier, 3, 5), (Late, CHUNKS, CHUNKS)])
async def test_the_share_fills_the_disk(
    tier: type[DiskTier], room: int, held: int, shelf: Shelf
) -> None:
    """The disk may answer late."""
    disk = tier(shelf.place, IDENTITY, shelf.room(room))
    async with (
        running(make_cache(shelf.source, shelf.memory(2), disk=disk)) as cache,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(cache.fetches.prefetch_owned, np.arange(CHUNKS))
        await soon(lambda: cache.stats()["share_held_chunks"] >= held)
        await trio.sleep(0.1)
        nursery.cancel_scope.cancel()
        assert cache.stats()["filled"] == cache.stats()["fetches"] == held


async def test_another_version_finds_its_chunks_on_the_disk(shelf: Shelf) -> None:
    shelf.source.switch_version([0, 1, 2, 3, 4, 5, 6, 9])
    async with shelf.cache(2) as cache:
        assert await shelf.read_all(cache) == CHUNKS
        shelf.switch_version(cache, [8, 9, 6, 0])
        assert kept_numbers(cache) == {1, 2, 3}
        assert await shelf.read_all(cache) == 4
    assert set(shelf.source.fetches.values()) == {1}


# Files that are lent to the data plane


def plane_reads(cache: NodeCache, chunk: int, most: int = 1000) -> int:
    """Return the number of requests that the data plane answers before it stops."""
    for number in range(most):
        if read_in_plane(cache, (chunk, 5, 100)) is None:
            return number
    return most


def open_files(place: Path) -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            path = Path(os.readlink(f"/proc/self/fd/{number}").removesuffix(" (deleted)"))
            if path.is_relative_to(place) and len(path.name) == 32:
                found.append(path.name)
    return sorted(found)


async def test_the_data_plane_reads_a_lent_file_for_a_number_of_requests(shelf: Shelf) -> None:
    async with shelf.cache(None) as cache:
        assert await shelf.read_all(cache) == CHUNKS
        before = cache.stats()
        assert plane_reads(cache, 0) == 0  # it was never read from the disk
        await cache.read(0, [(0, 1)], load=False)
        await cache.read(1, [(0, 1)], load=False)
        size = len(shelf.source.contents[1])
        got = read_in_plane(cache, (1, 7, 30), (0, 0, 2), (1, size - 1, 1), (1, 0, 0))
        assert got is not None
        zero, one, *_ = shelf.source.contents
        wanted = [one[7:37], zero[:2], one[-1:]]
        assert [*map(bytes, got)] == [*wanted, b""]
        assert read_in_plane(cache, (1, size - 1, 2)) is None  # beyond its end
        assert plane_reads(cache, 0) == LOAN_REQUESTS - 1
        assert plane_reads(cache, 1) == LOAN_REQUESTS - 1
        after = cache.stats()
        reads = 2 + 4 + 2 * (LOAN_REQUESTS - 1)
        assert after["disk_reads"] - before["disk_reads"] == reads
        assert after["disk_bytes"] - before["disk_bytes"] == 35 + 200 * (LOAN_REQUESTS - 1)
        await cache.read(0, [(0, 1)], load=False)
        assert plane_reads(cache, 0) == LOAN_REQUESTS
    await soon(lambda: not open_files(shelf.place))  # a thread of trio's may still have its result


async def test_a_chunk_that_is_often_read_from_its_file_comes_to_memory(shelf: Shelf) -> None:
    async with shelf.cache(2) as cache:
        await shelf.read_all(cache)
        assert 7 not in in_memory(cache)
        loans = 0
        while 7 not in in_memory(cache):
            await cache.read(7, [(0, 4000)], load=True)
            loans += plane_reads(cache, 7) == LOAN_REQUESTS
        assert 0 < loans < 4


async def test_files_of_chunks_that_leave_the_disk_are_taken_back(shelf: Shelf) -> None:
    async with shelf.cache(None) as cache:
        await shelf.read_all(cache)
        await shelf.read_all(cache)
        assert len(open_files(shelf.place)) == CHUNKS
        await cache.recheck(3)  # the chunk is intact
        assert plane_reads(cache, 3) == 0
        path = file_of(shelf.place, cache.ledger.key(4))
        path.write_bytes(path.read_bytes()[:-40] + bytes(40))
        assert plane_reads(cache, 4, 1) == 1  # the damage is not noticed yet
        await cache.recheck(4)
        assert plane_reads(cache, 4) == 0
        shelf.switch_version(cache, [8, 7, 6, 0])
        await soon(lambda: not open_files(shelf.place))
        assert [plane_reads(cache, each) for each in range(4)] == [0] * 4


async def test_files_are_lent_for_a_time_and_the_oldest_of_too_many_is_taken_back(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_table, "LOANS_MAX", 3)
    monkeypatch.setattr(chunk_table, "LOAN_S", 0.5)
    monkeypatch.setattr(disk, "LOAN_S", 0.05)
    async with shelf.cache(None) as cache:
        await shelf.read_all(cache)
        for chunk in (0, 1, 2, 0, 5):
            await cache.read(chunk, [(0, 1)], load=False)
        assert [plane_reads(cache, chunk, 1) for chunk in (0, 1, 2, 5)] == [1, 0, 1, 1]
        assert len(open_files(shelf.place)) == 3
        await soon(lambda: not open_files(shelf.place))
        assert plane_reads(cache, 0) == 0


async def test_a_file_system_without_page_cache_reads_is_read_in_threads(small: Path) -> None:
    shelf = Shelf(small)
    async with shelf.cache(None) as cache:
        for _ in range(2):
            assert raw(await cache.get(0, 1, load=True)) == shelf.source.contents[0]
            await settled(cache)
        assert cache.stats()["disk_reads"] == 1
        assert plane_reads(cache, 0) == 0
        got = await cache.read(0, [(1, 5)], load=False)
        assert got is not None
        assert got[0] == shelf.source.contents[0][1:6]
    assert set(shelf.source.fetches.values()) == {1}


# Disks that fail


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "small", "size=64k,nr_inodes=60,mode=700") as point:
        yield point


def use_up_space(point: Path) -> None:
    disk = os.statvfs(point)
    (point / "lost+found").write_bytes(bytes(disk.f_bavail * disk.f_frsize - 9000))


def use_up_inodes(point: Path) -> None:
    for number in range(os.statvfs(point).f_favail - 4):
        (point / f"other{number}").touch()


@pytest.mark.parametrize("use_up", [use_up_space, use_up_inodes])
@pytest.mark.parametrize("floor", [disk_shelf.FREE_FRACTION_MIN, -1.0])
async def test_J1_J10_F11_a_full_disk_is_a_smaller_cache(
    use_up: Callable[[Path], None], floor: float, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may become full even between the check of free space and the write (a negative floor)."""
    monkeypatch.setattr(disk_shelf, "FREE_FRACTION_MIN", floor)
    shelf = Shelf(small)
    async with shelf.cache(2, policy="none") as cache:
        for number in (0, 1, 2, 3):
            assert await misses_until_loaded(cache, number, 1) == 1
            await settled(cache)
        use_up(small)
        for _ in range(5):
            await shelf.read_all(cache)
        assert kept_numbers(cache) >= {0, 1, 2, 3}
        assert not [path for path in shelf.files() if path.name[0] == "."]
        assert cache.stats()["disk_queued_bytes"] == 0


def remounted(place: Path) -> None:
    remount(place, "ro")


def removed(place: Path) -> None:
    for path in place.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def unreadable(place: Path) -> None:
    """Make a folder unusable, also for root: a part of its path is a file."""
    for path in place.iterdir():
        if path.is_dir():
            path.rename(place / "lost+found")
            path.touch()


@pytest.mark.parametrize(("happens", "left"), [(remounted, 8), (removed, 2), (unreadable, 2)])
async def test_J4_a_removed_folder_fails_no_read(
    happens: Callable[[Path], None], left: int, small: Path
) -> None:
    shelf = Shelf(small)
    async with shelf.cache(2) as cache:
        assert await shelf.read_all(cache) == CHUNKS
        happens(shelf.place)
        shelf.source.fails = True
        came = 0
        for number, content in enumerate(shelf.source.contents):
            got = await cache.get(number, 1, load=False)
            assert got in (None, content)
            came += got is not None
        assert came == left
        shelf.source.fails = False
        await shelf.read_all(cache)


async def test_J2_a_failing_disk_is_paused_and_tried_again(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    def refuse(*given: object) -> None:
        refused.append(given)
        raise NoSpaceError("it cannot be written")

    refused: list[object] = []
    shelf.source.switch_version(range(4, 12))
    async with shelf.cache(2) as cache:
        assert await shelf.read_all(cache) == CHUNKS
        with monkeypatch.context() as patch:
            patch.setattr(disk, "DISK_PAUSE_S", 0.3)
            patch.setattr("os.preadv", broken)
            assert await cache.get(5, 1, load=False) is None
            assert cache.stats()["disk_paused"] == 1
            failures = cache.stats()["disk_failures"]
            for _ in range(20):
                assert await cache.get(5, 1, load=False) is None
                assert not cache.holds(5)
            assert cache.stats()["disk_failures"] == failures, "it is left alone"
            assert kept_numbers(cache) == {0, 1}
        await trio.sleep(0.35)
        assert raw(await cache.get(5, 1, load=False)) == shelf.source.contents[5]
        monkeypatch.setattr(cache._disk._tier, "reserve", refuse)
        shelf.switch_version(cache, [4, 0, 1, 2])
        assert await shelf.read_all(cache) >= 1
        await shelf.read_all(cache)
        assert len(refused) == 1, "it is left alone"
        assert not [path for path in shelf.files() if path.name[0] == "."]


@pytest.mark.parametrize("where", ["find", "reserve"])
async def test_a_disk_that_hangs_delays_reads_once_by_a_second(
    where: str, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(disk, "READ_TIMEOUT_S", 0.2)

    class Hanging(DiskTier):
        hangs = False

    def hang(self: Hanging, *given: object) -> object:
        if self.hangs:
            goes_on.wait(20)
        return getattr(DiskTier, where)(self, *given)

    setattr(Hanging, where, hang)

    try:
        tier = Hanging(shelf.place, IDENTITY, 1 << 30)
        async with shelf.cache(2, tier, "none") as cache:
            for number in (0, 1, 2, 3):
                await cache.get(number, 10, load=True)
                await settled(cache)
            tier.hangs = True
            begun_s = trio.current_time()
            for number in range(CHUNKS):
                for _ in range(10):
                    got = await cache.get(number, 10, load=True)
                    assert got in (None, shelf.source.contents[number])
            assert trio.current_time() - begun_s < 1.5
            assert kept_numbers(cache) >= {0, 1}
            tier.hangs = False
    finally:
        goes_on.set()


async def test_changes_by_other_tasks_are_noticed(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = shelf.tier()
    async with shelf.cache(2) as cache:
        assert await shelf.read_all(cache) == CHUNKS
        for number in (5, 6):
            other.drop(cache.ledger.key(number))
            assert cache.holds(number)
            assert await cache.get(number, 1, load=False) is None
            assert not cache.holds(number)
        assert raw(await cache.get(5, 1, load=True)) == shelf.source.contents[5]
        assert shelf.source.fetches[5] == 2
        monkeypatch.setattr(disk, "RESCAN_S", 0.05)
        cache._disk._failed(7, is_there=False)
        await trio.sleep(0.03)
        put(other, cache.ledger.key(6), shelf.source.contents[6])
        await soon(lambda: bool(cache.holds(6)))


async def test_the_queue_stays_within_its_part_of_the_memory(shelf: Shelf) -> None:
    class Slow(DiskTier):
        def reserve(self, key: ChunkKey, size: int) -> Reservation | None:
            goes_on.wait(20)
            return super().reserve(key, size)

    goes_on = threading.Event()

    try:
        tier = Slow(shelf.place, IDENTITY, 1 << 30)
        async with shelf.cache(2, tier, "none") as cache:
            for number in range(CHUNKS):
                await cache.get(number, 1, load=True)
            assert cache.stats()["disk_queued_bytes"] == total(shelf.source, 2)
            assert cache.stats()["fetches"] == 3
            assert raw(await cache.get(2, 1, load=False)) == shelf.source.contents[2]
            shelf.switch_version(cache, [9, 2, 10])
            assert [cache.holds(number) for number in range(3)] == [False, True, False]
            goes_on.set()
            await settled(cache)
            assert raw(await cache.get(1, 1, load=False)) == shelf.source.contents[1]
            assert len(shelf.files()) == 1
    finally:
        goes_on.set()


async def test_reads_of_many_chunks_that_begin_together_share_threads(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entering a thread costs more than reading some files."""
    entered = 0

    def counting(call: Callable[Words, Awaitable[Result]]) -> Callable[Words, Awaitable[Result]]:
        async def counted(*words: Words.args, **more: Words.kwargs) -> Result:
            nonlocal entered
            entered += 1
            return await call(*words, **more)

        return counted

    async with shelf.cache(1) as cache:
        await shelf.read_all(cache)
        wanted = sorted(set(range(CHUNKS)) - in_memory(cache))
        assert len(wanted) > 4
        got: dict[int, list[memoryview] | None] = {}

        async def read(number: int) -> None:
            got[number] = await cache.read(number, [(9, 50), (3, number + 1)], load=False)

        monkeypatch.setattr(trio.to_thread, "run_sync", counting(trio.to_thread.run_sync))
        async with trio.open_nursery() as nursery:
            for number in wanted:
                nursery.start_soon(read, number)
        assert entered <= -(-len(wanted) // 8)
        for number, contents in got.items():
            content = shelf.source.contents[number]
            assert contents is not None
            assert list(map(bytes, contents)) == [content[9:59], content[3 : number + 4]]


async def test_a_caller_that_waits_for_the_disk_when_the_cache_ends_gets_nothing(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    got: list[list[memoryview] | None] = []
    async with trio.open_nursery() as nursery:
        async with shelf.cache(1) as cache:
            await shelf.read_all(cache)
            [number, *_] = sorted(set(range(CHUNKS)) - in_memory(cache))

            async def read() -> None:
                got.append(await cache.read(number, [(0, 10)], load=False))

            monkeypatch.setattr(DiskTier, "find", lambda tier, key: goes_on.wait(20) and None)
            for _ in range(3):
                nursery.start_soon(read)
            await trio.sleep(0.05)
            nursery.start_soon(read)  # it has only just begun
            await trio.lowlevel.checkpoint()
        assert not goes_on.is_set()
    goes_on.set()
    assert got == [None] * 4


# Datasets of others in the same folder

OTHER = UUID(int=99)


def fill_for_others(shelf: Shelf, limit_bytes: int) -> DiskTier:
    """A tier that is full of chunks of another dataset, which no job has used for some time."""
    tier, size = tier_at(shelf.place, limit_bytes), len(shelf.source.contents[-1]) // 4
    for number in range(limit_bytes // size):
        put(tier, ChunkKey(OTHER, ChunkId(bytes([number] * 16))), bytes(size))
    idle(shelf.place)
    return tier


async def read_until_all_are_here(cache: NodeCache, shelf: Shelf) -> None:
    """Reads go past the cache while it makes room."""
    came = 0
    with trio.fail_after(20):
        while came < CHUNKS:
            came = await shelf.read_all(cache)
    assert cache.stats()["disk_chunks"] == CHUNKS


async def test_a_node_takes_only_the_room_of_chunks_that_no_job_uses(shelf: Shelf) -> None:
    limit_bytes = 2 * total_bytes(shelf.source)
    tier = fill_for_others(shelf, limit_bytes)
    others = [len(shelf.files())]
    async with shelf.cache(None, tier) as cache:
        await read_until_all_are_here(cache, shelf)
        figures = cache.stats()
        assert (figures["disk_chunks"], figures["disk_refused"]) == (CHUNKS, 0)
        assert figures["disk_evictions"] == 0
        others.append(len(shelf.files()) - CHUNKS)
        assert figures["disk_room_evictions"] == others[0] - others[1] > 0
        freed = figures["disk_room_evicted_bytes"]
        assert 0.9 * total_bytes(shelf.source) < freed < 0.8 * limit_bytes

    idle(shelf.place)
    async with shelf.cache(None, tier) as cache:  # all chunks are here
        assert await shelf.read_all(cache) == CHUNKS
        assert len(shelf.files()) == others[1] + CHUNKS
    assert set(shelf.source.fetches.values()) == {1}


async def test_if_jobs_use_all_of_the_folder_a_newcomer_reads_past_it(shelf: Shelf) -> None:
    limit_bytes = total_bytes(shelf.source)
    tier = fill_for_others(shelf, limit_bytes)
    job = tier_at(shelf.place, limit_bytes)
    job.jobs.register(OTHER, time.time())
    idle(shelf.place)
    before = shelf.files()
    async with shelf.cache(None, tier) as cache:
        assert await shelf.read_all(cache) <= CHUNKS
        assert shelf.files() == before
        assert cache.stats()["disk_failures"] == 0
    job.close()
    async with shelf.cache(None, tier) as cache:
        await read_until_all_are_here(cache, shelf)


def used_s(place: Path) -> float:
    [used] = place.glob("*/*/.used")
    return used.stat().st_mtime


async def test_a_dataset_cools_down_after_jobs(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory may serve all reads: the job reports each minute that it lives."""
    monkeypatch.setattr(disk, "NOTE_USE_S", 0.01)
    tier = tier_at(shelf.place, clock=itertools.count(0, 1000).__next__)
    async with shelf.cache(None, tier) as cache:
        await shelf.read_all(cache)
        idle(shelf.place)
        await soon(lambda: used_s(shelf.place) > time.time() - 600)


# The end of a node: the chunks in its memory are written for the next master


async def ended(cache: NodeCache, share: set[int]) -> None:
    await cache.flush_to_disk(np.isin(np.arange(CHUNKS), [*share]))


async def test_at_the_end_chunks_in_memory_are_written_to_the_disk(
    shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "diesel.task")
    async with shelf.full_cache(shelf.tier()) as cache:
        assert shelf.files() == []
        cache.set_owned(np.arange(CHUNKS) > 1)
        await ended(cache, {1, 2, 3})
        assert in_memory(cache) == set(), "the memory is free at once"
    size = total(shelf.source, *range(1, CHUNKS))
    assert f"7 chunks ({size:,} bytes) from memory to the disk cache: these were all" in caplog.text
    async with shelf.cache(3 * CHUNKS) as cache:
        assert kept_numbers(cache) == set(range(1, CHUNKS)), "but never for its own chunks"
        assert await shelf.read_all(cache) == CHUNKS
    assert shelf.source.fetches == {0: 2} | dict.fromkeys(range(1, CHUNKS), 1)


async def test_a_flush_writes_the_share_first_and_evicts_only_others_chunks(
    shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "diesel.task")
    async with shelf.cache(0) as before:
        for number in (0, 1, 5):
            assert await misses_until_loaded(before, number, 1)
            await settled(before)
    async with shelf.full_cache(shelf.tier(4)) as cache:
        cache.set_owned(np.arange(CHUNKS) != 1)
        await ended(cache, {0, 6, 7})
    assert shelf.on_disk() == {0, 5, 6, 7}, "without 1, as 6 and 7 came before 2"
    assert "2 chunks (" in caplog.text
    assert "the disk takes no more" in caplog.text


async def test_at_the_end_the_queue_is_written(shelf: Shelf) -> None:
    async with shelf.full_cache(shelf.tier()) as cache:
        for number in (0, 1):
            cache.ledger.enqueue(number, cache.ledger.views[number])
            cache.ledger.drop(number)
        cache.set_owned(np.arange(CHUNKS) != 1)
        await ended(cache, set())
    assert shelf.on_disk() == {0, 2, 3, 4, 5, 6, 7}


async def test_a_cancelled_flush_leaves_whole_chunks(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go_on, fill = threading.Event(), disk_tier._FileReservation.commit

    def slow(self: disk_tier._FileReservation, content: memoryview) -> None:
        if len(shelf.files()) > 3:  # counting the one being written
            os.pwrite(self._file, content[:100], 0)
            go_on.wait(20)
        fill(self, content)

    monkeypatch.setattr(disk_tier._FileReservation, "commit", slow)
    caplog.set_level("INFO", "diesel.task")
    async with shelf.full_cache(shelf.tier()) as cache:
        with trio.move_on_after(1.0) as patience:
            await ended(cache, set())
        assert patience.cancelled_caught
        assert shelf.on_disk() == {0, 1, 2}
        assert len(shelf.files()) == 4
        go_on.set()
        await soon(lambda: len(shelf.on_disk()) == 4)
    assert "3 chunks (" in caplog.text
    assert "there was no more time" in caplog.text


async def test_reads_from_memory_count_as_use_of_the_disk_cache(shelf: Shelf) -> None:
    """Otherwise the dataset's files on the disk would be removed as idle."""
    now_s = [0.0]
    tier = tier_at(shelf.place, shelf.room(4), clock=lambda: now_s[0])
    cache = make_cache(shelf.source, total_bytes(shelf.source) * 3, disk=tier)
    for numbers in ((0, 1, 2), (3, 4, 5)):
        async with run_cache(cache):
            await settled(cache)
            for number in numbers:
                await cache.get(number, 10, load=True)
        if numbers[0]:
            idle(shelf.place)
            now_s[0] += 60
        await ended(cache, set())
        idle(shelf.place)
        now_s[0] += 60
    cache.close()
    assert shelf.on_disk() == {0, 1, 2, 3}
