"""The interface of a metadata store, and the values that go in and come out.

A metadata store answers which files a dataset has now, and where their bytes are. It knows each
dataset as a set of committed chunks, and keeps their fold (FORMAT.md, section 5): for each path the
entry that wins. An entry is one version of one path (a file, a link, a folder, or a tombstone: the
path was deleted). An entry is identified inside its chunk by its place, a number from 0. The stamp
of an entry is the chunk and the place at which it was first written; of two entries of one path the
greater stamp wins. A place whose entry has been replaced or deleted is a hole.

The store holds nothing that the chunks do not contain, so it can be deleted and rebuilt from them.
The repository decides which chunks may be committed.

Concurrency: every method may be called from many threads and processes at once. All methods are
synchronous, block no longer than the store's deadline, and work in a forked child.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self
from uuid import UUID

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_intdigest

from ...errors import BusyError, CorruptError, DieselError, MetadataError, NoSuchDataset, UsageError
from ...format.chunk_id import stamp
from ...format.entries import EXTENT, RECORD, ChunkId, ChunkInfo, Kind, Rows, Stamp

log = logging.getLogger("diesel.metadata")

COMMIT_LOCK_S_MAX = 60.0
"""The longest time for which a lock may be taken. A lock that seems to last longer is ignored: the
clock has gone back.
"""

DIGEST_MODULUS = 1 << 128

assert RECORD.fields is not None
KIND_AT = int(RECORD.fields["kind"][1])
"""The byte of a packed record that is its `Kind`."""


class StoreRestarted(MetadataError):
    """The server of the metadata store has been restarted since a client last confirmed its data.

    It may have come back with older data, and a new commit would hide the loss. The caller must
    first `repair` the dataset for the run `run_id`, then commit again.
    """

    def __init__(self, run: str) -> None:
        super().__init__(
            "the metadata store has been restarted, and may have lost something", advice="try again"
        )
        self.run_id = run


@dataclass(frozen=True, slots=True)
class DatasetHead:
    """A dataset's version, and its counts at that version."""

    identity: UUID
    name: str
    version: int  # 0: nothing has been committed yet
    files: int  # visible regular files: no links, folders, tombstones, incomplete versions
    bytes: int  # the sum of their sizes
    chunks: int
    digest: int  # `chunks_digest` of the IDs of all committed chunks
    newest: ChunkId  # the greatest ID of a committed chunk; 16 zero bytes if there is none


@dataclass(frozen=True, slots=True)
class CommitBatch:
    """The entries of one chunk, which are committed together.

    `rows.chunks` is this chunk alone. A large file is split into extents in several chunks; an
    entry that is one of several extents has `record.extents` > 1 and one `EXTENT` as its tail.
    `stamps` maps row numbers to stamps, for the rows whose stamp is not this chunk and
    `record.place`. `by_purge` is true for a chunk that purge wrote: it holds copies of entries.
    """

    chunk: ChunkInfo
    uploaded_ns: int
    rows: Rows
    stamps: Mapping[int, Stamp]
    by_purge: bool = False

    def stamp(self, i: int) -> Stamp:
        return self.stamps.get(i) or stamp(self.chunk.id, int(self.rows.records["place"][i]))

    @property
    def makes_room(self) -> bool:
        """Whether the batch only moves or deletes entries: copies by purge, or tombstones."""
        return self.by_purge or bool((self.rows.records["kind"] == Kind.TOMBSTONE).all())

    def check(self) -> Self:
        """Return the batch itself. Raises UsageError if its columns contradict each other."""
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


ReadCommitted = Callable[[Collection[ChunkId]], Iterable[CommitBatch]]
"""Given the IDs of chunks that were committed while a dataset was being rebuilt, returns their
batches.
"""


