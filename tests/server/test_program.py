"""`diesel-server` as a program: options, addresses, metrics, signals, and workers that die."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import click
import pytest
import trio

from diesel_fs import ingest, metrics
from diesel_fs.errors import DieselError, MetadataError, ObjectStoreError
from diesel_fs.ingest import FolderSource
from diesel_fs.net.client import ServerLink
from diesel_fs.net.messages import Message
from diesel_fs.remote.open import open_repository
from diesel_fs.repository.interface import Repository
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.objects.cloud import store as cloud
from diesel_fs.storage.objects.cloud.direct import open_buckets_directly
from diesel_fs.storage.objects.retry import RetryPolicy
from diesel_fs.urls import parse_url
from diesel_server import main, options
from diesel_server.options import ServerOptions, checked
from diesel_server.process import metadata_watch as watching
from diesel_server.process import supervisor, worker
from diesel_server.process.wiring import _objects
from diesel_server.process.worker_config import WorkerConfig, config_line
from tests.processes import is_running, resident_bytes
from tests.rows import each_row
from tests.storage.metadata.redis_servers import RedisServer, free_port
from tests.storage.objects.s3_server import credentials
from tests.trees import write
from tests.waiting import until

from .certificates import Authority, Pair
from .fake_server import ME, PROGRAM
from .program import Server, new_repository

TREE = Path(__file__).resolve().parents[2]
README = (TREE / "server/diesel_server/README.md").read_text(encoding="utf-8")
STAND_IN = {"PYTHONPATH": os.pathsep.join(map(str, (TREE, TREE / "server")))}


STORE = ("--store", "file:///x")
ANY_PORT = ("--listen", "127.0.0.1:0")


def stand_in(
    folder: Path, *arguments: str, workers: int = 1, listen: str = "127.0.0.1:0"
) -> Server:
    store = "file:///nowhere"
    return Server(folder, "--store", store, *arguments, workers=workers, listen=listen,
                  program=PROGRAM, environment=STAND_IN)  # fmt: skip


def link(server: Server) -> ServerLink:
    return ServerLink(parse_url(server.url), ME)


def run(
    folder: Path,
    *arguments: str,
    program: Sequence[str] = (sys.executable, "-m", "diesel_server"),
    **environment: str,
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*program, *arguments],
        check=False, capture_output=True, text=True, timeout=60, cwd=folder,
        env={**os.environ, **environment},
    )  # fmt: skip


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def metric(server: Server, name: str) -> float:
    _, text = get(server.metrics_port, "/metrics")
    values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, values))


def put(repository: Repository, source: Path) -> None:
    assert ingest.put(repository, "pets", FolderSource(source)).files


# Options


@each_row(
    ("arguments", "word"),
    [
        ([], "--store"),
        (["--store", "nonsense"], "file:///"),
        (["--store", "diesel://h:1"], "another server"),
        ([*STORE, "--meta", "x"], "redis://"),
        ([*STORE, "--meta", "http://user:hush@x"], "no metadata store"),
        (["--store", "file:///x?meta=redis://a", "--meta", "redis://b"], "both"),
        ([*STORE, "--tls-cert", "c"], "together"),
        ([*STORE, "--cache-dir", "/c"], "together"),
        ([*STORE, "--cache-dir", "/c", "--cache-size", "ten"], "bad size"),
        ([*STORE, "--cache-dir", "/c", "--cache-size", "0"], "no cache"),
        ([*STORE, "--listen", "9300"], "HOST:PORT"),
        ([*STORE, "--listen", ":9300"], "HOST:PORT"),
        ([*STORE, "--listen", "no-such.invalid:1"], "no-such.invalid"),
        ([*STORE, "--workers", "0"], "workers"),
        ([*STORE, "--metrics", "x:y"], "HOST:PORT"),
        ([*STORE, "--config", "/none.toml"], "none.toml"),
        ([*STORE, "--what"], "--what"),
        (["extra"], "extra"),
        # S5: without TLS only this machine can connect
        ([*STORE, "--listen", "0.0.0.0:0"], "no TLS"),
        ([*STORE, "--listen", "[::]:0"], "no TLS"),
        ([*STORE, "--listen", "192.0.2.1:0"], "no TLS"),
    ],
)
def test_S5_bad_options_give_one_line(tmp_path: Path, arguments: list[str], word: str) -> None:
    result = run(tmp_path, *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert word in result.stderr
    assert "hush" not in result.stderr
    assert len(result.stderr.splitlines()) == 1


def parsed(*arguments: object) -> tuple[ServerOptions, list[str]]:
    found: list[tuple[ServerOptions, list[str]]] = []

    @click.command(context_settings={"auto_envvar_prefix": options.PREFIX})
    @options.options
    def program(**read: object) -> None:
        found.append(checked(**read))  # type: ignore[arg-type]  # what came is passed on

    program.main([str(each) for each in arguments], standalone_mode=False)
    return found[0]


def test_N9_options_win_over_the_environment_and_that_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "server.toml"
    file.write_text(
        'listen = "127.0.0.1:1"\nstore = "file:///toml"\nworkers = 3\ncache-dir = "/c"\n'
        'cache_size = "2G"\n'
    )
    monkeypatch.setattr(options, "CONFIG_FILE", file)
    read, _ = parsed()
    assert (read.url.path, read.workers, read.cache_bytes) == (Path("/toml"), 3, 2 << 30)
    monkeypatch.setenv("DIESEL_SERVER_STORE", "file:///env")
    monkeypatch.setenv("DIESEL_SERVER_WORKERS", "5")
    read, _ = parsed()
    assert (read.url.path, read.workers) == (Path("/env"), 5)
    given, _ = parsed("--store", "file:///flag", "--meta", "redis://h")
    assert (given.url.path, given.url.meta, given.listen.port) == (Path("/flag"), "redis://h", 1)
    other = tmp_path / "other.toml"
    other.write_text("workers = 7\n")
    monkeypatch.delenv("DIESEL_SERVER_WORKERS")
    assert parsed("--config", other)[0].workers == 7
    monkeypatch.setenv("DIESEL_SERVER_CONFIG", str(other))
    assert parsed()[0].workers == 7


@each_row(
    "text",
    [
        *("what = 1", "workers = '3'", "listen = 5", "insecure = 1", "= =", "config = 'x'"),
        "[listen]\nx = 1",
    ],
)
def test_N9_a_bad_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    result = run(tmp_path, "--config", str(file), *STORE)
    assert result.returncode == 2
    assert "bad.toml" in result.stderr


def test_every_option_is_documented() -> None:
    listed = {
        name
        for row in re.findall(r"^\| (`--[^|]*) \|", README, re.MULTILINE)
        for name in re.findall(r"`(--[a-z-]+)", row)
    }
    known = {name for each in main.program.params for name in each.opts if name.startswith("--")}
    assert listed == known - {"--version", "--help"}


def test_every_metric_is_documented_and_no_other() -> None:
    rows = re.findall(r"^\| `(diesel_\w+)`([^|]*)\| (\w+): ", README, re.MULTILINE)
    table = (*metrics.TABLE, *metrics.PARENT_TABLE)
    assert {(name, kind) for name, _, kind in rows} == {(each.name, each.kind) for each in table}
    for name, labels, _ in rows:
        found = next(each for each in table if each.name == name)
        assert re.findall(r"`(\w+)`", labels) == list(found.labels)


def test_every_request_has_a_metric_of_its_own() -> None:
    wire = (TREE / "diesel_fs/net/WIRE.md").read_text(encoding="utf-8")
    section = wire.partition("## 5.")[2]
    rows = re.findall(r"^\| (`[^|]*`) \| ", section, re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)} - {"do"}
    assert documented == set(metrics.REQUESTS) - {metrics.OTHER}


# The repository


@pytest.fixture
def url(tmp_path: Path) -> str:
    return (tmp_path / "store").as_uri()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source", {f"{i}": bytes([i]) * i for i in range(50)})


def test_a_missing_store_is_not_created(tmp_path: Path, url: str) -> None:
    """O16: an empty folder may be a disk that is not mounted."""
    (tmp_path / "store").mkdir()
    result = run(tmp_path, *ANY_PORT, "--store", url)
    assert (result.returncode, result.stdout) == (13, "")
    assert "user add" in result.stderr
    assert list((tmp_path / "store").iterdir()) == []


def test_only_a_missing_store_has_the_advice_to_create(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that does not answer may exist."""
    monkeypatch.setattr(cloud, "RetryPolicy", partial(RetryPolicy, deadline_s=0.0))  # no retries
    open_buckets_directly()
    for name in [name for name in os.environ if "proxy" in name.lower()]:
        monkeypatch.delenv(name)
    for name, text in credentials(f"http://127.0.0.1:{free_port()}").items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ObjectStoreError, match="refused") as away:
        _objects(parse_url("s3://bucket/x?meta=redis://127.0.0.1:1"))
    assert "user add" not in away.value.advice


