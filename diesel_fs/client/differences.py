"""What differs between two versions, or between a version and a folder.

An entry has **changed** where both sides have one of its kind at its path, and it has another mode,
mtime, size, content or target. One that has become another kind of entry is removed and added.
Contents of two versions are compared by their checksums (of a large file by those of its parts),
those of a folder as `put` compares them: by size and mtime alone, unless they are to be read.

Nothing is written. Two versions are compared by columns: 1.28 million entries take about a second.
A folder is walked as by `put`, one folder in memory at a time.
"""

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..format.entries import Kind, join
from ..format.snapshot.diff import diff_snapshots
from ..format.snapshot.reader import Indices, Snapshot
from ..ingest.compare import FolderChanges, FolderComparer
from ..ingest.options import Filter, PutOptions
from ..ingest.sources.folder import open_source
from ..ingest.sources.walk import walk
from ..repository.interface import index_of_path

_BATCH = 4096

CompareProgress = Callable[[int], None]
"""Told how many entries of a folder have been looked at."""


@dataclass(frozen=True, slots=True)
class Differences:
    """The paths that the second side has in addition, has otherwise, and has not.

    `failed` names what of a folder could not be read, and why.
    """

    added: Collection[bytes]
    changed: Collection[bytes]
    removed: Collection[bytes]
    unchanged: int
    failed: Sequence[tuple[bytes, str]] = ()


class _Paths(Collection[bytes]):
    """The paths of some entries, made when they are asked for."""

    def __init__(self, view: Snapshot, entries: Indices) -> None:
        self._view, self._entries = view, entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[bytes]:
        for start in range(0, len(self._entries), _BATCH):
            yield from self._view.paths(self._entries[start : start + _BATCH])

    def __contains__(self, path: object) -> bool:
        return any(path == each for each in self)


def compare_versions(old: Snapshot, new: Snapshot, below: bytes = b"") -> Differences:
    """What differs from `old` to `new`, at and below a path of both. Raises NoSuchPath."""
    before, now = old.walk(index_of_path(old, below)), new.walk(index_of_path(new, below))
    matched = diff_snapshots(old, new)
    is_there = np.zeros(len(old), np.bool_)
    is_there[matched.same_path[matched.same_path >= 0]] = True
    differs = matched.unchanged < 0
    differs[matched.folders_with_new_attributes] = True
    known = matched.same_path[now] >= 0
    changed = now[known & differs[now]]
    return Differences(
        _Paths(new, now[~known]),
        _Paths(new, changed),
        _Paths(old, before[~is_there[before]]),
        int(known.sum()) - len(changed),
    )


def compare_folder(
    view: Snapshot, below: bytes, folder: Path, *, checksum: bool, progress: CompareProgress
) -> Differences:
    """What differs from a version, at and below a path, to a folder: what `put --delete` of that
    folder would do. Raises NotFoundError, PermissionDenied, ConflictError for a path of a file.
    """
    options = PutOptions(delete=True, allow_empty=True, checksum=checksum)
    added: list[bytes] = []
    changed: list[bytes] = []
    replaced: list[bytes] = []
    failed: list[tuple[bytes, str]] = []
    seen = unchanged = 0

    def fail(path: bytes, reason: str) -> None:
        failed.append((path, reason))

    root = open_source(folder)
    try:
        plan = FolderComparer(view, below, options, Filter(options), _always_readable, fail, root)
        for each in plan.changes(walk(root, Filter(options), fail)):
            for path, kind in _entries(each, below):
                at = view.lookup(path)
                if at >= 0 and view.stat(at).kind == kind:
                    changed.append(path)
                    continue
                added.append(path)
                if at >= 0:
                    replaced.append(path)
            unchanged += each.unchanged
            seen += each.unchanged + len(each.files) + len(each.links) + 1
            progress(seen)
        removed = [*replaced, *reversed(plan.removed_paths())]
    finally:
        os.close(root)
    return Differences(added, changed, removed, unchanged, failed)


def _always_readable(_: int) -> bool:
    """Whether an entry's bytes can be read makes no difference between two trees."""
    return True


def _entries(each: FolderChanges, below: bytes) -> Iterator[tuple[bytes, Kind]]:
    """The entries of one folder that differ: first its own."""
    path = join(below, each.path) if each.path else below
    if each.entry is not None:
        yield path, Kind.FOLDER
    for name in each.files:
        yield join(path, name), Kind.FILE
    for name in each.links:
        yield join(path, name), Kind.LINK
