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
SIGNS_CERTIFICATES = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)
"""The uses of an authority's key. Python 3.13's clients refuse one without them."""


@dataclass(frozen=True, slots=True)
class Pair:
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
        own = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        self._identifier = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)
        certificate = (
            self._builder(self._name, self._key.public_key(), -DAY, 30 * DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(SIGNS_CERTIFICATES, critical=True)
            .add_extension(own, critical=False)
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
        name: str = "server",
        group: str | None = None,
    ) -> Pair:
        """A certificate for hosts (loopback without any).

        Its subject is `name`, of the organization `group`: to Kubernetes, a user and a group.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        parts = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
        if group is not None:
            parts.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
        subject = x509.Name(parts)
        names: list[x509.GeneralName] = []
        for host in hosts or ("localhost", "127.0.0.1"):
            if host[0].isdigit():
                names.append(x509.IPAddress(ip_address(host)))
            else:
                names.append(x509.DNSName(host))
        issuer = subject if self_signed else None
        builder = self._builder(subject, key.public_key(), start, end, issuer)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        if not self_signed:
            builder = builder.add_extension(self._identifier, critical=False)
        certificate = builder.sign(key if self_signed else self._key, hashes.SHA256())
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
