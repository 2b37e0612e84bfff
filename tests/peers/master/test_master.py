"""Several masters in one loop: which node gives a chunk, and the consequences when members come and
go."""

import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
import trio

import diesel_fs
from diesel_fs.cache.policies.eviction import POLICIES
from diesel_fs.errors import ConflictError, MetadataError
from diesel_fs.format.object_names import chunk_object
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.peers.handshake import LocalIdentity
from diesel_fs.peers.local_wire import DamagedPart
from diesel_fs.peers.master.master import LOAD_S, Master, MasterOptions
from diesel_fs.peers.members import chunk_owners
from diesel_fs.peers.members.membership import ANY_INSTANCE, Member, Membership, TaskName
from diesel_fs.peers.members.registry import Registry
from diesel_fs.peers.node.fetches import Fetch
from diesel_fs.peers.node.node_cache import CacheOptions, NodeCache
from diesel_fs.peers.wire import ABSENT, GIVEN
from diesel_fs.storage.objects.store import ObjectStore, ReadWrapper

from ...waiting import soon
from ..connected_masters import parts
from ..node_caches import kept_numbers

CHUNKS = 24
SECRET = bytes(range(32))
HOPE_S = 20.0
SOURCE_HERE, SOURCE_NONE = -1, -2
"""The source of a part that is not another node: the node itself, or none."""


class Reads(ReadWrapper):
    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.of: Counter[str] = Counter()
        self.pause = threading.Event()
        self.pause.set()
        self.waiting = 0

    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        self.of[name] += 1
        self.waiting += 1
        assert self.pause.wait(HOPE_S)
        self.waiting -= 1
        super().read_into(name, start, buffer)


@dataclass
class FakeRegistry(Registry):
    members: dict[int, Member] = field(default_factory=dict)
    is_unavailable: bool = False
    silent: set[int] = field(default_factory=set)  # their renewals are still under way
    forgot: set[int] = field(
        default_factory=set
    )  # ranks that learn at their next renewal that they were forgotten
    secret: bytes = SECRET

    def renew(self, me: Member) -> Membership:
        until_s = time.monotonic() + HOPE_S
        while me.rank in self.silent and time.monotonic() < until_s:
            time.sleep(0.01)
        if self.is_unavailable:
            raise MetadataError("away")
        there = self.members.setdefault(me.rank, me)
        if there.instance != me.instance:
            raise ConflictError("a newer master")
        self.members[me.rank] = me
        found = Membership.from_members(self.members.values(), self.secret)
        found = replace(found, was_forgotten=me.rank in self.forgot)
        self.forgot.discard(me.rank)
        return found

    def leave(self, me: Member) -> None:
        self.members.pop(me.rank, None)

    def close(self) -> None: ...


Mask = npt.NDArray[np.bool_]
"""A flag for each chunk."""


class RecordingCache(NodeCache):
    """A node's cache that records the chunks that it would write to a disk."""

    flushed: list[list[Mask]]

    async def flush_to_disk(self, first: Mask) -> None:
        self.flushed.append([first, self.ledger.owned])


