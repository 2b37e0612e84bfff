"""Reads entries, makes folders and removes chunks in the SQLite metadata store.

All objects here belong to one transaction and one thread.
"""

# Statements consist of constants; values are parameters.
# ruff: noqa: S608

import sqlite3
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ....format.chunk_id import LOWEST
from ....format.entries import RECORD, ROOT, ChunkId, ChunkInfo, Kind, Names, Rows, join
from ..store import KIND_AT, corrupt_store_error, implied_record
from .runs import EntryRun, runs_in, runs_since

COLUMNS = "entry.name, entry.chunk, entry.record, entry.tail"
IMPLIED_CHUNK = 0
"""Stands for a chunk in the rows of folders without an entry of their own."""

_IS_TOMBSTONE = f"substr(entry.record, {KIND_AT + 1}, 1) = x'{Kind.TOMBSTONE:02x}'"

Row = tuple[bytes, int, bytes, bytes | None]


def kind_of(record: bytes) -> int:
    return record[KIND_AT]


def implied(name: bytes) -> Row:
    return name, IMPLIED_CHUNK, implied_record(), None


class FolderNumbers:
    """The numbers of a dataset's folders in the table `folder`."""

    def __init__(self, db: sqlite3.Connection, dataset: int) -> None:
        self._db = db
        self._dataset = dataset
        # By the parent's number and the name: whole paths would take much more memory
        self._numbers: dict[tuple[int, bytes], int] = {}
        self._paths: dict[int, bytes] = {}
        self.empty: set[int] = set()
        """Folders that `make` made. Code that inserts an entry removes its folder here."""

    def number(self, path: bytes) -> int | None:
        """None if the folder never had an entry in or below it."""
        number = 0
        for name in _steps(path):
            child = self._child(number, name)
            if child is None:
                return None
            number = child
        return number

    def make(self, path: bytes) -> int:
        number = 0
        for name in _steps(path):
            child = self._child(number, name)
            if child is None:
                insert = "INSERT INTO folder (dataset, parent, name) VALUES (?, ?, ?)"
                child = self._db.execute(insert, (self._dataset, number, name)).lastrowid
                assert child is not None
                self._numbers[number, name] = child
                self.empty.add(child)
            number = child
        return number

    def path(self, number: int) -> bytes:
        select = "SELECT parent, name FROM folder WHERE number = ?"
        names, at = [], number
        while at not in self._paths:
            row = self._db.execute(select, (at,)).fetchone()
            if row is None or row[0] >= at:  # a parent has the smaller number
                raise corrupt_store_error("a folder without a parent")
            if row[0] == 0:
                self._paths[at] = ROOT
            else:
                names.append(row[1])
                at = row[0]
        if names:
            self._paths[number] = join(self._paths[at], b"/".join(reversed(names)))
        return self._paths[number]

    def all(self) -> list[tuple[bytes, int]]:
        """Sorted by path."""
        paths: dict[int, bytes] = {}
        rows = self._db.execute(
            "SELECT number, parent, name FROM folder WHERE dataset = ? ORDER BY number",
            (self._dataset,),
        )
        for number, parent, name in rows:
            above = paths.get(parent)
            if parent and above is None:
                raise corrupt_store_error("a folder without a parent")
            paths[number] = join(above, name) if above is not None else ROOT
        return sorted((path, number) for number, path in paths.items())

    def below(self, number: int) -> list[tuple[bytes, int]]:
        """The folders directly in a folder."""
        return self._db.execute(
            "SELECT name, number FROM folder WHERE dataset = ? AND parent = ?",
            (self._dataset, number),
        ).fetchall()

    def has_entries(self, number: int) -> bool:
        """Whether anything but tombstones lies in the folder, at any depth."""
        found = self._db.execute(
            "WITH RECURSIVE below (number) AS (VALUES (?) UNION ALL"
            " SELECT folder.number FROM below JOIN folder"
            " ON folder.dataset = ? AND folder.parent = below.number)"
            " SELECT 1 FROM below WHERE"
            " EXISTS (SELECT 1 FROM run WHERE run.folder = below.number) OR EXISTS"
            " (SELECT 1 FROM entry WHERE entry.folder = below.number"
            f" AND NOT {_IS_TOMBSTONE}) LIMIT 1",
            (number, self._dataset),
        )
        return found.fetchone() is not None

    def _child(self, parent: int, name: bytes) -> int | None:
        key = (parent, name)
        if key not in self._numbers:
            row = self._db.execute(
                "SELECT number FROM folder WHERE dataset = ? AND parent = ? AND name = ?",
                (self._dataset, parent, name),
            ).fetchone()
            if row is None:
                return None
            self._numbers[key] = row[0]
        return self._numbers[key]


