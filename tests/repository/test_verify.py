"""`verify` and `recover` over damaged stores: each kind of damage is reported in its own words."""

import os
import sqlite3
import struct
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from uuid import UUID

import pytest
from xxhash import xxh3_64_intdigest

from diesel_fs.format.chunk import ChunkHeader
from diesel_fs.format.chunk_id import IdFields, chunk_id_text
from diesel_fs.format.entries import ChunkId
from diesel_fs.format.object_names import chunk_object
from diesel_fs.repository import expected_chunks as folding
from diesel_fs.repository.expected_chunks import HEADERS_AHEAD
from diesel_fs.repository.interface import Findings
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.metadata.sqlite.runs import split_runs
from diesel_fs.storage.metadata.store import CommitBatch, ReadCommitted
from tests.rows import each_row

from ..datasets import dataset_state
from ..storage.objects.faulty_store import Fault
from ..trees import facts, write
from .folder_puts import faulty, put_folder
from .test_interleavings import Writer

FILES = {f"f{i:02}": bytes([i]) * 8000 for i in range(40)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source", FILES)


def chunks(store: Path) -> list[Path]:
    found = sorted(store.glob("datasets/*/chunks/*/*"))
    assert len(found) > 3
    return found


def damaged_by(filled: LocalRepository, change: Callable[[Path], None]) -> Findings:
    victim = chunks(filled.url.path)[1]
    victim.chmod(0o644)
    change(victim)
    findings = filled.verify("ds")
    assert not findings.sound
    assert any(victim.name in problem for problem in findings.problems)
    return findings


def test_an_intact_store(filled: LocalRepository) -> None:
    for headers_only in (True, False):
        findings = filled.verify("ds", headers_only=headers_only)
        assert findings.sound
        assert findings.notes == []
        assert (findings.files, findings.bytes) == (40, 320_000)
        assert findings.chunks == len(list(filled.chunk_ids(filled.dataset("ds").identity)))


@pytest.mark.parametrize("keep", [0, 1, 95, 96, 200, -1])
def test_B1_truncated(filled: LocalRepository, tmp_path: Path, keep: int) -> None:
    def change(victim: Path) -> None:
        os.truncate(victim, keep if keep >= 0 else victim.stat().st_size - 1)

    findings = damaged_by(filled, change)
    assert any("truncated chunk" in problem for problem in findings.problems)
    found = filled.recover("ds", forget_lost=True)
    assert found.problems == []
    assert any("truncated chunk" in note for note in found.notes)
    left = dataset_state(filled)
    whole = facts(tmp_path / "source")
    assert 20 < len(left) < 41
    assert all(whole[path] == fact for path, fact in left.items())


def flipped(at: int) -> Callable[[Path], None]:
    def flip(victim: Path) -> None:
        content = bytearray(victim.read_bytes())
        content[at] ^= 1
        victim.write_bytes(content)

    return flip


def of_another_name(victim: Path) -> None:
    victim.write_bytes(chunks(victim.parents[4])[0].read_bytes())


@each_row(
    "change, words, header",
    [
        (flipped(120), "checksum", True),  # B2
        (flipped(-10), "the bytes of f", False),  # B3
        (of_another_name, "foreign chunk", True),  # B7
        (Path.unlink, "lost chunk", True),
    ],
)
def test_B2_B3_B7_each_damage_has_its_own_words(
    filled: LocalRepository,
    tmp_path: Path,
    change: Callable[[Path], None],
    words: str,
    header: bool,
) -> None:
    victim = chunks(filled.url.path)[1]
    whole = victim.read_bytes()
    problems = damaged_by(filled, change).problems
    assert any(words in problem for problem in problems)
    assert filled.verify("ds", headers_only=True).sound == (not header)
    assert header or len(problems) == 1
    victim.write_bytes(whole)


def test_B9_a_newer_chunk_is_left_as_it_is(filled: LocalRepository, tmp_path: Path) -> None:
    def change(victim: Path) -> None:
        content = bytearray(victim.read_bytes())
        struct.pack_into("<H", content, 8, 2)
        struct.pack_into("<Q", content, 88, xxh3_64_intdigest(bytes(content[:88])))
        victim.write_bytes(content)

    findings = damaged_by(filled, change)
    assert any("needs format version 2" in problem for problem in findings.problems)
    filled.recover("ds")
    assert chunks(tmp_path / "store")[1].exists()


def test_B10_garbage_in_the_store_is_ignored(filled: LocalRepository, tmp_path: Path) -> None:
    folder = chunks(tmp_path / "store")[0].parent
    (folder / "README").write_text("hello")
    (folder / ".DS_Store").write_text("")
    (folder.parent / "x").mkdir()
    findings = filled.verify("ds")
    assert findings.sound
    assert any("foreign" in note for note in findings.notes)
    filled.recover("ds")
    assert dataset_state(filled) == facts(tmp_path / "source")
    assert (folder / "README").exists()


def test_A5_Z8_an_orphan(filled: LocalRepository, tmp_path: Path) -> None:
    """A young one belongs to a running put."""
    writer = Writer(filled)
    writer.add(b"young", b"1")
    young = writer.seal()
    writer.add(b"old", b"2")
    old = writer.seal(IdFields(int(time.time()) - 7200, 1, 1, 0).id())
    findings = filled.verify("ds")
    assert findings.sound
    assert len(findings.notes) == 2
    assert any("under way" in note and chunk_id_text(young.id) in note for note in findings.notes)
    assert any("orphan" in note and chunk_id_text(old.id) in note for note in findings.notes)
    assert filled.view("ds").lookup(b"old") < 0
    view = filled.begin("ds").view
    assert view.lookup(b"old") > 0
    assert view.lookup(b"young") < 0
    assert filled.recover("ds").folded == 1
    assert filled.view("ds").lookup(b"young") > 0


def test_metadata_that_differs_from_its_chunks(filled: LocalRepository, tmp_path: Path) -> None:
    filled.close()
    with sqlite3.connect(tmp_path / "store/meta.sqlite") as db:
        (root,) = db.execute("SELECT number FROM folder WHERE parent = 0").fetchone()
        split_runs(db, root, [b"f07", b"f09"])  # single rows are easy to tamper with
        db.execute("DELETE FROM entry WHERE name = ?", (b"f07",))
        (record,) = db.execute("SELECT record FROM entry WHERE name = ?", (b"f09",)).fetchone()
        db.execute("UPDATE entry SET record = ? WHERE name = ?", (b"\1" + record[1:], b"f09"))
    db.close()
    with LocalRepository.open(filled.url) as repository:
        problems = repository.verify("ds").problems
        assert "metadata lacks f07" in problems
        assert "metadata of f09 differs from its chunk's" in problems
        repository.recover("ds")
        assert repository.verify("ds").sound
        assert dataset_state(repository) == facts(tmp_path / "source")


def test_B11_B10_chunk_that_vanishes_between_listing_and_reading(filled: LocalRepository) -> None:
    identity, objects = filled.dataset("ds").identity, filled.objects
    name = chunk_object(identity, next(iter(filled.chunk_ids(identity))))
    with faulty(filled, Fault("get", name, act=objects.delete)):
        assert not filled.verify("ds").sound


def test_headers_are_read_ahead_and_folded_in_their_order(
    filled: LocalRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many at once, within a limit, and fewer if they are large."""
    for i in range(9):
        write(tmp_path / "source", {f"more{i}-{j:02}": bytes([j]) * 8000 for j in range(40)})
        put_folder(filled, tmp_path / "source")
    identity = filled.dataset("ds").identity
    there = [*filled.chunk_ids(identity)]
    assert len(there) > HEADERS_AHEAD
    lock, under_way, most = threading.Lock(), 0, 0
    read_header, orders = filled.read_header, list[list[ChunkId]]()

    def slowly(of: UUID, chunk: ChunkId) -> ChunkHeader:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        time.sleep(0.01 if chunk[-1] % 2 else 0.002)
        header = read_header(of, chunk)
        with lock:
            under_way -= 1
        return header

    rebuild = filled.meta.rebuild

    def noted(
        name: str,
        of: UUID,
        batches: Iterable[CommitBatch],
        read_committed: ReadCommitted,
        newer_than: int,
    ) -> int:
        found = [*batches]
        orders.append([batch.chunk.id for batch in found])
        return rebuild(name, of, found, read_committed, newer_than)

    monkeypatch.setattr(filled, "read_header", slowly)
    monkeypatch.setattr(filled.meta, "rebuild", noted)
    filled.recover("ds")
    assert orders == [there]
    assert HEADERS_AHEAD // 2 < most <= HEADERS_AHEAD
    most = 0
    monkeypatch.setattr(folding, "ENTRIES_MAX", 4)
    monkeypatch.setattr(folding, "_ENTRIES_AHEAD", 4 * 3)
    assert filled.recover("ds").chunks == len(there)
    assert 1 < most <= 3
    assert dataset_state(filled) == facts(tmp_path / "source")


def test_an_error_while_headers_are_read_ahead_stops_all_reads(
    filled: LocalRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = filled.meta.head("ds")

    def interrupted(_: UUID, chunk: ChunkId) -> ChunkHeader:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(filled, "read_header", interrupted)
        with pytest.raises(KeyboardInterrupt):
            filled.recover("ds")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("header")]
    assert filled.meta.head("ds") == before