def test_C1_a_missing_metadata_store_is_an_error_at_the_start(tmp_path: Path, url: str) -> None:
    new_repository(url)
    begun = time.monotonic()
    result = run(tmp_path, *ANY_PORT, "--store", url, "--meta", "redis://:hush@127.0.0.1:1")
    assert result.returncode == 14
    assert "127.0.0.1:1" in result.stderr
    assert "hush" not in result.stderr
    assert time.monotonic() - begun < 20


def test_S14_a_Redis_of_another_machine_without_password_gives_a_warning(tmp_path: Path) -> None:
    result = run(tmp_path, *ANY_PORT, *STORE, "--meta", "redis://192.0.2.1")
    assert "no password" in result.stderr


def test_S14_a_key_that_all_users_can_read_gives_a_warning(tmp_path: Path) -> None:
    pair = Authority(tmp_path).issue()
    for mode, count in ((0o644, 1), (0o602, 1), (0o600, 0), (0o640, 0)):
        pair.key.chmod(mode)
        pairs = ("--tls-cert", pair.certificate, "--tls-key", pair.key)
        warnings = parsed(*ANY_PORT, *STORE, *pairs)[1]
        assert ["can read or replace the key" in each for each in warnings] == [True] * count
    missing = ("--tls-cert", pair.certificate, "--tls-key", tmp_path / "none")
    assert parsed(*ANY_PORT, *STORE, *missing)[1] == []


