"""The targets of the fuzzer: parsers of untrusted bytes, and the errors that each may raise.

A target returns whether any of its parsers accepted the bytes; it must accept its seeds. Any error
other than those it may raise is a finding. The module is imported under atheris' instrumentation.
"""

import struct
import tarfile
import zipfile
from collections.abc import Callable
from functools import partial
from io import BytesIO
from typing import cast
from uuid import UUID

import numpy as np
from xxhash import xxh3_64_intdigest

from diesel_fs.errors import CorruptError, ForeignError, FormatError, UsageError
from diesel_fs.format.chunk import PREAMBLE_BYTES, parse_header, parse_preamble
from diesel_fs.format.chunk_builder import ChunkBuilder
from diesel_fs.format.entries import ChunkId
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.ingest.compare import Comparer, ReadabilityCheck
from diesel_fs.ingest.options import Filter, PutOptions, PutReport, no_progress
from diesel_fs.ingest.put import PutWork
from diesel_fs.ingest.sources.compression import BufferedStream
from diesel_fs.ingest.sources.members import MemberTaker
from diesel_fs.ingest.sources.tar import TarEntries
from diesel_fs.ingest.sources.zip import ZIP_MAGICS, ZipEntries
from diesel_fs.mounts.daemon.prefetch_worker import planner_for
from diesel_fs.mounts.plans.commands import PlanCommands
from diesel_fs.mounts.sessions import protocol
from diesel_fs.mounts.sessions.protocol import Malformed, Op
from diesel_fs.net import frames as wire
from diesel_fs.net.messages import frame as control_frame
from diesel_fs.net.messages import parse_error, unpack
from diesel_fs.peers import local_wire
from diesel_fs.peers import wire as peers_wire
from diesel_fs.peers.members.membership import Member
from diesel_fs.repository.interface import Repository
from diesel_fs.repository.versions import empty_snapshot
from diesel_fs.storage.accounts.account import (
    Account,
    Role,
    accounts_text,
    check_public_key,
    parse_accounts,
)
from tests.mounts.plans.test_commands import SNAPSHOT, announce

SNAPSHOT_HEADER_BYTES = 640
SIZES = np.array([1000, 1 << 31, 0], np.uint64)
PARTS = np.array([(0, 0, 100), (1, 5, 90)], "<u4")
_HEADER = struct.Struct("<IIQQIIIHH")
_POINT = bytes([0x58]) + bytes([0x66]) * 31  # the base point of Ed25519


Refusals = type[Exception] | tuple[type[Exception], ...]


def _taken(refusals: Refusals, parse: Callable[[], object]) -> bool:
    try:
        parse()
    except refusals:
        return False
    return True


def request(content: bytes) -> bool:
    """A request of the kernel to a FUSE session: a header, then the body of its kind."""
    message = memoryview(content)
    bodies = {
        Op.LOOKUP: protocol.parse_name,
        Op.READ: protocol.parse_read,
        Op.READDIRPLUS: protocol.parse_read,
        Op.INTERRUPT: protocol.parse_interrupt,
        Op.INIT: protocol.parse_init,
    }

    def parse() -> None:
        protocol.parse_if_read(message)
        head = protocol.parse_header(message)
        if head.op in (Op.FORGET, Op.BATCH_FORGET):
            protocol.parse_forgets(head, message)
        elif head.op in bodies:
            bodies[Op(head.op)](message)

    return _taken(Malformed, parse)


def control(content: bytes) -> bool:
    try:
        message = unpack(content)
    except CorruptError:
        return False
    plans = PlanCommands(SNAPSHOT, planner_for(SNAPSHOT, 1 << 30, "on-demand"))
    plans.answer(announce(), 1.0)  # `s`, of which a message may speak
    return parse_error(plans.answer(message, 1.0)) is None


def chunk(content: bytes) -> bool:
    front = bytearray(content.ljust(PREAMBLE_BYTES, b"\0"))
    stored = bytes(front[PREAMBLE_BYTES:])
    front[80:88] = _sum(stored[: int.from_bytes(front[64:68], "little")])
    front[88:96] = _sum(bytes(front[:88]))
    return _taken(
        FormatError, lambda: parse_header(parse_preamble(bytes(front[:PREAMBLE_BYTES])), stored)
    )


