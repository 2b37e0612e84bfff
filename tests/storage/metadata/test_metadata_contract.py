"""The promises of `MetadataStore`'s docstrings, checked for every kind of metadata store.

A new kind of store is one more entry of `metadata_stores.STORES`.
"""

import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from xxhash import xxh3_128_intdigest

from diesel_fs.errors import (
    BusyError,
    ConflictError,
    CorruptError,
    MetadataError,
    NoSuchDataset,
    NotFoundError,
    UsageError,
)
from diesel_fs.format.chunk_id import stamp as chunk_stamp
from diesel_fs.format.entries import EXTENT, RECORD, Kind
from diesel_fs.storage.metadata.redis.store import RedisMetadata
from diesel_fs.storage.metadata.store import CommitBatch, MetadataStore, chunks_digest
from tests.forks import exit_code, fork, in_child
from tests.rows import each_row
from tests.storage.metadata.batches import (
    Chunk,
    Entry,
    big,
    check,
    chunk_by_purge,
    chunk_id,
    files,
    fold,
    stored_entries,
    tombstones,
)
from tests.storage.metadata.metadata_stores import IDENTITY, NAME, NOW_NS, Clock, Opener, commit

# Datasets


def test_a_new_dataset_is_empty(meta: MetadataStore) -> None:
    head = meta.head(NAME)
    assert (head.identity, head.name, head.version) == (IDENTITY, NAME, 0)
    assert (head.files, head.bytes, head.chunks, head.digest) == (0, 0, 0, 0)
    assert head.newest == bytes(16)
    assert len(meta.changes(IDENTITY, 0).rows) == 0
    assert meta.chunks(IDENTITY) == []
    assert len(meta.children(IDENTITY, b"")) == 0


def test_now_s_is_the_time_of_the_store(meta: MetadataStore) -> None:
    """Versions are made by that clock, and not by this process's."""
    before_s = time.time()
    assert before_s - 1 <= meta.now_s() <= time.time() + 1


def test_creating_is_idempotent_and_never_takes_over(meta: MetadataStore) -> None:
    commit(meta, files(1, b"a"))
    assert meta.create(NAME, IDENTITY) == meta.head(NAME)
    with pytest.raises(ConflictError):
        meta.create(NAME, uuid.UUID(int=8))
    with pytest.raises(ConflictError):
        meta.create("other", IDENTITY)
    meta.create("other", uuid.UUID(int=8))
    with pytest.raises(ConflictError):
        meta.create("other", IDENTITY)
    assert [head.name for head in meta.heads()] == [NAME, "other"]
    assert meta.head(NAME).files == 1


def test_datasets_do_not_see_each_other(meta: MetadataStore) -> None:
    other = meta.create("other", uuid.UUID(int=8)).identity
    commit(meta, files(1, b"a/x"), files(2, b"a/y"))
    meta.commit(other, files(1, b"a/z").batch())  # the same chunk ID, in another dataset
    check(meta, NAME, [files(1, b"a/x"), files(2, b"a/y")])
    check(meta, "other", [files(1, b"a/z")])
    assert meta.children(IDENTITY, b"a").names == [b"x", b"y"]
    assert set(stored_entries(meta.changes(IDENTITY, 1).rows)) == {b"a/x", b"a/y"}
    meta.drop(other)
    check(meta, NAME, [files(1, b"a/x"), files(2, b"a/y")])


def test_L5_a_dropped_dataset_takes_no_commit(meta: MetadataStore) -> None:
    commit(meta, files(1, b"a/x"))
    meta.drop(IDENTITY)
    meta.drop(IDENTITY)
    assert meta.heads() == []
    calls: list[Callable[[], object]] = [
        lambda: meta.head(NAME),
        lambda: commit(meta, files(2, b"a/x")),
        lambda: meta.lookup(IDENTITY, [b"a/x"]),
        lambda: meta.children(IDENTITY, b"a"),
        lambda: meta.changes(IDENTITY, 0),
        lambda: meta.chunks(IDENTITY),
        lambda: meta.holes(IDENTITY, chunk_id(1)),
        lambda: meta.lock_commits(IDENTITY, 1),
    ]
    for call in calls:
        with pytest.raises(NoSuchDataset):
            call()
    again = uuid.UUID(int=9)
    assert meta.create(NAME, again).version == 0
    assert len(meta.changes(again, 0).rows) == 0
    meta.commit(again, files(1, b"a/y").batch())
    check(meta, NAME, [files(1, b"a/y")])


def test_a_closed_store_raises(meta: MetadataStore) -> None:
    meta.close()
    meta.close()
    with pytest.raises(MetadataError, match="closed"):
        meta.heads()


