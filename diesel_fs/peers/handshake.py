"""The handshake between two masters, at both ends: TLS, greeting, hello and proofs (`PEERS.md`,
section 3).

`connect` is the connecting end, `accept_tls` and `authenticate` are the accepting end. Each end
proves that it knows the task's secret, a key that all masters of the task have. A process without
it learns only that its proof was wrong, and nothing but its hello is read before. The bytes are in
`wire.py`; `peer.py` decides when to connect, `acceptor.py` limits how many may try.
"""

import os
import socket
from dataclasses import dataclass, field
from uuid import UUID

import trio

from ..errors import (
    CorruptError,
    DieselError,
    ForeignError,
    MetadataError,
    PermissionDenied,
    UsageError,
)
from ..net import frames
from ..net.channel import Channel, ConnectionClosed, TlsChannel
from ..net.frames import GREETING_BYTES, NO_BINDING, NONCE_BYTES
from ..net.messages import Message, error_message, parse_error
from ..net.tls import Certificate, certificate_digest, client_context
from . import wire
from .membership import Member, TaskName, split_address
from .wire import Hello, Proofs, Sizes

HELLO_S = 5.0
"""The time limit of the whole handshake, at both ends."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalIdentity:
    """What this master shows of itself to other masters."""

    rank: int
    instance: bytes
    task: TaskName
    version: int
    secret: bytes = field(repr=False)
    sizes: Sizes = field(repr=False)
    """Bytes of each chunk of this version."""

    certificate: Certificate | None = None
    """With a certificate, the master speaks TLS on connections in both directions."""

    @property
    def identity(self) -> UUID:
        """The identity of the dataset."""
        return self.task.identity


class HandshakeRejected(Exception):
    """A connector is not let in. `why` is for the log; `reply` is sent to the connector, and may be
    empty."""

    def __init__(self, why: str, reply: bytes = b"") -> None:
        super().__init__(why)
        self.why = why
        self.reply = reply


# the connector ------------------------------------------------------------------------------------


async def connect(me: LocalIdentity, member: Member) -> Channel:
    """Connect to a member; both ends have proved that they know the secret when this returns.
    Raises DieselError, whose text says what went wrong."""
    channel: Channel | None = None
    is_ready = False
    try:
        with trio.fail_after(HELLO_S):
            channel = await _open_channel(me, member)
            await _prove(channel, me, member)
            is_ready = True
            return channel
    except trio.TooSlowError:
        raise MetadataError("the other master does not answer") from None
    except ConnectionClosed as error:
        raise MetadataError(str(error) or "the other master closed the connection") from error
    except OSError as error:
        raise MetadataError(_why(error)) from error
    finally:
        if channel is not None and not is_ready:
            channel.close()


async def _open_channel(me: LocalIdentity, member: Member) -> Channel:
    """A connection; with TLS where either end has a certificate."""
    stream = await trio.open_tcp_stream(*split_address(member.address))
    plain = socket.socket(fileno=stream.socket.detach())
    if me.certificate is None and not member.certificate:
        return Channel(plain)
    channel = TlsChannel(plain, client_context(), accepted=False)
    try:
        await channel.do_handshake()
        if (
            member.certificate
            and certificate_digest(channel.peer_certificate) != member.certificate
        ):
            raise PermissionDenied("the other master's certificate is not the registered one")
    except BaseException:
        channel.close()
        raise
    return channel


async def _prove(channel: Channel, me: LocalIdentity, member: Member) -> None:
    """The connector's part of greeting, hello and proofs."""
    first = wire.greeting()
    channel.send_now([first], len(first))
    goes_on, version, length = wire.parse_welcome(await channel.receive_exactly(GREETING_BYTES))
    tail = bytes(await channel.receive_exactly(length))
    if not goes_on:
        raise wire.refusal_error(version, tail)
    binding = NO_BINDING
    if isinstance(channel, TlsChannel):
        binding = certificate_digest(channel.peer_certificate)
    ours = Hello(
        me.rank, me.instance, member.rank, me.identity, me.version, os.urandom(NONCE_BYTES)
    )
    proofs = Proofs(me.secret, tail, binding, me.task.digest, ours)
    message = wire.hello_frame(ours, proofs.connector)
    channel.send_now([message], len(message))
    answer = await _message(channel)
    error = parse_error(answer)
    if error is not None:
        raise error
    if not wire.proofs_equal(wire.parse_proof(answer), proofs.acceptor):
        raise PermissionDenied("the other master does not know the task's secret")


def _why(error: OSError) -> str:
    """What connecting failed with. trio tries all addresses of a host, and raises one error, whose
    cause has those of all addresses."""
    cause = error.__cause__
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    first = cause if isinstance(cause, OSError) else error
    return first.strerror or str(first) or type(first).__name__


# the acceptor -------------------------------------------------------------------------------------


async def accept_tls(channel: Channel) -> None:
    """The TLS handshake, where the channel uses TLS. Raises HandshakeRejected."""
    if isinstance(channel, TlsChannel):
        try:
            await channel.do_handshake()
        except ConnectionClosed as error:
            raise HandshakeRejected(str(error)) from error


async def authenticate(channel: Channel, me: LocalIdentity) -> int:
    """The rank of the connected master, once it has proved that it knows the secret. Raises
    HandshakeRejected."""
    nonce = os.urandom(NONCE_BYTES)
    try:
        await _greet(channel, nonce)
        theirs, proof = wire.parse_hello(await _head(channel))
    except (CorruptError, UsageError) as error:
        raise _rejection(PermissionDenied("no hello"), error.message) from error
    except ConnectionClosed as error:
        raise HandshakeRejected(str(error)) from error
    binding = NO_BINDING if me.certificate is None else me.certificate.digest
    proofs = Proofs(me.secret, nonce, binding, me.task.digest, theirs)
    if not wire.proofs_equal(proof, proofs.connector):
        raise _rejection(PermissionDenied("the wrong secret"))
    if theirs.identity != me.identity:
        raise _rejection(UsageError("another dataset"))
    if theirs.version != me.version:
        raise _rejection(
            UsageError(f"version {me.version} of the dataset is here, not {theirs.version}")
        )
    if theirs.to != me.rank:
        raise _rejection(UsageError(f"rank {me.rank} is here, not {theirs.to}"))
    answer = wire.proof_frame(proofs.acceptor)
    channel.send_now([answer], len(answer))
    return theirs.rank


async def _greet(channel: Channel, nonce: bytes) -> None:
    """The acceptor's part of the greeting."""
    try:
        version = wire.parse_greeting(await channel.receive_exactly(GREETING_BYTES))
    except ForeignError as error:
        raise HandshakeRejected(error.message) from error
    if version != wire.VERSION:
        sentence = wire.version_mismatch(version)
        raise HandshakeRejected(sentence, wire.refusal(sentence))
    message = wire.welcome(nonce)
    channel.send_now([message], len(message))


def _rejection(error: DieselError, why: str = "") -> HandshakeRejected:
    """A rejection: the connector receives the error; the log also has `why`."""
    message = frames.frame(error_message(error), wire.HELLO_LIMITS)
    return HandshakeRejected(f"{error.message}: {why}" if why else error.message, message)


# frames of both -----------------------------------------------------------------------------------


async def _head(channel: Channel) -> bytearray:
    lengths = frames.parse_lengths(
        await channel.receive_exactly(frames.LENGTHS_BYTES), wire.HELLO_LIMITS
    )
    return await channel.receive_exactly(lengths.head)


async def _message(channel: Channel) -> Message:
    return frames.parse_head(await _head(channel), wire.HELLO_LIMITS)
