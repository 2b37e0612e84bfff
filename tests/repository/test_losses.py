"""Absence needs proof: a chunk that metadata or the newest snapshot name is found, or reported
lost.

A missing, damaged or unreachable chunk, metadata that came back empty or older, and a short listing
must never turn an acknowledged file into "no such file".
"""

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from diesel_fs.cache.readers.entry_reader import EntryReader
from diesel_fs.errors import (
    BusyError,
    CorruptError,
    MetadataBehind,
    NewerVersionError,
    ObjectMissing,
    ObjectStoreError,
    ObjectStoreRefused,
)
from diesel_fs.format.chunk_id import chunk_id_text
from diesel_fs.format.entries import ChunkId
from diesel_fs.format.object_names import chunk_object, snapshot_object
from diesel_fs.format.snapshot import layout as layout
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.repository import expected_chunks as folding
from diesel_fs.repository.expected_chunks import LostChunks
from diesel_fs.repository.interface import PurgeOptions
from diesel_fs.repository.local import LocalRepository
from diesel_fs.repository.recover import recover
from tests.examples import examples
from tests.rows import each_row

from ..datasets import content, dataset_state, file_contents, forget_private_copies
from ..storage.metadata.redis_servers import emptied_server
from ..storage.objects.faulty_store import Fault
from ..trees import facts, write
from .folder_puts import faulty, put_folder
from .purge.purged import ShortListing

NOW = PurgeOptions(grace_s=0)


@pytest.fixture
def repository(url_of_both: str) -> Iterator[LocalRepository]:
    with LocalRepository.open(url_of_both, create=True) as opened:
        yield opened


@pytest.fixture
def first(repository: LocalRepository, tmp_path: Path) -> Path:
    """The source of a first put, all in one chunk: files, a link and a folder."""
    source = write(tmp_path / "first", {"d/a": b"1", "d/b": b"22", "d/e/empty": b""})
    (source / "d/link").symlink_to("a")
    put_folder(repository, source)
    return source


@pytest.fixture
def lost(repository: LocalRepository, first: Path) -> ChunkId:
    (chunk,) = repository.chunk_ids(repository.dataset("ds").identity)
    return chunk


@pytest.fixture
def second(repository: LocalRepository, lost: ChunkId, tmp_path: Path) -> Path:
    source = write(tmp_path / "second", {"c": b"333"})
    put_folder(repository, source, b"more")
    return source


def object_file(repository: LocalRepository, chunk: ChunkId) -> Path:
    path = repository.url.path / chunk_object(repository.dataset("ds").identity, chunk)
    path.chmod(0o644)
    return path


def emptied(repository: LocalRepository) -> LocalRepository:
    if repository.url.meta:
        emptied_server()
    else:
        repository.close()
        for file in repository.url.path.glob("meta.sqlite*"):
            file.unlink()
    return LocalRepository.open(repository.url, create=True)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip(file: Path, at: int = 120) -> None:
    """The default is a byte of the header."""
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [Path.unlink, empty, flip])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_recovery_names_an_unreadable_chunk_and_changes_nothing(
    repository: LocalRepository,
    lost: ChunkId,
    second: Path,
    damage: Callable[[Path], None],
    is_known: bool,
) -> None:
    """Also if the metadata store is empty, and only the newest snapshot names the chunk."""
    before = repository.view("ds")
    damage(object_file(repository, lost))
    if not is_known:
        repository = emptied(repository)
    for _ in range(2):
        problems = "\n".join(repository.recover("ds").problems)
        assert chunk_id_text(lost) in problems
        assert all(f": d/{name}" in problems for name in ("a", "b", "e/empty"))
        assert "more/c" not in problems
        after = repository.view("ds")
        assert (after.version, bytes(after.buffer)) == (before.version, bytes(before.buffer))
    assert repository.verify("ds").problems
    assert content(repository, b"more/c") == b"333"
    findings = repository.recover("ds", forget_lost=True)
    assert findings.problems == []
    assert all(f": d/{name}" in "\n".join(findings.notes) for name in ("a", "b", "e/empty"))
    view = repository.view("ds")
    assert view.version > before.version
    assert [view.path(i) for i in view.files().tolist()] == [b"more/c"]
    if damage is Path.unlink:
        assert repository.verify("ds").sound


