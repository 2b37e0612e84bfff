"""Random operations on a `NodeCache` against a model: right bytes, one fetch for each chunk, within
the budget.

The model knows only facts that a caller can see.
"""

import os
from dataclasses import dataclass, field

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.cache.policies.eviction import POLICIES
from diesel_fs.errors import DieselError
from diesel_fs.orders.future import FutureUses, UnitOrder
from diesel_fs.peers.node.chunk_future import ChunkFuture
from diesel_fs.peers.node.node_cache import NodeCache
from tests.examples import examples

from ..node_caches import ChunkSource, chunk, descriptors, kept_numbers, make_cache, running

CHUNKS = st.integers(0, 7)
PINNERS = st.integers(0, 2)
VERSIONS = st.lists(st.integers(0, 11), min_size=1, max_size=8, unique=True)
OPERATIONS = st.one_of(
    st.tuples(st.just("get"), CHUNKS, st.booleans(), st.integers(0, 3000)),
    st.tuples(st.just("get"), CHUNKS, st.just(True), st.just(3000)),
    st.tuples(st.just("read"), CHUNKS, st.booleans(), st.integers(0, 3000)),
    st.tuples(st.just("find"), CHUNKS),
    st.tuples(st.just("together"), st.lists(CHUNKS, max_size=6)),
    st.tuples(st.just("pin"), PINNERS, CHUNKS),
    st.tuples(st.just("unpin"), PINNERS, st.lists(CHUNKS, max_size=3)),
    st.tuples(st.just("unpin_all"), PINNERS),
    st.tuples(st.just("mine"), st.lists(st.booleans(), min_size=8, max_size=8)),
    st.tuples(st.just("show"), VERSIONS),
    st.tuples(st.just("fails"), st.booleans()),
    st.tuples(st.just("damages"), st.booleans()),
    st.tuples(st.just("recheck"), CHUNKS),
    st.tuples(st.just("plan"), st.lists(st.lists(CHUNKS, max_size=30), max_size=3)),
    st.tuples(st.just("at"), st.lists(st.integers(0, 40), max_size=3)),
    st.tuples(st.just("elsewhere"), st.lists(st.booleans(), min_size=8, max_size=8)),
)


@dataclass(slots=True)
class Pinned:
    """One piece of memory, by its inode, and the processes that have pinned it, with the chunk
    numbers they know."""

    bytes: int
    name: int
    pinners: set[tuple[int, int]] = field(default_factory=set)


