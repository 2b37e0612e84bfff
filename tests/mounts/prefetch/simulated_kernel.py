"""Simulates a page cache, readers and a prefetch worker, in one thread and virtual time.

It shares no code with the planner: it keeps a plain set of the resident files, and counts.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from diesel_fs.mounts.prefetch.decisions import Drop, Idle, Push, Sample, UnitCosts
from diesel_fs.mounts.prefetch.planner import PrefetchPlanner
from diesel_fs.orders.plan import Epoch, Stream

ENTRY_BYTES = 4_096
CHUNK_ENTRIES = 64
N = 20_480
"""Entries of the dataset of most tests."""
START_S = 100.0
"""When a `Machine` begins, in its own time."""
CHUNKS = list(range(N // CHUNK_ENTRIES))


def shuffled(seed: int, entries: int = N) -> list[int]:
    return random.Random(seed).sample(range(entries), entries)


def make_planner(
    entries: int,
    budget: float,
    policy: Literal["on-demand", "oneshot"] = "on-demand",
    *,
    chunk_entries: int = CHUNK_ENTRIES,
    file_bytes: int = ENTRY_BYTES - 7,
    costs: UnitCosts | None = None,
    keeps_important: bool = False,
) -> PrefetchPlanner:
    """A planner for a dataset of equal files; `budget` is a part of the dataset's pages."""
    pages_bytes = -(-file_bytes // ENTRY_BYTES) * ENTRY_BYTES
    return PrefetchPlanner(
        np.arange(entries) // chunk_entries,
        np.full(entries, file_bytes),
        -(-entries // chunk_entries),
        budget_bytes=int(budget * entries * pages_bytes),
        policy=policy,
        costs=costs,
        keeps_important=keeps_important,
    )


def chunk_wise(chunks: list[int], group: int, seed: int) -> list[int]:
    """Chunks in random order, files shuffled within groups of them."""
    rng = random.Random(seed)
    chunks = rng.sample(chunks, len(chunks))
    order: list[int] = []
    for start in range(0, len(chunks), group):
        files = [
            chunk * CHUNK_ENTRIES + i
            for chunk in chunks[start : start + group]
            for i in range(CHUNK_ENTRIES)
        ]
        rng.shuffle(files)
        order += files
    return order


@dataclass
class Reader:
    """A reader of an order with `workers` batches at once, and `rate` files per second in all."""

    order: list[int]
    rate: float
    workers: int = 1
    batch: int = 32
    start_s: float = 0.0  # after `START_S`
    read: int = 0  # how many of `queue` were read
    queue: list[int] = field(default_factory=list)  # positions in the order of their reads

    def __post_init__(self) -> None:
        rng = random.Random(len(self.order))
        lanes: list[list[int]] = [[] for _ in range(self.workers)]
        batches = [
            range(start, min(start + self.batch, len(self.order)))
            for start in range(0, len(self.order), self.batch)
        ]
        given = 0
        while given < len(batches) or any(lanes):
            for lane in lanes:
                if not lane and given < len(batches):
                    lane.extend(reversed(batches[given]))
                    given += 1
            lane = rng.choice([lane for lane in lanes if lane])
            self.queue.append(lane.pop())

    @property
    def done(self) -> bool:
        return self.read >= len(self.queue)


@dataclass
class Machine:
    planner: PrefetchPlanner
    entry_count: int
    pushed_files_per_s: float = 100_000.0
    now_s: float = START_S
    cached: set[int] = field(default_factory=set)  # the resident files
    watched: set[int] = field(default_factory=set)
    pushes_of: Counter[int] = field(default_factory=Counter)  # per chunk
    pushed: int = 0
    dropped: int = 0
    decisions: int = 0
    reads: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    busy_until_s: float = 0.0
    resident_bytes_max: int = 0
    unknown: set[int] = field(default_factory=set)  # entries that the kernel refuses to take
    failing: bool = False  # the store fails after half of each push
    meanwhile: Callable[[], None] | None = None  # happens once, while a push waits for its contents

    def run_decision(self) -> bool:
        """Carry out one decision. Returns whether there was one."""
        decision = self.planner.next(self.now_s)
        self.decisions += 1
        match decision:
            case Idle():
                return False
            case Push():
                entries = decision.entries.tolist()
                assert len(set(entries)) == len(entries)
                assert not self.planner.resident(decision.entries).any()
                self.watched.update(decision.markers.tolist())
                happens, self.meanwhile = self.meanwhile, None
                if happens is not None:
                    happens()
                seen = entries[: len(entries) // 2] if self.failing else entries
                done = [entry for entry in seen if entry not in self.unknown]
                absent = [entry for entry in seen if entry in self.unknown]
                self.cached.update(done)
                self.pushed += len(done)
                if decision.chunk >= 0:
                    assert {entry // CHUNK_ENTRIES for entry in entries} == {decision.chunk}
                for chunk in {entry // CHUNK_ENTRIES for entry in entries}:
                    self.pushes_of[chunk] += 1
                self.busy_until_s = self.now_s + len(entries) / self.pushed_files_per_s
                self.planner.pushed(
                    decision, done, absent, self.now_s, failed=self.failing and len(entries) > 0
                )
            case Drop():
                markers, entries = decision.markers.tolist(), decision.entries.tolist()
                assert self.watched.issuperset(markers)
                self.watched.difference_update(markers)
                assert len(set(entries)) == len(entries)
                assert self.planner.resident(decision.entries).all()
                self.cached.difference_update(entries)
                self.dropped += len(entries)
                self.planner.dropped(decision)
            case Sample():
                assert not self.watched.intersection(decision.entries.tolist())
                mask = np.array([e in self.cached for e in decision.entries.tolist()])
                self.planner.sampled(decision.entries, mask)
        self.resident_bytes_max = max(self.resident_bytes_max, self.planner.resident_set.bytes)
        return True

    def run_until_idle(self, most: int = 20_000) -> None:
        for _ in range(most):
            if not self.run_decision():
                return
        raise AssertionError("the planner never becomes idle")

    def open_and_read(self, name: str, entry: int) -> None:
        """A reader opens and reads a file. The name is for the counts alone."""
        if entry in self.watched:
            self.planner.opened(entry, self.now_s)
        self.reads[name] += 1
        if entry not in self.cached:
            self.misses[name] += 1
            self.planner.missed(entry, self.now_s)
            self.cached.add(entry)

    def run(self, readers: dict[str, Reader], pressure: float = 0.0, seed: int = 1) -> None:
        """Run until all readers are done; under pressure, some pages are freed each millisecond."""
        rng = random.Random(seed)
        tick_s = 0.001
        idle = False
        while not all(reader.done for reader in readers.values()):
            self.now_s += tick_s
            for name, reader in readers.items():
                due = int((self.now_s - START_S - reader.start_s) * reader.rate)
                while reader.read < min(due, len(reader.queue)):
                    self.open_and_read(name, reader.order[reader.queue[reader.read]])
                    reader.read += 1
                    idle = False
            if pressure and rng.random() < pressure:
                for entry in rng.sample(sorted(self.cached), len(self.cached) // 100):
                    self.cached.discard(entry)
            while not idle and self.busy_until_s <= self.now_s:
                idle = not self.run_decision()


def stream(name: str, *orders: list[int], tentative: bool = False, lag: int = 0) -> Stream:
    epochs = tuple(Epoch(number, np.array(order)) for number, order in enumerate(orders))
    return Stream(name, epochs, tentative, lag)


def pushed_ahead(part: float, *streams: Stream) -> Machine:
    """A machine that has pushed all it can for these streams, with a budget of `part` of the
    dataset."""
    machine = Machine(make_planner(N, part), N)
    for each in streams:
        machine.planner.streams.announce(each, machine.now_s)
    machine.run_until_idle()
    return machine


def next_push(planner: PrefetchPlanner, now_s: float = START_S) -> Push:
    """The next decision, which must be a push."""
    push = planner.next(now_s)
    assert isinstance(push, Push)
    return push


def push_next(planner: PrefetchPlanner, now_s: float = START_S) -> Push:
    """The next push, which is carried out."""
    push = next_push(planner, now_s)
    planner.pushed(push, push.entries, [], now_s)
    return push
