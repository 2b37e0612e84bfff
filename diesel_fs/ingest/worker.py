"""Processes that pack the files of a folder, and their messages to the coordinator of a put
(`sources/folder.py`).

A message is a msgpack list, a word and its values, over a pipe. A process is a fork of the
coordinator, or, if the object store does not work in a fork, a program that gets its job in the
first message.

    to the process
        ["job", source, target, identity, URL, chunk bytes, compression]
        ["pack", [[folder, files, links], ...], [[folder, mode, mtime_ns], ...]]
                                        names of files and of links are joined by NULs
        ["id", chunk ID]                the answer to "id"
        ["finish"]
    from the process
        ["id", first chunk or nil]      requests a chunk ID; if a file goes on, its first chunk
        ["stored", preamble, stored header, entries]    the chunk is durable
        ["packed", [[path, reason], ...]]               one "pack" is done; these paths failed
        ["finished", stripped, hard links]              all is stored; see `Packer`
        ["error", class, message, advice]               the put cannot go on

A packing process has three threads: one receives, one packs, one stores (in the `Packer`). It ends
when its coordinator ends.
"""

import gc
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from socket import SHUT_WR, socket
from typing import NoReturn
from uuid import UUID

import msgpack

from ..errors import DieselError, UsageError, error_by_class_name
from ..format.entries import ChunkId, join, split
from ..storage.objects.store import ObjectStore
from ..system.atomic_file import close_folder
from .packer import FileSkipped, Packer
from .paths import target_path
from .sources.walk import failure_reason, open_folder

_OWN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""A packing process handles these signals differently from its coordinator. They are blocked until
the process has its own handlers."""

_END_WAIT_S = 10.0  # for a process to end by itself

FolderFiles = tuple[bytes, bytes, bytes]
"""A folder below the source, and the names of files and of links to pack, NULs between."""

FolderEntry = tuple[bytes, int, int]
"""Path below the source, mode, mtime_ns."""


@dataclass(frozen=True, slots=True)
class PackJob:
    root: int  # a descriptor of the source
    target: bytes  # of the source, in the dataset
    identity: UUID
    objects: ObjectStore
    chunk_bytes: int
    compress: str


# The packing process's end of the pipe


class _PackProcess:
    def __init__(self, pipe: "Connection[bytes, bytes]", job: PackJob) -> None:
        self._pipe = pipe
        self._job = job
        self._ids: deque[ChunkId] = deque()
        # None stands for "finish"
        self._batches: deque[tuple[list[FolderFiles], list[FolderEntry]] | None] = deque()
        self._arrived = threading.Condition()
        self._sending = threading.Lock()
        self._storing: threading.Thread | None = None
        self._is_over = False
        self._packer = Packer(
            job.identity,
            job.chunk_bytes,
            job.compress,
            job.objects,
            self._new_id,
            lambda *chunk: self.send("stored", *chunk),
        )

    def send(self, *message: object) -> None:
        try:
            with self._sending:
                self._pipe.send_bytes(msgpack.packb(message))
        except OSError:  # the coordinator has ended
            self.end()

    def run(self) -> None:
        threading.Thread(target=self._receive, daemon=True).start()
        while True:
            with self._arrived:
                self._arrived.wait_for(lambda: bool(self._batches))
                batch = self._batches.popleft()
            if batch is None:
                self._packer.finish()
                self.send("finished", self._packer.stripped, self._packer.hard_links)
                return
            self.send("packed", self._pack(*batch))

    def _receive(self) -> None:
        """Ends this process when the coordinator ends."""
        try:
            while True:
                kind, *values = msgpack.unpackb(self._pipe.recv_bytes())
                with self._arrived:
                    if kind == "id":
                        self._ids.append(ChunkId(values[0]))
                    else:
                        self._batches.append((values[0], values[1]) if values else None)
                    self._arrived.notify_all()
        except (EOFError, OSError):
            self.end()

    def end(self) -> NoReturn:
        """End the process after the current chunk is stored: otherwise half an object would stay in
        the store. (The storing thread calls this between two chunks.)"""
        if threading.current_thread() is not self._storing:
            with self._arrived:
                self._is_over = True
                self._arrived.notify_all()
            self._packer.close()
        os._exit(0)

    def _new_id(self, writer_of: ChunkId | None) -> ChunkId:
        """Gets a chunk ID from the coordinator, as `NewId`. In the storing thread."""
        self._storing = threading.current_thread()
        self.send("id", writer_of)
        with self._arrived:
            self._arrived.wait_for(lambda: self._ids or self._is_over)
            if self._is_over:
                self.end()
            return self._ids.popleft()

    def _pack(
        self, folders: list[FolderFiles], entries: list[FolderEntry]
    ) -> list[tuple[bytes, str]]:
        """Returns failed paths, with reasons. `entries` are the folders' own."""
        failed: list[tuple[bytes, str]] = []
        for path, mode, mtime_ns in entries:
            target = target_path(self._job.target, path)
            try:
                self._packer.add_folder(split(target), mode, mtime_ns)
            except FileSkipped as reason:
                failed.append((path, str(reason)))
        for path, *joined in folders:
            files, links = (names.split(b"\0") if names else [] for names in joined)
            try:
                folder = open_folder(self._job.root, path)
            except OSError as error:
                failed += [(join(path, name), failure_reason(error)) for name in (*files, *links)]
                continue
            try:
                failed += self._pack_folder(folder, path, files, links)
            finally:
                close_folder(folder)
        return failed

    def _pack_folder(
        self, folder: int, path: bytes, files: list[bytes], links: list[bytes]
    ) -> list[tuple[bytes, str]]:
        failed: list[tuple[bytes, str]] = []
        target = target_path(self._job.target, path)
        self._packer.add_files(
            folder, target, files, lambda name, reason: failed.append((join(path, name), reason))
        )
        for name in links:
            try:
                self._packer.add_link(folder, name, (target, name))
            except OSError as error:
                failed.append((join(path, name), failure_reason(error)))
            except FileSkipped as reason:
                failed.append((join(path, name), str(reason)))
        return failed


