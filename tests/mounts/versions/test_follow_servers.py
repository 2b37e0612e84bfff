"""Mounts that follow a dataset on a server, in a bucket, or with its metadata in a Redis."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from diesel_fs.errors import ConflictError, ForeignError, MetadataError
from diesel_fs.mounts import mount, umount
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
from tests.storage.conftest import s3 as s3
from tests.storage.metadata.redis_servers import RedisServer
from tests.storage.objects.s3_server import Server as S3Server
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
    """A dataset on the server, not mounted yet."""
    server.empty()
    for left in leases(server):  # of mounts that were ended by force
        left.unlink()
    return begin(tmp_path, session, server.url, server.credentials["root"])


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test, as a new node has."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return cache


def leases(server: ServerWithRedis) -> list[Path]:
    """The leases in the server's store."""
    return [*server.store.glob("datasets/*/leases/*")]


def check_pages_stay(prepared: FollowedMount, number: int) -> None:
    assert (prepared.at / "kept").read_bytes() == FILES["kept"]
    prepared.change({f"0newer{number}": b"0"})
    with prepared.served_by_page_cache():
        assert (prepared.at / "kept").read_bytes() == FILES["kept"]


def check_following(prepared: FollowedMount) -> None:
    """Open files stay, names lead to the new version, pages of unchanged files stay."""
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
    """Meanwhile files in memory can be read. The mount has a lease on each version that it
    serves."""
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
        wait_until(lambda: prepared.retired_versions() == [])
        wait_until(lambda: len(leases(server)) == 1)
        if prepared.request.session != "pyfuse3":
            assert prepared.stats()["residency"]
        umount(prepared.at)
    wait_until(lambda: not leases(server))


@pytest.mark.only_session("native", "kernel")
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
        wait_until(lambda: prepared.retired_versions() == [])
        wait_until(lambda: len(leases(server)) == 1)
        with prepared.connected() as dataset:
            dataset.purge(grace_s=0)
        assert (prepared.at / "changed").read_bytes() == noise(92)
        assert (prepared.at / "kept").read_bytes() == FILES["kept"]


@pytest.mark.only_session("native", "kernel")
def test_a_redis_that_is_away_changes_nothing(
    prepared: FollowedMount, server: ServerWithRedis
) -> None:
    """The mount follows again afterwards, and logs at most once that it could not."""
    with mounted(prepared.request):
        assert (prepared.at / "kept").read_bytes() == FILES["kept"]
        server.redis.kill()
        try:
            time.sleep(10 * POLL_INTERVAL_S)
            assert (prepared.at / "d/kept").read_bytes() == FILES["d/kept"]
        finally:
            server.redis.start()
        prepared.change({"0new": b"0"})
        assert prepared.warnings("cannot follow") <= 1
        assert prepared.stats()["residency"]


@pytest.mark.only_session("native", "kernel")
def test_umount_does_not_wait_for_a_stopped_server(
    prepared: FollowedMount, server: ServerWithRedis
) -> None:
    """Also while the mount waits for its answer."""
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


# What is fetched ----------------------------------------------------------------------------------


