"""Compares the source of a put with the dataset, to find new, conflicting and removed entries.

A source whose entries come one by one (a tar, a bucket, a file) looks up each in a `Comparer`; a
`FolderComparer` compares folder by folder. Contents are read only with `--checksum`. This module
changes nothing. One thread.
"""

import logging
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from ..cache.readers.entry_reader import EntryReader
from ..errors import ConflictError, DieselError, FormatError, ObjectMissing
from ..format.entries import MODE_MASK, Kind, Stat, join, path_fault, split
from ..format.snapshot.reader import ROOT_INDEX, Snapshot, same_content
from ..names import shown
from ..repository.interface import Repository
from ..system.atomic_file import close_folder
from .options import Filter, PutOptions
from .paths import RESERVED_NAME, source_path, target_path
from .sources.walk import FolderListing, ReportFailure, failure_reason, open_file, open_folder

log = logging.getLogger("diesel.ingest")

_MEMORY_BYTES = 64 << 20  # for chunks: entries near each other are in one chunk


class ReadabilityCheck:
    """Finds unreadable entries of a dataset. They are put again even if their attributes equal
    those of the source: this heals a dataset.

    An entry is readable if the store has its chunk in full length; with `--checksum` the file is
    read, and its bytes are checked.
    """

    def __init__(
        self, repository: Repository, dataset: str, view: Snapshot, options: PutOptions
    ) -> None:
        try:
            paths = repository.unreadable_paths(dataset) if view.entry_count > 1 else ()
        except DieselError:
            if not options.dry_run:
                raise
            paths = ()  # a dry run needs no metadata store, and no right to write
        self.lost = frozenset(view.lookup(path) for path in paths) - {-1}
        self._view = view
        self._reader: EntryReader | None = None
        if options.checksum:
            self._reader = EntryReader(view, repository.objects, _MEMORY_BYTES)
        if self.lost:
            log.warning(
                "the store lacks chunks of %d entries of %s; what is put again is stored again",
                *(len(self.lost), dataset),
            )

    def __call__(self, index: int) -> bool:
        if index in self.lost:
            return False
        if self._reader is None or self._view.stat(index).kind != Kind.FILE:
            return True
        try:
            for extent in self._view.extents(index):
                self._reader.read(index, extent.start, extent.size)
        except (FormatError, ObjectMissing) as error:
            log.warning("%s", error.message)
            return False
        return True


