"""Data that Redis loses or damages is noticed: reads are complete or raise an error.

Keys of a dataset in Redis: `...}:x` has the pieces of commits that are not applied yet,
`...}:e:` the entries of a folder, `...}:p` and `...}:q` parts of files of several extents. A
*plan* here is the list of pieces of one commit, which any client can apply.
"""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from redis import Redis

from diesel_fs.errors import CorruptError, DieselError, MetadataBehind, NoSpaceError
from diesel_fs.format.entries import Rows
from diesel_fs.storage.metadata.redis.head_scripts import APPLIED, COMMIT, REPLACE_LIVE
from diesel_fs.storage.metadata.redis.keys import DatasetKeys
from diesel_fs.storage.metadata.redis.link import RedisCommand
from diesel_fs.storage.metadata.redis.store import RedisMetadata
from diesel_fs.storage.metadata.store import StoreRestarted
from tests.forks import within
from tests.rows import each_row
from tests.storage.metadata.batches import Chunk, Entry, big, check, commit_and_repair, files
from tests.storage.metadata.metadata_stores import FIRST, IDENTITY, NAME, commit, filled
from tests.storage.metadata.redis_servers import RedisServer, execute, free_port, once
from tests.storage.metadata.watched_redis import (
    WatchedLink,
    at,
    commit_without_applying,
    dies_at,
    make_older,
    watched_link,
)

KEYS = DatasetKeys(IDENTITY)
MORE = files(2, b"c")


def pieces(client: Redis) -> int:
    return sum(int(client.hlen(key)) for key in client.keys("dfs:*}:x"))


def reads(meta: RedisMetadata, since: int = 0) -> dict[str, Callable[[], object]]:
    paths = [b"a/x", b"big", b"new/file", *(b"%d/x" % i for i in range(7))]
    return {
        "heads": meta.heads,
        "head": lambda: meta.head(NAME),
        "lookup": lambda: meta.lookup(IDENTITY, paths, tombstones=True),
        "children": lambda: meta.children(IDENTITY, b""),
        "changes": lambda: meta.changes(IDENTITY, 0),
        "newer": lambda: meta.changes(IDENTITY, since),
        "chunks": lambda: meta.chunks(IDENTITY),
        "holes": lambda: meta.holes(IDENTITY, FIRST.id),
    }


@pytest.mark.parametrize("what", ["changes", "children", "chunks"])
def test_C2_a_scan_across_a_restart_misses_nothing(server: RedisServer, what: str) -> None:
    """A restarted Redis continues a scan at another position, without an error."""
    names = [b"d/%05d" % i for i in range(4000)]
    link = watched_link(server.url)
    with closing(RedisMetadata(link)) as meta:
        meta.create(NAME, IDENTITY)
        meta.commit(IDENTITY, files(1, *names).batch())
        meta.commit(IDENTITY, *(files(n, b"d/%05d" % n).batch() for n in range(2, 1500)))
        scanned, pages = KEYS.chunks if what == "chunks" else b":e:", 0

        def restart_after_five_pages(command: RedisCommand) -> None:
            nonlocal pages
            if command.words[0] == "HSCAN" and scanned in command.key:
                pages += 1
                if pages == 5:
                    server.kill()
                    server.start()

        link.after_command, link.page_rows = restart_after_five_pages, 64
        count: Callable[[], int] = {
            "changes": lambda: len(meta.changes(IDENTITY, 0).rows),
            "children": lambda: len(meta.children(IDENTITY, b"d")),
            "chunks": lambda: len(meta.chunks(IDENTITY)),
        }[what]
        assert count() == (1499 if what == "chunks" else len(names))
        assert pages > 20


