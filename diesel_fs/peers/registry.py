"""Where a master registers, and from which it learns who else is in its task.

Owned here: which place that is (Redis, directly or behind a server; or a list of addresses that
never changes), and what a master must remember between two renewals. Not owned: what is kept of it
(`redis_registry.py`), when a master renews and what follows from an answer (`master.py`).

All calls block, for some seconds at most, and may be made from any thread; one goes on at a time.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from urllib.parse import urlsplit

from ..errors import (
    BusyError,
    CorruptError,
    DeadlineError,
    MetadataError,
    NoSpaceError,
    ObjectStoreError,
    UsageError,
)
from ..remote.repository import RemoteRepository
from ..repository.interface import Repository
from ..storage.objects.store import ObjectStore
from ..urls import RepositoryUrl
from .membership import (
    ANY_INSTANCE,
    MEMBERS_MAX,
    Member,
    Membership,
    TaskName,
    secret_from_key,
    split_address,
)
from .registration import (
    JoinReply,
    MemberRecord,
    MemberStore,
    join_message,
    leave_message,
    parse_join_reply,
)

SERVER_S = 1.5
"""For one try through a server: two, and a renewal, are over before a registration is."""

FIRST_S = 5.0
"""For one try to register at all: all nodes of a task start at once, and log in first."""

_TRIES = 2  # the second goes to another server, where there is one
_AWAY = (BusyError, CorruptError, DeadlineError, NoSpaceError, ObjectStoreError)
_LOOPBACK = frozenset(("localhost", "127.0.0.1", "::1"))


class Registry(ABC):
    """The task of one master, as it sees it."""

    @abstractmethod
    def renew(self, me: Member) -> Membership:
        """Register, or renew that; who is in the task now, this master among them.

        Raises ConflictError where a newer instance has its rank; MetadataError where that cannot be
        told now, and the next renewal may succeed; other errors of the tree say that this master
        may not be in this task, or not in this way.
        """

    @abstractmethod
    def leave(self, me: Member) -> None:
        """End the registration. Idempotent. Raises MetadataError: it ends by its time."""

    @abstractmethod
    def close(self) -> None:
        """Let go of connections. Repeatable."""


def open_registrations(
    url: RepositoryUrl, objects: ObjectStore, *, deadline_s: float | None = None
) -> MemberStore:
    """Where the masters of tasks register, in a repository whose objects are open. `deadline_s` is
    for each call. Raises UsageError where there is no such place; ConfigError, MetadataError.
    """
    if not url.meta:
        raise UsageError(
            f"the nodes of a task find each other through Redis, and {url} has none",
            advice="name all nodes by --peers host:port,..., with a --task-key-file",
        )
    from .redis_registry import DEADLINE_S, RedisMemberStore  # noqa: PLC0415  # a tenth of a second

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
    """Where the masters of a task register: `peers` are their addresses, by rank, where nothing
    else says them; `key` is what their key file holds. Nothing is connected before a renewal.

    Raises UsageError where there is neither Redis nor `peers`, or no key where one is needed.
    """
    secret = None if key is None else secret_from_key(key)
    if peers:
        return StaticRegistry(peers, secret)
    if isinstance(repository, RemoteRepository):
        return RedisRegistry(task, secret, lambda: ServerMemberStore(repository))
    if not repository.url.meta:  # says what to do
        open_registrations(repository.url, repository.objects)
    url, objects = repository.url, repository.objects
    return RedisRegistry(task, secret, lambda: open_registrations(url, objects))


class StaticRegistry(Registry):
    """Addresses that somebody has written down: all of them count, whoever is there or not."""

    def __init__(self, peers: Sequence[str], secret: bytes | None) -> None:
        """Raises UsageError."""
        if secret is None:
            raise UsageError(
                "nodes that --peers names have no secret in common",
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
        """All, with my version; of the others nobody knows instance and certificate."""
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
    """Registrations in Redis, by whatever way."""

    def __init__(
        self, task: TaskName, secret: bytes | None, opener: Callable[[], MemberStore]
    ) -> None:
        """`secret` is that of a key file; without one, the task's own is told at registration."""
        self._task = task
        self._secret = secret
        self._opener = opener
        self._store: MemberStore | None = None
        self._lock = threading.Lock()
        self._forget_all()

    def _forget_all(self) -> None:
        self._instance = b""
        self._record = MemberRecord()
        self._members: tuple[Member, ...] = ()

    def renew(self, me: Member) -> Membership:
        with self._lock, _UnavailableAsMetadataError():
            if me.instance != self._instance:
                self._forget_all()
            mine = replace(me, has_key_file=self._secret is not None)
            reply = self._opened().join(self._task, mine, self._record)
            secret = reply.secret if self._secret is None else self._secret
            members = self._members if reply.members is None else reply.members
            if mine not in members or not secret:
                raise MetadataError("what keeps the registrations has another one than was made")
            if not self._record.since:
                self._check_alike(mine, members)
            self._instance, self._members = me.instance, members
            self._record = MemberRecord(reply.since, reply.state, reply.secret)
            found = Membership.from_members(members, secret)
            return replace(
                found, replaced_address=reply.replaced_address, was_forgotten=reply.was_forgotten
            )

    def _check_alike(self, mine: Member, members: Sequence[Member]) -> None:
        """Who has another secret than the others would be talked to by none of them."""
        others = [each for each in members if each.has_key_file != mine.has_key_file]
        if others:
            self._opened().leave(self._task, mine)
            which = (
                "have a --task-key-file" if others[0].has_key_file else "have no --task-key-file"
            )
            raise UsageError(
                f"other nodes of task {self._task.name!r} {which}",
                advice="give all of them the same, or none",
            )

    def leave(self, me: Member) -> None:
        with self._lock, _UnavailableAsMetadataError():
            self._forget_all()
            self._opened().leave(self._task, me)

    def close(self) -> None:
        with self._lock:
            place, self._store = self._store, None
            if place is not None:
                place.close()

    def _opened(self) -> MemberStore:
        if self._store is None:
            self._store = self._opener()
        return self._store


class _UnavailableAsMetadataError:
    """Errors that say that nothing can be told now become MetadataError."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, _AWAY):
            raise MetadataError(error.message, advice=error.advice) from error


class ServerMemberStore(MemberStore):
    """Registrations that a server keeps."""

    def __init__(self, repository: RemoteRepository) -> None:
        self._repository = repository
        self._may_say = _is_private_link(repository.url)

    def join(self, task: TaskName, me: Member, standing: MemberRecord) -> JoinReply:
        if not self._may_say:
            standing = replace(standing, secret=b"")
        message = join_message(task, me, standing)
        limit_s = SERVER_S if standing.since else FIRST_S
        for left in reversed(range(_TRIES)):
            try:
                return parse_join_reply(
                    self._repository.ask_task("join", task.identity, message, limit_s)
                )
            except (MetadataError, DeadlineError, BusyError) as error:
                if not left or not error.retry:
                    raise
        raise AssertionError

    def leave(self, task: TaskName, me: Member) -> None:
        message = leave_message(task, me)
        self._repository.ask_task("leave", task.identity, message, SERVER_S)

    def close(self) -> None:
        """The repository's connections are its own."""


def _is_private_link(url: RepositoryUrl) -> bool:
    """Whether nobody between us and any of the servers can listen."""
    hosts = (urlsplit(f"//{place}").hostname for place in url.host.split(","))
    return url.scheme == "diesel+tls" or all(host in _LOOPBACK for host in hosts)
