"""Putting archives: every format, from every place, once, in order, and all that can be wrong."""

import bz2
import gzip
import hashlib
import io
import lzma
import os
import stat
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diesel_fs import ingest
from diesel_fs.cache.reader import EntryReader
from diesel_fs.client.extract import get
from diesel_fs.errors import (
    CorruptError,
    DieselError,
    NoSuchDataset,
    NotFoundError,
    PermissionDenied,
    UsageError,
)
from diesel_fs.ingest import ArchivesSource, HttpArchive, LocalArchive, PutOptions, PutReport
from diesel_fs.ingest.sources import archive_file
from diesel_fs.ingest.sources import archives as module
from diesel_fs.repository.interface import PurgeOptions, Repository
from diesel_fs.repository.local import LocalRepository
from diesel_fs.repository.provenance import ArchiveRecord
from diesel_fs.storage.accounts.account import Role

from ..server.in_process_server import in_process_server
from ..trees import facts, odd_tree
from .archive_server import ArchiveServer, archive_server
from .test_tar import contents, reasons, tar_of

CHUNK_BYTES = 64 << 10

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

COMPRESS: Mapping[str, Callable[[bytes], bytes]] = {
    "tar": bytes,
    "tar.gz": gzip.compress,
    "tar.bz2": bz2.compress,
    "tar.xz": lzma.compress,
    "tar.zst": zstd.compress,
}


@pytest.fixture
def server() -> Iterator[ArchiveServer]:
    with archive_server() as running:
        yield running


def local(path: Path, data: bytes) -> LocalArchive:
    path.write_bytes(data)
    return LocalArchive(str(path))


def put(
    repository: Repository, *archives: module.Archive, name: str = "pets", target: bytes = b"",
    **options: object,
) -> PutReport:  # fmt: skip
    wanted = PutOptions(**{"chunk_bytes": CHUNK_BYTES, **options})  # type: ignore[arg-type]  # what came is passed on
    return ingest.put(repository, name, ArchivesSource(archives), target, wanted)


def random_bytes(seed: int, size: int) -> bytes:
    return hashlib.shake_128(b"%d" % seed).digest(size)


