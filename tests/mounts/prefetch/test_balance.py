"""Ranks of one node that wait for each other: the prefetcher serves them by their slack, so that a
rank with slow files delays the others little (Lobster, section 4.2)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from diesel_fs.mounts.prefetch.decisions import Push
from diesel_fs.orders.plan import Entries
from tests.rows import each_row

from .lockstep import RANKS, UNITS_AHEAD, Job, Place, memory, store
from .simulated_kernel import N, make_planner, shuffled, stream


def unlucky(bytes_per_s: float = 100e6) -> list[Place]:
    """All files of the first rank are in the store; those of the others in memory."""
    return [store(bytes_per_s), *(memory() for _ in range(RANKS - 1))]


def free(units: Sequence[Entries]) -> list[tuple[float, float]]:
    """Costs of 0 for all units."""
    return [(0.0, 0.0)] * len(units)


@pytest.mark.parametrize("bytes_per_s", [100e6, 200e6])
def test_a_rank_that_misses_everything_delays_the_others_less(bytes_per_s: float) -> None:
    """The gap between the slowest and the fastest rank is at most a fourth of that without
    costs."""
    with_costs = Job(unlucky(bytes_per_s), costs=lambda job: job.true_costs).run().gaps_s()
    without = Job(unlucky(bytes_per_s)).run().gaps_s()
    assert with_costs.mean() < without.mean() / 4
    assert np.quantile(with_costs, 0.95) < 0.001 < np.quantile(without, 0.95)
    assert np.mean(with_costs > 0.006) < np.mean(without > 0.006)  # the gap is a tenth of the time


def test_a_store_that_is_too_slow_is_never_idle() -> None:
    """The unlucky rank needs more than the store gives; then the store sets the pace, and no time
    of it is lost."""
    job = Job(unlucky(50e6), costs=lambda job: job.true_costs).run()
    least_s = job.files * (110 << 10) / 50e6
    assert job.now_s - 100.0 < 1.06 * least_s
    assert not job.wasted_bytes


@pytest.mark.parametrize("bytes_per_s", [100e6, 200e6])
def test_wrong_costs_are_corrected_by_the_times_of_pushes(bytes_per_s: float) -> None:
    """The store is predicted to be as near as memory."""
    wrong = Job(unlucky(bytes_per_s), costs=lambda _: free).run().gaps_s()
    without = Job(unlucky(bytes_per_s)).run().gaps_s()
    assert wrong.mean() < without.mean() / 4
    assert (wrong[10:] < 0.001).all(), "after ten iterations it is known better"


def test_costs_that_are_too_high_harm_nobody() -> None:
    """All ranks read from memory, and one is predicted to take a second for each unit."""

    def costs(units: Sequence[Entries]) -> list[tuple[float, float]]:
        return [(0.5, 0.5) if len(unit) and int(unit[0]) < 1_920 else (0.0, 0.0) for unit in units]

    job = Job([memory() for _ in range(RANKS)], costs=lambda _: costs).run()
    assert (job.gaps_s()[3:] < 0.001).all()


def test_a_rank_is_balanced_again_when_its_files_become_slow() -> None:
    """In the middle, the store takes over for another rank, and memory for the first one."""

    def swap(job: Job, iteration: int) -> None:
        if iteration == 30:
            places = list(job.places)
            places[0], places[5] = places[5], places[0]
            job.places = places

    gaps = Job(unlucky(), costs=lambda job: job.true_costs, change=swap).run().gaps_s()
    without = Job(unlucky(), change=swap).run().gaps_s()
    assert gaps.mean() < without.mean() / 2
    assert (gaps[45:] < 0.001).all()


def test_late_reads_at_the_start_delay_nobody_longer_than_by_turns() -> None:
    """No reader has given a sign yet, and the first read of each of three ranks comes late. These
    ranks do not wait for files that the others read much later."""

    def end_s(*, is_balanced: bool) -> float:
        places = unlucky(60e6)
        places[1:4] = [_LateOnce(0.002, 1.2e9, 1e9) for _ in range(3)]
        costs = (lambda job: job.true_costs) if is_balanced else None
        return Job(places, files=640, memory_part=6, costs=costs).run().now_s

    assert end_s(is_balanced=True) < end_s(is_balanced=False)


@dataclass
class _LateOnce(Place):
    has_been_late: bool = False

    def read(self, size: int, now_s: float) -> float:
        late_s, self.has_been_late = 0.0 if self.has_been_late else 0.4, True
        return super().read(size, now_s) + late_s


def test_a_stream_that_stands_still_does_not_block_others() -> None:
    """The unlucky rank does not read: the others do not wait for its contents."""
    job = Job(unlucky(20e6), costs=lambda job: job.true_costs, stands_still=0).run()
    least_s = len(job.iterations) * job.compute_s
    assert job.now_s - 100.0 < 1.25 * least_s


@each_row("costs_s", [0.0, 0.001, 0.1, 10.0])
def test_no_stream_is_starved_by_costs(costs_s: float) -> None:
    """While no reader moves, each stream gets its next unit within its turn: before any other
    stream has more than its share of the memory. It is read ahead at once, too."""

    def costs(units: Sequence[Entries]) -> list[tuple[float, float]]:
        return [(costs_s * (int(unit[0]) % 3), costs_s) if len(unit) else (0, 0) for unit in units]

    planner = make_planner(N, 0.25, costs=costs)
    part = N // RANKS
    for rank in range(RANKS):
        order = [rank * part + each for each in shuffled(rank, part)]
        planner.streams.announce(stream(f"rank{rank}", order), 0.0)
    pushed = np.zeros(RANKS, np.int64)
    now_s = 0.0
    while isinstance(push := planner.next(now_s), Push):
        upcoming = planner.upcoming(UNITS_AHEAD)
        assert {int(unit[0]) // part for unit in upcoming if len(unit)} == set(range(RANKS))
        pushed += np.bincount(push.entries // part, minlength=RANKS)
        now_s += 0.002
        planner.pushed(push, push.entries, [], now_s)
    assert pushed.min() > 0.75 * pushed.max()


def test_one_stream_costs_no_prediction() -> None:
    def costs(units: Sequence[Entries]) -> list[tuple[float, float]]:
        raise AssertionError("there is nothing to balance")

    planner = make_planner(N, 0.25, costs=costs)
    planner.streams.announce(stream("a", shuffled(1)), 0.0)
    while isinstance(push := planner.next(0.0), Push):
        planner.upcoming(UNITS_AHEAD)
        planner.pushed(push, push.entries, [], 0.0)
