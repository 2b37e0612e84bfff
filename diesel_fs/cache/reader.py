"""The contents of entries, checked: the one way in which bytes of a dataset reach a reader.

Owned here: when a whole chunk is read and when only an entry, and that every byte is checked
against its checksum when it enters this process's memory (a mismatch is read again once). Not
owned: the memory (`chunk_cache.py`), the meaning of entries (`snapshot.py`). Thread-safe,
fork-safe.
"""

import io
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from ..errors import (
    CorruptError,
    DieselError,
    ForeignError,
    NoSpaceError,
    ObjectMissing,
    UsageError,
)
from ..format.chunk import PREAMBLE_BYTES, decode, parse_preamble
from ..format.chunk_id import chunk_id_text
from ..format.entries import Codec, Kind
from ..format.object_names import chunk_object
from ..format.snapshot import layout as layout
from ..format.snapshot.reader import Extent, Snapshot
from ..names import shown
from ..storage.objects.store import ObjectStore, Part
from .chunk_cache import PINNED_COST_DIVISOR, ChunkCache, LoadedChunk
from .order_prefetch import WHOLE_CHUNK_FRACTION, OrderPrefetch

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

WINDOW_ENTRIES = 4096
"""How far `read_many` looks ahead, or less far, so that the chunks it holds fit the budget."""

CHECKED_AT_ONCE_BYTES = 256 << 10
"""`read_nowait` checks, and decodes, entries up to this size: 0.03 ms, with lz4 up to 0.2 ms, where
a thread that is handed the read costs 0.3 ms."""

BATCH_BYTES_MAX = 8 << 20
BATCH_ENTRIES_MAX = 512
"""Files that are asked for in one request, where the store takes many: a request costs what some
hundred kilobytes do, and the first file is not to wait for more than a few milliseconds."""

_PREFETCH_CHUNKS = 16
_EMPTY = memoryview(b"")

_Column = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Window:
    """Files that `read_many` returns next, and the chunks to read whole for them.

    `chunks` has -1 for a file that is not one uncompressed extent; `whole` is in order of first
    use. Where an order is followed, all are of one of its groups, the values of `whole` are uses,
    and `closing` has by position, for the last file of a chunk, all of the chunk's.
    """

    wanted: _Column
    chunks: _Column
    whole: dict[int, int]
    followed: OrderPrefetch | None = None
    closing: dict[int, _Column] = field(default_factory=dict)


class _Batch(NamedTuple):
    """Files that are read together: those at `places` from `parts`, which may be under way."""

    rows: _Column
    places: _Column
    parts: Iterator[memoryview]


