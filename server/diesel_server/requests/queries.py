"""The requests that change nothing: they list datasets, look up entries, read chunks and fetch
snapshots.

Two promises hold for every answer about entries. The answer is true at some moment after the
request came. And if the server cannot know the answer (the metadata store is away, or has lost
commits), it is an error, never "no such file".

The server keeps its newest snapshot of each dataset mapped. If it has the version of the dataset's
*head* (the current version, `head_cache.py`), entries are looked up in it. Otherwise a new snapshot
is made in the background, and the metadata store answers requests for few paths meanwhile.
"""

import logging
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TypeVar
from uuid import UUID

import trio

from diesel_fs.cache.readers.range_reader import RangeReader
from diesel_fs.errors import (
    MetadataBehind,
    MetadataError,
    NoSuchDataset,
    NoSuchPath,
)
from diesel_fs.format.entries import Kind, Rows, check_path
from diesel_fs.format.snapshot.reader import Snapshot, Span, Stats
from diesel_fs.names import shown
from diesel_fs.net.messages import Fields, Message
from diesel_fs.net.singleflight import ThreadSingleFlight
from diesel_fs.remote.snapshot_transfer import CompressedSnapshots, compressed
from diesel_fs.remote.values import (
    columns_message,
    info_message,
    parse_parts,
    parse_paths,
    paths_message,
    records_payload,
)
from diesel_fs.repository.catalog import DatasetInfo
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.metadata.store import DatasetHead

from .directory import DatasetRef, Directory, hide_store_address, no_such_dataset
from .dispatcher import Reply, Request
from .head_cache import HeadCache, HeadState

log = logging.getLogger("diesel.server")

IN_LOOP_PATHS = 1024
IN_LOOP_PATHS_BYTES = 64 << 10
"""A look-up of this number and size of paths takes the event loop half a millisecond; larger ones
run in a thread."""

FEW_PATHS = 32
"""Without a snapshot of the current version, requests with at most this number of paths go to the
metadata store, a few round trips for each. Others wait for a new snapshot."""

NAMES_PER_ANSWER = 65_536
NAMES_BYTES_PER_ANSWER = 2 << 20

_MAPPED_MAX = 64
_QUIET_S = 1.0
_QUIET_FACTOR = 4
"""The pause between two snapshots of a dataset is at least a second, and four times as long as the
first took. So making them takes at most a fifth of a thread's time."""

_READ_THREADS = 64
_QUERY_THREADS = 8
_SNAPSHOT_THREADS = 16  # they wait for one another while a new version is compressed
_COMPUTE_THREADS = 2  # they use the processor only: more of them would delay the event loop
_FIND_THREADS = 2  # for unknown identities, of which a client can invent any number

T = TypeVar("T")


