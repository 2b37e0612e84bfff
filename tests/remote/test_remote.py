"""A repository behind server programs: killed ones, a lost Redis, damaged chunks, mounts."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diesel_fs import ingest
from diesel_fs.cache.reader import EntryReader
from diesel_fs.client.dataset import connect
from diesel_fs.errors import (
    CorruptError,
    DieselError,
    MetadataBehind,
    MetadataError,
    NoSpaceError,
    NoSuchDataset,
    PermissionDenied,
)
from diesel_fs.format.chunk import CHUNK_BYTES_MIN
from diesel_fs.format.chunk_id import chunk_id_text
from diesel_fs.format.entries import Kind
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.ingest import FolderSource, PutOptions
from diesel_fs.net.keys import public_key
from diesel_fs.remote.open import open_repository
from diesel_fs.remote.repository import RemoteRepository
from diesel_fs.repository.admin import open_administration
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.accounts.account import Account, Role
from diesel_fs.urls import parse_url
from tests.storage.conftest import s3 as s3
from tests.storage.metadata.redis_servers import RedisServer
from tests.storage.objects.s3_server import Server as S3Server

from ..datasets import dataset_state
from ..server.program import Server, until
from ..server.server_with_redis import ServerWithRedis, as_user, server_with_redis
from ..trees import facts, write

SMALL = PutOptions(chunk_bytes=CHUNK_BYTES_MIN, jobs=2)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[ServerWithRedis]:
    with server_with_redis(tmp_path / "behind", workers=1) as found:
        yield found


def tree(top: Path, seed: int = 0, count: int = 400) -> Path:
    """Files of some 4 KB that do not compress."""
    draw = random.Random(seed)
    return write(top, {f"d{i % 7}/f{i:04}": draw.randbytes(4096 + i) for i in range(count)})


def program(servers: ServerWithRedis, *words: str | Path) -> "subprocess.Popen[bytes]":
    """`dlcmd`, running, as the administrator."""
    return subprocess.Popen(
        [sys.executable, "-m", "dlcmd", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={
            **os.environ,
            **servers.environment(),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
    )


def state(view: Snapshot) -> list[tuple[object, ...]]:
    return [(view.path(i), view.stat(i), view.extents(i)) for i in range(len(view))]


def check_whole(servers: ServerWithRedis, name: str = "ds") -> None:
    """The metadata are what the chunks say, now and rebuilt."""
    with servers.open() as repository:
        live = state(repository.view(name))
        assert repository.verify(name).problems == []
        before = len(repository.verify(name).notes)
        repository.recover(name)
        if not before:  # an orphan is folded in by a recovery
            assert state(repository.view(name)) == live
        assert repository.verify(name).problems == []


# Kills


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(2))
def test_A6_A7_G1_a_server_is_killed_in_the_middle_of_a_put(
    servers: ServerWithRedis, tmp_path: Path, seed: int
) -> None:
    """The client goes on at the other one; a put that is acknowledged is there, once and whole."""
    servers.add()
    source = tree(tmp_path / "source", seed, 1500)
    draw = random.Random(seed)
    with servers.open() as repository:
        repository.begin("ds")
    put = program(servers, "put", "--chunk-size", "64K", "--jobs", "2", source, "ds")
    kills = 0
    while put.poll() is None and kills < 6:
        time.sleep(draw.uniform(0.1, 0.5))
        if put.poll() is not None:
            break
        killed = servers.servers.pop(draw.randrange(2))
        port = killed.port
        crash(killed)
        kills += 1
        servers.servers.append(_again(servers, port))
        servers.servers.sort(key=lambda server: server.port)
    out, err = put.communicate(timeout=120)
    assert put.returncode == 0, (out, err)
    assert kills, "it was over before anything was killed: this proves nothing"
    with servers.open() as repository:
        assert dataset_state(repository) == facts(source)
        marker = repository.dataset("ds").head
    assert marker is not None
    assert marker.files == 1500
    check_whole(servers)


def crash(server: Server) -> None:
    server.kill()
    server.close()


def _again(servers: ServerWithRedis, port: int) -> Server:
    before = len(servers.servers)
    server = servers.add(f"127.0.0.1:{port}")
    assert servers.servers.pop() is server
    assert len(servers.servers) == before
    return server


@pytest.mark.deep
def test_G1_a_put_whose_only_server_dies_fails_and_can_be_repeated(
    servers: ServerWithRedis, tmp_path: Path
) -> None:
    source = tree(tmp_path / "source", 1, 3000)
    put = program(servers, "put", "--chunk-size", "64K", "--jobs", "2", source, "ds")
    with servers.direct() as direct:
        until(lambda: _files(direct) > 100, "some commits")
    (server,) = servers.servers
    port = server.port
    crash(server)
    servers.servers.clear()
    put.send_signal(signal.SIGINT)
    _, err = put.communicate(timeout=120)
    assert put.returncode in (14, 130), err
    assert b"Traceback" not in err
    servers.servers.append(_again(servers, port))
    with servers.open() as repository:
        assert 100 < len(repository.view("ds")) < 3000, "this proves nothing"
        report = ingest.put(repository, "ds", FolderSource(source), options=SMALL)
        assert report.unchanged > 0
        assert dataset_state(repository) == facts(source)
    check_whole(servers)


def _files(repository: LocalRepository) -> int:
    try:
        marker = repository.dataset("ds").head
    except DieselError:
        return 0
    return marker.files if marker else 0


@pytest.mark.deep
def test_G1_readers_go_on_at_the_other_server(servers: ServerWithRedis, tmp_path: Path) -> None:
    servers.add()
    source = tree(tmp_path / "source")
    with servers.open() as repository:
        ingest.put(repository, "ds", FolderSource(source), options=SMALL)
    with as_user(servers), connect("ds", servers.url, memory_bytes=1) as dataset:
        paths = [f"d{i % 7}/f{i:04}" for i in range(400)]
        for turn, path in enumerate(paths):
            if turn % 100 == 50:
                index = turn // 100 % 2
                port = servers.servers[index].port
                crash(servers.servers[index])
            if turn % 100 == 99:
                servers.servers[index] = _again(servers, port)
            assert dataset.get(path) == (source / path).read_bytes()


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
    puts = [
        program(servers, "put", "--chunk-size", "64K", "--jobs", "2", source, "ds")
        for source in sources
    ]
    with servers.open() as repository:
        for put in puts:
            _, err = put.communicate(timeout=100)
            assert put.returncode == 0, err
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
def test_C2_a_redis_that_comes_back_is_waited_for(servers: ServerWithRedis, tmp_path: Path) -> None:
    source = tree(tmp_path / "source", 2, 3000)
    put = program(servers, "put", "--chunk-size", "64K", "--jobs", "2", source, "ds")
    with servers.direct() as direct:
        until(lambda: _files(direct) > 100, "some commits")
    servers.redis.kill()
    assert put.poll() is None, "this proves nothing"
    time.sleep(10)
    servers.redis.start()
    _, err = put.communicate(timeout=120)
    assert put.returncode == 0, err
    with servers.open() as repository:
        assert dataset_state(repository) == facts(source)
    check_whole(servers)


def test_C3_an_emptied_redis_is_never_reported_as_an_empty_dataset(
    servers: ServerWithRedis, tmp_path: Path
) -> None:
    source = tree(tmp_path / "source")
    with servers.open() as repository:
        ingest.put(repository, "ds", FolderSource(source), options=SMALL)
        before = state(repository.view("ds"))
        accounts = _accounts(servers)
        with servers.redis.client() as client:
            client.flushall()
        accounts()
        _until_let_in(repository)
        assert repository.view("ds").file_count == 400
        assert dataset_state(repository) == facts(source)
        for path in (b"d0/f0000", b"nothing"):
            with pytest.raises(MetadataBehind, match="recover"):
                repository.stat("ds", path)
        with pytest.raises(NoSuchDataset):
            repository.stat("other", b"a")
        assert repository.recover("ds").problems == []
        assert state(repository.view("ds")) == before
        assert repository.stat("ds", b"d0/f0000").size == 4096


def _until_let_in(repository: RemoteRepository) -> None:
    """Wait until the servers have looked at the accounts again."""
    end = time.monotonic() + 30
    while True:
        try:
            repository.datasets()
            return
        except (PermissionDenied, MetadataError):
            assert time.monotonic() < end
            time.sleep(0.1)


def _accounts(servers: ServerWithRedis) -> Callable[[], None]:
    """What puts the accounts back that are in the Redis now."""
    url = parse_url(servers.direct_url)
    with open_administration(url, None) as direct:
        text = direct.export_text()

    def back() -> None:
        with open_administration(url, None) as direct:
            direct.import_text(text, replace=True)

    return back


@pytest.mark.deep
def test_C7_a_full_redis_stops_only_writers(servers: ServerWithRedis, tmp_path: Path) -> None:
    source = tree(tmp_path / "source")
    with servers.open() as repository, servers.redis.client() as client:
        ingest.put(repository, "ds", FolderSource(source), options=SMALL)
        repository.stat("ds", b"d0/f0000")
        client.config_set("maxmemory", 1 << 20)
        tree(source, 3, 3000)
        with pytest.raises(NoSpaceError):
            ingest.put(repository, "ds", FolderSource(source), options=SMALL)
        view = repository.view("ds")
        assert view.file_count >= 400
        reader = EntryReader(view, repository.objects, 1 << 20)
        index = view.lookup(b"d0/f0000")
        assert len(reader.read(index)) == 4096
        client.config_set("maxmemory", 0)
        ingest.put(repository, "ds", FolderSource(source), options=SMALL)
        assert dataset_state(repository) == facts(source)
    check_whole(servers)


@pytest.mark.deep
def test_C13_requests_end_in_time_when_redis_hangs(
    servers: ServerWithRedis, tmp_path: Path
) -> None:
    """Requests about entries fail in time, reads of chunks go on, all works again afterwards."""
    source = tree(tmp_path / "source", count=50)
    with servers.open() as repository:
        ingest.put(repository, "ds", FolderSource(source), options=SMALL)
        view = repository.view("ds")
        repository.stat("ds", b"d0/f0000")
        together = threading.Barrier(12)

        def connected() -> None:
            """Connect each thread while Redis runs: without it no login succeeds."""
            together.wait(20)
            for _ in range(20):
                repository.stat("ds", b"d0/f0000")

        threads = [threading.Thread(target=connected) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        servers.redis.signal(signal.SIGSTOP)
        try:
            failed = []

            def ask() -> None:
                begun = time.monotonic()
                with pytest.raises(MetadataError):
                    repository.stat("ds", b"d0/f0000")
                failed.append(time.monotonic() - begun)

            threads = [threading.Thread(target=ask) for _ in range(8)]
            for thread in threads:
                thread.start()
            time.sleep(1)
            reader = EntryReader(view, repository.objects, 1 << 20)
            begun = time.monotonic()
            assert len(reader.read(view.lookup(b"d0/f0000"))) == 4096
            assert time.monotonic() - begun < 5
            for thread in threads:
                thread.join(60)
            assert len(failed) == 8
            assert max(failed) < 20
            begun = time.monotonic()
            ask()
            assert time.monotonic() - begun < 20
        finally:
            servers.redis.signal(signal.SIGCONT)
        end = time.monotonic() + 30
        while True:
            try:
                assert repository.stat("ds", b"d0/f0000").size == 4096
                break
            except MetadataError:
                assert time.monotonic() < end
                time.sleep(0.2)


# Bytes


def test_G3_a_corrupt_chunk_harms_only_its_own_files(
    servers: ServerWithRedis, tmp_path: Path
) -> None:
    source = write(tmp_path / "source", {f"f{i}": os.urandom(20_000) for i in range(12)})
    with servers.open() as repository:
        ingest.put(
            repository,
            "ds",
            FolderSource(source),
            options=PutOptions(chunk_bytes=CHUNK_BYTES_MIN, jobs=1),
        )
        view = repository.view("ds")
        bad = view.lookup(b"f3")
        (extent,) = view.extents(bad)
        (chunk,) = servers.store.glob(f"datasets/*/chunks/*/{_text(view, extent.chunk)}")
        with chunk.open("r+b") as file:
            file.seek(extent.offset)
            file.write(b"\xff" * 8)
        reader = EntryReader(view, repository.objects, 1)
        for i in range(12):
            index = view.lookup(b"f%d" % i)
            if index == bad:
                with pytest.raises(CorruptError, match="f3"):
                    reader.read(index)
            else:
                assert bytes(reader.read(index)) == (source / f"f{i}").read_bytes()
        assert [each for each in repository.verify("ds").problems if "f3" in each]


def _text(view: Snapshot, number: int) -> str:
    return chunk_id_text(view.chunk_ids[number])


def test_G8_servers_of_different_stores_are_told_apart(tmp_path: Path) -> None:
    """A client asks for nothing at the second one."""
    with server_with_redis(tmp_path / "one", workers=1) as one:
        other = tmp_path / "other"
        with RedisServer(tmp_path / "redis") as redis:
            url = f"{other.as_uri()}?meta={redis.url}"
            who = one.credentials["root"]
            with open_administration(parse_url(url), None, create=True) as accounts:
                accounts.add(who.user, public_key(who.seed), admin=True)
            with Server(
                tmp_path / "second", "--store", other.as_uri(), "--meta", redis.url
            ) as second:
                both = f"{one.url},127.0.0.1:{second.port}"
                with open_repository(both, who) as repository:
                    assert isinstance(repository, RemoteRepository)
                    repository.begin("ds")
                    with LocalRepository.open(url) as direct:
                        at_second = bool(direct.datasets())
                    crash(second if at_second else one.servers[0])
                    with pytest.raises(MetadataError, match="another store"):
                        repository._link.call({"do": "datasets"}, deadline_s=3)
                with LocalRepository.open(url) as direct:
                    assert bool(direct.datasets()) == at_second


def test_roles_hold_over_the_wire(tmp_path: Path) -> None:
    users = (
        Account("reader", b"", grants={"ds": Role.READ}),
        Account("writer", b"", grants={"ds": Role.WRITE}),
    )
    source = tree(tmp_path / "source", count=20)
    with server_with_redis(tmp_path / "behind", "root", *users, workers=1) as servers:
        with servers.open() as root:
            ingest.put(root, "ds", FolderSource(source), options=SMALL)
            ingest.put(root, "secret", FolderSource(source), options=SMALL)
        with servers.open("reader") as reader:
            assert dataset_state(reader) == facts(source)
            assert [info.name for info in reader.datasets()] == ["ds"]
            with pytest.raises(PermissionDenied):
                reader.begin("ds")
            with pytest.raises(NoSuchDataset):
                reader.view("secret")
        with servers.open("writer") as writer:
            write(source, {"more": b"1"})
            assert ingest.put(writer, "ds", FolderSource(source), options=SMALL).files == 1
            for name in ("secret", "new"):
                with pytest.raises(NoSuchDataset):
                    ingest.put(writer, name, FolderSource(source), options=SMALL)
            with pytest.raises(PermissionDenied):
                writer.delete_dataset("ds")


def test_S11_errors_do_not_tell_clients_where_the_store_is(tmp_path: Path) -> None:
    """A chunk is lost, then the metadata store is away: the operator's log has the places."""
    reader = Account("reader", b"", grants={"ds": Role.READ})
    source = tree(tmp_path / "source", count=20)
    with server_with_redis(tmp_path / "behind", "root", reader, workers=1) as servers:
        with servers.direct() as direct:
            ingest.put(direct, "ds", FolderSource(source), options=SMALL)
        for chunk in (servers.store / "datasets").rglob("chunks/*/*"):
            chunk.unlink()
        [server] = servers.servers
        with servers.open("reader") as repository:
            view = repository.view("ds")
            files = [at for at in range(view.entry_count) if view.stat(at).kind == Kind.FILE]
            said = [error_of(lambda: EntryReader(view, repository.objects, 1).read(files[0]))]
            assert "the server's store" in said[0]
            assert str(servers.store) in server.log
            servers.redis.kill()
        with servers.open() as repository:
            said.append(error_of(lambda: repository.begin("new")))
        assert "metadata store" in said[1]
        for place in (tmp_path, servers.redis.socket):
            assert str(place) not in "".join(said)


