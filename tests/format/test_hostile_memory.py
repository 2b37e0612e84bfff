"""Reading a hostile chunk header takes bounded memory, which these tests measure."""

import os
import struct
import tracemalloc

import lz4.block
import msgpack
import pytest

from diesel_fs.errors import CorruptError
from diesel_fs.format.chunk import (
    ENTRIES_MAX,
    EXTENT_ALIGNMENT,
    PREAMBLE_BYTES,
    ExtentInfo,
    parse_header,
    parse_preamble,
)
from diesel_fs.format.chunk_builder import ChunkBuilder
from diesel_fs.format.chunk_id import stamp
from diesel_fs.format.entries import Kind

from .golden_chunk import EARLIER, ID, IDENTITY
from .test_chunk import with_header

MANY = 10_000_000
SOUND = 8192
FIXED = {"kind": 1, "mode": 2, "size": 8, "mtime_ns": 8, "offset": 4, "stored": 4, "codec": 1,
         "checksum": 8, "folder": 4}  # fmt: skip
BYTES_PER_ENTRY = 700


def bodyless(entries: int, columns: dict[str, bytes]) -> bytes:
    """Noise in the last column that is checked keeps the header within the ratio that lz4 may
    have."""
    header = {name: bytes(FIXED[name] * entries) for name in FIXED if name not in columns}
    header |= {"kind": bytes([Kind.FOLDER]) * entries, "folders": b"", "links": b""}
    header |= {"names": b"\0" * (entries - 1), "extents": b"", "stamps": b"", **columns}
    header["stamps"] += os.urandom(sum(map(len, header.values())) // 30 // 24 * 24)
    raw = msgpack.packb(header)
    empty = b"".join(ChunkBuilder(IDENTITY, 1).seal(ID)[0])
    return with_header(empty, lz4.block.compress(raw, store_size=False), raw, 1, entries=entries)


def peak_of_reading(chunk: bytes) -> tuple[int, str]:
    """Return the peak of memory, and the error."""
    tracemalloc.start()
    try:
        complaint = "nothing"
        try:
            preamble = parse_preamble(chunk)
            parse_header(preamble, chunk[PREAMBLE_BYTES : preamble.body_start])
        except CorruptError as error:
            complaint = error.message
        return tracemalloc.get_traced_memory()[1], complaint
    finally:
        tracemalloc.stop()


def allowed_bytes(chunk: bytes, entries: int) -> int:
    """Return the bound of FORMAT.md, plus 1 MiB."""
    stored, raw = struct.unpack_from("<II", chunk, 64)
    return int(stored + 2 * raw + BYTES_PER_ENTRY * entries + (1 << 20))


HOSTILE: dict[str, tuple[int, dict[str, bytes]]] = {
    "millions of entries, of which there is but one column": (
        MANY,
        dict.fromkeys((*FIXED, "names"), b"") | {"kind": bytes(MANY)},
    ),
    "millions of names": (1000, {"names": b"abc\0" * MANY}),
    "millions of folders": (1000, {"folders": b"abc\0" * MANY}),
    "millions of folders, and an entry in the last": (
        1000,
        {"folders": b"abc\0" * (MANY - 1), "folder": struct.pack("<I", MANY - 1) * 1000},
    ),
    "millions of targets for a link": (
        1000,
        {"links": b"abc\0" * MANY, "kind": bytes([Kind.LINK]) + bytes([Kind.FOLDER]) * 999},
    ),
    "millions of extents": (1000, {"extents": bytes(28 * 1_500_000)}),
    "millions of stamps": (1000, {"stamps": bytes(24 * 1_500_000)}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_N1_a_hostile_header_takes_no_more_memory_than_its_length_allows(name: str) -> None:
    entries, columns = HOSTILE[name]
    chunk = bodyless(entries, columns)
    peak, complaint = peak_of_reading(chunk)
    assert complaint != "nothing"
    assert peak < allowed_bytes(chunk, min(entries, ENTRIES_MAX))


def test_a_valid_header_stays_within_the_same_bound() -> None:
    """Every entry is an extent with a stamp: no valid header needs more memory for its length."""
    builder = ChunkBuilder(IDENTITY, 8 << 20, "none")
    for number in range(SOUND):
        builder.room(1)[:] = b"x"
        path = (b"", b"%x" % number)
        builder.add_file(
            path, 0o644, 0, EXTENT_ALIGNMENT + 1, ExtentInfo(1, 2, EXTENT_ALIGNMENT, 1)
        )
        builder.set_stamp(stamp(EARLIER, number))
    chunk = b"".join(builder.seal(ID)[0])
    peak, complaint = peak_of_reading(chunk)
    assert complaint == "nothing"
    assert peak < allowed_bytes(chunk, SOUND)


def test_a_chunk_with_too_many_entries_is_refused() -> None:
    parse_preamble(bodyless(ENTRIES_MAX, {}))
    with pytest.raises(CorruptError):
        parse_preamble(bodyless(ENTRIES_MAX + 1, {}))
