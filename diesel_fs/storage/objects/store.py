"""Object stores: the interface, and the marker of a store.

Owns: the contract words (in `ObjectStore`), what the marker holds, and `StoreWrapper`, from which
retry, latency, counting and faults are made. Does not own: the names (`layout.py`), what is inside
an object, and when one may be deleted (the repository decides that).

Concurrency: every method of a store may be called from many threads and processes at once; all
are synchronous and block. Unless it says so (`fork_safe`), a store may be used in a forked child.
"""

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from diesel_fs.errors import CorruptError, ForeignError, NewerVersionError, UsageError
from diesel_fs.format.entries import Bytes
from diesel_fs.format.object_names import (
    FOLDER_NAME,
    IDENTITY_TEXT,
    MUTABLE_NAME,
    OBJECT_NAME,
    STORE_MARKER,
)

MARKER_BYTES_MAX = 4096
STORE_FORMAT = 1


def check_name(name: str) -> None:
    """Raise UsageError where `name` is not the name of an object of ours."""
    if not OBJECT_NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not the name of an object")


def check_mutable(name: str) -> None:
    """Raise UsageError where `name` is not that of an object that may be replaced."""
    if not MUTABLE_NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not the name of an object that may be replaced")


def check_deletable(name: str) -> None:
    """Raise UsageError where `name` is none of ours, or the marker, which stays."""
    check_name(name)
    if name == STORE_MARKER:
        raise UsageError(f"{STORE_MARKER} is not deleted: it tells a store from an empty folder")


def check_range(name: str, start: int, length: int | None) -> None:
    """Raise UsageError for a bad name or a negative number."""
    check_name(name)
    if start < 0 or (length is not None and length < 0):
        raise UsageError(f"{name}: no range has start {start} and length {length}")


def check_prefix(prefix: str) -> None:
    """Raise UsageError where `prefix` lies in a folder that no object of ours can be in."""
    folder = prefix.rpartition("/")[0]
    if "/" in prefix and not FOLDER_NAME.fullmatch(folder):
        raise UsageError(f"{folder!r} is not a folder of objects")


def encode_marker(store: uuid.UUID) -> bytes:
    """The content of the marker object: JSON, for whoever wonders what this folder is."""
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


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object's name, its size in bytes, and when it was written (ns since 1970)."""

    name: str
    bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class Leftover:
    """A temporary that was not finished: of a put under way, or of a writer that died."""

    name: str
    bytes: int
    modified_ns: int
    host: str
    pid: int


Part = tuple[str, int, int]
"""Of an object: its name, where the part starts, and its bytes."""


def batched_parts(
    parts: Sequence[Part], count_max: int, bytes_max: int
) -> Iterator[Sequence[Part]]:
    """Parts in their order, as many at once as one request may have; a larger one is alone."""
    begin = total = 0
    for end, (_, _, size) in enumerate(parts):
        if end > begin and (end - begin == count_max or total + size > bytes_max):
            yield parts[begin:end]
            begin, total = end, 0
        total += size
    if parts:
        yield parts[begin:]


