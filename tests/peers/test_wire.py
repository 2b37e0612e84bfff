"""The bytes between masters, and between a master and its clients: packing, parsing, and limits."""

import random
import struct
from contextlib import suppress
from dataclasses import replace
from uuid import UUID

import msgpack
import numpy as np
import pytest

from diesel_fs.errors import CorruptError, DieselError, ForeignError, UsageError
from diesel_fs.net.frames import frame
from diesel_fs.peers import local_wire, wire
from diesel_fs.peers.members.membership import ANY_INSTANCE, Member
from diesel_fs.peers.wire import Hello, Proofs
from tests.rows import each_row

SIZES = np.array([1000, 1 << 31, 0], np.uint64)
MINE = Hello(2, True, b"i" * 16, 5, UUID(int=9), 77, b"n" * 32)
PROOFS = (b"s" * 32, b"a" * 32, b"b" * 32, b"t" * 32, MINE)


def test_greetings_round_trip() -> None:
    assert wire.parse_greeting(wire.greeting()) == wire.VERSION == 3
    assert wire.parse_welcome(wire.welcome(b"n" * 32)[:16]) == (True, 3, 32)
    no = wire.refusal("too many connections")
    assert wire.parse_welcome(no[:16]) == (False, 3, 20)
    assert wire.refusal_error(3, no[16:]).message == "the master refused: too many connections"


@each_row(
    ("received", "named"),
    [(b"GET / HTTP/1.1\r\n", "HTTP"), (bytes.fromhex("1603010200010001fc0303") + bytes(5), "TLS"),
     (bytes(16), "no greeting"), (b"", "no greeting"), (b"\x93DIESNET\1\0" + bytes(6), "no")],
)  # fmt: skip
def test_F7_a_foreign_greeting_is_named(received: bytes, named: str) -> None:
    for parse in (wire.parse_greeting, wire.parse_welcome):
        with pytest.raises(ForeignError, match=named):
            parse(received)


@each_row("tail", [(1, 0, 32), (2, 0, 31), (2, 2, 0), (2, 1, 4097), (2, 1, 1 << 31)])
def test_F6_F7_a_welcome_of_another_version_or_length_is_refused(tail: tuple[int, ...]) -> None:
    with pytest.raises(ForeignError):
        wire.parse_welcome(b"\x93DIESPER" + struct.pack("<HHI", *tail))


def test_a_hello_round_trips() -> None:
    framed = wire.hello_frame(MINE, b"p" * 32)
    assert len(framed) < 1024
    assert wire.parse_hello(framed[8:]) == (MINE, b"p" * 32)


@each_row(
    "change",
    [{"rank": -1}, {"rank": 0xFFFE}, {"rank": True}, {"instance": b"short"}, {"nonce": b""},
     {"identity": b"x" * 15}, {"version": -1}, {"proof": b"p"}, {"proof": "p" * 32}, {"x": 1},
     {"client": 1}],
)  # fmt: skip
def test_S1_a_hello_with_bad_fields_is_refused(change: dict[str, int | bytes | str]) -> None:
    message = {**MINE.to_message(), "proof": b"p" * 32, **change}
    with pytest.raises((UsageError, CorruptError)):
        wire.parse_hello(frame(message, wire.HELLO_LIMITS)[8:])


def test_S2_S3_proofs_cover_every_value_of_the_handshake() -> None:
    known = Proofs(*PROOFS)
    assert known.connector != known.acceptor
    others = [(*PROOFS[:i], b"x" * 32, *PROOFS[i + 1 :]) for i in range(4)]
    changes = ({"rank": 3}, {"is_client": False}, {"to": 6}, {"version": 78}, {"nonce": b"m" * 32},
               {"instance": b"j" * 16}, {"identity": UUID(int=8)})  # fmt: skip
    fields = {name: getattr(MINE, name) for name in MINE.__slots__}
    others += [(*PROOFS[:4], Hello(**{**fields, **change})) for change in changes]
    for other in others:
        found = Proofs(*other)  # type: ignore[arg-type]  # a tuple that was put together
        assert found.connector != known.connector
        assert found.acceptor != known.acceptor
    assert "s" * 8 not in repr(known)


def test_requests_round_trip() -> None:
    parts = np.array([(0, 1, 2), (1, 5, 6)], "<u4")
    packed = wire.request(7, wire.READ, wire.LOAD, parts)
    assert wire.parse_request(packed) == (7, wire.READ, wire.LOAD, 2, 24)
    found, size = wire.parse_parts(packed, 2, SIZES, start=wire.HEAD_BYTES)
    assert found.tolist() == parts.tolist()
    assert size == 8
    assert wire.parse_request(wire.request(9, wire.PING)) == (9, wire.PING, 0, 0, 0)
    found_plan = wire.parse_request(wire.plan_request(3, b"said"))
    assert found_plan == (3, wire.PLAN, 0, 0, 4)


