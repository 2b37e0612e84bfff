"""The least that the store must give to four real nodes that read in a known order, and what it
gives: for a test and for the bench.

    egress = PlannedEgress(task, group=10)
    for epoch in range(3):
        outcomes = egress.read(epoch)
    egress.ratios       # for each epoch: bytes that the store gave, divided by the least

The optimum is Belady's MIN at the unit of a chunk, for each node's share, over the accesses of
all ranks, which read in step (`planned_reads.py`); in a full shuffle, where fetching chunks
would read more than the readers want, it is all but the chunks that the nodes can hold.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from diesel_fs.orders.computed import ComputedOrder
from diesel_fs.peers.members.ownership import Ownership
from diesel_fs.peers.node.ledger import chunk_budget_bytes
from diesel_fs.repository.private_copies import open_snapshot_file

from .planned_reads import NODES, belady_fetches, lru_fetches
from .running import DATASET, Outcome, Reader, RunningTask

BATCH = 16
FULL = 1 << 20
"""More chunks in a group than the dataset has: a full shuffle."""

SEED = 1  # of `reader_program.py`


class PlannedEgress:
    def __init__(
        self, task: RunningTask, *, group: int, pace_s: float, announced: str = "computed"
    ) -> None:
        """A batch of 16 files takes `pace_s`."""
        self._task, self._group = task, group
        self._pace_s, self._announced = pace_s, announced
        task.part = 0.5 / NODES
        self.readers: list[Reader] = [task.reader(rank) for rank in range(NODES)]
        for reader in self.readers:
            reader.ready()
        task.gathered()
        file = task.nodes.shared.folder / "snapshot"
        task.nodes.shared.dlcmd("save-meta", DATASET, file)
        self.snapshot = open_snapshot_file(file)
        self.got: list[int] = []
        self._accesses: list[list[int]] = [[] for _ in range(NODES)]
        self._ends: list[list[int]] = [[0] * NODES]
        sizes = self.snapshot.chunk_sizes
        owned = Ownership(self.snapshot.chunk_ids, sizes, NODES)
        self._owner = owned.owners(np.ones(NODES, np.bool_))
        self._room_bytes = chunk_budget_bytes(
            int(task.part * task.stored_bytes), sizes, has_disk=False
        )

    def read(self, epoch: int) -> list[Outcome]:
        self._task.forget()
        for rank, reader in enumerate(self.readers):
            reader.begin_planned(
                epoch, rank, NODES, group=self._group, batch=BATCH, pace_s=self._pace_s,
                announced=self._announced,
            )  # fmt: skip
        outcomes = [reader.outcome() for reader in self.readers]
        self.got.append(self._task.egress_bytes())
        parts = [
            ComputedOrder(SEED, epoch, self._group, rank, NODES).entries(self.snapshot)
            for rank in range(NODES)
        ]
        for entries in itertools.zip_longest(*parts):
            for chunk in self.snapshot.chunk_of(np.array(entries)).tolist():
                self._accesses[self._owner[chunk]].append(chunk)
        self._ends.append([len(each) for each in self._accesses])
        return outcomes

    @property
    def least(self) -> list[float]:
        if self._is_full:
            stored = float(self.snapshot.chunk_sizes.sum())
            held = min(NODES * self._room_bytes, stored)
            return [stored, *[stored - held] * (len(self.got) - 1)]
        return self._given(belady_fetches)

    @property
    def by_lru(self) -> list[float]:
        """The figure is at most the whole dataset."""
        stored = float(self.snapshot.chunk_sizes.sum())
        return [min(each, stored) for each in self._given(lru_fetches)]

    @property
    def ratios(self) -> list[float]:
        return [float(got / least) for got, least in zip(self.got, self.least, strict=True)]

    @property
    def _is_full(self) -> bool:
        return self._group >= len(self.snapshot.chunk_sizes)

    def _given(self, fetches: Callable[[Sequence[int], int, int], int]) -> list[float]:
        """`fetches` counts those from an access on."""
        sizes = self.snapshot.chunk_sizes.astype(np.float64)
        found = [0.0] * len(self.got)
        for rank, accesses in enumerate(self._accesses):
            mean = float(sizes[self._owner == rank].mean())
            room = int(self._room_bytes / mean)
            after = [fetches(accesses, room, each[rank]) for each in self._ends]
            for epoch, (before, behind) in enumerate(itertools.pairwise(after)):
                found[epoch] += (before - behind) * mean
        return found
