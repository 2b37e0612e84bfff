"""Where snapshots are kept and made: the object store's, and this user's private mapped copies.

Only files in the user's own private folder are mapped: a foreign file can be truncated or changed
after the check, and a mapped file that is truncated kills the process. A snapshot from the object
store is read into memory, checked whole, and written there once per node, user and version.
Thread-safe; files are replaced by rename only.
"""

import logging
import mmap
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from uuid import UUID

import numpy as np

from ..errors import (
    ConfigError,
    CorruptError,
    DieselError,
    FormatError,
    NotFoundError,
    ObjectExists,
    ObjectMissing,
    PermissionDenied,
    UsageError,
)
from ..format.entries import RECORD, ChunkId, Rows
from ..format.object_names import snapshot_object, snapshot_prefix, version_of_object
from ..format.snapshot.build import build_snapshot
from ..format.snapshot.entry_digest import EntryDigest
from ..format.snapshot.layout import (
    FRONT_BYTES,
    MAGIC_BYTES,
    Header,
    check_magic,
    content_mark,
    parse_front,
)
from ..format.snapshot.reader import Snapshot
from ..settings import cache_folder, private_folder
from ..storage.metadata.store import DatasetHead, MetadataStore
from ..storage.objects.store import ObjectStore
from ..system.atomic_file import atomic_file, write_error
from .leases import EVERY_VERSION, RetentionPolicy, leased_versions, read_retention_policy

log = logging.getLogger("diesel.repository")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

PRIVATE_KEPT = 2
"""Copies kept per dataset, node and user: the newest, and one for its readers."""

GRACE_S = 86_400
"""For how long a version that is not current any more is kept for readers without a lease."""

_RECENT = 8
_PERIODS = 8
"""Of the versions that a grace period has seen, so many of the newest are kept, and of the others
the last of so many parts of it: a dataset may be put to every second."""

Part = bytes | bytearray | memoryview

NOTHING: Mapping[int, int] = MappingProxyType({})
NO_TALLIES: Mapping[ChunkId, EntryDigest] = MappingProxyType({})

NO_ROWS = Rows([], np.zeros(0, np.uint32), [], np.zeros(0, RECORD), np.zeros(0, np.uint32), [])


class KeptVersion(NamedTuple):
    """A version that is kept: when it was published (ns since 1970), and what it holds."""

    version: int
    published_ns: int
    files: int
    bytes: int


