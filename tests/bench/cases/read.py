"""Benchmark of reading whole files through `read_many`, in random order, in one process."""

from .. import probes
from ..dlcmd import Dlcmd
from ..inputs import D4
from ..report import Row, within
from ..samples import Measured, repeat
from ..workbench import Workbench

FIRST_PER_S = 200_000
SECOND_PER_S = 300_000


def measure(bench: Workbench) -> list[Row]:
    """Two passes in a fresh process, with files named by indices and by paths."""
    with bench.scratch() as folder:
        dlcmd = Dlcmd(folder)
        dlcmd.seconds("put", str(bench.input(D4)), D4.name)
        by_index = _passes(bench, dlcmd, "indices")
        by_path = _passes(bench, dlcmd, "paths")
    first, second = f"read_many {D4.name}, first pass", f"read_many {D4.name}, second pass"
    how = "checksums verified, every byte summed; chunks just written, in the page cache"
    return [
        within(first, "files/s", by_index["first_s"], FIRST_PER_S, most=False, note=how),
        within(
            second, "files/s", by_index["second_s"], SECOND_PER_S, most=False, note="not summed"
        ),
        Row(f"{first}, by paths", "files/s", by_path["first_s"]),
        Row(f"{second}, by paths", "files/s", by_path["second_s"]),
    ]


def _passes(bench: Workbench, dlcmd: Dlcmd, by: str) -> dict[str, Measured]:
    """Files per second of both passes; each round runs in a new process."""
    expected = D4.content_sum()
    seeds = iter(range(bench.rounds))

    def read() -> dict[str, float]:
        bench.warm_page_cache(dlcmd.store)
        report = probes.run("probes.read", dlcmd, D4.name, str(next(seeds)), by)
        got = report["files"], report["sum"], report["bytes"]
        assert got == (D4.files, expected, D4.bytes), f"wrong contents were read: {got}"
        return {key: D4.files / report[key] for key in ("first_s", "second_s")}

    rounds = repeat(bench.rounds, read)
    return {key: rounds.ours(key) for key in ("first_s", "second_s")}
