"""Chunks in this process's memory: one load per chunk in flight, the least recently used go first.

Where an order is followed (`order.py` decides), chunks go when they are done with instead.

Owned here: the budget and who waits for whom. A load that somebody waits for never stands in line
behind those that were begun ahead of need. Not owned: what lies inside a chunk, and whether an
entry's bytes are right (`store.py` checks each entry once per time that its chunk was loaded).
Thread-safe; after a fork the child keeps what was loaded and begins with new locks.
"""

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .order_prefetch import OrderPrefetch

FETCH_THREADS = 4
"""Loads at once per process: enough to hide a store's latency behind its bandwidth."""

PINNED_COST_DIVISOR = 32
"""Of a chunk in somebody else's memory one part in this many is counted: what is noted here of each
entry takes some 100 bytes."""


@dataclass(slots=True)
class LoadedChunk:
    """A chunk's bytes, where its entries have been checked (`offset`s), and what was decoded.

    `view` is read-only and goes to readers; `patch` replaces bytes that no check has passed yet.
    """

    buffer: memoryview
    is_pinned: bool = False  # somebody else's memory, who counts it
    view: memoryview = field(init=False)
    checked: set[int] = field(default_factory=set)
    decoded: dict[int, memoryview] = field(default_factory=dict)
    charged: int = 0  # bytes counted in the budget
    is_counted: bool = False  # it is in the cache now

    def __post_init__(self) -> None:
        self.view = self.buffer.toreadonly()
        self.charged = len(self.buffer) // (PINNED_COST_DIVISOR if self.is_pinned else 1)

    def patch(self, offset: int, stored: memoryview) -> None:
        """Put right what was damaged on its way here."""
        self.buffer[offset : offset + len(stored)] = stored


