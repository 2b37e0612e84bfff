"""Benchmarks of importance sampling, beside the tables of iCache (HPCA 2023).

`accuracy` and `accuracy_of_less` train a network with half of the samples of each epoch, or 30 %,
chosen by importance, at random, and with substitutes (tables I and III). `hits` is the part of an
epoch's samples in memory (figures 11 and 16) by the prefetch planner of a mount, at the sizes of
CIFAR-10 and ImageNet, with the losses that a network has left in each epoch of `accuracy`, drawn
again with replacement; time is not simulated. `jobs` trains two jobs on one dataset with a shared
cache for 20 % (figure 14), which keeps the samples that are important to one of them, or to both by
percentile and benefit: on a real mount, and simulated. `epochs` is a training loop without a model
on a real mount of a store with 5 ms and 200 MB/s, `overhead` the time and memory for 1.28 million
samples.

The paper's samples lie one by one on a file system; ours lie in chunks.
"""

import json
import statistics
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from diesel_fs.cache.policies.importance import ImportanceHeap
from diesel_fs.mounts.prefetch.decisions import Drop, Push, Sample
from diesel_fs.mounts.prefetch.planner import PrefetchPlanner
from diesel_fs.orders.importance import DrawRule, is_low, substituted
from diesel_fs.orders.plan import Epoch, Stream

from ..dlcmd import DEADLINE_S, Dlcmd, last_line
from ..inputs import D110, Indices, Shape
from ..plot import Line, Plot, draw
from ..report import Row, at_most, no_less_than, no_more_than
from ..samples import OURS, Samples, alternate, progress
from ..store import SlowStore, slow_store
from ..workbench import Workbench
from .accuracy import (
    PERCENT,
    POINTS,
    POINTS_LOST_MAX,
    Difference,
    Runs,
    of,
    probe,
    probe_seeds,
    put_images,
)
from .small_images import made_long_tail

IMAGES, TEST_IMAGES, IMAGES_SEED, TEST_SEED, PACKING_SEED = 20_000, 20_000, 1, 2, 3
EPOCHS, BATCH, WIDTH = 16, 64, 32
SHARE, SEEDS = 0.5, 5
LESS, LESS_SEEDS = 0.3, 10
WARM_UP_DIVISOR = 6
"""The first sixth of the epochs has all samples: with fewer, importance was worse than chance in
trainings of 48 epochs."""
FULL, UNIFORM, BY_IMPORTANCE = "full order", "uniform subsampling", "importance"

CACHES = (0.2, 0.4, 0.6, 0.8)
"""The parts of the dataset that a cache holds, as in figure 16."""
PAPER_OURS, PAPER_LRU = (0.37, 0.55, 0.69, 0.83), (0.02, 0.09, 0.23, 0.48)
KEPT, SUBSTITUTED = "kept by importance", "with substitutes"
HITS_MIN = {KEPT: 0.25, SUBSTITUTED: 0.37}
"""Those of figure 11, for ShuffleNet."""
FASTER_MIN = 1.7
SIZES = {"CIFAR-10": 50_000, "ImageNet": 1_281_167}
LARGE = 1_000_000
"""For this many samples only the smallest cache is simulated: that takes minutes."""
SAMPLE_BYTES, CHUNK_SAMPLES, READ_AT_ONCE = 110 << 10, 36, 256

COUNTED = 4
"""Number of epochs at the end in which hits are counted."""
JOB_WIDTHS, JOB_BENEFITS, JOB_ROUNDS = (32, 8), (3.0, 2.0), 3
SENDING = {"of the first job": (0,), "of the second job": (1,), OURS: (0, 1)}
"""The jobs, of two, that send their importances to the mount."""

BASE, H_CACHE = "full order, LRU", "and H-cache"
ABLATION = {
    BASE: (("announced", "plan"), 1.0),
    "importance sampling, LRU": (("sampled", "plan"), 1.4),
    H_CACHE: (("importance", "importance"), 1.7),
    "and L-cache": (("substitute", "importance"), 2.3),
}
"""The way and the `--evict` of each side, and how many times as fast as the base it is in iCache's
figure 10."""
REQUESTS_OVER = "requests over samples that were not kept"
BYTES_OVER = "bytes over those of samples that were not kept"
EPOCHS_COUNTED = 3

