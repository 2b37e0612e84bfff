"""Sends snapshots from a server to its clients in pieces: LZ4 blocks (`net/WIRE.md`, section 5).

The server compresses each version once and keeps the pieces in a file, in a folder that only the
server's user can open. The file is written under another name and renamed, but not synced: every
block has a checksum, and a damaged file is made again. The client joins the pieces and then checks
the whole snapshot. Any thread; several processes may share the folder.
"""

import contextlib
import logging
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

import lz4.block
import numpy as np
from xxhash import xxh3_64_intdigest

from ..errors import CorruptError, DieselError
from ..format.snapshot.reader import Snapshot
from ..settings import private_folder
from ..system.atomic_file import atomic_file

log = logging.getLogger("diesel.repository")

PIECE_BYTES = 8 << 20
"""The size before compression, which bounds a client's memory for a block."""

BLOCK_BYTES_MAX = PIECE_BYTES + PIECE_BYTES // 255 + 16
"""The size of a block that LZ4 cannot compress."""

SNAPSHOT_BYTES_MAX = 64 << 30
"""A client's limit: 500 million entries. Memory is allocated piece by piece."""

KEPT = 2
"""The versions of a dataset whose pieces are kept: as of private copies (`PRIVATE_KEPT`)."""

_MAGIC = b"\x93DIESPIE"
# A file holds the blocks, a table with one row for each, and at its end a trailer
_TRAILER = struct.Struct("<8sQIIQ")  # magic, version, pieces, zero, checksum of the table
_ROW = struct.Struct("<IIQ")  # raw bytes, stored bytes, checksum of the block


class SnapshotPiece(NamedTuple):
    raw_bytes: int
    block: bytes | memoryview


def compressed(content: memoryview) -> Iterator[SnapshotPiece]:
    for start in range(0, len(content), PIECE_BYTES):
        raw = content[start : start + PIECE_BYTES]
        yield SnapshotPiece(len(raw), lz4.block.compress(raw, store_size=False))


