"""The files of chunks on a node's disk: reads and writes them, in threads, since a disk may hang.

Chunks without room in memory wait in the ledger's queue until they are written. To make room, the
tier first evicts chunks of other datasets (`CacheFolder.make_room`); then `replacement.py` chooses.
Other tasks of the user may use the same folder and dataset, so chunks may come and go: if that is
noticed, the folder is scanned again. The file of a chunk that was read is lent to the data plane
(`chunk_table.py`).

Concurrency. All methods run in the master's one trio loop; only the `work` functions run in
threads, and they touch only their arguments and the disk tier, which is thread-safe. Reads that
begin in one turn of the loop share a thread, as entering one costs more than reading a few files.

After `READ_TIMEOUT_S`, a read or load is given up and its thread abandoned; then the disk rests for
a while, and callers read from the store. No reader waits for writes and scans, which may take as
long as the disk does. During any wait the version may change, and with it the numbers of chunks. So
after each wait the code checks that a number still means the same chunk (`Ledger.is_named`, the
identity of `ledger.table`, or the entry in the queue). The ledger is changed only between waits, in
the step that handles a thread's answer.
"""

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import trio

from ...cache.disk.chunks import ChunkFile, DiskTier
from ...cache.tiers import CacheHandle, ChunkKey
from ...errors import NoSpaceError
from ...format.entries import ChunkId
from .chunk_table import LOAN_S
from .ledger import Ledger, Mask
from .replacement import Replacement
from .sealed_memory import SealedMemory, WritableMemory

log = logging.getLogger("diesel.task")

READ_TIMEOUT_S = 1.0
"""A slower disk is slower than any store."""

DISK_PAUSE_S = 30.0
"""How long a disk is not used after it was late, and not written to after a failed write."""

RESCAN_S = 60.0
"""The delay of a scan after a chunk was found gone, as others may be gone, too; and the pause after
a scan that has found too little room."""

NOTE_USE_S = 60.0
"""How often a dataset is marked as used while its job lives, even if memory serves all reads. So
its chunks count as unused only from the job's end on (`cache/disk`)."""

OTHER_WRITER_WAIT_S = 0.2
"""The wait for another writer of a chunk: a process, or an abandoned thread."""

_THREADS = 8
_READS_PER_THREAD = 8  # each of one chunk; a chunk's first read reads and checks all of it

Spans = Sequence[tuple[int, int]]
"""Ranges of one chunk: start and bytes."""

Made = TypeVar("Made")


class _DiskRead:
    def __init__(self, key: ChunkKey, spans: Spans) -> None:
        self._key, self._spans = key, spans
        self.ended = trio.Event()
        self.contents: list[memoryview] | None = None
        self.file: CacheHandle | None = None
        self.is_there: bool | None = None  # None: unknown

    def read(self, disk: DiskTier) -> tuple[list[memoryview] | None, CacheHandle | None, bool]:
        """Runs in a thread. Returns the contents and the open file (None if the read failed), and
        whether the chunk is there."""
        found = disk.find(self._key)
        if found is not None:
            with contextlib.suppress(OSError, EOFError, MemoryError):
                buffers = [np.empty(size, np.uint8).data for _, size in self._spans]
                for (start, _), buffer in zip(self._spans, buffers, strict=True):
                    found.read_into(start, buffer)
                return [buffer.toreadonly() for buffer in buffers], found, True
            found.close()
        return None, None, disk.holds(self._key)


