"""Carries out the planner's decisions: pushes contents into the page cache, drops and samples them.

Contents are pushed by FUSE's NOTIFY_STORE, and `PageCache` has one implementation for each kind of
mount:

- In a *FUSE tree* (`FusePageCache`, here) each file has a node of its own. The kernel must know the
  file's name first. Another version of the dataset keeps the pages of unchanged files.
- In a *native* mount (`ContentPageCache` in `content_page_cache.py`) all contents lie in one file,
  from which the kernel copies them. The copies belong to one version.
"""

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import repeat
from operator import length_hint
from os import POSIX_FADV_DONTNEED
from typing import cast

import numpy as np
import numpy.typing as npt

from ....cache.readers.coalescing_reader import ExtentBatch
from ....format.snapshot.diff import OldIndices, SnapshotDiff
from ....format.snapshot.reader import Snapshot
from ...sessions.protocol import NOTIFY_STORE, STORE
from .advice_process import AdviceProcess, Advise, whole_files
from .mount_files import MountFiles
from .open_events import OpenEvents

_STORES = np.dtype(
    {
        "names": ["length", "code", "node", "offset", "size"],
        "formats": ["<u4", "<i4", "<u8", "<u8", "<u4"],
        "offsets": [0, 4, 16, 24, 32],
        "itemsize": STORE.size,
    }
)
"""The heads of many NOTIFY_STOREs at once (`STORE` in `protocol.py` has the same layout)."""
_PACKED_STORE = np.dtype((np.void, STORE.size))


def store_heads(
    nodes: npt.NDArray[np.int64] | npt.NDArray[np.uint64] | int,
    offsets: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64] | npt.NDArray[np.uint32],
) -> list[bytes]:
    """The heads of NOTIFY_STORE messages, which store `sizes` bytes at offsets in nodes."""
    heads = np.zeros(len(sizes), _STORES)
    heads["length"], heads["code"] = sizes + STORE.size, NOTIFY_STORE
    heads["node"], heads["offset"], heads["size"] = nodes, offsets, sizes
    return cast(list[bytes], heads.view(_PACKED_STORE).tolist())


class PageCache(ABC):
    def __init__(self, mountpoint: str, snapshot: Snapshot, content_file: int = -1) -> None:
        """`content_file` is a descriptor of a native mount's content file; -1 for a FUSE tree. It
        stays open in the process that advises the kernel."""
        self._snapshot = snapshot
        self._files = MountFiles(mountpoint, snapshot)
        self.opens = OpenEvents(self._files, keeps_files_open=content_file >= 0)
        self.known_entries = 0
        """Files that the kernel has got to know through this page cache, in all."""
        self._process = AdviceProcess(
            lambda: self._adviser(MountFiles(mountpoint, snapshot)), content_file
        )

    def _adviser(self, files: MountFiles) -> Advise:
        """Return the function that gives advice. Called in the process of `advice_process.py`."""
        return files.advise

    @abstractmethod
    def inherit(self, old: "PageCache", diff: SnapshotDiff) -> OldIndices:
        """Take over from the page cache of another version, which is retired already. Returns each
        entry's index there if its pages have been taken over; otherwise -1."""

    def take_contents(self, entries: npt.NDArray[np.uint32]) -> Iterator[ExtentBatch]:
        """Take contents out of the page cache, in batches, for the page cache of another version.
        They are dropped here, as memory would be held twice. A batch may have a part of a large
        file."""
        del entries
        return iter(())  # `inherit` has taken everything over

    def prepare(self, batch: ExtentBatch) -> None:  # noqa: B027  # not all need it
        """Make the kernel ready to take these contents."""

    @abstractmethod
    def store(self, batch: ExtentBatch) -> list[int]:
        """Push a batch. Returns the places in it of the contents that cannot be pushed. Waits while
        a READ of the same pages is in progress."""

    @abstractmethod
    def drop(self, entries: npt.NDArray[np.uint32], on_progress: Callable[[], None]) -> None:
        """Have the pages of files dropped soon. While this waits, it calls `on_progress` now and
        then."""

    def resident_bytes(self, entry: int) -> int:
        """Counts whole pages. Raises OSError."""
        return self._files.resident_bytes(entry)

    def is_whole(self, entry: int) -> bool:
        """Whether all pages of a file are in the page cache. Raises OSError."""
        return self.resident_bytes(entry) >= self._snapshot.stat(entry).size

    def drop_failed(self, entry: int) -> bool:
        """Drop the pages of a file if READs of some have failed. Returns whether they have. Raises
        OSError."""
        return self._files.drop_failed(entry)

    def note_reads(self) -> None:  # noqa: B027  # not all need it
        """Note that READs of file contents have reached the server."""

    def is_lost(self, entry: int) -> bool:
        """Whether a READ of an entry that was pushed means that the kernel has freed its pages, and
        probably those of its neighbours."""
        return True

    def set_planned(self, *, is_planned: bool) -> None:  # noqa: B027  # FUSE has no staging area
        """Report whether readers follow a plan."""

    def tidy(self) -> bool:
        """Do a piece of work that can wait until there is nothing else to do. Returns whether more
        is left."""
        return False

    def release_folders(self) -> None:
        """Close open folders that keep the mount busy."""
        self._files.release()

    def retire(self) -> None:
        """End the process that drops pages, and all watches. Only `take_contents` and `close` may
        be called afterwards."""
        self.opens.close()
        self._process.close()

    def close(self) -> None:
        self.retire()
        self._files.close()


