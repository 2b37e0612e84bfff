"""The file system of a FUSE mount that follows its dataset: several versions, one set of nodes.

A node is FUSE's name for an inode number. Each version is a `Vfs` of its own, with its entries'
indices + 1 as nodes. The mount has other nodes, which equal these only for the first version. An
entry that is unchanged in a later version keeps its node, and every other entry gets a new one. So
a node has one content for ever, and the kernel may keep that content.

This module counts how often the kernel got each node: a *retired* (earlier) version is served until
the kernel knows none of its nodes any more.

Concurrency: one trio task at a time, as in `tree/vfs.py`. Only `prepare` is called in a thread.
"""

import errno
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import DieselError
from ...format.entries import Bytes
from ...format.snapshot.diff import OldIndices, SnapshotDiff
from ...format.snapshot.reader import Snapshot
from ...settings import READ_DEADLINE_S
from ..tree.attributes import HIDDEN_NAME, HIDDEN_ROOT, ROOT, Attributes, FuseErrno, Owner
from ..tree.vfs import ChildColumns, ContentReader, MountHooks, Vfs
from .versioned_vfs import ReaderFactory, VersionedVfs, VersionVfs

Nodes = npt.NDArray[np.uint64]

SWITCH_SHIFT = 40
"""In an offset of a listing, the bits from this one on are the number of the last switch that
changed the folder. The bits below are the *place* of the next entry (`.` is 0, `..` is 1, child k
is k + 2)."""

_PLACE_MASK = (1 << SWITCH_SHIFT) - 1
_DOTS = 2

MOVES_KEPT = 16
"""For this many switches the mount remembers how the places in a folder moved, at 4 bytes an entry.
An older listing goes on at its old place, and may miss entries."""


class NodeNumbers:
    """The nodes of one version's entries, and how often the kernel got each node."""

    def __init__(self, nodes: Nodes, *, as_indices: bool = False) -> None:
        """`nodes` is by entry. `as_indices`: each node is its entry's index + 1."""
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
        """-1 for an unknown node."""
        if self._as_indices:
            return node - 1 if 0 < node <= len(self.nodes) else -1
        at = bisect_left(self._sorted, node)
        return self._index[at] if at < len(self._sorted) and self._sorted[at] == node else -1

    def count_lookup(self, index: int) -> None:
        self._count[index] += 1
        self.lookup_total += 1

    def count_lookups(self, start: int, stop: int) -> None:
        self.lookup_counts[start:stop] += np.uint32(1)
        self.lookup_total += stop - start

    def forget(self, index: int, count: int) -> None:
        count = min(count, self._count[index])
        self._count[index] -= count
        self.lookup_total -= count

    def move(
        self, entries: OldIndices, other: "NodeNumbers", other_entries: npt.NDArray[np.int64]
    ) -> None:
        """Moves the counts of these entries to another version, where they are `other_entries`."""
        moved = self.lookup_counts[entries]
        other.lookup_counts[other_entries] = moved
        total = int(moved.sum(dtype=np.int64))
        other.lookup_total += total
        self.lookup_counts[entries] = 0
        self.lookup_total -= total


class NumberedVersion(VersionVfs):
    def __init__(
        self, mount: Vfs, snapshot: Snapshot, reader: ContentReader, numbers: NodeNumbers
    ) -> None:
        super().__init__(mount, snapshot, reader)
        self.numbers = numbers

    @property
    def is_needed(self) -> bool:
        """Whether the kernel knows a node of this version, or waits for a reply about one."""
        return self.numbers.lookup_total > 0 or self.waiting > 0

    def node(self, index: int) -> int:
        return int(self.numbers.nodes[index])


class Prepared(NamedTuple):
    """A switch to another version, as `prepare` makes it for `switch_version`."""

    diff: SnapshotDiff
    reader: ContentReader
    before: NodeNumbers
    numbers: NodeNumbers
    next_node: int  # the first that is not used yet
    folders: dict[int, tuple[int, int, int]]
    """The folders with a changed listing, by node: the index of the first child before and now, and
    the number of children now."""


