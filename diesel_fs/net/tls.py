"""TLS: the contexts of servers, clients and masters, certificates, and encryption without sockets.

A server loads its certificate from files, and its clients check it against the authorities that
they trust. A master makes its own certificate when it starts, with a key that is never written to a
disk. The certificate's SHA-256 is part of the master's registration
(`peers/members/membership.py`), so no authority need sign it, and nobody checks its names and
dates. Logins and handshakes sign this SHA-256 (`WIRE.md`, section 3).

Python's `SSLSocket` makes two system calls for each record of 16 KiB. A `TlsEngine` works in
memory, so that one call sends or receives many records: answers of masters are about 128 KiB.
Functions are safe from any thread; an engine is not.
"""

import datetime as dt
import hashlib
import os
import socket
import ssl
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from ..errors import ConfigError
from ..format.entries import Bytes

TLS_RECEIVED_BYTES = 256 << 10
"""The most bytes that one call receives: the records of some answers."""

_PEM_BYTES_MAX = 1 << 20
_BEGIN, _END = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"
_VALID = dt.timedelta(days=3650)  # nobody checks the dates, but the format demands them


@dataclass(frozen=True, slots=True)
class Certificate:
    """`digest` is the certificate's SHA-256."""

    context: ssl.SSLContext = field(repr=False)
    digest: bytes


class TlsEngine:
    """One end of a TLS connection: the caller passes received bytes to it, and sends the bytes that
    it returns."""

    def __init__(self, context: ssl.SSLContext, *, accepted: bool) -> None:
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._received, self._to_send, server_side=accepted)
        self._is_ended = False  # the other end has closed, and all bytes are decrypted

    def do_handshake(self) -> bool:
        """Returns False if more bytes are needed. Raises ssl.SSLError. In each case, send the
        result of `take_encrypted` next."""
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def feed(self, content: Bytes) -> None:
        """Empty bytes mean that the other end has closed."""
        if len(content):
            self._received.write(content)
        else:
            self._received.write_eof()

    @property
    def has_received(self) -> bool:
        return bool(
            self._received.pending or self._object.pending() or self._received.eof or self._is_ended
        )

    def decrypt_into(self, room: memoryview) -> int:
        """Returns the number of decrypted bytes, 0 if more must be received first. Raises EOFError
        at the end of the stream, ssl.SSLError."""
        got = 0
        try:
            while got < len(room) and not self._is_ended:
                count = cast(int, self._object.read(len(room) - got, room[got:]))
                # OpenSSL reports a proper end of the stream as 0 bytes, for ever; with
                # OP_IGNORE_UNEXPECTED_EOF, which some builds of Python set, any other end too
                self._is_ended = not count
                got += count
        except ssl.SSLWantReadError:
            pass
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            self._is_ended = True
        if self._is_ended and not got:
            raise EOFError
        return got

    def encrypt(self, content: Bytes) -> None:
        """The result goes to `take_encrypted`. Raises ssl.SSLError."""
        left = memoryview(content)
        while len(left):
            left = left[self._object.write(left) :]

    def take_encrypted(self) -> bytes:
        return self._to_send.read()

    @property
    def peer_certificate(self) -> bytes:
        """In DER; empty if there is none."""
        return self._object.getpeercert(binary_form=True) or b""


