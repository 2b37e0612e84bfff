"""Finds out by inotify(7) which of some files are opened, by Python or any library.

Python's audit hooks see only the files that Python opens. Inotify sees all opens, but only of files
that were named before, and it costs more: some 0.2 ms for each sample, and 8 ms to close, for which
`learning.py` uses a thread.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

_OPEN, _ACCESS = 0x20, 0x1
_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK
_EVENT = struct.Struct("iIII")  # the watch, what happened, a cookie, the length of a name behind it
_EVENTS_BYTES = 1 << 16
_LINK = "anon_inode:inotify"


class Opens:
    """An inotify instance. Not safe for concurrent use."""

    def __init__(self) -> None:
        """Raises OSError if the kernel allows no further instance."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._checked(self._libc.inotify_init1(_FLAGS))
        self._paths: dict[int, str] = {}  # by number of the watch

    def watch(self, paths: Iterable[str]) -> None:
        """Watch only these files from now on. Raises OSError for a missing file, and if the program
        has closed the descriptor."""
        self.opened()
        for each in self._paths:
            self._libc.inotify_rm_watch(self._descriptor, each)
        self._paths.clear()
        for path in paths:
            name = os.fsencode(path)
            watch = self._libc.inotify_add_watch(self._descriptor, name, _OPEN | _ACCESS)
            self._paths[self._checked(watch)] = path

    def opened(self) -> set[str]:
        """The watched files that were opened or read since `watch`. Raises OSError if the program
        has closed the descriptor."""
        found = set()
        self._check_ours()
        try:
            while events := os.read(self._descriptor, _EVENTS_BYTES):
                at = 0
                while at < len(events):
                    watch, what, _, name_bytes = _EVENT.unpack_from(events, at)
                    at += _EVENT.size + name_bytes
                    if what & (_OPEN | _ACCESS) and watch in self._paths:
                        found.add(self._paths[watch])
        except BlockingIOError:
            return found
        return found

    def close(self) -> None:
        """Close the descriptor. Takes some 8 ms, in which other threads can run."""
        try:
            self._check_ours()
        except OSError:
            return
        os.close(self._descriptor)

    def _check_ours(self) -> None:
        """Raise OSError if the program has closed the descriptor, even if it has opened another
        with the same number."""
        if os.readlink(f"/proc/self/fd/{self._descriptor}") != _LINK:
            raise OSError("the descriptor is not ours")

    @staticmethod
    def _checked(result: int) -> int:
        if result < 0:
            raise OSError(ctypes.get_errno(), "inotify")
        return result
