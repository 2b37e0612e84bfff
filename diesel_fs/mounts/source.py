"""Where a mount's content comes from: the one place where a mount is joined to a repository.

Owned here: which snapshot a request means, whether it may be used although it is not the current
one, and how much memory the reader gets.
"""

import logging
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol
from uuid import UUID

import numpy as np
import numpy.typing as npt

from ..cache.coalescing_reader import Batch, CoalescingReader
from ..cache.reader import EntryReader as RepositoryReader
from ..errors import ConflictError, DieselError, ForeignError, MetadataError, NoSuchDataset
from ..format.snapshot.diff import OldIndices, SnapshotDiff
from ..format.snapshot.reader import Snapshot
from ..peers.client import MASTER_END_WAIT_S, TaskStore, master_request
from ..remote.open import open_repository
from ..repository.catalog import DatasetInfo
from ..repository.interface import Repository
from ..repository.leases import ReadLease
from ..repository.private_copies import open_snapshot_file
from ..storage.objects.store import ObjectStore
from ..system.available_memory import default_memory_bytes
from .options import MountRequest
from .vfs import EntryReader

log = logging.getLogger("diesel.mount")

SERVER_DIVISOR = 8
"""Where contents are pushed, the server keeps one part in this many of that for chunks; the rest is
the kernel's pages."""

SERVER_BYTES_MAX = 256 << 20

TASK_SHARE = 3, 4
"""Of what is left, the master's part where a mount joins a task: what it holds is fetched by no
node again, and what the kernel has dropped comes back from there; the kernel's part has to hold
what is read next."""


class BatchSource(Protocol):
    """Where contents come from, checked."""

    def batches(self, entries: npt.NDArray[np.uint32], /) -> Iterator[Batch]:
        """All parts of these files; what is damaged is left out. Raises DieselError."""
        ...

    def prefetch(self, units: Sequence[npt.NDArray[np.uint32]], /) -> None:
        """What will probably be asked for next, the soonest first."""
        ...

    def stats(self) -> dict[str, int]:
        """What was read."""
        ...

    def close(self) -> None:
        """Stops reading ahead. Repeatable."""
        ...


@dataclass(frozen=True, slots=True)
class OpenedSnapshot:
    """What a mount shows, and what to warn its user of."""

    snapshot: Snapshot
    warning: str = ""


