"""Folds committed chunks into the tables of the SQLite metadata store (FORMAT.md, section 5).

A part is an extent of a file that is not complete; it waits in the table `part`. Everything happens
inside the caller's transaction, in one thread.
"""

# Statements consist of constants; values are parameters.
# ruff: noqa: S608

import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from ....format.entries import EXTENT, RECORD, ChunkId, Kind, Stamp
from ..store import CommitBatch, DatasetHead, chunks_digest, corrupt_store_error
from .rows import FolderNumbers
from .runs import insert_runs, segments, split_runs

_INTO = "INTO entry (folder, name, stamp, chunk, record, tail) VALUES (?, ?, ?, ?, ?, ?)"
_UNLESS_THERE = "ON CONFLICT (folder, name) DO NOTHING"
# Rows that one statement inserts: this saves a third of the time, with fewer than 999 parameters
_ROWS_AT_ONCE = 100
_PARAMETERS = range(2, 4 * _ROWS_AT_ONCE + 2, 4)
_INSERT_MANY = (
    "INSERT INTO entry (folder, name, stamp, chunk, record) VALUES "
    + ", ".join(f"(?{at}, ?{at + 1}, ?{at + 2}, ?1, ?{at + 3})" for at in _PARAMETERS)
    + f" {_UNLESS_THERE}"
)

_Key = tuple[int, bytes, bytes, bytes]
"""Folder, name, stamp and record of a row without a tail."""


class _Row(NamedTuple):
    folder: int
    name: bytes
    stamp: bytes
    chunk: int
    record: bytes
    tail: bytes | None

    @property
    def key(self) -> tuple[int, bytes, bytes]:
        return self.folder, self.name, self.stamp

    @property
    def place(self) -> int:
        return _place(self.record)

    @property
    def extents(self) -> int:
        """0 or 1 if the file is not split."""
        return int(np.frombuffer(self.record, RECORD)["extents"][0])


def fold_chunks(
    db: sqlite3.Connection,
    number: int,
    head: DatasetHead,
    batches: Sequence[CommitBatch],
    version: int,
) -> DatasetHead:
    """Fold in chunks that are not known yet. Returns the head at `version`."""
    folders = FolderNumbers(db, number)
    files, total = head.files, head.bytes
    for batch in batches:
        fold = ChunkFold(db, number, folders, batch, version)
        fold.run()
        files, total = files + fold.files, total + fold.bytes
    chunks = [batch.chunk.id for batch in batches]
    return replace(
        head,
        version=version,
        files=files,
        bytes=total,
        chunks=head.chunks + len(chunks),
        digest=chunks_digest(chunks, head.digest),
        newest=max(head.newest, *chunks) if chunks else head.newest,
    )


