"""The content file of a native mount: all contents of a dataset as one virtual file.

The tree of a native mount is an EROFS image in the kernel (`format/image.py`), in which each file
has an address: a place in this virtual file. The kernel reads the content of a file there, through
a FUSE mount that only the kernel and the prefetch worker use. Between two files lie zeros up to the
next block of 4 KiB.

A mount that follows its dataset serves several versions at once. Images of one *chain* share a
content file: in a chain an address has one content for ever, so each READ can be answered from
whichever version has a file there. An image of another chain gets a content file of its own.

The kernel reads ahead in this file, and so over the ends of files: one READ may ask for many of
them. Where one of these fails, the READ fails, and the kernel asks for the pages one by one as they
are needed. So the files beside it stay readable.

Concurrency: one trio task at a time, as in `vfs.py`. Only `read` waits.
"""

import errno
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

import numpy as np
import trio

from ...format.entries import Bytes
from ...format.image import BLOCK_BYTES, Image
from .attributes import HIDDEN_ROOT, FuseErrno
from .vfs import Vfs

CONTENT_BYTES = 1 << 44
"""The size of the content file: all addresses that an image can have."""

PATIENCE_S = 0.5
"""So long does a READ of several files wait for all of them. Then it fails, since one that hangs
must not delay readers of the others for longer."""

REFUSED_S_MAX = 1.0
"""After an extent could not be read, READs of it fail at once for as long as the attempt took, but
no longer than this. The kernel sends two for each page that it wanted to read ahead, and each would
wait for a store that hangs. A store that answers at once is asked again at once."""

_FAILED_MAX = 4096
"""So many extents that could not be read are remembered; then all are forgotten."""

_FILES_AT_ONCE = 16
"""Files of one READ that are read at once."""

_ZEROS = memoryview(bytes(1 << 20))


def private_name(node: int) -> str:
    """The name of a file in the root of the FUSE mount that no listing shows."""
    return f"content-{HIDDEN_ROOT - node}"


class _Attempt(NamedTuple):
    """A READ of an extent that waits."""

    begun_s: float  # trio's clock
    scope: trio.CancelScope


@dataclass(slots=True, eq=False)
class ContentVersion:
    """One version of the dataset in the content file."""

    vfs: Vfs
    starts: memoryview  # the first blocks of all contents, ascending
    order: memoryview  # the entries that have them
    failed: dict[tuple[int, int], float] = field(default_factory=dict)
    """Until when (trio's clock) READs of an extent fail at once, by entry and offset."""
    waiting: dict[tuple[int, int], set[_Attempt]] = field(default_factory=dict)
    """READs of extents that wait. Those that began together fail together, or a reader would wait
    for one after the other."""

    def read_nowait(self, entry: int, offset: int, size: int) -> Bytes | None:
        """As that of `vfs`. Raises FuseErrno alone."""
        try:
            return self.vfs.read_nowait(entry + 1, offset, size)
        except BaseException as fault:
            raise FuseErrno(self.vfs.errno_of(fault, "read", entry + 1)) from fault

    async def read(self, entry: int, offset: int, size: int) -> list[Bytes]:
        """The bytes, in pieces. Raises FuseErrno alone."""
        found: list[Bytes] = []
        for extent in self.vfs.snapshot.extents(entry, offset, offset + size):
            start, end = max(extent.start, offset), min(extent.start + extent.size, offset + size)
            key = entry, extent.start
            now_s = trio.current_time()
            if now_s < self.failed.get(key, now_s):
                raise FuseErrno(errno.EIO)
            attempts = self.waiting.setdefault(key, set())
            with trio.CancelScope() as scope:
                attempt = _Attempt(now_s, scope)
                attempts.add(attempt)
                try:
                    found.append(await self.vfs.read(entry + 1, start, end - start))
                except trio.Cancelled:
                    raise
                except BaseException as fault:
                    self._fail(key, attempt)
                    raise FuseErrno(self.vfs.errno_of(fault, "read", entry + 1)) from fault
                finally:
                    attempts.discard(attempt)
                    if not attempts:
                        self.waiting.pop(key, None)
            if scope.cancelled_caught:
                raise FuseErrno(errno.EIO)
        return found

    def _fail(self, key: tuple[int, int], failed: _Attempt) -> None:
        """Fail the READs of an extent that wait since about the same time as one that has failed.
        A later one may get what the store has by now."""
        now_s = trio.current_time()
        took_s = now_s - failed.begun_s
        if len(self.failed) >= _FAILED_MAX:
            self.failed.clear()
        self.failed[key] = now_s + min(took_s, REFUSED_S_MAX)
        for each in self.waiting[key]:
            if each.begun_s <= failed.begun_s + took_s / 2:
                each.scope.cancel()

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
            part = version.read_nowait(entry, start, length)
            if part is None:
                return None
            found.append(part)
        return found

    async def read(self, offset: int, size: int) -> Sequence[Bytes]:
        """The bytes, in pieces. Raises FuseErrno(EIO) where one file cannot be read, or where one
        of several does not come in time.
        """
        pieces = self._pieces(offset, size)
        found: list[Sequence[Bytes]] = [()] * len(pieces)
        waiting = iter(range(len(pieces)))
        failure: list[FuseErrno] = []

        async def read_some() -> None:
            for number in waiting:
                version, entry, start, length = pieces[number]
                if version is None:
                    found[number] = tuple(_zeros(length))
                    continue
                try:
                    found[number] = await version.read(entry, start, length)
                except FuseErrno as error:
                    failure.append(error)
                    all_of_them.cancel()

        files = sum(piece.version is not None for piece in pieces)
        with trio.move_on_after(PATIENCE_S if files > 1 else math.inf) as all_of_them:
            async with trio.open_nursery() as nursery:
                for _ in range(min(len(pieces), _FILES_AT_ONCE)):
                    nursery.start_soon(read_some)
        if failure:
            raise failure[0]
        if all_of_them.cancelled_caught:
            raise FuseErrno(errno.EIO)
        return [part for parts in found for part in parts]

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
