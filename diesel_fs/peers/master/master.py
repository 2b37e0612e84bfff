"""The master's control plane: one node's part in a task.

It follows the members of the task, knows the owner of each chunk, and shows that to its clients
(`members/owner_table.py`). Its `NodeCache` keeps this node's chunks. It answers the reads that the
data plane cannot answer at once (`AnswerSource`), asks other masters (`peer.py`) and the store for
chunks, and exchanges readers' plans with other masters (`plan/`). Parts that the master cannot
give, a reader reads from the store: so no reader gets an error if members come, go or fail.

Concurrency. Everything runs in one trio loop; calls that block (the registry, the store, computing
owners, checking chunks) run in threads. Three things change while a task waits:

- Members: the task that renews replaces entries of `_peers`, and cancelling an entry's scope ends
  all requests to that master. So a request looks its peer up and does not keep it.
- Owners: `_owners_lock` lets one assignment be computed at a time; `_assign_owners` gives the
  result up if the version has changed meanwhile.
- The version: `switch_version` first computes the new owners, and then changes snapshot, owner
  table, cache, plan and identity between two waits, so no task sees a mixture. A task that keeps
  `owners` across a wait compares it with `_owners` afterwards.

A new version or secret ends all connections: no request is answered by chunk numbers of another
version.
"""

import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import trio

from ...cache.tiers import ChunkKey, verify_chunk
from ...errors import ConflictError, DieselError, FormatError, PermissionDenied
from ...format.object_names import chunk_object
from ...format.snapshot.reader import Snapshot
from ...storage.objects.store import ObjectStore
from ..handshake import LocalIdentity
from ..local_wire import DamagedPart, TaskView
from ..members.chunk_owners import ChunkOwners, Ranks
from ..members.membership import ANY_INSTANCE, TTL_S, Member, Membership
from ..members.owner_table import OwnerTable
from ..members.registry import Registry
from ..node.chunk_table import ChunkTable
from ..node.fetches import FETCHES, FILL_FETCHES, Fetch
from ..node.node_cache import NodeCache
from ..plan.messages import UNKNOWN
from ..plan.publisher import PlanPublisher
from ..plan.task_plan import EXCHANGE_S, TaskPlan
from ..wire import ABSENT, FAILED, GIVEN, NOT_MINE, WORKING_S, Parts, working_s
from .acceptor import Acceptor
from .peer import Peer

log = logging.getLogger("diesel.task")

RENEW_S = 2.0
"""A third of a registration's lifetime."""

GATHER_S, GATHER_RENEW_S = 10.0, 0.25
"""Until all nodes are there, but at most for `GATHER_S`, a master renews every `GATHER_RENEW_S`, to
learn of new nodes soon: if a new node becomes the owner of a chunk that this node has just fetched,
the chunk crosses the network twice."""

LOAD_S = 3.0
"""How long a request waits for a fetch; a client gives up its master after 5 s. For several parts,
both wait longer (`wire.working_s`)."""

_LIVE_LEVELS = 8  # the live parts of chunks are rounded to eighths, to fetch in order

_COUNTS = (
    "other_version_members", "not_owned", "passed_on", "damage_reports", "chunks_from_peers",
    "chunks_from_store",
)  # fmt: skip


class _PeerEntry(NamedTuple):
    """`scope` has all tasks that talk to the peer."""

    member: Member
    peer: Peer
    scope: trio.CancelScope


@dataclass(frozen=True, slots=True)
class MasterOptions:
    world: int
    """How many nodes the task has if all are there."""
    oneshot: bool = False
    """Whether to fetch all of this node's chunks from the start."""
    renew_s: float = RENEW_S
    gather_renew_s: float = GATHER_RENEW_S
    ttl_s: float = TTL_S


