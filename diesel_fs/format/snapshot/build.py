"""Builds the next snapshot from the previous one (or none) and changed rows (FORMAT.md, section 7).
Any thread.

A **row** is one changed entry (`Rows` in `format/entries.py`): new, replaced, or a tombstone.
`MergePlan` decides which entry is visible at each path, `EntryOrder` gives each entry its
position, and `_Assembly` makes the columns of the result. `layout.py` defines implicit folders and
shadowed entries.

A merge gives the same bytes as a full build. Surviving entries keep their relative order (by depth,
folder and name), so new ones are inserted among them. Python code runs once per changed row and per
folder that holds one; all other entries stay in arrays.

A **source** is an array that has, for each item of a result, the number of its origin among
(previous items, then new ones); each column of the result is one `take` by a source.
"""

import operator
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, compress, islice, pairwise, repeat
from types import MappingProxyType
from typing import NamedTuple, NoReturn
from uuid import UUID

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from ...errors import CorruptError, UsageError
from ...names import check_dataset_name, shown
from ..chunk import PREAMBLE_BYTES, impossible_bodies
from ..chunk_id import chunk_id_text
from ..entries import EXTENT, MODE_MASK, PATH_BYTES_MAX, ChunkId, ChunkInfo, Kind, Names, Rows
from . import layout
from .entry_digest import EntryDigest, check_entry_digests
from .reader import ROOT_HASH, ROOT_INDEX, Indices, Snapshot
from .rows_digest import digest_of_entries, digest_of_rows

_NO_CHUNK = 0xFFFFFFFF
_FEW_NEW = 1 << 6  # fewer new entries than this part of all are put into the index one by one
_BLOCK = 1 << 18  # entries per step, if several columns are made
_BLOCK_ROWS = 1 << 16  # rows whose names are Python objects at a time


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
    """Return the next snapshot, as buffers to write. `rows` replace, insert or (TOMBSTONE) remove
    entries of `previous`; a row of `b""` sets the root's mode and time. `chunks` has all chunks of
    the new version. `version` and `digest` (of the chunks' IDs) are the head's. The files of each
    chunk in `entry_digests` are compared with its digest. Raises UsageError for an impossible row,
    and CorruptError for a file in a chunk outside `chunks` or with another digest. A caller with
    many rows should keep no reference to them: they are freed on the way."""
    check_dataset_name(dataset)
    if previous is not None and previous.identity != identity:
        raise UsageError(f"the previous snapshot is of {previous.identity}, not of {identity}")
    old = previous if previous is not None else _empty(identity, dataset)
    table = sorted(chunks)
    if len({chunk.id for chunk in table}) != len(table):
        raise UsageError("the chunk table holds a chunk twice")
    plan = MergePlan(old, rows, _ChangedFolders(old, rows))
    del rows
    rows_digest = plan.rows_digest()
    order = _order_of(plan)
    del plan.hash, plan.ascends, plan.new_rows  # the order replaces them
    columns = _Assembly(plan, order, table).columns()
    del plan, order
    check_entry_digests(columns, entry_digests)
    header = layout.header_of(columns, identity, dataset, version, digest, rows_digest)
    return layout.write(header, columns)


def plan_merge(previous: Snapshot, rows: Rows) -> tuple["MergePlan", "EntryOrder"]:
    """The entries that a merge changes, and their positions. Costs nothing for the others. Raises
    UsageError, CorruptError as `build_snapshot`, except for places and the lengths of paths."""
    plan = MergePlan(previous, rows, _ChangedFolders(previous, rows))
    return plan, _order_of(plan)


def _empty(identity: UUID, dataset: str) -> Snapshot:
    """A snapshot with only an implicit root folder."""
    one_each = ("parent", "flags", "size", "mtime_ns", "chunk", "offset", "stored", "checksum")
    lengths = dict.fromkeys((*one_each, "target_start"), 1)
    lengths |= {"name_start": 2, "names": len(layout.NAME_PADDING)}
    dtypes = zip(layout.SnapshotColumns._fields, layout.DTYPES, strict=True)
    columns = layout.SnapshotColumns(
        *(np.zeros(lengths.get(name, 0), dtype) for name, dtype in dtypes)
    )
    columns.flags[0] = layout.IMPLICIT_FOLDER
    columns.chunk[0] = 1  # where its first child would be
    header = layout.header_of(columns, identity, dataset, 0, 0, layout.NO_ROWS)
    parts = layout.write(header, columns)
    return Snapshot(b"".join(parts), verify=False)


