"""The marker of a cache's folder, `.diesel-cache`: it names the folder as a cache, and is its lock.

It has 24 bytes: a magic text of 16, and the bytes used in the folder, as a little-endian number.
"""

import contextlib
import errno
import fcntl
import os
import re
import stat
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from ...errors import BusyError, ConflictError, NoSpaceError, PermissionDenied
from ...settings import private_folder
from ...storage.objects.folder import FolderStore
from ...storage.objects.store import ObjectStore, StoreWrapper
from .locks import FILE_FLAGS, try_lock

MARKER = ".diesel-cache"
MAGIC = b"DIESEL-FS cache\n"
HEAD = struct.Struct("<16sQ")
TAKES_NOTHING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Error numbers of a disk that can be read but not written."""

_LOCK_S = 5.0  # how long to wait for the lock
_LOCK_POLL_S = 0.01
# `lost+found` of a new disk, and a marker, which another process may be making
_FOREIGN_ALLOWED = re.compile(r"lost\+found|\.diesel-cache(-\d+-\d+)?")


def prepare_cache_folder(path: Path, objects: ObjectStore | None = None) -> Path:
    """Make `path` a cache's folder, which belongs to this user, so that nobody else may write in
    it. Returns its real path.

    Raises PermissionDenied; NoSpaceError if the disk takes no new cache; ConflictError if the
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
        check_marker(place)
    except (OSError, PermissionDenied) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError):
            raise
        kind = NoSpaceError if cause.errno in TAKES_NOTHING else PermissionDenied
        raise kind(f"{place}: cannot be used for a cache: {cause.strerror}") from error
    return place


def is_cache_folder(path: Path) -> bool:
    with contextlib.suppress(OSError):
        is_file = stat.S_ISREG((path / MARKER).stat().st_mode)  # reading a FIFO might never end
        return is_file and (path / MARKER).read_bytes()[: len(MAGIC)] == MAGIC
    return False


def foreign_in(path: Path) -> str:
    """The first name that keeps a folder from becoming a cache; "" if there is none, or if the
    folder is one. Raises OSError."""
    others = [name for name in sorted(os.listdir(path)) if not _FOREIGN_ALLOWED.fullmatch(name)]
    return "" if is_cache_folder(path) or not others else others[0]


def _check_apart(place: Path, store: Path) -> None:
    for inner, outer in ((place, store), (store, place)):
        for above in (inner, *inner.parents):
            with contextlib.suppress(OSError):  # a folder that is absent is not the other one
                if outer.samefile(above):
                    raise ConflictError(
                        f"the cache folder {place} and the store {store} lie in each other",
                        advice="name a folder apart from the store",
                    )


def check_marker(place: Path) -> None:
    """Make the marker in an empty folder; does nothing in a cache. Raises ConflictError if the
    folder is neither; OSError."""
    with contextlib.suppress(FileNotFoundError):
        is_file = stat.S_ISREG((place / MARKER).stat().st_mode)  # reading a FIFO might never end
        if is_file and (place / MARKER).read_bytes()[: len(MAGIC)] == MAGIC:
            return
        raise ConflictError(f"{place / MARKER} is not the marker of a cache")
    if foreign := foreign_in(place):
        raise ConflictError(
            f"{place} is neither empty nor a cache: it holds {foreign!r}",
            advice="name an empty folder",
        )
    with contextlib.suppress(FileExistsError):
        temporary = place / f"{MARKER}-{os.getpid()}-{threading.get_ident()}"
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | FILE_FLAGS, 0o600)
        try:
            os.write(file, HEAD.pack(MAGIC, 0))
            os.fsync(file)
            os.link(temporary, place / MARKER)
        finally:
            os.close(file)
            temporary.unlink()


@contextlib.contextmanager
def locked_for_listing(path: Path) -> Iterator[None]:
    """The lock of a program that changes nothing. Raises OSError, and BusyError if other processes
    keep the folder locked."""
    marker = os.open(path / MARKER, os.O_RDONLY | FILE_FLAGS)
    try:
        lock_marker(marker, path / MARKER)
        yield
    finally:
        os.close(marker)


def lock_marker(marker: int, path: Path | str) -> None:
    """Lock the open marker file; `path` is its name for errors. Raises BusyError after
    `_LOCK_S`."""
    until = time.monotonic() + _LOCK_S
    while not try_lock(marker, fcntl.LOCK_EX):
        if time.monotonic() > until:
            raise BusyError(f"{path} is locked")
        time.sleep(_LOCK_POLL_S)
