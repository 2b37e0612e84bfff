"""S8 and S11: a key, a Redis password and a bucket's secret go through a day's work; then all
files, outputs, messages and pages of it are searched for them.
"""

import os
import secrets
import shutil
import subprocess
import sys
import tarfile
import threading
import urllib.request
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import boto3
import pytest
from redis import Redis

from diesel_fs.credentials import KEY_PREFIX, parse_key
from tests.cli.conftest import CommandResult
from tests.storage.conftest import s3 as s3
from tests.storage.metadata.redis_servers import RedisServer, execute, free_port
from tests.storage.objects.s3_server import Server as S3
from tests.trees import facts, write
from tests.waiting import wait_until

from .between import Between
from .program import Server
from .shell_users import ShellUser, program_environment


def forms(name: str, secret: bytes) -> dict[str, bytes]:
    """The forms in which a secret could show: itself, and as people and programs write bytes."""
    return {
        name: secret,
        f"{name}, hex": secret.hex().encode(),
        f"{name}, base64": b64encode(secret).rstrip(b"="),
        f"{name}, repr": repr(secret)[2:-1].encode(),
        f"{name}, part": b64encode(secret)[4:28],
    }


class Search:
    def __init__(self, **canaries: bytes) -> None:
        self.needles: dict[str, bytes] = {}
        self.found: list[tuple[str, str]] = []
        self.searched = 0
        for name, secret in canaries.items():
            self.add(name, secret)

    def add(self, name: str, secret: bytes) -> None:
        self.needles |= forms(name, secret)

    def look(self, where: str, content: bytes) -> None:
        self.searched += len(content)
        self.found += [(name, where) for name, needle in self.needles.items() if needle in content]

    def look_at_files(self, folder: Path, *excepted: str) -> None:
        for path in folder.rglob("*"):
            if path.name in excepted or path.is_symlink() or not path.is_file():
                continue
            self.look(str(path), os.fsencode(path) + path.read_bytes())

    def look_at_output(self, result: CommandResult) -> None:
        self.look("what a program said", result.out + result.err.encode())

    def look_at_redis(self, client: Redis) -> None:
        commands = {
            b"string": ("GET",), b"hash": ("HGETALL",), b"set": ("SMEMBERS",),
            b"list": ("LRANGE", "0", "-1"),
        }  # fmt: skip
        for key in client.scan_iter():
            kind = execute(client, "TYPE", key)
            assert isinstance(kind, bytes)
            command, *more = commands[kind]
            reply = execute(client, command, key, *more)
            values = [*reply] if isinstance(reply, dict | list | set) else [reply]
            values += reply.values() if isinstance(reply, dict) else []
            for value in [key, *values]:
                self.look(f"Redis, {key!r}", value if isinstance(value, bytes) else b"")

    def look_at_bucket(self, server: S3) -> None:
        client = boto3.client(
            "s3",
            endpoint_url=server.environ["AWS_ENDPOINT_URL"],
            aws_access_key_id="any",
            aws_secret_access_key="any",  # noqa: S106
            region_name="us-east-1",
        )
        for each in client.list_objects_v2(Bucket=server.bucket).get("Contents", []):
            body = client.get_object(Bucket=server.bucket, Key=each["Key"])["Body"].read()
            self.look(f"the object {each['Key']}", each["Key"].encode() + body)

    def look_at_processes(self, *excepted: int, environment: bool = True) -> None:
        """Search the command line of every process, and its inherited environment."""
        for folder in Path("/proc").glob("[0-9]*"):
            if int(folder.name) in (os.getpid(), *excepted):
                continue
            for what in ("cmdline", "environ") if environment else ("cmdline",):
                with suppress(OSError):
                    content = (folder / what).read_bytes()
                    command = (folder / "cmdline").read_bytes()[:200]
                    self.look(f"{what} of {command!r}", content)


@contextmanager
def watched(search: Search, *excepted: int) -> Iterator[None]:
    ended, searched = threading.Event(), threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            search.look_at_processes(*excepted, environment=False)
            searched.set()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
        assert searched.wait(20)
    finally:
        ended.set()
        thread.join(10)


