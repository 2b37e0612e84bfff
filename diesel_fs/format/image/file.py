"""The file of an image: the tree, the columns about the content file, and a trailer. Any thread.

The file system stands at the start, so the kernel mounts the file as it is. The trailer has the
lengths and checksums of all parts (FORMAT.md, section 9).
"""

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, NoReturn
from uuid import UUID

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from ...errors import CorruptError, ForeignError, NewerVersionError, TruncatedError, UsageError
from ..entries import Bytes
from ..snapshot.layout import U4, U8
from ..snapshot.reader import Snapshot
from .addresses import BLOCK_BYTES, DTYPES, Addresses, ContentColumns, give_addresses, origins_of
from .tree import MAGIC, SUPERBLOCK_AT, ImageTree, Shown, check

_TRAILER_MAGIC = b"\x93DIESIM\n"
FORMAT_VERSION = 2
"""The version that is built. Version 1, which can be read, too, differs in the inodes of large
files, which only the kernel reads."""

_OLDEST_VERSION = 1
_TRAILER_BYTES = 512
_ALIGNMENT = 64
_TRAILER = struct.Struct("<8sHHI16sQ16sQQQQQIIIIq")
_PART = struct.Struct("<QQQ")
_CHECKSUM = struct.Struct("<Q")
_PARTS = ("tree", "root", "hidden", *ContentColumns._fields)

_BATCH = 1 << 18


class Image:
    """An image in memory or mapped. Immutable."""

    def __init__(self, buffer: Bytes, *, verify: bool) -> None:
        """`buffer` has the whole file. Raises a leaf of FormatError. Trailer and lengths are always
        checked; `verify` compares all checksums, too, at some 20 GB/s."""
        view = memoryview(buffer).cast("B")
        fields, parts = _parse_trailer(view)
        if verify:
            for name, (at, behind, checksum) in zip(_PARTS, parts, strict=True):
                padding = view[behind : behind + -behind % _ALIGNMENT]
                if xxh3_64_intdigest(view[at:behind]) != checksum or any(padding):
                    _corrupt(f"its part {name} does not match its checksum", at)
        self.buffer = view
        self.identity = fields.identity
        self.version = fields.version
        self.chain = fields.chain
        """Only images of one chain have comparable addresses."""
        self.sequence = fields.sequence
        """The image's number in its chain, from 1."""
        self.end_block = fields.end_block
        """The blocks that this chain has given, this image included."""
        self.entry_count = fields.entries
        self.shown = fields.shown
        self.tree_bytes = parts[0][1]
        """The length of the file system, which is at the start."""
        self.columns = _columns_of(view, parts)
        self.first_block = self.columns.first_block
        self.order = self.columns.order
        self.start_blocks = self.columns.start_block
        self._root, self._hidden = (view[at:behind] for at, behind, _ in parts[1:3])
        self._hidden_block = fields.hidden_block

    def root_folder(self, *, hidden: bool) -> bytes:
        """The content of the root folder's device, with `.diesel` or without (`hidden`). Both have
        the same length."""
        if not hidden:
            return bytes(self._root)
        at = self._hidden_block * BLOCK_BYTES
        return b"".join((self._root[:at], self._hidden, self._root[at + BLOCK_BYTES :]))


def build_image(snapshot: Snapshot, shown: Shown, earlier: Image | UUID) -> Iterator[Bytes]:
    """A snapshot's image, in pieces to write. `earlier` is the last image of the chain (of the same
    dataset, any version, any `Shown`), or a new UUID, which begins and names a new chain. A chain
    must never continue in two ways from one image. Raises ImageTooLarge, and FormatError for a
    snapshot that contradicts itself or that no tree can show."""
    check(snapshot)
    if isinstance(earlier, Image):
        if earlier.identity != snapshot.identity:
            raise UsageError(f"the earlier image is of {earlier.identity}, not {snapshot.identity}")
        addresses = give_addresses(snapshot, earlier.columns, earlier.end_block)
        number = earlier.chain, earlier.sequence + 1
    else:
        addresses, number = give_addresses(snapshot, None), (earlier, 1)
    return _pieces(ImageTree(snapshot, shown, addresses), *number)


class _Trailer(NamedTuple):
    identity: UUID
    version: int
    chain: UUID
    sequence: int
    end_block: int
    entries: int
    contents: int
    chunks: int
    hidden_block: int
    shown: Shown


def _pieces(tree: ImageTree, chain: UUID, sequence: int) -> Iterator[Bytes]:
    snapshot, addresses, shown = tree.snapshot, tree.addresses, tree.shown
    hidden_number, hidden = tree.hidden_block()
    at, table = 0, b""
    for part in (tree.pieces(), tree.root(), [hidden], *_column_pieces(snapshot, addresses)):
        start, digest = at, xxh3_64()
        for piece in part:
            digest.update(piece)
            at += len(piece)
            yield piece
        table += _PART.pack(start, at - start, digest.intdigest())
        padding = bytes(-at % _ALIGNMENT)
        at += len(padding)
        yield padding
    fixed = _TRAILER.pack(
        *(_TRAILER_MAGIC, FORMAT_VERSION, _TRAILER_BYTES, 0, snapshot.identity.bytes),
        *(snapshot.version, chain.bytes, sequence, addresses.end),
        *(len(snapshot), len(addresses.order), snapshot.chunk_count, hidden_number),
        *(shown.uid, shown.gid, shown.umask, shown.private_to),
    )
    trailer = (fixed + table).ljust(_TRAILER_BYTES - _CHECKSUM.size, b"\0")
    yield trailer + _CHECKSUM.pack(xxh3_64_intdigest(trailer))