@pytest.mark.only_session("kernel")
def test_a_node_fetches_a_snapshot_from_a_server_once(
    server: ServerWithRedis,
    prepared: FollowedMount,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second mount only asks which version is current."""
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
    """The bytes that a server has sent to all clients so far."""
    where = f"http://127.0.0.1:{server.metrics_port}/metrics"
    with urllib.request.urlopen(where, timeout=10) as answer:
        found = re.search(r"^diesel_sent_bytes_total (\S+)$", answer.read().decode(), re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


@pytest.fixture
def bucket(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix in a bucket that this process and its mounts can reach."""
    for name in [name for name in os.environ if "proxy" in name.lower()]:
        monkeypatch.delenv(name)
    for name, text in s3.environ.items():
        monkeypatch.setenv(name, text)
    return s3.place()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis", {"appendonly": "yes"}) as made:
        yield made


PUTS = """if True:
    import ast, sys
    from diesel_fs.storage.objects.cloud import direct
    from diesel_fs.client.dataset import connect
    from diesel_fs.format.object_names import snapshot_prefix
    from diesel_fs.repository.local import LocalRepository
    direct.open_buckets_directly()
    url, what = sys.argv[1:]
    if what == "put":
        files, gone = ast.literal_eval(sys.stdin.read())
        with connect("ds", url, create=True) as dataset:
            for path in gone:
                dataset.delete(path, recursive=True)
            for path, content in files.items():
                dataset.put(content, path)
                dataset.flush()
        with connect("ds", url) as dataset:
            print(dataset.version)
    else:
        with LocalRepository.open(url) as repository:
            prefix = snapshot_prefix(repository.dataset("ds").identity)
            for name in list(repository.objects.names(prefix)):
                repository.objects.delete(name)
                repository.objects.put(name, [b"damaged"])
                print(name)
"""


class InBucket(FollowedMount):
    """A dataset in a bucket. Other processes write it, since obstore must not be in one that
    forks."""

    def put(self, files: dict[str, bytes], gone: tuple[str, ...] = ()) -> int:
        return int(self.tell("put", repr((files, gone))))

    def tell(self, what: str, given: str = "") -> str:
        command = [sys.executable, "-c", PUTS, self.url, what]
        return subprocess.run(
            command, input=given, stdout=subprocess.PIPE, text=True, check=True, timeout=60
        ).stdout


@pytest.mark.deep
@pytest.mark.only_session("kernel")
@pytest.mark.usefixtures("own_cache")
def test_a_mount_follows_in_a_bucket_whose_metadata_are_in_a_redis(
    bucket: str, redis: RedisServer, tmp_path: Path, session: str
) -> None:
    """A node fetches a snapshot once, so a second mount works although the bucket's is damaged."""
    prepared = begin(tmp_path, session, f"{bucket}?meta={redis.url}", made=InBucket)
    with mounted(prepared.request):
        check_following(prepared)
    assert isinstance(prepared, InBucket)
    assert prepared.tell("damage")
    with mounted(replace(prepared.request, follow=False)):
        assert (prepared.at / "changed").read_bytes() == noise(90)


@pytest.mark.only_session("kernel")
@pytest.mark.usefixtures("own_cache")
def test_a_mount_follows_with_its_metadata_in_a_redis(
    redis: RedisServer, tmp_path: Path, session: str
) -> None:
    """While Redis is away, the snapshots in the store show which version is the newest."""
    prepared = begin(tmp_path, session, f"{(tmp_path / 'store').as_uri()}?meta={redis.url}")
    with mounted(prepared.request):
        check_following(prepared)
        redis.kill()
        assert (prepared.at / "d/kept").read_bytes() == FILES["d/kept"]
        redis.start()
        prepared.change({"1new": b"1"})
        assert not prepared.warnings("cannot follow")


# Which version is newer ---------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.only_session("kernel")
def test_E4_E6_a_saved_snapshot_is_compared_with_the_server(
    server: ServerWithRedis,
    prepared: FollowedMount,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A stale one warns with both versions; where the server cannot be asked, the error is exit
    14."""
    saved = tmp_path / "saved"
    with prepared.connected() as dataset:
        dataset.save_meta(saved)
        old = dataset.version
    request = replace(prepared.request, follow=False, snapshot_file=str(saved))
    with mounted(request):
        assert (prepared.at / "kept").read_bytes() == FILES["kept"]
    assert not caplog.messages
    new = prepared.put({"0new": b"0"})
    with mounted(request):
        assert not (prepared.at / "0new").exists()
        assert (prepared.at / "kept").read_bytes() == FILES["kept"]
    (warning,) = caplog.messages
    assert f"is of version {old}, current is {new}" in warning
    with pytest.raises(ConflictError, match=f"version {old}, current is {new}"):
        mount(replace(request, stale="refuse"))
    with prepared.connected() as dataset:
        dataset.delete_dataset()
    prepared.put({"0new": b"0"})
    with pytest.raises(ForeignError, match="not of 'ds'"):
        mount(request)
    nowhere = replace(request, url="diesel://127.0.0.1:1")
    with pytest.raises(MetadataError, match="cannot find out whether"):
        mount(nowhere)
    with mounted(replace(nowhere, offline=True)):
        assert os.stat(prepared.at / "kept").st_size == len(FILES["kept"])
