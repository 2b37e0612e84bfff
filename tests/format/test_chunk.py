"""The chunk format: round trips, golden bytes, and the errors for wrong bytes."""

import struct
import tracemalloc
from collections.abc import Callable
from uuid import uuid4

import lz4.block
import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from diesel_fs.errors import (
    CorruptError,
    ForeignError,
    FormatError,
    NewerVersionError,
    TruncatedError,
)
from diesel_fs.format.chunk import (
    PREAMBLE_BYTES,
    ChunkHeader,
    ExtentInfo,
    damaged_places,
    decode,
    parse_header,
    parse_preamble,
)
from diesel_fs.format.chunk_builder import ChunkBuilder
from diesel_fs.format.chunk_id import stamp
from diesel_fs.format.entries import ChunkId, Codec, Kind
from tests.rows import each_row

from .golden_chunk import EARLIER, GOLDEN, ID, IDENTITY, NOISE, TEXT, build


def read(chunk: bytes) -> ChunkHeader:
    preamble = parse_preamble(chunk, identity=IDENTITY, id=ID, object_bytes=len(chunk))
    header = parse_header(preamble, chunk[PREAMBLE_BYTES : preamble.body_start])
    assert damaged_places(header, memoryview(chunk)[preamble.body_start :]) == []
    return header


def content(chunk: bytes, header: ChunkHeader, place: int) -> bytes:
    record = header.records[place]
    raw = memoryview(chunk)[record["offset"] : record["offset"] + record["stored"]]
    size = header.content_bytes(place)
    return bytes(decode(raw, int(record["codec"]), size, int(record["checksum"])))


def resealed(chunk: bytes, change: Callable[[dict[str, bytes]], None]) -> bytes:
    """A chunk with a changed header and right checksums: only checks of the header's content can
    find the damage."""
    preamble = parse_preamble(chunk)
    stored = chunk[PREAMBLE_BYTES : preamble.body_start]
    raw = lz4.block.decompress(stored, uncompressed_size=preamble.header_raw)
    columns = msgpack.unpackb(raw)
    change(columns)
    raw = msgpack.packb(columns)
    return with_header(chunk, raw, raw, 0)


def with_header(chunk: bytes, stored: bytes, raw: bytes, codec: int, **fields: int) -> bytes:
    old = parse_preamble(chunk)
    body = chunk[old.body_start :]
    front = bytearray(chunk[:PREAMBLE_BYTES])
    struct.pack_into("<H", front, 10, codec)
    struct.pack_into("<Q", front, 48, PREAMBLE_BYTES + len(stored) + len(body))
    struct.pack_into("<II", front, 64, len(stored), fields.get("raw_bytes", len(raw)))
    struct.pack_into("<I", front, 72, fields.get("entries", old.entries))
    struct.pack_into("<Q", front, 80, xxh3_64_intdigest(stored))
    struct.pack_into("<Q", front, 88, xxh3_64_intdigest(bytes(front[:88])))
    return bytes(front) + stored + body


def test_golden_chunk_decodes_for_ever() -> None:
    chunk = GOLDEN.read_bytes()
    assert build() == chunk, "the current code builds another chunk"
    header = read(chunk)
    assert [header.path(place) for place in range(len(header))] == [
        b"", b"a", b"a/text", b"a/noise", b"a/empty", b"a/b/\xff\nnot utf-8", b"a/link",
        b"gone/file", b"a/large", b"a/" + b"n" * 255,
    ]  # fmt: skip
    assert [Kind(kind).name for kind in header.records["kind"].tolist()] == [
        "FOLDER", "FOLDER", "FILE", "FILE", "FILE", "FILE", "LINK", "TOMBSTONE", "FILE", "FILE",
    ]  # fmt: skip
    assert content(chunk, header, 2) == TEXT
    assert content(chunk, header, 3) == NOISE
    assert content(chunk, header, 4) == b""
    assert content(chunk, header, 8) == NOISE * 4
    assert header.records["codec"].tolist()[2:4] == [Codec.LZ4, Codec.RAW]
    assert header.records["mode"].tolist()[1:3] == [0o777, 0o755]
    assert header.records["mtime_ns"].tolist()[0] == 1_700_000_000_123_456_789
    assert header.records["mtime_ns"].tolist()[2] == -1
    assert header.links == {6: b"../\xfe target"}
    assert header.extents == {8: ExtentInfo(3, 4, 65536 * 3, 1024)}
    assert header.stamps == {8: stamp(EARLIER, 7)}
    assert header.stamp(9) == stamp(ID, 9)


