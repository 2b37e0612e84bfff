"""Records of the archives that were put into a dataset, one for each archive and target folder.

With a record, a put skips an archive that was put before (DLCache, section III-C.1), if the dataset
still has the archive's content. If a record is lost, the archive is fetched again and its members
are compared one by one.
"""

import hashlib
import logging
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self
from uuid import UUID

import msgpack
import numpy as np

from ..errors import CorruptError, FormatError, ObjectMissing, UsageError
from ..format.entries import ChunkId, Kind
from ..format.object_names import archive_object, archive_prefix
from ..format.snapshot.reader import Snapshot
from ..net.messages import Fields, unpack
from ..storage.objects.store import ObjectStore
from .retention import extent_counts

log = logging.getLogger("diesel.provenance")

RECORD_BYTES_MAX = 4 << 20
OTHERS_BYTES_MAX = 1 << 20
"""An archive with more bytes of paths in `ArchiveRecord.others` gets no record."""

_ID_BYTES = 16
_READS = 16  # parallel reads of records


@dataclass(frozen=True, slots=True)
class ArchiveRecord:
    source: str
    """The archive's address, without the query, which may hold a secret."""
    source_id: bytes
    """The first 16 bytes of the SHA-256 of the whole address."""
    target: bytes
    """The folder of the dataset to which the archive was put."""
    tag: str
    """The ETag of the archive at its address. Equal tags mean only "unchanged at this address"."""
    size: int
    sha256: bytes
    """The SHA-256 of the whole archive; empty if not known."""
    seconds: float
    """The time to fetch, decompress and pack the archive: the cost of restoring it."""
    entries: int
    is_alone: bool
    """Whether the archive's chunks hold no other files."""
    chunks: tuple[ChunkId, ...]
    """The chunks that hold the archive's files."""
    files: tuple[int, ...]
    """The number of live files (extents, for files with several) in each of `chunks`."""
    others: tuple[bytes, ...]
    """The paths of the archive's links and folders in the dataset."""
    writer: str = ""
    """The user who put the archive, as a server recorded it; empty for an administrator, and
    without a server. A record cannot be checked without the archive, so a server lets a user copy
    only from archives with the empty value or with that user's own name here."""
    yields_to: tuple[bytes, ...] = ()
    """The `source_id` of each archive that came later in the same put and replaced a file or link
    of this one. This archive's content is complete only together with theirs."""

    @property
    def name(self) -> str:
        """The last part of the name of the record's object."""
        return hashlib.sha256(self.source_id + self.target).hexdigest()[:32]

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb(
            {
                "source": self.source,
                "source_id": self.source_id,
                "target": self.target,
                "tag": self.tag,
                "size": self.size,
                "sha256": self.sha256,
                "seconds": self.seconds,
                "entries": self.entries,
                "alone": self.is_alone,
                "chunks": b"".join(self.chunks),
                "files": np.array(self.files, "<u4").tobytes(),
                "others": b"\0".join(self.others),
                "writer": self.writer,
                "yields_to": b"".join(self.yields_to),
            }
        )
        return packed

    @classmethod
    def unpack(cls, packed: bytes | bytearray | memoryview) -> Self:
        """Raises CorruptError, UsageError."""
        if len(packed) > RECORD_BYTES_MAX:
            raise UsageError(f"a record of an archive has at most {RECORD_BYTES_MAX} bytes")
        sent = Fields(unpack(packed), "a record of an archive")
        ids, files = sent.octets("chunks"), sent.octets("files")
        if len(ids) % _ID_BYTES or len(ids) // _ID_BYTES * 4 != len(files):
            sent.bad("chunks", "it is an ID of 16 bytes and a count of 4 for each")
        others = sent.octets("others")
        later = sent.octets("yields_to") if "yields_to" in sent else b""
        if len(later) % _ID_BYTES:
            sent.bad("yields_to", "it is an ID of 16 bytes for each")
        record = cls(
            sent.text("source"),
            sent.octets("source_id", 16),
            sent.octets("target"),
            sent.text("tag"),
            sent.integer("size"),
            sent.octets("sha256", 0, 32),
            sent.number("seconds"),
            sent.integer("entries"),
            sent.flag("alone", default=False),
            tuple(map(ChunkId, _split(ids))),
            tuple(np.frombuffer(files, "<u4").tolist()),
            tuple(others.split(b"\0")) if others else (),
            sent.text("writer", ""),
            tuple(_split(later)),
        )
        sent.end()
        return record


def _split(ids: bytes) -> list[bytes]:
    return [ids[at : at + _ID_BYTES] for at in range(0, len(ids), _ID_BYTES)]


def source_id(address: str) -> bytes:
    """An ID of 16 bytes for an archive's whole address, which it does not reveal."""
    return hashlib.sha256(address.encode("utf-8", "surrogateescape")).digest()[:16]


class LiveFiles:
    """The contents that a version has, to compare records with. `unreadable` has the indices of the
    entries in lost chunks."""

    def __init__(self, view: Snapshot, unreadable: Collection[int] = ()) -> None:
        self._view = view
        self._counts = extent_counts(view)
        if unreadable:
            lost = [index for index in unreadable if view.stat(index).kind == Kind.FILE]
            np.subtract.at(self._counts, view.chunk_of(lost), 1)

    def counts(self, chunks: Iterable[ChunkId]) -> list[int]:
        """The number of readable files in each chunk; 0 for a chunk that the version lacks."""
        ids = self._view.chunk_ids
        found = []
        for chunk in chunks:
            number = _find(ids, chunk)
            found.append(0 if number < 0 else int(self._counts[number]))
        return found

    def others(self, record: ArchiveRecord) -> tuple[bytes, ...]:
        found = self._view.lookup_many(record.others).tolist() if record.others else []
        return tuple(
            path
            for path, index in zip(record.others, found, strict=True)
            if index >= 0 and self._view.stat(index).kind != Kind.FILE
        )

    def has_all(self, record: ArchiveRecord) -> bool:
        if self.counts(record.chunks) != list(record.files):
            return False
        return self.others(record) == record.others


def _find(ids: Sequence[ChunkId], chunk: ChunkId) -> int:
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if ids[middle] < chunk:
            low = middle + 1
        else:
            high = middle
    return low if low < len(ids) and ids[low] == chunk else -1


def write_record(objects: ObjectStore, identity: UUID, record: ArchiveRecord) -> None:
    """Replaces an older record of the same source and target. Durable on return."""
    objects.replace(archive_object(identity, record.name), [record.pack()])


def read_records(objects: ObjectStore, identity: UUID) -> list[ArchiveRecord]:
    """Damaged records are logged and left out. Raises ObjectStoreError."""

    def read(name: str) -> ArchiveRecord | None:
        try:
            return ArchiveRecord.unpack(bytes(objects.get(name)))
        except ObjectMissing:  # deleted since
            return None
        except (FormatError, CorruptError, UsageError) as error:
            log.warning("%s is left out: %s", name, error.message)
            return None

    names = list(objects.housekeeping.names(archive_prefix(identity)))
    with ThreadPoolExecutor(_READS, "records") as threads:
        return [record for record in threads.map(read, names) if record is not None]
