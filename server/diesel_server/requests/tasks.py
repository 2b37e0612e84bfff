"""The requests `join` and `leave`, by which the masters of a training task find each other.

The *master* of each node of a task registers here and gets the list of the others (`WIRE.md`,
section 5; `diesel_fs/peers`). The metadata store's Redis keeps the registrations. A task belongs to
one user, and its secret is sent over TLS or on loopback only. The work runs in threads.
"""

import threading
import time
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address

import trio

from diesel_fs.errors import DeadlineError, MetadataError, UsageError
from diesel_fs.net.breaker import CircuitBreaker
from diesel_fs.net.messages import Fields
from diesel_fs.peers.members.membership import (
    MemberStore,
    TaskName,
    join_reply_message,
    parse_join,
    parse_leave,
)
from diesel_fs.peers.members.registry import open_registrations
from diesel_fs.repository.local import LocalRepository

from .directory import DatasetRef
from .dispatcher import Reply, Request

_THREADS = 16
_REDIS_S = 1.0  # less than a client waits
_PAUSE_S = 1.0
"""After the registrations' store has failed, requests fail at once for this time: thousands of
masters would wait."""


class TaskHandlers:
    def __init__(self, repository: LocalRepository) -> None:
        self._repository = repository
        self._threads = trio.CapacityLimiter(_THREADS)
        self._opening = threading.Lock()
        self._opened: MemberStore | None = None
        self._breaker = CircuitBreaker(1, _PAUSE_S)
        self._failure = ""

    async def join(self, request: Request, known: DatasetRef) -> Reply:
        name, identity, record = parse_join(Fields(request.message, "join"))
        task = TaskName(known.identity, request.account.name, name)
        if not identity.has_key_file and not (request.secured or _is_of_this_machine(request.peer)):
            raise UsageError(
                "the server sends the secret of a task over TLS only",
                advice="use diesel+tls://, or give all nodes the same --task-key-file",
            )
        return await self._ask(
            lambda store: Reply(join_reply_message(store.join(task, identity, record)))
        )

    async def leave(self, request: Request, known: DatasetRef) -> Reply:
        name, me = parse_leave(Fields(request.message, "leave"))
        task = TaskName(known.identity, request.account.name, name)

        def leave(store: MemberStore) -> Reply:
            store.leave(task, me)
            return Reply()

        return await self._ask(leave)

    async def _ask(self, work: Callable[[MemberStore], Reply]) -> Reply:
        if not self._repository.url.meta:
            raise UsageError(
                "this server has no Redis, through which the nodes of a task find each other",
                advice="name all nodes by --peers host:port,..., with a --task-key-file",
            )
        return await trio.to_thread.run_sync(self._call, work, limiter=self._threads)

    def _call(self, work: Callable[[MemberStore], Reply]) -> Reply:
        try:
            return work(self._registrations())
        except (MetadataError, DeadlineError) as error:
            now_s = time.monotonic()
            if not self._breaker.is_open(now_s):
                self._failure = error.message
                self._breaker.open(now_s)
            raise

    def _registrations(self) -> MemberStore:
        """Opens the store at its first use. Raises MetadataError, at once while the breaker is
        open."""
        self._check_breaker()
        if self._opened is None:
            with self._opening:
                self._check_breaker()
                if self._opened is None:
                    repository = self._repository
                    self._opened = open_registrations(
                        repository.url, repository.objects, deadline_s=_REDIS_S
                    )
        return self._opened

    def _check_breaker(self) -> None:
        if self._breaker.is_open(time.monotonic()):
            raise MetadataError(self._failure)


def _is_of_this_machine(peer: str) -> bool:
    try:
        address = ip_address(peer.rpartition(":")[0].strip("[]").partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback
