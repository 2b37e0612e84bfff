"""The content of one file as a binary stream."""

import io
import operator
from typing import TYPE_CHECKING

from .entry_reader import EntryReader

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class EntryFile(io.RawIOBase):
    """The content of one file as a stream that can seek. Reads raise the errors of
    `EntryReader.read`.

    The stream stays with the version in which the file was found. It does not close `reader`; the
    caller does, after the last read. `read_at` is safe from any thread.
    """

    def __init__(self, reader: EntryReader, index: int) -> None:
        super().__init__()
        self._reader = reader
        self._index = index
        self._at = 0
        self.size = reader.snapshot.size(index)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._check_not_closed()
        offset = operator.index(offset)
        starts = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}
        if whence not in starts or starts[whence] + offset < 0:
            raise ValueError(f"cannot seek to {offset} with whence {whence}")
        self._at = starts[whence] + offset
        return self._at

    def read_at(self, offset: int, size: int) -> memoryview:
        """Fewer bytes only at the file's end. Raises ValueError for a negative number, and once the
        stream is closed."""
        self._check_not_closed()
        if offset < 0 or size < 0:
            raise ValueError(f"cannot read {size} bytes from {offset} on")
        return self._reader.read(self._index, offset, size)

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(self.size - self._at, 0)
        content = bytes(self.read_at(self._at, left if size is None or size < 0 else size))
        self._at += len(content)
        return content

    def readall(self) -> bytes:
        return self.read()

    def _check_not_closed(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on a closed file")

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        room = memoryview(buffer).cast("B")
        content = self.read_at(self._at, len(room))
        room[: len(content)] = content
        self._at += len(content)
        return len(content)
