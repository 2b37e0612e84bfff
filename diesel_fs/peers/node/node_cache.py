"""The chunks that a node keeps: in memory that its readers can map, and on its disk.

If a chunk is not worth memory, only the wanted parts are read from the disk, or by the caller from
the store.

Concurrency. Callers are tasks of the master's one trio loop. Only `async` methods wait, so all
others are atomic. The data plane's thread reads chunks in memory through the ledger's chunk table;
the policy learns of its hits later, in batches.

A caller of `get` or `read` may wait for a fetch, a load from the disk, or a read of the disk.
Meanwhile the chunk may come, be evicted, or leave the disk, and the version may change the meaning
of chunk numbers. So `_load` begins anew after each wait that gave nothing, up to `_TRIES` times,
and gives up if the chunk's number means another chunk by then. A cancelled caller ends no fetch:
`run` owns the fetches.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from uuid import UUID

import numpy as np
import trio

from ...cache.disk.chunks import ChunkFile, DiskTier
from ...cache.policies.costs import ReadCosts
from ...cache.policies.eviction import EvictionPolicy, UnitValues
from ...cache.tiers import verify_chunk
from ...errors import FormatError
from ...format.entries import ChunkId
from ..wire import Sizes
from .chunk_future import ChunkFuture
from .chunk_table import ChunkTable
from .disk import Disk, Spans
from .fetches import Fetch, Fetches
from .ledger import Ledger, Mask, Room, Tables, chunk_budget_bytes, write_back_bytes
from .replacement import Replacement
from .sealed_memory import sealed_memories_max

log = logging.getLogger("diesel.task")

_TRIES = 4  # of one call, if a chunk is evicted before it is read


@dataclass(frozen=True, slots=True, eq=False)
class CacheOptions:
    memory_bytes: int
    """For chunks, and for the queue to the disk."""
    policy: Callable[[], EvictionPolicy]
    """Called for memory and for the disk."""
    disk: DiskTier | None = None
    costs: ReadCosts | None = None
    """The caller's measured costs of a fetch; None: the cache measures its own."""


