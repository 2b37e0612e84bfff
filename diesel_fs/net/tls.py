"""TLS between masters: each makes a certificate when it starts, and others know it by its SHA-256.

The digest travels with the master's registration (`peers/membership.py`), and the proofs of a
handshake cover it. So no authority signs a certificate, and nobody checks the names and dates in
it. The private key is never written to a disk. Safe from any thread.
"""

import datetime as dt
import hashlib
import os
import ssl
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "diesel-fs master")])
_VALID = dt.timedelta(days=3650)  # nobody checks it, but the format demands dates


@dataclass(frozen=True, slots=True)
class Certificate:
    """The context with which a master accepts TLS, and the SHA-256 of its certificate."""

    context: ssl.SSLContext = field(repr=False)
    digest: bytes


def make_certificate() -> Certificate:
    """Make a key and a certificate that this key has signed."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_NAME)
        .issuer_name(_NAME)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _VALID)
        .not_valid_after(now + _VALID)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    context = _strict(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    context.num_tickets = 0  # connections last; none is resumed
    file = os.memfd_create("certificate", os.MFD_CLOEXEC)  # OpenSSL reads it from a path only
    try:
        os.write(file, pem)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return Certificate(
        context, certificate_digest(certificate.public_bytes(serialization.Encoding.DER))
    )


def certificate_digest(certificate: bytes) -> bytes:
    """The SHA-256 of a certificate, given as DER."""
    return hashlib.sha256(certificate).digest()


def client_context() -> ssl.SSLContext:
    """A context that checks no chain, name or date: right after the handshake, the caller must
    compare the other end's certificate with the one it expects."""
    context = _strict(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _strict(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    return context
