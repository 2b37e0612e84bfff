"""Opens a connection to a master, and proves at both ends that the other one belongs to the task
(`PEERS.md`, section 3): TLS, greeting, hello and proofs. The *connector*, a master or a client,
opens the connection; the *acceptor* is the master at the other end.

A process that does not know the task's secret learns only that its proof was wrong; the acceptor
reads only greeting and hello before it checks the proof.
"""

import hmac
import os
import socket
import ssl
from collections.abc import Generator
from contextlib import suppress
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
from ..net.channel import OPTIONS, Channel, ConnectionClosed, TlsChannel
from ..net.frames import GREETING_BYTES, NO_BINDING, NONCE_BYTES
from ..net.messages import error_message, parse_error
from ..net.tls import Certificate, TlsSocket, certificate_digest, client_context
from . import wire
from .members.membership import Member, TaskName, split_address
from .wire import Hello, Proofs, Sizes

HELLO_S = 5.0
"""The time limit of the whole handshake, at both ends; in `connect_blocking`, of each step."""

_SILENT, _CLOSED = "the other master does not answer", "the other master closed the connection"


@dataclass(frozen=True, slots=True, eq=False)
class LocalIdentity:
    """This master, as other masters see it."""

    rank: int
    instance: bytes
    task: TaskName
    version: int
    secret: bytes = field(repr=False)
    sizes: Sizes = field(repr=False)

    certificate: Certificate | None = None
    """If set, connections in both directions use TLS."""

    @property
    def identity(self) -> UUID:
        return self.task.identity

    @property
    def connector(self) -> "Connector":
        return Connector(
            self.rank, self.instance, self.identity, self.version, self.task.digest, self.secret,
            has_tls=self.certificate is not None, is_client=False,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Connector:
    rank: int
    instance: bytes
    identity: UUID
    version: int
    task: bytes  # SHA-256 of its name
    secret: bytes = field(repr=False)
    has_tls: bool
    is_client: bool


class HandshakeRejected(Exception):
    """A connector was refused. `why` is for the log, `reply` (may be empty) for the connector."""

    def __init__(self, why: str, reply: bytes = b"") -> None:
        super().__init__(why)
        self.why = why
        self.reply = reply


# the connector ------------------------------------------------------------------------------------

_Proving = Generator[bytes | int, bytearray, None]
"""The connector's steps: yields bytes to send, or how many bytes to receive; the caller sends these
into the generator."""


async def connect(me: Connector, member: Member) -> Channel:
    """Connect to `member`, and prove the secret at both ends. Raises DieselError."""
    channel: Channel | None = None
    is_ready = False
    try:
        with trio.fail_after(HELLO_S):
            channel = await _open_channel(me, member)
            await _prove(channel, me, member)
            is_ready = True
            return channel
    except trio.TooSlowError:
        raise MetadataError(_SILENT) from None
    except ConnectionClosed as error:
        raise MetadataError(str(error) or _CLOSED) from error
    except OSError as error:
        raise MetadataError(_why(error)) from error
    finally:
        if channel is not None and not is_ready:
            channel.close()


def connect_blocking(me: Connector, member: Member) -> socket.socket | TlsSocket:
    """As `connect`, for a thread."""
    plain: socket.socket | None = None
    is_ready = False
    try:
        plain = socket.create_connection(split_address(member.address), HELLO_S)
        for level, option, value in OPTIONS:
            plain.setsockopt(level, option, value)
        connected: socket.socket | TlsSocket = plain
        certificate = b""
        if me.has_tls or member.certificate:
            connected = TlsSocket(plain, client_context())
            certificate = connected.peer_certificate
        dialogue = _prove_steps(me, member, certificate)
        wanted = next(dialogue)
        with suppress(StopIteration):
            while True:
                if isinstance(wanted, bytes):
                    connected.sendall(wanted)
                    wanted = next(dialogue)
                else:
                    wanted = dialogue.send(_receive_exactly(connected, wanted))
        connected.settimeout(None)
        is_ready = True
        return connected
    except TimeoutError:
        raise MetadataError(_SILENT) from None
    except ssl.SSLError as error:
        raise MetadataError(f"the TLS handshake failed: {error.reason or error}") from error
    except OSError as error:
        raise MetadataError(_why(error)) from error
    finally:
        if plain is not None and not is_ready:
            plain.close()


def _receive_exactly(connected: socket.socket | TlsSocket, size: int) -> bytearray:
    content = bytearray(size)
    left = memoryview(content)
    while len(left):
        count = connected.recv_into(left)
        if not count:
            raise MetadataError(_CLOSED)
        left = left[count:]
    return content


async def _open_channel(me: Connector, member: Member) -> Channel:
    stream = await trio.open_tcp_stream(*split_address(member.address))
    plain = socket.socket(fileno=stream.socket.detach())
    if not me.has_tls and not member.certificate:
        return Channel(plain)
    channel = TlsChannel(plain, client_context(), accepted=False)
    try:
        await channel.do_handshake()
    except BaseException:
        channel.close()
        raise
    return channel


async def _prove(channel: Channel, me: Connector, member: Member) -> None:
    certificate = channel.peer_certificate if isinstance(channel, TlsChannel) else b""
    dialogue = _prove_steps(me, member, certificate)
    wanted = next(dialogue)
    with suppress(StopIteration):
        while True:
            if isinstance(wanted, bytes):
                channel.send_now([wanted], len(wanted))
                wanted = next(dialogue)
            else:
                wanted = dialogue.send(await channel.receive_exactly(wanted))


def _prove_steps(me: Connector, member: Member, certificate: bytes) -> _Proving:
    """`certificate` is the master's, empty without TLS."""
    binding = certificate_digest(certificate) if certificate else NO_BINDING
    if member.certificate and binding != member.certificate:
        raise PermissionDenied("the other master's certificate is not the registered one")
    yield wire.greeting()
    goes_on, version, length = wire.parse_welcome((yield GREETING_BYTES))
    tail = bytes((yield length))
    if not goes_on:
        error = wire.refusal_error(version, tail)
        if me.is_client:  # it must tell a refusal from a master that cannot be reached
            raise PermissionDenied(error.message)
        raise error
    ours = Hello(
        me.rank, me.is_client, me.instance, member.rank, me.identity, me.version,
        os.urandom(NONCE_BYTES),
    )  # fmt: skip
    proofs = Proofs(me.secret, tail, binding, me.task, ours)
    yield wire.hello_frame(ours, proofs.connector)
    lengths = frames.parse_lengths((yield frames.LENGTHS_BYTES), wire.HELLO_LIMITS)
    answer = frames.parse_head((yield lengths.head), wire.HELLO_LIMITS)
    rejection = parse_error(answer)
    if rejection is not None:
        raise rejection
    if not hmac.compare_digest(wire.parse_proof(answer), proofs.acceptor):
        raise PermissionDenied("the other master does not know the task's secret")


def _why(error: OSError) -> str:
    """trio tries all addresses of a host; the cause of its error has the errors of all."""
    cause = error.__cause__
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    first = cause if isinstance(cause, OSError) else error
    return first.strerror or str(first) or type(first).__name__


# the acceptor -------------------------------------------------------------------------------------


async def accept_tls(channel: Channel) -> None:
    """Does nothing without TLS. Raises HandshakeRejected."""
    if isinstance(channel, TlsChannel):
        try:
            await channel.do_handshake()
        except ConnectionClosed as error:
            raise HandshakeRejected(str(error)) from error


async def authenticate(channel: Channel, me: LocalIdentity) -> Hello:
    """Check that a connector knows the secret. Raises HandshakeRejected."""
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
    if not hmac.compare_digest(proof, proofs.connector):
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
    return theirs


async def _greet(channel: Channel, nonce: bytes) -> None:
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
    """The connector gets the error; the log also gets `why`."""
    message = frames.frame(error_message(error), wire.HELLO_LIMITS)
    return HandshakeRejected(f"{error.message}: {why}" if why else error.message, message)


# frames -------------------------------------------------------------------------------------------


async def _head(channel: Channel) -> bytearray:
    lengths = frames.parse_lengths(
        await channel.receive_exactly(frames.LENGTHS_BYTES), wire.HELLO_LIMITS
    )
    return await channel.receive_exactly(lengths.head)
