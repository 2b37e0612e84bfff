"""A Redis that is down, full, slow or hung, belongs to others or refuses this client (FAULTS.md,
C).
"""

import logging
import os
import signal
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis.exceptions as errors
from redis import Redis

from diesel_fs.errors import (
    CorruptError,
    DeadlineError,
    DieselError,
    MetadataBehind,
    MetadataError,
    NewerVersionError,
    NoSpaceError,
    NoSuchDataset,
)
from diesel_fs.storage.metadata.redis.address import parse_redis_url
from diesel_fs.storage.metadata.redis.errors import RetryLater, safe_cause, translate_error
from diesel_fs.storage.metadata.redis.link import RedisLink
from diesel_fs.storage.metadata.redis.store import RedisMetadata
from tests.rows import each_row
from tests.storage.metadata.batches import Chunk, check, commit_and_repair, files
from tests.storage.metadata.metadata_stores import IDENTITY, NAME, filled
from tests.storage.metadata.redis_proxy import RedisProxy
from tests.storage.metadata.redis_servers import (
    RedisCluster,
    RedisServer,
    emptied_server,
    execute,
    free_port,
    shared_cluster,
    until,
)
from tests.storage.metadata.watched_redis import commit_without_applying

SECRET = "canary-3f81"  # noqa: S105


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server for one test, which may harm it. Its log loses nothing."""
    options = {"appendonly": "yes", "appendfsync": "always"}
    with RedisServer(tmp_path / "redis", options, port=free_port()) as server:
        yield server


@pytest.fixture
def shared() -> RedisServer:
    return emptied_server()


def bulky(number: int) -> Chunk:
    return files(number, *(b"a/%d-%d" % (number, i) for i in range(500)))


def test_C1_a_store_that_is_down_is_reported_soon() -> None:
    port = free_port()
    start = time.monotonic()
    with pytest.raises(MetadataError, match=f"127.0.0.1:{port}") as caught:
        RedisMetadata.open(f"redis://me:{SECRET}@127.0.0.1:{port}")
    assert time.monotonic() - start < 10
    assert caught.value.exit_code == 14
    assert SECRET not in str(caught.value) + repr(caught.value)


@pytest.mark.parametrize(
    "url",
    ["redis://{0}", "redis+sentinel://{0},{1},{2},{3},{4}/main", "redis+cluster://{0},{1},{2}"],
)
def test_C1_hosts_that_hang_are_reported_soon(url: str) -> None:
    mute = [socket.create_server(("127.0.0.1", 0)) for _ in range(5)]
    try:
        start = time.monotonic()
        with pytest.raises(DieselError) as caught:
            RedisMetadata.open(url.format(*(f"127.0.0.1:{s.getsockname()[1]}" for s in mute)))
        assert time.monotonic() - start < 10
        assert caught.value.exit_code == 14
    finally:
        for each in mute:
            each.close()


def test_C12_a_dead_generation_is_removed_once(shared: RedisServer) -> None:
    with closing(RedisMetadata.open(shared.url, buckets=64)) as meta:
        for number in range(5):
            identity = uuid.UUID(int=number)
            meta.create(f"old{number}", identity)
            meta.drop(identity)
    with (
        RedisProxy(shared.socket, lambda n, request: "") as proxy,
        closing(RedisMetadata.open(proxy.url, buckets=64)) as meta,
    ):
        before = proxy.requests
        meta.create(NAME, IDENTITY)
        assert proxy.requests - before < 30


def test_S8_no_password_is_repeated(tmp_path: Path) -> None:
    """Redis repeats a command that it does not know, and with AUTH the password; so may a proxy."""
    env = {"DIESEL_REDIS_USER": "bob", "DIESEL_REDIS_PASSWORD": SECRET}
    options = {"rename-command": 'AUTH ""'}
    with RedisServer(tmp_path / "redis", options, port=free_port()) as server:
        with pytest.raises(MetadataError, match="AUTH") as caught:
            RedisMetadata.open(server.tcp_url, environment=env)
        told = "".join(traceback.format_exception(caught.value))
        assert SECRET not in told
    where = parse_redis_url("redis://h", env)
    for error in (
        errors.ResponseError(f"what is {SECRET}?"),
        errors.ResponseError(f"unknown command `AUTH`, with args beginning with: `{SECRET[:5]}`"),
        errors.ConnectionError(f"Error: {SECRET}"),
    ):
        meant = translate_error(error, where)
        assert SECRET[:5] not in str(meant.last_error if isinstance(meant, RetryLater) else meant)
        assert safe_cause(error, where) is None


@each_row("address", ["redis://h", "redis+sentinel://h/main"])
@each_row(
    "text",
    [
        "Error running script (call to f_0a): @user_script:17: @user_script: 17: -{0} it says",
        "Error running script (call to f_0a): @user_script:17: -{0} it says",
        "{0} it says script: 0a, on @user_script:17.",
    ],
)
def test_C9_errors_in_scripts_of_each_redis_version_are_understood(text: str, address: str) -> None:
    """Redis 5 and 6 have the code word of the error in the middle of the text."""
    where = parse_redis_url(address, {})

    def meant(code: str) -> DieselError | RetryLater:
        return translate_error(errors.ResponseError(text.format(code)), where)

    assert isinstance(meant("MISCONF"), NoSpaceError)
    assert isinstance(meant("OOM"), NoSpaceError)
    assert isinstance(meant("WRONGTYPE"), CorruptError)
    assert isinstance(meant("NOREPLICAS"), RetryLater)
    assert isinstance(meant("READONLY"), RetryLater if where.service else MetadataError)
    assert isinstance(translate_error(errors.NoScriptError("it is gone"), where), RetryLater)
    assert isinstance(translate_error(errors.InvalidResponse("what"), where), RetryLater)
    garbage = errors.ResponseError("user_script:12: data string too short script: 0a")
    assert isinstance(translate_error(garbage, where), CorruptError)


class WaitingNode:
    """Stands for a node of a cluster that can wait for its log (Redis 7.2). It notes the commands
    that it gets in `commands`, and its log is on disk after `waits` commands that wait in vain.
    """

    def __init__(self, commands: list[object], waits: int) -> None:
        self.commands = commands
        self.waits = waits

    def info(self, section: str = "") -> dict[str, object]:
        return {"aof_enabled": 1, "redis_version": "7.2.4"}

    def client(self) -> "WaitingNode":
        return self

    def __enter__(self) -> "WaitingNode":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def execute_command(self, *words: object) -> list[int]:
        self.commands.append(words)
        self.waits -= words[0] == "WAITAOF"
        return [self.waits < 0, 0]


def test_C2_sync_waits_for_the_log_of_each_node(cluster: RedisCluster) -> None:
    """Also for writes of other connections, though `WAITAOF` waits for those of its own only."""
    with closing(RedisLink.open(parse_redis_url(cluster.url), 10)) as link:
        nodes = link.nodes.masters_with_keys()
        assert len(nodes) == 3
        for key, node in nodes:
            node.execute_command("HSET", key, "sync", 1)  # and it has that slot
        commands, expected = list[object](), list[object]()
        waiting = [(key, WaitingNode(commands, waits)) for waits, (key, _) in enumerate(nodes)]
        fakes = SimpleNamespace(masters_with_keys=lambda: waiting)
        RedisMetadata(RedisLink(link.address, fakes, 10)).sync()
        for waits, (key, _) in enumerate(nodes):
            wait = ("WAITAOF", 1, 0, 1000)
            expected += [("HSET", key, "sync", 1), *([wait] * (waits + 1))]
        assert commands == expected


@pytest.fixture
def cluster() -> RedisCluster:
    cluster = shared_cluster()
    cluster.flush()
    return cluster


def test_C1_a_missing_socket_is_named(tmp_path: Path) -> None:
    with pytest.raises(MetadataError, match="no-such"):
        RedisMetadata.open(f"unix://{tmp_path}/no-such", deadline_s=0.3)


def test_C2_commits_survive_a_kill_of_redis(server: RedisServer) -> None:
    """Redis comes back with its log; the commits are sent again, and nothing is lost."""
    chunks = [files(1, b"a/x", b"b")]
    with closing(filled(server.tcp_url, deadline_s=30)) as meta:
        back = threading.Event()

        def crash() -> None:
            time.sleep(0.2)
            server.kill()
            time.sleep(1.0)
            server.start()
            back.set()

        threading.Thread(target=crash).start()
        while not back.is_set() or len(chunks) % 10:
            chunks.append(bulky(len(chunks) + 1))
            commit_and_repair(meta, IDENTITY, chunks[-1].batch())
        check(meta, NAME, chunks)
    with closing(RedisMetadata.open(server.tcp_url)) as fresh:
        check(fresh, NAME, chunks)


def test_C3_an_emptied_redis_knows_no_dataset(server: RedisServer) -> None:
    """It reports that there is no dataset: not an empty one, and not "no such file"."""
    with closing(filled(server.url)) as meta:
        server.client().flushall()
        calls: list[Callable[[], object]] = [
            lambda: meta.lookup(IDENTITY, [b"a/x"]),
            lambda: meta.children(IDENTITY, b"a"),
            lambda: meta.commit(IDENTITY, files(2, b"c").batch()),
            lambda: meta.changes(IDENTITY, 0),
            lambda: meta.head(NAME),
        ]
        for call in calls:
            with pytest.raises(NoSuchDataset):
                call()
        meta.rebuild(NAME, IDENTITY, [files(1, b"a/x", b"b").batch()])
        check(meta, NAME, [files(1, b"a/x", b"b")])


def test_C3_a_rebuild_across_a_restart_fails(server: RedisServer) -> None:
    with closing(filled(server.url)) as meta:

        def batches() -> Iterator[object]:
            yield files(1, b"a/x", b"b").batch()
            server.kill()
            server.start()
            yield files(2, b"c").batch()

        with pytest.raises(DieselError, match="restarted"):
            meta.rebuild(NAME, IDENTITY, batches())  # type: ignore[arg-type]  # a stand-in takes anything
        check(meta, NAME, [files(1, b"a/x", b"b")])


def fault_of(work: Callable[[int], object], number: int) -> DieselError | None:
    """The error that work ends with, if any."""
    try:
        work(number)
    except DieselError as error:
        return error
    return None


def test_C7_a_full_memory_stops_commits_whole_and_not_reads(server: RedisServer) -> None:
    client = server.client()
    chunks = [files(1, b"a/x", b"b")]
    with closing(filled(server.url)) as meta:
        used = int(client.info("memory")["used_memory"])
        client.config_set("maxmemory", used + (2 << 20))
        number = 1
        while number < 1000:
            number += 1
            if fault := fault_of(lambda n: meta.commit(IDENTITY, bulky(n).batch()), number):
                break
            chunks.append(bulky(number))
        assert isinstance(fault, NoSpaceError)
        assert fault.exit_code == 16
        assert "maxmemory" in str(fault)
        assert len(chunks) > 3
        client.config_set("maxmemory", used)  # whatever has been promised is applied nevertheless
        check(meta, NAME, chunks)
        with pytest.raises(NoSpaceError):
            meta.create("other", uuid.uuid4())
        with pytest.raises(NoSpaceError):
            meta.rebuild(NAME, IDENTITY, [chunk.batch() for chunk in chunks])
        client.config_set("maxmemory", 0)
        meta.commit(IDENTITY, bulky(number).batch())
        chunks.append(bulky(number))
        check(meta, NAME, chunks)
        version = meta.rebuild(NAME, IDENTITY, [chunk.batch() for chunk in chunks])
        assert version == meta.head(NAME).version
        check(meta, NAME, chunks)
        assert sum(client.hlen(key) for key in client.keys("dfs:*}:x")) == 0


def test_C7_committed_pieces_are_applied_in_a_full_memory(server: RedisServer) -> None:
    """APPLY first removes the piece, and Redis refuses no write of a script after its first."""
    client = server.client()
    with closing(filled(server.url)) as meta:
        commit_without_applying(server.url, bulky(2).batch())
        client.config_set("maxmemory", 1)
        check(meta, NAME, [files(1, b"a/x", b"b"), bulky(2)])


def test_C8_a_disk_that_cannot_be_written_stops_commits(tmp_path: Path) -> None:
    options = {"save": "3600 1", "stop-writes-on-bgsave-error": "yes", "dbfilename": "dump"}
    with RedisServer(tmp_path / "redis", options) as server:
        client = server.client()
        with closing(filled(server.url)) as meta:
            (tmp_path / "redis" / "dump").mkdir()  # a folder: no snapshot can be renamed to it
            client.bgsave()
            until(lambda: client.info()["rdb_last_bgsave_status"] == "err", "a failed snapshot")
            with pytest.raises(NoSpaceError, match="snapshot"):
                meta.commit(IDENTITY, files(2, b"c").batch())
            check(meta, NAME, [files(1, b"a/x", b"b")])  # reads go on
            client.config_set("stop-writes-on-bgsave-error", "no")
            meta.commit(IDENTITY, files(2, b"c").batch())
            check(meta, NAME, [files(1, b"a/x", b"b"), files(2, b"c")])


def test_C9_a_replica_is_refused(server: RedisServer, tmp_path: Path) -> None:
    start = time.monotonic()
    with closing(filled(server.url)) as meta:
        options = {"replicaof": f"127.0.0.1 {server.port}"}
        with RedisServer(tmp_path / "replica", options) as replica:
            with pytest.raises(MetadataError, match="read-only replica"):
                RedisMetadata.open(replica.url)
            server.client().replicaof("127.0.0.1", free_port())
            with pytest.raises(MetadataError, match="read-only replica"):
                meta.commit(IDENTITY, files(2, b"c").batch())
    assert time.monotonic() - start < 10


def test_C10_a_loading_or_busy_redis_is_waited_for(server: RedisServer) -> None:
    client = server.client()
    with closing(filled(server.url)) as meta:
        client.config_set("busy-reply-threshold", 1)

        def spin() -> None:
            with pytest.raises(Exception, match="killed"):
                execute(client, "EVAL", "while true do end", 0)

        spinner = threading.Thread(target=spin)
        spinner.start()
        time.sleep(0.1)
        threading.Timer(0.5, lambda: server.client().script_kill()).start()
        meta.commit(IDENTITY, files(2, b"c").batch())
        spinner.join()
        server.options["key-load-delay"] = "50000"  # us for each key
        server.options["loading-process-events-interval-bytes"] = "1024"
        server.kill()
        threading.Thread(target=server.start).start()
        start = time.monotonic()
        check(meta, NAME, [files(1, b"a/x", b"b"), files(2, b"c")])
        with closing(RedisMetadata.open(server.url)) as fresh:
            check(fresh, NAME, [files(1, b"a/x", b"b"), files(2, b"c")])
        assert time.monotonic() - start < 10


def test_C12_a_slow_redis_causes_no_errors(shared: RedisServer) -> None:
    slow = RedisProxy(shared.socket, lambda n, request: "", delay_s=0.1)
    with slow as proxy, closing(filled(proxy.url)) as meta:
        before = proxy.requests
        meta.commit(IDENTITY, *(bulky(number).batch() for number in range(2, 10)))
        assert proxy.requests - before <= 12, "round trips do not depend on how much there is"
        before = proxy.requests
        rows = meta.children(IDENTITY, b"a")
        assert len(rows) == 4001
        assert proxy.requests - before <= 6


def test_C12_a_pause_is_waited_for(shared: RedisServer) -> None:
    with closing(filled(shared.url)) as meta:
        shared.client().client_pause(500)
        meta.commit(IDENTITY, files(2, b"c").batch())
        check(meta, NAME, [files(1, b"a/x", b"b"), files(2, b"c")])


def test_C13_a_hung_redis_is_an_error_at_the_deadline(server: RedisServer) -> None:
    with closing(filled(server.url, deadline_s=2)) as meta:
        server.signal(signal.SIGSTOP)
        start = time.monotonic()
        faults = list[Exception]()

        def ask() -> None:
            try:
                meta.head(NAME)
            except DieselError as error:
                faults.append(error)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert time.monotonic() - start < 6
        assert [type(fault) for fault in faults] == [DeadlineError] * 8
        server.signal(signal.SIGCONT)
        assert meta.head(NAME).files == 2


def test_C14_S8_wrong_passwords_and_missing_rights_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"requirepass": SECRET}
    with RedisServer(tmp_path / "redis", options, port=free_port()) as server:
        place = f"127.0.0.1:{server.port}"
        client = server.client()
        execute(client, "ACL", "SETUSER", "poor", "on", f">{SECRET}", "~dfs:*", "+info", "+get")
        execute(client, "ACL", "SETUSER", "fit", "on", f">{SECRET}", "~dfs:*", *COMMANDS)
        for userinfo, wanted in (
            ("", "password"),
            (":wrong" + SECRET, "user and password"),
            ("who:wrong" + SECRET, "user and password"),
        ):
            start = time.monotonic()
            with pytest.raises(MetadataError, match=wanted) as caught:
                RedisMetadata.open(f"redis://{userinfo and userinfo + '@'}{place}")
            assert time.monotonic() - start < 1
            assert place in str(caught.value)
            assert SECRET not in str(caught.value)
        poor = RedisMetadata.open(f"redis://poor:{SECRET}@{place}")
        with pytest.raises(MetadataError, match=r"does not allow.*'evalsha'"):
            poor.create(NAME, IDENTITY)
        assert SECRET not in repr(poor)
        poor.close()
        file = tmp_path / "password"
        file.write_text(SECRET + "\n")
        file.chmod(0o600)
        monkeypatch.setenv("DIESEL_REDIS_USER", "fit")
        monkeypatch.setenv("DIESEL_REDIS_PASSWORD_FILE", str(file))
        with closing(filled(f"redis://{place}")) as meta:
            check(meta, NAME, [files(1, b"a/x", b"b")])
            meta.rebuild(NAME, IDENTITY, [files(1, b"a/x", b"b").batch()])
            meta.children(IDENTITY, b"")
            meta.lock_commits(IDENTITY, 1).release()
            meta.sync()
            meta.drop(IDENTITY)


COMMANDS = (
    "+info +evalsha +script|load +time +get +set +exists +unlink +rename +hget +hmget +hgetall"
    " +hset +hdel +hexists +hlen +hkeys +hvals +hincrby +hscan +sadd +sscan +lrange +llen +rpush"
    " +lrem +zadd +zrem +zscore +zcard +zrange +zrangebyscore +pexpire"
).split()
"""The commands that Redis's ACL has to allow."""


