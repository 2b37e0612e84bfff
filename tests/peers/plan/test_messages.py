"""Messages about plans: whole ones round-trip, all other bytes are one error, and each length is
checked before it is used.
"""

import random
from contextlib import suppress
from uuid import UUID

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.errors import CorruptError, DieselError, UsageError
from diesel_fs.orders.computed import ComputedOrder
from diesel_fs.orders.plan import Entries
from diesel_fs.peers.plan.messages import (
    ChunkValues,
    HeldChunks,
    OrderPiece,
    PlanMessage,
    PlannedEpoch,
    PlannedStream,
    Positions,
    StreamEnd,
    held_pieces,
    order_digest,
    order_pieces,
    parse_plan,
    plan_body,
    position_messages,
    value_pieces,
)
from diesel_fs.peers.wire import PLAN_BYTES_MAX
from tests.rows import each_row

ENTRIES, CHUNKS = 1000, 40
DIGEST = bytes(range(16))
STREAM = PlannedStream(
    "7/train", UUID(int=4), 3,
    (
        PlannedEpoch(1, 90, DIGEST),
        PlannedEpoch(2, 80, computed=ComputedOrder(5, 6, 7, 1, 2, True, 8)),
    ),
    2, 11,
)  # fmt: skip
MESSAGES: list[PlanMessage] = [
    STREAM,
    StreamEnd("7/train"),
    Positions({"7/train": (2, 11), "8/val": (0, 0)}),
    Positions({}),
]


def parsed(message: PlanMessage) -> PlanMessage:
    return parse_plan(plan_body(message, ENTRIES), ENTRIES, CHUNKS)


@each_row("message", MESSAGES)
def test_messages_round_trip(message: PlanMessage) -> None:
    assert parsed(message) == message


@given(st.integers(1, 1 << 32), st.integers(1, 30_000), st.randoms(use_true_random=False))
def test_pieces_give_the_whole_order(entry_count: int, length: int, chance: random.Random) -> None:
    draw = np.random.default_rng(chance.randrange(1 << 32))
    order = draw.integers(0, entry_count, length).astype(np.uint32)
    found: list[Entries] = []
    for piece in order_pieces(order, order_digest(order), entry_count):
        body = plan_body(piece, entry_count)
        back = parse_plan(body, entry_count, CHUNKS)
        assert isinstance(back, OrderPiece)
        assert back == piece
        assert back.first == sum(len(each) for each in found)
        found.append(back.entries)
    assert (np.concatenate(found) == order).all()


@each_row("entry_count", [1_281_167, 14_197_122, 1 << 31])
def test_an_order_costs_at_most_four_bytes_an_entry(entry_count: int) -> None:
    order = np.random.default_rng(1).integers(0, entry_count, 300_000).astype(np.uint32)
    pieces = order_pieces(order, order_digest(order), entry_count)
    total = sum(16 + len(plan_body(piece, entry_count)) for piece in pieces)
    assert total <= 4 * len(order)
    assert total <= len(order) * (entry_count - 1).bit_length() / 8 * 1.01


def test_held_chunks_and_values_round_trip_in_pieces() -> None:
    draw, count = np.random.default_rng(1), 1_000_000
    held, values = draw.random(count) < 0.5, draw.random(count, np.float32)
    found_held, found_values = [], []
    pieces: list[PlanMessage] = [*held_pieces(held), *value_pieces(values)]
    for piece in pieces:
        back = parse_plan(plan_body(piece, ENTRIES), ENTRIES, count)
        if isinstance(back, HeldChunks):
            found_held.append(back.held)
        else:
            assert isinstance(back, ChunkValues)
            found_values.append(back.values)
    assert (np.concatenate(found_held) == held).all()
    assert (np.concatenate(found_values) == values).all()


def test_many_positions_take_several_messages() -> None:
    at = {f"{i}/{'x' * 64}": (1 << 62, 1 << 26) for i in range(700)}
    found: dict[str, tuple[int, int]] = {}
    for message in position_messages(at):
        back = parsed(message)
        assert isinstance(back, Positions)
        found.update(back.by_key)
    assert found == at


PIECE = OrderPiece(DIGEST, 100, 20, np.arange(50, dtype=np.uint32))


