"""The entries of a dataset: their kinds, the rules for paths, and columns of many entries.

An **entry** is a file, a symbolic link, a folder, or a tombstone (the path is deleted). Metadata
stores keep an entry as a `RECORD` and a tail; an `EXTENT` is one part of a file larger than a
chunk.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, NewType, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from ..names import cut, shown

Bytes = bytes | bytearray | memoryview
"""Buffers that are written or sent."""


def whole_object(content: memoryview) -> bytes | memoryview:
    """The underlying `bytes` if the view covers all of it, so that `bytes()` does not copy."""
    found = content.obj
    return found if type(found) is bytes and len(found) == content.nbytes else content


ChunkId = NewType("ChunkId", bytes)
"""16 bytes, ordered as bytes (`chunk_id.py`)."""

Stamp = NewType("Stamp", bytes)
"""20 bytes, ordered as bytes: an entry's first chunk (16), its place there (4). The greater one of
a path is the later one."""

NAME_BYTES_MAX = 255
"""NAME_MAX of Linux: a longer name could be stored but never opened."""

PATH_BYTES_MAX = 262_144
"""Enough for 1,000 nested folders with names of 250 bytes."""

_BLOCK_BYTES = 1 << 22  # of joined names, scanned for NULs at once

MODE_MASK = 0o777
"""Set-user-ID, set-group-ID and sticky bits are not kept."""

ROOT = b""


class Kind(IntEnum):
    """The numbers are part of the formats."""

    FILE = 0
    LINK = 1
    FOLDER = 2
    TOMBSTONE = 3


class Codec(IntEnum):
    """The numbers are part of the formats."""

    RAW = 0
    LZ4 = 1


CHUNK_RANGE = np.dtype([("chunk", "V16"), ("start", "<u4"), ("size", "<u4")])
"""`size` bytes of a chunk's object, from `start` on."""

ChunkRanges = npt.NDArray[np.void]

RECORD = np.dtype(
    [
        ("size", "<u8"),  # of the whole file, in bytes; for a link, its target's length
        ("mtime_ns", "<i8"),  # since 1970, signed: files are older, and younger than 2106
        ("checksum", "<u8"),  # xxh3-64 of the content; 0 for a file of several extents
        ("offset", "<u4"),  # from the start of the chunk object
        ("stored", "<u4"),  # the bytes that the content takes there
        ("mode", "<u2"),
        ("kind", "u1"),
        ("codec", "u1"),
        ("place", "<u4"),  # its number in its chunk
        ("extents", "<u4"),  # of the file; if several, its tail has them
        ("spare", "<u4"),
    ]
)
"""An entry's fixed part, 48 bytes. Metadata stores look only at `kind`, `size`, `place` and
`extents`."""

EXTENT = np.dtype(
    [
        ("chunk", "V16"),
        ("start", "<u8"),  # in the file; a multiple of 64 KiB
        ("size", "<u8"),  # of the content, in bytes
        ("checksum", "<u8"),
        ("offset", "<u4"),  # from the start of the chunk object
        ("stored", "<u4"),
        ("number", "<u4"),  # i of n, from 0
        ("place", "<u4"),
        ("codec", "u1"),
        ("spare", "V7"),
    ]
)
"""One extent of several, 64 bytes. The file's tail has them in order of `number`."""


class Stat(NamedTuple):
    """The attributes of an entry. `mode` has permission bits only; `size` is in bytes."""

    kind: Kind
    mode: int
    size: int
    mtime_ns: int


class ChunkInfo(NamedTuple):
    id: ChunkId
    object_bytes: int


AnySlice: TypeAlias = "slice[int | None, int | None, int | None]"


