"""Every byte between a master and the readers on its own node (`PEERS.md`, section 4). No I/O.

For any bytes, a parser returns a value or raises CorruptError, except that `parse_hello` and
`parse_members` may raise UsageError. It allocates nothing for a length that it has not checked.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

import msgpack
import numpy as np

from ..errors import CorruptError, UsageError
from ..format.entries import Bytes
from ..names import shown
from ..net.messages import Fields, unpack
from .members.membership import (
    MEMBERS_MAX,
    RANK_MAX,
    SECRET_BYTES,
    Member,
    member_message,
    parse_member,
)
from .wire import FAILED, HEAD_BYTES, LOAD, PLAN_BYTES_MAX, TASK_DIGEST_BYTES, Sizes

VERSION = 4

(
    HELLO, MEMBERS, PIN, UNPIN, DAMAGED, STATS,
    SWITCH_VERSION, DATA, PLAN,
) = range(1, 10)  # fmt: skip
OK, REFUSED = range(2)
ABSENT, PINNED, LENT = range(3)
"""The answers to PIN: no descriptor, one of pinned memory, or one of a file."""

FILE = 2
"""A flag of PIN: the client also accepts a descriptor of the chunk's file."""

UNPINNED_MAX = 1 << 16
"""The most chunks that one message may name (UNPIN, or the revoked chunks of an answer)."""

DOCUMENT_BYTES_MAX = 4 << 20
"""The longest answer to STATS or MEMBERS."""

SENTENCE_BYTES_MAX = 512

BODY_BYTES_MAX = 4 * UNPINNED_MAX

_VIEW_ITEMS_MAX = 64 + 16 * MEMBERS_MAX
_HEAD = struct.Struct("<BBHIII")
_HELLO = struct.Struct("<HH16sQ")
_WELCOME = struct.Struct("<II")
_CHUNK = struct.Struct("<I")
_PINNED = struct.Struct("<H")
_PLAN_STATUS = struct.Struct("<H")
_DAMAGED = struct.Struct("<IIIH")
_SWITCH_VERSION = struct.Struct("<Q")

# Each body: fixed bytes, bytes of each counted item, fewest and most items.
_REQUEST_BODY_SIZES = {
    HELLO: (_HELLO.size, 0, 0, 0),
    MEMBERS: (0, 0, 0, 0),
    PIN: (0, _CHUNK.size, 1, 1),
    UNPIN: (0, _CHUNK.size, 0, UNPINNED_MAX),
    DAMAGED: (0, _DAMAGED.size, 1, 1),
    STATS: (0, 0, 0, 0),
    SWITCH_VERSION: (_SWITCH_VERSION.size, 0, 0, 0),
    DATA: (0, 0, 0, 0),
    PLAN: (0, 1, 1, PLAN_BYTES_MAX),
}
_ANSWER_BODY_SIZES = {
    HELLO: (_WELCOME.size, 0),
    PIN: (0, _PINNED.size),
    UNPIN: (0, 0),
    DAMAGED: (0, 0),
    SWITCH_VERSION: (0, 0),
    DATA: (0, 0),
    PLAN: (_PLAN_STATUS.size, 0),
}


class LocalRequestHead(NamedTuple):
    kind: int
    flags: int
    counted: int
    body_bytes: int


def request(kind: int, count: int = 0, body: Bytes = b"", flags: int = 0) -> bytes:
    return _HEAD.pack(kind, flags, 0, count, len(body), 0) + body


def parse_request(content: Bytes) -> LocalRequestHead:
    if len(content) != HEAD_BYTES:
        raise CorruptError("these bytes are not a request")
    kind, flags, status, count, body_bytes, zero = _HEAD.unpack(content)
    fixed, each, low, high = _REQUEST_BODY_SIZES.get(kind, (0, 0, 1, 0))
    if not low <= count <= high or body_bytes != fixed + each * count or status or zero:
        raise CorruptError("these bytes are not a request")
    if flags & ~(LOAD | FILE) or (flags and kind != PIN):
        raise CorruptError("these bytes are not a request")
    return LocalRequestHead(kind, flags, count, body_bytes)


class LocalAnswerHead(NamedTuple):
    """The last `revoked` numbers in the body are the chunks that the client should unpin."""

    status: int
    counted: int
    body_bytes: int
    revoked: int


def answer(kind: int, count: int = 0, body: Bytes = b"", revoked: Sequence[int] = ()) -> bytes:
    return _answer(kind, OK, count, body, revoked)


def refusal(kind: int, sentence: str, *, revoked: Sequence[int] = ()) -> bytes:
    return _answer(kind, REFUSED, 0, sentence.encode()[:SENTENCE_BYTES_MAX], revoked)