def _column_pieces(snapshot: Snapshot, addresses: Addresses) -> Iterator[Iterable[Bytes]]:
    columns, first_block, order = snapshot.columns, addresses.first_block, addresses.order
    yield [first_block.view(np.uint8).data]
    yield [order.view(np.uint8).data]
    yield _taken(order, lambda entries: first_block[entries])
    yield _taken(order, lambda entries: origins_of(columns, entries)[0])
    yield _taken(order, lambda entries: origins_of(columns, entries)[1])
    yield _taken(order, lambda entries: columns.size[entries])
    yield [columns.chunk_id.data]


def _taken(order: U4, of: Callable[[U4], U4 | U8]) -> Iterator[Bytes]:
    """A column by address, in batches; `of` returns its values for entries."""
    for start in range(0, len(order), _BATCH):
        yield of(order[start : start + _BATCH]).view(np.uint8).data


def _corrupt(what: str, offset: int = -1) -> NoReturn:
    raise CorruptError(f"damaged image: {what}", offset=offset)


def _parse_trailer(view: memoryview) -> tuple[_Trailer, list[tuple[int, int, int]]]:
    """The trailer, and each part's start, end, and checksum."""
    magic_at = SUPERBLOCK_AT
    if len(view) < BLOCK_BYTES + _TRAILER_BYTES:
        raise TruncatedError(f"truncated image: {len(view)} bytes", offset=len(view))
    if view[magic_at : magic_at + 4] != MAGIC.to_bytes(4, "little"):
        raise ForeignError("not an image (another magic number)", offset=magic_at)
    start = len(view) - _TRAILER_BYTES
    trailer = view[start:]
    magic, format_version, length, flags, *fields = _TRAILER.unpack_from(trailer)
    if magic != _TRAILER_MAGIC:
        raise TruncatedError("truncated image: it has no trailer", offset=start)
    if format_version > FORMAT_VERSION:
        raise NewerVersionError(f"an image with format version {format_version}")
    checksum_at = _TRAILER_BYTES - _CHECKSUM.size
    if _CHECKSUM.unpack_from(trailer, checksum_at)[0] != xxh3_64_intdigest(trailer[:checksum_at]):
        _corrupt("its trailer does not match its checksum", start)
    if flags:
        raise NewerVersionError(f"an image with feature flags {flags:#x}")
    identity, version, chain, sequence, end, *counts, hidden, uid, gid, umask, private = fields
    entries, contents, chunks = counts
    found = _Trailer(
        identity=UUID(bytes=identity),
        version=version,
        chain=UUID(bytes=chain),
        sequence=sequence,
        end_block=end,
        entries=entries,
        contents=contents,
        chunks=chunks,
        hidden_block=hidden,
        shown=Shown(uid, gid, umask, private),
    )
    parts = [
        _PART.unpack_from(trailer, _TRAILER.size + number * _PART.size)
        for number in range(len(_PARTS))
    ]
    _check_parts(found, parts, start)
    spare = trailer[_TRAILER.size + len(_PARTS) * _PART.size : checksum_at]
    if format_version < _OLDEST_VERSION or length != _TRAILER_BYTES or any(spare):
        _corrupt("its trailer contradicts itself", start)
    return found, [(at, at + length, checksum) for at, length, checksum in parts]


def _check_parts(found: _Trailer, parts: list[tuple[int, int, int]], trailer_at: int) -> None:
    at = 0
    for start, length, _ in parts:
        if start != at:
            _corrupt("a part is out of place", at)
        at = -(-(start + length) // _ALIGNMENT) * _ALIGNMENT
    (tree, root, hidden), rest = (length for _, length, _ in parts[:3]), parts[3:]
    n, m, k = found.entries, found.contents, found.chunks
    counts = (n, m, m, m, m, m, k)
    wanted = [count * dtype.itemsize for count, dtype in zip(counts, DTYPES, strict=True)]
    if (
        at != trailer_at
        or [length for _, length, _ in rest] != wanted
        or tree % BLOCK_BYTES
        or root % BLOCK_BYTES
        or hidden != BLOCK_BYTES
        or not found.hidden_block * BLOCK_BYTES < root
    ):
        _corrupt("its parts do not have the lengths that its trailer says", trailer_at)


def _columns_of(view: memoryview, parts: list[tuple[int, int, int]]) -> ContentColumns:
    arrays = []
    for (at, end, _), dtype in zip(parts[3:], DTYPES, strict=True):
        arrays.append(np.ndarray(((end - at) // dtype.itemsize,), dtype, view, at))
    return ContentColumns(*arrays)