@dataclass(frozen=True, slots=True)
class MemorySplit:
    """How the memory of a mount is shared out, in bytes."""

    total_bytes: int
    joins_task: bool = False

    @classmethod
    def of(cls, request: MountRequest) -> "MemorySplit":
        """What was asked for; 0: a part of what is available."""
        return cls(request.memory_bytes or default_memory_bytes(), bool(request.task_options))

    def server_bytes(self, *, pushes: bool) -> int:
        """For chunks in the server: everything that is left where nothing is pushed."""
        return self._own_bytes if pushes else self.total_bytes - self.task_bytes

    @property
    def _own_bytes(self) -> int:
        return min(self.total_bytes // SERVER_DIVISOR, SERVER_BYTES_MAX)

    @property
    def task_bytes(self) -> int:
        """For chunks in the master of this node, where this mount starts it."""
        left = self.total_bytes - self._own_bytes
        return left * TASK_SHARE[0] // TASK_SHARE[1] if self.joins_task else 0

    @property
    def push_bytes(self) -> int:
        """For contents in the kernel's page cache."""
        return self.total_bytes - self.server_bytes(pushes=True) - self.task_bytes


class MountSource:
    """Opens what a request names; the server and the helper of a mount each do.

    What was opened for a task is kept, by version, until another version is shown: a process joins
    the task once for each version. One thread at a time opens.
    """

    def __init__(self) -> None:
        self._stores: dict[int, TaskStore] = {}
        self._shown_version = 0

    def open(self, request: MountRequest) -> OpenedSnapshot:
        """The dataset that was asked for. Raises DieselError."""
        with _opened(request) as repository:  # reading needs the object store alone
            if request.snapshot_file:
                snapshot = open_snapshot_file(Path(request.snapshot_file))
                return OpenedSnapshot(snapshot, _staleness_warning(repository, request, snapshot))
            if request.version:
                return OpenedSnapshot(repository.view_at(request.dataset, request.version))
            view = repository.view(request.dataset)
            warning = repository.staleness_warning(view)
            if warning and request.stale == "refuse":
                raise ConflictError(warning, advice="mount with --stale warn, or when it is back")
            return OpenedSnapshot(view, "" if request.stale == "allow" else warning)

    def newest(self, request: MountRequest, identity: UUID) -> int:
        """The current version of the dataset that is mounted. Raises NoSuchDataset where it has
        been deleted, ForeignError where another one has its name, DieselError where nobody can
        tell.
        """
        with _opened(request) as repository:
            info = repository.dataset(request.dataset)
            if info.identity != identity:
                raise ForeignError(f"{request.dataset!r} is another dataset now ({info.identity})")
            return repository.newest_known(info)

    def lease(self, request: MountRequest, snapshot: Snapshot) -> ReadLease | None:
        """That this process reads a version, where its chunks are objects. Raises DieselError."""
        with _opened(request) as repository:
            return ReadLease.take(repository.objects, snapshot.identity, snapshot.version)

    def reader(
        self, request: MountRequest, snapshot: Snapshot, memory_bytes: int, *, pushes: bool
    ) -> EntryReader:
        """A reader of the content through so much memory, for what is not pushed.

        Raises DieselError.
        """
        with _opened(request) as repository:
            objects = self._objects(request, repository, snapshot)
            return RepositoryReader(snapshot, objects, memory_bytes, prefer_entries=pushes)

    def batch_source(self, request: MountRequest, snapshot: Snapshot) -> BatchSource:
        """What the helper pushes. Raises DieselError."""
        with _opened(request) as repository:
            try:
                objects = self._objects(request, repository, snapshot)
            except DieselError as error:  # the mount goes on without a master, too
                log.warning("what is pushed does not come through the task: %s", error)
                objects = repository.objects
            return CoalescingReader(snapshot, objects)

    def switch_version(self, snapshot: Snapshot) -> None:
        """The mount has gone over to a version: so does the task. Blocks for a moment."""
        before = self._stores.get(self._shown_version)
        if before is not None and self._shown_version != snapshot.version:
            before.switch_version(snapshot)
        if (store := self._stores.get(snapshot.version)) is not None:
            store.retry()
            store.connect()  # a master ends with its last connection: first this, then the others
        self.keep_only(snapshot)

    def keep_only(self, snapshot: Snapshot) -> None:
        """Closes what was opened of the task for other versions than this one, which is shown from
        now on. What is still open of another version is read from the store.
        """
        self._shown_version = snapshot.version
        for version in [each for each in self._stores if each != snapshot.version]:
            self._stores.pop(version).close()

    def task_stats(self) -> dict[str, object]:
        """What the task's cache is and did; nothing without a task. May block for a moment."""
        store = self._stores.get(self._shown_version)
        return {} if store is None else store.stats()

    def _objects(
        self, request: MountRequest, repository: Repository, snapshot: Snapshot
    ) -> ObjectStore:
        """Where contents are read from: the repository, or the task's cache before that."""
        if not request.task_options or snapshot.version < self._shown_version:
            return repository.objects
        store = self._stores.get(snapshot.version)
        if store is None:
            memory_bytes = MemorySplit.of(request).task_bytes
            asked = replace(
                master_request(
                    request.task_options, repository, snapshot, memory_bytes=memory_bytes
                ),
                memory_is_default=not request.memory_bytes,
            )
            patience_s = (
                0.0 if self._stores else MASTER_END_WAIT_S
            )  # it will be told of the version, and stays
            store = TaskStore.join(repository.objects, asked, snapshot, wait_s=patience_s)
            self._stores[snapshot.version] = store
            self._shown_version = self._shown_version or snapshot.version
        return store


def node_map_file(found: SnapshotDiff, nodes: npt.NDArray[np.uint64]) -> int:
    """A descriptor of a file that holds a version's nodes and what its entries were before, for
    another process of the same mount. Raises OSError.
    """
    descriptor = os.memfd_create("diesel-numbers", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        for column in (nodes, found.same_path, found.unchanged):
            file.write(column.data)
    return descriptor


def read_node_map(
    descriptor: int, entry_count: int
) -> tuple[npt.NDArray[np.uint64], OldIndices, OldIndices]:
    """The columns in such a file, mapped."""
    mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    nodes = np.frombuffer(mapped, np.uint64, entry_count)
    places = np.frombuffer(mapped, np.int32, 2 * entry_count, nodes.nbytes)
    return nodes, places[:entry_count], places[entry_count:]


def map_snapshot(descriptor: int) -> Snapshot:
    """The snapshot in such a file, mapped."""
    mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    return Snapshot(memoryview(mapped), verify=False)


def _opened(request: MountRequest) -> Repository:
    return open_repository(request.url, request.credentials)


def _staleness_warning(repository: Repository, request: MountRequest, snapshot: Snapshot) -> str:
    """What a snapshot from a file is beside the current version, where that must be told.

    One that is older is stale, and one that is newer says that the metadata store has lost
    something, which is no reason not to read. Raises ForeignError for another dataset's;
    ConflictError for one that is stale and refused; MetadataError where nobody can tell, unless
    `offline`.
    """
    info = _known(repository, request)
    if snapshot.dataset != request.dataset or (info and info.identity != snapshot.identity):
        identity = f" ({info.identity})" if info else ""
        raise ForeignError(
            f"{request.snapshot_file} is a snapshot of {snapshot.dataset!r} "
            f"({snapshot.identity}), not of {request.dataset!r}{identity}"
        )
    if info is None or request.offline:
        return ""
    known = info.head.version if info.head else 0
    current = repository.newest_known(info)
    text = ""
    if current > snapshot.version:
        text = f"{request.snapshot_file} is of version {snapshot.version}, current is {current}"
        if request.stale == "refuse":
            raise ConflictError(text, advice="save it again, or mount with --stale warn")
    elif known < snapshot.version:
        text = f"the metadata store is behind {request.snapshot_file} (version {snapshot.version})"
    return "" if request.stale == "allow" else text


def _known(repository: Repository, request: MountRequest) -> DatasetInfo | None:
    """What is known of the dataset; None only where `offline` and the store cannot tell."""
    try:
        if repository.meta_problem is not None and not request.offline:
            raise repository.meta_problem
        return repository.dataset(request.dataset)
    except NoSuchDataset:
        raise
    except DieselError as error:
        if request.offline:
            return None
        raise MetadataError(
            f"nobody can tell whether {request.snapshot_file} is current: {error.message}",
            advice="--offline mounts it without asking",
        ) from error