class Deployment:
    def __init__(self, folder: Path, s3: S3, redis: RedisServer) -> None:
        self.folder = folder
        self.s3 = s3
        self.redis = redis
        self.redis_password = redis.options["requirepass"]
        self.s3_secret = f"canary-{secrets.token_hex(16)}"
        self.own = {
            **s3.environ,
            "AWS_SECRET_ACCESS_KEY": self.s3_secret,
            "DIESEL_REDIS_PASSWORD": self.redis_password,
            "PYTHONPATH": program_environment()["PYTHONPATH"],
        }
        self.store = s3.place()
        direct = f"{self.store}?meta={self.redis.tcp_url}"
        key = folder / "root.key"
        ShellUser(direct)("user", "add", "root", "--admin", "--key-out", key, environment=self.own)
        self.seed = parse_key(key.read_text())
        self.server = Server(
            folder / "server",
            "--store", self.store, "--meta", self.redis.tcp_url, "--metrics", "127.0.0.1:0",
            workers=2, environment=self.own,
        )  # fmt: skip
        home = folder / "home"
        home.mkdir()
        self.home = {"HOME": str(home)}
        for kind in ("CACHE", "CONFIG", "DATA", "STATE"):
            self.home[f"XDG_{kind}_HOME"] = str(home / kind.lower())
        self.search = Search(
            key=self.seed, redis=self.redis_password.encode(), bucket=self.s3_secret.encode()
        )

    def user(self, url: str) -> ShellUser:
        return ShellUser(url, "root", self.folder / "root.key")

    def metrics(self) -> bytes:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{self.server.metrics_port}/metrics", timeout=10) as it:
            return bytes(it.read())

    def look_at_remains(self) -> None:
        search = self.search
        search.look_at_files(self.folder, "root.key", "near.key", "redis.conf")
        search.look_at_bucket(self.s3)
        search.look_at_redis(self.redis.client())
        search.look("metrics", self.metrics())
        search.look_at_processes(self.server.pid)

    def close(self) -> None:
        self.server.close()


@pytest.fixture
def day(tmp_path: Path, s3: S3) -> Iterator[Deployment]:
    options = {"requirepass": f"canary-{secrets.token_hex(16)}"}
    with RedisServer(tmp_path / "redis", options, port=free_port()) as redis:
        day = Deployment(tmp_path, s3, redis)
        yield day
        day.close()


def test_S8_a_planted_secret_is_found(tmp_path: Path) -> None:
    secret = secrets.token_bytes(32)
    for number, needle in enumerate(forms("key", secret).values()):
        search = Search(key=secret)
        write(tmp_path / str(number), {"deep/log": b"before " + needle + b" behind"})
        search.look_at_files(tmp_path / str(number))
        assert search.found
    search = Search(key=b64encode(secret))
    sleeping = [sys.executable, "-c", "import time; time.sleep(60)", b64encode(secret).decode()]
    with subprocess.Popen(sleeping) as process, watched(search):
        wait_until(lambda: search.found)
        process.kill()


