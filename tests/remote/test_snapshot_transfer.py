"""Snapshots in pieces: compressed once for a version, and joined again by the client."""

import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lz4.block
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.errors import CorruptError
from diesel_fs.format.chunk import CHUNK_BYTES_MIN
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.ingest import FolderSource, PutOptions, put
from diesel_fs.remote import snapshot_transfer as snapshot_pieces
from diesel_fs.remote.snapshot_transfer import (
    BLOCK_BYTES_MAX,
    PIECE_BYTES,
    CompressedSnapshots,
    SnapshotAssembler,
)
from diesel_fs.repository.local import LocalRepository
from tests.rows import each_row

from ..trees import write


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRepository]:
    folder: Path = tmp_path_factory.mktemp("pieces")
    source = write(folder / "source", {f"d{i % 7}/file{i}": b"" for i in range(500)})
    with LocalRepository.open((folder / "store").as_uri(), create=True) as opened:
        options = PutOptions(chunk_bytes=CHUNK_BYTES_MIN, jobs=1)
        put(opened, "ds", FolderSource(source), options=options)
        yield opened


@pytest.fixture
def view(repository: LocalRepository) -> Snapshot:
    return repository.view("ds")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_pieces, "PIECE_BYTES", 10_000)


def joined(pieces: Iterator[tuple[int, bytes | memoryview]]) -> bytes:
    gathered, total = SnapshotAssembler(), 0
    for raw_bytes, block in pieces:
        gathered.add(raw_bytes, block)
        total += raw_bytes
    return bytes(gathered.joined(total))


@pytest.mark.parametrize("kept", [True, False])
def test_joined_pieces_equal_the_snapshot(kept: bool, tmp_path: Path, view: Snapshot) -> None:
    pieces = CompressedSnapshots(tmp_path / "pieces" if kept else None)
    for _ in range(3):
        assert joined(pieces.pieces(view)) == view.buffer
        assert len(list(pieces.pieces(view))) == -(-len(view.buffer) // 10_000) > 3
    assert pieces.made == (1 if kept else 6)


def test_a_version_is_compressed_once_for_many_requests_and_processes(
    tmp_path: Path, view: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces, ready = CompressedSnapshots(tmp_path / "pieces"), threading.Barrier(8)
    packed = snapshot_pieces.compressed

    def slow(content: memoryview) -> Iterator[snapshot_pieces.SnapshotPiece]:
        threading.Event().wait(0.1)
        return packed(content)

    monkeypatch.setattr(snapshot_pieces, "compressed", slow)

    def ask() -> bytes:
        ready.wait(20)
        return joined(pieces.pieces(view))

    with ThreadPoolExecutor(8) as pool:
        requests = [pool.submit(ask) for _ in range(8)]
        assert all(each.result(20) == view.buffer for each in requests)
    assert pieces.made == 1
    of_another_process = CompressedSnapshots(tmp_path / "pieces")
    assert joined(of_another_process.pieces(view)) == view.buffer
    assert of_another_process.made == 0
    (file,) = (tmp_path / "pieces").iterdir()
    assert file.stat().st_mode & 0o077 == 0


def test_pieces_of_old_versions_are_removed(
    tmp_path: Path, view: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = CompressedSnapshots(tmp_path / "pieces")
    for version in (7, 8, 9, 10):
        monkeypatch.setattr(view, "version", version)
        list(pieces.pieces(view))
    names = sorted(path.name for path in (tmp_path / "pieces").iterdir())
    assert [int(name.split("-")[1][:16], 16) for name in names] == [9, 10]


def test_an_old_version_is_compressed_once_for_many_requests(
    tmp_path: Path, view: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = CompressedSnapshots(tmp_path / "pieces")
    for version in (8, 9, 10, 7, 7, 7):
        monkeypatch.setattr(view, "version", version)
        assert joined(pieces.pieces(view)) == view.buffer
    assert pieces.made == 4


@each_row("at", [0, 5000, -1, -20, -60])
@each_row("how", ["flip", "cut", "empty"])
def test_J6_a_damaged_file_is_made_again(at: int, how: str, tmp_path: Path, view: Snapshot) -> None:
    pieces = CompressedSnapshots(tmp_path / "pieces")
    list(pieces.pieces(view))
    (file,) = (tmp_path / "pieces").iterdir()
    content = bytearray(file.read_bytes())
    if how == "flip":
        content[at] ^= 1
    file.write_bytes(content if how == "flip" else content[: at if how == "cut" else 0])
    try:
        first = joined(pieces.pieces(view))
    except CorruptError:  # the client sends the request again
        assert how == "flip"
        assert at >= 0
    else:
        assert first == view.buffer
    assert joined(pieces.pieces(view)) == view.buffer
    assert pieces.made == 2


def test_J1_a_full_disk_is_no_error(
    tmp_path: Path, view: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = CompressedSnapshots(tmp_path / "pieces")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full)
        assert joined(pieces.pieces(view)) == view.buffer
    assert list((tmp_path / "pieces").iterdir()) == []
    (tmp_path / "file").touch()
    assert joined(CompressedSnapshots(tmp_path / "file").pieces(view)) == view.buffer


def test_an_abandoned_iterator_leaves_no_descriptor_open(tmp_path: Path, view: Snapshot) -> None:
    pieces = CompressedSnapshots(tmp_path / "pieces")
    list(pieces.pieces(view))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        some = pieces.pieces(view)
        next(some)
        some.close()  # type: ignore[attr-defined] # a client that has gone
        pieces.pieces(view)
    assert len(os.listdir("/proc/self/fd")) == before


# The client's end


def block(content: bytes) -> bytes:
    packed: bytes = lz4.block.compress(content, store_size=False)
    return packed


@each_row(
    ("raw_bytes", "stored"),
    [
        (0, block(b"")),
        (-1, block(b"x")),
        (PIECE_BYTES + 1, block(bytes(PIECE_BYTES + 1))),
        (1 << 62, block(b"x")),
        (5, b""),
        (5, block(b"four")),
        (4, block(b"12345")),
        (100, b"no block at all"),
        (100, bytes(BLOCK_BYTES_MAX + 1)),
    ],
)
def test_N2_a_piece_that_contradicts_its_header_is_refused(raw_bytes: int, stored: bytes) -> None:
    with pytest.raises(CorruptError):
        SnapshotAssembler().add(raw_bytes, stored)


def test_N2_too_many_and_too_few_bytes_are_refused() -> None:
    gathered = SnapshotAssembler(bytes_max=10)
    gathered.add(6, block(b"abcdef"))
    with pytest.raises(CorruptError, match="more than 10"):
        gathered.add(5, block(b"abcde"))
    for total in (5, 7, 0):
        with pytest.raises(CorruptError, match="6 bytes of a snapshot have come"):
            gathered.joined(total)
    assert bytes(gathered.joined(6)) == b"abcdef"


@given(st.binary(max_size=200), st.integers(-5, 1 << 40))
def test_N2_any_block_is_a_piece_or_an_error(stored: bytes, raw_bytes: int) -> None:
    gathered = SnapshotAssembler()
    try:
        gathered.add(raw_bytes, stored)
    except CorruptError:
        return
    assert len(gathered.joined(raw_bytes)) == raw_bytes