class ChunkCache:
    """At most `budget_bytes` of chunks by number, and the loads that are under way."""

    def __init__(self, budget_bytes: int, load: Callable[[int], LoadedChunk]) -> None:
        self.budget_bytes = budget_bytes
        self._load = load
        self._chunks: OrderedDict[int, LoadedChunk] = OrderedDict()
        self._held_bytes = 0
        self.evictions = 0
        self._followed: OrderPrefetch | None = None
        self._reset_after_fork()
        _CACHES.add(self)

    def _reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        self._in_flight: dict[int, Future[LoadedChunk]] = {}
        self._unwanted: set[int] = set()  # given up while they were on their way
        self._threads: ThreadPoolExecutor | None = None

    @property
    def held_bytes(self) -> int:
        """What is counted in the budget now."""
        return self._held_bytes

    def peek(self, number: int) -> LoadedChunk | None:
        """The chunk if it is in memory; never waits for a load."""
        chunk = self._chunks.get(number)
        if chunk is not None:
            with self._lock:
                if number in self._chunks:
                    self._chunks.move_to_end(number)
        return chunk

    def get(self, number: int) -> LoadedChunk:
        """The chunk, loaded in this thread unless another is at it. Raises what loading raises."""
        chunk = self.peek(number)
        if chunk is not None:
            return chunk
        with self._lock:
            chunk = self._chunks.get(number)
            if chunk is not None:  # it landed since the peek
                return chunk
            flight = self._in_flight.get(number)
            self._unwanted.discard(number)
            if flight is None:
                flight = self._in_flight[number] = Future()
            mine = _claim(flight)
        return self._run_load(number, flight) if mine else flight.result()

    def prefetch(self, number: int) -> None:
        """Begin to load a chunk in the background, unless it is here or on its way."""
        with self._lock:
            self._begin(number)

    def prefetch_what_fits(self, sizes: Mapping[int, int]) -> None:
        """`prefetch` of these chunks, in this order, while none need go for them."""
        room_bytes = self.budget_bytes - self._held_bytes
        for number, size in sizes.items():
            room_bytes -= size
            if room_bytes < 0:
                return
            self.prefetch(number)

    @property
    def order(self) -> OrderPrefetch | None:
        """The order that is followed."""
        return self._followed

    def set_order(self, followed: OrderPrefetch) -> None:
        """Keep and load what this order wants from now on, and let go of all that is here."""
        with self._lock:
            self._followed = followed
            for number in [*self._chunks, *self._in_flight]:
                self._drop(number)

    def advance(self, followed: OrderPrefetch, use: int, index: int) -> None:
        """A reader of the order is at an entry. Of no effect where another order is followed."""
        with self._lock:
            if followed is self._followed:
                self._turn(*followed.advance(use, index, self.budget_bytes))

    def mark_read(self, followed: OrderPrefetch, use: int, entries: npt.NDArray[np.int64]) -> None:
        """A reader of the order has read entries, of one chunk. As `advance`."""
        with self._lock:
            if followed is self._followed:
                self._turn(*followed.mark_read(use, entries, self.budget_bytes))

    def revoke(self, number: int) -> None:
        """Whose memory a chunk is wants it back. A chunk of our own stays."""
        with self._lock:
            chunk = self._chunks.get(number)
            if chunk is not None and chunk.is_pinned:
                del self._chunks[number]
                self._uncount(chunk)

    def charge(self, chunk: LoadedChunk, more_bytes: int) -> None:
        """Count what has been decoded out of a chunk with it."""
        with self._lock:
            chunk.charged += more_bytes
            if chunk.is_counted:  # else it has gone, and a reader still looks at it
                self._held_bytes += more_bytes
                self._shrink()

    def close(self) -> None:
        """Forget everything. Views that were handed out stay valid."""
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
        if number in self._in_flight:
            self._unwanted.discard(number)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(FETCH_THREADS, "fetch")
        flight = self._in_flight[number] = Future()
        self._threads.submit(self._run_prefetch, number, flight)

    def _turn(self, given_up: list[int], begun: list[int]) -> None:
        for number in given_up:
            self._drop(number)
        for number in begun:
            self._begin(number)

    def _drop(self, number: int) -> None:
        chunk = self._chunks.pop(number, None)
        if chunk is not None:
            self._uncount(chunk)
        elif (flight := self._in_flight.get(number)) is not None:
            if flight.cancel():
                del self._in_flight[number]
            else:
                self._unwanted.add(number)

    def _run_load(self, number: int, flight: Future[LoadedChunk]) -> LoadedChunk:
        try:
            chunk = self._load(number)
        except BaseException as error:
            with self._lock:
                del self._in_flight[number]
                self._unwanted.discard(number)
            flight.set_exception(error)
            raise
        with self._lock:
            del self._in_flight[number]
            if number in self._unwanted:
                self._unwanted.remove(number)
            else:
                self._chunks[number] = chunk
                self._held_bytes += chunk.charged
                chunk.is_counted = True
                self._shrink()
        flight.set_result(chunk)
        return chunk

    def _run_prefetch(self, number: int, flight: Future[LoadedChunk]) -> None:
        with self._lock:
            if not _claim(flight):
                return  # somebody needed it at once, and did not wait for us
        try:
            self._run_load(number, flight)
        except BaseException:  # whoever asks for the chunk gets it from the flight, or tries anew
            flight.exception()

    def _shrink(self) -> None:
        """Let go of the least recently used, but never of the newest: somebody waits for it."""
        while self._held_bytes > self.budget_bytes and len(self._chunks) > 1:
            _, chunk = self._chunks.popitem(last=False)
            self._uncount(chunk)
            self.evictions += 1

    def _uncount(self, chunk: LoadedChunk) -> None:
        self._held_bytes -= chunk.charged
        chunk.is_counted = False


def _claim(flight: Future[LoadedChunk]) -> bool:
    """Whether the load is now the caller's to do: nobody has begun it. Under the cache's lock."""
    return not (flight.running() or flight.done()) and flight.set_running_or_notify_cancel()


_CACHES: "weakref.WeakSet[ChunkCache]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for cache in _CACHES:
        cache._reset_after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
