"""Finds entries in order logs, by memory that two processes of a mount share.

A mount's prefetch worker writes order logs. The mount's server, another process, reads entries from
them for the kernel's READ requests, and finds the entries by `LogAddresses`.

The memory has the digests of up to `LOGS_MAX` logs (a digest names the log's file, its position is
the log's number), and 64 bits for each entry: 0 if no log has it, else the log's number plus 1
(upper 8 bits) and the offset in the log's file. The worker alone writes. A late or torn value does
no harm: the server checks the bytes, and reads an entry from the store if they do not match.
"""

import os
import threading
from typing import Protocol

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from ...format.snapshot.reader import Snapshot
from ...orders.plan import Entries
from .layout import file_name

LOGS_MAX = 64

_OFFSET_BITS = 56
_OFFSET_MASK = np.uint64((1 << _OFFSET_BITS) - 1)
# A larger entry is read from the store: from a log, each READ would read and check all of it
_HELD_BYTES_MAX = 32 << 20


def address_bytes(entry_count: int) -> int:
    """The size of the shared memory for a dataset."""
    return 8 * (LOGS_MAX + entry_count)


class LogAddresses:
    """The shared memory, as one of the two processes uses it."""

    def __init__(self, shared: memoryview) -> None:
        numbers = np.frombuffer(shared, np.uint64)
        self._digests, self._addresses = numbers[:LOGS_MAX], numbers[LOGS_MAX:]

    # For the worker

    def put(self, digest: int, entries: Entries, offsets: npt.NDArray[np.int64]) -> None:
        """Note where entries lie in the log of this digest. Does nothing if there are `LOGS_MAX`
        other logs."""
        number = self._number(digest)
        if number >= 0:
            self._addresses[entries] = offsets.astype(np.uint64) | np.uint64(
                number + 1 << _OFFSET_BITS
            )

    def remove(self, digest: int, entries: Entries) -> None:
        """Note that entries have left the log of this digest."""
        found = np.flatnonzero(self._digests == np.uint64(digest))
        if len(found):
            is_there = self._addresses[entries] >> np.uint64(_OFFSET_BITS) == found[0] + 1
            self._addresses[entries[is_there]] = 0

    def remove_log(self, digest: int, entries: Entries) -> None:
        """Note that a log with these entries is gone."""
        self.remove(digest, entries)
        self._digests[self._digests == np.uint64(digest)] = 0

    def _number(self, digest: int) -> int:
        """The number of a log, which gets a free one if it has none; -1 if all are taken."""
        for wanted in (digest, 0):
            found = np.flatnonzero(self._digests == np.uint64(wanted))
            if len(found):
                self._digests[found[0]] = digest
                return int(found[0])
        return -1

    # For the server

    @property
    def digests(self) -> set[int]:
        return set(self._digests[self._digests != 0].tolist())

    def find(self, entry: int) -> tuple[int, int] | None:
        """The digest of the log that has an entry, and the offset in its file."""
        address = int(self._addresses[entry])
        number = (address >> _OFFSET_BITS) - 1
        if number < 0:
            return None
        return int(self._digests[number]), address & int(_OFFSET_MASK)


class _EntryReader(Protocol):
    """As `readers/entry_reader.py`."""

    def read(self, index: int, offset: int, size: int, /) -> memoryview: ...

    def read_nowait(self, index: int, offset: int, size: int, /) -> memoryview | None: ...

    def stats(self) -> dict[str, int]: ...

    def close(self) -> None: ...


class LogEntryReader:
    """Reads entries from the order logs of another process, or by `reader` if no log has them.

    Thread-safe if `reader` is.
    """

    def __init__(self, snapshot: Snapshot, reader: _EntryReader, folder: str) -> None:
        """`folder` is the path of the dataset's folder in the cache, which need not exist yet."""
        self._snapshot, self._reader, self._folder = snapshot, reader, folder
        self._addresses: LogAddresses | None = None
        self._files: dict[int, int] = {}  # descriptors, by the log's digest; under the lock
        self._lock = threading.Lock()
        self._last: tuple[int, memoryview] = (-1, memoryview(b""))  # the entry that was read last
        self._hits = self._wrong = 0

    def share(self, addresses: LogAddresses) -> None:
        """Read from the logs at these addresses from now on."""
        self._addresses = addresses

    def read(self, index: int, offset: int, size: int) -> memoryview:
        """`size` bytes from `offset` on. May block. Raises DieselError, also for damaged bytes."""
        found = self._find(index)
        if found is None:
            return self._reader.read(index, offset, size)
        return found[offset : offset + size]

    def read_nowait(self, index: int, offset: int, size: int) -> memoryview | None:
        """The same bytes if they are in memory. Never blocks."""
        last, content = self._last
        if last == index:
            return content[offset : offset + size]
        if self._addresses is not None and self._addresses.find(index) is not None:
            return None  # `read` then takes it from the log
        return self._reader.read_nowait(index, offset, size)

    def _find(self, index: int) -> memoryview | None:
        """The checked content of an entry out of a log; None if no log has it undamaged, or if it
        is empty or too large."""
        last, content = self._last
        if last == index:
            return content
        place = None if self._addresses is None else self._addresses.find(index)
        size = self._snapshot.size(index)
        if place is None or not size or size > _HELD_BYTES_MAX:
            return None
        digest, start = place
        try:
            content = memoryview(os.pread(self._file(digest), size, start))
        except OSError:
            return None
        if xxh3_64_intdigest(content) != int(self._snapshot.columns.checksum[index]):
            self._wrong += 1
            return None
        self._hits += 1
        self._last = index, content
        return content

    def _file(self, digest: int) -> int:
        """The descriptor of a log. Raises OSError. The caller checks what it reads: another thread
        may close the descriptor, after the log was removed."""
        with self._lock:
            self._close_removed()
            file = self._files.get(digest)
            if file is None:
                path = f"{self._folder}/{file_name(digest)}"
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
                file = self._files[digest] = os.open(path, flags)
            return file

    def _close_removed(self) -> None:
        """Close the files of logs that the worker has removed: their room comes free then."""
        known = set() if self._addresses is None else self._addresses.digests
        for digest in self._files.keys() - known:
            os.close(self._files.pop(digest))

    def stats(self) -> dict[str, int]:
        """The figures of `reader`, and how many entries came from logs or were wrong there."""
        with self._lock:
            self._close_removed()
        return {**self._reader.stats(), "log_hits": self._hits, "log_wrong": self._wrong}

    def close(self) -> None:
        """Reads under way may fail."""
        self._reader.close()
        with self._lock:
            self._addresses = None
            self._close_removed()
