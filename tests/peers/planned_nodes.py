"""What the store must give at least to four real nodes that read in a known order, and what it
gives: for a test and for the bench.

    egress = PlannedEgress(task, group=10)
    for epoch in range(3):
        outcomes = egress.read(epoch)
    egress.ratios       # of each epoch: what the store gave, by what it must give

The optimum is Belady's MIN at the unit of a chunk, for each node's share, over the accesses of all
ranks, which read in step (`planned_reads.py`); in a full shuffle, where fetching chunks would read
more than the readers want, it is all but what the nodes can hold.

Paced readers are in step where the machine is fast enough. Without a pace, each waits behind each
batch for the others, and for all masters to know where they are: then nothing depends on how fast
the machine is.
"""

import itertools

import numpy as np
import numpy.typing as npt

from diesel_fs.orders.computed import ComputedOrder
from diesel_fs.peers.node_cache import chunk_budget_bytes
from diesel_fs.peers.ownership import Ownership
from diesel_fs.repository.private_copies import open_snapshot_file

from ..waiting import wait_until
from .planned_reads import NODES, belady_fetches
from .running import DATASET, WAIT_MAX_S, Outcome, Reader, RunningTask

BATCH = 16
FULL = 1 << 20
"""More chunks in a group than the dataset has: a full shuffle."""

SEED = 1  # of `reader_program.py`
QUICK_MASTER = "tests.peers.quick_master"


class PlannedEgress:
    """Epochs of a task whose nodes hold half of the dataset together."""

    def __init__(
        self,
        task: RunningTask,
        *,
        group: int,
        pace_s: float | None,
        announced: str = "computed",
        batch: int = BATCH,
        is_quick: bool = False,
    ) -> None:
        """Start a reader on each node. A batch takes `pace_s`; without it, see the module.
        `is_quick`: masters tell each other of readers at once (`quick_master.py`)."""
        self._task, self._group = task, group
        self._pace_s, self._announced, self._batch = pace_s, announced, batch
        task.part = 0.5 / NODES
        master: dict[str, object] = {"master": QUICK_MASTER, "lies": ""} if is_quick else {}
        self.readers: list[Reader] = [task.reader(rank, None, **master) for rank in range(NODES)]
        for reader in self.readers:
            reader.ready()
        task.gathered()
        file = task.nodes.shared.folder / "snapshot"
        task.nodes.shared.dlcmd("save-meta", DATASET, file)
        self.snapshot = open_snapshot_file(file)
        self.got: list[int] = []
        self._accesses: list[list[int]] = [[] for _ in range(NODES)]
        self._ends: list[list[int]] = [[0] * NODES]
        self._left = [0] * NODES  # of each reader's part of the epoch that it reads
        self._following = 0  # reads of the next one
        sizes = self.snapshot.chunk_sizes
        owned = Ownership(self.snapshot.chunk_ids, sizes, NODES)
        self._owner = owned.owners(np.ones(NODES, np.bool_))
        self._room_bytes = chunk_budget_bytes(
            int(task.part * task.stored_bytes), sizes, has_disk=False
        )

    def read(self, epoch: int) -> list[Outcome]:
        """Have all readers read their parts of an epoch."""
        self._task.forget()
        self.begin(epoch)
        if self._pace_s is None:
            while self.step():
                self._tell_all()
        outcomes = self.outcomes()
        self.got.append(self._task.egress_bytes())
        for entries in itertools.zip_longest(*self._parts(epoch)):
            for chunk in self.snapshot.chunk_of(np.array(entries)).tolist():
                self._accesses[self._owner[chunk]].append(chunk)
        self._ends.append([len(each) for each in self._accesses])
        return outcomes

    def begin(self, epoch: int) -> None:
        """Start an epoch."""
        self._left = [len(each) for each in self._parts(epoch)]
        self._following = sum(len(each) for each in self._parts(epoch + 1))
        for rank, reader in enumerate(self.readers):
            reader.begin_planned(
                epoch, rank, NODES, group=self._group, batch=self._batch, pace_s=self._pace_s,
                announced=self._announced,
            )  # fmt: skip

    def step(self) -> bool:
        """Have all readers without a pace read a batch. Whether any had one left."""
        going = [rank for rank, left in enumerate(self._left) if left]
        for rank in going:
            self.readers[rank].begin_batch()
        for rank in going:
            self._left[rank] -= self.readers[rank].end_batch()
        return bool(going)

    def _parts(self, epoch: int) -> list[npt.NDArray[np.int64]]:
        """The files of each rank in an epoch, in their order."""
        return [
            ComputedOrder(SEED, epoch, self._group, rank, NODES).entries(self.snapshot)
            for rank in range(NODES)
        ]

    def _tell_all(self) -> None:
        """Wait until all masters know where the readers are."""
        left = sum(self._left) + self._following
        for rank in range(NODES):
            wait_until(
                lambda rank=rank: self._task.figure(rank, "plan", "uses_left") == left,  # type: ignore[misc]  # mypy cannot infer a lambda with defaults
                WAIT_MAX_S,
            )

    def outcomes(self) -> list[Outcome]:
        """Let all readers read what is left of the epoch."""
        while self._pace_s is None and self.step():
            pass
        return [reader.outcome() for reader in self.readers]

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
