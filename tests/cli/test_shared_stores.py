"""Tests of `dlcmd` over stores that machines share: an S3 server and a Redis.

tests/FAULTS.md lists the faults (C1, G8, A16) that names and messages mention; cli/dlcmd/README.md
lists the exit codes.
"""

import os
import shutil
import time
from pathlib import Path

import boto3
import pytest

from tests.ingest.test_tar import tar_of
from tests.storage.conftest import s3 as s3
from tests.storage.metadata.redis_servers import RedisServer
from tests.storage.objects.s3_server import Server
from tests.trees import facts, odd_tree, write

from ..waiting import wait_until
from .conftest import Dlcmd


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if "proxy" in name.lower()]:
        monkeypatch.delenv(name)


@pytest.fixture
def shared(
    dlcmd: Dlcmd, s3: Server, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> Dlcmd:
    for name, text in s3.environ.items():
        monkeypatch.setenv(name, text)
    with redis_server.client() as client:
        client.flushall()
    monkeypatch.setenv("DIESEL_URL", f"{s3.place()}?meta={redis_server.url}")
    return dlcmd


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


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
    """Recovery also restores the files that only the newest chunks have."""
    source = write(tmp_path / "source", {f"d{i % 3}/{i}": os.urandom(100) for i in range(100)})
    shared.program("put", source, "pets")
    write(source, {"d0/newer": b"newer"})
    shared.program("put", source, "pets")
    listed = shared.program("ls", "-R", "pets").out  # all acknowledged files
    assert len(listed.splitlines()) == 104
    with redis_server.client() as client:
        client.flushall()
    noted = shared.program("get", "pets", tmp_path / "by snapshot").err
    assert "the metadata store does not know 'pets' any more" in noted
    assert "run `dlcmd recover pets`" in noted
    assert facts(tmp_path / "by snapshot") == facts(source)
    for since in (["--since", "1h"], []):
        shared.program("recover", *since, "pets")
        again = shared.program("ls", "-R", "pets")
        assert (again.out, again.err) == (listed, "")
    (source / "more").write_bytes(b"more")
    shared.program("put", source, "pets")
    shared.program("verify", "pets")


def test_C7_a_full_redis_gets_room_by_rm_purge_and_delete_dataset(
    dlcmd: Dlcmd, redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIESEL_URL", f"{dlcmd.store.as_uri()}?meta={redis_server.url}")
    source = write(tmp_path / "source", {f"d{i % 3}/{i}": os.urandom(100) for i in range(100)})
    with redis_server.client() as client:
        client.flushall()
        dlcmd("put", source, "pets")
        dlcmd("put", source, "more")
        dlcmd("user", "add", "ann")
        client.config_set("maxmemory", 1)
        try:
            assert b"d0" in dlcmd("ls", "pets").out
            dlcmd("user", "rm", "ann")
            dlcmd("rm", "-r", "pets/d0")
            dlcmd("purge", "--grace", "0", "pets")
            dlcmd("verify", "pets")
            assert dlcmd("ls", "pets").out == b"d1\nd2\n"
            assert "maxmemory" in dlcmd("put", source, "pets", code=16).err
            before = client.dbsize()
            dlcmd("delete-dataset", "more", "--yes")
            assert client.dbsize() < before
            dlcmd("delete-dataset", "pets", "--yes")
        finally:
            client.config_set("maxmemory", 0)
    assert dlcmd("ls").out == b""


def test_C3_C4_counts_that_an_emptied_redis_has_lost_are_not_shown(
    dlcmd: Dlcmd, redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIESEL_URL", f"{dlcmd.store.as_uri()}?meta={redis_server.url}")
    with redis_server.client() as client:
        client.flushall()
        dlcmd("put", write(tmp_path / "source", {"a": b"1"}), "pets")
        client.flushall()
    listed = dlcmd("ls", "-l")
    assert listed.out.split()[:5] == [b"pets", *[b"?"] * 4]
    assert "does not know 'pets' any more; run `dlcmd recover pets`" in listed.err
    assert dlcmd("--json", "stat", "pets").objects[0]["files"] == 1


def test_C2_redis_is_killed_in_the_middle_of_a_put(
    dlcmd: Dlcmd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "source", {f"{i}": os.urandom(60_000) for i in range(400)})
    log = {"appendonly": "yes", "appendfsync": "always"}
    with RedisServer(tmp_path / "redis", log) as server:
        monkeypatch.setenv("DIESEL_URL", f"{dlcmd.store.as_uri()}?meta={server.url}")
        with dlcmd.start("put", "--chunk-size", "64K", "--jobs", "1", source, "pets") as put:
            wait_until(lambda: sum("chunks" in path.parts for path in dlcmd.store.rglob("*")) >= 30)
            assert put.poll() is None, "A16: the put has ended already, so the test proves nothing"
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


def test_C14_a_wrong_password_is_an_error_at_once(
    dlcmd: Dlcmd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, secret = write(tmp_path / "source", {"a": b"1"}), tmp_path / "password"
    secret.touch(0o600)
    secret.write_text("right-one\n")
    with RedisServer(tmp_path / "redis", {"requirepass": "right-one"}) as server:
        monkeypatch.setenv("DIESEL_URL", f"{dlcmd.store.as_uri()}?meta={server.url}")
        for password in ("wrong-one", ""):
            monkeypatch.setenv("DIESEL_REDIS_PASSWORD", password)
            result = dlcmd.program("put", source, "pets", code=14)
            assert "password" in result.err
            assert "wrong-one" not in result.err
        monkeypatch.setenv("DIESEL_REDIS_PASSWORD_FILE", str(secret))
        dlcmd.program("put", source, "pets")


@pytest.mark.fuse
def test_a_mount_of_a_bucket(shared: Dlcmd, redis_server: RedisServer, tmp_path: Path) -> None:
    source = write(tmp_path / "source", {f"d{i % 3}/{i}": os.urandom(5_000) for i in range(100)})
    write(source, {"large": os.urandom(3 << 20)})
    shared.program("put", source, "pets")
    at = tmp_path / "mount"
    shared.program("mount", "pets", at)
    try:
        assert contents(at) == contents(source)
        with redis_server.client() as client:
            client.flushall()
        shutil.copytree(at, tmp_path / "copy")
    finally:
        shared.program("umount", at)


def test_archives_in_a_bucket_are_put_once(shared: Dlcmd, s3: Server) -> None:
    """A glob matches no slash; a prefix stands for all objects below it."""
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
    client.put_object(Bucket=s3.bucket, Key=f"{prefix}/labels.csv", Body=labels)
    shared("put", "--unpack", f"{place}/*.tar", "--manifest", f"{place}/labels.csv", "pets")
    assert shared("cat", "pets/.manifest.csv").out == labels
    client.delete_object(Bucket=s3.bucket, Key=f"{prefix}/labels.csv")
    result = shared("put", "--unpack", place, "all", code=3)
    assert "d.txt: it is no archive" in result.err
    assert shared("cat", "all/deep/c/file").out == b"deep/c.tar" * 9_000
    shared("put", "--unpack", f"{place}/e*.tar", "pets", code=10)
    shared("put", "--unpack", f"{place}/a.tar#sha256={'0' * 64}", "pets", code=3)


def test_the_objects_of_a_bucket_are_put(shared: Dlcmd, s3: Server, tmp_path: Path) -> None:
    """Cloud consoles make folder objects. A single object is put as a single file is, unless
    objects lie below its key as a prefix."""
    place = s3.place()
    prefix = place.removeprefix(f"s3://{s3.bucket}/")
    client = boto3.client("s3", endpoint_url=s3.environ["AWS_ENDPOINT_URL"])
    objects = {"a": b"1", "d/b": os.urandom(9 << 20), "d/e/c": b"", "\u00fc \u4f60": b"name"}
    for key, content in (objects | {"d/": b""}).items():
        client.put_object(Bucket=s3.bucket, Key=f"{prefix}/{key}", Body=content)
    shared.program("put", place, "pets/in")
    shared.program("get", "pets/in", tmp_path / "copy")
    assert contents(tmp_path / "copy") == objects
    assert b"4 unchanged" in shared.program("put", place, "pets/in").out
    shared.program("put", f"{place}/a", "pets/as")
    assert shared.program("cat", "pets/as").out == b"1"
    assert "--delete" in shared.program("put", "--delete", f"{place}/a", "pets", code=2).err
    client.delete_object(Bucket=s3.bucket, Key=f"{prefix}/a")
    shared.program("put", "--delete", place, "pets/in")
    assert shared.program("ls", "-R", "pets/in").out.decode().split("\n")[0] == "d"
    nowhere = shared.program("put", "--delete", f"{place}/d/nowhere", "pets/in", code=10).err
    assert f"there is no object below {place}/d/nowhere, nor at that key" in nowhere


def test_C1_while_redis_is_down_a_put_fails_and_readers_note_it(
    shared: Dlcmd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "source", {"a": b"1", "b": b"2"})
    shared.program("put", source, "pets")
    place, down = os.environ["DIESEL_URL"].partition("?")[0], "meta=redis://me:hush@127.0.0.1:1"
    monkeypatch.setenv("DIESEL_URL", f"{place}?{down}")
    result = shared.program("cat", "pets/a", "pets/b")
    assert result.out == b"12"
    (note,) = result.err.splitlines()
    assert "the newest snapshot" in note
    assert shared.program("-q", "ls", "pets").err == ""
    monkeypatch.setenv("DIESEL_URL", f"{shared.store.as_uri()}?{down}")
    error = shared.program("put", source, "pets", code=14).err
    for text in (note, error):
        assert "127.0.0.1:1" in text
        assert "hush" not in text
    assert [path for path in shared.store.rglob("*") if "chunks" in path.parts] == []
