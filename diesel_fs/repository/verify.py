"""`verify`: checks every chunk's bytes, and the metadata against the chunks. It changes nothing.

It folds the chunks into a temporary metadata store, and compares the live metadata and the newest
published snapshot with that. Blocking; one thread, for which other threads read headers ahead.
"""

import tempfile
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

import numpy as np

from ..errors import (
    BusyError,
    DieselError,
    FormatError,
    ObjectMissing,
    ObjectStoreError,
    PermissionDenied,
    UsageError,
)
from ..format.chunk import ChunkHeader, damaged_places
from ..format.chunk_id import chunk_id_text, id_seconds
from ..format.entries import ChunkId
from ..format.object_names import STORE_MARKER, dataset_prefix
from ..format.snapshot.build import build_snapshot
from ..format.snapshot.diff import diff_snapshots
from ..format.snapshot.layout import SnapshotColumns, content_mark
from ..format.snapshot.reader import Snapshot
from ..names import shown
from ..storage.metadata.sqlite.store import SqliteMetadata
from ..storage.metadata.store import MetadataChanges
from .catalog import DatasetInfo
from .expected_chunks import (
    Outcome,
    absent_chunks,
    chunk_exists,
    expected_chunks,
    first_of,
    loss_lines,
    losses_in,
    lost_text,
    prefetch_headers,
    read_chunk,
    read_with_retries,
    skipped_entries,
)
from .interface import Findings, ReportProgress, no_progress
from .retention import used_chunks
from .stored import StoredRepository
from .validation import PUT_WINDOW_S, batch_of, future_ids_note


def verify(
    repository: StoredRepository,
    name: str,
    *,
    headers_only: bool = False,
    progress: ReportProgress = no_progress,
) -> Findings:
    """`Repository.verify`."""
    if not (repository.meta_is_lost or _metadata_forbidden(repository)):
        _ = repository.meta  # raises the reason if the metadata store cannot be used
    info = repository.dataset(name)
    findings = Findings()
    published = _published(repository, info.identity, findings)  # before the live metadata
    with tempfile.TemporaryDirectory(prefix="diesel-verify-") as folder:
        scratch = SqliteMetadata.open(Path(folder) / "meta.sqlite", create=True)
        try:
            scratch.create(name, info.identity)
            check = _Check(repository, info, findings, scratch, headers_only=headers_only)
            check.run(progress)
            lost = _report_lost_chunks(repository, info, check, findings)
            if check.live is not None and check.all_reached:
                read_folded = partial(scratch.changes, info.identity, 0)
                _compare(check.live, check.live_mark, read_folded, lost, findings)
            counts = scratch.head(name)
        finally:
            scratch.close()
    if check.live is not None and published is not None:
        _check_published(repository, published, check.live, check.live_mark, findings)
    if published is not None and not headers_only:
        _check_kept(repository, info.identity, published.version, check.listed, findings)
    findings.files, findings.bytes = counts.files, counts.bytes
    _check_leftovers(repository, info, findings)
    with suppress(DieselError):  # without a metadata store no clock is known to be right
        if note := future_ids_note(check.listed, repository.clock):
            findings.notes.append(note)
    return findings


_ATTEMPTS = 5  # to read metadata and chunks of one moment while others write


