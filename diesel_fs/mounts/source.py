"""Opens snapshots and contents for a mount. No other module of `mounts` opens repositories.

In a task, contents come from the task's cache (`peers/`). A mount pushes if it has a prefetch
worker (`daemon/prefetch_worker.py`). "The server" is the mount's own server process
(`daemon/server.py`), never a DIESEL-FS server. Server and worker have a `MountSource` each.
"""

import logging
import mmap
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import UUID

import numpy as np
import numpy.typing as npt

from ..cache.disk.folder import CacheFolder
from ..cache.disk.jobs import CacheJobs
from ..cache.disk.logs import OrderLogFiles, has_order_logs
from ..cache.disk.marker import is_cache_folder, prepare_cache_folder
from ..cache.disk.speed import DiskSpeed, disk_speed
from ..cache.fetching.coalesce import ReadLimits
from ..cache.order_logs.addresses import LogAddresses, LogEntryReader
from ..cache.order_logs.layout import SEGMENT_BYTES
from ..cache.order_logs.logs import STAGED_BYTES, OrderLogs
from ..cache.readers.coalescing_reader import BatchSource, CoalescingReader
from ..cache.readers.entry_reader import EntryReader
from ..cache.waiting import MarkedStore, WaitCause
from ..errors import (
    ConflictError,
    DieselError,
    ForeignError,
    MetadataError,
    NoSpaceError,
    NoSuchDataset,
)
from ..format.snapshot.diff import OldIndices, SnapshotDiff
from ..format.snapshot.reader import Snapshot
from ..peers.plan.sender import PlanSender
from ..peers.reader.chunk_files import ChunkFiles
from ..peers.reader.store import MASTER_END_WAIT_S, TaskStore, master_request
from ..remote.open import open_repository
from ..repository.catalog import DatasetInfo
from ..repository.interface import Repository
from ..repository.leases import ReadLease
from ..repository.private_copies import open_snapshot_file
from ..storage.objects.store import ObjectStore
from ..system.available_memory import default_memory_bytes
from .options import MountRequest
from .tree.vfs import ContentReader

log = logging.getLogger("diesel.mount")

SERVER_DIVISOR = 8
SERVER_BYTES_MAX = 256 << 20
"""The server gets an eighth of the memory for chunks, but no more than this: it reads only files
that have not been pushed."""

LOGS_DIVISOR = 8
STAGED_BYTES_MIN, SEGMENT_BYTES_MIN = 1 << 20, 4 << 20
"""Order logs (`cache/ORDER_LOG.md`) get an eighth of a mount's memory for pages: half of that for
bytes that wait to be written, in two pieces, and half for segments that are being read. If that is
little, they take more, since an SSD is slow in smaller pieces."""

MASTER_SHARE = 3, 4
"""The task's master on this machine gets three quarters of the memory left by the server. No
machine fetches a chunk again that a master has, and pages that the kernel has dropped come back
from the master. So the page cache needs room only for the files that are read next."""


@dataclass(frozen=True, slots=True)
class OpenedSnapshot:
    """A snapshot that may be mounted, and a warning for the user if it may not be current."""

    snapshot: Snapshot
    warning: str = ""