class Model:
    def __init__(self, source: ChunkSource, cache: NodeCache, budget: int, *, mine: bool) -> None:
        self.mine = [mine] * len(source.contents)
        self.source, self.cache, self.budget = source, cache, budget
        self.pinned: dict[int, Pinned] = {}
        self.order: list[tuple[int, int, int]] = []  # pinner, number, inode
        self.readers = 0  # of the plan

    def here(self) -> set[int]:
        return set(self.cache.ledger.views)

    async def do(self, operation: tuple[object, ...]) -> None:
        match operation:
            case "get", int(number), bool(load), int(size):
                await self.get(number, size, load=load)
            case "read", int(number), bool(load), int(size):
                await self.read(number, size, load=load)
            case "find", int(number):
                view = self.cache.find(number)
                if view is not None:
                    assert view == self.source.contents[number]
            case "together", list(numbers):
                before = self.source.fetches.copy()
                wanted = [each for each in numbers if each < len(self.source.contents)]
                async with trio.open_nursery() as nursery:
                    for number in wanted * 2:
                        nursery.start_soon(self.ask, number)
                fetched = self.source.fetches - before
                if not (self.source.fails or self.source.damages):
                    room = self.budget - self.cache.stats()["memory_used_bytes"]
                    assert room >= 0
                    assert all(count <= 2 for count in fetched.values())
            case "pin", int(pinner), int(number):
                self.pin(pinner, number)
            case "unpin", int(pinner), list(numbers):
                for number in numbers:
                    self.unpin(pinner, number)
                self.cache.unpin(pinner, numbers)
            case "unpin_all", int(pinner):
                for _, number, _ in [each for each in self.order if each[0] == pinner]:
                    self.unpin(pinner, number)
                self.cache.unpin(pinner, None)
            case "mine", list(mine):
                self.mine = mine[: len(self.source.contents)]
                self.cache.set_owned(np.array(self.mine, np.bool_))
            case "show", list(names):
                kept = {self.source.numbers[number] for number in self.here()}
                was = dict(zip(self.source.numbers, self.mine, strict=True))
                self.mine = [was.get(name, False) for name in names]
                self.readers = 0
                self.source.switch_version(names)
                self.cache.switch_version(self.source.ids, self.source.sizes)
                assert {names[number] for number in self.here()} == kept & set(names)
            case "fails", bool(fails):
                self.source.fails = fails
            case "damages", bool(damages):
                self.source.damages = damages
            case "plan", list(orders):  # None: the chunk is not known any more
                self.plan(orders)
            case "at", list(positions):  # of some readers' chunks, and back again
                self.cache.set_positions(positions[: self.readers])
            case "elsewhere", list(held):
                count = len(self.source.contents)
                self.cache.set_held_elsewhere(np.array(held[:count], np.bool_))
            case "recheck", int(number) if number < len(self.source.contents):
                before_ = self.here()
                await self.cache.recheck(number)
                assert self.here() == before_
        self.check()

    def plan(self, orders: list[list[int]]) -> None:
        count = len(self.source.contents)
        known = [[number for number in each if number < count] for each in orders]
        self.readers = len(known)
        if not known:
            self.cache.set_future(None)
            return
        uses = FutureUses([UnitOrder(np.array(each, np.int64)) for each in known], count)
        size = self.source.sizes.astype(np.float64)
        self.cache.set_future(ChunkFuture(uses, size, size / 2))

    async def ask(self, number: int) -> None:
        try:
            view = await self.cache.get(number, 3000, load=True)
        except DieselError:
            return
        assert view in (None, self.source.contents[number])

    async def get(self, number: int, size: int, *, load: bool) -> None:
        if number >= len(self.source.contents):
            return
        here, before = number in self.here(), self.source.fetches.copy()
        content = self.source.contents[number]
        needed = self.cache.stats()["memory_used_bytes"] + len(content)
        if not self.mine[number]:  # this node's own chunks have room first
            here_ = self.here()
            needed += sum(
                len(each)
                for other, each in enumerate(self.source.contents)
                if self.mine[other] and other not in here_
            )
        has_room = needed <= self.budget
        works = not (self.source.fails or self.source.damages)
        try:
            view = await self.cache.get(number, size, load=load)
        except DieselError:
            assert not works
            view = None
        assert view in (None, content)
        fetched = self.source.fetches - before
        if here:
            assert view is not None
        if here or not load:
            assert not fetched
            assert here == (view is not None)
        elif has_room:
            assert fetched == {self.source.numbers[number]: 1}, "at once if there is room"
            assert works == (view is not None)
        assert (number in self.here()) == (view is not None)

    async def read(self, number: int, size: int, *, load: bool) -> None:
        if number < len(self.source.contents):
            try:
                found = await self.cache.read(number, [(7, size), (0, 3)], load=load)
            except DieselError:
                assert self.source.fails or self.source.damages
                return
            content = self.source.contents[number]
            assert found in (None, [content[7 : 7 + size], content[:3]])

    def pin(self, pinner: int, number: int) -> None:
        file = self.cache.pin(pinner, number)
        if file is None:
            return
        assert number in self.here()
        name, inode = self.source.numbers[number], os.fstat(file).st_ino
        assert os.pread(file, 1 << 20, 0) == chunk(name, self.source.body_bytes)
        pinned = self.pinned.setdefault(inode, Pinned(os.fstat(file).st_size, name))
        if (pinner, number) not in pinned.pinners:
            pinned.pinners.add((pinner, number))
            self.order.append((pinner, number, inode))

    def unpin(self, pinner: int, number: int) -> None:
        for each in self.order:
            if each[:2] == (pinner, number):
                self.order.remove(each)
                self.pinned[each[2]].pinners.discard((pinner, number))
                if not self.pinned[each[2]].pinners:
                    del self.pinned[each[2]]
                return

    def check(self) -> None:
        stats, cache = self.cache.stats(), self.cache
        here = self.here()
        inodes = set()
        for number in here:
            assert cache.ledger.views[number] == self.source.contents[number]
            memory = cache.ledger.memories.get(number)
            assert memory is not None
            inodes.add(os.fstat(memory.descriptor).st_ino)
        in_memory = sum(len(self.source.contents[number]) for number in here)
        lost = sum(pinned.bytes for inode, pinned in self.pinned.items() if inode not in inodes)
        assert stats["memory_bytes"] == in_memory
        assert stats["memory_used_bytes"] == in_memory + lost <= self.budget
        assert stats["pinned_bytes"] == sum(pinned.bytes for pinned in self.pinned.values())
        assert kept_numbers(cache) == here
        for pinner in range(3):
            wanted = cache.revoked(pinner)
            assert {(pinner, number) for number in wanted} <= {each[:2] for each in self.order}
        assert len(cache.fetches.in_flight) == cache.fetches._awaited == 0


@pytest.mark.parametrize("policy", [*POLICIES])
@examples(80)
@given(
    operations=st.lists(OPERATIONS, min_size=5, max_size=60),
    room=st.integers(0, 6),
    mine=st.booleans(),
)
async def test_any_operations_agree_with_the_model(
    policy: str, operations: list[tuple[object, ...]], room: int, mine: bool
) -> None:
    source = ChunkSource(range(8))
    budget = room * len(source.contents[4])
    cache = make_cache(source, budget, policy=policy, mine=mine)
    if policy == "lfu":
        cache.replacement.admission.is_worth_more = lambda unit, others: True  # type: ignore[method-assign]  # more goes

    before = descriptors()
    async with running(cache):
        model = Model(source, cache, budget, mine=mine)
        for operation in operations:
            await model.do(operation)
        for pinner in range(3):
            await model.do(("unpin_all", pinner))
        assert not model.pinned
    assert descriptors() == before
