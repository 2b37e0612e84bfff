"""Memory that a mount's server and its prefetch worker share: it shows which files are pushed next.

The worker *pushes* files into the kernel's page cache before they are read. If a faster reader
overtakes the worker, each next file would cost a READ request. So the server *holds* the READ of a
file that is pushed soon for a few milliseconds, and the worker gets ahead by hundreds of files. If
the store is slow, the READ is held until the worker hands over the contents, and the worker pushes
the rest of the file: so READs and a push make one request to the store. The worker does not push a
held READ's bytes, since it would wait for the page that the READ has locked. If the worker is
storing the file now, the server answers the READ at once. Each process writes its mark before it
reads the other's, so at least one of them sees the other's mark.

Layout: `_COUNT_BYTES` of counts and flags; the held READs; the worker's marks, a byte for each
entry; the server's marks, likewise; room for the bytes of held READs, in *slots*; then the
addresses of entries in order logs (`cache/order_logs/addresses.py`), which take memory only if
there are logs. The server may give a slot to another READ at any time, also while the worker fills
it. A torn or late value does no harm: the checksum of bytes that are handed over covers their place
in the file, too, and each slot carries the kernel's number of its READ, which is used only once.
"""

import math
import mmap
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import trio
from xxhash import xxh3_64_intdigest

from ...cache.order_logs.addresses import LogAddresses, LogEntryReader, address_bytes
from ...orders.plan import NO_ENTRIES, Entries

HOLD_STEP_S = 0.001
"""How often a held READ checks the memory; trio's clock has no shorter step."""

STILL_STEPS = 2
"""A hold ends after this number of steps without progress of the worker. If there are many readers,
the worker does not run in every step."""

HOLD_STEPS = 5
"""The longest hold, in steps. In this time the worker pushes some thousand small files."""

SLOW_HOLD_STEPS = 1_000
"""The longest hold while the worker waits for a slow store: a second."""

SLOW_STILL_STEPS = 400
"""A hold ends after this number of steps without progress, and no READ is held until there is some:
the worker is stopped, or hangs. While it waits for the store, it counts progress every 0.2 s."""

READ_SLOTS, SLOT_BYTES = 16, 256 << 10
"""How many held READs may get their bytes from the worker, and how many bytes each."""

MISS_INTERVAL_S = 0.01
"""The time between two reported misses if the worker wants few. It wants few if no memory is left
and nothing is planned: then reports change nothing, and the readers need the processors."""

_SOON, _NOW = 1, 2  # the worker's mark of an entry; 0: not pushed soon

_COUNT_BYTES = 64
"""The bytes before the held READs: the count of the worker's progress, in 8 bytes; flags in bytes 8
(the worker wants few misses), 9 (a READ has failed) and 10 (the store is slow); at 16 the number of
entries, in 8 bytes."""
_FEW_AT, _FAILED_AT, _SLOW_AT, _ENTRIES_AT = 8, 9, 10, 16

_HELD = np.dtype(
    [(name, np.uint64) for name in ("unique", "entry", "offset", "size", "filled", "checksum")]
)
"""A held READ: the kernel's number of it; its entry + 1 (0: the slot is free); its place in the
file, and its bytes; then, when the worker has filled the slot, the number again, and the checksum
(`_checksum`)."""
_OFFSET_FACTOR = 0x9E3779B97F4A7C15  # odd: each entry and offset give a number of their own
_MARKS_AT = _COUNT_BYTES + READ_SLOTS * _HELD.itemsize


def push_status_file(entry_count: int) -> int:
    """Makes the shared memory. Returns its descriptor. Raises OSError."""
    descriptor = os.memfd_create("diesel-push-status", os.MFD_CLOEXEC)
    os.truncate(descriptor, _addresses_at(entry_count) + address_bytes(entry_count))
    os.pwrite(descriptor, entry_count.to_bytes(8, sys.byteorder), _ENTRIES_AT)
    return descriptor


