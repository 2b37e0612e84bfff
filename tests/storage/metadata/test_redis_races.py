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
from diesel_fs.storage.metadata.redis.bucket_scripts import APPLY
from diesel_fs.storage.metadata.redis.head_scripts import (
    APPLIED,
    CLAIM_ABANDONED,
    COMMIT,
    READ_HEAD,
)
from diesel_fs.storage.metadata.redis.keys import DEAD_KEY, DatasetKeys
from diesel_fs.storage.metadata.redis.store import RedisMetadata
from diesel_fs.storage.metadata.store import Batch
from tests.storage.metadata.batches import (
    big,
    check,
    chunk_by_purge,
    files,
    stored_entries,
    tombstones,
)
from tests.storage.metadata.metadata_stores import IDENTITY, NAME
from tests.storage.metadata.redis_servers import RedisServer, emptied_server, once, shared_server
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
def server() -> RedisServer:
    return emptied_server()


@pytest.fixture
def link(server: RedisServer) -> WatchedLink:
    """The connections of `meta`, whose steps a test can watch."""
    return watched_link(server.url)


@pytest.fixture
def meta(link: WatchedLink) -> Iterator[RedisMetadata]:
    with closing(RedisMetadata(link)) as store:
        store.create(NAME, IDENTITY)
        yield store


@pytest.fixture
def other(server: RedisServer, meta: RedisMetadata) -> Iterator[RedisMetadata]:
    with closing(RedisMetadata.open(server.url)) as store:
        yield store


def test_a_chunk_that_two_writers_commit_at_once_counts_once(
    link: WatchedLink, meta: RedisMetadata, other: RedisMetadata
) -> None:
    chunk = files(1, b"a", b"b/c")
    link.before = at(COMMIT, once(lambda: other.commit(IDENTITY, chunk.batch())))
    version = meta.commit(IDENTITY, chunk.batch())
    check(meta, NAME, [chunk])
    assert version == other.head(NAME).version


def test_counts_reported_in_another_order_are_right(
    link: WatchedLink, meta: RedisMetadata, other: RedisMetadata
) -> None:
    chunks = [files(1, b"a", size=5), files(2, b"a", b"b", size=9), tombstones(3, b"b")]

    def two() -> None:
        for chunk in chunks[1:]:
            other.commit(IDENTITY, chunk.batch())

    link.before = at(APPLIED, once(two))
    meta.commit(IDENTITY, chunks[0].batch())
    check(meta, NAME, chunks)


def test_a_rebuild_whose_lock_has_expired_includes_late_commits(
    meta: RedisMetadata, other: RedisMetadata, server: RedisServer
) -> None:
    chunks = [files(number, b"f%d" % number) for number in (1, 2, 3)]
    meta.commit(IDENTITY, chunks[0].batch())
    late = list[Sequence[ChunkId]]()

    def batches() -> Iterator[Batch]:
        yield chunks[0].batch()
        other.commit(IDENTITY, chunks[1].batch())

    def rest(some: Collection[ChunkId]) -> Iterator[Batch]:
        late.append([*some])
        server.client().delete(DatasetKeys(IDENTITY).commit_locks)
        if len(late) == 1:
            other.commit(IDENTITY, chunks[2].batch())
        yield from (chunk.batch() for chunk in chunks if chunk.id in some)

    meta.rebuild(NAME, IDENTITY, batches(), rest)
    assert late == [[chunks[1].id], [chunks[2].id]]
    check(meta, NAME, chunks)
    assert only_live_keys_exist(server)


