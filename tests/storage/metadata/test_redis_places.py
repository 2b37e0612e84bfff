"""URLs of Redis; Redis with TLS, under sentinels and as a cluster; failovers, slots that are
moved.
"""

import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from redis import Redis
from redis.crc import key_slot

from diesel_fs.errors import ConfigError, MetadataBehind, MetadataError, UsageError
from diesel_fs.storage.metadata.redis.address import parse_redis_url
from diesel_fs.storage.metadata.redis.keys import DatasetKeys, folder_id
from diesel_fs.storage.metadata.redis.store import RedisMetadata
from tests.forks import within
from tests.rows import each_row
from tests.storage.metadata.batches import Chunk, check, commit_and_repair, files
from tests.storage.metadata.metadata_stores import FIRST, IDENTITY, NAME, commit, filled
from tests.storage.metadata.redis_servers import (
    RedisCluster,
    RedisServer,
    execute,
    free_port,
    program,
    until,
)
from tests.storage.metadata.test_redis_faults import COMMANDS
from tests.storage.metadata.watched_redis import live_generation

SECRET = "canary-77c0"  # noqa: S105


def chunk(number: int) -> Chunk:
    return files(number, *(b"folder%d/%d" % (i % 9, number) for i in range(90)), b"same")


@each_row(
    ("url", "kind", "text", "database", "tls"),
    [
        ("redis://h", "redis", "h:6379", 0, False),
        ("redis://u:p@h:7000/3", "redis", "h:7000", 3, False),
        ("rediss://[::1]:7000", "redis", "[::1]:7000", 0, True),
        ("unix:///run/redis.sock?db=2", "redis", "/run/redis.sock", 2, False),
        ("redis+sentinel://a,b:5/main/4", "sentinel", "main by a:26379,b:5", 4, False),
        ("rediss+cluster://a:1,b:2", "cluster", "a:1,b:2", 0, True),
    ],
)
def test_urls_are_parsed(url: str, kind: str, text: str, database: int, tls: bool) -> None:
    found = parse_redis_url(url, {})
    assert (found.kind, str(found), found.database, found.tls) == (kind, text, database, tls)


