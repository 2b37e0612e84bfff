"""The requests that change datasets: begin, put a chunk, finish, delete, lease, record an archive.

A put is answered after the chunk was checked, is durable in the object store, and is committed to
the metadata store. A chunk is checked before it is stored (`repository/validation.py`), and deleted
if it can never be committed. Chunks of one dataset that arrive together are committed together
(group commit).

A put may be repeated: a chunk that the store has with the same bytes is committed again, which
changes nothing. So a client without an answer sends the chunk again, perhaps to another server.
"""

import dataclasses
import logging
import re
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from uuid import UUID

import trio

from diesel_fs import metrics
from diesel_fs.errors import (
    BusyError,
    CorruptError,
    DieselError,
    FormatError,
    MetadataBehind,
    NoSuchDataset,
    ObjectExists,
    PermissionDenied,
    UsageError,
)
from diesel_fs.format.chunk import (
    ENTRIES_MAX,
    ChunkHeader,
    damaged_places,
    parse_header,
    parse_preamble,
)
from diesel_fs.format.chunk_id import chunk_id_text
from diesel_fs.format.entries import ChunkId, Codec
from diesel_fs.format.object_names import chunk_object
from diesel_fs.metrics import MetricCells
from diesel_fs.names import shown
from diesel_fs.net.messages import Fields, Message
from diesel_fs.net.singleflight import GroupCommit, ThreadSingleFlight
from diesel_fs.remote.values import info_message
from diesel_fs.repository.leases import LEASE_S, write_lease_for
from diesel_fs.repository.local import LocalRepository
from diesel_fs.repository.provenance import ArchiveRecord
from diesel_fs.repository.retention import Deletion
from diesel_fs.repository.stored import LocalWriteSession
from diesel_fs.repository.validation import (
    StaleChunk,
    ValidatedChunk,
    as_validated,
    check_age,
    check_claims,
)

from .directory import DatasetRef, Directory, hide_store_address, no_such_dataset
from .dispatcher import Reply, Request
from .head_cache import HeadCache
from .queries import QueryHandlers

log = logging.getLogger("diesel.server")

_TOKEN = re.compile("[0-9a-f]{32}")  # a lease's name, which a client draws

LEASES_MAX = 4096
"""Leases of one user on one dataset, in this worker: a mount on each node of the largest task."""

DECODED_BYTES_MAX = 64 << 20
"""For a check, larger files are decompressed one at a time: the connections' budget of memory
counts only compressed bytes."""

_STORE_THREADS = 16
_COMMIT_THREADS = 8
_OTHER_THREADS = 4
_ID_BYTES = 16


