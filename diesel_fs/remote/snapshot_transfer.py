"""Snapshots as they travel: cut into pieces, each an LZ4 block (WIRE.md, section 5).

Owned here: the pieces, the files in which a server keeps them so that each version is compressed
once, and putting them together again at the other end. Not owned: what a snapshot holds and how it
is checked (`snapshot.py`), where versions come from (`repository/versions.py`).

A file of pieces lies in a folder of this user's alone, is replaced by rename only and never synced:
every block has a checksum, and a damaged file is made again. Any thread; several processes may
share the folder.
"""

import contextlib
import logging
import os
import secrets
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

log = logging.getLogger("diesel.repository")

PIECE_BYTES = 8 << 20
"""Of a snapshot, per piece: what a client may be asked to make of one block."""

BLOCK_BYTES_MAX = PIECE_BYTES + PIECE_BYTES // 255 + 16
"""What LZ4 makes of a piece that cannot be compressed."""

SNAPSHOT_BYTES_MAX = 64 << 30
"""Of a snapshot that a client takes: 500 million entries. Memory is taken as pieces come."""

KEPT = 2
"""Versions of a dataset whose pieces are kept, as with snapshots themselves."""

_MAGIC = b"\x93DIESPIE"
_HEAD = struct.Struct("<8sQIIQ")  # magic, version, pieces, zero, checksum of the table
_ROW = struct.Struct("<IIQ")  # raw bytes, stored bytes, checksum of the block


class SnapshotPiece(NamedTuple):
    """A piece of a snapshot, in order: `block` decodes to `raw_bytes`."""

    raw_bytes: int
    block: bytes | memoryview


def compressed(view: Snapshot) -> Iterator[SnapshotPiece]:
    """The pieces of a snapshot."""
    for start in range(0, len(view.buffer), PIECE_BYTES):
        raw = view.buffer[start : start + PIECE_BYTES]
        yield SnapshotPiece(len(raw), lz4.block.compress(raw, store_size=False))


