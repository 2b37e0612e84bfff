"""Checks the type of Redis's replies, so that damaged or foreign data never crashes a client. Pure.

Each function returns the reply as the type that it names, or raises CorruptError.
"""

from ..store import corrupt_store_error

NUMBER_MAX = 1 << 63


def number(reply: object) -> int:
    """A number of 64 bits, from an integer or decimal digits; 0 for a missing value."""
    if reply is None:
        return 0
    if isinstance(reply, int | bytes):
        try:
            found = int(reply)
        except ValueError:
            found = NUMBER_MAX
        if -NUMBER_MAX < found < NUMBER_MAX:
            return found
    raise corrupt_store_error("something else where a number should be")


def as_count(reply: object) -> int:
    """A number that is neither negative nor missing."""
    found = number(reply)
    if reply is None or found < 0:
        raise corrupt_store_error("something else where a count should be")
    return found


def packed_dict(reply: object) -> dict[bytes, bytes]:
    if isinstance(reply, dict):
        return reply
    values = [octets(each) for each in listed(reply)]
    if len(values) % 2:
        raise corrupt_store_error("a field without a value")
    return dict(zip(values[::2], values[1::2], strict=True))


def octets(reply: object, length: int | None = None) -> bytes:
    if isinstance(reply, bytes) and (length is None or len(reply) == length):
        return reply
    raise corrupt_store_error("something else where bytes should be")


def listed(reply: object) -> list[object]:
    if isinstance(reply, list):
        return reply
    raise corrupt_store_error("something else where a list should be")


def pair(reply: object) -> tuple[object, object]:
    if isinstance(reply, list | tuple) and len(reply) == 2:
        return reply[0], reply[1]
    raise corrupt_store_error("something else where a pair should be")
