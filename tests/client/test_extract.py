"""Tests of writing entries back, also from forged snapshots and into hostile destinations."""

import errno
import io
import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from diesel_fs.cache.readers.entry_file import EntryFile
from diesel_fs.cache.readers.entry_reader import EntryReader
from diesel_fs.client.extract import GetReport, get, get_tar, in_chunk_order
from diesel_fs.errors import NoSpaceError, ObjectStoreError
from diesel_fs.format.snapshot import layout as layout
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.ingest import FolderSource, PutOptions, put
from diesel_fs.repository.local import LocalRepository
from tests.trees import facts, write


class Pets:
    def __init__(self, repository: LocalRepository) -> None:
        self.repository = repository

    @property
    def view(self) -> Snapshot:
        return self.repository.view("pets")

    def put(self, source: Path, below: bytes = b"") -> Snapshot:
        options = PutOptions(chunk_bytes=65536, compress="none")
        put(self.repository, "pets", FolderSource(source), below, options=options)
        return self.view

    def get(self, dest: Path, *, force: bool = False, view: Snapshot | None = None) -> GetReport:
        with self.reader(view) as reader:
            return get(view or self.view, reader, b"", dest, force=force)

    def reader(self, view: Snapshot | None = None) -> closing[EntryReader]:
        return closing(EntryReader(view or self.view, self.repository.objects, 1 << 20))


@pytest.fixture
def pets(repository: LocalRepository) -> Pets:
    return Pets(repository)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "src", {"a": b"1", "b": b"2"})


def failures(report: GetReport) -> list[bytes]:
    return [path for path, _ in report.failed]


@pytest.mark.parametrize(
    ("name", "evil"),
    [
        (b"@@", b".."),
        (b"a@b", b"a/b"),
        (b"@", b"."),
        (b"a@@@@@@@@@@b", b"/etc/passwd\0"),
        (b"@@@x", b"../x"),
        (b"@x", b"/x"),
    ],
)
def test_M1_names_are_checked_again_by_the_writer(
    pets: Pets, tmp_path: Path, name: bytes, evil: bytes
) -> None:
    """Even a snapshot that was not verified cannot make `get` write outside the destination."""
    source = write(tmp_path / "src", {f"sub/{name.decode()}": b"evil", "sub/good": b"good"})
    (source / f"sub/{name.decode()}x").mkdir()
    view = pets.put(source)
    names = bytearray(view.columns.names)
    at = names.index(name + name + b"xgood")  # the names of the folder's entries, concatenated
    names[at : at + len(name)] = evil
    forged = view.columns._replace(names=np.frombuffer(names, np.uint8))
    bad = Snapshot(b"".join(layout.write(view.header, forged)), verify=False)
    before = facts(source)
    report = pets.get(tmp_path / "out/in", view=bad)
    assert len(report.failed) == 1
    assert report.failed[0][1].startswith("not written: its name has")
    assert (tmp_path / "out/in/sub/good").read_bytes() == b"good"
    assert sorted(os.listdir(tmp_path / "out")) == ["in"]
    assert facts(source) == before


def test_E2_a_content_of_another_length_is_a_failure(pets: Pets, tmp_path: Path) -> None:
    view = pets.put(write(tmp_path / "src", {"good": b"good", "liar": b"x" * 3000}))
    sizes = view.columns.size.copy()
    sizes[view.lookup(b"liar")] = 1_100_000_000
    forged = view.columns._replace(size=sizes)
    values = (view.identity, view.dataset, view.version, view.digest, view.rows_digest)
    header = layout.header_of(forged, *values)
    bad = Snapshot(b"".join(layout.write(header, forged)), verify=False)
    report = pets.get(tmp_path / "out", view=bad)
    assert "3000 bytes" in report.failed[0][1]
    assert os.listdir(tmp_path / "out") == ["good"]
    with pets.reader(bad) as reader:
        for each in (report, get_tar(bad, reader, b"", io.BytesIO())):
            assert failures(each) == [b"liar"]
            assert (each.files, each.content_bytes) == (1, 4)


