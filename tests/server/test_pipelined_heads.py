"""Heads of datasets read from a Redis in the event loop, and in a thread where that fails."""

import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
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
from diesel_server import pipelined_heads as redis_glances
from diesel_server.head_cache import HeadCache
from diesel_server.pipelined_heads import PipelinedHeadReads, pipelined_heads
from tests.storage.metadata.batches import files
from tests.storage.metadata.redis_servers import RedisServer, free_port

NAME = "flowers"
IDENTITY = uuid.UUID(int=7)
LEARN = 3


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    """One that wants a password, and whose database is not the first."""
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


async def _learnt(glances: PipelinedHeadReads) -> DatasetHead:
    for _ in range(LEARN):
        found = await glances.head(NAME)
    assert found is not None
    return found


@pytest.mark.parametrize("tcp", [False, True])
def test_heads_are_read_over_connections_of_the_loop(
    redis: RedisServer, meta: RedisMetadata, tcp: bool
) -> None:
    async def main() -> None:
        with closing(PipelinedHeadReads(parse_redis_url(_url(redis, tcp=tcp)))) as glances:
            assert await _learnt(glances) == meta.head(NAME)
            meta.commit(IDENTITY, files(2, b"c").batch())
            assert await glances.head(NAME) == meta.head(NAME)
            assert len(glances._idle) == 1
            assert await glances.head("another") is None

    trio.run(main)


def test_many_reads_at_once_share_few_connections(redis: RedisServer, meta: RedisMetadata) -> None:
    for n in range(20):
        meta.create(f"d{n}", uuid.UUID(int=100 + n))

    async def main() -> None:
        with closing(PipelinedHeadReads(parse_redis_url(_url(redis)))) as glances:
            found: dict[str, DatasetHead | None] = {}

            async def ask(name: str) -> None:
                found[name] = await glances.head(name)

            for _ in range(LEARN):
                async with trio.open_nursery() as nursery:
                    for n in range(20):
                        nursery.start_soon(ask, f"d{n}")
            assert len(glances._idle) <= 8
            for n in range(20):
                assert found[f"d{n}"] == meta.head(f"d{n}")

    trio.run(main)


def test_connections_that_were_closed_are_replaced(redis: RedisServer, meta: RedisMetadata) -> None:
    """All of them once one is found to be: only one look is in vain."""

    async def main() -> None:
        with closing(PipelinedHeadReads(parse_redis_url(_url(redis)))) as glances:
            true = await _learnt(glances)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(glances.head, NAME)
                nursery.start_soon(glances.head, "another")
            assert len(glances._idle) == 2
            redis.client().client_kill_filter(_type="normal", skipme=True)
            assert await glances.head(NAME) is None
            assert await glances.head(NAME) == true

    trio.run(main)


def test_after_a_hang_of_redis_its_late_reply_is_not_used(
    redis: RedisServer, meta: RedisMetadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_glances, "READ_S", 0.2)
    monkeypatch.setattr(redis_glances, "OPEN_S", 0.3)

    async def main() -> None:
        with closing(PipelinedHeadReads(parse_redis_url(_url(redis)))) as glances:
            old = await _learnt(glances)
            redis.signal(signal.SIGSTOP)
            try:
                began_s = time.monotonic()
                assert await glances.head(NAME) is None
                assert 0.15 < time.monotonic() - began_s < 5
                began_s = time.monotonic()
                for _ in range(100):
                    assert await glances.head(NAME) is None
                assert time.monotonic() - began_s < 0.15, "each of them has waited"
            finally:
                redis.signal(signal.SIGCONT)
            meta.commit(IDENTITY, files(2, b"c").batch())
            true = meta.head(NAME)
            await trio.sleep(0.4)
            assert await glances.head(NAME) == true != old

    trio.run(main)


def test_a_redis_that_is_away_or_wants_another_password_proves_nothing(
    redis: RedisServer, meta: RedisMetadata
) -> None:
    wrong = _url(redis).replace("no%2Fword", "another")
    nowhere = f"redis://127.0.0.1:{free_port()}"

    async def main() -> None:
        for url in (wrong, nowhere, "unix:///nowhere/at/all"):
            with closing(PipelinedHeadReads(parse_redis_url(url))) as glances:
                for _ in range(2 * LEARN):
                    assert await glances.head(NAME) is None
                assert not glances._idle

    trio.run(main)


