"""Benchmarks of the kernel session: reading files that are in the page cache, and files that are
not, by one reader and by up to 16 at once, which are also a plot beside the bench."""

from collections.abc import Mapping
from functools import partial

from ..inputs import D4, D4L, D110, Shape
from ..peers.trees import RATARMOUNT, SQUASHFUSE, TMPFS
from ..plot import Plot, plot_medians
from ..report import Row, against, at_least, no_more_than, worst
from ..samples import OURS, Side, alternate
from ..stored import EXT4, Stored, stored
from ..workbench import Workbench

KERNEL = ("--session", "kernel")
ONESHOT = (*KERNEL, "--policy", "oneshot")
PYFUSE3 = ("--session", "pyfuse3")

ON_DEMAND = "ours, on demand"
OVER_PYFUSE3 = "our pyfuse3 session"

SECOND_RATIOS = {TMPFS: at_least(0.65), EXT4: at_least(0.8)}
FIRST_RATIO: Mapping[Shape, float] = {D4: 4, D4L: 4, D110: 2}
ON_DEMAND_RATIO = 2
ON_DEMAND_READS = 0.2
PYFUSE3_RATIO = {1: 1.5, 2: 1.3}

RATE, READS, MOUNTING, REQUESTS = "files/s", "READs a file", "mount s", "requests"

READERS = (1, 2, 4, 8, 16)
SHOWN = {
    TMPFS: TMPFS,
    OURS: "DIESEL-FS, kernel session",
    OVER_PYFUSE3: OVER_PYFUSE3,
    SQUASHFUSE: SQUASHFUSE,
    RATARMOUNT: RATARMOUNT,
}
PLOT = Plot(
    "readers",
    "20,000 files of 4 KiB in random order, second and later epochs",
    "readers at once",
    "files read a second",
    READERS,
)


def second_epoch(bench: Workbench) -> list[Row]:
    """D4 in its second epoch, in another order, by one reader and by two."""
    rows: list[Row] = []
    with stored(bench, bench.shape(D4)) as data:

        def run(side: str, readers: int) -> dict[str, float]:
            first, second = data.orders(side, 2)
            with data.opened(side, *ONESHOT) as tree:
                bench.read_epoch(first, walk=tree.root)
                before = tree.requests()
                report = bench.read_epoch(second, readers=readers)
                return {RATE: report.files_per_s, REQUESTS: tree.requests() - before}

        for readers in PYFUSE3_RATIO:
            sides = {side: partial(run, side, readers) for side in (OURS, TMPFS, EXT4)}
            rounds = alternate(bench.rounds, sides)
            name = f"kernel {data.shape.name}, second epoch, {_readers(readers)}"
            asked = "READs, OPENs and GETATTRs in the epoch, in the worst round"
            rows += against(rounds, name, RATE, SECOND_RATIOS)
            rows.append(no_more_than(name, REQUESTS, worst(rounds.ours(REQUESTS)), 0, asked))
    return rows


def first_epoch(bench: Workbench) -> list[Row]:
    """The first epoch on a fresh mount, from when it is ready, with a walk of its folders."""
    return [row for shape in FIRST_RATIO for row in _first_epoch_rows(bench, shape)]


def read_first_epoch(
    data: Stored, side: str, *options: str, python: str = "", cold: bool = False
) -> dict[str, float]:
    """Read all files once from a fresh mount, and walk its folders before.

    The rate counts from when the mount is ready. `python` is the interpreter of the stock loop; if
    it is empty, the C reader reads. A `cold` side begins with no content in the page cache.
    """
    [order] = data.orders(side, 1)
    data.prepare(side, cold=cold)
    with data.reader(python, order) as read, data.mounted(side, *options) as tree:
        rate = data.shape.files / (read().end_s - tree.ready_s)
        reads = 0 if python else tree.reads()
        if python:
            data.bench.read_epoch(order)  # the stock loop has not looked at contents
    return {RATE: rate, READS: reads / data.shape.files, MOUNTING: tree.mount_s}


