"""Shares reads that are under way (*flights*), so that each range of a chunk is read once at a
time.

Three classes read chunks: `ChunkCache` loads whole chunks, `RangeReader` reads ranges for the
clients of a server, `SpanFetcher` reads spans (ranges) for pushes into the page cache. Each class
has a loop of its own, since their threads, deadlines and the memory that they read into differ.
This module has the part that is the same: a caller shares a read that brings its range, and begins
a read only if there is none. Such a class is called the *owner* of its reads here. It takes a read
out of its table before the outcome is published, so an error reaches all callers that wait, and no
later one.

Nothing here does I/O or has a lock: the owner calls in one thread, or under its own lock. Only
`Flight.result` may be called by any thread.
"""

import threading
from collections.abc import Collection, Hashable, Iterable
from typing import Generic, TypeVar

Chunk = TypeVar("Chunk", bound=Hashable)
Content = TypeVar("Content")
Read = TypeVar("Read")


class Flight(Generic[Content]):
    """One read, and its outcome for the threads that wait for it."""

    __slots__ = ("_content", "_ended", "_error", "_is_claimed", "is_wanted")

    def __init__(self) -> None:
        self.is_wanted = True
        """Whether the owner shall keep the content when it arrives."""
        self._is_claimed = False
        self._ended: threading.Event | None = None  # None: nobody waits
        self._content: Content | None = None
        self._error: BaseException | None = None

    def claim(self) -> bool:
        """Whether the caller shall do the read. If False, another thread does it, and the caller
        may wait for `result`. Called under the owner's lock, while the read is in the owner's
        table."""
        if not self._is_claimed:
            self._is_claimed = True
            return True
        if self._ended is None:
            self._ended = threading.Event()
        return False

    def finish(self, content: Content) -> None:
        """Publish the content. The owner has taken the read out of its table."""
        self._content = content
        if self._ended is not None:
            self._ended.set()

    def fail(self, error: BaseException) -> None:
        """Publish the error of the read. The owner has taken the read out of its table."""
        self._error = error
        if self._ended is not None:
            self._ended.set()

    def result(self, timeout_s: float | None = None) -> Content:
        """Wait for the content. Raises the error of the read; TimeoutError after `timeout_s`."""
        if self._ended is not None and not self._ended.wait(timeout_s):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._content  # type: ignore[return-value]  # `finish` has set it


class FlightTable(dict[tuple[Chunk, int, int], Read]):
    """The reads under way; the keys are the spans that they bring (chunk, start, size). One read
    may bring several spans. Only `begin` and `end` change the table."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        """The size of all spans together."""

    def begin(self, spans: Collection[tuple[Chunk, int, int]], read: Read) -> None:
        """Add a read that has begun, and the spans that it brings. None of them may be here yet."""
        self.update(dict.fromkeys(spans, read))
        self.bytes += sum(size for _, _, size in spans)

    def end(self, span: tuple[Chunk, int, int]) -> Read | None:
        """Take out a span. Returns the read that brings it, or None if the span is not here."""
        read = self.pop(span, None)
        if read is not None:
            self.bytes -= span[2]
        return read

    def covering(self, span: tuple[Chunk, int, int]) -> tuple[Chunk, int, int] | None:
        """A span under way that contains this one (or is the same), or None."""
        return span if span in self else _covering(self, span)

    def larger(
        self, spans: Iterable[tuple[Chunk, int, int]]
    ) -> dict[tuple[Chunk, int, int], tuple[Chunk, int, int]]:
        """For each of the spans that is not itself under way but lies in a larger span that is:
        that larger span."""
        by_chunk: dict[Chunk, list[tuple[Chunk, int, int]]] = {}
        for other in self:
            by_chunk.setdefault(other[0], []).append(other)
        found = {}
        for span in spans:
            if span not in self and (larger := _covering(by_chunk.get(span[0], ()), span)):
                found[span] = larger
        return found


def _covering(
    others: Iterable[tuple[Chunk, int, int]], span: tuple[Chunk, int, int]
) -> tuple[Chunk, int, int] | None:
    """The first of other spans that contains this one."""
    chunk, start, size = span
    end = start + size
    for other in others:  # the chunks last: their comparison may cost more
        if other[1] <= start and end <= other[1] + other[2] and other[0] == chunk:
            return other
    return None
