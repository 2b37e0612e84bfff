"""Snapshots in files: this user's private mapped copies, and files that a user saved.

Only files in the user's own private folder are mapped into memory, since a process that maps a file
is killed if another process truncates it. Other snapshots are read, checked whole, and written to
the private folder once per node, user and version. Thread-safe; files are replaced by rename only.
"""

import logging
import mmap
import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from uuid import UUID

from ..errors import (
    ConfigError,
    DieselError,
    FormatError,
    NoSuchFile,
    PermissionDenied,
    UsageError,
)
from ..format.entries import Bytes
from ..format.snapshot.layout import MAGIC_BYTES, check_magic
from ..format.snapshot.reader import Snapshot
from ..settings import cache_folder, private_folder
from ..system.atomic_file import atomic_file, write_error

log = logging.getLogger("diesel.repository")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_COPY_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{16})\..+")

PRIVATE_KEPT = 2
"""Per dataset, node and user: the newest version, and the one before it, which may still have
readers."""


def save_snapshot(view: Snapshot, file: Path) -> None:
    """Atomic and durable. Raises PermissionDenied, NoSpaceError; UsageError for a folder."""
    try:
        with atomic_file(file) as handle:
            handle.write(view.buffer)
    except OSError as error:
        raise write_error(file, error) from error


def open_snapshot_file(file: Path) -> Snapshot:
    """Check a snapshot in a user's file as a whole, and return a private copy of it. Raises
    FormatError, NoSuchFile, PermissionDenied, UsageError."""
    try:
        with file.open("rb") as handle:
            if not stat.S_ISREG(os.fstat(handle.fileno()).st_mode):
                raise UsageError(f"{file} is not a regular file")
            check_magic(handle.read(MAGIC_BYTES))  # before reading gigabytes of something else
            handle.seek(0)
            data = memoryview(handle.read())
    except FileNotFoundError as error:
        raise NoSuchFile(f"there is no file {file}") from error
    except OSError as error:
        raise PermissionDenied(f"cannot read {file}: {error.strerror}") from error
    checked = Snapshot(data, verify=True)
    return write_private_copy(checked.identity, checked.version, [data]) or checked


def _map_private(path: Path) -> Snapshot:
    """Compares the checksums (`verify=False` leaves out only slower checks). Raises OSError,
    ValueError for an empty file, FormatError."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    return Snapshot(memoryview(mapped), verify=False)


@cache
def boot_id() -> str:
    """The ID of this run of the machine: unsynced data is lost when it ends."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


def _private_path(identity: UUID, version: int) -> Path:
    name = f"{identity.hex}-{version:016x}.{boot_id()}"
    return private_folder(cache_folder() / "snapshots") / name


def snapshot_descriptor(snapshot: Snapshot) -> int:
    """A new descriptor of a file with the snapshot. The caller passes it to another process on this
    machine, and closes it. Raises OSError."""
    try:
        path = _private_path(snapshot.identity, snapshot.version)
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, DieselError):  # there is no private folder, or it has newer versions
        descriptor = os.memfd_create("diesel-snapshot", os.MFD_CLOEXEC)
        with open(descriptor, "wb", closefd=False) as file:
            file.write(snapshot.buffer)
        return descriptor


def open_private_copy(identity: UUID, version: int) -> Snapshot | None:
    """This user's private copy of a version, mapped and compared with its checksums; None if there
    is no sound copy. A damaged copy is removed."""
    try:
        path = _private_path(identity, version)
        copy = _map_private(path)
    except FormatError as error:
        log.warning("a private copy is removed, and made again: %s", error.message)
        with suppress(OSError):
            path.unlink()
        return None
    except (OSError, ValueError, DieselError):
        return None
    return copy if (copy.identity, copy.version) == (identity, version) else None


def private_versions(identity: UUID) -> Sequence[int]:
    """The versions of which this user has a private copy, ascending."""
    try:
        folder = _private_path(identity, 0).parent
    except (DieselError, OSError):
        return ()
    names = (path.name.split(".")[0] for path in folder.glob(f"{identity.hex}-*.{boot_id()}"))
    return sorted(int(name.rpartition("-")[2], 16) for name in names)


def newest_private_copy(identity: UUID) -> int:
    """0 for none."""
    return max(private_versions(identity), default=0)


def write_private_copy(identity: UUID, version: int, parts: Sequence[Bytes]) -> Snapshot | None:
    """Write a checked snapshot to the private folder and map it; None if that is impossible. The
    copy is not synced, which would take as long as making it; so it is used only until the next
    boot."""
    try:
        path = _private_path(identity, version)
        with atomic_file(path, sync=False) as file:
            file.writelines(parts)
        copies = sorted(path.parent.glob(f"{identity.hex}-*"))
        for old in copies[:-PRIVATE_KEPT]:
            if old != path:  # the new copy may be of an older version than PRIVATE_KEPT others
                old.unlink(missing_ok=True)
        return _map_private(path)
    except (OSError, ValueError, PermissionDenied, ConfigError, FormatError):
        return None  # the folder cannot be used: the caller keeps the snapshot in memory


def list_copies(cache: Path) -> dict[tuple[UUID, int], Path]:
    """This user's private copies in another process's cache folder (`cache`, its XDG_CACHE_HOME),
    of all boots. Raises OSError."""
    found = {}
    with suppress(FileNotFoundError):
        for path in (cache / "diesel" / "snapshots").iterdir():
            if match := _COPY_NAME.fullmatch(path.name):
                found[UUID(hex=match[1]), int(match[2], 16)] = path
    return found


def open_listed_copy(path: Path) -> Snapshot:
    """Compares the checksums, since a crash may have damaged the copy. Raises FormatError,
    OSError."""
    try:
        return _map_private(path)
    except ValueError as error:
        raise FormatError(f"{path} is empty") from error
