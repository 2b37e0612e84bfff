"""Finds the unchanged entries of a later version of a dataset, so that a mount that switches to it
keeps the kernel's cache of these files. Any thread.

An entry has the **same path** in both versions if path and kind are equal. It is **unchanged** if,
in addition, nothing differs that a reader can see: a file's mode, time, size and checksums, or a
link's mode, time and target. The chunks of contents may differ, since a purge moves contents. A
folder with the same path always counts as unchanged. 1.28 million entries take about a second.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..entries import MODE_MASK, Kind, Rows
from . import layout as layout
from .build import plan_merge
from .reader import ROOT_INDEX, Indices, Snapshot

OldIndices = npt.NDArray[np.int32]
"""For each entry of `new` an index in `old`, or -1."""


@dataclass(frozen=True, slots=False, eq=False)
class SnapshotDiff:
    old: Snapshot
    new: Snapshot
    same_path: OldIndices
    """The entry of `old` with the same path and kind."""
    unchanged: OldIndices
    """As `same_path`; -1 for changed entries."""

    @cached_property
    def removed_or_changed(self) -> layout.Mask:
        """By entry of `old`."""
        result = np.ones(len(self.old), np.bool_)
        result[self.unchanged[self.unchanged >= 0]] = False
        return result

    @cached_property
    def changed_folders(self) -> Indices:
        """Indices in `new` of folders of both versions with new, removed or changed entries."""
        differs = np.zeros(len(self.new), np.bool_)
        differs[self.new.columns.parent[self.unchanged < 0]] = True
        is_unchanged = self.unchanged >= 0
        new_index = np.full(len(self.old), -1, np.int64)
        new_index[self.unchanged[is_unchanged]] = np.flatnonzero(is_unchanged)
        losing = new_index[self.old.columns.parent[self.removed_or_changed]]
        differs[losing[losing >= 0]] = True
        kinds = layout.kinds(self.new.columns.flags)
        folders: Indices = np.flatnonzero(differs & is_unchanged & (kinds == Kind.FOLDER))
        return folders

    @cached_property
    def folders_with_new_attributes(self) -> Indices:
        """Indices in `new` of folders of both versions with another mode or time."""
        old, new = self.old.columns, self.new.columns
        folders = np.flatnonzero((layout.kinds(new.flags) == Kind.FOLDER) & (self.unchanged >= 0))
        in_old = self.unchanged[folders]
        differs = new.mtime_ns[folders] != old.mtime_ns[in_old]
        differs |= (new.flags[folders] ^ old.flags[in_old]) & MODE_MASK != 0
        changed: Indices = folders[differs]
        return changed


def diff_snapshots(old: Snapshot, new: Snapshot) -> SnapshotDiff:
    """If `new` was merged from `old`, or from an earlier version, only the rows of the merge are
    compared: 1.28 million entries take some 20 ms."""
    if new.merged_from is not None and new.merged_from.version <= old.version < new.version:
        diff = _diff_of_merge(old, new, new.merged_from.rows)
        if diff is not None:
            return diff
    same_path = _same_path(old, new)
    entries = np.flatnonzero(same_path >= 0)
    return SnapshotDiff(old, new, same_path, _unchanged(old, new, same_path, entries))


def _diff_of_merge(old: Snapshot, new: Snapshot, rows: Rows) -> SnapshotDiff | None:
    """`rows` are all that changed since `old`, and perhaps earlier ones. None if they do not lead
    from `old` to `new`: it may be a state that the metadata store has lost since."""
    plan, order = plan_merge(old, rows)
    count = len(old) - len(order.removed) + len(order.new_index)
    if count != len(new) or plan.rows_digest() != new.rows_digest:
        return None
    index = order.index_of_all(len(old))
    kept = np.delete(np.arange(len(old)), order.removed)
    same_path: OldIndices = np.full(len(new), -1, np.int32)
    same_path[index[kept]] = kept
    changed = index[plan.changed[0]]
    in_old = same_path[changed]
    kinds = layout.kinds(new.columns.flags[changed]), layout.kinds(old.columns.flags[in_old])
    is_same = kinds[0] == kinds[1]
    same_path[changed[~is_same]] = -1
    unchanged = _unchanged(old, new, same_path, changed[is_same])
    return SnapshotDiff(old, new, same_path, unchanged)


def _same_path(old: Snapshot, new: Snapshot) -> OldIndices:
    """Candidates have equal fingerprints (of the path). Their names are compared, and then, level
    by level, their folders."""
    candidates, is_ambiguous = _candidates(old, new)
    has_candidate = np.flatnonzero(candidates >= 0)
    same = _same_names(old, candidates[has_candidate], new, has_candidate)
    candidates[has_candidate[~same]] = -1
    old_parent = old.columns.parent
    old_kind, kind = layout.kinds(old.columns.flags), layout.kinds(new.columns.flags)
    result: OldIndices = np.full(len(new), -1, np.int32)
    result[ROOT_INDEX] = ROOT_INDEX
    start, end_above = 1, 1  # where this level begins; where the level above ends
    while start < len(new):
        # One level's entries form one range, since entries are sorted by folder
        end = int(np.searchsorted(new.columns.parent, end_above))
        folder = result[new.columns.parent[start:end]]
        candidate = candidates[start:end]
        is_same = (candidate >= 0) & (folder >= 0) & (old_parent[candidate] == folder)
        for i in np.flatnonzero(is_ambiguous[start:end] & ~is_same & (folder >= 0)).tolist():
            candidate[i] = old.child(int(folder[i]), new.name(start + i))
            is_same[i] = candidate[i] >= 0
        is_same &= old_kind[candidate] == kind[start:end]
        result[start:end] = np.where(is_same, candidate, -1)
        start, end_above = end, end
    return result


def _candidates(old: Snapshot, new: Snapshot) -> tuple[OldIndices, layout.Mask]:
    """The first `old` entry with each `new` one's fingerprint, and whether there are more."""
    candidates: OldIndices = np.full(len(new), -1, np.int32)
    is_ambiguous = np.zeros(len(new), np.bool_)
    if len(old.columns.fingerprint):
        first = np.searchsorted(old.columns.fingerprint, new.columns.fingerprint, "left")
        end = np.searchsorted(old.columns.fingerprint, new.columns.fingerprint, "right")
        exists = end > first
        candidates[new.columns.slot[exists]] = old.columns.slot[first[exists]]
        is_ambiguous[new.columns.slot] = end > first + 1
    return candidates, is_ambiguous


