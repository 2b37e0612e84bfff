"""The folder of a cache: its marker, the bytes used in it, and the evictions that make room.

The number of bytes is kept in the marker file, so processes need not count all files; each eviction
counts them anew, since it looks at every file anyway.
"""

import contextlib
import errno
import fcntl
import logging
import math
import os
import re
import stat
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import numpy as np

from ...errors import BusyError, ConflictError, PermissionDenied
from ...format.object_names import IDENTITY_TEXT
from ...net.breaker import CircuitBreaker
from ...settings import private_folder
from ..policies.lrfu import Attenuation, eviction_order, hour_of
from ..policies.replacement import Shortage
from .locks import FILE_FLAGS, is_unlocked, try_lock
from .marker import HEAD, MAGIC, MARKER, TAKES_NOTHING, check_marker, lock_marker
from .references import USED, References, read_references
from .rule import LONGEST_UNREAD, EvictionRule

log = logging.getLogger("diesel.cache")

DISK_PAUSE_S = 30.0

_FAILURES_MAX = 3  # in a row, before the pause: one file may be damaged while the disk is well

FREE_FRACTION_MIN = 0.05
"""This part of the file system stays free for other programs (and nearly full disks are slow)."""

CHUNK_IDLE_S = 24 * 3600.0
"""A chunk that nobody has read for this time (and for the cool-down) may be evicted although its
dataset is read: an epoch is shorter, and chunks that a purge has replaced are never read again. If
the dataset is pinned, only for new chunks of the same dataset."""

EVICT_FRACTION = 0.05
"""Part of the limit that is evicted in addition to the bytes that are needed, so that evictions,
which look at every file, are rare."""

LOGS = ".logs"
LOG_NAME = re.compile(r"order-[0-9a-f]{16}")
CHUNK_NAME = re.compile(r"\.?[0-9a-f]{32}")
_READING = ".reading"
_STORE_NAME = re.compile(IDENTITY_TEXT)


