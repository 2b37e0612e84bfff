"""The third experiment of DLCache (sections III-C.2 and IV): the time that jobs wait for their
datasets if a node's storage holds only a part of them, by eviction policy. As in the paper, it is a
simulation.

The datasets are the paper's: traffic (TrafficInrix, 96 GB) used once; ImageNet (136 GB) again and
again; CSE-CIC-IDS2018 (6.89 GB) by two jobs, the second with some old and some new files;
LibriSpeech (105 GB) by several jobs. 3 x 4 x 4 numbers of uses and 10 storage sizes give 480
settings, and 50 random orders of the jobs of each 24,000 workloads. A job first prepares missing
blocks (download and extraction); the total time of that is compared. A block is evicted whole;
those of the starting job are pinned.

**Ours** is LRFU and decides with `diesel_fs.cache.policies.lrfu`, as a cache folder does.
**Cost-aware LRFU** is the paper's: among blocks of equal worth, the one that costs least for each
byte goes first. **LFU** counts all references, also those before an eviction, and breaks ties by
last use. **Greedy** evicts the block that costs least.

The paper leaves open the constants below, and three things that matter more. Jobs that share
LibriSpeech are drawn into the sequence at random; a further run starts them at once. Each byte
costs the same, as all chunks of a cache folder come from one store; two further runs make one
dataset three times as dear, and one lets the blocks of each dataset differ, as the paper seems to.
p and step are the product's defaults; `grid_table` shows others.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import numpy.typing as npt

from diesel_fs.cache.disk.rule import LRFU_P, LRFU_STEP
from diesel_fs.cache.policies.lrfu import Attenuation, Values, eviction_order

from ..plot import Line, Plot, draw
from ..report import Row, at_most
from ..samples import Samples, progress
from ..workbench import Workbench

TRAFFIC, IMAGENET, INTRUSIONS, SPEECH = range(4)
NAMES = ("traffic", "ImageNet", "intrusions", "speech")
DATASET_BYTES = (96e9, 136e9, 6.89e9, 105e9)
REUSES, OLD_FILES, SHARERS = (1, 3, 5), (1, 3, 5, 7), (1, 3, 5, 7)
STORAGE_BYTES = np.linspace(160e9, 260e9, 10)
ORDERS = 50

BLOCK_BYTES = 1e9
"""The mean size of a block. A block is a file of the bucket, and archives are cut to some size; the
paper gives none. With 136 blocks, a dataset can be evicted in parts."""
BLOCK_SIGMA = 0.5
"""Standard deviation of the logarithms of sizes: one block in six has 1.6 times the median or
more."""
OLD, NEW = 7, 3
"""CSE-CIC-IDS2018 has a file for each of ten days. At most 7 old files are used again, so the first
job uses 7, and the second has 3 new ones beside them."""
DOWNLOAD_BYTES_PER_S = 100e6
"""The rate of a link of 1 Gbit/s (section IV-A) for a bucket's client."""
EXTRACT_BYTES_PER_S = 200e6
"""The rate of `pigz` and the file system on 8 processors: decompression has one thread."""
COST_SIGMA = 0.5
"""Standard deviation of the logarithms of costs for a byte, in the run with blocks that differ:
downloads of one host differ by that much over a day, and files differ in compression."""
DEFAULT = Attenuation(LRFU_P, LRFU_STEP)
GAP_HOURS = 6.0
"""Between the starts of two jobs: training on these datasets takes hours."""
DEAR = 3.0
"""The factor by which one dataset costs more in the further runs."""

PS, STEPS = (1.5, 2.0, 4.0, 16.0), (0.0, 1 / 96, 1 / 24, 1 / 6, 1.0)
FURTHER_ORDERS = 5
SEED = 1
OURS, COST_AWARE = "LRFU", "cost-aware LRFU"
DECILES = range(10, 100, 10)

Numbers = npt.NDArray[np.intp]

PLOT = Plot(
    "lrfu",
    "waiting for datasets, by eviction policy (beside figure 7 of DLCache)",
    "total time of preparation, hours",
    "% of the workloads that took at most this time",
    (),
    over_time=True,
)


@dataclass(frozen=True, slots=True)
class Blocks:
    """All blocks of the four datasets: their bytes, and the seconds to prepare them."""

    bytes: Values
    cost_s: Values
    of_dataset: Sequence[Numbers]

    @classmethod
    def drawn(cls, dearer: Mapping[str, float], cost_sigma: float = 0.0) -> "Blocks":
        """Draw the blocks by a seed; `dearer` has the factors by which the blocks of some datasets
        cost more."""
        rng = np.random.default_rng(SEED)
        sizes, costs, numbers, count = [], [], list[Numbers](), 0
        for dataset, total in enumerate(DATASET_BYTES):
            blocks = OLD + NEW if dataset == INTRUSIONS else round(total / BLOCK_BYTES)
            size = rng.lognormal(0.0, BLOCK_SIGMA, blocks)
            size *= total / size.sum()
            byte_s = 1 / DOWNLOAD_BYTES_PER_S + 1 / EXTRACT_BYTES_PER_S
            byte_s *= dearer.get(NAMES[dataset], 1.0)
            vary = rng.lognormal(0.0, cost_sigma, blocks)
            vary *= size.sum() / (vary * size).sum()  # so that each dataset has its cost
            sizes.append(size)
            costs.append(size * byte_s * vary)
            numbers.append(np.arange(count, count + blocks))
            count += blocks
        return cls(np.concatenate(sizes), np.concatenate(costs), numbers)


