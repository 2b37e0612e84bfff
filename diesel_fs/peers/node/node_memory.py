"""The chunks that a node has in memory, within a budget: which chunk replaces which, and which are
pinned by clients.

The budget covers chunks that are here, that are being fetched, or that a client has pinned. A chunk
of another node is kept only in room that this node's own share does not need, and is replaced
first, unless no other node has it and some reader is known to need it; then the eviction policy
decides. A pinned chunk is not replaced: it is revoked (its clients
are asked to unpin it), and is dropped when they have; until then it takes its room and serves
reads. Bytes that are being sent when their chunk is dropped are not counted. Where the machine has
no memory, descriptor or mapping left, the budget shrinks to what is here, for a while.

`node_cache.py` decides which chunks come, `sealed_memory.py` has the memory itself; the data plane
reads from `table`. All calls come from one trio loop, and none waits.
"""

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile

import numpy as np
import numpy.typing as npt
import trio

from ...cache.policy import EvictionPolicy, UnitValues
from ...cache.replacement import Shortage
from ...orders.future import Units
from ..wire import Sizes
from .chunk_future import ChunkFuture
from .chunk_table import ChunkTable
from .sealed_memory import SealedMemory, sealed_memories_max

log = logging.getLogger("diesel.task")

BUDGET_RETRY_S = 60.0
"""How long the budget stays small after the machine has refused memory."""

PENDING_HITS_MAX = 1024
"""Hits that are collected before the policy hears of them, which then takes a millisecond."""

PINNED_PASSED_MAX = 64
"""How many pinned chunks a decision by plan passes over: it is made for each miss."""

UsesMin = Callable[[Sequence[int]], int]
"""How many reads of a chunk are worth its fetch, where it replaces these."""

Mask = npt.NDArray[np.bool_]
"""A flag for each chunk of the version."""


class PinTable:
    """Which client process (a *pinner*, a number) has pinned which memory, and which of that
    memory is revoked.

    Pinned memory takes its room until it is unpinned, even if its chunk is not here any more. A
    process unpins each memory once, however often it has pinned the chunk in it; a chunk that was
    dropped and fetched again lies in other memory. Chunks keep the numbers that they had when they
    were pinned.
    """

    def __init__(self) -> None:
        self._by_pinner: defaultdict[int, dict[int, list[SealedMemory]]] = defaultdict(dict)
        self._pin_counts: dict[SealedMemory, int] = {}
        self._revoked: set[SealedMemory] = set()
        self.bytes = 0  # of all pinned memory

    def pin(self, pinner: int, chunk: int, memory: SealedMemory) -> None:
        """A process has pinned a chunk that lies in `memory`."""
        mine = self._by_pinner[pinner].setdefault(chunk, [])
        if memory not in mine:
            mine.append(memory)
            if memory not in self._pin_counts:
                self.bytes += memory.bytes
            self._pin_counts[memory] = self._pin_counts.get(memory, 0) + 1

    def unpin(self, pinner: int, chunks: Iterable[int]) -> Iterator[SealedMemory]:
        """A process has unmapped chunks; yields the memory that no process has any more. Chunks
        that it has not pinned are ignored."""
        mine = self._by_pinner.get(pinner, {})
        for chunk in chunks:
            if memories := mine.get(chunk):
                memory = memories.pop(0)
                if not memories:
                    del mine[chunk]
                if self._drop_pin(memory):
                    yield memory

    def unpin_all(self, pinner: int) -> Iterator[SealedMemory]:
        """A process has ended; yields the memory that no process has any more."""
        for memories in self._by_pinner.pop(pinner, {}).values():
            for memory in memories:
                if self._drop_pin(memory):
                    yield memory

    def is_pinned(self, memory: SealedMemory) -> bool:
        """Whether any process has pinned this memory."""
        return memory in self._pin_counts

    def revoke(self, memory: SealedMemory) -> None:
        """Ask the processes that have pinned this memory to unpin it."""
        if memory in self._pin_counts:
            self._revoked.add(memory)

    def is_revoked(self, memory: SealedMemory) -> bool:
        """Whether this memory is to be unpinned, and pinned by no other process meanwhile."""
        return memory in self._revoked

    def revoked(self, pinner: int) -> list[int]:
        """The chunks that a process should unpin."""
        return [
            chunk
            for chunk, memories in self._by_pinner.get(pinner, {}).items()
            if not self._revoked.isdisjoint(memories)
        ]

    def _drop_pin(self, memory: SealedMemory) -> bool:
        self._pin_counts[memory] -= 1
        if self._pin_counts[memory]:
            return False
        del self._pin_counts[memory]
        self._revoked.discard(memory)
        self.bytes -= memory.bytes
        return True