@each_row(
    "url",
    [
        f"http://{SECRET}@h",
        f"redis://:{SECRET}@h:99999",
        f"redis://:{SECRET}@h:x",
        f"redis://:{SECRET}@h/x",
        f"redis://:{SECRET}@h?what=1",
        f"redis://:x?{SECRET}=1@h",
        f"redis://:{SECRET}@",
        f"redis://:{SECRET}@a,b",
        f"redis+sentinel://:{SECRET}@h",
        f"redis+cluster://:{SECRET}@h/1",
        f"redis://:{SECRET}@[::1",
        "unix://",
    ],
)
def test_S8_bad_urls_are_refused_without_repeating_them(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_redis_url(url, {})
    assert SECRET not in str(caught.value)


def test_S8_user_and_password_come_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    env = {"DIESEL_REDIS_USER": "me", "DIESEL_REDIS_PASSWORD_FILE": str(file)}
    address = parse_redis_url("redis://h", env)
    assert (address.user, address.password) == ("me", SECRET)
    assert SECRET not in repr(address) + str(address)
    other = parse_redis_url("redis://h", env | {"DIESEL_REDIS_PASSWORD": "other"})
    own = parse_redis_url("redis://you:p%40ss@h", env)
    assert [other.password, own.password] == ["other", "p@ss"]
    with pytest.raises(ConfigError, match="no-such"):
        parse_redis_url("redis://h", {"DIESEL_REDIS_PASSWORD_FILE": "/no-such"})


@pytest.fixture
def tls(tmp_path: Path) -> Iterator[tuple[RedisServer, Path]]:
    """A server with a certificate for "localhost", and the certificate's path."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [program("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    options = {
        "tls-port": str(free_port()),
        "tls-cert-file": str(certificate),
        "tls-key-file": str(key),
        "tls-ca-cert-file": str(certificate),
        "tls-auth-clients": "no",
    }
    with RedisServer(tmp_path / "redis", options, port=free_port()) as server:
        yield server, certificate


def test_C14_tls_connects_and_its_faults_are_named(tls: tuple[RedisServer, Path]) -> None:
    server, certificate = tls
    port = server.options["tls-port"]
    with closing(filled(f"rediss://localhost:{port}?ca={certificate}")) as meta:
        check(meta, NAME, [FIRST])
    refused = {
        f"redis://localhost:{port}": f"localhost:{port}.*if it expects TLS, use rediss://",
        f"rediss://localhost:{port}": f"no TLS with localhost:{port}.*certificate verify failed",
        f"rediss://127.0.0.1:{port}?ca={certificate}": f"no TLS.*:{port}.*IP address mismatch",
    }
    for url, why in refused.items():
        with within(2.5), pytest.raises(MetadataError, match=why):
            RedisMetadata.open(url)
    with pytest.raises(MetadataError, match=f"no TLS with 127.0.0.1:{server.port}"):
        RedisMetadata.open(server.tcp_url.replace("redis://", "rediss://"))


class Sentinels:
    def __init__(self, folder: Path) -> None:
        at_once = {"repl-diskless-sync-delay": "0"}
        self.master = RedisServer(folder / "master", at_once, port=free_port())
        replica = {"replicaof": f"127.0.0.1 {self.master.port}", **at_once}
        self.replica = RedisServer(folder / "replica", replica, port=free_port())
        self.port = free_port()
        config = folder / "sentinel.conf"
        config.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {folder}\nlogfile {folder}/sentinel.log\n"
            f"sentinel monitor main 127.0.0.1 {self.master.port} 1\n"
            "sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 3000\n"
        )
        replicates = self.replica.client().info
        until(lambda: replicates("replication")["master_link_status"] == "up", "the replica")
        command = ["setpriv", "--pdeathsig", "KILL", program("redis-server"), str(config)]
        self.process = subprocess.Popen([*command, "--sentinel"], stdout=subprocess.DEVNULL)
        until(lambda: execute(self.client(), "SENTINEL", "REPLICAS", "main"), "the sentinel")

    def copied(self) -> bool:
        """Return whether the replica has all data that the master had before the call."""
        with self.master.client() as client:
            client.set("written", "since")  # WAIT covers only writes of its own connection
            return bool(client.wait(1, 1000))

    def fail_over(self) -> bool:
        """False, or an error, while the sentinel does not know the replica well enough."""
        return bool(execute(self.client(), "SENTINEL", "FAILOVER", "main"))

    def client(self) -> Redis:
        return Redis(port=self.port, protocol=2)

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.port}/main"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.master.close()
        self.replica.close()


@pytest.fixture
def sentinels(tmp_path: Path) -> Iterator[Sentinels]:
    with closing(Sentinels(tmp_path)) as found:
        yield found


def test_C9_a_failover_to_a_replica_is_followed(sentinels: Sentinels) -> None:
    with closing(filled(sentinels.url)) as meta:
        done = [FIRST]
        until(sentinels.copied, "the replica")
        until(sentinels.fail_over, "a failover")
        start = time.monotonic()
        while sentinels.replica.client().info("replication")["role"] != "master" or len(done) < 20:
            done.append(chunk(len(done) + 1))
            commit_and_repair(meta, IDENTITY, done[-1].batch())
            assert time.monotonic() - start < 30
        for each in done:  # commits that the failover has lost (C11)
            commit_and_repair(meta, IDENTITY, each.batch())
        check(meta, NAME, done)
    assert sentinels.replica.client().dbsize()


def test_C9_a_failover_from_a_dead_master_is_followed(sentinels: Sentinels) -> None:
    with closing(filled(sentinels.url)) as meta:
        until(sentinels.copied, "the replica")
        with within(20):
            sentinels.master.kill()
            commit_and_repair(meta, IDENTITY, chunk(2).batch())
        check(meta, NAME, [FIRST, chunk(2)])


def test_a_dataset_spreads_over_a_cluster(cluster: RedisCluster) -> None:
    with closing(RedisMetadata.open(cluster.url)) as meta:
        meta.create(NAME, IDENTITY)
        many = files(1, *(b"folder%d/f" % i for i in range(300)))
        commit(meta, many)
        check(meta, NAME, [many])
        sizes = [int(node.client().dbsize()) for node in cluster.nodes]
        assert min(sizes) > 100
        meta.rebuild(NAME, IDENTITY, [many.batch()])
        check(meta, NAME, [many])
        meta.drop(IDENTITY)
        sizes = [int(node.client().dbsize()) for node in cluster.nodes]
        assert sum(sizes) == 2, "schema, and the list of the dead"


def test_C14_the_listed_commands_suffice_in_a_cluster(cluster: RedisCluster) -> None:
    rights = [*COMMANDS, "+cluster|slots", "+command", "+asking"]
    for node in cluster.nodes:
        execute(node.client(), "ACL", "SETUSER", "fit", "on", f">{SECRET}", "~dfs:*", *rights)
    url = cluster.url.replace("://", f"://fit:{SECRET}@")
    with closing(filled(url)) as meta:
        check(meta, NAME, [FIRST])
        assert SECRET not in repr(meta)
    with pytest.raises(MetadataError, match="user and password") as caught:
        RedisMetadata.open(url.replace(SECRET, SECRET + "x"))
    assert SECRET not in str(caught.value)


def test_C10_one_node_of_a_cluster_alone_is_refused(cluster: RedisCluster) -> None:
    with pytest.raises(MetadataError, match=r"use redis\+cluster://"):
        RedisMetadata.open(cluster.nodes[0].tcp_url)


@pytest.mark.parametrize("whose", ["bucket", "head"])
def test_C10_slots_that_are_being_moved_are_followed(
    cluster: RedisCluster, pool: ThreadPoolExecutor, whose: str
) -> None:
    """Redis replies ASK while a slot is being moved (TRYAGAIN to scripts), and MOVED afterwards."""
    with closing(filled(cluster.url)) as meta:
        done = [FIRST, chunk(2)]
        commit(meta, chunk(2))
        generation = live_generation(cluster.url)
        bucket_key = generation.entries(folder_id(b"folder3"))
        slot = key_slot(bucket_key if whose == "bucket" else DatasetKeys(IDENTITY).head)
        clients = [node.client() for node in cluster.nodes]
        ids = [node_id(client) for client in clients]
        source = next(i for i, (low, high) in enumerate(BOUNDS) if low <= slot < high)
        target = (source + 1) % 3
        execute(clients[target], "CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        execute(clients[source], "CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        try:
            keys = execute(clients[source], "CLUSTER", "GETKEYSINSLOT", slot, 1000)
            assert isinstance(keys, list)
            assert len(keys) > 3
            migrate(clients[source], cluster.nodes[target], keys[: len(keys) // 2])
            if whose == "bucket":
                check(meta, NAME, done)  # reads are redirected to the keys' new place
            writing = pool.submit(commit_and_repair, meta, IDENTITY, chunk(3).batch())
            time.sleep(0.4)
            left = execute(clients[source], "CLUSTER", "GETKEYSINSLOT", slot, 1000)
            assert isinstance(left, list)
            migrate(clients[source], cluster.nodes[target], left)
            for client in (clients[target], clients[source], *clients):
                execute(client, "CLUSTER", "SETSLOT", slot, "NODE", ids[target])
            writing.result(40)
            check(meta, NAME, [*done, chunk(3)])
            with closing(RedisMetadata.open(cluster.url)) as fresh:
                commit_and_repair(fresh, IDENTITY, chunk(4).batch())
                check(fresh, NAME, [*done, chunk(3), chunk(4)])
        finally:
            cluster.flush()
            for client in (clients[target], clients[source], *clients):
                execute(client, "CLUSTER", "SETSLOT", slot, "STABLE")
            for client in (clients[source], clients[target], *clients):
                execute(client, "CLUSTER", "SETSLOT", slot, "NODE", ids[source])


BOUNDS = [(0, 5461), (5461, 10923), (10923, 16384)]


def node_id(client: Redis) -> str:
    reply = execute(client, "CLUSTER", "MYID")
    return reply.decode() if isinstance(reply, bytes) else str(reply)


def migrate(source: Redis, target: RedisServer, keys: list[bytes]) -> None:
    if keys:
        execute(source, "MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)


def test_a_cluster_waits_for_a_node_that_is_dead(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    cluster = RedisCluster(tmp_path, {"appendonly": "yes", "appendfsync": "always"})
    with closing(cluster), closing(filled(cluster.url)) as meta:
        cluster.nodes[1].kill()
        writing = pool.submit(commit_and_repair, meta, IDENTITY, chunk(2).batch())
        time.sleep(0.5)
        cluster.nodes[1].start()
        assert writing.result(40)
        check(meta, NAME, [FIRST, chunk(2)])


def test_C11_a_node_of_a_cluster_that_comes_back_empty_is_an_error(tmp_path: Path) -> None:
    cluster = RedisCluster(tmp_path)
    with closing(cluster), closing(filled(cluster.url)) as meta:
        done = [chunk(2)]
        commit(meta, *done)
        done.append(FIRST)
        slot = key_slot(DatasetKeys(IDENTITY).head)
        node = next(
            i
            for i, (low, high) in enumerate(BOUNDS)
            if not low <= slot < high and int(cluster.nodes[i].client().dbsize())
        )
        cluster.nodes[node].kill()
        cluster.nodes[node].start()
        for _ in range(3):
            for ask in (
                lambda: meta.head(NAME),
                lambda: meta.changes(IDENTITY, 0),
                lambda: meta.lookup(IDENTITY, [b"folder%d/1" % i for i in range(9)]),
            ):
                with pytest.raises(MetadataBehind, match="has lost"):
                    ask()
            done.append(chunk(len(done) + 1))
            commit_and_repair(meta, IDENTITY, done[-1].batch())
        meta.rebuild(NAME, IDENTITY, [each.batch() for each in done])
        check(meta, NAME, done)


def test_numbers_that_scripts_cannot_hold_are_refused(cluster: RedisCluster) -> None:
    with closing(RedisMetadata.open(cluster.url)) as meta:
        meta.create(NAME, IDENTITY)
        with pytest.raises(UsageError):
            commit(meta, files(1, b"huge", size=1 << 60))
        commit(meta, files(1, b"large", size=1 << 50))
        assert meta.head(NAME).bytes == 1 << 50
