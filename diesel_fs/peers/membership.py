"""Who is in a task: its name, its masters, and which node this is (`PEERS.md`, section 1).

Owned here: which names, ranks and addresses there are, what of a membership counts, what a task's
secret is made from. Not owned: where registrations are kept (`redis_registry.py`), how they
travel (`registration.py`), who renews them (`registry.py`). Pure; values, safe from any thread.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self
from uuid import UUID

from ..errors import UsageError
from ..names import DATASET_NAME

TTL_S = 6.0
"""How long a registration lasts without being renewed: two renewals may be lost."""

RANK_LIMIT = 0xFFFE
"""Ranks are smaller; the two numbers above it are `SOURCE_HERE` and `SOURCE_NONE` (`wire.py`)."""

MEMBERS_MAX = 4096
"""Of one task: each of them keeps connections to all others."""

INSTANCE_BYTES = 16
SECRET_BYTES = 32
CERTIFICATE_BYTES = 32
ADDRESS_CHARS_MAX = 260
USER_CHARS_MAX = 255
KEY_BYTES_MIN = 16
"""Of what `--task-key-file` holds: a word can be guessed by who has seen one proof."""

VERSION_MAX = (1 << 63) - 1

ANY_INSTANCE = bytes(INSTANCE_BYTES)
"""Of a master that is known by `--peers` alone."""

_ADDRESS = re.compile(
    r"(?P<host>[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252})"
    r"|\[[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9._-]{1,32})?\])"
    r":(?P<port>[0-9]{1,5})",
    re.ASCII,
)
_ANY_INTERFACE = re.compile(r"0+(\.0+){0,3}|\[[0:.]+\]")
"""Addresses that mean any of the machine that says them, and nothing to others."""


@dataclass(frozen=True, slots=True)
class TaskName:
    """A task: the dataset that it reads, whose it is, and what he calls it."""

    identity: UUID
    user: str  # of an account; `uid:N` where there is no server
    name: str

    def __post_init__(self) -> None:
        """Raises UsageError."""
        if not DATASET_NAME.fullmatch(self.name):
            raise UsageError(
                f"bad task name {self.name[:64]!r}",
                advice="a name is a letter or digit, then up to 62 letters, digits, '.', '_', '-'",
            )
        if not 0 < len(self.user) <= USER_CHARS_MAX or not self.user.isprintable():
            raise UsageError("a task without its user's name")

    @property
    def digest(self) -> bytes:
        """32 bytes that stand for it; not for any other."""
        parts = (b"diesel-fs task 1", self.identity.bytes + self.user.encode(), self.name.encode())
        return hashlib.sha256(b"\0".join(parts)).digest()


@dataclass(frozen=True, slots=True)
class Member:
    """A master as it registers."""

    rank: int
    instance: bytes
    address: str  # host:port, where others reach it
    version: int  # of the dataset
    certificate: bytes = b""  # its SHA-256; nothing where it does not speak TLS, or nobody knows
    has_key_file: bool = False  # its secret comes from a file

    def __post_init__(self) -> None:
        """Raises UsageError."""
        if not 0 <= self.rank < RANK_LIMIT:
            raise UsageError(f"bad rank {self.rank}: it is a number from 0 to {RANK_LIMIT - 1}")
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
    """The masters of a task at a moment: by rank, the newest instance of each."""

    members: tuple[Member, ...]
    secret: bytes = field(repr=False)
    replaced_address: str = (
        ""  # the address of the other master whose place who asked has just taken
    )
    was_forgotten: bool = False  # who asked was a member, and that was forgotten; so others may be

    @classmethod
    def from_members(cls, members: Iterable[Member], secret: bytes) -> Self:
        """A membership of these. Of a rank that is there twice, the last one stays."""
        found = {member.rank: member for member in members}
        return cls(tuple(found[rank] for rank in sorted(found)), secret)

    def of_version(self, version: int) -> tuple[Member, ...]:
        """Those that hold this version of the dataset; the others are no nodes of it, for now."""
        return tuple(member for member in self.members if member.version == version)


def split_address(address: str) -> tuple[str, int]:
    """Host (without brackets) and port of `host:port`. Raises UsageError."""
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match["port"]) < 1 << 16 or len(address) > ADDRESS_CHARS_MAX:
        raise UsageError(
            f"bad address {address[:ADDRESS_CHARS_MAX]!r} of a master",
            advice="write host:port, or [address]:port",
        )
    if _ANY_INTERFACE.fullmatch(match["host"]):
        raise UsageError(
            f"{address} is no address that others reach", advice="name one by --advertise"
        )
    return match["host"].strip("[]"), int(match["port"])


def secret_from_key(key: bytes) -> bytes:
    """The secret that comes from what a key file holds; space around that does not matter.

    Raises UsageError, whose words say nothing of the key.
    """
    stripped = key.strip()
    if len(stripped) < KEY_BYTES_MIN:
        raise UsageError(
            f"the task's key is shorter than {KEY_BYTES_MIN} bytes",
            advice="make one: head -c 32 /dev/urandom | base64",
        )
    return hashlib.sha256(stripped).digest()


_SOURCES = (
    # A step of a job may have fewer nodes than the job, and numbers its own
    ("SLURM_NODEID", "SLURM_STEP_NUM_NODES"),
    ("SLURM_NODEID", "SLURM_NNODES"),
    ("GROUP_RANK", "GROUP_WORLD_SIZE"),  # of torchrun, whose groups are nodes
)


def resolve_node(
    environment: Mapping[str, str], rank: int | None = None, world: int | None = None
) -> tuple[int, int]:
    """Which node this is, and of how many: what is given, else what SLURM says, else torchrun;
    the only one where nobody says anything. Raises UsageError for what makes no sense.
    """
    origin = "--rank and --world"
    if rank is None or world is None:
        for names in _SOURCES:
            if all(environment.get(name) for name in names):
                found = [_parse_number(environment[name], name) for name in names]
                origin = ", ".join((origin, *names) if (rank, world) != (None, None) else names)
                rank = found[0] if rank is None else rank
                world = found[1] if world is None else world
                break
    if rank is None and world not in (None, 1):
        raise UsageError(f"which of the {world} nodes is this?", advice="say --rank, too")
    rank = rank or 0
    if world is None and rank:
        raise UsageError(f"node {rank} of how many?", advice="say --world, too")
    world = 1 if world is None else world
    if not 0 < world <= RANK_LIMIT or not 0 <= rank < world:
        raise UsageError(
            f"node {rank} of {world} makes no sense ({origin})",
            advice=f"ranks of nodes count from 0, and there are at most {RANK_LIMIT}",
        )
    return rank, world


def _parse_number(text: str, name: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text.strip()):
        raise UsageError(f"{name} is no number", advice="say --rank and --world")
    return int(text)