def _slots_at(entry_count: int) -> int:
    return -(-(_MARKS_AT + 2 * entry_count) // mmap.PAGESIZE) * mmap.PAGESIZE


def _addresses_at(entry_count: int) -> int:
    return _slots_at(entry_count) + READ_SLOTS * SLOT_BYTES


class HeldBytes(NamedTuple):
    """The bytes of one file that a READ wants; `unique` is the kernel's number of the READ."""

    unique: int
    offset: int
    size: int


class PushStatusMap:
    """The shared memory, as one of the two processes uses it."""

    def __init__(self, descriptor: int) -> None:
        """The caller may close `descriptor` (of `push_status_file`) afterwards."""
        shared = mmap.mmap(descriptor, 0)
        entries = int(np.frombuffer(shared, np.uint64, 1, _ENTRIES_AT)[0])
        self.log_addresses = LogAddresses(memoryview(shared)[_addresses_at(entries) :])
        self._count = np.frombuffer(shared, np.uint64, 1)
        self._held = np.frombuffer(shared, _HELD, READ_SLOTS, _COUNT_BYTES)
        self._soon = np.frombuffer(shared, np.uint8, entries, _MARKS_AT)
        self._being_read = np.frombuffer(shared, np.uint8, entries, _MARKS_AT + entries)
        self._soon_seen = memoryview(shared)[_MARKS_AT : _MARKS_AT + entries]
        self._slots = memoryview(shared)[_slots_at(entries) : _addresses_at(entries)]
        self._few = memoryview(shared)[_FEW_AT : _FEW_AT + 1]
        self._failed = memoryview(shared)[_FAILED_AT : _FAILED_AT + 1]
        self._slow = memoryview(shared)[_SLOW_AT : _SLOW_AT + 1]
        self._miss_sent_s = -math.inf
        self.stuck_at = -1
        """The count of progress at which a hold was given up."""
        self._marked = NO_ENTRIES
        self._holds: Counter[int] = Counter()  # the server's, by entry

    # for the worker

    def mark_soon(self, entries: Entries) -> None:
        """Marks these entries, and no others."""
        self._soon[self._marked] = 0
        self._soon[entries] = _SOON
        self._marked = entries

    def clear_soon(self) -> None:
        """Nothing is pushed next, so no READ needs to wait."""
        if len(self._marked):
            self.mark_soon(NO_ENTRIES)

    def set_wants_all_misses(self, *, each_miss: bool) -> None:
        """If not, the server reports one miss every `MISS_INTERVAL_S`."""
        self._few[0] = not each_miss

    def count_progress(self) -> None:
        self._count += np.uint64(1)

    def mark_now(self, entries: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Marks entries that are stored in the page cache now. Returns for each whether it has a
        held READ and must be left out."""
        self._soon[entries] = _NOW
        return self._being_read[entries].astype(np.bool_)

    def set_store_is_slow(self, *, is_slow: bool) -> None:
        """READs are held until their contents arrive from a slow store."""
        self._slow[0] = is_slow

    def besides_held(self, entry: int, start: int, size: int) -> list[tuple[int, int]]:
        """The ranges of these bytes of a file, counted from `start`, that no READ gets by
        `hand_over`. Empty if no READ gets any, or if READs do not begin and end with pages."""
        found, behind = [], 0
        for *_, begin, end in sorted(self._wanted(entry, start, size), key=itemgetter(2)):
            if begin % mmap.PAGESIZE or (end % mmap.PAGESIZE and end < size):
                return []
            found.append((behind, begin))
            behind = max(behind, end)
        found.append((behind, size))
        return [(begin, end) for begin, end in found if begin < end] if behind else []

    def hand_over(self, entry: int, start: int, content: memoryview) -> bool:
        """Gives bytes of a file, from `start` on, to the held READs of its entry that want only
        bytes among these. Returns whether there are any such READs."""
        wanted = self._wanted(entry, start, len(content))
        for slot, unique, begin, end in wanted:
            held, at = self._held[slot], slot * SLOT_BYTES
            self._slots[at : at + end - begin] = content[begin:end]
            held["checksum"] = _checksum(entry, start + begin, content[begin:end])
            held["filled"] = unique
        return bool(wanted)

    def _wanted(self, entry: int, start: int, size: int) -> list[tuple[int, int, int, int]]:
        """The held READs that want only some of these bytes of a file: the slot and the number of
        each, and its begin and end, counted from `start`. The number is taken first: the slot may
        have another READ at any time."""
        found = []
        for slot in np.flatnonzero(self._held["entry"] == entry + 1).tolist():
            held = self._held[slot]
            unique, begin = int(held["unique"]), int(held["offset"]) - start
            end = begin + int(held["size"])
            if begin >= 0 and end <= size and end - begin <= SLOT_BYTES:
                found.append((slot, unique, begin, end))
        return found

    def end_soon(self, entries: npt.NDArray[np.int64]) -> None:
        """Removes the marks of these entries, so that the server reads for their held READs."""
        self._soon[entries] = 0

    @property
    def reads_failed(self) -> bool:
        """If so, pages may be in the page cache without contents."""
        return bool(self._failed[0])

    # for the server

    def note_failed_read(self) -> None:
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

    def try_hold(self, entry: int, wanted: Callable[[], HeldBytes | None]) -> "HeldRead | None":
        """Holds the READ of an entry; None if it need not wait, or the number is no entry. `wanted`
        returns which bytes of the file the READ wants, or None if it also wants bytes of other
        files."""
        if not 0 <= entry < len(self._soon_seen) or self._soon_seen[entry] != _SOON:
            return None
        if self.stuck_at == self.progress:
            return None
        read = wanted()
        held = HeldRead(self, entry, -1 if read is None else self._take_slot(entry, read), read)
        self._holds[entry] += 1
        self._being_read[entry] = 1
        if self._soon_seen[entry] == _NOW:  # the worker may not have seen the mark
            held.end()
            return None
        return held

    def _take_slot(self, entry: int, read: HeldBytes) -> int:
        free = np.flatnonzero(self._held["entry"] == 0)
        if read.size > SLOT_BYTES or not len(free):
            return -1
        slot = int(free[0])
        self._held[slot] = (read.unique, entry + 1, read.offset, read.size, 0, 0)
        return slot

    def end_hold(self, entry: int, slot: int) -> None:
        if slot >= 0:
            self._held["entry"][slot] = 0
        self._holds[entry] -= 1
        if not self._holds[entry]:
            del self._holds[entry]
            self._being_read[entry] = 0

    def is_soon(self, entry: int) -> bool:
        return self._soon_seen[entry] != 0

    def handed_over(self, slot: int, unique: int) -> bytes | None:
        """None if the worker has given no bytes."""
        held = self._held[slot]
        if int(held["filled"]) != unique:
            return None
        at = slot * SLOT_BYTES
        found = bytes(self._slots[at : at + int(held["size"])])
        expected = _checksum(int(held["entry"]) - 1, int(held["offset"]), found)
        return found if expected == int(held["checksum"]) else None

    @property
    def progress(self) -> int:
        return int(self._count[0])

    @property
    def store_is_slow(self) -> bool:
        return bool(self._slow[0])


def _checksum(entry: int, offset: int, content: bytes | memoryview) -> int:
    """The checksum of bytes of an entry, from an offset on. The seed names the entry and the
    offset, so that the bytes of another file or place do not pass."""
    return xxh3_64_intdigest(content, seed=(entry + offset * _OFFSET_FACTOR) % (1 << 64))


@dataclass(frozen=True, slots=True)
class HeldRead:
    """A READ that the server holds. `end` must be called."""

    status: PushStatusMap
    entry: int
    slot: int  # -1: it gets no bytes from the worker
    read: HeldBytes | None

    async def wait(self) -> bytes | None:
        """The bytes that the worker hands over. None once it makes no progress, the entry is
        pushed, or the steps are over."""
        before, still = self.status.progress, 0
        for step in range(SLOW_HOLD_STEPS):
            await trio.sleep(HOLD_STEP_S)
            if self.slot >= 0 and self.read is not None:
                found = self.status.handed_over(self.slot, self.read.unique)
                if found is not None:
                    return found
            if not self.status.is_soon(self.entry):
                return None
            now = self.status.progress
            still = still + 1 if now == before else 0
            before = now
            if self.slot >= 0 and self.status.store_is_slow:
                if still >= SLOW_STILL_STEPS:
                    self.status.stuck_at = now
                    return None
            elif still >= STILL_STEPS or step + 1 >= HOLD_STEPS:
                return None
        return None

    def end(self) -> None:
        self.status.end_hold(self.entry, self.slot)


def share_logs(reader: object, descriptor: int) -> None:
    """Lets the server's reader read from the order logs with addresses in this memory."""
    if isinstance(reader, LogEntryReader):
        reader.share(PushStatusMap(descriptor).log_addresses)


class NodePushStatusMap(PushStatusMap):
    """The server's side in a FUSE mount that follows its dataset: the methods' `entry` is the
    number of a node minus 1, not an index in the snapshot."""

    def __init__(self, descriptor: int, entry_of: Callable[[int], int]) -> None:
        """`entry_of` returns the entry of a node in the version of this memory, or -1."""
        super().__init__(descriptor)
        self._entry_of = entry_of

    def try_hold(self, entry: int, wanted: Callable[[], HeldBytes | None]) -> HeldRead | None:
        return super().try_hold(self._entry_of(entry + 1), wanted)