class QueryHandlers:
    """Methods with an argument `name` or `known` are called after the user's role was checked."""

    def __init__(
        self,
        repository: LocalRepository,
        directory: Directory,
        heads: HeadCache,
        reads: RangeReader,
        compressed: CompressedSnapshots,
    ) -> None:
        self._repository = repository
        self._directory = directory
        self._heads = heads
        self._reads = reads
        self._compressed = compressed
        # Mapped snapshots by the dataset's identity, the latest used last
        self._views: OrderedDict[UUID, Snapshot] = OrderedDict()
        self._made_s: dict[UUID, tuple[float, float]] = {}  # when each was made; how long that took
        self._making = ThreadSingleFlight(self._make, trio.CapacityLimiter(2))
        self._last_heads: dict[UUID, DatasetHead] = {}
        self._listing = ThreadSingleFlight(self._list_datasets, trio.CapacityLimiter(1))
        self._counting = ThreadSingleFlight(repository.reclaimable_bytes, trio.CapacityLimiter(1))
        self._read_threads = trio.CapacityLimiter(_READ_THREADS)
        self._query_threads = trio.CapacityLimiter(_QUERY_THREADS)
        self._snapshot_threads = trio.CapacityLimiter(_SNAPSHOT_THREADS)
        self._compute_threads = trio.CapacityLimiter(_COMPUTE_THREADS)
        self._find_threads = trio.CapacityLimiter(_FIND_THREADS)

    # Datasets

    async def datasets(self, request: Request) -> Reply:
        account = request.account
        if not (account.admin or account.grants):
            return Reply({"datasets": []})
        is_away = self._repository.meta_problem is not None
        try:
            if not is_away:
                found = await self._heads.run(self._repository.meta.heads)
                self._last_heads = {head.identity: head for head in found}
        except MetadataError:
            is_away = True
        infos = [info for info in await self._listing.run(None) if account.role(info.name)]
        if is_away:
            infos = [replace(info, head=None) for info in infos]
        return Reply({"datasets": [info_message(info) for info in infos]})

    def _list_datasets(self, _: None) -> list[DatasetInfo]:
        found, damaged = self._repository.catalogue.all(self._last_heads)
        for error in damaged:
            log.warning("%s", error.message)
        return found

    async def dataset(self, request: Request, name: str) -> Reply:
        """While the metadata store is away, the reply has no head, and `away` has the reason."""
        try:
            info, away = await self.info(name), ""
        except MetadataError as error:
            info, away = await self._info_from_catalog(name), error.message
        return Reply({"info": info_message(info), "away": away, "now_s": time.time()})

    async def info(self, name: str) -> DatasetInfo:
        """Raises NoSuchDataset; MetadataError if the head cannot be known."""
        with hide_store_address(name):
            try:
                state = await self._heads.now(name)
            except (NoSuchDataset, MetadataBehind):
                pass
            else:
                known = await self.find_dataset(state.head.identity)
                if known.name == name:
                    return DatasetInfo(name, known.identity, known.created_ns, state.head)
            info = await self._heads.run(lambda: self._repository.dataset(name))
            self._directory.remember(info)
            return info

    async def _info_from_catalog(self, name: str) -> DatasetInfo:
        known = self._directory.named(name)
        if known is None:
            info = await trio.to_thread.run_sync(
                self._catalogued, name, limiter=self._query_threads
            )
            known = self._directory.remember(info)
        return known.info()

    async def find_dataset(self, identity: UUID, *, include_deleted: bool = False) -> DatasetRef:
        """`include_deleted` finds a deleted dataset that has objects left, too. Raises
        NoSuchDataset."""
        found = self._directory.peek(identity)
        if found is None:
            has_known = self._directory.has_known(identity)
            threads = self._query_threads if has_known else self._find_threads
            found = await trio.to_thread.run_sync(self._directory.find, identity, limiter=threads)
        if found.is_being_deleted and not include_deleted:
            raise no_such_dataset(str(identity))
        return found

    async def archives(self, request: Request, known: DatasetRef) -> Reply:
        """A put copies the entries of an archive only if `is_alone` is set. So the server clears it
        in records of other users, which may be forged; it trusts administrators."""
        records = await trio.to_thread.run_sync(
            self._repository.archive_records, known.identity, limiter=self._query_threads
        )
        trusted = ("", request.account.name)
        shown = [
            each if each.writer in trusted else replace(each, is_alone=False) for each in records
        ]
        return Reply({}, records_payload(shown))

    def _catalogued(self, name: str) -> DatasetInfo:
        found, damaged = self._repository.catalogue.all({})
        same = [info for info in found if info.name == name]
        if len(same) == 1:
            return same[0]
        if damaged or same:
            raise damaged[0] if damaged else MetadataError(f"several datasets are named {name!r}")
        raise no_such_dataset(name)

    # Entries

    async def stat(self, request: Request, known: DatasetRef) -> Reply:
        paths = parse_paths(Fields(request.message, "stat"))
        state = await self._head_of(known)
        view = self._current(known, state)
        if view is None and len(paths) > FEW_PATHS:
            view = await self._newer(known, state)
        if view is None:
            stats = await self._heads.run(lambda: self._stats(known.identity, paths))
            return Reply({"version": state.head.version, **columns_message(stats)})
        if len(paths) <= IN_LOOP_PATHS and sum(map(len, paths)) <= IN_LOOP_PATHS_BYTES:
            stats = view.stat_many(paths, missing_ok=True)
        else:
            look_up = partial(view.stat_many, paths, missing_ok=True)
            stats = await trio.to_thread.run_sync(look_up, limiter=self._compute_threads)
        return Reply({"version": view.version, **columns_message(stats)})

    def _stats(self, identity: UUID, paths: Sequence[bytes]) -> Stats:
        """Asks the metadata store. Blocks."""
        meta = self._repository.meta
        for path in paths:
            check_path(path)
        rows = meta.lookup(identity, paths)
        records = {rows.path(i): rows.records[i] for i in range(len(rows))}
        found = Stats.missing(len(paths))
        for i, path in enumerate(paths):
            record = records.get(path)
            if record is None or record["kind"] != Kind.FOLDER:
                if not path or len(meta.children(identity, path)):  # a folder without a record
                    found.kind[i], found.mode[i] = Kind.FOLDER, 0o755
                    continue
                if record is None:
                    continue
            for name in _COLUMNS:
                getattr(found, name)[i] = record[name]
        return found

    async def listing(self, request: Request, known: DatasetRef) -> Reply:
        fields = Fields(request.message, "list")
        folder, after = fields.octets("folder"), fields.octets("after")
        check_path(folder)
        state = await self._head_of(known)
        view = self._current(known, state)
        if view is None and state.head.files > NAMES_PER_ANSWER:
            # The metadata store reads a whole folder for each page
            view = await self._newer(known, state)
        if view is None:
            return await self._heads.run(lambda: self._listed(known, state, folder, after))
        return await trio.to_thread.run_sync(
            _listed_in, view, folder, after, limiter=self._compute_threads
        )

    def _listed(self, known: DatasetRef, state: HeadState, folder: bytes, after: bytes) -> Reply:
        rows = self._repository.meta.children(known.identity, folder)
        if not len(rows) and folder:
            found = self._stats(known.identity, [folder])
            if found.kind[0] != Kind.FOLDER:
                raise _no_folder(known.name, folder)
        return _page(
            state.head.version,
            bisect_right(rows.names, after) if after else 0,
            len(rows),
            lambda some: rows.names[some],
            lambda some: _stats_of(rows, some),
        )

    async def _head_of(self, known: DatasetRef) -> HeadState:
        """Raises MetadataBehind if the metadata store has lost commits."""
        try:
            state = await self._heads.now(known.name)
        except NoSuchDataset:
            raise _behind(known.name) from None
        if state.head.identity != known.identity:
            self._directory.forget(known.name)
            raise no_such_dataset(str(known.identity))
        if state.behind:
            raise _behind(known.name)
        return state

    # Snapshots

    def _current(self, known: DatasetRef, state: HeadState) -> Snapshot | None:
        """Returns the mapped snapshot of the head's version. If there is none, one is made in the
        background, unless the last was made a moment ago."""
        view = self._views.get(known.identity)
        if view is not None and view.version == state.head.version:
            with suppress(KeyError):  # another thread has just replaced it
                self._views.move_to_end(known.identity)
            return view
        made_s, took_s = self._made_s.get(known.identity, (0.0, 0.0))
        if time.monotonic() > made_s + max(_QUIET_S, _QUIET_FACTOR * took_s):
            self._making.start(known)
        return None

    async def _newer(self, known: DatasetRef, state: HeadState) -> Snapshot | None:
        """Makes a new snapshot, or waits for the one that is being made. Returns None if it is
        older than the head."""
        view = await self._making.run(known)
        return view if view.version >= state.head.version else None

    def _make(self, known: DatasetRef) -> Snapshot:
        began_s = time.monotonic()
        repository = self._repository
        head = repository.meta.head(known.name)
        if head.identity != known.identity:
            raise no_such_dataset(str(known.identity))
        view = repository.snapshots.load_current(repository.meta, head)
        now_s = time.monotonic()
        self._views[known.identity] = view
        self._made_s[known.identity] = now_s, now_s - began_s
        while len(self._views) > _MAPPED_MAX:
            self._made_s.pop(self._views.popitem(last=False)[0], None)
        return view

    async def snapshot(self, request: Request, known: DatasetRef) -> AsyncGenerator[Reply, None]:
        """Yields compressed pieces, of deltas if they lead from the version that the client has;
        none if that is the wanted one."""
        fields = Fields(request.message, "snapshot")
        version, have = fields.integer("version"), fields.integer("have", 0)
        view = await self._snapshot_of(known, version)
        if have and view.version == have:
            yield Reply({"version": have, "total": 0})
            return
        threads, snapshots = self._snapshot_threads, self._repository.snapshots
        deltas = None
        if have:
            deltas = await trio.to_thread.run_sync(
                snapshots.deltas_between, known.identity, have, view.version, limiter=threads
            )
        if deltas is None:
            pieces = self._compressed.pieces(view)
        else:
            pieces = compressed(memoryview(b"".join(deltas)))
        total = 0
        while (
            piece := await trio.to_thread.run_sync(next, pieces, None, limiter=threads)
        ) is not None:
            raw_bytes, block = piece
            total += raw_bytes
            yield Reply({"bytes": raw_bytes, "more": True}, [block])
        lengths: Message = {} if deltas is None else {"deltas": [len(each) for each in deltas]}
        yield Reply({"version": view.version, "total": total, **lengths})

    async def _snapshot_of(self, known: DatasetRef, version: int) -> Snapshot:
        """Version 0 is the current one."""
        repository, threads = self._repository, self._snapshot_threads
        if version:
            return await trio.to_thread.run_sync(
                repository.snapshots.load, known.identity, version, limiter=threads
            )
        head: DatasetHead | None = None  # then the newest snapshot in the object store counts
        with suppress(NoSuchDataset, MetadataError):
            state = await self._heads.now(known.name)
            if state.head.identity == known.identity:
                head = state.head
        info = DatasetInfo(known.name, known.identity, known.created_ns, head)
        return await trio.to_thread.run_sync(repository.view_of, info, limiter=threads)

    async def kept(self, request: Request, known: DatasetRef) -> Reply:
        snapshots, identity, threads = (
            self._repository.snapshots, known.identity, self._query_threads,
        )  # fmt: skip
        if Fields(request.message, "kept").flag("newest", default=False):
            newest = await trio.to_thread.run_sync(snapshots.newest, identity, limiter=threads)
            return Reply({"newest": newest})
        found = await trio.to_thread.run_sync(snapshots.kept, identity, limiter=threads)
        return Reply({"kept": [[*each] for each in found]})

    async def reclaimable(self, request: Request, name: str) -> Reply:
        """Requests that come during a count share the next count."""
        with hide_store_address(name):
            return Reply({"result": {"bytes": await self._counting.run(name)}})

    # Bytes

    async def read(self, request: Request, known: DatasetRef) -> Reply:
        """With `fresh`, reads from the object store, not from a cache."""
        fields = Fields(request.message, "read")
        parts, fresh = parse_parts(fields), fields.flag("fresh", default=False)
        if fresh and (parts["chunk"] != parts["chunk"][:1]).any():
            # The server then checks its whole copy of the chunk, so a request names one chunk only
            fields.bad("fresh", "it is of one chunk")
        read = partial(self._reads.read, known.identity, parts, fresh=fresh)
        return Reply({}, await trio.to_thread.run_sync(read, limiter=self._read_threads))