def test_the_documents_list_the_commands_that_an_acl_needs() -> None:
    text = (Path(__file__).resolve().parents[3] / "deploy" / "README.md").read_text(
        encoding="utf-8"
    )
    assert f"~dfs:* {' '.join(COMMANDS)}`" in " ".join(text.split())


def test_C15_another_schema_is_refused(shared: RedisServer) -> None:
    filled(shared.url).close()
    client = shared.client()
    client.set("dfs:{head}:schema", 3)
    with pytest.raises(NewerVersionError, match="schema 3, and this program knows 2"):
        RedisMetadata.open(shared.url)
    client.set("dfs:{head}:schema", 1)
    with pytest.raises(MetadataError, match="schema 1, and this program knows 2"):
        RedisMetadata.open(shared.url)
    client.set("dfs:{head}:schema", 2)
    with closing(RedisMetadata.open(shared.url)) as meta:
        client.set("dfs:{head}:schema", 3)
        with pytest.raises(NewerVersionError):
            meta.commit(IDENTITY, files(2, b"c").batch())
        with pytest.raises(NewerVersionError):
            meta.head(NAME)


def test_C16_foreign_keys_stay_and_odd_paths_work(shared: RedisServer) -> None:
    client = shared.client()
    theirs = {"session:1": "x", "dfs": "y", "m:{head}": "z"}
    client.mset(theirs)
    odd = [b"*", b"{x}", b"a}{b/:*", b"?/[a-z]", b"\r\n$5/\0".strip(b"\0") + b"q", b"\xff\xfe/n"]
    with closing(RedisMetadata.open(shared.url)) as meta:
        meta.create(NAME, IDENTITY)
        chunk = files(1, *odd)
        meta.commit(IDENTITY, chunk.batch())
        check(meta, NAME, [chunk])
        own = all_keys(client) - {key.encode() for key in theirs}
        assert len(own) > 10
        assert all(key.startswith(b"dfs:{") for key in own)
        meta.drop(IDENTITY)
    left = all_keys(client) - {key.encode() for key in theirs}
    assert left == {b"dfs:{head}:schema", b"dfs:{head}:dead"}
    assert [client.get(key) for key in theirs] == [b"x", b"y", b"z"]


