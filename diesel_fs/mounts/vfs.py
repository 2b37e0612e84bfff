"""The file system that a mount shows: a snapshot's tree, read through a reader, plus `.diesel`.

Owned here: node numbers, attributes as shown, folder listings, read deadlines, and what becomes an
errno. Not owned: the hidden folder (`dot_diesel.py`), FUSE (a session under `fuse/` speaks it; this
module knows neither), where bytes come from and whether they are right (the reader checks them).

A node is an entry's index in the snapshot + 1, so the root is 1, there is no table, and nothing of
the dataset can be forgotten. Nodes from `HIDDEN_ROOT` on are made by us and belong to `.diesel`;
such a node is never given to other content.

Concurrency: one trio task at a time calls in here. Only `read` waits, and what is asked of the
hidden folder (`lookup_hidden`, `hidden_listing`); what they wait for runs in threads (for reads of
the dataset `READ_THREADS` of them) and touches nothing of this object.
"""

import errno
import json
import logging
import math
import stat
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import trio

from ..errors import CorruptError, DeadlineError, DieselError, ObjectMissing
from ..format.chunk_id import chunk_id_text
from ..format.entries import NAME_BYTES_MAX, Bytes, Kind
from ..format.snapshot.reader import Snapshot
from ..names import shown
from ..settings import READ_DEADLINE_S
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
"""Reads that wait for the store at once. More wait in line, where their deadline runs too."""

RETRY_REFUSED_S = 0.5
"""After a READ ahead has failed the kernel asks once more at once. Where the deadline has passed,
that one is refused, or the reader would wait for two of them."""

TIMED_OUT_MAX = 4096

LISTING_ENTRIES = 1024
"""Entries of a folder that are looked at together; one READDIR answer holds 24 to some 6,000."""

LISTINGS_KEPT = 64
"""So many such parts are kept: as many readers can list large folders at once without repeating."""

STATS_MAX_AGE_S = 1.0
"""A program that stats, opens and reads `.diesel/stats` finds one content."""

BLOCK_BYTES = 4096

_TYPE_BITS = np.array([stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR, 0], np.uint32)  # by Kind


class EntryReader(Protocol):
    """Checked bytes of entries, by index. Every method may be called from any thread."""

    def read(self, index: int, offset: int, size: int) -> memoryview:
        """`size` bytes from `offset` on, checked. May block. Raises DieselError."""
        ...

    def read_nowait(self, index: int, offset: int, size: int) -> memoryview | None:
        """The same if it is in memory, else None. Never blocks."""
        ...

    def stats(self) -> dict[str, int]:
        """What the cache holds and did."""
        ...

    def close(self) -> None:
        """Gives back what it holds. Reads under way may fail."""
        ...


class ChildColumns(NamedTuple):
    """n consecutive children of a folder, as the snapshot's columns have them."""

    nodes: npt.NDArray[np.uint64]
    name_start: npt.NDArray[np.int64]
    """n + 1; into `names`."""
    names: npt.NDArray[np.uint8]
    """At least 8 bytes more than the last name needs."""
    mode: npt.NDArray[np.uint32]
    """With the type bits."""
    size: npt.NDArray[np.uint64]
    mtime_ns: npt.NDArray[np.int64]


class Space(NamedTuple):
    """What statfs tells. Nothing is free: nothing can be written."""

    blocks: int
    entries: int


