"""Determines the chunks that a dataset's state consists of, and reads their headers to rebuild it.

If a chunk were left out, its files would seem not to exist. So the listing, the live metadata (in
the metadata store) and the newest published snapshot are compared, and no decision rests on one of
them alone (FORMAT.md, section 5, "Absence needs proof"). A chunk that is named and cannot be read
is a **loss**: no state without it replaces another unless the user accepts that.

No state is kept between calls. One thread works; other threads read headers ahead for it.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol, TypeVar
from uuid import UUID

import numpy as np

from ..errors import (
    CorruptError,
    DieselError,
    FormatError,
    MetadataBehind,
    NewerVersionError,
    ObjectMissing,
    ObjectStoreError,
)
from ..format.chunk import ENTRIES_MAX, ChunkHeader, parse_header, parse_preamble
from ..format.chunk_id import LOWEST, chunk_id_text, id_seconds
from ..format.entries import EXTENT, ChunkId
from ..format.object_names import chunk_object, chunk_of_object, chunk_prefix
from ..format.snapshot import layout as layout
from ..format.snapshot.reader import Snapshot
from ..names import shown
from ..storage.metadata.store import (
    DIGEST_MODULUS,
    CommitBatch,
    DatasetHead,
    MetadataStore,
    chunk_digest,
)
from ..storage.objects.store import ObjectStore
from .interface import Findings, ReportProgress, no_progress
from .leases import purge_is_under_way
from .validation import CLOCK_ALLOWANCE_S, PUT_WINDOW_S, batch_of
from .versions import VersionStore

log = logging.getLogger("diesel.repository")

HEADERS_AHEAD = 16
"""Read in parallel. From a store with a latency of 20 ms, this gives some hundreds of headers a
second."""

FILES_NAMED_MAX = 1000
"""More lost files are only counted."""

# The most entries in all headers that are read ahead; an entry takes up to some 700 bytes
_ENTRIES_AHEAD = 2 * ENTRIES_MAX
_PAUSES_S = (0.1, 0.5, 2.0)  # before new attempts at a failing store, beyond its own retries
_NO_CHUNKS: frozenset[ChunkId] = frozenset()

T = TypeVar("T")


class HeaderReader(Protocol):
    """The part of a repository that this module needs."""

    objects: ObjectStore
    snapshots: VersionStore

    def read_header(self, identity: UUID, chunk: ChunkId) -> ChunkHeader:
        """As `Repository.read_header`."""

    def chunk_ids(self, identity: UUID, since: ChunkId = LOWEST) -> Iterator[ChunkId]:
        """As `Repository.chunk_ids`."""


# Which chunks must exist


@dataclass(frozen=True, slots=True)
class ExpectedChunks:
    """The chunks of a dataset's state, by source."""

    live: frozenset[ChunkId] = _NO_CHUNKS
    """Chunks in the metadata store with live entries."""
    empty: frozenset[ChunkId] = _NO_CHUNKS
    """Chunks in the metadata store with only replaced or deleted entries."""
    published: Snapshot | None = None
    damaged: Mapping[int, str] = field(default_factory=dict)
    """Newer published versions with unreadable snapshots, and the reasons."""

    @property
    def needed(self) -> frozenset[ChunkId]:
        """The chunks without which an entry would be missing. A snapshot also lists chunks that
        have only tombstones; only the metadata store knows which chunks are empty."""
        listed = self.published.chunk_ids if self.published else ()
        return self.live.union(listed) - self.empty


def expected_chunks(
    versions: VersionStore, meta: MetadataStore | None, identity: UUID
) -> ExpectedChunks:
    """`meta` is None if the metadata store does not know the dataset. Raises ObjectStoreError,
    MetadataError."""
    # The snapshot first: chunks of later published versions are live, too
    published, damaged = newest_readable(versions, identity)
    live, empty = set[ChunkId](), set[ChunkId]()
    if meta is not None:
        try:
            for record in meta.chunks(identity):
                (empty if record.holes == record.entries else live).add(record.id)
        except (MetadataBehind, CorruptError) as error:
            log.warning("the metadata store cannot list its chunks: %s", error.message)
    return ExpectedChunks(frozenset(live), frozenset(empty), published, damaged)


def newest_readable(
    versions: VersionStore, identity: UUID
) -> tuple[Snapshot | None, dict[int, str]]:
    """The newest readable published snapshot, or None; and for each newer version, why its snapshot
    cannot be read."""
    damaged = dict[int, str]()
    for version in reversed(versions.versions(identity)):
        try:
            return versions.load_without_copy(identity, version), damaged
        except ObjectMissing:  # removed since it was listed: there is a newer one
            continue
        except FormatError as error:
            damaged[version] = error.message
    return None, damaged


