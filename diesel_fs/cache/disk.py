"""The shelf of chunks in a folder of a local disk, shared by the processes of one server.

    <folder>/.diesel-cache                          what makes it ours; the lock; the bytes counted
    <folder>/.reading                               locked (shared) by who reads from the store
    <folder>/<store UUID>/<identity>/<chunk ID>     a chunk; its mtime is its last use
    <folder>/<store UUID>/<identity>/.<chunk ID>    one on its way; locked while its writer lives
    <folder>/<store UUID>/<identity>/.used          its mtime is the dataset's last use

Owned here: this layout, what may be a cache's folder, the limits, who goes when they are reached.
Not owned: when chunks are fetched (`read_through.py`).

Nothing is synced: a chunk is checked whole when it comes and when a process reads it for the first
time, so whatever a crash leaves is found. Whoever makes or removes files holds the lock on
`.diesel-cache`; readers take no lock that they would wait for. A process may die anywhere: what it
had reserved is freed by the next who needs room. Where the disk fails, the shelf rests for a while
and has no chunks. What has a chunk's name and is no regular file is none, and goes, but for folders
with something in them. Any thread, any process of this machine; not in forked children.
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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
from .tiers import CacheHandle, CacheTier, ChunkKey, Reservation, verify_chunk

log = logging.getLogger("diesel.cache")

DISK_PAUSE_S = 30.0
"""How long a disk that failed is left alone."""

_FAILURES_MAX = 3  # in a row; one file may be damaged where the disk is not

FREE_FRACTION_MIN = 0.05
"""Of the file system: what others need of it goes before the cache (and nearly full ones crawl)."""

IDLE_S = 600.0
"""A dataset that has not been read for so long makes room for another."""

CHUNK_IDLE_S = 24 * 3600.0
"""A chunk that has not been read for so long does, even where its dataset is: an epoch is shorter,
and what purges have replaced is not read again."""

EVICT_FRACTION = 0.05
"""Of the limit, more than is needed: finding who goes means looking at every file."""

_TOUCH_S = 60.0  # how exact last uses are: a thousandth of the system calls
_LOCK_S = 5.0
_LOCK_POLL_S = 0.01
_KNOWN_MAX = 1 << 20  # then each is checked once more
_WRITE_BYTES_MAX = 64 << 20  # at once: a signal is heard between

_MARKER = ".diesel-cache"
_READING = ".reading"
_USED = ".used"
_MAGIC = b"DIESEL-FS cache\n"
_HEAD = struct.Struct("<16sQ")
_STORE_NAME = re.compile(IDENTITY_TEXT)
_CHUNK_NAME = re.compile(r"\.?[0-9a-f]{32}")
_FOREIGN_ALLOWED = re.compile(
    r"lost\+found|\.diesel-cache(-\d+-\d+)?"
)  # what others may just have made
_FILE_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # the last: a FIFO may have the name
_TAKES_NOTHING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def prepare_cache_folder(path: Path, objects: ObjectStore | None = None) -> Path:
    """`path` as a folder for caches: made where it is missing, this user's, nobody else may write.

    Raises PermissionDenied; NoSpaceError where the disk takes no new cache; ConflictError where it
    has other content than a cache's, or is, holds or lies in the folder of `objects`.
    """
    place = Path(os.path.realpath(path))  # one name, however it was spelled
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


def _check_apart(place: Path, store: Path) -> None:
    for inner, outer in ((place, store), (store, place)):
        for above in (inner, *inner.parents):
            with contextlib.suppress(OSError):  # what is not there is no other's name
                if outer.samefile(above):
                    raise ConflictError(
                        f"the cache folder {place} and the store {store} lie in each other",
                        advice="name a folder apart from the store",
                    )


def _check_ours(place: Path) -> None:
    """Make the marker of an empty folder; refuse what is neither empty nor a cache."""
    with contextlib.suppress(FileNotFoundError):
        is_file = stat.S_ISREG((place / _MARKER).stat().st_mode)  # else reading might never end
        if is_file and (place / _MARKER).read_bytes()[:16] == _MAGIC:
            return
        raise ConflictError(f"{place / _MARKER} is not the marker of a cache")
    others = [name for name in sorted(os.listdir(place)) if not _FOREIGN_ALLOWED.fullmatch(name)]
    if others:
        raise ConflictError(
            f"{place} is neither empty nor a cache: it holds {others[0]!r}",
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
class _Found:
    """A file of the shelf, as a look at all of them finds it."""

    path: str
    bytes: int
    used_s: float
    dataset_used_s: float
    is_temporary: bool


class _DiskBreaker:
    """Whether the folder is used for reading, or for writing, after failures of its disk. The log
    gets one line when the pause begins, and one when the disk works again. Any thread."""

    def __init__(self, place: str, doing: str, clock: Callable[[], float]) -> None:
        self._breaker = CircuitBreaker(_FAILURES_MAX, DISK_PAUSE_S)
        self._place, self._doing = place, doing  # for the log: "cannot {doing} the cache in ..."
        self._clock = clock
        self._is_reported = False

    @property
    def is_open(self) -> bool:
        """Whether the disk is left alone now."""
        return self._breaker.is_open(self._clock())

    def succeeded(self) -> None:
        """An access of the disk worked."""
        self._breaker.record_success()
        if self._is_reported:
            self._is_reported = False
            log.warning("the cache in %s works again", self._place)

    def failed(self, error: OSError) -> None:
        """An access of the disk failed."""
        if self._breaker.record_failure(None, self._clock()) and not self._is_reported:
            self._is_reported = True
            log.warning(
                "cannot %s the cache in %s (%s): it is passed by, and tried again every %.0f s",
                self._doing, self._place, error.strerror, DISK_PAUSE_S,
            )  # fmt: skip


class DiskTier(CacheTier):
    """Chunks of one store in a cache's folder, whose limit all stores in it share."""

    kind = "disk"
    prefetches_datasets = True

    def __init__(
        self,
        place: Path,
        store: UUID,
        limit_bytes: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`place` is what `prepare_cache_folder` gave. Without a limit: half of what it could have,
        of what is free there and what it holds already. `clock` says when a failed disk is tried
        again. Raises PermissionDenied, BusyError.
        """
        self._place = os.fspath(place)
        self._folder = f"{self._place}/{store.hex}"
        self.limit_bytes = limit_bytes or 0
        self._is_half = limit_bytes is None  # and that has not been found out yet
        self.read_only_reason = (
            ""  # why it took nothing at the start; what it has is read all the same
        )
        self._device = os.stat(place).st_dev
        self._known: dict[ChunkKey, float] = {}  # checked by this process; when it was touched
        self._dataset_used: dict[UUID, float] = {}
        self._reads = _DiskBreaker(self._place, "read from", clock)
        self._writes = _DiskBreaker(self._place, "write to", clock)
        self._reading_lock = threading.Lock()
        self._reading_count = 0
        self._strange: set[str] = set()  # what has a chunk's name, is none, and cannot go
        self._reading = -1
        self.evictions = 0
        try:
            with self._locked() as marker:
                self._tidy(marker, 0)
            self._reading = self._open_reading()
        except OSError as error:
            if error.errno not in _TAKES_NOTHING:
                raise PermissionDenied(f"{place}: {error.strerror}") from error
            self.read_only_reason = f"the cache in {place} is only read: {error.strerror}"
            log.warning("%s", self.read_only_reason)

    # Reading

    def find(self, key: ChunkKey) -> CacheHandle | None:
        if self._reads.is_open:
            return None
        try:
            file = os.open(self._path(key), os.O_RDONLY | _FILE_FLAGS)
        except FileNotFoundError:
            self._known.pop(key, None)
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
        if not is_chunk or (key not in self._known and not self._is_sound(key, held)):
            held.close()
            return None
        self._touch(key, file)
        return held

    def _is_sound(self, key: ChunkKey, held: CacheHandle) -> bool:
        """Read it whole, and check it; what is damaged goes."""
        try:
            content = np.empty(held.bytes, np.uint8).data
            held.read_into(0, content)
            verify_chunk(key, content)
        except (FormatError, EOFError) as error:
            log.warning("a cached chunk is damaged, and dropped: %s", error)
            self.drop(key)
            return False
        except (OSError, MemoryError):  # the first has been heard of
            return False
        if len(self._known) >= _KNOWN_MAX:
            self._known.clear()
        self._known[key] = 0.0
        return True

    def _touch(self, key: ChunkKey, file: int) -> None:
        now_s = time.monotonic()
        if now_s - self._known.get(key, 0.0) >= _TOUCH_S:
            self._known[key] = now_s
            with contextlib.suppress(OSError):  # a file system that has become read-only
                os.utime(file)
        self.note_use(key.identity)

    def holds(self, key: ChunkKey) -> bool:
        with contextlib.suppress(OSError):
            return stat.S_ISREG(os.lstat(self._path(key)).st_mode)
        return False

    def note_use(self, identity: UUID) -> None:
        now_s = time.monotonic()
        if now_s - self._dataset_used.get(identity, -_TOUCH_S) >= _TOUCH_S:
            self._dataset_used[identity] = now_s
            with contextlib.suppress(OSError):
                os.utime(f"{self._folder}/{identity.hex}/{_USED}")

    def drop(self, key: ChunkKey) -> None:
        """The bytes are counted until somebody needs room, and looks at what there is."""
        self._known.pop(key, None)
        with contextlib.suppress(OSError):
            os.unlink(self._path(key))

    def report_damage(self, key: ChunkKey) -> None:
        self._known.pop(key, None)
        if (held := self.find(key)) is not None:
            held.close()

    # For who decides itself which chunks of a dataset stand here

    def list_chunks(self, identity: UUID) -> list[ChunkId]:
        """The chunks of a dataset that seem to stand here. Raises OSError."""
        path = f"{self._folder}/{identity.hex}"
        with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
            return [
                ChunkId(bytes.fromhex(entry.name))
                for entry in filter(_has_chunk_name, entries)
                if entry.name[0] != "." and entry.is_file(follow_symlinks=False)
            ]
        return []

    def free_bytes(self) -> int:
        """About how much can be put here without that anything goes; 0 where that fails."""
        try:
            marker = os.open(f"{self._place}/{_MARKER}", os.O_RDONLY | _FILE_FLAGS)
        except OSError:
            return 0
        try:
            return max(min(self._left(marker)), 0)
        except (OSError, struct.error):
            return 0
        finally:
            os.close(marker)

    def make_room(self, size: int) -> int:
        """Let what nobody uses any more go for `size` bytes; the room there is then."""
        with contextlib.suppress(OSError, BusyError), self._locked() as marker:
            if not self._has_room(marker, size):
                self._tidy(marker, size)
        return self.free_bytes()

    def evict(self, keys: Iterable[ChunkKey]) -> None:
        """Let go of chunks, and have their room at once. What fails is left for a later look."""
        with contextlib.suppress(OSError, BusyError), self._locked() as marker:
            for key in keys:
                self._known.pop(key, None)
                with contextlib.suppress(OSError):
                    size = os.lstat(self._path(key)).st_size
                    os.unlink(self._path(key))
                    _add(marker, -size)
                    self.evictions += 1

    # Writing

    def reserve(self, key: ChunkKey, size: int) -> Reservation | None:
        if self._writes.is_open:
            raise NoSpaceError(f"{self._place} takes nothing now")
        try:
            with self._locked() as marker:
                place = self._reserve(marker, key, size)
        except BusyError:  # others make room
            return None
        except OSError as error:
            self._writes.failed(error)
            raise NoSpaceError(f"{self._place} cannot be written") from error
        return place

    def _reserve(self, marker: int, key: ChunkKey, size: int) -> Reservation | None:
        """With the lock: whoever else could make or remove the files waits for us."""
        if self.holds(key):
            return None
        folder = f"{self._folder}/{key.identity.hex}"
        temporary = f"{folder}/.{key.id.hex()}"
        if not all(map(self._clear, (f"{folder}/{_USED}", temporary, self._path(key)))):
            return None
        self._make_folder(folder)
        file = os.open(temporary, os.O_RDWR | os.O_CREAT | _FILE_FLAGS, 0o600)
        try:
            if not _try_lock(file, fcntl.LOCK_EX):
                os.close(file)
                return None  # somebody is at it
            counted = os.fstat(file).st_size  # by who was at it and died
            os.ftruncate(file, 0)
            _add(marker, -counted)
            if not self._has_room(marker, size):
                self._tidy(marker, size)
                if not self._has_room(marker, size):
                    raise NoSpaceError(f"all that is in {self._place} is in use")
            os.ftruncate(file, size)
            _add(marker, size)
        except BaseException:
            _unlink(temporary)
            os.close(file)
            raise
        return _FilePlace(self, key, file, temporary)

    def _make_folder(self, folder: str) -> None:
        for each in (self._folder, folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir(each, 0o700)
        used = f"{folder}/{_USED}"
        os.close(os.open(used, os.O_WRONLY | os.O_CREAT | _FILE_FLAGS, 0o600))

    def _has_room(self, marker: int, size: int) -> bool:
        return size <= min(self._left(marker))

    def _left(self, marker: int) -> tuple[int, int]:
        """What the limit leaves, and what the file system does."""
        disk = os.fstatvfs(marker)
        floor_bytes = int(FREE_FRACTION_MIN * disk.f_blocks * disk.f_frsize)
        return self.limit_bytes - _counted(marker), disk.f_bavail * disk.f_frsize - floor_bytes

    def _tidy(self, marker: int, size: int) -> None:
        """Count anew, remove what the dead have left, and evict until `size` bytes and some more
        fit; with 0, until the limit holds, whoever goes.
        """
        now_s = time.time()
        files: list[_Found] = []
        for each in self._scan():
            if each.is_temporary and _is_dead(each.path):
                _unlink(each.path)
            else:
                files.append(each)
        used_bytes = sum(each.bytes for each in files)
        disk = os.fstatvfs(marker)
        if self._is_half:
            self.limit_bytes = (used_bytes + disk.f_bavail * disk.f_frsize) // 2
            self._is_half = False
        floor_bytes = FREE_FRACTION_MIN * disk.f_blocks * disk.f_frsize
        beyond_bytes = max(
            used_bytes + size - self.limit_bytes,
            floor_bytes + size - disk.f_bavail * disk.f_frsize,
        )
        if beyond_bytes > 0 and size:
            beyond_bytes += EVICT_FRACTION * self.limit_bytes
        for each in sorted(files, key=lambda found: found.used_s):
            if beyond_bytes <= 0:
                break
            idle = (
                not size
                or abs(now_s - each.dataset_used_s) > IDLE_S
                or abs(now_s - each.used_s) > CHUNK_IDLE_S
            )
            if idle and not each.is_temporary:
                _unlink(each.path)
                used_bytes -= each.bytes
                beyond_bytes -= each.bytes
                self.evictions += 1
        _add(marker, used_bytes - _counted(marker))

    def _scan(self) -> Iterator[_Found]:
        """All chunks of all stores, those on their way too."""
        for store in _folders(self._place):
            for dataset in _folders(store):
                used_s = 0.0  # the dataset
                with contextlib.suppress(FileNotFoundError):
                    used_s = os.stat(f"{dataset}/{_USED}").st_mtime
                with os.scandir(dataset) as entries:
                    for entry in filter(_has_chunk_name, entries):
                        with contextlib.suppress(FileNotFoundError):
                            seen, way = entry.stat(follow_symlinks=False), entry.name[0] == "."
                            if stat.S_ISREG(seen.st_mode):
                                yield _Found(entry.path, seen.st_size, seen.st_mtime, used_s, way)
                            else:
                                self._clear(entry.path)

    def _clear(self, path: str) -> bool:
        """Remove what has a name of ours and is no regular file; False where it stays."""
        try:
            mode = os.lstat(path).st_mode
            if not stat.S_ISREG(mode):
                (os.rmdir if stat.S_ISDIR(mode) else os.unlink)(path)
                log.warning("removed from the cache, as it was no chunk: %s", path)
        except FileNotFoundError:
            pass
        except OSError as error:
            if path not in self._strange:
                self._strange.add(path)
                log.warning("passed by, as it is no chunk: %s (%s)", path, error.strerror)
            return False
        return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """The marker's descriptor, locked. Raises OSError where this is no cache any more."""
        path = f"{self._place}/{_MARKER}"
        try:
            marker = os.open(path, os.O_RDWR | _FILE_FLAGS)
        except FileNotFoundError:
            # Never into what lies under a mount point; a folder that was emptied begins again
            if os.stat(self._place).st_dev != self._device:
                raise
            try:
                _check_ours(private_folder(Path(self._place)))
            except (ConflictError, PermissionDenied) as error:
                raise OSError(errno.ESTALE, error.message) from error
            marker = os.open(path, os.O_RDWR | _FILE_FLAGS)
        try:
            until = time.monotonic() + _LOCK_S
            while not _try_lock(marker, fcntl.LOCK_EX):
                if time.monotonic() > until:
                    raise BusyError(f"{path} is locked")
                time.sleep(_LOCK_POLL_S)
            if os.pread(marker, 16, 0) != _MAGIC:
                raise OSError(errno.ESTALE, "not a cache any more")
            yield marker
        finally:
            os.close(marker)

    # Who reads from the store

    def note_reading(self, *, begins: bool) -> None:
        with self._reading_lock:
            self._reading_count += 1 if begins else -1
            if self._reading_count == begins and self._reading >= 0:  # the first, or the last
                # Never waited for: who tests holds it for a moment, or was stopped in that moment
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
        # For reading: a file system with a file open for writing cannot be made read-only
        return os.open(f"{self._place}/{_READING}", os.O_RDONLY | os.O_CREAT | _FILE_FLAGS, 0o600)

    def close(self) -> None:
        with self._reading_lock:
            if self._reading >= 0:
                os.close(self._reading)
            self._reading = -1

    def _path(self, key: ChunkKey) -> str:
        return f"{self._folder}/{key.identity.hex}/{key.id.hex()}"


class _File(CacheHandle):
    def __init__(self, shelf: DiskTier, file: int, size: int) -> None:
        self.bytes = size
        self._shelf, self._file = shelf, file

    def read_into(self, start: int, buffer: memoryview) -> None:
        done = 0
        try:
            while done < len(buffer):
                got = os.preadv(self._file, [buffer[done:]], start + done)
                if not got:
                    raise EOFError
                done += got
        except OSError as error:
            self._shelf._reads.failed(error)
            raise
        self._shelf._reads.succeeded()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


class _FilePlace(Reservation):
    def __init__(self, shelf: DiskTier, key: ChunkKey, file: int, temporary: str) -> None:
        self._shelf, self._key = shelf, key
        self._file, self._temporary = file, temporary

    def commit(self, content: memoryview) -> None:
        try:
            done = 0
            while done < len(content):
                done += os.pwrite(self._file, content[done : done + _WRITE_BYTES_MAX], done)
            with self._shelf._locked():
                os.rename(self._temporary, self._shelf._path(self._key))
        except (OSError, BusyError) as error:
            if isinstance(error, OSError):
                self._shelf._writes.failed(error)
            self.cancel()
            return
        os.close(self._file)
        self._shelf._known[self._key] = time.monotonic()
        self._shelf._writes.succeeded()

    def cancel(self) -> None:
        """Where the lock cannot be had, the file stays, and is found dead."""
        try:
            with contextlib.suppress(OSError, BusyError), self._shelf._locked() as marker:
                os.unlink(self._temporary)
                _add(marker, -os.fstat(self._file).st_size)
        finally:
            os.close(self._file)


def _folders(path: str) -> list[str]:
    """Ours below a folder: a store's, or a dataset's."""
    with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
        return [
            entry.path
            for entry in entries
            if _STORE_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]
    return []


def _counted(marker: int) -> int:
    _, used_bytes = _HEAD.unpack(os.pread(marker, _HEAD.size, 0))
    return int(used_bytes)


def _add(marker: int, size: int) -> None:
    if size:
        os.pwrite(marker, _HEAD.pack(_MAGIC, max(_counted(marker) + size, 0)), 0)


def _has_chunk_name(entry: os.DirEntry[str]) -> bool:
    return _CHUNK_NAME.fullmatch(entry.name) is not None


def _try_lock(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_dead(path: str) -> bool:
    """Whether nobody is at a file on its way any more."""
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
