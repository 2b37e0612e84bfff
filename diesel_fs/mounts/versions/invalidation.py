"""What the kernel is told when a mount goes over to another version of its dataset.

Owned here: which names and folders have to be looked up anew, and telling so. Not owned: which
entries are unchanged (`format/snapshot/diff.py`), when this happens (`watcher.py`).

Names of folders that are still there: those of entries that are gone or changed (their dentries
lead to old nodes), and of new ones (the kernel may remember that there was no such name). A folder
that itself is gone takes all below it along, but for what is in use: the names there go when its
last user goes, and with them the old version. Then the folders: their cached listings and times.
Nothing else: unchanged files and folders keep dentry, inode and pages. Open files keep their inode,
which is the old node.

Concurrency: what tells waits for locks that others hold while they wait for the mount's server; so
never in the server's loop. Telling can be stopped between two names.
"""

import errno
import os
from collections.abc import Collection, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from ...format.entries import Kind
from ...format.snapshot import layout as layout
from ...format.snapshot.diff import SnapshotDiff
from ...format.snapshot.reader import Indices, Snapshot
from ..sessions import protocol

NAMES_PER_STEP = 1024
"""So many are told without a look at anything else: 5 ms."""

Nodes = npt.NDArray[np.uint64]

UNMOUNTED_ERRNOS = (errno.ENODEV, errno.ENOTCONN, errno.ECONNABORTED)
"""What the connection says when the mount has gone."""


class SwitchInvalidation:
    """What is to be told of one switch; each piece once, in order."""

    def __init__(self, found: SnapshotDiff, nodes_before: Nodes, nodes: Nodes) -> None:
        """The nodes are those of the entries of `found.old` and `found.new`."""
        self._found = found
        self._nodes_before = nodes_before
        self._nodes = nodes
        self._folders = np.union1d(found.changed_folders, found.folders_with_new_attributes)

    def send(self, device: int) -> Iterator[None]:
        """Tells, and yields now and then. Raises OSError where the mount has gone."""
        gone, fresh = self._changed_names()
        for folder in self._folders.tolist():
            both = {*gone.names(folder), *fresh.names(folder)}
            yield from invalidate_folder(device, int(self._nodes[folder]), both)
        old = self._found.old
        kinds = layout.kinds(old.columns.flags)
        for folder in np.flatnonzero(
            self._found.removed_or_changed & (kinds == Kind.FOLDER)
        ).tolist():
            names = old.names(old.children(folder))
            yield from invalidate_folder(device, int(self._nodes_before[folder]), names)

    def _changed_names(self) -> "tuple[_NamesByFolder, _NamesByFolder]":
        """What is gone and what is new, in folders that are still there."""
        found = self._found
        now = np.full(len(found.old), -1, np.int64)
        there = np.flatnonzero(found.unchanged >= 0)
        now[found.unchanged[there]] = there
        gone = np.flatnonzero(found.removed_or_changed)
        above = now[found.old.columns.parent[gone]]
        fresh = np.flatnonzero(found.unchanged < 0)
        above_fresh = found.new.columns.parent[fresh].astype(np.int64)
        above_fresh[found.unchanged[above_fresh] < 0] = -1
        return _NamesByFolder(found.old, gone, above), _NamesByFolder(found.new, fresh, above_fresh)


class _NamesByFolder:
    """Entries of one version, by the folder that they are in (its index in the new one, or -1)."""

    def __init__(self, snapshot: Snapshot, entries: Indices, folders: Indices) -> None:
        order = np.argsort(folders, kind="stable")
        self._snapshot = snapshot
        self._entries, self._folders = entries[order], folders[order]

    def names(self, folder: int) -> list[bytes]:
        start = int(np.searchsorted(self._folders, folder))
        end = int(np.searchsorted(self._folders, folder, "right"))
        return self._snapshot.names(self._entries[start:end])


def invalidate_folder(device: int, node: int, names: Collection[bytes]) -> Iterator[None]:
    """Tells that a folder and these names in it are to be looked up anew; yields after each piece.

    Raises OSError where the mount has gone.
    """
    yield
    known = _notify(device, protocol.invalidate_node(node))
    if not known or not names:
        return  # in a folder that it does not know it knows no names, either
    for count, name in enumerate(names):
        _notify(device, protocol.invalidate_name(node, name))
        if count % NAMES_PER_STEP == NAMES_PER_STEP - 1:
            yield
    # Those took the folder's lock: no listing of old is under way any more.
    _notify(device, protocol.invalidate_node(node))


def invalidate_folders(device: int, folders: Mapping[int, Collection[bytes]]) -> Iterator[None]:
    """The same of several, by their nodes."""
    for node, names in folders.items():
        yield from invalidate_folder(device, node, names)


def _notify(device: int, message: bytes) -> bool:
    """Whether the kernel knows what it is told of."""
    try:
        os.write(device, message)
    except OSError as error:
        if error.errno in UNMOUNTED_ERRNOS:
            raise
        return error.errno != errno.ENOENT
    return True
