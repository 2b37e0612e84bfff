"""Brings chunks to a node, from another node, the store or its disk, on demand or ahead of readers.

A chunk is kept only after it has been checked whole, in memory that is sealed by then. However many
callers wait for a chunk, it is fetched once.

Concurrency. All runs in the master's one trio loop; threads only allocate, check and seal memory.
Each chunk on its way is one `Flight` and one task of `run`'s nursery, so a cancelled caller does
not end the fetch for others.

From a caller's look at the ledger until `_start` there is no wait: so a chunk has at most one
flight, and `Replacement.take` reserves the room that was found free. `_land` releases that room,
puts the chunk into the ledger, and wakes the callers, all in one step. If the version changes
during a flight, `switch_version` sets `Flight.chunk` to the chunk's new number, or to -1 if the new
version does not have it: then the callers still get the bytes, but the node does not keep them.
"""

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import trio

from ...cache.policies.costs import ReadCosts
from ...cache.tiers import ChunkKey, verify_chunk
from ...errors import DieselError, FormatError
from .chunk_future import ChunkFuture
from .disk import Disk
from .ledger import Ledger
from .lookahead import Lookahead
from .replacement import Placement, Replacement
from .sealed_memory import SealedMemory, WritableMemory

log = logging.getLogger("diesel.task")

FETCHES = 8
"""Eight hide the latency of a distant store and share its link without making any caller wait too
long."""

FILL_FETCHES = 2
"""Fetches ahead of readers. They start only while no caller waits for a fetch."""

FILL_RETRY_S, FILL_RETRY_MAX_S = 1.0, 60.0
"""The pause before fetching ahead again after a failure; doubles up to the maximum."""

Fetch = Callable[[int, memoryview], Awaitable[None]]
"""Fills a buffer of the chunk's size, and keeps no view of it. Raises DieselError."""

Given = ParamSpec("Given")
Made = TypeVar("Made")


