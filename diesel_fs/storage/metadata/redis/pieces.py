"""Packs the pieces of a chunk: rows of one bucket, for one run of `APPLY` or `UNAPPLY`. Pure.
`bucket_scripts.py` has the formats, `keys.py` the terms.

Each piece of an added chunk ends with its paths, which Redis keeps so that `RedisMetadata.changes`
finds the chunk's entries.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

import lz4.block
import numpy as np
import numpy.typing as npt

from ....errors import UsageError
from ....format.entries import EXTENT, RECORD, ChunkId, Kind
from ..store import CommitBatch, corrupt_store_error
from .keys import (
    CHUNK,
    FOLDER_BYTES,
    NO_FOLDER,
    PLAIN_BYTES,
    ROOT_FOLDER,
    ChunkFacts,
    FolderId,
    Generation,
    PieceCounts,
    PieceName,
    child_folder,
    hole_fields,
    pack_piece_counts,
    steps,
)

EXTENTS_MAX = 1 << 20
"""4 TiB in chunks of 4 MiB: a script that visits all extents must not take long."""
SIZE_MAX = 1 << 50
"""1 PiB: Lua counts exactly up to 2^53."""

# Redis serves nobody else while it applies a piece: these sizes take milliseconds
_PIECE_ROWS = 4096
_PIECE_BYTES = 1 << 20
_PIECE_FOLDERS = 512
_BLOCK_ROWS = 1000  # a script unpacks a whole block; Lua's stack holds 8,000 values

_EXPANSION_MAX = 256  # LZ4 does not expand more

# A piece's numbers, as scripts read them
_FOLDER_COUNT = struct.Struct("<H")
_FOLDER_AND_NAME_LENGTH = struct.Struct("<HB")  # a folder's position, a name's length
_STEP = struct.Struct("<cH")  # letter, folder's position
_SUMS = struct.Struct("<HIIQ")  # in a step `N`: rows, files, tombstones, bytes of the files
_U32 = struct.Struct("<I")  # a place, a count, or the length of an entry or a list of names
_NAME_LENGTH = [bytes([length]) for length in range(256)]

assert EXTENT.itemsize == 64
assert RECORD.itemsize == 48


@dataclass(frozen=True, slots=True)
class BucketPiece:
    name: PieceName
    folders: Sequence[FolderId]
    packed: bytes


@dataclass(frozen=True, slots=True)
class ChunkPieces:
    """`record` is the chunk's value in the hash `c`, empty if the chunk is removed."""

    chunk: ChunkId
    record: bytes
    piece_counts: PieceCounts
    pieces: Sequence[BucketPiece]


Tombstones = dict[FolderId, list[tuple[bytes, bytes]]]
"""The names and packed entries of tombstones, by folder."""


def folders_of(packed: bytes) -> list[FolderId]:
    """Raises CorruptError."""
    count = int.from_bytes(packed[: _FOLDER_COUNT.size], "little")
    starts = range(_FOLDER_COUNT.size, _FOLDER_COUNT.size + count * FOLDER_BYTES, FOLDER_BYTES)
    if len(packed) < starts.stop:
        raise corrupt_store_error("a piece that is too short")
    return [FolderId(packed[at : at + FOLDER_BYTES]) for at in starts]


def unpack_paths(packed: bytes) -> Iterator[tuple[FolderId, list[bytes]]]:
    """Folders and names, from a piece's list of paths. Raises CorruptError."""
    if int.from_bytes(packed[:4], "little") > _EXPANSION_MAX * len(packed):  # would take memory
        raise corrupt_store_error("a malformed list of paths")
    try:
        plain = lz4.block.decompress(packed)
    except (lz4.block.LZ4BlockError, ValueError):
        raise corrupt_store_error("a malformed list of paths") from None
    at = 0
    while at < len(plain):
        folder = FolderId(plain[at : at + FOLDER_BYTES])
        names_at = at + FOLDER_BYTES + _U32.size
        length = int.from_bytes(plain[at + FOLDER_BYTES : names_at], "little")
        at = names_at
        if len(plain) < at + length:
            raise corrupt_store_error("a list of paths that is too short")
        yield folder, plain[at : at + length].split(b"\0")
        at += length


