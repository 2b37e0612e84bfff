"""`purge`: space that replaced and deleted entries have left is given back (FORMAT.md, section 6).

Owned here: the order of the steps, and what is done to which chunk. Not owned: which tombstones are
due (`tombstones.py`), what versions and leases pin (`retention.py`), copying (`rewriting.py`), what
is one transaction (the metadata store). One purge per dataset at a time; beside it writers and
readers go on. Whatever ends it, at any step: nothing is lost, and the next purge goes on.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from typing import Self
from uuid import UUID

from ..errors import (
    CorruptError,
    DieselError,
    FormatError,
    NoSpaceError,
    NoSuchDataset,
    ObjectMissing,
    UsageError,
)
from ..format.chunk import CHUNK_BYTES_DEFAULT, CHUNK_BYTES_MAX, Header
from ..format.chunk_id import LOWEST, chunk_id_text
from ..format.entries import ChunkId
from ..format.object_names import chunk_object, dataset_prefix
from ..format.snapshot.reader import Snapshot
from ..net.messages import Fields, Message, Value
from ..storage.metadata.store import ChunkRecord
from .catalog import DatasetInfo
from .expected_chunks import (
    ExpectedChunks,
    absent_chunks,
    expected_chunks,
    losses_in,
    lost_chunks_error,
    lost_text,
)
from .leases import (
    EVERY_VERSION,
    GRACE_S_MAX,
    KEEP_MAX,
    PurgeLease,
    RetentionPolicy,
    is_abandoned,
    leased_versions,
    leases,
    read_retention_policy,
    write_retention_policy,
)
from .local import LocalRepository, LocalWriteSession, ReportProgress, no_progress
from .retention import DeletableChunks, Usage, chunk_usage
from .rewriting import Rewriter
from .tombstones import (
    ActiveTombstone,
    active_tombstones,
    all_gone,
    droppable_tombstones,
    old_enough,
)
from .versions import GRACE_S

log = logging.getLogger("diesel.housekeeping")

MAX_UNUSED_PPM = 50_000
"""5 %: of a chunk that many parts in a million may be unused."""

UNDERSIZED_BYTES = CHUNK_BYTES_DEFAULT // 2
"""Smaller chunks are merged: requests and listings cost by the chunk."""

LEFTOVER_AGE_S = 86_400
"""A process number may be of a container with the same host name."""

_ENDED_LEASE_AGE_S = 86_400
_LOOK_AT_LEASES_S = 10.0
_AS_POLICY = -1


@dataclass(frozen=True, slots=True)
class PurgeOptions:
    """What to purge. `keep` and `grace_s` of -1: as the dataset's policy says."""

    max_unused_ppm: int = MAX_UNUSED_PPM
    keep: int = _AS_POLICY  # versions
    grace_s: int = _AS_POLICY
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.keep > KEEP_MAX or self.grace_s > GRACE_S_MAX:
            raise UsageError(f"at most {KEEP_MAX} versions are kept, and {GRACE_S_MAX} s of grace")

    def to_message(self) -> Message:
        """These options as they travel."""
        return dict(asdict(self))

    @classmethod
    def from_message(cls, message: Message) -> Self:
        """The options that were sent. Raises UsageError for anything else."""
        found = Fields(message, "options of a purge")
        options = cls(
            found.integer("max_unused_ppm", MAX_UNUSED_PPM, high=1_000_000),
            found.integer("keep", _AS_POLICY, low=_AS_POLICY, high=KEEP_MAX),
            found.integer("grace_s", _AS_POLICY, low=_AS_POLICY, high=GRACE_S_MAX),
            found.flag("dry_run", False),
        )
        found.end()
        return options