@dataclass(frozen=True, slots=True)
class StampedRows(Rows):
    """Rows, and the stamp of each row in the same order."""

    stamps: Sequence[Stamp] = ()

    @classmethod
    def of(cls, rows: Rows, stamps: Sequence[Stamp]) -> Self:
        return cls(
            rows.folders, rows.folder, rows.names, rows.records, rows.chunk, rows.chunks,
            rows.tails, stamps,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class MetadataChanges:
    """The entries of a dataset that are newer than some version, as of `head.version`."""

    head: DatasetHead
    rows: Rows
    chunks: Sequence[ChunkInfo]  # all chunks of the dataset, not only the new ones


class ChunkRecord(NamedTuple):
    """A committed chunk, as the store records it."""

    id: ChunkId
    object_bytes: int
    uploaded_ns: int
    entries: int
    holes: int  # number of its entries that have been replaced or deleted


class CommitLock:
    """Blocks all commits to a dataset until it is released or expires.

    A context manager, for one thread.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Allow commits again. Repeatable."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def implied_record() -> bytes:
    """The packed record of an implied folder: one that exists only because something lies in it."""
    record = np.zeros(1, RECORD)
    record["kind"], record["mode"] = Kind.FOLDER, 0o755
    return record.tobytes()


def chunk_digest(chunk: ChunkId) -> int:
    """The number that one chunk adds to a dataset's digest."""
    return xxh3_128_intdigest(chunk)


def chunks_digest(chunks: Iterable[ChunkId], start: int = 0) -> int:
    """The digest of a set of chunks, in any order, plus `start`, the digest of other chunks."""
    return (start + sum(map(chunk_digest, chunks))) % DIGEST_MODULUS


def next_version(previous: int, clock_ns: int) -> int:
    """The version after `previous`: microseconds since 1970, unless a clock has gone back."""
    return max(previous + 1, clock_ns // 1000)


def rebuilt_version(previous: int, newer_than: int, chunks: int, clock_ns: int) -> int:
    """The version of a rebuilt dataset of `chunks` chunks: greater than `previous` and
    `newer_than`.
    """
    before = max(previous, newer_than)
    return next_version(before, clock_ns) if chunks or before else 0


class MetadataStore(ABC):
    """The folds over the chunks of many datasets.

    A dataset has a name, which users see, and an identity, a UUID that never changes. Each method
    raises MetadataError if the store cannot be reached, and BusyError or DeadlineError if the
    deadline passes. A method that takes an identity raises NoSuchDataset if the store has no such
    dataset: it has been dropped, or the store has lost it.
    """

    @abstractmethod
    def now_s(self) -> float:
        """Seconds since 1970 by the store's own clock, which is the same for all its writers."""

    @abstractmethod
    def heads(self) -> list[DatasetHead]:
        """The heads of all datasets that this store knows, ordered by name."""

    @abstractmethod
    def head(self, name: str) -> DatasetHead:
        """The head of a dataset. Raises NoSuchDataset."""

    @abstractmethod
    def create(self, name: str, identity: UUID) -> DatasetHead:
        """Make an empty dataset. Idempotent. Raises ConflictError, and changes nothing, if the name
        or the identity belongs to another dataset.
        """

    @abstractmethod
    def drop(self, identity: UUID) -> None:
        """Remove a dataset with everything in it from the store. Atomic, idempotent."""

    @abstractmethod
    def commit(self, identity: UUID, *batches: CommitBatch) -> int:
        """Fold chunks into a dataset, and return its new version. Atomic: all chunks or none.

        If several entries have one path, the greatest stamp wins, and among equal stamps the entry
        in the chunk with the greatest ID. The loser's place becomes a hole of its chunk. A batch
        with `by_purge` only replaces entries of equal stamp, and never inserts one. A file of
        several extents replaces its path's entry once all its extents are committed. Places below
        the greatest that no row names are holes from the start: the chunk itself replaced them.

        So the state depends on which chunks have been committed, and not on their order. A chunk
        that is already known changes nothing; if all are known, the current version is returned.
        The version and the entries change at once for all readers. On return the commit survives a
        crash of this process; after `sync` it survives a power cut. Raises StoreRestarted if the
        store may have lost something (see `needs_repair`); NoSpaceError if it is full. A Redis that
        has reached its `maxmemory` still takes batches that make room (`makes_room`).
        """

    def needs_repair(self, identity: UUID) -> str:
        """The ID of the store's current run if that run may have lost acknowledged commits to the
        dataset; otherwise the empty string.

        A run begins when the store's server starts. It may have lost commits until `repair` has
        confirmed it. Until then `commit` raises StoreRestarted: the version of a new commit would
        be newer than any lost one, and nobody would notice the loss.
        """
        return ""

    def repair(self, identity: UUID, run_id: str, batches: Iterable[CommitBatch]) -> None:
        """Fold in the chunks that a run of the store may have lost, then confirm the run.

        `batches` are all acknowledged chunks that the store does not know. Raises StoreRestarted if
        `run_id` is no longer the current run.
        """
        for batch in batches:
            self.commit(identity, batch)

    @abstractmethod
    def missing(self, identity: UUID, chunks: Sequence[ChunkId]) -> list[ChunkId]:
        """The elements of `chunks` that the store does not know, in their order."""

    @abstractmethod
    def forget(
        self, identity: UUID, chunks: Iterable[ChunkId], *, tombstones: bool = False
    ) -> frozenset[ChunkId]:
        """Remove empty chunks: those in which every place is a hole. Idempotent.

        Returns the elements of `chunks` that the store does not know afterwards. Other chunks stay,
        as does the greatest of the dataset, since new IDs must be greater. With `tombstones`,
        places of tombstones count as holes, and the tombstones are removed with their chunk. The
        head's count and digest follow, and the version changes if anything was removed. Like a
        commit, this is atomic (many chunks go in several steps) and waits for locks
        (`lock_commits`).

        The state afterwards is the fold over the other chunks, provided that none of them holds an
        older entry of the path of a removed tombstone: the caller must know that. `changes` does
        not report removed tombstones. So a caller that applies changes to an earlier state must
        read everything again if one of its chunks is no longer known.
        """

    @abstractmethod
    def rebuild(
        self,
        name: str,
        identity: UUID,
        batches: Iterable[CommitBatch],
        read_committed: ReadCommitted | None = None,
        newer_than: int = 0,
    ) -> int:
        """Replace a dataset's state by the fold over `batches`, and return its new version.

        Commits go on meanwhile, however long the rebuild takes. Chunks that are committed after the
        first batch was requested are read by `read_committed`, in several calls if there are many,
        and are part of the new state. Commits wait during its last call, which therefore must be
        quick. `batches` must list the chunks when its first batch is requested, not earlier. A
        chunk that is forgotten during the rebuild may be known again afterwards.

        Atomic: readers see the old state until the new one is complete, and keep it if one of the
        iterables raises. The new version is greater than the old one and than `newer_than` (the
        greatest that the caller knows of), so that one version never names two states. It is 0 only
        for a dataset that never had a chunk. Raises ConflictError as `create` does, NoSuchDataset
        if the dataset is dropped meanwhile, BusyError if something is committed meanwhile and there
        is no `read_committed`.
        """

    @abstractmethod
    def lookup(
        self, identity: UUID, paths: Iterable[bytes], *, tombstones: bool = False
    ) -> StampedRows:
        """The entries at `paths`, each once and in that order; paths without an entry are left out.

        An implied folder (one that exists only because something lies in it) has no entry.
        """

    @abstractmethod
    def children(self, identity: UUID, folder: bytes, *, tombstones: bool = False) -> Rows:
        """The entries in a folder, ordered by name; empty if there is no such folder.

        Implied folders are included, with mode 0755, time 0 and a chunk ID of 16 zero bytes. A path
        that is a file and has entries below it is shown as a folder.
        """

    @abstractmethod
    def changes(self, identity: UUID, since: int) -> MetadataChanges:
        """The current head, and the entries that are newer than version `since`.

        Those are the entries of chunks that were committed after `since`, tombstones included.
        Since version 0 means all entries, without tombstones.
        """

    @abstractmethod
    def chunks(self, identity: UUID) -> list[ChunkRecord]:
        """All committed chunks, ordered by ID."""

    @abstractmethod
    def holes(self, identity: UUID, chunk: ChunkId) -> npt.NDArray[np.uint32]:
        """The places of a chunk whose entries have been replaced or deleted, ascending. Raises
        NotFoundError for a chunk that has not been committed.
        """

    @abstractmethod
    def sync(self) -> None:
        """Write all earlier commits to stable storage: they survive a power cut."""

    @abstractmethod
    def lock_commits(self, identity: UUID, seconds: float) -> CommitLock:
        """Block commits to a dataset, those of this process included, for some seconds.

        Commits wait meanwhile, and raise BusyError when their deadline passes. Several locks may
        exist at once. A reader takes one when commits keep changing the data that it reads.
        """

    @abstractmethod
    def close(self) -> None:
        """Close all connections. Repeatable; other calls raise MetadataError afterwards."""


class RenewingCommitLock:
    """A commit lock that is taken only once it is needed, and is renewed until the work is done.

    A context manager, for one thread: `lock` takes the lock, `renew` must be called again and again
    during the work, and leaving the context releases the lock.
    """

    def __init__(self, store: MetadataStore, identity: UUID) -> None:
        self._store = store
        self._identity = identity
        self._lock: CommitLock | None = None
        self._locked_s = 0.0

    def lock(self) -> None:
        """Take the lock, or take it anew if it is held already."""
        before, self._lock = self._lock, self._store.lock_commits(self._identity, COMMIT_LOCK_S_MAX)
        self._locked_s = time.monotonic()
        if before is not None:
            before.release()

    def renew(self) -> None:
        """Extend the lock, if there is one and a third of its time has passed."""
        if self._lock is not None and time.monotonic() > self._locked_s + COMMIT_LOCK_S_MAX / 3:
            self.lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            try:
                self._lock.release()
            except DieselError as error:  # the work is done, and the lock expires by itself
                log_unreleased(error)


# Errors that every metadata store raises in the same words


def log_unreleased(error: DieselError) -> None:
    log.info("commits wait until their lock expires, it could not be released: %s", error.message)


def check_lock_time(seconds: float) -> None:
    """Raises UsageError for a time that `lock_commits` does not accept."""
    if not 0 < seconds <= COMMIT_LOCK_S_MAX:
        raise UsageError(
            f"commits can be locked for at most {COMMIT_LOCK_S_MAX:g} s, not for {seconds:g} s"
        )


def commits_locked_error(identity: UUID) -> BusyError:
    """The error of a commit that has waited for a lock until its deadline."""
    return BusyError(
        f"commits to dataset {identity} are locked by an export or a rebuild", advice="try again"
    )


def no_such_dataset_error(dataset: str | UUID) -> NoSuchDataset:
    which = repr(dataset) if isinstance(dataset, str) else f"with identity {dataset}"
    return NoSuchDataset(f"the metadata store knows no dataset {which}")


def corrupt_store_error(what: str) -> CorruptError:
    """The error for unexpected content of the store, which `what` names."""
    return CorruptError(f"the metadata store has {what}", advice="run `dlcmd recover`")
