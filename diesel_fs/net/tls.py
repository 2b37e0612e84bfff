"""TLS between masters: certificates that are made at the start, and known by their digests.

Owned here: what a master's certificate is, and what both ends ask of TLS. Not owned: where digests
are registered (`membership.py`), and the proofs that cover them (`wire.py`). No authority signs
anything: who knows the digest of a certificate knows all that there is to know of it, so nobody
looks at the names and dates in it. The key never lies on a disk. Any thread.
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
_VALID = dt.timedelta(days=3650)  # nobody looks at it, but something must stand there


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a master speaks TLS with, and the SHA-256 that others know it by."""

    context: ssl.SSLContext = field(repr=False)
    digest: bytes


def make_certificate() -> Certificate:
    """A new key and a certificate that it has signed itself."""
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
    file = os.memfd_create("certificate", os.MFD_CLOEXEC)  # OpenSSL reads it from a path alone
    try:
        os.write(file, pem)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return Certificate(
        context, certificate_digest(certificate.public_bytes(serialization.Encoding.DER))
    )


def certificate_digest(certificate: bytes) -> bytes:
    """What others know a certificate by, which is given as DER."""
    return hashlib.sha256(certificate).digest()


def client_context() -> ssl.SSLContext:
    """For connections whose other end's certificate the caller compares with what it expects, right
    after the handshake: no chain, no name and no date is checked here."""
    context = _strict(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _strict(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    return context
