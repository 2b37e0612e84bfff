"""How two masters come to trust a connection: TLS, greeting, hello and proofs, at both ends.

Owned here: in which order what is said and checked, and who is told what. Not owned: the bytes
(`hello.py`), who is connected to when (`peer.py`), who may knock how often (`acceptor.py`). Whoever
does not know the task's secret learns nothing but that, and has no memory made for it but for a
hello.
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
from ..net import frames as frames
from ..net.channel import Channel, ConnectionClosed, TlsChannel
from ..net.messages import Message, error_message, parse_error
from ..net.tls import Certificate, certificate_digest, client_context
from . import hello
from .hello import Hello, Proofs
from .membership import Member, TaskName, split_address
from .wire import Sizes

HELLO_S = 5.0
"""For all of it, at both ends."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalIdentity:
    """A master, as it shows itself to others."""

    rank: int
    instance: bytes
    task: TaskName
    version: int
    secret: bytes = field(repr=False)
    sizes: Sizes = field(repr=False)
    """Bytes of each chunk of this version."""

    certificate: Certificate | None = None
    """With one it speaks TLS, as acceptor and as connector."""

    @property
    def identity(self) -> UUID:
        """Of the dataset."""
        return self.task.identity


class HandshakeRejected(Exception):
    """Somebody is not let in. `reply` is what it is told, which may be nothing."""

    def __init__(self, why: str, channel: Channel, reply: bytes = b"") -> None:
        super().__init__(why)
        self.why = why
        self.channel = channel
        self.reply = reply


# the connector ------------------------------------------------------------------------------------


async def connect(me: LocalIdentity, member: Member) -> Channel:
    """A connection to a member on which both have proved themselves. Raises DieselError, whose
    words say what went wrong."""
    channel: Channel | None = None
    is_whole = False
    try:
        with trio.fail_after(HELLO_S):
            host, port = split_address(member.address)
            channel = await _opened(host, port, me, member)
            await _introduced(channel, me, member)
            is_whole = True
            return channel
    except trio.TooSlowError:
        raise MetadataError("it does not answer") from None
    except ConnectionClosed as error:
        raise MetadataError(str(error) or "it closed the connection") from error
    except OSError as error:
        raise MetadataError(_why(error)) from error
    finally:
        if channel is not None and not is_whole:
            channel.close()


async def _opened(host: str, port: int, me: LocalIdentity, member: Member) -> Channel:
    stream = await trio.open_tcp_stream(host, port)
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
            raise PermissionDenied("its certificate is not the one that is registered")
    except BaseException:
        channel.close()
        raise
    return channel


async def _introduced(channel: Channel, me: LocalIdentity, member: Member) -> None:
    first = hello.greeting()
    channel.send_now([first], len(first))
    goes_on, version, length = hello.parse_welcome(
        await channel.receive_exactly(hello.GREETING_BYTES)
    )
    tail = bytes(await channel.receive_exactly(length))
    if not goes_on:
        raise hello.refused(version, tail)
    binding = hello.NO_BINDING
    if isinstance(channel, TlsChannel):
        binding = certificate_digest(channel.peer_certificate)
    ours = Hello(
        me.rank, me.instance, member.rank, me.identity, me.version, os.urandom(hello.NONCE_BYTES)
    )
    proofs = Proofs(me.secret, tail, binding, me.task.digest, ours)
    said = hello.hello_frame(ours, proofs.connector)
    channel.send_now([said], len(said))
    answer = await _message(channel)
    error = parse_error(answer)
    if error is not None:
        raise error
    if not hello.proofs_equal(hello.parse_proof(answer), proofs.acceptor):
        raise PermissionDenied("it does not know the task's secret")


def _why(error: OSError) -> str:
    """What connecting failed with; trio tries all addresses of a host, and tells of all."""
    cause = error.__cause__
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    found = cause if isinstance(cause, OSError) else error
    return found.strerror or str(found) or type(found).__name__


# the acceptor -------------------------------------------------------------------------------------


async def accept_tls(channel: Channel) -> None:
    """TLS, where the channel is of TLS. Raises Refused."""
    if isinstance(channel, TlsChannel):
        try:
            await channel.do_handshake()
        except ConnectionClosed as error:
            raise HandshakeRejected(str(error), channel) from error


async def authenticate(channel: Channel, me: LocalIdentity) -> int:
    """The rank of who has connected and shown that it may. Raises Refused; Gone, where it left
    without a word."""
    nonce = os.urandom(hello.NONCE_BYTES)
    try:
        await _greeted(channel, nonce)
        try:
            theirs, proof = hello.parse_hello(await _head(channel))
        except (CorruptError, UsageError) as error:
            raise _rejection(PermissionDenied("no hello"), channel, error.message) from error
    except ConnectionClosed as error:
        raise HandshakeRejected(str(error), channel) from error
    binding = hello.NO_BINDING if me.certificate is None else me.certificate.digest
    proofs = Proofs(me.secret, nonce, binding, me.task.digest, theirs)
    if not hello.proofs_equal(proof, proofs.connector):
        raise _rejection(PermissionDenied("the wrong secret"), channel)
    if theirs.identity != me.identity:
        raise _rejection(UsageError("another dataset"), channel)
    if theirs.version != me.version:
        raise _rejection(
            UsageError(f"version {me.version} of the dataset is here, not {theirs.version}"),
            channel,
        )
    if theirs.to != me.rank:
        raise _rejection(UsageError(f"rank {me.rank} is here, not {theirs.to}"), channel)
    answer = hello.proof_frame(proofs.acceptor)
    channel.send_now([answer], len(answer))
    return theirs.rank


async def _greeted(channel: Channel, nonce: bytes) -> None:
    try:
        first = await channel.receive_exactly(hello.GREETING_BYTES)
        version = hello.parse_greeting(first)
    except ForeignError as error:
        raise HandshakeRejected(error.message, channel) from error
    if version != hello.VERSION:
        sentence = hello.version_mismatch(version)
        raise HandshakeRejected(sentence, channel, hello.refusal(sentence))
    said = hello.welcome(nonce)
    channel.send_now([said], len(said))


def _rejection(error: DieselError, channel: Channel, why: str = "") -> HandshakeRejected:
    """A refusal of which the other end hears the error, and the log `why`."""
    said = frames.frame(error_message(error), hello.HELLO_LIMITS)
    return HandshakeRejected(f"{error.message}: {why}" if why else error.message, channel, said)


# frames of both -----------------------------------------------------------------------------------


async def _head(channel: Channel) -> bytearray:
    lengths = frames.parse_lengths(
        await channel.receive_exactly(frames.LENGTHS_BYTES), hello.HELLO_LIMITS
    )
    return await channel.receive_exactly(lengths.head)


async def _message(channel: Channel) -> Message:
    return frames.parse_head(await _head(channel), hello.HELLO_LIMITS)
