"""What the processes of a task exchange, as bytes: `PEERS.md`, sections 3 and 4.

Owned here: requests and answers between masters, the local protocol between a master and its
clients, and every limit on them. Not owned: how masters greet each other (`hello.py`), sockets and
time (`peer.py`, `acceptor.py`, `local.py`). Any bytes give a value or one error; nothing is
allocated for a length before that is known to be allowed. Pure.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

import numpy as np
import numpy.typing as npt

from ..errors import CorruptError, UsageError
from ..format.entries import Bytes
from ..names import shown

SENTENCE_BYTES_MAX = 512

RANK_MAX = 0xFFFD
"""Ranks stand in two bytes, of which two values are taken."""

SOURCE_HERE, SOURCE_NONE = 0xFFFE, 0xFFFF

PARTS_MAX = 4096
PARTS_BYTES_MAX = 32 << 20
REQUESTS_MAX = 64
IN_FLIGHT_BYTES_MAX = 64 << 20

HEAD_BYTES = 16
PART_BYTES = 12

READ, PING, WORKING = 1, 3, 4  # 2 is free
LOAD = 1
"""Flag of a READ, and of a LEND: fetch what is not here."""

GIVEN, ABSENT, NOT_MINE, BUSY, FAILED = range(5)
ALL_GIVEN = bytes(PARTS_MAX)
"""As many statuses as are wanted of an answer that gives all."""

Parts = npt.NDArray[np.uint32]
"""Parts of chunks, of the shape (n, 3): chunk, start, bytes."""

Sizes = npt.NDArray[np.uint64]
"""Bytes of each chunk of a version."""


_HEAD = struct.Struct("<IBBHII")
_PART = struct.Struct("<III")
_FEW = 8  # records that are looked at one by one: what numpy's calls cost takes longer


# parts --------------------------------------------------------------------------------------------


def parse_parts(
    content: Bytes, count: int, sizes: Sizes, *, start: int = 0, bytes_max: int = PARTS_BYTES_MAX
) -> tuple[Parts, int]:
    """The records that begin at `start`, as a view of `content`, and how many bytes they are of.

    One part may be of any size, several have at most `bytes_max`. Raises CorruptError for a part
    outside its chunk, and beyond the limit. `content` has the records: `parse_request` says where
    they end.
    """
    parts = np.frombuffer(content, "<u4", 3 * count, start).reshape(count, 3)
    if count <= _FEW:
        total, chunks = 0, len(sizes)
        for at in range(start, start + count * PART_BYTES, PART_BYTES):
            chunk, begin, size = _PART.unpack_from(content, at)
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
    if count > 1 and total > bytes_max:
        raise CorruptError(f"{total} bytes at once (at most {bytes_max})")
    return parts, total


# requests and answers -----------------------------------------------------------------------------


class RequestHead(NamedTuple):
    """The first 16 bytes of a request; `counted` records follow."""

    id: int
    kind: int
    flags: int
    counted: int


def request(number: int, kind: int, flags: int = 0, parts: Parts | None = None) -> bytes:
    """A whole request. The caller keeps within the limits."""
    if parts is None:
        return _HEAD.pack(number, kind, flags, 0, 0, 0)
    assert 0 < len(parts) <= PARTS_MAX
    return _HEAD.pack(number, kind, flags, 0, len(parts), 0) + parts.tobytes()


def parse_request(content: Bytes, start: int = 0) -> RequestHead:
    """What begins at `start`. Raises CorruptError."""
    number, kind, flags, zero, count, none = _HEAD.unpack_from(content, start)
    if zero or none or flags & ~LOAD:
        raise CorruptError("no request")
    if kind == READ:
        if not 0 < count <= PARTS_MAX:
            raise CorruptError(f"a request for {count} parts (at most {PARTS_MAX})")
    elif kind != PING or flags or count:
        raise CorruptError("no request")
    return RequestHead(number, kind, flags, count)


class AnswerHead(NamedTuple):
    """The first 16 bytes of an answer; `counted` statuses and the payload follow."""

    id: int
    kind: int
    counted: int
    payload_bytes: int


def answer_head(number: int, kind: int, statuses: bytes, payload_bytes: int) -> bytes:
    """An answer without its payload."""
    return _HEAD.pack(number, kind, 0, 0, len(statuses), payload_bytes) + statuses


def parse_answer(content: Bytes, start: int = 0) -> AnswerHead:
    """What begins at `start`. Raises CorruptError. Whether it fits what was asked, the asker knows:
    `check_answer` and `given_bytes`."""
    number, kind, zero, none, count, payload_bytes = _HEAD.unpack_from(content, start)
    if zero or none or kind not in (READ, PING, WORKING) or count > PARTS_MAX:
        raise CorruptError("no answer")
    return AnswerHead(number, kind, count, payload_bytes)


def check_answer(head: AnswerHead, kind: int, count: int, bytes_max: int) -> None:
    """That an answer may be one to a request of this kind for so many parts, of at most so many
    bytes. Raises CorruptError."""
    if head.kind == WORKING and kind == READ and not (head.counted or head.payload_bytes):
        return
    if head.kind != kind or head.counted != count or head.payload_bytes > bytes_max:
        raise CorruptError("an answer to something else than was asked")


def given_bytes(parts: Parts, statuses: npt.NDArray[np.uint8]) -> int:
    """How many bytes of payload these statuses are about. Raises CorruptError for one that does not
    exist."""
    if int(statuses.max()) > FAILED:
        raise CorruptError("a status that does not exist")
    return int(parts[statuses == GIVEN, 2].sum(dtype=np.uint64))


# the local protocol -------------------------------------------------------------------------------

LOCAL_VERSION = 1

(
    LOCAL_HELLO,
    LOCAL_READ,
    LOCAL_PIN,
    LOCAL_UNPIN,
    LOCAL_DAMAGED,
    LOCAL_STATS,
    LOCAL_SWITCH_VERSION,
) = range(1, 8)
LOCAL_OK, LOCAL_REFUSED = range(2)
"""Statuses: done; this client cannot be served, now or later."""

UNPINNED_MAX = 1 << 16
"""Chunks that are returned, or wanted back, at once."""

STATS_BYTES_MAX = 4 << 20
LOCAL_BODY_BYTES_MAX = max(PARTS_MAX * PART_BYTES, 4 * UNPINNED_MAX)
"""Of a request: what a master has to make room for."""

_LOCAL = struct.Struct("<BBHIII")
_LOCAL_HELLO = struct.Struct("<HH16sQ")
_LOCAL_WELCOME = struct.Struct("<II")
_CHUNK = struct.Struct("<I")
_SOURCE = struct.Struct("<H")
_OFFSET = struct.Struct("<I")
_DAMAGED = struct.Struct("<IIIH")
_SHOW = struct.Struct("<Q")

# How long the bodies are: so many bytes, and so many for each that is counted; and how many may be.
_REQUEST_BODY_SIZES = {
    LOCAL_HELLO: (_LOCAL_HELLO.size, 0, 0, 0),
    LOCAL_READ: (0, PART_BYTES, 1, PARTS_MAX),
    LOCAL_PIN: (0, _CHUNK.size, 1, 1),
    LOCAL_UNPIN: (0, _CHUNK.size, 0, UNPINNED_MAX),
    LOCAL_DAMAGED: (0, _DAMAGED.size, 1, 1),
    LOCAL_STATS: (0, 0, 0, 0),
    LOCAL_SWITCH_VERSION: (_SHOW.size, 0, 0, 0),
}
_ANSWER_BODY_SIZES = {
    LOCAL_HELLO: (_LOCAL_WELCOME.size, 0),
    LOCAL_READ: (0, _OFFSET.size + _SOURCE.size),
    LOCAL_PIN: (0, _SOURCE.size),
    LOCAL_UNPIN: (0, 0),
    LOCAL_DAMAGED: (0, 0),
    LOCAL_SWITCH_VERSION: (0, 0),
}


class LocalRequestHead(NamedTuple):
    """The first 16 bytes of a client's request; its body follows."""

    kind: int
    flags: int
    counted: int
    body_bytes: int


