"""Opens files and folders of a mount by their indices in the snapshot.

The page caches (`page_cache.py`) open files by the names that users see: posix_fadvise(2),
cachestat(2) and inotify work on files. Each call may wait for the mount's server. A `MountFiles`
belongs to one thread.
"""

import os
from contextlib import suppress
from os import POSIX_FADV_DONTNEED

from ....format.snapshot.reader import ROOT_INDEX, Snapshot
from ....system import syscalls
from .advice_process import Parts

FOLDERS_OPEN = 256
"""Folders that stay open, so that their files can be opened; the least recently used one is
closed."""

ADVISED_BYTES = 128 << 10
"""At one WILLNEED the kernel reads no more than it reads ahead in a sequential read: 128 KiB unless
somebody has changed the mount's `read_ahead_kb`."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class MountFiles:
    """Open folders would keep the mount busy, so that it could not be unmounted. A worker that runs
    as root opens them in a clone of the mount that is attached nowhere; any other worker closes
    them after each piece of work (`release`)."""

    def __init__(self, mountpoint: str, snapshot: Snapshot) -> None:
        self._mountpoint = mountpoint
        self._snapshot = snapshot
        self._open: dict[int, int] = {}  # descriptors, by folder
        self._clone = -1
        with suppress(OSError):
            self._clone = syscalls.clone_mount(mountpoint)

    def folder(self, folder: int) -> int:
        """A descriptor of a folder, valid until the next call of any method; this object closes it.
        Raises OSError."""
        missing = []  # from this one upwards; no recursion, as trees may be deep
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

    def open(self, entry: int) -> int:
        """The caller closes the descriptor. Raises OSError."""
        inside = self.folder(self._snapshot.parent(entry))
        return os.open(self._snapshot.name(entry), _FILE, dir_fd=inside)

    def path(self, entry: int) -> bytes:
        """A short path, valid until the next call. Raises OSError."""
        inside = self.folder(self._snapshot.parent(entry))
        return b"/proc/self/fd/%d/%s" % (inside, self._snapshot.name(entry))

    def resident_bytes(self, entry: int) -> int:
        """Counts whole pages. Raises OSError."""
        file = self.open(entry)
        try:
            return syscalls.cached_bytes(file, 0, self._snapshot.stat(entry).size)
        finally:
            os.close(file)

    def drop_failed(self, entry: int) -> bool:
        """See the function `drop_failed`. Raises OSError."""
        file = self.open(entry)
        try:
            return drop_failed(file, 0, self._snapshot.stat(entry).size)
        finally:
            os.close(file)

    def advise(self, advice: int, parts: Parts) -> None:
        entries = parts["entry"]
        parents = self._snapshot.columns.parent[entries].tolist()
        rows = zip(
            parents,
            self._snapshot.names(entries.tolist()),
            parts["start"].tolist(),
            parts["size"].tolist(),
            strict=True,
        )
        openat, advise, close = os.open, os.posix_fadvise, os.close
        above, inside = -1, -1
        for parent, name, start, size in rows:
            try:
                if parent != above:
                    above, inside = parent, self.folder(parent)
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
        self.release()

    def release(self) -> None:
        """Close the folders if they keep the mount busy."""
        if self._clone < 0:
            self._close_all()

    def close(self) -> None:
        self._close_all()
        if self._clone >= 0:
            os.close(self._clone)
            self._clone = -1

    def _close_all(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


def advise_in_steps(file: int, start: int, size: int, advice: int) -> None:
    for at in range(start, start + size, ADVISED_BYTES):
        os.posix_fadvise(file, at, min(ADVISED_BYTES, start + size - at), advice)


def drop_failed(file: int, start: int, size: int) -> bool:
    """Drop the pages of a part of a file if READs of some have failed: such pages are in the page
    cache without contents, and the kernel's read-ahead passes over them. Returns whether there were
    any. `start` is a multiple of the page size. Raises OSError."""
    has_failed = syscalls.readable_cached_bytes(file, start, size) < syscalls.cached_bytes(
        file, start, size
    )
    if has_failed:
        os.posix_fadvise(file, start, size, POSIX_FADV_DONTNEED)
    return has_failed
