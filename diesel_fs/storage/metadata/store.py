"""Metadata stores: the interface, and the values that go in and come out.

A metadata store keeps the fold over the chunks of each dataset (FORMAT.md, section 5) so that it
can be asked, and nothing that the chunks do not say: it can be thrown away and made again. Owned
here: what every such store promises. Not owned: bytes of chunks and objects, which chunks may be
committed (the repository decides that), tables (`storage/metadata/sqlite/schema.py`) and keys
(`storage/metadata/redis/keys.py`).

Concurrency: every method may be called from many threads and processes at once; all are
synchronous, block no longer than the store's deadline, and work in a forked child.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self
from uuid import UUID

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_intdigest

from diesel_fs.errors import MetadataError, NoSuchDataset, NotFoundError, UsageError
from diesel_fs.format.chunk_id import stamp
from diesel_fs.format.entries import EXTENT, RECORD, ChunkId, ChunkInfo, Kind, Rows, Stamp

COMMIT_LOCK_S_MAX = 60.0
"""Longer holds are refused, and one that seems to last longer is void: a clock has gone back."""

DIGEST_MODULUS = 1 << 128

_FEW_CHUNKS = 64  # are asked for one by one, more by the whole table


class StoreRestarted(MetadataError):
    """The store is another run than the one that was vouched for: it may have come back older, and
    a commit would hide what it has lost. `repair` it for `run_id` first.
    """

    def __init__(self, run: str) -> None:
        super().__init__(
            "the metadata store has been restarted, and may have lost something", advice="try again"
        )
        self.run_id = run


@dataclass(frozen=True, slots=True)
class DatasetHead:
    """What a metadata store says of a dataset's state as a whole, at one version."""

    identity: UUID
    name: str
    version: int  # 0: nothing has been committed yet
    files: int  # that show: no links, folders, tombstones, incomplete versions
    bytes: int  # of their contents
    chunks: int
    digest: int  # `chunks_digest` of the IDs of all committed chunks
    newest: ChunkId  # the greatest of them; 16 zero bytes where there is none


@dataclass(frozen=True, slots=True)
class Batch:
    """One chunk's entries, to be committed together.

    `rows.chunks` is this chunk alone. An entry that is one of several extents of its file has
    `record.extents` > 1 and one `EXTENT` as its tail. `stamps` has, by row, those that are not the
    entry's own place (this chunk and `record.place`). `by_purge`: purge wrote this chunk.
    """

    chunk: ChunkInfo
    uploaded_ns: int
    rows: Rows
    stamps: Mapping[int, Stamp]
    by_purge: bool = False

    def stamp(self, i: int) -> Stamp:
        """The stamp of row i."""
        return self.stamps.get(i) or stamp(self.chunk.id, int(self.rows.records["place"][i]))

    def check(self) -> Self:
        """The batch itself. Raises UsageError where it contradicts itself."""
        rows = self.rows
        count = len(rows)
        columns = (rows.records, rows.folder, rows.chunk)
        if rows.records.dtype != RECORD or any(len(column) != count for column in columns):
            raise UsageError("a batch whose columns do not fit together")
        if count and (rows.chunks[0] != self.chunk.id or rows.chunk.any()):
            raise UsageError("a batch of more than one chunk")
        if not all(0 <= i < count for i in self.stamps):
            raise UsageError("a batch with the stamp of a row that it does not have")
        for i in np.flatnonzero(rows.records["extents"] > 1).tolist():
            self._check_extent(i)
        return self

    def _check_extent(self, i: int) -> None:
        record, tail = self.rows.records[i], self.rows.tails.get(i, b"")
        if record["kind"] != Kind.FILE or len(tail) != EXTENT.itemsize:
            raise UsageError(f"entry {i} of a batch is an extent, but has no extent")
        extent = np.frombuffer(tail, EXTENT)[0]
        if (
            extent["chunk"].tobytes() != self.chunk.id
            or extent["number"] >= record["extents"]
            or extent["place"] != record["place"]
        ):
            raise UsageError(f"entry {i} of a batch is an extent that contradicts its record")


ReadCommitted = Callable[[Collection[ChunkId]], Iterable[Batch]]
"""What chunks bring that were committed while the state was rebuilt."""


