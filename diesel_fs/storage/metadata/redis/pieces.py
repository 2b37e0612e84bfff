"""Cuts a batch into pieces: packed rows of one bucket, for one run of the script `APPLY`. Pure.

The format of a piece is described above `APPLY` (`bucket_scripts.py`). Each piece ends with the
list of its paths, which Redis keeps: `changes` finds the entries of a chunk by it.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import lz4.block
import numpy as np
import numpy.typing as npt

from ....errors import UsageError
from ....format.entries import EXTENT, RECORD, ChunkId, Kind
from ..store import Batch, corrupt_store_error
from .keys import (
    FOLDER_BYTES,
    NO_FOLDER,
    PLAIN_BYTES,
    ROOT_FOLDER,
    FolderId,
    Generation,
    PieceCounts,
    PieceName,
    child_folder,
    steps,
)

EXTENTS_MAX = 1 << 20
"""4 TiB in chunks of 4 MiB: a script that visits all extents must not take long."""
SIZE_MAX = 1 << 50
"""1 PiB: Lua counts exactly up to 2^53."""

_PIECE_ROWS = 4096
_PIECE_BYTES = 1 << 20
_PIECE_FOLDERS = 512
"""Redis serves nobody else while it applies a piece: pieces of this size take milliseconds."""
_BLOCK_ROWS = 1000  # a script unpacks a block at once, and Lua's stack holds 8,000 values

_EXPANSION_MAX = 256  # data packed by LZ4 does not expand more than that

_COUNT = struct.Struct("<H")
_STEP = struct.Struct("<cH")
_SUMS = struct.Struct("<HIIQ")
_BYTES = struct.Struct("<I")
_LENGTH = [bytes([length]) for length in range(256)]

assert EXTENT.itemsize == 64
assert RECORD.itemsize == 48


@dataclass(frozen=True, slots=True)
class BucketPiece:
    """Some rows of a chunk in one bucket, packed."""

    name: PieceName
    folders: Sequence[FolderId]
    packed: bytes


@dataclass(frozen=True, slots=True)
class CutBatch:
    """A batch in pieces. `entries` is the chunk's greatest place plus one."""

    chunk: ChunkId
    entries: int
    piece_counts: PieceCounts
    pieces: Sequence[BucketPiece]


def folders_of(packed: bytes) -> list[FolderId]:
    """The folders of a packed piece. Raises CorruptError."""
    count = int.from_bytes(packed[: _COUNT.size], "little")
    if len(packed) < _COUNT.size + count * FOLDER_BYTES:
        raise corrupt_store_error("a piece that is too short")
    starts = range(_COUNT.size, _COUNT.size + count * FOLDER_BYTES, FOLDER_BYTES)
    return [FolderId(packed[at : at + FOLDER_BYTES]) for at in starts]


def unpack_paths(packed: bytes) -> Iterator[tuple[FolderId, list[bytes]]]:
    """Folders and names in them, of the list of a piece's paths. Raises CorruptError."""
    if int.from_bytes(packed[:4], "little") > _EXPANSION_MAX * len(packed):  # would take memory
        raise corrupt_store_error("a malformed list of paths")
    try:
        plain = lz4.block.decompress(packed)
    except (lz4.block.LZ4BlockError, ValueError):
        raise corrupt_store_error("a malformed list of paths") from None
    at = 0
    while at < len(plain):
        folder = FolderId(plain[at : at + FOLDER_BYTES])
        length = int.from_bytes(plain[at + FOLDER_BYTES : at + FOLDER_BYTES + 4], "little")
        at += FOLDER_BYTES + _BYTES.size
        if len(plain) < at + length:
            raise corrupt_store_error("a list of paths that is too short")
        yield folder, plain[at : at + length].split(b"\0")
        at += length


@dataclass(slots=True)
class _Packer:
    """Packs one piece."""

    folders: dict[FolderId, int] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    paths: list[bytes] = field(default_factory=list)
    rows: int = 0
    size: int = 0

    def step(self, what: bytes, folder: FolderId, *more: bytes) -> None:
        """Add a step for the script (see `APPLY`)."""
        position = self.folders.setdefault(folder, len(self.folders))
        self.parts.append(_STEP.pack(what, position))
        self.parts += more

    def name(self, folder: FolderId, names: Sequence[bytes]) -> None:
        """Add names in a folder to the list of paths."""
        joined = b"\0".join(names)
        self.paths += (folder, _BYTES.pack(len(joined)), joined)

    @property
    def full(self) -> bool:
        """Whether further rows belong in another piece."""
        return (
            self.rows >= _PIECE_ROWS
            or self.size >= _PIECE_BYTES
            or len(self.folders) >= _PIECE_FOLDERS
        )

    def packed(self) -> bytes:
        """The packed piece."""
        end = (_STEP.pack(b"U", 0), lz4.block.compress(b"".join(self.paths)))
        return b"".join([_COUNT.pack(len(self.folders)), *self.folders, *self.parts, *end])


