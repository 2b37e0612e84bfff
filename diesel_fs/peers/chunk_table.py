"""The chunks of one version that a master has in memory, as its two threads share them.

The control plane (trio's thread) puts chunks in and takes them out; the data plane reads them. Each
call is one operation of a dictionary or a queue, so no lock is needed. A view that was found stays
valid as long as it exists: the memory behind it is never written again.
"""

from collections import deque
from collections.abc import Sequence

from .wire import PART, PARTS_BYTES_MAX, Sizes

_READS_REMEMBERED = 4096  # requests; of more the oldest are forgotten


class ChunkTable:
    """What the data plane knows of a version: it answers from `views`, and nothing else."""

    def __init__(self, sizes: Sizes) -> None:
        """`sizes` has the bytes of each chunk."""
        self.sizes = sizes
        self.views: dict[int, memoryview] = {}
        """The whole chunks that are in memory, by their numbers."""

        self.records_reads = False
        """Whether `record_read` keeps anything: a cache that replaces nothing need not know."""

        self._reads: deque[tuple[Sequence[int], int]] = deque(maxlen=_READS_REMEMBERED)

    def find(self, records: memoryview) -> tuple[list[memoryview] | None, int]:
        """The bytes of parts, given by their records, and how many these are. None where not all
        of their chunks are in memory, a part lies outside its chunk, or they are more than one
        request may ask for."""
        views, found, size = self.views, [], 0
        try:
            for chunk, start, length in PART.iter_unpack(records):
                found.append(views[chunk][start : start + length])
                size += length
        except KeyError:
            return None, 0
        if sum(map(len, found)) != size or (len(found) > 1 and size > PARTS_BYTES_MAX):
            return None, 0
        if self.records_reads:
            self.record_read([chunk for chunk, _, _ in PART.iter_unpack(records)], size)
        return found, size

    def record_read(self, chunks: Sequence[int], size: int) -> None:
        """A request was answered with parts of these chunks, `size` bytes in all. Any thread."""
        if self.records_reads:
            self._reads.append((chunks, size))

    def take_reads(self) -> list[tuple[Sequence[int], int]]:
        """What was recorded since the last call. Any thread."""
        taken = []
        try:
            while True:
                taken.append(self._reads.popleft())
        except IndexError:
            return taken
