"""Answers read requests to a server: many parts of chunks, from few reads of the store.

Parts that lie near each other are merged into one read, a *run* (`fetching/coalesce.py`). Parts
that several requests want at the same moment are read once (`fetching/flights.py`). Chunks that the
server's cache tier (`tiers.py`) has are read from there. The reader also bounds the memory that
answers take until they have been sent.

Bytes go out as they lie in the chunks: the client checks each entry against its checksum, and
repeats the request with `fresh` after a mismatch. Safe from any thread.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import accumulate
from uuid import UUID

from ...errors import DeadlineError
from ...format.entries import ChunkRanges
from ...net.budget import MemoryBudget
from ...net.frames import READ_BYTES_MAX
from ...settings import READ_DEADLINE_S
from ..fetching.coalesce import ChunkPart, MergedRange, by_chunk, merge_ranges
from ..fetching.flights import Flight, FlightTable
from ..read_through import ReadThroughCache
from ..tiers import CacheHandle, ChunkKey

ANSWER_BYTES_MAX = 2 * READ_BYTES_MAX
"""Memory of this process's answers that have not been sent yet."""

STORE_READS_MAX = 32
"""Reads of the store at once per process. A bucket takes 64 requests from one process
(`storage/objects/cloud/requests.py`); filling the cache needs some of them."""

REQUEST_READS_MAX = 8
"""Reads for one request at once, so that a large request does not delay the others."""

MERGED_AT_ONCE_BYTES = 256 << 20
"""Memory of this process's merged reads, before their parts are copied into the answers."""

DISK_GAP_BYTES = 32 << 10
"""The largest gap between two parts that are read together from a cache on a disk. Reading it takes
0.005 ms from the page cache, as much as another system call; from an SSD 0.01 ms instead of 0.08
ms."""

VIEW_BYTES_MIN = 64 << 10
"""Parts of a chunk in memory from this size on are sent without a copy. For smaller ones a copy
costs less than one more piece to send."""

ANSWER_BYTES_PER_S_MIN = 1 << 20
"""A request may take `READ_DEADLINE_S` plus the time of its bytes at this rate; then its client
gives up."""

_MEMORY_WAIT_S = 10.0


class _Answer:
    """Large parts are views of chunks in memory. All other parts are copied, one after the other,
    into `room`."""

    def __init__(self, sizes: Sequence[int], views: dict[int, memoryview]) -> None:
        """`sizes` has the bytes of each part; the keys of `views` are numbers of parts."""
        self.views = views
        if views:
            sizes = [0 if place in views else size for place, size in enumerate(sizes)]
        self._starts = list(accumulate(sizes, initial=0))
        self.bytes = self._starts.pop()
        self.room = memoryview(b"")

    def at(self, place: int, size: int) -> memoryview:
        start = self._starts[place]
        return self.room[start : start + size]

    def copy(self, parts: Sequence[ChunkPart], content: memoryview, content_start: int) -> None:
        """Copy parts out of the bytes of their chunk that begin at `content_start`."""
        for start, size, place in parts:
            start -= content_start
            self.at(place, size)[:] = content[start : start + size]

    def pieces(self) -> list[memoryview]:
        """The answer in the order of the request, in as few pieces as possible."""
        found, done, room = [], 0, self.room.toreadonly()
        for place in sorted(self.views):
            start = self._starts[place]
            if start > done:
                found.append(room[done:start])
            found.append(self.views[place])
            done = start
        if self.bytes > done:
            found.append(room[done:])
        return found


