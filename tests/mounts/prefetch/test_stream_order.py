"""`StreamOrder`: the epochs of a stream one behind the other, and the frontier in them."""

import numpy as np
import pytest

from diesel_fs.orders.plan import Epoch, Stream
from tests.rows import each_row

from .one_stream import claim_next, order_of, tracker_of
from .simulated_kernel import START_S, Machine, make_planner, push_next, stream


@each_row(
    ("high", "frontier_index", "found"),
    [
        (0, 0, (1, 1)),
        (0, 1, (1, 1)),
        (3, 0, (1, 256 + 4)),  # behind the reader
        (3, 1, (4, 1)),
        (9, 1, (4, 256 + 10)),
    ],
)
def test_the_nearest_position_of_an_entry(
    high: int, frontier_index: int, found: tuple[int, int]
) -> None:
    """A position behind the reader is farther than any that is ahead by one marker."""
    order = order_of([10, 11, 12], [13, 11, 10])
    order.frontier_index = frontier_index
    assert order.nearest_position(11, high) == found
    assert order.nearest_position(999, high)[0] == -1


def test_the_next_use_of_entries_is_in_the_epoch_of_the_frontier_or_the_next() -> None:
    order = order_of([10, 11], [12, 10], [13])
    entries = np.array([10, 11, 12, 13], np.uint32)
    assert order.next_use(entries, 1).tolist() == pytest.approx([2, 0, 1, np.inf])
    order.frontier_index = 1
    assert order.next_use(entries, 1).tolist() == pytest.approx([2, np.inf, 1, 3])


def test_an_epoch_that_was_read_is_removed_and_positions_stay() -> None:
    order = order_of([1, 2], [3, 4, 5])
    order.frontier_index = 1
    order.remove_first()
    assert [(state.base, state.end) for state in order.epochs] == [(2, 5)]
    assert [epoch.number for epoch in order.stream.epochs] == [1]
    assert order.frontier_index == 0
    order.extend(order.stream.extended([Epoch(1, np.array([6])), Epoch(2, np.array([7]))]))
    assert [(state.base, state.end) for state in order.epochs] == [(2, 6), (6, 7)]
    assert order.end == 7


def test_a_longer_last_epoch_keeps_its_claims() -> None:
    order = order_of([1, 2])
    order.epochs[0].claimed[:] = True
    order.frontier_index = 1
    order.extend(order.stream.extended([Epoch(0, np.array([3]))]))
    assert order.epochs[0].claimed.tolist() == [True, True, False]
    assert order.frontier_index == 0, "the new entry is claimed next"


def test_other_entries_of_an_epoch_move_the_epochs_behind_it() -> None:
    order = order_of([1, 2, 3], [4])
    order.epochs[0].claimed[:] = True
    changed = order.stream.replaced(Epoch(0, np.array([9, 8, 7, 6])), 1)
    order.replace(order.epochs[0], changed, 1)
    assert order.epochs[0].epoch.entries.tolist() == [1, 9, 8, 7, 6]
    assert order.epochs[0].claimed.tolist() == [True, False, False, False, False]
    assert [(state.base, state.end) for state in order.epochs] == [(0, 5), (5, 6)]


def test_files_are_fetched_up_to_the_frontier_or_the_reader() -> None:
    tracker = tracker_of(stream("a", list(range(128)), [1, 2]))
    order = tracker.order
    assert order.fetched_up_to(0) == (0, 0)
    claim_next(tracker)
    assert order.fetched_up_to(0) == (0, 64)
    assert order.fetched_up_to(100) == (0, 100)
    assert order.fetched_up_to(129) == (1, 1)
    assert order.fetched_up_to(130) == (1, 2)
    assert order_of().fetched_up_to(0) == (0, 0)


def test_no_marker_is_found_outside_the_epochs() -> None:
    order = order_of([1, 2], [3])
    order.remove_first()
    assert order.marker_at(0) is None
    assert order.marker_at(3) is None
    found = order.marker_at(2)
    assert found is not None
    assert found[0] is order.epochs[0].markers


# A program may announce each epoch by itself, after it has announced it as the next one


ENTRIES = 1_024
BOTH = [list(range(ENTRIES)), list(range(ENTRIES - 1, -1, -1))]