class Task:
    """A dataset, and masters that read it.

    `ttl_s` is how long registrations last. `flushed` has what caches wrote to disk at the end:
    the chunks to write first, and all chunks of the node.
    """

    def __init__(self, folder: Path) -> None:
        self.url = (folder / "store").as_uri()
        self.dataset = diesel_fs.connect("ds", self.url, create=True)
        for number in range(CHUNKS):
            self.put(f"f{number:02}", number)
        self.snapshot: Snapshot = self.dataset.snapshot
        self.registry = FakeRegistry()
        self.reads = Reads(self.dataset._repository.objects)
        self.ttl_s = 0.3
        self.flushed: list[list[Mask]] = []
        self._lives: dict[int, trio.CancelScope] = {}

    def put(self, path: str, seed: int) -> None:
        self.dataset.put(Random(seed).randbytes(30_000 + 100 * seed), path)
        self.dataset.flush()

    def whole(self, snapshot: Snapshot, chunk: int) -> bytes:
        name = chunk_object(snapshot.identity, snapshot.chunk_ids[chunk])
        return bytes(self.reads.inner.get(name))

    @asynccontextmanager
    async def node(
        self, rank: int, *, world: int = 3, oneshot: bool = False, policy: str = "lru"
    ) -> AsyncIterator[Master]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            version, sizes = self.snapshot.version, self.snapshot.chunk_sizes
            member = Member(rank, Random().randbytes(16), address, version)
            name = TaskName(self.snapshot.identity, "me", "t")
            first = self.registry.renew(member)
            me = LocalIdentity(rank, member.instance, name, version, first.secret, sizes)

            def make_cache(fetch: Fetch) -> NodeCache:
                cache = RecordingCache(
                    self.snapshot.identity, self.snapshot.chunk_ids, sizes,
                    CacheOptions(16 << 20, POLICIES[policy]), fetch,
                )  # fmt: skip
                cache.flushed = self.flushed
                return cache

            made = Master(
                me, member, self.snapshot, self.reads, self.registry, make_cache,
                MasterOptions(world, oneshot, 0.05, 0.02, self.ttl_s),
            )  # fmt: skip
            self._lives[rank] = scope = trio.CancelScope()

            async def live(*, task_status: trio.TaskStatus[None]) -> None:
                with scope:
                    await made.run(first, [listener], task_status=task_status)
                made.cache.close()

            async with trio.open_nursery() as nursery:
                await nursery.start(live)
                yield made
                scope.cancel()

    @asynccontextmanager
    async def nodes(self, count: int, policy: str = "lru") -> AsyncIterator[list[Master]]:
        async with AsyncExitStack() as stack:
            made = [self.node(rank, world=count, policy=policy) for rank in range(count)]
            found = [await stack.enter_async_context(each) for each in made]
            await soon(members(*found))
            yield found

    def kill(self, rank: int) -> None:
        self._lives[rank].cancel()

    async def check(self, node: Master, *, given: bool = True) -> Counter[int]:
        """Read a part of each chunk through a master as its client, and compare. Returns the number
        of parts from each source."""
        snapshot, owner = node.snapshot, node.owner
        records = [(chunk, 100 + chunk, 20_000) for chunk in range(snapshot.chunk_count)]
        statuses, views = await node.answer(node.rank, parts(*records), load=True, through=True)
        sources: Counter[int] = Counter()
        left = iter(views)
        for (chunk, start, size), status in zip(records, statuses, strict=True):
            if status == GIVEN:
                assert next(left) == self.whole(snapshot, chunk)[start : start + size]
                rank = int(owner[chunk])  # it gets the request, even if this node holds it
                sources[SOURCE_HERE if rank == node.rank else rank] += 1
            else:
                sources[SOURCE_NONE] += 1
        if given:
            assert SOURCE_NONE not in sources
        return sources


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return Task(tmp_path)


def members(*nodes: Master) -> Callable[[], bool]:
    return lambda: all(node.stats()["members"] == len(nodes) for node in nodes)


async def test_F10_the_store_is_read_once_for_any_number_of_nodes(task: Task) -> None:
    async with task.nodes(3) as nodes:
        async with trio.open_nursery() as nursery:
            for node in nodes * 3:
                nursery.start_soon(task.check, node)
        here = 0
        for node in nodes:
            found = await task.check(node)
            assert sum(found[rank] for rank in (0, 1, 2) if rank != node.rank) > CHUNKS / 3
            assert found[SOURCE_HERE] >= CHUNKS / 6
            here += found[SOURCE_HERE]
        assert set(task.reads.of.values()) == {1}
        assert len(task.reads.of) == here == CHUNKS
        kept = [kept_numbers(node.cache) for node in nodes]
        assert sum(map(len, kept)) == len(set.union(*kept))


