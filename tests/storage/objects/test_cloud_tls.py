"""Buckets behind TLS (FAULTS, O19 and S3): which certificates are trusted, and which redirects
are followed."""

import ipaddress
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.storage.objects.s3_server import credentials, without_proxies
from tests.storage.objects.scripted_s3 import ScriptedS3
from tests.storage.objects.scripted_store import URL

TREE = Path(__file__).resolve().parents[3]
OPEN = f"""
from diesel_fs.errors import DieselError
from diesel_fs.storage.objects.cloud.store import open_cloud
try:
    open_cloud({URL!r})
except DieselError as error:
    print(type(error).__name__, error)
"""


def make_certificate(file: Path) -> None:
    """Write a self-signed certificate for the loopback address, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "loopback")])
    now = datetime.now(UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8
    secret = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM) + secret)


class Redirecting(ThreadingHTTPServer):
    """A TLS server that redirects every request, and counts them."""

    daemon_threads = True
    elsewhere = ""
    asked = 0

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: clients that do not trust the certificate hang up."""


class _Redirect(BaseHTTPRequestHandler):
    server: Redirecting

    def do_GET(self) -> None:
        self.server.asked += 1
        self.send_response(307)
        self.send_header("Location", self.server.elsewhere + self.path)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def redirecting(tmp_path: Path) -> Iterator[Redirecting]:
    make_certificate(tmp_path / "loopback.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "loopback.pem")
    with Redirecting(("127.0.0.1", 0), _Redirect) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


@pytest.mark.parametrize(
    ("trusted", "complaint"), [(True, "from https to http"), (False, "certificate is not trusted")]
)
def test_O19_https_does_not_become_http(
    redirecting: Redirecting, tmp_path: Path, trusted: bool, complaint: str
) -> None:
    """An untrusted certificate is refused, too. Neither is retried."""
    environ = without_proxies() | credentials(f"https://127.0.0.1:{redirecting.server_port}")
    environ |= {"PYTHONPATH": str(TREE)}
    if trusted:
        environ["SSL_CERT_FILE"] = os.fspath(tmp_path / "loopback.pem")
    with ScriptedS3() as plain:
        redirecting.elsewhere = plain.endpoint
        command = [sys.executable, "-c", OPEN]
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=60, check=True
        )
        assert plain.asked == []
    assert done.stdout.startswith("PermanentStoreError ")
    assert complaint in done.stdout
    assert redirecting.asked == trusted
