"""What a worker serves: a repository, its fast tier, its accounts, put together.

Owned here: which parts there are, and what of them is counted. Not owned: what the parts do.
"""

import inspect
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from uuid import UUID

from diesel_fs.cache.disk import DiskTier, prepare_cache_folder
from diesel_fs.cache.range_reader import RangeReader
from diesel_fs.cache.read_through import ReadThroughCache
from diesel_fs.cache.tiers import CacheTier, MemoryTier
from diesel_fs.errors import DieselError, ObjectMissing
from diesel_fs.metrics import MetricCells
from diesel_fs.remote.snapshot_transfer import CompressedSnapshots
from diesel_fs.repository.local import LocalRepository
from diesel_fs.repository.validation import ValidatedChunk
from diesel_fs.settings import cache_folder
from diesel_fs.storage.accounts.account import Account
from diesel_fs.storage.metadata.redis.address import parse_redis_url
from diesel_fs.storage.objects.cloud import direct as clouds
from diesel_fs.storage.objects.store import ObjectStore
from diesel_fs.storage.open_stores import open_accounts, open_objects
from diesel_fs.urls import RepositoryUrl, parse_url, shown_url

from .account_handlers import account_handlers
from .authentication import TableAuthenticator
from .connection import Authenticator as Logins
from .head_cache import HeadCache
from .metadata_watch import RedisRuns, watch_metadata
from .pipelined_heads import pipelined_heads
from .request_table import handlers, takes_payload
from .requests import Handler, Reply, Request
from .worker_config import WorkerConfig

log = logging.getLogger("diesel.server")

MEMORY_TIER_BYTES = 256 << 20
"""Of a worker without a folder for the tier: dozens of chunks that are read again and again."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """What the connections of a worker need, what runs beside them, and the end of it all."""

    store_id: UUID
    login: Logins
    handlers: Mapping[str, Handler]
    takes_payload: Callable[[Account, str, int], bool] = lambda *_: True
    background: Sequence[Callable[[], Awaitable[None]]] = ()
    close: Callable[[], None] = lambda: None
    redactions: Mapping[str, str] = field(default_factory=dict)


WireUp = Callable[[WorkerConfig, MetricCells], Wiring]
"""Makes the wiring of a task; blocks. Raises DieselError where that cannot be served."""


def wire_up(task: WorkerConfig, cells: MetricCells) -> Wiring:
    """The wiring of a real server."""
    clouds.open_buckets_directly()
    url = parse_url(task.url)
    objects = _objects(url)
    place = prepare_cache_folder(Path(task.cache), objects) if task.cache else None
    shelf: CacheTier = (
        MemoryTier(MEMORY_TIER_BYTES)
        if place is None
        else DiskTier(place, objects.store_id, task.cache_bytes)
    )
    tier = ReadThroughCache(objects, shelf, counted=_tier_counter(cells))
    repository = CountedRepository(tier, url, cells)
    repository.open_metadata(create=True)
    problem = repository.meta_problem
    if problem is not None:
        if task.is_first:
            raise problem
        log.error("serves without metadata store until it is there: %s", problem)
    login = TableAuthenticator(lambda: open_accounts(url, objects, deadline_s=_ACCOUNTS_S))
    reads = RangeReader(tier)
    pieces = CompressedSnapshots(_pieces_folder(place, objects.store_id))
    markers = HeadCache(repository, glances=pipelined_heads(url))
    table = {**handlers(repository, reads, pieces, markers), **account_handlers(login)}
    put = table["put"]
    assert inspect.iscoroutinefunction(put)
    table["put"] = _counted(put, cells)

    runs = RedisRuns(url.meta) if url.meta else None

    def close() -> None:
        if runs is not None:
            runs.close()
        login.close()
        markers.close()
        reads.close()
        tier.close()
        repository.close()

    watching = [partial(watch_metadata, repository, runs)] if task.slot == 0 else []
    places = _places(url, task.cache)
    return Wiring(objects.store_id, login, table, takes_payload, watching, close, places)


def _places(url: RepositoryUrl, cache: str) -> dict[str, str]:
    """What errors may call the places of a server, the longest first, and what a client, who is not
    to know them, is told in place of each.
    """
    found = {url.full_url: "the server's store", url.objects_url: "the server's store"}
    if url.scheme == "file":
        found |= dict.fromkeys((str(url.path), os.path.realpath(url.path)), "the server's store")
    elif url.prefix:
        found[f"{url.host}/{url.prefix}"] = "the server's store"
    if url.meta:
        found |= dict.fromkeys(
            (url.meta, shown_url(url.meta), str(parse_redis_url(url.meta))), "its metadata store"
        )
    if cache:
        found |= dict.fromkeys((cache, os.path.realpath(cache)), "the server's cache")
    return {place: found[place] for place in sorted(found, key=len, reverse=True) if place > "/"}


_ACCOUNTS_S = 3.0


def _pieces_folder(place: Path | None, store: UUID) -> Path | None:
    """Where compressed snapshots are kept: beside the tier, else with other private copies."""
    if place is not None:
        return place / store.hex / "snapshots"
    try:
        return cache_folder() / "pieces" / store.hex
    except DieselError as error:  # a user without a home, or without room in it
        log.info("compressed snapshots are not kept: %s", error)
        return None


def _objects(url: RepositoryUrl) -> ObjectStore:
    try:
        return open_objects(url, create=False)
    except ObjectMissing as error:
        make = f'if it is to be new: dlcmd --url "{url}" user add NAME --admin'
        error.advice = "; ".join(filter(None, [error.advice, make]))
        raise


class CountedRepository(LocalRepository):
    """A repository whose commits are counted."""

    def __init__(self, objects: ObjectStore, url: RepositoryUrl, cells: MetricCells) -> None:
        super().__init__(objects, None, url=url)
        self._counted_in = cells

    def commit_all(self, identity: UUID, chunks: Iterable[ValidatedChunk]) -> int:
        version = super().commit_all(identity, chunks)
        self._counted_in.add("diesel_commits_total")
        return version


def _tier_counter(cells: MetricCells) -> Callable[[str, int, int], None]:
    def counted(kind: str, reads: int, size: int) -> None:
        cells.add("diesel_tier_hits_total", kind, amount=reads)
        cells.add("diesel_tier_bytes_total", kind, amount=size)

    return counted


def _counted(put: Callable[[Request], Awaitable[Reply]], cells: MetricCells) -> Handler:
    """The handler of `put`, whose successes are counted."""

    async def handle(request: Request) -> Reply:
        reply = await put(request)
        cells.add("diesel_chunks_accepted_total")
        cells.add("diesel_uploaded_bytes_total", amount=len(request.payload))
        return reply

    return handle
