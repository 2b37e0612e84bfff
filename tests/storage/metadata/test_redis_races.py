"""Two clients of a Redis at once: one acts between two steps of the other."""

import contextlib
import itertools
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing

import pytest

from diesel_fs.errors import BusyError, UsageError
from diesel_fs.format.entries import ChunkId
from diesel_fs.storage.metadata.redis.bucket_scripts import APPLY, LoadedScript
from diesel_fs.storage.metadata.redis.head_scripts import (
    APPLIED,
    CLAIM_ABANDONED,
    COMMIT,
    READ_HEAD,
)
from diesel_fs.storage.metadata.redis.keys import DEAD_KEY, DatasetKeys
from diesel_fs.storage.metadata.redis.store import RedisMetadata
from diesel_fs.storage.metadata.store import CommitBatch
from tests.storage.metadata.batches import (
    Chunk,
    big,
    check,
    chunk_by_purge,
    files,
    stored_entries,
    tombstones,
)
from tests.storage.metadata.metadata_stores import IDENTITY, NAME, commit
from tests.storage.metadata.redis_servers import RedisServer, once
from tests.storage.metadata.watched_redis import (
    WatchedLink,
    at,
    commit_without_applying,
    dies_at,
    live_generation,
    make_older,
    watched_link,
)


@pytest.fixture
def meta(link: WatchedLink) -> Iterator[RedisMetadata]:
    with closing(RedisMetadata(link)) as store:
        store.create(NAME, IDENTITY)
        yield store


@pytest.fixture
def other(shared: RedisServer, meta: RedisMetadata) -> Iterator[RedisMetadata]:
    with closing(RedisMetadata.open(shared.url)) as store:
        yield store


@pytest.mark.parametrize(
    ("step", "theirs"),
    [
        (COMMIT, [files(1, b"a", b"b/c", size=5)]),  # the same chunk: it counts once
        (APPLIED, [files(2, b"a", b"d", size=9), tombstones(3, b"d")]),
    ],
    ids=["same chunk", "counts reported in another order"],
)
def test_another_writer_commits_between_two_steps_of_a_commit(
    link: WatchedLink,
    meta: RedisMetadata,
    other: RedisMetadata,
    step: LoadedScript,
    theirs: list[Chunk],
) -> None:
    ours = files(1, b"a", b"b/c", size=5)
    link.before = at(step, once(lambda: commit(other, *theirs)))
    version = commit(meta, ours)
    check(meta, NAME, [ours, *theirs])
    assert step != COMMIT or version == other.head(NAME).version


def test_a_rebuild_whose_lock_has_expired_includes_late_commits(
    meta: RedisMetadata, other: RedisMetadata, shared: RedisServer
) -> None:
    chunks = [files(number, b"f%d" % number) for number in (1, 2, 3)]
    commit(meta, chunks[0])
    late = list[Sequence[ChunkId]]()

    def batches() -> Iterator[CommitBatch]:
        yield chunks[0].batch()
        commit(other, chunks[1])

    def rest(some: Collection[ChunkId]) -> Iterator[CommitBatch]:
        late.append([*some])
        shared.client().delete(DatasetKeys(IDENTITY).commit_locks)
        if len(late) == 1:
            commit(other, chunks[2])
        yield from (chunk.batch() for chunk in chunks if chunk.id in some)

    meta.rebuild(NAME, IDENTITY, batches(), rest)
    assert late == [[chunks[1].id], [chunks[2].id]]
    check(meta, NAME, chunks)
    assert only_live_keys_exist(shared)


def test_a_commit_that_times_out_leaves_no_pieces(meta: RedisMetadata, shared: RedisServer) -> None:
    chunks = [files(number, b"f%d" % number) for number in (1, 2, 3)]

    def batches() -> Iterator[CommitBatch]:
        yield from ()
        commit(meta, chunks[0])

    def rest(_: Collection[ChunkId]) -> Iterator[CommitBatch]:
        yield chunks[0].batch()
        hasty = RedisMetadata.open(shared.url, deadline_s=0.1)
        with closing(hasty), pytest.raises(BusyError):
            commit(hasty, chunks[1])
        client = shared.client()
        assert client.hlen(DatasetKeys(IDENTITY).begun) == 0, "it has taken it back"
        assert not any(client.hlen(key) for key in client.scan_iter(b"dfs:*}:x"))

    meta.rebuild(NAME, IDENTITY, batches(), rest)
    commit(meta, chunks[2])
    check(meta, NAME, [chunks[0], chunks[2]])


