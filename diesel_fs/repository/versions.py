"""Published versions of datasets: snapshots as objects beside the chunks, and how they are made.

A snapshot is all metadata of a dataset at one version. A version is the time of its commit in
microseconds since 1970. A damaged snapshot counts as missing, and is made again from the metadata
store. If possible, a reader gets a private copy in a mapped file (`private_copies.py`).
Thread-safe.
"""

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol
from uuid import UUID

import numpy as np

from ..errors import CorruptError, DieselError, FormatError, ObjectExists, ObjectMissing
from ..format.entries import RECORD, Bytes, ChunkId, Rows
from ..format.object_names import snapshot_object, snapshot_prefix, version_of_object
from ..format.snapshot.build import build_snapshot
from ..format.snapshot.entry_digest import EntryDigest
from ..format.snapshot.layout import FRONT_BYTES, SnapshotHeader, content_mark, parse_front
from ..format.snapshot.reader import Snapshot
from ..storage.metadata.store import DatasetHead, MetadataStore
from ..storage.objects.store import ObjectStore
from .private_copies import open_private_copy, write_private_copy

log = logging.getLogger("diesel.repository")

_NO_DIGESTS: Mapping[ChunkId, EntryDigest] = MappingProxyType({})

_NO_ROWS = Rows([], np.zeros(0, np.uint32), [], np.zeros(0, RECORD), np.zeros(0, np.uint32), [])


class KeptVersion(NamedTuple):
    version: int
    published_ns: int
    files: int
    bytes: int


def empty_snapshot(identity: UUID, name: str) -> Snapshot:
    parts = build_snapshot(None, _NO_ROWS, [], identity=identity, dataset=name, version=0, digest=0)
    return Snapshot(memoryview(b"".join(parts)), verify=True)


class PublishedVersions(Protocol):
    def newest(self, identity: UUID) -> int:
        """0 for none."""

    def versions(self, identity: UUID) -> list[int]:
        """Ascending."""

    def kept(self, identity: UUID) -> list[KeptVersion]:
        """The versions that can be read, ascending, without damaged ones."""

    def load(self, identity: UUID, version: int) -> Snapshot:
        """Raises FormatError, ObjectMissing."""


