"""The common frame of snapshots and deltas (FORMAT.md, sections 7 and 8): a header, a table of
sections in it, and the sections. Any thread.

A header begins with magic, format version, its length and feature flags, and ends with its
checksum. Each section is an array, begins at a multiple of 64 bytes, and has a checksum in the
table, which follows the header's fixed fields.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from ...errors import CorruptError, ForeignError, FormatError, NewerVersionError, TruncatedError
from ...names import DATASET_NAME

ALIGNMENT = 64

_START = struct.Struct("<8sHHI")
_ROW = struct.Struct("<QQQ")
_CHECKSUM = struct.Struct("<Q")

Section = (
    npt.NDArray[np.void]
    | npt.NDArray[np.uint8]
    | npt.NDArray[np.uint32]
    | npt.NDArray[np.uint64]
    | npt.NDArray[np.int64]
)
Dtype = (
    np.dtype[np.void]
    | np.dtype[np.uint8]
    | np.dtype[np.uint32]
    | np.dtype[np.uint64]
    | np.dtype[np.int64]
)
FIXED_AT = _START.size
"""The offset of the fields of `FileFormat.fixed`."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The offsets of a section: start, end of its bytes, end of the zeros behind it."""

    start: int
    behind: int
    end: int
    checksum: int


@dataclass(frozen=True, slots=True)
class FileFormat:
    """One of the formats. `what` and `advice` are for messages; `fixed` are the header's fields
    behind the common ones, the last two of which are length and bytes of the dataset's name."""

    what: str
    magic: bytes
    version: int
    header_bytes: int
    fixed: struct.Struct
    names: Sequence[str]
    dtypes: Sequence[Dtype]
    advice: str = ""

    @property
    def table_at(self) -> int:
        return FIXED_AT + self.fixed.size

    @property
    def table_end(self) -> int:
        return self.table_at + len(self.dtypes) * _ROW.size

    # Writing

    def write(
        self, fields: Sequence[int | bytes], arrays: Sequence[Section], more: bytes
    ) -> list[memoryview]:
        """Buffers to be written one after the other; `more` stands behind the table."""
        table, parts, at = b"", [memoryview(b"")], self.header_bytes
        for array, dtype in zip(arrays, self.dtypes, strict=True):
            body = np.ascontiguousarray(array, dtype).view(np.uint8).data
            padding = bytes(-len(body) % ALIGNMENT)
            table += _ROW.pack(at, len(body), xxh3_64_intdigest(body))
            parts += [body, memoryview(padding)]
            at += len(body) + len(padding)
        head = _START.pack(self.magic, self.version, self.header_bytes, 0)
        head += self.fixed.pack(*fields) + table + more
        head = head.ljust(self.header_bytes - _CHECKSUM.size, b"\0")
        parts[0] = memoryview(head + _CHECKSUM.pack(xxh3_64_intdigest(head)))
        return [part for part in parts if len(part)]

    # Reading

    def check_magic(self, start: bytes) -> None:
        """Raise ForeignError unless a file can begin with the bytes `start`."""
        if start != self.magic[: len(start)]:
            raise ForeignError(
                f"not a {self.what} (another magic number)", offset=0, advice=self.advice
            )

    def check_header(self, view: memoryview) -> tuple[int, str]:
        """The format version, and the dataset's name. Raises a leaf of FormatError. The caller
        reads the other fields (`fixed`), and checks what stands behind the table (`spare`)."""
        self.check_magic(bytes(view[: len(self.magic)]))
        if len(view) < self.header_bytes:
            raise self.truncated(len(view), self.header_bytes)
        _, version, header_bytes, flags = _START.unpack_from(view)
        if version > self.version:
            raise self._newer(f"format version {version}")
        checksum_at = self.header_bytes - _CHECKSUM.size
        if _CHECKSUM.unpack_from(view, checksum_at)[0] != xxh3_64_intdigest(view[:checksum_at]):
            self.corrupt("its header does not match its checksum", 0)
        if flags:
            raise self._newer(f"feature flags {flags:#x}")
        *_, length, name = self.fixed.unpack_from(view, FIXED_AT)
        dataset = name[:length].decode("ascii", "replace")
        if (
            not version
            or header_bytes != self.header_bytes
            or not DATASET_NAME.fullmatch(dataset)
            or any(name[length:])
        ):
            self.corrupt("its header contradicts itself", 0)
        return version, dataset

    def spare(self, view: memoryview, start: int) -> bytes:
        """The header's bytes from `start` to its checksum."""
        return bytes(view[start : self.header_bytes - _CHECKSUM.size])

    def bounds(self, view: memoryview) -> list[Bounds]:
        """The sections' offsets. Each section has whole items. Raises a leaf of FormatError. The
        checksums are not compared (`check_sums`)."""
        bounds, at = list[Bounds](), self.header_bytes
        for number, dtype in enumerate(self.dtypes):
            offset, length, checksum = _ROW.unpack_from(view, self.table_at + number * _ROW.size)
            if offset != at or length % dtype.itemsize:
                self.corrupt(f"section {self.names[number]} is out of place", at)
            end = at + -(-length // ALIGNMENT) * ALIGNMENT
            bounds.append(Bounds(at, at + length, end, checksum))
            at = end
        if at > len(view):
            raise self.truncated(len(view), at)
        if at < len(view):
            self.corrupt(f"{len(view) - at} bytes behind its end", at)
        return bounds

    def check_sums(self, view: memoryview, bounds: Sequence[Bounds]) -> None:
        """Raise CorruptError for a section that does not match its checksum."""
        for name, each in zip(self.names, bounds, strict=True):
            body, padding = view[each.start : each.behind], view[each.behind : each.end]
            if xxh3_64_intdigest(body) != each.checksum or any(padding):
                self.corrupt(f"section {name} does not match its checksum", each.start)

    # Errors

    def corrupt(self, what: str, offset: int = -1) -> NoReturn:
        raise CorruptError(f"damaged {self.what}: {what}", offset=offset, advice=self.advice)

    def truncated(self, length: int, expected: int) -> FormatError:
        return TruncatedError(
            f"truncated {self.what}: {length} of {expected} bytes",
            offset=length,
            advice=self.advice,
        )

    def _newer(self, what: str) -> FormatError:
        return NewerVersionError(
            f"a {self.what} with {what}", advice="it needs a newer version of DIESEL-FS"
        )