@dataclass(slots=True, eq=False)
class Flight:
    chunk: int
    """Its number in the current version, or -1."""
    key: ChunkKey
    size: int
    to_memory: bool
    """If false, it goes through the ledger's queue to the disk."""
    from_disk: bool
    is_ahead: bool
    """Whether the fetch began without a caller that waits."""
    done: trio.Event = field(default_factory=trio.Event)
    view: memoryview | None = None
    """The checked chunk, once `done` is set; None: the flight has failed."""
    error: DieselError | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether a caller waits for the store or another node."""
        return not self.from_disk and not self.is_ahead


class Fetches:
    def __init__(
        self,
        ledger: Ledger,
        replacement: Replacement,
        disk: Disk,
        fetch: Fetch,
        costs: ReadCosts,
        *,
        measures: bool,
    ) -> None:
        """`measures`: add the times of fetches to `costs`."""
        self._ledger, self._replacement, self._disk = ledger, replacement, disk
        self._fetch, self._costs, self._measures = fetch, costs, measures
        self._counts = ledger.counts
        self.lookahead = Lookahead(ledger)
        self.in_flight: dict[int, Flight] = {}
        self._nursery: trio.Nursery | None = None
        self._fetchers = trio.CapacityLimiter(FETCHES)
        self._threads = trio.CapacityLimiter(FETCHES + FILL_FETCHES)
        self._awaited = 0
        self._no_awaited = trio.Event()
        self._room_changed = trio.Event()
        self._future_changed = trio.Event()
        self._version = 0
        self._warned: set[type] = set()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """If it is cancelled, callers that wait for a fetch get nothing."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                task_status.started()
                await trio.sleep_forever()
            finally:
                self._nursery = None

    def begin(self, chunk: int, wanted_bytes: int, *, load: bool, is_new: bool) -> Flight | None:
        """Start to fetch a chunk that a caller wants, or to load it from the disk. Returns None if
        that is not worth it, or not allowed (no `load`). `is_new`: this miss was not counted
        yet."""
        from_disk = self._ledger.is_readable(chunk)
        if self._nursery is None or not (from_disk or load):
            return None
        placement = self._replacement.place(chunk, wanted_bytes, from_disk=from_disk, is_new=is_new)
        return None if placement is None else self._start(chunk, placement, from_disk=from_disk)

    def switch_version(self, before: list[int]) -> None:
        """`before`: each chunk's former number, or -1 if it is new."""
        after = {was: number for number, was in enumerate(before) if was >= 0}
        for flight in self.in_flight.values():
            flight.chunk = after.get(flight.chunk, -1)
        self.in_flight = {each.chunk: each for each in self.in_flight.values() if each.chunk >= 0}
        self._version += 1
        self.lookahead.switch_version()
        self.note_future()
        self.note_room()

    def note_room(self) -> None:
        """There is more room, or more to fetch."""
        changed, self._room_changed = self._room_changed, trio.Event()
        changed.set()

    def note_future(self) -> None:
        """There is another future, or a reader has moved."""
        changed, self._future_changed = self._future_changed, trio.Event()
        changed.set()

    # One flight

    def _start(
        self, chunk: int, placement: Placement, *, from_disk: bool = False, is_ahead: bool = False
    ) -> Flight:
        assert self._nursery is not None
        ledger = self._ledger
        size, to_memory = ledger.sizes[chunk], placement.to_memory
        flight = Flight(chunk, ledger.key(chunk), size, to_memory, from_disk, is_ahead)
        self.in_flight[chunk] = flight
        self._replacement.take(chunk, placement)
        self._awaited += flight.is_awaited
        self._nursery.start_soon(self._fly, flight)
        return flight

    async def _fly(self, flight: Flight) -> None:
        """Raises nothing: callers find the error in the flight."""
        memory: SealedMemory | None = None
        try:
            if flight.from_disk:
                memory = await self._disk.load(flight.chunk) if flight.chunk >= 0 else None
            else:
                async with contextlib.nullcontext() if flight.is_ahead else self._fetchers:
                    memory = await self._fetch_checked(flight)
        except DieselError as error:
            flight.error = error
            self._counts["fetch_failures"] += 1
        except (OSError, MemoryError, RuntimeError) as error:
            self._shrink_budget(error)
        except Exception:  # callers can read from the store
            log.exception("unexpected error while fetching a chunk")
        finally:
            self._land(flight, memory)

    def _land(self, flight: Flight, memory: SealedMemory | None) -> None:
        """`memory` has the chunk, if it has come and goes to memory."""
        chunk, is_known, ledger = flight.chunk, flight.chunk >= 0, self._ledger
        if flight.to_memory:
            ledger.release(flight.size)
        else:
            ledger.reserve_queue(-flight.size)
            if flight.view is not None and is_known:
                ledger.enqueue(chunk, flight.view)
        if memory is not None:
            flight.view = memory.view
            if is_known:
                self._replacement.flush_hits()
                ledger.insert(chunk, memory)
            else:
                memory.close()
        if is_known:
            del self.in_flight[chunk]
        if is_known and flight.view is not None:
            self._replacement.record_arrival(chunk)
        self._awaited -= flight.is_awaited
        if not self._awaited:
            self._no_awaited.set()
        flight.done.set()

    async def _fetch_checked(self, flight: Flight) -> SealedMemory | None:
        """Returns None if the chunk goes to the disk (then it is in `flight.view`), or was not
        fetched."""
        if flight.chunk < 0:
            return None
        if not flight.to_memory:
            content = np.empty(flight.size, np.uint8).data
            await self._fill_room(flight, content)
            await self.in_thread(verify_chunk, flight.key, content)
            flight.view = content.toreadonly()
            return None
        draft = await self.in_thread(WritableMemory, flight.size)
        try:
            await self._fill_room(flight, draft.room)
            return await self.in_thread(_seal_checked, draft, flight.key)
        except BufferError:
            log.error("chunk not cached: its buffer is still in use")
            return None
        finally:
            draft.discard()

    async def _fill_room(self, flight: Flight, room: memoryview) -> None:
        begun_s = trio.current_time()
        await self._fetch(flight.chunk, room)
        if self._measures:
            self._costs.observe(flight.size, trio.current_time() - begun_s)
        self._counts["fetches"] += 1
        self._counts["fetched_bytes"] += flight.size

    def _shrink_budget(self, error: Exception) -> None:
        here_bytes = self._ledger.shrink_budget()
        self._counts["allocation_failures"] += 1
        if type(error) not in self._warned:
            self._warned.add(type(error))
            log.warning(
                "this node keeps %s bytes for now, of at most %s: %s",
                f"{here_bytes:,}", f"{self._ledger.room.memory_bytes:,}", error,
            )  # fmt: skip

    # Fetching ahead

    async def prefetch_owned(self, order: npt.NDArray[np.int64]) -> None:
        """Fetch this node's absent chunks in this order while room is free, and again if its share
        or the room grows. Ends with `switch_version`, or when cancelled."""
        version, retry_s, ledger = self._version, FILL_RETRY_S, self._ledger
        while version == self._version:
            changed, failures = self._room_changed, self._counts["fill_failures"]
            absent = ledger.owned & ~ledger.held
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
        """Fetch the chunks that `lookahead.py` chooses into free room, or in place of chunks needed
        later."""
        while True:
            changed = self._future_changed
            if (future := self._replacement.future) is not None:
                left = iter(self.lookahead.next_chunks(future))
                async with trio.open_nursery() as nursery:
                    for _ in range(FILL_FETCHES):
                        nursery.start_soon(self._fill_from, left, self._version, future)
            await changed.wait()

    async def _fill_from(
        self, left: Iterator[int], version: int, future: ChunkFuture | None = None
    ) -> None:
        """Fetch chunks until one has no room. With `future`, they may also replace chunks that are
        needed later; then another future ends this."""
        ledger, replacement = self._ledger, self._replacement
        for chunk in left:
            while self._awaited:
                self._no_awaited = trio.Event() if self._no_awaited.is_set() else self._no_awaited
                await self._no_awaited.wait()
            if version != self._version or self._nursery is None:
                return
            if future is not None and future is not replacement.future:
                return
            if not ledger.owned[chunk] or ledger.holds(chunk) or chunk in self.in_flight:
                continue
            placement = replacement.place_free(chunk)
            if future is not None:
                if placement is None:
                    placement = replacement.place_ahead(chunk)
                elif placement.to_memory and not future.is_worth_room(chunk):
                    continue
            if placement is None:
                return
            flight = self._start(chunk, placement, is_ahead=True)
            await flight.done.wait()
            self._counts["fill_failures" if flight.view is None else "filled"] += 1
            if isinstance(flight.error, FormatError):
                log.warning("chunk not cached: %s", flight.error)

    async def in_thread(
        self, work: Callable[Given, Made], *args: Given.args, **named: Given.kwargs
    ) -> Made:
        return await trio.to_thread.run_sync(lambda: work(*args, **named), limiter=self._threads)


def _seal_checked(draft: WritableMemory, key: ChunkKey) -> SealedMemory:
    """Seals before checking, so that the chunk cannot change in between."""
    sealed = draft.seal()
    try:
        verify_chunk(key, sealed.view)
    except BaseException:
        sealed.close()
        raise
    return sealed
