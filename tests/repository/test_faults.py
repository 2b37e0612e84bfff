"""Repositories in half-done, refused, damaged and restored states."""

import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from diesel_fs import ingest
from diesel_fs.errors import CorruptError, MetadataError, NoSuchDataset, ObjectStoreError
from diesel_fs.format.chunk_id import IdFields, id_fields, stamp
from diesel_fs.format.entries import ChunkId
from diesel_fs.format.object_names import chunk_object, dataset_object, snapshot_object
from diesel_fs.ingest import FolderSource, PutOptions
from diesel_fs.repository.expected_chunks import LostChunks
from diesel_fs.repository.local import LocalRepository
from diesel_fs.repository.private_copies import boot_id
from diesel_fs.storage.metadata.store import CommitBatch, ReadCommitted

from ..datasets import content, dataset_state, forget_private_copies
from ..storage.objects.faulty_store import Fault
from ..trees import facts, write
from .folder_puts import faulty, put_folder
from .test_interleavings import Writer, fold_in

ONE = PutOptions(jobs=1)


def test_L8_a_late_chunk_that_another_writer_folded_in_is_not_deleted(
    repository: LocalRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put that was stopped for hours repeats a commit that another writer has taken over."""
    writer = Writer(repository)
    writer.add(b"f", b"1")
    sealed = writer.seal()
    fold_in(repository, sealed.id)
    later = time.time() + 7200
    monkeypatch.setattr(time, "time", lambda: later)
    sealed.commit()
    assert content(repository, b"f") == b"1"
    assert repository.verify("ds").problems == []


def test_B1_an_unreadable_orphan_blocks_no_writer(filled: LocalRepository, source: Path) -> None:
    old = IdFields(int(time.time()) - 7200, 1, 1, 0).id()
    identity = filled.dataset("ds").identity
    filled.objects.put(chunk_object(identity, old), [b"torn"])
    write(source, {"more": b"3"})
    assert put_folder(filled, source).files == 1
    assert dataset_state(filled) == facts(source)
    assert any("truncated" in problem for problem in filled.verify("ds").problems)


def test_C3_lost_metadata_is_rebuilt_whole_or_not_at_all(
    filled: LocalRepository, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(3):
        write(source, {f"more{i}": b"3"})
        put_folder(filled, source)
    filled.close()
    (tmp_path / "store/meta.sqlite").unlink()
    shutil.rmtree(next((tmp_path / "store").glob("datasets/*/snapshots")))
    with LocalRepository.open(filled.url, create=True) as again:
        real, left = again.read_header, [2]

        def read_header(identity: UUID, chunk: ChunkId) -> object:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            return real(identity, chunk)

        with monkeypatch.context() as patch:
            patch.setattr(again, "read_header", read_header)
            with pytest.raises(KeyboardInterrupt):
                again.begin("ds")
        with pytest.raises(MetadataError, match="recover"):
            again.view("ds")
        again.begin("ds")
        assert dataset_state(again) == facts(source)


def test_C4_Z8_an_older_database_never_hides_acknowledged_files(
    filled: LocalRepository, source: Path, tmp_path: Path
) -> None:
    filled.close()
    database = tmp_path / "store/meta.sqlite"
    shutil.copy(database, tmp_path / "backup")
    write(source, {"later": b"3"})
    with LocalRepository.open(filled.url) as repository:
        put_folder(repository, source)
    shutil.copy(tmp_path / "backup", database)
    with LocalRepository.open(filled.url) as repository:
        view = repository.view("ds")
        assert view.lookup(b"later") > 0
        warning = repository.staleness_warning(view)
        assert "the metadata store knows 'ds' in an older state only; this is" in warning
        assert warning.endswith("; run `dlcmd recover ds`")
        assert "in an older state only; run" in repository.loss_warning(repository.dataset("ds"))
        problems = repository.verify("ds").problems
        assert any("behind the published version" in problem for problem in problems)
        assert repository.stat("ds", b"later").size == 1
        with pytest.raises(MetadataError, match="recover"):
            repository.list("ds")
        assert put_folder(repository, source).files == 0
        assert dataset_state(repository) == facts(source)
        assert sorted(repository.list("ds").names) == [b"a", b"d", b"later"]
        assert repository.staleness_warning(repository.view("ds")) == ""
        assert repository.loss_warning(repository.dataset("ds")) == ""
        assert repository.verify("ds").sound


def test_C4_a_lost_chunk_that_an_older_database_does_not_know_is_not_forgotten(
    filled: LocalRepository, source: Path, tmp_path: Path
) -> None:
    identity = filled.dataset("ds").identity
    known = set(filled.chunk_ids(identity))
    filled.close()
    shutil.copy(tmp_path / "store/meta.sqlite", tmp_path / "backup")
    write(source, {"later": b"3"})
    with LocalRepository.open(filled.url) as repository:
        put_folder(repository, source)
        (last,) = set(repository.chunk_ids(identity)) - known
        repository.objects.delete(chunk_object(identity, last))
    shutil.copy(tmp_path / "backup", tmp_path / "store/meta.sqlite")
    with LocalRepository.open(filled.url) as repository:
        with pytest.raises(LostChunks, match="later"):
            put_folder(repository, write(tmp_path / "third", {"c": b"3"}))
        assert any("lost with chunk" in problem for problem in repository.recover("ds").problems)
        assert repository.view("ds").lookup(b"later") > 0


def test_recover_since_reaches_back_over_the_put_window(repository: LocalRepository) -> None:
    """The chunk was sealed half an hour before the given time, and committed after it."""
    writer = Writer(repository)
    writer.add(b"f", b"1")
    sealed = id_fields(writer.session.new_id())
    writer.seal(replace(sealed, seconds=sealed.seconds - 1800).id())
    assert repository.recover("ds", since_s=time.time() - 60).folded == 1
    assert content(repository, b"f") == b"1"
    assert repository.verify("ds").sound


def test_C18_a_put_that_is_acknowledged_while_a_rebuild_begins(
    repository: LocalRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(repository)
    writer.add(b"f", b"1")
    sealed = writer.seal()
    real = repository.meta.rebuild

    def rebuild(
        name: str,
        identity: UUID,
        batches: Iterable[CommitBatch],
        read_committed: ReadCommitted,
        newer_than: int,
    ) -> int:
        sealed.commit()
        return real(name, identity, batches, read_committed, newer_than)

    with monkeypatch.context() as patch:
        patch.setattr(repository.meta, "rebuild", rebuild)
        repository.recover("ds")
    assert content(repository, b"f") == b"1"


def test_C18_puts_continue_beside_a_recovery(filled: LocalRepository, source: Path) -> None:
    """A chunk that was uncommitted when it was listed counts once."""
    for i in range(3):
        write(source, {f"more{i}": b"%d" % i, "a": b"%d" % i})
        put_folder(filled, source)
    beside = LocalRepository.open(filled.url)

    def put(name: str) -> None:
        write(source, {"a": name.encode(), "d/new": b"new"})
        began_s = time.monotonic()
        assert put_folder(beside, source).files == 2
        assert time.monotonic() - began_s < 20

    with beside, faulty(filled, Fault("get", "/chunks/", act=put, skip=1)):
        findings = filled.recover("ds")
        assert (findings.problems, findings.folded) == ([], 0)
    assert dataset_state(filled) == facts(source)
    info = filled.dataset("ds")
    assert info.head is not None
    assert info.head.chunks == len([*filled.chunk_ids(info.identity)])
    assert filled.verify("ds").problems == []


def test_C18_two_writers_that_find_the_metadata_lost_both_succeed(
    filled: LocalRepository, source: Path, tmp_path: Path
) -> None:
    """One completes its put while the other reads headers."""
    filled.close()
    (tmp_path / "store/meta.sqlite").unlink()

    def put(_: str) -> None:
        write(source, {"more": b"more"})
        with LocalRepository.open(filled.url) as quicker:
            assert put_folder(quicker, source).files == 1

    with LocalRepository.open(filled.url, create=True) as slower:
        with faulty(slower, Fault("get", "/chunks/", act=put)):
            slower.begin("ds")
        assert dataset_state(slower) == facts(source)


def test_A7_A9_a_put_killed_before_its_snapshot_is_finished_by_the_next(
    filled: LocalRepository, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(source, {"more": b"3"})

    def killed(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(filled.snapshots, "publish", killed)
        with pytest.raises(KeyboardInterrupt):
            put_folder(filled, source)
    assert put_folder(filled, source).files == 0
    info = filled.dataset("ds")
    assert info.head is not None
    assert filled.snapshots.newest(info.identity) == info.head.version


def test_Z12_a_refused_chunk_does_not_come_back_by_recovery(repository: LocalRepository) -> None:
    writer = Writer(repository)
    future = IdFields(int(time.time()) + 400, 1, 1, 0).id()
    for chunk, reason in ((future, "future"), (None, "stamp")):
        writer.add(b"f", b"refused")
        if chunk is None:
            writer.builder.set_stamp(stamp(ChunkId(b"\xff" * 16), 0))
        with pytest.raises(CorruptError, match=reason):
            writer.seal(chunk).commit()
    assert list(repository.chunk_ids(writer.session.identity)) == []
    writer.add(b"f", b"stored by another program")
    writer.builder.set_stamp(stamp(ChunkId(b"\xff" * 16), 0))
    writer.seal()
    assert any("greater than its ID" in text for text in repository.recover("ds").problems)
    assert content(repository, b"f") is None


@pytest.mark.parametrize("garbage", [b"no database at all" * 500, None])
def test_a_damaged_database_stops_no_reader_and_is_made_again(
    filled: LocalRepository, source: Path, tmp_path: Path, garbage: bytes | None
) -> None:
    filled.close()
    database = tmp_path / "store/meta.sqlite"
    whole = database.read_bytes()
    middle = bytearray(whole)
    middle[4096:] = os.urandom(len(whole) - 4096)
    database.write_bytes(garbage or bytes(middle))
    with LocalRepository.open(filled.url) as repository:
        assert dataset_state(repository) == facts(source)
    with LocalRepository.open(filled.url, create=True) as repository:
        repository.recover("ds")
        assert repository.verify("ds").sound
        assert put_folder(repository, source).files == 0


def test_a_bad_snapshot_is_remade(filled: LocalRepository, source: Path, tmp_path: Path) -> None:
    info = filled.dataset("ds")
    assert info.head is not None
    file = tmp_path / "store" / snapshot_object(info.identity, info.head.version)
    file.chmod(0o644)
    os.truncate(file, 1000)
    forget_private_copies()
    assert any("snapshot" in problem for problem in filled.verify("ds").problems)
    forget_private_copies()
    assert dataset_state(filled) == facts(source)
    put_folder(filled, source)
    assert filled.verify("ds").sound


def test_verify_beside_a_put_finds_nothing(
    filled: LocalRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(filled)
    writer.add(b"new", b"1")
    sealed = writer.seal()
    real, hits = filled.chunk_ids, [0]

    def chunk_names(identity: UUID) -> Iterator[ChunkId]:
        if not hits[0]:
            sealed.commit()
        hits[0] += 1
        return real(identity)

    monkeypatch.setattr(filled, "chunk_ids", chunk_names)
    assert filled.verify("ds").problems == []
    assert hits[0]


def test_I3_one_chunk_with_EIO_is_named_and_the_others_are_read(
    filled: LocalRepository, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(source, {"more": b"3"})
    put_folder(filled, source)
    identity = filled.dataset("ds").identity
    bad = chunk_object(identity, next(iter(filled.chunk_ids(identity))))
    real = filled.objects.get

    def get(name: str, start: int = 0, length: int | None = None) -> bytearray:
        if name == bad:
            raise ObjectStoreError(f"{name}: Input/output error")
        return real(name, start, length)

    monkeypatch.setattr(filled.objects, "get", get)
    findings = filled.verify("ds")
    assert findings.chunks == 2
    assert findings.problems == []
    (unreachable,) = findings.unreachable
    assert "Input/output error" in unreachable
    assert content(filled, b"more") == b"3"


def test_a_damaged_name_is_skipped(filled: LocalRepository, source: Path, tmp_path: Path) -> None:
    ingest.put(filled, "other", FolderSource(source), options=ONE)
    identity = filled.dataset("ds").identity
    file = tmp_path / "store" / dataset_object(identity)
    file.chmod(0o644)
    for damage in (b"{", b'{"name": "../x", "created_ns": 1}', b"[]", b""):
        file.write_bytes(damage)
        assert [info.name for info in filled.datasets()] == ["ds", "other"]
        assert dataset_state(filled) == facts(source)
        with pytest.raises(NoSuchDataset):
            filled.view("third")
    (tmp_path / "store/meta.sqlite").unlink()
    with LocalRepository.open(filled.url) as reader:
        assert [info.name for info in reader.datasets()] == ["other"]
        with pytest.raises(CorruptError):
            reader.view("ds")  # absence needs proof


def test_a_private_snapshot_of_before_a_power_cut_is_not_trusted(
    filled: LocalRepository, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Private copies are not synced, so after a boot they may hold any bytes."""
    assert dataset_state(filled) == facts(source)
    private = Path(os.environ["XDG_CACHE_HOME"]) / "diesel" / "snapshots"
    identity = filled.dataset("ds").identity
    for file in private.glob(f"{identity.hex}-*"):
        file.write_bytes(file.read_bytes()[:640].ljust(file.stat().st_size, b"\0"))
    (tmp_path / "boot").write_text("another")
    monkeypatch.setattr("diesel_fs.repository.private_copies._BOOT_ID", tmp_path / "boot")
    boot_id.cache_clear()
    try:
        assert dataset_state(filled) == facts(source)
    finally:
        boot_id.cache_clear()