@each_row(
    "head",
    [(1, 0, 0, 0, 1, 0), (1, 4, 0, 0, 0, 0), (1, 1, 4, 0, 1, 0), (1, 1, 0, 1, 1, 0),
     (1, 1, 0, 0, 1, 1), (1, 1, 0, 0, 0, 0), (1, 1, 0, 0, 4097, 0), (1, 1, 0, 0, 0xFFFFFFFF, 0),
     (1, 2, 0, 0, 0, 0), (1, 3, 0, 0, 1, 0), (1, 3, 1, 0, 0, 0), (1, 3, 2, 0, 0, 0),
     (1, 5, 0, 0, 0, 0), (1, 5, 0, 0, 0, 49153), (1, 5, 1, 0, 0, 4), (1, 5, 0, 1, 0, 4),
     (1, 5, 0, 0, 1, 4), (1, 5, 0, 0, 0, 0xFFFFFFFF)],
)  # fmt: skip
def test_F7_a_bad_request_is_refused(head: tuple[int, ...]) -> None:
    with pytest.raises(CorruptError):
        wire.parse_request(struct.pack("<IBBHII", *head))


def test_few_and_many_parts_are_checked_alike() -> None:
    """One by one or by numpy, compared with Python's own arithmetic."""
    chance = random.Random(1)
    edges = [0, 1, 999, 1000, 1001, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
    for _ in range(3000):
        count = chance.choice([1, 2, 8, 9, 40])
        records = [
            (chance.choice([0, 0, 1, 1, 1, 2, 3]) if chance.random() < 0.1 else 1,
             chance.choice(edges) if chance.random() < 0.2 else 0,
             chance.choice(edges) if chance.random() < 0.05 else 10)
            for _ in range(count)
        ]  # fmt: skip
        total = sum(size for *_, size in records)
        good = all(c < 3 and s + n <= int(SIZES[c]) for c, s, n in records)
        good = good and (count == 1 or total <= wire.PARTS_BYTES_MAX)
        content = np.array(records, "<u4").tobytes()
        if good:
            assert wire.parse_parts(content, count, SIZES)[1] == total
        else:
            with pytest.raises(CorruptError):
                wire.parse_parts(content, count, SIZES)


def test_answers_round_trip() -> None:
    statuses = bytes([wire.GIVEN, wire.ABSENT])
    packed = wire.answer_head(7, wire.READ, statuses, 5)
    head = wire.parse_answer(packed)
    assert head == (7, wire.READ, 2, 5)
    assert packed[wire.HEAD_BYTES :] == statuses
    wire.check_answer(head, wire.READ, 2, 8)
    parts = np.array([(0, 0, 5), (0, 5, 3)], "<u4")
    assert wire.given_bytes(parts, np.frombuffer(statuses, np.uint8)) == 5


def test_F5_answers_that_do_not_fit_the_request_are_refused() -> None:
    head = wire.AnswerHead(1, wire.READ, 2, 9)
    for wrong in ((wire.PING, 2, 9), (wire.READ, 1, 9), (wire.READ, 2, 8)):
        with pytest.raises(CorruptError):
            wire.check_answer(head, *wrong)
    with pytest.raises(CorruptError):
        wire.check_answer(wire.AnswerHead(1, wire.PING, 0, 3), wire.PING, 0, 0)
    with pytest.raises(CorruptError):
        wire.given_bytes(np.array([(0, 0, 1)], "<u4"), np.array([5], np.uint8))


# the local protocol


def test_local_requests_round_trip() -> None:
    packed = local_wire.request(local_wire.HELLO, body=local_wire.hello(UUID(int=3), 9))
    head = local_wire.parse_request(packed[:16])
    assert head == (local_wire.HELLO, 0, 0, len(packed) - 16)
    assert local_wire.parse_hello(packed[16:]) == (UUID(int=3), 9)
    packed = local_wire.request(local_wire.UNPIN, 2, local_wire.chunks_body([1, 2]))
    assert local_wire.parse_request(packed[:16]).counted == 2
    assert local_wire.parse_chunks(packed[16:], 3) == [1, 2]
    damaged = local_wire.DamagedPart(0, 1, 2, 9)
    assert local_wire.parse_damaged(local_wire.damaged_body(damaged), SIZES) == damaged
    assert local_wire.parse_switch_version(local_wire.switch_version_body(5)) == 5
    assert local_wire.parse_welcome(local_wire.welcome(4, 9)) == (4, 9)


def test_pins_round_trip() -> None:
    packed = local_wire.request(local_wire.PIN, 1, local_wire.chunks_body([7]), wire.LOAD)
    assert local_wire.parse_request(packed[:16]) == (local_wire.PIN, wire.LOAD, 1, 4)
    assert local_wire.parse_chunks(packed[16:], 8) == [7]
    for given in (local_wire.ABSENT, local_wire.PINNED, local_wire.LENT):
        assert local_wire.parse_pinned(local_wire.pinned_body(given)) == given
    with pytest.raises(CorruptError):
        local_wire.parse_pinned(local_wire.pinned_body(3))


VIEW = local_wire.TaskView(
    3, b"t" * 32, b"s" * 32, True,
    (Member(0, b"a" * 16, "node0:700", 5, b"c" * 32), Member(9, ANY_INSTANCE, "[::1]:9", 5, b"")),
)  # fmt: skip


def test_members_round_trip() -> None:
    assert local_wire.parse_members(local_wire.members_body(VIEW)) == VIEW
    assert "s" * 8 not in repr(VIEW)
    many = replace(VIEW, members=tuple(replace(VIEW.members[0], rank=i) for i in range(3000)))
    assert local_wire.parse_members(local_wire.members_body(many)) == many


@each_row(
    "change",
    [{"rank": -1}, {"rank": 0xFFFE}, {"task": b"t"}, {"secret": b"s" * 31}, {"tls": 1},
     {"members": 3}, {"members": [{}]}, {"members": [b"x"]}, {"x": 1}],
)  # fmt: skip
def test_bad_members_are_refused(change: dict[str, object]) -> None:
    message = msgpack.unpackb(local_wire.members_body(VIEW))
    with pytest.raises((UsageError, CorruptError)):
        local_wire.parse_members(msgpack.packb({**message, **change}))


@each_row(
    "head",
    [(0, 0, 0, 0, 0, 0), (9, 0, 0, 0, 0, 0), (1, 0, 0, 0, 27, 0), (2, 0, 0, 1, 12, 0),
     (2, 0, 0, 0, 1, 0), (3, 0, 0, 2, 8, 0), (3, 4, 0, 1, 4, 0), (3, 0, 0, 0, 0, 0),
     (4, 0, 0, 65537, 65537 * 4, 0), (4, 1, 0, 1, 4, 0), (5, 0, 0, 1, 13, 0), (6, 0, 0, 0, 1, 0),
     (6, 0, 1, 0, 0, 0), (6, 0, 0, 0, 0, 1), (7, 0, 0, 0, 0xFFFFFFFF, 0), (8, 0, 0, 1, 0, 0),
     (8, 0, 0, 0, 4, 0)],
)  # fmt: skip
def test_bad_local_requests_are_refused(head: tuple[int, ...]) -> None:
    with pytest.raises(CorruptError):
        local_wire.parse_request(struct.pack("<BBHIII", *head))


@pytest.mark.parametrize("wanted", [[], [3, 1, 4]])
def test_local_answers_round_trip_with_revoked_chunks(wanted: list[int]) -> None:
    packed = local_wire.answer(local_wire.PIN, 1, local_wire.pinned_body(local_wire.PINNED), wanted)
    head = local_wire.parse_answer(packed[:16], local_wire.PIN, 1)
    body, back = local_wire.split_revoked(head, packed[16:])
    assert (head.body_bytes, back) == (len(packed) - 16, wanted)
    assert local_wire.parse_pinned(bytes(body))
    packed = local_wire.answer(local_wire.MEMBERS, 0, local_wire.members_body(VIEW), wanted)
    head = local_wire.parse_answer(packed[:16], local_wire.MEMBERS, 0)
    assert local_wire.parse_members(local_wire.split_revoked(head, packed[16:])[0]) == VIEW
    packed = local_wire.refusal(local_wire.PIN, "no\x1b way", revoked=wanted)
    head = local_wire.parse_answer(packed[:16], local_wire.PIN, 1)
    assert head.status == local_wire.REFUSED
    assert local_wire.parse_refusal(local_wire.split_revoked(head, packed[16:])[0]) == "no\\x1b way"


@each_row(
    ("kind", "head"),
    [(3, (3, 0, 0, 1, 3, 0)), (3, (3, 0, 0, 2, 2, 0)), (3, (4, 0, 0, 1, 2, 0)),
     (3, (3, 1, 0, 1, 2, 0)), (3, (3, 0, 0, 1, 2, 1)), (3, (3, 0, 0, 1, 2, 65537)),
     (3, (3, 0, 1, 0, 513, 0)), (3, (3, 0, 1, 0, 0, 1)), (3, (3, 0, 0, 1, 0xFFFFFFFF, 0)),
     (2, (2, 0, 0, 1, 2, 0)), (2, (2, 0, 0, 0, (4 << 20) + 1, 0)), (8, (8, 0, 0, 0, 1, 0)),
     (8, (8, 0, 0, 1, 0, 0))],
)  # fmt: skip
def test_bad_local_answers_are_refused(kind: int, head: tuple[int, ...]) -> None:
    with pytest.raises(CorruptError):
        local_wire.parse_answer(struct.pack("<BBHIII", *head), kind, 1)


def test_a_client_of_another_version_gets_ours() -> None:
    with pytest.raises(UsageError, match="run the same"):
        local_wire.parse_hello(struct.pack("<HH16sQ", 1, 0, bytes(16), 1))


def test_any_bytes_give_a_body_or_an_error() -> None:
    chance = random.Random(2)
    for _ in range(3000):
        body = chance.randbytes(chance.choice([0, 1, 2, 4, 8, 14, 28, 30]))
        for parse in (
            *(local_wire.parse_hello, local_wire.parse_welcome, local_wire.parse_pinned),
            *(local_wire.parse_members, local_wire.parse_switch_version),
            lambda body: local_wire.parse_chunks(body, 4),
            lambda body: local_wire.parse_damaged(body, SIZES),
        ):
            with suppress(DieselError):
                parse(body)
