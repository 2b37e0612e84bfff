"""Readers without the metadata store, without the right to write, or without part of the store."""

import os
import shutil
import sqlite3
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from unittest.mock import Mock
from uuid import UUID

import pytest

from diesel_fs.errors import (
    ConfigError,
    ConflictError,
    DieselError,
    MetadataBehind,
    MetadataError,
    NewerVersionError,
    NoSpaceError,
    NoSuchDataset,
    NoSuchPath,
    ObjectStoreError,
    UsageError,
)
from diesel_fs.format.object_names import chunk_object
from diesel_fs.ingest import FolderSource, PutOptions, put
from diesel_fs.repository.local import LocalRepository
from diesel_fs.repository.stored import LocalWriteSession
from diesel_fs.repository.validation import batch_of
from diesel_fs.storage.metadata.sqlite.store import SqliteMetadata
from diesel_fs.storage.metadata.store import CommitBatch, MetadataStore

from ..datasets import dataset_state
from ..forks import exit_code, fork, in_child
from ..small_disks import fill, small_disk
from ..trees import facts, write
from .folder_puts import put_folder


def lose_metadata(store: Path) -> None:
    for file in store.glob("meta.sqlite*"):
        file.unlink()


def test_list_and_stat_are_live(filled: LocalRepository, tmp_path: Path) -> None:
    assert sorted(filled.list("ds").names) == [b"a", b"d"]
    assert sorted(filled.list("ds", b"d").names) == [b"b", b"e"]
    assert filled.stat("ds", b"d/b").size == 2
    for look, path in ((filled.stat, b"d/nothing"), (filled.list, b"a"), (filled.list, b"nowhere")):
        with pytest.raises(NoSuchPath):
            look("ds", path)
    with pytest.raises(UsageError):
        filled.stat("ds", b"../x")
    (tmp_path / "source/a").write_bytes(b"4444")
    put_folder(filled, tmp_path / "source")
    assert filled.stat("ds", b"a").size == 4


def test_readers_do_without_the_metadata_store(filled: LocalRepository, tmp_path: Path) -> None:
    lose_metadata(tmp_path / "store")
    with LocalRepository.open(filled.url) as reader:
        assert dataset_state(reader) == facts(tmp_path / "source")
        assert [info.name for info in reader.datasets()] == ["ds"]
        assert reader.stat("ds", b"a").size == 1
        with pytest.raises(MetadataError):
            reader.begin("ds")
        with pytest.raises(NoSuchDataset):
            reader.view("other")


def test_C3_neither_metadata_nor_snapshot(filled: LocalRepository, tmp_path: Path) -> None:
    lose_metadata(tmp_path / "store")
    shutil.rmtree(next((tmp_path / "store").glob("datasets/*/snapshots")))
    with LocalRepository.open(filled.url) as reader, pytest.raises(MetadataBehind, match="recover"):
        reader.view("ds")
    with LocalRepository.open(filled.url, create=True) as writer:
        with pytest.raises(MetadataBehind):
            writer.view("ds")
        writer.recover("ds")
        assert dataset_state(writer) == facts(tmp_path / "source")


