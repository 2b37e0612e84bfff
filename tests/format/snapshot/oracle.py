"""A model of a dataset, as a plain dict, with which tests compare snapshots.

It shares no code with the package except values. The entry that shows at a path depends on its
own entry and on those below it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import numpy as np
from xxhash import xxh3_64_intdigest

from diesel_fs.format.entries import EXTENT, RECORD, ChunkId, ChunkInfo, Kind, Rows
from diesel_fs.format.snapshot.build import build_snapshot
from diesel_fs.format.snapshot.reader import Snapshot

HOME = 3
"""The number of the chunk that holds empty files."""
IDENTITY = UUID("01234567-89ab-cdef-0123-456789abcdef")


def chunk_id(number: int) -> ChunkId:
    return ChunkId(number.to_bytes(2, "big") + b"\0" * 12 + (number * 7).to_bytes(2, "big"))


@dataclass(frozen=True)
class Part:
    """An extent: the number of its chunk, its place there, and its lengths."""

    chunk: int
    offset: int
    stored: int
    codec: int
    checksum: int
    size: int


@dataclass(frozen=True)
class OwnEntry:
    """The entry that a put has put at a path. A file of several parts has a checksum in each part
    only."""

    kind: Kind
    mode: int = 0o644
    mtime_ns: int = 1
    parts: tuple[Part, ...] = ()
    target: bytes = b""


@dataclass(frozen=True)
class ShownEntry:
    kind: Kind
    mode: int
    size: int
    mtime_ns: int
    parts: tuple[Part, ...] = ()
    target: bytes = b""


State = Mapping[bytes, OwnEntry]


def folders_above(path: bytes) -> list[bytes]:
    parts = path.split(b"/")
    return [b"/".join(parts[:i]) for i in range(len(parts))] if path else []


def shown(state: State) -> dict[bytes, ShownEntry]:
    above = {folder for path in state for folder in folders_above(path)} | {b""}
    result = {}
    for path in sorted(above | set(state), key=lambda path: (depth(path), path.split(b"/"))):
        own = state.get(path)
        if path in above and (own is None or own.kind != Kind.FOLDER):
            result[path] = ShownEntry(Kind.FOLDER, 0o755, 0, 0)
        else:
            assert own is not None
            size = len(own.target) if own.kind == Kind.LINK else sum(p.size for p in own.parts)
            parts = own.parts if size else ()
            result[path] = ShownEntry(own.kind, own.mode, size, own.mtime_ns, parts, own.target)
    return result


def shadowed(state: State) -> list[bytes]:
    above = {folder for path in state for folder in folders_above(path)} | {b""}
    hidden = [p for p, own in state.items() if own.kind != Kind.FOLDER and p in above]
    return sorted(hidden, key=lambda path: (depth(path), path.split(b"/")))


def depth(path: bytes) -> int:
    return path.count(b"/") + 1 if path else 0


def rows_of(changes: Mapping[bytes, OwnEntry | None], seed: int = 0) -> Rows:
    """Rows for these changes (None is a tombstone), in an order that depends on the seed."""
    paths = sorted(changes)
    order = np.random.default_rng(seed).permutation(len(paths)).tolist()
    paths = [paths[i] for i in order]
    used = sorted({HOME, *chunks_in(changes.values())}, reverse=True)
    folders: dict[bytes, int] = {b"not/used": 0}
    records = np.zeros(len(paths), RECORD)
    numbers, names, chunks, tails = [], [], [], {}
    for i, path in enumerate(paths):
        own = changes[path] or OwnEntry(Kind.TOMBSTONE)
        folder, slash, name = path.rpartition(b"/")
        numbers.append(folders.setdefault(folder, len(folders)))
        names.append(name)
        assert slash or not folder
        record = records[i]
        record["kind"], record["mode"], record["mtime_ns"] = own.kind, own.mode, own.mtime_ns
        record["place"], record["extents"] = i, 1
        chunks.append(used.index(own.parts[0].chunk if own.parts else HOME))
        record["size"] = sum(part.size for part in own.parts)
        if own.kind == Kind.LINK:
            tails[i] = own.target
            record["size"], record["stored"] = len(own.target), len(own.target)
        elif len(own.parts) > 1:
            record["extents"] = len(own.parts)
            tails[i] = tail_of(own.parts)
        elif own.parts:
            for field in ("offset", "stored", "codec", "checksum"):
                record[field] = getattr(own.parts[0], field)
    return Rows(
        folders=list(folders),
        folder=np.array(numbers, np.uint32),
        names=names,
        records=records,
        chunk=np.array(chunks, np.uint32),
        chunks=[chunk_id(number) for number in used],
        tails=tails,
    )


def chunks_in(owns: Iterable[OwnEntry | None]) -> set[int]:
    return {part.chunk for own in owns if own for part in own.parts}


def tail_of(parts: Sequence[Part]) -> bytes:
    extents = np.zeros(len(parts), EXTENT)
    start = 0
    for number, part in enumerate(parts):
        extent = extents[number]
        extent["chunk"], extent["start"], extent["number"] = chunk_id(part.chunk), start, number
        for field in ("size", "checksum", "offset", "stored", "codec"):
            extent[field] = getattr(part, field)
        start += part.size
    return extents.tobytes()


def rows_digest(state: State) -> tuple[int, int]:
    """As FORMAT.md defines it, entry by entry."""
    seen = placed = 0
    for path, own in state.items():
        path_hash = 0
        for name in path.split(b"/") if path else ():
            path_hash = xxh3_64_intdigest(name, path_hash)
        content = places = start = size = 0
        parts = own.parts or (Part(HOME, 0, 0, 0, 0, 0),)
        for part in parts if own.kind == Kind.FILE else ():
            low, high = (int.from_bytes(chunk_id(part.chunk)[i : i + 8], "little") for i in (0, 8))
            content += _mix(start, part.size, part.checksum)
            places += _mix(start, low, high, part.offset, part.stored, part.codec)
            start += part.size
        size = start if own.kind == Kind.FILE else len(own.target)
        seen += _mix(path_hash, own.mode | own.kind << 12, size, own.mtime_ns, content)
        placed += _mix(path_hash, places)
    return seen % 2**64, placed % 2**64


def _mix(*values: int) -> int:
    factors = (
        *(0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9),
        *(0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5, 0xFF51AFD7ED558CCD),
    )
    pairs = zip(values, factors, strict=False)
    mixed = sum(value * factor for value, factor in pairs) % 2**64
    mixed = (mixed ^ mixed >> 29) * 0xC4CEB9FE1A85EC53 % 2**64
    return mixed ^ mixed >> 32


def build(
    previous: Snapshot | None,
    changes: Mapping[bytes, OwnEntry | None],
    chunks: Sequence[int],
    *,
    version: int = 1,
    seed: int = 0,
) -> bytes:
    table = [ChunkInfo(chunk_id(number), 1_000_000 + number) for number in chunks]
    parts = build_snapshot(
        previous,
        rows_of(changes, seed),
        table,
        identity=IDENTITY,
        dataset="flowers",
        version=version,
        digest=1 << 127 | len(chunks),
    )
    return b"".join(parts)


def shown_by(snapshot: Snapshot) -> dict[bytes, ShownEntry]:
    result = {}
    for i in range(len(snapshot)):
        stat = snapshot.stat(i)
        parts, start = [], 0
        for extent in snapshot.extents(i):
            assert extent.start == start
            start += extent.size
            number = int.from_bytes(snapshot.chunk_ids[extent.chunk][:2], "big")
            parts.append(Part(number, *extent[1:5], extent.size))
        target = snapshot.link(i) if stat.kind == Kind.LINK else b""
        result[snapshot.path(i)] = ShownEntry(
            stat.kind, stat.mode, stat.size, stat.mtime_ns, tuple(parts), target
        )
    return result


SMALL: State = {
    b"a": OwnEntry(Kind.FILE, 0o600, -5, (Part(3, 96, 7, 1, 2**64 - 1, 9),)),
    b"b": OwnEntry(Kind.FOLDER, 0o700, 77),
    b"c/\xff\n": OwnEntry(
        Kind.FILE, parts=(Part(3, 103, 5, 1, 6, 65536), Part(9, 101, 2, 1, 3, 4))
    ),
    b"c/link": OwnEntry(Kind.LINK, 0o777, 2**33, target=b"../a"),
    b"c/x": OwnEntry(Kind.FILE),
    b"c/x/shadows": OwnEntry(Kind.FILE, parts=(Part(9, 103, 7, 0, 3, 7),)),
    b"c/l": OwnEntry(Kind.LINK, target=b"hidden"),
    b"c/l/shadows": OwnEntry(Kind.FOLDER),
    b"n" * 255: OwnEntry(Kind.FILE),
}
"""A dataset with one entry of each kind."""