class TlsSocket:
    """A connector's end of a TLS connection, over a blocking socket.

    One thread may receive while another one sends. A signal handler may do so, too, even if it has
    interrupted such a call of its thread.
    """

    def __init__(self, plain: socket.socket, context: ssl.SSLContext) -> None:
        """Perform the handshake. Raises ssl.SSLError, OSError; then the caller closes `plain`."""
        self.plain = plain
        self._engine = engine = TlsEngine(context, accepted=False)
        self._lock = threading.RLock()
        self._room = memoryview(bytearray(TLS_RECEIVED_BYTES))
        self._has_ended = False
        try:
            while not engine.do_handshake():
                plain.sendall(engine.take_encrypted())
                engine.feed(plain.recv(TLS_RECEIVED_BYTES))
        finally:
            plain.sendall(engine.take_encrypted())

    @property
    def peer_certificate(self) -> bytes:
        return self._engine.peer_certificate

    def recv_into(self, room: memoryview) -> int:
        """0 at the end of the connection. Raises ssl.SSLError for bytes that are not TLS; nothing
        more is received after them."""
        engine = self._engine
        while not self._has_ended:
            with self._lock:
                try:
                    count = engine.decrypt_into(room) if engine.has_received else 0
                except EOFError:
                    self._has_ended = True
                    break
                except ssl.SSLError:
                    self._has_ended = True
                    raise
            if count:
                return count
            count = self.plain.recv_into(self._room)
            with self._lock:
                engine.feed(self._room[:count])
        return 0

    def sendall(self, content: Bytes) -> None:
        """Callable by one thread at a time."""
        with self._lock:
            self._engine.encrypt(content)
            encrypted = self._engine.take_encrypted()
        self.plain.sendall(encrypted)

    def settimeout(self, seconds: float | None) -> None:
        self.plain.settimeout(seconds)

    def close(self) -> None:
        self.plain.close()


def certificate_digest(certificate: bytes) -> bytes:
    """The SHA-256 of a certificate in DER."""
    return hashlib.sha256(certificate).digest()


def verifying_context() -> ssl.SSLContext:
    """For a client of a server, whose certificate must name its host and lead to an authority that
    this machine, or the file SSL_CERT_FILE, trusts."""
    return _strict(ssl.create_default_context())


def client_context() -> ssl.SSLContext:
    """For a process that connects to a master. The master's certificate is not checked: after the
    handshake the caller must compare it with the expected one."""
    context = _strict(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def load_certificate(certificate: Path, key: Path) -> Certificate:
    """Read a certificate (with its chain) and its key from PEM files. Raises ConfigError."""
    for _ in range(3):  # the operator's tool may be renewing the files now
        before = _pem(certificate)
        context = _accepting_context()
        try:
            context.load_cert_chain(certificate, key, _no_password)
        except (ssl.SSLError, OSError) as error:
            reason = getattr(error, "reason", None) or error.strerror or str(error)
            raise ConfigError(
                f"cannot use the certificate {certificate} with the key {key}: {reason}"
            ) from None
        if _pem(certificate) == before:
            return Certificate(context, certificate_digest(_first_der(before, certificate)))
    raise ConfigError(f"the certificate {certificate} changed each time it was read")


def make_certificate() -> Certificate:
    """A self-signed certificate for a master, with its key in memory only."""
    # Importing takes 50 ms, and only masters make certificates
    from cryptography import x509  # noqa: PLC0415
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    key = ec.generate_private_key(ec.SECP256R1())
    now = dt.datetime.now(dt.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "diesel-fs master")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - _VALID)
        .not_valid_after(now + _VALID)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    context = _accepting_context()
    context.num_tickets = 0  # no session is resumed
    file = os.memfd_create("certificate", os.MFD_CLOEXEC)  # OpenSSL reads keys from a path only
    try:
        os.write(file, pem)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    der = certificate.public_bytes(serialization.Encoding.DER)
    return Certificate(context, certificate_digest(der))


def _accepting_context() -> ssl.SSLContext:
    return _strict(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))


def _strict(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    return context


def _pem(path: Path) -> bytes:
    """The first bytes of a PEM file. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            return file.read(_PEM_BYTES_MAX)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _first_der(pem: bytes, path: Path) -> bytes:
    """Raises ConfigError."""
    start = pem.find(_BEGIN)
    end = pem.find(_END, start)
    try:
        return ssl.PEM_cert_to_DER_cert(pem[start : end + len(_END)].decode("ascii"))
    except ValueError:
        raise ConfigError(f"{path} holds no certificate") from None


def _no_password() -> str:
    raise ConfigError(
        "the server's key is encrypted with a password", advice="use a key without a password"
    )