class EntryReader:
    """Reads entries of one snapshot from one object store, through at most `memory_bytes`."""

    def __init__(
        self,
        snapshot: Snapshot,
        objects: ObjectStore,
        memory_bytes: int,
        *,
        prefer_entries: bool = False,
    ) -> None:
        """`prefer_entries`: of a dataset that does not fit the memory, small entries are read
        alone, if possible on the spot: somebody else keeps what lies near them.
        """
        self.snapshot = snapshot
        self._objects = objects
        self._cache = ChunkCache(memory_bytes, self._load_chunk)
        self._everything_fits = int(snapshot.chunk_sizes.sum()) <= memory_bytes
        self._prefers_entries = prefer_entries and not self._everything_fits
        self._names: dict[int, str] = {}  # of chunks' objects: making one takes 10 us
        self._ahead_chunks = 1
        self._counts: Counter[str] = Counter()
        self._last_miss = (-1, -1)  # chunk, end of the entry: tells a sequential reader
        self._single: tuple[int, int, memoryview] = (-1, -1, _EMPTY)
        self._single_lock = threading.Lock()

    def read(self, index: int, offset: int = 0, size: int | None = None) -> memoryview:
        """`size` bytes of the file `index` from `offset` on (None: all), fewer only at its end.

        Raises DieselError: CorruptError where the bytes are damaged, ObjectMissing for a lost
        chunk, ObjectStoreError where the store cannot be had.
        """
        extents = self.snapshot.extents(index)
        total = self.snapshot.stat(index).size
        end = total if size is None else min(offset + size, total)
        if offset >= end:
            return _EMPTY
        followed, use = self._cache.order, -1
        if followed is not None and (use := followed.visit_of(index)) >= 0:
            self._cache.advance(followed, use, index)
        pieces = []
        for extent in extents:
            if extent.start < end and offset < extent.start + extent.size:
                content = self._extent(index, extent)
                pieces.append(content[max(offset - extent.start, 0) : end - extent.start])
        if followed is not None and use >= 0 and end == total:
            self._cache.mark_read(followed, use, np.array([index]))
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))

    def read_nowait(self, index: int, offset: int, size: int) -> memoryview | None:
        """As `read`, where that needs nothing but memory; else None. Never blocks.

        A small entry whose chunk is here is checked on the spot.
        """
        extents = self.snapshot.extents(index)
        if len(extents) == 1:
            content = self._in_memory(extents[0])
            if content is None and self._prefers_entries:
                content = self._read_entry_now(extents[0])
            return None if content is None else content[offset : offset + size]
        end = min(offset + size, extents[-1].start + extents[-1].size) if extents else 0
        for extent in extents:
            if extent.start <= offset and end <= extent.start + extent.size:
                content = self._in_memory(extent)
                return (
                    content
                    if content is None
                    else content[offset - extent.start : end - extent.start]
                )
        return _EMPTY if offset >= end else None

    def read_many(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> Iterator[memoryview]:
        """The whole contents of the files `indices`, in this order, chunks fetched ahead.

        Raises as `read`; folders and links have empty contents.
        """
        wanted = np.asarray(indices, np.int64)
        start, entries = 0, WINDOW_ENTRIES
        while start < len(wanted):
            window = self._next_window(wanted[start : start + entries])
            start += len(window.wanted)
            entries = min(2 * len(window.wanted), WINDOW_ENTRIES)
            yield from self._read_window(window)

    def prefetch_order(self, order: _Column, ends: _Column, *, grow: bool = False) -> None:
        """Be told that reads will come in this order, whose groups end at the positions `ends`.

        From then on whoever reads in it loads each chunk once a group, and the chunks of two groups
        are in memory at most; other reads go on as they did. Where all chunks of the dataset fit
        the memory, they stay in it, and nothing changes. Raises UsageError where those of one group
        do not fit; with `grow`, the memory grows to what two groups need.
        """
        total_bytes = int(self.snapshot.chunk_sizes.sum())
        if total_bytes <= self._cache.budget_bytes:
            return
        followed = OrderPrefetch(self.snapshot, order, ends)
        if grow:
            needed = min(followed.two_groups_bytes_max, total_bytes)
            self._cache.budget_bytes = max(self._cache.budget_bytes, needed)
            self._everything_fits = total_bytes <= self._cache.budget_bytes
        if followed.group_bytes_max > self._cache.budget_bytes:
            raise UsageError(
                f"a group of this order has {followed.group_bytes_max:,} bytes of chunks, and the"
                f" memory is {self._cache.budget_bytes:,}",
                advice="shuffle with a smaller group_size, or open the dataset with a memory_bytes"
                f" of {followed.two_groups_bytes_max:,}, for two groups",
            )
        if not self._everything_fits:
            self._cache.set_order(followed)

    def stats(self) -> dict[str, int]:
        """Counts since the reader was made, and the memory that it holds, in bytes."""
        counts = {name: self._counts[name] for name in _COUNTS}
        counts["memory_bytes"] = self._cache.held_bytes
        counts["memory_budget_bytes"] = self._cache.budget_bytes
        counts["evictions"] = self._cache.evictions
        return counts

    def close(self) -> None:
        """Let go of the memory. Views that were handed out stay valid."""
        self._cache.close()
        self._single = (-1, -1, _EMPTY)

    def _next_window(self, wanted: _Column) -> _Window:
        """The first of `wanted`: of one group of the order that is followed, or of no order."""
        followed = self._cache.order
        if followed is None:
            return self._window(wanted)
        groups = followed.groups_of(wanted)
        other = np.flatnonzero(groups != groups[0])
        wanted = wanted[: int(other[0])] if len(other) else wanted
        return self._window(wanted) if groups[0] < 0 else self._followed_window(followed, wanted)

    def _followed_window(self, followed: OrderPrefetch, wanted: _Column) -> _Window:
        chunks, _ = self._plain_chunks(wanted)
        uses = followed.visits_of(wanted)
        chunks[uses < 0] = -1  # too little is wanted of their chunks
        closing = {}
        plain = np.flatnonzero(chunks >= 0)
        by_use = plain[np.argsort(uses[plain], kind="stable")]
        if len(by_use):
            for places in np.split(by_use, np.flatnonzero(np.diff(uses[by_use])) + 1):
                closing[int(places[-1])] = wanted[places]
        whole = dict(zip(chunks[plain].tolist(), uses[plain].tolist(), strict=True))
        return _Window(wanted, chunks, whole, followed, closing)

    def _plain_chunks(self, wanted: _Column) -> tuple[_Column, _Column]:
        """The chunk of each file that is one uncompressed extent, else -1; and its stored bytes."""
        columns = self.snapshot.columns
        flags = columns.flags[wanted]
        stored = columns.stored[wanted].astype(np.int64)
        plain = (
            (layout.kinds(flags) == Kind.FILE) & (flags & layout.MANY_EXTENTS == 0) & (stored > 0)
        )
        plain &= (flags >> layout.CODEC_SHIFT & 0xFF) == Codec.RAW
        return np.where(plain, columns.chunk[wanted].astype(np.int64), -1), stored

    def _window(self, wanted: _Column) -> _Window:
        """The first of `wanted`: at least one, and no more than whose chunks fit the budget."""
        chunks, stored = self._plain_chunks(wanted)
        entries, budget_bytes = len(wanted), self._cache.budget_bytes
        while True:
            whole = self._whole_chunks(chunks[:entries], stored[:entries])
            held_bytes = sum(self._held_bytes(number) for number in whole)
            if held_bytes <= budget_bytes or entries == 1:
                return _Window(wanted[:entries], chunks[:entries], whole)
            entries //= 2

    def _read_window(self, window: _Window) -> Iterator[memoryview]:
        """The contents of a window's files. What is done here for each file is done 200,000 times
        a second, so it repeats, for an uncompressed entry that is right, what `_check` does.
        """
        whole, columns, followed = window.whole, self.snapshot.columns, window.followed
        single = (
            index
            for index, number in zip(window.wanted.tolist(), window.chunks.tolist(), strict=True)
            if number not in whole
        )
        # Compressed files of chunks that are to be in memory are read from there
        joins = self._objects.batches_reads and followed is None and not self._everything_fits
        singles = self._read_together(list(single)) if joins else map(self.read, single)
        # Else the order tells what is ahead, and what is lent is at hand
        ahead = (each for each in (whole if followed is None else ()) if not self._is_pinned(each))
        for number, _ in zip(ahead, range(_PREFETCH_CHUNKS), strict=False):
            self._cache.prefetch(number)
        offsets = columns.offset[window.wanted].astype(np.int64)
        held: dict[int, LoadedChunk] = {}
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
                    yield next(singles)
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

    def _read_together(self, wanted: list[int]) -> Iterator[memoryview]:
        """The contents of files whose chunks are not worth reading whole, in few requests, of which
        one is ahead where the store allows.

        As in `_read_window`, what is done for each file is little.
        """
        groups = self._groups_begun(np.array(wanted, np.int64))
        following = next(groups, None)
        while following is not None:
            group, following = following, next(groups, None)
            yield from self._contents(group)

    def _groups_begun(self, rows: _Column) -> Iterator["_Batch"]:
        """Files that are read together; each group is asked for before the one before is read."""
        columns = self.snapshot.columns
        flags, stored = columns.flags[rows], columns.stored[rows].astype(np.int64)
        bytes_max = min(BATCH_BYTES_MAX, self._cache.budget_bytes // 4)
        alone = (layout.kinds(flags) == Kind.FILE) & (flags & layout.MANY_EXTENTS == 0)
        alone &= (stored > 0) & (stored <= bytes_max)
        ends = np.cumsum(np.where(alone, stored, 0))
        chunks, offsets = (each[rows].astype(np.int64) for each in (columns.chunk, columns.offset))
        start = 0
        while start < len(rows):
            before = int(ends[start - 1]) if start else 0
            end = int(np.searchsorted(ends, before + bytes_max, "right"))
            some = slice(start, max(min(end, start + BATCH_ENTRIES_MAX), start + 1))
            here = [self._cache.peek(number) is not None for number in chunks[some].tolist()]
            places = np.flatnonzero(alone[some] & ~np.array(here))
            at = places + start
            names = map(self._object, chunks[at].tolist())
            parts = list(zip(names, offsets[at].tolist(), stored[at].tolist(), strict=True))
            yield _Batch(rows[some], places, self._start_read(parts))
            start = some.stop

    def _start_read(self, parts: Sequence[Part]) -> Iterator[memoryview]:
        """The stored bytes of parts; of none where it is known already that one cannot be read."""
        try:
            return self._objects.read_parts(parts)
        except DieselError:
            return iter(())

    def _contents(self, group: "_Batch") -> Iterator[memoryview]:
        """Of the files of a group."""
        places, rows = group.places, group.rows
        try:
            stored = list(group.parts)
        except DieselError:
            stored = []
        self._counts["misses"] += len(stored)
        self._counts["range_fetches"] += bool(stored)
        self._counts["fetched_bytes"] += sum(map(len, stored))
        if len(stored) != len(places):  # one cannot be read, and says why when it is asked for
            yield from map(self.read, rows.tolist())
            return
        columns, at = self.snapshot.columns, rows[places]
        digests = np.fromiter(map(xxh3_64_intdigest, stored), np.uint64, len(stored))
        is_right = (columns.flags[at] >> layout.CODEC_SHIFT & 0xFF) == Codec.RAW
        is_right &= digests == columns.checksum[at]
        if len(places) == len(rows) and is_right.all():
            yield from stored
            return
        found = dict(zip(places.tolist(), zip(stored, is_right.tolist(), strict=True), strict=True))
        for place, index in enumerate(rows.tolist()):
            content, right = found.get(place, (None, False))
            if content is None:
                yield self.read(index)
            elif right:
                yield content
            else:  # it is compressed, or damaged
                [extent] = self.snapshot.extents(index)
                yield self._check(index, extent, content, None)

    def _whole_chunks(self, chunks: _Column, stored: _Column) -> dict[int, int]:
        """The chunks worth reading whole for a window, in order of first use."""
        if self._everything_fits:
            whole = dict.fromkeys(chunks.tolist(), -1)
            whole.pop(-1, None)
            return whole
        numbers, first, inverse = np.unique(chunks, return_index=True, return_inverse=True)
        bytes_wanted = np.bincount(inverse, weights=stored, minlength=len(numbers))
        whole = {}
        for position in np.argsort(first).tolist():
            number = int(numbers[position])
            if number >= 0 and (
                bytes_wanted[position] * WHOLE_CHUNK_FRACTION
                >= int(self.snapshot.chunk_sizes[number])
                or self._cache.peek(number) is not None
                or self._is_pinned(number)
            ):
                whole[number] = -1
        return whole

    def _is_pinned(self, number: int) -> bool:
        """Whether a whole chunk is to be had for nothing."""
        return self._objects.can_pin and self._objects.can_pin_nowait(self._object(number))

    def _held_bytes(self, number: int) -> int:
        """What a whole chunk takes of the budget."""
        return int(self.snapshot.chunk_sizes[number]) // (
            PINNED_COST_DIVISOR if self._is_pinned(number) else 1
        )

    def _extent(self, index: int, extent: Extent) -> memoryview:
        """The content of one extent, from memory or from the store."""
        content = self._in_memory(extent)
        if content is not None:
            self._counts["hits"] += 1
            return content
        self._counts["misses"] += 1
        if self._worth_whole(index, extent):
            chunk = self._cache.get(extent.chunk)
            if self._everything_fits:
                self._read_ahead(extent.chunk)
            raw = chunk.view[extent.offset : extent.offset + extent.stored]
            return self._check(index, extent, raw, chunk)
        content = self._check(index, extent, self._fetch(extent), None)
        with self._single_lock:  # readers come back for the rest of a large entry
            self._single = (extent.chunk, extent.offset, content)
        return content

    def _read_ahead(self, number: int) -> None:
        """After a miss: load the next chunks as well, each time twice as many."""
        sizes = self.snapshot.chunk_sizes
        self._ahead_chunks = ahead = min(2 * self._ahead_chunks, _PREFETCH_CHUNKS, len(sizes))
        following = ((number + step) % len(sizes) for step in range(1, ahead + 1))
        self._cache.prefetch_what_fits({each: int(sizes[each]) for each in following})

    def _in_memory(self, extent: Extent) -> memoryview | None:
        """The content where nothing needs to be read for it, nor much checked."""
        chunk = self._cache.peek(extent.chunk)
        if chunk is None:
            number, offset, content = self._single
            return content if (number, offset) == (extent.chunk, extent.offset) else None
        raw = chunk.view[extent.offset : extent.offset + extent.stored]
        if extent.offset in chunk.checked:
            return raw if extent.codec == Codec.RAW else chunk.decoded.get(extent.offset)
        if extent.size > CHECKED_AT_ONCE_BYTES:
            return None
        try:
            content = decode(raw, extent.codec, extent.size, extent.checksum)
        except CorruptError:
            return None  # to be read again, which takes its time
        self._keep(extent, content, chunk)
        return content

    def _read_entry_now(self, extent: Extent) -> memoryview | None:
        """A small entry alone, where the store has it at hand."""
        if extent.size > CHECKED_AT_ONCE_BYTES or extent.stored > CHECKED_AT_ONCE_BYTES:
            return None
        room = _new_buffer(extent.stored)
        if not self._objects.read_nowait(self._object(extent.chunk), extent.offset, room):
            return None
        try:
            content = decode(room.toreadonly(), extent.codec, extent.size, extent.checksum)
        except CorruptError:
            return None  # to be read again, which takes its time
        self._counts["reads_on_the_spot"] += 1
        self._counts["fetched_bytes"] += extent.stored
        return content

    def _worth_whole(self, index: int, extent: Extent) -> bool:
        """Whether a miss is to load its whole chunk: all fits, much is wanted, or it is read on.

        For a file of the order that is followed, whether that says so.
        """
        followed = self._cache.order
        if followed is not None and followed.holds(index):
            use = followed.visit_of(index)
            return use >= 0 and followed.chunk(use) == extent.chunk
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
        """The decoded content, checked; read again once where it does not match its checksum."""
        try:
            content = decode(raw, extent.codec, extent.size, extent.checksum)
        except CorruptError:
            raw, content = self._second_try(index, extent)
            if chunk is not None:
                chunk.patch(extent.offset, raw)
        if chunk is not None:
            self._keep(extent, content, chunk)
        return content

    def _keep(self, extent: Extent, content: memoryview, chunk: LoadedChunk) -> None:
        """Note that an entry has been checked, and keep what was decoded."""
        if self._cache.order is not None and extent.codec != Codec.RAW:
            return  # who follows an order reads it once
        if extent.codec != Codec.RAW and extent.offset not in chunk.decoded:
            chunk.decoded[extent.offset] = content
            self._cache.charge(chunk, len(content))
        chunk.checked.add(extent.offset)

    def _second_try(self, index: int, extent: Extent) -> tuple[memoryview, memoryview]:
        """The stored bytes and their content, read again from the store."""
        try:
            raw = self._fetch(extent, again=True)
            content = decode(raw, extent.codec, extent.size, extent.checksum)
        except CorruptError as error:
            self._counts["damaged"] += 1
            chunk = chunk_id_text(self.snapshot.chunk_ids[extent.chunk])
            path = shown(self.snapshot.path(index))
            raise CorruptError(
                f"{self.snapshot.dataset}/{path} is damaged in chunk {chunk}: {error.message}",
                offset=extent.offset,
                advice=f"run `dlcmd verify {self.snapshot.dataset}`",
            ) from error
        self._counts["healed"] += 1
        return raw, content

    def _fetch(self, extent: Extent, *, again: bool = False) -> memoryview:
        """One extent's stored bytes from the store."""
        buffer = _new_buffer(extent.stored)
        read = self._objects.read_uncached if again else self._objects.read_into
        try:
            read(self._object(extent.chunk), extent.offset, buffer)
        except ObjectMissing as error:
            raise self._lost(extent.chunk, error) from error
        self._counts["range_fetches"] += 1
        self._counts["fetched_bytes"] += extent.stored
        return buffer.toreadonly()

    def _load_chunk(self, number: int) -> LoadedChunk:
        """A whole chunk, lent or from the store; its entries are still to be checked."""
        size = int(self.snapshot.chunk_sizes[number])
        let_go = partial(_revoke, weakref.ref(self._cache), number)
        lent = self._objects.pin(self._object(number), let_go)
        if lent is not None:
            self._counts["lent_chunks"] += 1
            view = lent[:size]
        else:
            view = _new_buffer(size)
            try:
                self._objects.read_into(self._object(number), 0, view)
            except ObjectMissing as error:
                raise self._lost(number, error) from error
            self._counts["chunk_fetches"] += 1
            self._counts["fetched_bytes"] += size
        try:
            self._check_preamble(number, view)
        except ForeignError:  # or damaged on its way
            self._objects.read_uncached(self._object(number), 0, view[:PREAMBLE_BYTES])
            self._check_preamble(number, view)
        return LoadedChunk(view, lent is not None)

    def _lost(self, number: int, error: ObjectMissing) -> ObjectMissing:
        """What is said of a chunk that the store does not have."""
        dataset = self.snapshot.dataset
        return ObjectMissing(
            f"chunk {chunk_id_text(self.snapshot.chunk_ids[number])} of {dataset!r} is lost:"
            f" {error.message}",
            advice=f"`dlcmd verify {dataset}` names the files in it; put them again to heal them",
        )

    def _check_preamble(self, number: int, chunk: memoryview) -> None:
        """Raises ForeignError for what is another chunk, or none."""
        try:
            parse_preamble(
                chunk, identity=self.snapshot.identity, id=self.snapshot.chunk_ids[number],
                object_bytes=len(chunk),
            )  # fmt: skip
        except ForeignError:
            raise
        except CorruptError:
            self._counts["damaged_preambles"] += 1  # the entries have their own checksums

    def _object(self, number: int) -> str:
        name = self._names.get(number)
        if name is None:
            name = chunk_object(self.snapshot.identity, self.snapshot.chunk_ids[number])
            self._names[number] = name
        return name


class EntryFile(io.RawIOBase):
    """The content of one file as a stream, for whoever wants `read(n)`. Raises as `read` does."""

    def __init__(self, reader: EntryReader, index: int) -> None:
        super().__init__()
        self._reader = reader
        self._index = index
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        room = memoryview(buffer).cast("B")
        content = self._reader.read(self._index, self._at, len(room))
        room[: len(content)] = content
        self._at += len(content)
        return len(content)


def _revoke(cache: "weakref.ref[ChunkCache]", number: int) -> None:
    found = cache()
    if found is not None:
        found.revoke(number)


def _new_buffer(size: int) -> memoryview:
    """Memory to read into. A bytearray would be filled with zeros first, while all threads wait.
    Raises NoSpaceError."""
    try:
        return np.empty(size, np.uint8).data
    except MemoryError:
        raise NoSpaceError(f"there is no memory for {size:,} bytes of a chunk") from None


_COUNTS = (
    "hits",
    "misses",
    "chunk_fetches",
    "lent_chunks",
    "range_fetches",
    "reads_on_the_spot",
    "fetched_bytes",
    "healed",
    "damaged",
    "damaged_preambles",
)