class ObjectStore(ABC):
    """Named, immutable byte strings. (Only leases may change: `replace`.)

    Errors, of all methods: UsageError for a name outside the grammar; PermissionDenied by
    the operating system, NoSpaceError; ObjectStoreError for whatever else the store did not do.
    ObjectMissing says that the store is there and the object is not; a store that is gone is an
    ObjectStoreError.
    """

    store_id: uuid.UUID

    fork_safe: bool = True
    """Whether a forked child may use it. Else the child must become a program that opens it."""

    batches_reads: bool = False
    """Whether many parts cost little more than one: then they should be asked for together."""

    can_pin: bool = False
    """Whether `pin` ever gives anything."""

    @abstractmethod
    def put(self, name: str, parts: Sequence[Bytes]) -> None:
        """Create an object from `parts`, one after the other (they are not joined).

        Atomic: under its name it is absent or whole, at every moment and after any crash, and of
        several that put one name at once exactly one succeeds. Durable on return. Never
        overwrites: ObjectExists, and the object there is untouched. After any other error it is
        unknown whether the object is there (whole), and the caller takes a new name.
        """

    @abstractmethod
    def replace(self, name: str, parts: Sequence[Bytes]) -> None:
        """Create or overwrite a mutable object. Atomic (old or new, whole), durable on return,
        idempotent; of several at once the last wins."""

    @abstractmethod
    def get(self, name: str, start: int = 0, length: int | None = None) -> bytearray:
        """Exactly `length` bytes from `start` on (None: to the end).

        Raises ObjectMissing, and TruncatedError where the object ends before; that is found out
        before memory is taken.
        """

    @abstractmethod
    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        """Fill `buffer` from `start` on: `get` without a copy and with the caller's memory.
        After an error the buffer's content is undefined."""

    def read_ranges(
        self, name: str, ranges: Sequence[tuple[int, int]], room: memoryview
    ) -> Iterator[memoryview]:
        """Bytes of several ranges (start, size), one after the other in `room`, which holds each:

        a range is good until the next is asked for. Raises as `read_into`.
        """
        for start, size in ranges:
            self.read_into(name, start, room[:size])
            yield room[:size].toreadonly()

    def read_parts(self, parts: Sequence[Part]) -> Iterator[memoryview]:
        """The bytes of parts of objects of one dataset, in their order, in memory of their own.
        Where the store can, they are under way when this comes back. Raises as `read_into`, at
        once or when the bytes are asked for."""
        for name, start, size in parts:
            room = memoryview(bytearray(size))
            self.read_into(name, start, room)
            yield room.toreadonly()

    def read_uncached(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        """`read_into` for who got damaged bytes from it: from no copy, where it may read one."""
        self.read_into(name, start, buffer)

    def close_idle(self) -> None:  # noqa: B027  # most hold nothing
        """Let go of what no call is using; the next call takes it again. Repeatable."""

    def read_nowait(self, name: str, start: int, buffer: memoryview) -> bool:
        """`read_into` where nothing has to be waited for, not even a disk; else False, at once.

        After False the buffer's content is undefined. An error is no more than a False here: who
        comes back with `read_into` is told.
        """
        return False

    def pin(self, name: str, on_revoke: Callable[[], None]) -> memoryview | None:
        """All of an object in memory that is shared with others; None where there is no such.

        It can be written to, and then is a copy of the caller's. `on_revoke` is called, in any
        thread, when whose memory it is would like to have it back: who holds it, lets go of it
        soon.
        """
        return None

    def can_pin_nowait(self, name: str) -> bool:
        """Whether `pin` would give it at once: nothing has to be waited for to answer."""
        return False

    @abstractmethod
    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """The objects whose names begin with `prefix` and are greater than `after`, in byte order.

        Lazy. What is there during the whole listing is listed once; what comes or goes
        meanwhile may be. Temporaries and foreign things are left out. A part of the store that
        cannot be read raises; it is never passed over.
        """

    def names(self, prefix: str, after: str = "") -> Iterator[str]:
        """As `list`, names only: cheaper where a size costs a request of its own."""
        return (info.name for info in self.list(prefix, after))

    @abstractmethod
    def stat(self, name: str) -> ObjectInfo:
        """Size and time of one object. Raises ObjectMissing."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Make sure that the object is absent. Idempotent, durable on return. The marker is
        refused (UsageError)."""

    @abstractmethod
    def leftovers(self, prefix: str = "") -> Iterator[Leftover]:
        """Temporaries of unfinished puts, those under way included."""

    @abstractmethod
    def discard(self, leftover: Leftover) -> None:
        """Remove a leftover. Idempotent. The caller knows that its writer is dead."""

    @abstractmethod
    def foreign(self, prefix: str = "") -> Iterator[str]:
        """Names of what lies among the objects and is not ours; a folder's ends with a slash and
        nothing in it is named. For one summary line; it is never touched."""


class StoreWrapper(ObjectStore):
    """A store that passes everything on; subclasses change what they are about."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self.store_id = inner.store_id
        self.fork_safe = inner.fork_safe

    def put(self, name: str, parts: Sequence[Bytes]) -> None:
        self.inner.put(name, parts)

    def replace(self, name: str, parts: Sequence[Bytes]) -> None:
        self.inner.replace(name, parts)

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytearray:
        return self.inner.get(name, start, length)

    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        self.inner.read_into(name, start, buffer)

    def close_idle(self) -> None:
        self.inner.close_idle()

    def read_nowait(self, name: str, start: int, buffer: memoryview) -> bool:
        return self.inner.read_nowait(name, start, buffer)

    def pin(self, name: str, on_revoke: Callable[[], None]) -> memoryview | None:
        return self.inner.pin(name, on_revoke)

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
