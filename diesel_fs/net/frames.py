"""Encodes and decodes the bytes between clients and servers, with all their limits (`WIRE.md`).

A frame is two lengths, a *head* (a message in msgpack) and a *payload* (raw bytes). The masters of
a task greet each other in the same form, with other names: both use `GreetingCodec`.
For any bytes, a parser returns a value or raises one error.
"""

import struct
from dataclasses import dataclass
from typing import NamedTuple

import msgpack

from ..errors import CorruptError, ForeignError, MetadataError, UsageError
from ..names import shown
from .messages import Message, unpack

VERSION = 1

GREETING_BYTES = 16
NONCE_BYTES = 32
REFUSAL_BYTES_MAX = 4096

BINDING_BYTES = 32
NO_BINDING = bytes(BINDING_BYTES)
"""The binding (see `login_challenge`) of a login without TLS."""

USER_BYTES_MAX = 64

_GREETING = struct.Struct("<8sH6s")
_WELCOME = struct.Struct("<8sHHI")
_ACCEPTED, _REFUSED = 0, 1
_TLS_RECORDS = (b"\x16\x03", b"\x15\x03")  # a handshake, an alert
_HTTP = (b"GET ", b"HEAD", b"POST", b"PUT ", b"OPTI", b"PRI ", b"HTTP")
_LENGTHS = struct.Struct("<II")  # of head and payload
LENGTHS_BYTES = _LENGTHS.size
_LOGIN = b"diesel-fs login 1\0"  # the prefix of signed bytes; no other signature has it


# greeting -----------------------------------------------------------------------------------------


class Welcome(NamedTuple):
    """A tail of `tail_bytes` follows: a nonce if the greeting was accepted, else the reason in a
    sentence."""

    is_accepted: bool
    version: int
    tail_bytes: int


@dataclass(frozen=True, slots=True)
class GreetingCodec:
    """The greetings of one protocol. `connector` and `acceptor` name its two ends in errors."""

    magic: bytes
    version: int
    connector: str
    acceptor: str

    def greeting(self) -> bytes:
        return _GREETING.pack(self.magic, self.version, bytes(6))

    def parse_greeting(self, content: bytes | bytearray) -> int:
        """The connector's version. Raises ForeignError for any other bytes."""
        if len(content) == GREETING_BYTES:
            magic, version, zeros = _GREETING.unpack(content)
            if magic == self.magic and zeros == bytes(6):
                return int(version)
        raise _foreign(self.connector, content)

    def welcome(self, nonce: bytes) -> bytes:
        """The connector signs the random `nonce`, so that no recorded login can be sent again."""
        assert len(nonce) == NONCE_BYTES
        return _WELCOME.pack(self.magic, self.version, _ACCEPTED, NONCE_BYTES) + nonce

    def refusal(self, sentence: str) -> bytes:
        tail = sentence.encode()[:REFUSAL_BYTES_MAX]
        return _WELCOME.pack(self.magic, self.version, _REFUSED, len(tail)) + tail

    def parse_welcome(self, content: bytes | bytearray) -> Welcome:
        """Raises ForeignError for any other bytes."""
        if len(content) != GREETING_BYTES:
            raise _foreign(self.acceptor, content)
        magic, version, outcome, length = _WELCOME.unpack(content)
        if (
            magic != self.magic
            or outcome not in (_ACCEPTED, _REFUSED)
            or length > REFUSAL_BYTES_MAX
        ):
            raise _foreign(self.acceptor, content)
        if outcome == _ACCEPTED and version != self.version:
            raise ForeignError(
                f"the {self.acceptor} accepted version {self.version} of the wire, but speaks"
                f" version {version}"
            )
        if outcome == _ACCEPTED and length != NONCE_BYTES:
            raise ForeignError(f"the {self.acceptor} sent a nonce of {length} bytes")
        return Welcome(outcome == _ACCEPTED, version, length)

    def refusal_error(self, version: int, tail: bytes | bytearray) -> MetadataError:
        """A MetadataError, as for any server that cannot be used, so that callers try another."""
        reason = f"it speaks version {version} of the wire"
        if version == self.version:
            reason = "it gave no reason"
        return MetadataError(f"the {self.acceptor} refused: {shown(bytes(tail)) or reason}")


