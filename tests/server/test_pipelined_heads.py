"""Heads of datasets read from a Redis in the event loop, and in a thread if that fails."""

import signal
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest
import trio

from diesel_fs.errors import MetadataError, NoSuchDataset
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.metadata.redis.address import parse_redis_url
from diesel_fs.storage.metadata.redis.store import RedisMetadata
from diesel_fs.storage.metadata.store import DatasetHead
from diesel_fs.urls import parse_url
from diesel_server.requests import pipelined_heads as pipelined
from diesel_server.requests.head_cache import HeadCache
from diesel_server.requests.pipelined_heads import PipelinedHeadReads, pipelined_heads
from tests.rows import each_row
from tests.storage.metadata.batches import files
from tests.storage.metadata.redis_servers import RedisServer, free_port
from tests.waiting import soon

NAME = "flowers"
IDENTITY = uuid.UUID(int=7)
LEARN = 3


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis", {"requirepass": "no/word"}, port=free_port()) as server:
        yield server


@pytest.fixture
def meta(redis: RedisServer) -> Iterator[RedisMetadata]:
    with closing(RedisMetadata.open(_url(redis))) as store:
        store.create(NAME, IDENTITY)
        store.commit(IDENTITY, files(1, b"a/x", b"b").batch())
        yield store


def _url(redis: RedisServer, *, tcp: bool = False) -> str:
    if tcp:
        return f"redis://:no%2Fword@127.0.0.1:{redis.port}/3"
    return f"unix://:no%2Fword@{redis.socket}?db=3"


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelined, "READ_S", 0.2)
    monkeypatch.setattr(pipelined, "OPEN_S", 0.3)


@pytest.fixture
def reads(redis: RedisServer, meta: RedisMetadata) -> Iterator[PipelinedHeadReads]:
    with closing(PipelinedHeadReads(parse_redis_url(_url(redis)))) as found:
        yield found


async def _learnt(reads: PipelinedHeadReads) -> DatasetHead:
    for _ in range(LEARN):
        found = await reads.head(NAME)
    assert found is not None
    return found


@pytest.mark.parametrize("tcp", [False, True])
async def test_heads_are_read_over_connections_of_the_loop(
    redis: RedisServer, meta: RedisMetadata, tcp: bool
) -> None:
    with closing(PipelinedHeadReads(parse_redis_url(_url(redis, tcp=tcp)))) as reads:
        assert await _learnt(reads) == meta.head(NAME)
        meta.commit(IDENTITY, files(2, b"c").batch())
        assert await reads.head(NAME) == meta.head(NAME)
        assert len(reads._idle) == 1
        assert await reads.head("another") is None


async def test_reads_share_few_connections(reads: PipelinedHeadReads, meta: RedisMetadata) -> None:
    names = [f"d{n}" for n in range(20)]
    for name in names:
        meta.create(name, uuid.uuid4())
    found: dict[str, DatasetHead | None] = {}

    async def ask(name: str) -> None:
        found[name] = await reads.head(name)

    for _ in range(LEARN):
        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(ask, name)
    assert len(reads._idle) <= 8
    assert found == {name: meta.head(name) for name in names}


async def test_lost_connections_are_replaced(redis: RedisServer, reads: PipelinedHeadReads) -> None:
    """When one is found closed, all are: only one attempt fails."""
    true = await _learnt(reads)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reads.head, NAME)
        nursery.start_soon(reads.head, "another")
    assert len(reads._idle) == 2
    redis.client().client_kill_filter(_type="normal", skipme=True)
    assert await reads.head(NAME) is None
    assert await reads.head(NAME) == true


