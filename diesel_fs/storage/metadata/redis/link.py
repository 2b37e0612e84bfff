"""Sends commands to Redis: one server, a server under sentinels, or a cluster.

`with_retries` repeats its work until the deadline while Redis may come back (a refused connection,
a server that is loading, a failover, a slot that is being moved), so every command must be
repeatable. Other errors are raised at once. Nothing is sent after the deadline; long work that
makes progress extends it.

One thread at a time uses a connection, for one pipeline. A forked child opens its own.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
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

from ....errors import DeadlineError, MetadataError
from ..store import log
from .address import RedisAddress
from .bucket_scripts import NOTE_SYNC, SCRIPTS, LoadedScript
from .errors import CLIENT_ERRORS, LOADING, SILENT, RetryLater, safe_cause, translate_error
from .keys import sync_key

DEADLINE_S = 30.0

METADATA_READ_S = 6.0
"""How long a read waits for an unreachable Redis: with the last try, it fails within 10 s. While
Redis loads its data, a read waits as long as a commit."""

_OPEN_S = {"": 4.0, SILENT: 1.0, LOADING: DEADLINE_S}
"""The time to open a store, by the error's reason (`errors.py`): a server that is down (""), or
expects TLS, is reported soon; one that is loading will serve later."""

_SOCKET_S = 3.0
_CONNECT_S = 2.0
_ALL_HOSTS_S = 5.0
"""The time to find that none of an address's hosts answers, one after the other."""

_WAITAOF_MS = 1000  # per command: less than `_SOCKET_S`
_TAGS_MAX = 1 << 16  # remembered slots of keys; also the most tries to find a key on each node
_PAUSE_S = 0.02  # before the second try; then each time twice as long
_PAUSE_S_MAX = 1.0
_CONNECTIONS_MAX = 1 << 16
_REDIRECTIONS_MAX = 16
_OLDEST = (5, 0)  # earlier versions refuse scripts that ask for the time and then write

Word = bytes | str | int | float
T = TypeVar("T")


class RedisCommand(NamedTuple):
    """In a cluster, the slot of `key` decides which node gets the command."""

    key: bytes
    words: Sequence[Word]


def command(word: str, key: bytes, *arguments: Word) -> RedisCommand:
    return RedisCommand(key, (word, key, *arguments))


class ScriptCommand(NamedTuple):
    """All keys are in one slot."""

    script: LoadedScript
    keys: Sequence[bytes]
    arguments: Sequence[Word]

    def command(self) -> RedisCommand:
        words = ("EVALSHA", self.script.sha, len(self.keys), *self.keys, *self.arguments)
        return RedisCommand(self.keys[0], words)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """One server's settings, to find faults."""

    version: str
    policy: str  # its eviction of keys when its memory is full
    used_bytes: int
    limit_bytes: int  # 0: none
    keeps_log: bool  # (appendonly) without it, a crash loses the last writes


class RedisNodes(Protocol):
    def send(self, commands: Sequence[RedisCommand]) -> list[object]:
        """Returns the reply to each command, which may be an exception. Commands of one slot run in
        order."""

    def masters(self) -> "list[Redis]": ...

    def masters_with_keys(self) -> "list[tuple[bytes, Redis]]":
        """Each master that has slots, with a key in one of them."""
        ...

    def close(self) -> None: ...


class _Deadline(threading.local):
    end_s: float = math.inf  # monotonic
    limit_s: float = math.inf  # `extend_deadline` sets `end_s` to this long after now


