"""Every byte about chunks that the processes of a task exchange (`PEERS.md`, section 3). No I/O.

Chunks are numbered as in the snapshot of the dataset's version; a *part* is a range of a chunk's
bytes. For any bytes, a parser returns a value or raises CorruptError (for fields of a hello,
UsageError). It allocates nothing for a length that it has not checked.
"""

import hmac
import struct
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

import msgpack
import numpy as np
import numpy.typing as npt

from ..errors import CorruptError
from ..format.entries import Bytes
from ..net.frames import BINDING_BYTES, NONCE_BYTES, FrameLimits, GreetingCodec, frame, parse_head
from ..net.messages import Fields, Message
from .members.membership import (
    INSTANCE_BYTES,
    RANK_MAX,
)

PARTS_MAX, PARTS_BYTES_MAX = 4096, 32 << 20
"""Limits of one request: parts, and their bytes. A single part may have any size."""

REQUESTS_MAX, IN_FLIGHT_BYTES_MAX = 64, 64 << 20
"""Limits of one connection: unanswered requests, and bytes of their answers."""

HEAD_BYTES, PART_BYTES = 16, 12

PLAN_BYTES_MAX = PARTS_MAX * PART_BYTES
"""The longest message about plans (`plan/messages.py`): as long as the records of the longest
READ."""

READ, PING, WORKING, PLAN = 1, 3, 4, 5
"""Kinds of messages. WORKING announces that the answer to a READ takes longer."""

WORKING_S, WORKING_PART_S, WORKING_S_MAX = 2.5, 0.1, 10.0

LOAD, THROUGH = 1, 2
"""Flags of a READ, the first also of a PIN."""

GIVEN, ABSENT, NOT_MINE, BUSY, FAILED = range(5)
"""Statuses of parts (`PEERS.md`, section 3)."""

ALL_GIVEN = bytes(PARTS_MAX)
"""The statuses of an answer that gives all parts are a slice of this."""

Parts = npt.NDArray[np.uint32]
"""Shape (n, 3): chunk, start, bytes."""

Sizes = npt.NDArray[np.uint64]
"""Bytes of each chunk, by its number."""

SINGLE = struct.Struct("<IBBHIIIII")

SINGLE_ANSWER = struct.Struct("<IBBHIIB")
"""The answer to a READ of one part, without the payload."""

_HEAD = struct.Struct("<IBBHII")
PART = struct.Struct("<III")
"""One part: chunk, start, bytes."""

_LOOP_PARTS_MAX = 8  # up to this many parts, a loop checks them faster than numpy

VERSION = 3
"""The version of the protocol over TCP."""

PROOF_BYTES = TASK_DIGEST_BYTES = 32

HELLO_LIMITS = FrameLimits(4 << 10, 64, 0)
"""Limits of the frames before a connector has proved that it knows the secret."""

_GREETINGS = GreetingCodec(b"\x93DIESPER", VERSION, "connector", "master")


# greeting -----------------------------------------------------------------------------------------

greeting, parse_greeting = _GREETINGS.greeting, _GREETINGS.parse_greeting
welcome, parse_welcome = _GREETINGS.welcome, _GREETINGS.parse_welcome
refusal, refusal_error = _GREETINGS.refusal, _GREETINGS.refusal_error


def working_s(count: int) -> float:
    """How many seconds longer a reader waits for a READ of `count` parts after `WORKING`. Each part
    may be of another chunk of a slow store. A reader that gives up reads the store itself, which
    then gives the parts twice."""
    return min(WORKING_S + WORKING_PART_S * (count - 1), WORKING_S_MAX)


def version_mismatch(version: int) -> str:
    return (
        f"this master speaks version {VERSION} of the peers' wire, the connector {version}: run the"
        " same diesel-fs on all nodes"
    )


