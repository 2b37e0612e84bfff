"""Writes and reads the bytes of a chunk (FORMAT.md, section 4). Any thread.

`chunk_builder.py` gathers a chunk's entries. Lengths and counts are checked before any memory is
taken for them.
"""

import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, NoReturn
from uuid import UUID

import lz4.block
import msgpack
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from ..errors import CorruptError, ForeignError, FormatError, NewerVersionError, TruncatedError
from ..names import shown
from .chunk_id import chunk_id_text, id_seconds, same_writer, stamp, stamp_fields
from .entries import (
    EXTENT,
    MODE_MASK,
    RECORD,
    ROOT,
    ChunkId,
    Codec,
    Kind,
    Names,
    Rows,
    Stamp,
    join,
    name_fault,
    path_fault,
)

FORMAT_VERSION = 1
EXTENT_ALIGNMENT = 65536
"""Extents begin at multiples of this in their file, so that no memory page holds bytes of two."""

CHUNK_BYTES_DEFAULT = 4 << 20
CHUNK_BYTES_MIN = 64 << 10
CHUNK_BYTES_MAX = 1 << 30
"""A writer ends a chunk at this size: the default, and the limits of a user's choice."""

OBJECT_BYTES_MAX = 1 << 32
"""The largest chunk that a reader accepts. Offsets have 32 bits, and it bounds the reader's memory.
"""

ENTRIES_MAX = 65_536
"""Limits the time and memory to decode a header, and a commit's transaction."""

_MAGIC = b"\x93DIESEL\n"
_PREAMBLE = struct.Struct("<8sHHI16s16sQQIIIIQQ")
PREAMBLE_BYTES = _PREAMBLE.size
_KNOWN_FLAGS = 0

# A small hostile object cannot make a reader take much memory (FORMAT.md, section 4)
_HEADER_RATIO_MAX = 32
_HEADER_SLACK_BYTES = 4096
_BODY_RATIO_MAX = 16
_BODY_SLACK_BYTES = 4 << 20

_LZ4_SAVING_DIVISOR = 8  # lz4 is used if it saves this part (one in 8)

_COLUMNS: tuple[tuple[str, str], ...] = (
    ("kind", "u1"),
    ("mode", "<u2"),
    ("size", "<u8"),
    ("mtime_ns", "<i8"),
    ("offset", "<u4"),
    ("stored", "<u4"),
    ("codec", "u1"),
    ("checksum", "<u8"),
)
_KEYS = frozenset(
    ("folders", "folder", "names", "links", "extents", "stamps", *(name for name, _ in _COLUMNS))
)
_ENTRY_BYTES_MIN = sum(np.dtype(kind).itemsize for _, kind in _COLUMNS) + 4 + 1
"""The least that an entry takes in a decoded header: its columns, its folder's number and a NUL."""
_EXTENT_ROW_BYTES, _STAMP_ROW_BYTES = 4 + 4 + 4 + 8 + 8, 4 + 4 + 16

_Codecs = npt.NDArray[np.uint8] | npt.NDArray[np.uint32]


class ExtentInfo(NamedTuple):
    """The part of a file that an entry holds, if the file's extents lie in several chunks."""

    number: int  # from 0
    total: int  # the file's extents
    start: int  # in the file, bytes
    size: int  # content, bytes


