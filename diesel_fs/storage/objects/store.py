"""The interface of an object store, and the base classes of wrappers.

An object store keeps named, immutable byte strings: chunks, snapshots, leases. Every store
implements the seven methods of `ObjectStore`; some improve on the plain forms of `FastReads` and
`Housekeeping`. The object `DIESEL-STORE`, the marker, tells a store from an empty folder.

Any thread and process; all methods block. A forked child may use its parent's store if `fork_safe`
is true.
"""

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ...errors import (
    CorruptError,
    ForeignError,
    NewerVersionError,
    NoSpaceError,
    TruncatedError,
    UsageError,
)
from ...format.entries import Bytes
from ...format.object_names import (
    FOLDER_NAME,
    IDENTITY_TEXT,
    MUTABLE_NAME,
    OBJECT_NAME,
    STORE_MARKER,
)

MARKER_BYTES_MAX = 4096
STORE_FORMAT = 1


def check_name(name: str) -> None:
    if not OBJECT_NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not the name of an object")


def check_mutable(name: str) -> None:
    if not MUTABLE_NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not the name of an object that may be replaced")


def check_deletable(name: str) -> None:
    check_name(name)
    if name == STORE_MARKER:
        raise UsageError(f"{STORE_MARKER} is not deleted: it tells a store from an empty folder")


def check_range(name: str, start: int, length: int | None) -> None:
    check_name(name)
    if start < 0 or (length is not None and length < 0):
        raise UsageError(f"{name}: bad range: start {start}, length {length}")


def check_prefix(prefix: str) -> None:
    folder = prefix.rpartition("/")[0]
    if "/" in prefix and not FOLDER_NAME.fullmatch(folder):
        raise UsageError(f"{folder!r} is not a folder of objects")


def check_end(name: str, end: int, size: int) -> None:
    """Raise TruncatedError if `size` is less than `end`."""
    if end > size:
        raise TruncatedError(f"{name}: ends at byte {size}, wanted up to {end}", offset=size)


def encode_marker(store: uuid.UUID) -> bytes:
    return json.dumps({"diesel-fs": store.hex, "format": STORE_FORMAT}).encode() + b"\n"


def parse_marker(content: Bytes) -> uuid.UUID:
    """The store's UUID. Raises ForeignError, CorruptError or NewerVersionError."""
    try:
        fields: object = json.loads(bytes(content))
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{STORE_MARKER}: not JSON: {error}") from None
    if not isinstance(fields, dict) or "diesel-fs" not in fields:
        raise ForeignError(f"{STORE_MARKER}: not the marker of a DIESEL-FS store")
    store, version = fields["diesel-fs"], fields.get("format")
    if not isinstance(version, int) or version < 1:
        raise CorruptError(f"{STORE_MARKER}: no format version")
    if version > STORE_FORMAT:
        raise NewerVersionError(
            f"{STORE_MARKER}: format {version}, and this program knows {STORE_FORMAT}",
            advice="use a newer diesel-fs",
        )
    if not isinstance(store, str) or not re.fullmatch(IDENTITY_TEXT, store):
        raise CorruptError(f"{STORE_MARKER}: no store UUID")
    return uuid.UUID(hex=store)


def new_buffer(size: int) -> memoryview:
    """Uninitialised memory. Filling a bytearray with zeros would hold the interpreter's lock.
    Raises NoSpaceError."""
    try:
        return np.empty(size, np.uint8).data
    except MemoryError:
        raise NoSpaceError(f"there is no memory for {size:,} bytes of a chunk") from None


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """`modified_ns` counts from 1970."""

    name: str
    bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class Leftover:
    """A temporary file of a put that is under way, or of a writer that died: process `pid` of
    `host`."""

    name: str
    bytes: int
    modified_ns: int
    host: str
    pid: int


Part = tuple[str, int, int]
"""The object's name, the part's first byte, and its length in bytes."""

AnyPart = TypeVar("AnyPart", Part, tuple[int, int, int])


def batched_parts(
    parts: Sequence[AnyPart], count_max: int, bytes_max: int
) -> Iterator[Sequence[AnyPart]]:
    """Split parts, in their order, into batches of at most `count_max` parts and `bytes_max` bytes.
    A larger part is a batch of its own. A part's last value is its size in bytes."""
    begin = total = 0
    for end, (_, _, size) in enumerate(parts):
        if end > begin and (end - begin == count_max or total + size > bytes_max):
            yield parts[begin:end]
            begin, total = end, 0
        total += size
    if parts:
        yield parts[begin:]


ChunkParts = npt.NDArray[np.uint32]
"""Shape (n, 3): the chunk's number (its index in the dataset's snapshot), the part's first byte in
the chunk, the part's size in bytes."""


