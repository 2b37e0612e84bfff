"""The table `dataset` of the embedded metadata store: names, identities and markers.

Owned here: how a marker stands in its row, and that a name and an identity belong to each other
alone. Not owned: what a marker says (`metadata.py`). Everything happens inside the caller's
transaction, in one thread.
"""

# Statements are put together from constants only; values always travel as parameters.
# ruff: noqa: S608

import sqlite3
from typing import NamedTuple
from uuid import UUID

from diesel_fs.errors import ConflictError, NoSuchDataset
from diesel_fs.format.entries import ChunkId
from diesel_fs.storage.metadata.store import DatasetHead

_COLUMNS = "number, identity, name, version, files, bytes, chunks, digest, newest"
_Row = tuple[int, bytes, str, int, int, int, int, bytes, bytes]


class DatasetRow(NamedTuple):
    """A dataset: the number by which all its rows are found, and its marker."""

    number: int
    head: DatasetHead


def all_datasets(db: sqlite3.Connection) -> list[DatasetRow]:
    """All datasets, by name."""
    return [*map(_dataset, db.execute(f"SELECT {_COLUMNS} FROM dataset ORDER BY name"))]


def dataset_by_name(db: sqlite3.Connection, name: str) -> DatasetRow:
    """The dataset of a name. Raises NoSuchDataset."""
    row = db.execute(f"SELECT {_COLUMNS} FROM dataset WHERE name = ?", (name,)).fetchone()
    if row is None:
        raise NoSuchDataset(f"the metadata store knows no dataset {name!r}")
    return _dataset(row)


def dataset_by_identity(db: sqlite3.Connection, identity: UUID) -> DatasetRow:
    """The dataset of an identity. Raises NoSuchDataset."""
    select = f"SELECT {_COLUMNS} FROM dataset WHERE identity = ?"
    row = db.execute(select, (identity.bytes,)).fetchone()
    if row is None:
        raise NoSuchDataset(f"the metadata store knows no dataset with identity {identity}")
    return _dataset(row)


def dataset_of(db: sqlite3.Connection, name: str, identity: UUID) -> DatasetRow | None:
    """The dataset of this name and identity. Raises ConflictError where one of them belongs to
    another dataset."""
    same = db.execute(
        f"SELECT {_COLUMNS} FROM dataset WHERE name = ? OR identity = ?", (name, identity.bytes)
    ).fetchall()
    if not same:
        return None
    found = _dataset(same[0])
    marker = found.head
    if len(same) > 1 or (marker.name, marker.identity) != (name, identity):
        raise ConflictError(
            f"dataset {marker.name!r} has the identity {marker.identity}, so none can be"
            f" {name!r} with {identity}"
        )
    return found


def new_number(db: sqlite3.Connection) -> int:
    """A number that no dataset has had, nor will be given."""
    number = _insert(db, None, b"", "")
    db.execute("DELETE FROM dataset WHERE number = ?", (number,))
    return number


def insert(db: sqlite3.Connection, marker: DatasetHead, number: int | None = None) -> None:
    """Make a dataset, of rows that are there under a number or of none."""
    write(db, _insert(db, number, marker.identity.bytes, marker.name), marker)


def _insert(db: sqlite3.Connection, number: int | None, identity: bytes, name: str) -> int:
    cursor = db.execute(
        "INSERT INTO dataset (number, identity, name, version, files, bytes, chunks, digest,"
        " newest) VALUES (?, ?, ?, 0, 0, 0, 0, x'', x'')",
        (number, identity, name),
    )
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def write(db: sqlite3.Connection, number: int, marker: DatasetHead) -> None:
    """What a marker says from now on; its name and identity stay."""
    db.execute(
        "UPDATE dataset SET version = ?, files = ?, bytes = ?, chunks = ?, digest = ?,"
        " newest = ? WHERE number = ?",
        (
            marker.version,
            marker.files,
            marker.bytes,
            marker.chunks,
            marker.digest.to_bytes(16, "big"),
            marker.newest,
            number,
        ),
    )


def _dataset(row: _Row) -> DatasetRow:
    number, identity, name, version, files, total, chunks, digest, newest = row
    marker = DatasetHead(
        UUID(bytes=identity),
        name,
        version,
        files,
        total,
        chunks,
        int.from_bytes(digest, "big"),
        ChunkId(newest),
    )
    return DatasetRow(number, marker)
