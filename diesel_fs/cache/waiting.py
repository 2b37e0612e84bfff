"""Marks the causes for which a read waits, so that a mount can show where its readers' time goes.

Calls of stores, other nodes and the decompressor are marked with a `WaitCause` while they run. A
caller sets an observer for a piece of work (`observer_set`), and the marks call it, in any thread
that does the work: the observer is a context variable, which trio passes on to tasks and threads.
Without an observer a mark costs less than a microsecond; the paths that read many files at once
have none.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from enum import IntEnum
from typing import Protocol, TypeVar
from uuid import UUID

from ..format.entries import Bytes
from ..storage.objects.store import (
    CheckedObject,
    ChunkReader,
    FastReads,
    ObjectStore,
    Part,
    StoreWrapper,
)

_T = TypeVar("_T")


class WaitCause(IntEnum):
    """The cause of a wait. If work waits for several causes at once, the greatest counts."""

    MOUNT = 0  # the mount's own work
    METADATA = 1
    PREFETCH = 2  # the prefetch worker, which is about to push the file
    DECOMPRESSION = 3
    PEER = 4
    STORE = 5


class WaitObserver(Protocol):
    """The waits of one piece of work. Called by any thread, also by several at once."""

    def enter(self, cause: WaitCause) -> None:
        """The work begins to wait for this cause."""
        ...

    def leave(self, cause: WaitCause) -> None:
        """The work no longer waits for this cause."""
        ...


_observer: ContextVar[WaitObserver | None] = ContextVar("diesel_wait_observer", default=None)

current_observer = _observer.get


@contextmanager
def observer_set(observer: WaitObserver) -> Iterator[None]:
    """Set the observer of the code inside the `with`, and of tasks and threads that it starts."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        with suppress(ValueError):  # a task that was given up ends in another context
            _observer.reset(token)


class waiting_for:  # lower case, as it is used like a function
    """Marks the code in the `with` as waiting for a cause."""

    __slots__ = ("_cause", "_observer")

    def __init__(self, cause: WaitCause) -> None:
        self._cause = cause
        self._observer = current_observer()

    def __enter__(self) -> None:
        if self._observer is not None:
            self._observer.enter(self._cause)

    def __exit__(self, *_: object) -> None:
        if self._observer is not None:
            self._observer.leave(self._cause)


class MarkedStore(StoreWrapper):
    """Marks the reads of an object store with a cause, except `read_nowait`, which never waits."""

    def __init__(self, inner: ObjectStore, cause: WaitCause) -> None:
        super().__init__(inner)
        self._cause = cause

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytearray:
        with waiting_for(self._cause):
            return self.inner.get(name, start, length)

    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        with waiting_for(self._cause):
            self.inner.read_into(name, start, buffer)

    @property
    def fast_reads(self) -> FastReads:
        return _MarkedReads(self, self.inner.fast_reads, self._cause)


class _MarkedReads(FastReads):
    def __init__(self, store: ObjectStore, inner: FastReads, cause: WaitCause) -> None:
        super().__init__(store)
        self._inner = inner
        self._cause = cause
        self.batches_reads = inner.batches_reads
        self.can_pin = inner.can_pin

    def chunk_reader(self, identity: UUID, version: int) -> ChunkReader | None:
        return self._inner.chunk_reader(identity, version)

    def read_nowait(self, name: str, start: int, buffer: memoryview) -> bool:
        return self._inner.read_nowait(name, start, buffer)

    def can_pin_nowait(self, name: str) -> bool:
        return self._inner.can_pin_nowait(name)

    def read(self, name: str, start: int, size: int) -> Bytes:
        with waiting_for(self._cause):
            return self._inner.read(name, start, size)

    def read_uncached(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        with waiting_for(self._cause):
            self._inner.read_uncached(name, start, buffer)

    def read_ranges(
        self, name: str, ranges: Sequence[tuple[int, int]], room: memoryview
    ) -> Iterator[memoryview]:
        return self._marked(self._inner.read_ranges(name, ranges, room))

    def read_parts(self, parts: Sequence[Part]) -> Iterator[memoryview]:
        with waiting_for(self._cause):
            return self._marked(self._inner.read_parts(parts))

    def pin(self, name: str, on_revoke: Callable[[], None]) -> CheckedObject | None:
        with waiting_for(self._cause):
            return self._inner.pin(name, on_revoke)

    def _marked(self, pieces: Iterator[_T]) -> Iterator[_T]:
        """Marks the wait for each piece, but not the caller's work in between."""
        while True:
            with waiting_for(self._cause):
                try:
                    piece = next(pieces)
                except StopIteration:
                    return
            yield piece
