"""Records the uses of the datasets in a cache's folder: times of last use, and jobs.

The start of a *job* (a mount, a node of a task) counts as a reference of its dataset for LRFU, and
the job pins the dataset (see the package). This is kept in the dataset's file `.used`
(`references.py`) and in locks on it.
"""

import contextlib
import fcntl
import os
from uuid import UUID

import numpy as np

from ...errors import BusyError
from ..policies.lrfu import hour_of
from .folder import CacheFolder
from .locks import FILE_FLAGS, try_lock
from .references import USED, References, read_references, write_references

TOUCH_S = 60.0
"""Times of last use may be this much too old: exact ones would cost a system call for each read."""


class CacheJobs:
    """The jobs of this process. Any thread."""

    def __init__(self, folder: CacheFolder) -> None:
        self._folder = folder
        self._touched_s: dict[UUID, float] = {}
        self._pins: dict[UUID, int] = {}  # descriptors of `.used` files, locked

    def note_use(self, identity: UUID) -> None:
        now_s = self._folder.clock()
        if now_s - self._touched_s.get(identity, -TOUCH_S) >= TOUCH_S:
            self._touched_s[identity] = now_s
            with contextlib.suppress(OSError):
                os.utime(f"{self._folder.dataset(identity)}/{USED}")

    def register(self, identity: UUID, now_s: float) -> None:
        """Add a reference for a job that begins to read a dataset at `now_s` (seconds since 1970),
        and pin the dataset until `close` or the end of the process. Notes nothing if the folder
        cannot be written or locked."""
        with contextlib.suppress(OSError, BusyError), self._folder.locked():
            folder = self._folder.dataset(identity)
            self._folder.clear(f"{folder}/{USED}")
            self._folder.make_dataset(folder)
            # Opened for reading (see `WaitingReaders`), and locked before the record is written,
            # which a full disk may not take
            pin = os.open(f"{folder}/{USED}", os.O_RDONLY | FILE_FLAGS)
            if identity in self._pins:
                os.close(self._pins[identity])
            self._pins[identity] = pin
            try_lock(pin, fcntl.LOCK_SH)
            is_first = not os.fstat(pin).st_size
            before = References(crf=0.0) if is_first else read_references(pin)
            write_references(f"{folder}/{USED}", self._add_reference(before, now_s))

    def _add_reference(self, before: References, now_s: float) -> References:
        crf, hour = np.array([before.crf]), np.array([before.hour])
        now_hour = hour_of(now_s)
        (after,) = self._folder.attenuation.add_reference(crf, hour, now_hour).tolist()
        return References(after, now_hour)

    def close(self) -> None:
        """End the pins. Repeatable."""
        while self._pins:
            os.close(self._pins.popitem()[1])
