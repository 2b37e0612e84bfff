"""Reads many small files in few requests, as columns: Python does no work for each file except its
check.

The next request is under way while the contents of the last one are checked. Files that are
damaged, cannot be read or have several extents are left to the functions of `EntryReader`.
Thread-safe: nothing is kept between calls.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from ...errors import DieselError
from ...format.entries import Kind
from ...format.snapshot import layout
from ...format.snapshot.reader import Extent, Snapshot
from ...storage.objects.store import ChunkReader, ReadGroup
from ..fetching.coalesce import BATCH_BYTES_MAX, BATCH_PARTS_MAX

Column = npt.NDArray[np.int64]

EXTENT_BITS, PLAIN_FILE = np.uint32(layout.EXTENT_BITS), np.uint32(layout.PLAIN_FILE)
_SINGLE_EXTENT_BITS = np.uint32(3 << layout.KIND_SHIFT | layout.MANY_EXTENTS)
_SINGLE_EXTENT = np.uint32(Kind.FILE << layout.KIND_SHIFT)  # in these bits; may be compressed

_EMPTY = memoryview(b"")


class _ColumnBatch(NamedTuple):
    """Files, as indices of the snapshot (`rows`). `reading` gives the stored bytes of those at the
    positions `places` (None: all are plain, one uncompressed extent each, and all are read).
    `reading` is None if no file has a single extent with bytes."""

    rows: Column
    places: Column | None
    reading: Iterator[ReadGroup] | None


class ColumnReader:
    def __init__(
        self,
        snapshot: Snapshot,
        chunks: ChunkReader,
        counts: Counter[str],
        read: Callable[[int], memoryview],
        check: Callable[[int, Extent, memoryview], memoryview],
    ) -> None:
        """`read` reads one file, and raises its error. `check` returns the checked, decoded content
        of an entry. Adds to `misses`, `fetches` and `fetched_bytes` in `counts`."""
        self._snapshot = snapshot
        self._parts = chunks
        self._counts = counts
        self._read = read
        self._check = check

    def contents(self, wanted: Column, bytes_max: int) -> Iterator[list[memoryview]]:
        """One list for each request, of at most `bytes_max` stored bytes. One request is under way
        ahead."""
        batches = self._batches(wanted, bytes_max)
        following = next(batches, None)
        while following is not None:
            batch, following = following, next(batches, None)
            yield self._checked_batch(batch)

    def _batches(self, wanted: Column, bytes_max: int) -> Iterator[_ColumnBatch]:
        """A request begins when its batch is yielded."""
        columns = self._snapshot.columns
        bytes_max = min(BATCH_BYTES_MAX, max(bytes_max, 1))
        start = 0
        while start < len(wanted):
            rows = wanted[start : start + BATCH_PARTS_MAX]
            sizes = columns.stored.take(rows)
            if int(sizes.sum(dtype=np.int64)) > bytes_max:
                count = int(np.searchsorted(np.cumsum(sizes, dtype=np.int64), bytes_max, "right"))
                rows, sizes = rows[: max(count, 1)], sizes[: max(count, 1)]
            start += len(rows)
            kinds = columns.flags.take(rows) & EXTENT_BITS
            places: Column | None = None
            at = rows
            if np.count_nonzero(kinds != PLAIN_FILE) or not sizes.all():
                is_single = (kinds & _SINGLE_EXTENT_BITS == _SINGLE_EXTENT) & (sizes > 0)
                places = np.flatnonzero(is_single)
                at, sizes = rows[places], sizes[places]
            parts = np.empty((len(at), 3), np.uint32)
            parts[:, 0] = columns.chunk.take(at)
            parts[:, 1] = columns.offset.take(at)
            parts[:, 2] = sizes
            yield _ColumnBatch(rows, places, self._parts.begin(parts) if len(at) else None)

    def _checked_batch(self, batch: _ColumnBatch) -> list[memoryview]:
        rows, places, reading = batch
        if reading is None:  # no file with content, or only large ones
            return list(map(self._read, rows.tolist()))
        at = rows if places is None else rows[places]
        expected: list[int] = self._snapshot.columns.checksum.take(at).tolist()
        stored: list[memoryview] = [_EMPTY] * len(expected)
        wrong: list[int] = []
        fetched = 0
        try:
            for group in reading:  # a group is checked while the next ones are on their way
                contents = group.contents
                if not group.is_checked:
                    fetched += sum(map(len, contents))
                    digests = list(map(xxh3_64_intdigest, contents))
                    if digests != list(map(expected.__getitem__, group.places)):
                        wrong += [
                            place
                            for place, digest in zip(group.places, digests, strict=True)
                            if digest != expected[place]
                        ]
                for place, content in zip(group.places, contents, strict=True):
                    stored[place] = content
        except DieselError:  # a file cannot be read: `read` raises the error for it
            return list(map(self._read, rows.tolist()))
        counts = self._counts
        counts["misses"] += len(stored)
        counts["fetches"] += fetched > 0
        counts["fetched_bytes"] += fetched
        if places is None and not wrong:
            return stored
        return self._mended_batch(rows, places, stored, wrong)

    def _mended_batch(
        self, rows: Column, places: Column | None, stored: list[memoryview], wrong: list[int]
    ) -> list[memoryview]:
        """The contents of a batch with files that are damaged or not plain. `stored` has the stored
        bytes of the files at `places` (None: of all); those at the positions `wrong` are
        damaged."""
        at = np.arange(len(rows)) if places is None else places
        flags = self._snapshot.columns.flags[rows[at]]
        is_packed = flags & layout.EXTENT_BITS != layout.PLAIN_FILE
        to_decode = {*wrong, *np.flatnonzero(is_packed).tolist()}
        found: dict[int, memoryview] = {}
        for number, (place, content) in enumerate(zip(at.tolist(), stored, strict=True)):
            found[place] = content
            if number in to_decode:  # it is compressed, or damaged
                index = int(rows[place])
                [extent] = self._snapshot.extents(index)
                found[place] = self._check(index, extent, content)
        return [
            found[place] if place in found else self._read(index)
            for place, index in enumerate(rows.tolist())
        ]
