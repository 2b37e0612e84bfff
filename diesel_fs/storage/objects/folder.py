"""The object store in a folder of a POSIX file system: each object is one file.

`put` writes a temporary file, syncs it, links it to its name and syncs the folder. The embedded
metadata and the accounts lie beside the objects and are never listed.

Any thread, process and host that shares the folder; the file system decides races (link and rename
are atomic). No file stays open between calls, so a store hinders neither a fork nor an umount.
"""

import contextlib
import ctypes
import errno
import os
import re
import secrets
import stat
import uuid
from collections.abc import Callable, Iterator, Sequence
from enum import Enum

from ...errors import (
    ConflictError,
    DieselError,
    NoSpaceError,
    ObjectExists,
    ObjectMissing,
    ObjectStoreError,
    PermissionDenied,
    UsageError,
)
from ...format.entries import Bytes
from ...format.object_names import DELETED, FOLDER_NAME, OBJECT_NAME, STORE_MARKER
from ...system.atomic_file import fsync_folder
from ...system.vectored_io import byte_views, write_all
from . import store as contract
from .direct_writes import takes_direct, write_direct
from .nowait_reads import read_nowait_at
from .store import FastReads, Housekeeping, Leftover, ObjectInfo, ObjectStore

_TEMPORARY = re.compile(r"\.tmp-(?P<host>[A-Za-z0-9._-]{1,64})-(?P<pid>\d{1,10})-[0-9a-f]{16}")
_BESIDE_OBJECTS = re.compile(r"meta\.(sqlite[-.a-z0-9]*|lease)|accounts(\.lock)?")
# mkfs puts this into a new file system, in which a store may be created
_LOST_AND_FOUND = "lost+found"
# The kernel may have dropped the dirty pages (EIO), or the folder has gone (ENOENT, ESTALE). A
# second fsync would prove nothing, so a second file is written
_WRITE_AGAIN = frozenset({errno.EIO, errno.ESTALE, errno.ENOENT})
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NOT_ALLOWED = frozenset({errno.EACCES, errno.EPERM})
_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR})
# O_NONBLOCK: a pipe under an object's name must not hang the reader
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_Publish = Callable[[str, str], None]


class _Sort(Enum):
    """What a name in the folder stands for. LEFTOVER is a temporary file of a put, FOREIGN anything
    that DIESEL-FS did not write."""

    OBJECT = 1
    LEFTOVER = 2
    FOREIGN = 3