@pytest.mark.usefixtures("short_waits")
async def test_after_a_hang_of_redis_its_late_reply_is_not_used(
    redis: RedisServer, reads: PipelinedHeadReads, meta: RedisMetadata
) -> None:
    old = await _learnt(reads)
    redis.signal(signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        assert await reads.head(NAME) is None
        assert 0.15 < time.monotonic() - began_s < 5
        began_s = time.monotonic()
        for _ in range(100):
            assert await reads.head(NAME) is None
        assert time.monotonic() - began_s < 0.15, "each of them has waited"
    finally:
        redis.signal(signal.SIGCONT)
    meta.commit(IDENTITY, files(2, b"c").batch())
    true = meta.head(NAME)
    await trio.sleep(0.4)
    assert await reads.head(NAME) == true != old


async def test_a_redis_that_is_away_or_wants_another_password_proves_nothing(
    redis: RedisServer, meta: RedisMetadata
) -> None:
    wrong = _url(redis).replace("no%2Fword", "another")
    for url in (wrong, f"redis://127.0.0.1:{free_port()}", "unix:///nowhere/at/all"):
        with closing(PipelinedHeadReads(parse_redis_url(url))) as reads:
            for _ in range(2 * LEARN):
                assert await reads.head(NAME) is None
            assert not reads._idle


@each_row("meta_url", ["", "rediss://h", "redis+sentinel://h/main", "redis+cluster://h"])
def test_stores_that_are_read_in_a_thread_only(meta_url: str) -> None:
    url = parse_url(f"file:///store?meta={quote(meta_url)}" if meta_url else "file:///store")
    assert pipelined_heads(url) is None


# Under the cache of heads


@pytest.fixture
def repository(tmp_path: Path, redis: RedisServer) -> Iterator[LocalRepository]:
    url = f"{(tmp_path / 'store').as_uri()}?meta={quote(_url(redis))}"
    with LocalRepository.open(url, create=True) as opened:
        opened.begin(NAME)
        yield opened


@pytest.fixture
def heads(repository: LocalRepository) -> Iterator[HeadCache]:
    with closing(HeadCache(repository, pipelined=pipelined_heads(repository.url))) as found:
        yield found


async def test_reads_of_heads_take_no_thread_after_the_first(
    repository: LocalRepository, heads: HeadCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, long_looks = repository.meta.head, list[str]()

    def counted(name: str) -> DatasetHead:
        long_looks.append(name)
        return real(name)

    monkeypatch.setattr(repository.meta, "head", counted)
    for _ in range(50):
        assert not (await heads.now(NAME)).behind
    assert len(long_looks) <= LEARN
    with pytest.raises(NoSuchDataset):
        await heads.now("another")


async def test_heads_are_read_after_the_call(repository: LocalRepository, heads: HeadCache) -> None:
    identity = repository.dataset(NAME).identity
    done, versions, looks = threading.Event(), [0], [0]

    def commit() -> None:
        for number in range(1, 150):
            versions.append(repository.meta.commit(identity, files(number, b"f").batch()))
        done.set()

    async def ask() -> None:
        while not done.is_set():
            known = versions[-1]
            assert (await heads.now(NAME)).head.version >= known
            looks[0] += 1

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(ask)
            await trio.to_thread.run_sync(commit)
    assert looks[0] > 20


async def test_a_snapshot_newer_than_the_head_is_noticed(
    repository: LocalRepository, heads: HeadCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2 * LEARN):
        assert not (await heads.now(NAME)).behind
    monkeypatch.setattr(repository.snapshots, "newest", lambda _: 1 << 60)

    async def is_behind() -> bool:
        return (await heads.now(NAME)).behind

    await soon(is_behind, within_s=10)
    for _ in range(20):
        assert await is_behind()


async def test_a_redis_that_is_away_is_an_error_and_comes_back(
    heads: HeadCache, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipelined, "OPEN_S", 0.1)
    monkeypatch.setattr("diesel_server.requests.head_cache.OPEN_S", 0.1)
    for _ in range(LEARN + 1):
        await heads.now(NAME)
    redis.kill()
    with pytest.raises(MetadataError):
        await heads.now(NAME)
    redis.start()

    async def has_forgotten_all() -> bool:
        try:
            await heads.now(NAME)
        except NoSuchDataset:
            return True
        except MetadataError:
            return False
        pytest.fail("it has forgotten all")

    await soon(has_forgotten_all)
