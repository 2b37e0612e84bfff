"""One put of a folder: the coordinator walks, feeds packing processes, and commits.

The packing processes read, hash, compress and store chunks; all IDs and all commits are the
coordinator's, so that IDs follow what has been committed (FORMAT.md, section 3) and the metadata
store has one writer for a put. The coordinator is one thread; it forks before it starts any.
"""

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path

import msgpack

from ..errors import DieselError, NotFoundError, PermissionDenied, UsageError, error_by_class_name
from ..format.chunk import ENTRIES_MAX
from ..format.entries import ChunkId
from ..repository.interface import Repository
from ..repository.validation import StaleChunk, ValidatedChunk
from ..repository.writing import WriteSession
from ..system.atomic_file import close_folder
from .compare import FolderChanges, FolderComparer
from .concurrent_writers import finish_put
from .conflicts import begin_put
from .options import Filter, PutOptions, PutProgress, PutReport, no_progress
from .sources.folder import walk, walk_paths
from .worker import HANDLED, FolderEntry, FolderFiles, PackJob, run_forked_worker

_BATCH_ENTRIES = 256  # per message: some 100 us of sending against 4 ms of work
_OUTSTANDING_BATCHES = 2  # per process: one in work, one waiting
_BACKLOG_BATCHES = 1024  # how far the walk may run ahead, for the time left: some 5 MB of names
_COMMIT_EVERY_S = 0.1  # the first chunk after such a pause goes in at once, others together
_GOODBYE_S = 10.0
_STALE_TRIES = 2


@dataclass(slots=True)
class _Batch:
    """What one message asks a process to pack."""

    folders: list[FolderFiles] = field(default_factory=list)
    folder_entries: list[FolderEntry] = field(default_factory=list)
    count: int = 0


