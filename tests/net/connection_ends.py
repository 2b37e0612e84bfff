"""Every way in which the other end of a TLS connection may end it, at any byte.

A `RawTls` is one end of a connection that a test drives by hand: it has TLS in memory beside a
plain socket, so it can send half a record, or bytes and their end in one segment. `ENDS` and
`handshake_ends` are the ways.

OpenSSL distinguishes an end that close_notify announces from an unannounced one, unless a
context has OP_IGNORE_UNEXPECTED_EOF, as all have in some builds of Python (Debian's 3.11 is
one). The fixture `unexpected_eof` runs a test both ways.
"""

import functools
import os
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

import pytest

T = TypeVar("T")

PATIENCE_S = 20.0
"""Far longer than any wait of a test, even on a busy machine."""

_CLOSE_NOTIFY = bytes.fromhex("15 03 03 00 02 01 00")  # before the keys: an alert in plain text
_TLS_BYTES = 64 << 10


class NoEndError(Exception):
    """A call waits, or runs, without end."""


def promptly(what: str, work: Callable[[], T], within_s: float = PATIENCE_S) -> T:
    """The result or error of `work`, in a thread: an endless loop must fail one test and not stop
    all others. Raises NoEndError, which names `what`."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if not wait([outcome], within_s).done:
        raise NoEndError(what)
    return outcome.result()


def close(plain: socket.socket) -> None:
    """Send FIN. With unread bytes, the kernel would send RST instead."""
    plain.setblocking(False)
    with suppress(OSError):
        while plain.recv(_TLS_BYTES):
            pass
    plain.close()


def half_close(plain: socket.socket) -> None:
    with suppress(OSError):  # the other end may have closed the connection already
        plain.shutdown(socket.SHUT_WR)


def reset(plain: socket.socket) -> None:
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    plain.close()


def leave_open(plain: socket.socket) -> None:
    pass


@dataclass(frozen=True, slots=True)
class End:
    name: str
    end_tcp: Callable[[socket.socket], None]
    is_announced: bool = False  # by close_notify
    within_record: bool = False  # behind half of a record

    @property
    def is_reset(self) -> bool:
        """Whether bytes before the end may be lost, and the end may be an error."""
        return self.end_tcp is reset


ENDS = (
    End("close_notify, then close", close, is_announced=True),
    End("close_notify, TCP left open", leave_open, is_announced=True),
    End("close", close),
    End("half-close", half_close),
    End("reset", reset),
    End("close within a record", close, within_record=True),
    End("half-close within a record", half_close, within_record=True),
    End("reset within a record", reset, within_record=True),
)


@dataclass(frozen=True, slots=True)
class HandshakeEnd:
    """An end within the TLS handshake, after a share of this end's first message."""

    share: float
    end: End

    @property
    def name(self) -> str:
        return f"{self.end.name}, after {self.share:.0%} of the first message"


HANDSHAKE_ENDS = tuple(
    HandshakeEnd(share, end)
    for share in (0, 0.01, 0.5, 1)
    for end in ENDS
    if not end.within_record and (share == 0 or not end.is_announced)
)