class _ChangedFolders:
    """The folders that hold changed rows, and all folders above, in directory order. A folder's
    **number** is its position in that order. Each is stored as (parent's number, name), since whole
    paths of deep folders would take memory by the square of the depth. `parent`, `name`, `hash` and
    `old_index` (in the previous snapshot, or -1) are by number; `of_row` has each row's folder."""

    def __init__(self, old: Snapshot, rows: Rows) -> None:
        ids: dict[tuple[int, bytes], int] = {}  # by (ID of the parent, name)
        levels = [0]
        id_of_row_folder = np.zeros(len(rows.folders), np.int64)
        is_used = np.zeros(len(rows.folders), np.bool_)
        is_used[rows.folder] = True
        for used in np.flatnonzero(is_used).tolist():
            path, folder = rows.folders[used], 0
            if len(path) > PATH_BYTES_MAX:
                raise UsageError(f"a path of more than {PATH_BYTES_MAX} bytes")
            for name in path.split(b"/") if path else ():
                level = levels[folder] + 1
                folder = ids.setdefault((folder, name), len(levels))
                if folder == len(levels):
                    levels.append(level)
            id_of_row_folder[used] = folder
        self._sort(ids, levels)
        self.of_row: layout.U4 = self._rank[id_of_row_folder].astype(np.uint32)[rows.folder]
        self.number = {
            (int(self._rank[parent]), name): int(self._rank[at])
            for (parent, name), at in ids.items()
        }
        self.old_index, self.hash = [ROOT_INDEX], [ROOT_HASH]
        for parent, name in zip(self.parent[1:], self.name[1:], strict=True):
            self.hash.append(xxh3_64_intdigest(name, self.hash[parent]))
            above = self.old_index[parent]
            self.old_index.append(old.child(above, name) if above >= 0 else -1)

    def _sort(self, ids: dict[tuple[int, bytes], int], levels: list[int]) -> None:
        """Number the folders in directory order. `ids` maps (parent's ID, name) to an ID, in the
        order of rows; `levels` has the depths by ID."""
        self._rank = np.zeros(len(levels), np.int64)
        self.parent, self.name = [0], [b""]
        of_level: defaultdict[int, list[tuple[int, bytes, int]]] = defaultdict(list)
        for (parent, name), at in ids.items():
            of_level[levels[at]].append((parent, name, at))
        for _, level in sorted(of_level.items()):
            ranked = sorted((int(self._rank[parent]), name, at) for parent, name, at in level)
            for parent, name, at in ranked:
                self._rank[at] = len(self.name)
                self.parent.append(parent)
                self.name.append(name)

    def __len__(self) -> int:
        return len(self.name)