class CompressedSnapshots:
    """The pieces of versions that are asked for, each made once (see the module)."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` is made where it is missing; with None, or where that cannot be, nothing is
        kept."""
        self._folder = folder
        self._lock = threading.Lock()
        self._making: dict[tuple[UUID, int], threading.Lock] = {}
        self.made = 0

    def pieces(self, view: Snapshot) -> Iterator[SnapshotPiece]:
        """The pieces of a snapshot, in order. Raises CorruptError where a kept one turns out to be
        damaged; asked again, they are made anew."""
        identity, version = view.identity, view.version
        file = self._find(identity, version)
        if file is None:
            with self._lock:
                making = self._making.setdefault((identity, version), threading.Lock())
            with making:
                file = self._find(identity, version)  # who else wanted it has made it
                made = None if file is not None else self._make(identity, version, view)
            with self._lock:
                self._making.pop((identity, version), None)
            if made is not None:
                yield from made
                return
        assert file is not None
        yield from file

    def _find(self, identity: UUID, version: int) -> "Iterator[SnapshotPiece] | None":
        if self._folder is None:
            return None
        try:
            return _opened(self._path(identity, version), version)
        except FileNotFoundError:
            return None
        except (OSError, CorruptError) as error:
            log.warning("the pieces of a snapshot cannot be read, and are made again: %s", error)
            return None

    def _make(self, identity: UUID, version: int, view: Snapshot) -> Iterator[SnapshotPiece]:
        """The pieces, from the file where one can be written, else from the snapshot."""
        self.made += 1
        try:
            if self._folder is not None:
                private_folder(self._folder)
                path = self._path(identity, version)
                _write(path, version, compressed(view))
                self._remove_older(identity)
                return _opened(path, version)
        except (OSError, DieselError) as error:
            log.warning("the pieces of a snapshot are not kept: %s", error)
        return compressed(view)

    def _path(self, identity: UUID, version: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{identity.hex}-{version:016x}.lz4"

    def _remove_older(self, identity: UUID) -> None:
        assert self._folder is not None
        for old in sorted(self._folder.glob(f"{identity.hex}-*.lz4"))[:-KEPT]:
            old.unlink(missing_ok=True)


def _write(path: Path, version: int, pieces: Iterator[SnapshotPiece]) -> None:
    """A file of pieces: whole or not at all. The table of all comes last. Raises OSError."""
    temporary = path.with_name(f".tmp-{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    rows = []
    try:
        with open(os.open(temporary, flags, 0o600), "wb") as file:
            for raw_bytes, block in pieces:
                rows.append(_ROW.pack(raw_bytes, len(block), xxh3_64_intdigest(block)))
                file.write(block)
            table = b"".join(rows)
            file.write(table)
            file.write(_HEAD.pack(_MAGIC, version, len(rows), 0, xxh3_64_intdigest(table)))
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def _opened(path: Path, version: int) -> Iterator[SnapshotPiece]:
    """The pieces in a file, whose table has been checked. Raises OSError, CorruptError."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        rows = _table(file, version)
    except BaseException:
        os.close(file)
        raise
    return _read(path, file, rows)


def _table(file: int, version: int) -> Sequence[tuple[int, int, int]]:
    size = os.fstat(file).st_size
    tail = os.pread(file, _HEAD.size, max(size - _HEAD.size, 0))
    if len(tail) < _HEAD.size:
        raise CorruptError("truncated")
    magic, its_version, count, _, checksum = _HEAD.unpack(tail)
    start = size - _HEAD.size - count * _ROW.size
    if magic != _MAGIC or its_version != version or start < 0:
        raise CorruptError("not the pieces of this version")
    table = os.pread(file, count * _ROW.size, start)
    rows = list(_ROW.iter_unpack(table[: len(table) // _ROW.size * _ROW.size]))
    if xxh3_64_intdigest(table) != checksum or sum(row[1] for row in rows) != start:
        raise CorruptError("its table is damaged")
    return rows


def _read(path: Path, file: int, rows: Sequence[tuple[int, int, int]]) -> Iterator[SnapshotPiece]:
    """Raises CorruptError, and removes the file, where a block is damaged: the next who asks gets
    new ones. (What has been given out cannot be taken back.)"""
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
    """The other end: pieces that come from a server, put together. Not thread-safe."""

    def __init__(self, bytes_max: int = SNAPSHOT_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._raw: list[bytes] = []

    def add(self, raw_bytes: int, block: memoryview | bytes) -> None:
        """The next piece. Raises CorruptError for one that contradicts itself or the limits."""
        if not 0 < raw_bytes <= PIECE_BYTES or not 0 < len(block) <= BLOCK_BYTES_MAX:
            raise CorruptError(f"a piece of {raw_bytes} bytes in a block of {len(block)}")
        if self._bytes + raw_bytes > self._bytes_max:
            raise CorruptError(f"a snapshot of more than {self._bytes_max:,} bytes")
        try:
            raw: bytes = lz4.block.decompress(block, uncompressed_size=raw_bytes)
        except (lz4.block.LZ4BlockError, ValueError) as error:
            raise CorruptError("a piece of a snapshot is no LZ4 block") from error
        if len(raw) != raw_bytes:
            raise CorruptError(f"a piece has {len(raw)} bytes, not {raw_bytes}")
        self._bytes += raw_bytes
        self._raw.append(raw)

    def parts(self, total: int) -> list[bytes]:
        """What has come, in order: it is all, `total` bytes. Raises CorruptError."""
        if self._bytes != total:
            raise CorruptError(f"{self._bytes} bytes of a snapshot have come, not {total}")
        return self._raw

    def joined(self, total: int) -> memoryview:
        """The same in one buffer. Raises CorruptError."""
        parts = self.parts(total)
        held = np.empty(total, np.uint8).data
        at = 0
        while parts:
            part = parts.pop(0)
            held[at : at + len(part)] = part
            at += len(part)
        return held.toreadonly()
