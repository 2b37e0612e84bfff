"""The digest of all rows of a version, which follows a change without the other rows (FORMAT.md,
section 7, "Rows digest"). Any thread.

It is a sum of hashes, so `build_snapshot` and the writer of a delta subtract the rows that go and
add those that come. `digest_of_columns` computes it from a whole snapshot.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from ..entries import EXTENT, MODE_MASK, Kind, Rows
from . import layout as layout
from .entry_digest import Column, Hashes, mixed

_BLOCK = 1 << 18  # entries per step

_Indices = npt.NDArray[np.int64]


class _Entries(NamedTuple):
    """n rows as columns, as in `SnapshotColumns`; `path` has the hashes of their paths."""

    path: Hashes
    flags: layout.U4
    size: Column
    mtime_ns: Column
    checksum: Column
    chunk: Column
    offset: Column
    stored: Column


def _digest(
    entries: _Entries, ids: Hashes, many: _Indices, many_sums: tuple[Hashes, Hashes]
) -> layout.RowsDigest:
    """`ids` are the words of the chunks' IDs, shape (c, 2). `many` are the positions of files of
    several extents; `many_sums` has their `content` and `places`."""
    path, flags, size, mtime_ns, checksum, chunk, offset, stored = entries
    kind = layout.kinds(flags)
    content, places = np.zeros(len(path), np.uint64), np.zeros(len(path), np.uint64)
    link = kind == Kind.LINK
    content[link] = checksum[link]
    one = np.flatnonzero((kind == Kind.FILE) & (flags & layout.MANY_EXTENTS == 0))
    start = np.zeros(len(one), np.uint64)
    content[one] = mixed(start, size[one], checksum[one])
    low, high = ids[chunk[one]].T if len(one) else (start, start)
    places[one] = mixed(start, low, high, offset[one], stored[one], layout.codecs(flags[one]))
    content[many], places[many] = many_sums
    attributes = flags & np.uint32(MODE_MASK | 3 << layout.KIND_SHIFT)
    seen = mixed(path, attributes, size, mtime_ns, content)
    return layout.RowsDigest(int(seen.sum()), int(mixed(path, places).sum()))


def _sums_of_extents(
    extents: npt.NDArray[np.void], ids: Hashes, counts: _Indices
) -> tuple[Hashes, Hashes]:
    """`content` and `places` of files, which have `counts` of the extents each. `ids` are the words
    of each extent's chunk."""
    columns = [extents[name] for name in ("start", "size", "checksum", "offset", "stored", "codec")]
    start, size, checksum, *place = columns
    first = np.cumsum(counts) - counts
    content = mixed(start, size, checksum)
    places = mixed(start, ids[:, 0], ids[:, 1], *place)
    if not len(counts):
        return content, places
    return np.add.reduceat(content, first), np.add.reduceat(places, first)


def _words(ids: "bytes | memoryview") -> Hashes:
    return np.frombuffer(ids, "<u8").reshape(-1, 2)


def digest_of_rows(rows: Rows, path: Hashes) -> layout.RowsDigest:
    """The digest of rows; tombstones count for nothing. `path` has the hash of each row's
    path."""
    total = layout.NO_ROWS
    ids = _words(b"".join(rows.chunks))
    for first in range(0, len(rows), _BLOCK):
        some = np.arange(first, min(first + _BLOCK, len(rows)))
        some = some[rows.records["kind"][some] != Kind.TOMBSTONE]
        records = rows.records[some]
        kind = records["kind"].astype(np.uint32)
        is_file = kind == Kind.FILE
        flags = records["mode"].astype(np.uint32) & np.uint32(MODE_MASK)
        flags |= kind << np.uint32(layout.KIND_SHIFT)
        flags |= records["codec"].astype(np.uint32) << np.uint32(layout.CODEC_SHIFT)
        many = np.flatnonzero(is_file & (records["extents"] > 1))
        flags[many] |= np.uint32(layout.MANY_EXTENTS)
        size = np.where(is_file, records["size"], 0)
        links = np.flatnonzero(kind == Kind.LINK)
        size[links] = [len(rows.tails[i]) for i in some[links].tolist()]
        extents = np.frombuffer(b"".join(rows.tails[i] for i in some[many].tolist()), EXTENT)
        of_extents = np.ascontiguousarray(extents["chunk"]).view("<u8").reshape(-1, 2)
        counts = records["extents"][many].astype(np.int64)
        entries = _Entries(
            *(path[some], flags, size, records["mtime_ns"], records["checksum"]),
            *(rows.chunk[some], records["offset"], records["stored"]),
        )
        sums = _sums_of_extents(extents, of_extents, counts)
        total = total.plus(_digest(entries, ids, many, sums))
    return total


def digest_of_entries(
    columns: layout.SnapshotColumns, at: _Indices, path: Hashes
) -> layout.RowsDigest:
    """The digest of entries of a snapshot; implicit folders count for nothing. `at` are indices of
    entries, or n + j for the j-th shadowed one; `path` has the hashes of their paths."""
    n = len(columns.flags)
    total = layout.NO_ROWS
    ids = _words(columns.chunk_id.tobytes())
    for first in range(0, len(at), _BLOCK):
        some, hashes = at[first : first + _BLOCK], path[first : first + _BLOCK]
        is_shadowed = some >= n
        gathered = {}
        for name in ("flags", "size", "mtime_ns", "checksum", "chunk", "offset", "stored"):
            column = getattr(columns, name)
            values = column[np.where(is_shadowed, 0, some)]
            values[is_shadowed] = columns.shadowed[name][some[is_shadowed] - n]
            gathered[name] = values
        own = gathered["flags"] & np.uint32(layout.IMPLICIT) == 0
        entries = _Entries(hashes[own], **{name: each[own] for name, each in gathered.items()})
        many = np.flatnonzero(entries.flags & layout.MANY_EXTENTS)
        counts = entries.offset[many].astype(np.int64)
        starts = np.cumsum(counts) - counts
        rows = np.repeat(entries.chunk[many] - starts, counts) + np.arange(counts.sum())
        extents = columns.extents[rows]
        sums = _sums_of_extents(extents, ids[extents["chunk"]], counts)
        total = total.plus(_digest(entries, ids, many, sums))
    return total


def digest_of_columns(columns: layout.SnapshotColumns) -> layout.RowsDigest:
    """The digest of a whole snapshot, in about half a second for a million entries."""
    hashes = np.zeros(len(columns.flags), np.uint64)
    for first, last, names in _blocks_of_names(columns):
        seeds = hashes[columns.parent[first:last]].tolist()
        hashes[first:last] = np.fromiter(
            map(xxh3_64_intdigest, names, seeds), np.uint64, last - first
        )
    shadowed = columns.shadowed["entry"].astype(np.int64)
    at = np.arange(len(hashes) + len(shadowed))
    return digest_of_entries(columns, at, np.concatenate([hashes, hashes[shadowed]]))


def _blocks_of_names(
    columns: layout.SnapshotColumns,
) -> Iterator[tuple[int, int, Sequence[bytes]]]:
    """The entries but the root, in runs: first entry, end, and their names. The folders of a run
    lie before it."""
    n, first = len(columns.flags), 1
    while first < n:
        last = min(first + _BLOCK, n)
        inside = int(np.searchsorted(columns.parent[first:last], first))
        last = first + max(inside, 1)
        bounds = (columns.name_start[first : last + 1] - columns.name_start[first]).tolist()
        start = int(columns.name_start[first])
        blob = columns.names[start : start + bounds[-1]].tobytes()
        yield first, last, [blob[a:b] for a, b in pairwise(bounds)]
        first = last
