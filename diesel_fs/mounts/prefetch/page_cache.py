"""Carries out the planner's decisions: pushes contents into the page cache, drops and samples them.

`PageCache` is what the prefetch worker uses; it has one implementation for each kind of mount. In
a *FUSE tree* (`FusePageCache`, here) each file has a node of its own, into which its content is
pushed. In a *native* mount (`ContentPageCache` in `content_page_cache.py`) all contents lie in one
file. Pushing is FUSE's NOTIFY_STORE. Dropping is posix_fadvise(2) on files opened through the
mount. cachestat(2) or mincore(2) tell what is resident, and inotify when a reader opens a file.

Each of these calls can wait: for the server of the same mount, or for the lock on a page that a
READ in progress holds. So all of this runs in one thread of the prefetch worker, and never in the
server.
"""

import os
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import repeat
from operator import length_hint
from os import POSIX_FADV_DONTNEED
from typing import cast

import numpy as np
import numpy.typing as npt

from ...cache.readers.coalescing_reader import ExtentBatch
from ...format.snapshot.diff import OldIndices, SnapshotDiff
from ...format.snapshot.reader import ROOT_INDEX, Snapshot
from ...system import syscalls
from ..sessions.protocol import NOTIFY_STORE, STORE
from .advice_process import AdviceProcess, Advise, Parts, whole_files

FOLDERS_OPEN = 256
"""Folders of the mount that stay open for opening their files; the least recently used is
closed."""