@pytest.mark.deep
def test_S8_S11_no_secret_leaves(day: Deployment, tmp_path: Path) -> None:
    search, source = day.search, tmp_path / "src"
    write(source, {f"d{i % 3}/{i}": os.urandom(2000) for i in range(60)})
    with Between(day.server.port) as tap:
        root = day.user(f"diesel://127.0.0.1:{tap.port}")

        def do(
            *words: str | Path,
            code: int | None = None,
            environment: Mapping[str, str] | None = None,
        ) -> CommandResult:
            result = root.run(*words, environment={**day.home, **(environment or {})})
            search.look_at_output(result)
            assert code is None or result.code == code, (words, result)
            return result

        with watched(search, day.server.pid):  # a day's work
            do("put", source, "pets", code=0)
            do("-v", "ls", "-R", "pets", code=0)
            do("get", "pets", tmp_path / "copy", code=0)
            assert facts(tmp_path / "copy") == facts(source)
            do("save-meta", "pets", tmp_path / "snapshot", code=0)
            do("verify", "pets", code=0)
            do("--json", "stat", "pets/d0/0", code=0)
            do("user", "export", tmp_path / "accounts.jsonl", code=0)
            do("user", "ls", "--json", code=0)
            do("grant", "pets", "root", "read", code=0)

        # Errors. At first, secrets stand in our own command line
        near = tmp_path / "near.key"
        near.write_text(f"{KEY_PREFIX}{b64encode(day.seed).decode()[:-3]}\n")
        near.chmod(0o600)
        do("-v", "--url", f"diesel://root:{day.redis_password}@127.0.0.1:1", "ls")
        do("-v", "user", "add", "x", "--public-key", (root.key_file or near).read_text())
        with watched(search, day.server.pid):
            for words in (
                ["-v", "ls", "nothing"],
                ["-v", "--json", "cat", "pets/nothing"],
                ["-v", "--user", "nobody", "ls"],
                ["-v", "--key-file", near, "ls"],
                ["-v", "--key-file", tmp_path, "ls"],
                ["-v", "--url", "diesel://127.0.0.1:1", "ls"],
                ["-v", "user", "import", near],
            ):
                assert do(*words).code not in (0, 1), words
            url = ("--url", f"{day.store}?meta={day.redis.tcp_url}")
            result = do("-v", *url, "user", "ls", code=14, environment=day.s3.environ)
            assert "DIESEL_REDIS_PASSWORD" in result.err
            with day.redis.client() as client:  # so that a server's handler meets what cannot be
                for key in client.scan_iter("dfs:{head}:m:*"):
                    client.hset(key, "version", "nonsense")
            do("-v", "ls", "pets")
            do("-v", "put", source, "pets")
            do("-v", "du", "pets")
            assert "the metadata store has something else" in day.server.log
            day.redis.kill()
            do("-v", "user", "ls", code=14)
            for words in (["ls", "pets"], ["cat", "pets/d0/0"], ["verify", "pets"], ["user", "ls"]):
                result = do("-v", *words)
                assert "cannot" in result.err
                assert str(day.redis.port) not in result.err, words
            day.redis.start()
        search.look("what clients and servers said to each other", bytes(tap.copy))
        assert len(tap.copy) > 100_000
    day.look_at_remains()
    assert search.searched > 1_000_000
    assert not search.found


def test_S8_the_error_of_a_failed_start_has_no_secret(day: Deployment, tmp_path: Path) -> None:
    """The URL is only in its own command line: its workers have none."""
    wrong = f"canary-{secrets.token_hex(16)}"
    search = Search(redis=day.redis_password.encode(), wrong=wrong.encode())
    host = day.redis.tcp_url.removeprefix("redis://")
    bad = Server(
        tmp_path / "bad",
        "--store", day.store, "--meta", f"redis://:{wrong}@{host}",
        environment=day.own, wait=False,
    )  # fmt: skip
    assert bad.wait() == 14
    search.look("its log", bad.log.encode())
    bad.close()
    environment = {name: text for name, text in day.own.items() if "REDIS" not in name}
    meta = f"redis://:{day.redis_password}@{host}"
    with Server(
        tmp_path / "good", "--store", day.store, "--meta", meta, workers=2, environment=environment
    ) as good:
        day.user(good.url)("put", write(tmp_path / "src", {"a": b"1"}), "pets")
        assert len(good.workers()) == 2
        search.look_at_processes(good.pid, day.server.pid)
        search.look("its log", good.log.encode())
    assert not search.found


@pytest.mark.fuse
def test_S8_S17_no_secret_leaves_by_a_mount(day: Deployment, tmp_path: Path) -> None:
    """The mount's processes do not have the key in the environment."""
    source = write(tmp_path / "src", {f"{i}": os.urandom(3000) for i in range(40)})
    folder = tmp_path / "mnt"
    root = day.user(day.server.url)
    root("put", source, "pets", environment=day.home)
    for environment in (
        day.home,
        {**day.home, "DIESEL_KEY": f"{KEY_PREFIX}{b64encode(day.seed).decode()}"},
    ):
        user = root if environment is day.home else ShellUser(day.server.url, "root")
        folder.mkdir(exist_ok=True)
        result = user("-v", "mount", "pets", folder, environment=environment)
        day.search.look_at_output(result)
        try:
            assert {p.name: p.read_bytes() for p in folder.iterdir()} == {
                p.name: p.read_bytes() for p in source.iterdir()
            }
            day.search.look_at_processes(day.server.pid)
            for hidden in ("stats", "snapshot", "filelist"):
                day.search.look(hidden, (folder / ".diesel" / hidden).read_bytes())
        finally:
            user("umount", folder, environment=day.home)
    shutil.rmtree(folder)
    day.look_at_remains()
    assert not day.search.found
    for path in (tmp_path / "home").rglob("*"):
        assert not path.is_file() or not path.stat().st_mode & 0o077, path