class _Check:
    """Reads each chunk once, and commits those that the metadata store knows to `scratch`. If a
    purge deletes such chunks meanwhile, the metadata and the new chunks are read again.

    After `run`, `live` has the live metadata (or None) and `live_mark` their content mark, `listed`
    the chunks of the listing, and `unusable` the reason for each damaged chunk.
    """

    def __init__(
        self,
        repository: StoredRepository,
        info: DatasetInfo,
        findings: Findings,
        scratch: SqliteMetadata,
        *,
        headers_only: bool,
    ) -> None:
        self.live: MetadataChanges | None = None
        self.live_mark = b""
        self.listed: set[ChunkId] = set()
        self.unusable: dict[ChunkId, str] = {}
        self.all_reached = True  # whether the store delivered every chunk of the listing
        self._repository = repository
        self._info = info
        self._findings = findings
        self._scratch = scratch
        self._headers_only = headers_only
        self._entries: dict[ChunkId, int] = {}  # number of entries, for chunks not in the metadata
        self._folded: set[ChunkId] = set()

    def run(self, progress: ReportProgress) -> None:
        """Raises BusyError if a purge deletes chunks faster than they are read."""
        for _ in range(_ATTEMPTS):
            known = self._read_live()  # before the listing
            self._read(known, progress)
            absent = known - self._folded
            if not absent or not self._are_forgotten(absent):
                break
        else:
            raise BusyError(f"{self._info.name!r} is being purged", advice="verify it afterwards")
        for chunk, entries in sorted(self._entries.items()):
            text = f"unindexed chunk {chunk_id_text(chunk)} with {entries} entries"
            if time.time() - id_seconds(chunk) < PUT_WINDOW_S:
                text += ": of a put under way, or of one that was killed"
            else:
                text += ": an orphan; the next put or `dlcmd recover` folds it in"
            self._findings.notes.append(text)

    def _read_live(self) -> set[ChunkId]:
        self.live = live = _live(self._repository, self._info, self._findings)
        if live is None:
            return set()
        self.live_mark = _mark_of(lambda: live)
        return {chunk.id for chunk in live.chunks}

    def _read(self, known: Collection[ChunkId], progress: ReportProgress) -> None:
        """Reads the chunks that are new since the last call; `known` are those of `live`."""
        identity, findings = self._info.identity, self._findings
        for chunk in sorted(self._entries.keys() & known):  # committed since by a put
            with suppress(FormatError, ObjectMissing):
                self._fold(self._repository.read_header(identity, chunk))
                del self._entries[chunk]
        chunks = [each for each in self._repository.chunk_ids(identity) if each not in self.listed]
        self.listed.update(chunks)
        with closing(self._outcomes(chunks)) as outcomes:
            for done, (chunk, outcome) in enumerate(outcomes):
                progress(done, len(chunks))
                findings.chunks += 1
                header = self._header(chunk, outcome)
                if header is None:
                    continue
                findings.notes += skipped_entries(header)
                findings.entries += len(header)
                if self.live is None or chunk in known:
                    self._fold(header)
                else:
                    self._entries[chunk] = len(header)

    def _outcomes(self, chunks: Sequence[ChunkId]) -> Generator[tuple[ChunkId, Outcome]]:
        if self._headers_only:
            return prefetch_headers(self._repository, self._info.identity, chunks)
        return ((chunk, partial(self._check_bodies, chunk)) for chunk in chunks)

    def _check_bodies(self, chunk: ChunkId) -> ChunkHeader:
        """Bytes that are damaged at a second read, too, are problems."""

        def read() -> tuple[ChunkHeader, list[int]]:
            header, bodies = read_chunk(self._repository.objects, self._info.identity, chunk)
            return header, damaged_places(header, bodies)

        header, places = read_with_retries(read)
        if places:
            header, places = read_with_retries(read)
        text = chunk_id_text(chunk)
        self._findings.problems += [
            f"chunk {text}: the bytes of {shown(header.path(place))} are damaged"
            for place in places
        ]
        return header

    def _header(self, chunk: ChunkId, outcome: Outcome) -> ChunkHeader | None:
        try:
            return outcome()
        except ObjectMissing:
            return None  # lost, or deleted since the listing
        except FormatError as error:
            self.unusable[chunk] = f"chunk {chunk_id_text(chunk)}: {error.message}"
        except ObjectStoreError as error:
            # Raises if the whole store cannot be reached
            self._repository.objects.stat(STORE_MARKER)
            self.all_reached = False
            self._findings.unreachable.append(f"chunk {chunk_id_text(chunk)}: {error.message}")
        return None

    def _fold(self, header: ChunkHeader) -> None:
        self._scratch.commit(self._info.identity, batch_of(header))
        self._folded.add(header.preamble.id)

    def _are_forgotten(self, chunks: Collection[ChunkId]) -> bool:
        known = self._repository.meta.chunks(self._info.identity)
        return not {record.id for record in known}.issuperset(chunks)


def _report_lost_chunks(
    repository: StoredRepository, info: DatasetInfo, check: _Check, findings: Findings
) -> Collection[ChunkId]:
    """Report chunks of the metadata or the newest snapshot that the store lacks or has damaged.
    Returns these and all other damaged chunks."""
    identity = info.identity
    meta = None if check.live is None else repository.meta
    expected = expected_chunks(repository.snapshots, meta, identity)
    absent = absent_chunks(repository, meta, identity, expected, check.listed)
    for chunk in sorted(absent.unlisted):
        if check.live is None or chunk in {each.id for each in check.live.chunks}:
            findings.problems.append(f"the listing lacks chunk {chunk_id_text(chunk)}")
    why = {chunk: lost_text(chunk) for chunk in absent.lost} | check.unusable
    if why:
        views = [view for view in (expected.published,) if view is not None]
        with suppress(DieselError):
            views.append(repository.view_of(info))
        findings.problems += loss_lines(losses_in(why, views))
    findings.notes += [
        f"{lost_text(chunk)}; it had no live entries, and the next purge forgets it"
        for chunk in sorted(expected.empty - check.listed)
    ]
    return why.keys()


