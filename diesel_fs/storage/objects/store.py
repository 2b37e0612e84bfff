"""The interface of an object store, and the wrapper classes that all wrappers are made from.

An object store keeps named, immutable byte strings: chunks, snapshots, leases. `ObjectStore` is the
contract that every store keeps (a folder, a bucket, a server). The names are those of
`format/object_names.py`; a store does not know what is inside an object, and the repository
decides when one may be deleted. The object `DIESEL-STORE`, called the marker, tells a store from an
empty folder; this module writes and reads its content.

Concurrency: every method may be called from many threads and processes at once; all methods are
synchronous and block. A forked child may use the store of its parent if `fork_safe` says so.
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
    """Raise UsageError if `name` is not the name of an object."""
    if not OBJECT_NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not the name of an object")


def check_mutable(name: str) -> None:
    """Raise UsageError if `name` is not the name of an object that may be replaced."""
    if not MUTABLE_NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not the name of an object that may be replaced")


def check_deletable(name: str) -> None:
    """Raise UsageError if `name` is not the name of an object, or is the marker."""
    check_name(name)
    if name == STORE_MARKER:
        raise UsageError(f"{STORE_MARKER} is not deleted: it tells a store from an empty folder")


def check_range(name: str, start: int, length: int | None) -> None:
    """Raise UsageError for a bad name, or for a negative start or length."""
    check_name(name)
    if start < 0 or (length is not None and length < 0):
        raise UsageError(f"{name}: bad range: start {start}, length {length}")


def check_prefix(prefix: str) -> None:
    """Raise UsageError if `prefix` lies in a folder that no object can be in."""
    folder = prefix.rpartition("/")[0]
    if "/" in prefix and not FOLDER_NAME.fullmatch(folder):
        raise UsageError(f"{folder!r} is not a folder of objects")


def check_end(name: str, end: int, size: int) -> None:
    """Raise TruncatedError if an object of `size` bytes ends before the byte `end`."""
    if end > size:
        raise TruncatedError(f"{name}: ends at byte {size}, wanted up to {end}", offset=size)


def encode_marker(store: uuid.UUID) -> bytes:
    """The content of the marker object: JSON, so that a person who opens it can read it."""
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
    """Memory to read into. (A bytearray would be filled with zeros first, while all threads wait.)
    Raises NoSpaceError."""
    try:
        return np.empty(size, np.uint8).data
    except MemoryError:
        raise NoSpaceError(f"there is no memory for {size:,} bytes of a chunk") from None


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object's name, its size in bytes, and when it was written (ns since 1970)."""

    name: str
    bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class Leftover:
    """A temporary file of a put that is under way, or of a writer that died."""

    name: str
    bytes: int
    modified_ns: int
    host: str
    pid: int


Part = tuple[str, int, int]
"""A part of an object: the object's name, where the part starts, and its length in bytes."""

AnyPart = TypeVar("AnyPart", Part, tuple[int, int, int])


def batched_parts(
    parts: Sequence[AnyPart], count_max: int, bytes_max: int
) -> Iterator[Sequence[AnyPart]]:
    """Split parts, in their order, into batches of at most `count_max` parts and `bytes_max`
    bytes. A part larger than `bytes_max` is a batch of its own. The last of a part's three values
    is its size in bytes."""
    begin = total = 0
    for end, (_, _, size) in enumerate(parts):
        if end > begin and (end - begin == count_max or total + size > bytes_max):
            yield parts[begin:end]
            begin, total = end, 0
        total += size
    if parts:
        yield parts[begin:]


ChunkParts = npt.NDArray[np.uint32]
"""Parts of chunks, of the shape (n, 3): the chunk's number, where in it the part starts, bytes."""


class ReadGroup(NamedTuple):
    """The contents of some parts that arrived together."""

    places: Sequence[int]
    """Of each content, the position of its part among those that were asked for."""

    contents: Sequence[memoryview]

    is_checked: bool
    """Whether the contents have been checked against a checksum."""


IN_MEMORY, IN_STORE = -2, -1
"""Places of chunks (`ChunkReader.places`) that are no node."""