def chunk_exists(objects: ObjectStore, identity: UUID, chunk: ChunkId) -> bool:
    """Whether the store has a chunk, independent of any listing."""
    try:
        objects.stat(chunk_object(identity, chunk))
    except ObjectMissing:
        return False
    return True


@dataclass(frozen=True, slots=True)
class AbsentChunks:
    """Needed chunks that a listing did not show."""

    lost: frozenset[ChunkId]
    """The store does not have them."""
    unlisted: frozenset[ChunkId]
    """The store has them, so the listing was incomplete."""


def absent_chunks(
    reader: HeaderReader,
    meta: MetadataStore | None,
    identity: UUID,
    expected: ExpectedChunks,
    listed: Collection[ChunkId],
) -> AbsentChunks:
    """The needed chunks that were not listed; `meta` as in `expected_chunks`. A purge makes the
    metadata forget a chunk before it deletes it, so only a chunk that is still expected after it
    was found absent is lost."""
    absent = expected.needed.difference(listed)
    unlisted = {chunk for chunk in absent if chunk_exists(reader.objects, identity, chunk)}
    lost = absent - unlisted
    if lost:
        lost &= expected_chunks(reader.snapshots, meta, identity).needed
    return AbsentChunks(frozenset(lost), frozenset(unlisted))


# Which files are lost with a chunk


@dataclass(frozen=True, slots=True)
class LostChunk:
    """A named chunk that cannot be read, the reason, and its files."""

    chunk: ChunkId
    why: str
    files: Sequence[bytes] = ()

    def __str__(self) -> str:
        return f"{self.why}; files in it: {len(self.files)}"


class LostChunks(CorruptError):
    """Chunks in the metadata or the newest snapshot are lost or damaged."""


def losses_in(chunks: Mapping[ChunkId, str], views: Iterable[Snapshot]) -> list[LostChunk]:
    """`chunks` has the reasons. The files of a chunk come from the first of `views` that knows the
    chunk."""
    files = {chunk: list[bytes]() for chunk in chunks}
    left = set(chunks)
    for view in views if left else ():
        known = left.intersection(view.chunk_ids)
        if known:
            left -= known
            for chunk, path in _files_in(view, known):
                files[chunk].append(path)
    return [LostChunk(chunk, why, files[chunk]) for chunk, why in sorted(chunks.items())]


def _files_in(view: Snapshot, chunks: Collection[ChunkId]) -> Iterator[tuple[ChunkId, bytes]]:
    wanted = np.fromiter((each in chunks for each in view.chunk_ids), np.bool_, view.chunk_count)
    indices = view.files()
    numbers = view.chunk_of(indices)  # of the first extent
    for i in np.flatnonzero(view.columns.flags[indices] & layout.MANY_EXTENTS).tolist():
        parts = (extent.chunk for extent in view.extents(int(indices[i])))
        numbers[i] = next((number for number in parts if wanted[number]), numbers[i])
    is_in = wanted[numbers]
    for number, path in zip(numbers[is_in].tolist(), view.paths(indices[is_in]), strict=True):
        yield view.chunk_ids[number], path


def loss_lines(losses: Sequence[LostChunk]) -> list[str]:
    """A line for each chunk, then for each lost file, of which at most FILES_NAMED_MAX are
    named."""
    lines, left = [str(loss) for loss in losses], FILES_NAMED_MAX
    for loss in losses:
        named = loss.files[:left]
        left -= len(named)
        text = chunk_id_text(loss.chunk)
        lines += [f"lost with chunk {text}: {shown(path)}" for path in named]
    more = sum(len(loss.files) for loss in losses) - (FILES_NAMED_MAX - left)
    return [*lines, f"and {more} more files"] if more else lines


def first_of(texts: Sequence[str]) -> str:
    return ", ".join([*texts[:3], *["..."][: len(texts) > 3]])


def lost_chunks_error(name: str, losses: Sequence[LostChunk], text: str = "") -> LostChunks:
    """For an operation that changes nothing, since the new state would lack these chunks. If the
    chunks are unknown, `text` replaces their list."""
    files = [shown(path) for loss in losses for path in loss.files]
    if not text:
        chunks = first_of([chunk_id_text(loss.chunk) for loss in losses])
        text = f"chunks of {name!r} are lost or damaged: {chunks}; files in them: {len(files)}"
        text += f" ({first_of(files)})" if files else ""
    return LostChunks(
        f"{text}; nothing was changed",
        advice=f"bring back what is missing, or accept the loss with"
        f" `dlcmd recover --forget-lost {name}`, and put the files again",
    )


