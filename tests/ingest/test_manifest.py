"""Putting with a manifest: from every place, checked, stored once, and otherwise left alone."""

import gzip
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from diesel_fs import ingest
from diesel_fs.errors import CorruptError, NotFoundError, UsageError
from diesel_fs.format.manifest import FAULTS_NAMED
from diesel_fs.ingest import ArchivesSource, FolderSource, HttpArchive, LocalArchive, PutOptions
from diesel_fs.ingest.options import PutReport
from diesel_fs.repository.interface import Repository
from diesel_fs.repository.local import LocalRepository

from ..cli.conftest import Dlcmd
from ..cli.conftest import dlcmd as dlcmd
from ..server.in_process_server import in_process_server
from ..trees import write
from .archive_server import ArchiveServer, archive_server
from .test_tar import contents, reasons, tar_of

MANIFEST = b"path,target\ncats/1,cat\ndogs/1,dog\n"
FILES = (("cats/1", b"meow"), ("dogs/1", b"woof"))


@pytest.fixture
def server() -> Iterator[ArchiveServer]:
    with archive_server() as running:
        running.files["/x.tar"] = tar_of(*FILES)
        running.files["/labels.csv"] = MANIFEST
        yield running


def put(
    repository: Repository, server: ArchiveServer, labels: str = "/labels.csv", target: bytes = b""
) -> PutReport:
    source = ArchivesSource([HttpArchive(server.url("/x.tar"))])
    fetched = ingest.fetch_manifest(HttpArchive(server.url(labels)))
    return ingest.put(repository, "pets", source, target, PutOptions(), manifest=fetched)


def written(folder: Path, manifest: bytes = MANIFEST) -> tuple[Path, Path]:
    source = write(folder / "src", dict(FILES))
    (folder / "labels.csv").write_bytes(manifest)
    return source, folder / "labels.csv"


def put_folder(repository: Repository, folder: Path, **options: bool) -> PutReport:
    fetched = ingest.fetch_manifest(LocalArchive(str(folder / "labels.csv")))
    wanted = PutOptions(**options)  # type: ignore[arg-type]  # what came is passed on
    return ingest.put(
        repository, "pets", FolderSource(folder / "src"), b"", wanted, manifest=fetched
    )


def test_a_manifest_is_stored_once(repository: LocalRepository, server: ArchiveServer) -> None:
    report = put(repository, server)
    assert (report.failed, report.samples, report.files) == ([], 2, 3)
    assert contents(repository)[b".manifest.csv"] == MANIFEST
    served = server.served["/x.tar"]
    again = put(repository, server)
    assert (again.archives_skipped, again.chunks, again.version) == (1, 0, report.version)
    assert again.samples == 2
    server.files["/labels.csv"] = MANIFEST + b"\n"
    changed = put(repository, server)
    assert (changed.archives_skipped, changed.files, changed.chunks) == (1, 1, 1)
    assert changed.version > report.version
    assert server.served["/x.tar"] == served + 2, "only its state was asked for"
    assert contents(repository) == {
        b".manifest.csv": MANIFEST + b"\n", b"cats": "0o755", b"cats/1": b"meow", b"dogs": "0o755",
        b"dogs/1": b"woof",
    }  # fmt: skip


def test_a_manifest_goes_through_a_server(tmp_path: Path, server: ArchiveServer) -> None:
    with in_process_server(tmp_path / "store") as behind:
        report = put(behind.admin, server, target=b"train")
        assert not report.failed
        assert contents(behind.store)[b"train/.manifest.csv"] == MANIFEST
        assert put(behind.admin, server, target=b"train").version == report.version


def test_a_manifest_may_be_gzipped_and_have_tabs(
    repository: LocalRepository, server: ArchiveServer
) -> None:
    data = gzip.compress(b'path\ttarget\tby\ncats/1\t"a" cat, black\tme\n')
    server.files["/labels.tsv.gz"] = data
    sha256 = hashlib.sha256(data).hexdigest()
    put(repository, server, f"/labels.tsv.gz?token=1#sha256={sha256}")
    stored = b'path,target,by\ncats/1,"""a"" cat, black",me\n'
    assert contents(repository)[b".manifest.csv"] == stored


def test_an_unreadable_manifest_is_an_error_before_the_put(
    repository: LocalRepository, server: ArchiveServer, tmp_path: Path
) -> None:
    server.files["/cut.csv.gz"] = gzip.compress(MANIFEST)[:-9]
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(MANIFEST)[:-9])
    with pytest.raises(CorruptError, match="damaged or cut off"):
        ingest.fetch_manifest(LocalArchive(str(tmp_path / "cut.csv.gz")))
    with pytest.raises(CorruptError, match=r"the SHA-256 of the manifest .*/labels.csv is"):
        put(repository, server, "/labels.csv#sha256=" + "0" * 64)
    with pytest.raises(NotFoundError, match=r"absent\.csv"):
        put(repository, server, "/absent.csv")
    with pytest.raises(UsageError, match=r"/x\.tar, line 1: the header"):
        put(repository, server, "/x.tar")
    assert [*repository.datasets()] == []


WRONG = (
    b"path,target\ncats/1,cat\nabsent,x\ncats,x\nlink,x\ncats/1,dog\n" + b"d/%d,x\n" * 20
    % tuple(range(20))
)  # fmt: skip


