"""One connection of a client to a server: connecting, TLS, login, then requests and answers, each
with a deadline.

A connection is used by one thread at a time and carries one request at a time. Payloads are sent
from the caller's memory and received into it, without a copy.
"""

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar
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
from ..system.vectored_io import BUFFERS_MAX, byte_views, drop_written
from ..urls import HostPort, RepositoryUrl
from . import frames as wire
from .keys import sign
from .messages import Message, parse_error
from .tls import certificate_digest

PORT = 9300

PAYLOAD_BYTES_MAX = 64 << 20
"""The largest payload of an answer for which the caller gives no memory: accounts, and pieces of
snapshots."""

_BUFFER_BYTES = 16 << 10
"""Smaller pieces go through the connection's buffer, so that a small answer takes one system call;
larger ones go straight into the caller's memory."""

_TLS_PIECE_BYTES = 256 << 10
_EARLY_ANSWER_S = 1.0
"""How long to wait for the server's answer, which has the reason, if a send breaks."""

_KEEP_ALIVE = (  # to notice between requests that the server's machine is gone
    (socket.TCP_KEEPIDLE, 30),
    (socket.TCP_KEEPINTVL, 10),
    (socket.TCP_KEEPCNT, 3),
)

_UNTRUSTED = "SSL_CERT_FILE names the authorities to trust"
_CERTIFICATE_ADVICE = {  # by OpenSSL's error X509_V_ERR_...
    9: "if this machine's clock is right, the server needs another certificate",
    10: "if this machine's clock is right, the server's certificate has to be renewed",
    62: "name the server as its certificate does",
    64: "name the server as its certificate does",
}

T = TypeVar("T")


class Answer(NamedTuple):
    message: Message
    payload: memoryview


class Deadline:
    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return max(0.0, self._end_s - time.monotonic())

    def capped(self, seconds: float) -> "Deadline":
        return Deadline(min(seconds, self.left_s))


class ConnectionBroken(Exception):
    """`error` is the reason for the user. `may_have_arrived`: the server may have the whole
    request. `is_permanent`: another attempt at this server is unlikely to succeed.
    """

    def __init__(
        self, error: DieselError, *, may_have_arrived: bool = False, is_permanent: bool = False
    ) -> None:
        super().__init__(str(error))
        self.error = error
        self.may_have_arrived = may_have_arrived
        self.is_permanent = is_permanent


def parse_addresses(url: RepositoryUrl) -> list[HostPort]:
    """Raises ConfigError."""
    try:
        return [HostPort.parse(each, PORT) for each in url.host.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"bad repository URL {str(url)!r}: {error}",
            advice=f"write {url.scheme}://host:port,host2:port2",
        ) from None