def current_within(published: Mapping[int, int], now_s: float, grace_s: float) -> set[int]:
    """Of versions (ascending, with the time in us when each was published), those that were the
    current one within the grace period, thinned."""
    versions = [*published]
    horizon = (now_s - grace_s) * 1e6
    period = max(int(grace_s * 1e6) // _PERIODS, 1)
    young = [version for version in versions if published[version] > horizon]
    last_of = {published[version] // period: version for version in young}
    before = [version for version in versions if published[version] <= horizon]
    return {*young[-_RECENT:], *last_of.values(), *before[-1:], *versions[-1:]}


class VersionStore:
    """Snapshots of the datasets of one object store."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._damaged: set[str] = set()  # objects that were found so: as good as missing

    def newest(self, identity: UUID) -> int:
        """The greatest version of which the store has a snapshot; 0 for none."""
        return max(self._versions(identity), default=0)

    def versions(self, identity: UUID) -> list[int]:
        """The published versions that are there, ascending."""
        return sorted(self._versions(identity))

    def published(self, identity: UUID) -> dict[int, int]:
        """The published versions that are there, ascending, and since when (us since 1970).

        That is a version's own time, or the store's where that is later: what a killed put has
        committed is published by the next, and only then do readers leave the one before.
        """
        found = {}
        for info in self._objects.list(snapshot_prefix(identity)):
            version = version_of_object(info.name)
            if version is not None and info.name not in self._damaged:
                found[version] = max(version, info.modified_ns // 1000)
        return dict(sorted(found.items()))

    def kept(self, identity: UUID) -> list[KeptVersion]:
        """The versions that can be read, ascending. One that is damaged is left out."""
        found = []
        for version in self.versions(identity):
            try:
                header, _ = self._front(identity, version)
            except (FormatError, ObjectMissing) as error:
                log.warning("version %d is left out: %s", version, error.message)
                continue
            # A version is its time in microseconds
            found.append(KeptVersion(version, version * 1000, header.files, header.file_bytes))
        return found

    def _front(self, identity: UUID, version: int) -> tuple[Header, bytes]:
        """The header and the mark of the content of a published version."""
        name = snapshot_object(identity, version)
        header, content = parse_front(self._objects.get(name, 0, FRONT_BYTES))
        if (header.identity, header.version) != (identity, version):
            raise CorruptError(f"{name} holds another snapshot")
        return header, content

    def last(self, identity: UUID, versions: Sequence[int], count: int) -> set[int]:
        """The last so many of versions (ascending); of equal ones next to each other the newest."""
        found, before, left = set[int](), b"", count
        for version in reversed(versions):
            if not left:
                break
            try:
                _, content = self._front(identity, version)
            except ObjectMissing:
                continue
            except FormatError:
                content = b""
            if content != before or not content:
                left -= 1
                found.add(version)
            before = content
        return found

    def load(self, identity: UUID, version: int) -> Snapshot:
        """The snapshot of a version that the store has. Raises FormatError, ObjectMissing."""
        own = open_private_copy(identity, version)
        if own is not None:
            return own
        checked = self.fetch_verified(identity, version)
        return write_private_copy(identity, version, [checked.buffer]) or checked

    def save(self, view: Snapshot, file: Path) -> None:
        """Write a snapshot to a file of the user's: whole or not at all, durable on return.

        Raises PermissionDenied, NoSpaceError; UsageError for a folder.
        """
        try:
            _write_whole(file, [view.buffer], sync=True)
        except OSError as error:
            raise write_error(file, error) from error

    def empty(self, identity: UUID, name: str) -> Snapshot:
        """The snapshot of a dataset without any entry, version 0."""
        parts = build_snapshot(
            None, NO_ROWS, [], identity=identity, dataset=name, version=0, digest=0
        )
        return Snapshot(memoryview(b"".join(parts)), verify=True)

    def load_current(
        self, meta: MetadataStore, marker: DatasetHead, *, full: bool = False
    ) -> Snapshot:
        """The snapshot of the metadata store's current version, made where there is none yet."""
        if marker.version == 0:
            return self.empty(marker.identity, marker.name)
        if not full:
            own = open_private_copy(marker.identity, marker.version)
            if own is not None:
                return own
            if marker.version in self._versions(marker.identity):
                try:
                    return self.load(marker.identity, marker.version)
                except FormatError as error:  # it is derived: it can be made again
                    self._damaged.add(snapshot_object(marker.identity, marker.version))
                    log.warning("a snapshot is damaged, and made again: %s", error.message)
        made, parts = self._export(meta, marker, full=full)
        return write_private_copy(marker.identity, made, parts) or Snapshot(
            memoryview(b"".join(parts)), verify=False
        )

    def publish(
        self,
        meta: MetadataStore,
        marker: DatasetHead,
        *,
        full: bool = False,
        tallies: Mapping[ChunkId, EntryDigest] = NO_TALLIES,
    ) -> int:
        """Put the snapshot of the current version into the store; its version comes back.

        `tallies` are of chunks that were committed. Raises CorruptError, and publishes nothing,
        where the metadata store says other things of a chunk, or that version has been published
        with another content.
        """
        version, parts = self._export(meta, marker, full=full, tallies=tallies)
        name = snapshot_object(marker.identity, version)
        try:
            self._objects.put(name, parts)
        except ObjectExists:  # another writer's, which is equal, or a damaged one
            there = self._content(marker.identity, version)
            if not there:
                self._objects.delete(name)
                self._objects.put(name, parts)
            elif there != content_mark(parts[0]):
                raise CorruptError(
                    f"version {version} of {marker.name!r} is published with another content than"
                    " the metadata have",
                    advice=f"run `dlcmd recover {marker.name}`, which makes another version",
                ) from None
        self._damaged.discard(name)
        self._remove_expired_versions(marker.identity)
        return version

    def retained_versions(
        self,
        identity: UUID,
        published: Mapping[int, int],
        policy: RetentionPolicy,
        grace_s: float,
        planned: Mapping[int, int] = NOTHING,
    ) -> set[int]:
        """The published versions that are kept, whoever reads them (FORMAT.md, section 6).

        `planned`: as if these, of the newest one's content, had been published by now.
        """
        versions = [*published]
        last = self.last(identity, versions, policy.keep)
        if planned:
            last.difference_update(versions[-1:])  # the last of them takes its place
        return last | current_within({**published, **planned}, time.time(), grace_s)

    def _remove_expired_versions(self, identity: UUID) -> None:
        """Remove versions that need not be kept, but not the one before the newest."""
        try:
            published = self.published(identity)
            if len(published) <= 2:
                return
            policy = read_retention_policy(self._objects, identity)
            stay = self.retained_versions(identity, published, policy, max(GRACE_S, policy.grace_s))
            going = [old for old in [*published][:-2] if old not in stay]
            leased = leased_versions(self._objects, identity, time.time()) if going else ()
        except DieselError as error:
            log.info("no version is removed: %s", error.message)
            return
        for old in going:
            if old not in leased and EVERY_VERSION not in leased:
                self.remove(identity, old)

    def remove(self, identity: UUID, version: int) -> None:
        """Remove a published version."""
        self._objects.delete(snapshot_object(identity, version))

    def load_without_copy(self, identity: UUID, version: int) -> Snapshot:
        """`load`, without a private copy being made."""
        return open_private_copy(identity, version) or self.fetch_verified(identity, version)

    def _content(self, identity: UUID, version: int) -> bytes:
        """What tells a published version's content; nothing where it is damaged."""
        try:
            return content_mark(self.fetch_verified(identity, version).buffer)
        except FormatError:
            return b""

    def fetch_verified(self, identity: UUID, version: int) -> Snapshot:
        """The snapshot object of a version, in memory, checked whole. Raises FormatError."""
        data = memoryview(self._objects.get(snapshot_object(identity, version)))
        found = Snapshot(data, verify=True)
        if (found.identity, found.version) != (identity, version):
            raise CorruptError(f"{snapshot_object(identity, version)} holds another snapshot")
        return found

    def _export(
        self,
        meta: MetadataStore,
        marker: DatasetHead,
        *,
        full: bool,
        tallies: Mapping[ChunkId, EntryDigest] = NO_TALLIES,
    ) -> tuple[int, Sequence[Part]]:
        """The current version's snapshot: the previous one, and what changed since."""
        previous = None if full else self._previous(marker)
        changes = meta.changes(marker.identity, previous.version if previous else 0)
        if previous and not {c.id for c in changes.chunks}.issuperset(previous.chunk_ids):
            # The metadata store has forgotten chunks since: this is no continuation of `previous`
            previous = None
            changes = meta.changes(marker.identity, 0)
        now, chunks, rows = changes.head, changes.chunks, [changes.rows]
        del changes  # so that the merge can let go of the rows: of millions they are much
        try:
            parts = build_snapshot(
                previous,
                rows.pop(),
                chunks,
                identity=now.identity,
                dataset=now.name,
                version=now.version,
                digest=now.digest,
                entry_digests=tallies,
            )
        except CorruptError as error:
            if previous is None:
                raise
            log.warning("the snapshot is made from the metadata store alone: %s", error.message)
            return self._export(meta, marker, full=True, tallies=tallies)
        return now.version, parts

    def _previous(self, marker: DatasetHead) -> Snapshot | None:
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


def open_snapshot_file(file: Path) -> Snapshot:
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
    return write_private_copy(checked.identity, checked.version, [data]) or checked


def _write_whole(file: Path, parts: Sequence[Part], *, sync: bool) -> None:
    """Write a file whole or not at all; `sync`: durably. Raises OSError, UsageError."""
    with atomic_file(file, sync=sync) as handle:
        for part in parts:
            handle.write(part)


def map_private(path: Path) -> Snapshot:
    """Map a snapshot file of this user's private folder, and compare its checksums. Raises OSError,
    ValueError for an empty file, FormatError."""
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


def snapshot_descriptor(snapshot: Snapshot) -> int:
    """A descriptor of a file that holds the snapshot, for another process on this machine.
    Raises OSError."""
    try:
        return private_file(snapshot.identity, snapshot.version)
    except OSError:  # there is no private folder, or it has newer versions
        descriptor = os.memfd_create("diesel-snapshot", os.MFD_CLOEXEC)
        with open(descriptor, "wb", closefd=False) as file:
            file.write(snapshot.buffer)
        return descriptor


def open_private_copy(identity: UUID, version: int) -> Snapshot | None:
    """This user's private copy of a version, mapped; None where there is none.

    A process compares all checksums of a copy before it uses any of it. It removes one that does
    not match, and the caller loads the version again.
    """
    try:
        path = _private_path(identity, version)
        found = map_private(path)
    except FormatError as error:
        log.warning("a private copy is removed, and made again: %s", error.message)
        with suppress(OSError):
            path.unlink()
        return None
    except (OSError, ValueError, DieselError):
        return None
    return found if (found.identity, found.version) == (identity, version) else None


def newest_private_copy(identity: UUID) -> int:
    """The greatest version of which this user has a private copy; 0 for none."""
    try:
        folder = _private_path(identity, 0).parent
    except (DieselError, OSError):
        return 0
    names = (path.name.split(".")[0] for path in folder.glob(f"{identity.hex}-*.{_boot()}"))
    return max((int(name.rpartition("-")[2], 16) for name in names), default=0)


def write_private_copy(identity: UUID, version: int, parts: Sequence[Part]) -> Snapshot | None:
    """Write a checked snapshot to the private folder and map it; None where that is impossible.

    It is not synced, which would take as long as making it. So it counts only until the machine
    boots again.
    """
    try:
        path = _private_path(identity, version)
        _write_whole(path, parts, sync=False)
        copies = sorted(path.parent.glob(f"{identity.hex}-*"))
        for old in copies[:-PRIVATE_KEPT]:
            if old != path:  # it may be older than those: a kept version
                old.unlink(missing_ok=True)
        return map_private(path)
    except (OSError, ValueError, PermissionDenied, ConfigError, FormatError):
        return None  # no place of our own, or a bad one: the caller keeps it in memory