@dataclass(frozen=True, slots=True)
class MemorySplit:
    """Divides the memory of a mount between server, master and page cache."""

    total_bytes: int
    joins_task: bool = False

    @classmethod
    def of(cls, request: MountRequest) -> "MemorySplit":
        return cls(request.memory_bytes or default_memory_bytes(), bool(request.task_options))

    @staticmethod
    def total_for(push_bytes: int) -> int:
        """The memory of a mount without a task that leaves `push_bytes` for the page cache."""
        return min(
            -(-push_bytes * SERVER_DIVISOR // (SERVER_DIVISOR - 1)), push_bytes + SERVER_BYTES_MAX
        )

    @property
    def server_bytes(self) -> int:
        """For chunks in the server's memory."""
        return min(self.total_bytes // SERVER_DIVISOR, SERVER_BYTES_MAX)

    @property
    def task_bytes(self) -> int:
        """For chunks in the task's master on this machine, if this mount starts the master; 0
        without a task."""
        left = self.total_bytes - self.server_bytes
        return left * MASTER_SHARE[0] // MASTER_SHARE[1] if self.joins_task else 0

    @property
    def push_bytes(self) -> int:
        """For contents that are pushed into the kernel's page cache."""
        return self.total_bytes - self.server_bytes - self.task_bytes


class MountSource:
    """Not thread-safe. A process joins the task's cache once for each version that the mount shows,
    and leaves it when the mount switches to another version."""

    def __init__(self) -> None:
        self._stores: dict[int, TaskStore] = {}  # by version
        self._current_version = 0  # 0 before the task's cache is joined
        self._is_registered = False  # as a job in a cache folder

    def open(self, request: MountRequest) -> OpenedSnapshot:
        """Raises DieselError; ConflictError if the snapshot is stale and the request refuses stale
        ones."""
        with _open_repository(request) as repository:
            if request.snapshot_file:
                snapshot = open_snapshot_file(Path(request.snapshot_file))
                return OpenedSnapshot(snapshot, _staleness_warning(repository, request, snapshot))
            if request.version:
                return OpenedSnapshot(repository.view_at(request.dataset, request.version))
            view = repository.view(request.dataset)
            warning = repository.staleness_warning(view)
            if warning and request.stale == "refuse":
                raise ConflictError(
                    warning,
                    advice="mount with `dlcmd mount --stale warn`, or when the metadata is back",
                )
            return OpenedSnapshot(view, "" if request.stale == "allow" else warning)

    def newest(self, request: MountRequest, identity: UUID) -> int:
        """The newest version of the mounted dataset. Raises NoSuchDataset if it was deleted,
        ForeignError if its name belongs to another dataset now, and DieselError if the version
        cannot be determined."""
        with _open_repository(request) as repository:
            info = repository.dataset(request.dataset)
            if info.identity != identity:
                raise ForeignError(
                    f"{request.dataset!r} was deleted and is another dataset now ({info.identity})"
                )
            return repository.newest_known(info)

    def lease(self, request: MountRequest, snapshot: Snapshot) -> ReadLease | None:
        """Takes a lease, so that a purge keeps a version's chunks; None if the store needs none.
        Raises DieselError."""
        with _open_repository(request) as repository:
            return ReadLease.take(repository.objects, snapshot.identity, snapshot.version)

    def reader(self, request: MountRequest, snapshot: Snapshot, memory_bytes: int) -> ContentReader:
        """A reader of contents for the server, which keeps up to `memory_bytes` of chunks. The
        server reads only files that were not pushed, so it reads them one by one rather than by
        whole chunks. Raises DieselError."""
        with _open_repository(request) as repository:
            store = MarkedStore(repository.objects, WaitCause.STORE)
            objects = self._objects(request, repository, store, snapshot, ChunkFiles())
            if objects is not store:
                objects = MarkedStore(objects, WaitCause.PEER)
            reader = EntryReader(snapshot, objects, memory_bytes, prefer_entries=True)
            if not request.log_folder:
                return reader
            if request.task_options.cache_layout == "order":
                try:
                    prepare_cache_folder(Path(request.log_folder), repository.objects)
                except NoSpaceError as error:  # then files are read from the store
                    log.warning("this mount keeps no order log: %s", error.message)
            return LogEntryReader(snapshot, reader, _log_place(request, repository, snapshot))

    def has_order_logs(self, request: MountRequest, snapshot: Snapshot) -> bool:
        """Whether an earlier mount has left order logs of the dataset. Raises DieselError."""
        with _open_repository(request) as repository:
            return has_order_logs(_log_place(request, repository, snapshot))

    @staticmethod
    def disk_speed(request: MountRequest) -> DiskSpeed | None:
        """How fast the disk of the cache folder is; None if that cannot be measured. May take a
        second. Any thread."""
        place = Path(request.log_folder)
        return disk_speed(os.fspath(place)) if is_cache_folder(place) else None

    def order_logs(
        self,
        request: MountRequest,
        snapshot: Snapshot,
        push_bytes: int,
        addresses: LogAddresses,
    ) -> OrderLogs | None:
        """The order logs of a mount with `push_bytes` for pages; None if the mount keeps none, or
        if their folder or the repository cannot be used. `addresses` tells the server where entries
        lie."""
        if not request.log_folder:
            return None
        piece_bytes = push_bytes // LOGS_DIVISOR // 4
        try:
            with _open_repository(request) as repository:
                folder = CacheFolder(
                    prepare_cache_folder(Path(request.log_folder), repository.objects),
                    repository.objects.store_id,
                    request.task_options.cache_bytes or None,
                    rule=request.task_options.eviction_rule,
                )
                if request.task_options.cache_layout == "order" and not self._is_registered:
                    # With other layouts the task's master registers the job. This process holds the
                    # pin of the dataset until it ends, for all versions
                    CacheJobs(folder).register(snapshot.identity, time.time())
                    self._is_registered = True
                return OrderLogs(
                    snapshot,
                    OrderLogFiles(folder, snapshot.identity),
                    staged_bytes=min(max(piece_bytes, STAGED_BYTES_MIN), STAGED_BYTES),
                    segment_bytes=min(max(piece_bytes, SEGMENT_BYTES_MIN), SEGMENT_BYTES),
                    addresses=addresses,
                )
        except (DieselError, OSError) as error:
            if request.task_options.cache_layout == "order":
                log.warning("this mount keeps no order log in %s: %s", request.log_folder, error)
            return None

    def batch_source(self, request: MountRequest, snapshot: Snapshot) -> BatchSource:
        """A reader for the prefetch worker. Raises DieselError."""
        with _open_repository(request) as repository:
            try:
                objects = self._objects(request, repository, repository.objects, snapshot)
            except DieselError as error:  # a mount works without the task's cache
                log.warning("pushed contents come from the store, not from the task: %s", error)
                objects = repository.objects
            limits = ReadLimits.within(MemorySplit.of(request).push_bytes)
            return CoalescingReader(snapshot, objects, limits=limits)

    def plan_sender(self, snapshot: Snapshot) -> PlanSender | None:
        """Sends plans for a version to the task's cache; None if this process has not joined the
        cache."""
        store = self._stores.get(snapshot.version)
        return None if store is None else PlanSender(snapshot, store.send_plan)

    def switch_version(self, snapshot: Snapshot) -> None:
        """Tells the task's cache that the mount has switched to this version, and leaves the cache
        for all others. Blocks for a moment."""
        before = self._stores.get(self._current_version)
        if before is not None and self._current_version != snapshot.version:
            before.switch_version(snapshot)
        if (store := self._stores.get(snapshot.version)) is not None:
            store.retry()
            store.connect()  # before the old store closes: a master ends with its last connection
        self.keep_only(snapshot)

    def keep_only(self, snapshot: Snapshot) -> None:
        """Makes this the current version, and leaves the task's cache for all others: their open
        files are read from the store."""
        self._current_version = snapshot.version
        for version in [each for each in self._stores if each != snapshot.version]:
            self._stores.pop(version).close()

    def task_stats(self) -> dict[str, object]:
        """The statistics of the task's cache; empty without a task. May block for a moment."""
        store = self._stores.get(self._current_version)
        return {} if store is None else store.stats()

    def cache_reads(self) -> dict[str, int]:
        """Parts of chunks from the task's cache (`cache_hits`) and from the store (`cache_misses`).
        Empty without a task."""
        store = self._stores.get(self._current_version)
        if store is None:
            return {}
        hits, misses = store.read_counts
        return {"cache_hits": hits, "cache_misses": misses}

    def _objects(
        self,
        request: MountRequest,
        repository: Repository,
        objects: ObjectStore,
        snapshot: Snapshot,
        files: ChunkFiles | None = None,
    ) -> ObjectStore:
        """The task's cache if there is a task, and the version is not older than the current one;
        otherwise `objects`, the repository's store. Joins the cache if need be."""
        if not request.task_options or snapshot.version < self._current_version:
            return objects
        store = self._stores.get(snapshot.version)
        if store is None:
            memory_bytes = MemorySplit.of(request).task_bytes
            wanted = master_request(
                request.task_options, repository, snapshot, memory_bytes=memory_bytes
            )
            # A master that runs with another size is an error only if the user has named the size
            wanted = replace(wanted, memory_is_default=not request.memory_bytes)
            # The first join waits while the master of an earlier mount ends. Later joins find the
            # running master, which learns of the new version
            wait_s = 0.0 if self._stores else MASTER_END_WAIT_S
            store = TaskStore.join(objects, wanted, snapshot, wait_s=wait_s, files=files)
            self._stores[snapshot.version] = store
            self._current_version = self._current_version or snapshot.version
        return store


def node_map_file(diff: SnapshotDiff, nodes: npt.NDArray[np.uint64] | None) -> int:
    """Makes a file in memory that describes a switch to another version to the prefetch worker:
    columns by entry of the new version. These are its inode number (FUSE's node; none in a native
    mount), and its indices in the old version by `diff.same_path` and `diff.unchanged`. Returns a
    descriptor. Raises OSError."""
    descriptor = os.memfd_create("diesel-nodes", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        if nodes is not None:
            file.write(nodes.data)
        file.write(diff.same_path.data)
        file.write(diff.unchanged.data)
    return descriptor


def read_node_map(
    descriptor: int, entry_count: int
) -> tuple[npt.NDArray[np.uint64] | None, OldIndices, OldIndices]:
    """The columns of `node_map_file`."""
    mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    start = len(mapped) - 8 * entry_count
    nodes = np.frombuffer(mapped, np.uint64, entry_count) if start else None
    old = np.frombuffer(mapped, np.int32, 2 * entry_count, start)
    return nodes, old[:entry_count], old[entry_count:]


def map_snapshot(descriptor: int) -> Snapshot:
    """Maps a snapshot. It is not verified: another process of the mount has done so."""
    mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    return Snapshot(memoryview(mapped), verify=False)


def _log_place(request: MountRequest, repository: Repository, snapshot: Snapshot) -> str:
    """The folder of a dataset in the cache folder, which need not exist."""
    store = repository.objects.store_id
    return f"{request.log_folder}/{store.hex}/{snapshot.identity.hex}"


def _open_repository(request: MountRequest) -> Repository:
    return open_repository(request.url, request.credentials)


def _staleness_warning(repository: Repository, request: MountRequest, snapshot: Snapshot) -> str:
    """The warning for a snapshot file that is not of the current version; "" if it is. If the file
    is newer, the metadata store has lost something, which does not prevent reading. Raises
    ForeignError for a snapshot of another dataset, ConflictError for an older one with `--stale
    refuse`, and MetadataError if the current version is unknown, unless `offline`."""
    info = _dataset_info(repository, request)
    if snapshot.dataset != request.dataset or (info and info.identity != snapshot.identity):
        identity = f" ({info.identity})" if info else ""
        raise ForeignError(
            f"{request.snapshot_file} is a snapshot of {snapshot.dataset!r} "
            f"({snapshot.identity}), not of {request.dataset!r}{identity}"
        )
    if info is None or request.offline:
        return ""
    head_version = info.head.version if info.head else 0
    current = repository.newest_known(info)
    warning = ""
    if current > snapshot.version:
        warning = f"{request.snapshot_file} is of version {snapshot.version}, current is {current}"
        if request.stale == "refuse":
            raise ConflictError(
                warning, advice="save it again, or mount with `dlcmd mount --stale warn`"
            )
    elif head_version < snapshot.version:
        warning = (
            f"the metadata store is behind {request.snapshot_file} (version {snapshot.version})"
        )
    return "" if request.stale == "allow" else warning


def _dataset_info(repository: Repository, request: MountRequest) -> DatasetInfo | None:
    """The metadata store's record of the dataset. None only with `offline`, if the metadata store
    does not answer. Raises DieselError."""
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
            f"cannot find out whether {request.snapshot_file} is current: {error.message}",
            advice="mount it with `dlcmd mount --offline`, which does not check",
        ) from error
