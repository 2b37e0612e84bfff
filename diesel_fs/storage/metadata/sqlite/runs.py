"""The table `run`: many plain files of one chunk and one folder in one row.

A put of 200,000 files makes only some 1,000 runs; inserting and reading them takes a tenth of the
time of entries. The table has this invariant:

    In each folder, no run's range of names (first to last, both included) overlaps another run's,
    and no row of `entry` or `part` has a name within such a range.

So code that inserts a row into `entry` or `part` first calls `split_runs`, which turns runs that
include its name into rows of `entry`. A run holds regular files of one extent. The stamp of each is
the run's chunk and the record's place, so it needs no column.

All functions work inside the caller's transaction, in one thread.
"""

import operator
import sqlite3
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ....format.chunk_id import stamp
from ....format.entries import RECORD, ChunkId, Kind, Names
from ..store import CommitBatch, corrupt_store_error

ENTRIES_MIN = 8
"""Fewer entries of a folder and chunk become rows of `entry`: finding overlapping runs costs as
much."""

_RECORD_BYTES = RECORD.itemsize


class EntryRun(NamedTuple):
    """A decoded row of `run`. Names ascend."""

    chunk: int
    names: Names
    records: bytes

    def record(self, i: int) -> bytes:
        return self.records[i * _RECORD_BYTES : (i + 1) * _RECORD_BYTES]


class Segment(NamedTuple):
    """Entries that can become a run: row numbers and ascending names."""

    folder: int
    rows: npt.NDArray[np.int64]
    names: list[bytes]


def segments(batch: CommitBatch, folders: Sequence[int]) -> Iterator[Segment]:
    """The batch's entries that runs can hold. The batch may have any order: a tar lists names as
    its file system does. `folders` are the numbers of the batch's folders."""
    rows = batch.rows
    if batch.by_purge or len(rows) < ENTRIES_MIN:
        return
    all_names, records = Names.of(rows.names), rows.records
    fit = (records["kind"] == Kind.FILE) & (records["extents"] <= 1)
    fit[list(batch.stamps)] = False
    order = np.argsort(rows.folder, kind="stable")
    changes = np.flatnonzero(np.diff(rows.folder[order])) + 1
    for in_folder in np.split(order, changes):
        plain = in_folder[fit[in_folder]]
        if len(plain) < ENTRIES_MIN:
            continue
        names = _names_at(all_names, plain)
        if not all(map(operator.lt, names, names[1:])):
            by_name = sorted(range(len(names)), key=names.__getitem__)
            plain, names = plain[by_name], [names[i] for i in by_name]
            if any(map(operator.eq, names, names[1:])):
                continue  # a run has each name once
        unfit = in_folder[~fit[in_folder]]
        others = _names_at(all_names, unfit) if len(unfit) else []
        # A run ends beside each name that does not fit
        cuts = sorted({0, len(names), *(bisect_left(names, other) for other in others)})
        for start, end in pairwise(cuts):
            if end - start >= ENTRIES_MIN:
                folder = folders[rows.folder[plain[0]]]
                yield Segment(folder, plain[start:end], names[start:end])


def _names_at(names: Names, rows: npt.NDArray[np.int64]) -> list[bytes]:
    first, behind = int(rows[0]), int(rows[-1]) + 1
    if behind - first == len(rows) and (np.diff(rows) == 1).all():
        return [*names[first:behind]]
    return names.take(rows)


def insert_runs(
    db: sqlite3.Connection, chunk: int, batch: CommitBatch, segment: Segment, *, into_empty: bool
) -> bool:
    """Insert a segment as runs. Returns False, and does nothing, if another row is in the way.
    `into_empty`: the folder has no rows, so nothing must be looked up."""
    folder, rows, names = segment
    cuts = [0, len(names)] if into_empty else _cuts(db, folder, names)
    for start, end in pairwise(cuts):
        if start < end:
            piece = names[start:end]
            records = batch.rows.records[rows[start:end]].tobytes()
            db.execute(
                "INSERT INTO run (folder, first, last, chunk, names, records)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (folder, piece[0], piece[-1], chunk, b"\0".join(piece), records),
            )
    return bool(cuts)


