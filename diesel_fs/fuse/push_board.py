"""What server and helper of a mount both see: what a plan has pushed in a moment, and progress.


A reader that is faster than the helper overtakes it. Each READ that is then answered at once lets
the reader run on, into the next; one that waits a moment lets the helper get ahead by hundreds of
files. So the server holds the answer for what is `soon`, as long as the helper's count goes on. It
stops when the helper waits for the very page that the READ has locked.

Owned here: the layout of the shared memory (the count, then a byte for each entry). The helper
writes, the server reads; a torn or late value costs a moment, nothing else.
"""

import mmap
import os
from typing import Self

import numpy as np
import numpy.typing as npt
import trio

HOLD_STEP_S = 0.001
"""How long the count may stand still; trio's clock knows nothing shorter."""

HOLD_STEPS = 5
"""A READ is held no longer than so many steps: some thousand small files are pushed meanwhile."""

_COUNT_BYTES = 64

_Entries = npt.NDArray[np.uint32]
_NONE: _Entries = np.empty(0, np.uint32)


class PushBoard:
    """One mount's board, in one of its two processes."""

    def __init__(self, descriptor: int) -> None:
        shared = mmap.mmap(descriptor, 0)
        self._count = np.frombuffer(shared, np.uint64, 1)
        self._soon = np.frombuffer(shared, np.uint8, offset=_COUNT_BYTES)
        self._seen = memoryview(shared)[_COUNT_BYTES:]
        self._marked = _NONE

    @classmethod
    def make(cls, entry_count: int) -> tuple[Self, int]:
        """A new one, and the descriptor for the other process. Raises OSError."""
        descriptor = os.memfd_create("diesel-board", os.MFD_CLOEXEC)
        os.truncate(descriptor, _COUNT_BYTES + entry_count)
        return cls(descriptor), descriptor

    def announce(self, entries: _Entries) -> None:
        """The helper: these, and no others, are pushed next."""
        self._soon[self._marked] = 0
        self._soon[entries] = 1
        self._marked = entries

    def went_on(self) -> None:
        """The helper: some more have been pushed."""
        self._count += np.uint64(1)

    def is_soon(self, entry: int) -> bool:
        """The server: whether an entry is about to be pushed."""
        return self._seen[entry] != 0

    async def hold(self) -> None:
        """The server: returns when the helper stands still, at the latest after some steps."""
        before = int(self._count[0])
        for _ in range(HOLD_STEPS):
            await trio.sleep(HOLD_STEP_S)
            now = int(self._count[0])
            if now == before:
                return
            before = now
