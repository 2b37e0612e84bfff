"""The addresses at which the nodes of a task reach a master: F13, S5."""

import hashlib
import ipaddress
import socket
from collections.abc import Sequence

import pytest

from diesel_fs.errors import UsageError
from diesel_fs.peers.members import addresses
from diesel_fs.peers.members.addresses import advertised_address, listen_address
from diesel_fs.peers.members.options import TaskRequest
from diesel_fs.urls import HostPort, RepositoryUrl, parse_url
from tests.rows import each_row

FILE = parse_url("file:///data")


def listening_at(
    listen: str = "",
    advertise: str = "",
    *,
    rank: int = 0,
    world: int = 2,
    peers: Sequence[str] = (),
    url: RepositoryUrl = FILE,
) -> tuple[str, int]:
    request = TaskRequest(listen=listen, advertise=advertise, peers=tuple(peers), url=url.full_url)
    return listen_address(request, rank, world)


def test_F13_given_addresses_are_used() -> None:
    assert listening_at("127.0.0.5:80") == ("127.0.0.5", 80)
    assert listening_at("[::1]:0") == ("::1", 0)
    assert listening_at("0.0.0.0:9", "10.0.0.1") == ("0.0.0.0", 9)  # noqa: S104  # no socket is bound
    assert listening_at(peers=("10.0.0.1:5", "10.0.0.2:6"), rank=1) == ("10.0.0.2", 6)
    for bad in ("host", ":5", "a:b", "a:99999", "::1:5", "http://a:5", ""):
        with pytest.raises(UsageError):
            listening_at(bad)


def test_S5_a_single_node_listens_on_loopback_and_no_node_on_all_interfaces_by_default() -> None:
    alone, port = listening_at(world=1)
    assert (ipaddress.ip_address(alone).is_loopback, port) == (True, 0)
    assert listening_at(world=1) == (alone, 0)
    socket.create_server((alone, 0)).close()
    with pytest.raises(UsageError, match="no address is known") as refused:
        listening_at()
    assert "--listen" in refused.value.advice
    with pytest.raises(UsageError, match=r"0\.0\.0\.0"):
        listening_at("0.0.0.0:9")
    with pytest.raises(UsageError, match="2 nodes, and this is node 2"):
        listening_at(peers=("a:1", "b:2"), rank=2)


def test_F13_a_name_that_resolves_to_loopback_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Debian writes a machine's own name into /etc/hosts with such an address."""
    known = {"me": ["127.0.1.1"], "both": ["127.0.1.1", "10.1.2.3"]}

    def found(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        if host not in known:
            raise socket.gaierror(-2, "unknown")
        return [(socket.AF_INET, 1, 6, "", (each, port)) for each in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    with pytest.raises(UsageError, match=r"me is 127\.0\.1\.1 on this machine"):
        listening_at("me:5")
    assert listening_at("me:5", world=1) == ("127.0.1.1", 5)
    assert listening_at("both:5") == ("10.1.2.3", 5)
    with pytest.raises(UsageError, match="no address"):
        listening_at("other:5")
    for advertise in ("me", "me:7"):
        with pytest.raises(UsageError, match=r"me is 127\.0\.1\.1 on this machine") as refused:
            listening_at("10.0.0.1:5", advertise)
        assert "--advertise" in refused.value.advice
        assert listening_at("10.0.0.1:5", advertise, world=1) == ("10.0.0.1", 5)
    assert listening_at("10.0.0.1:5", "both:7") == ("10.0.0.1", 5)
    assert listening_at("10.0.0.1:5", "other:9") == ("10.0.0.1", 5)
    assert "--advertise other:9: other has no address" in caplog.text


@each_row(
    ("listen", "advertise", "peers"),
    [
        ("127.0.0.1:5", "", ()),
        ("[::1]:0", "", ()),
        ("10.0.0.1:5", "127.0.0.1", ()),
        ("10.0.0.1:5", "[::1]:7", ()),
        ("", "", ("127.0.0.1:5", "10.0.0.2:5")),
    ],
)
def test_F13_an_explicit_loopback_address_is_a_warning(
    listen: str, advertise: str, peers: Sequence[str], caplog: pytest.LogCaptureFixture
) -> None:
    """An address of one node of several, but not of all."""
    listening_at(listen, advertise, peers=peers)
    [warning] = caplog.messages
    assert "is this machine alone" in warning
    caplog.clear()
    listening_at(listen, advertise, peers=peers, world=1)
    listening_at("127.0.0.1:5", "10.0.0.1")
    for rank in range(2):
        listening_at(peers=("127.0.0.1:5", "[::1]:6"), rank=rank)
    assert not caplog.records


def test_F13_the_default_faces_the_server_or_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    server = parse_url("diesel://198.51.100.1:9300")
    redis = parse_url("s3://bucket/x?meta=redis://198.51.100.2:6379")
    reached: list[tuple[str, int]] = []

    def source_address(endpoint: tuple[str, int]) -> str:
        reached.append(endpoint)
        return "10.9.8.7"

    monkeypatch.setattr(addresses, "_source_address", source_address)
    assert listening_at(url=server) == listening_at(url=redis) == ("10.9.8.7", 0)
    assert reached == [("198.51.100.1", 9300), ("198.51.100.2", 6379)]
    monkeypatch.undo()
    with pytest.raises(UsageError, match="no address is known"):
        listening_at(url=parse_url("diesel://127.0.0.1:9300"))


@each_row(
    ("advertise", "listening", "address"),
    [
        ("", HostPort("10.0.0.1", 5), "10.0.0.1:5"),
        ("", HostPort("fe80::1", 5), "[fe80::1]:5"),
        ("host", HostPort("10.0.0.1", 5), "host:5"),
        ("host:7", HostPort("10.0.0.1", 5), "host:7"),
        ("host:0", HostPort("10.0.0.1", 5), "host:5"),
        ("[fe80::2]", HostPort("10.0.0.1", 5), "[fe80::2]:5"),
    ],
)
def test_F13_the_advertised_address(advertise: str, listening: HostPort, address: str) -> None:
    assert advertised_address(advertise, listening) == address
    for every in ("0.0.0.0", "::"):  # noqa: S104  # no socket is bound
        with pytest.raises(UsageError, match="all interfaces"):
            advertised_address("", HostPort(every, 5))


def test_F8_single_nodes_of_two_machines_are_different(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is rank 0 and replaces the other in the registry, which must not look like a restart on
    one machine."""
    own, _ = listening_at(world=1)
    real = hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", lambda boot: real(boot + b"of another machine"))
    other, _ = listening_at(world=1)
    assert other != own
    assert ipaddress.ip_address(other).is_loopback