WRONG_VALUES: list[dict[str, object]] = [
    {"packed": np.full(9, bad, "<f4").tobytes()} for bad in (np.nan, np.inf, -1, ENTRIES + 1)
]
BAD: list[tuple[PlanMessage, list[dict[str, object]]]] = [
    (PIECE, [
        {"length": 60}, {"length": 0}, {"length": (1 << 26) + 1}, {"first": 100}, {"first": -1},
        {"count": 0}, {"count": 51}, {"count": 1 << 40}, {"bits": 0}, {"bits": 33}, {"bits": 11},
        {"packed": b""}, {"packed": bytes(10_000)}, {"packed": b"\xff" * 63}, {"order": b"x"},
        {"order": "x" * 16}, {"x": 1}, {"do": "peace"}, {"do": 3},
    ]),
    (STREAM, [
        {"stream": ""}, {"stream": "x" * 81}, {"stream": "\x1b"}, {"stream": "ä"},
        {"identity": b"x"}, {"version": -1}, {"epochs": {}}, {"epochs": [3]},
        {"epochs": [{}] * 9}, {"epochs": [{"epoch": 1, "length": 3}]},
        {"epochs": [{"epoch": 1, "length": 3, "order": DIGEST}] * 2},
        {"epochs": [{"epoch": 1, "length": 3, "order": DIGEST, "seed": 1}]},
        {"epochs": [{"epoch": 1, "length": 1 << 27, "order": DIGEST}]},
        {"position": -1}, {"epoch": 1 << 63}, {"packed": b""},
    ]),
    (MESSAGES[2], [
        {"at": 3}, {"at": [{}]}, {"at": [{"stream": "x", "epoch": 1}]},
        {"at": [{"stream": "x", "epoch": 1, "position": 1, "y": 1}]}, {"at": [{}] * 257},
    ]),
    (ChunkValues(3, np.ones(9, np.float32)), [
        {"first": 32}, {"count": 1 << 40}, {"count": 8}, {"packed": b"1"}, {"first": -1},
        *WRONG_VALUES,
    ]),
    (HeldChunks(3, np.ones(9, np.bool_)), [
        {"first": 32}, {"count": 1 << 40}, {"count": 17}, {"packed": b"1"}, {"first": -1},
    ]),
]  # fmt: skip


@each_row(
    ("message", "change"), [(message, change) for message, changes in BAD for change in changes]
)
def test_bad_messages_are_refused(message: PlanMessage, change: dict[str, object]) -> None:
    fields = msgpack.unpackb(plan_body(message, ENTRIES))
    with pytest.raises((UsageError, CorruptError)):
        parse_plan(msgpack.packb({**fields, **change}), ENTRIES, CHUNKS)


def test_a_computed_order_out_of_range_is_refused() -> None:
    fields = msgpack.unpackb(plan_body(STREAM, ENTRIES))
    changes: list[dict[str, object]] = [
        {"world": 0}, {"world": (1 << 20) + 1}, {"rank": 2}, {"group": 0}, {"seed": -1},
        {"below": 1 << 32}, {"drop_last": 1}, {"of": 1 << 63}, {"more": 1},
    ]  # fmt: skip
    for change in changes:
        epochs = [fields["epochs"][0], {**fields["epochs"][1], **change}]
        with pytest.raises((UsageError, CorruptError)):
            parse_plan(msgpack.packb({**fields, "epochs": epochs}), ENTRIES, CHUNKS)


def test_a_message_that_is_too_long_is_not_parsed() -> None:
    with pytest.raises(CorruptError, match="at most"):
        parse_plan(bytes(PLAN_BYTES_MAX + 1), ENTRIES, CHUNKS)


def test_any_bytes_give_a_message_or_an_error() -> None:
    chance = random.Random(3)
    whole = [plan_body(each, ENTRIES) for each in (*MESSAGES, PIECE)]
    for _ in range(3000):
        body = bytearray(chance.choice(whole))
        for _ in range(chance.randrange(4)):
            body[chance.randrange(len(body))] = chance.randrange(256)
        with suppress(DieselError):
            parse_plan(bytes(body[: chance.randrange(len(body)) + 1]), ENTRIES, CHUNKS)
