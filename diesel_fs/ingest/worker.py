"""A packing process, and the messages between it and the coordinator (`put.py`).

A message is a msgpack list: a word and its values, over a pipe. The process is the coordinator's
fork; where the object store does not survive that, it is a program of its own, whose first message
is its task.

    to the process      ["task", source, prefix, identity, URL, chunk bytes, compression]
                        ["pack", [[folder, files, links], ...], [[folder, mode, mtime_ns], ...]]
                            with a NUL between each name and the next
                        ["id", chunk ID]     the answer to "id"
                        ["finish"]
    from the process    ["id", first chunk or nil]
                        ["stored", preamble, stored header, entries]    the chunk is durable
                        ["packed", [[path, reason], ...]]       one "pack" is done; what failed
                        ["finished", stripped, hard links]      all is stored; see `Packer`
                        ["error", class, message, advice]       the put cannot go on

Three threads: one receives, one packs, one stores (in the `Packer`). A process ends with its
coordinator, whatever happens to that.
"""

import gc
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NoReturn
from uuid import UUID

import msgpack

from ..errors import DieselError
from ..format.entries import ChunkId, join, split
from ..storage.objects.store import ObjectStore
from ..system.atomic_file import close_folder
from .packer import Packer
from .sources.folder import failure_reason, open_folder

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that mean something else here than in the coordinator."""

FolderFiles = tuple[bytes, bytes, bytes]
"""A folder below the source, and the names of files and of links in it to pack, NULs between."""

FolderEntry = tuple[bytes, int, int]
"""A folder entry to make: path below the source, mode, mtime_ns."""


@dataclass(frozen=True, slots=True)
class PackJob:
    """What a packing process needs to know from the start."""

    root: int  # descriptor of the source
    prefix: bytes  # where the source goes in the dataset
    identity: UUID
    objects: ObjectStore
    chunk_bytes: int
    compress: str


class _PackProcess:
    def __init__(self, pipe: "Connection[bytes, bytes]", job: PackJob) -> None:
        self._pipe = pipe
        self._task = job
        self._ids: deque[ChunkId] = deque()
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
        except OSError:  # the coordinator is gone, and nothing else matters
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
        """Sort what arrives; the end of the coordinator is the end of this process."""
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
        """End the process. A chunk that is being stored is finished first: what is half written
        would stay in the store. (The thread that stores comes here between two chunks.)"""
        if threading.current_thread() is not self._storing:
            with self._arrived:
                self._is_over = True
                self._arrived.notify_all()
            self._packer.close()
        os._exit(0)

    def _new_id(self, writer_of: ChunkId | None) -> ChunkId:
        self._storing = threading.current_thread()
        self.send("id", writer_of)
        with self._arrived:
            self._arrived.wait_for(lambda: self._ids or self._is_over)
            if self._is_over:
                self.end()
            return self._ids.popleft()

    def _pack(self, folders: list[FolderFiles], made: list[FolderEntry]) -> list[tuple[bytes, str]]:
        """Pack one batch; what could not be packed comes back."""
        failed: list[tuple[bytes, str]] = []
        for path, mode, mtime_ns in made:
            self._packer.add_folder(split(self._target(path)), mode, mtime_ns)
        for path, *joined in folders:
            files, links = (names.split(b"\0") if names else [] for names in joined)
            try:
                folder = open_folder(self._task.root, path)
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
        target = self._target(path)
        self._packer.add_files(
            folder, target, files, lambda name, reason: failed.append((join(path, name), reason))
        )
        for name in links:
            try:
                self._packer.add_link(folder, name, (target, name))
            except OSError as error:
                failed.append((join(path, name), failure_reason(error)))
        return failed

    def _target(self, path: bytes) -> bytes:
        return target_path(self._task.prefix, path)


def target_path(prefix: bytes, path: bytes) -> bytes:
    """Where what lies at `path` below the source goes in the dataset."""
    return join(prefix, path) if path else prefix


def run_forked_worker(
    pipe: "Connection[bytes, bytes]",
    coordinators: "Sequence[Connection[bytes, bytes]]",
    task: PackJob,
) -> NoReturn:
    """The life of a packing process, begun with `HANDLED` blocked. A Ctrl-C is the coordinator's.

    `coordinators` are the other ends of this pipe and of those before, which the fork copied: as
    long as they are open here, the death of the coordinator ends no pipe.
    """
    for end in coordinators:
        end.close()
    gc.freeze()  # what was made before the fork stays, and its pages stay shared
    _live(pipe, task)


def run_worker_program(descriptor: int, open_objects: Callable[[str], ObjectStore]) -> NoReturn:
    """The life of a packing process that is a program, with the pipe at `descriptor`."""
    pipe: Connection[bytes, bytes] = Connection(descriptor)
    try:
        _, root, prefix, identity, url, chunk_bytes, compress = msgpack.unpackb(pipe.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)
    try:
        objects = open_objects(url)
    except DieselError as error:
        pipe.send_bytes(msgpack.packb(["error", type(error).__name__, error.message, error.advice]))
        os._exit(0)
    _live(pipe, PackJob(root, prefix, UUID(bytes=identity), objects, chunk_bytes, compress))


def _live(pipe: "Connection[bytes, bytes]", task: PackJob) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup has them ignored
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
    process = _PackProcess(pipe, task)
    try:
        process.run()
    except DieselError as error:
        process.send("error", type(error).__name__, error.message, error.advice)
    except Exception as error:
        process.send("error", "DieselError", f"packing failed: {error!r}", "")
    process.end()
