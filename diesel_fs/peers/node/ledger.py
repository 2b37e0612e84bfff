"""Where each chunk of a version is: in memory, on the node's disk, in the queue to the disk, pinned
by a client, or owned by this node; and how much room is left. Does no I/O and never waits.

The memory budget covers chunks that are in memory, on their way, or pinned by a client. A pinned
chunk is not replaced but revoked: the master asks its clients to unpin it. Until they have, its
memory serves reads and counts in the budget, even if the chunk was dropped. Bytes of a dropped
chunk that the data plane is sending do not count. If the machine has no memory, descriptor or
mapping left, the budget shrinks to the bytes in use, for a while.

`replacement.py` decides which chunk makes room. All calls come from one trio loop, so each is
atomic. `switch_version` changes all numbers of chunks at once.
"""

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from uuid import UUID

import numpy as np
import numpy.typing as npt

from ...cache.policies.eviction import EvictionPolicy
from ...cache.tiers import ChunkKey
from ...format.entries import ChunkId
from ..wire import Sizes
from .chunk_table import ChunkTable
from .sealed_memory import SealedMemory

BUDGET_RETRY_S = 60.0
"""For this time the budget stays small after the machine has refused memory."""

WRITE_BACK_BYTES_MAX = 64 << 20
"""Bytes that may wait to be written; at most an eighth of the memory, but always one chunk."""

Mask = npt.NDArray[np.bool_]
"""A flag for each chunk."""


def chunk_budget_bytes(memory_bytes: int, sizes: Sizes, *, has_disk: bool) -> int:
    """The rest of the memory is for the queue to the disk."""
    return max(memory_bytes - (write_back_bytes(memory_bytes, sizes) if has_disk else 0), 0)