def test_C4_a_store_that_comes_back_older_takes_commits_after_repair_only(tmp_path: Path) -> None:
    """The version of a commit would hide what Redis has lost; `repair` restores it."""
    chunks = [files(n, b"f%d" % n) for n in range(4)]
    with (
        RedisServer(tmp_path / "redis", {"dbfilename": "dump"}, port=free_port()) as server,
        closing(RedisMetadata.open(server.tcp_url)) as meta,
    ):
        meta.create(NAME, IDENTITY)
        commit(meta, chunks[0])
        assert meta.needs_repair(IDENTITY) == ""
        server.client().save()
        commit(meta, chunks[1], chunks[2])
        server.kill()
        server.start()
        before = meta.head(NAME)
        with pytest.raises(StoreRestarted) as caught:
            commit(meta, chunks[3])
        with pytest.raises(StoreRestarted):
            meta.repair(IDENTITY, "another", [])
        assert meta.head(NAME) == before
        assert meta.needs_repair(IDENTITY) == caught.value.run_id
        lost = meta.missing(IDENTITY, [chunk.id for chunk in chunks])
        assert lost == [chunk.id for chunk in chunks[1:]]
        meta.repair(IDENTITY, caught.value.run_id, [chunk.batch() for chunk in chunks[1:3]])
        assert meta.needs_repair(IDENTITY) == ""
        commit(meta, chunks[3])
        check(meta, NAME, chunks)
        assert pieces(server.client()) == 0


def test_C11_an_error_after_COMMIT_undoes_nothing(link: WatchedLink, stored: RedisMetadata) -> None:
    def fail() -> None:
        raise CorruptError("whatever")

    link.after = at(COMMIT, once(fail))
    with pytest.raises(CorruptError):
        commit(stored, MORE)
    check(stored, NAME, [FIRST, MORE])


def test_C11_pieces_lost_too_early_are_sent_again(shared: RedisServer, link: WatchedLink) -> None:
    """Their writer still has them."""
    client = shared.client()
    link.before = at(COMMIT, lambda: client.delete(*client.keys("dfs:*}:x")))
    with closing(filled(shared.url, buckets=4)), closing(RedisMetadata(link)) as meta:
        more = files(2, *(b"d%d/f" % i for i in range(20)))
        commit(meta, more)
        check(meta, NAME, [FIRST, more])


def test_a_plan_of_another_generation_is_removed(
    shared: RedisServer, link: WatchedLink, stored: RedisMetadata
) -> None:
    """One that stays pending ends reads at the deadline."""
    client, plan = shared.client(), b"z" * 48
    client.rpush(KEYS.pending, plan, b"", b"z")
    with within(10):
        assert stored.head(NAME).files == 2
        commit(stored, MORE)
        check(stored, NAME, [FIRST, MORE])
        assert not client.llen(KEYS.pending)
        client.rpush(KEYS.pending, plan)
        link.after, link.deadline_s = at(APPLIED, lambda: client.rpush(KEYS.pending, plan)), 1
        with pytest.raises(DieselError):
            stored.head(NAME)


def test_C7_a_rebuild_in_a_full_memory_leaves_no_keys(server: RedisServer) -> None:
    client = server.client()
    chunks = [files(n, *(b"a%d/%d" % (n, i) for i in range(5000))) for n in range(6)]
    with closing(RedisMetadata.open(server.url)) as meta:
        meta.create(NAME, IDENTITY)
        commit(meta, *chunks)
        keys = len(client.keys("*"))
        client.config_set("maxmemory", int(client.info()["used_memory"]) + 1_000_000)
        with pytest.raises(NoSpaceError):
            meta.rebuild(NAME, IDENTITY, [chunk.batch() for chunk in chunks])
        assert len(client.keys("*")) <= keys + 1  # the list of the dead
        check(meta, NAME, chunks)


def test_C10_incomplete_files_go_quickly(shared: RedisServer, stored: RedisMetadata) -> None:
    """Looking for a million extents takes seconds."""
    client = shared.client()
    last = (1 << 20) - 1
    late = [
        Chunk(n, (Entry(b"huge", 1, number=last - n % 3, extents=last + 1, first=(n % 4, 0)),))
        for n in range(10, 22)
    ]
    commit(stored, *late)
    client.config_set("slowlog-log-slower-than", 20_000)
    client.slowlog_reset()
    commit(stored, *big(50, b"huge", 3))
    check(stored, NAME, [FIRST, *late, *big(50, b"huge", 3)])
    assert client.slowlog_len() == 0
    client.config_set("slowlog-log-slower-than", 10_000)
    assert not any(client.hlen(key) for key in client.keys("dfs:*}:[pq]"))


