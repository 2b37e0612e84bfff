"""Packs entries into chunks; full chunks are stored while the next one is filled.

A file that is longer than a chunk is cut into extents, one in each of its chunks. A file that
changes during the reading is read again, and after some tries left out: it is packed only in the
state of one moment.

A `Packer` belongs to one thread. It seals and stores full chunks in a thread of its own, so at most
`_BUILDERS` chunks (only one, if chunks are large) are in memory, however slow the store is.
"""

import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol
from uuid import UUID

from ..errors import DieselError
from ..format.chunk import ENTRIES_MAX, EXTENT_ALIGNMENT, ExtentInfo
from ..format.chunk_builder import ChunkBuilder
from ..format.chunk_id import stamp
from ..format.entries import ChunkId, Stamp
from ..repository.validation import ValidatedChunk
from ..repository.writing import WriteSession, seal_and_store
from ..storage.objects.store import ObjectStore
from .sources.walk import FILE_FLAGS, failure_reason, open_file

NewId = Callable[[ChunkId | None], ChunkId]
"""The next chunk ID follows the newest committed one. For a chunk that continues a file, the
argument is the ID of the file's first chunk, and the new ID has the same writer part (FORMAT.md,
section 3)."""

Stored = Callable[[bytes, bytes, int], None]
"""Called for each durable chunk, in order of sealing: with its preamble, its stored header, and the
number of entries that end in it (a file of several extents ends in its last chunk)."""

FILE_BYTES_MAX = 16 << 40
"""The limit of ext4. A sparse file can claim more, and would take years to read."""

MTIMES_NS = range(-(1 << 63), 1 << 63)
"""A chunk holds signed 64-bit nanoseconds."""

READ_TRIES = 3
_BUILDERS = 4  # one is being filled, one is being stored, two wait for the store
_BUILDERS_CHUNK_BYTES_MAX = 64 << 20  # larger chunks are stored before the next is begun
_SPECIAL_MODE_BITS = 0o7000  # of modes: set-user-ID, set-group-ID and sticky bits
_RETRY_PAUSE_S = 0.02  # between two tries to read a file that is being written

SplitPath = tuple[bytes, bytes]


class Readable(Protocol):
    def read(self, size: int, /) -> bytes | memoryview:
        """Returns at most `size` bytes; none at the end."""
        ...


class FileSkipped(Exception):
    """The file could not be read in one unchanged state."""


