"""How masters greet each other, as bytes: `PEERS.md`, section 3.

Owned here: hello, what its proofs cover, and the limits on them. Not owned: in which order all is
said and who is refused why (`handshake.py`). Greetings are as `../greeting.py` says, frames as
`../wire.py`. Any bytes give a value or one error. Pure.
"""

import hmac
from dataclasses import dataclass
from uuid import UUID

import msgpack

from ..format.entries import Bytes
from ..net.frames import BINDING_BYTES, GreetingCodec, Limits, frame, parse_head
from ..net.frames import GREETING_BYTES as GREETING_BYTES
from ..net.frames import NO_BINDING as NO_BINDING
from ..net.frames import NONCE_BYTES as NONCE_BYTES
from ..net.messages import Fields, Message
from .membership import INSTANCE_BYTES
from .wire import RANK_MAX

VERSION = 1

PROOF_BYTES = 32

HELLO_LIMITS = Limits(4 << 10, 64, 0)
"""All that is read of whoever has not shown that it knows the secret."""

_GREETINGS = GreetingCodec(b"\x93DIESPER", VERSION, "master", "master")


# greeting -----------------------------------------------------------------------------------------


greeting, parse_greeting = _GREETINGS.greeting, _GREETINGS.parse_greeting
welcome, parse_welcome = _GREETINGS.welcome, _GREETINGS.parse_welcome
refusal, refused = _GREETINGS.refusal, _GREETINGS.refusal_error


def version_mismatch(version: int) -> str:
    """What to tell a connector of another version."""
    return f"I speak version {VERSION} of the peers' wire, you {version}: run the same diesel-fs"


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

    def to_message(self) -> Message:
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
        packed: bytes = msgpack.packb(hello.to_message())
        covered = acceptor_nonce + hello.nonce + binding + task + packed
        self.connector = _proof(secret, b"connector", covered)
        self.acceptor = _proof(secret, b"acceptor", covered)

    def __repr__(self) -> str:
        return "Proofs(***)"


def _proof(secret: bytes, end: bytes, covered: bytes) -> bytes:
    return hmac.digest(secret, b"diesel-fs peer 1 " + end + b"\0" + covered, "sha256")


def proofs_equal(proof: bytes, other: bytes) -> bool:
    """Whether two proofs are the same, in a time that does not tell where they differ."""
    return hmac.compare_digest(proof, other)


def hello_frame(hello: Hello, proof: bytes) -> bytes:
    """A hello with its proof."""
    return frame({**hello.to_message(), "proof": proof}, HELLO_LIMITS)


def parse_hello(head: Bytes) -> tuple[Hello, bytes]:
    """A hello and its proof, not yet looked at. Raises CorruptError, UsageError."""
    fields = Fields(parse_head(head, HELLO_LIMITS), "hello")
    hello = Hello(
        rank=fields.integer("rank", high=RANK_MAX),
        instance=_octets(fields, "instance", INSTANCE_BYTES),
        to=fields.integer("to", high=RANK_MAX),
        identity=UUID(bytes=_octets(fields, "identity", 16)),
        version=fields.integer("version"),
        nonce=_octets(fields, "nonce", NONCE_BYTES),
    )
    proof = _octets(fields, "proof", PROOF_BYTES)
    fields.end()
    return hello, proof


def proof_frame(proof: bytes) -> bytes:
    """The answer to a hello that is taken."""
    return frame({"proof": proof}, HELLO_LIMITS)


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
