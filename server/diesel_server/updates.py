"""What clients change: chunks that they put, datasets that they begin, finish and delete.

Owned here: that nothing is stored which a committer would refuse, that an answer comes after the
commit, and that commits of one dataset which come together go together. Not owned: which chunks may
be committed (`repository/validation.py`), the order of writing (`repository.py`), who may write
(`directory.py`).

A put may be repeated: a chunk that is there with the same bytes is committed again, which changes
nothing. So a client sends it to another server where it got no answer.
"""

import logging
import re
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from uuid import UUID

import trio

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
from diesel_fs.format.chunk import ENTRIES_MAX, Header, damaged_places, parse_header, parse_preamble
from diesel_fs.format.chunk_id import chunk_id_text
from diesel_fs.format.entries import ChunkId, Codec
from diesel_fs.format.object_names import chunk_object
from diesel_fs.names import shown
from diesel_fs.net.messages import Fields, Message
from diesel_fs.net.singleflight import GroupCommit, ThreadSingleFlight
from diesel_fs.remote.values import info_message
from diesel_fs.repository.leases import LEASE_S, write_lease_for
from diesel_fs.repository.local import LocalRepository
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
from .head_cache import HeadCache
from .queries import QueryHandlers
from .requests import Reply, Request

log = logging.getLogger("diesel.server")

_TOKEN = re.compile("[0-9a-f]{32}")
LEASES_MAX = 4096
"""Of one user on one dataset, in this worker: a mount on each node of the largest task."""

DECODED_BYTES_MAX = 64 << 20
"""What a body may decode to beside others; larger ones are checked one at a time: only what is sent
has been counted."""

_STORE_THREADS = 16
_COMMIT_THREADS = 8
_FINISH_THREADS = 4
_ID_BYTES = 16