class Disk:
    """Without a disk tier (`tier` is None), only `run` and `flush` may be called."""

    def __init__(
        self,
        tier: DiskTier | None,
        ledger: Ledger,
        replacement: Replacement,
        *,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called if there may be more room."""
        self._tier, self._ledger, self._replacement = tier, ledger, replacement
        self._on_change = on_change
        self._counts = ledger.counts
        self._next_scan_s = self._next_room_s = -math.inf
        self._work = trio.Event()
        ledger.on_enqueue = self.wake
        self._threads = trio.CapacityLimiter(_THREADS)
        self._nursery: trio.Nursery | None = None  # while `run` runs
        self._wanted: list[_DiskRead] = []

    def wake(self) -> None:
        self._work.set()

    def note_version(self) -> None:
        """Scan again, as the numbers of chunks have changed."""
        self._next_scan_s = -math.inf
        self.wake()

    async def read(self, chunk: int, spans: Spans) -> list[memoryview] | None:
        """Returns None if the chunk is not there, or the disk is late or fails."""
        ledger, table = self._ledger, self._ledger.table
        wanted = _DiskRead(ledger.key(chunk), spans)
        if self._nursery is None:
            await self._read_all([wanted])
        else:
            self._wanted.append(wanted)
            if len(self._wanted) == 1:
                self._nursery.start_soon(self._read_wanted, self._nursery)
            await wanted.ended.wait()
        if wanted.contents is not None:
            self._counts["disk_reads"] += 1
            self._counts["disk_bytes"] += sum(size for _, size in spans)
            if wanted.file is not None and table is ledger.table and ledger.on_disk[chunk]:
                table.lend(chunk, wanted.file)
        elif wanted.is_there is not None:
            self._failed(chunk, is_there=wanted.is_there)
        return wanted.contents

    async def _read_wanted(self, nursery: trio.Nursery) -> None:
        """This task runs only after all reads of the same turn of the loop were added."""
        wanted, self._wanted = self._wanted, []
        for first in range(0, len(wanted), _READS_PER_THREAD):
            some = wanted[first : first + _READS_PER_THREAD]
            nursery.start_soon(self._read_all, some)

    async def _read_all(self, wanted: "Sequence[_DiskRead]") -> None:

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

    async def open_unchecked(self, chunk: int) -> ChunkFile | None:
        """Open a chunk's file for a reader that checks what it reads, and closes it. Returns None
        if the chunk is not there, or the disk is late."""
        key = self._ledger.key(chunk)

        def work(disk: DiskTier) -> tuple[ChunkFile | None, bool]:
            found = disk.open_unchecked(key)
            return found, found is not None or disk.holds(key)

        file, is_there = await self._in_thread(work, READ_TIMEOUT_S) or (None, True)
        if file is None:
            self._failed(chunk, is_there=is_there)
        else:
            self._counts["disk_reads"] += 1
            self._counts["disk_bytes"] += file.bytes
        return file

    async def load(self, chunk: int) -> SealedMemory | None:
        """Returns the whole chunk, checked; None if it is not there, is damaged, or the disk is
        late. Raises OSError if the machine has no memory for it."""
        key, size = self._ledger.key(chunk), self._ledger.sizes[chunk]

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
        """A reader got damaged bytes: check the chunk's file, and drop it if it is damaged."""
        self._ledger.table.take_back(chunk)
        if self._ledger.on_disk[chunk]:
            key = self._ledger.key(chunk)

            def work(disk: DiskTier) -> bool:
                disk.report_damage(key)
                return disk.holds(key)

            if await self._in_thread(work, READ_TIMEOUT_S) is False:
                self._failed(chunk, is_there=False)

    def stats(self) -> dict[str, int]:
        """This process's evictions from the folder that all datasets share."""
        folder = None if self._tier is None else self._tier.folder
        return {
            "disk_room_evictions": 0 if folder is None else folder.room_evictions,
            "disk_room_evicted_bytes": 0 if folder is None else folder.room_evicted_bytes,
        }

    async def run(self) -> None:
        if self._tier is None:
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
            self._ledger.table.take_back_old()

    async def _note_use_always(self) -> None:
        identity = self._ledger.identity

        def work(disk: DiskTier) -> None:
            disk.note_use(identity)

        while True:
            await trio.sleep(NOTE_USE_S)
            await self._in_thread(work, math.inf)  # while this hangs, no second one starts

    async def _write_always(self) -> None:
        while True:
            if trio.current_time() >= self._next_scan_s:
                await self._scan(makes_room=True)
            if queue := self._ledger.queue:
                chunk, content = next(iter(queue.items()))
                await self._write(chunk, content)
                self._ledger.dequeue(chunk, content)
                self._on_change()
                continue
            self._work = trio.Event()
            with trio.move_on_at(self._next_scan_s):
                await self._work.wait()

    async def flush(self, contents: Iterator[tuple[int, memoryview]], evictable: Mask) -> None:
        """After `run`: write these chunks, in this order, as far as there is room. Only chunks in
        `evictable` are replaced, and none of them is written. May be cancelled at any wait."""
        if self._tier is None:
            return
        ledger = self._ledger
        written_bytes: list[int] = []
        busy: list[tuple[int, memoryview]] = []  # another writer was at these
        outcome = "there was no more time"
        try:
            await self._scan(makes_room=False)
            for chunk, content in itertools.chain(list(ledger.queue.items()), contents):
                if ledger.on_disk[chunk] or evictable[chunk]:
                    continue
                victims = self._replacement.disk_victims(len(content), evictable) or []
                is_there, other_writes = await self._put(chunk, content, victims)
                if is_there:
                    ledger.record_written(chunk)
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

    async def _write(self, chunk: int, content: memoryview) -> None:
        victims = self._replacement.disk_victims(len(content))
        if victims is None:
            self._counts["disk_refused"] += 1
            self._next_scan_s = min(self._next_scan_s, trio.current_time() + RESCAN_S)
            return
        if not self._replacement.may_write(chunk, victims):
            self._counts["disk_plan_bypassed"] += 1  # the chunks on the disk are needed sooner
            return
        is_there, other_writes = await self._put(chunk, content, victims)
        if is_there:
            self._counts["disk_writes"] += 1
            if self._ledger.queue.get(chunk) is content:  # the version may have changed
                self._ledger.record_written(chunk)
        elif not other_writes:
            self._counts["disk_failures"] += 1
            rest_until_s = trio.current_time() + DISK_PAUSE_S
            self._ledger.disk_writes_rest_until_s = rest_until_s
            self._next_scan_s = min(self._next_scan_s, rest_until_s)

    async def _put(
        self, chunk: int, content: memoryview, victims: Sequence[int]
    ) -> tuple[bool, bool]:
        """Erase `victims` and write a chunk. Returns whether the chunk is on the disk now, and
        whether another process or thread is writing it."""
        ledger = self._ledger
        key, victim_keys = ledger.key(chunk), [ledger.key(each) for each in victims]
        size, total_bytes = len(content), ledger.total_bytes
        for each in victims:
            self._record_erased(each)

        def work(disk: DiskTier) -> tuple[bool, bool, int]:
            if victim_keys:
                disk.evict(victim_keys)
            other_writes = False
            with contextlib.suppress(NoSpaceError):
                reservation = disk.reserve(key, size)
                other_writes = reservation is None
                if reservation is not None:
                    reservation.commit(content)
            return disk.holds(key), other_writes, disk.folder.free_bytes()

        answer = await self._in_thread(work, math.inf)
        is_there, other_writes, ledger.disk_room_bytes = answer or (False, False, 0)
        now_s = trio.current_time()
        wanted_bytes = min(ledger.room.queue_bytes, total_bytes - ledger.tables.disk.bytes)
        if ledger.disk_room_bytes < wanted_bytes and now_s >= self._next_room_s:
            self._next_scan_s = now_s  # a scan makes room
        return is_there, other_writes

    # The state of the disk

    async def _scan(self, *, makes_room: bool) -> None:
        """Record which chunks are on the disk. With `makes_room`, first evict chunks of other
        datasets until the absent chunks fit, or as many of them as the queue can hold."""
        self._next_scan_s = math.inf
        ledger = self._ledger
        identity, ids, sizes = ledger.identity, ledger.ids, ledger.sizes
        queue_bytes = ledger.room.queue_bytes if makes_room else 0

        def work(disk: DiskTier) -> tuple[list[ChunkId], int, int]:
            disk.note_use(identity)  # also if all reads came from memory
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
        found, ledger.disk_room_bytes = set(answer[0]), answer[1]
        if ledger.disk_room_bytes < answer[2]:
            self._next_room_s = trio.current_time() + RESCAN_S
        self._counts["disk_looks"] += 1
        for chunk, name in enumerate(ledger.ids):
            if name in found and not ledger.on_disk[chunk]:
                ledger.record_written(chunk)
            elif name not in found and ledger.on_disk[chunk]:
                self._record_erased(chunk)
        self._on_change()

    def _record_erased(self, chunk: int) -> None:
        self._ledger.record_erased(chunk)
        self._counts["disk_evictions"] += 1

    def _failed(self, chunk: int, *, is_there: bool) -> None:
        now_s = trio.current_time()
        if is_there:
            self._ledger.disk_rests_until_s = now_s + DISK_PAUSE_S
        elif self._ledger.on_disk[chunk]:
            self._record_erased(chunk)
        self._next_scan_s = min(self._next_scan_s, now_s + RESCAN_S)
        self._work.set()
        self._counts["disk_failures"] += 1

    # Threads

    async def _in_thread(self, work: Callable[[DiskTier], Made], within_s: float) -> Made | None:
        """Returns None if `work` failed or took longer than `within_s` seconds."""
        tier = self._tier
        assert tier is not None
        with trio.move_on_after(within_s):
            try:
                return await trio.to_thread.run_sync(
                    work, tier, limiter=self._threads, abandon_on_cancel=True
                )
            except (OSError, MemoryError, RuntimeError) as error:  # RuntimeError: no thread
                log.warning("the cache on this node's disk is not used for now: %s", error)
        return None
