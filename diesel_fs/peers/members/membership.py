"""The members of a task: its name, its masters, which node this is, and registrations as bytes and
messages (`PEERS.md`, section 1; `../../net/WIRE.md`, section 5). Does no I/O.

Values check themselves, and raise UsageError; parsers raise it, too.
"""

import hashlib
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, Self
from uuid import UUID

from ...errors import UsageError
from ...names import DATASET_NAME
from ...net.messages import Fields, Message
from ...urls import HostPort

TTL_S = 6.0
"""A registration's lifetime after the last renewal: two renewals may be lost."""

RANK_MAX = 0xFFFD
"""Ranks are sent in two bytes."""

MEMBERS_MAX = 4096
"""Each master keeps connections to all others."""

INSTANCE_BYTES, SECRET_BYTES, CERTIFICATE_BYTES = 16, 32, 32
ADDRESS_CHARS_MAX, USER_CHARS_MAX = 260, 255
VERSION_MAX = (1 << 63) - 1

KEY_BYTES_MIN = 16
"""The least length of a `--task-key-file`: whoever has seen one proof made with a key can try all
short keys."""

ANY_INSTANCE = bytes(INSTANCE_BYTES)
"""The instance of a master that is known only by `--peers`."""

_ADDRESS = re.compile(  # a name or an IPv4 address, or an IPv6 address in brackets; then the port
    r"([A-Za-z0-9][A-Za-z0-9._-]{0,252}|\[[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9._-]{1,32})?\]):[0-9]{1,5}",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class TaskName:
    """The full name of a task."""

    identity: UUID
    user: str  # the account at a server; `uid:N` without one
    name: str

    def __post_init__(self) -> None:
        if not DATASET_NAME.fullmatch(self.name):
            raise UsageError(
                f"bad task name {self.name[:64]!r}",
                advice="a name is a letter or digit, then up to 62 letters, digits, '.', '_', '-'",
            )
        if not 0 < len(self.user) <= USER_CHARS_MAX or not self.user.isprintable():
            raise UsageError("the name of a task's user is empty, too long or not printable")

    @property
    def digest(self) -> bytes:
        """SHA-256 of the full name, for proofs."""
        parts = (b"diesel-fs task 1", self.identity.bytes + self.user.encode(), self.name.encode())
        return hashlib.sha256(b"\0".join(parts)).digest()


@dataclass(frozen=True, slots=True)
class Member:
    rank: int
    instance: bytes  # random; each process has its own
    address: str  # host:port, by which other masters reach it
    version: int
    certificate: bytes = b""  # SHA-256 of it; empty: no TLS, or unknown
    has_key_file: bool = False  # the task's secret comes from a key file

    def __post_init__(self) -> None:
        if not 0 <= self.rank <= RANK_MAX:
            raise UsageError(f"bad rank {self.rank}: it is a number from 0 to {RANK_MAX}")
        if len(self.instance) != INSTANCE_BYTES or len(self.certificate) not in (
            0,
            CERTIFICATE_BYTES,
        ):
            raise UsageError("a master's instance has 16 bytes, a certificate's digest 32")
        if not 0 <= self.version <= VERSION_MAX:
            raise UsageError(f"bad version {self.version} of a dataset")
        split_address(self.address)


@dataclass(frozen=True, slots=True)
class Membership:
    """The members at one moment; for each rank, only the newest instance."""

    members: tuple[Member, ...]
    secret: bytes = field(repr=False)  # by which masters prove that they belong to the task
    replaced_address: str = ""  # of the former master of the caller's rank
    was_forgotten: bool = False  # the caller's registration was gone; others may be, too

    @classmethod
    def from_members(cls, members: Iterable[Member], secret: bytes) -> Self:
        """If several members have one rank, the last one counts."""
        by_rank = {member.rank: member for member in members}
        return cls(tuple(by_rank[rank] for rank in sorted(by_rank)), secret)

    def of_version(self, version: int) -> tuple[Member, ...]:
        """Only these members count as nodes."""
        return tuple(member for member in self.members if member.version == version)


def split_address(address: str) -> HostPort:
    """`address` may come from another machine. Raises UsageError."""
    try:
        parsed = HostPort.parse(address) if _ADDRESS.fullmatch(address) else None
    except ValueError:
        parsed = None
    if parsed is None or not parsed.port or len(address) > ADDRESS_CHARS_MAX:
        raise UsageError(
            f"bad address {address[:ADDRESS_CHARS_MAX]!r} of a master",
            advice="write host:port, or [address]:port",
        )
    if not parsed.host.strip("0.:"):  # all interfaces of the machine that uses it
        raise UsageError(
            f"other nodes cannot reach {address}", advice="name another address by --advertise"
        )
    return parsed


def secret_from_key(key: bytes) -> bytes:
    """SHA-256 of a key file's content, without the space around it. Raises UsageError if the key is
    too short."""
    stripped = key.strip()
    if len(stripped) < KEY_BYTES_MIN:
        raise UsageError(
            f"the task's key is shorter than {KEY_BYTES_MIN} bytes",
            advice="make one: head -c 32 /dev/urandom | base64",
        )
    return hashlib.sha256(stripped).digest()


_NODE_VARIABLES = (  # rank and world; the first pair that is set counts
    # A step of a SLURM job may have fewer nodes than the job, and numbers them itself
    ("SLURM_NODEID", "SLURM_STEP_NUM_NODES"),
    ("SLURM_NODEID", "SLURM_NNODES"),
    ("GROUP_RANK", "GROUP_WORLD_SIZE"),  # torchrun: its groups are nodes
)


def resolve_node(
    environment: Mapping[str, str], rank: int | None = None, world: int | None = None
) -> tuple[int, int]:
    """This node's rank, and the number of nodes: as given, else from SLURM's variables, else from
    torchrun's, else 0 of 1. Raises UsageError."""
    origin = "--rank and --world"
    if rank is None or world is None:
        for names in _NODE_VARIABLES:
            if all(environment.get(name) for name in names):
                values = [_parse_number(environment[name], name) for name in names]
                origin = ", ".join((origin, *names) if (rank, world) != (None, None) else names)
                rank = values[0] if rank is None else rank
                world = values[1] if world is None else world
                break
    if rank is None and world not in (None, 1):
        raise UsageError(
            f"the task has {world} nodes, and the rank of this one is not given",
            advice="say --rank, too",
        )
    rank = rank or 0
    if world is None and rank:
        raise UsageError(
            f"this is node {rank}, and the number of nodes is not given",
            advice="say --world, too",
        )
    world = 1 if world is None else world
    if not 0 < world <= RANK_MAX + 1 or not 0 <= rank < world:
        raise UsageError(
            f"node {rank} of {world} makes no sense ({origin})",
            advice=f"ranks of nodes count from 0, and there are at most {RANK_MAX + 1}",
        )
    return rank, world


def _parse_number(text: str, name: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text.strip()):
        raise UsageError(f"{name} is no number", advice="say --rank and --world")
    return int(text)


# registrations ------------------------------------------------------------------------------------

TIME_MAX = 1 << 52
"""Microseconds since 1970, exact inside Redis: up to the year 2112."""

_STORED = struct.Struct("<QB32s")  # version, flags, certificate; then the address
_HAS_CERTIFICATE, _HAS_KEY_FILE = 1, 2


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A master's former registration, sent at each renewal, since Redis may have lost it."""

    since: int = 0  # when it first registered, by Redis's clock (us); 0: not yet
    state: int = 0  # the number of the last received membership
    secret: bytes = field(default=b"", repr=False)  # empty: none, or not to be sent


@dataclass(frozen=True, slots=True)
class JoinReply:
    """`since`, `state` and `secret` are as in `MemberRecord`; `members` is None if the caller's
    membership `state` is still current."""

    since: int
    state: int
    secret: bytes = field(repr=False)
    members: tuple[Member, ...] | None
    replaced_address: str = ""  # as in `Membership`
    was_forgotten: bool = False


class MemberStore(Protocol):
    """Where masters register: Redis, or a server in front of it. Calls block; any thread."""

    def join(self, task: TaskName, member: Member, record: MemberRecord) -> JoinReply:
        """Register, or renew. A master without a key file receives the task's secret. Idempotent.
        Raises ConflictError if this rank has a newer instance."""
        ...

    def leave(self, task: TaskName, member: Member) -> None:
        """Idempotent."""
        ...

    def close(self) -> None: ...


# as a store keeps them


def pack_member(member: Member) -> bytes:
    flags = _HAS_CERTIFICATE * bool(member.certificate) | _HAS_KEY_FILE * member.has_key_file
    return _STORED.pack(member.version, flags, member.certificate) + member.address.encode()


def unpack_member(rank: int, instance: bytes, packed: bytes) -> Member:
    if len(packed) < _STORED.size:
        raise UsageError("a registration that is too short")
    version, flags, certificate = _STORED.unpack_from(packed)
    address = packed[_STORED.size :].decode("ascii", "replace")
    certificate = certificate if flags & _HAS_CERTIFICATE else b""
    return Member(rank, instance, address, version, certificate, bool(flags & _HAS_KEY_FILE))


# as messages


def join_message(task: TaskName, member: Member, record: MemberRecord) -> Message:
    """The message lacks `do` and the dataset."""
    return {
        "task": task.name,
        **member_message(member),
        "since": record.since,
        "state": record.state,
        "secret": record.secret,
    }


def parse_join(fields: Fields) -> tuple[str, Member, MemberRecord]:
    name = fields.text("task")
    member = parse_member(fields)
    since = fields.integer("since", 0, high=TIME_MAX)
    state = fields.integer("state", 0, high=TIME_MAX)
    secret = fields.octets("secret", 0, SECRET_BYTES)
    return name, member, MemberRecord(since, state, secret)


def leave_message(task: TaskName, member: Member) -> Message:
    """The message lacks `do` and the dataset."""
    return {"task": task.name, **member_message(member)}


def parse_leave(fields: Fields) -> tuple[str, Member]:
    return fields.text("task"), parse_member(fields)


def join_reply_message(reply: JoinReply) -> Message:
    message: Message = {"since": reply.since, "state": reply.state, "secret": reply.secret}
    if reply.members is not None:
        message["members"] = [member_message(each) for each in reply.members]
    if reply.replaced_address:
        message["replaced"] = reply.replaced_address
    if reply.was_forgotten:
        message["forgotten"] = True
    return message


def parse_join_reply(message: Message) -> JoinReply:
    fields = Fields(message, "an answer")
    since, state = (fields.integer(each, low=1, high=TIME_MAX) for each in ("since", "state"))
    secret = fields.octets("secret", 0, SECRET_BYTES)
    members = None
    if "members" in fields:
        members = tuple(map(parse_member, fields.maps("members", MEMBERS_MAX)))
    replaced = fields.text("replaced", "")
    if replaced:
        split_address(replaced)
    return JoinReply(
        since, state, secret, members, replaced, fields.flag("forgotten", default=False)
    )


def member_message(member: Member) -> Message:
    return {
        "rank": member.rank,
        "instance": member.instance,
        "address": member.address,
        "holds": member.version,
        "certificate": member.certificate,
        "keyed": member.has_key_file,
    }


def parse_member(fields: Fields) -> Member:
    return Member(
        fields.integer("rank"),
        fields.octets("instance", 0, INSTANCE_BYTES),
        fields.text("address"),
        fields.integer("holds", high=VERSION_MAX),
        fields.octets("certificate", 0, CERTIFICATE_BYTES),
        fields.flag("keyed", default=False),
    )
