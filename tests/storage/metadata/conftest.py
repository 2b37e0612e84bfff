"""The places of stores: a file, and Redis servers with stores that hold `FIRST`."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from diesel_fs.storage.metadata.redis.store import RedisMetadata
from tests.storage.metadata.metadata_stores import FIRST, IDENTITY, NAME, filled
from tests.storage.metadata.redis_servers import (
    RedisCluster,
    RedisServer,
    emptied_server,
    free_port,
    shared_cluster,
)
from tests.storage.metadata.watched_redis import WatchedLink, watched_link


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "meta.sqlite"


@pytest.fixture
def shared() -> RedisServer:
    return emptied_server()


@pytest.fixture
def link(shared: RedisServer) -> WatchedLink:
    return watched_link(shared.url)


@pytest.fixture
def stored(link: WatchedLink) -> Iterator[RedisMetadata]:
    with closing(RedisMetadata(link)) as store:
        store.create(NAME, IDENTITY)
        store.commit(IDENTITY, FIRST.batch())
        yield store


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    options = {"appendonly": "yes", "appendfsync": "always", "dbfilename": "dump"}
    with RedisServer(tmp_path / "redis", options, port=free_port()) as server:
        yield server


@pytest.fixture
def own(server: RedisServer) -> Iterator[RedisMetadata]:
    with closing(filled(server.url)) as store:
        yield store


@pytest.fixture
def cluster() -> RedisCluster:
    cluster = shared_cluster()
    cluster.flush()
    return cluster