def _same_names(
    old: Snapshot, old_entries: "OldIndices | Indices", new: Snapshot, new_entries: Indices
) -> layout.Mask:
    sides = []
    for snapshot, entries in ((old, old_entries), (new, new_entries)):
        bounds = snapshot.columns.name_start
        starts = bounds[entries].astype(np.int64)
        lengths = bounds[entries.astype(np.int64) + 1].astype(np.int64) - starts
        sides.append((layout.words(snapshot.columns.names), starts, lengths))
    return layout.equal_names(*sides)


def _unchanged(old: Snapshot, new: Snapshot, same_path: OldIndices, entries: Indices) -> OldIndices:
    """Compares `entries` of `new`, which have the same path in both; all others count as
    unchanged, if they have."""
    entries = entries[layout.kinds(new.columns.flags[entries]) != Kind.FOLDER]
    in_old = same_path[entries]
    flags, kinds = new.columns.flags[entries], layout.kinds(new.columns.flags[entries])
    same = (flags ^ old.columns.flags[in_old]) & (MODE_MASK | layout.MANY_EXTENTS) == 0
    same &= new.columns.size[entries] == old.columns.size[in_old]
    same &= new.columns.mtime_ns[entries] == old.columns.mtime_ns[in_old]
    has_many = (flags & layout.MANY_EXTENTS) != 0
    has_one = (kinds == Kind.FILE) & ~has_many & (new.columns.size[entries] > 0)
    same &= ~has_one | (new.columns.checksum[entries] == old.columns.checksum[in_old])
    for i in np.flatnonzero(same & has_many).tolist():
        same[i] = _contents(old, int(in_old[i])) == _contents(new, int(entries[i]))
    for i in np.flatnonzero(same & (kinds == Kind.LINK)).tolist():
        same[i] = old.link(int(in_old[i])) == new.link(int(entries[i]))
    result: OldIndices = same_path.copy()
    result[entries[~same]] = -1
    return result


def _contents(snapshot: Snapshot, file: int) -> list[tuple[int, int, int]]:
    """The extents' contents, without their places."""
    return [(extent.start, extent.size, extent.checksum) for extent in snapshot.extents(file)]
