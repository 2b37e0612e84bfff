"""Compares two versions of a dataset: which entries of the later one are unchanged.

A mount that switches to another version uses this to keep what the kernel has cached of unchanged
files. An entry has the **same path** as one of the earlier version if path and kind are equal. It
is **unchanged** if, in addition, nothing differs that a reader can see: a file's mode, time, size
and checksums of its contents (a purge may have moved them), or a link's mode, time and target. A
folder with the same path always counts as unchanged.

Pure functions of two snapshots; safe from any thread. 1.28 million entries take about a second.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..entries import MODE_MASK, Kind
from . import layout as layout
from .reader import ROOT_INDEX, Indices, Snapshot

OldIndices = npt.NDArray[np.int32]
"""By index in the later version: an index in the earlier one, or -1."""

_EXTENT_FIELDS = ["start", "size", "checksum"]


@dataclass(frozen=True, slots=False, eq=False)
class SnapshotDiff:
    """The entries of `new`, and which entries of `old` they are; both are of one dataset."""

    old: Snapshot
    new: Snapshot
    same_path: OldIndices
    """The entry of `old` with the same path and kind."""
    unchanged: OldIndices
    """The same, but -1 for entries that have changed."""

    @cached_property
    def removed_or_changed(self) -> layout.Mask:
        """By index in `old`: whether the entry is missing in `new`, or has changed."""
        gone = np.ones(len(self.old), np.bool_)
        gone[self.unchanged[self.unchanged >= 0]] = False
        return gone

    @cached_property
    def changed_folders(self) -> Indices:
        """The folders of both versions whose listing differs, by index in `new`."""
        differs = np.zeros(len(self.new), np.bool_)
        differs[self.new.columns.parent[self.unchanged < 0]] = True
        places = np.flatnonzero(self.unchanged >= 0)
        now = np.full(len(self.old), -1, np.int64)
        now[self.unchanged[places]] = places
        emptied = now[self.old.columns.parent[self.removed_or_changed]]
        differs[emptied[emptied >= 0]] = True
        kinds = layout.kinds(self.new.columns.flags)
        found: Indices = np.flatnonzero(differs & (self.unchanged >= 0) & (kinds == Kind.FOLDER))
        return found

    @cached_property
    def folders_with_new_attributes(self) -> Indices:
        """The folders of both versions whose own mode or time differs, by index in `new`."""
        old, new = self.old.columns, self.new.columns
        folders = np.flatnonzero((layout.kinds(new.flags) == Kind.FOLDER) & (self.unchanged >= 0))
        before = self.unchanged[folders]
        same = new.mtime_ns[folders] == old.mtime_ns[before]
        same &= (new.flags[folders] ^ old.flags[before]) & MODE_MASK == 0
        found: Indices = folders[~same]
        return found


def diff_snapshots(old: Snapshot, new: Snapshot) -> SnapshotDiff:
    """Compare a later version of a dataset with an earlier one."""
    same_path = _same_path(old, new)
    return SnapshotDiff(old, new, same_path, _unchanged(old, new, same_path))


def _same_path(old: Snapshot, new: Snapshot) -> OldIndices:
    """The entries of `old` with the same path and kind.

    Candidates have equal fingerprints, which depend on the path alone. Their names are compared,
    and then, level by level, their folders.
    """
    candidates, several = _candidates(old, new)
    there = np.flatnonzero(candidates >= 0)
    candidates[there[~_same_names(old, candidates[there], new, there)]] = -1
    parent_before = old.columns.parent
    kind_before, kind = layout.kinds(old.columns.flags), layout.kinds(new.columns.flags)
    result: OldIndices = np.full(len(new), -1, np.int32)
    result[ROOT_INDEX] = ROOT_INDEX
    start, above = 1, 1  # where this level starts, and where the one above ends
    while start < len(new):
        end = int(np.searchsorted(new.columns.parent, above))
        folder = result[new.columns.parent[start:end]]
        found = candidates[start:end]
        good = (found >= 0) & (folder >= 0) & (parent_before[found] == folder)
        for at in np.flatnonzero(several[start:end] & ~good & (folder >= 0)).tolist():
            found[at] = old.child(int(folder[at]), new.name(start + at))
            good[at] = found[at] >= 0
        good &= kind_before[found] == kind[start:end]
        result[start:end] = np.where(good, found, -1)
        start, above = end, end
    return result


def _candidates(old: Snapshot, new: Snapshot) -> tuple[OldIndices, layout.Mask]:
    """The first entry of `old` with the same fingerprint, and whether there are others."""
    found: OldIndices = np.full(len(new), -1, np.int32)
    several = np.zeros(len(new), np.bool_)
    before, now = old.columns, new.columns
    if len(before.fingerprint):
        first = np.searchsorted(before.fingerprint, now.fingerprint, "left")
        behind = np.searchsorted(before.fingerprint, now.fingerprint, "right")
        some = behind > first
        found[now.slot[some]] = before.slot[first[some]]
        several[now.slot] = behind > first + 1
    return found, several


def _same_names(
    old: Snapshot, before: "OldIndices | Indices", new: Snapshot, now: Indices
) -> layout.Mask:
    """Whether pairs of entries have the same names."""
    sides = []
    for side, entries in ((old, before), (new, now)):
        starts = side.columns.name_start
        begins = starts[entries].astype(np.int64)
        lengths = starts[entries.astype(np.int64) + 1].astype(np.int64) - begins
        sides.append((layout.words(side.columns.names), begins, lengths))
    return layout.equal_names(*sides)


def _unchanged(old: Snapshot, new: Snapshot, same_path: OldIndices) -> OldIndices:
    """`same_path`, with -1 for files and links that have changed."""
    columns, before = new.columns, old.columns
    result: OldIndices = same_path.copy()
    kinds = layout.kinds(columns.flags)
    some = np.flatnonzero((same_path >= 0) & (kinds != Kind.FOLDER))
    place = same_path[some]
    same = (columns.flags[some] ^ before.flags[place]) & (MODE_MASK | layout.MANY_EXTENTS) == 0
    same &= columns.size[some] == before.size[place]
    same &= columns.mtime_ns[some] == before.mtime_ns[place]
    many = (columns.flags[some] & layout.MANY_EXTENTS) != 0
    plain = (kinds[some] == Kind.FILE) & ~many & (columns.size[some] > 0)
    same &= ~plain | (columns.checksum[some] == before.checksum[place])
    for at in np.flatnonzero(same & many).tolist():
        same[at] = _same_extents(old, int(place[at]), new, int(some[at]))
    for at in np.flatnonzero(same & (kinds[some] == Kind.LINK)).tolist():
        same[at] = old.link(int(place[at])) == new.link(int(some[at]))
    result[some[~same]] = -1
    return result


def _same_extents(old: Snapshot, before: int, new: Snapshot, now: int) -> bool:
    """Whether two files of several extents have the same contents, wherever these lie."""
    rows = []
    for side, entry in ((old, before), (new, now)):
        first, count = int(side.columns.chunk[entry]), int(side.columns.offset[entry])
        rows.append(side.columns.extents[first : first + count])
    return len(rows[0]) == len(rows[1]) and all(
        np.array_equal(rows[0][name], rows[1][name]) for name in _EXTENT_FIELDS
    )
