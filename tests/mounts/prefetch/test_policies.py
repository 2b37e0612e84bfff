"""The policies of the prefetch planner by themselves: balance, the split of memory, urgent turns,
and watches.
"""

import numpy as np
import pytest

from diesel_fs.mounts.prefetch.balance import least_slack_first, slacks
from diesel_fs.mounts.prefetch.memory_split import ACCESSES_MAX, AccessCounts
from diesel_fs.mounts.prefetch.streams.watches import Watches


def test_a_unit_is_as_urgent_as_a_later_one_of_its_stream() -> None:
    need_s, cost_s = np.array([1.0, 2.0, 3.0]), np.array([0.5, 1.9, 1.0])
    assert slacks(need_s, cost_s).tolist() == pytest.approx([0.1, 0.1, 2.0])


def test_units_with_the_least_slack_are_read_ahead_first() -> None:
    slack_s = np.array([3.0, 1.0, 2.0, 0.5])
    none = np.zeros(4, np.bool_)
    assert least_slack_first(slack_s, none, none, 2) == [3, 1]


def test_next_units_and_reads_under_way_are_always_among_those_read_ahead() -> None:
    """The next units of streams take at most half of the places."""
    slack_s = np.array([5.0, 1.0, 6.0, 2.0, 7.0, 8.0])
    is_next = np.array([True, False, True, False, True, False])
    is_begun = np.zeros(6, np.bool_)
    assert least_slack_first(slack_s, is_next, is_begun, 4) == [1, 3, 0, 2]
    is_begun[5] = True
    assert least_slack_first(slack_s, is_next, is_begun, 4) == [1, 0, 2, 5]


def test_memory_is_divided_as_accesses_are_frequent() -> None:
    counts = AccessCounts()
    assert counts.low_part() == pytest.approx(0.1)  # nine in ten are assumed to be important
    counts.add(0, ACCESSES_MAX)
    assert counts.high + counts.low <= ACCESSES_MAX
    assert counts.low_part() > 0.9
    for _ in range(50):
        counts.add(ACCESSES_MAX, 0)
    assert counts.low_part() < 0.01


def test_a_watch_is_kept_as_long_as_a_stream_needs_it() -> None:
    watches = Watches()
    assert watches.add(7, "a", 0)
    assert not watches.add(7, "b", 256)  # the worker watches it already
    watches.remove("a", [(0, 7)])
    assert watches.take_unneeded().tolist() == []
    watches.remove("b", [(256, 7)])
    assert watches.is_watched(7)
    assert not watches.add(7, "a", 512)  # it is still watched
    watches.remove("a", [(512, 7)])
    assert watches.take_unneeded().tolist() == [7]
    assert not watches.is_watched(7)
