"""Messages between DIESEL-FS programs: maps in msgpack, decoded strictly, and their fields.

The sender is not trusted. For any bytes, `unpack` returns a message or raises one CorruptError, in
linear time: it counts the items and their depth before any object is built. `Fields` then checks
each field by its exact type and refuses unknown ones.
"""

import math
import struct
from collections.abc import Sequence
from typing import NoReturn, TypeAlias

import msgpack

from ..errors import CorruptError, DieselError, UsageError, error_by_class_name
from ..names import shown

Value: TypeAlias = "bool | int | float | str | bytes | list[Value] | dict[str, Value] | None"
Message: TypeAlias = dict[str, Value]

ITEMS_MAX = 1024
"""The default for the most values, and keys of maps, of one message. An item takes up to some 100
bytes of memory."""

DEPTH_MAX = 8
INTEGER_MAX = (1 << 63) - 1
TEXT_MAX = 4096

LENGTH = struct.Struct("<I")
"""The length of a message in bytes, which is sent before it on a mount's sockets."""


def frame(message: Message, bytes_max: int) -> bytes:
    """A message after its length. Raises UsageError if it is too long."""
    body: bytes = msgpack.packb(message)
    if len(body) > bytes_max:
        raise UsageError(f"a message of {len(body)} bytes (at most {bytes_max})")
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes | bytearray | memoryview, items_max: int = ITEMS_MAX) -> Message:
    """Raises CorruptError."""
    _check_items(body, items_max)
    try:
        message = msgpack.unpackb(body, object_pairs_hook=_unique, strict_map_key=True)
    except Exception as error:  # msgpack raises many types
        raise CorruptError(f"no message: {error}") from None
    if not isinstance(message, dict):
        raise CorruptError("no message: it is not a map")
    return message


def _unique(pairs: Sequence[tuple[str, Value]]) -> Message:
    found = dict(pairs)
    if len(found) != len(pairs) or not all(type(key) is str for key in found):
        raise ValueError("repeated keys, or keys that are not text")
    return found


def _check_items(body: bytes | bytearray | memoryview, items_max: int) -> None:
    """Raise CorruptError for too many or too deep items, unknown types, or missing or extra
    bytes."""
    at, left = 0, [1]  # the next byte; the number of items to come, on each level
    for _ in range(items_max):
        while left and not left[-1]:
            left.pop()
        if not left:
            break
        if at >= len(body):
            raise CorruptError("no message: it is cut off")
        left[-1] -= 1
        head = body[at]
        contained, length = _item(head, body, at + 1)
        at += 1 + length
        if contained > items_max:
            raise CorruptError("no message: too many items")
        if contained:
            left.append(contained)
            if len(left) > DEPTH_MAX + 1:
                raise CorruptError("no message: too deep")
    if any(left):
        raise CorruptError("no message: too many items")
    if at != len(body):
        raise CorruptError("no message: bytes follow its end")


# The formats of msgpack by their first byte: the number of bytes that follow, the width of the
# length that follows, and for containers the width of their count and the items of each entry
_FIXED = {
    0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8,
    0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
}  # fmt: skip
_COUNTED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # binary and text
_HOLDING = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}  # arrays and maps


def _item(head: int, body: bytes | bytearray | memoryview, at: int) -> tuple[int, int]:
    """Returns how many items an item contains, and how many bytes it has after the first."""
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
    raise CorruptError(f"no message: an item of the type {head:#x}")


class Fields:
    """The fields of a message. Each method takes one field out; a field with a default may be
    missing. All methods raise UsageError."""

    def __init__(self, values: Message, what: str) -> None:
        self._values = dict(values)
        self._what = what

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def text(self, name: str, default: str | None = None) -> str:
        """At most `TEXT_MAX` characters."""
        value = self._take(name, default)
        if type(value) is not str or len(value) > TEXT_MAX:
            self.bad(name, "it is a short text")
        return value

    def integer(
        self, name: str, default: int | None = None, *, low: int = 0, high: int = INTEGER_MAX
    ) -> int:
        value = self._take(name, default)
        if type(value) is not int or not low <= value <= high:
            self.bad(name, f"it is a whole number from {low} to {high}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._take(name, default)
        if type(value) is not bool:
            self.bad(name, "it is true or false")
        return value

    def number(self, name: str) -> float:
        value = self._take(name, None)
        if (type(value) is not float and type(value) is not int) or not math.isfinite(value):
            self.bad(name, "it is a finite number")
        return float(value)

    def octets(self, name: str, *lengths: int) -> bytes:
        """Bytes, of one of these lengths if any are given."""
        value = self._take(name, None)
        if type(value) is not bytes:
            self.bad(name, "it is bytes")
        if lengths and len(value) not in lengths:
            self.bad(name, f"it has {' or '.join(map(str, lengths))} bytes")
        return value

    def maps(self, name: str, most: int) -> "list[Fields]":
        values = self._take(name, None)
        if type(values) is not list or len(values) > most:
            self.bad(name, f"it is at most {most} maps")
        what = f"{self._what}, {name}"
        return [
            Fields(each, what) if type(each) is dict else self.bad(name, "it holds maps")
            for each in values
        ]

    def texts(self, name: str) -> list[str]:
        values = self._take(name, None)
        if type(values) is not list:
            self.bad(name, "it is texts")
        return [value if type(value) is str else self.bad(name, "it is texts") for value in values]

    def end(self) -> None:
        """Raise UsageError if fields remain."""
        for name in self._values:
            raise UsageError(f"{self._what}: unknown field {name[:64]!r}")

    def _take(self, name: str, default: Value) -> Value:
        if name not in self._values:
            if default is None:
                raise UsageError(f"{self._what}: no field {name!r}")
            return default
        return self._values.pop(name)

    def bad(self, name: str, rule: str) -> NoReturn:
        """Raise UsageError: the field breaks `rule`."""
        raise UsageError(f"{self._what}: bad {name!r}: {rule}")


def error_message(error: DieselError) -> Message:
    """Names the class of `errors.py` that the error's class extends: the receiver knows it."""
    kind = next(each for each in type(error).__mro__ if each.__module__ == DieselError.__module__)
    return {"error": kind.__name__, "message": error.message, "advice": error.advice}


def parse_error(answer: Message) -> DieselError | None:
    """The text of the error is cut and stripped of control characters, since programs print it on
    terminals."""
    if "error" not in answer:
        return None
    name, message, advice = (
        shown(str(answer.get(key, ""))[:TEXT_MAX].encode("utf-8", "replace"))
        for key in ("error", "message", "advice")
    )
    return error_by_class_name(name, message, advice)
