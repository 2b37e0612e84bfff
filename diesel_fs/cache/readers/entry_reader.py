"""Reads the contents of a dataset's files, checked, for the Python API and a mount's server.

For each miss, `EntryReader` decides whether to read the whole chunk (some 4 MiB) or only the entry.
It keeps whole chunks in memory (`chunk_cache.py`). An entry is checked before it is first returned;
after a mismatch it is read once more, past all caches (`fetching/chunk_source.py`).

Thread-safe. After a fork the child may go on reading.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice, repeat

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from ...errors import CorruptError, DieselError, ForeignError, ObjectMissing, UsageError
from ...format.chunk import PREAMBLE_BYTES, decode, parse_preamble
from ...format.entries import Bytes, Codec
from ...format.snapshot.reader import Extent, PlainExtent, Snapshot
from ...storage.objects.store import ObjectStore, new_buffer
from ..fetching.chunk_source import ChunkSource
from ..fetching.stored_parts import StoredParts
from ..waiting import WaitCause, current_observer
from .chunk_cache import ChunkCache, LoadedChunk
from .column_reader import EXTENT_BITS, PLAIN_FILE, Column, ColumnReader
from .order_prefetch import WHOLE_CHUNK_FRACTION, OrderPrefetch
from .windows import Window, WindowPlanner

WINDOW_ENTRIES = 4096
"""Files that `read_many` looks ahead; fewer if their chunks do not fit the memory."""

CHECKED_AT_ONCE_BYTES = 256 << 10
"""`read_nowait` checks and decodes entries up to this size itself. That takes 0.03 ms, with lz4 up
to 0.2 ms; handing the read to a thread costs 0.3 ms."""

_PREFETCH_CHUNKS = 16  # loads that are begun ahead of a reader
_READ_ON_BYTES = 16 << 20  # loaded ahead of a reader that reads a large file sequentially
_LARGE_FILES_MAX = 1024  # files in `_next_extents`, which is then cleared
_EMPTY = memoryview(b"")


class EntryReader:
    """`memory_bytes` limits the chunks in memory."""

    def __init__(
        self,
        snapshot: Snapshot,
        objects: ObjectStore,
        memory_bytes: int,
        *,
        prefer_entries: bool = False,
    ) -> None:
        """`prefer_entries`: if the dataset does not fit the memory, read small entries without
        their chunks. For stores that themselves keep chunks near, such as a task's cache."""
        self.snapshot = snapshot
        self._objects = objects
        self._reads = objects.fast_reads
        self._cache = ChunkCache(
            memory_bytes,
            self._load_chunk,
            load_cause=WaitCause.PEER if self._reads.can_pin else WaitCause.STORE,
        )
        self._windows = WindowPlanner(snapshot, self._cache, self._is_pinned)
        self._prefers_entries = prefer_entries and not self._everything_fits
        self._ahead_chunks = 1
        self._passed = -1  # the chunk that `_note_passed` drops next
        self._counts: Counter[str] = Counter()
        self._source = ChunkSource(snapshot, objects, self._counts)
        self._chunks = self._reads.chunk_reader(snapshot.identity, snapshot.version)
        self._stored = StoredParts(snapshot, objects)
        parts = self._stored if self._chunks is None else self._chunks
        self._columns = ColumnReader(
            snapshot, parts, self._counts, read=self.read, check=self._check_alone
        )
        self._single_bytes_max = 0
        """Smaller files may be read alone, without a look at the cache of chunks."""

        if not self._everything_fits:
            smallest = int(snapshot.chunk_sizes.min(initial=1 << 31))
            self._single_bytes_max = smallest // WHOLE_CHUNK_FRACTION
        self._last_miss = (-1, -1)  # chunk and end of the entry: shows sequential reads
        # Chunk, offset and content of the last entry that was read alone
        self._single: tuple[int, int, memoryview] = (-1, -1, _EMPTY)
        self._single_lock = threading.Lock()
        self._next_extents: dict[int, int] = {}  # by file: where a sequential reader goes on

    @property
    def _everything_fits(self) -> bool:
        return self._windows.everything_fits

    def read(self, index: int, offset: int = 0, size: int | None = None) -> memoryview:
        """`size` bytes (None: all) of the file `index` from `offset` on; fewer only at the file's
        end.

        Raises CorruptError if the stored bytes are damaged, ObjectMissing if the chunk is lost,
        ObjectStoreError if the store cannot be reached.
        """
        total = self.snapshot.stat(index).size
        end = total if size is None else min(offset + size, total)
        if offset >= end:
            return _EMPTY
        followed, visit = self._cache.order, -1  # see `order_prefetch.py`
        if followed is not None and (visit := followed.visit_of(index)) >= 0:
            self._cache.advance(followed, visit, index)
        pieces = []
        for extent in self.snapshot.extents(index, offset, end):
            content = self._extent(index, extent)
            if extent.size != total:
                self._note_passed(extent, end)
            pieces.append(content[max(offset - extent.start, 0) : end - extent.start])
        if followed is not None and visit >= 0 and end == total:
            self._cache.mark_read(followed, visit, np.array([index]))
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))

    def read_plain(self, index: int, plain: PlainExtent) -> Bytes:
        """As `read`, for a file that is one plain extent (uncompressed, in one chunk), but with
        little work for a small file that a task's cache has in memory."""
        chunk, start, size, checksum = plain
        chunks = self._chunks
        if chunks is None or size >= self._single_bytes_max or self._last_miss == (chunk, start):
            return self.read(index)
        self._last_miss = chunk, start + size
        try:
            content, is_checked = chunks.read_part(chunk, start, size)
        except DieselError:
            return self.read(index)  # it raises the error for the file
        self._counts["misses"] += 1
        if is_checked or xxh3_64_intdigest(content) == checksum:
            return content
        extent = Extent(chunk, start, size, Codec.RAW, checksum, 0, size)
        return self._check(index, extent, memoryview(content), None)

    def read_nowait(self, index: int, offset: int, size: int) -> memoryview | None:
        """As `read` if the content is in memory, else None. Never waits for the store. Returns None
        for a large entry that has not been checked yet (`CHECKED_AT_ONCE_BYTES`)."""
        total = self.snapshot.stat(index).size
        end = min(offset + size, total)
        if offset >= end:
            return _EMPTY
        extents = self.snapshot.extents(index, offset, end)
        if len(extents) != 1:
            return None
        [extent] = extents
        content = self._in_memory(extent)
        if content is None and self._prefers_entries and extent.size == total:
            content = self._read_entry_now(extent)
        if content is not None and extent.size != total:
            if offset == extent.start:
                self._read_on(index, extent)
            self._note_passed(extent, end)
        return None if content is None else content[offset - extent.start : end - extent.start]

    def read_many(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> Iterator[memoryview]:
        """The whole contents of these files, in this order. Chunks are loaded ahead. Raises the
        errors of `read`; folders and links have empty contents."""
        wanted = np.asarray(indices, np.int64)
        if self._chunks is not None and not self._everything_fits and self._cache.order is None:
            return chain.from_iterable(self._column_contents(wanted))
        return self._read_windows(wanted)

    def _column_contents(self, wanted: Column) -> Iterator[list[memoryview]]:
        return self._columns.contents(wanted, self._cache.budget_bytes // 4)

    def _read_windows(self, wanted: Column) -> Iterator[memoryview]:
        start, entries = 0, WINDOW_ENTRIES
        while start < len(wanted):
            some = wanted[start : start + entries]
            here = self._contents_here(some) if self._everything_fits else None
            if here is not None:
                start += len(some)
                yield from here
                continue
            window = self._windows.next(some)
            start += len(window.wanted)
            entries = min(2 * len(window.wanted), WINDOW_ENTRIES)
            yield from self._read_window(window)

    def _contents_here(self, wanted: Column) -> list[memoryview] | None:
        """The contents, if all these files were checked before and have their chunks in memory.
        Does hardly any work for each file."""
        columns = self.snapshot.columns
        stored = columns.stored.take(wanted)
        kinds = columns.flags.take(wanted) & EXTENT_BITS
        if np.count_nonzero(kinds != PLAIN_FILE) or not stored.all():
            return None
        numbers = columns.chunk.take(wanted).tolist()
        offsets = columns.offset.take(wanted).astype(np.int64)
        ends = (offsets + stored).tolist()
        chunks: dict[int, LoadedChunk] = {}
        for number in set(numbers):
            chunk = self._cache.loaded(number)  # nothing is evicted, since everything fits
            if chunk is None:
                return None
            chunks[number] = chunk
        found = []
        for number, offset, end in zip(numbers, offsets.tolist(), ends, strict=True):
            chunk = chunks[number]
            if offset not in chunk.checked:
                return None
            found.append(chunk.view[offset:end])
        return found

    def prefetch_order(self, order: Column, ends: Column, *, grow: bool = False) -> None:
        """Announce that reads will come in this order, in groups of chunks (`order_prefetch.py`).
        `ends` has the position behind each group.

        Reads in this order then load each chunk once for a group; other reads go on as before. If
        the whole dataset fits the memory, nothing changes. Raises UsageError if the chunks of one
        group do not fit; with `grow`, the memory grows to the size of two groups.
        """
        if self._everything_fits:
            return
        followed = OrderPrefetch(self.snapshot, order, ends)
        if grow:
            needed = min(followed.two_groups_bytes_max, int(self.snapshot.chunk_sizes.sum()))
            self._cache.budget_bytes = max(self._cache.budget_bytes, needed)
        if followed.group_bytes_max > self._cache.budget_bytes:
            raise UsageError(
                f"a group of this order has {followed.group_bytes_max:,} bytes of chunks, and the"
                f" memory is {self._cache.budget_bytes:,}",
                advice="shuffle with a smaller group_size, or open the dataset with a memory_bytes"
                f" of {followed.two_groups_bytes_max:,}, for two groups",
            )
        if not self._everything_fits:
            self._single_bytes_max = 0
            self._cache.set_order(followed)

    def stats(self) -> dict[str, int]:
        """Counts since the reader was made, and the memory that it holds and may hold."""
        counts = {shown_as: self._counts[name] for name, shown_as in _COUNTS.items()}
        counts["memory_bytes"] = self._cache.held_bytes
        counts["memory_budget_bytes"] = self._cache.budget_bytes
        counts["evictions"] = self._cache.evictions
        return counts

    def close(self) -> None:
        """Views that were returned stay valid."""
        self._cache.close()
        self._stored.close()
        self._single = (-1, -1, _EMPTY)

    def _read_window(self, window: Window) -> Iterator[memoryview]:
        """The loop runs for 200,000 files a second, so it checks an uncompressed entry itself, and
        calls `_check` only after a mismatch."""
        whole, columns, followed = window.whole, self.snapshot.columns, window.followed
        in_batches = self._reads.batches_reads and followed is None and not self._everything_fits
        single = (
            index
            for index, number in zip(window.wanted.tolist(), window.chunks.tolist(), strict=True)
            if number not in whole
        )
        singles: Iterator[memoryview] = iter(())
        if in_batches:
            rows = np.array(list(single), np.int64)
            singles = chain.from_iterable(self._column_contents(rows))
        # A followed order loads ahead by itself, and pinned chunks need no load.
        ahead = (each for each in (whole if followed is None else ()) if not self._is_pinned(each))
        for number in islice(ahead, _PREFETCH_CHUNKS):
            self._cache.prefetch(number)
        offsets = columns.offset[window.wanted].astype(np.int64)
        held: dict[int, LoadedChunk] = {}
        # For the last file of a visit: all files of the visit
        closing = map(window.closing.get, range(len(window.wanted)))
        for index, number, offset, end, checksum, closed in zip(
            window.wanted.tolist(),
            window.chunks.tolist(),
            offsets.tolist(),
            (offsets + columns.stored[window.wanted]).tolist(),
            columns.checksum[window.wanted].tolist(),
            closing if window.closing else repeat(None, len(window.wanted)),
            strict=True,
        ):
            chunk = held.get(number)
            if chunk is None:
                if number not in whole:
                    if in_batches:
                        yield next(singles)
                    elif number < 0:
                        yield self.read(index)
                    else:
                        size = end - offset
                        extent = Extent(number, offset, size, Codec.RAW, checksum, 0, size)
                        yield self._read_alone(index, extent)
                    continue
                if followed is not None:
                    self._cache.advance(followed, whole[number], index)
                chunk = held[number] = self._cache.get(number)
                for following in ahead:
                    self._cache.prefetch(following)
                    break
            content = chunk.view[offset:end]
            if offset not in chunk.checked:
                if xxh3_64_intdigest(content) == checksum:
                    chunk.checked.add(offset)
                else:
                    size = end - offset
                    extent = Extent(number, offset, size, Codec.RAW, checksum, 0, size)
                    content = self._check(index, extent, content, chunk)
            if closed is not None and followed is not None:
                self._cache.mark_read(followed, whole[number], closed)
                del held[number]
            yield content

    def _read_alone(self, index: int, extent: Extent) -> memoryview:
        self._counts["misses"] += 1
        content = self._source.read(extent.chunk, extent.offset, extent.stored)
        if xxh3_64_intdigest(content) == extent.checksum:
            return content
        return self._check(index, extent, content, None)

    def _is_pinned(self, number: int) -> bool:
        return self._reads.can_pin and self._reads.can_pin_nowait(self._source.name(number))

    def _extent(self, index: int, extent: Extent) -> memoryview:
        content = self._in_memory(extent)
        if content is not None:
            self._counts["hits"] += 1
            return content
        self._counts["misses"] += 1
        if self._worth_whole(index, extent):
            self._read_on(index, extent)
            chunk = self._cache.get(extent.chunk)
            # Of a large file, reading ahead would bring back chunks that were passed
            is_part = extent.size < self.snapshot.size(index)
            if self._everything_fits and not (is_part and chunk.is_passing):
                self._read_ahead(extent.chunk)
            raw = chunk.view[extent.offset : extent.offset + extent.stored]
            if extent.codec == Codec.RAW and extent.offset in chunk.checked:
                return raw
            return self._check(index, extent, raw, chunk)
        content = self._check(
            index, extent, self._source.read(extent.chunk, extent.offset, extent.stored), None
        )
        with self._single_lock:  # kept, since a reader returns for the rest of a large entry
            self._single = (extent.chunk, extent.offset, content)
        return content

    def _read_ahead(self, number: int) -> None:
        """Load the next chunks as well, twice as many after each miss."""
        sizes = self.snapshot.chunk_sizes
        self._ahead_chunks = ahead = min(2 * self._ahead_chunks, _PREFETCH_CHUNKS, len(sizes))
        following = ((number + step) % len(sizes) for step in range(1, ahead + 1))
        self._cache.prefetch_what_fits({each: int(sizes[each]) for each in following})

    def _read_on(self, index: int, extent: Extent) -> None:
        """If a file of several extents is read sequentially, load the chunks of its next extents
        ahead."""
        end = extent.start + extent.size
        expected = self._next_extents.pop(index, 0)
        if end == self.snapshot.size(index) or self._cache.order is not None:
            return
        if len(self._next_extents) >= _LARGE_FILES_MAX:
            self._next_extents.clear()
        self._next_extents[index] = end
        if extent.start == expected:
            ahead_bytes = min(_READ_ON_BYTES, self._cache.budget_bytes // 4)
            for following in self.snapshot.extents(index, end, end + ahead_bytes):
                self._cache.prefetch(following.chunk)

    def _note_passed(self, extent: Extent, end: int) -> None:
        """A reader of a file of several extents has come to `end`. If that is the extent's end, and
        the chunk was loaded for a caller that keeps the contents itself, drop the chunk that was
        passed before: the kernel reads the end of a chunk in any order, and some of it twice."""
        chunk = self._cache.loaded(extent.chunk)
        if chunk is not None and chunk.is_passing and end >= extent.start + extent.size:
            before, self._passed = self._passed, extent.chunk
            if before not in (-1, extent.chunk):
                self._cache.drop(before)

    def _in_memory(self, extent: Extent) -> memoryview | None:
        """The content if it is in memory and costs little to check."""
        chunk = self._cache.peek(extent.chunk)
        if chunk is None:
            number, offset, content = self._single
            return content if (number, offset) == (extent.chunk, extent.offset) else None
        raw = chunk.view[extent.offset : extent.offset + extent.stored]
        if extent.codec == Codec.RAW and extent.offset in chunk.checked:
            return raw
        if (decoded := chunk.decoded.get(extent.offset)) is not None:
            return decoded
        if extent.size > CHECKED_AT_ONCE_BYTES:
            return None
        try:
            content = _decoded(raw, extent)
        except CorruptError:
            return None  # the entry must be read again, which takes long
        self._keep(extent, content, chunk)
        return content

    def _read_entry_now(self, extent: Extent) -> memoryview | None:
        """A small entry, without its chunk; None if the entry is large or the read would wait."""
        if extent.size > CHECKED_AT_ONCE_BYTES or extent.stored > CHECKED_AT_ONCE_BYTES:
            return None
        room = new_buffer(extent.stored)
        if not self._reads.read_nowait(self._source.name(extent.chunk), extent.offset, room):
            return None
        try:
            content = _decoded(room.toreadonly(), extent)
        except CorruptError:
            return None  # it must be read again, which takes long
        self._counts["reads_on_the_spot"] += 1
        self._counts["fetched_bytes"] += extent.stored
        return content

    def _worth_whole(self, index: int, extent: Extent) -> bool:
        """Whether a miss should load the whole chunk. For a file of the followed order, the order
        decides. Another entry that begins at the end of the last miss shows a sequential reader."""
        followed = self._cache.order
        if followed is not None and followed.holds(index):
            visit = followed.visit_of(index)
            return visit >= 0 and followed.chunk(visit) == extent.chunk
        chunk, end = self._last_miss
        self._last_miss = (extent.chunk, extent.offset + extent.stored)
        return (
            self._everything_fits
            or self._cache.peek(extent.chunk) is not None
            or self._is_pinned(extent.chunk)
            or extent.stored * WHOLE_CHUNK_FRACTION >= int(self.snapshot.chunk_sizes[extent.chunk])
            or (not self._prefers_entries and (chunk, end) == (extent.chunk, extent.offset))
        )

    def _check(
        self, index: int, extent: Extent, raw: memoryview, chunk: LoadedChunk | None
    ) -> memoryview:
        """Check and decode the stored bytes `raw` of an extent. After a mismatch they are read
        again, once. `chunk`: the chunk in memory that `raw` is part of."""
        try:
            content = _decoded(raw, extent)
        except CorruptError:
            raw, content = self._source.repair(index, extent)
            if chunk is not None:
                chunk.patch(extent.offset, raw)
        if chunk is not None:
            self._keep(extent, content, chunk)
        return content

    def _check_alone(self, index: int, extent: Extent, raw: memoryview) -> memoryview:
        return self._check(index, extent, raw, None)

    def _keep(self, extent: Extent, content: memoryview, chunk: LoadedChunk) -> None:
        if self._cache.order is not None and extent.codec != Codec.RAW:
            return  # a reader that follows an order reads each entry once
        if extent.codec != Codec.RAW and extent.offset not in chunk.decoded:
            chunk.decoded[extent.offset] = content
            self._cache.charge(chunk, len(content))
        chunk.checked.add(extent.offset)

    def _load_chunk(self, number: int) -> LoadedChunk:
        size = int(self.snapshot.chunk_sizes[number])
        on_revoke = partial(_revoke, weakref.ref(self._cache), number)
        found = self._reads.pin(self._source.name(number), on_revoke)
        if found is not None:
            self._counts["pinned_chunks"] += found.is_shared
            return LoadedChunk(found.content[:size], found.is_shared, is_checked=True)
        view = new_buffer(size)
        try:
            self._objects.read_into(self._source.name(number), 0, view)
        except ObjectMissing as error:
            raise self._source.lost_chunk_error(number, error) from error
        self._counts["chunk_fetches"] += 1
        self._counts["fetched_bytes"] += size
        try:
            self._check_preamble(number, view)
        except ForeignError:  # another chunk, or damaged on its way: read it past all caches
            self._reads.read_uncached(self._source.name(number), 0, view[:PREAMBLE_BYTES])
            self._check_preamble(number, view)
        self._single_bytes_max = 0  # the next file may be in this chunk
        return LoadedChunk(view)

    def _check_preamble(self, number: int, chunk: memoryview) -> None:
        """Raises ForeignError if these bytes are another chunk, or no chunk."""
        try:
            parse_preamble(
                chunk, identity=self.snapshot.identity, id=self.snapshot.chunk_ids[number],
                object_bytes=len(chunk),
            )  # fmt: skip
        except ForeignError:
            raise
        except CorruptError:
            self._counts["damaged_preambles"] += 1  # the entries have their own checksums


def _decoded(stored: memoryview, extent: Extent) -> memoryview:
    """Reports its time to the observer of waits. Raises CorruptError."""
    observer = current_observer()
    if observer is None:
        return decode(stored, extent.codec, extent.size, extent.checksum)
    observer.enter(WaitCause.DECOMPRESSION)
    try:
        return decode(stored, extent.codec, extent.size, extent.checksum)
    finally:
        observer.leave(WaitCause.DECOMPRESSION)


def _revoke(cache: "weakref.ref[ChunkCache]", number: int) -> None:
    found = cache()
    if found is not None:
        found.revoke(number)


_COUNTS = {name: name for name in (
    "hits", "misses", "chunk_fetches", "pinned_chunks", "fetches", "reads_on_the_spot",
    "fetched_bytes", "healed", "damaged", "damaged_preambles",
)} | {"fetches": "range_fetches"}  # fmt: skip
