"""What becomes of each path when rows change a snapshot, and where each entry then stands.

Owned here: which entry shows at a path (tombstones, implicit folders, files that a folder shadows)
and the order of entries. Not owned: the columns that come of it (`build.py`). Pure. Python
work is done per changed row and per folder that holds one; all other entries stay in arrays.

Surviving entries keep their relative order, since that is by depth, folder and name. So the next
snapshot is the previous one without some entries, with new ones inserted at known places.
"""

import operator
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain, compress, islice, pairwise, repeat

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from ...errors import CorruptError, UsageError
from ...names import shown
from ..entries import PATH_BYTES_MAX, Kind, Names, Rows
from . import layout as layout
from .reader import ROOT_HASH, ROOT_INDEX, Indices, Snapshot

_BLOCK_ROWS = 1 << 16  # of which the names are objects at one time


class ChangedFolders:
    """The paths that rows are in and all above them, in directory order; 0 is the root.

    They are kept as (folder, name), not as whole paths: of a very deep path the latter would take
    memory that grows with the square of its length.
    """

    def __init__(self, old: Snapshot, rows: Rows) -> None:
        ids: dict[tuple[int, bytes], int] = {}
        levels = [0]
        id_of_row_folder = np.zeros(len(rows.folders), np.int64)
        is_used = np.zeros(len(rows.folders), np.bool_)
        is_used[rows.folder] = True
        for used in np.flatnonzero(is_used).tolist():
            path, at = rows.folders[used], 0
            if len(path) > PATH_BYTES_MAX:
                raise UsageError(f"a path of more than {PATH_BYTES_MAX} bytes")
            for name in path.split(b"/") if path else ():
                level = levels[at] + 1
                at = ids.setdefault((at, name), len(levels))
                if at == len(levels):
                    levels.append(level)
            id_of_row_folder[used] = at
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
    """What happens to each path: which data shows, what goes, what comes.

    Data is numbered: shown entries of the previous snapshot, its shadowed ones, the rows, and last
    an implicit folder.
    """

    def __init__(self, old: Snapshot, rows: Rows, folders: ChangedFolders) -> None:
        self.old, self.rows, self.folders = old, rows, folders
        self.names = Names.of(rows.names)
        self.old_kind = layout.kinds(old.columns.flags)
        self.first_row = old.entry_count + len(old.columns.shadowed)
        self.implicit = self.first_row + len(rows)
        self.data: Indices = np.arange(old.entry_count)
        """By old index."""
        self.removed: layout.Mask = np.zeros(old.entry_count, np.bool_)
        self.shadow: dict[int, int] = {
            entry: old.entry_count + j for j, entry in enumerate(old.shadowing_folders().tolist())
        }
        """Data by old index."""
        self.new_shadow: dict[int, int] = {}
        """Data by folder."""
        self.live_counts = np.zeros(len(folders), np.int64)
        """By folder, how many entries it holds."""
        self.new_data: dict[int, int] = {}
        """By folder that is new, the data that it shows."""
        self.coming_rows: Indices
        """The rows that are new entries, ascending."""
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
            raise UsageError(f"no entry: {shown(rows.path(i))} has an impossible record")

    def _hash_names(self) -> None:
        """The hash of each row's path, and whether its name is smaller than the next row's.

        Names are objects for a block of rows at a time.
        """
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
        """The rows whose path is that of a folder which holds, or held, another row."""
        folders = self.folders
        wanted = np.sort(np.array(folders.hash, np.uint64))
        has_prefix = np.zeros(1 << 16, np.bool_)  # passes one row in thousands
        has_prefix[wanted >> np.uint64(48)] = True
        likely = np.flatnonzero(has_prefix[self.hash >> np.uint64(48)])
        at = np.searchsorted(wanted, self.hash[likely])
        likely = likely[wanted[np.minimum(at, len(wanted) - 1)] == self.hash[likely]]
        own = dict[int, int]()
        for i in np.union1d(likely, self.names.empty_ones()).tolist():
            folder, name = int(folders.of_row[i]), self.names[i]
            number = folders.number.get((folder, name)) if name or folder else 0
            if number is not None:
                if number in own:
                    raise UsageError(f"a path stands twice: {shown(self.rows.path(i))}")
                own[number] = i
        return own

    def _plan_leaves(self, own_row: dict[int, int]) -> None:
        """The other rows. What is below their path, if anything, does not change."""
        old, rows, folders = self.old, self.rows, self.folders
        leaf = np.ones(len(rows), np.bool_)
        leaf[list(own_row.values())] = False
        if old.entry_count == 1:  # there is nothing but the root, which is no leaf
            self.coming_rows = np.flatnonzero(leaf & (rows.records["kind"] != Kind.TOMBSTONE))
            counted = folders.of_row[self.coming_rows]
            self.live_counts += np.bincount(counted, minlength=len(folders))
            return
        leaf_rows = np.flatnonzero(leaf)
        folder = folders.of_row[leaf_rows].astype(np.int64)
        above = np.array(folders.old_index, np.int64)[folder]
        names = self.names
        if own_row:
            names = Names.of(compress(names, leaf.tolist()))
        at = old.find_many(above, self.hash[leaf_rows], names)
        kind = rows.records["kind"][leaf_rows]
        comes, there = (at < 0) & (kind != Kind.TOMBSTONE), at >= 0
        self.coming_rows = leaf_rows[comes]
        self._change(at[there], leaf_rows[there], kind[there])
        goes = folder[there][self.removed[at[there]]]
        self.live_counts += np.bincount(folder[comes], minlength=len(folders))
        self.live_counts -= np.bincount(goes, minlength=len(folders))

    def _change(self, at: Indices, row: Indices, kind: npt.NDArray[np.uint8]) -> None:
        """Rows whose path exists; each is no folder, or one whose content stays as it is."""
        if len(np.unique(at)) != len(at):
            raise UsageError("a path stands twice among the rows")
        holds = (self.old_kind[at] == Kind.FOLDER) & (self.old.columns.offset[at] > 0)
        dead = kind == Kind.TOMBSTONE
        self.removed[at[~holds & dead]] = True
        shows = ~dead & (~holds | (kind == Kind.FOLDER))
        self.data[at[shows]] = self.first_row + row[shows]
        self.data[at[holds & ~shows]] = self.implicit
        for entry in at[holds].tolist():
            self.shadow.pop(entry, None)
        hidden = holds & ~dead & ~shows
        for entry, i in zip(at[hidden].tolist(), row[hidden].tolist(), strict=True):
            self.shadow[entry] = self.first_row + i

    def _plan_folders(self, own_row: dict[int, int]) -> None:
        """Folders that hold changed rows, the deepest first: they may go with their last entry."""
        old, folders, live = self.old, self.folders, self.live_counts
        kinds = self.rows.records["kind"]
        for number in range(len(folders) - 1, -1, -1):
            at = folders.old_index[number]
            own, own_kind = self._own(at)
            if number in own_row:
                own = self.first_row + own_row[number]
                own_kind = Kind(kinds[own_row[number]])
                own = -1 if own_kind == Kind.TOMBSTONE else own
            held = int(live[number]) + (len(old.children(at)) if at >= 0 else 0)
            exists = held > 0 or own >= 0 or number == 0
            shadowed = own >= 0 and own_kind != Kind.FOLDER and (held > 0 or number == 0)
            shows = self.implicit if shadowed or own < 0 else own
            if at >= 0:
                self.shadow.pop(at, None)
                self.removed[at] = not exists
                self.data[at] = shows
                live[folders.parent[number]] -= not exists
                if shadowed:
                    self.shadow[at] = own
            elif exists:
                self.new_data[number] = shows
                live[folders.parent[number]] += 1
                if shadowed:
                    self.new_shadow[number] = own

    def _own(self, at: int) -> tuple[int, Kind]:
        """The data of the entry that somebody made at the path of an old entry, shown or not."""
        if at < 0:
            return -1, Kind.TOMBSTONE
        flags = int(self.old.columns.flags[at])
        if not flags & layout.IMPLICIT:
            return at, Kind(int(self.old_kind[at]))
        if at in self.shadow:
            return self.shadow[at], Kind.FILE  # or a link: neither shows
        return -1, Kind.TOMBSTONE


