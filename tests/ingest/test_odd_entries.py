"""An odd time, size, mode, name or trailer of one entry never ends a put. The entry is named, and
the others are stored.
"""

import bz2
import gzip
import io
import itertools
import lzma
import os
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs import ingest
from diesel_fs.ingest import ArchivesSource, FolderSource, LocalArchive, PutReport, TarSource
from diesel_fs.repository.local import LocalRepository
from tests.examples import examples
from tests.rows import each_row
from tests.trees import facts, write

from .test_archives import local, random_bytes, zip_of
from .test_tar import contents, reasons, tar_of

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

A, B = tar_of(("a", b"1")), tar_of(("b", random_bytes(1, 30_000)))
BOTH = {b"a": b"1", b"b": random_bytes(1, 30_000)}
_NAMES = map("d{}".format, itertools.count())


def put_both_ways(repository: LocalRepository, folder: Path, data: bytes) -> dict[str, PutReport]:
    """An archive by `--tar -` and by `--unpack`, each into a new dataset; the reports by name."""
    file = folder / "x"
    file.write_bytes(data)
    return {
        (name := next(_NAMES)): ingest.put(repository, name, source)
        for source in (TarSource(io.BytesIO(data)), ArchivesSource([LocalArchive(str(file))]))
    }


# Bytes after the end


@each_row(
    "data",
    [
        A + B,
        A + bytes(5 << 20) + B,
        A[:1536] + B,
        gzip.compress(A) + gzip.compress(B),
        gzip.compress(A) + bytes(5000) + gzip.compress(B) + bytes(3),
        lzma.compress(A) + bytes(8) + lzma.compress(B) + bytes(4),
        bz2.compress(A) + bz2.compress(B),
        zstd.compress(A) + b"\x50\x2a\x4d\x18\x03\0\0\0abc" + zstd.compress(B),
    ],
)
def test_I17_joined_tars_are_read(repository: LocalRepository, tmp_path: Path, data: bytes) -> None:
    for name, report in put_both_ways(repository, tmp_path, data).items():
        assert report.failed == []
        assert contents(repository, name) == BOTH


@each_row(
    "data, reason",
    [
        (A + B + b"text" * 200, "are no tar"),
        (A + b"text", "are no tar"),
        (gzip.compress(A + B) + b"text", "of the gzip stream"),
        (lzma.compress(A + B) + b"\0\0\0\0text", "of the xz stream"),
        (bz2.compress(A + B) + b"\0", ""),
        (bz2.compress(A + B) + gzip.compress(B), "of the bzip2 stream"),
        (zstd.compress(A + B) + b"text", "of the Zstandard stream"),
    ],
)
def test_I17_bytes_after_a_tar_that_are_no_tar_are_named(
    repository: LocalRepository, tmp_path: Path, data: bytes, reason: str
) -> None:
    for name, report in put_both_ways(repository, tmp_path, data).items():
        assert [reason in text for _, text in report.failed] == [True] * bool(reason)
        assert contents(repository, name).items() >= {b"a": b"1"}.items()


@each_row("size", [10, 70 << 20])
def test_a_compressed_file_is_put_although_bytes_follow_it(
    repository: LocalRepository, tmp_path: Path, size: int
) -> None:
    name = next(_NAMES)
    archive = local(tmp_path / "x.txt.gz", gzip.compress(bytes(size), 1) + b"text")
    report = ingest.put(repository, name, ArchivesSource([archive]))
    assert "of the gzip stream" in reasons(report)[os.fsencode(archive.name)]
    view = repository.view(name)
    assert view.stat(view.lookup(b"x.txt")).size == size


# GNU tar's own kinds


@each_row("form", ["gnu", "posix"])
def test_incremental_tars_are_put(repository: LocalRepository, tmp_path: Path, form: str) -> None:
    """In GNU's format its headers have times at the place of a part of the name."""
    source = write(tmp_path / "src", {"d/1": b"1", "d/e/" + "n" * 120: b"2", "d/e/3": b"3"})
    options = [f"--format={form}", "--listed-incremental", str(tmp_path / "state"), "-V", "label"]
    made = subprocess.run(
        ["tar", "-c", *options, "-C", source, "."], check=True, capture_output=True
    ).stdout
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "-x", "-C", tmp_path / "out"], input=made, check=True)
    for name, report in put_both_ways(repository, tmp_path, made).items():
        assert report.failed == []
        view = repository.view(name)
        paths = {view.path(index) for index in range(1, len(view))}
        assert paths == facts(tmp_path / "out").keys() - {b"."}


