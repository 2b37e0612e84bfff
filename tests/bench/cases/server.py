"""Benchmarks of a server between clients and their stores: its cost, and its savings.

Servers, Redis and the S3 server (moto's, in Python, one process) are programs of the bench's own on
loopback, and share this machine's processors with the clients.
"""

import http.client
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from diesel_fs.format.object_names import chunk_object
from diesel_fs.remote.open import open_configured
from diesel_fs.settings import load_settings
from tests.server.program import Server
from tests.storage.metadata.redis_servers import RedisServer, program
from tests.storage.objects.s3_server import Server as S3Server
from tests.storage.objects.s3_server import s3_server

from .. import probes
from ..dlcmd import Dlcmd
from ..inputs import D4
from ..probes.clients import SIGNED, sample
from ..report import Row, against, at_least
from ..samples import OURS, PeerMissing, Side, alternate, repeat
from ..workbench import Workbench
from .put import ENTRIES, RATE, rates

CLIENTS, FILES_EACH = 16, 200
BATCH, BATCHES = 128, 20
PIPELINES = (64, 1024, 8192)
STAT_CLIENTS, STATS_EACH = 4, 200_000
PASSES = 3

DIRECT, ALONE = "put without a server", "one client alone"
OBJECTS, SINGLES = f"{CLIENTS} clients of the S3 server", "single objects, S3 server"
CURL = "curl, S3 server"


class Serving:
    """Stores of its own with a user, and servers over them."""

    def __init__(self, stack: ExitStack, folder: Path, s3: S3Server | None = None) -> None:
        redis = stack.enter_context(RedisServer(folder / "redis"))
        self.dlcmd = Dlcmd(folder)
        self.store = self.dlcmd.url if s3 is None else s3.place()
        self.meta = redis.url
        if s3 is not None:
            self.dlcmd.environment.update(s3.environ)
        self._stack, self._folder = stack, folder
        self.use(f"{self.store}?meta={self.meta}")
        key = folder / "key"
        self.dlcmd.seconds("user", "add", "bench", "--admin", "--key-out", str(key))
        self.user = {"DIESEL_USER": "bench", "DIESEL_KEY": key.read_text().strip()}
        self.dlcmd.environment |= self.user

    def start(self, *options: str) -> Server:
        """Start a server; from now on `dlcmd` goes through it."""
        server = self._stack.enter_context(
            Server(
                self._folder / f"server-{time.time_ns()}",
                *("--store", self.store, "--meta", self.meta, *options),
                workers=min(4, len(os.sched_getaffinity(0))),
                environment=self.dlcmd.environment,
            )
        )
        self.use(server.url)
        return server

    def use(self, url: str) -> None:
        self.dlcmd.url = self.dlcmd.environment["DIESEL_URL"] = url

    def clients(self, *arguments: str | int) -> dict[str, float]:
        return probes.run("clients", self.dlcmd, D4.name, *map(str, arguments))

    def chunk_urls(self, endpoint: str) -> list[str]:
        server = self.start()
        with open_configured(load_settings({"url": server.url}, self.user)) as repository:
            view = repository.view(D4.name)
            objects = [chunk_object(view.identity, chunk) for chunk in view.chunk_ids]
        server.close()
        place = self.store.partition("://")[2]
        return [f"{endpoint}/{place}/{name}" for name in objects]


@contextmanager
def _with_d4(bench: Workbench) -> Iterator[tuple[Serving, Server]]:
    """A server through which D4 was put."""
    shape, source = bench.prepared(D4)
    with bench.scratch() as folder, ExitStack() as stack:
        serving = Serving(stack, folder)
        server = serving.start()
        serving.dlcmd.seconds("put", str(source), shape.name)
        yield serving, server


def put(bench: Workbench) -> list[Row]:
    """D4 through a server, against the same put without one."""
    shape, source = bench.prepared(D4)

    def seconds(folder: Path, *, through: bool) -> float:
        with ExitStack() as stack:
            serving = Serving(stack, folder)
            if through:
                serving.start()
            return serving.dlcmd.seconds("put", str(source), shape.name)

    ways = {side: partial(seconds, through=side == OURS) for side in (OURS, DIRECT)}
    rounds = rates(bench, shape, partial(bench.warm_page_cache, source), ways)
    name = f"put {shape.name} through a server"
    note = "whole commands; a folder on the same disk, metadata in Redis"
    return against(rounds, name, RATE, {DIRECT: at_least(0.6)}, note)