class _Cutter:
    """Cuts one batch into pieces."""

    def __init__(self, batch: Batch, generation: Generation) -> None:
        self._batch = batch
        self._generation = generation
        self._packers: dict[int, list[_Packer]] = {}
        self._known: dict[tuple[FolderId, bytes], FolderId] = {}
        rows = batch.rows
        entries = np.empty((len(rows), PLAIN_BYTES), np.uint8)
        records = np.ascontiguousarray(rows.records).view(np.uint8)
        entries[:, : RECORD.itemsize] = records.reshape(len(rows), RECORD.itemsize)
        entries[:, RECORD.itemsize :] = np.frombuffer(batch.chunk.id, np.uint8)
        self._entries = entries.tobytes()
        self._is_plain = rows.records["extents"] <= 1
        self._is_plain[[*batch.stamps, *rows.tails]] = False
        if batch.by_purge:
            self._is_plain[:] = False

    def cut(self) -> CutBatch:
        """The pieces."""
        rows = self._batch.rows
        order = np.argsort(rows.folder, kind="stable")
        starts = np.flatnonzero(np.diff(rows.folder[order], prepend=np.uint32(0xFFFFFFFF)))
        for positions in np.split(order, starts[1:]) if len(order) else []:
            folder = self._folder(rows.folders[rows.folder[positions[0]]])
            self._add_rows(folder, positions)
        places = rows.records["place"]
        entries = int(places.max()) + 1 if len(places) else 0
        if entries > len(places):
            self._add_own_holes(np.setdiff1d(np.arange(entries, dtype=np.uint32), places))
        return self._cut(entries)

    def _cut(self, entries: int) -> CutBatch:
        chunk = self._batch.chunk.id
        pieces = [
            BucketPiece(PieceName(chunk, bucket, number), [*packer.folders], packer.packed())
            for bucket, packers in self._packers.items()
            for number, packer in enumerate(packers)
        ]
        counts = [(bucket, len(packers)) for bucket, packers in self._packers.items()]
        return CutBatch(chunk, entries, counts, pieces)

    def _packer(self, folder: FolderId) -> _Packer:
        packers = self._packers.setdefault(self._generation.bucket(folder), [])
        if not packers or packers[-1].full:
            packers.append(_Packer())
        return packers[-1]

    def _folder(self, path: bytes) -> FolderId:
        """The ID of the folder at a path; adds the steps that index it and those above it."""
        folder = self._child(NO_FOLDER, b"")
        for name in steps(path):
            folder = self._child(folder, name)
        return folder

    def _child(self, parent: FolderId, name: bytes) -> FolderId:
        known = self._known.get((parent, name))
        if known is not None:
            return known
        folder = self._known[parent, name] = child_folder(parent, name)
        sized = _LENGTH[len(name)], name
        self._packer(folder).step(b"F", folder, parent, *sized)
        if folder != ROOT_FOLDER:
            self._packer(parent).step(b"S", parent, *sized)
        return folder

    def _add_rows(self, folder: FolderId, positions: npt.NDArray[np.intp]) -> None:
        names = self._batch.rows.names
        wanted = [names[i] for i in positions]
        plain = self._is_plain[positions]
        if len(set(wanted)) < len(wanted):
            plain = np.zeros_like(plain)
        if plain.all():
            self._add_plain(folder, wanted, positions)
            return
        chosen = positions[plain]
        self._add_plain(folder, [names[i] for i in chosen], chosen)
        for i in positions[~plain].tolist():
            self._add_general(folder, i)

    def _add_plain(
        self, folder: FolderId, names: Sequence[bytes], positions: npt.NDArray[np.intp]
    ) -> None:
        entries = self._entries
        for start in range(0, len(names), _BLOCK_ROWS):
            packer = self._packer(folder)
            at, block = positions[start : start + _BLOCK_ROWS], names[start : start + _BLOCK_ROWS]
            records = self._batch.rows.records[at]
            is_file = records["kind"] == Kind.FILE
            dead = int((records["kind"] == Kind.TOMBSTONE).sum())
            sums = len(block), int(is_file.sum()), dead, int(records["size"][is_file].sum())
            rows = list[bytes]()
            for name, i in zip(block, (at * PLAIN_BYTES).tolist(), strict=True):
                rows += (_LENGTH[len(name)], name, entries[i : i + PLAIN_BYTES])
            packer.step(b"N", folder, _SUMS.pack(*sums), *rows)
            packer.name(folder, block)
            packer.rows += len(block)
            packer.size += len(block) * 128

    def _add_general(self, folder: FolderId, i: int) -> None:
        batch, rows = self._batch, self._batch.rows
        entry = self._entries[i * PLAIN_BYTES : (i + 1) * PLAIN_BYTES]
        tail = rows.tails.get(i, b"")
        if tail or i in batch.stamps:
            entry = entry + batch.stamp(i) + tail
        name, packer = rows.names[i], self._packer(folder)
        sized = _LENGTH[len(name)], name, _BYTES.pack(len(entry)), entry
        packer.step(b"G", folder, _LENGTH[batch.by_purge], *sized)
        packer.name(folder, [name])
        packer.rows += 1
        packer.size += len(entry) + len(name)

    def _add_own_holes(self, places: npt.NDArray[np.uint32]) -> None:
        """Add the holes of places that no row names to some bucket that has rows of the chunk."""
        packers = next(iter(self._packers.values()))
        folder, packer = next(iter(packers[0].folders)), packers[0]
        for place in places.tolist():
            packer.step(b"H", folder, self._batch.chunk.id, _BYTES.pack(place))


def cut_batch(batch: Batch, generation: Generation) -> CutBatch:
    """Cut a checked batch into pieces. Raises UsageError for numbers too great for the scripts."""
    records = batch.rows.records
    if len(records) and int(records["extents"].max()) > EXTENTS_MAX:
        raise UsageError(f"a file has more than {EXTENTS_MAX} extents")
    if len(records) and int(records["size"].max()) > SIZE_MAX:
        raise UsageError(f"a file has more than {SIZE_MAX} bytes")
    return _Cutter(batch, generation).cut()