@dataclass(eq=False)
class Comparer:
    """Records which entries of `view`, the dataset before the put, the source has (for `--delete`),
    and which were replaced."""

    view: Snapshot
    target: bytes  # the path of the source in the dataset
    options: PutOptions
    path_filter: Filter
    readable: Callable[[int], bool]

    def __post_init__(self) -> None:
        # By folder of the dataset, why nothing can be put into it
        self._folder_conflicts: dict[bytes, str] = {b"": ""}
        self._replaced: set[int] = set()
        self._seen = bytearray(self.view.entry_count if self.options.delete else 0)
        self._any_found = False

    def find(self, path: bytes) -> int:
        """The index of an entry that the source has; -1 if the dataset lacks it."""
        self._any_found = True
        index = self.view.lookup(path)
        self._mark(index)
        return index

    def keep(self, path: bytes) -> None:
        """Keep `--delete` from removing this path, although the source lacks it."""
        self._mark(self.view.lookup(path))

    def accepts_any_file(self, folder: bytes) -> bool:
        """Whether a folder of the dataset is empty or missing, and no file or link is at its path,
        or at the path of a folder above it."""
        self._any_found = True
        at = self.view.lookup(folder)
        if at >= 0 and len(self.view.children(at)):
            return False
        return not self.conflict_reason(join(folder, b"."), -1, Kind.FILE)

    def conflict_reason(self, path: bytes, index: int, kind: Kind) -> str:
        """Why an entry cannot be put at a path, or "". The dataset has the entry `index` there (-1:
        none)."""
        folder = split(path)[0]
        reason = self._folder_conflicts.get(folder)
        if reason is None:
            reason = self._folder_conflicts[folder] = self._folder_conflict(folder)
            self._mark_above(folder)
        return reason or self._replacement_conflict(index, kind)

    def unchanged(self, index: int, entry: Stat, link: bytes = b"") -> bool:
        """Whether the entry `index` (-1: none) has exactly these attributes, was not replaced by
        this put, and is readable."""
        return (
            index >= 0
            and index not in self._replaced
            and self.view.stat(index) == entry
            and (entry.kind != Kind.LINK or self.view.link(index) == link)
            and self.readable(index)
        )

    def mark_replaced(self, index: int) -> None:
        if index >= 0:
            self._replaced.add(index)

    def removed_paths(self) -> list[bytes]:
        """The paths that `--delete` removes, deepest first. Empty if the source is empty, unless
        `allow_empty` is set. Entries that the filters leave out stay, and so does a folder that
        still contains something."""
        if not self.options.delete or not (self._any_found or self.options.allow_empty):
            return []
        top = self.view.lookup(self.target)
        paths: list[bytes] = []
        staying: set[int] = set()
        for index in reversed(self.view.walk(top).tolist() if top >= 0 else []):
            if self._seen[index] or index == top:
                continue
            if index in staying or self._is_excluded(index):
                staying.add(self.view.parent(index))
            else:
                paths.append(self.view.path(index))
        return paths

    def _is_excluded(self, index: int) -> bool:
        path = source_path(self.target, self.view.path(index))
        return self.path_filter.excludes(path, is_folder=self.view.stat(index).kind == Kind.FOLDER)

    def _replacement_conflict(self, index: int, kind: Kind) -> str:
        """As `conflict_reason`, for the entry itself. A folder replaces no file or link, and a file
        or link replaces no folder, unless `--delete` removes the old entry with all that is in
        it."""
        if index < 0 or (self.view.stat(index).kind == Kind.FOLDER) == (kind == Kind.FOLDER):
            return ""
        if self.options.delete and not any(map(self._is_excluded, self.view.walk(index).tolist())):
            return ""
        there = "file" if kind == Kind.FOLDER else "folder"
        path = shown(self.view.path(index))
        return f"refused: {path} is a {there} of the dataset; remove it first"

    def _folder_conflict(self, folder: bytes) -> str:
        """Why nothing can be put into a folder (it or one above it is a file or link), or ""."""
        index = ROOT_INDEX
        for name in folder.split(b"/") if folder else ():
            index = self.view.child(index, name)
            if index < 0:
                return ""
            if reason := self._replacement_conflict(index, Kind.FOLDER):
                return reason
        return ""

    def _mark(self, index: int, *, with_all_below: bool = False) -> None:
        if index < 0 or not self.options.delete:
            return
        self._seen[index] = 1
        if with_all_below:
            for below in self.view.walk(index):
                self._seen[int(below)] = 1

    def _mark_above(self, folder: bytes) -> None:
        index = ROOT_INDEX
        for name in folder.split(b"/"):
            index = self.view.child(index, name)
            if index < 0 or self.view.stat(index).kind != Kind.FOLDER:
                return
            self._mark(index)


def same_file_content(view: Snapshot, index: int, folder: int, name: bytes) -> bool:
    """Compares checksums. `folder` is a descriptor of the local file's folder. Raises OSError."""
    file = open_file(folder, name)
    try:
        return same_content(view.extents(index), partial(os.pread, file))
    finally:
        os.close(file)


@dataclass(frozen=True, slots=True)
class FolderChanges:
    """The entries of a folder to put. `path` is below the source. `entry` has the folder's own mode
    (with all bits) and mtime_ns, if one of them changed. `unchanged` counts the other entries."""

    path: bytes
    entry: tuple[int, int] | None
    files: list[bytes]
    links: list[bytes]
    unchanged: int


