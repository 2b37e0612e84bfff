"""Decompresses a stream ahead of its reader, by the format of its first bytes.

A thread decompresses blocks while the reader works on earlier ones: the libraries release the
interpreter's lock, and verify their formats' checksums.
"""

import bz2
import io
import lzma
import queue
import sys
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO, Protocol, cast

from isal.igzip_lib import DECOMP_GZIP, IgzipDecompressor, IsalError

if sys.version_info >= (3, 14):
    from compression.zstd import ZstdDecompressor, ZstdError
else:
    from backports.zstd import ZstdDecompressor, ZstdError

BROKEN_STREAM: tuple[type[Exception], ...] = (
    *(OSError, EOFError, zlib.error, lzma.LZMAError, ZstdError),
    IsalError,  # type: ignore[assignment]  # its stub takes this class for an instance
)

MAGIC_BYTES = 6
_BLOCK_BYTES = 1 << 20
_BLOCKS_AHEAD = 8
_STEP_BYTES = 16 << 10  # decompressed at once: an error loses the bytes of its step
_READ_BYTES = 1 << 20


class TrailingBytes(OSError):
    """Other bytes follow the compressed ones. All compressed ones have been read."""


class _Stream(Protocol):
    """Decompresses one stream of a format, such as a gzip member or a Zstandard frame."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class _Format:
    name: str
    magics: tuple[bytes, ...]
    begin: Callable[[], _Stream]


_FORMATS = (
    _Format("gzip", (b"\x1f\x8b",), partial(IgzipDecompressor, flag=DECOMP_GZIP)),
    _Format("bzip2", (b"BZh",), bz2.BZ2Decompressor),
    _Format("xz", (b"\xfd7zXZ\0",), partial(lzma.LZMADecompressor, lzma.FORMAT_XZ)),
    _Format(
        "Zstandard",
        (
            b"\x28\xb5\x2f\xfd",
            *(bytes([0x50 + n]) + b"\x2a\x4d\x18" for n in range(16)),  # frames to be skipped
        ),
        ZstdDecompressor,
    ),
)


def decompressed(stream: BinaryIO) -> "BufferedStream | Decompressor":
    """The rest of a stream, decompressed if it is compressed. The caller closes it; the stream
    itself stays open."""
    buffered = BufferedStream(stream)
    magic = buffered.peek(MAGIC_BYTES)[:MAGIC_BYTES]
    for each in _FORMATS:
        if magic.startswith(each.magics):
            return Decompressor(_Streams(buffered, each).readinto)
    return buffered


class _Streams:
    """A file may have several streams of one format, one after the other, with zeros between and
    behind them."""

    def __init__(self, file: "BufferedStream", kind: _Format) -> None:
        self._file = file
        self._kind = kind
        self._stream = kind.begin()
        self._next = b""  # read but not yet decompressed

    def readinto(self, room: memoryview) -> int:
        """Returns the number of bytes, 0 only at the end. Raises TrailingBytes, and the errors of
        the library."""
        while not self._stream.eof or self._begin_next():
            data = b""
            if self._stream.needs_input:
                data, self._next = self._next or self._file.read1(_READ_BYTES), b""
                if not data:
                    raise EOFError(f"the {self._kind.name} stream is cut off")
            part = self._stream.decompress(data, len(room))
            room[: len(part)] = part
            if part:
                return len(part)
        return 0

    def _begin_next(self) -> bool:
        """False at the end of the file. Raises TrailingBytes."""
        rest = self._stream.unused_data.lstrip(b"\0")
        while len(rest) < MAGIC_BYTES and (more := self._file.read1(_READ_BYTES)):
            rest = (rest + more).lstrip(b"\0")
        if not rest:
            return False
        if not rest.startswith(self._kind.magics):
            raise TrailingBytes(
                f"the bytes behind the end of the {self._kind.name} stream are of another kind:"
                " they are left out"
            )
        self._stream, self._next = self._kind.begin(), rest
        return True


class BufferedStream(io.BufferedReader):
    """Does not close the caller's stream."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(cast("io.RawIOBase", stream), _READ_BYTES)

    def close(self) -> None: ...


class Decompressor(io.BufferedIOBase):
    """A file whose content a thread decompresses, at most `_BLOCKS_AHEAD` MiB ahead of its reader.
    Bytes decompressed before an error are read first; then the error is raised."""

    def __init__(self, readinto: Callable[[memoryview], int]) -> None:
        self._readinto = readinto
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
        """The next bytes, which a later `read` returns again: at least one, unless the content has
        ended."""
        return bytes(self._block[:size]) if self._block or self._next() else b""

    def readinto(self, buffer: "bytearray | memoryview") -> int:  # type: ignore[override]  # writable only
        """Reads at least a byte, unless the content has ended. Raises the errors of
        decompression."""
        room = memoryview(buffer)
        if not self._block and not self._next():
            return 0
        count = min(len(room), len(self._block))
        room[:count] = self._block[:count]
        self._block = self._block[count:]
        return count

    def read(self, size: int | None = -1) -> bytes:
        """Returns fewer bytes only at the end. Raises the errors of decompression."""
        assert size is not None
        assert size >= 0
        parts = []
        try:
            while size and (self._block or self._next()):
                parts.append(bytes(self._block[:size]))
                self._block = self._block[size:]
                size -= len(parts[-1])
        except Exception:
            if not parts:  # otherwise the next call raises it
                raise
        return b"".join(parts)

    def close(self) -> None:
        self._is_over.set()
        while self._thread.is_alive():
            try:
                self._blocks.get(timeout=0.1)  # frees a thread that waits for room
            except queue.Empty:
                continue
        super().close()

    def _next(self) -> bool:
        """False if the content has ended. Raises the errors of decompression."""
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
            while not self._is_over.is_set():
                room, end = memoryview(bytearray(_BLOCK_BYTES)), 0
                try:
                    while end < _BLOCK_BYTES:
                        count = self._readinto(room[end : end + _STEP_BYTES])
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