JUNK = b"A" * 70


def fields_of(client: Redis) -> list[tuple[bytes, bytes]]:
    """The order is the same for each generation."""
    keys = [key for key in execute(client, "KEYS", "dfs:*") if b"dead" not in key]  # type: ignore[attr-defined]  # a reply of any kind
    by_kind = sorted(keys, key=lambda key: (key.rpartition(b"}")[2], key))
    hashes = [key for key in by_kind if client.type(key) == b"hash"]
    found = [(key, field) for key in hashes for field in sorted(client.hgetall(key))]
    return [(key, field) for key, field in found if isinstance(field, bytes)]


def test_C15_any_damaged_value_is_an_error_until_a_rebuild(shared: RedisServer) -> None:
    client = shared.client()
    first = Chunk(1, (Entry(b"a/x"), Entry(b"a/y"), Entry(b"a/x")))
    with closing(RedisMetadata.open(shared.url, deadline_s=2)) as meta:

        def anew() -> int:
            client.flushall()
            meta.create(NAME, IDENTITY)
            meta.commit(IDENTITY, first.batch())
            version = meta.head(NAME).version
            meta.commit(IDENTITY, *(chunk.batch() for chunk in big(2, b"big", 2)))
            meta.lock_commits(IDENTITY, 1)
            return version

        anew()
        places = fields_of(client)
        assert len(places) > 25
        faults = list[str]()
        for number in range(len(places)):
            for junk in (b"", JUNK):
                since = anew()
                while len(fields := fields_of(client)) != len(places):
                    since = anew()  # a lock of another generation was or was not removed yet
                key, field = fields[number]
                client.hset(key, field, junk)
                for name, ask in reads(meta, since).items():
                    try:
                        ask()
                    except DieselError:
                        pass
                    except Exception as error:  # any other error is a fault
                        faults.append(f"{key!r} {field!r} {junk[:2]!r} {name}: {error!r}")
                if client.hget("dfs:{head}:names", NAME) == IDENTITY.bytes and field != b"name":
                    meta.rebuild(NAME, IDENTITY, [first.batch()])
                    check(meta, NAME, [first])
        assert faults == []


def test_C15_commits_over_damage_change_nothing(shared: RedisServer, stored: RedisMetadata) -> None:
    version = stored.head(NAME).version
    shared.client().hset(KEYS.head, "digest", b"AAA")
    with pytest.raises(CorruptError, match="recover"):
        commit(stored, MORE)
    assert shared.client().hget(KEYS.head, "version") == b"%d" % version
    assert not shared.client().llen(KEYS.pending)


@pytest.mark.parametrize("what", ["lookup", "children"])
def test_R1_a_read_during_a_commit_sees_all_of_it_or_nothing(
    shared: RedisServer, link: WatchedLink, stored: RedisMetadata, what: str
) -> None:
    """The commit happens when the reader has read one folder of two, or some of the names in a
    folder."""
    in_folders = [[b"%s/%04d" % (folder, i) for i in range(600)] for folder in (b"c", b"d")]
    commit(stored, files(2, *in_folders[0], *in_folders[1], size=1))
    newer = [files(3 + i, *names, size=2).batch() for i, names in enumerate(in_folders)]
    with closing(RedisMetadata.open(shared.url)) as other:
        meanwhile = once(lambda: other.commit(IDENTITY, *newer))
        link.after_command = lambda command: b":e:" in command.key and meanwhile()
        if what == "lookup":
            rows: Rows = stored.lookup(IDENTITY, in_folders[0] + in_folders[1])
        else:
            rows = stored.children(IDENTITY, b"c")
        assert set(rows.records["size"].tolist()) == {2}