class Packer:
    """Fills chunks with entries and stores them. After `finish`, all are durable.

    After a chunk could not be stored, every method except `close` raises the error, since entries
    are lost. Continue with a new packer. `stripped` and `hard_links` count as those of `PutReport`.
    """

    def __init__(
        self,
        identity: UUID,
        chunk_bytes: int,
        compress: str,
        objects: ObjectStore,
        new_id: NewId,
        stored: Stored,
    ) -> None:
        self._identity = identity
        self._extent_bytes = chunk_bytes // EXTENT_ALIGNMENT * EXTENT_ALIGNMENT
        self._objects = objects
        self._new_id = new_id
        self._stored = stored
        builders = _BUILDERS if chunk_bytes <= _BUILDERS_CHUNK_BYTES_MAX else 1
        self._free = [ChunkBuilder(identity, chunk_bytes, compress) for _ in range(builders)]
        self._builder = self._free.pop()
        self._thread = ThreadPoolExecutor(1, "store")
        self._submitted: list[tuple[Future[ChunkId], ChunkBuilder]] = []
        self._failure: DieselError | None = None
        self.stripped = self.hard_links = 0

    @property
    def extent_bytes(self) -> int:
        """A longer file is cut into several extents."""
        return self._extent_bytes

    def __len__(self) -> int:
        return len(self._builder)

    def add_file(self, folder: int, name: bytes, path: SplitPath) -> None:
        """Add the file `name` in `folder`, a descriptor; `path` is its path in the dataset. Raises
        OSError, or FileSkipped if the file is not regular or keeps changing; then no part of it is
        in any version of the dataset."""
        if self._failure is not None:  # as `_check`, without a call for each file
            raise self._failure
        for attempt in range(READ_TRIES):
            if attempt:
                time.sleep(_RETRY_PAUSE_S)
            file = open_file(folder, name)
            try:
                before = os.fstat(file)
                if not stat.S_ISREG(before.st_mode):
                    raise FileSkipped("skipped: a pipe, socket, device or folder")
                check_storable(before.st_mtime_ns, before.st_size)
                has_one_extent = before.st_size <= self._extent_bytes
                read = self._read if has_one_extent else self._read_in_extents
                if read(file, path, before):
                    return
            finally:
                os.close(file)
        raise FileSkipped(f"it changed while it was being read, {READ_TRIES} times")

    def add_files(
        self, folder: int, path: bytes, names: Sequence[bytes], failed: Callable[[bytes, str], None]
    ) -> None:
        """`path` is the folder's path in the dataset. Calls `failed` with the name of a file that
        cannot be added, and the reason."""
        at = 0
        while at < len(names):
            self._check()
            at += self._read_ahead(folder, path, names[at : at + ENTRIES_MAX - len(self._builder)])
            self._submit_if_full()
            if at < len(names):  # the chunk was full, or this file needs a closer look
                try:
                    self.add_file(folder, names[at], (path, names[at]))
                except OSError as error:
                    failed(names[at], failure_reason(error))
                except FileSkipped as reason:
                    failed(names[at], str(reason))
                at += 1

    def _read_ahead(self, folder: int, path: bytes, names: Sequence[bytes]) -> int:
        """Read files until the chunk is full or something is unusual. Returns the number of added
        files. Nearly every file of a put is read in this loop, so it makes no avoidable call, and
        keeps no object for each file."""
        builder = self._builder
        room = builder.room(builder.room_bytes)
        end_max = min(self._extent_bytes, len(room) - 1)
        left, end = builder.left_bytes, 0  # of contents and paths; of contents in `room`
        modes: list[int] = []
        mtimes_ns: list[int] = []
        sizes: list[int] = []
        hard_links = 0
        open_, fstat, readv, close = os.open, os.fstat, os.readv, os.close
        with suppress(OSError):
            for name in names:
                file = open_(name, FILE_FLAGS, dir_fd=folder)
                try:
                    before = fstat(file)
                    size, mtime_ns, mode = before.st_size, before.st_mtime_ns, before.st_mode
                    if end + size > end_max or not stat.S_ISREG(mode):
                        break
                    if mtime_ns not in MTIMES_NS:
                        break
                    # One byte more, to notice a file that grows
                    count = readv(file, (room[end : end + size + 1],))
                    after = fstat(file)
                finally:
                    close(file)
                if (
                    count != size
                    or after.st_size != size
                    or after.st_mtime_ns != mtime_ns
                    or after.st_ctime_ns != before.st_ctime_ns
                ):
                    break
                modes.append(mode)
                mtimes_ns.append(mtime_ns)
                sizes.append(size)
                hard_links += before.st_nlink > 1
                end += size
                left -= size + len(name) + 1
                if left <= 0:
                    break
        if sizes:
            builder.add_files(path, names[: len(sizes)], modes, mtimes_ns, sizes)
            self.stripped += sum(1 for mode in modes if mode & _SPECIAL_MODE_BITS)
            self.hard_links += hard_links
        return len(sizes)

    def add_link(self, folder: int, name: bytes, path: SplitPath) -> None:
        """As `add_file`, for a link."""
        self._check()
        target = os.readlink(name, dir_fd=folder)
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        check_storable(found.st_mtime_ns)
        self._builder.add_link(path, found.st_mtime_ns, target)
        self._submit_if_full()

    def add_folder(self, path: SplitPath, mode: int, mtime_ns: int) -> None:
        """Raises FileSkipped."""
        self._check()
        check_storable(mtime_ns)
        self.stripped += mode & _SPECIAL_MODE_BITS != 0
        self._builder.add_folder(path, mode, mtime_ns)
        self._submit_if_full()

    def add_known_link(self, path: SplitPath, mtime_ns: int, target: bytes) -> None:
        """Add a link whose target the caller has already. Raises FileSkipped."""
        self._check()
        check_storable(mtime_ns)
        self._builder.add_link(path, mtime_ns, target)
        self._submit_if_full()

    def add_stream(
        self, file: Readable, size: int, path: SplitPath, mode: int, mtime_ns: int
    ) -> None:
        """Add the next `size` bytes of `file`. Raises FileSkipped, also if `file` ends before."""
        self._check()
        check_storable(mtime_ns, size)
        self.stripped += mode & _SPECIAL_MODE_BITS != 0
        first: Stamp | None = None
        for part in _split_extents(size, self._extent_bytes):
            length = size if part is None else part.size
            room = self._builder.room(length)
            filled = 0
            while filled < length:
                data = file.read(min(length - filled, 1 << 20))
                if not data:
                    raise FileSkipped(f"it ends after {(part.start if part else 0) + filled} bytes")
                room[filled : filled + len(data)] = data
                filled += len(data)
            first = self._add(path, mode, mtime_ns, size, part, first)

    def add_contents(
        self,
        path: bytes,
        names: Sequence[bytes],
        modes: Sequence[int],
        mtimes_ns: Sequence[int],
        contents: Sequence[memoryview],
    ) -> None:
        """As `add_files`, with contents in memory. None may be longer than `extent_bytes`."""
        at = 0
        while at < len(names):
            self._check()
            builder, first = self._builder, at
            at_max = min(len(names), at + ENTRIES_MAX - len(builder))
            room = builder.room(max(builder.room_bytes, len(contents[at])))
            left, end = builder.left_bytes, 0
            while (
                at < at_max and end + len(contents[at]) <= len(room) and (left > 0 or at == first)
            ):
                size = len(contents[at])
                room[end : end + size] = contents[at]
                end += size
                left -= size + len(names[at]) + 1
                at += 1
            taken = slice(first, at)
            sizes = [*map(len, contents[taken])]
            builder.add_files(path, names[taken], modes[taken], mtimes_ns[taken], sizes)
            self.stripped += sum(1 for mode in modes[taken] if mode & _SPECIAL_MODE_BITS)
            self._submit_if_full()

    def finish(self) -> None:
        """All is durable then. The packer can be used again."""
        self._check()
        if len(self._builder):
            self._submit()
        while self._submitted:
            self._await_oldest()
        self._check()

    def close(self) -> None:
        """Entries of chunks that are not being stored yet are lost, so call `finish` first to keep
        them."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _read(self, file: int, path: SplitPath, before: os.stat_result) -> bool:
        """Returns False if the file changed meanwhile."""
        size, builder = before.st_size, self._builder
        room = builder.room(size + 1)
        count = os.readv(file, (room,))
        if count != size:
            while 0 < count < size:  # a signal, or a file system that reads less at once
                more = os.readv(file, [room[count:]])
                if not more:
                    break
                count += more
            if count and not size:
                raise FileSkipped("its size is 0, but it has bytes")
        if count != size or not _is_same(before, os.fstat(file)):
            return False
        builder.add_file(path, before.st_mode, before.st_mtime_ns, size)
        self._count(before)
        if builder.full:
            self._submit()
        return True

    def _read_in_extents(self, file: int, path: SplitPath, before: os.stat_result) -> bool:
        """As `_read`, for a longer file. The last extent is added only if the file did not change:
        without this extent, no reader ever shows the file."""
        first: Stamp | None = None
        for part in _split_extents(before.st_size, self._extent_bytes):
            assert part is not None
            room, filled = self._builder.room(part.size), 0
            while filled < part.size:
                count = os.readv(file, [room[filled:]])
                if not count:
                    return False
                filled += count
            if part.number == part.total - 1 and not _is_same(before, os.fstat(file)):
                return False
            first = self._add(path, before.st_mode, before.st_mtime_ns, before.st_size, part, first)
        self._count(before)
        return True

    def _count(self, file: os.stat_result) -> None:
        self.stripped += file.st_mode & _SPECIAL_MODE_BITS != 0
        self.hard_links += file.st_nlink > 1

    def _add(
        self,
        path: SplitPath,
        mode: int,
        mtime_ns: int,
        size: int,
        part: ExtentInfo | None,
        first: Stamp | None,
    ) -> Stamp | None:
        """Add the file or extent (`part`) that the caller has read into the builder's room.

        Each extent except the last ends its chunk, so no chunk has two extents of one file. All
        extents get the stamp of the first one (`first`; None: this is the first), which is known
        when the first chunk has its ID. Returns the stamp; None for a file of one extent.
        """
        self._builder.add_file(path, mode, mtime_ns, size, part)
        if part is None:
            self._submit_if_full()
            return None
        if first is not None:
            self._builder.set_stamp(first)
        if part.number == part.total - 1:
            self._submit_if_full()
            return first
        place = len(self._builder) - 1
        future = self._submit(goes_on=True)
        return first or stamp(future.result(), place)

    def _submit_if_full(self) -> None:
        if self._builder.full:
            self._submit()

    def _submit(self, *, goes_on: bool = False) -> Future[ChunkId]:
        """Give the filled chunk to the storing thread, and take a free builder for the next.
        `goes_on`: the chunk's last file continues in the next chunk."""
        builder = self._builder
        try:
            future = self._thread.submit(self._store, builder, len(builder) - goes_on)
            self._submitted.append((future, builder))
            if not self._free:
                self._await_oldest()
            self._builder = self._free.pop()
        except BaseException as error:  # Ctrl-C, too: the current builder is being stored
            self._fail(error)
            raise
        return future

    def _await_oldest(self) -> None:
        """Only after this wait may the builder of the chunk be filled again."""
        future, builder = self._submitted[0]
        future.result()
        del self._submitted[0]
        builder.clear()
        self._free.append(builder)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: BaseException) -> DieselError:
        """Refuse all further entries, since a chunk is lost. Returns a DieselError, so that it is
        not taken for an error of the file that was being read."""
        if self._failure is None:
            self._failure = (
                error
                if isinstance(error, DieselError)
                else DieselError(f"a chunk could not be stored: {error!r}", advice="put again")
            )
        return self._failure

    def _store(self, builder: ChunkBuilder, entries: int) -> ChunkId:
        """Runs in the storing thread, unless an earlier chunk failed."""
        self._check()
        try:
            chunk, parts, _ = seal_and_store(
                builder, self._objects, self._identity, lambda: self._new_id(builder.first_chunk_id)
            )
            self._stored(bytes(parts[0]), bytes(parts[1]), entries)
        except BaseException as error:
            failure = self._fail(error)
            if failure is error:
                raise
            raise failure from error
        return chunk


