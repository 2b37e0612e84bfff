"""Reads and writes the table `dataset` of the SQLite metadata store, inside the caller's
transaction.
"""

# Statements consist of constants; values are parameters.
# ruff: noqa: S608

import sqlite3
from typing import NamedTuple
from uuid import UUID

from ....errors import ConflictError
from ....format.entries import ChunkId
from ..store import DatasetHead, no_such_dataset_error

_COLUMNS = "number, identity, name, version, files, bytes, chunks, digest, newest"
_Row = tuple[int, bytes, str, int, int, int, int, bytes, bytes]


class DatasetRow(NamedTuple):
    """`number` stands for the dataset in all tables."""

    number: int
    head: DatasetHead


def all_datasets(db: sqlite3.Connection) -> list[DatasetRow]:
    return [*map(_dataset, db.execute(f"SELECT {_COLUMNS} FROM dataset ORDER BY name"))]


def dataset_by_name(db: sqlite3.Connection, name: str) -> DatasetRow:
    return _dataset_where(db, "name = ?", name, name)


def dataset_by_identity(db: sqlite3.Connection, identity: UUID) -> DatasetRow:
    return _dataset_where(db, "identity = ?", identity.bytes, identity)


def _dataset_where(
    db: sqlite3.Connection, condition: str, value: str | bytes, dataset: str | UUID
) -> DatasetRow:
    row = db.execute(f"SELECT {_COLUMNS} FROM dataset WHERE {condition}", (value,)).fetchone()
    if row is None:
        raise no_such_dataset_error(dataset)
    return _dataset(row)


def dataset_of(db: sqlite3.Connection, name: str, identity: UUID) -> DatasetRow | None:
    """None if both name and identity are free. Raises ConflictError if one belongs to another
    dataset."""
    same = db.execute(
        f"SELECT {_COLUMNS} FROM dataset WHERE name = ? OR identity = ?", (name, identity.bytes)
    ).fetchall()
    if not same:
        return None
    found = _dataset(same[0])
    head = found.head
    if len(same) > 1 or (head.name, head.identity) != (name, identity):
        raise ConflictError(
            f"dataset {head.name!r} has the identity {head.identity}: no dataset can have the name"
            f" {name!r} and the identity {identity}"
        )
    return found


def new_number(db: sqlite3.Connection) -> int:
    """A number that no dataset ever had or will get."""
    number = _insert(db, None, b"", "")
    db.execute("DELETE FROM dataset WHERE number = ?", (number,))
    return number


def insert(db: sqlite3.Connection, head: DatasetHead, number: int | None = None) -> None:
    """`number`: the number under which the dataset's rows are in other tables (None: a new one)."""
    write(db, _insert(db, number, head.identity.bytes, head.name), head)


def _insert(db: sqlite3.Connection, number: int | None, identity: bytes, name: str) -> int:
    cursor = db.execute(
        "INSERT INTO dataset (number, identity, name, version, files, bytes, chunks, digest,"
        " newest) VALUES (?, ?, ?, 0, 0, 0, 0, x'', x'')",
        (number, identity, name),
    )
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def write(db: sqlite3.Connection, number: int, head: DatasetHead) -> None:
    """Update all of a head but name and identity."""
    digest, counts = head.digest.to_bytes(16, "big"), (head.files, head.bytes, head.chunks)
    db.execute(
        "UPDATE dataset SET version = ?, files = ?, bytes = ?, chunks = ?, digest = ?,"
        " newest = ? WHERE number = ?",
        (head.version, *counts, digest, head.newest, number),
    )


def _dataset(row: _Row) -> DatasetRow:
    number, identity, name, version, files, total, chunks, packed, newest = row
    id_, digest = UUID(bytes=identity), int.from_bytes(packed, "big")
    head = DatasetHead(id_, name, version, files, total, chunks, digest, ChunkId(newest))
    return DatasetRow(number, head)
