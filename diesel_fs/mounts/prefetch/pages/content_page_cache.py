"""The page cache of a native mount: contents are pushed into ranges of one file, and then settled.

A *native* mount has its tree in the kernel (EROFS). The contents of all files lie in one file, the
*content file*, which the mount's server serves over FUSE; the image of the tree has the address of
each content there. So neighbours are pushed by one write, and no name need be looked up first.

EROFS copies each page of the content file that it reads into a page of the file that was read, and
then memory is held twice. So pages of the content file are only a staging area (`staging_area.py`).
To *settle* some of them means: the kernel is made to copy the files that it has not copied yet, and
then the pages of the content file are dropped. The oldest are settled when the area is full, the
others when the worker has nothing else to do. Opening settled files is faster, too: 290,000 files
of 4 KiB a second instead of 100,000. While readers follow a plan, the area may be as large as all
memory for pages: the pushed files are read soon, and then dropped on both sides.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import POSIX_FADV_DONTNEED, POSIX_FADV_WILLNEED

import numpy as np
import numpy.typing as npt

from ....cache.readers.coalescing_reader import ExtentBatch
from ....format.image import BLOCK_BYTES, Image
from ....format.snapshot.diff import OldIndices, SnapshotDiff
from ....format.snapshot.reader import Snapshot
from ....system.syscalls import cached_bytes
from ...tree.content_file import CONTENT_BYTES, private_name
from .advice_process import PART, Advise, Parts, whole_files
from .mount_files import MountFiles, advise_in_steps, drop_failed
from .page_cache import PageCache, some_contents, store_heads
from .staging_area import CONTENT, Staged, StagingArea, content_ranges, joined

STAGING_DIVISOR = 16
"""The staging area is a sixteenth of the memory for pages; the planner has the rest."""

CONTENTS_MAX = 256
"""The most contents of one write. Each takes two of the write's 1,024 pieces (itself and its
padding). More would make no write more efficient."""

TAKEN_BYTES = 1 << 20
"""About how much one batch takes over from the files of another version."""

LOOK_S, LOOK_DIVISOR = 0.05, 50
"""The least time between two counts of the pages that READs have brought. The kernel walks over all
pages at each, so these counts take at most a fiftieth of the time."""

GAPS_MAX = 4096
"""The most ranges outside the staging area that one sweep drops, which takes a millisecond."""

QUIET_S = 0.1
"""If no READ has come for this time, all pages that READs have brought are dropped."""

NEIGHBOURS = 3
"""If one of this many files on each side of a missed file is not resident, the kernel has probably
freed the pages of all."""

_ZEROS = memoryview(bytes(BLOCK_BYTES))


@dataclass(frozen=True, slots=True)
class ContentTarget:
    """A descriptor of a mount's content file, and the file's node in the FUSE connection."""

    descriptor: int
    node: int

    @classmethod
    def open(cls, folder: int, node: int) -> "ContentTarget":
        """Open the content file in the folder that the server of a native mount serves. Closes
        `folder`, a descriptor. Raises OSError."""
        try:
            return cls(os.open(private_name(node), os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder), node)
        finally:
            os.close(folder)

    def close(self) -> None:
        os.close(self.descriptor)


@dataclass(slots=True)
class ReadPages:
    """The pages of the content file that READs have brought; the files themselves have copies."""

    content: int  # a descriptor
    has_reads: bool = False  # there may be such pages
    _read_s: float = 0.0  # of the last READ
    _look_s: float = 0.0  # of the next look

    def note_reads(self) -> None:
        self.has_reads, self._read_s = True, time.monotonic()

    def sweep(self, staging: StagingArea, bytes_max: int) -> None:
        """Drop these pages: at once if they take more than `bytes_max`, otherwise when no READ has
        come for `QUIET_S` (the kernel has also read ahead, which later READs may need)."""
        now_s = time.monotonic()
        if not self.has_reads or now_s < self._look_s:
            return
        is_quiet = now_s - self._read_s >= QUIET_S
        held = cached_bytes(self.content, 0, CONTENT_BYTES)
        looked_s = time.monotonic()
        self._look_s = looked_s + max(LOOK_S, LOOK_DIVISOR * (looked_s - now_s))
        if not is_quiet and held - staging.bytes <= bytes_max:
            return
        self.has_reads = not is_quiet
        for begin, end in _gaps(list(staging.ranges())):
            os.posix_fadvise(self.content, begin, end - begin, POSIX_FADV_DONTNEED)


class ContentPageCache(PageCache):
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
        """`device` is a descriptor of the connection that serves the content file, only for
        notifications. `planned_bytes` is the size of the staging area while readers follow a plan.
        """
        super().__init__(mountpoint, snapshot, content.descriptor)
        self._device = device
        self._image = image
        self._content = content
        self._staging_bytes = self._limit_bytes = staging_bytes
        self._planned_bytes = max(staging_bytes, planned_bytes)
        self._staging = StagingArea(image.first_block, snapshot.columns.size)
        self._is_known = np.zeros(len(snapshot), np.bool_)  # pushed at some time
        self._is_wanted = np.zeros(len(snapshot), np.bool_)  # pushed and not dropped since
        self._read_pages = ReadPages(content.descriptor)
        self._process.start()  # it will be needed: all pushed pages are settled or dropped

    def _adviser(self, files: MountFiles) -> Advise:
        content = self._content.descriptor

        def advise(advice: int, parts: Parts) -> None:
            if parts["entry"][0] != CONTENT:
                files.advise(advice, parts)
                return
            for start, size in zip(parts["start"].tolist(), parts["size"].tolist(), strict=True):
                os.posix_fadvise(content, start, size, advice)

        return advise

    # Another version

    def inherit(self, old: PageCache, diff: SnapshotDiff) -> OldIndices:
        """Takes over the staging area, if the content file stays the same. Settled files are left
        to `take_contents`: the tree of each version is a file system of its own."""
        assert isinstance(old, ContentPageCache)
        kept = np.full(len(diff.new), -1, np.int32)
        self._read_pages.has_reads = True  # `sweep` then drops all pages that are not staged
        if old._image.chain != self._image.chain:
            return kept
        entries = np.flatnonzero(diff.unchanged >= 0)
        before = diff.unchanged[entries]
        stays = self._image.first_block[entries] == old._image.first_block[before]
        new_index = np.full(len(diff.old), CONTENT, np.uint32)
        new_index[before[stays]] = entries[stays]
        staged_bytes = np.zeros(len(diff.new), np.int64)
        for staged in old._staging.queue:
            parts = staged.parts[old._is_wanted[staged.parts["entry"]]]
            parts["entry"] = new_index[parts["entry"]]
            parts = parts[parts["entry"] != CONTENT]
            np.add.at(staged_bytes, parts["entry"], parts["size"].astype(np.int64))
            self._note_staged(Staged(parts, staged.ranges))
        size = self._snapshot.columns.size.astype(np.int64)
        whole = np.flatnonzero((size > 0) & (staged_bytes >= size))
        kept[whole] = diff.unchanged[whole]
        return kept

    def take_contents(self, entries: npt.NDArray[np.uint32]) -> Iterator[ExtentBatch]:
        """Takes the files that have all their pages in EROFS, not only in the staging area."""
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
        size = self._snapshot.size(entry)
        try:
            file = self._files.open(entry)
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

    # Pushes

    def store(self, batch: ExtentBatch) -> list[int]:
        """Returns the places of contents that reach beyond the ends of their files: they would
        overwrite the contents of other files."""
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
        range_begins, range_ends, firsts = joined(begins, ends)
        parts = np.empty(len(sizes), PART)
        parts["entry"], parts["start"], parts["size"] = batch.entries, batch.starts, sizes
        staged = Staged(parts, content_ranges(range_begins, range_ends))
        self._make_room(int(staged.pages.sum(dtype=np.int64)) * BLOCK_BYTES)
        if self._staging.is_settling[batch.entries].any():
            # Some of these files are being settled: the drop of their pages must not come after
            # this push
            self._process.wait_for(self._process.sent)
            self._staging.note_settled(self._process.done)
        cuts = np.union1d(firsts, np.arange(0, len(sizes), CONTENTS_MAX))
        pieces: Sequence[memoryview] = batch.contents
        stride = 1
        if paddings.any():
            padded = [_ZEROS] * (2 * len(sizes))
            padded[::2] = batch.contents
            padded[1::2] = [_ZEROS[:count] for count in paddings.tolist()]
            pieces, stride = padded, 2
        self._write(begins[cuts], ends[np.append(cuts[1:], len(ends)) - 1], cuts * stride, pieces)
        self._note_staged(staged)
        self._read_pages.sweep(self._staging, self._staging_bytes)
        return []

    def _write(
        self,
        begins: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
        cuts: npt.NDArray[np.int64],
        pieces: Sequence[memoryview],
    ) -> None:
        """Store pieces by one write for each of the `cuts`. A write has the pieces from its cut to
        the next one, and fills the file from its `begins` to its `ends`."""
        heads = store_heads(self._content.node, begins, ends - begins)
        firsts = cuts.tolist()
        for head, first, behind in zip(heads, firsts, [*firsts[1:], len(pieces)], strict=True):
            os.writev(self._device, [head, *pieces[first:behind]])

    def _note_staged(self, staged: Staged) -> None:
        entries = staged.parts["entry"]
        self.known_entries += len(np.unique(entries[~self._is_known[entries]]))
        self._is_known[entries] = self._is_wanted[entries] = True
        self._staging.add(staged)

    def drop(self, entries: npt.NDArray[np.uint32], on_progress: Callable[[], None]) -> None:
        self._is_wanted[entries] = False
        self._process.advise(POSIX_FADV_DONTNEED, whole_files(entries), on_progress)
        staged = self._staging.staged(entries)
        if len(staged):
            dropped = self._staging.drop(staged)
            self._process.advise(POSIX_FADV_DONTNEED, dropped.ranges, on_progress)
            self._staging.settle(dropped, self._process.sent)
            self._staging.note_settled(self._process.done)

    # The staging area

    def _make_room(self, need_bytes: int) -> None:
        self._staging.skip_dropped()
        while self._staging.queue and self._staging.bytes + need_bytes > self._limit_bytes:
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        """The kernel copies those of the batch's files that are still wanted, and then the batch's
        pages of the content file are dropped."""
        staged = self._staging.queue.popleft()
        parts = staged.parts[self._is_wanted[staged.parts["entry"]]]
        self._staging.remove(parts)
        files = self.opens.files
        watched = np.isin(parts["entry"], np.fromiter(files, np.uint32, len(files)))
        for entry, start, size in parts[watched].tolist():  # an open would look like a reader's
            advise_in_steps(files[entry], start, size, POSIX_FADV_WILLNEED)
        self._process.advise(POSIX_FADV_WILLNEED, parts[~watched], _no_progress)
        self._process.advise(POSIX_FADV_DONTNEED, staged.ranges, _no_progress)
        self._staging.settle(staged, self._process.sent)
        self._staging.note_settled(self._process.done)

    def set_planned(self, *, is_planned: bool) -> None:
        """Makes the staging area larger while readers follow a plan, so that pushed files stay in
        it until they are read. To settle them would cost as much as to read them."""
        self._limit_bytes = self._planned_bytes if is_planned else self._staging_bytes

    def tidy(self) -> bool:
        """Settles the oldest batch; if there is none, drops pages that READs have brought."""
        if self._staging.queue:
            self._settle_oldest()
            return True
        self._read_pages.sweep(self._staging, self._staging_bytes)
        return False

    def note_reads(self) -> None:
        self._read_pages.note_reads()

    # Residency

    def is_lost(self, entry: int) -> bool:
        """If the entry's neighbours in the content file are resident, the kernel has probably just
        read ahead. The entry itself does not count, because the READ may have filled its pages
        again already."""
        blocks, order = self._image.start_blocks, self._image.order
        at = int(np.searchsorted(blocks, self._image.first_block[entry]))
        near = order[max(at - NEIGHBOURS, 0) : at + NEIGHBOURS + 1]
        near = near[self._is_wanted[near] & (near != entry)]
        with suppress(OSError):
            return not all(self.resident_bytes(each) for each in near.tolist())
        return True

    def resident_bytes(self, entry: int) -> int:
        """Counts the file's own pages; if it has none, those of its range in the content file."""
        in_file = self._files.resident_bytes(entry)
        return in_file or cached_bytes(self._content.descriptor, *self._range(entry))

    def is_whole(self, entry: int) -> bool:
        """The content file has the pages as long as the file is not settled."""
        start, size = self._range(entry)
        in_file = self._files.resident_bytes(entry)
        return in_file >= size or cached_bytes(self._content.descriptor, start, size) >= size

    def drop_failed(self, entry: int) -> bool:
        in_content = drop_failed(self._content.descriptor, *self._range(entry))
        return super().drop_failed(entry) or in_content

    def _range(self, entry: int) -> tuple[int, int]:
        """The start and size of a file's content in the content file."""
        start = int(self._image.first_block[entry]) * BLOCK_BYTES
        return start, self._snapshot.stat(entry).size


def _gaps(ranges: Sequence[Parts]) -> Iterator[tuple[int, int]]:
    """The begins and ends of the parts of the content file in none of these ranges; the `GAPS_MAX`
    largest if there are more."""
    starts = np.concatenate([each["start"] for each in ranges]).astype(np.int64)
    sizes = np.concatenate([each["size"] for each in ranges]).astype(np.int64)
    order = np.argsort(starts)
    starts, behind = starts[order], (starts + sizes)[order]
    begins = np.concatenate([[0], np.maximum.accumulate(behind)])
    ends = np.concatenate([starts, [CONTENT_BYTES]])
    gaps = np.flatnonzero(ends > begins)
    if len(gaps) > GAPS_MAX:
        gaps = gaps[np.argpartition((begins - ends)[gaps], GAPS_MAX)[:GAPS_MAX]]
    return zip(begins[gaps].tolist(), ends[gaps].tolist(), strict=True)


def _batch_of(taken: Sequence[tuple[int, int, memoryview]]) -> ExtentBatch:
    entries, starts, contents = zip(*taken, strict=True)
    return ExtentBatch(np.array(entries, np.int64), np.array(starts, np.int64), list(contents))


def _no_progress() -> None:
    """Settling reports no progress."""
