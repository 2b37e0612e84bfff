"""Measures how well an order of files mixes the classes of a dataset, so that a group size can be
chosen.

**Design effect** (Kish, Survey Sampling, 1965): how many times the variance of what is estimated
from a sample is that from a simple random sample of the same size. Here the samples are batches,
and what a batch estimates is the part that each class has in the dataset:

    D = mean over batches of sum over classes c of (n_c / b - p_c)^2  /  its mean after full shuffle

with n_c files of class c in a batch of b files, and p_c the part of class c in all N files. The mean
after full shuffle is known (drawing without replacement):

    (1 - sum over c of p_c^2) / b  *  (N - b) / (N - 1)

So D is 1 for a full shuffle but for chance, and b where each batch is of one class of many (if b is
far below N). A batch is worth b / D fully shuffled files: Kish's effective sample size. The class
stands for the file's gradient; with gradients instead, D of a batch that is one chunk is the factor
h_D by which CorgiPile bounds the convergence of SGD in chunk-wise order (Xu et al., SIGMOD 2022,
section 4). What the measure does not see: differences between files of one class, and which files
come together again in the next epoch.

The **class** of a file is the folder directly below the measured one in which it lies, as with
torchvision's `ImageFolder`. Files directly in the measured folder are a class of their own.

All works on columns: about a second for each order of a million files. Pure; safe from any thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack

import numpy as np

from ..errors import CorruptError
from ..format.entries import Kind
from ..format.snapshot.reader import ROOT_INDEX, Indices, Snapshot
from .shuffle import GroupedOrder, chunk_order

BATCH_FILES = 256
"""Files in a batch; fewer where a dataset has not BATCHES_MIN of these."""

BATCHES_MIN = 8

GROUP_SIZES = tuple(factor * 10**power for power in range(7) for factor in (1, 3))
"""The group sizes that are compared, as far as a dataset has more chunks than that."""

DESIGN_EFFECT_MAX = 2.0
"""Up to this design effect, a group size is recommended: a batch is worth half of its files."""


def class_of_files(snapshot: Snapshot, files: Indices, below: int = ROOT_INDEX) -> Indices:
    """The class of each file below a folder: the index of a folder (see the module).

    Raises CorruptError for a damaged snapshot.
    """
    parent = snapshot.columns.parent
    folders, folder_of_file = np.unique(parent[files], return_inverse=True)
    top = folders.astype(np.int64)
    while True:
        up = parent[top].astype(np.int64)
        deeper = (top != below) & (up != below)
        if not deeper.any():
            return top[folder_of_file]
        if (up >= top)[deeper].any():  # a folder stands before what is in it
            raise CorruptError(f"damaged snapshot of {snapshot.dataset}: a folder in itself")
        top[deeper] = up[deeper]


def design_effect(classes: Indices, order: Indices, batch_files: int) -> float | None:
    """The design effect of an order, in batches of so many files; a last shorter one is left out.

    `classes` has the class of each file of the dataset: small numbers from 0 on. `order` has
    positions in it, and at least one batch of them. None where all batches have the same classes in
    any order: with one class, or where a batch has all files.
    """
    total, per_class = len(classes), np.bincount(classes)
    parts = per_class / max(total, 1)
    spread = 1 - float(parts @ parts)
    if total <= batch_files or len(per_class) < 2 or not spread:
        return None
    expected = spread / batch_files * (total - batch_files) / (total - 1)
    drawn = classes[order[: len(order) // batch_files * batch_files]]
    batch = np.arange(len(drawn)) // batch_files
    # The sum of (n/b - p)^2 is that of (n/b)^2 - 2 p n/b + p^2; n is the length of a run here.
    keys = np.sort(batch * len(per_class) + drawn)
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    runs = np.diff(starts, append=len(keys)).astype(np.float64)
    squares = float(runs @ runs) / batch_files / len(drawn)
    found = squares - 2 * float(parts[drawn].mean()) + float(parts @ parts)
    return found / expected