def local_request(kind: int, count: int = 0, body: Bytes = b"", flags: int = 0) -> bytes:
    """A whole request."""
    return _LOCAL.pack(kind, flags, 0, count, len(body), 0) + body


def parse_local_request(content: Bytes) -> LocalRequestHead:
    """The head of a request, whose body is as long as its kind says. Raises CorruptError."""
    if len(content) != HEAD_BYTES:
        raise CorruptError("no request")
    kind, flags, status, count, body_bytes, zero = _LOCAL.unpack(content)
    fixed, each, low, high = _REQUEST_BODY_SIZES.get(kind, (0, 0, 1, 0))
    if not low <= count <= high or body_bytes != fixed + each * count or status or zero:
        raise CorruptError("no request")
    if flags & ~LOAD or (flags and kind not in (LOCAL_READ, LOCAL_PIN)):
        raise CorruptError("no request")
    return LocalRequestHead(kind, flags, count, body_bytes)


class LocalAnswerHead(NamedTuple):
    """The first 16 bytes of a master's answer; its body follows, with `revoked` chunks at its
    end."""

    status: int
    counted: int
    body_bytes: int
    revoked: int


def local_answer(
    kind: int, count: int = 0, body: Bytes = b"", revoked: Sequence[int] = ()
) -> bytes:
    """A whole answer. `revoked` are chunks that the master would like back."""
    return _local_answer(kind, LOCAL_OK, count, body, revoked)