def test_pieces_of_a_dead_writer_are_removed(shared: RedisServer, stored: RedisMetadata) -> None:
    client, numbers = shared.client(), iter(range(100, 200))
    for dead in (1, 65):
        link = watched_link(shared.url)
        link.before = dies_at(COMMIT)
        with closing(RedisMetadata(link)) as writer:
            for _ in range(dead):
                with pytest.raises(KeyboardInterrupt):
                    commit(writer, files(next(numbers), b"lost"))
        assert client.hlen(KEYS.begun) == dead
        with closing(RedisMetadata.open(shared.url)) as living:
            commit(living, files(next(numbers), b"c"))
        assert client.hlen(KEYS.begun) == dead, "they may be alive"
        assert pieces(client) >= dead
        make_older(client, KEYS.begun, 3600)
        with closing(RedisMetadata.open(shared.url)) as living:
            commit(living, files(next(numbers), b"c"))
        assert client.hlen(KEYS.begun) == 0
        assert pieces(client) == 0
    assert stored.lookup(IDENTITY, [b"lost"]).names == []


def test_C12_readers_fetch_no_piece_of_a_commit(shared: RedisServer, stored: RedisMetadata) -> None:
    more = files(2, *(b"d%d/%06d-%s" % (i % 3, i, b"n" * 60) for i in range(8000)))
    commit_without_applying(shared.url, more.batch())
    before = int(shared.client().info()["total_net_output_bytes"])
    assert len(stored.lookup(IDENTITY, [b"b"])) == 1
    assert int(shared.client().info()["total_net_output_bytes"]) - before < 100_000


def test_C2_a_rebuild_succeeds_though_its_lock_cannot_be_released(
    server: RedisServer, own: RedisMetadata
) -> None:
    link = watched_link(server.url, deadline_s=2)
    with closing(RedisMetadata(link)) as meta:
        link.after = at(REPLACE_LIVE, server.kill)
        version = meta.rebuild(NAME, IDENTITY, [FIRST.batch()])
        server.start()
    assert own.head(NAME).version == version
    assert commit_and_repair(own, IDENTITY, MORE.batch()) > version


def lose_piece(server: RedisServer) -> None:
    """Lose a piece of a commit that has not been applied: the version is that of the commit."""
    commit_without_applying(server.url, files(50, b"new/file").batch())
    lost = [key for key in server.client().keys("dfs:*}:x") if server.client().hlen(key)]
    assert len(lost) in (1, 2)
    server.client().delete(*lost)


def lose_applied_piece(server: RedisServer) -> None:
    """As if one node of a cluster came back with older data."""
    (counts, *_) = server.client().keys("dfs:*}:t")
    server.client().hincrby(counts, "pieces", -1)


def lose_folder(server: RedisServer) -> None:
    client = server.client()
    (key,) = [key for key in client.keys("dfs:*}:e:*") if client.hexists(key, "y")]
    client.delete(key)


def lose_chunks(server: RedisServer) -> None:
    server.client().delete(KEYS.chunks)


@each_row(
    ("lose", "noticed_by"),
    [
        (lose_piece, "head lookup changes children"),
        (lose_applied_piece, "lookup changes"),
        (lose_folder, "changes"),
        (lose_chunks, "chunks"),
    ],
)
def test_C7_C11_lost_keys_are_an_error_until_a_rebuild(
    shared: RedisServer, lose: Callable[[RedisServer], None], noticed_by: str
) -> None:
    shared.client().flushall()
    chunks = [FIRST, files(2, b"other/x", b"other/y")]
    with closing(RedisMetadata.open(shared.url, buckets=3)) as meta:
        meta.create(NAME, IDENTITY)
        commit(meta, *chunks)
        lose(shared)
        for name in noticed_by.split():
            with pytest.raises(MetadataBehind, match="has lost"):
                reads(meta)[name]()
        assert [head.name for head in meta.heads()] == [NAME], "other datasets are not hidden"
        meta.rebuild(NAME, IDENTITY, [chunk.batch() for chunk in chunks])
        check(meta, NAME, chunks)
