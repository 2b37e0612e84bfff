"""Rebuilding metadata from chunks, and telling where the two differ: `recover` and `verify`.

Owned here: what counts as damage and how it is named. The chunks are the truth; `recover` folds
them again, `verify` folds them beside the live metadata and compares. Blocking; of one thread,
beside which others read headers ahead.
"""

import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Self
from uuid import UUID

from .catalogue import DatasetInfo
from .chunk import ENTRIES_MAX, Header, damaged, parse_header, parse_preamble
from .chunk_id import LOWEST, chunk_id_text, id_seconds, lowest_id
from .commits import CLOCK_ALLOWANCE_S, PUT_WINDOW_S, batch_of, ids_from_the_future
from .entries import ChunkId, shown
from .errors import (
    BusyError,
    DieselError,
    FormatError,
    MetadataBehind,
    NewerVersionError,
    ObjectMissing,
    ObjectStoreError,
    PermissionDenied,
    UsageError,
)
from .layout import MARKER, chunk_object, dataset_prefix
from .messages import Fields, Message
from .repository import Repository, Tell, silent
from .snapshot_merge import merge
from .storage.metadata import Batch, Changes
from .storage.sqlite import SqliteMetadata


@dataclass(slots=True)
class Findings:
    """What a look at all chunks found. `problems` are damage; `notes` are not."""

    chunks: int = 0
    entries: int = 0
    files: int = 0
    bytes: int = 0
    folded: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Whether nothing is damaged or lost."""
        return not self.problems

    def to_message(self) -> Message:
        """These findings as they travel."""
        counts = {name: getattr(self, name) for name in _COUNTS}
        return {**counts, "problems": [*self.problems], "notes": [*self.notes]}

    @classmethod
    def from_message(cls, message: Message) -> Self:
        """The findings that were sent. Raises UsageError for anything else."""
        fields = Fields(message, "findings")
        chunks, entries, files, content_bytes, folded = map(fields.whole, _COUNTS)
        problems, notes = fields.texts("problems"), fields.texts("notes")
        return cls(chunks, entries, files, content_bytes, folded, problems, notes)


_COUNTS = ("chunks", "entries", "files", "bytes", "folded")


def recover(
    repository: Repository, name: str, since_s: float | None = None, tell: Tell = silent
) -> Findings:
    """Fold the chunks of a dataset again: all into a fresh state, or those since a time.

    A chunk that cannot be read is a problem and is left out; all others are folded in. Readers see
    the old state until the new one is whole, and writers go on meanwhile. A metadata store that is
    damaged is moved aside, and made again for all datasets. Raises NoSuchDataset, MetadataError.
    """
    there = repository.elsewhere("recover", name, {"since_s": since_s}, tell)
    if there is not None:
        return Findings.from_message(there)
    findings = Findings()
    if isinstance(repository.meta_problem, FormatError):
        findings.notes.append(f"{repository.meta_problem.message}: moved aside and made again")
        repository.open_metadata(create=True, anew=True)
        for other in repository.datasets():
            if other.name != name:
                repository.begin(other.name)
    info = repository.dataset(name)
    meta = repository.meta
    folding = _Folding(repository, info, findings, tell)
    if since_s is None:
        meta.rebuild(name, info.identity, folding.since(LOWEST), folding.late)
        folding.forget_deleted()
    else:
        if info.marker is None:
            meta.create(name, info.identity)
        # A chunk may have been sealed so long before its commit, by a clock that was behind
        since = lowest_id(int(since_s) - PUT_WINDOW_S - CLOCK_ALLOWANCE_S)
        for batch in folding.since(since):
            repository.commit_batches(info.identity, batch)
    repository.publish(name, full=True)
    marker = meta.marker(name)
    findings.files, findings.bytes = marker.files, marker.bytes
    return findings


class _Folding:
    """Chunks on their way from the object store into the metadata store."""

    def __init__(
        self, repository: Repository, info: DatasetInfo, findings: Findings, tell: Tell
    ) -> None:
        self._repository = repository
        self._info = info
        self._findings = findings
        self._tell = tell
        self._known: set[ChunkId] = set()
        self._folded: set[ChunkId] = set()
        self._done = self._total = 0

    def since(self, first: ChunkId) -> Iterator[Batch]:
        """What the chunks after an ID bring. They are listed when the first batch is asked for: a
        rebuild has looked at what stands by then, and what is committed later comes late."""
        identity = self._info.identity
        with suppress(MetadataBehind):  # it has lost some, and says no more
            if self._info.marker:
                records = self._repository.meta.chunks(identity)
                self._known.update(record.id for record in records)
        listed = set(self._repository.chunk_names(identity, first))
        for chunk in self._known - listed:
            if chunk > first and _is_there(self._repository, identity, chunk):
                self._findings.notes.append(
                    f"the listing lacks chunk {chunk_id_text(chunk)}, which is there"
                )
                listed.add(chunk)
        yield from self._read(listed)

    def late(self, chunks: Collection[ChunkId]) -> Iterator[Batch]:
        """What chunks bring that writers have committed meanwhile."""
        self._known.update(chunks)
        yield from self._read(chunks)

    def _read(self, chunks: Collection[ChunkId]) -> Iterator[Batch]:
        self._total += len(chunks)
        identity, findings = self._info.identity, self._findings
        for chunk, header in _headers(self._repository, identity, sorted(chunks), findings):
            self._tell(self._done, self._total)
            self._done += 1
            try:
                batch = batch_of(header, stored=True)
            except FormatError as error:
                findings.problems.append(error.message)
                continue
            self._folded.add(chunk)
            findings.folded += chunk not in self._known
            findings.entries += len(header)
            yield batch

    def forget_deleted(self) -> None:
        """Forget what a purge had forgotten, and has deleted since it was read here: else the
        metadata would name chunks that nobody has. What it has not deleted yet it forgets again."""
        identity = self._info.identity
        gone = self._folded.difference(self._repository.chunk_names(identity))
        deleted = [each for each in gone if not _is_there(self._repository, identity, each)]
        if deleted:
            self._repository.meta.forget(identity, deleted, tombstones=True)


def verify(
    repository: Repository, name: str, *, headers_only: bool = False, tell: Tell = silent
) -> Findings:
    """Check every chunk (with `headers_only` not the bodies) and the metadata against them.

    Changes nothing, and may run beside a put and a purge. Raises NoSuchDataset, BusyError, and why
    the metadata store cannot be had; an embedded one that is lost is damage as any other, and one
    that a reader of a read-only folder cannot open is left out.
    """
    how: Message = {"headers_only": headers_only}
    if (there := repository.elsewhere("verify", name, how, tell)) is not None:
        return Findings.from_message(there)
    if not (repository.meta_is_lost or _is_for_others(repository)):
        _ = repository.meta
    info = repository.dataset(name)
    findings = Findings()
    with tempfile.TemporaryDirectory(prefix="diesel-verify-") as folder:
        scratch = SqliteMetadata.open(Path(folder) / "meta.sqlite", create=True)
        try:
            scratch.create(name, info.identity)
            check = _Check(repository, info, findings, scratch, headers_only=headers_only)
            check.run(tell)
            folded = scratch.changes(info.identity, 0)
        finally:
            scratch.close()
    if check.live is not None:
        _name_absent(repository, info.identity, check.absent, check.seen, findings)
        _compare(check.live, folded, findings)
    findings.files, findings.bytes = folded.marker.files, folded.marker.bytes
    _look_around(repository, info, findings)
    with suppress(DieselError):  # without a metadata store there is no clock to go by
        if note := ids_from_the_future(check.seen, repository.clock):
            findings.notes.append(note)
    return findings


_ROUNDS = 5


class _Check:
    """Reads each chunk once, and folds those that the metadata store knows into `scratch`.

    A purge that goes on meanwhile deletes what the metadata store knew at the beginning. What it
    knows then counts, and what has come since is read, too.
    """

    def __init__(
        self,
        repository: Repository,
        info: DatasetInfo,
        findings: Findings,
        scratch: SqliteMetadata,
        *,
        headers_only: bool,
    ) -> None:
        self.live: Changes | None = None
        self.seen: set[ChunkId] = set()  # listed
        self.absent: set[ChunkId] = set()  # known, and not folded
        self._repository = repository
        self._info = info
        self._findings = findings
        self._scratch = scratch
        self._headers_only = headers_only
        self._entries: dict[ChunkId, int] = {}  # of unknown chunks
        self._folded: set[ChunkId] = set()

    def run(self, tell: Tell) -> None:
        """Raises BusyError where purges go by faster than this."""
        for _ in range(_ROUNDS):
            # Before the listing: what comes later is no orphan
            self.live = _live(self._repository, self._info, self._findings)
            known = {chunk.id for chunk in self.live.chunks} if self.live else set[ChunkId]()
            self._read(known, tell)
            self.absent = known - self._folded
            if not self.absent or not self._are_forgotten(self.absent):
                break
        else:
            raise BusyError(f"{self._info.name!r} is being purged", advice="verify it afterwards")
        for chunk, entries in sorted(self._entries.items()):
            _unindexed(chunk, entries, self._findings)

    def _read(self, known: Collection[ChunkId], tell: Tell) -> None:
        identity, findings = self._info.identity, self._findings
        for chunk in sorted(self._entries.keys() & known):  # of a put under way, then
            with suppress(FormatError, ObjectMissing):
                self._fold(self._repository.read_header(identity, chunk))
                del self._entries[chunk]
        listed = self._repository.chunk_names(identity)
        chunks = [chunk for chunk in listed if chunk not in self.seen]
        self.seen.update(chunks)
        bodies = not self._headers_only
        headers = _headers(self._repository, identity, chunks, findings, bodies=bodies)
        for done, (chunk, header) in enumerate(headers):
            tell(done, len(chunks))
            findings.entries += len(header)
            if self.live is None or chunk in known:
                self._fold(header)
            else:
                self._entries[chunk] = len(header)

    def _fold(self, header: Header) -> None:
        self._scratch.commit(self._info.identity, batch_of(header))
        self._folded.add(header.preamble.id)

    def _are_forgotten(self, chunks: Collection[ChunkId]) -> bool:
        """Whether the metadata store does not know all of these any more."""
        known = self._repository.meta.chunks(self._info.identity)
        return not {record.id for record in known}.issuperset(chunks)


def _name_absent(
    repository: Repository,
    identity: UUID,
    absent: Collection[ChunkId],
    listed: Collection[ChunkId],
    findings: Findings,
) -> None:
    """Name those chunks of the metadata that could not be read because they are not there."""
    records = repository.meta.chunks(identity) if absent else []
    empty = {record.id for record in records if record.holes == record.entries}
    for chunk in sorted(absent):
        if _is_there(repository, identity, chunk):
            if chunk not in listed:  # else it is damaged, and named
                findings.problems.append(f"the listing lacks chunk {chunk_id_text(chunk)}")
            continue
        text = f"lost chunk {chunk_id_text(chunk)}: metadata names it, the store has it not"
        if chunk in empty:
            findings.notes.append(f"{text}; nothing is in it, and the next purge forgets it")
        else:
            findings.problems.append(text)


def _is_there(repository: Repository, identity: UUID, chunk: ChunkId) -> bool:
    try:
        repository.objects.stat(chunk_object(identity, chunk))
    except ObjectMissing:
        return False
    return True


def _live(repository: Repository, info: DatasetInfo, findings: Findings) -> Changes | None:
    """What the metadata store says, of one moment; None where it cannot."""
    if info.marker is None:
        problem = repository.meta_problem
        why = problem.message if problem else "the metadata store does not know the dataset"
        if _is_for_others(repository):
            findings.notes.append(f"the metadata were not looked at: {why}")
            return None
        findings.problems.append(f"{why}: run `dlcmd recover {info.name}`")
        return None
    return repository.meta.changes(info.identity, 0)


def _is_for_others(repository: Repository) -> bool:
    """Whether this user may read the chunks, and not the metadata beside them."""
    return not repository.url.meta and isinstance(repository.meta_problem, PermissionDenied)


def _unindexed(chunk: ChunkId, entries: int, findings: Findings) -> None:
    text = f"unindexed chunk {chunk_id_text(chunk)} with {entries} entries"
    if time.time() - id_seconds(chunk) < PUT_WINDOW_S:
        findings.notes.append(f"{text}: of a put under way, or of one that was killed")
    else:
        findings.notes.append(f"{text}: an orphan; the next put or `dlcmd recover` folds it in")


def _headers(
    repository: Repository,
    identity: UUID,
    chunks: list[ChunkId],
    findings: Findings,
    *,
    bodies: bool = False,
) -> Iterator[tuple[ChunkId, Header]]:
    """The readable headers of `chunks`; what is wrong with the others becomes a problem."""
    outcomes: Generator[tuple[ChunkId, _Outcome]]
    if bodies:  # each is as large as a chunk
        check = partial(_check_bodies, repository, identity, findings)
        outcomes = ((chunk, partial(check, chunk)) for chunk in chunks)
    else:
        outcomes = _read_ahead(repository, identity, chunks)
    with closing(outcomes):
        for chunk, outcome in outcomes:
            findings.chunks += 1
            try:
                header = outcome()
            except NewerVersionError as error:
                findings.problems.append(
                    f"chunk {chunk_id_text(chunk)}: {error.message}; left as it is"
                )
                continue
            except ObjectMissing:
                continue  # removed since it was listed
            except (FormatError, ObjectStoreError) as error:
                repository.objects.stat(MARKER)  # where the whole store is gone, that is the error
                findings.problems.append(f"chunk {chunk_id_text(chunk)}: {error.message}")
                continue
            for place, fault in header.faults.items():
                findings.notes.append(
                    f"chunk {chunk_id_text(chunk)}: entry {place} "
                    f"({shown(header.path(place))}) is skipped: its path has {fault}"
                )
            yield chunk, header


HEADERS_AHEAD = 16
"""So many are asked for at once: a store that answers after 20 ms gives some hundreds a second."""

_ENTRIES_AHEAD = 2 * ENTRIES_MAX  # an entry takes up to some 700 bytes (FORMAT.md, section 4)

_Outcome = Callable[[], Header]
"""Gives the header, or raises why there is none."""


def _read_ahead(
    repository: Repository, identity: UUID, chunks: Iterable[ChunkId]
) -> Generator[tuple[ChunkId, _Outcome]]:
    """Headers in the order of `chunks`, some of which are read while the caller is at work.

    Fewer where they are large, which is only known of those before: at first few.
    """
    waiting, left, entries = deque[tuple[ChunkId, Future[Header]]](), iter(chunks), ENTRIES_MAX
    threads = ThreadPoolExecutor(HEADERS_AHEAD, "header")
    try:
        while True:
            most = min(HEADERS_AHEAD, _ENTRIES_AHEAD // max(entries, 1))
            for chunk in islice(left, max(most - len(waiting), 0)):
                waiting.append((chunk, threads.submit(repository.read_header, identity, chunk)))
            if not waiting:
                return
            chunk, future = waiting.popleft()
            yield chunk, future.result
            if not future.exception():
                entries = max(len(future.result()), entries // 2)
    finally:
        threads.shutdown(cancel_futures=True)


def _check_bodies(
    repository: Repository, identity: UUID, findings: Findings, chunk: ChunkId
) -> Header:
    name = chunk_object(identity, chunk)
    data = memoryview(repository.objects.get(name))
    preamble = parse_preamble(data, identity=identity, id=chunk, object_bytes=len(data))
    start = preamble.body_start - preamble.header_stored
    header = parse_header(preamble, data[start : preamble.body_start])
    for place in damaged(header, data[preamble.body_start :]):
        findings.problems.append(
            f"chunk {chunk_id_text(chunk)}: the bytes of {shown(header.path(place))} are damaged"
        )
    return header


def _compare(live: Changes, folded: Changes, findings: Findings) -> None:
    """Name the paths for which the metadata store and the fold over its chunks differ."""
    if _as_snapshot(live) == _as_snapshot(folded):
        return  # nearly always, and without an object for each entry
    have, wanted = _by_path(live), _by_path(folded)
    for path in sorted(wanted.keys() | have.keys()):
        if path not in have:
            findings.problems.append(f"metadata lacks {shown(path)}")
        elif path not in wanted:
            findings.problems.append(f"metadata has {shown(path)}, no chunk does")
        elif wanted[path] != have[path]:
            findings.problems.append(f"metadata of {shown(path)} differs from its chunk's")


def _as_snapshot(changes: Changes) -> bytes:
    """A state's canonical form, of whatever version; empty where it has none."""
    marker = changes.marker
    try:
        parts = merge(
            None, changes.rows, changes.chunks,
            identity=marker.identity, dataset=marker.name, version=1, digest=0,
        )  # fmt: skip
    except (FormatError, UsageError):
        return b""
    return b"".join(parts)


