"""What Redis answers, taken for nothing until it has been looked at.

Owned here: the shapes of replies; everything that has another one is a CorruptError, whatever it
is. Not owned: what values mean (`keys.py`, `head.py`, `rows.py`). Pure.
"""

from uuid import UUID

from diesel_fs.errors import CorruptError

NUMBER_MAX = 1 << 63


def corrupt_store_error(what: str) -> CorruptError:
    """The error for something that the store should not have."""
    return CorruptError(f"the metadata store has {what}", advice="run `dlcmd recover`")


def number(reply: object) -> int:
    """A number, or 0 for nothing."""
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
    """A number that is there, and not negative."""
    found = number(reply)
    if reply is None or found < 0:
        raise corrupt_store_error("something else where a count should be")
    return found


def packed_dict(reply: object) -> dict[bytes, bytes]:
    """Fields and values."""
    if isinstance(reply, dict):
        return reply
    values = [octets(each) for each in listed(reply)]
    if len(values) % 2:
        raise corrupt_store_error("a field without a value")
    return dict(zip(values[::2], values[1::2], strict=True))


def octets(reply: object, length: int | None = None) -> bytes:
    """Bytes, so many if that is said."""
    if isinstance(reply, bytes) and (length is None or len(reply) == length):
        return reply
    raise corrupt_store_error("something else where bytes should be")


def listed(reply: object) -> list[object]:
    """A list."""
    if isinstance(reply, list):
        return reply
    raise corrupt_store_error("something else where a list should be")


def pair(reply: object) -> tuple[object, object]:
    """Two things."""
    if isinstance(reply, list | tuple) and len(reply) == 2:
        return reply[0], reply[1]
    raise corrupt_store_error("something else where a pair should be")


def identity_of(reply: object) -> UUID:
    """The identity of a dataset."""
    return UUID(bytes=octets(reply, 16))
