"""Writes orders as lists of paths: the names of such lists, their sizes, and their bytes.

A mount offers the lists as files (`mounts/tree/dot_diesel.py`), and `dlcmd shuffle` prints them.
Millions of paths are joined without a Python object for each. Pure; safe from any thread.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..errors import CorruptError, UsageError
from ..format.snapshot.reader import ROOT_INDEX, Indices, Snapshot
from ..names import shown
from .computed import ComputedOrder
from .shuffle import GROUP_SIZE_DEFAULT, SEED_MAX, WORLD_MAX

_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)
_BATCH_FILES = 16_384  # paths joined at once: their bytes stay in the processor's cache
_NEWLINE, _NUL = ord("\n"), 0


@dataclass(frozen=True, slots=True)
class ListName:
    """The parameters of a rank's chunk-wise order in an epoch, written as
    `seed=1,epoch=2,group=100,rank=0,world=4`."""

    seed: int
    epoch: int
    group: int = GROUP_SIZE_DEFAULT  # chunks in a group
    rank: int = 0
    world: int = 1

    @classmethod
    def parse(cls, text: bytes) -> "ListName | None":
        """None for unknown or repeated keys, and numbers out of range."""
        values: dict[str, int] = {}
        for part in text.decode("ascii", "replace").split(","):
            key, _, number = part.partition("=")
            if key not in _KEYS or key in values or not _NUMBER.fullmatch(number):
                return None
            values[key] = int(number)
        if "seed" not in values or "epoch" not in values:
            return None
        name = cls(**values)
        fits = max(name.seed, name.epoch, name.group) <= SEED_MAX and name.world <= WORLD_MAX
        return name if fits and name.group > 0 and name.rank < name.world else None

    @property
    def computed(self) -> ComputedOrder:
        return ComputedOrder(self.seed, self.epoch, self.group, self.rank, self.world)

    def order(self, snapshot: Snapshot) -> Indices:
        """The files of the list, as entries of the snapshot."""
        return self.computed.entries(snapshot)

    def __str__(self) -> str:
        return ",".join(f"{key}={getattr(self, key)}" for key in _KEYS)


_KEYS = ("seed", "epoch", "group", "rank", "world")


class PathLists:
    """Makes the lists of one snapshot. With millions of files every method takes long, so call it
    in a worker thread."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def size(self, name: ListName) -> int:
        """In bytes. If the list has one rank, the size does not depend on the order, so no order is
        computed."""
        if name.world == 1:
            return self._total
        files = name.order(self._snapshot)
        return self._list_bytes(files)

    def text(self, name: ListName, *, nul: bool) -> npt.NDArray[np.uint8]:
        """The bytes of the paths, each ended by a newline or NUL. Raises UsageError for a path with
        a newline in a list of lines."""
        files = name.order(self._snapshot)
        if not nul:
            self._refuse_newlines(files)
        return join_paths(self._snapshot, files, _NUL if nul else _NEWLINE)

    @cached_property
    def _total(self) -> int:
        return self._list_bytes(self._snapshot.files())

    def _list_bytes(self, files: Indices) -> int:
        return int(path_bytes(self._snapshot)[files].sum()) + len(files)

    def _refuse_newlines(self, files: Indices) -> None:
        columns = self._snapshot.columns
        at = np.flatnonzero(columns.names == _NEWLINE)
        if not len(at):
            return
        name_ends = columns.name_start[1:].astype(np.int64)
        entries = np.searchsorted(name_ends, at, side="right")
        has_newline = np.zeros(len(self._snapshot), np.bool_)
        has_newline[entries[entries < len(has_newline)]] = True
        for start, end in _levels(self._snapshot):
            has_newline[start:end] |= has_newline[columns.parent[start:end]]
        bad = files[has_newline[files]]
        if len(bad):
            raise UsageError(
                f"{shown(self._snapshot.path(int(bad[0])))} has a newline in its path",
                advice="the lists that end in 0 (filelist0, shuffle0/) take any name",
            )


def path_bytes(snapshot: Snapshot) -> npt.NDArray[np.int64]:
    """The length of the path of each entry."""
    columns = snapshot.columns
    bounds = columns.name_start.astype(np.int64)
    length = bounds[1:] - bounds[:-1]
    for start, end in _levels(snapshot):
        folder = columns.parent[start:end]
        length[start:end] += np.where(folder == ROOT_INDEX, 0, length[folder] + 1)
    return length


def _levels(snapshot: Snapshot) -> Sequence[tuple[int, int]]:
    """For each depth below the root: the range of its entries, which a snapshot stores by depth.
    Raises CorruptError if they are out of order."""
    parent = snapshot.columns.parent
    levels, start = [], 1
    end_above = ROOT_INDEX + 1
    while start < len(snapshot):
        end = int(np.searchsorted(parent, end_above, side="left"))
        if end <= start or int(parent[start]) >= start:
            raise CorruptError(f"damaged snapshot of {snapshot.dataset}: entries out of order")
        levels.append((start, end))
        end_above, start = end, end
    return levels


def join_paths(snapshot: Snapshot, files: Indices, end: int) -> npt.NDArray[np.uint8]:
    """The paths of `files` (entries), each followed by the byte `end`. Raises CorruptError."""
    columns = snapshot.columns
    parents, folder_of_file = np.unique(columns.parent[files], return_inverse=True)
    prefixes = [snapshot.path(int(each)) + b"/" if each else b"" for each in parents.tolist()]
    # One array of bytes to copy from: the paths of the folders, the byte `end`, and all names.
    folder_bytes = np.fromiter(map(len, prefixes), np.int64, len(prefixes))
    folder_start = np.cumsum(folder_bytes) - folder_bytes
    before = np.frombuffer(b"".join(prefixes) + bytes([end]), np.uint8)
    end_at = len(before) - 1
    source = np.concatenate((before, columns.names))
    starts = columns.name_start
    total = int((path_bytes(snapshot)[files]).sum()) + len(files)
    content = np.empty(total, np.uint8)
    done = 0
    for first in range(0, len(files), _BATCH_FILES):
        part = files[first : first + _BATCH_FILES]
        folder = folder_of_file[first : first + _BATCH_FILES]
        name_start = starts[part].astype(np.int64)
        # Three ranges of `source` for each file: its folder, its name, and `end`.
        begin = np.empty((len(part), 3), np.int64)
        begin[:, 0], begin[:, 1] = folder_start[folder], name_start + len(before)
        begin[:, 2] = end_at
        size = np.empty((len(part), 3), np.int64)
        size[:, 0] = folder_bytes[folder]
        size[:, 1] = starts[part + 1].astype(np.int64) - name_start
        size[:, 2] = 1
        sizes = size.reshape(-1)
        ends = np.cumsum(sizes)
        count = int(ends[-1])
        index = np.repeat(begin.reshape(-1) - (ends - sizes), sizes)
        index += np.arange(count)
        np.take(source, index, out=content[done : done + count], mode="clip")
        done += count
    if done != total:
        raise CorruptError(f"damaged snapshot of {snapshot.dataset}: paths and names differ")
    content.flags.writeable = False
    return content