def test_a_commit_that_times_out_at_a_lock_leaves_no_pieces(
    meta: RedisMetadata, server: RedisServer
) -> None:
    chunks = [files(number, b"f%d" % number) for number in (1, 2, 3)]

    def batches() -> Iterator[Batch]:
        yield from ()
        meta.commit(IDENTITY, chunks[0].batch())

    def rest(_: Collection[ChunkId]) -> Iterator[Batch]:
        yield chunks[0].batch()
        hasty = RedisMetadata.open(server.url, deadline_s=0.1)
        with closing(hasty), pytest.raises(BusyError):
            hasty.commit(IDENTITY, chunks[1].batch())
        assert server.client().hlen(DatasetKeys(IDENTITY).begun) == 0, "it has taken it back"
        assert staged(server) == 0

    meta.rebuild(NAME, IDENTITY, batches(), rest)
    meta.commit(IDENTITY, chunks[2].batch())
    check(meta, NAME, [chunks[0], chunks[2]])


@pytest.mark.parametrize("ahead_s", [-90, 0, 600])
def test_K1_locks_do_not_depend_on_the_clocks_of_hosts(
    meta: RedisMetadata, server: RedisServer, ahead_s: int
) -> None:
    hasty = RedisMetadata.open(server.url, deadline_s=0.1)
    other = RedisMetadata.open(
        server.url, clock_ns=lambda: time.time_ns() + ahead_s * 10**9, deadline_s=0.1
    )
    with closing(hasty), closing(other):
        with other.lock_commits(IDENTITY, 60), pytest.raises(BusyError):
            hasty.commit(IDENTITY, files(1, b"a").batch())
        with hasty.lock_commits(IDENTITY, 60), pytest.raises(BusyError):
            other.commit(IDENTITY, files(1, b"a").batch())
        other.lock_commits(IDENTITY, 0.3)
        start = time.monotonic()
        meta.commit(IDENTITY, files(1, b"a").batch())
        assert 0.2 < time.monotonic() - start < 5
        token = DatasetKeys(IDENTITY).commit_locks
        server.client().hset(token, "of a clock that has gone back", time.time() + 3600)
        server.client().hset(token, "of an unknown writer", "rubbish")
        hasty.commit(IDENTITY, files(2, b"a").batch())
        with pytest.raises(UsageError):
            meta.lock_commits(IDENTITY, 3600)


