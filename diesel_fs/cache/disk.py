"""Keeps whole chunks in a folder of a local disk, shared by the processes of one machine.

    <folder>/.diesel-cache                          marks a cache; has the lock and the bytes used
    <folder>/.reading                               locked (shared) while a reader waits for a store
    <folder>/<store UUID>/<identity>/<chunk ID>     a chunk; its mtime is its last use
    <folder>/<store UUID>/<identity>/.<chunk ID>    a chunk being written, locked by its writer
    <folder>/<store UUID>/<identity>/.used          its mtime is the dataset's last use; has the
                                                    dataset's references; locked (shared) by jobs
    <folder>/<store UUID>/<identity>/.logs          locked (shared) while order logs are in use
    <folder>/<store UUID>/<identity>/order-<name>   an order log, locked by the mount that uses it

`<identity>` is the dataset's UUID in hexadecimal. `DiskTier` is the tier of a server and of the
nodes of a task; all stores that use a folder share its limit of bytes. Order logs (`order_log.py`)
are in the folder in place of a dataset's chunks: while one is in use, no chunks of that dataset are
written, and those that are here are evicted for it.

Eviction: a process that needs room evicts for all datasets. Two things keep a chunk from being
evicted for another dataset. A job that uses the chunk's dataset *pins* it: a mount or a node of a
task holds a shared lock on `.used` for as long as it lives, so a kill ends the pin, too. Otherwise
the dataset must *cool down*: it must not have been used for `IDLE_S` (DLCache, section III-C.2).
Where nothing may be evicted, a new chunk is not admitted. That holds also where a process starts
with a lower limit than that of the jobs that fill the folder. The order among the others is that of
the process that needs the room: what was not read for the longest time, or with `by_references`
cost-aware LRFU (`lrfu.py`).

`.used` has 36 bytes, or none before the first job: `DIESLRF1`, three little-endian doubles and the
CRC-32 of all this. The doubles are the dataset's CRF at its last reference, the hour of that since
1970, and the seconds that a fetched byte costs (0: unknown). Other content counts as one reference
at the mtime. The file is written in place; versions of the program that do not know the content
keep it.

Crashes: nothing is synced. A chunk is checked whole before it is written and when a process first
reads it, so damage that a crash leaves is noticed, and the chunk dropped. A process may die at any
point: the next process that needs room removes what it was writing. After three failures of the
disk in a row, the tier pauses for `DISK_PAUSE_S` and says that it has no chunks.

Concurrency: a process that makes or removes files holds an exclusive lock on `.diesel-cache`;
readers never wait for a lock. A directory entry with a chunk's name that is not a regular file is
removed, unless it is a folder with something in it. Safe from any thread and any process of the
machine; not usable in forked children.
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
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import UUID

import numpy as np

from ..errors import BusyError, ConflictError, FormatError, NoSpaceError, PermissionDenied
from ..format.entries import ChunkId
from ..format.object_names import IDENTITY_TEXT
from ..net.breaker import CircuitBreaker
from ..settings import private_folder
from ..storage.objects.folder import FolderStore
from ..storage.objects.store import ObjectStore, StoreWrapper
from .lrfu import Attenuation, eviction_order, hour_of
from .tiers import CacheHandle, CacheTier, ChunkKey, Reservation, verify_chunk

log = logging.getLogger("diesel.cache")

DISK_PAUSE_S = 30.0
"""How long a disk that failed is left alone."""

_FAILURES_MAX = 3  # in a row; one file may be damaged where the disk is not

FREE_FRACTION_MIN = 0.05
"""This part of the file system stays free for other programs (and nearly full disks are slow)."""

IDLE_S = 600.0
"""The cool-down: chunks of a dataset that nobody has used for so long may be evicted for others. A
job that ended is often started again, and evaluates or restarts within minutes."""

CHUNK_IDLE_S = 24 * 3600.0
"""A chunk that nobody has read for so long may be evicted although its dataset is read, unless that
is pinned: an epoch is shorter, and chunks that a purge has replaced are never read again. A pinned
dataset gives such chunks up for its own new ones."""

EVICT_FRACTION = 0.05
"""Evict this part of the limit more than is needed: each eviction has to look at every file."""

_COST_CHANGE = 1.25  # a cost that differs by less than this factor is not written again
_TOUCH_S = 60.0  # how exact the times of last use are; exact ones cost a system call a read
_LOCK_S = 5.0  # how long to wait for the lock
_LOCK_POLL_S = 0.01
_CHECKED_MAX = 1 << 20  # remembered chunks; beyond it all are forgotten, and checked again
_WRITE_BYTES_MAX = 64 << 20  # in one call: signals are handled between calls

_MARKER = ".diesel-cache"
_READING = ".reading"
_USED = ".used"
_LOGS = ".logs"
_MAGIC = b"DIESEL-FS cache\n"
_HEAD = struct.Struct("<16sQ")
_RECORD_MAGIC = b"DIESLRF1"
_RECORD = struct.Struct("<8sdddI")
_HOUR_MAX = 1e9  # a greater one is damage
_STORE_NAME = re.compile(IDENTITY_TEXT)
_CHUNK_NAME = re.compile(r"\.?[0-9a-f]{32}")
_LOG_NAME = re.compile(r"order-[0-9a-f]{16}")
# The second: a marker that another process is making.
_FOREIGN_ALLOWED = re.compile(r"lost\+found|\.diesel-cache(-\d+-\d+)?")
_FILE_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # O_NONBLOCK: a FIFO may have the name
_TAKES_NOTHING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def prepare_cache_folder(path: Path, objects: ObjectStore | None = None) -> Path:
    """Make `path` a cache's folder, which belongs to this user and nobody else may write.

    Raises PermissionDenied; NoSpaceError where the disk takes no new cache; ConflictError where the
    folder has other content, or is, contains or lies in the folder of the store `objects`.
    """
    place = Path(os.path.realpath(path))  # one name for each folder
    inner = objects
    while isinstance(inner, StoreWrapper):
        inner = inner.inner
    if isinstance(inner, FolderStore):
        _check_apart(place, Path(inner.root))
    try:
        private_folder(place)
        _check_ours(place)
    except (OSError, PermissionDenied) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError):
            raise
        kind = NoSpaceError if cause.errno in _TAKES_NOTHING else PermissionDenied
        raise kind(f"{place}: cannot be used for a cache: {cause.strerror}") from error
    return place


@dataclass(frozen=True, slots=True)
class CachedDatasetUse:
    """What a dataset takes in a cache's folder, and when it was last used (seconds since 1970)."""

    folder: str
    bytes: int
    used_s: float
    is_pinned: bool