def _run_forked_worker(
    pipe: "Connection[bytes, bytes]",
    coordinators: "Sequence[Connection[bytes, bytes]]",
    job: PackJob,
) -> NoReturn:
    """`_OWN_SIGNALS` are still blocked. `coordinators` are the coordinator's ends of this pipe and
    of earlier ones, which the fork has copied: an open copy would keep the pipe open when the
    coordinator dies."""
    for end in coordinators:
        end.close()
    gc.freeze()  # the collector skips objects from before the fork, so their pages stay shared
    _run(pipe, job)


def run_worker_program(descriptor: int, open_objects: Callable[[str], ObjectStore]) -> NoReturn:
    """The main function of a packing program, which gets its job over the pipe `descriptor`."""
    pipe: Connection[bytes, bytes] = Connection(descriptor)
    try:
        _, root, target, identity, url, chunk_bytes, compress = msgpack.unpackb(pipe.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)
    try:
        objects = open_objects(url)
    except DieselError as error:
        pipe.send_bytes(msgpack.packb(["error", type(error).__name__, error.message, error.advice]))
        os._exit(0)
    _run(pipe, PackJob(root, target, UUID(bytes=identity), objects, chunk_bytes, compress))


def _run(pipe: "Connection[bytes, bytes]", job: PackJob) -> NoReturn:
    """Packs until the coordinator ends the process. Ctrl-C is meant for the coordinator, so it is
    ignored."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup has them ignored
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OWN_SIGNALS)
    process = _PackProcess(pipe, job)
    try:
        process.run()
    except DieselError as error:
        process.send("error", type(error).__name__, error.message, error.advice)
    except Exception as error:
        process.send("error", "DieselError", f"packing failed: {error!r}", "")
    process.end()


# The coordinator's end of the pipe


class WorkerHandle:
    """A packing process, for the coordinator. `outstanding` counts its unfinished batches. If the
    object store works in a fork, the process is one; `others` are the earlier processes, whose
    pipes it must close. Otherwise `program` is started, for the store at `url`."""

    def __init__(
        self, job: PackJob, others: "list[WorkerHandle]", program: Sequence[str], url: str
    ) -> None:
        fork = get_context("fork")
        self.pipe: Connection[bytes, bytes]
        self.pipe, theirs = fork.Pipe()
        # Blocked: a signal before the process has its own handlers would run the coordinator's
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _OWN_SIGNALS)
        try:
            self._process: ForkProcess | subprocess.Popen[bytes]
            if job.objects.fork_safe:
                ours = [self.pipe, *(other.pipe for other in others)]
                self._process = fork.Process(
                    target=_run_forked_worker, args=(theirs, ours, job), daemon=True
                )
                self._process.start()
            else:
                self._process = self._start_program(theirs, program, job, url)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self.outstanding = 0
        self.finishing = False
        self.finished = False
        self._end_s: float | None = None  # monotonic time by which it must have ended

    def _start_program(
        self, theirs: "Connection[bytes, bytes]", program: Sequence[str], job: PackJob, url: str
    ) -> subprocess.Popen[bytes]:
        """The program inherits only the pipe and the source, with the signals blocked."""
        if not program:
            raise UsageError("this process cannot pack into such a store", advice="use dlcmd put")
        process = subprocess.Popen(
            [*program, str(theirs.fileno())], pass_fds=(theirs.fileno(), job.root)
        )
        self.send(
            "job", job.root, job.target, job.identity.bytes, url, job.chunk_bytes,
            job.compress,
        )  # fmt: skip
        return process

    def close_requests(self) -> None:
        """Ends the process; its messages still arrive. Repeatable."""
        self._end_s = self._end_s or time.monotonic() + _END_WAIT_S
        with suppress(OSError), socket(fileno=os.dup(self.pipe.fileno())) as pipe:
            pipe.shutdown(SHUT_WR)

    @property
    def patience_s(self) -> float:
        """The time that the process still has to end by itself. Call `close_requests` before."""
        assert self._end_s is not None
        return max(0.0, self._end_s - time.monotonic())

    def end(self) -> None:
        """Kill the process if it does not end in time."""
        self.pipe.close()
        if isinstance(self._process, subprocess.Popen):
            try:
                self._process.wait(self.patience_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            return
        self._process.join(self.patience_s)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def send(self, *message: object) -> None:
        try:
            self.pipe.send_bytes(msgpack.packb(message))
        except (BrokenPipeError, ConnectionResetError):
            raise self.death_reason() from None

    def death_reason(self) -> DieselError:
        """The error that the ended process sent, or a general one."""
        with suppress(EOFError, OSError):
            while True:
                kind, *values = msgpack.unpackb(self.pipe.recv_bytes())
                if kind == "error":
                    return error_by_class_name(*values)
        return DieselError("a packing process died", advice="put again to go on")


def last_chunks(workers: Sequence[WorkerHandle]) -> Iterator[tuple[bytes, bytes, int]]:
    """End the processes, and yield the values of each "stored" message that was not received yet.
    Each process first finishes the chunk that it is storing."""
    for worker in workers:
        worker.close_requests()
    for worker in workers:
        with suppress(EOFError, OSError):
            while worker.pipe.poll(worker.patience_s):
                kind, *values = msgpack.unpackb(worker.pipe.recv_bytes())
                if kind == "stored":
                    preamble, header, entries = values
                    yield preamble, header, entries


def stop_workers(workers: list[WorkerHandle]) -> None:
    for worker in workers:
        worker.close_requests()
    for worker in workers:
        worker.end()
