"""One connection to a server, at its client's end: from the first byte to the last answer.

Owned here: addresses, connecting, TLS, greeting and login, sending and receiving frames within a
deadline. Not owned: the bytes of frames (`wire.py`), which of several servers, and whether a
request is sent again (`client.py`).

A connection is used by one thread at a time and carries one request at a time. Payloads are sent
from where they lie, and received into the memory where they are wanted.
"""

import hashlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit
from uuid import UUID

import numpy as np

from ..credentials import Credentials
from ..errors import (
    ConfigError,
    CorruptError,
    DeadlineError,
    DieselError,
    ForeignError,
    MetadataError,
)
from ..format.entries import Bytes
from ..urls import RepositoryUrl
from . import frames as wire
from .keys import sign
from .messages import Message, parse_error

PORT = 9300

PAYLOAD_BYTES_MAX = 64 << 20
"""Of an answer for which nobody has made room: accounts, pieces of snapshots."""

_BUFFER_BYTES = 16 << 10  # small answers come by one call; of large ones this much is copied
_TLS_PIECE_BYTES = 256 << 10
_PARTS_AT_ONCE = 64
_EARLY_ANSWER_S = 1.0
"""For the answer of a server that does not want to hear the rest of a request."""

_KEEP_ALIVE = (  # a server whose machine is gone is noticed between requests, too
    (socket.TCP_KEEPIDLE, 30),
    (socket.TCP_KEEPINTVL, 10),
    (socket.TCP_KEEPCNT, 3),
)

_UNTRUSTED = "SSL_CERT_FILE names the authorities to trust"
_CERTIFICATE_ADVICE = {  # by OpenSSL's X509_V_ERR_...
    9: "if this machine's clock is right, the server needs another certificate",
    10: "if this machine's clock is right, the server's certificate has to be renewed",
    62: "name the server as its certificate does",
    64: "name the server as its certificate does",
}

T = TypeVar("T")


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Answer(NamedTuple):
    """One answer: its head, and its payload in memory of its own (or in the `room` of the call)."""

    message: Message
    payload: memoryview


class Deadline:
    """A time by which something is over."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds that are left; not below 0."""
        return max(0.0, self._end_s - time.monotonic())

    def capped(self, seconds: float) -> "Deadline":
        """This, or so many seconds from now."""
        return Deadline(min(seconds, self.left_s))


class ConnectionBroken(Exception):
    """A connection is of no more use.

    `was_sent`: the server may have the whole request. `is_permanent`: at this address it will not
    go better soon.
    """

    def __init__(self, error: DieselError, *, arrived: bool = False, lasting: bool = False) -> None:
        super().__init__(str(error))
        self.error = error
        self.was_sent = arrived
        self.is_permanent = lasting


def parse_addresses(url: RepositoryUrl) -> list[Address]:
    """The servers that a URL names. Raises ConfigError."""
    found = []
    for place in url.host.split(","):
        try:
            parts = urlsplit(f"//{place}")
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if not parts.hostname or parts.path:
            raise ConfigError(
                f"bad repository URL {str(url)!r}: {place!r} is no host and port",
                advice=f"write {url.scheme}://host:port,host2:port2",
            )
        found.append(Address(parts.hostname, PORT if port is None else port))
    return found


def tls_context() -> ssl.SSLContext:
    """What a client asks of a server's certificate: a chain to an authority that this machine
    trusts (or those in the file that SSL_CERT_FILE names), and the host's name."""
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


