"""Talking to a Redis, by itself, under sentinels, or a cluster of them.

Owned here: connections and TLS, pipelines and where each command goes, waiting and trying again.
Not owned: keys (`keys.py`), what commands mean, what errors mean (`errors.py`).

A call is tried again, with pauses, while Redis may come back (a refused connection, a restart that
is loading, a failover, a slot on its way) and the deadline has not passed; whatever is sent must
therefore be repeatable. What no patience cures (a password, a right, a full memory) fails at once.
Nothing is sent after the deadline, except by what gets on and says so (`extend_deadline`).

Concurrency: connections are lent to one thread for one pipeline, and never cross a fork.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, Self, TypeVar

import redis.exceptions as errors
from redis import (
    Connection,
    ConnectionPool,
    Redis,
    Sentinel,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.crc import key_slot
from redis.retry import Retry

from diesel_fs.errors import DeadlineError, MetadataError
from diesel_fs.storage.metadata.redis.address import RedisAddress
from diesel_fs.storage.metadata.redis.bucket_scripts import SCRIPTS, Script
from diesel_fs.storage.metadata.redis.errors import (
    CLIENT_ERRORS,
    LOADING,
    SILENT,
    RetryLater,
    safe_cause,
    translate_error,
)
from diesel_fs.storage.metadata.redis.keys import sync_key

log = logging.getLogger("diesel.metadata")

DEADLINE_S = 30.0

METADATA_READ_S = 6.0
"""How long who only looks waits for a Redis that is away: with what one try may take, it is told so
within 10 s. One that is loading is waited for as for a commit."""

_OPEN_S = {"": 4.0, SILENT: 1.0, LOADING: DEADLINE_S}
"""How long to try to open a store, by what stands against it: one that is down, or that wants to
hear TLS, is said to be so soon; one that is loading will serve.
"""

_SOCKET_S = 3.0
_CONNECT_S = 2.0
_ALL_HOSTS_S = 5.0
"""How long it may take to find all hosts of an address hung, one after the other."""

_WAITAOF_MS = 1000  # at a time: less than a connection waits for any answer
_TAGS_MAX = 1 << 16
_PAUSE_S = 0.02
_PAUSE_S_MAX = 1.0
_CONNECTIONS_MAX = 1 << 16
_REDIRECTIONS_MAX = 16
_OLDEST = (5, 0)  # scripts that ask for the time and then write

Word = bytes | str | int | float
T = TypeVar("T")


class Command(NamedTuple):
    """A command and the key whose slot it belongs to."""

    key: bytes
    words: Sequence[Word]


class ScriptCommand(NamedTuple):
    """A script's run."""

    script: Script
    keys: Sequence[bytes]
    arguments: Sequence[Word]

    def command(self) -> Command:
        """What is sent."""
        words = ("EVALSHA", self.script.sha, len(self.keys), *self.keys, *self.arguments)
        return Command(self.keys[0], words)


class _Nodes(Protocol):
    """Where commands go."""

    def send(self, commands: Sequence[Command]) -> list[object]:
        """The reply to each, errors among them; of one slot, they are carried out in order."""

    def masters(self) -> "list[Redis]": ...

    def slots(self) -> "list[tuple[bytes, Redis]]":
        """Those that have keys, and a key that each has."""
        ...

    def close(self) -> None: ...


class _Time(threading.local):
    """How long this thread may still wait."""

    end_s: float = math.inf
    limit_s: float = math.inf


