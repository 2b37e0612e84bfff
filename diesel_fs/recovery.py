"""Rebuilding metadata from chunks, and telling where the two differ: `recover` and `verify`.

Owned here: what counts as damage and how it is named. The chunks are the truth; `recover` folds
them again, `verify` folds them beside the live metadata and compares. Blocking; one thread.
"""

import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from uuid import UUID

from .catalogue import DatasetInfo
from .chunk import Header, damaged, parse_header, parse_preamble
from .chunk_id import LOWEST, chunk_id_text, id_seconds, lowest_id
from .entries import ChunkId, shown
from .errors import (
    BusyError,
    DieselError,
    FormatError,
    MetadataBehind,
    NewerVersionError,
    ObjectMissing,
    ObjectStoreError,
    UsageError,
)
from .layout import MARKER, chunk_object, dataset_prefix
from .messages import Fields, Message
from .repository import CLOCK_ALLOWANCE_S, PUT_WINDOW_S, Repository, Tell, batch_of
from .snapshot_merge import merge
from .storage.metadata import Batch, Changes
from .storage.sqlite import SqliteMetadata


def silent(done: int, total: int) -> None:
    """No progress."""


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
    the old state until the new one is whole. A metadata store that is damaged is moved aside, and
    made again for all datasets. Raises NoSuchDataset, MetadataError.
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
    known: set[ChunkId] = set()
    with suppress(MetadataBehind):  # it has lost some, and says no more
        if info.marker:
            known.update(record.id for record in meta.chunks(info.identity))
    if since_s is None:
        meta.rebuild(name, info.identity, _batches(repository, info, LOWEST, known, findings, tell))
    else:
        if info.marker is None:
            meta.create(name, info.identity)
        # A chunk may have been sealed so long before its commit, by a clock that was behind
        since = lowest_id(int(since_s) - PUT_WINDOW_S - CLOCK_ALLOWANCE_S)
        for batch in _batches(repository, info, since, known, findings, tell):
            repository.commit_batches(info.identity, batch)
    repository.publish(name, full=True)
    marker = meta.marker(name)
    findings.files, findings.bytes = marker.files, marker.bytes
    return findings


def _batches(
    repository: Repository,
    info: DatasetInfo,
    since: ChunkId,
    known: set[ChunkId],
    findings: Findings,
    tell: Tell,
) -> Iterator[Batch]:
    """What the chunks since an ID bring. They are listed when the first is asked for, which a
    rebuild does inside its transaction: a put acknowledged before it is among them."""
    listed = set(repository.chunk_names(info.identity, since))
    for chunk in known - listed:
        if chunk > since and _is_there(repository, info.identity, chunk):
            findings.notes.append(f"the listing lacks chunk {chunk_id_text(chunk)}, which is there")
            listed.add(chunk)
    chunks = sorted(listed)
    for done, (chunk, header) in enumerate(_headers(repository, info.identity, chunks, findings)):
        tell(done, len(chunks))
        try:
            batch = batch_of(header, stored=True)
        except FormatError as error:
            findings.problems.append(error.message)
            continue
        findings.folded += chunk not in known
        findings.entries += len(header)
        yield batch


def verify(
    repository: Repository, name: str, *, headers_only: bool = False, tell: Tell = silent
) -> Findings:
    """Check every chunk (with `headers_only` not the bodies) and the metadata against them.

    Changes nothing, and may run beside a put and a purge. Raises NoSuchDataset, BusyError.
    """
    how: Message = {"headers_only": headers_only}
    if (there := repository.elsewhere("verify", name, how, tell)) is not None:
        return Findings.from_message(there)
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
        findings.problems.append(
            f"the metadata store does not know the dataset: run `dlcmd recover {info.name}`"
        )
        return None
    return repository.meta.changes(info.identity, 0)


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
    for chunk in chunks:
        findings.chunks += 1
        try:
            if bodies:
                header = _check_bodies(repository, identity, chunk, findings)
            else:
                header = repository.read_header(identity, chunk)
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


def _check_bodies(
    repository: Repository, identity: UUID, chunk: ChunkId, findings: Findings
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
        findings.notes.append(f"{leftovers} temporary files of puts under way or killed")
    if foreign := sum(1 for _ in repository.objects.foreign(prefix)):
        findings.notes.append(f"{foreign} foreign objects, ignored")