def stat(bench: Workbench) -> list[Row]:
    """Metadata: many paths in one request, against redis-benchmark with as many commands in a
    pipeline."""
    rows: list[Row] = []
    with _with_d4(bench) as (serving, first):
        both = f"{first.url},{serving.start().url.partition('://')[2]}"

        def ours(url: str, pipeline: int) -> dict[str, float]:
            serving.use(url)
            requests = max(STATS_EACH // pipeline // bench.divisor, 10)
            return serving.clients("stat", STAT_CLIENTS, requests, pipeline)

        for pipeline in PIPELINES:
            redis = f"redis-benchmark GET -P {pipeline}"
            sides: dict[str, Side] = {
                OURS: partial(ours, first.url, pipeline),
                "two": partial(ours, both, pipeline),
                redis: partial(_redis_benchmark, serving.meta, pipeline),
            }
            rounds = alternate(bench.rounds, sides)
            name = f"stat through a server, {pipeline} paths a request"
            note = f"{STAT_CLIENTS} clients in Python"
            rows += against(rounds, name, ENTRIES, {redis: at_least(0.5)}, note)
            rows += against(rounds, f"{name}, two servers", ENTRIES, {redis: None}, side="two")
    return rows


def _redis_benchmark(url: str, pipeline: int) -> dict[str, float]:
    socket = url.partition("://")[2]
    command = [program("redis-benchmark"), "-s", socket, "-t", "get", "-r", "20000", "-q", "--csv"]
    command += ["-c", str(STAT_CLIENTS), "-P", str(pipeline), "-n", "1000000"]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    found = re.search(r'"GET","([0-9.]+)"', output)
    if found is None:
        raise PeerMissing(f"redis-benchmark printed {output[:200]!r}")
    return {ENTRIES: float(found[1])}


def snapshot(bench: Workbench) -> list[Row]:
    """Clients look up paths in their snapshots: the server does nothing, and each client has the
    same rate."""
    files, most = bench.shape(D4).files, len(os.sched_getaffinity(0))
    with _with_d4(bench) as (serving, _):

        def each(clients: int) -> dict[str, float]:
            return {ENTRIES: serving.clients("lookups", clients, 50, files)[ENTRIES] / clients}

        rounds = alternate(bench.rounds, {OURS: partial(each, most), ALONE: partial(each, 1)})
    name = f"look-ups in a snapshot, {most} clients, each"
    return against(rounds, name, ENTRIES, {ALONE: at_least(0.8)}, "no requests to the server")


def read(bench: Workbench) -> list[Row]:
    """Small files and whole chunks, against objects of the S3 server behind the server."""
    shape, source = bench.prepared(D4)
    with bench.scratch() as folder, ExitStack() as stack:
        s3 = stack.enter_context(s3_server(folder))
        endpoint = s3.environ["AWS_ENDPOINT_URL"]
        serving = Serving(stack, folder, s3)
        serving.dlcmd.seconds("put", str(source), D4.name)
        contents = [(source / path).read_bytes() for path in sample(shape.paths())]
        objects = f"{endpoint}/{s3.bucket}/objects"
        _upload(objects, contents)
        urls = serving.chunk_urls(endpoint)
        rows = []
        for tier in ("off", "on"):
            options = ["--cache-dir", str(folder / "tier"), "--cache-size", "1G"]
            server = serving.start(*(options if tier == "on" else []))
            rows += _small(bench, serving, objects, len(contents), tier)
            if tier == "on":
                serving.clients("chunks", 1, 1)
                time.sleep(3.0)  # the last chunks are still being written to the cache
                warm = partial(serving.clients, "chunks", 1, PASSES)
                rows += _chunks(bench, "from the fast tier", warm, urls, 0.7)
            server.close()

        def cold() -> dict[str, float]:
            server = serving.start()
            try:
                return serving.clients("chunks", 1, 1)
            finally:
                server.close()

        return rows + _chunks(bench, "through a server, cold", cold, urls, 0.4)


def _small(bench: Workbench, serving: Serving, objects: str, keys: int, tier: str) -> list[Row]:
    count = max(FILES_EACH // bench.divisor, 10)
    files = partial(serving.clients, "files", CLIENTS, count)
    first = repeat(1, files)  # and fills the caches
    peer = copy(serving.dlcmd)
    peer.url = objects

    def singles(clients: int, count: int) -> dict[str, float]:
        return probes.run("clients", peer, "-", "objects", str(clients), str(count), str(keys))

    def batch() -> dict[str, float]:
        return {RATE: BATCH / serving.clients("batches", 1, BATCHES, BATCH)["s"]}

    by_file = alternate(bench.rounds, {OURS: files, OBJECTS: partial(singles, CLIENTS, count)})
    by_batch = alternate(bench.rounds, {OURS: batch, SINGLES: partial(singles, 1, BATCH)})
    name = f"4 KB files through a server, tier {tier}"
    memory = "without a folder, a server keeps contents in memory that are read often"
    some, note = f"{name}, {CLIENTS} clients", memory if tier == "off" else ""
    return [
        Row(f"{some}, first {CLIENTS * count:,} reads", RATE, first.ours(RATE), OBJECTS, None),
        *against(by_file, some, RATE, {OBJECTS: at_least(2)}, note),
        *against(by_batch, f"{name}, {BATCH} in one request", RATE, {SINGLES: at_least(10)}),
    ]


def _chunks(bench: Workbench, how: str, ours: Side, urls: list[str], ratio: float) -> list[Row]:
    def mega(side: Side) -> Side:
        return lambda: {"MB/s": side()["B/s"] / 1e6}

    rounds = alternate(bench.rounds, {OURS: mega(ours), CURL: mega(partial(_curl, urls))})
    return against(rounds, f"whole chunks {how}", "MB/s", {CURL: at_least(ratio)})


def _upload(url: str, contents: list[bytes]) -> None:
    """Put files as objects of their own, with numbers as names."""
    place = urlsplit(url)
    link = http.client.HTTPConnection(place.netloc)
    for number, content in enumerate(contents):
        link.request("PUT", f"{place.path}/{number}", content, SIGNED)
        answer = link.getresponse()
        answer.read()
        assert answer.status == 200


def _curl(urls: list[str]) -> dict[str, float]:
    """One process, one connection, its own clock; the first object warms up."""
    words = [program("curl"), "-s", "--aws-sigv4", "aws:amz:us-east-1:s3"]
    words += ["-u", "testing:testing-secret", "-w", "%{size_download} %{time_total}\\n"]
    for url in (urls[0], *urls):
        words += ["-o", "/dev/null", url]
    output = subprocess.run(words, check=True, capture_output=True, text=True, timeout=300).stdout
    lines = [line.split() for line in output.splitlines()][1:]
    assert len(lines) == len(urls)
    return {"B/s": sum(int(size) for size, _ in lines) / sum(float(time) for _, time in lines)}
