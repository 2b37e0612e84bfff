"""What clients and servers exchange, as bytes: `WIRE.md`.

Owned here: frames, what a login signs, and every limit. Not owned: how greetings look
(`greeting.py`), sockets and time (`rpc`), which requests there are, who may do what. Any bytes give
a value or one error; nothing is allocated for a length before that is known to be allowed. Pure.
"""

import struct
from dataclasses import dataclass
from typing import NamedTuple

import msgpack

from ..errors import CorruptError, UsageError
from .greeting import GREETING_BYTES as GREETING_BYTES
from .greeting import NONCE_BYTES as NONCE_BYTES
from .greeting import GreetingCodec
from .messages import Message, unpack

VERSION = 1

BINDING_BYTES = 32
NO_BINDING = bytes(BINDING_BYTES)
USER_BYTES_MAX = 64

_GREETINGS = GreetingCodec(b"\x93DIESNET", VERSION, "client", "server")
_LENGTHS = struct.Struct("<II")
LENGTHS_BYTES = _LENGTHS.size
_LOGIN = b"diesel-fs login 1\0"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a frame may be, in bytes and items."""

    head_bytes: int
    items: int
    payload_bytes: int


BEFORE_LOGIN_LIMITS = Limits(4 << 10, 64, 0)
REQUEST_LIMITS = Limits(8 << 20, 1 << 10, (1 << 30) + (64 << 20))
READ_BYTES_MAX = REQUEST_LIMITS.payload_bytes
"""What one request may read: a whole chunk is one range."""

ANSWER_LIMITS = Limits(64 << 20, 1 << 22, (1 << 32) - 1)


# greeting -----------------------------------------------------------------------------------------


greeting, parse_greeting = _GREETINGS.greeting, _GREETINGS.parse_greeting
welcome, parse_welcome = _GREETINGS.welcome, _GREETINGS.parse_welcome
refusal, refusal_error = _GREETINGS.refusal, _GREETINGS.refusal_error


def version_mismatch(version: int) -> str:
    """What to tell a client of another version."""
    which = "an older" if version > VERSION else "a newer"
    return f"it speaks version {VERSION} of the wire, the client {version}: use {which} client"


def login_challenge(nonce: bytes, binding: bytes, user: str) -> bytes:
    """What a login signs; `binding` is SHA-256 of the server's certificate, or `NO_BINDING`.

    Raises UsageError for a name that no user has.
    """
    name = user.encode()
    if not 0 < len(name) <= USER_BYTES_MAX:
        raise UsageError(f"a user's name has 1 to {USER_BYTES_MAX} bytes")
    assert (len(nonce), len(binding)) == (NONCE_BYTES, BINDING_BYTES)
    return _LOGIN + nonce + binding + name


# frames -------------------------------------------------------------------------------------------


class Lengths(NamedTuple):
    """How long the two parts of a frame are, in bytes."""

    head: int
    payload: int


def frame(message: Message, limits: Limits, payload_bytes: int = 0) -> bytes:
    """A frame without its payload, which is sent behind it. Raises UsageError beyond the limits."""
    head: bytes = msgpack.packb(message)
    _check(Lengths(len(head), payload_bytes), limits)
    return _LENGTHS.pack(len(head), payload_bytes) + head


def parse_lengths(content: bytes | bytearray, limits: Limits) -> Lengths:
    """What a frame's first 8 bytes say. Raises CorruptError beyond the limits."""
    lengths = Lengths(*_LENGTHS.unpack(content))
    try:
        _check(lengths, limits)
    except UsageError as error:
        raise CorruptError(error.message) from None
    return lengths


def parse_head(content: bytes | bytearray | memoryview, limits: Limits) -> Message:
    """The message of a frame. Raises CorruptError."""
    return unpack(content, limits.items)


def check_required_fields(message: Message) -> None:
    """Raises UsageError where a message has a field that must be understood and is not."""
    for name in message:
        if name.endswith("!"):
            raise UsageError(
                f"this version does not know the field {name[:64]!r}", advice="update diesel-fs"
            )


def _check(lengths: Lengths, limits: Limits) -> None:
    if not 0 < lengths.head <= limits.head_bytes:
        raise UsageError(f"a message of {lengths.head} bytes (at most {limits.head_bytes})")
    if lengths.payload > limits.payload_bytes:
        raise UsageError(f"{lengths.payload} bytes at once (at most {limits.payload_bytes})")
