"""Reports when readers open watched files (inotify), for the marker files of orders
(`../streams/watches.py`). One thread uses an `OpenEvents`.
"""

import os
import struct
from collections.abc import Iterable
from contextlib import suppress

from ....system import syscalls
from .mount_files import MountFiles

_IN_OPEN = 0x20
_EVENT = struct.Struct("iIII")
"""The head of an event: the watch, the kinds of event (a mask), a cookie, and the length of a name
that follows."""


class OpenEvents:
    """The watched files of one version of a mount. With `keeps_files_open` a file is opened before
    it is watched, so that the worker can work on it without an open that would look like a
    reader's."""

    def __init__(self, files: MountFiles, *, keeps_files_open: bool) -> None:
        self._mount_files = files
        self._keeps_files_open = keeps_files_open
        self.descriptor = syscalls.inotify_init()
        """Readable when a watched file has been opened."""
        self.files: dict[int, int] = {}
        """The descriptors of watched files that are kept open, by entry."""
        self._watch_of: dict[int, int] = {}  # by entry
        self._entry_of: dict[int, int] = {}  # by watch

    def watch(self, entries: Iterable[int]) -> None:
        """`read` leaves out a file that cannot be watched, `files` one that cannot be opened."""
        entries = list(entries)
        if self._keeps_files_open:
            for entry in entries:
                if entry not in self.files:
                    with suppress(OSError):
                        self.files[entry] = self._mount_files.open(entry)
        for entry in entries:
            if entry in self._watch_of:
                continue
            with suppress(OSError):
                path = self._mount_files.path(entry)
                watch = syscalls.inotify_add(self.descriptor, path, _IN_OPEN)
                self._watch_of[entry], self._entry_of[watch] = watch, entry

    def unwatch(self, entries: Iterable[int]) -> None:
        for entry in entries:
            watch = self._watch_of.pop(entry, None)
            if watch is not None:
                self._entry_of.pop(watch, None)
                with suppress(OSError):
                    syscalls.inotify_remove(self.descriptor, watch)
            file = self.files.pop(entry, -1)
            if file >= 0:
                os.close(file)

    def read(self) -> list[int]:
        """The watched entries that were opened since the last call, in the order of the opens.
        Never waits."""
        found: list[int] = []
        while True:
            try:
                events = os.read(self.descriptor, 65_536)
            except BlockingIOError:
                return found
            at = 0
            while at < len(events):
                watch, mask, _, length = _EVENT.unpack_from(events, at)
                at += _EVENT.size + length
                entry = self._entry_of.get(watch)
                if entry is not None and mask & _IN_OPEN:
                    found.append(entry)

    def close(self) -> None:
        if self.descriptor >= 0:
            self.unwatch(tuple(self.files))
            os.close(self.descriptor)
            self.descriptor = -1
