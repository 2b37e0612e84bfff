"""The messages about the orders in which files will be read (`PEERS.md`, section 5). Does no I/O.

An *entry* is the number of a file in the snapshot. For any bytes, `parse_plan` returns a message or
raises one error; it allocates nothing for a length that it has not checked.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias
from uuid import UUID

import msgpack
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from ...errors import CorruptError, UsageError
from ...format.entries import Bytes
from ...net.messages import Fields, Message, Value, unpack
from ...orders.computed import ComputedOrder
from ...orders.plan import EPOCH_ENTRIES_MAX, EPOCHS_MAX, STREAMS_MAX, Entries
from ...orders.shuffle import SEED_MAX, WORLD_MAX
from ..wire import ABSENT, BUSY, FAILED, GIVEN, NOT_MINE, PLAN_BYTES_MAX

TAKEN, UNKNOWN, REFUSED, NO_ROOM, DAMAGED = GIVEN, ABSENT, NOT_MINE, BUSY, FAILED
"""The statuses of answers (`PEERS.md`, section 5)."""

DIGEST_BYTES = 16
KEY_CHARS_MAX = 80
"""A key is the number of the announcing process, and the stream's name."""

KNOWN_STREAMS_MAX = 4 * STREAMS_MAX
"""A node may have several mounts and readers."""

_PIECE_BYTES_MAX = PLAN_BYTES_MAX - 256  # packed values; 256 are for the other fields
_HELD_CHUNKS_MAX = 8 * _PIECE_BYTES_MAX
_VALUES_MAX = _PIECE_BYTES_MAX // 4
_POSITIONS_MAX = 256
_ITEMS_MAX = 8 + 8 * _POSITIONS_MAX

Mask = npt.NDArray[np.bool_]
Values = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class OrderPiece:
    digest: bytes
    """The digest of the whole order (`order_digest`)."""
    length: int
    """The entries of the whole order."""
    first: int
    entries: Entries = field(compare=False)


@dataclass(frozen=True, slots=True)
class PlannedEpoch:
    """Its order has `length` entries, and is sent in pieces and named by `digest`, or computed."""

    number: int
    length: int
    digest: bytes = b""
    computed: ComputedOrder | None = None


@dataclass(frozen=True, slots=True)
class PlannedStream:
    """The reader is at `position` in the epoch with the number `at_epoch`."""

    key: str
    identity: UUID
    version: int
    epochs: tuple[PlannedEpoch, ...]
    at_epoch: int = 0
    position: int = 0


@dataclass(frozen=True, slots=True)
class StreamEnd:
    key: str


@dataclass(frozen=True, slots=True)
class Positions:
    """For each stream's key, the number of the epoch and the position in it."""

    by_key: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class HeldChunks:
    """A flag for each chunk from `first` on: whether the sender has it."""

    first: int
    held: Mask = field(compare=False)


@dataclass(frozen=True, slots=True)
class ChunkValues:
    """For each chunk from `first` on, how many of its entries an epoch is likely to read, without
    those that mounts keep; at most all entries of the dataset."""

    first: int
    values: Values = field(compare=False)


PlanMessage: TypeAlias = (
    OrderPiece | PlannedStream | StreamEnd | Positions | HeldChunks | ChunkValues
)


def order_digest(entries: Entries) -> bytes:
    return xxh3_128_digest(np.ascontiguousarray(entries, "<u4").data)


def order_pieces(entries: Entries, digest: bytes, entry_count: int) -> Iterator[OrderPiece]:
    """`entry_count` is the dataset's, here and below."""
    each = 8 * _PIECE_BYTES_MAX // _bits(entry_count)
    for first in range(0, len(entries), each):
        yield OrderPiece(digest, len(entries), first, entries[first : first + each])


def held_pieces(held: Mask) -> Iterator[HeldChunks]:
    for first in range(0, len(held), _HELD_CHUNKS_MAX):
        yield HeldChunks(first, held[first : first + _HELD_CHUNKS_MAX])


def value_pieces(values: Values) -> Iterator[ChunkValues]:
    for first in range(0, len(values), _VALUES_MAX):
        yield ChunkValues(first, values[first : first + _VALUES_MAX])


def position_messages(by_key: Mapping[str, tuple[int, int]]) -> Iterator[Positions]:
    items = [*by_key.items()]
    for first in range(0, len(items), _POSITIONS_MAX):
        yield Positions(dict(items[first : first + _POSITIONS_MAX]))


def plan_body(message: PlanMessage, entry_count: int) -> bytes:
    fields: Message
    match message:
        case OrderPiece(digest, length, first, entries):
            bits = _bits(entry_count)
            fields = {
                "do": "piece", "order": digest, "length": length, "first": first,
                "count": len(entries), "bits": bits, "packed": _packed(entries, bits),
            }  # fmt: skip
        case PlannedStream():
            fields = {
                "do": "stream", "stream": message.key, "identity": message.identity.bytes,
                "version": message.version, "epochs": [*map(_epoch_message, message.epochs)],
                "epoch": message.at_epoch, "position": message.position,
            }  # fmt: skip
        case StreamEnd(key):
            fields = {"do": "end", "stream": key}
        case Positions(by_key):
            fields = {
                "do": "positions",
                "at": [
                    {"stream": key, "epoch": epoch, "position": position}
                    for key, (epoch, position) in by_key.items()
                ],
            }
        case HeldChunks(first, held):
            packed = np.packbits(held, bitorder="little").tobytes()
            fields = {"do": "held", "first": first, "count": len(held), "packed": packed}
        case ChunkValues(first, values):
            packed = values.astype("<f4").tobytes()
            fields = {"do": "values", "first": first, "count": len(values), "packed": packed}
    body: bytes = msgpack.packb(fields)
    assert len(body) <= PLAN_BYTES_MAX
    return body


