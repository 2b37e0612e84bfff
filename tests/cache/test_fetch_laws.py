"""The laws that hold for every way to read chunks, whatever engine is under it.

A face is one such way. It reads files of the dataset of `conftest.py`, and each law holds for all
faces, or for those that it names. Each reader has a suite of its own for the rest.
"""

import gc
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from diesel_fs.cache.fetching import stored_parts
from diesel_fs.cache.fetching.flights import Flight, FlightTable
from diesel_fs.cache.read_through import ReadThroughCache
from diesel_fs.cache.readers import chunk_cache
from diesel_fs.cache.readers.coalescing_reader import CoalescingReader
from diesel_fs.cache.readers.entry_reader import EntryReader
from diesel_fs.cache.readers.range_reader import RangeReader
from diesel_fs.cache.tiers import MemoryTier
from diesel_fs.errors import CorruptError, ObjectMissing, ObjectStoreError
from diesel_fs.format.chunk import decode
from diesel_fs.format.chunk_id import chunk_id_text
from diesel_fs.format.snapshot.reader import Extent, Snapshot
from diesel_fs.storage.objects.store import ObjectStore
from tests.examples import examples

from ..waiting import wait_until
from .chunk_ranges import records
from .conftest import FILES, Counting, Gate, object_of
from .reader_stores import Batching, Slow

NAMES = sorted(name for name, content in FILES.items() if content)
LIMIT = 3
"""Reads of the store at once, if a law sets the limit."""


class Face(ABC):
    def __init__(self, view: Snapshot, store: Counting) -> None:
        self.view, self.store = view, store

    @abstractmethod
    def read(self, names: Sequence[str]) -> list[bytes]:
        """The contents of these files. Raises DieselError for one that cannot be read."""

    def begin(self) -> None:
        """Begin to read all files, without waiting for them."""
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None: ...

    def rows(self, names: Sequence[str]) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        return np.array([self.view.lookup(name.encode()) for name in names], np.int64)

    def check(self, *names: str) -> None:
        assert self.read(names) == [FILES[name] for name in names]


class Entries(Face):
    memory_bytes = 1

    def __init__(self, view: Snapshot, store: Counting) -> None:
        super().__init__(view, store)
        self.reader = EntryReader(view, self.wrapped(store), self.memory_bytes)

    def wrapped(self, store: Counting) -> ObjectStore:
        return store

    def read(self, names: Sequence[str]) -> list[bytes]:
        return [bytes(self.reader.read(row)) for row in self.rows(names).tolist()]

    def begin(self) -> None:
        for number in range(len(self.view.chunk_ids)):
            self.reader._cache.prefetch(number)

    def close(self) -> None:
        self.reader.close()


class Chunks(Entries):
    memory_bytes = 1 << 30


class Windows(Chunks):
    memory_bytes = 200_000

    def read(self, names: Sequence[str]) -> list[bytes]:
        return list(map(bytes, self.reader.read_many(self.rows(names))))


class Columns(Windows):
    def wrapped(self, store: Counting) -> ObjectStore:
        return Batching(store)


class Pushes(Face):
    def __init__(self, view: Snapshot, store: Counting) -> None:
        super().__init__(view, store)
        self.reader = CoalescingReader(view, self.wrapped(store))

    def wrapped(self, store: Counting) -> ObjectStore:
        return store

    def read(self, names: Sequence[str]) -> list[bytes]:
        """A file that is left out raises the error that was logged for it."""
        rows, before = self.rows(names), self.reader.stats()
        parts: dict[int, dict[int, bytes]] = {row: {} for row in rows.tolist()}
        for batch in self.reader.batches(rows):
            places = zip(batch.entries.tolist(), batch.starts.tolist(), batch.contents, strict=True)
            for row, start, content in places:
                parts[row][start] = bytes(content)
        after = self.reader.stats()
        if after["lost"] > before["lost"]:
            raise ObjectMissing("left out")
        if after["damaged"] > before["damaged"]:
            raise CorruptError("left out")
        return [b"".join(found for _, found in sorted(parts[row].items())) for row in rows.tolist()]

    def begin(self) -> None:
        self.reader.prefetch([self.view.files()])

    def close(self) -> None:
        self.reader.close()