async def test_a_dead_nodes_share_moves_to_others_and_back(task: Task) -> None:
    async with task.node(0) as a, task.node(1) as b:
        async with task.node(2) as c:
            await soon(members(a, b, c))
            share = (await task.check(c))[SOURCE_HERE]
            await task.check(a)
            task.kill(2)
            await soon(lambda: not a._peers[2].peer.stats()["connected"])
            found = await task.check(a, given=False)
            assert found[SOURCE_NONE] == share, "the dead node's chunks are left to the reader"
        del task.registry.members[2]
        await soon(members(a, b))
        before = task.reads.of.total()
        for node in (a, b, a):
            await task.check(node)
        assert task.reads.of.total() - before == share, "only its share is read again, once"
        async with task.node(2) as c:
            await soon(members(a, b, c))
            before = task.reads.of.total()
            assert (await task.check(c))[SOURCE_HERE] == share
            assert (await task.check(a))[2] == share, "it is used again"
            assert task.reads.of.total() == before, (
                "it got its share from the nodes that had taken it over"
            )


async def test_oneshot_loads_each_share_without_a_reader_and_once(task: Task) -> None:
    async with (
        task.node(0, oneshot=True) as a,
        task.node(1, oneshot=True) as b,
        task.node(2, oneshot=True) as c,
    ):
        await soon(lambda: task.reads.of.total() >= CHUNKS)
        for node in (a, b, c):
            await task.check(node)
        assert set(task.reads.of.values()) == {1}, "no node began before all were there"


async def test_oneshot_skips_dead_chunks_and_begins_with_fully_live_ones(task: Task) -> None:
    for path in ("half", "other"):
        task.dataset.put(Random(path).randbytes(30_000), path)
    task.dataset.flush()
    [half] = set(task.dataset.snapshot.chunk_ids) - set(task.snapshot.chunk_ids)
    for path in ("other", *(f"f{number:02}" for number in range(10))):
        task.put(path, 50)
    task.snapshot = task.dataset.snapshot
    count = task.snapshot.chunk_count
    dead = {chunk for chunk in range(count) if not task.snapshot.used_bytes()[chunk]}
    assert (count, len(dead)) == (CHUNKS + 12, 10)
    names = [chunk_object(task.snapshot.identity, each) for each in task.snapshot.chunk_ids]
    async with task.node(0, world=1, oneshot=True) as node:
        await soon(lambda: node.cache.stats()["share_held_chunks"] == count - len(dead))
        await trio.sleep(0.1)  # time in which more would come
        figures = node.cache.stats()
        assert figures["share_held_chunks"] == figures["share_chunks"] == count - len(dead)
        assert len(task.reads.of) == count - len(dead)
        assert kept_numbers(node.cache).isdisjoint(dead)
        order = [names.index(name) for name in task.reads.of]
        last = list(task.snapshot.chunk_ids).index(half)
        assert last < max(order), "it would not be the last by its number"
        assert last in order[-2:]  # two come at once


async def test_dead_chunks_are_not_kept_at_the_end(task: Task) -> None:
    for number in range(10):
        task.put(f"f{number:02}", 50)
    task.snapshot = task.dataset.snapshot
    async with task.nodes(1) as [node]:
        assert node.cache.stats()["share_chunks"] == CHUNKS + 10, "no reader has sent a request"
        await node.flush_to_disk()
    live = task.snapshot.used_bytes() > 0
    assert live.tolist() == [False] * 10 + [True] * CHUNKS
    [flushed] = task.flushed
    assert [mask.tolist() for mask in flushed] == [live.tolist()] * 2


async def test_the_older_of_two_masters_of_a_rank_ends_by_itself(task: Task) -> None:
    async with task.nodes(1):
        task.registry.members[0] = replace(task.registry.members[0], instance=b"r" * 16)
        await trio.sleep(0.5)
        assert not task._lives[0].cancel_called
    assert not task._lives[0].cancelled_caught


async def test_members_stay_while_the_registry_cannot_be_reached(task: Task) -> None:
    async with task.nodes(2) as [a, b]:
        task.registry.is_unavailable = True
        await trio.sleep(0.3)
        assert (await task.check(a))[1] > 0
        assert members(a, b)()


