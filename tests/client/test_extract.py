"""Tests of writing entries back, also from forged snapshots and into hostile destinations."""

import errno
import io
import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from diesel_fs.cache.reader import EntryFile, EntryReader
from diesel_fs.client.extract import GetReport, get, get_tar, in_chunk_order
from diesel_fs.errors import NoSpaceError, ObjectStoreError
from diesel_fs.format.snapshot import layout as layout
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.ingest import FolderSource, PutOptions, put
from diesel_fs.repository.local import LocalRepository
from tests.trees import facts, write

MEMORY_BYTES = 1 << 20


def get_to(
    repository: LocalRepository, view: Snapshot, dest: Path, *, force: bool = False
) -> GetReport:
    with closing(EntryReader(view, repository.objects, MEMORY_BYTES)) as reader:
        return get(view, reader, b"", dest, force=force)


def put_files(repository: LocalRepository, source: Path, files: dict[str, bytes]) -> Snapshot:
    """Put a folder with these files, in chunks of 64 KiB."""
    options = PutOptions(chunk_bytes=65536, compress="none")
    put(repository, "pets", FolderSource(write(source, files)), options=options)
    return repository.view("pets")


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
    repository: LocalRepository, tmp_path: Path, name: bytes, evil: bytes
) -> None:
    """Even a snapshot that was not verified cannot make `get` write outside the destination."""
    source = write(tmp_path / "src", {f"sub/{name.decode()}": b"evil", "sub/good": b"good"})
    (source / f"sub/{name.decode()}x").mkdir()
    put(repository, "pets", FolderSource(source))
    view = repository.view("pets")
    names = bytearray(view.columns.names)
    at = names.index(name + name + b"xgood")  # the names of the folder's entries, concatenated
    names[at : at + len(name)] = evil
    forged = view.columns._replace(names=np.frombuffer(names, np.uint8))
    bad = Snapshot(b"".join(layout.write(view.header, forged)), verify=False)
    before = facts(tmp_path / "src")
    report = get_to(repository, bad, tmp_path / "out/in")
    assert len(report.failed) == 1
    assert report.failed[0][1].startswith("not written: its name has")
    assert (tmp_path / "out/in/sub/good").read_bytes() == b"good"
    assert sorted(os.listdir(tmp_path / "out")) == ["in"]
    assert facts(tmp_path / "src") == before


def test_E2_a_content_of_another_length_is_a_failure_and_is_not_counted(
    repository: LocalRepository, tmp_path: Path
) -> None:
    """A forged snapshot gives a file more bytes than its chunk has; `get` invents none."""
    view = put_files(repository, tmp_path / "src", {"good": b"good", "liar": b"x" * 3000})
    sizes = view.columns.size.copy()
    sizes[view.lookup(b"liar")] = 1_100_000_000
    forged = view.columns._replace(size=sizes)
    header = layout.header_of(forged, view.identity, view.dataset, view.version, view.digest)
    bad = Snapshot(b"".join(layout.write(header, forged)), verify=False)
    report = get_to(repository, bad, tmp_path / "out")
    assert [path for path, _ in report.failed] == [b"liar"]
    assert "3000 bytes" in report.failed[0][1]
    assert (report.files, report.content_bytes) == (1, 4)
    assert os.listdir(tmp_path / "out") == ["good"]
    with closing(EntryReader(bad, repository.objects, MEMORY_BYTES)) as reader:
        report = get_tar(bad, reader, b"", io.BytesIO())
        assert [path for path, _ in report.failed] == [b"liar"]
        assert (report.files, report.content_bytes) == (1, 4)


def test_M4_a_device_is_replaced_and_never_opened(
    repository: LocalRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "src", {"zero": b""})
    os.utime(source / "zero", ns=(0, 0))
    put(repository, "pets", FolderSource(source))
    out = tmp_path / "out"
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
    view = repository.view("pets")
    assert [path for path, _ in get_to(repository, view, out).failed] == [b"zero"]
    assert get_to(repository, view, out, force=True).failed == []
    assert (out / "zero").is_file()
    assert len(opened) > 2
    assert b"zero" not in opened


def test_equal_means_equal_content(repository: LocalRepository, tmp_path: Path) -> None:
    view = put_files(repository, tmp_path / "src", {"a": b"right", "b": b"x" * 200_000})
    out = tmp_path / "out"
    assert get_to(repository, view, out).files == 2
    assert get_to(repository, view, out).unchanged == 2
    times = (0, (out / "b").stat().st_mtime_ns)
    (out / "b").write_bytes(b"x" * 199_999 + b"y")
    os.utime(out / "b", ns=times)
    report = get_to(repository, view, out)
    assert (report.unchanged, [path for path, _ in report.failed]) == (1, [b"b"])