class Connection:
    """A connection on which the login has succeeded."""

    def __init__(
        self,
        address: Address,
        tls: ssl.SSLContext | None,
        credentials: Credentials,
        program: str,
        deadline: Deadline,
    ) -> None:
        """Raises Broken; PermissionDenied where the server does not know us."""
        self.address = address
        self.store_id = UUID(int=0)
        self.idle_since_s = 0.0
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0  # what of the buffer has not been taken yet
        self._ids = 0
        self._arrived = False
        self._tls = tls is not None
        self._socket = _connected(address, deadline)
        try:
            self._prepare(self._socket)
            if tls is not None:
                self._socket = self._secured(self._socket, tls, deadline)
            self._log_in(credentials, program, deadline)
        except DieselError as error:
            self.close()
            if error.retry:  # its accounts cannot be had just now, say; another server's may
                raise ConnectionBroken(error) from error
            raise
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the socket, without a word to the server: after a fork it is the parent's,
        too. Repeatable."""
        with suppress(OSError):
            self._socket.close()

    @property
    def is_usable(self) -> bool:
        """Whether the server, as far as can be told, still waits for a request."""
        return self._start == self._end and not self._readable.poll(0)

    def exchange(
        self,
        message: Message,
        payload: Sequence[Bytes],
        room: memoryview | None,
        deadline: Deadline,
    ) -> Answer:
        """Send a request; its first answer. Raises Broken, CorruptError; UsageError before
        anything is sent, where it is too large."""
        self._ids += 1
        views = [memoryview(part).cast("B") for part in payload if len(part)]
        size = sum(view.nbytes for view in views)
        head = wire.frame({**message, "id": self._ids}, wire.REQUEST_LIMITS, size)
        self._arrived = False
        try:
            self._send([memoryview(head), *views], deadline)
        except ConnectionBroken as broken:
            with suppress(ConnectionBroken, CorruptError):
                return self.receive(room, deadline.capped(_EARLY_ANSWER_S))
            raise broken from None
        return self.receive(room, deadline)

    def receive(self, room: memoryview | None, deadline: Deadline) -> Answer:
        """The next answer to the request. Raises Broken, CorruptError."""
        answer = self._received(wire.ANSWER_LIMITS, room, deadline)
        if answer.message.get("id") != self._ids:
            error = parse_error(answer.message)
            if error is not None and "id" not in answer.message:
                raise ConnectionBroken(error, arrived=self._arrived, lasting=True)
            raise CorruptError(f"{self.address} answered what it had not been asked")
        wire.check_required_fields(answer.message)
        return answer

    # The beginning

    def _prepare(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE:
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connected.fileno(), select.POLLIN)
        self._writable.register(connected.fileno(), select.POLLOUT)

    def _secured(
        self, connected: socket.socket, tls: ssl.SSLContext, deadline: Deadline
    ) -> ssl.SSLSocket:
        try:
            secured = tls.wrap_socket(
                connected, server_hostname=self.address.host, do_handshake_on_connect=False
            )
        except (OSError, ValueError) as error:
            raise ConnectionBroken(MetadataError(f"{self.address}: {error}")) from error
        self._socket = secured
        try:
            while True:
                try:
                    secured.do_handshake()
                    return secured
                except ssl.SSLWantReadError:
                    self._wait(self._readable, deadline)
                except ssl.SSLWantWriteError:
                    self._wait(self._writable, deadline)
        except ssl.SSLCertVerificationError as error:
            raise ConnectionBroken(
                MetadataError(
                    f"the certificate of {self.address} is refused: {error.verify_message}",
                    advice=_CERTIFICATE_ADVICE.get(error.verify_code, _UNTRUSTED),
                ),
                lasting=True,
            ) from error
        except ssl.SSLEOFError as error:  # a server that was just stopped, say: not lasting
            raise ConnectionBroken(
                MetadataError(
                    f"{self.address} closed the connection before TLS stood",
                    advice="where this goes on: a server without TLS is diesel://host:port",
                )
            ) from error
        except ssl.SSLError as error:
            raise ConnectionBroken(
                MetadataError(
                    f"{self.address} does not speak TLS with us: {error.reason or error}",
                    advice="a server without TLS is diesel://host:port",
                ),
                lasting=True,
            ) from error
        except OSError as error:
            raise ConnectionBroken(
                MetadataError(f"{self.address}: {error.strerror or error}")
            ) from error

    def _log_in(self, credentials: Credentials, program: str, deadline: Deadline) -> None:
        self._send([memoryview(wire.greeting())], deadline)
        try:
            head = self._exactly(wire.GREETING_BYTES, deadline)
            goes_on, version, length = wire.parse_welcome(bytes(head))
        except (ConnectionBroken, ForeignError) as error:
            if isinstance(error, ConnectionBroken) and isinstance(error.error, DeadlineError):
                raise
            reason = error.error.message if isinstance(error, ConnectionBroken) else error.message
            refused = MetadataError(
                reason if str(self.address) in reason else f"{self.address}: {reason}",
                advice="" if self._tls else "a server that speaks TLS is diesel+tls://host:port",
            )
            raise ConnectionBroken(refused, lasting=isinstance(error, ForeignError)) from error
        tail = bytes(self._exactly(length, deadline))
        if not goes_on:
            why = wire.refusal_error(version, tail)
            why.message = f"{self.address}: {why.message}"
            raise ConnectionBroken(why, lasting=version != wire.VERSION)
        user = credentials.user
        signature = sign(credentials.seed, wire.login_challenge(tail, self._binding(), user))
        login: Message = {
            "do": "login", "user": user, "signature": signature, "program": program,
        }  # fmt: skip
        self._send([memoryview(wire.frame(login, wire.BEFORE_LOGIN_LIMITS))], deadline)
        message = self._received(wire.BEFORE_LOGIN_LIMITS, None, deadline).message
        found = parse_error(message)
        if found is not None:
            raise found
        wire.check_required_fields(message)
        try:
            self.store_id = UUID(str(message.get("store")))
        except ValueError:
            raise CorruptError(f"{self.address} does not say which store it serves") from None

    def _binding(self) -> bytes:
        if not isinstance(self._socket, ssl.SSLSocket):
            return wire.NO_BINDING
        certificate = self._socket.getpeercert(binary_form=True)
        assert certificate is not None  # it has been verified
        return hashlib.sha256(certificate).digest()

    # Frames

    def _received(self, limits: wire.Limits, room: memoryview | None, deadline: Deadline) -> Answer:
        lengths = wire.parse_lengths(self._exactly(wire.LENGTHS_BYTES, deadline), limits)
        message = wire.parse_head(self._exactly(lengths.head, deadline), limits)
        if "error" in message and lengths.payload:
            raise CorruptError(f"{self.address} sends {lengths.payload} bytes with an error")
        if room is None or "error" in message:
            if lengths.payload > PAYLOAD_BYTES_MAX:
                raise CorruptError(f"{self.address} sends {lengths.payload} bytes unasked")
            room = np.empty(lengths.payload, np.uint8).data
        if room.nbytes != lengths.payload:
            raise CorruptError(
                f"{self.address} sends {lengths.payload} bytes where {room.nbytes} were asked for"
            )
        self._fill(room, deadline)
        return Answer(message, room)

    def _exactly(self, length: int, deadline: Deadline) -> bytearray:
        taken = bytearray(length)
        self._fill(memoryview(taken), deadline)
        return taken

    def _fill(self, room: memoryview, deadline: Deadline) -> None:
        while room.nbytes:
            if self._start < self._end:
                count = min(room.nbytes, self._end - self._start)
                room[:count] = self._buffer[self._start : self._start + count]
                self._start += count
            elif room.nbytes >= _BUFFER_BYTES:
                count = self._receive_some(room, deadline)
            else:
                self._start, self._end = 0, self._receive_some(self._buffer, deadline)
                continue
            room = room[count:]

    def _receive_some(self, room: memoryview, deadline: Deadline) -> int:
        count = self._retry_until_ready(
            lambda: self._socket.recv_into(room), self._readable, deadline
        )
        if not count:
            raise ConnectionBroken(
                MetadataError(f"{self.address} has closed the connection"), arrived=self._arrived
            )
        return count

    def _send(self, views: list[memoryview], deadline: Deadline) -> None:
        at = 0
        while at < len(views):
            if self._tls:
                piece = views[at][:_TLS_PIECE_BYTES]
                self._arrived = at == len(views) - 1 and piece.nbytes == views[at].nbytes
                sent = self._retry_until_ready(
                    lambda piece=piece: self._socket.send(piece),  # type: ignore[misc]  # mypy cannot infer a lambda with defaults
                    self._writable,
                    deadline,
                )
            else:
                some = views[at : at + _PARTS_AT_ONCE]
                self._arrived = at + len(some) == len(views)
                sent = self._retry_until_ready(
                    lambda some=some: self._socket.sendmsg(some),  # type: ignore[misc]  # mypy cannot infer a lambda with defaults
                    self._writable,
                    deadline,
                )
            while at < len(views) and sent >= views[at].nbytes:
                sent -= views[at].nbytes
                at += 1
            if sent:
                views[at] = views[at][sent:]

    def _retry_until_ready(
        self, work: Callable[[], T], ready: select.poll, deadline: Deadline
    ) -> T:
        """What a call on the socket gives, as soon as it need not wait. Raises Broken."""
        try:
            while True:
                try:
                    return work()
                except BlockingIOError:
                    self._wait(ready, deadline)
                except ssl.SSLWantReadError:
                    self._wait(self._readable, deadline)
                except ssl.SSLWantWriteError:
                    self._wait(self._writable, deadline)
        except OSError as error:
            raise ConnectionBroken(
                MetadataError(f"the connection to {self.address} broke: {_why(error)}"),
                arrived=self._arrived,
            ) from error

    def _wait(self, ready: select.poll, deadline: Deadline) -> None:
        if not ready.poll(deadline.left_s * 1000):
            raise ConnectionBroken(
                DeadlineError(f"{self.address} did not answer in time"), arrived=self._arrived
            )


def _connected(address: Address, deadline: Deadline) -> socket.socket:
    """A socket that is connected to one of an address's places. Raises Broken."""
    why = "it has no address"
    for family, place in _resolve_in_time(address, deadline):
        found = None
        try:
            found = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            found.settimeout(max(0.001, deadline.left_s))
            found.connect(place)
            return found
        except OSError as error:
            why = _why(error)
            if found is not None:
                found.close()
    raise ConnectionBroken(MetadataError(f"cannot reach the server {address}: {why}"))