_PROGRAM = Path(__file__).parent / "importance_program.py"

PLOT = Plot(
    "importance",
    "samples found in memory, beside iCache's figure 16",
    "cache, as a part of the dataset",
    "% of an epoch's samples",
    CACHES,
    over_time=True,
)
ACCURACY_PLOT = Plot(
    "importance-accuracy",
    "accuracy with half of the samples in each epoch (95 % intervals)",
    "how they are chosen",
    "percentage points",
    (),
    over_time=True,
    differences=True,
)

Losses = npt.NDArray[np.float32]
"""Losses by epoch and sample."""


def accuracy(bench: Workbench) -> list[Row]:
    """Train a small network in each way and with each seed, and test it."""
    runs = _trainings(bench, SHARE, SEEDS)
    rows, lines = _compared(runs, SHARE)
    ways = [way for way in _ways(runs) if way != FULL]
    places = [float(place) for place in range(len(ways))]
    plot = replace(ACCURACY_PLOT, places=places, events=[*zip(places, ways, strict=True)])
    drawn = [
        Line(f"less {name}", [each.mean for each in found], [each.half_width for each in found])
        for name, found in lines.items()
    ]
    draw(plot, drawn, is_whole=bench.divisor == 1)
    return rows


def accuracy_of_less(bench: Workbench) -> list[Row]:
    runs = _trainings(bench, LESS, LESS_SEEDS, FULL, UNIFORM, BY_IMPORTANCE)
    return _compared(runs, LESS)[0]


def _trainings(bench: Workbench, share: float, seeds: int, *ways: str) -> Runs:
    """The output of the probe for each seed; without `ways`, for all of them."""
    with bench.scratch() as folder:
        dlcmd, numbers = _packed(bench, folder), json.dumps({**_numbers(bench), "share": share})
        return probe_seeds(bench, dlcmd, seeds, "ways", numbers, json.dumps(ways))


def _ways(runs: Runs) -> Sequence[str]:
    return [name for name in runs[0] if f"{name}, samples" in runs[0]]


def _compared(runs: Runs, share: float) -> tuple[list[Row], Mapping[str, Sequence[Difference]]]:
    """Rows of each way but the full order, and its differences from the full order and from samples
    at random."""
    full, rows = of(runs, FULL), []
    lines: dict[str, list[Difference]] = {FULL: [], UNIFORM: []}
    for way in _ways(runs):
        if way == FULL:
            continue
        lost, gained = (Difference.of(of(runs, way), of(runs, other)) for other in lines)
        lines[FULL].append(lost)
        lines[UNIFORM].append(gained)
        note = f"less {FULL}: {lost}; less {UNIFORM}: {gained}"
        progress(f"{way}: {note}")
        name = f"accuracy with {share:.0%} of the samples, {way}"
        rows.append(Row(name, PERCENT, Samples(of(runs, way)), FULL, Samples(full), note=note))
        if way == BY_IMPORTANCE:
            worst = Samples((lost.half_width - lost.mean,))
            what = f"{name}: lost against {FULL}, farther end of the 95 % interval"
            rows.append(no_more_than(what, POINTS, worst, POINTS_LOST_MAX))
            least = Samples((gained.mean - gained.half_width,))
            what = f"{name}: gained over {UNIFORM}, lower end of the 95 % interval"
            rows.append(no_less_than(what, POINTS, least, 0))
    return rows, lines


def _packed(bench: Workbench, folder: Path) -> Dlcmd:
    """A repository with images that have a long tail, packed in random order."""
    images = IMAGES // bench.divisor
    order = np.random.default_rng(PACKING_SEED).permutation(images)
    return put_images(folder, made_long_tail(images, IMAGES_SEED), {"images": order})