class Connection:
    """`store_id` is the ID of the server's object store."""

    def __init__(
        self,
        address: HostPort,
        tls: ssl.SSLContext | None,
        credentials: Credentials,
        program: str,
        deadline: Deadline,
    ) -> None:
        """Raises ConnectionBroken; PermissionDenied if the server rejects the login."""
        self.address = address
        self.store_id = UUID(int=0)
        self.idle_since_s = 0.0
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0  # the unused bytes in the buffer
        self._last_id = 0
        self._may_have_arrived = False
        self._tls = tls is not None
        self._socket = _connected(address, deadline)
        try:
            self._prepare(self._socket)
            if tls is not None:
                self._socket = self._secured(self._socket, tls, deadline)
            self._log_in(credentials, program, deadline)
        except DieselError as error:
            self.close()
            if error.retry:  # if this server cannot read its accounts now, another one may
                raise ConnectionBroken(error) from error
            raise
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close without sending anything: in a forked child, the connection is still the parent's.
        May be called again."""
        with suppress(OSError):
            self._socket.close()

    @property
    def is_usable(self) -> bool:
        """False if the server closed the connection or sent unrequested bytes."""
        return self._start == self._end and not self._readable.poll(0)

    def exchange(
        self,
        message: Message,
        payload: Sequence[Bytes],
        room: memoryview | None,
        deadline: Deadline,
    ) -> Answer:
        """Send a request and receive its first answer. The answer's payload must fill `room`, if
        given. Raises ConnectionBroken, CorruptError; UsageError for a request that is too large,
        before anything is sent."""
        self._last_id += 1
        views = byte_views(payload)
        size = sum(map(len, views))
        head = wire.frame({**message, "id": self._last_id}, wire.REQUEST_LIMITS, size)
        self._may_have_arrived = False
        try:
            self._send([memoryview(head), *views], deadline)
        except ConnectionBroken as broken:
            with suppress(ConnectionBroken, CorruptError):
                return self.receive(room, deadline.capped(_EARLY_ANSWER_S))
            raise broken from None
        return self.receive(room, deadline)

    def receive(self, room: memoryview | None, deadline: Deadline) -> Answer:
        """The next answer to the last request. Raises ConnectionBroken, CorruptError."""
        answer = self._receive_frame(wire.ANSWER_LIMITS, room, deadline)
        if answer.message.get("id") != self._last_id:
            error = parse_error(answer.message)
            if error is not None and "id" not in answer.message:
                raise ConnectionBroken(
                    error, may_have_arrived=self._may_have_arrived, is_permanent=True
                )
            raise CorruptError(f"{self.address} sent an answer to another request")
        wire.check_required_fields(answer.message)
        return answer

    # TLS and login

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
                is_permanent=True,
            ) from error
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            # Temporary: the server was just stopped, for example
            raise ConnectionBroken(
                MetadataError(
                    f"{self.address} closed the connection during the TLS handshake",
                    advice="if it happens again: a server without TLS is diesel://host:port",
                )
            ) from error
        except ssl.SSLError as error:
            raise ConnectionBroken(
                MetadataError(
                    f"the TLS handshake with {self.address} failed: {error.reason or error}",
                    advice="a server without TLS is diesel://host:port",
                ),
                is_permanent=True,
            ) from error
        except OSError as error:
            raise ConnectionBroken(
                MetadataError(f"{self.address}: {error.strerror or error}")
            ) from error

    def _log_in(self, credentials: Credentials, program: str, deadline: Deadline) -> None:
        self._send([memoryview(wire.greeting())], deadline)
        try:
            head = self._exactly(wire.GREETING_BYTES, deadline)
            is_accepted, version, tail_bytes = wire.parse_welcome(bytes(head))
        except (ConnectionBroken, ForeignError) as error:
            if isinstance(error, ConnectionBroken) and isinstance(error.error, DeadlineError):
                raise
            reason = error.error.message if isinstance(error, ConnectionBroken) else error.message
            no_server = MetadataError(
                reason if str(self.address) in reason else f"{self.address}: {reason}",
                advice="" if self._tls else "a server that speaks TLS is diesel+tls://host:port",
            )
            raise ConnectionBroken(
                no_server, is_permanent=isinstance(error, ForeignError)
            ) from error
        tail = bytes(self._exactly(tail_bytes, deadline))
        if not is_accepted:
            refusal = wire.refusal_error(version, tail)
            refusal.message = f"{self.address}: {refusal.message}"
            raise ConnectionBroken(refusal, is_permanent=version != wire.VERSION)
        user = credentials.user
        signature = sign(credentials.seed, wire.login_challenge(tail, self._binding(), user))
        login: Message = {
            "do": "login", "user": user, "signature": signature, "program": program,
        }  # fmt: skip
        self._send([memoryview(wire.frame(login, wire.BEFORE_LOGIN_LIMITS))], deadline)
        message = self._receive_frame(wire.BEFORE_LOGIN_LIMITS, None, deadline).message
        login_error = parse_error(message)
        if login_error is not None:
            raise login_error
        wire.check_required_fields(message)
        try:
            self.store_id = UUID(str(message.get("store")))
        except ValueError:
            raise CorruptError(f"{self.address} did not report its store") from None

    def _binding(self) -> bytes:
        """Ties the login's signature to this connection (`frames.login_challenge`)."""
        if not isinstance(self._socket, ssl.SSLSocket):
            return wire.NO_BINDING
        certificate = self._socket.getpeercert(binary_form=True)
        assert certificate is not None  # it has been verified
        return certificate_digest(certificate)

    # Frames

    def _receive_frame(
        self, limits: wire.FrameLimits, room: memoryview | None, deadline: Deadline
    ) -> Answer:
        lengths = wire.parse_lengths(self._exactly(wire.LENGTHS_BYTES, deadline), limits)
        message = wire.parse_head(self._exactly(lengths.head, deadline), limits)
        if "error" in message and lengths.payload:
            raise CorruptError(f"{self.address} sent a payload with an error")
        if room is None or "error" in message:
            if lengths.payload > PAYLOAD_BYTES_MAX:
                raise CorruptError(f"{self.address} sent {lengths.payload} unrequested bytes")
            room = np.empty(lengths.payload, np.uint8).data
        if room.nbytes != lengths.payload:
            raise CorruptError(
                f"{self.address} sent {lengths.payload} bytes instead of {room.nbytes}"
            )
        self._fill(room, deadline)
        return Answer(message, room)

    def _exactly(self, length: int, deadline: Deadline) -> bytearray:
        content = bytearray(length)
        self._fill(memoryview(content), deadline)
        return content

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
                MetadataError(f"{self.address} has closed the connection"),
                may_have_arrived=self._may_have_arrived,
            )
        return count

    def _send(self, views: list[memoryview], deadline: Deadline) -> None:
        """Empties the list."""
        while views:
            if self._tls:
                piece = views[0][:_TLS_PIECE_BYTES]
                self._may_have_arrived = len(views) == 1 and len(piece) == len(views[0])
                send = partial(self._socket.send, piece)
            else:
                batch = views[:BUFFERS_MAX]
                self._may_have_arrived = len(batch) == len(views)
                send = partial(self._socket.sendmsg, batch)
            drop_written(views, self._retry_until_ready(send, self._writable, deadline))

    def _retry_until_ready(
        self, work: Callable[[], T], ready: select.poll, deadline: Deadline
    ) -> T:
        """Repeats `work`, a call on the socket, whenever it would have to wait."""
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
                MetadataError(f"the connection to {self.address} broke: {_reason(error)}"),
                may_have_arrived=self._may_have_arrived,
            ) from error

    def _wait(self, ready: select.poll, deadline: Deadline) -> None:
        """Raises ConnectionBroken at the deadline."""
        if not ready.poll(deadline.left_s * 1000):
            raise ConnectionBroken(
                DeadlineError(f"{self.address} did not answer in time"),
                may_have_arrived=self._may_have_arrived,
            )


