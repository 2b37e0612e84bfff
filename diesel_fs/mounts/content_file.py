"""The content file of a native mount: all contents of a dataset as one virtual file.

The tree of a native mount is an EROFS image in the kernel (`format/image.py`), in which each file
has an address: a place in this virtual file. The kernel reads the content of a file there, through
a FUSE mount that only the kernel and the prefetch worker use. Between two files lie zeros up to the
next block of 4 KiB.

A mount that follows its dataset serves several versions at once. Images of one *chain* share a
content file: in a chain an address has one content for ever, so each READ can be answered from
whichever version has a file there. An image of another chain gets a content file of its own.

Concurrency: one trio task at a time, as in `vfs.py`. Only `read` waits.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

import numpy as np

from ..format.entries import Bytes
from ..format.image import BLOCK_BYTES, Image
from .attributes import HIDDEN_ROOT
from .vfs import Vfs

CONTENT_BYTES = 1 << 44
"""The size of the content file: all addresses that an image can have."""

_ZEROS = memoryview(bytes(1 << 20))


def private_name(node: int) -> str:
    """The name of a file in the root of the FUSE mount that no listing shows."""
    return f"content-{HIDDEN_ROOT - node}"


@dataclass(slots=True, eq=False)
class ContentVersion:
    """One version of the dataset in the content file."""

    vfs: Vfs
    starts: memoryview  # the first blocks of all contents, ascending
    order: memoryview  # the entries that have them

    def entry_at(self, offset: int) -> int:
        """The entry whose content is at `offset`, or lies next before it; -1 for none."""
        rank = bisect_right(self.starts, offset // BLOCK_BYTES) - 1
        return int(self.order[rank]) if rank >= 0 else -1


def added_ranges(before: Image, after: Image) -> list[tuple[int, int]]:
    """The ranges, as offset and size, in which contents of `after` lie that `before` does not have.

    Both images are of one chain. Before `after` was added to the content file, a READ of such a
    range gave zeros.
    """
    is_new = ~np.isin(after.start_blocks, before.start_blocks)
    edges = np.flatnonzero(np.diff(is_new, prepend=False, append=False))
    firsts, lasts = edges[::2], edges[1::2] - 1
    starts = after.start_blocks.astype(np.int64) * BLOCK_BYTES
    ends = starts[lasts] + after.columns.size[lasts].astype(np.int64)
    return list(zip(starts[firsts].tolist(), (ends - starts[firsts]).tolist(), strict=True))


class Piece(NamedTuple):
    """A part of a READ: bytes of one entry, or zeros."""

    version: ContentVersion | None  # None: zeros
    entry: int
    offset: int  # in the entry
    size: int


class ContentFile:
    """A content file (see the module)."""

    def __init__(self, chain: UUID) -> None:
        self.chain = chain
        self._versions: list[ContentVersion] = []  # the newest first

    @property
    def is_used(self) -> bool:
        """Whether it has any version."""
        return bool(self._versions)

    def add(self, vfs: Vfs, image: Image) -> ContentVersion:
        """Adds a version, whose contents `vfs` reads. Its image has the chain of all others."""
        assert image.chain == self.chain
        added = ContentVersion(vfs, image.start_blocks.data, image.order.data)
        self._versions.insert(0, added)
        return added

    def remove(self, version: ContentVersion) -> None:
        """Removes a version of which no file is open any more."""
        self._versions.remove(version)

    def read_nowait(self, offset: int, size: int) -> Sequence[Bytes] | None:
        """The bytes, in pieces, if all are in memory; else None. Raises FuseErrno."""
        found: list[Bytes] = []
        for version, entry, start, length in self._pieces(offset, size):
            if version is None:
                found += _zeros(length)
                continue
            part = version.vfs.read_nowait(entry + 1, start, length)
            if part is None:
                return None
            found.append(part)
        return found

    async def read(self, offset: int, size: int) -> Sequence[Bytes]:
        """The bytes, in pieces. Raises FuseErrno(EIO) where one file cannot be read: the kernel
        then asks for each page alone, so that the files beside it stay readable.
        """
        found: list[Bytes] = []
        for version, entry, start, length in self._pieces(offset, size):
            if version is None:
                found += _zeros(length)
            else:
                found.append(await version.vfs.read(entry + 1, start, length))
        return found

    def _pieces(self, offset: int, size: int) -> Sequence[Piece]:
        return list(_pieces(tuple(self._versions), offset, offset + size))


def _pieces(versions: Sequence[ContentVersion], start: int, end: int) -> Iterator[Piece]:
    """The parts of a range of the content file: where one version has no file, the next one may."""
    if not versions:
        if end > start:
            yield Piece(None, -1, 0, end - start)
        return
    version, *others = versions
    starts, order, size_of = version.starts, version.order, version.vfs.snapshot.size
    rank = max(bisect_right(starts, start // BLOCK_BYTES) - 1, 0)
    while rank < len(starts) and start < end:
        first = starts[rank] * BLOCK_BYTES
        if first >= end:
            break
        entry = order[rank]
        last = min(first + size_of(entry), end)
        if last > start:
            if first > start:
                yield from _pieces(others, start, first)
                start = first
            yield Piece(version, entry, start - first, last - start)
            start = last
        rank += 1
    yield from _pieces(others, start, end)


def _zeros(size: int) -> Iterator[Bytes]:
    while size > 0:
        yield _ZEROS[:size]
        size -= len(_ZEROS)