@dataclass(frozen=True, slots=True)
class StampedRows(Rows):
    """Rows with the stamp of each."""

    stamps: Sequence[Stamp] = ()

    @classmethod
    def of(cls, rows: Rows, stamps: Sequence[Stamp]) -> Self:
        """Rows, and the stamp of each."""
        return cls(
            rows.folders, rows.folder, rows.names, rows.records, rows.chunk, rows.chunks,
            rows.tails, stamps,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class MetadataChanges:
    """What has become of a dataset since some version, all of it true at `head.version`."""

    head: DatasetHead
    rows: Rows
    chunks: Sequence[ChunkInfo]  # all of the dataset, not only the new ones


class ChunkRecord(NamedTuple):
    """What is known of a committed chunk."""

    id: ChunkId
    object_bytes: int
    uploaded_ns: int
    entries: int
    holes: int  # of its entries, how many have been replaced or deleted


class CommitLock:
    """Holds a dataset's commits back until released, at the latest until its time is over."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Let commits go on. Repeatable."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


def chunk_digest(chunk: ChunkId) -> int:
    """What one chunk adds to a dataset's digest."""
    return xxh3_128_intdigest(chunk)


def chunks_digest(chunks: Iterable[ChunkId], start: int = 0) -> int:
    """The digest of a set of chunks, whatever their order; `start` is that of others before."""
    return (start + sum(map(chunk_digest, chunks))) % DIGEST_MODULUS


def next_version(previous: int, clock_ns: int) -> int:
    """The version after `previous`: microseconds since 1970, unless a clock has gone back."""
    return max(previous + 1, clock_ns // 1000)


def rebuilt_version(previous: int, newer_than: int, chunks: int, clock_ns: int) -> int:
    """The version of a rebuilt state of so many chunks, after `previous` and `newer_than`."""
    before = max(previous, newer_than)
    return next_version(before, clock_ns) if chunks or before else 0


class MetadataStore(ABC):
    """A fold over chunks, for each of many datasets.

    Each method raises MetadataError where the store cannot be reached, BusyError or DeadlineError
    where its deadline passes, and, if it is given an identity, NoSuchDataset where the store has no
    such dataset (it has been dropped, or the store has lost it).
    """

    @abstractmethod
    def now_s(self) -> float:
        """The time (seconds since 1970) by the clock of whoever keeps the store, which is the same
        for all its writers."""

    @abstractmethod
    def heads(self) -> list[DatasetHead]:
        """The markers of all datasets that this store knows, by name."""

    @abstractmethod
    def head(self, name: str) -> DatasetHead:
        """The marker of a dataset. Raises NoSuchDataset."""

    @abstractmethod
    def create(self, name: str, identity: UUID) -> DatasetHead:
        """Make an empty dataset. Idempotent. Raises ConflictError where the name or the identity
        belongs to another; then nothing has changed.
        """

    @abstractmethod
    def drop(self, identity: UUID) -> None:
        """Forget a dataset with everything in it. Atomic, idempotent."""

    @abstractmethod
    def commit(self, identity: UUID, *batches: Batch) -> int:
        """Fold chunks in; the new version comes back. Atomic: all of them whole, or nothing.

        Per path the greatest stamp wins, among equal ones the greatest ID of the holding chunk; the
        loser's place becomes a hole of its chunk. A batch that `by_purge` only replaces places of
        equal stamp, and never inserts one. A version of several extents waits aside until all are
        there; until then the version before stands, and is no hole. Places that no row names, below
        the greatest that one does, are holes from the start: the chunk itself replaced them.

        So the state depends on which chunks have been committed, not on their order. A chunk that
        is known already changes nothing; where that goes for all, the current version comes back.
        The version moves once, with everything else: nobody sees the one without the other. What
        has been committed survives a crash of this process on return, a power cut after `sync`.
        Raises Restarted where the store may have lost something (`needs_repair`).
        """

    def needs_repair(self, identity: UUID) -> str:
        """The run of the store, if it is another one than that which was last vouched for; nothing
        where there is no doubt that what has been acknowledged is there.

        A run that is doubted refuses commits with Restarted: their version would be newer than any
        that it has lost, and nobody would notice any more.
        """
        return ""

    def repair(self, identity: UUID, run_id: str, batches: Iterable[Batch]) -> None:
        """Fold in what a run of the store may have lost, and vouch for it.

        `batches` bring all that has been acknowledged and is not in the state as `run_id` has it.
        Raises Restarted where that is not the run any more.
        """
        for batch in batches:
            self.commit(identity, batch)

    def missing(self, identity: UUID, chunks: Sequence[ChunkId]) -> list[ChunkId]:
        """Those of the chunks that are not known."""
        if len(chunks) > _FEW_CHUNKS:
            there = {record.id for record in self.chunks(identity)}
            return [chunk for chunk in chunks if chunk not in there]
        found = []
        for chunk in chunks:
            try:
                self.holes(identity, chunk)
            except NoSuchDataset:
                raise
            except NotFoundError:
                found.append(chunk)
        return found

    @abstractmethod
    def forget(
        self, identity: UUID, chunks: Iterable[ChunkId], *, tombstones: bool = False
    ) -> frozenset[ChunkId]:
        """Forget chunks that nothing is in any more; those of `chunks` that are not known now come
        back. Idempotent.

        Those stay of which a place is no hole, and the greatest of the dataset, which new IDs must
        follow. With `tombstones` what a chunk says to be deleted does not keep it: it is dropped
        with it. Records and holes go, count and digest of the marker follow, the version moves
        if anything went. As atomic as a commit (where there are many, some of them at a time), and
        held back as one.

        The state after it is the fold over the other chunks, as long as none of those holds an
        older entry of a dropped tombstone's path: the caller knows that. A dropped tombstone is in
        no `changes`: who adds those to an earlier state must start anew where a chunk of that one
        is not known any more.
        """

    @abstractmethod
    def rebuild(
        self,
        name: str,
        identity: UUID,
        batches: Iterable[Batch],
        read_committed: ReadCommitted | None = None,
        newer_than: int = 0,
    ) -> int:
        """Replace all that is known of a dataset by the fold over `batches`; the new version.

        Commits go on meanwhile, however long it takes: what is committed after `batches` has been
        asked for its first comes `read_committed`, several times where it is much, and is in the
        new state, too. Commits wait while the last few of it come; nothing may take long then. So
        `batches` has to look for chunks when it is asked for its first, and not before. What is
        forgotten meanwhile may be back: who forgets looks again, as does who rebuilds.

        Atomic: others see the state before until the whole new one is there; an error of the
        iterables leaves the state before. The version is greater than that of the state before, and
        than `newer_than` (the greatest that anybody else knows of), also where nothing was folded:
        a version never has two contents. It is 0 only where nothing is, was or has ever been.
        Raises ConflictError as `create`, NoSuchDataset where the dataset is dropped meanwhile,
        BusyError where something was committed meanwhile and there is no `read_committed`.
        """

    @abstractmethod
    def lookup(
        self, identity: UUID, paths: Iterable[bytes], *, tombstones: bool = False
    ) -> StampedRows:
        """The entries at `paths`, each once, in that order; those that do not exist are left out.
        A folder that only its entries imply has none.
        """

    @abstractmethod
    def children(self, identity: UUID, folder: bytes, *, tombstones: bool = False) -> Rows:
        """What lies in a folder, by name; empty where there is no such folder.

        Implied folders are there too: mode 0755, time 0, chunk ID 16 zero bytes. Where a path is a
        file and has entries below it, the folder shows.
        """

    @abstractmethod
    def changes(self, identity: UUID, since: int) -> MetadataChanges:
        """One state of a dataset, and what is in it that was not at version `since`.

        `rows` are those of which a chunk has been committed after `since`, tombstones included;
        from 0 they are all there is, without tombstones.
        """

    @abstractmethod
    def chunks(self, identity: UUID) -> list[ChunkRecord]:
        """All committed chunks, in order of their IDs."""

    @abstractmethod
    def holes(self, identity: UUID, chunk: ChunkId) -> npt.NDArray[np.uint32]:
        """The places in a chunk that have been replaced or deleted, ascending. Raises NotFoundError
        for a chunk that has not been committed.
        """

    @abstractmethod
    def sync(self) -> None:
        """Everything that was committed before the call survives a power cut on return."""

    @abstractmethod
    def lock_commits(self, identity: UUID, seconds: float) -> CommitLock:
        """Hold all commits to a dataset back (this process's, too): they wait, and raise BusyError
        when their deadline passes. For an export that keeps losing the race. Several may hold.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of everything. Repeatable; other calls raise MetadataError afterwards."""
