"""Random histories of commits, in any order, give the state that `batches.fold` expects."""

import random
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.format.entries import ChunkId, Kind
from diesel_fs.storage.metadata.store import MetadataStore
from tests.examples import examples
from tests.storage.metadata.batches import (
    Chunk,
    Entry,
    big,
    check,
    chunk_by_purge,
    fold,
    stored_entries,
    without_tombstones,
)
from tests.storage.metadata.metadata_stores import IDENTITY, NAME, STORES, Clock
from tests.tiers import fast_first

PATHS = [b"f", b"a/f", b"a/b/f", b"a/b"]


@st.composite
def histories(draw: st.DrawFn) -> list[Chunk]:
    chunks = []
    for number in range(1, draw(st.integers(2, 6)) + 1):
        entries = []
        for path in draw(st.lists(st.sampled_from(PATHS), min_size=1, max_size=4)):
            kind = draw(st.sampled_from([Kind.FILE, Kind.FILE, Kind.TOMBSTONE, Kind.LINK]))
            entries.append(Entry(path, draw(st.integers(0, 9)), kind, target=b"t"))
        chunks.append(Chunk(number * 10, tuple(entries)))
    for start in draw(st.lists(st.integers(1, 5), unique=True, max_size=3)):
        chunks += big(start * 10 + 1, draw(st.sampled_from(PATHS)), draw(st.integers(2, 3)))
    for number in range(draw(st.integers(0, 3))):
        source = draw(st.sampled_from(chunks))
        place = draw(st.integers(0, len(source.entries) - 1))
        chunks.append(chunk_by_purge(100 + number, (source, place), known=draw(st.booleans())))
    return chunks


@examples(60)
@given(history=histories(), seed=st.integers(0, 2**32))
@pytest.mark.parametrize(
    ("kind", "entries_min"),
    fast_first(
        [("sqlite", 2), ("redis", 1), ("sqlite", 1), ("sqlite", 10**9), ("redis-buckets", 1)], 2
    ),
)
def test_L2_any_order_and_any_repetition_give_the_same_state(
    kind: str, entries_min: int, history: list[Chunk], seed: int
) -> None:
    with mock.patch("diesel_fs.storage.metadata.sqlite.runs.ENTRIES_MIN", entries_min):
        check_history(kind, history, seed)


def commit_in_groups(meta: MetadataStore, order: list[Chunk], dice: random.Random) -> None:
    start = 0
    while start < len(order):
        end = start + dice.choice([1, 1, 2, 3, len(order)])
        before = meta.head(NAME)
        version = meta.commit(IDENTITY, *(chunk.batch() for chunk in order[start:end]))
        assert (version > before.version) == (meta.head(NAME).chunks > before.chunks)
        start = end


def check_forgetting(meta: MetadataStore, chunks: list[Chunk]) -> None:
    state = fold(chunks)
    newest = max(state.holes)
    empty = {
        chunk.id
        for chunk in chunks
        if chunk.id != newest and len(state.holes[chunk.id]) == len(chunk.entries)
    }
    assert meta.forget(IDENTITY, map(ChunkId, state.holes)) == empty
    check(meta, NAME, [chunk for chunk in chunks if chunk.id not in empty])


def check_history(kind: str, history: list[Chunk], seed: int) -> None:
    dice = random.Random(seed)
    free = [chunk for chunk in history if not chunk.by_purge] * 2
    dice.shuffle(free)
    del free[: dice.randrange(3)]  # some may never come, most come twice
    stamps = {
        (chunk.stamp(place), entry.number)
        for chunk in free
        for place, entry in enumerate(chunk.entries)
        if entry
    }
    # Chunks that are known to be by purge are committed after their sources
    copies = [
        chunk
        for chunk in history
        if chunk.by_purge
        and all(e and (chunk.stamp(i), e.number) in stamps for i, e in enumerate(chunk.entries))
    ]
    order = [*free, *copies, *dice.sample(free, min(2, len(free)))]
    with TemporaryDirectory() as folder:
        meta = STORES[kind](Path(folder), Clock())()
        meta.create(NAME, IDENTITY)
        middle = dice.randrange(len(order))
        commit_in_groups(meta, order[: middle + 1], dice)
        check(meta, NAME, order[: middle + 1])
        base = meta.changes(IDENTITY, 0)
        if order[middle + 1 :]:
            commit_in_groups(meta, order[middle + 1 :], dice)
        check(meta, NAME, order)
        since = meta.changes(IDENTITY, base.head.version)
        merged = stored_entries(base.rows) | stored_entries(since.rows)
        assert without_tombstones(merged) == without_tombstones(fold(order).entries)
        unchanged = set(fold(order[: middle + 1]).entries.items()) & set(
            fold(order).entries.items()
        )
        assert not {path for path, _ in unchanged} & set(stored_entries(since.rows))
        check_forgetting(meta, order)
        meta.close()
