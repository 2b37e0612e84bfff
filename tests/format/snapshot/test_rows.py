"""`build_snapshot` refuses impossible rows, with an error that names the path."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from uuid import UUID

import numpy as np
import pytest

from diesel_fs.errors import CorruptError, DieselError, UsageError
from diesel_fs.format.entries import ChunkId, ChunkInfo, Kind, Rows
from diesel_fs.format.snapshot.build import build_snapshot
from diesel_fs.format.snapshot.entry_digest import EntryDigest, entry_digest
from diesel_fs.format.snapshot.reader import Snapshot
from tests.rows import each_row

from .oracle import IDENTITY, SMALL, OwnEntry, Part, build, chunk_id, rows_of, tail_of

FILE = OwnEntry(Kind.FILE, parts=(Part(3, 100, 4, 0, 3, 4),))
BIG = OwnEntry(Kind.FILE, parts=(Part(3, 100, 2, 1, 3, 65536), Part(9, 100, 4, 0, 3, 4)))


def merged(
    rows: Rows,
    previous: Snapshot | None = None,
    chunks: tuple[int, ...] = (3, 9),
    entry_digests: Mapping[ChunkId, EntryDigest] = MappingProxyType({}),
) -> Snapshot:
    table = [ChunkInfo(chunk_id(number), 1000) for number in chunks]
    parts = build_snapshot(
        previous, rows, table, identity=IDENTITY, dataset="flowers", version=1, digest=0,
        entry_digests=entry_digests,
    )  # fmt: skip
    return Snapshot(b"".join(parts))


@each_row(
    "path", [b"/a/b", b"a//b", b"a/", b".", b"a/..", b"../a", b"a\0", b"d/" + b"n" * 256, b"./a/b"]
)
@each_row("previous", [None, Snapshot(build(None, SMALL, [3, 9]))])
def test_impossible_paths_are_refused(path: bytes, previous: Snapshot | None) -> None:
    with pytest.raises(UsageError, match="cannot be a component"):
        merged(rows_of({b"good": FILE, path: FILE}), previous)
    merged(rows_of({b"good": FILE, path: None}), previous)  # removing a path that is not there


def twice(path: bytes) -> Rows:
    rows = rows_of({path: FILE, b"p": FILE})
    names = list(rows.names)
    names[names.index(b"p")] = path.rpartition(b"/")[2]
    return replace(rows, names=names, folder=np.full(2, rows.folder[names.index(names[0])]))


def test_two_rows_with_one_path_are_refused() -> None:
    for previous in (None, Snapshot(build(None, SMALL, [3, 9]))):
        for path in (b"a", b"new"):
            with pytest.raises(UsageError, match="two rows have one path"):
                merged(twice(path), previous)
    rows = rows_of({b"d": FILE, b"e": FILE, b"d/x": FILE})
    renamed = [b"d" if name == b"e" else name for name in rows.names]
    with pytest.raises(UsageError, match="two rows have one path: d"):
        merged(replace(rows, names=renamed))


def record(field: str, value: int) -> Callable[[Rows], Rows]:
    def change(rows: Rows) -> Rows:
        records = rows.records.copy()
        records[field] = value
        return replace(rows, records=records)

    return change


@each_row(
    ("own", "change", "error"),
    [
        (FILE, record("kind", 4), UsageError),
        (FILE, record("codec", 2), UsageError),
        (FILE, record("size", 2**63), UsageError),
        (FILE, record("extents", 2), UsageError),
        (FILE, lambda rows: replace(rows, chunks=[]), UsageError),
        (FILE, lambda rows: replace(rows, chunks=[chunk_id(4)] * 2), CorruptError),
        (BIG, record("extents", 3), UsageError),
        (BIG, record("size", 9), CorruptError),
        (BIG, lambda rows: replace(rows, tails={}), UsageError),
        (BIG, lambda rows: replace(rows, tails={0: tail_of(BIG.parts)[:-1]}), UsageError),
        (OwnEntry(Kind.LINK, target=b"t"), lambda rows: replace(rows, tails={}), UsageError),
    ],
)
def test_impossible_records_are_refused(
    own: OwnEntry, change: Callable[[Rows], Rows], error: type[DieselError]
) -> None:
    rows = rows_of({b"f": own})
    assert merged(rows).lookup(b"f") == 1
    with pytest.raises(error):
        merged(change(rows))


@pytest.mark.parametrize("own", [FILE, BIG])
def test_a_file_in_a_chunk_that_is_missing_in_the_table_is_named(own: OwnEntry) -> None:
    rows = rows_of({b"d/lost": own, b"d/other": OwnEntry(Kind.FOLDER)})
    with pytest.raises(CorruptError, match="d/lost"):
        merged(rows, chunks=(9,))
    before = merged(rows)
    with pytest.raises(CorruptError, match="d/lost"):
        merged(rows_of({}), before, chunks=(9,))
    hidden = merged(rows_of({b"d/lost/below": OwnEntry(Kind.FOLDER)}), before)
    with pytest.raises(CorruptError, match="d/lost"):
        merged(rows_of({}), hidden, chunks=(9,))


@each_row("is_hidden", [False, True])
@each_row(("field", "value"), [("mtime_ns", 8), ("checksum", 8), ("offset", 101), ("mode", 0o600)])
def test_a_file_against_its_chunks_digest_fails(field: str, value: int, is_hidden: bool) -> None:
    """A file that a folder of the same path hides counts, too."""
    rows = rows_of({b"f": FILE})
    digests = {chunk_id(3): entry_digest(rows)}
    folder = merged(rows_of({b"f/below": OwnEntry(Kind.FOLDER)}))
    previous = folder if is_hidden else None
    assert len(merged(rows, previous, entry_digests=digests)) == (3 if is_hidden else 2)
    with pytest.raises(CorruptError, match="contradict its header"):
        merged(record(field, value)(rows), previous, entry_digests=digests)


def test_a_chunk_table_or_a_previous_snapshot_that_is_wrong_is_refused() -> None:
    with pytest.raises(UsageError, match="holds a chunk twice"):
        merged(rows_of({}), chunks=(3, 3))
    previous = Snapshot(build(None, SMALL, [3, 9]))
    with pytest.raises(UsageError, match="previous snapshot"):
        build_snapshot(
            previous, rows_of({}), [], identity=UUID(int=1), dataset="x", version=1, digest=0
        )


def test_modes_lose_all_but_permission_bits() -> None:
    assert merged(rows_of({b"f": OwnEntry(Kind.FILE, 0o6755)})).stat(1).mode == 0o755
