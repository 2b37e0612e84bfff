"""What a put has to do: the source compared with what the dataset holds.

Owned here: when an entry counts as unchanged, what conflicts, what `--delete` removes. It reads
attributes of the source, never contents (except with `--checksum`), and changes nothing.
"""

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from ..errors import ConflictError, UsageError
from ..format.entries import Kind, join, path_fault
from ..format.snapshot.reader import Snapshot, same_content
from ..system.atomic_file import close_folder
from .conflicts import folder_conflict, removed_paths, replacement_conflict
from .options import Filter, PutOptions
from .sources.folder import FolderListing, ReportFailure, failure_reason, open_file, open_folder

RESERVED_NAME = b".diesel"
"""The name of a mount's own folder, at a dataset's root."""


@dataclass(frozen=True, slots=True)
class FolderChanges:
    """What of one folder is to be packed; `entry` is its own (mode, mtime_ns) if that changed, with
    all bits of the mode."""

    path: bytes
    entry: tuple[int, int] | None
    files: list[bytes]
    links: list[bytes]
    unchanged: int


class FolderComparer:
    """Compares folders with a view of the dataset; remembers what it has seen, for
    `removed_paths()`."""

    def __init__(
        self,
        view: Snapshot,
        readable: Callable[[int], bool],
        prefix: bytes,
        options: PutOptions,
        path_filter: Filter,
        failed: ReportFailure,
        root: int,
    ) -> None:
        self._view = view
        self._readable = readable
        self._prefix = prefix
        self._options = options
        self._filter = path_filter
        self._failed = failed
        self._root = root
        self._seen = bytearray(view.entry_count) if options.delete else bytearray()
        self._any_seen = False
        self._check_prefix()

    def _check_prefix(self) -> None:
        if self._prefix.split(b"/")[0] == RESERVED_NAME:
            raise UsageError("`.diesel` at the root of a dataset is the mount's own folder")
        for end in range(len(self._prefix) + 1):
            if end == len(self._prefix) or self._prefix[end : end + 1] == b"/":
                above = self._view.lookup(self._prefix[:end])
                if above >= 0 and self._view.stat(above).kind != Kind.FOLDER:
                    raise ConflictError(f"{self._prefix[:end]!r} is a file of the dataset")

    def changes(self, listings: Iterator[FolderListing]) -> Iterator[FolderChanges]:
        """What to pack of each folder that comes along."""
        for listing in listings:
            target = join(self._prefix, listing.path) if listing.path else self._prefix
            if fault := path_fault(target):
                self._failed(listing.path, f"its path has {fault}")
                continue
            if reason := self._conflict_at(target):
                self._failed(listing.path, reason)
                listing.folders.clear()  # one word is enough for all that is below
                continue
            if target == b"":
                for names in (listing.files, listing.links, listing.folders):
                    if RESERVED_NAME in names:
                        names.remove(RESERVED_NAME)
                        self._failed(
                            RESERVED_NAME, "refused: it is the name of a mount's own folder"
                        )
            self._any_seen |= bool(listing.files or listing.links or listing.folders)
            yield self._compare(listing, target)

    def removed_paths(self) -> list[bytes]:
        """The paths that the dataset has and the source has not, deepest first.

        Empty for a source without anything in it, unless that is allowed. What the filters leave
        out is left alone here, too.
        """
        if not self._any_seen and not self._options.allow_empty:
            return []
        return removed_paths(self._view, self._prefix, self._seen, self._filter)

    def _compare(self, listing: FolderListing, target: bytes) -> FolderChanges:
        at = self._view.lookup(target)
        stat_there = self._view.stat(at) if at >= 0 else None
        own = (listing.mode & 0o777, listing.mtime_ns)
        same_folder = (
            stat_there is not None
            and stat_there.kind == Kind.FOLDER
            and (stat_there.mode, stat_there.mtime_ns) == own
            and self._readable(at)
        )
        entry = None if same_folder or listing.unread else (listing.mode, listing.mtime_ns)
        if at < 0 or stat_there is None or stat_there.kind != Kind.FOLDER:
            self._mark(at, whole=listing.unread)
            return FolderChanges(
                listing.path, entry, listing.files, listing.links, int(same_folder)
            )
        self._mark(at, whole=listing.unread)
        there = {self._view.name(i): i for i in self._view.children(at)}
        if not there:
            return FolderChanges(
                listing.path, entry, listing.files, listing.links, int(same_folder)
            )
        changed, unchanged = self._compare_names(listing, there)
        files = [name for name in listing.files if name in changed]
        links = [name for name in listing.links if name in changed]
        return FolderChanges(listing.path, entry, files, links, unchanged + int(same_folder))

    def _compare_names(
        self, listing: FolderListing, there: dict[bytes, int]
    ) -> tuple[set[bytes], int]:
        """The files and links of a folder that are new or different, and how many are not."""
        changed: set[bytes] = set()
        unchanged = 0
        names = (*listing.files, *listing.links)
        for name in names:  # the source has them, whether or not they can be looked at
            self._mark(there.get(name, -1))
        try:
            folder = open_folder(self._root, listing.path)
        except OSError as error:
            self._failed(listing.path, failure_reason(error))
            return changed, 0
        try:
            for name in names:
                index = there.get(name, -1)
                if index < 0:
                    changed.add(name)
                    continue
                reason = replacement_conflict(
                    self._view, index, Kind.FILE, self._prefix, self._filter,
                    delete=self._options.delete,
                )  # fmt: skip
                if reason:
                    self._failed(join(listing.path, name), reason)
                elif self._unchanged(folder, name, index):
                    unchanged += 1
                else:
                    changed.add(name)
        finally:
            close_folder(folder)
        return changed, unchanged

    def _conflict_at(self, target: bytes) -> str:
        """Why nothing of a folder can be put at a path, or the empty string."""
        at = self._view.lookup(target)
        if at >= 0 and self._view.stat(at).kind == Kind.FOLDER:
            return ""
        return folder_conflict(
            self._view, target, self._prefix, self._filter, delete=self._options.delete
        )

    def _unchanged(self, folder: int, name: bytes, index: int) -> bool:
        there = self._view.stat(index)
        try:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISLNK(found.st_mode):
                return there.kind == Kind.LINK and (
                    os.readlink(name, dir_fd=folder) == self._view.link(index)
                    and there.mtime_ns == found.st_mtime_ns
                    and self._readable(index)
                )
            return (
                there.kind == Kind.FILE
                and there.size == found.st_size
                and there.mtime_ns == found.st_mtime_ns
                and there.mode == found.st_mode & 0o777
                and (not self._options.checksum or self._same_content(folder, name, index))
                and self._readable(index)
            )
        except OSError:
            return False  # the packing process will find and name it

    def _same_content(self, folder: int, name: bytes, index: int) -> bool:
        file = open_file(folder, name)
        try:
            return same_content(self._view.extents(index), partial(os.pread, file))
        finally:
            os.close(file)

    def _mark(self, index: int, *, whole: bool = False) -> None:
        """Remember that the source has an entry; `whole`: and perhaps all that is below it."""
        if index < 0 or not self._options.delete:
            return
        self._seen[index] = 1
        if whole:
            for below in self._view.walk(index):
                self._seen[int(below)] = 1
