"""Finds the file of each sample of a PyTorch dataset in a snapshot.

The dataset is a `DieselDataset`, or has a list of paths on a mount (as torchvision's
`ImageFolder`), or is a `Subset` or `ConcatDataset` of such datasets.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from torch.utils.data import ConcatDataset, Subset
from xxhash import xxh3_64_hexdigest

from ..errors import NoSuchPath, UsageError
from ..format.snapshot.reader import Indices, Snapshot
from ..orders.shuffle import ChunkedFiles
from .dataset import DieselDataset
from .folder import resolved
from .planner.file_tables import FileTable, MountedFiles

_LISTS = ("samples", "imgs", "paths")
"""The attributes in which a dataset may list its files: as paths, or as rows that begin with a
path."""

_PART = 1 << 16  # paths that are looked up at a time


@dataclass(frozen=True, slots=True)
class SampleSource:
    """The files of a dataset's samples. Element i of `files.entries` is the file of sample i."""

    dataset: str
    identity: str
    version: int
    files: ChunkedFiles
    mount: str | None
    """The mount point; None if the dataset reads from no mount."""

    def __len__(self) -> int:
        return len(self.files.entries)

    @property
    def digest(self) -> str:
        """A hash that changes if the selection or order of the samples does."""
        return xxh3_64_hexdigest(self.files.entries.astype("<i8").tobytes())

    def __str__(self) -> str:
        return f"{self.dataset}@{self.version}"


def sample_files(dataset: object) -> SampleSource:
    """Find the file of each sample; links are followed. Raises UsageError if the files are not
    known, lie on no mount, or lie in several DIESEL datasets or versions; NoSuchPath for a file
    that the mount does not have."""
    snapshot, entries, mount = _found(dataset)
    entries = np.array(entries, np.int64)
    for at in np.flatnonzero(snapshot.chunk_of(entries) < 0).tolist():
        followed = resolved(snapshot, int(entries[at]))
        if followed >= 0:
            entries[at] = followed
    return SampleSource(
        snapshot.dataset,
        str(snapshot.identity),
        snapshot.version,
        ChunkedFiles.of(snapshot, entries),
        mount,
    )


def _found(dataset: object) -> tuple[Snapshot, Indices, str | None]:
    """The snapshot, the entry of each sample (a file or a link), and the mount point or None."""
    if isinstance(dataset, DieselDataset):
        return dataset.snapshot, dataset.entries(), None
    if isinstance(dataset, Subset):
        snapshot, entries, mount = _found(dataset.dataset)
        return snapshot, entries[np.asarray(dataset.indices, np.int64)], mount
    if isinstance(dataset, ConcatDataset):
        parts = [_found(each) for each in dataset.datasets]
        first, _, mount = parts[0]
        for other, _, _ in parts:
            if (other.identity, other.version) != (first.identity, first.version):
                raise UsageError(
                    f"the samples are of {first.dataset}@{first.version} and of"
                    f" {other.dataset}@{other.version}: a chunk-wise order is of one version"
                )
        return first, np.concatenate([entries for _, entries, _ in parts]), mount
    return _on_a_mount(dataset)


def _on_a_mount(dataset: object) -> tuple[Snapshot, Indices, str]:
    rows = next((getattr(dataset, name) for name in _LISTS if hasattr(dataset, name)), None)
    if not isinstance(rows, Sequence):
        raise UsageError(
            f"the files of {type(dataset).__name__} are not known",
            advice="give a DieselDataset, or a dataset with a list `samples`, `imgs` or `paths` of"
            " files on a mount, such as torchvision's ImageFolder",
        )
    if not rows:
        raise UsageError(
            f"the {type(dataset).__name__} has no files", advice="is its folder the right one?"
        )
    mounted, table, cwd = MountedFiles(), FileTable(len(rows)), os.getcwd()
    for start in range(0, len(rows), _PART):
        paths = [os.fsencode(_path(row)) for row in islice(rows, start, start + _PART)]
        mounted.find(table, range(start, start + len(paths)), paths, cwd)
    taken = table.take(np.arange(table.size))
    if not taken:
        raise UsageError(
            f"{_path(rows[0])} is not on a mount of a dataset",
            advice="mount the dataset with `dlcmd mount`, or use DieselDataset",
        )
    shown, files = max(taken.items(), key=lambda each: len(each[1].entries))
    for at in np.flatnonzero(np.diff(files.ends, prepend=0) == 0)[:1].tolist():
        raise NoSuchPath(f"{_path(rows[at])} is not a file of the mount at {shown.mount}")
    return mounted.snapshot(shown.mount), files.entries, shown.mount


def _path(row: object) -> str:
    path = row[0] if isinstance(row, tuple | list) and row else row
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"{row!r} is not a path, nor a row that begins with one")
    return os.fspath(path)
