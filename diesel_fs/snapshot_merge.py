"""Making a snapshot: the previous one (or none) and changed rows become the next one.

Owned here: the columns of the result, and the rules for names and tails of rows. Not owned: which
entries there are and in which order (`snapshot_plan.py`), the layout (`snapshot_layout.py`). Pure.
The result depends on the state alone, never on the way to it: a merge gives the same bytes as a
full build.

A **source** is an array that says for each item of a result which item of (previous items, then new
ones) it is; each column is one take by a source.
"""

import operator
from collections.abc import Sequence
from functools import cached_property
from itertools import compress, count
from typing import NamedTuple, NoReturn, TypeVar
from uuid import UUID

import numpy as np
import numpy.typing as npt

from . import snapshot_layout as layout
from .entries import (
    EXTENT,
    MODE_MASK,
    PATH_BYTES_MAX,
    ChunkId,
    ChunkInfo,
    Kind,
    Rows,
    check_dataset_name,
    shown,
)
from .errors import CorruptError, UsageError
from .snapshot import Indices, Snapshot
from .snapshot_plan import Folders, Order, Plan, order_of

_Item = TypeVar("_Item", np.uint32, np.uint64, np.int64)
_NO_CHUNK = 0xFFFFFFFF


def merge(
    previous: Snapshot | None,
    rows: Rows,
    chunks: Sequence[ChunkInfo],
    *,
    identity: UUID,
    dataset: str,
    version: int,
    digest: int,
) -> Sequence[memoryview]:
    """The next snapshot, as parts to be written one behind the other.

    `rows` replace, insert or (TOMBSTONE) remove entries of `previous`; `chunks` is the whole chunk
    table, in any order. A row of the root's own path, `b""`, gives its mode and time. Raises
    UsageError for rows that are no entries, CorruptError for a file whose chunk is not in `chunks`.
    """
    check_dataset_name(dataset)
    if previous is not None and previous.identity != identity:
        raise UsageError(f"the previous snapshot is of {previous.identity}, not of {identity}")
    old = previous if previous is not None else _empty(identity, dataset)
    table = sorted(chunks)
    if len({chunk.id for chunk in table}) != len(table):
        raise UsageError("a chunk stands twice in the chunk table")
    plan = Plan(old, rows, Folders(old, rows))
    columns = _Assembly(plan, order_of(plan), table).columns()
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


