"""Finds the tier that serves each read of a job: replays all accesses through the caches of its
nodes, with the eviction policies of `cache/policies/eviction.py` themselves. `reads.py` explains
rows, pushes and accesses. A *unit* is a chunk or a file, whichever the cache keeps.

A cache has one of three layouts:

- **chunks**: the cache of a task (`peers/node/`). Each chunk's owner among the nodes keeps it in
  memory or on its SSD. On a miss the owner fetches the chunk whole if there is free room, or if the
  policy (or ski rental, if the policy cannot decide) lets it replace others. Otherwise only the
  wanted bytes are read from the store, and not kept.
- **files**: single files in a node's memory. The policy decides after each read of a file.
- **log**: the order log (LCache, section III-B). A node's SSD holds the start of its order in the
  next epoch, limited to files that the node reads in this one, and is read in sequence.

Simplifications: memory and SSD of a node are one cache, and a chunk never moves between them; only
owners keep chunks; every fetch succeeds before the next read. Policies that know the future know
all epochs. A chunk is judged by the reads of its files, including those of the current push, as in
`peers/node/chunk_future.py`; a file is judged after its read.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..cache.policies.admission import SkiRentalAdmission
from ..cache.policies.costs import ReadCosts
from ..cache.policies.eviction import POLICIES, EvictionPolicy
from ..cache.policies.replacement import Shortage
from ..errors import UsageError
from ..orders.future import FutureUses, UnitOrder
from ..peers.members.ownership import Ownership
from ..peers.node.chunk_future import ChunkFuture
from .nodes import ForecastJob
from .reads import ALONE, IN_TASK, EpochReads, ForecastFiles, Mask, Numbers

Layout = Literal["chunks", "files", "log"]

ORDER_LOG = "order"
"""The order log's name among the policies."""

NAMES = (*POLICIES, ORDER_LOG)

Sizes = npt.NDArray[np.float64]

Sources = npt.NDArray[np.uint8]

MEMORY, DISK, PEER, STORE = range(4)
TIERS = ("memory", "disk", "peer", "store")

OnProgress = Callable[[float], None]
"""Called with the fraction done."""

_PROGRESS_ACCESSES = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class EpochSources:
    """The tiers and the costs of one epoch's reads.

    By row: `source`, and `is_resident` (a cache of files has the file, so the mount need not load
    it). By push: `requests` to the store, and the bytes from the store, over the network and from
    the node's own SSD. If another node owns a fetched chunk, the fetch counts for the push that the
    owner was loading then. `written_bytes` went to the SSDs of all nodes.
    """

    source: Sources
    is_resident: Mask
    requests: Numbers
    store_bytes: Numbers
    peer_bytes: Numbers
    disk_bytes: Numbers
    written_bytes: int


def check_policy(name: str) -> str:
    """Return `name`. Raises UsageError if no policy has it."""
    if name not in NAMES:
        raise UsageError(f"no policy is named {name!r}", advice=f"it is one of {', '.join(NAMES)}")
    return name


def looks_ahead(policy: str, layout: Layout) -> bool:
    """Whether the cache's contents in an epoch depend on the next epoch. Raises UsageError if no
    policy is named `policy`."""
    return layout == "log" or _knows_future(POLICIES[check_policy(policy)]())


def _knows_future(policy: EvictionPolicy) -> bool:
    return type(policy).set_future is not EvictionPolicy.set_future


def replay(
    job: ForecastJob,
    files: ForecastFiles,
    epochs: Sequence[EpochReads],
    policy: str,
    layout: Layout,
    following: EpochReads | None = None,
    progress: OnProgress = lambda _: None,
) -> list[EpochSources]:
    """The sources of the reads of each of the `epochs`. The caches are empty before the first.

    `following` is the epoch after the last: the order log and policies that know the future
    (`looks_ahead`) need it. Raises UsageError if units and reads are too many for `FutureUses`.
    """
    if layout == "log":
        return _replay_log(job, files, epochs, following)
    if layout == "files":
        return _replay_files(job, files, epochs, following, policy, progress)
    return _replay_chunks(job, files, epochs, following, policy, progress)