def start_packer(
    session: WriteSession,
    chunk_bytes: int,
    compress: str,
    committed: Callable[[ValidatedChunk, int], None] | None = None,
) -> Packer:
    """Commits each durable chunk to the session, then calls `committed` with the chunk and the
    number of entries that end in it."""

    def commit(preamble: bytes, header: bytes, entries: int) -> None:
        chunk = session.commit(preamble, header)
        if committed is not None:
            committed(chunk, entries)

    return Packer(session.identity, chunk_bytes, compress, session.objects, session.new_id, commit)


def check_storable(mtime_ns: int, size: int = 0) -> None:
    """Raises FileSkipped if no chunk can hold this time or size."""
    if mtime_ns not in MTIMES_NS:
        raise FileSkipped("refused: its mtime cannot be stored (years 1678 to 2261 can)")
    if not 0 <= size <= FILE_BYTES_MAX:
        raise FileSkipped(f"refused: a file of {size} bytes")


def _split_extents(size: int, extent_bytes: int) -> Iterator[ExtentInfo | None]:
    """None alone if the file has just one extent."""
    if size <= extent_bytes:
        yield None
        return
    starts = range(0, size, extent_bytes)
    for number, start in enumerate(starts):
        yield ExtentInfo(number, len(starts), start, min(extent_bytes, size - start))


def _is_same(before: os.stat_result, after: os.stat_result) -> bool:
    return (
        before.st_size == after.st_size
        and before.st_mtime_ns == after.st_mtime_ns
        and before.st_ctime_ns == after.st_ctime_ns
    )
