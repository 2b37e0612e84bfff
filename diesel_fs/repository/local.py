"""A repository: an object store and a metadata store, and what dataset operations mean over them.

Owned here: the order of writing (FORMAT.md, section 5), who may commit what, and which snapshot
answers a reader. Not owned: bytes of chunks and snapshots, keys of stores. The chunks are the only
truth; everything else here can be made again (`recover.py`).

A `LocalRepository` may be used from several threads and in forked children; a `LocalWriteSession`
belongs to one writer. Readers never need the metadata store: where it cannot be had they go by the
newest snapshot in the object store.
"""

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Self
from uuid import UUID

import numpy as np

from ..credentials import Credentials
from ..errors import (
    ConfigError,
    ConflictError,
    CorruptError,
    DieselError,
    FormatError,
    MetadataBehind,
    MetadataError,
    NewerVersionError,
    NoSuchDataset,
    NoSuchPath,
    NotFoundError,
    ObjectExists,
    ObjectMissing,
    PermissionDenied,
    UsageError,
)
from ..format.chunk import Header, parse_header, parse_preamble
from ..format.chunk_builder import ChunkBuilder
from ..format.chunk_id import LOWEST, IdSource, chunk_id_text
from ..format.entries import ChunkId, Kind, Rows, Stat, check_path, split
from ..format.object_names import chunk_object, chunk_of_object, chunk_prefix
from ..format.snapshot.entry_digest import EntryDigest, entry_digest
from ..format.snapshot.reader import Snapshot
from ..names import check_dataset_name
from ..net.messages import Message
from ..storage.metadata.store import (
    Batch,
    DatasetHead,
    MetadataStore,
    StoreRestarted,
    chunks_digest,
)
from ..storage.objects.store import ObjectStore
from ..storage.open_stores import open_metadata, open_objects, rename_unusable_metadata
from ..urls import RepositoryUrl, parse_url
from .catalog import Catalogue, DatasetInfo
from .expected_chunks import (
    RebuildSource,
    UnknownChunks,
    find_unknown_chunks,
    losses_in,
    lost_chunks_error,
    read_with_retries,
    unreadable_paths,
)
from .retention import Deletion, remove_dataset
from .validation import StoreClock, ValidatedChunk, batch_of, validate_chunk
from .versions import KeptVersion, VersionStore

log = logging.getLogger("diesel.repository")

_TOMBSTONE_BODY_BYTES = 4 << 20  # bounds a tombstone chunk by its paths
_TALLIES_MAX = 1 << 16  # of a dataset, some 200 bytes each: of more chunks the last are compared
_RESTARTS_MAX = 5  # of a metadata store, in the middle of one commit


ReportProgress = Callable[[int, int], None]
"""Progress of a job: how much is done, how much there is in all."""


def no_progress(done: int, total: int) -> None:
    """No progress."""