def snapshot(content: bytes) -> bool:
    """A forged snapshot with right checksums; if it is accepted, every method of it is called."""
    forged = bytearray(content)
    if len(forged) >= SNAPSHOT_HEADER_BYTES:
        for at in range(160, 592, 24):
            start, length, _ = struct.unpack_from("<QQQ", forged, at)
            forged[at + 16 : at + 24] = _sum(bytes(forged[start : start + length]))
        forged[632:640] = _sum(bytes(forged[:632]))
    try:
        found = Snapshot(bytes(forged))
    except FormatError:
        return False
    for index in range(min(len(found), 100)):
        found.path(index)
        found.stat(index)
    found.lookup(b"a/b")
    return True


def wires(content: bytes) -> bool:
    """Bytes between a client and a server, both ways: a greeting, then a frame."""
    lengths, rest = content[: wire.LENGTHS_BYTES], content[wire.LENGTHS_BYTES :]
    if len(lengths) == wire.LENGTHS_BYTES:
        _taken(CorruptError, lambda: wire.parse_lengths(lengths, wire.BEFORE_LOGIN_LIMITS))
    taken = [
        _taken(ForeignError, lambda: wire.parse_greeting(content[: wire.GREETING_BYTES])),
        _taken(ForeignError, lambda: wire.parse_welcome(content[: wire.GREETING_BYTES])),
        _taken(CorruptError, lambda: wire.parse_head(rest, wire.REQUEST_LIMITS)),
    ]
    return any(taken)


def peers(content: bytes) -> bool:
    """Bytes that a master gets from another master: greeting and hello, requests, answers."""
    greeting, after = content[: wire.GREETING_BYTES], content[wire.LENGTHS_BYTES :]
    taken = [
        _taken(ForeignError, lambda: peers_wire.parse_greeting(greeting)),
        _taken(ForeignError, lambda: peers_wire.parse_welcome(greeting)),
        _taken((CorruptError, UsageError), lambda: peers_wire.parse_hello(after)),
    ]
    if len(content) >= peers_wire.HEAD_BYTES:
        taken += [
            _taken(CorruptError, lambda: _peer_request(content)),
            _taken(CorruptError, lambda: _peer_answer(content)),
        ]
    return any(taken)