def test_Z9_parent_and_child_of_a_fork_can_both_commit(meta: MetadataStore) -> None:
    commit(meta, files(1, b"f1"))

    def use() -> None:
        commit(meta, files(2, b"f2"))
        check(meta, NAME, [files(1, b"f1"), files(2, b"f2")])
        assert in_child(lambda: commit(meta, files(3, b"f3"))) == 0
        meta.close()

    child = fork(use)
    for _ in range(50):
        assert meta.head(NAME).name == NAME
    assert exit_code(child) == 0
    commit(meta, files(4, b"f4"))
    check(meta, NAME, [files(i, b"f%d" % i) for i in (1, 2, 3, 4)])


def test_a_commit_is_seen_by_another_handle(meta: MetadataStore, open_meta: Opener) -> None:
    chunks = [
        Chunk(
            1,
            (
                Entry(b"", 0, Kind.FOLDER),  # the root's own entry
                Entry(b"train", 0, Kind.FOLDER),
                Entry(b"train/a.png", 4096),
                Entry(b"train/empty", 0),
                Entry(b"train/link", 5, Kind.LINK, target=b"a.png"),
                Entry(b"odd/\xff\n\t\"' \x1b", 3),
            ),
        )
    ]
    commit(meta, *chunks)
    other = open_meta()
    check(other, NAME, chunks)
    other.close()


def test_missing_returns_unknown_chunks_in_their_order(meta: MetadataStore) -> None:
    commit(meta, files(1, b"a"), files(3, b"b"))
    assert meta.missing(IDENTITY, [*map(chunk_id, (4, 3, 2, 1))]) == [chunk_id(4), chunk_id(2)]
    many = [*map(chunk_id, range(200))]
    assert meta.missing(IDENTITY, many) == [id_ for id_ in many if id_ not in (many[1], many[3])]
    with pytest.raises(NoSuchDataset):
        meta.missing(uuid.UUID(int=99), [chunk_id(1)])
    with pytest.raises(NotFoundError):
        meta.holes(IDENTITY, chunk_id(2))


def test_L7_a_chunk_counts_once(meta: MetadataStore) -> None:
    chunks = [files(1, b"a", b"b", size=10), files(2, b"a", size=5)]
    version = commit(meta, *chunks)
    before = meta.head(NAME)
    assert commit(meta, *chunks, *reversed(chunks)) == version
    assert meta.head(NAME) == before
    assert (before.files, before.bytes, before.chunks) == (2, 15, 2)
    check(meta, NAME, chunks)


def test_the_head_has_counts_digest_and_newest_chunk(meta: MetadataStore) -> None:
    order = [5, 2, 9, 3]
    commit(meta, *(files(number, b"f%d" % number) for number in order))
    head = meta.head(NAME)
    digest = sum(xxh3_128_intdigest(chunk_id(number)) for number in order) % 2**128
    assert (head.chunks, head.digest, head.newest) == (4, digest, chunk_id(9))
    assert chunks_digest(map(chunk_id, sorted(order))) == digest
    first = meta.chunks(IDENTITY)[0]
    assert first == (chunk_id(2), 1002, 2, 1, 0)


def test_K1_versions_rise_though_the_clock_goes_back(meta: MetadataStore, clock: Clock) -> None:
    versions = []
    for number, step_ns in enumerate((0, 0, 10**9, -(10**9), -3600 * 10**9, -(10**17), 0, 10**17)):
        clock.ns += step_ns
        versions.append(commit(meta, files(number + 1, b"f")))
    assert versions == sorted(set(versions))
    assert versions[0] == NOW_NS // 1000
    assert versions[2] == NOW_NS // 1000 + 10**6
    assert meta.head(NAME).version == versions[-1]


def test_chunks_committed_together_make_one_version(meta: MetadataStore) -> None:
    first = [files(1, b"d/a", b"d/b"), files(2, b"d/b", b"e/c")]
    before = commit(meta, *first)
    big_parts = big(5, b"d/big", 2)
    together = [
        files(8, b"new/z", b"new/y", b"d/b"),
        first[1],
        *big_parts,
        files(3, b"d/a", b"new/a", b"new/z"),
        tombstones(7, b"e/c"),
        files(9, b"new/x", size=3),
        files(3, b"d/a", b"new/a", b"new/z"),
    ]
    after = meta.commit(IDENTITY, *(chunk.batch() for chunk in together))
    assert after == meta.head(NAME).version == before + 1  # the clock stands
    check(meta, NAME, [*first, *together])
    paths = set(stored_entries(meta.changes(IDENTITY, before).rows))
    assert paths == {b"d/a", b"d/b", b"d/big", b"e/c", b"new/a", b"new/x", b"new/y", b"new/z"}
    assert len(meta.changes(IDENTITY, after).rows) == 0
    assert meta.commit(IDENTITY, *(chunk.batch() for chunk in reversed(together))) == after
    assert meta.commit(IDENTITY) == after