def _live(
    repository: StoredRepository, info: DatasetInfo, findings: Findings
) -> MetadataChanges | None:
    """The live metadata of one moment; None if the metadata store does not have them."""
    if info.head is None:
        problem = repository.meta_problem
        why = problem.message if problem else "the metadata store does not know the dataset"
        if _metadata_forbidden(repository):
            findings.notes.append(f"the metadata were not checked: {why}")
            return None
        findings.problems.append(f"{why}: run `dlcmd recover {info.name}`")
        return None
    return repository.meta.changes(info.identity, 0)


def _metadata_forbidden(repository: StoredRepository) -> bool:
    """Whether the user may not read the SQLite file beside the chunks."""
    return not repository.url.meta and isinstance(repository.meta_problem, PermissionDenied)


def _compare(
    live: MetadataChanges,
    live_mark: bytes,
    read_folded: Callable[[], MetadataChanges],
    lost: Collection[ChunkId],
    findings: Findings,
) -> None:
    """Report the paths that differ between the metadata store and the fold of its chunks, except
    those in lost chunks."""
    if live_mark == _mark_of(read_folded):
        return  # the usual case, which needs no object for each entry
    actual, expected = _by_path(live), _by_path(read_folded())
    for path in sorted(expected.keys() | actual.keys()):
        if path in actual and actual[path][1] in lost:
            continue
        if path not in actual:
            findings.problems.append(f"metadata lacks {shown(path)}")
        elif path not in expected:
            findings.problems.append(f"metadata has {shown(path)}, which no chunk has")
        elif expected[path] != actual[path]:
            findings.problems.append(f"metadata of {shown(path)} differs from its chunk's")


def _parts(
    read: Callable[[], MetadataChanges], previous: Snapshot | None = None
) -> Sequence[memoryview]:
    """A snapshot in parts; equal states have equal parts. `read` is called here, so that the merge
    can free the rows."""
    changes = read()
    head, chunks, rows = changes.head, changes.chunks, [changes.rows]
    del changes
    return build_snapshot(
        previous, rows.pop(), chunks,
        identity=head.identity, dataset=head.name, version=1, digest=0,
    )  # fmt: skip


def _mark_of(read: Callable[[], MetadataChanges]) -> bytes:
    """The content mark: equal for equal states, whatever their versions; empty for a state that no
    snapshot can have."""
    try:
        return content_mark(_parts(read)[0])
    except (FormatError, UsageError):
        return b""


def _by_path(changes: MetadataChanges) -> dict[bytes, tuple[bytes, bytes, bytes]]:
    rows = changes.rows
    return {
        rows.path(i): (
            rows.records[i].tobytes(),
            rows.chunks[rows.chunk[i]],
            rows.tails.get(i, b""),
        )
        for i in range(len(rows))
    }


class _Published(NamedTuple):
    """A published version that has been checked. `load` reads its snapshot again; `mark` is its
    content mark."""

    identity: UUID
    version: int
    chunk_ids: Sequence[ChunkId]
    mark: bytes
    load: Callable[[], Snapshot]


def _published(
    repository: StoredRepository, identity: UUID, findings: Findings
) -> _Published | None:
    """A damaged snapshot is a problem, and the one before it is tried."""
    for version in reversed(repository.snapshots.versions(identity)):
        load = partial(repository.snapshots.fetch_verified, identity, version)
        try:
            view = load()
        except ObjectMissing:  # it was removed since the listing
            continue
        except FormatError as error:
            findings.problems.append(f"{error.message}; `dlcmd recover` makes it again")
        else:
            mark = content_mark(view.buffer)
            return _Published(identity, version, list(view.chunk_ids), mark, load)
    return None


