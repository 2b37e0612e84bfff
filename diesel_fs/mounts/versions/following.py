"""A mount that follows its dataset: several versions under one numbering of nodes.

Owned here: which node an entry has in each version, how often the kernel knows it, when a version
that is no longer shown can go, and where a listing goes on that was begun in another one. Not
owned: when to go over to a version (`watcher.py`), what is unchanged in it
(`format/snapshot/diff.py`), telling the kernel (`invalidation.py`), one version's answers
(`vfs.py`).

Each version is a `Vfs` of its own, whose nodes are its entries' indices + 1. The mount's nodes are
those of the version that was shown first; an entry that is unchanged in a later one keeps its node,
and all others get numbers that no entry ever had. So a node has one content for ever, and the
kernel may keep it. What a node that is shown no longer leads to is answered from the last version
that had it, as long as the kernel knows any such node of it: an open file holds its node.

Concurrency: as `vfs.py`: one trio task at a time; `prepare` alone is for a thread.
"""

import errno
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import DieselError
from ...format.entries import Bytes
from ...format.snapshot.diff import OldIndices, SnapshotDiff
from ...format.snapshot.reader import Snapshot
from ...settings import READ_DEADLINE_S
from ..attributes import HIDDEN_NAME, HIDDEN_ROOT, ROOT, Attributes, FuseErrno, Listing, Owner
from ..dot_diesel import HiddenFile, ListObserver
from ..vfs import ChildColumns, EntryReader, Space, Vfs

Nodes = npt.NDArray[np.uint64]

SWITCH_SHIFT = 40
"""An offset in a folder is the place of its next entry; above that many bits stands after how many
switches the folder had last been changed when it was given out."""

_PLACE_MASK = (1 << SWITCH_SHIFT) - 1
_DOTS = 2

MOVES_KEPT = 16
"""Of so many switches is known where places of a folder went, 4 bytes an entry each. A listing that
was begun before goes on at its old place, and may leave entries out."""

ReaderFactory = Callable[[], EntryReader]


class NodeNumbers:
    """The nodes of one version's entries, and how often the kernel has been given each."""

    def __init__(self, nodes: Nodes, *, as_indices: bool = False) -> None:
        """`as_indices`: each is its entry's index + 1."""
        self.nodes = nodes
        self.lookup_counts = np.zeros(len(nodes), np.uint32)
        self.lookup_total = 0
        self._count = self.lookup_counts.data
        self._as_indices = as_indices
        if not as_indices:
            order = np.argsort(nodes)
            self._sorted = nodes[order].data
            self._index = order.astype(np.int32).data

    def index(self, node: int) -> int:
        """The entry that has a node; -1 for none."""
        if self._as_indices:
            return node - 1 if 0 < node <= len(self.nodes) else -1
        at = bisect_left(self._sorted, node)
        return self._index[at] if at < len(self._sorted) and self._sorted[at] == node else -1

    def count_lookup(self, index: int) -> None:
        """The kernel has been given an entry once more."""
        self._count[index] += 1
        self.lookup_total += 1

    def count_lookups(self, start: int, stop: int) -> None:
        """The same of all these."""
        self.lookup_counts[start:stop] += np.uint32(1)
        self.lookup_total += stop - start

    def forget(self, index: int, count: int) -> None:
        """The kernel has given back so many."""
        count = min(count, self._count[index])
        self._count[index] -= count
        self.lookup_total -= count

    def move(self, there: npt.NDArray[np.int64], to: "NodeNumbers", here: OldIndices) -> None:
        """What is known of the entries `here` is known of those `there` from now on."""
        moved = self.lookup_counts[here]
        to.lookup_counts[there] = moved
        total = int(moved.sum(dtype=np.int64))
        to.lookup_total += total
        self.lookup_counts[here] = 0
        self.lookup_total -= total


class LazyReader:
    """A version that is shown no longer is seldom read: its reader is opened when it is."""

    def __init__(self, open_reader: ReaderFactory) -> None:
        self._open = open_reader
        self._reader: EntryReader | None = None
        self._lock = threading.Lock()

    def read(self, index: int, offset: int, size: int) -> memoryview:
        """As the reader's. Raises DieselError."""
        with self._lock:
            if self._reader is None:
                self._reader = self._open()
            reader = self._reader
        return reader.read(index, offset, size)

    def read_nowait(self, index: int, offset: int, size: int) -> memoryview | None:
        """As the reader's."""
        reader = self._reader
        return None if reader is None else reader.read_nowait(index, offset, size)

    def stats(self) -> dict[str, int]:
        """As the reader's."""
        reader = self._reader
        return {} if reader is None else reader.stats()

    def close(self) -> None:
        """Gives back what it holds."""
        if self._reader is not None:
            self._reader.close()