def test_lines_that_name_no_sample_are_reported_and_the_existing_manifest_stays(
    repository: LocalRepository, tmp_path: Path
) -> None:
    source, labels = written(tmp_path)
    put_folder(repository, tmp_path)
    labels.write_bytes(WRONG)
    (source / "link").symlink_to("cats/1")
    report = put_folder(repository, tmp_path)
    assert report.samples == 0
    named = reasons(report)
    assert len(named) == FAULTS_NAMED + 1
    name = str(labels)
    assert named[b"absent"] == f"{name}, line 3: the dataset has no such file"
    assert named[b"cats"] == f"{name}, line 4: it is a folder, not a file"
    assert named[b"link"] == f"{name}, line 5: it is a link, not a file"
    assert named[b"cats/1"] == f"{name}, line 6: line 2 names it, too"
    assert named[b".manifest.csv"] == ("the manifest is not stored: 24 of 25 lines are at fault")
    assert contents(repository)[b".manifest.csv"] == MANIFEST
    assert contents(repository)[b"link"] == "cats/1"


def test_targets_that_are_files_are_checked(repository: LocalRepository, tmp_path: Path) -> None:
    _, labels = written(tmp_path, b"path,target_path\ncats/1,dogs/1\ndogs/1,absent\n")
    named = reasons(put_folder(repository, tmp_path))
    where = f"{labels}, line 3"
    assert named[b"dogs/1"] == f"{where}: its target absent: the dataset has no such file"
    labels.write_bytes(b"path,target_path\ncats/1,dogs/1\n")
    assert put_folder(repository, tmp_path).samples == 1


def test_delete_spares_the_manifest_of_the_put(repository: LocalRepository, tmp_path: Path) -> None:
    source, labels = written(tmp_path)
    first = put_folder(repository, tmp_path)
    assert put_folder(repository, tmp_path, delete=True).version == first.version
    os.unlink(source / "cats/1")
    os.rmdir(source / "cats")
    labels.write_bytes(b"path,target\ndogs/1,dog\n")
    report = put_folder(repository, tmp_path, delete=True)
    assert (report.deleted, report.failed) == (2, [])
    assert contents(repository)[b".manifest.csv"] == b"path,target\ndogs/1,dog\n"
    ingest.put(repository, "pets", FolderSource(source), b"", PutOptions(delete=True))
    assert b".manifest.csv" not in contents(repository)


def test_a_manifest_that_is_lost_is_put_again(repository: LocalRepository, tmp_path: Path) -> None:
    written(tmp_path)
    put_folder(repository, tmp_path)
    view = repository.view("pets")
    chunk = view.chunk_ids[int(view.chunk_of([view.lookup(b".manifest.csv")])[0])]
    [lost] = [
        path for path in repository.url.path.rglob("*")
        if path.is_file() and bytes(chunk) in path.read_bytes()[:64]
    ]  # fmt: skip
    lost.unlink()
    assert put_folder(repository, tmp_path).files == 1
    assert contents(repository)[b".manifest.csv"] == MANIFEST


def test_the_command_exits_with_3_without_a_manifest(dlcmd: Dlcmd, tmp_path: Path) -> None:
    source, labels = written(tmp_path)
    result = dlcmd("put", source, "pets/train", "--manifest", labels)
    assert b"the manifest names 2 samples" in result.out
    assert dlcmd("cat", "pets/train/.manifest.csv").out == MANIFEST
    again = dlcmd("put", source, "pets/train", "--manifest", labels, "--json")
    done = json.loads(again.out.splitlines()[-1])  # a slow put reports its progress before
    assert (done["samples"], done["chunks"]) == (2, 0)
    labels.write_bytes(MANIFEST + b"cats/2,cat\n")
    result = dlcmd("put", source, "pets/train", "--manifest", labels, code=3)
    assert f"cats/2: {labels}, line 4: the dataset has no such file\n" in result.err
    labels.write_bytes(MANIFEST + b"cats/2\n")
    result = dlcmd("put", source, "new", "--manifest", labels, code=2)
    assert f"{labels}, line 4: it has 1 fields, and the header 2" in result.err
    dlcmd("ls", "new", code=10)
    assert dlcmd("cat", "pets/train/.manifest.csv").out == MANIFEST
    dlcmd("get", "pets/train", tmp_path / "out")
    assert (tmp_path / "out" / ".manifest.csv").read_bytes() == MANIFEST


def test_arguments_that_the_command_refuses(dlcmd: Dlcmd, tmp_path: Path) -> None:
    source, labels = written(tmp_path)
    absent = tmp_path / "absent.csv"
    dlcmd("put", source, "pets", "--manifest", absent, code=10)
    result = dlcmd("put", source / "cats/1", "pets/x", "--manifest", labels, code=2)
    assert "--manifest needs more than one file as SRC" in result.err
    result = dlcmd("put", source, "pets", "--manifest", source, code=2)
    assert "is a directory" in result.err
    result = dlcmd("put", source, "pets", "--manifest", "ftp://host/labels.csv", code=2)
    assert "ftp://" in result.err
    assert dlcmd("put", source, "pets", "-n", "--manifest", labels).out.startswith(b"would put")
    assert dlcmd("ls").out == b""
