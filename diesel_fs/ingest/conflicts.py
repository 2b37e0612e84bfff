"""What stands where an entry is to go: for sources whose entries come one by one.

`plan.py` compares whole folders of a source that can be listed; a tar and a single file are
compared here. Owned here: what is in an entry's way, when it counts as unchanged, and (for both)
what `--delete` removes. Reads the view of the dataset alone, and changes nothing. One thread.
"""

import logging
from uuid import uuid4

from ..cache.reader import EntryReader
from ..errors import DieselError, FormatError, NoSuchDataset, ObjectMissing
from ..format.entries import Kind, Stat, join, split
from ..format.snapshot.reader import ROOT_INDEX, Snapshot
from ..names import shown
from ..repository.interface import Repository
from ..repository.versions import empty_snapshot
from ..repository.writing import WriteSession
from .options import Filter, PutOptions, PutReport

log = logging.getLogger("diesel.put")

_MEMORY_BYTES = 64 << 20  # some chunks, for what lies near each other in the source


def begin_put(
    repository: Repository, dataset: str, options: PutOptions
) -> "tuple[WriteSession | None, Snapshot, ReadabilityCheck]":
    """A put begins: its session, the dataset as it is, and what of that can be read. A dry run has
    no session; to it a dataset that is not there is empty, and is not made. Raises DieselError."""
    session = None if options.dry_run else repository.begin(dataset)
    try:
        view = session.view if session else repository.view(dataset)
    except NoSuchDataset:
        view = empty_snapshot(uuid4(), dataset)
    return session, view, ReadabilityCheck(repository, dataset, view, options)