class RedisLink:
    """A Redis that can be asked."""

    def __init__(self, address: RedisAddress, nodes: _Nodes, deadline_s: float) -> None:
        self.address = address
        self.deadline_s = deadline_s
        self._nodes: _Nodes | None = nodes
        self._time = _Time()

    @classmethod
    def open(cls, address: RedisAddress, deadline_s: float) -> Self:
        """Connect and look around. Raises MetadataError where this is no Redis for us."""
        socket_s = max(1.0, min(_SOCKET_S, deadline_s))

        def patiently(work: Callable[[], T]) -> T:
            start = time.monotonic()
            ends = {why: start + min(deadline_s, limit) for why, limit in _OPEN_S.items()}
            return _with_retries(work, address, lambda why: ends.get(why, ends[""]))

        nodes: _Nodes = patiently(lambda: _connect(address, socket_s))
        link = cls(address, nodes, deadline_s)
        try:
            patiently(link._check_server)
        except BaseException:
            link.close()
            raise
        return link

    @property
    def is_cluster(self) -> bool:
        """Whether keys lie on several nodes."""
        return self.address.kind == "cluster"

    def close(self) -> None:
        """Drop the connections."""
        nodes, self._nodes = self._nodes, None
        if nodes is not None:
            nodes.close()

    def with_retries(self, work: Callable[[], T], seconds: float = math.inf) -> T:
        """The result of work that can be repeated, tried until the deadline, or so long."""
        outer, start = (self._time.end_s, self._time.limit_s), time.monotonic()
        self._time.limit_s = min(seconds, self.deadline_s)
        self._time.end_s = min(outer[0], start + self._time.limit_s)

        def end_s(why: str) -> float:
            if why == LOADING:
                self._time.end_s = max(self._time.end_s, start + self.deadline_s)
            return self._time.end_s

        try:
            return _with_retries(work, self.address, end_s)
        finally:
            self._time.end_s, self._time.limit_s = outer

    def extend_deadline(self) -> None:
        """What this thread is doing gets on: its deadline counts from now."""
        self._time.end_s = time.monotonic() + self._time.limit_s

    def run(self, commands: Sequence[Command]) -> list[object]:
        """The replies to commands, sent together. Raises Again, or what the first error means."""
        if not commands:
            return []
        if time.monotonic() > self._time.end_s:
            raise DeadlineError(f"the metadata store {self.address} did not answer in time")
        try:
            return self._run(self._open_nodes, commands)
        except CLIENT_ERRORS as error:
            raise translate_error(error, self.address) from safe_cause(error, self.address)

    def _run(self, nodes: _Nodes, commands: Sequence[Command]) -> list[object]:
        replies = nodes.send(commands)
        unknown = [i for i, each in enumerate(replies) if isinstance(each, errors.NoScriptError)]
        if unknown:
            self._load_scripts()
            again = nodes.send([commands[i] for i in unknown])
            for i, reply in zip(unknown, again, strict=True):
                replies[i] = reply
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    def run_scripts(self, runs: Iterable[ScriptCommand]) -> list[object]:
        """The replies to scripts, sent together."""
        return self.run([each.command() for each in runs])

    def run_ids(self) -> list[str]:
        """Which runs of Redis this is: another one may have lost what the last one knew."""
        return sorted(str(master.info("server")["run_id"]) for master in self._masters())

    def wait_durable(self) -> None:
        """Wait until what was written before is on disk, where Redis can say so (7.2 or later).

        Each node waits for what one connection has written: so that one writes last.
        """
        for key, master in self._open_nodes.slots():
            info = master.info()
            if not info.get("aof_enabled") or _version(info) < (7, 2):
                continue
            end_s = time.monotonic() + self.deadline_s
            with master.client() as connection:
                connection.execute_command("HSET", key, "sync", 1)
                while not connection.execute_command("WAITAOF", 1, 0, _WAITAOF_MS)[0]:
                    if time.monotonic() > end_s:
                        raise DeadlineError(f"{self.address} has not written its log in time")

    def _masters(self) -> "list[Redis]":
        return self._open_nodes.masters()

    @property
    def _open_nodes(self) -> _Nodes:
        if self._nodes is None:
            raise MetadataError("the metadata store is closed")
        return self._nodes

    def _load_scripts(self) -> None:
        for master in self._masters():
            for script in SCRIPTS:
                master.script_load(script.source.decode())

    def check_policy(self) -> None:
        """Raises MetadataError where Redis may throw keys away: nothing of it is proof then."""
        for master in self._masters():
            _check_policy(master.info("memory"), self.address)

    def _check_server(self) -> None:
        where = self.address
        for master in self._masters():
            info = master.info()
            if info.get("loading"):
                raise errors.BusyLoadingError("LOADING")
            if _version(info) < _OLDEST:
                raise MetadataError(
                    f"{where} is Redis {info['redis_version']}; 5.0 or later is needed"
                )
            if info.get("role") != "master":
                raise MetadataError(
                    f"{where} is a read-only replica", advice="name the master, or its sentinels"
                )
            if info.get("cluster_enabled") and not self.is_cluster:
                raise MetadataError(f"{where} is part of a cluster", advice="say redis+cluster://")
            _check_policy(info, where)
            if not info.get("aof_enabled"):
                log.info("%s keeps no log (appendonly): a crash loses what it was told last", where)
        if not self.address.password and not self.address.local:
            log.warning("%s can be changed by everybody who reaches it: it has no password", where)