@dataclass(slots=True, eq=False)
class _Version:
    """One version, its entries numbered."""

    vfs: Vfs
    numbers: NodeNumbers

    def node(self, index: int) -> int:
        return int(self.numbers.nodes[index])


class Prepared(NamedTuple):
    """A version that can be shown."""

    match: SnapshotDiff
    reader: EntryReader
    before: NodeNumbers
    numbers: NodeNumbers
    next_node: int
    folders: dict[int, tuple[int, int, int]]
    """Of each folder whose listing changed, by node: its first entry before and now, how many."""


class FollowingVfs(Vfs):
    """The file system of a mount whose version changes (see the module)."""

    first_counted_node = ROOT

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
        follow_stats: Callable[[], Mapping[str, object]] = dict,
        read_deadline_s: float = READ_DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            snapshot,
            reader,
            owner,
            mount_info=mount_info,
            hidden=hidden,
            list_observer=list_observer,
            control_path=control_path,
            prefetch_stats=prefetch_stats,
            extra_stats=extra_stats,
            read_deadline_s=read_deadline_s,
            clock=clock,
        )
        nodes = np.arange(1, snapshot.entry_count + 1, dtype=np.uint64)
        self._current = _Version(
            self._version_vfs(snapshot, reader), NodeNumbers(nodes, as_indices=True)
        )
        self._retired: list[_Version] = []  # the newest first
        self._next_node = snapshot.entry_count + 1
        self._follow = follow_stats
        self._since_s = time.time()
        self._switches = 0
        self._changed_at_switch: dict[
            int, int
        ] = {}  # by folder's node; 0 where it has never changed
        self._stale_names: dict[int, set[bytes]] = {}  # names, by folders that are shown no longer
        self._moves: dict[int, tuple[OldIndices, dict[int, tuple[int, int, int]]]] = {}  # by switch

    def _version_vfs(self, snapshot: Snapshot, reader: EntryReader) -> Vfs:
        """A version alone, which counts and waits together with all others."""
        made = Vfs(
            snapshot, reader, self.owner, read_deadline_s=self._deadline_s, clock=self._clock
        )
        made.reads, made.requests, made._threads = self.reads, self.requests, self._threads
        return made

    # going over to another version ----------------------------------------------------------------

    @property
    def snapshots(self) -> list[Snapshot]:
        """Those of all versions that are answered for, the one that is shown first."""
        return [self.snapshot, *(each.vfs.snapshot for each in self._retired)]

    @property
    def numbers(self) -> NodeNumbers:
        """Those of the version that is shown."""
        return self._current.numbers

    def prepare(self, found: SnapshotDiff, reader: EntryReader) -> Prepared:
        """What `switch_version` needs, whose `old` is shown now. Takes a second for a million
        entries."""
        before, was = self._current.numbers.nodes, found.unchanged
        fresh = was < 0
        nodes = before[np.where(fresh, 0, was)]
        count = int(np.count_nonzero(fresh))
        nodes[fresh] = np.arange(self._next_node, self._next_node + count, dtype=np.uint64)
        if (after := self._next_node + count) > HIDDEN_ROOT:
            raise DieselError("this mount has no numbers left", advice="mount again")
        changed = found.changed_folders
        first, children = found.new.columns.chunk[changed], found.new.columns.offset[changed]
        first_before = found.old.columns.chunk[was[changed]]
        places = zip(first_before.tolist(), first.tolist(), children.tolist(), strict=True)
        folders = dict(zip(nodes[changed].tolist(), places, strict=True))
        return Prepared(found, reader, self._current.numbers, NodeNumbers(nodes), after, folders)

    def switch_version(self, prepared: Prepared, reopen: ReaderFactory) -> EntryReader:
        """From now on names lead to this version. What was shown before is answered through
        `reopen` where it must be; its reader comes back, to be closed when `drain_retired` has.
        """
        found, old = prepared.match, self._current
        assert found.old is self.snapshot, "it was prepared for another version"
        now = np.flatnonzero(found.unchanged >= 0)
        old.numbers.move(now, prepared.numbers, found.unchanged[now])
        old_reader, old.vfs._reader = old.vfs._reader, LazyReader(reopen)
        self._retired.insert(0, old)
        self._current = _Version(self._version_vfs(found.new, prepared.reader), prepared.numbers)
        self._next_node = prepared.next_node
        self.snapshot, self._reader = found.new, prepared.reader
        self._hidden.switch_version(found.new)
        self._switches += 1
        self._since_s = time.time()
        self._changed_at_switch.update(dict.fromkeys(prepared.folders, self._switches))
        self._moves[self._switches] = found.same_path, prepared.folders
        self._moves.pop(self._switches - MOVES_KEPT, None)
        self.drop_unused_versions()
        self._changed_at_switch = {
            node: at for node, at in self._changed_at_switch.items() if self._is_known(node)
        }
        return old_reader

    async def drain_retired(self) -> None:
        """Returns when nobody waits for a version that is shown no longer."""
        for each in tuple(self._retired):
            await each.vfs.drain()

    def drop_unused_versions(self) -> None:
        """Versions of which the kernel knows nothing that is not shown go."""
        for each in tuple(self._retired):
            if each.numbers.lookup_total <= 0 and not each.vfs.waiting:
                self._retired.remove(each)
                closing = threading.Thread(target=each.vfs.close, daemon=True)
                closing.start()  # it may hold a lock that a dead store keeps

    def take_stale_names(self) -> dict[int, set[bytes]]:
        """The names that the kernel has been given since in folders that are shown no longer, by
        folder's node. It would keep them, and with them the folders and their version: it is to be
        told to drop each with its last user.
        """
        given, self._stale_names = self._stale_names, {}
        return given

    def entry_of(self, node: int) -> int:
        """The entry of the version that is shown which has a node; -1 for none."""
        return self._current.numbers.index(node)

    def _locate(self, node: int) -> tuple[_Version, int]:
        """The version that answers for a node, and the entry. Raises Refused(ESTALE)."""
        index = self._current.numbers.index(node)
        if index >= 0:
            return self._current, index
        for each in self._retired:
            if (index := each.numbers.index(node)) >= 0:
                return each, index
        raise FuseErrno(errno.ESTALE)

    def _is_known(self, node: int) -> bool:
        try:
            self._locate(node)
        except FuseErrno:
            return False
        return True

    # what the kernel knows ------------------------------------------------------------------------

    def count_lookup(self, node: int) -> None:
        """Counts that the kernel has been given the node."""
        if node >= HIDDEN_ROOT:
            super().count_lookup(node)
        elif node:
            version, index = self._locate(node)
            version.numbers.count_lookup(index)

    def count_listed(self, folder: int, place: int, count: int) -> None:
        """Counts that the kernel has been given so many children of a folder, from a place on."""
        if count:
            version, index = self._locate(folder)
            start = version.vfs.snapshot.children(index).start + place
            version.numbers.count_lookups(start, start + count)
            if version is not self._current:
                names = version.vfs.snapshot.names(range(start, start + count))
                self._stale_names.setdefault(folder, set()).update(names)

    def forget(self, node: int, count: int) -> None:
        """Takes back `count` of what `count_lookup` counted; a version may go by it."""
        if node >= HIDDEN_ROOT:
            super().forget(node, count)
            return
        if not self._is_known(node):
            return
        version, index = self._locate(node)
        version.numbers.forget(index, count)
        if version is not self._current and version.numbers.lookup_total <= 0:
            self.drop_unused_versions()

    def forget_all(self, forgets: Sequence[tuple[int, int]]) -> list[int]:
        """Many at once; the entries of the version that is shown among them."""
        for node, count in forgets:
            self.forget(node, count)
        entries: Iterable[int] = (self.entry_of(node) for node, _ in forgets)
        return [entry for entry in entries if entry >= 0]

    # names, attributes, listings ------------------------------------------------------------------

    def lookup(self, folder: int, name: bytes) -> Attributes:
        """What `name` in a folder of the dataset leads to."""
        if folder == ROOT and name == HIDDEN_NAME:
            return self.attributes(HIDDEN_ROOT)
        version, index = self._locate(folder)
        found = version.vfs.lookup(index + 1, name)
        if version is not self._current:
            self._stale_names.setdefault(folder, set()).add(name)
        return found._replace(node=version.node(found.node - 1)) if found.node else found

    def attributes(self, node: int) -> Attributes:
        """What a node is. Raises Refused(ESTALE) for one that is unknown."""
        if node >= HIDDEN_ROOT:
            return super().attributes(node)
        version, index = self._locate(node)
        return version.vfs.attributes(index + 1)._replace(node=node)

    def link_target(self, node: int) -> bytes:
        """Where a symbolic link points, verbatim."""
        if node >= HIDDEN_ROOT:
            return super().link_target(node)
        version, index = self._locate(node)
        return version.vfs.link_target(index + 1)

    def space(self) -> Space:
        """What statfs tells of the version that is shown."""
        return self._current.vfs.space()

    def folder_parent(self, node: int) -> int:
        """The node that `..` leads to; the root's is the root."""
        if node >= HIDDEN_ROOT:
            return super().folder_parent(node)
        version, index = self._locate(node)
        return version.node(version.vfs.folder_parent(index + 1) - 1)

    def resume_listing(self, folder: int, offset: int) -> tuple[int, int]:
        """Where a listing goes on, also one that was begun in another version."""
        edition = self._changed_at_switch.get(folder, 0)
        begun, place = offset >> SWITCH_SHIFT, offset & _PLACE_MASK
        if begun != edition and place > _DOTS:
            place = self._moved(folder, begun, place - _DOTS) + _DOTS
        return edition << SWITCH_SHIFT, place

    def _moved(self, folder: int, begun: int, place: int) -> int:
        """The place behind all entries that are still there and stood before a place."""
        for switch in sorted(self._moves):
            met, folders = self._moves[switch]
            if switch <= begun or folder not in folders:
                continue
            first_before, first, count = folders[folder]
            here = met[first : first + count]
            still = np.flatnonzero(here >= 0)
            passed = int(np.searchsorted(here[still], first_before + place))
            place = int(still[passed - 1]) + 1 if passed else 0
        return place

    def listing(self, folder: int, position: int) -> Listing:
        """Children of `folder` around `position` (see `Vfs.listing`)."""
        version, index = self._locate(folder)
        found = version.vfs.listing(index + 1, position)
        if not found.nodes:
            return found
        if version is not self._current:
            self._stale_names.setdefault(folder, set()).update(found.names)
        first, behind = found.nodes[0] - 1, found.nodes[-1]
        return found._replace(nodes=version.numbers.nodes[first:behind].tolist())

    def child_columns(self, folder: int, position: int, count: int) -> ChildColumns | None:
        """Up to `count` children of a folder from `position` on; None at its end."""
        version, index = self._locate(folder)
        found = version.vfs.child_columns(index + 1, position, count)
        if found is None:
            return None
        first = int(found.nodes[0]) - 1
        return found._replace(nodes=version.numbers.nodes[first : first + len(found.nodes)])

    # content --------------------------------------------------------------------------------------

    def read_nowait(self, node: int, offset: int, size: int) -> Bytes | None:
        """The bytes if they are in memory, in full up to the file's end; None where `read` must."""
        if node >= HIDDEN_ROOT:
            return super().read_nowait(node, offset, size)
        version, index = self._locate(node)
        return version.vfs.read_nowait(index + 1, offset, size)

    async def read(self, node: int, offset: int, size: int) -> Bytes:
        """The bytes, in full up to the file's end; or Refused(EIO), at the latest at the deadline.

        Who waits is answered from the version that was shown when it asked.
        """
        if node >= HIDDEN_ROOT:
            return await super().read(node, offset, size)
        version, index = self._locate(node)
        with self._counted_wait():
            return await version.vfs.read(index + 1, offset, size)

    # figures --------------------------------------------------------------------------------------

    def stats(self) -> dict[str, object]:
        """What the mount is and did, and what it follows."""
        followed = {
            "since": round(self._since_s, 3),
            "switches": self._switches,
            "retired_versions": [each.vfs.snapshot.version for each in self._retired],
            **self._follow(),
        }
        return {**super().stats(), "follow": followed}

    def close(self) -> None:
        """Gives back what all readers hold."""
        for each in (self._current, *self._retired):
            each.vfs.close()

    def _describe_node(self, node: int) -> str:
        try:
            version, index = self._locate(node)
        except FuseErrno:
            return f"{self.snapshot.dataset}: node {node}"
        return version.vfs._describe_node(index + 1)
