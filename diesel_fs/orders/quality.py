"""Measures how well an order of files mixes the classes of a dataset, to choose a group size.

**Design effect** (Kish, Survey Sampling, 1965): the variance of an estimate from a sample, divided
by that from a simple random sample of the same size. Here a sample is a batch, and its estimate is
the fraction of each class in the dataset:

    D = mean over batches of V  /  mean of V after full shuffle
    V = sum over classes c of (n_c / b - p_c)^2

with n_c files of class c in a batch of b files, and p_c the fraction of class c in all N files. The
mean of V after full shuffle is known (drawing without replacement):

    (1 - sum over c of p_c^2) / b  *  (N - b) / (N - 1)

So D is 1 for a full shuffle, up to chance, and b if each batch has files of one class only, out of
many classes (for b far below N). A batch is worth b / D fully shuffled files: Kish's effective
sample size. If V were computed from gradients, and a batch were one chunk, D would be the factor
h_D by which CorgiPile bounds the convergence of SGD in chunk-wise order (Xu et al., SIGMOD 2022,
section 4). The measure does not see differences between files of one class, files that come
together again in the next epoch, and for how many batches in a row a class is too frequent
(tests/bench/RESULTS.md: with larger groups the imbalance is smaller, but lasts longer).

The **class** of a file is its topmost folder below the measured folder, as with torchvision's
`ImageFolder`. Files directly in the measured folder are a class of their own.

An order of a million files takes about a second. Pure; safe from any thread.
"""

from dataclasses import dataclass

import numpy as np

from ..errors import CorruptError
from ..format.entries import Kind
from ..format.snapshot.reader import ROOT_INDEX, Indices, Snapshot
from .shuffle import GroupedOrder, chunk_order

BATCH_FILES = 256
"""The files in a measured batch; fewer if an order has less than BATCHES_MIN such batches."""

BATCHES_MIN = 8

GROUP_SIZES = tuple(factor * 10**power for power in range(7) for factor in (1, 3))
"""The group sizes to compare, if they are below the dataset's number of chunks."""

DESIGN_EFFECT_MAX = 4.0
"""A group size up to this design effect is recommended: a batch is then worth a quarter of its
files. A rule of thumb: many models bear steps as noisy as with such batches."""


@dataclass(frozen=True, slots=True)
class OrderQuality:
    """`memory_bytes`: the size of the chunks of two neighbouring groups, for the largest such pair.
    `chunks_in_batch`: the mean number of chunks that a batch comes from. `design_effect`: see the
    module; None if all batches have the same classes in any order.
    """

    memory_bytes: int
    chunks_in_batch: float
    design_effect: float | None


@dataclass(frozen=True, slots=True)
class QualityReport:
    """The quality of several orders of the same files: chunk-wise with several group sizes
    (`by_group_size`, ascending), as the chunks hold the files (`packed`), and in full shuffle
    (`full`)."""

    files: int
    chunks: int
    classes: int
    batch_files: int
    packed: OrderQuality
    by_group_size: dict[int, OrderQuality]
    full: OrderQuality

    @property
    def recommended(self) -> int | None:
        """The smallest group size with a design effect of at most DESIGN_EFFECT_MAX (or that of
        full shuffle, if it is larger by chance); None if there is none, or there are no classes to
        mix."""
        limit = max(DESIGN_EFFECT_MAX, self.full.design_effect or 0.0)
        for group_size, quality in self.by_group_size.items():
            if quality.design_effect is not None and quality.design_effect <= limit:
                return group_size
        return None