def test_lost_files_are_listed_and_block_puts_removals_and_purges(
    repository: LocalRepository, lost: ChunkId, second: Path
) -> None:
    """This holds also if only the newest snapshot names the file."""
    object_file(repository, lost).unlink()
    assert repository.stat("ds", b"d/a").size == 1
    with pytest.raises(ObjectMissing, match=chunk_id_text(lost)):
        content(repository, b"d/a")
    published = repository.snapshots.versions(repository.dataset("ds").identity)
    repository = emptied(repository)
    with pytest.raises(LostChunks, match="d/a"):
        put_folder(repository, second, b"other")
    with pytest.raises(LostChunks):
        repository.begin("ds", create=False)
    with pytest.raises(LostChunks):
        repository.purge("ds", NOW)
    assert repository.view("ds").lookup(b"d/a") > 0
    assert repository.snapshots.versions(repository.dataset("ds").identity) == published


def test_a_recovery_since_a_time_keeps_the_same_rule(
    repository: LocalRepository, lost: ChunkId, second: Path
) -> None:
    """From empty metadata it rebuilds everything."""
    everything = dataset_state(repository)
    repository = emptied(repository)
    assert repository.recover("ds", since_s=4e9).sound
    assert dataset_state(repository) == everything
    object_file(repository, lost).unlink()
    repository = emptied(repository)
    assert repository.recover("ds", since_s=4e9).problems
    assert repository.view("ds").lookup(b"d/a") > 0


