"""What masters of tasks ask: to be registered, and who else is (`WIRE.md`, section 5).

Owned here: that a task is its user's alone, and that its secret is told to nobody who may be
overheard. Not owned: what is kept (`diesel_fs/peers/redis_registry.py`), roles
(`request_table.py`). The requests run in threads; opening goes on in one at a time.
"""

import threading
import time
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address

import trio

from diesel_fs.errors import DeadlineError, MetadataError, UsageError
from diesel_fs.net.messages import Fields
from diesel_fs.peers.membership import (
    MemberStore,
    TaskName,
    join_reply_message,
    parse_join,
    parse_leave,
)
from diesel_fs.peers.registry import open_registrations
from diesel_fs.repository.local import LocalRepository

from .directory import DatasetRef
from .requests import Reply, Request

_THREADS = 16
_REDIS_S = 1.0  # less than a client waits
_AWAY_S = 1.0
"""So long nobody else waits for a store that has just not answered: thousands may be asking."""


class TaskHandlers:
    """Registrations of the masters of all users."""

    def __init__(self, repository: LocalRepository) -> None:
        self._repository = repository
        self._threads = trio.CapacityLimiter(_THREADS)
        self._opening = threading.Lock()
        self._opened: MemberStore | None = None
        self._away: tuple[float, str] = (0.0, "")  # until when, and why

    async def join(self, request: Request, known: DatasetRef) -> Reply:
        """A master registers, or renews that."""
        name, identity, record = parse_join(Fields(request.message, "join"))
        task = TaskName(known.identity, request.account.name, name)
        if not identity.has_key_file and not (request.secured or _is_of_this_machine(request.peer)):
            raise UsageError(
                "the secret of a task is told over TLS alone",
                advice="use diesel+tls://, or give all nodes the same --task-key-file",
            )
        return await self._ask(
            lambda place: Reply(join_reply_message(place.join(task, identity, record)))
        )

    async def leave(self, request: Request, known: DatasetRef) -> Reply:
        """A master ends its registration."""
        name, me = parse_leave(Fields(request.message, "leave"))
        task = TaskName(known.identity, request.account.name, name)

        def leave(place: MemberStore) -> Reply:
            place.leave(task, me)
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
            if time.monotonic() >= self._away[0]:
                self._away = time.monotonic() + _AWAY_S, error.message
            raise

    def _registrations(self) -> MemberStore:
        """Where registrations are. Raises what has just been raised, while that is so."""
        self._check_breaker()
        if self._opened is None:
            with self._opening:
                self._check_breaker()
                if self._opened is None:
                    where = self._repository
                    self._opened = open_registrations(where.url, where.objects, deadline_s=_REDIS_S)
        return self._opened

    def _check_breaker(self) -> None:
        until_s, why = self._away
        if time.monotonic() < until_s:
            raise MetadataError(why)


def _is_of_this_machine(peer: str) -> bool:
    """Whether a client's `address:port` is loopback."""
    try:
        address = ip_address(peer.rpartition(":")[0].strip("[]").partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback
