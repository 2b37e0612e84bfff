"""Reads and writes one dataset from Python, without a mount: `connect` and `Dataset`.

The calls are those of libDIESEL (the DIESEL paper, Table 3); docstrings name them as DL_get etc.

A `Dataset` shows one version. It moves on to the current one in `flush`, `delete`, `purge` and
`refresh`, and when a call names a path that the shown version lacks. Several threads may read; only
one may write. A forked child may go on reading, and so may a process that loads a pickle of the
dataset (`reopening.py`). Puts that are not flushed stay with the process that made them.
"""

import inspect
import logging
import os
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import NamedTuple, Self, Unpack

import numpy as np
import numpy.typing as npt

from ..arguments import flag, keyword_errors, local_path, text, whole_number, words_of, wrong_type
from ..cache.readers.entry_file import EntryFile
from ..cache.readers.entry_reader import EntryReader
from ..credentials import Credentials
from ..errors import (
    ConflictError,
    ForeignError,
    IsAFolder,
    NoSuchDataset,
    NoSuchPath,
    ObjectMissing,
    UsageError,
)
from ..format.entries import Kind, Stat, whole_object
from ..format.snapshot import layout
from ..format.snapshot.reader import Snapshot, Stats
from ..ingest.options import COMPRESSIONS
from ..names import cut, parse_versioned_name
from ..orders.shuffle import GROUP_SIZE_DEFAULT, chunk_order
from ..peers.members.options import NO_TASK, TaskKwargs, TaskOptions
from ..peers.reader.store import TaskStore, master_request
from ..remote.open import open_configured
from ..repository.interface import PurgeOptions, PurgeReport, Repository
from ..repository.private_copies import open_snapshot_file, save_snapshot
from ..settings import Settings, load_settings
from ..storage.objects.store import ObjectStore
from .addressing import (
    EntryKey,
    EntryKeys,
    PathText,
    index_of,
    indices_of,
    is_path,
    names_of,
)
from .pending_puts import PendingPuts, Source
from .reopening import DatasetReference

log = logging.getLogger("diesel.client")

MEMORY_BYTES_DEFAULT = 256 << 20
"""Memory for chunks in each process; small, since a DataLoader has many processes."""


@dataclass(frozen=True, slots=True)
class _OpenOptions:
    memory_bytes: int | None
    compress: str
    task: TaskOptions
    task_memory_bytes: int


class _Order(NamedTuple):
    """A process that loads a pickle repeats the last `shuffle` with these arguments."""

    seed: int
    epoch: int
    group_size: int
    rank: int
    world: int
    drop_last: bool
    below: EntryKey


@keyword_errors()
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
    """Open a dataset (DL_connect).

    `"pets"` opens the current version. `"pets@1790000000000000"` opens that version, which must be
    kept; such a dataset is read-only until `refresh` moves it on.

    `url`, `user` and `key` name the repository and your account on a server; by default they come
    from the environment, as for `dlcmd`. `create` makes a missing repository and dataset.

    `memory_bytes` limits the memory for chunks; None means MEMORY_BYTES_DEFAULT, or more if the two
    groups of chunks of `shuffle` need it. `compress` is "auto", "lz4" or "none".

    With `task=NAME`, contents are read through the cache that the nodes of this training task
    share. This node is number `rank` of `world`; by default as set by SLURM or torchrun, else the
    only one. `task_key` is the task's secret (or DIESEL_TASK_KEY). `task_memory_bytes`, `cache_dir`
    and `cache_bytes` are the memory and disk of this node's part. The other options are those of
    `dlcmd mount`; None means the default. The first process of a node settles the options for the
    node; a later one with others logs a warning.

    A bucket (`url="s3://..."`) is read through a helper process, so that this process may fork.

    Raises NoSuchDataset, NotFoundError for a version that is not kept, ObjectStoreError,
    MetadataError, UsageError.
    """
    name, version = parse_versioned_name(dataset)
    if flag("create", create) and version:
        raise UsageError(
            f"{dataset} names a version, and `create` makes a new dataset",
            advice="leave out `create`, or the version",
        )
    if not isinstance(compress, str) or compress not in COMPRESSIONS:
        known = ", ".join(COMPRESSIONS)
        raise UsageError(f"bad compression {reprlib.repr(compress)}", advice=f"one of {known}")
    settings = _load(url, user, key)
    if memory_bytes is not None:
        memory_bytes = whole_number("memory_bytes", memory_bytes)
    if task_memory_bytes is None:
        task_memory_bytes = 0
    task_memory_bytes = whole_number("task_memory_bytes", task_memory_bytes)
    task_options = TaskOptions.from_kwargs(
        task,
        f"{settings.repository_url}\0{dataset}",
        words=words_of(inspect.signature(connect)),
        task_only={"policy": task.get("policy"), "task_memory_bytes": task_memory_bytes},
    )
    options = _OpenOptions(memory_bytes, compress, task_options, task_memory_bytes)
    with _creation_advised(create=create):
        repository = open_configured(settings, create=create)
    try:
        if create:
            repository.begin(name)
        is_kept = version != 0
        with _creation_advised(create=create or is_kept):
            view = repository.view_at(name, version) if is_kept else repository.view(name)
        return Dataset(repository, view, options, is_version_fixed=is_kept, is_kept=is_kept)
    except BaseException:
        repository.close()
        raise


@contextmanager
def _creation_advised(*, create: bool) -> Iterator[None]:
    """Add advice to errors about a missing repository or dataset, unless `create` is set."""
    try:
        yield
    except (ObjectMissing, NoSuchDataset) as error:
        if not create:
            what = "repository and dataset" if isinstance(error, ObjectMissing) else "dataset"
            also = f"{error.advice}; " if error.advice else ""
            error.advice = f"{also}diesel_fs.connect(..., create=True) makes a new {what}"
        raise


@keyword_errors()
def list_datasets(
    url: str | None = None, user: str | None = None, key: str | None = None
) -> list[str]:
    """Return the sorted names of a repository's datasets; on a server, of those that you may read.

    Arguments and errors as for `connect`.
    """
    with open_configured(_load(url, user, key)) as repository:
        return [info.name for info in repository.datasets()]


def _load(url: str | None, user: str | None, key: str | None) -> Settings:
    """Raises UsageError for a key without a user."""
    given = {"url": url, "user": user, "key": key}
    for word, value in given.items():
        if value is not None:
            text(word, value)
    settings = load_settings(given)
    if key is not None and settings.credentials is None:
        raise UsageError(
            "`key` is given without a user", advice="leave out `key`, or name a user of a server"
        )
    return settings


class Dataset:
    """An open dataset; see `connect`."""

    def __init__(
        self,
        repository: Repository,
        view: Snapshot,
        options: _OpenOptions,
        *,
        is_version_fixed: bool,
        is_kept: bool,
    ) -> None:
        self.name = view.dataset
        self._repository = repository
        self._options = options
        self._task: TaskStore | None = None
        self._task_version = 0
        self._order: _Order | None = None  # None: files are not read in the order of a `shuffle`
        self._version_fixed = is_version_fixed  # only `refresh` moves on from this version
        self._kept = is_kept  # opened at a named version: nothing can be written
        self._closed = False
        self._pending = PendingPuts(repository, view, options.compress)
        self._switch_version(view)

    def __reduce__(self) -> tuple[object, ...]:
        """The pickle has the version and the order of reading, but no secret.

        Raises UsageError if the other process will need a secret that is not in the environment.
        """
        self._check_open()
        reference = DatasetReference.of(self._repository, self._view, self.task_options)
        options = replace(self._options, task=NO_TASK)
        is_fixed = (self._version_fixed, self._kept)
        return _reopen, (reference, options, is_fixed, self._order)

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        url = self._repository.url
        return f"<Dataset {self.name}@{self.version} of {url}, files: {len(self)}{state}>"

    # Reading

    @property
    def snapshot(self) -> Snapshot:
        """All metadata of the version that is shown."""
        return self._view

    @property
    def url(self) -> str:
        """The repository's address. It may hold a password: do not print it."""
        return self._repository.url.full_url

    @property
    def credentials(self) -> Credentials | None:
        """The account on the server; None without a server."""
        return self._repository.credentials

    @property
    def task_options(self) -> TaskOptions:
        """The options of the training task. They may hold its secret: do not print them."""
        return self._options.task

    @property
    def version(self) -> int:
        return self._view.version

    @property
    def is_kept(self) -> bool:
        """Whether `connect` opened a named version, so that nothing can be written."""
        return self._kept

    def __len__(self) -> int:
        """The number of files."""
        return self._view.file_count

    def get(self, path: EntryKey) -> bytes:
        """Return the content of a file (DL_get). Raises NoSuchPath, IsAFolder, CorruptError."""
        reader = self._reader
        if type(path) is int and 0 <= path < reader.snapshot.entry_count and not self._closed:
            index = path
        else:
            index, reader = self._find(path)
        plain = reader.snapshot.plain_extent(index)
        if plain is not None:
            return bytes(whole_object(memoryview(reader.read_plain(index, plain))))
        _check_file(reader.snapshot, index)
        return bytes(whole_object(reader.read(index)))

    def open(self, path: EntryKey) -> EntryFile:
        """Return a file's content as a seekable binary stream, for large files and parts.

        The stream stays with the current version. Raises NoSuchPath, IsAFolder; while reading,
        CorruptError and the errors of the store.
        """
        index, reader = self._find(path)
        _check_file(reader.snapshot, index)
        return EntryFile(reader, index)

    def read_many(self, paths: EntryKeys) -> Iterator[memoryview]:
        """Yield the contents of many files in this order; fetch chunks ahead in the background.

        Each memoryview stays valid as long as the caller holds it. Raises NoSuchPath and IsAFolder
        before anything is read, and later as `get`.
        """
        indices, reader = self._find_many(paths)
        kinds = layout.kinds(reader.snapshot.columns.flags[indices])
        for index in indices[kinds != Kind.FILE][:1].tolist():
            _check_file(reader.snapshot, index)
        return reader.read_many(indices)

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
        """Return a rank's files in chunk-wise random order, as indices of this version
        (DL_shuffle).

        `diesel_fs.orders.shuffle` defines the order and its parameters. `below` selects the files
        below a folder. Until the next `shuffle`, `get` and `read_many` in this order load each
        chunk once and keep at most two groups of `group_size` chunks in memory, or the whole
        dataset if it fits. Raises NoSuchPath, and UsageError for bad numbers or if the chunks of
        one group do not fit `memory_bytes`.
        """
        top = self._index(below)
        if self._view.stat(top).kind != Kind.FOLDER:
            raise UsageError(f"{reprlib.repr(below)} is not a folder")
        flag("drop_last", drop_last)
        order = chunk_order(
            self._view, seed, epoch, group_size=group_size, rank=rank, world=world,
            drop_last=drop_last, below=top,
        )  # fmt: skip
        self.follow(order.indices, order.ends)
        self._order = _Order(seed, epoch, group_size, rank, world, drop_last, below)
        return order.indices

    def follow(self, order: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> None:
        """Load chunks for `get` and `read_many` in this order of indices, as after `shuffle`.

        `ends` has the position in the order at which each group ends. Raises NoSuchPath, and
        UsageError if the chunks of a group do not fit `memory_bytes`.
        """
        self._check_open()
        view = self._view
        order, ends = indices_of(view, _indices("order", order)), _indices("ends", ends)
        positions = np.concatenate(([0], ends))
        if positions[-1] != len(order) or (np.diff(positions) < 0).any():
            raise UsageError(
                f"ends are ascending positions in the order, the last of which is {len(order)}"
            )
        if (layout.kinds(view.columns.flags[order]) != Kind.FILE).any():
            raise UsageError("the order names entries that are no files")
        self._reader.prefetch_order(order, ends, grow=self._options.memory_bytes is None)
        self._order = None

    def stat(self, path: EntryKey) -> Stat:
        """Return kind, mode, size and mtime of an entry (DL_stat). Raises NoSuchPath."""
        index, reader = self._find(path)
        return reader.snapshot.stat(index)

    def stat_many(self, paths: EntryKeys) -> Stats:
        """Return the `stat` of many entries, as columns. Raises NoSuchPath."""
        indices, reader = self._find_many(paths)
        return reader.snapshot.stat_many(indices)

    def ls(self, path: EntryKey = "") -> list[str]:
        """Return the names in a folder, sorted (DL_ls); for another entry, its own name.

        Raises NoSuchPath.
        """
        index, reader = self._find(path)
        view = reader.snapshot
        if view.stat(index).kind != Kind.FOLDER:
            return [os.fsdecode(view.name(index))]
        return [os.fsdecode(name) for name in view.names(view.children(index))]

    def task_stats(self) -> dict[str, object]:
        """Return the state and counters of the task's cache, and of this object's reads from it;
        empty without a task, or in a process that has not joined it."""
        return {} if self._task is None else self._task.stats()

    def refresh(self) -> int:
        """Move on to the current version, and return it."""
        self._check_open()
        self._version_fixed = self._kept = False
        self._switch_version(self._repository.view(self.name))
        return self._view.version

    # Writing

    def put(
        self,
        source: Source,
        path: PathText,
        *,
        mode: int = 0o644,
        mtime_ns: int | None = None,
    ) -> None:
        """Put a file at `path` (DL_put); it is durable after `flush`.

        `source` is the path of a file, bytes, or a file object. A file's path gives mode and mtime;
        other sources get `mode`, and `mtime_ns` or now.

        Raises ConflictError if `path` is a folder or lies below a file, NoSuchFile or
        PermissionDenied if the source cannot be read. If a chunk cannot be stored, the puts since
        the last `flush` are lost: `put` and `flush` raise the error until the dataset is opened
        again.
        """
        self._check_writable()
        self._pending.add(self._view, source, path, mode, mtime_ns)

    def flush(self) -> int:
        """Make all puts durable (DL_flush), move on to the version that has them, and return it.

        Then raises ConflictError if another writer has put a folder at the path of one of these
        files, or a file at that of a folder; the dataset then has the folder.
        """
        self._check_open()
        if (report := self._pending.flush()) is None:
            return self._view.version
        if not self._version_fixed:  # a fixed version stays, without the new files
            self._pending.forget_paths()
            self.refresh()
        for path, reason in report.failed:
            raise ConflictError(f"{os.fsdecode(path)!r}: {reason}")
        return self._view.version

    def delete(self, path: EntryKey, *, recursive: bool = False) -> None:
        """Delete a file, link or empty folder (DL_delete), or with `recursive` any folder.

        It is durable on return. Raises NoSuchPath, and ConflictError for a folder with entries.
        """
        self._check_writable()
        flag("recursive", recursive)
        entry = path if is_path(path) else self._view.path(self._index(path))
        self.flush()  # it may move on to a version with other indices
        index = self._index(entry)
        entries = self._view.walk(index).tolist()
        if len(entries) > 1 and not recursive:
            raise ConflictError(
                f"{reprlib.repr(path)} is a folder with entries",
                advice="recursive=True deletes them too",
            )
        self._pending.delete(self._view, [self._view.path(i) for i in reversed(entries)])
        self.flush()

    # Metadata

    def save_meta(self, file: str | os.PathLike[str]) -> None:
        """Write the metadata of the shown version to a snapshot file (DL_save_meta)."""
        self._check_open()
        save_snapshot(self._view, local_path("file", file))

    def load_meta(self, file: str | os.PathLike[str]) -> bool:
        """Show the version of a snapshot file (DL_load_meta); return whether it is the current one.

        Only `refresh` moves on from it. Raises FormatError, and ForeignError for a snapshot of
        another dataset.
        """
        self._check_open()
        loaded = open_snapshot_file(local_path("file", file))
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
        """Free the space of replaced and deleted files (DL_purge).

        Flushes, rewrites chunks with more than the share `max_unused` of unused bytes, deletes the
        old ones when no reader can need them, and moves on to the current version. `keep` versions
        are kept, and old chunks stay for `grace_s` seconds; -1 leaves a setting as it is (see
        `PurgeOptions`). Raises BusyError, NoSpaceError.
        """
        if isinstance(max_unused, bool) or not isinstance(max_unused, int | float | np.number):
            raise wrong_type("max_unused", "a share between 0 and 1", max_unused)
        if not 0 <= max_unused <= 1:
            raise UsageError(f"max_unused is a share between 0 and 1, not {max_unused:g}")
        keep, grace_s = whole_number("keep", keep, -1), whole_number("grace_s", grace_s, -1)
        flag("dry_run", dry_run)
        self._check_writable()
        self.flush()
        options = PurgeOptions(round(max_unused * 1_000_000), keep, grace_s, dry_run)
        report = self._repository.purge(self.name, options)
        if not (dry_run or self._version_fixed):
            self.refresh()
        return report

    def delete_dataset(self) -> None:
        """Delete the dataset for good (DL_delete_dataset), and close this object."""
        self._check_writable()
        self._pending.close()
        self._repository.delete_dataset(self.name)
        self.close()

    def close(self) -> None:
        """Flush and release everything (DL_close). A forked child flushes only its own puts."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self._closed = True
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:  # the puts of the block are incomplete, so they are not flushed
            self._closed = True
            self._release()
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"{self.name!r} is closed", advice="connect to it again")

    def _check_writable(self) -> None:
        self._check_open()
        if self._kept:
            raise UsageError(
                f"{self.name}@{self.version} is a kept version, which cannot be changed",
                advice=f"connect to {self.name!r}, or move on to its current version by refresh()",
            )

    def _release(self) -> None:
        self._pending.close()
        self._reader.close()
        if self._task is not None:
            self._task.close()
        self._repository.close()

    @keyword_errors()
    def _switch_version(self, view: Snapshot) -> None:
        if not self._version_fixed and (warning := self._repository.staleness_warning(view)):
            log.warning("%s", warning)
        self._view = view
        self._pending.note_version(view)
        self._order = None
        limit = self._options.memory_bytes
        memory_bytes = MEMORY_BYTES_DEFAULT if limit is None else limit
        self._reader = EntryReader(view, self._objects_of(view), memory_bytes)

    def _objects_of(self, view: Snapshot) -> ObjectStore:
        if not self.task_options:
            return self._repository.objects
        task = self._task
        if task is None:
            memory_bytes = self._options.task_memory_bytes
            request = master_request(
                self.task_options, self._repository, view, memory_bytes=memory_bytes
            )
            task = TaskStore.join(self._repository.objects, request, view)
        elif view.version != self._task_version:
            former, task = task, task.at_version(view)
            former.close()
        self._task, self._task_version = task, view.version
        return task

    def _index(self, key: EntryKey) -> int:
        return self._find(key)[0]

    def _find(self, key: EntryKey) -> tuple[int, EntryReader]:
        """The index of an entry, and the reader of its version (another thread may move the dataset
        on meanwhile). If a path is missing, moves on to a newer version first."""
        self._check_open()
        reader = self._reader
        try:
            return index_of(reader.snapshot, key), reader
        except NoSuchPath:
            if not (is_path(key) and self._catch_up()):
                raise
            reader = self._reader
            return index_of(reader.snapshot, key), reader

    def _find_many(self, many: EntryKeys) -> tuple[npt.NDArray[np.int64], EntryReader]:
        self._check_open()
        names = names_of(many)
        reader = self._reader
        try:
            return indices_of(reader.snapshot, names), reader
        except NoSuchPath:
            if not (isinstance(names, list) and self._catch_up()):
                raise
            reader = self._reader
            return indices_of(reader.snapshot, names), reader

    def _catch_up(self) -> bool:
        """Return whether there was a newer version to move on to."""
        if self._version_fixed:
            return False
        head = self._repository.dataset(self.name).head
        if head is None or head.version <= self._view.version:
            return False
        self.refresh()
        return True


def _indices(word: str, value: object) -> npt.NDArray[np.int64]:
    try:
        found = np.asarray(value)
    except (ValueError, TypeError):  # lists of several lengths
        found = np.empty((0, 0))
    if found.ndim != 1 or (found.dtype.kind not in "iu" and len(found)):
        raise wrong_type(word, "an array of whole numbers", value)
    return found.astype(np.int64, copy=False)


def _check_file(view: Snapshot, index: int) -> None:
    kind = view.stat(index).kind
    if kind == Kind.FILE:
        return
    shown_path = cut(os.fsdecode(view.path(index)))
    if kind == Kind.FOLDER:
        raise IsAFolder(f"{shown_path!r} is not a file: it is a folder")
    target = cut(os.fsdecode(view.link(index)))
    raise UsageError(f"{shown_path!r} is not a file: it is a link to {target!r}")


def _reopen(
    reference: DatasetReference,
    options: _OpenOptions,
    is_fixed: tuple[bool, bool],
    order: _Order | None,
) -> Dataset:
    """`is_fixed` has the two flags of `Dataset`."""
    is_version_fixed, is_kept = is_fixed
    options = replace(options, task=reference.task_options_with_key)
    repository = reference.repository()
    try:
        view = reference.snapshot(repository)
        dataset = Dataset(
            repository, view, options, is_version_fixed=is_version_fixed, is_kept=is_kept
        )
        if order is not None:
            dataset.shuffle(**order._asdict())
        return dataset
    except BaseException:
        repository.close()
        raise
