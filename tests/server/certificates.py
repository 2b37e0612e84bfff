"""Makes certificates for tests, good and bad ones, and the authorities that sign them."""

import datetime as dt
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = dt.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, as files."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates; `path` is its own."""

    def __init__(self, folder: Path, name: str = "Authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._made = 0
        self.path = folder / "authority.pem"
        certificate = (
            self._builder(self._name, self._key.public_key(), -DAY, 30 * DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def _builder(
        self,
        subject: x509.Name,
        public: ec.EllipticCurvePublicKey,
        start: dt.timedelta,
        end: dt.timedelta,
        issuer: x509.Name | None = None,
    ) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer or self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + start)
            .not_valid_after(now + end)
        )

    def issue(
        self,
        *hosts: str,
        start: dt.timedelta = -DAY,
        end: dt.timedelta = 30 * DAY,
        self_signed: bool = False,
    ) -> Pair:
        """A server's certificate for hosts (loopback without any)."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])
        names: list[x509.GeneralName] = []
        for host in hosts or ("localhost", "127.0.0.1"):
            if host[0].isdigit():
                names.append(x509.IPAddress(ip_address(host)))
            else:
                names.append(x509.DNSName(host))
        issuer = subject if self_signed else None
        certificate = (
            self._builder(subject, key.public_key(), start, end, issuer)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(key if self_signed else self._key, hashes.SHA256())
        )
        self._made += 1
        pair = Pair(self._folder / f"{self._made}.pem", self._folder / f"{self._made}.key")
        pair.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        pair.key.touch(mode=0o600)
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return pair
