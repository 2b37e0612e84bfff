"""Reads whole chunks from the files of the node's disk cache that the master hands out.

Reads past the page cache, as a mount's contents are in the kernel's pages anyway. All bytes are
checked here, as the master has not read them. Any thread.
"""

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from ...cache.tiers import ChunkKey, verify_chunk
from ...errors import CorruptError
from ...system.direct_io import aligned_memory, read_once

READ_TIMEOUT_S = 1.0
"""A slower disk is slower than any store, as for the master."""

PAUSE_S = 30.0
"""How long no file is read after a disk was late."""

_ROOMS_MAX = 4  # unused memory that is kept: as much as is read at once
_ROOM_BYTES_MAX = 8 << 20


class _Room:
    """Memory that is used again after its last view is gone: the first touch of new memory costs
    more than reading into it."""

    __slots__ = ("__array_interface__", "_memory", "_unused")

    def __init__(self, memory: memoryview, unused: deque[memoryview]) -> None:
        self._memory, self._unused = memory, unused
        self.__array_interface__ = np.frombuffer(memory, np.uint8).__array_interface__

    def view(self) -> memoryview:
        return np.asarray(self, np.uint8).data

    def __del__(self) -> None:
        if len(self._memory) <= _ROOM_BYTES_MAX:
            self._unused.append(self._memory)


class ChunkFiles:
    def __init__(
        self,
        *,
        timeout_s: float = READ_TIMEOUT_S,
        read: Callable[[int, int, memoryview], None] = read_once,
    ) -> None:
        self._timeout_s = timeout_s
        self._read = read
        self._rests_until_s = 0.0
        self._unused: deque[memoryview] = deque(maxlen=_ROOMS_MAX)

    @property
    def is_resting(self) -> bool:
        return time.monotonic() < self._rests_until_s

    def read(self, key: ChunkKey, file: int, size: int) -> memoryview | None:
        """Takes over the descriptor `file`. Returns None if the disk is late or fails. Raises
        FormatError for a file that is not the chunk of this size.

        A thread reads; it is abandoned if the disk hangs.
        """
        answer: queue.SimpleQueue[memoryview | Exception] = queue.SimpleQueue()

        def work() -> None:
            try:
                answer.put(self._checked(key, file, size))
            except Exception as error:
                answer.put(error)
            finally:
                os.close(file)

        try:
            threading.Thread(target=work, name="diesel-file", daemon=True).start()
        except RuntimeError:  # no thread can be started
            os.close(file)
            return None
        try:
            found = answer.get(timeout=self._timeout_s)
        except queue.Empty:
            self._rests_until_s = time.monotonic() + PAUSE_S
            return None
        if isinstance(found, memoryview):
            return found
        if isinstance(found, (OSError, MemoryError)):
            return None
        raise found

    def _checked(self, key: ChunkKey, file: int, size: int) -> memoryview:
        if (there := os.fstat(file).st_size) != size:
            raise CorruptError(f"a cached chunk has {there:,} bytes instead of {size:,}")
        room = self._room(size).view()
        try:
            self._read(file, size, room)
        except EOFError:
            raise CorruptError("a cached chunk was cut off") from None
        content = room[:size].toreadonly()
        verify_chunk(key, content)
        return content

    def _room(self, size: int) -> _Room:
        with contextlib.suppress(IndexError):
            while len(memory := self._unused.popleft()) < size:
                pass  # too small for this chunk
            return _Room(memory, self._unused)
        return _Room(aligned_memory(size), self._unused)
