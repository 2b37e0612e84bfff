"""Benchmarks with less memory than the dataset: chunk-wise order, and random order without a plan.

The plan is made as a training script makes it: by reading the order from the mount.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from ..control_group import control_group
from ..inputs import D4L
from ..reading import Order, random_order, whole_order
from ..report import Row, against, at_least, no_more_than, worst
from ..samples import OURS, Measured, NotMeasured, Rounds, Side, alternate
from ..stored import Stored, Tree, stored
from ..workbench import Workbench
from .mounts import KERNEL, ONESHOT, RATE, READS, readers_text

GROUP_CHUNKS = 10
SEED = 1
BUDGET_PART = 10  # of the dataset's bytes
READERS = (1, 4, 16)
UNPLANNED_PART = 4  # a fourth of the epoch is read, which fills the budget many times
READS_MAX, OWN_MB = 0.02, 100
CHUNK_BYTES, CHUNK_BYTES_MIN = 4 << 20, 64 << 10

PUSHED = "all pushed once, read for the first time"
RESIDENT, NOT_PUSHING = "everything resident", "the same mount without pushing"
RATE_AGAIN, READS_AGAIN, PEAK = "files/s, second", "READs a file, second", "peak MB"


class _Setting:
    """D4L in small chunks, the options of a mount of `session` with a budget of a tenth, and those
    of one that keeps all resident."""

    def __init__(self, data: Stored, session: tuple[str, ...]) -> None:
        self.data, self.bench = data, data.bench
        self.budget_bytes = data.shape.bytes // BUDGET_PART
        self.options = (*session, "--memory", str(self.budget_bytes))
        self.oneshot = (*session, *ONESHOT)
        data.mount_once()
        (first_text, first), (second_text, second) = self._epoch(0), self._epoch(1)
        self.texts, self.epochs = (first_text, second_text), (first, second)

    def _epoch(self, number: int) -> tuple[bytes, Order]:
        """The list of an epoch that `dlcmd shuffle` prints, and the order for the reader."""
        data = self.data
        words = ["--seed", str(SEED), "--epoch", str(number), "--group-size", str(GROUP_CHUNKS)]
        text = data.dlcmd.output("shuffle", data.shape.name, *words)
        paths, file = os.fsdecode(text).splitlines(), data.folder / f"epoch-{number}"
        return text, whole_order(data.shape, data.mountpoint, paths, file)

    def announce(self, tree: Tree, number: int) -> None:
        """Make the plan of an epoch by reading its list, and compare it: it takes milliseconds."""
        name = f"seed={SEED},epoch={number},group={GROUP_CHUNKS}"
        text = (tree.root / ".diesel" / "shuffle" / name).read_bytes()
        assert text == self.texts[number], "the mount has another order"

    def walk(self) -> None:
        """Look all entries up in this process, so that the kernel charges them to it and not to the
        mount or its readers."""
        for folder, _, files in os.walk(self.data.mountpoint):
            for name in files:
                os.stat(f"{folder}/{name}")

    def sides(self, readers: int, *, charge_readers: bool = False) -> dict[str, Side]:
        """With `charge_readers`, the peak memory has the pages of the kernel that readers
        brought."""
        first, second = self.epochs
        read = partial(self.bench.read_epoch, readers=readers)

        def window() -> dict[str, float]:
            with (
                control_group() as group,
                self.data.opened(OURS, *self.options, group=group) as tree,
            ):
                self.walk()
                charged = group if charge_readers else None
                self.announce(tree, 0)
                once = read(first, group=charged)
                before = tree.reads()
                self.announce(tree, 1)
                again = read(second, group=charged)
                peak = {} if group is None else {PEAK: group.peak_bytes() / 1e6}
                reads = tree.reads()
            return {
                RATE: once.files_per_s,
                READS: before / self.data.shape.files,
                RATE_AGAIN: again.files_per_s,
                READS_AGAIN: (reads - before) / self.data.shape.files,
                **peak,
            }

        def resident() -> dict[str, float]:
            with self.data.opened(OURS, *self.oneshot) as tree:
                self.bench.read_epoch(first, walk=tree.root)
                return dict.fromkeys((RATE, RATE_AGAIN), read(first).files_per_s)

        return {OURS: window, RESIDENT: resident}


@contextmanager
def _setting(bench: Workbench, session: tuple[str, ...] = KERNEL) -> Iterator[_Setting]:
    chunk = max(CHUNK_BYTES // bench.divisor, CHUNK_BYTES_MIN)
    with stored(bench, bench.shape(D4L), "--chunk-size", str(chunk)) as data:
        yield _Setting(data, session)


def _peak(rounds: Rounds) -> Measured:
    """The greatest memory, in the worst round, from a control group."""
    if PEAK in rounds.runs[OURS][0]:
        return worst(rounds.ours(PEAK))
    return NotMeasured("no control group can be made here")


def chunk_wise(bench: Workbench) -> list[Row]:
    """D4L in chunk-wise order with a budget of a tenth, against everything resident."""
    with _setting(bench) as setting:
        runs = {each: alternate(bench.rounds, setting.sides(each)) for each in READERS}
    limit_mb = 1.3 * setting.budget_bytes / 1e6 + OWN_MB
    how = (
        f"G = {GROUP_CHUNKS}, a budget of a tenth of the dataset; the plan is a list that was read"
    )
    stays = (
        "says little where the first did not keep the limit: the kernel keeps what READs brought"
    )
    memory = "its processes and all that the kernel charges to them"
    rows: list[Row] = []
    for readers, rounds in runs.items():
        name = f"kernel {D4L.name}, chunk-wise, {readers_text(readers)}"
        again, target = f"{name}, second epoch", {RESIDENT: at_least(0.6) if readers == 1 else None}
        rows += [
            *against(rounds, name, RATE, target, how),
            *against(rounds, again, RATE, target, of=RATE_AGAIN),
            no_more_than(name, READS, rounds.ours(READS), READS_MAX),
            no_more_than(again, READS, rounds.ours(READS_AGAIN), READS_MAX, stays),
            no_more_than(name, PEAK, _peak(rounds), limit_mb, memory),
        ]
    return rows


def native(bench: Workbench) -> list[Row]:
    """D4L in chunk-wise order with a budget of a tenth over `bench.session`, against the same
    session when all was pushed before, and against everything resident."""
    with _setting(bench, bench.session_options) as setting:
        data, order = setting.data, setting.epochs[0]

        def pushed() -> dict[str, float]:
            with data.opened(OURS, *setting.oneshot) as tree:
                assert tree.mount is not None
                setting.walk()
                tree.mount.wait_until_loaded()
                return dict.fromkeys((RATE, RATE_AGAIN), bench.read_epoch(order).files_per_s)

        sides = {**setting.sides(1, charge_readers=True), PUSHED: pushed}
        rounds = alternate(bench.rounds, sides)
    name = f"{bench.session} {data.shape.name}, window of a tenth"
    again = f"{name}, second epoch"
    targets = {PUSHED: at_least(0.8), RESIDENT: at_least(0.5)}
    peak_mb = 1.25 * setting.budget_bytes / 1e6 + OWN_MB
    memory = "its processes, the reader, and all pages of the kernel; 1.25 times the budget"
    return [
        *against(rounds, name, RATE, targets),
        *against(rounds, again, RATE, targets, of=RATE_AGAIN),
        Row(name, READS, rounds.ours(READS)),
        Row(again, READS, rounds.ours(READS_AGAIN)),
        no_more_than(name, PEAK, _peak(rounds), peak_mb, memory),
    ]


def unplanned(bench: Workbench) -> list[Row]:
    """D4L in true random order with a budget of a tenth, with and without loading ahead."""
    with _setting(bench) as setting:
        data, files = setting.data, setting.data.shape.files // UNPLANNED_PART
        order = random_order(data.shape, data.mountpoint, 0, data.folder, files=files)

        def run(*, pushing: bool) -> dict[str, float]:
            with data.opened(OURS, *setting.options) as tree:
                if tree.mount is not None and not pushing:
                    tree.mount.stop_pushing()
                setting.walk()
                report = bench.read_epoch(order)
                return {RATE: report.files_per_s, READS: tree.reads() / files}

        sides = {side: partial(run, pushing=side == OURS) for side in (OURS, NOT_PUSHING)}
        rounds = alternate(bench.rounds, sides)
    name, note = f"kernel {D4L.name}, random, no plan", "a quarter of an epoch, a budget of a tenth"
    return [
        *against(rounds, name, RATE, {NOT_PUSHING: at_least(1)}, f"{note} of it"),
        *against(rounds, name, READS, {NOT_PUSHING: None}),
    ]