class ChunkRows(NamedTuple):
    """Ascending by their numbers in the table `chunk`."""

    numbers: npt.NDArray[np.int64]
    infos: Sequence[ChunkInfo]


def all_chunks(db: sqlite3.Connection, dataset: int) -> ChunkRows:
    select = "SELECT number, id, object_bytes FROM chunk WHERE dataset = ? ORDER BY number"
    rows = db.execute(select, (dataset,)).fetchall()
    return ChunkRows(
        np.array([row[0] for row in rows], np.int64),
        [ChunkInfo(ChunkId(row[1]), row[2]) for row in rows],
    )


def named_chunks(db: sqlite3.Connection, numbers: Iterable[int]) -> ChunkRows:
    """One of the numbers may be `IMPLIED_CHUNK`."""
    select = "SELECT id, object_bytes FROM chunk WHERE number = ?"
    wanted, infos = sorted(set(numbers)), []
    for number in wanted:
        row = (LOWEST, 0) if number == IMPLIED_CHUNK else db.execute(select, (number,)).fetchone()
        if row is None:
            raise corrupt_store_error("an entry without a chunk")
        infos.append(ChunkInfo(ChunkId(row[0]), row[1]))
    return ChunkRows(np.array(wanted, np.int64), infos)


def empty_chunks(
    db: sqlite3.Connection, dataset: int, chunks: Iterable[ChunkId], *, tombstones: bool
) -> dict[ChunkId, int]:
    """The numbers of those of `chunks` that have only holes or, with `tombstones`, also
    tombstones."""
    unless_dead = f"AND NOT {_IS_TOMBSTONE}" if tombstones else ""
    select = "SELECT number FROM chunk WHERE dataset = ? AND id = ?"
    found: dict[ChunkId, int] = {}
    with_parts = {chunk for (chunk,) in db.execute("SELECT DISTINCT chunk FROM part")}
    for id_ in chunks:
        row = db.execute(select, (dataset, id_)).fetchone()
        if row is None or row[0] in with_parts:
            continue
        used = db.execute(
            "SELECT EXISTS (SELECT 1 FROM run WHERE chunk = ?1)"
            " OR EXISTS (SELECT 1 FROM span WHERE chunk = ?1)"
            f" OR EXISTS (SELECT 1 FROM entry WHERE chunk = ?1 {unless_dead})",
            row,
        ).fetchone()
        if not used[0]:
            found[id_] = row[0]
    return found


def forget_chunk(db: sqlite3.Connection, number: int) -> None:
    db.execute("DELETE FROM entry WHERE chunk = ?", (number,))
    db.execute("DELETE FROM hole WHERE chunk = ?", (number,))
    db.execute("DELETE FROM chunk WHERE number = ?", (number,))


