"""Simulates the ranks of a training job on one node in virtual time, and how long each waits.

Each rank has files of its own and an order that the planner knows. In each iteration a rank reads a
batch as soon as all its files are pushed; then all wait for the slowest rank, and compute. Contents
come from places with a latency and a bandwidth each. They are read ahead as `CoalescingReader`
does: within a limit of memory, and given up if they are no longer announced. The worker makes one
push at a time, and waits for its contents.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from diesel_fs.mounts.prefetch.decisions import Drop, Idle, Push, Sample, UnitCosts
from diesel_fs.orders.plan import Entries

from .simulated_kernel import make_planner, stream

RANKS = 8
FILE_BYTES = 110 << 10
CHUNK_FILES = BATCH = 32
AHEAD_BYTES = 32 << 20
UNITS_AHEAD = 16
PUSH_BYTES_PER_S = 2e9
TICK_S = 0.002


@dataclass
class Place:
    """A source of contents. All reads share `bytes_per_s`, one read gets at most
    `read_bytes_per_s`, and its first bytes come after `latency_s`."""

    latency_s: float
    bytes_per_s: float
    read_bytes_per_s: float
    free_s: float = 0.0  # when the bandwidth is free for another read

    def read(self, size: int, now_s: float) -> float:
        """Begin to read. Returns when the contents are there."""
        self.free_s = max(self.free_s, now_s) + size / self.bytes_per_s
        return max(self.free_s, now_s + size / self.read_bytes_per_s) + self.latency_s

    def cost(self, size: int) -> tuple[float, float]:
        return self.latency_s + size / self.read_bytes_per_s, size / self.bytes_per_s


def memory() -> Place:
    """The memory of this node, or of another one."""
    return Place(0.0003, 3e9, 2e9)


def store(bytes_per_s: float = 100e6) -> Place:
    """An object store: one read alone gets less than a rank needs."""
    return Place(0.03, bytes_per_s, 50e6)


@dataclass
class Job:
    """A training job of `RANKS` ranks, which read `files` files each."""

    places: Sequence[Place]  # of each rank's files
    files: int = 1_920
    compute_s: float = 0.06
    memory_part: float = 0.25  # of the dataset
    costs: Callable[["Job"], UnitCosts] | None = None
    stands_still: int = -1  # a rank that never reads; the others do not wait for it
    change: Callable[["Job", int], None] | None = None  # called at the start of each iteration
    now_s: float = 100.0
    iterations: list[list[float]] = field(default_factory=list)  # how long each rank waited
    pushes: list[tuple[float, int]] = field(default_factory=list)  # when, and the rank
    wasted_bytes: int = 0  # read and given up
    reads: int = 0  # files that were not pushed in time, while the worker was idle

    def __post_init__(self) -> None:
        count = RANKS * self.files
        self.planner = make_planner(
            count,
            self.memory_part,
            chunk_entries=CHUNK_FILES,
            file_bytes=FILE_BYTES,
            costs=self.costs(self) if self.costs else None,
        )
        self.orders: list[list[int]] = []
        for rank in range(RANKS):
            rng = np.random.default_rng(rank)
            groups = rng.permutation(self.files // CHUNK_FILES).reshape(-1, 4)
            first = rank * self.files
            order = [
                first + int(each)
                for group in groups
                for each in rng.permutation(
                    (group[:, None] * CHUNK_FILES + np.arange(CHUNK_FILES)).ravel()
                )
            ]
            self.orders.append(order)
            self.planner.streams.announce(stream(f"rank{rank}", order), self.now_s)
        self.pushed_s = np.full(count, np.inf)
        self._in_flight: dict[frozenset[int], float] = {}
        self._started_s = self.now_s
        self._finished: dict[int, float] = {}  # of this iteration, by rank

    def rank_of(self, entries: Entries) -> int:
        return int(entries[0]) // self.files

    def true_costs(self, units: Sequence[Entries]) -> list[tuple[float, float]]:
        return [
            self.places[self.rank_of(unit)].cost(len(unit) * FILE_BYTES) if len(unit) else (0, 0)
            for unit in units
        ]

    def run(self) -> "Job":
        while len(self.iterations) < self.files // BATCH:
            decision = self.planner.next(self.now_s)
            match decision:
                case Push(entries=entries):
                    self._push(decision, entries)
                case Sample(entries=entries):
                    self.planner.sampled(entries, np.isfinite(self.pushed_s[entries]))
                case Drop(entries=entries):
                    self.pushed_s[entries] = np.inf
                    self.planner.dropped(decision)
                case Idle():
                    self.now_s += TICK_S
                    self._read_unpushed()
            self._read()
        return self

    def gaps_s(self) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        """How long the fastest rank waited for the slowest in each iteration."""
        return np.array([max(waited_s) - min(waited_s) for waited_s in self.iterations])

    def _push(self, push: Push, entries: Entries) -> None:
        self._prefetch([entries, *self.planner.upcoming(UNITS_AHEAD)])
        if len(entries):
            key = frozenset(entries.tolist())
            due_s = self._in_flight.pop(key, 0.0) or self._begin(entries)
            size = len(entries) * FILE_BYTES
            self.now_s = max(self.now_s, due_s) + size / PUSH_BYTES_PER_S
            self.pushed_s[entries] = self.now_s
            self.pushes.append((self.now_s, self.rank_of(entries)))
        self.planner.pushed(push, entries, [], self.now_s)

    def _prefetch(self, units: Sequence[Entries]) -> None:
        wanted = {frozenset(unit.tolist()): unit for unit in units if len(unit)}
        for key in [key for key in self._in_flight if key not in wanted]:
            del self._in_flight[key]
            self.wasted_bytes += len(key) * FILE_BYTES
        size = sum(map(len, self._in_flight)) * FILE_BYTES
        for key, unit in wanted.items():
            if key in self._in_flight:
                continue
            size += len(unit) * FILE_BYTES
            if size > AHEAD_BYTES:
                break
            self._in_flight[key] = self._begin(unit)

    def _begin(self, unit: Entries) -> float:
        return self.places[self.rank_of(unit)].read(len(unit) * FILE_BYTES, self.now_s)

    def _read_unpushed(self) -> None:
        """While the worker is idle, ranks that wait get a file by READs of their own."""
        if self._started_s > self.now_s:
            return
        at = len(self.iterations) * BATCH
        for rank, order in enumerate(self.orders):
            batch = np.array(order[at : at + BATCH])
            missing = batch[np.isinf(self.pushed_s[batch])]
            if rank != self.stands_still and len(missing):
                self.pushed_s[missing[0]] = self.places[rank].read(FILE_BYTES, self.now_s)
                self.planner.missed(int(missing[0]), self.now_s)
                self.reads += 1

    def _read(self) -> None:
        active = [rank for rank in range(RANKS) if rank != self.stands_still]
        while len(self.iterations) < self.files // BATCH and self._started_s <= self.now_s:
            at = len(self.iterations) * BATCH
            for rank in active:
                if rank in self._finished:
                    continue
                there_s = float(self.pushed_s[self.orders[rank][at : at + BATCH]].max())
                if there_s <= self.now_s:
                    self._finished[rank] = max(there_s, self._started_s)
                    self.planner.streams.progress(f"rank{rank}", at + BATCH, self.now_s)
            if len(self._finished) < len(active):
                return
            waited_s = [each - self._started_s for each in self._finished.values()]
            self.iterations.append(waited_s)
            self._started_s = max(self._finished.values()) + self.compute_s
            self._finished = {}
            if self.change is not None:
                self.change(self, len(self.iterations))