class NodeMemory:
    """The chunks of one version of a dataset that are in memory."""

    def __init__(
        self,
        sizes: Sizes,
        budget_bytes: int,
        policy: EvictionPolicy,
        *,
        on_evict: Callable[[int, memoryview], None],
        on_hits: Callable[[Sequence[int], int], None],
        on_room: Callable[[], None],
    ) -> None:
        """`on_evict` receives a chunk of this node's share when it is replaced; `on_hits` the
        chunks that reads were served from and the bytes of these reads; `on_room` is called when
        there may be more room."""
        self.table = ChunkTable(sizes)  # of this version; the data plane reads from it
        self.present: Mask = np.zeros(len(sizes), np.bool_)
        self.owned: Mask = np.zeros(len(sizes), np.bool_)
        self.counts: Counter[str] = Counter()
        self.budget_bytes_max = budget_bytes
        self._budget_bytes = budget_bytes
        self._chunks_max = sealed_memories_max()
        self._sizes: list[int] = sizes.tolist()
        self._policy = policy
        self._on_evict = on_evict
        self._on_hits = on_hits
        self._on_room = on_room
        self._memories: dict[int, SealedMemory] = {}
        self._pinned_evicted_bytes = 0  # chunks that were dropped and are still pinned
        self._reserved_bytes = self._reserved_count = 0  # chunks that are being fetched
        self._pins = PinTable()
        self._future: ChunkFuture | None = None
        self._held_elsewhere: Mask | None = None
        self._hits: list[int] = []
        self._hit_bytes = 0
        self._shrunk_until_s = math.inf
        self._warned: set[type] = set()
        self._share_fits = True
        self._warn_of_limits()

    # Reading

    @property
    def views(self) -> dict[int, memoryview]:
        """The chunks that are here."""
        return self.table.views

    def find(self, chunk: int) -> memoryview | None:
        """A chunk, if it is here, counted as used. The view stays valid as long as it exists."""
        view = self.views.get(chunk)
        if view is not None:
            self.record_hits((chunk,), 0)
        return view

    def record_hits(self, chunks: Sequence[int], size: int) -> None:
        """Reads of these chunks, of `size` bytes in all, were served from here."""
        self._hits += chunks
        self._hit_bytes += size
        if len(self._hits) > PENDING_HITS_MAX:
            self.flush_hits()

    def record_access(self, chunk: int) -> None:
        """A caller wants a chunk that is not here."""
        self.flush_hits()
        self._policy.record_access(chunk)

    def flush_hits(self) -> None:
        """Tell the policy and `on_hits` of the collected hits, those of the data plane among them.
        Called before the policy is told or asked anything else."""
        for chunks, size in self.table.take_reads():
            self._hits += chunks
            self._hit_bytes += size
        if self._hits:
            if not self._share_fits:
                for chunk in self._hits:
                    self._policy.record_access(chunk)
                self._on_hits(self._hits, self._hit_bytes)
            self.counts["memory_reads"] += len(self._hits)
            self.counts["memory_read_bytes"] += self._hit_bytes
            self._hits.clear()
            self._hit_bytes = 0

    # Room

    def find_victims(self, chunk: int, *, has_credit: bool) -> list[int] | None:
        """The chunks that an absent chunk would replace; None where it should not come. Without
        `has_credit` (`cache/admission.py`) it replaces only chunks of other nodes."""
        self.flush_hits()
        if trio.current_time() >= self._shrunk_until_s:
            self._budget_bytes, self._shrunk_until_s = self.budget_bytes_max, math.inf
        size, is_mine = self._sizes[chunk], bool(self.owned[chunk])
        if size > self._budget_bytes:
            return None
        free_bytes = self._budget_bytes - self.used_bytes
        if not is_mine:
            free_bytes -= self._absent_bytes()
        shortage = self._shortage(size - free_bytes)
        room_bytes = free_bytes
        if not shortage.is_met and (is_mine or has_credit):
            shortage.choose(self._unneeded_copies(), self._bytes_of, self._revokes_pinned)
            room_bytes = size - shortage.bytes
        if not shortage.is_met and is_mine and has_credit:
            order = self._policy.eviction_order()
            shortage.choose(order, self._bytes_of, self._revokes_pinned)
            room_bytes = max(free_bytes, 0)
        if not shortage.is_met or not self._policy.admits(chunk, size, room_bytes):
            return None
        return shortage.victims

    def find_planned_victims(self, chunk: int, uses_min: UsesMin) -> tuple[bool | None, list[int]]:
        """Whether the policy has an absent chunk of this node replace others, by what will be read,
        and the others; None where it cannot tell. What is pinned is passed over, and revoked only
        where the chunk may replace it."""
        self.flush_hits()
        if self._sizes[chunk] > self._budget_bytes:
            return None, []
        pinned: list[int] = []

        def is_pinned(other: int) -> bool:
            if self._pins.is_pinned(self._memories[other]):
                pinned.append(other)
                return True
            return False

        shortage = self._shortage(self._sizes[chunk] - (self._budget_bytes - self.used_bytes))
        order = self._policy.eviction_order()
        may_pass = takewhile(lambda _: len(pinned) <= PINNED_PASSED_MAX, order)
        has_room = shortage.choose(may_pass, self._bytes_of, is_pinned)
        victims = shortage.victims
        wanted = victims if has_room else [*victims, *pinned]
        replaces = self._policy.replaces(chunk, wanted, uses_min(wanted))
        if replaces:
            for each in pinned:
                self._pins.revoke(self._memories[each])
        return (replaces, victims) if has_room or replaces is None else (False, [])

    @property
    def uses_future(self) -> bool:
        """Whether the policy decides by what will be read."""
        return self._policy.uses_future

    def set_future(self, future: ChunkFuture | None) -> None:
        """Set what will be read, until another is set. None: it is not known any more."""
        self._future = future
        self._policy.set_future(None if future is None else future.uses)

    def set_values(self, values: UnitValues | None) -> None:
        """As `EvictionPolicy.set_values`."""
        self._policy.set_values(values)

    def note_passed(self, chunks: Units) -> None:
        """Readers have passed uses of these chunks."""
        self._policy.note_passed(chunks)

    def set_held_elsewhere(self, is_held: Mask) -> None:
        """Set which chunks other nodes have."""
        self._held_elsewhere = is_held

    def are_last_copies(self, chunks: npt.NDArray[np.int64]) -> Mask:
        """Which of these chunks are needed by some reader and, as far as is known, on no other
        node."""
        if self._future is None:
            return np.zeros(len(chunks), np.bool_)
        needed = self._future.needed(chunks)
        return needed if self._held_elsewhere is None else needed & ~self._held_elsewhere[chunks]

    def _unneeded_copies(self) -> list[int]:
        """The chunks of other nodes that are here and may be replaced before all others."""
        copies = np.flatnonzero(self.present & ~self.owned)
        if len(copies) and self._future is not None:
            copies = copies[~self.are_last_copies(copies)]
        found: list[int] = copies.tolist()
        return found

    def reserve(self, chunk: int, victims: Iterable[int]) -> None:
        """Drop these chunks and reserve room for `chunk`."""
        for victim in victims:
            self.counts["evictions"] += 1
            if self.owned[victim]:
                self._on_evict(victim, self.views[victim])
            self.drop(victim)
        self._reserved_count += 1
        self._reserved_bytes += self._sizes[chunk]

    def release_reservation(self, size: int) -> None:
        """A fetch for which `reserve` made room has ended, with the chunk or without."""
        self._reserved_count -= 1
        self._reserved_bytes -= size

    def insert(self, chunk: int, memory: SealedMemory) -> None:
        """Put a chunk into the cache."""
        self.flush_hits()
        self._memories[chunk], self.views[chunk] = memory, memory.view
        self.present[chunk] = True
        self._policy.insert(chunk, memory.bytes)

    def drop(self, chunk: int) -> None:
        """Remove a chunk. While it is pinned, its memory still counts in the budget."""
        memory = self._memories.pop(chunk)
        del self.views[chunk]
        self.present[chunk] = False
        self._policy.remove(chunk)
        if self._pins.is_pinned(memory):
            self._pins.revoke(memory)
            self._pinned_evicted_bytes += memory.bytes
        memory.close()

    def shrink_budget(self, error: Exception) -> None:
        """The machine has no memory, descriptor, mapping or thread for another chunk.

        The first time, the budget becomes what is here. The second time it becomes 0, so that no
        chunk is dropped for one that cannot come.
        """
        held_bytes = self._policy.bytes + self._pinned_evicted_bytes
        is_first = self._budget_bytes == self.budget_bytes_max
        self._budget_bytes = min(held_bytes, self.budget_bytes_max - 1) if is_first else 0
        self._shrunk_until_s = trio.current_time() + BUDGET_RETRY_S
        self.counts["allocation_failures"] += 1
        if type(error) not in self._warned:
            self._warned.add(type(error))
            log.warning(
                "this node keeps %s bytes for now, of at most %s: %s",
                f"{held_bytes:,}", f"{self.budget_bytes_max:,}", error,
            )  # fmt: skip

    @property
    def used_bytes(self) -> int:
        """Bytes that count in the budget."""
        return self._policy.bytes + self._pinned_evicted_bytes + self._reserved_bytes

    def _absent_bytes(self) -> int:
        """Bytes of this node's own chunks that are not here: chunks of other nodes must leave room
        for them."""
        absent = self.owned & ~self.present
        return int(np.asarray(self._sizes, np.int64)[absent].sum())

    def _shortage(self, missing_bytes: int) -> Shortage[int]:
        """The room that one chunk more lacks. The process's limits of descriptors and mappings
        bound the number of chunks."""
        count = len(self._memories) + self._reserved_count + 1
        return Shortage(missing_bytes, count - self._chunks_max)

    def _bytes_of(self, chunk: int) -> int:
        return self._memories[chunk].bytes

    def _revokes_pinned(self, chunk: int) -> bool:
        """Whether a chunk is pinned, so dropping it would free nothing now; it is revoked then."""
        self._pins.revoke(self._memories[chunk])
        return self._pins.is_pinned(self._memories[chunk])

    def set_owned(self, owned: Mask) -> None:
        """Set which chunks are this node's."""
        self.owned = owned
        share_bytes = int(np.asarray(self._sizes, np.int64)[owned].sum())
        chunks = int(np.count_nonzero(owned))
        # If the share fits, none of it is ever replaced, and no hits need to be recorded
        self._share_fits = share_bytes <= self.budget_bytes_max and chunks <= self._chunks_max
        self.table.records_reads = not self._share_fits

    def _warn_of_limits(self) -> None:
        total_bytes = sum(self._sizes)
        chunks = len(self._sizes) * min(self.budget_bytes_max / max(total_bytes, 1), 1.0)
        if chunks > self._chunks_max:
            log.warning(
                "the memory of this node has room for %s chunks, but its limits allow only %s:"
                " raise the limits of descriptors (ulimit -n) and of mappings (sysctl"
                " vm.max_map_count), or put the dataset in larger chunks",
                f"{int(chunks):,}", f"{self._chunks_max:,}",
            )  # fmt: skip

    # Pins

    def pin(self, pinner: int, chunk: int) -> int | None:
        """Pin a chunk for a client process; returns its descriptor, which stays this node's, or
        None where the chunk is not here or is revoked."""
        memory = self._memories.get(chunk)
        if memory is None or self._pins.is_revoked(memory):
            return None
        self._pins.pin(pinner, chunk, memory)
        self.record_hits((chunk,), memory.bytes)
        return memory.descriptor

    def unpin(self, pinner: int, chunks: Iterable[int]) -> None:
        """A client process has unmapped chunks."""
        self._release_unpinned(self._pins.unpin(pinner, chunks))

    def unpin_all(self, pinner: int) -> None:
        """A client process has ended."""
        self._release_unpinned(self._pins.unpin_all(pinner))

    def revoked(self, pinner: int) -> list[int]:
        """The chunks that a client process should unpin."""
        return self._pins.revoked(pinner)

    def _release_unpinned(self, memories: Iterable[SealedMemory]) -> None:
        for memory in memories:
            if memory.descriptor < 0:  # its chunk was dropped before
                self._pinned_evicted_bytes -= memory.bytes
        self._on_room()

    # The whole

    def switch_version(self, sizes: Sizes, before: Sequence[int]) -> None:
        """The chunks of another version; `before` has the number that each had, or -1. Pins keep
        the old numbers, and the data plane's connections of the old version the old table, until
        they are closed."""
        self.flush_hits()
        after = {old: new for new, old in enumerate(before) if old >= 0}
        for chunk in [chunk for chunk in self._memories if chunk not in after]:
            self.drop(chunk)
        self._policy.renumber(after)
        self._future = self._held_elsewhere = None
        self._sizes = sizes.tolist()
        self._memories = {after[chunk]: memory for chunk, memory in self._memories.items()}
        self.table = ChunkTable(sizes)
        self.views.update({chunk: memory.view for chunk, memory in self._memories.items()})
        self.present = np.zeros(len(sizes), np.bool_)
        self.present[[*self._memories]] = True
        self.set_owned(np.array([was >= 0 and self.owned[was] for was in before], np.bool_))

    def memory_of(self, chunk: int) -> SealedMemory | None:
        """The memory that a chunk lies in; None where it is not here."""
        return self._memories.get(chunk)

    def stats(self) -> dict[str, int]:
        """What is here, and counters since the start."""
        self.flush_hits()
        return {
            **{name: self.counts[name] for name in _COUNTS},
            "memory_bytes": self._policy.bytes,
            "memory_chunks": len(self._memories),
            "memory_budget_bytes": self._budget_bytes,
            "memory_used_bytes": self.used_bytes,
            "pinned_bytes": self._pins.bytes,
        }

    def close(self) -> None:
        """Release all chunks. Views and other processes' mappings stay valid."""
        for chunk in [*self._memories]:
            self.drop(chunk)


_COUNTS = ("memory_reads", "memory_read_bytes", "evictions", "allocation_failures")