class RedisLink:
    """Connections to one Redis. Thread-safe."""

    def __init__(self, address: RedisAddress, nodes: RedisNodes, deadline_s: float) -> None:
        self.address = address
        self.deadline_s = deadline_s
        self._open_nodes: RedisNodes | None = nodes
        self._deadline = _Deadline()

    @classmethod
    def open(cls, address: RedisAddress, deadline_s: float) -> Self:
        """Connect, and check the server's settings. Raises MetadataError if it cannot be used."""
        socket_s = max(1.0, min(_SOCKET_S, deadline_s))

        def retried(work: Callable[[], T]) -> T:
            start = time.monotonic()
            ends = {reason: start + min(deadline_s, limit) for reason, limit in _OPEN_S.items()}
            return _with_retries(work, address, lambda reason: ends.get(reason, ends[""]))

        nodes: RedisNodes = retried(lambda: _connect(address, socket_s))
        link = cls(address, nodes, deadline_s)
        try:
            retried(link._check_server)
        except BaseException:
            link.close()
            raise
        return link

    @property
    def is_cluster(self) -> bool:
        return self.address.kind == "cluster"

    def close(self) -> None:
        nodes, self._open_nodes = self._open_nodes, None
        if nodes is not None:
            nodes.close()

    @property
    def nodes(self) -> RedisNodes:
        """Raises MetadataError after `close`."""
        if self._open_nodes is None:
            raise MetadataError("the metadata store is closed")
        return self._open_nodes

    def with_retries(self, work: Callable[[], T], seconds: float = math.inf) -> T:
        """Repeat `work` until it succeeds or the deadline passes. `seconds` is a shorter
        deadline."""
        current, start = self._deadline, time.monotonic()
        outer = current.end_s, current.limit_s
        current.limit_s = min(seconds, self.deadline_s)
        current.end_s = min(current.end_s, start + current.limit_s)

        def end_s(reason: str) -> float:
            if reason == LOADING:
                current.end_s = max(current.end_s, start + self.deadline_s)
            return current.end_s

        try:
            return _with_retries(work, self.address, end_s)
        finally:
            current.end_s, current.limit_s = outer

    def extend_deadline(self) -> None:
        """The work of this thread makes progress: begin its deadline anew."""
        self._deadline.end_s = time.monotonic() + self._deadline.limit_s

    def execute(self, word: str, key: bytes, *arguments: Word) -> object:
        (reply,) = self.run([command(word, key, *arguments)])
        return reply

    def run(self, commands: Sequence[RedisCommand]) -> list[object]:
        """Replies to commands sent together. Raises RetryLater, or the DieselError of the first
        error."""
        if not commands:
            return []
        if time.monotonic() > self._deadline.end_s:
            raise DeadlineError(f"the metadata store {self.address} did not answer in time")
        try:
            return self._run(commands)
        except CLIENT_ERRORS as error:
            raise translate_error(error, self.address) from safe_cause(error, self.address)

    def _run(self, commands: Sequence[RedisCommand]) -> list[object]:
        nodes = self.nodes
        replies = nodes.send(commands)
        unknown = [i for i, each in enumerate(replies) if isinstance(each, errors.NoScriptError)]
        if unknown:
            for master, script in product(nodes.masters(), SCRIPTS):
                master.script_load(script.source.decode())
            again = nodes.send([commands[i] for i in unknown])
            for i, reply in zip(unknown, again, strict=True):
                replies[i] = reply
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    def run_scripts(self, runs: Iterable[ScriptCommand]) -> list[object]:
        return self.run([each.command() for each in runs])

    def run_ids(self) -> list[str]:
        """The run ID of each master. A restarted server has another one, and may have lost data."""
        return sorted(str(master.info("server")["run_id"]) for master in self.nodes.masters())

    def wait_durable(self) -> None:
        """Wait until all earlier writes are on disk, if Redis can report that (7.2 or later, with a
        log). `WAITAOF` waits for its own connection's writes, and so for all before them; therefore
        this writes a key first."""
        for key, master in self.nodes.masters_with_keys():
            info = master.info()
            if not info.get("aof_enabled") or _version(info) < (7, 2):
                continue
            end_s = time.monotonic() + self.deadline_s
            with master.client() as connection:
                script = connection.script_load(NOTE_SYNC.source.decode())
                connection.execute_command("EVALSHA", script, 1, key)
                while not connection.execute_command("WAITAOF", 1, 0, _WAITAOF_MS)[0]:
                    if time.monotonic() > end_s:
                        raise DeadlineError(f"{self.address} has not written its log in time")

    def server_facts(self) -> list[ServerFacts]:
        try:
            return [_facts_in(master.info()) for master in self.nodes.masters()]
        except CLIENT_ERRORS as error:
            raise translate_error(error, self.address) from safe_cause(error, self.address)

    def check_policy(self) -> None:
        """Raise MetadataError if Redis may evict keys: a missing key would prove nothing."""
        for master in self.nodes.masters():
            _check_policy(master.info("memory"), self.address)

    def _check_server(self) -> None:
        where = self.address
        for master in self.nodes.masters():
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
                raise MetadataError(f"{where} is part of a cluster", advice="use redis+cluster://")
            _check_policy(info, where)
            if not info.get("aof_enabled"):
                log.info("%s keeps no log (appendonly no): a crash of it loses recent data", where)
        if not where.password and not where.local:
            log.warning("%s has no password: everybody who can reach it can change it", where)


def _version(info: dict[str, object]) -> tuple[int, ...]:
    return tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])


def _facts_in(info: dict[str, object]) -> ServerFacts:
    return ServerFacts(
        str(info["redis_version"]),
        _policy(info),
        int(str(info.get("used_memory", 0))),
        int(str(info.get("maxmemory", 0))),
        bool(info.get("aof_enabled")),
    )


def _policy(info: dict[str, object]) -> str:
    return str(info.get("maxmemory_policy", "noeviction"))


def _check_policy(info: dict[str, object], where: RedisAddress) -> None:
    policy = _policy(info)
    if policy.startswith("allkeys"):  # even without a maxmemory, which may be set later
        raise MetadataError(
            f"{where} evicts keys when its memory is full (maxmemory-policy {policy})",
            advice="set maxmemory-policy to noeviction",
        )


def _with_retries(work: Callable[[], T], address: RedisAddress, end_s: Callable[[str], float]) -> T:
    """`end_s` returns the deadline by the last error's reason."""
    pause = _PAUSE_S
    while True:
        try:
            return work()
        except RetryLater as error:
            passing, cause = error, error.__cause__
        except CLIENT_ERRORS as error:
            translated, cause = translate_error(error, address), safe_cause(error, address)
            if not isinstance(translated, RetryLater):
                raise translated from cause
            passing = translated
        if time.monotonic() + pause > end_s(passing.reason):
            raise passing.last_error from cause
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE_S_MAX)


