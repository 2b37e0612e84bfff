"""Reads under way (*flights*), which several callers share.

A caller shares a read that brings its range, and begins a read only if there is none. The classes
that read (`ChunkCache`, `RangeReader`, `SpanFetcher`) have their own loops, since their threads,
deadlines and memory differ. Such an *owner* takes a read out of its table before it publishes the
outcome, so callers that come later never get an old error.

Nothing here does I/O. A table is used by one thread, or under its owner's lock. The outcome of a
`Flight` may be published and awaited without a lock.
"""

import threading
from collections.abc import Collection, Hashable, Iterable
from typing import Generic, TypeVar

Chunk = TypeVar("Chunk", bound=Hashable)
Content = TypeVar("Content")
Read = TypeVar("Read")


class Flight(Generic[Content]):
    __slots__ = ("_content", "_ended", "_error", "_is_claimed", "is_wanted")

    def __init__(self) -> None:
        self.is_wanted = True
        """Whether the owner shall keep the content when it arrives."""
        self._is_claimed = False
        self._ended: threading.Event | None = None  # None: nobody waits
        self._content: Content | None = None
        self._error: BaseException | None = None

    def claim(self) -> bool:
        """Whether the caller shall do the read; else it may wait for `result`. Called under the
        owner's lock, while the read is in the owner's table."""
        if not self._is_claimed:
            self._is_claimed = True
            return True
        if self._ended is None:
            self._ended = threading.Event()
        return False

    def finish(self, content: Content) -> None:
        """The owner has taken the read out of its table."""
        self._content = content
        if self._ended is not None:
            self._ended.set()

    def fail(self, error: BaseException) -> None:
        """The owner has taken the read out of its table."""
        self._error = error
        if self._ended is not None:
            self._ended.set()

    def result(self, timeout_s: float | None = None) -> Content:
        """Raises the error of the read; TimeoutError after `timeout_s`."""
        if self._ended is not None and not self._ended.wait(timeout_s):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._content  # type: ignore[return-value]  # `finish` has set it


class FlightTable(dict[tuple[Chunk, int, int], Read]):
    """The reads under way, by the spans that they bring (chunk, start, size). One read may bring
    several. Only `begin` and `end` change the table."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._by_chunk: dict[Chunk, dict[tuple[Chunk, int, int], None]] = {}

    def begin(self, spans: Collection[tuple[Chunk, int, int]], read: Read) -> None:
        """None of the spans may be here yet."""
        for span in spans:
            self[span] = read
            self.bytes += span[2]
            self._by_chunk.setdefault(span[0], {})[span] = None

    def end(self, span: tuple[Chunk, int, int]) -> Read | None:
        """Take out a span. Returns the read that brings it."""
        read = self.pop(span, None)
        if read is not None:
            self.bytes -= span[2]
            others = self._by_chunk[span[0]]
            del others[span]
            if not others:
                del self._by_chunk[span[0]]
        return read

    def covering(self, span: tuple[Chunk, int, int]) -> tuple[Chunk, int, int] | None:
        """A span under way that contains this one (or is the same)."""
        return span if span in self else _covering(self._by_chunk.get(span[0], ()), span)

    def larger(
        self, spans: Iterable[tuple[Chunk, int, int]]
    ) -> dict[tuple[Chunk, int, int], tuple[Chunk, int, int]]:
        """Spans that are not under way themselves but lie in a larger span that is, with that
        larger span."""
        found = {}
        for span in spans:
            larger = self.covering(span)
            if larger is not None and larger != span:
                found[span] = larger
        return found


def _covering(
    others: Iterable[tuple[Chunk, int, int]], span: tuple[Chunk, int, int]
) -> tuple[Chunk, int, int] | None:
    _, start, size = span
    end = start + size
    for other in others:
        if other[1] <= start and end <= other[1] + other[2]:
            return other
    return None