class LocalRepository:
    """Datasets over an object store and a metadata store (None: it cannot be had, reading only)."""

    def __init__(
        self,
        objects: ObjectStore,
        meta: MetadataStore | None,
        *,
        url: RepositoryUrl,
    ) -> None:
        self.objects = objects
        self.url = url
        self._meta = meta
        self._meta_problem: DieselError | None = None
        self.catalogue = Catalogue(objects)
        self.credentials: Credentials | None = None  # who we are to the server behind `objects`
        self.snapshots = VersionStore(objects)
        self.ids = IdSource(uuid.getnode(), time.time, os.urandom, os.getpid)
        self.clock = StoreClock(self._store_now_s)
        self._tallies: dict[
            UUID, dict[ChunkId, EntryDigest]
        ] = {}  # of chunks that are not published yet

    @classmethod
    def open(cls, url: RepositoryUrl | str, *, create: bool = False) -> Self:
        """Open the repository at `url`; `create` makes a new one in a new or empty folder.

        Raises ConfigError for an address that this process cannot open, ObjectStoreError where
        there is no repository.
        """
        where = parse_url(url) if isinstance(url, str) else url
        found = cls(open_objects(where, create=create), None, url=where)
        found.open_metadata(create=create)
        return found

    def open_metadata(self, *, create: bool, replace_damaged: bool = False) -> None:
        """Open the metadata store; `replace_damaged` moves an embedded one that cannot be used
        aside first.

        Where it cannot be had, `meta` says why when it is asked for: reading goes on without.
        """
        self._close_metadata()
        self._meta = None  # a problem that is known stays until it is over: other threads look
        if replace_damaged:
            rename_unusable_metadata(self.url)
        try:
            self._meta = open_metadata(self.url, self.objects, create=create)
            self._meta.heads()  # a damaged file opens, and fails when it is read
        except ConfigError:
            raise
        except DieselError as error:
            self._close_metadata()
            self._meta, self._meta_problem = None, error
        else:
            self._meta_problem = None

    def close(self) -> None:
        """Let go of the metadata store, and of what the object store does not need now."""
        self._close_metadata()
        self.objects.close_idle()

    def _close_metadata(self) -> None:
        if self._meta is not None:
            self._meta.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def meta(self) -> MetadataStore:
        """The metadata store. Raises why it cannot be had."""
        if self._meta is None:
            raise self._meta_problem or MetadataError("there is no metadata store")
        return self._meta

    def _store_now_s(self) -> float:
        return self.meta.now_s()

    @property
    def meta_problem(self) -> DieselError | None:
        """Why the metadata store cannot be had; None where it can."""
        return self._meta_problem

    @property
    def meta_is_lost(self) -> bool:
        """Whether an embedded metadata store has gone or is damaged: `recover` makes another."""
        is_lost = isinstance(self._meta_problem, MetadataBehind | FormatError)
        return is_lost and not (self.url.meta or isinstance(self._meta_problem, NewerVersionError))

    # Finding datasets

    def datasets(self) -> list[DatasetInfo]:
        """All datasets that are not deleted, by name. The object store is the truth here."""
        found, damaged = self.catalogue.all(self._heads())
        for error in damaged:
            log.warning("%s", error.message)
        return found

    def _heads(self) -> dict[UUID, DatasetHead]:
        markers = self._meta.heads() if self._meta is not None else []
        return {marker.identity: marker for marker in markers}

    def dataset(self, name: str) -> DatasetInfo:
        """The dataset of this name. Raises NoSuchDataset only where it is known not to exist."""
        check_dataset_name(name)
        if self._meta is not None:
            try:
                head = self._meta.head(name)
            except (NoSuchDataset, MetadataBehind):
                pass
            else:
                with suppress(CorruptError):  # then the metadata store's word is as good
                    info = self.catalogue.describe(head.identity, head)
                    if info is not None and info.name == name:
                        return info
        known, damaged = self.catalogue.all(self._heads())
        same = [info for info in known if info.name == name]
        if not same and damaged:
            raise damaged[0]  # it may be the one that is asked for: absence needs proof
        if not same:
            raise NoSuchDataset(f"no dataset {name!r} in {self.url}")
        if len(same) > 1:
            raise MetadataError(
                f"two datasets are named {name!r}: {same[0].identity} and {same[1].identity}"
            )
        return same[0]

    # Reading

    def view(self, name: str) -> Snapshot:
        """All metadata of a dataset at its current version.

        Where the metadata store cannot be had or does not know the dataset, the newest snapshot
        answers. Raises NoSuchDataset, or MetadataBehind where there is no way to know.
        """
        return self.view_of(self.dataset(name))

    def newest_known(self, info: DatasetInfo) -> int:
        """The greatest version that anybody knows of; 0 for none. The metadata store may have lost
        what a snapshot has."""
        known = info.head.version if info.head else 0
        return max(known, self.snapshots.newest(info.identity))

    def staleness_warning(self, view: Snapshot) -> str:
        """Why a `view` may not be of the current version, with its own and its age; else nothing.
        Who may read a repository but not its metadata store always goes by snapshots."""
        problem = self._meta_problem
        if problem is None or isinstance(problem, PermissionDenied):
            return ""
        return staleness_text(view, problem.message)

    def view_of(self, info: DatasetInfo) -> Snapshot:
        """`view` of a dataset that has been found."""
        try:
            return self._view_of(info)
        except ObjectMissing:  # two publishes went by between looking and loading
            return self._view_of(info)

    def _view_of(self, info: DatasetInfo) -> Snapshot:
        newest = self.snapshots.newest(info.identity)
        if self._meta is not None and info.head is not None and newest <= info.head.version:
            try:
                return self.snapshots.load_current(self._meta, info.head)
            except (CorruptError, MetadataError):
                if not newest:
                    raise
                log.warning("the metadata store fails: going by the snapshot of %d", newest)
        if newest:  # the metadata store cannot be had, or lost what the snapshot has
            return self.snapshots.load(info.identity, newest)
        if next(iter(self.objects.names(chunk_prefix(info.identity))), None) is None:
            return self.snapshots.empty(info.identity, info.name)
        raise self._behind(info.name)

    def view_at(self, name: str, version: int) -> Snapshot:
        """A dataset at a version that is kept. Raises NoSuchDataset, NotFoundError."""
        identity = self.dataset(name).identity
        if version not in self.snapshots.versions(identity):  # whatever private copies there are
            raise NotFoundError(
                f"version {version} of {name!r} is not kept",
                advice=f"`dlcmd ls {name}@` lists those that are",
            )
        return self.snapshots.load(identity, version)

    def kept_versions(self, name: str) -> Sequence[KeptVersion]:
        """The versions of a dataset that can be read, ascending. Raises NoSuchDataset."""
        return self.snapshots.kept(self.dataset(name).identity)

    def _behind(self, name: str) -> MetadataBehind:
        why = f" ({self._meta_problem.message})" if self._meta_problem else ""
        return MetadataBehind(
            f"the metadata of {name!r} is behind its chunks{why}",
            advice=f"run `dlcmd recover {name}`",
        )

    def stat(self, name: str, path: bytes) -> Stat:
        """One entry, as it is now. Raises NoSuchPath, NoSuchDataset."""
        check_path(path)
        info = self.dataset(name)
        meta = self._current_meta(info)
        if meta is not None and path:
            with suppress(CorruptError, MetadataBehind):  # it says that it does not know
                return self._stat(meta, info, path)
        view = self.view_of(info)
        return view.stat(index_of_path(view, path))

    def _stat(self, meta: MetadataStore, info: DatasetInfo, path: bytes) -> Stat:
        rows = meta.lookup(info.identity, [path])
        record = rows.records[0] if len(rows) else None
        if record is not None and record["kind"] == Kind.FOLDER:
            return _stat_of(record)
        if len(meta.children(info.identity, path)):
            return Stat(Kind.FOLDER, 0o755, 0, 0)  # only its entries imply it
        if record is None:
            raise NoSuchPath(f"no {path!r} in dataset {info.name!r}")
        return _stat_of(record)

    def _current_meta(self, info: DatasetInfo) -> MetadataStore | None:
        """The metadata store, if it knows all that was ever acknowledged of a dataset."""
        if info.head is None or self.snapshots.newest(info.identity) > info.head.version:
            return None
        return self._meta

    def list(self, name: str, folder: bytes = b"") -> Rows:
        """What lies in a folder, as it is now. Raises NoSuchPath where it is no folder."""
        info = self.dataset(name)
        meta = self._current_meta(info)
        if meta is None:
            raise self._behind(name)
        rows = meta.children(info.identity, check_path(folder))
        if not len(rows) and folder and self.stat(name, folder).kind != Kind.FOLDER:
            raise NoSuchPath(f"{folder!r} in dataset {name!r} is not a folder")
        return rows

    def read_header(self, identity: UUID, chunk: ChunkId) -> Header:
        """The checked header of a chunk. Raises FormatError, ObjectStoreError."""
        name = chunk_object(identity, chunk)
        size = self.objects.stat(name).bytes
        front = self.objects.get(name, 0, min(size, _HEADER_GUESS_BYTES))
        preamble = parse_preamble(bytes(front), identity=identity, id=chunk, object_bytes=size)
        stored = bytes(front[preamble.body_start - preamble.header_stored : preamble.body_start])
        if len(stored) < preamble.header_stored:
            stored = bytes(
                self.objects.get(
                    name, preamble.body_start - preamble.header_stored, preamble.header_stored
                )
            )
        return parse_header(preamble, stored)

    def chunk_ids(self, identity: UUID, since: ChunkId = LOWEST) -> Iterator[ChunkId]:
        """The IDs of the durable chunks greater than `since`, ascending."""
        after = "" if since == LOWEST else chunk_object(identity, since)
        for name in self.objects.names(chunk_prefix(identity), after):
            chunk = chunk_of_object(name)
            if chunk is not None:
                yield chunk

    # Writing

    def begin(self, name: str, *, create: bool = True) -> "LocalWriteSession":
        """A writer's session on a dataset, which is made if it is missing and `create`.

        Folds in what the metadata store does not know and no put under way can own. Raises
        NoSuchDataset, MetadataError, PermissionDenied; ObjectStoreRefused where this host's clock
        is ahead, before anything is written; LostChunks where that would make a state without
        something that the newest snapshot has.
        """
        check_dataset_name(name)
        meta = self.meta
        self.clock.check_local_clock()
        try:
            info = self.dataset(name)
        except NoSuchDataset:
            if not create:
                raise
            info = self._create(name)
        if info.head is None:
            self.rebuild(RebuildSource(self, meta, name, info.identity, None), info)
        else:
            self.repair_metadata(info.identity)
            compared = find_unknown_chunks(self, meta, info.head, needs_repair=False)
            for batch in self._batches_of(info.head, compared):
                self.commit_batches(info.identity, batch)
        return LocalWriteSession(self, self.dataset(name))

    def rebuild(self, folding: RebuildSource, info: DatasetInfo) -> int:
        """Replace what the metadata store knows of a dataset by the fold over its chunks; the new
        version, greater than any that is published. Raises as `MetadataStore.rebuild`, LostChunks.
        """
        version = self.meta.rebuild(
            info.name,
            info.identity,
            folding.since(LOWEST),
            folding.late,
            newer_than=self.snapshots.newest(info.identity),
        )
        folding.forget_deleted()
        return version

    def unreadable_paths(self, name: str) -> Sequence[bytes]:
        """The paths of a dataset whose chunk is gone or too short, as far as that can be told
        without reading: whoever has them can heal them by putting them again. Raises NoSuchDataset,
        MetadataError.
        """
        return unreadable_paths(self, self.meta, self.dataset(name).identity)

    def _create(self, name: str) -> DatasetInfo:
        """Make a dataset. Of several that do it at once, the metadata store lets one win."""
        try:
            marker = self.meta.create(name, uuid.uuid4())
        except ConflictError:
            marker = self.meta.head(name)
            if self.catalogue.is_deleted(marker.identity):  # by somebody who came no further
                self.meta.drop(marker.identity)
                return self._create(name)
        created_ns = time.time_ns()
        self.catalogue.add(name, marker.identity, created_ns)
        return DatasetInfo(name, marker.identity, created_ns, marker)

    def repair_metadata(self, identity: UUID, run: str = "") -> None:
        """Mend the metadata store if it is another run than the one that was vouched for."""
        run = run or self.meta.needs_repair(identity)
        marker = self._heads().get(identity) if run else None  # of that run, not from before
        if marker is not None:
            compared = find_unknown_chunks(self, self.meta, marker, needs_repair=True)
            self.meta.repair(identity, run, self._batches_of(marker, compared))

    def _batches_of(self, marker: DatasetHead, compared: UnknownChunks) -> Iterator[Batch]:
        """What the chunks bring that the metadata store does not know. An orphan that cannot be
        read is named and left out: it must not keep all others, and every put, from going in.
        Raises LostChunks for one that was acknowledged."""
        for chunk in compared.unknown:
            batch, why = self._batch(marker.identity, chunk)
            if batch is not None:
                yield batch
            elif chunk in compared.acknowledged:
                newest = self.snapshots.newest(marker.identity)
                view = self.snapshots.load_without_copy(marker.identity, newest)
                raise lost_chunks_error(marker.name, losses_in({chunk: why}, [view]))

    def _batch(self, identity: UUID, chunk: ChunkId) -> tuple[Batch | None, str]:
        """What a chunk of the store brings; None where it cannot be read, and why."""
        try:
            header = read_with_retries(lambda: self.read_header(identity, chunk))
            return batch_of(header, stored=True), ""
        except (FormatError, ObjectMissing) as error:
            log.warning("chunk %s is left out: %s", chunk_id_text(chunk), error.message)
            return None, error.message

    def commit_batches(self, identity: UUID, *batches: Batch) -> int:
        """Commit; where the metadata store has been restarted, after it has been mended."""
        for _ in range(_RESTARTS_MAX):
            try:
                return self.meta.commit(identity, *batches)
            except StoreRestarted as restarted:
                with suppress(StoreRestarted):  # once more
                    self.repair_metadata(identity, restarted.run_id)
        return self.meta.commit(identity, *batches)

    def recommit_missing(self, identity: UUID, chunks: Sequence[ChunkId]) -> int:
        """Commit again what the metadata store has lost of a writer's chunks, as the store has
        them; how many those were. Raises NoSuchDataset.
        """
        lost = self.meta.missing(identity, chunks) if chunks else []
        done = 0
        for chunk in lost:
            batch, _ = self._batch(identity, chunk)
            if batch is not None:
                log.warning("chunk %s is committed again", chunk_id_text(chunk))
                self.commit_batches(identity, batch)
                done += 1
        return done

    def validate_chunk(self, identity: UUID, preamble: bytes, header: bytes) -> ValidatedChunk:
        """A durable chunk, checked (`commits.validate_chunk`), for `commit_all`."""
        return validate_chunk(self.objects, self.meta, self.clock, identity, preamble, header)

    def commit_all(self, identity: UUID, chunks: Iterable[ValidatedChunk]) -> int:
        """Commit chunks together: all of them or none. Idempotent; the version comes back."""
        batches = [chunk.batch for chunk in chunks]
        version = self.commit_batches(identity, *batches)
        tallies = self._tallies.setdefault(identity, {})
        tallies.update((batch.chunk.id, entry_digest(batch.rows)) for batch in batches)
        while len(tallies) > _TALLIES_MAX:
            tallies.pop(next(iter(tallies)), None)
        return version

    def commit(self, identity: UUID, preamble: bytes, header: bytes) -> ValidatedChunk:
        """Commit a chunk that is durable, from its preamble and stored header. Idempotent.

        Raises CorruptError and StaleChunk as `commits.validate_chunk`.
        """
        chunk = self.validate_chunk(identity, preamble, header)
        self.commit_all(identity, [chunk])
        return chunk

    def publish(self, name: str, *, full: bool = False) -> int:
        """Leave the snapshot of the current version beside the chunks; the version comes back.

        Everything committed so far is durable on return. `full` starts from nothing rather than
        from the previous snapshot. What is said of the chunks that this process has committed is
        compared with their headers; raises CorruptError, and publishes nothing, where it differs.
        """
        info = self.dataset(name)
        if info.head is None:
            raise self._behind(name)
        self.meta.sync()
        tallies = dict(self._tallies.get(info.identity, {}))
        version = self.snapshots.publish(self.meta, info.head, full=full, tallies=tallies)
        left = self._tallies.get(info.identity, {})
        for chunk in tallies:
            left.pop(chunk, None)
        return version

    def run_job(self, job: str, name: str, fields: Message, tell: ReportProgress) -> Message | None:
        """What a job on a dataset came to that a server behind this repository does (`WIRE.md`);
        None where there is none, and the caller does it. Raises DieselError.
        """
        return None

    def check_no_overlap(self, source: Path) -> None:
        """Raise UsageError where `source` lies in this repository, or it in `source`."""
        if self.url.scheme != "file":
            return
        real, store = Path(os.path.realpath(source)), self.url.path.resolve()
        if real == store or store in real.parents or real in store.parents:
            raise UsageError(
                f"{source} and the repository {store} lie in each other",
                advice="put from, or keep the repository in, another folder",
            )

    def delete_dataset(self, name: str) -> Deletion:
        """Delete a dataset for ever.

        What leases pin is left, and named in the log. Repeatable: a deletion that was interrupted
        goes on. Raises NoSuchDataset, and MetadataError where its metadata would be left for ever.
        """
        try:
            identities = [self.dataset(name).identity]
        except NoSuchDataset:
            identities = list(self.catalogue.deleted_named(name))
            if not identities:
                raise
        if not self.meta_is_lost:
            _ = self.meta  # before anything is done
        removed = left = 0
        for identity in identities:
            self.catalogue.mark_deleted(name, identity)
            done = self.remove_deleted(name, identity)
            removed, left = removed + done.removed, left + done.left
        return Deletion(removed, left)

    def remove_deleted(self, name: str, identity: UUID) -> Deletion:
        """Drop the metadata of a deleted dataset, and remove its objects that no lease pins."""
        if not self.meta_is_lost:
            self.meta.drop(identity)  # first: with the last object goes what it is found by
        done = remove_dataset(self.objects, self.snapshots, identity)
        done.tell_left(name)
        return done


