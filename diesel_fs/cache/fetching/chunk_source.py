"""The chunks of a snapshot as objects of a store: their names, their bytes, and the second attempt
to read bytes that did not match their checksum.
"""

from collections import Counter

from ...errors import CorruptError, ObjectMissing
from ...format.chunk import decode
from ...format.chunk_id import chunk_id_text
from ...format.entries import Bytes
from ...format.object_names import chunk_object
from ...format.snapshot.reader import Extent, Snapshot
from ...names import shown
from ...storage.objects.store import ObjectStore, new_buffer


class ChunkNames(dict[int, str]):
    """The names of the objects of a snapshot's chunks, by the chunks' numbers. Each is made when it
    is first used, which takes 10 us."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._identity, self._ids = snapshot.identity, snapshot.chunk_ids

    def __missing__(self, chunk: int) -> str:
        name = self[chunk] = chunk_object(self._identity, self._ids[chunk])
        return name


class ChunkSource:
    """The chunks of one snapshot in a store. Safe from any thread."""

    def __init__(self, snapshot: Snapshot, objects: ObjectStore, counts: Counter[str]) -> None:
        """Adds to these in `counts`: `fetches`, `fetched_bytes`; `healed` (extents whose second
        reading was sound) and `damaged` (whose second reading was not)."""
        self._snapshot = snapshot
        self._reads = objects.fast_reads
        self._counts = counts
        self._names = ChunkNames(snapshot)

    def name(self, chunk: int) -> str:
        return self._names[chunk]

    def read(self, chunk: int, offset: int, size: int, *, fresh: bool = False) -> memoryview:
        """Stored bytes, in memory of their own. `fresh`: bypasses every cached copy. Raises
        ObjectMissing for a lost chunk, NoSpaceError, ObjectStoreError."""
        buffer: Bytes
        try:
            if fresh:
                buffer = new_buffer(size)
                self._reads.read_uncached(self.name(chunk), offset, buffer)
            else:
                buffer = self._reads.read(self.name(chunk), offset, size)
        except ObjectMissing as error:
            raise self.lost_chunk_error(chunk, error) from error
        self._counts["fetches"] += 1
        self._counts["fetched_bytes"] += size
        return memoryview(buffer).toreadonly()

    def repair(self, index: int, extent: Extent) -> tuple[memoryview, memoryview]:
        """Read an extent again after a mismatch of its checksum. Returns the stored bytes and the
        content. Raises CorruptError if the store's own bytes are damaged, and the errors of
        `read`."""
        try:
            raw = self.read(extent.chunk, extent.offset, extent.stored, fresh=True)
            content = decode(raw, extent.codec, extent.size, extent.checksum)
        except CorruptError as error:
            self._counts["damaged"] += 1
            dataset = self._snapshot.dataset
            chunk = chunk_id_text(self._snapshot.chunk_ids[extent.chunk])
            raise CorruptError(
                f"{dataset}/{shown(self._snapshot.path(index))} is damaged in chunk {chunk}:"
                f" {error.message}",
                offset=extent.offset,
                advice=f"run `dlcmd verify {dataset}`",
            ) from error
        self._counts["healed"] += 1
        return raw, content

    def lost_chunk_error(self, chunk: int, error: ObjectMissing) -> ObjectMissing:
        dataset = self._snapshot.dataset
        return ObjectMissing(
            f"chunk {chunk_id_text(self._snapshot.chunk_ids[chunk])} of {dataset!r} is lost:"
            f" {error.message}",
            advice=f"`dlcmd verify {dataset}` names the files in it; put them again to heal them",
        )
