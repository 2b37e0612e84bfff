"""`MetadataStore.forget` removes empty chunks, and only those."""

import uuid
from contextlib import closing
from pathlib import Path

import pytest

from diesel_fs.errors import BusyError, NoSuchDataset, NotFoundError
from diesel_fs.format.entries import Kind
from diesel_fs.storage.metadata.redis.bucket_scripts import READ_PIECE_FOLDERS, UNAPPLY
from diesel_fs.storage.metadata.redis.head_scripts import BEGIN, COMMIT
from diesel_fs.storage.metadata.redis.store import RedisMetadata
from diesel_fs.storage.metadata.store import MetadataStore, chunks_digest
from tests.storage.metadata.batches import (
    Chunk,
    Entry,
    big,
    check,
    chunk_by_purge,
    chunk_id,
    files,
    stored_entries,
    tombstones,
)
from tests.storage.metadata.metadata_stores import (
    FIRST,
    IDENTITY,
    NAME,
    STORES,
    Clock,
    Opener,
    commit,
)
from tests.storage.metadata.redis_servers import RedisServer, once, shared_cluster, shared_server
from tests.storage.metadata.watched_redis import WatchedLink, at, dies_at, watched_link

STEPS = {
    "BEGIN": BEGIN,
    "COMMIT": COMMIT,
    "READ_PIECE_FOLDERS": READ_PIECE_FOLDERS,
    "UNAPPLY": UNAPPLY,
}
"""The scripts of a removal in Redis, in their order; after COMMIT it is done."""


def forgotten(meta: MetadataStore, *numbers: int, tombstones: bool = False) -> set[int]:
    """Return those that the store does not know afterwards."""
    unknown = meta.forget(IDENTITY, map(chunk_id, numbers), tombstones=tombstones)
    return {number for number in numbers if chunk_id(number) in unknown}


def test_P1_only_empty_chunks_are_forgotten(meta: MetadataStore) -> None:
    one, two, three = files(1, b"a", b"d/b"), files(2, b"a", b"c"), files(3, b"d/b")
    nine = chunk_by_purge(9, (three, 0))
    before = commit(meta, one, two, three, nine)
    assert forgotten(meta, 1, 2, 3, 9, 77) == {1, 3, 77}
    after = meta.head(NAME)
    assert after.version > before
    check(meta, NAME, [two, nine])
    assert after.digest == chunks_digest([chunk_id(2), chunk_id(9)])
    assert after.newest == chunk_id(9)
    assert forgotten(meta, 1, 2, 3, 9, 77) == {1, 3, 77}
    assert meta.head(NAME) == after
    with pytest.raises(NotFoundError):
        meta.holes(IDENTITY, chunk_id(1))


def test_P5_a_forgotten_chunk_committed_again_is_empty(meta: MetadataStore) -> None:
    """Its object could not be deleted, so the next writer commits it again as an orphan."""
    one, two = files(1, b"a", b"d/b"), files(2, b"a", b"d/b", b"c")
    commit(meta, one, two)
    for _ in range(2):
        assert forgotten(meta, 1) == {1}
        check(meta, NAME, [two])
        commit(meta, one)
        check(meta, NAME, [one, two])
    since = meta.head(NAME).version
    assert forgotten(meta, 1) == {1}
    commit(meta, files(5, b"c"))
    assert set(stored_entries(meta.changes(IDENTITY, since).rows)) == {b"c"}
    assert meta.rebuild(NAME, IDENTITY, [two.batch(), files(5, b"c").batch()]) > since
    check(meta, NAME, [two, files(5, b"c")])


def test_the_greatest_chunk_is_never_forgotten(meta: MetadataStore) -> None:
    one, nine = files(1, b"a"), files(9, b"a")
    late = Chunk(10, (None, Entry(b"a")))
    commit(meta, one, nine, late, files(11, b"a"), Chunk(20, (Entry(b"x", 0, Kind.TOMBSTONE),)))
    assert forgotten(meta, 1, 9, 10, 11, 20, tombstones=True) == {1, 9, 10}
    assert meta.head(NAME).newest == chunk_id(20)


def test_Z7_tombstones_are_dropped_with_their_chunk_and_only_on_demand(meta: MetadataStore) -> None:
    one = files(1, b"a", b"d/b", b"d/c")
    dead = tombstones(5, b"a", b"d/b", b"never")
    commit(meta, one, dead, files(7, b"a"), files(8, b"d/c"))
    assert forgotten(meta, 1, 5) == {1}
    check(meta, NAME, [dead, files(7, b"a"), files(8, b"d/c")])
    assert forgotten(meta, 5, tombstones=True) == {5}
    check(meta, NAME, [files(7, b"a"), files(8, b"d/c")])
    paths = [b"a", b"d/b", b"never"]
    assert set(stored_entries(meta.lookup(IDENTITY, paths, tombstones=True))) == {b"a"}
    assert meta.children(IDENTITY, b"d", tombstones=True).names == [b"c"]
    commit(meta, dead)  # an orphan again
    check(meta, NAME, [dead, files(7, b"a"), files(8, b"d/c")])
    assert forgotten(meta, 5, tombstones=True) == {5}