@pytest.mark.parametrize("ahead_s", [-90, 0, 600])
def test_K1_locks_do_not_depend_on_the_clocks_of_hosts(
    meta: RedisMetadata, shared: RedisServer, ahead_s: int
) -> None:
    hasty = RedisMetadata.open(shared.url, deadline_s=0.1)
    other = RedisMetadata.open(
        shared.url, clock_ns=lambda: time.time_ns() + ahead_s * 10**9, deadline_s=0.1
    )
    with closing(hasty), closing(other):
        with other.lock_commits(IDENTITY, 60), pytest.raises(BusyError):
            commit(hasty, files(1, b"a"))
        with hasty.lock_commits(IDENTITY, 60), pytest.raises(BusyError):
            commit(other, files(1, b"a"))
        other.lock_commits(IDENTITY, 0.3)
        start = time.monotonic()
        commit(meta, files(1, b"a"))
        assert 0.2 < time.monotonic() - start < 5
        token = DatasetKeys(IDENTITY).commit_locks
        shared.client().hset(token, "of a clock that has gone back", time.time() + 3600)
        shared.client().hset(token, "of an unknown writer", "rubbish")
        commit(hasty, files(2, b"a"))
        with pytest.raises(UsageError):
            meta.lock_commits(IDENTITY, 3600)


