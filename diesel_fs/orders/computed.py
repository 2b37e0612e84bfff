"""Orders that every process can compute from a few numbers, so that the order itself is not sent.

Pure.
"""

from dataclasses import dataclass, replace

from ..format.snapshot.reader import ROOT_INDEX, Indices, Snapshot
from .parts import part_length, part_positions
from .shuffle import SEED_MAX, chunk_shuffle


@dataclass(frozen=True, slots=True)
class ComputedOrder:
    """The parameters of one rank's order in one epoch, with the meaning and defaults of
    `chunk_order`."""

    seed: int
    epoch: int
    group: int
    """Chunks in a group; the dataset's number of chunks or more gives a full shuffle."""
    rank: int = 0
    world: int = 1
    drop_last: bool = False
    below: int = ROOT_INDEX

    @property
    def whole(self) -> "ComputedOrder":
        """The order of all ranks together, before it is divided."""
        return replace(self, rank=0, world=1, drop_last=False)

    @property
    def following(self) -> "ComputedOrder | None":
        """The next epoch, or None if this epoch has the highest number."""
        return replace(self, epoch=self.epoch + 1) if self.epoch < SEED_MAX else None

    def entries(self, snapshot: Snapshot) -> Indices:
        """The rank's entries in order, as indices in the snapshot. Takes 0.3 s for a million files.
        Raises UsageError for numbers out of range."""
        return self.part_of(self.compute_whole(snapshot))

    def compute_whole(self, snapshot: Snapshot) -> Indices:
        """The entries of all ranks, in order. Raises as `entries`."""
        return chunk_shuffle(
            snapshot, self.seed, self.epoch, group_size=self.group, below=self.below
        )

    def part_of(self, whole: Indices) -> Indices:
        """This rank's entries, from the result of `compute_whole`."""
        if self.world == 1:
            return whole
        places = part_positions(len(whole), self.rank, self.world, drop_last=self.drop_last)
        return whole[places]

    def length_of(self, whole_length: int) -> int:
        return part_length(whole_length, self.world, drop_last=self.drop_last)
