"""Putting archives: every format, from every place, once, in order, and every fault."""

import bz2
import gzip
import hashlib
import io
import lzma
import os
import signal
import stat
import struct
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from diesel_fs import ingest
from diesel_fs.cache.readers.entry_reader import EntryReader
from diesel_fs.client.extract import get
from diesel_fs.errors import (
    CorruptError,
    DieselError,
    NoSuchDataset,
    NotFoundError,
    ObjectStoreRefused,
    PermissionDenied,
    UsageError,
)
from diesel_fs.ingest import ArchivesSource, HttpArchive, LocalArchive, PutOptions, PutReport
from diesel_fs.ingest.sources import archive_file, archive_places
from diesel_fs.ingest.sources import archives as module
from diesel_fs.repository.interface import PurgeOptions, Repository
from diesel_fs.repository.local import LocalRepository
from diesel_fs.repository.provenance import ArchiveRecord
from diesel_fs.storage.accounts.account import Role
from diesel_fs.storage.objects.retry import LongPauses, RetryPolicy
from tests.examples import examples
from tests.rows import each_row

from ..cli.conftest import Dlcmd
from ..cli.conftest import dlcmd as dlcmd
from ..datasets import file_contents
from ..server.in_process_server import in_process_server
from ..trees import facts, odd_tree
from ..waiting import wait_until
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


def served_with_sha256(server: ArchiveServer, path: str, data: bytes) -> str:
    server.files[path] = data
    return server.url(f"{path}#sha256=") + hashlib.sha256(data).hexdigest()


def random_bytes(seed: int, size: int) -> bytes:
    return hashlib.shake_128(b"%d" % seed).digest(size)


