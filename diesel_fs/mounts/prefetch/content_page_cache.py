"""The page cache of a native mount: contents are pushed into ranges of one file, and then settled.

A *native* mount has its tree in the kernel (EROFS). The contents of all files lie in one file, the
*content file*, which the mount's server serves over FUSE. The image of the tree says at which
address of it each content begins. So contents that are neighbours there are pushed by one write,
and nothing need be looked up first.

A page of the content file that EROFS reads for a file is copied into a page of that file, and then
memory is held twice. So pages of the content file are only a staging area, a queue of what was
pushed last. The oldest are *settled* as soon as there is no room for more, and the others when
there is nothing else to do: the kernel is made to copy the files that it has not copied yet, and
then the pages of the content file are dropped. While readers follow a plan, only the idle worker
settles: what it has pushed is read soon, and dropped behind the reader on both sides. Opening
settled files is faster, too: their first reader finds the pages that it needs (290,000 files of
4 KiB a second instead of 100,000).
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from ...system.syscalls import cached_bytes
from ..sessions.protocol import NOTIFY_STORE, STORE
from ..tree.content_file import CONTENT_BYTES, private_name
from .advice_process import PART, Advise, Parts, whole_files
from .page_cache import (
    PACKED_STORE,
    STORES,
    FolderHandles,
    PageCache,
    advise_in_steps,
    advise_on_files,
    drop_failed,
    some_contents,
)

STAGING_DIVISOR = 16
"""The staging area is this part (a sixteenth) of the memory for pages; the planner has the rest."""

CONTENTS_MAX = 256
"""Contents of one write. With its padding each is two pieces, and a write has 1,024 at most; more
make no write faster."""

TAKEN_BYTES = 1 << 20
"""So much is taken at once from the files of another version."""

LOOK_S = 0.05
"""Time between two looks at how much READs have brought. As the kernel walks over all pages at each
look, they take a `1 / LOOK_DIVISOR` of the time at most."""

LOOK_DIVISOR = 50

GAPS_MAX = 4096
"""Ranges between contents of the staging area that are looked through for these; a millisecond."""

QUIET_S = 0.1
"""When no READ has come for so long, all that READs have brought is dropped."""

NEIGHBOURS = 3
"""Of a file, in each direction; all of them must be resident, or the file counts as lost."""

CONTENT = 0xFFFFFFFF
"""Stands for the content file where an entry is named."""

_KNOWN, _WANTED, _WATCHED, _SETTLING = 1, 2, 4, 8
"""What is noted of an entry: it was pushed at some time; it was pushed and not dropped since; it is
watched; the process is settling a part of it."""

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

    @property
    def pages(self) -> npt.NDArray[np.uint32]:
        """How many pages each of the parts fills."""
        return _pages_of(self.parts)


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
        planned_bytes: int = 0,
    ) -> None:
        """`device` is a descriptor of the connection that serves the content file, used for
        notifications only. `staging_bytes` is the size of the staging area, `planned_bytes` what it
        may have while readers follow a plan."""
        super().__init__(mountpoint, snapshot, content.descriptor)
        self._device = device
        self._image = image
        self._content = content
        self._staging_bytes = self._limit_bytes = staging_bytes
        self._planned_bytes = max(staging_bytes, planned_bytes)
        self._queue: deque[_Staged] = deque()  # the staging area, oldest first
        self._queued_bytes = 0
        self._staged_pages = np.zeros(len(snapshot), np.uint32)  # by entry: in the staging area
        self._state = np.zeros(len(snapshot), np.uint8)  # by entry: `_KNOWN` and so on
        self._watched_files: dict[int, int] = {}  # descriptors, by entry
        self._settling: deque[tuple[int, _Staged]] = deque()  # by the process's last piece for it
        self._has_reads = False  # READs may have brought pages of the content file
        self._read_s = self._look_s = 0.0  # of the last READ, and of the next look
        self._process.start()  # all that is pushed is settled, or dropped

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
        not: each version is a file system of its own (see `take_contents`)."""
        assert isinstance(old, ContentPageCache)
        kept = np.full(len(diff.new), -1, np.int32)
        self._has_reads = True  # so that what is not taken over is dropped
        if old._image.chain != self._image.chain:
            return kept
        entries = np.flatnonzero(diff.unchanged >= 0)
        before = diff.unchanged[entries]
        stays = self._image.first_block[entries] == old._image.first_block[before]
        new_index = np.full(len(diff.old), CONTENT, np.uint32)
        new_index[before[stays]] = entries[stays]
        staged_bytes = np.zeros(len(diff.new), np.int64)
        for staged in old._queue:
            parts = staged.parts[old._state[staged.parts["entry"]] & _WANTED != 0]
            parts["entry"] = new_index[parts["entry"]]
            parts = parts[parts["entry"] != CONTENT]
            np.add.at(staged_bytes, parts["entry"], parts["size"].astype(np.int64))
            self._note_staged(_Staged(parts, staged.ranges))
        size = self._snapshot.columns.size.astype(np.int64)
        whole = np.flatnonzero((size > 0) & (staged_bytes >= size))
        kept[whole] = diff.unchanged[whole]
        return kept

    def take_contents(self, entries: npt.NDArray[np.uint32]) -> Iterator[Batch]:
        """Of files that are whole in the page cache, and not only in the staging area."""
        taken: list[tuple[int, int, memoryview]] = []
        taken_bytes = 0
        for entry in entries.tolist():
            for start, content in self._taken_from(entry):
                taken.append((entry, start, memoryview(content)))
                taken_bytes += len(content)
                if taken_bytes >= TAKEN_BYTES or len(taken) >= CONTENTS_MAX:
                    yield _batch_of(taken)
                    taken, taken_bytes = [], 0
        if taken:
            yield _batch_of(taken)

    def _taken_from(self, entry: int) -> Iterator[tuple[int, bytes]]:
        """The parts of one file, and where each begins."""
        size = self._snapshot.size(entry)
        try:
            file = self._open(entry)
        except OSError:  # the mount is ending
            return
        try:
            if cached_bytes(file, 0, size) < size:
                return
            for start in range(0, size, TAKEN_BYTES):
                yield start, os.pread(file, TAKEN_BYTES, start)
                os.posix_fadvise(file, start, TAKEN_BYTES, POSIX_FADV_DONTNEED)
        finally:
            os.close(file)

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
        need_bytes = int(staged.pages.sum(dtype=np.int64)) * BLOCK_BYTES
        while self._queue and not self._staged_pages[self._queue[0].parts["entry"]].any():
            self._queue.popleft()  # its files have been dropped
        while self._queue and self._queued_bytes + need_bytes > self._limit_bytes:
            self._settle_oldest()
        if (self._state[batch.entries] & _SETTLING).any():
            # The drop that settles them must not come after this.
            self._process.wait_for(self._process.sent)
            self._forget_settled()
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
        self._sweep()
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
        is_new = self._state[entries] & _KNOWN == 0
        self.known_entries += len(np.unique(entries[is_new]))
        self._state[entries] |= _KNOWN | _WANTED
        self._queue.append(staged)
        np.add.at(self._staged_pages, entries, staged.pages)
        self._queued_bytes += int(staged.pages.sum(dtype=np.int64)) * BLOCK_BYTES

    def _settle_oldest(self) -> None:
        """Have the oldest of the staging area settled soon: the kernel copies its files that are
        still wanted, and then the pages of the content file are dropped."""
        staged = self._queue.popleft()
        parts = staged.parts[self._state[staged.parts["entry"]] & _WANTED != 0]
        self._unstage(parts["entry"], _pages_of(parts))
        watched = self._state[parts["entry"]] & _WATCHED != 0
        for entry, start, size in parts[watched].tolist():  # an open would look like a reader's
            advise_in_steps(self._watched_files[entry], start, size, POSIX_FADV_WILLNEED)
        self._process.advise(POSIX_FADV_WILLNEED, parts[~watched], _no_progress)
        self._process.advise(POSIX_FADV_DONTNEED, staged.ranges, _no_progress)
        self._settling.append((self._process.sent, staged))
        self._forget_settled()

    def _forget_settled(self) -> None:
        """Take what is settled from the list of what is being settled."""
        while self._settling and self._settling[0][0] <= self._process.done:
            _, staged = self._settling.popleft()
            self._state[staged.parts["entry"]] &= 0xFF ^ _SETTLING
        for _, staged in self._settling:  # an entry may have parts in several of them
            self._state[staged.parts["entry"]] |= _SETTLING

    def set_planned(self, *, is_planned: bool) -> None:
        """What a plan has pushed stays in the staging area until a reader has read it: it is
        dropped soon after, and to settle it would cost as much as to read it."""
        self._limit_bytes = self._planned_bytes if is_planned else self._staging_bytes

    def tidy(self) -> bool:
        """Settles what is left in the staging area, the oldest first."""
        if self._queue:
            self._settle_oldest()
            return True
        self._sweep()
        return False

    def _sweep(self) -> None:
        """Drop pages of the content file that READs have brought, as the files that were read have
        copies of them: at once where there is no room for them in the staging area, else when no
        more READs come (of those that came, the kernel has read ahead)."""
        now_s = time.monotonic()
        if not self._has_reads or now_s < self._look_s:
            return
        is_quiet = now_s - self._read_s >= QUIET_S
        content = self._content.descriptor
        held = cached_bytes(content, 0, CONTENT_BYTES)
        looked_s = time.monotonic()
        self._look_s = looked_s + max(LOOK_S, LOOK_DIVISOR * (looked_s - now_s))
        if not is_quiet and held - self._queued_bytes <= self._staging_bytes:
            return
        self._has_reads = not is_quiet
        kept = [self._ranges_of(np.flatnonzero(self._staged_pages).astype(np.uint32))]
        kept += [staged.ranges for _, staged in self._settling]
        starts = np.concatenate([ranges["start"] for ranges in kept]).astype(np.int64)
        sizes = np.concatenate([ranges["size"] for ranges in kept]).astype(np.int64)
        order = np.argsort(starts)
        starts, behind = starts[order], (starts + sizes)[order]
        begins = np.concatenate([[0], np.maximum.accumulate(behind)])
        ends = np.concatenate([starts, [CONTENT_BYTES]])
        gaps = np.flatnonzero(ends > begins)
        if len(gaps) > GAPS_MAX:
            gaps = gaps[np.argpartition((begins - ends)[gaps], GAPS_MAX)[:GAPS_MAX]]
        for begin, end in zip(begins[gaps].tolist(), ends[gaps].tolist(), strict=True):
            os.posix_fadvise(content, begin, end - begin, POSIX_FADV_DONTNEED)

    def note_reads(self) -> None:
        """READs have brought pages of the content file."""
        self._has_reads, self._read_s = True, time.monotonic()

    def drop(self, entries: npt.NDArray[np.uint32], on_progress: Callable[[], None]) -> None:
        """The pages of files are dropped soon, those of the content file with the rest of their
        staging area."""
        self._state[entries] &= 0xFF ^ _WANTED
        self._process.advise(POSIX_FADV_DONTNEED, whole_files(entries), on_progress)
        staged = entries[self._staged_pages[entries] > 0]
        if len(staged):
            ranges = self._ranges_of(staged)
            self._process.advise(POSIX_FADV_DONTNEED, ranges, on_progress)
            self._unstage(staged, self._staged_pages[staged])
            self._settling.append((self._process.sent, _Staged(whole_files(staged), ranges)))
            self._forget_settled()

    def _unstage(self, entries: npt.NDArray[np.uint32], pages: npt.NDArray[np.uint32]) -> None:
        """Note that so many pages of each entry are not in the staging area any more. An entry may
        be named several times."""
        some = np.unique(entries)
        before = self._staged_pages[some].sum(dtype=np.int64)
        np.subtract.at(self._staged_pages, entries, np.minimum(pages, self._staged_pages[entries]))
        self._queued_bytes -= BLOCK_BYTES * int(
            before - self._staged_pages[some].sum(dtype=np.int64)
        )

    def _ranges_of(self, entries: npt.NDArray[np.uint32]) -> Parts:
        """The ranges of the content file that have these entries, as few as possible."""
        if not len(entries):
            return np.empty(0, PART)
        entries = entries[np.argsort(self._image.first_block[entries])]
        begins = self._image.first_block[entries].astype(np.int64) * BLOCK_BYTES
        sizes = self._snapshot.columns.size[entries].astype(np.int64)
        ends = begins + sizes + -sizes % BLOCK_BYTES
        firsts = np.flatnonzero(np.concatenate([[True], begins[1:] != ends[:-1]]))
        ranges = np.empty(len(firsts), PART)
        ranges["entry"], ranges["start"] = CONTENT, begins[firsts]
        ranges["size"] = ends[np.append(firsts[1:], len(ends)) - 1] - begins[firsts]
        return ranges

    def is_lost(self, entry: int) -> bool:
        """By its neighbours: the kernel may have read ahead in the content file, beyond files that
        were missed, or the READ may have filled its pages again already."""
        blocks, order = self._image.start_blocks, self._image.order
        at = int(np.searchsorted(blocks, self._image.first_block[entry]))
        near = order[max(at - NEIGHBOURS, 0) : at + NEIGHBOURS + 1]
        near = near[(self._state[near] & _WANTED != 0) & (near != entry)]
        with suppress(OSError):
            return not all(self.resident_bytes(each) for each in near.tolist())
        return True

    def resident_bytes(self, entry: int) -> int:
        """Those of the file; where it has none, those of its range in the content file."""
        size = self._snapshot.stat(entry).size
        start = int(self._image.first_block[entry]) * BLOCK_BYTES
        return self._resident_bytes_of_file(entry) or cached_bytes(
            self._content.descriptor, start, size
        )

    def is_whole(self, entry: int) -> bool:
        """In the file, or in its range in the content file, as long as it is not settled."""
        size = self._snapshot.stat(entry).size
        start = int(self._image.first_block[entry]) * BLOCK_BYTES
        return (
            self._resident_bytes_of_file(entry) >= size
            or cached_bytes(self._content.descriptor, start, size) >= size
        )

    def drop_failed(self, entry: int) -> bool:
        """Of the file, and of its range in the content file."""
        size = self._snapshot.stat(entry).size
        start = int(self._image.first_block[entry]) * BLOCK_BYTES
        in_content = drop_failed(self._content.descriptor, start, size)
        return super().drop_failed(entry) or in_content

    def watch(self, entries: Iterable[int]) -> None:
        """Also opens the files, before they are watched: they are settled by these descriptors, as
        an open would look like a reader's."""
        entries = list(entries)
        for entry in entries:
            if entry not in self._watched_files:
                with suppress(OSError):
                    self._watched_files[entry] = self._open(entry)
                    self._state[entry] |= _WATCHED
        super().watch(entries)

    def unwatch(self, entries: Iterable[int]) -> None:
        """Also closes the files."""
        entries = list(entries)
        super().unwatch(entries)
        for entry in entries:
            file = self._watched_files.pop(entry, -1)
            if file >= 0:
                os.close(file)
                self._state[entry] &= 0xFF ^ _WATCHED

    def retire(self) -> None:
        """See `PageCache`."""
        if self.events >= 0:
            self.unwatch(tuple(self._watched_files))
        super().retire()


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
    return _Staged(parts, ranges)


def _batch_of(taken: Sequence[tuple[int, int, memoryview]]) -> Batch:
    """A batch of parts of files, each with its entry and its begin."""
    entries, starts, contents = zip(*taken, strict=True)
    return Batch(np.array(entries, np.int64), np.array(starts, np.int64), list(contents))


def _pages_of(parts: Parts) -> npt.NDArray[np.uint32]:
    """How many pages each of these parts fills."""
    pages: npt.NDArray[np.uint32] = (
        (parts["size"] + np.uint64(BLOCK_BYTES - 1)) // np.uint64(BLOCK_BYTES)
    ).astype(np.uint32)
    return pages


def _no_progress() -> None:
    """Nobody waits for the staging area."""
