"""Fetches spans (ranges) of chunks from one store, shares those in flight, and measures the reads.

Most spans are fetched by a `ChunkReader`: that of a task's cache, else `StoredParts`. A span that
several units (groups of files that are pushed together) want is fetched once; a smaller one is cut
out of a larger one in flight. `ReadLimits.ahead_bytes` bounds the spans that are begun before they
are wanted.

Concurrency: one thread at a time calls; only `costs_of`, `places` and `is_slow` may be called
beside it. Requests go on in the `ChunkReader`'s threads or in other nodes, but the caller's thread
takes the contents. So nothing here changes between two calls. The `ChunkReader` of a task asks the
nodes, and then the store for missing parts; the second step begins only when somebody takes the
answers of the first. For requests ahead of time, a thread takes them at once (`_Ahead`).
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ...errors import DieselError, ObjectMissing
from ...format.snapshot.reader import Snapshot
from ...storage.objects.store import (
    IN_STORE,
    ChunkReader,
    ObjectStore,
    ReadGroup,
    batched_parts,
    give_up,
)
from ..policies.costs import ReadCosts
from .chunk_source import ChunkSource
from .coalesce import ReadLimits
from .flights import FlightTable
from .read_plan import Span
from .stored_parts import StoredParts

AHEAD_THREADS = 16
"""The most requests ahead of time that threads serve at once: one for each push that a mount
announces."""

ARRIVED_S_MIN = 0.0002
"""If the caller waits less than this for contents, they had arrived before, at an unknown time, and
their read is not measured."""

Contents: TypeAlias = dict[Span, memoryview]


class Arrived(NamedTuple):
    contents: Contents
    is_checked: bool
    """Whether the bytes of each extent have been checked against its checksum."""


class _Asked:
    """One request, and the groups that have arrived."""

    def __init__(
        self,
        spans: Sequence[Span],
        reader: ChunkReader,
        note: Callable[[int, int, float, float], None],
        threads: ThreadPoolExecutor | None,
    ) -> None:
        """`note` is called if the time of an arrival is known: with the contents' place
        (`ChunkReader.places`), their number of bytes, and the times of the request and of the
        arrival. With `threads`, one of them takes the contents from `reader`."""
        self.spans = spans
        self._note = note
        self._asked_s = time.monotonic()
        parts = np.array(spans, np.uint32)
        self._places = reader.places(parts[:, 0].astype(np.int64))  # by span
        self.bytes = int(parts[:, 2].sum(dtype=np.int64))
        reading = reader.begin(parts)
        self._reading = reading if threads is None else _Ahead(reading, threads)
        self.wanted = len(spans)  # how many of the spans are still wanted
        self._arrived: list[Arrived] = []
        self._error: DieselError | None = None

    def arriving(self) -> Iterator[Arrived]:
        """Begins with groups that have arrived. Raises an error of the read at each call, since
        several units may share this request."""
        yield from self._arrived
        while self._error is None:
            wait_from_s = time.monotonic()
            try:
                group = next(self._reading)
            except StopIteration:
                return
            except DieselError as error:
                self._error = error
                break
            arrived_s = time.monotonic()
            is_known = arrived_s - wait_from_s >= ARRIVED_S_MIN
            if isinstance(self._reading, _Ahead):
                arrived_s, is_known = self._reading.arrived_s, True
            if is_known and group.places:
                place = int(self._places[group.places[0]])
                self._note(place, sum(map(len, group.contents)), self._asked_s, arrived_s)
            spans = map(self.spans.__getitem__, group.places)
            contents = dict(zip(spans, group.contents, strict=True))
            self._arrived.append(Arrived(contents, group.is_checked))
            yield self._arrived[-1]
        raise self._error.with_traceback(None)

    def result(self) -> Contents:
        return {span: each for some in self.arriving() for span, each in some.contents.items()}

    def give_up(self) -> None:
        give_up(self._reading)


class _Ahead(Iterator[ReadGroup]):
    """The groups of `reading`, which a thread takes as they arrive."""

    def __init__(self, reading: Iterator[ReadGroup], threads: ThreadPoolExecutor) -> None:
        self.arrived_s = 0.0
        """When the group arrived that `__next__` has given last."""
        self._arrived: SimpleQueue[tuple[float, ReadGroup] | BaseException | None] = SimpleQueue()
        self._is_wanted = True
        threads.submit(self._take, reading)

    def _take(self, reading: Iterator[ReadGroup]) -> None:
        end: BaseException | None = None
        try:
            while self._is_wanted:
                group = next(reading)
                self._arrived.put((time.monotonic(), group))
        except StopIteration:
            pass
        except BaseException as error:  # the caller gets it
            # A traceback would keep this frame and the groups until a collection of garbage
            end = error.with_traceback(None)
        finally:
            give_up(reading)
            self._arrived.put(end)

    def __next__(self) -> ReadGroup:
        found = self._arrived.get()
        if found is None or isinstance(found, BaseException):
            self._arrived.put(found)  # for the next call
            raise StopIteration if found is None else found
        self.arrived_s, group = found
        return group

    def close(self) -> None:
        self._is_wanted = False


class SpanFetcher:
    def __init__(
        self, snapshot: Snapshot, objects: ObjectStore, limits: ReadLimits, counts: Counter[str]
    ) -> None:
        """Adds to `counts` as `ChunkSource` does."""
        self._reads = objects.fast_reads
        self._limits = limits
        self._counts = counts
        self.source = ChunkSource(snapshot, objects, counts)
        self._stored = StoredParts(snapshot, objects)
        self._chunks: ChunkReader = (
            self._reads.chunk_reader(snapshot.identity, snapshot.version) or self._stored
        )
        self._costs = {IN_STORE: self._stored.costs}  # by place
        self._arrived_s = 0.0  # the last arrival of awaited contents
        # One buffer is kept: new memory costs as much as reading into it.
        self._buffer = np.empty(limits.span_bytes, np.uint8).data
        self._flights: FlightTable[int, _Asked] = FlightTable()
        self._threads: ThreadPoolExecutor | None = None  # if any have been needed

    @property
    def batches_reads(self) -> bool:
        return self._reads.batches_reads

    @property
    def is_slow(self) -> bool:
        """Whether the store, or a task's nodes together with it, take long to answer, so that it
        helps to read ahead. True before the first read."""
        return self.reads_at_once if self._chunks is self._stored else self._chunks.is_slow

    @property
    def reads_at_once(self) -> bool:
        """Whether each span is a request of its own, several at a time, since the store is slow."""
        return not self._reads.batches_reads and self._stored.is_slow

    def has_any_in_flight(self, spans: Sequence[Span]) -> bool:
        return not self._flights.keys().isdisjoint(spans)

    @property
    def is_busy(self) -> bool:
        return bool(self._flights)

    def places(self, chunks: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        return self._chunks.places(chunks)

    def give_up(self, span: Span) -> None:
        """Forget an unwanted span. A request without wanted spans is given up."""
        asked = self._take(span)
        if asked is not None and not asked.wanted:
            asked.give_up()

    def close(self) -> None:
        """Stop reading ahead. Repeatable."""
        for asked in {id(each): each for each in self._flights.values()}.values():
            asked.give_up()
        self._stored.close()
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)

    def begin(self, spans: Sequence[Span], *, are_due: bool = False) -> int:
        """Begin to read these spans, in their order, as far as there is room. Returns how many are
        under way, counted from the first. `are_due`: a caller waits for these spans, so the room is
        twice as large."""
        flights = self._flights
        room_bytes = self._limits.ahead_bytes * (1 + are_due) - flights.bytes
        wanted: dict[Span, None] = {}
        begun = 0
        for span in spans:
            if span not in flights and span not in wanted:
                room_bytes -= span[2]
                if room_bytes < 0:
                    break
                wanted[span] = None
            begun += 1
        for group in self.requests([*wanted]):
            flights.begin(group, self._start(group, is_ahead=not are_due))
        return begun

    def _start(self, spans: Sequence[Span], *, is_ahead: bool = False) -> _Asked:
        threads = None
        if is_ahead and self._chunks is not self._stored and self.is_slow:
            threads = self._threads = self._threads or ThreadPoolExecutor(AHEAD_THREADS, "ahead")
        asked = _Asked(spans, self._chunks, self._note_asked, threads)
        self._counts["fetches"] += 1
        self._counts["fetched_bytes"] += asked.bytes
        return asked

    def requests(self, spans: Sequence[Span]) -> Iterator[Sequence[Span]]:
        """Groups of spans for one request to the store each."""
        if self._reads.batches_reads:
            return batched_parts(spans, self._limits.batch_parts, self._limits.batch_bytes)
        return ([span] for span in spans)

    def _take(self, span: Span) -> _Asked | None:
        asked = self._flights.end(span)
        if asked is not None:
            asked.wanted -= 1
        return asked

    def arriving(self, spans: Sequence[Span]) -> Iterator[Arrived]:
        """The spans' stored bytes as they arrive, perhaps with other spans of the same requests."""
        begun: dict[int, _Asked] = {}
        missing = []
        for span in spans:  # all are taken, even if the first fails
            taken = self._flights.end(span)
            if taken is None:
                missing.append(span)
            else:
                taken.wanted -= 1
                begun[id(taken)] = taken
        begun |= {id(asked): asked for asked in map(self._start, self.requests(missing))}
        for asked in begun.values():
            try:
                yield from asked.arriving()
            except DieselError:
                self._forget(asked)
                raise

    def read_kept(self, span: Span) -> memoryview:
        """As `read_one`, but a span in flight stays there until `give_up`: a second try finds it if
        another span has failed."""
        asked = self._flights.get(span)
        return self.read(span) if asked is None else self._result(asked, span)

    def read_one(self, span: Span) -> memoryview:
        """The stored bytes of a span, which may be in flight, in memory of their own."""
        asked = self._take(span)
        return self.read(span) if asked is None else self._result(asked, span)

    def _result(self, asked: _Asked, span: Span) -> memoryview:
        """Raises the errors of `ChunkSource.read`."""
        try:
            return asked.result()[span]
        except ObjectMissing as error:
            self._forget(asked)
            raise self.source.lost_chunk_error(span[0], error) from error
        except DieselError:
            self._forget(asked)
            raise

    def _forget(self, failed: _Asked) -> None:
        """Take the other spans of a failed request out of the table: units request them again."""
        for span in failed.spans:
            if self._flights.get(span) is failed:
                self._take(span)

    def within_flights(self, spans: Iterable[Span]) -> dict[Span, Span]:
        """The spans that lie in a larger span in flight, with that larger span."""
        return self._flights.larger(spans)

    def read_within(self, span: Span, larger: Span) -> memoryview:
        """Cut a span out of a larger one in flight, which stays there for the unit that it was
        begun for."""
        asked = self._flights.get(larger)
        if asked is None:  # the larger span's request has failed meanwhile
            return self.read(span)
        start = span[1] - larger[1]
        return self._result(asked, larger)[start : start + span[2]]

    def read(self, span: Span) -> memoryview:
        """Stored bytes in memory of their own."""
        start_s = time.monotonic()
        try:
            return self.source.read(*span)
        finally:
            self._stored.costs.observe(span[2], time.monotonic() - start_s)

    def read_spans(self, chunk: int, spans: Sequence[Span]) -> Iterator[memoryview]:
        """Each result may be used until the next one comes."""
        if self._flights.keys().isdisjoint(spans):
            largest = max(size for _, _, size in spans)
            if largest > len(self._buffer):
                self._buffer = np.empty(largest, np.uint8).data
            ranges = [(begin, size) for _, begin, size in spans]
            found = self._reads.read_ranges(self.source.name(chunk), ranges, self._buffer)
            for _, _, size in spans:
                start_s = time.monotonic()
                try:
                    read = next(found)
                except ObjectMissing as error:
                    raise self.source.lost_chunk_error(chunk, error) from error
                self._stored.costs.observe(size, time.monotonic() - start_s)
                self._counts["fetches"] += 1
                self._counts["fetched_bytes"] += size
                yield read
            return
        yield from map(self.read_one, spans)

    def costs_of(self, place: int) -> ReadCosts:
        return self._costs.setdefault(place, ReadCosts())

    def _note_asked(self, place: int, size: int, asked_s: float, arrived_s: float) -> None:
        """Note that contents have arrived from a place. Requests share the bandwidth, so a read's
        time begins at its request (`asked_s`) or the last arrival before, if later."""
        seconds = arrived_s - max(asked_s, self._arrived_s)
        if self._chunks is not self._stored and seconds > 0:  # `StoredParts` observes by itself
            self.costs_of(place).observe(size, seconds)
        self._arrived_s = max(arrived_s, self._arrived_s)
