"""Which chunks of a dataset its metadata store ought to know, and does not.

Owned here: the choice among the chunks that are durable. Not owned: folding them in
(`repository.py`). No state; safe from any thread.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from .chunk_id import id_seconds
from .commits import CLOCK_ALLOWANCE_S, PUT_WINDOW_S
from .entries import ChunkId
from .errors import DieselError, ObjectMissing
from .layout import chunk_object
from .leases import purge_is_under_way
from .snapshots import SnapshotShelf
from .storage.metadata import DIGEST_MODULUS, Marker, MetadataStore, chunk_digest
from .storage.objects import ObjectStore


def missing_chunks(
    objects: ObjectStore,
    meta: MetadataStore,
    shelf: SnapshotShelf,
    marker: Marker,
    names: Callable[[], Iterable[ChunkId]],
    *,
    in_doubt: bool,
) -> Iterator[ChunkId]:
    """Chunks that are durable but unknown, and that no put under way can own: those older than the
    put window, and those that a published snapshot names. `names` lists all that are durable.

    While a purge is under way only the latter: it has forgotten what it is about to delete.
    `in_doubt`: the store may have come back older; then the snapshot is asked by all means.
    """
    identity, count, digest = marker.identity, 0, 0
    for chunk in names():
        count, digest = count + 1, digest + chunk_digest(chunk)
    if (count, digest % DIGEST_MODULUS) == (marker.chunks, marker.digest):
        return
    known = {record.id for record in meta.chunks(identity)}
    acknowledged: set[ChunkId] = set()
    if in_doubt:
        acknowledged.update(_acknowledged(shelf, marker))
    elif shelf.newest(identity) > marker.version:
        with suppress(DieselError):
            acknowledged.update(_acknowledged(shelf, marker))
    # Asked after `known`: what was forgotten by then is deleted by now, or the purge goes on
    is_purged = purge_is_under_way(objects, identity)
    limit = 0.0 if is_purged else time.time() - PUT_WINDOW_S
    for chunk in names():
        if chunk not in known and (
            chunk in acknowledged or _sealed_s(objects, marker, chunk) < limit
        ):
            yield chunk


def _sealed_s(objects: ObjectStore, marker: Marker, chunk: ChunkId) -> float:
    """When a chunk was sealed: not later than it was written, whatever its ID says."""
    if id_seconds(chunk) < time.time() + CLOCK_ALLOWANCE_S:
        return id_seconds(chunk)
    return objects.stat(chunk_object(marker.identity, chunk)).modified_ns / 1e9


def _acknowledged(shelf: SnapshotShelf, marker: Marker) -> Iterable[ChunkId]:
    """The chunks that the newest snapshot names."""
    newest = shelf.newest(marker.identity)
    try:
        return shelf.load(marker.identity, newest).chunk_ids if newest else ()
    except ObjectMissing:  # two publishes went by between looking and loading
        return shelf.load(marker.identity, shelf.newest(marker.identity)).chunk_ids