class Canaries(dict[str, str]):
    """Secrets, each by the only place in which a test has put it."""

    def __missing__(self, where: str) -> str:
        self[where] = f"canary-{secrets.token_hex(16)}"
        return self[where]


@pytest.mark.fuse
def test_S8_no_secret_leaves_by_reports_for_support(day: Deployment, tmp_path: Path) -> None:
    canaries, folder, archive = Canaries(), tmp_path / "mnt", tmp_path / "help.tar.gz"
    key = f"{KEY_PREFIX}{b64encode(day.seed).decode()}"
    root = day.user(day.server.url)
    root("put", write(tmp_path / "src", {"a": b"1"}), "pets", environment=day.home)
    home = Path(day.home["HOME"])
    stored = f"file:///x?meta=redis://:{canaries['config.toml']}@127.0.0.1:1"
    write(home / "config" / "diesel", {"config.toml": f'url = "{stored}"\n'.encode()})
    password_file = tmp_path / "redis.password"
    password_file.touch(mode=0o600)
    password_file.write_text(canaries["password file"])
    environment = {
        **day.home,
        "DIESEL_KEY": key,
        "DIESEL_TASK_KEY": canaries["DIESEL_TASK_KEY"],
        "DIESEL_REDIS_PASSWORD": day.redis_password,
        "DIESEL_REDIS_PASSWORD_FILE": str(password_file),
        "DIESEL_REDIS_SENTINEL_PASSWORD": canaries["sentinel"],
        "AWS_ACCESS_KEY_ID": canaries["AWS_ACCESS_KEY_ID"],
        "AWS_SECRET_ACCESS_KEY": day.s3_secret,
        "AWS_SESSION_TOKEN": canaries["AWS_SESSION_TOKEN"],
        "AWS_ENDPOINT_URL": f"http://me:{canaries['endpoint']}@127.0.0.1:1",
        "https_proxy": f"http://me:{canaries['proxy']}@127.0.0.1:1",
        "MY_OWN_TOKEN": canaries["a variable of another program"],
    }
    user = ShellUser(day.server.url, "root")
    user("mount", "pets", folder, environment={**day.home, "DIESEL_KEY": key})
    try:
        log = [
            *(f"known: {value}" for value in [*environment.values(), *canaries.values()]),
            f"connects to redis://:{canaries['a URL in a log']}@host:1/0",
            f"password={canaries['a password in a log']}, token: {canaries['a token in a log']}",
            f'{{"secret": "{canaries["JSON in a log"]}"}}',
            f"Authorization: Bearer {canaries['a header in a log']}",
            f"GET /?X-Amz-Signature={canaries['a signature in a log']}&x=1",
            f"{KEY_PREFIX}{b64encode(canaries['the key of another user'].encode()).decode()}",
        ]
        write(home / "state" / "diesel", {"old.log": "\n".join(log).encode() + b"\n"})
        search = Search(key=day.seed)
        search.needles |= day.search.needles
        direct = f"{day.store}?meta=redis://:{canaries['a URL']}@127.0.0.1:1"
        with subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)", canaries["a command line"],
             "diesel_fs.mounts.daemon.supervisor"]
        ) as other:  # fmt: skip
            for name, secret in canaries.items():
                search.add(name, secret.encode())
            for words in (
                ["-v", "doctor", "--json", "--quick", "--write"],
                ["doctor", "--quick", folder],
                ["doctor", "--quick", direct],
                ["doctor", "--yes", "--bundle", archive],
            ):
                result = user.run(*words, environment=environment)
                assert result.code in (0, 3), result
                search.look_at_output(result)
            other.kill()
        with tarfile.open(archive) as packed:
            names = packed.getnames()
            for name in names:
                file = packed.extractfile(name)
                assert file is not None
                search.look(name, name.encode() + file.read())
    finally:
        user("umount", folder, environment={**day.home, "DIESEL_KEY": key})
    assert {"diesel-bundle/logs/old.log", "diesel-bundle/doctor.json"} <= set(names)
    assert any(name.startswith("diesel-bundle/mounts/") for name in names)
    assert archive.stat().st_mode & 0o777 == 0o600
    assert len(search.needles) > 80
    assert not search.found