def _check_published(
    repository: StoredRepository,
    published: _Published,
    live: MetadataChanges,
    live_mark: bytes,
    findings: Findings,
) -> None:
    """Compare the newest published snapshot with the live metadata, column by column. It was read
    before the metadata, whose version therefore must not be lower."""
    meta, identity, version = repository.meta, published.identity, published.version
    if version > live.head.version:
        findings.problems.append(
            f"the metadata are at version {live.head.version}, behind the published version"
            f" {version}: run `dlcmd recover {live.head.name}`"
        )
        return
    for _ in range(_ATTEMPTS):
        since = meta.changes(identity, version)
        if since.head.version == live.head.version:
            break
        live, live_mark = meta.changes(identity, 0), b""
    else:
        findings.notes.append(
            f"version {version} was not compared: writers commit faster than it is read"
        )
        return
    if not {chunk.id for chunk in since.chunks}.issuperset(published.chunk_ids):
        return  # a purge has made the metadata forget chunks of it: the two cannot be compared
    live_mark = live_mark or _mark_of(lambda: live)
    if version == live.head.version and published.mark == live_mark:
        return
    try:
        view = published.load()
    except ObjectMissing:
        return  # it was removed since the check: there is a newer one
    with suppress(FormatError, UsageError):
        if version < live.head.version:
            view = _built(since, view)
        if content_mark(view.buffer) == live_mark:
            return
        differences = list(_differences(view, _built(live, None)))
        findings.problems += [
            f"published version {version} differs from the metadata: {each}" for each in differences
        ]
        return
    findings.problems.append(
        f"published version {version} contradicts the metadata: run"
        f" `dlcmd recover {live.head.name}`"
    )


def _built(changes: MetadataChanges, previous: Snapshot | None) -> Snapshot:
    return Snapshot(memoryview(b"".join(_parts(lambda: changes, previous))), verify=False)


def _differences(actual: Snapshot, expected: Snapshot) -> Iterator[str]:
    diff = diff_snapshots(actual, expected)
    lines = [
        f"{shown(expected.path(i))} is " + ("different" if diff.same_path[i] >= 0 else "missing")
        for i in np.flatnonzero(diff.unchanged < 0).tolist()
    ]
    superfluous = np.ones(len(actual), np.bool_)
    superfluous[diff.same_path[diff.same_path >= 0]] = False
    lines += [f"{shown(actual.path(i))} is extra" for i in np.flatnonzero(superfluous).tolist()]
    if not lines:
        lines = [
            f"the column {name}"
            for name in SnapshotColumns._fields
            if not np.array_equal(getattr(actual.columns, name), getattr(expected.columns, name))
        ]
    yield from lines[:_DIFFERENCES_MAX]
    if len(lines) > _DIFFERENCES_MAX:
        yield f"and {len(lines) - _DIFFERENCES_MAX} more entries"


_DIFFERENCES_MAX = 20


def _check_kept(
    repository: StoredRepository, identity: UUID, newest: int, listed: Collection[ChunkId],
    findings: Findings,
) -> None:  # fmt: skip
    """Check the published versions before `newest`. A damaged snapshot is a problem. A lost chunk
    that only these versions need is a note, since nothing can restore it."""
    versions = repository.snapshots
    for version in versions.versions(identity):
        if version >= newest:
            continue
        try:
            view = versions.fetch_verified(identity, version)
        except ObjectMissing:
            continue  # it was removed since the listing
        except FormatError as error:
            findings.problems.append(f"{error.message}; version {version} can no longer be read")
            continue
        lost = {
            chunk
            for chunk in used_chunks(view).difference(listed)
            if not chunk_exists(repository.objects, identity, chunk)
        }
        if lost and version in versions.versions(identity):
            files = sum(len(loss.files) for loss in losses_in(dict.fromkeys(lost, ""), [view]))
            findings.notes.append(
                f"the kept version {version} cannot be read whole: the store does not have"
                f" {first_of([*map(chunk_id_text, sorted(lost))])}; files in them: {files}"
            )


def _check_leftovers(repository: StoredRepository, info: DatasetInfo, findings: Findings) -> None:
    try:
        view = repository.view_of(info)
        for index in view.shadowing_folders().tolist():
            findings.notes.append(
                f"{shown(view.path(index))} is a file and a folder: the folder shows"
            )
    except DieselError as error:
        findings.problems.append(error.message)
    prefix = dataset_prefix(info.identity)
    if leftovers := sum(1 for _ in repository.objects.housekeeping.leftovers(prefix)):
        files = f"temporary file{'s' * (leftovers > 1)}"
        findings.notes.append(f"{leftovers} {files} of puts under way or killed")
    if foreign := sum(1 for _ in repository.objects.housekeeping.foreign(prefix)):
        findings.notes.append(f"{foreign} foreign object{'s' * (foreign > 1)}, ignored")
