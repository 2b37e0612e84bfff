"""The interface of a metadata store, and the values that go in and come out.

A metadata store keeps, for each dataset, the committed chunks and their fold (FORMAT.md, section
5): for each path the entry that wins. An entry is one version of one path: a file, a link, a
folder, or a tombstone (the path was deleted). Its place, a number from 0, identifies it inside its
chunk; once it has been replaced or deleted, the place is a hole. Its stamp is the chunk and the
place at which it was first written; the greatest stamp of a path wins.

Any thread, process and forked child. All methods block no longer than the store's deadline.
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
"""A commit lock that seems to last longer is ignored: the clock went back."""

DIGEST_MODULUS = 1 << 128

assert RECORD.fields is not None
KIND_AT = int(RECORD.fields["kind"][1])
"""The position of the byte `kind` in a packed record."""


class StoreRestarted(MetadataError):
    """The metadata store's server was restarted since a client last confirmed its data. It may have
    older data, and a new commit would hide the loss. The caller must `repair` the dataset for the
    run `run_id`, then commit again."""

    def __init__(self, run: str) -> None:
        super().__init__(
            "the metadata store has been restarted, and may have lost something", advice="try again"
        )
        self.run_id = run


@dataclass(frozen=True, slots=True)
class DatasetHead:
    identity: UUID
    name: str
    version: int  # 0: nothing has been committed yet
    files: int  # visible regular files: no links, folders, tombstones, incomplete versions
    bytes: int
    chunks: int
    digest: int  # `chunks_digest` of the IDs of all committed chunks
    newest: ChunkId  # the greatest of the committed chunks' IDs; 16 zero bytes if there is none


@dataclass(frozen=True, slots=True)
class CommitBatch:
    """The entries of one chunk, to be committed. `rows.chunks` is this chunk alone. A row of a
    file of several extents stands for one of them: `record.extents` is their number, the tail is
    one `EXTENT`. `stamps` has, by row number, the stamps other than (this chunk, `record.place`).
    `by_purge`: purge wrote the chunk, so its entries replace only entries of equal stamp."""

    chunk: ChunkInfo
    uploaded_ns: int
    rows: Rows
    stamps: Mapping[int, Stamp]
    by_purge: bool = False

    def stamp(self, i: int) -> Stamp:
        return self.stamps.get(i) or stamp(self.chunk.id, int(self.rows.records["place"][i]))

    @property
    def makes_room(self) -> bool:
        """Whether a full store must accept the batch, since it lets space be freed: all entries are
        copies by purge, or all are tombstones."""
        return self.by_purge or bool((self.rows.records["kind"] == Kind.TOMBSTONE).all())

    def check(self) -> Self:
        """Return the batch. Raises UsageError if its columns contradict each other."""
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
"""Reads the batches of chunks that were committed while a dataset was being rebuilt."""


@dataclass(frozen=True, slots=True)
class StampedRows(Rows):
    stamps: Sequence[Stamp] = ()

    @classmethod
    def of(cls, rows: Rows, stamps: Sequence[Stamp]) -> Self:
        return cls(
            rows.folders, rows.folder, rows.names, rows.records, rows.chunk, rows.chunks,
            rows.tails, stamps,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class MetadataChanges:
    """Entries newer than some version, as of `head.version`."""

    head: DatasetHead
    rows: Rows
    chunks: Sequence[ChunkInfo]  # all of the dataset's, also old ones


class ChunkRecord(NamedTuple):
    id: ChunkId
    object_bytes: int
    uploaded_ns: int
    entries: int
    holes: int  # places of entries that were replaced or deleted


class CommitLock:
    """Blocks a dataset's commits until it is released or expires. A context manager, for one
    thread."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Repeatable."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def implied_record() -> bytes:
    """The packed record of an implied folder."""
    record = np.zeros(1, RECORD)
    record["kind"], record["mode"] = Kind.FOLDER, 0o755
    return record.tobytes()


def chunk_digest(chunk: ChunkId) -> int:
    return xxh3_128_intdigest(chunk)