def is_cache_folder(path: Path) -> bool:
    """Whether a folder has the marker of a cache."""
    with contextlib.suppress(OSError):
        is_file = stat.S_ISREG((path / _MARKER).stat().st_mode)  # reading a FIFO might never end
        return is_file and (path / _MARKER).read_bytes()[: len(_MAGIC)] == _MAGIC
    return False


def foreign_in(path: Path) -> str:
    """The name of something in a folder because of which no cache is made in it; empty where there
    is nothing, and for a folder that is a cache. Raises OSError."""
    others = [name for name in sorted(os.listdir(path)) if not _FOREIGN_ALLOWED.fullmatch(name)]
    return "" if is_cache_folder(path) or not others else others[0]


def cached_datasets(path: Path) -> list[CachedDatasetUse]:
    """What each dataset takes in a cache's folder, which is not changed. Raises OSError, BusyError
    where other processes keep it locked."""
    marker = os.open(path / _MARKER, os.O_RDONLY | _FILE_FLAGS)
    try:
        _lock_marker(marker, path / _MARKER)
        datasets = [
            _find_dataset(each) for store in _folders(f"{path}") for each in _folders(store)
        ]
    finally:
        os.close(marker)
    found = []
    for dataset in datasets:
        used = 0
        with os.scandir(dataset.folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    used += entry.stat(follow_symlinks=False).st_blocks * 512
        found.append(CachedDatasetUse(dataset.folder, used, dataset.used_s, dataset.is_pinned))
    return found


@dataclass(frozen=True, slots=True)
class CachedFiles:
    """What the folder of a dataset in a cache holds, by the names of its files."""

    chunks: tuple[ChunkId, ...]
    """Chunks that seem to be here: none was checked."""
    has_logs: bool
    """Whether there are order logs, which have contents of the dataset, too."""


def dataset_folders(path: Path) -> dict[str, UUID]:
    """The folders of datasets in a cache's folder, and the datasets' identities. Nothing is locked
    or changed. Raises OSError."""
    if not is_cache_folder(path):
        return {}
    return {
        each: UUID(hex=os.path.basename(each))
        for store in _folders(f"{path}")
        for each in _folders(store)
    }


def list_files(folder: str) -> CachedFiles:
    """What is in the folder of a dataset. Nothing is locked or changed. Raises OSError."""
    chunks, has_logs = [], False
    with os.scandir(folder) as entries:
        for entry in entries:
            has_logs = has_logs or _LOG_NAME.fullmatch(entry.name) is not None
            is_chunk = _has_chunk_name(entry) and entry.name[0] != "."
            if is_chunk and entry.is_file(follow_symlinks=False):
                chunks.append(ChunkId(bytes.fromhex(entry.name)))
    return CachedFiles(tuple(chunks), has_logs)


def _lock_marker(marker: int, path: Path | str) -> None:
    """Lock the descriptor of a marker. Raises BusyError."""
    until = time.monotonic() + _LOCK_S
    while not _try_lock(marker, fcntl.LOCK_EX):
        if time.monotonic() > until:
            raise BusyError(f"{path} is locked")
        time.sleep(_LOCK_POLL_S)


def _check_apart(place: Path, store: Path) -> None:
    for inner, outer in ((place, store), (store, place)):
        for above in (inner, *inner.parents):
            with contextlib.suppress(OSError):  # a folder that is absent is not the other one
                if outer.samefile(above):
                    raise ConflictError(
                        f"the cache folder {place} and the store {store} lie in each other",
                        advice="name a folder apart from the store",
                    )


def _check_ours(place: Path) -> None:
    """Make the marker of an empty folder; refuse a folder that is neither empty nor a cache."""
    with contextlib.suppress(FileNotFoundError):
        is_file = stat.S_ISREG((place / _MARKER).stat().st_mode)  # reading a FIFO might never end
        if is_file and (place / _MARKER).read_bytes()[:16] == _MAGIC:
            return
        raise ConflictError(f"{place / _MARKER} is not the marker of a cache")
    if foreign := foreign_in(place):
        raise ConflictError(
            f"{place} is neither empty nor a cache: it holds {foreign!r}",
            advice="name an empty folder",
        )
    with contextlib.suppress(FileExistsError):
        temporary = place / f"{_MARKER}-{os.getpid()}-{threading.get_ident()}"
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE_FLAGS, 0o600)
        try:
            os.write(file, _HEAD.pack(_MAGIC, 0))
            os.fsync(file)
            os.link(temporary, place / _MARKER)
        finally:
            os.close(file)
            temporary.unlink()


