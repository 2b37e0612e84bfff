"""A registration as it travels to a server and lies in a store (`../WIRE.md`, section 5).

Owned here: the bytes and messages of what a master says when it registers, and of what it is told,
in both directions. Not owned: who may register (the server), what is kept (`redis_tasks.py`).
Values are checked where they arrive; all raise UsageError. Pure.
"""

import struct
from dataclasses import dataclass, field
from typing import Protocol

from ..errors import UsageError
from ..messages import Fields, Message
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
class Standing:
    """What a master knows of its registration, and says again when it renews it."""

    since: int = 0  # when it first registered, by Redis's clock (us); 0: it has not
    state: int = 0  # what the membership was when it was last told
    secret: bytes = field(default=b"", repr=False)  # that it has, and may say here


@dataclass(frozen=True, slots=True)
class Told:
    """What a master is told. `members` is None where the state is the one that it knew."""

    since: int
    state: int
    secret: bytes = field(repr=False)
    members: tuple[Member, ...] | None
    replaced: str = ""  # the address of the other master whose place it has just taken
    forgotten: bool = False  # it was registered, and that was gone


class Registrations(Protocol):
    """Where masters register. Blocks; safe from threads."""

    def join(self, task: TaskName, me: Member, standing: Standing) -> Told:
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


def packed_member(member: Member) -> bytes:
    """All but rank and instance."""
    flags = (_HAS_CERTIFICATE if member.certificate else 0) | (_KEYED if member.keyed else 0)
    return _KEPT.pack(member.version, flags, member.certificate) + member.address.encode()


def unpacked_member(rank: int, instance: bytes, packed: bytes) -> Member:
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


def join_message(task: TaskName, me: Member, standing: Standing) -> Message:
    """A request to register, but for `do` and the dataset."""
    return {
        "task": task.name,
        **_described(me),
        "since": standing.since,
        "state": standing.state,
        "secret": standing.secret,
    }


def join_in(fields: Fields) -> tuple[str, Member, Standing]:
    """The name of the task, who registers, and as what."""
    name = fields.text("task")
    me = _member(fields)
    since = fields.whole("since", 0, high=TIME_MAX)
    state = fields.whole("state", 0, high=TIME_MAX)
    secret = _octets(fields, "secret", SECRET_BYTES)
    return name, me, Standing(since, state, secret)


def leave_message(task: TaskName, me: Member) -> Message:
    """A request to end a registration, but for `do` and the dataset."""
    return {"task": task.name, **_described(me)}


def leave_in(fields: Fields) -> tuple[str, Member]:
    """The name of the task, and who leaves it."""
    return fields.text("task"), _member(fields)


def told_message(told: Told) -> Message:
    """What a master is told, as an answer."""
    message: Message = {"since": told.since, "state": told.state, "secret": told.secret}
    if told.members is not None:
        message["members"] = [_described(each) for each in told.members]
    if told.replaced:
        message["replaced"] = told.replaced
    if told.forgotten:
        message["forgotten"] = True
    return message


def told_in(message: Message) -> Told:
    """What an answer says."""
    fields = Fields(message, "an answer")
    since, state = (fields.whole(each, low=1, high=TIME_MAX) for each in ("since", "state"))
    secret = _octets(fields, "secret", SECRET_BYTES)
    members = None
    if "members" in fields:
        members = tuple(map(_member, fields.maps("members", MEMBERS_MAX)))
    replaced = fields.text("replaced", "")
    if replaced:
        split_address(replaced)
    return Told(since, state, secret, members, replaced, fields.flag("forgotten", default=False))


def _described(member: Member) -> Message:
    return {
        "rank": member.rank,
        "instance": member.instance,
        "address": member.address,
        "holds": member.version,
        "certificate": member.certificate,
        "keyed": member.keyed,
    }


def _member(fields: Fields) -> Member:
    return Member(
        fields.whole("rank"),
        _octets(fields, "instance", INSTANCE_BYTES),
        fields.text("address"),
        fields.whole("holds", high=VERSION_MAX),
        _octets(fields, "certificate", CERTIFICATE_BYTES),
        fields.flag("keyed", default=False),
    )


def _octets(fields: Fields, name: str, length: int) -> bytes:
    """Just so many bytes, or none."""
    found = fields.octets(name)
    if len(found) not in (0, length):
        fields.bad(name, f"it is {length} bytes, or none")
    return found
