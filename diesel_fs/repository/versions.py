"""Published versions of datasets: snapshots as objects beside the chunks, and how they are made.

A snapshot is all metadata of a dataset at one version, in one object. A version is the time of its
commit in microseconds since 1970. Snapshots are derived: one that is damaged counts as missing, and
is made again from the metadata store. A reader gets a private mapped copy where it can have one
(`private_copies.py`). Thread-safe.
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
    """A version that can be read: when it was committed (ns since 1970), its files and their
    bytes."""

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
        self._damaged: set[str] = set()  # names of damaged objects, which count as missing

    def newest(self, identity: UUID) -> int:
        """The greatest version of which the store has a snapshot; 0 for none."""
        return max(self._versions(identity), default=0)

    def versions(self, identity: UUID) -> list[int]:
        """The published versions that are there, ascending."""
        return sorted(self._versions(identity))

    def published(self, identity: UUID) -> dict[int, int]:
        """The published versions, ascending, and when each was published (us since 1970).

        That is a version's own time, or the time of its object where that is later: what a killed
        put has committed is published by the next put, and until then readers use the version
        before.
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
                log.warning("version %d is not listed: %s", version, error.message)
                continue
            # A version is its time in microseconds
            found.append(KeptVersion(version, version * 1000, header.files, header.file_bytes))
        return found

    def front(self, identity: UUID, version: int) -> tuple[Header, bytes]:
        """The header of a published version, and the mark that equal contents share."""
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
        self, meta: MetadataStore, head: DatasetHead, *, full: bool = False
    ) -> Snapshot:
        """The snapshot of the metadata store's current version, made if it is not published. `full`
        makes it from the metadata store alone."""
        if head.version == 0:
            return empty_snapshot(head.identity, head.name)
        if not full:
            own = open_private_copy(head.identity, head.version)
            if own is not None:
                return own
            if head.version in self._versions(head.identity):
                try:
                    return self.load(head.identity, head.version)
                except FormatError as error:  # it can be made again
                    self._damaged.add(snapshot_object(head.identity, head.version))
                    log.warning("a snapshot is damaged, and is made again: %s", error.message)
        made, parts = self._export(meta, head, full=full)
        return write_private_copy(head.identity, made, parts) or Snapshot(
            memoryview(b"".join(parts)), verify=False
        )

    def publish(
        self,
        meta: MetadataStore,
        head: DatasetHead,
        *,
        full: bool = False,
        tallies: Mapping[ChunkId, EntryDigest] = NO_TALLIES,
    ) -> int:
        """Write the snapshot of the current version to the object store; returns the version.

        `tallies` are digests of the entries of chunks that were committed. Raises CorruptError, and
        publishes nothing, where the metadata store has other entries of such a chunk, or where the
        version has been published with another content.
        """
        version, parts = self._export(meta, head, full=full, tallies=tallies)
        name = snapshot_object(head.identity, version)
        try:
            self._objects.put(name, parts)
        except ObjectExists:  # by another writer, who published the same, or a damaged one
            there = self._content(head.identity, version)
            if not there:
                self._objects.delete(name)
                self._objects.put(name, parts)
            elif there != content_mark(parts[0]):
                raise CorruptError(
                    f"version {version} of {head.name!r} is published with another content than"
                    " the metadata have",
                    advice=f"run `dlcmd recover {head.name}`, which makes another version",
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
        """The mark of a published version's content; empty where it is damaged."""
        try:
            return content_mark(self.fetch_verified(identity, version).buffer)
        except FormatError:
            return b""

    def fetch_verified(self, identity: UUID, version: int) -> Snapshot:
        """The snapshot of a version, read from the object store and checked whole. Raises
        FormatError, ObjectMissing."""
        data = memoryview(self._objects.get(snapshot_object(identity, version)))
        found = Snapshot(data, verify=True)
        if (found.identity, found.version) != (identity, version):
            raise CorruptError(f"{snapshot_object(identity, version)} holds another snapshot")
        return found

    def _export(
        self,
        meta: MetadataStore,
        head: DatasetHead,
        *,
        full: bool,
        tallies: Mapping[ChunkId, EntryDigest] = NO_TALLIES,
    ) -> tuple[int, Sequence[Bytes]]:
        """The current version and its snapshot, made from the previous one and what changed
        since."""
        previous = None if full else self._previous(head)
        changes = meta.changes(head.identity, previous.version if previous else 0)
        if previous and not {c.id for c in changes.chunks}.issuperset(previous.chunk_ids):
            # A purge has made the metadata store forget chunks of `previous`: start from nothing
            previous = None
            changes = meta.changes(head.identity, 0)
        now, chunks, rows = changes.head, changes.chunks, [changes.rows]
        del changes  # lets the merge free the rows: of millions of entries they are large
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
            return self._export(meta, head, full=True, tallies=tallies)
        return now.version, parts

    def _previous(self, head: DatasetHead) -> Snapshot | None:
        """The newest snapshot that can be read and is not newer than `head`; None if there is
        none."""
        for version in sorted(self._versions(head.identity), reverse=True):
            if version <= head.version:
                try:
                    return self.load(head.identity, version)
                except DieselError:
                    continue
        return None

    def _versions(self, identity: UUID) -> Iterator[int]:
        for name in self._objects.names(snapshot_prefix(identity)):
            version = version_of_object(name)
            if version is not None and name not in self._damaged:
                yield version