def chunks_digest(chunks: Iterable[ChunkId], start: int = 0) -> int:
    """The digest of chunks in any order, added to the digest `start` of other chunks."""
    return (start + sum(map(chunk_digest, chunks))) % DIGEST_MODULUS


def next_version(previous: int, clock_ns: int) -> int:
    """Microseconds since 1970, or `previous` + 1 if a clock has gone back."""
    return max(previous + 1, clock_ns // 1000)


def rebuilt_version(previous: int, newer_than: int, chunks: int, clock_ns: int) -> int:
    """Above `previous` and `newer_than`; 0 if the dataset never had a chunk."""
    before = max(previous, newer_than)
    return next_version(before, clock_ns) if chunks or before else 0


class MetadataStore(ABC):
    """The folds over the chunks of many datasets. A dataset has a name and an identity, a UUID that
    never changes. All methods raise MetadataError if the store cannot be reached, and BusyError or
    DeadlineError at the deadline; those that take an identity, NoSuchDataset if the dataset was
    dropped or lost."""

    @abstractmethod
    def now_s(self) -> float:
        """Seconds since 1970 by the store's own clock, one for all writers."""

    @abstractmethod
    def heads(self) -> list[DatasetHead]:
        """Ordered by name."""

    @abstractmethod
    def head(self, name: str) -> DatasetHead:
        """Raises NoSuchDataset."""

    @abstractmethod
    def create(self, name: str, identity: UUID) -> DatasetHead:
        """Make an empty dataset. Idempotent. Raises ConflictError if name or identity belongs to
        another dataset."""

    @abstractmethod
    def drop(self, identity: UUID) -> None:
        """Remove a dataset and all that the store knows of it. Atomic, idempotent."""

    @abstractmethod
    def commit(self, identity: UUID, *batches: CommitBatch) -> int:
        """Fold chunks into a dataset (FORMAT.md, section 5), and return its new version. Atomic:
        all chunks or none. Version and entries change at once for all readers.

        A place becomes a hole when its entry loses. A place that no row names, below the greatest
        that has a row, is a hole from the start: the chunk itself replaced its entry. Known chunks
        change nothing; if all are known, the current version is returned.

        On return the commit survives a crash of this process; after `sync`, a power cut. Raises
        StoreRestarted (see `needs_repair`), and NoSpaceError if the store is full. A Redis at its
        `maxmemory` still takes batches that make room (`makes_room`).
        """

    def needs_repair(self, identity: UUID) -> str:
        """The ID of the store's current run if it may have lost acknowledged commits, otherwise "".
        A run begins when the store's server starts, and `repair` confirms it. Until then `commit`
        raises StoreRestarted."""
        return ""

    def repair(self, identity: UUID, run_id: str, batches: Iterable[CommitBatch]) -> None:
        """Fold in `batches`, all acknowledged chunks that the store does not know, then confirm the
        run. Raises StoreRestarted if `run_id` is not the current run any more."""
        for batch in batches:
            self.commit(identity, batch)

    @abstractmethod
    def missing(self, identity: UUID, chunks: Sequence[ChunkId]) -> list[ChunkId]:
        """Chunks that the store does not know, in their order."""

    @abstractmethod
    def forget(
        self, identity: UUID, chunks: Iterable[ChunkId], *, tombstones: bool = False
    ) -> frozenset[ChunkId]:
        """Remove those of `chunks` that are empty: all their places are holes. With `tombstones`,
        places of tombstones count as holes, and the tombstones are removed with their chunk. The
        chunk with the dataset's greatest ID stays, since new IDs must be greater. Returns those of
        `chunks` that the store does not know afterwards.

        Idempotent. Atomic, except that many chunks are removed in several steps; waits for locks
        (`lock_commits`). The version changes if anything was removed.

        The caller must know that no other chunk holds an older entry of a removed tombstone's path:
        that entry would come back. `changes` does not report removed tombstones, so a caller that
        applies changes to an earlier state must read everything again if a chunk of that state is
        no longer known.
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
        """Replace a dataset's state by the fold over `batches`; returns the new version.

        Commits go on meanwhile. `batches` must list the chunks when its first batch is requested,
        not earlier; `read_committed` reads later chunks, in several calls if there are many.
        Commits wait during its last call, which therefore must be quick. A chunk that is forgotten
        meanwhile may be known again afterwards. Atomic: readers see the old state until the new one
        is complete, and keep it if an iterable raises.

        The new version is above the old one and `newer_than` (the greatest that the caller knows
        of), so that one version never names two states. It is 0 only for a dataset that never had a
        chunk. Raises ConflictError as `create`, NoSuchDataset if the dataset is dropped meanwhile,
        BusyError if something is committed meanwhile without `read_committed`.
        """

    @abstractmethod
    def lookup(
        self, identity: UUID, paths: Iterable[bytes], *, tombstones: bool = False
    ) -> StampedRows:
        """The entries at `paths`, each once and in that order. An implied folder (it exists only
        because something lies in it) has none."""

    @abstractmethod
    def children(self, identity: UUID, folder: bytes, *, tombstones: bool = False) -> Rows:
        """A folder's entries, by name; empty if there is no such folder. Implied folders are
        included, with mode 0755, time 0 and a chunk ID of 16 zero bytes. A file with entries below
        its path is shown as a folder."""

    @abstractmethod
    def changes(self, identity: UUID, since: int) -> MetadataChanges:
        """The head, and the entries of chunks committed after version `since`, with tombstones.
        Since version 0: all entries, without tombstones."""

    @abstractmethod
    def chunks(self, identity: UUID) -> list[ChunkRecord]:
        """Ordered by ID."""

    @abstractmethod
    def holes(self, identity: UUID, chunk: ChunkId) -> npt.NDArray[np.uint32]:
        """Places of a chunk that are holes, ascending. Raises NotFoundError for an unknown
        chunk."""

    @abstractmethod
    def sync(self) -> None:
        """Make all earlier commits survive a power cut."""

    @abstractmethod
    def lock_commits(self, identity: UUID, seconds: float) -> CommitLock:
        """Block all commits to a dataset for `seconds`, so that a reader can read one state. They
        wait, and raise BusyError at their deadline. Several locks may exist at once."""

    @abstractmethod
    def close(self) -> None:
        """Repeatable. Other calls raise MetadataError afterwards."""


class RenewingCommitLock:
    """A commit lock that is taken only when needed: call `lock`, then `renew` often during the
    work. A context manager, for one thread."""

    def __init__(self, store: MetadataStore, identity: UUID) -> None:
        self._store = store
        self._identity = identity
        self._lock: CommitLock | None = None
        self._locked_s = 0.0

    def lock(self) -> None:
        """Replaces a lock that is held already."""
        before, self._lock = self._lock, self._store.lock_commits(self._identity, COMMIT_LOCK_S_MAX)
        self._locked_s = time.monotonic()
        if before is not None:
            before.release()

    def renew(self) -> None:
        """Lock anew once a third of the lock's time has passed; nothing without a lock."""
        if self._lock is not None and time.monotonic() > self._locked_s + COMMIT_LOCK_S_MAX / 3:
            self.lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            try:
                self._lock.release()
            except DieselError as error:  # the work is done; the lock expires by itself
                log_unreleased(error)


# Errors in the same words from every metadata store


def log_unreleased(error: DieselError) -> None:
    log.info("commits wait until their lock expires, it could not be released: %s", error.message)


def check_lock_time(seconds: float) -> None:
    if not 0 < seconds <= COMMIT_LOCK_S_MAX:
        raise UsageError(
            f"commits can be locked for at most {COMMIT_LOCK_S_MAX:g} s, not for {seconds:g} s"
        )


def commits_locked_error(identity: UUID) -> BusyError:
    return BusyError(
        f"commits to dataset {identity} are locked by an export or a rebuild", advice="try again"
    )


def no_such_dataset_error(dataset: str | UUID) -> NoSuchDataset:
    which = repr(dataset) if isinstance(dataset, str) else f"with identity {dataset}"
    return NoSuchDataset(f"the metadata store knows no dataset {which}")


def corrupt_store_error(what: str) -> CorruptError:
    return CorruptError(f"the metadata store has {what}", advice="run `dlcmd recover`")