class UnitCache:
    """A cache of units (chunks or files): which units it holds, and which replace which.

    Units fill the `memory_bytes` before the `disk_bytes`. With `costs`, a unit replaces others only
    if the policy or ski rental (`cache/policies/admission.py`) finds that worth its cost; without,
    each unit that is read does, unless the policy refuses. Caches of chunks also pass `chunks`, for
    policies that know the future: each chunk's live bytes, and the bytes of one read of it.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        sizes: Sequence[int],
        memory_bytes: int,
        disk_bytes: int = 0,
        *,
        costs: ReadCosts | None = None,
        chunks: tuple[Sizes, Sizes] | None = None,
    ) -> None:
        self._policy = policy
        self._costs, self._chunks = costs, chunks
        self._knows_future = _knows_future(policy)
        self._sizes = sizes
        self._held = policy.sizes
        self._bytes_max = memory_bytes + disk_bytes
        self._free = [memory_bytes, disk_bytes]
        self._tier: dict[int, int] = {}
        # A policy that knows the future decides itself, so ski rental needs no record
        self._admission: SkiRentalAdmission | None = None
        if costs is not None and not self._knows_future:
            self._admission = SkiRentalAdmission(sizes, costs.read_s, self._bytes_max)
        self._replaces_always = costs is None
        self._position = 0  # reads that have come
        self._future: FutureUses | None = None
        self._chunk_future: ChunkFuture | None = None
        # For each chunk, a time until which too little of it will have been read to fetch it
        self._enough_at: dict[int, int] = {}
        self.written_bytes = 0

    def set_future(self, units: npt.NDArray[np.int32], unit_count: int) -> None:
        """Give a policy that knows the future the unit of each coming read, in order. Unit numbers
        are below `unit_count`."""
        if self._knows_future:
            self._future = FutureUses([UnitOrder(units)], unit_count)
            self._policy.set_future(self._future)
            if self._chunks is not None:
                self._chunk_future = ChunkFuture(self._future, *self._chunks)

    @property
    def decides_before_reads(self) -> bool:
        """Whether the policy judges a unit while the reads of the current push still count as to
        come. Then call `advance` after the push's accesses, otherwise before them."""
        return self._chunk_future is not None

    def advance(self, count: int) -> None:
        """Count the next `count` reads, all those of one push, as past."""
        self._position += count
        if self._future is not None:
            self._policy.note_passed(self._future.seek(0, self._position))

    def access(self, unit: int, wanted: int) -> tuple[int, bool]:
        """Read `wanted` bytes of a unit. Returns the tier that served them, and whether the unit
        was fetched whole, so that the cache has it now."""
        if unit in self._held:
            self._policy.record_access(unit)
            if self._admission is not None:
                self._admission.record_hits((unit,), wanted)
            return self._tier[unit], False
        self._policy.record_access(unit)
        if self._admission is not None:
            self._admission.record_miss(unit, wanted)
        size = self._sizes[unit]
        for tier, free in enumerate(self._free):
            if size <= free:
                self._insert(unit, size, tier)
                return STORE, True
        victims = self._victims(unit, size, wanted)
        if victims is None:
            if self._admission is not None:
                self._admission.record_unserved(wanted)
            return STORE, False
        tier = self._tier[victims[0]]
        for victim in victims:
            self._free[self._tier.pop(victim)] += self._sizes[victim]
            self._policy.remove(victim)
        if self._free[tier] < size:  # victims of both tiers make room together
            other = 1 - tier
            self._free[other] -= size - self._free[tier]
            self._free[tier] = size
        self._insert(unit, size, tier)
        return STORE, True

    def _is_read_too_seldom(self, unit: int, victim: int) -> bool:
        """Whether too little of a chunk will be read before `victim`, the first unit that it would
        replace, is needed again. An earlier result is reused until its time has passed; in a full
        shuffle this avoids most walks over the victims."""
        if self._future is None or self._chunk_future is None:
            return False
        enough_at = self._enough_at.get(unit)
        if enough_at is None or enough_at < self._position:  # one order: its position is the time
            number = self._chunk_future.whole_uses(unit)
            enough_at = self._enough_at[unit] = self._future.time_of_use(unit, number)
        return enough_at >= self._future.next_time_of(victim)

    def _insert(self, unit: int, size: int, tier: int) -> None:
        self._free[tier] -= size
        self._tier[unit] = tier
        self._policy.insert(unit, size)
        if tier == DISK:
            self.written_bytes += size
        if self._admission is not None:
            self._admission.reset_misses(unit)

    def _victims(self, unit: int, size: int, wanted: int) -> list[int] | None:
        """The units that `unit` shall replace, or None if the cache must not take it."""
        policy, room = self._policy, self._free[0] + self._free[1]
        if size > self._bytes_max or not policy.admits(unit, size, room):
            return None
        order = policy.eviction_order()
        first = next(order, None)
        if first is None or self._is_read_too_seldom(unit, first):
            return None
        shortage = Shortage[int](max(size - room, 1))  # neither tier alone has room for the unit
        if not shortage.choose(chain((first,), order), self._sizes.__getitem__):
            return None
        victims = shortage.victims
        uses_min = 1
        if self._chunk_future is not None and self._costs is not None:
            replaced = [self._sizes[each] for each in victims]
            uses_min = self._chunk_future.uses_min(
                unit, replaced, size, self._costs.read_s, is_stored=True
            )
        is_better = policy.replaces(unit, victims, uses_min)
        admission = self._admission
        if is_better is None and admission is not None:
            is_better = admission.has_credit(unit, wanted) and admission.is_worth_more(
                unit, victims
            )
            if is_better:
                admission.charge(unit, wanted)
        return victims if is_better or (is_better is None and self._replaces_always) else None


