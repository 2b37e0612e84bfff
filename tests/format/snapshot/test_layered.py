"""Lookups in a snapshot and deltas above it, against the merged snapshot."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_intdigest

from diesel_fs.format.entries import ChunkInfo, Kind
from diesel_fs.format.snapshot import layered
from diesel_fs.format.snapshot.build import build_snapshot
from diesel_fs.format.snapshot.delta import Delta, DeltaHeader
from diesel_fs.format.snapshot.layered import LayeredSnapshot
from diesel_fs.format.snapshot.layout import RowsDigest
from diesel_fs.format.snapshot.reader import Snapshot
from tests.examples import examples

from . import oracle
from .oracle import OwnEntry, State, chunk_id, rows_of
from .test_model import apply, batches, paths


def table(state: State) -> list[ChunkInfo]:
    numbers = {oracle.HOME, *oracle.chunks_in(state.values())}
    return [ChunkInfo(chunk_id(number), 1_000_000 + number) for number in sorted(numbers)]


def full(state: State, chunks: list[ChunkInfo], version: int) -> Snapshot:
    parts = build_snapshot(
        None,
        rows_of(dict(state)),
        chunks,
        identity=oracle.IDENTITY,
        dataset="flowers",
        version=version,
        digest=sum(xxh3_128_intdigest(chunk.id) for chunk in chunks) % 2**128,
    )
    return Snapshot(b"".join(parts))


def delta(base: Snapshot, changes: Mapping[bytes, OwnEntry | None], after: Snapshot) -> Delta:
    known = set(base.chunk_ids)
    sizes = zip(after.chunk_ids, after.chunk_sizes.tolist(), strict=True)
    header = DeltaHeader(
        identity=oracle.IDENTITY,
        dataset="flowers",
        version=after.version,
        base=base.version,
        files=after.file_count,
        file_bytes=after.byte_count,
        chunks=after.chunk_count,
        digest=after.digest,
        rows_digest=RowsDigest(*after.rows_digest),
        rows=len(changes),
    )
    added = [ChunkInfo(id_, size) for id_, size in sizes if id_ not in known]
    return Delta(header, rows_of(changes, seed=after.version), added)


def layers(steps: list[dict[bytes, OwnEntry | None]]) -> tuple[Snapshot, list[Delta], Snapshot]:
    """The first step as a snapshot, the others as deltas, and all as a snapshot. Chunks stay."""
    state: dict[bytes, OwnEntry] = {}
    everything: dict[bytes, OwnEntry] = {}
    below, deltas = None, []
    for version, changes in enumerate(steps, 1):
        apply(state, changes)
        everything |= {b"%d%b" % (version, path): own for path, own in changes.items() if own}
        after = full(state, table(everything), version)
        if below is None:
            base = after
        else:
            deltas.append(delta(below, changes, after))
        below = after
    assert below is not None
    return base, deltas, below


def check_same(found: Snapshot, expected: Snapshot) -> None:
    everything = range(len(expected))
    assert len(found) == len(expected)
    for i in everything:
        assert found.path(i) == expected.path(i)
        assert found.stat(i) == expected.stat(i)
        assert found.size(i) == expected.size(i)
        assert (found.name(i), found.parent(i)) == (expected.name(i), expected.parent(i))
        assert found.children(i) == expected.children(i)
        assert found.extents(i) == expected.extents(i)
        assert found.extents(i, 65_536, 65_537) == expected.extents(i, 65_536, 65_537)
        assert found.lookup(expected.path(i)) == i
        assert found.hash(i) == expected.hash(i)
        if expected.stat(i).kind == Kind.LINK:
            assert found.link(i) == expected.link(i)
    assert found.shadowing_folders().tolist() == expected.shadowing_folders().tolist()
    assert found.paths(everything) == expected.paths(everything)
    assert list(found.chunk_ids) == list(expected.chunk_ids)
    assert found.chunk_sizes.tolist() == expected.chunk_sizes.tolist()
    assert found.rows_digest == expected.rows_digest


@given(st.lists(batches, min_size=2, max_size=5), st.lists(paths, max_size=9))
@examples(300)
def test_layers_look_like_the_merged_snapshot(
    steps: list[dict[bytes, OwnEntry | None]], others: list[bytes]
) -> None:
    base, deltas, merged = layers(steps)
    found = LayeredSnapshot(base, deltas)
    check_same(found, merged)
    for path in others:
        assert found.lookup(path) == merged.lookup(path)
        assert found.child(0, path) == merged.child(0, path) if b"/" not in path else True
    for i in (-1, len(merged)):
        with pytest.raises(IndexError):
            found.stat(i)
    assert bytes(found.buffer) == bytes(merged.buffer)
    assert found.walk(0).tolist() == merged.walk(0).tolist()
    check_same(found, merged)


def test_few_lookups_do_not_merge_and_many_do(monkeypatch: pytest.MonkeyPatch) -> None:
    base, deltas, merged = layers([dict(oracle.SMALL), {b"c/new": OwnEntry(Kind.FOLDER)}])
    monkeypatch.setattr(layered, "_LOOKUPS_MAX", 100)
    found = LayeredSnapshot(base, deltas)
    at = found.lookup(b"c/new")
    assert found.stat(at) == merged.stat(merged.lookup(b"c/new"))
    assert found.children(found.lookup(b"c")) == merged.children(merged.lookup(b"c"))
    assert "merged" not in vars(found)
    for _ in range(100):
        found.stat(at)
    assert "merged" in vars(found)
    check_same(found, merged)