@dataclass(slots=True)
class Storage:
    """The knowledge of a policy: for each block its references and its last use, in hours."""

    blocks: Blocks
    attenuation: Attenuation
    random: np.random.Generator
    crf: Values = field(init=False)
    count: Values = field(init=False)
    used: Values = field(init=False)

    def __post_init__(self) -> None:
        self.crf, self.count, self.used = (np.zeros(len(self.blocks.bytes)) for _ in range(3))

    def reference(self, blocks: Numbers, times: int, now: float) -> None:
        """`times` jobs that use these blocks start now."""
        for _ in range(times):
            self.crf[blocks] = self.attenuation.add_reference(
                self.crf[blocks], self.used[blocks], now
            )
            self.used[blocks] = now
        self.count[blocks] += times

    def log_crf(self, blocks: Numbers, now: float) -> Values:
        return self.attenuation.log_crf(self.crf[blocks], self.used[blocks], now)


Order = Callable[[Storage, Numbers, float], Numbers]
"""The order in which blocks are evicted at an hour: places in the array."""


def _ours(storage: Storage, blocks: Numbers, now: float) -> Numbers:
    return eviction_order(storage.log_crf(blocks, now), storage.used[blocks])


def _cost_aware(storage: Storage, blocks: Numbers, now: float) -> Numbers:
    byte_cost_s = storage.blocks.cost_s[blocks] / storage.blocks.bytes[blocks]
    return np.lexsort((storage.used[blocks], byte_cost_s, storage.log_crf(blocks, now)))


def _sorted(values: Values) -> Numbers:
    return np.argsort(values, kind="stable")


POLICIES: Mapping[str, Order] = {
    OURS: _ours,
    COST_AWARE: _cost_aware,
    "LRU": lambda storage, blocks, _: _sorted(storage.used[blocks]),
    "LFU": lambda storage, blocks, _: np.lexsort((storage.used[blocks], storage.count[blocks])),
    "random": lambda storage, blocks, _: storage.random.permutation(len(blocks)),
    "greedy": lambda storage, blocks, _: _sorted(storage.blocks.cost_s[blocks]),
}


@dataclass(frozen=True, slots=True)
class Start:
    """Jobs that start at once: the blocks that they use, and the number of jobs."""

    blocks: Numbers
    jobs: int = 1


@dataclass(frozen=True, slots=True)
class Workload:
    """Starts in their order, and the storage that they share."""

    starts: Sequence[Start]
    storage_bytes: float
    seed: Sequence[int]

    def prepared_s(self, blocks: Blocks, order: Order, attenuation: Attenuation = DEFAULT) -> float:
        """The time that all jobs together need to prepare their blocks."""
        storage = Storage(blocks, attenuation, np.random.default_rng(self.seed))
        is_here = np.zeros(len(blocks.bytes), np.bool_)
        held_bytes = total_s = 0.0
        for number, start in enumerate(self.starts):
            now = number * GAP_HOURS
            absent = start.blocks[~is_here[start.blocks]]
            total_s += float(blocks.cost_s[absent].sum())
            held_bytes += float(blocks.bytes[absent].sum())
            is_here[start.blocks] = False  # pinned
            if held_bytes > self.storage_bytes:
                others = np.flatnonzero(is_here)
                others = others[order(storage, others, now)]
                freed = np.cumsum(blocks.bytes[others])
                count = int(np.searchsorted(freed, held_bytes - self.storage_bytes)) + 1
                is_here[others[:count]] = False
                held_bytes -= float(freed[count - 1])
            is_here[start.blocks] = True
            storage.reference(start.blocks, start.jobs, now)
        return total_s


