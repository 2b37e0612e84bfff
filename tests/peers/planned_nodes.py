"""What the store must give at least to four real nodes that read in a known order, and what it
gives: for a test and for the bench.

    egress = PlannedEgress(task, group=10)
    for epoch in range(3):
        outcomes = egress.read(epoch)
    egress.ratios       # of each epoch: what the store gave, by what it must give

The optimum is Belady's MIN at the unit of a chunk, for each node's share, over the accesses of all
ranks, which read in step (`planned_reads.py`); in a full shuffle, where fetching chunks would read
more than the readers want, it is all but what the nodes can hold.
"""

import itertools

import numpy as np

from diesel_fs.orders.computed import ComputedOrder
from diesel_fs.peers.node_cache import chunk_budget_bytes
from diesel_fs.peers.ownership import Ownership
from diesel_fs.repository.private_copies import open_snapshot_file

from .planned_reads import NODES, belady_fetches
from .running import DATASET, Outcome, Reader, RunningTask

BATCH = 16
FULL = 1 << 20
"""More chunks in a group than the dataset has: a full shuffle."""

SEED = 1  # of `reader_program.py`


class PlannedEgress:
    """Epochs of a task whose nodes hold half of the dataset together."""

    def __init__(
        self, task: RunningTask, *, group: int, pace_s: float, announced: str = "computed"
    ) -> None:
        """Start a reader on each node. A batch of 16 files takes `pace_s`."""
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
        """Have all readers read their parts of an epoch."""
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
        """The bytes that the store must give in each epoch."""
        sizes = self.snapshot.chunk_sizes.astype(np.float64)
        if self._group >= len(sizes):
            held = min(NODES * self._room_bytes, sizes.sum())
            return [sizes.sum(), *[sizes.sum() - held] * (len(self.got) - 1)]
        found = [0.0] * len(self.got)
        for rank, accesses in enumerate(self._accesses):
            mean = float(sizes[self._owner == rank].mean())
            room = int(self._room_bytes / mean)
            ends = [each[rank] for each in self._ends]
            after = [belady_fetches(accesses, room, end) for end in ends]
            for epoch, (before, behind) in enumerate(itertools.pairwise(after)):
                found[epoch] += (before - behind) * mean
        return found

    @property
    def ratios(self) -> list[float]:
        """What the store gave in each epoch, by what it must give."""
        return [float(got / least) for got, least in zip(self.got, self.least, strict=True)]
