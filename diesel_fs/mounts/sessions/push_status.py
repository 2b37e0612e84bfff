"""Memory that a mount's server and its prefetch worker share: it shows which files are pushed next.

The worker *pushes* files into the kernel's page cache before they are read. If a faster reader
overtakes the worker, each next file would cost a READ request. So the server *holds* the READ of a
file that is pushed soon for a few milliseconds, and the worker gets ahead by hundreds of files. The
worker leaves out files with held READs, since it would wait for the page that the READ has locked.
The READ of a file that the worker is storing now is answered at once. Each process writes its mark
before it reads the mark of the other process, so at least one of them sees the other's mark.

The server reports misses (READs that arrived) to the worker. If no memory is left and nothing is
planned, these reports change nothing. The worker then wants few of them, which leaves the
processors to the readers.

Layout: `_COUNT_BYTES` of counts and flags; two bytes for each entry (a file by its index in the
snapshot), the first written by the worker, the second by the server; then the addresses of entries
in order logs (`cache/order_logs/addresses.py`), which take memory only if there are logs. A torn or
late value costs a moment, but does no harm.
"""

import math
import mmap
import os
import sys
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import trio

from ...cache.order_logs.addresses import LogAddresses, LogEntryReader, address_bytes
from ...orders.plan import NO_ENTRIES, Entries

HOLD_STEP_S = 0.001
"""How often a held READ checks the memory; trio's clock has no shorter step."""

STILL_STEPS = 2
"""A hold ends after this number of steps without progress of the worker. With many readers, the
worker does not run in every step."""

HOLD_STEPS = 5
"""The greatest number of steps of a hold. In this time some thousand small files are pushed."""

MISS_INTERVAL_S = 0.01
"""The time between two reported misses if the worker wants few."""

_SOON, _NOW = 1, 2  # the worker's mark of an entry; 0: not pushed soon

_COUNT_BYTES = 64
"""The bytes before the marks: the count of the worker's progress, in 8 bytes; byte 8 is not 0 if
the worker wants few misses, byte 9 if a READ has failed; at 16 the number of entries, in 8
bytes."""
_FEW_AT, _FAILED_AT, _ENTRIES_AT = 8, 9, 16


def push_status_file(entry_count: int) -> int:
    """Makes the shared memory for a version of `entry_count` entries. Returns its descriptor.
    Raises OSError."""
    descriptor = os.memfd_create("diesel-push-status", os.MFD_CLOEXEC)
    os.truncate(descriptor, _addresses_at(entry_count) + address_bytes(entry_count))
    os.pwrite(descriptor, entry_count.to_bytes(8, sys.byteorder), _ENTRIES_AT)
    return descriptor


def _addresses_at(entry_count: int) -> int:
    return -(-(_COUNT_BYTES + 2 * entry_count) // mmap.PAGESIZE) * mmap.PAGESIZE


class PushStatusMap:
    """The shared memory of one mount, as one of its two processes uses it."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor` comes from `push_status_file`; the caller may close it afterwards."""
        shared = mmap.mmap(descriptor, 0)
        entries = int(np.frombuffer(shared, np.uint64, 1, _ENTRIES_AT)[0])
        self.log_addresses = LogAddresses(memoryview(shared)[_addresses_at(entries) :])
        self._count = np.frombuffer(shared, np.uint64, 1)
        self._soon = np.frombuffer(shared, np.uint8, entries, _COUNT_BYTES)
        self._being_read = np.frombuffer(shared, np.uint8, entries, _COUNT_BYTES + entries)
        self._soon_seen = memoryview(shared)[_COUNT_BYTES : _COUNT_BYTES + entries]
        self._few = memoryview(shared)[_FEW_AT : _FEW_AT + 1]
        self._failed = memoryview(shared)[_FAILED_AT : _FAILED_AT + 1]
        self._miss_sent_s = -math.inf
        self._marked = NO_ENTRIES

    # for the worker

    def mark_soon(self, entries: Entries) -> None:
        """Marks the entries that are pushed soon, and no others."""
        self._soon[self._marked] = 0
        self._soon[entries] = _SOON
        self._marked = entries

    def clear_soon(self) -> None:
        """Removes all marks: nothing is pushed next, so no READ needs to wait."""
        if len(self._marked):
            self.mark_soon(NO_ENTRIES)

    def set_wants_all_misses(self, *, each_miss: bool) -> None:
        """Sets whether the server shall report each miss, or only one every `MISS_INTERVAL_S`."""
        self._few[0] = not each_miss

    def count_progress(self) -> None:
        """Counts progress of the worker, which held READs look at."""
        self._count += np.uint64(1)

    def mark_now(self, entries: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Marks entries that are stored in the page cache now. Returns for each whether it has a
        held READ and must be left out."""
        self._soon[entries] = _NOW
        return self._being_read[entries].astype(np.bool_)

    @property
    def reads_failed(self) -> bool:
        """Whether a READ has failed: its pages may be in the page cache without contents."""
        return bool(self._failed[0])

    # for the server

    def note_failed_read(self) -> None:
        """Notes that a READ has failed (see `reads_failed`)."""
        self._failed[0] = 1

    def takes_miss(self) -> bool:
        """Whether the worker wants a report of the current miss."""
        if not self._few[0]:
            return True
        now_s = time.monotonic()
        if now_s - self._miss_sent_s < MISS_INTERVAL_S:
            return False
        self._miss_sent_s = now_s
        return True

    def try_hold(self, entry: int) -> bool:
        """Whether the READ of an entry must wait in `hold`. If so, the entry counts as held until
        `end_hold`. False for a number that is no entry."""
        if not 0 <= entry < len(self._soon_seen) or self._soon_seen[entry] != _SOON:
            return False
        self._being_read[entry] = 1
        if self._soon_seen[entry] == _NOW:  # the worker may not have seen the mark
            self._being_read[entry] = 0
            return False
        return True

    def end_hold(self, entry: int) -> None:
        """Ends the hold that `try_hold` has begun."""
        self._being_read[entry] = 0

    def is_soon(self, entry: int) -> bool:
        """Whether the worker pushes the entry soon, or is storing it now."""
        return self._soon_seen[entry] != 0

    async def hold(self, entry: int) -> None:
        """Waits until the worker makes no progress, the entry is pushed, or `HOLD_STEPS` are
        over."""
        before, still = int(self._count[0]), 0
        for _ in range(HOLD_STEPS):
            await trio.sleep(HOLD_STEP_S)
            now = int(self._count[0])
            still = still + 1 if now == before else 0
            if still >= STILL_STEPS or not self.is_soon(entry):
                return
            before = now


def share_logs(reader: object, descriptor: int) -> None:
    """Lets the server's reader read from the order logs whose addresses are in this memory.
    `descriptor` comes from `push_status_file`. Does nothing for a reader that knows no logs."""
    if isinstance(reader, LogEntryReader):
        reader.share(PushStatusMap(descriptor).log_addresses)


class NodePushStatusMap(PushStatusMap):
    """The server's side in a FUSE mount that follows its dataset: the methods' `entry` is a node
    - 1, not an index in the snapshot."""

    def __init__(self, descriptor: int, entry_of: Callable[[int], int]) -> None:
        """`entry_of` returns the entry of a node in the version of this memory, or -1."""
        super().__init__(descriptor)
        self._entry_of = entry_of

    def try_hold(self, entry: int) -> bool:
        return super().try_hold(self._entry_of(entry + 1))

    def end_hold(self, entry: int) -> None:
        super().end_hold(self._entry_of(entry + 1))

    def is_soon(self, entry: int) -> bool:
        return super().is_soon(self._entry_of(entry + 1))
