"""Checks whether a chunk may be committed (FORMAT.md, section 5).

A chunk's ID has the time of its sealing, so a writer's wrong clock could put its entries behind or
before all others. A chunk that fails a check is deleted, so that no recovery takes it for an
orphan. Any thread.
"""

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from uuid import UUID

from ..errors import BusyError, CorruptError, NotFoundError, ObjectStoreRefused
from ..format.chunk import ChunkHeader, parse_header, parse_preamble
from ..format.chunk_id import LOWEST, chunk_id_text, id_seconds, stamp_fields
from ..format.entries import ChunkId, ChunkInfo, Kind
from ..format.object_names import chunk_object
from ..storage.metadata.store import COMMIT_LOCK_S_MAX, CommitBatch, MetadataStore
from ..storage.objects.store import ObjectStore

PUT_WINDOW_S = 3600
"""The longest time from a chunk's sealing to its commit. A recovery also reads chunks that are
older than its `since_s` by this."""

CLOCK_ALLOWANCE_S = 300
"""The most that an ID may be ahead of the metadata store's clock. It is small because all later IDs
must be greater than this ID."""

FOLLOW_ALLOWANCE_S = 60
"""The most that an ID may be ahead of the newest committed ID if that one is ahead of the clock: a
writer that follows another one needs a second or two."""


class StoreClock:
    """The time by the metadata store's clock. Between reads of that clock, this host's monotonic
    clock counts on, so changes of the wall clock have no effect. Thread-safe."""

    def __init__(self, read_clock: Callable[[], float]) -> None:
        """`read_clock` returns seconds since 1970, as `MetadataStore.now_s`."""
        self._read_clock = read_clock
        # The store's time less this host's monotonic time
        self._offset_s: float | None = None

    def now_s(self, *, refresh: bool = False) -> float:
        """`refresh` reads the store's clock. Raises MetadataError."""
        offset_s = self._offset_s
        if refresh or offset_s is None:
            began_s = time.monotonic()  # before the read: a slow answer puts our time ahead
            offset_s = self._offset_s = self._read_clock() - began_s
        return offset_s + time.monotonic()

    def check_local_clock(self) -> None:
        """Raise ObjectStoreRefused if this host's clock is ahead: the IDs of all other writers
        would have to follow its IDs."""
        own_s, right_s = time.time(), self.now_s(refresh=True)
        if own_s > right_s + CLOCK_ALLOWANCE_S:
            right = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(right_s))
            raise ObjectStoreRefused(
                f"the clock of this host is {own_s - right_s:.0f} s ahead of the repository's,"
                f" by which it is {right}",
                advice="nothing has been written; set the clock right",
            )


class StaleChunk(BusyError):
    """A chunk was older than the put window at its commit, and has been deleted. `paths` are those
    of its entries."""

    def __init__(self, message: str, paths: Sequence[bytes]) -> None:
        super().__init__(message, advice="put these files again")
        self.paths = paths


@dataclass(frozen=True, slots=True)
class ValidatedChunk:
    """A chunk that may be committed, and the number and bytes of the files that end in it."""

    batch: CommitBatch
    files: int
    content_bytes: int


def validate_chunk(
    objects: ObjectStore,
    meta: MetadataStore,
    clock: StoreClock,
    identity: UUID,
    preamble: bytes,
    header: bytes,
) -> ValidatedChunk:
    """Check a durable chunk, given its preamble and its stored header. Raises CorruptError for an
    ID from the future or stamps that a client may not choose, StaleChunk for an ID older than the
    put window. The chunk has then been deleted."""
    front = parse_preamble(preamble, identity=identity)
    parsed = parse_header(front, header)
    try:
        check_age(parsed)
    except StaleChunk as stale:
        _delete_stale(objects, meta, identity, parsed, stale)
    try:
        check_claims(parsed, meta, clock)
    except CorruptError:  # a later recovery must not take the chunk for an orphan
        objects.delete(chunk_object(identity, front.id))
        raise
    return as_validated(parsed)


