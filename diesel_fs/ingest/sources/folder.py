"""A folder as the source of a put: this process walks and commits, forked processes (`worker.py`)
read, hash, compress and store chunks.

This coordinator makes all IDs and all commits: IDs have to follow the committed ones (FORMAT.md,
section 3), and the metadata store has one writer for a put. It is one thread, and forks before it
starts any.
"""

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

import msgpack

from ...errors import DieselError, NotFoundError, PermissionDenied, UsageError, error_by_class_name
from ...format.chunk import ENTRIES_MAX
from ...format.entries import ChunkId
from ...repository.interface import Repository
from ...repository.validation import StaleChunk, ValidatedChunk
from ...repository.writing import WriteSession
from ...system.atomic_file import close_folder
from ..compare import FolderChanges, FolderComparer
from ..options import PutOptions, PutProgress, PutReport
from ..paths import source_path
from ..put import PutWork, Source
from ..worker import FolderEntry, FolderFiles, PackJob, WorkerHandle, last_chunks, stop_workers
from .walk import walk, walk_paths

_BATCH_ENTRIES = 256  # sending takes some 100 us, packing 4 ms
_OUTSTANDING_BATCHES = 2  # per process: one being packed, one waiting
_BACKLOG_BATCHES = 1024  # that wait for a process: some 5 MB of names
COMMIT_EVERY_S = 0.1  # a commit takes some milliseconds, and more on a remote store
_STALE_TRIES = 2  # to pack files, if their chunk was committed too late (`StaleChunk`)


class FolderSource(Source):
    """A folder, or only `paths` (files, links or single folders in it).

    If the object store does not work in forked children, `program` packs: a command that takes a
    descriptor and calls `worker.run_worker_program`. The chunks that are stored within
    `commit_every_s` are committed together, earlier if they have `commit_entries_max` entries.
    """

    def __init__(
        self,
        folder: Path,
        paths: Sequence[bytes] | None = None,
        program: Sequence[str] = (),
        *,
        commit_every_s: float = COMMIT_EVERY_S,
        commit_entries_max: int = ENTRIES_MAX,
    ) -> None:
        self._folder = folder
        self._paths = paths
        self._program = program
        self._commit_every_s = commit_every_s
        self._commit_entries_max = commit_entries_max
        self._root = -1

    def open(self, repository: Repository, target: bytes, options: PutOptions) -> None:
        if options.delete and self._paths is not None:
            raise UsageError(
                "a list of files does not show which others are gone: --delete cannot go with it"
            )
        repository.check_no_overlap(self._folder)
        self._root = open_source(self._folder)

    def close(self) -> None:
        if self._root >= 0:
            close_folder(self._root)

    def start(self, work: PutWork) -> FolderComparer:
        self._work = work
        self._folder_comparer = FolderComparer(
            work.view, work.target, work.options, work.path_filter, work.readable,
            work.report.fail, self._root,
        )  # fmt: skip
        return self._folder_comparer

    def count(self) -> bool:
        batches = self._changed_batches(self._paths)
        self._work.report.entries_found = sum(batch.count for batch in batches)
        return True

    def pack(self, session: WriteSession) -> bool:
        work, report, options = self._work, self._work.report, self._work.options
        job = PackJob(
            self._root, work.target, session.identity, session.objects, options.chunk_bytes,
            options.compress,
        )  # fmt: skip
        batches = self._changed_batches(self._paths)
        for attempt in range(_STALE_TRIES):
            put = _FolderPut(
                session, work.target, batches, report, self._commit_every_s,
                self._commit_entries_max,
            )  # fmt: skip
            workers: list[WorkerHandle] = []
            for _ in range(options.processes):
                url = work.repository.url.full_url
                workers.append(WorkerHandle(job, workers, self._program, url))
            put.run(workers, work.progress)
            if not put.stale:
                break
            if attempt == _STALE_TRIES - 1:
                report.failed += [(path, "its chunk came too late, again") for path in put.stale]
            report.walked = False
            batches = self._changed_batches(put.stale)
        return True

    def _changed_batches(self, paths: Sequence[bytes] | None) -> "Iterator[_PackMessage]":
        path_filter, failed = self._work.path_filter, self._work.report.fail
        if paths is None:
            listings = walk(self._root, path_filter, failed)
        else:
            listings = walk_paths(self._root, paths, path_filter, failed)
        return _batches(self._folder_comparer.changes(listings), self._work.report)


def open_source(source: Path) -> int:
    """Raises NotFoundError, PermissionDenied."""
    try:
        return os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError(f"there is no folder {source}") from error
    except OSError as error:
        raise PermissionDenied(f"cannot open {source}: {error.strerror}") from error


@dataclass(slots=True)
class _PackMessage:
    folders: list[FolderFiles] = field(default_factory=list)
    folder_entries: list[FolderEntry] = field(default_factory=list)
    count: int = 0


