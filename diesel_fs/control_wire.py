"""What travels over a mount's control socket: frames, messages, and the fields of plans.

Owned here: encoding and strict decoding for both ends (`control.py`, and `fuse/`), and every limit
on what comes from outside. Not owned: sockets, who may speak, what a message does. The messages are
described in `fuse/CONTROL.md`.

Any bytes give a message or one CorruptError, in linear time: before anything is built, a look over
the bytes counts the items and how deep they lie. Fields are checked by exact types, and unknown
ones refused, with UsageError. Pure.
"""

import math
import struct
from collections.abc import Sequence
from typing import NoReturn, TypeAlias

import msgpack
import numpy as np
import numpy.typing as npt

from . import errors
from .errors import CorruptError, DieselError, UsageError
from .plans import EPOCHS_MAX, Epoch, Order
from .shuffle import GROUP_SIZE_DEFAULT, SEED_MAX, chunk_shuffle, full_shuffle
from .snapshot import ROOT_INDEX, Snapshot

Value: TypeAlias = "bool | int | float | str | bytes | list[Value] | dict[str, Value] | None"
Message: TypeAlias = dict[str, Value]

PROTOCOL = 1
"""The version in the first message; it changes when an old client would be misunderstood."""

FRAME_BYTES_MAX = 8 << 20
"""2 million entries; longer epochs are sent in parts (`extend`). The server of a mount, which must
answer the kernel meanwhile, needs 10 ms for one, but 400 ms for one of 32 MiB."""

HELLO_BYTES_MAX = 4096
"""Before the first message nobody has said that it knows this protocol."""

ITEMS_MAX = 1024
"""Of one message, in all: 8 epochs of 12 fields are 200. An item takes up to some 100 bytes."""

DEPTH_MAX = 8
WORLD_MAX = 1 << 20
TEXT_MAX = 4096
ENTRIES_WIDTHS = (4, 8)
ENTRIES_PER_FRAME = 1 << 20
"""What a client puts into one frame: half of what fits."""

LENGTH = struct.Struct("<I")


# frames -------------------------------------------------------------------------------------------


def frame(message: Message) -> bytes:
    """A message as it travels. Raises UsageError where it is too long."""
    body: bytes = msgpack.packb(message)
    if len(body) > FRAME_BYTES_MAX:
        raise UsageError(f"a message of {len(body)} bytes (at most {FRAME_BYTES_MAX})")
    return LENGTH.pack(len(body)) + body


def unpacked(body: bytes | bytearray) -> Message:
    """The message in a frame. Raises CorruptError for anything else."""
    _look_over(body)
    try:
        message = msgpack.unpackb(body, object_pairs_hook=_unique, strict_map_key=True)
    except Exception as error:  # msgpack raises many kinds, UnicodeDecodeError among them
        raise CorruptError(f"no message: {error}") from None
    if not isinstance(message, dict):
        raise CorruptError("no message: it is no map")
    return message


def _unique(pairs: Sequence[tuple[str, Value]]) -> Message:
    found = dict(pairs)
    if len(found) != len(pairs) or not all(type(key) is str for key in found):
        raise ValueError("repeated keys, or keys that are no text")
    return found


def _look_over(body: bytes | bytearray) -> None:
    """Walks over the heads of all items. Raises CorruptError where there are too many, too deep,

    of a kind that no message has, or where the bytes end early or late.
    """
    at, left = 0, [1]  # items that are still to come, on each level
    for _ in range(ITEMS_MAX):
        while left and not left[-1]:
            left.pop()
        if not left:
            break
        if at >= len(body):
            raise CorruptError("no message: it ends early")
        left[-1] -= 1
        head = body[at]
        inside, length = _item(head, body, at + 1)
        at += 1 + length
        if inside > ITEMS_MAX:
            raise CorruptError("no message: too many items")
        if inside:
            left.append(inside)
            if len(left) > DEPTH_MAX + 1:
                raise CorruptError("no message: too deep")
    if any(left):
        raise CorruptError("no message: too many items")
    if at != len(body):
        raise CorruptError("no message: its length is another")


_FIXED = {
    0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8,
    0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
}  # fmt: skip
_COUNTED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # binary and text
_HOLDING = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}  # arrays and maps


def _item(head: int, body: bytes | bytearray, at: int) -> tuple[int, int]:
    """The items inside one, and its bytes behind the head without them."""
    if head < 0x80 or head >= 0xE0:
        return 0, 0
    if head < 0xA0:
        return (head & 15) * (1 if head >= 0x90 else 2), 0
    if head < 0xC0:
        return 0, head & 31
    if head in _FIXED:
        return 0, _FIXED[head]
    if head in _COUNTED:
        width = _COUNTED[head]
        return 0, width + int.from_bytes(body[at : at + width], "big")
    if head in _HOLDING:
        width, each = _HOLDING[head]
        return each * int.from_bytes(body[at : at + width], "big"), width
    raise CorruptError(f"no message: an item of the kind {head:#x}")


# fields -------------------------------------------------------------------------------------------