@dataclass(frozen=True, slots=True)
class _References:
    """What `.used` has of a dataset: its CRF at its last reference, the hour of that, and what a
    fetched byte costs in seconds."""

    crf: float = 1.0
    hour: float = 0.0
    byte_cost_s: float = 0.0

    @classmethod
    def parse(cls, content: bytes) -> "_References | None":
        """The content of a file; None for other content."""
        if len(content) != _RECORD.size:
            return None
        magic, crf, hour, byte_cost_s, checksum = _RECORD.unpack(content)
        is_sound = magic == _RECORD_MAGIC and checksum == zlib.crc32(content[:-4])
        if (
            is_sound
            and 1 <= crf < math.inf
            and abs(hour) < _HOUR_MAX
            and 0 <= byte_cost_s < math.inf
        ):
            return cls(crf, hour, byte_cost_s)
        return None

    def packed(self) -> bytes:
        """The content of the file."""
        content = _RECORD.pack(_RECORD_MAGIC, self.crf, self.hour, self.byte_cost_s, 0)[:-4]
        return content + zlib.crc32(content).to_bytes(4, "little")


@dataclass(frozen=True, slots=True)
class _CachedDataset:
    """The folder of a dataset, as `_scan` finds it."""

    folder: str
    used_s: float  # its last use, since 1970
    is_pinned: bool
    references: _References


@dataclass(frozen=True, slots=True)
class _CachedFile:
    """A chunk or an order log, as `_scan` finds it. The time is of the last use, since 1970."""

    path: str
    bytes: int
    used_s: float
    dataset: _CachedDataset
    is_temporary: bool
    is_log: bool


class _DiskBreaker:
    """Stops using a disk that fails, for reading or for writing, and logs that once. Any thread."""

    def __init__(self, place: str, doing: str, clock: Callable[[], float]) -> None:
        self._breaker = CircuitBreaker(_FAILURES_MAX, DISK_PAUSE_S)
        self._root, self._doing = place, doing  # for the log: "cannot {doing} the cache in ..."
        self._clock = clock
        self._is_reported = False

    @property
    def is_open(self) -> bool:
        """Whether the disk is not used now."""
        return self._breaker.is_open(self._clock())

    def succeeded(self) -> None:
        """An access of the disk worked."""
        self._breaker.record_success()
        if self._is_reported:
            self._is_reported = False
            log.warning("the cache in %s works again", self._root)

    def failed(self, error: OSError) -> None:
        """An access of the disk failed."""
        if self._breaker.record_failure(None, self._clock()) and not self._is_reported:
            self._is_reported = True
            log.warning(
                "cannot %s the cache in %s (%s): it is not used, and tried again every %.0f s",
                self._doing, self._root, error.strerror, DISK_PAUSE_S,
            )  # fmt: skip


