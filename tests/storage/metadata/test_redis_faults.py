"""A Redis that is down, full, slow or hung, belongs to others or refuses this client (FAULTS.md,
C).
"""

import logging
import signal
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from hashlib import sha1
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
from diesel_fs.storage.metadata.redis.bucket_scripts import NOTE_SYNC
from diesel_fs.storage.metadata.redis.errors import RetryLater, safe_cause, translate_error
from diesel_fs.storage.metadata.redis.link import RedisLink
from diesel_fs.storage.metadata.redis.store import RedisMetadata
from tests.forks import within
from tests.rows import each_row
from tests.storage.metadata.batches import (
    Chunk,
    Entry,
    check,
    commit_and_repair,
    files,
    tombstones,
)
from tests.storage.metadata.metadata_stores import FIRST, IDENTITY, NAME, commit, filled
from tests.storage.metadata.redis_proxy import RedisProxy
from tests.storage.metadata.redis_servers import (
    RedisCluster,
    RedisServer,
    execute,
    free_port,
    until,
)
from tests.storage.metadata.watched_redis import commit_without_applying

SECRET = "canary-3f81"  # noqa: S105
MORE = files(2, b"c")
PATHS = [entry.path for entry in FIRST.entries if entry is not None]


def bulky(number: int) -> Chunk:
    return files(number, *(b"a/%d-%d" % (number, i) for i in range(500)))


@each_row(
    ("url", "named"),
    [
        (f"redis://me:{SECRET}@127.0.0.1:{{0}}", "127.0.0.1:{0}"),
        ("unix:///tmp/no-such", "no-such"),
        ("redis+sentinel://127.0.0.1:{0}/main", r"main by 127\.0\.0\.1:{0}"),
    ],
)
def test_C1_a_store_that_is_down_is_reported_soon(url: str, named: str) -> None:
    port = free_port()
    with within(10), pytest.raises(MetadataError, match=named.format(port)) as caught:
        RedisMetadata.open(url.format(port))
    assert caught.value.exit_code == 14
    assert SECRET not in str(caught.value) + repr(caught.value)


@each_row(
    "url",
    ["redis://{0}", "redis+sentinel://{0},{1},{2},{3},{4}/main", "redis+cluster://{0},{1},{2}"],
)
def test_C1_hosts_that_hang_are_reported_soon(url: str) -> None:
    mute = [socket.create_server(("127.0.0.1", 0)) for _ in range(5)]
    try:
        with within(10), pytest.raises(DieselError) as caught:
            RedisMetadata.open(url.format(*(f"127.0.0.1:{s.getsockname()[1]}" for s in mute)))
        assert caught.value.exit_code == 14
    finally:
        for each in mute:
            each.close()


def test_S8_no_password_is_repeated(tmp_path: Path) -> None:
    """Redis repeats a command that it does not know, and with AUTH the password; so may a proxy."""
    env = {"DIESEL_REDIS_USER": "bob", "DIESEL_REDIS_PASSWORD": SECRET}
    options = {"rename-command": 'AUTH ""'}
    with RedisServer(tmp_path / "redis", options, port=free_port()) as server:
        with pytest.raises(MetadataError, match="AUTH") as caught:
            RedisMetadata.open(server.tcp_url, environment=env)
        shown = "".join(traceback.format_exception(caught.value))
        assert SECRET not in shown
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
    meant = {
        "MISCONF": NoSpaceError,
        "OOM": NoSpaceError,
        "WRONGTYPE": CorruptError,
        "NOREPLICAS": RetryLater,
        "READONLY": RetryLater if where.service else MetadataError,
    }
    for code, error in meant.items():
        assert isinstance(translate_error(errors.ResponseError(text.format(code)), where), error)
    assert isinstance(translate_error(errors.NoScriptError("it is gone"), where), RetryLater)
    assert isinstance(translate_error(errors.InvalidResponse("what"), where), RetryLater)
    garbage = errors.ResponseError("user_script:12: data string too short script: 0a")
    assert isinstance(translate_error(garbage, where), CorruptError)