class UpdateHandlers:
    """The requests that change datasets."""

    def __init__(
        self,
        repository: LocalRepository,
        directory: Directory,
        asking: QueryHandlers,
        markers: HeadCache,
    ) -> None:
        self._repository = repository
        self._directory = directory
        self._queries = asking
        self._heads = markers
        self._storing = trio.CapacityLimiter(_STORE_THREADS)
        self._threads = trio.CapacityLimiter(_FINISH_THREADS)
        self._commits = GroupCommit(
            self._commit, trio.CapacityLimiter(_COMMIT_THREADS), ENTRIES_MAX, _may_be_one_chunk
        )
        self._beginning = ThreadSingleFlight(self._begin, self._threads)
        self._finishing = ThreadSingleFlight(self._finish, self._threads)
        self._leases: dict[tuple[str, UUID], dict[str, float]] = {}  # when each ends

    # Datasets

    async def begin(self, request: Request, name: str, *, may_create: bool) -> Reply:
        """A writer begins; who may makes the dataset where it is missing."""
        create = Fields(request.message, "begin").flag("create", default=False)
        try:
            await self._beginning.run((name, create and may_create))
        except NoSuchDataset:
            if not create or may_create:
                raise no_such_dataset(name) from None
            raise PermissionDenied(
                f"{request.account.name} may not make dataset {name!r}",
                advice="an administrator makes it",
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
        self._heads.reopen()
        self._repository.begin(name, create=create)

    async def delete_dataset(self, request: Request, name: str) -> Reply:
        """A dataset goes for ever."""
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
        """A chunk: checked, durable, committed."""
        header, chunk = await trio.to_thread.run_sync(
            self._store, known.identity, request.payload, limiter=self._storing
        )
        try:
            check_age(header)  # the store may have taken its time
            version = await self._commits.add(known.identity, chunk, len(header))
        except (StaleChunk, NoSuchDataset):
            take_back = partial(self._discard_uncommitted, known, header, request.payload)
            await trio.to_thread.run_sync(take_back, limiter=self._storing)
            raise
        return Reply({"version": version})

    def _store(self, identity: UUID, payload: memoryview) -> tuple[Header, ValidatedChunk]:
        """Check a chunk and make it durable. Raises FormatError, ObjectExists."""
        header = _checked(self._repository, identity, payload)
        chunk = as_validated(header)
        name = chunk_object(identity, header.preamble.id)
        try:
            self._repository.objects.put(name, [payload])
        except ObjectExists:
            if self._repository.objects.get(name) != payload:
                raise ObjectExists(f"chunk {chunk_id_text(header.preamble.id)} is there") from None
        return header, chunk

    def _discard_uncommitted(self, known: DatasetRef, header: Header, payload: memoryview) -> None:
        """A durable chunk cannot be committed: no recovery shall find it. Raises why."""
        chunk, start = header.preamble.id, header.preamble.body_start
        stored = bytes(payload[start - header.preamble.header_stored : start])
        front = bytes(payload[: start - header.preamble.header_stored])
        if self._repository.catalogue.is_deleted(known.identity):
            self._repository.objects.delete(chunk_object(known.identity, chunk))
            self._directory.forget(known.name)
            raise no_such_dataset(str(known.identity))
        try:
            self._repository.validate_chunk(
                known.identity, front, stored
            )  # deletes one that is late
        except StaleChunk as stale:
            raise _late(stale) from None
        except NoSuchDataset:
            pass
        raise _lost(known.name)

    def _commit(self, identity: UUID, chunks: Sequence[ValidatedChunk]) -> int:
        return self._repository.commit_all(identity, chunks)

    async def finish(self, request: Request, known: DatasetRef) -> Reply:
        """All that was committed survives, and its snapshot lies in the store."""
        fields = Fields(request.message, "finish")
        packed = fields.octets("chunks") if "chunks" in fields else b""
        if len(packed) % _ID_BYTES:
            raise UsageError("finish: chunks are IDs of 16 bytes")
        chunks = [ChunkId(packed[at : at + _ID_BYTES]) for at in range(0, len(packed), _ID_BYTES)]
        work = partial(self._commit_lost, known, chunks)
        await trio.to_thread.run_sync(work, limiter=self._threads)
        while True:
            version = await self._finishing.run(known)
            if not await trio.to_thread.run_sync(work, limiter=self._threads):
                return Reply({"version": version})

    def _commit_lost(self, known: DatasetRef, chunks: Sequence[ChunkId]) -> int:
        """Commit again what the metadata store has lost of a writer's acknowledged chunks."""
        try:
            return self._repository.recommit_missing(known.identity, chunks)
        except NoSuchDataset:
            raise _lost(known.name) from None

    async def lease(self, request: Request, known: DatasetRef) -> Reply:
        """That a client is reading a version; or that it has ended."""
        fields = Fields(request.message, "lease")
        token = fields.text("lease")
        if not _TOKEN.fullmatch(token):  # others are not a client's
            fields.bad("lease", "it is 32 hexadecimal digits")
        version, seconds = fields.integer("version"), fields.integer("seconds")
        self._count_lease(request.account.name, known.identity, token, seconds)
        objects = self._repository.objects
        give = partial(write_lease_for, objects, known.identity, token, version, seconds)
        await trio.to_thread.run_sync(give, limiter=self._storing)
        return Reply()

    def _count_lease(self, user: str, identity: UUID, token: str, seconds: int) -> None:
        """Each is an object in the store. Raises BusyError for one too many."""
        mine, now_s = self._leases.get((user, identity), {}), time.monotonic()
        if len(mine) >= LEASES_MAX and token not in mine:
            mine = {each: until_s for each, until_s in mine.items() if until_s > now_s}
            if len(mine) >= LEASES_MAX:
                raise BusyError(f"{user!r} has {LEASES_MAX} leases on this dataset")
        if seconds:
            mine[token] = now_s + min(seconds, LEASE_S)
        else:
            mine.pop(token, None)
        self._leases[user, identity] = mine

    def _finish(self, known: DatasetRef) -> int:
        info = self._repository.dataset(known.name)
        if info.identity != known.identity:
            raise no_such_dataset(str(known.identity))
        if info.head is None:
            raise _lost(known.name)
        return LocalWriteSession(self._repository, info).finish()


def _checked(repository: LocalRepository, identity: UUID, payload: memoryview) -> Header:
    """The header of a chunk that a client may put, every byte of it checked.

    Raises FormatError; ObjectExists where another ID will do.
    """
    preamble = parse_preamble(payload, identity=identity, object_bytes=len(payload))
    start = preamble.body_start
    header = parse_header(preamble, payload[start - preamble.header_stored : start])
    try:
        check_age(header)
    except StaleChunk as stale:
        raise _late(stale) from None
    check_claims(header, repository.meta, repository.clock)
    lz4 = header.records["codec"] == Codec.LZ4
    large = int(header.records["size"][lz4].max(initial=0)) > DECODED_BYTES_MAX
    with _one_large if large else nullcontext():
        bad = damaged_places(header, payload[start:])
    if bad:
        raise CorruptError(
            f"chunk {chunk_id_text(preamble.id)}: the bytes of {shown(header.path(bad[0]))} were"
            " damaged on their way",
            advice="put again",
        )
    return header


_one_large = threading.Lock()


def _late(stale: StaleChunk) -> ObjectExists:
    """Who sent a chunk too late draws another ID and sends it again."""
    return ObjectExists(stale.message, advice="put it again under another ID")


def _lost(name: str) -> MetadataBehind:
    return MetadataBehind(
        f"the metadata store has lost dataset {name!r}", advice=f"run `dlcmd recover {name}`"
    )


def _may_be_one_chunk(error: Exception) -> bool:
    """Whether one chunk of several may be to blame for an error."""
    return isinstance(error, FormatError | UsageError) or not isinstance(error, DieselError)
