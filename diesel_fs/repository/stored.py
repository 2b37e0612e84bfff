"""A repository over an object store and a metadata store: all operations except the long jobs.

This module keeps the order of writing (FORMAT.md, section 5): it decides how the metadata store
gets missing chunks, and which snapshot a reader gets. If the metadata store cannot be used, readers
get the newest snapshot in the object store. Any thread and forked child.
"""

import logging
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import partial
from typing import Self
from uuid import UUID

import numpy as np

from ..errors import (
    ConfigError,
    ConflictError,
    CorruptError,
    DieselError,
    FormatError,
    MetadataBehind,
    MetadataError,
    NewerVersionError,
    NoSpaceError,
    NoSuchDataset,
    NoSuchPath,
    ObjectMissing,
    PermissionDenied,
)
from ..format.chunk_id import LOWEST, IdSource, chunk_id_text
from ..format.entries import ChunkId, Kind, Rows, Stat, check_path
from ..format.object_names import chunk_prefix
from ..format.snapshot.entry_digest import EntryDigest, entry_digest
from ..format.snapshot.reader import Snapshot
from ..names import check_dataset_name
from ..storage.metadata.store import CommitBatch, DatasetHead, MetadataStore, StoreRestarted
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
from .interface import Repository, staleness_text
from .provenance import ArchiveRecord, read_records, write_record
from .retention import Deletion, remove_dataset, remove_expired_versions
from .validation import StoreClock, ValidatedChunk, batch_of, validate_chunk
from .versions import VersionStore, empty_snapshot
from .writing import WriteSession

log = logging.getLogger("diesel.repository")

# Digests kept per dataset (some 200 bytes each). Older ones are dropped: `publish` cannot check
# their chunks
_DIGESTS_MAX = 1 << 16
_RESTARTS_MAX = 5  # restarts of the metadata store that one commit survives