# Building a state again


class RebuildSource:
    """Reads chunks of the object store to rebuild a state.

    `since` and `late` are the callbacks of `MetadataStore.rebuild`. Both raise ObjectStoreError if
    a chunk cannot be reached, and LostChunks, after they have read all others, if a needed chunk
    cannot be read, unless `forget_lost`. `head` is None if the metadata store does not know the
    dataset. `report` gets the findings.
    """

    def __init__(
        self,
        reader: HeaderReader,
        meta: MetadataStore,
        name: str,
        identity: UUID,
        head: DatasetHead | None,
        *,
        forget_lost: bool = False,
        progress: ReportProgress = no_progress,
        report: Findings | None = None,
    ) -> None:
        self._reader = reader
        self._meta = meta
        self._name = name
        self._identity = identity
        self._head = head
        self._forget_lost = forget_lost
        self._progress = progress
        self._report = report or Findings()
        self._known: frozenset[ChunkId] = _NO_CHUNKS  # to the metadata store
        self._folded: set[ChunkId] = set()  # chunks whose entries have been yielded
        self._missing: set[ChunkId] = set()
        self._unusable: dict[ChunkId, FormatError] = {}
        self._expected = ExpectedChunks()
        self._done = self._total = 0  # chunks

    def since(self, first: ChunkId) -> Iterator[CommitBatch]:
        """The entries of the chunks after an ID, and of earlier ones that are in the newest
        snapshot but not in the metadata store. The chunks are listed at the first batch, after the
        rebuild has recorded the committed chunks."""
        self._expected = self._load_expected()
        self._check_snapshots()
        self._known = self._expected.live | self._expected.empty
        listed = read_with_retries(lambda: set(self._reader.chunk_ids(self._identity)))
        absent = absent_chunks(
            self._reader, self._known_meta, self._identity, self._expected, listed
        )
        self._report.notes += [
            f"the listing lacks chunk {chunk_id_text(chunk)}, which is there"
            for chunk in sorted(absent.unlisted)
        ]
        self._missing.update(absent.lost)
        published = self._expected.published
        acknowledged = set(published.chunk_ids if published else ()) - self._known
        there = listed | absent.unlisted
        yield from self._read({each for each in there if each > first or each in acknowledged})

    def late(self, chunks: Collection[ChunkId]) -> Iterator[CommitBatch]:
        self._known |= frozenset(chunks)
        yield from self._read(chunks)

    def forget_deleted(self) -> None:
        """Make the metadata store forget chunks that a purge has deleted since they were read here.
        The purge itself does so for chunks that it deletes later."""
        objects, identity = self._reader.objects, self._identity
        unlisted = self._folded.difference(self._reader.chunk_ids(identity))
        deleted = [each for each in unlisted if not chunk_exists(objects, identity, each)]
        if deleted:
            self._meta.forget(identity, deleted, tombstones=True)

    @property
    def _known_meta(self) -> MetadataStore | None:
        return None if self._head is None else self._meta

    def _load_expected(self) -> ExpectedChunks:
        return expected_chunks(self._reader.snapshots, self._known_meta, self._identity)

    def _check_snapshots(self) -> None:
        """Raise LostChunks if an unreadable snapshot is later than all other sources: it may name
        chunks that no other source names."""
        expected, report = self._expected, self._report
        known = max(
            self._head.version if self._head else 0,
            expected.published.version if expected.published else 0,
        )
        for version, why in expected.damaged.items():
            text = f"published version {version} cannot be read ({why})"
            if version <= known:
                report.notes.append(text)
                continue
            text += ": it may name chunks that nothing else names"
            if not self._forget_lost:
                report.problems.append(text)
                raise lost_chunks_error(self._name, [], text)
            report.notes.append(f"forgotten: {text}")

    def _read(self, chunks: Collection[ChunkId]) -> Iterator[CommitBatch]:
        self._total += len(chunks)
        report = self._report
        outcomes = prefetch_headers(self._reader, self._identity, sorted(chunks))
        with closing(outcomes):
            for chunk, outcome in outcomes:
                self._progress(self._done, self._total)
                self._done += 1
                report.chunks += 1
                try:
                    header = outcome()
                    batch = batch_of(header, stored=True)
                except ObjectMissing:
                    self._missing.add(chunk)  # lost, or purged after the listing
                    continue
                except FormatError as error:
                    self._unusable[chunk] = error
                    continue
                report.notes += skipped_entries(header)
                self._folded.add(chunk)
                report.folded += chunk not in self._known
                report.entries += len(header)
                yield batch
        self._accept_or_refuse_losses()

    def _accept_or_refuse_losses(self) -> None:
        """Report the chunks that could not be read. Raises LostChunks if one of them is needed,
        unless `forget_lost`; a chunk of a newer format is never forgotten."""
        why = {chunk: lost_text(chunk) for chunk in self._missing}
        for chunk, error in self._unusable.items():
            why[chunk] = f"chunk {chunk_id_text(chunk)}: {error.message}"
        if not why:
            return
        needed, report = self._load_expected().needed, self._report
        report.problems += [
            f"{why[chunk]}; it is left out" for chunk in self._unusable if chunk not in needed
        ]
        needed_losses = {chunk: text for chunk, text in why.items() if chunk in needed}
        losses = losses_in(needed_losses, self._views())
        newer = {
            chunk for chunk, error in self._unusable.items() if isinstance(error, NewerVersionError)
        }
        self._missing, self._unusable = set(), {}
        if self._forget_lost and newer.isdisjoint(needed_losses):
            report.notes += [f"forgotten: {loss}" for loss in losses]
        elif losses:
            report.problems += loss_lines(losses)
            raise lost_chunks_error(self._name, losses)

    def _views(self) -> Iterator[Snapshot]:
        if self._expected.published is not None:
            yield self._expected.published
        if self._head is not None:
            with suppress(DieselError):
                yield self._reader.snapshots.load_current(self._meta, self._head)


