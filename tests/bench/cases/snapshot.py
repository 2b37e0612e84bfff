"""Benchmarks of the metadata of N1M: making its snapshot, adding to it, opening it, looking paths
up."""

from pathlib import Path

from .. import probes
from ..inputs import D4, N1M
from ..report import Row, within
from ..samples import Samples, repeat
from ..workbench import Workbench

EXPORT_S = 10
TEN_FILES_S = 2
OPEN_MS = 50
ENTRY_BYTES = 64
LOOKUPS_PER_S = 100_000
STATS_PER_S = 550_000
OWN_MB = 100


def measure(bench: Workbench) -> list[Row]:
    """All benchmarks of this module, in the order of a dataset's life."""
    dlcmd, name = bench.n1m, N1M.name
    put = Samples((N1M.files / bench.n1m_put_seconds,))
    export = repeat(bench.rounds, lambda: probes.run("probes.metadata", dlcmd, name, "export"))
    rows = [
        Row(f"put {name} from a tar, once", "files/s", put),
        within(f"export of {name}", "s", export.ours("seconds"), EXPORT_S, most=True),
    ]
    with bench.scratch() as folder:
        rows += [_put_ten(bench, folder), *_open(bench, folder)]
    return rows + _ask(bench)


def _put_ten(bench: Workbench, folder: Path) -> Row:
    """Putting ten new files, with the new snapshot: the time of the whole command."""
    numbers = iter(range(bench.rounds))

    def put() -> dict[str, float]:
        number = next(numbers)
        source = folder / f"ten{number}"
        source.mkdir()
        for file in D4.file_names(number)[:10]:
            (source / file).write_bytes(bytes(D4.file_bytes))
        bench.warm_page_cache()
        return {"seconds": bench.n1m.seconds("put", str(source), f"{N1M.name}/new{number}")}

    ours = repeat(bench.rounds, put).ours("seconds")
    note = "whole command; the snapshot of the new version included"
    return within(f"put 10 files onto {N1M.name}", "s", ours, TEN_FILES_S, most=True, note=note)


def _open(bench: Workbench, folder: Path) -> list[Row]:
    """Opening a snapshot: the first reader of a version on a node copies it, every later one maps
    the copy."""
    dlcmd, name = bench.n1m, N1M.name
    numbers = iter(range(bench.rounds))

    def adopt() -> dict[str, float]:
        cache = folder / f"cache{next(numbers)}"
        cache.mkdir(mode=0o700)
        return probes.run("probes.metadata", dlcmd, name, "open", fresh_cache=str(cache))

    adopted = repeat(bench.rounds, adopt)
    probes.run(
        "probes.metadata", dlcmd, name, "open"
    )  # makes the copy, which the timed runs then map
    opened = repeat(bench.rounds, lambda: probes.run("probes.metadata", dlcmd, name, "open"))
    milliseconds = opened.ours("seconds").map(lambda s: s * 1e3)
    per_entry = opened.ours("bytes_per_entry")
    return [
        within(
            f"open {name}",
            "ms",
            milliseconds,
            OPEN_MS,
            most=True,
            note="from an open repository to the first stat, over this user's own mapped copy",
        ),
        Row(
            f"open {name}, the first time",
            "ms",
            adopted.ours("seconds").map(lambda s: s * 1e3),
            note="read from the store, checked whole, written as this user's own copy and synced",
        ),
        within(f"{name}, beside names", "B/entry", per_entry, ENTRY_BYTES, most=True),
    ]


def _ask(bench: Workbench) -> list[Row]:
    dlcmd, name = bench.n1m, N1M.name
    asked = repeat(bench.rounds, lambda: probes.run("probes.metadata", dlcmd, name, "rates"))
    scanned = repeat(1, lambda: probes.run("probes.metadata", dlcmd, name, "scan"))
    stats = f"stat_many of {name}"
    return [
        within(
            f"look-ups in {name}, one by one",
            "1/s",
            asked.ours("lookups_per_s"),
            LOOKUPS_PER_S,
            most=False,
        ),
        within(
            stats, "1/s", asked.ours("stats_per_s"), STATS_PER_S, most=False, note="bytes paths"
        ),
        Row(f"{stats}, str paths", "1/s", asked.ours("stats_by_text_per_s")),
        Row(f"{stats}, indices", "1/s", asked.ours("stats_by_index_per_s")),
        within(
            f"own memory after a scan of {name}",
            "MB",
            scanned.ours("own_bytes").map(lambda count: count / 1e6),
            OWN_MB,
            most=True,
            note="all that no file backs, the interpreter included",
        ),
    ]