class SlowPushes(Pushes):
    def __init__(self, view: Snapshot, store: Counting) -> None:
        super().__init__(view, store)
        self.reader._fetcher._stored.costs.observe(100_000, 1.0)

    def wrapped(self, store: Counting) -> ObjectStore:
        slow = Slow(store)
        slow.delay_s = 0.0
        return slow


class BatchedPushes(Pushes):
    def wrapped(self, store: Counting) -> ObjectStore:
        return Batching(store)


class Ranges(Face):
    """Parts of chunks, as a server reads them; the client checks, and asks again with `fresh`."""

    def __init__(self, view: Snapshot, store: Counting) -> None:
        super().__init__(view, store)
        self.cache = ReadThroughCache(store, MemoryTier(0))
        self.reader = RangeReader(self.cache, request_reads_max=LIMIT)

    def read(self, names: Sequence[str]) -> list[bytes]:
        extents = [self.view.extents(row) for row in self.rows(names).tolist()]
        stored = memoryview(self.stored([each for some in extents for each in some]))
        found = []
        for some in extents:
            pieces = []
            for extent in some:
                pieces.append(self.checked(extent, stored[: extent.stored]))
                stored = stored[extent.stored :]
            found.append(b"".join(pieces))
        return found

    def stored(self, extents: Sequence[Extent], *, fresh: bool = False) -> bytes:
        ids = self.view.chunk_ids
        parts = records([(bytes(ids[each.chunk]), each.offset, each.stored) for each in extents])
        return b"".join(self.reader.read(self.view.identity, parts, fresh=fresh))

    def checked(self, extent: Extent, stored: memoryview) -> bytes:
        try:
            return bytes(decode(stored, extent.codec, extent.size, extent.checksum))
        except CorruptError:
            again = memoryview(self.stored([extent], fresh=True))
            return bytes(decode(again, extent.codec, extent.size, extent.checksum))

    def begin(self) -> None:
        extents = [self.view.extents(self.view.lookup(name.encode()))[0] for name in NAMES]

        def read() -> None:
            with suppress(RuntimeError):  # the reader is closed
                self.stored(extents)

        threading.Thread(target=read, daemon=True).start()

    def close(self) -> None:
        self.reader.close()
        self.cache.close()


Made = Callable[[type[Face]], Face]


@pytest.fixture
def made(view: Snapshot, store: Counting) -> Iterator[Made]:
    faces: list[Face] = []

    def make(kind: type[Face]) -> Face:
        faces.append(kind(view, store))
        return faces[-1]

    yield make
    for face in faces:
        face.close()


ALL = (Entries, Chunks, Windows, Columns, Pushes, SlowPushes, BatchedPushes, Ranges)
SHARED_BY_THREADS = (Chunks, Ranges)


