"""libDIESEL: one dataset, from Python, without a mount (DIESEL, Table 3).

A `Dataset` shows one version of its dataset: the one at which it was opened, and after its own
`flush`, `delete` or `refresh` the current one.

Each call that names an entry which is there takes its path or its index (`addressing.py`). Objects
may be used from several threads for reading; writing belongs to one. A forked child may go on
reading, and so may a process that is sent a pickle: it opens the same version anew. What is not
flushed stays with who has put it.
"""

import io
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple, Self, Unpack

import numpy as np
import numpy.typing as npt

from ..cache.reader import EntryReader
from ..credentials import Credentials
from ..errors import ConflictError, ForeignError, NoSuchPath, UsageError
from ..format.chunk import CHUNK_BYTES_DEFAULT
from ..format.entries import Kind, Stat, check_path, split
from ..format.snapshot.reader import Snapshot, Stats
from ..ingest.concurrent_writers import finish_put
from ..ingest.options import COMPRESSIONS, PutReport
from ..ingest.packer import FileSkipped, Packer, start_packer
from ..ingest.paths import is_reserved
from ..names import parse_versioned_name
from ..orders.shuffle import GROUP_SIZE_DEFAULT, chunk_order
from ..peers.client import TaskStore, master_request
from ..peers.options import TaskKwargs, TaskOptions, non_negative_int
from ..remote.open import open_repository
from ..repository.interface import PurgeOptions, PurgeReport, Repository
from ..repository.private_copies import open_snapshot_file, save_snapshot
from ..repository.writing import WriteSession
from ..settings import load_settings
from ..storage.objects.store import ObjectStore
from ..system.atomic_file import close_folder
from .addressing import (
    EntryKey,
    EntryKeys,
    PathText,
    encoded,
    index_of,
    indices_of,
    is_path,
    names_of,
)
from .reopening import DatasetReference

log = logging.getLogger("diesel.client")

MEMORY_BYTES_DEFAULT = 256 << 20
"""Chunks kept per process: a DataLoader has many, each with its own."""

_SPOOL_BYTES = 64 << 20  # a stream longer than this waits on disk until its length is known


class _Order(NamedTuple):
    """What `shuffle` was asked for."""

    seed: int
    epoch: int
    group_size: int
    rank: int
    world: int
    drop_last: bool
    below: EntryKey


def connect(
    dataset: str,
    url: str | None = None,
    user: str | None = None,
    key: str | None = None,
    *,
    create: bool = False,
    memory_bytes: int | None = None,
    compress: str = "auto",
    task_memory_bytes: int | None = None,
    **task: Unpack[TaskKwargs],
) -> "Dataset":
    """Open a dataset (DL_connect). `url`, `user`: as for `dlcmd`, from the environment if None.

    `"pets"` is opened at its current version, `"pets@1790000000000000"` at that one, which is kept:
    it can be read, and nothing can be written until `refresh` has gone over to the current version.

    `memory_bytes` is a limit for chunks in memory; if None, MEMORY_BYTES_DEFAULT, or as much as two
    groups of a `shuffle` need.

    With `task=NAME`, contents are read through the cache that the nodes of that training task
    share: this node is number `rank` of `world`, by default as SLURM or torchrun say, else the only
    one. `task_key` is the task's secret (or in DIESEL_TASK_KEY); `task_memory_bytes`, and
    `cache_dir` with `cache_bytes`, are this node's part; `peers`, `listen`, `advertise`, `policy`,
    `evict` and `peer_tls` mean what they do for `dlcmd mount`; None is as if it were not said. The
    first process of a node that joins settles all this for its node; who wants something else is
    warned.

    A bucket (`url="s3://..."`) is spoken to by a helper process, so that this one may fork.

    With `create`, the repository and the dataset are made where they are missing. Raises
    NoSuchDataset, NotFoundError where a version is not kept, ObjectStoreError, MetadataError,
    UsageError.
    """
    name, version = parse_versioned_name(dataset)
    if create and version:
        raise UsageError(f"{dataset} is a version of what is there", advice="leave `create` out")
    if compress not in COMPRESSIONS:
        raise UsageError(f"bad compression {compress!r}: one of {COMPRESSIONS}")
    settings = load_settings({"url": url, "user": user, "key": key})
    credentials = settings.credentials
    if key is not None and credentials is None:
        raise UsageError("only a server has accounts", advice="leave `key` out, or name a user")
    if memory_bytes is not None:
        memory_bytes = non_negative_int("memory_bytes", memory_bytes)
    task_memory_bytes = non_negative_int("task_memory_bytes", task_memory_bytes or 0)
    joins = TaskOptions.from_kwargs(
        task,
        f"{settings.repository_url}\0{dataset}",
        task_only={"policy": task.get("policy"), "task_memory_bytes": task_memory_bytes},
    )
    repository = open_repository(settings.repository_url, credentials, create=create)
    try:
        if create:
            repository.begin(name)
        is_kept = version != 0
        view = repository.view_at(name, version) if is_kept else repository.view(name)
        return Dataset(
            repository, view, memory_bytes, compress, joins, task_memory_bytes, is_kept=is_kept
        )
    except BaseException:
        repository.close()
        raise