@dataclass(frozen=True, slots=True)
class EntryOrder:
    """Where entries stand in the result. `new_*` are the new entries in directory order.

    They come of **items**: the folders that are made, then all rows.
    """

    made: list[int]
    """Numbers of `ChangedFolders`: those that are made."""
    new_folder: layout.U4
    """A number of `ChangedFolders`."""
    new_item: layout.U4
    new_hash: layout.U8
    new_index: layout.U4
    old_index: Indices
    """Of each old entry its new index; meaningless for removed ones."""
    folder_index: Indices
    """The new index of each of `ChangedFolders`; meaningless for those that do not exist."""


def order_of(plan: MergePlan) -> EntryOrder:
    """The order of what the plan keeps and adds. Raises UsageError for a path that stands twice."""
    folders, n = plan.folders, plan.old.entry_count
    made = list(plan.new_data)
    above = np.array([folders.parent[number] for number in made], np.uint32)
    folder = np.concatenate([above, folders.of_row[plan.coming_rows]])
    item = np.empty(len(folder), np.uint32)
    item[: len(made)] = np.arange(len(made))
    item[len(made) :] = plan.coming_rows + len(made)
    order = _sorted_by_name(plan, made, folder, item)
    position = np.empty(len(made), np.int64)
    of_made = np.flatnonzero(order < len(made))
    position[order[of_made]] = of_made
    folder, item = folder[order], item[order]
    del order
    places = _places(plan, made, folder, item, dict(zip(made, position.tolist(), strict=True)))
    gone = np.concatenate([[0], np.cumsum(plan.removed)])
    come = np.cumsum(np.bincount(places, minlength=n + 1))[:n]
    old_index = np.arange(n) - gone[:-1] + come
    new_index = (places - gone[places] + np.arange(len(places))).astype(np.uint32)
    folder_index = old_index[np.array(folders.old_index, np.int64)]
    folder_index[made] = new_index[position]
    made_hash = np.array([folders.hash[number] for number in made], np.uint64)
    return EntryOrder(
        made=made,
        new_folder=folder,
        new_item=item,
        new_hash=np.concatenate([made_hash, plan.hash])[item],
        new_index=new_index,
        old_index=old_index,
        folder_index=folder_index,
    )