class UpdateHandlers:
    """Methods are called after the user's role was checked."""

    def __init__(
        self,
        repository: LocalRepository,
        directory: Directory,
        queries: QueryHandlers,
        heads: HeadCache,
        cells: MetricCells | None = None,
    ) -> None:
        self._repository = repository
        self._directory = directory
        self._queries = queries
        self._heads = heads
        self._cells = cells or metrics.private_cells()
        self._store_threads = trio.CapacityLimiter(_STORE_THREADS)
        self._threads = trio.CapacityLimiter(_OTHER_THREADS)
        self._commits = GroupCommit(
            self._commit, trio.CapacityLimiter(_COMMIT_THREADS), ENTRIES_MAX, _may_be_one_chunk
        )
        self._beginning = ThreadSingleFlight(self._begin, self._threads)
        self._finishing = ThreadSingleFlight(self._finish, self._threads)
        # By user and dataset: the end of each lease (monotonic time) by its token
        self._leases: dict[tuple[str, UUID], dict[str, float]] = {}

    # Datasets

    async def begin(self, request: Request, name: str, *, may_create: bool) -> Reply:
        """Creates a missing dataset if the request asks for that and the user may do it."""
        create = Fields(request.message, "begin").flag("create", default=False)
        try:
            await self._beginning.run((name, create and may_create))
        except NoSuchDataset:
            if not create or may_create:
                raise no_such_dataset(name) from None
            raise PermissionDenied(
                f"user {request.account.name!r} may not create dataset {name!r}",
                advice="ask an administrator to create it",
            ) from None
        info = await self._queries.info(name)
        head: Message = {"info": info_message(info), "now_s": time.time()}
        if not Fields(request.message, "begin").flag("unreadable", default=False):
            return Reply(head)
        paths = await trio.to_thread.run_sync(
            self._repository.unreadable_paths, name, limiter=self._threads
        )
        return Reply(head, [path + b"\0" for path in paths])

    def _begin(self, wanted: tuple[str, bool]) -> None:
        name, create = wanted
        self._heads.reopen()  # the metadata store may have been away at the server's start
        self._repository.begin(name, create=create)

    async def delete_dataset(self, request: Request, name: str) -> Reply:
        try:
            with hide_store_address(name):
                done = await trio.to_thread.run_sync(self._delete, name, limiter=self._threads)
        finally:
            self._directory.forget(name)
        return Reply({"removed": done.removed, "left": done.left})

    def _delete(self, name: str) -> Deletion:
        self._heads.reopen()
        return self._repository.delete_dataset(name)

    # Chunks

    async def put(self, request: Request, known: DatasetRef) -> Reply:
        header, chunk = await trio.to_thread.run_sync(
            self._store, known.identity, request.payload, limiter=self._store_threads
        )
        try:
            check_age(header)  # storing may have taken long
            version = await self._commits.add(known.identity, chunk, len(header))
        except (StaleChunk, NoSuchDataset):
            discard = partial(self._discard_uncommitted, known, header, request.payload)
            await trio.to_thread.run_sync(discard, limiter=self._store_threads)
            raise
        self._cells.add("diesel_chunks_accepted_total")
        self._cells.add("diesel_uploaded_bytes_total", amount=len(request.payload))
        return Reply({"version": version})

    def _store(self, identity: UUID, payload: memoryview) -> tuple[ChunkHeader, ValidatedChunk]:
        """Raises FormatError; ObjectExists if another chunk has this ID, or if the chunk is too
        old."""
        header = _check_chunk(self._repository, identity, payload)
        chunk = as_validated(header)
        name = chunk_object(identity, header.preamble.id)
        try:
            self._repository.objects.put(name, [payload])
        except ObjectExists:
            if self._repository.objects.get(name) != payload:
                raise ObjectExists(f"chunk {chunk_id_text(header.preamble.id)} is there") from None
        return header, chunk

    def _discard_uncommitted(
        self, known: DatasetRef, header: ChunkHeader, payload: memoryview
    ) -> None:
        """Deletes a stored chunk that could not be committed. It stays if only the metadata store
        has lost the dataset: a recovery will commit it. Always raises the error for the client."""
        chunk, start = header.preamble.id, header.preamble.body_start
        stored = bytes(payload[start - header.preamble.header_stored : start])
        front = bytes(payload[: start - header.preamble.header_stored])
        if self._repository.catalogue.is_deleted(known.identity):
            self._repository.objects.delete(chunk_object(known.identity, chunk))
            self._directory.forget(known.name)
            raise no_such_dataset(str(known.identity))
        try:
            # Deletes the chunk if it is too late to be committed
            self._repository.validate_chunk(known.identity, front, stored)
        except StaleChunk as stale:
            raise _too_old(stale) from None
        except NoSuchDataset:
            pass
        raise _dataset_lost(known.name)

    def _commit(self, identity: UUID, chunks: Sequence[ValidatedChunk]) -> int:
        version = self._repository.commit_all(identity, chunks)
        self._cells.add("diesel_commits_total")
        return version

    async def finish(self, request: Request, known: DatasetRef) -> Reply:
        """Commits again a writer's chunks that the metadata store has lost, and publishes the
        version's snapshot."""
        fields = Fields(request.message, "finish")
        packed = fields.octets("chunks") if "chunks" in fields else b""
        if len(packed) % _ID_BYTES:
            raise UsageError("finish: chunks are IDs of 16 bytes")
        chunks = [ChunkId(packed[at : at + _ID_BYTES]) for at in range(0, len(packed), _ID_BYTES)]
        work = partial(self._recommit, known, chunks)
        await trio.to_thread.run_sync(work, limiter=self._threads)
        while True:
            version = await self._finishing.run(known)
            if not await trio.to_thread.run_sync(work, limiter=self._threads):
                return Reply({"version": version})

    def _recommit(self, known: DatasetRef, chunks: Sequence[ChunkId]) -> int:
        try:
            return self._repository.recommit_missing(known.identity, chunks)
        except NoSuchDataset:
            raise _dataset_lost(known.name) from None

    async def lease(self, request: Request, known: DatasetRef) -> Reply:
        """Keeps a version for a reading client, for the requested seconds (0: no longer)."""
        fields = Fields(request.message, "lease")
        token = fields.text("lease")
        if not _TOKEN.fullmatch(token):  # another name could overwrite leases of others
            fields.bad("lease", "it is 32 hexadecimal digits")
        version, seconds = fields.integer("version"), fields.integer("seconds")
        self._count_lease(request.account.name, known.identity, token, seconds)
        objects = self._repository.objects
        write = partial(write_lease_for, objects, known.identity, token, version, seconds)
        await trio.to_thread.run_sync(write, limiter=self._store_threads)
        return Reply()

    async def record_archive(self, request: Request, known: DatasetRef) -> Reply:
        record = ArchiveRecord.unpack(Fields(request.message, "record_archive").octets("record"))
        account = request.account
        # Other users trust only records without a writer, which an administrator has made
        record = dataclasses.replace(record, writer="" if account.admin else account.name)
        write = partial(self._repository.record_archive, known.identity, record)
        await trio.to_thread.run_sync(write, limiter=self._store_threads)
        return Reply()

    def _count_lease(self, user: str, identity: UUID, token: str, seconds: int) -> None:
        """Raises BusyError for more than LEASES_MAX: each lease is an object in the store."""
        leases, now_s = self._leases.get((user, identity), {}), time.monotonic()
        if len(leases) >= LEASES_MAX and token not in leases:
            leases = {each: until_s for each, until_s in leases.items() if until_s > now_s}
            if len(leases) >= LEASES_MAX:
                raise BusyError(f"{user!r} has {LEASES_MAX} leases on this dataset")
        if seconds:
            leases[token] = now_s + min(seconds, LEASE_S)
        else:
            leases.pop(token, None)
        self._leases[user, identity] = leases

    def _finish(self, known: DatasetRef) -> int:
        info = self._repository.dataset(known.name)
        if info.identity != known.identity:
            raise no_such_dataset(str(known.identity))
        if info.head is None:
            raise _dataset_lost(known.name)
        return LocalWriteSession(self._repository, info).finish()