def workloads(
    bench: Workbench, blocks: Blocks, orders: int, *, at_once: bool = False
) -> list[Workload]:
    """All settings, with `orders` orders of each. `at_once`: the jobs that share a dataset start
    together."""
    found = []
    levels: list[float] = STORAGE_BYTES[:: min(bench.divisor, len(STORAGE_BYTES))].tolist()
    orders = max(orders // bench.divisor, 1)
    old, new = np.split(blocks.of_dataset[INTRUSIONS], [OLD])
    for reuses, old_files, sharers in product(REUSES, OLD_FILES, SHARERS):
        speech = blocks.of_dataset[SPEECH]
        starts = [
            Start(blocks.of_dataset[TRAFFIC]),
            *[Start(blocks.of_dataset[IMAGENET])] * (1 + reuses),
            *([Start(speech, sharers)] if at_once else [Start(speech)] * sharers),
            Start(old),
            Start(np.concatenate([old[-old_files:], new])),
        ]
        for (level, storage_bytes), number in product(enumerate(levels), range(orders)):
            seed = SEED, reuses, old_files, sharers, level, number
            drawn = np.random.default_rng(seed).permutation(len(starts)).tolist()
            # Old files are old when the second job comes
            first, second = sorted(drawn.index(len(starts) - each) for each in (1, 2))
            drawn[first], drawn[second] = len(starts) - 2, len(starts) - 1
            found.append(Workload([starts[each] for each in drawn], storage_bytes, seed))
    return found


def simulate(bench: Workbench) -> list[Row]:
    """All workloads with all policies: our total time against each of the others."""
    blocks = Blocks.drawn({})
    jobs = workloads(bench, blocks, ORDERS)
    hours = _hours(blocks, jobs)
    _plot(bench, blocks, hours)
    progress(_deciles_table("the main run", hours))
    further = {
        "jobs that share a dataset start at once": blocks,
        "the blocks of a dataset differ in cost": Blocks.drawn({}, COST_SIGMA),
        **{
            f"{name} costs {DEAR:.0f} times as much": Blocks.drawn({name: DEAR})
            for name in ("ImageNet", "traffic")
        },
    }
    for what, drawn in further.items():
        some = workloads(bench, drawn, FURTHER_ORDERS, at_once=drawn is blocks)
        progress(_deciles_table(what, _hours(drawn, some)))
    progress(grid_table(blocks, workloads(bench, blocks, FURTHER_ORDERS)))
    return _compared(f"lrfu, simulated, {len(jobs):,} workloads", hours)


def _hours(blocks: Blocks, jobs: Sequence[Workload]) -> dict[str, Values]:
    # Rounded, as sums of the same costs in another order differ in their last digits
    return {
        name: np.round([each.prepared_s(blocks, order) / 3600 for each in jobs], 9)
        for name, order in POLICIES.items()
    }


def _table(what: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join([f"{what}:", *(f"| {' | '.join(cells)} |" for cells in lines)])


def _deciles_table(what: str, hours: Mapping[str, Values]) -> str:
    rows = [
        [name, *(f"{figure:.3f}" for figure in (*np.percentile(each, DECILES), np.mean(each)))]
        for name, each in hours.items()
    ]
    return _table(what, ["hours at the percentile", *map(str, DECILES), "mean"], rows)


def grid_table(blocks: Blocks, jobs: Sequence[Workload]) -> str:
    """The median hours of ours for values of p and step."""
    rows = []
    for p in PS:
        cells = [f"{p:g}"]
        for step in STEPS:
            rule = Attenuation(p, step)
            hours = [each.prepared_s(blocks, _ours, rule) / 3600 for each in jobs]
            cells.append(f"{np.median(hours):.3f} ({np.mean(hours):.3f})")
        rows.append(cells)
    what = "median (mean) hours of ours by p and step"
    return _table(what, ["p \\ step", *(f"{step:.3g}" for step in STEPS)], rows)


def _compared(name: str, hours: Mapping[str, Values]) -> list[Row]:
    """Our median and deciles against those of the others."""
    ours, rows = hours[OURS], []
    deciles = np.percentile(ours, DECILES)
    for other, theirs in hours.items():
        if other == OURS:
            continue
        median, other_median = (Samples((float(np.median(each)),)) for each in (ours, theirs))
        other_deciles = np.percentile(theirs, DECILES)
        ratios = deciles / other_deciles
        behind = [str(each) for each, ratio in zip(DECILES, ratios, strict=True) if ratio > 1]
        where = (
            f"behind at the percentiles {', '.join(behind)}" if behind else "at no decile behind"
        )
        less, more = (100 * float(np.mean(each)) for each in (ours < theirs, ours > theirs))
        note = f"{where}; ours takes less in {less:.0f} % of the workloads, more in {more:.0f} %"
        rows.append(Row(f"{name}, median", "h", median, other, other_median, at_most(1), note))
        worst = int(np.argmax(ratios))
        at_worst, other_worst = (
            Samples((float(each[worst]),)) for each in (deciles, other_deciles)
        )
        rows.append(Row(f"{name}, worst decile", "h", at_worst, other, other_worst, at_most(1)))
    return rows


def _plot(bench: Workbench, blocks: Blocks, hours: Mapping[str, Values]) -> None:
    """The distributions, and the least time of each workload."""
    least = float(blocks.cost_s.sum()) / 3600
    highest = max(float(np.percentile(each, 99)) for each in hours.values())
    places = np.linspace(0.95 * least, highest, 150)
    lines = []
    for name, each in hours.items():
        shares = 100 * np.searchsorted(np.sort(each), places, "right") / len(each)
        lines.append(Line(name, [round(float(share), 2) for share in shares]))
    shown = [round(each, 4) for each in places.tolist()]
    plot = replace(PLOT, places=shown, events=[(least, "each block once")])
    draw(plot, lines, is_whole=bench.divisor == 1)