class DiskBreaker:
    """A circuit breaker for a disk, which logs a failure once. One object each for reading and
    writing. Any thread."""

    def __init__(self, place: str, doing: str, clock: Callable[[], float]) -> None:
        self._breaker = CircuitBreaker(_FAILURES_MAX, DISK_PAUSE_S)
        self._root, self._doing = place, doing  # for the log: "cannot {doing} the cache in ..."
        self._clock = clock
        self._is_reported = False

    @property
    def is_open(self) -> bool:
        return self._breaker.is_open(self._clock())

    def succeeded(self) -> None:
        self._breaker.record_success()
        if self._is_reported:
            self._is_reported = False
            log.warning("the cache in %s works again", self._root)

    def failed(self, error: OSError) -> None:
        if self._breaker.record_failure(None, self._clock()) and not self._is_reported:
            self._is_reported = True
            log.warning(
                "cannot %s the cache in %s (%s): it is not used, and tried again every %.0f s",
                self._doing, self._root, error.strerror, DISK_PAUSE_S,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class CachedDataset:
    folder: str
    used_s: float  # its last use, in seconds since 1970
    is_pinned: bool
    references: References


@dataclass(frozen=True, slots=True, eq=False)
class _CachedFile:
    path: str
    bytes: int
    used_s: float  # its last use, in seconds since 1970
    dataset: CachedDataset
    is_temporary: bool
    is_log: bool


class CacheFolder:
    """One process's use of the folder for one store; all stores share its limit."""

    def __init__(
        self,
        place: Path,
        store: UUID,
        limit_bytes: int | None,
        clock: Callable[[], float] = time.monotonic,
        *,
        rule: EvictionRule = LONGEST_UNREAD,
    ) -> None:
        """`place` is the folder that `prepare_cache_folder` returned. `limit_bytes` is by default
        half of the sum of the bytes that are free there and those that the cache has. `clock`
        (seconds) times the pauses of a failed disk, and how often chunks are marked as used.

        Raises PermissionDenied, BusyError.
        """
        self.root = os.fspath(place)
        self.store_folder = f"{self.root}/{store.hex}"
        self.clock = clock
        self.limit_bytes = limit_bytes or 0
        self.read_only_reason = ""
        """Why nothing can be written here (chunks are read all the same); "" if it can."""
        self.evictions = 0
        """Files that were evicted for any reason."""
        self.room_evictions = self.room_evicted_bytes = 0
        """The number and bytes of the evictions that made room, from any dataset."""
        self.reads = DiskBreaker(self.root, "read from", clock)
        self.writes = DiskBreaker(self.root, "write to", clock)
        self.readers = WaitingReaders(f"{self.root}/{_READING}")
        self.rule = rule
        self.attenuation = Attenuation(rule.lrfu_p, rule.lrfu_step)
        self._takes_half = limit_bytes is None  # and `_settle_limit` has not been called yet
        self._device = os.stat(place).st_dev
        self._not_removable: set[str] = set()  # paths with a chunk's name that are no chunks
        try:
            with self.locked() as ledger:
                ledger.tidy(0, "")
            self.readers.open()
        except OSError as error:
            if error.errno not in TAKES_NOTHING:
                raise PermissionDenied(f"{place}: {error.strerror}") from error
            self.read_only_reason = f"the cache in {place} is only read: {error.strerror}"
            log.warning("%s", self.read_only_reason)

    def dataset(self, identity: UUID) -> str:
        """The dataset's folder, which may be absent."""
        return f"{self.store_folder}/{identity.hex}"

    def make_dataset(self, folder: str) -> None:
        """Needs the lock. Raises OSError."""
        for each in (self.store_folder, folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir(each, 0o700)
        os.close(os.open(f"{folder}/{USED}", os.O_WRONLY | os.O_CREAT | FILE_FLAGS, 0o600))

    @contextlib.contextmanager
    def locked(self) -> Iterator["FolderLedger"]:
        """Lock the folder for the `with`: no other process makes or removes files meanwhile. Raises
        BusyError if others keep it locked; OSError, also if the folder is no cache any more."""
        path = f"{self.root}/{MARKER}"
        try:
            marker = os.open(path, os.O_RDWR | FILE_FLAGS)
        except FileNotFoundError:
            # A folder that was emptied is marked again; but never the folder below the mount point
            # of a disk that has been unmounted.
            if os.stat(self.root).st_dev != self._device:
                raise
            try:
                check_marker(private_folder(Path(self.root)))
            except (ConflictError, PermissionDenied) as error:
                raise OSError(errno.ESTALE, error.message) from error
            marker = os.open(path, os.O_RDWR | FILE_FLAGS)
        try:
            lock_marker(marker, path)
            if os.pread(marker, 16, 0) != MAGIC:
                raise OSError(errno.ESTALE, "not a cache any more")
            yield FolderLedger(self, marker)
        finally:
            os.close(marker)

    def free_bytes(self) -> int:
        """Bytes that can be put here without an eviction, about; 0 if that is unknown."""
        try:
            marker = os.open(f"{self.root}/{MARKER}", os.O_RDONLY | FILE_FLAGS)
        except OSError:
            return 0
        try:
            return max(FolderLedger(self, marker).free_bytes, 0)
        except (OSError, struct.error):
            return 0
        finally:
            os.close(marker)

    def make_room(self, identity: UUID, size: int) -> int:
        """Evict idle chunks until `size` bytes are free for a dataset, if possible. Returns
        `free_bytes`."""
        with contextlib.suppress(OSError, BusyError), self.locked() as ledger:
            ledger.make_room(size, self.dataset(identity))
        return self.free_bytes()

    def clear(self, path: str) -> bool:
        """Remove `path`, which has a name of the cache's files, if it is not a regular file.
        Returns False if that fails."""
        try:
            mode = os.lstat(path).st_mode
            if not stat.S_ISREG(mode):
                (os.rmdir if stat.S_ISDIR(mode) else os.unlink)(path)
                log.warning("removed %s from the cache: it was not a chunk", path)
        except FileNotFoundError:
            pass
        except OSError as error:
            if path not in self._not_removable:
                self._not_removable.add(path)
                log.warning("%s is not a chunk and cannot be removed: %s", path, error.strerror)
            return False
        return True

    def close(self) -> None:
        """Repeatable."""
        self.readers.close()

    def _settle_limit(self, half_bytes: int) -> None:
        if self._takes_half:
            self.limit_bytes = half_bytes
            self._takes_half = False


class FolderLedger:
    """Valid as long as the lock is held; without the lock, its figures may change at any time."""

    def __init__(self, folder: CacheFolder, marker: int) -> None:
        self._folder = folder
        self._marker = marker

    @property
    def used_bytes(self) -> int:
        _, used_bytes = HEAD.unpack(os.pread(self._marker, HEAD.size, 0))
        return int(used_bytes)

    def add(self, size: int) -> None:
        if size:
            os.pwrite(self._marker, HEAD.pack(MAGIC, max(self.used_bytes + size, 0)), 0)

    @property
    def free_bytes(self) -> int:
        """Negative if more is used than the limit and the file system allow."""
        disk = os.fstatvfs(self._marker)
        floor_bytes = int(FREE_FRACTION_MIN * disk.f_blocks * disk.f_frsize)
        by_disk = disk.f_bavail * disk.f_frsize - floor_bytes
        return min(self._folder.limit_bytes - self.used_bytes, by_disk)

    def make_room(self, size: int, folder: str, *, takes_chunks: bool = False) -> bool:
        """Evict if need be (see `tidy`). Returns whether `size` bytes are free now. Raises
        OSError."""
        if size <= self.free_bytes:
            return True
        self.tidy(size, folder, takes_chunks=takes_chunks)
        return size <= self.free_bytes

    def tidy(self, size: int, folder: str, *, takes_chunks: bool = False) -> None:
        """Count all files, remove those of dead writers, and evict idle chunks until `size` bytes
        and some more fit in a dataset's folder. If `folder` is "", evict until the limit holds;
        then chunks that were used lately may go, too, unless a job pins them. `takes_chunks`: the
        chunks in `folder` itself count as idle. Raises OSError."""
        own, now_s = self._folder, time.time()
        files: list[_CachedFile] = []
        for each in self._scan():
            if each.is_temporary and is_unlocked(each.path):
                unlink(each.path)
            else:
                files.append(each)
        used_bytes = sum(each.bytes for each in files)
        disk = os.fstatvfs(self._marker)
        own._settle_limit((used_bytes + disk.f_bavail * disk.f_frsize) // 2)
        floor_bytes = FREE_FRACTION_MIN * disk.f_blocks * disk.f_frsize
        beyond_bytes = max(
            used_bytes + size - own.limit_bytes,
            floor_bytes + size - disk.f_bavail * disk.f_frsize,
        )
        if beyond_bytes > 0:
            beyond_bytes += EVICT_FRACTION * own.limit_bytes if folder else 0
            may_go = [
                each
                for each in files
                if _may_evict(each, folder, now_s, own.rule.cool_down_s, takes_chunks=takes_chunks)
            ]
            shortage = Shortage[_CachedFile](math.ceil(beyond_bytes))
            shortage.choose(self._in_eviction_order(may_go, now_s), lambda each: each.bytes)
            evicted: Counter[str] = Counter()
            for each in shortage.victims:
                unlink(each.path)
                used_bytes -= each.bytes
                evicted[each.dataset.folder] += each.bytes
                own.evictions += 1
                own.room_evictions += 1
                own.room_evicted_bytes += each.bytes
            for other, total in evicted.items():
                log.info("evicted %d bytes of %s for %s", total, other, folder or "the limit")
        self.add(used_bytes - self.used_bytes)

    def _in_eviction_order(self, files: Sequence[_CachedFile], now_s: float) -> list[_CachedFile]:
        if not self._folder.rule.by_references:
            return sorted(files, key=lambda each: each.used_s)
        known = [each.dataset.references for each in files]
        order = eviction_order(
            self._folder.attenuation.log_crf(
                np.array([each.crf for each in known], np.float64),
                np.array([each.hour for each in known], np.float64),
                hour_of(now_s),
            ),
            np.array([each.used_s for each in files], np.float64),
        )
        return [files[number] for number in order.tolist()]

    def _scan(self) -> Iterator[_CachedFile]:
        """All chunks of all stores, also chunks that are being written, and all order logs."""
        for folder in dataset_folders_in(self._folder.root):
            dataset = find_dataset(folder)
            with os.scandir(folder) as entries:
                for entry in entries:
                    is_log = LOG_NAME.fullmatch(entry.name) is not None
                    if not is_log and not CHUNK_NAME.fullmatch(entry.name):
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        found = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(found.st_mode):
                            yield _CachedFile(
                                entry.path,
                                found.st_blocks * 512 if is_log else found.st_size,
                                found.st_mtime,
                                dataset,
                                entry.name[0] == ".",
                                is_log,
                            )
                        else:
                            self._folder.clear(entry.path)


def _may_evict(
    each: _CachedFile, folder: str, now_s: float, cool_down_s: float, *, takes_chunks: bool
) -> bool:
    """See `FolderLedger.tidy`. A pinned dataset is in use, so it does not cool down, though the
    time of its last use may be older than a short cool-down (`jobs.TOUCH_S`)."""
    if each.is_temporary or (each.is_log and not is_unlocked(each.path)):
        return False
    is_own = each.dataset.folder == folder
    if each.dataset.is_pinned and not is_own:
        return False
    return (
        not folder
        or each.is_log
        or (is_own and takes_chunks)
        or (not each.dataset.is_pinned and abs(now_s - each.dataset.used_s) > cool_down_s)
        or abs(now_s - each.used_s) > max(CHUNK_IDLE_S, cool_down_s)
    )


class WaitingReaders:
    """Shows the other processes of a cache's folder, by a shared lock on `.reading`, whether
    readers of this process wait for the store. Any thread."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._count = 0
        self._file = -1

    def open(self) -> None:
        """Without this call, `note` does nothing. Raises OSError."""
        self._file = self._opened()

    def _opened(self) -> int:
        # For reading: a file that is open for writing keeps a file system from becoming read-only
        return os.open(self._path, os.O_RDONLY | os.O_CREAT | FILE_FLAGS, 0o600)

    def note(self, *, begins: bool) -> None:
        with self._lock:
            self._count += 1 if begins else -1
            # The first reader that waits takes the lock, the last one releases it.
            if self._count == begins and self._file >= 0:
                # Not waited for: a process that tests the lock holds it for a moment.
                how = fcntl.LOCK_SH | fcntl.LOCK_NB if begins else fcntl.LOCK_UN
                with contextlib.suppress(OSError):
                    fcntl.flock(self._file, how)

    def others_wait(self) -> bool:
        """Whether a reader of another process waits now. Call it only while no reader of this
        process waits."""
        try:
            file = self._opened()
        except OSError:
            return False
        try:
            return not try_lock(file, fcntl.LOCK_EX)
        finally:
            os.close(file)

    def close(self) -> None:
        """Repeatable."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1


def dataset_folders_in(root: str) -> list[str]:
    """The folders of all stores' datasets. Raises OSError."""
    return [each for store in _folders(root) for each in _folders(store)]


def _folders(path: str) -> list[str]:
    with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
        return [
            entry.path
            for entry in entries
            if _STORE_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]
    return []


def find_dataset(folder: str) -> CachedDataset:
    """Without a file `.used`, nobody has used the dataset. Needs the lock of the marker, so that no
    process takes a lock on `.used` meanwhile."""
    nothing = CachedDataset(folder, 0.0, is_pinned=False, references=References())
    try:
        file = os.open(f"{folder}/{USED}", os.O_RDONLY | FILE_FLAGS)
    except OSError:
        return nothing
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            return nothing
        is_pinned = not try_lock(file, fcntl.LOCK_EX)
        return CachedDataset(folder, found.st_mtime, is_pinned, read_references(file))
    finally:
        os.close(file)


def unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