class VersionStore(PublishedVersions):
    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._damaged: set[str] = set()  # names of damaged objects, which count as missing

    def newest(self, identity: UUID) -> int:
        return max(self.versions(identity), default=0)

    def versions(self, identity: UUID) -> list[int]:
        names = self._objects.housekeeping.names(snapshot_prefix(identity))
        numbers = [version_of_object(name) for name in names if name not in self._damaged]
        return sorted(number for number in numbers if number is not None)

    def published(self, identity: UUID) -> dict[int, int]:
        """The published versions, ascending, and the time at which each was published (us since
        1970): the later of the version's own time and its object's. The next put publishes a
        killed put's commits; until then readers use the version before."""
        published = {}
        for info in self._objects.list(snapshot_prefix(identity)):
            version = version_of_object(info.name)
            if version is not None and info.name not in self._damaged:
                published[version] = max(version, info.modified_ns // 1000)
        return dict(sorted(published.items()))

    def kept(self, identity: UUID) -> list[KeptVersion]:
        kept = []
        for version in self.versions(identity):
            try:
                header, _ = self.front(identity, version)
            except (FormatError, ObjectMissing) as error:
                log.warning("version %d is not listed: %s", version, error.message)
                continue
            # A version is its time in microseconds
            kept.append(KeptVersion(version, version * 1000, header.files, header.file_bytes))
        return kept

    def front(self, identity: UUID, version: int) -> tuple[SnapshotHeader, bytes]:
        """The header of a published version's snapshot, and its content mark: equal for two
        snapshots with equal content. Raises FormatError, ObjectMissing."""
        name = snapshot_object(identity, version)
        header, mark = parse_front(self._objects.get(name, 0, FRONT_BYTES))
        if (header.identity, header.version) != (identity, version):
            raise CorruptError(f"{name} holds another snapshot")
        return header, mark

    def load(self, identity: UUID, version: int) -> Snapshot:
        copy = open_private_copy(identity, version)
        if copy is not None:
            return copy
        checked = self.fetch_verified(identity, version)
        return write_private_copy(identity, version, [checked.buffer]) or checked

    def load_current(
        self, meta: MetadataStore, head: DatasetHead, *, full: bool = False
    ) -> Snapshot:
        """The snapshot of the metadata store's current version. If it is not published, it is made
        from the previous one and the changes since; with `full`, from the metadata store alone."""
        if head.version == 0:
            return empty_snapshot(head.identity, head.name)
        if not full:
            copy = open_private_copy(head.identity, head.version)
            if copy is not None:
                return copy
            if head.version in self.versions(head.identity):
                try:
                    return self.load(head.identity, head.version)
                except FormatError as error:  # it can be made again
                    self._damaged.add(snapshot_object(head.identity, head.version))
                    log.warning("a snapshot is damaged, and is made again: %s", error.message)
        version, parts = self._export(meta, head, full=full)
        copy = write_private_copy(head.identity, version, parts)
        return copy or Snapshot(memoryview(b"".join(parts)), verify=False)

    def publish(
        self,
        meta: MetadataStore,
        head: DatasetHead,
        *,
        full: bool = False,
        entry_digests: Mapping[ChunkId, EntryDigest] = _NO_DIGESTS,
    ) -> int:
        """Write the snapshot of the current version to the object store; returns the version.

        `entry_digests` has digests of the entries of chunks that this process committed. Raises
        CorruptError, and publishes nothing, if the metadata store has other entries of such a
        chunk, or if the version is published with another content.
        """
        version, parts = self._export(meta, head, full=full, entry_digests=entry_digests)
        name = snapshot_object(head.identity, version)
        try:
            self._objects.put(name, parts)
        except ObjectExists:
            try:
                published_mark = content_mark(self.fetch_verified(head.identity, version).buffer)
            except FormatError:  # a damaged one is replaced
                self._objects.delete(name)
                self._objects.put(name, parts)
                published_mark = content_mark(parts[0])
            if published_mark != content_mark(parts[0]):
                raise CorruptError(
                    f"version {version} of {head.name!r} is published with another content than"
                    " the metadata have",
                    advice=f"run `dlcmd recover {head.name}`, which makes another version",
                ) from None
        self._damaged.discard(name)
        return version

    def remove(self, identity: UUID, version: int) -> None:
        self._objects.delete(snapshot_object(identity, version))

    def load_without_copy(self, identity: UUID, version: int) -> Snapshot:
        return open_private_copy(identity, version) or self.fetch_verified(identity, version)

    def fetch_verified(self, identity: UUID, version: int) -> Snapshot:
        """Read a snapshot from the object store and check it whole. Raises FormatError,
        ObjectMissing."""
        name = snapshot_object(identity, version)
        snapshot = Snapshot(memoryview(self._objects.get(name)), verify=True)
        if (snapshot.identity, snapshot.version) != (identity, version):
            raise CorruptError(f"{name} holds another snapshot")
        return snapshot

    def _export(
        self,
        meta: MetadataStore,
        head: DatasetHead,
        *,
        full: bool,
        entry_digests: Mapping[ChunkId, EntryDigest] = _NO_DIGESTS,
    ) -> tuple[int, Sequence[Bytes]]:
        """The current version and its snapshot in parts; made as by `load_current`."""
        previous = None if full else self._previous(head)
        changes = meta.changes(head.identity, previous.version if previous else 0)
        if previous and not {c.id for c in changes.chunks}.issuperset(previous.chunk_ids):
            # A purge has made the metadata store forget chunks of `previous`: start from nothing
            previous = None
            changes = meta.changes(head.identity, 0)
        now, chunks, rows = changes.head, changes.chunks, [changes.rows]
        del changes  # lets the merge free the rows, which are large for millions of entries
        try:
            parts = build_snapshot(
                previous,
                rows.pop(),
                chunks,
                identity=now.identity,
                dataset=now.name,
                version=now.version,
                digest=now.digest,
                entry_digests=entry_digests,
            )
        except CorruptError as error:
            if previous is None:
                raise
            log.warning("the snapshot is made from the metadata store alone: %s", error.message)
            return self._export(meta, head, full=True, entry_digests=entry_digests)
        return now.version, parts

    def _previous(self, head: DatasetHead) -> Snapshot | None:
        """The newest readable snapshot that is not newer than `head`, or None."""
        for version in reversed(self.versions(head.identity)):
            if version <= head.version:
                try:
                    return self.load(head.identity, version)
                except DieselError:
                    continue
        return None
