"""Benchmarks of a server between clients and their stores: what it costs, and what it saves.

Servers, Redis and the S3 server (moto's, in Python, one process) are programs of the bench's own on
loopback, and share this machine's processors with the clients.
"""

import http.client
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
from ..report import Row, at_least
from ..samples import OURS, Measured, PeerMissing, Rounds, alternate, repeat
from ..workbench import Workbench

CLIENTS = 16
FILES_EACH = 200
BATCH = 128
BATCHES = 20
PIPELINES = (64, 1024, 8192)
STAT_CLIENTS = 4
STATS_EACH = 200_000
PASSES = 3

DIRECT = "put without a server"
OBJECTS = f"{CLIENTS} clients of the S3 server"
CURL = "curl, S3 server"
SINGLES = "single objects, S3 server"


class Serving:
    """A server over stores of its own, with a user."""

    def __init__(self, stack: ExitStack, folder: Path, s3: S3Server | None, redis: RedisServer):
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.dlcmd = Dlcmd(folder)
        self.store = self.dlcmd.url if s3 is None else s3.place()
        self.meta = redis.url
        if s3 is not None:
            self.dlcmd.environment.update(s3.environ)
        self._stack = stack
        self.dlcmd.environment["DIESEL_URL"] = self.direct_url
        key = folder / "key"
        self.dlcmd.seconds("user", "add", "bench", "--admin", "--key-out", str(key))
        self.dlcmd.environment |= {"DIESEL_USER": "bench", "DIESEL_KEY": key.read_text().strip()}

    @property
    def direct_url(self) -> str:
        return f"{self.store}?meta={self.meta}"

    def start(self, *options: str) -> Server:
        """Start a server; from now on `dlcmd` goes through it."""
        server = self._stack.enter_context(
            Server(
                self.folder / f"server-{time.time_ns()}",
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
        """The figures of some clients (`probes/clients.py`)."""
        return probes.run("probes.clients", self.dlcmd, D4.name, *map(str, arguments))


@contextmanager
def _serving(bench: Workbench, s3: bool) -> Iterator[Serving]:
    with ExitStack() as stack:
        folder = stack.enter_context(bench.scratch())
        store = stack.enter_context(s3_server(folder)) if s3 else None
        redis = stack.enter_context(RedisServer(folder / "redis"))
        yield Serving(stack, folder, store, redis)


def put(bench: Workbench) -> list[Row]:
    """D4 through a server, against the same without one."""
    shape = bench.shape(D4)
    source = bench.input(shape)

    def run(through: bool) -> dict[str, float]:
        with _serving(bench, s3=False) as serving:
            if through:
                serving.start()
            bench.warm_page_cache(source)
            return {"files/s": shape.files / serving.dlcmd.seconds("put", str(source), shape.name)}

    rounds = alternate(bench.rounds, {OURS: lambda: run(True), DIRECT: lambda: run(False)})
    rate, direct = rounds.ours("files/s"), rounds.of(DIRECT, "files/s")
    note = "whole commands; a folder on the same disk, metadata in Redis"
    return [
        Row(f"put {shape.name} through a server", "files/s", rate, DIRECT, direct, at_least(0.6),
            note=note),
    ]  # fmt: skip


def stat(bench: Workbench) -> list[Row]:
    """Metadata: many paths in one request, against redis-benchmark with as many commands in a
    pipeline."""
    source = bench.input(bench.shape(D4))
    with _serving(bench, s3=False) as serving:
        first = serving.start()
        serving.dlcmd.seconds("put", str(source), D4.name)
        second = serving.start()
        both = f"{first.url},{second.url.partition('://')[2]}"
        rows = []
        for pipeline in PIPELINES:
            count = max(STATS_EACH // pipeline // bench.divisor, 10)

            def ours(url: str, pipeline: int = pipeline, count: int = count) -> dict[str, float]:
                serving.use(url)
                return serving.clients("stat", STAT_CLIENTS, count, pipeline)

            against = f"redis-benchmark GET -P {pipeline}"
            sides: dict[str, Callable[[], dict[str, float]]] = {
                OURS: lambda ours=ours: ours(first.url),  # type: ignore[misc]  # mypy cannot infer a lambda with defaults
                "two": lambda ours=ours: ours(both),  # type: ignore[misc]  # mypy cannot infer a lambda with defaults
                against: lambda pipeline=pipeline: _redis_benchmark(serving, pipeline),  # type: ignore[misc]  # mypy cannot infer a lambda with defaults
            }
            rounds = alternate(bench.rounds, sides)
            redis = rounds.of(against, "entries/s")
            name = f"stat through a server, {pipeline} paths a request"
            rows.append(
                Row(name, "entries/s", rounds.ours("entries/s"), against, redis, at_least(0.5),
                    note=f"{STAT_CLIENTS} clients in Python"),
            )  # fmt: skip
            two = rounds.of("two", "entries/s")
            rows.append(Row(f"{name}, two servers", "entries/s", two, against, redis))
        return rows


def _redis_benchmark(serving: Serving, pipeline: int) -> dict[str, float]:
    socket = serving.meta.partition("://")[2]
    command = [program("redis-benchmark"), "-s", socket, "-t", "get", "-r", "20000", "-q", "--csv"]
    command += ["-c", str(STAT_CLIENTS), "-P", str(pipeline), "-n", "1000000"]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    found = re.search(r'"GET","([0-9.]+)"', said)
    if found is None:
        raise PeerMissing(f"redis-benchmark said {said[:200]!r}")
    return {"entries/s": float(found[1])}


def snapshot(bench: Workbench) -> list[Row]:
    """Clients look up paths in their snapshots: the server does nothing, and each has the same
    rate."""
    source = bench.input(bench.shape(D4))
    most = len(os.sched_getaffinity(0))
    with _serving(bench, s3=False) as serving:
        serving.start()
        serving.dlcmd.seconds("put", str(source), D4.name)
        size = bench.shape(D4).files

        def run(clients: int) -> dict[str, float]:
            return serving.clients("lookups", clients, 50, size)

        one = "one client alone"
        rounds = alternate(bench.rounds, {OURS: lambda: run(most), one: lambda: run(1)})
    return [
        Row(f"look-ups in a snapshot, {most} clients, each", "entries/s",
            rounds.ours("entries/s").map(lambda rate: rate / most), one,
            rounds.of(one, "entries/s"), at_least(0.8), note="the server is not asked"),
    ]  # fmt: skip


def read(bench: Workbench) -> list[Row]:
    """Small files and whole chunks, against objects of the S3 server that stands behind the
    server."""
    shape = bench.shape(D4)
    source = bench.input(shape)
    with ExitStack() as stack:
        folder = stack.enter_context(bench.scratch())
        s3 = stack.enter_context(s3_server(folder))
        redis = stack.enter_context(RedisServer(folder / "redis"))
        serving = Serving(stack, folder / "served", s3, redis)
        serving.dlcmd.seconds("put", str(source), D4.name)
        bucket = f"{s3.environ['AWS_ENDPOINT_URL']}/{s3.bucket}"
        keys = _upload(bucket, [(source / path).read_bytes() for path in sample(shape.paths())])
        chunk_urls = _chunk_urls(serving, s3)
        rows = []
        for tier in ("off", "on"):
            options = ["--cache-dir", str(folder / "tier"), "--cache-size", "1G"]
            server = serving.start(*(options if tier == "on" else []))
            rows += _small(bench, serving, bucket, keys, tier)
            if tier == "on":
                rows.append(_chunks(bench, serving, chunk_urls, "from the fast tier", 0.7))
            server.close()
        rows.append(_cold(bench, serving, chunk_urls))
        return rows


def _small(bench: Workbench, serving: Serving, bucket: str, keys: int, tier: str) -> list[Row]:
    count = max(FILES_EACH // bench.divisor, 10)
    url = serving.dlcmd.url
    first = repeat(1, lambda: serving.clients("files", CLIENTS, count))  # and fills what there is

    def objects(clients: int, count: int) -> dict[str, float]:
        peer = Dlcmd(serving.folder)
        peer.environment, peer.url = serving.dlcmd.environment, f"{bucket}/objects"
        return probes.run(
            "probes.clients", peer, "-", "objects", str(clients), str(count), str(keys)
        )

    def batch() -> dict[str, float]:
        return serving.clients("batches", 1, BATCHES, BATCH)

    serving.use(url)
    files: Rounds = alternate(
        bench.rounds,
        {
            OURS: lambda: serving.clients("files", CLIENTS, count),
            OBJECTS: lambda: objects(CLIENTS, count),
        },
    )
    batches = alternate(
        bench.rounds,
        {OURS: batch, SINGLES: lambda: {"s": BATCH / objects(1, BATCH)["files/s"]}},
    )
    name = f"4 KB files through a server, tier {tier}"
    rate, peer = files.ours("files/s"), files.of(OBJECTS, "files/s")
    faster: Measured = batches.ours("s").map(lambda seconds: BATCH / seconds)
    single: Measured = batches.of(SINGLES, "s").map(lambda seconds: BATCH / seconds)
    memory = "without a folder, a server keeps in memory what is read again and again"
    return [
        Row(f"{name}, {CLIENTS} clients, first {CLIENTS * count:,} reads", "files/s",
            first.ours("files/s"), OBJECTS, None),
        Row(f"{name}, {CLIENTS} clients", "files/s", rate, OBJECTS, peer, at_least(2),
            note=memory if tier == "off" else ""),
        Row(f"{name}, {BATCH} in one request", "files/s", faster, SINGLES, single, at_least(10)),
    ]  # fmt: skip


def _chunks(bench: Workbench, serving: Serving, urls: list[str], how: str, ratio: float) -> Row:
    serving.clients("chunks", 1, 1)
    time.sleep(3.0)  # the last chunks are still being written to the cache
    rounds = alternate(
        bench.rounds,
        {OURS: lambda: serving.clients("chunks", 1, PASSES), CURL: lambda: _curl(urls)},
    )
    return Row(f"whole chunks {how}", "MB/s", rounds.ours("B/s").map(_mega), CURL,
               rounds.of(CURL, "B/s").map(_mega), at_least(ratio))  # fmt: skip


def _cold(bench: Workbench, serving: Serving, urls: list[str]) -> Row:
    def cold() -> dict[str, float]:
        server = serving.start()
        try:
            return serving.clients("chunks", 1, 1)
        finally:
            server.close()

    rounds = alternate(bench.rounds, {OURS: cold, CURL: lambda: _curl(urls)})
    return Row("whole chunks through a server, cold", "MB/s", rounds.ours("B/s").map(_mega), CURL,
               rounds.of(CURL, "B/s").map(_mega), at_least(0.4))  # fmt: skip


def _mega(rate: float) -> float:
    return rate / 1e6


def _upload(bucket: str, contents: list[bytes]) -> int:
    """Put files as objects of their own; return their number."""
    place = urlsplit(bucket)
    link = http.client.HTTPConnection(place.netloc)
    for number, content in enumerate(contents):
        link.request("PUT", f"{place.path}/objects/{number}", content, SIGNED)
        answer = link.getresponse()
        answer.read()
        assert answer.status == 200
    return len(contents)


def _chunk_urls(serving: Serving, s3: S3Server) -> list[str]:
    """The URLs of D4's chunks at the S3 server."""
    server = serving.start()
    names = {name: serving.dlcmd.environment[name] for name in ("DIESEL_USER", "DIESEL_KEY")}
    settings = load_settings({"url": server.url}, names)
    with open_configured(settings) as repository:
        view = repository.view(D4.name)
        objects = [chunk_object(view.identity, chunk) for chunk in view.chunk_ids]
    server.close()
    place = serving.store.partition("://")[2]
    return [f"{s3.environ['AWS_ENDPOINT_URL']}/{place}/{name}" for name in objects]


def _curl(urls: list[str]) -> dict[str, float]:
    """One process, one connection, its own clock; the first object warms up."""
    words = [program("curl"), "-s", "--aws-sigv4", "aws:amz:us-east-1:s3"]
    words += ["-u", "testing:testing-secret", "-w", "%{size_download} %{time_total}\\n"]
    for url in (urls[0], *urls):
        words += ["-o", "/dev/null", url]
    said = subprocess.run(words, check=True, capture_output=True, text=True, timeout=300).stdout
    lines = [line.split() for line in said.splitlines()][1:]
    assert len(lines) == len(urls)
    return {"B/s": sum(int(size) for size, _ in lines) / sum(float(time) for _, time in lines)}