# hello --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """`rank` and `instance` are of the connector's node, `to` is the rank of the wanted master."""

    rank: int
    is_client: bool
    instance: bytes
    to: int
    identity: UUID
    version: int
    nonce: bytes  # random; a proof is valid for one connection

    def to_message(self) -> Message:
        """Proofs cover the packed bytes of this map, so the order of its fields is fixed."""
        return {
            "rank": self.rank,
            "client": self.is_client,
            "instance": self.instance,
            "to": self.to,
            "identity": self.identity.bytes,
            "version": self.version,
            "nonce": self.nonce,
        }


class Proofs:
    """The 32 bytes by which each end shows that it knows the task's secret."""

    def __init__(
        self, secret: bytes, acceptor_nonce: bytes, binding: bytes, task: bytes, hello: Hello
    ) -> None:
        """`binding` is SHA-256 of the acceptor's certificate, or `NO_BINDING`; `task` is SHA-256 of
        the task's name."""
        assert (len(acceptor_nonce), len(binding)) == (NONCE_BYTES, BINDING_BYTES)
        packed: bytes = msgpack.packb(hello.to_message())
        covered = acceptor_nonce + hello.nonce + binding + task + packed
        self.connector = _proof(secret, b"connector", covered)
        self.acceptor = _proof(secret, b"acceptor", covered)

    def __repr__(self) -> str:
        return "Proofs(***)"


def _proof(secret: bytes, end: bytes, covered: bytes) -> bytes:
    """The `2` in the text is fixed by `PEERS.md`; it is not the version of the protocol."""
    return hmac.digest(secret, b"diesel-fs peer 2 " + end + b"\0" + covered, "sha256")


def hello_frame(hello: Hello, proof: bytes) -> bytes:
    return frame({**hello.to_message(), "proof": proof}, HELLO_LIMITS)


def parse_hello(head: Bytes) -> tuple[Hello, bytes]:
    """The caller must check the proof that comes with the hello."""
    fields = Fields(parse_head(head, HELLO_LIMITS), "hello")
    hello = Hello(
        rank=fields.integer("rank", high=RANK_MAX),
        is_client=fields.flag("client", default=False),
        instance=fields.octets("instance", INSTANCE_BYTES),
        to=fields.integer("to", high=RANK_MAX),
        identity=UUID(bytes=fields.octets("identity", 16)),
        version=fields.integer("version"),
        nonce=fields.octets("nonce", NONCE_BYTES),
    )
    proof = fields.octets("proof", PROOF_BYTES)
    fields.end()
    return hello, proof


def proof_frame(proof: bytes) -> bytes:
    return frame({"proof": proof}, HELLO_LIMITS)


def parse_proof(message: Message) -> bytes:
    """The answer must not be an error."""
    fields = Fields(message, "answer to hello")
    proof = fields.octets("proof", PROOF_BYTES)
    fields.end()
    return proof


# parts --------------------------------------------------------------------------------------------


def parse_parts(content: Bytes, count: int, sizes: Sizes, *, start: int = 0) -> tuple[Parts, int]:
    """The records of a request from `start` on, as a view of `content`, which must have all of
    them, and the bytes that they ask for. Checks that parts lie in their chunks."""
    parts = np.frombuffer(content, "<u4", 3 * count, start).reshape(count, 3)
    if count <= _LOOP_PARTS_MAX:
        total, chunks = 0, len(sizes)
        for at in range(start, start + count * PART_BYTES, PART_BYTES):
            chunk, begin, size = PART.unpack_from(content, at)
            if chunk >= chunks or begin + size > sizes.item(chunk):
                raise CorruptError("a part lies outside its chunk")
            total += size
    else:
        chunk_of, size_of = parts[:, 0], parts[:, 2]
        if int(chunk_of.max()) >= len(sizes):
            raise CorruptError("a part lies outside its chunk")
        ends = np.add(parts[:, 1], size_of, dtype=np.uint64)
        if (ends > sizes[chunk_of]).any():
            raise CorruptError("a part lies outside its chunk")
        total = int(size_of.sum(dtype=np.uint64))
    if count > 1 and total > PARTS_BYTES_MAX:
        raise CorruptError(f"{total} bytes at once (at most {PARTS_BYTES_MAX})")
    return parts, total


