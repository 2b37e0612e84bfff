"""Benchmarks of `dlcmd forecast` and the policy `plan`, beside the tables of Lobster (ICPP 2022).

Nothing is trained: the jobs of the paper's sections 5.3 and 5.5 are simulated by
`diesel_fs.forecast`, with made-up files of ImageNet's number and sizes (log-normal, by a seed). The
store's rate, the only free one, is set so that the model of NoPFS has the paper's hit ratio; all
other systems then run with that rate, so the paper's gain by threads is not modelled. Figures of
the paper are averages over a training, ours of the last simulated epoch.

NoPFS (Dryden et al., SC 2021; github.com/spcl/NoPFS, `Sampler.cpp` and the two prefetchers): a
process for each GPU with an equal part of the memory, of which a staging buffer of 1 GiB (as in its
configurations) is filled in the order of access and emptied by use. The rest holds the files that
this process reads most often in the whole training, chosen at the start; files that another process
of the node holds are read from there. PyTorch: the kernel's page cache (least recently used, 40
GB), and workers that read two batches each ahead.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from diesel_fs.forecast.kept import MEMORY, STORE, EpochSources, replay
from diesel_fs.forecast.nodes import ForecastJob, ForecastNode, ForecastStore
from diesel_fs.forecast.reads import ALONE, EpochReads, ForecastFiles, cut_epoch, epoch_order
from diesel_fs.forecast.simulate import EpochForecast, forecast, read_epochs, timed
from diesel_fs.orders.shuffle import ChunkedFiles

from ..report import Row, at_least, at_most, no_less_than, no_more_than
from ..samples import Samples, progress
from ..workbench import Workbench

SEED = 1
SIGMA = 0.5  # of the logarithms of sizes
CHUNK_BYTES, ALIGNMENT = 4 << 20, 4096

FILES_1K, BYTES_1K = 1_281_167, 135e9
FILES_22K, BYTES_22K = 14_197_103, 1.3e12
MEMORY_BYTES, RANKS, BATCH = 40e9, 8, 32  # section 5.1; 55,457 iterations of 14,197,103 files
EPOCHS_TRAINED = 50  # section 5.3
IMAGES_PER_S = 800.0  # ResNet50 on one A100. Only its ratio to the store's rate matters
WINDOW_BYTES, STAGING_BYTES = 1 << 30, 1 << 30  # of the mount; of each process of NoPFS
WORKERS = 4

PYTORCH, NOPFS, LOBSTER = 24.5, 48.9, 63.2  # hit ratios of section 5.5, in percent
IMBALANCED_NOPFS, IMBALANCED_LOBSTER = 25.4, 17.5  # figure 8(a), iterations in percent
ON_TIME_MIN, OVER_NOPFS_MIN = 60.0, 1.2
SPEED_S_MAX = 60.0
CALIBRATIONS = 14

PERCENT = "% of files"
THE_PAPER, MODELLED = "Lobster, section 5.5", "NoPFS here"


def made_files(count: int, total_bytes: float) -> ForecastFiles:
    """Files of log-normal sizes, packed in chunks in the order of their numbers."""
    rng = np.random.default_rng(SEED)
    drawn = rng.lognormal(0.0, SIGMA, count)
    size = np.maximum(drawn / drawn.sum() * total_bytes, 1).astype(np.int64)
    end = np.cumsum(size)
    chunk = (end - 1) // CHUNK_BYTES
    first = np.searchsorted(chunk, np.arange(chunk[-1] + 1))
    offset = end - size - (end - size)[first][chunk] + ALIGNMENT
    chunk_bytes = (np.bincount(chunk, size) + ALIGNMENT).astype(np.uint64)
    ids = rng.integers(0, 256, (len(chunk_bytes), 16), np.uint8)
    chunked = ChunkedFiles(np.arange(count), chunk, ids)
    return ForecastFiles(chunked, offset, size, (-(-size // 4096)).astype(np.uint32), chunk_bytes)


def job_of(files: ForecastFiles, store_bytes_per_s: float, *, epochs: int = 3) -> ForecastJob:
    """The job of section 5.1 on one node; with less data also with less memory."""
    memory = MEMORY_BYTES * files.bytes / BYTES_1K if len(files) < FILES_1K else MEMORY_BYTES
    window = min(WINDOW_BYTES, int(memory / 16))
    node = ForecastNode(window, int(memory) - window, push_bytes_per_s=1e14)
    store = ForecastStore(0.0, store_bytes_per_s, connection_bytes_per_s=1e14)
    return ForecastJob(
        node, store, ranks=RANKS, batch=BATCH, workers=WORKERS, images_per_s=IMAGES_PER_S,
        epochs=epochs, seed=SEED,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class NoPfs:
    """The model of NoPFS: its reads, and their sources. Time depends on the store's rate."""

    files: ForecastFiles
    job: ForecastJob
    reads: Sequence[EpochReads]
    sources: Sequence[EpochSources]

    @classmethod
    def of(cls, files: ForecastFiles, *, epochs_trained: int = EPOCHS_TRAINED) -> "NoPfs":
        """Its reads in two epochs; the first fills the caches."""
        job = job_of(files, 1e9, epochs=2)
        memory = job.node.memory_bytes + job.node.window_bytes
        staging = min(STAGING_BYTES, memory // RANKS // 5)
        job = replace(job, workers=0, node=replace(job.node, window_bytes=RANKS * staging))
        is_kept = _most_read(job, files, memory // RANKS - staging, epochs_trained)
        reads, sources = [], []
        for epoch in range(job.epochs):
            each = cut_epoch(job, files, epoch_order(job, files, epoch), push_files=1)
            kept = is_kept[each.file] if epoch else np.zeros(len(each.file), np.bool_)
            requests, store_bytes = each.requests(files, ~kept, ALONE)
            none = np.zeros_like(requests)
            source = np.where(kept, MEMORY, STORE).astype(np.uint8)
            reads.append(each)
            sources.append(EpochSources(source, kept, requests, store_bytes, none, none, 0))
        return cls(files, job, reads, sources)

    def timed(self, store_bytes_per_s: float) -> EpochForecast:
        """Its second epoch, with this rate of the store."""
        store = replace(self.job.store, bytes_per_s=store_bytes_per_s)
        job = replace(self.job, store=store)
        return timed(job, self.files, self.reads, self.sources, shares_memory=False)[-1]

    def calibrated(self) -> float:
        """The store's rate at which it has the paper's hit ratio."""
        demand = self.files.bytes / len(self.files) * RANKS * IMAGES_PER_S
        low, high = 0.0, demand
        for _ in range(CALIBRATIONS):
            middle = (low + high) / 2
            if 100 * self.timed(middle).on_time < NOPFS:
                low = middle
            else:
                high = middle
        return high


def _most_read(
    job: ForecastJob, files: ForecastFiles, cache_bytes: int, epochs_trained: int
) -> npt.NDArray[np.bool_]:
    """The files that any process of NoPFS holds: each process holds those that it reads most often
    in the whole training; of equal ones, the first."""
    reads = np.zeros((job.world, len(files)), np.uint8)
    for epoch in range(epochs_trained):
        order = epoch_order(job, files, epoch)
        for rank in range(job.world):
            reads[rank, order[rank]] += 1
    is_kept = np.zeros(len(files), np.bool_)
    for counts in reads:
        preferred = np.argsort(-counts.astype(np.int16), kind="stable")
        fits = np.cumsum(files.stored[preferred]) <= cache_bytes
        is_kept[preferred[fits]] = True
    return is_kept


def hit_ratios(bench: Workbench) -> list[Row]:
    """Section 5.5: kept and on time, of NoPFS, PyTorch and our policies."""
    files = made_files(FILES_1K // bench.divisor, BYTES_1K / bench.divisor)
    nopfs = NoPfs.of(files)
    rate = nopfs.calibrated()
    theirs = nopfs.timed(rate)
    job = job_of(files, rate)
    wanted = files.bytes / len(files) * RANKS * IMAGES_PER_S
    progress(f"the store gives {rate / 1e6:.0f} MB/s; the model asks for {wanted / 1e6:.0f} MB/s")
    reads = read_epochs(job, files)
    plan, none, lru = (
        forecast(job, files, policy, reads=reads, layout="files").later
        for policy in ("plan", "none", "lru")
    )
    # Workers read file by file, two batches each ahead; the page cache has all of the memory
    memory = job.node.memory_bytes + job.node.window_bytes
    ahead = int(2 * WORKERS * BATCH * RANKS * files.bytes / len(files))
    torch = replace(job, workers=0, node=replace(job.node, window_bytes=ahead, memory_bytes=memory))
    single = _one_by_one(torch, files)
    cached = replay(torch, files, single, "lru", "files")
    pytorch = timed(torch, files, single, cached, shares_memory=False)[-1]
    # How much of our figure is due to pushes of many files
    alone = replace(job, epochs=2)
    by_file = forecast(alone, files, "none", reads=_one_by_one(alone, files), layout="files").later
    name = "lobster ImageNet-1K, 40 GB, 8 GPUs"
    note = (
        f"a model of NoPFS, and a store of {rate / 1e6:.0f} MB/s, the one free rate, for which it"
        f" has the paper's figure; seed {SEED}"
    )
    units = "files come in pushes of up to 256 of a rank, so most of a push comes before its use"
    most = "no policy can keep more than memory over data"
    on_time, kept, here = (
        Samples((100 * each,)) for each in (plan.on_time, plan.kept, theirs.on_time)
    )
    of_plan, limit = f"{name}, plan, on time", 100 * memory / files.bytes
    rows = [
        _percent(f"{name}, NoPFS, on time", theirs.on_time, NOPFS, note=note),
        _percent(f"{name}, NoPFS, kept", theirs.kept),
        _percent(f"{name}, PyTorch, on time", pytorch.on_time, PYTORCH),
        _percent(f"{name}, PyTorch, kept", pytorch.kept),
        _percent(of_plan, plan.on_time, LOBSTER, note=units),
        no_less_than(of_plan, PERCENT, on_time, ON_TIME_MIN),
        Row(of_plan, PERCENT, on_time, MODELLED, here, at_least(OVER_NOPFS_MIN)),
        no_more_than(f"{name}, plan, kept", PERCENT, kept, limit, most),
        _percent(f"{name}, none, on time", none.on_time, LOBSTER),
        _percent(f"{name}, none, files one by one, on time", by_file.on_time, LOBSTER),
        _percent(f"{name}, none, kept", none.kept),
        _percent(f"{name}, lru, kept", lru.kept),
    ]
    for policy, found in (("plan", plan), ("none", none)):
        ours, other = Samples((found.seconds,)), Samples((theirs.seconds,))
        rows.append(Row(f"{name}, {policy}, time of an epoch", "s", ours, MODELLED, other))
    return rows


def _one_by_one(job: ForecastJob, files: ForecastFiles) -> list[EpochReads]:
    """The reads of each epoch if each file is loaded by itself."""
    orders = (epoch_order(job, files, epoch) for epoch in range(job.epochs))
    return [cut_epoch(job, files, order, push_files=1) for order in orders]


def imbalance(bench: Workbench) -> list[Row]:
    """Figure 8(a): iterations with imbalance, ImageNet-22K on one node."""
    small = made_files(FILES_1K // bench.divisor, BYTES_1K / bench.divisor)
    # Files of ImageNet-22K are smaller: the store's rate is the same part of the demand
    part = NoPfs.of(small).calibrated() / (small.bytes / len(small))
    files = made_files(FILES_22K // bench.divisor, BYTES_22K / bench.divisor)
    rate = part * files.bytes / len(files)
    theirs = NoPfs.of(files, epochs_trained=2).timed(rate)
    job = job_of(files, rate, epochs=2)
    ours = forecast(job, files, "none", layout="files").later
    name = "lobster ImageNet-22K, one node"
    note = (
        "the waits of two GPUs differ by more than 10 % of computing; the paper does not define it."
        " The policy is none, which keeps as much as plan here (3 %)"
    )
    paper, what = "Lobster, figure 8", "iterations with imbalance"
    of_ours, of_theirs, lobster, nopfs = (
        Samples((percent,))
        for percent in (
            100 * ours.imbalanced, 100 * theirs.imbalanced, IMBALANCED_LOBSTER, IMBALANCED_NOPFS,
        )
    )  # fmt: skip
    over_nopfs = at_most(IMBALANCED_LOBSTER / IMBALANCED_NOPFS)
    return [
        Row(f"{name}, {what}", "%", of_ours, paper, lobster, at_most(1), note),
        Row(f"{name}, {what}", "%", of_ours, MODELLED, of_theirs, over_nopfs),
        Row(f"{name}, NoPFS, {what}", "%", of_theirs, paper, nopfs),
        _percent(f"{name}, on time", ours.on_time),
    ]


def speed(bench: Workbench) -> list[Row]:
    """Simulating ImageNet-1K: 8 ranks, 3 epochs, one policy and order. The figure is processor
    time, the time on an idle machine, since there is one thread."""
    files = made_files(FILES_1K // bench.divisor, BYTES_1K / bench.divisor)
    memory = files.bytes // 10
    node = ForecastNode(files.bytes // 50, memory, 2 * memory)
    rows = []
    for shuffle in ("full", "chunk"):
        for policy in ("plan", "lru"):
            job = ForecastJob(node, ranks=RANKS, batch=BATCH, shuffle=shuffle)
            begun_s = time.process_time()
            forecast(job, files, policy)
            taken = Samples((time.process_time() - begun_s,))
            name = f"plan of ImageNet-1K, 3 epochs, {policy}, {shuffle} order"
            rows.append(no_more_than(name, "s of a processor", taken, SPEED_S_MAX))
    return rows


def _percent(name: str, ours: float, paper: float | None = None, *, note: str = "") -> Row:
    measured = Samples((100 * ours,))
    if paper is None:
        return Row(name, PERCENT, measured, note=note)
    return Row(name, PERCENT, measured, THE_PAPER, Samples((paper,)), note=note)