def check_age(header: ChunkHeader) -> None:
    chunk = header.preamble.id
    if time.time() - id_seconds(chunk) > PUT_WINDOW_S:
        paths = [header.path(place) for place in range(len(header))]
        raise StaleChunk(f"chunk {chunk_id_text(chunk)} came too late", paths)


def check_claims(header: ChunkHeader, meta: MetadataStore, clock: StoreClock) -> None:
    """Raise CorruptError for an ID from the future (unless it follows a committed one), or stamps
    that a client may not choose."""
    chunk, limit_s = header.preamble.id, clock.now_s() + CLOCK_ALLOWANCE_S
    if id_seconds(chunk) > limit_s:  # only then the stores are read
        identity = header.preamble.identity
        newest = next((m.newest for m in meta.heads() if m.identity == identity), LOWEST)
        now_s = clock.now_s(refresh=True)
        limit_s = max(now_s + CLOCK_ALLOWANCE_S, id_seconds(newest) + FOLLOW_ALLOWANCE_S)
        if id_seconds(chunk) > limit_s:
            raise CorruptError(
                f"chunk {chunk_id_text(chunk)} is from the future"
                f" by {id_seconds(chunk) - now_s:.0f} s",
                advice="set the clocks of the writers right",
            )
    header.check_stamps(PUT_WINDOW_S)


def future_ids_note(chunks: Collection[ChunkId], clock: StoreClock) -> str:
    """Empty if no ID is too far ahead of the clock."""
    limit_s = clock.now_s() + CLOCK_ALLOWANCE_S
    ahead = [chunk for chunk in chunks if id_seconds(chunk) > limit_s]
    if not ahead:
        return ""
    ahead_s = math.ceil(id_seconds(max(ahead)) - clock.now_s())
    return (
        f"{len(ahead)} chunk{'s' * (len(ahead) > 1)} with an ID from the future, by {ahead_s} s at"
        " most: the clock of a writer was wrong; later puts follow it, and `recover --since` always"
        " reads these chunks"
    )


def as_validated(header: ChunkHeader) -> ValidatedChunk:
    """A file of several extents counts in the chunk of its last extent."""
    files = header.records["kind"] == Kind.FILE
    for place, part in header.extents.items():
        files[place] = part.number == part.total - 1
    content_bytes = int(header.records["size"][files].sum())
    return ValidatedChunk(batch_of(header), int(files.sum()), content_bytes)


def _delete_stale(
    objects: ObjectStore,
    meta: MetadataStore,
    identity: UUID,
    header: ChunkHeader,
    stale: StaleChunk,
) -> None:
    """Delete a late chunk and raise `stale`; do nothing if a recovery has committed the chunk."""
    chunk = header.preamble.id
    # The lock keeps a recovery from committing the chunk between the check and the deletion
    with meta.lock_commits(identity, COMMIT_LOCK_S_MAX):
        try:
            meta.holes(identity, chunk)
        except NotFoundError:
            objects.delete(chunk_object(identity, chunk))
        else:
            return
    raise stale


def batch_of(header: ChunkHeader, *, stored: bool = False) -> CommitBatch:
    """The part of a chunk that a metadata store commits.

    `stored`: the chunk was found in the object store, and a purge may have written it. Then its
    stamps may be those of other chunks, but not greater than its ID (FORMAT.md, Z6 and Z12). Raises
    CorruptError.
    """
    own = header.preamble.id
    if stored and any(stamp_fields(value)[0] > own for value in header.stamps.values()):
        raise CorruptError(f"chunk {chunk_id_text(own)} has a stamp greater than its ID")
    rows, stamps = header.rows()
    return CommitBatch(
        chunk=ChunkInfo(own, header.preamble.object_bytes),
        uploaded_ns=time.time_ns(),
        rows=rows,
        stamps=stamps,
    )
