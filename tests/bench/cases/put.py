"""Benchmarks of whole commands, from their start until everything is durable: `dlcmd put` with its
metadata beside the chunks and in a Redis (a real one, over a socket, without a log), and `recover`.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from diesel_fs.repository.local import LocalRepository
from diesel_fs.repository.validation import batch_of
from diesel_fs.storage.metadata.redis.store import RedisMetadata
from tests.storage.metadata.redis_servers import RedisServer

from ..dlcmd import Dlcmd
from ..inputs import D1M, D4L, D110, N1M, Shape
from ..memory import peak_pss_bytes
from ..peers import mds, tar
from ..report import Row, against, at_least, no_less_than, no_more_than
from ..samples import OURS, Rounds, Samples, Side, alternate, repeat
from ..workbench import Workbench

RATE, ENTRIES = "files/s", "entries/s"
MDS_RATIO = 2.5
PEAK_MB = 500
FOLDER, EMBEDDED = "the folder", "put with the embedded store"
UNPACK_AND_PUT = f"{tar.TAR_GZIP}, then put"

WARM = "whole commands and a final sync; the sources are in the page cache"
MDS = "the same; MDSWriter without its start-up, which favours it"
COLD = "the same; the sources' contents are not in the page cache"
FROM_TAR = "whole commands; the peer is the put of the folder that the tar was made of"
UNPACKED = "whole commands and a final sync; the archive is in the page cache"
RECOVERED = "whole command: headers read by ranges, one rebuild, a full snapshot"

Way = Callable[[Path], float]
"""Runs commands in an empty folder. Returns the measured seconds."""


def rates(
    bench: Workbench, shape: Shape, prepare: Callable[[], None], ways: Mapping[str, Way]
) -> Rounds:
    """The files a second of each way, in turns. `prepare` fills or empties the page cache."""

    def side(way: Way) -> Side:
        def run() -> dict[str, float]:
            with bench.scratch() as folder:
                prepare()
                return {RATE: shape.files / way(folder)}

        return run

    return alternate(bench.rounds, {name: side(way) for name, way in ways.items()})


def put(source: Path, shape: Shape, folder: Path, meta: str = "") -> float:
    """Put a folder of files into a new repository; the seconds."""
    dlcmd = Dlcmd(folder)
    dlcmd.environment["DIESEL_URL"] = f"{dlcmd.url}{meta}"
    seconds = dlcmd.seconds("put", str(source), shape.name)
    stored = dlcmd.stored_bytes()
    assert stored >= shape.bytes, f"only {stored} bytes were stored of {shape.bytes}"
    return seconds


def rate_of(wanted: Shape, tar_ratio: float) -> Callable[[Workbench], list[Row]]:
    def measure(bench: Workbench) -> list[Row]:
        shape, source = bench.prepared(wanted)
        from_disk: dict[str, Way] = {
            OURS: partial(put, source, shape),
            tar.NAME: lambda folder: tar.pack_seconds(source, folder / "o.tar"),
        }
        peer = {mds.NAME: lambda folder: mds.pack_seconds(source, folder / "out")}
        warm = rates(bench, shape, partial(bench.warm_page_cache, source), {**from_disk, **peer})
        cold = rates(bench, shape, partial(bench.drop_page_cache, source), from_disk)
        name = f"put {shape.name}"
        return [
            *against(warm, name, RATE, {tar.NAME: at_least(tar_ratio)}, WARM),
            *against(warm, name, RATE, {mds.NAME: at_least(MDS_RATIO)}, MDS),
            *against(cold, f"{name}, from disk", RATE, {tar.NAME: None}, COLD),
        ]

    return measure


def from_tar(bench: Workbench) -> list[Row]:
    """Putting a tar of small files, against putting the folder that it was made of."""
    shape, source = bench.prepared(D1M)
    with bench.scratch() as made:
        archive = made / "d1m.tar"
        tar.pack_seconds(source, archive)
        ways: dict[str, Way] = {
            OURS: lambda folder: Dlcmd(folder).seconds("put", "--tar", str(archive), shape.name),
            FOLDER: partial(put, source, shape),
        }
        rounds = rates(bench, shape, partial(bench.warm_page_cache, source, made), ways)
    return against(rounds, f"put --tar {shape.name}", RATE, {FOLDER: at_least(1)}, FROM_TAR)


def unpack(bench: Workbench) -> list[Row]:
    """Putting a compressed tar of small files, and again, against unpacking it to the disk."""
    shape, source = bench.prepared(D4L)
    again: list[float] = []
    with bench.scratch() as made:
        tar.pack_seconds(source, made / "d4l.tar")
        archive = tar.compress(made / "d4l.tar")
        (made / "d4l.tar").unlink()

        def put_archive(folder: Path) -> float:
            dlcmd = Dlcmd(folder)
            seconds = dlcmd.seconds("put", "--unpack", str(archive), shape.name)
            assert dlcmd.stored_bytes() >= shape.bytes
            again.append(dlcmd.seconds("put", "--unpack", str(archive), shape.name))
            return seconds

        def unpack_and_put(folder: Path) -> float:
            seconds = tar.unpack_seconds(archive, folder / "files", tar.TAR_GZIP)
            return seconds + put(folder / "files", shape, folder)

        ways: dict[str, Way] = {
            OURS: put_archive,
            UNPACK_AND_PUT: unpack_and_put,
            tar.PIGZ: lambda folder: tar.unpack_seconds(archive, folder / "files", tar.PIGZ),
        }
        rounds = rates(bench, shape, partial(bench.warm_page_cache, archive), ways)
    name = f"put --unpack {shape.name}.tar.gz"
    targets = {UNPACK_AND_PUT: at_least(2), tar.PIGZ: at_least(0.8)}
    return [
        *against(rounds, name, RATE, targets, UNPACKED),
        no_more_than(f"{name} again", "s", Samples(tuple(again)), 2),
    ]


def peak_memory(bench: Workbench) -> list[Row]:
    """PSS over all processes of a put, in a run that is not timed."""
    rows = []
    for wanted in (D4L, D110):
        shape, source = bench.prepared(wanted)
        with bench.scratch() as folder:
            dlcmd = Dlcmd(folder)
            command = dlcmd.command("put", str(source), shape.name)
            peak = Samples((peak_pss_bytes(command, dlcmd.environment) / 1e6,))
        rows.append(no_more_than(f"put {shape.name}, peak PSS", "MB", peak, PEAK_MB))
    return rows


def with_redis(bench: Workbench) -> list[Row]:
    """D4L, its metadata in Redis, against SQLite beside the chunks."""
    shape, source = bench.prepared(D4L)

    def ours(folder: Path) -> float:
        with RedisServer(folder / "redis") as server:
            return put(source, shape, folder, f"?meta={server.url}")

    ways: dict[str, Way] = {OURS: ours, EMBEDDED: partial(put, source, shape)}
    rounds = rates(bench, shape, partial(bench.warm_page_cache, source), ways)
    note = "whole commands, no server between them"
    return against(rounds, f"put {shape.name} with Redis", RATE, {EMBEDDED: None}, note)


def recover(bench: Workbench) -> list[Row]:
    """N1M's metadata into an empty Redis, and the rate of commits beside it."""
    dlcmd, name, entries = bench.n1m, bench.shape(N1M).name, bench.shape(N1M).files

    def recovered() -> dict[str, float]:
        with bench.scratch() as folder, RedisServer(folder / "redis") as server:
            user = Dlcmd(folder, store=dlcmd.store)
            user.environment["DIESEL_URL"] = f"{dlcmd.url}?meta={server.url}"
            seconds = user.seconds("recover", name)
            with server.client() as client:
                used = int(client.info("memory")["used_memory"])
            return {ENTRIES: entries / seconds, "B/entry": used / entries}

    def committed() -> dict[str, float]:
        with (
            bench.scratch() as folder,
            RedisServer(folder / "redis") as server,
            LocalRepository.open(dlcmd.url) as repository,
        ):
            identity = repository.dataset(name).identity
            headers = [
                repository.read_header(identity, chunk) for chunk in repository.chunk_ids(identity)
            ]
            batches = [batch_of(header, stored=True) for header in headers]
            meta = RedisMetadata.open(server.url)
            meta.create(name, identity)
            start_s = time.perf_counter()
            for batch in batches:
                meta.commit(identity, batch)
            seconds = time.perf_counter() - start_s
            meta.close()
            return {ENTRIES: entries / seconds}

    ours, commits = repeat(bench.rounds, recovered), repeat(bench.rounds, committed)
    title = f"recover {name} into an empty Redis"
    return [
        no_less_than(title, ENTRIES, ours.ours(ENTRIES), 100_000, RECOVERED),
        Row(f"commit {name} to Redis, chunk by chunk", ENTRIES, commits.ours(ENTRIES)),
        Row(f"{name} in Redis, names included", "B/entry", ours.ours("B/entry")),
    ]