def _by_path(changes: Changes) -> dict[bytes, tuple[bytes, bytes, bytes]]:
    rows = changes.rows
    return {
        rows.path(i): (
            rows.records[i].tobytes(),
            rows.chunks[rows.chunk[i]],
            rows.tails.get(i, b""),
        )
        for i in range(len(rows))
    }


def _look_around(repository: Repository, info: DatasetInfo, findings: Findings) -> None:
    """Shadowed files, the newest snapshot, leftovers and foreign objects."""
    try:
        if newest := repository.snapshots.newest(info.identity):
            repository.snapshots.check(info.identity, newest)
    except FormatError as error:
        findings.problems.append(f"{error.message}; `dlcmd recover` makes it again")
    try:
        view = repository.view_of(info)
        for index in view.shadowed().tolist():
            findings.notes.append(
                f"{shown(view.path(index))} is a file and a folder: the folder shows"
            )
    except DieselError as error:
        findings.problems.append(error.message)
    prefix = dataset_prefix(info.identity)
    if leftovers := sum(1 for _ in repository.objects.leftovers(prefix)):
        files = f"temporary file{'s' * (leftovers > 1)}"
        findings.notes.append(f"{leftovers} {files} of puts under way or killed")
    if foreign := sum(1 for _ in repository.objects.foreign(prefix)):
        findings.notes.append(f"{foreign} foreign object{'s' * (foreign > 1)}, ignored")
