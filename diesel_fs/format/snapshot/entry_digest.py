"""Checks a new snapshot's data about a chunk's files against the chunk's own header (FORMAT.md,
section 5, "Order of writing"). Any thread.

Between header and snapshot, the data passes through the metadata store, the merge of snapshots and
the memory of this process, none of which has checksums of single entries. So a writer that commits
a chunk computes its **entry digest** from the header: the number of its file contents, and the sum
of a hash of each one's attributes, without paths. If a snapshot has fewer of a chunk's contents,
the others have been replaced since, and the chunk is not compared.
"""

from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import CorruptError
from ..chunk_id import chunk_id_text
from ..entries import EXTENT, MODE_MASK, ChunkId, Kind, Rows
from .layout import CODEC_SHIFT, MANY_EXTENTS, SnapshotColumns, kinds

Hashes = npt.NDArray[np.uint64]
Column = npt.NDArray[np.uint64] | npt.NDArray[np.int64] | npt.NDArray[np.uint32]

# Odd numbers with many bits set, from xxHash and the like
_FACTORS = (
    *(0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9),
    *(0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5, 0xFF51AFD7ED558CCD),
)
_LAST_FACTOR = np.uint64(0xC4CEB9FE1A85EC53)
_BLOCK_ENTRIES = 1 << 20
_HASHED = ("size", "mtime_ns", "checksum", "offset", "stored", "flags")  # columns of a file's hash


class EntryDigest(NamedTuple):
    """The number of a chunk's file contents, and the sum (mod 2^64) of their hashes."""

    entry_count: int
    digest: int


def entry_digest(rows: Rows) -> EntryDigest:
    """For one chunk's rows (`ChunkHeader.rows`)."""
    records = rows.records
    files = records["kind"] == Kind.FILE
    whole = records[files & (records["extents"] == 1)]
    codec = whole["codec"].astype(np.uint32) << np.uint32(CODEC_SHIFT)
    hashes = mixed(
        *(whole["size"], whole["mtime_ns"], whole["checksum"], whole["offset"], whole["stored"]),
        (whole["mode"] & MODE_MASK) | codec,
    )
    parts = np.flatnonzero(files & (records["extents"] > 1)).tolist()
    extents = np.frombuffer(b"".join(rows.tails[i] for i in parts), EXTENT)
    total = int(hashes.sum()) + int(_hashed_extents(extents).sum())
    return EntryDigest(len(whole) + len(parts), total % (1 << 64))


def check_entry_digests(columns: SnapshotColumns, digests: Mapping[ChunkId, EntryDigest]) -> None:
    """Raise CorruptError if a chunk's files in a snapshot differ from its digest."""
    ids = columns.chunk_id.tobytes() if digests else b""
    table = [ids[at : at + 16] for at in range(0, len(ids), 16)]
    group = np.full(len(table), -1, np.int64)  # -1: not compared
    wanted: list[tuple[ChunkId, EntryDigest]] = []
    for chunk, expected in digests.items():
        number = bisect_left(table, chunk)
        if number < len(table) and table[number] == chunk:
            group[number] = len(wanted)
            wanted.append((chunk, expected))
    if not wanted:
        return
    sums = _Sums(group, len(wanted))
    for start in range(0, len(columns.flags), _BLOCK_ENTRIES):
        block = slice(start, start + _BLOCK_ENTRIES)
        hashed = [getattr(columns, name)[block] for name in _HASHED]
        sums.add_files(columns.flags[block], columns.chunk[block], hashed)
    hidden = columns.shadowed
    sums.add_files(hidden["flags"], hidden["chunk"], [hidden[name] for name in _HASHED])
    of_wanted = columns.extents[group[columns.extents["chunk"]] >= 0]
    sums.add(of_wanted["chunk"], _hashed_extents(of_wanted))
    for at, (chunk, expected) in enumerate(wanted):
        actual = EntryDigest(int(sums.counts[at]), int(sums.digests[at]))
        if actual.entry_count > expected.entry_count or (
            actual.entry_count == expected.entry_count and actual.digest != expected.digest
        ):
            raise CorruptError(
                f"the metadata of the files in chunk {chunk_id_text(chunk)} contradict its header",
                advice="nothing has been published; run `dlcmd recover`",
            )


class _Sums:
    """The entry digests of the chunks that are compared. `group` maps chunk numbers to positions in
    the sums, or -1."""

    def __init__(self, group: npt.NDArray[np.int64], count: int) -> None:
        self._group = group
        self._count = count
        self.counts = np.zeros(count, np.int64)
        self.digests: Hashes = np.zeros(count, np.uint64)

    def add_files(
        self, flags: npt.NDArray[np.uint32], chunk: npt.NDArray[np.uint32], hashed: list[Column]
    ) -> None:
        """Add the files of one extent among these entries."""
        files = np.flatnonzero((kinds(flags) == Kind.FILE) & ((flags & MANY_EXTENTS) == 0))
        files = files[self._group[chunk[files]] >= 0]
        self.add(chunk[files], mixed(*(column[files] for column in hashed)))

    def add(self, chunk: npt.NDArray[np.uint32], hashes: Hashes) -> None:
        """`chunk` names only chunks that are compared."""
        group = self._group[chunk]
        self.counts += np.bincount(group, minlength=self._count)
        for shift in (
            0,
            32,
        ):  # a float64 is exact up to 2^53: it holds sums of 2 million such halves
            half = (hashes >> np.uint64(shift)) & np.uint64(0xFFFFFFFF)
            sums = np.bincount(group, half, self._count).astype(np.uint64)
            self.digests += sums << np.uint64(shift)


def _hashed_extents(extents: npt.NDArray[np.void]) -> Hashes:
    names = ("size", "start", "checksum", "offset", "stored", "codec")
    return mixed(*(extents[name] for name in names))


def mixed(*columns: Column) -> Hashes:
    """A hash of each row of at most six columns (`mix` in FORMAT.md, section 7)."""
    found: Hashes = np.zeros(len(columns[0]), np.uint64)
    for factor, column in zip(_FACTORS, columns, strict=False):
        found += column.astype(np.uint64) * np.uint64(factor)
    found ^= found >> np.uint64(29)
    found *= _LAST_FACTOR
    found ^= found >> np.uint64(32)
    return found
