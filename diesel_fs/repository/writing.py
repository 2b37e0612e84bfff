"""One writer's session on a dataset, and storing one chunk under a free ID.

Subclasses of `WriteSession`, for local and remote repositories, check and commit chunks. A session
belongs to one thread at a time.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Set
from uuid import UUID

from ..errors import ObjectExists
from ..format.chunk import ChunkHeader
from ..format.chunk_builder import ChunkBuilder
from ..format.chunk_id import IdSource
from ..format.entries import Bytes, ChunkId, check_path, split
from ..format.object_names import chunk_object
from ..format.snapshot.reader import Snapshot
from ..storage.metadata.store import DatasetHead, chunks_digest
from ..storage.objects.store import ObjectStore
from .catalog import DatasetInfo
from .validation import ValidatedChunk

_TOMBSTONE_BODY_BYTES = 4 << 20  # limit for the paths in a chunk of tombstones
_STORE_TRIES = 8  # two writers draw the same ID about once in 2^32 chunks


class WriteSession(ABC):
    """One writer on one dataset: it makes IDs, commits chunks, deletes paths.

    Commits survive any crash once `finish` has acknowledged them. After a deletion of the dataset
    every method raises ConflictError.
    """

    def __init__(
        self,
        info: DatasetInfo,
        objects: ObjectStore,
        ids: IdSource,
        load_view: Callable[[DatasetInfo], Snapshot],
    ) -> None:
        """`load_view` returns the snapshot of the version in `info.head`."""
        assert info.head is not None
        self.name = info.name
        self.identity = info.identity
        self.objects = objects
        self.folders: set[bytes] = set()
        """The folders to which this session has committed something."""
        self._started_at = info.head
        self._info = info
        self._ids = ids
        self._load_view = load_view
        self._view: Snapshot | None = None
        self._committed_ids: dict[ChunkId, None] = {}  # in the order of their commits

    @abstractmethod
    def validate_chunk(self, preamble: bytes, header: bytes) -> ValidatedChunk:
        """Check a durable chunk, given its preamble and its stored header.

        Raises CorruptError for an ID from the future or for stamps that a writer may not choose,
        StaleChunk for an ID older than the put window.
        """

    @abstractmethod
    def commit_all(self, chunks: Iterable[ValidatedChunk]) -> int:
        """Commit all chunks or none. Idempotent; returns the version."""

    @abstractmethod
    def finish(self) -> int:
        """Acknowledge: all commits are durable and their snapshot is published, even if the
        metadata store has lost some meanwhile. Returns the version."""

    @abstractmethod
    def _head(self) -> DatasetHead:
        """Raises ConflictError after a deletion."""

    @property
    def version(self) -> int:
        """The dataset's version when the session began."""
        return self._started_at.version

    @property
    def view(self) -> Snapshot:
        """The dataset as it was when the session began."""
        if self._view is None:
            self._view = self._load_view(self._info)
        return self._view

    def use_view(self, view: Snapshot) -> None:
        """Ignores a snapshot of another version."""
        if view.identity == self.identity and view.version == self.version:
            self._view = view

    def new_id(self, writer_of: ChunkId | None = None) -> ChunkId:
        """The ID for a chunk that the caller seals now; `writer_of` as in `IdSource.next`."""
        return self._ids.next(self._head().newest, writer_of)

    def commit(self, preamble: bytes, header: bytes) -> ValidatedChunk:
        chunk = self.validate_chunk(preamble, header)
        self.commit_all([chunk])
        return chunk

    def delete(self, paths: Sequence[bytes]) -> int:
        """Write and commit tombstones for `paths`. Repeatable; returns the number of paths."""
        builder = ChunkBuilder(self.identity, _TOMBSTONE_BODY_BYTES, "none")
        for path in paths:
            builder.add_tombstone(split(check_path(path)))
            if builder.full:
                self._store(builder)
        if len(builder):
            self._store(builder)
        return len(paths)

    @property
    def committed_chunks(self) -> Set[ChunkId]:
        """A live view of the chunks that this session has committed."""
        return self._committed_ids.keys()

    def others_committed(self) -> bool:
        """Whether other writers or purges have committed since this session began."""
        return self._head().digest != chunks_digest(self._committed_ids, self._started_at.digest)

    def _remember(self, chunks: Iterable[ValidatedChunk]) -> None:
        for chunk in chunks:
            self._committed_ids[chunk.batch.chunk.id] = None
            self.folders.update(chunk.batch.rows.folders)

    def _store(self, builder: ChunkBuilder) -> None:
        _, parts, _ = seal_and_store(builder, self.objects, self.identity, self.new_id)
        self.commit(bytes(parts[0]), bytes(parts[1]))
        builder.clear()


def seal_and_store(
    builder: ChunkBuilder,
    objects: ObjectStore,
    identity: UUID,
    new_id: Callable[[], ChunkId],
) -> tuple[ChunkId, Sequence[Bytes], ChunkHeader]:
    """Seal a chunk and make it durable; returns its ID, its parts (preamble, stored header, bodies)
    and its parsed header. If another writer has drawn the same ID, the chunk is sealed again. The
    parts are valid until the builder is cleared. Raises ObjectStoreError."""
    for tries_left in reversed(range(_STORE_TRIES)):
        chunk = new_id()
        parts, header = builder.seal(chunk)
        try:
            objects.put(chunk_object(identity, chunk), parts)
        except ObjectExists:
            if not tries_left:
                raise
        else:
            return chunk, parts, header
    raise AssertionError("the last try returns or raises")