def local_refusal(kind: int, sentence: str, *, revoked: Sequence[int] = ()) -> bytes:
    """An answer that says in one sentence why there is none."""
    return _local_answer(kind, LOCAL_REFUSED, 0, sentence.encode()[:SENTENCE_BYTES_MAX], revoked)


def _local_answer(kind: int, status: int, count: int, body: Bytes, revoked: Sequence[int]) -> bytes:
    if not revoked:
        return _LOCAL.pack(kind, 0, status, count, len(body), 0) + body
    back = revoked[:UNPINNED_MAX]
    length = len(body) + _CHUNK.size * len(back)
    head = _LOCAL.pack(kind, 0, status, count, length, len(back))
    return head + body + np.array(back, "<u4").tobytes()


def parse_local_answer(content: Bytes, kind: int, count: int) -> LocalAnswerHead:
    """The head of an answer to a request of this kind and count. Raises CorruptError."""
    if len(content) != HEAD_BYTES:
        raise CorruptError("no answer")
    same, flags, status, counted, body_bytes, wanted = _LOCAL.unpack(content)
    if same != kind or flags or wanted > UNPINNED_MAX:
        raise CorruptError("no answer")
    proper = body_bytes - _CHUNK.size * wanted
    if status != LOCAL_OK:
        good = counted == 0 and 0 <= proper <= SENTENCE_BYTES_MAX
    elif kind == LOCAL_STATS:
        good = counted == 0 and 0 <= proper <= STATS_BYTES_MAX
    else:
        fixed, each = _ANSWER_BODY_SIZES[kind]
        good = counted == (count if each else 0) and proper == fixed + each * counted
    if not good:
        raise CorruptError("no answer")
    return LocalAnswerHead(status, counted, body_bytes, wanted)


def split_revoked(head: LocalAnswerHead, body: Bytes) -> tuple[memoryview, list[int]]:
    """The body proper, and the chunks that are wanted back."""
    view = memoryview(body)
    proper = head.body_bytes - _CHUNK.size * head.revoked
    chunks = np.frombuffer(view, "<u4", head.revoked, proper) if head.revoked else None
    return view[:proper], [] if chunks is None else chunks.tolist()


def parse_refusal(body: Bytes) -> str:
    """Why there is no answer, for people."""
    return shown(bytes(body[:SENTENCE_BYTES_MAX])) or "it gave no reason"


def local_hello(identity: UUID, version: int) -> bytes:
    """The body of a client's HELLO."""
    return _LOCAL_HELLO.pack(LOCAL_VERSION, 0, identity.bytes, version)


