"""Benchmark of the accuracy of a network trained with images in chunk-wise order, compared with
full shuffle: a table, and a plot beside the bench. It repeats figure 13 of the paper (DIESEL,
section 6.5), which finds no loss, in small: with made images, many seeds and intervals.

Nothing is timed, so a busy machine only makes it take longer.
"""

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .. import probes
from ..dlcmd import Dlcmd
from ..inputs import Indices
from ..plot import Line, Plot, draw
from ..report import Row, no_more_than
from ..samples import Samples, progress
from ..workbench import Workbench
from .small_images import Pixels, labels_of, made_images, write_tar

IMAGES, TEST_IMAGES = 20_000, 20_000
IMAGES_SEED, TEST_SEED, PACKING_SEED = 1, 2, 3
CHUNK_SIZE, CHUNKS_MIN = "64K", 200
EPOCHS, BATCH = 10, 64
SEEDS = 6
GROUP_SIZES = (1, 15, 30, 100)
PROBE_S_MAX = 3600.0  # two to three minutes on a processor of its own; much more beside other work
PROCESSOR_MINUTES_MAX = 60

RANDOM, SORTED = "random", "sorted"
LAYOUTS = {RANDOM: "packed in random order", SORTED: "packed by class"}
FULL = "full shuffle"
PERCENT, POINTS = "% right", "points"

NEARLY_FULL = (15, 30)  # group sizes at which nothing may be lost
POINTS_LOST_MAX = 1.0

T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Quantiles of Student's t for intervals of 95 %, by degrees of freedom, from 1 on."""

Runs = Sequence[Mapping[str, float]]
"""The figures of each seed by name."""

PLOT = Plot(
    "accuracy",
    "accuracy after chunk-wise shuffle, less that after full shuffle (95 % intervals)",
    "chunks in a group (of 240)",
    "percentage points",
    GROUP_SIZES,
    differences=True,
)


@dataclass(frozen=True, slots=True)
class Difference:
    """Paired differences: their mean, standard deviation, and interval of 95 % for the mean."""

    mean: float
    deviation: float
    half_width: float

    @classmethod
    def of(cls, ours: Sequence[float], others: Sequence[float]) -> "Difference":
        """Ours less the others, pair by pair; at least two pairs."""
        differences = [one - other for one, other in zip(ours, others, strict=True)]
        deviation = statistics.stdev(differences)
        half_width = T_975[len(differences) - 2] * deviation / math.sqrt(len(differences))
        return cls(statistics.mean(differences), deviation, half_width)

    @property
    def farthest(self) -> float:
        """The greatest distance of the interval from 0."""
        return abs(self.mean) + self.half_width

    @property
    def highest(self) -> float:
        return self.mean + self.half_width

    def __str__(self) -> str:
        ends = f"{self.mean - self.half_width:+.2f} to {self.highest:+.2f}"
        return f"mean {self.mean:+.2f}, deviation {self.deviation:.2f}, interval {ends}"


def measure(bench: Workbench) -> list[Row]:
    """Train a small network with each order and seed, and test it.

    The images lie in a repository twice: packed into chunks in random order, and class after class.
    Full shuffle does not depend on that. All networks of a seed begin with the same weights.
    """
    images = IMAGES // bench.divisor
    numbers = {
        "epochs": max(EPOCHS // bench.divisor, 2),
        "batch": BATCH,
        "test_images": TEST_IMAGES // bench.divisor,
        "test_seed": TEST_SEED,
    }
    ordered = [(layout, size) for layout in LAYOUTS for size in GROUP_SIZES]
    orders = [(FULL, RANDOM, 0), *((_name(*each), *each) for each in ordered)]
    packed = {
        RANDOM: np.random.default_rng(PACKING_SEED).permutation(images),
        SORTED: np.argsort(labels_of(images), kind="stable"),
    }
    with bench.scratch() as folder:
        dlcmd = put_images(folder, made_images(images, IMAGES_SEED), packed)
        runs = probe_seeds(bench, dlcmd, SEEDS, "orders", json.dumps(numbers), json.dumps(orders))
    if bench.divisor == 1:
        assert runs[0]["chunks"] >= CHUNKS_MIN, f"only {runs[0]['chunks']} chunks"
    full, rows = of(runs, FULL), []
    found = {each: Difference.of(of(runs, _name(*each)), full) for each in ordered}
    for (layout, size), difference in found.items():
        order = _name(layout, size)
        effect = statistics.mean(of(runs, f"{order}, design effect"))
        note = f"{difference}; design effect {effect:.2f}"
        progress(f"{order}: {note}")
        name, accuracy = f"accuracy, {order}", Samples(of(runs, order))
        rows.append(Row(name, PERCENT, accuracy, FULL, Samples(full), note=note))
        if layout == RANDOM and size in NEARLY_FULL:
            what = f"{name}, less that of {FULL}: farther end of the 95 % interval"
            reach = Samples((difference.farthest,))
            rows.append(no_more_than(what, POINTS, reach, POINTS_LOST_MAX))
        if layout == SORTED and size == 1:
            what = f"{name}, less that of {FULL}: upper end of the 95 % interval"
            rows.append(no_more_than(what, POINTS, Samples((difference.highest,)), 0))
    lines = []
    for layout, title in LAYOUTS.items():
        drawn = [found[layout, size] for size in GROUP_SIZES]
        halves = [each.half_width for each in drawn]
        lines.append(Line(title, [each.mean for each in drawn], halves))
    draw(PLOT, lines, is_whole=bench.divisor == 1)
    minutes = Samples((sum(of(runs, "processor_s")) / 60,))
    name = f"accuracy, processor time of {len(runs)} seeds"
    return [*rows, no_more_than(name, "minutes", minutes, PROCESSOR_MINUTES_MAX)]


def put_images(folder: Path, pixels: Pixels, packed: Mapping[str, Indices]) -> Dlcmd:
    """A repository with images, in a dataset for each order in which they are packed."""
    dlcmd = Dlcmd(folder)
    for name, order in packed.items():
        tar = folder / f"{name}.tar"
        with tar.open("wb") as file:
            write_tar(file, pixels, order)
        options = ("--chunk-size", CHUNK_SIZE, "--compress", "none")
        dlcmd.seconds("put", "--tar", str(tar), *options, name)
    return dlcmd


def probe(dlcmd: Dlcmd, seed: int, *words: str) -> dict[str, float]:
    """The output of `learning_probe.py` for a seed."""
    name = "experiments.learning_probe"
    return probes.run(name, dlcmd, str(seed), *words, deadline_s=PROBE_S_MAX)


def probe_seeds(bench: Workbench, dlcmd: Dlcmd, seeds: int, *words: str) -> Runs:
    """Its output for each seed; two seeds if the bench is only tried."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        numbers = range(seeds if bench.divisor == 1 else 2)
        return list(pool.map(lambda seed: probe(dlcmd, seed, *words), numbers))


def _name(layout: str, group_size: int) -> str:
    return f"{LAYOUTS[layout]}, G = {group_size}"


def of(runs: Runs, what: str) -> tuple[float, ...]:
    return tuple(run[what] for run in runs)