# requests and answers -----------------------------------------------------------------------------


class RequestHead(NamedTuple):
    """A body of `body_bytes` follows the head: `counted` records, or a message about plans."""

    id: int
    kind: int
    flags: int
    counted: int
    body_bytes: int


def request(number: int, kind: int, flags: int = 0, parts: Parts | None = None) -> bytes:
    """The caller keeps within the limits."""
    if parts is None:
        return _HEAD.pack(number, kind, flags, 0, 0, 0)
    assert 0 < len(parts) <= PARTS_MAX
    return _HEAD.pack(number, kind, flags, 0, len(parts), 0) + parts.tobytes()


def plan_request(number: int, body: Bytes) -> bytes:
    assert 0 < len(body) <= PLAN_BYTES_MAX
    return _HEAD.pack(number, PLAN, 0, 0, 0, len(body)) + body


def parse_request(content: Bytes, start: int = 0) -> RequestHead:
    number, kind, flags, zero, count, body_bytes = _HEAD.unpack_from(content, start)
    if kind == PLAN and not (zero or flags or count) and 0 < body_bytes <= PLAN_BYTES_MAX:
        return RequestHead(number, kind, flags, 0, body_bytes)
    if zero or body_bytes or flags & ~(LOAD | THROUGH):
        raise CorruptError("these bytes are not a request")
    if kind == READ:
        if not 0 < count <= PARTS_MAX:
            raise CorruptError(f"a request for {count} parts (at most {PARTS_MAX})")
    elif kind != PING or flags or count:
        raise CorruptError("these bytes are not a request")
    return RequestHead(number, kind, flags, count, count * PART_BYTES)


class AnswerHead(NamedTuple):
    """`counted` statuses and the payload follow the head."""

    id: int
    kind: int
    counted: int
    payload_bytes: int


def answer_head(number: int, kind: int, statuses: bytes, payload_bytes: int) -> bytes:
    return _HEAD.pack(number, kind, 0, 0, len(statuses), payload_bytes) + statuses


def parse_answer(content: Bytes, start: int = 0) -> AnswerHead:
    """`check_answer` and `given_bytes` compare the answer with its request."""
    number, kind, zero, none, count, payload_bytes = _HEAD.unpack_from(content, start)
    if zero or none or kind not in (READ, PING, WORKING, PLAN) or count > PARTS_MAX:
        raise CorruptError("these bytes are not an answer")
    return AnswerHead(number, kind, count, payload_bytes)


def check_answer(head: AnswerHead, kind: int, count: int, bytes_max: int) -> None:
    """Raise CorruptError unless this can answer such a request for at most `bytes_max` bytes."""
    if head.kind == WORKING and kind == READ and not (head.counted or head.payload_bytes):
        return
    if head.kind != kind or head.counted != count or head.payload_bytes > bytes_max:
        raise CorruptError("the answer does not fit the request")


def gives_all(content: Bytes, number: int, count: int, payload_bytes: int) -> bool:
    """Whether `content` begins with an answer to the READ `number` that gives all parts."""
    return _HEAD.unpack_from(content) == (number, READ, 0, 0, count, payload_bytes)


def given_bytes(parts: Parts, statuses: npt.NDArray[np.uint8]) -> int:
    """The payload that belongs to these statuses. Raises CorruptError."""
    if int(statuses.max()) > FAILED:
        raise CorruptError("an unknown status")
    return int(parts[statuses == GIVEN, 2].sum(dtype=np.uint64))


def check_statuses(answer: Bytes, parts: Parts, length: int) -> None:
    """Raise CorruptError unless the statuses of an answer to READ fit its `length`. `answer` needs
    only its head and statuses."""
    payload_bytes = length - HEAD_BYTES - len(parts)
    statuses = np.frombuffer(answer, np.uint8, len(parts), HEAD_BYTES)
    if given_bytes(parts, statuses) != payload_bytes:
        raise CorruptError("an answer of another length")
