"""Making a snapshot: the previous one (or none) and changed rows become the next one.

Owned here: the columns of the result, and the rules for names and tails of rows. Not owned: which
entries there are and in which order (`plan.py`), the layout (`layout.py`). Pure.
The result depends on the state alone, never on the way to it: a merge gives the same bytes as a
full build.

A **source** is an array that says for each item of a result which item of (previous items, then new
ones) it is; each column is one take by a source.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple, NoReturn
from uuid import UUID

import numpy as np

from ...errors import CorruptError, UsageError
from ...names import check_dataset_name, shown
from ..chunk import impossible_bodies
from ..entries import EXTENT, MODE_MASK, PATH_BYTES_MAX, ChunkId, ChunkInfo, Kind, Rows
from . import layout as layout
from .entry_digest import EntryDigest, check_entry_digests
from .plan import ChangedFolders, EntryOrder, MergePlan, order_of
from .reader import Indices, Snapshot

_NO_CHUNK = 0xFFFFFFFF
_BLOCK = 1 << 18  # entries of which more than a few columns are made at one time


def build_snapshot(
    previous: Snapshot | None,
    rows: Rows,
    chunks: Sequence[ChunkInfo],
    *,
    identity: UUID,
    dataset: str,
    version: int,
    digest: int,
    entry_digests: Mapping[ChunkId, EntryDigest] = MappingProxyType({}),
) -> Sequence[memoryview]:
    """The next snapshot, as parts to be written one behind the other.

    `rows` replace, insert or (TOMBSTONE) remove entries of `previous`; `chunks` is the whole chunk
    table, in any order. A row of the root's own path, `b""`, gives its mode and time. What the
    result says of chunks is compared with their `entry_digests`. Raises UsageError for rows that
    are no entries, CorruptError for a file whose chunk is not in `chunks`, or says otherwise. Of
    many rows it takes least memory if the caller keeps none of them: they go on the way.
    """
    check_dataset_name(dataset)
    if previous is not None and previous.identity != identity:
        raise UsageError(f"the previous snapshot is of {previous.identity}, not of {identity}")
    old = previous if previous is not None else _empty(identity, dataset)
    table = sorted(chunks)
    if len({chunk.id for chunk in table}) != len(table):
        raise UsageError("a chunk stands twice in the chunk table")
    plan = MergePlan(old, rows, ChangedFolders(old, rows))
    del rows
    order = order_of(plan)
    del plan.hash, plan.ascends, plan.coming_rows  # the order has what is needed of them
    columns = _Assembly(plan, order, table).columns()
    del plan, order
    check_entry_digests(columns, entry_digests)
    return layout.write(layout.header_of(columns, identity, dataset, version, digest), columns)


def _empty(identity: UUID, dataset: str) -> Snapshot:
    """A dataset without entries: a root that nobody made."""
    columns = layout.Columns(
        parent=np.zeros(1, np.uint32),
        name_start=np.zeros(2, np.uint64),
        flags=np.full(1, layout.IMPLICIT_FOLDER, np.uint32),
        size=np.zeros(1, np.uint64),
        mtime_ns=np.zeros(1, np.int64),
        chunk=np.ones(1, np.uint32),
        offset=np.zeros(1, np.uint32),
        stored=np.zeros(1, np.uint32),
        checksum=np.zeros(1, np.uint64),
        fingerprint=np.zeros(0, np.uint32),
        slot=np.zeros(0, np.uint32),
        names=np.frombuffer(layout.NAME_PADDING, np.uint8),
        target_start=np.zeros(1, np.uint64),
        targets=np.zeros(0, np.uint8),
        extents=np.zeros(0, layout.STORED_EXTENT),
        chunk_id=np.zeros(0, np.uint8),
        chunk_bytes=np.zeros(0, np.uint64),
        shadowed=np.zeros(0, layout.SHADOWED),
    )
    parts = layout.write(layout.header_of(columns, identity, dataset, 0, 0), columns)
    return Snapshot(b"".join(parts), verify=False)


class _Data(NamedTuple):
    """What entries are, beside their names: the columns of these names, of one length.

    Until all is in place, chunks, targets and extents are numbered as (previous ones, then those of
    the rows).
    """

    flags: layout.U4
    size: layout.U8
    mtime_ns: layout.I8
    checksum: layout.U8
    chunk: layout.U4
    offset: layout.U4
    stored: layout.U4


_DTYPES = (np.uint32, np.uint64, np.int64, np.uint64, np.uint32, np.uint32, np.uint32)


class _Assembly:
    """The columns of the result, out of the previous snapshot and the rows.

    What is as long as all rows is made where it stays: beside the rows and the result little more
    than a number for each entry is in memory.
    """

    def __init__(self, plan: MergePlan, order: EntryOrder, table: Sequence[ChunkInfo]) -> None:
        self.plan, self.order, self.table = plan, order, table
        self.old, self.old_count = plan.old.columns, plan.old.entry_count
        self.numbers = {chunk.id: number for number, chunk in enumerate(table)}
        self.object_bytes = np.array([chunk.object_bytes for chunk in table], np.uint64)
        self.kept = np.flatnonzero(~plan.removed)
        self.kept_index = order.old_index[self.kept]
        self.count = len(self.kept) + len(order.new_item)

    def columns(self) -> layout.Columns:
        """All sections."""
        n = self.count
        data_source, shadowed_entries = self._data_source()
        data, tails, extents = self._data(data_source)
        target_start, targets = self._targets(data, tails)
        extents = self._extents(data, data_source, extents)
        self._number_chunks(data, data_source)
        del data_source, self.plan.rows  # all but their names is in `data` now
        parent = self._parent()
        held = np.bincount(parent[1:], minlength=n)
        ends = 1 + np.cumsum(held)
        folders = np.flatnonzero(layout.kinds(data.flags[:n]) == Kind.FOLDER)
        data.offset[folders] = held[folders]
        data.chunk[folders] = (ends - held)[folders]
        del held
        name_start, names = self._names()
        if layout.longest_path_bytes(parent, name_start, ends) > PATH_BYTES_MAX:
            raise UsageError(f"a path of more than {PATH_BYTES_MAX} bytes")
        del ends
        fingerprint, slot = self._index()
        shadowed = np.zeros(len(shadowed_entries), layout.SHADOWED)
        shadowed["entry"] = shadowed_entries
        for name, column in data._asdict().items():
            shadowed[name] = column[n:]
        return layout.Columns(
            parent=parent,
            name_start=name_start,
            flags=data.flags[:n],
            size=data.size[:n],
            mtime_ns=data.mtime_ns[:n],
            chunk=data.chunk[:n],
            offset=data.offset[:n],
            stored=data.stored[:n],
            checksum=data.checksum[:n],
            fingerprint=fingerprint,
            slot=slot,
            names=names,
            target_start=target_start,
            targets=targets,
            extents=extents,
            chunk_id=np.frombuffer(b"".join(chunk.id for chunk in self.table), np.uint8),
            chunk_bytes=self.object_bytes,
            shadowed=shadowed,
        )

    def _parent(self) -> layout.U4:
        parent = np.empty(self.count, np.uint32)
        parent[self.kept_index] = self.order.old_index[self.old.parent[self.kept]]
        parent[self.order.new_index] = self.order.folder_index[self.order.new_folder]
        return parent

    def _names(self) -> tuple[layout.U8, layout.Bytes]:
        """The names of the result; those of items are numbered behind the previous ones."""
        plan, order = self.plan, self.order
        made_starts, made = _joined([plan.folders.name[number] for number in order.made])
        row_starts, packed = plan.names.packed()
        del plan.names
        row_starts += len(made)
        starts = np.concatenate([made_starts, row_starts[1:].view(np.uint64)])
        names = np.frombuffer(packed, np.uint8)
        if len(made):
            names = np.concatenate([made, names])
        del row_starts, packed
        self._check_new(starts, names)
        source: Indices = np.empty(self.count, np.int64)
        source[self.kept_index] = self.kept
        source[order.new_index] = order.new_item.astype(np.int64) + self.old_count
        padding = np.frombuffer(layout.NAME_PADDING, np.uint8)
        return _splice((self.old.name_start, self.old.names), (starts, names), source, padding)

    def _check_new(self, starts: layout.U8, names: layout.Bytes) -> None:
        """The rules for names."""
        item = self.order.new_item
        bad = np.concatenate(
            [
                layout.name_faults(names[int(block[0]) : int(block[-1])], block - block[0])
                for first in range(0, len(starts) - 1, _BLOCK)
                for block in (starts[first : first + _BLOCK + 1],)
            ]
            or [np.zeros(0, np.bool_)]
        )
        if bad.any() and bad[item].any():
            at = int(item[bad[item].argmax()])
            name = names[int(starts[at]) : int(starts[at + 1])].tobytes()
            raise UsageError(f"{shown(name)!r} cannot be a component of a path")

    def _index(self) -> tuple[layout.U4, layout.U4]:
        old_fingerprints = np.zeros(self.old_count, np.uint32)
        old_fingerprints[self.old.slot] = self.old.fingerprint
        keys = np.empty(self.count, np.uint64)
        keys[self.kept_index] = old_fingerprints[self.kept]
        keys[self.order.new_index] = self.order.new_hash >> np.uint64(32)
        keys <<= np.uint64(32)
        keys |= np.arange(self.count, dtype=np.uint64)
        keys[1:].sort()
        return (keys[1:] >> np.uint64(32)).astype(np.uint32), keys[1:].astype(np.uint32)

    def _data_source(self) -> tuple[Indices, Indices]:
        """Of each entry, then of each shadowed one, its data (see `Plan`); where the latter are."""
        plan, order = self.plan, self.order
        shadow = [(int(order.old_index[entry]), data) for entry, data in plan.shadow.items()]
        shadow += [(int(order.folder_index[at]), data) for at, data in plan.new_shadow.items()]
        entries, hidden = np.array(sorted(shadow), np.int64).reshape(-1, 2).T
        source: Indices = np.empty(self.count + len(hidden), np.int64)
        source[self.kept_index] = plan.data[self.kept]
        made = len(order.made)
        source[order.new_index] = order.new_item.astype(np.int64) + (plan.first_row - made)
        of_made = np.flatnonzero(order.new_item < made)
        of_folder = np.array([plan.new_data[number] for number in order.made], np.int64)
        source[order.new_index[of_made]] = of_folder[order.new_item[of_made]]
        source[self.count :] = hidden
        return source, entries

    def _data(self, source: Indices) -> tuple[_Data, list[bytes], layout.Records]:
        """The data that `source` says; targets and extents of the rows."""
        records = self.plan.rows.records
        kind = records["kind"]
        links = np.flatnonzero(kind == Kind.LINK)
        many = np.flatnonzero((kind == Kind.FILE) & (records["extents"] > 1))
        tails = [self._tail(i) for i in links.tolist()]
        counts = records["extents"][many].astype(np.int64)
        first_extent = len(self.old.extents) + np.cumsum(counts) - counts
        dtypes = zip(_Data._fields, _DTYPES, strict=True)
        data = _Data(**{name: np.zeros(len(source), dtype) for name, dtype in dtypes})
        for start in range(0, len(source), _BLOCK):
            at = source[start : start + _BLOCK]
            is_row = (at >= self.plan.first_row) & (at < self.plan.implicit)
            shows, hidden = at < self.old_count, (at >= self.old_count) & (at < self.plan.first_row)
            rows = at[is_row] - self.plan.first_row
            new = self._row_data(rows, links, many, first_extent)
            hides = self.old.shadowed[at[hidden] - self.old_count]
            for name, column in data._asdict().items():
                out = column[start : start + _BLOCK]
                out[shows] = getattr(self.old, name)[at[shows]]
                out[hidden] = hides[name]
                out[is_row] = getattr(new, name)
            data.flags[start : start + _BLOCK][at == self.plan.implicit] = layout.IMPLICIT_FOLDER
        return data, tails, self._row_extents(many.tolist())

    def _row_data(
        self, rows: Indices, links: Indices, many: Indices, first_extent: Indices
    ) -> _Data:
        """The data of some rows; `links` and `many` are all rows that are so."""
        records = self.plan.rows.records[rows]
        kind = records["kind"].astype(np.uint32)
        link = kind == Kind.LINK
        has_many = (kind == Kind.FILE) & (records["extents"] > 1)
        one = (kind == Kind.FILE) & ~has_many
        flags = records["mode"].astype(np.uint32) & np.uint32(MODE_MASK)
        flags |= kind << np.uint32(layout.KIND_SHIFT)
        flags[one] |= records["codec"][one].astype(np.uint32) << np.uint32(layout.CODEC_SHIFT)
        flags[has_many] |= np.uint32(layout.MANY)
        size = np.where(kind == Kind.FILE, records["size"], 0)
        size[link] = [len(self._tail(i)) for i in rows[link].tolist()]
        chunk = self.plan.rows.chunk[rows].astype(np.int64) + len(self.old.chunk_bytes)
        at_link = np.searchsorted(links, rows[link])
        chunk[link] = len(self.old.target_start) - 1 + at_link
        chunk[has_many] = first_extent[np.searchsorted(many, rows[has_many])]
        return _Data(
            flags=flags,
            size=size,
            mtime_ns=records["mtime_ns"],
            checksum=np.where(one | link, records["checksum"], 0),
            chunk=chunk.astype(np.uint32),
            offset=np.where(one, records["offset"], np.where(has_many, records["extents"], 0)),
            stored=np.where(one, records["stored"], 0),
        )

    def _tail(self, i: int) -> bytes:
        tail = self.plan.rows.tails.get(i)
        if tail is None:
            raise UsageError(f"the row of {shown(self.plan.rows.path(i))} lacks its tail")
        return tail

    def _row_extents(self, many: list[int]) -> layout.Records:
        """The extents of the rows that have several, in the layout of the file."""
        records = self.plan.rows.records
        for i in many:
            if len(self._tail(i)) != EXTENT.itemsize * int(records["extents"][i]):
                raise UsageError(f"{shown(self.plan.rows.path(i))} lacks some of its extents")
        extents = np.frombuffer(b"".join(map(self._tail, many)), EXTENT)
        result = np.zeros(len(extents), layout.STORED_EXTENT)
        for name in ("start", "size", "checksum", "offset", "stored", "codec"):
            result[name] = extents[name]
        numbers = [self.numbers.get(ChunkId(bytes(id_)), _NO_CHUNK) for id_ in extents["chunk"]]
        result["chunk"] = numbers
        return result

    def _targets(self, data: _Data, tails: list[bytes]) -> tuple[layout.U8, layout.Bytes]:
        link = layout.kinds(data.flags) == Kind.LINK
        source = data.chunk[link].astype(np.int64)
        data.chunk[link] = np.arange(len(source))
        nothing = np.zeros(0, np.uint8)
        return _splice((self.old.target_start, self.old.targets), _joined(tails), source, nothing)

    def _extents(self, data: _Data, data_source: Indices, new: layout.Records) -> layout.Records:
        many = (data.flags & layout.MANY) != 0
        first, counts = data.chunk[many].astype(np.int64), data.offset[many].astype(np.int64)
        starts = np.cumsum(counts) - counts
        data.chunk[many] = starts
        old = self.old.extents.copy()
        old["chunk"] = self._number_of_old[old["chunk"]]
        source = np.repeat(first - starts, counts) + np.arange(counts.sum())
        extents: layout.Records = np.concatenate([old, new])[source]
        lost = np.flatnonzero(extents["chunk"] == _NO_CHUNK)
        if len(lost):
            file = np.searchsorted(starts, lost[0], side="right") - 1
            self._lost_chunk(data_source, np.flatnonzero(many)[file])
        layout.check_extents(extents, starts + counts, counts, data.size[many], self.object_bytes)
        return extents

    def _number_chunks(self, data: _Data, data_source: Indices) -> None:
        of_rows = [self.numbers.get(id_, _NO_CHUNK) for id_ in self.plan.rows.chunks]
        numbers = np.concatenate([self._number_of_old, np.array(of_rows, np.uint32)])
        for start in range(0, len(data_source), _BLOCK):
            here = slice(start, start + _BLOCK)
            flags = data.flags[here]
            one = np.flatnonzero((layout.kinds(flags) == Kind.FILE) & (flags & layout.MANY == 0))
            one += start
            chunk = data.chunk[one]
            if (chunk >= len(numbers)).any():
                raise UsageError("a row names a chunk that it does not have")
            chunk = data.chunk[one] = numbers[chunk]
            lost = np.flatnonzero(chunk == _NO_CHUNK)
            if len(lost):
                self._lost_chunk(data_source, one[lost[0]])
            self._check_places(data, data_source, one)

    def _check_places(self, data: _Data, data_source: Indices, one: Indices) -> None:
        """The rows of the result lie where their chunks can hold them, as all readers demand."""
        new = one[data_source[one] >= self.plan.first_row]
        object_bytes = self.object_bytes[data.chunk[new]]
        places = (layout.codecs(data.flags[new]), data.stored[new], data.size[new])
        wrong = impossible_bodies(*places, data.offset[new], object_bytes)
        if wrong.any():
            path = self._path(int(data_source[new[wrong.argmax()]]))
            raise CorruptError(f"{shown(path)} lies where its chunk cannot hold it")

    def _path(self, data: int) -> bytes:
        """The path of data, numbered as in `Plan`."""
        plan = self.plan
        if data >= plan.first_row:
            return plan.rows.path(data - plan.first_row)
        if data < self.old_count:
            return plan.old.path(data)
        return plan.old.path(int(plan.old.shadowing_folders()[data - self.old_count]))

    def _lost_chunk(self, data_source: Indices, at: np.int64) -> NoReturn:
        path = self._path(int(data_source[at]))
        raise CorruptError(
            f"{shown(path)} lies in a chunk that is not in the dataset's chunk table"
        )

    @cached_property
    def _number_of_old(self) -> layout.U4:
        """Of each number in the previous chunk table the one in the new."""
        numbers = (self.numbers.get(id_, _NO_CHUNK) for id_ in self.plan.old.chunk_ids)
        return np.fromiter(numbers, np.uint32, len(self.plan.old.chunk_ids))


def _joined(items: Sequence[bytes]) -> tuple[layout.U8, layout.Bytes]:
    """Starts (one more than items) and the bytes of all."""
    starts = np.zeros(len(items) + 1, np.uint64)
    np.cumsum(np.fromiter(map(len, items), np.uint64, len(items)), out=starts[1:])
    return starts, np.frombuffer(b"".join(items), np.uint8)


def _splice(
    old: tuple[layout.U8, layout.Bytes],
    new: tuple[layout.U8, layout.Bytes],
    source: Indices,
    behind: layout.Bytes,
) -> tuple[layout.U8, layout.Bytes]:
    """Items of different lengths taken from (old, then new): starts, and bytes of the result with
    others behind it.

    Copies whole runs of items that stay side by side, so the cost is that of the changes.
    """
    count = len(old[0]) - 1
    starts = np.zeros(len(source) + 1, np.uint64)
    lengths = np.concatenate([np.diff(each[0]).astype(np.uint32) for each in (old, new)])
    np.cumsum(lengths[source], dtype=np.uint64, out=starts[1:])
    del lengths
    breaks = np.diff(source, prepend=-2) != 1
    breaks |= source == count
    first = np.flatnonzero(breaks)
    last = np.append(first[1:], len(source)) - 1 if len(first) else first
    parts = []
    for one, other in zip(source[first].tolist(), source[last].tolist(), strict=True):
        (own, blob), base = (old, 0) if one < count else (new, count)
        parts.append(blob[int(own[one - base]) : int(own[other - base + 1])])
    return starts, np.concatenate([*parts, behind])
