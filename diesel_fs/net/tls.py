"""TLS: the contexts of servers, clients and masters, and certificates.

A server's certificate comes from files (`load_certificate`), and its clients check it against the
authorities that they trust. A master of a task makes its own certificate when it starts, with a key
that is never written to a disk; its SHA-256 travels with the master's registration
(`peers/membership.py`). So no authority signs a master's certificate, and nobody checks the names
and dates in it.

Logins and handshakes sign the SHA-256 of the certificate (`WIRE.md`, section 3). Safe from any
thread.
"""

import datetime as dt
import hashlib
import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ConfigError

_PEM_BYTES_MAX = 1 << 20
_BEGIN, _END = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"
_VALID = dt.timedelta(days=3650)  # nobody checks it, but the format demands dates


@dataclass(frozen=True, slots=True)
class Certificate:
    """The context with which a server or master accepts TLS, and the SHA-256 of its certificate."""

    context: ssl.SSLContext = field(repr=False)
    digest: bytes


def certificate_digest(certificate: bytes) -> bytes:
    """The SHA-256 of a certificate, given as DER."""
    return hashlib.sha256(certificate).digest()


def verifying_context() -> ssl.SSLContext:
    """The context of a server's client: the server's certificate must name its host and lead to an
    authority that this machine trusts, or that is in the file that SSL_CERT_FILE names."""
    return _strict(ssl.create_default_context())


def client_context() -> ssl.SSLContext:
    """The context of a master's client, which checks no chain, name or date: right after the
    handshake, the caller must compare the other end's certificate with the one it expects."""
    context = _strict(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def load_certificate(certificate: Path, key: Path) -> Certificate:
    """The certificate (with its chain) and its key, from two PEM files. Raises ConfigError."""
    for _ in range(3):  # the operator's tool may be renewing the files at this moment
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
    """Make a key and a certificate that this key has signed."""
    # Imports for 50 ms, and only masters make certificates
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
    context.num_tickets = 0  # connections last; none is resumed
    file = os.memfd_create("certificate", os.MFD_CLOEXEC)  # OpenSSL reads it from a path only
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
    try:
        with path.open("rb") as file:
            return file.read(_PEM_BYTES_MAX)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _first_der(pem: bytes, path: Path) -> bytes:
    """The first certificate of a PEM file, which is the server's own, as DER."""
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