class RangeReader:
    def __init__(
        self,
        cache: ReadThroughCache,
        *,
        answer_bytes_max: int = ANSWER_BYTES_MAX,
        wait_s: float = _MEMORY_WAIT_S,
        deadline_s: float = READ_DEADLINE_S,
        store_reads_max: int = STORE_READS_MAX,
        request_reads_max: int = REQUEST_READS_MAX,
    ) -> None:
        """`wait_s`: how long a request waits for memory at most."""
        self._cache = cache
        self._wait_s = wait_s
        self._deadline_s = deadline_s
        self._request_reads_max = request_reads_max
        self._answers = MemoryBudget(answer_bytes_max)
        self._merged = MemoryBudget(MERGED_AT_ONCE_BYTES)
        self._lock = threading.Lock()
        self._flights: FlightTable[ChunkKey, Flight[memoryview | None]] = FlightTable()
        self._store_reads = threading.BoundedSemaphore(store_reads_max)
        self._threads = ThreadPoolExecutor(store_reads_max, "read")

    def read(self, identity: UUID, parts: ChunkRanges, *, fresh: bool = False) -> list[memoryview]:
        """The bytes of the parts in their order, in few pieces. The caller has checked the number
        and sizes of the parts. The pieces count in the memory for answers until the last of them is
        freed.

        `fresh`: read from the store itself, since earlier bytes were damaged. Raises BusyError if
        memory is short, DeadlineError, and as `read_into` of a store.
        """
        sizes: list[int] = parts["size"].tolist()
        total = sum(sizes)
        if not total:
            return []
        until_s = time.monotonic() + self._deadline_s + total / ANSWER_BYTES_PER_S_MIN
        missing = {ChunkKey(identity, chunk): wanted for chunk, wanted in by_chunk(parts).items()}
        in_tier: dict[ChunkKey, CacheHandle] = {}
        try:
            for key in missing:
                if fresh:
                    self._cache.report_damage(key)
                elif (held := self._cache.find(key)) is not None:
                    in_tier[key] = held
            large: dict[int, memoryview] = {}
            for key, held in in_tier.items():
                large |= _large_views(held, missing[key])
            answer = _Answer(sizes, large)
            answer.room = self._answers.allocate(answer.bytes, self._wait_s)
            for key, held in in_tier.items():
                if self._from_tier(held, missing[key], answer):
                    del missing[key]
        finally:
            for held in in_tier.values():
                held.close()
        if not missing:
            return answer.pieces()
        gap_bytes = self._cache.costs.gap_bytes
        runs = [
            (key, run) for key, wanted in missing.items() for run in merge_ranges(wanted, gap_bytes)
        ]
        self._from_store(runs, answer, until_s, fresh=fresh)
        return answer.pieces()

    def close(self) -> None:
        """Repeatable."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _from_tier(self, held: CacheHandle, wanted: list[ChunkPart], answer: _Answer) -> bool:
        """Returns False if the tier cannot read the parts."""
        try:
            if (content := held.view(0, held.bytes)) is not None:
                if max(start + size for start, size, _ in wanted) > held.bytes:
                    return False
                small = [part for part in wanted if part[2] not in answer.views]
                answer.copy(small, content, 0)
            else:
                for run in merge_ranges(wanted, DISK_GAP_BYTES):
                    self._fill(run, answer, held.read_into)
        except (OSError, EOFError):
            return False
        self._cache.count(held, len(wanted), sum(size for _, size, _ in wanted))
        return True

    def _from_store(
        self,
        runs: list[tuple[ChunkKey, MergedRange]],
        answer: _Answer,
        until_s: float,
        *,
        fresh: bool,
    ) -> None:
        if len(runs) == 1:  # as nearly always for small requests: this thread reads
            self._read_run(*runs[0], answer, until_s, fresh=fresh)
            return
        error = self._read_all(runs, answer, until_s, fresh=fresh)
        try:
            if error is not None:
                raise error
        finally:
            del error  # error and frame would be a cycle, which keeps the answer's memory

    def _read_all(
        self,
        runs: list[tuple[ChunkKey, MergedRange]],
        answer: _Answer,
        until_s: float,
        *,
        fresh: bool,
    ) -> BaseException | None:
        """Returns the first error, or None, and only when all reads have ended, since they write
        into the answer."""
        begun: set[Future[None]] = set()
        error: BaseException | None = None
        for key, run in runs:
            if len(begun) >= self._request_reads_max:
                done, begun = wait(begun, return_when=FIRST_COMPLETED)
                error = _first_error(done)
                if error is not None:
                    break
            begun.add(self._threads.submit(self._read_run, key, run, answer, until_s, fresh=fresh))
        if error is not None:
            begun = {each for each in begun if not each.cancel()}
        done, _ = wait(begun)
        return error or _first_error(done)

    def _read_run(
        self, key: ChunkKey, run: MergedRange, answer: _Answer, until_s: float, *, fresh: bool
    ) -> None:
        """Unless `fresh`, shares a read under way that brings the parts."""
        span = key, run.start, run.end - run.start
        with self._lock:
            shared = None if fresh else self._flights.covering(span)
            flight = Flight() if shared is None else self._flights[shared]
            if shared is None and span not in self._flights:  # a fresh read may find the span there
                self._flights.begin((span,), flight)
            flight.claim()
        if shared is None:
            self._read_store(key, run, answer, until_s, flight)
        else:
            try:
                content = flight.result(max(until_s - time.monotonic(), 0.0))
            except TimeoutError:
                raise _too_late() from None
            if content is None:  # the failure may be about the larger range: try alone
                self._read_run(key, run, answer, until_s, fresh=True)
                return
            answer.copy(run.parts, content, shared[1])
        self._cache.count(None, len(run.parts), sum(size for _, size, _ in run.parts))

    def _read_store(
        self,
        key: ChunkKey,
        run: MergedRange,
        answer: _Answer,
        until_s: float,
        flight: Flight[memoryview | None],
    ) -> None:
        """Read also for the requests that share `flight`. They get None if the read fails, not the
        error: its traceback would keep the memory of all their answers."""

        def read(start: int, buffer: memoryview) -> None:
            if not self._store_reads.acquire(timeout=max(until_s - time.monotonic(), 0.0)):
                raise _too_late()
            try:
                self._cache.read_store(key, start, buffer)
            finally:
                self._store_reads.release()

        content: memoryview | None = None
        try:
            content = self._fill(run, answer, read)
            # Before the flight ends, so that a request finds the read here or its bytes in the tier
            self._cache.record_miss(key, run.start, content)
        finally:
            span = key, run.start, run.end - run.start
            with self._lock:
                if self._flights.get(span) is flight:
                    self._flights.end(span)
            flight.finish(content)

    def _fill(
        self, run: MergedRange, answer: _Answer, read: Callable[[int, memoryview], None]
    ) -> memoryview:
        """Returns all bytes of the run. If the run's first part is the whole run, the bytes are
        read straight into the answer."""
        _, size, place = run.parts[0]
        if size == run.end - run.start:
            content = answer.at(place, size)
            read(run.start, content)
            answer.copy(run.parts[1:], content, run.start)
        else:
            content = self._merged.allocate(run.end - run.start, self._wait_s)
            read(run.start, content)
            answer.copy(run.parts, content, run.start)
        return content.toreadonly()


def _large_views(held: CacheHandle, wanted: list[ChunkPart]) -> dict[int, memoryview]:
    """Views of large parts, by the numbers of the parts. Empty if a part ends behind the chunk:
    reading from the store gives the error for that."""
    if max(start + size for start, size, _ in wanted) > held.bytes:
        return {}
    views = {
        place: held.view(start, size) for start, size, place in wanted if size >= VIEW_BYTES_MIN
    }
    return {place: view for place, view in views.items() if view is not None}


def _first_error(done: set["Future[None]"]) -> BaseException | None:
    errors = (each.exception() for each in done)
    return next((error for error in errors if error is not None), None)


def _too_late() -> DeadlineError:
    return DeadlineError("the object store did not answer in time", advice="try again later")