def in_portions(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of at most `size` items, so that a pipeline and its replies stay small."""
    rest = iter(items)
    while portion := list(islice(rest, size)):
        yield portion


# Servers, sentinels, clusters


def _connect(address: RedisAddress, socket_s: float) -> RedisNodes:
    options: dict[str, object] = {
        "username": address.user or None,
        "password": address.password or None,
        "socket_timeout": socket_s,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "max_connections": _CONNECTIONS_MAX,
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
        nodes = [ClusterNode(host, port) for host, port in address.hosts]
        return _Cluster(RedisCluster(startup_nodes=nodes, ssl=address.tls, **options))  # type: ignore[arg-type]  # options are passed on
    options["db"] = address.database
    if address.kind == "sentinel":
        return _SingleMaster(_sentinel_master(address, options, min(socket_s, per_host_s)))
    kind: type[Connection | UnixDomainSocketConnection] = Connection
    if address.socket:
        kind, options["path"] = UnixDomainSocketConnection, address.socket
    else:
        kind = SSLConnection if address.tls else Connection
        ((options["host"], options["port"]),) = address.hosts
    pool = ConnectionPool(connection_class=kind, **options)  # type: ignore[arg-type]  # options are passed on
    return _SingleMaster(Redis(connection_pool=pool))


def _sentinel_master(address: RedisAddress, options: dict[str, object], per_host_s: float) -> Redis:
    own = {**options, "ssl": address.tls}
    of_sentinels = {**own, "username": None, "password": address.sentinel_password or None}
    of_sentinels |= {"socket_timeout": per_host_s, "socket_connect_timeout": per_host_s}
    del of_sentinels["db"]
    sentinels = Sentinel(list(address.hosts), sentinel_kwargs=of_sentinels)
    master: Redis = sentinels.master_for(address.service, **own)
    return master


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


class _SingleMaster:
    def __init__(self, node: Redis) -> None:
        self._node = node

    def send(self, commands: Sequence[RedisCommand]) -> list[object]:
        return _send(self._node, [command.words for command in commands])

    def masters(self) -> "list[Redis]":
        return [self._node]

    def masters_with_keys(self) -> "list[tuple[bytes, Redis]]":
        return [(sync_key(0), self._node)]

    def close(self) -> None:
        self._node.connection_pool.disconnect()
        self._node.close()


class _Cluster:
    """The masters of a cluster. redis-py's pipeline sends neither scripts nor scans to clusters."""

    def __init__(self, cluster: RedisCluster) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()
        self._slot_of_tag: dict[bytes, int] = {}

    def send(self, commands: Sequence[RedisCommand]) -> list[object]:
        replies: list[object] = [None] * len(commands)
        unanswered = list(range(len(commands)))
        for _ in range(_REDIRECTIONS_MAX):
            by_node: dict[str, tuple[Redis, list[int]]] = {}
            for i in unanswered:
                node = self._cluster.nodes_manager.get_node_from_slot(self._slot(commands[i].key))
                connection = self._cluster.get_redis_connection(node)
                by_node.setdefault(node.name, (connection, []))[1].append(i)
            unanswered = []
            for connection, chosen in by_node.values():
                try:
                    answers = _send(connection, [commands[i].words for i in chosen])
                except (errors.ConnectionError, errors.TimeoutError):
                    self._update_slots()  # a replica may have taken over
                    raise
                for i, reply in zip(chosen, answers, strict=True):
                    if isinstance(reply, errors.MovedError):
                        unanswered.append(i)
                    elif isinstance(reply, errors.AskError):
                        replies[i] = self._follow(reply, commands[i])
                    else:
                        replies[i] = reply
            if not unanswered:
                return replies
            self._update_slots()
        raise errors.ClusterDownError("CLUSTERDOWN its nodes redirect commands to each other")

    def _follow(self, ask: errors.AskError, command: RedisCommand) -> object:
        node = self._cluster.get_node(ask.host, ask.port)
        if node is None:
            self._update_slots()
            return ask
        return _send(self._cluster.get_redis_connection(node), [("ASKING",), command.words])[1]

    def _update_slots(self) -> None:
        with self._lock:
            self._cluster.nodes_manager.initialize()

    def _slot(self, key: bytes) -> int:
        tag = key[: key.index(b"}") + 1]
        slot = self._slot_of_tag.get(tag)
        if slot is None:
            if len(self._slot_of_tag) > _TAGS_MAX:
                self._slot_of_tag.clear()
            slot = self._slot_of_tag[tag] = key_slot(tag)
        return slot

    def masters(self) -> "list[Redis]":
        nodes = self._cluster.get_primaries()
        return [self._cluster.get_redis_connection(node) for node in nodes]

    def masters_with_keys(self) -> "list[tuple[bytes, Redis]]":
        self._update_slots()
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
