"""The files of order logs in a cache's folder. `order_logs/` reads and writes their contents."""

import contextlib
import fcntl
import os
import stat
from uuid import UUID

from ...errors import BusyError
from .folder import LOG_NAME, LOGS, CacheFolder
from .locks import FILE_FLAGS, try_lock


def has_order_logs(dataset: str) -> bool:
    """Whether the folder of a dataset (`CacheFolder.dataset`), which need not exist, has logs."""
    try:
        return any(map(LOG_NAME.fullmatch, os.listdir(dataset)))
    except OSError:
        return False


class OrderLogFiles:
    """The order logs of one dataset, in place of its chunks. Any thread."""

    def __init__(self, folder: CacheFolder, identity: UUID) -> None:
        """Until `close`, no process adds chunks of the dataset. `close` closes `folder`, too.
        Raises OSError, BusyError."""
        self._folder = folder
        self._place = folder.dataset(identity)
        with folder.locked():  # so that no other process tests the lock of `.logs` meanwhile
            folder.make_dataset(self._place)
            self._lock_file = os.open(
                f"{self._place}/{LOGS}", os.O_RDWR | os.O_CREAT | FILE_FLAGS, 0o600
            )
            try_lock(self._lock_file, fcntl.LOCK_SH)

    @property
    def limit_bytes(self) -> int:
        """The limit of the whole cache folder."""
        return self._folder.limit_bytes

    def names(self) -> list[str]:
        """The names of all order logs of the dataset. Raises OSError."""
        return [name for name in sorted(os.listdir(self._place)) if LOG_NAME.fullmatch(name)]

    def open(self, name: str, *, makes: bool = True) -> int:
        """Open the file of an order log, and lock it. With `makes` it is made if it is absent.
        Returns its descriptor; the lock ends when the caller closes that. Raises BusyError if
        another process uses the log; OSError."""
        path = f"{self._place}/{name}"
        file = os.open(path, os.O_RDWR | (os.O_CREAT if makes else 0) | FILE_FLAGS, 0o600)
        if stat.S_ISREG(os.fstat(file).st_mode) and try_lock(file, fcntl.LOCK_EX):
            return file
        os.close(file)
        raise BusyError(f"another mount uses {path}")

    def remove(self, name: str, file: int) -> None:
        """Remove an order log, and close `file`, its descriptor."""
        try:
            size = os.fstat(file).st_blocks * 512
            with contextlib.suppress(OSError):
                os.unlink(f"{self._place}/{name}")
                self.give_room(size)
        finally:
            os.close(file)

    def take_room(self, size: int) -> bool:
        """Reserve room for `size` more bytes; chunks of the dataset, too, may be evicted for them.
        Returns whether there is room."""
        if self._folder.writes.is_open:
            return False
        with contextlib.suppress(OSError, BusyError), self._folder.locked() as ledger:
            if ledger.make_room(size, self._place, takes_chunks=True):
                ledger.add(size)
                return True
        return False

    def give_room(self, size: int) -> None:
        with contextlib.suppress(OSError, BusyError), self._folder.locked() as ledger:
            ledger.add(-size)

    def close(self) -> None:
        """Let the dataset have chunks again. The log files stay. Repeatable."""
        if self._lock_file >= 0:
            os.close(self._lock_file)
        self._lock_file = -1
        self._folder.close()
