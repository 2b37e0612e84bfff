"""A repository behind server programs: killed ones, a full Redis, damaged chunks, mounts."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from diesel_fs import ingest
from diesel_fs.cache.readers.entry_reader import EntryReader
from diesel_fs.client.dataset import connect
from diesel_fs.errors import (
    DieselError,
    MetadataError,
    NoSpaceError,
    PermissionDenied,
)
from diesel_fs.format.chunk import CHUNK_BYTES_MIN
from diesel_fs.format.entries import Kind
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.ingest import FolderSource, PutOptions, PutReport
from diesel_fs.net.keys import public_key
from diesel_fs.remote.open import open_repository
from diesel_fs.remote.repository import RemoteRepository
from diesel_fs.repository.admin import open_administration
from diesel_fs.repository.interface import Repository
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.accounts.account import Account, Role
from diesel_fs.urls import parse_url
from tests.cli.conftest import program_environment
from tests.storage.metadata.redis_servers import RedisServer
from tests.waiting import wait_until

from ..datasets import dataset_state
from ..server.program import Server
from ..server.server_with_redis import ServerWithRedis, server_with_redis
from ..trees import facts, write


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[ServerWithRedis]:
    with server_with_redis(tmp_path / "behind", workers=1) as found:
        yield found


def tree(top: Path, seed: int = 0, count: int = 400) -> Path:
    draw = random.Random(seed)
    return write(top, {f"d{i % 7}/f{i:04}": draw.randbytes(4096 + i) for i in range(count)})


def put(repository: Repository, source: Path) -> PutReport:
    options = PutOptions(chunk_bytes=CHUNK_BYTES_MIN, jobs=2)
    return ingest.put(repository, "ds", FolderSource(source), options=options)


def dlcmd(servers: ServerWithRedis, *words: str | Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "dlcmd", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**program_environment(), **servers.environment()},
    )


def start_put(servers: ServerWithRedis, source: Path) -> "subprocess.Popen[bytes]":
    return dlcmd(servers, "put", "--chunk-size", "64K", "--jobs", "2", source, "ds")


def state(view: Snapshot) -> list[tuple[object, ...]]:
    return [(view.path(i), view.stat(i), view.extents(i)) for i in range(len(view))]


def check_whole(servers: ServerWithRedis) -> None:
    with servers.open() as repository:
        live = state(repository.view("ds"))
        verified = repository.verify("ds")
        assert verified.problems == []
        repository.recover("ds")
        if not verified.notes:  # an orphan is folded in by a recovery
            assert state(repository.view("ds")) == live
        assert repository.verify("ds").problems == []


def crash(server: Server) -> None:
    server.kill()
    server.close()


def crash_one(servers: ServerWithRedis, index: int = 0) -> str:
    killed = servers.servers.pop(index)
    address = f"127.0.0.1:{killed.port}"
    crash(killed)
    return address


# Kills


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(2))
def test_A6_A7_G1_a_server_is_killed_in_the_middle_of_a_put(
    servers: ServerWithRedis, tmp_path: Path, seed: int
) -> None:
    servers.add()
    source = tree(tmp_path / "source", seed, 1500)
    draw = random.Random(seed)
    with servers.open() as repository:
        repository.begin("ds")
    putting = start_put(servers, source)
    kills = 0
    while putting.poll() is None and kills < 6:
        time.sleep(draw.uniform(0.1, 0.5))
        if putting.poll() is None:
            servers.add(crash_one(servers, draw.randrange(2)))
            kills += 1
    out, err = putting.communicate(timeout=120)
    assert putting.returncode == 0, (out, err)
    assert kills, "it was over before anything was killed: this proves nothing"
    with servers.open() as repository:
        assert dataset_state(repository) == facts(source)
        marker = repository.dataset("ds").head
    assert marker is not None
    assert marker.files == 1500
    check_whole(servers)


@pytest.mark.deep
def test_G1_readers_continue_with_another_server(servers: ServerWithRedis, tmp_path: Path) -> None:
    servers.add()
    source = tree(tmp_path / "source")
    with servers.open() as repository:
        put(repository, source)
        view, address = repository.view("ds"), ""
        reader = EntryReader(view, repository.objects, 1)
        for turn, path in enumerate(sorted(source.rglob("f*"))):
            if turn % 100 == 50:
                address = crash_one(servers)
            if turn % 100 == 99:
                servers.add(listen=address)
            name = os.fsencode(path.relative_to(source))
            assert bytes(reader.read(view.lookup(name))) == path.read_bytes()
            assert repository.dataset("ds").head is not None
        reader.close()


def test_L1_L2_two_puts_at_once(servers: ServerWithRedis, tmp_path: Path) -> None:
    sources = [
        write(
            tmp_path / f"source-{name}",
            {f"own-{name}/{i}": os.urandom(500) for i in range(300)}
            | {f"both/{i}": name.encode() * (1000 + i) for i in range(300)}
            | {"large": name.encode() * 300_000},
        )
        for name in ("one", "two")
    ]
    puts = [start_put(servers, source) for source in sources]
    with servers.open() as repository:
        for each in puts:
            _, err = each.communicate(timeout=100)
            assert each.returncode == 0, err
        contents = {path: entry[-1] for path, entry in dataset_state(repository).items()}
    for name, source in zip(("one", "two"), sources, strict=True):
        for i in range(300):
            own = contents[f"own-{name}/{i}".encode()]
            assert own == (source / f"own-{name}/{i}").read_bytes()
    for i in range(300):
        assert contents[f"both/{i}".encode()] in (b"one" * (1000 + i), b"two" * (1000 + i))
    check_whole(servers)


# Redis


@pytest.mark.deep
def test_C7_a_full_redis_stops_only_writers(servers: ServerWithRedis, tmp_path: Path) -> None:
    source = tree(tmp_path / "source")
    with servers.open() as repository, servers.redis.client() as client:
        put(repository, source)
        repository.stat("ds", b"d0/f0000")
        client.config_set("maxmemory", 1 << 20)
        tree(source, 3, 3000)
        with pytest.raises(NoSpaceError):
            put(repository, source)
        view = repository.view("ds")
        assert view.file_count >= 400
        reader = EntryReader(view, repository.objects, 1 << 20)
        assert len(reader.read(view.lookup(b"d0/f0000"))) == 4096
        client.config_set("maxmemory", 0)
        put(repository, source)
        assert dataset_state(repository) == facts(source)
    check_whole(servers)


# Servers and their users


def test_G8_servers_of_different_stores_are_detected(tmp_path: Path) -> None:
    store = (tmp_path / "other").as_uri()
    with (
        server_with_redis(tmp_path / "one", workers=1) as one,
        RedisServer(tmp_path / "redis") as redis,
    ):
        url, who = f"{store}?meta={redis.url}", one.credentials["root"]
        with open_administration(parse_url(url), None, create=True) as accounts:
            accounts.add(who.user, public_key(who.seed), admin=True)

        def is_at_second() -> bool:
            with LocalRepository.open(url) as direct:
                return bool(direct.datasets())

        with Server(tmp_path / "second", "--store", store, "--meta", redis.url) as second:
            both = f"{one.url},127.0.0.1:{second.port}"
            with open_repository(both, who) as repository:
                assert isinstance(repository, RemoteRepository)
                repository.begin("ds")
                at_second = is_at_second()
                crash(second if at_second else one.servers[0])
                with pytest.raises(MetadataError, match="another store"):
                    repository._link.call({"do": "datasets"}, deadline_s=3)
            assert is_at_second() == at_second


def test_S11_errors_do_not_reveal_the_stores_place_to_clients(tmp_path: Path) -> None:
    reader = Account("reader", b"", grants={"ds": Role.READ})
    source = tree(tmp_path / "source", count=20)
    with server_with_redis(tmp_path / "behind", "root", reader, workers=1) as servers:
        with servers.direct() as direct:
            put(direct, source)
        for chunk in (servers.store / "datasets").rglob("chunks/*/*"):
            chunk.unlink()
        [server] = servers.servers
        with servers.open("reader") as repository:
            view = repository.view("ds")
            files = [at for at in range(view.entry_count) if view.stat(at).kind == Kind.FILE]
            messages = [error_of(lambda: EntryReader(view, repository.objects, 1).read(files[0]))]
            assert "the server's store" in messages[0]
            assert str(servers.store) in server.log
            servers.redis.kill()
        with servers.open() as repository:
            messages.append(error_of(lambda: repository.begin("new")))
        assert "metadata store" in messages[1]
        for place in (tmp_path, servers.redis.socket):
            assert str(place) not in "".join(messages)


def error_of(what: Callable[[], object]) -> str:
    with pytest.raises(DieselError) as raised:
        what()
    return f"{raised.value} {raised.value.advice}"


def test_a_python_program_logs_in_as_its_user(servers: ServerWithRedis) -> None:
    who = servers.credentials["root"]
    with connect("ds", servers.url, who.user, who.key_text, create=True) as dataset:
        dataset.put(b"content", "a/b")
        dataset.flush()
        assert dataset.get("a/b") == b"content"
        assert who.key_text not in repr(dataset.credentials)
        assert dataset.purge().deleted == 0
    with pytest.raises(PermissionDenied, match="check `user` and `key`"):
        connect("ds", servers.url, "somebody", who.key_text)


# Mounts


@pytest.mark.fuse
def test_G1_a_mount_outlives_its_server(servers: ServerWithRedis, tmp_path: Path) -> None:
    source = tree(tmp_path / "source", count=60)
    at = tmp_path / "mount"
    at.mkdir()
    with servers.open() as repository:
        put(repository, source)
    mounting = dlcmd(servers, "mount", "--session", "kernel", "--memory", "1M", "ds", at)
    _, err = mounting.communicate(timeout=60)
    assert mounting.returncode == 0, err
    try:
        first, second = at / "d1/f0001", at / "d2/f0051"
        assert first.read_bytes() == (source / "d1/f0001").read_bytes()
        address = crash_one(servers)
        assert len(list(at.rglob("f*"))) == 60
        assert all(path.stat().st_size >= 4096 for path in at.rglob("f*"))
        assert first.read_bytes() == (source / "d1/f0001").read_bytes()
        servers.add(address)

        def is_back() -> bool:
            with suppress(OSError):
                return second.read_bytes() == (source / "d2/f0051").read_bytes()
            return False

        wait_until(is_back)
        for path in sorted(source.rglob("f*")):
            assert (at / path.relative_to(source)).read_bytes() == path.read_bytes()
    finally:
        dlcmd(servers, "umount", "--lazy", at).communicate(timeout=60)