def _foreign(end: str, content: bytes | bytearray) -> ForeignError:
    hint = ""
    if content[:2] in _TLS_RECORDS:
        hint = ", it speaks TLS"
    elif content[:4] in _HTTP:
        hint = ", it speaks HTTP"
    return ForeignError(f"not a DIESEL-FS {end}: it sent no greeting{hint}")


_GREETINGS = GreetingCodec(b"\x93DIESNET", VERSION, "client", "server")

greeting, parse_greeting = _GREETINGS.greeting, _GREETINGS.parse_greeting
welcome, parse_welcome = _GREETINGS.welcome, _GREETINGS.parse_welcome
refusal, refusal_error = _GREETINGS.refusal, _GREETINGS.refusal_error


def version_mismatch(version: int) -> str:
    which = "an older" if version > VERSION else "a newer"
    return f"it speaks version {VERSION} of the wire, the client {version}: use {which} client"


def login_challenge(nonce: bytes, binding: bytes, user: str) -> bytes:
    """The bytes that a client signs to log in. `binding` is the SHA-256 of the server's certificate
    as this end sees it, or `NO_BINDING`, so that a signature is useless on another connection.
    Raises UsageError for an impossible user."""
    name = user.encode()
    if not 0 < len(name) <= USER_BYTES_MAX:
        raise UsageError(f"a user's name has 1 to {USER_BYTES_MAX} bytes")
    assert (len(nonce), len(binding)) == (NONCE_BYTES, BINDING_BYTES)
    return _LOGIN + nonce + binding + name


# frames -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """The largest frame allowed; `items` are those in the message."""

    head_bytes: int
    items: int
    payload_bytes: int


BEFORE_LOGIN_LIMITS = FrameLimits(4 << 10, 64, 0)
REQUEST_LIMITS = FrameLimits(8 << 20, 1 << 10, (1 << 30) + (64 << 20))
READ_BYTES_MAX = REQUEST_LIMITS.payload_bytes
"""The most bytes of one read: the largest range is a whole chunk."""

ANSWER_LIMITS = FrameLimits(64 << 20, 1 << 22, (1 << 32) - 1)


class Lengths(NamedTuple):
    head: int
    payload: int


def frame(message: Message, limits: FrameLimits, payload_bytes: int = 0) -> bytes:
    """The lengths and the head; the caller sends the payload after them. Raises UsageError beyond
    the limits."""
    head: bytes = msgpack.packb(message)
    _check(Lengths(len(head), payload_bytes), limits)
    return _LENGTHS.pack(len(head), payload_bytes) + head


def parse_lengths(content: bytes | bytearray, limits: FrameLimits) -> Lengths:
    """Raises CorruptError beyond the limits."""
    lengths = Lengths(*_LENGTHS.unpack(content))
    try:
        _check(lengths, limits)
    except UsageError as error:
        raise CorruptError(error.message) from None
    return lengths


def parse_head(content: bytes | bytearray | memoryview, limits: FrameLimits) -> Message:
    """Raises CorruptError."""
    return unpack(content, limits.items)


def check_required_fields(message: Message) -> None:
    """Raise UsageError if the name of a field ends in `!`: receivers must understand such fields,
    and this version knows none."""
    for name in message:
        if name.endswith("!"):
            raise UsageError(
                f"this version does not know the field {name[:64]!r}", advice="update diesel-fs"
            )


def _check(lengths: Lengths, limits: FrameLimits) -> None:
    if not 0 < lengths.head <= limits.head_bytes:
        raise UsageError(f"a message of {lengths.head} bytes (at most {limits.head_bytes})")
    if lengths.payload > limits.payload_bytes:
        raise UsageError(f"a payload of {lengths.payload} bytes (at most {limits.payload_bytes})")