def _answer(kind: int, status: int, count: int, body: Bytes, revoked: Sequence[int]) -> bytes:
    if not revoked:
        return _HEAD.pack(kind, 0, status, count, len(body), 0) + body
    tail = chunks_body(revoked[:UNPINNED_MAX])
    head = _HEAD.pack(kind, 0, status, count, len(body) + len(tail), len(tail) // _CHUNK.size)
    return head + body + tail


def parse_answer(content: Bytes, kind: int, count: int) -> LocalAnswerHead:
    """The request had this `kind` and `count`."""
    if len(content) != HEAD_BYTES:
        raise CorruptError("these bytes are not an answer")
    answered, flags, status, counted, body_bytes, revoked = _HEAD.unpack(content)
    if answered != kind or flags or revoked > UNPINNED_MAX:
        raise CorruptError("these bytes are not an answer")
    own_bytes = body_bytes - _CHUNK.size * revoked
    if status != OK:
        fits = counted == 0 and 0 <= own_bytes <= SENTENCE_BYTES_MAX
    elif kind in (STATS, MEMBERS):
        fits = counted == 0 and 0 <= own_bytes <= DOCUMENT_BYTES_MAX
    else:
        fixed, each = _ANSWER_BODY_SIZES[kind]
        fits = counted == (count if each else 0) and own_bytes == fixed + each * counted
    if not fits:
        raise CorruptError("these bytes are not an answer")
    return LocalAnswerHead(status, counted, body_bytes, revoked)


def split_revoked(head: LocalAnswerHead, body: Bytes) -> tuple[memoryview, list[int]]:
    """The answer's own body, and the revoked chunks."""
    view = memoryview(body)
    own_bytes = head.body_bytes - _CHUNK.size * head.revoked
    chunks = np.frombuffer(view, "<u4", head.revoked, own_bytes) if head.revoked else None
    return view[:own_bytes], [] if chunks is None else chunks.tolist()


def parse_refusal(body: Bytes) -> str:
    """Returns only printable characters."""
    return shown(bytes(body[:SENTENCE_BYTES_MAX])) or "the master gave no reason"


def hello(identity: UUID, version: int) -> bytes:
    return _HELLO.pack(VERSION, 0, identity.bytes, version)


def parse_hello(body: Bytes) -> tuple[UUID, int]:
    """The dataset's identity and version. Raises UsageError for another version of the protocol."""
    _check_size(_HELLO, body, "hello")
    protocol, zero, identity, version = _HELLO.unpack(body)
    if protocol != VERSION:
        raise UsageError(
            f"the master speaks version {VERSION} of the local protocol, the client {protocol}",
            advice="run the same diesel-fs",
        )
    if zero:
        raise CorruptError("no hello")
    return UUID(bytes=identity), version


def welcome(rank: int, chunks: int) -> bytes:
    return _WELCOME.pack(rank, chunks)


def parse_welcome(body: Bytes) -> tuple[int, int]:
    _check_size(_WELCOME, body, "answer to hello")
    rank, chunks = _WELCOME.unpack(body)
    if rank > RANK_MAX:
        raise CorruptError("no answer to hello")
    return rank, chunks


@dataclass(frozen=True, slots=True)
class TaskView:
    """What a client needs to ask the masters of other nodes. `rank` is its own node's, `task` is
    SHA-256 of the task's name, `members` are the other nodes' masters."""

    rank: int
    task: bytes
    secret: bytes = field(repr=False)
    has_tls: bool
    members: tuple[Member, ...]


def members_body(view: TaskView) -> bytes:
    body: bytes = msgpack.packb(
        {
            "rank": view.rank,
            "task": view.task,
            "secret": view.secret,
            "tls": view.has_tls,
            "members": [member_message(each) for each in view.members],
        }
    )
    return body


def parse_members(body: Bytes) -> TaskView:
    fields = Fields(unpack(body, _VIEW_ITEMS_MAX), "answer to members")
    view = TaskView(
        rank=fields.integer("rank", high=RANK_MAX),
        task=fields.octets("task", TASK_DIGEST_BYTES),
        secret=fields.octets("secret", SECRET_BYTES),
        has_tls=fields.flag("tls", default=False),
        members=tuple(map(parse_member, fields.maps("members", MEMBERS_MAX))),
    )
    fields.end()
    return view


def pinned_body(given: int) -> bytes:
    """`given` is ABSENT, PINNED or LENT."""
    return _PINNED.pack(given)


def parse_pinned(body: Bytes) -> int:
    _check_size(_PINNED, body, "answer to pin")
    given: int = _PINNED.unpack(body)[0]
    if given > LENT:
        raise CorruptError("an unknown answer to pin")
    return given


def plan_status_body(status: int) -> bytes:
    return _PLAN_STATUS.pack(status)


def parse_plan_status(body: Bytes) -> int:
    """The status (see `wire.py`) of a message about plans."""
    _check_size(_PLAN_STATUS, body, "answer to plan")
    status: int = _PLAN_STATUS.unpack(body)[0]
    if status > FAILED:
        raise CorruptError("an unknown status")
    return status


def chunks_body(chunks: Sequence[int]) -> bytes:
    return np.array(chunks, "<u4").tobytes()


def parse_chunks(body: Bytes, chunk_count: int) -> list[int]:
    if len(body) % _CHUNK.size:
        raise CorruptError("no chunks")
    chunks: list[int] = np.frombuffer(body, "<u4").tolist()
    if chunks and max(chunks) >= chunk_count:
        raise CorruptError("a chunk that does not exist")
    return chunks


class DamagedPart(NamedTuple):
    chunk: int
    start: int
    size: int
    rank: int  # of the node that gave it


def damaged_body(damaged: DamagedPart) -> bytes:
    return _DAMAGED.pack(*damaged)


def parse_damaged(body: Bytes, sizes: Sizes) -> DamagedPart:
    _check_size(_DAMAGED, body, "part")
    damaged = DamagedPart(*_DAMAGED.unpack(body))
    if damaged.chunk >= len(sizes) or damaged.start + damaged.size > sizes[damaged.chunk]:
        raise CorruptError("a part lies outside its chunk")
    return damaged


def switch_version_body(version: int) -> bytes:
    return _SWITCH_VERSION.pack(version)


def parse_switch_version(body: Bytes) -> int:
    _check_size(_SWITCH_VERSION, body, "version")
    return int(_SWITCH_VERSION.unpack(body)[0])


def _check_size(layout: struct.Struct, body: Bytes, what: str) -> None:
    if len(body) != layout.size:
        raise CorruptError(f"no {what}")
