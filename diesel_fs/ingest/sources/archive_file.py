"""The bytes of an archive at its place: read in order or anywhere, fetched ahead, and hashed.

An archive that is not local is fetched once, in pieces, several at once, ahead of a reader that
goes forward; it never lies on a disk of this machine. The SHA-256 is computed as the bytes pass;
skipped bytes are read at the end.
"""

import hashlib
import io
import os
import sys
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from ...errors import DieselError

PIECE_BYTES = 8 << 20
_PIECES_KEPT = 2  # behind the reader: a zip's reader steps back a little
_WHOLE_BYTES_MAX = 64 << 20  # a smaller fetched archive stays in memory, to be read again
_HASH_BYTES = 1 << 20
_STREAM_BYTES = 64 << 10  # of one read, and so of a `peek` at the beginning

ReadAt = Callable[[int, int], bytes]
"""Any thread may call `read(start, size)`."""


class ArchiveFile(io.RawIOBase, ABC):
    """A binary file that hashes the bytes that are read in order. One thread at a time."""

    def __init__(self, size: int | None) -> None:
        """`size` is None if it is not known before the end."""
        self.size = sys.maxsize if size is None else size
        self._is_size_known = size is not None
        self._at = 0
        self._hashed = 0  # the bytes before this position are in the hash
        self._hash = hashlib.sha256()

    @abstractmethod
    def read_at(self, start: int, room: memoryview) -> int:
        """Returns the number of bytes, 0 only at the end. Raises OSError."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        if start + offset < 0:
            raise OSError("a position before the beginning")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: "bytearray | memoryview") -> int:  # type: ignore[override]  # writable only
        room = memoryview(buffer)[: max(self.size - self._at, 0)]
        count = self.read_at(self._at, room) if room else 0
        if room and not count:
            if self._is_size_known:
                raise OSError(f"it ends after {self._at} of {self.size} bytes")
            self.size = self._at
        if self._at == self._hashed:
            self._hash.update(room[:count])
            self._hashed += count
        self._at += count
        return count

    def rewind(self) -> None:
        self.seek(0)
        self._hashed = 0
        self._hash = hashlib.sha256()

    def sha256(self, check_running: Callable[[], None] = lambda: None) -> bytes:
        """The hash of the whole archive: bytes that were not read in order are read now. Calls
        `check_running` now and then; its errors end this."""
        self.seek(self._hashed)
        room = bytearray(_HASH_BYTES)
        while self._hashed < self.size:
            check_running()
            self.readinto(room)
        return self._hash.digest()


class LocalArchiveFile(ArchiveFile):
    """Reading raises OSError if the file changes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._before = os.fstat(self._file)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        super().__init__(self._before.st_size)

    @property
    def state(self) -> tuple[int, int]:
        """Size and mtime_ns at the opening."""
        return self._before.st_size, self._before.st_mtime_ns

    def read_at(self, start: int, room: memoryview) -> int:
        count = os.preadv(self._file, [room], start)
        if start + count == self.size:
            now = os.fstat(self._file)
            if (now.st_size, now.st_mtime_ns) != self.state:
                raise OSError("it changed while it was being read")
        return count

    def close(self) -> None:
        if not self.closed:
            os.close(self._file)
        super().close()


class FetchedArchiveFile(ArchiveFile):
    """`ahead` pieces are fetched at once."""

    def __init__(self, size: int, read: ReadAt, ahead: int, *, is_pinned: bool = False) -> None:
        """If `is_pinned`, a piece that is fetched again must have the same bytes: a server could
        send other members than those with the checked SHA-256."""
        super().__init__(size)
        self._read = read
        self._ahead = ahead
        self._threads = ThreadPoolExecutor(ahead, "fetch")
        self._pieces: OrderedDict[int, Future[bytes]] = OrderedDict()
        self._is_pinned = is_pinned
        self._digests: dict[int, bytes] = {}
        self._count = -(-size // PIECE_BYTES)
        self._last = 0

    def read_at(self, start: int, room: memoryview) -> int:
        number, offset = divmod(start, PIECE_BYTES)
        if number in (0, self._last, self._last + 1):  # the reader goes forward
            for each in range(number, min(number + self._ahead, self._count)):
                self._fetch(each)
        try:
            piece = self._fetch(number).result()
        except DieselError as error:
            raise OSError(error.message) from error
        self._last = number
        for each in list(self._pieces) if self.size > _WHOLE_BYTES_MAX else ():
            # The last piece stays: a zip has its table of contents there
            if each < number - _PIECES_KEPT and each != self._count - 1:
                del self._pieces[each]
        part = memoryview(piece)[offset : offset + len(room)]
        room[: len(part)] = part
        return len(part)

    def _fetch(self, number: int) -> "Future[bytes]":
        if number not in self._pieces:
            self._pieces[number] = self._threads.submit(self._read_piece, number)
        return self._pieces[number]

    def _read_piece(self, number: int) -> bytes:
        start = number * PIECE_BYTES
        piece = self._read(start, min(PIECE_BYTES, self.size - start))
        if self._is_pinned:
            digest = hashlib.sha256(piece).digest()
            if self._digests.setdefault(number, digest) != digest:
                raise OSError("it changed while it was being read")
        return piece

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._pieces.clear()
        super().close()


class StreamedArchiveFile(ArchiveFile):
    """The server sends only whole files, so this can be read once, in order."""

    def __init__(
        self, size: int | None, read: Callable[[int], bytes], close: Callable[[], None]
    ) -> None:
        """`read(n)` returns at most n bytes, none at the end."""
        super().__init__(size)
        self._read = read
        self._close = close

    def seekable(self) -> bool:
        return False

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_SET or offset != self._at:
            raise io.UnsupportedOperation("the server sends no parts of it, only the whole")
        return self._at

    def read_at(self, start: int, room: memoryview) -> int:
        filled, wanted = 0, min(len(room), _STREAM_BYTES)
        while filled < wanted and (data := self._read(wanted - filled)):
            room[filled : filled + len(data)] = data
            filled += len(data)
        return filled

    def close(self) -> None:
        if not self.closed:
            self._close()
        super().close()
