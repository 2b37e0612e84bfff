"""`Markers` of an epoch, and the `WatchedMarkers` of a stream."""

import numpy as np

from diesel_fs.mounts.prefetch.streams.markers import Markers, WatchedMarkers
from tests.rows import each_row


@each_row(
    ("length", "positions"),
    [(0, []), (1, [0]), (2, [0, 1]), (257, [0, 256]), (258, [0, 256, 257]), (513, [0, 256, 512])],
)
def test_every_256th_position_has_a_marker_and_the_last_one(
    length: int, positions: list[int]
) -> None:
    markers = Markers(length)
    numbers = range(len(markers.opened))
    assert [markers.position(number) for number in numbers] == positions
    assert [markers.number(position) for position in positions] == list(numbers)
    everywhere = np.arange(length, dtype=np.int32)
    assert np.flatnonzero(markers.are_at(everywhere)).tolist() == positions
    assert [position for position in range(length) if markers.has(position)] == positions


def test_a_marker_that_is_not_opened_is_waited_for() -> None:
    markers = Markers(1_000)  # at 0, 256, 512, 768 and 999
    assert markers.advance(100, 512) is None
    markers.opened[[0, 2]] = True
    assert markers.advance(600, 512) == 1
    assert markers.advance(256 + 512, 512) == 513, "the second is not waited for any more"
    markers.open_before(1_000)
    assert markers.advance(1_000, 512) == 769, "an open of the last file is still expected"
    markers.opened[-1] = True
    assert markers.advance(1_000, 512) == 1_000


def test_a_reported_position_opens_exactly_the_markers_before_it() -> None:
    markers = Markers(1_000)
    markers.open_at(np.array([700, 768], np.int32))
    markers.move_to(300)
    assert markers.opened.tolist() == [True, True, False, False, False]
    assert markers.done == 2
    markers.move_to(0)
    assert not markers.opened.any()
    markers.move_to(-5)  # the reader is in an epoch before
    assert markers.done == 0


@each_row(("unchanged", "kept"), [(0, 0), (1, 1), (256, 1), (257, 2), (999, 4)])
def test_markers_of_unchanged_positions_stay_opened(unchanged: int, kept: int) -> None:
    old, new = Markers(1_000), Markers(2_000)
    old.move_to(1_000)
    new.keep(old, unchanged)
    assert np.count_nonzero(new.opened) == new.done == kept
    shorter = Markers(10)
    shorter.keep(old, 9)
    assert shorter.opened.tolist() == [True, False]


def test_a_watch_is_needed_until_its_position_is_read_or_given_up() -> None:
    watched = WatchedMarkers()
    watched.add([(512, 7), (0, 3), (256, 5)])
    assert watched.take_unneeded(1) == [(0, 3)]
    assert watched.take_unneeded(1) == []
    watched.give_up(600)
    watched.give_up(300)
    assert watched.take_unneeded(1) == [(512, 7)]
    watched.add([(512, 7)])
    assert watched.take_unneeded(513) == [(256, 5), (512, 7)]
    assert watched.take_unneeded(1 << 40) == []