def _names_of(plan: MergePlan, made: list[int], item: layout.U4) -> list[bytes]:
    """The names of items."""
    is_row = item >= len(made)
    of_rows = iter(plan.names.take(item[is_row].astype(np.int64) - len(made)))
    of_made = (plan.folders.name[made[i]] for i in item[~is_row].tolist())
    return [next(of_rows if each else of_made) for each in is_row.tolist()]


def _sorted_by_name(
    plan: MergePlan, made: list[int], folder: layout.U4, item: layout.U4
) -> Indices:
    """The order of items by folder, then name. Rows of a folder mostly are in order already."""
    order = np.argsort(folder, kind="stable")
    fits: layout.Mask = np.zeros(len(item), np.bool_)
    """Of each item, whether the next of its folder comes behind it by its name."""
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
                raise UsageError(f"a path stands twice: its last part is {names[one]!r}")
        order[start:end] = order[start:end][places]
    return order


def _runs(values: layout.U4) -> tuple[Indices, Indices]:
    """Where each run of equal values starts, and how long it is."""
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
    """Before which old entry each new one comes (the old count: at the end); ascending."""
    old, folders = plan.old, plan.folders
    old_folders = np.flatnonzero(plan.old_kind == Kind.FOLDER)
    places = np.empty(len(folder), np.int64)
    for start, count in zip(*(each.tolist() for each in _runs(folder)), strict=True):
        end = start + count
        number = int(folder[start])
        at = folders.old_index[number]
        if at >= 0 and plan.old_kind[at] == Kind.FOLDER:
            inside = old.children(at)
            if len(inside):
                names = _names_of(plan, made, item[start:end])
                places[start:end] = _places_among(old, inside, names)
                continue
            places[start:end] = inside.start
        else:  # it held nothing: what it holds now comes before what the next folder holds
            at = at if at >= 0 else int(places[made_position[number]])
            following = old_folders[np.searchsorted(old_folders, at) :][:1]
            places[start:end] = (
                old.columns.chunk[following[0]] if len(following) else old.entry_count
            )
    return places


def _places_among(old: Snapshot, inside: range, names: list[bytes]) -> list[int]:
    """Before which old index of a folder each of these names comes; both are sorted."""
    if len(names) * 64 > len(inside):  # a list of all costs less than so many searches
        known = old.names(inside)
        at = [bisect_left(known, name) for name in names]
    else:
        at = [bisect_left(inside, name, key=old.name) for name in names]
    for name, i in zip(names, at, strict=True):
        if i < len(inside) and old.name(inside[i]) == name:  # then the look-up had to find it
            raise CorruptError(f"damaged snapshot of {old.dataset}: {shown(name)} is not indexed")
    return [inside.start + i for i in at]