class LocalWriteSession:
    """One writer on one dataset: new IDs, commits, deletions; `finish` makes it acknowledged."""

    def __init__(self, repository: LocalRepository, info: DatasetInfo) -> None:
        assert info.head is not None
        self._repository = repository
        self.name = info.name
        self.identity = info.identity
        self.objects = repository.objects
        self._view: Snapshot | None = None
        self._info = info
        self._committed_ids: dict[ChunkId, None] = {}  # what has been committed
        self.folders: set[bytes] = set()
        """The folders in which something has been committed."""

    @property
    def version(self) -> int:
        """The version at which the session began."""
        assert self._info.head is not None
        return self._info.head.version

    @property
    def view(self) -> Snapshot:
        """The dataset as it was when the session began."""
        if self._view is None:
            self._view = self._repository.view_of(self._info)
        return self._view

    def new_id(self, writer_of: ChunkId | None = None) -> ChunkId:
        """The ID of a chunk that is being sealed now. Raises ConflictError after a deletion."""
        marker = self._head()
        return self._repository.ids.next(marker.newest, writer_of)

    def validate_chunk(self, preamble: bytes, header: bytes) -> ValidatedChunk:
        """`LocalRepository.validate_chunk`, for the dataset that this session began on."""
        with self._explain_missing_dataset():
            return self._repository.validate_chunk(self.identity, preamble, header)

    def commit_all(self, chunks: Iterable[ValidatedChunk]) -> int:
        """`LocalRepository.commit_all`, into the dataset that this session began on."""
        committed = list(chunks)
        with self._explain_missing_dataset():
            version = self._repository.commit_all(self.identity, committed)
        self._committed(*committed)
        return version

    def _committed(self, *chunks: ValidatedChunk) -> None:
        for chunk in chunks:
            self._committed_ids[chunk.batch.chunk.id] = None
            self.folders.update(chunk.batch.rows.folders)

    @property
    def committed_chunks(self) -> Set[ChunkId]:
        """What this session has committed."""
        return self._committed_ids.keys()

    def commit(self, preamble: bytes, header: bytes) -> ValidatedChunk:
        """`LocalRepository.commit`, into the dataset that this session began on."""
        chunk = self.validate_chunk(preamble, header)
        self.commit_all([chunk])
        return chunk

    def delete(self, paths: Sequence[bytes]) -> int:
        """Write and commit tombstones for `paths`; how many comes back. Repeatable."""
        builder = ChunkBuilder(self.identity, _TOMBSTONE_BODY_BYTES, "none")
        for path in paths:
            builder.add_tombstone(split(check_path(path)))
            if builder.full:
                self._store(builder)
        if len(builder):
            self._store(builder)
        return len(paths)

    def use_view(self, view: Snapshot) -> None:
        """Take a view that is there already for `view`, if it is of that version."""
        if view.identity == self.identity and view.version == self.version:
            self._view = view

    def others_committed(self) -> bool:
        """Whether anybody else has committed or purged chunks since this session began."""
        before = self._info.head
        assert before is not None
        return self._head().digest != chunks_digest(self._committed_ids, before.digest)

    def finish(self) -> int:
        """Acknowledge: all commits are durable and their snapshot is published, also where the
        metadata store has lost some meanwhile. The version."""
        own = list(self._committed_ids)
        self._head()
        with self._explain_missing_dataset():
            self._repository.repair_metadata(self.identity)
            self._repository.recommit_missing(self.identity, own)
            while True:
                version = self._acknowledge()
                if not self._repository.recommit_missing(self.identity, own):
                    return version

    def _acknowledge(self) -> int:
        version = self._head().version
        if self._repository.snapshots.newest(self.identity) != version:
            return self._repository.publish(self.name)
        self._repository.meta.sync()
        return version

    def _store(self, builder: ChunkBuilder) -> None:
        while True:
            chunk = self.new_id()
            parts, _ = builder.seal(chunk)
            try:
                self.objects.put(chunk_object(self.identity, chunk), parts)
            except ObjectExists:
                continue  # another writer drew the same ID
            self.commit(bytes(parts[0]), bytes(parts[1]))
            builder.clear()
            return

    def _head(self) -> DatasetHead:
        with self._explain_missing_dataset():
            marker = self._repository.meta.head(self.name)
        if marker.identity != self.identity:
            raise ConflictError(f"dataset {self.name!r} has been deleted meanwhile")
        return marker

    @contextmanager
    def _explain_missing_dataset(self) -> Iterator[None]:
        """Who does not know the dataset says nothing of why: it is deleted, or has been lost."""
        try:
            yield
        except NoSuchDataset:
            if not self._repository.catalogue.is_deleted(self.identity):
                raise self._repository._behind(self.name) from None
            raise ConflictError(f"dataset {self.name!r} has been deleted meanwhile") from None


_HEADER_GUESS_BYTES = 256 << 10  # holds nearly every header: one request instead of two


def _stat_of(record: np.void) -> Stat:
    return Stat(
        Kind(int(record["kind"])),
        int(record["mode"]),
        int(record["size"]),
        int(record["mtime_ns"]),
    )


def staleness_text(view: Snapshot, why: str) -> str:
    """What is said of a view of which nobody can tell whether it is current."""
    age_s = max(0, time.time_ns() // 1_000_000_000 - view.version // 1_000_000)
    return (
        f"{why}: this is version {view.version} of {view.dataset}, the newest snapshot,"
        f" which is {timedelta(seconds=age_s)} old"
    )


def index_of_path(view: Snapshot, path: bytes) -> int:
    """The index of a path in a view. Raises NoSuchPath."""
    index = view.lookup(check_path(path))
    if index < 0:
        raise NoSuchPath(f"no {os.fsdecode(path)!r} in dataset {view.dataset!r}")
    return index
