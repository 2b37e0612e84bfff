"""What becomes of each path when rows change a snapshot, and where each entry then stands.

Owned here: which entry shows at a path (tombstones, implicit folders, files that a folder shadows)
and the order of entries. Not owned: the columns that come of it (`snapshot_merge.py`). Pure. Python
work is done per changed row and per folder that holds one; all other entries stay in arrays.

Surviving entries keep their relative order, since that is by depth, folder and name. So the next
snapshot is the previous one without some entries, with new ones inserted at known places.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress, pairwise

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from . import snapshot_layout as layout
from .entries import PATH_BYTES_MAX, Kind, Rows, shown
from .errors import CorruptError, UsageError
from .snapshot import ROOT_HASH, ROOT_INDEX, Indices, Snapshot


class Folders:
    """The paths that rows are in and all above them, in directory order; 0 is the root.

    They are kept as (folder, name), not as whole paths: of a very deep path the latter would take
    memory that grows with the square of its length.
    """

    def __init__(self, old: Snapshot, rows: Rows) -> None:
        ids: dict[tuple[int, bytes], int] = {}
        levels = [0]
        id_of_row_folder = np.zeros(len(rows.folders), np.int64)
        for used in np.unique(rows.folder).tolist():
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
        self.of_row: Indices = self._rank[id_of_row_folder][rows.folder]
        self.number = {
            (int(self._rank[parent]), name): int(self._rank[at])
            for (parent, name), at in ids.items()
        }
        self.old, self.hash = [ROOT_INDEX], [ROOT_HASH]
        for parent, name in zip(self.parent[1:], self.name[1:], strict=True):
            self.hash.append(xxh3_64_intdigest(name, self.hash[parent]))
            above = self.old[parent]
            self.old.append(old.child(above, name) if above >= 0 else -1)

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


class Plan:
    """What happens to each path: which data shows, what goes, what comes.

    Data is numbered: shown entries of the previous snapshot, its shadowed ones, the rows, and last
    an implicit folder.
    """

    def __init__(self, old: Snapshot, rows: Rows, folders: Folders) -> None:
        self.old, self.rows, self.folders = old, rows, folders
        self.old_kind = layout.kinds(old.columns.flags)
        self.first_row = old.entry_count + len(old.columns.shadowed)
        self.implicit = self.first_row + len(rows)
        self.data: Indices = np.arange(old.entry_count)
        """By old index."""
        self.removed: layout.Mask = np.zeros(old.entry_count, np.bool_)
        self.shadow: dict[int, int] = {
            entry: old.entry_count + j for j, entry in enumerate(old.shadowed().tolist())
        }
        """Data by old index."""
        self.new_shadow: dict[int, int] = {}
        """Data by folder."""
        self.live = np.zeros(len(folders), np.int64)
        """By folder, how many entries it holds."""
        self.new_data: dict[int, int] = {}
        """By folder that is new, the data that it shows."""
        self._check_rows()
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

    def _rows_of_folders(self) -> dict[int, int]:
        """The rows whose path is that of a folder which holds, or held, another row."""
        folders, names = self.folders, self.rows.names
        known = set(folders.name)
        own = {}
        for i in compress(range(len(names)), map(known.__contains__, names)):
            folder = int(folders.of_row[i])
            number = folders.number.get((folder, names[i]))
            if not names[i] and folder == 0:
                number = 0
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
        self.leaf_rows = np.flatnonzero(leaf)
        folder = folders.of_row[self.leaf_rows]
        self.leaf_names = list(compress(rows.names, leaf.tolist()))
        seeds = map(folders.hash.__getitem__, folder.tolist())
        self.leaf_hash = np.fromiter(
            map(xxh3_64_intdigest, self.leaf_names, seeds), np.uint64, len(folder)
        )
        above = np.array(folders.old, np.int64)[folder]
        at = old.find_many(above, self.leaf_hash, self.leaf_names)
        kind = rows.records["kind"][self.leaf_rows]
        comes, there = (at < 0) & (kind != Kind.TOMBSTONE), at >= 0
        self.leaf_comes = np.flatnonzero(comes)
        self._change(at[there], self.leaf_rows[there], kind[there])
        goes = folder[there][self.removed[at[there]]]
        self.live += np.bincount(folder[comes], minlength=len(folders))
        self.live -= np.bincount(goes, minlength=len(folders))

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
        old, folders, live = self.old, self.folders, self.live
        kinds = self.rows.records["kind"]
        for number in range(len(folders) - 1, -1, -1):
            at = folders.old[number]
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
class Order:
    """Where entries stand in the result. `new_*` are the new entries in directory order."""

    new_folder: Indices
    """A number of `Folders`."""
    new_names: list[bytes]
    new_hash: layout.U8
    new_data: Indices
    new_index: Indices
    old_index: Indices
    """Of each old entry its new index; meaningless for removed ones."""
    folder_index: Indices
    """The new index of each of `Folders`; meaningless for those that do not exist."""


def order_of(plan: Plan) -> Order:
    """The order of what the plan keeps and adds."""
    folders, n = plan.folders, plan.old.entry_count
    made, leaves = list(plan.new_data), plan.leaf_comes
    leaf_rows = plan.leaf_rows[leaves]
    names = [folders.name[number] for number in made]
    names += map(plan.leaf_names.__getitem__, leaves.tolist())
    above = np.array([folders.parent[number] for number in made], np.int64)
    hashes = np.array([folders.hash[number] for number in made], np.uint64)
    data = np.array(list(plan.new_data.values()), np.int64)
    folder = np.concatenate([above, folders.of_row[leaf_rows]])
    order = _sorted_by_name(folder, names)
    folder, names = folder[order], list(map(names.__getitem__, order.tolist()))
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    made_position = dict(zip(made, position[: len(made)].tolist(), strict=True))
    places = _places(plan, folder, names, made_position)
    gone = np.concatenate([[0], np.cumsum(plan.removed)])
    come = np.cumsum(np.bincount(places, minlength=n + 1))[:n]
    old_index = np.arange(n) - gone[:-1] + come
    new_index = places - gone[places] + np.arange(len(places))
    folder_index = old_index[np.array(folders.old, np.int64)]
    folder_index[made] = new_index[position[: len(made)]]
    return Order(
        new_folder=folder,
        new_names=names,
        new_hash=np.concatenate([hashes, plan.leaf_hash[leaves]])[order],
        new_data=np.concatenate([data, plan.first_row + leaf_rows])[order],
        new_index=new_index,
        old_index=old_index,
        folder_index=folder_index,
    )


def _sorted_by_name(folder: Indices, names: list[bytes]) -> Indices:
    """The order of items by folder, then name."""
    order = np.argsort(folder, kind="stable")
    for start, end in _groups(folder[order]):
        part = order[start:end].tolist()
        part.sort(key=names.__getitem__)
        order[start:end] = part
    return order


def _groups(values: Indices) -> Iterator[tuple[int, int]]:
    """Start and end of each run of equal values."""
    starts = np.flatnonzero(np.diff(values, prepend=-1)).tolist()
    return pairwise([*starts, len(values)])


def _places(
    plan: Plan, folder: Indices, names: list[bytes], made_position: dict[int, int]
) -> Indices:
    """Before which old entry each new one comes (the old count: at the end); ascending."""
    old, folders = plan.old, plan.folders
    old_folders = np.flatnonzero(plan.old_kind == Kind.FOLDER)
    places = np.empty(len(folder), np.int64)
    for start, end in _groups(folder):
        number = int(folder[start])
        at = folders.old[number]
        if at >= 0 and plan.old_kind[at] == Kind.FOLDER:
            places[start:end] = _places_among(old, old.children(at), names[start:end])
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
