"""Memory that is handed out for answers: so many bytes at once, and who wants more waits.

Owned here: the count. A room's bytes are counted until the last view of it has gone, wherever that
is kept meanwhile: an answer that a slow reader does not take is counted too. Any thread.
"""

import threading
import time
import weakref

import numpy as np

from ..errors import BusyError


class MemoryBudget:
    """At most `limit_bytes` in rooms that are alive; a larger one goes alone."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._used_bytes = 0
        # Re-entrant: a room may go in the middle of any line, also of those that hold the lock.
        self._changed = threading.Condition(threading.RLock())

    @property
    def used_bytes(self) -> int:
        """What is counted now."""
        return self._used_bytes

    def allocate(self, size: int, deadline_s: float) -> memoryview:
        """Writable memory of `size` bytes, not cleared. Raises BusyError where there is none in
        time, MemoryError where the machine has none."""
        until = time.monotonic() + deadline_s
        with self._changed:
            while self._used_bytes and self._used_bytes + size > self.limit_bytes:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise BusyError(
                        f"no memory for an answer of {size:,} bytes: others hold"
                        f" {self._used_bytes:,} of {self.limit_bytes:,}",
                        advice="try again later",
                    )
                self._changed.wait(left_s)
            self._used_bytes += size
        try:
            held = np.empty(size, np.uint8)
        except BaseException:
            self._release(size)
            raise
        weakref.finalize(held, self._release, size).atexit = False
        return held.data

    def _release(self, size: int) -> None:
        with self._changed:
            self._used_bytes -= size
            self._changed.notify_all()
