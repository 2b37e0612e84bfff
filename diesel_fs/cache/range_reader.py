"""Many parts of chunks in one request: sorted, merged into few reads, several chunks at once.

Owned here: which parts are read together, that what is asked for twice, or by several requests at
the same moment, is read once, and the memory that answers take. Not owned: what reads cost and
where chunks lie (`read_through.py`), who may read which dataset, checksums: bytes go out as they
lie in the chunks, and whoever asked checks each entry. Any thread.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from itertools import accumulate
from uuid import UUID

from ..errors import DeadlineError, ObjectStoreError
from ..format.entries import ChunkId, ChunkRanges
from ..net.budget import MemoryBudget
from ..net.frames import READ_BYTES_MAX
from ..settings import READ_DEADLINE_S
from .read_through import ReadThroughCache
from .tiers import CacheHandle, ChunkKey

ANSWER_BYTES_MAX = 2 * READ_BYTES_MAX
"""Memory of answers of this process that have not been sent yet."""

STORE_READS_MAX = 32
"""Reads of the store at once per process. It takes 64 from one process
(`storage/objects/cloud/requests.py`), and what is fetched ahead wants some."""

REQUEST_READS_MAX = 8
"""Of these, by one request: a large one does not keep the others waiting."""

MERGED_BYTES_MAX = 32 << 20
"""Parts are read together up to this; a larger part is read by itself, where it is sent from."""

MERGED_AT_ONCE_BYTES = 256 << 20

DISK_GAP_BYTES = 32 << 10
"""Gap that is read along from a shelf on a disk: 0.005 ms, as another system call, from the page
cache; from an SSD 0.01 ms instead of 0.08."""

VIEW_BYTES_MIN = 64 << 10
"""Parts of a chunk in memory that are sent from where they lie; smaller ones are copied: a copy
costs less than one more piece to send."""

ANSWER_BYTES_PER_S_MIN = 1 << 20
"""A request may take `READ_DEADLINE_S`, and so much longer; whoever asked gives up by then."""

_WAIT_S = 10.0  # for memory

_Part = tuple[int, int, int]  # start, size, place in the request


@dataclass(frozen=True, slots=True)
class MergedRange:
    """Parts of one chunk that are read by one read, from `start` to `end`."""

    start: int
    end: int
    parts: Sequence[_Part]


def by_chunk(parts: ChunkRanges) -> dict[ChunkId, list[_Part]]:
    """The parts of each chunk in order of their starts (of equal ones the longest first), without
    those of no bytes."""
    chunks, starts, sizes = (parts[name].tolist() for name in ("chunk", "start", "size"))
    found: dict[ChunkId, list[_Part]] = {}
    for chunk, start, size, place in zip(chunks, starts, sizes, range(len(parts)), strict=True):
        if size:
            found.setdefault(chunk, []).append((start, size, place))
    for wanted in found.values():
        wanted.sort(key=lambda part: (part[0], -part[1]))
    return found


def merge_ranges(wanted: Sequence[_Part], gap_bytes: int) -> list[MergedRange]:
    """The reads for parts of one chunk, in order as `by_chunk` has them: neighbours together where
    no more than `gap_bytes` lie between them, and all is no more than `MERGED_BYTES_MAX`; what lies
    within a larger part is read with that."""
    runs: list[MergedRange] = []
    first, start, end = 0, 0, -1
    for number, (part_start, size, _) in enumerate(wanted):
        part_end = part_start + size
        if end >= 0:
            if part_end <= end:
                continue
            if part_start <= end + gap_bytes and part_end - start <= MERGED_BYTES_MAX:
                end = part_end
                continue
            runs.append(MergedRange(start, end, wanted[first:number]))
        first, start, end = number, part_start, part_end
    if end >= 0:
        runs.append(MergedRange(start, end, wanted[first:]))
    return runs


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A read of the store that is under way."""

    start: int
    end: int
    content: "Future[memoryview]"