def test_A6_chunks_committed_together_are_committed_all_or_none(meta: MetadataStore) -> None:
    commit(meta, files(1, b"a"))
    before = meta.head(NAME)
    spoilt = files(4, b"late").batch()
    rows = replace(spoilt.rows, folder=np.array([7], np.uint32))  # a folder that it has not
    broken = replace(spoilt, rows=rows)
    with pytest.raises(IndexError):
        meta.commit(IDENTITY, files(2, b"a", b"b").batch(), files(3, b"c").batch(), broken)
    assert meta.head(NAME) == before
    check(meta, NAME, [files(1, b"a")])
    commit(meta, files(3, b"c"))
    check(meta, NAME, [files(1, b"a"), files(3, b"c")])


def test_a_batch_that_contradicts_itself_changes_nothing(meta: MetadataStore) -> None:
    part = Chunk(1, (Entry(b"big", 9, extents=2, number=1),)).batch()
    rows = part.rows
    for tails in ({}, {0: b"short"}, {0: bytes(64)}):
        bad = type(rows)(
            rows.folders, rows.folder, rows.names, rows.records, rows.chunk, rows.chunks, tails
        )
        with pytest.raises(UsageError):
            meta.commit(IDENTITY, type(part)(part.chunk, 0, bad, part.stamps))
    stamps = {1: chunk_stamp(chunk_id(1), 1)}  # of a row that is not there
    with pytest.raises(UsageError):
        meta.commit(IDENTITY, files(2, b"a").batch(), type(part)(part.chunk, 0, rows, stamps))
    assert meta.head(NAME).version == 0


# States

PARTS, SHORT, ONE = big(2, b"big", 3), big(14, b"big", 2), files(1, b"a", b"b", b"c", size=100)
HALF = big(1, b"half", 2)

HISTORIES: dict[str, list[Chunk]] = {
    "places that no row names": [Chunk(1, (None, Entry(b"a"), None, Entry(b"b")))],
    "a path twice in a chunk": [
        files(1, b"a"),
        Chunk(2, (Entry(b"a", 1), Entry(b"a", 2), Entry(b"b"), Entry(b"b"))),
    ],
    "overwritten and deleted": [
        ONE,
        files(2, b"a", size=1),
        tombstones(3, b"b", b"never"),
        tombstones(4, b"b"),  # L6
        Chunk(5, (Entry(b"c", 3, Kind.LINK, target=b"a"),)),
        files(6, b"b", size=50),
    ],
    "a large file over a small one": [files(1, b"big", size=3), PARTS[2], PARTS[0], PARTS[1]],
    "a large file whose last part comes too late": [
        *(PARTS[0], SHORT[1], PARTS[1], SHORT[0]),
        PARTS[2],  # the entry has a greater stamp
    ],
    "an incomplete large file": [*PARTS[:2], files(7, b"big", b"x"), files(0, b"big")],
    "all extents in one chunk": [
        Chunk(1, tuple(Entry(b"big", 9, number=i, extents=3, first=(1, 0)) for i in range(3)))
    ],
    "extents of two versions in one chunk": [
        HALF[0],
        Chunk(2, (*HALF[1].entries, Entry(b"half", 50, number=0, extents=2))),
        Chunk(3, (Entry(b"half", 50, number=1, extents=2, first=(2, 1)),)),
    ],
    "an entry copied by purge": [ONE, files(2, b"b"), chunk_by_purge(9, (ONE, 0))],
    "copies by purge of overwritten or deleted entries": [
        *(ONE, files(5, b"a"), tombstones(6, b"b")),
        chunk_by_purge(9, (ONE, 0), (ONE, 1), (ONE, 2)),
    ],
    "extents copied by purge": [
        *PARTS,
        chunk_by_purge(10, (PARTS[1], 0)),
        chunk_by_purge(11, (PARTS[0], 0)),
        files(20, b"big"),
    ],
    "a chunk by purge before its sources": [
        chunk_by_purge(9, (ONE, 0), (PARTS[1], 0), known=False),
        *(ONE, PARTS[1], PARTS[0], PARTS[2]),
    ],
}