def compare_group_sizes(
    snapshot: Snapshot,
    seed: int,
    epoch: int,
    group_size: int,
    *,
    rank: int = 0,
    world: int = 1,
    drop_last: bool = False,
    below: int = ROOT_INDEX,
) -> QualityReport:
    """Measure the orders of an epoch with the group sizes GROUP_SIZES and `group_size`, the packed
    sequence of files (for all ranks together), and full shuffle.

    The other parameters are those of `chunk_order`. Raises UsageError for numbers out of range, and
    CorruptError for a damaged snapshot.
    """

    def ordered(size: int) -> GroupedOrder:
        return chunk_order(
            snapshot, seed, epoch, group_size=size, rank=rank, world=world, drop_last=drop_last,
            below=below,
        )  # fmt: skip

    requested = ordered(group_size)
    entries = snapshot.files() if below == ROOT_INDEX else snapshot.walk(below)
    files = entries[snapshot.stat_many(entries).kind == Kind.FILE]
    chunk, chunk_bytes = snapshot.chunk_of(files), snapshot.chunk_sizes.astype(np.int64)
    names, classes = np.unique(class_of_files(snapshot, files, below), return_inverse=True)
    chunks = len(np.unique(chunk))
    batch_files = max(min(BATCH_FILES, len(requested.indices) // BATCHES_MIN), 1)

    place_of = np.empty(len(snapshot), np.int64)  # of an entry, among the files
    place_of[files] = np.arange(len(files))

    def measured(order: GroupedOrder) -> OrderQuality:
        places = place_of[order.indices]
        return OrderQuality(
            _two_groups_bytes_max(chunk[places], order.ends, chunk_bytes),
            _different_mean(chunk[places], batch_files),
            design_effect(classes, places, batch_files),
        )

    sizes = sorted({group_size, *(size for size in GROUP_SIZES if size < chunks)})
    packed = np.lexsort((snapshot.columns.offset[files], chunk))
    return QualityReport(
        files=len(requested.indices),
        chunks=chunks,
        classes=len(names),
        batch_files=batch_files,
        packed=measured(GroupedOrder(files[packed], _run_ends(chunk[packed]))),
        by_group_size={
            size: measured(requested if size == group_size else ordered(size)) for size in sizes
        },
        full=measured(ordered(max(chunks, 1))),
    )


def class_of_files(snapshot: Snapshot, files: Indices, below: int = ROOT_INDEX) -> Indices:
    """The class of each file below the folder `below`, as the entry of the class's folder. Raises
    CorruptError for a damaged snapshot."""
    parent = snapshot.columns.parent
    folders, folder_of_file = np.unique(parent[files], return_inverse=True)
    top = folders.astype(np.int64)
    while True:
        up = parent[top].astype(np.int64)
        deeper = (top != below) & (up != below)
        if not deeper.any():
            return top[folder_of_file]
        if (up >= top)[deeper].any():  # a folder must come before its entries
            raise CorruptError(f"damaged snapshot of {snapshot.dataset}: a folder in itself")
        top[deeper] = up[deeper]


def design_effect(classes: Indices, order: Indices, batch_files: int) -> float | None:
    """The design effect of an order. A shorter last batch is left out.

    `classes` has the class of each file of the dataset: small numbers from 0 on. `order` has
    positions in `classes`, enough for at least one batch. Returns None if all batches have the same
    classes in any order: there is one class, or a batch has all files.
    """
    total, per_class = len(classes), np.bincount(classes)
    parts = per_class / max(total, 1)
    spread = 1 - float(parts @ parts)
    if total <= batch_files or len(per_class) < 2 or not spread:
        return None
    expected = spread / batch_files * (total - batch_files) / (total - 1)
    drawn = classes[order[: len(order) // batch_files * batch_files]]
    batch = np.arange(len(drawn)) // batch_files
    # V is the sum of (n/b - p)^2 = (n/b)^2 - 2 p n/b + p^2. A run of equal sorted keys has the n
    # files of one class in one batch.
    keys = np.sort(batch * len(per_class) + drawn)
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    runs = np.diff(starts, append=len(keys)).astype(np.float64)
    squares = float(runs @ runs) / batch_files / len(drawn)
    found = squares - 2 * float(parts[drawn].mean()) + float(parts @ parts)
    return found / expected


def _run_ends(values: Indices) -> Indices:
    """The position after each run of equal values."""
    if not len(values):
        return np.empty(0, np.int64)
    return np.append(np.flatnonzero(np.diff(values)) + 1, len(values))


def _two_groups_bytes_max(chunks: Indices, ends: Indices, chunk_sizes: Indices) -> int:
    """For the largest pair of neighbouring groups, or the only group. `chunks` has the chunk of
    each file in the order, `ends` the ends of the groups."""
    group = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
    count = len(chunk_sizes)
    keys = np.unique(group * max(count, 1) + chunks)
    per_group = np.bincount(keys // max(count, 1), weights=chunk_sizes[keys % max(count, 1)])
    pairs = per_group + np.append(per_group[1:], 0.0)[: len(per_group)]
    return int(pairs.max(initial=0))


def _different_mean(values: Indices, batch_files: int) -> float:
    """The mean number of different values in a batch. A shorter last batch is left out."""
    whole = values[: len(values) // batch_files * batch_files].reshape(-1, batch_files)
    if not len(whole):
        return 0.0
    ordered = np.sort(whole, axis=1)
    return float(np.mean(1 + np.count_nonzero(np.diff(ordered, axis=1), axis=1)))