def zip_of(*entries: tuple[str | zipfile.ZipInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return out.getvalue()


@pytest.mark.parametrize("form", COMPRESS)
def test_tars_of_any_compression(repository: LocalRepository, tmp_path: Path, form: str) -> None:
    source = odd_tree(tmp_path / "source")
    plain = subprocess.run(
        ["tar", "c", "--format=posix", "-C", str(source), "."], stdout=subprocess.PIPE, check=True
    ).stdout
    report = put(repository, local(tmp_path / "x", COMPRESS[form](plain)))
    assert not report.failed
    view = repository.view("pets")
    get(view, EntryReader(view, repository.objects, 1 << 20), b"", tmp_path / "out")
    assert facts(tmp_path / "out") == facts(source)


def test_a_zip_gives_the_original_files(repository: LocalRepository, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("target", [b"", b"in/here"])
def test_a_path_that_is_file_and_folder_is_left_out_each_time(
    repository: LocalRepository, tmp_path: Path, target: bytes
) -> None:
    """Although the archive is known."""
    archive = local(tmp_path / "a.tar.gz", gzip.compress(tar_of(("p", b"1"), ("p/q", b"2"))))
    for _ in range(3):
        report = put(repository, archive, target=target)
        assert len(report.failed) == 1
        assert report.archives_skipped == 0
    assert b"2" in contents(repository).values()
    assert b"1" not in contents(repository).values()


def test_one_compressed_file_behind_an_address_has_its_decoded_name(
    repository: LocalRepository, server: ArchiveServer
) -> None:
    for name, path in (("my%20words.txt.gz", b"my words.txt"), ("a%2Fb%25.gz", b"b%")):
        server.files[f"/{name}"] = gzip.compress(path)
        assert not put(repository, HttpArchive(server.url(f"/{name}?version=2"))).failed
        assert contents(repository)[path] == path


@pytest.mark.parametrize("zeros", [513, 1024, 32 << 10, 1 << 20])
def test_a_compressed_file_that_begins_with_zeros_is_not_an_empty_tar(
    repository: LocalRepository, tmp_path: Path, zeros: int
) -> None:
    """Disk images begin in this way."""
    image = bytes(zeros) + b"CD001"
    report = put(
        repository,
        local(tmp_path / "image.iso.gz", gzip.compress(image)),
        local(tmp_path / "zeros.gz", gzip.compress(bytes(1 << 20))),
        local(tmp_path / "empty.tar.gz", gzip.compress(tar_of())),
    )
    assert not report.failed
    assert contents(repository) == {b"image.iso": image, b"zeros": bytes(1 << 20)}


SKIPPED = b"\x5a\x2a\x4d\x18\x04\0\0\0skip"
TWO_FILES = tar_of(("a", b"1" * 3000), ("b", b"2" * 3000))


@pytest.mark.parametrize(
    "data",
    [
        SKIPPED + zstd.compress(TWO_FILES) + SKIPPED,  # pzstd begins with such a frame
        gzip.compress(TWO_FILES[:2000]) + gzip.compress(TWO_FILES[2000:]),
    ],
    ids=["frames to be skipped", "two members"],
)
def test_frames_form_one_stream(repository: LocalRepository, tmp_path: Path, data: bytes) -> None:
    reports = [
        put(repository, local(tmp_path / "x", data)),
        ingest.put(repository, "tar", ingest.TarSource(io.BytesIO(data))),
    ]
    assert [report.failed for report in reports] == [[], []]
    for name in ("pets", "tar"):
        assert contents(repository, name) == {b"a": b"1" * 3000, b"b": b"2" * 3000}


def dated(*date: int, extra: bytes = b"") -> zipfile.ZipInfo:
    info = zipfile.ZipInfo("x")
    info.date_time, info.extra = date, extra  # type: ignore[assignment]  # also what is no date
    return info


@pytest.mark.parametrize(
    ("info", "mtime_s"),
    [
        (dated(1980, 0, 0, 0, 0, 0), 315_532_800),  # as Go's archive/zip writes no date
        (dated(2020, 15, 31, 31, 63, 62), 315_532_800),
        (
            dated(*(2001, 1, 1, 0, 0, 0), extra=b"\x55\x54\x05\0\1" + struct.pack("<I", 10**9)),
            10**9,  # in UTC
        ),
    ],
)
def test_a_zip_gives_mtimes_if_it_has_them(
    repository: LocalRepository, tmp_path: Path, info: zipfile.ZipInfo, mtime_s: int
) -> None:
    assert not put(repository, local(tmp_path / "a.zip", zip_of((info, b"y")))).failed
    view = repository.view("pets")
    assert view.stat(view.lookup(b"x")).mtime_ns == mtime_s * 10**9


def test_a_file_of_another_format_is_named(repository: LocalRepository, tmp_path: Path) -> None:
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


def test_a_missing_archive_creates_no_dataset(repository: LocalRepository, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="missing"):
        put(repository, LocalArchive(str(tmp_path / "missing")))
    with pytest.raises(UsageError, match="is no file"):
        put(repository, LocalArchive(str(tmp_path)))
    assert repository.datasets() == []


@pytest.mark.parametrize("form", [*COMPRESS, "zip"])
def test_a_damaged_archive_is_named(repository: LocalRepository, tmp_path: Path, form: str) -> None:
    # more than bzip2 gives at once (900 kB)
    files = [(f"f{i:02}", random_bytes(i, 20_000)) for i in range(100)]
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


def test_M1_hostile_zip_members_are_refused(repository: LocalRepository, tmp_path: Path) -> None:
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
                ("../up", b"1"),
                ("/abs", b"2"),
                ("a/../../b", b"3"),
                (pipe, b""),
                (zipfile.ZipInfo(""), b"5"),
                ("good", b"4"),
            ),
        ),
        local(tmp_path / "b.zip", bytes(locked)),
    )
    names = {b"../up", b"/abs", b"a/../../b", b"pipe", b"locked", b""}
    assert set(reasons(report)) == names
    assert "encrypted" in reasons(report)[b"locked"]
    assert contents(repository) == {b"good": b"4"}


def test_overlapping_zip_members_are_refused(repository: LocalRepository, tmp_path: Path) -> None:
    """As in a bomb whose thousands of members share their bytes."""
    data = bytearray(zip_of(("a", b"1" * 100), ("b", b"1" * 100)))
    second = data.rindex(b"PK\x01\x02")
    data[second + 42 : second + 46] = (0).to_bytes(4, "little")  # the place of its content
    report = put(repository, local(tmp_path / "a.zip", bytes(data)))
    assert report.failed
    assert b"b" not in contents(repository)


def test_the_sha256_in_a_url_is_checked(repository: LocalRepository, server: ArchiveServer) -> None:
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


def test_an_archive_is_put_once(
    repository: LocalRepository, server: ArchiveServer, tmp_path: Path
) -> None:
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
    same = local(tmp_path / "same.tar", server.files["/x.tar"])
    assert put(repository, same).archives_skipped == 1


