"""The metadata store of a repository in a folder: one SQLite file beside the chunks.

Each method is one transaction, so readers see one state. One writer at a time writes to a
repository, whatever the dataset. Readers do not wait for writers, except over a network file system
(`database_file.py`).
"""

# Statements consist of constants; values are parameters.
# ruff: noqa: S608

import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Self, TypeVar
from uuid import UUID

import numpy as np
import numpy.typing as npt

from ....errors import NoSuchDataset, NotFoundError
from ....format.chunk_id import LOWEST, chunk_id_text, stamp
from ....format.entries import RECORD, ChunkId, Kind, Rows, Stamp, split
from ..rebuild import RebuildingStore, ShadowState
from ..store import (
    COMMIT_LOCK_S_MAX,
    DIGEST_MODULUS,
    ChunkRecord,
    CommitBatch,
    CommitLock,
    DatasetHead,
    MetadataChanges,
    StampedRows,
    check_lock_time,
    chunks_digest,
    commits_locked_error,
    next_version,
)
from .database_file import DEADLINE_S, SqliteFile
from .datasets import all_datasets, dataset_by_identity, dataset_by_name, dataset_of, insert, write
from .fold import fold_chunks
from .rows import (
    COLUMNS,
    FolderNumbers,
    Row,
    RowCollector,
    all_chunks,
    empty_chunks,
    everything,
    forget_chunk,
    implied,
    kind_of,
    named_chunks,
    newer,
)
from .runs import find, runs_in
from .shadow_state import SqliteShadowState, abandon_rows, remove_abandoned

_LOCK_POLL_S = 0.02

T = TypeVar("T")