class MergePlan:
    """Which entry is visible at each path, which are removed, which are new. An entry's attributes
    without its name are its **data**, numbered: first the previous snapshot's visible entries, then
    its shadowed ones, then the rows, and last one number for all implicit folders. Takes memory and
    time for the rows only, not for the previous snapshot."""

    def __init__(self, old: Snapshot, rows: Rows, folders: _ChangedFolders) -> None:
        self.old, self.rows, self.folders = old, rows, folders
        self.names = Names.of(rows.names)
        self.first_row = old.entry_count + len(old.columns.shadowed)
        self.implicit = self.first_row + len(rows)
        self._changed: list[tuple[Indices, Indices]] = []  # previous entries, their data now
        self._removed: list[Indices] = []
        self.shadow: dict[int, int] = {
            entry: old.entry_count + j for j, entry in enumerate(old.shadowing_folders().tolist())
        }
        """Data that each previous folder shadows now."""
        self.new_shadow: dict[int, int] = {}
        """Data that each new folder shadows."""
        self.entry_changes = np.zeros(len(folders), np.int64)
        """The change of each folder's number of entries."""
        self.new_data: dict[int, int] = {}
        """Data of each new folder."""
        self.new_rows: Indices
        """Rows that become new entries, ascending; without those of `_ChangedFolders`."""
        self._replaced: list[tuple[Indices, layout.U8]] = []  # data of old rows, hashes of paths
        self._root_row = -1
        self._check_rows()
        self._hash_names()
        own_row = self._rows_of_folders()
        self._plan_leaves(own_row)
        self._plan_folders(own_row)

    def _check_rows(self) -> None:
        records, rows = self.rows.records, self.rows
        kind = records["kind"]
        wrong = (kind > Kind.TOMBSTONE) | (records["codec"] > 1)
        wrong |= (kind == Kind.FILE) & (records["size"] >= 1 << 63)
        if wrong.any():
            i = int(wrong.argmax())
            raise UsageError(f"the row of {shown(rows.path(i))} has an impossible record")
        if len(rows) and int(rows.chunk.max()) >= len(rows.chunks):
            raise UsageError("a row names a chunk that it does not have")
        many = (kind == Kind.FILE) & (records["extents"] > 1)
        for i in np.flatnonzero(many | (kind == Kind.LINK)).tolist():
            tail = rows.tails.get(i)
            if tail is None:
                raise UsageError(f"the row of {shown(rows.path(i))} lacks its tail")
            if many[i] and len(tail) != EXTENT.itemsize * int(records["extents"][i]):
                raise UsageError(f"{shown(rows.path(i))} lacks some of its extents")

    def _hash_names(self) -> None:
        """Hash each row's path, and compare its name with the next's. Works in blocks, so that few
        names are Python objects at a time."""
        count, folders = len(self.rows), self.folders
        self.hash = np.zeros(count, np.uint64)
        self.ascends: layout.Mask = np.zeros(count, np.bool_)
        for start in range(0, count, _BLOCK_ROWS):
            names = [*self.names[start : start + _BLOCK_ROWS + 1]]
            block = slice(start, min(start + _BLOCK_ROWS, count))
            first, counts = _runs(folders.of_row[block])
            seeds = map(folders.hash.__getitem__, folders.of_row[block][first].tolist())
            seed_of_each = chain.from_iterable(map(repeat, seeds, counts.tolist()))
            size = block.stop - start
            self.hash[block] = np.fromiter(
                map(xxh3_64_intdigest, names, seed_of_each), np.uint64, size
            )
            followed = len(names) - 1
            self.ascends[start : start + followed] = np.fromiter(
                map(operator.lt, names, islice(names, 1, None)), np.bool_, followed
            )

    def _rows_of_folders(self) -> dict[int, int]:
        """The row of each changed folder that has one, by the folder's number."""
        folders = self.folders
        wanted = np.sort(np.array(folders.hash, np.uint64))
        has_prefix = np.zeros(1 << 16, np.bool_)  # a filter that one row in thousands passes
        has_prefix[wanted >> np.uint64(48)] = True
        likely = np.flatnonzero(has_prefix[self.hash >> np.uint64(48)])
        at = np.searchsorted(wanted, self.hash[likely])
        likely = likely[wanted[np.minimum(at, len(wanted) - 1)] == self.hash[likely]]
        own_row = dict[int, int]()
        for i in np.union1d(likely, self.names.empty_ones()).tolist():
            folder, name = int(folders.of_row[i]), self.names[i]
            number = folders.number.get((folder, name)) if name or folder else 0
            if number is not None:
                if number in own_row:
                    raise UsageError(f"two rows have one path: {shown(self.rows.path(i))}")
                own_row[number] = i
        self._root_row = own_row.get(0, -1)
        return own_row

    def _plan_leaves(self, own_row: dict[int, int]) -> None:
        """Plan the rows that are not in `own_row`: they change nothing below their paths."""
        old, rows, folders = self.old, self.rows, self.folders
        leaf = np.ones(len(rows), np.bool_)
        leaf[list(own_row.values())] = False
        if old.entry_count == 1:  # only the root, which has a row in `own_row`
            self.new_rows = np.flatnonzero(leaf & (rows.records["kind"] != Kind.TOMBSTONE))
            counted = folders.of_row[self.new_rows]
            self.entry_changes += np.bincount(counted, minlength=len(folders))
            return
        leaf_rows = np.flatnonzero(leaf)
        folder = folders.of_row[leaf_rows].astype(np.int64)
        above = np.array(folders.old_index, np.int64)[folder]
        names = self.names
        if own_row:
            names = Names.of(compress(names, leaf.tolist()))
        at = old.find_many(above, self.hash[leaf_rows], names)
        kind = rows.records["kind"][leaf_rows]
        is_new, exists = (at < 0) & (kind != Kind.TOMBSTONE), at >= 0
        self.new_rows = leaf_rows[is_new]
        self._note_replaced(at[exists], self.hash[leaf_rows[exists]])
        is_removed = self._change(at[exists], leaf_rows[exists], kind[exists])
        removed_from = folder[exists][is_removed]
        self.entry_changes += np.bincount(folder[is_new], minlength=len(folders))
        self.entry_changes -= np.bincount(removed_from, minlength=len(folders))

    def _change(self, at: Indices, row: Indices, kind: npt.NDArray[np.uint8]) -> layout.Mask:
        """Returns which of the entries `at` are removed."""
        if len(np.unique(at)) != len(at):
            raise UsageError("two rows have one path")
        is_folder = layout.kinds(self.old.columns.flags[at]) == Kind.FOLDER
        has_children = is_folder & (self.old.columns.offset[at] > 0)
        is_tombstone = kind == Kind.TOMBSTONE
        is_removed: layout.Mask = ~has_children & is_tombstone
        self._removed.append(at[is_removed])
        is_visible = ~is_tombstone & (~has_children | (kind == Kind.FOLDER))
        self._changed.append((at[is_visible], self.first_row + row[is_visible]))
        becomes_implicit = at[has_children & ~is_visible]
        self._changed.append((becomes_implicit, np.full(len(becomes_implicit), self.implicit)))
        for entry in at[has_children].tolist():
            self.shadow.pop(entry, None)
        hidden = has_children & ~is_tombstone & ~is_visible
        for entry, i in zip(at[hidden].tolist(), row[hidden].tolist(), strict=True):
            self.shadow[entry] = self.first_row + i
        return is_removed

    def _plan_folders(self, own_row: dict[int, int]) -> None:
        """The deepest come first, since an implicit folder goes with its last entry."""
        old, folders, changes = self.old, self.folders, self.entry_changes
        kinds = self.rows.records["kind"]
        for number in range(len(folders) - 1, -1, -1):
            at = folders.old_index[number]
            own, own_kind = self._own(at)
            if number in own_row:
                if own >= 0:
                    replaced = np.array([own]), np.array([folders.hash[number]], np.uint64)
                    self._replaced.append(replaced)
                own = self.first_row + own_row[number]
                own_kind = Kind(kinds[own_row[number]])
                own = -1 if own_kind == Kind.TOMBSTONE else own
            count = int(changes[number]) + (len(old.children(at)) if at >= 0 else 0)
            exists = count > 0 or own >= 0 or number == 0
            shadowed = own >= 0 and own_kind != Kind.FOLDER and (count > 0 or number == 0)
            visible = self.implicit if shadowed or own < 0 else own
            if at >= 0:
                self.shadow.pop(at, None)
                if not exists:
                    self._removed.append(np.array([at]))
                elif visible != at:
                    self._changed.append((np.array([at]), np.array([visible])))
                changes[folders.parent[number]] -= not exists
                if shadowed:
                    self.shadow[at] = own
            elif exists:
                self.new_data[number] = visible
                changes[folders.parent[number]] += 1
                if shadowed:
                    self.new_shadow[number] = own

    def _note_replaced(self, at: Indices, path: layout.U8) -> None:
        """Remember the data of previous entries that rows replace, or of what these shadow."""
        data = at.copy()
        implicit = np.flatnonzero(self.old.columns.flags[at] & np.uint32(layout.IMPLICIT))
        for i in implicit.tolist():
            data[i] = self.shadow.get(int(at[i]), -1)
        own = data >= 0
        self._replaced.append((data[own], path[own]))

    @cached_property
    def changed(self) -> tuple[Indices, Indices]:
        """The previous entries with other data than their own, and this data."""
        nothing = np.zeros(0, np.int64)
        at, data = zip((nothing, nothing), *self._changed, strict=True)
        return np.concatenate(at), np.concatenate(data)

    @cached_property
    def removed(self) -> Indices:
        """Previous entries that are not in the result, ascending."""
        return np.sort(np.concatenate([np.zeros(0, np.int64), *self._removed]))

    def rows_digest(self) -> layout.RowsDigest:
        """That of the result."""
        path = self.hash
        if self._root_row >= 0:
            path = path.copy()
            path[self._root_row] = ROOT_HASH
        total = self.old.rows_digest.plus(digest_of_rows(self.rows, path))
        for data, hashes in self._replaced:
            total = total.minus(digest_of_entries(self.old.columns, data, hashes))
        return total

    def _own(self, at: int) -> tuple[int, Kind]:
        """The data and kind of the entry stored at a previous entry's path, visible or shadowed; -1
        if there is none, or the folder is implicit."""
        if at < 0:
            return -1, Kind.TOMBSTONE
        flags = self.old.columns.flags[at]
        if not flags & layout.IMPLICIT:
            return at, Kind(int(layout.kinds(flags)))
        if at in self.shadow:
            return self.shadow[at], Kind.FILE  # or a link: treated alike
        return -1, Kind.TOMBSTONE


