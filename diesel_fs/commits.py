"""Which chunks may be committed, and what of them a metadata store is given.

Owned here: the checks of a committer (FORMAT.md, section 5: the put window, IDs from the future,
stamps that a client may not choose), and that a chunk which fails one is deleted. Not owned: the
bytes of chunks (`chunk.py`), the fold (the metadata store's). No state; safe from any thread.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from .chunk import Header, parse_header, parse_preamble
from .chunk_id import chunk_id_text, id_seconds, stamp_fields
from .entries import ChunkInfo, Kind
from .errors import BusyError, CorruptError, NotFoundError
from .layout import chunk_object
from .storage.metadata import HOLD_S_MAX, Batch, MetadataStore
from .storage.objects import ObjectStore

PUT_WINDOW_S = 3600
"""How long a chunk may take from its sealing to its commit; how far back recovery must look."""

CLOCK_ALLOWANCE_S = 300
"""How far an ID may be ahead of the committer's clock: all later IDs have to follow it."""


class StaleChunk(BusyError):
    """A chunk was older than the put window at its commit; it has been deleted again."""

    def __init__(self, message: str, paths: Sequence[bytes]) -> None:
        super().__init__(message, advice="put these files again")
        self.paths = paths


@dataclass(frozen=True, slots=True)
class Admitted:
    """A chunk that may be committed, and what that brings: regular files (the last extent
    counts) and their bytes."""

    batch: Batch
    files: int
    content_bytes: int


def admit(
    objects: ObjectStore, meta: MetadataStore, identity: UUID, preamble: bytes, header: bytes
) -> Admitted:
    """A chunk that is durable, from its preamble and stored header, to be committed soon.

    Raises CorruptError for an ID from the future or stamps that a client may not choose,
    StaleChunk for an ID older than the put window (the chunk is deleted).
    """
    front = parse_preamble(preamble, identity=identity)
    parsed = parse_header(front, header)
    try:
        check_age(parsed)
    except StaleChunk as stale:
        _delete_stale(objects, meta, identity, parsed, stale)
    try:
        check_claims(parsed)
    except CorruptError:  # nor may a later recovery take it for an orphan
        objects.delete(chunk_object(identity, front.id))
        raise
    return admitted(parsed)


def check_age(header: Header) -> None:
    """Raise StaleChunk where an ID is older than the put window."""
    chunk = header.preamble.id
    if time.time() - id_seconds(chunk) > PUT_WINDOW_S:
        paths = [header.path(place) for place in range(len(header))]
        raise StaleChunk(f"chunk {chunk_id_text(chunk)} came too late", paths)


def check_claims(header: Header) -> None:
    """Raise CorruptError for an ID from the future, or stamps that a client may not choose."""
    chunk = header.preamble.id
    ahead_s = id_seconds(chunk) - time.time()
    if ahead_s > CLOCK_ALLOWANCE_S:
        raise CorruptError(
            f"chunk {chunk_id_text(chunk)} is from the future by {ahead_s:.0f} s",
            advice="set the clocks of the writers right",
        )
    header.check_stamps(PUT_WINDOW_S)


def admitted(header: Header) -> Admitted:
    """What a chunk brings that has passed the checks."""
    files = header.records["kind"] == Kind.FILE
    for place, part in header.parts.items():
        files[place] = part.number == part.total - 1
    content_bytes = int(header.records["size"][files].sum())
    return Admitted(batch_of(header), int(files.sum()), content_bytes)


def _delete_stale(
    objects: ObjectStore, meta: MetadataStore, identity: UUID, header: Header, stale: StaleChunk
) -> None:
    """Delete a chunk that came after the put window, unless somebody has folded it in."""
    chunk = header.preamble.id
    with meta.hold(identity, HOLD_S_MAX):  # nobody folds it in between the two
        try:
            meta.holes(identity, chunk)
        except NotFoundError:
            objects.delete(chunk_object(identity, chunk))
        else:
            return
    raise stale


def batch_of(header: Header, *, stored: bool = False) -> Batch:
    """What a metadata store commits of a chunk.

    `stored`: of one that was found in the object store, where purge may have written it; its
    stamps may be foreign, but are never greater than its ID (FORMAT.md, Z6 and Z12). Raises
    CorruptError.
    """
    own = header.preamble.id
    if stored and any(stamp_fields(value)[0] > own for value in header.stamps.values()):
        raise CorruptError(f"chunk {chunk_id_text(own)} has a stamp greater than its ID")
    rows, stamps = header.rows()
    return Batch(
        chunk=ChunkInfo(own, header.preamble.object_bytes),
        uploaded_ns=time.time_ns(),
        rows=rows,
        stamps=stamps,
    )
