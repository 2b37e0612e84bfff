"""Talking to a Redis, by itself, under sentinels, or a cluster of them.

Owned here: connections and TLS, pipelines and where each command goes, waiting and trying again,
and what Redis's errors mean to a user. Not owned: keys (`redis_keys.py`), what commands mean.

A call is tried again, with pauses, while Redis may come back (a refused connection, a restart that
is loading, a failover, a slot on its way) and the deadline has not passed; whatever is sent must
therefore be repeatable. What no patience cures (a password, a right, a full memory) fails at once.

Concurrency: connections are lent to one thread for one pipeline, and never cross a fork.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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

from diesel_fs.errors import BusyError, DeadlineError, DieselError, MetadataError, NoSpaceError
from diesel_fs.storage.redis_address import RedisAddress
from diesel_fs.storage.redis_scripts import ALL, Script

log = logging.getLogger("diesel.metadata")

DEADLINE_S = 30.0

_SILENT, _LOADING = "silent", "loading"
_OPEN_S = {"": 4.0, _SILENT: 1.0, _LOADING: DEADLINE_S}
"""How long to try to open a store, by what stands against it: one that is down, or that wants to
hear TLS, is said to be so soon; one that is loading will serve.
"""

_SOCKET_S = 5.0
_CONNECT_S = 3.0
_PAUSE_S = 0.02
_PAUSE_S_MAX = 1.0
_CONNECTIONS_MAX = 1 << 16
_REDIRECTIONS_MAX = 16
_OLDEST = (5, 0)  # scripts that ask for the time and then write

Word = bytes | str | int | float
T = TypeVar("T")

_FOREIGN = (errors.RedisError, errors.RedisClusterException, OSError)


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


class Again(Exception):
    """Not now, but perhaps soon; `final` is the error where there is no time left."""

    def __init__(self, final: DieselError, why: str = "") -> None:
        super().__init__(str(final))
        self.final = final
        self.why = why  # one of those that `_OPEN_S` knows, or nothing


class _Nodes(Protocol):
    """Where commands go."""

    def send(self, commands: Sequence[Command]) -> list[object]:
        """The reply to each, errors among them; of one slot, they are carried out in order."""

    def masters(self) -> "list[Redis]": ...

    def close(self) -> None: ...


class RedisLink:
    """A Redis that can be asked."""

    def __init__(self, address: RedisAddress, nodes: _Nodes, deadline_s: float) -> None:
        self.address = address
        self.deadline_s = deadline_s
        self._nodes: _Nodes | None = nodes

    @classmethod
    def open(cls, address: RedisAddress, deadline_s: float) -> Self:
        """Connect and look around. Raises MetadataError where this is no Redis for us."""
        limits = {why: min(deadline_s, seconds) for why, seconds in _OPEN_S.items()}
        socket_s = max(1.0, min(_SOCKET_S, deadline_s))
        nodes: _Nodes = _patiently(lambda: _connect(address, socket_s), address, limits)
        link = cls(address, nodes, deadline_s)
        try:
            _patiently(link._look_around, address, limits)
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

    def patiently(self, work: Callable[[], T]) -> T:
        """The result of work that can be repeated, tried until the deadline."""
        return _patiently(work, self.address, {"": self.deadline_s})

    def run(self, commands: Sequence[Command]) -> list[object]:
        """The replies to commands, sent together. Raises Again, or what the first error means."""
        if not commands:
            return []
        try:
            return self._run(self._open_nodes, commands)
        except _FOREIGN as error:
            raise _meaning(error, self.address) from error

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

    def scripts(self, runs: Iterable[ScriptCommand]) -> list[object]:
        """The replies to scripts, sent together."""
        return self.run([each.command() for each in runs])

    def run_ids(self) -> list[str]:
        """Which runs of Redis this is: another one may have lost what the last one knew."""
        return sorted(str(master.info("server")["run_id"]) for master in self._masters())

    def wait_durable(self, key: bytes) -> None:
        """Wait until what was written before is on disk, where Redis can say so (7.2 or later)."""
        for master in self._masters():
            info = master.info()
            if not info.get("aof_enabled") or _version(info) < (7, 2):
                continue
            with master.client() as connection:
                if not self.is_cluster:
                    connection.execute_command("HSET", key, "sync", 1)
                left_ms = int(self.deadline_s * 1000)
                (synced, _) = connection.execute_command("WAITAOF", 1, 0, left_ms)
            if not synced:
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
            for script in ALL:
                master.script_load(script.source.decode())

    def _look_around(self) -> None:
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
            policy = str(info.get("maxmemory_policy", "noeviction"))
            if policy.startswith("allkeys") and info.get("maxmemory"):
                raise MetadataError(
                    f"{where} throws keys away when its memory is full (maxmemory-policy {policy})",
                    advice="set maxmemory-policy to noeviction",
                )
            if policy.startswith("allkeys"):
                log.warning("%s would throw keys away: set maxmemory-policy to noeviction", where)
            if not info.get("aof_enabled"):
                log.info("%s keeps no log (appendonly): a crash loses what it was told last", where)
        if not self.address.password and not self.address.local:
            log.warning("%s can be changed by everybody who reaches it: it has no password", where)


def _version(info: dict[str, object]) -> tuple[int, ...]:
    return tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])


def _patiently(work: Callable[[], T], address: RedisAddress, limits: Mapping[str, float]) -> T:
    start, pause = time.monotonic(), _PAUSE_S
    while True:
        try:
            return work()
        except Again as error:
            again, cause = error, error.__cause__
        except _FOREIGN as error:
            told = _meaning(error, address)
            if not isinstance(told, Again):
                raise told from error
            again, cause = told, error
        if time.monotonic() + pause > start + limits.get(again.why, limits[""]):
            raise again.final from cause
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE_S_MAX)


def _meaning(error: Exception, where: RedisAddress) -> DieselError | Again:
    """What an error means to a user; Again where it may pass."""
    cause = error.__cause__
    if isinstance(error, errors.RedisClusterException) and isinstance(cause, errors.RedisError):
        return _meaning(cause, where)
    text = str(error)
    match error:
        case errors.AuthenticationError() | errors.AuthenticationWrongNumberOfArgsError():
            return MetadataError(
                f"{where} does not accept our user and password",
                advice="set DIESEL_REDIS_USER, DIESEL_REDIS_PASSWORD or DIESEL_REDIS_PASSWORD_FILE",
            )
        case errors.NoPermissionError() | errors.AuthorizationError():
            return MetadataError(f"{where} does not allow our user what is needed: {text}")
        case errors.OutOfMemoryError():
            return _full(where, "its memory is full (maxmemory)")
        case errors.ReadOnlyError():
            told = MetadataError(f"{where} is a read-only replica", advice="name the master")
            return told if where.kind == "redis" else Again(told)
        case errors.TimeoutError() if "handshake" in str(error.__context__):
            told = MetadataError(f"no TLS with {where}: it does not answer our greeting")
            return Again(told, _SILENT)
        case errors.TimeoutError():
            return Again(DeadlineError(f"the metadata store {where} did not answer in time"))
        case errors.BusyLoadingError():
            return Again(MetadataError(f"{where} is loading its data"), _LOADING)
        case errors.ConnectionError() if _is_foreign_tls(text):
            return MetadataError(f"no TLS with {where}: {text}")
        case errors.ConnectionError() if _is_hung_up(text) and not where.tls:
            silent = f"the metadata store {where} closes the connection without an answer"
            return Again(MetadataError(silent, advice="if it expects TLS, say rediss://"), _SILENT)
        case errors.ConnectionError() | OSError():
            return Again(MetadataError(f"cannot reach the metadata store {where}: {text}"))
        case (
            errors.RedisClusterException()
            | errors.TryAgainError()
            | errors.ClusterDownError()
            | errors.AskError()
        ):
            return Again(MetadataError(f"the cluster {where} is not complete: {text}"))
    return _reply(text, where)


def _reply(text: str, where: RedisAddress) -> DieselError | Again:
    """The meaning of an error that has no class of its own."""
    code = text.split(" ", 1)[0]
    if code == "NOAUTH":
        return MetadataError(f"{where} wants a password", advice="set DIESEL_REDIS_PASSWORD")
    if code == "MISCONF" or "MISCONF" in text:
        return _full(where, text.removeprefix("MISCONF "))
    if "OOM command not allowed" in text:
        return _full(where, "its memory is full (maxmemory)")
    if code == "BUSY":
        return Again(BusyError(f"{where} is busy with a script"))
    if code in ("LOADING", "NOREPLICAS", "MASTERDOWN", "UNBLOCKED"):
        return Again(MetadataError(f"{where} cannot serve now: {text}"))
    return MetadataError(f"{where} refuses: {text}")


def _full(where: RedisAddress, why: str) -> NoSpaceError:
    return NoSpaceError(f"the metadata store {where} takes nothing more: {why}")


def _is_hung_up(text: str) -> bool:
    return "closed by server" in text or "reset by peer" in text


def _is_foreign_tls(text: str) -> bool:
    faults = ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
    return any(fault in text or fault.replace("_", " ").lower() in text for fault in faults)


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
    if address.kind == "cluster":
        return _Cluster(_cluster(address, options))
    options |= {"retry": _no_retry(), "db": address.database, "max_connections": _CONNECTIONS_MAX}
    if address.kind == "sentinel":
        return _One(_sentinel_master(address, options))
    kind: type[Connection | UnixDomainSocketConnection] = Connection
    if address.socket:
        kind, options["path"] = UnixDomainSocketConnection, address.socket
    else:
        kind = SSLConnection if address.tls else Connection
        ((options["host"], options["port"]),) = address.hosts
    pool = ConnectionPool(connection_class=kind, **options)  # type: ignore[arg-type]
    return _One(Redis(connection_pool=pool))


def _cluster(address: RedisAddress, options: dict[str, object]) -> RedisCluster:
    return RedisCluster(
        startup_nodes=[ClusterNode(host, port) for host, port in address.hosts],
        retry=_no_retry(),
        ssl=address.tls,
        max_connections=_CONNECTIONS_MAX,
        **options,  # type: ignore[arg-type]
    )


def _sentinel_master(address: RedisAddress, options: dict[str, object]) -> Redis:
    own = {**options, "ssl": address.tls}
    of_sentinels = {**own, "username": None, "password": address.sentinel_password or None}
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

    def close(self) -> None:
        self._cluster.close()
        for node in self._cluster.get_nodes():
            if node.redis_connection is not None:
                node.redis_connection.connection_pool.disconnect()