class CompressedSnapshots:
    def __init__(self, folder: Path | None) -> None:
        """`folder` is made if missing. Pieces are not kept if it is None or cannot be used."""
        self._folder = folder
        self._lock = threading.Lock()
        self._making: dict[tuple[UUID, int], threading.Lock] = {}
        self.made = 0

    def pieces(self, view: Snapshot) -> Iterator[SnapshotPiece]:
        """The iterator raises CorruptError at a damaged kept piece; the next call makes all pieces
        anew."""
        identity, version = view.identity, view.version
        pieces = self._find(identity, version)
        if pieces is None:
            with self._lock:
                making = self._making.setdefault((identity, version), threading.Lock())
            with making:
                # Another thread may have made the file meanwhile
                pieces = self._find(identity, version) or self._make(identity, version, view)
            with self._lock:
                self._making.pop((identity, version), None)
        yield from pieces

    def _find(self, identity: UUID, version: int) -> "Iterator[SnapshotPiece] | None":
        if self._folder is None:
            return None
        try:
            return _opened(self._path(identity, version), version)
        except FileNotFoundError:
            return None
        except (OSError, CorruptError) as error:
            log.warning("a snapshot is compressed again, as its kept pieces are bad: %s", error)
            return None

    def _make(self, identity: UUID, version: int, view: Snapshot) -> Iterator[SnapshotPiece]:
        """If no file can be written, the pieces come straight from the snapshot."""
        self.made += 1
        try:
            if self._folder is not None:
                private_folder(self._folder)
                path = self._path(identity, version)
                _write(path, version, compressed(view.buffer))
                self._remove_older(identity, path)
                return _opened(path, version)
        except (OSError, DieselError) as error:
            log.warning("the compressed pieces of a snapshot cannot be kept: %s", error)
        return compressed(view.buffer)

    def _path(self, identity: UUID, version: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{identity.hex}-{version:016x}.lz4"

    def _remove_older(self, identity: UUID, made: Path) -> None:
        """Keep the newest versions, and the one that was just made: somebody reads it."""
        assert self._folder is not None
        for old in sorted(self._folder.glob(f"{identity.hex}-*.lz4"))[:-KEPT]:
            if old != made:
                old.unlink(missing_ok=True)


def _write(path: Path, version: int, pieces: Iterator[SnapshotPiece]) -> None:
    rows = []
    with atomic_file(path, sync=False) as file:
        for raw_bytes, block in pieces:
            rows.append(_ROW.pack(raw_bytes, len(block), xxh3_64_intdigest(block)))
            file.write(block)
        table = b"".join(rows)
        file.write(table)
        file.write(_TRAILER.pack(_MAGIC, version, len(rows), 0, xxh3_64_intdigest(table)))


def _opened(path: Path, version: int) -> Iterator[SnapshotPiece]:
    """Checks the table first. Raises OSError, CorruptError."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        rows = _table(file, version)
    except BaseException:
        os.close(file)
        raise
    return _read(path, file, rows)


def _table(file: int, version: int) -> Sequence[tuple[int, int, int]]:
    """Raw bytes, stored bytes and checksum of each piece. Raises CorruptError."""
    size = os.fstat(file).st_size
    trailer = os.pread(file, _TRAILER.size, max(size - _TRAILER.size, 0))
    if len(trailer) < _TRAILER.size:
        raise CorruptError("truncated")
    magic, its_version, count, _, checksum = _TRAILER.unpack(trailer)
    start = size - _TRAILER.size - count * _ROW.size
    if magic != _MAGIC or its_version != version or start < 0:
        raise CorruptError("not the pieces of this version")
    table = os.pread(file, count * _ROW.size, start)
    rows = list(_ROW.iter_unpack(table[: len(table) // _ROW.size * _ROW.size]))
    if xxh3_64_intdigest(table) != checksum or sum(row[1] for row in rows) != start:
        raise CorruptError("its table is damaged")
    return rows


def _read(path: Path, file: int, rows: Sequence[tuple[int, int, int]]) -> Iterator[SnapshotPiece]:
    """Removes the file and raises CorruptError at a damaged block."""
    try:
        at = 0
        for raw_bytes, size, checksum in rows:
            block = np.empty(size, np.uint8).data
            if os.preadv(file, [block], at) != size or xxh3_64_intdigest(block) != checksum:
                with contextlib.suppress(OSError):
                    path.unlink()
                raise CorruptError(f"{path}: a piece of a snapshot is damaged")
            yield SnapshotPiece(raw_bytes, block)
            at += size
    finally:
        os.close(file)


class SnapshotAssembler:
    """A client's end: decompresses the pieces and joins them. Not thread-safe."""

    def __init__(self, bytes_max: int = SNAPSHOT_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._raw: list[bytes] = []

    def add(self, raw_bytes: int, block: memoryview | bytes) -> None:
        """Raises CorruptError if the piece is damaged or exceeds the limits."""
        if not 0 < raw_bytes <= PIECE_BYTES or not 0 < len(block) <= BLOCK_BYTES_MAX:
            raise CorruptError(f"a piece of {raw_bytes} bytes in a block of {len(block)}")
        if self._bytes + raw_bytes > self._bytes_max:
            raise CorruptError(f"a snapshot has more than {self._bytes_max:,} bytes")
        try:
            raw: bytes = lz4.block.decompress(block, uncompressed_size=raw_bytes)
        except (lz4.block.LZ4BlockError, ValueError) as error:
            raise CorruptError("a piece of a snapshot is not an LZ4 block") from error
        if len(raw) != raw_bytes:
            raise CorruptError(f"a piece of a snapshot has {len(raw)} bytes, not {raw_bytes}")
        self._bytes += raw_bytes
        self._raw.append(raw)

    def parts(self, total: int) -> list[bytes]:
        """Raises CorruptError if the pieces are not `total` bytes together."""
        if self._bytes != total:
            raise CorruptError(f"{self._bytes} bytes of a snapshot have come, not {total}")
        return self._raw

    def joined(self, total: int) -> memoryview:
        """The whole snapshot in one buffer. Raises as `parts`."""
        parts = self.parts(total)
        snapshot = np.empty(total, np.uint8).data
        at = 0
        while parts:  # each is freed after its copy
            part = parts.pop(0)
            snapshot[at : at + len(part)] = part
            at += len(part)
        return snapshot.toreadonly()