ADVISED_BYTES = 128 << 10
"""The kernel reads no more ahead for one WILLNEED than for a sequential read; that is 128 KiB where
nobody has changed the mount's `read_ahead_kb`."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_IN_OPEN = 0x20
_EVENT = struct.Struct("iIII")
"""An event of inotify: the watch, its kind, a cookie, the length of a name that follows."""

STORES = np.dtype(
    {
        "names": ["length", "code", "node", "offset", "size"],
        "formats": ["<u4", "<i4", "<u8", "<u8", "<u4"],
        "offsets": [0, 4, 16, 24, 32],
        "itemsize": STORE.size,
    }
)
"""The head of a NOTIFY_STORE, for many at once (`STORE` in `protocol.py` has the same layout)."""
PACKED_STORE = np.dtype((np.void, STORE.size))


class FolderHandles:
    """Open folders of the mount, by the folders' indices in the snapshot.

    Open folders would keep the mount busy, so that it could not be unmounted. A worker that runs as
    root opens them in a clone of the mount that is attached nowhere; any other worker closes them
    after each piece of work (`release`).
    """

    def __init__(self, mountpoint: str, snapshot: Snapshot) -> None:
        self._mountpoint = mountpoint
        self._snapshot = snapshot
        self._open: dict[int, int] = {}
        self._clone = -1
        with suppress(OSError):
            self._clone = syscalls.clone_mount(mountpoint)

    def descriptor(self, folder: int) -> int:
        """A folder's descriptor, valid until the next call. Raises OSError."""
        missing = []  # folders to open, from this one upwards; no recursion, as trees may be deep
        while folder not in self._open and folder != ROOT_INDEX:
            missing.append(folder)
            folder = self._snapshot.parent(folder)
        found = self._open.pop(folder, -1)
        if found < 0:
            found = self._opened_root()
        self._open[folder] = found
        for folder in reversed(missing):
            found = os.open(self._snapshot.name(folder), _FOLDER, dir_fd=found)
            self._open[folder] = found
            if len(self._open) > FOLDERS_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
        return found

    def _opened_root(self) -> int:
        if self._clone < 0:
            return os.open(self._mountpoint, _FOLDER)
        return os.open(".", _FOLDER, dir_fd=self._clone)

    def release(self) -> None:
        """Close the folders where they keep the mount busy: a piece of work is done."""
        if self._clone < 0:
            self._close_all()

    def close(self) -> None:
        """Close all folders."""
        self._close_all()
        if self._clone >= 0:
            os.close(self._clone)
            self._clone = -1

    def _close_all(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


def advise_in_steps(file: int, start: int, size: int, advice: int) -> None:
    """Give the kernel an advice of posix_fadvise(2) on a large part of a file."""
    for at in range(start, start + size, ADVISED_BYTES):
        os.posix_fadvise(file, at, min(ADVISED_BYTES, start + size - at), advice)


def advise_on_files(folders: FolderHandles, snapshot: Snapshot, advice: int, parts: Parts) -> None:
    """Give the kernel an advice of posix_fadvise(2) on parts of files."""
    entries = parts["entry"]
    parents = snapshot.columns.parent[entries].tolist()
    rows = zip(
        parents,
        snapshot.names(entries.tolist()),
        parts["start"].tolist(),
        parts["size"].tolist(),
        strict=True,
    )
    openat, advise, close = os.open, os.posix_fadvise, os.close
    above, inside = -1, -1
    for parent, name, start, size in rows:
        try:
            if parent != above:
                above, inside = parent, folders.descriptor(parent)
            file = openat(name, _FILE, dir_fd=inside)
        except OSError:  # the mount is ending
            continue
        try:
            if size <= ADVISED_BYTES:
                advise(file, start, size, advice)
            else:
                advise_in_steps(file, start, size, advice)
        finally:
            close(file)
    folders.release()


class PageCache(ABC):
    """The page cache of one version of a mount (see the module).

    Files are opened by the names that users see.
    """

    def __init__(self, mountpoint: str, snapshot: Snapshot, content_file: int = -1) -> None:
        """Advice goes by a process of its own, in which `content_file` is open, too."""
        self._snapshot = snapshot
        self._folders = FolderHandles(mountpoint, snapshot)
        self.events = syscalls.inotify_init()
        """A descriptor that is readable when a watched file has been opened."""
        self._watch_of: dict[int, int] = {}  # by entry
        self._entry_of: dict[int, int] = {}  # by watch
        self.known_entries = 0
        """How many names the kernel has learnt by this."""
        self._process = AdviceProcess(
            lambda: self._adviser(FolderHandles(mountpoint, snapshot)), content_file
        )

    def _adviser(self, folders: FolderHandles) -> Advise:
        """What the process does, which calls this."""
        return lambda advice, parts: advise_on_files(folders, self._snapshot, advice, parts)

    @abstractmethod
    def inherit(self, old: "PageCache", diff: SnapshotDiff) -> OldIndices:
        """Take over from the page cache of another version, which is retired already.

        Returns, for each entry, the index of the same content in the other version if pages of it
        are still in use; else -1.
        """

    def take_contents(self, entries: npt.NDArray[np.uint32]) -> Iterator[ExtentBatch]:
        """What the page cache has of these files, in batches, for the page cache of another
        version. It is dropped here, as memory would be held twice. Of a large file a batch may have
        a part."""
        del entries
        return iter(())  # `inherit` has taken everything over

    def prepare(self, batch: ExtentBatch) -> None:  # noqa: B027  # not all need it
        """Make the kernel ready to take these contents. Call it before `store`."""

    @abstractmethod
    def store(self, batch: ExtentBatch) -> list[int]:
        """Push a batch of contents. Returns the places in it of contents that cannot be pushed.
        Waits while a READ of the same pages is in progress."""

    @abstractmethod
    def drop(self, entries: npt.NDArray[np.uint32], on_progress: Callable[[], None]) -> None:
        """Have the pages of files dropped soon. A later read of them is a READ again."""

    @abstractmethod
    def resident_bytes(self, entry: int) -> int:
        """How many bytes of a file are in the page cache, in whole pages. Raises OSError."""

    def is_whole(self, entry: int) -> bool:
        """Whether all pages of a file are in the page cache. Raises OSError."""
        return self.resident_bytes(entry) >= self._snapshot.stat(entry).size

    def drop_failed(self, entry: int) -> bool:
        """Drop pages of a file whose READ has failed: they are in the page cache without contents,
        and the kernel's read-ahead passes over them. Whether there were any. Raises OSError."""
        file = self._open(entry)
        try:
            return drop_failed(file, 0, self._snapshot.stat(entry).size)
        finally:
            os.close(file)

    def note_reads(self) -> None:  # noqa: B027  # not all need it
        """Note that READs of file contents have reached the server."""

    def is_lost(self, entry: int) -> bool:
        """Whether a READ of an entry that was pushed means that the kernel has freed its pages, and
        probably those of its neighbours."""
        return True

    def set_planned(self, *, is_planned: bool) -> None:  # noqa: B027  # FUSE has no staging area
        """Say whether readers follow a plan."""

    def tidy(self) -> bool:
        """Do a piece of work that can wait until there is nothing else to do. Returns whether more
        is left."""
        return False

    def _open(self, entry: int) -> int:
        inside = self._folders.descriptor(self._snapshot.parent(entry))
        return os.open(self._snapshot.name(entry), _FILE, dir_fd=inside)

    def _resident_bytes_of_file(self, entry: int) -> int:
        file = self._open(entry)
        try:
            return syscalls.cached_bytes(file, 0, self._snapshot.stat(entry).size)
        finally:
            os.close(file)

    def watch(self, entries: Iterable[int]) -> None:
        """Watch these files: `read_opens` reports when one of them is opened."""
        for entry in entries:
            if entry in self._watch_of:
                continue
            with suppress(OSError):
                inside = self._folders.descriptor(self._snapshot.parent(entry))
                path = b"/proc/self/fd/%d/%s" % (inside, self._snapshot.name(entry))
                watch = syscalls.inotify_add(self.events, path, _IN_OPEN)
                self._watch_of[entry], self._entry_of[watch] = watch, entry

    def unwatch(self, entries: Iterable[int]) -> None:
        """Stop watching these files."""
        for entry in entries:
            watch = self._watch_of.pop(entry, None)
            if watch is not None:
                self._entry_of.pop(watch, None)
                with suppress(OSError):
                    syscalls.inotify_remove(self.events, watch)

    def read_opens(self) -> list[int]:
        """The watched files that were opened since the last call, in order. Never waits."""
        found: list[int] = []
        while True:
            try:
                events = os.read(self.events, 65_536)
            except BlockingIOError:
                return found
            at = 0
            while at < len(events):
                watch, mask, _, length = _EVENT.unpack_from(events, at)
                at += _EVENT.size + length
                entry = self._entry_of.get(watch)
                if entry is not None and mask & _IN_OPEN:
                    found.append(entry)

    def release_folders(self) -> None:
        """Call after each piece of work, so that open folders do not keep the mount busy."""
        self._folders.release()

    def retire(self) -> None:
        """Another version's page cache is used from now on; this one is only read and closed."""
        self._process.close()
        if self.events >= 0:
            os.close(self.events)
            self.events = -1

    def close(self) -> None:
        """Release the mount."""
        self.retire()
        self._folders.close()


class FusePageCache(PageCache):
    """The page cache of a FUSE tree.

    The kernel takes contents only of files whose names it knows, so names are looked up first.
    """

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
        self._known_folders: set[int] = set()  # folders whose names the kernel knows, by entry

    def inherit(self, old: PageCache, diff: SnapshotDiff) -> OldIndices:
        """All pages: an unchanged file keeps its node."""
        assert isinstance(old, FusePageCache)
        self.known_entries = old.known_entries
        same_children = np.setdiff1d(np.flatnonzero(diff.unchanged >= 0), diff.changed_folders)
        was_known = np.isin(diff.unchanged[same_children], list(old._known_folders))
        self._known_folders = set(same_children[was_known].tolist())
        return diff.unchanged

    def prepare(self, batch: ExtentBatch) -> None:
        """Makes the kernel look up the files of a batch. Where it does not know the first file of a
        folder, all of the folder are looked up."""
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
        """Returns the places in the batch of files that the kernel does not know.

        It may have forgotten some since their names were made known: these are looked up and
        stored once more.
        """
        absent = []
        for at in self._store(batch):
            with suppress(OSError):
                self._make_entry_known(int(batch.entries[at]))
            if self._store(some_contents(batch, [at])):
                absent.append(at)
        return absent

    def drop(self, entries: npt.NDArray[np.uint32], on_progress: Callable[[], None]) -> None:
        """By the process, whose advice does not wait for pushes."""
        self._process.advise(POSIX_FADV_DONTNEED, whole_files(entries), on_progress)

    def resident_bytes(self, entry: int) -> int:
        """Those of the file."""
        return self._resident_bytes_of_file(entry)

    def _store(self, batch: ExtentBatch) -> list[int]:
        """Returns the places in the batch of files that the kernel does not know."""
        headers = np.zeros(len(batch.entries), STORES)
        sizes = np.fromiter(map(len, batch.contents), np.uint32, len(batch.entries))
        headers["length"], headers["code"] = sizes + STORE.size, NOTIFY_STORE
        nodes = self._nodes
        headers["node"] = batch.entries + 1 if nodes is None else nodes[batch.entries]
        headers["offset"] = batch.starts
        headers["size"] = sizes
        left = iter(batch.contents)
        messages = zip(cast(list[bytes], headers.view(PACKED_STORE).tolist()), left, strict=True)
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
        """Make the names in a folder known to the kernel, by listing it through the mount."""
        inside = self._folders.descriptor(folder)
        with os.scandir(inside) as listed:
            self.known_entries += sum(1 for _ in listed)

    def _make_entry_known(self, entry: int) -> None:
        """Make one name known to the kernel, by stat(2) through the mount. Raises OSError."""
        inside = self._folders.descriptor(self._snapshot.parent(entry))
        os.stat(self._snapshot.name(entry), dir_fd=inside, follow_symlinks=False)


def drop_failed(file: int, start: int, size: int) -> bool:
    """Drop the pages of a part of an open file if the READs of some have failed; whether they have.
    `start` is a multiple of the page size. Raises OSError."""
    has_failed = syscalls.read_bytes(file, start, size) < syscalls.cached_bytes(file, start, size)
    if has_failed:
        os.posix_fadvise(file, start, size, POSIX_FADV_DONTNEED)
    return has_failed


def some_contents(batch: ExtentBatch, places: list[int]) -> ExtentBatch:
    """The contents at these places of a batch."""
    return ExtentBatch(
        batch.entries[places], batch.starts[places], [batch.contents[at] for at in places]
    )