class Fields:
    """The fields of a map, each taken once by its exact type; `end` refuses what is left.

    All raise UsageError.
    """

    def __init__(self, values: Message, what: str) -> None:
        self._values = dict(values)
        self._what = what

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def text(self, name: str, default: str | None = None) -> str:
        """A short text."""
        value = self._take(name, default)
        if type(value) is not str or len(value) > TEXT_MAX:
            self._bad(name, "it is a short text")
        return value

    def whole(
        self, name: str, default: int | None = None, *, low: int = 0, high: int = SEED_MAX
    ) -> int:
        """A whole number."""
        value = self._take(name, default)
        if type(value) is not int or not low <= value <= high:
            self._bad(name, f"it is a whole number from {low} to {high}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._take(name, default)
        if type(value) is not bool:
            self._bad(name, "it is true or false")
        return value

    def number(self, name: str) -> float:
        """A finite number."""
        value = self._take(name, None)
        if (type(value) is not float and type(value) is not int) or not math.isfinite(value):
            self._bad(name, "it is a finite number")
        return float(value)

    def octets(self, name: str) -> bytes:
        """Raw bytes."""
        value = self._take(name, None)
        if type(value) is not bytes:
            self._bad(name, "it is bytes")
        return value

    def maps(self, name: str, most: int) -> "list[Fields]":
        """Maps, each to be read in its turn."""
        values = self._take(name, None)
        if type(values) is not list or len(values) > most:
            self._bad(name, f"it is at most {most} maps")
        found = []
        for each in values:
            if type(each) is not dict:
                self._bad(name, "it holds maps")
            found.append(Fields(each, f"{self._what}, {name}"))
        return found

    def entries(self) -> npt.NDArray[np.int64] | npt.NDArray[np.uint32]:
        """The fields `entries` and `width`: a row of entry indices, little-endian."""
        width = self.whole("width", 4)
        given = self.octets("entries")
        if width not in ENTRIES_WIDTHS or len(given) % width:
            self._bad("entries", "it is whole numbers of 4 or 8 bytes each")
        row = np.frombuffer(given, "<i4" if width == 4 else "<i8")
        if len(row) and int(row.min()) < 0:
            self._bad("entries", "none is below 0")
        return row.astype(np.uint32) if width == 4 else row

    def end(self) -> None:
        """There must be nothing else."""
        for name in self._values:
            raise UsageError(f"{self._what}: unknown field {name[:64]!r}")

    def _take(self, name: str, default: Value) -> Value:
        if name not in self._values:
            if default is None:
                raise UsageError(f"{self._what}: no field {name!r}")
            return default
        return self._values.pop(name)

    def _bad(self, name: str, rule: str) -> NoReturn:
        raise UsageError(f"{self._what}: bad {name!r}: {rule}")


def packed_entries(entries: Order) -> Message:
    """The fields `entries` and `width` of a row of indices. Raises UsageError."""
    row = np.asarray(entries)
    if row.ndim != 1 or (len(row) and row.dtype.kind not in "iu"):
        raise UsageError("entries are one row of whole numbers")
    if len(row) and not 0 <= int(row.min()) <= int(row.max()) < 1 << 31:
        raise UsageError("entries that no dataset has")
    return {"entries": row.astype("<i4").tobytes(), "width": 4}


def epoch_of(fields: Fields, snapshot: Snapshot) -> Epoch:
    """An epoch as a message gives it, by its entries or by parameters; the order is drawn here.

    Raises UsageError.
    """
    number = fields.whole("epoch")
    exact = fields.flag("exact", True)
    if "kind" not in fields:
        entries = fields.entries()
        bounds = np.frombuffer(_multiple(fields.octets("bounds"), 8), "<i8") if (
            "bounds" in fields
        ) else None  # fmt: skip
        fields.end()
        return Epoch(number, entries, exact, bounds)  # type: ignore[arg-type]  # it converts
    kind = fields.text("kind")
    seed = fields.whole("seed")
    group_size = fields.whole("group_size", GROUP_SIZE_DEFAULT, low=1)
    world = fields.whole("world", 1, low=1, high=WORLD_MAX)
    rank = fields.whole("rank", 0, high=world - 1)
    drop_last = fields.flag("drop_last", False)
    below = fields.whole("below", ROOT_INDEX, high=max(len(snapshot) - 1, 0))
    fields.end()
    if kind == "chunk":
        order = chunk_shuffle(
            snapshot, seed, number, group_size=group_size, rank=rank, world=world,
            drop_last=drop_last, below=below,
        )  # fmt: skip
    elif kind == "full":
        order = full_shuffle(
            snapshot, seed, number, rank=rank, world=world, drop_last=drop_last, below=below
        )
    else:
        raise UsageError(f"bad kind of order {kind[:64]!r}: it is chunk or full")
    return Epoch(number, order, exact)  # type: ignore[arg-type]  # it converts


def epochs_of(fields: Fields, snapshot: Snapshot) -> list[Epoch]:
    """The field `epochs`. Raises UsageError."""
    return [epoch_of(each, snapshot) for each in fields.maps("epochs", EPOCHS_MAX)]


def _multiple(given: bytes, width: int) -> bytes:
    if len(given) % width:
        raise UsageError(f"a row whose numbers are not {width} bytes each")
    return given


# errors -------------------------------------------------------------------------------------------


def described(error: DieselError) -> Message:
    """An error as it travels."""
    return {"error": type(error).__name__, "message": error.message, "advice": error.advice}


def error_in(answer: Message) -> DieselError | None:
    """The error that an answer is, or None."""
    if "error" not in answer:
        return None
    name, message, advice = (str(answer.get(key, "")) for key in ("error", "message", "advice"))
    kind = getattr(errors, name, DieselError)
    if not isinstance(kind, type) or not issubclass(kind, DieselError):
        kind = DieselError
    try:
        return kind(message, advice=advice)
    except TypeError:  # a leaf with fields of its own
        return DieselError(message, advice=advice)