class NodeCache:
    def __init__(
        self,
        identity: UUID,
        ids: Sequence[ChunkId],
        sizes: Sizes,
        options: CacheOptions,
        fetch: Fetch,
    ) -> None:
        memory_bytes, has_disk = options.memory_bytes, options.disk is not None
        room = Room(
            chunk_budget_bytes(memory_bytes, sizes, has_disk=has_disk),
            sealed_memories_max(),
            write_back_bytes(memory_bytes, sizes) if has_disk else 0,
        )
        tables = Tables(options.policy(), options.policy())
        costs = options.costs or ReadCosts()
        self.ledger = Ledger(identity, ids, sizes, room, tables, trio.current_time)
        self.replacement = Replacement(self.ledger, costs)
        self._disk = Disk(options.disk, self.ledger, self.replacement, on_change=self._note_room)
        self.fetches = Fetches(
            self.ledger, self.replacement, self._disk, fetch, costs, measures=options.costs is None
        )
        self._warn_of_limits()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """If it is cancelled, callers that wait get nothing."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._disk.run)
            await nursery.start(self.fetches.run)
            task_status.started()

    # Reading

    @property
    def table(self) -> ChunkTable:
        return self.ledger.table

    def holds(self, chunk: int) -> bool:
        return self.ledger.holds(chunk)

    def find(self, chunk: int) -> memoryview | None:
        """Counts as a use. The view stays valid."""
        view = self.ledger.views.get(chunk)
        if view is not None:
            self.replacement.record_hits((chunk,), 0)
        return view

    async def get(self, chunk: int, wanted_bytes: int, *, load: bool) -> memoryview | None:
        """A whole chunk, of which the caller needs `wanted_bytes`: from memory, from the disk, or,
        with `load` and if it is worth it, fetched. None: the caller reads from the store. Raises
        DieselError if the fetch failed."""
        view = self.find(chunk)
        if view is None:
            found = await self._load(chunk, wanted_bytes, None, load=load)
            view = None if found is None else found[0]
        return view

    async def read(self, chunk: int, spans: Spans, *, load: bool) -> list[memoryview] | None:
        """As `get`, for ranges of a chunk. If the chunk is on the disk and not worth memory, only
        these are read."""
        view, wanted_bytes = self.ledger.views.get(chunk), sum(size for _, size in spans)
        if view is None:
            return await self._load(chunk, wanted_bytes, spans, load=load)
        self.replacement.record_hits([chunk] * len(spans), wanted_bytes)
        return [view[start : start + size] for start, size in spans]

    async def _load(
        self, chunk: int, wanted_bytes: int, spans: Spans | None, *, load: bool
    ) -> list[memoryview] | None:
        """`spans` None: the whole chunk, as one item."""
        ledger = self.ledger
        key, size, is_new = ledger.key(chunk), ledger.sizes[chunk], True
        self.replacement.record_absent(chunk)
        for _ in range(_TRIES):
            if not ledger.is_named(chunk, key):
                break
            view = ledger.views.get(chunk) or ledger.queue.get(chunk)
            flight = self.fetches.in_flight.get(chunk)
            if view is None and flight is None:
                flight = self.fetches.begin(chunk, wanted_bytes, load=load, is_new=is_new)
                is_new = False
            if view is None and flight is not None:
                await flight.done.wait()
                if flight.error is not None:
                    raise flight.error.with_traceback(None)
                view = flight.view
                if view is None and not flight.from_disk:
                    break
            elif view is None:
                if not ledger.is_readable(chunk):
                    break
                found = await self._disk.read(chunk, spans or [(0, size)])
                if found is not None:
                    self.replacement.record_disk_read(chunk, wanted_bytes)
                    return found
            if view is not None:
                ledger.counts["waited"] += 1
                return [view[begin : begin + part] for begin, part in spans or [(0, size)]]
        ledger.counts["misses"] += 1
        if load:
            self.replacement.admission.record_unserved(wanted_bytes)
        return None

    async def lend_file(self, chunk: int) -> ChunkFile | None:
        """The file of a chunk that is only on the disk, unchecked; the caller closes it. None: use
        `get`."""
        ledger = self.ledger
        is_near = chunk in ledger.views or chunk in ledger.queue or chunk in self.fetches.in_flight
        if is_near or not ledger.is_readable(chunk) or not self.replacement.may_lend(chunk):
            return None
        key = ledger.key(chunk)
        file = await self._disk.open_unchecked(chunk)
        if file is not None and ledger.is_named(chunk, key):
            self.replacement.record_lent(chunk)
        return file

    async def recheck(self, chunk: int) -> None:
        """A reader got damaged bytes: check the chunk in memory and on the disk, and drop it there
        if it is damaged."""
        ledger = self.ledger
        memory, key = ledger.memories.get(chunk), ledger.key(chunk)
        if memory is not None:
            try:
                await self.fetches.in_thread(verify_chunk, key, memory.view)
            except FormatError as error:
                log.error("a chunk in this node's memory is damaged: %s", error)
                if ledger.memories.get(chunk) is memory:
                    ledger.drop(chunk)
            except (MemoryError, RuntimeError):  # RuntimeError: no thread can be started
                return
            if not ledger.is_named(chunk, key):
                return
        await self._disk.recheck(chunk)

    # Pins

    def pin(self, pinner: int, chunk: int) -> int | None:
        """Pin a chunk for the client process `pinner`. Returns a descriptor of its memory, which
        the cache closes; None if the chunk is not in memory, or is revoked (`PinTable`)."""
        pins, memory = self.ledger.pins, self.ledger.memories.get(chunk)
        if memory is None or pins.is_revoked(memory):
            return None
        pins.pin(pinner, chunk, memory)
        self.replacement.record_hits((chunk,), memory.bytes)
        return memory.descriptor

    def unpin(self, pinner: int, chunks: Iterable[int] | None) -> None:
        """`chunks` None: all of a process that has ended."""
        self.ledger.unpin(pinner, chunks)
        self._note_room()

    def revoked(self, pinner: int) -> list[int]:
        return self.ledger.pins.revoked(pinner)

    # Owners and versions

    def set_owned(self, owned: Mask) -> None:
        """Other chunks are replaced first."""
        self.ledger.set_owned(owned.astype(np.bool_))
        self._note_room()

    def switch_version(self, ids: Sequence[ChunkId], sizes: Sizes) -> None:
        before = self.replacement.switch_version(ids, sizes)
        self._disk.note_version()
        self.fetches.switch_version(before)

    @property
    def held(self) -> Mask:
        return self.ledger.held

    # What will be read

    @property
    def uses_future(self) -> bool:
        return self.replacement.uses_future

    @property
    def uses_left(self) -> int:
        """Coming reads of all chunks; 0 if unknown."""
        future = self.replacement.future
        return 0 if future is None else future.uses.left

    def set_future(self, future: ChunkFuture | None) -> None:
        """`future` has the coming reads of the whole task; None: unknown."""
        self.replacement.set_future(future)
        self.fetches.lookahead.begin(future, trio.current_time())
        self.fetches.note_future()

    def set_values(self, values: UnitValues | None) -> None:
        """As `EvictionPolicy.set_values`; None: unknown."""
        self.replacement.set_values(values)

    def set_positions(self, positions: Sequence[int]) -> None:
        """Set each reader's position in its order, which may go back. Positions are up to a second
        old, so decisions may be worse, but bytes never wrong."""
        future = self.replacement.future
        if future is None:
            return
        passed = self.fetches.lookahead.move_readers(future, positions, trio.current_time())
        if passed is not None:
            self.replacement.note_passed(passed)
            self.fetches.note_future()

    def set_held_elsewhere(self, is_held: Mask) -> None:
        self.ledger.held_elsewhere = is_held

    # The end

    async def flush_to_disk(self, share: Mask) -> None:
        """After `run`: write chunks from memory to the disk as far as there is room, those in
        `share` first, then the others that this node owns. Only chunks of other nodes are replaced.
        May be cancelled anywhere."""
        ledger = self.ledger
        ours = share | ledger.owned
        first, then = np.flatnonzero(share), np.flatnonzero(ours & ~share)
        for chunk in np.flatnonzero(ledger.present & ~ours).tolist():
            ledger.drop(chunk)
        await self._disk.flush(self._drain_memory([*first.tolist(), *then.tolist()]), ~ours)

    def _drain_memory(self, chunks: Iterable[int]) -> Iterator[tuple[int, memoryview]]:
        """Yields those that are in memory, and drops each with the next step: other processes may
        wait for memory."""
        for chunk in chunks:
            view = self.ledger.views.get(chunk)
            if view is not None:
                yield chunk, view
                del view
                self.ledger.drop(chunk)

    def stats(self) -> dict[str, int]:
        self.replacement.flush_file_reads()
        self.replacement.flush_hits()
        return {**self.ledger.stats(), **self._disk.stats()}

    def close(self) -> None:
        self.ledger.close()

    def _note_room(self) -> None:
        self.fetches.note_room()

    def _warn_of_limits(self) -> None:
        ledger = self.ledger
        part = min(ledger.room.memory_bytes / max(ledger.total_bytes, 1), 1.0)
        chunks, chunks_max = len(ledger.sizes) * part, ledger.room.memory_chunks
        if chunks > chunks_max:
            log.warning(
                "the memory of this node has room for %s chunks, but its limits allow only %s:"
                " raise the limits of descriptors (ulimit -n) and of mappings (sysctl"
                " vm.max_map_count), or put the dataset in larger chunks",
                f"{int(chunks):,}", f"{chunks_max:,}",
            )  # fmt: skip
