"""The chunks of one version from which a master's data plane answers: in memory, and some on disk.

The control plane (trio's thread) puts chunks in and takes them out; the data plane's thread reads
them. Each call is one operation of a dictionary or a queue, so no lock is needed. A view stays
valid: the memory behind it is never written again.

The control plane *lends* open files of chunks on the disk to the data plane, which reads only bytes
in the page cache, and so never waits. A loan is for a few requests: then the control plane decides
whether the chunk should come to memory.
"""

from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import TypeVar

import numpy as np

from ...cache.tiers import CacheHandle
from ..wire import PART, PARTS_BYTES_MAX, Sizes

LOAN_REQUESTS = 16
"""Requests that the data plane answers from one loan."""

LOAN_S = 60.0
"""The longest loan: a removed chunk's file takes room on the disk while it is open."""

LOANS_MAX = 256
"""For one more, the oldest is taken back."""

FROM_FILES_BYTES_MAX = 8 << 20
"""The longest answer from files: its bytes take memory, and other connections wait meanwhile."""

_READS_REMEMBERED = 4096

_Taken = TypeVar("_Taken")


class _Loan:
    """Its last reference closes the file: the data plane may be reading it when it is taken
    back."""

    __slots__ = ("file", "requests_left", "until_s")

    def __init__(self, file: CacheHandle) -> None:
        self.file = file
        self.requests_left = LOAN_REQUESTS
        self.until_s = monotonic() + LOAN_S


class ChunkTable:
    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.views: dict[int, memoryview] = {}

        self.records_reads = False
        """Whether `record_read` keeps reads for the eviction policy. A cache that never replaces
        its own chunks does not need them."""

        self._reads: deque[tuple[Sequence[int], int]] = deque(maxlen=_READS_REMEMBERED)
        self._loans: dict[int, _Loan] = {}  # the first lent first
        self._file_reads: deque[tuple[int, int]] = deque(maxlen=_READS_REMEMBERED)

    def find(self, records: memoryview) -> tuple[list[memoryview] | None, int]:
        """The contents of the parts in `records` (`wire.PART`), and their bytes in all. The
        contents are None if the control plane must answer: some bytes are in neither memory nor
        page cache, a part lies outside its chunk, or the request is too large."""
        views, found, size = self.views, [], 0
        try:
            for chunk, start, length in PART.iter_unpack(records):
                found.append(views[chunk][start : start + length])
                size += length
        except KeyError:
            return self._find_in_files(records) if self._loans else (None, 0)
        if sum(map(len, found)) != size or (len(found) > 1 and size > PARTS_BYTES_MAX):
            return None, 0
        if self.records_reads:
            self.record_read([chunk for chunk, _, _ in PART.iter_unpack(records)], size)
        return found, size

    def _find_in_files(self, records: memoryview) -> tuple[list[memoryview] | None, int]:
        parts = list(PART.iter_unpack(records))
        size = sum(length for _, _, length in parts)
        if size > FROM_FILES_BYTES_MAX:
            return None, 0
        views, found, used = self.views, [], dict[int, _Loan]()
        for chunk, start, length in parts:
            view = views.get(chunk)
            if view is not None:
                content = view[start : start + length]
            else:
                loan = used.get(chunk) or self._loans.get(chunk)
                if loan is None or not loan.requests_left:
                    return None, 0
                used[chunk] = loan
                content = np.empty(length, np.uint8).data
                if not loan.file.read_nowait(start, content):
                    return None, 0
            found.append(content)
        if sum(map(len, found)) != size:
            return None, 0
        for loan in used.values():
            loan.requests_left -= 1
        self._file_reads.extend((chunk, length) for chunk, _, length in parts if chunk in used)
        in_memory = [(chunk, length) for chunk, _, length in parts if chunk not in used]
        if in_memory:
            self.record_read([chunk for chunk, _ in in_memory], sum(each for _, each in in_memory))
        return found, size

    def lend(self, chunk: int, file: CacheHandle) -> None:
        """Takes over the open file. Only the control plane calls this, `take_back` and
        `take_back_old`."""
        loans = self._loans
        loans.pop(chunk, None)
        loans[chunk] = _Loan(file)
        if len(loans) > LOANS_MAX:
            del loans[next(iter(loans))]

    def take_back(self, chunk: int | None = None) -> None:
        """Stop lending the file of `chunk`; None: all files."""
        if chunk is None:
            self._loans.clear()
        else:
            self._loans.pop(chunk, None)

    def take_back_old(self) -> None:
        loans, now_s = self._loans, monotonic()
        while loans and loans[first := next(iter(loans))].until_s <= now_s:
            del loans[first]

    def take_file_reads(self) -> list[tuple[int, int]]:
        """Remove and return the reads from lent files: chunk and bytes of each. Any thread."""
        return _taken(self._file_reads)

    def record_read(self, chunks: Sequence[int], size: int) -> None:
        """Note a request of `size` bytes. Any thread."""
        if self.records_reads:
            self._reads.append((chunks, size))

    def take_reads(self) -> list[tuple[Sequence[int], int]]:
        """Remove and return the arguments of `record_read`. Any thread."""
        return _taken(self._reads)


def _taken(queue: "deque[_Taken]") -> "list[_Taken]":
    """Another thread may be adding to the queue."""
    taken = []
    try:
        while True:
            taken.append(queue.popleft())
    except IndexError:
        return taken