def error_of(what: Callable[[], object]) -> str:
    """All that an error says."""
    with pytest.raises(DieselError) as raised:
        what()
    return f"{raised.value} {raised.value.advice}"


def test_S11_over_a_bucket_clients_know_nothing_of_it(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server alone has what opens the bucket."""
    source = tree(tmp_path / "source")
    place = s3.place()
    with RedisServer(tmp_path / "redis") as redis:
        driver = (
            "import sys; from diesel_fs.storage.objects.cloud import direct;"
            "direct.open_buckets_directly();"
            "from tests.server.program import new_repository;"
            "print(new_repository(sys.argv[1], 'root')['root'].key_text)"
        )
        made = subprocess.run(
            [sys.executable, "-c", driver, f"{place}?meta={redis.url}"],
            env={
                **os.environ,
                **s3.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
            capture_output=True,
            check=False,
            timeout=60,
        )
        assert made.returncode == 0, made.stderr
        monkeypatch.setenv("DIESEL_KEY", made.stdout.decode().strip())
        monkeypatch.setenv("DIESEL_USER", "root")
        with Server(
            tmp_path / "server", "--store", place, "--meta", redis.url, environment=s3.environ
        ) as server:
            for name in list(os.environ):
                if name.startswith("AWS_"):
                    monkeypatch.delenv(name)
            with connect("ds", server.url, create=True) as dataset:
                for path in sorted(source.rglob("f*")):
                    dataset.put(path, str(path.relative_to(source)))
                dataset.flush()
                repository = dataset._repository
                assert isinstance(repository, RemoteRepository)
                assert repository.verify("ds").problems == []
                names = [f"d{i % 7}/f{i:04}" for i in range(400)]
                for name, found in zip(names, dataset.read_many(names), strict=True):
                    assert found == (source / name).read_bytes()
                assert repository.stat("ds", b"d0").kind == Kind.FOLDER
                dataset.delete_dataset()


def test_a_python_program_logs_in_as_its_user(servers: ServerWithRedis) -> None:
    who = servers.credentials["root"]
    with connect("ds", servers.url, who.user, who.key_text, create=True) as dataset:
        dataset.put(b"content", "a/b")
        dataset.flush()
        assert dataset.get("a/b") == b"content"
        assert who.key_text not in repr(dataset.credentials)
        assert dataset.purge().deleted == 0
    with pytest.raises(PermissionDenied, match="--key-file"):
        connect("ds", servers.url, "somebody", who.key_text)


# Mounts


@pytest.mark.fuse
def test_G1_a_mount_outlives_its_server(servers: ServerWithRedis, tmp_path: Path) -> None:
    """What it has goes on being read; what needs the server fails, in time, until it is back."""
    source = tree(tmp_path / "source", count=60)
    at = tmp_path / "mount"
    at.mkdir()
    with servers.open() as repository:
        ingest.put(repository, "ds", FolderSource(source), options=SMALL)
    words = ("mount", "--session", "kernel", "--memory", "1M", "ds", at)
    mounting = program(servers, *words)
    _, err = mounting.communicate(timeout=60)
    assert mounting.returncode == 0, err
    try:
        first, second = at / "d1/f0001", at / "d2/f0051"
        assert first.read_bytes() == (source / "d1/f0001").read_bytes()
        (server,) = servers.servers
        port = server.port
        crash(server)
        servers.servers.clear()
        assert len(list(at.rglob("f*"))) == 60
        assert all(path.stat().st_size >= 4096 for path in at.rglob("f*"))
        assert first.read_bytes() == (source / "d1/f0001").read_bytes()
        servers.servers.append(_again(servers, port))
        end = time.monotonic() + 60
        while True:
            try:
                assert second.read_bytes() == (source / "d2/f0051").read_bytes()
                break
            except OSError:
                assert time.monotonic() < end
                time.sleep(0.5)
        for path in sorted(source.rglob("f*")):
            assert (at / path.relative_to(source)).read_bytes() == path.read_bytes()
    finally:
        program(servers, "umount", "--lazy", at).communicate(timeout=60)


@pytest.mark.fuse
def test_S8_a_mount_does_not_expose_its_key(servers: ServerWithRedis, tmp_path: Path) -> None:
    """Not in the arguments nor the environment of any of its processes, nor in its log."""
    source = tree(tmp_path / "source", count=10)
    at, log = tmp_path / "mount", tmp_path / "log"
    at.mkdir()
    key_file = tmp_path / "key"
    key_file.write_text(servers.credentials["root"].key_text)
    key_file.chmod(0o600)
    with servers.open() as repository:
        ingest.put(repository, "ds", FolderSource(source), options=SMALL)
    environment = {
        name: text for name, text in os.environ.items() if not name.startswith("DIESEL_")
    }
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    words = ["--url", servers.url, "--user", "root", "--key-file", str(key_file)]

    def dlcmd(*more: str | Path) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "dlcmd", *words, *map(str, more)],
            env=environment, capture_output=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    dlcmd("mount", "--log-file", log, "ds", at)
    try:
        assert len(list(at.rglob("f*"))) == 10
        secret = servers.credentials["root"].key_text.encode()
        looked = 0
        for process in Path("/proc").glob("[0-9]*"):
            try:
                shown_by = (process / "cmdline").read_bytes()
                about_us = str(at).encode() in shown_by or b"diesel_fs" in shown_by
                shown_by += (process / "environ").read_bytes()
            except OSError:
                continue
            looked += about_us
            assert secret not in shown_by
        assert looked
        assert secret not in log.read_bytes()
    finally:
        dlcmd("umount", "--lazy", at)
