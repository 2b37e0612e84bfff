"""Carries out the planner's decisions: pushes contents into the page cache, drops and samples them.

Pushing is FUSE's NOTIFY_STORE. Dropping is posix_fadvise(2) on files opened through the mount.
cachestat(2) or mincore(2) tell what is resident, and inotify when a reader opens a file. The kernel
takes contents only of files whose names it knows, so names are looked up first.

Each of these calls can wait: for the server of the same mount, or for the lock on a page that a
READ in progress holds. So all of this runs in one thread of the prefetch worker, and never in the
server.
"""

import os
import struct
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import repeat
from operator import length_hint
from os import POSIX_FADV_DONTNEED
from typing import cast

import numpy as np
import numpy.typing as npt

from ...cache.coalescing_reader import Batch
from ...format.snapshot.reader import ROOT_INDEX, Snapshot
from ...system import syscalls
from ..sessions.protocol import NOTIFY_STORE, STORE, invalidate_node
from .dropper import Dropper

FOLDERS_OPEN = 256
"""Folders of the mount that stay open for opening their files; the least recently used is
closed."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_IN_OPEN = 0x20
_EVENT = struct.Struct("iIII")
"""An event of inotify: the watch, its kind, a cookie, the length of a name that follows."""

_STORE = np.dtype(
    {
        "names": ["length", "code", "node", "offset", "size"],
        "formats": ["<u4", "<i4", "<u8", "<u8", "<u4"],
        "offsets": [0, 4, 16, 24, 32],
        "itemsize": STORE.size,
    }
)
"""The head of a NOTIFY_STORE, for many at once (`STORE` in `protocol.py` has the same layout)."""
_PACKED = np.dtype((np.void, STORE.size))


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


def drop_pages(folders: FolderHandles, snapshot: Snapshot, entries: list[int]) -> None:
    """Take the pages of files out of the page cache. A later read of them is a READ again."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    parents = snapshot.columns.parent[entries].tolist()
    names = snapshot.names(entries)
    openat, advise, close, unneeded = os.open, os.posix_fadvise, os.close, POSIX_FADV_DONTNEED
    above, inside = -1, -1
    for parent, name in zip(parents, names, strict=True):
        try:
            if parent != above:
                above, inside = parent, folders.descriptor(parent)
            file = openat(name, flags, dir_fd=inside)
        except OSError:  # the mount is ending
            continue
        try:
            advise(file, 0, 0, unneeded)
        finally:
            close(file)
    folders.release()


class PageCache:
    """The page cache of one mount (see the module).

    `device` is a descriptor of the FUSE connection, used for notifications only. `nodes` are the
    node numbers of the entries; without them, an entry's node is its index + 1.
    """

    def __init__(
        self,
        mountpoint: str,
        snapshot: Snapshot,
        device: int,
        nodes: npt.NDArray[np.uint64] | None = None,
    ) -> None:
        self._snapshot = snapshot
        self._nodes = nodes
        self._device = device
        self._folders = FolderHandles(mountpoint, snapshot)
        self.events = syscalls.inotify_init()
        """A descriptor that is readable when a watched file has been opened."""
        self._watch_of: dict[int, int] = {}  # by entry
        self._entry_of: dict[int, int] = {}  # by watch
        self.known_entries = 0
        """How many names were made known to the kernel."""

        def dropping() -> Callable[[list[int]], None]:
            folders = FolderHandles(mountpoint, snapshot)
            return lambda entries: drop_pages(folders, snapshot, entries)

        self._dropper = Dropper(dropping)

    def store(self, batch: Batch) -> list[int]:
        """Push a batch of contents. Returns the places in the batch of files that the kernel does
        not know. Waits while a READ of the same pages is in progress.
        """
        headers = np.zeros(len(batch.entries), _STORE)
        sizes = np.fromiter(map(len, batch.contents), np.uint32, len(batch.entries))
        headers["length"], headers["code"] = sizes + STORE.size, NOTIFY_STORE
        nodes = self._nodes
        headers["node"] = batch.entries + 1 if nodes is None else nodes[batch.entries]
        headers["offset"] = batch.starts
        headers["size"] = sizes
        left = iter(batch.contents)
        messages = zip(cast(list[bytes], headers.view(_PACKED).tolist()), left, strict=True)
        written = map(os.writev, repeat(self._device), messages)
        unknown: list[int] = []
        while True:
            try:
                deque(written, 0)  # loops in C: a loop in Python would cost as much as the calls
            except FileNotFoundError:
                unknown.append(len(batch.contents) - length_hint(left) - 1)
            else:
                return unknown

    def invalidate(self, node: int) -> None:
        """Have the kernel drop the content that it keeps of a node; it asks for it when needed.

        Waits while a READ of the same pages is in progress.
        """
        with suppress(FileNotFoundError):  # it keeps nothing of the node
            os.write(self._device, invalidate_node(node))

    def make_folder_known(self, folder: int) -> None:
        """Make the names in a folder known to the kernel, by listing the folder through the
        mount."""
        inside = self._folders.descriptor(folder)
        with os.scandir(inside) as listed:
            self.known_entries += sum(1 for _ in listed)

    def make_entry_known(self, entry: int) -> None:
        """Make one name known to the kernel, by stat(2) through the mount. Raises OSError."""
        inside = self._folders.descriptor(self._snapshot.parent(entry))
        os.stat(self._snapshot.name(entry), dir_fd=inside, follow_symlinks=False)

    def drop(self, entries: npt.NDArray[np.uint32], on_progress: Callable[[], None]) -> None:
        """Have the pages of files dropped soon, by another process (`dropper.py`)."""
        self._dropper.drop(entries, on_progress)

    def resident_bytes(self, entry: int) -> int:
        """How many bytes of a file are in the page cache, in whole pages. Raises OSError."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        inside = self._folders.descriptor(self._snapshot.parent(entry))
        file = os.open(self._snapshot.name(entry), flags, dir_fd=inside)
        try:
            return syscalls.cached_bytes(file, self._snapshot.stat(entry).size)
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

    def close(self) -> None:
        """Release the mount."""
        self._dropper.close()
        self._folders.close()
        os.close(self.events)