class StoredRepository(Repository):
    snapshots: VersionStore

    def __init__(
        self, objects: ObjectStore, meta: MetadataStore | None, *, url: RepositoryUrl
    ) -> None:
        ids = IdSource(uuid.getnode(), time.time, os.urandom, os.getpid)
        super().__init__(objects, VersionStore(objects), url, ids)
        self._meta = meta
        self._meta_problem: DieselError | None = None
        # Datasets with a newer published version than their head, at the last look
        self._maybe_behind: set[UUID] = set()
        self.catalogue = Catalogue(objects)
        self.clock = StoreClock(lambda: self.meta.now_s())  # noqa: PLW0108 (`meta` may change)
        # By dataset and chunk: digests of the entries of chunks that this process has committed
        # and not yet published
        self._digests: dict[UUID, dict[ChunkId, EntryDigest]] = {}

    @classmethod
    def open(cls, url: RepositoryUrl | str, *, create: bool = False) -> Self:
        """`create` makes a repository in a new or empty folder. Raises ConfigError for an address
        that this process cannot open, ObjectStoreError if there is no repository."""
        parsed = parse_url(url) if isinstance(url, str) else url
        repository = cls(open_objects(parsed, create=create), None, url=parsed)
        repository.open_metadata(create=create)
        return repository

    def open_metadata(self, *, create: bool, replace_damaged: bool = False) -> None:
        """`create` makes a missing store; `replace_damaged` first renames an unusable SQLite file.
        If the store cannot be opened, reading continues without it, and `meta` raises the
        reason."""
        self._close_metadata()
        self._meta = None  # the known problem stays meanwhile: other threads may read it
        if replace_damaged:
            rename_unusable_metadata(self.url)
        try:
            self._meta = open_metadata(self.url, self.objects, create=create)
            self._meta.heads()  # a damaged file opens, and fails at its first read
        except ConfigError:
            raise
        except DieselError as error:
            self._close_metadata()
            self._meta, self._meta_problem = None, error
        else:
            self._meta_problem = None

    def close(self) -> None:
        self._close_metadata()
        self.objects.housekeeping.close_idle()

    def _close_metadata(self) -> None:
        if self._meta is not None:
            self._meta.close()

    @property
    def meta(self) -> MetadataStore:
        """Raises the reason if this process cannot use the metadata store."""
        if self._meta is None:
            raise self._meta_problem or MetadataError("there is no metadata store")
        return self._meta

    @property
    def meta_problem(self) -> DieselError | None:
        return self._meta_problem

    @property
    def meta_is_lost(self) -> bool:
        """Whether an embedded metadata store is missing or damaged; `recover` makes a new one."""
        is_lost = isinstance(self._meta_problem, MetadataBehind | FormatError)
        return is_lost and not (self.url.meta or isinstance(self._meta_problem, NewerVersionError))

    # Finding datasets

    def datasets(self) -> list[DatasetInfo]:
        infos, damaged = self.catalogue.all(self._heads())
        for error in damaged:
            log.warning("%s", error.message)
        return infos

    def _heads(self) -> dict[UUID, DatasetHead]:
        heads = self._meta.heads() if self._meta is not None else []
        return {head.identity: head for head in heads}

    def dataset(self, name: str) -> DatasetInfo:
        check_dataset_name(name)
        if self._meta is not None:
            try:
                head = self._meta.head(name)
            except (NoSuchDataset, MetadataBehind):
                pass
            else:
                with suppress(CorruptError):  # the dataset's object is damaged: search all datasets
                    info = self.catalogue.describe(head.identity, head)
                    if info is not None and info.name == name:
                        return info
        known, damaged = self.catalogue.all(self._heads())
        same = [info for info in known if info.name == name]
        if not same and damaged:
            raise damaged[0]  # the damaged dataset may have this name: absence needs proof
        if not same:
            near = get_close_matches(name, [info.name for info in known], 1)
            advice = f"did you mean {near[0]}?" if near else ""
            raise NoSuchDataset(f"no dataset {name!r} in {self.url}", advice=advice)
        if len(same) > 1:
            raise MetadataError(
                f"two datasets are named {name!r}: {same[0].identity} and {same[1].identity}"
            )
        return same[0]

    # Reading

    def staleness_warning(self, view: Snapshot) -> str:
        problem = self._meta_problem
        if problem is None and view.identity in self._maybe_behind:
            problem = self._loss(view.dataset, view.identity, view.version)
        if problem is None or isinstance(problem, PermissionDenied):
            return ""
        return staleness_text(view, problem)

    def loss_warning(self, info: DatasetInfo) -> str:
        newest = self.snapshots.newest(info.identity)
        if self._meta is None or (info.head is not None and newest <= info.head.version):
            return ""
        loss = self._loss(info.name, info.identity, newest)
        return str(loss) if loss else ""

    def _loss(self, name: str, identity: UUID, version: int) -> DieselError | None:
        try:
            head = self.meta.head(name)
            if head.identity == identity and head.version >= version:
                return None  # the version was published after the head had been read
            known = f"knows {name!r} in an older state only"
        except NoSuchDataset:
            known = f"does not know {name!r} any more"
        except DieselError as error:
            return error
        return MetadataBehind(f"the metadata store {known}", advice=f"run `dlcmd recover {name}`")

    def view_of(self, info: DatasetInfo, *, lazy: bool = False) -> Snapshot:
        try:
            return self._view_of(info, lazy=lazy)
        except ObjectMissing:  # two versions were published between listing and loading
            return self._view_of(info, lazy=lazy)

    def _view_of(self, info: DatasetInfo, *, lazy: bool) -> Snapshot:
        newest = self.snapshots.newest(info.identity)
        if newest > (info.head.version if info.head else 0):
            self._maybe_behind.add(info.identity)
        else:
            self._maybe_behind.discard(info.identity)
        if self._meta is not None and info.head is not None and newest <= info.head.version:
            try:
                return self.snapshots.load_current(self._meta, info.head, lazy=lazy)
            except (CorruptError, MetadataError):
                if not newest:
                    raise
                log.warning(
                    "the metadata store fails; readers get the snapshot of version %d", newest
                )
        if newest:  # the metadata store cannot be used, or has lost the version
            return self.snapshots.load(info.identity, newest, lazy=lazy)
        if next(iter(self.objects.housekeeping.names(chunk_prefix(info.identity))), None) is None:
            return empty_snapshot(info.identity, info.name)
        raise self.behind_error(info.name)

    def behind_error(self, name: str) -> MetadataBehind:
        why = f" ({self._meta_problem.message})" if self._meta_problem else ""
        return MetadataBehind(
            f"the metadata of {name!r} is behind its chunks{why}",
            advice=f"run `dlcmd recover {name}`",
        )

    def stat(self, name: str, path: bytes) -> Stat:
        check_path(path)
        info = self.dataset(name)
        meta = self._current_meta(info)
        if meta is not None and path:  # only a snapshot has the attributes of the root
            with suppress(CorruptError, MetadataBehind):  # the metadata store cannot tell
                return self._stat(meta, info, path)
        view = self.view_of(info)
        return view.stat(view.index_of(path))

    def _stat(self, meta: MetadataStore, info: DatasetInfo, path: bytes) -> Stat:
        rows = meta.lookup(info.identity, [path])
        record = rows.records[0] if len(rows) else None
        if record is not None and record["kind"] == Kind.FOLDER:
            return _stat_of(record)
        if len(meta.children(info.identity, path)):
            return Stat(Kind.FOLDER, 0o755, 0, 0)  # an implicit folder
        if record is None:
            raise NoSuchPath(f"no {path!r} in dataset {info.name!r}")
        return _stat_of(record)

    def _current_meta(self, info: DatasetInfo) -> MetadataStore | None:
        """None if the metadata store may lack something that was acknowledged."""
        if info.head is None or self.snapshots.newest(info.identity) > info.head.version:
            return None
        return self._meta

    def list(self, name: str, folder: bytes = b"") -> Rows:
        info = self.dataset(name)
        meta = self._current_meta(info)
        if meta is None:
            raise self.behind_error(name)
        rows = meta.children(info.identity, check_path(folder))
        if not len(rows) and folder and self.stat(name, folder).kind != Kind.FOLDER:
            raise NoSuchPath(f"{folder!r} in dataset {name!r} is not a folder")
        return rows

    # Writing

    def begin(self, name: str, *, create: bool = True) -> "LocalWriteSession":
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
            unknown = find_unknown_chunks(self, meta, info.head, needs_repair=False)
            for batch in self._batches_of(info.head, unknown):
                try:
                    self.commit_batches(info.identity, batch)
                except NoSpaceError as error:  # a session that deletes to make room must begin
                    if batch.chunk.id in unknown.acknowledged:
                        raise
                    text = chunk_id_text(batch.chunk.id)
                    log.warning("chunk %s is not folded in yet: %s", text, error.message)
        return LocalWriteSession(self, self.dataset(name))

    def rebuild(self, chunks: RebuildSource, info: DatasetInfo) -> None:
        """Replace a dataset's metadata by the fold over its chunks, as a version greater than any
        published one. Raises as `MetadataStore.rebuild`, and LostChunks."""
        newest = self.snapshots.newest(info.identity)
        self.meta.rebuild(
            info.name, info.identity, chunks.since(LOWEST), chunks.late, newer_than=newest
        )
        chunks.forget_deleted()

    def unreadable_paths(self, name: str) -> Sequence[bytes]:
        return unreadable_paths(self, self.meta, self.dataset(name).identity)

    def _create(self, name: str) -> DatasetInfo:
        """If several writers create a dataset at once, the metadata store lets one win, and all get
        its identity."""
        try:
            head = self.meta.create(name, uuid.uuid4())
        except ConflictError:
            head = self.meta.head(name)
            if self.catalogue.is_deleted(head.identity):  # and the deletion was interrupted
                self.meta.drop(head.identity)
                return self._create(name)
        created_ns = time.time_ns()
        self.catalogue.add(name, head.identity, created_ns)
        return DatasetInfo(name, head.identity, created_ns, head)

    def repair_metadata(self, identity: UUID, run: str = "") -> None:
        """Repair a dataset's metadata if the metadata store was restarted since they were last
        confirmed, and may have lost its last commits. `run` is the ID of the store's new run ("":
        not known)."""
        run = run or self.meta.needs_repair(identity)
        head = self._heads().get(identity) if run else None  # read from the new run
        if head is not None:
            unknown = find_unknown_chunks(self, self.meta, head, needs_repair=True)
            self.meta.repair(identity, run, self._batches_of(head, unknown))

    def _batches_of(self, head: DatasetHead, chunks: UnknownChunks) -> Iterator[CommitBatch]:
        """The entries of the chunks that the metadata store lacks. An unreadable orphan is logged
        and left out, since it must not stop every put. Raises LostChunks for a chunk that was
        acknowledged."""
        for chunk in chunks.unknown:
            batch, why = self._batch(head.identity, chunk)
            if batch is not None:
                yield batch
            elif chunk in chunks.acknowledged:
                newest = self.snapshots.newest(head.identity)
                view = self.snapshots.load_without_copy(head.identity, newest)
                raise lost_chunks_error(head.name, losses_in({chunk: why}, [view]))

    def _batch(self, identity: UUID, chunk: ChunkId) -> tuple[CommitBatch | None, str]:
        try:
            header = read_with_retries(lambda: self.read_header(identity, chunk))
            return batch_of(header, stored=True), ""
        except (FormatError, ObjectMissing) as error:
            log.warning("chunk %s is left out: %s", chunk_id_text(chunk), error.message)
            return None, error.message

    def commit_batches(self, identity: UUID, *batches: CommitBatch) -> int:
        """Commit, after a repair if the metadata store has been restarted; returns the version."""
        for _ in range(_RESTARTS_MAX):
            try:
                return self.meta.commit(identity, *batches)
            except StoreRestarted as restarted:
                with suppress(StoreRestarted):  # another restart: the next round repairs it
                    self.repair_metadata(identity, restarted.run_id)
        return self.meta.commit(identity, *batches)

    def recommit_missing(self, identity: UUID, chunks: Sequence[ChunkId]) -> int:
        """Commit again those of a writer's chunks that the metadata store has lost; returns their
        number."""
        committed = 0
        for chunk in self.meta.missing(identity, chunks) if chunks else ():
            batch, _ = self._batch(identity, chunk)
            if batch is not None:
                log.warning("chunk %s is committed again", chunk_id_text(chunk))
                self.commit_batches(identity, batch)
                committed += 1
        return committed

    def validate_chunk(self, identity: UUID, preamble: bytes, header: bytes) -> ValidatedChunk:
        return validate_chunk(self.objects, self.meta, self.clock, identity, preamble, header)

    def commit_all(self, identity: UUID, chunks: Iterable[ValidatedChunk]) -> int:
        batches = [chunk.batch for chunk in chunks]
        version = self.commit_batches(identity, *batches)
        digests = self._digests.setdefault(identity, {})
        digests.update((batch.chunk.id, entry_digest(batch.rows)) for batch in batches)
        while len(digests) > _DIGESTS_MAX:
            digests.pop(next(iter(digests)), None)
        return version

    def archive_records(self, identity: UUID) -> Sequence[ArchiveRecord]:
        return read_records(self.objects, identity)

    def record_archive(self, identity: UUID, record: ArchiveRecord) -> None:
        write_record(self.objects, identity, record)

    def publish(self, name: str, *, full: bool = False, as_snapshot: bool = False) -> int:
        """As `Repository.publish`; `as_snapshot` never writes a delta. Raises CorruptError, and
        publishes nothing, if the metadata store's data about chunks of this process differ from
        their headers."""
        info = self.dataset(name)
        if info.head is None:
            raise self.behind_error(name)
        self.meta.sync()
        digests = dict(self._digests.get(info.identity, {}))
        version = self.snapshots.publish(
            self.meta, info.head, full=full, as_snapshot=as_snapshot, entry_digests=digests
        )
        remove_expired_versions(self.objects, self.snapshots, info.identity)
        left = self._digests.get(info.identity, {})
        for chunk in digests:
            left.pop(chunk, None)
        return version

    def delete_dataset(self, name: str) -> Deletion:
        try:
            identities = [self.dataset(name).identity]
        except NoSuchDataset:
            identities = list(self.catalogue.deleted_named(name))
            if not identities:
                raise
        if not (self.meta_is_lost or isinstance(self._meta_problem, NoSpaceError)):
            _ = self.meta  # raises before anything is deleted
        removed = left = 0
        for identity in identities:
            self.catalogue.mark_deleted(name, identity)
            done = self.remove_deleted(name, identity)
            removed, left = removed + done.removed, left + done.left
        return Deletion(removed, left)

    def remove_deleted(self, name: str, identity: UUID) -> Deletion:
        """Remove the metadata and objects of a dataset that is marked as deleted. Repeatable."""
        removed_before = 0
        if not self.meta_is_lost:
            try:
                self.meta.drop(identity)  # first: a deleted dataset is found by its last object
            except NoSpaceError:  # the chunks lie on the same full disk: remove them first
                removed_before = remove_dataset(
                    self.objects, self.snapshots, identity, but_name=True
                ).removed
                if self._meta is None:
                    self.open_metadata(create=False)
                self.meta.drop(identity)
        done = remove_dataset(self.objects, self.snapshots, identity)
        done.log_left(name)
        return Deletion(removed_before + done.removed, done.left)


