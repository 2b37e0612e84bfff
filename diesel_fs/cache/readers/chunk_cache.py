"""Keeps chunks in this process's memory, within a budget, and loads each of them once.

If several threads miss one chunk, one of them loads it and the others wait. Chunks may also be
loaded ahead, in other threads; a load that a reader waits for is never queued behind these. When
the budget is full, the least recently used chunk is evicted; but if the cache follows an order
(`OrderPrefetch`), a chunk is dropped when the reader has finished with it.

A chunk may be *pinned*: it lies in memory that the object store shares with other processes (the
cache of a task's nodes), and the store may ask for it back (`revoke`).

Thread-safe. After a fork the child keeps the loaded chunks and begins with new locks.
"""

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..fetching.flights import Flight
from ..waiting import WaitCause, waiting_for
from .order_prefetch import OrderPrefetch

FETCH_THREADS = 4
"""Loads ahead at once, per cache: enough to hide a store's latency behind its bandwidth."""

PINNED_COST_DIVISOR = 32
"""A pinned chunk counts as a 32nd of its bytes in the budget: its memory belongs to another
process, and only its page tables and decoded contents are ours."""


class _EveryOffset(set[int]):
    def __contains__(self, _: object) -> bool:
        return True


@dataclass(slots=True)
class LoadedChunk:
    """A chunk's bytes, and by offset the entries that have been checked, and decoded contents.

    Readers get slices of `view`, which is read-only.
    """

    buffer: memoryview
    is_pinned: bool = False  # in memory that the store shares with other processes
    is_checked: bool = False  # all entries have been checked
    view: memoryview = field(init=False)
    checked: set[int] = field(default_factory=set)
    decoded: dict[int, memoryview] = field(default_factory=dict)
    charged: int = 0  # bytes that the chunk counts in the budget while it is in the cache
    is_counted: bool = False  # whether the chunk is in the cache now

    def __post_init__(self) -> None:
        self.view = self.buffer.toreadonly()
        if self.is_checked:
            self.checked = _EveryOffset()
        self.charged = len(self.buffer) // (PINNED_COST_DIVISOR if self.is_pinned else 1)

    @property
    def is_passing(self) -> bool:
        """Whether the caller keeps what it reads (`CheckedObject`)."""
        return self.is_checked and not self.is_pinned

    def patch(self, offset: int, stored: memoryview) -> None:
        """Replace bytes that were damaged on their way here; a checked chunk stays as it is."""
        if not self.is_checked:
            self.buffer[offset : offset + len(stored)] = stored


