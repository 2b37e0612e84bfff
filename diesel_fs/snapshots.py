"""Where snapshots are kept and made: the object store's, and this user's private mapped copies.

Only files in the user's own private folder are mapped: a foreign file can be truncated or changed
after the check, and a mapped file that is truncated kills the process. A snapshot from the object
store is read into memory, checked whole, and written there once per node, user and version.
Thread-safe; files are replaced by rename only.
"""

import errno
import logging
import mmap
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from uuid import UUID

import numpy as np

from .entries import RECORD, Rows
from .errors import (
    ConfigError,
    CorruptError,
    DieselError,
    FormatError,
    NoSpaceError,
    NotFoundError,
    ObjectExists,
    PermissionDenied,
    UsageError,
)
from .layout import snapshot_object, snapshot_prefix, version_of_object
from .settings import cache_folder, private_folder
from .snapshot import Snapshot
from .snapshot_layout import MAGIC_BYTES, check_magic
from .snapshot_merge import merge
from .storage.metadata import Marker, MetadataStore
from .storage.objects import ObjectStore

log = logging.getLogger("diesel.repository")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

KEPT = 2
"""Snapshots kept per dataset, in the store and privately: the newest, and one for its readers."""

Part = bytes | bytearray | memoryview

NO_ROWS = Rows([], np.zeros(0, np.uint32), [], np.zeros(0, RECORD), np.zeros(0, np.uint32), [])


class SnapshotShelf:
    """Snapshots of the datasets of one object store."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._damaged: set[str] = set()  # objects that were found so: as good as missing

    def newest(self, identity: UUID) -> int:
        """The greatest version of which the store has a snapshot; 0 for none."""
        return max(self._versions(identity), default=0)

    def load(self, identity: UUID, version: int) -> Snapshot:
        """The snapshot of a version that the store has. Raises FormatError, ObjectMissing."""
        own = _open_private(identity, version)
        if own is not None:
            return own
        checked = self.check(identity, version)
        return _keep_private(identity, version, [checked.buffer]) or checked

    def save(self, view: Snapshot, file: Path) -> None:
        """Write a snapshot to a file of the user's: whole or not at all, durable on return."""
        try:
            _write_whole(file, [view.buffer], sync=True)
        except OSError as error:
            raise _unwritable(file, error) from error

    def empty(self, identity: UUID, name: str) -> Snapshot:
        """The snapshot of a dataset without any entry, version 0."""
        parts = merge(None, NO_ROWS, [], identity=identity, dataset=name, version=0, digest=0)
        return Snapshot(memoryview(b"".join(parts)), verify=True)

    def at(self, meta: MetadataStore, marker: Marker, *, full: bool = False) -> Snapshot:
        """The snapshot of the metadata store's current version, made where there is none yet."""
        if marker.version == 0:
            return self.empty(marker.identity, marker.name)
        if not full:
            own = _open_private(marker.identity, marker.version)
            if own is not None:
                return own
            if marker.version in self._versions(marker.identity):
                try:
                    return self.load(marker.identity, marker.version)
                except FormatError as error:  # it is derived: it can be made again
                    self._damaged.add(snapshot_object(marker.identity, marker.version))
                    log.warning("a snapshot is damaged, and made again: %s", error.message)
        made, parts = self._export(meta, marker, full=full)
        return _keep_private(marker.identity, made, parts) or Snapshot(
            memoryview(b"".join(parts)), verify=False
        )

    def publish(self, meta: MetadataStore, marker: Marker, *, full: bool = False) -> int:
        """Put the snapshot of the current version into the store; its version comes back."""
        version, parts = self._export(meta, marker, full=full)
        name = snapshot_object(marker.identity, version)
        try:
            self._objects.put(name, parts)
        except ObjectExists:  # another writer's: a version has one content, unless it is damaged
            if not self._is_sound(marker.identity, version):
                self._objects.delete(name)
                self._objects.put(name, parts)
        self._damaged.discard(name)
        for old in sorted(self._versions(marker.identity))[:-KEPT]:
            self._objects.delete(snapshot_object(marker.identity, old))
        return version

    def _is_sound(self, identity: UUID, version: int) -> bool:
        try:
            self.check(identity, version)
        except FormatError:
            return False
        return True

    def check(self, identity: UUID, version: int) -> Snapshot:
        """The snapshot object of a version, in memory, checked whole. Raises FormatError."""
        data = memoryview(self._objects.get(snapshot_object(identity, version)))
        found = Snapshot(data, verify=True)
        if (found.identity, found.version) != (identity, version):
            raise CorruptError(f"{snapshot_object(identity, version)} holds another snapshot")
        return found

    def _export(
        self, meta: MetadataStore, marker: Marker, *, full: bool
    ) -> tuple[int, Sequence[Part]]:
        """The current version's snapshot: the previous one, and what changed since."""
        previous = None if full else self._previous(marker)
        changes = meta.changes(marker.identity, previous.version if previous else 0)
        if previous and not {c.id for c in changes.chunks}.issuperset(previous.chunk_ids):
            # The metadata store has forgotten chunks since: this is no continuation of `previous`
            previous = None
            changes = meta.changes(marker.identity, 0)
        now = changes.marker
        parts = merge(
            previous,
            changes.rows,
            changes.chunks,
            identity=now.identity,
            dataset=now.name,
            version=now.version,
            digest=now.digest,
        )
        return now.version, parts

    def _previous(self, marker: Marker) -> Snapshot | None:
        """The best snapshot to start from: none is as good as any that cannot be read."""
        for version in sorted(self._versions(marker.identity), reverse=True):
            if version <= marker.version:
                try:
                    return self.load(marker.identity, version)
                except DieselError:
                    continue
        return None

    def _versions(self, identity: UUID) -> Iterator[int]:
        for name in self._objects.names(snapshot_prefix(identity)):
            version = version_of_object(name)
            if version is not None and name not in self._damaged:
                yield version