async def test_C3_members_have_a_TTL_to_renew(task: Task, caplog: pytest.LogCaptureFixture) -> None:
    """Redis has lost all registrations, and each master renews in its own time."""
    caplog.set_level("INFO", "diesel.task")
    task.ttl_s = 2.0
    async with task.nodes(4) as [a, *_]:
        task.registry.is_unavailable = True
        await soon(lambda: caplog.text.count("cannot reach the registry") == 4)
        kept = task.registry.members.copy()
        task.registry.members.clear()
        caplog.clear()
        task.registry.silent = {1, 2, 3}
        task.registry.is_unavailable = False
        await trio.sleep(0.5)
        assert a.stats()["members"] == 4
        task.registry.members[1] = kept[1]
        await trio.sleep(0.2)
        assert "has left" not in caplog.text
        assert "was replaced" not in caplog.text
        task.registry.members.pop(1)  # the member leaves
        task.registry.members[2] = replace(kept[2], instance=b"n" * 16)
        await soon(lambda: "node 2 was replaced" in caplog.text)
        await soon(lambda: "node 1 has left" in caplog.text)
        assert "node 3" not in caplog.text
        await soon(lambda: "node 3 has left" in caplog.text)
        task.registry.silent.clear()


async def test_C3_a_master_that_was_forgotten_keeps_the_other_members(
    task: Task, caplog: pytest.LogCaptureFixture
) -> None:
    """Redis was away for so short a time that no renewal failed, and has lost everything."""
    caplog.set_level("INFO", "diesel.task")
    task.ttl_s = 1.0
    async with task.nodes(2) as [a, _]:
        task.registry.silent = {1}
        await trio.sleep(0.1)
        task.registry.members.clear()
        task.registry.forgot = {0}
        await soon(lambda: not task.registry.forgot)
        await trio.sleep(0.3)
        assert a.stats()["members"] == 2
        await soon(lambda: "node 1 has left" in caplog.text)
        task.registry.silent.clear()


async def test_C3_all_members_take_over_a_new_secret(task: Task) -> None:
    """Redis was away for longer than registrations last, and a new node registered first
    afterwards."""

    async def is_given(node: Master, rank: int) -> bool:
        return (await task.check(node, given=False))[rank] > 0

    async with task.node(0) as a, task.node(1) as b:
        await soon(members(a, b))
        assert (await task.check(a))[1] > 0
        task.registry.members.clear()
        task.registry.secret = SECRET[::-1]
        async with task.node(2) as c:
            await soon(members(a, b, c))
            for node in (a, b, c):
                for other in {0, 1, 2} - {node.rank}:
                    await soon(partial(is_given, node, other))


async def test_F8_F9_silent_nodes_lose_their_share_and_the_last_one_reads_alone(task: Task) -> None:
    class Listed(FakeRegistry):
        def renew(self, me: Member) -> Membership:
            self.members[me.rank] = me
            listed = (
                each if each.rank == me.rank else replace(each, instance=ANY_INSTANCE)
                for each in self.members.values()
            )
            return Membership.from_members(listed, SECRET)

    task.registry = Listed()
    async with task.nodes(2) as [a, b]:
        await trio.sleep(0.5)  # longer than a silent node stays a member
        await soon(members(a, b))
        assert (await task.check(a))[1] > 0
        task.kill(1)
        await soon(members(a))
        assert (await task.check(a)) == {SOURCE_HERE: CHUNKS}


async def test_nodes_of_another_version_do_not_count_until_they_switch(task: Task) -> None:
    async with task.nodes(2) as [a, b]:
        await task.check(a)
        await task.check(b)
        task.put("new", 99)
        newer = task.dataset.snapshot
        before = task.reads.of.total()
        await a.switch_version(newer)
        await soon(members(a))
        assert await task.check(a) == {SOURCE_HERE: CHUNKS + 1}
        await soon(members(b))
        await task.check(b)
        await b.switch_version(newer)
        await soon(members(a, b))
        reads = task.reads.of.total() - before
        assert (await task.check(b))[0] > 0
        assert (await task.check(a))[1] > 0
        assert task.reads.of.total() - before <= reads + 1, "chunks of both versions stay"


