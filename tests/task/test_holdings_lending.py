"""Memory that readers borrow, and another version of the dataset: what stays, and as what."""

import mmap
import os

import numpy as np
import pytest
import trio

from .held import (
    Source,
    everything,
    holding,
    in_memory,
    made,
    missed,
    raw,
    running,
    simulated,
    total,
)
from .held import memory_is_let_go as memory_is_let_go

# Lending


def test_what_is_lent_is_whole_sealed_and_outlives_its_chunk() -> None:
    source = Source(range(3))

    async def main() -> None:
        async with running(made(source, everything(source))) as held:
            assert held.lend(7, 0) is None
            await held.get(0, 10, load=True)
            file = held.lend(7, 0)
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
            view = held.find(0)
            held.show([], np.zeros(0, np.uint64))
            assert held.stats()["memory_used_bytes"] == total(source, 0)
            assert view == memoryview(mapped) == source.contents[0]
            held.take_back(7, [0, 0, 5])
            assert held.stats()["memory_used_bytes"] == 0
            mapped.close()
            os.close(taken)
            with pytest.raises(OSError, match="Bad file"):
                os.fstat(file)

    trio.run(main)


def test_what_is_lent_takes_its_room_until_it_is_returned() -> None:
    source = Source(range(4))

    async def main() -> None:
        async with running(made(source, total(source, 3, 3, 3))) as held:
            for number in (0, 1, 2):
                await held.get(number, 10, load=True)
                assert held.lend(1, number) is held.lend(1, number) is not None
                assert held.lend(2, number) is not None
            held.find_parts(np.array([[2, 0, 4000]] * 50, np.uint32))
            assert held.wanted_back(1) == []
            assert await missed(held, 3, 20) == 0
            wanted = held.wanted_back(1)
            assert wanted == held.wanted_back(2) == [0, 1, 2]
            assert held.find(0) is not None, "it serves until then"
            assert held.lend(1, 0) is None
            held.take_back(1, wanted)
            assert await missed(held, 3, 1) == 0
            held.take_back(2, [1])
            assert held.stats()["lent_bytes"] == total(source, 0, 2)
            assert await missed(held, 3, 1) == 1
            assert in_memory(held) == {0, 2, 3}
            held.gone(2)
            held.gone(2)
            assert held.stats()["lent_bytes"] == 0
            assert held.lend(2, 0) is not None

    trio.run(main)


def test_of_two_memories_of_a_chunk_the_first_is_returned_first() -> None:
    source = Source(range(1))

    async def main() -> None:
        async with running(made(source, 2 * everything(source))) as held:
            await held.get(0, 10, load=True)
            assert held.lend(1, 0) is not None
            source.show([])
            held.show(source.ids, source.sizes)
            source.show([0])
            held.show(source.ids, source.sizes)
            held.set_mine(np.ones(1, np.bool_))
            await held.get(0, 10, load=True)
            assert held.lend(1, 0) is not None
            assert held.wanted_back(1) == [0]
            assert held.stats()["memory_used_bytes"] == 2 * total(source, 0)
            held.take_back(1, [0])
            assert held.stats()["memory_used_bytes"] == total(source, 0)
            assert held.wanted_back(1) == []

    trio.run(main)


# Another version


def test_chunks_of_both_versions_stay() -> None:
    source = Source(range(6))

    async def main() -> None:
        async with running(made(source, everything(source))) as held:
            for number in (4, 0, 1):
                await held.get(number, 10, load=True)
            source.show([9, 4, 3, 1])
            held.show(source.ids, source.sizes)
            assert in_memory(held) == {1, 3}
            assert raw(held.find(1)) == source.contents[1]
            assert raw(held.find(3)) == source.contents[3]
            assert holding(held) == {1, 3}
            assert held.stats()["memory_bytes"] == total(source, 1, 3)
            assert raw(await held.get(0, 10, load=True)) == source.contents[0]

    trio.run(main)
    assert source.fetches == {0: 1, 1: 1, 4: 1, 9: 1}


def test_what_is_under_way_arrives_under_its_new_number() -> None:
    source = Source(range(3))
    source.seconds = 1.0

    async def main() -> None:
        async with running(made(source, everything(source))) as held:
            got = []

            async def ask(number: int) -> None:
                got.append(await held.get(number, 10, load=True))

            old = source.contents
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, 0)
                nursery.start_soon(ask, 2)
                await trio.sleep(0.5)
                source.show([2, 7])
                held.show(source.ids, source.sizes)
                nursery.start_soon(ask, 0)
            assert sorted(map(len, filter(None, got))) == sorted(map(len, [old[0], old[2], old[2]]))
            assert in_memory(held) == {0}
            assert raw(held.find(0)) == old[2]
            assert held.stats()["memory_used_bytes"] == len(old[2])

    simulated(main)
    assert source.fetches == {0: 1, 2: 1}
