"""`purge`: frees the space of replaced and deleted entries (FORMAT.md, section 6, "Purge, step by
step").

A purge copies the live entries of chunks with too many holes (places of replaced or deleted
entries) into new chunks, then deletes chunks without live entries that no version and no reader
needs (`retention.py`). One purge per dataset at a time; readers and writers continue. It may be
killed at any step: nothing is lost, and the next purge continues.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ..errors import (
    CorruptError,
    DieselError,
    FormatError,
    NoSpaceError,
    NoSuchDataset,
    ObjectMissing,
)
from ..format.chunk import CHUNK_BYTES_DEFAULT, CHUNK_BYTES_MAX, ChunkHeader, damaged_places
from ..format.chunk_builder import ChunkBuilder
from ..format.chunk_id import LOWEST, chunk_id_text
from ..format.entries import ChunkId
from ..format.object_names import chunk_object, dataset_prefix
from ..format.snapshot.reader import Snapshot
from ..names import shown
from ..storage.metadata.store import ChunkRecord
from .catalog import DatasetInfo
from .expected_chunks import (
    absent_chunks,
    chunk_exists,
    expected_chunks,
    losses_in,
    lost_chunks_error,
    lost_text,
    read_chunk,
)
from .interface import PurgeOptions, PurgeReport, ReportProgress, no_progress
from .leases import EVERY_VERSION, PurgeLease, is_abandoned, leased_versions, leases
from .retention import (
    GRACE_S,
    ActiveTombstone,
    ChunkUse,
    DeletableChunks,
    RetentionPolicy,
    active_tombstones,
    chunk_usage,
    droppable_tombstones,
    old_enough,
    read_retention_policy,
    retained_versions,
    write_retention_policy,
)
from .stored import StoredRepository
from .validation import batch_of
from .writing import WriteSession, seal_and_store

log = logging.getLogger("diesel.purge")

UNDERSIZED_BYTES = CHUNK_BYTES_DEFAULT // 2
"""Smaller chunks are merged, since each chunk costs a request and a line of a listing."""

LEFTOVER_AGE_S = 86_400
"""A leftover (half-written object) of a dead process is removed at this age. A younger one stays,
since the process may live in another container with the same host name."""

_ENDED_LEASE_AGE_S = 86_400  # age at which the object of an ended lease is removed
_LEASE_CHECK_S = 10.0  # interval at which a deletion looks for new readers
_HEADER_ENTRY_BYTES = 60  # an entry's usual share of a chunk's header, with a name of 20 bytes
_UNUSED = ChunkUse(0, 0)  # for a chunk that a version does not name


def purge(
    repository: StoredRepository,
    name: str,
    options: PurgeOptions | None = None,
    progress: ReportProgress = no_progress,
) -> PurgeReport:
    """`Repository.purge`."""
    options = options or PurgeOptions()
    deleted = list(repository.catalogue.deleted_named(name))  # earlier datasets of this name
    removed = 0
    for identity in deleted if not options.dry_run else ():
        removed += repository.remove_deleted(name, identity).removed
    try:
        info = repository.dataset(name)
    except NoSuchDataset:
        if not deleted:
            raise
        return PurgeReport(notes=[f"{name} is deleted: {removed} of its objects were removed"])
    if options.dry_run:
        return _Purge(repository, info, options, progress).run()
    session = repository.begin(name, create=False)  # folds orphans in, unless a purge is under way
    _check_all_listed(repository, info)
    with PurgeLease.take(repository.objects, info.identity) as lease:
        return _Purge(repository, repository.dataset(name), options, progress, session, lease).run()


def _check_all_listed(repository: StoredRepository, info: DatasetInfo) -> None:
    """Raise CorruptError if a chunk in the metadata is lost or not listed: the store may hide
    others, too, and an entry that looks replaced may be the only copy."""
    identity, meta = info.identity, repository.meta
    expected = expected_chunks(repository.snapshots, meta, identity)
    listed = set(repository.chunk_ids(identity))
    absent = absent_chunks(repository, meta, identity, expected, listed)
    if absent.lost:
        views = [expected.published] if expected.published else []
        losses = losses_in({chunk: lost_text(chunk) for chunk in absent.lost}, views)
        raise lost_chunks_error(info.name, losses)
    for chunk in absent.unlisted:
        raise CorruptError(
            f"the listing lacks chunk {chunk_id_text(chunk)}, which is there; nothing was purged",
            advice="run it again when the object store lists all its objects",
        )


def reclaimable_bytes(repository: StoredRepository, name: str, view: Snapshot | None) -> int:
    """Without `view`, a snapshot is loaded only if a chunk has holes."""
    identity = repository.dataset(name).identity if view is None else view.identity
    records = [each for each in repository.meta.chunks(identity) if each.holes]
    if not records:
        return 0
    used, reclaimable = chunk_usage(view or repository.view(name)), 0
    for record in records:
        if record.holes == record.entries:
            reclaimable += record.object_bytes
        else:
            header_bytes = (record.entries - record.holes) * _HEADER_ENTRY_BYTES
            needed_bytes = used.get(record.id, _UNUSED).stored_bytes + header_bytes
            reclaimable += max(record.object_bytes - needed_bytes, 0)
    return reclaimable


class _Purge:
    """Without a session and a lease this is a dry run, and changes nothing."""

    def __init__(
        self,
        repository: StoredRepository,
        info: DatasetInfo,
        options: PurgeOptions,
        progress: ReportProgress,
        session: WriteSession | None = None,
        lease: PurgeLease | None = None,
    ) -> None:
        self._repository = repository
        self._objects = repository.objects
        self._versions = repository.snapshots
        self._meta = repository.meta
        self._info = info
        self._identity = info.identity
        self._options = options
        self._progress = progress
        self._session = session
        self._lease = lease
        self._report = PurgeReport()
        # Chunks that are damaged, of a newer format, or with bad entries
        self._left_alone: set[ChunkId] = set()
        self._droppable: dict[ChunkId, set[int]] = {}  # by chunk, places of tombstones to drop
        self._planned: set[ChunkId] = set()  # in a dry run: chunks that would be rewritten
        self._versions_before = frozenset(self._versions.versions(self._identity))
        self._removed_versions: set[int] = set()
        self._listing_complete = True  # all chunks in the metadata exist and are listed
        self._policy, self._grace_s = self._update_policy()

    def _update_policy(self) -> tuple[RetentionPolicy, float]:
        """Returns the dataset's new retention policy, and the grace period of this purge in
        seconds."""
        options = self._options
        before: RetentionPolicy | None = None
        try:
            before = read_retention_policy(self._objects, self._identity)
        except CorruptError:
            if options.keep < 0:  # otherwise the policy is written anew
                raise
        known = before or RetentionPolicy()
        keep = known.keep if options.keep < 0 else options.keep
        longest_s = known.grace_s
        if options.grace_s >= 0:
            longest_s = options.grace_s if options.grace_s > GRACE_S else 0
        new = RetentionPolicy(keep, longest_s)
        if self._lease is not None and new != before:
            write_retention_policy(self._objects, self._identity, new)
        return new, options.grace_s if options.grace_s >= 0 else max(GRACE_S, longest_s)

    def run(self) -> PurgeReport:
        began_s = time.time()
        self._publish()
        records = self._meta.chunks(self._identity)
        used = chunk_usage(self._repository.view(self._info.name))
        self._find_droppable(records, used, began_s)
        chosen = self._choose(records, used)
        no_space: NoSpaceError | None = None
        try:
            if self._session is not None:
                self._rewrite(self._session, chosen)
            else:
                self._planned.update(record.id for record in chosen)
        except NoSpaceError as error:
            no_space = error  # the deletion of old chunks may make room
        self._publish()
        self._reclaim()
        self._sweep()
        if no_space is not None:
            no_space.advice = (
                "unneeded chunks were deleted: run it again" if self._report.deleted else ""
            )
            raise no_space
        return self._report

    def _publish(self) -> None:
        """Publish the current state as a snapshot, so that new readers use the new chunks, and no
        delta needs the versions before."""
        if self._session is None:
            return
        head = self._meta.head(self._info.name)
        if head.version and not self._versions.has_snapshot(self._identity, head.version):
            self._repository.publish(self._info.name, as_snapshot=True)

    def _check_lease(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def _note(self, text: str) -> None:
        log.info("%s: %s", self._info.name, text)
        self._report.notes.append(text)

    def _header(self, chunk: ChunkId) -> ChunkHeader:
        return self._repository.read_header(self._identity, chunk)

    def _purgeable_header(self, chunk: ChunkId) -> ChunkHeader | None:
        """None if the chunk must stay as it is, which the report notes."""
        if chunk in self._left_alone:
            return None
        try:
            header = self._header(chunk)
        except (FormatError, ObjectMissing) as error:
            self._leave_alone(chunk, error.message)
            return None
        if header.faults:
            self._leave_alone(chunk, "it has entries that are skipped")
            return None
        return header

    def _leave_alone(self, chunk: ChunkId, why: str) -> None:
        self._left_alone.add(chunk)
        self._note(f"chunk {chunk_id_text(chunk)} stays as it is: {why}")

    # Finding the work

    def _find_droppable(
        self, records: Sequence[ChunkRecord], used: dict[ChunkId, ChunkUse], began_s: float
    ) -> None:
        """Set `_droppable` and `_listing_complete`; `used` is of the current version."""
        known = {record.id for record in records}
        listed = set(self._repository.chunk_ids(self._identity))
        unlisted = [record for record in records if record.id not in listed]
        self._listing_complete = self._are_deleted(unlisted)
        if not self._listing_complete:
            return
        tombstones: dict[bytes, ActiveTombstone] = {}
        for record in records:
            files = used.get(record.id, _UNUSED).entries
            # The entries that are neither holes nor used are tombstones
            if record.id in listed and record.entries - record.holes > files:
                header = self._purgeable_header(record.id)
                if header is not None:
                    holes = set(self._meta.holes(self._identity, record.id).tolist())
                    tombstones |= dict(active_tombstones(header, holes))
        old = old_enough(tombstones, began_s)
        if not old:
            return
        if not self._forgotten_are_deleted(known):
            self._note("a chunk that was forgotten is still there: no tombstone is dropped")
            return
        with_dead = [record.id for record in records if record.holes] + sorted(listed - known)
        self._droppable = droppable_tombstones(old, with_dead, self._header)

    def _are_deleted(self, unlisted: Iterable[ChunkRecord]) -> bool:
        """Whether every unlisted chunk is an empty chunk whose deletion was interrupted. Otherwise
        the listing is incomplete, or the object store was set back to an older copy: then a chunk
        that looks empty may hold the only copies."""
        for record in unlisted:
            text = chunk_id_text(record.id)
            if chunk_exists(self._objects, self._identity, record.id):
                self._note(f"the listing lacks chunk {text}: nothing is deleted")
            elif record.holes == record.entries:
                continue  # its deletion was interrupted
            else:
                self._note(f"chunk {text} is lost: nothing is deleted; run `dlcmd verify`")
            return False
        return True

    def _forgotten_are_deleted(self, known: Collection[ChunkId]) -> bool:
        """Whether the store lacks every chunk that kept versions have and the metadata do not."""
        forgotten: set[ChunkId] = set()
        for version in self._versions.versions(self._identity):
            try:
                view = self._versions.load_without_copy(self._identity, version)
            except (FormatError, ObjectMissing):
                return False
            forgotten.update(set(view.chunk_ids).difference(known))
        return not any(
            chunk_exists(self._objects, self._identity, chunk) for chunk in sorted(forgotten)
        )

    def _dead_entries(self, record: ChunkRecord) -> int:
        return record.holes + len(self._droppable.get(record.id, ()))

    def _choose(
        self, records: Sequence[ChunkRecord], used: dict[ChunkId, ChunkUse]
    ) -> list[ChunkRecord]:
        """The chunks to rewrite, by ID: those with too many unused bytes, and small ones if merging
        gives fewer chunks."""
        chosen, small = list[ChunkRecord](), list[ChunkRecord]()
        for record in records:
            dead = self._dead_entries(record)
            if dead == record.entries or record.id in self._left_alone:
                continue
            unused = record.object_bytes - used.get(record.id, _UNUSED).stored_bytes
            if dead and unused > self._allowed_bytes(record) and self._is_wasteful(record):
                chosen.append(record)
            elif record.object_bytes < UNDERSIZED_BYTES:
                small.append(record)
        chosen_bytes = sum(used.get(record.id, _UNUSED).stored_bytes for record in chosen)
        merged_bytes = chosen_bytes + sum(record.object_bytes for record in small)
        chunks_apart = len(small) + math.ceil(chosen_bytes / CHUNK_BYTES_DEFAULT)
        if math.ceil(merged_bytes / CHUNK_BYTES_DEFAULT) < chunks_apart:
            chosen += small
        self._report.rewritten = len(chosen)
        return sorted(chosen)

    def _allowed_bytes(self, record: ChunkRecord) -> int:
        return record.object_bytes * self._options.max_unused_ppm // 1_000_000

    def _is_wasteful(self, record: ChunkRecord) -> bool:
        """Counts the unused bytes exactly, from the header. If they are too many, adds them to the
        report."""
        header = self._purgeable_header(record.id)
        if header is None:
            return False
        dead = sorted(self._dead_places(record.id))
        body_bytes = int(header.records["stored"][dead].sum())
        header_bytes = header.preamble.header_stored * len(dead) // max(len(header), 1)
        if body_bytes + header_bytes <= self._allowed_bytes(record):
            return False
        self._report.unused_bytes += body_bytes + header_bytes
        return True

    def _dead_places(self, chunk: ChunkId) -> set[int]:
        holes = self._meta.holes(self._identity, chunk).tolist()
        return {*holes, *self._droppable.get(chunk, ())}

    # Writing

    def _rewrite(self, session: WriteSession, chosen: Sequence[ChunkRecord]) -> None:
        largest = max((record.object_bytes for record in chosen), default=0)
        chunk_bytes = min(max(CHUNK_BYTES_DEFAULT, largest), CHUNK_BYTES_MAX)
        builder = ChunkBuilder(self._identity, chunk_bytes, "none")
        for done, record in enumerate(chosen):
            self._progress(done, len(chosen))
            try:
                self._copy(session, builder, record.id)
            except (FormatError, ObjectMissing) as error:
                self._report.rewritten -= 1
                self._leave_alone(record.id, error.message)
        if len(builder):
            self._store(session, builder)
        self._progress(len(chosen), len(chosen))

    def _copy(self, session: WriteSession, builder: ChunkBuilder, chunk: ChunkId) -> None:
        """Raises CorruptError, before copying any entry, if a live one is damaged."""
        dead = self._dead_places(chunk)
        header, bodies = read_chunk(self._objects, self._identity, chunk)
        if header.faults:
            raise CorruptError("it has entries that are skipped")
        for place in damaged_places(header, bodies):
            if place not in dead:
                raise CorruptError(f"the bytes of {shown(header.path(place))} are damaged")
        for place in range(len(header)):
            if place in dead:
                continue
            record = header.records[place]
            size = int(record["stored"])
            start = int(record["offset"]) - header.preamble.body_start if size else 0
            builder.add_copy(header, place, bodies[start : start + size])
            self._report.copied_bytes += size
            if builder.full:
                self._store(session, builder)

    def _store(self, session: WriteSession, builder: ChunkBuilder) -> None:
        """Store a chunk, then commit it as written by a purge: its entries replace only entries
        with equal stamps. If the purge loses its lease in between, no data is lost."""
        chunk, _, header = seal_and_store(builder, self._objects, self._identity, session.new_id)
        self._check_lease()
        batch = replace(batch_of(header, stored=True), by_purge=True)
        self._meta.commit(self._identity, batch)
        log.debug("%d entries have moved into %s", len(header), chunk_id_text(chunk))
        self._report.written += 1
        builder.clear()

    # Deleting

    def _reclaim(self) -> None:
        """Remove unneeded versions and chunks; chunks from the metadata first, then from the
        store."""
        newest = LOWEST if self._planned else self._meta.head(self._info.name).newest
        empty = {
            record.id: record
            for record in self._meta.chunks(self._identity)
            if (self._dead_entries(record) == record.entries or record.id in self._planned)
            and record.id not in self._left_alone
            and record.id != newest
        }
        now_s = time.time()
        leased = leased_versions(self._objects, self._identity, now_s)
        now_us = int(now_s * 1e6)
        # A dry run assumes the version that the purge would publish
        planned = {now_us: now_us} if self._planned else {}
        versions = self._expire(leased, planned)
        deletable = DeletableChunks(self._versions, self._identity, empty, now_us)

        def unreferenced() -> frozenset[ChunkId]:
            before_us = int((now_s - self._grace_s) * 1e6)
            now_leased = leased_versions(self._objects, self._identity, time.time())
            return deletable.unreferenced(versions, now_leased, before_us)

        chosen: list[ChunkId] = []
        if self._listing_complete:
            try:
                chosen = sorted(chunk for chunk in unreferenced() if self._may_go(chunk))
            except (FormatError, ObjectMissing) as error:
                self._note(f"nothing is deleted, since a kept version cannot be read: {error}")
        deleted = chosen if self._session is None else self._delete(chosen, unreferenced)
        if deleted:  # `_delete` has published another version
            leased = leased_versions(self._objects, self._identity, time.time())
            self._expire(leased, {**planned, now_us + 1: now_us} if self._session is None else {})
        # A put that ended meanwhile may have published a delta on a version that is gone now
        self._publish()
        report, empty_bytes = self._report, sum(each.object_bytes for each in empty.values())
        report.deleted = len(deleted)
        report.deleted_bytes = sum(empty[chunk].object_bytes for chunk in deleted)
        report.tombstones = sum(len(self._droppable.get(chunk, ())) for chunk in deleted)
        report.waiting = len(empty) - len(deleted)
        report.waiting_bytes = empty_bytes - report.deleted_bytes

    def _may_go(self, chunk: ChunkId) -> bool:
        """A chunk of unknown content stays, unless it is gone already."""
        if not chunk_exists(self._objects, self._identity, chunk):
            return True
        return self._purgeable_header(chunk) is not None

    def _expire(self, leased: Collection[int], planned: Mapping[int, int]) -> dict[int, int]:
        """Remove versions that need not be kept (a dry run only counts them). Returns the others
        with the times of their publication. The result and `planned` are as in
        `retained_versions`."""
        forms = self._versions.forms(self._identity, with_damaged=True)
        published = forms.published
        retained = retained_versions(
            self._versions, self._identity, published, self._policy, self._grace_s, planned
        )
        left = {**published, **planned}
        kept = {*retained, *leased}
        roots = kept
        if self._session is None:  # a purge would publish a snapshot of the newest version
            roots = kept - {max(published, default=0)}
        kept |= forms.needed(roots)
        expired = left.keys() - kept
        if EVERY_VERSION in leased or not self._listing_complete:
            expired = set()
        for version in sorted(expired, reverse=True):
            if self._session is not None:
                self._check_lease()
                self._versions.remove(self._identity, version)
            del left[version]
        self._removed_versions |= expired
        if self._session is not None:  # its publications have removed others
            self._removed_versions |= self._versions_before - left.keys()
        self._report.versions_removed = len(self._removed_versions & self._versions_before)
        self._report.versions_kept = len(left)
        return left

    def _delete(
        self, chunks: Sequence[ChunkId], unreferenced: Callable[[], frozenset[ChunkId]]
    ) -> list[ChunkId]:
        """Make the metadata store forget `chunks`, then delete those that `unreferenced`, which is
        called from time to time, still returns. Returns the deleted chunks."""
        if not chunks:
            return []
        self._check_lease()
        forgotten = sorted(self._forget(chunks))
        self._publish()
        deleted, looked_s, allowed = list[ChunkId](), 0.0, frozenset[ChunkId]()
        for done, chunk in enumerate(forgotten):
            self._progress(done, len(forgotten))
            if not done or time.monotonic() > looked_s + _LEASE_CHECK_S:
                looked_s, allowed = time.monotonic(), unreferenced()
            if chunk not in allowed:  # a new reader needs it
                continue
            self._check_lease()
            self._objects.delete(chunk_object(self._identity, chunk))
            if chunk_exists(self._objects, self._identity, chunk):
                self._note(f"chunk {chunk_id_text(chunk)} was deleted, and is still there")
            else:
                deleted.append(chunk)
        again = {record.id for record in self._meta.chunks(self._identity)}.intersection(deleted)
        if again:  # a rebuild had read them before their deletion
            self._forget(again)
            self._publish()
        return deleted

    def _forget(self, chunks: Collection[ChunkId]) -> frozenset[ChunkId]:
        plain = [chunk for chunk in chunks if chunk not in self._droppable]
        with_tombstones = [chunk for chunk in chunks if chunk in self._droppable]
        forgotten = self._meta.forget(self._identity, plain)
        return forgotten | self._meta.forget(self._identity, with_tombstones, tombstones=True)

    # Leftovers

    def _sweep(self) -> None:
        now_s = time.time()
        for leftover in self._objects.housekeeping.leftovers(dataset_prefix(self._identity)):
            if is_abandoned(leftover, now_s, LEFTOVER_AGE_S):
                self._report.leftovers += 1
                if self._session is not None:
                    self._check_lease()
                    self._objects.housekeeping.discard(leftover)
        if self._session is None:
            return
        for name, lease, is_valid in list(leases(self._objects, self._identity, now_s)):
            if not is_valid and (lease.holder_is_dead or lease.until + _ENDED_LEASE_AGE_S < now_s):
                self._check_lease()
                with suppress(DieselError):
                    self._objects.delete(name)
