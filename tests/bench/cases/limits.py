"""Benchmarks of ours alone, against fixed limits: the metadata of N1M (its snapshot, and look-ups
in it), `read_many` in one process, the cost of `dlcmd run`, and volumes of the CSI driver.

The cost of `dlcmd run` is a difference: the same command with and without it, one after the other.
The CSI plugin runs as a program, and its mounts as processes; root only.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TypedDict

from tests.kubernetes.csi.plugin import Plugin, running_plugin
from tests.waiting import wait_until

from .. import probes
from ..dlcmd import PROGRAM, Dlcmd, last_line
from ..inputs import D4, N1M
from ..peers import python_of_training
from ..reading import write_list
from ..report import Row, no_less_than, no_more_than
from ..samples import Measured, Rounds, Samples, repeat
from ..stored import Stored, stored
from ..workbench import Workbench

RATE = "files/s"
FIRST, SECOND = "first pass", "second pass"
MANY, MANY_WHEN_TRIED = 50, 6
LAUNCHED = (str(PROGRAM), "-q", "run", "--")
ANNOUNCING = Path(__file__).parent.parent / "probes" / "announcing.py"


def snapshot(bench: Workbench) -> list[Row]:
    """Make the snapshot of N1M, add to it, open it, look paths up: in the order of a dataset's
    life."""
    name = N1M.name

    def ask(what: str, fresh_cache: str = "") -> dict[str, float]:
        return probes.run("metadata", bench.n1m, name, what, fresh_cache=fresh_cache)

    def times(quantity: str, factor: float, rounds: Rounds) -> Measured:
        return rounds.ours(quantity).map(lambda value: factor * value)

    put = Samples((N1M.files / bench.n1m_put_seconds,))
    export = repeat(bench.rounds, lambda: ask("export"))
    with bench.scratch() as folder:
        numbers, caches = count(), count()

        def put_ten() -> dict[str, float]:
            number = next(numbers)
            source = folder / f"ten{number}"
            source.mkdir()
            for file in D4.file_names(number)[:10]:
                (source / file).write_bytes(bytes(D4.file_bytes))
            bench.warm_page_cache()
            return {"seconds": bench.n1m.seconds("put", str(source), f"{name}/new{number}")}

        def adopt() -> dict[str, float]:
            """The first reader of a version on a node copies it, every later one maps the copy."""
            cache = folder / f"cache{next(caches)}"
            cache.mkdir(mode=0o700)
            return ask("open", str(cache))

        ten = repeat(bench.rounds, put_ten)
        adopted = repeat(bench.rounds, adopt)
        ask("open")  # makes the copy, which the timed runs then map
        opened = repeat(bench.rounds, lambda: ask("open"))
    rated = repeat(bench.rounds, lambda: ask("rates"))
    scanned = repeat(1, lambda: ask("scan"))
    stats = f"stat_many of {name}"
    whole = "whole command; the snapshot of the new version included"
    copied = "read from the store, checked whole, written as this user's own copy and synced"
    mapped = "from an open repository to the first stat, over this user's own mapped copy"
    all_of_it = "all that no file backs, the interpreter included"
    ms, mb = times("seconds", 1e3, opened), times("own_bytes", 1e-6, scanned)
    lookups, by_bytes = rated.ours("lookups_per_s"), rated.ours("stats_per_s")
    return [
        Row(f"put {name} from a tar, once", RATE, put),
        no_more_than(f"export of {name}", "s", export.ours("seconds"), 10),
        no_more_than(f"put 10 files onto {name}", "s", ten.ours("seconds"), 2, whole),
        no_more_than(f"open {name}", "ms", ms, 50, mapped),
        Row(f"open {name}, the first time", "ms", times("seconds", 1e3, adopted), note=copied),
        no_more_than(f"{name}, beside names", "B/entry", opened.ours("bytes_per_entry"), 64),
        no_less_than(f"look-ups in {name}, one by one", "1/s", lookups, 100_000),
        no_less_than(stats, "1/s", by_bytes, 550_000, "bytes paths"),
        Row(f"{stats}, str paths", "1/s", rated.ours("stats_by_text_per_s")),
        Row(f"{stats}, indices", "1/s", rated.ours("stats_by_index_per_s")),
        no_more_than(f"own memory after a scan of {name}", "MB", mb, 100, all_of_it),
    ]


def read_many(bench: Workbench) -> list[Row]:
    """Two passes of `read_many` in a fresh process, from chunks on the local disk and in the page
    cache, with files named by indices and by paths."""
    with stored(bench, D4) as data:

        def passes(by: str) -> Rounds:
            seeds = count()

            def read() -> dict[str, float]:
                first_s, second_s = read_twice(data, next(seeds), by, "sum")
                return {FIRST: data.shape.files / first_s, SECOND: data.shape.files / second_s}

            return repeat(bench.rounds, read)

        indices, paths = passes("indices"), passes("paths")
    first, second = (f"read_many {D4.name}, {each}" for each in (FIRST, SECOND))
    how = "checksums verified, every byte summed; chunks just written, in the page cache"
    return [
        no_less_than(first, RATE, indices.ours(FIRST), 200_000, how),
        no_less_than(second, RATE, indices.ours(SECOND), 300_000, "not summed"),
        Row(f"{first}, by paths", RATE, paths.ours(FIRST)),
        Row(f"{second}, by paths", RATE, paths.ours(SECOND)),
    ]


class _Passes(TypedDict):
    """The output of `probes/read.py`."""

    seconds: list[float]
    files: int
    bytes: int
    sum: int


def read_twice(data: Stored, seed: int, by: str, first: str) -> list[float]:
    """The seconds of two passes in a new process. The first pass sums contents, or only counts
    (`first`)."""
    data.bench.warm_page_cache(data.dlcmd.store)
    words = (data.shape.name, str(seed), by, first)
    output: _Passes = probes.run("read", data.dlcmd, *words)  # type: ignore[assignment] # its own words
    data.shape.check(output["files"], output["bytes"], output["sum"])
    return output["seconds"]


def run_overhead(bench: Workbench) -> list[Row]:
    """The start of a command that does nothing, and an epoch of 1.28 million files on a mount."""

    def seconds(*command: str) -> float:
        start_s = time.perf_counter()
        subprocess.run(command, check=True)
        return time.perf_counter() - start_s

    def started() -> dict[str, float]:
        command = (sys.executable, "-c", "pass")
        return {"s": seconds(*LAUNCHED, *command) - seconds(*command)}

    start = repeat(bench.rounds, started).ours("s")
    with bench.scratch() as folder:
        shape, mountpoint, dlcmd = bench.shape(N1M), folder / "mount", bench.n1m
        listed = write_list((f"{mountpoint}/{path}" for path in shape.paths()), folder / "list")
        command = [python_of_training(), "-P", str(ANNOUNCING), str(listed)]

        def begun(*prefix: str) -> dict[str, float]:
            printed: dict[str, float] = json.loads(
                last_line([*prefix, *command], dlcmd.users_environment)
            )
            return printed

        def announce() -> dict[str, float]:
            alone, joined = begun(), begun(*LAUNCHED)
            return {key: joined[key] - alone[key] for key in ("seconds", "bytes")}

        with dlcmd.mounted(shape.name, mountpoint):
            rounds = repeat(bench.rounds, announce)
    name = f"dlcmd run, announce {shape.name}"
    how = "until the first batch, in the training process, more than without dlcmd run"
    megabytes = rounds.ours("bytes").map(lambda count: count / 1e6)
    return [
        no_more_than("dlcmd run, start", "s", start, 0.3),
        no_more_than(name, "s", rounds.ours("seconds"), 1, how),
        no_more_than(name, "MB", megabytes, 100, f"peak memory, {how}"),
    ]


@contextmanager
def _published(bench: Workbench) -> Iterator[tuple[Plugin, Path, dict[str, str]]]:
    """A plugin that ends idle mounts at once, a folder for targets, and a volume with D4."""
    shape, source = bench.prepared(D4)
    with bench.scratch() as folder:
        dlcmd, targets = Dlcmd(folder), folder / "targets"
        dlcmd.seconds("put", str(source), shape.name)
        targets.mkdir()
        with running_plugin(folder / "plugin", "--idle=0", f"--file-root={folder}") as plugin:
            yield plugin, targets, {"dataset": shape.name, "url": dlcmd.url, "memory": "256M"}
            plugin.wait_until_clean()


def _read_first_byte(target: Path) -> None:
    folder = next(path for path in target.iterdir() if path.is_dir())
    with next(folder.iterdir()).open("rb", buffering=0) as file:
        assert file.read(1)


def csi_publish(bench: Workbench) -> list[Row]:
    """The time from NodePublishVolume to the first byte, of a volume that is not mounted here yet,
    and of one that shares a mount."""
    with _published(bench) as (plugin, targets, attributes):

        def seconds(name: str) -> float:
            start_s = time.perf_counter()
            plugin.kubelet.publish(targets / name, attributes)
            _read_first_byte(targets / name)
            return time.perf_counter() - start_s

        def both() -> dict[str, float]:
            found = {name: seconds(name) for name in ("first", "second")}
            for name in found:
                plugin.kubelet.unpublish(targets / name)
            plugin.wait_until_clean()
            return found

        both()  # makes the node's copy of the snapshot, and the image
        rounds = repeat(bench.rounds, both)
    shares = "a second pod, which shares the mount"
    name = f"CSI: publish {D4.name}, to the first byte"
    return [
        no_more_than(name, "s", rounds.ours("first"), 1.5, "a new mount"),
        no_more_than(f"{name}, again", "s", rounds.ours("second"), 0.3, shares),
    ]


def csi_many(bench: Workbench) -> list[Row]:
    """Fifty volumes, each with a mount of its own, published and unpublished side by side; four
    mounts start at once."""
    volumes = MANY if bench.divisor == 1 else MANY_WHEN_TRIED
    with _published(bench) as (plugin, targets, attributes):
        plugin.kubelet.deadline_s = 600

        def publish(place: Path) -> None:
            plugin.kubelet.publish(place, {**attributes, "seed": place.name})

        def run() -> dict[str, float]:
            plugin.kubelet.probe()
            before, start_s = len(plugin.descriptors()), time.perf_counter()
            places = [targets / str(number) for number in range(volumes)]
            with ThreadPoolExecutor(volumes) as pool:
                list(pool.map(publish, places))
                published_s = time.perf_counter() - start_s
                assert len(plugin.roots) == volumes
                for place in places:
                    _read_first_byte(place)
                list(pool.map(plugin.kubelet.unpublish, places))
            wait_until(lambda: not plugin.roots and not plugin.processes(), 600.0)

            def left() -> int:
                mounted = len(plugin.roots) + len(plugin.processes()) + len([*targets.iterdir()])
                return mounted + len(plugin.descriptors()) - before

            with suppress(AssertionError):  # the last `dlcmd umount` may still run
                wait_until(lambda: left() <= 0)
            return {"seconds": published_s, "left": left()}

        rounds = repeat(1, run)
    name, what = f"CSI: {MANY} volumes side by side", "mounts, processes, folders, descriptors"
    return [
        Row(f"{name}, all published", "s", rounds.ours("seconds"), note="4 mounts start at once"),
        no_more_than(f"{name}, left afterwards", what, rounds.ours("left"), 0),
    ]
