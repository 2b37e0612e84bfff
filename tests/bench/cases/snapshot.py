"""Benchmarks of the metadata of N1M: making its snapshot, adding to it, opening it, looking paths
up."""

from itertools import count

from .. import probes
from ..inputs import D4, N1M
from ..report import Row, no_less_than, no_more_than
from ..samples import Measured, Rounds, Samples, repeat
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
            """Ten new files, with the new snapshot: the time of the whole command."""
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
    asked = repeat(bench.rounds, lambda: ask("rates"))
    scanned = repeat(1, lambda: ask("scan"))
    stats = f"stat_many of {name}"
    whole = "whole command; the snapshot of the new version included"
    copied = "read from the store, checked whole, written as this user's own copy and synced"
    mapped = "from an open repository to the first stat, over this user's own mapped copy"
    all_of_it = "all that no file backs, the interpreter included"
    ms, mb = times("seconds", 1e3, opened), times("own_bytes", 1e-6, scanned)
    lookups, by_bytes = asked.ours("lookups_per_s"), asked.ours("stats_per_s")
    return [
        Row(f"put {name} from a tar, once", "files/s", put),
        no_more_than(f"export of {name}", "s", export.ours("seconds"), EXPORT_S),
        no_more_than(f"put 10 files onto {name}", "s", ten.ours("seconds"), TEN_FILES_S, whole),
        no_more_than(f"open {name}", "ms", ms, OPEN_MS, mapped),
        Row(f"open {name}, the first time", "ms", times("seconds", 1e3, adopted), note=copied),
        no_more_than(
            f"{name}, beside names", "B/entry", opened.ours("bytes_per_entry"), ENTRY_BYTES
        ),
        no_less_than(f"look-ups in {name}, one by one", "1/s", lookups, LOOKUPS_PER_S),
        no_less_than(stats, "1/s", by_bytes, STATS_PER_S, "bytes paths"),
        Row(f"{stats}, str paths", "1/s", asked.ours("stats_by_text_per_s")),
        Row(f"{stats}, indices", "1/s", asked.ours("stats_by_index_per_s")),
        no_more_than(f"own memory after a scan of {name}", "MB", mb, OWN_MB, all_of_it),
    ]
