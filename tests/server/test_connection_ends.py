"""When a client ends its TLS connection, in any way and at any byte, the server forgets it at once
and goes on serving the others.
"""

import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from diesel_fs.errors import DieselError
from diesel_fs.net import frames as wire
from diesel_fs.net.client import ServerLink
from diesel_fs.net.messages import Message
from diesel_fs.net.tls import certificate_digest, load_certificate
from diesel_fs.remote.open import open_repository
from diesel_server import limits

from ..net.connection_ends import (
    ENDS,
    PATIENCE_S,
    RawTls,
    end_one,
    ignoring_program,
    promptly,
    rows,
    secured,
)
from ..net.connection_ends import unexpected_eof as unexpected_eof
from ..waiting import wait_until
from .certificates import Authority
from .fake_server import ME, ThreadedServer
from .program import Server, new_repository
from .test_hostile import login

EACH = 2  # connections of each kind

REQUEST: Message = {"id": 1, "do": "echo", "text": "x" * 50}
HEAD = wire.frame(REQUEST, wire.REQUEST_LIMITS, 1000)
SLEEP: Message = {"id": 1, "do": "sleep", "seconds": 3600}


def greeted(port: int) -> RawTls:
    raw = secured(port)
    raw.send(wire.greeting())
    raw.exactly(wire.GREETING_BYTES)
    return raw


def logged_in(port: int) -> RawTls:
    raw = greeted(port)
    binding = certificate_digest(raw.peer_certificate)
    raw.send(login(raw.exactly(wire.NONCE_BYTES), binding))
    head, _ = wire.parse_lengths(raw.exactly(wire.LENGTHS_BYTES), wire.ANSWER_LIMITS)
    assert wire.parse_head(raw.exactly(head), wire.ANSWER_LIMITS)["user"] == ME.user
    return raw


ROWS = rows(
    {
        "after the TLS handshake": (secured, b""),
        "within the greeting": (secured, wire.greeting()[:7]),
        "after the greeting": (greeted, b""),
        "within the lengths of the login": (greeted, bytes(3)),
        "after the login": (logged_in, b""),
        "between lengths and head": (logged_in, HEAD[: wire.LENGTHS_BYTES]),
        "within the head": (logged_in, HEAD[:40]),
        "between head and payload": (logged_in, HEAD),
        "within the payload": (logged_in, HEAD + bytes(400)),
        "while a request is under way": (logged_in, wire.frame(SLEEP, wire.REQUEST_LIMITS)),
    }
)


@pytest.fixture
def pair_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    authority = Authority(tmp_path / "authority")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
    pair = authority.issue()
    return pair.certificate, pair.key


def test_each_end_ends_its_connection_and_no_other(
    unexpected_eof: str,
    pair_files: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A client that goes away, like a probe of the port, is not logged."""
    for name in ("GREETING_S", "LOGIN_S", "FRAME_S", "IDLE_S"):
        monkeypatch.setattr(limits, name, 3600.0)
    with ThreadedServer(certificate=load_certificate(*pair_files)) as server, ExitStack() as opened:
        link = server.link(open_s=PATIENCE_S)
        link.call({"do": "echo"})
        for name, begin, last, way in ROWS:
            before = server.cells.get("diesel_connections_total")
            for _ in range(EACH):
                one = partial(end_one, server.port, begin, last, way)
                opened.enter_context(promptly(name, one))
            try:
                _assert_alone(server, link, before)
            except (AssertionError, DieselError) as error:
                pytest.fail(f"{name}: {error}")
        wait_until(lambda: server.cells.get("diesel_requests_under_way") == 0, PATIENCE_S)
        begun_s = time.process_time()
        time.sleep(0.2)
        assert time.process_time() - begun_s < 0.1, "the server does not rest"
        link.close()
    refused = [line for line in caplog.messages if "refused" in line]
    assert all("UNEXPECTED_MESSAGE" in line for line in refused), refused  # close_notify alone


def _assert_alone(server: ThreadedServer, link: ServerLink, before: float) -> None:
    """Assert that the connection of the link is the only one left after the connections of a row,
    and is served. There were `before` connections earlier."""
    cells = server.cells
    wait_until(lambda: cells.get("diesel_connections_total") == before + EACH, PATIENCE_S)
    wait_until(lambda: cells.get("diesel_connections") == 1, PATIENCE_S)
    for _ in range(3):
        assert link.call({"do": "echo"}, [b"x"], deadline_s=PATIENCE_S).payload.tobytes() == b"x"


def test_the_workers_outlive_each_end(pair_files: tuple[Path, Path], tmp_path: Path) -> None:
    """The program runs as with Debian's Python, which ignores an unexpected end."""
    url = (tmp_path / "store").as_uri()
    root = new_repository(url)["root"]
    certificate, key = map(str, pair_files)
    with Server(
        tmp_path, "--store", url, "--tls-cert", certificate, "--tls-key", key,
        workers=2, environment=ignoring_program(tmp_path / "site"),
    ) as server, ExitStack() as opened:  # fmt: skip
        workers = sorted(server.workers())
        for end in ENDS:
            for _ in range(100):
                opened.enter_context(end_one(server.port, secured, b"", end))
        address = f"diesel+tls://localhost:{server.port}"
        for _ in range(10):  # of both workers
            with open_repository(address, root, create=False) as repository:
                assert repository.datasets() == []
        assert sorted(server.workers()) == workers
        for word in ("hangs", "again", "Traceback"):
            assert word not in server.log
