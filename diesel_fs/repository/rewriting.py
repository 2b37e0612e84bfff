"""Copying what is left in chunks into new ones: stamps and stored bytes stay as they are.

Owned here: what of a chunk is copied, its checks, and that a new chunk is durable before it is
committed. Not owned: which chunks (`housekeeping.py`). Blocking; one thread.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import replace

from ..errors import CorruptError, ObjectExists
from ..format.chunk import damaged_places, parse_header, parse_preamble
from ..format.chunk_builder import ChunkBuilder
from ..format.chunk_id import chunk_id_text
from ..format.entries import ChunkId
from ..format.object_names import chunk_object
from ..names import shown
from .local import LocalRepository, LocalWriteSession
from .validation import batch_of

log = logging.getLogger("diesel.housekeeping")


class Rewriter:
    """Fills new chunks with what is left in old ones; `finish` writes the last.

    `before_commit` may raise: then the chunk just written is not committed, and nothing is lost.
    """

    def __init__(
        self,
        repository: LocalRepository,
        session: LocalWriteSession,
        chunk_bytes: int,
        before_commit: Callable[[], None],
    ) -> None:
        self.written = 0
        self.copied_bytes = 0
        self._repository = repository
        self._session = session
        self._about_to_commit = before_commit
        self._builder = ChunkBuilder(session.identity, chunk_bytes, "none")

    def copy(self, chunk: ChunkId, dropped: Collection[int]) -> None:
        """Copy the entries of a chunk, except those at the places `dropped`.

        Raises CorruptError where one of them is damaged; then none has been copied.
        """
        identity = self._session.identity
        data = memoryview(self._repository.objects.get(chunk_object(identity, chunk)))
        preamble = parse_preamble(data, identity=identity, id=chunk, object_bytes=len(data))
        start = preamble.body_start - preamble.header_stored
        header = parse_header(preamble, data[start : preamble.body_start])
        if header.faults:
            raise CorruptError("it has entries that are skipped")
        for place in damaged_places(header, data[preamble.body_start :]):
            if place not in dropped:
                raise CorruptError(f"the bytes of {shown(header.path(place))} are damaged")
        for place in range(len(header)):
            if place in dropped:
                continue
            record = header.records[place]
            at, size = int(record["offset"]), int(record["stored"])
            self._builder.add_copy(header, place, data[at : at + size] if size else data[:0])
            self.copied_bytes += size
            if self._builder.full:
                self._write()

    def finish(self) -> None:
        """Write what is left."""
        if len(self._builder):
            self._write()

    def _write(self) -> None:
        """Durable first, then committed as `moved`: it takes places of equal stamp, and no more."""
        identity = self._session.identity
        while True:
            chunk = self._session.new_id()
            parts, header = self._builder.seal(chunk)
            try:
                self._repository.objects.put(chunk_object(identity, chunk), parts)
            except ObjectExists:
                continue  # another writer drew the same ID
            break
        self._about_to_commit()
        self._repository.meta.commit(
            identity, replace(batch_of(header, stored=True), by_purge=True)
        )
        log.debug("%d entries have moved into %s", len(header), chunk_id_text(chunk))
        self.written += 1
        self._builder.clear()
