"""The file system that a mount shows: the tree of one dataset version, and the folder `.diesel`.

A `Vfs` answers the requests of a file system from a snapshot, the index of all entries of a
version, and from a `ContentReader`, which returns checked bytes. It knows no FUSE: a session
(`sessions/`) or a test calls it.

A node (FUSE's name for an inode number) is the entry's index in the snapshot + 1. So the root is 1,
there is no table of nodes, and the kernel's FORGET has nothing to free. Nodes from `HIDDEN_ROOT` on
belong to `.diesel` (`dot_diesel.py`).

Concurrency: everything runs in one trio thread; many tasks may call. Only `read`, `lookup_hidden`,
`hidden_listing` and `drain` wait. The first three wait for threads, which touch nothing of this
object.
"""

import errno
import json
import logging
import math
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import trio

from ...errors import CorruptError, DeadlineError, DieselError, ObjectMissing
from ...format.chunk_id import chunk_id_text
from ...format.entries import NAME_BYTES_MAX, Bytes, Kind
from ...format.snapshot.reader import Snapshot
from ...names import shown
from ...settings import READ_DEADLINE_S
from ..statistics.waits import Waits
from .attributes import (
    ABSENT,
    FOREVER_S,
    HIDDEN_NAME,
    HIDDEN_ROOT,
    ROOT,
    Attributes,
    FuseErrno,
    Listing,
    Owner,
)
from .dot_diesel import HiddenFile, HiddenFolder, ListObserver

log = logging.getLogger("diesel.mount")

READ_THREADS = 64
"""Reads that may wait for the store at once. Others queue, and their deadline runs meanwhile."""

RETRY_REFUSED_S = 0.5
"""If a READ that the kernel has sent ahead of a reader fails, the kernel repeats it at once. So if
a read has missed its deadline, the next read of the same file within this time fails at once;
otherwise the reader would wait for two deadlines."""

TIMED_OUT_MAX = 4096
"""The most files whose missed deadline is remembered; beyond that all are forgotten."""

STATS_MAX_AGE_S = 1.0
"""`.diesel/stats` does not change for this long, so that a program that calls stat on it, opens and
reads it finds one content."""

BLOCK_BYTES = 4096

_TYPE_BITS = np.array([stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR, 0], np.uint32)  # by Kind


class ContentReader(Protocol):
    """Checked bytes of entries, by index in the snapshot. Any thread may call every method."""

    def read(self, index: int, offset: int, size: int) -> memoryview:
        """`size` bytes from `offset` on. May block. Raises DieselError, also for damaged bytes."""
        ...

    def read_nowait(self, index: int, offset: int, size: int) -> memoryview | None:
        """The same bytes if they are in memory. Never blocks."""
        ...

    def stats(self) -> dict[str, int]:
        """Shown as `cache` in `.diesel/stats`."""
        ...

    def close(self) -> None:
        """Reads under way may fail."""
        ...


class ChildColumns(NamedTuple):
    """Consecutive children of a folder."""

    nodes: npt.NDArray[np.uint64]
    name_start: npt.NDArray[np.int64]
    """n + 1 offsets in `names`: name i is `names[name_start[i]:name_start[i + 1]]`."""
    names: npt.NDArray[np.uint8]
    """At least 8 bytes longer than the last name needs."""
    mode: npt.NDArray[np.uint32]
    """The permissions with the type bits."""
    size: npt.NDArray[np.uint64]
    mtime_ns: npt.NDArray[np.int64]


class Space(NamedTuple):
    """Nothing is free, because nothing can be written."""

    blocks: int
    entries: int


@dataclass(frozen=True, slots=True)
class MountHooks:
    mount_info: Mapping[str, object] = field(default_factory=dict)
    """Constants for `.diesel/stats`."""
    files: Mapping[bytes, HiddenFile] = field(default_factory=dict)
    """The generated files of `.diesel` besides `stats`."""
    list_observer: ListObserver | None = None
    """Learns which lists programs read."""
    control_path: Callable[[], bytes] = bytes
    """The target of `.diesel/control`; empty without a control socket."""
    prefetch_stats: Callable[[], Mapping[str, object]] | None = None
    """The prefetch worker's figures for `.diesel/stats`."""
    extra_stats: Callable[[], Mapping[str, object]] = dict
    """Further keys for `.diesel/stats`."""
    waits: Waits | None = None
    """Counts waits, by default without groups of processes."""