class ReadabilityCheck:
    """Tells which entries of a dataset can be read. One that cannot is put again, however equal its
    attributes are to the source's: that is how a dataset is healed.

    By default, an entry counts as readable if the store has its chunk in full length; with
    `--checksum` each file that is asked for is read, and its bytes are checked.
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
        self._lost = frozenset(view.lookup(path) for path in paths) - {-1}
        self._view = view
        self._reader: EntryReader | None = None
        if options.checksum:
            self._reader = EntryReader(view, repository.objects, _MEMORY_BYTES)
        if self._lost:
            log.warning(
                "the store lacks chunks of %d entries of %s; what is put again is stored again",
                *(len(self._lost), dataset),
            )

    def __call__(self, index: int) -> bool:
        if index in self._lost:
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


def removed_paths(view: Snapshot, prefix: bytes, seen: bytearray, chosen: Filter) -> list[bytes]:
    """The paths below `prefix` that the source has not (by index in `seen`), deepest first.

    What the filters leave out is left alone, and so is a folder in which something is.
    """
    top = view.lookup(prefix)
    start = len(prefix) + 1 if prefix else 0
    paths: list[bytes] = []
    kept: set[int] = set()
    for index in reversed(view.walk(top).tolist() if top >= 0 else []):
        if seen[index] or index == top:
            continue
        path = view.path(index)
        is_folder = view.stat(index).kind == Kind.FOLDER
        if index in kept or chosen.excludes(path[start:], is_folder=is_folder):
            kept.add(view.parent(index))
        else:
            paths.append(path)
    return paths


def replacement_conflict(
    view: Snapshot, index: int, kind: Kind, prefix: bytes, chosen: Filter, *, delete: bool
) -> str:
    """Why an entry of a kind cannot take the place of what stands at `index`, or the empty string.

    A folder replaces no file or link, and these replace no folder, unless `delete` removes what
    stands there, with all that is in it.
    """
    if index < 0 or (view.stat(index).kind == Kind.FOLDER) == (kind == Kind.FOLDER):
        return ""
    start = len(prefix) + 1 if prefix else 0
    if delete and not any(
        chosen.excludes(view.path(i)[start:], is_folder=view.stat(i).kind == Kind.FOLDER)
        for i in view.walk(index).tolist()
    ):
        return ""
    there = "file" if kind == Kind.FOLDER else "folder"
    return f"refused: {shown(view.path(index))} is a {there} of the dataset; remove it first"


def folder_conflict(
    view: Snapshot, folder: bytes, prefix: bytes, chosen: Filter, *, delete: bool
) -> str:
    """Why nothing can be put into a folder: `replacement_conflict` with it or one above; or
    nothing."""
    index = ROOT_INDEX
    for name in folder.split(b"/") if folder else ():
        index = view.child(index, name)
        if index < 0:
            return ""
        if reason := replacement_conflict(view, index, Kind.FOLDER, prefix, chosen, delete=delete):
            return reason
    return ""


def delete_shadowed_files(
    repository: Repository,
    session: WriteSession,
    before: Snapshot,
    report: PutReport,
    why: str,
) -> None:
    """After a put of a source that has files where it has folders, too: these files go again.

    Where others wrote meanwhile the files may be theirs, and stay: `verify` names them.
    """
    shadowed = sorted(_shadowed(repository.view(session.name)) - _shadowed(before))
    if shadowed and not session.others_committed():
        session.delete(shadowed)
        for path in shadowed:
            report.fail(path, f"left out: {why}")
        report.version = session.finish()


def _shadowed(view: Snapshot) -> set[bytes]:
    return {view.path(index) for index in view.shadowing_folders().tolist()}


class EntryComparer:
    """A view of the dataset, and what has been put over it since."""

    def __init__(
        self, view: Snapshot, prefix: bytes, options: PutOptions, readable: ReadabilityCheck
    ) -> None:
        self.view = view
        self._readable = readable
        self._prefix = prefix
        self._options = options
        self._chosen = Filter(options)
        self._folder_conflicts: dict[bytes, str] = {
            b"": ""
        }  # folders, and why nothing can go into them
        self._changed: set[int] = set()
        self._seen = bytearray(view.entry_count)
        self._any_found = False

    def find(self, target: bytes) -> int:
        """The index of what stands at a path, or -1; the source has it too."""
        self._any_found = True
        index = self.view.lookup(target)
        if index >= 0:
            self._seen[index] = 1
        return index

    def accepts_any_file(self, folder: bytes) -> bool:
        """Whether nothing stands in a folder, so that any file can be put there; the source has
        something in it."""
        self._any_found = True
        at = self.view.lookup(folder)
        if at >= 0 and len(self.view.children(at)):
            return False
        return not self.conflict_reason(join(folder, b"."), -1, Kind.FILE)

    def conflict_reason(self, target: bytes, index: int, kind: Kind) -> str:
        """Why an entry cannot be put at a path where `index` stands, or the empty string."""
        folder = split(target)[0]
        reason = self._folder_conflicts.get(folder)
        if reason is None:
            reason = self._folder_conflicts[folder] = folder_conflict(
                self.view, folder, self._prefix, self._chosen, delete=self._options.delete
            )
            self._mark_above(folder)
        return reason or replacement_conflict(
            self.view, index, kind, self._prefix, self._chosen, delete=self._options.delete
        )

    def unchanged(self, index: int, entry: Stat, link: bytes = b"") -> bool:
        """Whether just this stands there, by its attributes, and has not been put over."""
        return (
            index >= 0
            and index not in self._changed
            and self.view.stat(index) == entry
            and (entry.kind != Kind.LINK or self.view.link(index) == link)
            and self._readable(index)
        )

    def mark_replaced(self, index: int) -> None:
        """Remember that an entry is put where `index` stands (-1: where nothing does)."""
        if index >= 0:
            self._changed.add(index)

    def removed_paths(self) -> list[bytes]:
        """What `--delete` removes: the paths that were never asked for, deepest first.

        Empty for a source without anything in it, unless that is allowed.
        """
        if not self._options.delete or not (self._any_found or self._options.allow_empty):
            return []
        return removed_paths(self.view, self._prefix, self._seen, self._chosen)

    def _mark_above(self, folder: bytes) -> None:
        """The source has this folder and those above it; not a file that stands in its place."""
        index = ROOT_INDEX
        for name in folder.split(b"/"):
            index = self.view.child(index, name)
            if index < 0 or self.view.stat(index).kind != Kind.FOLDER:
                return
            self._seen[index] = 1
