"""A metadata store that comes back older in the middle of a put (FAULTS C4, C11, Z8)."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from uuid import UUID

import pytest

from diesel_fs.errors import ConflictError, MetadataBehind, NoSuchDataset
from diesel_fs.format.chunk_builder import ChunkBuilder
from diesel_fs.format.entries import Bytes, Kind
from diesel_fs.repository.local import LocalRepository
from diesel_fs.repository.stored import LocalWriteSession
from diesel_fs.repository.validation import batch_of
from diesel_fs.storage.metadata.redis.bucket_scripts import APPLY
from diesel_fs.storage.metadata.redis.link import RedisLink, ScriptCommand
from diesel_fs.storage.metadata.redis.store import RedisMetadata
from tests.storage.metadata.redis_servers import RedisServer, free_port

NAME = "pets"


def add(session: LocalWriteSession, name: bytes) -> None:
    builder = ChunkBuilder(session.identity, 1 << 20, "none")
    builder.room(5)[:] = b"hello"
    builder.add_file((b"d", name), 0o644, 0, 5)
    session._store(builder)


def put_base(repository: LocalRepository) -> None:
    session = repository.begin(NAME)
    add(session, b"base")
    session.finish()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis", {"dbfilename": "dump"}, port=free_port()) as server:
        yield server


@pytest.fixture
def url(server: RedisServer, tmp_path: Path) -> str:
    (tmp_path / "store").mkdir()
    return f"file://{tmp_path}/store?meta={server.tcp_url}"


@pytest.fixture
def one(url: str) -> Iterator[LocalRepository]:
    with LocalRepository.open(url, create=True) as opened:
        yield opened


@pytest.fixture
def two(one: LocalRepository, url: str) -> Iterator[LocalRepository]:
    with LocalRepository.open(url) as opened:
        yield opened


def names(url: str) -> list[bytes]:
    with LocalRepository.open(url) as fresh:
        view = fresh.view(NAME)
        shown = sorted(fresh.list(NAME, b"d").names)
        paths = [view.path(i) for i in range(len(view))]
        assert sorted(p[2:] for p in paths if p.startswith(b"d/")) == shown
        return shown


@pytest.mark.parametrize("when", ["before a commit", "before the end", "after half a mend"])
def test_C4_a_put_that_outlives_its_metadata_store(
    server: RedisServer, one: LocalRepository, two: LocalRepository, url: str, when: str
) -> None:
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
    if when == "after half a mend":  # by a process that was killed
        meta, mine = two.meta, session.identity
        assert isinstance(meta, RedisMetadata)
        (lost, *_) = meta.missing(mine, list(two.chunk_ids(mine)))
        batch = batch_of(two.read_header(mine, lost), stored=True)
        meta._commit(mine, [batch], meta.needs_repair(mine))
        assert two.snapshots.newest(mine) < meta.head(NAME).version
    if when == "before a commit":
        add(session, b"A3")
        wanted.insert(2, b"A3")
        with LocalRepository.open(url) as other:  # as soon as the version has moved on
            assert other.stat(NAME, b"d/ACKED").kind == Kind.FILE
    session.finish()
    assert names(url) == wanted


def test_C11_metadata_come_back_older_while_the_put_ends(
    server: RedisServer, one: LocalRepository, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the last check of its chunks and the snapshot."""
    put_base(one)
    server.client().save()
    session = one.begin(NAME)
    add(session, b"new")
    acknowledge, times = LocalWriteSession._acknowledge, list[int]()

    def acknowledged(self: LocalWriteSession) -> int:
        times.append(1)
        if len(times) == 1:
            server.kill()
            server.start()
        return acknowledge(self)

    monkeypatch.setattr(LocalWriteSession, "_acknowledge", acknowledged)
    session.finish()
    assert len(times) == 2
    assert names(url) == [b"base", b"new"]