def _replay_chunks(
    job: ForecastJob,
    files: ForecastFiles,
    epochs: Sequence[EpochReads],
    following: EpochReads | None,
    policy: str,
    progress: OnProgress,
) -> list[EpochSources]:
    node, sizes = job.node, files.chunk_bytes
    owner = Ownership(files.chunk_ids, sizes, job.nodes).owners(np.ones(job.nodes, np.bool_))
    rate = min(job.store.connection_bytes_per_s, job.store.bytes_per_s)
    costs = ReadCosts(job.store.request_s, 1 / rate)
    size_list = sizes.tolist()
    live = np.bincount(files.chunk, files.stored, len(sizes)).astype(np.float64)
    each_read = live / np.maximum(np.bincount(files.chunk, minlength=len(sizes)), 1)
    caches = [
        UnitCache(
            POLICIES[policy](), size_list, node.memory_bytes, node.disk_bytes, costs=costs,
            chunks=(live, each_read),
        )
        for _ in range(job.nodes)
    ]  # fmt: skip
    accesses = [
        _Accesses(
            each.push, each.chunk, each.wanted, owner[each.chunk],
            np.bincount(each.access, minlength=len(each.chunk)),
        )
        for each in (*epochs, *([following] if following else []))
    ]  # fmt: skip
    sources = []
    for each, asked, found in zip(
        epochs,
        accesses[: len(epochs)],
        _run(caches, accesses, len(epochs), len(sizes), progress),
        strict=True,
    ):
        is_far = asked.cache != each.rank[each.push] // job.ranks
        source = np.where((found.source != STORE) & is_far, PEER, found.source).astype(np.uint8)
        # What another node fetches for this one crosses the network, too
        crosses = (source == PEER) | (found.is_fetched & is_far)
        fetched = np.flatnonzero(found.is_fetched)
        fetched_at = _pushes_of_nodes(job, each, each.push[fetched], asked.cache[fetched])
        sources.append(
            _summed(
                files, each, source[each.access], found.is_fetched, fetched_at, crosses, found,
                "chunks",
            )
        )  # fmt: skip
    return sources