def test_a_chunk_with_tombstones_and_a_file_stays(meta: MetadataStore) -> None:
    mixed = Chunk(2, (Entry(b"x", 0, Kind.TOMBSTONE), Entry(b"f")))
    commit(meta, mixed, files(9, b"z"))
    assert forgotten(meta, 2, tombstones=True) == set()
    commit(meta, chunk_by_purge(10, (mixed, 1)))
    assert forgotten(meta, 2) == set()
    check(meta, NAME, [mixed, files(9, b"z"), chunk_by_purge(10, (mixed, 1))])
    assert forgotten(meta, 2, tombstones=True) == {2}
    assert set(stored_entries(meta.lookup(IDENTITY, [b"x", b"f"], tombstones=True))) == {b"f"}


def test_Z4_a_part_of_an_incomplete_version_keeps_its_chunk(meta: MetadataStore) -> None:
    parts = big(1, b"big", 3)
    commit(meta, parts[0], parts[1], files(9, b"x"))
    assert forgotten(meta, 1, 2, tombstones=True) == set()
    copy = chunk_by_purge(10, (parts[0], 0))
    commit(meta, copy)
    assert forgotten(meta, 1, 2) == {1}
    check(meta, NAME, [parts[1], files(9, b"x"), copy])
    commit(meta, parts[2])
    check(meta, NAME, [*parts[1:], files(9, b"x"), copy])
    copies = [chunk_by_purge(11, (parts[1], 0)), chunk_by_purge(12, (parts[2], 0)), files(13, b"x")]
    commit(meta, *copies)
    assert forgotten(meta, 2, 3, 9, 10, 11, 12) == {2, 3, 9}
    check(meta, NAME, [copy, *copies])


def test_forgetting_waits_for_a_lock(meta: MetadataStore, open_meta: Opener) -> None:
    commit(meta, files(1, b"a"), files(2, b"a"))
    hasty = open_meta(deadline_s=0.5)  # long enough for all its requests
    with meta.lock_commits(IDENTITY, 30), pytest.raises(BusyError):
        hasty.forget(IDENTITY, [chunk_id(1)])
    assert hasty.forget(IDENTITY, [chunk_id(1)]) == {chunk_id(1)}
    hasty.close()
    with pytest.raises(NoSuchDataset):
        meta.forget(uuid.UUID(int=99), [chunk_id(1)])


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", ["redis", "redis-buckets", "redis-cluster"])
def test_P1_a_client_killed_in_forget(kind: str, step: str, tmp_path: Path, clock: Clock) -> None:
    """Before COMMIT ran in the head, nothing has happened; after it, the next client applies it."""
    other = STORES[kind](tmp_path, clock)()
    link = watched_link((shared_cluster() if kind == "redis-cluster" else shared_server()).url)
    killed = RedisMetadata(link)
    other.create(NAME, IDENTITY)
    one, dead = files(1, b"a", b"d/b"), tombstones(2, b"x", b"d/y")
    rest = [files(5, b"a", b"d/b"), files(6, b"e/z")]
    commit(killed, one, dead, *rest)
    link.before = dies_at(STEPS[step])
    with pytest.raises(KeyboardInterrupt):
        killed.forget(IDENTITY, [chunk_id(1), chunk_id(2)], tombstones=True)
    link.before = lambda _: None
    is_removed = step in ("READ_PIECE_FOLDERS", "UNAPPLY")
    check(other, NAME, rest if is_removed else [one, dead, *rest])
    commit(other, one)  # it is an orphan, and committed again
    check(other, NAME, [one, *rest] if is_removed else [one, dead, *rest])
    empty = {chunk_id(1), chunk_id(2)}
    assert killed.forget(IDENTITY, empty, tombstones=True) == empty
    check(killed, NAME, rest)
    commit(other, one, dead)
    check(killed, NAME, [one, dead, *rest])
    killed.close()
    other.close()


def test_a_slow_removal_does_not_undo_a_later_commit(
    shared: RedisServer, link: WatchedLink, stored: RedisMetadata
) -> None:
    """Others have applied it before, and have committed the chunk again."""
    rest = [files(5, b"a/x", b"b"), files(6, b"e/z")]
    commit(stored, *rest)
    done = list[bool]()

    def meanwhile() -> None:
        with closing(RedisMetadata.open(shared.url)) as other:
            check(other, NAME, rest)  # this applies the plan
            commit(other, FIRST)
            check(other, NAME, [FIRST, *rest])
        done.append(True)

    link.before = at(READ_PIECE_FOLDERS, once(meanwhile))
    stored.forget(IDENTITY, [FIRST.id])
    assert done, "nothing happened between the steps: proves nothing"
    check(stored, NAME, [FIRST, *rest])
