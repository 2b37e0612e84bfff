"""What clients ask about datasets: which there are, their entries, their bytes, their snapshots.

Owned here: that an answer about entries is true at a moment after the request came, whether a
snapshot or the metadata store gave it, and that ignorance is never taken for absence. Not owned:
who may ask (`directory.py`), the meaning of entries (`snapshot.py`, the metadata store).

The newest snapshot of each dataset that is asked about is kept mapped. Where its version is the
marker's, entries are looked up in it, in the loop. Where it is not, a new one is made behind the
requests, and few paths are looked up in the metadata store meanwhile.
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

import numpy as np
import trio

from diesel_fs.cache.range_reader import RangeReader
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
from diesel_fs.remote.snapshot_transfer import CompressedSnapshots
from diesel_fs.remote.values import (
    columns_message,
    info_message,
    parse_parts,
    parse_paths,
    paths_message,
)
from diesel_fs.repository.catalog import DatasetInfo
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.metadata.store import DatasetHead

from .directory import DatasetRef, Directory, hide_store_address, no_such_dataset
from .head_cache import HeadCache, HeadState
from .requests import Reply, Request

log = logging.getLogger("diesel.server")

IN_LOOP_PATHS = 1024
IN_LOOP_PATHS_BYTES = 64 << 10
"""So many look-ups take half a millisecond; for more, the loop does not wait."""

FEW_PATHS = 32
"""So many the metadata store is asked for, a few round trips each; for more a snapshot is made."""

NAMES_PER_ANSWER = 65_536
NAMES_BYTES_PER_ANSWER = 2 << 20

_MAPPED_MAX = 64
_QUIET_S = 1.0
_QUIET_FACTOR = 4  # of the time that making a snapshot took: a fifth of one thread at most
_READ_THREADS = 64
_ASK_THREADS = 8
_SNAPSHOT_THREADS = 16  # which wait for one another where a new version is compressed
_COMPUTE_THREADS = 2  # which wait for nothing: more of them would only keep the loop waiting
_FIND_THREADS = 2  # for identities that nobody has asked for yet, which anybody can draw

T = TypeVar("T")


class QueryHandlers:
    """The requests that change nothing."""

    def __init__(
        self,
        repository: LocalRepository,
        directory: Directory,
        markers: HeadCache,
        reads: RangeReader,
        pieces: CompressedSnapshots,
    ) -> None:
        self._repository = repository
        self._directory = directory
        self._heads = markers
        self._reads = reads
        self._pieces = pieces
        self._reading = trio.CapacityLimiter(_READ_THREADS)
        self._threads = trio.CapacityLimiter(_ASK_THREADS)
        self._views: OrderedDict[UUID, Snapshot] = OrderedDict()
        self._made_s: dict[UUID, tuple[float, float]] = {}  # when a view was made; how long it took
        self._making = ThreadSingleFlight(self._make, trio.CapacityLimiter(2))
        self._last_heads: dict[UUID, DatasetHead] = {}
        self._listing = ThreadSingleFlight(self._list_datasets, trio.CapacityLimiter(1))
        self._sending = trio.CapacityLimiter(_SNAPSHOT_THREADS)
        self._computing = trio.CapacityLimiter(_COMPUTE_THREADS)
        self._finding = trio.CapacityLimiter(_FIND_THREADS)
        self._counting = ThreadSingleFlight(self._reclaimable, trio.CapacityLimiter(1))

    # Datasets

    async def datasets(self, request: Request) -> Reply:
        """The datasets that the user may read."""
        account = request.account
        if not (account.admin or account.grants):
            return Reply({"datasets": []})
        away = self._repository.meta_problem is not None
        try:
            if not away:
                found = await self._heads.run(self._repository.meta.heads)
                self._last_heads = {marker.identity: marker for marker in found}
        except MetadataError:  # the object store knows what there is
            away = True
        infos = [info for info in await self._listing.run(None) if account.role(info.name)]
        if away:
            infos = [replace(info, head=None) for info in infos]
        return Reply({"datasets": [info_message(info) for info in infos]})

    def _list_datasets(self, _: None) -> list[DatasetInfo]:
        found, damaged = self._repository.catalogue.all(self._last_heads)
        for error in damaged:
            log.warning("%s", error.message)
        return found

    async def dataset(self, request: Request, name: str) -> Reply:
        """A dataset by its name."""
        try:
            info, away = await self.info(name), ""
        except MetadataError as error:
            info, away = await self._info_from_catalog(name), error.message
        return Reply({"info": info_message(info), "away": away, "now_s": time.time()})

    async def info(self, name: str) -> DatasetInfo:
        """A dataset by its name, with its marker of now. Raises NoSuchDataset, and MetadataError
        where nobody can tell its marker."""
        with hide_store_address(name):
            return await self._info(name)

    async def _info(self, name: str) -> DatasetInfo:
        try:
            look = await self._heads.now(name)
        except (NoSuchDataset, MetadataBehind):
            pass
        else:
            known = await self.find_dataset(look.marker.identity)
            if known.name == name:
                return DatasetInfo(name, known.identity, known.created_ns, look.marker)
        info = await self._heads.run(lambda: self._repository.dataset(name))
        self._directory.remember(info)
        return info

    async def _info_from_catalog(self, name: str) -> DatasetInfo:
        known = self._directory.named(name)
        if known is None:
            info = await self._in_thread(lambda: self._catalogued(name))
            known = self._directory.remember(info)
        return known.info()

    async def find_dataset(self, identity: UUID, *, include_deleted: bool = False) -> DatasetRef:
        """A dataset by its identity. Raises NoSuchDataset."""
        found = self._directory.peek(identity)
        if found is None:
            is_new = not self._directory.has_known(identity)
            found = await trio.to_thread.run_sync(
                self._directory.find, identity, limiter=self._finding if is_new else self._threads
            )
        if found.is_being_deleted and not include_deleted:
            raise no_such_dataset(str(identity))
        return found

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
        """Entries by their paths."""
        paths = parse_paths(Fields(request.message, "stat"))
        look = await self._head_of(known)
        view = self._current(known, look)
        if view is None and len(paths) > FEW_PATHS:
            view = await self._newer(known, look)
        if view is None:
            stats = await self._heads.run(lambda: self._stats(known.identity, paths))
            return Reply({"version": look.marker.version, **columns_message(stats)})
        if len(paths) <= IN_LOOP_PATHS and sum(map(len, paths)) <= IN_LOOP_PATHS_BYTES:
            stats = view.stat_many(paths, missing_ok=True)
        else:
            held = view
            stats = await self._compute(lambda: held.stat_many(paths, missing_ok=True))
        return Reply({"version": view.version, **columns_message(stats)})

    def _stats(self, identity: UUID, paths: Sequence[bytes]) -> Stats:
        """Entries as the metadata store has them."""
        meta = self._repository.meta
        for path in paths:
            check_path(path)
        rows = meta.lookup(identity, paths)
        records = {rows.path(i): rows.records[i] for i in range(len(rows))}
        found = _no_stats(len(paths))
        for i, path in enumerate(paths):
            record = records.get(path)
            if record is None or record["kind"] != Kind.FOLDER:
                if not path or len(meta.children(identity, path)):  # only its entries imply it
                    found.kind[i], found.mode[i] = Kind.FOLDER, 0o755
                    continue
                if record is None:
                    continue
            for name in _COLUMNS:
                getattr(found, name)[i] = record[name]
        return found

    async def listing(self, request: Request, known: DatasetRef) -> Reply:
        """What lies in a folder, some names at a time."""
        fields = Fields(request.message, "list")
        folder, after = fields.octets("folder"), fields.octets("after")
        check_path(folder)
        look = await self._head_of(known)
        view = self._current(known, look)
        if view is None and look.marker.files > NAMES_PER_ANSWER:
            view = await self._newer(known, look)  # a page of the store's is all of a folder
        if view is None:
            return await self._heads.run(lambda: self._listed(known, look, folder, after))
        held = view
        return await self._compute(lambda: _listed_in(held, folder, after))

    def _listed(self, known: DatasetRef, look: HeadState, folder: bytes, after: bytes) -> Reply:
        rows = self._repository.meta.children(known.identity, folder)
        if not len(rows) and folder:
            found = self._stats(known.identity, [folder])
            if found.kind[0] != Kind.FOLDER:
                raise _no_folder(known.name, folder)
        return _page(
            look.marker.version,
            bisect_right(rows.names, after) if after else 0,
            len(rows),
            lambda some: rows.names[some],
            lambda some: _stats_of(rows, some),
        )

    async def _head_of(self, known: DatasetRef) -> HeadState:
        """The marker of now. Raises MetadataBehind where it does not know all."""
        try:
            look = await self._heads.now(known.name)
        except NoSuchDataset:
            raise _behind(known.name) from None
        if look.marker.identity != known.identity:
            self._directory.forget(known.name)
            raise no_such_dataset(str(known.identity))
        if look.behind:
            raise _behind(known.name)
        return look

    # Snapshots

    def _current(self, known: DatasetRef, look: HeadState) -> Snapshot | None:
        """The snapshot of a look's version, where it is mapped; else one is made, not too often."""
        view = self._views.get(known.identity)
        if view is not None and view.version == look.marker.version:
            with suppress(KeyError):  # another has just taken its place
                self._views.move_to_end(known.identity)
            return view
        made_s, took_s = self._made_s.get(known.identity, (0.0, 0.0))
        if time.monotonic() > made_s + max(_QUIET_S, _QUIET_FACTOR * took_s):
            self._making.start(known)
        return None

    async def _newer(self, known: DatasetRef, look: HeadState) -> Snapshot | None:
        """A snapshot of a look's version or a later one."""
        view = await self._making.run(known)
        return view if view.version >= look.marker.version else None

    def _make(self, known: DatasetRef) -> Snapshot:
        began_s = time.monotonic()
        repository = self._repository
        marker = repository.meta.head(known.name)
        if marker.identity != known.identity:
            raise no_such_dataset(str(known.identity))
        view = repository.snapshots.load_current(repository.meta, marker)
        now_s = time.monotonic()
        self._views[known.identity] = view
        self._made_s[known.identity] = now_s, now_s - began_s
        while len(self._views) > _MAPPED_MAX:
            self._made_s.pop(self._views.popitem(last=False)[0], None)
        return view

    async def snapshot(self, request: Request, known: DatasetRef) -> AsyncGenerator[Reply, None]:
        """A snapshot, in pieces."""
        fields = Fields(request.message, "snapshot")
        version, have = fields.integer("version"), fields.integer("have", 0)
        view = await self._wanted(known, version)
        if have and view.version == have:
            yield Reply({"version": have, "total": 0})
            return
        pieces = self._pieces.pieces(view)
        total = 0
        while (piece := await self._send_thread(lambda: next(pieces, None))) is not None:
            raw_bytes, block = piece
            total += raw_bytes
            yield Reply({"bytes": raw_bytes, "more": True}, [block])
        yield Reply({"version": view.version, "total": total})

    async def _wanted(self, known: DatasetRef, version: int) -> Snapshot:
        repository = self._repository
        if version:
            return await self._send_thread(
                lambda: repository.snapshots.load(known.identity, version)
            )
        marker: DatasetHead | None = None
        try:
            look = await self._heads.now(known.name)
        except (NoSuchDataset, MetadataError):
            pass  # it goes by the newest that the store has
        else:
            if look.marker.identity == known.identity:
                marker = look.marker
        info = DatasetInfo(known.name, known.identity, known.created_ns, marker)
        return await self._send_thread(lambda: repository.view_of(info))

    async def kept(self, request: Request, known: DatasetRef) -> Reply:
        """The versions that are kept."""
        shelf = self._repository.snapshots
        if Fields(request.message, "kept").flag("newest", default=False):
            return Reply({"newest": await self._in_thread(lambda: shelf.newest(known.identity))})
        found = await self._in_thread(lambda: shelf.kept(known.identity))
        return Reply({"kept": [[*each] for each in found]})

    async def reclaimable(self, request: Request, name: str) -> Reply:
        """About how much a purge can give back. Who asks meanwhile waits for the next count."""
        with hide_store_address(name):
            return Reply({"result": {"bytes": await self._counting.run(name)}})

    def _reclaimable(self, name: str) -> int:
        return self._repository.reclaimable_bytes(name, self._repository.view(name))

    # Bytes

    async def read(self, request: Request, known: DatasetRef) -> Reply:
        """Parts of chunks."""
        fields = Fields(request.message, "read")
        parts, fresh = parse_parts(fields), fields.flag("fresh", default=False)
        if fresh and (parts["chunk"] != parts["chunk"][:1]).any():
            fields.bad("fresh", "it is of one chunk")  # each is read whole, where it is near
        read = partial(self._reads.read, known.identity, parts, fresh=fresh)
        return Reply({}, await trio.to_thread.run_sync(read, limiter=self._reading))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(work, limiter=self._threads)

    async def _compute(self, work: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(work, limiter=self._computing)

    async def _send_thread(self, work: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(work, limiter=self._sending)


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
    """Entries of a folder of `count` from the one at `start` on, as many as one answer has."""
    some = slice(start, min(start + NAMES_PER_ANSWER, count))
    names = names_of(some) if some.start < some.stop else []
    fit = bisect_right(list(accumulate(map(len, names))), NAMES_BYTES_PER_ANSWER)
    some = slice(start, start + fit)
    columns = columns_message(stats_of(some)) if fit else columns_message(_no_stats(0))
    answer: Message = {
        "version": version,
        "names": paths_message(names[:fit]),
        "more_names": some.stop < count,
    }
    return Reply({**answer, **columns})


def _stats_of(rows: Rows, some: Span) -> Stats:
    records = rows.records[some]
    return Stats(*(records[name] for name in _COLUMNS))


def _no_stats(count: int) -> Stats:
    return Stats(
        np.full(count, Kind.TOMBSTONE, np.uint8),
        np.zeros(count, np.uint16),
        np.zeros(count, np.uint64),
        np.zeros(count, np.int64),
    )


def _behind(name: str) -> MetadataBehind:
    return MetadataBehind(
        f"the metadata of {name!r} is behind its chunks", advice=f"run `dlcmd recover {name}`"
    )


def _no_folder(name: str, folder: bytes) -> NoSuchPath:
    return NoSuchPath(f"{shown(folder)} in dataset {name!r} is not a folder")