@dataclass(frozen=True, slots=True)
class PurgeReport:
    """What a purge did, or would have done; sizes in bytes."""

    rewritten: int = 0  # chunks whose entries were copied
    unused_bytes: int = 0  # in them
    written: int = 0  # new chunks
    copied_bytes: int = 0
    deleted: int = 0  # chunks
    deleted_bytes: int = 0
    waiting: int = 0  # empty chunks that the grace period, a version or a reader still needs
    waiting_bytes: int = 0
    tombstones: int = 0  # that were dropped
    versions_removed: int = 0
    versions_kept: int = 0
    leftovers: int = 0
    notes: tuple[str, ...] = ()

    def to_message(self) -> Message:
        """This report as it travels."""
        notes: list[Value] = [*self.notes]
        return {**{name: getattr(self, name) for name in _COUNTS}, "notes": notes}

    @classmethod
    def from_message(cls, message: Message) -> Self:
        """The report that was sent. Raises UsageError for anything else."""
        found = Fields(message, "the report of a purge")
        return cls(
            rewritten=found.integer("rewritten"),
            unused_bytes=found.integer("unused_bytes"),
            written=found.integer("written"),
            copied_bytes=found.integer("copied_bytes"),
            deleted=found.integer("deleted"),
            deleted_bytes=found.integer("deleted_bytes"),
            waiting=found.integer("waiting"),
            waiting_bytes=found.integer("waiting_bytes"),
            tombstones=found.integer("tombstones"),
            versions_removed=found.integer("versions_removed"),
            versions_kept=found.integer("versions_kept"),
            leftovers=found.integer("leftovers"),
            notes=tuple(found.texts("notes")),
        )


_COUNTS = tuple(each.name for each in fields(PurgeReport) if each.name != "notes")


def purge(
    repository: LocalRepository,
    name: str,
    options: PurgeOptions | None = None,
    tell: ReportProgress = no_progress,
) -> PurgeReport:
    """Purge a dataset; what was done before an error is done, and nothing is lost.

    Raises NoSuchDataset, BusyError where another purge goes on, CorruptError before anything is
    done where chunks that are named are not seen, NoSpaceError where new chunks find no room (old
    ones that can go have been deleted then).
    """
    options = options or PurgeOptions()
    there = repository.run_job("purge", name, options.to_message(), tell)
    if there is not None:
        return PurgeReport.from_message(there)
    dying = list(repository.catalogue.deleted_named(name))
    removed = 0 if options.dry_run else _remove_deleted(repository, name, dying)
    try:
        info = repository.dataset(name)
    except NoSuchDataset:
        if not dying:
            raise
        return PurgeReport(notes=(f"{name} is deleted: {removed} of its objects were removed",))
    if options.dry_run:
        return _Purge(repository, info, options, tell).run()
    session = repository.begin(name, create=False)  # folds orphans in, as long as no lease stands
    _refuse_unseen(repository, info)
    with PurgeLease.take(repository.objects, info.identity) as lease:
        return _Purge(repository, repository.dataset(name), options, tell, session, lease).run()


def _refuse_unseen(repository: LocalRepository, info: DatasetInfo) -> None:
    """Raise CorruptError where a chunk that is named is lost, or not listed: then nobody knows what
    else the store does not show, and what looks replaced may be the only copy."""
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


def _remove_deleted(repository: LocalRepository, name: str, dying: Sequence[UUID]) -> int:
    return sum(repository.remove_deleted(name, identity).removed for identity in dying)


def reclaimable_bytes(repository: LocalRepository, name: str, view: Snapshot) -> int:
    """About how many bytes of chunks no file of the current version is in (`view`), beyond what
    headers take. Raises NoSuchDataset, MetadataError.
    """
    told = repository.run_job("reclaimable", name, {}, no_progress)
    if told is not None:
        return Fields(told, "what is reclaimable").integer("bytes")
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
"""Of a chunk's header, with a name of some 20 bytes."""


@dataclass(slots=True)
class _Counts:
    """A report in the making."""

    rewritten: int = 0
    unused_bytes: int = 0
    deleted: int = 0
    deleted_bytes: int = 0
    waiting: int = 0
    waiting_bytes: int = 0
    tombstones: int = 0
    versions_removed: int = 0
    versions_kept: int = 0
    leftovers: int = 0
    notes: list[str] = field(default_factory=list)