def _pushes_of_nodes(
    job: ForecastJob, reads: EpochReads, push: npt.NDArray[np.int32], node: Numbers
) -> npt.NDArray[np.int32]:
    """For each fetch (`push` has the reader's push, `node` the owner): the owner's last push that
    is not later than `push`, or else its first."""
    found = push.copy()
    for each in range(job.nodes):
        mine = np.flatnonzero(reads.rank // job.ranks == each).astype(np.int32)
        asked = np.flatnonzero(node == each)
        if len(mine):
            at = np.maximum(mine.searchsorted(push[asked], side="right") - 1, 0)
            found[asked] = mine[at]
    return found


def _replay_files(
    job: ForecastJob,
    files: ForecastFiles,
    epochs: Sequence[EpochReads],
    following: EpochReads | None,
    policy: str,
    progress: OnProgress,
) -> list[EpochSources]:
    sizes = files.stored.tolist()
    caches = [UnitCache(POLICIES[policy](), sizes, job.node.memory_bytes) for _ in range(job.nodes)]
    accesses = []
    for each in (*epochs, *([following] if following else [])):
        push = each.push[each.access]
        node = (each.rank[push] // job.ranks).astype(np.int64)
        once = np.ones(len(push), np.int64)
        accesses.append(_Accesses(push, each.file, files.stored[each.file], node, once))
    found = _run(caches, accesses, len(epochs), len(files), progress)
    return [
        _summed(
            files,
            each,
            kept.source,
            none := np.zeros(len(each.push), np.bool_),
            each.push[none],
            none,
            kept,
            "files",
        )
        for each, kept in zip(epochs, found, strict=True)
    ]


def _replay_log(
    job: ForecastJob,
    files: ForecastFiles,
    epochs: Sequence[EpochReads],
    following: EpochReads | None,
) -> list[EpochSources]:
    logged_by = np.full(len(files), -1, np.int32)  # the node with each file in its log, or -1
    sources = []
    for each, then in zip(epochs, [*epochs[1:], following], strict=True):
        node = _node_of_rows(job, each)
        source = np.where(logged_by[each.file] == node, DISK, STORE).astype(np.uint8)
        reader = np.full(len(files), -1, np.int32)
        reader[each.file] = node
        logged_by[:] = -1
        if then is not None:
            next_node = _node_of_rows(job, then)
            by_node = np.argsort(next_node, kind="stable")
            size = files.stored[then.file[by_node]]
            node_bytes = np.bincount(next_node, files.stored[then.file], job.nodes)
            before = (np.cumsum(node_bytes) - node_bytes)[next_node[by_node]]
            is_in = np.cumsum(size) - before <= job.node.disk_bytes
            is_in &= reader[then.file[by_node]] == next_node[by_node]
            logged_by[then.file[by_node[is_in]]] = next_node[by_node[is_in]]
        written = int(files.stored[logged_by >= 0].sum())
        none = np.zeros(len(each.push), np.bool_)
        found = _Found(source, none, written)
        sources.append(_summed(files, each, source, none, each.push[none], none, found, "log"))
    return sources


def _node_of_rows(job: ForecastJob, reads: EpochReads) -> npt.NDArray[np.int32]:
    return reads.rank[reads.push[reads.access]] // np.int32(job.ranks)


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """For each access of one epoch (or row, in a cache of files or the order log): its tier, and
    whether its unit was fetched whole; and the bytes written to SSDs."""

    source: Sources
    is_fetched: Mask
    written_bytes: int


def _summed(
    files: ForecastFiles,
    reads: EpochReads,
    source: Sources,
    is_fetched: Mask,
    fetched_at: npt.NDArray[np.int32],
    crosses: Mask,
    found: _Found,
    layout: Layout,
) -> EpochSources:
    """Add up the costs of an epoch's reads by push.

    `source` is by row. By access: `is_fetched` (a whole chunk was fetched for it), and `crosses`
    (its bytes go over the network). `fetched_at` has the push for which each fetch is counted.
    """
    count = len(reads.rank)

    def by_push(push: npt.NDArray[np.int32], size: Numbers) -> Numbers:
        return np.bincount(push, size, count).astype(np.int64)

    limits = IN_TASK if layout == "chunks" else ALONE
    past = (source == STORE) & ~is_fetched[reads.access]
    requests, store_bytes = reads.requests(files, past, limits)
    whole_bytes = files.chunk_bytes[reads.chunk[is_fetched]].astype(np.int64)
    on_disk = source == DISK
    push = reads.push[reads.access]
    return EpochSources(
        source,
        source == MEMORY if layout == "files" else np.zeros(len(source), np.bool_),
        requests + np.bincount(fetched_at, minlength=count),
        store_bytes + by_push(fetched_at, whole_bytes),
        by_push(reads.push[crosses], reads.wanted[crosses]),
        by_push(push[on_disk], files.stored[reads.file[on_disk]]),
        found.written_bytes,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Accesses:
    """For each access of one epoch: its push, its unit, the wanted bytes, the cache (and node) that
    serves it, and the number of files that it reads."""

    push: npt.NDArray[np.int32]
    unit: npt.NDArray[np.int32]
    wanted: Numbers
    cache: Numbers
    reads: Numbers

    def pushes(self) -> Numbers:
        """The first access of each push, and at the end the number of accesses."""
        starts = np.flatnonzero(np.diff(self.push, prepend=-1))
        return np.append(starts, len(self.push))


def _run(
    caches: Sequence[UnitCache],
    known: Sequence[_Accesses],
    epoch_count: int,
    unit_count: int,
    progress: OnProgress,
) -> list[_Found]:
    """Policies that know the future know all of `known`."""
    for number, cache in enumerate(caches):
        mine = [each.cache == number for each in known]
        units = [
            np.repeat(each.unit[flags], each.reads[flags])
            for each, flags in zip(known, mine, strict=True)
        ]
        cache.set_future(np.concatenate(units), unit_count)
    epochs = known[:epoch_count]
    total = max(sum(len(each.unit) for each in epochs), 1)
    done, found = 0, []
    for each in epochs:
        written_before = sum(cache.written_bytes for cache in caches)
        where, is_fetched = bytearray(len(each.unit)), bytearray(len(each.unit))
        units, wanted, numbers = each.unit.tolist(), each.wanted.tolist(), each.cache.tolist()
        reads = each.reads.tolist()
        for begin, end in pairwise(each.pushes().tolist()):
            counts: Counter[int] = Counter()
            for at in range(begin, end):
                counts[numbers[at]] += reads[at]
            late = {number for number in counts if caches[number].decides_before_reads}
            for number in counts.keys() - late:
                caches[number].advance(counts[number])
            for at in range(begin, end):
                where[at], is_fetched[at] = caches[numbers[at]].access(units[at], wanted[at])
            for number in late:
                caches[number].advance(counts[number])
            if begin // _PROGRESS_ACCESSES != end // _PROGRESS_ACCESSES:
                progress((done + end) / total)
        done += len(units)
        written = sum(cache.written_bytes for cache in caches) - written_before
        found.append(
            _Found(np.frombuffer(where, np.uint8), np.frombuffer(is_fetched, np.bool_), written)
        )
    progress(1.0)
    return found