def parse_local_hello(body: Bytes) -> tuple[UUID, int]:
    """The dataset's identity and version. Raises CorruptError; UsageError for a client of another
    version of diesel-fs."""
    if len(body) != _LOCAL_HELLO.size:
        raise CorruptError("no hello")
    protocol, zero, identity, version = _LOCAL_HELLO.unpack(body)
    if protocol != LOCAL_VERSION:
        raise UsageError(
            f"the master speaks version {LOCAL_VERSION} of the local protocol, you {protocol}",
            advice="run the same diesel-fs",
        )
    if zero:
        raise CorruptError("no hello")
    return UUID(bytes=identity), version


def local_welcome(rank: int, chunks: int) -> bytes:
    """The body of a master's answer to HELLO."""
    return _LOCAL_WELCOME.pack(rank, chunks)


def parse_local_welcome(body: Bytes) -> tuple[int, int]:
    """The master's rank, and how many chunks the dataset has. Raises CorruptError."""
    if len(body) != _LOCAL_WELCOME.size:
        raise CorruptError("no answer to hello")
    rank, chunks = _LOCAL_WELCOME.unpack(body)
    if rank > RANK_MAX:
        raise CorruptError("no answer to hello")
    return rank, chunks


def source_body(source: int) -> bytes:
    """The body of an answer to LEND: where the chunk is."""
    return _SOURCE.pack(source)


def parse_source(body: Bytes) -> int:
    """Where a chunk is. Raises CorruptError."""
    if len(body) != _SOURCE.size:
        raise CorruptError("no source")
    return int(_SOURCE.unpack(body)[0])


def read_answer_body(offsets: npt.NDArray[np.uint32], sources: npt.NDArray[np.uint16]) -> bytes:
    """The body of an answer to READ: where in the window each part lies, and where it is from."""
    return offsets.astype("<u4", copy=False).tobytes() + sources.astype("<u2", copy=False).tobytes()


def parse_read_answer(
    body: Bytes, sizes: npt.NDArray[np.uint32], window_bytes: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint16]]:
    """Offset and source of each part, whose sizes the asker knows. Raises CorruptError for a part
    outside the window."""
    if len(body) != len(sizes) * (_OFFSET.size + _SOURCE.size):
        raise CorruptError("no places of parts")
    offsets = np.frombuffer(body, "<u4", len(sizes))
    if (np.add(offsets, sizes, dtype=np.uint64) > window_bytes).any():
        raise CorruptError("a part lies outside the window")
    return offsets, np.frombuffer(body, "<u2", len(sizes), offsets.nbytes)


def chunks_body(chunks: Sequence[int]) -> bytes:
    """The body of a LEND or RETURN."""
    return np.array(chunks, "<u4").tobytes()


def parse_chunks(body: Bytes, chunk_count: int) -> list[int]:
    """The chunks of a LEND or RETURN. Raises CorruptError for those that do not exist."""
    if len(body) % _CHUNK.size:
        raise CorruptError("no chunks")
    chunks: list[int] = np.frombuffer(body, "<u4").tolist()
    if chunks and max(chunks) >= chunk_count:
        raise CorruptError("a chunk that does not exist")
    return chunks


class DamagedPart(NamedTuple):
    """A part that did not match its checksum, and who gave it."""

    chunk: int
    start: int
    size: int
    source: int


def damaged_body(damaged: DamagedPart) -> bytes:
    """The body of a DAMAGED."""
    return _DAMAGED.pack(*damaged)


def parse_damaged(body: Bytes, sizes: Sizes) -> DamagedPart:
    """The part and its source. Raises CorruptError."""
    if len(body) != _DAMAGED.size:
        raise CorruptError("no part")
    found = DamagedPart(*_DAMAGED.unpack(body))
    if found.chunk >= len(sizes) or found.start + found.size > sizes[found.chunk]:
        raise CorruptError("a part lies outside its chunk")
    return found


def switch_version_body(version: int) -> bytes:
    """The body of a SHOW."""
    return _SHOW.pack(version)


def parse_switch_version(body: Bytes) -> int:
    """The dataset's version. Raises CorruptError."""
    if len(body) != _SHOW.size:
        raise CorruptError("no version")
    return int(_SHOW.unpack(body)[0])
