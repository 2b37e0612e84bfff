"""Divides the order of an epoch among the ranks of a training job.

A **part** is the share of one rank. Parts have equal lengths: if the number of files is no multiple
of the world (the number of ranks), the list is extended by files from its start or cut at its end,
as torch's `DistributedSampler(drop_last=...)` does. That sampler gives a rank every `world`-th
file; parts here are contiguous, so in a chunk-wise order one rank reads most chunks alone.

Ranks that stop in the middle of an epoch have received the same number of files, since they train
in step. If the job resumes with another world, the files that no rank has received are divided like
a whole order, including files that the former world would have dropped.

Pure; safe from any thread.
"""

from dataclasses import dataclass

import numpy as np

from ..format.snapshot.reader import Indices


@dataclass(frozen=True, slots=True)
class Partition:
    """How an order was divided, and how far the ranks had come when they stopped."""

    world: int
    drop_last: bool
    position: int
    """The number of files that each rank had received."""


def part_length(files: int, world: int, *, drop_last: bool) -> int:
    """The number of files in each rank's part."""
    return files // world if drop_last else -(-files // world)


def part_positions(files: int, rank: int, world: int, *, drop_last: bool) -> Indices:
    """The places of a rank's files in the order."""
    length = part_length(files, world, drop_last=drop_last)
    if not length:
        return np.empty(0, np.int64)
    # The last parts continue at the start of the order, as in torch
    return np.arange(rank * length, (rank + 1) * length) % files


def remaining(order: Indices, partition: Partition) -> Indices:
    """The elements of `order` that no rank has received, in the same order."""
    files = len(order)
    length = part_length(files, partition.world, drop_last=partition.drop_last)
    if not length or not partition.position:
        return order
    starts = np.arange(partition.world)[:, np.newaxis] * length
    is_given = np.zeros(files, np.bool_)
    is_given[(starts + np.arange(partition.position)) % files] = True
    return order[~is_given]