class Vfs:
    """One dataset at one version as a file system."""

    first_counted_node = HIDDEN_ROOT
    """The nodes from this one on want `count_lookup` and `forget`."""

    def __init__(
        self,
        snapshot: Snapshot,
        reader: EntryReader,
        owner: Owner,
        *,
        mount_info: Mapping[str, object] | None = None,
        hidden: Mapping[bytes, HiddenFile] | None = None,
        list_observer: ListObserver | None = None,
        control_path: Callable[[], bytes] = bytes,
        prefetch_stats: Callable[[], Mapping[str, object]] | None = None,
        extra_stats: Callable[[], Mapping[str, object]] = dict,
        read_deadline_s: float = READ_DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.snapshot = snapshot
        self.owner = owner
        self.requests: Counter[str] = Counter()
        self.reads: Counter[str] = Counter(hits=0, misses=0, held=0, failed=0, bytes=0)
        self.waiting = 0
        self._asking = 0
        self._reader = reader
        self._mount_info = dict(mount_info or {})
        self._prefetch_stats = prefetch_stats
        self._extra_stats = extra_stats
        self._deadline_s = read_deadline_s
        self._threads = trio.CapacityLimiter(READ_THREADS)
        self._timed_out_until_s: dict[int, float] = {}
        self._drained = trio.lowlevel.ParkingLot()
        self._clock = clock
        self._started_s = clock()
        self._listings: OrderedDict[tuple[int, int], Listing] = OrderedDict()
        self._hidden = HiddenFolder(
            snapshot,
            {b"stats": HiddenFile(self._stats_text, STATS_MAX_AGE_S), **(hidden or {})},
            owner,
            list_observer=list_observer,
            control_path=control_path,
            clock=clock,
        )

    # names and attributes ---------------------------------------------------------------------

    def lookup(self, folder: int, name: bytes) -> Attributes:
        """What `name` in a folder of the dataset leads to.

        Who tells the kernel of it calls `count_lookup`. What is asked of folders of ours may wait:
        that is `lookup_hidden`.
        """
        if folder == ROOT and name == HIDDEN_NAME:
            return self.attributes(HIDDEN_ROOT)
        index = self.snapshot.child(self._index(folder), name)
        if index < 0 and len(name) > NAME_BYTES_MAX:
            raise FuseErrno(errno.ENAMETOOLONG)
        return ABSENT if index < 0 else self.attributes(index + 1)

    async def lookup_hidden(self, folder: int, name: bytes) -> Attributes:
        """The same in `.diesel` and below it."""
        with self._counted_wait(lookups=1):
            return await self._hidden.lookup(folder, name)

    def attributes(self, node: int) -> Attributes:
        """What a node is. Raises Refused(ESTALE) for one that is unknown."""
        if node < HIDDEN_ROOT:
            found = self.snapshot.stat(self._index(node))
            mode = int(_TYPE_BITS[found.kind]) | self._permissions(found.kind, found.mode)
            return Attributes(node, mode, found.size, found.mtime_ns, FOREVER_S)
        return self._hidden.attributes(node)

    def count_lookup(self, node: int) -> None:
        """Counts that the kernel has been given the node; only hidden ones are counted."""
        if node > HIDDEN_ROOT:
            self._hidden.count_lookup(node)

    def forget(self, node: int, count: int) -> None:
        """Takes back `count` of what `count_lookup` counted."""
        if node > HIDDEN_ROOT:
            self._hidden.forget(node, count)

    def forget_all(self, forgets: Sequence[tuple[int, int]]) -> list[int]:
        """Many at once; the entries among them, whose pages went along."""
        for node, count in forgets:
            if node >= HIDDEN_ROOT:
                self.forget(node, count)
        entries = self.snapshot.entry_count
        return [node - 1 for node, _ in forgets if 0 < node <= entries]

    def count_listed(self, folder: int, place: int, count: int) -> None:
        """Counts that the kernel has been given so many children of a folder, from a place on."""

    def link_target(self, node: int) -> bytes:
        """Where a symbolic link points, verbatim."""
        if node >= HIDDEN_ROOT:
            return self._hidden.link_target(node)
        return self.snapshot.link(self._index(node))

    def space(self) -> Space:
        """What statfs tells: never 0 blocks, because tools divide by them."""
        blocks = -(-self.snapshot.byte_count // BLOCK_BYTES)
        return Space(max(blocks, 1), max(self.snapshot.entry_count, 1))

    # listings ---------------------------------------------------------------------------------

    def folder_parent(self, node: int) -> int:
        """The node that `..` leads to; the root's is the root."""
        if node >= HIDDEN_ROOT:
            return self._hidden.parent(node)
        if node == ROOT:
            return ROOT
        return self.snapshot.parent(self._index(node)) + 1

    def resume_listing(self, folder: int, offset: int) -> tuple[int, int]:
        """Where a listing goes on that the kernel has come to an offset of: what to add to all of a
        folder's offsets, and the offset without it. In one version each is good for ever.
        """
        return 0, offset

    def listing(self, folder: int, position: int) -> Listing:
        """Children of `folder` around `position`; those before it in the answer are to be skipped.

        Where none is left then, the folder ends. A child's position never changes.
        """
        start = position - position % LISTING_ENTRIES
        found = self._listings.get((folder, start))
        if found is None:
            found = self._listings[folder, start] = self._list(folder, start)
            if len(self._listings) > LISTINGS_KEPT:
                self._listings.popitem(last=False)
        else:
            self._listings.move_to_end((folder, start))
        return found

    def child_columns(self, folder: int, position: int, count: int) -> ChildColumns | None:
        """Up to `count` children of a folder of the dataset from `position` on; None at its end."""
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

    def _list(self, folder: int, start: int) -> Listing:
        found = self.child_columns(folder, start, LISTING_ENTRIES)
        if found is None:
            return Listing(start, (), (), (), (), (), FOREVER_S)
        first = int(found.nodes[0])
        nodes = range(first, first + len(found.nodes))
        return Listing(
            start,
            self.snapshot.names(range(nodes.start - 1, nodes.stop - 1)),
            nodes,
            found.mode.tolist(),
            found.size.tolist(),
            found.mtime_ns.tolist(),
            FOREVER_S,
        )

    async def hidden_listing(self, folder: int) -> Listing:
        """All that is in a folder of ours."""
        with self._counted_wait(lookups=1):
            return await self._hidden.listing(folder)

    # content ----------------------------------------------------------------------------------

    def read_nowait(self, node: int, offset: int, size: int) -> Bytes | None:
        """The bytes if they are in memory, in full up to the file's end; None where `read` must."""
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
        """The bytes, in full up to the file's end; or Refused(EIO), at the latest at the deadline.

        A short answer never leaves here: one makes the kernel cut the file for ever.
        """
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

    async def _read_hidden(self, node: int, offset: int, size: int) -> Bytes:
        try:
            with self._counted_wait(), trio.fail_after(self._deadline_s):
                return await self._hidden.read(node, offset, size)
        except trio.TooSlowError:
            log.error("%s was not made within %g s", self._describe_node(node), self._deadline_s)
            raise FuseErrno(errno.EIO) from None

    @contextmanager
    def _counted_wait(self, lookups: int = 0) -> Iterator[None]:
        """Somebody waits meanwhile: a reader, or one that `lookups` for a name."""
        self.waiting += 1
        self._asking += lookups
        try:
            yield
        finally:
            self.waiting -= 1
            self._asking -= lookups
            if not self.waiting:
                self._drained.unpark_all()

    async def drain(self) -> None:
        """Returns when no read waits."""
        while self.waiting:
            await self._drained.park()

    def _wanted(self, index: int, offset: int, size: int) -> int:
        return max(0, min(size, self.snapshot.size(index) - offset))

    # faults and figures -----------------------------------------------------------------------

    def errno_of(self, fault: BaseException, request: str, node: int) -> int:
        """What a session answers for an exception: one bad request never ends a mount."""
        if isinstance(fault, FuseErrno):
            return fault.errno
        log.error("%s of %s failed: %r", request, self._describe_node(node), fault, exc_info=fault)
        return errno.EIO

    def stats(self) -> dict[str, object]:
        """What the mount is and did, as `.diesel/stats` has it."""
        return {
            "dataset": self.snapshot.dataset,
            "identity": str(self.snapshot.identity),
            "version": self.snapshot.version,
            "entries": self.snapshot.entry_count,
            "bytes": self.snapshot.byte_count,
            **self._mount_info,
            "uptime_s": round(self._clock() - self._started_s, 3),
            "requests": dict(sorted(self.requests.items())),
            "reads": dict(self.reads),
            "waiting": self.waiting - self._asking,
            "cache": self._reader.stats(),
            "lists": self._hidden.stats(),
            **({} if self._prefetch_stats is None else {"residency": self._prefetch_stats()}),
            **self._extra_stats(),
        }

    def close(self) -> None:
        """Gives back what the reader holds."""
        self._reader.close()

    def _stats_text(self) -> bytes:
        return json.dumps(self.stats(), indent=2).encode() + b"\n"

    def _failed(self, index: int, offset: int, fault: DieselError) -> FuseErrno:
        self.reads["failed"] += 1
        log.error(
            "cannot read %s at %d (%s): %s%s",
            self._describe_node(index + 1),
            offset,
            self._chunk_at(index, offset),
            fault,
            self._too_old if isinstance(fault, ObjectMissing) else "",
        )
        return FuseErrno(errno.EIO)

    @property
    def _too_old(self) -> str:
        version = self.snapshot.version
        return f" (snapshot too old: purged since, perhaps; the mount shows version {version})"

    def _describe_node(self, node: int) -> str:
        """Dataset and path of a node, for people; never raises."""
        if not 0 < node <= self.snapshot.entry_count:
            return f"{self.snapshot.dataset}: node {node}"
        return f"{self.snapshot.dataset}/{shown(self.snapshot.path(node - 1))}"

    def _chunk_at(self, index: int, offset: int) -> str:
        for extent in self.snapshot.extents(index):
            if extent.start <= offset < extent.start + extent.size:
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