class ChunkCache:
    def __init__(
        self,
        budget_bytes: int,
        load: Callable[[int], LoadedChunk],
        *,
        load_cause: WaitCause = WaitCause.STORE,
    ) -> None:
        """Readers that wait for a load in another thread report `load_cause`."""
        self.budget_bytes = budget_bytes
        self._load = load
        self._load_cause = load_cause
        self._chunks: OrderedDict[int, LoadedChunk] = OrderedDict()
        self._held_bytes = 0
        self.evictions = 0
        self._order: OrderPrefetch | None = None
        self._reset_after_fork()
        _CACHES.add(self)

    def _reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        self._flights: dict[int, Flight[LoadedChunk]] = {}  # loads under way, and queued ones
        self._threads: ThreadPoolExecutor | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes that count in the budget now."""
        return self._held_bytes

    def peek(self, number: int) -> LoadedChunk | None:
        """Never waits for a load."""
        chunk = self._chunks.get(number)
        if chunk is not None:
            with self._lock:
                if number in self._chunks:
                    self._chunks.move_to_end(number)
        return chunk

    def loaded(self, number: int) -> LoadedChunk | None:
        """As `peek`, but does not count as a use of the chunk."""
        return self._chunks.get(number)

    def get(self, number: int) -> LoadedChunk:
        """Load the chunk, or wait for a thread that does, unless it is here. Raises the errors of
        `load`."""
        chunk = self.peek(number)
        if chunk is not None:
            return chunk
        with self._lock:
            chunk = self._chunks.get(number)
            if chunk is not None:  # its load has ended since the peek
                return chunk
            flight = self._flights.get(number)
            if flight is None:
                flight = self._flights[number] = Flight()
            flight.is_wanted = True
            is_mine = flight.claim()
        if is_mine:
            return self._load_claimed(number, flight)
        with waiting_for(self._load_cause):
            return flight.result()

    def prefetch(self, number: int) -> None:
        """Load a chunk in the background, unless it is here or in flight."""
        with self._lock:
            self._begin(number)

    def prefetch_what_fits(self, sizes: Mapping[int, int]) -> None:
        """`prefetch` chunks, in the order of `sizes`, as long as nothing is evicted."""
        room_bytes = self.budget_bytes - self._held_bytes
        for number, size in sizes.items():
            room_bytes -= size
            if room_bytes < 0:
                return
            self.prefetch(number)

    @property
    def order(self) -> OrderPrefetch | None:
        return self._order

    def set_order(self, followed: OrderPrefetch) -> None:
        """Load and drop chunks as this order decides. Drops all chunks that are in memory now."""
        with self._lock:
            self._order = followed
            for number in [*self._chunks, *self._flights]:
                self._drop(number)

    def advance(self, followed: OrderPrefetch, visit: int, index: int) -> None:
        """A reader of the order is at an entry. No effect if the cache follows another order."""
        with self._lock:
            if followed is self._order:
                self._apply(*followed.advance(visit, index, self.budget_bytes))

    def mark_read(
        self, followed: OrderPrefetch, visit: int, entries: npt.NDArray[np.int64]
    ) -> None:
        """A reader of the order has read entries. No effect if the cache follows another order."""
        with self._lock:
            if followed is self._order:
                self._apply(*followed.mark_read(visit, entries, self.budget_bytes))

    def revoke(self, number: int) -> None:
        """Drop a pinned chunk, since the store wants its memory back. A chunk in our own memory
        stays."""
        with self._lock:
            chunk = self._chunks.get(number)
            if chunk is not None and chunk.is_pinned:
                del self._chunks[number]
                self._uncount(chunk)

    def drop(self, number: int) -> None:
        with self._lock:
            self._drop(number)

    def charge(self, chunk: LoadedChunk, more_bytes: int) -> None:
        """Count the bytes of decoded contents in the budget."""
        with self._lock:
            chunk.charged += more_bytes
            if chunk.is_counted:  # else the chunk was dropped, and a reader still holds it
                self._held_bytes += more_bytes
                self._shrink()

    def close(self) -> None:
        """Views that were returned stay valid."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._chunks.clear()
            self._held_bytes = 0

    def _begin(self, number: int) -> None:
        if number in self._chunks:
            return
        flight = self._flights.get(number)
        if flight is not None:
            flight.is_wanted = True
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(FETCH_THREADS, "fetch")
        flight = self._flights[number] = Flight()
        self._threads.submit(self._run_prefetch, number, flight)

    def _apply(self, dropped: list[int], begun: list[int]) -> None:
        for number in dropped:
            self._drop(number)
        for number in begun:
            self._begin(number)

    def _drop(self, number: int) -> None:
        chunk = self._chunks.pop(number, None)
        if chunk is not None:
            self._uncount(chunk)
        elif (flight := self._flights.get(number)) is not None:
            flight.is_wanted = False
            if flight.claim():  # no thread has begun to load it
                del self._flights[number]

    def _load_claimed(self, number: int, flight: Flight[LoadedChunk]) -> LoadedChunk:
        try:
            chunk = self._load(number)
        except BaseException as error:
            with self._lock:
                del self._flights[number]
            flight.fail(error)
            raise
        with self._lock:
            del self._flights[number]
            if flight.is_wanted:  # else the chunk was dropped meanwhile
                self._chunks[number] = chunk
                self._held_bytes += chunk.charged
                chunk.is_counted = True
                self._shrink()
        flight.finish(chunk)
        return chunk

    def _run_prefetch(self, number: int, flight: Flight[LoadedChunk]) -> None:
        with self._lock:
            if not flight.claim():
                return  # a reader needed the chunk at once and loads it itself, or it was dropped
        with suppress(BaseException):  # a reader gets the error from the flight, or tries again
            self._load_claimed(number, flight)

    def _shrink(self) -> None:
        """Evict the least recently used chunks, but never the newest: a reader waits for it."""
        while self._held_bytes > self.budget_bytes and len(self._chunks) > 1:
            _, chunk = self._chunks.popitem(last=False)
            self._uncount(chunk)
            self.evictions += 1

    def _uncount(self, chunk: LoadedChunk) -> None:
        self._held_bytes -= chunk.charged
        chunk.is_counted = False


_CACHES: "weakref.WeakSet[ChunkCache]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for cache in _CACHES:
        cache._reset_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
