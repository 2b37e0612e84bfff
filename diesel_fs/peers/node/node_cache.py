"""The chunks that a node keeps: in memory that its readers can map, and on its disk.

This module decides which chunks come and when. A miss fetches a chunk at once where there is free
room in memory or on the disk, or room that chunks of other nodes take. Where a chunk of this node
would be replaced, the new chunk must be worth it (`cache/admission.py`) and the policy must agree;
the same rule holds for chunks that come from the disk to memory. What is not fetched is read from
the disk in parts, or by the caller from the store. `prefetch_owned` fetches this node's share
without misses. A chunk is kept only after it has been checked whole, in memory that is sealed by
then. However many callers wait for a chunk, it is fetched once.

Where it is known what will be read (`set_future`), the policy `plan` decides instead of admission:
a chunk replaces others that are needed later, if enough of it is read before they are needed again
(`chunk_future.py`). Then `prefetch_planned` also fetches what is read next, the nearest first, and
replaces nothing that is needed earlier.

`node_memory.py` and `write_back.py` choose the chunks that are replaced, `members/ownership.py` the
owners of chunks, and the caller's `fetch` knows where a chunk is read from.

All calls come from one trio loop, beside `run`, which runs the fetches: a caller that is cancelled
does not end the fetch for others. The version may change at any wait, and with it the numbers of
chunks: each fetch knows the current number of its chunk.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar
from uuid import UUID

import numpy as np
import numpy.typing as npt
import trio

from ...cache.admission import SkiRentalAdmission
from ...cache.costs import ReadCosts
from ...cache.disk.chunks import DiskTier
from ...cache.policy import EvictionPolicy, NoEviction, UnitValues
from ...cache.tiers import ChunkKey, verify_chunk
from ...errors import DieselError, FormatError
from ...format.entries import ChunkId
from ...orders.future import FutureUses
from .chunk_future import ChunkFuture
from .node_memory import NodeMemory
from .sealed_memory import SealedMemory, WritableMemory
from .write_back import SSD_COSTS, Mask, Spans, WriteBackQueue

log = logging.getLogger("diesel.task")

FETCHES = 8
"""Fetches at once that callers wait for; further ones queue. Eight hide the latency of a distant
store and share its link without making any caller wait too long."""

FILL_FETCHES = 2
"""Fetches at once of `prefetch_owned`. They start only while no caller waits for a fetch."""

WRITE_BACK_BYTES_MAX = 64 << 20
"""Memory for chunks that are to be written to the disk: at most an eighth of the node's memory, and
at least one chunk."""

FILL_RETRY_S, FILL_RETRY_MAX_S = 1.0, 60.0
"""Seconds before a chunk that could not be fetched ahead is tried again; they double up to the
maximum."""

PREFETCH_S = 4.0
"""How far ahead of the readers `prefetch_planned` fetches: what they know of each other is up to a
second old, and a fetch may take that long, too."""

PREFETCH_DIVISOR = 8
"""What is fetched ahead and not read yet takes at most this part (an eighth) of the memory."""

RATE_PERIOD_S = 2.0
"""The rate of the readers is measured over at least this long, as each tells its position once a
second."""

_PREFETCH_CHUNKS_MAX = 32  # looked at after each exchange of positions: a decision takes 50 us
_RATE_WEIGHT = 0.5  # of the newest measurement of the readers' rate

_TRIES = 4  # of one call, where a chunk that it has found is evicted before it is read

Fetch = Callable[[int, memoryview], Awaitable[None]]
"""Fills `room` with the whole chunk of a number, and keeps no part of `room` afterwards. Raises
DieselError."""

Given = ParamSpec("Given")
Made = TypeVar("Made")


def chunk_budget_bytes(memory_bytes: int, sizes: npt.NDArray[np.uint64], *, has_disk: bool) -> int:
    """The part of `memory_bytes` for chunks that stay in memory. `sizes`: the bytes of each chunk
    of the dataset."""
    return max(memory_bytes - (write_back_bytes(memory_bytes, sizes) if has_disk else 0), 0)


def write_back_bytes(memory_bytes: int, sizes: npt.NDArray[np.uint64]) -> int:
    """The part of `memory_bytes` for chunks that are to be written to the disk."""
    largest = int(sizes.max(initial=0))
    return min(max(memory_bytes // 8, largest), max(WRITE_BACK_BYTES_MAX, largest))


@dataclass(slots=True, eq=False)
class _InFlight:
    """A chunk that is being fetched (from another node or the store) or loaded (from this node's
    disk)."""

    chunk: int  # its number in the current version, or -1 where that does not have it
    key: ChunkKey
    size: int
    to_memory: bool
    from_disk: bool
    is_prefetch: bool
    done: trio.Event = field(default_factory=trio.Event)
    view: memoryview | None = None
    error: DieselError | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether the fetch was started for a caller."""
        return not self.from_disk and not self.is_prefetch