@dataclass(slots=True)
class _Packer:
    folders: dict[FolderId, int] = field(default_factory=dict)
    steps: list[bytes] = field(default_factory=list)
    paths: list[bytes] = field(default_factory=list)  # the last step, as `unpack_paths` reads it
    rows: int = 0
    size: int = 0  # of the entries, in bytes, about

    def add_step(self, letter: bytes, folder: FolderId, *arguments: bytes) -> None:
        position = self.folders.setdefault(folder, len(self.folders))
        self.steps.append(_STEP.pack(letter, position))
        self.steps += arguments

    def add_rows(self, folder: FolderId, names: Sequence[bytes], size: int) -> None:
        """Count rows whose steps were added, and list their paths."""
        joined = b"\0".join(names)
        self.paths += (folder, _U32.pack(len(joined)), joined)
        self.rows += len(names)
        self.size += size

    def is_full(self) -> bool:
        return (
            self.rows >= _PIECE_ROWS
            or self.size >= _PIECE_BYTES
            or len(self.folders) >= _PIECE_FOLDERS
        )

    def packed(self) -> bytes:
        last_step = (_STEP.pack(b"U", 0), lz4.block.compress(b"".join(self.paths)))
        count = _FOLDER_COUNT.pack(len(self.folders))
        return b"".join([count, *self.folders, *self.steps, *last_step])


class _Cutter:
    def __init__(self, batch: CommitBatch, generation: Generation) -> None:
        self._batch = batch
        self._generation = generation
        self._packers: dict[int, list[_Packer]] = {}  # each bucket's, the last one not full
        self._folders: dict[tuple[FolderId, bytes], FolderId] = {}  # by parent and name
        rows = batch.rows
        entries = np.empty((len(rows), PLAIN_BYTES), np.uint8)
        records = np.ascontiguousarray(rows.records).view(np.uint8)
        entries[:, : RECORD.itemsize] = records.reshape(len(rows), RECORD.itemsize)
        entries[:, RECORD.itemsize :] = np.frombuffer(batch.chunk.id, np.uint8)
        self._entries = entries.tobytes()  # without stamp and tail
        # Plain rows have one extent, their own stamp and no tail, and are not by purge
        self._is_plain = rows.records["extents"] <= 1
        self._is_plain[[*batch.stamps, *rows.tails]] = False
        if batch.by_purge:
            self._is_plain[:] = False

    def cut(self) -> ChunkPieces:
        rows = self._batch.rows
        order = np.argsort(rows.folder, kind="stable")
        changes = np.flatnonzero(np.diff(rows.folder[order])) + 1
        for positions in np.split(order, changes) if len(order) else []:
            folder = self._folder(rows.folders[rows.folder[positions[0]]])
            self._add_rows(folder, positions)
        places = rows.records["place"]
        entries = int(places.max()) + 1 if len(places) else 0
        if entries > len(places):
            self._add_own_holes(np.setdiff1d(np.arange(entries, dtype=np.uint32), places))
        chunk, uploaded_ns = self._batch.chunk, self._batch.uploaded_ns
        pieces = [
            BucketPiece(PieceName(chunk.id, bucket, number), [*packer.folders], packer.packed())
            for bucket, packers in self._packers.items()
            for number, packer in enumerate(packers)
        ]
        counts = [(bucket, len(packers)) for bucket, packers in self._packers.items()]
        record = CHUNK.pack(chunk.object_bytes, uploaded_ns, entries, 0)  # COMMIT sets the version
        return ChunkPieces(chunk.id, record + pack_piece_counts(counts), counts, pieces)

    def _packer(self, folder: FolderId) -> _Packer:
        packers = self._packers.setdefault(self._generation.bucket(folder), [])
        if not packers or packers[-1].is_full():
            packers.append(_Packer())
        return packers[-1]

    def _folder(self, path: bytes) -> FolderId:
        """Adds the steps that index the folder and those above it."""
        folder = self._child(NO_FOLDER, b"")
        for name in steps(path):
            folder = self._child(folder, name)
        return folder

    def _child(self, parent: FolderId, name: bytes) -> FolderId:
        known = self._folders.get((parent, name))
        if known is not None:
            return known
        folder = self._folders[parent, name] = child_folder(parent, name)
        sized_name = _NAME_LENGTH[len(name)], name
        self._packer(folder).add_step(b"F", folder, parent, *sized_name)
        if folder != ROOT_FOLDER:
            self._packer(parent).add_step(b"S", parent, *sized_name)
        return folder

    def _add_rows(self, folder: FolderId, positions: npt.NDArray[np.intp]) -> None:
        names = [self._batch.rows.names[i] for i in positions]
        plain = self._is_plain[positions]
        if len(set(names)) < len(names):  # a step `N` has each name once
            plain = np.zeros_like(plain)
        self._add_plain(folder, [*compress(names, plain)], positions[plain])
        for i in positions[~plain].tolist():
            self._add_general(folder, i)

    def _add_plain(
        self, folder: FolderId, names: Sequence[bytes], positions: npt.NDArray[np.intp]
    ) -> None:
        entries = self._entries
        for start in range(0, len(names), _BLOCK_ROWS):
            at, block = positions[start : start + _BLOCK_ROWS], names[start : start + _BLOCK_ROWS]
            records = self._batch.rows.records[at]
            is_file = records["kind"] == Kind.FILE
            tombstones = int((records["kind"] == Kind.TOMBSTONE).sum())
            sums = len(block), int(is_file.sum()), tombstones, int(records["size"][is_file].sum())
            rows = list[bytes]()
            for name, i in zip(block, (at * PLAIN_BYTES).tolist(), strict=True):
                rows += (_NAME_LENGTH[len(name)], name, entries[i : i + PLAIN_BYTES])
            packer = self._packer(folder)
            packer.add_step(b"N", folder, _SUMS.pack(*sums), *rows)
            packer.add_rows(folder, block, len(block) * 128)

    def _add_general(self, folder: FolderId, i: int) -> None:
        batch, rows = self._batch, self._batch.rows
        entry = self._entries[i * PLAIN_BYTES : (i + 1) * PLAIN_BYTES]
        tail = rows.tails.get(i, b"")
        if tail or i in batch.stamps:
            entry = entry + batch.stamp(i) + tail
        name, packer = rows.names[i], self._packer(folder)
        sized = _NAME_LENGTH[len(name)], name, _U32.pack(len(entry)), entry
        packer.add_step(b"G", folder, bytes([batch.by_purge]), *sized)
        packer.add_rows(folder, [name], len(entry) + len(name))

    def _add_own_holes(self, places: npt.NDArray[np.uint32]) -> None:
        """Places that no row names are holes. One of the chunk's buckets records them."""
        packers = next(iter(self._packers.values()))
        folder, packer = next(iter(packers[0].folders)), packers[0]
        for place in places.tolist():
            packer.add_step(b"H", folder, self._batch.chunk.id, _U32.pack(place))


