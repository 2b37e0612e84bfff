"""S2, S3, S4: bad certificates are refused, logins are bound to the certificate, no fall-back."""

import hashlib
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from diesel_fs.errors import ConfigError, MetadataError, PermissionDenied
from diesel_fs.net.client import ServerLink
from diesel_fs.net.tls import load_certificate
from diesel_fs.urls import parse_url

from ..rows import each_row
from ..waiting import wait_until
from .between import Between
from .certificates import DAY, Authority, Pair
from .fake_server import ME, ThreadedServer


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(autouse=True)
def trusted(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))


def serving(pair: Pair) -> ThreadedServer:
    return ThreadedServer(certificate=load_certificate(pair.certificate, pair.key))


def test_payloads_over_TLS_and_connections_that_are_used_again(authority: Authority) -> None:
    with serving(authority.issue()) as server:
        assert server.url.startswith("diesel+tls://")
        link = server.link()
        peers = {str(link.call({"do": "echo"}).message["peer"]) for _ in range(5)}
        assert len(peers) == 1
        body = bytes(range(256)) * 20_000
        for size in (0, 1, 16_384, 100_000, len(body)):
            parts = [body[:7], body[7:size]] if size > 7 else [body[:size]]
            assert link.call({"do": "echo"}, parts).payload.tobytes() == body[:size]
        room = memoryview(bytearray(len(body)))
        link.call({"do": "echo"}, [body], room=room)
        assert room == body
        assert len(list(link.stream({"do": "count", "n": 100}))) == 100
        link.close_idle()
        assert link.call({"do": "echo"}, [b"x"], may_repeat=False).payload.tobytes() == b"x"


@each_row(
    ("issue", "words", "advice"),
    [
        (lambda ours, _: ours.issue(start=-3 * DAY, end=-DAY), "expired", "renewed"),
        (lambda ours, _: ours.issue(start=DAY, end=3 * DAY), "not yet valid", "clock"),
        (lambda ours, _: ours.issue(self_signed=True), "self-signed|self signed", "SSL_CERT_FILE"),
        (lambda ours, _: ours.issue("x.example"), "mismatch|not valid for", "name the server as"),
        (lambda _, other: other.issue(), "signature|issuer|verify", "SSL_CERT_FILE"),
    ],
)
def test_S4_a_bad_certificate_is_refused_with_the_reason(
    issue: Callable[[Authority, Authority], Pair],
    words: str,
    advice: str,
    authority: Authority,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(issue(authority, Authority(tmp_path / "other", "Authority"))) as server:
        begun = time.monotonic()
        with pytest.raises(MetadataError, match=words) as caught:
            server.link().call({"do": "echo"})
        assert caught.value.exit_code == 14
        assert advice in caught.value.advice
        assert time.monotonic() - begun < 3, "it was tried again and again"
        assert not server.cells.get("diesel_logins_total")
        if "name" not in advice:  # which the client learns after the handshake
            wait_until(lambda: any("no TLS" in line for line in caplog.messages))


def test_S3_no_old_TLS(authority: Authority) -> None:
    with serving(authority.issue()) as server:
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.load_verify_locations(authority.path)
        with pytest.warns(DeprecationWarning, match="deprecated"):
            old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        client = socket.create_connection(("127.0.0.1", server.port), 5)
        with client, pytest.raises((ssl.SSLError, OSError)):
            old.wrap_socket(client, server_hostname="localhost")


def test_S3_no_fall_back(authority: Authority) -> None:
    with serving(authority.issue()) as server:
        plain = ServerLink(parse_url(f"diesel://{server.place}"), ME, open_s=0.5)
        with pytest.raises(MetadataError, match=re.escape("diesel+tls://")):
            plain.call({"do": "echo"})
    with (
        ThreadedServer() as server,
        pytest.raises(MetadataError, match="closed the connection during the TLS handshake"),
    ):
        ServerLink(parse_url(f"diesel+tls://{server.place}"), ME).call({"do": "echo"})


@pytest.fixture
def between(authority: Authority) -> Iterator[tuple[ThreadedServer, Between]]:
    """The client trusts the proxy's certificate."""
    trusted = authority.issue(), authority.path
    with serving(authority.issue()) as server, Between(server.port, trusted) as middle:
        yield server, middle


def test_S2_S3_a_man_in_the_middle_cannot_log_in(between: tuple[ThreadedServer, Between]) -> None:
    """The signature binds the certificate that was seen."""
    server, middle = between
    with pytest.raises(PermissionDenied):
        ServerLink(parse_url(f"diesel+tls://localhost:{middle.port}"), ME).call({"do": "echo"})
    assert server.cells.get("diesel_refusals_total", "login") == 1
    assert server.link().call({"do": "echo"})


def test_a_connection_that_breaks_early_is_made_again(
    between: tuple[ThreadedServer, Between],
) -> None:
    """A stopping server causes this."""
    _, middle = between
    url = parse_url(f"diesel+tls://localhost:{middle.port}")
    middle.cuts = 2
    with pytest.raises(PermissionDenied):  # the third got as far as the login
        ServerLink(url, ME).call({"do": "echo"})
    assert middle.cuts == 0
    middle.cuts = 1000
    with pytest.raises(MetadataError, match="closed the connection during the TLS handshake"):
        ServerLink(url, ME, open_s=1.0).call({"do": "echo"})


def test_the_binding_is_the_first_certificate(authority: Authority, tmp_path: Path) -> None:
    pair = authority.issue()
    chain = tmp_path / "chain.pem"
    chain.write_bytes(pair.certificate.read_bytes() + authority.path.read_bytes())
    der = ssl.PEM_cert_to_DER_cert(pair.certificate.read_text())
    assert load_certificate(chain, pair.key).digest == hashlib.sha256(der).digest()
    with ThreadedServer(certificate=load_certificate(chain, pair.key)) as server:
        assert server.link().call({"do": "echo"})


def test_unloadable_certificates_are_refused(authority: Authority, tmp_path: Path) -> None:
    """An encrypted key is an error, too, without a prompt."""
    pair, other = authority.issue(), authority.issue()
    empty, locked = tmp_path / "empty", tmp_path / "locked.key"
    empty.touch()
    pem, encryption = serialization.Encoding.PEM, serialization.BestAvailableEncryption(b"secret")
    key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    locked.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, encryption))
    for certificate, key_file, words in [
        (tmp_path / "none", pair.key, None),
        (pair.certificate, tmp_path / "none", None),
        (pair.certificate, other.key, None),
        (empty, pair.key, None),
        (pair.key, pair.key, None),
        (tmp_path, pair.key, None),
        (pair.certificate, locked, "encrypted"),
    ]:
        with pytest.raises(ConfigError, match=words):
            load_certificate(certificate, key_file)


def test_a_new_certificate_is_for_new_connections(authority: Authority) -> None:
    first, second = authority.issue(), authority.issue()
    with serving(first) as server:
        link = server.link()
        link.call({"do": "echo"})
        assert server._listener is not None
        server._listener.certificate = load_certificate(second.certificate, second.key)
        assert link.call({"do": "echo"})  # the existing connection goes on
        link.close_idle()
        assert link.call({"do": "echo"})
