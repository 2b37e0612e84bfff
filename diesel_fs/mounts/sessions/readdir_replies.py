"""Replies to READDIRPLUS: the names and attributes of a folder's children, in the kernel's format.

The bytes of many children (a *part*) are made at once from the snapshot's columns, without a Python
object for each; a reply is a slice of a part. The offset after child k is k + 3, since `.` and `..`
come first. One thread uses a `ReaddirReplies`.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...format.entries import Bytes
from ..tree.attributes import FOREVER_S, Listing
from ..tree.vfs import BLOCK_BYTES, ChildColumns, Vfs
from . import protocol

PART_ENTRIES = 4096
"""Children of one part: 0.8 MB, made in 2 ms. A reply waits for one part at most."""

PARTS_KEPT = 16
"""13 MB, so that many readers can list large folders at once."""

_ENTRY = np.dtype(
    [
        ("node", "<u8"), ("generation", "<u8"), ("name_valid_s", "<u8"), ("valid_s", "<u8"),
        ("valid_ns", "<u8"),
        ("ino", "<u8"), ("size", "<u8"), ("blocks", "<u8"),
        ("atime_s", "<i8"), ("mtime_s", "<i8"), ("ctime_s", "<i8"),
        ("atime_ns", "<u4"), ("mtime_ns", "<u4"), ("ctime_ns", "<u4"),
        ("mode", "<u4"), ("links", "<u4"), ("uid", "<u4"), ("gid", "<u4"),
        ("rdev", "<u4"), ("block_bytes", "<u4"), ("flags", "<u4"),
        ("listed_ino", "<u8"), ("next", "<u8"), ("name_bytes", "<u4"), ("type", "<u4"),
    ]
)  # fmt: skip
assert _ENTRY.itemsize == protocol.ENTRY_OUT.size + protocol.DIRENT.size

DOTS = 2


class _Part(NamedTuple):
    """Consecutive children: child i is `content[bounds[i]:bounds[i + 1]]`."""

    bounds: Sequence[int]
    content: memoryview


class ReaddirReplies:
    def __init__(self, vfs: Vfs) -> None:
        self._vfs = vfs
        self._common = protocol.CommonAttributes(vfs.owner.uid, vfs.owner.gid, BLOCK_BYTES)
        self._parts: OrderedDict[tuple[int, int, int, int], _Part | None] = OrderedDict()

    def reply(self, folder: int, offset: int, room_bytes: int) -> Sequence[Bytes]:
        """The children from `offset` on that fit in `room_bytes`, in pieces; empty at the end.

        By the reply the kernel gets a reference to each node except those of `.` and `..`, so these
        references are counted here. Raises FuseErrno.
        """
        base, offset = self._vfs.resume_listing(folder, offset)
        dots = self._dots(folder, offset, base) if offset < DOTS else b""
        number, within = divmod(max(offset - DOTS, 0), PART_ENTRIES)
        part = self._part(folder, base, number)
        if part is None or within >= len(part.bounds) - 1:
            return (dots,)
        start = part.bounds[within]
        end = bisect_right(part.bounds, start + room_bytes - len(dots)) - 1
        self._vfs.count_listed(folder, number * PART_ENTRIES + within, end - within)
        return dots, part.content[start : part.bounds[end]]

    def _part(self, folder: int, base: int, number: int) -> _Part | None:
        # Another version may have other modes and times of an unchanged folder's children
        key = folder, base, number, self._vfs.snapshot.version
        if key in self._parts:
            self._parts.move_to_end(key)
            return self._parts[key]
        first = number * PART_ENTRIES
        found = self._vfs.child_columns(folder, first, PART_ENTRIES)
        made = self._parts[key] = None if found is None else self._make_part(found, base + first)
        if len(self._parts) > PARTS_KEPT:
            self._parts.popitem(last=False)
        return made

    def _make_part(self, found: ChildColumns, first: int) -> _Part:
        count = len(found.mode)
        fixed = np.zeros(count, _ENTRY)
        fixed["node"] = fixed["ino"] = fixed["listed_ino"] = found.nodes
        fixed["name_valid_s"] = fixed["valid_s"] = int(FOREVER_S)
        fixed["size"] = found.size
        fixed["blocks"] = (found.size + np.uint64(511)) >> np.uint64(9)
        seconds, nanoseconds = np.divmod(found.mtime_ns, 1_000_000_000)
        for time in ("atime", "mtime", "ctime"):
            fixed[f"{time}_s"], fixed[f"{time}_ns"] = seconds, nanoseconds
        fixed["mode"], fixed["links"] = found.mode, 1
        fixed["uid"], fixed["gid"] = self._vfs.owner.uid, self._vfs.owner.gid
        fixed["block_bytes"] = BLOCK_BYTES
        fixed["next"] = np.arange(first + DOTS + 1, first + DOTS + 1 + count)
        lengths = np.diff(found.name_start)
        fixed["name_bytes"], fixed["type"] = lengths, found.mode >> 12
        return _joined(fixed, found, lengths)

    def _dots(self, folder: int, offset: int, base: int = 0) -> bytes:
        names = ((b".", folder), (b"..", self._vfs.folder_parent(folder)))
        return b"".join(
            bytes(protocol.ENTRY_OUT.size) + protocol.dirent(node, base + at + 1, 4, name)
            for at, (name, node) in enumerate(names)
            if at >= offset
        )

    def hidden_reply(self, found: Listing, folder: int, offset: int, room_bytes: int) -> bytes:
        """For `.diesel` and the folders below it; `found` has all their entries."""
        reply = [self._dots(folder, offset)] if offset < DOTS else []
        room_bytes -= sum(map(len, reply))
        for at in range(max(offset - DOTS, 0), len(found.names)):
            name, node, mode = found.names[at], found.nodes[at], found.modes[at]
            entry = protocol.entry_answer(
                node, mode, found.sizes[at], found.mtimes_ns[at], int(found.name_valid_s),
                int(FOREVER_S), self._common,
            ) + protocol.dirent(node, at + DOTS + 1, mode >> 12, name)  # fmt: skip
            room_bytes -= len(entry)
            if room_bytes < 0:
                break
            self._vfs.count_lookup(node)
            reply.append(entry)
        return b"".join(reply)


def _joined(
    fixed: npt.NDArray[np.void], found: ChildColumns, lengths: npt.NDArray[np.int64]
) -> _Part:
    padded = (lengths + 7) & ~7
    bounds = np.zeros(len(fixed) + 1, np.int64)
    np.cumsum(padded + fixed.itemsize, out=bounds[1:])
    content = np.empty(int(bounds[-1]), np.uint8)
    head = fixed.view(np.uint8).reshape(len(fixed), fixed.itemsize)
    for width in np.unique(padded).tolist():  # all names of one padded width at once
        which = np.flatnonzero(padded == width)
        letters = found.names[
            np.minimum(found.name_start[which][:, None] + np.arange(width), len(found.names) - 1)
        ]
        letters[np.arange(width) >= lengths[which][:, None]] = 0
        rows = np.concatenate((head[which], letters), axis=1)
        if len(which) == len(fixed):
            content = rows.reshape(-1)
        else:
            content[bounds[which][:, None] + np.arange(rows.shape[1])] = rows
    return _Part(bounds.tolist(), content.data)
