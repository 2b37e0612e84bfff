"""FAULTS E13: a writer does not publish metadata that differ from the headers of its chunks."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest

from diesel_fs.errors import CorruptError
from diesel_fs.format.entries import EXTENT, Kind, Rows
from diesel_fs.format.snapshot import build as snapshot_merge
from diesel_fs.ingest import PutOptions
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.metadata.sqlite.store import SqliteMetadata
from diesel_fs.storage.metadata.store import MetadataChanges
from tests.trees import write

from .folder_puts import put_folder

SMALL = PutOptions(jobs=1, chunk_bytes=1 << 16, compress="none")
LARGE = 3 << 16
PLAIN = ("mtime_ns", "checksum", "offset", "stored", "mode", "size", "codec")
OF_EXTENT = ("checksum", "offset", "stored", "size", "start", "codec")
Damage = Callable[[Rows], Rows]


def plain(column: str) -> Damage:
    def damage(rows: Rows) -> Rows:
        records = rows.records.copy()
        whole = (records["kind"] == Kind.FILE) & (records["extents"] == 1)
        records[column][np.flatnonzero(whole)[0]] ^= 1
        return replace(rows, records=records)

    return damage


def of_extent(column: str) -> Damage:
    def damage(rows: Rows) -> Rows:
        row = int(np.flatnonzero(rows.records["extents"] > 1)[0])
        extents = np.frombuffer(rows.tails[row], EXTENT).copy()
        extents[column][1] ^= 1
        return replace(rows, tails={**rows.tails, row: extents.tobytes()})

    return damage


def swapped(rows: Rows) -> Rows:
    records = rows.records.copy()
    files = np.flatnonzero((records["kind"] == Kind.FILE) & (records["extents"] == 1))[:2]
    records["mtime_ns"][files] = records["mtime_ns"][files[::-1]]
    return replace(rows, records=records)


def other_chunk(rows: Rows) -> Rows:
    chunk = rows.chunk.copy()
    one = int(np.flatnonzero(rows.records["kind"] == Kind.FILE)[0])
    chunk[one] = (chunk[one] + 1) % len(rows.chunks)
    return replace(rows, chunk=chunk)


DAMAGES: dict[str, Damage] = {
    **{column: plain(column) for column in PLAIN},
    **{f"extent's {column}": of_extent(column) for column in OF_EXTENT},
    "two times": swapped,
    "chunk": other_chunk,
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    files = {f"d{i % 3}/{i}": bytes([i % 251]) * (100 + i) for i in range(1000)}
    return write(tmp_path / "source", {**files, "large": bytes(LARGE), "empty": b""})


@pytest.mark.parametrize("case", DAMAGES)
def test_E13_metadata_that_contradict_the_chunks_are_not_published(
    repository: LocalRepository, source: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    put_folder(repository, write(source.parent / "first", {"first": b"1"}))
    published = repository.snapshots.versions(repository.dataset("ds").identity)
    changes = SqliteMetadata.changes

    def damaged(self: SqliteMetadata, identity: UUID, since: int) -> MetadataChanges:
        found = changes(self, identity, since)
        if len(found.rows) < 500:  # before the put's own
            return found
        return replace(found, rows=DAMAGES[case](found.rows))

    with monkeypatch.context() as patch:
        patch.setattr(SqliteMetadata, "changes", damaged)
        with pytest.raises(CorruptError):
            put_folder(repository, source)
    assert repository.snapshots.versions(repository.dataset("ds").identity) == published
    put_folder(repository, source)
    assert repository.verify("ds").problems == []


def test_E13_a_wrong_merge_is_repeated_from_nothing(
    repository: LocalRepository, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the memory that holds the previous version's columns were damaged."""
    put_folder(repository, write(source.parent / "first", {"first": b"1"}))
    merge, hits = snapshot_merge.build_snapshot, []

    def damaged(previous: object, rows: Rows, *rest: object, **more: object) -> object:
        if previous is not None and len(rows) > 500:
            hits.append(rows)
            rows = plain("mtime_ns")(rows)
        return merge(previous, rows, *rest, **more)  # type: ignore[arg-type]  # handed on

    monkeypatch.setattr("diesel_fs.repository.versions.build_snapshot", damaged)
    put_folder(repository, source)
    assert hits
    monkeypatch.undo()
    view = repository.snapshots.fetch_verified(*_newest(repository))
    for path in (b"first", b"d1/1"):
        assert view.lookup(path) > 0
    assert view.stat(view.lookup(b"d1/1")).mtime_ns == (source / "d1/1").stat().st_mtime_ns
    assert repository.verify("ds").problems == []


def _newest(repository: LocalRepository) -> tuple[UUID, int]:
    identity = repository.dataset("ds").identity
    return identity, repository.snapshots.newest(identity)


def test_early_replaced_files_are_no_damage(repository: LocalRepository, source: Path) -> None:
    """Their chunk has fewer places by then."""
    first, second = repository.begin("ds"), repository.begin("ds")
    put_folder(repository, source)
    second.delete([b"d1/1", b"large"])
    first.finish()
    second.finish()
    write(source, {"d1/1": b"again"})
    put_folder(repository, source)
    assert repository.verify("ds").problems == []