class RowCollector:
    """Collects entries, folder by folder, for one `Rows`."""

    def __init__(self) -> None:
        self._folders: dict[bytes, int] = {}
        self._folder: list[int] = []  # position in `_folders`, once for consecutive rows
        self._counts: list[int] = []
        self._names: list[Names] = []
        self._chunk: list[int] = []  # number of a chunk, once for consecutive rows
        self._chunk_counts: list[int] = []
        self._records = bytearray()
        self._tails: dict[int, bytes] = {}  # as in `Rows`

    @property
    def chunks(self) -> set[int]:
        return set(self._chunk)

    def add(self, folder: bytes, rows: Sequence[Row]) -> None:
        if not rows:
            return
        names, chunks, records, tails = zip(*rows, strict=True)
        start = sum(self._counts) if any(tails) else 0
        self._add(folder, Names.of(names), b"".join(records))
        self._chunk += chunks
        self._chunk_counts += [1] * len(rows)
        self._tails |= {start + i: tail for i, tail in enumerate(tails) if tail is not None}

    def add_run(self, folder: bytes, run: EntryRun) -> None:
        self._add(folder, run.names, run.records)
        self._chunk.append(run.chunk)
        self._chunk_counts.append(len(run.names))

    def _add(self, folder: bytes, names: Names, records: bytes) -> None:
        if len(records) != len(names) * RECORD.itemsize:
            raise corrupt_store_error("records of a wrong length")
        self._folder.append(self._folders.setdefault(folder, len(self._folders)))
        self._counts.append(len(names))
        self._names.append(names)
        self._records += records

    def rows(self, table: ChunkRows) -> Rows:
        """Call this once; `table` must have all of `chunks`."""
        numbers = np.array(self._chunk, np.int64)
        chunk = np.searchsorted(table.numbers, numbers).astype(np.uint32)
        if len(numbers) and (
            chunk.max() >= len(table.numbers) or (table.numbers[chunk] != numbers).any()
        ):
            raise corrupt_store_error("an entry without a chunk")
        return Rows(
            folders=list(self._folders),
            folder=np.repeat(np.array(self._folder, np.uint32), self._counts),
            names=Names(b"\0".join(each.joined for each in self._names), sum(self._counts)),
            records=np.frombuffer(self._records, RECORD),
            chunk=np.repeat(chunk, self._chunk_counts),
            chunks=[info.id for info in table.infos],
            tails=self._tails,
        )


def everything(db: sqlite3.Connection, dataset: int) -> RowCollector:
    """All entries but tombstones, folder by folder."""
    found = RowCollector()
    select = f"SELECT {COLUMNS} FROM entry WHERE folder = ? AND NOT {_IS_TOMBSTONE}"
    for path, number in FolderNumbers(db, dataset).all():
        found.add(path, db.execute(select, (number,)).fetchall())
        for run in runs_in(db, number):
            found.add_run(path, run)
    return found


def newer(db: sqlite3.Connection, dataset: int, since: int) -> RowCollector:
    """Entries, tombstones too, of chunks committed after version `since`."""
    new_chunks = " WHERE chunk.dataset = :dataset AND chunk.version > :since"
    rows = db.execute(
        f"SELECT entry.folder, {COLUMNS}"
        f" FROM chunk CROSS JOIN entry ON entry.chunk = chunk.number {new_chunks}"
        # Files with their first extent in an older chunk
        f" UNION ALL SELECT DISTINCT entry.folder, {COLUMNS}"
        " FROM chunk CROSS JOIN span ON span.chunk = chunk.number"
        " CROSS JOIN entry ON entry.folder = span.folder AND entry.name = span.name"
        " CROSS JOIN chunk AS first ON first.number = entry.chunk"
        f" {new_chunks} AND first.version <= :since"
        " ORDER BY 1, 2",
        {"dataset": dataset, "since": since},
    )
    found, folders = RowCollector(), FolderNumbers(db, dataset)
    for folder, in_folder in groupby(rows, key=itemgetter(0)):
        found.add(folders.path(folder), [row[1:] for row in in_folder])
    for folder, run in runs_since(db, dataset, since):
        found.add_run(folders.path(folder), run)
    return found


def _steps(path: bytes) -> list[bytes]:
    return [ROOT, *path.split(b"/")] if path else [ROOT]
