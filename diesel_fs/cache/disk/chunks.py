"""Whole chunks in a cache's folder: the tier of a server, and of the nodes of a task.

A chunk is written into a file of its own with room reserved for it, and renamed when it is whole.
"""

import contextlib
import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from uuid import UUID

import numpy as np

from ...errors import BusyError, FormatError, NoSpaceError
from ...format.entries import ChunkId
from ..tiers import CacheHandle, CacheTier, ChunkKey, Reservation, verify_chunk
from .folder import LOGS, CacheFolder, FolderLedger, unlink
from .jobs import TOUCH_S, CacheJobs
from .listing import list_files
from .locks import FILE_FLAGS, is_unlocked, try_lock
from .references import USED
from .rule import LONGEST_UNREAD, EvictionRule

log = logging.getLogger("diesel.cache")

_CHECKED_MAX = 1 << 20  # remembered chunks; beyond it all are forgotten, and checked again
_WRITE_BYTES_MAX = 64 << 20  # in one call: signals are handled between calls


class DiskTier(CacheTier):
    """Chunks of one store in a cache's folder (see the package)."""

    kind = "disk"
    prefetches_datasets = True

    def __init__(
        self,
        place: Path,
        store: UUID,
        limit_bytes: int | None,
        clock: Callable[[], float] = time.monotonic,
        *,
        rule: EvictionRule = LONGEST_UNREAD,
    ) -> None:
        """As `CacheFolder`."""
        self.folder = CacheFolder(place, store, limit_bytes, clock, rule=rule)
        self.jobs = CacheJobs(self.folder)
        # The chunks that this process has checked, and when it last set their times of last use
        self._checked_s: dict[ChunkKey, float] = {}

    # Reading

    def find(self, key: ChunkKey) -> CacheHandle | None:
        held = self._open(key)
        if held is None or (key not in self._checked_s and not self._is_sound(key, held)):
            if held is not None:
                held.close()
            return None
        self._touch(key, held)
        return held

    def load(self, key: ChunkKey, room: memoryview) -> bool:
        """Read a whole chunk into `room`, and check it. Returns False if that fails. A chunk that
        is damaged or not as large as `room` is dropped."""
        held = self._open(key)
        if held is None:
            return False
        with held:
            if held.bytes != len(room):
                log.warning("a cached chunk has another size and was dropped: %s", key)
                self.drop(key)
            elif self._is_sound(key, held, room):
                self._touch(key, held)
                return True
        return False

    def open_unchecked(self, key: ChunkKey) -> "ChunkFile | None":
        """A file for a reader that checks its bytes, and calls `report_damage` if need be."""
        held = self._open(key)
        if held is not None:
            self._note_read(key, held)
        return held

    def _open(self, key: ChunkKey) -> "ChunkFile | None":
        folder, path = self.folder, self._path(key)
        if folder.reads.is_open:
            return None
        try:
            file = os.open(path, os.O_RDONLY | FILE_FLAGS)
        except FileNotFoundError:
            self._checked_s.pop(key, None)
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket
                folder.clear(path)
            elif error.errno not in (errno.EMFILE, errno.ENFILE):
                folder.reads.failed(error)
            return None
        found = os.fstat(file)
        held, is_chunk = ChunkFile(folder, file, found.st_size), stat.S_ISREG(found.st_mode)
        if not is_chunk:
            folder.clear(path)
            held.close()
            return None
        return held

    def _is_sound(self, key: ChunkKey, held: "ChunkFile", room: memoryview | None = None) -> bool:
        """Reads all of a chunk, into `room` if given. A damaged one is dropped."""
        try:
            content = np.empty(held.bytes, np.uint8).data if room is None else room
            held.read_into(0, content)
            verify_chunk(key, content)
        except (FormatError, EOFError) as error:
            log.warning("a cached chunk is damaged and was dropped: %s", error)
            self.drop(key)
            return False
        except (OSError, MemoryError):  # `read_into` has reported an OSError
            return False
        if len(self._checked_s) >= _CHECKED_MAX:
            self._checked_s.clear()
        self._checked_s[key] = -TOUCH_S
        return True

    def _touch(self, key: ChunkKey, held: "ChunkFile") -> None:
        now_s = self.folder.clock()
        if now_s - self._checked_s.get(key, -TOUCH_S) >= TOUCH_S:
            self._checked_s[key] = now_s
            self._note_read(key, held)
        else:
            self.jobs.note_use(key.identity)

    def _note_read(self, key: ChunkKey, held: "ChunkFile") -> None:
        with contextlib.suppress(OSError):  # the file system has become read-only
            os.utime(held.file)
        self.jobs.note_use(key.identity)

    def holds(self, key: ChunkKey) -> bool:
        with contextlib.suppress(OSError):
            return stat.S_ISREG(os.lstat(self._path(key)).st_mode)
        return False

    def list_chunks(self, identity: UUID) -> list[ChunkId]:
        """The chunks that seem to be here. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            return [*list_files(self.folder.dataset(identity)).chunks]
        return []

    def drop(self, key: ChunkKey) -> None:
        """Its bytes stay counted until the next eviction, which counts all files."""
        self._checked_s.pop(key, None)
        unlink(self._path(key))

    def evict(self, keys: Iterable[ChunkKey]) -> None:
        """Remove chunks and free their room at once. Those that cannot be removed stay; all, if the
        folder cannot be locked."""
        with contextlib.suppress(OSError, BusyError), self.folder.locked() as ledger:
            for key in keys:
                self._checked_s.pop(key, None)
                with contextlib.suppress(OSError):
                    size = os.lstat(self._path(key)).st_size
                    os.unlink(self._path(key))
                    ledger.add(-size)
                    self.folder.evictions += 1

    def report_damage(self, key: ChunkKey) -> None:
        self._checked_s.pop(key, None)
        if (held := self.find(key)) is not None:
            held.close()

    # Writing

    def reserve(self, key: ChunkKey, size: int) -> Reservation | None:
        folder = self.folder
        if folder.writes.is_open:
            raise NoSpaceError(f"the cache in {folder.root} is paused after errors of its disk")
        try:
            with folder.locked() as ledger:
                reservation = self._reserve(ledger, key, size)
        except BusyError:  # another process is making room
            return None
        except OSError as error:
            folder.writes.failed(error)
            raise NoSpaceError(f"the cache in {folder.root} cannot be written") from error
        return reservation

    def _reserve(self, ledger: FolderLedger, key: ChunkKey, size: int) -> Reservation | None:
        """Needs the folder's lock."""
        if self.holds(key):
            return None
        place = self.folder.dataset(key.identity)
        if not is_unlocked(f"{place}/{LOGS}") and os.path.exists(f"{place}/{LOGS}"):
            raise NoSpaceError(f"{place} has order logs in place of chunks")
        temporary = f"{place}/.{key.id.hex()}"
        if not all(map(self.folder.clear, (f"{place}/{USED}", temporary, self._path(key)))):
            return None
        self.folder.make_dataset(place)
        file = os.open(temporary, os.O_RDWR | os.O_CREAT | FILE_FLAGS, 0o600)
        try:
            if not try_lock(file, fcntl.LOCK_EX):
                os.close(file)
                return None  # another process is writing the chunk
            counted = os.fstat(file).st_size  # room that a writer reserved before it died
            os.ftruncate(file, 0)
            ledger.add(-counted)
            if not ledger.make_room(size, place):
                raise NoSpaceError(f"every chunk in {self.folder.root} is in use")
            os.ftruncate(file, size)
            ledger.add(size)
        except BaseException:
            unlink(temporary)
            os.close(file)
            raise
        return _FileReservation(self, key, file, temporary)

    # Readers and jobs

    def note_use(self, identity: UUID) -> None:
        self.jobs.note_use(identity)

    def note_reading(self, *, begins: bool) -> None:
        self.folder.readers.note(begins=begins)

    def others_read(self) -> bool:
        return self.folder.readers.others_wait()

    def close(self) -> None:
        self.folder.close()
        self.jobs.close()

    def _path(self, key: ChunkKey) -> str:
        return f"{self.folder.dataset(key.identity)}/{key.id.hex()}"


