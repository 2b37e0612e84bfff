"""The registry of a task, as one master uses it: Redis, directly or through a DIESEL server, or a
fixed list of addresses (`--peers`).

All calls block, for some seconds at most; any thread, one at a time.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ...errors import (
    BusyError,
    CorruptError,
    DeadlineError,
    MetadataError,
    NoSpaceError,
    ObjectStoreError,
    UsageError,
)
from ...net.client_connection import parse_addresses
from ...remote.repository import RemoteRepository
from ...repository.interface import Repository
from ...storage.objects.store import ObjectStore
from ...urls import RepositoryUrl
from .membership import (
    ANY_INSTANCE,
    MEMBERS_MAX,
    JoinReply,
    Member,
    MemberRecord,
    Membership,
    MemberStore,
    TaskName,
    join_message,
    leave_message,
    parse_join_reply,
    secret_from_key,
    split_address,
)

SERVER_S = 1.5
"""The time limit of an attempt through a server: two attempts, and the pause between renewals, take
less time than a registration lasts."""

FIRST_S = 5.0
"""The same for the first registration: all nodes start at once, and must log in first."""

_ATTEMPTS = 2  # on different servers if possible
_UNAVAILABLE = (BusyError, CorruptError, DeadlineError, NoSpaceError, ObjectStoreError)

_LOOPBACK = frozenset(("localhost", "127.0.0.1", "::1"))


class Registry(ABC):
    @abstractmethod
    def renew(self, me: Member) -> Membership:
        """Register, or renew. Returns all current members, this master among them. Raises
        ConflictError if a newer instance has this rank, and MetadataError if a later renewal may
        succeed. Other errors mean that this master may not be in this task, or not with these
        options."""

    @abstractmethod
    def leave(self, me: Member) -> None:
        """Idempotent. After a MetadataError the registration expires by itself."""

    @abstractmethod
    def close(self) -> None:
        """May be called again."""


def open_registrations(
    url: RepositoryUrl, objects: ObjectStore, *, deadline_s: float | None = None
) -> MemberStore:
    """Raises UsageError if the repository has no Redis; ConfigError, MetadataError."""
    if not url.meta:
        raise UsageError(
            f"the nodes of a task find each other through Redis, and {url} has none",
            advice="name all nodes by --peers host:port,..., with a --task-key-file",
        )
    from .redis_registry import DEADLINE_S, RedisMemberStore  # noqa: PLC0415

    return RedisMemberStore.open(
        url.meta, store=objects.store_id, deadline_s=deadline_s or DEADLINE_S
    )


def open_registry(
    repository: Repository,
    task: TaskName,
    *,
    key: bytes | None = None,
    peers: Sequence[str] = (),
) -> Registry:
    """The first renewal connects. If `peers` (masters' addresses by rank) are given, they are the
    members, and Redis is not used. `key` is the key file's content. Raises UsageError if there is
    neither Redis nor `peers`, or `peers` and no key."""
    secret = None if key is None else secret_from_key(key)
    if peers:
        return StaticRegistry(peers, secret)
    if isinstance(repository, RemoteRepository):
        return RedisRegistry(task, secret, lambda: ServerMemberStore(repository))
    if not repository.url.meta:  # its error says what to do
        open_registrations(repository.url, repository.objects)
    url, objects = repository.url, repository.objects
    return RedisRegistry(task, secret, lambda: open_registrations(url, objects))


class StaticRegistry(Registry):
    """The fixed list of `--peers`: all count as members, whether they answer or not."""

    def __init__(self, peers: Sequence[str], secret: bytes | None) -> None:
        if secret is None:
            raise UsageError(
                "nodes that are named by --peers need a common secret",
                advice="give all of them the same --task-key-file",
            )
        if len(peers) > MEMBERS_MAX:
            raise UsageError(f"--peers names {len(peers)} nodes; {MEMBERS_MAX} are the most")
        for address in peers:
            split_address(address)
        if len(set(peers)) < len(peers):
            raise UsageError("--peers names the same address twice")
        self._peers = tuple(peers)
        self._secret = secret

    def renew(self, me: Member) -> Membership:
        """Others' instances and certificates are unknown; their version is assumed to be this
        master's."""
        if me.rank >= len(self._peers):
            raise UsageError(
                f"this is node {me.rank}, and --peers names {len(self._peers)}",
                advice="ranks count from 0",
            )
        members = [
            Member(rank, ANY_INSTANCE, address, me.version, has_key_file=True)
            for rank, address in enumerate(self._peers)
        ]
        members[me.rank] = replace(me, address=self._peers[me.rank], has_key_file=True)
        return Membership.from_members(members, self._secret)

    def leave(self, me: Member) -> None: ...

    def close(self) -> None: ...


class RedisRegistry(Registry):
    def __init__(
        self, task: TaskName, secret: bytes | None, opener: Callable[[], MemberStore]
    ) -> None:
        """`secret` is the key file's; None: registering returns the task's."""
        self._task = task
        self._secret = secret
        self._opener = opener
        self._store: MemberStore | None = None
        self._lock = threading.Lock()
        self._forget_all()

    def _forget_all(self) -> None:
        self._instance = b""  # of the last registration
        self._record = MemberRecord()  # sent at the next renewal
        self._members: tuple[Member, ...] = ()

    def renew(self, me: Member) -> Membership:
        with self._lock, _unavailable_as_metadata_error():
            if me.instance != self._instance:
                self._forget_all()
            mine = replace(me, has_key_file=self._secret is not None)
            reply = self._opened().join(self._task, mine, self._record)
            secret = reply.secret if self._secret is None else self._secret
            members = self._members if reply.members is None else reply.members
            if mine not in members or not secret:
                raise MetadataError("the member store did not keep this master's registration")
            if not self._record.since:
                self._check_alike(mine, members)
            self._instance, self._members = me.instance, members
            self._record = MemberRecord(reply.since, reply.state, reply.secret)
            return replace(
                Membership.from_members(members, secret),
                replaced_address=reply.replaced_address,
                was_forgotten=reply.was_forgotten,
            )

    def _check_alike(self, mine: Member, members: Sequence[Member]) -> None:
        """Raise UsageError if only some nodes have a key file: their secrets would differ."""
        others = [each for each in members if each.has_key_file != mine.has_key_file]
        if others:
            self._opened().leave(self._task, mine)
            article = "a" if others[0].has_key_file else "no"
            raise UsageError(
                f"other nodes of task {self._task.name!r} have {article} --task-key-file",
                advice="give all of them the same, or none",
            )

    def leave(self, me: Member) -> None:
        with self._lock, _unavailable_as_metadata_error():
            self._forget_all()
            self._opened().leave(self._task, me)

    def close(self) -> None:
        with self._lock:
            store, self._store = self._store, None
            if store is not None:
                store.close()

    def _opened(self) -> MemberStore:
        if self._store is None:
            self._store = self._opener()
        return self._store


@contextmanager
def _unavailable_as_metadata_error() -> Iterator[None]:
    """A later renewal may succeed after these errors."""
    try:
        yield
    except _UNAVAILABLE as error:
        raise MetadataError(error.message, advice=error.advice) from error


class ServerMemberStore(MemberStore):
    def __init__(self, repository: RemoteRepository) -> None:
        self._repository = repository
        self._may_send_secret = _is_private_link(repository.url)

    def join(self, task: TaskName, me: Member, record: MemberRecord) -> JoinReply:
        if not self._may_send_secret:
            record = replace(record, secret=b"")
        message = join_message(task, me, record)
        limit_s = SERVER_S if record.since else FIRST_S
        for attempts_left in reversed(range(_ATTEMPTS)):
            try:
                answer = self._repository.ask_task("join", task.identity, message, limit_s)
                return parse_join_reply(answer)
            except (MetadataError, DeadlineError, BusyError) as error:
                if not attempts_left or not error.retry:
                    raise
        raise AssertionError

    def leave(self, task: TaskName, me: Member) -> None:
        message = leave_message(task, me)
        self._repository.ask_task("leave", task.identity, message, SERVER_S)

    def close(self) -> None:
        """The repository closes its connections."""


def _is_private_link(url: RepositoryUrl) -> bool:
    """Whether all connections use TLS or loopback, so that nobody can read a secret."""
    return url.scheme == "diesel+tls" or all(
        each.host in _LOOPBACK for each in parse_addresses(url)
    )