def parse_plan(body: Bytes, entry_count: int, chunk_count: int) -> PlanMessage:
    """Also checks that entries and chunks exist. Raises CorruptError, UsageError."""
    if len(body) > PLAN_BYTES_MAX:
        raise CorruptError(f"a message of {len(body)} bytes (at most {PLAN_BYTES_MAX})")
    fields = Fields(unpack(bytes(body), _ITEMS_MAX), "a message about plans")
    do = fields.text("do")
    message: PlanMessage
    if do == "piece":
        message = _parse_piece(fields, entry_count)
    elif do == "stream":
        message = PlannedStream(
            key=_key(fields),
            identity=UUID(bytes=fields.octets("identity", 16)),
            version=fields.integer("version"),
            epochs=tuple(map(_parse_epoch, fields.maps("epochs", EPOCHS_MAX))),
            at_epoch=fields.integer("epoch"),
            position=fields.integer("position", high=EPOCH_ENTRIES_MAX),
        )
        numbers = [each.number for each in message.epochs]
        if numbers != sorted({*numbers}):
            fields.bad("epochs", "their numbers rise")
    elif do == "end":
        message = StreamEnd(_key(fields))
    elif do == "positions":
        message = Positions(dict(map(_parse_position, fields.maps("at", _POSITIONS_MAX))))
    elif do == "held":
        first, count = fields.integer("first"), fields.integer("count", high=_HELD_CHUNKS_MAX)
        packed = fields.octets("packed", -(-count // 8))
        if first + count > chunk_count:
            fields.bad("count", f"there are {chunk_count} chunks")
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=count, bitorder="little")
        message = HeldChunks(first, bits.astype(np.bool_))
    elif do == "values":
        first, count = fields.integer("first"), fields.integer("count", high=_VALUES_MAX)
        packed = fields.octets("packed", 4 * count)
        if first + count > chunk_count:
            fields.bad("count", f"there are {chunk_count} chunks")
        values = np.frombuffer(packed, "<f4").astype(np.float32)
        if not ((values >= 0) & (values <= entry_count)).all():  # a NaN is neither
            fields.bad("packed", f"a value is at most {entry_count}, and not negative")
        message = ChunkValues(first, values)
    else:
        raise UsageError(f"a message about plans: no request {do[:64]!r}")
    fields.end()
    return message


def _parse_piece(fields: Fields, entry_count: int) -> OrderPiece:
    length = fields.integer("length", low=1, high=EPOCH_ENTRIES_MAX)
    first = fields.integer("first", high=length - 1)
    bits = fields.integer("bits", low=1, high=32)
    count = fields.integer("count", low=1, high=min(length - first, 8 * PLAN_BYTES_MAX))
    packed = fields.octets("packed", -(-count * bits // 8))
    entries = _unpacked(packed, count, bits)
    if int(entries.max()) >= entry_count:
        fields.bad("packed", f"there are {entry_count} entries")
    return OrderPiece(fields.octets("order", DIGEST_BYTES), length, first, entries)


def _epoch_message(epoch: PlannedEpoch) -> Value:
    fields: Message = {"epoch": epoch.number, "length": epoch.length}
    if epoch.computed is None:
        return {**fields, "order": epoch.digest}
    order = epoch.computed
    return {
        **fields, "seed": order.seed, "of": order.epoch, "group": order.group, "rank": order.rank,
        "world": order.world, "drop_last": order.drop_last, "below": order.below,
    }  # fmt: skip


def _parse_epoch(fields: Fields) -> PlannedEpoch:
    number = fields.integer("epoch")
    length = fields.integer("length", high=EPOCH_ENTRIES_MAX)
    if "order" in fields:
        epoch = PlannedEpoch(number, length, fields.octets("order", DIGEST_BYTES))
    else:
        world = fields.integer("world", low=1, high=WORLD_MAX)
        order = ComputedOrder(
            seed=fields.integer("seed", high=SEED_MAX),
            epoch=fields.integer("of", high=SEED_MAX),
            group=fields.integer("group", low=1, high=SEED_MAX),
            rank=fields.integer("rank", high=world - 1),
            world=world,
            drop_last=fields.flag("drop_last", False),
            below=fields.integer("below", high=(1 << 32) - 1),
        )
        epoch = PlannedEpoch(number, length, computed=order)
    fields.end()
    return epoch


def _parse_position(fields: Fields) -> tuple[str, tuple[int, int]]:
    key, epoch = _key(fields), fields.integer("epoch")
    position = fields.integer("position", high=EPOCH_ENTRIES_MAX)
    fields.end()
    return key, (epoch, position)


def _key(fields: Fields) -> str:
    key = fields.text("stream")
    if not 0 < len(key) <= KEY_CHARS_MAX or not key.isascii() or not key.isprintable():
        fields.bad("stream", f"it is at most {KEY_CHARS_MAX} characters of ASCII")
    return key


def _bits(entry_count: int) -> int:
    return max((entry_count - 1).bit_length(), 1)


def _packed(entries: Entries, bits: int) -> bytes:
    each = np.unpackbits(entries.astype(">u4").view(np.uint8).reshape(-1, 4), axis=1)
    return np.packbits(each[:, 32 - bits :]).tobytes()


def _unpacked(packed: bytes, count: int, bits: int) -> Entries:
    each = np.zeros((count, 32), np.uint8)
    flat = np.unpackbits(np.frombuffer(packed, np.uint8), count=count * bits)
    each[:, 32 - bits :] = flat.reshape(count, bits)
    found: Entries = np.packbits(each, axis=1).view(">u4").ravel().astype(np.uint32)
    return found