COMMANDS = (
    "+info +evalsha +script|load +time +get +set +exists +unlink +rename +hget +hmget +hgetall"
    " +hset +hdel +hexists +hlen +hkeys +hvals +hincrby +hscan +sadd +sscan +lrange +llen +rpush"
    " +lrem +zadd +zrem +zscore +zcard +zrange +zrangebyscore +pexpire"
).split()
"""The commands that Redis's ACL has to allow."""


def test_the_documents_list_the_commands_that_an_acl_needs() -> None:
    readme = Path(__file__).resolve().parents[3] / "deploy" / "README.md"
    words = readme.read_text(encoding="utf-8").split()
    assert f"~dfs:* {' '.join(COMMANDS)}`" in " ".join(words)


def test_C14_S8_bad_passwords_and_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"requirepass": SECRET}
    with RedisServer(tmp_path / "redis", options, port=free_port()) as server:
        place = f"127.0.0.1:{server.port}"
        client = server.client()
        execute(client, "ACL", "SETUSER", "poor", "on", f">{SECRET}", "~dfs:*", "+info", "+get")
        execute(client, "ACL", "SETUSER", "fit", "on", f">{SECRET}", "~dfs:*", *COMMANDS)
        for userinfo, wanted in (
            ("", "password"),
            (f":wrong{SECRET}@", "user and password"),
            (f"who:wrong{SECRET}@", "user and password"),
        ):
            with within(1), pytest.raises(MetadataError, match=wanted) as caught:
                RedisMetadata.open(f"redis://{userinfo}{place}")
            assert place in str(caught.value)
            assert SECRET not in str(caught.value)
        with closing(RedisMetadata.open(f"redis://poor:{SECRET}@{place}")) as poor:
            with pytest.raises(MetadataError, match=r"does not allow.*'evalsha'"):
                poor.create(NAME, IDENTITY)
            assert SECRET not in repr(poor)
        file = tmp_path / "password"
        file.write_text(SECRET + "\n")
        file.chmod(0o600)
        monkeypatch.setenv("DIESEL_REDIS_USER", "fit")
        monkeypatch.setenv("DIESEL_REDIS_PASSWORD_FILE", str(file))
        with closing(filled(f"redis://{place}")) as meta:
            check(meta, NAME, [FIRST])
            meta.rebuild(NAME, IDENTITY, [FIRST.batch()])
            meta.children(IDENTITY, b"")
            meta.lock_commits(IDENTITY, 1).release()
            meta.sync()
            meta.drop(IDENTITY)