def _numbers(bench: Workbench) -> dict[str, float]:
    return {
        "epochs": max(EPOCHS // bench.divisor, 3),
        "batch": BATCH if bench.divisor == 1 else 16,
        "width": WIDTH if bench.divisor == 1 else 8,
        "test_images": TEST_IMAGES // bench.divisor,
        "test_seed": TEST_SEED,
        "share": SHARE,
        "warm_up": max(EPOCHS // bench.divisor // WARM_UP_DIVISOR, 1),
    }


def hits(bench: Workbench) -> list[Row]:
    """Simulate epochs with recorded losses, at several sizes of caches and datasets."""
    with bench.scratch() as folder:
        recorded = _recorded(bench, _packed(bench, folder), folder / "losses", 0)
    rows = []
    for what, count in SIZES.items():
        losses = _drawn_again(recorded, count // bench.divisor)
        caches = CACHES[:1] if count >= LARGE else CACHES
        found = [_parts_in_memory(losses, cache) for cache in caches]
        for number, (cache, (by_part, times)) in enumerate(zip(caches, found, strict=True)):
            name = f"samples of {what} in memory, cache for {cache:.0%}"
            limits = HITS_MIN if cache == CACHES[0] else {}
            notes = {part: f"iCache: {limit}" for part, limit in limits.items()}
            notes |= {"LRU": f"iCache: {PAPER_LRU[number]}"}
            notes |= {SUBSTITUTED: f"iCache: {PAPER_OURS[number]}"}
            for part, value in by_part.items():
                row = Row(f"{name}, {part}", "of 1", Samples((value,)), note=notes.get(part, ""))
                if part in limits:
                    row = no_less_than(row.name, row.unit, row.ours, limits[part], row.note)
                rows.append(row)
            less = f"{name}: reads from the store, LRU's over ours"
            rows.append(no_less_than(less, "times", Samples((times,)), FASTER_MIN))
        if what == "CIFAR-10":
            ours = {f"ours, {part}": [each[part] for each, _ in found] for part in found[0][0]}
            shown = {**ours, "iCache": PAPER_OURS, "iCache's LRU": PAPER_LRU}
            lines = [Line(name, [100 * each for each in values]) for name, values in shown.items()]
            draw(PLOT, lines, is_whole=bench.divisor == 1)
    return rows


def _recorded(bench: Workbench, dlcmd: Dlcmd, file: Path, seed: int, **more: float) -> Losses:
    probe(dlcmd, seed, "ways", json.dumps({**_numbers(bench), **more}), "[]", str(file))
    images = IMAGES // bench.divisor
    return np.frombuffer(file.read_bytes(), np.float32).reshape(-1, images)


def _drawn_again(recorded: Losses, count: int) -> Losses:
    """The losses of `count` samples, drawn from the recorded ones with replacement."""
    rng = np.random.default_rng(1)
    chosen = rng.integers(0, recorded.shape[1], count)
    return recorded[:, chosen] * rng.lognormal(0, 0.02, count).astype(np.float32)


def _draws(
    losses: Losses, rule: DrawRule | None, seed: int = 1
) -> Sequence[tuple[Indices, npt.NDArray[np.float32]]]:
    """The samples of each epoch in order, and the probability of each sample."""
    count = losses.shape[1]
    known = np.full(count, np.nan, np.float32)
    found = []
    for epoch, left in enumerate(losses):
        chances, drawn = np.ones(count, np.float32), np.arange(count)
        if rule is not None and epoch:
            chances = rule.probabilities(known, seed, epoch)
            drawn = rule.draw(chances, seed, epoch)
        known[drawn] = left[drawn]
        found.append((np.random.default_rng((seed, epoch)).permutation(drawn), chances))
    return found


def _parts_in_memory(losses: Losses, cache: float) -> tuple[dict[str, float], float]:
    """The part of the last epochs' samples that is in memory, for each way of caching; and how many
    times as much LRU reads from the store as ours."""
    lru = _by_lru(losses, cache, None)
    sampled = _by_lru(losses, cache, DrawRule(SHARE))
    kept, reads = _planned(losses, cache, substitutes=False)  # without substitutes: comparable
    with_substitutes, _ = _planned(losses, cache, substitutes=True)
    by_part = {"LRU": lru, "importance sampling, LRU": sampled}
    by_part |= {KEPT: kept, SUBSTITUTED: with_substitutes}
    count = losses.shape[1]
    progress(f"cache for {cache:.0%} of {count:,}: {by_part}")
    return by_part, (1 - lru) * count / reads


def _by_lru(losses: Losses, cache: float, rule: DrawRule | None) -> float:
    """Hits of a cache that evicts the least recently read sample."""
    room = int(cache * losses.shape[1])
    cached: OrderedDict[int, None] = OrderedDict()
    hits, reads = 0, 0
    draws = _draws(losses, rule)
    for epoch, (drawn, _) in enumerate(draws):
        is_counted = epoch >= len(draws) - COUNTED
        for sample in drawn.tolist():
            if sample in cached:
                cached.move_to_end(sample)
                hits += is_counted
            else:
                cached[sample] = None
                if len(cached) > room:
                    cached.popitem(last=False)
            reads += is_counted
    return hits / reads


def _planner(count: int, cache: float) -> tuple[PrefetchPlanner, Indices, "npt.NDArray[np.uint32]"]:
    """The planner of a mount with a cache, the chunk of each sample, and all samples."""
    chunks = np.arange(count) // CHUNK_SAMPLES
    planner = PrefetchPlanner(
        chunks, np.full(count, SAMPLE_BYTES), -(-count // CHUNK_SAMPLES),
        budget_bytes=int(cache * count) * SAMPLE_BYTES, keeps_important=True,
    )  # fmt: skip
    return planner, chunks, np.arange(count, dtype=np.uint32)


def _planned(losses: Losses, cache: float, *, substitutes: bool) -> tuple[float, int]:
    """Hits of the planner of a mount, and the number of reads from the store in an epoch."""
    planner, chunks, everything = _planner(losses.shape[1], cache)
    draws = _draws(losses, DrawRule(SHARE))
    hits, total, now_s = 0, 0, 0.0
    for epoch, (drawn, chances) in enumerate(draws):
        order = drawn.copy()
        if epoch:
            planner.importances.set(everything, chances, substitutes=substitutes)
        if epoch and substitutes:
            low, cached = is_low(chances), planner.resident(everything)
            places, others = substituted(order, low, cached, low, chunks, 1, epoch)
            order[places] = others
        before = planner.stats()["kept_entries"]
        now_s = _read(planner, epoch, [order], now_s)
        if epoch >= len(draws) - COUNTED:
            hits += planner.stats()["kept_entries"] - before
            total += len(order)
    return hits / total, (total - hits) // COUNTED


def _read(planner: PrefetchPlanner, epoch: int, orders: Sequence[Indices], now_s: float) -> float:
    """Announce and read an epoch of each stream ("0", "1"), side by side, as readers that never
    overtake the mount. Returns the time at its end."""
    for stream, order in enumerate(orders):
        planner.streams.announce(
            Stream(str(stream), (Epoch(epoch, order.astype(np.uint32)),)), now_s
        )
    position = 0
    while True:
        now_s += 1e-4
        match planner.next(now_s):
            case Push() as push:
                planner.pushed(push, push.entries, [], now_s)
            case Drop() as dropped:
                planner.dropped(dropped)
            case Sample() as sample:
                planner.sampled(sample.entries, np.ones(len(sample.entries), np.bool_))
            case _:
                if position >= max(map(len, orders)):
                    for stream in range(len(orders)):
                        planner.streams.withdraw(str(stream))
                    return now_s
                position += READ_AT_ONCE
                for stream, order in enumerate(orders):
                    planner.streams.progress(str(stream), min(position, len(order)), now_s, epoch)


def jobs(bench: Workbench) -> list[Row]:
    """Two jobs that share a cache: on a mount, and simulated with the losses of two networks."""
    losses = []
    with bench.scratch() as folder:
        dlcmd = _packed(bench, folder)
        for seed, width in enumerate(JOB_WIDTHS):
            recorded = _recorded(bench, dlcmd, folder / f"losses{seed}", seed, width=width)
            losses.append(_drawn_again(recorded, SIZES["CIFAR-10"] // bench.divisor))
    found = {name: _shared(losses, which) for name, which in SENDING.items()}
    for name, hit in found.items():
        progress(f"values {name}: {hit[0]:.3f} and {hit[1]:.3f} of the samples are in memory")
    missed = {name: Samples((2 - sum(hit),)) for name, hit in found.items()}
    notes = {name: f"in memory: {found[OURS]} of both jobs; {hit}" for name, hit in found.items()}
    rows = []
    for what, unit, figures, texts in (
        ("an epoch of each", "s", *_timed_jobs(bench)),
        ("missed samples of both", "of 2", missed, notes),
    ):
        name = f"two jobs on one mount, cache for 20%, {what}, values of both merged"
        ours = figures.pop(OURS)
        for side, theirs in figures.items():
            row = Row(name, unit, ours, f"values {side}", theirs, at_most(1), texts[side])
            rows.append(row)
    return rows


def _shared(losses: Sequence[Losses], senders: Sequence[int]) -> tuple[float, ...]:
    """The part of its samples that each job finds in memory, if the jobs in `senders` send their
    importances."""
    planner, _, everything = _planner(losses[0].shape[1], CACHES[0])
    draws = [_draws(each, DrawRule(SHARE), seed) for seed, each in enumerate(losses)]
    hits, now_s = [0, 0], 0.0
    epochs = len(draws[0])
    for epoch in range(epochs):
        for job in senders if epoch else ():
            chances, benefit = draws[job][epoch][1], JOB_BENEFITS[job]
            planner.importances.set(everything, chances, job=str(job), benefit=benefit)
        orders = [of_job[epoch][0] for of_job in draws]
        if epoch >= epochs - COUNTED:
            for job, order in enumerate(orders):
                hits[job] += int(np.count_nonzero(planner.resident(order)))
        now_s = _read(planner, epoch, orders, now_s)
    return tuple(hit / COUNTED / len(orders[0]) for hit in hits)


def _timed_jobs(bench: Workbench) -> tuple[dict[str, Samples], dict[str, str]]:
    """Two jobs train on one mount, side by side, and one of them or both send their importances:
    the seconds of an epoch of both, and notes."""
    rounds: dict[str, list[list[float]]] = {name: [] for name in SENDING}
    benefits: dict[str, str] = {}
    with _stored_slowly(bench) as (shape, slow):
        for _ in range(JOB_ROUNDS):
            for name, senders in SENDING.items():
                with _mounted(bench, shape, slow, "--evict", "importance") as start:
                    started = [start(("importance", str(1 + job)), {
                        "SLURM_JOB_ID": str(1 + job),
                        # A process that is not the first on its node sends nothing.
                        "LOCAL_RANK": str(int(job not in senders)),
                    }) for job in range(2)]  # fmt: skip
                    results = [_result_of(job) for job in started]
                rounds[name].append([statistics.mean(each["seconds"][2:]) for each in results])
                both = " and ".join(f"{each['benefit']:.2f}" for each in results)
                benefits[name] = f"benefits {both}"
                progress(f"values {name}: {rounds[name][-1]} s an epoch; {benefits[name]}")
    means = {
        name: " and ".join(f"{statistics.median(job):.2f}" for job in zip(*each, strict=True))
        for name, each in rounds.items()
    }
    texts = {name: f"{means[name]} s, {benefits[name]}" for name in SENDING}
    figures = {name: Samples(tuple(map(sum, each))) for name, each in rounds.items()}
    return figures, {name: f"{texts[OURS]}; {text}" for name, text in texts.items()}


class _Trained(TypedDict):
    seconds: list[float]  # of each epoch
    kept: float
    substituted: int
    benefit: float
    requests: float  # to the store, of the last epochs in the mean
    bytes: float
    requests_over_missed: float  # over the samples that the mount has not kept
    bytes_over_missed: float


_Start = Callable[[Sequence[str], Mapping[str, str]], "subprocess.Popen[str]"]
"""Starts a training with a way, perhaps the number of a job, and environment variables."""


@contextmanager
def _stored_slowly(bench: Workbench) -> Iterator[tuple[Shape, SlowStore]]:
    shape, source = bench.prepared(D110)
    with bench.scratch() as folder, slow_store(folder, source, "images") as slow:
        yield shape, slow


@contextmanager
def _mounted(bench: Workbench, shape: Shape, slow: SlowStore, *options: str) -> Iterator[_Start]:
    """Mount the images with an empty cache for a fifth of them; the yielded function starts
    trainings there."""
    bench.warm_page_cache(slow.store.bucket / "datasets")
    memory = ("--memory", str(int(CACHES[0] * shape.bytes)))
    with bench.scratch() as scratch:
        dlcmd, at = slow.user(scratch), scratch / "mount"

        def start(words: Sequence[str], variables: Mapping[str, str]) -> "subprocess.Popen[str]":
            way, *job = words
            counts = f"{slow.store.endpoint}/counts"
            command = [sys.executable, "-P", str(_PROGRAM), str(at), way, str(SHARE), counts, *job]
            environment = dlcmd.environment | {**variables}
            return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

        with dlcmd.mounted("images", at, *memory, *options):
            yield start


def _result_of(training: "subprocess.Popen[str]") -> _Trained:
    """The output of a training at its end. Raises CalledProcessError."""
    try:
        output, _ = training.communicate(timeout=DEADLINE_S)
    finally:
        training.kill()
    if training.returncode:
        raise subprocess.CalledProcessError(training.returncode, training.args)
    found: _Trained = json.loads(output.splitlines()[-1])
    return found


def epochs(bench: Workbench) -> list[Row]:
    """The ablation of figure 10 on a mount: base, importance sampling, H-cache and L-cache. No
    epoch is known before it begins. Without importances, the files that were read first leave
    first, as by LRU."""
    with _stored_slowly(bench) as (shape, slow):

        def run(way: str, evict: str) -> dict[str, float]:
            with _mounted(bench, shape, slow, "--evict", evict) as start:
                result = _result_of(start((way,), {}))
            return {
                "s an epoch": statistics.mean(result["seconds"][-EPOCHS_COUNTED:]),
                "requests": result["requests"], "MB": result["bytes"] / 1e6,
                "kept": result["kept"], "substituted": result["substituted"],
                REQUESTS_OVER: result["requests_over_missed"],
                BYTES_OVER: result["bytes_over_missed"],
            }  # fmt: skip

        sides = {side: partial(run, *words) for side, (words, _) in ABLATION.items()}
        rounds = alternate(min(bench.rounds, JOB_ROUNDS), sides)
    rows = []
    begin = f"epochs of {shape.name}, cache for {CACHES[0]:.0%}"
    for side, (_, faster) in ABLATION.items():
        name = f"{begin}, {side}"
        kept, replaced = (rounds.of(side, each) for each in ("kept", "substituted"))
        assert isinstance(kept, Samples)
        assert isinstance(replaced, Samples)
        note = f"kept {kept.median:.3f} of the samples, {replaced.median:.0f} substituted"
        if side != BASE:
            target = at_most(1 / faster)
            for unit in ("s an epoch", "requests", "MB"):
                is_timed = unit == "s an epoch"
                rows.append(Row(
                    name, unit, rounds.of(side, unit), BASE, rounds.of(BASE, unit),
                    target if is_timed else None, f"iCache: {faster} times as fast; {note}",
                ))  # fmt: skip
    for unit, most in ((REQUESTS_OVER, 1.05), (BYTES_OVER, 1.1)):
        ours = rounds.of(H_CACHE, unit)
        rows.append(no_more_than(f"{begin}, {H_CACHE}, {unit}", "times", ours, most))
    return rows


def overhead(bench: Workbench) -> list[Row]:
    """The sampler's and the mount's time and memory for 1.28 million samples."""
    count = SIZES["ImageNet"] // bench.divisor
    command = [sys.executable, "-P", str(_PROGRAM), "overhead", str(count)]
    result: dict[str, float] = json.loads(last_line(command))
    heap = ImportanceHeap(count)
    everything = np.arange(count, dtype=np.uint32)
    heap.insert(everything[::5])
    heap.set_importances(everything, np.random.default_rng(1).random(count, np.float32))
    steps, more = [], True
    while more:
        begun_s = time.perf_counter()
        more = heap.build_some()
        steps.append(time.perf_counter() - begun_s)
    name = f"importance of {count:,} samples"
    update, drawn = Samples((result["update_s"],)), Samples((result["draw_s"],))
    sampler, mount = (Samples((size / count,)) for size in (result["bytes"], heap.bytes_max))
    return [
        no_more_than(f"{name}, update", "s", update, 0.05),
        no_more_than(f"{name}, draw and order", "s", drawn, 1),
        no_more_than(f"{name}, sampler", "bytes a sample", sampler, 40),
        no_more_than(f"{name}, mount while it sorts", "bytes an entry", mount, 20),
        Row(f"{name}, longest step of the mount", "ms", Samples((max(steps) * 1e3,))),
    ]
