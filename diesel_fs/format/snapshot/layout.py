"""The bytes of a snapshot (FORMAT.md, section 7): its header, its sections, and their checks. Any
thread.

Each column of entries, and each table beside them, is a **section** of the file. `parse` returns
the columns as numpy views of the given buffer, after checking them; `write` does the reverse.

A folder that exists only because something is in it is **implicit**. A file or link at the path of
such a folder is **shadowed**: it is kept, but nobody sees it.
"""

import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

import numpy as np
import numpy.typing as npt

from ...errors import NewerVersionError
from ..chunk import EXTENT_ALIGNMENT, OBJECT_BYTES_MAX, PREAMBLE_BYTES, impossible_bodies
from ..entries import MODE_MASK, NAME_BYTES_MAX, PATH_BYTES_MAX, Codec, Kind
from .sections import FIXED_AT, Bounds, FileFormat

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

U4 = npt.NDArray[np.uint32]
U8 = npt.NDArray[np.uint64]
I8 = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Records = npt.NDArray[np.void]
Mask = npt.NDArray[np.bool_]

HEADER_BYTES = 640
NAME_PADDING = bytes(8)
"""Behind the last name, so that every name can be read as 64-bit words."""

KIND_SHIFT, CODEC_SHIFT = 12, 16
IMPLICIT = 1 << 24
"""The folder is implicit."""
MANY_EXTENTS = 1 << 25
"""The file has several extents: `chunk` is the index of the first in `extents`, `offset` their
number."""

EXTENT_BITS = 3 << KIND_SHIFT | 0xFF << CODEC_SHIFT | MANY_EXTENTS
PLAIN_FILE = Kind.FILE << KIND_SHIFT | Codec.RAW << CODEC_SHIFT
"""A file in one uncompressed extent, among the bits `EXTENT_BITS`."""

_KNOWN_BITS = MODE_MASK | 3 << KIND_SHIFT | 1 << CODEC_SHIFT | IMPLICIT | MANY_EXTENTS
IMPLICIT_FOLDER = 0o755 | Kind.FOLDER << KIND_SHIFT | IMPLICIT
_SIZE_LIMIT = 1 << 63  # off_t is signed
_DEPTH_MAX = PATH_BYTES_MAX // 2 + 1
_BATCH = 65_536  # entries per step of a check that needs several words each

STORED_EXTENT = np.dtype(
    [
        ("start", "<u8"),
        ("size", "<u8"),
        ("checksum", "<u8"),
        ("chunk", "<u4"),
        ("offset", "<u4"),
        ("stored", "<u4"),
        ("codec", "<u4"),
    ]
)
SHADOWED = np.dtype(
    [
        ("entry", "<u4"),  # the folder that hides this file or link
        ("flags", "<u4"),  # this and the others as in `SnapshotColumns`
        ("size", "<u8"),
        ("mtime_ns", "<i8"),
        ("checksum", "<u8"),
        ("chunk", "<u4"),
        ("offset", "<u4"),
        ("stored", "<u4"),
        ("spare", "<u4"),
    ]
)
_BLOCK = 1 << 18  # values per step of a sum


class SnapshotColumns(NamedTuple):
    """The sections in the order of the file (FORMAT.md, section 7)."""

    parent: U4
    name_start: U8
    flags: U4
    size: U8
    mtime_ns: I8
    chunk: U4
    offset: U4
    stored: U4
    checksum: U8
    fingerprint: U4
    slot: U4
    names: Bytes
    target_start: U8
    targets: Bytes
    extents: Records
    chunk_id: Bytes
    chunk_bytes: U8
    shadowed: Records


DTYPES = tuple(
    np.dtype(spec)
    for spec in (
        *("<u4", "<u8", "<u4", "<u8", "<i8", "<u4", "<u4", "<u4", "<u8", "<u4", "<u4"),
        *("u1", "<u8", "u1", STORED_EXTENT, "u1", "<u8", SHADOWED),
    )
)
_FORMAT = FileFormat(
    what="snapshot",
    magic=b"\x93DIESNP\n",
    version=2,  # version 1 has no rows digest
    header_bytes=HEADER_BYTES,
    fixed=struct.Struct("<16sQQQQQQ16sB63s"),
    names=SnapshotColumns._fields,
    dtypes=DTYPES,
    advice="write or fetch it again with `dlcmd save-meta`",
)
_ROWS_DIGEST = struct.Struct("<QQ")
MAGIC_BYTES = len(_FORMAT.magic)
check_magic = _FORMAT.check_magic


