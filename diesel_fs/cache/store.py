"""The contents of entries, checked: the one way in which bytes of a dataset reach a reader.

Owned here: when a whole chunk is read and when only an entry, and that every byte is checked
against its checksum when it enters this process's memory (a mismatch is read again once). Not
owned: the memory (`chunks.py`), the meaning of entries (`snapshot.py`). Thread-safe, fork-safe.
"""

import io
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .. import snapshot_layout as layout
from ..chunk import decode, parse_preamble
from ..chunk_id import chunk_id_text
from ..entries import Codec, Kind, shown
from ..errors import CorruptError, ForeignError
from ..layout import chunk_object
from ..snapshot import Extent, Snapshot
from ..storage.objects import ObjectStore
from .chunks import ChunkCache, LoadedChunk

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

WHOLE_CHUNK_FRACTION = 8
"""A chunk is read whole where at least one part in this many of it is wanted at once: reading
4 MiB in one piece costs about as much as 100 single reads (measured on a local disk)."""

WINDOW_ENTRIES = 4096
"""How far `read_many` looks ahead; its memory beside the cache is this many entries' bytes."""

_PREFETCH_CHUNKS = 16
_EMPTY = memoryview(b"")


class ContentReader:
    """Reads entries of one snapshot from one object store, through at most `memory_bytes`."""

    def __init__(self, snapshot: Snapshot, objects: ObjectStore, memory_bytes: int) -> None:
        self.snapshot = snapshot
        self._objects = objects
        self._cache = ChunkCache(memory_bytes, self._load_chunk)
        self._everything_fits = int(snapshot.chunk_sizes.sum()) <= memory_bytes
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
        pieces = []
        for extent in extents:
            if extent.start < end and offset < extent.start + extent.size:
                content = self._extent(index, extent)
                pieces.append(content[max(offset - extent.start, 0) : end - extent.start])
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))

    def cached(self, index: int, offset: int, size: int) -> memoryview | None:
        """As `read`, where that needs nothing but memory; else None. Never blocks.

        A small entry whose chunk is here is checked on the spot: that takes less time than handing
        the read to a thread.
        """
        end = min(offset + size, self.snapshot.stat(index).size)
        for extent in self.snapshot.extents(index):
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
        for start in range(0, len(wanted), WINDOW_ENTRIES):
            yield from self._read_window(wanted[start : start + WINDOW_ENTRIES])

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

    def _read_window(self, wanted: npt.NDArray[np.int64]) -> Iterator[memoryview]:
        columns = self.snapshot.columns
        flags = columns.flags[wanted]
        plain = (layout.kinds(flags) == Kind.FILE) & (flags & layout.MANY == 0)
        plain &= (flags >> layout.CODEC_SHIFT & 0xFF) == Codec.RAW
        chunks = np.where(plain, columns.chunk[wanted].astype(np.int64), -1)
        stored = np.where(plain, columns.stored[wanted], 0).astype(np.int64)
        whole = self._whole_chunks(chunks, stored)
        ahead = iter(whole)
        for number, _ in zip(ahead, range(_PREFETCH_CHUNKS), strict=False):
            self._cache.prefetch(number)
        held: dict[int, LoadedChunk] = {}
        for index, number, offset, size, checksum in zip(
            wanted.tolist(),
            chunks.tolist(),
            columns.offset[wanted].tolist(),
            stored.tolist(),
            columns.checksum[wanted].tolist(),
            strict=True,
        ):
            chunk = held.get(number)
            if chunk is None:
                if number not in whole or not size:
                    yield self.read(index)
                    continue
                chunk = held[number] = self._cache.get(number)
                for following in ahead:
                    self._cache.prefetch(following)
                    break
            content = chunk.view[offset : offset + size]
            if offset not in chunk.checked:
                extent = Extent(number, offset, size, Codec.RAW, checksum, 0, size)
                content = self._check(index, extent, content, chunk)
            yield content

    def _whole_chunks(
        self, chunks: npt.NDArray[np.int64], stored: npt.NDArray[np.int64]
    ) -> dict[int, None]:
        """The chunks worth reading whole for a window, in order of first use."""
        numbers, first, inverse = np.unique(chunks, return_index=True, return_inverse=True)
        bytes_wanted = np.bincount(inverse, weights=stored, minlength=len(numbers))
        whole: dict[int, None] = {}
        for position in np.argsort(first).tolist():
            number = int(numbers[position])
            if number >= 0 and (
                self._everything_fits
                or bytes_wanted[position] * WHOLE_CHUNK_FRACTION
                >= int(self.snapshot.chunk_sizes[number])
                or self._cache.peek(number) is not None
            ):
                whole[number] = None
        return whole

    def _extent(self, index: int, extent: Extent) -> memoryview:
        """The content of one extent, from memory or from the store."""
        content = self._in_memory(extent)
        if content is not None:
            self._counts["hits"] += 1
            return content
        self._counts["misses"] += 1
        if self._worth_whole(extent):
            chunk = self._cache.get(extent.chunk)
            raw = chunk.view[extent.offset : extent.offset + extent.stored]
            return self._check(index, extent, raw, chunk)
        content = self._check(index, extent, self._fetch(extent), None)
        with self._single_lock:  # readers come back for the rest of a large entry
            self._single = (extent.chunk, extent.offset, content)
        return content

    def _in_memory(self, extent: Extent) -> memoryview | None:
        chunk = self._cache.peek(extent.chunk)
        if chunk is None:
            number, offset, content = self._single
            return content if (number, offset) == (extent.chunk, extent.offset) else None
        if extent.offset not in chunk.checked:
            return None
        if extent.codec == Codec.RAW:
            return chunk.view[extent.offset : extent.offset + extent.stored]
        return chunk.decoded.get(extent.offset)

    def _worth_whole(self, extent: Extent) -> bool:
        """Whether a miss is to load its whole chunk: all fits, much is wanted, or it is read on."""
        chunk, end = self._last_miss
        self._last_miss = (extent.chunk, extent.offset + extent.stored)
        return (
            self._everything_fits
            or self._cache.peek(extent.chunk) is not None
            or extent.stored * WHOLE_CHUNK_FRACTION >= int(self.snapshot.chunk_sizes[extent.chunk])
            or (chunk, end) == (extent.chunk, extent.offset)
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
            if extent.codec != Codec.RAW and extent.offset not in chunk.decoded:
                chunk.decoded[extent.offset] = content
                self._cache.charge(chunk, len(content))
            chunk.checked.add(extent.offset)
        return content

    def _second_try(self, index: int, extent: Extent) -> tuple[memoryview, memoryview]:
        """The stored bytes and their content, read again from the store."""
        try:
            raw = self._fetch(extent)
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

    def _fetch(self, extent: Extent) -> memoryview:
        """One extent's stored bytes from the store."""
        buffer = bytearray(extent.stored)
        self._objects.read_into(self._object(extent.chunk), extent.offset, buffer)
        self._counts["range_fetches"] += 1
        self._counts["fetched_bytes"] += extent.stored
        return memoryview(buffer).toreadonly()

    def _load_chunk(self, number: int) -> LoadedChunk:
        """A whole chunk from the store; its entries are still to be checked."""
        size = int(self.snapshot.chunk_sizes[number])
        view = memoryview(bytearray(size))
        self._objects.read_into(self._object(number), 0, view)
        self._counts["chunk_fetches"] += 1
        self._counts["fetched_bytes"] += size
        try:
            parse_preamble(
                view, identity=self.snapshot.identity, id=self.snapshot.chunk_ids[number],
                object_bytes=size,
            )  # fmt: skip
        except ForeignError:
            raise
        except CorruptError:
            self._counts["damaged_preambles"] += 1  # the entries have their own checksums
        return LoadedChunk(view)

    def _object(self, number: int) -> str:
        return chunk_object(self.snapshot.identity, self.snapshot.chunk_ids[number])


class ContentFile(io.RawIOBase):
    """The content of one file as a stream, for whoever wants `read(n)`. Raises as `read` does."""

    def __init__(self, reader: ContentReader, index: int) -> None:
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


_COUNTS = (
    "hits",
    "misses",
    "chunk_fetches",
    "range_fetches",
    "fetched_bytes",
    "healed",
    "damaged",
    "damaged_preambles",
)