class FusePageCache(PageCache):
    """The kernel takes the contents of a file only if it knows the name, so names are looked up
    first."""

    def __init__(
        self,
        mountpoint: str,
        snapshot: Snapshot,
        device: int,
        nodes: npt.NDArray[np.uint64] | None = None,
    ) -> None:
        """`device` is a descriptor of the FUSE connection, used for notifications only. `nodes` are
        the node numbers of the entries; without them, an entry's node is its index + 1."""
        super().__init__(mountpoint, snapshot)
        self._device = device
        self._nodes = nodes
        self._known_folders: set[int] = set()  # the kernel knows the names in these

    def inherit(self, old: PageCache, diff: SnapshotDiff) -> OldIndices:
        """Takes over all pages of unchanged files, since these keep their nodes."""
        assert isinstance(old, FusePageCache)
        self.known_entries = old.known_entries
        same_children = np.setdiff1d(np.flatnonzero(diff.unchanged >= 0), diff.changed_folders)
        was_known = np.isin(diff.unchanged[same_children], list(old._known_folders))
        self._known_folders = set(same_children[was_known].tolist())
        return diff.unchanged

    def prepare(self, batch: ExtentBatch) -> None:
        """Makes the names of a batch's files known to the kernel. For each new folder, tries to
        push its first file; if that fails, has the kernel look up all names there."""
        parents = self._snapshot.columns.parent[batch.entries].tolist()
        new = set(parents) - self._known_folders
        if not new:
            return
        self._known_folders |= new
        first = [parents.index(folder) for folder in new]
        for at in self._store(some_contents(batch, first)):
            with suppress(OSError):
                self._make_folder_known(parents[first[at]])

    def store(self, batch: ExtentBatch) -> list[int]:
        """Returns the places of files that the kernel does not know. If it has forgotten files
        since `prepare`, these are looked up and stored once more."""
        absent = []
        for at in self._store(batch):
            with suppress(OSError):
                self._make_entry_known(int(batch.entries[at]))
            if self._store(some_contents(batch, [at])):
                absent.append(at)
        return absent

    def drop(self, entries: npt.NDArray[np.uint32], on_progress: Callable[[], None]) -> None:
        self._process.advise(POSIX_FADV_DONTNEED, whole_files(entries), on_progress)

    def _store(self, batch: ExtentBatch) -> list[int]:
        sizes = np.fromiter(map(len, batch.contents), np.uint32, len(batch.entries))
        nodes = batch.entries + 1 if self._nodes is None else self._nodes[batch.entries]
        left = iter(batch.contents)
        messages = zip(store_heads(nodes, batch.starts, sizes), left, strict=True)
        written = map(os.writev, repeat(self._device), messages)
        unknown: list[int] = []
        while True:
            try:
                deque(written, 0)  # loops in C: a loop in Python would cost as much as the calls
            except FileNotFoundError:
                unknown.append(len(batch.contents) - length_hint(left) - 1)
            else:
                return unknown

    def _make_folder_known(self, folder: int) -> None:
        with os.scandir(self._files.folder(folder)) as listed:
            self.known_entries += sum(1 for _ in listed)

    def _make_entry_known(self, entry: int) -> None:
        inside = self._files.folder(self._snapshot.parent(entry))
        os.stat(self._snapshot.name(entry), dir_fd=inside, follow_symlinks=False)


def some_contents(batch: ExtentBatch, places: list[int]) -> ExtentBatch:
    return ExtentBatch(
        batch.entries[places], batch.starts[places], [batch.contents[at] for at in places]
    )