@pytest.mark.parametrize("change", ["rm", "replace", "tag", "checksum", "delete", "include"])
def test_an_archive_is_read_again_if_its_entries_may_have_changed(
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


def test_archives_may_have_names_of_any_bytes(repository: LocalRepository, tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.tar")
    Path(path).write_bytes(tar_of(("a", b"1")))
    assert not put(repository, LocalArchive(path)).failed
    assert put(repository, LocalArchive(path)).archives_skipped == 1
    Path(path).write_bytes(b"no archive")
    (failed,) = put(repository, LocalArchive(path)).failed
    assert failed[0].endswith(b"\xff.tar")


def test_deleted_hard_links_come_back(repository: LocalRepository, tmp_path: Path) -> None:
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


def test_a_killed_put_continues_at_its_archive(
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


def test_entries_of_another_dataset_are_copied(
    repository: LocalRepository, server: ArchiveServer
) -> None:
    files = [(f"d/f{i:02}", random_bytes(i, 30_000)) for i in range(10)]
    link = tarfile.TarInfo()
    link.type, link.linkname = tarfile.SYMTYPE, "d/f01"
    data = gzip.compress(tar_of(*files, ("link", link)))
    address = served_with_sha256(server, "/x.tgz", data)
    put(repository, HttpArchive(address), name="original", target=b"deep")
    served = server.served["/x.tgz"]
    report = put(repository, HttpArchive(address))
    assert not report.failed
    assert server.served["/x.tgz"] == served + 1  # its tag; the content came from the dataset
    expected: dict[bytes, bytes | str] = {name.encode(): content for name, content in files}
    assert contents(repository) == expected | {b"link": "d/f01", b"d": "0o755"}
    repository.delete_dataset("original")
    assert repository.verify("pets").sound


def test_changed_entries_are_not_copied_again(repository: LocalRepository, tmp_path: Path) -> None:
    archive = local(tmp_path / "a.tar", tar_of(("a", b"1" * 70_000), ("b", b"2")))
    put(repository, archive, name="original")
    ingest.put(repository, "original", ingest.TarSource(io.BytesIO(tar_of(("a", b"forged" * 9)))))
    put(repository, archive)
    assert contents(repository) == {b"a": b"1" * 70_000, b"b": b"2"}


PATHS = st.sampled_from(["a", "b", "d/a", "d/e/a"])


@examples(100, suppress=(HealthCheck.function_scoped_fixture,))
@given(
    made=st.lists(st.lists(PATHS, min_size=1, max_size=4), min_size=2, max_size=4),
    commands=st.lists(st.permutations(range(4)).flatmap(
        lambda order: st.integers(1, 4).map(lambda count: order[:count])
    ), min_size=2, max_size=4),
    jobs=st.sampled_from([1, 3]),
)  # fmt: skip
def test_I18_in_any_order_the_last_named_of_several_archives_counts(
    tmp_path_factory: pytest.TempPathFactory,
    made: Sequence[Sequence[str]],
    commands: Sequence[Sequence[int]],
    jobs: int,
) -> None:
    """Each put leaves the files that extracting its archives would leave, whichever archives it
    need not read and whichever is packed first. No two files have one size, by which a put takes
    them for the same."""
    folder = tmp_path_factory.mktemp("archives")
    files = [
        [(path, bytes([number]) * (30_000 * number + 9 * at + 1)) for at, path in enumerate(paths)]
        for number, paths in enumerate(made)
    ]
    for number, members in enumerate(files):
        (folder / f"{number}.tar").write_bytes(tar_of(*members))
    expected: dict[bytes, bytes] = {}
    with LocalRepository.open((folder / "store").as_uri(), create=True) as repository:
        for command in commands:
            named = [number for number in command if number < len(made)] or [0]
            for number in named:
                expected |= {path.encode(): content for path, content in files[number]}
            archives = [LocalArchive(str(folder / f"{number}.tar")) for number in named]
            assert not put(repository, *archives, jobs=jobs).failed
            assert file_contents(repository.view("pets"), repository) == expected
        assert put(repository, *archives, jobs=jobs).archives_skipped == len(named)


def test_filtered_entries_come_in_the_next_put(repository: LocalRepository, tmp_path: Path) -> None:
    archive = local(tmp_path / "a.tar", tar_of(("a.jpg", b"1"), ("b.txt", b"2")))
    put(repository, archive, include=("*.jpg",))
    assert put(repository, archive).archives_skipped == 0
    assert contents(repository) == {b"a.jpg": b"1", b"b.txt": b"2"}
    put(repository, archive, name="other", exclude=("*.jpg",))
    put(repository, local(tmp_path / "same.tar", tar_of(("a.jpg", b"1"), ("b.txt", b"2"))))
    assert contents(repository) == {b"a.jpg": b"1", b"b.txt": b"2"}


def test_a_compressed_file_always_has_its_name(repository: LocalRepository, tmp_path: Path) -> None:
    data = gzip.compress(random_bytes(1, 100_000))
    put(repository, local(tmp_path / "one.txt.gz", data), name="original")
    put(repository, local(tmp_path / "one.txt.gz", data))
    put(repository, local(tmp_path / "two.txt.gz", data))
    assert set(contents(repository)) == {b"one.txt", b"two.txt"}


@pytest.mark.parametrize("kinds", ["ll", "lf", "fl"])
def test_links_in_the_last_archive_count_too(
    repository: LocalRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: str
) -> None:
    """The first archive is packed after the second has been put; then the command is repeated."""
    recorded = threading.Event()
    record = repository.record_archive

    def record_archive(*given: object) -> None:
        record(*given)  # type: ignore[arg-type]  # what came is passed on
        recorded.set()

    class Late(LocalArchive):
        def open(self, state: ingest.ArchiveState) -> archive_file.ArchiveFile:
            assert recorded.wait(60)
            return super().open(state)

    def member(kind: str, text: str) -> bytes | tarfile.TarInfo:
        link = tarfile.TarInfo()
        link.type, link.linkname = tarfile.SYMTYPE, text
        return link if kind == "l" else text.encode()

    monkeypatch.setattr(repository, "record_archive", record_archive)
    for number, kind in enumerate(kinds):
        filler = (f"filler{number}", random_bytes(number, 80_000))
        tar = tar_of(filler, ("x", member(kind, f"of {number}")))
        (tmp_path / f"{number}.tar").write_bytes(tar)
    archives = Late(str(tmp_path / "0.tar")), LocalArchive(str(tmp_path / "1.tar"))
    for skipped in (0, 2):
        report = put(repository, *archives, jobs=2)
        assert not report.failed
        assert report.archives_skipped == skipped
        assert contents(repository)[b"x"] == ("of 1" if kinds[1] == "l" else b"of 1")


def test_a_dry_run_deletes_nothing_if_an_archive_cannot_be_read(
    repository: LocalRepository, tmp_path: Path
) -> None:
    put(repository, local(tmp_path / "a.tar", tar_of(("a", b"1"))))
    report = put(repository, local(tmp_path / "b", b"no archive"), delete=True, dry_run=True)
    assert report.failed
    assert report.to_delete == ()


def test_one_unknown_compression_in_a_zip(repository: LocalRepository, tmp_path: Path) -> None:
    data = bytearray(zip_of(("a", b"1"), ("deflate64", b"2"), ("z", b"3")))
    for magic, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        second = data.index(magic, data.index(magic) + 1)
        data[second + offset] = 9
    report = put(repository, local(tmp_path / "a.zip", bytes(data)))
    assert list(reasons(report)) == [b"deflate64"]
    assert "(method 9)" in reasons(report)[b"deflate64"]
    assert contents(repository) == {b"a": b"1", b"z": b"3"}


def test_a_zip_of_wrongly_coded_names_is_named(repository: LocalRepository, tmp_path: Path) -> None:
    data = bytearray(zip_of(("caf\u00e9", b"1"), ("b", b"2"))).replace(
        "\u00e9".encode(), b"\xe9\xe9"
    )
    report = put(
        repository,
        local(tmp_path / "bad.zip", bytes(data)),
        local(tmp_path / "good.zip", zip_of(("c", b"3"))),
    )
    assert list(reasons(report)) == [b"caf\xe9\xe9"]
    assert contents(repository) == {b"b": b"2", b"c": b"3"}


@examples(60, suppress=(HealthCheck.function_scoped_fixture,))
@given(data=st.data())
def test_any_bytes_are_put_or_named(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """FAULTS.md, 8: every parser is total."""
    tar = tar_of(("d/a", b"1" * 700), ("b" * 120, b"2"))
    seeds = [zip_of(("a", b"1" * 99), ("caf\u00e9", b"2")), tar]
    seeds += [compress(tar) for compress in COMPRESS.values()]
    damaged = bytearray(data.draw(st.sampled_from(seeds)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF, damaged[at] ^ 8]))
    damaged = damaged[: data.draw(st.sampled_from([len(damaged), len(damaged) * 3 // 4]))]
    folder = tmp_path_factory.mktemp("archives")
    with LocalRepository.open((folder / "store").as_uri(), create=True) as repository:
        report = put(repository, local(folder / "x", bytes(damaged)), dry_run=True)
        assert report.failed or report.entries_found


def test_parts_are_fetched_concurrently_and_once(
    repository: LocalRepository, server: ArchiveServer
) -> None:
    data = tar_of(*((f"f{i}", random_bytes(i, 1 << 20)) for i in range(20)))
    server.files["/x.tar"] = data
    # after the first request: an overload, and a body that breaks off
    server.failures = [0, 503, -1]
    assert not put(repository, HttpArchive(server.url("/x.tar")), chunk_bytes=4 << 20).failed
    assert server.requests["/x.tar"] == 1 + -(-len(data) // archive_file.PIECE_BYTES) + 2
    assert server.served["/x.tar"] == len(data) + 1
    assert len(contents(repository)) == 20


@pytest.mark.parametrize("says_length", [True, False])
def test_a_server_without_ranges_sends_all(repository: LocalRepository, says_length: bool) -> None:
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
    for nowhere in ("file:///etc/passwd", "http://[bad", "ftp://host/x"):
        server.redirects["/a"] = nowhere
        with pytest.raises(ObjectStoreRefused, match="redirects"):
            HttpArchive(server.url("/a")).look()


@pytest.mark.parametrize(
    ("status", "kind"), [(404, NotFoundError), (403, PermissionDenied), (401, PermissionDenied)]
)
def test_server_errors_raise(server: ArchiveServer, status: int, kind: type[DieselError]) -> None:
    server.failures = [status]
    with pytest.raises(kind, match=f"answers {status}"):
        HttpArchive(server.url("/x.tar?token=secret")).look()


@pytest.mark.parametrize(
    ("etag", "tagged_by_time"), [('W/"weak"', True), ("", True), ('"x"', False)]
)
def test_a_weak_tag_proves_nothing(server: ArchiveServer, etag: str, tagged_by_time: bool) -> None:
    server.files["/x.tar"], server.etags["/x.tar"] = b"data", etag
    tag = HttpArchive(server.url("/x.tar")).look().tag
    assert tag == (f"modified {server.modified}" if tagged_by_time else etag)
    server.modified = ""
    assert HttpArchive(server.url("/x.tar")).look().tag == ("" if tagged_by_time else etag)


@pytest.mark.parametrize("change", ["strong", "modified", "length", "weak", "streamed"])
def test_O9_an_archive_that_changes_meanwhile_is_not_mixed(
    server: ArchiveServer, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setattr(archive_file, "PIECE_BYTES", 4096)
    server.sends_parts = change != "streamed"
    server.files["/x.tar"] = random_bytes(0, 1 << 20)
    if change != "strong":
        server.etags["/x.tar"] = 'W/"1"' if change in ("weak", "streamed") else ""
    archive = HttpArchive(server.url("/x.tar"))
    state = archive.look()
    file = archive.open(state) if change != "streamed" else None
    if file is not None:
        file.readinto(bytearray(100))
    server.files["/x.tar"] = random_bytes(1, (1 << 20) + (change == "length"))
    match change:
        case "modified":
            server.modified = "Fri, 13 Feb 2009 23:31:31 GMT"
        case "weak" | "streamed":
            server.etags["/x.tar"] = 'W/"2"'
    with pytest.raises(OSError, match="changed while it was being read"):
        (file or archive.open(state)).sha256()
    if file is not None:
        file.close()


def test_O9_the_checked_bytes_are_the_ones_that_are_put(
    repository: LocalRepository, server: ArchiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server sends other bytes when the archive is fetched again."""
    monkeypatch.setattr(archive_file, "PIECE_BYTES", 4096)
    monkeypatch.setattr(archive_file, "_WHOLE_BYTES_MAX", 4096)
    files = [(f"f{i}", random_bytes(i, 50_000)) for i in range(4)]
    data = tar_of(*files)
    address = served_with_sha256(server, "/x.tar", data)
    server.etags["/x.tar"] = '"same"'
    sha256 = archive_file.ArchiveFile.sha256

    def checked(self: archive_file.ArchiveFile, *given: Callable[[], None]) -> bytes:
        found = sha256(self, *given)
        server.files["/x.tar"] = data.replace(files[3][1][:1000], bytes(1000))
        return found

    monkeypatch.setattr(archive_file.ArchiveFile, "sha256", checked)
    report = put(repository, HttpArchive(address))
    assert "changed while it was being read" in report.failed[0][1]
    assert b"f3" not in contents(repository)


def test_O3_a_server_that_requests_a_long_pause_gets_it(
    repository: LocalRepository, server: ArchiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zenodo requests pauses longer than our own deadline."""
    waited: list[float] = []
    monkeypatch.setattr(LongPauses, "wait", lambda _, seconds, __: waited.append(seconds))
    server.files["/x.tar"] = tar_of(("a", b"1"))
    server.failures, server.retry_after = [429, 429, 503], "77"
    assert not put(repository, HttpArchive(server.url("/x.tar"))).failed
    assert contents(repository)[b"a"] == b"1"
    assert waited == [77, 77, 77]


def test_O3_an_interrupted_put_does_not_wait_for_a_server(
    repository: LocalRepository, server: ArchiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.files["/x.tar"] = tar_of(("a", b"1"))
    server.failures, server.retry_after = [0, 503, 503], "3000"

    def interrupt(_: PutReport) -> None:
        if caplog.records:
            raise KeyboardInterrupt

    source = ArchivesSource([HttpArchive(server.url("/x.tar"))])
    with pytest.raises(KeyboardInterrupt):
        ingest.put(repository, "pets", source, b"", PutOptions(), interrupt)
    assert "3000 s" in caplog.text


def test_an_unrequested_part_fails(server: ArchiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_file, "PIECE_BYTES", 4096)
    monkeypatch.setattr(archive_places, "_POLICY", RetryPolicy(deadline_s=10.5))
    server.files["/x.tar"] = random_bytes(0, 1 << 16)
    archive = HttpArchive(server.url("/x.tar"))
    with archive.open(archive.look()) as file:
        server.shift = 1
        with pytest.raises(OSError, match="was not requested"):
            file.readinto(bytearray(100))


def test_after_an_expired_redirection_the_original_address_is_requested_again(
    repository: LocalRepository, server: ArchiveServer
) -> None:
    data = tar_of(("a", random_bytes(1, 100_000)))
    server.files |= {"/signed1": data, "/signed2": data}
    server.etags |= {"/signed1": '"x"', "/signed2": '"x"'}
    server.redirects["/x.tar"] = "/signed1"
    archive = HttpArchive(server.url("/x.tar"))
    with archive.open(archive.look()) as file:
        server.redirects["/x.tar"] = "/signed2"
        server.statuses["/signed1"] = 403
        assert file.sha256() == hashlib.sha256(data).digest()
    server.statuses["/signed2"] = 403
    with pytest.raises(PermissionDenied):
        HttpArchive(server.url("/x.tar")).look()


@each_row("address", ["http://[bad/x", "http://host:99999/x", "http:///x"])
def test_a_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="bad address") as caught:
        HttpArchive(address + "?token=canary")
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    ("modified", "mtime_s"),
    [("Fri, 13 Feb 2009 23:31:30 GMT", 1_234_567_890), ("Fri, 01 Jan 9999 00:00:00 GMT", 0),
     ("yesterday", 0), ("Mon, 99 Jan 2020 99:00:00 GMT", 0)],
)  # fmt: skip
def test_a_server_may_send_any_time(
    repository: LocalRepository, server: ArchiveServer, modified: str, mtime_s: int
) -> None:
    server.files["/x.gz"], server.modified = gzip.compress(b"1"), modified
    assert not put(repository, HttpArchive(server.url("/x.gz"))).failed
    view = repository.view("pets")
    if mtime_s:
        assert view.stat(view.lookup(b"x")).mtime_ns == mtime_s * 10**9
    assert contents(repository) == {b"x": b"1"}


def test_S8_no_secret_of_a_url_is_kept(repository: LocalRepository, server: ArchiveServer) -> None:
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


def test_an_archive_is_put_once_through_a_server(tmp_path: Path, server: ArchiveServer) -> None:
    data = tar_of(("a", random_bytes(1, 200_000)), ("d/b", b"2"))
    address = served_with_sha256(server, "/x.tar", data)
    with in_process_server(tmp_path / "store") as behind:
        admin = behind.admin
        assert put(admin, HttpArchive(address), name="one").archives == 1
        assert put(admin, HttpArchive(address), name="one").archives_skipped == 1
        served = server.served["/x.tar"]
        assert not put(admin, HttpArchive(address), name="two").failed
        assert server.served["/x.tar"] == served + 1  # the entries were copied
        assert set(contents(behind.store, "two")) == {b"a", b"d", b"d/b"}


def test_S10_no_copies_from_unreadable_datasets(tmp_path: Path, server: ArchiveServer) -> None:
    data = tar_of(("a", random_bytes(1, 200_000)))
    address = served_with_sha256(server, "/x.tar", data)
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


def test_S13_a_forged_record_gives_no_other_bytes(tmp_path: Path, server: ArchiveServer) -> None:
    """A user puts a record of an archive that was never put, with files of their own."""
    data, other = (tar_of(("a", random_bytes(seed, 200_000))) for seed in (1, 2))
    server.files |= {"/x.tar": data, "/other.tar": other}
    address = server.url("/x.tar#sha256=") + hashlib.sha256(data).hexdigest()
    with in_process_server(tmp_path / "store") as behind:
        forger = behind.with_role(Role.ADMIN, "forged")
        put(forger, HttpArchive(server.url("/other.tar")), name="forged")
        identity = behind.store.dataset("forged").identity
        (record,) = forger.archive_records(identity)
        forged = replace(record, size=len(data), sha256=hashlib.sha256(data).digest(), writer="")
        forger.record_archive(identity, forged)
        put(behind.admin, HttpArchive(address), name="admins")
        assert contents(behind.store, "admins") == {b"a": random_bytes(1, 200_000)}


def test_S8_the_command_does_not_show_a_query(dlcmd: Dlcmd, server: ArchiveServer) -> None:
    server.files["/x.tar"] = b"no archive"
    address = server.url("/x.tar?token=canary")
    for code, names in {
        2: (address, address),
        3: (address,),
        10: (address.replace("x", "y"),),
    }.items():
        result = dlcmd("put", "--unpack", *names, "pets", code=code)
        assert "canary" not in result.err + result.out.decode()
    for bad in ("#sha1=0", "#sha256=0"):
        assert "canary" not in dlcmd("put", "--unpack", address + bad, "pets", code=2).err


def sparse_tar() -> bytes:
    member = tarfile.TarInfo("sparse")
    member.pax_headers = {
        "GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.map": f"{8 << 40},0",
        "GNU.sparse.size": str(8 << 40), "GNU.sparse.numblocks": "1", "GNU.sparse.name": "sparse",
    }  # fmt: skip
    return tar_of(("sparse", member))


def repeated_zst() -> bytes:
    """A Zstandard file of 512 GiB: blocks of 128 KiB that repeat one byte."""
    block = (2 | 1 << 20).to_bytes(3, "little") + b"x"
    return b"\x28\xb5\x2f\xfd\x00\x38" + block * (4 << 20)


def has_open(pid: int, path: Path) -> bool:
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if each.readlink() == path:
                return True
    return False


@pytest.mark.parametrize("make", [sparse_tar, repeated_zst])
def test_ctrl_c_ends_puts_of_bombs(dlcmd: Dlcmd, tmp_path: Path, make: Callable[[], bytes]) -> None:
    """Such a member would take an hour to pack, or to count."""
    (tmp_path / "bomb").write_bytes(make())
    put = dlcmd.start("put", "--unpack", tmp_path / "bomb", "pets")
    try:
        wait_until(lambda: has_open(put.pid, tmp_path / "bomb"))
        put.send_signal(signal.SIGINT)
        _, err = put.communicate(timeout=60)
    finally:
        put.kill()
    assert put.returncode == 130, err
    assert b"Traceback" not in err


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