async def test_J9_a_worker_that_cannot_start_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory or descriptors are short."""

    async def fails(*_: object, **__: object) -> object:
        raise BlockingIOError(11, os.strerror(11))

    parent = supervisor.Supervisor(parsed(*ANY_PORT, *STORE)[0], print)
    monkeypatch.setattr(trio.lowlevel, "open_process", fails)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DieselError, match="cannot start a worker"):
        await parent._start(0, is_first=False)
    assert len(os.listdir("/proc/self/fd")) == before
    for each in parent._sockets:
        each.close()


@pytest.mark.real_start
def test_a_put_and_a_get_through_the_program(tmp_path: Path, url: str, source: Path) -> None:
    root = new_repository(url)["root"]
    cache = ("--cache-dir", tmp_path / "cache", "--cache-size", "1G")
    with Server(tmp_path, "--store", url, "--metrics", "0", *cache, workers=2) as server:
        with open_repository(server.url, root, create=False) as repository:
            put(repository, source)
            assert repository.stat("pets", b"7").size == 7
        assert get(server.metrics_port, "/healthz")[0] == 200
        assert get(server.metrics_port, "/else")[0] == 404
        assert metric(server, "diesel_chunks_accepted_total") == 1
        assert metric(server, "diesel_commits_total") >= 1
        assert metric(server, "diesel_logins_total") >= 1
        assert metric(server, "diesel_workers") == 2
        assert metric(server, "diesel_received_bytes_total") > 1000
        status, text = get(server.metrics_port, "/metrics")
        assert status == 200
        assert "pets" not in text
        assert "root" not in text
    with LocalRepository.open(url) as repository:
        assert repository.stat("pets", b"9").size == 9


def test_C3_C4_commits_that_the_metadata_lack_are_committed_again_at_the_start(
    tmp_path: Path, url: str, source: Path
) -> None:
    root = new_repository(url)["root"]
    with LocalRepository.open(url) as repository:
        put(repository, source)
        before = repository.dataset("pets").head
    for file in (tmp_path / "store").glob("meta.sqlite*"):
        file.unlink()
    with Server(tmp_path, "--store", url) as server:
        until(lambda: "are committed again" in server.log, "the comparison of the metadata")
        with open_repository(server.url, root, create=False) as repository:
            assert repository.stat("pets", b"7").size == 7
            after = repository.dataset("pets").head
    assert before is not None
    assert after is not None
    assert after.digest == before.digest
    assert after.version > before.version


@pytest.mark.deep
def test_C3_a_Redis_that_comes_back_empty_is_filled(tmp_path: Path, url: str, source: Path) -> None:
    with RedisServer(tmp_path / "redis") as redis:
        whole = f"{url}?meta={redis.url}"
        who = new_repository(whole)
        with (
            Server(tmp_path, "--store", url, "--meta", redis.url, workers=2) as server,
            open_repository(server.url, who["root"]) as repository,
        ):
            put(repository, source)
            time.sleep(watching.EVERY_S + 1)
            redis.kill()
            redis.start()
            assert redis.client().dbsize() == 0
            until(lambda: "are committed again" in server.log, "the comparison of the metadata")
            assert "Redis has restarted" in server.log
            assert repository.stat("pets", b"7").size == 7


# Its start and end


def test_S5_the_server_listens_only_at_the_given_address(tmp_path: Path) -> None:
    with stand_in(tmp_path, "--metrics", "0", workers=2) as server:
        pids = {server.pid, *server.workers()}
        inodes = {
            os.readlink(f"/proc/{pid}/fd/{fd}")[8:-1]
            for pid in pids
            for fd in os.listdir(f"/proc/{pid}/fd")
            if os.readlink(f"/proc/{pid}/fd/{fd}").startswith("socket:")
        }
        listening = set()
        for table in ("tcp", "tcp6", "udp", "udp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[9] in inodes and (words[3] == "0A" or table.startswith("udp")):
                    listening.add((table, words[1]))
        loopback = "0100007F"
        assert listening == {
            ("tcp", f"{loopback}:{server.port:04X}"),
            ("tcp", f"{loopback}:{server.metrics_port:04X}"),
        }


def test_two_servers_cannot_have_one_port(tmp_path: Path) -> None:
    with stand_in(tmp_path) as server:
        place = f"127.0.0.1:{server.port}"
        result = run(tmp_path, "--listen", place, *STORE)
        assert result.returncode == 12
        assert place in result.stderr


@pytest.mark.real_start
def test_G7_SIGTERM_lets_requests_under_way_finish(tmp_path: Path) -> None:
    sleep: Message = {"do": "blocking_sleep", "seconds": 2.0}
    with stand_in(tmp_path, workers=2) as server, ThreadPoolExecutor(6) as threads:
        waiting = [threads.submit(link(server).call, sleep, may_repeat=False) for _ in range(6)]
        time.sleep(0.8)
        server.signal(signal.SIGTERM)
        time.sleep(0.3)
        another = ServerLink(parse_url(server.url), ME, open_s=0.2)
        with pytest.raises(MetadataError, match="it is shutting down"):
            another.call({"do": "echo"})
        assert server.wait(10) == 0
        assert [each.result(10).message["slept"] for each in waiting] == [True] * 6
        with pytest.raises(MetadataError, match="refused"):
            another.call({"do": "echo"})


def test_G7_an_idle_server_ends_at_once(tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        with stand_in(tmp_path) as server:
            link(server).call({"do": "echo"})
            begun = time.monotonic()
            server.signal(number)
            assert server.wait(10) == 0
            assert time.monotonic() - begun < 3


def test_G7_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with stand_in(tmp_path, workers=2) as server, ThreadPoolExecutor() as threads:
        sleep: Message = {"do": "blocking_sleep", "seconds": 20.0}
        waiting = threads.submit(link(server).call, sleep, may_repeat=False)
        time.sleep(0.5)
        workers = server.workers()
        server.signal(signal.SIGTERM)
        time.sleep(0.3)
        assert server.process.poll() is None
        begun = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.wait(5) == 128 + signal.SIGTERM
        assert time.monotonic() - begun < 2
        until(lambda: not any(map(is_running, workers)), "the workers' end", 5)
        with pytest.raises(DieselError):
            waiting.result(10)


def test_a_worker_that_dies_is_replaced(tmp_path: Path) -> None:
    with stand_in(tmp_path, "--metrics", "0", workers=2) as server:
        client = link(server)
        for _ in range(3):
            client.call({"do": "echo"})
            old = server.workers()
            os.kill(old[0], signal.SIGKILL)
            until(lambda old=old: old[0] not in server.workers(), "its end")  # type: ignore[misc]  # mypy cannot infer a lambda with defaults
            until(lambda: len(server.workers()) == 2, "another worker")
            until(lambda: metric(server, "diesel_workers") == 2, "its first report")
        client.call({"do": "echo"})
        assert metric(server, "diesel_worker_starts_total") == 5
        assert metric(server, "diesel_connections") <= 2
        assert server.log.count("is started again") == 3


@pytest.mark.deep
def test_H6_a_hanging_worker_is_replaced(tmp_path: Path) -> None:
    with stand_in(tmp_path, "--metrics", "0", workers=2) as server:
        hung, other = server.workers()
        os.kill(hung, signal.SIGSTOP)
        until(lambda: not is_running(hung), "its end", 60)
        until(lambda: len(server.workers()) == 2, "another worker")
        assert other in server.workers()
        assert "hangs, and is killed" in server.log
        link(server).call({"do": "echo"})


@pytest.mark.real_start
def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    with stand_in(tmp_path, workers=2) as server:
        workers = server.workers()
        assert len(workers) == 2
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: not any(map(is_running, workers)), "the workers' end", 10)


def test_a_worker_that_cannot_start_ends_the_server_with_its_error(tmp_path: Path) -> None:
    none = ("--tls-cert", "/none", "--tls-key", "/none")
    result = run(tmp_path, *ANY_PORT, *STORE, *none, program=PROGRAM, **STAND_IN)
    assert result.returncode == 2
    assert "/none" in result.stderr


def test_SIGHUP_reloads_the_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path / "ca")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
    bad, good = authority.issue("other.example"), authority.issue()
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"

    def install(source: Pair) -> None:
        certificate.write_bytes(source.certificate.read_bytes())
        key.write_bytes(source.key.read_bytes())

    install(bad)
    arguments = ("--tls-cert", str(certificate), "--tls-key", str(key))
    with stand_in(tmp_path, *arguments, workers=2, listen="0.0.0.0:0") as server:
        url = parse_url(f"diesel+tls://localhost:{server.port}")
        with pytest.raises(MetadataError, match="certificate"):
            ServerLink(url, ME).call({"do": "echo"})
        install(good)
        server.signal(signal.SIGHUP)
        until(lambda: server.log.count("has been loaded again") == 2, "the new certificate")
        client = ServerLink(url, ME)
        client.call({"do": "echo"})
        certificate.write_text("nonsense")
        server.signal(signal.SIGHUP)
        until(lambda: server.log.count("keeps the certificate") == 2, "the refusal")
        client.close_idle()
        client.call({"do": "echo"})


def test_memory_stays_flat_under_hostile_clients(tmp_path: Path) -> None:
    """FAULTS F7."""
    with stand_in(tmp_path) as server:
        (worker,) = server.workers()
        client = link(server)
        for _ in range(50):
            client.call({"do": "echo"}, [bytes(1 << 20)])
        before = resident_bytes(worker)
        for round_ in range(3):
            crowd = []
            for i in range(1000):
                knocking = socket.create_connection(("127.0.0.1", server.port))
                knocking.setblocking(False)
                result = [b"", b"\x93DIESNET", os.urandom(5000), b"GET / HTTP/1.1\r\n\r\n"][i % 4]
                with suppress(OSError):
                    knocking.send(result)
                crowd.append(knocking)
            client.call({"do": "echo"}, [bytes(1 << 20)])
            for knocking in crowd:
                knocking.close()
            assert resident_bytes(worker) - before < 64 << 20, round_
        client.call({"do": "echo"})


def test_a_worker_config_survives_its_json() -> None:
    task = WorkerConfig(
        "file:///x?meta=redis://:hush@h", 0, True, [3], 4, 1, 5, "", "", "", 0, {"A": "é"}
    )
    assert "hush" not in repr(task)
    assert json.loads(config_line(task))["sockets"] == [3]


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    mine = os.fsencode(tmp_path)
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            assert os.readlink(f"/proc/{pid}/cwd").encode() != mine or int(pid) == os.getpid()
        except OSError:
            continue


def test_only_the_first_report_of_a_worker_is_written_to_its_descriptor() -> None:
    """The number may belong to a connection by then."""
    read, write = os.pipe()
    config = WorkerConfig("file:///x", 0, True, (), 0, 1, write, "", "", "", 0, {})
    try:
        worker._report(config, "{}")
        assert os.read(read, 100) == b"{}\n"
        assert os.read(read, 100) == b"", "the supervisor sees the end"
        other = os.open(os.devnull, os.O_WRONLY)
        assert other != write, "the number stays taken"
        os.close(other)
        worker._report(config, "late")
        assert os.read(read, 100) == b""
    finally:
        os.close(read)
        os.close(write)
