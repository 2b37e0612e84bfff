"""An object store with a fixed delay for each request and a limited bandwidth (`store.c`)."""

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.storage.metadata.redis_servers import RedisServer
from tests.storage.objects.s3_server import credentials

from .dlcmd import Dlcmd
from .reading import compiled

BUCKET = "bucket"
STORE_S, STORE_BYTES_PER_S = 0.005, 200e6
_SOURCE = Path(__file__).with_suffix(".c")
_ANSWER_S = 10.0
_END_S = 10.0


@dataclass(frozen=True, slots=True)
class StoreCounts:
    requests: int
    bytes: int

    def __sub__(self, earlier: "StoreCounts") -> "StoreCounts":
        return StoreCounts(self.requests - earlier.requests, self.bytes - earlier.bytes)


@dataclass(frozen=True, slots=True)
class Store:
    """A running store: its endpoint, and the folder with the objects of `BUCKET` as files."""

    endpoint: str
    bucket: Path

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a client of S3 that shall use this store. mosaicml-streaming has a
        variable of its own."""
        return {**credentials(self.endpoint), "S3_ENDPOINT_URL": self.endpoint}

    def counts(self) -> StoreCounts:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{self.endpoint}/counts", timeout=_ANSWER_S) as answer:
            return StoreCounts(**json.load(answer))


@contextmanager
def serving(
    folder: Path, *, delay_s: float, bytes_per_s: float, address: str = "127.0.0.1"
) -> Iterator[Store]:
    """Serve the present and future files in a new folder `BUCKET` of a folder.

    Each request takes at least `delay_s`, and all connections share `bytes_per_s`. The server ends
    with this process in any case.
    """
    bucket = folder / BUCKET
    bucket.mkdir()
    program = compiled(_SOURCE, folder, "-pthread")
    words = [str(program), str(folder), str(round(delay_s * 1e6)), str(round(bytes_per_s)), address]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline())
            yield Store(f"http://{address}:{port}", bucket)
        finally:
            process.stdin.close()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()


@dataclass(frozen=True, slots=True)
class SlowStore:
    """A store with a dataset; the metadata are in a Redis with this URL."""

    store: Store
    redis: str
    bytes_per_s: float

    def user(self, folder: Path) -> Dlcmd:
        """A user without any cached data of the dataset."""
        dlcmd = Dlcmd(folder)
        dlcmd.environment |= self.store.environment
        dlcmd.environment["DIESEL_URL"] = f"s3://{BUCKET}?meta={self.redis}"
        return dlcmd


@contextmanager
def slow_store(
    folder: Path,
    source: Path,
    dataset: str,
    *options: str,
    delay_s: float = STORE_S,
    bytes_per_s: float = STORE_BYTES_PER_S,
) -> Iterator[SlowStore]:
    """Put the files below `source` as a dataset with these options, and serve it."""
    served = folder / "store"
    served.mkdir()
    with (
        serving(served, delay_s=delay_s, bytes_per_s=bytes_per_s) as store,
        RedisServer(folder / "redis") as redis,
    ):
        dlcmd = Dlcmd(folder / "put", store=store.bucket)
        dlcmd.environment["DIESEL_URL"] = f"{dlcmd.url}?meta={redis.url}"
        dlcmd.seconds("put", *options, str(source), dataset)
        yield SlowStore(store, redis.url, bytes_per_s)