@dataclass(frozen=True, slots=True)
class Preamble:
    """The first 96 bytes of a chunk."""

    identity: UUID
    id: ChunkId
    object_bytes: int
    body_bytes: int
    header_codec: int
    header_stored: int
    header_raw: int
    entries: int
    header_checksum: int

    @property
    def body_start(self) -> int:
        return PREAMBLE_BYTES + self.header_stored


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """A chunk's preamble and columns, checked. `folder` holds each entry's index in `folders`. The
    mappings are by place (the entry's number). Offsets in `records` count from the start of the
    object. `stamps` has only the stamps of copies and of later extents, which are not (this chunk's
    ID, the entry's place). `faults` says why a path is forbidden; readers skip such entries."""

    preamble: Preamble
    folders: tuple[bytes, ...]
    folder: npt.NDArray[np.uint32]
    names: Names
    records: npt.NDArray[np.void]
    links: Mapping[int, bytes]
    extents: Mapping[int, ExtentInfo]
    stamps: Mapping[int, Stamp]
    faults: Mapping[int, str]

    def __len__(self) -> int:
        return len(self.names)

    def path(self, place: int) -> bytes:
        return join(self.folders[self.folder[place]], self.names[place])

    def stamp(self, place: int) -> Stamp:
        return self.stamps.get(place) or stamp(self.preamble.id, place)

    def content_bytes(self, place: int) -> int:
        """The length of the entry's content in this chunk."""
        part = self.extents.get(place)
        if part is not None:
            return part.size
        record = self.records[place]
        return int(record["size"]) if record["kind"] == Kind.FILE else 0

    def rows(self) -> tuple[Rows, dict[int, Stamp]]:
        """The rows that a metadata store commits, one for the last entry of each allowed path and
        extent; and their `stamps`, by row number."""
        if not self.faults and not self._has_repeats():
            return self._rows_of(range(len(self)), self.folder, self.names, self.records)
        last = {
            (folder, name, self.extents.get(place)): place
            for place, (folder, name) in enumerate(
                zip(self.folder.tolist(), self.names, strict=True)
            )
            if place not in self.faults
        }
        places = sorted(last.values())
        names = [self.names[place] for place in places]
        return self._rows_of(places, self.folder[places], names, self.records[places])

    def _rows_of(
        self,
        places: Sequence[int],
        folder: npt.NDArray[np.uint32],
        names: Sequence[bytes],
        records: npt.NDArray[np.void],
    ) -> tuple[Rows, dict[int, Stamp]]:
        tails: dict[int, bytes] = {}
        if self.links or self.extents:
            tails = {i: tail for i, place in enumerate(places) if (tail := self.tail(place))}
        stamps: dict[int, Stamp] = {}
        if self.stamps:
            known = self.stamps
            stamps = {i: known[place] for i, place in enumerate(places) if place in known}
        chunk = np.zeros(len(places), np.uint32)
        rows = Rows(self.folders, folder, names, records, chunk, [self.preamble.id], tails)
        return rows, stamps

    def tail(self, place: int) -> bytes:
        """A link's target, or a file's extent if it has several; otherwise empty."""
        part = self.extents.get(place)
        if part is None:
            return self.links.get(place, b"")
        record = self.records[place]
        extent = np.zeros(1, EXTENT)
        extent["chunk"] = np.void(self.preamble.id)
        extent["start"], extent["size"], extent["number"] = part.start, part.size, part.number
        extent["place"] = place
        for name in ("checksum", "offset", "stored", "codec"):
            extent[name] = record[name]
        return extent.tobytes()

    def _has_repeats(self) -> bool:
        pairs = zip(self.folder.tolist(), self.names, strict=True)
        return len(set(self.names)) < len(self) and len(set(pairs)) < len(self)

    def check_stamps(self, put_window_s: int) -> None:
        """Raise CorruptError for a stamp that a client may not choose (FORMAT.md, section 5).
        `put_window_s`: the longest upload of one file."""
        own = self.preamble.id
        for place, value in self.stamps.items():
            first, _ = stamp_fields(value)
            part = self.extents.get(place)
            later_extent = part is not None and part.number > 0
            age_s = id_seconds(own) - id_seconds(first)
            if not (later_extent and first < own and same_writer(first, own)):
                raise CorruptError(f"chunk {chunk_id_text(own)}: entry {place} has a foreign stamp")
            if age_s > put_window_s:
                raise CorruptError(
                    f"{shown(self.path(place))} took {age_s} s so far to upload: a file must be"
                    f" uploaded within {put_window_s} s",
                    advice="use a faster link to the store, or split the file",
                )


@dataclass(slots=True)
class Entries:
    """The columns of a chunk that is being built. Bodies (the stored contents) follow one another,
    so their lengths give their offsets."""

    kind: bytearray = field(default_factory=bytearray)
    mode: "array[int]" = field(default_factory=partial(array, "H"))
    size: "array[int]" = field(default_factory=partial(array, "Q"))
    mtime_ns: "array[int]" = field(default_factory=partial(array, "q"))
    stored: "array[int]" = field(default_factory=partial(array, "I"))
    codec: bytearray = field(default_factory=bytearray)
    checksum: "array[int]" = field(default_factory=partial(array, "Q"))
    names: list[bytes] = field(default_factory=list)
    folder: "array[int]" = field(default_factory=partial(array, "I"))
    folders: dict[bytes, int] = field(default_factory=dict)
    links: list[bytes] = field(default_factory=list)
    extents: dict[int, ExtentInfo] = field(default_factory=dict)
    stamps: dict[int, Stamp] = field(default_factory=dict)