def write_back_bytes(memory_bytes: int, sizes: Sizes) -> int:
    """The memory for the queue to the disk."""
    largest = int(sizes.max(initial=0))
    return min(max(memory_bytes // 8, largest), max(WRITE_BACK_BYTES_MAX, largest))


@dataclass(frozen=True, slots=True)
class Room:
    memory_bytes: int
    memory_chunks: int
    """Bounded by the limits of descriptors and mappings."""
    queue_bytes: int
    """0 without a disk."""


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """The eviction policy of each place, which also is the table of the chunks there."""

    memory: EvictionPolicy
    disk: EvictionPolicy


class PinTable:
    """The memory that each client process (a *pinner*, a number) has pinned. Clients should unpin
    *revoked* memory.

    Pinned memory takes its room until it is unpinned, even if its chunk was dropped. A process
    unpins each memory once, however often it has pinned the chunk in it; a chunk that was dropped
    and fetched again lies in other memory. Chunks keep their numbers from when they were pinned."""

    def __init__(self) -> None:
        self._by_pinner: defaultdict[int, dict[int, list[SealedMemory]]] = defaultdict(dict)
        self._pin_counts: dict[SealedMemory, int] = {}
        self._revoked: set[SealedMemory] = set()
        self.bytes = 0

    def pin(self, pinner: int, chunk: int, memory: SealedMemory) -> None:
        mine = self._by_pinner[pinner].setdefault(chunk, [])
        if memory not in mine:
            mine.append(memory)
            if memory not in self._pin_counts:
                self.bytes += memory.bytes
            self._pin_counts[memory] = self._pin_counts.get(memory, 0) + 1

    def unpin(self, pinner: int, chunks: Iterable[int]) -> Iterator[SealedMemory]:
        """Yields each memory that no process has pinned any more. Ignores chunks that this process
        has not pinned."""
        mine = self._by_pinner.get(pinner, {})
        for chunk in chunks:
            if memories := mine.get(chunk):
                memory = memories.pop(0)
                if not memories:
                    del mine[chunk]
                if self._drop_pin(memory):
                    yield memory

    def unpin_all(self, pinner: int) -> Iterator[SealedMemory]:
        """As `unpin`, for a process that has ended."""
        for memories in self._by_pinner.pop(pinner, {}).values():
            for memory in memories:
                if self._drop_pin(memory):
                    yield memory

    def is_pinned(self, memory: SealedMemory) -> bool:
        return memory in self._pin_counts

    def revoke(self, memory: SealedMemory) -> None:
        if memory in self._pin_counts:
            self._revoked.add(memory)

    def is_revoked(self, memory: SealedMemory) -> bool:
        """Revoked memory must not be pinned again."""
        return memory in self._revoked

    def revoked(self, pinner: int) -> list[int]:
        """The chunks to unpin, by their numbers when pinned."""
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


class Ledger:
    def __init__(
        self,
        identity: UUID,
        ids: Sequence[ChunkId],
        sizes: Sizes,
        room: Room,
        tables: Tables,
        clock: Callable[[], float],
    ) -> None:
        """`clock` gives seconds and never goes back."""
        self.identity, self.room = identity, room
        self.tables = tables
        self.pins = PinTable()
        self.counts: Counter[str] = Counter()
        """Has the names in `COUNTS`."""
        self.owned: Mask = np.zeros(len(ids), np.bool_)
        self.held_elsewhere: Mask | None = None
        """None: unknown."""
        self.memories: dict[int, SealedMemory] = {}
        self.queue: OrderedDict[int, memoryview] = OrderedDict()
        self.disk_room_bytes = 0
        """From the disk tier's last write or scan."""
        self.disk_rests_until_s = -math.inf
        """Until then, a disk that has failed is not used."""
        self.disk_writes_rest_until_s = -math.inf
        """Until then, a disk on which a write has failed is not written."""
        self.on_enqueue: Callable[[], None] = lambda: None
        self._clock = clock
        self._budget_bytes = room.memory_bytes
        self._shrunk_until_s = math.inf
        self._pinned_dropped_bytes = 0  # dropped and still pinned
        self._reserved_bytes = self._reserved_count = 0  # of chunks on their way to memory
        self._reserved_queue_bytes = 0  # of chunks on their way to the queue
        self._queued_bytes = 0
        self.share_fits = True
        """Whether all own chunks fit in memory, so that none of them is ever replaced."""
        self._set_chunks(ids, sizes)

    def _set_chunks(self, ids: Sequence[ChunkId], sizes: Sizes) -> None:
        self.ids, self.sizes = list(ids), [int(size) for size in sizes]
        self.size_column = sizes.astype(np.int64)
        self.total_bytes = sum(self.sizes)
        self.table = ChunkTable(sizes)
        self.views.update({chunk: memory.view for chunk, memory in self.memories.items()})
        self.present: Mask = np.zeros(len(ids), np.bool_)
        self.present[[*self.memories]] = True
        self.on_disk: Mask = np.zeros(len(ids), np.bool_)
        """May be out of date. It is kept also while the disk is not used."""
        self.on_disk[[*self.tables.disk.sizes]] = True

    @property
    def views(self) -> dict[int, memoryview]:
        return self.table.views

    def key(self, chunk: int) -> ChunkKey:
        """The key is the same in all versions."""
        return ChunkKey(self.identity, self.ids[chunk])

    def is_named(self, chunk: int, key: ChunkKey) -> bool:
        """Whether this number still means the chunk `key`; for use after a wait."""
        return chunk < len(self.ids) and self.ids[chunk] == key.id

    def holds(self, chunk: int) -> bool:
        """Whether the chunk is in memory, in the queue, or, as far as known, on the disk."""
        return chunk in self.views or chunk in self.queue or self.is_readable(chunk)

    def set_owned(self, owned: Mask) -> None:
        self.owned = owned
        share_bytes = int(self.size_column[owned].sum())
        self.share_fits = (
            share_bytes <= self.room.memory_bytes
            and int(np.count_nonzero(owned)) <= self.room.memory_chunks
        )
        self.table.records_reads = not self.share_fits

    # Memory

    @property
    def budget_bytes(self) -> int:
        if self._clock() >= self._shrunk_until_s:
            self._budget_bytes, self._shrunk_until_s = self.room.memory_bytes, math.inf
        return self._budget_bytes

    @property
    def used_bytes(self) -> int:
        """Chunks in memory and on their way, and dropped ones that are still pinned."""
        return self.tables.memory.bytes + self._pinned_dropped_bytes + self._reserved_bytes

    @property
    def absent_bytes(self) -> int:
        """This node's own chunks that are not in memory."""
        return int(self.size_column[self.owned & ~self.present].sum())

    @property
    def excess_chunks(self) -> int:
        """How many chunks must go before one more may come; 0 or less: none."""
        return len(self.memories) + self._reserved_count + 1 - self.room.memory_chunks

    def insert(self, chunk: int, memory: SealedMemory) -> None:
        self.memories[chunk], self.views[chunk] = memory, memory.view
        self.present[chunk] = True
        self.tables.memory.insert(chunk, memory.bytes)

    def drop(self, chunk: int) -> None:
        """The memory of a pinned chunk still counts in the budget."""
        memory = self.memories.pop(chunk)
        del self.views[chunk]
        self.present[chunk] = False
        self.tables.memory.remove(chunk)
        if self.pins.is_pinned(memory):
            self.pins.revoke(memory)
            self._pinned_dropped_bytes += memory.bytes
        memory.close()

    def reserve(self, size: int) -> None:
        """Set memory aside for a chunk on its way, until `release`."""
        self._reserved_count += 1
        self._reserved_bytes += size

    def release(self, size: int) -> None:
        self._reserved_count -= 1
        self._reserved_bytes -= size

    def shrink_budget(self) -> int:
        """The machine has no memory, descriptor, mapping or thread for another chunk. Returns the
        bytes of the chunks that are here. They become the budget; the second time it becomes 0, so
        that no chunk is dropped for one that cannot come."""
        here_bytes = self.tables.memory.bytes + self._pinned_dropped_bytes
        is_first = self._budget_bytes == self.room.memory_bytes
        self._budget_bytes = min(here_bytes, self.room.memory_bytes - 1) if is_first else 0
        self._shrunk_until_s = self._clock() + BUDGET_RETRY_S
        return here_bytes

    def unpin(self, pinner: int, chunks: Iterable[int] | None) -> None:
        """`chunks` None: all of a process that has ended."""
        freed = self.pins.unpin_all(pinner) if chunks is None else self.pins.unpin(pinner, chunks)
        for memory in freed:
            if memory.descriptor < 0:  # its chunk was dropped
                self._pinned_dropped_bytes -= memory.bytes

    # The disk

    @property
    def has_disk(self) -> bool:
        return self.room.queue_bytes > 0

    @property
    def is_disk_resting(self) -> bool:
        return not self.has_disk or self._clock() < self.disk_rests_until_s

    @property
    def readable(self) -> Mask:
        return np.zeros_like(self.on_disk) if self.is_disk_resting else self.on_disk

    def is_readable(self, chunk: int) -> bool:
        return bool(self.on_disk[chunk]) and not self.is_disk_resting

    def record_written(self, chunk: int) -> None:
        self.on_disk[chunk] = True
        self.tables.disk.insert(chunk, self.sizes[chunk])

    def record_erased(self, chunk: int) -> None:
        self.table.take_back(chunk)  # the data plane may no longer read the file
        self.on_disk[chunk] = False
        self.tables.disk.remove(chunk)

    def takes(self, size: int) -> bool:
        if self.is_disk_resting or self._clock() < self.disk_writes_rest_until_s:
            return False
        coming_bytes = self._queued_bytes + self._reserved_queue_bytes + size
        return coming_bytes <= self.room.queue_bytes

    def has_disk_room(self, size: int) -> bool:
        """Whether a chunk of this size fits without replacing another one."""
        coming_bytes = self._queued_bytes + self._reserved_queue_bytes + size
        return self.takes(size) and self.disk_room_bytes >= coming_bytes

    def enqueue(self, chunk: int, content: memoryview) -> None:
        """`content` is checked and must not change. Does nothing if the queue is full or the disk
        is not used now."""
        if chunk in self.queue or self.on_disk[chunk] or not self.takes(len(content)):
            return
        self.queue[chunk] = content
        self._queued_bytes += len(content)
        self.on_enqueue()

    def dequeue(self, chunk: int, content: memoryview) -> None:
        """Does nothing if `content` is no longer queued under this number, as a new version may
        have removed or renumbered it."""
        if self.queue.get(chunk) is content:
            del self.queue[chunk]
            self._queued_bytes -= len(content)

    def reserve_queue(self, size: int) -> None:
        """A negative `size` gives the room back."""
        self._reserved_queue_bytes += size

    # The whole

    @property
    def held(self) -> Mask:
        return self.present | self.readable

    def switch_version(self, ids: Sequence[ChunkId], sizes: Sizes) -> list[int]:
        """Take over the chunks of another version. Chunks in both versions keep their places and
        their owner, pins the old numbers. The data plane's connections of the old version keep the
        old table until they close. Returns each new chunk's former number, or -1."""
        old = {key: number for number, key in enumerate(zip(self.ids, self.sizes, strict=True))}
        before = [old.get(key, -1) for key in zip(ids, map(int, sizes), strict=True)]
        after = {was: number for number, was in enumerate(before) if was >= 0}
        for chunk in [chunk for chunk in self.memories if chunk not in after]:
            self.drop(chunk)
        self.tables.memory.renumber(after)
        self.tables.disk.renumber(after)
        self.table.take_back()
        self.held_elsewhere = None
        self.memories = {after[chunk]: memory for chunk, memory in self.memories.items()}
        self.queue = OrderedDict(
            (after[chunk], content) for chunk, content in self.queue.items() if chunk in after
        )
        self._queued_bytes = sum(map(len, self.queue.values()))
        owned = self.owned
        self._set_chunks(ids, sizes)
        self.set_owned(np.array([was >= 0 and owned[was] for was in before], np.bool_))
        return before

    def stats(self) -> dict[str, int]:
        """`held_bytes` are of all chunks of the dataset that are here, `dataset_bytes` of all."""
        mine, held = self.owned, self.held
        return {
            **{name: self.counts[name] for name in COUNTS},
            "memory_bytes": self.tables.memory.bytes,
            "memory_chunks": len(self.memories),
            "memory_budget_bytes": self._budget_bytes,
            "memory_used_bytes": self.used_bytes,
            "pinned_bytes": self.pins.bytes,
            "disk_used_bytes": self.tables.disk.bytes,
            "disk_chunks": len(self.tables.disk.sizes),
            "disk_queued_bytes": self._queued_bytes,
            "disk_paused": int(self.has_disk and self.is_disk_resting),
            "share_chunks": int(np.count_nonzero(mine)),
            "share_held_chunks": int(np.count_nonzero(mine & held)),
            "held_bytes": int(self.size_column[held].sum()),
            "dataset_bytes": self.total_bytes,
        }

    def close(self) -> None:
        """Views, and mappings of other processes, stay valid."""
        for chunk in [*self.memories]:
            self.drop(chunk)
        self.table.take_back()
        self.queue.clear()
        self._queued_bytes = 0


COUNTS = (
    "waited", "misses", "fetches", "fetched_bytes", "fetch_failures", "filled", "fill_failures",
    "plan_replacements", "plan_bypassed", "memory_reads", "memory_read_bytes", "evictions",
    "allocation_failures", "disk_reads", "disk_bytes", "disk_loads", "disk_writes",
    "disk_evictions", "disk_refused", "disk_plan_bypassed", "disk_failures", "disk_looks",
)  # fmt: skip
