"""The first words on a connection, as bytes: `WIRE.md` section 1, `task/PEERS.md` section 3.

Owned here: greeting, welcome and refusal, and what is said of whoever says something else. Not
owned: versions, and what to do about another one (`wire.py`, `peers/hello.py`); sockets and time.
Any bytes give a value or one error. Pure.
"""

import struct
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import ForeignError, MetadataError
from ..names import shown

GREETING_BYTES = 16
NONCE_BYTES = 32
TAIL_BYTES_MAX = 4096

_GREETING = struct.Struct("<8sH6s")
_WELCOME = struct.Struct("<8sHHI")
_ACCEPTED, _REFUSED = 0, 1
_HTTP = (b"GET ", b"HEAD", b"POST", b"PUT ", b"OPTI", b"PRI ", b"HTTP")


class Welcome(NamedTuple):
    """What an acceptor says to a greeting, and how many bytes of tail follow."""

    is_accepted: bool
    version: int
    tail_bytes: int


@dataclass(frozen=True, slots=True)
class GreetingCodec:
    """Those of one wire; `connector` and `acceptor` are what its two ends are called."""

    magic: bytes
    version: int
    connector: str
    acceptor: str

    def greeting(self) -> bytes:
        """What a connector sends first."""
        return _GREETING.pack(self.magic, self.version, bytes(6))

    def parse_greeting(self, content: bytes | bytearray) -> int:
        """The version that a connector speaks. Raises ForeignError for what is no greeting."""
        if len(content) == GREETING_BYTES:
            magic, version, zeros = _GREETING.unpack(content)
            if magic == self.magic and zeros == bytes(6):
                return int(version)
        raise _foreign(self.connector, content)

    def welcome(self, nonce: bytes) -> bytes:
        """The answer to a greeting that is taken."""
        assert len(nonce) == NONCE_BYTES
        return _WELCOME.pack(self.magic, self.version, _ACCEPTED, NONCE_BYTES) + nonce

    def refusal(self, sentence: str) -> bytes:
        """The answer to a greeting that is not taken."""
        tail = sentence.encode()[:TAIL_BYTES_MAX]
        return _WELCOME.pack(self.magic, self.version, _REFUSED, len(tail)) + tail

    def parse_welcome(self, content: bytes | bytearray) -> Welcome:
        """An acceptor's first words. Raises ForeignError for what is none of them."""
        if len(content) != GREETING_BYTES:
            raise _foreign(self.acceptor, content)
        magic, version, outcome, length = _WELCOME.unpack(content)
        if magic != self.magic or outcome not in (_ACCEPTED, _REFUSED) or length > TAIL_BYTES_MAX:
            raise _foreign(self.acceptor, content)
        if outcome == _ACCEPTED and (version != self.version or length != NONCE_BYTES):
            raise ForeignError(
                f"the {self.acceptor} takes version {self.version} and speaks version {version}"
            )
        return Welcome(outcome == _ACCEPTED, version, length)

    def refusal_error(self, version: int, tail: bytes | bytearray) -> MetadataError:
        """The error that a refusal is."""
        reason = f"speaks version {version} of the wire"
        if version == self.version:
            reason = "gave no reason"
        return MetadataError(f"the {self.acceptor} refused: {shown(bytes(tail)) or reason}")


def _foreign(end: str, content: bytes | bytearray) -> ForeignError:
    hint = ""
    if content[:2] in (b"\x16\x03", b"\x15\x03"):
        hint = ", it speaks TLS"
    elif content[:4] in _HTTP:
        hint = ", it speaks HTTP"
    return ForeignError(f"not a DIESEL-FS {end}: it sent no greeting{hint}")