@each_row("history", HISTORIES.values(), ids=[*HISTORIES])
def test_L3_Z4_Z6_Z7_each_commit_gives_the_state_of_all_chunks(
    meta: MetadataStore, history: list[Chunk]
) -> None:
    meta.drop(IDENTITY)
    meta.create(NAME, IDENTITY)
    for number, chunk in enumerate(history):
        before, entries = meta.head(NAME).version, fold(history[:number]).entries.items()
        commit(meta, chunk)
        check(meta, NAME, history[: number + 1])
        changed = dict(fold(history[: number + 1]).entries.items() - entries)
        assert set(stored_entries(meta.changes(IDENTITY, before).rows)) == set(changed)


def test_P6_Z7_a_copy_by_purge_never_inserts_an_entry(meta: MetadataStore) -> None:
    commit(meta, files(5, b"a"))
    lost = files(3, b"lost")
    commit(meta, chunk_by_purge(10, (lost, 0)))  # its tombstone may have been dropped
    assert len(meta.lookup(IDENTITY, [b"lost"], tombstones=True)) == 0
    assert meta.holes(IDENTITY, chunk_id(10)).tolist() == [0]
    commit(meta, chunk_by_purge(11, (files(7, b"a"), 0)))  # of chunk 7, which the store has lost
    assert stored_entries(meta.lookup(IDENTITY, [b"a"]))[b"a"].chunk == chunk_id(5)
    commit(meta, *(chunk_by_purge(12 + i, (part, 0)) for i, part in enumerate(big(8, b"lost", 2))))
    assert len(meta.lookup(IDENTITY, [b"lost"])) == 0
    assert meta.holes(IDENTITY, chunk_id(12)).tolist() == [0]


def test_a_rebuild_gives_the_same_state_and_is_newer(meta: MetadataStore, clock: Clock) -> None:
    chunks = [files(1, b"a", b"x/b"), *big(2, b"a", 2), tombstones(5, b"x/b"), files(6, b"x/b")]
    before = commit(meta, *chunks, files(7, b"lost"))
    clock.ns -= 10**9  # K1
    order = [*reversed(chunks), chunks[0]]
    after = meta.rebuild(NAME, IDENTITY, (chunk.batch() for chunk in order))
    assert meta.head(NAME).version == after > before
    check(meta, NAME, chunks)
    fresh = uuid.UUID(int=8)
    meta.rebuild("other", fresh, [chunk.batch() for chunk in chunks])
    check(meta, "other", chunks)
    with pytest.raises(ConflictError):
        meta.rebuild(NAME, fresh, [])


def test_C18_a_failed_rebuild_leaves_the_old_state(meta: MetadataStore) -> None:
    commit(meta, files(1, b"a"), files(2, b"b"))
    before = meta.head(NAME)

    def broken() -> Iterator[CommitBatch]:
        yield files(2, b"b").batch()
        assert meta.head(NAME) == before  # readers do not see half of it
        raise CorruptError("a chunk is damaged")

    with pytest.raises(CorruptError):
        meta.rebuild(NAME, IDENTITY, broken())
    assert meta.head(NAME) == before
    check(meta, NAME, [files(1, b"a"), files(2, b"b")])


def test_lookup_returns_existing_entries_in_the_order_of_paths(meta: MetadataStore) -> None:
    chunk = files(1, b"a/x", b"b", b"a/y", b"gone")
    commit(meta, chunk, tombstones(2, b"gone"))
    wanted = [b"b", b"a/none", b"a/y", b"no/where", b"gone", b"a", b"a/x", b"b", b"", b"b/x"]
    rows = meta.lookup(IDENTITY, wanted)
    assert [rows.path(i) for i in range(len(rows))] == [b"b", b"a/y", b"a/x"]
    assert list(rows.stamps) == [chunk.stamp(1), chunk.stamp(2), chunk.stamp(0)]
    rows = meta.lookup(IDENTITY, [b"gone"], tombstones=True)
    assert rows.records["kind"].tolist() == [Kind.TOMBSTONE]


def kinds(meta: MetadataStore, folder: bytes) -> dict[bytes, Kind]:
    rows = meta.children(IDENTITY, folder)
    assert [*rows.names] == sorted(rows.names)
    assert all(
        rows.path(i) == (folder + b"/" if folder else b"") + n for i, n in enumerate(rows.names)
    )
    return dict(zip(rows.names, map(Kind, rows.records["kind"].tolist()), strict=True))


