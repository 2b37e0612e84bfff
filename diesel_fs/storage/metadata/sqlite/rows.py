"""Reading entries from the tables of the embedded metadata store, few or all of them.

Owned here: how folders' paths become numbers and back, how rows become the columns of `Rows`, and
which chunks have none left.
Everything belongs to one transaction and one thread: nothing is remembered beyond it, so nothing
can be stale.
"""

# Statements are put together from constants only; values always travel as parameters.
# ruff: noqa: S608

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from diesel_fs.errors import CorruptError
from diesel_fs.format.chunk_id import LOWEST
from diesel_fs.format.entries import RECORD, ROOT, ChunkId, ChunkInfo, Kind, Names, Rows, join
from diesel_fs.storage.metadata.sqlite.runs import EntryRun, runs_in, runs_since

COLUMNS = "entry.name, entry.chunk, entry.record, entry.tail"
IMPLIED_CHUNK = 0
"""No chunk has this number."""

assert RECORD.fields is not None
_KIND_AT = int(RECORD.fields["kind"][1])
_IS_DEAD = f"substr(entry.record, {_KIND_AT + 1}, 1) = x'{Kind.TOMBSTONE:02x}'"
_IMPLIED_MODE = 0o755

Row = tuple[bytes, int, bytes, bytes | None]
"""`COLUMNS`."""


def kind_of(record: bytes) -> int:
    """What a packed record is, a `Kind`."""
    return record[_KIND_AT]


def implied(name: bytes) -> Row:
    """The row of a folder that has none."""
    record = np.zeros(1, RECORD)
    record["kind"], record["mode"] = Kind.FOLDER, _IMPLIED_MODE
    return name, IMPLIED_CHUNK, record.tobytes(), None


