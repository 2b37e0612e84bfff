"""The chunk cache of a real server: clients get the right bytes with any change to its folder."""

import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from diesel_fs.cache.readers.entry_reader import EntryReader
from diesel_fs.credentials import Credentials
from diesel_fs.format.chunk import CHUNK_BYTES_MIN
from diesel_fs.ingest import FolderSource, PutOptions, put
from diesel_fs.remote.open import open_repository
from diesel_fs.repository.local import LocalRepository
from tests.waiting import until

from ..trees import write
from .program import Server, new_repository

FILES = {f"d{i % 3}/{i:03}": os.urandom(3000 + i) for i in range(200)}


class CachedServer:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self.url = (folder / "store").as_uri()
        self.user: Credentials = new_repository(self.url)["root"]
        options = PutOptions(chunk_bytes=CHUNK_BYTES_MIN, compress="none", jobs=1)
        with LocalRepository.open(self.url) as repository:
            put(repository, "ds", FolderSource(write(folder / "source", FILES)), options=options)
            self.chunk_count = repository.view("ds").chunk_count

    def server(self, workers: int = 1) -> Server:
        cache = ("--cache-dir", self.cache, "--cache-size", "1G")
        metrics = ("--metrics", "127.0.0.1:0")
        return Server(self.folder, "--store", self.url, *cache, *metrics, workers=workers)

    def cached(self) -> list[Path]:
        return [path for path in self.cache.glob("*/*/*") if len(path.name) == 32]

    def read_all(self, server: Server, seed: int = 1) -> dict[str, int]:
        with open_repository(server.url, self.user) as repository:
            view = repository.view("ds")
            reader = EntryReader(view, repository.objects, 100_000)
            order = np.random.default_rng(seed).permutation(view.files())
            for index in order.tolist():
                assert bytes(reader.read(index)) == FILES[os.fsdecode(view.path(index))]
            for index, content in zip(order.tolist(), reader.read_many(order), strict=True):
                assert bytes(content) == FILES[os.fsdecode(view.path(index))]
            return reader.stats()

    def commit(self, server: Server) -> None:
        self.read_all(server)
        until(lambda: len(self.cached()) == self.chunk_count, "the cache to be filled")


@pytest.fixture
def place(tmp_path: Path) -> CachedServer:
    return CachedServer(tmp_path)


def counts(server: Server) -> dict[str, float]:
    url = f"http://127.0.0.1:{server.metrics_port}/metrics"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=20) as answer:
        lines: Iterator[str] = iter(answer.read().decode().splitlines())
        start = 'diesel_tier_hits_total{tier="'
        return {
            line[len(start) :].partition('"')[0]: float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith(start)
        }


def test_a_miss_fills_the_cache_and_later_reads_spare_the_store(place: CachedServer) -> None:
    with place.server() as server:
        place.commit(server)
        before = counts(server)
        place.read_all(server)
        after = counts(server)
    assert before["store"] > 0
    assert after["store"] == before["store"]
    assert after["disk"] - before["disk"] >= len(FILES) // 2


def test_B3_damage_in_the_cache_is_healed_from_the_store(place: CachedServer) -> None:
    """The damage happens after the server has checked the chunk, so only the client notices it."""
    with place.server() as server:
        place.commit(server)
        for path in place.cached():
            content = bytearray(path.read_bytes())
            content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
            with path.open("r+b") as file:
                file.write(content)
        stats = place.read_all(server)
        assert stats["healed"] > 0, "the test must have met the damage"
        assert stats["damaged"] == 0
        until(lambda: len(place.cached()) == place.chunk_count, "the cache to be filled again")
        assert place.read_all(server)["healed"] == 0


def test_J11_a_server_refuses_a_folder_that_is_not_its_own(place: CachedServer) -> None:
    place.cache = place.folder / "store" / "cache"
    with pytest.raises(AssertionError, match="lie in each other"):
        place.server()
    place.cache = place.folder / "open"
    place.cache.mkdir()
    place.cache.chmod(0o777)
    with pytest.raises(AssertionError, match="others can write"):
        place.server()
    assert not list(place.cache.iterdir())
