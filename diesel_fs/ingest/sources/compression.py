"""Decompresses a stream, whose compression is recognised by its first bytes, ahead of its reader.

gzip (several members too), bzip2, xz and Zstandard are known. A thread decompresses blocks while
the reader works on earlier ones, so a put packs and decompresses on two cores. The libraries let
other threads run meanwhile, and check the checksums that the format has.
"""

import bz2
import io
import lzma
import queue
import sys
import threading
import zlib
from collections.abc import Callable
from functools import partial
from typing import IO, BinaryIO, cast

from isal import igzip
from isal.igzip_lib import IsalError

if sys.version_info >= (3, 14):
    from compression.zstd import ZstdError, ZstdFile
else:
    from backports.zstd import ZstdError, ZstdFile

BROKEN_STREAM: tuple[type[Exception], ...] = (
    *(OSError, EOFError, zlib.error, lzma.LZMAError, ZstdError),
    IsalError,  # type: ignore[assignment]  # its stub takes this class for an instance
)
"""What reading a damaged compressed stream raises."""

MAGIC_BYTES = 6
_BLOCK_BYTES = 1 << 20
_BLOCKS_AHEAD = 8
_STEP_BYTES = 16 << 10  # decompressed at once: an error loses what came with it
_READ_BYTES = 1 << 20

_OPENERS: dict[bytes, Callable[[IO[bytes]], object]] = {
    b"\x1f\x8b": igzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
    b"\x28\xb5\x2f\xfd": ZstdFile,
    **{bytes([0x50 + n]) + b"\x2a\x4d\x18": ZstdFile for n in range(16)},  # a frame to be skipped
}


def decompressed(stream: BinaryIO) -> "BufferedStream | Decompressor":
    """The content of a stream from here on: decompressed, or buffered where it is not compressed.
    Close it; the stream stays open."""
    buffered = BufferedStream(stream)
    magic = buffered.peek(MAGIC_BYTES)[:MAGIC_BYTES]
    for start, opener in _OPENERS.items():
        if magic.startswith(start):
            open_content = cast("Callable[[IO[bytes]], io.BufferedIOBase]", opener)
            return Decompressor(partial(open_content, cast("IO[bytes]", buffered)))
    return buffered


class BufferedStream(io.BufferedReader):
    """Buffers the caller's stream, and does not close it."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(cast("io.RawIOBase", stream), _READ_BYTES)

    def close(self) -> None: ...


class Decompressor(io.BufferedIOBase):
    """The decompressed content of a stream, at most `_BLOCKS_AHEAD` MiB ahead of its reader.

    What was decompressed before an error is read first; then the error is raised.
    """

    def __init__(self, opened: Callable[[], io.BufferedIOBase]) -> None:
        """`opened` opens the content; it is called, and its result read, in a thread."""
        self._opened = opened
        self._blocks: queue.Queue[memoryview | BaseException | None] = queue.Queue(_BLOCKS_AHEAD)
        self._block = memoryview(b"")
        self._has_ended = False
        self._error: BaseException | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="decompress", daemon=True)
        self._thread.start()

    def readable(self) -> bool:
        return True

    def peek(self, size: int) -> bytes:
        """At most `size` of the next bytes, at least one unless the content has ended. They stay to
        be read."""
        return bytes(self._block[:size]) if self._block or self._next() else b""

    def readinto(self, buffer: "bytearray | memoryview") -> int:  # type: ignore[override]  # writable only
        """Read at least a byte, unless the content has ended. Raises what decompressing raises."""
        room = memoryview(buffer)
        if not self._block and not self._next():
            return 0
        count = min(len(room), len(self._block))
        room[:count] = self._block[:count]
        self._block = self._block[count:]
        return count

    def read(self, size: int | None = -1) -> bytes:
        """The next `size` bytes, or fewer at the end."""
        assert size is not None
        assert size >= 0
        parts = []
        while size and (self._block or self._next()):
            parts.append(bytes(self._block[:size]))
            self._block = self._block[size:]
            size -= len(parts[-1])
        return b"".join(parts)

    def close(self) -> None:
        """End the thread. What it has decompressed is lost."""
        self._is_over.set()
        while self._thread.is_alive():
            try:
                self._blocks.get(timeout=0.1)  # lets a thread go on that waits for room
            except queue.Empty:
                continue
        super().close()

    def _next(self) -> bool:
        """Take the next block; False at the end."""
        if not self._has_ended:
            block = self._blocks.get()
            if isinstance(block, memoryview):
                self._block = block
                return True
            self._has_ended, self._error = True, block
        if self._error is not None:
            raise self._error
        return False

    def _run(self) -> None:
        try:
            content = self._opened()
            while not self._is_over.is_set():
                room, end = memoryview(bytearray(_BLOCK_BYTES)), 0
                try:
                    while end < _BLOCK_BYTES:
                        count = content.readinto(room[end : end + _STEP_BYTES])
                        if not count:
                            break
                        end += count
                finally:
                    if end:
                        self._blocks.put(room[:end])
                if end < _BLOCK_BYTES:
                    self._blocks.put(None)
                    return
        except BaseException as error:  # the reader raises it
            self._blocks.put(error)