def faces(*kinds: type[Face]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", kinds, ids=[each.__name__ for each in kinds])


@faces(*ALL)
@examples(12, suppress=(HealthCheck.function_scoped_fixture,))
@given(orders=st.lists(st.lists(st.sampled_from(NAMES), max_size=40), max_size=3))
def test_the_bytes_are_right(made: Made, kind: type[Face], orders: list[list[str]]) -> None:
    face = made(kind)
    for names in orders:
        face.check(*names)


class Sharing:
    """Threads that read one file at the same moment. The first is held back at a gate, and the
    others wait for its read."""

    def __init__(self, face: Face, count: int, patch: pytest.MonkeyPatch) -> None:
        joined, result = threading.Semaphore(0), Flight.result

        def joining(flight: Flight[object], timeout_s: float | None = None) -> object:
            joined.release()
            return result(flight, timeout_s)

        patch.setattr(Flight, "result", joining)
        self.gate, self.fails = Gate(face.store), False
        face.store.change = self._arrive
        self.pool = ThreadPoolExecutor(count)
        self.reads = [self.pool.submit(face.check, "n299")]
        self.gate.await_reads(1)
        self.reads += [self.pool.submit(face.check, "n299") for _ in range(count - 1)]
        for _ in range(count - 1):
            assert joined.acquire(timeout=20)

    def _arrive(self, name: str, buffer: memoryview) -> None:
        self.gate.wait(name, buffer)
        if self.fails:
            raise ObjectStoreError("503")

    def finish(self) -> list[str]:
        self.gate.open.set()
        with self.pool:
            errors = [each.exception(20) for each in self.reads]
        return [str(error) for error in errors if error is not None]


@faces(*SHARED_BY_THREADS)
def test_F10_callers_at_the_same_moment_share_one_request(
    made: Made, kind: type[Face], store: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Sharing(made(kind), 16, monkeypatch).finish() == []
    assert store.reads_by_object()[store.reads[0][0]] == 1


@faces(*SHARED_BY_THREADS)
def test_an_error_reaches_each_that_waits(
    made: Made, kind: type[Face], store: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    face = made(kind)
    sharing = Sharing(face, 4, monkeypatch)
    sharing.fails = True
    assert sharing.finish() == ["503"] * 4
    sharing.fails = False
    face.check("n299")


@faces(*ALL)
def test_an_error_is_not_kept(made: Made, kind: type[Face], store: Counting) -> None:
    face = made(kind)

    def fail(name: str, buffer: memoryview) -> None:
        raise ObjectStoreError("503")

    store.change = fail
    for _ in range(2):
        with pytest.raises(ObjectStoreError, match="503"):
            face.read(["n007", "n299"])
    store.change = lambda name, buffer: None
    face.check("n299", "n007")


def test_an_error_of_a_shared_request_is_not_kept_for_another_unit(
    made: Made, store: Counting
) -> None:
    face = made(BatchedPushes)
    assert isinstance(face, Pushes)

    def fail(name: str, buffer: memoryview) -> None:
        raise ObjectStoreError("503")

    store.change = fail
    face.reader.prefetch([face.rows(["n007", "n011"]), face.rows(["n008", "n299"])])
    with pytest.raises(ObjectStoreError, match="503"):
        face.read(["n007", "n011"])
    store.change = lambda name, buffer: None
    face.check("n008", "n299")
    face.check("n007", "n011")


def test_a_second_try_of_a_unit_reads_only_the_spans_that_have_failed(
    made: Made, store: Counting
) -> None:
    face = made(SlowPushes)
    assert isinstance(face, Pushes)
    names = [name for name in NAMES if name[0] == "n"][::20]
    errors = [ObjectStoreError("503")]

    def fail_once(name: str, buffer: memoryview) -> None:
        with suppress(IndexError):  # several threads read
            raise errors.pop()

    store.change = fail_once
    face.reader.prefetch([face.rows(names)])
    wait_until(lambda: len(store.reads) == len(face.reader._fetcher._flights) > 3)
    before = len(store.reads)
    with pytest.raises(ObjectStoreError, match="503"):
        face.read(names)
    face.check(*names)
    assert len(store.reads) == before + 1


@faces(*ALL)
def test_O2_only_files_of_a_lost_chunk_fail(
    made: Made, kind: type[Face], view: Snapshot, caplog: pytest.LogCaptureFixture
) -> None:
    face = made(kind)
    lost = object_of(view, "n007")
    face.store.lose(lost)
    with pytest.raises(ObjectMissing) as error:
        face.read(["n007"])
    assert lost in str(error.value) + caplog.text
    face.check(*(each for each in NAMES if each[0] == "n" and object_of(view, each) != lost))


@faces(*ALL)
def test_B4_damage_on_the_way_is_repaired_by_a_second_read(
    made: Made, kind: type[Face], store: Counting, view: Snapshot
) -> None:
    face = made(kind)
    store.damage(view, "n299", times=1)
    for _ in range(2):
        face.check("n298", "n299", "n297")
    (damaged,) = store.damaged.values()
    assert not damaged, "else this test shows nothing"


@faces(*ALL)
def test_B3_only_a_file_that_is_damaged_in_the_store_is_refused(
    made: Made, kind: type[Face], view: Snapshot, caplog: pytest.LogCaptureFixture
) -> None:
    """The error, or the log if the file is left out, names it; a server does not know its name."""
    face = made(kind)
    face.store.damage(view, "n150")
    with pytest.raises(CorruptError) as error:
        face.read(["n150"])
    chunk = chunk_id_text(view.chunk_ids[view.extents(view.lookup(b"n150"))[0].chunk])
    is_named = re.search(f"ds/n150 .*{chunk}", str(error.value) + caplog.text) is not None
    assert is_named == (kind is not Ranges)
    face.check("n149", "n151")


@faces(SlowPushes, BatchedPushes)
def test_a_unit_that_is_given_up_harms_no_other(made: Made, kind: type[Face]) -> None:
    """Its spans share requests with those of another unit."""
    face = made(kind)
    assert isinstance(face, Pushes)
    one, other = face.rows(["n007", "n011"]), face.rows(["n008", "n299"])
    gate = Gate(face.store)
    face.reader.prefetch([one, other])
    face.reader.prefetch([other])
    gate.open.set()
    face.check("n008", "n299")
    face.check("n007", "n011")
    assert not face.reader._fetcher._flights


def test_a_chunk_that_is_dropped_reaches_the_readers_that_wait_for_it(
    made: Made, view: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    face = made(Chunks)
    assert isinstance(face, Chunks)
    sharing = Sharing(face, 3, monkeypatch)
    cache = face.reader._cache
    dropped = view.extents(view.lookup(b"n299"))[0].chunk
    with cache._lock:
        for number in [*cache._flights]:
            cache._drop(number)
    assert sharing.finish() == []
    wait_until(lambda: not cache._flights)
    assert cache.held_bytes == sum(each.charged for each in cache._chunks.values())
    assert cache.loaded(dropped) is None


@faces(Chunks, SlowPushes, Ranges)
def test_O20_requests_at_once_keep_their_limit(
    made: Made, kind: type[Face], store: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_parts, "FETCH_THREADS", LIMIT)
    monkeypatch.setattr(chunk_cache, "FETCH_THREADS", LIMIT)
    face, gate = made(kind), Gate(store)
    face.begin()
    gate.expect_at_most(LIMIT)
    gate.open.set()
    wait_until(lambda: not gate.now)
    assert gate.most == LIMIT


@faces(*ALL)
def test_Z11_bytes_stay_when_the_reader_is_closed(made: Made, kind: type[Face]) -> None:
    before = {*threading.enumerate()}
    face = made(kind)
    face.check(*NAMES[:50])
    held = face.reader.read(face.view.lookup(b"n007")) if isinstance(face, Entries) else b""
    face.close()
    face.close()
    assert bytes(held) in (FILES["n007"], b"")
    wait_until(lambda: {*threading.enumerate()} <= before)


SPANS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(1, 9)), unique=True, max_size=12
)


def test_a_failed_shared_read_holds_no_memory_of_those_that_waited(made: Made) -> None:
    """The garbage collector is not needed for it."""
    face = made(Ranges)
    assert isinstance(face, Ranges)
    gate, errors = Gate(face.store), [ObjectStoreError("503")]

    def fail_first(name: str, buffer: memoryview) -> None:
        gate.wait(name, buffer)
        with suppress(IndexError):
            raise errors.pop()

    def read() -> None:
        with suppress(ObjectStoreError):
            face.check("n299")

    face.store.change = fail_first
    threads = [threading.Thread(target=read) for _ in range(4)]
    gc.collect()
    gc.disable()
    try:
        threads[0].start()
        gate.await_reads(1)
        for each in threads[1:]:
            each.start()
        wait_until(lambda: face.reader._answers.used_bytes == 4 * len(FILES["n299"]))
        gate.open.set()
        for each in threads:
            each.join(20)
        assert not errors
        assert face.reader._answers.used_bytes == 0
    finally:
        gc.enable()


@given(SPANS, SPANS, st.lists(st.integers(0, 11)))
def test_a_table_finds_a_read_that_has_all_of_a_span(
    begun: list[tuple[int, int, int]], wanted: list[tuple[int, int, int]], ended: list[int]
) -> None:
    table: FlightTable[int, str] = FlightTable()
    table.begin(begun, "read")
    for place in ended:
        if place < len(begun):
            table.end(begun[place])
    assert table.bytes == sum(size for _, _, size in table)

    def has(larger: tuple[int, int, int], span: tuple[int, int, int]) -> bool:
        chunk, start, size = larger
        places = set(range(start, start + size))
        return chunk == span[0] and places >= set(range(span[1], span[1] + span[2]))

    larger = table.larger(wanted)
    for span in wanted:
        found = table.covering(span)
        assert (found is not None) == any(has(each, span) for each in table)
        assert found is None or (found in table and has(found, span))
        assert (span in larger) == (found is not None and span not in table)
        assert span not in larger or has(larger[span], span)