def all_keys(client: Redis) -> set[bytes]:
    reply = execute(client, "KEYS", "*")
    assert isinstance(reply, list)
    return set(reply)


def test_C7_a_redis_that_may_evict_keys_is_refused(server: RedisServer) -> None:
    """Also if its policy changes while the store is open: a missing key would prove nothing."""
    client = server.client()
    with closing(filled(server.url)) as meta:
        client.config_set("maxmemory-policy", "allkeys-lru")  # whatever maxmemory is now
        with pytest.raises(MetadataError, match=r"evicts keys.*noeviction"):
            meta.heads()
        with pytest.raises(MetadataError, match="evicts keys"):
            meta.needs_repair(IDENTITY)
        with pytest.raises(MetadataError, match="evicts keys"):
            RedisMetadata.open(server.url)
        client.config_set("maxmemory-policy", "volatile-lru")  # none of the keys has a time to live
        assert [head.name for head in meta.heads()] == [NAME]


def test_C7_evicted_keys_are_an_error(server: RedisServer) -> None:
    """A read of all entries checks their number against the head."""
    client = server.client()
    with closing(filled(server.url)) as meta:
        meta.commit(IDENTITY, files(2, b"other/x", b"other/y").batch())
        (key,) = [key for key in client.keys("dfs:*}:e:*") if client.hexists(key, "y")]
        client.delete(key)
        with pytest.raises(MetadataBehind, match="has lost"):
            meta.changes(IDENTITY, 0)
        client.delete("dfs:{head}:c:" + IDENTITY.hex)
        with pytest.raises(MetadataBehind, match="has lost"):
            meta.chunks(IDENTITY)