# Fields at their borders


BORDERS = [0, 1, -1, (1 << 33) - 1, 1 << 33, 1 << 62, (1 << 63) - 1, 1 << 63, -(1 << 63), 1 << 87]
TAR_NUMBERS = {"mode": (100, 8), "uid": (108, 8), "size": (124, 12), "mtime": (136, 12)}


def tar_field(number: int, length: int) -> bytes:
    """A number in the form of a header: octal if it fits, else binary (GNU)."""
    if 0 <= number < 8 ** (length - 1):
        return b"%0*o\0" % (length - 1, number)
    wide = number & ((1 << 8 * length) - 1)
    return bytes([0xFF if number < 0 else 0x80]) + wide.to_bytes(length, "big")[1:]


@examples(200)
@given(
    numbers=st.dictionaries(
        st.sampled_from(sorted(TAR_NUMBERS)), st.sampled_from(BORDERS) | st.integers(), min_size=1
    ),
    kind=st.sampled_from(b"0\x00123456789ABDLKMNSVXxgz"),
    magic=st.sampled_from([b"ustar\x0000", b"ustar  \0", bytes(8)]),
    pax=st.sampled_from(["", "size=-1", "size=99999999999999999999", "mtime=1e400", "mtime=-9e18"]),
)
def test_I16_any_field_of_a_tar_header(
    tmp_path_factory: pytest.TempPathFactory,
    numbers: dict[str, int],
    kind: int,
    magic: bytes,
    pax: str,
) -> None:
    """The next entry is put unless the size hides it."""
    header = bytearray(tar_of(("odd", b""), format=tarfile.USTAR_FORMAT)[:512])
    header[156], header[257:265] = kind, magic
    for name, number in numbers.items():
        at, length = TAR_NUMBERS[name]
        header[at : at + length] = tar_field(number, length)
    header[148:156] = b"%06o\0 " % (sum(header) - sum(header[148:156]) + 8 * 32)
    before = b""
    if pax:
        record = next(f"{n} {pax}\n" for n in range(9, 99) if len(f"{n} {pax}\n") == n).encode()
        info = tarfile.TarInfo("p")
        info.type, info.size = tarfile.XHDTYPE, len(record)
        before = info.tobuf(tarfile.USTAR_FORMAT) + record.ljust(512, b"\0")
    data = tar_of(("first", b"0"))[:1024] + before + bytes(header) + A
    folder = tmp_path_factory.mktemp("tar")
    with LocalRepository.open((folder / "store").as_uri(), create=True) as repository:
        for name, report in put_both_ways(repository, folder, data).items():
            found = contents(repository, name)
            assert b"odd" in found or report.failed or kind in b"gxXLKV"
            if (
                numbers.get("size", 0) in (0, -1)
                and pax in ("", "size=-1")
                and kind not in b"xgXLKS"
            ):
                assert found[b"a"] == b"1"


ZIP_FIELDS = {
    "needed": (6, 2), "flags": (8, 2), "method": (10, 2), "time": (12, 2), "date": (14, 2),
    "crc": (16, 4), "packed": (20, 4), "size": (24, 4), "name": (28, 2), "disk": (34, 2),
    "system": (4, 2), "attributes": (38, 4), "place": (42, 4),
}  # fmt: skip