def cut_batch(batch: CommitBatch, generation: Generation) -> ChunkPieces:
    """The pieces of an added chunk, whose batch was checked (`CommitBatch.check`). Raises
    UsageError if a number is too great for the scripts."""
    records = batch.rows.records
    if len(records) and int(records["extents"].max()) > EXTENTS_MAX:
        raise UsageError(f"a file has more than {EXTENTS_MAX} extents")
    if len(records) and int(records["size"].max()) > SIZE_MAX:
        raise UsageError(f"a file has more than {SIZE_MAX} bytes")
    return _Cutter(batch, generation).cut()


def cut_removal(
    chunk: ChunkId, facts: ChunkFacts, tombstones: Mapping[PieceName, Tombstones]
) -> ChunkPieces:
    """The pieces of an empty chunk that is removed. `tombstones` lists the tombstones to remove
    with each piece; the first piece in each bucket also removes the chunk's holes."""
    pieces = []
    for name, rows in tombstones.items():
        hole_count = len([*hole_fields(chunk, facts.entries)]) if name.number == 0 else 0
        parts = [_FOLDER_COUNT.pack(len(rows)), *rows, _U32.pack(hole_count)]
        for position, entries in enumerate(rows.values()):
            for base, entry in entries:
                parts += (_FOLDER_AND_NAME_LENGTH.pack(position, len(base)), base)
                parts += (_U32.pack(len(entry)), entry)
        pieces.append(BucketPiece(name, [*rows], b"".join(parts)))
    return ChunkPieces(chunk, b"", facts.piece_counts, pieces)