def lost_text(chunk: ChunkId) -> str:
    return f"lost chunk {chunk_id_text(chunk)}: the store does not have it"


def skipped_entries(header: ChunkHeader) -> Iterator[str]:
    text = chunk_id_text(header.preamble.id)
    for place, fault in header.faults.items():
        path = shown(header.path(place))
        yield f"chunk {text}: entry {place} ({path}) is skipped: its path has {fault}"


# Which chunks a metadata store lacks


@dataclass(frozen=True, slots=True)
class UnknownChunks:
    """The chunks that a listing or the newest snapshot has and a dataset's live metadata lack."""

    unknown: Sequence[ChunkId] = ()
    """Durable chunks that no put under way can own."""
    acknowledged: frozenset[ChunkId] = _NO_CHUNKS
    """Chunks in the newest snapshot. If they are in `unknown`, they must be readable."""


def find_unknown_chunks(
    reader: HeaderReader, meta: MetadataStore, head: DatasetHead, *, needs_repair: bool
) -> UnknownChunks:
    """The chunks that the metadata store lacks.

    An unknown chunk older than the put window (PUT_WINDOW_S) is an orphan: no put will commit it. A
    younger one belongs to a put under way, unless a published snapshot names it. During a purge,
    only chunks in a published snapshot count, since a purge makes the metadata forget chunks before
    it deletes them. `needs_repair`: the metadata store may have lost its last commits in a restart,
    so the snapshot is read in any case. Raises LostChunks if a chunk that only the newest snapshot
    names does not exist.
    """
    identity, count, digest = head.identity, 0, 0
    for chunk in reader.chunk_ids(identity):
        count, digest = count + 1, digest + chunk_digest(chunk)
    is_behind = reader.snapshots.newest(identity) > head.version
    if not is_behind and (count, digest % DIGEST_MODULUS) == (head.chunks, head.digest):
        return UnknownChunks()
    records = meta.chunks(identity)
    known = {record.id for record in records}
    published: Snapshot | None = None
    if needs_repair or is_behind:
        published, damaged = newest_readable(reader.snapshots, identity)
        if any(version > head.version for version in damaged):
            raise MetadataBehind(
                f"the metadata of {head.name!r} is behind a version whose snapshot is damaged",
                advice=f"run `dlcmd recover {head.name}`",
            )
    acknowledged = frozenset(published.chunk_ids if published else ())
    # Read after `known`: chunks forgotten before are deleted by now, or the purge is still running
    is_purged = purge_is_under_way(reader.objects, identity)
    orphans_before_s = 0.0 if is_purged else time.time() - PUT_WINDOW_S
    listed = set(reader.chunk_ids(identity))
    live = {record.id for record in records if record.holes < record.entries}
    expected = ExpectedChunks(frozenset(live), frozenset(known - live), published)
    absent = absent_chunks(reader, meta, identity, expected, listed)
    if lost := absent.lost - known:
        losses = losses_in(dict.fromkeys(lost, ""), [published] if published else [])
        raise lost_chunks_error(head.name, losses)
    unknown = [
        chunk
        for chunk in sorted(listed | absent.unlisted)
        if chunk not in known
        and (chunk in acknowledged or _sealed_s(reader.objects, identity, chunk) < orphans_before_s)
    ]
    return UnknownChunks(unknown, acknowledged)