def test_M4_a_device_is_replaced_and_never_opened(
    pets: Pets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write(tmp_path / "src", {"zero": b""}), tmp_path / "out"
    os.utime(source / "zero", ns=(0, 0))
    pets.put(source)
    out.mkdir()
    try:
        os.mknod(out / "zero", 0o020644, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root makes devices")
    os.utime(out / "zero", ns=(0, 0))  # size, mode and time are those of the file
    whole, opened = os.open, []

    def watched(path: bytes | str, *arguments: int, **more: int) -> int:
        opened.append(path)
        return whole(path, *arguments, **more)

    monkeypatch.setattr(os, "open", watched)
    assert failures(pets.get(out)) == [b"zero"]
    assert pets.get(out, force=True).failed == []
    assert (out / "zero").is_file()
    assert len(opened) > 2
    assert b"zero" not in opened


def test_equal_means_equal_content(pets: Pets, tmp_path: Path) -> None:
    pets.put(write(tmp_path / "src", {"a": b"right", "b": b"x" * 200_000}))
    out = tmp_path / "out"
    assert pets.get(out).files == 2
    assert pets.get(out).unchanged == 2
    times = (0, (out / "b").stat().st_mtime_ns)
    (out / "b").write_bytes(b"x" * 199_999 + b"y")
    os.utime(out / "b", ns=times)
    report = pets.get(out)
    assert (report.unchanged, failures(report)) == (1, [b"b"])


def test_files_of_many_extents_come_back_piece_by_piece(pets: Pets, tmp_path: Path) -> None:
    content = os.urandom(300_000)
    source = write(tmp_path / "src", {"big": content, "small": b"s", "z": b""})
    view = pets.put(source)
    assert len(view.extents(view.lookup(b"big"))) == 5
    pets.get(tmp_path / "out")
    assert facts(tmp_path / "out") == facts(source)
    with pets.reader() as reader, EntryFile(reader, view.lookup(b"big")) as file:
        assert file.read(100) == content[:100]
        assert file.readall() == content[100:]


def test_files_are_read_in_the_order_of_their_chunks(pets: Pets, tmp_path: Path) -> None:
    for name in ("z", "m", "a"):  # put in this order, which is not that of the names
        view = pets.put(write(tmp_path / name, {name: b"x" * 10, name + "2": b"y"}))
    order = in_chunk_order(view, view.files())
    assert [view.path(i)[:1] for i in order.tolist()] == [b"z", b"z", b"m", b"m", b"a", b"a"]
    assert len(in_chunk_order(view, np.zeros(0, np.int64))) == 0


def test_a_full_disk_ends_get_and_leaves_no_partial_file(
    pets: Pets, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pets.put(source)
    whole = os.write

    def full(file: int, data: memoryview) -> int:
        if bytes(data) == b"2":
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(NoSpaceError, match="cannot write 'b'"):
            pets.get(tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["a"]


def test_lost_stores_and_lost_chunks_in_get(pets: Pets, source: Path, tmp_path: Path) -> None:
    view, store = pets.put(source), tmp_path / "store"
    store.rename(tmp_path / "elsewhere")
    with pytest.raises(ObjectStoreError, match="the store has gone"):
        pets.get(tmp_path / "out", view=view)
    (tmp_path / "elsewhere").rename(store)
    for chunk in store.glob("datasets/*/chunks/*/*"):
        chunk.unlink()
    assert failures(pets.get(tmp_path / "out")) == [b"a", b"b"]


def test_implicit_folders_keep_no_time(pets: Pets, source: Path, tmp_path: Path) -> None:
    """It must not get that of 1970."""
    pets.put(source, b"one/two")
    pets.get(tmp_path / "out")
    assert (tmp_path / "out/one").stat().st_mtime > 1_000_000_000
    assert (tmp_path / "out/one").stat().st_mode & 0o777 == 0o755


def test_existing_folders_keep_their_mode(pets: Pets, tmp_path: Path) -> None:
    """A get must not open `.ssh` of a home because the dataset has an open folder `.ssh`."""
    source = write(tmp_path / "src", {".ssh/x": b"1", "implicit/y": b"2", "new/z": b"3"})
    (source / ".ssh").chmod(0o777)
    pets.put(source)
    session = pets.repository.begin("pets")
    session.delete([b"implicit"])
    session.finish()
    home = write(tmp_path / "home", {"mine": b""})
    for name in (".ssh", "implicit"):
        (home / name).mkdir()
        (home / name).chmod(0o700)
        (home / name / "own").touch()  # so that only a get changes the time
        os.utime(home / name, ns=(0, 7))
    assert pets.get(home).failed == []
    assert (home / ".ssh/x").read_bytes() == b"1"
    assert [(home / name).stat().st_mode & 0o777 for name in (".ssh", "implicit")] == [0o700] * 2
    assert (home / ".ssh").stat().st_mtime_ns != (source / ".ssh").stat().st_mtime_ns
    assert (home / "new").stat().st_mtime_ns == (source / "new").stat().st_mtime_ns
    pets.get(home, force=True)
    assert (home / ".ssh").stat().st_mode & 0o777 == 0o777
    assert (home / ".ssh").stat().st_mtime_ns == (source / ".ssh").stat().st_mtime_ns


def test_a_tar_that_cannot_be_written_is_an_error(pets: Pets, tmp_path: Path) -> None:
    view = pets.put(write(tmp_path / "src", {"a": b"1" * (2 << 20)}))
    no_space = pytest.raises(OSError, match="No space")
    with open("/dev/full", "wb", buffering=0) as out, pets.reader() as reader, no_space:
        get_tar(view, reader, b"", out)
