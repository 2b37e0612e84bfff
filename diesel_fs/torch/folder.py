"""Finds the samples of a folder in a snapshot: by its class folders, or by a manifest.

Class folders follow torchvision's `ImageFolder`: the folders in `root` are the classes, sorted by
name. A class's samples are sorted by the path of their folder, then by name (as text, so `a-b`
stands between `a` and `a/c`). Links are followed inside the dataset; a dangling link is a sample
that cannot be read.

Samples are kept as an array of entry numbers, since there may be millions. Paths and targets are
made on access.
"""

import operator
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, overload

import numpy as np
import numpy.typing as npt

from ..errors import NoSuchPath, UsageError
from ..format.entries import AnySlice, Kind
from ..format.manifest import Manifest
from ..format.manifest import find_samples as find_named
from ..format.snapshot.reader import ROOT_INDEX, Snapshot
from ..names import shown

IMG_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""The extensions that torchvision takes, in upper or lower case."""

_LINKS_MAX = 40  # as in Linux: a path through more links counts as a loop
_BATCH = 4096  # rows made at once

_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class FolderSamples:
    """The samples of class folders, in order of their classes. A sample is an index of
    `entries`."""

    classes: list[str]
    entries: npt.NDArray[np.int32]
    """The entry of each sample. Samples that are dangling links are `broken`."""
    broken: frozenset[int]
    class_ends: list[int]
    """The position after each class's last sample."""
    linked: dict[int, str] = field(default_factory=dict)
    """The path of each sample that is reached through a link. Others have their entry's path."""

    def target(self, sample: int) -> int:
        return bisect_right(self.class_ends, sample)

    def targets(self, samples: Sequence[int]) -> list[int]:
        found: list[int] = np.searchsorted(self.class_ends, samples, "right").tolist()
        return found


@dataclass(frozen=True, slots=True)
class ManifestSamples:
    """The samples of a manifest, in its order. `broken` and `linked` are empty, for code that takes
    either class."""

    classes: list[str]
    """The different targets, as text."""
    entries: npt.NDArray[np.int32]
    numbers: npt.NDArray[np.int32]
    """Each sample's target, as an index of `classes`."""
    target_entries: npt.NDArray[np.int32] | None
    """The entry of each of `classes` if the targets are files, otherwise None."""
    broken: frozenset[int] = frozenset()
    linked: dict[int, str] = field(default_factory=dict)

    def target(self, sample: int) -> int:
        return int(self.numbers[sample])

    def targets(self, samples: Sequence[int]) -> list[int]:
        found: list[int] = self.numbers[np.asarray(samples, np.int64)].tolist()
        return found


class LazyRows(Sequence[_Row]):
    """A sequence whose rows are made on access; `make` returns those of a range. It is equal to a
    list of the same rows."""

    def __init__(self, count: int, make: Callable[[range], list[_Row]]) -> None:
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> _Row: ...
    @overload
    def __getitem__(self, index: "AnySlice") -> list[_Row]: ...
    def __getitem__(self, index: "int | AnySlice") -> _Row | list[_Row]:
        wanted = range(self._count)[index]
        if isinstance(wanted, range):
            return self._make(wanted)
        return self._make(range(wanted, wanted + 1))[0]

    def __iter__(self) -> Iterator[_Row]:
        for start in range(0, self._count, _BATCH):
            yield from self._make(range(start, min(start + _BATCH, self._count)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LazyRows | list | tuple):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:3]))
        return f"[{shown}, ...] ({self._count} rows)" if self._count > 3 else f"[{shown}]"


def find_samples(
    snapshot: Snapshot,
    root: bytes,
    *,
    extensions: str | tuple[str, ...] | None,
    is_valid_file: Callable[[str], bool] | None,
    allow_empty: bool,
) -> FolderSamples:
    """Find the samples of the class folders in `root`. Either `extensions` chooses files by their
    names, or `is_valid_file` by their paths in the dataset.

    Raises NoSuchPath (a FileNotFoundError) if there is no class, or, unless `allow_empty`, a class
    without samples; UsageError if both `extensions` and `is_valid_file` are given or None, if
    `root` is not a folder, or if a link leads to a folder that contains it.
    """
    if (extensions is None) == (is_valid_file is None):
        raise UsageError("give either `extensions` or `is_valid_file`, not both and not neither")
    walk = _Walk(snapshot, extensions, is_valid_file)
    top = resolved(snapshot, snapshot.index_of(root))
    place = f"{snapshot.dataset}/{os.fsdecode(root)}" if root else snapshot.dataset
    if top < 0 or snapshot.stat(top).kind != Kind.FOLDER:
        raise UsageError(f"{place} is not a folder")
    classes = sorted(walk.folders(top))
    if not classes:
        raise NoSuchPath(f"Couldn't find any class folder in {place}.")
    ends: list[int] = []
    empty: list[str] = []
    for name, folder in classes:
        before = walk.count
        walk.add_class(os.path.join(os.fsdecode(root), name), folder)
        ends.append(walk.count)
        if walk.count == before:
            empty.append(name)
    if empty and not allow_empty:
        message = f"Found no valid file for the classes {', '.join(empty)}."
        if extensions is not None:
            named = extensions if isinstance(extensions, str) else ", ".join(extensions)
            message += f" Supported extensions are: {named}"
        raise NoSuchPath(message)
    entries = np.concatenate([*walk.parts, np.empty(0, np.int32)])
    broken = frozenset(np.flatnonzero(snapshot.chunk_of(entries) < 0).tolist())
    names = [name for name, _ in classes]
    return FolderSamples(names, entries, broken, ends, walk.linked)