def test_children_are_those_of_one_folder_with_implied_folders(meta: MetadataStore) -> None:
    commit(
        meta,
        Chunk(1, (Entry(b"", 0, Kind.FOLDER), Entry(b"own", 0, Kind.FOLDER), Entry(b"own/f"))),
        files(2, b"deep/er/est/f", b"top", b"dead/er/f", b"own/sub/f"),
        tombstones(3, b"dead/er/f"),
    )
    assert kinds(meta, b"") == {b"deep": Kind.FOLDER, b"own": Kind.FOLDER, b"top": Kind.FILE}
    assert kinds(meta, b"deep") == {b"er": Kind.FOLDER}
    assert kinds(meta, b"own") == {b"f": Kind.FILE, b"sub": Kind.FOLDER}
    assert kinds(meta, b"dead") == kinds(meta, b"nothing") == kinds(meta, b"top") == {}
    rows = meta.children(IDENTITY, b"deep")
    assert rows.records[0]["mode"] == 0o755
    assert rows.chunks[rows.chunk[0]] == bytes(16)
    rows = meta.children(IDENTITY, b"dead/er", tombstones=True)
    assert rows.names == [b"f"]


def test_a_path_that_is_file_and_folder_is_shown_as_a_folder(meta: MetadataStore) -> None:
    commit(meta, files(1, b"a", b"a/f", b"b/f"), tombstones(2, b"b"))
    assert kinds(meta, b"") == {b"a": Kind.FOLDER, b"b": Kind.FOLDER}
    commit(meta, tombstones(3, b"a/f"))
    assert kinds(meta, b"") == {b"a": Kind.FILE, b"b": Kind.FOLDER}


def test_changes_name_all_chunks_and_only_new_entries(meta: MetadataStore) -> None:
    first = commit(meta, files(1, b"a", b"b"))
    last = commit(meta, files(2, b"b"), tombstones(3, b"a"))
    changes = meta.changes(IDENTITY, first)
    assert changes.head == meta.head(NAME)
    assert set(stored_entries(changes.rows)) == {b"a", b"b"}
    assert sorted(changes.chunks) == [(chunk_id(i), 1000 + i) for i in (1, 2, 3)]
    assert len(meta.changes(IDENTITY, last).rows) == 0
    assert len(meta.changes(IDENTITY, last).chunks) == 3
    assert set(stored_entries(meta.changes(IDENTITY, 0).rows)) == {b"b"}


def test_H9_paths_may_have_a_thousand_levels(meta: MetadataStore) -> None:
    deep = b"/".join(b"%d" % level for level in range(1000))
    commit(meta, files(1, deep + b"/f", deep))
    check(meta, NAME, [files(1, deep + b"/f", deep)])
    assert kinds(meta, b"") == {b"0": Kind.FOLDER}


def test_commits_wait_until_a_lock_is_released(
    meta: MetadataStore, open_meta: Opener, pool: ThreadPoolExecutor
) -> None:
    meta.create("other", uuid.UUID(int=8))
    hasty = open_meta(deadline_s=0.3)
    with meta.lock_commits(IDENTITY, 30), meta.lock_commits(IDENTITY, 20) as second:
        second.release()
        with pytest.raises(BusyError):
            commit(hasty, files(1, b"a"))
        hasty.commit(uuid.UUID(int=8), files(1, b"a").batch())
        waiting = pool.submit(commit, meta, files(2, b"b"))
        assert meta.changes(IDENTITY, 0).head.version == 0
    waiting.result()
    commit(hasty, files(1, b"a"))
    check(hasty, NAME, [files(1, b"a"), files(2, b"b")])
    hasty.close()


def test_a_lock_expires_even_if_the_clock_goes_back(
    meta: MetadataStore, open_meta: Opener, clock: Clock
) -> None:
    by_redis = isinstance(meta, RedisMetadata)  # its own clock counts, and goes as it goes
    hasty = open_meta(deadline_s=0.05)
    meta.lock_commits(IDENTITY, 1 if by_redis else 10)
    with pytest.raises(BusyError):
        commit(hasty, files(1, b"a"))
    clock.ns += 11 * 10**9
    time.sleep(1.1 if by_redis else 0)
    commit(hasty, files(1, b"a"))
    meta.lock_commits(IDENTITY, 0.1 if by_redis else 60)
    clock.ns -= 3600 * 10**9  # K1
    time.sleep(0.2 if by_redis else 0)
    commit(hasty, files(2, b"a"))
    with pytest.raises(UsageError):
        meta.lock_commits(IDENTITY, 3600)
    hasty.close()


def test_records_have_the_size_that_stores_rely_on() -> None:
    assert (RECORD.itemsize, EXTENT.itemsize) == (48, 64)
