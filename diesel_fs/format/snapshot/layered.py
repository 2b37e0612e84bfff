"""A version as a snapshot and deltas above it, without merging them. Any thread.

A put of few files, or `dlcmd ls` of one folder, asks for few entries of millions. A
`LayeredSnapshot` looks them up in the snapshot below and in the rows of the deltas. Its indices are
those of the merged snapshot: an entry of the snapshot below moves by the number of entries that
were inserted before it, less those that were removed. The first use of a column merges, and so do
many lookups.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from ...errors import CorruptError
from ..entries import EXTENT, MODE_MASK, ROOT, ChunkId, Kind, Stat
from . import layout as layout
from .build import plan_merge
from .delta import (
    Delta,
    apply_deltas,
    check_order,
    check_rows,
    chunks_after,
    merged_rows,
    refusing,
)
from .reader import ROOT_HASH, ROOT_INDEX, ChunkIds, Extent, Indices, PlainExtent, Snapshot

_LOOKUPS_MAX = 1 << 15
"""Lookups by layers: each takes some microseconds, a merge about 0.15 s for a million entries."""

_LOOKUPS_AT_ONCE_MAX = 1 << 10
_KINDS = tuple(Kind)


class LayeredSnapshot(Snapshot):
    """Holds `base` and `deltas`, as `apply_deltas` takes them. All that this class does not define
    comes from the merged snapshot."""

    def __init__(self, base: Snapshot, deltas: Sequence[Delta]) -> None:
        """Raises CorruptError if the deltas do not fit."""
        check_order(base, deltas)
        header = deltas[-1].header
        self._base, self._deltas = base, deltas
        self.identity, self.dataset, self.version = header.identity, header.dataset, header.version
        self.digest = header.digest
        table = sorted(chunks_after(base, deltas))
        self.chunk_count = len(table)
        self.chunk_ids = ChunkIds(np.frombuffer(b"".join(each.id for each in table), np.uint8))
        self.chunk_sizes = np.array([each.object_bytes for each in table], np.uint64)
        self._rows = merged_rows([delta.rows for delta in deltas])
        with refusing(self.version):
            self._plan, order = plan_merge(base, self._rows)
            check_rows(self._rows, table)
        if self._plan.rows_digest() != header.rows_digest:
            raise CorruptError(f"the rows of version {self.version} do not match its digest")
        self.entry_count = base.entry_count - len(order.removed) + len(order.new_index)
        self._folder_of_path = {ROOT: (ROOT_INDEX, ROOT_HASH)}
        self._hash_of_folder = {ROOT_INDEX: ROOT_HASH}
        self._asked = 0
        self._removed: list[int] = order.removed.tolist()
        kept_before = order.removed - np.arange(len(order.removed))
        self._kept_before: list[int] = kept_before.tolist()
        self._places: list[int] = order.places.tolist()
        self._new_index: list[int] = order.new_index.tolist()
        self._new_folder: list[int] = order.folder_index[order.new_folder].tolist()  # ascending
        self._new_item: list[int] = order.new_item.tolist()
        self._made = order.made
        self._folder_index = order.folder_index
        self._changed: dict[int, int] = dict(
            zip(*(each.tolist() for each in self._plan.changed), strict=True)
        )
        self._new_child: dict[tuple[int, bytes], int] = {
            (folder, self._new_name(j)): self._new_index[j]
            for j, folder in enumerate(self._new_folder)
        }

    def __getattr__(self, name: str) -> object:
        if name == "merged":  # while it is being made
            raise AttributeError(name)
        return getattr(self.merged, name)

    @cached_property
    def merged(self) -> Snapshot:
        parts = apply_deltas(self._base, self._deltas)
        return Snapshot(memoryview(b"".join(parts)), verify=False)

    @cached_property
    def rows_digest(self) -> layout.RowsDigest:
        return self._deltas[-1].header.rows_digest

    # One entry

    def _below(self, i: int) -> int:
        """The entry of the base, or -1 - j for the j-th new one. Raises IndexError."""
        self._check(i)
        j = bisect_left(self._new_index, i)
        if j < len(self._new_index) and self._new_index[j] == i:
            return -1 - j
        kept = i - j
        return kept + bisect_right(self._kept_before, kept)

    def _above(self, old: int) -> int:
        """The index of an entry of the base that is not removed."""
        return old - bisect_left(self._removed, old) + bisect_right(self._places, old)

    def _is_merged(self) -> bool:
        """Counts a lookup. Merges if there are many."""
        self._asked += 1
        if self._asked > _LOOKUPS_MAX:
            _ = self.merged
        return "merged" in self.__dict__

    def _new_name(self, j: int) -> bytes:
        item = self._new_item[j]
        if item < len(self._made):
            return self._plan.folders.name[self._made[item]]
        return self._rows.names[item - len(self._made)]

    def _data(self, below: int) -> int:
        """The number of the entry's data in the plan of the merge."""
        if below >= 0:
            return self._changed.get(below, below)
        item, made = self._new_item[-1 - below], len(self._made)
        if item < made:
            return self._plan.new_data[self._made[item]]
        return self._plan.first_row + item - made

    def _row(self, data: int) -> int:
        """The row, or -1 if the data are the base's, or an implicit folder's."""
        is_row = self._plan.first_row <= data < self._plan.implicit
        return data - self._plan.first_row if is_row else -1

    def _attributes(self, i: int) -> Stat:
        data = self._data(self._below(i))
        if data < self._base.entry_count:
            return self._base.stat(data)
        if data == self._plan.implicit:
            return Stat(Kind.FOLDER, 0o755, 0, 0)
        row = self._row(data)
        if row < 0:
            hidden = self._base.columns.shadowed[data - self._base.entry_count]
            flags = int(hidden["flags"])
            kind = _KINDS[flags >> layout.KIND_SHIFT & 3]
            return Stat(kind, flags & MODE_MASK, int(hidden["size"]), int(hidden["mtime_ns"]))
        record = self._rows.records[row]
        kind = _KINDS[int(record["kind"])]
        size = int(record["size"]) if kind == Kind.FILE else len(self._rows.tails.get(row, b""))
        return Stat(kind, int(record["mode"]) & MODE_MASK, size, int(record["mtime_ns"]))

    def stat(self, i: int) -> Stat:
        return self.merged.stat(i) if self._is_merged() else self._attributes(i)

    def _kind(self, i: int) -> int:
        return self.merged._kind(i) if self._is_merged() else self._attributes(i).kind

    def size(self, i: int) -> int:
        return self.merged.size(i) if self._is_merged() else self._attributes(i).size

    def name(self, i: int) -> bytes:
        if self._is_merged():
            return self.merged.name(i)
        below = self._below(i)
        return self._base.name(below) if below >= 0 else self._new_name(-1 - below)

    def parent(self, i: int) -> int:
        if self._is_merged():
            return self.merged.parent(i)
        below = self._below(i)
        if below < 0:
            return self._new_folder[-1 - below]
        return self._above(self._base.parent(below))

    def _up(self, i: int) -> int:
        parent = self.parent(i)
        if parent >= i:
            self._damaged(i)
        return parent

    def children(self, i: int) -> range:
        if self._is_merged() or self._kind(i) != Kind.FOLDER:
            return self.merged.children(i) if self._is_merged() else range(0)
        first = bisect_left(self._new_folder, i)
        new = bisect_right(self._new_folder, i) - first
        below = self._below(i)
        inside = self._base.children(below) if below >= 0 else range(0)
        removed = bisect_left(self._removed, inside.start)
        count = new + len(inside) - (bisect_left(self._removed, inside.stop) - removed)
        if len(inside):
            start = inside.start - removed + first
        elif new:
            start = self._new_index[first]
        else:  # an empty folder: the merge knows where a first child would be
            return self.merged.children(i)
        return range(start, start + count)

    def walk(self, i: int) -> Indices:
        if self._is_merged() or self._kind(i) == Kind.FOLDER:
            return self.merged.walk(i)
        return np.array([i], np.int64)

    def paths(self, entries: Sequence[int] | Indices) -> list[bytes]:
        if self._is_merged() or len(entries) > _LOOKUPS_AT_ONCE_MAX:
            return self.merged.paths(entries)
        return [self.path(int(i)) for i in entries]

    def find_many(self, folders: Indices, hashes: layout.U8, names: Sequence[bytes]) -> Indices:
        if self._is_merged() or len(names) > _LOOKUPS_AT_ONCE_MAX:
            return self.merged.find_many(folders, hashes, names)
        each = zip(folders.tolist(), hashes.tolist(), names, strict=True)
        return np.fromiter((self._find(*one) for one in each), np.int64, len(names))

    def shadowing_folders(self) -> Indices:
        old = (self._above(entry) for entry in self._plan.shadow)
        new = (int(self._folder_index[number]) for number in self._plan.new_shadow)
        return np.array(sorted((*old, *new)), np.int64)

    def link(self, i: int) -> bytes:
        if self._is_merged():
            return self.merged.link(i)
        data = self._data(self._below(i))
        if data < self._base.entry_count:
            return self._base.link(data)
        if self._attributes(i).kind != Kind.LINK:
            raise ValueError(f"entry {i} is no link")
        row = self._row(data)
        return self._rows.tails[row] if row >= 0 else self.merged.link(i)

    def extents(self, i: int, start: int = 0, end: int | None = None) -> tuple[Extent, ...]:
        data = self._data(self._below(i))
        row = self._row(data)
        if self._is_merged() or (row < 0 and data >= self._base.entry_count):
            return self.merged.extents(i, start, end)
        if row < 0:
            ids = self._base.chunk_ids
            below = self._base.extents(data, start, end)
            return tuple(each._replace(chunk=self._number(ids[each.chunk])) for each in below)
        found = self._extents_of_row(row)
        stop = self._attributes(i).size if end is None else end
        if len(found) == 1:
            return found if start < found[0].size else ()
        return tuple(each for each in found if each.start < stop and each.start + each.size > start)

    def _extents_of_row(self, row: int) -> tuple[Extent, ...]:
        record = self._rows.records[row]
        if record["kind"] != Kind.FILE or not record["size"]:
            return ()
        order = ("offset", "stored", "codec", "checksum")
        if record["extents"] <= 1:
            chunk = self._number(self._rows.chunks[self._rows.chunk[row]])
            offset, stored, codec, checksum = (int(record[name]) for name in order)
            return (Extent(chunk, offset, stored, codec, checksum, 0, int(record["size"])),)
        extents = np.frombuffer(self._rows.tails[row], EXTENT)
        chunks = (self._number(ChunkId(bytes(each))) for each in extents["chunk"].tolist())
        columns = (extents[name].tolist() for name in (*order, "start", "size"))
        return tuple(map(Extent, chunks, *columns))

    def _number(self, chunk: ChunkId) -> int:
        return bisect_left(self.chunk_ids, chunk)

    def plain_extent(self, i: int) -> PlainExtent | None:
        return self.merged.plain_extent(i)

    def _find(self, folder: int, hash_: int, name: bytes) -> int:
        if self._is_merged():
            return self.merged._find(folder, hash_, name)
        if folder < 0:
            return -1
        new = self._new_child.get((folder, name))
        if new is not None:
            return new
        below = self._below(folder)
        found = self._base._find(below, hash_, name) if below >= 0 else -1
        at = bisect_left(self._removed, found)
        if found < 0 or (at < len(self._removed) and self._removed[at] == found):
            return -1
        return self._above(found)
