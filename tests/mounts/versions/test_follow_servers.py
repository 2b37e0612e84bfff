"""Mounts that follow a dataset on a server, or with its metadata in a Redis."""

import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from diesel_fs.mounts import umount
from diesel_fs.system.syscalls import cached_bytes
from tests.mounts.observed import FILE_BYTES, mounted, noise
from tests.mounts.versions.followed_dataset import (
    FILES,
    POLL_INTERVAL_S,
    FollowedMount,
    begin,
    tried,
)
from tests.server.program import Server
from tests.server.server_with_redis import ServerWithRedis
from tests.storage.metadata.redis_servers import RedisServer
from tests.waiting import wait_until

pytestmark = pytest.mark.fuse


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerWithRedis]:
    made = ServerWithRedis(tmp_path_factory.mktemp("behind"), workers=1)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def prepared(server: ServerWithRedis, tmp_path: Path, session: str) -> FollowedMount:
    server.empty()
    for left in leases(server):  # of mounts that were ended by force
        left.unlink()
    return begin(tmp_path, session, server.url, server.credentials["root"])


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return cache


def leases(server: ServerWithRedis) -> list[Path]:
    return [*server.store.glob("datasets/*/leases/*")]


def check_pages_stay(prepared: FollowedMount, number: int) -> None:
    assert (prepared.at / "kept").read_bytes() == FILES["kept"]
    prepared.change({f"0newer{number}": b"0"})
    with prepared.served_by_page_cache():
        assert (prepared.at / "kept").read_bytes() == FILES["kept"]


def check_following(prepared: FollowedMount) -> None:
    at = prepared.at
    assert (at / "kept").read_bytes() == FILES["kept"]
    node = os.stat(at / "kept").st_ino
    held = os.open(at / "changed", os.O_RDONLY)
    prepared.change({"0new": b"0", "changed": noise(90)}, gone=("gone",))
    if not prepared.is_native:
        assert os.stat(at / "kept").st_ino == node
        tried(lambda number: check_pages_stay(prepared, number))
    assert os.pread(held, FILE_BYTES + 1, 0) == FILES["changed"]
    assert (at / "changed").read_bytes() == noise(90)
    assert (at / "0new").read_bytes() == b"0"
    assert not (at / "gone").exists()
    assert (at / "left/inner/f").read_bytes() == FILES["left/inner/f"]
    os.close(held)


def test_a_mount_follows_through_a_server_that_is_killed_and_comes_back(
    prepared: FollowedMount, server: ServerWithRedis
) -> None:
    with mounted(prepared.request):
        held = os.open(prepared.at / "d/gone", os.O_RDONLY)
        check_following(prepared)
        prepared.change({"1new": b"1"}, gone=("d/gone",))
        wait_until(lambda: len(leases(server)) == 2)
        (crashed,) = server.servers
        crashed.kill()
        server.servers.clear()
        with (prepared.at / "kept").open("rb") as kept:
            if cached_bytes(kept.fileno(), 0, FILE_BYTES) == FILE_BYTES:  # all pages are there
                assert kept.read() == FILES["kept"]
        assert sorted(os.listdir(prepared.at / "d")) == ["kept"]
        server.add(f"127.0.0.1:{crashed.port}")
        prepared.change({"2new": b"2", "kept": noise(91)})
        assert (prepared.at / "2new").read_bytes() == b"2"
        assert (prepared.at / "kept").read_bytes() == noise(91)
        assert os.pread(held, FILE_BYTES + 1, 0) == FILES["d/gone"]
        os.close(held)
        prepared.wait_for_retirement()
        wait_until(lambda: len(leases(server)) == 1)
        server.redis.kill()
        try:
            time.sleep(10 * POLL_INTERVAL_S)
            assert (prepared.at / "d/kept").read_bytes() == FILES["d/kept"]
        finally:
            server.redis.start()
        prepared.change({"3new": b"3"})
        assert prepared.warnings("cannot follow") <= 2
        assert prepared.stats()["residency"]
        umount(prepared.at)
    wait_until(lambda: not leases(server))


@pytest.mark.only_session("native", "kernel", "pyfuse3")
def test_a_purge_by_the_server_spares_the_versions_that_a_mount_serves(
    prepared: FollowedMount, server: ServerWithRedis
) -> None:
    with mounted(prepared.request):
        held = os.open(prepared.at / "changed", os.O_RDONLY)
        prepared.change({"changed": noise(92)}, gone=("gone",))
        with prepared.connected() as dataset:
            dataset.purge(grace_s=0)
        assert os.pread(held, FILE_BYTES + 1, 0) == FILES["changed"]
        os.close(held)
        prepared.wait_for_retirement()
        wait_until(lambda: len(leases(server)) == 1)
        with prepared.connected() as dataset:
            dataset.purge(grace_s=0)
        assert (prepared.at / "changed").read_bytes() == noise(92)
        assert (prepared.at / "kept").read_bytes() == FILES["kept"]


@pytest.mark.only_session("native", "kernel", "pyfuse3")
def test_umount_waits_for_no_server(prepared: FollowedMount, server: ServerWithRedis) -> None:
    """The mount may be waiting for the server's answer."""
    (stopped,) = server.servers
    with mounted(prepared.request):
        assert (prepared.at / "kept").read_bytes() == FILES["kept"]
        for pid in stopped.workers():
            os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(0.3)
            started_s = time.monotonic()
            umount(prepared.at)
            assert time.monotonic() - started_s < 5
        finally:
            for pid in stopped.workers():
                os.kill(pid, signal.SIGCONT)


# Fetched bytes ------------------------------------------------------------------------------------


@pytest.mark.only_session("kernel")
def test_a_node_fetches_a_snapshot_from_a_server_once(
    server: ServerWithRedis,
    prepared: FollowedMount,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with prepared.connected() as dataset:
        for number in range(3000):
            dataset.put(b"", f"many/{number:05}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another node's"))
    stores = ("--store", server.store.as_uri(), "--meta", server.redis.url)
    sent = []
    with Server(tmp_path / "counting", *stores, "--metrics", "0") as counting:
        wait_until(lambda: "metrics at" in counting.log)
        request = replace(prepared.request, url=counting.url, follow=False)
        for _ in range(2):
            before = sent_bytes(counting)
            with mounted(request):
                assert len(os.listdir(prepared.at / "many")) == 3000
                sent.append(sent_bytes(counting) - before)
    assert sent[0] > 50_000 > 20 * sent[1]


def sent_bytes(server: Server) -> int:
    where = f"http://127.0.0.1:{server.metrics_port}/metrics"
    with urllib.request.urlopen(where, timeout=10) as answer:
        found = re.search(r"^diesel_sent_bytes_total (\S+)$", answer.read().decode(), re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis", {"appendonly": "yes"}) as made:
        yield made


@pytest.mark.only_session("kernel")
@pytest.mark.usefixtures("own_cache")
def test_a_mount_follows_with_its_metadata_in_a_redis(
    redis: RedisServer, tmp_path: Path, session: str
) -> None:
    prepared = begin(tmp_path, session, f"{(tmp_path / 'store').as_uri()}?meta={redis.url}")
    with mounted(prepared.request):
        check_following(prepared)
        redis.kill()
        assert (prepared.at / "d/kept").read_bytes() == FILES["d/kept"]
        redis.start()
        prepared.change({"1new": b"1"})
        assert not prepared.warnings("cannot follow")
