"""`purge`: give back the space of replaced and deleted entries (FORMAT.md, section 6).

An entry that is replaced or deleted leaves a hole in its chunk. A purge copies the other entries of
chunks with too many holes into new chunks, then deletes chunks without any live entry that no
version and no reader needs (`retention.py` decides that). One purge per dataset at a time; readers
and writers go on beside it. Whatever ends it, at any step: nothing is lost, and the next purge goes
on.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from uuid import UUID

from ..errors import (
    CorruptError,
    DieselError,
    FormatError,
    NoSpaceError,
    NoSuchDataset,
    ObjectMissing,
)
from ..format.chunk import (
    CHUNK_BYTES_DEFAULT,
    CHUNK_BYTES_MAX,
    Header,
    damaged_places,
    parse_header,
    parse_preamble,
)
from ..format.chunk_builder import ChunkBuilder
from ..format.chunk_id import LOWEST, chunk_id_text
from ..format.entries import ChunkId
from ..format.object_names import chunk_object, dataset_prefix
from ..format.snapshot.reader import Snapshot
from ..names import shown
from ..storage.metadata.store import ChunkRecord
from .catalog import DatasetInfo
from .expected_chunks import (
    ExpectedChunks,
    absent_chunks,
    chunk_exists,
    expected_chunks,
    losses_in,
    lost_chunks_error,
    lost_text,
)
from .interface import PurgeOptions, PurgeReport, ReportProgress
from .leases import (
    EVERY_VERSION,
    PurgeLease,
    is_abandoned,
    leased_versions,
    leases,
)
from .retention import (
    GRACE_S,
    ActiveTombstone,
    DeletableChunks,
    RetentionPolicy,
    Usage,
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
"""A leftover of a dead process is removed only when it is this old: the process number may be that
of a container with the same host name."""

_ENDED_LEASE_AGE_S = 86_400  # before the object of a lease that is over is removed
_LEASE_CHECK_S = 10.0  # how often a deletion looks for new readers


def purge(
    repository: StoredRepository, name: str, options: PurgeOptions, progress: ReportProgress
) -> PurgeReport:
    """`Repository.purge` over stores that this process has opened."""
    dying = list(repository.catalogue.deleted_named(name))
    removed = 0 if options.dry_run else _remove_deleted(repository, name, dying)
    try:
        info = repository.dataset(name)
    except NoSuchDataset:
        if not dying:
            raise
        return PurgeReport(notes=[f"{name} is deleted: {removed} of its objects were removed"])
    if options.dry_run:
        return _Purge(repository, info, options, progress).run()
    session = repository.begin(name, create=False)  # folds orphans in, as long as no lease stands
    _refuse_unseen(repository, info)
    with PurgeLease.take(repository.objects, info.identity) as lease:
        return _Purge(repository, repository.dataset(name), options, progress, session, lease).run()


def _refuse_unseen(repository: StoredRepository, info: DatasetInfo) -> None:
    """Raise CorruptError where a chunk that the metadata name is lost, or is not listed.

    Then the store may hide other chunks, too, and what looks replaced may be the only copy.
    """
    identity = info.identity

    def ask() -> ExpectedChunks:
        return expected_chunks(repository.snapshots, repository.meta, identity)

    expected, listed = ask(), set(repository.chunk_ids(identity))
    absent = absent_chunks(repository, identity, expected, listed, ask)
    if absent.lost:
        views = [expected.published] if expected.published else []
        losses = losses_in({chunk: lost_text(chunk) for chunk in absent.lost}, views)
        raise lost_chunks_error(info.name, losses)
    for chunk in absent.unlisted:
        raise CorruptError(
            f"the listing lacks chunk {chunk_id_text(chunk)}, which is there; nothing was purged",
            advice="run it again when the object store lists all its objects",
        )


def _remove_deleted(repository: StoredRepository, name: str, dying: Sequence[UUID]) -> int:
    return sum(repository.remove_deleted(name, identity).removed for identity in dying)


def reclaimable_bytes(repository: StoredRepository, view: Snapshot) -> int:
    """`Repository.reclaimable_bytes` over stores that this process has opened."""
    used, found = chunk_usage(view), 0
    for record in repository.meta.chunks(view.identity):
        if record.holes == record.entries:
            found += record.object_bytes
        elif record.holes:
            there = used.get(record.id, Usage(0, 0))
            alive = record.entries - record.holes
            unused = record.object_bytes - there.stored_bytes - alive * _HEADER_ENTRY_BYTES
            found += max(unused, 0)
    return found


_HEADER_ENTRY_BYTES = 60
"""What an entry takes in a chunk's header, with a name of some 20 bytes."""