class ChunkReader(Protocol):
    """Reads parts of the chunks of one version of a dataset by their numbers, many in one request.
    Thread-safe."""

    def begin(self, parts: ChunkParts) -> Iterator[ReadGroup]:
        """Read parts. They lie in their chunks, and each has at least one byte.

        All that can be asked for at once has been asked for when this returns; the iterator gives
        each part once, as it arrives, and may be dropped. It raises as `ObjectStore.read_into`.
        """

    def places(self, chunks: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """From where each of these chunks would be read now, as far as is known: `IN_MEMORY` where
        that is this process's memory, `IN_STORE` for the object store, else the number of a
        node."""

    def read_part(self, chunk: int, start: int, size: int) -> tuple[Bytes, bool]:
        """One part, and whether it has been checked. Raises as `ObjectStore.read_into`."""


class ObjectStore(ABC):
    """Named, immutable byte strings. Only leases may change (`replace`).

    Every method may raise UsageError for a name outside the grammar, PermissionDenied,
    NoSpaceError, and ObjectStoreError for anything else that the store did not do. ObjectMissing
    means that the store is there and the object is not; a store that has gone is an
    ObjectStoreError.
    """

    store_id: uuid.UUID

    # The flags are properties, so that a wrapper can pass them on; a store overrides one by a
    # class attribute.

    @property
    def fork_safe(self) -> bool:
        """Whether a forked child may use the store. If not, the child must become a program that
        opens the store itself."""
        return True

    @property
    def batches_reads(self) -> bool:
        """Whether many parts cost little more than one, so that a caller should ask for them
        together (`read_parts`)."""
        return False

    @property
    def can_pin(self) -> bool:
        """Whether `pin` ever returns anything."""
        return False

    @abstractmethod
    def put(self, name: str, parts: Sequence[Bytes]) -> None:
        """Create an object from `parts`, one after the other (they are not joined in memory).

        Atomic: at every moment, and after any crash, the name has no object or the whole one. If
        several callers put one name at once, exactly one succeeds. Durable on return. Never
        overwrites: raises ObjectExists, and the existing object is untouched. After any other
        error it is unknown whether the object exists (it is whole if it does), and the caller takes
        a new name.
        """

    @abstractmethod
    def replace(self, name: str, parts: Sequence[Bytes]) -> None:
        """Create or overwrite a mutable object. Atomic (a reader sees the old or the new object,
        whole), durable on return, idempotent. If several callers replace one at once, the last
        wins."""

    @abstractmethod
    def get(self, name: str, start: int = 0, length: int | None = None) -> bytearray:
        """Exactly `length` bytes from `start` on (None: to the end).

        Raises ObjectMissing, and TruncatedError if the object ends earlier; the store finds that
        out before it takes memory.
        """

    @abstractmethod
    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        """Fill `buffer` from `start` on: `get` without a copy, into the caller's memory.
        After an error the buffer's content is undefined."""

    def read(self, name: str, start: int, size: int) -> Bytes:
        """As `read_into`, into memory of its own. Raises NoSpaceError where there is none."""
        room = new_buffer(size)
        self.read_into(name, start, room)
        return room

    def read_ranges(
        self, name: str, ranges: Sequence[tuple[int, int]], room: memoryview
    ) -> Iterator[memoryview]:
        """The bytes of several ranges (start, size) of one object, one after the other.

        All of them are read into the same buffer, `room`, which must be as large as the largest;
        so a range's bytes are valid until the next range is asked for. Raises as `read_into`.
        """
        for start, size in ranges:
            self.read_into(name, start, room[:size])
            yield room[:size].toreadonly()

    def read_parts(self, parts: Sequence[Part]) -> Iterator[memoryview]:
        """The bytes of parts of objects of one dataset, in their order, each in memory of its own.
        A store that can has begun to fetch them when this returns. Raises as `read_into`, at once
        or when the bytes are asked for."""
        for name, start, size in parts:
            yield memoryview(self.read(name, start, size)).toreadonly()

    def chunk_reader(self, identity: uuid.UUID, version: int) -> ChunkReader | None:
        """A reader of the chunks of this version of a dataset, where this store has a faster way
        to them than by their objects' names."""
        return None

    def read_uncached(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        """Read again after a checksum mismatch, bypassing every cached copy. As `read_into`."""
        self.read_into(name, start, buffer)

    def close_idle(self) -> None:  # noqa: B027  # most stores hold nothing between calls
        """Close what no call is using; the next call opens it again. May be called repeatedly."""

    def read_nowait(self, name: str, start: int, buffer: memoryview) -> bool:
        """`read_into` if that needs no waiting, not even for a disk; otherwise False, at once.

        After False the buffer's content is undefined. An error is a False, too: the caller then
        calls `read_into`, which raises it.
        """
        return False

    def pin(self, name: str, on_revoke: Callable[[], None]) -> memoryview | None:
        """A whole object in memory that is shared with other processes; None if it is in no such
        memory.

        The memory cannot be written, and its owner has checked the object whole against its
        checksums. The store calls `on_revoke`, in any thread, when the owner wants it back; the
        caller then drops the view soon.
        """
        return None

    def can_pin_nowait(self, name: str) -> bool:
        """Whether `pin` would return the object at once. The answer itself needs no waiting."""
        return False

    @abstractmethod
    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """The objects whose names begin with `prefix` and are greater than `after`, in byte order.

        Lazy. An object that exists during the whole listing is listed once; one that appears or
        disappears meanwhile may be listed or not. Temporaries and foreign files are left out. If a
        part of the store cannot be read, the listing raises; it never skips that part.
        """

    def names(self, prefix: str, after: str = "") -> Iterator[str]:
        """As `list`, names only: cheaper in a store where each size costs a request."""
        return (info.name for info in self.list(prefix, after))

    @abstractmethod
    def stat(self, name: str) -> ObjectInfo:
        """Size and time of one object. Raises ObjectMissing."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Make sure that the object is absent. Idempotent, durable on return. Raises UsageError
        for the marker."""

    def leftovers(self, prefix: str = "") -> Iterator[Leftover]:
        """Temporary files of unfinished puts, including those under way. Most stores have none."""
        check_prefix(prefix)
        return iter(())

    def discard(self, leftover: Leftover) -> None:
        """Remove a leftover. Idempotent. The caller knows that its writer is dead."""
        raise UsageError(f"{leftover.name!r} is not the name of a leftover")

    @abstractmethod
    def foreign(self, prefix: str = "") -> Iterator[str]:
        """Names of foreign files and folders: those among the objects that DIESEL-FS did not write.
        `verify` reports them, and nothing touches them. A folder's name ends with a slash, and
        nothing inside it is listed."""


class StoreWrapper(ObjectStore):
    """A store that forwards every method and flag to another store.

    A subclass overrides what it changes. One that changes reads must override `read_ranges`,
    `read_parts` and `read_uncached` too, or be a `ReadWrapper`: otherwise these bypass it.
    """

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner

    @property
    def store_id(self) -> uuid.UUID:  # type: ignore[override]  # a server is asked when it is needed
        """The UUID of the other store."""
        return self.inner.store_id

    @property
    def fork_safe(self) -> bool:
        return self.inner.fork_safe

    @property
    def batches_reads(self) -> bool:
        return self.inner.batches_reads

    @property
    def can_pin(self) -> bool:
        return self.inner.can_pin

    def put(self, name: str, parts: Sequence[Bytes]) -> None:
        self.inner.put(name, parts)

    def replace(self, name: str, parts: Sequence[Bytes]) -> None:
        self.inner.replace(name, parts)

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytearray:
        return self.inner.get(name, start, length)

    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        self.inner.read_into(name, start, buffer)

    def read(self, name: str, start: int, size: int) -> Bytes:
        return self.inner.read(name, start, size)

    def read_ranges(
        self, name: str, ranges: Sequence[tuple[int, int]], room: memoryview
    ) -> Iterator[memoryview]:
        return self.inner.read_ranges(name, ranges, room)

    def read_parts(self, parts: Sequence[Part]) -> Iterator[memoryview]:
        return self.inner.read_parts(parts)

    def chunk_reader(self, identity: uuid.UUID, version: int) -> ChunkReader | None:
        return self.inner.chunk_reader(identity, version)

    def read_uncached(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        self.inner.read_uncached(name, start, buffer)

    def close_idle(self) -> None:
        self.inner.close_idle()

    def read_nowait(self, name: str, start: int, buffer: memoryview) -> bool:
        return self.inner.read_nowait(name, start, buffer)

    def pin(self, name: str, on_revoke: Callable[[], None]) -> memoryview | None:
        return self.inner.pin(name, on_revoke)

    def can_pin_nowait(self, name: str) -> bool:
        return self.inner.can_pin_nowait(name)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        return self.inner.list(prefix, after)

    def names(self, prefix: str, after: str = "") -> Iterator[str]:
        return self.inner.names(prefix, after)

    def stat(self, name: str) -> ObjectInfo:
        return self.inner.stat(name)

    def delete(self, name: str) -> None:
        self.inner.delete(name)

    def leftovers(self, prefix: str = "") -> Iterator[Leftover]:
        return self.inner.leftovers(prefix)

    def discard(self, leftover: Leftover) -> None:
        self.inner.discard(leftover)

    def foreign(self, prefix: str = "") -> Iterator[str]:
        return self.inner.foreign(prefix)


class ReadWrapper(StoreWrapper):
    """A wrapper that changes reads: those into new memory, of ranges, of parts and past caches go,
    one by one, through the subclass's own `read_into`."""

    batches_reads = False

    read = ObjectStore.read
    read_ranges = ObjectStore.read_ranges
    read_parts = ObjectStore.read_parts
    chunk_reader = ObjectStore.chunk_reader
    read_uncached = ObjectStore.read_uncached
