"""`UnitsAhead` of a stream: which files it claims next."""

import numpy as np
import pytest

from diesel_fs.mounts.prefetch.streams.lateness import LATE_DECAY, Lateness
from diesel_fs.mounts.prefetch.streams.stream_tracker import StreamTracker
from diesel_fs.mounts.prefetch.streams.units import (
    MIXED_ENTRIES,
    PAGE_BYTES,
    URGENT_BYTES_MIN,
    Columns,
)
from diesel_fs.orders.plan import Epoch, Stream

from .one_stream import FILES, claim_next, tracker_of
from .simulated_kernel import START_S, N, make_planner, push_next, shuffled, stream

ORDER = list(range(512))  # eight chunks
SHARE_BYTES = FILES * PAGE_BYTES


def test_units_are_claimed_one_after_the_other() -> None:
    tracker = tracker_of(stream("a", ORDER, [7]))
    assert tracker.units.entries(3) == [], "they are not cut yet"
    assert tracker.units.frontier(SHARE_BYTES) == 0
    assert [each.tolist() for each in tracker.units.entries(2)] == [ORDER[:64], ORDER[64:128]]
    assert tracker.units.starts(2).tolist() == [0, 64]
    for start in range(0, 512, 64):
        assert claim_next(tracker) == ORDER[start : start + 64]
    assert claim_next(tracker) == [7]
    assert tracker.units.frontier(SHARE_BYTES) is None
    assert tracker.units.starts(2).tolist() == []


def test_units_that_the_reader_has_passed_are_skipped() -> None:
    tracker = tracker_of(stream("a", ORDER))
    tracker.units.frontier(SHARE_BYTES)
    tracker.claims.skipped = []
    tracker.reader.move_to(100, 1.0)
    assert claim_next(tracker) == ORDER[100:128]
    assert np.concatenate(tracker.claims.take_skipped()).tolist() == ORDER[:100]


def test_markers_of_skipped_units_are_not_waited_for() -> None:
    tracker = tracker_of(stream("a", ORDER, lag=512))
    tracker.reader.high, tracker.reader.spread = 300, 0
    assert tracker.units.frontier(SHARE_BYTES) == 256
    assert tracker.order.epochs[0].markers.opened.tolist() == [True, False, False]
    tracker.units.peek()  # leaves out 256 to 299
    assert tracker.order.epochs[0].markers.opened.tolist() == [True, True, False]


def test_the_markers_of_a_unit_are_watched() -> None:
    tracker = tracker_of(stream("a", ORDER, ORDER[::-1]))
    for _ in range(9):
        claim_next(tracker)
    tracker.reader.low = 1_024
    assert tracker.take_unwatched() == [(0, 0), (256, 256), (511, 511), (512, 511)]


def test_an_order_that_a_log_has_is_cut_into_larger_units() -> None:
    order = shuffled(1, FILES)
    tracker = tracker_of(stream("a", order), share_files=FILES // 4)
    assert claim_next(tracker, FILES // 4) == order[:MIXED_ENTRIES]
    tracker = tracker_of(stream("a", order))
    tracker.units.is_logged = lambda _: True
    assert claim_next(tracker) == order[:2_048]


def test_free_memory_gets_whole_chunks_of_a_random_order() -> None:
    """If it could hold more than a quarter of the epoch. Streams share it."""
    for part, others, by_chunk in ((0.2, 0, False), (0.4, 0, True), (0.4, 1, False)):
        planner = make_planner(N, part)
        for number in range(1 + others):
            planner.streams.announce(stream(str(number), shuffled(number)), START_S)
        assert (push_next(planner).chunk >= 0) == by_chunk, (part, others)


def test_a_share_that_changes_much_cuts_units_anew() -> None:
    tracker = tracker_of(stream("a", ORDER))
    tracker.units.frontier(SHARE_BYTES)
    tracker.give_share(SHARE_BYTES * 9 // 10)
    assert tracker.order.epochs[0].queue is not None
    tracker.give_share(SHARE_BYTES // 2)
    assert tracker.order.epochs[0].queue is None


def test_a_stream_that_has_its_share_gets_no_more() -> None:
    tracker = tracker_of(stream("a", ORDER), share_files=128)
    for has_left in (True, True, False):
        tracker.units.frontier(128 * PAGE_BYTES)
        assert tracker.units.has_share_left() == has_left
        tracker.units.claim(tracker.units.peek())


def test_urgent_units_are_parts_of_later_ones() -> None:
    """The next files in the reader's order, if they are large."""
    pages = URGENT_BYTES_MIN // PAGE_BYTES
    columns = Columns(np.arange(2_048, dtype=np.int32) % 32, np.full(2_048, pages, np.uint32), 32)
    epoch = Epoch(0, np.arange(2_048, dtype=np.uint32))
    tracker = StreamTracker.of(columns, Stream("a", (epoch,)), 0.0)
    share_bytes = 4_096 * URGENT_BYTES_MIN
    tracker.give_share(share_bytes)
    tracker.units.frontier(share_bytes)
    urgent = tracker.units.urgent(1.0)
    assert urgent is not None
    assert urgent.entries.tolist() == list(range(MIXED_ENTRIES))
    tracker.units.claim(urgent)
    assert tracker.units.frontier(share_bytes) == 0
    assert tracker.units.peek().entries.tolist() == list(range(256, 2_048, 32))
    assert tracker_of(stream("a", ORDER)).reader.rate == 0
    small = tracker_of(stream("a", ORDER))
    small.units.frontier(SHARE_BYTES)
    assert small.units.urgent(1.0) is None


def test_a_unit_that_has_the_next_files_is_not_made_urgent() -> None:
    """In a random order, a mixed unit has the next files anyway, and later ones are read ahead."""
    pages = URGENT_BYTES_MIN // PAGE_BYTES
    columns = Columns(np.arange(2_048, dtype=np.int32) % 64, np.full(2_048, pages, np.uint32), 64)
    epoch = Epoch(0, np.array(shuffled(1, 2_048), np.uint32))
    tracker = StreamTracker.of(columns, Stream("a", (epoch,)), 0.0)
    share_bytes = 512 * URGENT_BYTES_MIN
    tracker.give_share(share_bytes)
    for _ in range(2):
        tracker.units.frontier(share_bytes)
        assert tracker.units.urgent(1.0) is None
        tracker.units.claim(tracker.units.peek())


def test_late_pushes_correct_the_predicted_costs() -> None:
    lateness = Lateness()
    costs = np.array([[0.1, 0.5, 100.0]])
    assert lateness.added_to(costs) is costs
    lateness.note(0.6, 1.6, 5.0, 100)  # a second late
    assert lateness.added_to(costs) is costs, "one alone may be the machine's"
    lateness.note(0.6, 1.6, 5.0, 100)
    lateness.note(0.6, 0.0, 5.0, 100)  # the contents were there in time
    assert lateness.s_per_byte == pytest.approx(0.01 * LATE_DECAY)
    assert lateness.added_to(costs).tolist() == [pytest.approx([0.1, 0.5 + 0.95, 100.0])]
    for _ in range(2):
        lateness.note(2.0, 0.0, 0.1, 100)  # earlier than predicted
    assert lateness.added_to(costs)[0, 1] == 0.0
