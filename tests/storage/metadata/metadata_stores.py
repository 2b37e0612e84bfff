"""Empty metadata stores of every kind, for tests that run over all of them."""

import sqlite3
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Protocol

from diesel_fs.storage.metadata.redis.store import RedisMetadata
from diesel_fs.storage.metadata.sqlite.store import SqliteMetadata
from diesel_fs.storage.metadata.store import MetadataStore
from tests.storage.metadata.batches import Chunk, files
from tests.storage.metadata.redis_servers import emptied_server, shared_cluster

NAME = "flowers"
IDENTITY = uuid.UUID(int=7)
NOW_NS = 1_800_000_000 * 10**9
FIRST = files(1, b"a/x", b"b")


class Clock:
    def __init__(self) -> None:
        self.ns = NOW_NS

    def __call__(self) -> int:
        return self.ns

    def seconds(self) -> float:
        return self.ns / 1e9

    def advance(self, seconds: float) -> None:
        self.ns += int(seconds * 1e9)


class Opener(Protocol):
    """Opens the same store each time it is called; the store is empty at first."""

    def __call__(self, *, deadline_s: float = 10.0) -> MetadataStore: ...


def sqlite_opener(folder: Path, clock: Clock) -> Opener:
    def opened(*, deadline_s: float = 10.0) -> MetadataStore:
        path = folder / "meta.sqlite"
        return SqliteMetadata.open(path, create=True, deadline_s=deadline_s, clock_ns=clock)

    return opened


def edit(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute(statement)


def redis_opener(clock: Clock, buckets: int) -> Opener:
    server = emptied_server()

    def opened(*, deadline_s: float = 10.0) -> MetadataStore:
        return RedisMetadata.open(
            server.url, deadline_s=deadline_s, clock_ns=clock, buckets=buckets
        )

    return opened


def filled(url: str, deadline_s: float = 10, buckets: int = 0) -> RedisMetadata:
    meta = RedisMetadata.open(url, deadline_s=deadline_s, buckets=buckets)
    meta.create(NAME, IDENTITY)
    meta.commit(IDENTITY, FIRST.batch())
    return meta


def cluster_opener(folder: Path, clock: Clock) -> Opener:
    cluster = shared_cluster()
    cluster.flush()

    def opened(*, deadline_s: float = 10.0) -> MetadataStore:
        return RedisMetadata.open(cluster.url, deadline_s=deadline_s, clock_ns=clock)

    return opened


STORES: dict[str, Callable[[Path, Clock], Opener]] = {
    "sqlite": sqlite_opener,
    "redis": lambda _, clock: redis_opener(clock, 1),
    "redis-buckets": lambda _, clock: redis_opener(clock, 5),
    "redis-cluster": cluster_opener,
}


def commit(meta: MetadataStore, *chunks: Chunk) -> int:
    return [meta.commit(IDENTITY, chunk.batch()) for chunk in chunks][-1]
