"""Puts the parts of a worker together: stores, caches, accounts, handlers of requests."""

import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from uuid import UUID

from diesel_fs.cache.disk.chunks import DiskTier
from diesel_fs.cache.disk.marker import prepare_cache_folder
from diesel_fs.cache.read_through import ReadThroughCache
from diesel_fs.cache.readers.range_reader import RangeReader
from diesel_fs.cache.tiers import CacheTier, MemoryTier
from diesel_fs.errors import DieselError, ObjectMissing
from diesel_fs.metrics import MetricCells
from diesel_fs.remote.snapshot_transfer import CompressedSnapshots
from diesel_fs.repository.local import LocalRepository
from diesel_fs.settings import cache_folder
from diesel_fs.storage.metadata.redis.address import parse_redis_url
from diesel_fs.storage.objects.cloud.direct import open_buckets_directly
from diesel_fs.storage.objects.cloud.location import parse_bucket_url, resolve_access
from diesel_fs.storage.objects.store import ObjectStore
from diesel_fs.storage.open_stores import open_accounts, open_objects
from diesel_fs.urls import CLOUD_SCHEMES, RepositoryUrl, parse_url, shown_url

from ..accounts.authentication import TableAuthenticator
from ..accounts.handlers import account_handlers
from ..connections.connection import ConnectionContext
from ..connections.listener import most_connections
from ..limits import ConnectionLimits
from ..requests.dispatcher import Dispatcher
from ..requests.head_cache import HeadCache
from ..requests.pipelined_heads import pipelined_heads
from ..requests.table import RequestTable, takes_payload
from .metadata_watch import RedisRuns, watch_metadata
from .worker_config import WorkerConfig

log = logging.getLogger("diesel.server")

_STORE = "the server's store"
_ACCOUNTS_S = 3.0  # for an answer of the accounts' store

MEMORY_TIER_BYTES = 256 << 20
"""Without a cache folder, a worker keeps this much in memory: dozens of chunks."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """`background` has functions that run as tasks beside the connections."""

    context: ConnectionContext
    background: Sequence[Callable[[], Awaitable[None]]] = ()
    close: Callable[[], None] = lambda: None


WireUp = Callable[[WorkerConfig, MetricCells], Wiring]
"""Tests pass others than `wire_up`. Blocks. Raises DieselError."""


def wire_up(config: WorkerConfig, cells: MetricCells) -> Wiring:
    """Blocks. If the metadata store cannot be opened, raises the reason at the server's start; a
    worker that is started later serves without it."""
    open_buckets_directly()
    url = parse_url(config.url)
    objects = _objects(url)
    folder = prepare_cache_folder(Path(config.cache), objects) if config.cache else None
    tier: CacheTier = (
        MemoryTier(MEMORY_TIER_BYTES)
        if folder is None
        else DiskTier(folder, objects.store_id, config.cache_bytes)
    )
    cache = ReadThroughCache(objects, tier, counted=_tier_counter(cells))
    repository = LocalRepository(cache, None, url=url)
    repository.open_metadata(create=True)
    problem = repository.meta_problem
    if problem is not None:
        if config.is_first:
            raise problem
        log.error("the worker serves without the metadata store until it is there: %s", problem)
    login = TableAuthenticator(lambda: open_accounts(url, objects, deadline_s=_ACCOUNTS_S))
    reads = RangeReader(cache)
    compressed = CompressedSnapshots(_compressed_folder(folder, objects.store_id))
    heads = HeadCache(repository, pipelined=pipelined_heads(url))
    table = RequestTable(repository, reads, compressed, heads, cells)
    runs = RedisRuns(url.meta) if url.meta else None

    def close() -> None:
        if runs is not None:
            runs.close()
        login.close()
        heads.close()
        reads.close()
        cache.close()
        repository.close()

    background = [partial(watch_metadata, repository, runs)] if config.slot == 0 else []
    context = ConnectionContext(
        objects.store_id,
        login,
        Dispatcher({**table.handlers(), **account_handlers(login)}),
        cells,
        ConnectionLimits(most_connections()),
        takes_payload=takes_payload,
        redactions=redactions(url, config.cache),
    )
    return Wiring(context, background, close)


def redactions(url: RepositoryUrl, cache: str) -> dict[str, str]:
    """Texts that clients must not see, longest first, and their replacements."""
    found = {url.full_url: _STORE, url.objects_url: _STORE}
    if url.scheme == "file":
        found |= dict.fromkeys((str(url.path), os.path.realpath(url.path)), _STORE)
    elif url.scheme in CLOUD_SCHEMES:
        endpoint = resolve_access(parse_bucket_url(url.objects_url), os.environ).host
        found |= dict.fromkeys((f"{url.scheme}://{url.host}", f"{url.host}/{url.prefix}"), _STORE)
        found |= {f" at {endpoint}": "", endpoint: _STORE}
    if url.meta:
        address = parse_redis_url(url.meta)
        addresses = {url.meta, shown_url(url.meta), str(address), *map(str, address.hosts)}
        sentences = {f"the metadata store {each}" for each in addresses}
        found |= dict.fromkeys(addresses | sentences, "the server's metadata store")
    caches = [cache] if cache else []
    with suppress(DieselError):
        caches.append(str(cache_folder()))
    for each in caches:
        found |= dict.fromkeys((each, os.path.realpath(each)), "the server's cache")
    return {text: found[text] for text in sorted(found, key=len, reverse=True) if text not in "/"}


def _compressed_folder(cache: Path | None, store: UUID) -> Path | None:
    if cache is not None:
        return cache / store.hex / "snapshots"
    try:
        return cache_folder() / "pieces" / store.hex
    except DieselError as error:  # the user has no home, or no room in it
        log.info("compressed snapshots are not kept: %s", error)
        return None


def _objects(url: RepositoryUrl) -> ObjectStore:
    try:
        return open_objects(url, create=False)
    except ObjectMissing as error:
        make = f'if it is to be new: dlcmd --url "{url}" user add NAME --admin'
        error.advice = "; ".join(filter(None, [error.advice, make]))
        raise


def _tier_counter(cells: MetricCells) -> Callable[[str, int, int], None]:
    def counted(kind: str, reads: int, size: int) -> None:
        cells.add("diesel_tier_hits_total", kind, amount=reads)
        cells.add("diesel_tier_bytes_total", kind, amount=size)

    return counted
