"""What stands where an entry is to go: for sources whose entries come one by one.

`plan.py` compares whole folders of a source that can be listed; a tar and a single file are
compared here. Owned here: what is in an entry's way, and when it counts as unchanged. Reads the
view of the dataset alone, and changes nothing. One thread.
"""

from uuid import uuid4

from ..entries import Kind, Stat, shown, split
from ..errors import NoSuchDataset
from ..repository import Repository
from ..snapshot import ROOT_INDEX, Snapshot


def view_unchanged(repository: Repository, dataset: str) -> Snapshot:
    """A dataset as it is, for a dry run: one that is not there is empty, and is not made."""
    try:
        return repository.view(dataset)
    except NoSuchDataset:
        return repository.snapshots.empty(uuid4(), dataset)


class Standing:
    """A view of the dataset, and what has been put over it since."""

    def __init__(self, view: Snapshot, *, delete: bool) -> None:
        self.view = view
        self._delete = delete
        self._entered: dict[bytes, str] = {b"": ""}  # folders, and why nothing can go into them
        self._changed: set[int] = set()
        self._seen = bytearray(view.entry_count)

    def find(self, target: bytes) -> int:
        """The index of what stands at a path, or -1; the source has it too."""
        index = self.view.lookup(target)
        if index >= 0:
            self._seen[index] = 1
        return index

    def obstacle(self, target: bytes, index: int, kind: Kind) -> str:
        """Why an entry cannot be put at a path where `index` stands, or the empty string."""
        if (
            index >= 0
            and kind != Kind.FOLDER
            and not self._delete
            and len(self.view.children(index))
        ):
            return "refused: it is a folder of the dataset, with entries"
        folder = split(target)[0]
        reason = self._entered.get(folder)
        if reason is None:
            reason = self._entered[folder] = self._enter(folder)
        return reason

    def unchanged(self, index: int, entry: Stat, link: bytes = b"") -> bool:
        """Whether just this stands there, by its attributes, and has not been put over."""
        return (
            index >= 0
            and index not in self._changed
            and self.view.stat(index) == entry
            and (entry.kind != Kind.LINK or self.view.link(index) == link)
        )

    def put_over(self, index: int, kind: Kind) -> None:
        """Remember that an entry is put where `index` stands (-1: where nothing does)."""
        if index >= 0:
            self._changed.add(index)
            if kind == Kind.FOLDER and self.view.stat(index).kind != Kind.FOLDER:
                self._entered = {b"": ""}

    def gone(self, prefix: bytes) -> list[bytes]:
        """The paths below `prefix` that were never asked for, deepest first."""
        top = self.view.lookup(prefix)
        below = self.view.walk(top).tolist() if top >= 0 else []
        return [self.view.path(i) for i in reversed(below) if i != top and not self._seen[i]]

    def _enter(self, folder: bytes) -> str:
        index = ROOT_INDEX
        for name in folder.split(b"/"):
            index = self.view.child(index, name)
            if index < 0:
                return ""
            self._seen[index] = 1
            if self.view.stat(index).kind != Kind.FOLDER:
                if index in self._changed:
                    return ""
                return f"refused: {shown(self.view.path(index))} is a file of the dataset"
        return ""