def adopt(file: Path) -> Snapshot:
    """The snapshot in a file of somebody's, checked whole; then only our own copy is used.

    Raises FormatError, NotFoundError, PermissionDenied, UsageError.
    """
    try:
        with file.open("rb") as handle:
            if not stat.S_ISREG(os.fstat(handle.fileno()).st_mode):
                raise UsageError(f"{file} is not a regular file")
            check_magic(handle.read(MAGIC_BYTES))  # before gigabytes of something else are read
            handle.seek(0)
            data = memoryview(handle.read())
    except FileNotFoundError as error:
        raise NotFoundError(f"there is no file {file}") from error
    except OSError as error:
        raise PermissionDenied(f"cannot read {file}: {error.strerror}") from error
    checked = Snapshot(data, verify=True)
    return _keep_private(checked.identity, checked.version, [data]) or checked


def _write_whole(file: Path, parts: Sequence[Part], *, sync: bool) -> None:
    """Write a file under a temporary name and rename it; `sync`: durably. Raises OSError."""
    temporary = file.with_name(f".tmp-{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, 0o600), "wb") as handle:
            for part in parts:
                handle.write(part)
            handle.flush()
            if sync:
                os.fsync(handle.fileno())
        temporary.rename(file)
    finally:
        temporary.unlink(missing_ok=True)
    if not sync:
        return
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _unwritable(file: Path, error: OSError) -> DieselError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return (NoSpaceError if full else PermissionDenied)(f"cannot write {file}: {error.strerror}")


def map_private(path: Path) -> Snapshot:
    """Map a snapshot file of this user's private folder. Raises OSError, FormatError."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    return Snapshot(memoryview(mapped), verify=False)


@cache
def _boot() -> str:
    """Since when this machine runs: what was not synced is gone after that."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


def _private_path(identity: UUID, version: int) -> Path:
    name = f"{identity.hex}-{version:016x}.{_boot()}"
    return private_folder(cache_folder() / "snapshots") / name


def private_file(identity: UUID, version: int) -> int:
    """A descriptor of this user's private copy. Raises OSError where there is none."""
    try:
        return os.open(_private_path(identity, version), os.O_RDONLY | os.O_CLOEXEC)
    except DieselError as error:
        raise FileNotFoundError(error.message) from error


def _open_private(identity: UUID, version: int) -> Snapshot | None:
    try:
        found = map_private(_private_path(identity, version))
    except (OSError, ValueError, DieselError):
        return None
    return found if (found.identity, found.version) == (identity, version) else None


def _keep_private(identity: UUID, version: int, parts: Sequence[Part]) -> Snapshot | None:
    """Write a checked snapshot to the private folder and map it; None where that is impossible.

    It is not checked again when it is opened, and not synced either: that takes as long as making
    it. So it counts only until the machine boots again.
    """
    try:
        path = _private_path(identity, version)
        _write_whole(path, parts, sync=False)
        for old in sorted(path.parent.glob(f"{identity.hex}-*"))[:-KEPT]:
            old.unlink(missing_ok=True)
        return map_private(path)
    except (OSError, PermissionDenied, ConfigError):
        return None  # no place of our own: the caller keeps it in memory
