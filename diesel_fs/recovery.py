"""Rebuilding metadata from chunks, and telling where the two differ: `recover` and `verify`.

Owned here: what counts as damage and how it is named. The chunks are the truth; `recover` folds
them again, `verify` folds them beside the live metadata and compares. Blocking; one thread.
"""

import tempfile
import time
from collections.abc import Iterator
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
            meta.commit(info.identity, batch)
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
    chunks = list(repository.chunk_names(info.identity, since))
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

    Changes nothing, and may run beside a put. Raises NoSuchDataset.
    """
    how: Message = {"headers_only": headers_only}
    if (there := repository.elsewhere("verify", name, how, tell)) is not None:
        return Findings.from_message(there)
    info = repository.dataset(name)
    findings = Findings()
    live = _live(repository, info, findings)  # before the listing: what comes later is no orphan
    known = {chunk.id for chunk in live.chunks} if live else None
    chunks = list(repository.chunk_names(info.identity))
    with tempfile.TemporaryDirectory(prefix="diesel-verify-") as folder:
        scratch = SqliteMetadata.open(Path(folder) / "meta.sqlite", create=True)
        try:
            scratch.create(name, info.identity)
            for done, (chunk, header) in enumerate(
                _headers(repository, info.identity, chunks, findings, bodies=not headers_only)
            ):
                tell(done, len(chunks))
                findings.entries += len(header)
                if known is None or chunk in known:
                    scratch.commit(info.identity, batch_of(header))
                else:
                    _unindexed(chunk, len(header), findings)
            folded = scratch.changes(info.identity, 0)
        finally:
            scratch.close()
    if live is not None:
        lost = sorted({chunk.id for chunk in live.chunks}.difference(chunks))
        records = repository.meta.chunks(info.identity) if lost else []
        empty = {record.id for record in records if record.holes == record.entries}
        for chunk in lost:
            text = f"lost chunk {chunk_id_text(chunk)}: metadata names it, the store has it not"
            if chunk in empty:
                findings.notes.append(f"{text}; nothing is in it, and the next purge forgets it")
            else:
                findings.problems.append(text)
        _compare(live, folded, findings)
    findings.files, findings.bytes = folded.marker.files, folded.marker.bytes
    _look_around(repository, info, findings)
    return findings


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