class ReadGroup(NamedTuple):
    places: Sequence[int]
    """For each content, the position of its part in the request. (`ChunkReader.places` returns
    nodes.)"""

    contents: Sequence[memoryview]

    is_checked: bool
    """Whether the contents were compared with a checksum."""


IN_MEMORY, IN_STORE = -2, -1
"""Values of `ChunkReader.places` that are not the number of a node."""


def give_up(groups: Iterator[ReadGroup]) -> None:
    """End a read (`ChunkReader.begin`) whose groups nobody wants any more, as far as it can end."""
    close = getattr(groups, "close", None)
    if close is not None:
        close()


class ChunkReader(Protocol):
    """Reads parts of the chunks of one version of a dataset, by chunk number. Thread-safe."""

    def begin(self, parts: ChunkParts) -> Iterator[ReadGroup]:
        """Read parts, which lie in their chunks and are not empty.

        All requests that may be sent at once are sent before this returns. The iterator yields each
        part once, as it arrives; the caller may drop the iterator early. Raises as
        `ObjectStore.read_into`.
        """

    @property
    def is_slow(self) -> bool:
        """Whether parts lately came from a place that takes long to answer, so that it helps to
        read many at once, and ahead. True before the first read of such a place."""

    def places(self, chunks: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """The number of the node from which each chunk would be read now, as far as this process
        knows; `IN_MEMORY` for this process's memory, `IN_STORE` for the object store."""

    def read_part(self, chunk: int, start: int, size: int) -> tuple[Bytes, bool]:
        """The bytes of one part, and whether they were compared with a checksum. Raises as
        `ObjectStore.read_into`."""


class ObjectStore(ABC):
    """Named, immutable byte strings. Only leases and records of archives that were put (FORMAT.md,
    section 2) may change (`replace`).

    Every method may raise UsageError for a name outside the grammar, PermissionDenied,
    NoSpaceError, and ObjectStoreError for other failures. ObjectMissing means that the store is
    there and the object is not. If the store has gone, that is an ObjectStoreError.
    """

    store_id: uuid.UUID

    # Properties, so that a wrapper can pass them on; a store may set `fork_safe` on its class.

    @property
    def fork_safe(self) -> bool:
        """If false, a forked child must become a program that opens the store itself."""
        return True

    @property
    def fast_reads(self) -> "FastReads":
        """Each access may make a new object, so frequent readers keep it."""
        return FastReads(self)

    @property
    def housekeeping(self) -> "Housekeeping":
        return Housekeeping(self)

    @abstractmethod
    def put(self, name: str, parts: Sequence[Bytes]) -> None:
        """Create an object from `parts` in order (they are not joined in memory).

        Atomic: at every moment, and after any crash, the name has no object or the whole one. If
        several callers put one name at once, one succeeds; the others get ObjectExists, and nothing
        is overwritten. Durable on return. After any other error it is unknown whether the (whole)
        object exists, and the caller takes a new name.
        """

    @abstractmethod
    def replace(self, name: str, parts: Sequence[Bytes]) -> None:
        """Create or overwrite a mutable object. Atomic (a reader sees the old or the new object),
        durable on return, idempotent. If several callers do so at once, the last wins."""

    @abstractmethod
    def get(self, name: str, start: int = 0, length: int | None = None) -> bytearray:
        """Exactly `length` bytes from `start` (None: to the end). Raises ObjectMissing, and
        TruncatedError, before taking memory, if the object ends earlier."""

    @abstractmethod
    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        """Fill the caller's memory with the bytes from `start`, without a copy. Raises as `get`.
        After an error the buffer's content is undefined."""

    @abstractmethod
    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """Objects with names that begin with `prefix` and come after `after`, in byte order.

        Lazy. An object that exists during the whole listing is listed once; one that appears or
        disappears meanwhile may be listed or not. Temporary and foreign files are left out. If a
        part of the store cannot be read, the listing raises.
        """

    @abstractmethod
    def stat(self, name: str) -> ObjectInfo:
        """Raises ObjectMissing."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove an object; does nothing if it is absent. Durable on return. Raises UsageError for
        the marker."""


class CheckedObject(NamedTuple):
    """A whole object that was checked against its checksums, in read-only memory."""

    content: memoryview
    is_shared: bool
    """Whether other processes share the memory. Otherwise it is the reader's own copy, which only a
    reader gets that keeps the bytes elsewhere, as a mount does in the kernel's pages."""


class FastReads:
    """Ways to read besides `get` and `read_into`. These plain forms call the store's own
    `read_into`, part by part; a store with a faster way offers a subclass."""

    batches_reads: bool = False
    """Whether many parts in one `read_parts` cost little more than one."""

    can_pin: bool = False

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def read(self, name: str, start: int, size: int) -> Bytes:
        """As `read_into`, into new memory. Raises NoSpaceError."""
        room = new_buffer(size)
        self._store.read_into(name, start, room)
        return room

    def read_ranges(
        self, name: str, ranges: Sequence[tuple[int, int]], room: memoryview
    ) -> Iterator[memoryview]:
        """The bytes of several ranges (start, size) of one object, in order. Raises as `read_into`.

        All are read into `room`, which must be as large as the largest range. So a range's bytes
        are valid until the caller takes the next one.
        """
        for start, size in ranges:
            self._store.read_into(name, start, room[:size])
            yield room[:size].toreadonly()

    def read_parts(self, parts: Sequence[Part]) -> Iterator[memoryview]:
        """The bytes of parts of one dataset's objects, in order, each in memory of its own. A store
        that fetches in the background has begun when this returns. Raises as `read_into`, at once
        or from the iterator."""
        for name, start, size in parts:
            yield memoryview(self.read(name, start, size)).toreadonly()

    def chunk_reader(self, identity: uuid.UUID, version: int) -> ChunkReader | None:
        """None if the store is not faster by chunk number than by the objects' names."""
        return None

    def read_uncached(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        """Read again after a checksum mismatch, bypassing every cached copy. Otherwise as
        `read_into`."""
        self._store.read_into(name, start, buffer)

    def read_nowait(self, name: str, start: int, buffer: memoryview) -> bool:
        """Fill the buffer as `read_into` if that needs no waiting, not even for a disk; otherwise
        return False at once.

        After False the buffer's content is undefined. An error gives False, too: `read_into` then
        raises it.
        """
        return False

    def pin(self, name: str, on_revoke: Callable[[], None]) -> CheckedObject | None:
        """A whole object that a process of this machine caches; None if there is no such object.

        If it `is_shared`, its memory belongs to that process. When the owner wants the memory back,
        the store calls `on_revoke`, in any thread; the caller must drop the view soon.
        """
        return None

    def can_pin_nowait(self, name: str) -> bool:
        return False


class Housekeeping:
    """Calls for listing, repairing and purging. This class suits a store without leftovers and
    foreign files; other stores offer a subclass."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def names(self, prefix: str, after: str = "") -> Iterator[str]:
        """As `ObjectStore.list`, but cheaper for a store that needs a request for each size."""
        return (info.name for info in self._store.list(prefix, after))

    def leftovers(self, prefix: str = "") -> Iterator[Leftover]:
        """Also the temporary files of puts that are under way."""
        check_prefix(prefix)
        return iter(())

    def discard(self, leftover: Leftover) -> None:
        """Remove a leftover; idempotent. The caller must know that the writer is dead."""
        raise UsageError(f"{leftover.name!r} is not the name of a leftover")

    def foreign(self, prefix: str = "") -> Iterator[str]:
        """Files and folders that DIESEL-FS did not write. `verify` reports them, and nothing
        changes them. A folder's name ends with a slash, and nothing inside it is listed."""
        check_prefix(prefix)
        return iter(())

    def close_idle(self) -> None:
        """Close everything that no call is using; the next call opens it again. Repeatable."""


class StoreWrapper(ObjectStore):
    """Forwards everything to another store. A wrapper that changes reads derives from `ReadWrapper`
    or overrides `fast_reads`; otherwise reads through `fast_reads` bypass it."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner

    @property
    def store_id(self) -> uuid.UUID:  # type: ignore[override]  # a remote store fetches it late
        return self.inner.store_id

    @property
    def fork_safe(self) -> bool:
        return self.inner.fork_safe

    @property
    def fast_reads(self) -> FastReads:
        return self.inner.fast_reads

    @property
    def housekeeping(self) -> Housekeeping:
        return self.inner.housekeeping

    def put(self, name: str, parts: Sequence[Bytes]) -> None:
        self.inner.put(name, parts)

    def replace(self, name: str, parts: Sequence[Bytes]) -> None:
        self.inner.replace(name, parts)

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytearray:
        return self.inner.get(name, start, length)

    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        self.inner.read_into(name, start, buffer)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        return self.inner.list(prefix, after)

    def stat(self, name: str) -> ObjectInfo:
        return self.inner.stat(name)

    def delete(self, name: str) -> None:
        self.inner.delete(name)


class ReadWrapper(StoreWrapper):
    """`fast_reads` calls the wrapper's own `read_into`."""

    @property
    def fast_reads(self) -> FastReads:
        return FastReads(self)
