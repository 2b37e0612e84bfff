"""Where the masters of tasks register: in Redis, beside the metadata.

Owned here: registrations under the keys of their task (`storage/metadata/redis/keys.py`). Not
owned: what becomes of them inside Redis (`registry_scripts.py`), who may register (the server), who
renews (`registry.py`).

Nothing here is worth waiting for: what Redis loses the next renewals bring back, the secret too.
Whatever is found that nobody of us has written counts as not there. Safe from threads, processes
and forked children.
"""

import contextlib
import functools
import secrets
from typing import Self
from uuid import UUID

from diesel_fs.errors import BusyError, ConflictError, CorruptError, UsageError
from diesel_fs.peers.membership import MEMBERS_MAX, SECRET_BYTES, TTL_S, Member, TaskName
from diesel_fs.peers.registration import (
    JoinReply,
    MemberRecord,
    MemberStore,
    pack_member,
    unpack_member,
)
from diesel_fs.peers.registry_scripts import JOIN, LEAVE
from diesel_fs.storage.metadata.redis.head import open_link
from diesel_fs.storage.metadata.redis.keys import task_keys
from diesel_fs.storage.metadata.redis.link import RedisLink, ScriptCommand, Word, log
from diesel_fs.storage.metadata.redis.replies import as_count, corrupt_store_error, listed, octets

DEADLINE_S = 2.0
"""A renewal that takes longer leaves no time for the next before the registration is over."""

_FRONT_BYTES = 24  # instance, since


class RedisMemberStore(MemberStore):
    """Registrations in Redis."""

    def __init__(self, link: RedisLink, ttl_s: float = TTL_S) -> None:
        self._link = link
        self._ttl_us = int(ttl_s * 1_000_000)

    @classmethod
    def open(
        cls, url: str, *, store: UUID, deadline_s: float = DEADLINE_S, ttl_s: float = TTL_S
    ) -> Self:
        """Those at a URL, of the repository over that object store. Raises as `open_link`."""
        return cls(open_link(url, deadline_s=deadline_s, store=store), ttl_s)

    def __repr__(self) -> str:
        return f"RedisTasks({self._link.address})"

    def join(self, task: TaskName, me: Member, record: MemberRecord) -> JoinReply:
        """See `MemberStore`. Raises MetadataError, BusyError, DeadlineError, NoSpaceError."""
        offered = b"" if me.has_key_file else record.secret or secrets.token_bytes(SECRET_BYTES)
        arguments: list[Word] = [
            me.rank, me.instance, record.since, pack_member(me), offered, self._ttl_us,
            record.state, MEMBERS_MAX,
        ]  # fmt: skip
        reply = self._run(ScriptCommand(JOIN, task_keys(task.digest), arguments))
        match reply[0]:
            case b"newer":
                raise ConflictError(
                    f"a newer master of rank {me.rank} is in task {task.name!r}",
                    advice="give each node a --rank of its own",
                )
            case b"full":
                raise BusyError(f"task {task.name!r} has {MEMBERS_MAX} masters already")
        since, state = as_count(reply[1]), as_count(reply[2])
        secret = b"" if me.has_key_file else octets(reply[3], SECRET_BYTES)
        members = _members(reply[6], reply[7]) if len(reply) > 6 else None
        return JoinReply(since, state, secret, members, _address(me, reply[4]), bool(reply[5]))

    def leave(self, task: TaskName, me: Member) -> None:
        """See `MemberStore`. Raises as `join`."""
        arguments: list[Word] = [me.rank, me.instance, self._ttl_us]
        self._run(ScriptCommand(LEAVE, task_keys(task.digest), arguments))

    def close(self) -> None:
        self._link.close()

    def _run(self, command: ScriptCommand) -> list[object]:
        (reply,) = self._link.with_retries(functools.partial(self._link.run_scripts, [command]))
        found = listed(reply)
        if not found:
            raise corrupt_store_error("an answer without a word about registrations")
        return found


def _address(me: Member, kept: object) -> str:
    """Of the master whose place this one has taken; nothing where there was none."""
    with contextlib.suppress(UsageError):
        if isinstance(kept, bytes):
            return unpack_member(me.rank, me.instance, kept).address
    return ""


def _members(ranks: object, values: object) -> tuple[Member, ...]:
    """The members that a reply holds; what cannot be one is left out."""
    found = []
    for rank, value in zip(listed(ranks), listed(values), strict=True):
        try:
            packed = value if isinstance(value, bytes) else b""
            instance, kept = packed[:16], packed[_FRONT_BYTES:]
            found.append(unpack_member(as_count(rank), instance, kept))
        except (UsageError, CorruptError) as error:
            log.warning("a registration is left out: %s", error.message)
    return tuple(found)