class _Assembly:
    """The columns of the result, each by one take from (previous items, new ones)."""

    def __init__(self, plan: Plan, order: Order, table: Sequence[ChunkInfo]) -> None:
        self.plan, self.order, self.table = plan, order, table
        self.old, self.old_count = plan.old.columns, plan.old.entry_count
        self.numbers = {chunk.id: number for number, chunk in enumerate(table)}
        self.kept = np.flatnonzero(~plan.removed)
        self.kept_index = order.old_index[self.kept]
        self.count = len(self.kept) + len(order.new_names)
        self.source: Indices = np.empty(self.count, np.int64)
        """Of each entry: its old index, or the old count plus its position among the new."""
        self.source[self.kept_index] = self.kept
        self.source[order.new_index] = self.old_count + np.arange(len(order.new_names))

    def columns(self) -> layout.Columns:
        """All sections."""
        parent = self._parent()
        name_start, names = self._names()
        fingerprint, slot = self._index()
        data_source, shadowed_entries = self._data_source()
        own, tails, extents = self._row_data()
        data = self._taken(own, data_source)
        target_start, targets = self._targets(data, tails)
        extents = self._extents(data, data_source, extents)
        self._number_chunks(data, data_source)
        n = self.count
        folders = np.flatnonzero(layout.kinds(data.flags[:n]) == Kind.FOLDER)
        held = np.bincount(parent[1:], minlength=n)
        data.offset[folders] = held[folders]
        ends = 1 + np.cumsum(held)
        data.chunk[folders] = (ends - held)[folders]
        if layout.longest_path_bytes(parent, name_start, ends) > PATH_BYTES_MAX:
            raise UsageError(f"a path of more than {PATH_BYTES_MAX} bytes")
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
            chunk_bytes=np.array([chunk.object_bytes for chunk in self.table], np.uint64),
            shadowed=shadowed,
        )

    def _taken(self, rows: _Data, source: Indices) -> _Data:
        """Column by column, out of the previous snapshot's data and then that of the rows."""
        shows, hidden = self.old, self.old.shadowed

        def column(
            name: str, was: npt.NDArray[_Item], new: npt.NDArray[_Item]
        ) -> npt.NDArray[_Item]:
            return np.concatenate([was, hidden[name].astype(was.dtype), new])[source]

        return _Data(
            flags=column("flags", shows.flags, rows.flags),
            size=column("size", shows.size, rows.size),
            mtime_ns=column("mtime_ns", shows.mtime_ns, rows.mtime_ns),
            checksum=column("checksum", shows.checksum, rows.checksum),
            chunk=column("chunk", shows.chunk, rows.chunk),
            offset=column("offset", shows.offset, rows.offset),
            stored=column("stored", shows.stored, rows.stored),
        )

    def _parent(self) -> layout.U4:
        parent = np.empty(self.count, np.uint32)
        parent[self.kept_index] = self.order.old_index[self.old.parent[self.kept]]
        parent[self.order.new_index] = self.order.folder_index[self.order.new_folder]
        return parent

    def _names(self) -> tuple[layout.U8, layout.Bytes]:
        new = _joined(self.order.new_names)
        self._check_new(*new)
        starts, names = _splice((self.old.name_start, self.old.names), new, self.source)
        return starts, np.concatenate([names, np.frombuffer(layout.NAME_PADDING, np.uint8)])

    def _check_new(self, starts: layout.U8, names: layout.Bytes) -> None:
        """The rules for names, and no path twice."""
        order = self.order
        bad = layout.name_faults(names, starts)
        if bad.any():
            name = order.new_names[int(bad.argmax())]
            raise UsageError(f"{shown(name)!r} cannot be a component of a path")
        for i in compress(count(), map(operator.eq, order.new_names, order.new_names[1:])):
            if order.new_folder[i] == order.new_folder[i + 1]:
                raise UsageError(f"a path stands twice: its last part is {order.new_names[i]!r}")

    def _index(self) -> tuple[layout.U4, layout.U4]:
        old = np.zeros(self.old_count, np.uint64)
        old[self.old.slot] = self.old.fingerprint
        new = self.order.new_hash >> np.uint64(32)
        keys = np.concatenate([old, new])[self.source] << np.uint64(32)
        keys |= np.arange(self.count, dtype=np.uint64)
        keys = np.sort(keys[1:])
        return (keys >> np.uint64(32)).astype(np.uint32), keys.astype(np.uint32)

    def _data_source(self) -> tuple[Indices, Indices]:
        """Of each entry, then of each shadowed one, its data (see `Plan`); where the latter are."""
        plan, order = self.plan, self.order
        shows = np.empty(self.count, np.int64)
        shows[self.kept_index] = plan.data[self.kept]
        shows[order.new_index] = order.new_data
        shadow = [(int(order.old_index[entry]), data) for entry, data in plan.shadow.items()]
        shadow += [(int(order.folder_index[at]), data) for at, data in plan.new_shadow.items()]
        entries, hidden = np.array(sorted(shadow), np.int64).reshape(-1, 2).T
        return np.concatenate([shows, hidden]), entries

    def _row_data(self) -> tuple[_Data, list[bytes], layout.Records]:
        """The data of the rows, and last of an implicit folder; targets and extents of the rows."""
        rows = self.plan.rows
        records, kind = rows.records, rows.records["kind"].astype(np.uint32)
        link = kind == Kind.LINK
        many = (kind == Kind.FILE) & (records["extents"] > 1)
        one = (kind == Kind.FILE) & ~many
        tails = [self._tail(i) for i in np.flatnonzero(link).tolist()]
        flags = records["mode"].astype(np.uint32) & np.uint32(MODE_MASK)
        flags |= kind << np.uint32(layout.KIND_SHIFT)
        flags[one] |= records["codec"][one].astype(np.uint32) << np.uint32(layout.CODEC_SHIFT)
        flags[many] |= np.uint32(layout.MANY)
        size = np.where(kind == Kind.FILE, records["size"], 0)
        size[link] = np.fromiter(map(len, tails), np.uint64, len(tails))
        counts = np.where(many, records["extents"], 0).astype(np.int64)
        chunk = rows.chunk.astype(np.int64) + len(self.old.chunk_bytes)
        chunk[link] = len(self.old.target_start) - 1 + np.arange(len(tails))
        chunk[many] = (len(self.old.extents) + np.cumsum(counts) - counts)[many]
        data = _Data(
            flags=np.append(flags, np.uint32(layout.IMPLICIT_FOLDER)),
            size=np.append(size, np.uint64(0)),
            mtime_ns=np.append(records["mtime_ns"], np.int64(0)),
            checksum=np.append(np.where(one | link, records["checksum"], 0), np.uint64(0)),
            chunk=np.append(chunk.astype(np.uint32), np.uint32(0)),
            offset=np.append(
                np.where(one, records["offset"], counts).astype(np.uint32), np.uint32(0)
            ),
            stored=np.append(np.where(one, records["stored"], 0), np.uint32(0)),
        )
        return data, tails, self._row_extents(np.flatnonzero(many).tolist())

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
        return _splice((self.old.target_start, self.old.targets), _joined(tails), source)

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
        layout.check_extents(extents, starts + counts, counts, data.size[many], len(self.table))
        return extents

    def _number_chunks(self, data: _Data, data_source: Indices) -> None:
        one = (layout.kinds(data.flags) == Kind.FILE) & ((data.flags & layout.MANY) == 0)
        of_rows = [self.numbers.get(id_, _NO_CHUNK) for id_ in self.plan.rows.chunks]
        numbers = np.concatenate([self._number_of_old, np.array(of_rows, np.uint32)])
        if (data.chunk[one] >= len(numbers)).any():
            raise UsageError("a row names a chunk that it does not have")
        data.chunk[one] = numbers[data.chunk[one]]
        lost = np.flatnonzero(one & (data.chunk == _NO_CHUNK))
        if len(lost):
            self._lost_chunk(data_source, lost[0])

    def _lost_chunk(self, data_source: Indices, at: np.int64) -> NoReturn:
        plan, data = self.plan, int(data_source[at])
        if data >= plan.first_row:
            path = plan.rows.path(data - plan.first_row)
        elif data < self.old_count:
            path = plan.old.path(data)
        else:
            path = plan.old.path(int(plan.old.shadowed()[data - self.old_count]))
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
    old: tuple[layout.U8, layout.Bytes], new: tuple[layout.U8, layout.Bytes], source: Indices
) -> tuple[layout.U8, layout.Bytes]:
    """Items of different lengths taken from (old, then new): starts and bytes of the result.

    Copies whole runs of items that stay side by side, so the cost is that of the changes.
    """
    count = len(old[0]) - 1
    lengths = np.concatenate([np.diff(old[0]), np.diff(new[0])])[source]
    starts = np.zeros(len(source) + 1, np.uint64)
    np.cumsum(lengths, out=starts[1:])
    breaks = np.diff(source, prepend=-2) != 1
    breaks |= source == count
    first = np.flatnonzero(breaks)
    last = np.append(first[1:], len(source)) - 1 if len(first) else first
    parts = []
    for one, other in zip(source[first].tolist(), source[last].tolist(), strict=True):
        (own, blob), base = (old, 0) if one < count else (new, count)
        parts.append(blob[int(own[one - base]) : int(own[other - base + 1])])
    return starts, np.concatenate(parts) if parts else np.zeros(0, np.uint8)