def test_S14_open_redis_is_warned_of(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    address = outer_address()
    RedisMetadata.open(server.tcp_url).close()
    assert "no password" not in caplog.text
    server.client().config_set("protected-mode", "no")
    server.client().config_set("bind", f"127.0.0.1 {address}")
    RedisMetadata.open(f"redis://{address}:{server.port}").close()
    assert "no password" in caplog.text


def outer_address() -> str:
    """An address of this machine that is not loopback; skips the test if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has only loopback")
        found = str(probe.getsockname()[0])
    if found.startswith("127."):
        pytest.skip("this machine has only loopback")
    return found


def test_C9_a_replica_is_refused(server: RedisServer, own: RedisMetadata, tmp_path: Path) -> None:
    with within(10):
        options = {"replicaof": f"127.0.0.1 {server.port}"}
        with RedisServer(tmp_path / "replica", options) as replica:
            with pytest.raises(MetadataError, match="read-only replica"):
                RedisMetadata.open(replica.url)
            server.client().replicaof("127.0.0.1", free_port())
            with pytest.raises(MetadataError, match="read-only replica"):
                commit(own, MORE)


def test_C15_another_schema_is_refused(shared: RedisServer, stored: RedisMetadata) -> None:
    client = shared.client()
    for schema, error in ((3, NewerVersionError), (1, MetadataError)):
        client.set("dfs:{head}:schema", schema)
        with pytest.raises(error, match=f"schema {schema}, and this program knows 2"):
            RedisMetadata.open(shared.url)
    client.set("dfs:{head}:schema", 3)
    with pytest.raises(NewerVersionError):
        commit(stored, MORE)
    with pytest.raises(NewerVersionError):
        stored.head(NAME)


def test_C16_foreign_keys_stay_and_odd_paths_work(shared: RedisServer) -> None:
    client = shared.client()
    theirs = {b"session:1": b"x", b"dfs": b"y", b"m:{head}": b"z"}
    client.mset(theirs)
    odd = [b"*", b"{x}", b"a}{b/:*", b"?/[a-z]", b"\r\n$5/\0".strip(b"\0") + b"q", b"\xff\xfe/n"]
    with closing(RedisMetadata.open(shared.url)) as meta:
        meta.create(NAME, IDENTITY)
        commit(meta, files(1, *odd))
        check(meta, NAME, [files(1, *odd)])
        own = all_keys(client) - theirs.keys()
        assert len(own) > 10
        assert all(key.startswith(b"dfs:{") for key in own)
        meta.drop(IDENTITY)
    assert all_keys(client) - theirs.keys() == {b"dfs:{head}:schema", b"dfs:{head}:dead"}
    assert {key: client.get(key) for key in theirs} == theirs


def all_keys(client: Redis) -> set[bytes]:
    reply = execute(client, "KEYS", "*")
    assert isinstance(reply, list)
    return set(reply)


class WaitingNode:
    """Stands for a node of a cluster that can wait for its log (Redis 7.2). The first `waits` waits
    for its log fail; then the log is on disk."""

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

    def script_load(self, source: str) -> bytes:
        return sha1(source.encode(), usedforsecurity=False).hexdigest().encode()

    def execute_command(self, *words: object) -> list[int]:
        self.commands.append(words)
        self.waits -= words[0] == "WAITAOF"
        return [self.waits < 0, 0]


def test_C2_sync_waits_for_the_log_of_each_node(cluster: RedisCluster) -> None:
    """`WAITAOF` waits for the writes of its own connection only."""
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
            expected += [("EVALSHA", NOTE_SYNC.sha, 1, key), *([wait] * (waits + 1))]
        assert commands == expected


def test_C2_commits_survive_a_kill_of_redis(server: RedisServer) -> None:
    chunks = [FIRST]
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


def test_C3_an_emptied_redis_knows_no_dataset(shared: RedisServer, stored: RedisMetadata) -> None:
    shared.client().flushall()
    calls: list[Callable[[], object]] = [
        lambda: stored.lookup(IDENTITY, [b"a/x"]),
        lambda: stored.children(IDENTITY, b"a"),
        lambda: commit(stored, MORE),
        lambda: stored.changes(IDENTITY, 0),
        lambda: stored.head(NAME),
    ]
    for call in calls:
        with pytest.raises(NoSuchDataset):
            call()
    stored.rebuild(NAME, IDENTITY, [FIRST.batch()])
    check(stored, NAME, [FIRST])


def test_C3_a_rebuild_across_a_restart_fails(server: RedisServer, own: RedisMetadata) -> None:
    def batches() -> Iterator[object]:
        yield FIRST.batch()
        server.kill()
        server.start()
        yield MORE.batch()

    with pytest.raises(DieselError, match="restarted"):
        own.rebuild(NAME, IDENTITY, batches())  # type: ignore[arg-type]  # a stand-in takes anything
    check(own, NAME, [FIRST])


def test_C7_a_full_memory_stops_only_commits(server: RedisServer, own: RedisMetadata) -> None:
    client = server.client()
    chunks, fault = [FIRST], None
    used = int(client.info("memory")["used_memory"])
    client.config_set("maxmemory", used + (2 << 20))
    while fault is None and len(chunks) < 1000:
        try:
            commit(own, bulky(len(chunks) + 1))
        except DieselError as error:
            fault = error
        else:
            chunks.append(bulky(len(chunks) + 1))
    assert isinstance(fault, NoSpaceError)
    assert fault.exit_code == 16
    assert "maxmemory" in str(fault)
    assert len(chunks) > 3
    client.config_set("maxmemory", used)  # committed pieces are applied nevertheless
    check(own, NAME, chunks)
    with pytest.raises(NoSpaceError):
        own.create("other", uuid.uuid4())
    with pytest.raises(NoSpaceError):
        own.rebuild(NAME, IDENTITY, [chunk.batch() for chunk in chunks])
    client.config_set("maxmemory", 0)
    chunks.append(bulky(len(chunks) + 1))
    commit(own, chunks[-1])
    check(own, NAME, chunks)
    version = own.rebuild(NAME, IDENTITY, [chunk.batch() for chunk in chunks])
    assert version == own.head(NAME).version
    check(own, NAME, chunks)
    assert sum(client.hlen(key) for key in client.keys("dfs:*}:x")) == 0


def test_C7_a_full_memory_lets_pieces_be_applied(server: RedisServer, own: RedisMetadata) -> None:
    """APPLY first removes the piece, and Redis refuses no write of a script after its first."""
    commit_without_applying(server.url, bulky(2).batch())
    server.client().config_set("maxmemory", 1)
    check(own, NAME, [FIRST, bulky(2)])


def test_C7_a_full_memory_lets_room_be_made(server: RedisServer, own: RedisMetadata) -> None:
    """This holds also in a process that opens the store then."""
    commit(own, MORE)
    store = uuid.uuid4()
    RedisMetadata.open(server.url, store=store).close()
    server.client().config_set("maxmemory", 1)
    with closing(RedisMetadata.open(server.url, store=store)) as meta:
        copies = Chunk(3, tuple(Entry(path, first=(1, i)) for i, path in enumerate(PATHS)), True)
        deleted = tombstones(4, b"c")
        commit(meta, copies, deleted)
        check(meta, NAME, [FIRST, MORE, copies, deleted])
        meta.sync()
        meta.lock_commits(IDENTITY, 1).release()
        meta.repair(IDENTITY, str(server.client().info("server")["run_id"]), [])
        commit(meta, more_deleted := tombstones(5, b"b"))
        assert meta.forget(IDENTITY, [FIRST.id, MORE.id]) == {FIRST.id, MORE.id}
        assert meta.forget(IDENTITY, [deleted.id], tombstones=True) == {deleted.id}
        check(meta, NAME, [copies, more_deleted])
        for grows in (files(9, b"d"), Chunk(9, (*more_deleted.entries, Entry(b"d")))):
            with pytest.raises(NoSpaceError, match="maxmemory"):
                commit(meta, grows)
        meta.drop(IDENTITY)
        assert not [key for key in server.client().keys("*") if b"{head}" not in key]
        assert meta.heads() == []


def test_C7_a_redis_that_may_evict_keys_is_refused(server: RedisServer, own: RedisMetadata) -> None:
    """Also if its policy changes while the store is open: a missing key would prove nothing."""
    server.client().config_set("maxmemory-policy", "allkeys-lru")  # with any maxmemory
    calls: list[Callable[[], object]] = [
        own.heads,
        lambda: own.needs_repair(IDENTITY),
        lambda: RedisMetadata.open(server.url),
    ]
    for call in calls:
        with pytest.raises(MetadataError, match=r"evicts keys.*noeviction"):
            call()
    server.client().config_set("maxmemory-policy", "volatile-lru")  # no key has a time to live
    assert [head.name for head in own.heads()] == [NAME]


def test_C8_a_redis_that_cannot_write_stops_commits_and_not_reads(tmp_path: Path) -> None:
    options = {"save": "3600 1", "stop-writes-on-bgsave-error": "yes", "dbfilename": "dump"}
    with RedisServer(tmp_path / "redis", options) as server, closing(filled(server.url)) as meta:
        client = server.client()
        (tmp_path / "redis" / "dump").mkdir()  # a folder: no snapshot can be renamed to it
        client.bgsave()
        until(lambda: client.info()["rdb_last_bgsave_status"] == "err", "a failed snapshot")
        with pytest.raises(NoSpaceError, match="snapshot"):
            commit(meta, MORE)
        check(meta, NAME, [FIRST])
        client.config_set("stop-writes-on-bgsave-error", "no")
        commit_without_applying(server.url, MORE.batch())
        asks: list[Callable[[], object]] = [
            lambda: meta.head(NAME),
            lambda: meta.changes(IDENTITY, 0),
            lambda: meta.lookup(IDENTITY, [b"c"]),
        ]
        with within(5):
            for option, bad, good in (
                ("stop-writes-on-bgsave-error", "yes", "no"),
                ("min-replicas-to-write", "1", "0"),
            ):
                client.config_set(option, bad)
                for ask in asks:
                    with pytest.raises(MetadataBehind, match="cannot be read yet"):
                        ask()
                assert [head.name for head in meta.heads()] == [NAME]
                client.config_set(option, good)
        check(meta, NAME, [FIRST, MORE])


def test_C10_C12_a_busy_pausing_or_loading_redis_is_waited_for(
    server: RedisServer, own: RedisMetadata, pool: ThreadPoolExecutor
) -> None:
    client = server.client()
    client.config_set("busy-reply-threshold", 1)

    spinning = pool.submit(execute, client, "EVAL", "while true do end", 0)
    time.sleep(0.1)
    threading.Timer(0.5, lambda: server.client().script_kill()).start()
    commit(own, MORE)
    assert "killed" in str(spinning.exception())
    client.client_pause(500)
    commit(own, files(3, b"d"))
    server.options["key-load-delay"] = "50000"  # us for each key
    server.options["loading-process-events-interval-bytes"] = "1024"
    server.kill()
    pool.submit(server.start)
    with within(10):
        check(own, NAME, [FIRST, MORE, files(3, b"d")])
        with closing(RedisMetadata.open(server.url)) as fresh:
            check(fresh, NAME, [FIRST, MORE, files(3, b"d")])


def test_C12_a_slow_redis_causes_no_errors(shared: RedisServer) -> None:
    slow = RedisProxy(shared.socket, lambda n, request: "", delay_s=0.1)
    with slow as proxy, closing(filled(proxy.url)) as meta:
        before = proxy.requests
        meta.commit(IDENTITY, *(bulky(number).batch() for number in range(2, 10)))
        assert proxy.requests - before <= 12, "round trips do not depend on how much there is"
        before = proxy.requests
        assert len(meta.children(IDENTITY, b"a")) == 4001
        assert proxy.requests - before <= 6


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


def test_C13_a_hung_redis_fails_in_time(server: RedisServer, pool: ThreadPoolExecutor) -> None:
    with closing(filled(server.url, deadline_s=2)) as meta:
        server.signal(signal.SIGSTOP)
        with within(6):
            pending = [pool.submit(meta.head, NAME) for _ in range(8)]
            assert [type(each.exception(30)) for each in pending] == [DeadlineError] * 8
        server.signal(signal.SIGCONT)
        assert meta.head(NAME).files == 2


@pytest.mark.deep
def test_C13_reads_of_a_hung_redis_fail_soon(server: RedisServer, pool: ThreadPoolExecutor) -> None:
    with closing(filled(server.url, deadline_s=30)) as meta:
        server.signal(signal.SIGSTOP)
        threading.Timer(11, lambda: server.signal(signal.SIGCONT)).start()
        waiting = pool.submit(commit, meta, MORE)
        with within(10), pytest.raises(DieselError):
            meta.head(NAME)
        waiting.result(30)
        check(meta, NAME, [FIRST, MORE])


def test_an_entry_takes_less_than_200_bytes(shared: RedisServer, stored: RedisMetadata) -> None:
    """With its name (16 bytes here) and its part of the folder's and chunk's keys."""
    before = int(shared.client().info("memory")["used_memory"])
    for number in range(10, 30):
        names = (b"train/%05d/%08d.jpeg" % (number // 2, i) for i in range(1000))
        commit(stored, files(number, *names))
    after = int(shared.client().info("memory")["used_memory"])
    assert (after - before) / 20_000 < 200
