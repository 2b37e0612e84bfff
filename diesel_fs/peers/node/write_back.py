"""The chunks that a node keeps on its disk, because its memory has no room for them.

A chunk that was just read is lent to the data plane (`chunk_table.py`), which reads further parts
of it without the threads, as far as the kernel has them in its page cache.

Chunks that are to be written wait in a queue of limited bytes, where readers find them meanwhile;
when the queue is full, a chunk is not written. When the disk tier is full, chunks of other nodes
are replaced first, then chunks that are in memory too, then those that the policy chooses. Before
that, the tier evicts for this dataset (`CacheFolder.make_room`), as long as chunks of it are not
here. At the end of a node, `flush` writes what it has in memory. Other tasks of the user may use
the same folder and dataset, so chunks may come and go without this process: it scans the folder
again when it notices.

Everything runs in one trio loop. Disk accesses run in threads. A read from a disk that hangs is
given up after `READ_TIMEOUT_S` and its thread is abandoned; then the disk is left alone for a
while, and callers read from the store. Writes and scans may take as long as the disk does, as no
reader waits for them. `cache/disk/chunks.py` has the files, `node_cache.py` decides what is worth
keeping.
"""

import contextlib
import itertools
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar
from uuid import UUID

import numpy as np
import numpy.typing as npt
import trio

from ...cache.costs import ReadCosts
from ...cache.disk.chunks import DiskTier
from ...cache.policy import EvictionPolicy, UnitValues
from ...cache.replacement import Shortage
from ...cache.tiers import CacheHandle, ChunkKey
from ...errors import NoSpaceError
from ...format.entries import ChunkId
from ...orders.future import Units
from .chunk_future import ChunkFuture
from .chunk_table import LOAN_S, ChunkTable
from .sealed_memory import SealedMemory, WritableMemory

log = logging.getLogger("diesel.task")

READ_TIMEOUT_S = 1.0
"""A disk that takes longer is slower than any store; the caller reads from the store."""

DISK_PAUSE_S = 30.0
"""How long a disk is not used after it did not answer in time, or could not be written."""

RESCAN_S = 60.0
"""How soon the folder is scanned after a chunk was not where it had been: others may be gone, or
back. Also how soon the tier is asked for room again after it had too little."""

NOTE_USE_S = 60.0
"""How often a dataset is marked as used while its job lives, also where memory serves all reads:
its chunks cool down from the job's end on (`cache/disk`)."""

SSD_COSTS = ReadCosts(0.0002, 1e-9)
"""Rough costs of any SSD. They only serve to compare reads of parts with reads of whole chunks."""

OTHER_WRITER_WAIT_S = 0.2
"""At the end, the wait for a chunk that another process, or an abandoned thread of this one, is
just writing."""

_THREADS = 8
_READS_PER_THREAD = 8  # of one chunk each; the first read of a chunk reads and checks all of it

Spans = Sequence[tuple[int, int]]
"""Ranges of one chunk: where each starts, and its bytes."""

Made = TypeVar("Made")
Mask = npt.NDArray[np.bool_]


class _DiskRead:
    """Bytes of a chunk that somebody waits for."""

    def __init__(self, key: ChunkKey, spans: Spans) -> None:
        self._key, self._spans = key, spans
        self.ended = trio.Event()
        self.contents: list[memoryview] | None = None
        self.file: CacheHandle | None = None  # of the chunk, still open where it could be read
        self.is_there: bool | None = None  # whether the chunk is; None: nobody has looked

    def read(self, disk: DiskTier) -> tuple[list[memoryview] | None, CacheHandle | None, bool]:
        """The contents, the open file, and whether the chunk is there. Called in a thread."""
        found = disk.find(self._key)
        if found is not None:
            with contextlib.suppress(OSError, EOFError, MemoryError):
                buffers = [np.empty(size, np.uint8).data for _, size in self._spans]
                for (start, _), buffer in zip(self._spans, buffers, strict=True):
                    found.read_into(start, buffer)
                return [buffer.toreadonly() for buffer in buffers], found, True
            found.close()
        return None, None, disk.holds(self._key)