@dataclass(frozen=True, slots=True)
class EntryOrder:
    """The positions of entries in the result. `new_*` describe the new entries, in directory order;
    these come from **items**: first the new folders, then all rows."""

    made: list[int]
    """The new folders, as numbers of `_ChangedFolders`."""
    new_folder: layout.U4
    """The folders of new entries, as numbers of `_ChangedFolders`."""
    new_item: layout.U4
    new_hash: layout.U8
    new_index: layout.U4
    """Positions in the result."""
    removed: Indices
    """Previous entries, ascending."""
    places: Indices
    """The previous entry before which each new one is inserted, ascending; the number of previous
    entries stands for the end."""
    folder_index: Indices
    """Positions of the `_ChangedFolders` in the result; meaningless for removed ones."""

    def index_of(self, old: Indices) -> Indices:
        """Positions in the result of previous entries; meaningless for removed ones."""
        before = np.searchsorted(self.places, old, "right") - np.searchsorted(self.removed, old)
        return old + before

    def index_of_all(self, count: int) -> Indices:
        """As `index_of`, of all `count` previous entries."""
        at = np.concatenate([self.places, self.removed + 1])  # positions at which the shift changes
        steps = np.ones(len(at), np.int64)
        steps[len(self.places) :] = -1
        order = np.argsort(at, kind="stable")
        shifts = np.concatenate([[0], np.cumsum(steps[order])])
        bounds = np.concatenate([[0], np.minimum(at[order], count), [count]])
        index: Indices = np.arange(count) + np.repeat(shifts, np.diff(bounds))
        return index