def test_C8_unapplied_commits_lead_readers_to_the_snapshot(
    server: RedisServer,
    one: LocalRepository,
    two: LocalRepository,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The writer dies before it applies its commit, and then Redis takes no writes."""
    run_scripts = RedisLink.run_scripts

    def die_before_applying(self: RedisLink, runs: Iterable[ScriptCommand]) -> list[object]:
        commands = list(runs)
        if any(each.script == APPLY for each in commands):
            raise KeyboardInterrupt
        return run_scripts(self, commands)

    put_base(one)
    session = two.begin(NAME)
    with monkeypatch.context() as patch:
        patch.setattr(RedisLink, "run_scripts", die_before_applying)
        with pytest.raises(KeyboardInterrupt):
            add(session, b"half")
    server.client().config_set("min-replicas-to-write", 1)
    view = one.view(NAME)
    assert view.stat(view.lookup(b"d/base")).size == 5
    assert one.stat(NAME, b"d/base").size == 5


@pytest.mark.parametrize("when", ["before a chunk", "before a commit", "before the end"])
def test_C4_a_metadata_store_that_comes_back_empty_is_no_deletion(
    server: RedisServer, one: LocalRepository, url: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = one.begin(NAME)
    add(session, b"base")
    put = one.objects.put

    def empty() -> None:
        server.kill()
        server.start()

    def emptied(name: str, parts: Sequence[Bytes]) -> None:
        put(name, parts)
        empty()

    def go_on() -> None:
        if when == "before a commit":
            monkeypatch.setattr(one.objects, "put", emptied)
            add(session, b"more")
        empty()
        if when == "before a chunk":
            add(session, b"more")
        session.finish()

    with pytest.raises(MetadataBehind, match=f"dlcmd recover {NAME}") as raised:
        go_on()
    assert raised.value.exit_code == 14
    monkeypatch.undo()
    one.recover(NAME)
    assert b"base" in names(url)


@pytest.mark.parametrize("is_made_again", [False, True])
def test_L5_a_dataset_deleted_while_a_chunk_is_on_its_way(
    one: LocalRepository,
    two: LocalRepository,
    url: str,
    is_made_again: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = one.begin(NAME)
    put = one.objects.put

    def deleted(name: str, parts: Sequence[Bytes]) -> None:
        put(name, parts)
        two.delete_dataset(NAME)
        if is_made_again:
            two.begin(NAME)

    monkeypatch.setattr(one.objects, "put", deleted)
    with pytest.raises(ConflictError, match="deleted meanwhile"):
        add(session, b"f")
    with pytest.raises(ConflictError, match="deleted meanwhile"):
        session.finish()


@pytest.mark.parametrize("trouble", ["down", "another password"])
def test_C1_without_its_metadata_store_nothing_is_damage_and_nothing_is_deleted(
    server: RedisServer, url: str, trouble: str
) -> None:
    """Nothing would ever find the keys that a deletion left in that Redis."""
    with LocalRepository.open(url, create=True) as one:
        put_base(one)
    client = server.client()
    if trouble == "down":
        client.save()
        server.kill()
    else:
        client.config_set("requirepass", "hush")
    with LocalRepository.open(url) as blind:
        problem = blind.meta_problem
        assert problem is not None
        assert problem.exit_code == 14
        for work in (LocalRepository.verify, LocalRepository.delete_dataset):
            with pytest.raises(type(problem)) as raised:
                work(blind, NAME)
            assert raised.value.message == problem.message
        with pytest.raises(NoSuchDataset):
            blind.delete_dataset("other")
        assert [info.name for info in blind.datasets()] == [NAME]
    if trouble == "down":
        server.start()
    else:
        client.config_set("requirepass", "")  # it has logged in, as far as necessary
    with LocalRepository.open(url) as whole:
        assert whole.verify(NAME).sound
        whole.delete_dataset(NAME)
        assert whole.meta.heads() == []


@pytest.mark.parametrize("by", ["delete-dataset", "purge"])
def test_C1_a_deletion_that_was_interrupted_leaves_no_metadata(
    one: LocalRepository, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the mark and the metadata."""
    put_base(one)

    def killed(identity: UUID) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(one.meta, "drop", killed)
    with pytest.raises(KeyboardInterrupt):
        one.delete_dataset(NAME)
    monkeypatch.undo()
    if by == "purge":
        assert "is deleted" in one.purge(NAME).notes[0]
    else:
        one.delete_dataset(NAME)
    assert one.meta.heads() == []
    assert list(one.catalogue.deleted_named(NAME)) == []