def test_C18_a_slow_rebuild_of_few_rows_sends_heartbeats(
    meta: RedisMetadata, shared: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large files have one row in a chunk. In small: without a beat for 2 s it counts as dead."""
    monkeypatch.setattr("diesel_fs.storage.metadata.redis.shadow_state._HEARTBEAT_S", 0.2)
    monkeypatch.setattr("diesel_fs.storage.metadata.redis.shadow_state._ABANDONED_S", 2)
    commit(meta, files(1, b"x"))

    def batches() -> Iterator[CommitBatch]:
        for number in range(60):
            yield files(number + 1, b"x%d" % number).batch()
            time.sleep(0.05)
        with closing(RedisMetadata.open(shared.url, deadline_s=0.1)) as hasty:
            hasty.create("another", uuid.UUID(int=9))  # this removes abandoned generations

    meta.rebuild(NAME, IDENTITY, batches())
    assert meta.head(NAME).files == 60


@pytest.mark.parametrize("what", ["lookup", "children", "changes", "newer", "chunks", "holes"])
def test_a_reader_whose_generation_is_removed_reads_the_new_one(
    link: WatchedLink, meta: RedisMetadata, other: RedisMetadata, what: str
) -> None:
    chunks = [files(1, b"d/a", b"d/b"), files(2, b"d/a")]
    first = commit(meta, chunks[0])
    commit(meta, chunks[1])
    meanwhile = once(lambda: other.rebuild(NAME, IDENTITY, [chunk.batch() for chunk in chunks]))
    link.after = at(READ_HEAD, meanwhile)
    ask: dict[str, Callable[[], object]] = {
        "lookup": lambda: (
            [*stored_entries(meta.lookup(IDENTITY, [b"d/a", b"d/b"]))] == [b"d/a", b"d/b"]
        ),
        "children": lambda: meta.children(IDENTITY, b"d").names == [b"a", b"b"],
        "changes": lambda: len(meta.changes(IDENTITY, 0).rows) == 2,
        "newer": lambda: len(meta.changes(IDENTITY, first).rows) == 2,
        "chunks": lambda: [record.holes for record in meta.chunks(IDENTITY)] == [1, 0],
        "holes": lambda: meta.holes(IDENTITY, chunks[0].id).tolist() == [0],
    }
    assert ask[what]()


@pytest.mark.parametrize("extents", [1, 2])
def test_P6_copies_by_purge_are_applied_after_their_sources(
    meta: RedisMetadata, shared: RedisServer, extents: int
) -> None:
    """The sources were committed, but their writer died before it applied them."""
    sources = [files(1, b"a", b"b")] if extents == 1 else big(1, b"a", extents)
    for source in sources:
        commit_without_applying(shared.url, source.batch())
    nine = chunk_by_purge(9, (sources[0], 0))
    commit(meta, nine)
    check(meta, NAME, [*sources, nine])


def test_a_dataset_dropped_during_a_commit_gets_only_the_new_commit(
    link: WatchedLink, meta: RedisMetadata, other: RedisMetadata
) -> None:
    def again() -> None:
        other.drop(IDENTITY)
        other.create(NAME, IDENTITY)

    commit(meta, files(1, b"a"))
    link.before = at(COMMIT, once(again))
    commit(meta, files(2, b"b"))
    check(meta, NAME, [files(2, b"b")])


def test_keys_of_a_crashed_rebuild_are_removed_by_a_later_one(
    link: WatchedLink, meta: RedisMetadata, shared: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [files(number, *(b"%d/%d" % (number, i) for i in range(50))) for number in range(9)]

    def batches() -> Iterator[CommitBatch]:
        for chunk in chunks:
            yield chunk.batch()
        raise KeyboardInterrupt

    # So that keys are written before the end
    monkeypatch.setattr("diesel_fs.storage.metadata.redis.shadow_state._ROWS_AT_ONCE", 1)
    link.before = dies_at(CLAIM_ABANDONED)
    with pytest.raises(KeyboardInterrupt):
        meta.rebuild(NAME, IDENTITY, batches())
    link.before = lambda _: None
    assert not only_live_keys_exist(shared)
    meta.rebuild(NAME, IDENTITY, [chunk.batch() for chunk in chunks])
    assert not only_live_keys_exist(shared), "it may be at work still"
    make_older(shared.client(), DEAD_KEY, 3600)
    meta.rebuild(NAME, IDENTITY, [chunk.batch() for chunk in chunks])
    check(meta, NAME, chunks)
    assert only_live_keys_exist(shared)


def only_live_keys_exist(shared: RedisServer) -> bool:
    name = live_generation(shared.url).name
    keys = list(shared.client().scan_iter(b"dfs:*"))
    assert keys
    own = (b"dfs:{head}:", b"dfs:{" + name + b".")
    return all(key.startswith(own) and not key.startswith(b"dfs:{head}:k") for key in keys)


def test_a_read_that_others_keep_disturbing_locks_commits(
    shared: RedisServer, link: WatchedLink, meta: RedisMetadata
) -> None:
    numbers = itertools.count(1)
    locked_out = list[int]()

    def commit_one() -> None:
        number = next(numbers)
        with closing(RedisMetadata.open(shared.url, deadline_s=0.2)) as hasty:
            try:
                commit(hasty, files(number, b"f%d" % number))
            except BusyError:
                locked_out.append(number)

    link.after = at(READ_HEAD, commit_one)
    changes = meta.changes(IDENTITY, 0)
    assert len(locked_out) == 1
    assert len(changes.rows) == changes.head.files == locked_out[0] - 1
    commit(meta, files(50, b"after"))


def test_a_head_has_right_counts_while_others_commit(
    link: WatchedLink, meta: RedisMetadata, shared: RedisServer
) -> None:
    numbers, done = itertools.count(1), list[int]()
    others_link = watched_link(shared.url)
    others_link.before, others_link.deadline_s = dies_at(APPLY), 0.2

    def commit_one() -> None:
        number = next(numbers)
        with contextlib.suppress(BusyError):
            try:
                commit(another, files(number, b"f%d" % number))
            except KeyboardInterrupt:  # it has committed the chunk, and not applied it
                done.append(number)

    link.before = at(READ_HEAD, commit_one)
    with closing(RedisMetadata(others_link)) as another:
        assert meta.head(NAME).files == len(done) > 3