class FolderStore(ObjectStore):
    """`root` is a real absolute path."""

    def __init__(self, root: str, store_id: uuid.UUID) -> None:
        """Callers use `open` or `create`."""
        self.root = root
        self.store_id = store_id
        self._durable = {""}  # folders that are known to exist durably
        self._direct: dict[str, bool] = {}  # by folder, whether large files bypass the page cache

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "FolderStore":
        """Raises ObjectMissing if there is no marker: the store may not be mounted."""
        root = _real_path(path)
        try:
            return cls(root, _read_marker(root))
        except OSError as error:
            if error.errno not in _MISSING:
                raise _store_error(error, "open the store", root) from error
        raise ObjectMissing(
            f"{root}: no DIESEL-FS store is here (no {STORE_MARKER})",
            advice="check the path, and that what should be mounted there is mounted",
        )

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> "FolderStore":
        """Make a store in an absent or empty folder, or open the one there. If several processes do
        so at once, all open the same. Raises ConflictError if the folder holds anything else."""
        root = _real_path(path)
        try:
            _make_root(root)
            content = os.listdir(root)
        except OSError as error:
            raise _store_error(error, "create a store", root) from error
        if STORE_MARKER not in content:
            is_foreign = any(
                name != _LOST_AND_FOUND and not _TEMPORARY.fullmatch(name) for name in content
            )
            # Another process may have made the store, and written into it
            if is_foreign and not os.path.lexists(os.path.join(root, STORE_MARKER)):
                raise ConflictError(
                    f"{root}: neither empty nor a DIESEL-FS store; no store is made in it",
                    advice="name a folder that is empty or does not exist",
                )
            store_id = uuid.uuid4()
            with contextlib.suppress(ObjectExists):  # another process has made it
                cls(root, store_id)._write(STORE_MARKER, [contract.encode_marker(store_id)], _link)
            with contextlib.suppress(OSError):
                # On a full disk this folder could not be made when a dataset has to be deleted
                _make_folder_durably(os.path.join(root, DELETED.rstrip("/")))
        return cls.open(root)

    @property
    def fast_reads(self) -> FastReads:
        return FolderReads(self)

    @property
    def housekeeping(self) -> Housekeeping:
        return FolderHousekeeping(self)

    # Writing

    def put(self, name: str, parts: Sequence[Bytes]) -> None:
        contract.check_name(name)
        self._write(name, parts, _link)

    def replace(self, name: str, parts: Sequence[Bytes]) -> None:
        contract.check_mutable(name)
        self._write(name, parts, os.rename)

    def _write(self, name: str, parts: Sequence[Bytes], publish: _Publish) -> None:
        try:
            self._write_once(name, parts, publish)
            return
        except FileExistsError as error:
            raise ObjectExists(f"{name}: exists already") from error
        except OSError as error:
            self._durable = {""}  # folders may have gone, or the store was unmounted
            self._direct = {}
            if error.errno not in _WRITE_AGAIN:
                raise _store_error(error, "write", name) from error
        try:
            self._write_once(name, parts, publish)
        except OSError as error:  # FileExistsError too: the first try may have made that file
            raise _store_error(error, "write, in a second try", name) from error

    def _write_once(self, name: str, parts: Sequence[Bytes], publish: _Publish) -> None:
        """Raises OSError after removing its temporary file, and the object if it created that."""
        folder = name.rpartition("/")[0]
        self._make_folder(folder)
        temporary = os.path.join(self.root, folder, object_temporary_name())
        final = os.path.join(self.root, name)
        try:
            _write_file(temporary, parts, direct=self._takes_direct(folder))
            publish(temporary, final)
        except BaseException:
            _unlink_quietly(temporary)
            raise
        try:
            fsync_folder(os.path.dirname(final))
        except OSError:
            # Visible, but not durable: its put will not be acknowledged
            if publish is _link:
                _unlink_quietly(final)
            raise

    def _takes_direct(self, folder: str) -> bool:
        if folder not in self._direct:
            self._direct[folder] = takes_direct(os.path.join(self.root, folder))
        return self._direct[folder]

    def _make_folder(self, folder: str) -> None:
        if folder in self._durable:
            return
        self._check_store_present()  # never fill an empty mount point
        upper = folder.rpartition("/")[0]
        if upper:
            self._make_folder(upper)
        _make_folder_durably(os.path.join(self.root, folder))
        self._durable.add(folder)

    def delete(self, name: str) -> None:
        contract.check_deletable(name)
        path = os.path.join(self.root, name)
        try:
            self._check_regular(name, os.lstat(path))
            os.unlink(path)
        except OSError as error:
            if error.errno not in _MISSING:
                raise _store_error(error, "delete", name) from error
            self._check_store_present()
        try:
            # Also if it was absent: the process that unlinked it may have died before its fsync
            fsync_folder(os.path.dirname(path))
        except OSError as error:
            if error.errno not in _MISSING:
                raise _store_error(error, "delete", name) from error

    # Reading

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytearray:
        contract.check_range(name, start, length)
        with self._opened(name) as (fd, size):
            contract.check_end(name, start + (length or 0), size)
            content = bytearray(size - start if length is None else length)
            _read_full(fd, name, start, memoryview(content))
        return content

    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        contract.check_range(name, start, None)
        with self._opened(name) as (fd, size):
            view = memoryview(buffer).cast("B")
            contract.check_end(name, start + len(view), size)
            _read_full(fd, name, start, view)

    def stat(self, name: str) -> ObjectInfo:
        contract.check_name(name)
        try:
            found = os.lstat(os.path.join(self.root, name))
        except OSError as error:
            raise self._missing_or(error, "stat", name) from error
        self._check_regular(name, found)
        return ObjectInfo(name, found.st_size, found.st_mtime_ns)

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[tuple[int, int]]:
        """The file's descriptor and size. An OSError in the `with` becomes an error of the
        store."""
        try:
            fd = os.open(os.path.join(self.root, name), _READ_FLAGS)
        except OSError as error:
            raise self._missing_or(error, "open", name) from error
        try:
            try:
                found = os.fstat(fd)
                self._check_regular(name, found)
                yield fd, found.st_size
            finally:
                os.close(fd)
        except OSError as error:
            raise _store_error(error, "read", name) from error

    def _missing_or(self, error: OSError, doing: str, name: str) -> DieselError:
        if error.errno not in _MISSING:
            return _store_error(error, doing, name)
        self._check_store_present()
        return ObjectMissing(f"{name}: no such object in {self.root}")

    def _check_store_present(self) -> None:
        try:
            store_id = _read_marker(self.root)
        except OSError as error:
            if error.errno not in _MISSING:
                raise _store_error(error, "read", f"{self.root}/{STORE_MARKER}") from error
            raise ObjectStoreError(
                f"{self.root}: the store has gone (no {STORE_MARKER})",
                advice="check that it is still mounted",
            ) from error
        if store_id != self.store_id:
            raise ObjectStoreError(f"{self.root}: another store is in this place now")

    @staticmethod
    def _check_regular(name: str, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise ObjectStoreError(f"{name}: not a regular file, so not an object of DIESEL-FS")

    # Listing

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        contract.check_prefix(prefix)
        for name in self._names(prefix, after):
            try:
                yield self.stat(name)
            except ObjectMissing:
                continue

    def _names(self, prefix: str, after: str) -> Iterator[str]:
        return (name for name, sort in self._walk(prefix, after) if sort is _Sort.OBJECT)

    def _walk(
        self, prefix: str, after: str = "", folder: str | None = None
    ) -> Iterator[tuple[str, _Sort]]:
        """Names below `folder` (None: the folder of `prefix`) with `prefix` and after `after`, in
        byte order of whole names. Reads one folder at a time."""
        if folder is None:
            folder = prefix.rpartition("/")[0]
        for name in self._folder_content(folder):
            if not name.startswith(prefix):
                continue
            if name <= after and not (name[-1] == "/" and after.startswith(name)):
                continue
            if name[-1] == "/" and FOLDER_NAME.fullmatch(name, 0, len(name) - 1):
                yield from self._walk(prefix, after, name[:-1])
            elif OBJECT_NAME.fullmatch(name):
                yield name, _Sort.OBJECT
            elif _TEMPORARY.fullmatch(name, len(folder) + 1 if folder else 0):
                yield name, _Sort.LEFTOVER
            elif folder or not (_BESIDE_OBJECTS.fullmatch(name) or name == _LOST_AND_FOUND + "/"):
                yield name.removesuffix("//"), _Sort.FOREIGN

    def _folder_content(self, folder: str) -> Sequence[str]:
        """Sorted names from the root on. A folder's name ends with a slash. The name of anything
        else that is not a file (a link to a file, a socket) ends with "//", so that it never looks
        like an object."""
        above = f"{folder}/" if folder else ""
        try:
            with os.scandir(os.path.join(self.root, folder)) as entries:
                return sorted(above + entry.name + _ending(entry) for entry in entries)
        except OSError as error:
            if error.errno not in _MISSING:
                raise _store_error(error, "list", folder or self.root) from error
        self._check_store_present()
        return ()  # it was never made, or was removed since


class FolderReads(FastReads):
    _store: FolderStore

    def read(self, name: str, start: int, size: int) -> Bytes:
        """Returns `bytes`, which the caller need not copy. Its three system calls are nearly the
        whole cost of a small read. If one fails, `read_into` reads again and finds out why."""
        contract.check_range(name, start, size)
        with contextlib.suppress(OSError, MemoryError):
            fd = os.open(os.path.join(self._store.root, name), _READ_FLAGS)
            try:
                content = os.pread(fd, size, start)
            finally:
                os.close(fd)
            if len(content) == size > 0:
                return content
        return super().read(name, start, size)

    def read_ranges(
        self, name: str, ranges: Sequence[tuple[int, int]], room: memoryview
    ) -> Iterator[memoryview]:
        with self._store._opened(name) as (fd, length):
            for start, size in ranges:
                contract.check_range(name, start, size)
                contract.check_end(name, start + size, length)
                _read_full(fd, name, start, room[:size])
                yield room[:size].toreadonly()

    def read_nowait(self, name: str, start: int, buffer: memoryview) -> bool:
        contract.check_range(name, start, None)
        try:
            return read_nowait_at(os.path.join(self._store.root, name), _READ_FLAGS, start, buffer)
        except OSError:
            return False


class FolderHousekeeping(Housekeeping):
    _store: FolderStore

    def names(self, prefix: str, after: str = "") -> Iterator[str]:
        contract.check_prefix(prefix)
        return self._store._names(prefix, after)

    def leftovers(self, prefix: str = "") -> Iterator[Leftover]:
        contract.check_prefix(prefix)
        for name, sort in self._store._walk(prefix):
            match = _TEMPORARY.fullmatch(name.rpartition("/")[2])
            if sort is not _Sort.LEFTOVER or match is None:
                continue
            try:
                found = os.lstat(os.path.join(self._store.root, name))
            except OSError as error:
                if error.errno in _MISSING:
                    continue
                raise _store_error(error, "stat", name) from error
            host, pid = match["host"], int(match["pid"])
            yield Leftover(name, found.st_size, found.st_mtime_ns, host, pid)

    def foreign(self, prefix: str = "") -> Iterator[str]:
        contract.check_prefix(prefix)
        return (name for name, sort in self._store._walk(prefix) if sort is _Sort.FOREIGN)

    def discard(self, leftover: Leftover) -> None:
        folder, _, last = leftover.name.rpartition("/")
        if not _TEMPORARY.fullmatch(last) or (folder and not FOLDER_NAME.fullmatch(folder)):
            raise UsageError(f"{leftover.name!r} is not the name of a leftover")
        try:
            os.unlink(os.path.join(self._store.root, leftover.name))
        except OSError as error:
            if error.errno not in _MISSING:
                raise _store_error(error, "remove", leftover.name) from error


def _ending(entry: os.DirEntry[str]) -> str:
    if entry.is_file(follow_symlinks=False):
        return ""
    # A link to a folder counts as a folder: people move folders of chunks to a larger disk
    return "/" if entry.is_dir() else "//"


def _real_path(path: str | os.PathLike[str]) -> str:
    """The absolute path without links, so that the working directory may change."""
    text = os.fspath(path)
    if not text or "\0" in text:
        raise UsageError(f"{text!r} is not a path of a store")
    return os.path.realpath(text)


def _read_marker(root: str) -> uuid.UUID:
    fd = os.open(os.path.join(root, STORE_MARKER), _READ_FLAGS)
    try:
        return contract.parse_marker(os.read(fd, contract.MARKER_BYTES_MAX))
    finally:
        os.close(fd)


def _make_root(root: str) -> None:
    missing = []
    while not os.path.isdir(root):
        missing.append(root)
        root = os.path.dirname(root)
    for path in reversed(missing):
        _make_folder_durably(path)


def _make_folder_durably(path: str) -> None:
    """Make a folder, and sync its parent even if the folder exists: its maker may have died before
    its own sync."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    try:
        fsync_folder(os.path.dirname(path))
    except OSError:
        with contextlib.suppress(OSError):
            os.rmdir(path)  # so that the next try makes it again, and does not only sync it
        raise


def object_temporary_name() -> str:
    """`.tmp-<host>-<pid>-<random>` of the writing process."""
    host = re.sub(r"[^A-Za-z0-9._-]", "_", os.uname().nodename)[:64] or "_"
    return f".tmp-{host}-{os.getpid()}-{secrets.token_hex(8)}"


def _write_file(path: str, parts: Sequence[Bytes], *, direct: bool) -> None:
    """Write and sync a new file. Raises OSError, also for an error of close(2): NFS reports
    there."""
    fd = os.open(path, _CREATE_FLAGS, 0o644)
    try:
        left = write_direct(fd, parts) if direct else parts
        write_all(lambda views: os.writev(fd, views), byte_views(left))
        os.fsync(fd)
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)


def _link(temporary: str, final: str) -> None:
    try:
        os.link(temporary, final)
    except FileExistsError:
        # NFS repeats a request if its answer was lost: the name may be this file's
        if not os.path.samestat(os.lstat(final), os.lstat(temporary)):
            raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _rename_to_new(temporary, final)
        return
    _unlink_quietly(temporary)


def _rename_to_new(temporary: str, final: str) -> None:
    """renameat2(RENAME_NOREPLACE), for file systems without hard links (exFAT, some FUSE)."""
    at_cwd, rename_noreplace = -100, 1
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(temporary), os.fsencode(final)
    if libc.renameat2(at_cwd, names[0], at_cwd, names[1], rename_noreplace) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), final)


def _unlink_quietly(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _read_full(fd: int, name: str, start: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        got = os.preadv(fd, [view[done:]], start + done)
        if got == 0:
            contract.check_end(name, start + len(view), start + done)
        done += got


def _store_error(error: OSError, doing: str, what: str) -> DieselError:
    number = error.errno or 0
    code = errno.errorcode.get(number, str(number))
    message = f"{what}: cannot {doing}: {os.strerror(number)} ({code})"
    if number in _NO_SPACE:
        return NoSpaceError(message, advice="free some space, or raise the quota")
    if number == errno.EROFS:
        return PermissionDenied(message, advice="the file system is mounted read-only")
    if number in _NOT_ALLOWED:
        return PermissionDenied(message)
    return ObjectStoreError(message)