def _first_epoch_rows(bench: Workbench, wanted: Shape) -> list[Row]:
    with stored(bench, bench.shape(wanted)) as data:
        data.mount_once()
        sides: dict[str, Side] = {
            OURS: partial(read_first_epoch, data, OURS, *ONESHOT),
            SQUASHFUSE: partial(read_first_epoch, data, SQUASHFUSE),
        }
        if wanted is D4:
            on_demand = (*KERNEL, "--policy", "on-demand")
            sides[ON_DEMAND] = partial(read_first_epoch, data, OURS, *on_demand)
        rounds = alternate(bench.rounds, sides)
    name = f"kernel {wanted.name}, first epoch, oneshot"
    first = {SQUASHFUSE: at_least(FIRST_RATIO[wanted])}
    since = "from the return of the mount command on, with a walk of all folders; one reader"
    rows = [
        *against(rounds, name, RATE, first, since),
        Row(name, READS, rounds.ours(READS)),
        *against(rounds, f"{name}, mount command", "s", {SQUASHFUSE: None}, of=MOUNTING),
    ]
    if wanted is D4:
        name, target = f"kernel {wanted.name}, first epoch, on-demand", at_least(ON_DEMAND_RATIO)
        note = "no plan; as above"
        rows += against(rounds, name, RATE, {SQUASHFUSE: target}, note, side=ON_DEMAND)
        rows.append(no_more_than(name, READS, rounds.of(ON_DEMAND, READS), ON_DEMAND_READS))
    return rows


def one_read_a_file(bench: Workbench) -> list[Row]:
    """D4 where nothing is loaded into the page cache, so that each file costs a READ, against
    pyfuse3."""
    rows: list[Row] = []
    with stored(bench, bench.shape(D4)) as data:

        def run(options: tuple[str, ...], readers: int) -> dict[str, float]:
            [order] = data.orders(OURS, 1)
            with data.opened(OURS, *options) as tree:
                if options == KERNEL and tree.mount is not None:
                    tree.mount.stop_pushing()
                report = bench.read_epoch(order, readers=readers, walk=tree.root)
                return {RATE: report.files_per_s, READS: tree.reads() / data.shape.files}

        for readers, ratio in PYFUSE3_RATIO.items():
            sides: dict[str, Side] = {
                OURS: partial(run, KERNEL, readers),
                OVER_PYFUSE3: partial(run, PYFUSE3, readers),
            }
            rounds = alternate(bench.rounds, sides)
            name = f"kernel {data.shape.name}, one READ a file, {_readers(readers)}"
            note = "a fresh mount that was walked; no helper"
            rows += against(rounds, name, RATE, {OVER_PYFUSE3: at_least(ratio)}, note)
            rows.append(Row(name, READS, rounds.ours(READS)))
    return rows


def many_readers(bench: Workbench) -> list[Row]:
    """1 to 16 readers at once in later epochs of D4: the rates of an epoch that they share, in an
    order of its own, after a first epoch."""
    with stored(bench, bench.shape(D4)) as data:

        def rates(side: str, *options: str) -> dict[str, float]:
            first, *others = data.orders(side, len(READERS) + 1)
            with data.opened(side, *options) as tree:
                bench.read_epoch(first, walk=tree.root)
                return {
                    str(readers): bench.read_epoch(order, readers=readers).files_per_s
                    for readers, order in zip(READERS, others, strict=True)
                }

        sides: dict[str, Side] = {
            OURS: partial(rates, OURS, *ONESHOT),
            **{peer: partial(rates, peer) for peer in (TMPFS, SQUASHFUSE, RATARMOUNT)},
            OVER_PYFUSE3: partial(rates, OURS, *PYFUSE3),
        }
        rounds = alternate(bench.rounds, sides)
    plot_medians(bench, PLOT, rounds, SHOWN)
    peers = dict.fromkeys((TMPFS, SQUASHFUSE, RATARMOUNT, OVER_PYFUSE3))
    return [
        row
        for count in READERS
        for row in against(
            rounds, f"kernel {data.shape.name}, {_readers(count)}", RATE, peers, of=str(count)
        )
    ]


def _readers(count: int) -> str:
    return f"{count} reader{'s' * (count > 1)}"