_COLUMNS = ("kind", "mode", "size", "mtime_ns")


def _listed_in(view: Snapshot, folder: bytes, after: bytes) -> Reply:
    index = view.lookup(folder)
    if index < 0 or view.stat(index).kind != Kind.FOLDER:
        raise _no_folder(view.dataset, folder)
    children = view.children(index)
    return _page(
        view.version,
        bisect_right(children, after, key=view.name) if after else 0,
        len(children),
        lambda some: view.names(children[some]),
        lambda some: view.stat_many(children[some]),
    )


def _page(
    version: int,
    start: int,
    count: int,
    names_of: Callable[[Span], Sequence[bytes]],
    stats_of: Callable[[Span], Stats],
) -> Reply:
    """Takes as many of a folder's `count` entries, from `start` on, as fit one answer."""
    some = slice(start, min(start + NAMES_PER_ANSWER, count))
    names = names_of(some) if some.start < some.stop else []
    fit = bisect_right(list(accumulate(map(len, names))), NAMES_BYTES_PER_ANSWER)
    some = slice(start, start + fit)
    columns = columns_message(stats_of(some)) if fit else columns_message(Stats.missing(0))
    answer: Message = {
        "version": version,
        "names": paths_message(names[:fit]),
        "more_names": some.stop < count,
    }
    return Reply({**answer, **columns})


def _stats_of(rows: Rows, some: Span) -> Stats:
    records = rows.records[some]
    return Stats(*(records[name] for name in _COLUMNS))


def _behind(name: str) -> MetadataBehind:
    return MetadataBehind(
        f"the metadata of {name!r} is behind its chunks", advice=f"run `dlcmd recover {name}`"
    )


def _no_folder(name: str, folder: bytes) -> NoSuchPath:
    return NoSuchPath(f"{shown(folder)} in dataset {name!r} is not a folder")