def test_files_of_many_extents_come_back_piece_by_piece(
    repository: LocalRepository, tmp_path: Path
) -> None:
    source, content = tmp_path / "src", os.urandom(300_000)
    view = put_files(repository, source, {"big": content, "small": b"s", "z": b""})
    assert len(view.extents(view.lookup(b"big"))) == 5
    get_to(repository, view, tmp_path / "out")
    assert facts(tmp_path / "out") == facts(source)
    with (
        closing(EntryReader(view, repository.objects, MEMORY_BYTES)) as reader,
        EntryFile(reader, view.lookup(b"big")) as file,
    ):
        assert file.read(100) == content[:100]
        assert file.readall() == content[100:]


def test_files_are_read_in_the_order_of_their_chunks(
    repository: LocalRepository, tmp_path: Path
) -> None:
    for name in ("z", "m", "a"):  # put in this order, which is not that of the names
        view = put_files(repository, tmp_path / name, {name: b"x" * 10, name + "2": b"y"})
    order = in_chunk_order(view, view.files())
    assert [view.path(i)[:1] for i in order.tolist()] == [b"z", b"z", b"m", b"m", b"a", b"a"]
    assert len(in_chunk_order(view, np.zeros(0, np.int64))) == 0


def test_a_full_disk_ends_get_and_leaves_no_partial_file(
    repository: LocalRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, whole = put_files(repository, tmp_path / "src", {"a": b"1", "b": b"2"}), os.write

    def full(file: int, data: memoryview) -> int:
        if bytes(data) == b"2":
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(NoSpaceError, match="cannot write 'b'"):
            get_to(repository, view, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["a"]


def test_a_lost_store_ends_get_and_lost_chunks_fail_their_files(
    repository: LocalRepository, tmp_path: Path
) -> None:
    view = put_files(repository, tmp_path / "src", {"a": b"1", "b": b"2"})
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    with pytest.raises(ObjectStoreError, match="the store has gone"):
        get_to(repository, view, tmp_path / "out")
    (tmp_path / "elsewhere").rename(tmp_path / "store")
    for chunk in (tmp_path / "store").glob("datasets/*/chunks/*/*"):
        chunk.unlink()
    report = get_to(repository, view, tmp_path / "out")
    assert [path for path, _ in report.failed] == [b"a", b"b"]


def test_implicit_folders_keep_no_time(repository: LocalRepository, tmp_path: Path) -> None:
    """A folder that was never put itself has no mtime; it must not get that of 1970."""
    put(repository, "pets", FolderSource(write(tmp_path / "src", {"a": b"1"})), b"one/two")
    get_to(repository, repository.view("pets"), tmp_path / "out")
    assert (tmp_path / "out/one").stat().st_mtime > 1_000_000_000
    assert (tmp_path / "out/one").stat().st_mode & 0o777 == 0o755


def test_folders_that_are_there_stay_as_they_are(
    repository: LocalRepository, tmp_path: Path
) -> None:
    """For example `.ssh` of a home keeps its mode, though the dataset has an open folder `.ssh`."""
    source = write(tmp_path / "src", {".ssh/x": b"1", "implicit/y": b"2", "new/z": b"3"})
    (source / ".ssh").chmod(0o777)
    put(repository, "pets", FolderSource(source))
    session = repository.begin("pets")
    session.delete([b"implicit"])
    session.finish()
    view = repository.view("pets")
    home = write(tmp_path / "home", {"mine": b""})
    for name in (".ssh", "implicit"):
        (home / name).mkdir()
        (home / name).chmod(0o700)
        (home / name / "own").touch()  # so that nothing but a get would change the time
        os.utime(home / name, ns=(0, 7))
    assert get_to(repository, view, home).failed == []
    assert (home / ".ssh/x").read_bytes() == b"1"
    assert [(home / name).stat().st_mode & 0o777 for name in (".ssh", "implicit")] == [0o700] * 2
    assert (home / ".ssh").stat().st_mtime_ns != (source / ".ssh").stat().st_mtime_ns
    assert (home / "new").stat().st_mtime_ns == (source / "new").stat().st_mtime_ns
    get_to(repository, view, home, force=True)
    assert (home / ".ssh").stat().st_mode & 0o777 == 0o777
    assert (home / ".ssh").stat().st_mtime_ns == (source / ".ssh").stat().st_mtime_ns


def test_a_tar_that_cannot_be_written_is_an_error(
    repository: LocalRepository, tmp_path: Path
) -> None:
    view = put_files(repository, tmp_path / "src", {"a": b"1" * (2 << 20)})
    with (
        closing(EntryReader(view, repository.objects, MEMORY_BYTES)) as reader,
        open("/dev/full", "wb", buffering=0) as out,
        pytest.raises(OSError, match="No space"),
    ):
        get_tar(view, reader, b"", out)
