"""Loads the server's TLS certificate and key from their files.

The server loads them at its start and again at SIGHUP; a connection keeps the certificate that it
began with. Logins on TLS are bound to the SHA-256 of the certificate (`WIRE.md`, section 3).
"""

import hashlib
import ssl
from dataclasses import dataclass
from pathlib import Path

from diesel_fs.errors import ConfigError

_PEM_BYTES_MAX = 1 << 20
_BEGIN, _END = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"


@dataclass(frozen=True, slots=True)
class ServerCertificate:
    """A TLS context with the certificate, and the certificate's SHA-256."""

    context: ssl.SSLContext
    binding: bytes


def load_certificate(certificate: Path, key: Path) -> ServerCertificate:
    """The certificate (with its chain) and its key, from two PEM files. Raises ConfigError."""
    for _ in range(3):  # the operator's tool may be renewing the files at this moment
        before = _content(certificate)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(certificate, key, _no_password)
        except (ssl.SSLError, OSError) as error:
            reason = getattr(error, "reason", None) or error.strerror or str(error)
            raise ConfigError(
                f"cannot use the certificate {certificate} with the key {key}: {reason}"
            ) from None
        if _content(certificate) == before:
            return ServerCertificate(context, hashlib.sha256(_first(before, certificate)).digest())
    raise ConfigError(f"the certificate {certificate} changed each time it was read")


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_PEM_BYTES_MAX)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _first(pem: bytes, path: Path) -> bytes:
    """The first certificate of a PEM file, which is the server's own, as DER."""
    start = pem.find(_BEGIN)
    end = pem.find(_END, start)
    try:
        text = pem[start : end + len(_END)].decode("ascii")
        return ssl.PEM_cert_to_DER_cert(text)
    except ValueError:
        raise ConfigError(f"{path} holds no certificate") from None


def _no_password() -> str:
    raise ConfigError(
        "the server's key is encrypted with a password", advice="use a key without a password"
    )