def write_front(
    identity: UUID, chunk: ChunkId, entries: Entries, body_bytes: int
) -> tuple[bytes, bytes]:
    """Return the bytes of the preamble and of the stored header."""
    raw = _pack_header(entries)
    stored = lz4.block.compress(raw, store_size=False)
    codec = Codec.LZ4
    if len(stored) >= len(raw) or len(raw) > _header_raw_max(len(stored)):
        stored, codec = raw, Codec.RAW
    front = _PREAMBLE.pack(
        _MAGIC,
        FORMAT_VERSION,
        codec,
        0,
        identity.bytes,
        chunk,
        PREAMBLE_BYTES + len(stored) + body_bytes,
        body_bytes,
        len(stored),
        len(raw),
        len(entries.names),
        0,
        xxh3_64_intdigest(stored),
        0,
    )[:-8]
    return front + struct.pack("<Q", xxh3_64_intdigest(front)), stored


def pack_body(content: memoryview) -> bytes | None:
    """The content packed by lz4; None if that saves too little, or the format forbids it."""
    packed: bytes = lz4.block.compress(content, store_size=False)
    size = len(content)
    if len(packed) > size - max(size // _LZ4_SAVING_DIVISOR, 1) or size > _body_raw_max(
        len(packed)
    ):
        return None
    return packed


def parse_preamble(
    data: bytes | memoryview,
    *,
    identity: UUID | None = None,
    id: ChunkId | None = None,  # noqa: A002 (the field's own name)
    object_bytes: int | None = None,
) -> Preamble:
    """Parse the first bytes of a chunk, which must have the given identity, ID and object length.
    Raises TruncatedError, ForeignError, CorruptError or NewerVersionError."""
    if len(data) < PREAMBLE_BYTES:
        raise TruncatedError(f"truncated chunk: {len(data)} bytes are less than a preamble")
    front = bytes(data[:PREAMBLE_BYTES])
    (
        magic, version, codec, flags, raw_identity, raw_id, total, body_bytes,
        stored, raw, entries, zero, header_checksum, checksum,
    ) = _PREAMBLE.unpack(front)  # fmt: skip
    if magic != _MAGIC:
        raise ForeignError("not a chunk (another magic number)", offset=0)
    if checksum != xxh3_64_intdigest(front[:-8]):
        raise CorruptError("corrupt chunk: the preamble's checksum does not match", offset=88)
    if version != FORMAT_VERSION:
        raise NewerVersionError(f"the chunk needs format version {version} (known: 1)", offset=8)
    if flags & ~_KNOWN_FLAGS:
        raise NewerVersionError(f"the chunk needs features {flags:#x} (none is known)", offset=12)
    preamble = Preamble(
        UUID(bytes=raw_identity), ChunkId(raw_id), total, body_bytes, codec, stored, raw, entries,
        header_checksum,
    )  # fmt: skip
    if identity is not None and preamble.identity != identity:
        raise ForeignError(f"foreign chunk: it belongs to dataset {preamble.identity}", offset=16)
    if id is not None and preamble.id != id:
        raise ForeignError(f"foreign chunk: it is {chunk_id_text(preamble.id)}", offset=32)
    if (
        zero
        or codec not in (Codec.RAW, Codec.LZ4)
        or total != PREAMBLE_BYTES + stored + body_bytes
        or total > OBJECT_BYTES_MAX
        or (codec == Codec.RAW and raw != stored)
        or raw > _header_raw_max(stored)
        or entries > ENTRIES_MAX
        or entries * _ENTRY_BYTES_MIN > raw
    ):
        raise CorruptError("corrupt chunk: the preamble contradicts itself", offset=48)
    if object_bytes is not None and object_bytes < total:
        raise TruncatedError(f"truncated chunk: {object_bytes} of {total} bytes")
    if object_bytes is not None and object_bytes > total:
        raise CorruptError(f"corrupt chunk: {object_bytes - total} bytes behind its end")
    return preamble