def _order_of(plan: MergePlan) -> EntryOrder:
    """Raises UsageError for two rows of one path."""
    folders = plan.folders
    made = list(plan.new_data)
    above = np.array([folders.parent[number] for number in made], np.uint32)
    folder = np.concatenate([above, folders.of_row[plan.new_rows]])
    item = np.empty(len(folder), np.uint32)
    item[: len(made)] = np.arange(len(made))
    item[len(made) :] = plan.new_rows + len(made)
    order = _sorted_by_name(plan, made, folder, item)
    position = np.empty(len(made), np.int64)
    of_made = np.flatnonzero(order < len(made))
    position[order[of_made]] = of_made
    folder, item = folder[order], item[order]
    del order
    places = _places(plan, made, folder, item, dict(zip(made, position.tolist(), strict=True)))
    removed = plan.removed
    new_index = places - np.searchsorted(removed, places) + np.arange(len(places))
    made_hash = np.array([folders.hash[number] for number in made], np.uint64)
    result = EntryOrder(
        made=made,
        new_folder=folder,
        new_item=item,
        new_hash=np.concatenate([made_hash, plan.hash])[item],
        new_index=new_index.astype(np.uint32),
        removed=removed,
        places=places,
        folder_index=np.zeros(len(folders), np.int64),
    )
    result.folder_index[:] = result.index_of(np.array(folders.old_index, np.int64))
    result.folder_index[made] = new_index[position]
    return result


def _names_of(plan: MergePlan, made: list[int], item: layout.U4) -> list[bytes]:
    is_row = item >= len(made)
    of_rows = iter(plan.names.take(item[is_row].astype(np.int64) - len(made)))
    of_made = (plan.folders.name[made[i]] for i in item[~is_row].tolist())
    return [next(of_rows if each else of_made) for each in is_row.tolist()]


def _sorted_by_name(
    plan: MergePlan, made: list[int], folder: layout.U4, item: layout.U4
) -> Indices:
    """The order of items by folder and name. Only folders with unsorted rows, which are few, are
    sorted by name."""
    order = np.argsort(folder, kind="stable")
    fits: layout.Mask = np.zeros(len(item), np.bool_)
    """The next item's name comes after this one's."""
    fits[:-1] = (item[:-1] >= len(made)) & (np.diff(item) == 1)
    fits[fits] = plan.ascends[item[fits] - np.uint32(len(made))]
    sorted_folder = folder[order]
    together = sorted_folder[1:] == sorted_folder[:-1]
    broken = np.flatnonzero(together & ~(fits[order[:-1]] & (np.diff(order) == 1)))
    for number in np.unique(sorted_folder[broken]).tolist():
        start, end = np.searchsorted(sorted_folder, [number, number + 1]).tolist()
        names = _names_of(plan, made, item[order[start:end]])
        places = sorted(range(end - start), key=names.__getitem__)
        for one, other in pairwise(places):
            if names[one] == names[other]:
                raise UsageError(f"two rows have one path, which ends in {names[one]!r}")
        order[start:end] = order[start:end][places]
    return order


def _runs(values: layout.U4) -> tuple[Indices, Indices]:
    """The start and length of each run of equal values."""
    change = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=change[1:])
    starts = np.flatnonzero(change)
    return starts, np.diff(starts, append=len(values))