class _Purge:
    """One purge. Without a session and a lease it is a dry run, and changes nothing."""

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
        self._left_alone: set[ChunkId] = set()  # damaged, newer, or with entries that are skipped
        self._due: dict[ChunkId, set[int]] = {}  # by chunk, places of tombstones to drop
        self._copied: set[ChunkId] = set()  # in a dry run: chunks that would be rewritten
        self._versions_before = frozenset(self._versions.versions(self._identity))
        self._removed: set[int] = set()  # versions
        self._listing_complete = True  # all that the metadata name is there, and listed
        self._policy, self._grace_s = self._policies()

    def _policies(self) -> tuple[RetentionPolicy, float]:
        """How many versions are kept, and the grace period of this purge."""
        options = self._options
        policy = (
            read_retention_policy(self._objects, self._identity)
            if options.keep < 0
            else RetentionPolicy()
        )
        keep = policy.keep if options.keep < 0 else options.keep
        longest_s = policy.grace_s
        if options.grace_s >= 0:
            longest_s = options.grace_s if options.grace_s > GRACE_S else 0
        new = RetentionPolicy(keep, longest_s)
        if self._lease is not None and new != policy:
            write_retention_policy(self._objects, self._identity, new)
        return new, options.grace_s if options.grace_s >= 0 else max(GRACE_S, longest_s)

    def run(self) -> PurgeReport:
        """Do all steps."""
        began_s = time.time()
        self._publish()
        records = self._meta.chunks(self._identity)
        used = chunk_usage(self._repository.view(self._info.name))
        self._find_due(records, used, began_s)
        chosen = self._choose(records, used)
        rewriter, full = None, None
        try:
            if self._session is not None:
                rewriter = self._rewrite(chosen)
            else:
                self._copied.update(record.id for record in chosen)
        except NoSpaceError as error:
            full = error  # deleting what can go may make room
        self._publish()
        self._reclaim()
        self._sweep()
        if rewriter is not None:
            self._report.written, self._report.copied_bytes = (
                rewriter.written,
                rewriter.copied_bytes,
            )
        if full is not None:
            full.advice = "what could go was deleted: run it again" if self._report.deleted else ""
            raise full
        return self._report

    def _publish(self) -> None:
        """Publish the current state: whoever opens the dataset from now on reads new chunks."""
        if self._session is None:
            return
        head = self._meta.head(self._info.name)
        if head.version and self._versions.newest(self._identity) != head.version:
            self._repository.publish(self._info.name)

    def _check(self) -> None:
        """Raise BusyError where another purge may have begun since."""
        if self._lease is not None:
            self._lease.check()

    def _note(self, text: str) -> None:
        log.info("%s: %s", self._info.name, text)
        self._report.notes.append(text)

    def _header(self, chunk: ChunkId) -> Header:
        return self._repository.read_header(self._identity, chunk)

    def _readable(self, chunk: ChunkId) -> Header | None:
        """The header of a chunk; None for a chunk that cannot be purged, which is noted."""
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

    # What there is to do

    def _find_due(
        self, records: Sequence[ChunkRecord], used: dict[ChunkId, Usage], began_s: float
    ) -> None:
        """Find the tombstones that hide nothing any more, and whether anything may be deleted."""
        known = {record.id for record in records}
        listed = set(self._repository.chunk_ids(self._identity))
        self._listing_complete = self._all_are_there(
            record for record in records if record.id not in listed
        )
        if not self._listing_complete:
            return
        found: dict[bytes, ActiveTombstone] = {}
        for record in records:
            files = used.get(record.id, Usage(0, 0)).places
            if record.id in listed and record.entries - record.holes > files:
                header = self._readable(record.id)
                if header is not None:
                    holes = set(self._meta.holes(self._identity, record.id).tolist())
                    found |= dict(active_tombstones(header, holes))
        old = old_enough(found, began_s)
        if not old:
            return
        if not self._forgotten_are_gone(known):
            self._note("a chunk that was forgotten is still there: no tombstone is dropped")
            return
        suspects = [record.id for record in records if record.holes] + sorted(listed - known)
        self._due = droppable_tombstones(old, suspects, self._header)

    def _all_are_there(self, records: Iterable[ChunkRecord]) -> bool:
        """Whether every chunk that was not listed is an empty one whose deletion was interrupted.

        Else the listing is short, or the store is an older copy of itself: then a chunk that looks
        empty may hold the only copies.
        """
        for record in records:
            text = chunk_id_text(record.id)
            if chunk_exists(self._objects, self._identity, record.id):
                self._note(f"the listing lacks chunk {text}: nothing is deleted")
            elif record.holes == record.entries:
                continue  # a deletion of it was interrupted
            else:
                self._note(f"chunk {text} is lost: nothing is deleted; run `dlcmd verify`")
            return False
        return True

    def _forgotten_are_gone(self, known: Collection[ChunkId]) -> bool:
        """Whether the store lacks all chunks that kept versions name and the metadata have
        forgotten."""
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

    def _dead(self, record: ChunkRecord) -> int:
        """How many entries of a chunk need not be copied."""
        return record.holes + len(self._due.get(record.id, ()))

    def _choose(
        self, records: Sequence[ChunkRecord], used: dict[ChunkId, Usage]
    ) -> list[ChunkRecord]:
        """The chunks to rewrite, in order of their IDs."""
        chosen, small = list[ChunkRecord](), list[ChunkRecord]()
        for record in records:
            dead = self._dead(record)
            if dead == record.entries or record.id in self._left_alone:
                continue
            unused = record.object_bytes - used.get(record.id, Usage(0, 0)).stored_bytes
            if dead and unused > self._allowed(record) and self._is_wasteful(record):
                chosen.append(record)
            elif record.object_bytes < UNDERSIZED_BYTES:
                small.append(record)
        left = sum(used.get(record.id, Usage(0, 0)).stored_bytes for record in chosen)
        together = left + sum(record.object_bytes for record in small)
        apart = len(small) - -left // CHUNK_BYTES_DEFAULT
        if -(-together // CHUNK_BYTES_DEFAULT) < apart:
            chosen += small
        self._report.rewritten = len(chosen)
        return sorted(chosen)

    def _allowed(self, record: ChunkRecord) -> int:
        return record.object_bytes * self._options.max_unused_ppm // 1_000_000

    def _is_wasteful(self, record: ChunkRecord) -> bool:
        """Whether too many bytes of a chunk are unused, counted exactly."""
        header = self._readable(record.id)
        if header is None:
            return False
        dead = sorted(self._dropped(record.id))
        bodies = int(header.records["stored"][dead].sum())
        share = header.preamble.header_stored * len(dead) // max(len(header), 1)
        if bodies + share <= self._allowed(record):
            return False
        self._report.unused_bytes += bodies + share
        return True

    def _dropped(self, chunk: ChunkId) -> set[int]:
        """The places of a chunk that need not be copied."""
        holes = self._meta.holes(self._identity, chunk).tolist()
        return {*holes, *self._due.get(chunk, ())}

    # Writing

    def _rewrite(self, chosen: Sequence[ChunkRecord]) -> "_Rewriter":
        assert self._session is not None
        largest = max((record.object_bytes for record in chosen), default=0)
        chunk_bytes = min(max(CHUNK_BYTES_DEFAULT, largest), CHUNK_BYTES_MAX)
        rewriter = _Rewriter(self._repository, self._session, chunk_bytes, self._check)
        for done, record in enumerate(chosen):
            self._progress(done, len(chosen))
            try:
                rewriter.copy(record.id, self._dropped(record.id))
            except (FormatError, ObjectMissing) as error:
                self._report.rewritten -= 1
                self._leave_alone(record.id, error.message)
        rewriter.finish()
        self._progress(len(chosen), len(chosen))
        return rewriter

    # Deleting

    def _reclaim(self) -> None:
        """Remove versions and chunks that nobody needs, from the metadata before the objects."""
        newest = LOWEST if self._copied else self._meta.head(self._info.name).newest
        empty = {
            record.id: record
            for record in self._meta.chunks(self._identity)
            if (self._dead(record) == record.entries or record.id in self._copied)
            and record.id not in self._left_alone
            and record.id != newest
        }
        now_s = time.time()
        leased = leased_versions(self._objects, self._identity, now_s)
        now_us = int(now_s * 1e6)
        # A dry run plans with the version that the purge would publish
        coming = {now_us: now_us} if self._copied else {}
        versions = self._expire(leased, coming)
        pins = DeletableChunks(self._versions, self._identity, empty, now_us)

        def free() -> frozenset[ChunkId]:
            before_us = int((now_s - self._grace_s) * 1e6)
            there = leased_versions(self._objects, self._identity, time.time())
            return pins.unreferenced(versions, there, before_us)

        going: list[ChunkId] = []
        if self._listing_complete:
            try:
                going = sorted(chunk for chunk in free() if self._may_go(chunk))
            except (FormatError, ObjectMissing) as error:
                self._note(f"nothing is deleted, since a kept version cannot be read: {error}")
        if self._session is not None:
            going = self._delete(going, free)
        if going:  # another version has been published since
            leased = leased_versions(self._objects, self._identity, time.time())
            self._expire(leased, {**coming, now_us + 1: now_us} if self._session is None else {})
        self._report.deleted = len(going)
        self._report.deleted_bytes = sum(empty[chunk].object_bytes for chunk in going)
        self._report.tombstones = sum(len(self._due.get(chunk, ())) for chunk in going)
        self._report.waiting = len(empty) - len(going)
        self._report.waiting_bytes = (
            sum(record.object_bytes for record in empty.values()) - self._report.deleted_bytes
        )

    def _may_go(self, chunk: ChunkId) -> bool:
        """Whether an empty chunk is lost, or can be read: then we know what is deleted with it."""
        if not chunk_exists(self._objects, self._identity, chunk):
            return True
        return self._readable(chunk) is not None

    def _expire(self, leased: Collection[int], planned: Mapping[int, int]) -> dict[int, int]:
        """Remove versions that need not be kept. Returns those that are left, ascending, and when
        each was published (us since 1970)."""
        there = self._versions.published(self._identity)
        stay = retained_versions(
            self._versions, self._identity, there, self._policy, self._grace_s, planned
        )
        stay.update(leased)
        left = {**there, **planned}
        going = set(left).difference(stay)
        if EVERY_VERSION in leased or not self._listing_complete:
            going = set()
        for version in sorted(going):
            if self._session is not None:
                self._check()
                self._versions.remove(self._identity, version)
            del left[version]
        self._removed |= going
        self._report.versions_removed = len(self._removed & self._versions_before)
        self._report.versions_kept = len(left)
        return left

    def _delete(
        self, going: Sequence[ChunkId], free: Callable[[], frozenset[ChunkId]]
    ) -> list[ChunkId]:
        """Forget chunks in the metadata, then delete their objects; returns the chunks that have
        gone."""
        if not going:
            return []
        self._check()
        forgotten = self._forget(going)
        self._publish()
        done = list[ChunkId]()
        for chunk in self._still_unreferenced(sorted(forgotten), free):
            self._check()
            self._objects.delete(chunk_object(self._identity, chunk))
            if chunk_exists(self._objects, self._identity, chunk):
                self._note(f"chunk {chunk_id_text(chunk)} was deleted, and is still there")
            else:
                done.append(chunk)
        again = {record.id for record in self._meta.chunks(self._identity)}.intersection(done)
        if again:  # a rebuild had read them before they were deleted
            self._forget(again)
            self._publish()
        return done

    def _forget(self, chunks: Collection[ChunkId]) -> frozenset[ChunkId]:
        """Let the metadata store forget chunks, and drop the tombstones in them that are due.
        Returns the chunks that it has forgotten."""
        plain = [chunk for chunk in chunks if chunk not in self._due]
        dead = [chunk for chunk in chunks if chunk in self._due]
        forgotten = self._meta.forget(self._identity, plain)
        return forgotten | self._meta.forget(self._identity, dead, tombstones=True)

    def _still_unreferenced(
        self, chunks: Sequence[ChunkId], free: Callable[[], frozenset[ChunkId]]
    ) -> Iterator[ChunkId]:
        """The chunks that no reader who has come meanwhile needs."""
        looked_s, allowed = 0.0, frozenset[ChunkId]()
        for done, chunk in enumerate(chunks):
            self._progress(done, len(chunks))
            if not done or time.monotonic() > looked_s + _LEASE_CHECK_S:
                looked_s, allowed = time.monotonic(), free()
            if chunk in allowed:
                yield chunk

    # Leftovers

    def _sweep(self) -> None:
        """Remove leases that ended long ago, and half-written objects of dead writers."""
        now_s = time.time()
        for leftover in self._objects.leftovers(dataset_prefix(self._identity)):
            if is_abandoned(leftover, now_s, LEFTOVER_AGE_S):
                self._report.leftovers += 1
                if self._session is not None:
                    self._check()
                    self._objects.discard(leftover)
        if self._session is None:
            return
        for name, lease, holds in list(leases(self._objects, self._identity, now_s)):
            if not holds and (lease.holder_is_dead or lease.until + _ENDED_LEASE_AGE_S < now_s):
                self._check()
                with suppress(DieselError):
                    self._objects.delete(name)


class _Rewriter:
    """Copies live entries of old chunks into new ones; stamps and stored bytes stay as they are.

    A new chunk is durable before it is committed. `before_commit` may raise: then the chunk just
    written is not committed, and nothing is lost. `finish` writes the last chunk.
    """

    def __init__(
        self,
        repository: StoredRepository,
        session: WriteSession,
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

        Raises CorruptError where one of the others is damaged; then none has been copied.
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
        """Write the entries that no chunk has yet."""
        if len(self._builder):
            self._write()

    def _write(self) -> None:
        """Store a chunk, then commit it as written by a purge: its entries take the places of
        entries with equal stamps, and no others."""
        session = self._session
        chunk, _, header = seal_and_store(
            self._builder, session.objects, session.identity, session.new_id
        )
        self._about_to_commit()
        self._repository.meta.commit(
            session.identity, replace(batch_of(header, stored=True), by_purge=True)
        )
        log.debug("%d entries have moved into %s", len(header), chunk_id_text(chunk))
        self.written += 1
        self._builder.clear()