def parse_header(preamble: Preamble, data: bytes | memoryview) -> ChunkHeader:
    """Parse and check a header. `data` begins after the preamble. Raises TruncatedError or
    CorruptError."""
    if len(data) < preamble.header_stored:
        raise TruncatedError(
            f"truncated chunk: {len(data)} of {preamble.header_stored} header bytes"
        )
    stored = data[: preamble.header_stored]
    if xxh3_64_intdigest(stored) != preamble.header_checksum:
        _corrupt("the header's checksum does not match")
    columns = _unpack(preamble, stored)
    count = preamble.entries
    records = np.zeros(count, RECORD)
    for name, kind in _COLUMNS:
        records[name] = _column(columns, name, kind, count)
    folder = _column(columns, "folder", "<u4", count).astype(np.uint32)
    _check_count(columns["names"], count, "names")
    names = Names(columns["names"], count)
    if (folder_count := int(folder.max(initial=0)) + 1) > max(count, 1):
        _corrupt("it has more folders than entries")
    folders = _split(columns["folders"], folder_count, "folders")
    records["offset"] += np.uint32(preamble.body_start)
    records["place"] = np.arange(count, dtype=np.uint32)
    links = _links(columns["links"], records)
    extents = _extents(columns["extents"], records)
    _check_bodies(preamble, records, extents)
    return ChunkHeader(
        preamble=preamble,
        folders=folders,
        folder=folder,
        names=names,
        records=records,
        links=links,
        extents=extents,
        stamps=_stamps(columns["stamps"], count),
        faults=_path_faults(folders, folder, names, records),
    )


def decode(stored: memoryview, codec: int, size: int, checksum: int) -> memoryview:
    """A body's checked content; `stored` itself if it is raw. Raises CorruptError. Takes memory for
    at most `size` bytes, and no more than the format allows."""
    content = stored
    if codec == Codec.LZ4:
        if size > _body_raw_max(len(stored)):
            _corrupt("a body decodes to more than is allowed")
        try:
            content = memoryview(lz4.block.decompress(stored, uncompressed_size=size))
        except (lz4.block.LZ4BlockError, ValueError, MemoryError):
            _corrupt("a body is no lz4 block")
    if len(content) != size:
        _corrupt(f"a body has {len(content)} bytes, not {size}")
    if xxh3_64_intdigest(content) != checksum:
        _corrupt("a body's checksum does not match")
    return content


def damaged_places(
    header: ChunkHeader, body: memoryview, body_start: int | None = None
) -> list[int]:
    """The places of entries that contradict their bytes in `body`, or have bytes outside it.
    `body_start` is the offset of a partial `body` in the object."""
    start = header.preamble.body_start if body_start is None else body_start
    places = np.flatnonzero(header.records["stored"])
    records = header.records[places]
    sizes = records["size"].astype(np.int64)
    for i, place in enumerate(places.tolist() if header.extents else ()):
        if place in header.extents:
            sizes[i] = header.extents[place].size
    starts = records["offset"].astype(np.int64) - start
    ends = starts + records["stored"]
    # `map` checks raw bodies, nearly all, without Python code for each
    contents = map(body.__getitem__, map(slice, starts.tolist(), ends.tolist()))
    sums = np.fromiter(map(xxh3_64_intdigest, contents), np.uint64, len(places))
    is_good = records["codec"] == Codec.RAW
    is_good &= (records["stored"] == sizes) & (sums == records["checksum"])
    bad: list[int] = []
    columns = (places, starts, ends, records["codec"], sizes, records["checksum"])
    rest = zip(*(column[~is_good].tolist() for column in columns), strict=True)
    for place, at, end, codec, size, checksum in rest:
        try:
            decode(body[at:end], codec, size, checksum)
        except FormatError:
            bad.append(place)
    return bad


def _pack_header(entries: Entries) -> bytes:
    stored = np.array(entries.stored, np.int64)
    fixed = {
        "kind": entries.kind,
        "mode": entries.mode,
        "size": entries.size,
        "mtime_ns": entries.mtime_ns,
        "offset": np.where(stored > 0, np.cumsum(stored) - stored, 0),
        "stored": stored,
        "codec": entries.codec,
        "checksum": entries.checksum,
    }
    # Place, and the fields of `ExtentInfo`
    extents = np.array(
        [(place, *part) for place, part in entries.extents.items()],
        dtype=[("p", "<u4"), ("n", "<u4"), ("c", "<u4"), ("a", "<u8"), ("s", "<u8")],
    )
    stamps = [(place, *stamp_fields(value)) for place, value in entries.stamps.items()]
    columns: dict[str, bytes] = {
        "folders": b"\0".join(entries.folders),
        "folder": np.array(entries.folder, "<u4").tobytes(),
        "names": b"\0".join(entries.names),
        "links": b"\0".join(entries.links),
        "extents": b"".join(extents[name].tobytes() for name in ("p", "n", "c", "a", "s")),
        "stamps": np.array([place for place, _, _ in stamps], "<u4").tobytes()
        + np.array([place for _, _, place in stamps], "<u4").tobytes()
        + b"".join(chunk for _, chunk, _ in stamps),
    }
    columns |= {name: np.asarray(fixed[name]).astype(kind).tobytes() for name, kind in _COLUMNS}
    packed: bytes = msgpack.packb(columns, use_bin_type=True)
    return packed


