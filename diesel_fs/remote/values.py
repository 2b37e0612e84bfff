"""Encodes and decodes requests and answers (`net/WIRE.md`, section 5), at both ends.

Decoding checks every value and raises UsageError. Does no I/O; any thread.
"""

from collections.abc import Sequence
from uuid import UUID

import numpy as np

from ..errors import UsageError
from ..format.entries import CHUNK_RANGE, ChunkId, ChunkRanges, Kind
from ..format.snapshot.reader import Stats
from ..names import check_dataset_name
from ..net.frames import READ_BYTES_MAX
from ..net.messages import LENGTH, Fields, Message, Value
from ..repository.catalog import DatasetInfo
from ..repository.provenance import ArchiveRecord
from ..storage.metadata.store import DatasetHead

PARTS_MAX = 65_536  # parts of chunks in one request
PATHS_MAX = 1 << 18  # paths or names in one request
NO_KIND = 255
"""The kind of a missing entry in a column."""

_COLUMNS = (("kind", "<u1"), ("mode", "<u2"), ("size", "<u8"), ("mtime_ns", "<i8"))


def info_message(info: DatasetInfo) -> Message:
    """The field `marker` has the dataset's head (version and counts), or None if unknown."""
    head = info.head
    head_message: Message | None = None
    if head is not None:
        head_message = {
            "version": head.version,
            "files": head.files,
            "bytes": head.bytes,
            "chunks": head.chunks,
            "digest": head.digest.to_bytes(16, "big"),
            "newest": head.newest,
        }
    return {
        "name": info.name,
        "identity": info.identity.bytes,
        "created_ns": info.created_ns,
        "marker": head_message,
    }


def parse_info(value: Value) -> DatasetInfo:
    message = _map(value, "a dataset")
    fields = Fields(message, "a dataset")
    name = check_dataset_name(fields.text("name"))
    identity = parse_identity(fields)
    created_ns = fields.integer("created_ns")
    head_message = message.get("marker")
    head = None
    if head_message is not None:
        head_fields = Fields(_map(head_message, "a marker"), "a marker")
        version, files, content, chunks = map(
            head_fields.integer, ("version", "files", "bytes", "chunks")
        )
        digest, newest = (head_fields.octets(each, 16) for each in ("digest", "newest"))
        head = DatasetHead(
            identity, name, version, files, content, chunks, int.from_bytes(digest, "big"),
            ChunkId(newest),
        )  # fmt: skip
    return DatasetInfo(name, identity, created_ns, head)


def records_payload(records: Sequence[ArchiveRecord]) -> list[bytes]:
    """The length of each record precedes it."""
    packed = [record.pack() for record in records]
    return [piece for each in packed for piece in (LENGTH.pack(len(each)), each)]


def parse_records(payload: bytes | bytearray | memoryview) -> list[ArchiveRecord]:
    records, at, data = [], 0, memoryview(payload)
    while at < len(data):
        if len(data) - at < LENGTH.size:
            raise UsageError("records of archives are cut off")
        (size,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size
        if size > len(data) - at:
            raise UsageError("records of archives are cut off")
        records.append(ArchiveRecord.unpack(data[at : at + size]))
        at += size
    return records


def parse_identity(fields: Fields) -> UUID:
    return UUID(bytes=fields.octets("identity", 16))


def parse_list(answer: Message, name: str) -> list[Value]:
    found = answer.get(name)
    if not isinstance(found, list):
        raise UsageError(f"an answer: bad {name!r}: it is a list")
    return found


def parts_message(parts: Sequence[tuple[ChunkId, int, int]]) -> bytes:
    """Parts are (chunk, start, size)."""
    ranges = np.zeros(len(parts), CHUNK_RANGE)
    for i, (chunk, start, size) in enumerate(parts):
        ranges[i] = (np.void(chunk), start, size)
    return ranges.tobytes()


def parse_parts(fields: Fields) -> ChunkRanges:
    packed = fields.octets("parts")
    count, rest = divmod(len(packed), CHUNK_RANGE.itemsize)
    if rest or count > PARTS_MAX:
        fields.bad("parts", f"it is at most {PARTS_MAX} records of {CHUNK_RANGE.itemsize} bytes")
    ranges = np.frombuffer(packed, CHUNK_RANGE)
    if int(ranges["size"].sum(dtype=np.uint64)) > READ_BYTES_MAX:
        fields.bad("parts", f"they have at most {READ_BYTES_MAX} bytes together")
    return ranges


def paths_message(paths: Sequence[bytes]) -> bytes:
    """`paths` must not be empty."""
    return b"\0".join(paths)


def parse_paths(fields: Fields) -> list[bytes]:
    packed = fields.octets("paths")
    if packed.count(b"\0") >= PATHS_MAX:
        fields.bad("paths", f"they are at most {PATHS_MAX}")
    return packed.split(b"\0")


def columns_message(stats: Stats) -> Message:
    """A missing entry has the kind TOMBSTONE in `stats`, and `NO_KIND` in the message."""
    kind = stats.kind.astype(np.uint8)
    kind[kind == Kind.TOMBSTONE] = NO_KIND
    return {
        "kind": kind.tobytes(),
        "mode": stats.mode.astype("<u2").tobytes(),
        "size": stats.size.astype("<u8").tobytes(),
        "mtime_ns": stats.mtime_ns.astype("<i8").tobytes(),
    }


def parse_columns(fields: Fields, count: int) -> Stats:
    kinds, *others = (
        np.frombuffer(fields.octets(name, count * np.dtype(dtype).itemsize), dtype).copy()
        for name, dtype in _COLUMNS
    )
    kinds[kinds == NO_KIND] = Kind.TOMBSTONE
    if count and int(kinds.max()) > Kind.TOMBSTONE:
        fields.bad("kind", "it is of a known kind")
    return Stats(kinds, *others)


def _map(value: Value, what: str) -> Message:
    if not isinstance(value, dict):
        raise UsageError(f"{what}: it is a map")
    return value
