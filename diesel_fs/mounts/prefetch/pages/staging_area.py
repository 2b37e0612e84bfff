"""Keeps account of the pages of the content file that a native mount has pushed.

`content_page_cache.py` explains the staging area, a queue of batches, and how a batch is *settled*.
Until the advice process (`advice_process.py`) has done that, the batch's files must not be pushed
again.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ....format.image import BLOCK_BYTES
from .advice_process import PART, Parts, whole_files

CONTENT = 0xFFFFFFFF
"""Stands for the content file in place of an entry's number."""


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """One batch that was pushed: parts of files, and the ranges of the content file with them."""

    parts: Parts
    ranges: Parts

    @property
    def pages(self) -> npt.NDArray[np.uint32]:
        return pages_of(self.parts)


class StagingArea:
    def __init__(self, first_block: npt.NDArray[np.uint32], sizes: npt.NDArray[np.uint64]) -> None:
        """Both arrays are by entry: the first block of its content in the content file, and its
        size in bytes."""
        self._first_block = first_block
        self._sizes = sizes
        self.bytes = 0  # of all staged pages
        self.pages = np.zeros(len(sizes), np.uint32)  # staged pages, by entry
        self.is_settling = np.zeros(len(sizes), np.bool_)  # whether some part is, by entry
        self.queue: deque[Staged] = deque()  # oldest first
        # The batches that are being settled, each with the number of the last piece of work that
        # the advice process does for it
        self._settling: deque[tuple[int, Staged]] = deque()

    def add(self, staged: Staged) -> None:
        self.queue.append(staged)
        pages = staged.pages
        np.add.at(self.pages, staged.parts["entry"], pages)
        self.bytes += int(pages.sum(dtype=np.int64)) * BLOCK_BYTES

    def skip_dropped(self) -> None:
        while self.queue and not self.pages[self.queue[0].parts["entry"]].any():
            self.queue.popleft()

    def remove(self, parts: Parts) -> None:
        """A file may have several of these parts."""
        self._remove(parts["entry"], pages_of(parts))

    def _remove(self, entries: npt.NDArray[np.uint32], pages: npt.NDArray[np.uint32]) -> None:
        some, at = np.unique(entries, return_inverse=True)
        removed = np.bincount(at, pages).astype(np.uint32)
        # Some files may have been dropped before, and pushed again with fewer parts
        removed = np.minimum(removed, self.pages[some])
        self.pages[some] -= removed
        self.bytes -= BLOCK_BYTES * int(removed.sum(dtype=np.int64))

    def staged(self, entries: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        return entries[self.pages[entries] > 0]

    def drop(self, entries: npt.NDArray[np.uint32]) -> Staged:
        """Take files out of the staging area. Returns the parts and ranges to drop."""
        self._remove(entries, self.pages[entries])
        return Staged(whole_files(entries), self.ranges_of(entries))

    # Settling

    def settle(self, staged: Staged, piece: int) -> None:
        """Note that a batch is being settled, until the process has done its first `piece` pieces
        of work."""
        self._settling.append((piece, staged))

    def note_settled(self, done: int) -> None:
        while self._settling and self._settling[0][0] <= done:
            _, staged = self._settling.popleft()
            self.is_settling[staged.parts["entry"]] = False
        for _, staged in self._settling:  # an entry may have parts in several batches
            self.is_settling[staged.parts["entry"]] = True

    # Ranges

    def ranges_of(self, entries: npt.NDArray[np.uint32]) -> Parts:
        """Return as few ranges of the content file as possible."""
        if not len(entries):
            return np.empty(0, PART)
        entries = entries[np.argsort(self._first_block[entries])]
        begins = self._first_block[entries].astype(np.int64) * BLOCK_BYTES
        sizes = self._sizes[entries].astype(np.int64)
        begins, ends, _ = joined(begins, begins + sizes + -sizes % BLOCK_BYTES)
        return content_ranges(begins, ends)

    def ranges(self) -> Iterator[Parts]:
        """The ranges with pages that are staged or being settled."""
        yield self.ranges_of(np.flatnonzero(self.pages).astype(np.uint32))
        for _, staged in self._settling:
            yield staged.ranges


def joined(
    begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Join adjacent ranges (at least one). Returns the begins and ends of the joined ranges, and
    for each the index of its first range."""
    firsts = np.flatnonzero(np.concatenate([[True], begins[1:] != ends[:-1]]))
    return begins[firsts], ends[np.append(firsts[1:], len(ends)) - 1], firsts


def content_ranges(begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> Parts:
    ranges = np.empty(len(begins), PART)
    ranges["entry"], ranges["start"], ranges["size"] = CONTENT, begins, ends - begins
    return ranges


def pages_of(parts: Parts) -> npt.NDArray[np.uint32]:
    pages: npt.NDArray[np.uint32] = (
        (parts["size"] + np.uint64(BLOCK_BYTES - 1)) // np.uint64(BLOCK_BYTES)
    ).astype(np.uint32)
    return pages
