"""The files of order logs in a cache's folder. `order_logs/` reads and writes their contents."""

import contextlib
import fcntl
import os
import stat
from uuid import UUID

from ...errors import BusyError
from .folder import LOGS, CacheFolder
from .locks import FILE_FLAGS, try_lock


class OrderLogFiles:
    """The order logs of one dataset, in place of its chunks. Any thread."""

    def __init__(self, folder: CacheFolder, identity: UUID) -> None:
        """From now on, until `close`, the dataset has order logs here and gets no chunks. `close`
        closes `folder`, too. Raises OSError, BusyError."""
        self._folder = folder
        self._place = folder.dataset(identity)
        with folder.locked():  # so no other process tests the lock meanwhile
            folder.make_dataset(self._place)
            self._lock_file = os.open(
                f"{self._place}/{LOGS}", os.O_RDWR | os.O_CREAT | FILE_FLAGS, 0o600
            )
            try_lock(self._lock_file, fcntl.LOCK_SH)

    @property
    def limit_bytes(self) -> int:
        """The limit of the whole folder."""
        return self._folder.limit_bytes

    def open(self, name: str) -> int:
        """The file of an order log, made if it is absent, and locked until it is closed. Raises
        BusyError if another process uses it; OSError."""
        path = f"{self._place}/{name}"
        file = os.open(path, os.O_RDWR | os.O_CREAT | FILE_FLAGS, 0o600)
        if stat.S_ISREG(os.fstat(file).st_mode) and try_lock(file, fcntl.LOCK_EX):
            return file
        os.close(file)
        raise BusyError(f"another mount uses {path}")

    def remove(self, name: str, file: int) -> None:
        """Remove an order log whose locked file the caller has, and close it."""
        try:
            size = os.fstat(file).st_blocks * 512
            with contextlib.suppress(OSError):
                os.unlink(f"{self._place}/{name}")
                self.give_room(size)
        finally:
            os.close(file)

    def take_room(self, size: int) -> bool:
        """Reserve room for `size` bytes more; chunks of the dataset are evicted for them. False if
        there is none."""
        if self._folder.writes.is_open:
            return False
        with contextlib.suppress(OSError, BusyError), self._folder.locked() as ledger:
            if ledger.make_room(size, self._place, takes_chunks=True):
                ledger.add(size)
                return True
        return False

    def give_room(self, size: int) -> None:
        """Release `size` bytes that `take_room` has reserved."""
        with contextlib.suppress(OSError, BusyError), self._folder.locked() as ledger:
            ledger.add(-size)

    def close(self) -> None:
        """The dataset may have chunks again. Repeatable."""
        if self._lock_file >= 0:
            os.close(self._lock_file)
        self._lock_file = -1
        self._folder.close()