class RowsDigest(NamedTuple):
    """Two sums mod 2^64 of hashes of all rows (`rows_digest.py`): `seen` covers what
    readers see, `placed` the places of the contents."""

    seen: int
    placed: int

    def plus(self, other: "RowsDigest") -> "RowsDigest":
        sums = (one + two for one, two in zip(self, other, strict=True))
        return RowsDigest(*(value % (1 << 64) for value in sums))

    def minus(self, other: "RowsDigest") -> "RowsDigest":
        return self.plus(RowsDigest(-other.seen, -other.placed))


NO_ROWS = RowsDigest(0, 0)


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """`entries` counts the root and implicit folders, too."""

    identity: UUID
    dataset: str
    version: int
    entries: int
    files: int
    folders: int
    file_bytes: int
    chunks: int
    digest: int
    rows_digest: RowsDigest | None
    """None in format version 1."""


def header_of(
    columns: SnapshotColumns,
    identity: UUID,
    dataset: str,
    version: int,
    digest: int,
    rows_digest: RowsDigest | None,
) -> SnapshotHeader:
    kind = kinds(columns.flags)
    sizes = columns.size[kind == Kind.FILE]
    return SnapshotHeader(
        identity=identity,
        dataset=dataset,
        version=version,
        entries=len(columns.parent),
        files=len(sizes),
        folders=int(np.count_nonzero(kind == Kind.FOLDER)),
        file_bytes=_exact_sum(sizes),
        chunks=len(columns.chunk_bytes),
        digest=digest,
        rows_digest=rows_digest,
    )


def kinds(flags: U4) -> U4:
    return flags >> np.uint32(KIND_SHIFT) & np.uint32(3)


def codecs(flags: U4) -> U4:
    return flags >> np.uint32(CODEC_SHIFT) & np.uint32(1)


def write(header: SnapshotHeader, columns: SnapshotColumns) -> list[memoryview]:
    """Return buffers to be written one after the other."""
    assert header.rows_digest is not None
    name = header.dataset.encode()
    fields = (
        *(header.identity.bytes, header.version, header.entries, header.files, header.folders),
        *(header.file_bytes, header.chunks, header.digest.to_bytes(16, "little")),
        *(len(name), name),
    )
    return _FORMAT.write(fields, columns, _ROWS_DIGEST.pack(*header.rows_digest))


def parse(buffer: "ReadableBuffer", *, verify: bool) -> tuple[SnapshotHeader, SnapshotColumns]:
    """Return the header, and columns that are views of `buffer`. Raises a leaf of FormatError.
    Compares all checksums. `verify` also checks columns against each other; for a private copy that
    was done when it was written."""
    if sys.byteorder != "little":
        raise NewerVersionError("snapshots are read in place, on little-endian machines only")
    view = memoryview(buffer).cast("B")
    header = _parse_header(view)
    columns, bounds = _parse_sections(view, header)
    _FORMAT.check_sums(view, bounds)
    if verify:
        check(header, columns)
    return header, columns


_corrupt = _FORMAT.corrupt


def _parse_header(view: memoryview) -> SnapshotHeader:
    """Return the header, checked except for its table of sections. Raises a leaf of FormatError."""
    version, dataset = _FORMAT.check_header(view)
    rows_digest, table_end = None, _FORMAT.table_end
    if version >= 2:
        rows_digest = RowsDigest(*_ROWS_DIGEST.unpack_from(view, table_end))
        table_end += _ROWS_DIGEST.size
    if any(_FORMAT.spare(view, table_end)):
        _corrupt("its header contradicts itself", 0)
    fields = _FORMAT.fixed.unpack_from(view, FIXED_AT)
    identity, number, entries, files, folders, file_bytes, chunks, digest, *_ = fields
    return SnapshotHeader(
        identity=UUID(bytes=identity),
        dataset=dataset,
        version=number,
        entries=entries,
        files=files,
        folders=folders,
        file_bytes=file_bytes,
        chunks=chunks,
        digest=int.from_bytes(digest, "little"),
        rows_digest=rows_digest,
    )


