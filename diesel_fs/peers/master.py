"""The master of a node: holds the node's share of a task's dataset, for all who read on the node.

Owned here: who is asked for a chunk, and what follows when members come and go. Not owned: bytes in
memory and on disk (`cache.py`), one other master (`peer.py`, `acceptor.py`), the clients of this
one (`local.py`), where members are registered (`registry.py`).

What this master cannot give it says so at once, and whoever asked reads from the store: nothing
that happens to members is an error of a reader. One thread (trio); what blocks is in threads.
"""

import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import trio

from ..cache.tiers import ChunkKey, verify_chunk
from ..errors import ConflictError, DieselError, FormatError, PermissionDenied
from ..format.object_names import chunk_object
from ..format.snapshot.reader import Snapshot
from ..storage.objects.store import ObjectStore
from .acceptor import Acceptor
from .membership import ANY_INSTANCE, TTL_S, Member, Membership
from .node_cache import FETCHES, FILL_FETCHES, Fetch, NodeCache
from .ownership import Ownership
from .peer import LocalIdentity, Peer
from .registry import Registry
from .wire import ABSENT, FAILED, GIVEN, NOT_MINE, SOURCE_HERE, SOURCE_NONE, DamagedPart, Parts

log = logging.getLogger("diesel.task")

RENEW_S = 2.0
"""Between renewals: a third of what a registration lasts."""

GATHER_S = 10.0
"""A task that begins is looked at more often for so long, until all its nodes are there: what one
master fetches that another will own in a moment crosses the network once more."""

GATHER_RENEW_S = 0.25

LOAD_S = 3.0
"""Who asks for a chunk that is on its way waits so long: a client gives its master up after 5 s."""

_LIVE_LEVELS = 8  # so many degrees of what is alive: those with more of it are filled first
_PREVIOUS_OWNERS_MAX = 8  # memberships that are remembered, for what has moved since

Ranks = npt.NDArray[np.int64]
Offsets = npt.NDArray[np.uint32]
Sources = npt.NDArray[np.uint16]
Views = list[memoryview]


