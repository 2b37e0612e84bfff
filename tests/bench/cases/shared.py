"""Benchmarks of metadata in a Redis: putting, committing, and recovering all of it from chunks.

A real `redis-server` of the bench's own, over a socket, without a log on disk.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diesel_fs.repository.local import LocalRepository
from diesel_fs.repository.validation import batch_of
from diesel_fs.storage.metadata.redis.store import RedisMetadata
from tests.storage.metadata.redis_servers import RedisServer

from ..dlcmd import Dlcmd
from ..inputs import D4L, N1M
from ..report import Row, against, no_less_than
from ..samples import OURS, alternate, repeat
from ..workbench import Workbench

RECOVER_PER_S = 100_000
EMBEDDED = "put with the embedded store"


@contextmanager
def _redis(bench: Workbench) -> Iterator[RedisServer]:
    with bench.scratch() as folder, RedisServer(folder / "redis") as server:
        yield server


def put(bench: Workbench) -> list[Row]:
    """D4L, its metadata in Redis, against SQLite beside the chunks."""
    shape, source = bench.prepared(D4L)

    def run(folder: Path, meta: str) -> dict[str, float]:
        bench.warm_page_cache(source)
        dlcmd = Dlcmd(folder)
        dlcmd.environment["DIESEL_URL"] = f"{dlcmd.url}{meta}"
        return {"files/s": shape.files / dlcmd.seconds("put", str(source), shape.name)}

    def ours() -> dict[str, float]:
        with _redis(bench) as server, bench.scratch() as folder:
            return run(folder, f"?meta={server.url}")

    def embedded() -> dict[str, float]:
        with bench.scratch() as folder:
            return run(folder, "")

    rounds = alternate(bench.rounds, {OURS: ours, EMBEDDED: embedded})
    note = "whole commands, no server between them"
    return against(rounds, f"put {shape.name} with Redis", "files/s", {EMBEDDED: None}, note)


def recover(bench: Workbench) -> list[Row]:
    """N1M's metadata into an empty Redis, and the rate of commits beside it."""
    dlcmd, name, entries = bench.n1m, bench.shape(N1M).name, bench.shape(N1M).files

    def recovered() -> dict[str, float]:
        with _redis(bench) as server:
            environment = dict(dlcmd.environment)
            dlcmd.environment["DIESEL_URL"] = f"{dlcmd.url}?meta={server.url}"
            try:
                seconds = dlcmd.seconds("recover", name)
            finally:
                dlcmd.environment = environment
            with server.client() as client:
                used = int(client.info("memory")["used_memory"])
            return {"entries/s": entries / seconds, "B/entry": used / entries}

    def committed() -> dict[str, float]:
        with _redis(bench) as server, LocalRepository.open(dlcmd.url) as repository:
            info = repository.dataset(name)
            chunks = repository.chunk_ids(info.identity)
            headers = [repository.read_header(info.identity, chunk) for chunk in chunks]
            batches = [batch_of(header, stored=True) for header in headers]
            meta = RedisMetadata.open(server.url)
            meta.create(name, info.identity)
            start_s = time.perf_counter()
            for batch in batches:
                meta.commit(info.identity, batch)
            seconds = time.perf_counter() - start_s
            meta.close()
            return {"entries/s": entries / seconds}

    ours, commits = repeat(bench.rounds, recovered), repeat(bench.rounds, committed)
    rate = ours.ours("entries/s")
    title = f"recover {name} into an empty Redis"
    note = "whole command: headers read by ranges, one rebuild, a full snapshot"
    return [
        no_less_than(title, "entries/s", rate, RECOVER_PER_S, note),
        Row(f"commit {name} to Redis, chunk by chunk", "entries/s", commits.ours("entries/s")),
        Row(f"{name} in Redis, names included", "B/entry", ours.ours("B/entry")),
    ]
