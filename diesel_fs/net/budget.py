"""A memory budget: a thread that wants a buffer beyond the limit waits until others are freed.

A buffer counts until its last view has been garbage-collected: an answer counts until a slow client
has received it. Callable from any thread.
"""

import threading
import time
import weakref

import numpy as np

from ..errors import BusyError


class MemoryBudget:
    """A buffer larger than `limit_bytes` is allocated while there is no other."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._used_bytes = 0
        # Re-entrant: a buffer may be collected at any line, even in a thread that holds the lock
        self._changed = threading.Condition(threading.RLock())

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def allocate(self, size: int, deadline_s: float) -> memoryview:
        """A writable buffer, not cleared. Raises BusyError if the budget has no room within
        `deadline_s`, MemoryError if the machine has no memory."""
        until = time.monotonic() + deadline_s
        with self._changed:
            while self._used_bytes and self._used_bytes + size > self.limit_bytes:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise BusyError(
                        f"no memory for an answer of {size:,} bytes: other answers hold"
                        f" {self._used_bytes:,} of {self.limit_bytes:,}",
                        advice="try again later",
                    )
                self._changed.wait(left_s)
            self._used_bytes += size
        try:
            buffer = np.empty(size, np.uint8)
        except BaseException:
            self._release(size)
            raise
        # At the exit of the process no thread waits for memory any more
        weakref.finalize(buffer, self._release, size).atexit = False
        return buffer.data

    def _release(self, size: int) -> None:
        with self._changed:
            self._used_bytes -= size
            self._changed.notify_all()