def named_samples(snapshot: Snapshot, folder: bytes, manifest: Manifest) -> ManifestSamples:
    """The samples of a manifest, with paths relative to `folder`. Raises NoSuchPath (a
    FileNotFoundError) with the first line that names a missing file."""
    found = find_named(manifest, snapshot, folder)
    for fault in found.faults:
        more = f" ({found.fault_count:,} lines have such a fault)" if found.fault_count > 1 else ""
        raise NoSuchPath(
            f"{manifest.name}, line {fault.line}: {shown(fault.path)}: {fault.reason}{more}"
        )
    return ManifestSamples(manifest.classes, found.entries, manifest.targets, found.target_entries)


class _Walk:
    """Collects the samples of one class after the other."""

    def __init__(
        self,
        snapshot: Snapshot,
        extensions: str | tuple[str, ...] | None,
        is_valid_file: Callable[[str], bool] | None,
    ) -> None:
        self._snapshot = snapshot
        self._extensions = extensions
        self._is_valid_file = is_valid_file
        self.count = 0
        self.parts: list[npt.NDArray[np.int32]] = []
        self.linked: dict[int, str] = {}

    def folders(self, folder: int) -> list[tuple[str, int]]:
        """The name and entry of each folder in `folder`, with links followed."""
        snapshot, children = self._snapshot, self._snapshot.children(folder)
        if not len(children):
            return []
        found = []
        kinds = snapshot.stat_many(children).kind
        for at in np.flatnonzero(kinds != Kind.FILE).tolist():
            entry = resolved(snapshot, children[at])
            if entry >= 0 and snapshot.stat(entry).kind == Kind.FOLDER:
                found.append((os.fsdecode(snapshot.name(children[at])), entry))
        return found

    def add_class(self, path: str, folder: int) -> None:
        found: list[tuple[str, int]] = []
        left: list[tuple[str, int, tuple[int, ...]]] = [(path, folder, (folder,))]
        while left:
            path, folder, above = left.pop()
            found.append((path, folder))
            for name, inner in self.folders(folder):
                below = os.path.join(path, name)
                if inner in above:
                    raise UsageError(f"the link {below!r} leads to a folder that it lies in")
                left.append((below, inner, (*above, inner)))
        for path, folder in sorted(found):
            self._add_files(path, folder)

    def _add_files(self, path: str, folder: int) -> None:
        snapshot, children = self._snapshot, self._snapshot.children(folder)
        if not len(children):
            return
        kinds = snapshot.stat_many(children).kind
        names = map(os.fsdecode, snapshot.names(children))
        is_linked = os.fsencode(path) != snapshot.path(folder)
        rows = []
        for name, entry, kind in zip(names, children, kinds.tolist(), strict=True):
            if kind == Kind.FOLDER or not self._is_wanted(path, name):
                continue
            row = entry
            if kind == Kind.LINK:
                followed = resolved(snapshot, entry)
                if followed >= 0:
                    if snapshot.stat(followed).kind == Kind.FOLDER:
                        continue
                    row = followed
            rows.append((name, row, row != entry))
        rows.sort()  # as text: names that are not UTF-8 have another order as bytes
        for at, (name, _, is_followed) in enumerate(rows):
            if is_linked or is_followed:
                self.linked[self.count + at] = os.path.join(path, name)
        self.parts.append(np.array([entry for _, entry, _ in rows], np.int32))
        self.count += len(rows)

    def _is_wanted(self, path: str, name: str) -> bool:
        if self._extensions is not None:
            return name.lower().endswith(self._extensions)
        assert self._is_valid_file is not None
        return self._is_valid_file(os.path.join(path, name))


def resolved(snapshot: Snapshot, entry: int) -> int:
    """The entry to which the link `entry` leads, or `entry` itself if it is no link. The result is
    -1 if the link is dangling or leads out of the dataset, or if `entry` is -1."""
    left = _LINKS_MAX
    while entry >= 0 and snapshot.stat(entry).kind == Kind.LINK:
        target, folder = snapshot.link(entry), snapshot.parent(entry)
        left -= 1
        if left < 0 or target.startswith(b"/"):
            return -1
        entry = folder
        *inner, last = target.rstrip(b"/").split(b"/")
        for name in inner:
            entry = resolved(snapshot, _step(snapshot, entry, name))
            if entry < 0:
                return -1
        entry = _step(snapshot, entry, last)
    return entry


def _step(snapshot: Snapshot, folder: int, name: bytes) -> int:
    """The entry of one name of a path (also `.` and `..`) in `folder`; -1 if there is none."""
    if name in (b"", b"."):
        return folder
    if name == b"..":
        return snapshot.parent(folder) if folder != ROOT_INDEX else -1
    return snapshot.child(folder, name) if snapshot.stat(folder).kind == Kind.FOLDER else -1