class _Answer:
    """The memory of one answer: most parts one after the other, some where they lay anyway."""

    def __init__(self, sizes: Sequence[int], elsewhere: dict[int, memoryview]) -> None:
        self.views = elsewhere
        if elsewhere:
            sizes = [0 if place in elsewhere else size for place, size in enumerate(sizes)]
        self._starts = list(accumulate(sizes, initial=0))
        self.bytes = self._starts.pop()
        self.room = memoryview(b"")

    def at(self, place: int, size: int) -> memoryview:
        """Where a part goes."""
        start = self._starts[place]
        return self.room[start : start + size]

    def copy(self, parts: Sequence[_Part], content: memoryview, content_start: int) -> None:
        """Fill parts out of what has been read from `content_start` on."""
        for start, size, place in parts:
            start -= content_start
            self.at(place, size)[:] = content[start : start + size]

    def pieces(self) -> list[memoryview]:
        """All of it, in order."""
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
    """Parts of chunks of one store's datasets, for all requests of this process."""

    def __init__(
        self,
        tier: ReadThroughCache,
        *,
        answer_bytes_max: int = ANSWER_BYTES_MAX,
        wait_s: float = _WAIT_S,
    ) -> None:
        self._tier = tier
        self._wait_s = wait_s
        self._answers = MemoryBudget(answer_bytes_max)
        self._merged = MemoryBudget(MERGED_AT_ONCE_BYTES)
        self._lock = threading.Lock()
        self._in_flight: dict[ChunkKey, list[_InFlight]] = {}
        self._store_reads = threading.BoundedSemaphore(STORE_READS_MAX)
        self._threads = ThreadPoolExecutor(STORE_READS_MAX, "read")

    def read(self, identity: UUID, parts: ChunkRanges, *, fresh: bool = False) -> list[memoryview]:
        """The bytes of the parts (whose number and sizes have been checked), one after the other,
        in few pieces, which do not end where the parts do. They are counted as memory until the
        last piece has gone.

        `fresh`: from the store itself, since what came before was damaged. Raises BusyError where
        memory is short, DeadlineError, and as an object store's `read_into`.
        """
        sizes: list[int] = parts["size"].tolist()
        total = sum(sizes)
        if not total:
            return []
        until_s = time.monotonic() + READ_DEADLINE_S + total / ANSWER_BYTES_PER_S_MIN
        missing = {ChunkKey(identity, chunk): wanted for chunk, wanted in by_chunk(parts).items()}
        on_shelf: dict[ChunkKey, CacheHandle] = {}
        try:
            for key in missing:
                if fresh:
                    self._tier.report_damage(key)
                elif (held := self._tier.find(key)) is not None:
                    on_shelf[key] = held
            large: dict[int, memoryview] = {}
            for key, held in on_shelf.items():
                large |= _large_views(held, missing[key])
            answer = _Answer(sizes, large)
            answer.room = self._answers.allocate(answer.bytes, self._wait_s)
            for key, held in on_shelf.items():
                if self._from_shelf(held, missing[key], answer):
                    del missing[key]
        finally:
            for held in on_shelf.values():
                held.close()
        if not missing:
            return answer.pieces()
        gap_bytes = self._tier.costs.gap_bytes
        runs = [
            (key, run) for key, wanted in missing.items() for run in merge_ranges(wanted, gap_bytes)
        ]
        self._from_store(runs, answer, until_s, fresh=fresh)
        return answer.pieces()

    def close(self) -> None:
        """End the threads. Repeatable."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _from_shelf(self, held: CacheHandle, wanted: list[_Part], answer: _Answer) -> bool:
        """Copy parts of a chunk that stands on the shelf; False where it could not be read."""
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
        self._tier.count(held, len(wanted), sum(size for _, size, _ in wanted))
        return True

    def _from_store(
        self,
        runs: list[tuple[ChunkKey, MergedRange]],
        answer: _Answer,
        until_s: float,
        *,
        fresh: bool,
    ) -> None:
        """Read what is missing, `REQUEST_READS_MAX` at once; the first error ends it all."""
        if len(runs) == 1:  # as nearly always where requests are small: no other thread is needed
            self._read_run(*runs[0], answer, until_s, fresh=fresh)
            return
        error = self._read_all(runs, answer, until_s, fresh=fresh)
        try:
            if error is not None:
                raise error
        finally:
            del error  # with this frame it would be a cycle, which keeps the answer's memory

    def _read_all(
        self,
        runs: list[tuple[ChunkKey, MergedRange]],
        answer: _Answer,
        until_s: float,
        *,
        fresh: bool,
    ) -> BaseException | None:
        """The first error; all reads have ended then, as they write into the answer."""
        begun: set[Future[None]] = set()
        error: BaseException | None = None
        for key, run in runs:
            if len(begun) >= REQUEST_READS_MAX:
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
        """Fill the parts of one run, by another's read where one that is under way has them."""
        mine = _InFlight(run.start, run.end, Future())
        with self._lock:
            flights = self._in_flight.setdefault(key, [])
            others = (each for each in flights if each.start <= run.start and each.end >= run.end)
            other = None if fresh else next(others, None)
            if other is None:
                flights.append(mine)
        if other is None:
            try:
                self._read_for_all(key, run, answer, until_s, mine)
            finally:
                with self._lock:
                    flights.remove(mine)
                    if not flights:
                        del self._in_flight[key]
        else:
            try:
                content = other.content.result(max(until_s - time.monotonic(), 0.0))
            except FutureTimeout:
                raise _too_late() from None
            except ObjectStoreError:
                self._read_run(key, run, answer, until_s, fresh=True)
                return
            answer.copy(run.parts, content, other.start)
        self._tier.count(None, len(run.parts), sum(size for _, size, _ in run.parts))

    def _read_for_all(
        self, key: ChunkKey, run: MergedRange, answer: _Answer, until_s: float, flight: _InFlight
    ) -> None:
        """Read a run from the store, for all who wait for it."""

        def read(start: int, buffer: memoryview) -> None:
            if not self._store_reads.acquire(timeout=max(until_s - time.monotonic(), 0.0)):
                raise _too_late()
            try:
                self._tier.read_store(key, start, buffer)
            finally:
                self._store_reads.release()

        try:
            content = self._fill(run, answer, read)
        except BaseException:  # which each who joined gets for himself, trying alone
            flight.content.set_exception(ObjectStoreError("another's read has failed"))
            raise
        flight.content.set_result(content)
        self._tier.record_miss(key, run.start, content)

    def _fill(
        self, run: MergedRange, answer: _Answer, read: Callable[[int, memoryview], None]
    ) -> memoryview:
        """Read a run: where its first part is all of it, to where that goes; and what was read."""
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


def _large_views(held: CacheHandle, wanted: list[_Part]) -> dict[int, memoryview]:
    """The large parts of a chunk in memory, by place: they are sent from there. None where the
    chunk ends before a part does, which the store says better."""
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
    return DeadlineError("the object store has too much to do", advice="try again later")