def _header_raw_max(stored: int) -> int:
    return _HEADER_RATIO_MAX * stored + _HEADER_SLACK_BYTES


def _body_raw_max(stored: int) -> int:
    return _BODY_RATIO_MAX * stored + _BODY_SLACK_BYTES


def _corrupt(what: str) -> NoReturn:
    raise CorruptError(f"corrupt chunk: {what}")


def _unpack(preamble: Preamble, stored: bytes | memoryview) -> dict[str, bytes]:
    """The header's columns by key: exactly the known keys, each once, each a `bin`."""

    def without_repeats(pairs: Sequence[tuple[object, object]]) -> dict[object, object]:
        if len({key for key, _ in pairs}) != len(pairs):
            _corrupt("the header repeats a key")
        return dict(pairs)

    try:
        raw = bytes(stored)
        if preamble.header_codec == Codec.LZ4:
            raw = lz4.block.decompress(raw, uncompressed_size=preamble.header_raw)
        if len(raw) != preamble.header_raw:
            _corrupt("the header decodes to another length")
        columns = msgpack.unpackb(
            raw,
            max_bin_len=len(raw),
            max_str_len=16,
            max_map_len=len(_KEYS),
            max_array_len=0,
            max_ext_len=0,
            object_pairs_hook=without_repeats,
        )
    except FormatError:
        raise
    except Exception as error:  # the decoders raise many kinds
        raise CorruptError("corrupt chunk: the header does not decode") from error
    if not isinstance(columns, dict) or set(columns) != _KEYS:
        _corrupt("the header's keys are not those of version 1")
    if not all(isinstance(value, bytes) for value in columns.values()):
        _corrupt("a column of the header is not a bin")
    return columns


def _column(
    columns: Mapping[str, bytes], name: str, kind: str, count: int
) -> npt.NDArray[np.uint64]:
    dtype: np.dtype[np.uint64] = np.dtype(kind)
    if len(columns[name]) != count * dtype.itemsize:
        _corrupt(f"the column {name!r} has another length")
    return np.frombuffer(columns[name], dtype)


def _split(joined: bytes, count: int, what: str) -> tuple[bytes, ...]:
    _check_count(joined, count, what)
    return tuple(joined.split(b"\0")) if count else ()


def _check_count(joined: bytes, count: int, what: str) -> None:
    if joined.count(b"\0") != max(count - 1, 0) or (joined and not count):
        _corrupt(f"the {what} do not match its entries")


def _links(joined: bytes, records: npt.NDArray[np.void]) -> dict[int, bytes]:
    places = np.flatnonzero(records["kind"] == Kind.LINK).tolist()
    targets = _split(joined, len(places), "targets of links")
    for place, target in zip(places, targets, strict=True):
        if not target or len(target) != records["size"][place]:
            _corrupt("a link's target has another length")
    return dict(zip(places, targets, strict=True))


def _extents(packed: bytes, records: npt.NDArray[np.void]) -> dict[int, ExtentInfo]:
    """Extents by place; also sets the records' `extents`."""
    count, rest = divmod(len(packed), _EXTENT_ROW_BYTES)
    if rest or count > len(records):
        _corrupt("the column 'extents' has another length")
    places, numbers, totals = np.frombuffer(packed, "<u4", 3 * count).reshape(3, count).tolist()
    starts, sizes = np.frombuffer(packed, "<u8", 2 * count, 12 * count).reshape(2, count).tolist()
    extents: dict[int, ExtentInfo] = {}
    for place, *fields in zip(places, numbers, totals, starts, sizes, strict=True):
        part = ExtentInfo(*fields)
        if place in extents or place >= len(records) or records["kind"][place] != Kind.FILE:
            _corrupt("an extent names an entry that cannot have one")
        if (
            part.total < 2
            or part.number >= part.total
            or part.start % EXTENT_ALIGNMENT
            or not part.size
            or part.start + part.size > int(records["size"][place])
        ):
            _corrupt("an extent does not fit its file")
        extents[place] = part
    records["extents"] = 1
    for place, part in extents.items():
        records["extents"][place] = part.total
    return extents