def test_a_read_only_folder_and_another_user(filled: LocalRepository, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    expected = facts(tmp_path / "source")
    filled.close()
    for folder in (tmp_path, *tmp_path.parents):
        if folder.is_relative_to("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o055)

    def read() -> None:
        os.environ["XDG_CACHE_HOME"] = "/nowhere"
        os.setuid(65534)
        with LocalRepository.open(filled.url) as reader:
            assert dataset_state(reader) == expected
            with pytest.raises(DieselError):
                reader.begin("ds")
            found = reader.verify("ds")  # it may read this
            assert found.problems == []
            assert found.chunks > 0
            assert any("the metadata were not checked" in note for note in found.notes)

    assert in_child(read) == 0


def test_O16_O17_places_without_a_store(filled: LocalRepository, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place in ("empty", "nowhere", "source"):
        with pytest.raises(ObjectStoreError):
            LocalRepository.open((tmp_path / place).as_uri())
    with pytest.raises((ConflictError, ObjectStoreError)):
        LocalRepository.open((tmp_path / "source").as_uri(), create=True)
    (tmp_path / "link with space").symlink_to(tmp_path / "store")
    for url in ((tmp_path / "link with space").as_uri(), f"{filled.url}/"):
        with LocalRepository.open(url) as same:
            assert dataset_state(same) == facts(tmp_path / "source")
    meta = f"{filled.url}?meta=mysql://h"
    for bad in ("diesel://h:1", meta, "file:///x?meta=redis", "x", "file://x/y"):
        with pytest.raises(ConfigError):
            LocalRepository.open(bad)


def test_M9_dataset_names(repository: LocalRepository) -> None:
    for bad in ("../other", "a/b", "-rf", "", "x" * 64, "%2e%2e", "a b", "a\n"):
        with pytest.raises(UsageError):
            repository.view(bad)
        with pytest.raises(UsageError):
            repository.begin(bad)


def test_L5_a_dataset_deleted_under_a_writer(filled: LocalRepository) -> None:
    session: LocalWriteSession = filled.begin("ds")
    filled.delete_dataset("ds")
    with pytest.raises(ConflictError, match="deleted"):
        session.new_id()
    with pytest.raises(DieselError):
        session.delete([b"a"])
    with pytest.raises(NoSuchDataset):
        filled.view("ds")
    assert filled.begin("ds").view.entry_count == 1


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_delete_dataset_killed_at_any_step(
    filled: LocalRepository, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [step]
    delete = filled.objects.delete

    def failing(name: str) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        delete(name)

    monkeypatch.setattr(filled.objects, "delete", failing)
    try:
        filled.delete_dataset("ds")
    except KeyboardInterrupt:
        with pytest.raises(NoSuchDataset):
            filled.view("ds")
        filled.delete_dataset("ds")
    with pytest.raises(NoSuchDataset):
        filled.delete_dataset("ds")
    assert filled.datasets() == []


def test_a_deleted_dataset_is_never_brought_back(filled: LocalRepository, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(store, tmp_path / "backup")
    filled.delete_dataset("ds")
    shutil.copytree(tmp_path / "backup" / "datasets", store / "datasets", dirs_exist_ok=True)
    lose_metadata(store)
    with LocalRepository.open(filled.url, create=True) as writer:
        assert writer.datasets() == []
        with pytest.raises(NoSuchDataset):
            writer.recover("ds")


@pytest.mark.parametrize("damage", ["gone", "not a database"])
def test_C3_an_embedded_metadata_store_that_is_lost_is_damage_and_hinders_no_deletion(
    filled: LocalRepository, tmp_path: Path, damage: str
) -> None:
    filled.close()
    lose_metadata(tmp_path / "store")
    if damage != "gone":
        (tmp_path / "store/meta.sqlite").write_bytes(b"x" * 9000)
    with LocalRepository.open(filled.url) as blind:
        findings = blind.verify("ds")
        assert any("recover ds" in problem for problem in findings.problems)
        assert (findings.chunks, findings.files) == (1, 3)  # their objects are checked anyway
        assert blind.delete_dataset("ds").left == 0
        assert blind.datasets() == []
        with pytest.raises(NoSuchDataset):
            blind.delete_dataset("ds")


def test_C1_a_metadata_store_is_away_until_it_has_been_opened_again(
    filled: LocalRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled.close()
    lose_metadata(tmp_path / "store")
    with LocalRepository.open(filled.url) as blind:
        problem = blind.meta_problem
        assert problem is not None
        opened = SqliteMetadata.open(tmp_path / "meta.sqlite", create=True)
        during: list[DieselError | None] = []

        def opens(*_: object, create: bool) -> MetadataStore:
            during.append(blind.meta_problem)
            return opened

        monkeypatch.setattr("diesel_fs.repository.stored.open_metadata", opens)
        blind.open_metadata(create=False)
        assert during == [problem]
        assert blind.meta_problem is None


def test_newer_metadata_stores_are_not_lost(filled: LocalRepository, tmp_path: Path) -> None:
    filled.close()
    with closing(sqlite3.connect(tmp_path / "store/meta.sqlite")) as db:
        db.execute("PRAGMA user_version=99")
    with LocalRepository.open(filled.url) as blind:
        for work in (LocalRepository.verify, LocalRepository.delete_dataset):
            with pytest.raises(NewerVersionError):
                work(blind, "ds")
        assert [info.name for info in blind.datasets()] == ["ds"]


def test_a_snapshot_is_exactly_one_version_while_commits_run(
    repository: LocalRepository, tmp_path: Path
) -> None:
    """Each committed chunk holds 10 files: no view ever shows a part of one."""
    stop = threading.Event()
    seen: list[int] = []

    def watch() -> None:
        while not stop.is_set():
            view = repository.view("ds")
            seen.append(view.file_count)
            assert view.file_count == len(view.files())

    repository.begin("ds")
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        for i in range(15):
            files = {f"{i}/{j}": b"x" for j in range(10)}
            source = write(tmp_path / f"s{i}", files)
            put_folder(repository, source)
    finally:
        stop.set()
        thread.join()
    assert seen
    assert all(count % 10 == 0 for count in seen), seen
    assert seen == sorted(seen)
    assert repository.view("ds").file_count == 150


def test_L1_L2_two_puts_at_once(repository: LocalRepository, tmp_path: Path) -> None:
    sources = [
        write(
            tmp_path / f"source-{name}",
            {f"own-{name}/{i}": os.urandom(500) for i in range(300)}
            | {f"both/{i}": name.encode() * (1000 + i) for i in range(300)}
            | {"large": name.encode() * 300_000},
        )
        for name in ("one", "two")
    ]

    def put_one(source: Path) -> None:
        with LocalRepository.open(repository.url) as mine:
            options = PutOptions(chunk_bytes=65536, jobs=2)
            assert put(mine, "ds", FolderSource(source), options=options).failed == []

    children = [fork(partial(put_one, source)) for source in sources]
    repository.begin("ds")
    assert [*map(exit_code, children)] == [0, 0]
    found = dataset_state(repository)
    wanted = [facts(source) for source in sources]
    for path in wanted[0].keys() | wanted[1].keys():
        if found[path][0] == "file":
            assert found[path] in [facts.get(path) for facts in wanted], path
    assert repository.verify("ds").problems == []
    repository.recover("ds")
    assert dataset_state(repository) == found


def test_a_snapshot_never_outlives_its_chunks(filled: LocalRepository, tmp_path: Path) -> None:
    write(tmp_path / "source", {"later": b"4"})
    put_folder(filled, tmp_path / "source")
    view = filled.view("ds")
    (extent,) = view.extents(view.lookup(b"a"))
    filled.objects.delete(chunk_object(view.identity, view.chunk_ids[extent.chunk]))
    batches = [
        batch_of(filled.read_header(view.identity, chunk))
        for chunk in filled.chunk_ids(view.identity)
    ]
    filled.meta.rebuild("ds", view.identity, batches)
    after = filled.view("ds")
    assert [after.path(int(i)) for i in after.files()] == [b"later"]


def test_NoSpace_the_store_is_full(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "small", "size=2m") as small,
        LocalRepository.open((small / "store").as_uri(), create=True) as repository,
    ):
        first = write(tmp_path / "first", {"a": b"1"})
        put_folder(repository, first)
        big = write(tmp_path / "big", {f"{i}": os.urandom(500_000) for i in range(8)})
        with pytest.raises(NoSpaceError):
            put_folder(repository, big, chunk_bytes=1 << 20, jobs=2)
        assert dataset_state(repository)[b"a"][3] == b"1"
        assert repository.verify("ds").sound


@pytest.mark.parametrize("interrupted", [False, True])
def test_C8_a_dataset_is_deleted_on_a_full_disk(
    tmp_path: Path, interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite cannot even be opened there."""
    with small_disk(tmp_path / "small", "size=2m") as small:
        url, content = (small / "store").as_uri(), os.urandom(200_000)
        source = write(tmp_path / "source", {"a": content})
        with LocalRepository.open(url, create=True) as repository:
            for name in ("ds", "other"):
                put(repository, name, FolderSource(source), b"", PutOptions(jobs=1))
        fill(small / "rest")
        with LocalRepository.open(url) as repository:
            with pytest.raises(NoSpaceError):
                put_folder(repository, source)
            if interrupted:
                with monkeypatch.context() as patch:
                    patch.setattr(repository.objects, "delete", Mock(side_effect=KeyboardInterrupt))
                    with pytest.raises(KeyboardInterrupt):
                        repository.delete_dataset("ds")
                with pytest.raises(NoSuchDataset):
                    repository.view("ds")
            repository.delete_dataset("ds")
            assert [head.name for head in repository.meta.heads()] == ["other"]
            with pytest.raises(NoSuchDataset):
                repository.delete_dataset("ds")
            put_folder(repository, write(tmp_path / "small source", {"a": b"1"}))
            assert dataset_state(repository)[b"a"][3] == b"1"
            assert repository.verify("ds").sound


def test_C7_an_orphan_without_room_does_not_stop_deletions(
    filled: LocalRepository, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(source, {"new": b"new"})
    commit = filled.meta.commit
    full = Mock(side_effect=NoSpaceError("its memory is full"))
    monkeypatch.setattr(filled.meta, "commit", full)
    with pytest.raises(NoSpaceError):
        put_folder(filled, source)
    monkeypatch.setattr("diesel_fs.repository.expected_chunks.PUT_WINDOW_S", -9)

    def commit_tombstones(identity: UUID, *batches: CommitBatch) -> int:
        return (commit if all(batch.makes_room for batch in batches) else full)(identity, *batches)

    monkeypatch.setattr(filled.meta, "commit", commit_tombstones)
    session = filled.begin("ds", create=False)
    session.delete([b"a"])
    session.finish()
    assert sorted(dataset_state(filled)) == [b".", b"d", b"d/b", b"d/e", b"d/e/c"]
    monkeypatch.setattr(filled.meta, "commit", commit)
    filled.begin("ds")
    assert b"new" in dataset_state(filled)


def test_C3_C4_a_version_published_while_a_reader_opens_the_dataset_is_no_loss(
    filled: LocalRepository, source: Path
) -> None:
    before = filled.dataset("ds")
    write(source, {"new": b"new"})
    put_folder(filled, source)
    view = filled.view_of(before)
    assert view.lookup(b"new") > 0
    assert filled.staleness_warning(view) == ""