class Vfs:
    first_counted_node = HIDDEN_ROOT
    """Sessions must call `count_lookup` and `forget` for the nodes from this one on."""

    def __init__(
        self,
        snapshot: Snapshot,
        reader: ContentReader,
        owner: Owner,
        hooks: MountHooks = MountHooks(),  # it is frozen
        *,
        read_deadline_s: float = READ_DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.snapshot = snapshot
        self.owner = owner
        self.requests: Counter[str] = Counter()
        self.reads: Counter[str] = Counter(hits=0, misses=0, held=0, failed=0, bytes=0)
        self.waits = hooks.waits or Waits()  # sessions report each request to it
        self.waiting = 0  # requests that wait for a thread
        self._lookups_waiting = 0  # the waiting requests that are no reads
        self._reader = reader
        self._hooks = hooks
        self._deadline_s = read_deadline_s
        self._threads = trio.CapacityLimiter(READ_THREADS)
        self._timed_out_until_s: dict[int, float] = {}  # by index; see RETRY_REFUSED_S
        self._drained = trio.lowlevel.ParkingLot()  # of tasks that wait in `drain`
        self._clock = clock
        self._started_s = clock()
        self._hidden = HiddenFolder(
            snapshot,
            {b"stats": HiddenFile(self._stats_text, STATS_MAX_AGE_S), **hooks.files},
            owner,
            list_observer=hooks.list_observer,
            control_path=hooks.control_path,
            clock=clock,
        )

    # names and attributes ---------------------------------------------------------------------

    def lookup(self, folder: int, name: bytes) -> Attributes:
        """`ABSENT` if the folder of the dataset has no such name. A session that passes the node on
        to the kernel also calls `count_lookup`. Raises FuseErrno."""
        if folder == ROOT and name == HIDDEN_NAME:
            return self.attributes(HIDDEN_ROOT)
        index = self.snapshot.child(self._index(folder), name)
        if index < 0 and len(name) > NAME_BYTES_MAX:
            raise FuseErrno(errno.ENAMETOOLONG)
        return ABSENT if index < 0 else self.attributes(index + 1)

    async def lookup_hidden(self, folder: int, name: bytes) -> Attributes:
        """As `lookup`, in `.diesel` and the folders below it."""
        with self._counted_wait(lookups=1):
            return await self._hidden.lookup(folder, name)

    def attributes(self, node: int) -> Attributes:
        """Raises FuseErrno(ESTALE) for an unknown node."""
        if node < HIDDEN_ROOT:
            found = self.snapshot.stat(self._index(node))
            mode = int(_TYPE_BITS[found.kind]) | self._permissions(found.kind, found.mode)
            return Attributes(node, mode, found.size, found.mtime_ns, FOREVER_S)
        return self._hidden.attributes(node)

    def count_lookup(self, node: int) -> None:
        """Called when the kernel got the node once more."""
        if node > HIDDEN_ROOT:
            self._hidden.count_lookup(node)

    def forget(self, node: int, count: int) -> None:
        """Called when the kernel has dropped `count` of the counted lookups."""
        if node > HIDDEN_ROOT:
            self._hidden.forget(node, count)

    def forget_all(self, forgets: Sequence[tuple[int, int]]) -> list[int]:
        """Calls `forget` for pairs of node and count. Returns the dataset's entries among them: the
        kernel has dropped their pages, too."""
        for node, count in forgets:
            if node >= HIDDEN_ROOT:
                self.forget(node, count)
        entries = self.snapshot.entry_count
        return [node - 1 for node, _ in forgets if 0 < node <= entries]

    def count_listed(self, folder: int, place: int, count: int) -> None:
        """Called when the kernel got `count` children, from child `place` on. Only a file system of
        several versions needs this."""

    def link_target(self, node: int) -> bytes:
        """Raises FuseErrno."""
        if node >= HIDDEN_ROOT:
            return self._hidden.link_target(node)
        return self.snapshot.link(self._index(node))

    def space(self) -> Space:
        """Never 0 blocks, because tools divide by their number."""
        blocks = -(-self.snapshot.byte_count // BLOCK_BYTES)
        return Space(max(blocks, 1), max(self.snapshot.entry_count, 1))

    # listings ---------------------------------------------------------------------------------

    def folder_parent(self, node: int) -> int:
        """The node of `..`; the root's is the root."""
        if node >= HIDDEN_ROOT:
            return self._hidden.parent(node)
        if node == ROOT:
            return ROOT
        return self.snapshot.parent(self._index(node)) + 1

    def resume_listing(self, folder: int, offset: int) -> tuple[int, int]:
        """Splits an offset in a listing into a base and the offset without it. Replies must add the
        base to all offsets of the folder. The base is 0 here; a file system of several versions
        numbers its switches in it."""
        return 0, offset

    def child_columns(self, folder: int, position: int, count: int) -> ChildColumns | None:
        """Up to `count` children of a folder of the dataset, from child `position` on; None if
        there are none. A child never changes its position."""
        part = self.snapshot.children(self._index(folder))[position : position + count]
        if not part:
            return None
        stats = self.snapshot.stat_many(part)
        shown_bits = stats.mode.astype(np.uint32) & (~self.owner.umask & 0o7777)
        shown_bits[stats.kind == Kind.LINK] = 0o777
        columns = self.snapshot.columns
        return ChildColumns(
            np.arange(part.start + 1, part.stop + 1, dtype=np.uint64),
            columns.name_start[part.start : part.stop + 1].astype(np.int64),
            columns.names,
            (_TYPE_BITS[stats.kind] | shown_bits).astype(np.uint32),
            stats.size,
            stats.mtime_ns,
        )

    async def hidden_listing(self, folder: int) -> Listing:
        """All entries of `.diesel`, or of a folder in it."""
        with self._counted_wait(lookups=1):
            return await self._hidden.listing(folder)

    # content ----------------------------------------------------------------------------------

    def read_nowait(self, node: int, offset: int, size: int) -> Bytes | None:
        """The bytes up to the end of the file, if they are in memory."""
        if node >= HIDDEN_ROOT:
            return self._hidden.read_nowait(node, offset, size)
        index = self._index(node)
        wanted = self._wanted(index, offset, size)
        if wanted == 0:
            return b""
        found = self._reader.read_nowait(index, offset, wanted)
        if found is None:
            return None
        if len(found) != wanted:
            raise self._failed(index, offset, _short(len(found), wanted))
        self.reads["hits"] += 1
        self.reads["bytes"] += wanted
        return found

    async def read(self, node: int, offset: int, size: int) -> Bytes:
        """Never returns fewer bytes than there are: a short reply would make the kernel cut off the
        file for ever. Raises FuseErrno(EIO) if the store or the checksum fails, or if the deadline
        passes."""
        if node >= HIDDEN_ROOT:
            return await self._read_hidden(node, offset, size)
        found = self.read_nowait(node, offset, size)
        if found is not None:
            return found
        index = node - 1
        wanted = self._wanted(index, offset, size)
        timeout_error = DeadlineError(f"no answer within {self._deadline_s:g} s")
        if self._clock() < self._timed_out_until_s.pop(index, -math.inf):
            raise self._failed(index, offset, timeout_error)
        self.reads["misses"] += 1
        try:
            with self._counted_wait(), trio.fail_after(self._deadline_s):
                view = await trio.to_thread.run_sync(
                    self._reader.read,
                    index,
                    offset,
                    wanted,
                    abandon_on_cancel=True,
                    limiter=self._threads,
                )
        except trio.TooSlowError:
            if len(self._timed_out_until_s) >= TIMED_OUT_MAX:
                self._timed_out_until_s.clear()
            self._timed_out_until_s[index] = self._clock() + RETRY_REFUSED_S
            raise self._failed(index, offset, timeout_error) from None
        except DieselError as error:
            raise self._failed(index, offset, error) from None
        if len(view) != wanted:
            raise self._failed(index, offset, _short(len(view), wanted))
        self.reads["bytes"] += wanted
        return view

    def note_handed_over(self, size: int) -> None:
        """Counts a READ that the prefetch worker has answered."""
        self.reads["hits"] += 1
        self.reads["bytes"] += size

    async def _read_hidden(self, node: int, offset: int, size: int) -> Bytes:
        try:
            with self._counted_wait(), trio.fail_after(self._deadline_s):
                return await self._hidden.read(node, offset, size)
        except trio.TooSlowError:
            log.error(
                "%s was not generated within %g s: the read fails with EIO",
                self._describe_node(node),
                self._deadline_s,
            )
            raise FuseErrno(errno.EIO) from None

    @contextmanager
    def _counted_wait(self, lookups: int = 0) -> Iterator[None]:
        """`lookups` is 1 if the request is no read."""
        self.waiting += 1
        self._lookups_waiting += lookups
        try:
            yield
        finally:
            self.waiting -= 1
            self._lookups_waiting -= lookups
            if not self.waiting:
                self._drained.unpark_all()

    async def drain(self) -> None:
        """Waits until no request waits."""
        while self.waiting:
            await self._drained.park()

    def _wanted(self, index: int, offset: int, size: int) -> int:
        return max(0, min(size, self.snapshot.size(index) - offset))

    # errors and statistics -----------------------------------------------------------------------

    def errno_of(self, fault: BaseException, request: str, node: int) -> int:
        """The errno to reply after any exception of a request, so that no bug ends the mount."""
        if isinstance(fault, FuseErrno):
            return fault.errno
        name = self._describe_node(node)
        log.error(
            "%s of %s failed: %r", request, name, fault, exc_info=fault,
            extra={"subject": f"{name} {type(fault).__name__}"},
        )  # fmt: skip
        return errno.EIO

    def stats(self) -> dict[str, object]:
        """The content of `.diesel/stats`."""
        prefetch_stats = self._hooks.prefetch_stats
        return {
            "dataset": self.snapshot.dataset,
            "identity": str(self.snapshot.identity),
            "version": self.snapshot.version,
            "entries": self.snapshot.entry_count,
            "bytes": self.snapshot.byte_count,
            **self._hooks.mount_info,
            "uptime_s": round(self._clock() - self._started_s, 3),
            "requests": dict(sorted(self.requests.items())),
            "reads": dict(self.reads),
            "waiting": self.waiting - self._lookups_waiting,
            "waits": self.waits.figures(),
            "cache": self._reader.stats(),
            "lists": self._hidden.stats(),
            **({} if prefetch_stats is None else {"residency": prefetch_stats()}),
            **self._hooks.extra_stats(),
        }

    def close(self) -> None:
        self._reader.close()

    def _stats_text(self) -> bytes:
        return json.dumps(self.stats(), indent=2).encode() + b"\n"

    def _failed(self, index: int, offset: int, fault: DieselError) -> FuseErrno:
        self.reads["failed"] += 1
        name = self._describe_node(index + 1)
        log.error(
            "cannot read %s at %d (%s): %s%s",
            name,
            offset,
            self._chunk_at(index, offset),
            fault,
            f" (snapshot too old? The mount shows version {self.snapshot.version}; a purge may have"
            " removed it)"
            if isinstance(fault, ObjectMissing)
            else "",
            extra={"subject": name},
        )
        return FuseErrno(errno.EIO)

    def _describe_node(self, node: int) -> str:
        """For messages; never raises."""
        if not 0 < node <= self.snapshot.entry_count:
            return f"{self.snapshot.dataset}: node {node}"
        return f"{self.snapshot.dataset}/{shown(self.snapshot.path(node - 1))}"

    def _chunk_at(self, index: int, offset: int) -> str:
        for extent in self.snapshot.extents(index, offset, offset + 1):
            return f"chunk {chunk_id_text(self.snapshot.chunk_ids[extent.chunk])}"
        return "no chunk"

    def _index(self, node: int) -> int:
        if not 0 < node <= self.snapshot.entry_count:
            raise FuseErrno(errno.ESTALE)
        return node - 1

    def _permissions(self, kind: Kind, mode: int) -> int:
        return 0o777 if kind is Kind.LINK else mode & ~self.owner.umask


def _short(found: int, wanted: int) -> CorruptError:
    return CorruptError(f"{found} bytes came instead of {wanted}")
