"""What kept versions and leases pin: which chunks may go, and the end of a whole dataset.

Owned here: the rule of FORMAT.md, section 6, "When a chunk may go", 2 and 3. Not owned: which
chunks are empty (the metadata store), which versions are kept (`versions.py`), when anything is
deleted (`housekeeping.py`). Blocking; one thread.
"""

import logging
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

import numpy as np
import numpy.typing as npt

from ..errors import FormatError, ObjectMissing
from ..format.entries import ChunkId, Kind
from ..format.object_names import (
    chunk_of_object,
    chunk_prefix,
    dataset_object,
    dataset_prefix,
    lease_prefix,
    snapshot_prefix,
    version_of_object,
)
from ..format.snapshot import layout as layout
from ..format.snapshot.reader import Indices, Snapshot
from ..storage.objects.store import ObjectStore
from .leases import EVERY_VERSION, is_abandoned, leased_versions
from .versions import VersionStore

log = logging.getLogger("diesel.pins")


class Usage(NamedTuple):
    """What of a chunk the files of a version are: places, and bytes of bodies."""

    places: int
    stored_bytes: int


def _file_parts(view: Snapshot) -> tuple[Indices, npt.NDArray[np.float64]]:
    """Chunk number and stored bytes of all that files of a version are in, shadowed ones too."""
    columns, shadowed = view.columns, view.columns.shadowed
    numbers, stored = [columns.extents["chunk"]], [columns.extents["stored"]]
    for flags, chunk, length in (
        (columns.flags, columns.chunk, columns.stored),
        (shadowed["flags"], shadowed["chunk"], shadowed["stored"]),
    ):
        is_plain = (layout.kinds(flags) == Kind.FILE) & ((flags & layout.MANY) == 0)
        numbers.append(chunk[is_plain])
        stored.append(length[is_plain])
    return np.concatenate(numbers).astype(np.int64), np.concatenate(stored).astype(np.float64)


def used_chunks(view: Snapshot) -> frozenset[ChunkId]:
    """The chunks that the files of a version are in."""
    numbers, _ = _file_parts(view)
    return frozenset(view.chunk_ids[number] for number in np.unique(numbers).tolist())


def chunk_usage(view: Snapshot) -> dict[ChunkId, Usage]:
    """What of each chunk in a version's table its files are."""
    numbers, stored = _file_parts(view)
    places = np.bincount(numbers, minlength=view.chunk_count)
    sums = np.bincount(numbers, weights=stored, minlength=view.chunk_count)  # exact up to 2^53
    rows = map(Usage, places.tolist(), map(int, sums.tolist()))
    return dict(zip(view.chunk_ids, rows, strict=True))


class DeletableChunks:
    """Which of some candidates, all of them empty by now, nobody needs any more.

    `planned_version`: a version that is only planned; they are empty in it, too.
    """

    def __init__(
        self,
        shelf: VersionStore,
        identity: UUID,
        candidates: Iterable[ChunkId],
        planned_version: int = 0,
    ) -> None:
        self._versions = shelf
        self._identity = identity
        self._candidates = frozenset(candidates)
        self._known = {planned_version: (self._candidates, frozenset[ChunkId]())}

    def unreferenced(
        self, versions: Mapping[int, int], leased: Collection[int], before_us: int
    ) -> frozenset[ChunkId]:
        """Those that may go, by the versions that are there (ascending, and since when) and those
        that are leased, where readers from before `before_us` have had their time. Raises
        FormatError where a version cannot be read, and ObjectMissing where it has gone since:
        nobody knows what it pins.
        """
        oldest_in_use = {max((v for v, at_us in versions.items() if at_us <= before_us), default=0)}
        for version in leased:
            if version not in versions:
                oldest_in_use.add(max((v for v in versions if v <= version), default=0))
        if 0 in oldest_in_use or EVERY_VERSION in leased:
            return frozenset()
        left = self._candidates
        for version in versions:
            table, used = self._of(version)
            left -= used
            if version in oldest_in_use:
                left &= table
        return left

    def _of(self, version: int) -> tuple[frozenset[ChunkId], frozenset[ChunkId]]:
        """Of the candidates: those that a version knows, and those that its entries are in."""
        if version not in self._known:
            view = self._versions.load_without_copy(self._identity, version)
            table = self._candidates.intersection(view.chunk_ids)
            self._known[version] = table, table & used_chunks(view)
        return self._known[version]


@dataclass(frozen=True, slots=True)
class Deletion:
    """What became of a deleted dataset: objects that are removed, and that readers still hold."""

    removed: int
    left: int

    def tell_left(self, name: str) -> None:
        """Name in the log what is left of the dataset of this name, if anything."""
        if self.left:
            log.warning(
                "%s: %d objects are left, since somebody is still reading it; "
                "`dlcmd delete-dataset` or `dlcmd purge` removes them later",
                *(name, self.left),
            )


def remove_dataset(objects: ObjectStore, shelf: VersionStore, identity: UUID) -> Deletion:
    """Remove the objects of a dataset that is marked as deleted; what leases pin is left, and what
    somebody is writing.

    Repeatable: the object with its name goes last, by which the rest is found.
    """
    leased = leased_versions(objects, identity, time.time())
    kept, everything = _pinned(shelf, identity, leased)
    removed = left = 0
    for name in list(objects.names(dataset_prefix(identity))):
        if name == dataset_object(identity):
            continue
        chunk = chunk_of_object(name) if name.startswith(chunk_prefix(identity)) else None
        is_pinned = chunk is not None and (everything or chunk in kept)
        if name.startswith(snapshot_prefix(identity)):
            is_pinned = everything or version_of_object(name) in leased
        if leased and name.startswith(lease_prefix(identity)):
            continue
        if is_pinned:
            left += 1
        else:
            objects.delete(name)
            removed += 1
    for leftover in objects.leftovers(dataset_prefix(identity)):
        if is_abandoned(leftover, time.time(), 0):
            objects.discard(leftover)
        else:
            left += 1
    if not left and not leased:
        objects.delete(dataset_object(identity))
    return Deletion(removed, left)


def _pinned(
    shelf: VersionStore, identity: UUID, leased: Collection[int]
) -> tuple[frozenset[ChunkId], bool]:
    """The chunks that leases pin, and whether that may be all of them."""
    found = frozenset[ChunkId]()
    if EVERY_VERSION in leased:
        return found, True
    for version in leased:
        try:
            view = shelf.load_without_copy(identity, version)
        except (FormatError, ObjectMissing):
            return found, True
        found |= used_chunks(view)
    return found, False