def _version(info: dict[str, object]) -> tuple[int, ...]:
    return tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])


def _check_policy(info: dict[str, object], where: RedisAddress) -> None:
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy.startswith("allkeys"):  # whatever its memory is limited to now
        raise MetadataError(
            f"{where} throws keys away when its memory is full (maxmemory-policy {policy})",
            advice="set maxmemory-policy to noeviction",
        )


def _with_retries(work: Callable[[], T], address: RedisAddress, end_s: Callable[[str], float]) -> T:
    """The result of work, tried until the time that `end_s` gives to what stands against it."""
    pause = _PAUSE_S
    while True:
        try:
            return work()
        except RetryLater as error:
            again, cause = error, error.__cause__
        except CLIENT_ERRORS as error:
            told, cause = translate_error(error, address), safe_cause(error, address)
            if not isinstance(told, RetryLater):
                raise told from cause
            again = told
        if time.monotonic() + pause > end_s(again.reason):
            raise again.last_error from cause
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE_S_MAX)


# Where commands go


def _connect(address: RedisAddress, socket_s: float) -> _Nodes:
    options: dict[str, object] = {
        "username": address.user or None,
        "password": address.password or None,
        "socket_timeout": socket_s,
        "protocol": 2,
    }
    if not address.socket:
        options["socket_connect_timeout"] = min(_CONNECT_S, socket_s)
    if address.tls:
        options |= {
            "ssl_cert_reqs": "required",
            "ssl_check_hostname": True,
            "ssl_ca_certs": address.ca or None,
            "ssl_certfile": address.certificate or None,
            "ssl_keyfile": address.key or None,
        }
    per_host_s = _ALL_HOSTS_S / max(1, len(address.hosts))
    if address.kind == "cluster":
        options["socket_timeout"] = min(socket_s, max(1.5, per_host_s))
        return _Cluster(_cluster(address, options))
    options |= {"retry": _no_retry(), "db": address.database, "max_connections": _CONNECTIONS_MAX}
    if address.kind == "sentinel":
        return _One(_sentinel_master(address, options, min(socket_s, per_host_s)))
    kind: type[Connection | UnixDomainSocketConnection] = Connection
    if address.socket:
        kind, options["path"] = UnixDomainSocketConnection, address.socket
    else:
        kind = SSLConnection if address.tls else Connection
        ((options["host"], options["port"]),) = address.hosts
    pool = ConnectionPool(connection_class=kind, **options)  # type: ignore[arg-type]  # what came is passed on
    return _One(Redis(connection_pool=pool))


def _cluster(address: RedisAddress, options: dict[str, object]) -> RedisCluster:
    return RedisCluster(
        startup_nodes=[ClusterNode(host, port) for host, port in address.hosts],
        retry=_no_retry(),
        ssl=address.tls,
        max_connections=_CONNECTIONS_MAX,
        **options,  # type: ignore[arg-type]  # what came is passed on
    )


def _sentinel_master(address: RedisAddress, options: dict[str, object], per_host_s: float) -> Redis:
    own = {**options, "ssl": address.tls}
    of_sentinels = {**own, "username": None, "password": address.sentinel_password or None}
    of_sentinels |= {"socket_timeout": per_host_s, "socket_connect_timeout": per_host_s}
    del of_sentinels["db"]
    sentinels = Sentinel(list(address.hosts), sentinel_kwargs=of_sentinels)
    master: Redis = sentinels.master_for(address.service, **own)
    return master


def _no_retry() -> Retry:
    """Trying again is decided here alone."""
    return Retry(NoBackoff(), 0)


