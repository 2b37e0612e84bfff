"""The hands of residency: makes contents resident in the kernel, drops them, looks what is there.

Owned here: FUSE_NOTIFY_STORE, dropping by posix_fadvise(2) through the mount, cachestat(2) and
mincore(2), inotify watches on files of the mount. Not owned: what is to be done (`planner.py`).
Everything here can wait for the server of the same mount, or for a page lock that a READ under way
holds: so it runs in the helper process, in one thread, and never in the server.
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
"""Folders of the mount that are kept open to open files in; the least recently used goes."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_STORE = np.dtype(
    {
        "names": ["length", "code", "node", "offset", "size"],
        "formats": ["<u4", "<i4", "<u8", "<u8", "<u4"],
        "offsets": [0, 4, 16, 24, 32],
        "itemsize": STORE.size,
    }
)
_PACKED = np.dtype((np.void, STORE.size))

_IN_OPEN = 0x20
_EVENT = struct.Struct("iIII")


class FolderHandles:
    """Descriptors of the mount's folders, by index.

    They must not keep the mount busy: nobody could unmount it. Root works in a clone of the mount
    that hangs in no tree; others let go after each piece of work (`release_folders`).
    """

    def __init__(self, mountpoint: str, snapshot: Snapshot) -> None:
        self._mountpoint = mountpoint
        self._snapshot = snapshot
        self._open: dict[int, int] = {}
        self._clone = -1
        with suppress(OSError):
            self._clone = syscalls.clone_mount(mountpoint)

    def descriptor(self, folder: int) -> int:
        """A folder's descriptor, good until the next call. Raises OSError."""
        missing = []  # from the folder up, as deep as trees are: no recursion
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
        """A piece of work is done."""
        if self._clone < 0:
            self._close_all()

    def close(self) -> None:
        """Lets go of the mount."""
        self._close_all()
        if self._clone >= 0:
            os.close(self._clone)
            self._clone = -1

    def _close_all(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


def drop_pages(folders: FolderHandles, snapshot: Snapshot, entries: list[int]) -> None:
    """Take the pages of files out of the kernel's cache; who reads them meanwhile asks us."""
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
    """The files of one mount as the kernel holds them; see the module.

    `device` is a descriptor of the connection, used for notifications alone; `nodes` are those of
    the entries, where they are not their indices + 1.
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
        self._inotify = syscalls.inotify_init()
        self._watch_of: dict[int, int] = {}  # by entry
        self._entry_of: dict[int, int] = {}  # by watch
        self.known_entries = 0

        def dropping() -> Callable[[list[int]], None]:
            folders = FolderHandles(mountpoint, snapshot)
            return lambda entries: drop_pages(folders, snapshot, entries)

        self._dropper = Dropper(dropping)

    @property
    def events(self) -> int:
        """A descriptor that is readable when a watched file has been opened."""
        return self._inotify

    def store(self, batch: Batch) -> list[int]:
        """Make parts of files resident; the places in the batch of those that the kernel does not
        know (now). Waits while a READ of the same pages is under way.
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
                deque(written, 0)  # a loop without Python, which costs as much as the calls
            except FileNotFoundError:
                unknown.append(len(batch.contents) - length_hint(left) - 1)
            else:
                return unknown

    def invalidate(self, node: int) -> None:
        """Have the kernel drop what it keeps of a node of ours: it asks again when it is needed.

        Waits while a READ of its pages is under way.
        """
        with suppress(FileNotFoundError):  # it keeps nothing
            os.write(self._device, invalidate_node(node))

    def make_folder_known(self, folder: int) -> None:
        """Make everything in a folder known to the kernel: it asks for names and attributes."""
        inside = self._folders.descriptor(folder)
        with os.scandir(inside) as listed:
            self.known_entries += sum(1 for _ in listed)

    def make_entry_known(self, entry: int) -> None:
        """Make one entry known to the kernel. Raises OSError."""
        inside = self._folders.descriptor(self._snapshot.parent(entry))
        os.stat(self._snapshot.name(entry), dir_fd=inside, follow_symlinks=False)

    def drop(self, entries: npt.NDArray[np.uint32], on_progress: Callable[[], None]) -> None:
        """Have files dropped soon, in another process; `on_progress` is called as it goes."""
        self._dropper.drop(entries, on_progress)

    def resident_bytes(self, entry: int) -> int:
        """How many bytes of a file are in the kernel's cache, in whole pages."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        inside = self._folders.descriptor(self._snapshot.parent(entry))
        file = os.open(self._snapshot.name(entry), flags, dir_fd=inside)
        try:
            return syscalls.cached_bytes(file, self._snapshot.stat(entry).size)
        finally:
            os.close(file)

    def watch(self, entries: Iterable[int]) -> None:
        """From now on, `read_opens` tells when one of these files is opened."""
        for entry in entries:
            if entry in self._watch_of:
                continue
            with suppress(OSError):
                inside = self._folders.descriptor(self._snapshot.parent(entry))
                path = b"/proc/self/fd/%d/%s" % (inside, self._snapshot.name(entry))
                watch = syscalls.inotify_add(self._inotify, path, _IN_OPEN)
                self._watch_of[entry], self._entry_of[watch] = watch, entry

    def unwatch(self, entries: Iterable[int]) -> None:
        """No longer."""
        for entry in entries:
            watch = self._watch_of.pop(entry, None)
            if watch is not None:
                self._entry_of.pop(watch, None)
                with suppress(OSError):
                    syscalls.inotify_remove(self._inotify, watch)

    def read_opens(self) -> list[int]:
        """The watched files that were opened since the last call, in order. Never waits."""
        found: list[int] = []
        while True:
            try:
                events = os.read(self._inotify, 65_536)
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
        """A piece of work is done: nothing of ours may keep the mount busy now."""
        self._folders.release()

    def close(self) -> None:
        """Lets go of the mount."""
        self._dropper.close()
        self._folders.close()
        os.close(self._inotify)