class FollowingVfs(VersionedVfs):
    first_counted_node = ROOT

    current: NumberedVersion
    _retired: Sequence[NumberedVersion]

    def __init__(
        self,
        snapshot: Snapshot,
        reader: ContentReader,
        owner: Owner,
        hooks: MountHooks = MountHooks(),  # noqa: B008  # it is frozen
        *,
        follow_stats: Callable[[], Mapping[str, object]] = dict,
        read_deadline_s: float = READ_DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            snapshot,
            reader,
            owner,
            hooks,
            follow_stats=follow_stats,
            read_deadline_s=read_deadline_s,
            clock=clock,
        )
        self._next_node = snapshot.entry_count + 1
        # The last switch that changed a folder's listing, by the folder's node
        self._changed_at_switch: dict[int, int] = {}
        self._stale_names: dict[int, set[bytes]] = {}  # see `take_stale_names`
        self._moves: dict[int, tuple[OldIndices, dict[int, tuple[int, int, int]]]] = {}  # by switch

    def _first_version(self, snapshot: Snapshot, reader: ContentReader) -> NumberedVersion:
        nodes = np.arange(1, snapshot.entry_count + 1, dtype=np.uint64)
        return NumberedVersion(self, snapshot, reader, NodeNumbers(nodes, as_indices=True))

    # switching to another version -----------------------------------------------------------------

    @property
    def numbers(self) -> NodeNumbers:
        return self.current.numbers

    def prepare(self, diff: SnapshotDiff, reader: ContentReader) -> Prepared:
        """Prepares `switch_version`. `diff.old` must be the current version; `reader` reads the new
        one. Call it in a thread: it takes a second for a million entries. Raises DieselError if
        there are no node numbers left."""
        before, was = self.current.numbers.nodes, diff.unchanged
        is_new = was < 0
        nodes = before[np.where(is_new, 0, was)]
        count = int(np.count_nonzero(is_new))
        nodes[is_new] = np.arange(self._next_node, self._next_node + count, dtype=np.uint64)
        if (after := self._next_node + count) > HIDDEN_ROOT:
            raise DieselError(
                "this mount has no inode numbers left for another version", advice="mount again"
            )
        changed = diff.changed_folders
        # For a folder these columns have its first child and the number of its children
        first, count_of = diff.new.columns.chunk[changed], diff.new.columns.offset[changed]
        first_before = diff.old.columns.chunk[was[changed]]
        children = zip(first_before.tolist(), first.tolist(), count_of.tolist(), strict=True)
        folders = dict(zip(nodes[changed].tolist(), children, strict=True))
        return Prepared(diff, reader, self.current.numbers, NodeNumbers(nodes), after, folders)

    def switch_version(self, prepared: Prepared, reopen: ReaderFactory) -> ContentReader:
        """Makes names lead to the prepared version. `reopen` and the result: as for
        `begin_version`."""
        diff = prepared.diff
        assert diff.old is self.snapshot, "the switch was prepared from another version"
        unchanged = np.flatnonzero(diff.unchanged >= 0)
        self.numbers.move(diff.unchanged[unchanged], prepared.numbers, unchanged)
        new = NumberedVersion(self, diff.new, prepared.reader, prepared.numbers)
        self._next_node = prepared.next_node
        old_reader = self.begin_version(new, reopen)
        self._changed_at_switch.update(dict.fromkeys(prepared.folders, self._switches))
        self._moves[self._switches] = diff.same_path, prepared.folders
        self._moves.pop(self._switches - MOVES_KEPT, None)
        self._changed_at_switch = {
            node: at for node, at in self._changed_at_switch.items() if self._find(node)
        }
        return old_reader

    def take_stale_names(self) -> dict[int, set[bytes]]:
        """The names that the kernel got in folders of retired versions since the last call, by the
        folder's node. The caller must make the kernel drop them, or it keeps the folders and their
        version."""
        taken, self._stale_names = self._stale_names, {}
        return taken

    def entry_of(self, node: int) -> int:
        """The entry of the current version that has a node; -1 if none has."""
        return self.current.numbers.index(node)

    def _find(self, node: int) -> tuple[NumberedVersion, int] | None:
        """The version that answers for a node, and the entry's index in it."""
        index = self.current.numbers.index(node)
        if index >= 0:
            return self.current, index
        for each in self._retired:
            if (index := each.numbers.index(node)) >= 0:
                return each, index
        return None

    def _locate(self, node: int) -> tuple[NumberedVersion, int]:
        """Raises FuseErrno(ESTALE) for an unknown node."""
        found = self._find(node)
        if found is None:
            raise FuseErrno(errno.ESTALE)
        return found

    # the nodes that the kernel knows ----------------------------------------------------------

    def count_lookup(self, node: int) -> None:
        if node >= HIDDEN_ROOT:
            super().count_lookup(node)
        elif node:
            version, index = self._locate(node)
            version.numbers.count_lookup(index)

    def count_listed(self, folder: int, place: int, count: int) -> None:
        """Names in a folder of a retired version become stale."""
        if count:
            version, index = self._locate(folder)
            start = version.snapshot.children(index).start + place
            version.numbers.count_lookups(start, start + count)
            if version is not self.current:
                names = version.snapshot.names(range(start, start + count))
                self._stale_names.setdefault(folder, set()).update(names)

    def forget(self, node: int, count: int) -> None:
        """Ends a retired version if the kernel knows none of its nodes any more."""
        if node >= HIDDEN_ROOT:
            super().forget(node, count)
            return
        found = self._find(node)
        if found is None:
            return
        version, index = found
        version.numbers.forget(index, count)
        if version is not self.current and version.numbers.lookup_total <= 0:
            self.drop_unused_versions()

    def forget_all(self, forgets: Sequence[tuple[int, int]]) -> list[int]:
        """Returns the entries of the current version among the nodes."""
        for node, count in forgets:
            self.forget(node, count)
        entries: Iterable[int] = (self.entry_of(node) for node, _ in forgets)
        return [entry for entry in entries if entry >= 0]

    # names, attributes, listings ------------------------------------------------------------------

    def lookup(self, folder: int, name: bytes) -> Attributes:
        """A folder of a retired version leads to that version's entries."""
        if folder == ROOT and name == HIDDEN_NAME:
            return self.attributes(HIDDEN_ROOT)
        version, index = self._locate(folder)
        found = version.lookup(index + 1, name)
        if version is not self.current:
            self._stale_names.setdefault(folder, set()).add(name)
        return found._replace(node=version.node(found.node - 1)) if found.node else found

    def attributes(self, node: int) -> Attributes:
        if node >= HIDDEN_ROOT:
            return super().attributes(node)
        version, index = self._locate(node)
        return version.attributes(index + 1)._replace(node=node)

    def link_target(self, node: int) -> bytes:
        if node >= HIDDEN_ROOT:
            return super().link_target(node)
        version, index = self._locate(node)
        return version.link_target(index + 1)

    def folder_parent(self, node: int) -> int:
        if node >= HIDDEN_ROOT:
            return super().folder_parent(node)
        version, index = self._locate(node)
        return version.node(version.folder_parent(index + 1) - 1)

    def resume_listing(self, folder: int, offset: int) -> tuple[int, int]:
        """As `Vfs.resume_listing`. A switch may have changed the folder since the listing began."""
        changed = self._changed_at_switch.get(folder, 0)
        begun, place = offset >> SWITCH_SHIFT, offset & _PLACE_MASK
        if begun != changed and place > _DOTS:
            place = self._moved(folder, begun, place - _DOTS) + _DOTS
        return changed << SWITCH_SHIFT, place

    def _moved(self, folder: int, begun: int, place: int) -> int:
        """Returns the child at which a listing goes on that had come to child `place` after the
        switch `begun`: behind the last of the listed children that is still in the folder."""
        for switch in sorted(self._moves):
            same_path, folders = self._moves[switch]
            if switch <= begun or folder not in folders:
                continue
            first_before, first, count = folders[folder]
            old_indices = same_path[first : first + count]
            remaining = np.flatnonzero(old_indices >= 0)
            passed = int(np.searchsorted(old_indices[remaining], first_before + place))
            place = int(remaining[passed - 1]) + 1 if passed else 0
        return place

    def child_columns(self, folder: int, position: int, count: int) -> ChildColumns | None:
        version, index = self._locate(folder)
        found = version.child_columns(index + 1, position, count)
        if found is None:
            return None
        first = int(found.nodes[0]) - 1
        return found._replace(nodes=version.numbers.nodes[first : first + len(found.nodes)])

    # content --------------------------------------------------------------------------------------

    def read_nowait(self, node: int, offset: int, size: int) -> Bytes | None:
        if node >= HIDDEN_ROOT:
            return super().read_nowait(node, offset, size)
        version, index = self._locate(node)
        return version.read_nowait(index + 1, offset, size)

    async def read(self, node: int, offset: int, size: int) -> Bytes:
        """A switch does not affect a waiting read."""
        if node >= HIDDEN_ROOT:
            return await super().read(node, offset, size)
        version, index = self._locate(node)
        with self._counted_wait():
            return await version.read(index + 1, offset, size)

    def _describe_node(self, node: int) -> str:
        found = self._find(node)
        if found is None:
            return f"{self.snapshot.dataset}: node {node}"
        version, index = found
        return version._describe_node(index + 1)