def _stamps(packed: bytes, count: int) -> dict[int, Stamp]:
    rows, rest = divmod(len(packed), _STAMP_ROW_BYTES)
    if rest or rows > count:
        _corrupt("the column 'stamps' has another length")
    places, places_in_first = np.frombuffer(packed, "<u4", 2 * rows).reshape(2, rows).tolist()
    ids = packed[8 * rows :]
    stamps = {
        place: stamp(ChunkId(ids[16 * i : 16 * i + 16]), places_in_first[i])
        for i, place in enumerate(places)
    }
    if len(stamps) != rows or max(places, default=-1) >= count:
        _corrupt("a stamp names no entry")
    return stamps


def _check_bodies(
    preamble: Preamble, records: npt.NDArray[np.void], extents: Mapping[int, ExtentInfo]
) -> None:
    if not len(records):
        if preamble.body_bytes:
            _corrupt("it has a body but no entries")
        return
    kind, codec, stored = records["kind"], records["codec"], records["stored"].astype(np.int64)
    if int(kind.max()) > Kind.TOMBSTONE or int(codec.max()) > Codec.LZ4:
        _corrupt("an entry's kind or codec is unknown")
    if int(records["mode"].max()) & ~MODE_MASK:
        _corrupt("an entry's mode holds more than permission bits")
    size = np.where(kind == Kind.FILE, records["size"], 0)
    for place, part in extents.items():
        size[place] = part.size
    if _contradictions(codec, records["stored"], size).any():
        _corrupt("an entry's stored length contradicts its size")
    with_body = np.flatnonzero(stored)
    ends = preamble.body_start + np.cumsum(stored[with_body])
    if (records["offset"][with_body] != ends - stored[with_body]).any() or (
        int(ends[-1]) if len(with_body) else preamble.body_start
    ) != preamble.object_bytes:
        _corrupt("the bodies overlap, leave gaps or end elsewhere")


def _contradictions(
    codec: _Codecs, stored: npt.NDArray[np.uint32], size: npt.NDArray[np.uint64]
) -> npt.NDArray[np.bool_]:
    """Flag bodies that cannot decode from their stored length to `size` bytes."""
    is_raw, length = codec == Codec.RAW, stored.astype(np.uint64)
    is_too_much = size > np.uint64(_BODY_RATIO_MAX) * length + np.uint64(_BODY_SLACK_BYTES)
    wrong: npt.NDArray[np.bool_] = np.where(is_raw, size != length, is_too_much)
    wrong |= (size == 0) != (length == 0)
    return wrong


def impossible_bodies(
    codec: _Codecs,
    stored: npt.NDArray[np.uint32],
    size: npt.NDArray[np.uint64],
    offset: npt.NDArray[np.uint32],
    object_bytes: npt.NDArray[np.uint64],
) -> npt.NDArray[np.bool_]:
    """Flag bodies that cannot lie in a chunk whose object has `object_bytes`."""
    start, length = offset.astype(np.uint64), stored.astype(np.uint64)
    is_outside = ((start < PREAMBLE_BYTES) & (length > 0)) | (start + length > object_bytes)
    return _contradictions(codec, stored, size) | is_outside


def _path_faults(
    folders: Sequence[bytes],
    folder: npt.NDArray[np.uint32],
    names: Names,
    records: npt.NDArray[np.void],
) -> dict[int, str]:
    bad_folders = {i: fault for i, path in enumerate(folders) if (fault := path_fault(path))}
    bad = np.flatnonzero(np.isin(folder, list(bad_folders))).tolist() if bad_folders else ()
    faults = {place: bad_folders[int(folder[place])] for place in bad}
    if names.are_allowed():
        return faults  # nearly always
    for place, name in enumerate(names):
        fault = name_fault(name)
        if not fault or place in faults:
            continue
        is_in_root = folders[folder[place]] == ROOT
        if name or not is_in_root or records["kind"][place] != Kind.FOLDER:  # not the root itself
            faults[place] = fault
    return faults