def _peer_request(content: bytes) -> None:
    parsed = peers_wire.parse_request(content)
    count = min(parsed.counted, (len(content) - peers_wire.HEAD_BYTES) // peers_wire.PART_BYTES)
    peers_wire.parse_parts(content, count, SIZES, start=peers_wire.HEAD_BYTES)


def _peer_answer(content: bytes) -> None:
    head = peers_wire.parse_answer(content)
    peers_wire.check_answer(head, peers_wire.READ, len(PARTS), 200)
    statuses = np.frombuffer(content, np.uint8, -1, peers_wire.HEAD_BYTES)[: len(PARTS)]
    if len(statuses) == len(PARTS):
        peers_wire.given_bytes(PARTS, statuses)


def clients(content: bytes) -> bool:
    head, body = content[: peers_wire.HEAD_BYTES], content[peers_wire.HEAD_BYTES :]
    taken = [_taken(CorruptError, lambda: local_wire.parse_request(head))]

    def parse_answer(kind: int) -> None:
        parsed = local_wire.parse_answer(head, kind, 1)
        if parsed.body_bytes == len(body):
            local_wire.split_revoked(parsed, body)

    for kind in range(local_wire.HELLO, local_wire.DATA + 1):
        taken.append(_taken(CorruptError, partial(parse_answer, kind)))
    bodies: list[Callable[[bytes], object]] = [
        local_wire.parse_hello,
        local_wire.parse_welcome,
        local_wire.parse_pinned,
        local_wire.parse_members,
        local_wire.parse_switch_version,
        lambda body: local_wire.parse_chunks(body, len(SIZES)),
        lambda body: local_wire.parse_damaged(body, SIZES),
    ]
    for parse in bodies:
        _taken((CorruptError, UsageError), partial(parse, body))
    taken.append(_taken((CorruptError, UsageError), lambda: local_wire.parse_members(content)))
    local_wire.parse_refusal(body)
    return any(taken)


def account_text(content: bytes) -> bool:
    _taken(UsageError, lambda: check_public_key(content[:32]))
    return _taken(FormatError, lambda: parse_accounts(content))


def archive(content: bytes) -> bool:
    """A tar or a zip: its headers, and the handling of its entries by a put. Nothing is packed."""
    options = PutOptions()
    taken = Filter(options)
    readable = ReadabilityCheck(_NO_REPOSITORY, "", _EMPTY, options)
    work = PutWork(
        _NO_REPOSITORY, b"", options, taken, _EMPTY, readable, PutReport(), no_progress
    )  # fmt: skip
    taker = MemberTaker(work, Comparer(_EMPTY, b"", options, taken, readable), None)

    def take() -> None:
        if content.startswith(ZIP_MAGICS):
            ZipEntries(BytesIO(content)).take_all(taker)
        else:
            TarEntries(BufferedStream(BytesIO(content))).take_all(taker)

    return _taken(UsageError, take)


_EMPTY = empty_snapshot(UUID(int=1), "archive")
_NO_REPOSITORY = cast("Repository", None)


def _tar() -> bytes:
    made = BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind in (("d", tarfile.DIRTYPE), ("d/l", tarfile.SYMTYPE), ("n" * 120, b"0")):
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.mtime = kind, "t", 1.5
            tar.addfile(info)
    return made.getvalue()


def _zip() -> bytes:
    made = BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as packed:
        info = zipfile.ZipInfo("d\\e")
        info.create_system, info.extra = 0, struct.pack("<HHBL", 0x7075, 6, 1, 0) + b"n"
        packed.writestr(info, b"1")
        packed.writestr("caf\u00e9", b"2" * 99)
    return made.getvalue()


def _sum(content: bytes) -> bytes:
    return xxh3_64_intdigest(content).to_bytes(8, "little")


_BODIES = {
    Op.LOOKUP: (b"name\0",),
    Op.READ: (struct.pack("<QQIIQII", 0, 4096, 65536, 0, 0, 0, 0),),
    Op.READDIRPLUS: (struct.pack("<QQIIQII", 0, 3, 4096, 0, 0, 0, 0),),
    Op.FORGET: (struct.pack("<Q", 2),),
    Op.BATCH_FORGET: (struct.pack("<II", 2, 0), struct.pack("<QQQQ", 5, 1, 6, 2)),
    Op.INTERRUPT: (struct.pack("<Q", 7),),
    Op.INIT: (struct.pack("<IIII", 7, 41, 1 << 20, 0xFFFF), bytes(48)),
}


def _kernel_request(op: Op, *body: bytes) -> bytes:
    size = _HEADER.size + sum(map(len, body))
    return b"".join([_HEADER.pack(size, op.value, 1, 1, 0, 0, 0, 0, 0), *body])


def seeds() -> dict[str, list[bytes]]:
    builder = ChunkBuilder(UUID(int=1), 1 << 20, "auto")
    builder.add_tombstone((b"a", b"b"))
    parts, _ = builder.seal(ChunkId(bytes(range(16))))
    first = peers_wire.Hello(1, True, bytes(16), 2, UUID(int=1), 3, bytes(32))
    member = Member(0, bytes(16), "node:1", 3, bytes(32))
    view = local_wire.TaskView(1, bytes(32), bytes(32), True, (member,))
    hello = local_wire.hello(UUID(int=1), 1)
    pinned = local_wire.pinned_body(local_wire.PINNED)
    return {
        "request": [_kernel_request(op, *_BODIES.get(op, (b"",))) for op in Op],
        "control": [
            control_frame({"do": "stats"}, 1 << 20)[4:],
            control_frame(announce(), 1 << 20)[4:],
            control_frame({"do": "progress", "stream": "s", "position": 3}, 1 << 20)[4:],
        ],
        "chunk": [b"".join(map(bytes, parts[:2]))],
        "snapshot": [bytes(SNAPSHOT.buffer)],
        "wire": [
            wire.frame({"id": 1, "do": "x", "a": [b"b", None, {"c": 1.5}]}, wire.REQUEST_LIMITS)
        ],
        "peers": [
            peers_wire.greeting(),
            peers_wire.welcome(bytes(32)),
            peers_wire.hello_frame(first, bytes(32)),
            peers_wire.request(1, peers_wire.READ, peers_wire.LOAD, PARTS),
            peers_wire.answer_head(1, peers_wire.READ, b"\0\1", 100) + bytes(100),
        ],
        "clients": [
            local_wire.request(local_wire.HELLO, body=hello),
            local_wire.request(local_wire.PIN, 1, local_wire.chunks_body([1])),
            local_wire.answer(local_wire.PIN, 1, pinned, [2]),
            local_wire.answer(local_wire.MEMBERS, 0, local_wire.members_body(view)),
            local_wire.refusal(local_wire.MEMBERS, "no"),
            local_wire.members_body(view),
        ],
        "accounts": [accounts_text({"a": Account("a", _POINT, True, {"d": Role.READ})}).encode()],
        "archive": [_tar(), _zip()],
    }


TARGETS: dict[str, Callable[[bytes], bool]] = {
    "request": request,
    "control": control,
    "chunk": chunk,
    "snapshot": snapshot,
    "wire": wires,
    "peers": peers,
    "clients": clients,
    "accounts": account_text,
    "archive": archive,
}
