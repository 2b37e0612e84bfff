"""Where snapshots are kept and made: the object store's, and this user's private mapped copies.

Only files in the user's own private folder are mapped: a foreign file can be truncated or changed
after the check, and a mapped file that is truncated kills the process. A snapshot from the object
store is read into memory, checked whole, and written there once per node, user and version.
Thread-safe; files are replaced by rename only.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple
from uuid import UUID

import numpy as np

from ..errors import (
    CorruptError,
    DieselError,
    FormatError,
    ObjectExists,
    ObjectMissing,
)
from ..format.entries import RECORD, Bytes, ChunkId, Rows
from ..format.object_names import snapshot_object, snapshot_prefix, version_of_object
from ..format.snapshot.build import build_snapshot
from ..format.snapshot.entry_digest import EntryDigest
from ..format.snapshot.layout import (
    FRONT_BYTES,
    Header,
    content_mark,
    parse_front,
)
from ..format.snapshot.reader import Snapshot
from ..storage.metadata.store import DatasetHead, MetadataStore
from ..storage.objects.store import ObjectStore
from .private_copies import open_private_copy, write_private_copy

log = logging.getLogger("diesel.repository")

NO_TALLIES: Mapping[ChunkId, EntryDigest] = MappingProxyType({})

NO_ROWS = Rows([], np.zeros(0, np.uint32), [], np.zeros(0, RECORD), np.zeros(0, np.uint32), [])


class KeptVersion(NamedTuple):
    """A version that is kept: when it was published (ns since 1970), and what it holds."""

    version: int
    published_ns: int
    files: int
    bytes: int


def empty_snapshot(identity: UUID, name: str) -> Snapshot:
    """The snapshot of a dataset without any entry, version 0."""
    parts = build_snapshot(None, NO_ROWS, [], identity=identity, dataset=name, version=0, digest=0)
    return Snapshot(memoryview(b"".join(parts)), verify=True)


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
                header, _ = self.front(identity, version)
            except (FormatError, ObjectMissing) as error:
                log.warning("version %d is left out: %s", version, error.message)
                continue
            # A version is its time in microseconds
            found.append(KeptVersion(version, version * 1000, header.files, header.file_bytes))
        return found

    def front(self, identity: UUID, version: int) -> tuple[Header, bytes]:
        """The header and the mark of the content of a published version."""
        name = snapshot_object(identity, version)
        header, content = parse_front(self._objects.get(name, 0, FRONT_BYTES))
        if (header.identity, header.version) != (identity, version):
            raise CorruptError(f"{name} holds another snapshot")
        return header, content

    def load(self, identity: UUID, version: int) -> Snapshot:
        """The snapshot of a version that the store has. Raises FormatError, ObjectMissing."""
        own = open_private_copy(identity, version)
        if own is not None:
            return own
        checked = self.fetch_verified(identity, version)
        return write_private_copy(identity, version, [checked.buffer]) or checked

    def load_current(
        self, meta: MetadataStore, marker: DatasetHead, *, full: bool = False
    ) -> Snapshot:
        """The snapshot of the metadata store's current version, made where there is none yet."""
        if marker.version == 0:
            return empty_snapshot(marker.identity, marker.name)
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
        return version

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
    ) -> tuple[int, Sequence[Bytes]]:
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
