"""Tests of `dlcmd` over stores that machines share: an S3 server and a Redis.

tests/FAULTS.md lists the faults (C1, G8, A16) that names and messages mention; cli/dlcmd/README.md
lists the exit codes.
"""

import os
import shutil
import socket
import time
from pathlib import Path

import boto3
import pytest

from tests.ingest.test_tar import tar_of
from tests.storage.conftest import s3 as s3
from tests.storage.metadata.redis_servers import RedisServer
from tests.storage.objects.s3_server import Server, credentials
from tests.storage.objects.scripted_s3 import Rule, ScriptedS3
from tests.trees import facts, odd_tree, write

from ..waiting import wait_until
from .conftest import Dlcmd


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests to the test's own server must not go through a proxy of this machine."""
    for name in [name for name in os.environ if "proxy" in name.lower()]:
        monkeypatch.delenv(name)


@pytest.fixture
def shared(
    dlcmd: Dlcmd, s3: Server, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> Dlcmd:
    """A repository in a bucket, with its metadata in a Redis."""
    for name, text in s3.environ.items():
        monkeypatch.setenv(name, text)
    with redis_server.client() as client:
        client.flushall()
    monkeypatch.setenv("DIESEL_URL", f"{s3.place()}?meta={redis_server.url}")
    return dlcmd


def test_a_tree_is_put_listed_and_written_back(shared: Dlcmd, tmp_path: Path) -> None:
    source = odd_tree(tmp_path / "source")
    shared.program("put", source, "pets")
    assert "pets" in shared.program("ls").out.decode()
    shared.program("get", "pets", tmp_path / "copy")
    assert facts(tmp_path / "copy") == facts(source)
    assert b"0 files" in shared.program("put", source, "pets").out
    shared.program("verify", "pets")
    shared.program("rm", "-r", "pets/sub")
    shared.program("verify", "pets")
    shared.program("delete-dataset", "pets", "--yes")
    assert shared.program("ls", "pets", code=10).out == b""


def test_C3_an_emptied_redis_is_not_an_empty_repository(
    shared: Dlcmd, redis_server: RedisServer, tmp_path: Path
) -> None:
    source = write(tmp_path / "source", {f"d{i % 3}/{i}": os.urandom(100) for i in range(100)})
    shared.program("put", source, "pets")
    with redis_server.client() as client:
        client.flushall()
    shared.program("get", "pets", tmp_path / "by snapshot")
    assert facts(tmp_path / "by snapshot") == facts(source)
    listed = shared.program("ls", "-R", "pets").out  # all that was ever acknowledged
    assert len(listed.splitlines()) >= 100
    shared.program("recover", "pets")
    assert shared.program("ls", "-R", "pets").out == listed
    assert len(shared.program("ls", "-R", "pets").out.splitlines()) >= 100
    shared.program("verify", "pets")
    (source / "more").write_bytes(b"more")
    shared.program("put", source, "pets")
    shared.program("verify", "pets")


def test_a_redis_that_has_lost_a_part_is_behind(
    shared: Dlcmd, redis_server: RedisServer, tmp_path: Path
) -> None:
    """As when one node of a cluster came back empty. Readers use the snapshot meanwhile."""
    source = write(tmp_path / "source", {f"{i}": b"x" for i in range(50)})
    shared.program("put", source, "pets")
    with redis_server.client() as client:
        lost = [key for key in client.keys("dfs:*") if b"{head}" not in key]
        assert lost
        client.delete(*lost)
    assert len(shared.program("ls", "pets").out.splitlines()) == 50
    (source / "more").write_bytes(b"more")
    result = shared.program("put", source, "pets", code=14)
    assert "recover" in result.err
    shared.program("recover", "pets")
    shared.program("put", source, "pets")
    shared.program("verify", "pets")
    assert len(shared.program("ls", "pets").out.splitlines()) == 51


def test_recover_since_brings_back_the_newest_chunks(
    shared: Dlcmd, redis_server: RedisServer, tmp_path: Path
) -> None:
    source = write(tmp_path / "source", {"a": b"1"})
    shared.program("put", source, "pets")
    (source / "b").write_bytes(b"2")
    shared.program("put", source, "pets")
    with redis_server.client() as client:
        client.flushall()
    shared.program("recover", "pets", "--since", "1h")
    assert {line.split()[-1] for line in shared.program("ls", "pets").out.splitlines()} == {
        b"a", b"b",
    }  # fmt: skip
    shared.program("verify", "pets")


def test_C1_a_put_fails_before_any_chunk_where_redis_is_down(
    dlcmd: Dlcmd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "source", {"a": b"1"})
    url = f"{(tmp_path / 'store').as_uri()}?meta=redis://me:hush@127.0.0.1:1"
    monkeypatch.setenv("DIESEL_URL", url)
    result = dlcmd.program("put", source, "pets", code=14)
    assert "127.0.0.1:1" in result.err
    assert "hush" not in result.err
    chunks = [path for path in (tmp_path / "store").rglob("*") if "chunks" in path.parts]
    assert chunks == []


def test_C2_redis_is_killed_in_the_middle_of_a_put(
    dlcmd: Dlcmd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It restarts with its log: the put goes on, and no file is missing or counted twice."""
    server = RedisServer(tmp_path / "redis", {"appendonly": "yes", "appendfsync": "always"})
    try:
        source = write(tmp_path / "source", {f"{i}": os.urandom(60_000) for i in range(400)})
        store = tmp_path / "store"
        monkeypatch.setenv("DIESEL_URL", f"{store.as_uri()}?meta={server.url}")
        with dlcmd.start("put", "--chunk-size", "64K", "--jobs", "1", source, "pets") as put:
            wait_until(lambda: sum("chunks" in path.parts for path in store.rglob("*")) >= 30)
            assert put.poll() is None, "A16: the put has ended: proves nothing"
            server.kill()
            time.sleep(2)
            assert put.poll() is None
            server.start()
            _, err = put.communicate(timeout=60)
        assert put.returncode == 0, err
        dlcmd.program("verify", "pets")
        dlcmd.program("get", "pets", tmp_path / "copy")
        assert facts(tmp_path / "copy") == facts(source)
        assert b"400 files" in dlcmd.program("du", "pets").out
    finally:
        server.close()


def test_G8_a_redis_of_another_store_is_refused(
    shared: Dlcmd, s3: Server, redis_server: RedisServer, tmp_path: Path
) -> None:
    """Else datasets of one repository would be taken for those of another."""
    source = write(tmp_path / "source", {"a": b"1"})
    shared.program("put", source, "pets")
    for url in (s3.place(), (tmp_path / "other").as_uri()):
        result = shared.program(
            "--url", f"{url}?meta={redis_server.url}", "put", source, "pets", code=2
        )
        assert "another object store" in result.err
    shared.program("verify", "pets")


def test_C7_a_redis_that_is_full_is_exit_code_16(
    dlcmd: Dlcmd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = RedisServer(tmp_path / "redis")
    try:
        source = write(tmp_path / "source", {f"{i:050}": b"x" for i in range(3_000)})
        monkeypatch.setenv("DIESEL_URL", f"{(tmp_path / 'store').as_uri()}?meta={server.url}")
        with server.client() as client:
            used = int(client.info("memory")["used_memory"])
            client.config_set("maxmemory", used + (100 << 10))
        result = dlcmd.program("put", source, "pets", code=16)
        assert "memory" in result.err
        with server.client() as client:
            client.config_set("maxmemory", 0)
        dlcmd.program("put", source, "pets")
        dlcmd.program("verify", "pets")
        dlcmd.program("get", "pets", tmp_path / "copy")
        assert facts(tmp_path / "copy") == facts(source)
    finally:
        server.close()


def test_C14_a_wrong_password_is_an_error_at_once(
    dlcmd: Dlcmd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = RedisServer(tmp_path / "redis", {"requirepass": "right-one"})
    try:
        source = write(tmp_path / "source", {"a": b"1"})
        monkeypatch.setenv("DIESEL_URL", f"{(tmp_path / 'store').as_uri()}?meta={server.url}")
        for password in ("wrong-one", ""):
            monkeypatch.setenv("DIESEL_REDIS_PASSWORD", password)
            result = dlcmd.program("put", source, "pets", code=14)
            assert "password" in result.err
            assert "wrong-one" not in result.err
        secret = tmp_path / "password"
        secret.write_text("right-one\n")
        secret.chmod(0o600)
        monkeypatch.setenv("DIESEL_REDIS_PASSWORD_FILE", str(secret))
        dlcmd.program("put", source, "pets")
    finally:
        server.close()


@pytest.mark.deep
@pytest.mark.parametrize(("method", "status", "times"), [
    ("HEAD", 403, 1), ("GET", 503, 4),
])  # fmt: skip
def test_O1_O3_one_bad_moment_of_a_bucket_does_not_make_a_recovery_forget(
    dlcmd: Dlcmd,
    redis_server: RedisServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    status: int,
    times: int,
) -> None:
    """The second of two chunks has the newer content of a file, and cannot be read for a while."""
    rule = Rule(method, "/chunks/", status=status, times=0)
    with ScriptedS3(rule) as server:
        for name, text in credentials(server.endpoint).items():
            monkeypatch.setenv(name, text)
        with redis_server.client() as client:
            client.flushall()
        monkeypatch.setenv("DIESEL_URL", f"s3://bucket/prefix?meta={redis_server.url}")
        for content in (b"old", b"newer"):
            dlcmd.program("put", write(tmp_path / "source", {"a": content}), "pets")
        rule.seen = rule.hits = 0
        rule.times = times
        dlcmd.program("recover", "pets")
        assert rule.hits == times
        if status == 403:  # 503 would be tried again for 30 s
            rule.times = 1000
            dlcmd.program("recover", "pets", code=13)
            rule.times = rule.hits
        assert dlcmd.program("cat", "pets/a").out == b"newer"


def test_O1_a_missing_bucket_is_an_error_at_once(
    shared: Dlcmd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "source", {"a": b"1"})
    monkeypatch.setenv("DIESEL_URL", "s3://no-such-bucket-of-ours/x?meta=redis://127.0.0.1:1")
    result = shared.program("put", source, "pets", code=13)
    assert "no-such-bucket-of-ours" in result.err
    assert "testing-secret" not in result.err


@pytest.mark.fuse
def test_a_mount_reads_from_the_bucket(
    shared: Dlcmd, redis_server: RedisServer, tmp_path: Path
) -> None:
    source = write(tmp_path / "source", {f"d{i % 3}/{i}": os.urandom(5_000) for i in range(100)})
    write(source, {"large": os.urandom(3 << 20)})
    shared.program("put", source, "pets")
    at = tmp_path / "mount"
    at.mkdir()
    shared.program("mount", "pets", at)
    try:
        assert {
            path.relative_to(at): path.read_bytes() for path in at.rglob("*") if path.is_file()
        } == {
            path.relative_to(source): path.read_bytes()
            for path in source.rglob("*")
            if path.is_file()
        }
        with redis_server.client() as client:
            client.flushall()
        shutil.copytree(at, tmp_path / "copy")
    finally:
        shared.program("umount", at)


def test_archives_in_a_bucket_are_put_once(shared: Dlcmd, s3: Server) -> None:
    """A glob matches no slash; a prefix stands for all below it."""
    place = s3.place()
    prefix = place.removeprefix(f"s3://{s3.bucket}/")
    client = boto3.client("s3", endpoint_url=s3.environ["AWS_ENDPOINT_URL"])
    for key in ("a.tar", "b.tar", "deep/c.tar", "d.txt"):
        body = (
            tar_of((f"{key[:-4]}/file", key.encode() * 9_000)) if key.endswith("tar") else b"text"
        )
        client.put_object(Bucket=s3.bucket, Key=f"{prefix}/{key}", Body=body)
    shared("put", "--unpack", f"{place}/*.tar", "pets")
    assert shared("ls", "-R", "pets").out == b"a\nb\na/file\nb/file\n"
    found = shared("--json", "put", "--unpack", f"{place}/*.tar", "pets").objects[-1]
    assert (found["archives"], found["archives_skipped"], found["files"]) == (2, 2, 0)
    labels = b"path,target\nb/file,1\na/file,0\n"
    client.put_object(Bucket=s3.bucket, Key=f"{prefix}/lists/labels.csv", Body=labels)
    words = ["put", "--unpack", f"{place}/*.tar", "--manifest", f"{place}/lists/labels.csv", "pets"]
    for files in (1, 0):
        found = shared("--json", *words).objects[-1]
        assert (found["samples"], found["archives_skipped"], found["files"]) == (2, 2, files)
    assert shared("cat", "pets/.manifest.csv").out == labels
    client.delete_object(Bucket=s3.bucket, Key=f"{prefix}/lists/labels.csv")
    result = shared("put", "--unpack", place, "all", code=3)
    assert "d.txt: it is no archive" in result.err
    assert shared("cat", "all/deep/c/file").out == b"deep/c.tar" * 9_000
    shared("put", "--unpack", f"{place}/e*.tar", "pets", code=10)
    shared("put", "--unpack", f"{place}/a.tar#sha256={'0' * 64}", "pets", code=3)


def test_the_objects_of_a_bucket_are_put(shared: Dlcmd, s3: Server, tmp_path: Path) -> None:
    """The bucket also has a folder object, as cloud consoles make them."""
    place = s3.place()
    prefix = place.removeprefix(f"s3://{s3.bucket}/")
    client = boto3.client("s3", endpoint_url=s3.environ["AWS_ENDPOINT_URL"])
    contents = {"a": b"1", "d/b": os.urandom(9 << 20), "d/e/c": b"", "\u00fc \u4f60": b"name"}
    for key, content in contents.items():
        client.put_object(Bucket=s3.bucket, Key=f"{prefix}/{key}", Body=content)
    client.put_object(Bucket=s3.bucket, Key=f"{prefix}/d/", Body=b"")
    shared.program("put", place, "pets/in")
    shared.program("get", "pets/in", tmp_path / "copy")
    found = {
        str(path.relative_to(tmp_path / "copy")): path.read_bytes()
        for path in (tmp_path / "copy").rglob("*")
        if path.is_file()
    }
    assert found == contents
    assert b"4 unchanged" in shared.program("put", place, "pets/in").out
    client.delete_object(Bucket=s3.bucket, Key=f"{prefix}/a")
    result = shared.program("put", "-n", "--delete", place, "pets/in")
    assert result.out.splitlines()[1:] == [b"would delete in/a"]
    shared.program("put", "--delete", place, "pets/in")
    assert b" a" not in shared.program("ls", "pets/in").out
    for key in contents:
        client.delete_object(Bucket=s3.bucket, Key=f"{prefix}/{key}")
    client.delete_object(Bucket=s3.bucket, Key=f"{prefix}/d/")
    result = shared.program("put", "--delete", place, "pets/in", code=10)
    assert place in result.err
    shared.program("put", "--delete", "--allow-empty", place, "pets/in")
    assert shared.program("ls", "-R", "pets").out in (b"", b"in\n", b"in/\n")


def test_a_single_object_of_a_bucket_is_put(shared: Dlcmd, s3: Server) -> None:
    """It is put as a single file is. If objects lie below its key as a prefix, those are put
    instead."""
    place = s3.place()
    prefix = place.removeprefix(f"s3://{s3.bucket}/")
    client = boto3.client("s3", endpoint_url=s3.environ["AWS_ENDPOINT_URL"])
    content = os.urandom(9 << 20)
    client.put_object(Bucket=s3.bucket, Key=f"{prefix}/large", Body=content)
    for target, path in (("", "large"), ("/in/", "in/large"), ("/as", "as"), ("/in", "in/large")):
        shared.program("put", f"{place}/large", f"pets{target}")
        assert shared.program("cat", f"pets/{path}").out == content
    assert "--delete" in shared.program("put", "--delete", f"{place}/large", "pets", code=2).err
    client.put_object(Bucket=s3.bucket, Key=f"{prefix}/large/below", Body=b"1")
    shared.program("put", f"{place}/large", "other")
    assert shared.program("cat", "other/below").out == b"1"
    assert shared.program("cat", "other/large", code=10).out == b""


@pytest.mark.parametrize(
    ("key", "shown", "why"),
    [
        ("a\tb", r"a\tb", "control characters"),
        ("a\x1b[2Jb", r"a\x1b[2Jb", "control characters"),
        ("a//b", "a//b", "empty or dotted parts"),
        ('a"/../b', 'a"/../b', "empty or dotted parts"),
    ],
)
def test_a_key_that_cannot_be_a_path_is_named(
    dlcmd: Dlcmd, monkeypatch: pytest.MonkeyPatch, key: str, shown: str, why: str
) -> None:
    """The store's library then lists no other object either; no empty dataset is left."""
    with ScriptedS3() as server:
        for name, text in credentials(server.endpoint).items():
            monkeypatch.setenv(name, text)
        server.put(f"images/{key}", b"1")
        server.put("images/fine", b"1")
        result = dlcmd.program("put", "s3://bucket/images", "pets", code=13)
    assert f"the key images/{shown} has {why}" in result.err
    assert "rename or remove that object" in result.err
    assert len(result.err.splitlines()) == 1
    assert dlcmd("ls", code=13 if not dlcmd.store.exists() else 0).out == b""


def test_a_prefix_without_objects_leaves_no_dataset(
    dlcmd: Dlcmd, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ScriptedS3() as server:
        for name, text in credentials(server.endpoint).items():
            monkeypatch.setenv(name, text)
        server.put("images/fine", b"1")
        server.put("empty/", b"")
        for typo in ("image", "images/fin", "images/fine/x"):
            result = dlcmd.program("put", f"s3://bucket/{typo}", "pets", code=10)
            assert f"there is no object below s3://bucket/{typo}, nor at that key" in result.err
        assert dlcmd("ls").out == b""
        assert b"put 0 files" in dlcmd.program("put", "s3://bucket/empty", "pets").out


@pytest.mark.deep
def test_O1_a_source_that_cannot_be_reached_fails_within_30_s(
    dlcmd: Dlcmd, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for name, text in credentials(endpoint).items():
            monkeypatch.setenv(name, text)
        begun_s = time.monotonic()
        result = dlcmd.program("put", "s3://bucket/images", "pets", code=13)
    assert "connection refused" in result.err
    assert time.monotonic() - begun_s < 32  # deploy/README.md says 30 s; the program has to start
    assert not dlcmd.store.exists()


def test_a_verb_notes_once_that_it_reads_the_newest_snapshot(
    shared: Dlcmd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis is down: reading goes on, and the note is printed once, unless -q is given."""
    source = write(tmp_path / "source", {"a": b"1", "b": b"2"})
    shared.program("put", source, "pets")
    place = os.environ["DIESEL_URL"].partition("?")[0]
    monkeypatch.setenv("DIESEL_URL", f"{place}?meta=redis://me:hush@127.0.0.1:1")
    result = shared.program("cat", "pets/a", "pets/b")
    assert result.out == b"12"
    (line,) = result.err.splitlines()
    assert "127.0.0.1:1" in line
    assert "the newest snapshot" in line
    assert "hush" not in line
    assert shared.program("-q", "ls", "pets").err == ""