@dataclass(eq=False)
class _FolderPut:
    """Feeds the processes with batches, and commits the chunks that they store."""

    session: WriteSession
    target: bytes
    batches: Iterator[_PackMessage]
    report: PutReport
    commit_every_s: float
    commit_entries_max: int

    def __post_init__(self) -> None:
        self.stale: list[bytes] = []  # paths whose chunk came too late
        self._backlog: deque[_PackMessage] = deque()
        # Durable but not committed, each with the number of entries that end in it
        self._stored: list[tuple[ValidatedChunk, int]] = []
        self._stored_entries = 0
        self._committed_s = float("-inf")

    def run(self, workers: list[WorkerHandle], progress: PutProgress) -> None:
        """The processes end after the last batch is packed, stored and committed."""
        try:
            self._run(workers, progress)
        except BaseException:  # Ctrl-C, too: commit what is durable, if that works
            with suppress(DieselError):
                for chunk in last_chunks(workers):
                    self._validate(*chunk)
            with suppress(DieselError):
                self._commit()
            raise
        finally:
            stop_workers(workers)

    def _run(self, workers: list[WorkerHandle], progress: PutProgress) -> None:
        while not all(worker.finished for worker in workers):
            self._feed(workers)
            may_walk = self._walk_ahead()
            by_pipe = {worker.pipe: worker for worker in workers if not worker.finished}
            for pipe in wait(by_pipe, timeout=0 if may_walk else self._due_s()):
                assert isinstance(pipe, Connection)
                self._answer(by_pipe[pipe])
            if self._stored_entries >= self.commit_entries_max or self._due_s() == 0:
                self._commit()
            progress(self.report)
        self._commit()
        progress(self.report)

    def _feed(self, workers: list[WorkerHandle]) -> None:
        for worker in workers:
            while worker.outstanding < _OUTSTANDING_BATCHES and (
                self._backlog or self._walk_ahead()
            ):
                batch = self._backlog.popleft()
                worker.send("pack", batch.folders, batch.folder_entries)
                worker.outstanding += 1
        idle = self.report.walked and not any(worker.outstanding for worker in workers)
        for worker in workers if idle else ():
            if not worker.finishing:
                worker.finishing = True
                worker.send("finish")

    def _walk_ahead(self) -> bool:
        """Add a batch to the backlog. Returns whether there may be more, and room for them."""
        if self.report.walked or len(self._backlog) >= _BACKLOG_BATCHES:
            return False
        batch = next(self.batches, None)
        if batch is None:
            self.report.walked = True
            return False
        self.report.entries_found += batch.count
        self._backlog.append(batch)
        return True

    def _answer(self, worker: WorkerHandle) -> None:
        try:
            kind, *values = msgpack.unpackb(worker.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise worker.death_reason() from None
        match kind:
            case "id":
                worker.send("id", self.session.new_id(values[0] and ChunkId(values[0])))
            case "stored":
                self._validate(*values)
            case "packed":
                worker.outstanding -= 1
                self.report.failed += [(path, reason) for path, reason in values[0]]
            case "finished":
                worker.finished = True
                self.report.stripped += values[0]
                self.report.hard_links += values[1]
            case "error":
                raise error_by_class_name(*values)

    def _validate(self, preamble: bytes, header: bytes, entries: int) -> None:
        """Keep a chunk for the next commit, or its paths if it came too late."""
        try:
            chunk = self.session.validate_chunk(preamble, header)
        except StaleChunk as stale:
            self.stale += [source_path(self.target, path) for path in stale.paths]
            return
        self._stored.append((chunk, entries))
        self._stored_entries += len(chunk.batch.rows)

    def _due_s(self) -> float | None:
        """None if there is no chunk to commit."""
        if not self._stored:
            return None
        return max(0.0, self._committed_s + self.commit_every_s - time.monotonic())

    def _commit(self) -> None:
        """Commit and count the durable chunks. After an interruption, they are committed again, as
        the outcome is unknown. Chunks that the metadata store refuses are not offered again."""
        if not self._stored:
            return
        try:
            self.session.commit_all([chunk for chunk, _ in self._stored])
        except DieselError:
            self._stored, self._stored_entries = [], 0
            raise
        self._committed_s = time.monotonic()
        stored, self._stored, self._stored_entries = self._stored, [], 0
        for chunk, entries in stored:
            self.report.add_chunk(chunk, entries)


def _batches(changes: Iterator[FolderChanges], report: PutReport) -> Iterator[_PackMessage]:
    batch = _PackMessage()
    for change in changes:
        report.unchanged += change.unchanged
        if change.entry is not None:
            batch.folder_entries.append((change.path, *change.entry))
            batch.count += 1
            if batch.count >= _BATCH_ENTRIES:
                yield batch
                batch = _PackMessage()
        names = change.files + change.links
        for start in range(0, len(names), _BATCH_ENTRIES):
            end, cut = start + _BATCH_ENTRIES, len(change.files)
            files, links = names[start : min(end, cut)], names[max(start, cut) : end]
            batch.folders.append((change.path, b"\0".join(files), b"\0".join(links)))
            batch.count += len(files) + len(links)
            if batch.count >= _BATCH_ENTRIES:
                yield batch
                batch = _PackMessage()
    if batch.count:
        yield batch
