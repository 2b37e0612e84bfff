"""The content file of a native mount: all contents of a dataset as one virtual file.

In the mount's EROFS image (`format/image/`) each file has an address: a place in this virtual file.
The kernel reads contents there, through a FUSE mount that only the kernel and the prefetch worker
use. The gap between a file's end and the next block of 4 KiB reads as zeros.

A mount that follows its dataset serves several versions at once. Images of one *chain* share a
content file: in a chain an address keeps its content for ever, so any version that has a file there
can answer a READ.

The kernel reads ahead past the ends of the dataset's files: one READ may cover many files. If one
of them cannot be read, the READ fails, and the kernel requests single pages as they are needed. So
the other files stay readable.

Concurrency: everything runs in the trio thread of the mount's server. The native session adds a
version before it mounts the version's tree, and removes it after the kernel has closed the tree's
files.

- Only the two methods `read` wait. Everything else, and every stretch between two waits, is atomic.
- A READ is cut into pieces when it begins; later changes of the versions do not matter to it.
- The first failure of a piece, or `PATIENCE_S`, cancels the others; a thread under way goes on, and
  its result is dropped.
- READs of one extent (a run of a file's bytes in one chunk) form a group (`waiting`). A READ looks
  for a recent failure and joins the group without a wait between; a failure marks the extent and
  cancels the group in one step. So no READ slips in between, and readers do not wait for one
  failure after the other.
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
"""All addresses of an image lie below this."""

PATIENCE_S = 0.5
"""How long a READ of several files waits for all of them. Then it fails, so that a file that hangs
does not delay readers of the others for longer."""

REFUSED_S_MAX = 1.0
"""After an extent could not be read, READs of it fail at once for as long as the attempt took, but
no longer than this. The kernel sends two more READs for each page that it wanted to read ahead, and
each of them would wait for a store that hangs."""

_FAILED_MAX = 4096
"""Failed extents to remember; then all are forgotten."""

_FILES_AT_ONCE = 16
"""The files that one READ reads at once."""

_ZEROS = memoryview(bytes(1 << 20))


def private_name(node: int) -> str:
    """The name of a content file or image in the root of the native mount's FUSE mount."""
    return f"content-{HIDDEN_ROOT - node}"


class _Attempt(NamedTuple):
    begun_s: float  # trio's clock
    scope: trio.CancelScope


@dataclass(slots=True, eq=False)
class ContentVersion:
    vfs: Vfs
    starts: memoryview  # the first blocks of all contents, ascending
    order: memoryview  # the entry of each of these contents
    failed: dict[tuple[int, int], float] = field(default_factory=dict)
    """The time (trio's clock) until which READs of an extent fail at once, by entry and offset."""
    waiting: dict[tuple[int, int], set[_Attempt]] = field(default_factory=dict)
    """The group of READs that wait for an extent."""

    def read_nowait(self, entry: int, offset: int, size: int) -> Bytes | None:
        """Raises only FuseErrno."""
        try:
            return self.vfs.read_nowait(entry + 1, offset, size)
        except BaseException as fault:
            raise FuseErrno(self.vfs.errno_of(fault, "read", entry + 1)) from fault

    async def read(self, entry: int, offset: int, size: int) -> list[Bytes]:
        """Returns the bytes in pieces. Raises only FuseErrno."""
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
        """Fails the READs of an extent that began at about the same time as the failed one. Later
        ones may still succeed."""
        now_s = trio.current_time()
        took_s = now_s - failed.begun_s
        if len(self.failed) >= _FAILED_MAX:
            self.failed.clear()
        self.failed[key] = now_s + min(took_s, REFUSED_S_MAX)
        for each in self.waiting[key]:
            if each.begun_s <= failed.begun_s + took_s / 2:
                each.scope.cancel()

    def entry_at(self, offset: int) -> int:
        """The entry of the last content that begins at or before `offset`; -1 if there is none."""
        rank = bisect_right(self.starts, offset // BLOCK_BYTES) - 1
        return int(self.order[rank]) if rank >= 0 else -1


def added_ranges(before: Image, after: Image) -> list[tuple[int, int]]:
    """The ranges (offset, size) of contents that are in `after` but not in `before`, which is of
    the same chain."""
    is_new = ~np.isin(after.start_blocks, before.start_blocks)
    edges = np.flatnonzero(np.diff(is_new, prepend=False, append=False))
    firsts, lasts = edges[::2], edges[1::2] - 1
    starts = after.start_blocks.astype(np.int64) * BLOCK_BYTES
    ends = starts[lasts] + after.columns.size[lasts].astype(np.int64)
    return list(zip(starts[firsts].tolist(), (ends - starts[firsts]).tolist(), strict=True))


class Piece(NamedTuple):
    version: ContentVersion | None  # None: zeros
    entry: int
    offset: int  # in the entry
    size: int


class ContentFile:
    """Serves the versions of one chain of images."""

    def __init__(self, chain: UUID) -> None:
        self.chain = chain
        self._versions: list[ContentVersion] = []  # the newest first

    @property
    def is_used(self) -> bool:
        return bool(self._versions)

    def add(self, vfs: Vfs, image: Image) -> ContentVersion:
        """`vfs` reads the contents. The image must belong to this file's chain."""
        assert image.chain == self.chain
        added = ContentVersion(vfs, image.start_blocks.data, image.order.data)
        self._versions.insert(0, added)
        return added

    def remove(self, version: ContentVersion) -> None:
        """No file of the version may be open any more."""
        self._versions.remove(version)

    def read_nowait(self, offset: int, size: int) -> Sequence[Bytes] | None:
        """Returns pieces if all bytes are in memory. Raises FuseErrno."""
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
        """Returns pieces. Raises FuseErrno(EIO) if a file cannot be read, or if the READ covers
        several files and does not end within `PATIENCE_S`."""
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

    def only_file(self, offset: int, size: int) -> tuple[int, int] | None:
        """The place in its file, and the size, of a READ that begins in a file of the newest
        version and covers no other; None for other READs."""
        first, *rest = self._pieces(offset, size)
        if first.version is not self._versions[0] or any(each.version for each in rest):
            return None
        return first.offset, first.size

    def _pieces(self, offset: int, size: int) -> Sequence[Piece]:
        return list(_pieces(tuple(self._versions), offset, offset + size))


def _pieces(versions: Sequence[ContentVersion], start: int, end: int) -> Iterator[Piece]:
    """Each piece comes from the first version that has a file there, or else is zeros."""
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