class LocalWriteSession(WriteSession):
    def __init__(self, repository: StoredRepository, info: DatasetInfo) -> None:
        load_view = partial(repository.view_of, lazy=True)
        super().__init__(info, repository.objects, repository.ids, load_view)
        self._repository = repository

    def validate_chunk(self, preamble: bytes, header: bytes) -> ValidatedChunk:
        with self._explain_missing_dataset():
            return self._repository.validate_chunk(self.identity, preamble, header)

    def commit_all(self, chunks: Iterable[ValidatedChunk]) -> int:
        committed = list(chunks)
        with self._explain_missing_dataset():
            version = self._repository.commit_all(self.identity, committed)
        self._remember(committed)
        return version

    def finish(self) -> int:
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

    def _head(self) -> DatasetHead:
        with self._explain_missing_dataset():
            head = self._repository.meta.head(self.name)
        if head.identity != self.identity:
            raise ConflictError(f"dataset {self.name!r} has been deleted meanwhile")
        return head

    @contextmanager
    def _explain_missing_dataset(self) -> Iterator[None]:
        """Turn NoSuchDataset into the reason: the dataset is deleted, or its metadata are lost."""
        try:
            yield
        except NoSuchDataset:
            if not self._repository.catalogue.is_deleted(self.identity):
                raise self._repository.behind_error(self.name) from None
            raise ConflictError(f"dataset {self.name!r} has been deleted meanwhile") from None


def _stat_of(record: np.void) -> Stat:
    return Stat(
        Kind(int(record["kind"])),
        int(record["mode"]),
        int(record["size"]),
        int(record["mtime_ns"]),
    )
