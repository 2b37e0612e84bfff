"""Rebuilds a dataset in the SQLite metadata store, beside the state that readers see.

A shadow state has its rows in the same tables, under a number that no dataset has and that the
table `aside` lists. At the end its number becomes the dataset's, and `aside` gets the old number,
so that its rows are removed, in small transactions for other writers' sake.

A rebuild writes a heartbeat to `aside` every 20 s. Without one for 10 minutes it counts as dead,
and the next rebuild or deletion removes its rows; if it lives after all, it fails at its next
heartbeat. One thread runs each rebuild.
"""

import sqlite3
import time
from collections.abc import Callable
from dataclasses import replace
from uuid import UUID

from ....errors import BusyError, DieselError
from ....format.chunk_id import LOWEST
from ....format.entries import ChunkId
from ..rebuild import NO_LIVE_STATE, LiveState, ShadowState
from ..store import CommitBatch, DatasetHead, log, rebuilt_version
from .database_file import SqliteFile
from .datasets import DatasetRow, dataset_of, insert, new_number
from .fold import fold_chunks
from .schema import SHADOW_TABLE

_ROWS_AT_ONCE = 16_384  # some 0.1 s in one transaction
_HEARTBEAT_S = 20.0
_ABANDONED_S = 600.0
_ABANDONED_BEAT = 0.0  # for a heartbeat: these rows are to be removed
_CLEAN_S = 3.0  # after a failed rebuild: a later one removes the rest
_FOLDERS_AT_ONCE = 256
_CHUNKS_AT_ONCE = 64  # a chunk may have 65,536 holes

ClockNs = Callable[[], int]


class SqliteShadowState(ShadowState):
    def __init__(
        self, file: SqliteFile, clock_ns: ClockNs, name: str, identity: UUID, newer_than: int
    ) -> None:
        self._newer_than = newer_than
        self._file = file
        self._clock_ns = clock_ns
        self._number = 0
        self._head = DatasetHead(identity, name, 0, 0, 0, 0, 0, LOWEST)
        self._waiting: list[CommitBatch] = []  # for `flush`
        self._rows = 0
        self._heartbeat_s = 0.0  # the last; monotonic

    def begin(self) -> None:
        with self._file.writing() as db:
            dataset_of(db, self._head.name, self._head.identity)
            self._number = new_number(db)
            _write_heartbeat(db, self._number, self._clock_ns() / 1e9)
        self._heartbeat_s = time.monotonic()

    def live_state(self) -> LiveState:
        with self._file.reading() as db:
            found = dataset_of(db, self._head.name, self._head.identity)
            if found is None:
                return NO_LIVE_STATE
            chunks = db.execute("SELECT id FROM chunk WHERE dataset = ?", (found.number,))
            return LiveState(_revision(found), frozenset(ChunkId(id_) for (id_,) in chunks))

    def add(self, batch: CommitBatch) -> None:
        self._waiting.append(batch)
        self._rows += len(batch.rows)
        if self._rows >= _ROWS_AT_ONCE or time.monotonic() > self._heartbeat_s + _HEARTBEAT_S:
            self.flush()

    def flush(self) -> None:
        with self._file.writing() as db:
            self._heartbeat(db)
            self._head = fold_chunks(db, self._number, self._head, self._waiting, version=0)
        self._waiting, self._rows = [], 0

    def _heartbeat(self, db: sqlite3.Connection) -> None:
        """Raises BusyError if this rebuild was removed."""
        beat = (self._clock_ns() / 1e9, self._number)
        update = "UPDATE aside SET beat = ? WHERE dataset = ? AND beat > 0"
        if not db.execute(update, beat).rowcount:
            raise BusyError(
                "another process took this rebuild for dead and removed it", advice="run it again"
            )
        self._heartbeat_s = time.monotonic()

    def become_live(self, expected: LiveState) -> int | None:
        with self._file.writing() as db:
            self._heartbeat(db)
            old = dataset_of(db, self._head.name, self._head.identity)
            if _revision(old) != expected.revision:
                return None
            before = old.head.version if old else 0
            version = rebuilt_version(before, self._newer_than, self._head.chunks, self._clock_ns())
            # A reader with any earlier version gets all entries as changes
            own = (version, self._number)
            db.execute("UPDATE chunk SET version = ? WHERE dataset = ?", own)
            if old:
                abandon_rows(db, old.number)
                move = "UPDATE hold SET dataset = ? WHERE dataset = ?"
                db.execute(move, (self._number, old.number))
            insert(db, replace(self._head, version=version), self._number)
            db.execute("DELETE FROM aside WHERE dataset = ?", (self._number,))
        return version

    def discard(self) -> None:
        self._waiting = []
        try:
            with self._file.writing() as db:
                db.execute(SHADOW_TABLE)
                # Changes no row if the number has become the dataset's
                db.execute(
                    "UPDATE aside SET beat = ? WHERE dataset = ?", (_ABANDONED_BEAT, self._number)
                )
            remove_abandoned(self._file, self._clock_ns, _CLEAN_S)
        except DieselError as error:
            log.info(
                "rows of a failed rebuild stay until the next rebuild or deletion: %s",
                error.message,
            )


