"""What the prefetch worker tells the task's master of the planner's streams: their epochs, and how
far they are claimed or read."""

import numpy as np

from diesel_fs.mounts.prefetch.decisions import Push
from diesel_fs.mounts.prefetch.planner import PrefetchPlanner
from diesel_fs.orders.plan import Epoch, Stream

FILES = 64


def planner() -> PrefetchPlanner:
    chunk = np.arange(FILES) // 8
    return PrefetchPlanner(chunk, np.full(FILES, 4096), FILES // 8, budget_bytes=FILES * 4096)


def epochs(*numbers: int) -> tuple[Epoch, ...]:
    return tuple(Epoch(number, np.arange(FILES, dtype=np.uint32)) for number in numbers)


def test_what_is_claimed_need_not_be_fetched_again() -> None:
    plan = planner()
    assert plan.progress_of_streams() == {}
    known = epochs(3, 4)
    plan.announce(Stream("train", known), 0.0)
    assert plan.progress_of_streams() == {"train": (known, 3, 0)}
    push = plan.next(0.0)
    assert isinstance(push, Push)
    plan.pushed(push, push.entries, [], 0.1)
    plan.next(0.2)
    told, epoch, position = plan.progress_of_streams()["train"]
    assert (told, epoch) == (known, 3)
    assert position >= len(push.entries) > 0, "before the reader has read anything"


def test_a_reader_ahead_of_the_pushes_counts_as_far_as_it_is() -> None:
    plan = planner()
    plan.announce(Stream("train", epochs(3, 4)), 0.0)
    plan.progress("train", 40, 1.0)
    assert plan.progress_of_streams()["train"][1:] == (3, 40)
    plan.progress("train", FILES, 2.0)
    assert plan.progress_of_streams()["train"][1:] == (4, 0)


def test_streams_that_nobody_follows_yet_are_not_told() -> None:
    plan = planner()
    plan.announce(Stream("list", epochs(0), tentative=True), 0.0)
    assert plan.progress_of_streams() == {}
