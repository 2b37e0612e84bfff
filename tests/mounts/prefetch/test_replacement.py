"""What stays in memory from epoch to epoch, against the best that any program could keep.

Belady's MIN fetches the fewest files that a memory of a size allows: if memory is full, it drops
the file whose next use is the farthest. It knows the orders of all epochs, the planner those of the
current and of the next epoch.
"""

import heapq
import math
from itertools import pairwise

import numpy as np

from diesel_fs.mounts.prefetch.planner import PrefetchPlanner
from diesel_fs.orders.plan import Epoch
from tests.rows import each_row

from .simulated_kernel import (
    CHUNK_ENTRIES,
    START_S,
    Machine,
    Reader,
    chunk_wise,
    make_planner,
    shuffled,
    stream,
)

FILES = 128 * CHUNK_ENTRIES
EPOCHS = 3
BATCH = 32
TICK_S = 0.001

Orders = list[list[int]]


def least_fetches(orders: Orders, capacity: int) -> list[int]:
    """How many files MIN fetches in each epoch, with memory for `capacity` files."""
    sequence = [entry for order in orders for entry in order]
    next_use = [math.inf] * len(sequence)
    seen: dict[int, int] = {}
    for at in reversed(range(len(sequence))):
        next_use[at] = seen.get(sequence[at], math.inf)
        seen[sequence[at]] = at
    fetches = [0] * len(orders)
    kept: dict[int, float] = {}  # by file: its next use
    farthest: list[tuple[float, int]] = []  # a heap; it may have old uses of files
    for at, entry in enumerate(sequence):
        if entry not in kept:
            fetches[at // len(orders[0])] += 1
        kept[entry] = next_use[at]
        heapq.heappush(farthest, (-next_use[at], entry))
        while len(kept) > capacity:  # the file that was just read may be the one to drop
            use, other = heapq.heappop(farthest)
            if kept.get(other) == -use:
                del kept[other]
    return fetches


def test_MIN_keeps_what_is_used_soonest() -> None:
    assert least_fetches([[1, 2, 3], [1, 2, 3]], 0) == [3, 3]
    assert least_fetches([[1, 2, 3], [1, 2, 3]], 1) == [3, 2]
    assert least_fetches([[1, 2, 3], [1, 2, 3], [3, 2, 1]], 2) == [3, 1, 1]
    assert least_fetches([[1, 2, 3], [3, 2, 1]], 3) == [3, 0]


# Orders that become known when they begin, of important files (iCache)


def drawn_by_importance(part: float) -> list[tuple[int, int, int]]:
    """Read epochs of half of all files; the more important a file is, the likelier it is drawn.
    Returns for each epoch after the first of them: how many files were drawn, how many of these
    are among the most important that memory has room for, and how many were fetched."""
    rng = np.random.default_rng(1)
    importance = (rng.permutation(FILES) / FILES).astype(np.float32)
    everything = np.arange(FILES)
    best = np.argsort(-importance)[: int(part * FILES)]
    machine = Machine(make_planner(FILES, part), FILES)
    planner, found = machine.planner, []
    for epoch in range(4):
        order = rng.permutation(everything[rng.random(FILES) < (importance if epoch else 1)])
        before = machine.pushed + machine.misses["a"], planner.stats()["kept_entries"]
        if epoch:
            planner.importances.set(everything, importance)
        planner.streams.announce(stream("a", order.tolist(), lag=2 * BATCH), machine.now_s)
        for at in range(0, len(order), BATCH):
            machine.run_until_idle()
            for entry in order[at : at + BATCH].tolist():
                machine.open_and_read("a", entry)
            machine.now_s += BATCH * TICK_S / 5
            if at + BATCH < len(order):
                planner.streams.progress("a", at + BATCH, machine.now_s)
        fetched = machine.pushed + machine.misses["a"] - before[0]
        kept = planner.stats()["kept_entries"] - before[1]
        assert fetched <= 1.01 * (len(order) - kept)
        if epoch > 1:
            found.append((len(order), int(np.isin(best, order).sum()), fetched))
    return found


@each_row(("part", "least"), [(0.1, 0.7), (0.25, 0.88), (0.5, 0.96)])
def test_an_epoch_fetches_hardly_more_than_the_files_that_are_not_important(
    part: float, least: float
) -> None:
    """Files ahead of the reader take a small part of the memory, except of a tiny one."""
    for drawn, important, fetched in drawn_by_importance(part):
        assert drawn - fetched >= least * important, (drawn, important, fetched)


class Training:
    """A program that reads epochs with several workers, and announces each next epoch during the
    one before. With `reports`, its loop reports each batch that it has got."""

    def __init__(self, orders: Orders, part: float, workers: int, *, reports: bool) -> None:
        self.orders, self.reports = orders, reports
        self.count = len(orders[0])
        self.machine = Machine(make_planner(self.count, part), self.count)
        everything = [entry for order in orders for entry in order]
        self.reader = Reader(everything, 5_000, workers, BATCH)
        self.announced = 2
        self.planner.streams.announce(
            stream("a", *orders[:2], lag=2 * workers * BATCH), self.machine.now_s
        )
        self.was_read = np.zeros(len(everything), np.bool_)
        self.loop = 0  # the position behind the batches that the loop has got
        self.fetched = [0]  # files that were pushed or missed, up to the end of each epoch

    @property
    def planner(self) -> PrefetchPlanner:
        return self.machine.planner

    def run(self) -> list[int]:
        """Read everything. Returns how many files were fetched in each epoch: pushed or missed."""
        machine, reader = self.machine, self.reader
        is_idle = False
        while not reader.done:
            machine.now_s += TICK_S
            due = int((machine.now_s - START_S) * reader.rate)
            while reader.read < min(due, len(reader.queue)):
                self.read_next()
                is_idle = False
            while not is_idle and machine.busy_until_s <= machine.now_s:
                is_idle = not machine.run_decision()
        assert machine.resident_bytes_max <= self.planner.stats()["budget_bytes"]
        return [after - before for before, after in pairwise(self.fetched)]

    def read_next(self) -> None:
        machine, reader = self.machine, self.reader
        position = reader.queue[reader.read]
        machine.open_and_read("a", reader.order[position])
        reader.read += 1
        self.was_read[position] = True
        if self.was_read[self.loop : self.loop + BATCH].all():
            self.loop = min(self.loop + BATCH, len(self.was_read))
            self.end_batch()
        if reader.read % self.count == 0:
            self.fetched.append(machine.pushed + machine.misses["a"])

    def end_batch(self) -> None:
        epoch, position = divmod(self.loop, self.count)
        if epoch == len(self.orders):
            return
        if self.announced == epoch + 1 < len(self.orders):
            order = self.orders[self.announced]
            self.planner.streams.extend("a", [Epoch(self.announced, np.array(order))])
            self.announced += 1
        if self.reports:
            self.planner.streams.progress("a", position, self.machine.now_s, epoch)


def times_as_many_as_min(
    orders: Orders, part: float, workers: int, *, reports: bool
) -> list[float]:
    """For each later epoch, how many times as many files are fetched as MIN fetches."""
    fetched = Training(orders, part, workers, reports=reports).run()
    least = least_fetches(orders, int(part * len(orders[0])))
    return [own / best for own, best in zip(fetched[1:], least[1:], strict=True)]


FULL = [shuffled(seed, FILES) for seed in range(EPOCHS)]
GROUPED = [chunk_wise(list(range(FILES // CHUNK_ENTRIES)), 4, seed) for seed in range(EPOCHS)]


@each_row(
    ("orders", "part", "workers"),
    [
        *((FULL, part, workers) for part in (0.25, 0.5, 0.8) for workers in (1, 4)),
        *((GROUPED, part, workers) for part, workers in ((0.25, 4), (0.5, 1), (0.8, 4))),
    ],
    ids=[
        *(
            f"{part} for a full shuffle and {workers}"
            for part in (0.25, 0.5, 0.8)
            for workers in (1, 4)
        ),
        *(f"{part} for groups of four chunks" for part in (0.25, 0.5, 0.8)),
    ],
)
def test_later_epochs_fetch_hardly_more_than_MIN(orders: Orders, part: float, workers: int) -> None:
    ratios = times_as_many_as_min(orders, part, workers, reports=True)
    assert max(ratios) <= 1.05, ratios


@each_row(
    ("orders", "part", "most"),
    [(FULL, 0.25, 1.15), (FULL, 0.5, 1.1), (FULL, 0.8, 1.1), (GROUPED, 0.25, 1.1)],
    ids=["a quarter", "half", "most", "groups of four chunks"],
)
def test_a_reader_that_reports_nothing_costs_little_more(
    orders: Orders, part: float, most: float
) -> None:
    """Files ahead of such a reader may take a quarter of a small memory."""
    ratios = times_as_many_as_min(orders, part, 4, reports=False)
    assert max(ratios) <= most, ratios
