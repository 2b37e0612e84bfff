"""The server's certificate: read, checked, read again when the operator says so.

Owned here: what the server asks of TLS, and what a login on it is bound to. Not owned: handshakes
(`listener.py`). A connection keeps the certificate that it began with.
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
    """A certificate that can be served, and SHA-256 of it."""

    context: ssl.SSLContext
    binding: bytes


def load_certificate(certificate: Path, key: Path) -> ServerCertificate:
    """The certificate (and its chain) and its key in two PEM files. Raises ConfigError."""
    for _ in range(3):  # somebody may be renewing it at this moment
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
    raise ConfigError(f"{certificate} changes all the time")


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_PEM_BYTES_MAX)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _first(pem: bytes, path: Path) -> bytes:
    """The server's own certificate, as bytes."""
    start = pem.find(_BEGIN)
    end = pem.find(_END, start)
    try:
        text = pem[start : end + len(_END)].decode("ascii")
        return ssl.PEM_cert_to_DER_cert(text)
    except ValueError:
        raise ConfigError(f"{path} holds no certificate") from None


def _no_password() -> str:
    raise ConfigError("the server's key is locked by a password", advice="use one without")