def test_S14_a_redis_without_a_password_is_warned_of(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    host = os.uname().nodename
    with caplog.at_level(logging.WARNING):
        RedisMetadata.open(server.tcp_url).close()
    assert "no password" not in caplog.text
    server.client().config_set("protected-mode", "no")
    server.client().config_set("bind", "127.0.0.1 " + address_of(host))
    with caplog.at_level(logging.WARNING):
        RedisMetadata.open(f"redis://{address_of(host)}:{server.port}").close()
    assert "no password" in caplog.text


def address_of(host: str) -> str:
    """An address of this machine that is not loopback; skips where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has only loopback")
        found = str(probe.getsockname()[0])
    if found.startswith("127."):
        pytest.skip("this machine has only loopback")
    return found


def test_a_forked_child_opens_its_own_connections(shared: RedisServer) -> None:
    with closing(filled(shared.url)) as meta:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                meta.commit(IDENTITY, files(2, b"child").batch())
                status = 0
            finally:
                os._exit(status)
        for _ in range(50):
            assert meta.head(NAME).name == NAME
        _, status = os.waitpid(child, 0)
        assert status == 0
        check(meta, NAME, [files(1, b"a/x", b"b"), files(2, b"child")])


def test_an_entry_takes_less_than_200_bytes(shared: RedisServer) -> None:
    """With its name (16 bytes here) and its part of the folder's and chunk's keys."""
    client = shared.client()
    with closing(RedisMetadata.open(shared.url)) as meta:
        meta.create(NAME, IDENTITY)
        before = int(client.info("memory")["used_memory"])
        for number in range(20):
            names = (b"train/%05d/%08d.jpeg" % (number // 2, i) for i in range(1000))
            meta.commit(IDENTITY, files(number, *names).batch())
        after = int(client.info("memory")["used_memory"])
    assert (after - before) / 20_000 < 200