def test_B1_B2_a_truncated_extended_or_flipped_front_is_noticed() -> None:
    chunk = build()
    for length in range(len(chunk)):
        with pytest.raises(TruncatedError):
            parse_preamble(chunk[:length], object_bytes=length)
    with pytest.raises(CorruptError):
        parse_preamble(chunk + b"\0", object_bytes=len(chunk) + 1)
    flipped = bytearray(chunk)
    for bit in range(parse_preamble(chunk).body_start * 8):
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            read(bytes(flipped))
        flipped[bit // 8] ^= 1 << bit % 8


def test_B3_every_byte_of_the_body_is_covered_by_one_checksum() -> None:
    chunk = build()
    preamble = parse_preamble(chunk)
    header = parse_header(preamble, chunk[PREAMBLE_BYTES:])
    for at in range(preamble.body_start, len(chunk)):
        body = bytearray(chunk[preamble.body_start :])
        body[at - preamble.body_start] ^= 0x10
        bad = damaged_places(header, memoryview(body))
        assert len(bad) == 1
        record = header.records[bad[0]]
        assert record["offset"] <= at < record["offset"] + record["stored"]


def test_B7_foreign_identity_and_id() -> None:
    chunk = build()
    with pytest.raises(ForeignError, match="dataset"):
        parse_preamble(chunk, identity=uuid4())
    with pytest.raises(ForeignError, match="Pk32"):
        parse_preamble(chunk, id=ChunkId(bytes(16)))
    with pytest.raises(ForeignError):
        parse_preamble(b"\x7fELF" + bytes(200))


def test_B9_newer_version_or_feature_is_not_damage() -> None:
    for offset, form in ((8, "<H"), (12, "<I")):
        front = bytearray(build())
        struct.pack_into(form, front, offset, 2)
        struct.pack_into("<Q", front, 88, xxh3_64_intdigest(bytes(front[:88])))
        with pytest.raises(NewerVersionError):
            parse_preamble(bytes(front))


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def part(number: int, start: int, size: int) -> bytes:
    return u32(8, number, 4) + struct.pack("<QQ", start, size)


def _set(columns: dict[str, bytes], key: str, at: int, form: str, value: int) -> None:
    column = bytearray(columns[key])
    struct.pack_into(form, column, at * struct.calcsize(form), value)
    columns[key] = bytes(column)


BAD_HEADERS: dict[str, Callable[[dict[str, bytes]], None]] = {
    "a key is missing": lambda c: void(c.pop("names")),
    "an unknown key": lambda c: c.update(extra=b""),
    "a value is no bin": lambda c: c.update(names="text"),  # type: ignore[call-overload]  # wrong on purpose
    "a column is short": lambda c: c.update(size=c["size"][:-1]),
    "a name too many": lambda c: c.update(names=c["names"] + b"\0x"),
    "a folder that is not there": lambda c: _set(c, "folder", 0, "<I", 9),
    "an unknown kind": lambda c: _set(c, "kind", 2, "<B", 4),
    "an unknown codec": lambda c: _set(c, "codec", 2, "<B", 2),
    "a set-user-ID bit": lambda c: _set(c, "mode", 2, "<H", 0o4755),
    "B5 a body past the end": lambda c: _set(c, "stored", 9, "<I", 2**31),
    "B5 overlapping bodies": lambda c: _set(c, "offset", 3, "<I", 0),
    "B5 a huge size": lambda c: _set(c, "size", 2, "<Q", 2**63),
    "B5 a raw size that differs": lambda c: _set(c, "size", 3, "<Q", 255),
    "a link without target": lambda c: c.update(links=b""),
    "a link's target too long": lambda c: c.update(links=c["links"] + b"x"),
    "an extent of no entry": lambda c: _set(c, "extents", 0, "<I", 99),
    "an extent outside its file": lambda c: c.update(extents=part(3, 2**40, 9)),
    "an unaligned extent": lambda c: c.update(extents=part(3, 4096, 1024)),
    "extent i of n, i = n": lambda c: c.update(extents=part(4, 65536, 1024)),
    "a stamp of no entry": lambda c: c.update(stamps=u32(99, 0) + bytes(16)),
    "a ragged stamp": lambda c: c.update(stamps=bytes(23)),
}  # fmt: skip


def void(_: object) -> None:
    pass


@each_row("name", BAD_HEADERS)
def test_B5_header_that_contradicts_itself(name: str) -> None:
    read(resealed(build(), void))  # breaks nothing by itself
    with pytest.raises(CorruptError):
        read(resealed(build(), BAD_HEADERS[name]))


@each_row(
    "raw",
    [
        b"\xdf\xff\xff\xff\xff",  # N1: a map of 2^32-1
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,  # N2: nesting
        b"\x82\xa5names\xc4\x00\xa5names\xc4\x00",  # N3: a key twice
        b"\x81\xa5names\xc7\x01\x05x",  # N3: an extension type
        b"\x80\x80",  # N3: trailing bytes
        b"",
    ],
)
def test_N1_N2_N3_hostile_msgpack(raw: bytes) -> None:
    with pytest.raises(FormatError):
        read(with_header(build(), raw, raw, 0))


def test_header_bomb_is_refused_before_it_is_decoded() -> None:
    bomb = lz4.block.compress(bytes(64 << 20), store_size=False)
    chunk = with_header(build(), bomb, b"", 1, raw_bytes=64 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError):
            read(chunk)
        assert tracemalloc.get_traced_memory()[1] < 8 * len(chunk)
    finally:
        tracemalloc.stop()


def test_B12_body_whose_real_size_differs() -> None:
    packed = lz4.block.compress(bytes(100_000), store_size=False)
    sum_ = xxh3_64_intdigest(bytes(100_000))
    assert len(decode(memoryview(packed), Codec.LZ4, 100_000, sum_)) == 100_000
    for size in (99_999, 100_001, 2**62):
        with pytest.raises(CorruptError):
            decode(memoryview(packed), Codec.LZ4, size, sum_)


@each_row(
    ("folder", "name"),
    [(b"..", b"x"), (b"", b".."), (b"", b"."), (b"a//b", b"c"), (b"/abs", b"x"), (b"", b"a/b"),
     (b"", b"n" * 256), (b"a", b"")],
)  # fmt: skip
def test_B11_bad_paths_are_skipped_and_named(folder: bytes, name: bytes) -> None:
    def change(columns: dict[str, bytes]) -> None:
        folders = columns["folders"].split(b"\0")
        names = columns["names"].split(b"\0")
        names[3] = name
        columns["names"] = b"\0".join(names)
        columns["folders"] = b"\0".join([*folders, folder])
        _set(columns, "folder", 3, "<I", len(folders))

    header = read(resealed(build(), change))
    assert list(header.faults) == [3]
    rows, stamps = header.rows()
    assert len(rows) == len(header) - 1
    assert stamps == {7: stamp(EARLIER, 7)}
    assert b"a/text" in [rows.path(i) for i in range(len(rows))]


def test_B14_builder_notices_memory_that_changed() -> None:
    builder = ChunkBuilder(IDENTITY, 1 << 20)
    builder.room(4)[:4] = b"good"
    builder.add_file((b"", b"f"), 0o644, 0, 4)
    builder._body[1] ^= 1
    with pytest.raises(CorruptError, match="memory"):
        builder.seal(ID)


def test_rows_keep_the_last_entry_of_a_path() -> None:
    builder = ChunkBuilder(IDENTITY, 1 << 20)
    for text in (b"one", b"two"):
        builder.room(3)[:3] = text
        builder.add_file((b"d", b"f"), 0o644, 0, 3)
    _, header = builder.seal(ID)
    rows, stamps = header.rows()
    assert (stamps, rows.records["place"].tolist()) == ({}, [1])
    assert rows.records["checksum"].tolist() == [xxh3_64_intdigest(b"two")]


def test_Z12_foreign_stamps_are_refused() -> None:
    """A file that takes longer than the put window has another error: a new upload would not cure
    it."""
    header = read(build())  # its stamp is of an earlier chunk of the same writer
    age_s = int.from_bytes(ID[:4], "big") - int.from_bytes(EARLIER[:4], "big")
    header.check_stamps(age_s)
    with pytest.raises(CorruptError, match=r"a/large took 1 s so far to upload.* within 0 s") as no:
        header.check_stamps(age_s - 1)
    assert "split the file" in no.value.advice
    builder = ChunkBuilder(IDENTITY, 1 << 20)
    for value in (stamp(EARLIER, 0), stamp(ChunkId(b"\xff" * 16), 0), stamp(ID, 5)):
        builder.clear()
        builder.add_folder((b"", b"d"), 0o755, 0)
        builder.set_stamp(value)
        _, header = builder.seal(ID)
        with pytest.raises(CorruptError, match="stamp"):
            header.check_stamps(3600)


NAMES = st.binary(min_size=1, max_size=20).filter(
    lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b"..")
)