class DiskTier(CacheTier):
    """Chunks of one store in a cache's folder; all stores in that folder share its limit."""

    kind = "disk"
    prefetches_datasets = True

    def __init__(
        self,
        place: Path,
        store: UUID,
        limit_bytes: int | None,
        clock: Callable[[], float] = time.monotonic,
        *,
        by_references: bool = False,
    ) -> None:
        """`place` is the folder that `prepare_cache_folder` returned. Without a limit, the cache
        may have half of the bytes that are free there or that it has already. `clock` gives the
        time by which a failed disk is tried again and chunks are marked as used. `by_references`:
        evict by cost-aware LRFU (see the module).

        Raises PermissionDenied, BusyError.
        """
        self._root = os.fspath(place)
        self._store_folder = f"{self._root}/{store.hex}"
        self._clock = clock
        self.limit_bytes = limit_bytes or 0
        self._takes_half = limit_bytes is None  # `limit_bytes` is still to be computed
        self.read_only_reason = ""
        """Why nothing can be written here, if so; chunks are read all the same."""
        self._device = os.stat(place).st_dev
        # The chunks that this process has checked, and when it last set their times of last use
        self._checked_s: dict[ChunkKey, float] = {}
        self._dataset_touched_s: dict[UUID, float] = {}
        self._attenuation, self._by_references = Attenuation(), by_references
        self._pins: dict[UUID, int] = {}  # descriptors that are locked
        self._byte_costs_s: dict[UUID, float] = {}  # as this process has written them
        self._reads = _DiskBreaker(self._root, "read from", clock)
        self._writes = _DiskBreaker(self._root, "write to", clock)
        self._reading_lock = threading.Lock()
        self._reading_count = 0
        # Paths with a chunk's name that are no chunks and cannot be removed.
        self._not_removable: set[str] = set()
        self._reading = -1
        self.evictions = 0
        self.room_evictions = self.room_evicted_bytes = 0
        """Of these, what was evicted to make room, of whatever dataset."""
        try:
            with self._locked() as marker:
                self._tidy(marker, 0, "")
            self._reading = self._open_reading()
        except OSError as error:
            if error.errno not in _TAKES_NOTHING:
                raise PermissionDenied(f"{place}: {error.strerror}") from error
            self.read_only_reason = f"the cache in {place} is only read: {error.strerror}"
            log.warning("%s", self.read_only_reason)

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
        """Reads a whole chunk into `room`, and checks it. False where it is not here, or cannot be
        read; a damaged one is dropped."""
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

    def _open(self, key: ChunkKey) -> "_File | None":
        """The file of a chunk, which has not been checked."""
        if self._reads.is_open:
            return None
        try:
            file = os.open(self._path(key), os.O_RDONLY | _FILE_FLAGS)
        except FileNotFoundError:
            self._checked_s.pop(key, None)
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket
                self._clear(self._path(key))
            elif error.errno not in (errno.EMFILE, errno.ENFILE):
                self._reads.failed(error)
            return None
        found = os.fstat(file)
        held, is_chunk = _File(self, file, found.st_size), stat.S_ISREG(found.st_mode)
        if not is_chunk:
            self._clear(self._path(key))
            held.close()
            return None
        return held

    def _is_sound(self, key: ChunkKey, held: "_File", room: memoryview | None = None) -> bool:
        """Read the chunk whole, into `room` where there is any, and check it. A damaged one is
        dropped."""
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
        self._checked_s[key] = -_TOUCH_S
        return True

    def _touch(self, key: ChunkKey, held: "_File") -> None:
        now_s = self._clock()
        if now_s - self._checked_s.get(key, -_TOUCH_S) >= _TOUCH_S:
            self._checked_s[key] = now_s
            with contextlib.suppress(OSError):  # the file system has become read-only
                os.utime(held.file)
        self.note_use(key.identity)

    def holds(self, key: ChunkKey) -> bool:
        with contextlib.suppress(OSError):
            return stat.S_ISREG(os.lstat(self._path(key)).st_mode)
        return False

    def note_use(self, identity: UUID) -> None:
        now_s = self._clock()
        if now_s - self._dataset_touched_s.get(identity, -_TOUCH_S) >= _TOUCH_S:
            self._dataset_touched_s[identity] = now_s
            with contextlib.suppress(OSError):
                os.utime(f"{self._store_folder}/{identity.hex}/{_USED}")

    def drop(self, key: ChunkKey) -> None:
        """Remove a chunk. Its bytes stay counted until the files are counted again for room."""
        self._checked_s.pop(key, None)
        with contextlib.suppress(OSError):
            os.unlink(self._path(key))

    def report_damage(self, key: ChunkKey) -> None:
        self._checked_s.pop(key, None)
        if (held := self.find(key)) is not None:
            held.close()

    # Jobs and their datasets

    def register_job(self, identity: UUID, now_s: float) -> None:
        """A job that reads a dataset has begun now (seconds since 1970): a reference of the
        dataset, and a pin until `close` or the end of the process. Where the folder cannot be
        written, nothing is noted."""
        with contextlib.suppress(OSError, BusyError), self._locked():
            folder = self._folder(identity)
            self._clear(f"{folder}/{_USED}")
            self._make_folder(folder)
            # Opened for reading, as `.reading`, and locked first: a full disk may take no record
            pin = os.open(f"{folder}/{_USED}", os.O_RDONLY | _FILE_FLAGS)
            if identity in self._pins:
                os.close(self._pins[identity])
            self._pins[identity] = pin
            _try_lock(pin, fcntl.LOCK_SH)
            is_first = not os.fstat(pin).st_size
            before = _References(crf=0.0) if is_first else _read_references(pin)
            _write_references(f"{folder}/{_USED}", self._add_reference(before, now_s))

    def note_cost(self, identity: UUID, byte_cost_s: float) -> None:
        """What bringing back a byte of a dataset costs, in seconds: as measured, or as expected.
        Of equally worthy datasets, cheap ones are evicted first."""
        known = self._byte_costs_s.get(identity, 0.0)
        if known / _COST_CHANGE < byte_cost_s < known * _COST_CHANGE or not (
            0 < byte_cost_s < math.inf
        ):
            return
        with contextlib.suppress(OSError, BusyError), self._locked():
            path = f"{self._folder(identity)}/{_USED}"
            file = os.open(path, os.O_RDONLY | _FILE_FLAGS)
            try:
                before = _read_references(file)
            finally:
                os.close(file)
            _write_references(path, replace(before, byte_cost_s=byte_cost_s))
            self._byte_costs_s[identity] = byte_cost_s

    def _add_reference(self, before: _References, now_s: float) -> _References:
        crf, hour = np.array([before.crf]), np.array([before.hour])
        (after,) = self._attenuation.add_reference(crf, hour, hour_of(now_s)).tolist()
        return replace(before, crf=after, hour=hour_of(now_s))

    # For a node of a task, which decides itself which chunks are here

    def list_chunks(self, identity: UUID) -> list[ChunkId]:
        """The chunks of a dataset that seem to be here. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            return [*list_files(self._folder(identity)).chunks]
        return []

    def free_bytes(self) -> int:
        """About how many bytes can be put here without an eviction; 0 where that is unknown."""
        try:
            marker = os.open(f"{self._root}/{_MARKER}", os.O_RDONLY | _FILE_FLAGS)
        except OSError:
            return 0
        try:
            return max(min(self._free(marker)), 0)
        except (OSError, struct.error):
            return 0
        finally:
            os.close(marker)

    def make_room(self, identity: UUID, size: int) -> int:
        """Evict idle chunks until `size` bytes are free for a dataset, if possible; returns
        `free_bytes` then."""
        with contextlib.suppress(OSError, BusyError), self._locked() as marker:
            if not self._has_room(marker, size):
                self._tidy(marker, size, self._folder(identity))
        return self.free_bytes()

    def evict(self, keys: Iterable[ChunkKey]) -> None:
        """Remove chunks and free their room at once. Failures are left for the next count."""
        with contextlib.suppress(OSError, BusyError), self._locked() as marker:
            for key in keys:
                self._checked_s.pop(key, None)
                with contextlib.suppress(OSError):
                    size = os.lstat(self._path(key)).st_size
                    os.unlink(self._path(key))
                    _add_used(marker, -size)
                    self.evictions += 1

    # Writing

    def reserve(self, key: ChunkKey, size: int) -> Reservation | None:
        if self._writes.is_open:
            raise NoSpaceError(f"the cache in {self._root} is paused after errors of its disk")
        try:
            with self._locked() as marker:
                reservation = self._reserve(marker, key, size)
        except BusyError:  # another process is making room
            return None
        except OSError as error:
            self._writes.failed(error)
            raise NoSpaceError(f"the cache in {self._root} cannot be written") from error
        return reservation

    def _reserve(self, marker: int, key: ChunkKey, size: int) -> Reservation | None:
        """`reserve`, with the lock: no other process makes or removes files meanwhile."""
        if self.holds(key):
            return None
        folder = self._folder(key.identity)
        if not _is_dead(f"{folder}/{_LOGS}") and os.path.exists(f"{folder}/{_LOGS}"):
            raise NoSpaceError(f"{folder} has order logs in place of chunks")
        temporary = f"{folder}/.{key.id.hex()}"
        if not all(map(self._clear, (f"{folder}/{_USED}", temporary, self._path(key)))):
            return None
        self._make_folder(folder)
        file = os.open(temporary, os.O_RDWR | os.O_CREAT | _FILE_FLAGS, 0o600)
        try:
            if not _try_lock(file, fcntl.LOCK_EX):
                os.close(file)
                return None  # another process is writing it
            counted = os.fstat(file).st_size  # reserved by a writer that died
            os.ftruncate(file, 0)
            _add_used(marker, -counted)
            if not self._has_room(marker, size):
                self._tidy(marker, size, folder)
                if not self._has_room(marker, size):
                    raise NoSpaceError(f"every chunk in {self._root} is in use")
            os.ftruncate(file, size)
            _add_used(marker, size)
        except BaseException:
            _unlink(temporary)
            os.close(file)
            raise
        return _FileReservation(self, key, file, temporary)

    def _make_folder(self, folder: str) -> None:
        for each in (self._store_folder, folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir(each, 0o700)
        used = f"{folder}/{_USED}"
        os.close(os.open(used, os.O_WRONLY | os.O_CREAT | _FILE_FLAGS, 0o600))

    def _has_room(self, marker: int, size: int) -> bool:
        return size <= min(self._free(marker))

    def _free(self, marker: int) -> tuple[int, int]:
        """The bytes that the limit leaves, and those that the file system leaves."""
        disk = os.fstatvfs(marker)
        floor_bytes = int(FREE_FRACTION_MIN * disk.f_blocks * disk.f_frsize)
        return self.limit_bytes - _used_bytes(marker), disk.f_bavail * disk.f_frsize - floor_bytes

    def _tidy(self, marker: int, size: int, folder: str, *, takes_chunks: bool = False) -> None:
        """Count all files, remove those of dead writers, and evict idle chunks until `size` bytes
        and some more fit in a dataset's folder. Without a folder, evict until the limit holds, also
        chunks in use that no job pins. `takes_chunks`: the chunks in the folder itself count as
        idle.
        """
        now_s = time.time()
        files: list[_CachedFile] = []
        for each in self._scan():
            if each.is_temporary and _is_dead(each.path):
                _unlink(each.path)
            else:
                files.append(each)
        used_bytes = sum(each.bytes for each in files)
        disk = os.fstatvfs(marker)
        if self._takes_half:
            self.limit_bytes = (used_bytes + disk.f_bavail * disk.f_frsize) // 2
            self._takes_half = False
        floor_bytes = FREE_FRACTION_MIN * disk.f_blocks * disk.f_frsize
        beyond_bytes = max(
            used_bytes + size - self.limit_bytes,
            floor_bytes + size - disk.f_bavail * disk.f_frsize,
        )
        if beyond_bytes > 0:
            beyond_bytes += EVICT_FRACTION * self.limit_bytes if folder else 0
            may_go = [
                each for each in files if _may_evict(each, folder, now_s, takes_chunks=takes_chunks)
            ]
            evicted: Counter[str] = Counter()
            for each in self._in_eviction_order(may_go, now_s):
                if beyond_bytes <= 0:
                    break
                _unlink(each.path)
                used_bytes -= each.bytes
                beyond_bytes -= each.bytes
                evicted[each.dataset.folder] += each.bytes
                self.evictions += 1
                self.room_evictions += 1
                self.room_evicted_bytes += each.bytes
            for other, total in evicted.items():
                log.info("evicted %d bytes of %s for %s", total, other, folder or "the limit")
        _add_used(marker, used_bytes - _used_bytes(marker))

    def _in_eviction_order(self, files: Sequence[_CachedFile], now_s: float) -> list[_CachedFile]:
        """Files, the first to be evicted first."""
        if not self._by_references:
            return sorted(files, key=lambda each: each.used_s)
        known = [each.dataset.references for each in files]
        order = eviction_order(
            self._attenuation.log_crf(
                np.array([each.crf for each in known], np.float64),
                np.array([each.hour for each in known], np.float64),
                hour_of(now_s),
            ),
            np.array([each.byte_cost_s for each in known], np.float64),
            np.array([each.used_s for each in files], np.float64),
        )
        return [files[number] for number in order.tolist()]

    def _scan(self) -> Iterator[_CachedFile]:
        """All chunks of all stores, with those that are being written, and all order logs."""
        for store in _folders(self._root):
            for dataset in _folders(store):
                found_dataset = _find_dataset(dataset)
                with os.scandir(dataset) as entries:
                    for entry in entries:
                        is_log = _LOG_NAME.fullmatch(entry.name) is not None
                        if not is_log and not _has_chunk_name(entry):
                            continue
                        with contextlib.suppress(FileNotFoundError):
                            found = entry.stat(follow_symlinks=False)
                            if stat.S_ISREG(found.st_mode):
                                yield _CachedFile(
                                    entry.path,
                                    found.st_blocks * 512 if is_log else found.st_size,
                                    found.st_mtime,
                                    found_dataset,
                                    entry.name[0] == ".",
                                    is_log,
                                )
                            else:
                                self._clear(entry.path)

    def _clear(self, path: str) -> bool:
        """Remove a path with a name of ours that is not a regular file; False where that fails."""
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

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """The locked descriptor of the marker. Raises BusyError; OSError where this is no cache any
        more."""
        path = f"{self._root}/{_MARKER}"
        try:
            marker = os.open(path, os.O_RDWR | _FILE_FLAGS)
        except FileNotFoundError:
            # A folder that was emptied is marked again; but never the folder below a mount point
            # whose disk has been unmounted.
            if os.stat(self._root).st_dev != self._device:
                raise
            try:
                _check_ours(private_folder(Path(self._root)))
            except (ConflictError, PermissionDenied) as error:
                raise OSError(errno.ESTALE, error.message) from error
            marker = os.open(path, os.O_RDWR | _FILE_FLAGS)
        try:
            _lock_marker(marker, path)
            if os.pread(marker, 16, 0) != _MAGIC:
                raise OSError(errno.ESTALE, "not a cache any more")
            yield marker
        finally:
            os.close(marker)

    # Order logs, whose files `order_log.py` reads and writes

    def lock_logs(self, identity: UUID) -> int:
        """Have order logs in place of a dataset's chunks, until the descriptor that this returns is
        closed. Raises OSError, BusyError."""
        folder = self._folder(identity)
        with self._locked():  # so no other process tests the lock now
            self._make_folder(folder)
            file = os.open(f"{folder}/{_LOGS}", os.O_RDWR | os.O_CREAT | _FILE_FLAGS, 0o600)
            _try_lock(file, fcntl.LOCK_SH)
        return file

    def log_folder(self, identity: UUID) -> str:
        """The folder with the order logs of a dataset."""
        return self._folder(identity)

    def open_log(self, identity: UUID, name: str) -> int:
        """The file of an order log, made where it is not there, and locked until it is closed.
        Raises BusyError where another process uses it; OSError."""
        path = f"{self._folder(identity)}/{name}"
        file = os.open(path, os.O_RDWR | os.O_CREAT | _FILE_FLAGS, 0o600)
        if stat.S_ISREG(os.fstat(file).st_mode) and _try_lock(file, fcntl.LOCK_EX):
            return file
        os.close(file)
        raise BusyError(f"another mount uses {path}")

    def remove_log(self, identity: UUID, name: str, file: int) -> None:
        """Remove an order log, of which the caller has the locked file, and close it."""
        try:
            size = os.fstat(file).st_blocks * 512
            with contextlib.suppress(OSError):
                os.unlink(f"{self._folder(identity)}/{name}")
                self.give_room(size)
        finally:
            os.close(file)

    def take_room(self, identity: UUID, size: int) -> bool:
        """Reserve room for so many more bytes in order logs; chunks of the dataset are evicted for
        it. False where there is none."""
        if self._writes.is_open:
            return False
        with contextlib.suppress(OSError, BusyError), self._locked() as marker:
            if not self._has_room(marker, size):
                self._tidy(marker, size, self._folder(identity), takes_chunks=True)
            if self._has_room(marker, size):
                _add_used(marker, size)
                return True
        return False

    def give_room(self, size: int) -> None:
        """So many bytes of order logs were released."""
        with contextlib.suppress(OSError, BusyError), self._locked() as marker:
            _add_used(marker, -size)

    # Readers that wait for the store

    def note_reading(self, *, begins: bool) -> None:
        with self._reading_lock:
            self._reading_count += 1 if begins else -1
            # The first reader that waits takes the lock, the last one releases it.
            if self._reading_count == begins and self._reading >= 0:
                # Not waited for: a process that tests the lock holds it for a moment.
                how = fcntl.LOCK_SH | fcntl.LOCK_NB if begins else fcntl.LOCK_UN
                with contextlib.suppress(OSError):
                    fcntl.flock(self._reading, how)

    def others_read(self) -> bool:
        try:
            file = self._open_reading()
        except OSError:
            return False
        try:
            return not _try_lock(file, fcntl.LOCK_EX)
        finally:
            os.close(file)

    def _open_reading(self) -> int:
        # Opened for reading: a file that is open for writing keeps a file system from becoming
        # read-only.
        return os.open(f"{self._root}/{_READING}", os.O_RDONLY | os.O_CREAT | _FILE_FLAGS, 0o600)

    def close(self) -> None:
        with self._reading_lock:
            if self._reading >= 0:
                os.close(self._reading)
            self._reading = -1
            while self._pins:
                os.close(self._pins.popitem()[1])

    def _path(self, key: ChunkKey) -> str:
        return f"{self._folder(key.identity)}/{key.id.hex()}"

    def _folder(self, identity: UUID) -> str:
        return f"{self._store_folder}/{identity.hex}"


class _File(CacheHandle):
    def __init__(self, tier: DiskTier, file: int, size: int) -> None:
        self.bytes = size
        self._tier, self.file = tier, file

    def read_into(self, start: int, buffer: memoryview) -> None:
        done = 0
        try:
            while done < len(buffer):
                got = os.preadv(self.file, [buffer[done:]], start + done)
                if not got:
                    raise EOFError
                done += got
        except OSError as error:
            self._tier._reads.failed(error)
            raise
        self._tier._reads.succeeded()

    def read_nowait(self, start: int, buffer: memoryview) -> bool:
        """From the page cache of the kernel. A file system that cannot tell gives nothing."""
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
        try:
            done = 0
            while done < len(content):
                done += os.pwrite(self._file, content[done : done + _WRITE_BYTES_MAX], done)
            with self._tier._locked():
                os.rename(self._temporary, self._tier._path(self._key))
        except (OSError, BusyError) as error:
            if isinstance(error, OSError):
                self._tier._writes.failed(error)
            self.cancel()
            return
        os.close(self._file)
        self._tier._checked_s[self._key] = self._tier._clock()
        self._tier._writes.succeeded()

    def cancel(self) -> None:
        """Remove the file. Without the lock it stays, and is removed with those of dead writers."""
        try:
            with contextlib.suppress(OSError, BusyError), self._tier._locked() as marker:
                os.unlink(self._temporary)
                _add_used(marker, -os.fstat(self._file).st_size)
        finally:
            os.close(self._file)


def _folders(path: str) -> list[str]:
    """The folders of stores, or of datasets, in a folder."""
    with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
        return [
            entry.path
            for entry in entries
            if _STORE_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]
    return []


def _may_evict(each: _CachedFile, folder: str, now_s: float, *, takes_chunks: bool) -> bool:
    """Whether a file may be evicted for the dataset in `folder`; see `DiskTier._tidy`."""
    if each.is_temporary or (each.is_log and not _is_dead(each.path)):
        return False
    is_own = each.dataset.folder == folder
    if each.dataset.is_pinned and not is_own:
        return False
    return (
        not folder
        or each.is_log
        or (is_own and takes_chunks)
        or abs(now_s - each.dataset.used_s) > IDLE_S
        or abs(now_s - each.used_s) > CHUNK_IDLE_S
    )


def _find_dataset(folder: str) -> _CachedDataset:
    """What is known of the dataset in a folder. With the lock of the marker, so that no process
    takes a lock on `.used` now."""
    try:
        file = os.open(f"{folder}/{_USED}", os.O_RDONLY | _FILE_FLAGS)
    except OSError:
        return _CachedDataset(folder, 0.0, is_pinned=False, references=_References())
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            return _CachedDataset(folder, 0.0, is_pinned=False, references=_References())
        is_pinned = not _try_lock(file, fcntl.LOCK_EX)
        return _CachedDataset(folder, found.st_mtime, is_pinned, _read_references(file))
    finally:
        os.close(file)


def _read_references(file: int) -> _References:
    """The references in a file `.used`. Without any, as before the first job of a version that
    writes them, the last use counts as one."""
    found = _References.parse(os.pread(file, _RECORD.size + 1, 0))
    return _References(hour=hour_of(os.fstat(file).st_mtime)) if found is None else found


def _write_references(path: str, references: _References) -> None:
    file = os.open(path, os.O_WRONLY | _FILE_FLAGS)
    try:
        os.pwrite(file, references.packed(), 0)
        os.ftruncate(file, _RECORD.size)  # what was there may have been longer
    finally:
        os.close(file)


def _used_bytes(marker: int) -> int:
    _, used_bytes = _HEAD.unpack(os.pread(marker, _HEAD.size, 0))
    return int(used_bytes)


def _add_used(marker: int, size: int) -> None:
    if size:
        os.pwrite(marker, _HEAD.pack(_MAGIC, max(_used_bytes(marker) + size, 0)), 0)


def _has_chunk_name(entry: os.DirEntry[str]) -> bool:
    return _CHUNK_NAME.fullmatch(entry.name) is not None


def _try_lock(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_dead(path: str) -> bool:
    """Whether the writer of a file has died: nobody holds the lock on it."""
    try:
        file = os.open(path, os.O_RDWR | _FILE_FLAGS)
    except OSError:
        return False
    try:
        return stat.S_ISREG(os.fstat(file).st_mode) and _try_lock(file, fcntl.LOCK_EX)
    finally:
        os.close(file)


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