def _check_chunk(repository: LocalRepository, identity: UUID, payload: memoryview) -> ChunkHeader:
    """Checks every byte. Raises FormatError; ObjectExists if the client must send the chunk again
    under another ID."""
    preamble = parse_preamble(payload, identity=identity, object_bytes=len(payload))
    start = preamble.body_start
    header = parse_header(preamble, payload[start - preamble.header_stored : start])
    try:
        check_age(header)
    except StaleChunk as stale:
        raise _too_old(stale) from None
    check_claims(header, repository.meta, repository.clock)
    lz4 = header.records["codec"] == Codec.LZ4
    large = int(header.records["size"][lz4].max(initial=0)) > DECODED_BYTES_MAX
    with _large_file_lock if large else nullcontext():
        bad = damaged_places(header, payload[start:])
    if bad:
        raise CorruptError(
            f"chunk {chunk_id_text(preamble.id)}: the bytes of {shown(header.path(bad[0]))} were"
            " damaged on their way",
            advice="put again",
        )
    return header


_large_file_lock = threading.Lock()


def _too_old(stale: StaleChunk) -> ObjectExists:
    return ObjectExists(stale.message, advice="put it again under another ID")


def _dataset_lost(name: str) -> MetadataBehind:
    return MetadataBehind(
        f"the metadata store has lost dataset {name!r}", advice=f"run `dlcmd recover {name}`"
    )


def _may_be_one_chunk(error: Exception) -> bool:
    """Whether one chunk of a group may be the cause: then the others are committed without it."""
    return isinstance(error, FormatError | UsageError) or not isinstance(error, DieselError)