@dataclass(eq=False)
class FolderComparer(Comparer):
    """`failed` is called with the path of an entry that cannot be put, and the reason."""

    failed: ReportFailure
    root: int  # a descriptor of the source

    def __post_init__(self) -> None:
        super().__post_init__()
        parts = self.target.split(b"/")
        for count in range(len(parts)):  # each folder above the target, and the target
            path = b"/".join(parts[: count + 1])
            index = self.view.lookup(path)
            if index >= 0 and self.view.stat(index).kind != Kind.FOLDER:
                raise ConflictError(f"{path!r} is a file of the dataset")

    def changes(self, listings: Iterator[FolderListing]) -> Iterator[FolderChanges]:
        """A folder that cannot be put is reported as failed, and its subfolders are taken out of
        the listing, so that they are not walked."""
        for listing in listings:
            target = target_path(self.target, listing.path)
            if fault := path_fault(target):
                self.failed(listing.path, f"its path has {fault}")
                continue
            if reason := self._conflict_at(target):
                self.failed(listing.path, reason)
                listing.folders.clear()  # one report is enough for all that is below
                continue
            if target == b"":
                for names in (listing.files, listing.links, listing.folders):
                    if RESERVED_NAME in names:
                        names.remove(RESERVED_NAME)
                        self.failed(
                            RESERVED_NAME, "refused: it is the name of a mount's own folder"
                        )
            self._any_found |= bool(listing.files or listing.links or listing.folders)
            yield self._compare(listing, target)

    def _compare(self, listing: FolderListing, target: bytes) -> FolderChanges:
        at = self.view.lookup(target)
        self._mark(at, with_all_below=listing.unread)
        found = self.view.stat(at) if at >= 0 else None
        is_folder = found is not None and found.kind == Kind.FOLDER
        is_same = (
            is_folder
            and found is not None
            and (found.mode, found.mtime_ns) == (listing.mode & MODE_MASK, listing.mtime_ns)
            and self.readable(at)
        )
        entry = None if is_same or listing.unread else (listing.mode, listing.mtime_ns)
        files, links, unchanged = listing.files, listing.links, int(is_same)
        indices = {self.view.name(i): i for i in self.view.children(at)} if is_folder else {}
        if indices:
            changed, unchanged_names = self._compare_names(listing, indices)
            files = [name for name in files if name in changed]
            links = [name for name in links if name in changed]
            unchanged += unchanged_names
        return FolderChanges(listing.path, entry, files, links, unchanged)

    def _compare_names(
        self, listing: FolderListing, indices: dict[bytes, int]
    ) -> tuple[set[bytes], int]:
        """The new or different files and links, and the number of unchanged ones. `indices` has the
        dataset's entries in this folder, by name."""
        changed: set[bytes] = set()
        unchanged = 0
        names = (*listing.files, *listing.links)
        for name in names:  # the source has them, whether or not they can be looked at
            self._mark(indices.get(name, -1))
        try:
            folder = open_folder(self.root, listing.path)
        except OSError as error:
            self.failed(listing.path, failure_reason(error))
            return changed, 0
        try:
            for name in names:
                index = indices.get(name, -1)
                if index < 0:
                    changed.add(name)
                elif reason := self._replacement_conflict(index, Kind.FILE):
                    self.failed(join(listing.path, name), reason)
                elif self._is_unchanged(folder, name, index):
                    unchanged += 1
                else:
                    changed.add(name)
        finally:
            close_folder(folder)
        return changed, unchanged

    def _conflict_at(self, target: bytes) -> str:
        at = self.view.lookup(target)
        if at >= 0 and self.view.stat(at).kind == Kind.FOLDER:
            return ""
        return self._folder_conflict(target)

    def _is_unchanged(self, folder: int, name: bytes, index: int) -> bool:
        there = self.view.stat(index)
        try:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISLNK(found.st_mode):
                return there.kind == Kind.LINK and (
                    os.readlink(name, dir_fd=folder) == self.view.link(index)
                    and there.mtime_ns == found.st_mtime_ns
                    and self.readable(index)
                )
            return (
                there.kind == Kind.FILE
                and there.size == found.st_size
                and there.mtime_ns == found.st_mtime_ns
                and there.mode == found.st_mode & MODE_MASK
                and (not self.options.checksum or same_file_content(self.view, index, folder, name))
                and self.readable(index)
            )
        except OSError:
            return False  # the packing process will meet the same error and report it