class _WorkerHandle:
    """One packing process, as the coordinator sees it."""

    def __init__(
        self, task: PackJob, others: "list[_WorkerHandle]", program: Sequence[str], url: str
    ) -> None:
        self._context = get_context("fork")
        self.pipe: Connection[bytes, bytes]
        self.pipe, theirs = self._context.Pipe()
        # A signal between the fork and the process's own handlers would run the coordinator's there
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        try:
            self._process: ForkProcess | subprocess.Popen[bytes]
            if task.objects.fork_safe:
                self._process = self._forked(theirs, others, task)
            else:
                self._process = self._started(theirs, program, task, url)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self.outstanding = 0
        self.finishing = False
        self.finished = False

    def _forked(
        self, theirs: "Connection[bytes, bytes]", others: "list[_WorkerHandle]", task: PackJob
    ) -> ForkProcess:
        ours = [self.pipe, *(other.pipe for other in others)]
        process = self._context.Process(
            target=run_forked_worker, args=(theirs, ours, task), daemon=True
        )
        process.start()
        return process

    def _started(
        self, theirs: "Connection[bytes, bytes]", program: Sequence[str], task: PackJob, url: str
    ) -> subprocess.Popen[bytes]:
        """A program that inherits the pipe and the source alone, with the signals still blocked."""
        if not program:
            raise UsageError("this process cannot pack into such a store", advice="use dlcmd put")
        process = subprocess.Popen(
            [*program, str(theirs.fileno())], pass_fds=(theirs.fileno(), task.root)
        )
        self.send(
            "task", task.root, task.prefix, task.identity.bytes, url, task.chunk_bytes,
            task.compress,
        )  # fmt: skip
        return process

    def end(self) -> None:
        """Waits for its end, which its pipe's has begun; makes it end where it does not."""
        if isinstance(self._process, subprocess.Popen):
            try:
                self._process.wait(_GOODBYE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            return
        self._process.join(_GOODBYE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def send(self, *message: object) -> None:
        try:
            self.pipe.send_bytes(msgpack.packb(message))
        except (BrokenPipeError, ConnectionResetError):
            raise self.last_words() from None

    def last_words(self) -> DieselError:
        """Why the process has ended, where it had time to say it."""
        with suppress(EOFError, OSError):
            while True:
                kind, *values = msgpack.unpackb(self.pipe.recv_bytes())
                if kind == "error":
                    return error_by_class_name(*values)
        return DieselError("a packing process died", advice="put again to go on")


class _FolderPut:
    """The coordinator of one put: what has been walked, what is being packed, what is done."""

    def __init__(
        self,
        session: WriteSession,
        prefix: bytes,
        batches: Iterator[_Batch],
        report: PutReport,
    ) -> None:
        self._session = session
        self._prefix = prefix
        self._batches = batches
        self._backlog: deque[_Batch] = deque()
        self._report = report
        self._stored: list[
            tuple[ValidatedChunk, int]
        ] = []  # durable but not committed, and entries
        self._stored_entries = 0
        self._committed_s = float("-inf")  # when the last were; monotonic
        self.stale: list[bytes] = []  # what came too late and is to be put again

    def run(self, workers: list[_WorkerHandle], progress: PutProgress) -> None:
        """Feed the processes until all batches are packed, stored and committed; end them."""
        try:
            self._run(workers, progress)
        except BaseException:  # a Ctrl-C, too: what is durable stays, as far as that can be had
            with suppress(DieselError):
                self._commit()
            raise
        finally:
            _stop(workers)

    def _run(self, workers: list[_WorkerHandle], progress: PutProgress) -> None:
        while not all(worker.finished for worker in workers):
            self._feed(workers)
            more = self._walk_ahead()
            by_pipe = {worker.pipe: worker for worker in workers if not worker.finished}
            for pipe in wait(by_pipe, timeout=0 if more else self._due_s()):
                assert isinstance(pipe, Connection)
                self._answer(by_pipe[pipe])
            if self._stored_entries >= ENTRIES_MAX or self._due_s() == 0:
                self._commit()
            progress(self._report)
        self._commit()
        progress(self._report)

    def _feed(self, workers: list[_WorkerHandle]) -> None:
        for worker in workers:
            while worker.outstanding < _OUTSTANDING_BATCHES and (
                self._backlog or self._walk_ahead()
            ):
                batch = self._backlog.popleft()
                worker.send("pack", batch.folders, batch.folder_entries)
                worker.outstanding += 1
        idle = self._report.walked and not any(worker.outstanding for worker in workers)
        for worker in workers if idle else ():
            if not worker.finishing:
                worker.finishing = True
                worker.send("finish")

    def _walk_ahead(self) -> bool:
        """Let the walk run ahead by one batch; whether there may be more."""
        if self._report.walked or len(self._backlog) >= _BACKLOG_BATCHES:
            return False
        batch = next(self._batches, None)
        if batch is None:
            self._report.walked = True
            return False
        self._report.entries_found += batch.count
        self._backlog.append(batch)
        return True

    def _answer(self, worker: _WorkerHandle) -> None:
        try:
            kind, *values = msgpack.unpackb(worker.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise worker.last_words() from None
        match kind:
            case "id":
                worker.send("id", self._session.new_id(values[0] and ChunkId(values[0])))
            case "stored":
                self._validate(*values)
            case "packed":
                worker.outstanding -= 1
                self._report.failed += [(path, reason) for path, reason in values[0]]
            case "finished":
                worker.finished = True
                self._report.stripped += values[0]
                self._report.hard_links += values[1]
            case "error":
                raise error_by_class_name(*values)

    def _validate(self, preamble: bytes, header: bytes, entries: int) -> None:
        try:
            chunk = self._session.validate_chunk(preamble, header)
        except StaleChunk as stale:
            start = len(self._prefix) + 1 if self._prefix else 0
            self.stale += [path[start:] for path in stale.paths]
            return
        self._stored.append((chunk, entries))
        self._stored_entries += len(chunk.batch.rows)

    def _due_s(self) -> float | None:
        """For how long the next commit waits for more chunks; None where there is none yet."""
        if not self._stored:
            return None
        return max(0.0, self._committed_s + _COMMIT_EVERY_S - time.monotonic())

    def _commit(self) -> None:
        """Commit together what is durable, and count it."""
        stored, self._stored, self._stored_entries = self._stored, [], 0
        if not stored:
            return
        self._session.commit_all([chunk for chunk, _ in stored])
        self._committed_s = time.monotonic()
        self._report.chunks += len(stored)
        for chunk, entries in stored:
            self._report.files += chunk.files
            self._report.content_bytes += chunk.content_bytes
            self._report.entries += entries


def put_tree(
    repository: Repository,
    dataset: str,
    source: Path,
    prefix: bytes = b"",
    options: PutOptions | None = None,
    progress: PutProgress = no_progress,
    paths: list[bytes] | None = None,
    program: Sequence[str] = (),
) -> PutReport:
    """Pack the contents of the folder `source` (or of its `paths`) below `prefix` of a dataset.

    Skips what is already there unchanged, so it can be repeated and resumed. Returns when all of it
    is durable and the snapshot of the new version lies in the repository. What could not be put is
    named in the report. Where the store does not work in forked children, `program` packs: a
    command that takes a descriptor and calls `process.run_worker_program`. Raises DieselError; what
    was committed by then stays.
    """
    options = options or PutOptions()
    if options.delete and paths is not None:
        raise UsageError("a list of files says nothing about others: --delete cannot go with it")
    repository.check_no_overlap(source)
    report = PutReport()
    root = open_source(source)
    try:
        session, view, readable = begin_put(repository, dataset, options)
        chosen = Filter(options)
        plan = FolderComparer(view, readable, prefix, options, chosen, report.fail, root)
        listings = walk(root, chosen, report.fail)
        if paths is not None:
            listings = walk_paths(root, paths, chosen, report.fail)
        batches = _batches(plan.changes(listings), report)
        if session is None:
            report.entries_found = sum(batch.count for batch in batches)
            report.set_to_delete(plan.removed_paths() if options.delete else ())
            return report
        task = PackJob(
            root,
            prefix,
            session.identity,
            session.objects,
            options.chunk_bytes,
            options.compress,
        )
        for again in range(_STALE_TRIES):
            put = _FolderPut(session, prefix, batches, report)
            workers: list[_WorkerHandle] = []
            for _ in range(options.processes):
                workers.append(_WorkerHandle(task, workers, program, repository.url.full_url))
            put.run(workers, progress)
            if not put.stale:
                break
            if again == _STALE_TRIES - 1:
                report.failed += [(path, "its chunk came too late, again") for path in put.stale]
            report.walked = False
            late = walk_paths(root, put.stale, chosen, report.fail)
            batches = _batches(plan.changes(late), report)
        if options.delete:
            report.deleted = session.delete(plan.removed_paths())
        finish_put(repository, session, report, prefix)
        return report
    finally:
        close_folder(root)


def open_source(source: Path) -> int:
    """A descriptor of a folder. Raises NotFoundError, PermissionDenied."""
    try:
        return os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError(f"there is no folder {source}") from error
    except OSError as error:
        raise PermissionDenied(f"cannot open {source}: {error.strerror}") from error


def _batches(changes: Iterator[FolderChanges], report: PutReport) -> Iterator[_Batch]:
    """What has changed, in messages of some `_BATCH_ENTRIES`."""
    batch = _Batch()
    for change in changes:
        report.unchanged += change.unchanged
        if change.entry is not None:
            batch.folder_entries.append((change.path, *change.entry))
            batch.count += 1
            if batch.count >= _BATCH_ENTRIES:
                yield batch
                batch = _Batch()
        names = change.files + change.links
        for start in range(0, len(names), _BATCH_ENTRIES):
            end, cut = start + _BATCH_ENTRIES, len(change.files)
            files, links = names[start : min(end, cut)], names[max(start, cut) : end]
            batch.folders.append((change.path, b"\0".join(files), b"\0".join(links)))
            batch.count += len(files) + len(links)
            if batch.count >= _BATCH_ENTRIES:
                yield batch
                batch = _Batch()
    if batch.count:
        yield batch


def _stop(workers: list[_WorkerHandle]) -> None:
    """End the processes: those that have finished go by themselves, others with their pipe."""
    for worker in workers:
        worker.pipe.close()
    for worker in workers:
        worker.end()