class RawTls:
    """One end of a TLS connection. It blocks, and owns the socket."""

    def __init__(self, plain: socket.socket, certificate: ssl.SSLContext | None = None) -> None:
        """The end that gets the context of a certificate accepts."""
        plain.settimeout(PATIENCE_S)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.plain = plain
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = (certificate or _unchecked()).wrap_bio(
            self._incoming, self._outgoing, server_side=certificate is not None
        )
        self._is_server = certificate is not None

    def shake_hands(self) -> Self:
        self._retry(self._object.do_handshake)
        self.plain.sendall(self._outgoing.read())
        return self

    @property
    def peer_certificate(self) -> bytes:
        """Return it as DER."""
        return self._object.getpeercert(binary_form=True) or b""

    def send(self, content: bytes) -> None:
        """Send each of these in records of its own."""
        self.plain.sendall(self._encrypted(content))

    def exactly(self, size: int) -> bytes:
        """Receive `size` bytes. Raises EOFError."""
        content = b""
        while len(content) < size:
            left = size - len(content)
            some = self._retry(lambda left=left: self._object.read(left))  # type: ignore[misc]  # mypy cannot infer a lambda with defaults
            if not some:
                raise EOFError
            content += some
        return content

    def end(self, end: End, last: bytes = b"") -> None:
        """`last` are the final bytes; they leave in one segment with the end."""
        content = self._encrypted(last) if last else b""
        if end.within_record:
            record = self._encrypted(bytes(100))
            content += record[: len(record) // 2]
        if end.is_announced:
            with suppress(ssl.SSLError):  # that no answer has come
                self._object.unwrap()
            content += self._outgoing.read()
        if content:
            self.plain.sendall(content)
        end.end_tcp(self.plain)

    def end_handshake(self, way: HandshakeEnd) -> None:
        if self._is_server:  # its first bytes answer those of the client
            self._incoming.write(self.plain.recv(_TLS_BYTES))
        with suppress(ssl.SSLError):
            self._object.do_handshake()
        content = self._outgoing.read()
        if self._is_server:  # with all of it, the handshake would be complete for the client
            content = content[:-20]
        content = content[: round(len(content) * way.share)]
        if way.end.is_announced:
            content += _CLOSE_NOTIFY
        with suppress(OSError):
            self.plain.sendall(content)
        way.end.end_tcp(self.plain)

    def close(self) -> None:
        self.plain.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encrypted(self, content: bytes) -> bytes:
        self._object.write(content)
        return self._outgoing.read()

    def _retry(self, work: Callable[[], T]) -> T:
        while True:
            try:
                return work()
            except ssl.SSLWantReadError:
                self.plain.sendall(self._outgoing.read())
                some = self.plain.recv(_TLS_BYTES)
                if not some:
                    raise EOFError from None
                self._incoming.write(some)


@functools.cache  # making one takes about as long as a handshake
def _unchecked() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def connected(port: int) -> RawTls:
    return RawTls(socket.create_connection(("127.0.0.1", port)))


def secured(port: int) -> RawTls:
    return connected(port).shake_hands()


Begin = Callable[[int], RawTls]
Row = tuple[str, Begin, bytes, End | HandshakeEnd]


def rows(stages: Mapping[str, tuple[Begin, bytes]]) -> list[Row]:
    """Return each end within the TLS handshake, and after it at each stage. A stage has the
    function that opens a connection, and the last bytes before the end."""
    return [
        *((f"within the TLS handshake: {way.name}", connected, b"", way) for way in HANDSHAKE_ENDS),
        *(
            (f"{stage}: {end.name}", begin, last, end)
            for stage, (begin, last) in stages.items()
            for end in ENDS
        ),
    ]


def end_one(port: int, begin: Begin, last: bytes, way: End | HandshakeEnd) -> RawTls:
    """The caller keeps the result while it must stay open."""
    raw = begin(port)
    if isinstance(way, HandshakeEnd):
        raw.end_handshake(way)
    else:
        raw.end(way, last)
    return raw


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    return ours, theirs


@contextmanager
def accepting(serve: Callable[[socket.socket], object]) -> Iterator[int]:
    """A port whose connections a thread serves one after the other. A connection that `serve` does
    not close stays open until the end."""
    accepted: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    plain, _ = listener.accept()
                except OSError:
                    return
                accepted.append(plain)
                with suppress(OSError, EOFError):
                    serve(plain)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for each in accepted:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            thread.join(PATIENCE_S)
            for each in accepted:
                each.close()
            assert not thread.is_alive()


# OP_IGNORE_UNEXPECTED_EOF -------------------------------------------------------------------------

_AS_DEBIAN = """
import ssl

new = ssl.SSLContext.__new__


def ignoring(cls, *arguments, **named):
    context = new(cls, *arguments, **named)
    context.options |= ssl.OP_IGNORE_UNEXPECTED_EOF
    return context


ssl.SSLContext.__new__ = ignoring
"""


def ignoring_program(folder: Path) -> Mapping[str, str]:
    """The environment of a Python program whose contexts all ignore unexpected ends."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_AS_DEBIAN, encoding="utf-8")
    paths = (str(folder), os.environ.get("PYTHONPATH", ""))
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.fixture(params=["reported", "ignored"])
def unexpected_eof(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether contexts that the test makes ignore unannounced ends."""
    new = ssl.SSLContext.__new__
    outcome = str(request.param)

    def made(cls: type[ssl.SSLContext], *arguments: int, **named: int) -> ssl.SSLContext:
        context = new(cls, *arguments, **named)
        context.options &= ~ssl.OP_IGNORE_UNEXPECTED_EOF
        if outcome == "ignored":
            context.options |= ssl.OP_IGNORE_UNEXPECTED_EOF
        return context

    monkeypatch.setattr(ssl.SSLContext, "__new__", made)
    return outcome