def zip_of(*entries: tuple[str | zipfile.ZipInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return out.getvalue()


# Formats


@pytest.mark.parametrize("form", COMPRESS)
def test_a_tar_of_any_compression_gives_what_was_there(
    repository: LocalRepository, tmp_path: Path, form: str
) -> None:
    source = odd_tree(tmp_path / "source")
    plain = subprocess.run(
        ["tar", "c", "--format=posix", "-C", str(source), "."], stdout=subprocess.PIPE, check=True
    ).stdout
    report = put(repository, local(tmp_path / "x", COMPRESS[form](plain)))
    assert not report.failed
    view = repository.view("pets")
    get(view, EntryReader(view, repository.objects, 1 << 20), b"", tmp_path / "out")
    assert facts(tmp_path / "out") == facts(source)


def test_a_zip_gives_what_was_there(repository: LocalRepository, tmp_path: Path) -> None:
    script = zipfile.ZipInfo("bin/run", (2020, 2, 3, 4, 5, 6))
    script.external_attr = (stat.S_IFREG | 0o751) << 16
    link = zipfile.ZipInfo("link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    report = put(
        repository,
        local(
            tmp_path / "a.zip",
            zip_of((script, b"#!"), ("empty/", b""), ("caf\u00e9", b"UTF-8"), (link, b"bin/run")),
        ),
    )
    assert not report.failed
    assert contents(repository) == {
        b"bin": "0o755", b"bin/run": b"#!", b"empty": "0o775", "caf\u00e9".encode(): b"UTF-8",
        b"link": "bin/run",
    }  # fmt: skip
    view = repository.view("pets")
    assert view.stat(view.lookup(b"bin/run")).mode == 0o751
    assert view.stat(view.lookup(b"bin/run")).mtime_ns == 1580702706 * 10**9  # 2020-02-03 UTC


def test_a_zip_says_mtimes_in_utc_where_it_can(repository: LocalRepository, tmp_path: Path) -> None:
    info = zipfile.ZipInfo("x", (2001, 1, 1, 0, 0, 0))
    info.extra = b"\x55\x54\x05\x00\x01" + (1_234_567_890).to_bytes(4, "little")
    put(repository, local(tmp_path / "a.zip", zip_of((info, b"y"))))
    view = repository.view("pets")
    assert view.stat(view.lookup(b"x")).mtime_ns == 1_234_567_890 * 10**9


def test_one_compressed_file_becomes_a_file(
    repository: LocalRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_COUNTED_BYTES", 1 << 20)
    small, large = b"small", random_bytes(1, 3 << 20)
    report = put(
        repository,
        local(tmp_path / "words.txt.gz", gzip.compress(small)),
        local(tmp_path / "LARGE.XZ", lzma.compress(large, preset=0)),
    )
    assert not report.failed
    assert contents(repository) == {b"words.txt": small, b"LARGE": large}


def test_several_members_of_gzip_are_one_stream(
    repository: LocalRepository, tmp_path: Path
) -> None:
    plain = tar_of(("a", b"1" * 3000), ("b", b"2" * 3000))
    data = gzip.compress(plain[:2000]) + gzip.compress(plain[2000:])
    assert not put(repository, local(tmp_path / "x", data)).failed
    assert contents(repository) == {b"a": b"1" * 3000, b"b": b"2" * 3000}


# Faults in archives


def test_what_is_no_archive_is_named_and_the_others_are_put(
    repository: LocalRepository, tmp_path: Path
) -> None:
    report = put(
        repository,
        local(tmp_path / "text", b"hello"),
        local(tmp_path / "empty", b""),
        local(tmp_path / "good.tar", tar_of(("a", b"1"))),
        LocalArchive(str(tmp_path / "missing")),
    )
    found = reasons(report)
    assert set(found) == {os.fsencode(tmp_path / each) for each in ("text", "empty", "missing")}
    assert "no archive" in found[os.fsencode(tmp_path / "text")]
    assert contents(repository) == {b"a": b"1"}


def test_nothing_is_made_where_there_is_no_archive(
    repository: LocalRepository, tmp_path: Path
) -> None:
    with pytest.raises(NotFoundError, match="missing"):
        put(repository, LocalArchive(str(tmp_path / "missing")))
    with pytest.raises(UsageError, match="is no file"):
        put(repository, LocalArchive(str(tmp_path)))
    assert repository.datasets() == []


@pytest.mark.parametrize("form", [*COMPRESS, "zip"])
def test_a_damaged_archive_is_named_and_not_recorded(
    repository: LocalRepository, tmp_path: Path, form: str
) -> None:
    files = [
        (f"f{i:02}", random_bytes(i, 20_000)) for i in range(100)
    ]  # bzip2 gives 900 kB at once
    data = zip_of(*files) if form == "zip" else COMPRESS[form](tar_of(*files))
    damaged = data[: len(data) * 2 // 3]
    if form == "zip":  # the table of contents is at the end
        at = len(data) // 2
        damaged = data[:at] + bytes(1000) + data[at + 1000 :]
    archive = local(tmp_path / "a", damaged)
    report = put(repository, archive)
    assert len(report.failed) == 1
    assert "damaged or cut off" in report.failed[0][1]
    assert 0 < len(contents(repository)) < 100
    assert put(repository, archive).archives_skipped == 0


def test_M1_hostile_members_of_a_zip_are_refused(
    repository: LocalRepository, tmp_path: Path
) -> None:
    pipe = zipfile.ZipInfo("pipe")
    pipe.external_attr = (stat.S_IFIFO | 0o644) << 16
    locked = bytearray(zip_of(("locked", b"secret")))
    for at in (6, locked.index(b"PK\x01\x02") + 8):  # both headers say that it is encrypted
        locked[at] |= 1
    report = put(
        repository,
        local(
            tmp_path / "a.zip",
            zip_of(
                ("../up", b"1"), ("/abs", b"2"), ("a/../../b", b"3"), (pipe, b""), ("good", b"4")
            ),
        ),
        local(tmp_path / "b.zip", bytes(locked)),
    )
    assert set(reasons(report)) == {b"../up", b"/abs", b"a/../../b", b"pipe", b"locked"}
    assert "encrypted" in reasons(report)[b"locked"]
    assert contents(repository) == {b"good": b"4"}


def test_a_zip_whose_members_overlap_is_refused(
    repository: LocalRepository, tmp_path: Path
) -> None:
    """As in a bomb where thousands of members share their bytes."""
    data = bytearray(zip_of(("a", b"1" * 100), ("b", b"1" * 100)))
    second = data.rindex(b"PK\x01\x02")
    data[second + 42 : second + 46] = (0).to_bytes(4, "little")  # where its content lies
    report = put(repository, local(tmp_path / "a.zip", bytes(data)))
    assert report.failed
    assert b"b" not in contents(repository)


def test_the_sha256_that_the_address_says_is_checked(
    repository: LocalRepository, server: ArchiveServer
) -> None:
    data = tar_of(("a", b"1"))
    server.files["/x.tar"] = data
    right = hashlib.sha256(data).hexdigest()
    report = put(repository, HttpArchive(server.url("/x.tar#sha256=") + "0" * 64))
    assert f"its SHA-256 is {right}" in report.failed[0][1]
    assert contents(repository) == {}
    assert not repository.archive_records(repository.dataset("pets").identity)
    assert not put(repository, HttpArchive(server.url("/x.tar#sha256=") + right)).failed
    with pytest.raises(UsageError, match="fragment"):
        HttpArchive(server.url("/x.tar#sha1=0"))


# Each archive is put once


def test_an_archive_is_put_once(repository: LocalRepository, server: ArchiveServer) -> None:
    server.files["/x.tar"] = tar_of(("d/a", b"1"), ("b", b"2"))
    archive = HttpArchive(server.url("/x.tar"))
    first = put(repository, archive)
    served = server.served["/x.tar"]
    second = put(repository, archive)
    assert (first.archives, first.archives_skipped) == (1, 0)
    assert (second.archives, second.archives_skipped) == (1, 1)
    assert second.unchanged == 2
    assert second.version == first.version
    assert server.served["/x.tar"] == served + 1  # the first byte, to see its tag
    assert put(repository, archive, target=b"elsewhere").archives_skipped == 0


@pytest.mark.parametrize("change", ["rm", "replace", "tag", "checksum", "delete", "include"])
def test_an_archive_is_read_again_where_that_matters(
    repository: LocalRepository, server: ArchiveServer, change: str
) -> None:
    server.files["/x.tar"] = tar_of(("d/a", b"1"), ("b", b"2"))
    archive, options = HttpArchive(server.url("/x.tar")), PutOptions(CHUNK_BYTES)
    put(repository, archive)
    expected = contents(repository)
    session = repository.begin("pets")
    match change:
        case "rm":
            session.delete([b"d/a"])
            session.finish()
        case "replace":
            ingest.put(repository, "pets", ingest.TarSource(io.BytesIO(tar_of(("b", b"other")))))
        case "tag":
            server.etags["/x.tar"] = '"new"'
        case "include":
            options = PutOptions(CHUNK_BYTES, include=("b",))
        case _:
            options = PutOptions(
                CHUNK_BYTES, checksum=change == "checksum", delete=change == "delete"
            )
    report = ingest.put(repository, "pets", ArchivesSource([archive]), b"", options)
    assert report.archives_skipped == 0
    assert contents(repository) == expected
    if change == "tag":  # its bytes are the same, and each member is
        assert report.chunks == 0


def test_an_archive_survives_a_purge(repository: LocalRepository, tmp_path: Path) -> None:
    """A purge moves entries to other chunks: the archive is read once more, and nothing is put."""
    files = [(f"f{i:02}", random_bytes(i, 9_000)) for i in range(20)]
    archive = local(tmp_path / "a.tar", tar_of(*files))
    put(repository, archive, local(tmp_path / "b.tar", tar_of(("f00", b"new"))))
    expected = contents(repository)
    repository.purge("pets", PurgeOptions(max_unused_ppm=0, grace_s=0))
    reports = [
        put(repository, archive, local(tmp_path / "b.tar", tar_of(("f00", b"new")))) for _ in "12"
    ]
    assert contents(repository) == expected
    assert reports[1].archives_skipped == 2


def test_names_that_are_no_text_are_archives_too(
    repository: LocalRepository, tmp_path: Path
) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.tar")
    Path(path).write_bytes(tar_of(("a", b"1")))
    assert not put(repository, LocalArchive(path)).failed
    assert put(repository, LocalArchive(path)).archives_skipped == 1
    Path(path).write_bytes(b"no archive")
    (failed,) = put(repository, LocalArchive(path)).failed
    assert failed[0].endswith(b"\xff.tar")


def test_hard_links_come_again_where_they_were_deleted(
    repository: LocalRepository, tmp_path: Path
) -> None:
    link = tarfile.TarInfo()
    link.type, link.linkname, link.mode = tarfile.LNKTYPE, "a", 0o644
    archive = local(tmp_path / "a.tar", tar_of(("a", b"1"), ("b", link)))
    for _ in "12":
        put(repository, archive)
        assert contents(repository) == {b"a": b"1", b"b": b"1"}
        session = repository.begin("pets")
        session.delete([b"b"])
        session.finish()
    put(repository, archive)
    assert contents(repository) == {b"a": b"1", b"b": b"1"}


def test_a_put_that_was_killed_goes_on_at_the_archive(
    repository: LocalRepository, tmp_path: Path, server: ArchiveServer
) -> None:
    for i in range(4):
        server.files[f"/{i}.tar"] = tar_of((f"f{i}", random_bytes(i, 80_000)))
    urls = [server.url(f"/{i}.tar") for i in range(4)]
    program = f"""
import os, signal
from diesel_fs import ingest
from diesel_fs.repository.local import LocalRepository
repository = LocalRepository.open({repository.url.objects_url!r}, create=False)
done = []
before = repository.record_archive
def record(identity, found):
    before(identity, found)
    done.append(found)
    if len(done) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
repository.record_archive = record
archives = [ingest.HttpArchive(each) for each in {urls!r}]
options = ingest.PutOptions({CHUNK_BYTES}, jobs=1)
ingest.put(repository, "pets", ingest.ArchivesSource(archives), b"", options)
"""
    killed = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    assert killed.returncode == -9
    served = dict(server.served)
    report = put(repository, *map(HttpArchive, urls))
    assert report.archives_skipped == 2
    assert [server.served[f"/{i}.tar"] - served.get(f"/{i}.tar", 0) for i in range(2)] == [1, 1]
    assert contents(repository) == {b"f%d" % i: random_bytes(i, 80_000) for i in range(4)}
    assert repository.verify("pets").sound


def test_the_same_content_elsewhere_is_not_put_again(
    repository: LocalRepository, tmp_path: Path
) -> None:
    data = tar_of(("a", random_bytes(1, 100_000)))
    put(repository, local(tmp_path / "one.tar", data))
    report = put(repository, local(tmp_path / "other.tar", data))
    assert report.archives_skipped == 1


def test_entries_are_copied_from_another_dataset(
    repository: LocalRepository, server: ArchiveServer
) -> None:
    files = [(f"d/f{i:02}", random_bytes(i, 30_000)) for i in range(10)]
    link = tarfile.TarInfo()
    link.type, link.linkname = tarfile.SYMTYPE, "d/f01"
    data = gzip.compress(tar_of(*files, ("link", link)))
    server.files["/x.tgz"] = data
    address = server.url("/x.tgz#sha256=") + hashlib.sha256(data).hexdigest()
    put(repository, HttpArchive(address), name="original", target=b"deep")
    served = server.served["/x.tgz"]
    report = put(repository, HttpArchive(address))
    assert not report.failed
    assert server.served["/x.tgz"] == served + 1  # its tag; the content came from the dataset
    expected: dict[bytes, bytes | str] = {name.encode(): content for name, content in files}
    assert contents(repository) == expected | {b"link": "d/f01", b"d": "0o755"}
    repository.delete_dataset("original")
    assert repository.verify("pets").sound


def test_nothing_is_copied_from_an_archive_that_was_changed_there(
    repository: LocalRepository, tmp_path: Path
) -> None:
    archive = local(tmp_path / "a.tar", tar_of(("a", b"1" * 70_000), ("b", b"2")))
    put(repository, archive, name="original")
    ingest.put(repository, "original", ingest.TarSource(io.BytesIO(tar_of(("a", b"forged" * 9)))))
    put(repository, archive)
    assert contents(repository) == {b"a": b"1" * 70_000, b"b": b"2"}


# The last of several counts


PATHS = ("a", "b", "d/a", "d/b", "d/e/a")
MADE = st.lists(
    st.lists(st.tuples(st.sampled_from(PATHS), st.integers(0, 3)), max_size=6),
    min_size=1, max_size=5,
)  # fmt: skip


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(made=MADE, jobs=st.sampled_from([1, 3]), again=st.booleans(), more=MADE)
def test_of_files_with_one_path_that_in_the_last_archive_counts(
    tmp_path_factory: pytest.TempPathFactory,
    made: Sequence[Sequence[tuple[str, int]]],
    jobs: int,
    again: bool,
    more: Sequence[Sequence[tuple[str, int]]],
) -> None:
    """The same as extracting one after the other, whatever is packed first."""
    folder = tmp_path_factory.mktemp("archives")
    expected: dict[bytes, bytes] = {}

    def archives(lists: Sequence[Sequence[tuple[str, int]]], kind: str) -> list[LocalArchive]:
        found = []
        length = len(kind)  # a later put takes a file of the same size and mtime for the same
        for number, entries in enumerate(lists):
            files = [
                (path, b"%d" % value * (length + 40_000 * (value == 3))) for path, value in entries
            ]
            expected.update((path.encode(), content) for path, content in files)
            found.append(local(folder / f"{kind}{number}.tar", tar_of(*files)))
        return found

    with LocalRepository.open((folder / "store").as_uri(), create=True) as repository:
        first = archives(made, "first")
        assert not put(repository, *first, jobs=jobs).failed
        if again:
            assert put(repository, *first, jobs=jobs).archives_skipped == len(first)
            later = archives(more, "more")
            assert not put(repository, *later, jobs=jobs).failed
        files = {path: data for path, data in contents(repository).items() if type(data) is bytes}
        assert files == expected


# Over HTTP


def test_parts_are_fetched_once_and_side_by_side(
    repository: LocalRepository, server: ArchiveServer
) -> None:
    data = tar_of(*((f"f{i}", random_bytes(i, 1 << 20)) for i in range(20)))
    server.files["/x.tar"] = data
    server.failures = [0, 503, -1]  # after the look: an overload, and a body that breaks off
    assert not put(repository, HttpArchive(server.url("/x.tar")), chunk_bytes=4 << 20).failed
    assert server.requests["/x.tar"] == 1 + -(-len(data) // archive_file.PIECE_BYTES) + 2
    assert server.served["/x.tar"] == len(data) + 1
    assert len(contents(repository)) == 20


@pytest.mark.parametrize("says_length", [True, False])
def test_a_server_without_parts_sends_the_whole(
    repository: LocalRepository, says_length: bool
) -> None:
    with archive_server(sends_parts=False, says_length=says_length) as server:
        server.files |= {"/x.tgz": gzip.compress(tar_of(("a", b"1"))), "/y.zip": zip_of(("b", b""))}
        report = put(
            repository, HttpArchive(server.url("/x.tgz")), HttpArchive(server.url("/y.zip"))
        )
    assert list(reasons(report)) == [server.url("/y.zip").encode()]
    assert "download it" in report.failed[0][1]
    assert contents(repository) == {b"a": b"1"}


def test_a_zip_is_read_in_parts(repository: LocalRepository, server: ArchiveServer) -> None:
    data = zip_of(*((f"f{i}", random_bytes(i, 1 << 20)) for i in range(20)))
    server.files["/x.zip"] = data
    assert not put(repository, HttpArchive(server.url("/x.zip")), chunk_bytes=4 << 20).failed
    assert len(contents(repository)) == 20
    assert server.served["/x.zip"] == len(data) + 1
    (record,) = repository.archive_records(repository.dataset("pets").identity)
    assert record.sha256 == hashlib.sha256(data).digest()


def test_redirections_are_followed(repository: LocalRepository, server: ArchiveServer) -> None:
    server.files["/b"] = tar_of(("a", b"1"))
    server.redirects |= {"/a": "/b", "/loop": "/loop"}
    assert not put(repository, HttpArchive(server.url("/a"))).failed
    assert contents(repository) == {b"a": b"1"}
    with pytest.raises(DieselError, match="redirections"):
        HttpArchive(server.url("/loop")).look()


@pytest.mark.parametrize(
    ("status", "kind"), [(404, NotFoundError), (403, PermissionDenied), (401, PermissionDenied)]
)
def test_errors_of_a_server_are_told(
    server: ArchiveServer, status: int, kind: type[DieselError]
) -> None:
    server.failures = [status]
    with pytest.raises(kind, match=f"answers {status}"):
        HttpArchive(server.url("/x.tar?token=secret")).look()


def test_O9_an_archive_that_changes_meanwhile_is_not_mixed(
    server: ArchiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_file, "PIECE_BYTES", 4096)
    server.files["/x.tar"] = random_bytes(0, 1 << 20)
    archive = HttpArchive(server.url("/x.tar"))
    state = archive.look()
    with archive.open(state) as file:
        file.readinto(bytearray(100))
        server.files["/x.tar"] = random_bytes(1, 1 << 20)
        with pytest.raises(OSError, match="changed while it was being read"):
            file.sha256()


@pytest.mark.parametrize(
    ("etag", "tagged_by_time"), [('W/"weak"', True), ("", True), ('"x"', False)]
)
def test_a_weak_tag_says_nothing_of_the_bytes(
    server: ArchiveServer, etag: str, tagged_by_time: bool
) -> None:
    server.files["/x.tar"], server.etags["/x.tar"] = b"data", etag
    tag = HttpArchive(server.url("/x.tar")).look().tag
    assert tag == (f"modified {server.modified}" if tagged_by_time else etag)
    server.modified = ""
    assert HttpArchive(server.url("/x.tar")).look().tag == ("" if tagged_by_time else etag)


def test_S8_a_secret_in_an_address_is_shown_and_kept_nowhere(
    repository: LocalRepository, server: ArchiveServer
) -> None:
    server.files["/x.tar"] = tar_of(("a", b"1"))[:700]
    report = put(repository, HttpArchive(server.url("/x.tar?token=canary")))
    assert "canary" not in str(report.failed)
    server.files["/x.tar"] = tar_of(("a", b"1"))
    assert not put(repository, HttpArchive(server.url("/x.tar?token=canary"))).failed
    assert put(repository, HttpArchive(server.url("/x.tar?token=canary"))).archives_skipped == 1
    store = repository.url.path
    assert not [
        path for path in store.rglob("*") if path.is_file() and b"canary" in path.read_bytes()
    ]
    with pytest.raises(UsageError, match="no password"):
        HttpArchive("https://me:canary@host/x.tar")


# Through a server


def test_an_archive_is_put_once_through_a_server(tmp_path: Path, server: ArchiveServer) -> None:
    data = tar_of(("a", random_bytes(1, 200_000)), ("d/b", b"2"))
    server.files["/x.tar"] = data
    address = server.url("/x.tar#sha256=") + hashlib.sha256(data).hexdigest()
    with in_process_server(tmp_path / "store") as behind:
        admin = behind.admin
        assert put(admin, HttpArchive(address), name="one").archives == 1
        assert put(admin, HttpArchive(address), name="one").archives_skipped == 1
        served = server.served["/x.tar"]
        assert not put(admin, HttpArchive(address), name="two").failed
        assert server.served["/x.tar"] == served + 1  # the entries were copied
        assert set(contents(behind.store, "two")) == {b"a", b"d", b"d/b"}


def test_S10_nothing_is_copied_from_a_dataset_that_the_user_may_not_read(
    tmp_path: Path, server: ArchiveServer
) -> None:
    data = tar_of(("a", random_bytes(1, 200_000)))
    server.files["/x.tar"] = data
    address = server.url("/x.tar#sha256=") + hashlib.sha256(data).hexdigest()
    with in_process_server(tmp_path / "store") as behind:
        put(behind.admin, HttpArchive(address), name="secret")
        identity = behind.store.dataset("secret").identity
        user = behind.with_role(Role.ADMIN, "mine")
        served = server.served["/x.tar"]
        put(user, HttpArchive(address), name="mine")
        assert server.served["/x.tar"] == served + len(data) + 1
        with pytest.raises(NoSuchDataset):
            user.archive_records(identity)
        reader = behind.with_role(Role.READ, "secret")
        (record,) = reader.archive_records(identity)
        with pytest.raises(PermissionDenied):
            reader.record_archive(identity, record)


# Records


def test_any_bytes_are_a_record_or_one_error() -> None:
    good = ArchiveRecord("a", bytes(16), b"d", "t", 1, b"", 0.5, 2, False, (), (), (b"x", b"y"))
    packed = good.pack()
    assert ArchiveRecord.unpack(packed) == good
    for at in range(len(packed)):
        for wrong in (packed[:at], packed[:at] + bytes([packed[at] ^ 0x55]) + packed[at + 1 :]):
            try:
                ArchiveRecord.unpack(wrong)
            except (CorruptError, UsageError):
                continue


def test_a_damaged_record_is_left_out(repository: LocalRepository, tmp_path: Path) -> None:
    archive = local(tmp_path / "a.tar", tar_of(("a", b"1")))
    put(repository, archive)
    (record,) = (repository.url.path / "datasets").rglob("archives/*")
    record.write_bytes(b"rubbish")
    assert put(repository, archive).archives_skipped == 0
    assert put(repository, archive).archives_skipped == 1