class _ChunkOwners:
    """Who owns the chunks of a version, now and under the memberships before."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.ranks: list[int] = []  # of the members
        self.live_fraction: npt.NDArray[np.float64] = np.ones(
            snapshot.chunk_count
        )  # see `compute_live_fraction`
        self._has_live_fraction = False
        self.owner: Ranks = np.full(snapshot.chunk_count, -1, np.int64)
        self._before: list[Ranks] = []
        self._ownership: Ownership | None = None
        self._world = 0

    def compute(self, ranks: Sequence[int], world: int) -> Ranks:
        """The owners where these ranks are members. Takes its time: 0.3 s for 1,000 nodes."""
        if self._ownership is None or self._world < world:
            ids, sizes = self.snapshot.chunk_ids, self.snapshot.chunk_sizes
            self._ownership, self._world = Ownership(ids, sizes, world), world
        living = np.zeros(self._world, np.bool_)
        living[list(ranks)] = True
        return self._ownership.owners(living)

    def compute_live_fraction(self) -> None:
        """Find out how much of each chunk is anybody's file: of what was overwritten or removed
        nothing is ever read. Takes its time: 0.2 s for 10 million files."""
        if not self._has_live_fraction:
            sizes = np.maximum(self.snapshot.chunk_sizes, 1)
            self.live_fraction = self.snapshot.used_bytes() / sizes
            self._has_live_fraction = True

    def live_owned(self, rank: int, owner: Ranks | None = None) -> npt.NDArray[np.bool_]:
        """The chunks of a node, without those that are known to be dead; by other owners, too."""
        mine: npt.NDArray[np.bool_] = (self.owner if owner is None else owner) == rank
        return mine & (self.live_fraction > 0)

    def set_owners(self, ranks: list[int], owner: Ranks, before: Ranks | None = None) -> None:
        """Other members, other owners. `before`: what they may have been before this node came."""
        self.ranks = ranks
        self._before = [*([] if before is None else [before]), self.owner, *self._before]
        self._before = self._before[:_PREVIOUS_OWNERS_MAX]
        self.owner = owner

    def possible_holders(self, chunk: int) -> list[int]:
        """The ranks that may hold a chunk, the most likely first."""
        found = dict.fromkeys(int(each[chunk]) for each in (self.owner, *self._before))
        return [rank for rank in found if rank >= 0]


class Master:
    """One node of a task, from its first membership to its end."""

    def __init__(
        self,
        me: LocalIdentity,
        member: Member,
        snapshot: Snapshot,
        objects: ObjectStore,
        registry: Registry,
        make_cache: Callable[[Fetch], NodeCache],
        *,
        world: int,
        oneshot: bool,
    ) -> None:
        """`member` is how this node registers; `make_cache` makes what it holds."""
        self._me = me
        self._member = member
        self._objects = objects
        self._registry = registry
        self._world = world
        self._oneshot = oneshot
        self._threads = trio.CapacityLimiter(FETCHES + FILL_FETCHES)
        self._cache = make_cache(self._fetch)
        self._shares = _ChunkOwners(snapshot)
        self._peers: dict[int, _PeerEntry] = {}
        self._silent: set[int] = set()  # of those that are in a list
        self._not_renewed: dict[int, Member] = {}  # since nobody told who is in the task
        self._not_renewed_until_s = 0.0
        self._acceptor = Acceptor(me, self)
        self._found = Membership((member,), me.secret)  # as was told last
        self._owners_lock = trio.Lock()
        self._renew_now = trio.Event()
        self._all_present = trio.Event()  # set when all nodes have been there
        self._counts = Counter(dict.fromkeys(_COUNTS, 0))

    @property
    def rank(self) -> int:
        """The number of this node."""
        return self._member.rank

    @property
    def cache(self) -> NodeCache:
        """What this node holds."""
        return self._cache

    @property
    def snapshot(self) -> Snapshot:
        """The version of the dataset whose chunks are asked for by number."""
        return self._shares.snapshot

    # Members

    async def run(
        self,
        first: Membership,
        listeners: Sequence[socket.socket],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Be a member until cancelled, until a newer master has this node's rank, or until this one
        may not be one any more. `first` says
        who is there; other masters come to `listeners`."""
        async with trio.open_nursery() as self._nursery:
            await self._nursery.start(self._cache.run)
            await self._apply_membership(first)
            self._nursery.start_soon(self._acceptor.serve, listeners)
            task_status.started()
            if self._oneshot:
                self._nursery.start_soon(self._fill)
            await self._renew_always()
            self._nursery.cancel_scope.cancel()

    async def _renew_always(self) -> None:
        gather_until_s = trio.current_time() + GATHER_S
        is_known = True
        while True:
            gathers = trio.current_time() < gather_until_s and not self._all_present.is_set()
            with trio.move_on_after(GATHER_RENEW_S if gathers else RENEW_S):
                await self._renew_now.wait()
            self._renew_now = trio.Event()
            try:
                found = await trio.to_thread.run_sync(self._registry.renew, self._member)
            except (ConflictError, PermissionDenied) as error:
                log.error("this master ends: %s", error)
                return
            except DieselError as error:  # who has been a member stays one for this node
                if is_known:
                    log.warning("nobody tells who is in the task: %s", error)
                is_known = False
                continue
            if not is_known:
                log.info("who is in the task is known again")
            if not is_known or found.was_forgotten:
                self._not_renewed = {rank: known.member for rank, known in self._peers.items()}
                self._not_renewed_until_s = trio.current_time() + TTL_S
            is_known = True
            await self._apply_membership(found)

    async def _apply_membership(self, found: Membership) -> None:
        """Go over to other members, where there are others."""
        self._found = found
        if found.secret != self._me.secret:
            self._set_secret(found.secret)
        counting = found.of_version(self.snapshot.version)
        others = self._still_counted(found)
        others |= {each.rank: each for each in counting if each.rank != self.rank}
        known = {rank: peer.member for rank, peer in self._peers.items()}
        self._counts["of_other_versions"] = len(found.members) - len(counting)
        for rank, member in known.items():
            if others.get(rank) != member:
                self._peers.pop(rank).scope.cancel()
                log.info("node %d %s", rank, "is another now" if rank in others else "has left")
        for rank, member in others.items():
            if rank not in self._peers:
                self._peers[rank] = _PeerEntry(member, Peer(self._me, member), trio.CancelScope())
                self._nursery.start_soon(self._keep, self._peers[rank])
                log.info("node %d is at %s", rank, member.address)
        self._silent &= self._peers.keys()
        await self._update_owners()
        if len(self._peers) + 1 >= self._world:
            self._all_present.set()

    def _still_counted(self, found: Membership) -> dict[int, Member]:
        """Members that may have to register again: all were forgotten while nobody could tell, and
        each renews in its own time. Were they none until then, connections would end, and what they
        hold be fetched by others."""
        if trio.current_time() >= self._not_renewed_until_s:
            self._not_renewed.clear()
        for member in found.members:
            self._not_renewed.pop(member.rank, None)
        version = self.snapshot.version
        return {rank: each for rank, each in self._not_renewed.items() if each.version == version}

    def _set_secret(self, secret: bytes) -> None:
        """The task has another secret: where all registrations were forgotten at once, the first
        who registers may be a new master, which has made one. All go over to that."""
        log.info("the task has another secret now")
        self._me = replace(self._me, secret=secret)
        self._acceptor.set_identity(self._me)
        for known in self._peers.values():
            known.scope.cancel()
        self._peers.clear()

    async def _update_owners(self) -> None:
        """Who owns what, by who is there."""
        async with self._owners_lock:  # who comes last knows best who is there
            shares = self._shares
            if await self._assign_owners(shares, self._peers.keys() - self._silent):
                self._cache.set_owned(shares.live_owned(self.rank))

    async def _assign_owners(self, shares: _ChunkOwners, others: Iterable[int]) -> bool:
        """Share out a version among this node and others; whether that is another sharing and the
        version still the one that is shown."""
        others = sorted(others)
        ranks = sorted([self.rank, *others])
        if shares.ranks == ranks:
            return False
        world = max(self._world, ranks[-1] + 1)
        owner = await trio.to_thread.run_sync(shares.compute, ranks, world)
        before = None
        if not shares.ranks and others:  # who is there already holds what will be ours
            before = await trio.to_thread.run_sync(shares.compute, others, world)
        shares.set_owners(ranks, owner, before)
        return shares is self._shares

    async def _keep(self, known: "_PeerEntry") -> None:
        with known.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(known.peer.run)
                if known.member.instance == ANY_INSTANCE:
                    nursery.start_soon(self._listen_for, known)

    async def _listen_for(self, known: "_PeerEntry") -> None:
        """Find out whether a node that is in a list, and does not register, is there."""
        rank, heard_s = known.member.rank, trio.current_time()
        while True:
            if await known.peer.ping():
                heard_s = trio.current_time()
            is_silent = trio.current_time() > heard_s + TTL_S
            if is_silent != (rank in self._silent):
                self._silent ^= {rank}
                log.info("node %d %s", rank, "is silent" if is_silent else "is there again")
                await self._update_owners()
            await trio.sleep(RENEW_S)

    async def switch_version(self, snapshot: Snapshot) -> None:
        """Go over to another version of the dataset; chunks that are in both stay. Its chunks have
        owners from the beginning: those that are there already, as far as is known."""
        shares = _ChunkOwners(snapshot)
        counting = self._found.of_version(snapshot.version)
        await self._assign_owners(shares, {each.rank for each in counting} - {self.rank})
        if snapshot.version <= self.snapshot.version:  # others have shown one, too
            return
        log.info("the task goes over to version %d", snapshot.version)
        for known in self._peers.values():
            known.scope.cancel()
        self._peers.clear()
        self._silent.clear()
        self._shares = shares
        self._member = replace(self._member, version=snapshot.version)
        self._me = replace(self._me, version=snapshot.version, sizes=snapshot.chunk_sizes)
        self._acceptor.set_identity(self._me)
        self._cache.switch_version(snapshot.chunk_ids, snapshot.chunk_sizes)
        self._cache.set_owned(shares.live_owned(self.rank))
        await self._apply_membership(self._found)
        self._renew_now.set()

    # What this node's readers ask

    async def read(self, parts: Parts, window: memoryview) -> tuple[Offsets, Sources]:
        """Put parts of chunks into the window: where each lies there, and who gave it.

        `parts` lie in their chunks and fit the window together.
        """
        if len(parts) == 1:
            return _FIRST, await self._read_one(parts, window)
        owner = self._shares.owner[parts[:, 0]]
        order = np.argsort(owner, kind="stable")
        ends = np.cumsum(parts[order, 2], dtype=np.int64)
        starts = ends - parts[order, 2]
        offsets = np.empty(len(parts), np.uint32)
        offsets[order] = starts
        sources = np.full(len(parts), SOURCE_NONE, np.uint16)
        cuts = (np.flatnonzero(np.diff(owner[order])) + 1).tolist()
        groups = list(zip([0, *cuts], [*cuts, len(parts)], strict=True))

        async def ask(first: int, end: int) -> None:
            rows = order[first:end]
            room = window[int(starts[first]) : int(ends[end - 1])]
            rank = int(owner[rows[0]])
            if rank == self.rank:
                sources[rows[await self._read_here(parts[rows], room)]] = SOURCE_HERE
            elif (known := self._peers.get(rank)) is not None:
                statuses = await known.peer.read(parts[rows], room, load=True)
                sources[rows[statuses == GIVEN]] = rank
                self._counts["from_peers"] += int(np.count_nonzero(statuses == GIVEN))

        if len(groups) == 1:
            await ask(*groups[0])
        else:
            async with trio.open_nursery() as nursery:
                for group in groups:
                    nursery.start_soon(ask, *group)
        self._counts["for_clients"] += len(parts)
        self._counts["left_to_clients"] += int(np.count_nonzero(sources == SOURCE_NONE))
        return offsets, sources

    async def _read_one(self, parts: Parts, window: memoryview) -> Sources:
        """`read` of one part: what many share weighs more than reading it."""
        rank, room = int(self._shares.owner[parts[0, 0]]), window[: int(parts[0, 2])]
        source = SOURCE_NONE
        if rank == self.rank:
            source = SOURCE_HERE if (await self._read_here(parts, room))[0] else source
        elif (known := self._peers.get(rank)) is not None:
            given = (await known.peer.read(parts, room, load=True))[0] == GIVEN
            source = rank if given else source
            self._counts["from_peers"] += int(given)
        self._counts["for_clients"] += 1
        self._counts["left_to_clients"] += source == SOURCE_NONE
        return np.array([source], np.uint16)

    async def _read_here(self, parts: Parts, room: memoryview) -> npt.NDArray[np.bool_]:
        """Put parts of this node's chunks one behind the other into `room`: which it was given."""
        found: Iterable[memoryview | None] | None = self._cache.find_parts(parts)
        if found is None:
            contents = await self._got(parts, [True] * len(parts), load=True)
            found = map(contents.get, range(len(parts)))
        given = np.ones(len(parts), np.bool_)
        at = 0
        for row, (size, content) in enumerate(zip(parts[:, 2].tolist(), found, strict=True)):
            if content is None:
                given[row] = False
            else:
                room[at : at + size] = content
            at += size
        return given

    async def pin(self, borrower: int, chunk: int, *, load: bool) -> int | None:
        """A descriptor of a whole chunk; None where it is not and will not be in memory here."""
        if load and self._cache.find(chunk) is None:
            with trio.move_on_after(LOAD_S):
                try:
                    size = int(self.snapshot.chunk_sizes[chunk])
                    await self._cache.get(chunk, size, load=True)
                except DieselError as error:
                    log.warning("chunk %d cannot be had: %s", chunk, error)
        return self._cache.pin(borrower, chunk)

    async def report_damage(self, damaged: DamagedPart) -> None:
        """A client says that what it was given does not match its checksum."""
        self._counts["damaged"] += 1
        where = f"{damaged.size} bytes at {damaged.start} of chunk {damaged.chunk}"
        if damaged.source == SOURCE_HERE:
            log.error("what this node gave is damaged: %s", where)
            await self._cache.recheck(damaged.chunk)
        elif (known := self._peers.get(damaged.source)) is not None:
            log.error("%s gave damaged bytes: %s", known.peer, where)
            known.peer.record_damage()

    # What other nodes ask

    def answer_from_memory(self, parts: Parts) -> list[memoryview] | None:
        """All of these parts, where all of them are in memory."""
        return self._cache.find_parts(parts)

    async def answer(
        self, rank: int, parts: Parts, *, load: bool
    ) -> tuple[bytes, list[memoryview]]:
        """A status for each part, and the bytes of those that are given."""
        if rank not in self._peers:  # it has come just now
            self._renew_now.set()
        mine = (self._shares.owner[parts[:, 0]] == self.rank).tolist()
        failed: set[int] = set()
        found = await self._got(parts, mine, load=load, failed=failed)
        statuses, contents = bytearray(), []
        for row, (chunk, is_mine) in enumerate(zip(parts[:, 0].tolist(), mine, strict=True)):
            if row in found:
                statuses.append(GIVEN)
                contents.append(found[row])
            elif chunk in failed:
                statuses.append(FAILED)
            else:
                statuses.append(ABSENT if is_mine else NOT_MINE)
                self._counts["not_mine"] += not is_mine
        return bytes(statuses), contents

    # Getting chunks

    async def _got(
        self, parts: Parts, mine: Sequence[bool], *, load: bool, failed: set[int] | None = None
    ) -> dict[int, memoryview]:
        """Parts by row, as far as their chunks are here or, of those that are mine, soon will be.

        `failed`: the chunks that could not be fetched.
        """
        rows: dict[int, list[int]] = {}
        spans: dict[int, list[tuple[int, int]]] = {}
        for row, (chunk, start, size) in enumerate(parts.tolist()):
            rows.setdefault(chunk, []).append(row)
            spans.setdefault(chunk, []).append((start, size))
        found: dict[int, memoryview] = {}

        async def get(chunk: int) -> None:
            may_load = load and mine[rows[chunk][0]]
            if not may_load and not self._cache.holds(chunk):
                return  # what is on its way here may be waiting for the node that asks
            try:
                contents = await self._cache.read(chunk, spans[chunk], load=may_load)
            except DieselError as error:
                log.warning("chunk %d cannot be had: %s", chunk, error)
                if failed is not None:
                    failed.add(chunk)
            else:
                found.update(zip(rows[chunk], contents or (), strict=False))

        with trio.move_on_after(LOAD_S):
            if len(spans) == 1:
                await get(next(iter(spans)))
            else:
                async with trio.open_nursery() as nursery:
                    for chunk in spans:
                        nursery.start_soon(get, chunk)
        return found

    async def _fetch(self, chunk: int, room: memoryview) -> None:
        """Fill `room` with a chunk, from a node that may hold it, else from the store."""
        shares = self._shares
        snapshot = shares.snapshot
        whole = np.array([(chunk, 0, len(room))], np.uint32)
        for rank in shares.possible_holders(chunk):
            known = self._peers.get(rank)
            if known is None:
                continue
            is_owner = rank == int(shares.owner[chunk])
            statuses = await known.peer.read(whole, room, load=is_owner)
            if statuses[0] == GIVEN and shares is self._shares:
                key = ChunkKey(snapshot.identity, snapshot.chunk_ids[chunk])
                try:
                    await trio.to_thread.run_sync(verify_chunk, key, room)
                except FormatError:
                    log.error("%s gave a damaged chunk %d", known.peer, chunk)
                    known.peer.record_damage()
                    continue
                self._counts["chunks_from_peers"] += 1
                return
        name = chunk_object(snapshot.identity, snapshot.chunk_ids[chunk])
        await trio.to_thread.run_sync(self._objects.read_into, name, 0, room, limiter=self._threads)
        self._counts["chunks_from_store"] += 1

    async def _fill(self) -> None:
        """Fetch this node's whole share behind whatever is asked for."""
        with trio.move_on_after(GATHER_S):
            await self._all_present.wait()
        while True:  # of each version
            shares = self._shares
            await trio.to_thread.run_sync(shares.compute_live_fraction)
            if shares is not self._shares:
                continue
            self._cache.set_owned(shares.live_owned(self.rank))
            chunks = np.arange(shares.snapshot.chunk_count)
            chunks = np.roll(chunks, -len(chunks) * self.rank // self._world)
            worth = np.ceil(shares.live_fraction[chunks] * _LIVE_LEVELS)
            await self._cache.prefetch_owned(chunks[np.argsort(-worth, kind="stable")])

    async def flush_to_disk(self) -> None:
        """At the end, after `run`: what is in memory and this node's comes to its disk, for who
        will be this node again. Then all nodes will be there: they leave one by one, and who is
        left owns more and more. May be cancelled anywhere."""
        shares = self._shares
        owner = await trio.to_thread.run_sync(
            shares.compute, range(self._world), self._world, abandon_on_cancel=True
        )
        await trio.to_thread.run_sync(shares.compute_live_fraction, abandon_on_cancel=True)
        self._cache.set_owned(shares.live_owned(self.rank))
        await self._cache.flush_to_disk(shares.live_owned(self.rank, owner))

    def stats(self) -> dict[str, object]:
        """What this node is, holds and did."""
        return {
            "rank": self.rank,
            "world": self._world,
            "version": self.snapshot.version,
            "members": len(self._shares.ranks),
            **self._counts,
            "acceptor": self._acceptor.stats(),
            "holdings": self._cache.stats(),
            "peers": {str(rank): each.peer.stats() for rank, each in self._peers.items()},
        }


class _PeerEntry(NamedTuple):
    member: Member
    peer: Peer
    scope: trio.CancelScope


_FIRST: Offsets = np.zeros(1, np.uint32)

_COUNTS = (
    "of_other_versions", "for_clients", "left_to_clients", "from_peers", "not_mine",
    "damaged", "chunks_from_peers", "chunks_from_store",
)  # fmt: skip
