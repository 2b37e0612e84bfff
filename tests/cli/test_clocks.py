"""Tests of `dlcmd` and `diesel-server` on hosts with a wrong clock (K2 and K4 in tests/FAULTS.md).

libfaketime shows another time to one program; Redis and the file system have the right time. It
is loaded by `LD_PRELOAD`, since a killed `faketime` leaves a semaphore behind, with which a
later one of the same process ID would fail.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from diesel_fs.format.chunk_id import IdFields, id_seconds
from diesel_fs.format.object_names import chunk_object
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.metadata.redis.store import RedisMetadata
from diesel_fs.storage.metadata.sqlite.store import SqliteMetadata
from tests.repository.test_interleavings import Writer
from tests.server.program import Server, new_repository
from tests.storage.metadata.redis_servers import emptied_server
from tests.tiers import fast_first
from tests.trees import Facts, facts, write

from .conftest import Dlcmd

AHEAD = ["+600s", "2099-01-01 00:00:00", "2110-01-01 00:00:00"]
YEAR_S = 365 * 86_400
LAST_SECOND = 2**32 - 1


@pytest.fixture(params=fast_first(["sqlite", "redis"]))
def url(request: pytest.FixtureRequest, dlcmd: Dlcmd, monkeypatch: pytest.MonkeyPatch) -> str:
    url = dlcmd.store.as_uri()
    if request.param == "redis":
        url = f"{url}?meta={emptied_server().url}"
        monkeypatch.setenv("DIESEL_URL", url)
    return url


def clock(when: str) -> dict[str, str]:
    return {"LD_PRELOAD": "/usr/$LIB/faketime/libfaketimeMT.so.1", "FAKETIME": when}


def by_clock(when: str, *words: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "dlcmd", *map(str, words)],
        check=False, capture_output=True, text=True, timeout=60, env=os.environ | clock(when),
    )  # fmt: skip


def objects(store: Path) -> Facts:
    found = {path: what for path, what in facts(store).items() if what[0] == "file"}
    return {path: found[path] for path in found if not path.startswith(b"meta.sqlite")}


@contextmanager
def clock_ahead(seconds: float) -> Iterator[None]:
    """A wrong time for this process and for the metadata stores, so no comparison reveals it."""
    now, now_ns = time.time, time.time_ns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: now() + seconds)
        patch.setattr(time, "time_ns", lambda: now_ns() + int(seconds * 1e9))
        for store in (SqliteMetadata, RedisMetadata):
            patch.setattr(store, "now_s", lambda _: now() + seconds)
        yield


def test_K2_a_clock_that_is_ahead_writes_nothing(dlcmd: Dlcmd, url: str, tmp_path: Path) -> None:
    source = write(tmp_path / "source", {"a": b"1", "b": b"2"})
    dlcmd("put", source, "pets")
    before, listed = objects(dlcmd.store), dlcmd("ls", "-lR", "pets").out
    write(source, {"a": b"changed", "c": b"3"})
    for when in AHEAD:
        for words in (("put", source, "pets"), ("put", source, "new"), ("rm", "pets/a")):
            result = by_clock(when, *words)
            assert (result.returncode, result.stdout) == (13, ""), result.stderr
            assert "the clock of this host is" in result.stderr
            assert "ahead of the repository's" in result.stderr
            assert "Traceback" not in result.stderr
    assert objects(dlcmd.store) == before
    assert dlcmd("ls", "-lR", "pets").out == listed
    dlcmd("ls", "new", code=10)
    dlcmd("rm", "pets/b")
    for when in ("+200s", "-3000s"):
        write(source, {"a": when.encode()})
        result = by_clock(when, "put", source, "pets")
        assert result.returncode == 0, result.stderr
        assert dlcmd("cat", "pets/a").out == when.encode()
    assert dlcmd("ls", "pets").out == b"a\nb\nc\n"


def test_K2_behind_a_server_only_its_clock_counts(
    dlcmd: Dlcmd, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    who = new_repository(url)["root"]
    monkeypatch.setenv("DIESEL_USER", who.user)
    monkeypatch.setenv("DIESEL_KEY", who.key_text)
    source = write(tmp_path / "source", {"a": b"1"})
    with Server(tmp_path / "wrong", "--store", url, environment=clock("+600s")) as server:
        before = objects(dlcmd.store)
        result = dlcmd.program("put", source, "pets", "--url", server.url, code=13)
        assert "ahead of the repository's" in result.err
        assert objects(dlcmd.store) == before
    with Server(tmp_path / "right", "--store", url) as server:
        ahead = by_clock("2099-01-01 00:00:00", "put", source, "pets", "--url", server.url)
        assert ahead.returncode == 0, ahead.stderr
    with LocalRepository.open(url) as repository:
        chunk = repository.view("pets").chunk_ids[-1]
        assert abs(id_seconds(chunk) - time.time()) < 3600


def test_K2_ids_from_the_future_lock_nobody_out(dlcmd: Dlcmd, url: str, tmp_path: Path) -> None:
    """A chunk that a killed put has stored is as old as its object: the next put adopts it after
    the put window."""
    source = write(tmp_path / "source", {"a": b"1", "b": b"2"})
    with clock_ahead(YEAR_S), LocalRepository.open(url, create=True) as repository:
        writer = Writer(repository, "pets")
        for name in (b"a", b"b"):
            writer.add(name, b"of the future")
        writer.seal().commit()
        writer.session.finish()
        writer.add(b"lost", b"a killed put")
        orphan = chunk_object(writer.session.identity, writer.seal().id)
    dlcmd.program("put", source, "pets")
    assert dlcmd("cat", "pets/a").out == b"1"
    dlcmd.program("rm", "pets/b")
    assert dlcmd("ls", "pets").out == b"a\n"
    assert b"note: 4 chunks with an ID from the future" in dlcmd.program("verify", "pets").out
    two_hours_ago = time.time() - 7200
    os.utime(dlcmd.store / orphan, (two_hours_ago, two_hours_ago))
    dlcmd.program("put", source, "pets/again")
    for _ in range(2):
        assert dlcmd("ls", "pets").out == b"a\nagain\nlost\n"
        assert dlcmd("cat", "pets/a").out == b"1"
        dlcmd.program("recover", "pets")
    dlcmd.program("purge", "pets")


def test_K4_after_the_last_timestamp_a_copy_helps(dlcmd: Dlcmd, url: str, tmp_path: Path) -> None:
    source = write(tmp_path / "source", {"a": b"1"})
    with (
        clock_ahead(LAST_SECOND - time.time()),
        LocalRepository.open(url, create=True) as repository,
    ):
        writer = Writer(repository, "pets")
        writer.add(b"last", b"of all")
        writer.seal(IdFields(LAST_SECOND, 2**48 - 1, 2**24 - 1, 0).id()).commit()
        writer.session.finish()
    before = objects(dlcmd.store)
    for words in (("put", source, "pets"), ("rm", "pets/last")):
        result = dlcmd.program(*words, code=12)
        assert "end in 2106" in result.err
        assert "only a copy into a new dataset helps" in result.err
        assert "Traceback" not in result.err
    with clock_ahead(100 * YEAR_S):  # the repository's clock, too
        assert "end in 2106" in dlcmd("put", source, "pets", code=12).err
    assert objects(dlcmd.store) == before
    dlcmd.program("get", "pets", tmp_path / "copy")
    dlcmd.program("put", tmp_path / "copy", "copied")
    dlcmd.program("put", source, "copied")
    assert dlcmd("ls", "copied").out == b"a\nlast\n"