class FolderNumbers:
    """Paths of folders, and their numbers."""

    def __init__(self, db: sqlite3.Connection, dataset: int) -> None:
        self._db = db
        self._dataset = dataset
        # By parent and name rather than by path: a path can be as long as 1,000 others together.
        self._numbers: dict[tuple[int, bytes], int] = {}
        self._paths: dict[int, bytes] = {}
        self.empty: set[int] = set()
        """Folders that `make` has made and nothing is in yet; whoever inserts takes them out."""

    def number(self, path: bytes) -> int | None:
        """The number of a folder; None where nothing was ever below it."""
        number: int | None = 0
        for name in _steps(path):
            assert number is not None
            number = self._child(number, name)
            if number is None:
                return None
        return number

    def make(self, path: bytes) -> int:
        """The number of a folder, which may be a new one."""
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
        """The path of a folder."""
        names, at = [], number
        while at not in self._paths:
            row = self._db.execute(
                "SELECT parent, name FROM folder WHERE number = ?", (at,)
            ).fetchone()
            if row is None or row[0] >= at:  # parents are made first
                raise _damaged("a folder without a parent")
            if row[0] == 0:
                self._paths[at] = ROOT
            else:
                names.append(row[1])
                at = row[0]
        if names:
            self._paths[number] = join(self._paths[at], b"/".join(reversed(names)))
        return self._paths[number]

    def all(self) -> list[tuple[bytes, int]]:
        """All folders, in order of their paths."""
        paths: dict[int, bytes] = {}
        rows = self._db.execute(
            "SELECT number, parent, name FROM folder WHERE dataset = ? ORDER BY number",
            (self._dataset,),
        )
        for number, parent, name in rows:
            above = paths.get(parent)
            if parent and above is None:
                raise _damaged("a folder without a parent")
            paths[number] = join(above, name) if above is not None else ROOT
        return sorted((path, number) for number, path in paths.items())

    def below(self, number: int) -> list[tuple[bytes, int]]:
        """Names and numbers of the folders directly in one."""
        return self._db.execute(
            "SELECT name, number FROM folder WHERE dataset = ? AND parent = ?",
            (self._dataset, number),
        ).fetchall()

    def has_entries(self, number: int) -> bool:
        """Whether anything but tombstones lies in a folder, however deep."""
        found = self._db.execute(
            "WITH RECURSIVE below (number) AS (VALUES (?) UNION ALL"
            " SELECT folder.number FROM below JOIN folder"
            " ON folder.dataset = ? AND folder.parent = below.number)"
            " SELECT 1 FROM below WHERE"
            " EXISTS (SELECT 1 FROM run WHERE run.folder = below.number) OR EXISTS"
            f" (SELECT 1 FROM entry WHERE entry.folder = below.number AND NOT {_IS_DEAD}) LIMIT 1",
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


class ChunkTable(NamedTuple):
    """Chunks in order of their numbers."""

    numbers: npt.NDArray[np.int64]
    infos: Sequence[ChunkInfo]


def all_chunks(db: sqlite3.Connection, dataset: int) -> ChunkTable:
    """The chunks of a dataset."""
    select = "SELECT number, id, object_bytes FROM chunk WHERE dataset = ? ORDER BY number"
    rows = db.execute(select, (dataset,)).fetchall()
    return ChunkTable(
        np.array([row[0] for row in rows], np.int64),
        [ChunkInfo(ChunkId(row[1]), row[2]) for row in rows],
    )


def named_chunks(db: sqlite3.Connection, numbers: Iterable[int]) -> ChunkTable:
    """The chunks with these numbers, that of implied folders among them."""
    select = "SELECT id, object_bytes FROM chunk WHERE number = ?"
    wanted, infos = sorted(set(numbers)), []
    for number in wanted:
        row = (LOWEST, 0) if number == IMPLIED_CHUNK else db.execute(select, (number,)).fetchone()
        if row is None:
            raise _damaged("an entry without a chunk")
        infos.append(ChunkInfo(ChunkId(row[0]), row[1]))
    return ChunkTable(np.array(wanted, np.int64), infos)


def empty_chunks(
    db: sqlite3.Connection, dataset: int, chunks: Iterable[ChunkId], *, tombstones: bool
) -> dict[ChunkId, int]:
    """The numbers of those chunks of which all places are holes, or (with `tombstones`) dead."""
    dead = f"AND NOT {_IS_DEAD}" if tombstones else ""
    found: dict[ChunkId, int] = {}
    parts = {chunk for (chunk,) in db.execute("SELECT DISTINCT chunk FROM part")}
    for id_ in chunks:
        row = db.execute(
            "SELECT number FROM chunk WHERE dataset = ? AND id = ?", (dataset, id_)
        ).fetchone()
        if row is None or row[0] in parts:
            continue
        used = db.execute(
            "SELECT EXISTS (SELECT 1 FROM run WHERE chunk = ?1)"
            " OR EXISTS (SELECT 1 FROM span WHERE chunk = ?1)"
            f" OR EXISTS (SELECT 1 FROM entry WHERE chunk = ?1 {dead})",
            row,
        ).fetchone()
        if not used[0]:
            found[id_] = row[0]
    return found


def forget_chunk(db: sqlite3.Connection, number: int) -> None:
    """Remove an empty chunk, and the tombstones that are in it."""
    db.execute("DELETE FROM entry WHERE chunk = ?", (number,))
    db.execute("DELETE FROM hole WHERE chunk = ?", (number,))
    db.execute("DELETE FROM chunk WHERE number = ?", (number,))


class RowCollector:
    """Rows on their way to columns."""

    def __init__(self) -> None:
        self._folders: dict[bytes, int] = {}
        self._folder: list[int] = []  # position in `_folders` of each ...
        self._counts: list[int] = []  # ... run of so many rows
        self._names: list[Names] = []
        self._chunk: list[int] = []  # the number of each ...
        self._chunk_counts: list[int] = []  # ... run of so many rows
        self._records = bytearray()
        self._tails: dict[int, bytes] = {}

    @property
    def chunks(self) -> set[int]:
        """The numbers of the chunks that are named."""
        return set(self._chunk)

    def add(self, folder: bytes, rows: Sequence[Row]) -> None:
        """Add rows of one folder."""
        if not rows:
            return
        names, chunks, records, tails = zip(*rows, strict=True)
        start = sum(self._counts) if any(tails) else 0
        self._add(folder, Names.of(names), b"".join(records))
        self._chunk += chunks
        self._chunk_counts += [1] * len(rows)
        self._tails |= {start + i: tail for i, tail in enumerate(tails) if tail is not None}

    def add_run(self, folder: bytes, run: EntryRun) -> None:
        """Add the entries of a run in a folder."""
        self._add(folder, run.names, run.records)
        self._chunk.append(run.chunk)
        self._chunk_counts.append(len(run.names))

    def _add(self, folder: bytes, names: Names, records: bytes) -> None:
        if len(records) != len(names) * RECORD.itemsize:
            raise _damaged("records of another length")
        self._folder.append(self._folders.setdefault(folder, len(self._folders)))
        self._counts.append(len(names))
        self._names.append(names)
        self._records += records

    def rows(self, table: ChunkTable) -> Rows:
        """The columns, once. `table` must have all chunks that are named."""
        numbers = np.array(self._chunk, np.int64)
        chunk = np.searchsorted(table.numbers, numbers).astype(np.uint32)
        if len(numbers) and (
            chunk.max() >= len(table.numbers) or (table.numbers[chunk] != numbers).any()
        ):
            raise _damaged("an entry without a chunk")
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
    select = f"SELECT {COLUMNS} FROM entry WHERE folder = ? AND NOT {_IS_DEAD}"
    for path, number in FolderNumbers(db, dataset).all():
        found.add(path, db.execute(select, (number,)).fetchall())
        for run in runs_in(db, number):
            found.add_run(path, run)
    return found


def newer(db: sqlite3.Connection, dataset: int, since: int) -> RowCollector:
    """The entries, tombstones too, of which a chunk was committed after version `since`."""
    new_chunks = " WHERE chunk.dataset = :dataset AND chunk.version > :since"
    rows = db.execute(
        f"SELECT entry.folder, {COLUMNS}"
        f" FROM chunk CROSS JOIN entry ON entry.chunk = chunk.number {new_chunks}"
        # Those of several extents whose first is in an older chunk
        f" UNION ALL SELECT DISTINCT entry.folder, {COLUMNS}"
        " FROM chunk CROSS JOIN span ON span.chunk = chunk.number"
        " CROSS JOIN entry ON entry.folder = span.folder AND entry.name = span.name"
        " CROSS JOIN chunk AS first ON first.number = entry.chunk"
        f" {new_chunks} AND first.version <= :since"
        " ORDER BY 1, 2",
        {"dataset": dataset, "since": since},
    )
    found, folders = RowCollector(), FolderNumbers(db, dataset)
    for folder, run in _runs(rows):
        found.add(folders.path(folder), run)
    for folder, packed in runs_since(db, dataset, since):
        found.add_run(folders.path(folder), packed)
    return found


def _runs(
    rows: Iterable[tuple[int, bytes, int, bytes, bytes | None]],
) -> Iterator[tuple[int, list[Row]]]:
    """Rows of one folder that follow each other, and its number."""
    here, run = 0, list[Row]()
    for folder, name, chunk, record, tail in rows:
        if folder != here and run:
            yield here, run
            run = []
        here = folder
        run.append((name, chunk, record, tail))
    if run:
        yield here, run


def _steps(path: bytes) -> list[bytes]:
    """The names on the way to a folder, from the root's."""
    return [ROOT, *path.split(b"/")] if path else [ROOT]


def _damaged(what: str) -> CorruptError:
    return CorruptError(f"the metadata store has {what}", advice="run `dlcmd recover`")