@pytest.mark.parametrize("error", [
    ObjectStoreError("open: Input/output error"), ObjectStoreRefused("403 Forbidden"),
])  # fmt: skip
def test_a_single_error_of_the_store_proves_no_loss(
    repository: LocalRepository,
    lost: ChunkId,
    second: Path,
    error: ObjectStoreError,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everything, before = dataset_state(repository), repository.meta.head("ds")
    name = chunk_object(before.identity, lost)
    with faulty(repository, Fault("get", name, error=error)):
        assert repository.recover("ds").sound
    assert dataset_state(repository) == everything
    before = repository.meta.head("ds")
    monkeypatch.setattr(folding, "_PAUSES_S", (0.0, 0.0))
    failing = Fault("get", name, error=error, times=3)
    with faulty(repository, failing), pytest.raises(ObjectStoreError):
        repository.recover("ds")
    assert repository.meta.head("ds") == before
    assert dataset_state(repository) == everything


def test_bytes_that_only_the_first_read_damages_are_no_damage(
    repository: LocalRepository, lost: ChunkId, second: Path
) -> None:
    name = chunk_object(repository.dataset("ds").identity, lost)
    for bit in (8 * 20, 8 * 120):
        fault = Fault("get", name, flip=bit, times=1)
        with faulty(repository, fault):
            assert repository.recover("ds").sound
        with faulty(repository, replace(fault)):
            assert repository.verify("ds").sound


def test_a_chunk_of_a_newer_format_is_never_forgotten(
    repository: LocalRepository, lost: ChunkId, second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = repository.read_header

    def read_header(identity: object, chunk: ChunkId) -> object:
        if chunk == lost:
            raise NewerVersionError("needs format version 2")
        return real(repository.dataset("ds").identity, chunk)

    before = repository.meta.head("ds")
    monkeypatch.setattr(repository, "read_header", read_header)
    for forget_lost in (False, True):
        findings = repository.recover("ds", forget_lost=forget_lost)
        assert any("needs format version 2" in problem for problem in findings.problems)
        assert repository.meta.head("ds") == before


def test_entries_that_an_accepted_loss_brings_back_are_named(
    repository: LocalRepository, first: Path, lost: ChunkId, tmp_path: Path
) -> None:
    identity = repository.dataset("ds").identity
    write(tmp_path / "later", {"a": b"later"})
    put_folder(repository, tmp_path / "later", b"d")
    session = repository.begin("ds")
    session.delete([b"d/b"])
    session.finish()
    for chunk in set(repository.chunk_ids(identity)) - {lost}:
        object_file(repository, chunk).unlink()
    notes = repository.recover("ds", forget_lost=True).notes
    assert "an older version shows now: d/a" in notes
    assert "it had been deleted, and is back: d/b" in notes
    assert content(repository, b"d/a") == b"1"


def test_a_version_never_has_two_contents(repository: LocalRepository, lost: ChunkId) -> None:
    """A rebuild makes another version, whether it folds something or not."""
    before = repository.view("ds")
    object_file(repository, lost).unlink()
    assert repository.recover("ds", forget_lost=True).problems == []
    after = repository.view("ds")
    assert after.version > before.version
    assert len(after.files()) == 0
    again = recover(emptied(repository), "ds")
    assert again.sound
    with LocalRepository.open(repository.url) as reader:
        assert reader.view("ds").version > after.version


@pytest.mark.parametrize("damage", [Path.unlink, empty])
def test_putting_the_source_again_heals_a_loss(
    repository: LocalRepository,
    first: Path,
    lost: ChunkId,
    second: Path,
    damage: Callable[[Path], None],
) -> None:
    everything = dataset_state(repository)
    damage(object_file(repository, lost))
    assert repository.recover("ds").problems
    assert put_folder(repository, first, dry_run=True).entries_found == 7
    report = put_folder(repository, first)
    assert (report.files, report.failed) == (3, [])
    assert dataset_state(repository) == everything
    if damage is empty:
        object_file(repository, lost).unlink()
    assert repository.verify("ds").problems == []
    assert put_folder(repository, first).files == 0
    repository.purge("ds", NOW)
    again = emptied(repository)
    assert again.recover("ds").sound
    assert dataset_state(again) == everything


def test_checksum_puts_heal_damage(repository: LocalRepository, first: Path, lost: ChunkId) -> None:
    victim = object_file(repository, lost)
    flip(victim, victim.read_bytes().rindex(b"22"))
    assert put_folder(repository, first).files == 0
    assert put_folder(repository, first, checksum=True).files == 1
    assert dataset_state(repository) == facts(first)
    assert put_folder(repository, first, checksum=True).files == 0


def test_a_short_listing_is_completed_and_ends_a_purge(
    repository: LocalRepository, lost: ChunkId, second: Path
) -> None:
    """Redis came back empty while the store does not list a chunk that it has."""
    everything = dataset_state(repository)
    hidden = chunk_object(repository.dataset("ds").identity, lost)
    repository = emptied(repository)
    real = repository.objects
    repository.objects = ShortListing(real, hidden)
    published = repository.snapshots.versions(repository.dataset("ds").identity)
    with pytest.raises(CorruptError, match="listing lacks"):
        repository.purge("ds", NOW)
    repository.objects = real
    assert dataset_state(repository) == everything
    assert set(published) <= set(repository.snapshots.versions(repository.dataset("ds").identity))
    assert repository.verify("ds").sound


def test_a_damaged_snapshot_that_alone_named_the_lost_chunks_is_no_proof(
    repository: LocalRepository, lost: ChunkId, second: Path
) -> None:
    identity = repository.dataset("ds").identity
    newest = repository.snapshots.newest(identity)
    file = repository.url.path / snapshot_object(identity, newest)
    file.chmod(0o644)
    flip(file, 700)
    forget_private_copies()
    repository = emptied(repository)
    assert any(str(newest) in problem for problem in repository.recover("ds").problems)
    assert repository.recover("ds", forget_lost=True).problems == []
    assert repository.view("ds").version > newest


def forged(view: Snapshot, path: bytes, field: str) -> bytes:
    """The view with another value in one column, and right checksums."""
    column = np.array(getattr(view.columns, field))
    column[view.lookup(path)] ^= 1
    columns = view.columns._replace(**{field: column})
    values = (view.identity, view.dataset, view.version, view.digest, view.rows_digest)
    header = layout.header_of(columns, *values)
    return b"".join(layout.write(header, columns))


@each_row("field", ["mtime_ns", "flags", "checksum"])
def test_a_published_snapshot_is_compared_column_by_column(
    repository: LocalRepository, lost: ChunkId, second: Path, field: str
) -> None:
    """A wrong merge would make a snapshot with right checksums and other content."""
    view = repository.view("ds")
    file = repository.url.path / snapshot_object(view.identity, view.version)
    file.chmod(0o644)
    file.write_bytes(forged(view, b"d/b", field))
    forget_private_copies()
    problems = repository.verify("ds").problems
    assert any(f"version {view.version} differs from the metadata" in each for each in problems)
    with pytest.raises(CorruptError, match="another content"):
        repository.publish("ds", full=True)
    assert repository.recover("ds").problems == []
    assert repository.publish("ds", full=True) > view.version
    assert repository.verify("ds").problems == []


class Absence(RuleBasedStateMachine):
    """Puts and deletions beside lost chunks, lost or older metadata, rebuilds and purges.

    The oracle is a dict of the acknowledged files. A path of it may be unreadable if its chunk
    has been taken away; until the loss is accepted, it is never "no such file", nor an older
    version.
    """

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="absence-"))
        self.url = (self.home / "store").as_uri()
        self.expected: dict[bytes, bytes] = {}
        self.history: dict[bytes, set[bytes]] = {}
        self.taken: dict[Path, bytes] = {}
        self.older: bytes | None = None
        self.count = 0
        with LocalRepository.open(self.url, create=True) as repository:
            repository.begin("ds").finish()

    def teardown(self) -> None:
        shutil.rmtree(self.home)

    def put_some(self, files: dict[bytes, bytes]) -> None:
        self.count += 1
        source = self.home / f"source{self.count}"
        write(source, {os.fsdecode(path): content for path, content in files.items()})
        opened = LocalRepository.open(self.url, create=True)
        with opened as repository, suppress(LostChunks, MetadataBehind):
            put_folder(repository, source)
            self.expected.update(files)
            for path, content in files.items():
                self.history.setdefault(path, set()).add(content)

    @rule(name=st.sampled_from("abcdef"), content=st.binary(min_size=1, max_size=9))
    def put(self, name: str, content: bytes) -> None:
        self.put_some({name.encode(): content})

    @rule()
    def put_all_again(self) -> None:
        self.put_some(dict(self.expected))

    @rule(name=st.sampled_from("abcdef"))
    def delete(self, name: str) -> None:
        opened = LocalRepository.open(self.url, create=True)
        with opened as repository, suppress(LostChunks, MetadataBehind):
            session = repository.begin("ds")
            session.delete([name.encode()])
            session.finish()
            self.expected.pop(name.encode(), None)

    @precondition(lambda self: not self.taken)
    @rule(which=st.integers(0, 9))
    def take_a_chunk_away(self, which: int) -> None:
        chunks = sorted((self.home / "store").glob("datasets/*/chunks/*/*"))
        if chunks:
            victim = chunks[which % len(chunks)]
            self.taken[victim] = victim.read_bytes()
            victim.unlink()

    @precondition(lambda self: self.taken)
    @rule()
    def bring_it_back(self) -> None:
        for path, data in self.taken.items():
            path.write_bytes(data)
        self.taken = {}

    @rule()
    def lose_the_database(self) -> None:
        for file in (self.home / "store").glob("meta.sqlite*"):
            file.unlink()

    @rule()
    def remember_the_database(self) -> None:
        file = self.home / "store/meta.sqlite"
        if file.exists():
            with sqlite3.connect(file) as db:
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            db.close()
            self.older = file.read_bytes()

    @precondition(lambda self: self.older)
    @rule()
    def put_the_older_database_back(self) -> None:
        assert self.older is not None
        self.lose_the_database()
        (self.home / "store/meta.sqlite").write_bytes(self.older)

    @rule()
    def recover(self) -> None:
        with LocalRepository.open(self.url, create=True) as repository:
            repository.recover("ds")

    @precondition(lambda self: self.taken)
    @rule()
    def accept_the_loss(self) -> None:
        with LocalRepository.open(self.url, create=True) as repository:
            assert repository.recover("ds", forget_lost=True).problems == []
            found = file_contents(repository.view("ds"), repository)
        self.taken = {}  # it stays away
        assert all(found[path] in self.history[path] for path in found)
        self.expected = found
        self.older = None

    @rule()
    def purge(self) -> None:
        opened = LocalRepository.open(self.url, create=True)
        with opened as repository, suppress(LostChunks, MetadataBehind, BusyError):
            repository.purge("ds", NOW)

    @invariant()
    def nothing_that_was_acknowledged_is_absent(self) -> None:
        with LocalRepository.open(self.url) as repository:
            view = repository.view("ds")
            reader = EntryReader(view, repository.objects, 1 << 20)
            for path, content in self.expected.items():
                index = view.lookup(path)
                assert index >= 0, path
                try:
                    found = bytes(reader.read(index))
                except ObjectMissing:
                    assert self.taken
                else:
                    assert found == content


Absence.TestCase.settings = examples(25, steps=20, suppress=(HealthCheck.filter_too_much,))
TestAbsence = Absence.TestCase