def _places(
    plan: MergePlan,
    made: list[int],
    folder: layout.U4,
    item: layout.U4,
    made_position: dict[int, int],
) -> Indices:
    """`EntryOrder.places`."""
    old, folders = plan.old, plan.folders
    places = np.empty(len(folder), np.int64)
    for start, count in zip(*(each.tolist() for each in _runs(folder)), strict=True):
        end = start + count
        number = int(folder[start])
        at = folders.old_index[number]
        inside = old.children(at) if at >= 0 else range(0)
        if len(inside):
            names = _names_of(plan, made, item[start:end])
            places[start:end] = _places_among(old, inside, names)
        else:  # they come before the entries of the next folder; folders ascend by entry
            at = at if at >= 0 else int(places[made_position[number]])
            places[start:end] = 1 + np.searchsorted(old.columns.parent[1:], at)
    return places


def _places_among(old: Snapshot, inside: range, names: list[bytes]) -> list[int]:
    if len(names) * 64 > len(inside):  # listing all costs less
        known = old.names(inside)
        at = [bisect_left(known, name) for name in names]
    else:
        at = [bisect_left(inside, name, key=old.name) for name in names]
    for name, i in zip(names, at, strict=True):
        if i < len(inside) and old.name(inside[i]) == name:  # the lookup should have found it
            raise CorruptError(f"damaged snapshot of {old.dataset}: {shown(name)} is not indexed")
    return [inside.start + i for i in at]


class _Data(NamedTuple):
    """Columns as in `layout.SnapshotColumns`. At first, chunks, targets and extents are numbered as
    (previous ones, then the rows'); `_targets`, `_extents` and `_number_chunks` turn these into the
    result's numbers."""

    flags: layout.U4
    size: layout.U8
    mtime_ns: layout.I8
    checksum: layout.U8
    chunk: layout.U4
    offset: layout.U4
    stored: layout.U4


_DTYPES = (np.uint32, np.uint64, np.int64, np.uint64, np.uint32, np.uint32, np.uint32)