class ChunkFile(CacheHandle):
    """`file` is its descriptor, for reading only."""

    def __init__(self, folder: CacheFolder, file: int, size: int) -> None:
        self.bytes = size
        self._reads, self.file = folder.reads, file

    def read_into(self, start: int, buffer: memoryview) -> None:
        done = 0
        try:
            while done < len(buffer):
                got = os.preadv(self.file, [buffer[done:]], start + done)
                if not got:
                    raise EOFError
                done += got
        except OSError as error:
            self._reads.failed(error)
            raise
        self._reads.succeeded()

    def read_nowait(self, start: int, buffer: memoryview) -> bool:
        """Reads from the kernel's page cache. Also returns False if the file system does not
        support reads that never wait."""
        try:
            return os.preadv(self.file, [buffer], start, os.RWF_NOWAIT) == len(buffer)
        except OSError:
            return False

    def close(self) -> None:
        if self.file >= 0:
            os.close(self.file)
        self.file = -1

    def __del__(self) -> None:
        self.close()


class _FileReservation(Reservation):
    def __init__(self, tier: DiskTier, key: ChunkKey, file: int, temporary: str) -> None:
        self._tier, self._key = tier, key
        self._file, self._temporary = file, temporary

    def commit(self, content: memoryview) -> None:
        tier, folder = self._tier, self._tier.folder
        try:
            done = 0
            while done < len(content):
                done += os.pwrite(self._file, content[done : done + _WRITE_BYTES_MAX], done)
            with folder.locked():
                os.rename(self._temporary, tier._path(self._key))
        except (OSError, BusyError) as error:
            if isinstance(error, OSError):
                folder.writes.failed(error)
            self.cancel()
            return
        os.close(self._file)
        tier._checked_s[self._key] = folder.clock()
        folder.writes.succeeded()

    def cancel(self) -> None:
        """If the folder cannot be locked, the file stays until an eviction removes the files of
        dead writers."""
        try:
            with contextlib.suppress(OSError, BusyError), self._tier.folder.locked() as ledger:
                os.unlink(self._temporary)
                ledger.add(-os.fstat(self._file).st_size)
        finally:
            os.close(self._file)
