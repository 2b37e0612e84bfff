"""What a node's memory has no room for, on its disk.

Owned here: which chunks of the dataset stand on the shelf of this node, which go when it is full,
and that a disk that fails, hangs or is slow costs nobody more than a moment. Not owned: the files
(`cache/disk.py`), and what is worth having here (`node_cache.py`). All in one trio loop; what
touches the disk is done in threads, which are left alone where they do not come back.

What is to be written waits in a queue of so many bytes, and is found there meanwhile; where the
queue is full, it is not written. Where the shelf is full, what this node does not own goes first,
then what stands in memory too, then what the policy says. At the end of a node what it has in
memory comes here, too (`flush`). Other tasks of the user may use the same shelf and dataset, so a
chunk may come or go without this process: it is looked for anew then.
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

from ..cache.disk import DiskTier
from ..cache.policy import Accessed, Evicted, EvictionPolicy, Inserted
from ..cache.tiers import ChunkKey, verify_chunk
from ..errors import FormatError, NoSpaceError
from ..format.entries import ChunkId
from .sealed_memory import SealedMemory, WritableMemory

log = logging.getLogger("diesel.task")

READ_TIMEOUT_S = 1.0
"""A disk that takes longer is slower than any store; who asked reads from there."""

DISK_PAUSE_S = 30.0
"""How long a disk that did not answer in time is left alone, or one that takes nothing."""

RESCAN_S = 60.0
"""After a chunk was not where it had been: then others may be gone, or be back."""

REQUEST_S, BYTES_PER_S = 0.0002, 1e9
"""What a read costs, roughly, of any SSD; it only weighs reading parts against reading chunks."""

OTHER_WRITER_WAIT_S = 0.2
"""For what was just being written at the end, by another process, or by a thread of this one that
was left alone."""

_THREADS = 8

Spans = Sequence[tuple[int, int]]
Made = TypeVar("Made")
Mask = npt.NDArray[np.bool_]


def disk_cost(size: int) -> float:
    """Seconds for one read of so many bytes."""
    return REQUEST_S + size / BYTES_PER_S


class WriteBackQueue:
    """The chunks of one version of a dataset on a shelf; of none, where there is no shelf."""

    def __init__(
        self,
        shelf: DiskTier | None,
        identity: UUID,
        policy: EvictionPolicy,
        *,
        evict_first: Callable[[], Mask],
        on_change: Callable[[], None],
        queue_bytes: int,
    ) -> None:
        """`evict_first`: the chunks that go before the policy is asked; `on_change` hears that
        there may be more room. Then `switch_version` which chunks there are."""
        self._shelf = shelf
        self._identity = identity
        self._policy = policy
        self._spare = evict_first
        self._changed = on_change
        self._queue_bytes_max = queue_bytes
        self._ids: Sequence[ChunkId] = ()
        self._sizes: Sequence[int] = ()
        self._on_disk: Mask = np.zeros(0, np.bool_)
        self._queue: OrderedDict[int, memoryview] = OrderedDict()
        self._queued_bytes = 0
        self._reserved_bytes = 0
        self._room_bytes = 0
        self._paused_until_s = self._writes_paused_until_s = -math.inf
        self._next_scan_s = -math.inf
        self._work = trio.Event()
        self._threads = trio.CapacityLimiter(_THREADS)
        self._counts: Counter[str] = Counter()

    @property
    def on_disk(self) -> Mask:
        """A flag for each chunk: whether it can be read from the disk."""
        return np.zeros_like(self._on_disk) if self._is_paused else self._on_disk

    def holds(self, chunk: int) -> bool:
        """Whether a chunk can be read from the disk, as far as is known."""
        return bool(self._on_disk[chunk]) and not self._is_paused

    def queued(self, chunk: int) -> memoryview | None:
        """A chunk that is to be written."""
        return self._queue.get(chunk)

    def has_room(self, size: int) -> bool:
        """Whether a chunk would be written without that another goes."""
        coming = self._queued_bytes + self._reserved_bytes + size
        return self._takes(size) and self._room_bytes >= coming

    def find_victims(self, chunk: int) -> list[int] | None:
        """Who would go for a chunk, beside what goes before the policy is asked; None where it
        would not be written."""
        size = self._sizes[chunk]
        if not self._takes(size) or not self._policy.admits(chunk, size, self._room_bytes):
            return None
        victims, spare = self._victims(size), self._spare()
        return None if victims is None else [each for each in victims if not spare[each]]

    def reserve(self, size: int) -> None:
        """A chunk is on its way here: the queue keeps room for it."""
        self._reserved_bytes += size

    def release_reservation(self, size: int) -> None:
        """It has come, or does not."""
        self._reserved_bytes -= size

    def enqueue(self, chunk: int, content: memoryview) -> None:
        """Write a chunk, which has been checked and will not change, where that is possible."""
        size = len(content)
        if chunk in self._queue or self._on_disk[chunk] or not self._takes(size):
            return
        self._queue[chunk] = content
        self._queued_bytes += size
        self._work.set()

    def record_access(self, chunk: int) -> None:
        """Somebody wants a chunk that is not in memory."""
        if self._shelf is not None:
            self._policy.on_event(Accessed(chunk))

    def switch_version(
        self, ids: Sequence[ChunkId], sizes: Sequence[int], before: Sequence[int]
    ) -> None:
        """These are the chunks; `before` has the number that each had, or -1."""
        old = self._on_disk
        for chunk in np.flatnonzero(old).tolist():
            self._policy.on_event(Evicted(chunk))
        self._ids, self._sizes = ids, sizes
        self._on_disk = np.array([each >= 0 and old[each] for each in before], np.bool_)
        for chunk in np.flatnonzero(self._on_disk).tolist():
            self._policy.on_event(Inserted(chunk, sizes[chunk]))
        after = {was: now for now, was in enumerate(before) if was >= 0}
        self._queue = OrderedDict(
            (after[chunk], content) for chunk, content in self._queue.items() if chunk in after
        )
        self._queued_bytes = sum(map(len, self._queue.values()))
        self._next_scan_s = -math.inf
        self._work.set()

    async def read(self, chunk: int, spans: Spans) -> list[memoryview] | None:
        """Bytes of a chunk, by start and size; None where it is not here after all."""
        key = self._key(chunk)

        def work(shelf: DiskTier) -> tuple[list[memoryview] | None, bool]:
            found = shelf.find(key)
            if found is not None:
                with found, contextlib.suppress(OSError, EOFError, MemoryError):
                    rooms = [np.empty(size, np.uint8).data for _, size in spans]
                    for (start, _), room in zip(spans, rooms, strict=True):
                        found.read_into(start, room)
                    return [room.toreadonly() for room in rooms], True
            return None, shelf.holds(key)

        answer = await self._in_thread(work, READ_TIMEOUT_S)
        contents, is_there = answer or (None, True)
        if contents is None:
            self._failed(chunk, is_there=is_there)
        else:
            self._counts["disk_reads"] += 1
            self._counts["disk_bytes"] += sum(size for _, size in spans)
        return contents

    async def load(self, chunk: int) -> SealedMemory | None:
        """A whole chunk, checked, in memory; None where it is not here after all.

        Raises OSError where there is no memory.
        """
        key, size = self._key(chunk), self._sizes[chunk]

        def work(shelf: DiskTier) -> tuple[SealedMemory | OSError | None, bool]:
            try:
                draft = WritableMemory(size)
            except OSError as error:
                return error, True
            found = shelf.find(key)
            if found is not None:
                with found:
                    try:
                        found.read_into(0, draft.room)
                        sealed = draft.seal()
                        verify_chunk(key, sealed.view)
                        return sealed, True
                    except (OSError, EOFError, MemoryError):
                        pass
                    except FormatError:
                        shelf.drop(key)
            draft.discard()
            return None, shelf.holds(key)

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
        """Bytes of a chunk were damaged, somebody says: look."""
        if self._on_disk[chunk]:
            key = self._key(chunk)

            def work(shelf: DiskTier) -> bool:
                shelf.report_damage(key)
                return shelf.holds(key)

            if await self._in_thread(work, READ_TIMEOUT_S) is False:
                self._failed(chunk, is_there=False)

    def stats(self) -> dict[str, int]:
        """What is here, as far as is known, and counts since the start."""
        standing = self._on_disk
        return {
            **{name: self._counts[name] for name in _COUNTS},
            "disk_used_bytes": int(np.asarray(self._sizes, np.int64)[standing].sum()),
            "disk_chunks": int(np.count_nonzero(standing)),
            "disk_queued_bytes": self._queued_bytes,
            "disk_rests": int(self._shelf is not None and self._is_paused),
        }

    async def run(self) -> None:
        """Look for what stands here, then write what comes. Ends when cancelled."""
        while self._shelf is not None:
            if trio.current_time() >= self._next_scan_s:
                await self._scan(self._queue_bytes_max)
            if self._queue:
                chunk, content = next(iter(self._queue.items()))
                await self._write(chunk, content)
                if self._queue.get(chunk) is content:
                    del self._queue[chunk]
                    self._queued_bytes -= len(content)
                self._changed()
                continue
            self._work = trio.Event()
            with trio.move_on_at(self._next_scan_s):
                await self._work.wait()

    async def flush(self, contents: Iterator[tuple[int, memoryview]], evictable: Mask) -> None:
        """At the end, after `run`: write these chunks, the first before the others, as far as there
        is room without that any but `evictable` goes. May be cancelled anywhere; the log says what
        came of it."""
        if self._shelf is None:
            return
        kept_bytes: list[int] = []
        late: list[tuple[int, memoryview]] = []
        outcome = "there is no more time"
        try:
            await self._scan(0)
            for chunk, content in itertools.chain(list(self._queue.items()), contents):
                if self._on_disk[chunk] or evictable[chunk]:
                    continue
                victims = self._choose_victims(len(content), evictable)
                is_there, is_others = await self._put(chunk, content, victims)
                if is_there:
                    self._on_disk[chunk] = True
                    kept_bytes.append(len(content))
                elif not is_others:
                    outcome = "the disk takes no more"
                    return
                else:
                    late.append((chunk, content))
            for chunk, content in late:
                await trio.sleep(OTHER_WRITER_WAIT_S)
                if (await self._put(chunk, content, []))[0]:
                    kept_bytes.append(len(content))
            outcome = "that is all"
        finally:
            log.info(
                "what was in memory is kept on the disk, %d chunks (%s bytes): %s",
                len(kept_bytes), f"{sum(kept_bytes):,}", outcome,
            )  # fmt: skip

    def close(self) -> None:
        """Let go of what was to be written."""
        self._queue.clear()
        self._queued_bytes = 0

    # The queue

    def _takes(self, size: int) -> bool:
        if (
            self._shelf is None
            or self._is_paused
            or trio.current_time() < self._writes_paused_until_s
        ):
            return False
        return self._queued_bytes + self._reserved_bytes + size <= self._queue_bytes_max

    async def _write(self, chunk: int, content: memoryview) -> None:
        victims = self._victims(len(content))
        if victims is None:
            self._counts["disk_refused"] += 1
            self._next_scan_s = min(self._next_scan_s, trio.current_time() + RESCAN_S)
            return
        is_there, is_others = await self._put(chunk, content, victims)
        if is_there:
            self._counts["disk_writes"] += 1
            if self._queue.get(chunk) is content:  # there may be another version by now
                self._record_inserted(chunk)
        elif not is_others:
            self._counts["disk_failures"] += 1
            self._writes_paused_until_s = trio.current_time() + DISK_PAUSE_S
            self._next_scan_s = min(self._next_scan_s, self._writes_paused_until_s)

    async def _put(
        self, chunk: int, content: memoryview, victims: Sequence[int]
    ) -> tuple[bool, bool]:
        """Write a chunk, for which these go: whether it stands here then; whether not as another
        was writing it."""
        key, gone = self._key(chunk), [self._key(each) for each in victims]
        for each in victims:
            self._record_evicted(each)

        def work(shelf: DiskTier) -> tuple[bool, bool, int]:
            if gone:
                shelf.evict(gone)
            is_others = False
            with contextlib.suppress(NoSpaceError):
                place = shelf.reserve(key, len(content))
                is_others = place is None
                if place is not None:
                    place.commit(content)
            return shelf.holds(key), is_others, shelf.free_bytes()

        answer = await self._in_thread(work, math.inf)
        is_there, is_others, self._room_bytes = answer or (False, False, 0)
        return is_there, is_others

    def _choose_victims(self, size: int, evictable: Mask) -> list[int]:
        """Which of these go for so many bytes, where that helps or not."""
        victims: list[int] = []
        missing = size - self._room_bytes
        if missing > 0:
            for chunk in np.flatnonzero(self._on_disk & evictable).tolist():
                if missing <= 0:
                    break
                victims.append(chunk)
                missing -= self._sizes[chunk]
        return victims

    def _victims(self, size: int) -> list[int] | None:
        """Who goes for so many bytes; None where that is not enough."""
        victims = self._choose_victims(size, self._spare())
        beyond = size - self._room_bytes
        missing = beyond - sum(self._sizes[each] for each in victims)
        for chunk in self._policy.victims(beyond) if missing > 0 else ():
            if chunk not in victims:
                victims.append(chunk)
                missing -= self._sizes[chunk]
            if missing <= 0:
                break
        return victims if missing <= 0 else None

    # What is known of the shelf

    async def _scan(self, needed_bytes: int) -> None:
        """Find out what stands here, once what nobody uses any more has made room."""
        self._next_scan_s = math.inf
        identity = self._identity

        def work(shelf: DiskTier) -> tuple[list[ChunkId], int]:
            shelf.note_use(identity)  # also where all reads have been from memory
            room_bytes = shelf.make_room(needed_bytes)
            return shelf.list_chunks(identity), room_bytes

        answer = await self._in_thread(work, math.inf)
        if answer is None:
            self._next_scan_s = trio.current_time() + RESCAN_S
            return
        self._counts["disk_looks"] += 1
        found, self._room_bytes = set(answer[0]), answer[1]
        for chunk, name in enumerate(self._ids):
            if name in found and not self._on_disk[chunk]:
                self._record_inserted(chunk)
            elif name not in found and self._on_disk[chunk]:
                self._record_evicted(chunk)
        self._changed()

    def _record_inserted(self, chunk: int) -> None:
        self._on_disk[chunk] = True
        self._policy.on_event(Inserted(chunk, self._sizes[chunk]))

    def _record_evicted(self, chunk: int) -> None:
        self._on_disk[chunk] = False
        self._policy.on_event(Evicted(chunk))
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
        return self._shelf is None or trio.current_time() < self._paused_until_s

    async def _in_thread(self, work: Callable[[DiskTier], Made], within_s: float) -> Made | None:
        """What `work` gives; None where it fails or does not come back in time."""
        shelf = self._shelf
        assert shelf is not None
        with trio.move_on_after(within_s):
            try:
                return await trio.to_thread.run_sync(
                    work, shelf, limiter=self._threads, abandon_on_cancel=True
                )
            except (OSError, MemoryError, RuntimeError) as error:  # the last: no thread
                log.warning("the cache on this node's disk is passed by: %s", error)
        return None

    def _key(self, chunk: int) -> ChunkKey:
        return ChunkKey(self._identity, self._ids[chunk])


_COUNTS = ("disk_reads", "disk_bytes", "disk_loads", "disk_writes", "disk_evictions",
           "disk_refused", "disk_failures", "disk_looks")  # fmt: skip
