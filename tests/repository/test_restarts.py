"""A metadata store that comes back older in the middle of a put (FAULTS C4, C11, Z8)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from diesel_fs.chunk_builder import ChunkBuilder
from diesel_fs.commits import batch_of
from diesel_fs.entries import Kind
from diesel_fs.repository import Repository, WriteSession
from diesel_fs.storage.redis_metadata import RedisMetadata
from tests.storage.redis_servers import RedisServer, free_port

NAME = "pets"


def add(session: WriteSession, name: bytes) -> None:
    """Put one file."""
    builder = ChunkBuilder(session.identity, 1 << 20, "none")
    builder.room(5)[:] = b"hello"
    builder.add_file((b"d", name), 0o644, 0, 5)
    session._store(builder)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis", {"dbfilename": "dump"}, port=free_port()) as server:
        yield server


@pytest.fixture
def url(server: RedisServer, tmp_path: Path) -> str:
    (tmp_path / "store").mkdir()
    return f"file://{tmp_path}/store?meta={server.tcp_url}"


def names(url: str) -> list[bytes]:
    with Repository.open(url) as fresh:
        view = fresh.view(NAME)
        shown = sorted(fresh.list(NAME, b"d").names)
        paths = [view.path(i) for i in range(len(view))]
        assert sorted(p[2:] for p in paths if p.startswith(b"d/")) == shown
        return shown


@pytest.mark.parametrize("when", ["before a commit", "before the end", "after half a mend"])
def test_C4_a_put_that_outlives_its_metadata_store(
    server: RedisServer, url: str, when: str
) -> None:
    """Its own files are there when it has succeeded, and what others were told is there stays."""
    with Repository.open(url, create=True) as one, Repository.open(url) as two:
        first = one.begin(NAME)
        add(first, b"base")
        first.finish()
        session = one.begin(NAME)
        add(session, b"A1")
        server.client().save()
        add(session, b"A2")
        acknowledged = two.begin(NAME)
        add(acknowledged, b"ACKED")
        acknowledged.finish()
        server.kill()
        server.start()
        wanted = [b"A1", b"A2", b"ACKED", b"base"]
        if when == "after half a mend":  # by somebody whose process was killed
            meta, mine = two.meta, session.identity
            assert isinstance(meta, RedisMetadata)
            (lost, *_) = meta.missing(mine, list(two.chunk_names(mine)))
            batch = batch_of(two.read_header(mine, lost), stored=True)
            meta._commit(mine, [batch], meta.doubt(mine))
            assert two.snapshots.newest(mine) < meta.marker(NAME).version
        if when == "before a commit":
            add(session, b"A3")
            wanted.insert(2, b"A3")
            with Repository.open(url) as other:  # as soon as the version has moved on
                assert other.stat(NAME, b"d/ACKED").kind == Kind.FILE
        session.finish()
        assert names(url) == wanted


def test_C11_it_comes_back_older_while_the_put_ends(
    server: RedisServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the last look at its chunks and the snapshot."""
    with Repository.open(url, create=True) as one:
        session = one.begin(NAME)
        add(session, b"base")
        session.finish()
        server.client().save()
        session = one.begin(NAME)
        add(session, b"new")
        acknowledge, times = WriteSession._acknowledge, list[int]()

        def acknowledged(self: WriteSession) -> int:
            times.append(1)
            if len(times) == 1:
                server.kill()
                server.start()
            return acknowledge(self)

        monkeypatch.setattr(WriteSession, "_acknowledge", acknowledged)
        session.finish()
        assert len(times) == 2
        assert names(url) == [b"base", b"new"]


def test_C8_what_is_not_applied_yet_leads_readers_to_the_snapshot(
    server: RedisServer, url: str
) -> None:
    with Repository.open(url, create=True) as one, Repository.open(url) as two:
        session = one.begin(NAME)
        add(session, b"base")
        session.finish()
        session = two.begin(NAME)
        two.meta._commits._apply = lambda *_: None  # type: ignore[attr-defined]  # the test looks inside
        add(session, b"half")
        server.client().config_set("min-replicas-to-write", 1)
        view = one.view(NAME)
        assert view.stat(view.lookup(b"d/base")).size == 5
        assert one.stat(NAME, b"d/base").size == 5
