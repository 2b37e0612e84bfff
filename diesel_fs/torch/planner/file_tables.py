"""Finds the files of a training dataset in the mounts that show them, and keeps them in tables by
the index of the sample."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ...errors import DieselError
from ...format.snapshot.reader import Snapshot
from ...mounts.mountpoints.mountpoint import DatasetMount, dataset_mounts
from ...system.mountinfo import mounts

Entries = npt.NDArray[np.int64]
"""Entries of a snapshot; also indices of samples and positions."""


class ShownVersion(NamedTuple):
    """A version of a dataset on a mount. Entries have a meaning only in one version."""

    mount: str
    identity: str
    """The dataset's, as text."""
    version: int


class SampleFiles(NamedTuple):
    """The files of some samples in order; a sample may read any number of files."""

    entries: Entries
    ends: Entries
    """For each sample, the position after its last file in `entries`."""

    def first(self, count: int) -> "SampleFiles":
        """The files of the first `count` samples."""
        ends = self.ends[:count]
        return SampleFiles(self.entries[: ends[-1] if len(ends) else 0], ends)

    def then(self, more: "SampleFiles") -> "SampleFiles":
        """These files, followed by those of further samples."""
        return SampleFiles(
            np.concatenate((self.entries, more.entries)),
            np.concatenate((self.ends, more.ends + len(self.entries))),
        )


class SampleTable(Protocol):
    """The files of a dataset by the index of the sample."""

    @property
    def size(self) -> int:
        """The number of samples."""
        ...

    def take(self, indices: Entries) -> dict[ShownVersion, SampleFiles]:
        """The files of these samples, by mount. Negative indices count from the end; indices beyond
        the size have no files."""
        ...

    def for_all_ranks(self) -> "SampleTable":
        """A table that is the same on all ranks, if that is possible: that of the files that the
        dataset lists. For a dataset without a list, the files that this rank's samples have
        opened."""
        ...

    @property
    def failures(self) -> int:
        """How many plans have failed, since samples did not open their planned files."""
        ...