class Dataset:
    """A dataset, open for reading and writing (see the module). Made by `connect`."""

    def __init__(
        self,
        repository: Repository,
        view: Snapshot,
        memory_bytes: int | None,
        compress: str,
        task_options: TaskOptions,
        task_memory_bytes: int,
        *,
        is_version_fixed: bool = False,
        is_kept: bool = False,
    ) -> None:
        self.name = view.dataset
        self._repository = repository
        self._task_options = task_options
        self._task_memory_bytes = task_memory_bytes
        self._task: TaskStore | None = None
        self._task_version = 0
        self._memory_grows = memory_bytes is None
        self._memory_bytes = MEMORY_BYTES_DEFAULT if memory_bytes is None else memory_bytes
        self._compress = compress
        self._order: _Order | None = None  # that reads come in
        self._version_fixed = (
            is_version_fixed or is_kept
        )  # a version that was asked for: no other is looked for
        self._kept = is_kept  # and nothing is written beside it
        self._closed = False
        self._switch_version(view)
        self._forget_writes()

    def __reduce__(self) -> tuple[object, ...]:
        """For a pickle: what shows the same in another process, and the order that reads come in.

        It holds no secret. Raises UsageError where one is needed that is not in the environment.
        """
        self._check_open()
        opened = DatasetReference.of(self._repository, self._view, self._task_options)
        memory_bytes = None if self._memory_grows else self._memory_bytes
        how = (memory_bytes, self._compress, self._task_memory_bytes)
        return _reopened, (opened, how, (self._version_fixed, self._kept), self._order)

    def __repr__(self) -> str:
        """Which dataset, version and repository this is, without what is secret."""
        state = ", closed" if self._closed else ""
        where = self._repository.url
        return f"<Dataset {self.name}@{self.version} of {where}, files: {len(self)}{state}>"

    # Reading

    @property
    def snapshot(self) -> Snapshot:
        """All metadata of the version that this object shows."""
        return self._view

    @property
    def url(self) -> str:
        """The repository's address, with all that it holds: not to be shown."""
        return self._repository.url.full_url

    @property
    def credentials(self) -> Credentials | None:
        """Who this object is to a server; None where there is none."""
        return self._repository.credentials

    @property
    def task_options(self) -> TaskOptions:
        """The task that this object reads through. Not to be shown."""
        return self._task_options

    @property
    def version(self) -> int:
        """The version that this object shows."""
        return self._view.version

    @property
    def is_kept(self) -> bool:
        """Whether this object was opened at a version that was named, and still shows that."""
        return self._kept

    def __len__(self) -> int:
        """How many files there are."""
        return self._view.file_count

    def get(self, path: EntryKey) -> bytes:
        """The content of a file (DL_get). Raises NoSuchPath, CorruptError."""
        index = self._entry(path)
        if self._view.stat(index).kind != Kind.FILE:
            raise UsageError(f"{path!r} is not a file")
        return bytes(self._reader.read(index))

    def read_many(self, paths: EntryKeys) -> Iterator[memoryview]:
        """The contents of many files, in this order; chunks are fetched ahead in the background.

        A view stays valid as long as it is held. Raises NoSuchPath before anything is read, and as
        `get` while it goes on.
        """
        indices = self._entries(paths)  # may move on to a newer version
        return self._reader.read_many(indices)

    def shuffle(
        self,
        *,
        seed: int,
        epoch: int,
        group_size: int = GROUP_SIZE_DEFAULT,
        rank: int = 0,
        world: int = 1,
        drop_last: bool = False,
        below: EntryKey = "",
    ) -> npt.NDArray[np.int64]:
        """A chunk-wise order of a rank's files, as indices for `read_many`, `get` and `stat_many`.

        (DL_shuffle; what the numbers mean: `diesel_fs.orders.shuffle`.) With `below`, of the files
        in that folder. From now on `get` (by index or path) and `read_many` in this order load each
        chunk once, and keep two groups of `group_size` chunks in memory at most, except that a
        dataset that fits the memory stays in it whole. A later order takes this one's place; so
        does another version, to which the indices do not apply. Raises NoSuchPath, and UsageError
        for numbers without meaning, and where the chunks of one group do not fit `memory_bytes`.
        """
        top = self._entry(below)
        if self._view.stat(top).kind != Kind.FOLDER:
            raise UsageError(f"{below!r} is not a folder")
        order = chunk_order(
            self._view, seed, epoch, group_size=group_size, rank=rank, world=world,
            drop_last=drop_last, below=top,
        )  # fmt: skip
        self._reader.prefetch_order(order.indices, order.ends, grow=self._memory_grows)
        self._order = _Order(seed, epoch, group_size, rank, world, drop_last, below)
        return order.indices

    def stat(self, path: EntryKey) -> Stat:
        """Kind, mode, size and mtime of an entry (DL_stat). Raises NoSuchPath."""
        index = self._entry(path)  # as above
        return self._view.stat(index)

    def stat_many(self, paths: EntryKeys) -> Stats:
        """`stat` of many entries, as columns. Raises NoSuchPath."""
        indices = self._entries(paths)
        return self._view.stat_many(indices)

    def ls(self, path: EntryKey = "") -> list[str]:
        """The names in a folder, sorted (DL_ls); of another entry, its own. Raises NoSuchPath."""
        index = self._entry(path)
        if self._view.stat(index).kind != Kind.FOLDER:
            return [os.fsdecode(self._view.name(index))]
        return [os.fsdecode(name) for name in self._view.names(self._view.children(index))]

    def task_stats(self) -> dict[str, object]:
        """What the task's cache is and did, and what this object has read from where; nothing
        without a task."""
        return {} if self._task is None else self._task.stats()

    def refresh(self) -> int:
        """Show the current version from now on; the version comes back."""
        self._check_open()
        self._version_fixed = self._kept = False
        self._switch_version(self._repository.view(self.name))
        return self._view.version

    # Writing

    def put(
        self,
        source: str | os.PathLike[str] | bytes | BinaryIO,
        path: PathText,
        *,
        mode: int = 0o644,
        mtime_ns: int | None = None,
    ) -> None:
        """Put a file: from a path, bytes, or a file object (DL_put). Durable after `flush`.

        It is named by its path alone: there need not be an entry yet.
        Mode and mtime are those of a source path; else `mode`, and `mtime_ns` or now. Raises
        ConflictError where the path is a folder or lies below a file. Once a chunk could not be
        stored, earlier puts are lost: this and `flush` raise its error until the dataset is opened
        again.
        """
        packer = self._writer()
        target = self._target(path)
        now = time.time_ns() if mtime_ns is None else mtime_ns
        self._add_parents(packer, target, now)
        try:
            if isinstance(source, str | os.PathLike):
                self._put_file(packer, Path(os.path.realpath(source)), target)
            elif isinstance(source, bytes | bytearray | memoryview):
                size = len(source)
                packer.add_stream(io.BytesIO(source), size, split(target), mode, now)
            else:
                with tempfile.SpooledTemporaryFile(_SPOOL_BYTES) as spool:
                    shutil.copyfileobj(source, spool)
                    size = spool.tell()
                    spool.seek(0)
                    packer.add_stream(spool, size, split(target), mode, now)  # type: ignore[arg-type]  # IO[bytes]
        except FileSkipped as reason:
            raise ConflictError(f"{source!r}: {reason}") from None
        self._pending.add(target)

    def flush(self) -> int:
        """Make all that was put or deleted durable (DL_flush), and show it; the version.

        Raises ConflictError, after all that, where another writer has made a folder of a file that
        was put, or the other way round: the folder shows.
        """
        self._check_open()
        if self._session is None or self._owner != os.getpid():
            return self._view.version
        assert self._packer is not None
        self._packer.finish()
        report = PutReport()
        if finish_put(self._repository, self._session, report):
            self._packer.close()
            self._forget_session()
        if not self._version_fixed:  # else the view goes on without them
            self._made.clear()
            self._pending.clear()
            self.refresh()
        for path, reason in report.failed:
            raise ConflictError(f"{os.fsdecode(path)!r}: {reason}")
        return self._view.version

    def delete(self, path: EntryKey, *, recursive: bool = False) -> None:
        """Delete a file, link or empty folder (DL_delete), or a whole folder. Durable on return.

        Raises NoSuchPath, ConflictError for a folder with entries.
        """
        self._check_writable()
        entry = path if is_path(path) else self._view.path(self._entry(path))
        self.flush()  # indices may be others afterwards
        index = self._entry(entry)
        below = self._view.walk(index).tolist()
        if len(below) > 1 and not recursive:
            raise ConflictError(f"{path!r} is a folder with entries", advice="recursive=True")
        self._writer()
        assert self._session is not None
        paths = [self._view.path(i) for i in reversed(below)]
        self._session.delete(paths)
        self._made.difference_update(paths)
        self._pending.difference_update(paths)
        self.flush()

    # Metadata

    def save_meta(self, file: str | os.PathLike[str]) -> None:
        """Write the snapshot of the version that this object shows (DL_save_meta)."""
        self._check_open()
        save_snapshot(self._view, Path(file))

    def load_meta(self, file: str | os.PathLike[str]) -> bool:
        """Go by a saved snapshot from now on (DL_load_meta); whether it is the current version.

        Raises FormatError, and ForeignError for a snapshot of another dataset.
        """
        self._check_open()
        loaded = open_snapshot_file(Path(file))
        if loaded.identity != self._view.identity:
            raise ForeignError(
                f"{file} is a snapshot of {loaded.dataset!r} ({loaded.identity}),"
                f" not of {self.name!r} ({self._view.identity})"
            )
        self._version_fixed = True
        self._switch_version(loaded)
        newest = self._repository.newest_known(self._repository.dataset(self.name))
        return loaded.version >= newest

    def purge(
        self, *, max_unused: float = 0.05, keep: int = -1, grace_s: int = -1, dry_run: bool = False
    ) -> PurgeReport:
        """Give back the space of what has been replaced or deleted (DL_purge).

        Chunks of which more than `max_unused` is unused are rewritten; old ones go when nobody can
        be reading them. `keep` (versions) and `grace_s`: -1 for as before (`PurgeOptions`).
        Flushes, and shows the current version. Raises BusyError, NoSpaceError.
        """
        if not 0 <= max_unused <= 1:
            raise UsageError(f"a share of {max_unused}: it is between 0 and 1")
        self._check_writable()
        self.flush()
        options = PurgeOptions(round(max_unused * 1_000_000), keep, grace_s, dry_run)
        report = self._repository.purge(self.name, options)
        if not (dry_run or self._version_fixed):
            self.refresh()
        return report

    def delete_dataset(self) -> None:
        """Delete the dataset for ever (DL_delete_dataset), and close."""
        self._check_writable()
        self._forget_writes()
        self._repository.delete_dataset(self.name)
        self.close()

    def close(self) -> None:
        """Flush and let go (DL_close). A forked child's close writes nothing of its parent's."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self._closed = True
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:  # half of what was meant is worse than nothing of it
            self._closed = True
            self._end()
        self.close()

    # Parts

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"{self.name!r} is closed", advice="connect to it again")

    def _check_writable(self) -> None:
        self._check_open()
        if self._kept:
            raise UsageError(
                f"{self.name}@{self.version} is a version that is kept: nothing is written to it",
                advice=f"connect to {self.name!r}, or go over to its current version by refresh()",
            )

    def _end(self) -> None:
        if self._packer is not None and self._owner == os.getpid():
            self._packer.close()
        self._forget_writes()
        self._reader.close()
        if self._task is not None:
            self._task.close()
        self._repository.close()

    def _switch_version(self, view: Snapshot) -> None:
        if not self._version_fixed and (warning := self._repository.staleness_warning(view)):
            log.warning("%s", warning)
        self._view = view
        self._order = None
        self._reader = EntryReader(view, self._objects_of(view), self._memory_bytes)

    def _objects_of(self, view: Snapshot) -> ObjectStore:
        """Where contents are read from: the repository, or the task's cache before that."""
        if not self._task_options:
            return self._repository.objects
        before = self._task
        if before is None:
            request = master_request(
                self._task_options, self._repository, view, memory_bytes=self._task_memory_bytes
            )
            self._task = TaskStore.join(self._repository.objects, request, view)
        elif view.version != self._task_version:
            self._task = before.at_version(view)
            before.close()
        self._task_version = view.version
        assert self._task is not None
        return self._task

    def _forget_session(self) -> None:
        self._session: WriteSession | None = None
        self._packer: Packer | None = None

    def _forget_writes(self) -> None:
        self._forget_session()
        self._owner = os.getpid()
        self._made: set[bytes] = set()  # folders and files that the view does not show yet
        self._pending: set[bytes] = set()

    def _writer(self) -> Packer:
        """The packer of this process; a forked child never touches its parent's."""
        self._check_writable()
        if self._owner != os.getpid():
            self._forget_writes()
        if self._packer is None:
            session = self._session = self._repository.begin(self.name, create=False)
            session.use_view(self._view)
            _ = session.view  # as it is now, before anybody else goes on

            self._packer = start_packer(session, CHUNK_BYTES_DEFAULT, self._compress)
        return self._packer

    def _put_file(self, packer: Packer, source: Path, target: bytes) -> None:
        folder = os.open(source.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            packer.add_file(folder, os.fsencode(source.name), split(target))
        finally:
            close_folder(folder)

    def _target(self, path: PathText) -> bytes:
        target = check_path(encoded(path))
        if not target or is_reserved(target):
            raise UsageError(f"{path!r} cannot be a file of a dataset")
        if target in self._made or self._kind_there(target) == Kind.FOLDER:
            raise ConflictError(f"{path!r} is a folder", advice="delete it first")
        return target

    def _kind_there(self, path: bytes) -> Kind | None:
        """What stands at a path, by the newest version that this writer knows: others may have
        put it since the one that this object shows."""
        assert self._session is not None
        view = max(self._view, self._session.view, key=lambda view: view.version)
        index = view.lookup(path)
        return view.stat(index).kind if index >= 0 else None

    def _add_parents(self, packer: Packer, target: bytes, mtime_ns: int) -> None:
        """Make the folders above a path entries of their own, where there are none."""
        folder = split(target)[0]
        missing = []
        while folder and folder not in self._made:
            there = self._kind_there(folder)
            if folder in self._pending or there not in (None, Kind.FOLDER):
                raise ConflictError(f"{os.fsdecode(folder)!r} is a file", advice="delete it first")
            if there == Kind.FOLDER:
                break
            missing.append(folder)
            folder = split(folder)[0]
        for path in reversed(missing):
            packer.add_folder(split(path), 0o755, mtime_ns)
            self._made.add(path)

    def _entry(self, where: EntryKey) -> int:
        """The index of an entry. Raises NoSuchPath."""
        self._check_open()
        try:
            return index_of(self._view, where)
        except NoSuchPath:
            if not (is_path(where) and self._catch_up()):
                raise
            return index_of(self._view, where)

    def _entries(self, many: EntryKeys) -> npt.NDArray[np.int64]:
        """The indices of entries. Raises NoSuchPath."""
        self._check_open()
        names = names_of(many)
        try:
            return indices_of(self._view, names)
        except NoSuchPath:
            if not (isinstance(names, list) and self._catch_up()):
                raise
            return indices_of(self._view, names)

    def _catch_up(self) -> bool:
        """Goes over to a newer version, where there is one: a path is missing in this one."""
        if self._version_fixed:
            return False
        marker = self._repository.dataset(self.name).head
        if marker is None or marker.version <= self._view.version:
            return False
        self.refresh()
        return True


def _reopened(
    opened: DatasetReference,
    how: tuple[int | None, str, int],
    held: tuple[bool, bool],
    order: _Order | None,
) -> Dataset:
    """A dataset out of a pickle."""
    memory_bytes, compress, task_memory_bytes = how
    is_pinned, is_kept = held
    repository = opened.repository()
    try:
        view = opened.snapshot(repository)
        found = Dataset(
            repository,
            view,
            memory_bytes,
            compress,
            opened.task_options_with_key,
            task_memory_bytes,
            is_version_fixed=is_pinned,
            is_kept=is_kept,
        )
        if order is not None:
            found.shuffle(**order._asdict())
        return found
    except BaseException:
        repository.close()
        raise