@pytest.mark.parametrize(
    "meta_url", ["", "rediss://h", "redis+sentinel://h/main", "redis+cluster://h"]
)
def test_stores_that_are_read_in_a_thread_only(meta_url: str) -> None:
    url = parse_url(f"file:///store?meta={quote(meta_url)}" if meta_url else "file:///store")
    assert pipelined_heads(url) is None


# Markers


class Slow:
    """The metadata store of a repository, whose looks are counted."""

    def __init__(self, repository: LocalRepository) -> None:
        self.long_looks = 0
        real = repository.meta.head

        def marker(name: str) -> DatasetHead:
            self.long_looks += 1
            return real(name)

        repository.meta.head = marker  # type: ignore[method-assign]  # it is counted


@pytest.fixture
def repository(tmp_path: Path, redis: RedisServer) -> Iterator[LocalRepository]:
    url = f"{(tmp_path / 'store').as_uri()}?meta={quote(_url(redis))}"
    with LocalRepository.open(url, create=True) as opened:
        opened.begin(NAME)
        yield opened


@pytest.fixture
def watched() -> Iterator[Callable[[LocalRepository], HeadCache]]:
    """Makes markers as a server does."""
    made: list[HeadCache] = []

    def make(repository: LocalRepository) -> HeadCache:
        made.append(HeadCache(repository, pipelined=pipelined_heads(repository.url)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_reads_of_heads_take_no_thread_after_the_first(
    repository: LocalRepository, watched: Callable[[LocalRepository], HeadCache]
) -> None:
    counted = Slow(repository)

    async def main() -> None:
        markers = watched(repository)
        for _ in range(50):
            look = await markers.now(NAME)
            assert not look.behind
        assert counted.long_looks <= LEARN
        with pytest.raises(NoSuchDataset):
            await markers.now("another")

    trio.run(main)


def test_a_head_is_read_after_the_call_began(
    repository: LocalRepository, watched: Callable[[LocalRepository], HeadCache]
) -> None:
    """While somebody commits all the time, and others ask."""
    identity = repository.dataset(NAME).identity
    done, versions = threading.Event(), [0]

    def commit() -> None:
        for number in range(1, 150):
            versions.append(repository.meta.commit(identity, files(number, b"f").batch()))
        done.set()

    async def main() -> None:
        markers, looks = watched(repository), 0

        async def ask() -> None:
            nonlocal looks
            while not done.is_set():
                known = versions[-1]
                assert (await markers.now(NAME)).head.version >= known
                looks += 1

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(ask)
                await trio.to_thread.run_sync(commit)
        assert looks > 20

    trio.run(main)


def test_a_snapshot_newer_than_the_head_is_noticed(
    repository: LocalRepository,
    watched: Callable[[LocalRepository], HeadCache],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within half a second or so, although the glance alone knows nothing of it."""

    async def main() -> None:
        markers = watched(repository)
        for _ in range(2 * LEARN):
            assert not (await markers.now(NAME)).behind
        monkeypatch.setattr(repository.snapshots, "newest", lambda _: 1 << 60)
        with trio.fail_after(10):
            while True:
                await trio.sleep(0.01)
                if (await markers.now(NAME)).behind:
                    break
        for _ in range(20):
            assert (await markers.now(NAME)).behind

    trio.run(main)


def test_a_redis_that_is_away_is_an_error_and_comes_back(
    repository: LocalRepository,
    watched: Callable[[LocalRepository], HeadCache],
    redis: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redis_glances, "OPEN_S", 0.1)
    monkeypatch.setattr("diesel_server.head_cache.OPEN_S", 0.1)

    async def main() -> None:
        markers = watched(repository)
        for _ in range(LEARN + 1):
            await markers.now(NAME)
        redis.kill()
        with pytest.raises(MetadataError):
            await markers.now(NAME)
        redis.start()
        found: object = None
        with trio.fail_after(30):
            while found is None:
                await trio.sleep(0.05)
                try:
                    found = await markers.now(NAME)
                except NoSuchDataset:  # it has forgotten all, which the long way says
                    found = "nothing"
                except MetadataError:
                    continue
        assert found == "nothing"

    trio.run(main)