class FileTable:
    """A table that is filled in steps, by `add`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._added: dict[ShownVersion, list[tuple[Entries, Entries]]] = {}
        self._sorted: dict[ShownVersion, SampleFiles] = {}

    def add(self, shown: ShownVersion, indices: Entries, entries: Entries) -> None:
        """Add the file `entries[i]` of a mount to the sample `indices[i]`, after its other files.
        Indices out of range are ignored."""
        is_inside = (indices >= 0) & (indices < self.size)
        self._added.setdefault(shown, []).append((indices[is_inside], entries[is_inside]))
        self._sorted.pop(shown, None)

    @property
    def mounts(self) -> Sequence[ShownVersion]:
        return list(self._added)

    @property
    def found(self) -> int:
        """The number of samples with at least one file."""
        has_any = np.zeros(self.size, np.bool_)
        for parts in self._added.values():
            for indices, _ in parts:
                has_any[indices] = True
        return int(np.count_nonzero(has_any))

    @property
    def files(self) -> int:
        """The number of files of all samples."""
        return sum(len(indices) for parts in self._added.values() for indices, _ in parts)

    def take(self, indices: Entries) -> dict[ShownVersion, SampleFiles]:
        return {shown: _gathered(self._sort(shown), indices, self.size) for shown in self._added}

    def for_all_ranks(self) -> SampleTable:
        return self

    @property
    def failures(self) -> int:
        return 0

    def _sort(self, shown: ShownVersion) -> SampleFiles:
        found = self._sorted.get(shown)
        if found is None:
            parts = self._added[shown]
            indices = np.concatenate([each for each, _ in parts])
            entries = np.concatenate([each for _, each in parts])
            self._added[shown] = [(indices, entries)]
            order = np.argsort(indices, kind="stable")
            ends = np.cumsum(np.bincount(indices, minlength=self.size))
            found = self._sorted[shown] = SampleFiles(entries[order], ends)
        return found


@dataclass(frozen=True, slots=True)
class SubsetTable:
    """The table of a `Subset`: its sample i is the sample `indices[i]` of the table `of`."""

    of: SampleTable
    indices: Entries

    @property
    def size(self) -> int:
        return len(self.indices)

    def take(self, indices: Entries) -> dict[ShownVersion, SampleFiles]:
        at, is_inside = resolved(indices, self.size)
        inner = np.full(len(indices), self.of.size)  # beyond its end: no files
        inner[is_inside] = self.indices[at[is_inside]]
        return self.of.take(inner)

    def for_all_ranks(self) -> SampleTable:
        return SubsetTable(self.of.for_all_ranks(), self.indices)

    @property
    def failures(self) -> int:
        return self.of.failures


@dataclass(frozen=True, slots=True)
class ConcatTable:
    """The table of a `ConcatDataset`: the samples of all parts, one after the other."""

    parts: Sequence[SampleTable]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def take(self, indices: Entries) -> dict[ShownVersion, SampleFiles]:
        at, is_inside = resolved(indices, self.size)
        taken: dict[ShownVersion, list[tuple[Entries, SampleFiles]]] = {}
        start = 0
        for part in self.parts:
            [places] = np.nonzero(is_inside & (at >= start) & (at < start + part.size))
            for shown, files in part.take(at[places] - start).items():
                taken.setdefault(shown, []).append((places, files))
            start += part.size
        return {shown: scattered(parts, len(indices)) for shown, parts in taken.items()}

    def for_all_ranks(self) -> SampleTable:
        return ConcatTable([each.for_all_ranks() for each in self.parts])

    @property
    def failures(self) -> int:
        return sum(each.failures for each in self.parts)


def resolved(indices: Entries, size: int) -> tuple[Entries, npt.NDArray[np.bool_]]:
    """The indices with negative ones counted from the end, and a mask of those that exist."""
    at = np.where(indices < 0, indices + size, indices)
    return at, (at >= 0) & (at < size)


def _gathered(files: SampleFiles, indices: Entries, size: int) -> SampleFiles:
    """The files of the samples `indices`, given those of all `size` samples."""
    at, is_inside = resolved(indices, size)
    at, starts = np.where(is_inside, at, 0), np.concatenate(([0], files.ends))
    if not size:
        return SampleFiles(files.entries[:0], np.zeros(len(indices), np.int64))
    counts = np.where(is_inside, files.ends[at] - starts[at], 0)
    ends = np.cumsum(counts)
    return SampleFiles(files.entries[_ranges(starts[at], counts)], ends)


def scattered(parts: Sequence[tuple[Entries, SampleFiles]], size: int) -> SampleFiles:
    """Join the files of several groups of samples. Each group comes with the places of its samples
    in the result, which has `size` samples."""
    counts = np.zeros(size, np.int64)
    for places, files in parts:
        counts[places] = np.diff(files.ends, prepend=0)
    ends = np.cumsum(counts)
    entries = np.empty(int(counts.sum()), np.int64)
    for places, files in parts:
        entries[_ranges(ends[places] - counts[places], counts[places])] = files.entries
    return SampleFiles(entries, ends)


def _ranges(starts: Entries, counts: Entries) -> Entries:
    """The numbers of all ranges, one range after the other: `counts[i]` numbers from `starts[i]`
    on."""
    ends = np.cumsum(counts)
    ranges: Entries = np.arange(int(counts.sum())) + np.repeat(starts - (ends - counts), counts)
    return ranges


class MountedFiles:
    """Finds paths in the mounts of this machine, as they were at the last `refresh`."""

    def __init__(self) -> None:
        self._snapshots: dict[str, Snapshot] = {}
        self._folders: dict[tuple[str, bytes], tuple[str, bytes] | None] = {}
        self._mounts: list[DatasetMount] = []
        self.refresh()

    def refresh(self) -> None:
        """List the mounts anew, and forget their snapshots."""
        self._mounts = dataset_mounts(mounts())
        self._snapshots.clear()
        self._folders.clear()

    @property
    def mount_points(self) -> set[str]:
        return {each.path for each in self._mounts}

    def snapshot(self, mount: str) -> Snapshot:
        """The snapshot that a mount showed at the first call since the last `refresh`. Raises
        OSError if the mount is gone, and DieselError if the snapshot is damaged."""
        found = self._snapshots.get(mount)
        if found is None:
            with open(os.path.join(mount, ".diesel", "snapshot"), "rb") as file:
                found = self._snapshots[mount] = Snapshot(file.read())
        return found

    def find(
        self, table: FileTable, indices: Sequence[int], paths: Sequence[bytes], cwd: str
    ) -> None:
        """Add `paths[i]` to the files of the sample `indices[i]`. Relative paths begin at `cwd`;
        files outside the mounts are left out."""
        by_mount: dict[str, tuple[list[int], list[bytes]]] = {}
        for index, path in zip(indices, paths, strict=True):
            cut = path.rfind(b"/") + 1
            key = cwd, path[:cut]
            place = self._folders[key] if key in self._folders else self._place(key)
            if place is not None:
                mount, folder = place
                samples, inside = by_mount.setdefault(mount, ([], []))
                samples.append(index)
                inside.append(folder + path[cut:])
        for mount, (samples, inside) in by_mount.items():
            try:
                snapshot = self.snapshot(mount)
            except (OSError, DieselError):  # the mount is gone, and its files with it
                continue
            entries = snapshot.lookup_many(inside)
            shown = ShownVersion(mount, str(snapshot.identity), snapshot.version)
            table.add(shown, np.array(samples)[entries >= 0], entries[entries >= 0])

    def _place(self, key: tuple[str, bytes]) -> tuple[str, bytes] | None:
        """The mount of a folder, and the folder's path in the mount, "" or with a slash at its end.
        None if the folder lies in no mount. `key` has the current folder and the folder's path."""
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