def test_C18_a_slow_rebuild_of_few_rows_sends_heartbeats(
    meta: RedisMetadata, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With large files a chunk has one row. In small: after 2 s without heartbeats it is taken for
    dead.
    """
    monkeypatch.setattr("diesel_fs.storage.metadata.redis.shadow_state._HEARTBEAT_S", 0.2)
    monkeypatch.setattr("diesel_fs.storage.metadata.redis.shadow_state._ABANDONED_S", 2)
    meta.commit(IDENTITY, files(1, b"x").batch())

    def batches() -> Iterator[Batch]:
        for number in range(60):
            yield files(number + 1, b"x%d" % number).batch()
            time.sleep(0.05)
        with closing(RedisMetadata.open(server.url, deadline_s=0.1)) as hasty:
            hasty.create("another", uuid.UUID(int=9))  # this removes abandoned generations

    meta.rebuild(NAME, IDENTITY, batches())
    assert meta.head(NAME).files == 60


@pytest.mark.parametrize("what", ["lookup", "children", "changes", "newer", "chunks", "holes"])
def test_a_reader_whose_generation_is_removed_reads_the_new_one(
    link: WatchedLink, meta: RedisMetadata, other: RedisMetadata, what: str
) -> None:
    """It never reads an empty state."""
    chunks = [files(1, b"d/a", b"d/b"), files(2, b"d/a")]
    first = meta.commit(IDENTITY, chunks[0].batch())
    meta.commit(IDENTITY, chunks[1].batch())
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
    meta: RedisMetadata, server: RedisServer, extents: int
) -> None:
    """The sources were committed, but their writer died before it applied them."""
    sources = [files(1, b"a", b"b")] if extents == 1 else big(1, b"a", extents)
    for source in sources:
        commit_without_applying(server.url, source.batch())
    nine = chunk_by_purge(9, (sources[0], 0))
    meta.commit(IDENTITY, nine.batch())
    check(meta, NAME, [*sources, nine])


def test_a_dataset_dropped_during_a_commit_gets_only_the_new_commit(
    link: WatchedLink, meta: RedisMetadata, other: RedisMetadata
) -> None:
    """It is dropped, and made again with the same identity, between two steps of a commit."""

    def again() -> None:
        other.drop(IDENTITY)
        other.create(NAME, IDENTITY)

    meta.commit(IDENTITY, files(1, b"a").batch())
    link.before = at(COMMIT, once(again))
    meta.commit(IDENTITY, files(2, b"b").batch())
    check(meta, NAME, [files(2, b"b")])


def test_keys_of_a_crashed_rebuild_are_removed_by_a_later_one(
    link: WatchedLink, meta: RedisMetadata, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [files(number, *(b"%d/%d" % (number, i) for i in range(50))) for number in range(9)]

    def batches() -> Iterator[Batch]:
        for chunk in chunks:
            yield chunk.batch()
        raise KeyboardInterrupt

    # So that keys are written before the end
    monkeypatch.setattr("diesel_fs.storage.metadata.redis.shadow_state._ROWS_AT_ONCE", 1)
    link.before = dies_at(CLAIM_ABANDONED)
    with pytest.raises(KeyboardInterrupt):
        meta.rebuild(NAME, IDENTITY, batches())
    link.before = lambda _: None
    assert not only_live_keys_exist(server)
    meta.rebuild(NAME, IDENTITY, [chunk.batch() for chunk in chunks])
    assert not only_live_keys_exist(server), "it may be at work still"
    make_older(server.client(), DEAD_KEY, 3600)
    meta.rebuild(NAME, IDENTITY, [chunk.batch() for chunk in chunks])
    check(meta, NAME, chunks)
    assert only_live_keys_exist(server)


def staged(server: RedisServer) -> int:
    """How many pieces wait to be applied."""
    client = server.client()
    return sum(int(client.hlen(key)) for key in client.scan_iter(b"dfs:*}:x"))


def only_live_keys_exist(server: RedisServer) -> bool:
    """Whether all keys are in the head's slot or of the live generation."""
    name = live_generation(server.url).name
    keys = list(server.client().scan_iter(b"dfs:*"))
    assert keys
    own = (b"dfs:{head}:", b"dfs:{" + name + b".")
    return all(key.startswith(own) and not key.startswith(b"dfs:{head}:k") for key in keys)


def test_a_read_that_others_keep_disturbing_locks_commits(
    link: WatchedLink, meta: RedisMetadata, other: RedisMetadata
) -> None:
    """Also a read of the head, if there is always a commit that is not applied yet."""
    numbers = itertools.count(1)
    locked_out = list[int]()

    def commit_one() -> None:
        number = next(numbers)
        with closing(RedisMetadata.open(shared_server().url, deadline_s=0.2)) as hasty:
            try:
                hasty.commit(IDENTITY, files(number, b"f%d" % number).batch())
            except BusyError:
                locked_out.append(number)

    link.after = at(READ_HEAD, commit_one)
    changes = meta.changes(IDENTITY, 0)
    assert len(locked_out) == 1
    assert len(changes.rows) == changes.head.files == locked_out[0] - 1
    other.commit(IDENTITY, files(50, b"after").batch())


def test_a_head_has_right_counts_while_others_commit(
    link: WatchedLink, meta: RedisMetadata, server: RedisServer
) -> None:
    numbers, done = itertools.count(1), list[int]()
    others_link = watched_link(server.url)
    others_link.before, others_link.deadline_s = dies_at(APPLY), 0.2

    def commit_one() -> None:
        number = next(numbers)
        with contextlib.suppress(BusyError):
            try:
                another.commit(IDENTITY, files(number, b"f%d" % number).batch())
            except KeyboardInterrupt:  # it has committed the chunk, and not applied it
                done.append(number)

    link.before = at(READ_HEAD, commit_one)
    with closing(RedisMetadata(others_link)) as another:
        assert meta.head(NAME).files == len(done) > 3