def _sealed_s(objects: ObjectStore, identity: UUID, chunk: ChunkId) -> float:
    """The time when a chunk was sealed, or was written if its ID is from the future."""
    if id_seconds(chunk) < time.time() + CLOCK_ALLOWANCE_S:
        return id_seconds(chunk)
    return objects.stat(chunk_object(identity, chunk)).modified_ns / 1e9


def unreadable_paths(reader: HeaderReader, meta: MetadataStore, identity: UUID) -> list[bytes]:
    """`Repository.unreadable_paths`, by one listing of chunks."""
    records = [each for each in meta.chunks(identity) if each.holes < each.entries]
    if not records:
        return []
    listed_bytes = {
        chunk_of_object(info.name): info.bytes
        for info in reader.objects.list(chunk_prefix(identity))
    }
    damaged = {
        record.id
        for record in records
        if listed_bytes.get(record.id) != record.object_bytes
        and (record.id in listed_bytes or not chunk_exists(reader.objects, identity, record.id))
    }
    if not damaged:
        return []
    rows = meta.changes(identity, 0).rows
    numbers = [number for number, chunk in enumerate(rows.chunks) if chunk in damaged]
    indices = set(np.flatnonzero(np.isin(rows.chunk, numbers)).tolist())
    for i, tail in rows.tails.items():  # the tail of a file of several extents holds the extents
        if rows.records["extents"][i] > 1:
            chunks = np.frombuffer(tail, EXTENT)["chunk"]
            if any(chunk.tobytes() in damaged for chunk in chunks):
                indices.add(i)
    return [rows.path(i) for i in sorted(indices)]


# Reading chunks


def read_chunk(
    objects: ObjectStore, identity: UUID, chunk: ChunkId
) -> tuple[ChunkHeader, memoryview]:
    """The checked header of a whole chunk, and its unchecked bodies. Raises FormatError,
    ObjectStoreError."""
    data = memoryview(objects.get(chunk_object(identity, chunk)))
    preamble = parse_preamble(data, identity=identity, id=chunk, object_bytes=len(data))
    start = preamble.body_start - preamble.header_stored
    header = parse_header(preamble, data[start : preamble.body_start])
    return header, data[preamble.body_start :]


Outcome = Callable[[], ChunkHeader]
"""Returns a chunk's header, or raises the error of its reading."""


def prefetch_headers(
    reader: HeaderReader, identity: UUID, chunks: Iterable[ChunkId]
) -> Generator[tuple[ChunkId, Outcome]]:
    """Each chunk with its `Outcome`, in order. Threads read headers ahead: fewer at first, and
    fewer if the earlier headers were large."""
    waiting, left = deque[tuple[ChunkId, Future[ChunkHeader]]](), iter(chunks)
    entries = ENTRIES_MAX  # a guess for the next header
    threads = ThreadPoolExecutor(HEADERS_AHEAD, "header")

    def read(chunk: ChunkId) -> ChunkHeader:
        return read_with_retries(lambda: reader.read_header(identity, chunk))

    try:
        while True:
            most = min(HEADERS_AHEAD, _ENTRIES_AHEAD // max(entries, 1))
            for chunk in islice(left, max(most - len(waiting), 0)):
                waiting.append((chunk, threads.submit(read, chunk)))
            if not waiting:
                return
            chunk, future = waiting.popleft()
            yield chunk, future.result
            if not future.exception():
                entries = max(len(future.result()), entries // 2)
    finally:
        threads.shutdown(cancel_futures=True)


def read_with_retries(read: Callable[[], T]) -> T:
    """Damaged bytes are read once more, and a failing store is tried again for some seconds, so
    that one bad moment does not decide on a dataset's contents. Raises FormatError,
    ObjectStoreError."""
    is_damaged = False
    for pause_s in _PAUSES_S:
        try:
            return read()
        except (NewerVersionError, ObjectMissing):
            raise
        except FormatError:
            if is_damaged:
                raise
            is_damaged = True
        except ObjectStoreError as error:
            log.info("another try at the object store in %s s: %s", pause_s, error.message)
            time.sleep(pause_s)
    return read()