def _cuts(db: sqlite3.Connection, folder: int, names: Sequence[bytes]) -> list[int]:
    """Where to cut `names` so that their runs overlap no other; empty if impossible."""
    folder_first_last = (folder, names[0], names[-1])
    for table in ("entry", "part"):
        exists = f"SELECT 1 FROM {table} WHERE folder = ? AND name BETWEEN ? AND ? LIMIT 1"  # noqa: S608
        if db.execute(exists, folder_first_last).fetchone():
            return []
    cuts = [0]
    for first, last in _ranges(db, *folder_first_last):
        before, behind = bisect_left(names, first), bisect_right(names, last)
        if before != behind:
            return []  # a name lies within the other run
        cuts.append(before)  # the other run lies between two names
    return [*cuts, len(names)]


def split_runs(db: sqlite3.Connection, folder: int, names: Iterable[bytes]) -> None:
    wanted = sorted(names)
    if not wanted:
        return
    for first, last in _ranges(db, folder, wanted[0], wanted[-1]):
        if bisect_left(wanted, first) != bisect_right(wanted, last):
            _split_run(db, folder, first)


def _ranges(
    db: sqlite3.Connection, folder: int, first: bytes, last: bytes
) -> list[tuple[bytes, bytes]]:
    """The first and last names of runs that overlap `first` to `last`, ascending."""
    found = db.execute(
        "SELECT first, last FROM run WHERE folder = ?1 AND first <= ?3 AND first >= coalesce("
        " (SELECT max(first) FROM run WHERE folder = ?1 AND first <= ?2), x'') ORDER BY first",
        (folder, first, last),
    )
    return [each for each in found if each[1] >= first]


def _split_run(db: sqlite3.Connection, folder: int, first: bytes) -> None:
    run = _decoded(
        db.execute(
            "DELETE FROM run WHERE folder = ? AND first = ? RETURNING chunk, names, records",
            (folder, first),
        ).fetchone()
    )
    (chunk_id,) = db.execute("SELECT id FROM chunk WHERE number = ?", (run.chunk,)).fetchone()
    places = np.frombuffer(run.records, RECORD)["place"].tolist()
    db.executemany(
        "INSERT INTO entry (folder, name, stamp, chunk, record) VALUES (?, ?, ?, ?, ?)",
        [
            (folder, name, stamp(ChunkId(chunk_id), place), run.chunk, run.record(i))
            for i, (name, place) in enumerate(zip(run.names, places, strict=True))
        ],
    )


def find(db: sqlite3.Connection, folder: int | None, name: bytes) -> tuple[int, bytes] | None:
    """The number of a file's chunk, and its record; None if no run has the file."""
    row = db.execute(
        "SELECT chunk, names, records, last FROM run WHERE folder = ? AND first <= ?"
        " ORDER BY first DESC LIMIT 1",
        (folder, name),
    ).fetchone()
    if row is None or row[3] < name:
        return None
    run = _decoded(row[:3])
    at = bisect_left(run.names, name)
    return (run.chunk, run.record(at)) if run.names[at] == name else None


def runs_in(db: sqlite3.Connection, folder: int) -> list[EntryRun]:
    select = "SELECT chunk, names, records FROM run WHERE folder = ? ORDER BY first"
    return [_decoded(row) for row in db.execute(select, (folder,))]


def runs_since(
    db: sqlite3.Connection, dataset: int, version: int
) -> Iterator[tuple[int, EntryRun]]:
    """Folder and run, for each run of a chunk committed after `version`."""
    select = (
        "SELECT run.folder, run.chunk, run.names, run.records"
        " FROM chunk CROSS JOIN run ON run.chunk = chunk.number"
        " WHERE chunk.dataset = ? AND chunk.version > ?"
    )
    for folder, *row in db.execute(select, (dataset, version)):
        yield folder, _decoded(row)


def _decoded(row: Sequence[object]) -> EntryRun:
    chunk, names, records = row
    assert isinstance(chunk, int)
    assert isinstance(names, bytes)
    assert isinstance(records, bytes)
    count, rest = divmod(len(records), _RECORD_BYTES)
    if rest or names.count(b"\0") != count - 1:
        raise corrupt_store_error("a run with different numbers of names and records")
    return EntryRun(chunk, Names(names, count), records)