class _Assembly:
    """The columns of the result. Long arrays are written in place: beside rows and result, memory
    holds little more than one number per entry."""

    def __init__(self, plan: MergePlan, order: EntryOrder, table: Sequence[ChunkInfo]) -> None:
        self.plan, self.order, self.table = plan, order, table
        self.old, self.old_count = plan.old.columns, plan.old.entry_count
        self.numbers = {chunk.id: number for number, chunk in enumerate(table)}
        self.object_bytes = np.array([chunk.object_bytes for chunk in table], np.uint64)
        self.kept: Indices = np.delete(np.arange(self.old_count), plan.removed)
        self.old_index = order.index_of_all(self.old_count)
        self.kept_index = self.old_index[self.kept]
        self.count = len(self.kept) + len(order.new_item)

    def columns(self) -> layout.SnapshotColumns:
        n = self.count
        data_source, shadowed_entries = self._data_source()
        data, tails, extents = self._data(data_source)
        target_start, targets = self._targets(data, tails)
        extents = self._extents(data, data_source, extents)
        self._number_chunks(data, data_source, extents)
        del data_source, self.plan.rows  # `data` has all but their names
        parent = self._parent()
        held = np.bincount(parent[1:], minlength=n)
        ends = 1 + np.cumsum(held)
        folders = np.flatnonzero(layout.kinds(data.flags[:n]) == Kind.FOLDER)
        data.offset[folders] = held[folders]
        data.chunk[folders] = (ends - held)[folders]
        del held
        name_start, names = self._names()
        if layout.longest_path_bytes(parent, name_start, ends.item) > PATH_BYTES_MAX:
            raise UsageError(f"a path of more than {PATH_BYTES_MAX} bytes")
        del ends
        fingerprint, slot = self._index()
        shadowed = np.zeros(len(shadowed_entries), layout.SHADOWED)
        shadowed["entry"] = shadowed_entries
        for name, column in data._asdict().items():
            shadowed[name] = column[n:]
        return layout.SnapshotColumns(
            parent=parent,
            name_start=name_start,
            **{name: column[:n] for name, column in data._asdict().items()},
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
        parent[self.kept_index] = self.old_index[self.old.parent[self.kept]]
        parent[self.order.new_index] = self.order.folder_index[self.order.new_folder]
        return parent

    def _names(self) -> tuple[layout.U8, layout.Bytes]:
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
        if len(self.order.new_item) * _FEW_NEW < len(self.kept):
            return self._spliced_index()
        old_fingerprints = np.zeros(self.old_count, np.uint32)
        old_fingerprints[self.old.slot] = self.old.fingerprint
        keys = np.empty(self.count, np.uint64)
        keys[self.kept_index] = old_fingerprints[self.kept]
        keys[self.order.new_index] = self.order.new_hash >> np.uint64(32)
        keys <<= np.uint64(32)
        keys |= np.arange(self.count, dtype=np.uint64)
        keys[1:].sort()
        return (keys[1:] >> np.uint64(32)).astype(np.uint32), keys[1:].astype(np.uint32)

    def _spliced_index(self) -> tuple[layout.U4, layout.U4]:
        """Previous entries keep their order: equal fingerprints are in order of entries, which a
        merge keeps. So few new ones are put between them, and nothing is sorted."""
        slot, fingerprint = self.old_index[self.old.slot].astype(np.uint32), self.old.fingerprint
        if len(self.order.removed):
            is_kept = np.ones(self.old_count, np.bool_)
            is_kept[self.order.removed] = False
            still = is_kept[self.old.slot]
            slot, fingerprint = slot[still], fingerprint[still]
        new = self.order.new_hash >> np.uint64(32) << np.uint64(32)
        new = np.sort(new | self.order.new_index)
        new_fingerprint, new_slot = (new >> np.uint64(32)).astype(np.uint32), new.astype(np.uint32)
        at = np.searchsorted(fingerprint, new_fingerprint)
        for i, key in enumerate(new_fingerprint.tolist()):
            while at[i] < len(slot) and fingerprint[at[i]] == key and slot[at[i]] < new_slot[i]:
                at[i] += 1
        return np.insert(fingerprint, at, new_fingerprint), np.insert(slot, at, new_slot)

    def _data_source(self) -> tuple[Indices, Indices]:
        """Each entry's data, then each shadowed one's; and the folders that hide the latter."""
        plan, order = self.plan, self.order
        shadow = [(int(self.old_index[entry]), data) for entry, data in plan.shadow.items()]
        shadow += [(int(order.folder_index[at]), data) for at, data in plan.new_shadow.items()]
        entries, hidden = np.array(sorted(shadow), np.int64).reshape(-1, 2).T
        source: Indices = np.empty(self.count + len(hidden), np.int64)
        data = np.arange(self.old_count)
        at, changed = plan.changed
        data[at] = changed
        source[self.kept_index] = data[self.kept]
        del data
        made = len(order.made)
        source[order.new_index] = order.new_item.astype(np.int64) + (plan.first_row - made)
        of_made = np.flatnonzero(order.new_item < made)
        of_folder = np.array([plan.new_data[number] for number in order.made], np.int64)
        source[order.new_index[of_made]] = of_folder[order.new_item[of_made]]
        source[self.count :] = hidden
        return source, entries

    def _data(self, source: Indices) -> tuple[_Data, list[bytes], layout.Records]:
        records = self.plan.rows.records
        kind = records["kind"]
        links = np.flatnonzero(kind == Kind.LINK)
        many = np.flatnonzero((kind == Kind.FILE) & (records["extents"] > 1))
        tails = [self.plan.rows.tails[i] for i in links.tolist()]
        counts = records["extents"][many].astype(np.int64)
        first_extent = len(self.old.extents) + np.cumsum(counts) - counts
        dtypes = zip(_Data._fields, _DTYPES, strict=True)
        data = _Data(**{name: np.zeros(len(source), dtype) for name, dtype in dtypes})
        for start in range(0, len(source), _BLOCK):
            at = source[start : start + _BLOCK]
            if at[-1] - at[0] == len(at) - 1 and (at < self.old_count).all():  # nothing changed
                for name, column in data._asdict().items():
                    column[start : start + len(at)] = getattr(self.old, name)[at[0] : at[-1] + 1]
                continue
            is_row = (at >= self.plan.first_row) & (at < self.plan.implicit)
            visible = at < self.old_count
            hidden = (at >= self.old_count) & (at < self.plan.first_row)
            rows = at[is_row] - self.plan.first_row
            new = self._row_data(rows, links, many, first_extent)
            shadowed = self.old.shadowed[at[hidden] - self.old_count]
            for name, column in data._asdict().items():
                out = column[start : start + _BLOCK]
                out[visible] = getattr(self.old, name)[at[visible]]
                out[hidden] = shadowed[name]
                out[is_row] = getattr(new, name)
            data.flags[start : start + _BLOCK][at == self.plan.implicit] = layout.IMPLICIT_FOLDER
        return data, tails, self._row_extents(many.tolist())

    def _row_data(
        self, rows: Indices, links: Indices, many: Indices, first_extent: Indices
    ) -> _Data:
        """`links` are all rows of links, `many` those of files of several extents."""
        records = self.plan.rows.records[rows]
        kind = records["kind"].astype(np.uint32)
        link = kind == Kind.LINK
        has_many = (kind == Kind.FILE) & (records["extents"] > 1)
        one = (kind == Kind.FILE) & ~has_many
        flags = records["mode"].astype(np.uint32) & np.uint32(MODE_MASK)
        flags |= kind << np.uint32(layout.KIND_SHIFT)
        flags[one] |= records["codec"][one].astype(np.uint32) << np.uint32(layout.CODEC_SHIFT)
        flags[has_many] |= np.uint32(layout.MANY_EXTENTS)
        size = np.where(kind == Kind.FILE, records["size"], 0)
        size[link] = [len(self.plan.rows.tails[i]) for i in rows[link].tolist()]
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

    def _row_extents(self, many: list[int]) -> layout.Records:
        extents = np.frombuffer(b"".join(self.plan.rows.tails[i] for i in many), EXTENT)
        result = np.zeros(len(extents), layout.STORED_EXTENT)
        for name in ("start", "size", "checksum", "offset", "stored", "codec"):
            result[name] = extents[name]
        numbers = [self.numbers.get(ChunkId(bytes(id_)), _NO_CHUNK) for id_ in extents["chunk"]]
        result["chunk"] = numbers
        return result

    def _targets(self, data: _Data, tails: list[bytes]) -> tuple[layout.U8, layout.Bytes]:
        """Starts of targets, and all targets, by the order of links in `data`."""
        link = layout.kinds(data.flags) == Kind.LINK
        source = data.chunk[link].astype(np.int64)
        data.chunk[link] = np.arange(len(source))
        nothing = np.zeros(0, np.uint8)
        return _splice((self.old.target_start, self.old.targets), _joined(tails), source, nothing)

    def _extents(self, data: _Data, data_source: Indices, new: layout.Records) -> layout.Records:
        many = (data.flags & layout.MANY_EXTENTS) != 0
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

    def _number_chunks(self, data: _Data, data_source: Indices, extents: layout.Records) -> None:
        of_rows = [self.numbers.get(id_, _NO_CHUNK) for id_ in self.plan.rows.chunks]
        numbers = np.concatenate([self._number_of_old, np.array(of_rows, np.uint32)])
        used = np.zeros(len(self.table)) + np.bincount(
            extents["chunk"], extents["stored"], len(self.table)
        )
        for start in range(0, len(data_source), _BLOCK):
            here = slice(start, start + _BLOCK)
            flags = data.flags[here]
            one = np.flatnonzero(
                (layout.kinds(flags) == Kind.FILE) & (flags & layout.MANY_EXTENTS == 0)
            )
            one += start
            chunk = data.chunk[one] = numbers[data.chunk[one]]
            lost = np.flatnonzero(chunk == _NO_CHUNK)
            if len(lost):
                self._lost_chunk(data_source, one[lost[0]])
            self._check_places(data, data_source, one)
            used += np.bincount(chunk, data.stored[one], len(used))
        too_many = used > self.object_bytes.astype(np.float64) - PREAMBLE_BYTES
        if too_many.any():
            id_ = chunk_id_text(self.table[int(too_many.argmax())].id)
            raise CorruptError(f"the files in chunk {id_} have more bytes than it has")

    def _check_places(self, data: _Data, data_source: Indices, one: Indices) -> None:
        """Raise CorruptError for a row outside its chunk: readers refuse such a snapshot."""
        new = one[data_source[one] >= self.plan.first_row]
        object_bytes = self.object_bytes[data.chunk[new]]
        places = (layout.codecs(data.flags[new]), data.stored[new], data.size[new])
        wrong = impossible_bodies(*places, data.offset[new], object_bytes)
        if wrong.any():
            path = self._path(int(data_source[new[wrong.argmax()]]))
            raise CorruptError(f"{shown(path)} lies where its chunk cannot hold it")

    def _path(self, data: int) -> bytes:
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
        numbers = (self.numbers.get(id_, _NO_CHUNK) for id_ in self.plan.old.chunk_ids)
        return np.fromiter(numbers, np.uint32, len(self.plan.old.chunk_ids))


def _joined(items: Sequence[bytes]) -> tuple[layout.U8, layout.Bytes]:
    """The starts of the items (and the end), and their bytes in one block."""
    starts = np.zeros(len(items) + 1, np.uint64)
    np.cumsum(np.fromiter(map(len, items), np.uint64, len(items)), out=starts[1:])
    return starts, np.frombuffer(b"".join(items), np.uint8)


def _splice(
    old: tuple[layout.U8, layout.Bytes],
    new: tuple[layout.U8, layout.Bytes],
    source: Indices,
    behind: layout.Bytes,
) -> tuple[layout.U8, layout.Bytes]:
    """The starts of items of (old, then new), and their bytes, then `behind`. Runs of items that
    stay together are copied at once, so the cost is that of the changes."""
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