def epoch_of(number: int, entries: list[int]) -> Epoch:
    return Epoch(number, np.array(entries))


def read_to_the_second_epoch(*, tentative: bool = False, lag: int = 0) -> Machine:
    """A machine with memory for all, whose reader is at the end of the first epoch of two."""
    machine = Machine(make_planner(ENTRIES, 2), ENTRIES)
    machine.planner.streams.announce(
        stream("a", *BOTH, tentative=tentative, lag=lag), machine.now_s
    )
    machine.run_until_idle()
    for position in range(0, ENTRIES if not tentative else 0, 64):
        machine.now_s += 0.1
        machine.planner.streams.progress("a", position, machine.now_s, epoch=0)
    return machine


def test_the_announcement_of_a_foreseen_epoch_goes_on_with_the_stream() -> None:
    """Claims and the rate of the reader stay, the epochs before end."""
    machine = read_to_the_second_epoch(lag=64)
    planner = machine.planner
    tracker = planner.streams.trackers["a"]
    rate, pushed = tracker.reader.rate, machine.pushed
    assert rate > 0
    computed = epoch_of(1, BOTH[1])
    planner.streams.announce(Stream("a", (computed,), lag_entries=64), machine.now_s)
    assert planner.streams.trackers["a"] is tracker
    stats = planner.stats()["streams"][0]
    assert (stats["epoch"], stats["position"], stats["frontier"]) == (1, 0, ENTRIES)
    assert (planner.resident_set.claims >= 1).all()
    assert tracker.reader.rate == pytest.approx(rate, rel=0.1)
    planner.streams.progress("a", 300, machine.now_s, epoch=1)  # no worker is in the first one
    machine.run_until_idle()
    assert [*planner.views.plan["a"].epochs] == [computed]
    assert machine.pushed == pushed


@each_row(
    ("epochs", "lag", "tentative"),
    [
        ([epoch_of(1, BOTH[0])], 64, False),
        ([epoch_of(1, BOTH[1][:-1])], 64, False),
        ([epoch_of(2, BOTH[1])], 64, False),
        ([epoch_of(0, BOTH[0])], 64, False),
        ([epoch_of(1, BOTH[1])], 128, False),
        ([epoch_of(1, BOTH[1])], 64, True),
        ([epoch_of(1, BOTH[1]), epoch_of(2, BOTH[0])], 64, False),
        ([], 64, False),
    ],
    ids=[
        "other entries", "fewer entries", "another number", "not the last epoch", "another lag",
        "a tentative stream", "several epochs", "no epoch",
    ],
)  # fmt: skip
def test_any_other_announcement_replaces_the_stream(
    epochs: list[Epoch], lag: int, tentative: bool
) -> None:
    machine = read_to_the_second_epoch(lag=64)
    planner = machine.planner
    tracker = planner.streams.trackers["a"]
    announced = Stream("a", tuple(epochs), tentative, lag)
    assert not tracker.order.foresaw(announced)
    planner.streams.announce(announced, machine.now_s)
    new = planner.streams.trackers["a"]
    assert new is not tracker
    assert (new.reader.high, new.reader.rate, new.order.stream) == (0, 0.0, announced)
    assert not planner.resident_set.claims.any()


def test_a_tentative_stream_foresees_nothing() -> None:
    machine = read_to_the_second_epoch(tentative=True)
    tracker = machine.planner.streams.trackers["a"]
    assert not tracker.order.foresaw(stream("a", *BOTH).extended([])), "several epochs"
    assert not tracker.order.foresaw(Stream("a", (epoch_of(1, BOTH[1]),)))


def test_an_epoch_that_was_announced_alone_goes_on_when_it_is_announced_again() -> None:
    """The reader begins it again, if it has read some of it."""
    planner = make_planner(ENTRIES, 2)
    planner.streams.announce(stream("a", BOTH[0]), START_S)
    push_next(planner)
    tracker = planner.streams.trackers["a"]
    planner.streams.progress("a", 500, START_S + 1)
    planner.streams.announce(stream("a", BOTH[0]), START_S + 2)
    assert planner.streams.trackers["a"] is tracker
    assert tracker.reader.high == 0