class _Purge:
    """One purge; without a session and a lease it only looks."""

    def __init__(
        self,
        repository: LocalRepository,
        info: DatasetInfo,
        options: PurgeOptions,
        tell: ReportProgress,
        session: LocalWriteSession | None = None,
        lease: PurgeLease | None = None,
    ) -> None:
        self._repository = repository
        self._objects = repository.objects
        self._versions = repository.snapshots
        self._meta = repository.meta
        self._info = info
        self._identity = info.identity
        self._options = options
        self._progress = tell
        self._session = session
        self._lease = lease
        self._counts = _Counts()
        self._left_alone: set[ChunkId] = set()  # damaged, newer, or with entries that are skipped
        self._due: dict[ChunkId, set[int]] = {}
        self._copied: set[ChunkId] = set()  # would be, if this did more than look
        self._versions_before = frozenset(self._versions.versions(self._identity))
        self._removed: set[int] = set()  # versions
        self._listing_complete = True  # all that the metadata names is there, and listed
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
        """All steps."""
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
            full = error  # what can go makes room
        self._publish()
        self._reclaim()
        self._sweep()
        counts = self._counts
        if full is not None:
            full.advice = "what could go was deleted: run it again" if counts.deleted else ""
            raise full
        return PurgeReport(
            rewritten=counts.rewritten,
            unused_bytes=counts.unused_bytes,
            written=rewriter.written if rewriter else 0,
            copied_bytes=rewriter.copied_bytes if rewriter else 0,
            deleted=counts.deleted,
            deleted_bytes=counts.deleted_bytes,
            waiting=counts.waiting,
            waiting_bytes=counts.waiting_bytes,
            tombstones=counts.tombstones,
            versions_removed=counts.versions_removed,
            versions_kept=counts.versions_kept,
            leftovers=counts.leftovers,
            notes=tuple(counts.notes),
        )

    def _publish(self) -> None:
        """From now on nobody who opens the dataset is sent where it was before."""
        if self._session is None:
            return
        marker = self._meta.head(self._info.name)
        if marker.version and self._versions.newest(self._identity) != marker.version:
            self._repository.publish(self._info.name)

    def _check(self) -> None:
        """Raise BusyError where this is not the one purge any more."""
        if self._lease is not None:
            self._lease.check()

    def _note(self, text: str) -> None:
        log.info("%s: %s", self._info.name, text)
        self._counts.notes.append(text)

    def _header(self, chunk: ChunkId) -> Header:
        return self._repository.read_header(self._identity, chunk)

    def _readable(self, chunk: ChunkId) -> Header | None:
        """The header of a chunk that can be purged; others are left alone, and named."""
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
        """Which tombstones are not needed any more; and whether anything may be deleted."""
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
        """Whether chunks that were not listed are missed by nobody. Else the listing is short, or
        the store was put back to what it was: then an empty chunk may hold the only copies."""
        for record in records:
            text = chunk_id_text(record.id)
            try:
                self._objects.stat(chunk_object(self._identity, record.id))
            except ObjectMissing:
                if record.holes == record.entries:
                    continue  # of a deletion that was interrupted
                self._note(f"chunk {text} is lost: nothing is deleted; run `dlcmd verify`")
            else:
                self._note(f"the listing lacks chunk {text}: nothing is deleted")
            return False
        return True

    def _forgotten_are_gone(self, known: Collection[ChunkId]) -> bool:
        """Whether what kept versions know, and the metadata no more, is not in the store."""
        forgotten: set[ChunkId] = set()
        for version in self._versions.versions(self._identity):
            try:
                view = self._versions.load_without_copy(self._identity, version)
            except (FormatError, ObjectMissing):
                return False
            forgotten.update(set(view.chunk_ids).difference(known))
        return all_gone(self._objects, self._identity, sorted(forgotten))

    def _dead(self, record: ChunkRecord) -> int:
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
        self._counts.rewritten = len(chosen)
        return sorted(chosen)

    def _allowed(self, record: ChunkRecord) -> int:
        return record.object_bytes * self._options.max_unused_ppm // 1_000_000

    def _is_wasteful(self, record: ChunkRecord) -> bool:
        """Whether too much of a chunk is unused, exactly."""
        header = self._readable(record.id)
        if header is None:
            return False
        dead = sorted(self._dropped(record.id))
        bodies = int(header.records["stored"][dead].sum())
        share = header.preamble.header_stored * len(dead) // max(len(header), 1)
        if bodies + share <= self._allowed(record):
            return False
        self._counts.unused_bytes += bodies + share
        return True

    def _dropped(self, chunk: ChunkId) -> set[int]:
        """The places of a chunk that need not be copied."""
        holes = self._meta.holes(self._identity, chunk).tolist()
        return {*holes, *self._due.get(chunk, ())}

    # Writing

    def _rewrite(self, chosen: Sequence[ChunkRecord]) -> Rewriter:
        assert self._session is not None
        largest = max((record.object_bytes for record in chosen), default=0)
        chunk_bytes = min(max(CHUNK_BYTES_DEFAULT, largest), CHUNK_BYTES_MAX)
        rewriter = Rewriter(self._repository, self._session, chunk_bytes, self._check)
        for done, record in enumerate(chosen):
            self._progress(done, len(chosen))
            try:
                rewriter.copy(record.id, self._dropped(record.id))
            except (FormatError, ObjectMissing) as error:
                self._counts.rewritten -= 1
                self._leave_alone(record.id, error.message)
        rewriter.finish()
        self._progress(len(chosen), len(chosen))
        return rewriter

    # Deleting

    def _reclaim(self) -> None:
        """Remove versions and chunks that nobody needs: metadata first, objects later."""
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
        # Where this only looks: what it would publish
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
        if going:  # another has been published since
            leased = leased_versions(self._objects, self._identity, time.time())
            self._expire(leased, {**coming, now_us + 1: now_us} if self._session is None else {})
        self._counts.deleted = len(going)
        self._counts.deleted_bytes = sum(empty[chunk].object_bytes for chunk in going)
        self._counts.tombstones = sum(len(self._due.get(chunk, ())) for chunk in going)
        self._counts.waiting = len(empty) - len(going)
        self._counts.waiting_bytes = (
            sum(record.object_bytes for record in empty.values()) - self._counts.deleted_bytes
        )

    def _may_go(self, chunk: ChunkId) -> bool:
        """Whether an empty chunk can be read, so that it is known what goes with it; or is lost."""
        try:
            self._objects.stat(chunk_object(self._identity, chunk))
        except ObjectMissing:
            return True
        return self._readable(chunk) is not None

    def _expire(self, leased: Collection[int], planned: Mapping[int, int]) -> dict[int, int]:
        """Remove versions that need not be kept; those that are left, and when they came."""
        there = self._versions.published(self._identity)
        stay = self._versions.retained_versions(
            self._identity, there, self._policy, self._grace_s, planned
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
        self._counts.versions_removed = len(self._removed & self._versions_before)
        self._counts.versions_kept = len(left)
        return left

    def _delete(
        self, going: Sequence[ChunkId], free: Callable[[], frozenset[ChunkId]]
    ) -> list[ChunkId]:
        """Forget chunks, then delete their objects; which have gone comes back."""
        if not going:
            return []
        self._check()
        forgotten = self._forget(going)
        self._publish()
        done = list[ChunkId]()
        for chunk in self._still_unreferenced(sorted(forgotten), free):
            self._check()
            self._objects.delete(chunk_object(self._identity, chunk))
            if all_gone(self._objects, self._identity, [chunk]):
                done.append(chunk)
            else:
                self._note(f"chunk {chunk_id_text(chunk)} was deleted, and is still there")
        again = {record.id for record in self._meta.chunks(self._identity)}.intersection(done)
        if again:  # a rebuild had read them before they went
            self._forget(again)
            self._publish()
        return done

    def _forget(self, chunks: Collection[ChunkId]) -> frozenset[ChunkId]:
        """Let the metadata store forget chunks, with the tombstones that are due."""
        plain = [chunk for chunk in chunks if chunk not in self._due]
        dead = [chunk for chunk in chunks if chunk in self._due]
        forgotten = self._meta.forget(self._identity, plain)
        return forgotten | self._meta.forget(self._identity, dead, tombstones=True)

    def _still_unreferenced(
        self, chunks: Sequence[ChunkId], free: Callable[[], frozenset[ChunkId]]
    ) -> Iterator[ChunkId]:
        """Chunks, as long as no reader has come who needs them."""
        looked_s, allowed = 0.0, frozenset[ChunkId]()
        for done, chunk in enumerate(chunks):
            self._progress(done, len(chunks))
            if not done or time.monotonic() > looked_s + _LOOK_AT_LEASES_S:
                looked_s, allowed = time.monotonic(), free()
            if chunk in allowed:
                yield chunk

    # Rubbish

    def _sweep(self) -> None:
        """Remove leases that ended long ago, and what dead writers have left half done."""
        now_s = time.time()
        for leftover in self._objects.leftovers(dataset_prefix(self._identity)):
            if is_abandoned(leftover, now_s, LEFTOVER_AGE_S):
                self._counts.leftovers += 1
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