class Names(Sequence[bytes]):
    """Names in one block of bytes, joined by NULs, as chunks hold them. Each becomes a Python
    object only when it is read: four million would take 250 MB. Iterating is as fast as over a
    list; indexing is slower."""

    __slots__ = ("_count", "_is_split_by_nuls", "_starts", "joined")

    def __init__(self, joined: bytes, count: int) -> None:
        """`joined` has a NUL between each two names, and none in a name. (Empty bytes are no name
        or one empty name.)"""
        self.joined = joined
        self._count = count
        self._is_split_by_nuls = True
        self._starts: npt.NDArray[np.int64] | None = None

    @classmethod
    def of(cls, names: Iterable[bytes]) -> "Names":
        """Make `Names` of any names, even if some contain NULs."""
        if isinstance(names, Names):
            return names
        listed = [*names]
        made = cls(b"\0".join(listed), len(listed))
        if made.joined.count(b"\0") != max(len(listed) - 1, 0):
            made._is_split_by_nuls = False  # a name holds a NUL, which `are_allowed` must see
            made._starts = np.zeros(len(listed) + 1, np.int64)
            np.cumsum([len(name) + 1 for name in listed], out=made._starts[1:])
        return made

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """The offset of each name in `joined`, and of one more behind the last."""
        if self._starts is None:
            self._starts = self._find_starts()
        return self._starts

    def _find_starts(self) -> npt.NDArray[np.int64]:
        starts = np.zeros(self._count + 1, np.int64)
        if self._count:
            data, done = np.frombuffer(self.joined, np.uint8), 1
            for first in range(0, len(data), _BLOCK_BYTES):
                nuls = np.flatnonzero(data[first : first + _BLOCK_BYTES] == 0)
                starts[done : done + len(nuls)] = nuls + (first + 1)
                done += len(nuls)
            starts[-1] = len(self.joined) + 1
        return starts

    def packed(self) -> tuple[npt.NDArray[np.int64], bytes]:
        """The names without NULs: the offset of each (and the end), and the bytes."""
        starts = self._find_starts() if self._is_split_by_nuls else self.starts.copy()
        starts -= np.arange(self._count + 1)
        if self._is_split_by_nuls:
            return starts, self.joined.replace(b"\0", b"")
        return starts, b"".join(self)

    def empty_ones(self) -> npt.NDArray[np.int64]:
        first, last = self.joined[:1], self.joined[-1:]
        if first not in (b"", b"\0") and last != b"\0" and b"\0\0" not in self.joined:
            return np.zeros(0, np.int64)
        return np.flatnonzero(np.diff(self.starts) == 1)

    def are_allowed(self) -> bool:
        """Whether each name may be in a path (`name_fault`)."""
        enclosed = b"\0%b\0" % self.joined
        return (
            b"/" not in enclosed
            and enclosed.count(b"\0") == self._count + 1
            and not any(bad in enclosed for bad in (b"\0\0", b"\0.\0", b"\0..\0"))
            and int(np.diff(self.starts).max(initial=0)) <= NAME_BYTES_MAX + 1
        )

    def take(self, indices: npt.NDArray[np.int64]) -> list[bytes]:
        bounds = zip(self.starts[indices].tolist(), self.starts[indices + 1].tolist(), strict=True)
        return [self.joined[start : end - 1] for start, end in bounds]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[bytes]:
        if not self._is_split_by_nuls:
            return iter(self.take(np.arange(self._count)))
        return iter(self.joined.split(b"\0") if self._count else ())

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: AnySlice) -> "Names": ...
    def __getitem__(self, at: "int | AnySlice") -> "bytes | Names":
        if isinstance(at, slice):
            first, end, step = at.indices(self._count)
            if step != 1 or not self._is_split_by_nuls:
                return Names.of([*self][at])
            if first >= end:
                return Names(b"", 0)
            start, stop = int(self.starts[first]), int(self.starts[end]) - 1
            return Names(self.joined[start:stop], end - first)
        index = range(self._count)[at]  # checks the bounds
        return self.joined[int(self.starts[index]) : int(self.starts[index + 1]) - 1]

    def __eq__(self, other: object) -> bool:
        return [*self] == ([*other] if isinstance(other, Names) else other)

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __repr__(self) -> str:
        return f"Names.of({[*self]!r})"


@dataclass(frozen=True, slots=True)
class Rows:
    """n entries as columns, in any order, each path once. **Row** i is entry i. `folder[i]` is an
    index in `folders` (paths, each once), `chunk[i]` one in `chunks`. `tails` maps i to a link's
    target, or to the `EXTENT`s of a file with several."""

    folders: Sequence[bytes]
    folder: npt.NDArray[np.uint32]
    names: Sequence[bytes]
    records: npt.NDArray[np.void]
    chunk: npt.NDArray[np.uint32]
    chunks: Sequence[ChunkId]
    tails: Mapping[int, bytes] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.names)

    def path(self, i: int) -> bytes:
        return join(self.folders[self.folder[i]], self.names[i])


def join(folder: bytes, name: bytes) -> bytes:
    return folder + b"/" + name if folder else name


def split(path: bytes) -> tuple[bytes, bytes]:
    """The folder and the name in a path; `(b"", b"")` for the root."""
    folder, _, name = path.rpartition(b"/")
    return folder, name


def name_fault(name: bytes) -> str:
    """Why `name` cannot be in a path; empty if it can."""
    if not name:
        return "an empty component"
    if name in (b".", b".."):
        return f"the component {name.decode()!r}"
    if len(name) > NAME_BYTES_MAX:
        return f"a component of {len(name)} bytes (at most {NAME_BYTES_MAX})"
    if b"/" in name or b"\0" in name:
        return "a slash or NUL inside a component"
    return ""


def path_fault(path: bytes) -> str:
    """Why no entry can have this path; empty if one can, and for the root."""
    if path == ROOT:
        return ""
    if len(path) > PATH_BYTES_MAX:
        return f"{len(path)} bytes (at most {PATH_BYTES_MAX})"
    return next(filter(None, map(name_fault, path.split(b"/"))), "")


def check_path(path: bytes) -> bytes:
    """Return `path`. Raises UsageError if it cannot be a path in a dataset."""
    if fault := path_fault(path):
        named = b"/".join(name for name in path.split(b"/") if name not in (b"", b"."))
        is_meant = named and not path_fault(named)
        if path.startswith(b"/") and is_meant:
            fault = "a slash at its start"
        raise UsageError(
            f"bad path {cut(shown(path))}: it has {fault}",
            advice=f"write it from the dataset's root on: {cut(shown(named))}" if is_meant else "",
        )
    return path