def _connected(address: HostPort, deadline: Deadline) -> socket.socket:
    """Raises ConnectionBroken."""
    reason = "its name has no address"
    for family, socket_address in _resolve_in_time(address, deadline):
        connected = None
        try:
            connected = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            connected.settimeout(max(0.001, deadline.left_s))  # 0 would mean: do not wait
            connected.connect(socket_address)
            return connected
        except OSError as error:
            reason = _reason(error)
            if connected is not None:
                connected.close()
    raise ConnectionBroken(MetadataError(f"cannot reach the server {address}: {reason}"))


_SocketAddress = tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]


def _resolve_in_time(
    address: HostPort, deadline: Deadline
) -> Sequence[tuple[socket.AddressFamily, _SocketAddress]]:
    """Name look-ups have no time-out, so they run in a thread, which is abandoned at the deadline.
    Raises ConnectionBroken."""
    with suppress(OSError):
        return _looked_up(address, socket.AI_NUMERICHOST)
    found: list[tuple[socket.AddressFamily, _SocketAddress]] = []
    failed: list[OSError] = []

    def look_up() -> None:
        try:
            found.extend(_looked_up(address, 0))
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(deadline.left_s)
    if thread.is_alive():
        raise ConnectionBroken(DeadlineError(f"looking up {address.host} took too long"))
    if failed:
        raise ConnectionBroken(
            MetadataError(f"cannot reach the server {address}: {_reason(failed[0])}")
        ) from failed[0]
    return found


def _looked_up(address: HostPort, flags: int) -> list[tuple[socket.AddressFamily, _SocketAddress]]:
    with suppress(UnicodeError):  # a label of the name is empty or too long
        answers = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=flags)
        return [(answer[0], answer[4]) for answer in answers]
    raise OSError(0, "that is no name of a host")


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
