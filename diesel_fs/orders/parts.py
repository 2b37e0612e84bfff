"""Deals the order of an epoch to the ranks of a training job, and deals anew what was left of it.

A **part** is what one rank reads. Parts have equal lengths. Where the number of files is no
multiple of the world (the number of ranks), the list is made longer by files from its start, or
shorter at its end, exactly as torch's `DistributedSampler(drop_last=...)` does it. But that sampler
gives a rank every `world`-th file; the parts here are contiguous, so that in a chunk-wise order
most chunks are read by one rank.

Ranks that stop in the middle of an epoch have received equally many files, since they train in
step. With the same world, each goes on in its part. With another, the files that no rank has
received are dealt to the new ranks as if they were a whole order: each is read once, and only what
makes the parts equally long is repeated or dropped. Files that the former world would have dropped
are among them. Pure; safe from any thread.
"""

from dataclasses import dataclass

import numpy as np

from ..format.snapshot.reader import Indices


@dataclass(frozen=True, slots=True)
class Partition:
    """How an order was dealt, until the ranks stopped."""

    world: int
    drop_last: bool
    position: int
    """How many files each rank had received of its part."""


def part_length(files: int, world: int, *, drop_last: bool) -> int:
    """How many files each rank gets."""
    return files // world if drop_last else -(-files // world)


def part_positions(files: int, rank: int, world: int, *, drop_last: bool) -> Indices:
    """The places in the order, which has so many files, of those that a rank gets."""
    length = part_length(files, world, drop_last=drop_last)
    if not length:
        return np.empty(0, np.int64)
    # Torch appends the start of the list, as positions beyond its end.
    return np.arange(rank * length, (rank + 1) * length) % files


def remaining(order: Indices, partition: Partition) -> Indices:
    """What no rank has received, in its order."""
    files = len(order)
    length = part_length(files, partition.world, drop_last=partition.drop_last)
    if not length or not partition.position:
        return order
    starts = np.arange(partition.world)[:, np.newaxis] * length
    is_given = np.zeros(files, np.bool_)
    is_given[(starts + np.arange(partition.position)) % files] = True
    return order[~is_given]
