"""A file of a dataset as a stream. Owned here: nothing but where it is read; see `store.py`."""

import io
from typing import TYPE_CHECKING

from .reader import EntryReader

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class EntryFile(io.RawIOBase):
    """The content of one file as a stream, for whoever wants `read(n)`. Raises as `read` does."""

    def __init__(self, reader: EntryReader, index: int) -> None:
        super().__init__()
        self._reader = reader
        self._index = index
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        room = memoryview(buffer).cast("B")
        content = self._reader.read(self._index, self._at, len(room))
        room[: len(content)] = content
        self._at += len(content)
        return len(content)
