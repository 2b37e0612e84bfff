"""Finds the files of a training dataset in the mounts that show them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import DieselError
from ...format.snapshot.reader import Snapshot
from ...mounts.mountpoint import DatasetMount, dataset_mounts
from ...system.mountinfo import mounts

Entries = npt.NDArray[np.int64]

ABSENT = -1


class ShownVersion(NamedTuple):
    """A version of a dataset that a mount shows: entries have a meaning in it alone."""

    mount: str
    """The path of the mount point."""
    identity: str
    version: int


@dataclass(slots=True)
class FileTable:
    """The files of a dataset of the training program, by its indices."""

    size: int
    """How many indices the dataset has."""
    entries: dict[ShownVersion, Entries] = field(default_factory=dict)
    """For each mount that has any of the files: the entry of each index in the snapshot, `ABSENT`
    for files that are not there."""

    @property
    def found(self) -> int:
        """How many of the indices are files of a mount."""
        return sum(int(np.count_nonzero(each >= 0)) for each in self.entries.values())

    def subset(self, indices: Entries) -> "FileTable":
        """The table of a dataset whose index i is the index `indices[i]` of this one."""
        is_inside = (indices >= -self.size) & (indices < self.size)
        at = np.where(is_inside, indices, 0)
        return FileTable(
            len(indices),
            {
                shown: np.where(is_inside, entries[at] if len(entries) else ABSENT, ABSENT)
                for shown, entries in self.entries.items()
            },
        )


def concatenated(tables: Sequence[FileTable]) -> FileTable:
    """The table of a dataset that has these one behind the other."""
    size = sum(each.size for each in tables)
    found = FileTable(size)
    for shown in {shown for table in tables for shown in table.entries}:
        found.entries[shown] = np.concatenate(
            [table.entries.get(shown, np.full(table.size, ABSENT)) for table in tables]
        )
    return found


class MountedFiles:
    """The mounts of this machine, and their snapshots as far as they were needed."""

    def __init__(self) -> None:
        self._snapshots: dict[str, Snapshot] = {}
        self._folders: dict[tuple[str, bytes], tuple[str, bytes] | None] = {}
        self._mounts: list[DatasetMount] = []
        self.refresh()

    def refresh(self) -> None:
        """Look again which mounts there are, and forget what was known of them."""
        self._mounts = dataset_mounts(mounts())
        self._snapshots.clear()
        self._folders.clear()

    @property
    def fuse_trees(self) -> list[str]:
        """The mounts whose trees are FUSE's."""
        return [each.path for each in self._mounts if not each.is_native]

    def snapshot(self, mount: str) -> Snapshot:
        """The snapshot that a mount shows. Raises OSError, DieselError."""
        found = self._snapshots.get(mount)
        if found is None:
            with open(os.path.join(mount, ".diesel", "snapshot"), "rb") as file:
                found = self._snapshots[mount] = Snapshot(file.read())
        return found

    def find(self, table: FileTable, start: int, paths: Sequence[bytes], cwd: str) -> None:
        """Fill in the entries of the indices from `start` on. Relative paths begin at `cwd`."""
        by_mount: dict[str, tuple[list[int], list[bytes]]] = {}
        for index, path in enumerate(paths, start):
            cut = path.rfind(b"/") + 1
            key = cwd, path[:cut]
            place = self._folders[key] if key in self._folders else self._place(key)
            if place is not None:
                mount, folder = place
                indices, inside = by_mount.setdefault(mount, ([], []))
                indices.append(index)
                inside.append(folder + path[cut:])
        for mount, (indices, inside) in by_mount.items():
            try:
                snapshot = self.snapshot(mount)
            except (OSError, DieselError):  # the mount is gone: its files are nobody's
                continue
            found = snapshot.lookup_many(inside)
            shown = ShownVersion(mount, str(snapshot.identity), snapshot.version)
            column = table.entries.setdefault(shown, np.full(table.size, ABSENT))
            is_inside = np.array(indices) < table.size
            column[np.array(indices)[is_inside]] = found[is_inside]

    def _place(self, key: tuple[str, bytes]) -> tuple[str, bytes] | None:
        """The mount that a folder lies in, and its path inside with a slash; None: in no mount."""
        cwd, folder = key
        real = os.path.realpath(os.path.join(cwd, os.fsdecode(folder)))
        within = [
            each.path
            for each in self._mounts
            if real == each.path or real.startswith(each.path.rstrip("/") + "/")
        ]
        place = None
        if within:
            mount = max(within, key=len)
            inside = os.path.relpath(real, mount)
            place = mount, b"" if inside == "." else os.fsencode(inside) + b"/"
        self._folders[key] = place
        return place
