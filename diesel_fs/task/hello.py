"""How masters greet each other, as bytes: `PEERS.md`, section 3.

Owned here: greeting, hello, what its proofs cover, and the limits on them. Not owned: in which
order they are said and who is refused why (`handshake.py`). Frames are those of `../wire.py`. Any
bytes give a value or one error. Pure.
"""

import hmac
import struct
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

import msgpack

from ..errors import ForeignError, MetadataError
from ..messages import Fields, Message
from ..names import shown
from ..wire import Limits, frame, parse_head
from .wire import RANK_MAX, Raw

VERSION = 1

GREETING_BYTES = 16
NONCE_BYTES = 32
PROOF_BYTES = 32
INSTANCE_BYTES = 16
BINDING_BYTES = 32
NO_BINDING = bytes(BINDING_BYTES)
TAIL_BYTES_MAX = 4096

HELLO = Limits(4 << 10, 64, 0)
"""All that is read of whoever has not shown that it knows the secret."""

_MAGIC = b"\x93DIESPER"
_GREETING = struct.Struct("<8sH6s")
_WELCOME = struct.Struct("<8sHHI")
_GO_ON, _REFUSED = 0, 1


# greeting -----------------------------------------------------------------------------------------


def greeting() -> bytes:
    """What a connector sends first."""
    return _GREETING.pack(_MAGIC, VERSION, bytes(6))


def parse_greeting(content: Raw) -> int:
    """The version that a connector speaks. Raises ForeignError for what is no greeting."""
    if len(content) != GREETING_BYTES:
        raise ForeignError("no greeting")
    magic, version, zeros = _GREETING.unpack(content)
    if magic != _MAGIC or zeros != bytes(6):
        raise ForeignError(f"no greeting{_language(content)}")
    return int(version)


def welcome(nonce: bytes) -> bytes:
    """The answer to a greeting that is taken."""
    assert len(nonce) == NONCE_BYTES
    return _WELCOME.pack(_MAGIC, VERSION, _GO_ON, NONCE_BYTES) + nonce


def refusal(sentence: str) -> bytes:
    """The answer to a greeting that is not taken."""
    tail = sentence.encode()[:TAIL_BYTES_MAX]
    return _WELCOME.pack(_MAGIC, VERSION, _REFUSED, len(tail)) + tail


def other_version(version: int) -> str:
    """What to tell a connector of another version."""
    return f"I speak version {VERSION} of the peers' wire, you {version}: run the same diesel-fs"


class Welcome(NamedTuple):
    """What an acceptor says to a greeting, and how many bytes of tail follow."""

    goes_on: bool
    version: int
    tail_bytes: int


def parse_welcome(content: Raw) -> Welcome:
    """An acceptor's first words. Raises ForeignError for what is no master."""
    if len(content) != GREETING_BYTES:
        raise ForeignError("it sent no greeting")
    magic, version, outcome, length = _WELCOME.unpack(content)
    if magic != _MAGIC or outcome not in (_GO_ON, _REFUSED) or length > TAIL_BYTES_MAX:
        raise ForeignError(f"it sent no greeting{_language(content)}")
    if outcome == _GO_ON and (version != VERSION or length != NONCE_BYTES):
        raise ForeignError(f"it takes version {VERSION} of the wire and speaks {version}")
    return Welcome(outcome == _GO_ON, version, length)


def refused(tail: Raw) -> MetadataError:
    """The error that a refusal is."""
    return MetadataError(f"it refused: {shown(bytes(tail)) or 'it gave no reason'}")


def _language(content: Raw) -> str:
    """What somebody speaks who does not speak this, where it shows."""
    start = bytes(content[:5])
    if start[:2] in (b"\x16\x03", b"\x15\x03"):
        return ": it speaks TLS"
    if start in (b"GET /", b"HEAD ", b"POST ", b"PUT /", b"OPTIO", b"HTTP/"):
        return ": it speaks HTTP"
    return ""


# hello --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """Who wants to speak to whom about what. `nonce` is the connector's."""

    rank: int
    instance: bytes
    to: int
    identity: UUID
    version: int
    nonce: bytes

    def message(self) -> Message:
        """As it travels, and as proofs cover it: always in this order."""
        return {
            "rank": self.rank,
            "instance": self.instance,
            "to": self.to,
            "identity": self.identity.bytes,
            "version": self.version,
            "nonce": self.nonce,
        }


class Proofs:
    """What both ends of a connection prove their knowledge of the secret with."""

    def __init__(
        self, secret: bytes, acceptor_nonce: bytes, binding: bytes, task: bytes, hello: Hello
    ) -> None:
        """`binding` is SHA-256 of the acceptor's certificate, or `NO_BINDING`; `task` of its
        name."""
        assert (len(acceptor_nonce), len(binding)) == (NONCE_BYTES, BINDING_BYTES)
        packed: bytes = msgpack.packb(hello.message())
        covered = acceptor_nonce + hello.nonce + binding + task + packed
        self.connector = _proof(secret, b"connector", covered)
        self.acceptor = _proof(secret, b"acceptor", covered)

    def __repr__(self) -> str:
        return "Proofs(***)"


def _proof(secret: bytes, end: bytes, covered: bytes) -> bytes:
    return hmac.digest(secret, b"diesel-fs peer 1 " + end + b"\0" + covered, "sha256")


def is_same(proof: bytes, other: bytes) -> bool:
    """Whether two proofs are the same, in a time that does not tell where they differ."""
    return hmac.compare_digest(proof, other)


def hello_frame(hello: Hello, proof: bytes) -> bytes:
    """A hello with its proof."""
    return frame({**hello.message(), "proof": proof}, HELLO)


def parse_hello(head: Raw) -> tuple[Hello, bytes]:
    """A hello and its proof, not yet looked at. Raises CorruptError, UsageError."""
    fields = Fields(parse_head(head, HELLO), "hello")
    hello = Hello(
        rank=fields.whole("rank", high=RANK_MAX),
        instance=_octets(fields, "instance", INSTANCE_BYTES),
        to=fields.whole("to", high=RANK_MAX),
        identity=UUID(bytes=_octets(fields, "identity", 16)),
        version=fields.whole("version"),
        nonce=_octets(fields, "nonce", NONCE_BYTES),
    )
    proof = _octets(fields, "proof", PROOF_BYTES)
    fields.end()
    return hello, proof


def proof_frame(proof: bytes) -> bytes:
    """The answer to a hello that is taken."""
    return frame({"proof": proof}, HELLO)


def parse_proof(message: Message) -> bytes:
    """The proof in an answer that is no error. Raises UsageError."""
    fields = Fields(message, "answer to hello")
    proof = _octets(fields, "proof", PROOF_BYTES)
    fields.end()
    return proof


def _octets(fields: Fields, name: str, size: int) -> bytes:
    value = fields.octets(name)
    if len(value) != size:
        fields.bad(name, f"it has {size} bytes")
    return value
