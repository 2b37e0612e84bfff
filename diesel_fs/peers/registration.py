"""A registration as it travels to a server and lies in a store (`../WIRE.md`, section 5).

Owned here: the bytes and messages of what a master says when it registers, and of what it is told,
in both directions. Not owned: who may register (the server), what is kept (`redis_registry.py`).
Values are checked where they arrive; all raise UsageError. Pure.
"""

import struct
from dataclasses import dataclass, field
from typing import Protocol

from ..errors import UsageError
from ..net.messages import Fields, Message
from .membership import (
    CERTIFICATE_BYTES,
    INSTANCE_BYTES,
    MEMBERS_MAX,
    SECRET_BYTES,
    VERSION_MAX,
    Member,
    TaskName,
    split_address,
)

TIME_MAX = 1 << 52
"""Microseconds since 1970 that are exact inside Redis, the year 2112."""

_KEPT = struct.Struct("<QB32s")  # version, flags, certificate; then the address
_HAS_CERTIFICATE, _KEYED = 1, 2


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """What a master knows of its registration, and says again when it renews it."""

    since: int = 0  # when it first registered, by Redis's clock (us); 0: it has not
    state: int = 0  # what the membership was when it was last told
    secret: bytes = field(default=b"", repr=False)  # that it has, and may say here


@dataclass(frozen=True, slots=True)
class JoinReply:
    """What a master is told. `members` is None where the state is the one that it knew."""

    since: int
    state: int
    secret: bytes = field(repr=False)
    members: tuple[Member, ...] | None
    replaced_address: str = ""  # the address of the other master whose place it has just taken
    was_forgotten: bool = False  # it was registered, and that was gone


class MemberStore(Protocol):
    """Where masters register. Blocks; safe from threads."""

    def join(self, task: TaskName, me: Member, record: MemberRecord) -> JoinReply:
        """Register, or renew that. Who is not `keyed` is told a secret. Idempotent.

        Raises ConflictError where a newer instance has this rank.
        """
        ...

    def leave(self, task: TaskName, me: Member) -> None:
        """End it. Idempotent."""
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...


# As it is kept


def pack_member(member: Member) -> bytes:
    """All but rank and instance."""
    flags = (_HAS_CERTIFICATE if member.certificate else 0) | (_KEYED if member.has_key_file else 0)
    return _KEPT.pack(member.version, flags, member.certificate) + member.address.encode()


def unpack_member(rank: int, instance: bytes, packed: bytes) -> Member:
    """The member that was packed."""
    if len(packed) < _KEPT.size:
        raise UsageError("a registration that is too short")
    version, flags, certificate = _KEPT.unpack_from(packed)
    address = packed[_KEPT.size :].decode("ascii", "replace")
    return Member(
        rank,
        instance,
        address,
        version,
        certificate if flags & _HAS_CERTIFICATE else b"",
        bool(flags & _KEYED),
    )


# As it travels


def join_message(task: TaskName, me: Member, record: MemberRecord) -> Message:
    """A request to register, but for `do` and the dataset."""
    return {
        "task": task.name,
        **_described(me),
        "since": record.since,
        "state": record.state,
        "secret": record.secret,
    }


def parse_join(fields: Fields) -> tuple[str, Member, MemberRecord]:
    """The name of the task, who registers, and as what."""
    name = fields.text("task")
    me = _member(fields)
    since = fields.integer("since", 0, high=TIME_MAX)
    state = fields.integer("state", 0, high=TIME_MAX)
    secret = _octets(fields, "secret", SECRET_BYTES)
    return name, me, MemberRecord(since, state, secret)


def leave_message(task: TaskName, me: Member) -> Message:
    """A request to end a registration, but for `do` and the dataset."""
    return {"task": task.name, **_described(me)}


def parse_leave(fields: Fields) -> tuple[str, Member]:
    """The name of the task, and who leaves it."""
    return fields.text("task"), _member(fields)


def join_reply_message(reply: JoinReply) -> Message:
    """What a master is told, as an answer."""
    message: Message = {"since": reply.since, "state": reply.state, "secret": reply.secret}
    if reply.members is not None:
        message["members"] = [_described(each) for each in reply.members]
    if reply.replaced_address:
        message["replaced"] = reply.replaced_address
    if reply.was_forgotten:
        message["forgotten"] = True
    return message


def parse_join_reply(message: Message) -> JoinReply:
    """What an answer says."""
    fields = Fields(message, "an answer")
    since, state = (fields.integer(each, low=1, high=TIME_MAX) for each in ("since", "state"))
    secret = _octets(fields, "secret", SECRET_BYTES)
    members = None
    if "members" in fields:
        members = tuple(map(_member, fields.maps("members", MEMBERS_MAX)))
    replaced = fields.text("replaced", "")
    if replaced:
        split_address(replaced)
    return JoinReply(
        since, state, secret, members, replaced, fields.flag("forgotten", default=False)
    )


def _described(member: Member) -> Message:
    return {
        "rank": member.rank,
        "instance": member.instance,
        "address": member.address,
        "holds": member.version,
        "certificate": member.certificate,
        "keyed": member.has_key_file,
    }


def _member(fields: Fields) -> Member:
    return Member(
        fields.integer("rank"),
        _octets(fields, "instance", INSTANCE_BYTES),
        fields.text("address"),
        fields.integer("holds", high=VERSION_MAX),
        _octets(fields, "certificate", CERTIFICATE_BYTES),
        fields.flag("keyed", default=False),
    )


def _octets(fields: Fields, name: str, length: int) -> bytes:
    """Just so many bytes, or none."""
    found = fields.octets(name)
    if len(found) not in (0, length):
        fields.bad(name, f"it is {length} bytes, or none")
    return found