class WriteBackQueue:
    """The chunks of one version of a dataset on this node's disk, and those that wait to be
    written. Without a disk tier it holds none."""

    def __init__(
        self,
        disk: DiskTier | None,
        identity: UUID,
        policy: EvictionPolicy,
        *,
        evict_first: Callable[[], Mask],
        on_change: Callable[[], None],
        queue_bytes: int,
        fetch_cost: Callable[[int], float] | None = None,
    ) -> None:
        """`evict_first` gives the chunks that are replaced before the policy is asked;
        `on_change` is called when there may be more room; `fetch_cost` gives the seconds to fetch
        so many bytes again. `switch_version` then sets the chunks of the version."""
        self._disk = disk
        self._identity = identity
        self._policy = policy
        self._evict_first = evict_first
        self._on_change = on_change
        self._fetch_cost = fetch_cost
        self._queue_bytes_max = queue_bytes
        self._ids: Sequence[ChunkId] = ()
        self._sizes: Sequence[int] = ()
        self._total_bytes = 0  # of the version's chunks
        self._table = ChunkTable(np.zeros(0, np.uint64))
        self._on_disk: Mask = np.zeros(0, np.bool_)
        self._queue: OrderedDict[int, memoryview] = OrderedDict()
        self._queued_bytes = 0
        self._reserved_bytes = 0
        self._room_bytes = 0
        self._paused_until_s = self._writes_paused_until_s = -math.inf
        self._next_scan_s = self._asks_room_from_s = -math.inf
        self._work = trio.Event()
        self._threads = trio.CapacityLimiter(_THREADS)
        self._nursery: trio.Nursery | None = None  # while `run` runs
        self._wanted: list[_DiskRead] = []
        self._counts: Counter[str] = Counter()

    @property
    def on_disk(self) -> Mask:
        """A flag for each chunk: whether it can be read from the disk now."""
        return np.zeros_like(self._on_disk) if self._is_paused else self._on_disk

    def holds(self, chunk: int) -> bool:
        """Whether a chunk can be read from the disk, as far as is known."""
        return bool(self._on_disk[chunk]) and not self._is_paused

    def queued(self, chunk: int) -> memoryview | None:
        """A chunk that waits to be written."""
        return self._queue.get(chunk)

    def has_room(self, size: int) -> bool:
        """Whether a chunk would be written without replacing another."""
        coming = self._queued_bytes + self._reserved_bytes + size
        return self._takes(size) and self._room_bytes >= coming

    def find_victims(self, chunk: int) -> list[int] | None:
        """The chunks that a new one would replace, without those that are replaced first anyway;
        None where it would not be written."""
        size = self._sizes[chunk]
        if not self._takes(size) or not self._policy.admits(chunk, size, self._room_bytes):
            return None
        victims, goes_first = self._victims(size), self._evict_first()
        return None if victims is None else [each for each in victims if not goes_first[each]]

    def set_future(self, future: ChunkFuture | None) -> None:
        """Set what will be read, until another is set. None: it is not known any more."""
        self._policy.set_future(None if future is None else future.uses)

    def set_values(self, values: UnitValues | None) -> None:
        """As `EvictionPolicy.set_values`."""
        self._policy.set_values(values)

    def note_passed(self, chunks: Units) -> None:
        """Readers have passed uses of these chunks."""
        self._policy.note_passed(chunks)

    def replaces(self, chunk: int, uses_min: Callable[[Sequence[int]], int]) -> bool:
        """Whether the policy has a chunk replace others on the disk, by what will be read."""
        victims = self.find_victims(chunk)
        if not victims:
            return victims is not None
        return bool(self._policy.replaces(chunk, victims, uses_min(victims)))

    def reserve(self, size: int) -> None:
        """Reserve room in the queue for a chunk that is being fetched."""
        self._reserved_bytes += size

    def release_reservation(self, size: int) -> None:
        """A fetch for which `reserve` took room has ended, with the chunk or without."""
        self._reserved_bytes -= size

    def enqueue(self, chunk: int, content: memoryview) -> None:
        """Have a chunk written, which has been checked and will not change. It is dropped where the
        queue is full or the disk is not used."""
        size = len(content)
        if chunk in self._queue or self._on_disk[chunk] or not self._takes(size):
            return
        self._queue[chunk] = content
        self._queued_bytes += size
        self._work.set()

    def record_access(self, chunk: int) -> None:
        """A caller wants a chunk that is not in memory."""
        if self._disk is not None:
            self._policy.record_access(chunk)

    def record_read(self, chunk: int, size: int) -> None:
        """The data plane has read so many bytes of a chunk that was lent to it."""
        if self._on_disk[chunk]:
            self._policy.record_access(chunk)
        self._count_read(size)

    def switch_version(
        self,
        ids: Sequence[ChunkId],
        sizes: Sequence[int],
        before: Sequence[int],
        table: ChunkTable,
    ) -> None:
        """Set the chunks of a version; `before` has the number that each had, or -1. `table` is
        what the data plane has of the version."""
        self._table.take_back()
        self._ids, self._sizes, self._table = ids, sizes, table
        self._total_bytes = sum(sizes)
        after = {was: now for now, was in enumerate(before) if was >= 0}
        self._policy.renumber(after)
        self._on_disk = np.zeros(len(ids), np.bool_)
        self._on_disk[[*self._policy.sizes]] = True
        self._queue = OrderedDict(
            (after[chunk], content) for chunk, content in self._queue.items() if chunk in after
        )
        self._queued_bytes = sum(map(len, self._queue.values()))
        self._next_scan_s = -math.inf
        self._work.set()

    async def read(self, chunk: int, spans: Spans) -> list[memoryview] | None:
        """Bytes of a chunk, by start and size; None where it turns out not to be here. Reads that
        begin together share threads, as to enter one costs more than to read a few files."""
        wanted, table = _DiskRead(self._key(chunk), spans), self._table
        if self._nursery is None:
            await self._read_all([wanted])
        else:
            self._wanted.append(wanted)
            if len(self._wanted) == 1:
                self._nursery.start_soon(self._read_wanted, self._nursery)
            await wanted.ended.wait()
        if wanted.contents is not None:
            self._count_read(sum(size for _, size in spans))
            if wanted.file is not None and table is self._table and self._on_disk[chunk]:
                table.lend(chunk, wanted.file)
        elif wanted.is_there is not None:
            self._failed(chunk, is_there=wanted.is_there)
        return wanted.contents

    async def _read_wanted(self, nursery: trio.Nursery) -> None:
        """Read what is wanted by now: this task runs after those that began together."""
        wanted, self._wanted = self._wanted, []
        for first in range(0, len(wanted), _READS_PER_THREAD):
            some = wanted[first : first + _READS_PER_THREAD]
            nursery.start_soon(self._read_all, some)

    async def _read_all(self, wanted: "Sequence[_DiskRead]") -> None:
        """Read these in one thread. Where this is cancelled, they end without a result."""

        def work(
            disk: DiskTier,
        ) -> list[tuple[list[memoryview] | None, CacheHandle | None, bool]]:
            return [each.read(disk) for each in wanted]

        try:
            answers = await self._in_thread(work, READ_TIMEOUT_S)
            failed = [(None, None, True)] * len(wanted)
            for each, answer in zip(wanted, answers or failed, strict=True):
                each.contents, each.file, each.is_there = answer
        finally:
            for each in wanted:
                each.ended.set()

    async def load(self, chunk: int) -> SealedMemory | None:
        """A whole chunk, checked, in memory; None where it turns out not to be here. Raises OSError
        where there is no memory."""
        key, size = self._key(chunk), self._sizes[chunk]

        def work(disk: DiskTier) -> tuple[SealedMemory | OSError | None, bool]:
            try:
                draft = WritableMemory(size)
            except OSError as error:
                return error, True
            with contextlib.suppress(OSError):
                if disk.load(key, draft.room):
                    return draft.seal(), True
            draft.discard()
            return None, disk.holds(key)

        answer = await self._in_thread(work, READ_TIMEOUT_S)
        loaded, is_there = answer or (None, True)
        if isinstance(loaded, OSError):
            raise loaded
        if loaded is None:
            self._failed(chunk, is_there=is_there)
        else:
            self._counts["disk_loads"] += 1
        return loaded

    async def recheck(self, chunk: int) -> None:
        """A reader got damaged bytes of a chunk: check it, and drop it where it is damaged."""
        self._table.take_back(chunk)
        if self._on_disk[chunk]:
            key = self._key(chunk)

            def work(disk: DiskTier) -> bool:
                disk.report_damage(key)
                return disk.holds(key)

            if await self._in_thread(work, READ_TIMEOUT_S) is False:
                self._failed(chunk, is_there=False)

    def stats(self) -> dict[str, int]:
        """What is here, as far as is known, and counters since the start."""
        folder = None if self._disk is None else self._disk.folder
        return {
            **{name: self._counts[name] for name in _COUNTS},
            "disk_room_evictions": 0 if folder is None else folder.room_evictions,
            "disk_room_evicted_bytes": 0 if folder is None else folder.room_evicted_bytes,
            "disk_used_bytes": self._policy.bytes,
            "disk_chunks": len(self._policy.sizes),
            "disk_queued_bytes": self._queued_bytes,
            "disk_paused": int(self._disk is not None and self._is_paused),
        }

    async def run(self) -> None:
        """Scan the folder, then write what is enqueued, and read. Ends when cancelled."""
        if self._disk is None:
            return
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._take_back_always)
            nursery.start_soon(self._note_use_always)
            try:
                await self._write_always()
            finally:
                self._nursery = None

    async def _take_back_always(self) -> None:
        while True:
            await trio.sleep(LOAN_S)
            self._table.take_back_old()

    async def _note_use_always(self) -> None:
        identity = self._identity

        def work(disk: DiskTier) -> None:
            disk.note_use(identity)

        while True:
            await trio.sleep(NOTE_USE_S)
            await self._in_thread(work, math.inf)  # nobody waits; and never two of them hang

    async def _write_always(self) -> None:
        while True:
            if trio.current_time() >= self._next_scan_s:
                await self._scan(makes_room=True)
            if self._queue:
                chunk, content = next(iter(self._queue.items()))
                await self._write(chunk, content)
                if self._queue.get(chunk) is content:
                    del self._queue[chunk]
                    self._queued_bytes -= len(content)
                self._on_change()
                continue
            self._work = trio.Event()
            with trio.move_on_at(self._next_scan_s):
                await self._work.wait()

    async def flush(self, contents: Iterator[tuple[int, memoryview]], evictable: Mask) -> None:
        """At the end, after `run`: write these chunks, in this order, as far as there is room.
        Only chunks in `evictable` are replaced. May be cancelled anywhere; the log reports the
        outcome."""
        if self._disk is None:
            return
        written_bytes: list[int] = []  # of each chunk
        busy: list[tuple[int, memoryview]] = []  # chunks that another writer was at
        outcome = "there was no more time"
        try:
            await self._scan(makes_room=False)
            for chunk, content in itertools.chain(list(self._queue.items()), contents):
                if self._on_disk[chunk] or evictable[chunk]:
                    continue
                victims = self._choose_victims(len(content), evictable)
                is_there, other_writes = await self._put(chunk, content, victims)
                if is_there:
                    self._record_inserted(chunk)
                    written_bytes.append(len(content))
                elif not other_writes:
                    outcome = "the disk takes no more"
                    return
                else:
                    busy.append((chunk, content))
            for chunk, content in busy:
                await trio.sleep(OTHER_WRITER_WAIT_S)
                if (await self._put(chunk, content, []))[0]:
                    written_bytes.append(len(content))
            outcome = "these were all"
        finally:
            log.info(
                "wrote %d chunks (%s bytes) from memory to the disk cache: %s",
                len(written_bytes), f"{sum(written_bytes):,}", outcome,
            )  # fmt: skip

    def close(self) -> None:
        """Drop the queue, and take back what is lent."""
        self._table.take_back()
        self._queue.clear()
        self._queued_bytes = 0

    # The queue

    def _takes(self, size: int) -> bool:
        """Whether a chunk may wait in the queue now."""
        if self._is_paused or trio.current_time() < self._writes_paused_until_s:
            return False
        return self._queued_bytes + self._reserved_bytes + size <= self._queue_bytes_max

    async def _write(self, chunk: int, content: memoryview) -> None:
        """Write one chunk of the queue, where there is room for it or can be made."""
        victims = self._victims(len(content))
        if victims is None:
            self._counts["disk_refused"] += 1
            self._next_scan_s = min(self._next_scan_s, trio.current_time() + RESCAN_S)
            return
        goes_first = self._evict_first()
        replaced = [each for each in victims if not goes_first[each]]
        if replaced and self._policy.replaces(chunk, replaced) is False:
            self._counts["disk_plan_bypassed"] += 1  # what is there is needed sooner
            return
        is_there, other_writes = await self._put(chunk, content, victims)
        if is_there:
            self._counts["disk_writes"] += 1
            if self._queue.get(chunk) is content:  # the version may have changed
                self._record_inserted(chunk)
        elif not other_writes:
            self._counts["disk_failures"] += 1
            self._writes_paused_until_s = trio.current_time() + DISK_PAUSE_S
            self._next_scan_s = min(self._next_scan_s, self._writes_paused_until_s)

    async def _put(
        self, chunk: int, content: memoryview, victims: Sequence[int]
    ) -> tuple[bool, bool]:
        """Write a chunk that replaces `victims`. Returns whether it is on the disk now, and whether
        it is not because another writer is at it."""
        key, victim_keys = self._key(chunk), [self._key(each) for each in victims]
        size, mean_bytes = len(content), max(self._total_bytes // max(len(self._ids), 1), 1)
        cost_s = 0.0 if self._fetch_cost is None else self._fetch_cost(mean_bytes)
        for each in victims:
            self._record_evicted(each)

        def work(disk: DiskTier) -> tuple[bool, bool, int]:
            if victim_keys:
                disk.evict(victim_keys)
            other_writes = False
            with contextlib.suppress(NoSpaceError):
                reservation = disk.reserve(key, size)
                other_writes = reservation is None
                if reservation is not None:
                    reservation.commit(content)
            if cost_s:
                disk.jobs.note_cost(key.identity, cost_s / mean_bytes)
            return disk.holds(key), other_writes, disk.folder.free_bytes()

        answer = await self._in_thread(work, math.inf)
        is_there, other_writes, self._room_bytes = answer or (False, False, 0)
        now_s = trio.current_time()
        wanted_bytes = min(self._queue_bytes_max, self._total_bytes - self._policy.bytes)
        if self._room_bytes < wanted_bytes and now_s >= self._asks_room_from_s:
            self._next_scan_s = now_s  # it makes room
        return is_there, other_writes

    def _choose_victims(self, size: int, evictable: Mask) -> list[int]:
        """Chunks among `evictable` to free `size` bytes, even where they do not suffice."""
        return self._shortage(size, evictable).victims

    def _shortage(self, size: int, evictable: Mask) -> Shortage[int]:
        """The room that `size` bytes lack, with victims among `evictable`."""
        shortage = Shortage[int](size - self._room_bytes)
        candidates = np.flatnonzero(self._on_disk & evictable).tolist()
        shortage.choose(candidates, self._sizes.__getitem__)
        return shortage

    def _victims(self, size: int) -> list[int] | None:
        """The chunks to free `size` bytes; None where they do not suffice."""
        shortage = self._shortage(size, self._evict_first())
        order = self._policy.eviction_order()
        return shortage.victims if shortage.choose(order, self._sizes.__getitem__) else None

    # What is known about the disk

    def _count_read(self, size: int) -> None:
        self._counts["disk_reads"] += 1
        self._counts["disk_bytes"] += size

    async def _scan(self, *, makes_room: bool) -> None:
        """Make room for the queue, as far as chunks are not here, then find out which are."""
        self._next_scan_s = math.inf
        identity, ids, sizes = self._identity, self._ids, self._sizes
        queue_bytes = self._queue_bytes_max if makes_room else 0

        def work(disk: DiskTier) -> tuple[list[ChunkId], int, int]:
            disk.note_use(identity)  # also where all reads came from memory
            here = {*disk.list_chunks(identity)}
            absent_bytes = sum(
                size for name, size in zip(ids, sizes, strict=True) if name not in here
            )
            wanted_bytes = min(queue_bytes, absent_bytes)
            room_bytes = disk.folder.make_room(identity, wanted_bytes)
            return disk.list_chunks(identity), room_bytes, wanted_bytes

        answer = await self._in_thread(work, math.inf)
        if answer is None:
            self._next_scan_s = trio.current_time() + RESCAN_S
            return
        found, self._room_bytes = set(answer[0]), answer[1]
        if self._room_bytes < answer[2]:
            self._asks_room_from_s = trio.current_time() + RESCAN_S
        self._counts["disk_looks"] += 1
        for chunk, name in enumerate(self._ids):
            if name in found and not self._on_disk[chunk]:
                self._record_inserted(chunk)
            elif name not in found and self._on_disk[chunk]:
                self._record_evicted(chunk)
        self._on_change()

    def _record_inserted(self, chunk: int) -> None:
        self._on_disk[chunk] = True
        self._policy.insert(chunk, self._sizes[chunk])

    def _record_evicted(self, chunk: int) -> None:
        self._table.take_back(chunk)
        self._on_disk[chunk] = False
        self._policy.remove(chunk)
        self._counts["disk_evictions"] += 1

    def _failed(self, chunk: int, *, is_there: bool) -> None:
        """A chunk could not be read. Where it is still there, the disk has failed."""
        now_s = trio.current_time()
        if is_there:
            self._paused_until_s = now_s + DISK_PAUSE_S
        elif self._on_disk[chunk]:
            self._record_evicted(chunk)
        self._next_scan_s = min(self._next_scan_s, now_s + RESCAN_S)
        self._work.set()
        self._counts["disk_failures"] += 1

    # Threads

    @property
    def _is_paused(self) -> bool:
        return self._disk is None or trio.current_time() < self._paused_until_s

    async def _in_thread(self, work: Callable[[DiskTier], Made], within_s: float) -> Made | None:
        """The result of `work` in a thread; None where it fails or takes longer than `within_s`."""
        disk = self._disk
        assert disk is not None
        with trio.move_on_after(within_s):
            try:
                return await trio.to_thread.run_sync(
                    work, disk, limiter=self._threads, abandon_on_cancel=True
                )
            except (OSError, MemoryError, RuntimeError) as error:  # RuntimeError: no thread
                log.warning("the cache on this node's disk is not used for now: %s", error)
        return None

    def _key(self, chunk: int) -> ChunkKey:
        return ChunkKey(self._identity, self._ids[chunk])


_COUNTS = ("disk_reads", "disk_bytes", "disk_loads", "disk_writes", "disk_evictions",
           "disk_refused", "disk_plan_bypassed", "disk_failures", "disk_looks")  # fmt: skip
