"""The page cache of a native mount: contents are pushed into ranges of one file, and then settled.

A *native* mount has its tree in the kernel (EROFS). The contents of all files lie in one file, the
*content file*, which the mount's server serves over FUSE. The image of the tree says at which
address of it each content begins. So contents that are neighbours there are pushed by one write,
and nothing need be looked up first.

A page of the content file that EROFS reads for a file is copied into a page of that file, and then
memory is held twice. So pages of the content file are only a staging area, a queue of what was
pushed last. The oldest are *settled* as soon as there is no room for more, and the others when
there is nothing else to do: the kernel is made to copy the files that it has not copied yet, and
then the pages of the content file are dropped. Opening settled files is faster, too: their first
reader finds the pages that it needs (290,000 files of 4 KiB a second instead of 100,000).
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import POSIX_FADV_DONTNEED, POSIX_FADV_WILLNEED
from typing import cast

import numpy as np
import numpy.typing as npt

from ...cache.coalescing_reader import Batch
from ...format.image import BLOCK_BYTES, Image
from ...format.snapshot.diff import OldIndices, SnapshotDiff
from ...format.snapshot.reader import Snapshot
from ...system import syscalls
from ..content_file import private_name
from ..sessions.protocol import NOTIFY_STORE, STORE
from .advice_process import PART, Advise, Parts, whole_files
from .page_cache import (
    PACKED_STORE,
    STORES,
    FolderHandles,
    PageCache,
    advise_in_steps,
    advise_on_files,
    some_contents,
)

STAGING_DIVISOR = 8
"""The staging area is this part (an eighth) of the memory for pages; the planner has the rest."""

CONTENTS_MAX = 256
"""Contents of one write. With its padding each is two pieces, and a write has 1,024 at most; more
make no write faster."""

SWEEP_S = 0.1
"""Time between two drops of what READs have brought, while nothing is pushed."""

CONTENT = 0xFFFFFFFF
"""Stands for the content file where an entry is named."""

_ZEROS = memoryview(bytes(BLOCK_BYTES))


@dataclass(frozen=True, slots=True)
class ContentTarget:
    """The content file of a mount, as what is pushed into: an open descriptor, and its node."""

    descriptor: int
    node: int

    @classmethod
    def open(cls, folder: int, node: int) -> "ContentTarget":
        """Open it in the folder that the server of a native mount serves. Takes `folder`, a
        descriptor. Raises OSError."""
        try:
            return cls(os.open(private_name(node), os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder), node)
        finally:
            os.close(folder)

    def close(self) -> None:
        """Close it."""
        os.close(self.descriptor)


@dataclass(frozen=True, slots=True, eq=False)
class _Staged:
    """What one batch has pushed: parts of files, and the ranges of the content file with them."""

    parts: Parts
    ranges: Parts
    bytes: int


class ContentPageCache(PageCache):
    """The page cache of a native mount (see the module)."""

    def __init__(
        self,
        mountpoint: str,
        snapshot: Snapshot,
        device: int,
        image: Image,
        content: ContentTarget,
        staging_bytes: int,
    ) -> None:
        """`device` is a descriptor of the connection that serves the content file, used for
        notifications only. `staging_bytes` is the size of the staging area."""
        super().__init__(mountpoint, snapshot, content.descriptor)
        self._device = device
        self._image = image
        self._content = content
        self._staging_bytes = staging_bytes
        self._queue: deque[_Staged] = deque()  # the staging area, oldest first
        self._queued_bytes = 0
        self._is_known = np.zeros(len(snapshot), np.bool_)  # pushed at least once
        self._is_wanted = np.zeros(len(snapshot), np.bool_)  # pushed, and not dropped since
        self._is_watched = np.zeros(len(snapshot), np.bool_)
        self._watched_files: dict[int, int] = {}  # descriptors, by entry
        # What is stored must not meet an earlier drop of the same pages, which is still to come. So
        # these count the pieces of advice that are waited for: by entry, and for all entries.
        self._settled_at = np.zeros(len(snapshot), np.int64)
        self._swept_at = 0
        self._reads_came = False  # since the last sweep
        self._swept_s = 0.0

    def _adviser(self, folders: FolderHandles) -> Advise:
        content = self._content.descriptor

        def advise(advice: int, parts: Parts) -> None:
            if parts["entry"][0] != CONTENT:
                advise_on_files(folders, self._snapshot, advice, parts)
                return
            for start, size in zip(parts["start"].tolist(), parts["size"].tolist(), strict=True):
                os.posix_fadvise(content, start, size, advice)

        return advise

    def inherit(self, old: PageCache, diff: SnapshotDiff) -> OldIndices:
        """The staging area is taken over, as the content file stays the same. Settled files are
        not: each version is a file system of its own."""
        assert isinstance(old, ContentPageCache)
        kept = np.full(len(diff.new), -1, np.int32)
        self._reads_came = True  # so that what is not taken over is dropped
        if old._image.chain != self._image.chain:
            return kept
        entries = np.flatnonzero(diff.unchanged >= 0)
        before = diff.unchanged[entries]
        stays = self._image.first_block[entries] == old._image.first_block[before]
        new_index = np.full(len(diff.old), CONTENT, np.uint32)
        new_index[before[stays]] = entries[stays]
        staged_bytes = np.zeros(len(diff.new), np.int64)
        for staged in old._queue:
            parts = staged.parts[old._is_wanted[staged.parts["entry"]]]
            parts["entry"] = new_index[parts["entry"]]
            parts = parts[parts["entry"] != CONTENT]
            np.add.at(staged_bytes, parts["entry"], parts["size"].astype(np.int64))
            self._note_staged(_Staged(parts, staged.ranges, staged.bytes))
        size = self._snapshot.columns.size.astype(np.int64)
        whole = np.flatnonzero((size > 0) & (staged_bytes >= size))
        kept[whole] = diff.unchanged[whole]
        return kept

    def store(self, batch: Batch) -> list[int]:
        """Leaves out contents that are larger than their files: they would reach into others."""
        sizes = np.fromiter(map(len, batch.contents), np.int64, len(batch.contents))
        file_sizes = self._snapshot.columns.size[batch.entries].astype(np.int64)
        too_large = batch.starts + sizes > file_sizes
        if too_large.any():
            fits = np.flatnonzero(~too_large)
            self.store(some_contents(batch, fits.tolist()))
            return np.flatnonzero(too_large).tolist()
        if not len(sizes):
            return []
        begins = self._image.first_block[batch.entries].astype(np.int64) * BLOCK_BYTES
        begins += batch.starts
        paddings = -sizes % BLOCK_BYTES
        ends = begins + sizes + paddings
        runs = np.flatnonzero(np.concatenate([[True], begins[1:] != ends[:-1]]))
        staged = _staged(batch, sizes, begins[runs], ends[np.append(runs[1:], len(ends)) - 1])
        while self._queue and self._queued_bytes + staged.bytes > self._staging_bytes:
            self._settle_oldest()
        self._process.wait_for(max(int(self._settled_at[batch.entries].max()), self._swept_at))
        cuts = np.union1d(runs, np.arange(0, len(sizes), CONTENTS_MAX))
        pieces: Sequence[memoryview] = batch.contents
        stride = 1
        if paddings.any():
            padded = [_ZEROS] * (2 * len(sizes))
            padded[::2] = batch.contents
            padded[1::2] = [_ZEROS[:count] for count in paddings.tolist()]
            pieces, stride = padded, 2
        self._write(begins[cuts], ends[np.append(cuts[1:], len(ends)) - 1], cuts * stride, pieces)
        self._note_staged(staged)
        return []

    def _write(
        self,
        begins: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
        cuts: npt.NDArray[np.int64],
        pieces: Sequence[memoryview],
    ) -> None:
        """Store pieces in the content file, those from each of the `cuts` on by a write of its
        own, which fills the file from `begins` to `ends`."""
        headers = np.zeros(len(cuts), STORES)
        headers["code"], headers["node"] = NOTIFY_STORE, self._content.node
        headers["offset"], headers["size"] = begins, ends - begins
        headers["length"] = headers["size"] + STORE.size
        packed = cast(list[bytes], headers.view(PACKED_STORE).tolist())
        firsts = cuts.tolist()
        for header, first, behind in zip(packed, firsts, [*firsts[1:], len(pieces)], strict=True):
            os.writev(self._device, [header, *pieces[first:behind]])

    def _note_staged(self, staged: _Staged) -> None:
        entries = staged.parts["entry"]
        self._is_wanted[entries] = True
        self.known_entries += int(np.count_nonzero(~self._is_known[np.unique(entries)]))
        self._is_known[entries] = True
        self._queue.append(staged)
        self._queued_bytes += staged.bytes

    def _settle_oldest(self) -> None:
        """Have the oldest of the staging area settled soon: the kernel copies its files that are
        still wanted, and then the pages of the content file are dropped."""
        staged = self._queue.popleft()
        self._queued_bytes -= staged.bytes
        parts = staged.parts[self._is_wanted[staged.parts["entry"]]]
        watched = self._is_watched[parts["entry"]]
        for entry, start, size in parts[watched].tolist():  # an open would look like a reader's
            advise_in_steps(self._watched_files[entry], start, size, POSIX_FADV_WILLNEED)
        self._process.advise(POSIX_FADV_WILLNEED, parts[~watched], _no_progress)
        self._process.advise(POSIX_FADV_DONTNEED, staged.ranges, _no_progress)
        self._settled_at[staged.parts["entry"]] = self._process.sent

    def tidy(self) -> bool:
        """Settles what is left in the staging area, the oldest first. Then drops what READs have
        brought into the content file, since the files that were read have copies of it."""
        if self._queue:
            self._settle_oldest()
            return True
        now_s = time.monotonic()
        if self._reads_came and now_s - self._swept_s >= SWEEP_S:
            self._reads_came, self._swept_s = False, now_s
            whole = np.zeros(1, PART)
            whole["entry"] = CONTENT
            self._process.advise(POSIX_FADV_DONTNEED, whole, _no_progress)
            self._swept_at = self._process.sent
        return False

    def note_reads(self) -> None:
        """Note that READs have brought pages into the content file."""
        self._reads_came = True

    def drop(self, entries: npt.NDArray[np.uint32], on_progress: Callable[[], None]) -> None:
        """The pages of files are dropped soon, those of the content file with the rest of their
        staging area."""
        self._is_wanted[entries] = False
        self._process.advise(POSIX_FADV_DONTNEED, whole_files(entries), on_progress)

    def resident_bytes(self, entry: int) -> int:
        """Those of the file; where it has none, those of its range in the content file."""
        size = self._snapshot.stat(entry).size
        start = int(self._image.first_block[entry]) * BLOCK_BYTES
        return self._resident_bytes_of_file(entry) or syscalls.cached_bytes(
            self._content.descriptor, start, size
        )

    def watch(self, entries: Iterable[int]) -> None:
        """Also opens the files, before they are watched: they are settled by these descriptors, as
        an open would look like a reader's."""
        entries = list(entries)
        for entry in entries:
            if entry not in self._watched_files:
                with suppress(OSError):
                    self._watched_files[entry] = self._open(entry)
                    self._is_watched[entry] = True
        super().watch(entries)

    def unwatch(self, entries: Iterable[int]) -> None:
        """Also closes the files."""
        entries = list(entries)
        super().unwatch(entries)
        for entry in entries:
            file = self._watched_files.pop(entry, -1)
            if file >= 0:
                os.close(file)
                self._is_watched[entry] = False

    def close(self) -> None:
        """Release the mount."""
        self.unwatch(tuple(self._watched_files))
        super().close()


def _staged(
    batch: Batch,
    sizes: npt.NDArray[np.int64],
    begins: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
) -> _Staged:
    """What a batch pushes into the ranges from `begins` to `ends`."""
    parts = np.empty(len(sizes), PART)
    parts["entry"], parts["start"], parts["size"] = batch.entries, batch.starts, sizes
    ranges = np.empty(len(begins), PART)
    ranges["entry"], ranges["start"], ranges["size"] = CONTENT, begins, ends - begins
    return _Staged(parts, ranges, int((ends - begins).sum()))


def _no_progress() -> None:
    """Nobody waits for the staging area."""