class Master:
    def __init__(
        self,
        me: LocalIdentity,
        member: Member,
        snapshot: Snapshot,
        objects: ObjectStore,
        registry: Registry,
        make_cache: Callable[[Fetch], NodeCache],
        options: MasterOptions,
    ) -> None:
        """`make_cache` gets the function that fetches a chunk."""
        self.rank = member.rank
        self._me = me
        self._member = member
        self._objects = objects
        self._registry = registry
        self._options, self._world = options, options.world
        self._threads = trio.CapacityLimiter(FETCHES + FILL_FETCHES)
        self.cache = make_cache(self._fetch)
        self._owners = ChunkOwners(snapshot)
        self.plan = TaskPlan(snapshot, self.rank, self.cache)
        self.owner_table = OwnerTable(snapshot.chunk_count)
        self._view: TaskView | None = None
        self._peers: dict[int, _PeerEntry] = {}
        self._silent: set[int] = set()  # ranks in --peers that do not answer
        # Members that have not renewed since an outage of the registry, and until when they count
        self._not_renewed: dict[int, Member] = {}
        self._not_renewed_until_s = 0.0
        self._acceptor = Acceptor(me, self)
        self._membership = Membership((member,), me.secret)
        self._owners_lock = trio.Lock()
        self._renew_now = trio.Event()
        self._all_present = trio.Event()
        self._counts = Counter(dict.fromkeys(_COUNTS, 0))

    @property
    def snapshot(self) -> Snapshot:
        """Chunk numbers belong to this snapshot."""
        return self._owners.snapshot

    @property
    def owner(self) -> Ranks:
        return self._owners.owner

    @property
    def task_view(self) -> TaskView:
        return TaskView(
            rank=self.rank,
            task=self._me.task.digest,
            secret=self._me.secret,
            has_tls=self._me.certificate is not None,
            members=tuple(self._peers[rank].member for rank in sorted(self._peers)),
        )

    # Members

    async def run(
        self,
        first: Membership,
        listeners: Sequence[socket.socket],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Be a member until cancelled, or the registry refuses this master, or a newer one takes
        its rank. `first` has the members at the start."""
        async with trio.open_nursery() as self._nursery:
            await self._nursery.start(self.cache.run)
            self._nursery.start_soon(self.plan.run)
            self._nursery.start_soon(self.cache.fetches.prefetch_planned)
            await self._apply_membership(first)
            await self._nursery.start(self._acceptor.serve, listeners)
            task_status.started()
            if self._options.oneshot:
                self._nursery.start_soon(self._fill)
            await self._renew_always()
            self._nursery.cancel_scope.cancel()

    async def _renew_always(self) -> None:
        options = self._options
        gather_until_s = trio.current_time() + GATHER_S
        registry_answers = True
        while True:
            gathers = trio.current_time() < gather_until_s and not self._all_present.is_set()
            with trio.move_on_after(options.gather_renew_s if gathers else options.renew_s):
                await self._renew_now.wait()
            self._renew_now = trio.Event()
            try:
                membership = await trio.to_thread.run_sync(self._registry.renew, self._member)
            except (ConflictError, PermissionDenied) as error:
                log.error("this master ends: %s", error)
                return
            except DieselError as error:
                if registry_answers:
                    log.warning("cannot reach the registry, all known members stay: %s", error)
                registry_answers = False
                continue
            if not registry_answers:
                log.info("the registry answers again")
            if not registry_answers or membership.was_forgotten:
                self._not_renewed = {rank: entry.member for rank, entry in self._peers.items()}
                self._not_renewed_until_s = trio.current_time() + self._options.ttl_s
            registry_answers = True
            await self._apply_membership(membership)

    async def _apply_membership(self, membership: Membership) -> None:
        self._membership = membership
        if membership.secret != self._me.secret:
            self._set_secret(membership.secret)
        same_version = membership.of_version(self.snapshot.version)
        others = self._still_counted(membership)
        others |= {each.rank: each for each in same_version if each.rank != self.rank}
        self._counts["other_version_members"] = len(membership.members) - len(same_version)
        for rank, member in [(rank, entry.member) for rank, entry in self._peers.items()]:
            if others.get(rank) != member:
                self._peers.pop(rank).scope.cancel()
                self.plan.forget(rank)
                log.info("node %d %s", rank, "was replaced" if rank in others else "has left")
        for rank, member in others.items():
            if rank not in self._peers:
                self._peers[rank] = _PeerEntry(member, Peer(self._me, member), trio.CancelScope())
                self._nursery.start_soon(self._run_peer, self._peers[rank])
                log.info("node %d is at %s", rank, member.address)
        self._silent &= self._peers.keys()
        self._note_view()
        await self._update_owners()
        if len(self._peers) + 1 >= self._world:
            self._all_present.set()

    def _note_view(self) -> None:
        view = self.task_view
        if view != self._view:
            self._view = view
            self.owner_table.bump_generation()

    def _still_counted(self, membership: Membership) -> dict[int, Member]:
        """Members that may still have to register again after an outage of the registry. Otherwise
        connections to them would end, and other nodes would fetch their chunks."""
        if trio.current_time() >= self._not_renewed_until_s:
            self._not_renewed.clear()
        for member in membership.members:
            self._not_renewed.pop(member.rank, None)
        version = self.snapshot.version
        return {rank: each for rank, each in self._not_renewed.items() if each.version == version}

    def _set_secret(self, secret: bytes) -> None:
        """If the registry has lost the secret, the first master to register makes another one."""
        log.info("the task has another secret now")
        self._me = replace(self._me, secret=secret)
        self._acceptor.set_identity(self._me)
        for entry in self._peers.values():
            entry.scope.cancel()
        self._peers.clear()

    async def _update_owners(self) -> None:
        async with self._owners_lock:  # the last caller knows the members best
            owners = self._owners
            if await self._assign_owners(owners, self._peers.keys() - self._silent):
                self.cache.set_owned(owners.live_owned(self.rank))

    async def _assign_owners(self, owners: ChunkOwners, others: Iterable[int]) -> bool:
        """Returns whether the owners have changed and this is still the current version."""
        others = sorted(others)
        ranks = sorted([self.rank, *others])
        if owners.ranks == ranks:
            return False
        world = max(self._world, ranks[-1] + 1)
        owner = await trio.to_thread.run_sync(owners.compute, ranks, world)
        previous = None
        if not owners.ranks and others:  # others still have the chunks that are this node's now
            previous = await trio.to_thread.run_sync(owners.compute, others, world)
        owners.set_owners(ranks, owner, previous)
        if owners is not self._owners:
            return False
        self.owner_table.set_owners(owner)
        return True

    async def _run_peer(self, entry: _PeerEntry) -> None:
        with entry.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(entry.peer.run)
                nursery.start_soon(self._publish_plan, entry.peer)
                if entry.member.instance == ANY_INSTANCE:
                    nursery.start_soon(self._probe, entry)

    async def _publish_plan(self, peer: Peer) -> None:
        publisher = PlanPublisher(len(self.snapshot))
        while True:
            if not publisher.has_published:
                await self.plan.known.wait()
            news = publisher.news(self.plan.announcement())
            with suppress(StopIteration):
                body = next(news)
                while True:
                    body = news.send(await peer.send_plan(body))
            await trio.sleep(EXCHANGE_S)

    async def _probe(self, entry: _PeerEntry) -> None:
        """Ping a node from `--peers`, which does not register, and take over its chunks while it
        does not answer."""
        rank, heard_s = entry.member.rank, trio.current_time()
        while True:
            if await entry.peer.ping():
                heard_s = trio.current_time()
            is_silent = trio.current_time() > heard_s + self._options.ttl_s
            if is_silent != (rank in self._silent):
                self._silent ^= {rank}
                log.info("node %d %s", rank, "does not answer" if is_silent else "answers again")
                await self._update_owners()
            await trio.sleep(self._options.renew_s)

    async def switch_version(self, snapshot: Snapshot) -> None:
        """Switch to another version, unless it is older. Chunks in both versions stay. At first,
        the owners are this node and the members known to have the new version."""
        owners = ChunkOwners(snapshot)
        holders = self._membership.of_version(snapshot.version)
        await self._assign_owners(owners, {each.rank for each in holders} - {self.rank})
        if snapshot.version <= self.snapshot.version:  # another client was first
            return
        log.info("the task switches to version %d", snapshot.version)
        for entry in self._peers.values():
            entry.scope.cancel()
        self._peers.clear()
        self._silent.clear()
        self._owners = owners
        self.owner_table.close()
        self.owner_table = OwnerTable(snapshot.chunk_count)
        self.owner_table.set_owners(owners.owner)
        self._view = None
        self._member = replace(self._member, version=snapshot.version)
        self._me = replace(self._me, version=snapshot.version, sizes=snapshot.chunk_sizes)
        self.cache.switch_version(snapshot.chunk_ids, snapshot.chunk_sizes)
        self.plan.switch_version(snapshot)
        self._acceptor.set_identity(self._me)
        self.cache.set_owned(owners.live_owned(self.rank))
        await self._apply_membership(self._membership)
        self._renew_now.set()

    # Calls of this node's readers

    def adopt_local(self, accepted: socket.socket) -> None:
        self._acceptor.adopt_local(accepted)

    async def pin(self, pinner: int, chunk: int, *, load: bool) -> int | None:
        """As `NodeCache.pin`. `load`: fetch the chunk if it is not in memory."""
        if load and self.cache.find(chunk) is None:
            with trio.move_on_after(LOAD_S):
                try:
                    size = int(self.snapshot.chunk_sizes[chunk])
                    await self.cache.get(chunk, size, load=True)
                except DieselError as error:
                    log.warning("cannot load chunk %d: %s", chunk, error)
        return self.cache.pin(pinner, chunk)

    async def report_damage(self, damaged: DamagedPart) -> None:
        self._counts["damage_reports"] += 1
        what = f"{damaged.size} bytes at {damaged.start} of chunk {damaged.chunk}"
        if damaged.rank == self.rank:
            log.error("a client received damaged data from this node: %s", what)
            await self.cache.recheck(damaged.chunk)
        elif (entry := self._peers.get(damaged.rank)) is not None:
            log.error("%s sent damaged data: %s", entry.peer, what)
            entry.peer.record_damage()

    # Requests for chunks that are not in memory (`AnswerSource`)

    @property
    def table(self) -> ChunkTable:
        return self.cache.table

    def take_plan(self, rank: int, body: bytes) -> int:
        if rank == self.rank or rank not in self._peers:  # its plans would stay when it leaves
            self._renew_now.set()
            return UNKNOWN
        return self.plan.take(rank, body)

    async def answer(
        self, rank: int, parts: Parts, *, load: bool, through: bool
    ) -> tuple[bytes, list[memoryview]]:
        if rank != self.rank and rank not in self._peers:  # an unknown node
            self._renew_now.set()
        owner = self._owners.owner[parts[:, 0]]
        mine = (owner == self.rank).tolist()
        failed: set[int] = set()
        found: dict[int, memoryview] = {}
        async with trio.open_nursery() as nursery:
            if through:
                for other in sorted({*owner.tolist()} & self._peers.keys()):
                    rows = np.flatnonzero(owner == other)
                    nursery.start_soon(self._pass_on, self._peers[other], parts, rows, found)
            found.update(await self._collect(parts, mine, load=load, failed=failed))
        statuses, contents = bytearray(), []
        for row, (chunk, is_mine) in enumerate(zip(parts[:, 0].tolist(), mine, strict=True)):
            if row in found:
                statuses.append(GIVEN)
                contents.append(found[row])
            elif chunk in failed:
                statuses.append(FAILED)
            else:
                statuses.append(ABSENT if is_mine else NOT_MINE)
                self._counts["not_owned"] += not is_mine
        return bytes(statuses), contents

    async def _pass_on(
        self,
        entry: _PeerEntry,
        parts: Parts,
        rows: npt.NDArray[np.int64],
        found: dict[int, memoryview],
    ) -> None:
        wanted = parts[rows]
        ends = np.cumsum(wanted[:, 2], dtype=np.int64)
        room = np.empty(int(ends[-1]), np.uint8).data
        statuses = await entry.peer.read(wanted, room, load=True)
        starts = (ends - wanted[:, 2]).tolist()
        for row, status, start, end in zip(
            rows.tolist(), statuses.tolist(), starts, ends.tolist(), strict=True
        ):
            if status == GIVEN:
                found.setdefault(row, room[start:end].toreadonly())
        self._counts["passed_on"] += len(rows)

    # Getting chunks

    async def _collect(
        self, parts: Parts, mine: Sequence[bool], *, load: bool, failed: set[int] | None = None
    ) -> dict[int, memoryview]:
        """The contents of parts, by row: parts of chunks that this node has, and with `load` of
        chunks that it owns (`mine`, a flag for each row) if they come within `LOAD_S`. Adds chunks
        that could not be fetched to `failed`."""
        rows: dict[int, list[int]] = {}
        spans: dict[int, list[tuple[int, int]]] = {}
        for row, (chunk, start, size) in enumerate(parts.tolist()):
            rows.setdefault(chunk, []).append(row)
            spans.setdefault(chunk, []).append((start, size))
        found: dict[int, memoryview] = {}

        async def get(chunk: int) -> None:
            may_load = load and mine[rows[chunk][0]]
            if not may_load and not self.cache.holds(chunk):
                return  # a fetch in flight may itself wait for the node that asks
            try:
                contents = await self.cache.read(chunk, spans[chunk], load=may_load)
            except DieselError as error:
                log.warning("cannot load chunk %d: %s", chunk, error)
                if failed is not None:
                    failed.add(chunk)
            else:
                found.update(zip(rows[chunk], contents or (), strict=False))

        with trio.move_on_after(LOAD_S + working_s(len(parts)) - WORKING_S):
            if len(spans) == 1:
                await get(next(iter(spans)))
            else:
                async with trio.open_nursery() as nursery:
                    for chunk in spans:
                        nursery.start_soon(get, chunk)
        return found

    async def _fetch(self, chunk: int, room: memoryview) -> None:
        owners = self._owners
        snapshot = owners.snapshot
        whole = np.array([(chunk, 0, len(room))], np.uint32)
        for rank in owners.possible_holders(chunk):
            entry = self._peers.get(rank)
            if entry is None:
                continue
            is_owner = rank == int(owners.owner[chunk])
            statuses = await entry.peer.read(whole, room, load=is_owner)
            if statuses[0] == GIVEN and owners is self._owners:
                key = ChunkKey(snapshot.identity, snapshot.chunk_ids[chunk])
                try:
                    await trio.to_thread.run_sync(verify_chunk, key, room)
                except FormatError:
                    log.error("%s sent a damaged chunk %d", entry.peer, chunk)
                    entry.peer.record_damage()
                    continue
                self._counts["chunks_from_peers"] += 1
                return
        name = chunk_object(snapshot.identity, snapshot.chunk_ids[chunk])
        await trio.to_thread.run_sync(self._objects.read_into, name, 0, room, limiter=self._threads)
        self._counts["chunks_from_store"] += 1

    async def _fill(self) -> None:
        with trio.move_on_after(GATHER_S):
            await self._all_present.wait()
        while True:
            owners = self._owners
            await trio.to_thread.run_sync(owners.compute_live_fraction)
            if owners is not self._owners:
                continue
            self.cache.set_owned(owners.live_owned(self.rank))
            chunks = np.arange(owners.snapshot.chunk_count)
            # Each node begins elsewhere in the dataset
            chunks = np.roll(chunks, -len(chunks) * self.rank // self._world)
            live = np.ceil(owners.live_fraction[chunks] * _LIVE_LEVELS)
            await self.cache.fetches.prefetch_owned(chunks[np.argsort(-live, kind="stable")])

    async def flush_to_disk(self) -> None:
        """After `run`: write this node's chunks from memory to its disk. May be cancelled anywhere.

        Now, as nodes leave one by one, the others own more and more; so the chunks that this node
        owns when all are present, as in the next job, come first."""
        owners = self._owners
        owner = await trio.to_thread.run_sync(
            owners.compute, range(self._world), self._world, abandon_on_cancel=True
        )
        await trio.to_thread.run_sync(owners.compute_live_fraction, abandon_on_cancel=True)
        self.cache.set_owned(owners.live_owned(self.rank))
        await self.cache.flush_to_disk(owners.live_owned(self.rank, owner))

    def stats(self) -> dict[str, object]:
        """The counters and state that `Dataset.task_stats` and `dlcmd stats` show."""
        return {
            "rank": self.rank,
            "world": self._world,
            "version": self.snapshot.version,
            "members": len(self._owners.ranks),
            "shares": self._owners.shares(),
            **self._counts,
            "acceptor": self._acceptor.stats(),
            "node_cache": self.cache.stats(),
            "plan": self.plan.stats(),
            "peers": {str(rank): each.peer.stats() for rank, each in self._peers.items()},
        }
