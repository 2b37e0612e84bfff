"""The chunks that a node holds: in memory that its readers can map, and on its disk.

Owned here: what is taken in and when, one fetch per chunk however many wait for it, and that the
node's share comes by itself (`prefetch_owned`). Not owned: where a chunk is fetched from, whose it
is (`ownership.py`), what goes for it (`node_memory.py`, `write_back.py`).

Everything is called in one trio loop, beside `run`, to which fetches belong: who waits for one can
be cancelled, and it goes on for the others. The version may change wherever somebody waits, and
with it the numbers of chunks: each flight knows the number that its chunk has now.

A chunk stands here when it has been checked whole, in memory that is sealed by then. Where room is
free in memory, or on the disk, or held for other nodes, a miss fetches at once. Where something of
this node's would have to go, only what has paid for that (`cache/admission.py`), as far as the
policy allows; the same between the disk and memory. What has not is read from the disk in parts, or
from the store by who wants it.
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

from ..cache.admission import SkiRentalAdmission
from ..cache.disk import DiskTier
from ..cache.policy import EvictionPolicy, NoEviction
from ..cache.read_through import ReadCostModel
from ..cache.tiers import ChunkKey, verify_chunk
from ..errors import DieselError, FormatError
from ..format.entries import ChunkId
from .node_memory import NodeMemory
from .sealed_memory import SealedMemory, WritableMemory
from .write_back import Mask, Spans, WriteBackQueue, disk_cost

log = logging.getLogger("diesel.task")

FETCHES = 8
"""At once, for who waits; the others in the order in which they came. Eight hide the latency of a
distant store, and share a link so that none takes longer than who waits for it would."""

FILL_FETCHES = 2
"""At once, for nobody in particular: they begin only while no fetch is under way for who waits, and
never stand in their way."""

WRITE_BACK_BYTES_MAX = 64 << 20
"""Of the memory, for what is to be written to the disk: at most an eighth, or one chunk."""

FILL_RETRY_S, FILL_RETRY_MAX_S = 1.0, 60.0
"""Before what could not be fetched ahead is tried again; then twice as long, and so on."""

_TRIES = 4  # of one call, where what it found is gone, or another version's, when it gets there

Fetch = Callable[[int, memoryview], Awaitable[None]]
"""Fills the room with the whole chunk of that number. Keeps no part of the room when it is done.
Raises DieselError."""

Given = ParamSpec("Given")
Made = TypeVar("Made")


def chunk_budget_bytes(memory_bytes: int, sizes: npt.NDArray[np.uint64], *, has_disk: bool) -> int:
    """What is left of so much memory for chunks of these sizes that stay in it."""
    return max(memory_bytes - (write_back_bytes(memory_bytes, sizes) if has_disk else 0), 0)


def write_back_bytes(memory_bytes: int, sizes: npt.NDArray[np.uint64]) -> int:
    """What of it is for chunks that are to be written to the disk."""
    largest = int(sizes.max(initial=0))
    return min(max(memory_bytes // 8, largest), max(WRITE_BACK_BYTES_MAX, largest))


@dataclass(slots=True, eq=False)
class _InFlight:
    """A chunk on its way here; `chunk` is -1 where this version of the dataset does not have it."""

    chunk: int
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
        """Whether it is a fetch that was begun for somebody."""
        return not self.from_disk and not self.is_prefetch


class NodeCache:
    """What this node holds of one version of a dataset."""

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
        costs: ReadCostModel | None = None,
    ) -> None:
        """`costs` are those of the store, kept by who reads from it; without them, fetches tell.

        `disk_policy`: what goes from the disk; without it, what came first stays.
        """
        budget = chunk_budget_bytes(memory_bytes, sizes, has_disk=disk is not None)
        queue = write_back_bytes(memory_bytes, sizes) if disk is not None else 0
        self._identity, self._has_disk = identity, disk is not None
        self._ids, self._sizes = list(ids), [int(size) for size in sizes]
        self._fetch = fetch
        self._costs = costs or ReadCostModel()
        self._measures = costs is None
        self._admission = SkiRentalAdmission(self._sizes, self._costs.read_s, budget)
        self._disk_admission = SkiRentalAdmission(self._sizes, disk_cost, budget)
        self._write_back = WriteBackQueue(
            disk,
            identity,
            disk_policy or NoEviction(),
            evict_first=lambda: ~self._memory.owned | self._memory.present,
            on_change=self._notify_changed,
            queue_bytes=queue,
        )
        self._memory = NodeMemory(
            self._sizes,
            budget,
            policy,
            on_evict=self._write_back.enqueue,
            on_hits=self._record_hits,
        )
        self._write_back.switch_version(self._ids, self._sizes, [-1] * len(ids))
        self._in_flight: dict[int, _InFlight] = {}
        self._nursery: trio.Nursery | None = None
        self._fetchers = trio.CapacityLimiter(FETCHES)
        self._threads = trio.CapacityLimiter(FETCHES + FILL_FETCHES)
        self._awaited = 0
        self._no_awaited = trio.Event()  # set when `_awaited` comes to 0
        self._changed = trio.Event()
        self._version = 0
        self._counts: Counter[str] = Counter()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Fetches, and writing to the disk; ends when cancelled. Who waits then has nothing."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                nursery.start_soon(self._write_back.run)
                task_status.started()
                await trio.sleep_forever()
            finally:
                self._nursery = None

    # For who serves readers

    def find(self, chunk: int) -> memoryview | None:
        """A chunk in memory: its bytes, noted as used. Never waits. They stay valid while somebody
        has them."""
        return self._memory.find(chunk)

    def find_parts(self, parts: npt.NDArray[np.uint32]) -> list[memoryview] | None:
        """The bytes of parts (chunk, start, bytes), all of which lie in their chunks, where all of
        these are in memory. Never waits."""
        return self._memory.find_parts(parts)

    def holds(self, chunk: int) -> bool:
        """In memory, or on the disk as far as is known."""
        return (
            chunk in self._memory.views
            or self._write_back.holds(chunk)
            or self._write_back.queued(chunk) is not None
        )

    async def get(self, chunk: int, wanted_bytes: int, *, load: bool) -> memoryview | None:
        """A whole chunk, of which `wanted_bytes` are wanted: from memory, the disk, or, with
        `load` and where it is worth it, fetched.

        None where it is neither here nor about to be: read what is wanted from the store. Raises
        DieselError where it could not be fetched.
        """
        view = self._memory.find(chunk)
        if view is None:
            found = await self._load(chunk, wanted_bytes, None, load=load)
            view = None if found is None else found[0]
        return view

    async def read(self, chunk: int, spans: Spans, *, load: bool) -> list[memoryview] | None:
        """Bytes of a chunk, by start and size, all of which lie in it. As `get`, but where it
        stands on the disk and is not worth memory, no more of it is read than that."""
        view, wanted_bytes = self._memory.views.get(chunk), sum(size for _, size in spans)
        if view is None:
            return await self._load(chunk, wanted_bytes, spans, load=load)
        self._memory.record_hits([chunk] * len(spans), wanted_bytes)
        return [view[start : start + size] for start, size in spans]

    async def recheck(self, chunk: int) -> None:
        """A reader says that bytes of a chunk that it had from here were damaged: look."""
        memory = self._memory.memory_of(chunk)
        if memory is not None:
            key = self._key(chunk)
            try:
                await self._in_thread(verify_chunk, key, memory.view)
            except FormatError as error:
                log.error("memory of this node has changed: %s", error)
                if self._memory.memory_of(chunk) is memory:
                    self._memory.drop(chunk)
            except (MemoryError, RuntimeError):  # the last: no thread
                return
            if chunk >= len(self._ids) or self._key(chunk) != key:
                return
        await self._write_back.recheck(chunk)

    # For who lends memory to readers

    def pin(self, borrower: int, chunk: int) -> int | None:
        """The memfd of a chunk in memory, sealed; it is not the caller's to close. Counted as lent
        until it is returned. None where it is not here, or is to be given up."""
        return self._memory.pin(borrower, chunk)

    def unpin(self, borrower: int, chunks: Iterable[int]) -> None:
        """A borrower has unmapped chunks."""
        self._memory.unpin(borrower, chunks)
        self._notify_changed()

    def unpin_all(self, borrower: int) -> None:
        """A borrower has ended, and has nothing any more."""
        self._memory.unpin_all(borrower)
        self._notify_changed()

    def revoked(self, borrower: int) -> list[int]:
        """Chunks that a borrower has, and whose room is wanted."""
        return self._memory.revoked(borrower)

    # For who knows the task

    def set_owned(self, owned: npt.NDArray[np.bool_]) -> None:
        """What this node owns now. The rest goes first when room is needed."""
        self._memory.set_owned(owned.astype(np.bool_))
        self._notify_changed()

    def switch_version(self, ids: Sequence[ChunkId], sizes: npt.NDArray[np.uint64]) -> None:
        """Another version of the dataset: what is in both stays, and is this node's as it was.

        What is lent keeps, for its borrower, the number that it had.
        """
        old = {key: number for number, key in enumerate(zip(self._ids, self._sizes, strict=True))}
        now = list(zip(ids, (int(size) for size in sizes), strict=True))
        before = [old.get(key, -1) for key in now]
        after = {was: number for number, was in enumerate(before) if was >= 0}
        self._ids, self._sizes = list(ids), [size for _, size in now]
        self._memory.switch_version(self._sizes, before)
        self._write_back.switch_version(self._ids, self._sizes, before)
        self._admission.switch_version(self._sizes, before)
        self._disk_admission.switch_version(self._sizes, before)
        for flight in self._in_flight.values():
            flight.chunk = after.get(flight.chunk, -1)
        self._in_flight = {each.chunk: each for each in self._in_flight.values() if each.chunk >= 0}
        self._version += 1
        self._notify_changed()

    async def prefetch_owned(self, order: npt.NDArray[np.int64]) -> None:
        """Fetch what is mine and not here, in this order of chunks, as long as room is free; again
        whenever more is mine or there is more room. Ends with `switch_version`, or when
        cancelled."""
        version, again_s = self._version, FILL_RETRY_S
        while version == self._version:
            news, failures = self._changed, self._counts["fill_failures"]
            absent = self._memory.owned & ~self._memory.present & ~self._write_back.on_disk
            left = iter(order[absent[order]].tolist())
            async with trio.open_nursery() as nursery:
                for _ in range(FILL_FETCHES):
                    nursery.start_soon(self._fill_from, left, version)
            if failures == self._counts["fill_failures"]:
                again_s = FILL_RETRY_S
                await news.wait()
            else:
                with trio.move_on_after(again_s):
                    await news.wait()
                again_s = min(2 * again_s, FILL_RETRY_MAX_S)

    async def flush_to_disk(self, share: Mask) -> None:
        """At the end, after `run`: what is in memory comes to the disk, as far as there is room;
        `share` before what else this node owns now. What others own goes for it. May be cancelled
        anywhere."""
        ours = share | self._memory.owned
        first, then = np.flatnonzero(share), np.flatnonzero(ours & ~share)
        for chunk in np.flatnonzero(self._memory.present & ~ours).tolist():
            self._memory.drop(chunk)
        await self._write_back.flush(self._drain_memory([*first.tolist(), *then.tolist()]), ~ours)

    def _drain_memory(self, chunks: Iterable[int]) -> Iterator[tuple[int, memoryview]]:
        """Of these chunks what is in memory, each only as long as somebody looks at it: others may
        be waiting for the memory."""
        for chunk in chunks:
            view = self._memory.views.get(chunk)
            if view is not None:
                yield chunk, view
                del view
                self._memory.drop(chunk)

    def stats(self) -> dict[str, int]:
        """What is here, in bytes and chunks, and counts since the start."""
        mine, held = self._memory.owned, self._memory.present | self._write_back.on_disk
        return {
            **{name: self._counts[name] for name in _COUNTS},
            **self._memory.stats(),
            **self._write_back.stats(),
            "share_chunks": int(np.count_nonzero(mine)),
            "share_held_chunks": int(np.count_nonzero(mine & held)),
        }

    def close(self) -> None:
        """Let go of all memory. What others have stays valid."""
        self._memory.close()
        self._write_back.close()

    # Misses

    async def _load(
        self, chunk: int, wanted_bytes: int, spans: Spans | None, *, load: bool
    ) -> list[memoryview] | None:
        """What is wanted of a chunk that is not in memory; all of it without `spans`."""
        key, size, is_new = self._key(chunk), self._sizes[chunk], True
        self._memory.record_access(chunk)
        self._write_back.record_access(chunk)
        for _ in range(_TRIES):
            if chunk >= len(self._ids) or self._key(chunk) != key:  # another version's numbers
                break
            view = self._memory.views.get(chunk) or self._write_back.queued(chunk)
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
        """Have a chunk come, where that is worth it; `is_new`: this miss has not been counted."""
        from_disk = self._write_back.holds(chunk)
        if self._nursery is None or not (from_disk or load):
            return None
        rent = self._disk_admission if from_disk else self._admission
        if is_new:
            rent.record_miss(chunk, wanted_bytes)
        victims = self._memory.find_victims(chunk, has_credit=False)
        if victims is not None:
            return self._start(chunk, victims, from_disk=from_disk)
        if not from_disk and self._is_free_on_disk(chunk):
            return self._start(chunk, None)
        if not rent.has_credit(chunk, wanted_bytes):
            return None
        victims = self._memory.find_victims(chunk, has_credit=True)
        if victims is None or not rent.is_worth_more(chunk, victims):
            victims = None
            if from_disk or not self._memory.owned[chunk]:
                return None
            on_disk = self._write_back.find_victims(chunk)
            if on_disk is None or not rent.is_worth_more(chunk, on_disk):
                return None
        rent.charge(chunk, wanted_bytes)
        return self._start(chunk, victims, from_disk=from_disk)

    def _is_free_on_disk(self, chunk: int) -> bool:
        return bool(self._memory.owned[chunk]) and self._write_back.has_room(self._sizes[chunk])

    def _start(
        self,
        chunk: int,
        victims: Sequence[int] | None,
        *,
        from_disk: bool = False,
        is_fill: bool = False,
    ) -> _InFlight:
        """A chunk comes to memory, where these go for it; to the disk for None."""
        assert self._nursery is not None
        size = self._sizes[chunk]
        flight = _InFlight(chunk, self._key(chunk), size, victims is not None, from_disk, is_fill)
        self._in_flight[chunk] = flight
        if victims is None:
            self._write_back.reserve(size)
        else:
            self._memory.reserve(chunk, victims)
        self._awaited += flight.is_awaited
        self._nursery.start_soon(self._run_flight, flight)
        return flight

    async def _run_flight(self, flight: _InFlight) -> None:
        memory: SealedMemory | None = None
        try:
            if flight.from_disk:
                memory = await self._write_back.load(flight.chunk) if flight.chunk >= 0 else None
            else:
                async with contextlib.nullcontext() if flight.is_prefetch else self._fetchers:
                    memory = await self._fetched(flight)
        except DieselError as error:
            flight.error = error
            self._counts["fetch_failures"] += 1
        except (OSError, MemoryError, RuntimeError) as error:  # the last: no thread
            self._memory.shrink_budget(error)
        except Exception:  # whatever it is, there is the store
            log.exception("a chunk could not be fetched")
        finally:
            self._finish_flight(flight, memory)

    def _finish_flight(self, flight: _InFlight, memory: SealedMemory | None) -> None:
        """A flight has ended, with or without the chunk."""
        chunk, is_known = flight.chunk, flight.chunk >= 0
        if flight.to_memory:
            self._memory.release_reservation(flight.size)
        else:
            self._write_back.release_reservation(flight.size)
            if flight.view is not None and is_known:
                self._write_back.enqueue(chunk, flight.view)
        if memory is not None:
            flight.view = memory.view
            if is_known:
                self._memory.insert(chunk, memory)
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

    async def _fetched(self, flight: _InFlight) -> SealedMemory | None:
        """The chunk, checked: in memory that can be lent, or in the flight's view alone."""
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
            return await self._in_thread(_checked, draft, flight.key)
        except BufferError:
            log.error("not held: somebody keeps a part of the room that a chunk came into")
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

    async def _fill_from(self, left: Iterator[int], version: int) -> None:
        """Fetch the next and the next of these, until one does not fit."""
        for chunk in left:
            while self._awaited:
                self._no_awaited = trio.Event() if self._no_awaited.is_set() else self._no_awaited
                await self._no_awaited.wait()
            if version != self._version or self._nursery is None:
                return
            if not self._memory.owned[chunk] or self.holds(chunk) or chunk in self._in_flight:
                continue
            victims = self._memory.find_victims(chunk, has_credit=False)
            if victims is None and not self._is_free_on_disk(chunk):
                return
            flight = self._start(chunk, victims, is_fill=True)
            await flight.done.wait()
            self._counts["fill_failures" if flight.view is None else "filled"] += 1
            if isinstance(flight.error, FormatError):
                log.warning("not held: %s", flight.error)

    # Small things

    def _record_hits(self, chunks: Sequence[int], size: int) -> None:
        self._admission.record_hits(chunks, size)
        if self._has_disk:
            self._disk_admission.record_hits(chunks, size)

    def _notify_changed(self) -> None:
        """There may be more to be fetched ahead."""
        news, self._changed = self._changed, trio.Event()
        news.set()

    async def _in_thread(
        self, work: Callable[Given, Made], *args: Given.args, **named: Given.kwargs
    ) -> Made:
        return await trio.to_thread.run_sync(lambda: work(*args, **named), limiter=self._threads)

    def _key(self, chunk: int) -> ChunkKey:
        return ChunkKey(self._identity, self._ids[chunk])


def _checked(draft: WritableMemory, key: ChunkKey) -> SealedMemory:
    """What came, sealed before it is checked, so that it is what has been checked."""
    sealed = draft.seal()
    try:
        verify_chunk(key, sealed.view)
    except BaseException:
        sealed.close()
        raise
    return sealed


_COUNTS = ("waited", "misses", "fetches", "fetched_bytes", "fetch_failures", "filled",
           "fill_failures")  # fmt: skip
