"""What server and helper of a mount both see: what is pushed in a moment, and whether misses count.

A reader that is faster than the helper overtakes it. Each READ that is then answered at once lets
the reader run on, into the next; one that waits a moment lets the helper get ahead by hundreds of
files. So the server holds the answer for what is `soon` while the helper goes on, and the helper
leaves out what is being read: it would wait for the page that the READ has locked. A READ of what
the helper is storing `now` comes too late for that, and is answered at once. Each of the two marks
what it does before it looks what the other does.

Where nothing more has room and nothing is planned, what is missed changes nothing: the server tells
the helper of few misses then, and both leave the processors to the readers.

Owned here: the layout of the shared memory: the helper's count, whether it wants few misses, then
two bytes for each entry, of which the helper writes the first and the server the second. A torn or
late value costs a moment, nothing else.
"""

import math
import mmap
import os
import time
from collections.abc import Callable
from typing import Self

import numpy as np
import numpy.typing as npt
import trio

HOLD_STEP_S = 0.001
"""How often a READ that is held looks; trio's clock knows nothing shorter."""

STILL_STEPS = 2
"""The helper may stand still for so many steps: with many readers it does not always run."""

HOLD_STEPS = 5
"""A READ is held no longer than so many steps: some thousand small files are pushed meanwhile."""

MISS_INTERVAL_S = 0.01
"""Where few misses are wanted, so long lies between two that the helper is told of."""

_SOON, _NOW = 1, 2

_COUNT_BYTES = 64  # a count of 8 bytes; at 8 a byte that is not 0 where few misses are wanted
_FEW_AT = 8

_Entries = npt.NDArray[np.uint32]
_NONE: _Entries = np.empty(0, np.uint32)


def push_status_file(entry_count: int) -> int:
    """A descriptor of the memory for a board of so many entries. Raises OSError."""
    descriptor = os.memfd_create("diesel-board", os.MFD_CLOEXEC)
    os.truncate(descriptor, _COUNT_BYTES + 2 * entry_count)
    return descriptor


class PushStatusMap:
    """One mount's board, in one of its two processes."""

    def __init__(self, descriptor: int) -> None:
        shared = mmap.mmap(descriptor, 0)
        entries = (len(shared) - _COUNT_BYTES) // 2
        self._count = np.frombuffer(shared, np.uint64, 1)
        self._soon = np.frombuffer(shared, np.uint8, entries, _COUNT_BYTES)
        self._being_read = np.frombuffer(shared, np.uint8, entries, _COUNT_BYTES + entries)
        self._soon_seen = memoryview(shared)[_COUNT_BYTES : _COUNT_BYTES + entries]
        self._few = memoryview(shared)[_FEW_AT : _FEW_AT + 1]
        self._miss_sent_s = -math.inf
        self._marked = _NONE

    @classmethod
    def make(cls, entry_count: int) -> tuple[Self, int]:
        """A new one, and the descriptor for the other process. Raises OSError."""
        descriptor = push_status_file(entry_count)
        return cls(descriptor), descriptor

    # the helper

    def mark_soon(self, entries: _Entries) -> None:
        """These, and no others, are pushed next."""
        self._soon[self._marked] = 0
        self._soon[entries] = _SOON
        self._marked = entries

    def clear_soon(self) -> None:
        """Nothing is pushed now: no READ need wait."""
        if len(self._marked):
            self.mark_soon(_NONE)

    def set_wants_all_misses(self, *, each_miss: bool) -> None:
        """Of how many misses to be told from now on."""
        self._few[0] = not each_miss

    def count_progress(self) -> None:
        """Some more have been pushed."""
        self._count += np.uint64(1)

    def mark_now(self, entries: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """These are stored now, but those of them that have a READ that is held: which have."""
        self._soon[entries] = _NOW
        return self._being_read[entries].astype(np.bool_)

    # the server

    def takes_miss(self) -> bool:
        """Whether the helper is told of this miss."""
        if not self._few[0]:
            return True
        now_s = time.monotonic()
        if now_s - self._miss_sent_s < MISS_INTERVAL_S:
            return False
        self._miss_sent_s = now_s
        return True

    def try_hold(self, entry: int) -> bool:
        """Whether a READ of an entry is to wait in `hold`; if so, it counts as held from now on.

        Never one of what is no entry.
        """
        if not 0 <= entry < len(self._soon_seen) or self._soon_seen[entry] != _SOON:
            return False
        self._being_read[entry] = 1
        if self._soon_seen[entry] == _NOW:  # the helper may not have seen it
            self._being_read[entry] = 0
            return False
        return True

    def end_hold(self, entry: int) -> None:
        """A READ that was held has been answered, or is no longer wanted."""
        self._being_read[entry] = 0

    def is_soon(self, entry: int) -> bool:
        """Whether an entry is about to be pushed, or is being pushed."""
        return self._soon_seen[entry] != 0

    async def hold(self, entry: int) -> None:
        """Returns when the helper has stood still for some steps, or gone on for many."""
        before, still = int(self._count[0]), 0
        for _ in range(HOLD_STEPS):
            await trio.sleep(HOLD_STEP_S)
            now = int(self._count[0])
            still = still + 1 if now == before else 0
            if still >= STILL_STEPS or not self.is_soon(entry):
                return
            before = now


class NodePushStatusMap(PushStatusMap):
    """The server's end where entries are known by their nodes alone: `entry` is a node - 1."""

    def __init__(self, descriptor: int, entry_of: Callable[[int], int]) -> None:
        """`entry_of` gives the entry that has a node, -1 for none of this board's version."""
        super().__init__(descriptor)
        self._entry_of = entry_of

    def try_hold(self, entry: int) -> bool:
        """See `PushStatusMap`."""
        return super().try_hold(self._entry_of(entry + 1))

    def end_hold(self, entry: int) -> None:
        """See `PushStatusMap`."""
        super().end_hold(self._entry_of(entry + 1))

    def is_soon(self, entry: int) -> bool:
        """See `PushStatusMap`."""
        return super().is_soon(self._entry_of(entry + 1))