def _send(node: Redis, commands: Sequence[Sequence[Word]]) -> list[object]:
    if len(commands) == 1:
        try:
            return [node.execute_command(*commands[0])]
        except (errors.ResponseError, errors.BusyLoadingError) as error:
            return [error]
    with node.pipeline(transaction=False) as pipe:
        for words in commands:
            pipe.execute_command(*words)
        return list(pipe.execute(raise_on_error=False))


class _One:
    """A Redis by itself, or the master that sentinels name."""

    def __init__(self, node: Redis) -> None:
        self._node = node

    def send(self, commands: Sequence[Command]) -> list[object]:
        return _send(self._node, [command.words for command in commands])

    def masters(self) -> "list[Redis]":
        return [self._node]

    def slots(self) -> "list[tuple[bytes, Redis]]":
        return [(sync_key(0), self._node)]

    def close(self) -> None:
        self._node.connection_pool.disconnect()
        self._node.close()


class _Cluster:
    """All nodes of a cluster; which has what is learnt from their redirections."""

    def __init__(self, cluster: RedisCluster) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()
        self._slots: dict[bytes, int] = {}

    def send(self, commands: Sequence[Command]) -> list[object]:
        replies: list[object] = [None] * len(commands)
        left = list(range(len(commands)))
        for _ in range(_REDIRECTIONS_MAX):
            groups: dict[str, tuple[Redis, list[int]]] = {}
            for i in left:
                place = self._cluster.nodes_manager.get_node_from_slot(self._slot(commands[i].key))
                connection = self._cluster.get_redis_connection(place)
                groups.setdefault(place.name, (connection, []))[1].append(i)
            left, has_moved = [], False
            for node, chosen in groups.values():
                for i, reply in zip(chosen, self._ask(node, commands, chosen), strict=True):
                    if isinstance(reply, errors.MovedError):
                        has_moved = True
                        left.append(i)
                    elif isinstance(reply, errors.AskError):
                        replies[i] = self._follow(reply, commands[i])
                    else:
                        replies[i] = reply
            if not left:
                return replies
            if has_moved:
                self._learn()
        raise errors.ClusterDownError("CLUSTERDOWN it sends us from node to node")

    def _ask(self, node: Redis, commands: Sequence[Command], chosen: Sequence[int]) -> list[object]:
        try:
            return _send(node, [commands[i].words for i in chosen])
        except (errors.ConnectionError, errors.TimeoutError):
            self._learn()  # a replica may have taken over
            raise

    def _follow(self, ask: errors.AskError, command: Command) -> object:
        """Ask the node to which a slot is on its way."""
        node = self._cluster.get_node(ask.host, ask.port)
        if node is None:
            self._learn()
            return ask
        return _send(self._cluster.get_redis_connection(node), [("ASKING",), command.words])[1]

    def _learn(self) -> None:
        with self._lock:
            self._cluster.nodes_manager.initialize()

    def _slot(self, key: bytes) -> int:
        tag = key[: key.index(b"}") + 1]
        slot = self._slots.get(tag)
        if slot is None:
            if len(self._slots) > 1 << 16:
                self._slots.clear()
            slot = self._slots[tag] = key_slot(tag)
        return slot

    def masters(self) -> "list[Redis]":
        nodes = self._cluster.get_primaries()
        return [self._cluster.get_redis_connection(node) for node in nodes]

    def slots(self) -> "list[tuple[bytes, Redis]]":
        self._learn()
        manager, found = self._cluster.nodes_manager, dict[str, tuple[bytes, Redis]]()
        wanted = {nodes[0].name for nodes in manager.slots_cache.values() if nodes}
        for number in range(_TAGS_MAX):
            if len(found) == len(wanted):
                break
            key = sync_key(number)
            node = manager.get_node_from_slot(self._slot(key))
            connection = self._cluster.get_redis_connection(node)
            found.setdefault(node.name, (key, connection))
        return [*found.values()]

    def close(self) -> None:
        self._cluster.close()
        for node in self._cluster.get_nodes():
            if node.redis_connection is not None:
                node.redis_connection.connection_pool.disconnect()
