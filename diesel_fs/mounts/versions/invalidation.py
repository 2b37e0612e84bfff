"""Makes the kernel look up changed names again after a mount has switched to another version.

The kernel keeps names, listings and attributes. After a switch it must drop:

- in folders that still exist, the names of entries that are gone or changed, which lead to old
  nodes, and the names of new entries, which the kernel may remember as missing;
- in folders that are gone, all names: the old version stays as long as the kernel has one. The
  kernel keeps a name in use until its last user ends;
- the listings and attributes of all these folders.

Everything else stays; an open file keeps its inode, the old node.

Concurrency: the sender of a notification waits for locks that readers hold while they wait for the
mount's server. So the prefetch worker or a thread sends them, never the server's loop. Sending can
stop between two names.
"""

import errno
import os
from collections.abc import Collection, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from ...format.entries import Kind
from ...format.snapshot import layout
from ...format.snapshot.diff import SnapshotDiff
from ...format.snapshot.reader import Indices, Snapshot
from ..sessions import protocol

NAMES_PER_STEP = 1024
"""After this many names, which take 5 ms, the sender may do something else."""

Nodes = npt.NDArray[np.uint64]

UNMOUNTED_ERRNOS = (errno.ENODEV, errno.ENOTCONN, errno.ECONNABORTED)
"""Writes to the connection fail with these when the mount has ended."""


def invalidate_after_switch(
    device: int, diff: SnapshotDiff, old_nodes: Nodes, new_nodes: Nodes
) -> Iterator[None]:
    """Sends all notifications of one switch, and yields after each piece. `device` is a descriptor
    of the connection. `old_nodes` is by entry of `diff.old`, `new_nodes` of `diff.new`. Raises
    OSError if the mount has ended."""
    removed, new = _changed_names(diff)
    for folder in np.union1d(diff.changed_folders, diff.folders_with_new_attributes).tolist():
        names = {*removed.names(folder), *new.names(folder)}
        yield from invalidate_folder(device, int(new_nodes[folder]), names)
    is_folder = layout.kinds(diff.old.columns.flags) == Kind.FOLDER
    for folder in np.flatnonzero(diff.removed_or_changed & is_folder).tolist():
        children = diff.old.names(diff.old.children(folder))
        yield from invalidate_folder(device, int(old_nodes[folder]), children)


def _changed_names(diff: SnapshotDiff) -> "tuple[_NamesByFolder, _NamesByFolder]":
    """The names, in folders that still exist, of entries that are gone or changed, and of new
    ones."""
    new_index = np.full(len(diff.old), -1, np.int64)
    unchanged = np.flatnonzero(diff.unchanged >= 0)
    new_index[diff.unchanged[unchanged]] = unchanged
    removed = np.flatnonzero(diff.removed_or_changed)
    folders_of_removed = new_index[diff.old.columns.parent[removed]]
    new = np.flatnonzero(diff.unchanged < 0)
    folders_of_new = diff.new.columns.parent[new].astype(np.int64)
    folders_of_new[diff.unchanged[folders_of_new] < 0] = -1
    return (
        _NamesByFolder(diff.old, removed, folders_of_removed),
        _NamesByFolder(diff.new, new, folders_of_new),
    )


class _NamesByFolder:
    """Names of entries of one version, by their folder's index in the new version (-1: the folder
    is gone or new)."""

    def __init__(self, snapshot: Snapshot, entries: Indices, folders: Indices) -> None:
        order = np.argsort(folders, kind="stable")
        self._snapshot = snapshot
        self._entries, self._folders = entries[order], folders[order]

    def names(self, folder: int) -> list[bytes]:
        start = int(np.searchsorted(self._folders, folder))
        end = int(np.searchsorted(self._folders, folder, "right"))
        return self._snapshot.names(self._entries[start:end])


def invalidate_folder(device: int, node: int, names: Collection[bytes]) -> Iterator[None]:
    """Makes the kernel drop the listing of a folder and these names in it. Yields after each piece.
    Raises OSError if the mount has ended."""
    yield
    known = _notify(device, protocol.invalidate_node(node))
    if not known or not names:
        return  # it knows no names there
    for count, name in enumerate(names):
        _notify(device, protocol.invalidate_name(node, name))
        if count % NAMES_PER_STEP == NAMES_PER_STEP - 1:
            yield
    # For each name the kernel took the folder's lock, so earlier listings have ended. Drop what
    # they have put into the cache
    _notify(device, protocol.invalidate_node(node))


def invalidate_folders(device: int, folders: Mapping[int, Collection[bytes]]) -> Iterator[None]:
    """`invalidate_folder` for several folders, given by their nodes."""
    for node, names in folders.items():
        yield from invalidate_folder(device, node, names)


def _notify(device: int, message: bytes) -> bool:
    """Returns whether the kernel knew the node or name. Raises OSError if the mount has ended."""
    try:
        os.write(device, message)
    except OSError as error:
        if error.errno in UNMOUNTED_ERRNOS:
            raise
        return error.errno != errno.ENOENT
    return True
