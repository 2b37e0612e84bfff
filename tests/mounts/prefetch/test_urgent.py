"""How long readers of a plan wait for a slow store in the first epoch.

The store and the reader are simulated in virtual time. The reader needs 60 % of the store's
bandwidth, and waits for each file until it is pushed; all files fit the memory.
"""

from dataclasses import dataclass

import numpy as np

from diesel_fs.mounts.prefetch.decisions import Drop, Idle, Push, Sample
from diesel_fs.mounts.prefetch.planner import PrefetchPlanner
from tests.rows import each_row

from .simulated_kernel import chunk_wise, make_planner, next_push, push_next, shuffled, stream

COUNT = 12_800
FILE_BYTES = 110 << 10
BYTES_PER_S = 200e6
RATE = 0.6 * BYTES_PER_S / FILE_BYTES  # of the reader, in files per second
EPOCH_S = COUNT / RATE
TICK_S = 0.1


@dataclass
class Outcome:
    """How long a reader took, and how often each file was pushed."""

    seconds: float
    pushed: "np.ndarray[tuple[int], np.dtype[np.int64]]"

    @property
    def waited_part(self) -> float:
        return 1 - EPOCH_S / self.seconds


def planner_of(
    *orders: list[int], lag: int = 0, is_slow: bool = True, file_bytes: int = FILE_BYTES
) -> PrefetchPlanner:
    """A planner that knows of a stream, with memory for all."""
    planner = make_planner(COUNT, 2, file_bytes=file_bytes)
    planner.streams.announce(stream("a", *orders, lag=lag), 0.0)
    planner.set_store_is_slow(is_slow=is_slow)
    return planner


def read(
    order: list[int], *, is_slow: bool = True, file_s: float = 0.0, rate: float = RATE
) -> Outcome:
    """Read an epoch. Each file of a push that is not of one chunk takes `file_s` more."""
    planner = planner_of(order, is_slow=is_slow)
    pushed, pushed_s = np.zeros(COUNT, np.int64), np.full(COUNT, np.inf)
    now_s = reported_s = reader_s = 0.0  # `reader_s`: when the reader has read the last file
    position = 0
    while position < COUNT:
        decision = planner.next(now_s)
        match decision:
            case Push(entries=entries):
                one_by_one_s = file_s if decision.chunk < 0 else 0.0
                now_s += len(entries) * (FILE_BYTES / BYTES_PER_S + one_by_one_s)
                pushed[entries] += 1
                pushed_s[entries] = now_s
                planner.pushed(decision, entries, [], now_s)
            case Sample(entries=entries):
                planner.sampled(entries, np.ones(len(entries), np.bool_))
            case Drop(entries=entries):
                assert not len(entries), "there is memory for all"
                planner.dropped(decision)
            case Idle():
                now_s += TICK_S
        while position < COUNT and max(reader_s, pushed_s[order[position]]) <= now_s:
            reader_s = max(reader_s, pushed_s[order[position]]) + 1 / rate
            position += 1
        if now_s >= reported_s + TICK_S:
            reported_s = now_s
            planner.streams.progress("a", position, now_s)
    return Outcome(reader_s, pushed)


def test_a_full_shuffle_waits_little_though_each_chunk_has_one_of_the_first_files() -> None:
    assert read(shuffled(1, COUNT)).waited_part < 0.1
    assert read(shuffled(1, COUNT), is_slow=False).waited_part > 0.25  # by whole chunks


@each_row("group", [10, 60])
def test_a_chunk_wise_shuffle_does_not_wait_for_its_first_group(group: int) -> None:
    assert read(some_chunk_wise(group)).waited_part < 0.1


@each_row("group", [1, 60, COUNT])
def test_each_file_is_pushed_once(group: int) -> None:
    assert (read(some_chunk_wise(group)).pushed == 1).all()


def test_a_store_that_seeks_for_each_file_still_gives_chunks() -> None:
    """It takes ten times as long for files one by one. No reader is slowed down by more than the
    part of the time that single files get: to a third of the rate of whole chunks."""
    seeking_s = 9 * FILE_BYTES / BYTES_PER_S
    by_chunks = read(shuffled(1, COUNT), is_slow=False, rate=1e6).seconds
    assert read(shuffled(1, COUNT), file_s=seeking_s, rate=1e6).seconds < 3.2 * by_chunks


def test_small_files_are_never_urgent() -> None:
    planner = planner_of(shuffled(1, COUNT), file_bytes=4_096)
    for _ in range(20):
        push = push_next(planner, 0.0)
        assert push.chunk >= 0
        assert not push.is_urgent


def test_the_next_epoch_is_not_urgent_before_the_reader_comes_to_it() -> None:
    """All of this epoch is pushed, and the reader has not begun."""
    half = COUNT // 2
    planner = planner_of(shuffled(1, half), [half + entry for entry in shuffled(2, half)])
    pushed = 0
    while pushed < half:
        pushed += len(push_next(planner, 0.0).entries)
    assert not push_next(planner, 0.0).is_urgent
    planner.streams.progress("a", half - 100, 0.0)
    assert next_push(planner, 0.0).is_urgent


def test_a_loop_behind_its_workers_moves_nothing_back() -> None:
    """The workers have read some batches that the loop has not received."""
    order = some_chunk_wise(10)
    planner = planner_of(order, lag=512, is_slow=False)
    for entry in order[:500]:
        planner.missed(entry, 0.1)
    foreseen = planner.upcoming(4)
    stats = planner.stats()["streams"][0]
    planner.streams.progress("a", 64, 0.2)
    after = planner.stats()["streams"][0]
    assert (after["low"], after["high"]) == (stats["low"], stats["high"])
    assert all(map(np.array_equal, planner.upcoming(4), foreseen))


def some_chunk_wise(group: int) -> list[int]:
    order = chunk_wise(list(range(COUNT // 64)), group, 7)
    assert sorted(order) == list(range(COUNT))
    return order
