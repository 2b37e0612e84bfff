"""The chunk whose bytes are kept in `golden/`: one entry of each kind of format version 1."""

from pathlib import Path
from uuid import UUID

from diesel_fs.format.chunk import ExtentInfo
from diesel_fs.format.chunk_builder import ChunkBuilder
from diesel_fs.format.chunk_id import parse_chunk_id, stamp

GOLDEN = Path(__file__).parent / "golden" / "chunk-v1"
IDENTITY = UUID("00112233-4455-6677-8899-aabbccddeeff")
ID = parse_chunk_id("Pk32WVAw-----HSqrF---F")
EARLIER = parse_chunk_id("Pk32WFAw-----HSqrF---F")
TEXT = b"the same words, " * 64
NOISE = bytes(range(256))


def build() -> bytes:
    builder = ChunkBuilder(IDENTITY, 1 << 20, "lz4")

    def file(path: tuple[bytes, bytes], content: bytes, size: int, part: ExtentInfo | None) -> None:
        builder.room(len(content))[: len(content)] = content
        builder.add_file(path, 0o4755, -1, size, part)

    builder.add_folder((b"", b""), 0o755, 1_700_000_000_123_456_789)
    builder.add_folder((b"", b"a"), 0o1777, 0)
    file((b"a", b"text"), TEXT, len(TEXT), None)
    file((b"a", b"noise"), NOISE, len(NOISE), None)
    file((b"a", b"empty"), b"", 0, None)
    file((b"a/b", b"\xff\nnot utf-8"), b"x", 1, None)
    builder.add_link((b"a", b"link"), 5_000_000_000_000_000_000, b"../\xfe target")
    builder.add_tombstone((b"gone", b"file"))
    file((b"a", b"large"), NOISE * 4, 65536 * 3 + 1024, ExtentInfo(3, 4, 65536 * 3, 1024))
    builder.set_stamp(stamp(EARLIER, 7))
    file((b"a", b"n" * 255), b"long name", 9, None)
    parts, _ = builder.seal(ID)
    return b"".join(parts)
