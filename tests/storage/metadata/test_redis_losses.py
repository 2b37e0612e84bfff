"""Data that Redis loses or damages is noticed: reads are complete or raise an error.

Keys of a dataset in Redis: `...}:x` has the pieces of commits that are not applied yet, `...}:e:`
the entries of a folder, `...}:p` and `...}:q` parts of files of several extents. A *plan* here is
the list of pieces of one commit, which any client can apply. C2 and the like are cases of
tests/FAULTS.md.
"""

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from redis import Redis

from diesel_fs.errors import CorruptError, DieselError, MetadataBehind, NoSpaceError
from diesel_fs.format.entries import Rows
from diesel_fs.storage.metadata.redis.head_scripts import APPLIED, COMMIT, REPLACE_LIVE
from diesel_fs.storage.metadata.redis.keys import DatasetKeys
from diesel_fs.storage.metadata.redis.link import Command
from diesel_fs.storage.metadata.redis.store import RedisMetadata
from diesel_fs.storage.metadata.store import StoreRestarted
from tests.storage.metadata.batches import Chunk, Entry, big, check, commit_and_repair, files
from tests.storage.metadata.metadata_stores import IDENTITY, NAME, filled
from tests.storage.metadata.redis_proxy import RedisProxy
from tests.storage.metadata.redis_servers import (
    RedisServer,
    emptied_server,
    execute,
    free_port,
    once,
    until,
)
from tests.storage.metadata.watched_redis import (
    at,
    commit_without_applying,
    dies_at,
    make_older,
    watched_link,
)