_SocketAddress = tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]


def _resolve_in_time(
    address: Address, deadline: Deadline
) -> Sequence[tuple[socket.AddressFamily, _SocketAddress]]:
    """What a host's name means. Looking that up has no time-out of its own, hence the thread."""
    with suppress(OSError):
        return _looked_up(address, socket.AI_NUMERICHOST)
    found: list[tuple[socket.AddressFamily, _SocketAddress]] = []
    failed: list[OSError] = []

    def look_up() -> None:
        try:
            found.extend(_looked_up(address, 0))
        except OSError as error:
            failed.append(error)
        except UnicodeError:  # a label of it is empty or too long
            failed.append(OSError(0, "it is no name of a host"))

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(deadline.left_s)
    if thread.is_alive():
        raise ConnectionBroken(DeadlineError(f"looking up {address.host} took too long"))
    if failed:
        raise ConnectionBroken(
            MetadataError(f"cannot reach the server {address}: {_why(failed[0])}")
        ) from failed[0]
    return found


def _looked_up(address: Address, flags: int) -> list[tuple[socket.AddressFamily, _SocketAddress]]:
    with suppress(UnicodeError):
        answers = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=flags)
        return [(answer[0], answer[4]) for answer in answers]
    raise OSError(0, "it is no name of a host")


def _why(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