class ChunkFold:
    """`files` and `bytes` are changes of the head's counts. The transaction's chunks share
    `folders`."""

    def __init__(
        self,
        db: sqlite3.Connection,
        dataset: int,
        folders: FolderNumbers,
        batch: CommitBatch,
        version: int,
    ) -> None:
        self.files = 0
        self.bytes = 0
        self._db = db
        self._dataset = dataset
        self._folders = folders
        self._batch = batch
        self._numbers: dict[bytes, int] = {}
        self._ids: dict[int, ChunkId] = {}
        self._chunk = self._insert_chunk(version)

    def run(self) -> None:
        rows = self._batch.rows
        folder_numbers = [self._folders.make(folder) for folder in rows.folders]
        self._add_own_holes()
        single = self._insert_runs(folder_numbers)
        names_in: dict[int, list[bytes]] = {}
        plain: list[_Key] = []
        tailed: list[_Row] = []
        parts: list[_Row] = []
        for i in single:
            folder, name = folder_numbers[rows.folder[i]], rows.names[i]
            names_in.setdefault(folder, []).append(name)
            key = (folder, name, self._batch.stamp(i), rows.records[i].tobytes())
            if rows.records["extents"][i] > 1:
                parts.append(self._row(key, rows.tails[i]))
            elif i in rows.tails:
                tailed.append(self._row(key, rows.tails[i]))
            else:
                plain.append(key)
        for folder, names in names_in.items():
            self._folders.empty.discard(folder)
            split_runs(self._db, folder, names)
        self._add_whole(plain, tailed)
        for part in parts:
            self._add_part(part)

    def _insert_runs(self, folders: list[int]) -> list[int]:
        """Nearly all rows of a put become runs. Returns the numbers of the others."""
        rows = self._batch.rows
        single = np.ones(len(rows), bool)
        for segment in segments(self._batch, folders):
            is_empty = segment.folder in self._folders.empty
            if insert_runs(self._db, self._chunk, self._batch, segment, into_empty=is_empty):
                single[segment.rows] = False
                self._folders.empty.discard(segment.folder)
        sizes = rows.records["size"][~single]
        self.files += len(sizes)
        self.bytes += int(sizes.sum())
        return np.flatnonzero(single).tolist()

    def _row(self, key: _Key, tail: bytes | None = None) -> "_Row":
        folder, name, stamp, record = key
        return _Row(folder, name, stamp, self._chunk, record, tail)

    def _insert_chunk(self, version: int) -> int:
        chunk, places = self._batch.chunk, self._batch.rows.records["place"]
        entries = int(places.max()) + 1 if len(places) else 0
        uploaded_ns = self._batch.uploaded_ns
        cursor = self._db.execute(
            "INSERT INTO chunk (dataset, id, object_bytes, uploaded_ns, entries, version)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (self._dataset, chunk.id, chunk.object_bytes, uploaded_ns, entries, version),
        )
        assert cursor.lastrowid is not None
        self._numbers[chunk.id], self._ids[cursor.lastrowid] = cursor.lastrowid, chunk.id
        return cursor.lastrowid

    def _add_own_holes(self) -> None:
        """Add the places that no row names: the chunk itself replaced their entries, or these are
        invalid."""
        places = self._batch.rows.records["place"]
        if len(places) and int(places.max()) + 1 > len(places):
            for place in np.setdiff1d(np.arange(int(places.max()), dtype=np.uint32), places):
                self._add_hole(self._chunk, int(place))

    # Entries of one extent

    def _add_whole(self, plain: list[_Key], tailed: list[_Row]) -> None:
        if self._batch.by_purge:
            contested = [*map(self._row, plain), *tailed]
        else:
            contested = self._insert_new(plain, tailed)
            self._drop_older_parts(plain, tailed)
        for row in contested:
            old = self._entry(row.folder, row.name)
            allowed = old is not None and (row.stamp == old.stamp or not self._batch.by_purge)
            if old is not None and allowed and self._rank(row) > self._rank(old):
                self._replace(old, row)
            else:
                self._add_hole(row.chunk, row.place)

    def _insert_new(self, plain: list[_Key], tailed: list[_Row]) -> list[_Row]:
        """Insert rows with a new path, nearly always all. Returns the others."""
        before = self._db.total_changes
        singly_from = len(plain) - len(plain) % _ROWS_AT_ONCE
        for start in range(0, singly_from, _ROWS_AT_ONCE):
            values = chain.from_iterable(plain[start : start + _ROWS_AT_ONCE])
            self._db.execute(_INSERT_MANY, [self._chunk, *values])
        rest = [*map(self._row, plain[singly_from:]), *tailed]
        self._db.executemany(f"INSERT {_INTO} {_UNLESS_THERE}", rest)
        not_inserted = list[_Row]()
        records = [key[3] for key in plain] + [row.record for row in tailed]
        if self._db.total_changes - before < len(records):
            select = "SELECT folder, name, record FROM entry WHERE chunk = ?"
            stored = set(self._db.execute(select, (self._chunk,)))
            rows = [*map(self._row, plain), *tailed]
            not_inserted = [row for row in rows if (row.folder, row.name, row.record) not in stored]
            missing = {row.key for row in not_inserted}
            records = [row.record for row in rows if row.key not in missing]
        inserted = np.frombuffer(b"".join(records), RECORD)
        sizes = inserted["size"][inserted["kind"] == Kind.FILE]
        self.files += len(sizes)
        self.bytes += int(sizes.sum())
        return not_inserted

    def _drop_older_parts(self, plain: list[_Key], tailed: list[_Row]) -> None:
        """Parts that are older than an entry just added have lost, and become holes."""
        waiting: list[tuple[int, bytes]] = self._db.execute(
            "SELECT DISTINCT folder, name FROM part"
        ).fetchall()
        if waiting:
            added = {(folder, name): stamp for folder, name, stamp, _ in plain}
            added |= {(row.folder, row.name): row.stamp for row in tailed}
            for folder, name in added.keys() & set(waiting):
                self._drop_parts((folder, name, added[folder, name]), "<")

    def _drop_parts(
        self, key: tuple[int, bytes, bytes], comparison: str, *, hole: bool = True
    ) -> None:
        """Remove parts by comparing their stamp (`=`, `<`) with the third value of `key`. Their
        places become holes, unless `hole` is false."""
        where = f"FROM part WHERE folder = ? AND name = ? AND stamp {comparison} ?"
        if hole:
            for chunk, record in self._db.execute(f"SELECT chunk, record {where}", key).fetchall():
                self._add_hole(chunk, _place(record))
        self._db.execute(f"DELETE {where}", key)

    def _replace(self, old: _Row | None, row: _Row) -> None:
        """The places of `old`, the path's entry before `row`, become holes."""
        if old is not None:
            self._count(old, -1)
            for chunk, place in self._places(old):
                self._add_hole(chunk, place)
            self._write_spans(old, add=False)
        self._db.execute(f"INSERT OR REPLACE {_INTO}", row)
        self._write_spans(row, add=True)
        self._count(row, 1)

    # Extents

    def _add_part(self, row: _Row) -> None:
        old = self._entry(row.folder, row.name)
        if old is not None and row.stamp <= old.stamp:
            if row.stamp == old.stamp:
                self._swap_extent(old, row)
            else:
                self._add_hole(row.chunk, row.place)
            return
        number = _extent_number(row)
        key = (row.folder, row.name, row.stamp, number)
        select = (
            "SELECT chunk, record FROM part"
            " WHERE folder = ? AND name = ? AND stamp = ? AND number = ?"
        )
        known = self._db.execute(select, key).fetchone()
        loser: tuple[int, bytes] | None = known
        if (known is None and self._batch.by_purge) or (
            known is not None and self._id(known[0]) > self._id(row.chunk)
        ):
            loser = (row.chunk, row.record)
        else:
            self._db.execute(
                "INSERT OR REPLACE INTO part (folder, name, stamp, number, chunk, record, extent)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (*key, row.chunk, row.record, row.tail),
            )
            if known is None:
                self._complete(old, row, number)
        if loser is not None:
            self._add_hole(loser[0], _place(loser[1]))

    def _complete(self, old: _Row | None, row: _Row, number: int) -> None:
        """If `row` was the last missing extent, make the file the path's entry."""
        where = "FROM part WHERE folder = ? AND name = ? AND stamp = ?"
        key = (row.folder, row.name, row.stamp)
        # Counting all parts for each part would take quadratic time; mostly the next one is missing
        following = (*key, (number + 1) % row.extents)
        if self._db.execute(f"SELECT 1 {where} AND number = ?", following).fetchone() is None:
            return
        if self._db.execute(f"SELECT count(*) {where}", key).fetchone()[0] < row.extents:
            return
        parts = self._db.execute(
            f"SELECT chunk, record, extent {where} ORDER BY number", key
        ).fetchall()
        tail = b"".join(extent for _, _, extent in parts)
        self._replace(old, row._replace(chunk=parts[0][0], record=parts[0][1], tail=tail))
        self._drop_parts(row.key, "=", hole=False)
        self._drop_parts(row.key, "<")

    def _swap_extent(self, old: _Row, row: _Row) -> None:
        """Fold another copy of an extent of `old`: the chunk with the greater ID keeps it."""
        extents = np.frombuffer(old.tail or b"" if old.extents > 1 else b"", EXTENT).copy()
        number = _extent_number(row)
        if number >= len(extents) or extents[number]["chunk"].tobytes() >= self._id(row.chunk):
            self._add_hole(row.chunk, row.place)
            return
        extent = extents[number]
        self._add_hole(self._number(extent["chunk"].tobytes()), int(extent["place"]))
        self._write_spans(old, add=False)
        extents[number] = np.frombuffer(row.tail or b"", EXTENT)[0]
        front = row if number == 0 else old
        new = front._replace(tail=extents.tobytes())
        self._db.execute(
            "UPDATE entry SET chunk = ?, record = ?, tail = ? WHERE folder = ? AND name = ?",
            (new.chunk, new.record, new.tail, new.folder, new.name),
        )
        self._write_spans(new, add=True)

    def _write_spans(self, row: _Row, *, add: bool) -> None:
        if row.extents > 1:
            spans = {(chunk, row.folder, row.name) for chunk, _ in self._places(row)}
            self._db.executemany(
                "INSERT INTO span VALUES (?, ?, ?)"
                if add
                else "DELETE FROM span WHERE chunk = ? AND folder = ? AND name = ?",
                sorted(spans),
            )

    # Helpers of both

    def _entry(self, folder: int, name: bytes) -> _Row | None:
        found = self._db.execute(
            "SELECT folder, name, stamp, chunk, record, tail FROM entry"
            " WHERE folder = ? AND name = ?",
            (folder, name),
        ).fetchone()
        return None if found is None else _Row(*found)

    def _rank(self, row: _Row) -> tuple[Stamp, ChunkId]:
        return Stamp(row.stamp), self._id(row.chunk)

    def _places(self, row: _Row) -> list[tuple[int, int]]:
        if row.extents <= 1:
            return [(row.chunk, row.place)]
        extents = np.frombuffer(row.tail or b"", EXTENT)
        chunks = (self._number(chunk.tobytes()) for chunk in extents["chunk"])
        return list(zip(chunks, extents["place"].tolist(), strict=True))

    def _add_hole(self, chunk: int, place: int) -> None:
        self._db.execute("INSERT OR IGNORE INTO hole VALUES (?, ?)", (chunk, place))

    def _count(self, row: _Row, sign: int) -> None:
        record = np.frombuffer(row.record, RECORD)[0]
        if record["kind"] == Kind.FILE:
            self.files += sign
            self.bytes += sign * int(record["size"])

    def _id(self, number: int) -> ChunkId:
        if number not in self._ids:
            self._remember("number = ?", (number,))
        return self._ids[number]

    def _number(self, chunk: bytes) -> int:
        if chunk not in self._numbers:
            self._remember("dataset = ? AND id = ?", (self._dataset, chunk))
        return self._numbers[chunk]

    def _remember(self, condition: str, key: tuple[int | bytes, ...]) -> None:
        found = self._db.execute(f"SELECT number, id FROM chunk WHERE {condition}", key).fetchone()
        if found is None:
            raise corrupt_store_error("an entry of a chunk that it does not know")
        self._ids[found[0]], self._numbers[found[1]] = ChunkId(found[1]), found[0]


def _place(record: bytes) -> int:
    return int(np.frombuffer(record, RECORD)["place"][0])


def _extent_number(row: _Row) -> int:
    return int(np.frombuffer(row.tail or b"", EXTENT)["number"][0])