FRONT_BYTES = HEADER_BYTES
"""`parse_front` needs this much of a file."""


def parse_front(front: "ReadableBuffer") -> SnapshotHeader:
    """Raises a leaf of FormatError."""
    return _parse_header(memoryview(front))


def content_mark(front: "ReadableBuffer") -> bytes:
    """A mark that is equal for snapshots that differ only in their version: the header's counts and
    the sections' checksums."""
    view = memoryview(front)
    return bytes(view[40:80]) + bytes(view[_FORMAT.table_at : _FORMAT.table_end])


def _parse_sections(
    view: memoryview, header: SnapshotHeader
) -> tuple[SnapshotColumns, list[Bounds]]:
    bounds = _FORMAT.bounds(view)
    arrays = [
        np.ndarray(((each.behind - each.start) // dtype.itemsize,), dtype, view, each.start)
        for each, dtype in zip(bounds, DTYPES, strict=True)
    ]
    columns = SnapshotColumns(*arrays)
    n, c = header.entries, header.chunks
    lengths = [n, n + 1, n, n, n, n, n, n, n, n - 1, n - 1]
    if (
        [len(column) for column in columns[: len(lengths)]] != lengths
        or len(columns.names) < len(NAME_PADDING)
        or not len(columns.target_start)
        or (len(columns.chunk_id), len(columns.chunk_bytes)) != (16 * c, c)
    ):
        _corrupt("its sections do not have the lengths that its header says", 0)
    return columns, bounds


def words(names: Bytes) -> U8:
    """Overlapping little-endian words of `names` (with NAME_PADDING): word i starts at byte i."""
    return np.ndarray((len(names) - 7,), np.dtype("<u8"), names, strides=(1,))


def equal_names(one: tuple[U8, I8, I8], other: tuple[U8, I8, I8]) -> Mask:
    """Compare pairs of names. Each side is (`words` of its names, starts, lengths). Compares 8
    bytes of all pairs at a time, and continues with those that are equal so far."""
    (one_words, one_at, lengths), (other_words, other_at, other_lengths) = one, other
    same: Mask = lengths == other_lengths
    left = np.flatnonzero(same)
    one_at, other_at, rest = one_at[left], other_at[left], lengths[left]
    while len(left):
        behind_bits = np.maximum(64 - 8 * rest, 0).astype(np.uint64)  # bits of the next name
        different = (one_words[one_at] ^ other_words[other_at]) << behind_bits != 0
        same[left[different]] = False
        more = np.flatnonzero(~different & (rest > 8))
        left, rest = left[more], rest[more] - 8
        one_at, other_at = one_at[more] + 8, other_at[more] + 8
    return same


def word_at(source: U8, starts: I8, lengths: I8, position: int) -> U8:
    """8 bytes of each name from `position` on, as a little-endian word, with zeros beyond its end.
    `source` comes from `words`."""
    rest = lengths - position
    word = source[np.where(rest > 0, starts + position, 0)]
    unused_bits = np.clip(64 - 8 * rest, 0, 63).astype(np.uint64)
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> unused_bits
    return np.where(rest > 0, word & mask, np.uint64(0))


def name_faults(names: Bytes, starts: U8) -> Mask:
    """Flag names that cannot be in a path. `starts` ends with the end of the last name."""
    lengths = np.diff(starts)
    bad = (lengths < 1) | (lengths > NAME_BYTES_MAX)
    used = names[: int(starts[-1])]
    at = np.flatnonzero((used == ord("/")) | (used == 0))
    bad[np.searchsorted(starts, at.astype(np.uint64), side="right") - 1] = True
    short = np.flatnonzero((lengths == 1) | (lengths == 2))
    first = used[starts[short].astype(np.int64)]
    last = used[starts[short + 1].astype(np.int64) - 1]
    bad[short[(first == ord(".")) & (last == ord("."))]] = True
    return bad


def longest_path_bytes(parent: U4, name_start: U8, child_end: Callable[[int], int]) -> int:
    """The length of the longest path. `child_end(i)` is the end of the children of entries 0..i.
    Returns a number above PATH_BYTES_MAX, early, if folders are nested too deeply."""
    length = np.diff(name_start).astype(np.int32)
    longest, depth, start, end = 0, 0, 1, child_end(0)
    while start < end:
        length[start:end] += length[parent[start:end]] + (1 if depth else 0)
        longest = max(longest, int(length[start:end].max()))
        depth += 1
        if longest > PATH_BYTES_MAX or depth > _DEPTH_MAX:
            return PATH_BYTES_MAX + 1
        start, end = end, child_end(end - 1)
    return longest


def _exact_sum(values: U8) -> int:
    low = high = 0
    for start in range(0, len(values), _BLOCK):
        some = values[start : start + _BLOCK]
        low += int((some & np.uint64(0xFFFFFFFF)).sum())
        high += int((some >> np.uint64(32)).sum())
    return low + (high << 32)


def check(header: SnapshotHeader, columns: SnapshotColumns) -> None:
    """Raise CorruptError if columns contradict each other. Afterwards all indices are valid."""
    _check_names(columns)
    kind = kinds(columns.flags)
    _check_tree(columns, kind)
    _check_order(columns)
    _check_index(columns)
    _check_shadowed(columns)
    _check_data(columns)
    values = (header.identity, header.dataset, header.version, header.digest, header.rows_digest)
    counted = header_of(columns, *values)
    if counted != header:
        _corrupt("its counts are not those of its entries", 0)


def _check_names(columns: SnapshotColumns) -> None:
    starts, names = columns.name_start, columns.names
    if starts[0] or starts[1]:
        _corrupt("the root has a name")
    for batch in _batches(len(starts) - 1):  # unsigned: a descent is a huge length
        if (np.diff(starts[batch.start : batch.stop + 1]) > NAME_BYTES_MAX).any():
            _corrupt("its names overlap or are too long")
    if int(starts[-1]) != len(names) - len(NAME_PADDING) or names[-len(NAME_PADDING) :].any():
        _corrupt("its names do not end where they should")
    for batch in _batches(len(starts) - 1):
        bounds = starts[max(batch.start, 1) : batch.stop + 1]
        if name_faults(names[int(bounds[0]) : int(bounds[-1])], bounds - bounds[0]).any():
            _corrupt("a name is not possible in a path")


def _batches(count: int) -> Iterator["slice[int, int, None]"]:
    for start in range(0, count, _BLOCK):
        yield slice(start, min(start + _BLOCK, count))


def _check_tree(columns: SnapshotColumns, kind: U4) -> None:
    flags, parent = columns.flags, columns.parent
    if (flags & ~np.uint32(_KNOWN_BITS)).any() or (kind == Kind.TOMBSTONE).any():
        _corrupt("an entry of unknown kind or with unknown flags")
    folder = np.flatnonzero(kind == Kind.FOLDER)
    counts = columns.offset[folder].astype(np.int64)
    ends = 1 + np.cumsum(counts)
    starts = ends - counts
    if kind[0] != Kind.FOLDER or ends[-1] != len(flags) or (starts != columns.chunk[folder]).any():
        _corrupt("the children of its folders are not its entries")
    if parent[0] or not np.array_equal(parent[1:], np.repeat(folder.astype(np.uint32), counts)):
        _corrupt("an entry and its folder contradict each other")
    if (folder >= starts)[counts > 0].any():
        _corrupt("a folder inside itself")
    marks = columns.size[folder] | columns.stored[folder] | columns.checksum[folder]
    marks |= flags[folder] & np.uint32(MANY_EXTENTS | 1 << CODEC_SHIFT)
    implicit = np.flatnonzero(flags & np.uint32(IMPLICIT))
    wrong = (flags[implicit] != IMPLICIT_FOLDER) | (columns.mtime_ns[implicit] != 0)
    wrong |= (columns.offset[implicit] == 0) & (implicit > 0)  # the root may be empty
    if marks.any() or wrong.any():
        _corrupt("a folder with the marks of a file")

    def child_end(entry: int) -> int:
        return int(ends[np.searchsorted(folder, entry, "right") - 1])

    if longest_path_bytes(parent, columns.name_start, child_end) > PATH_BYTES_MAX:
        _corrupt("a path is too long")


def _check_order(columns: SnapshotColumns) -> None:
    """Compares as `equal_names` does."""
    source, parent = words(columns.names), columns.parent
    for first in range(1, len(parent) - 1, _BATCH):
        last = min(first + _BATCH, len(parent) - 1)
        bounds = columns.name_start[first : last + 2].astype(np.int64)
        starts, lengths = bounds[:-1], np.diff(bounds)
        left = np.flatnonzero(parent[first:last] == parent[first + 1 : last + 1])
        for position in range(0, NAME_BYTES_MAX + 1, 8):
            one, other = (
                word_at(source, starts[i], lengths[i], position).byteswap()
                for i in (left, left + 1)
            )
            if (one > other).any():
                _corrupt("a folder is not sorted")
            left = left[one == other]
            if not len(left):
                break
        else:
            _corrupt("a folder holds a name twice")


def _check_index(columns: SnapshotColumns) -> None:
    slot, n = columns.slot, len(columns.parent)
    seen = np.zeros(n, np.bool_)
    if len(slot) and int(slot.max()) < n:
        seen[slot] = True
    seen[0] = not seen[0]
    keys = columns.fingerprint.astype(np.uint64) << np.uint64(32) | slot
    if not seen.all() or (keys[1:] <= keys[:-1]).any():
        _corrupt("its lookup index does not hold each entry once, in order")


def _check_shadowed(columns: SnapshotColumns) -> None:
    shadowed, flags = columns.shadowed, columns.flags
    entry, own = shadowed["entry"], shadowed["flags"]
    if (entry >= len(flags)).any() or (entry[1:] <= entry[:-1]).any() or shadowed["spare"].any():
        _corrupt("its shadowed entries are not in order")
    if ((flags[entry] & IMPLICIT) == 0).any() or (kinds(own) >= Kind.FOLDER).any():
        _corrupt("a shadowed entry without a folder at its path")
    if (own & ~np.uint32(_KNOWN_BITS)).any():
        _corrupt("a shadowed entry with unknown flags")


class _Data(NamedTuple):
    flags: U4
    size: U8
    chunk: U4
    offset: U4
    stored: U4
    checksum: U8

    def only(self, which: Mask) -> "_Data":
        flags, size, chunk, offset, stored, checksum = self
        places = chunk[which], offset[which], stored[which], checksum[which]
        return _Data(flags[which], size[which], *places)


def _data_of(columns: SnapshotColumns) -> Iterator[_Data]:
    """Visible entries, then shadowed ones, in batches."""
    for batch in _batches(len(columns.flags)):
        yield _Data(*(getattr(columns, name)[batch] for name in _Data._fields))
    yield _Data(*(columns.shadowed[name] for name in _Data._fields))


def _check_data(columns: SnapshotColumns) -> None:
    object_bytes, extents = columns.chunk_bytes, columns.extents
    if ((object_bytes < PREAMBLE_BYTES) | (object_bytes > OBJECT_BYTES_MAX)).any():
        _corrupt("a chunk of an impossible length")
    used = np.zeros(len(object_bytes))  # bytes of files of one extent, by chunk
    links, of_many = 0, list[_Data]()
    for data in _data_of(columns):
        kind, many = kinds(data.flags), (data.flags & MANY_EXTENTS) != 0
        if (data.size >= _SIZE_LIMIT).any():
            _corrupt("a file of 8 EiB or more")
        if (many & (kind != Kind.FILE)).any() or (data.flags & IMPLICIT)[kind != Kind.FOLDER].any():
            _corrupt("an entry with the marks of another kind")
        one = data.only((kind == Kind.FILE) & ~many)
        _check_places(one, object_bytes)
        used += np.bincount(one.chunk, one.stored, len(used))
        links += _check_links(data.only(kind == Kind.LINK), links, columns)
        of_many.append(data.only(many))
    if (
        links != len(columns.target_start) - 1
        or int(columns.target_start[-1]) != len(columns.targets)
        or (columns.targets == 0).any()
    ):
        _corrupt("links and their targets contradict each other")
    _check_files_of_many(_Data(*map(np.concatenate, zip(*of_many, strict=True))), columns)
    used += np.bincount(extents["chunk"], extents["stored"], len(used))
    if (used > object_bytes - PREAMBLE_BYTES).any():
        _corrupt("a chunk with more bytes of files than it has")
    number = columns.chunk_id.view(">u8").reshape(len(used), 2).astype(np.uint64)
    high, low = number[:, 0], number[:, 1]
    if ((high[1:] < high[:-1]) | ((high[1:] == high[:-1]) & (low[1:] <= low[:-1]))).any():
        _corrupt("its chunks are not sorted")


def _check_places(one: _Data, object_bytes: U8) -> None:
    if (one.chunk >= len(object_bytes)).any():
        _corrupt("a file in a chunk that is not in its table")
    places = (codecs(one.flags), one.stored, one.size, one.offset)
    if impossible_bodies(*places, object_bytes[one.chunk]).any():
        _corrupt("a file at a place that its chunk cannot hold")


def _check_links(link: _Data, before: int, columns: SnapshotColumns) -> int:
    """`before` others precede these. Returns their number."""
    bounds = columns.target_start[before : before + len(link.size) + 1]
    target_bytes = np.diff(bounds)  # unsigned: a descent is a huge length
    if (
        not np.array_equal(link.size, target_bytes)
        or not np.array_equal(link.chunk, np.arange(before, before + len(link.chunk)))
        or int(bounds[-1]) > len(columns.targets)
        or (not before and bounds[0])
        or (target_bytes == 0).any()
        or (link.offset | link.stored).any()
        or (link.flags & ~np.uint32(MODE_MASK | 3 << KIND_SHIFT)).any()
    ):
        _corrupt("links and their targets contradict each other")
    return len(link.size)


def _check_files_of_many(many: _Data, columns: SnapshotColumns) -> None:
    counts = many.offset.astype(np.int64)
    ends = np.cumsum(counts)
    if (
        (counts < 2).any()
        or (ends[-1] if len(ends) else 0) != len(columns.extents)
        or (ends - counts != many.chunk).any()
        or (many.stored | many.checksum).any()
        or codecs(many.flags).any()
    ):
        _corrupt("files and their extents contradict each other")
    check_extents(columns.extents, ends, counts, many.size, columns.chunk_bytes)


def check_extents(extents: Records, ends: I8, counts: I8, sizes: U8, object_bytes: U8) -> None:
    """Raise CorruptError unless each run of `counts` extents, which ends at `ends`, makes up a file
    of `sizes` bytes, and lies in chunks of `object_bytes`."""
    if not len(extents):
        return
    start, size = extents["start"], extents["size"]
    expected = np.zeros(len(extents), np.uint64)
    expected[1:] = start[:-1] + size[:-1]
    expected[ends - counts] = 0
    if (
        (extents["chunk"] >= len(object_bytes)).any()
        or (extents["codec"] > 1).any()
        or (size == 0).any()
        or (size >= _SIZE_LIMIT).any()
        or (start >= _SIZE_LIMIT).any()
        or (start % EXTENT_ALIGNMENT).any()
        or (start != expected).any()
        or ((start + size)[ends - 1] != sizes).any()
    ):
        _corrupt("the extents of a file do not make it up")
    places = (extents["codec"], extents["stored"], size, extents["offset"])
    if impossible_bodies(*places, object_bytes[extents["chunk"]]).any():
        _corrupt("an extent at a place that its chunk cannot hold")