async def test_a_new_version_has_owners_at_once(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owners are this node and those that have switched before it; otherwise all chunks would
    be read from the store."""
    computed = chunk_owners.ChunkOwners.compute

    def slow(
        self: chunk_owners.ChunkOwners, ranks: Sequence[int], world: int
    ) -> chunk_owners.Ranks:
        time.sleep(0.2)
        return computed(self, ranks, world)

    monkeypatch.setattr(chunk_owners.ChunkOwners, "compute", slow)
    nursery: trio.Nursery

    async def at_once(node: Master, snapshot: Snapshot) -> None:
        nursery.start_soon(node.switch_version, snapshot)
        await soon(lambda: node.snapshot is snapshot)

    async with task.node(0) as a, task.node(1) as b, trio.open_nursery() as nursery:
        await soon(members(a, b))
        for node in (a, b):
            await task.check(node)
        task.put("new", 99)
        newer = task.dataset.snapshot
        task.registry.silent = {0, 1}
        await trio.sleep(0.1)
        await at_once(a, newer)
        assert await task.check(a) == {SOURCE_HERE: CHUNKS + 1}, "no other node has switched"
        await b.switch_version(newer)
        assert await task.check(b) == {SOURCE_HERE: CHUNKS + 1}
        task.registry.silent.clear()
        await soon(members(a, b))
        task.put("newest", 98)
        newest = task.dataset.snapshot
        await a.switch_version(newest)
        await soon(lambda: b.stats()["other_version_members"])
        task.registry.silent = {0, 1}
        await trio.sleep(0.1)
        await at_once(b, newest)
        assert (await task.check(b))[0] > 0, "node 0 has switched already"
        task.registry.silent.clear()


async def test_F5_a_node_that_sends_damaged_parts_gets_no_more_requests(task: Task) -> None:
    async with task.nodes(2) as [a, _]:
        assert (await task.check(a))[1] > 0
        for _ in range(3):
            await a.report_damage(DamagedPart(0, 0, 10, 1))
        found = await task.check(a, given=False)
        assert found[1] == 0
        assert found[SOURCE_NONE] > 0
        for chunk in range(CHUNKS):  # the chunks that are kept are undamaged
            await a.report_damage(DamagedPart(chunk, 0, 10, a.rank))
        assert (await task.check(a, given=False))[SOURCE_HERE] == found[SOURCE_HERE]


async def test_a_node_keeps_first_the_chunks_it_owns_when_all_nodes_are_present(task: Task) -> None:
    """The nodes of a job that ends leave one by one."""
    async with task.node(0) as a:
        async with task.node(1) as b, task.node(2) as c:
            await soon(members(a, b, c))
            share = a.owner == 0
        del task.registry.members[1], task.registry.members[2]
        await soon(members(a))
        assert (a.owner == 0).all()
        await a.flush_to_disk()
        [(first, _)] = task.flushed
        assert first.tolist() == share.tolist()


async def test_a_request_for_a_chunk_in_memory_waits_for_no_other_node(task: Task) -> None:
    """Otherwise two nodes that fetch one chunk from each other would wait until a time-out."""
    async with task.nodes(2) as [a, b]:
        theirs = [chunk for chunk in range(CHUNKS) if a.owner[chunk] == 1]
        task.reads.pause.clear()
        async with trio.open_nursery() as nursery:
            wanted = parts((theirs[0], 0, 20_000))
            nursery.start_soon(partial(b.answer, 1, wanted, load=True, through=False))
            await soon(lambda: task.reads.waiting)
            with trio.fail_after(0.5):
                wanted = parts((theirs[0], 0, 10))
                statuses, _ = await b.answer(0, wanted, load=False, through=False)
            assert statuses == bytes([ABSENT])
            task.reads.pause.set()


@pytest.mark.parametrize(("count", "status"), [(1, ABSENT), (CHUNKS, GIVEN)])
async def test_masters_wait_longer_for_many_chunks_of_a_slow_store_than_for_one(
    task: Task, count: int, status: int
) -> None:
    """Otherwise the reader would read all of them from the store itself."""
    async with task.nodes(1) as [node]:
        task.reads.pause.clear()
        wanted = parts(*((chunk, 0, 20_000) for chunk in range(count)))
        answers: list[bytes] = []

        async def ask() -> None:
            statuses, _ = await node.answer(0, wanted, load=True, through=False)
            answers.append(statuses)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(LOAD_S + 0.5)
            task.reads.pause.set()
        assert answers == [bytes([status]) * count]
