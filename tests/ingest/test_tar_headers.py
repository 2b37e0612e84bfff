"""Plain files of a tar, read as columns: for any bytes, `tarfile` reads the same."""

import io
import subprocess
import tarfile
from decimal import ROUND_FLOOR, Decimal
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.ingest.sources.tar_headers import BLOCK_BYTES, plain_files
from tests.examples import examples
from tests.rows import each_row

Read = tuple[bytes, int, int, int, int]
"""Name, mode, mtime_ns, offset and length of the content."""

NAMES = st.one_of(
    st.sampled_from(
        ["a", "./a/b", "d/", "a//b", ".", "x" * 100, "y" * 101, "d/" * 60 + "f", "ä" * 80]
    ),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=300),
    st.binary(min_size=1, max_size=120).map(
        lambda raw: raw.replace(b"\0", b"").decode("utf-8", "surrogateescape") or "n"
    ),
)
TIMES = st.one_of(
    st.integers(0, 1 << 33), st.integers(-(1 << 40), 1 << 60), st.sampled_from([0.5, 1.25e9, -1.5])
)
KEYS = st.one_of(
    st.sampled_from(
        "path mtime atime size uid comment hdrcharset GNU.sparse.size GNU.sparse.map".split()
    ),
    st.text(st.characters(codec="utf-8", exclude_characters="\0="), min_size=1, max_size=9),
)
VALUES = st.one_of(
    st.sampled_from(
        ["1", "17.123456789", "17.1234567891", "1e3", "-1.5", "", "a/b/", "BINARY", "0,1"]
    ),
    st.text(st.characters(codec="utf-8"), max_size=30),
)
KINDS = st.sampled_from(
    [tarfile.REGTYPE] * 8 + [tarfile.AREGTYPE] * 2
    + [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CONTTYPE, b"Z"]
)  # fmt: skip


@st.composite
def members(draw: st.DrawFn) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(draw(NAMES))
    member.type = draw(KINDS)
    member.mode = draw(st.integers(0, 0o7777))
    member.mtime = draw(TIMES)
    member.uid = draw(st.sampled_from([0, 1000, 1 << 40]))
    member.uname = draw(st.sampled_from(["", "root", "ü" * 40]))
    member.linkname = draw(NAMES) if member.type in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
    content = b""
    if member.type in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE):
        content = draw(st.sampled_from([b"", b"1", b"x" * 511, b"y" * 512, b"z" * 1300]))
    member.size = len(content)
    if draw(st.integers(0, 3)) == 0:
        member.pax_headers = draw(st.dictionaries(KEYS, VALUES, max_size=3))
    return member, content


@st.composite
def archives(draw: st.DrawFn) -> bytes:
    out = io.BytesIO()
    form = draw(st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
    comment = {"comment": "c"} if draw(st.integers(0, 9)) == 0 else {}
    with tarfile.open(
        fileobj=out, mode="w", format=form, errors="surrogateescape", pax_headers=comment
    ) as tar:
        for member, content in draw(st.lists(members(), max_size=12)):
            try:
                tar.addfile(member, io.BytesIO(content))
            except (ValueError, UnicodeError):  # ustar cannot say it
                continue
    return out.getvalue()


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(archives()))
    for _ in range(draw(st.integers(1, 4))):
        block = draw(st.integers(0, len(data) // BLOCK_BYTES - 1)) * BLOCK_BYTES
        field = draw(
            st.sampled_from([0, 100, 108, 124, 135, 136, 147, 148, 156, 257, 329, 345, 512])
        )
        at = min(block + field + draw(st.integers(0, 3)), len(data) - 1)
        data[at : at + 1] = draw(
            st.sampled_from([b"\0", b" ", b"8", b"7", b"\x80", b"\xff", b"/", b"x"])
        )
        if draw(st.booleans()):
            header = data[block : block + BLOCK_BYTES]
            total = sum(header[:148]) + 8 * 32 + sum(header[156:])
            data[block + 148 : block + 156] = b"%06o\0 " % total
    return bytes(data[: draw(st.one_of(st.just(len(data)), st.integers(0, len(data))))])


def columns(data: bytes) -> tuple[list[Read], int]:
    files = plain_files(bytearray(data), 0, len(data))
    return [
        *zip(files.names, files.modes, files.mtimes_ns, files.starts, files.sizes, strict=True)
    ], files.end  # fmt: skip


def by_tarfile(data: bytes, count: int) -> tuple[list[Read], int]:
    found: list[Read] = []
    end = 0
    with tarfile.open(
        fileobj=io.BytesIO(data), mode="r:", encoding="utf-8", errors="surrogateescape"
    ) as tar:
        for _ in range(count):
            member = tar.next()
            assert member is not None
            assert member.isreg()
            assert not member.issparse()
            name = member.name.encode("utf-8", "surrogateescape")
            time = Decimal(member.pax_headers.get("mtime", member.mtime)) * 10**9
            mtime_ns = int(time.to_integral_value(ROUND_FLOOR))
            found.append((name, member.mode, mtime_ns, member.offset_data, member.size))
            end = tar.offset
    return found, end


@examples(300)
@given(st.one_of(archives(), damaged(), st.binary(max_size=2000)))
def test_columns_equal_the_records_of_tarfile(data: bytes) -> None:
    read, end = columns(data)
    assert end <= len(data)
    if read:
        assert (read, end) == by_tarfile(data, len(read))
    else:
        assert end == 0


@each_row("form", ["v7", "ustar", "gnu", "posix"])
def test_files_of_every_common_form_need_no_tarfile(form: str, tmp_path: Path) -> None:
    names = ["a", "b c", "ä"] + ([] if form == "v7" else ["d/" * 20 + "n" * 90, "n" * 99])
    if form in ("gnu", "posix"):
        names += ["l" * 200, "d/" * 120 + "f"]
    for number, name in enumerate(names):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%d" % number * 700)
    command = ["tar", "c", f"--format={form}", "-C", str(tmp_path), *names]
    data = subprocess.run(command, check=True, capture_output=True).stdout
    read, _ = columns(data)
    assert [name.decode() for name, *_ in read] == names
    for number, (_, mode, mtime_ns, start, size) in enumerate(read):
        there = (tmp_path / names[number]).stat()
        assert (mode, size) == (there.st_mode & 0o7777, there.st_size)
        assert abs(mtime_ns - there.st_mtime_ns) < (1 if form == "posix" else 10**9)
        assert data[start : start + size] == b"%d" % number * 700


def test_a_truncated_file_is_left_to_tarfile() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in ("a", "b"):
            member = tarfile.TarInfo(name)
            member.size = 1000
            tar.addfile(member, io.BytesIO(bytes(1000)))
    whole = 3 * BLOCK_BYTES
    for end in (0, 511, 512, 513, whole - 1, whole, whole + 512, 2 * whole - 1):
        files = plain_files(bytearray(out.getvalue()), 0, end)
        assert (len(files.names), files.end) == ((1, whole) if end >= whole else (0, 0))