@given(
    entries=st.lists(
        st.tuples(
            st.lists(NAMES, max_size=3),
            NAMES,
            st.sampled_from(Kind),
            st.binary(max_size=300) | st.integers(0, 9000).map(lambda n: b"ab" * n),
            st.integers(0, 0o777),
            st.integers(-(2**63), 2**63 - 1),
        ),
        max_size=12,
    ),
    compress=st.sampled_from(["auto", "lz4", "none"]),
)
def test_round_trip(
    entries: list[tuple[list[bytes], bytes, Kind, bytes, int, int]], compress: str
) -> None:
    builder = ChunkBuilder(IDENTITY, 1 << 16, compress)
    expected: list[tuple[Kind, tuple[bytes, bytes], int, int, bytes]] = []
    for folders, name, kind, data, mode, mtime_ns in entries:
        path = (b"/".join(folders), name)
        match kind:
            case Kind.FILE:
                builder.room(len(data))[: len(data)] = data
                builder.add_file(path, mode, mtime_ns, len(data))
            case Kind.LINK:
                mode, data = 0o777, data.replace(b"\0", b"-") or b"t"
                builder.add_link(path, mtime_ns, data)
            case Kind.FOLDER:
                data = b""
                builder.add_folder(path, mode, mtime_ns)
            case Kind.TOMBSTONE:
                mode, mtime_ns, data = 0, 0, b""
                builder.add_tombstone(path)
        expected.append((kind, path, mode, mtime_ns, data))
    parts, _ = builder.seal(ID)
    chunk = b"".join(parts)
    header = read(chunk)
    found = []
    for place in range(len(header)):
        record = header.records[place]
        kind = Kind(int(record["kind"]))
        data = header.links.get(place, b"")
        if kind == Kind.FILE:
            data = content(chunk, header, place)
        path = (header.folders[header.folder[place]], header.names[place])
        found.append((kind, path, int(record["mode"]), int(record["mtime_ns"]), data))
    assert found == expected


@given(data=st.binary(max_size=600), codec=st.integers(0, 1))
def test_any_bytes_are_a_chunk_or_one_format_error(data: bytes, codec: int) -> None:
    """Also any header under a right checksum."""
    with pytest.raises(FormatError):
        parse_preamble(data, object_bytes=len(data))
    with pytest.raises(FormatError):
        read(with_header(build(), data, data, codec))