class NodeCache:
    """The chunks of one version of a dataset that this node keeps."""

    def __init__(
        self,
        identity: UUID,
        ids: Sequence[ChunkId],
        sizes: npt.NDArray[np.uint64],
        *,
        memory_bytes: int,
        policy: EvictionPolicy,
        fetch: Fetch,
        disk: DiskTier | None = None,
        disk_policy: EvictionPolicy | None = None,
        costs: ReadCosts | None = None,
    ) -> None:
        """`costs` is measured by the caller; without it, the fetches are measured. `disk_policy`
        chooses the chunks that are replaced on the disk; without it none is."""
        budget = chunk_budget_bytes(memory_bytes, sizes, has_disk=disk is not None)
        queue = write_back_bytes(memory_bytes, sizes) if disk is not None else 0
        self._identity, self._has_disk = identity, disk is not None
        self._ids, self._sizes = list(ids), [int(size) for size in sizes]
        self._size_column = sizes.astype(np.int64)
        self._fetch = fetch
        self._costs = costs or ReadCosts()
        self._measures = costs is None
        self._admission = SkiRentalAdmission(self._sizes, self._costs.read_s, budget)
        self._disk_admission = SkiRentalAdmission(self._sizes, SSD_COSTS.read_s, budget)
        self._write_back = WriteBackQueue(
            disk,
            identity,
            disk_policy or NoEviction(),
            evict_first=self._evict_first_on_disk,
            on_change=self._notify_changed,
            queue_bytes=queue,
            fetch_cost=self._costs.read_s,
        )
        self.memory = NodeMemory(
            sizes,
            budget,
            policy,
            on_evict=self._write_back.enqueue,
            on_hits=self._record_hits,
            on_room=self._notify_changed,
        )
        self._write_back.switch_version(self._ids, self._sizes, [-1] * len(ids), self.memory.table)
        self._in_flight: dict[int, _InFlight] = {}
        self._nursery: trio.Nursery | None = None
        self._fetchers = trio.CapacityLimiter(FETCHES)
        self._threads = trio.CapacityLimiter(FETCHES + FILL_FETCHES)
        self._awaited = 0
        self._no_awaited = trio.Event()  # set when `_awaited` comes to 0
        self._changed = trio.Event()
        self._future: ChunkFuture | None = None
        self._future_changed = trio.Event()  # replaced when the future or a position changes
        self._measured_s = 0.0  # when the readers' rate was measured, and how many uses were left
        self._measured_left = 0
        self._reads_per_s = 0.0  # of one reader, smoothed; 0 until measured
        self._ahead: dict[int, int] = {}  # chunks fetched ahead, and when each is read first
        self._version = 0
        self._counts: Counter[str] = Counter()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run fetches and writes to the disk until cancelled. Callers that wait then get
        nothing."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                nursery.start_soon(self._write_back.run)
                task_status.started()
                await trio.sleep_forever()
            finally:
                self._nursery = None

    # Reading

    def holds(self, chunk: int) -> bool:
        """Whether a chunk is in memory, or on the disk as far as is known."""
        return (
            chunk in self.memory.views
            or self._write_back.holds(chunk)
            or self._write_back.queued(chunk) is not None
        )

    async def get(self, chunk: int, wanted_bytes: int, *, load: bool) -> memoryview | None:
        """A whole chunk, of which the caller needs `wanted_bytes`: from memory, from the disk, or,
        with `load` and where it is worth it, fetched.

        None where it is not here and will not be: read the bytes from the store. Raises DieselError
        where the fetch failed.
        """
        view = self.memory.find(chunk)
        if view is None:
            found = await self._load(chunk, wanted_bytes, None, load=load)
            view = None if found is None else found[0]
        return view

    async def read(self, chunk: int, spans: Spans, *, load: bool) -> list[memoryview] | None:
        """Bytes of a chunk, by start and size, all of which lie in it. As `get`; but of a chunk on
        the disk that is not worth memory only these bytes are read."""
        view, wanted_bytes = self.memory.views.get(chunk), sum(size for _, size in spans)
        if view is None:
            return await self._load(chunk, wanted_bytes, spans, load=load)
        self.memory.record_hits([chunk] * len(spans), wanted_bytes)
        return [view[start : start + size] for start, size in spans]

    async def recheck(self, chunk: int) -> None:
        """A reader got damaged bytes of a chunk from here: check the chunk, and drop it where it is
        damaged."""
        memory = self.memory.memory_of(chunk)
        if memory is not None:
            key = self._key(chunk)
            try:
                await self._in_thread(verify_chunk, key, memory.view)
            except FormatError as error:
                log.error("a chunk in this node's memory is damaged: %s", error)
                if self.memory.memory_of(chunk) is memory:
                    self.memory.drop(chunk)
            except (MemoryError, RuntimeError):  # RuntimeError: no thread can be started
                return
            if chunk >= len(self._ids) or self._key(chunk) != key:
                return
        await self._write_back.recheck(chunk)

    # Owners and versions

    def set_owned(self, owned: npt.NDArray[np.bool_]) -> None:
        """Set which chunks are this node's. All others are replaced first."""
        self.memory.set_owned(owned.astype(np.bool_))
        self._notify_changed()

    # What will be read

    @property
    def uses_future(self) -> bool:
        """Whether the policy decides by what will be read, where that is known."""
        return self.memory.uses_future

    @property
    def uses_left(self) -> int:
        """How many reads of chunks are known to come."""
        return 0 if self._future is None else self._future.uses.left

    def set_future(self, future: ChunkFuture | None) -> None:
        """Set what all readers of the task will read, until another is set. None: it is not known
        any more."""
        self._future = future
        self._ahead.clear()
        self._measured_s, self._measured_left = trio.current_time(), self.uses_left
        self.memory.set_future(future)
        self._write_back.set_future(future)
        self._notify_future()

    def set_values(self, values: UnitValues | None) -> None:
        """Set what chunks are worth that nobody is known to read, until other values are set."""
        self.memory.set_values(values)
        self._write_back.set_values(values)

    def set_positions(self, positions: Sequence[int]) -> None:
        """Set where each reader of the future is, as a position in its order; it may have gone
        back. Positions are up to a second old: decisions on them may cost time, and never
        bytes that are wrong."""
        if self._future is None:
            return
        uses = self._future.uses
        passed: list[npt.NDArray[np.int64]] = []
        for reader, position in enumerate(positions):
            if position != uses.position(reader):
                passed.append(uses.seek(reader, position).astype(np.int64))
        if not passed:
            return
        self._measure_rate(uses)
        chunks = np.concatenate(passed)
        self.memory.note_passed(chunks)
        self._write_back.note_passed(chunks)
        self._notify_future()

    def _measure_rate(self, uses: FutureUses) -> None:
        """Measure how fast a reader advances, over a time in which all have told their positions
        more than once."""
        seconds = trio.current_time() - self._measured_s
        if seconds >= RATE_PERIOD_S and uses.ranks:
            rate = max(self._measured_left - uses.left, 0) / uses.ranks / seconds
            self._reads_per_s += _RATE_WEIGHT * (rate - self._reads_per_s)
            self._measured_s, self._measured_left = trio.current_time(), uses.left

    def set_held_elsewhere(self, is_held: npt.NDArray[np.bool_]) -> None:
        """Set which chunks other nodes have, as far as is known."""
        self.memory.set_held_elsewhere(is_held)

    @property
    def held(self) -> npt.NDArray[np.bool_]:
        """A flag for each chunk: whether it is in memory or on the disk."""
        return self.memory.present | self._write_back.on_disk

    def switch_version(self, ids: Sequence[ChunkId], sizes: npt.NDArray[np.uint64]) -> None:
        """Switch to another version of the dataset. Chunks in both versions stay, and stay this
        node's. Clients' pins keep the old numbers of their chunks."""
        old = {key: number for number, key in enumerate(zip(self._ids, self._sizes, strict=True))}
        self._ids, self._sizes = list(ids), [int(size) for size in sizes]
        self._size_column = sizes.astype(np.int64)
        before = [old.get(key, -1) for key in zip(self._ids, self._sizes, strict=True)]
        after = {was: number for number, was in enumerate(before) if was >= 0}
        self.memory.switch_version(sizes, before)
        self._write_back.switch_version(self._ids, self._sizes, before, self.memory.table)
        self._admission.switch_version(self._sizes, before)
        self._disk_admission.switch_version(self._sizes, before)
        for flight in self._in_flight.values():
            flight.chunk = after.get(flight.chunk, -1)
        self._in_flight = {each.chunk: each for each in self._in_flight.values() if each.chunk >= 0}
        self._version += 1
        self._future, self._reads_per_s = None, 0.0
        self._ahead.clear()
        self._notify_future()
        self._notify_changed()

    async def prefetch_owned(self, order: npt.NDArray[np.int64]) -> None:
        """Fetch this node's chunks that are not here, in this order, while room is free; again
        whenever its share or the room grows. Ends with `switch_version`, or when cancelled."""
        version, retry_s = self._version, FILL_RETRY_S
        while version == self._version:
            changed, failures = self._changed, self._counts["fill_failures"]
            absent = self.memory.owned & ~self.memory.present & ~self._write_back.on_disk
            left = iter(order[absent[order]].tolist())
            async with trio.open_nursery() as nursery:
                for _ in range(FILL_FETCHES):
                    nursery.start_soon(self._fill_from, left, version)
            if failures == self._counts["fill_failures"]:
                retry_s = FILL_RETRY_S
                await changed.wait()
            else:
                with trio.move_on_after(retry_s):
                    await changed.wait()
                retry_s = min(2 * retry_s, FILL_RETRY_MAX_S)

    async def prefetch_planned(self) -> None:
        """Where the future is known, fetch this node's chunks that are read within `PREFETCH_S`,
        the nearest first, into free room or in place of what is needed later. Runs until
        cancelled."""
        while True:
            changed = self._future_changed
            if (future := self._future) is not None:
                left = iter(self._soonest_absent(future))
                async with trio.open_nursery() as nursery:
                    for _ in range(FILL_FETCHES):
                        nursery.start_soon(self._fill_from, left, self._version, future)
            await changed.wait()

    def _soonest_absent(self, future: ChunkFuture) -> list[int]:
        """This node's chunks that are not here and are read soon, the soonest first, within the
        limits of what is fetched ahead."""
        now, uses = future.uses.now, future.uses
        ahead = np.array([*self._ahead], np.int64)
        times = dict(zip(ahead.tolist(), uses.next_time(ahead).tolist(), strict=True))
        self._ahead = {
            chunk: time
            for chunk, time in self._ahead.items()
            if time == times[chunk] and time > now and self.memory.present[chunk]
        }
        room_bytes = self.memory.budget_bytes_max // PREFETCH_DIVISOR
        room_bytes -= sum(self._sizes[chunk] for chunk in self._ahead)
        mine = np.flatnonzero(self.memory.owned & ~self.held)
        before = now + int(PREFETCH_S * self._reads_per_s)
        soonest = future.soonest(mine, before)[:_PREFETCH_CHUNKS_MAX]
        some = []
        for chunk, time in zip(soonest.tolist(), uses.next_time(soonest).tolist(), strict=True):
            room_bytes -= self._sizes[chunk]
            if room_bytes < 0:
                break
            some.append(chunk)
            self._ahead[chunk] = time
        return some

    def _notify_future(self) -> None:
        """Wake `prefetch_planned`."""
        changed, self._future_changed = self._future_changed, trio.Event()
        changed.set()

    async def flush_to_disk(self, share: Mask) -> None:
        """At the end, after `run`: write chunks from memory to the disk, as far as there is room:
        `share` first, then this node's other chunks. Only chunks of other nodes are replaced. May
        be cancelled anywhere."""
        ours = share | self.memory.owned
        first, then = np.flatnonzero(share), np.flatnonzero(ours & ~share)
        for chunk in np.flatnonzero(self.memory.present & ~ours).tolist():
            self.memory.drop(chunk)
        await self._write_back.flush(self._drain_memory([*first.tolist(), *then.tolist()]), ~ours)

    def _drain_memory(self, chunks: Iterable[int]) -> Iterator[tuple[int, memoryview]]:
        """Those of these chunks that are in memory. Each is dropped when the caller is done with
        it, as other processes may be waiting for memory."""
        for chunk in chunks:
            view = self.memory.views.get(chunk)
            if view is not None:
                yield chunk, view
                del view
                self.memory.drop(chunk)

    def stats(self) -> dict[str, int]:
        """What is here, in bytes and chunks, and counters since the start. `held_bytes` is of all
        chunks that are here, of whichever owner, and `dataset_bytes` of all that there are."""
        self._flush_file_reads()
        mine, held = self.memory.owned, self.held
        return {
            **{name: self._counts[name] for name in _COUNTS},
            **self.memory.stats(),
            **self._write_back.stats(),
            "share_chunks": int(np.count_nonzero(mine)),
            "share_held_chunks": int(np.count_nonzero(mine & held)),
            "held_bytes": int(self._size_column[held].sum()),
            "dataset_bytes": int(self._size_column.sum()),
        }

    def close(self) -> None:
        """Release all memory. Views and other processes' mappings stay valid."""
        self.memory.close()
        self._write_back.close()

    # Misses

    async def _load(
        self, chunk: int, wanted_bytes: int, spans: Spans | None, *, load: bool
    ) -> list[memoryview] | None:
        """What a caller wants of a chunk that is not in memory: `spans` of it, or all."""
        key, size, is_new = self._key(chunk), self._sizes[chunk], True
        self._flush_file_reads()
        self.memory.record_access(chunk)
        self._write_back.record_access(chunk)
        for _ in range(_TRIES):
            if chunk >= len(self._ids) or self._key(chunk) != key:  # the version has changed
                break
            view = self.memory.views.get(chunk) or self._write_back.queued(chunk)
            flight = self._in_flight.get(chunk)
            if view is None and flight is None:
                flight = self._begin(chunk, wanted_bytes, load=load, is_new=is_new)
                is_new = False
            if view is None and flight is not None:
                await flight.done.wait()
                if flight.error is not None:
                    raise flight.error.with_traceback(None)
                view = flight.view
                if view is None and not flight.from_disk:
                    break
            elif view is None:
                if not self._write_back.holds(chunk):
                    break
                found = await self._write_back.read(chunk, spans or [(0, size)])
                if found is not None:
                    self._disk_admission.record_unserved(wanted_bytes)
                    self._admission.record_hits((chunk,), wanted_bytes)
                    return found
            if view is not None:
                self._counts["waited"] += 1
                return [view[begin : begin + part] for begin, part in spans or [(0, size)]]
        self._counts["misses"] += 1
        if load:
            self._admission.record_unserved(wanted_bytes)
        return None

    def _begin(
        self, chunk: int, wanted_bytes: int, *, load: bool, is_new: bool
    ) -> _InFlight | None:
        """Start a fetch of a chunk, or its load from the disk, where it is worth it. `is_new`: this
        miss has not been counted yet."""
        from_disk = self._write_back.holds(chunk)
        if self._nursery is None or not (from_disk or load):
            return None
        admission = self._disk_admission if from_disk else self._admission
        if is_new:
            admission.record_miss(chunk, wanted_bytes)
        victims = self.memory.find_victims(chunk, has_credit=False)
        if victims is not None:
            return self._start(chunk, victims, from_disk=from_disk)
        if not from_disk and self._is_free_on_disk(chunk):
            return self._start(chunk, None)
        decision = self._decide_by_plan(chunk, from_disk=from_disk)
        if decision is not None:
            replaces, victims = decision
            self._counts["plan_replacements" if replaces else "plan_bypassed"] += is_new or replaces
            return self._start(chunk, victims, from_disk=from_disk) if replaces else None
        if not admission.has_credit(chunk, wanted_bytes):
            return None
        victims = self.memory.find_victims(chunk, has_credit=True)
        if victims is None or not admission.is_worth_more(chunk, victims):
            victims = None
            if from_disk or not self.memory.owned[chunk]:
                return None
            on_disk = self._write_back.find_victims(chunk)
            if on_disk is None or not admission.is_worth_more(chunk, on_disk):
                return None
        admission.charge(chunk, wanted_bytes)
        return self._start(chunk, victims, from_disk=from_disk)

    def _decide_by_plan(
        self, chunk: int, *, from_disk: bool, is_prefetch: bool = False
    ) -> tuple[bool, list[int] | None] | None:
        """Whether an absent chunk of this node replaces others, by what will be read; and which, or
        None where it goes to the disk. None in all where the future or the policy does not tell:
        then admission decides."""
        future = self._future
        if future is None or not self.memory.owned[chunk]:
            return None
        size = self._sizes[chunk]
        cost = SSD_COSTS.read_s if from_disk else self._costs.read_s

        def uses_min(replaced: Sequence[int]) -> int:
            sizes = [self._sizes[each] for each in replaced]
            return future.uses_min(chunk, sizes, size, cost, is_stored=not from_disk)

        replaces, victims = self.memory.find_planned_victims(chunk, uses_min)
        if replaces is None:
            return None
        if replaces:
            return True, victims
        if from_disk or is_prefetch:
            return False, None
        return self._write_back.replaces(chunk, uses_min), None

    def _evict_first_on_disk(self) -> Mask:
        """The chunks on the disk that are replaced before the policy is asked: those of other
        nodes, unless they are last copies that are needed, and those that are in memory, too."""
        first = ~self.memory.owned
        if self._future is None:
            return first | self.memory.present
        copies = np.flatnonzero(first & self._write_back.on_disk)
        first[copies[self.memory.are_last_copies(copies)]] = False
        return first | self.memory.present

    def _is_free_on_disk(self, chunk: int) -> bool:
        return bool(self.memory.owned[chunk]) and self._write_back.has_room(self._sizes[chunk])

    def _start(
        self,
        chunk: int,
        victims: Sequence[int] | None,
        *,
        from_disk: bool = False,
        is_prefetch: bool = False,
    ) -> _InFlight:
        """Start a fetch or load: to memory, where it replaces `victims`; for None to the disk."""
        assert self._nursery is not None
        size = self._sizes[chunk]
        flight = _InFlight(
            chunk, self._key(chunk), size, victims is not None, from_disk, is_prefetch
        )
        self._in_flight[chunk] = flight
        if victims is None:
            self._write_back.reserve(size)
        else:
            self.memory.reserve(chunk, victims)
        self._awaited += flight.is_awaited
        self._nursery.start_soon(self._run_flight, flight)
        return flight

    async def _run_flight(self, flight: _InFlight) -> None:
        """Fetch or load a chunk. Errors are kept for the callers that wait; none leaves this
        task."""
        memory: SealedMemory | None = None
        try:
            if flight.from_disk:
                memory = await self._write_back.load(flight.chunk) if flight.chunk >= 0 else None
            else:
                async with contextlib.nullcontext() if flight.is_prefetch else self._fetchers:
                    memory = await self._fetch_checked(flight)
        except DieselError as error:
            flight.error = error
            self._counts["fetch_failures"] += 1
        except (OSError, MemoryError, RuntimeError) as error:  # RuntimeError: no thread
            self.memory.shrink_budget(error)
        except Exception:  # the caller can always read from the store
            log.exception("unexpected error while fetching a chunk")
        finally:
            self._finish_flight(flight, memory)

    def _finish_flight(self, flight: _InFlight, memory: SealedMemory | None) -> None:
        """A fetch or load has ended, with or without the chunk."""
        chunk, is_known = flight.chunk, flight.chunk >= 0
        if flight.to_memory:
            self.memory.release_reservation(flight.size)
        else:
            self._write_back.release_reservation(flight.size)
            if flight.view is not None and is_known:
                self._write_back.enqueue(chunk, flight.view)
        if memory is not None:
            flight.view = memory.view
            if is_known:
                self.memory.insert(chunk, memory)
            else:
                memory.close()
        if is_known:
            del self._in_flight[chunk]
        if is_known and flight.view is not None:
            self._admission.reset_misses(chunk)
            self._disk_admission.reset_misses(chunk)
        self._awaited -= flight.is_awaited
        if not self._awaited:
            self._no_awaited.set()
        flight.done.set()

    async def _fetch_checked(self, flight: _InFlight) -> SealedMemory | None:
        """The chunk, checked: in memory that can be pinned, or in the flight's view alone."""
        if flight.chunk < 0:
            return None
        if not flight.to_memory:
            content = np.empty(flight.size, np.uint8).data
            await self._fill_room(flight, content)
            await self._in_thread(verify_chunk, flight.key, content)
            flight.view = content.toreadonly()
            return None
        draft = await self._in_thread(WritableMemory, flight.size)
        try:
            await self._fill_room(flight, draft.room)
            return await self._in_thread(_seal_checked, draft, flight.key)
        except BufferError:
            log.error("chunk not cached: its buffer is still in use")
            return None
        finally:
            draft.discard()

    async def _fill_room(self, flight: _InFlight, room: memoryview) -> None:
        begun_s = trio.current_time()
        await self._fetch(flight.chunk, room)
        if self._measures:
            self._costs.observe(flight.size, trio.current_time() - begun_s)
        self._counts["fetches"] += 1
        self._counts["fetched_bytes"] += flight.size

    async def _fill_from(
        self, left: Iterator[int], version: int, future: ChunkFuture | None = None
    ) -> None:
        """Fetch these chunks one after the other, until one does not fit. With `future`, each also
        in place of what is needed later, as long as that is the future."""
        for chunk in left:
            while self._awaited:
                self._no_awaited = trio.Event() if self._no_awaited.is_set() else self._no_awaited
                await self._no_awaited.wait()
            if version != self._version or self._nursery is None:
                return
            if future is not None and future is not self._future:
                return
            if not self.memory.owned[chunk] or self.holds(chunk) or chunk in self._in_flight:
                continue
            victims = self.memory.find_victims(chunk, has_credit=False)
            if future is not None and victims is not None and not future.is_worth_room(chunk):
                continue
            if victims is None and not self._is_free_on_disk(chunk):
                decision = self._decide_by_plan(chunk, from_disk=False, is_prefetch=True)
                if future is None or decision is None or not decision[0]:
                    return
                victims = decision[1]
                self._counts["plan_replacements"] += 1
            flight = self._start(chunk, victims, is_prefetch=True)
            await flight.done.wait()
            self._counts["fill_failures" if flight.view is None else "filled"] += 1
            if isinstance(flight.error, FormatError):
                log.warning("chunk not cached: %s", flight.error)

    # Helpers

    def _record_hits(self, chunks: Sequence[int], size: int) -> None:
        self._admission.record_hits(chunks, size)
        if self._has_disk:
            self._disk_admission.record_hits(chunks, size)

    def _flush_file_reads(self) -> None:
        """Tell the policies and admissions of what the data plane has read from files."""
        for chunk, size in self.memory.table.take_file_reads():
            self.memory.record_access(chunk)
            self._write_back.record_read(chunk, size)
            self._disk_admission.record_miss(chunk, size)
            self._disk_admission.record_unserved(size)
            self._admission.record_hits((chunk,), size)

    def _notify_changed(self) -> None:
        """Wake `prefetch_owned`: there may be more to fetch."""
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    async def _in_thread(
        self, work: Callable[Given, Made], *args: Given.args, **named: Given.kwargs
    ) -> Made:
        return await trio.to_thread.run_sync(lambda: work(*args, **named), limiter=self._threads)

    def _key(self, chunk: int) -> ChunkKey:
        return ChunkKey(self._identity, self._ids[chunk])


def _seal_checked(draft: WritableMemory, key: ChunkKey) -> SealedMemory:
    """The chunk in `draft`, sealed first and then checked, so that it cannot change after the
    check."""
    sealed = draft.seal()
    try:
        verify_chunk(key, sealed.view)
    except BaseException:
        sealed.close()
        raise
    return sealed


_COUNTS = ("waited", "misses", "fetches", "fetched_bytes", "fetch_failures", "filled",
           "fill_failures", "plan_replacements", "plan_bypassed")  # fmt: skip