@examples(200)
@given(
    fields=st.dictionaries(
        st.sampled_from(sorted(set(ZIP_FIELDS) - {"name"})),
        st.sampled_from([0, 1, 0x7FFF, 0xFFFF, 0xFFFF_FFFF]) | st.integers(0, 0xFFFF_FFFF),
        min_size=1,
    ),
    extra=st.binary(max_size=8)
    | st.tuples(st.sampled_from([1, 0x5455, 0x7075, 9]), st.integers(0, 30), st.binary(max_size=30))
    .map(lambda each: struct.pack("<HH", *each[:2]) + each[2]),
)  # fmt: skip
def test_I16_any_field_of_a_zips_table(
    tmp_path_factory: pytest.TempPathFactory, fields: dict[str, int], extra: bytes
) -> None:
    info = zipfile.ZipInfo("odd")
    info.extra = b""
    data = bytearray(zip_of((info, b"odd"), ("fine", b"1")))
    table = data.index(b"PK\x01\x02")
    for name, value in fields.items():
        at, length = ZIP_FIELDS[name]
        data[table + at : table + at + length] = value.to_bytes(4, "little")[:length]
    data[table + 30 : table + 32] = struct.pack("<H", len(extra))
    data[table + 49 : table + 49] = extra
    end = data.rindex(b"PK\x05\x06")
    size = int.from_bytes(data[end + 12 : end + 16], "little") + len(extra)
    data[end + 12 : end + 16] = size.to_bytes(4, "little")
    folder = tmp_path_factory.mktemp("zip")
    with LocalRepository.open((folder / "store").as_uri(), create=True) as repository:
        report = ingest.put(
            repository, "pets", ArchivesSource([local(folder / "x.zip", bytes(data))])
        )
        found = contents(repository)
        assert found[b"fine"] == b"1"
        assert len(found) == 2 or report.failed


def test_I16_a_time_that_no_chunk_can_hold(repository: LocalRepository, tmp_path: Path) -> None:
    """A single file of such a time is refused, too."""
    source = write(tmp_path / "src", {"a": b"1", "late": b"2", "d/b": b"3"})
    (source / "link").symlink_to("a")
    late_s = 10_413_792_000  # 2300-01-01
    for path in (source / "late", source / "d", source / "link"):
        os.utime(path, (late_s, late_s), follow_symlinks=False)
    report = ingest.put(repository, "pets", FolderSource(source))
    assert {path for path, _ in report.failed} == {b"late", b"d", b"link"}
    assert all("its mtime cannot be stored" in reason for _, reason in report.failed)
    assert set(contents(repository)) == {b"a", b"d", b"d/b"}
    alone = ingest.put(repository, "one", ingest.FileSource(source / "late"), b"late")
    assert "its mtime cannot be stored" in reasons(alone)[b"late"]


# Names in zips


def zip_with(name: bytes, system: int, extra: bytes = b"", content: bytes = b"1") -> bytes:
    info = zipfile.ZipInfo("n" * len(name))
    info.create_system, info.extra = system, extra
    return zip_of((info, content)).replace(b"n" * len(name), name)


def utf8_field(name: bytes, raw: bytes) -> bytes:
    """Info-ZIP's field for the UTF-8 form of a name."""
    return struct.pack("<HHBL", 0x7075, 5 + len(name), 1, zlib.crc32(raw)) + name


JAPANESE = "日本.jpg".encode()


@each_row(
    "data, expected",
    [
        (zip_with(b"??.jpg", 3, utf8_field(JAPANESE, b"??.jpg")), JAPANESE),
        (zip_with(b"??.jpg", 3, utf8_field(JAPANESE, b"another")), b"??.jpg"),
        (zip_with(b"??.jpg", 3, utf8_field(b"\xff\xfe", b"??.jpg")), b"??.jpg"),
        (zip_with(b"\x82.jpg", 0), "é.jpg".encode()),
        (zip_with(JAPANESE, 3), JAPANESE),
        (zip_with(b"train\\cat\\1.jpg", 0), b"train/cat/1.jpg"),
        (zip_with(b"train\\cat\\1.jpg", 3), b"train\\cat\\1.jpg"),
        (zip_with(b"train/a\\b", 0), b"train/a\\b"),
    ],
)
def test_names_in_zips(
    repository: LocalRepository, tmp_path: Path, data: bytes, expected: bytes
) -> None:
    name = next(_NAMES)
    report = ingest.put(repository, name, ArchivesSource([local(tmp_path / "x.zip", data)]))
    assert report.failed == []
    assert contents(repository, name) == {expected: b"1"} | dict.fromkeys(
        [b"/".join(expected.split(b"/")[:n]) for n in range(1, expected.count(b"/") + 1)], "0o755"
    )
    assert report.backslashes == (b"\\" in data and b"/cat/" in expected)


def test_an_empty_folder_named_by_backslashes(repository: LocalRepository, tmp_path: Path) -> None:
    archive = local(tmp_path / "x.zip", zip_with(b"train\\empty\\", 0, content=b""))
    ingest.put(repository, "pets", ArchivesSource([archive]))
    assert contents(repository) == {b"train": "0o755", b"train/empty": "0o755"}
