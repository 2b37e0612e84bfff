"""The changes from one published version to a later one, and how a reader applies them (FORMAT.md,
section 8). Any thread.

A version is read from a chain: a snapshot, and deltas above it. `apply_deltas` gives the bytes that
a full build of the version gives.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

from ...errors import (
    CorruptError,
    UsageError,
)
from ..entries import PATH_BYTES_MAX, RECORD, ChunkId, ChunkInfo, Kind, Names, Rows
from . import layout as layout
from .build import build_snapshot
from .entry_digest import EntryDigest
from .layout import RowsDigest
from .reader import ROOT_HASH, ROOT_INDEX, Indices, MergedFrom, Snapshot
from .rows_digest import digest_of_entries, digest_of_rows
from .sections import FIXED_AT, FileFormat

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

HEADER_BYTES = 512
DELTAS_MAX = 7
"""Deltas of one chain."""

_CHUNK = np.dtype([("id", "V16"), ("object_bytes", "<u8")])
_ID = np.dtype("V16")
_DIGEST_MODULUS = 1 << 128
_MERGED_ROWS_MAX = 1 << 16
"""Rows of several deltas are merged up to this number; more are applied delta by delta."""


class _Sections(NamedTuple):
    folders: npt.NDArray[np.uint8]
    folder: layout.U4
    names: npt.NDArray[np.uint8]
    records: layout.Records
    chunk: layout.U4
    row_chunk: layout.Records
    tailed: layout.U4
    tail_bytes: layout.U8
    tails: npt.NDArray[np.uint8]
    added: layout.Records


_DTYPES = tuple(
    np.dtype(spec) for spec in ("u1", "<u4", "u1", RECORD, "<u4", _ID, "<u4", "<u8", "u1", _CHUNK)
)
_FORMAT = FileFormat(
    what="delta",
    magic=b"\x93DIESDL\n",
    version=1,
    header_bytes=HEADER_BYTES,
    fixed=struct.Struct("<16sQQQQQ16sQQQB63s"),
    names=_Sections._fields,
    dtypes=_DTYPES,
)
_corrupt = _FORMAT.corrupt


@dataclass(frozen=True, slots=True)
class DeltaHeader:
    """All fields but `base` and `rows` describe the version, not the change. `files` and
    `file_bytes` are as the metadata store counts them."""

    identity: UUID
    dataset: str
    version: int
    base: int
    files: int
    file_bytes: int
    chunks: int
    digest: int
    rows_digest: RowsDigest
    rows: int


@dataclass(frozen=True, slots=True)
class Delta:
    header: DeltaHeader
    rows: Rows
    added: Sequence[ChunkInfo]
    """The chunks that the base does not have."""


# Bytes


def write_delta(delta: Delta) -> list[memoryview]:
    """Return buffers to be written one after the other."""
    rows, header = delta.rows, delta.header
    folders, folder = _used(rows.folders, rows.folder)
    chunks, chunk = _used(rows.chunks, rows.chunk)
    tailed = sorted(rows.tails)
    added = np.zeros(len(delta.added), _CHUNK)
    added["id"] = np.frombuffer(b"".join(chunk.id for chunk in delta.added), _ID)
    added["object_bytes"] = [chunk.object_bytes for chunk in delta.added]
    sections = _Sections(
        folders=_bytes(b"\0".join(folders)),
        folder=folder,
        names=_bytes(Names.of(rows.names).joined),
        records=rows.records,
        chunk=chunk,
        row_chunk=np.frombuffer(b"".join(chunks), _ID),
        tailed=np.array(tailed, np.uint32),
        tail_bytes=np.array([len(rows.tails[i]) for i in tailed], np.uint64),
        tails=_bytes(b"".join(rows.tails[i] for i in tailed)),
        added=added,
    )
    name = header.dataset.encode()
    fields = (
        *(header.identity.bytes, header.version, header.base, header.files, header.file_bytes),
        *(header.chunks, header.digest.to_bytes(16, "little"), *header.rows_digest, len(rows)),
        *(len(name), name),
    )
    return _FORMAT.write(fields, sections, b"")


def _used(items: Sequence[bytes], numbers: layout.U4) -> tuple[Sequence[bytes], layout.U4]:
    """The items that the numbers name, each once, and the numbers among these."""
    used, position = np.unique(numbers, return_inverse=True)
    known: dict[bytes, int] = {}
    again = [known.setdefault(items[i], len(known)) for i in used.tolist()]
    return list(known), np.array(again, np.uint32)[position]


def _bytes(content: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(content, np.uint8)


def delta_bytes(rows: Rows) -> int:
    """About the length of the delta of these rows."""
    names = Names.of(rows.names).joined
    tails = sum(map(len, rows.tails.values()))
    folders = sum(map(len, rows.folders)) + len(rows.folders)
    return HEADER_BYTES + len(rows) * (RECORD.itemsize + 8) + len(names) + folders + tails


def parse_delta_header(front: "ReadableBuffer") -> DeltaHeader:
    """Parse the first HEADER_BYTES of a delta. Raises a leaf of FormatError."""
    view = memoryview(front).cast("B")
    _, dataset = _FORMAT.check_header(view)
    fields = _FORMAT.fixed.unpack_from(view, FIXED_AT)
    identity, version, base, files, file_bytes, chunks, digest, seen, placed, rows, *_ = fields
    if any(_FORMAT.spare(view, _FORMAT.table_end)) or not 0 < base < version:
        _corrupt("its header contradicts itself", 0)
    return DeltaHeader(
        identity=UUID(bytes=identity),
        dataset=dataset,
        version=version,
        base=base,
        files=files,
        file_bytes=file_bytes,
        chunks=chunks,
        digest=int.from_bytes(digest, "little"),
        rows_digest=RowsDigest(seen, placed),
        rows=rows,
    )


def parse_delta(buffer: "ReadableBuffer") -> Delta:
    """Raises a leaf of FormatError. `apply_deltas` checks the rows against each other."""
    view = memoryview(buffer).cast("B")
    header = parse_delta_header(view[:HEADER_BYTES])
    bounds = _FORMAT.bounds(view)
    _FORMAT.check_sums(view, bounds)
    arrays = [
        np.ndarray(((each.behind - each.start) // dtype.itemsize,), dtype, view, each.start)
        for each, dtype in zip(bounds, _DTYPES, strict=True)
    ]
    sections = _Sections(*arrays)
    k = header.rows
    counts = (len(sections.folder), len(sections.records), len(sections.chunk))
    if counts != (k, k, k) or len(sections.tailed) != len(sections.tail_bytes):
        _corrupt("its sections do not have the lengths that its header says", 0)
    rows = Rows(
        folders=_folders(sections.folders, int(sections.folder.max()) + 1 if k else 0),
        folder=sections.folder,
        names=_names(sections.names, k),
        records=sections.records,
        chunk=sections.chunk,
        chunks=[ChunkId(bytes(each)) for each in sections.row_chunk.tolist()],
        tails=_tails(sections, k),
    )
    if k and int(rows.chunk.max()) >= len(rows.chunks):
        _corrupt("a row names a chunk that it does not have")
    kind = rows.records["kind"]
    has_tail = (kind == Kind.LINK) | (kind == Kind.FILE) & (rows.records["extents"] > 1)
    if not np.array_equal(np.flatnonzero(has_tail), sections.tailed):
        _corrupt("its tails are not those of its links and files of several extents")
    added = [ChunkInfo(ChunkId(bytes(id_)), size) for id_, size in sections.added.tolist()]
    return Delta(header, rows, added)


def _folders(joined: npt.NDArray[np.uint8], count: int) -> Sequence[bytes]:
    folders = joined.tobytes().split(b"\0") if count else []
    if len(folders) != count or any(len(path) > PATH_BYTES_MAX for path in folders):
        _corrupt("its folders do not match its rows")
    return folders


def _names(joined: npt.NDArray[np.uint8], count: int) -> Names:
    if int(np.count_nonzero(joined == 0)) != max(count - 1, 0) or (len(joined) and not count):
        _corrupt("its names do not match its rows")
    return Names(joined.tobytes(), count)


def _tails(sections: _Sections, count: int) -> dict[int, bytes]:
    tailed, lengths, blob = sections.tailed, sections.tail_bytes, sections.tails.tobytes()
    ends = np.cumsum(lengths)
    if (
        (tailed >= count).any()
        or (np.diff(tailed.astype(np.int64)) <= 0).any()
        or (lengths > len(blob)).any()
        or (int(ends[-1]) if len(ends) else 0) != len(blob)
    ):
        _corrupt("its tails do not match its rows")
    starts = (ends - lengths).tolist()
    bounds = zip(tailed.tolist(), starts, ends.tolist(), strict=True)
    return {row: blob[start:end] for row, start, end in bounds}


# Reading a version by its chain


def apply_deltas(base: Snapshot, deltas: Sequence[Delta]) -> Sequence[memoryview]:
    """The snapshot of the last delta's version, as buffers to write. The deltas follow each other;
    `base` is the version on which the first builds, or a later one, but none after the first's.
    Raises CorruptError."""
    if sum(len(delta.rows) for delta in deltas) > _MERGED_ROWS_MAX:
        for delta in deltas[:-1]:
            parts = _applied(base, [delta])
            base = Snapshot(memoryview(b"".join(parts)), verify=False)
        deltas = deltas[-1:]
    return _applied(base, deltas)


def merged_from(base: Snapshot, deltas: Sequence[Delta]) -> MergedFrom | None:
    """How `diff_snapshots` finds the changes of a snapshot that `apply_deltas` made."""
    if sum(len(delta.rows) for delta in deltas) > _MERGED_ROWS_MAX:
        return None
    return MergedFrom(base.version, merged_rows([delta.rows for delta in deltas]))


def check_order(base: Snapshot, deltas: Sequence[Delta]) -> None:
    """Raise CorruptError if the deltas do not follow `base` and each other."""
    before = base.version
    for delta in deltas:
        header = delta.header
        if header.identity != base.identity or not header.base <= before < header.version:
            _corrupt(f"it leads from version {header.base} to {header.version}, not from {before}")
        before = header.version


@contextmanager
def refusing(version: int) -> Iterator[None]:
    """Turns the error of rows that no writer makes into that of a damaged delta."""
    try:
        yield
    except UsageError as error:
        raise CorruptError(f"damaged delta of version {version}: {error.message}") from error


def _applied(base: Snapshot, deltas: Sequence[Delta]) -> Sequence[memoryview]:
    check_order(base, deltas)
    header = deltas[-1].header
    rows, chunks = merged_rows([delta.rows for delta in deltas]), chunks_after(base, deltas)
    with refusing(header.version):
        check_rows(rows, chunks)
        parts = build_snapshot(
            base,
            rows,
            chunks,
            identity=header.identity,
            dataset=header.dataset,
            version=header.version,
            digest=header.digest,
        )
    if layout.parse_front(parts[0]).rows_digest != header.rows_digest:
        _corrupt(f"the rows of version {header.version} do not match its digest")
    return parts


def merged_rows(all_rows: Sequence[Rows]) -> Rows:
    """The last row of each path. The result may name folders and chunks several times."""
    if len(all_rows) == 1:
        return all_rows[0]
    seen: set[_Key] = set()
    folders, names, chunks = list[bytes](), list[bytes](), list[ChunkId]()
    folder, records, chunk = list[layout.U4](), list[layout.Records](), list[layout.U4]()
    tails: dict[int, bytes] = {}
    for rows in reversed(all_rows):
        keys = _keys(rows)
        left = [i for i, key in enumerate(keys) if key not in seen]
        seen.update(keys)
        tails |= {len(names) + j: rows.tails[i] for j, i in enumerate(left) if i in rows.tails}
        folder.append(rows.folder[left] + np.uint32(len(folders)))
        chunk.append(rows.chunk[left] + np.uint32(len(chunks)))
        records.append(rows.records[left])
        names += [rows.names[i] for i in left]
        folders += rows.folders
        chunks += rows.chunks
    return Rows(
        folders,
        np.concatenate(folder).astype(np.uint32),
        names,
        np.concatenate(records),
        np.concatenate(chunk).astype(np.uint32),
        chunks,
        tails,
    )


def chunks_after(base: Snapshot, deltas: Sequence[Delta]) -> Sequence[ChunkInfo]:
    """All chunks of the last delta's version. A base that is later than the first delta's has some
    of the added ones. Raises CorruptError."""
    table = dict(zip(base.chunk_ids, base.chunk_sizes.tolist(), strict=True))
    digest = base.digest
    for delta in deltas:
        new = [chunk for chunk in delta.added if chunk.id not in table]
        if len(dict(delta.added)) < len(delta.added) or any(
            table.get(chunk.id, chunk.object_bytes) != chunk.object_bytes for chunk in delta.added
        ):
            _corrupt("it adds a chunk with two lengths, or twice")
        table |= dict(delta.added)
        digest = (digest + sum(xxh3_128_intdigest(chunk.id) for chunk in new)) % _DIGEST_MODULUS
    header = deltas[-1].header
    if (len(table), digest) != (header.chunks, header.digest):
        _corrupt(f"the chunks of version {header.version} do not match its digest")
    return [ChunkInfo(id_, size) for id_, size in table.items()]


def check_rows(
    rows: Rows,
    chunks: Sequence[ChunkInfo],
    entry_digests: Mapping[ChunkId, EntryDigest] = MappingProxyType({}),
) -> RowsDigest:
    """The digest of changed rows. Raises UsageError, CorruptError if they contradict themselves,
    their chunks or `entry_digests`: they are checked as a foreign snapshot of them alone."""
    parts = build_snapshot(
        None,
        rows,
        chunks,
        identity=UUID(int=0),
        dataset="rows",
        version=1,
        digest=0,
        entry_digests=entry_digests,
    )
    return Snapshot(memoryview(b"".join(parts)), verify=True).rows_digest


# Writing one


def digest_at(base: Snapshot, deltas: Sequence[Delta], rows: Rows) -> RowsDigest:
    """The digest of the rows that the version of `deltas` above `base` has at the paths of
    `rows`."""
    keys, hashes = _keys(rows), _path_hashes(rows)
    total, left = layout.NO_ROWS, np.ones(len(rows), np.bool_)
    for delta in reversed(deltas):
        row_of = {key: i for i, key in enumerate(_keys(delta.rows))}
        wanted = [(j, row_of[keys[j]]) for j in np.flatnonzero(left) if keys[j] in row_of]
        if wanted:
            ours, theirs = np.array(wanted, np.int64).T
            total = total.plus(digest_of_rows(_some(delta.rows, theirs), hashes[ours]))
            left[ours] = False
    rest = np.flatnonzero(left)
    folder = np.array([base.lookup(path) for path in rows.folders], np.int64)[rows.folder[rest]]
    names = [keys[j][1] for j in rest.tolist()]
    indices = base.find_many(folder, hashes[rest], names)
    indices[[name == b"" for name in names]] = ROOT_INDEX
    data, path = _own_data(base, indices[indices >= 0]), hashes[rest][indices >= 0]
    return total.plus(digest_of_entries(base.columns, data[data >= 0], path[data >= 0]))


_Key = tuple[bytes, bytes]
"""Folder and name: whole paths in a deep folder would take memory by their number times its
length."""


def _keys(rows: Rows) -> list[_Key]:
    folders = map(rows.folders.__getitem__, rows.folder.tolist())
    return list(zip(folders, rows.names, strict=True))


def _some(rows: Rows, which: Indices) -> Rows:
    return Rows(
        rows.folders,
        rows.folder[which],
        [rows.names[i] for i in which.tolist()],
        rows.records[which],
        rows.chunk[which],
        rows.chunks,
        {j: rows.tails[i] for j, i in enumerate(which.tolist()) if i in rows.tails},
    )


def _path_hashes(rows: Rows) -> npt.NDArray[np.uint64]:
    folder_hash = []
    for folder in rows.folders:
        seed = ROOT_HASH
        for name in folder.split(b"/") if folder else ():
            seed = xxh3_64_intdigest(name, seed)
        folder_hash.append(seed)
    hashes = (
        xxh3_64_intdigest(name, folder_hash[folder]) if name else ROOT_HASH
        for folder, name in zip(rows.folder.tolist(), rows.names, strict=True)
    )
    return np.fromiter(hashes, np.uint64, len(rows))


def _own_data(snapshot: Snapshot, entries: Indices) -> Indices:
    """As `digest_of_entries` takes them; -1 for an implicit folder that shadows nothing."""
    shadowing = snapshot.shadowing_folders()
    data = entries.copy()
    implicit = snapshot.columns.flags[entries] & np.uint32(layout.IMPLICIT) != 0
    at = np.searchsorted(shadowing, entries[implicit])
    found = np.full(len(at), -1, np.int64)
    is_there = at < len(shadowing)
    is_there[is_there] = shadowing[at[is_there]] == entries[implicit][is_there]
    found[is_there] = snapshot.entry_count + at[is_there]
    data[implicit] = found
    return data