def _revision(found: DatasetRow | None) -> tuple[bytes, ...]:
    return (b"%d %d" % (found.number, found.head.version),) if found else NO_LIVE_STATE.revision


def abandon_rows(db: sqlite3.Connection, number: int) -> None:
    """Remove a dataset's head; `remove_abandoned` then removes its rows in the other tables."""
    db.execute("DELETE FROM dataset WHERE number = ?", (number,))
    _write_heartbeat(db, number, _ABANDONED_BEAT)


def _write_heartbeat(db: sqlite3.Connection, number: int, beat: float) -> None:
    db.execute(SHADOW_TABLE)
    db.execute("INSERT OR REPLACE INTO aside (dataset, beat) VALUES (?, ?)", (number, beat))


def remove_abandoned(file: SqliteFile, clock_ns: ClockNs, seconds: float = float("inf")) -> None:
    """Remove rows of dropped datasets and dead rebuilds, for at most `seconds`."""
    end_s = time.monotonic() + seconds
    now_s = clock_ns() / 1e9
    with file.writing() as db:
        db.execute(SHADOW_TABLE)
        db.execute(
            "UPDATE aside SET beat = ? WHERE beat NOT BETWEEN ? AND ?",
            (_ABANDONED_BEAT, now_s - _ABANDONED_S, now_s + _ABANDONED_S),
        )
        select = "SELECT dataset FROM aside WHERE beat = ?"
        abandoned = db.execute(select, (_ABANDONED_BEAT,)).fetchall()
    for number in abandoned:
        while time.monotonic() < end_s:
            with file.writing() as db:
                if not _remove_some(db, *number):
                    db.execute("DELETE FROM aside WHERE dataset = ?", number)
                    break


def _remove_some(db: sqlite3.Connection, number: int) -> bool:
    select = "SELECT number FROM folder WHERE dataset = ? LIMIT ?"
    folders = db.execute(select, (number, _FOLDERS_AT_ONCE)).fetchall()
    left = _ROWS_AT_ONCE
    for folder in folders:
        if left <= 0:
            return True
        left -= db.execute("DELETE FROM run WHERE folder = ?", folder).rowcount
        left -= db.execute("DELETE FROM part WHERE folder = ?", folder).rowcount
        some = "SELECT name FROM entry WHERE folder = ? LIMIT ?"
        entries = db.execute(
            f"DELETE FROM entry WHERE folder = ? AND name IN ({some})",  # noqa: S608  # a constant
            (*folder, *folder, _ROWS_AT_ONCE),
        ).rowcount
        left -= entries
        if entries < _ROWS_AT_ONCE:
            db.execute("DELETE FROM folder WHERE number = ?", folder)
    if folders:
        return True
    select = "SELECT number FROM chunk WHERE dataset = ? LIMIT ?"
    chunks = db.execute(select, (number, _CHUNKS_AT_ONCE)).fetchall()
    for chunk in chunks:
        db.execute("DELETE FROM span WHERE chunk = ?", chunk)
        db.execute("DELETE FROM hole WHERE chunk = ?", chunk)
        db.execute("DELETE FROM chunk WHERE number = ?", chunk)
    return bool(chunks)