KEYS = DatasetKeys(IDENTITY)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server for one test, which may harm it. Its log loses nothing."""
    options = {"appendonly": "yes", "appendfsync": "always", "dbfilename": "dump"}
    with RedisServer(tmp_path / "redis", options, port=free_port()) as server:
        yield server


@pytest.fixture
def shared() -> RedisServer:
    return emptied_server()


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

        def restart_after_five_pages(command: Command) -> None:
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
    with RedisServer(tmp_path / "redis", {"dbfilename": "dump"}, port=free_port()) as server:
        chunks = [files(n, b"f%d" % n) for n in range(5)]
        with closing(RedisMetadata.open(server.tcp_url)) as meta:
            meta.create(NAME, IDENTITY)
            meta.commit(IDENTITY, chunks[0].batch())
            assert meta.needs_repair(IDENTITY) == ""
            server.client().save()
            meta.commit(IDENTITY, chunks[1].batch(), chunks[2].batch())
            server.kill()
            server.start()
            before = meta.head(NAME)
            with pytest.raises(StoreRestarted) as caught:
                meta.commit(IDENTITY, chunks[3].batch())
            with pytest.raises(StoreRestarted):
                meta.repair(IDENTITY, "another", [])
            assert meta.head(NAME) == before
            assert meta.needs_repair(IDENTITY) == caught.value.run_id
            lost = meta.missing(IDENTITY, [chunk.id for chunk in chunks])
            assert lost == [chunk.id for chunk in chunks[1:]]
            lost_chunks = (chunk.batch() for chunk in chunks[1:3])
            meta.repair(IDENTITY, caught.value.run_id, lost_chunks)
            assert meta.needs_repair(IDENTITY) == ""
            meta.commit(IDENTITY, chunks[3].batch())
            check(meta, NAME, chunks[:4])
            assert sum(server.client().hlen(k) for k in server.client().keys("dfs:*}:x")) == 0


class Flipping(RedisProxy):
    """A proxy that damages the reply to one request."""

    flip = False

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while reply := server.recv(1 << 20):
                if self.flip:
                    self.flip, reply = False, bytes([reply[0] ^ 0x04]) + reply[1:]
                client.sendall(reply)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


def test_C11_a_damaged_reply_does_not_undo_a_commit(shared: RedisServer) -> None:
    """The commit has succeeded, so its pieces must not be removed."""
    armed = list[Flipping]()

    def fault(_: int, request: bytes) -> str:
        if COMMIT.sha in request and armed:
            armed.pop().flip = True
        return ""

    with Flipping(shared.socket, fault) as proxy:
        assert isinstance(proxy, Flipping)
        with closing(filled(proxy.url)) as meta:
            armed.append(proxy)
            meta.commit(IDENTITY, files(2, b"a/y").batch())
            assert not armed
    with closing(RedisMetadata.open(shared.url)) as fresh:
        check(fresh, NAME, [files(1, b"a/x", b"b"), files(2, b"a/y")])


def test_C11_an_error_after_the_commit_script_does_not_undo_it(shared: RedisServer) -> None:
    def fail() -> None:
        raise CorruptError("whatever")

    link = watched_link(shared.url)
    with closing(filled(shared.url)), closing(RedisMetadata(link)) as meta:
        link.after = at(COMMIT, once(fail))
        with pytest.raises(CorruptError):
            meta.commit(IDENTITY, files(2, b"a/y").batch())
        check(meta, NAME, [files(1, b"a/x", b"b"), files(2, b"a/y")])


def test_C11_pieces_lost_before_they_are_applied_are_sent_again(shared: RedisServer) -> None:
    """Their writer still has them."""
    client, link = shared.client(), watched_link(shared.url)
    link.before = at(COMMIT, lambda: client.delete(*client.keys("dfs:*}:x")))
    with closing(filled(shared.url, buckets=4)), closing(RedisMetadata(link)) as meta:
        more = files(2, *(b"d%d/f" % i for i in range(20)))
        meta.commit(IDENTITY, more.batch())
        check(meta, NAME, [files(1, b"a/x", b"b"), more])


def test_a_plan_of_another_generation_is_removed(shared: RedisServer) -> None:
    with closing(filled(shared.url)) as meta:
        shared.client().rpush(KEYS.pending, b"z" * 48, b"", b"z")
        start = time.monotonic()
        assert meta.head(NAME).files == 2
        meta.commit(IDENTITY, files(2, b"c").batch())
        check(meta, NAME, [files(1, b"a/x", b"b"), files(2, b"c")])
        assert time.monotonic() - start < 5
        assert not shared.client().llen(KEYS.pending)


def test_a_plan_that_stays_pending_ends_reads_at_the_deadline(shared: RedisServer) -> None:
    link = watched_link(shared.url, deadline_s=1)
    client, plan = shared.client(), b"z" * 48
    with closing(filled(shared.url)), closing(RedisMetadata(link)) as meta:
        client.rpush(KEYS.pending, plan)
        link.after = at(APPLIED, lambda: client.rpush(KEYS.pending, plan))
        start = time.monotonic()
        with pytest.raises(DieselError):
            meta.head(NAME)
        assert time.monotonic() - start < 5


@pytest.mark.parametrize("why", ["MISCONF", "NOREPLICAS"])
def test_C8_readers_of_unwritable_redis_get_metadata_behind(tmp_path: Path, why: str) -> None:
    """At once; with this error they can use the snapshot."""
    options = {"save": "3600 1", "stop-writes-on-bgsave-error": "yes", "dbfilename": "dump"}
    with RedisServer(tmp_path / "redis", options) as server, closing(filled(server.url)) as meta:
        client = server.client()
        commit_without_applying(server.url, files(2, b"c").batch())
        if why == "MISCONF":
            (tmp_path / "redis" / "dump").mkdir()
            client.bgsave()
            until(lambda: client.info()["rdb_last_bgsave_status"] == "err", "a failed snapshot")
        else:
            client.config_set("min-replicas-to-write", 1)
        start = time.monotonic()
        for ask in (
            lambda: meta.head(NAME),
            lambda: meta.changes(IDENTITY, 0),
            lambda: meta.lookup(IDENTITY, [b"c"]),
        ):
            with pytest.raises(MetadataBehind, match="cannot be read yet"):
                ask()
        assert [head.name for head in meta.heads()] == [NAME]
        assert time.monotonic() - start < 5
        client.config_set("min-replicas-to-write", 0)
        client.config_set("stop-writes-on-bgsave-error", "no")
        check(meta, NAME, [files(1, b"a/x", b"b"), files(2, b"c")])


def test_C7_a_rebuild_in_a_full_memory_leaves_no_keys(server: RedisServer) -> None:
    client = server.client()
    chunks = [files(n, *(b"a%d/%d" % (n, i) for i in range(5000))) for n in range(6)]
    with closing(RedisMetadata.open(server.url)) as meta:
        meta.create(NAME, IDENTITY)
        for each in chunks:
            meta.commit(IDENTITY, each.batch())
        keys = len(client.keys("*"))
        client.config_set("maxmemory", int(client.info()["used_memory"]) + 1_000_000)
        with pytest.raises(NoSpaceError):
            meta.rebuild(NAME, IDENTITY, [chunk.batch() for chunk in chunks])
        assert len(client.keys("*")) <= keys + 1  # the list of the dead
        check(meta, NAME, chunks)


def test_C10_removing_an_incomplete_file_takes_time_by_present_extents(shared: RedisServer) -> None:
    """Not by the number that the file would have: looking for a million extents takes seconds."""
    client = shared.client()
    last = (1 << 20) - 1
    with closing(RedisMetadata.open(shared.url)) as meta:
        meta.create(NAME, IDENTITY)
        late = [
            Chunk(n, (Entry(b"huge", 1, number=last - n % 3, extents=last + 1, first=(n % 4, 0)),))
            for n in range(10, 22)
        ]
        for each in late:
            meta.commit(IDENTITY, each.batch())
        client.config_set("slowlog-log-slower-than", 20_000)
        client.slowlog_reset()
        done = [*late, *big(50, b"huge", 3)]
        for each in done[len(late) :]:
            meta.commit(IDENTITY, each.batch())
        check(meta, NAME, done)
        assert client.slowlog_len() == 0
        client.config_set("slowlog-log-slower-than", 10_000)
        assert not any(client.hlen(key) for key in client.keys("dfs:*}:[pq]"))


JUNK = b"A" * 70


def fields_of(client: Redis) -> list[tuple[bytes, bytes]]:
    """All fields of all hashes, with their keys, in an order that does not depend on the
    generation.
    """
    keys = [key for key in execute(client, "KEYS", "dfs:*") if b"dead" not in key]  # type: ignore[attr-defined]  # a reply of any kind
    by_kind = sorted(keys, key=lambda key: (key.rpartition(b"}")[2], key))
    hashes = [key for key in by_kind if client.type(key) == b"hash"]
    found = [(key, field) for key in hashes for field in sorted(client.hgetall(key))]
    return [(key, field) for key, field in found if isinstance(field, bytes)]


def test_C15_any_damaged_value_is_an_error_until_a_rebuild(shared: RedisServer) -> None:
    """No damaged value makes a client crash or hang, and a rebuild restores the dataset."""
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
                key, field = fields_of(client)[number]
                client.hset(key, field, junk)
                asks: list[Callable[[], object]] = [
                    meta.heads,
                    lambda: meta.head(NAME),
                    lambda: meta.lookup(IDENTITY, [b"a/x", b"big"], tombstones=True),
                    lambda: meta.children(IDENTITY, b""),
                    lambda: meta.changes(IDENTITY, 0),
                    partial(meta.changes, IDENTITY, since),
                    lambda: meta.chunks(IDENTITY),
                    lambda: meta.holes(IDENTITY, first.id),
                ]
                for i, ask in enumerate(asks):
                    try:
                        ask()
                    except DieselError:
                        pass
                    except Exception as error:  # what must not happen
                        faults.append(f"{key!r} {field!r} {junk[:2]!r} {i}: {error!r}")
                if client.hget("dfs:{head}:names", NAME) == IDENTITY.bytes and field != b"name":
                    meta.rebuild(NAME, IDENTITY, [first.batch()])
                    check(meta, NAME, [first])
        assert faults == []


def test_C15_a_commit_over_damaged_values_changes_nothing(shared: RedisServer) -> None:
    with closing(filled(shared.url)) as meta:
        version = meta.head(NAME).version
        shared.client().hset(KEYS.head, "digest", b"AAA")
        with pytest.raises(CorruptError, match="recover"):
            meta.commit(IDENTITY, files(2, b"y").batch())
        assert shared.client().hget(KEYS.head, "version") == b"%d" % version
        assert not shared.client().llen(KEYS.pending)


@pytest.mark.parametrize("what", ["lookup", "children"])
def test_R1_a_read_during_a_commit_sees_all_of_it_or_nothing(
    shared: RedisServer, what: str
) -> None:
    """The commit happens when the reader has read a part of the entries: one folder of two, or some
    of the names in a folder.
    """
    in_folders = [[b"%s/%04d" % (folder, i) for i in range(600)] for folder in (b"c", b"d")]
    link = watched_link(shared.url)
    with (
        closing(filled(shared.url)),
        closing(RedisMetadata(link)) as meta,
        closing(RedisMetadata.open(shared.url)) as other,
    ):
        meta.commit(IDENTITY, files(2, *in_folders[0], *in_folders[1], size=1).batch())
        newer = [files(3 + i, *names, size=2).batch() for i, names in enumerate(in_folders)]
        meanwhile = once(lambda: other.commit(IDENTITY, *newer))
        link.after_command = lambda command: b":e:" in command.key and meanwhile()
        if what == "lookup":
            rows: Rows = meta.lookup(IDENTITY, in_folders[0] + in_folders[1])
        else:
            rows = meta.children(IDENTITY, b"c")
        assert set(rows.records["size"].tolist()) == {2}


def test_pieces_of_one_dead_writer_are_removed(shared: RedisServer) -> None:
    """Also if it is the only dead writer."""
    client = shared.client()
    link = watched_link(shared.url)
    link.before = dies_at(COMMIT)
    with closing(filled(shared.url)) as meta, closing(RedisMetadata(link)) as dead:
        with pytest.raises(KeyboardInterrupt):
            dead.commit(IDENTITY, files(2, b"c").batch())
        assert client.hlen(KEYS.begun) == 1
        make_older(client, KEYS.begun, 3600)
        meta.commit(IDENTITY, files(3, b"d").batch())
        assert client.hlen(KEYS.begun) == 0
        assert not any(client.hlen(key) for key in client.keys("dfs:*}:x"))


def test_A6_each_try_removes_the_pieces_of_the_one_before(shared: RedisServer) -> None:
    lost = list[int]()

    def fault(number: int, request: bytes) -> str:
        if COMMIT.sha in request and len(lost) < 4:
            lost.append(number)
            return "lose"
        return ""

    filled(shared.url).close()
    with RedisProxy(shared.socket, fault) as proxy, closing(RedisMetadata.open(proxy.url)) as meta:
        meta.commit(IDENTITY, files(2, b"c").batch())
        assert len(lost) == 4
    client = shared.client()
    assert client.hlen(KEYS.begun) == 0
    assert not any(client.hlen(key) for key in client.keys("dfs:*}:x"))


def test_C12_readers_do_not_fetch_the_pieces_of_a_commit(shared: RedisServer) -> None:
    client = shared.client()
    with closing(filled(shared.url)) as meta:
        more = files(2, *(b"d%d/%06d-%s" % (i % 3, i, b"n" * 60) for i in range(8000)))
        commit_without_applying(shared.url, more.batch())
        before = int(client.info()["total_net_output_bytes"])
        assert len(meta.lookup(IDENTITY, [b"b"])) == 1
        assert int(client.info()["total_net_output_bytes"]) - before < 100_000


def test_C2_a_rebuild_succeeds_though_its_lock_cannot_be_released(server: RedisServer) -> None:
    """Redis is killed before the lock is released."""
    link = watched_link(server.url, deadline_s=2)
    with closing(filled(server.url)), closing(RedisMetadata(link)) as meta:
        link.after = at(REPLACE_LIVE, server.kill)
        version = meta.rebuild(NAME, IDENTITY, [files(1, b"a").batch()])
        link.after = lambda _: None
        server.start()
        assert meta.head(NAME).version == version
        assert commit_and_repair(meta, IDENTITY, files(2, b"c").batch()) > version


@pytest.mark.deep
def test_C13_a_read_of_a_hung_redis_fails_soon_and_a_commit_waits(server: RedisServer) -> None:
    with closing(filled(server.url, deadline_s=30)) as meta:
        server.signal(signal.SIGSTOP)
        threading.Timer(11, lambda: server.signal(signal.SIGCONT)).start()
        waiting = threading.Thread(
            target=lambda: meta.commit(IDENTITY, files(2, b"c").batch()), daemon=True
        )
        waiting.start()
        start = time.monotonic()
        with pytest.raises(DieselError):
            meta.head(NAME)
        assert time.monotonic() - start < 10
        waiting.join(30)
        check(meta, NAME, [files(1, b"a/x", b"b"), files(2, b"c")])