class SqliteMetadata(RebuildingStore):
    def __init__(self, file: SqliteFile, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._file = file
        self._clock_ns = clock_ns

    @classmethod
    def open(
        cls,
        path: Path,
        create: bool = False,
        readonly: bool = False,
        *,
        deadline_s: float = DEADLINE_S,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> Self:
        """`create` makes a missing store. A `readonly` store refuses changes and takes no lease.
        Raises MetadataBehind if there is no store, PermissionDenied if the file or its folder is
        not writable (a reader can use a snapshot then), ForeignError, NewerVersionError,
        CorruptError."""
        file = SqliteFile(
            path,
            create=create and not readonly,
            readonly=readonly,
            deadline_s=deadline_s,
            clock=lambda: clock_ns() / 1e9,
        )
        return cls(file, clock_ns)

    def close(self) -> None:
        self._file.close()

    def now_s(self) -> float:
        return self._file.now_s()

    # Datasets

    def heads(self) -> list[DatasetHead]:
        with self._file.reading() as db:
            return [found.head for found in all_datasets(db)]

    def head(self, name: str) -> DatasetHead:
        with self._file.reading() as db:
            return dataset_by_name(db, name).head

    def create(self, name: str, identity: UUID) -> DatasetHead:
        with self._file.writing() as db:
            found = dataset_of(db, name, identity)
            if found is None:
                insert(db, DatasetHead(identity, name, 0, 0, 0, 0, 0, LOWEST))
            return found.head if found else dataset_by_identity(db, identity).head

    def drop(self, identity: UUID) -> None:
        with self._file.writing() as db, suppress(NoSuchDataset):
            number = dataset_by_identity(db, identity).number
            abandon_rows(db, number)
            db.execute("DELETE FROM hold WHERE dataset = ?", (number,))
        self.clean()

    def shadow_state(self, name: str, identity: UUID, newer_than: int) -> ShadowState:
        return SqliteShadowState(self._file, self._clock_ns, name, identity, newer_than)

    def remove_abandoned(self) -> None:
        remove_abandoned(self._file, self._clock_ns)

    # Commits

    def commit(self, identity: UUID, *batches: CommitBatch) -> int:
        by_chunk = {batch.check().chunk.id: batch for batch in batches}
        return self._when_unlocked(identity, lambda: self._try_commit(identity, by_chunk))

    def _when_unlocked(self, identity: UUID, attempt: Callable[[], T | None]) -> T:
        """Repeat `attempt`, which returns None while commits are locked. Raises BusyError at the
        deadline."""
        deadline = time.monotonic() + self._file.deadline_s
        while (found := attempt()) is None:
            if time.monotonic() > deadline:
                raise commits_locked_error(identity)
            time.sleep(_LOCK_POLL_S)
        return found

    def _try_commit(self, identity: UUID, batches: Mapping[ChunkId, CommitBatch]) -> int | None:
        with self._file.writing() as db:
            number, head = dataset_by_identity(db, identity)
            new = [batches[chunk] for chunk in _missing(db, number, batches)]
            if not new:
                return head.version
            if self._is_locked(db, number):
                return None
            version = next_version(head.version, self._clock_ns())
            folded = fold_chunks(db, number, head, new, version)
            write(db, number, folded)
        return folded.version

    def missing(self, identity: UUID, chunks: Sequence[ChunkId]) -> list[ChunkId]:
        with self._file.reading() as db:
            return _missing(db, dataset_by_identity(db, identity).number, chunks)

    def forget(
        self, identity: UUID, chunks: Iterable[ChunkId], *, tombstones: bool = False
    ) -> frozenset[ChunkId]:
        wanted = sorted(set(chunks))
        self._when_unlocked(
            identity, lambda: self._try_forget(identity, wanted, tombstones=tombstones)
        )
        return frozenset(self.missing(identity, wanted))

    def _try_forget(
        self, identity: UUID, chunks: Sequence[ChunkId], *, tombstones: bool
    ) -> int | None:
        with self._file.writing() as db:
            number, head = dataset_by_identity(db, identity)
            others = (chunk for chunk in chunks if chunk != head.newest)
            empty = empty_chunks(db, number, others, tombstones=tombstones)
            if not empty:
                return 0
            if self._is_locked(db, number):
                return None
            for chunk in empty.values():
                forget_chunk(db, chunk)
            digest = head.digest - chunks_digest(empty)
            left = replace(
                head,
                version=next_version(head.version, self._clock_ns()),
                chunks=head.chunks - len(empty),
                digest=digest % DIGEST_MODULUS,
            )
            write(db, number, left)
        return len(empty)

    def sync(self) -> None:
        if not self._file.durable_commits:
            with self._file.writing(sync=True) as db:
                db.execute("UPDATE sync SET count = count + 1")

    def lock_commits(self, identity: UUID, seconds: float) -> CommitLock:
        check_lock_time(seconds)
        token, now_s = secrets.token_bytes(16), self._clock_s()
        with self._file.writing() as db:
            number, _ = dataset_by_identity(db, identity)
            expired = "DELETE FROM hold WHERE until < ? OR until > ?"
            db.execute(expired, (now_s, now_s + COMMIT_LOCK_S_MAX))
            db.execute("INSERT INTO hold VALUES (?, ?, ?)", (token, number, now_s + seconds))

        def release() -> None:
            with self._file.writing() as db:
                db.execute("DELETE FROM hold WHERE token = ?", (token,))

        return CommitLock(release)

    def _is_locked(self, db: sqlite3.Connection, number: int) -> bool:
        locks = "SELECT 1 FROM hold WHERE dataset = ? AND until BETWEEN ? AND ?"
        now_s = self._clock_s()
        return db.execute(locks, (number, now_s, now_s + COMMIT_LOCK_S_MAX)).fetchone() is not None

    def _clock_s(self) -> float:
        return self._clock_ns() / 1e9

    # Reading

    def lookup(
        self, identity: UUID, paths: Iterable[bytes], *, tombstones: bool = False
    ) -> StampedRows:
        select = f"SELECT {COLUMNS}, entry.stamp FROM entry WHERE folder = ? AND name = ?"
        found, stamps = RowCollector(), []
        with self._file.reading() as db:
            folders = FolderNumbers(db, dataset_by_identity(db, identity).number)
            for path in dict.fromkeys(paths):
                folder, name = split(path)
                number = folders.number(folder)
                row = db.execute(select, (number, name)).fetchone()
                if row is None:
                    row = _row_in_run(db, number, name)
                if row is not None and (tombstones or kind_of(row[2]) != Kind.TOMBSTONE):
                    found.add(folder, [row[:4]])
                    stamps.append(Stamp(row[4]))
            rows = found.rows(named_chunks(db, found.chunks))
        return StampedRows.of(rows, stamps)

    def children(self, identity: UUID, folder: bytes, *, tombstones: bool = False) -> Rows:
        select = f"SELECT {COLUMNS} FROM entry WHERE folder = ? AND name <> x''"
        found = RowCollector()
        with self._file.reading() as db:
            folders = FolderNumbers(db, dataset_by_identity(db, identity).number)
            number = folders.number(folder)
            if number is not None:
                rows: dict[bytes, Row] = {row[0]: row for row in db.execute(select, (number,))}
                for run in runs_in(db, number):
                    for i, name in enumerate(run.names):
                        rows[name] = (name, run.chunk, run.record(i), None)
                for name, child in folders.below(number):
                    own = kind_of(rows[name][2]) if name in rows else None
                    if own != Kind.FOLDER and folders.has_entries(child):
                        rows[name] = implied(name)
                shown = (r for r in rows.values() if tombstones or kind_of(r[2]) != Kind.TOMBSTONE)
                found.add(folder, sorted(shown, key=itemgetter(0)))
            return found.rows(named_chunks(db, found.chunks))

    def changes(self, identity: UUID, since: int) -> MetadataChanges:
        with self._file.reading() as db:
            number, head = dataset_by_identity(db, identity)
            table = all_chunks(db, number)
            found = newer(db, number, since) if since > 0 else everything(db, number)
        return MetadataChanges(head, found.rows(table), table.infos)

    def chunks(self, identity: UUID) -> list[ChunkRecord]:
        with self._file.reading() as db:
            number = dataset_by_identity(db, identity).number
            return [
                ChunkRecord(ChunkId(row[0]), *row[1:])
                for row in db.execute(
                    "SELECT id, object_bytes, uploaded_ns, entries,"
                    " (SELECT count(*) FROM hole WHERE hole.chunk = chunk.number)"
                    " FROM chunk WHERE dataset = ? ORDER BY id",
                    (number,),
                )
            ]

    def holes(self, identity: UUID, chunk: ChunkId) -> npt.NDArray[np.uint32]:
        with self._file.reading() as db:
            number = dataset_by_identity(db, identity).number
            select = "SELECT number FROM chunk WHERE dataset = ? AND id = ?"
            found = db.execute(select, (number, chunk)).fetchone()
            if found is None:
                raise NotFoundError(f"chunk {chunk_id_text(chunk)} has not been committed")
            places = db.execute("SELECT place FROM hole WHERE chunk = ? ORDER BY place", found)
            return np.fromiter((place for (place,) in places), np.uint32)


def _missing(db: sqlite3.Connection, dataset: int, chunks: Iterable[ChunkId]) -> list[ChunkId]:
    known = "SELECT 1 FROM chunk WHERE dataset = ? AND id = ?"
    return [id_ for id_ in chunks if db.execute(known, (dataset, id_)).fetchone() is None]


def _row_in_run(
    db: sqlite3.Connection, folder: int | None, name: bytes
) -> tuple[bytes, int, bytes, None, Stamp] | None:
    found = find(db, folder, name)
    if found is None:
        return None
    chunk, record = found
    ((id_, _),) = named_chunks(db, [chunk]).infos
    place = int(np.frombuffer(record, RECORD)["place"][0])
    return name, chunk, record, None, stamp(id_, place)
