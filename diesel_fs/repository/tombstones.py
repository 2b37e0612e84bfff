"""Which tombstones nothing needs any more (FORMAT.md, section 6, "When a chunk may go").

Owned here: the proof that no entry can come back once a tombstone is dropped. Not owned: dropping
it (the metadata store does, with the chunk that holds it). Blocking; one thread.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple
from uuid import UUID

import numpy as np

from ..errors import DieselError, ObjectMissing
from ..format.chunk import Header
from ..format.chunk_id import chunk_id_text, id_seconds, stamp_fields
from ..format.entries import ChunkId, Kind, Stamp
from ..format.object_names import chunk_object
from ..storage.objects.store import ObjectStore
from .leases import LEASE_S
from .validation import CLOCK_ALLOWANCE_S, PUT_WINDOW_S

log = logging.getLogger("diesel.housekeeping")

AGE_S = PUT_WINDOW_S + CLOCK_ALLOWANCE_S + LEASE_S
"""So old a tombstone must be: whatever was sealed before it and comes later is refused."""

ReadHeader = Callable[[ChunkId], Header]


class ActiveTombstone(NamedTuple):
    """A tombstone that stands."""

    stamp: Stamp
    chunk: ChunkId
    place: int


def active_tombstones(
    header: Header, holes: Collection[int]
) -> Iterator[tuple[bytes, ActiveTombstone]]:
    """The tombstones in a chunk that are no holes, by path."""
    for place in np.flatnonzero(header.records["kind"] == Kind.TOMBSTONE).tolist():
        if place not in holes:
            yield (
                header.path(place),
                ActiveTombstone(header.stamp(place), header.preamble.id, place),
            )


def old_enough(
    tombstones: Mapping[bytes, ActiveTombstone], began_s: float
) -> dict[bytes, ActiveTombstone]:
    """Those that nothing on its way can be older than; `began_s` is from before the listing."""
    limit_s = began_s - AGE_S
    return {
        path: each
        for path, each in tombstones.items()
        if id_seconds(stamp_fields(each.stamp)[0]) < limit_s
    }


def droppable_tombstones(
    tombstones: Mapping[bytes, ActiveTombstone],
    suspects: Iterable[ChunkId],
    read_header: ReadHeader,
) -> dict[ChunkId, set[int]]:
    """By chunk, the places of the tombstones (`old_enough`) that have nothing left to hide.

    `suspects` are all chunks that may hold an older entry: those with holes, and those that are
    not known. Where one of them cannot be read, none is due.
    """
    left = dict(tombstones)
    for chunk in suspects if left else ():
        try:
            header = read_header(chunk)
        except ObjectMissing:
            continue
        except DieselError as error:
            log.info("no tombstone is dropped: %s: %s", chunk_id_text(chunk), error.message)
            return {}
        for place in range(len(header)):
            path = header.path(place)
            found = left.get(path)
            if found is not None and found.chunk != chunk and header.stamp(place) < found.stamp:
                del left[path]
    by_chunk: dict[ChunkId, set[int]] = {}
    for each in left.values():
        by_chunk.setdefault(each.chunk, set()).add(each.place)
    return by_chunk


def all_gone(objects: ObjectStore, identity: UUID, chunks: Iterable[ChunkId]) -> bool:
    """Whether chunks that were forgotten are not in the store, asked for one by one."""
    for chunk in chunks:
        try:
            objects.stat(chunk_object(identity, chunk))
        except ObjectMissing:
            continue
        return False
    return True
